"""How each kind of container is taken apart and made again, and the walks built on that."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import UserDict, UserList
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._validation import is_class

T = TypeVar("T")
_CLASSES = 1024  # that are remembered


class Kind(ABC):
    """How containers of one class are taken apart and made again."""

    @abstractmethod
    def parts(self, tree: Any) -> Collection[Any]:
        """The parts of the container, in order."""

    @abstractmethod
    def steps(self, tree: Any) -> list[str]:
        """The way to each part, as Python writes it: `[0]`, `['x']`, `.x`."""

    @abstractmethod
    def rebuilt(self, tree: Any, parts: Sequence[Any]) -> Any:
        """A container like this one with other parts."""

    def holders(self, tree: Any) -> Collection[Any]:
        """Of the parts those that may hold tensors."""
        return self.parts(tree)

    def rest(self, tree: Any) -> tuple[Any, ...]:
        """What else is needed to make such a container of its holders."""
        return ()

    @abstractmethod
    def made(self, cls: type, rest: tuple[Any, ...], holders: Sequence[Any]) -> Any:
        """A container of these parts."""


class SequenceKind(Kind):
    """Tuples and lists."""

    @override
    def parts(self, tree: Any) -> Collection[Any]:
        items: Collection[Any] = tree
        return items

    @override
    def steps(self, tree: Any) -> list[str]:
        return [f"[{i}]" for i in range(len(tree))]

    @override
    def rebuilt(self, tree: Any, parts: Sequence[Any]) -> Any:
        return self.made(type(tree), (), parts)

    @override
    def made(self, cls: type, rest: tuple[Any, ...], holders: Sequence[Any]) -> Any:
        return cls(holders)


class NamedTupleKind(SequenceKind):
    """Named tuples, whose parts are positional arguments."""

    @override
    def made(self, cls: type, rest: tuple[Any, ...], holders: Sequence[Any]) -> Any:
        return cls(*holders)


class MappingKind(Kind):
    """Dicts and other mappings, in their own order."""

    @override
    def parts(self, tree: Any) -> Collection[Any]:
        return [tree[key] for key in tree]

    @override
    def steps(self, tree: Any) -> list[str]:
        return [f"[{key!r}]" for key in tree]

    @override
    def rest(self, tree: Any) -> tuple[Any, ...]:
        return tuple(tree)

    @override
    def made(self, cls: type, rest: tuple[Any, ...], holders: Sequence[Any]) -> Any:
        """A mapping of these values; a dict if the class cannot be made from one."""
        named = dict(zip(rest, holders, strict=True))
        try:
            return named if cls is dict else cls(named)
        except TypeError:
            return named

    @override
    def rebuilt(self, tree: Any, parts: Sequence[Any]) -> Any:
        if type(tree) is dict or not isinstance(tree, (dict, UserDict)):
            return self.made(type(tree), self.rest(tree), parts)
        made = copy.copy(tree)
        for key, item in zip(tree, parts, strict=True):
            made[key] = item
        return made


class DataclassKind(Kind):
    """Dataclasses: the fields that are set."""

    def __init__(self, cls: type) -> None:
        self._names = [field.name for field in fields(cls)]
        plain = _plain_fields(cls)
        self._holding = [name for name in self._names if name not in plain]
        self._plain = [name for name in self._names if name in plain]
        self._get, self._get_holding, self._get_plain = map(_getter, (self._names, self._holding, self._plain))
        own = {name for base in cls.__mro__[:-1] for name in vars(base)}
        self._is_simple = own.isdisjoint(("__slots__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__"))
        self._cached = [
            name for base in cls.__mro__ for name, item in vars(base).items() if isinstance(item, cached_property)
        ]

    def _set(self, tree: Any) -> list[str]:
        return [name for name in self._names if hasattr(tree, name)]

    @override
    def parts(self, tree: Any) -> Collection[Any]:
        try:
            return self._get(tree)
        except AttributeError:  # a field without a value
            return [getattr(tree, name) for name in self._set(tree)]

    @override
    def steps(self, tree: Any) -> list[str]:
        return [f".{name}" for name in self._set(tree)]

    @override
    def rebuilt(self, tree: Any, parts: Sequence[Any]) -> Any:
        names = self._names if len(parts) == len(self._names) else self._set(tree)
        if self._is_simple:  # what copy.copy does, at a third of its time
            made = object.__new__(type(tree))
            vars(made).update(vars(tree))
            vars(made).update(zip(names, parts, strict=True))
        else:
            made = _with_attributes(copy.copy(tree), names, parts)
        for name in self._cached:  # computed from the parts before
            vars(made).pop(name, None)
        return made

    @override
    def holders(self, tree: Any) -> Collection[Any]:
        try:
            return self._get_holding(tree)
        except AttributeError:
            return self.parts(tree)

    @override
    def rest(self, tree: Any) -> tuple[Any, ...]:
        return self._get_plain(tree)

    @override
    def made(self, cls: type, rest: tuple[Any, ...], holders: Sequence[Any]) -> Any:
        """A dataclass with these fields, frozen or not."""
        return _with_attributes(object.__new__(cls), (*self._plain, *self._holding), (*rest, *holders))


def _with_attributes(made: Any, names: Sequence[str], values: Sequence[Any]) -> Any:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _getter(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The attributes of these names at once."""
    if not names:
        return lambda tree: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda tree: (get(tree),)


