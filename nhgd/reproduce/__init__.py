"""The paper's theorems and tables as experiments that one command runs again.

nhgd reproduce theory --quick --out results/theory
python -m nhgd.reproduce theory --quick --out results/theory     the same where torch and NumPy are all there is
"""

from nhgd.reproduce.command import EXPERIMENTS as EXPERIMENTS
from nhgd.reproduce.command import Request as Request
from nhgd.reproduce.command import reproduce as reproduce
