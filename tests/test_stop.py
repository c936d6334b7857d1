"""Stop rules: when each of them ends a run, and that a resumed run counts what was done before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import nhgd
from nhgd.stop import AbstractStop, Budget, Gradients, Interrupted, Plateau, Run, Spent, Steps, gradient_equivalents
from nhgd.task import Quadratic


def rows(*losses: float) -> list[dict[str, Any]]:
    return [{"step": i + 1, "outer_loss": loss} for i, loss in enumerate(losses)]


@dataclass(frozen=True)
class Below(AbstractStop[float]):
    """A rule of a user's own: the outer loss has been below a level once."""

    name: ClassVar[str] = "below"
    level: float

    def init(self) -> float:
        return float("inf")

    def update(self, state: float, row: Mapping[str, Any]) -> float:
        return min(state, row["outer_loss"])

    def holds(self, spent: Spent, state: float) -> bool:
        return state < self.level


def test_the_first_rule_that_holds_is_the_result():
    run = Run([Steps(3), Budget(10.0)], first=5, began=1.0)
    assert run.ended_by(Spent(steps=2, seconds=9.0)) is None
    assert run.ended_by(Spent(steps=3, seconds=11.0)) == "steps"
    assert run.ended_by(Spent(steps=2, seconds=10.0)) == "budget"
    assert run.ended_by(Spent(steps=2, seconds=9.0, requested=True)) == "stopped"
    assert run.fraction(Spent(steps=1, seconds=5.0)) == 0.5


@pytest.mark.parametrize(
    ("losses", "stalled"),
    [
        ((1.0, 0.5, 0.4), 0),
        ((1.0, 1.0, 1.0), 2),
        ((1.0, 0.99991), 1),  # a fall that does not count
        ((1.0, 0.99989), 0),
        ((-1.0, -1.0002), 0),
        ((0.0, 0.0), 1),
    ],
)
def test_a_plateau_counts_steps_without_a_fall_that_matters(losses, stalled):
    rule = Plateau(patience=100)
    state = rule.init()
    for row in rows(*losses):
        state = rule.update(state, row)
    assert state.steps == stalled


def test_a_run_that_was_kept_goes_on_with_its_rules_and_what_they_had_seen():
    history = rows(9.0, 1.0, 1.0, 1.0)
    run = Run([Steps(10), Plateau(3)], first=1, began=0.5)
    for row in history[1:]:
        run.note(row)
    again = Interrupted.read(run.kept()).resumed([], history)
    assert again.rules == run.rules
    assert again._states == run._states
    assert (again.first, again.began) == (1, 0.5)


def test_a_rule_of_a_users_own_ends_a_run_and_counts_what_was_done_before_a_resume(tmp_path):
    def made(**settings: Any) -> nhgd.Solver:
        instance = Quadratic.preset("quick").build(0, torch.device("cpu"))
        start = nhgd.Solver if not settings.pop("resume", False) else nhgd.Solver.resume
        where = (settings.pop("checkpoint"),) if start is not nhgd.Solver else ()
        return start(*where, instance.problem, instance.inner_data, instance.outer_data, **settings)

    free = made(method="aid").run(steps=20)
    level = free.history[7]["outer_loss"] + 1e-12
    first = next(row["step"] for row in free.history if row["outer_loss"] < level)
    kept = made(method="aid", checkpoint=tmp_path / "a").run(stop=[Below(level)])
    assert (kept.result, kept.stats["steps"]) == ("below", first)
    resumed = made(resume=True, checkpoint=tmp_path / "a")
    with pytest.raises(nhgd.InputError, match="cannot store the stop rule below of the interrupted run"):
        resumed.run()
    assert resumed.run(stop=[Below(level)]).stats["steps"] == first


def test_a_rule_is_refused_that_could_never_hold():
    for rule, value in ((Steps, 0), (Plateau, 0), (Budget, 0.0), (Budget, float("nan"))):
        with pytest.raises(nhgd.InputError):
            rule(value)
    solver = Quadratic.preset("quick").build(0, torch.device("cpu")).start("aid")
    with pytest.raises(nhgd.InputError, match="run: stop must be"):
        solver.run(stop=["soon"])


def test_a_budget_of_gradients_counts_from_the_start_of_its_run_also_after_a_resume(tmp_path):
    def begin(**settings: Any) -> nhgd.Solver:
        return Quadratic.preset("quick").build(0, torch.device("cpu")).start("soba", **settings)

    with begin() as solver:
        per_step = gradient_equivalents(solver.step())
        assert solver.run(stop=[Gradients(3 * per_step)]).stats["steps"] == 4
        assert solver.run(stop=[Gradients(2.5 * per_step)]).stats["steps"] == 7

    class Power(Exception):
        pass

    def fail(row: Any) -> None:
        if row["step"] == 5:
            raise Power

    with begin(checkpoint=tmp_path, checkpoint_every=1) as solver:
        solver.run(steps=2)
        solver.on_step.append(fail)
        with pytest.raises(Power):
            solver.run(stop=[Gradients(6 * per_step)])
    with begin(checkpoint=tmp_path, resume=True) as solver:
        assert solver.run().stats["steps"] == 8
