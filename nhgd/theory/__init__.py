"""The paper's theory as functions: step sizes, conditions, bounds and what they prescribe.

    c = nhgd.theory.Constants(mu=0.1, L=1.0, R=1.0, C_1=0.5, d_2=10)
    nhgd.theory.T_0(c, delta=0.1), nhgd.theory.inverse_error(c, T=10**9, delta=0.1)

The bounds are worst cases over all problems with these constants; real runs do far better. What the theory is good for
is how things scale: with T, with K, with delta.
"""

from nhgd.theory.constants import Constants as Constants
from nhgd.theory.estimate import Estimate as Estimate
from nhgd.theory.estimate import estimated as estimated
from nhgd.theory.estimate import linear_softmax as linear_softmax
from nhgd.theory.inner import T_0 as T_0
from nhgd.theory.inner import c_prime as c_prime
from nhgd.theory.inner import cross_error as cross_error
from nhgd.theory.inner import eta as eta
from nhgd.theory.inner import final_cross_error as final_cross_error
from nhgd.theory.inner import gamma as gamma
from nhgd.theory.inner import inverse_error as inverse_error
from nhgd.theory.inner import misspecification as misspecification
from nhgd.theory.inner import sgd_error as sgd_error
from nhgd.theory.outer import T_1 as T_1
from nhgd.theory.outer import L_v as L_v
from nhgd.theory.outer import Lambda_1 as Lambda_1
from nhgd.theory.outer import Lambda_2 as Lambda_2
from nhgd.theory.outer import Prescription as Prescription
from nhgd.theory.outer import T_hat as T_hat
from nhgd.theory.outer import alpha as alpha
from nhgd.theory.outer import b as b
from nhgd.theory.outer import hypergradient_error as hypergradient_error
from nhgd.theory.outer import prescribed as prescribed
from nhgd.theory.outer import psi as psi
from nhgd.theory.outer import stationarity as stationarity
