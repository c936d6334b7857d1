"""The constants of a problem: bounds where a formula is known, estimates by sampling elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from nhgd._tree import map_tensors
from nhgd._validation import check_seed, positive
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError
from nhgd.problem import Bilevel
from nhgd.theory.constants import Constants

How: TypeAlias = Literal["given", "bound", "estimate"]
Function: TypeAlias = Callable[[Tensor], Tensor]  # of (theta, v) as one vector
LANCZOS = 24  # steps; the extreme eigenvalues settle first
APART = 1e-2  # between two points whose Hessians are compared, relative to the size of theta or v


@final
@dataclass(frozen=True)
class Estimate:
    """The constants of a problem, and where each comes from.

    Attributes:
        constants: they.
        how: for each name "given", "bound" (true everywhere in the ball) or "estimate" (the largest, of mu the
            smallest, that was met at sampled points: the true constant may be worse).
    """

    constants: Constants
    how: dict[str, How]


def estimated(
    problem: Bilevel,
    inner_batch: Batch,
    outer_batch: Batch,
    R: float | None = None,
    samples: int = 32,
    points: int = 3,
    seed: int = 0,
) -> Estimate:
    """The constants of a problem around its current theta and v, by sampling.

    Gradients and Hessians of single samples are compared at the current theta and at random points of the ball; norms
    of matrices come from Lanczos iterations on products. Large for a model means slow: each of `samples` takes some
    fifty products.

    Args:
        problem: its theta should be near an inner optimum, because the ball is around 0 and as large as theta requires.
        inner_batch: the inner data, or a large part of them.
        outer_batch: the outer data.
        R: radius of the ball of theta, as `Solver(project=R)` takes it; by default twice the norm of the current theta.
        samples: how many inner samples to look at, evenly spread.
        points: how many points, the current one included.
        seed: of the random points and directions.

    Raises:
        InputError: where a sample's loss is not strongly convex in theta, so that the theory does not apply.
    """
    check_seed(seed)
    positive("estimated", samples=samples, points=points)
    theta, v = problem.theta.flat(), problem.v.flat()
    if R is not None:
        positive("estimated", R=R)
    count = common_length(inner_batch)
    if count is None:
        raise InputError("The samples of inner_batch cannot be told apart: its tensors have different lengths.")
    radius = max(2 * float(theta.norm()), 1e-3) if R is None else float(R)
    chosen = torch.linspace(0, count - 1, min(samples, count)).long().tolist()
    singles = [_inner(problem, _sample(inner_batch, i)) for i in dict.fromkeys(chosen)]
    mean, outer = _inner(problem, inner_batch), _outer(problem, outer_batch)
    generator = torch.Generator().manual_seed(seed)
    with problem.guarded(seed):
        at = [torch.cat([place, v]) for place in _places(theta, radius, points, generator)]
        found: dict[str, Any] = _measured(singles, mean, outer, at, theta.numel(), generator)
    if found["mu"] <= 0:
        raise InputError(
            f"The inner loss of a single sample has the curvature {found['mu']:.3g} in theta, so it is not strongly convex, as"
            " the theory assumes. Add l2, or take a model that is linear in theta."
        )
    how: dict[str, How] = dict.fromkeys(found, "estimate")
    how.update(d_1="given", d_2="given", R="estimate" if R is None else "given")
    return Estimate(Constants(R=radius, d_2=theta.numel(), d_1=v.numel(), **found), how)


def linear_softmax(x: Tensor, classes: int, l2: float, R: float, largest_weight: float = 1.0) -> Estimate:
    """Bounds for a linear softmax or logistic model with a weight from 0 to `largest_weight` for each sample.

    With |x| the largest norm of a row, a 1 for the bias included, and p the probabilities:

        mu = 2 l2                                      the loss of a sample is convex, and flat in most directions
        L  = w |x|^2 / 2 + 2 l2 + sqrt(2) |x|          |diag(p) - p p^T| <= 1/2; the score of a sample, its
                                                       cross derivative with its own weight, is at most sqrt(2) |x|
        C_1 = 2 sqrt(2) w |x|                          of the data term: the ridge has no noise

    Args:
        x: the inner inputs, (n, d).
        classes: outputs of the model; 1 for a logistic one.

    >>> linear_softmax(torch.eye(2), classes=3, l2=0.5, R=1.0).constants.mu
    1.0
    """
    if l2 <= 0:
        raise InputError(
            f"Without a ridge the loss of one sample is not strongly convex; l2 must be above 0, got {l2}."
        )
    positive("linear_softmax", classes=classes, largest_weight=largest_weight)
    size = float((x.double().square().sum(1) + 1).max().sqrt())
    score = 2**0.5 * size
    constants = Constants(
        mu=2 * l2,
        L=largest_weight * size**2 / 2 + 2 * l2 + score,
        R=R,
        C_1=2 * largest_weight * score,
        d_2=classes * (x.shape[1] + 1),
    )
    how: dict[str, How] = {"mu": "bound", "L": "bound", "C_1": "bound", "R": "given", "d_2": "given"}
    return Estimate(constants, how)


def _sample(batch: Batch, index: int) -> Batch:
    """A batch of one sample."""
    return map_tensors(lambda tensor: tensor[index : index + 1], batch)


def _inner(problem: Bilevel, batch: Batch) -> Function:
    return lambda z: problem.objective(batch, *_parts(problem, z))


def _outer(problem: Bilevel, batch: Batch) -> Function:
    return lambda z: problem.outer_value(batch, *_parts(problem, z))


def _parts(problem: Bilevel, z: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    size = problem.theta.numel
    return problem.theta.unflatten(z[:size]), problem.v.unflatten(z[size:])


def _places(theta: Tensor, R: float, count: int, generator: torch.Generator) -> list[Tensor]:
    """The current theta, and points of the ball drawn uniformly by direction and by distance from the centre."""
    directions = torch.randn(count - 1, theta.numel(), generator=generator, dtype=torch.float64)
    distances = R * torch.rand(count - 1, 1, generator=generator, dtype=torch.float64)
    drawn = distances * directions / directions.norm(dim=1, keepdim=True)
    return [theta, *drawn.to(theta)]


def _measured(
    singles: Sequence[Function],
    mean: Function,
    outer: Function,
    at: Sequence[Tensor],
    size: int,
    generator: torch.Generator,
) -> dict[str, float]:
    """Every constant but R and the numbers of parameters; theta is the first `size` entries of a point."""
    in_theta, in_v = slice(0, size), slice(size, None)
    found = dict.fromkeys(("mu", "L", "C_1", "D_1", "L_f_v", "L_f_theta", "Lbar_f_v", "Lbar_f_theta"), 0.0)
    found |= dict.fromkeys(("L_cross", "L_hessian", "Lbar_cross", "Lbar_hessian"), 0.0)
    found["mu"] = float("inf")

    def most(name: str, value: float) -> None:
        found[name] = max(found[name], value)

    for z in at:
        whole = _gradient(mean, z)[in_theta]
        for single in singles:
            most("C_1", float((_gradient(single, z)[in_theta] - whole).norm()))
            low, high = _extremes(_product(single, z, slice(None), slice(None)), len(z), z, generator)
            most("L", max(abs(low), abs(high)))
            found["mu"] = min(found["mu"], _extremes(_product(single, z, in_theta, in_theta), size, z, generator)[0])
        most("D_1", float(_gradient(outer, z)[in_theta].norm()))
        for name, rows, columns in (
            ("L_f_theta", in_theta, in_theta),
            ("L_f_v", in_v, in_theta),
            ("Lbar_f_theta", in_theta, in_v),
            ("Lbar_f_v", in_v, in_v),
        ):
            most(
                name, _norm(_product(outer, z, rows, columns), _product(outer, z, columns, rows), z, columns, generator)
            )
        for bar, moved in (("", in_theta), ("bar", in_v)):
            step = torch.zeros_like(z)
            direction = torch.randn(len(z[moved]), generator=generator, dtype=torch.float64).to(z)
            length = APART * max(float(z[moved].norm()), 1.0)
            step[moved] = length * direction / direction.norm()
            for name, rows in (("cross", in_v), ("hessian", in_theta)):
                there = _difference(mean, z, step, rows, in_theta), _difference(mean, z, step, in_theta, rows)
                most(f"L{bar}_{name}", _norm(*there, z, in_theta, generator) / length)
    return found


def _gradient(function: Function, z: Tensor) -> Tensor:
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        value = function(z)
    return torch.autograd.grad(value, z)[0]


def _product(function: Function, z: Tensor, rows: slice, columns: slice) -> Function:
    """A block of the Hessian as a product with a vector."""
    z = z.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(function(z), z, create_graph=True)

    def times(vector: Tensor) -> Tensor:
        full = torch.zeros_like(z)
        full[columns] = vector
        if not gradient.requires_grad:
            return full[rows] * 0
        (found,) = torch.autograd.grad(gradient, z, full, retain_graph=True, allow_unused=True)
        return full[rows] * 0 if found is None else found[rows]

    return times


def _difference(function: Function, z: Tensor, step: Tensor, rows: slice, columns: slice) -> Function:
    here, there = _product(function, z, rows, columns), _product(function, z + step, rows, columns)
    return lambda vector: there(vector) - here(vector)


def _norm(times: Function, back: Function, z: Tensor, columns: slice, generator: torch.Generator) -> float:
    """The largest singular value of a block, from products with it and with its transpose."""
    largest = _extremes(lambda vector: back(times(vector)), len(z[columns]), z, generator)[1]
    return math.sqrt(max(0.0, largest))


def _extremes(times: Function, size: int, like: Tensor, generator: torch.Generator) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric matrix that Lanczos finds, orthogonalised in full."""
    start = torch.randn(size, generator=generator, dtype=torch.float64).to(like)
    basis = [start / start.norm()]
    diagonal: list[Tensor] = []
    beside: list[Tensor] = []
    for _ in range(min(LANCZOS, size)):
        image = times(basis[-1])
        diagonal.append(image @ basis[-1])
        known = torch.stack(basis)  # (k, size)
        for _ in range(2):
            image = image - known.T @ (known @ image)
        length = image.norm()
        if float(length) <= 1e-10 * max(1e-300, float(diagonal[0].abs())):
            break
        beside.append(length)
        basis.append(image / length)
    steps = len(diagonal)
    matrix = torch.diag(torch.stack(diagonal))
    for i in range(steps - 1):
        matrix[i, i + 1] = matrix[i + 1, i] = beside[i]
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])
