"""How work on the CPU is captured: as a list of torch operations on fixed memory, without autograd and without Python
between them.

A step is noted below autograd, where it is a straight line of operations: backward passes have become operations like
any other. Those that only make views, and those whose results nobody reads, are left out. Every other one is called
again with the same arguments; its result goes to fixed memory, by its own `out=` form where it has one. Memory that is
needed inside the segment alone is shared by results that are not needed at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from nhgd._captured import kernels
from nhgd._captured.graph import AbstractCapture, Segment
from nhgd._tape import NotRepeatable

# Operations that give the host a number, or a result whose shape depends on numbers.
READS = frozenset(
    ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "_unique2", "unique_dim")
)
NUMBERS = frozenset(("tolist", "item", "__float__", "__int__", "__bool__", "numpy", "__index__"))
EMPTY = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
COPIES = frozenset(("clone", "_to_copy"))
LINE = 64  # bytes: smaller results keep memory of their own
PRODUCTS: Any = "narrow products"  # in place of an operation of torch


class Place(NamedTuple):
    """A tensor of the step: where it lies in which memory."""

    memory: int
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Operation(NamedTuple):
    """A call. Tensors among the arguments and results are Places."""

    function: OpOverload
    args: Any
    kwargs: Any
    results: list[Place]  # in new memory; empty where arguments alone are changed
    changes: bool  # whether arguments are changed
    writes: frozenset[int]
    reads: frozenset[int]


@final
class Operations(Segment):
    """Captured calls, each on its own tensors."""

    def __init__(self, calls: list[tuple[Callable[..., Any], Any, Any]]) -> None:
        self._calls = calls

    def __len__(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        """Do them again."""
        with torch.no_grad():
            for function, args, kwargs in self._calls:
                function(*args, **kwargs)


class _Notes(TorchDispatchMode):
    """Notes the operations of a segment while they run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.operations: list[Operation] = []
        self.memory: list[torch.UntypedStorage] = []
        self.made: set[int] = set()  # memory that operations of this segment gave
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._overloadpacket.__name__
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        _refuse(func, name, args)
        noted_args, noted_kwargs = tree_map(self._noted, (args, kwargs))
        result = func(*args, **kwargs)
        results = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        new = [t for t in results if t.untyped_storage()._cdata not in self._known]
        written = _written(func, args, kwargs)
        named = any(isinstance(t, Tensor) for t in tree_leaves((args, kwargs)))  # else it asks of dtypes, and the like
        if new or written or (named and not results):
            places = [self._noted(t, made=True) for t in results]
            writes = {p.memory for p in (*places, *map(self._noted, written))} if written or new else set()
            given = tree_leaves((noted_args, noted_kwargs), is_leaf=_is_place)
            reads = frozenset(p.memory for p in given if isinstance(p, Place))
            if name not in EMPTY:
                kept, changes = places if new else [], bool(written)
                noted = Operation(func, noted_args, noted_kwargs, kept, changes, frozenset(writes), reads)
                self.operations.append(noted)
        return result

    def _noted(self, leaf: Any, made: bool = False) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.layout != torch.strided or leaf.device.type != "cpu" or leaf.is_conj() or leaf.is_neg():
            raise NotRepeatable("a step works on tensors other than dense real ones of the CPU")
        storage = leaf.untyped_storage()
        number = self._known.get(storage._cdata)
        if number is None:
            number = self._known[storage._cdata] = len(self.memory)
            self.memory.append(storage)
            if made:
                self.made.add(number)
        return Place(number, int(leaf.storage_offset()), leaf.shape, leaf.stride(), leaf.dtype)

    def kept(self) -> set[int]:
        """Memory that anybody else holds, and all that was there before."""
        held = {number for number in self.made if torch._C._storage_Use_Count(self.memory[number]._cdata) > 1}
        return held | (set(range(len(self.memory))) - self.made)


