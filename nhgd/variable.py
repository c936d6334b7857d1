"""A variable: a tensor, a dict of tensors or a module, seen as one flat vector.

The functions a user writes receive the kind of object that was given. Inside, every linear solve works on flat vectors
of shape (D,), so a `Variable` translates between the two and is the only place that knows the three kinds apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nhgd._shards import Shards
from nhgd.errors import InputError

PIECE = 2**24  # numbers of a vector that are multiplied with another at a time
SHORT = 1 << 16  # entries of a vector, for which launches count for more than copies in float64
Given: TypeAlias = Tensor | dict[str, Tensor] | nn.Module
Like: TypeAlias = "Tensor | dict[str, Tensor]"


class Variable:
    """theta or v: its trainable leaves, in a fixed order, and the conversion back to what the user gave.

    Args:
        given: a tensor, a dict of tensors or a module. Parameters of a module that do not require a gradient are
            frozen. In a dict where some tensors require a gradient and some do not, the latter are frozen; where none
            does, all floating-point tensors are trained. Training happens in place.
        role: the name used in messages.

    >>> theta = Variable({"w": torch.zeros(2, 3), "b": torch.zeros(3)}, "theta")
    >>> theta.numel, theta.names
    (9, ('w', 'b'))
    """

    names: tuple[str, ...]
    leaves: tuple[Tensor, ...]
    moved: tuple[Tensor, ...]  # what an optimiser holds: the leaves, or the parts of them that fully_shard left here

    def __init__(self, given: Given, role: str) -> None:
        self.given = given
        self.role = role
        self.root: nn.Module | None = None
        self.shards: Shards | None = None
        self._given: Given = given
        self._frozen: dict[str, Tensor] = {}
        if isinstance(given, nn.Module):
            # torch.compile and DistributedDataParallel wrap a module; names and leaves are those of the inner module.
            self.root, self._given = _inside(given), _unparalleled(given)
            self.shards = self._gathered(self.root)
            named: dict[str, Tensor] = {name: p for name, p in self.root.named_parameters() if p.requires_grad}
        elif isinstance(given, Tensor):
            named = {role: given}
        elif isinstance(given, dict):
            named = self._trainable(given)
        else:
            raise InputError(
                f"{role} must be a Tensor, a dict of Tensors or an nn.Module, but it is a {type(given).__name__}."
            )
        if not any(t.numel() for t in named.values()):
            raise InputError(
                f"{role} has nothing to train: it is empty, or every parameter is frozen (requires_grad=False)."
            )
        owners: dict[int, str] = {}
        for name, tensor in named.items():
            self._admit(name, tensor)
            if owners.setdefault(id(tensor), name) != name:
                raise InputError(
                    f"{role}[{owners[id(tensor)]!r}] and {role}[{name!r}] are the same tensor, which would be trained twice."
                    " Keep one of them and use it in both places."
                )
        self._refuse_shared_memory(named)
        self.names = tuple(named)
        self.leaves = tuple(t if t.requires_grad else t.detach().requires_grad_() for t in named.values())
        parts = {} if self.shards is None else self.shards.parts
        self.moved = tuple(parts.get(n, t) for n, t in zip(self.names, self.leaves, strict=True))
        devices = {t.device for t in self.leaves}
        if len(devices) > 1:
            raise InputError(
                f"{role} is spread over several devices ({', '.join(sorted(map(str, devices)))}). Move it to one."
            )
        self.recurrent = self.root is not None and any(isinstance(m, nn.RNNBase) for m in self.root.modules())
        self.device = self.leaves[0].device
        self.dtype = self.leaves[0].dtype
        for leaf in self.leaves[1:]:
            self.dtype = torch.promote_types(self.dtype, leaf.dtype)
        self.sizes = tuple(t.numel() for t in self.leaves)
        self.numel = sum(self.sizes)
        # A parameter may be known under several names; swapping must reach all of them.
        self._places: list[list[tuple[nn.Module, str]]] = [[] for _ in self.leaves]
        if self.root is not None:
            position = {id(leaf): i for i, leaf in enumerate(self.leaves)}
            for module in self.root.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and id(parameter) in position:
                        self._places[position[id(parameter)]].append((module, name))

    @property
    def is_compiled(self) -> bool:
        """Whether it is a module that torch.compile has wrapped."""
        return self.root is not None and self._given is not self.root

    def _gathered(self, root: nn.Module) -> Shards | None:
        """The parameters of a module divided by `fully_shard`, made whole."""
        shards = Shards.of(root, self.role)
        if shards is not None and self.role != "theta":
            raise InputError(
                f"{self.role} is divided by fully_shard, which is supported for theta alone. Pass the module undivided."
            )
        return shards

    def check_whole(self) -> None:
        """Refuse leaves whose memory is gone, because a module's parameters were divided over ranks again."""
        if self.shards is not None:
            self.shards.check_whole(self.leaves)

    def _trainable(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor):
                raise InputError(
                    f"{self.role}[{name!r}] is a {type(tensor).__name__}, not a Tensor. Nested dicts are not supported:"
                    " use one flat dict with dotted names."
                )
        some = any(t.requires_grad for t in given.values())
        named = {k: t for k, t in given.items() if (t.requires_grad if some else t.is_floating_point())}
        self._frozen = {k: t for k, t in given.items() if k not in named}
        return named

    def _called(self, name: str) -> str:
        return self.role if name == self.role else f"{self.role}[{name!r}]"

    def _refuse_shared_memory(self, named: dict[str, Tensor]) -> None:
        """Refuse entries that lie in the same memory, of one tensor or of several: a step would move them twice."""
        together: dict[int, list[str]] = {}
        for name, tensor in named.items():
            if tensor.numel():
                together.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
        for names in together.values():
            some = [named[name] for name in names]
            spans = sorted((t.storage_offset(), t.storage_offset() + _span(t)) for t in some)
            apart = all(first[1] <= second[0] for first, second in pairwise(spans))
            if apart and all(_span(t) == t.numel() and 0 not in t.stride() for t in some):
                continue
            cells = some[0].untyped_storage().nbytes() // some[0].itemsize
            memory = torch.arange(cells, device="cpu")
            places = [memory.as_strided(t.shape, t.stride(), t.storage_offset()).reshape(-1) for t in some]
            if len(torch.cat(places).unique()) < sum(map(len, places)):
                remedy = " and ".join(f"{self._called(name)}.clone()" for name in names)
                shared = "share" if len(names) > 1 else "has entries that share"
                raise InputError(
                    f"{' and '.join(map(self._called, names))} {shared} memory, so a step would move it twice. Pass"
                    f" {remedy}."
                )

    def _admit(self, name: str, tensor: Tensor) -> None:
        where = self._called(name)
        if tensor.layout != torch.strided:
            raise InputError(f"{where} is a sparse tensor, which cannot be trained here. Pass {where}.to_dense().")
        if tensor.device.type == "meta":
            raise InputError(f"{where} is on the meta device, which holds no numbers. Make it on the CPU or a GPU.")
        if not tensor.is_floating_point():
            raise InputError(f"{where} has dtype {tensor.dtype}; only floating-point tensors can be trained.")
        if not tensor.is_leaf:
            raise InputError(
                f"{where} is the result of a computation, so it cannot be trained in place. Pass {where}.detach()."
            )
        if tensor.is_inference():
            raise InputError(
                f"{where} was created inside torch.inference_mode, so it has no derivatives. Create or clone() it"
                " outside."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{where} contains nan or inf before the first step.")

    @contextmanager
    def view(self, tensors: Sequence[Tensor] | None = None) -> Iterator[Given]:
        """Yield what the user's functions expect, with `tensors` in place of the leaves (default: the leaves).

        A compiled module that is to hold other tensors is yielded uncompiled. Casts that autocast has kept are dropped:
        the leaves may have moved since, or tensors of another pass may have replaced them.
        """
        torch.clear_autocast_cache()
        self.check_whole()
        if self.root is None:
            tensors = self.leaves if tensors is None else tensors
            yield (
                tensors[0]
                if isinstance(self.given, Tensor)
                else self._frozen | dict(zip(self.names, tensors, strict=True))
            )
            return
        if tensors is None:
            yield self._given
            return
        try:
            self._put(tensors)
            yield self.root
        finally:
            self._put(self.leaves)

    @contextmanager
    def nearby(self, part: float = 0.1) -> Iterator[None]:
        """A context in which every entry is moved by a part of its size, so that nothing is zero by accident or design.

        Signs stay, because a variance or a rate is positive. A zero moves by a part of the others' size. The leaves are
        the same objects, in backward passes too, and get their own memory back. Draws from torch's generator.
        """
        kept = [leaf.data for leaf in self.leaves]
        try:
            for leaf in self.leaves:
                size = leaf.data.norm() / max(1, leaf.numel()) ** 0.5
                size = torch.where(size > 0, size, torch.ones_like(size))
                step = part * torch.where(leaf.data == 0, size, leaf.data.abs())
                leaf.data = leaf.data + step * torch.randn_like(leaf)
            yield
        finally:
            for leaf, data in zip(self.leaves, kept, strict=True):
                leaf.data = data

    def _put(self, tensors: Sequence[Tensor]) -> None:
        recurrent = set()
        for places, tensor in zip(self._places, tensors, strict=True):
            for module, name in places:
                # Attribute assignment insists on nn.Parameter, but this may be any tensor of a graph.
                module._parameters[name] = tensor  # type: ignore[assignment]  # torch takes tensors here, and says parameters
                if hasattr(module, "_flat_weights_names"):
                    recurrent.add(module)
        for module in recurrent:  # LSTM and its kin keep a second list of their weights
            # A list of recurrent modules alone, which the types of Module do not know of.
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]  # type: ignore[union-attr, assignment]

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Keep buffers and training flags as they are: inside, the module works on clones of its buffers."""
        if self.root is None:
            yield
            return
        modules = list(self.root.modules())
        flags = [m.training for m in modules]
        clones: dict[int, Tensor] = {}
        originals = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
        try:
            for module, name, buffer in originals:
                module._buffers[name] = clones.setdefault(id(buffer), buffer.clone())
            yield
        finally:
            for module, name, buffer in originals:
                module._buffers[name] = buffer
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Every buffer of the module, with a copy of its value now."""
        return [] if self.root is None else [(buffer, buffer.clone()) for buffer in self.root.buffers()]

    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers of the module by name; none for tensors."""
        return {} if self.root is None else dict(self.root.named_buffers())

    def frozen(self) -> dict[str, Tensor]:
        """Entries that are not trained, by name."""
        if self.root is None:
            return self._frozen
        return {name: p for name, p in self.root.named_parameters() if not p.requires_grad}

    def flatten(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """One vector (D,) from one tensor a leaf; a missing one counts as zeros."""
        parts = [
            (torch.zeros_like(leaf) if t is None else t).reshape(-1).to(self.dtype)
            for t, leaf in zip(tensors, self.leaves, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unflatten(self, vector: Tensor) -> list[Tensor]:
        """One tensor a leaf, of its shape and dtype, from a vector (D,)."""
        parts = vector.split(self.sizes) if len(self.sizes) > 1 else (vector,)
        return [p.reshape(leaf.shape).to(leaf.dtype) for p, leaf in zip(parts, self.leaves, strict=True)]

    def flat(self) -> Tensor:
        """A copy of the current value as one vector (D,)."""
        self.check_whole()
        found = self.flatten([leaf.detach() for leaf in self.leaves])
        return found.clone() if len(self.leaves) == 1 else found

    @torch.no_grad()
    def assign(self, vector: Tensor) -> None:
        """Write a vector (D,) into the leaves, in place."""
        self.check_whole()
        for leaf, part in zip(self.leaves, self.unflatten(vector), strict=True):
            leaf.copy_(part)

    def like(self, tensors: Sequence[Tensor]) -> Like:
        """Tensors in the form that was given: a tensor for a tensor, a dict by name otherwise."""
        return tensors[0] if isinstance(self.given, Tensor) else dict(zip(self.names, tensors, strict=True))

    def own(self) -> list[Tensor]:
        """The user's own tensors behind the leaves: a plain tensor is trained through an alias that requires a
        gradient.
        """
        if isinstance(self.given, Tensor):
            return [self.given]
        return [self.given[name] for name in self.names] if isinstance(self.given, dict) else list(self.leaves)

    def attached(self) -> list[Tensor]:
        """The user's own tensors, whose .grad is asked for; one that requires no gradient is refused."""
        own = self.own()
        for name, tensor in zip(self.names, own, strict=True):
            if not tensor.requires_grad:
                where = self.role if name == self.role else f"{self.role}[{name!r}]"
                raise InputError(
                    f"{where} does not require a gradient, so that backward() would not reach it. Call"
                    f" {where}.requires_grad_() first."
                )
        return own

    def slices(self) -> dict[str, slice]:
        """The slice of each leaf in the flat vector."""
        places, start = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            places[name] = slice(start, start + size)
            start += size
        return places


