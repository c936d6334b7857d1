"""Trees of dataclasses, named tuples, dicts, lists, tensors and numbers as JSON beside a dict of tensors, and back.

The JSON names a class only so that it can be compared with the classes the reader expects: nothing is ever imported,
called or looked up by a name that stands in a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from nhgd.errors import InputError

Json: TypeAlias = Any
Classes: TypeAlias = Mapping[str, type]

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
OPTIMISERS = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)}
_CPU = torch.device("cpu")


class Unkept(TypeError):
    """Something a checkpoint cannot hold: where it lies and what it is."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(path, type(value).__name__)
        self.path = path
        self.kind = type(value).__name__


def full_name(cls: type) -> str:
    """What tells a class from any other."""
    return f"{cls.__module__}.{cls.__qualname__}"


def expected(*values: Any) -> dict[str, type]:
    """The dataclasses and named tuples that values like these may hold: their own, and what their fields announce."""
    found: dict[str, type] = {}

    def admit(kind: Any) -> None:
        for argument in get_args(kind):
            admit(argument)
        if not isinstance(kind, type) or not (is_dataclass(kind) or _named(kind)) or full_name(kind) in found:
            return
        found[full_name(kind)] = kind
        try:
            announced = get_type_hints(kind)
        except (NameError, TypeError):  # an annotation that cannot be read announces nothing
            return
        for hint in announced.values():
            admit(hint)

    def look(value: Any) -> None:
        if isinstance(value, type):
            admit(value)
            return
        admit(type(value))
        for item in _children(value):
            look(item)

    for value in values:
        look(value)
    return found


def _named(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, (list, tuple)):
        yield from value
    elif is_dataclass(value):
        yield from (getattr(value, field.name) for field in fields(value))


def pack(
    value: Any, path: str, tensors: dict[str, Tensor], classes: Classes | None = None, opaque: bool = False
) -> Json:
    """The JSON of a tree; its tensors are put into `tensors` under the path that leads to them.

    Args:
        value: the tree.
        path: its name.
        tensors: receives the tensors themselves, not copies.
        classes: the classes that the reader will expect; others are refused now, not then. None: any.
        opaque: note what cannot be held, such as a function, instead of refusing it.

    >>> tensors = {}
    >>> pack({"a": (1, float("inf"))}, "x", tensors)
    {'map': {'a': {'tuple': [1, {'float': 'inf'}]}}}
    >>> pack([torch.zeros(2)], "x", tensors)
    [{'tensor': 'x/0', 'kind': 'float32', 'shape': [2], 'on': 'cpu'}]
    >>> list(tensors)
    ['x/0']
    """

    def inside(item: Any, name: object) -> Json:
        return pack(item, f"{path}/{name}", tensors, classes, opaque)

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor) and value.layout == torch.strided and not opaque:
        return _pack_tensor(value, path, tensors)
    if isinstance(value, list):
        return [inside(item, i) for i, item in enumerate(value)]
    if isinstance(value, dict):
        if all(type(key) is str for key in value):
            return {"map": {key: inside(item, key) for key, item in value.items()}}
        return {"dict": [[inside(key, i), inside(item, key)] for i, (key, item) in enumerate(value.items())]}
    if isinstance(value, tuple) and type(value) in (tuple, torch.Size):
        return {"tuple": [inside(item, i) for i, item in enumerate(value)]}
    known = classes is None or full_name(type(value)) in classes
    if known and _named(type(value)):
        return {"named": full_name(type(value)), "items": [inside(item, i) for i, item in enumerate(value)]}
    if known and is_dataclass(value) and not isinstance(value, type):
        held = {f.name: inside(getattr(value, f.name), f.name) for f in fields(value)}
        return {"class": full_name(type(value)), "fields": held}
    for name, optimiser in OPTIMISERS.items():
        if value is optimiser:
            return {"optimiser": name}
    if opaque:
        return {"opaque": "a function" if callable(value) else f"an object, {type(value).__name__}"}
    raise Unkept(path, value)


def pack_row(value: Any, path: str) -> Json:
    """The JSON of a small tree, its tensors within it.

    >>> pack_row({"accuracy": torch.tensor([0.5])}, "row")
    {'map': {'accuracy': {'array': '0000003f', 'dtype': 'float32', 'shape': [1], 'on': 'cpu'}}}
    """
    tensors: dict[str, Tensor] = {}
    node = pack(value, path, tensors, {})
    return _with_arrays(node, tensors) if tensors else node


def _with_arrays(node: Json, tensors: Mapping[str, Tensor]) -> Json:
    def inside(item: Json) -> Json:
        return _with_arrays(item, tensors)

    if isinstance(node, list):
        return [inside(item) for item in node]
    if not isinstance(node, dict):
        return node
    if "map" in node:
        return {"map": {name: inside(item) for name, item in node["map"].items()}}
    if "tensor" not in node:
        return {kind: inside(items) for kind, items in node.items()}  # the others hold lists
    tensor = tensors[node["tensor"]]
    plain = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1)
    kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
    return {"array": plain.view(torch.uint8).numpy().tobytes().hex(), "dtype": kind, "shape": shape, "on": node["on"]}


