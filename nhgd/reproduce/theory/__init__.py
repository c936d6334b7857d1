"""The paper's theorems, measured where their assumption on the model holds."""

from nhgd.reproduce.theory.experiment import Effort as Effort
from nhgd.reproduce.theory.experiment import theory as theory