def _plain_fields(cls: type) -> set[str]:
    """Fields annotated to hold no tensor. Only annotations of this package are trusted, which a type checker has
    verified.
    """
    if not cls.__module__.startswith("nhgd."):
        return set()
    try:
        return {name for name, hint in get_type_hints(cls).items() if _is_plain(hint)}
    except NameError:  # of a class that is imported for the type checker alone
        return set()


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType, tuple):
        return all(map(_is_plain, get_args(hint)))
    if not is_class(hint):
        return hint is Ellipsis
    if kind_of(hint) is None:
        return not issubclass(hint, Tensor) and not issubclass(Tensor, hint)
    names = getattr(hint, "_fields", None)  # of a named tuple
    return names is not None and _plain_fields(hint).issuperset(names)


_SEQUENCE, _NAMED_TUPLE, _MAPPING = SequenceKind(), NamedTupleKind(), MappingKind()


_kinds: dict[type, Kind | None] = {}


def kind_of(cls: type) -> Kind | None:
    """How containers of this class are taken apart; None for a leaf."""
    try:
        return _kinds[cls]
    except KeyError:
        if len(_kinds) >= _CLASSES:  # a loader may make a class for each batch
            _kinds.clear()
        kind = _kinds[cls] = _recognised(cls)
        return kind


def _recognised(cls: type) -> Kind | None:
    if issubclass(cls, Mapping):
        return _MAPPING
    if is_dataclass(cls):
        return DataclassKind(cls)
    if issubclass(cls, (list, UserList)):
        return _SEQUENCE
    # A torch.Size is a value, and a tuple that can be moved, such as a PackedSequence, knows how.
    if not issubclass(cls, tuple) or issubclass(cls, torch.Size) or hasattr(cls, "to"):
        return None
    return _NAMED_TUPLE if hasattr(cls, "_fields") else _SEQUENCE


def children(tree: Any) -> list[tuple[str, Any]] | None:
    """The parts of a container with the way to each, or None for a leaf.

    >>> children({"x": 1, "y": (2, 3)})
    [("['x']", 1), ("['y']", (2, 3))]
    """
    kind = kind_of(type(tree))
    return None if kind is None else list(zip(kind.steps(tree), kind.parts(tree), strict=True))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf, tensor or not, with the way to it.

    >>> list(leaves(({"a": 1}, [None])))
    [("[0]['a']", 1), ('[1][0]', None)]
    """
    found = children(tree)
    if found is None:
        yield path, tree
    else:
        for step, item in found:
            yield from leaves(item, path + step)


def named_tensors(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with the way to it: `[0]`, `['x']`, `[1][0]`, `.x`.

    >>> [path for path, _ in named_tensors((torch.zeros(2), {"y": torch.zeros(2)}))]
    ['[0]', "[1]['y']"]
    """
    return ((path, leaf) for path, leaf in leaves(tree) if isinstance(leaf, Tensor))


