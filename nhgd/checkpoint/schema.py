"""The form of a checkpoint, which is checked once before anything is used.

A file whose hashes fit may still be of another version, or be made by hand. What passes here can be unpacked and put
back without a further look at kinds, sizes and names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from nhgd._tree.encoding import DTYPES, OPTIMISERS
from nhgd._validation import is_class

DEEPEST = 60  # levels of a tree; a run has about ten
LARGEST = 2**62  # of any counter
Check: TypeAlias = Callable[[Any, str], None]


class Misfit(ValueError):
    """Something in a checkpoint has the wrong form: its path and what it should be."""

    def __init__(self, where: str, must: str) -> None:
        super().__init__(f"{where} must be {must}")


def _be(holds: bool, where: str, must: str) -> None:
    if not holds:
        raise Misfit(where, must)


def text(value: Any, where: str) -> None:
    """A string."""
    _be(isinstance(value, str), where, "text")


def flag(value: Any, where: str) -> None:
    """Yes or no."""
    _be(type(value) is bool, where, "true or false")


def count(value: Any, where: str) -> None:
    """A whole number of at least 0."""
    _be(type(value) is int and 0 <= value < LARGEST, where, "a whole number of at least 0")


def count_from_1(value: Any, where: str) -> None:
    """A whole number of at least 1."""
    _be(type(value) is int and 1 <= value < LARGEST, where, "a whole number of at least 1")


def number(value: Any, where: str) -> None:
    """Any number."""
    _be(type(value) in (int, float), where, "a number")


def seconds(value: Any, where: str) -> None:
    """A time."""
    _be(type(value) in (int, float) and 0 <= value < math.inf, where, "a time in seconds")


def optional(check: Check) -> Check:
    """None, or something."""
    return lambda value, where: None if value is None else check(value, where)


def mapping(check: Check) -> Check:
    """Anything by name."""

    def look(value: Any, where: str) -> None:
        _be(isinstance(value, dict) and all(type(key) is str for key in value), where, "things by name")
        for key, item in value.items():
            check(item, f"{where}/{key}")

    return look


def listing(check: Check, length: int | None = None) -> Check:
    """A list of items."""

    def look(value: Any, where: str) -> None:
        _be(isinstance(value, list), where, "a list")
        _be(length is None or len(value) == length, where, f"a list of {length}")
        for i, item in enumerate(value):
            check(item, f"{where}/{i}")

    return look


def record(**checks: Check) -> Check:
    """Exactly these, by name."""

    def look(value: Any, where: str) -> None:
        _be(isinstance(value, dict) and set(value) == set(checks), where, f"made of {', '.join(sorted(checks))}")
        for key, check in checks.items():
            check(value[key], f"{where}/{key}")

    return look


def anything(value: Any, where: str) -> None:
    """Any JSON value."""


def tree(tensors: Mapping[str, Tensor]) -> Check:
    """A tree as an `Encoder` makes them, of these tensors."""
    names = text
    kinds: dict[str, Callable[[Any, str, int], None]] = {}

    def node(value: Any, where: str, deep: int = 0) -> None:
        _be(deep < DEEPEST, where, f"less than {DEEPEST} levels deep")
        if value is None or isinstance(value, (bool, int, float, str)):
            _be(not isinstance(value, int) or abs(value) < 2**63, where, "a whole number of 64 bits")
            return
        if isinstance(value, list):
            for i, item in enumerate(value):
                node(item, f"{where}/{i}", deep + 1)
            return
        kind = next((name for name in kinds if isinstance(value, dict) and name in value), None)
        _be(kind is not None, where, "a part of a tree")
        kinds[str(kind)](value, where, deep)

    def held(value: Any, where: str, deep: int) -> None:
        known = {"tensor", "kind", "shape", "on"}
        _be(known <= set(value) <= known | {"strides"} and value["on"] in ("cpu", "device"), where, "a tensor")
        name = value["tensor"]
        _be(isinstance(name, str) and name in tensors, where, "one of the tensors beside it")
        found = str(tensors[name].dtype).removeprefix("torch."), list(tensors[name].shape)
        _be(
            (value["kind"], value["shape"]) == found,
            where,
            f"{found[0]} of shape {tuple(found[1])}, as the tensor beside it",
        )
        strides = value.get("strides")
        if strides is not None:
            _be(_fit(strides, tensors[name]), f"{where}/strides", "the order of its numbers in memory")

    def only(kind: str, check: Check) -> Callable[[Any, str, int], None]:
        def look(value: Any, where: str, deep: int) -> None:
            record(**{kind: check})(value, where)

        return look

    def among(kind: str, known: Mapping[str, Any]) -> Callable[[Any, str, int], None]:
        return only(kind, lambda name, where: _be(isinstance(name, str) and name in known, where, f"a known {kind}"))

    def deeper(kind: str, check: Callable[[Check], Check], *beside: str) -> Callable[[Any, str, int], None]:
        def look(value: Any, where: str, deep: int) -> None:
            within = check(lambda item, there: node(item, there, deep + 1))
            record(**{kind: within}, **dict.fromkeys(beside, names))(value, where)

        return look

    def pairs(value: Any, where: str, deep: int) -> None:
        def pair(entry: Any, there: str) -> None:
            _be(isinstance(entry, list) and len(entry) == 2 and _hashable(entry[0]), there, "a key and a value")
            node(entry[0], there, deep + 1)
            node(entry[1], there, deep + 1)

        record(dict=listing(pair))(value, where)

    kinds["tensor"] = held
    kinds["array"] = _array
    kinds["map"] = deeper("map", mapping)
    kinds["dict"] = pairs
    kinds["tuple"] = deeper("tuple", listing)
    kinds["float"] = among("float", {"nan": 0, "inf": 0, "-inf": 0})
    kinds["dtype"] = among("dtype", DTYPES)
    kinds["optimiser"] = among("optimiser", OPTIMISERS)
    kinds["opaque"] = only("opaque", names)
    kinds["named"] = deeper("items", listing, "named")
    kinds["class"] = deeper("fields", mapping, "class")
    return node


def _array(value: Any, where: str, deep: int) -> None:
    shape = listing(count)
    record(array=text, dtype=text, shape=shape, on=text)(value, where)
    _be(value["dtype"] in DTYPES, where, "an array of a known dtype")
    size = math.prod(value["shape"]) * DTYPES[value["dtype"]].itemsize
    _be(len(value["array"]) == 2 * size, where, "an array of its own size")


def _fit(strides: Any, tensor: Tensor) -> bool:
    """Whether a tensor may have these strides, in little more memory than it needs."""
    if not isinstance(strides, list) or len(strides) != tensor.ndim:
        return False
    if not all(type(stride) is int and 0 <= stride < LARGEST for stride in strides):
        return False
    reach = sum(stride * (size - 1) for stride, size in zip(strides, tensor.shape, strict=True) if size)
    return bool(reach < 4 * tensor.numel() + 2048)


def _hashable(node: Any) -> bool:
    if isinstance(node, dict) and set(node) == {"tuple"} and isinstance(node["tuple"], list):
        return all(map(_hashable, node["tuple"]))
    return not isinstance(node, (list, dict)) or (isinstance(node, dict) and set(node) <= {"float", "dtype"})


_VARIABLE = record(leaves=mapping(text), buffers=mapping(text), frozen=mapping(text))
_OPTIMISER = record(kind=text, groups=listing(mapping(anything)))


def check_document(contents: Any, tensors: Mapping[str, Tensor], trees: Iterable[str]) -> None:
    """Refuse contents other than those of a checkpoint with `trees` of these names."""
    node = tree(tensors)
    record(
        step=count,
        torch=text,
        threads=count_from_1,
        python=text,
        problem=record(device=text, theta=_VARIABLE, v=_VARIABLE),
        optimisers=record(inner=_OPTIMISER, outer=_OPTIMISER),
        settings=mapping(node),
        inverse=node,
        history=record(rows=count, bytes=count, sha256=text),
        **dict.fromkeys(trees, node),
    )(contents, "contents")


def tensor_like(like: Tensor) -> Check:
    """A tensor of the same dtype and shape."""

    def look(value: Any, where: str) -> None:
        fits = isinstance(value, Tensor) and value.dtype == like.dtype and value.shape == like.shape
        _be(fits, where, f"a tensor of {like.dtype} and shape {tuple(like.shape)}")

    return look


def like(values: Mapping[str, Any]) -> Check:
    """The same names, with numbers where those are numbers."""
    checks: dict[type, Check] = {int: count, float: seconds, NoneType: anything}
    return record(**{name: checks.get(type(value), anything) for name, value in values.items()})


def generators(value: Any, where: str) -> None:
    """The places of torch's, NumPy's and Python's random generators."""

    def cuda(state: Any, place: str) -> None:
        _be(isinstance(state, Tensor) and state.dtype == torch.uint8 and state.ndim == 1, place, "bytes")

    def whole(length: int, largest: int) -> Check:
        def look(state: Any, place: str) -> None:
            fits = isinstance(state, Tensor) and state.dtype == torch.int64 and state.shape == (length,)
            _be(fits and bool(((state >= 0) & (state <= largest)).all()), place, f"{length} whole numbers")

        return look

    def numpy_rest(rest: Any, place: str) -> None:
        listing(number, 3)(rest, place)
        _be(type(rest[0]) is int and 0 <= rest[0] <= 624, place, "a place of NumPy's generator")
        _be(rest[1] in (0, 1), place, "a place of NumPy's generator")

    def python_rest(rest: Any, place: str) -> None:
        listing(optional(number), 2)(rest, place)
        _be(rest[0] == 3, place, "a place of Python's generator")

    record(
        cpu=tensor_like(torch.get_rng_state()),
        cuda=optional(cuda),
        numpy=whole(624, 2**32 - 1),
        numpy_rest=numpy_rest,
        python=whole(625, 2**32 - 1),
        python_rest=python_rest,
    )(value, where)


