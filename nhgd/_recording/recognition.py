"""How v enters the inner problem: seen in one batch, and verified there against the graph of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from nhgd._randomness import generators_restored
from nhgd._recording.lagged_cross import LaggedCross
from nhgd._recording.weighing import Weighing
from nhgd._tree import tensors
from nhgd.losses import Losses
from nhgd.objective import Objective

Role: TypeAlias = Literal["weights", "ridge", "none", "other"]


@dataclass(frozen=True)
class Recognition:
    """How v enters the inner problem, as far as one batch has shown.

    Attributes:
        role: of v: it gives the "weights" of samples, and perhaps the ridge; the "ridge" alone; "none" of both, nor
            anything else; or "other": it enters the losses themselves, or only the graph of the gradient tells the
            cross derivative.
        source: where <s_i, x> came from.
        difference: of the cross derivative from that of the gradient's graph, relative, along a random vector.
        note: why that graph is needed, if it is.
    """

    role: str
    source: str | None = None
    difference: float | None = None
    note: str | None = None


def recognise(weighing: Weighing, objective: Objective, in_step: bool) -> Recognition:
    """Examine one batch at a nearby theta, where nothing is zero by accident. Draws nothing and counts nothing.

    Args:
        in_step: whether the cross derivative comes from the passes of inner steps, or from separate passes.
    """
    theta, objective = weighing.problem.theta, copy(objective)
    objective.seed = 0
    few = weighing.problem.few(objective.batch) if type(objective) is Objective else None
    if few is not None:
        objective = Objective(weighing.problem, few, 0)
    with generators_restored(theta.device), weighing.problem.guarded(seed=0), torch.enable_grad():
        with theta.nearby():
            try:
                losses, dtypes = _losses(objective)
                strange = not bool(torch.isfinite(losses.values).all())
            except Exception:  # the user's function may not know such a place
                strange = True
            if not objective.anywhere(strange):
                role = _role(weighing, objective, losses)
                del losses  # with their graph
                return _compared(weighing, objective, role, dtypes, in_step)
        losses, dtypes = _losses(objective)
        role = _role(weighing, objective, losses)
        del losses
        return _compared(weighing, objective, role, dtypes, in_step)


def _losses(objective: Objective) -> tuple[Losses, set[torch.dtype]]:
    """The losses, and the dtypes that modules compute them in, wherever autocast is entered."""
    dtypes = {leaf.dtype for leaf in objective.problem.theta.leaves}

    def note(module: nn.Module, args: object, output: object) -> None:
        dtypes.update(t.dtype for t in tensors(output) if t.is_floating_point())

    hook = nn.modules.module.register_module_forward_hook(note)
    try:
        with objective.drawing():
            losses = objective.problem.losses(objective.batch)
    finally:
        hook.remove()
    if losses.outputs is not None and losses.outputs.is_floating_point():
        dtypes.add(losses.outputs.dtype)
    return losses, dtypes


def _compared(
    weighing: Weighing, objective: Objective, role: Role, dtypes: set[torch.dtype], in_step: bool
) -> Recognition:
    """Compare the cross derivative along a random vector with that from the gradient's graph."""
    theta = weighing.problem.theta
    if role == "other":
        return Recognition(role, note="v enters the losses of the samples, or their weights depend on theta")
    if role == "none":
        return Recognition(role)
    x = torch.randn(theta.numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.to(theta.device, theta.dtype)
    if in_step:
        lagged = LaggedCross(weighing, x)
        tap = lagged.tap(recording=False)
        objective.step(tap)
        lagged.take(objective, tap)
        source, found = tap.source, lagged.mean(lambda terms: objective.summed([], terms))
    else:
        found, source = weighing.cross(objective)(x)
    if objective.anywhere(source == "graph"):
        note = "the losses can be differentiated neither through layers nor in forward mode"
        return Recognition("other", source, note=note)
    true = objective.cross(x)
    size = _norm(true)
    difference = _norm([a - b for a, b in zip(found, true, strict=True)])
    difference = difference / size if size else difference
    if not difference <= _tolerance(dtypes):
        note = f"without it, the cross derivative differs by {difference:.2g} of its length"
        return Recognition("other", source, difference, note)
    return Recognition(role, source, difference)


def _role(weighing: Weighing, objective: Objective, losses: Losses) -> Role:
    holds = weighing.holds(losses)
    weighs = losses.weights is not None and weighing.reaches_v(losses.weights)
    if objective.anywhere(not holds):
        return "other"
    if objective.anywhere(weighs):
        return "weights"
    coefficients = weighing.problem.ridge_coefficients()
    return "ridge" if any(isinstance(c, Tensor) and weighing.reaches_v(c) for c in coefficients) else "none"


def _tolerance(dtypes: set[torch.dtype]) -> float:
    """Far above rounding, and far below any difference that another formula makes."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return 1e-6 if eps < 1e-10 else max(1e-3, 8 * eps)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors]).norm())