class _NoNumbers(TorchFunctionMode):
    """Refuses numbers that the host would read past the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in NUMBERS:
            raise NotRepeatable(f"{name} reads a number")
        return func(*args, **(kwargs or {}))


@final
class OperationCapture(AbstractCapture):
    """Segments of operations. While they are captured, they run."""

    name = "operations"
    overlaps = False
    gathers_ahead = False  # a batch is found in the cache where it has just been gathered

    def __init__(self) -> None:
        self._modes: list[Any] = []

    @override
    def refusal(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"theta is on {device.type}, whose work is captured otherwise"

    @override
    def open(self) -> None:
        self._modes = [_NoNumbers(), _Notes()]
        for mode in self._modes:
            mode.__enter__()

    @override
    def close(self) -> Segment:
        notes = self._modes[1]
        self.abandon()
        return Operations(list(_laid_out(notes)))

    @override
    def abandon(self) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
        self._modes = []

    @override
    def settled(self) -> None:
        pass


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, Place)


def _refuse(func: OpOverload, name: str, args: Any) -> None:
    """Refuse what cannot be repeated."""
    if name in READS:
        raise NotRepeatable(f"{name} reads a number")
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise NotRepeatable(f"{name} draws random numbers")
    if name in ("index", "index_put", "index_put_"):
        masks = [t for t in tree_leaves(args[1]) if isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8)]
        if masks:
            raise NotRepeatable("a mask selects some entries, whose number depends on values")


def _written(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[i] if i < len(args) else kwargs.get(argument.name))
    return [t for t in tree_leaves(found) if isinstance(t, Tensor)]


def _laid_out(notes: _Notes) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """The calls that matter, on their memory."""
    kept = notes.kept()
    needed, wanted = list[Operation](), set(kept)
    for operation in reversed(notes.operations):
        if not operation.writes or operation.writes & wanted:
            wanted |= operation.reads | operation.writes
            needed.append(operation)
    needed.reverse()
    needed = _paired(needed)
    memory = _shared(needed, notes.memory, kept)
    known: dict[Place, Tensor] = {}

    def tensor(leaf: Any) -> Any:
        if not isinstance(leaf, Place):
            return leaf
        if leaf not in known:
            made = torch.empty(0, dtype=leaf.dtype, device="cpu")
            known[leaf] = made.set_(memory[leaf.memory], leaf.offset, leaf.size, leaf.stride)
        return known[leaf]

    for operation in needed:
        args, kwargs = tree_map(tensor, (operation.args, operation.kwargs), is_leaf=_is_place)
        yield _call(operation, args, kwargs, [tensor(place) for place in operation.results])


def _paired(operations: Sequence[Operation]) -> list[Operation]:
    """The same with two products of one tall matrix made one, where the second narrow one is known at the first."""
    found: list[Operation] = []
    open_products: dict[Place, int] = {}  # where each tall matrix was multiplied last
    for operation in operations:
        parts = kernels.narrow_product(operation.function, operation.args, operation.kwargs)
        if parts is None or operation.changes:
            found.append(operation)
            continue
        a, *narrow = parts
        first = open_products.pop(a, None)
        if first is not None and not {n for later in found[first:] for n in later.writes} & operation.reads:
            one = found[first]
            found[first] = one._replace(
                args=(*one.args, (narrow[0], narrow[1])),
                results=[*one.results, *operation.results],
                writes=one.writes | operation.writes,
                reads=one.reads | operation.reads,
            )
            continue
        open_products[a] = len(found)
        found.append(operation._replace(function=PRODUCTS, args=(a, (narrow[0], narrow[1]))))
    return found


def _shared(operations: Sequence[Operation], memory: list[torch.UntypedStorage], kept: set[int]) -> list[Any]:
    """The memory of each number: results that are needed at different times lie in the same."""
    last = {number: i for i, operation in enumerate(operations) for number in operation.reads | operation.writes}
    ends: dict[int, list[int]] = {}
    for number, i in last.items():
        ends.setdefault(i, []).append(number)
    found: list[Any] = list(memory)
    free: list[torch.UntypedStorage] = []
    begun = set[int]()
    for i, operation in enumerate(operations):
        for number in sorted(operation.writes - begun - kept):
            begun.add(number)
            size = memory[number].nbytes()
            fitting = [s for s in free if size <= s.nbytes() <= 2 * size] if size > LINE else []
            if fitting:
                found[number] = min(fitting, key=lambda s: s.nbytes())
                free = [s for s in free if s is not found[number]]
        free += [found[number] for number in ends.get(i, ()) if number not in kept and number in begun]
    return found


def _call(
    operation: Operation, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]
) -> tuple[Callable[..., Any], Any, Any]:
    """A call that leaves its results in the given memory."""
    function = operation.function
    if not results:
        return kernels.bound(function, args, kwargs, {})
    if function is PRODUCTS:
        return kernels.narrow_products(args[0], args[1:], results)
    other = None if operation.changes else kernels.faster(function, args, results)
    if other is not None:
        return other
    name = function._overloadpacket.__name__
    if name in COPIES:
        return torch.Tensor.copy_, (results[0], args[0]), {}
    if name in ("zeros", "zeros_like", "new_zeros"):
        return torch.Tensor.zero_, (results[0],), {}
    if name in ("ones", "ones_like", "new_ones"):
        return torch.Tensor.fill_, (results[0], 1), {}
    whole = len(results) == len(function._schema.returns)  # a gradient that nobody asked for is not there
    form = _out_form(function) if whole and not operation.changes else None
    if form is not None:
        outs = dict(zip(_outs(form), results, strict=True))
        known = {argument.name for argument in form._schema.arguments}
        given = {name: value for name, value in kwargs.items() if name in known}
        return kernels.bound(form, args, given, outs)
    return _copied, (function, args, kwargs, list(results)), {}


def _copied(function: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], results: Sequence[Tensor]) -> None:
    """For an operation that can only give new memory."""
    found = (t for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor))
    for place, tensor in zip(results, found, strict=True):
        place.copy_(tensor)


def _outs(form: OpOverload) -> list[str]:
    return [a.name for a in form._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


_FACTORY = frozenset(("dtype", "layout", "device", "pin_memory"))  # told by the memory itself


def _out_form(function: OpOverload) -> OpOverload | None:
    """The overload that takes the same arguments and the memory of its results; None if there is none."""
    packet, returns = function._overloadpacket, len(function._schema.returns)
    if any(str(r.type) != "Tensor" for r in function._schema.returns):
        return None
    wanted = [(a.name, str(a.type)) for a in function._schema.arguments]
    plain = [pair for pair in wanted if pair[0] not in _FACTORY]
    for name in packet.overloads():
        form = getattr(packet, name)
        outs = _outs(form)
        rest = [(a.name, str(a.type)) for a in form._schema.arguments if a.name not in outs]
        if len(outs) == returns and rest in (wanted, plain):
            return form  # type: ignore[no-any-return]  # of torch, by its name
    return None
