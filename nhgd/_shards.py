"""The parameters of a module that `torch.distributed.fsdp.fully_shard` divides over ranks, whole while they are trained
here.

Hypergradients are vectors as long as theta, of passes that FSDP's hooks know nothing of. So the parameters are gathered
once, and every rank computes with all of them on its part of a batch. The optimiser still holds the divided ones: each
rank keeps the moments of its own part, moves that part, and then all gather the others'.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nhgd.errors import InputError


class Shards:
    """The divided parameters of a module, and the way to whole ones and back. Every rank must make the same calls.

    Args:
        root: the module.
        role: the name used in messages.

    Attributes:
        parts: the divided parameters by name, DTensors; an optimiser holds these. Parameters outside of `fully_shard`
            are missing.
    """

    def __init__(self, root: nn.Module, role: str) -> None:
        self._modules: list[Any] = [m for m in root.modules() if _is_divided(m)]
        self._role = role
        for module in self._modules:
            module.reshard()  # a forward pass may have left the outermost one whole
        self.parts = {name: p for name, p in root.named_parameters() if p.requires_grad and hasattr(p, "device_mesh")}
        self._gather()
        whole = dict(root.named_parameters())
        for name, part in self.parts.items():
            self._refuse(name, part, whole[name])

    @classmethod
    def of(cls, root: nn.Module, role: str) -> Shards | None:
        """The shards of a module; None if it has none."""
        if any(_is_divided(module) for module in root.modules()):
            return cls(root, role)
        if _is_wrapped(root):
            raise InputError(
                f"{role} is in FullyShardedDataParallel, torch's first version of it, which is not supported. Use"
                " torch.distributed.fsdp.fully_shard, or DistributedDataParallel."
            )
        return None

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that they are divided over."""
        return tuple(next(iter(self.parts.values())).device_mesh.mesh.flatten().tolist()) if self.parts else ()

    def _refuse(self, name: str, part: Any, whole: Tensor) -> None:
        where = f"{self._role}[{name!r}]"
        if part.device_mesh.ndim != 1 or hasattr(whole, "device_mesh"):
            raise InputError(
                f"{where} is divided over a mesh of several dimensions, or by tensor parallelism too. Call fully_shard with a"
                " mesh of one dimension that has all workers."
            )
        if whole.dtype != part.dtype or whole.device != part.device:
            raise InputError(
                f"fully_shard computes {where} as {whole.dtype} on {whole.device}, but keeps it as {part.dtype} on"
                f" {part.device}. Omit its mp_policy and offload_policy, and use torch.autocast in inner() and outer()."
            )

    def _gather(self) -> None:
        """Make the parameters whole, and keep FSDP's hooks from dividing them and from summing gradients."""
        for module in self._modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            module.set_requires_gradient_sync(False, recurse=False)
            module.unshard()

    def check_whole(self, leaves: Sequence[Tensor]) -> None:
        """Refuse parameters that something has divided again."""
        if any(leaf.numel() and leaf.untyped_storage().size() == 0 for leaf in leaves):
            raise InputError(
                f"The parameters of {self._role} are divided over the ranks again: problem.reshard(), model.reshard() and"
                " model.state_dict() do that. Make a new Bilevel to go on with them."
            )

    @torch.no_grad()
    def divide(self, tensor: Tensor, part: Any) -> Tensor:
        """This rank's part of a tensor that all have, divided as a parameter is; nothing is sent."""
        from torch.distributed.tensor import distribute_tensor

        given = tensor.detach().to(part.dtype)
        found: Tensor = distribute_tensor(given, part.device_mesh, part.placements, src_data_rank=None)
        return found

    @torch.no_grad()
    def write(self, names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        """The parts take the values of the whole tensors."""
        for name, leaf in zip(names, leaves, strict=True):
            if name in self.parts:
                self.parts[name].copy_(self.divide(leaf, self.parts[name]))

    @torch.no_grad()
    def read(self, names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        """The whole tensors take the values of all ranks' parts."""
        for name, leaf in zip(names, leaves, strict=True):
            if name in self.parts:
                leaf.copy_(self.parts[name].full_tensor())  # type: ignore[attr-defined]  # a DTensor

    def release(self, names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        """Divide the parameters again and let FSDP's hooks work as `fully_shard` sets them."""
        self.check_whole(leaves)
        self.write(names, leaves)
        if not all(leaf.untyped_storage().resizable() for leaf in leaves):
            raise InputError(
                f"A parameter of {self._role} shares its memory with a NumPy array, so that memory cannot be freed. Take"
                " arrays from copies: parameter.detach().clone().numpy()."
            )
        for place, module in enumerate(self._modules):
            module.set_reshard_after_forward(place > 0, recurse=False)  # the outermost comes first, and stays whole
            module.set_reshard_after_backward(True, recurse=False)
            module.set_requires_gradient_sync(True, recurse=False)
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be divided over ranks, or be a sum over them, as each has it in full."""
    if hasattr(tensor, "full_tensor"):
        found: Tensor = tensor.full_tensor()
        return found
    return tensor


def _is_divided(module: nn.Module) -> bool:
    """Whether `fully_shard` was called on it; if its package was never imported, nobody has."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _is_wrapped(root: nn.Module) -> bool:
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return kind is not None and any(isinstance(module, kind) for module in root.modules())
