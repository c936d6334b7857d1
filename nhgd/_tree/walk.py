"""How each kind of container is taken apart and made again, and the walks built on that."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import UserDict, UserList
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property
from operator import attrgetter
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

T = TypeVar("T")
_CLASSES = 1024  # that are remembered


class Kind(ABC):
    """How containers of one class are taken apart and made again."""

    @abstractmethod
    def parts(self, tree: Any) -> Collection[Any]:
        """What the container holds, in order."""

    def holders(self, tree: Any) -> Collection[Any]:
        """Of the parts those that may hold tensors."""
        return self.parts(tree)

    @abstractmethod
    def steps(self, tree: Any) -> list[str]:
        """The way to each part, as Python writes it: `[0]`, `['x']`, `.x`."""

    @abstractmethod
    def rebuilt(self, tree: Any, parts: list[Any]) -> Any:
        """A container like this one with other parts."""


class SequenceKind(Kind):
    """Tuples and lists."""

    def parts(self, tree: Any) -> Collection[Any]:
        """The items."""
        items: Collection[Any] = tree
        return items

    def steps(self, tree: Any) -> list[str]:
        """Their places."""
        return [f"[{i}]" for i in range(len(tree))]

    def rebuilt(self, tree: Any, parts: list[Any]) -> Any:
        """One of the same class."""
        return type(tree)(parts)


class NamedTupleKind(SequenceKind):
    """Named tuples, whose parts are positional arguments."""

    def rebuilt(self, tree: Any, parts: list[Any]) -> Any:
        """One of the same class."""
        return type(tree)(*parts)


class MappingKind(Kind):
    """Dicts and other mappings, in their own order."""

    def parts(self, tree: Any) -> Collection[Any]:
        """The values."""
        return [tree[key] for key in tree]

    def steps(self, tree: Any) -> list[str]:
        """The keys."""
        return [f"[{key!r}]" for key in tree]

    def rebuilt(self, tree: Any, parts: list[Any]) -> Any:
        """One of the same class; a dict where that class cannot be made from a dict."""
        named = dict(zip(tree, parts, strict=True))
        if type(tree) is dict:
            return named
        if isinstance(tree, (dict, UserDict)):
            made = copy.copy(tree)  # with the attributes of a subclass
            for key, item in named.items():
                made[key] = item
            return made
        try:
            return type(tree)(named)  # a copy might share its items
        except TypeError:
            return named


class DataclassKind(Kind):
    """Dataclasses: the fields that are set. Attributes that are no fields are kept, values of cached properties are not."""

    def __init__(self, cls: type) -> None:
        self._names = [field.name for field in fields(cls)]
        self._parts = _getter(self._names)
        self._holders = _getter([name for name in self._names if name not in _plain_fields(cls)])
        own = {name for base in cls.__mro__[:-1] for name in vars(base)}
        self._is_simple = own.isdisjoint(("__slots__", "__copy__", "__reduce__", "__reduce_ex__", "__getstate__"))
        self._cached = [
            name for base in cls.__mro__ for name, item in vars(base).items() if isinstance(item, cached_property)
        ]

    def names(self, tree: Any) -> list[str]:
        """The fields that have a value."""
        return [name for name in self._names if hasattr(tree, name)]

    def parts(self, tree: Any) -> Collection[Any]:
        """The values of the fields."""
        try:
            return self._parts(tree)
        except AttributeError:  # a field without a value
            return [getattr(tree, name) for name in self.names(tree)]

    def holders(self, tree: Any) -> Collection[Any]:
        """The values of the fields that may hold tensors."""
        try:
            return self._holders(tree)
        except AttributeError:
            return self.parts(tree)

    def steps(self, tree: Any) -> list[str]:
        """The names of the fields."""
        return [f".{name}" for name in self.names(tree)]

    def rebuilt(self, tree: Any, parts: list[Any]) -> Any:
        """One of the same class, also where it is frozen."""
        names = self._names if len(parts) == len(self._names) else self.names(tree)
        if self._is_simple:  # what copy.copy does, at a third of its time
            made = object.__new__(type(tree))
            vars(made).update(vars(tree))
            vars(made).update(zip(names, parts, strict=True))
        else:
            made = copy.copy(tree)
            for name, item in zip(names, parts, strict=True):
                object.__setattr__(made, name, item)
        for name in self._cached:  # computed from the parts before
            vars(made).pop(name, None)
        return made


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """The attributes of these names at once."""
    if not names:
        return lambda tree: ()
    get = attrgetter(*names)
    return get if len(names) > 1 else lambda tree: (get(tree),)


def _plain_fields(cls: type) -> set[str]:
    """Fields announced to hold no tensor. Annotations are believed where a type checker has seen to them: in this package."""
    if not cls.__module__.startswith("nhgd."):
        return set()
    try:
        return {name for name, hint in get_type_hints(cls).items() if _is_plain(hint)}
    except NameError:  # of a class that is imported for the type checker alone
        return set()


def _is_plain(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType, tuple):
        return all(map(_is_plain, get_args(hint)))
    is_leaf = isinstance(hint, type) and kind_of(hint) is None and not issubclass(Tensor, hint)
    return hint is Ellipsis or (is_leaf and not issubclass(hint, Tensor))


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
    """What stands where a tensor was."""

    TENSOR = "tensor"


def flatten(tree: T) -> tuple[T, list[Tensor]]:
    """The tree with a `Slot` in place of each tensor, and the tensors; `unflatten` goes back.

    >>> flatten((torch.tensor(1), "kept"))
    ((<Slot.TENSOR: 'tensor'>, 'kept'), [tensor(1)])
    """
    return map_tensors(lambda _: Slot.TENSOR, tree), tensors(tree)


def unflatten(structure: T, tensors: Sequence[Tensor]) -> T:
    """The tree that `flatten` took apart, with these tensors.

    >>> unflatten((Slot.TENSOR, "kept"), [torch.tensor(2)])
    (tensor(2), 'kept')
    """
    given = iter(tensors)
    made = map_leaves(lambda leaf: next(given) if leaf is Slot.TENSOR else leaf, structure)
    if next(given, None) is not None:
        raise ValueError("There are more tensors than slots.")
    return made
