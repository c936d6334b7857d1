"""Which runs are said to get nowhere, and which are not."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import nhgd
from nhgd._stagnation import StagnationWarning, Trajectory
from nhgd.task import Quadratic
from tests.commands import invoke, strict_json

CPU = torch.device("cpu")


def quadratic(seed: int, at_the_optimum: bool = False, **settings: Any) -> Any:
    instance = Quadratic.preset("quick").with_settings(settings).build(seed, CPU)
    if at_the_optimum:
        with torch.no_grad():
            instance.problem.v.given.copy_(instance.answers.v_star())
        instance.solve_inner()
    return instance


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("batch", [None, 200], ids=["all data", "batches"])
def test_an_outer_step_that_moves_nothing_is_said_once(seed, batch):
    """theta starts cold, so that at first the outer loss changes by itself."""
    instance = quadratic(seed, batch=batch, samples=400)
    with pytest.warns(StagnationWarning, match=r"has not fallen: .* v moved by .*e-0\d.* raise outer_lr") as said:
        solution = instance.start("aid-cg", outer_lr=1e-7).run(steps=40)
    assert len(said) == 1
    assert solution.stats["stagnation"] == str(said[0].message)


def misled() -> tuple[nhgd.Bilevel, list[torch.Tensor]]:
    """A problem whose hypergradient has the other sign where the identity stands for the inverse of the Hessian.

    With H = [[1, c], [c, 1]] and d2_{theta,v} l = -a: grad Phi = a^T H^{-1} u, and a^T u < 0 < a^T H^{-1} u for these.
    """
    H = torch.tensor([[1.0, 0.9], [0.9, 1.0]], dtype=torch.float64)
    a, u = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([-0.5, -1.0], dtype=torch.float64)
    assert float(a @ u) < 0 < float(a @ torch.linalg.solve(H, u))
    problem = nhgd.Bilevel(
        lambda theta, v, x: (0.5 * theta @ H @ theta - v * (a @ theta)).expand(len(x)),
        lambda theta, v, x: 10 + u @ theta,
        torch.zeros(2, dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
    )
    return problem, [torch.zeros(1)]


def test_a_method_that_goes_far_for_nothing_is_said():
    problem, data = misled()
    with pytest.warns(StagnationWarning, match=r"though v moved by .* Try another method"):
        solution = nhgd.Solver(problem, data, data, method="t1t2", inner_lr=0.5, outer_lr=0.1).run(steps=40)
    assert "another method" in solution.stats["stagnation"]
    problem, data = misled()
    right = nhgd.Solver(problem, data, data, method="aid-cg", inner_lr=0.5, outer_lr=0.1).run(steps=40)
    assert right.stats["stagnation"] is None


@pytest.mark.parametrize("method", ["aid-cg", "soba"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("batch", [None, 20], ids=["all data", "batches"])
def test_a_run_that_starts_at_the_optimum_is_not_said(method, seed, batch):
    """Warnings are errors here."""
    solution = quadratic(seed, at_the_optimum=True, batch=batch).start(method, seed=seed, outer_lr=0.1).run(steps=60)
    assert solution.stats["stagnation"] is None


@pytest.mark.parametrize("outer_lr", [1e-7, 0.01])
def test_batches_about_an_optimum_are_noise_however_short_the_steps(outer_lr):
    for seed in range(3):
        instance = quadratic(seed, at_the_optimum=True, batch=10)
        assert instance.start("soba", seed=seed, outer_lr=outer_lr).run(steps=100).stats["stagnation"] is None


def test_a_short_run_is_not_judged():
    assert quadratic(0).start("aid-cg", outer_lr=1e-7).run(steps=29).stats["stagnation"] is None


def test_a_run_that_a_box_holds_is_not_said():
    """The slope stays what it is where v may not go."""
    instance = quadratic(0)
    best = instance.answers.v_star()
    low, high = float(best.min()), float(best.max())
    assert low < high
    for box in ((-1e-9, 1e-9), (low, low + 1e-6)):
        made = quadratic(0)
        assert made.start("aid-cg", project_v=box).run(steps=60).stats["stagnation"] is None


def test_a_second_run_is_judged_by_its_own_steps():
    """It goes on where the first has arrived."""
    running = quadratic(0).start("aid-cg")
    assert running.run(steps=50).stats["stagnation"] is None
    assert running.run(steps=50).stats["stagnation"] is None


def test_noise_does_not_hide_a_fall_nor_make_one():
    generator = torch.Generator().manual_seed(0)

    def remark(fall: float, noise: float) -> str | None:
        trajectory = Trajectory(torch.zeros(4))
        for k in range(1, 101):
            loss = 1 - fall * k / 100 + noise * float(torch.randn((), generator=generator))
            trajectory.note(torch.full((4,), 1e-5 * k), {"outer_loss": loss, "hypergradient_norm": 1.0})
        return trajectory.remark()

    assert remark(0.1, 0.02) is None
    assert remark(0.1, 0.0) is None
    assert remark(0.0, 0.02) is not None
    assert remark(1e-4, 0.0) is not None
    assert remark(0.0, 0.5) is None  # a fall could not be told from this


def test_the_command_line_says_it():
    args = ("run", "quadratic", "--preset", "quick", "--set", "outer_lr=1e-7", "--steps", "40", "--json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = invoke(*args)
    assert result.exit_code == 0
    assert result.stderr.startswith("Warning: The outer loss has not fallen")
    assert strict_json(result.stdout)["stagnation"] in result.stderr
    assert strict_json(invoke("run", "quadratic", "--preset", "quick", "--json").stdout)["stagnation"] is None
