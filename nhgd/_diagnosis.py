"""What can be said about a point before any inverse is tried there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd._progress import Tick
from nhgd._reference import Reference, ReferenceSolution, reference
from nhgd.data.batch import Batch
from nhgd.errors import InputError, percent
from nhgd.oracle import Oracle, OuterGradient


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a point, and what they mean.

    Attributes:
        reference, method: what solved, and how the adjoint was found.
        adjoint: H^+ u.
        hypergradient: one vector; None without a reference.
        gradient: norm of the inner gradient.
        distance: |H^+ g| / |theta|; None without a minimum.
        zero: whether theta is 0; then the distance is |H^+ g| itself.
        open: the part of the inner gradient outside the range of H, relative to its length, if above rounding.
        fisher, apart: |F - H| / |H|, and |(F - H) x| / |u|.
        asymmetry, symmetric: of the Hessian products, and whether that is rounding.
        hvps: products the reference took.
        scalar: whether inner() returns a scalar, so that there is no Fisher matrix.
    """

    reference: Reference
    method: str
    adjoint: ReferenceSolution
    hypergradient: Tensor | None
    gradient: float
    distance: float | None
    zero: bool
    open: float
    fisher: float | None
    apart: float | None
    asymmetry: float
    symmetric: bool
    hvps: int
    scalar: bool

    def described(self, size: int) -> dict[str, Any]:
        """For the report."""
        negative, singular = self.reference.negative, self.reference.singular
        return {
            "method": self.method,
            "residual": self.adjoint.residual,
            "dimension": size,
            "hvps": self.hvps,
            "positive_definite": False if negative or singular else None if negative is None else True,
            "negative_curvature": negative,
            "singular": singular,
            "outside": self.adjoint.outside,
            "converged": self.adjoint.x is not None,
            "asymmetry": self.asymmetry,
        }


def diagnosed(at: Oracle, batches: list[Batch], seed: int, dense_below: int, tick: Tick) -> Diagnosis:
    """Solve exactly and examine the point. `tick` receives what is being done, up to half of the progress bar."""
    problem = at.problem
    before = at.calls.hvps
    tick(0.0, "reference")
    solver = reference(at, batches, seed, dense_below, lambda done: tick(0.4 * done, "reference"))
    outer = at.outer()
    adjoint = solver.solve(outer.theta)
    hvps, method = at.calls.hvps - before, solver.method
    exact = None if adjoint.x is None else hypergradient_along(at, outer, adjoint.x)
    gradient = at.gradient()
    tick(0.4, "the inner optimum")
    distance, still_open = inner_distance(solver, gradient, problem.theta.flat())
    tick(0.45, "the Fisher matrix")
    asymmetry, symmetric, fisher, scalar = _probed(at)
    apart = None if adjoint.x is None or scalar else _fisher_residual(at, outer, adjoint.x)
    return Diagnosis(
        solver,
        method,
        adjoint,
        exact,
        float(gradient.norm()),
        distance,
        not bool(problem.theta.flat().any()),
        still_open,
        fisher,
        apart,
        asymmetry,
        symmetric,
        hvps,
        scalar,
    )


def hypergradient_along(at: Oracle, outer: OuterGradient, x: Tensor) -> Tensor:
    """The implicit formula with a given adjoint, as one vector."""
    return flat([f - c for f, c in zip(outer.v, at.cross(x), strict=True)])


def inner_distance(reference: Reference, gradient: Tensor, theta: Tensor) -> tuple[float | None, float]:
    """The distance to the inner optimum, by a Newton step, and the share of the gradient that H cannot explain."""
    if reference.negative:
        return None, 0.0
    step = reference.solve(gradient)
    if reference.negative or step.x is None:  # it may be seen only now
        return None, 0.0
    length, size = float(gradient.norm()), float(theta.norm())
    rounding = 100 * torch.finfo(theta.dtype).eps * reference.largest * max(size, 1.0)
    if step.outside * length > rounding:
        return None, step.outside
    return float(step.x.norm()) / (size if size > 0 else 1.0), 0.0


def flat(leaves: Sequence[Tensor]) -> Tensor:
    """One vector in float64, so that two of them can be compared."""
    return torch.cat([leaf.reshape(-1).double() for leaf in leaves])


def _probed(at: Oracle, count: int = 8) -> tuple[float, bool, float | None, bool]:
    """Gaussian probes from a fixed seed: asymmetry of H, whether that is rounding, |F - H| / |H|, whether there is
    no F.

    E |M z|^2 = |M|_F^2. H is symmetric, so a.Hb = b.Ha for every two probes, unless a second derivative is broken.
    """
    generator = torch.Generator().manual_seed(0)
    theta = at.problem.theta
    probes = torch.randn(count, theta.numel, generator=generator, dtype=torch.float64).to(theta.dtype).to(theta.device)
    products = torch.stack([at.hvp(z) for z in probes])
    pairs = probes.double() @ products.double().T  # (count, count): a.Hb
    sizes = float(products.double().norm())
    asymmetry = float((pairs - pairs.T).norm()) / sizes / count**0.5 if sizes > 0 else 0.0
    symmetric = asymmetry <= max(1e-6, 100 * theta.numel**0.5 * torch.finfo(theta.dtype).eps)
    try:
        apart = sum(float((at.empirical_fisher(z) - h).square().sum()) for z, h in zip(probes, products, strict=True))
    except InputError:
        return asymmetry, symmetric, None, True
    return asymmetry, symmetric, apart**0.5 / sizes if sizes > 0 else None, False


