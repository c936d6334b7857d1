"""Any inverse against the exact hypergradient, on the user's own problem."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd._diagnosis import advice, diagnosed, flat
from nhgd._html import table
from nhgd._memory import PeakMemory, synchronise
from nhgd._progress import bar
from nhgd._surroundings import library_settings
from nhgd._threads import on_suited_threads
from nhgd._validation import check_seed, validated
from nhgd.data.batch import Batch, move
from nhgd.data.loader import inner_batches, one_batch, reiterable
from nhgd.errors import InputError, InverseWarning
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import implicit, measured
from nhgd.inverse import INVERSES, AbstractInverse, resolve
from nhgd.inverse._learned.learning import learn
from nhgd.inverse.capabilities import label
from nhgd.losses import check_weight
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.record import BATCH_OBJECTIVE

EXACT_BELOW = 500  # up to this D the dense solve is among the inverses that are compared when none are named
HEADS = ("inverse", "cosine", "rel. error", "ms", "MB", "residual", "hvps")
WIDTHS = ("<16", ">9", ">12", ">10", ">9", ">11", ">7")
SLOW = 5.0  # seconds from which on a row is not run once more only to be timed


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        rows: one dict for each inverse: inverse, cosine, relative_error, milliseconds, megabytes, residual, hvps,
            converged, warning: what is wrong with its solve, else None, and error: the sentence of an inverse that
                refused,
            else None. cosine and relative_error are None without a reference or anything to compare.
        reference: how the exact hypergradient was made: method, residual, dimension, hvps, converged; what is known of
            the Hessian: positive_definite, negative_curvature, singular (None: not known), outside (the part of the
            outer gradient outside of its range); and asymmetry, of its products, which is 0 but for rounding.
        inner_gradient: norm of the inner gradient. The formula is exact if it is 0.
        inner_distance: |H^+ g| / |theta|: the distance of theta from the inner optimum, relative to its size; None if
            there is no inner minimum, or none that H could tell.
        fisher_distance: |F - H| / |H| in the Frobenius norm, F the empirical Fisher matrix with the ridge; None for a
            scalar inner loss. The largest eigenvalues dominate it.
        fisher_residual: |(F - H) x| / |u| for the exact x = H^+ u: how far F is from H along the solution.
        advice: what these numbers mean, in sentences.
    """

    rows: list[dict[str, Any]]
    reference: dict[str, Any]
    inner_gradient: float
    inner_distance: float | None
    fisher_distance: float | None
    fisher_residual: float | None
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [self._reference, "".join(map(format, HEADS, WIDTHS))]
        lines += ["".join(map(format, self._cells(row), WIDTHS)).rstrip() for row in self.rows]
        return "\n".join([*lines, *self.warnings, *self.advice])

    def _repr_html_(self) -> str:
        cells = [self._cells(row) for row in self.rows]
        return table(HEADS, cells, self._reference, [*self.warnings, *self.advice])

    @property
    def _reference(self) -> str:
        known = self.reference
        return f"reference: {known['method']}, residual {known['residual']:.1e}, D = {known['dimension']}"

    @staticmethod
    def _cells(row: dict[str, Any]) -> list[str]:
        """A row as it is shown: a text for each column, or the sentence of an inverse that refused."""
        if row["error"]:
            return [row["inverse"], row["error"]]
        cosine = "-" if row["cosine"] is None else f"{row['cosine']:.4f}"
        error = "-" if row["relative_error"] is None else f"{row['relative_error']:.2e}"
        cost = f"{row['milliseconds']:.2f}", f"{row['megabytes']:.3f}"
        return [row["inverse"], cosine, error, *cost, f"{row['residual']:.1e}", str(row["hvps"])]

    @property
    def warnings(self) -> list[str]:
        """Problems with the solves of some inverses: one sentence each, or one for all if their advice is the same."""
        bad = [row for row in self.rows if row["warning"]]
        if bad and (self.reference["negative_curvature"] or self.reference["singular"]):
            listed = ", ".join(f"{row['inverse']} {row['residual']:.2g}" for row in bad)
            return [f"These solves are unreliable, with the residuals given: {listed}."]
        return [f"{row['inverse']}: {row['warning']}" for row in bad]


@validated
@on_suited_threads
def check(
    problem: Bilevel,
    inner_batch: Batch,
    outer_batch: Batch,
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None = None,
    inner_data: Iterable[Batch] | None = None,
    learn_from: Iterable[Batch] | None = None,
    dense_below: int = 2000,
    seed: int = 0,
    progress: bool | None = None,
) -> Report:
    """Compare inverses with the exact hypergradient at the problem's current theta and v, which stay as they are.

    Args:
        problem: a `Bilevel`.
        inner_batch: where the inner objective and its derivatives are taken: one batch.
        outer_batch: where the outer loss is taken.
        inverses: names or objects; default: all that are known, the dense solve up to D = 500 alone.
        inner_data: batches that online inverses learn from and over which the exact products run, in place of
            inner_batch.
        learn_from: batches that online inverses learn from instead, when that is to differ.
        dense_below: up to this D the reference is a dense solve, by D Hessian products. Above it: preconditioned
            conjugate gradients, restarted until the true residual is below 1e-10 or falls no further; or minimal
            residuals, where those meet negative or vanishing curvature; or none, where neither comes below 1e-6.
        seed: what dropout is drawn from.
        progress: a bar on standard error; by default on a terminal only.

    >>> problem = Bilevel(
    ...     inner=lambda theta, v, x: (x @ theta - v).square(),
    ...     outer=lambda theta, v, x: (theta - 1).square().sum(),
    ...     theta=torch.zeros(2, dtype=torch.float64), v=torch.zeros((), dtype=torch.float64), l2=0.1)
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    >>> report = check(problem, x, x, inverses=["cg", "identity"])
    >>> [round(row["cosine"], 6) for row in report.rows]
    [1.0, 1.0]
    >>> report.rows[0]["relative_error"] < 1e-8 < report.rows[1]["relative_error"]
    True
    """
    check_seed(seed)
    with library_settings():
        found = _report(
            problem, inner_batch, outer_batch, inverses, inner_data, learn_from, dense_below, seed, progress
        )
    check_weight(problem.lowest_weight())
    return found


