"""Any inverse against the exact hypergradient, on the user's own problem."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nhgd.data.batch import Batch, move
from nhgd.data.loader import reiterable
from nhgd.errors import InputError, InverseWarning, check_seed
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse import INVERSES, AbstractInverse, Exact, Identity, Refined, SolveStats, resolve
from nhgd.inverse.automatic import automatic
from nhgd.inverse.learning import learn
from nhgd.memory import PeakMemory, synchronise
from nhgd.point import Point
from nhgd.problem import Bilevel
from nhgd.record import FisherKind, InnerRecord, RecordKind
from nhgd.validation import validated
from nhgd.variable import Variable


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        rows: one dict for each inverse: inverse, cosine, relative_error, milliseconds, megabytes, residual, hvps,
            converged, and error: the sentence of an inverse that refused, else None.
        reference: how the exact hypergradient was made, with its residual.
        inner_gradient: norm of the inner gradient. The formula is exact where it is 0.
        inner_distance: |H^{-1} g| / |theta|: how far theta is from the inner optimum, in parts of its own size.
        fisher_distance: |F - H| / |H| in the Frobenius norm, F the empirical Fisher matrix with the ridge; None for a
            scalar inner loss. The largest eigenvalues dominate it.
        fisher_residual: |(F - H) x| / |u| for the exact x = H^{-1} u: how far F is from H where it matters here.
        advice: what these numbers mean, in sentences.
    """

    rows: list[dict[str, Any]]
    reference: dict[str, Any]
    inner_gradient: float
    inner_distance: float
    fisher_distance: float | None
    fisher_residual: float | None
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        lines = [
            f"reference: {self.reference['method']}, residual {self.reference['residual']:.1e},"
            f" D = {self.reference['dimension']}",
            f"{'inverse':<16}{'cosine':>9}{'rel. error':>12}{'ms':>10}{'MB':>9}{'residual':>11}{'hvps':>7}",
        ]
        for row in self.rows:
            if row["error"]:
                lines.append(f"{row['inverse']:<16}{row['error']}")
                continue
            lines.append(
                f"{row['inverse']:<16}{row['cosine']:>9.4f}{row['relative_error']:>12.2e}{row['milliseconds']:>10.2f}"
                f"{row['megabytes']:>9.3f}{row['residual']:>11.1e}{row['hvps']:>7}"
            )
        return "\n".join([*lines, *self.advice])


