"""The exam every algorithm takes: it ends where it must, repeats itself bit for bit, and does not grow."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

import nhgd
from nhgd.algorithm import ALGORITHMS
from nhgd.task import L2, Cleaning, Quadratic
from tests import catalogue
from tests.catalogue import AlgorithmCase

CPU = torch.device("cpu")
CASES = pytest.mark.parametrize("case", catalogue.ALGORITHMS, ids=lambda case: case.name)


def run(case: AlgorithmCase, instance, steps, seed=0, **settings):
    chosen = {**instance.solver, **settings}
    solver = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, case.make(), seed=seed, **chosen)
    return solver.run(steps=steps)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_every_algorithm_is_examined():
    assert {case.make().name for case in catalogue.ALGORITHMS} == set(ALGORITHMS)


@CASES
def test_full_batches_end_where_the_algebra_says(case):
    instance = Quadratic.preset("quick").build(0, CPU)
    solution = run(case, instance, case.steps, **case.settings)
    assert relative_error(solution.v, case.end(instance)) < case.tol


def test_the_biased_ends_are_not_the_optimum():
    """So that the exam above tells a biased algorithm from a consistent one."""
    instance = Quadratic.preset("quick").build(0, CPU)
    for case in catalogue.ALGORITHMS:
        if case.end is not catalogue.v_star:
            assert relative_error(case.end(instance), instance.extra.v_star()) > 0.01


@CASES
def test_noisy_batches_end_near_it(case):
    """Seeds are fixed. Over seeds 0 to 7 the error stayed below half of what is allowed.

    So, with 95 % confidence, a fresh seed exceeds even that half with a probability below 0.32; the seed of the test is one
    of the eight. The levels are wide: they catch a wrong sign, a lost factor or a divergence, not a small bias, which the
    full batches above do.
    """
    if case.noisy is None:
        return
    settings, steps, level = case.noisy
    instance = Quadratic.preset("quick").with_settings({"batch": 20}).build(0, CPU)
    solution = run(case, instance, steps, **{**case.settings, **settings})
    assert relative_error(solution.v, case.end(instance)) < level


@CASES
@pytest.mark.parametrize(
    "task",
    [L2.preset("quick"), Cleaning.preset("quick").with_settings({"weights": "clip", "momentum": 0.0})],
    ids=lambda task: task.name,
)
def test_lowers_the_outer_loss_of_real_problems(case, task):
    instance = task.build(0, CPU)
    history = run(case, instance, 25).history
    first, last = history[0]["outer_loss"], sum(row["outer_loss"] for row in history[-3:]) / 3
    assert last < first


@CASES
def test_same_seed_same_run_bit_for_bit(case):
    def found(seed):
        instance = Quadratic.preset("quick").with_settings({"batch": 20}).build(0, CPU)
        return run(case, instance, 6, seed=seed, **case.settings).v.clone()

    assert torch.equal(found(3), found(3))


def live_bytes() -> int:
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor):  # isinstance would ask lazy modules for their class
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


# One line is enough for aid: its inverses keep nothing between outer steps.
@pytest.mark.parametrize(
    "case",
    [case for case in catalogue.ALGORITHMS if case.make().name != "aid" or not case.label],
    ids=lambda case: case.name,
)
def test_memory_does_not_grow_with_outer_steps(case):
    instance = Quadratic.preset("quick").with_settings({"batch": 20}).build(0, CPU)
    chosen = {**instance.solver, **case.settings, "inner_steps": 2}
    solver = nhgd.Solver(instance.problem, instance.inner_data, instance.outer_data, case.make(), **chosen)
    solver.run(steps=40)
    before = live_bytes()
    solver.run(steps=200)
    assert live_bytes() <= before + 1000