def _report(
    problem: Bilevel,
    inner_batch: Batch,
    outer_batch: Batch,
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None,
    inner_data: Iterable[Batch] | None,
    learn_from: Iterable[Batch] | None,
    dense_below: int,
    seed: int,
    progress: bool | None,
) -> Report:
    device = problem.theta.device
    batches = inner_batches(inner_batch, inner_data, device)
    training_batches = (
        batches if learn_from is None else [move(b, device) for b in reiterable(learn_from, "learn_from")]
    )
    outer_batch = move(one_batch(outer_batch, "outer_batch"), device)
    problem.validate(batches[0], outer_batch)
    size = problem.theta.numel
    chosen = named(inverses, size)

    at = Oracle(problem, batches, outer_batch, seed)
    with bar("check", progress) as tick:
        found = diagnosed(at, batches, seed, dense_below, tick)
        rows = []
        for count, (name, inverse) in enumerate(chosen):
            tick(0.5 + 0.5 * count / len(chosen), name)
            rows.append(_row(name, inverse, problem, batches, training_batches, outer_batch, found.hypergradient, seed))
        tick(1.0, "")
    return Report(
        rows,
        found.described(size),
        found.gradient,
        found.distance,
        found.fisher,
        found.apart,
        [*advice(found, size), *_of_statistics(rows)],
    )


def named(
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None, size: int
) -> list[tuple[str, AbstractInverse]]:
    """The requested inverses with distinct names; by default all that suit this many parameters."""
    known = [name for name in INVERSES if name != "exact" or size <= EXACT_BELOW]
    asked = (
        known if inverses is None else [inverses] if isinstance(inverses, (str, AbstractInverse)) else list(inverses)
    )
    if not asked:
        raise InputError("inverses is empty. Name some, for example ['kfac', 'cg'], or omit it for all of them.")
    labels = [i if isinstance(i, str) else label(i) for i in asked]
    # Two of one kind differ in their settings.
    return [(n if labels.count(n) == 1 else repr(i), resolve(i)) for n, i in zip(labels, asked, strict=True)]


def _of_statistics(rows: list[dict[str, Any]]) -> list[str]:
    """A note if the statistics are not those of single samples."""
    names = [row["inverse"] for row in rows if row["notes"].get("statistics") == BATCH_OBJECTIVE]
    if not names:
        return []
    return [
        f"BatchNorm is in training mode, where the gradient of one sample is not defined: the statistics of {', '.join(names)}"
        f" are {BATCH_OBJECTIVE}, with scores through the statistics of the batch. The reference is exact for this objective."
    ]


def _row(
    name: str,
    inverse: AbstractInverse,
    problem: Bilevel,
    batches: list[Batch],
    training_batches: list[Batch],
    outer_batch: Batch,
    exact: Tensor | None,
    seed: int,
) -> dict[str, Any]:
    def work() -> tuple[Hypergradient, Oracle, float]:
        synchronise(problem.theta.device)
        started = time.perf_counter()
        at = Oracle(problem, batches, outer_batch, seed)
        made = implicit(at, inverse, state)
        synchronise(problem.theta.device)
        return made, at, time.perf_counter() - started

    row: dict[str, Any] = {"inverse": name, "cosine": None, "relative_error": None, "milliseconds": None}
    row |= {"megabytes": None, "residual": None, "hvps": None, "converged": None, "warning": None}
    row |= {"error": None, "notes": {}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InverseWarning)  # the row shows it
            with PeakMemory() as peak:
                state = learn(inverse, problem, training_batches, seed)
                found, at, seconds = work()
            if seconds < SLOW:  # a second run is timed: the first also paid for one-time work and for being watched
                found, at, seconds = work()
            found = measured(at, inverse, found)
    except InputError as error:
        return row | {"error": str(error)}
    stats = found.stats
    return (
        row
        | compared(flat(found.leaves), exact)
        | {
            "milliseconds": 1e3 * seconds,
            "megabytes": peak.bytes / 1e6,
            "residual": stats.residual,
            "hvps": stats.hvps,
            "converged": stats.converged,
            "warning": stats.trouble,
            "notes": {key: value for key, value in stats.notes.items() if isinstance(value, (bool, int, float, str))},
        }
    )


def compared(a: Tensor, exact: Tensor | None) -> dict[str, float | None]:
    """Cosine and relative error of one vector to the exact one. A vector of length 0 has no direction and no parts."""
    if exact is None:
        return {"cosine": None, "relative_error": None}
    tiny = torch.finfo(exact.dtype).tiny
    length, scale = float(a.norm()), float(exact.norm())
    return {
        "cosine": float((a / length).dot(exact / scale)) if length > tiny and scale > tiny else None,
        "relative_error": float((a - exact).norm()) / scale if scale > tiny else 0.0 if length <= tiny else None,
    }