@validated
def check(
    problem: Bilevel,
    inner_batch: Batch,
    outer_batch: Batch,
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None = None,
    inner_data: Iterable[Batch] | None = None,
    learn_from: Iterable[Batch] | None = None,
    dense_below: int = 500,
    seed: int = 0,
) -> Report:
    """Compare inverses with the exact hypergradient at the problem's current theta and v, which stay as they are.

    Args:
        problem: a `Bilevel`.
        inner_batch: where the inner objective and its derivatives are taken.
        outer_batch: where the outer loss is taken.
        inverses: names or objects; default: all that are known.
        inner_data: batches that online inverses learn from and over which the exact products run, in place of
            inner_batch.
        learn_from: batches that online inverses learn from instead, when that is to differ.
        dense_below: up to this D the reference is a dense solve; above it, preconditioned conjugate gradients, restarted
            until the true residual is below 1e-10 or falls no further.
        seed: what dropout is drawn from.

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
    device = problem.theta.device
    batches = [inner_batch] if inner_data is None else list(reiterable(inner_data, "inner_data"))
    if not batches:
        raise InputError("inner_data yields no batch. Give it at least one, for example [(x, y)].")
    batches = [move(batch, device) for batch in batches]
    lessons = batches if learn_from is None else [move(b, device) for b in reiterable(learn_from, "learn_from")]
    outer_batch = move(outer_batch, device)
    problem.validate(batches[0], outer_batch)
    asked = (
        list(INVERSES)
        if inverses is None
        else [inverses]
        if isinstance(inverses, (str, AbstractInverse))
        else list(inverses)
    )
    if not asked:
        raise InputError("inverses is empty. Name some, for example ['kfac', 'cg'], or leave it away for all of them.")
    chosen = [resolve(i) for i in asked]
    labels = [i if isinstance(i, str) else i.label for i in asked]
    # Two of one kind are told apart by their settings.
    names = [n if labels.count(n) == 1 else repr(i) for n, i in zip(labels, asked, strict=True)]

    at = Point(problem, batches, outer_batch, seed)
    dense = problem.theta.numel <= dense_below
    solver: AbstractInverse = Exact() if dense else _Restarted(_preconditioned(problem, batches, seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InverseWarning)  # said in the advice instead
        state = None if dense else learn(solver, problem, batches, seed)
        exact = implicit(at, solver, state)
        gradient = at.gradient()
        step, _ = solver.solve(state, gradient, at)
    residual = exact.stats.residual or 0.0
    reference = {
        "method": "dense solve" if dense else "preconditioned conjugate gradients",
        "residual": residual,
        "dimension": problem.theta.numel,
        "hvps": exact.stats.hvps,
        "positive_definite": exact.stats.notes.get(
            "positive_definite", not exact.stats.notes.get("negative_curvature")
        ),
        "converged": residual < 1e-6,
    }
    rows = [
        _row(name, i, problem, batches, lessons, outer_batch, exact, seed)
        for name, i in zip(names, chosen, strict=True)
    ]
    size = float(problem.theta.flat().norm())
    inner_distance = float(step.norm()) / size if size > 0 else float(step.norm())
    distance = _fisher_distance(at)
    apart = _fisher_residual(at, exact)
    advice = _advice(reference, float(gradient.norm()), inner_distance, distance, apart)
    return Report(rows, reference, float(gradient.norm()), inner_distance, distance, apart, advice)


def _row(
    name: str,
    inverse: AbstractInverse,
    problem: Bilevel,
    batches: list[Batch],
    lessons: list[Batch],
    outer_batch: Batch,
    exact: Hypergradient,
    seed: int,
) -> dict[str, Any]:
    def work() -> tuple[Hypergradient, Point]:
        at = Point(problem, batches, outer_batch, seed)
        return implicit(at, inverse, state), at

    row: dict[str, Any] = {"inverse": name, "cosine": None, "relative_error": None, "milliseconds": None}
    row |= {"megabytes": None, "residual": None, "hvps": None, "converged": None, "error": None, "notes": {}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", InverseWarning)  # the row tells
            with PeakMemory() as peak:
                state = learn(inverse, problem, lessons, seed)
                work()
            # The second run is timed: the first one paid for what is made once.
            synchronise(problem.theta.device)
            started = time.perf_counter()
            found, at = work()
            synchronise(problem.theta.device)
            milliseconds = 1e3 * (time.perf_counter() - started)
    except InputError as error:
        return row | {"error": str(error)}
    a, b = _flat(found), _flat(exact)
    scale = float(b.norm())
    u, x = at.outer().theta, found.adjoint
    residual = found.stats.residual
    if residual is None and x is not None:
        residual = float((at.hvp(x) - u).norm()) / max(float(u.norm()), torch.finfo(u.dtype).tiny)
    return row | {
        "cosine": float(a.dot(b)) / max(float(a.norm()) * scale, torch.finfo(a.dtype).tiny),
        "relative_error": float((a - b).norm()) / max(scale, torch.finfo(a.dtype).tiny),
        "milliseconds": milliseconds,
        "megabytes": peak.bytes / 1e6,
        "residual": residual,
        "hvps": found.stats.hvps,
        "converged": found.stats.converged,
        "notes": {key: value for key, value in found.stats.notes.items() if isinstance(value, (bool, int, float, str))},
    }


@dataclass(frozen=True)
class _Restarted(AbstractInverse):
    """Preconditioned CG to the end: begun again from where it stood until the true residual falls no further."""

    name: ClassVar[str] = "preconditioned conjugate gradients"
    inverse: AbstractInverse
    tol: float = 1e-10

    @property
    def records(self) -> RecordKind | None:
        return self.inverse.records

    @property
    def fisher(self) -> FisherKind:
        return self.inverse.fisher

    def init(self, theta: Variable) -> Any:
        return self.inverse.init(theta)

    def observe(self, state: Any, record: InnerRecord) -> Any:
        return self.inverse.observe(state, record)

    def solve(self, state: Any, u: Tensor, at: Point, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        before, size = at.calls.hvps, max(float(u.norm()), torch.finfo(u.dtype).tiny)
        x, best, notes = torch.zeros_like(u), 1.0, {}
        for _ in range(10):
            found, stats = self.inverse.solve(state, u, at, x)
            notes = stats.notes
            residual = float((u - at.hvp(found)).norm()) / size
            if residual < best:
                x, gained, best = found, residual < 0.5 * best, residual
            else:
                gained = False
            if best <= self.tol or not gained:
                break
        return x, SolveStats(best, at.calls.hvps - before, best <= self.tol, notes)

    def memory(self, theta: Variable) -> int:
        return self.inverse.memory(theta)


def _preconditioned(problem: Bilevel, batches: list[Batch], seed: int) -> AbstractInverse:
    """CG preconditioned by what can be learnt of this problem, or by nothing where that is refused."""
    steps = min(20 * problem.theta.numel, 5000)
    made = Refined(automatic(problem.theta), steps=steps, tol=1e-11)
    try:
        learn(made, problem, batches[:1], seed)
    except InputError:
        return Refined(Identity(), steps=steps, tol=1e-11)
    return made


def _flat(found: Hypergradient) -> Tensor:
    return torch.cat([leaf.reshape(-1).double() for leaf in found.leaves])


def _fisher_distance(at: Point, probes: int = 8) -> float | None:
    """|F - H| / |H| in the Frobenius norm, by Gaussian probes from a fixed seed: E |M z|^2 = |M|_F^2."""
    generator = torch.Generator().manual_seed(0)
    theta = at.problem.theta
    apart, whole = 0.0, 0.0
    try:
        for _ in range(probes):
            z = torch.randn(theta.numel, generator=generator, dtype=torch.float64).to(theta.dtype).to(theta.device)
            h = at.hvp(z)
            apart += float((at.empirical_fisher(z) - h).square().sum())
            whole += float(h.square().sum())
    except InputError:
        return None
    return float((apart / whole) ** 0.5) if whole > 0 else None


def _fisher_residual(at: Point, exact: Hypergradient) -> float | None:
    assert exact.adjoint is not None
    try:
        apart = at.empirical_fisher(exact.adjoint) - at.hvp(exact.adjoint)
    except InputError:
        return None
    u = at.outer().theta
    return float(apart.norm()) / max(float(u.norm()), torch.finfo(u.dtype).tiny)


def _advice(
    reference: dict[str, Any], gradient: float, distance: float, fisher: float | None, apart: float | None
) -> list[str]:
    said = []
    if not reference["positive_definite"]:
        said.append(
            "The inner Hessian is not positive definite here, so this is no inner minimum and the implicit formula does not"
            " hold. Train the inner problem further or add l2."
        )
    elif not reference["converged"]:
        said.append(
            f"The reference itself did not converge (residual {reference['residual']:.1e}), so read the errors with care."
            " Add l2, or use float64."
        )
    if distance > 0.05:
        said.append(
            f"theta is about {100 * distance:.0f} % of its own size away from the inner optimum (inner gradient"
            f" {gradient:.1e}), so even the exact formula is off by about as much. Train the inner problem further."
        )
    else:
        said.append(
            f"theta is at the inner optimum to {100 * distance:.1g} % of its size (inner gradient {gradient:.1e})."
        )
    if fisher is None or apart is None:
        said.append("inner() returns a scalar, so there is no Fisher matrix and the Fisher inverses do not apply.")
        return said
    far = f"The empirical Fisher matrix is {100 * fisher:.2g} % away from the Hessian, {100 * apart:.2g} % along the solution"
    worst = max(fisher, apart)
    if worst < 0.1:
        said.append(f"{far}: an inverse that learns it well needs no Hessian products.")
    elif worst < 0.6:
        said.append(
            f"{far}: an inverse that learns it errs by about as much, beside its own approximation. Refine it by a few Hessian"
            " products when that matters."
        )
    else:
        said.append(
            f"{far}: the model does not describe the data, or its residuals vanish. Do not trust an empirical-Fisher inverse"
            " here by itself: refine it, or use fisher='exact' or Hessian products."
        )
    return said