def _pack_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> Json:
    name, again = path, 2
    while name in tensors:  # keys of a dict may hold slashes
        name, again = f"{path}~{again}", again + 1
    tensors[name] = value.detach()
    kind, place = str(value.dtype).removeprefix("torch."), "cpu" if value.device.type == "cpu" else "device"
    node: dict[str, Json] = {"tensor": name, "kind": kind, "shape": list(value.shape), "on": place}
    if not value.is_contiguous() and _plain_strides(value):
        # The same numbers in another order in memory may be summed in another order, and round otherwise.
        node["strides"] = list(value.stride())
    return node


def _plain_strides(value: Tensor) -> bool:
    """Whether no two entries share memory and little of it lies between them."""
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return reach <= 4 * value.numel() + 1024


def unpack(node: Json, tensors: Mapping[str, Tensor], classes: Classes, device: torch.device) -> Any:
    """The tree that gave this JSON and these tensors, its classes among those expected, in memory of its own.

    >>> unpack({"map": {"a": {"tuple": [1, {"float": "inf"}]}}}, {}, {}, torch.device("cpu"))
    {'a': (1, inf)}
    """

    def inside(item: Json) -> Any:
        return unpack(item, tensors, classes, device)

    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, list):
        return [inside(item) for item in node]
    if "tensor" in node:
        stored = tensors[node["tensor"]]
        place = _CPU if node["on"] == "cpu" else device
        strides = node.get("strides")
        made = torch.empty(stored.shape, dtype=stored.dtype, device=place)
        if strides is not None:
            made = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=place)
        return made.copy_(stored)
    if "array" in node:
        data, kind = bytearray.fromhex(node["array"]), DTYPES[node["dtype"]]
        flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        return flat.reshape(node["shape"]).to(_CPU if node["on"] == "cpu" else device)
    if "map" in node:
        return {key: inside(item) for key, item in node["map"].items()}
    if "dict" in node:
        return {inside(key): inside(item) for key, item in node["dict"]}
    if "tuple" in node:
        return tuple(inside(item) for item in node["tuple"])
    if "float" in node:
        return float(node["float"])
    if "dtype" in node:
        return DTYPES[node["dtype"]]
    if "optimiser" in node:
        return OPTIMISERS[node["optimiser"]]
    if "named" in node:
        return _class(node["named"], classes)(*(inside(item) for item in node["items"]))
    if "class" in node:
        cls = _class(node["class"], classes)
        held = {name: inside(item) for name, item in node["fields"].items()}
        names = {f.name for f in fields(cls)}
        if set(held) != names:
            raise InputError(
                f"The checkpoint holds a {cls.__name__} with other fields than this version of it has:"
                f" {', '.join(sorted(names ^ set(held)))}. Continue with the version that wrote it."
            )
        made = object.__new__(cls)
        for name, item in held.items():
            object.__setattr__(made, name, item)  # a frozen dataclass too
        return made
    raise ValueError(f"an unknown entry {sorted(node)}")


def _class(name: str, classes: Classes) -> Any:
    if name not in classes:
        raise InputError(
            f"The checkpoint holds a {name}, which this run has no use for. Give the method it was written with."
        )
    return classes[name]


def is_opaque(node: Json) -> bool:
    """Whether part of the tree was noted but not held."""
    if isinstance(node, list):
        return any(map(is_opaque, node))
    return isinstance(node, dict) and ("opaque" in node or any(map(is_opaque, node.values())))


def difference(was: Json, now: Json, path: str) -> tuple[str, Json, Json] | None:
    """Where two packed trees first differ, and what stands there in each."""
    if isinstance(was, dict) and isinstance(now, dict):
        if "opaque" in was and "opaque" in now:
            return None
        if "fields" in was and "fields" in now and was["class"] == now["class"]:
            was, now = was["fields"], now["fields"]
            pairs = [(f"{path}.{name}", was.get(name), now.get(name)) for name in {**was, **now}]
            found = (difference(a, b, name) for name, a, b in pairs)
            return next((one for one in found if one is not None), None)
    return None if was == now else (path, was, now)


def in_words(node: Json) -> str:
    """A packed tree as a reader would write it.

    >>> in_words({"class": "nhgd.schedule.Power", "fields": {"lr": 0.1, "power": 1}})
    'Power(lr=0.1, power=1)'
    """
    if isinstance(node, list):
        return f"[{', '.join(map(in_words, node))}]"
    if not isinstance(node, dict):
        return repr(node)
    if "class" in node:
        short = str(node["class"]).rsplit(".", 1)[-1]
        return f"{short}({', '.join(f'{name}={in_words(item)}' for name, item in node['fields'].items())})"
    if "tuple" in node:
        return f"({', '.join(map(in_words, node['tuple']))})"
    return str(next(iter(node.values())))
