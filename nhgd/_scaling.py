"""Loss scaling: backward passes in float16, whose least numbers would vanish otherwise and whose largest would be
infinite.

A backward pass starts from the losses times a scale, and its results are divided by it in float32, so that nothing
outside of the pass knows of it. A pass with results that are not finite is not used: the scale is lowered, and the pass
is taken again from the same losses. Every process may have a scale of its own, because what processes exchange is
unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from nhgd.errors import InputError

T = TypeVar("T")
LEAST = 2.0**-14  # a scale below which it is not the scale that makes numbers infinite


class Scaling:
    """The scale of a problem's backward passes.

    Args:
        scaler: says what the scale is, and how it follows from overflows; None, or one that is disabled: 1.
        device: of the passes.
        grows: whether passes that did not overflow count towards a larger scale; otherwise someone else's loop counts
            them.

    Attributes:
        overflows: passes that were not used.
        coarse: whether a result was of float16.
    """

    def __init__(
        self, scaler: GradScaler | None = None, device: torch.device | None = None, grows: bool = True
    ) -> None:
        if scaler is not None and type(scaler).__name__ == "ShardedGradScaler":
            raise InputError(
                "A ShardedGradScaler makes ranks wait for each other, which is not needed here: gradients are exchanged"
                " unscaled. Use torch.amp.GradScaler."
            )
        self.scaler = None if scaler is None or not scaler.is_enabled() else scaler
        self.overflows = 0
        self.grows = grows
        self.coarse = False
        self._scale = 1.0
        if self.scaler is not None:
            self._probe = torch.zeros((), device=device, requires_grad=True)
            self._optimizer = torch.optim.SGD([self._probe], lr=0.0)
            self.refresh()

    @property
    def active(self) -> bool:
        """Whether passes are scaled."""
        return self.scaler is not None

    @property
    def scale(self) -> float:
        """What losses are multiplied with."""
        return self._scale

    def refresh(self) -> None:
        """Ask the scaler again, which others may use too."""
        if self.scaler is not None:
            self._scale = float(self.scaler.get_scale())

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint keeps."""
        return None if self.scaler is None else {"overflows": self.overflows, **self.scaler.state_dict()}

    def summary(self) -> dict[str, float] | None:
        """The scale, and how many passes overflowed."""
        return {"scale": self._scale, "overflows": self.overflows} if self.active else None

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Go on from what a checkpoint kept."""
        if self.scaler is None or saved is None:
            return
        state = dict(saved)
        self.overflows = int(state.pop("overflows"))
        self.scaler.load_state_dict(state)
        self.refresh()

    def note(self, overflowed: bool) -> None:
        """Let the scaler know of a pass; it sees gradients of an optimiser that moves nothing."""
        assert self.scaler is not None
        self.overflows += overflowed
        self.scaler.scale(self._probe.detach())  # makes its tensors at the first use
        self._probe.grad = torch.full_like(self._probe, float("inf") if overflowed else 0.0)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        self.refresh()

    def taken(
        self,
        take: Callable[[], T],
        made: Callable[[T], Iterable[Tensor | None]],
        again: Callable[[], None] | None = None,
    ) -> T:
        """What a pass gives, taken again with a lower scale as long as the tensors made in it are not finite.

        again: called before each repetition, to put back what the pass before has moved.
        """
        if self.scaler is None:
            return take()
        before: dict[str, Any] | None = None
        while True:
            found = take()
            if all_finite(made(found)):
                return found
            if before is None:
                before = self.scaler.state_dict()
            if self._scale < LEAST:  # it is not the scale: the caller sees the numbers, and says so
                self.scaler.load_state_dict(before)
                self.refresh()
                return found
            self.note(True)
            if again is not None:
                again()

    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Sequence[Any],
        grad_outputs: Tensor | Sequence[Tensor] | None = None,
        retain_graph: bool | None = None,
        part: int = 1,
        **settings: Any,
    ) -> tuple[Any, ...]:
        """`torch.autograd.grad`, scaled inside, and taken again from the same graph where it overflowed."""
        if self.scaler is None:
            return torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=retain_graph, **settings)
        return self.taken(lambda: self.grad_once(outputs, inputs, grad_outputs, True, part, **settings), tuple)

    def grad_once(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Sequence[Any],
        grad_outputs: Tensor | Sequence[Tensor] | None = None,
        retain_graph: bool | None = None,
        part: int = 1,
        **settings: Any,
    ) -> tuple[Any, ...]:
        """The same, whose caller sees to overflows. With `part`, the results are this many times too small."""
        if self.scaler is None:
            return torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=retain_graph, **settings)
        sources = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        seeds = [grad_outputs] if isinstance(grad_outputs, Tensor) else grad_outputs
        along = [torch.ones_like(s) for s in sources] if seeds is None else list(seeds)
        scaled = [g * (self._scale / part) for g in along]
        found = torch.autograd.grad(sources, inputs, scaled, retain_graph=retain_graph, **settings)
        return tuple(None if g is None else self.unscaled(g) for g in found)

    def sized(self, vector: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor | None]:
        """A vector in parts, of which a pass of float16 is linear, with entries of at most 1; and what it was divided
        by.
        """
        if self.scaler is None:
            return vector, None
        most = torch.stack([part.detach().abs().amax().double() for part in vector if part.numel()]).amax()
        power = torch.exp2(torch.frexp(most).exponent.double())  # by which no digit is lost
        size = torch.where((most > 0) & most.isfinite(), power, 1.0)
        return [part / size.to(part.dtype) for part in vector], size.to(vector[0].dtype)

    def unscaled(self, tensor: Tensor) -> Tensor:
        """A result of a scaled pass in its own size, of float32 at least where it was of float16."""
        if self.scaler is None:
            return tensor
        if tensor.dtype is torch.float16:
            self.coarse = True
            tensor = tensor.float()
        return tensor / self._scale


NOT_SCALED = Scaling()


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether no tensor holds nan or inf."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor is not None and tensor.is_floating_point() and tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    # The sum of the sizes of float16 numbers may be infinite where none of them is.
    norms = (
        torch._foreach_norm([t.float() for t in some] if kind[0] is torch.float16 else some, 1)
        for kind, some in by_kind.items()
    )
    return all(bool(torch.stack(list(found)).isfinite().all()) for found in norms)
