"""Any inverse against the exact hypergradient at several points of a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from nhgd._check import compared, named
from nhgd._diagnosis import flat, hypergradient_along, inner_distance
from nhgd._progress import Tick, bar
from nhgd._reference import reference
from nhgd._solution import Row, Solution
from nhgd._solver import Solver
from nhgd._surroundings import library_settings
from nhgd._validation import check_seed, validated
from nhgd.data.batch import Batch, move
from nhgd.data.loader import inner_batches, one_batch, reiterable
from nhgd.errors import InputError, InverseWarning
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse import AbstractInverse, Learned
from nhgd.inverse._learned.learning import learn
from nhgd.inverse.capabilities import follows_horizon, label
from nhgd.oracle import Oracle

OWN = "{} of the run"


@dataclass(frozen=True)
class AlongReport:
    """What `check_along` found.

    Attributes:
        rows: one dict for each point and inverse: step (the outer step), inverse, cosine and relative_error to the
            exact hypergradient there, cosine_damped to that of the damped system, residual |H x - u| / |u|,
            inner_distance |H^+ g| / |theta|, damping (the run's own at this point, 0 for none), and error: the sentence
            of an inverse that refused, else None. Unknown values are None.
        reference: how the exact hypergradients were made.
        solution: of the run, which the examination does not change.
    """

    rows: list[dict[str, Any]]
    reference: str
    solution: Solution

    def as_dict(self) -> dict[str, Any]:
        """The numbers, ready for JSON."""
        return {"rows": self.rows, "reference": self.reference}

    def __str__(self) -> str:
        head = ("step", "inverse", "cosine", "rel. error", "cos. damped", "residual", "distance", "damping")
        lines = [f"reference: {self.reference}", "{:>6}  {:<28}{:>9}{:>12}{:>13}{:>11}{:>11}{:>10}".format(*head)]
        for row in self.rows:
            if row["error"]:
                continue
            forms = {"cosine": "9.4f", "relative_error": "12.2e", "cosine_damped": "13.4f", "residual": "11.1e"}
            forms |= {"inner_distance": "11.1e", "damping": "10.1e"}
            cells = "".join(_cell(row[key], form) for key, form in forms.items())
            lines.append(f"{row['step']:>6}  {row['inverse']:<28}{cells}")
        return "\n".join([*lines, *self.refusals])

    @property
    def refusals(self) -> list[str]:
        """What inverses said that refused, once each."""
        return list(dict.fromkeys(f"{row['inverse']}: {row['error']}" for row in self.rows if row["error"]))


@validated
def check_along(
    solver: Solver,
    inner_batch: Batch,
    outer_batch: Batch,
    steps: int,
    points: int = 5,
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None = None,
    inner_data: Iterable[Batch] | None = None,
    learn_from: Iterable[Batch] | None = None,
    dense_below: int = 2000,
    seed: int = 0,
    progress: bool | None = None,
) -> AlongReport:
    """Run a solver, and compare inverses with the exact hypergradient after some of its outer steps.

    A point is where the run itself takes its hypergradient: theta at the end of the inner loop of the outer step, with
    v as in that loop. At each, with H the inner Hessian and u the outer gradient in theta:

        cosine, relative_error    with grad_v f - (d2_{theta,v} l)^T H^+ u
        cosine_damped             with the same of (H + damping I)^{-1} u, the target of a run with this horizon

    The row "NAME of the run" is the inverse that the run has learnt, with the run's current statistics, its damping,
    and the corrections of its horizon. All others learn afresh at the point; those whose damping is "auto" solve with
    the run's. A row of the same NAME shows what the age of the statistics costs. The points are 1, `steps` and others
    in geometric progression: most changes at the start.

    Args:
        solver: a `Solver`, new or resumed, in one process. It takes the steps that `run(steps=steps)` would take, on
            the same numbers.
        inner_batch, outer_batch: where the objectives are taken: one batch each.
        steps: outer steps.
        points: how many are examined.
        inverses: names or objects, besides the run's own; default: all known ones, the dense solve only up to D = 500.
        inner_data: batches over which the exact products run, in place of inner_batch.
        learn_from: batches that inverses learn from at a point, if others.
        dense_below, seed, progress: as of `check`.

    >>> import nhgd, torch
    >>> problem = nhgd.Bilevel(
    ...     inner=lambda theta, v, x: (x @ theta - v).square(),
    ...     outer=lambda theta, v, x: (theta - 1).square().sum(),
    ...     theta=torch.zeros(2, dtype=torch.float64), v=torch.zeros((), dtype=torch.float64), l2=0.1)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    >>> report = check_along(nhgd.Solver(problem, [x], [x]), x, x, steps=9, points=3, inverses=["cg"])
    >>> [(row["step"], row["inverse"]) for row in report.rows][:4]
    [(1, 'fisher_window of the run'), (1, 'cg'), (3, 'fisher_window of the run'), (3, 'cg')]
    """
    check_seed(seed)
    at = spread(_remaining(solver, steps), points)
    looking = _Probe(solver, inner_batch, outer_batch, inverses, inner_data, learn_from, dense_below, seed)
    first = solver.loop.clock.k
    with bar("check", progress) as tick:
        with looking.along([first + step for step in at], tick):
            solution = solver.run(steps=steps, progress=False)
        tick(1.0, "")
    return AlongReport(looking.rows, looking.method, solution)


def spread(steps: int, points: int) -> list[int]:
    """The first of `steps`, the last, and others between them in geometric progression, as far as integers allow.

    >>> spread(100, 5), spread(6, 4), spread(9, 1)
    ([1, 3, 10, 32, 100], [1, 2, 3, 6], [9])
    """
    if points < 1:
        raise InputError(f"points must be a whole number of at least 1, got {points}.")
    if points > steps:
        raise InputError(
            f"A run of {steps} outer steps does not have {points} points to examine. Ask for at most {steps}, or for"
            " more steps."
        )
    found: list[int] = []
    for i in range(points):
        wanted = round(steps ** (i / (points - 1))) if points > 1 else steps
        found.append(max(wanted, found[-1] + 1 if found else 1))
    return found


def _remaining(solver: Solver, steps: int) -> int:
    """Outer steps that `run(steps=...)` would take from here."""
    if steps < 1:
        raise InputError(f"steps must be a whole number of at least 1, got {steps}.")
    executor = solver.executor
    if executor.group.serves or max(executor.group.team.size, executor.traffic.processes) > 1:
        raise InputError(
            f"A run can be examined in one process only, and {executor.name} execution has several. Use"
            " execution='inline'."
        )
    remaining = steps - solver.continued
    if remaining < 1:
        raise InputError(f"The interrupted run has already taken {solver.continued} outer steps. Ask for more.")
    return remaining


class _Probe:
    """Compares inverses at the current point of a run, and leaves the run unchanged."""

    def __init__(
        self,
        solver: Solver,
        inner_batch: Batch,
        outer_batch: Batch,
        inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None,
        inner_data: Iterable[Batch] | None,
        learn_from: Iterable[Batch] | None,
        dense_below: int,
        seed: int,
    ) -> None:
        problem = solver.problem
        device = problem.theta.device
        self._solver, self._problem, self._seed, self._dense_below = solver, problem, seed, dense_below
        self._batches = inner_batches(inner_batch, inner_data, device)
        taught = (
            self._batches if learn_from is None else [move(b, device) for b in reiterable(learn_from, "learn_from")]
        )
        self._training_batches = taught
        self._outer_batch = move(one_batch(outer_batch, "outer_batch"), device)
        problem.validate(self._batches[0], self._outer_batch)
        self._chosen = named(inverses, problem.theta.numel)
        self.rows: list[dict[str, Any]] = []
        self.method = ""

    @contextmanager
    def along(self, steps: Sequence[int], tick: Tick) -> Iterator[None]:
        """A context in which the solver is examined after these outer steps."""
        solver = self._solver
        first, last = solver.loop.clock.k, steps[-1]
        before = self._ahead()

        def watch(row: Row) -> None:
            nonlocal before
            done = (row["step"] - first) / (last - first)
            tick(done, f"step {row['step']}")
            if row["step"] in steps:
                with (
                    solver.loop.computing(),
                    library_settings(),
                    solver.loop.temporarily_at(self._problem.theta.flat(), before.v),
                ):
                    self._look(row, before.adjoint, lambda words: tick(done, f"step {row['step']}: {words}"))
            if row["step"] + 1 in steps:
                before = self._ahead()

        solver.on_step.append(watch)
        try:
            yield
        finally:
            solver.on_step.remove(watch)

    def _ahead(self) -> _Ahead:
        warm = getattr(self._solver.algorithm, "warm_solve", True)
        adjoint = getattr(self._solver.state, "adjoint", None) if warm else None
        return _Ahead(self._problem.v.flat(), None if adjoint is None else adjoint.clone())

    def _look(self, row: Row, start: Tensor | None, say: Callable[[str], None]) -> None:
        """One row for each inverse at the current point."""
        own = self._solver.loop.inverse
        damping = _damping(row, own)
        at = Oracle(self._problem, self._batches, self._outer_batch, self._seed)
        say("reference")
        exact = reference(at, self._batches, self._seed, self._dense_below, lambda done: None)
        outer = at.outer()
        truths = [exact.solve(outer.theta).x]
        self.method = exact.method
        truths.append(truths[0] if damping == 0 else exact.damped(damping).solve(outer.theta).x)
        wanted, wanted_damped = (None if x is None else hypergradient_along(at, outer, x) for x in truths)
        distance, _ = inner_distance(exact, at.gradient(), self._problem.theta.flat())
        told = {"step": row["step"], "inner_distance": distance, "damping": damping}

        def compare(name: str, inverse: AbstractInverse, state: Callable[[], Any], **more: Any) -> None:
            say(name)
            found: dict[str, Any] = dict.fromkeys(("cosine", "relative_error", "cosine_damped", "residual", "error"))
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", InverseWarning)  # the row shows it
                    there = Oracle(self._problem, self._batches, self._outer_batch, self._seed)
                    there.damp(damping if follows_horizon(inverse) else 0.0)
                    made = implicit(there, inverse, state(), outer=outer, **more)
            except InputError as error:
                found["error"] = str(error)
            else:
                assert made.adjoint is not None
                leaves = flat(made.leaves)
                found |= compared(leaves, wanted)
                found["cosine_damped"] = compared(leaves, wanted_damped)["cosine"]
                found["residual"] = _residual(at, made.adjoint, outer.theta)
            self.rows.append({"step": row["step"], "inverse": name} | found | told)

        if own is not None and own.learner is not None:
            horizon = getattr(self._solver.state, "horizon", None)
            adjust = None
            if follows_horizon(own) and isinstance(own, Learned) and horizon is not None:
                adjust = partial(_as_used, horizon, outer.theta)
            compare(OWN.format(label(own)), own, self._solver.executor.keep, start=start, adjust=adjust)
        for name, inverse in self._chosen:
            compare(name, inverse, partial(learn, inverse, self._problem, self._training_batches, self._seed))


@dataclass(frozen=True)
class _Ahead:
    """Captures v and the last adjoint of an outer step."""

    v: Tensor
    adjoint: Tensor | None


def _damping(row: Row, own: AbstractInverse | None) -> float:
    """The damping of the Hessian in this outer step: that of its horizon, or the number its inverse was given."""
    if "horizon" in row:
        return float(row["damping"])
    given = getattr(own, "damping", None)
    return float(given) if isinstance(given, (int, float)) else 0.0


def _residual(at: Oracle, x: Tensor, u: Tensor) -> float | None:
    """|H x - u| / |u|, without any damping."""
    size = float(u.norm())
    return float((at.hvp(x) - u).norm()) / size if size > 0 else None


def _cell(value: float | None, form: str) -> str:
    return f"{'-':>{form.partition('.')[0]}}" if value is None else format(value, form)


def _as_used(horizon: Any, u: Tensor, x: Tensor, _: object) -> Tensor:
    """x as the run's horizon would correct it."""
    used: Tensor = horizon.as_used(x, u)
    return used