def tensors(tree: Any) -> list[Tensor]:
    """Every tensor, in the order of `leaves`. It is asked for at every inner step, so nothing is made on the way."""
    found: list[Tensor] = []
    _collect((tree,), found)
    return found


def _collect(parts: Collection[Any], found: list[Tensor]) -> None:
    for item in parts:
        cls = type(item)
        if cls is Tensor:
            found.append(item)
        elif cls is tuple:
            _collect(item, found)
        elif (kind := kind_of(cls)) is not None:
            _collect(kind.holders(item), found)
        elif issubclass(cls, Tensor):
            found.append(item)


def map_leaves(function: Callable[[Any], Any], tree: T) -> T:
    """A tree of the same containers with `function` applied to every leaf."""
    kind = kind_of(type(tree))
    if kind is None:
        made: T = function(tree)
        return made
    rebuilt: T = kind.rebuilt(tree, [map_leaves(function, item) for item in kind.parts(tree)])
    return rebuilt


def map_tensors(function: Callable[[Tensor], Any], tree: T) -> T:
    """A tree of the same containers with `function` applied to every tensor.

    >>> map_tensors(torch.numel, {"x": torch.zeros(2, 3), "note": "kept"})
    {'x': 6, 'note': 'kept'}
    """
    kind = kind_of(type(tree))
    if kind is not None:
        rebuilt: T = kind.rebuilt(tree, [map_tensors(function, item) for item in kind.parts(tree)])
        return rebuilt
    return function(tree) if isinstance(tree, Tensor) else tree


class Slot(Enum):
    """A placeholder for a tensor."""

    TENSOR = "tensor"


_SLOT = Slot.TENSOR  # found more quickly


class Structure(NamedTuple):
    """A container without its tensors. It can be compared, and hashed where its plain values can."""

    cls: type
    rest: tuple[Any, ...]
    holders: tuple[Any, ...]


def flatten(tree: Any) -> tuple[Any, list[Tensor]]:
    """A tree without its tensors, and the tensors; `unflatten` goes back. The fields of dataclasses must all be set.

    >>> flatten((torch.tensor(1), "kept"))
    (Structure(cls=<class 'tuple'>, rest=(), holders=(<Slot.TENSOR: 'tensor'>, 'kept')), [tensor(1)])
    """
    found: list[Tensor] = []
    (structure,) = _outlined((tree,), found)
    return structure, found


def _outlined(parts: Collection[Any], found: list[Tensor]) -> tuple[Any, ...]:
    """What each part is without its tensors, which are put into `found`."""
    made: list[Any] = []
    for item in parts:
        cls = type(item)
        if cls is Tensor:
            found.append(item)
            made.append(_SLOT)
        elif cls is tuple:
            made.append(Structure(tuple, (), _outlined(item, found)))
        elif (kind := kind_of(cls)) is not None:
            made.append(Structure(cls, kind.rest(item), _outlined(kind.holders(item), found)))
        elif issubclass(cls, Tensor):
            found.append(item)
            made.append(_SLOT)
        else:
            made.append(item)
    return tuple(made)


def unflatten(structure: Any, tensors: Iterable[Any]) -> Any:
    """The tree that `flatten` took apart, with these tensors.

    >>> unflatten(flatten((torch.tensor(1), "kept"))[0], [torch.tensor(2)])
    (tensor(2), 'kept')
    """
    given = iter(tensors)
    made = _filled(structure, given)
    if next(given, None) is not None:
        raise ValueError("There are more tensors than slots.")
    return made


def _filled(structure: Any, given: Iterator[Any]) -> Any:
    if isinstance(structure, Structure):
        kind = kind_of(structure.cls)
        assert kind is not None
        return kind.made(structure.cls, structure.rest, [_filled(part, given) for part in structure.holders])
    return next(given) if structure is _SLOT else structure