def dot(a: Tensor, b: Tensor) -> Tensor:
    """a . b in float64. Of long vectors, copies in float64 would take twice their memory: the products are rounded
    there.
    """
    if len(a) <= PIECE:
        return a.double().dot(b.double())
    if a is b:
        norm: Tensor = torch.linalg.vector_norm(a, dtype=torch.float64)
        return norm.square()
    pieces = zip(a.split(PIECE), b.split(PIECE), strict=True)
    return torch.stack([(some * other).sum(dtype=torch.float64) for some, other in pieces]).sum()


def products(*vectors: Tensor) -> Tensor:
    """All products of vectors (D,) with each other in float64, (n, n): one operation where they are short."""
    if len(vectors[0]) <= SHORT:
        rows = torch.stack(vectors).double()
        return rows @ rows.T
    found = {(i, j): dot(a, b) for i, a in enumerate(vectors) for j, b in enumerate(vectors) if i <= j}
    count = range(len(vectors))
    return torch.stack([torch.stack([found[min(i, j), max(i, j)] for j in count]) for i in count])


def _parallel(module: object) -> DistributedDataParallel | None:
    """The DistributedDataParallel around a module, or inside torch.compile around it."""
    while not isinstance(module, DistributedDataParallel):
        module = getattr(module, "_orig_mod", None)
        if module is None:
            return None
    return module


def _unparalleled(module: nn.Module) -> nn.Module:
    """The module without DistributedDataParallel, whose gradients are summed here; as compiled as it was."""
    wrapper = _parallel(module)
    if wrapper is None:
        return module
    inside = _unparalleled(wrapper.module)
    return inside if wrapper is module else module.dynamo_ctx(inside)  # type: ignore[operator]  # of a compiled module alone


def _inside(module: nn.Module) -> nn.Module:
    """The module without anything around it."""
    while True:
        wrapped = module.module if isinstance(module, DistributedDataParallel) else getattr(module, "_orig_mod", module)
        if wrapped is module:
            return module
        module = wrapped


def _span(tensor: Tensor) -> int:
    """From its first entry to its last one in memory, in entries."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
