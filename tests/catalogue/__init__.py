"""What every member of a kind is examined with. One line in its file enrols a newcomer in every test of its kind."""
# ruff: noqa: F401  (names for the tests)

from tests.catalogue.algorithms import ALGORITHMS, AlgorithmCase, noisy_instance
from tests.catalogue.ends import ends_with, neumann_matrix, penalty_matrix, unrolled_matrix, v_star
from tests.catalogue.executors import EXECUTORS, ExecutorCase
from tests.catalogue.hypergradients import HYPERGRADIENTS, HypergradientCase
from tests.catalogue.inverses import INVERSES, InverseCase
from tests.catalogue.problems import *  # noqa: F403  # each problem by its name
from tests.catalogue.tasks import TASKS, TaskCase