def position(value: Any, where: str) -> None:
    """The place in a stream of batches."""
    own = listing(lambda state, place: _be(isinstance(state, Tensor), place, "a tensor"))
    begun = optional(record(**{"global": generators, "own": own}))
    record(passes=count, taken=count, start=begun, before=begun, own=own, last=optional(text))(value, where)


def conform(value: Any, hint: Any, where: str) -> None:
    """Refuse a value that is not what its annotation announces; of one that cannot be read nothing is asked."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = " or ".join(getattr(option, "__name__", str(option)) for option in inside)
        _be(any(_conforms(value, option) for option in inside), where, kinds)
    elif hint is None or hint is NoneType:
        _be(value is None, where, "nothing")
    elif hint in (int, float, str, bool):
        fits = type(value) in ((int, float) if hint is float else (hint,))
        on_device = isinstance(value, Tensor) and value.ndim == 0  # a number that has not been read from the device yet
        _be(fits or on_device, where, f"of the kind {hint.__name__}")
    elif origin in (list, tuple, dict) or hint in (list, tuple, dict):
        kind = origin or hint
        _be(isinstance(value, kind), where, f"a {kind.__name__}")
        if kind is dict and len(inside) == 2:
            for key, item in value.items():
                conform(key, inside[0], f"{where}/{key}")
                conform(item, inside[1], f"{where}/{key}")
        elif kind is list and inside:
            for i, item in enumerate(value):
                conform(item, inside[0], f"{where}/{i}")
    elif hint is torch.dtype:
        _be(isinstance(value, hint), where, "a dtype")
    elif is_class(hint) and (issubclass(hint, Tensor) or is_dataclass(hint)):
        _be(isinstance(value, hint), where, f"a {hint.__name__}")
        if is_dataclass(hint):
            announced(value, where)


def _conforms(value: Any, hint: Any) -> bool:
    try:
        conform(value, hint, "")
    except Misfit:
        return False
    return True


def announced(value: Any, where: str) -> None:
    """Refuse a dataclass whose fields do not match their annotations."""
    try:
        hints = get_type_hints(type(value))
    except (NameError, TypeError):
        return
    for field in fields(value):
        conform(getattr(value, field.name), hints.get(field.name, Any), f"{where}/{field.name}")


def check_same_kind(value: Any, fresh: Any, where: str) -> None:
    """Refuse a state that differs from a fresh one: other classes, or tensors of another size."""
    if is_dataclass(fresh):
        _be(type(value) is type(fresh), where, f"a {type(fresh).__name__}")
        announced(value, where)
        for field in fields(fresh):
            _sized(getattr(value, field.name), getattr(fresh, field.name), f"{where}/{field.name}")
    else:
        _be((value is None) == (fresh is None), where, "what the method keeps")
        _sized(value, fresh, where)


def _sized(value: Any, fresh: Any, where: str) -> None:
    if isinstance(fresh, Tensor) and isinstance(value, Tensor):
        if fresh.numel():  # an empty one is there to grow
            tensor_like(fresh)(value, where)
    elif isinstance(fresh, dict) and isinstance(value, dict):
        for key in fresh.keys() & value.keys():
            _sized(value[key], fresh[key], f"{where}/{key}")
    elif is_dataclass(fresh) and is_dataclass(value):
        check_same_kind(value, fresh, where)
