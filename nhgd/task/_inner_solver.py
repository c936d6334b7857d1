"""Solving an inner problem to the end, for tasks whose answers are meant to be exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nhgd._randomness import Randomness
from nhgd._threads import limited, on_suited_threads, suited_to
from nhgd._tree import map_tensors
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError, RunError
from nhgd.execution import Inline
from nhgd.inverse import CG, AbstractInverse, FisherWindow, Refined
from nhgd.inverse._learned.automatic import automatic
from nhgd.inverse._learned.learning import learn
from nhgd.loop.levenberg_marquardt import LevenbergMarquardt
from nhgd.loop.loop import Loop
from nhgd.loop.settings import LoopSettings
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel


@on_suited_threads
def newton(problem: Bilevel, batch: Batch, tol: float = 1e-12, steps: int = 100) -> float:
    """Newton's method with a dense Hessian and step halving, in place; returns the norm of the last gradient.

    For small problems (D up to a few hundred) that are strongly convex in theta. `tol` is absolute; when rounding does
    not allow it, the best point reached is kept.
    """
    theta = problem.theta
    best, norm = theta.flat(), float("inf")
    for _ in range(steps):
        at = Oracle(problem, [batch])
        gradient = at.gradient()
        size = float(gradient.norm())
        if size < norm:
            best, norm = theta.flat(), size
        if size <= tol:
            break
        step = torch.linalg.solve(at.dense(), gradient)
        here = theta.flat()
        with torch.no_grad(), problem.guarded(seed=1):
            value, shrink = float(problem.objective(batch)), 1.0
            while True:
                theta.assign(here - shrink * step)
                if float(problem.objective(batch)) <= value + 1e-14 * abs(value) or shrink < 1e-6:
                    break
                shrink /= 2
        if shrink < 1e-6:
            break
    theta.assign(best)
    return norm


def lbfgs(value: Callable[[], Tensor], leaves: Sequence[Tensor], tol: float, steps: int = 2000) -> float:
    """L-BFGS with a strong Wolfe search, in place; returns the norm of the last gradient, at most `tol`.

    Args:
        value: the scalar to minimise, with its graph, at the current leaves.
        leaves: the variables to minimise over.
    """
    optimiser = torch.optim.LBFGS(
        list(leaves),
        max_iter=50,
        history_size=20,
        tolerance_grad=0.0,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )
    gradient: tuple[Tensor, ...] = ()

    def closure() -> Tensor:
        nonlocal gradient
        with torch.enable_grad():
            found = value()
            gradient = torch.autograd.grad(found, leaves)
        for leaf, g in zip(leaves, gradient, strict=True):
            leaf.grad = g
        return found.detach()

    norm = float("inf")
    with limited(suited_to(value, leaves)):
        for _ in range(max(1, steps // 50)):
            optimiser.step(closure)
            closure()
            norm = float(torch.cat([g.reshape(-1) for g in gradient]).norm())
            if norm <= tol:
                break
    for leaf in leaves:
        leaf.grad = None
    if not norm <= tol:
        raise RunError(
            f"The inner problem could not be solved: its gradient norm is still {norm:.2g}, above {tol:.2g}."
        )
    return norm


@on_suited_threads
def newton_cg(
    problem: Bilevel, batch: Batch, tol: float, teacher: Bilevel | None = None, steps: int = 50, samples: int = 4096
) -> float:
    """Newton's method with steps by preconditioned conjugate gradients, in place; returns the norm of the last
    gradient.

        theta <- theta - shrink * p,   |H p - g| <= min(0.1, sqrt(|g| / |g_0|)) |g|

    It takes tens of products where L-BFGS takes thousands of gradients: a ridge of 1e-4 beside a curvature of 100 does
    not matter to it. `tol` is absolute.

    Args:
        teacher: the problem, with the same theta, that the preconditioner learns from; default: the problem itself. The
            exact Fisher matrix is learnt where a likelihood is known.
        samples: of the batch, that it learns from.
    """
    teacher = problem if teacher is None else teacher
    lesson = map_tensors(lambda tensor: tensor[:samples], batch)
    first = norm = 0.0
    for _ in range(steps):
        at = Oracle(problem, [batch])
        gradient = at.gradient()
        norm = float(gradient.norm())
        first = first or norm
        if norm <= tol:
            return norm
        forcing = min(0.1, (norm / first) ** 0.5)
        inverse = _preconditioned(teacher, lesson, forcing)
        step, _ = inverse.apply(learn(inverse, teacher, [lesson]), gradient, at)
        if not _descend(problem, batch, at, gradient, step) and not _descend(problem, batch, at, gradient, gradient):
            break
    raise RunError(
        f"The inner problem could not be solved: its gradient norm is still {norm:.2g}, above {tol:.2g}. Add l2, or train it"
        " further by the solver first."
    )


def _preconditioned(problem: Bilevel, lesson: Batch, tol: float) -> AbstractInverse:
    """Conjugate gradients, preconditioned by learnt curvature, or plain if the problem allows none."""
    learner: Any = automatic(problem.theta)
    exact = problem.likelihood is not None
    for made in ([replace(learner, fisher="exact")] if exact else []) + [learner]:
        refined = Refined(made, steps=200, tol=tol)
        try:
            learn(refined, problem, [lesson])
        except InputError:
            continue
        return refined
    return CG(steps=200, tol=tol)


def _descend(problem: Bilevel, batch: Batch, at: Oracle, gradient: Tensor, step: Tensor) -> bool:
    """Go along minus a step, halved until the objective falls enough; whether it did."""
    theta, slope = problem.theta, float(gradient.dot(step))
    if not slope > 0:
        return False
    here, value = theta.flat(), at.inner_value()
    shrink = 1.0
    while shrink > 1e-8:
        theta.assign(here - shrink * step)
        found = Oracle(problem, [batch]).inner_value()
        # Near the optimum the gain is below the rounding of the objective, but a full step still helps the gradient.
        if found <= value - 1e-4 * shrink * slope + 4 * torch.finfo(theta.dtype).eps * abs(value):
            return True
        shrink /= 2
    theta.assign(here)
    return False


@on_suited_threads
def gauss_newton(problem: Bilevel, batch: Batch, steps: int, floor: float, seed: int = 0) -> float:
    """Levenberg-Marquardt steps in the space of the outputs, in place; returns the norm of the last gradient.

    For a likelihood such as "gaussian" with few outputs in all: each step factorises a matrix with a row for each of
    them. `floor` is the least damping.
    """
    samples = common_length(batch)
    if samples is None:
        raise InputError("Gauss-Newton steps need a batch whose tensors all have the samples as first dimension.")
    inverse = FisherWindow(window=samples, fisher="exact", records="sample", damping=floor, allow_large=True)
    with Randomness(seed, problem.theta.device).scope():
        loop = Loop(problem, [batch], [batch], LoopSettings(), Inline(), inverse)
        marquardt = LevenbergMarquardt(floor=floor)
        for _ in range(steps):
            marquardt.step(loop)
    return float(Oracle(problem, [batch]).gradient().norm())


@on_suited_threads
def adam(problem: Bilevel, batch: Batch, steps: int, lr: float) -> float:
    """Full-batch Adam, in place; returns the norm of the last gradient."""
    theta = problem.theta
    optimiser = torch.optim.Adam(list(theta.leaves), lr=lr)
    for _ in range(steps):
        with torch.enable_grad():
            found = torch.autograd.grad(problem.objective(batch), theta.leaves)
        for leaf, gradient in zip(theta.leaves, found, strict=True):
            leaf.grad = gradient
        optimiser.step()
    for leaf in theta.leaves:
        leaf.grad = None
    return float(Oracle(problem, [batch]).gradient().norm())
