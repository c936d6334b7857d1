"""Any inverse against the exact hypergradient, on the user's own problem."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd.data.batch import Batch, move
from nhgd.data.loader import reiterable
from nhgd.errors import InputError, InverseWarning
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse import CG, INVERSES, AbstractInverse, Exact, resolve
from nhgd.inverse.learning import learn
from nhgd.memory import PeakMemory, synchronise
from nhgd.point import Point
from nhgd.problem import Bilevel


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
            scalar inner loss.
        advice: what these numbers mean, in sentences.
    """

    rows: list[dict[str, Any]]
    reference: dict[str, Any]
    inner_gradient: float
    inner_distance: float
    fisher_distance: float | None
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


def check(
    problem: Bilevel,
    inner_batch: Batch,
    outer_batch: Batch,
    inverses: Sequence[str | AbstractInverse] | None = None,
    inner_data: Iterable[Batch] | None = None,
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
        dense_below: up to this D the reference is a dense solve; above it, conjugate gradients run to 1e-10.
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
    device = problem.theta.device
    batches = [inner_batch] if inner_data is None else list(reiterable(inner_data, "inner_data"))
    if not batches:
        raise InputError("inner_data yields no batch. Give it at least one, for example [(x, y)].")
    batches = [move(batch, device) for batch in batches]
    outer_batch = move(outer_batch, device)
    problem.validate(batches[0], outer_batch)
    chosen = [resolve(i) for i in (list(INVERSES) if inverses is None else inverses)]
    names = [i if isinstance(i, str) else i.name for i in (list(INVERSES) if inverses is None else inverses)]

    at = Point(problem, batches, outer_batch, seed)
    dense = problem.theta.numel <= dense_below
    solver: AbstractInverse = Exact() if dense else CG(steps=max(20 * problem.theta.numel, 1000), tol=1e-10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InverseWarning)  # said in the advice instead
        exact = implicit(at, solver, None)
        gradient = at.gradient()
        step, _ = solver.solve(None, gradient, at)
    residual = exact.stats.residual or 0.0
    reference = {
        "method": "dense solve" if dense else "conjugate gradients",
        "residual": residual,
        "dimension": problem.theta.numel,
        "positive_definite": exact.stats.notes.get(
            "positive_definite", not exact.stats.notes.get("negative_curvature")
        ),
        "converged": residual < 1e-6,
    }
    rows = [_row(name, i, problem, batches, outer_batch, exact, seed) for name, i in zip(names, chosen, strict=True)]
    size = float(problem.theta.flat().norm())
    inner_distance = float(step.norm()) / size if size > 0 else float(step.norm())
    fisher_distance = _fisher_distance(at)
    advice = _advice(reference, float(gradient.norm()), inner_distance, fisher_distance)
    return Report(rows, reference, float(gradient.norm()), inner_distance, fisher_distance, advice)


def _row(
    name: str,
    inverse: AbstractInverse,
    problem: Bilevel,
    batches: list[Batch],
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
            state = learn(inverse, problem, batches, seed)
            with PeakMemory() as peak:
                learnt = learn(inverse, problem, batches, seed)
                work()
            del learnt
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


def _advice(reference: dict[str, Any], gradient: float, distance: float, fisher: float | None) -> list[str]:
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
    if fisher is None:
        said.append("inner() returns a scalar, so there is no Fisher matrix and the Fisher inverses do not apply.")
    elif fisher < 0.1:
        said.append(
            f"The empirical Fisher matrix is {100 * fisher:.1g} % away from the Hessian: inverses that learn it can be used as"
            " they are."
        )
    elif fisher < 0.6:
        said.append(
            f"The empirical Fisher matrix is {100 * fisher:.0f} % away from the Hessian: inverses that learn it give a"
            " direction with an error of that order. Refine them by a few Hessian products when that matters."
        )
    else:
        said.append(
            f"The empirical Fisher matrix is {100 * fisher:.0f} % away from the Hessian: the model does not describe the data,"
            " or its residuals vanish. Do not trust empirical-Fisher inverses here by themselves; use Hessian products."
        )
    return said