def _fisher_residual(at: Oracle, outer: OuterGradient, x: Tensor) -> float:
    apart = at.empirical_fisher(x) - at.hvp(x)
    return float(apart.norm()) / max(float(outer.theta.norm()), torch.finfo(x.dtype).tiny)


def advice(found: Diagnosis, size: int) -> list[str]:
    """What these numbers mean, in sentences."""
    said = [
        *_of_products(found),
        *_of_the_hessian(found, size),
        _of_the_optimum(found),
    ]
    if found.hypergradient is not None and not bool(found.hypergradient.any()):
        said.append("The exact hypergradient is zero here, so relative errors are undefined.")
    return [*(sentence for sentence in said if sentence), *_of_fisher(found)]


def _of_products(found: Diagnosis) -> list[str]:
    if found.symmetric:
        return []
    return [
        f"Hessian products are not symmetric: a.Hb and b.Ha differ by {percent(found.asymmetry)} % for random a and"
        " b. A Hessian is symmetric, so an operation inside inner() has a wrong second derivative (torch's"
        " weight_norm on a CPU, for example), and everything computed from products is off by about as much, the"
        " reference included. Write that operation out in elementary ones, such as weight = g * v / v.norm(dim=1,"
        " keepdim=True)."
    ]


def _of_the_hessian(found: Diagnosis, size: int) -> list[str]:
    reference, solved = found.reference, found.adjoint
    said = []
    if reference.negative:
        least = (
            ""
            if reference.smallest is None
            else f" (down to {reference.smallest:.1e}; the largest is {reference.largest:.1e})"
        )
        said.append(
            f"The inner Hessian is not positive definite here: it has negative curvature{least}, so this is not an"
            " inner minimum and the implicit formula does not hold. Train the inner problem further or add l2."
        )
    if reference.singular:
        count = "some" if reference.null is None else f"{reference.null} of {size}"
        kind = "" if reference.negative else " This may be a minimum, but it is not a strict one."
        said.append(
            f"The inner Hessian is singular here: {count} eigenvalues are zero, to rounding.{kind} Inverses are compared with the"
            " shortest adjoint, x = H^+ u, which is what inner training from here follows."
        )
        if solved.outside > 1e-6:
            said.append(
                f"{percent(solved.outside)} % of the outer gradient lies outside the range of the inner Hessian: the"
                " outer loss depends on directions that the inner problem does not determine, and no x solves H x ="
                " u. Add l2, set damping, or let the products run over more data (inner_data=)."
            )
    if solved.x is None:
        said.append(
            f"There is no reference here: {found.method} ended with a residual of {solved.residual:.1e}, so errors of"
            " the inverses cannot be computed. Add l2, use float64, or raise dense_below to D for a dense solve."
        )
    return said


def _of_the_optimum(found: Diagnosis) -> str:
    gradient = f"inner gradient {found.gradient:.1e}"
    if found.reference.negative:
        return f"The distance of theta from an inner optimum cannot be determined here ({gradient})."
    if found.open:
        return (
            f"The distance of theta from an inner optimum cannot be determined: {percent(found.open)} % of the inner"
            f" gradient ({found.gradient:.1e}) points where the inner Hessian has no curvature. Train the inner"
            " problem further."
        )
    if found.distance is None:
        return f"The distance of theta from the inner optimum could not be determined ({gradient})."
    if found.zero:  # which has no size of its own
        return f"theta is 0, about {found.distance:.2g} away from the inner optimum ({gradient})."
    if found.distance > 0.05:
        return (
            f"theta is about {100 * found.distance:.0f} % of its own size away from the inner optimum (inner gradient"
            f" {found.gradient:.1e}), so even the exact formula is off by about as much. Train the inner problem further."
        )
    return f"theta is at the inner optimum to {100 * found.distance:.1g} % of its size ({gradient})."


def _of_fisher(found: Diagnosis) -> list[str]:
    if found.scalar:
        return ["inner() returns a scalar, so there is no Fisher matrix and the Fisher inverses do not apply."]
    if found.fisher is None:
        return ["The inner Hessian is zero, so the Fisher matrix cannot be compared with it."]
    along = "" if found.apart is None else f", {percent(found.apart)} % along the solution"
    far = f"The empirical Fisher matrix is {percent(found.fisher)} % away from the Hessian{along}"
    worst = max(found.fisher, found.apart or 0.0)
    if worst < 0.1:
        return [f"{far}: an inverse that learns it well needs no Hessian products."]
    if worst < 0.6:
        return [
            f"{far}: an inverse that learns it errs by about as much, in addition to its own approximation. Refine it"
            " by a few Hessian products when that matters."
        ]
    return [
        f"{far}: the model does not describe the data, or its residuals vanish. Do not use an empirical-Fisher"
        " inverse alone here: refine it, or use fisher='exact' or Hessian products."
    ]
