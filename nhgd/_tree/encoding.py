"""Trees as JSON and a dict of tensors, and back.

    None, true, 1, 0.5, "text"         as they are              {"float": "inf"}             what JSON has no number for
    [...]                              a list                   {"tuple": [...]}              a tuple
    {"map": {name: ...}}               a dict of strings        {"dict": [[key, item], ...]}  any other dict
    {"named": class, "items": [...]}   a named tuple            {"class": class, "fields": {name: ...}}    a dataclass
    {"tensor": name, ...}              one of the dict          {"array": hex, ...}           a small one, in place
    {"dtype": name}, {"optimiser": name}   of torch             {"opaque": what}              noted, but not held
    {"slot": "tensor"}                 where a tensor goes

The name of a class is only ever compared with the classes that the reader expects: nothing is imported, called or
looked up by a name that stands in the JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias, get_args, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from nhgd._tree.walk import Slot, kind_of
from nhgd.errors import InputError

Json: TypeAlias = Any
Classes: TypeAlias = Mapping[str, type]

DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
OPTIMISERS = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, Optimizer)}
_CPU = torch.device("cpu")


class Unencodable(TypeError):
    """A value without a JSON form: its path and kind."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(path, type(value).__name__)
        self.path = path
        self.kind = type(value).__name__


def full_name(cls: type) -> str:
    """The name that identifies a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def expected(*values: Any) -> dict[str, type]:
    """The dataclasses and named tuples that values like these may hold: their own, and what their fields announce."""
    found: dict[str, type] = {}

    def admit(kind: Any) -> None:
        for argument in get_args(kind):
            admit(argument)
        if not isinstance(kind, type) or not (is_dataclass(kind) or _is_named_tuple(kind)) or full_name(kind) in found:
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
        kind = kind_of(type(value))
        for item in () if kind is None else kind.parts(value):
            look(item)

    for value in values:
        look(value)
    return found


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


class Encoder:
    """Turns trees into JSON, and collects their tensors under the path that leads to them.

    Args:
        classes: the classes that the reader will expect; others are refused now, not then. None: any.
        opaque: note what cannot be held, such as a function or a tensor, instead of refusing it.
        inline: put tensors into the JSON.

    Attributes:
        tensors: the tensors met so far, not copies.

    >>> encoder = Encoder()
    >>> encoder.encode({"a": (1, float("inf"))}, "x")
    {'map': {'a': {'tuple': [1, {'float': 'inf'}]}}}
    >>> encoder.encode([torch.zeros(2)], "x")
    [{'tensor': 'x/0', 'kind': 'float32', 'shape': [2], 'on': 'cpu'}]
    >>> list(encoder.tensors)
    ['x/0']
    >>> Encoder(inline=True).encode(torch.tensor([0.5]), "x")
    {'array': '0000003f', 'dtype': 'float32', 'shape': [1], 'on': 'cpu'}
    """

    def __init__(self, classes: Classes | None = None, opaque: bool = False, inline: bool = False) -> None:
        self._classes, self._opaque, self._inline = classes, opaque, inline
        self.tensors: dict[str, Tensor] = {}

    def encode(self, tree: Any, path: str) -> Json:
        """The JSON of a tree that goes by the name `path`."""
        if isinstance(tree, np.generic):
            tree = tree.item()
        return self._leaf(tree, path) if kind_of(type(tree)) is None else self._container(tree, path)

    def _leaf(self, leaf: Any, path: str) -> Json:
        if leaf is None or isinstance(leaf, (bool, str)):
            return leaf
        if isinstance(leaf, int):
            return int(leaf)
        if isinstance(leaf, float):
            return float(leaf) if math.isfinite(leaf) else {"float": str(float(leaf))}
        if isinstance(leaf, torch.dtype):
            return {"dtype": dtype_name(leaf)}
        if isinstance(leaf, torch.Size):
            return {"tuple": list(leaf)}
        if leaf is Slot.TENSOR:
            return {"slot": leaf.value}
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided and not self._opaque:
            return _array(leaf) if self._inline else self._tensor(leaf, path)
        name = next((name for name, optimiser in OPTIMISERS.items() if leaf is optimiser), None)
        return self._rest(leaf, path) if name is None else {"optimiser": name}

    def _container(self, tree: Any, path: str) -> Json:
        cls = type(tree)
        if isinstance(tree, list):
            return self._items(tree, path)
        if isinstance(tree, dict):
            return self._dict(tree, path)
        if cls is tuple:
            return {"tuple": self._items(tree, path)}
        if self._classes is None or full_name(cls) in self._classes:
            if is_dataclass(tree):
                names = [field.name for field in fields(tree)]
                return {"class": full_name(cls), "fields": {n: self._inside(getattr(tree, n), path, n) for n in names}}
            if _is_named_tuple(cls):
                return {"named": full_name(cls), "items": self._items(tree, path)}
        return self._rest(tree, path)

    def _dict(self, tree: dict[Any, Any], path: str) -> Json:
        if all(type(key) is str for key in tree):
            return {"map": {key: self._inside(item, path, key) for key, item in tree.items()}}
        pairs = enumerate(tree.items())
        return {"dict": [[self._inside(key, path, i), self._inside(item, path, key)] for i, (key, item) in pairs]}

    def _items(self, tree: Any, path: str) -> list[Json]:
        return [self._inside(item, path, i) for i, item in enumerate(tree)]

    def _inside(self, item: Any, path: str, name: object) -> Json:
        return self.encode(item, f"{path}/{name}")

    def _tensor(self, tensor: Tensor, path: str) -> Json:
        name, again = path, 2
        while name in self.tensors:  # keys of a dict may hold slashes
            name, again = f"{path}~{again}", again + 1
        self.tensors[name] = tensor.detach()
        node = {"tensor": name, "kind": dtype_name(tensor.dtype), "shape": list(tensor.shape), "on": _place(tensor)}
        if not tensor.is_contiguous() and _has_plain_strides(tensor):
            # The same numbers in another order in memory may be summed in another order, and round otherwise.
            node["strides"] = list(tensor.stride())
        return node

    def _rest(self, value: Any, path: str) -> Json:
        if self._opaque:
            return {"opaque": "a function" if callable(value) else f"an object, {type(value).__name__}"}
        raise Unencodable(path, value)


def _array(tensor: Tensor) -> Json:
    data = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
    text = data.numpy().tobytes().hex()
    return {"array": text, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "on": _place(tensor)}


def _place(tensor: Tensor) -> str:
    return "cpu" if tensor.device.type == "cpu" else "device"


def dtype_name(dtype: torch.dtype) -> str:
    """Without its module.

    >>> dtype_name(torch.float64)
    'float64'
    """
    return str(dtype).removeprefix("torch.")


def _has_plain_strides(value: Tensor) -> bool:
    """Whether no two entries share memory and there are no large gaps between them."""
    reach = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach = stride * (size - 1) + reach
    return reach <= 4 * value.numel() + 1024


class Decoder:
    """Turns JSON back into trees, in memory of their own.

    Args:
        tensors: what the encoder has collected.
        classes: the classes that may appear.
        device: where tensors go that were not on the CPU.

    >>> Decoder({}, {}, torch.device("cpu")).decode({"map": {"a": {"tuple": [1, {"float": "inf"}]}}})
    {'a': (1, inf)}
    """

    def __init__(self, tensors: Mapping[str, Tensor], classes: Classes, device: torch.device) -> None:
        self._tensors, self._classes, self._device = tensors, classes, device
        self._kinds: dict[str, Callable[[dict[str, Json]], Any]] = {
            "tensor": self._tensor,
            "array": self._array,
            "map": lambda node: {key: self.decode(item) for key, item in node["map"].items()},
            "dict": lambda node: {self.decode(key): self.decode(item) for key, item in node["dict"]},
            "tuple": lambda node: tuple(map(self.decode, node["tuple"])),
            "float": lambda node: float(node["float"]),
            "dtype": lambda node: DTYPES[node["dtype"]],
            "slot": lambda node: Slot(node["slot"]),
            "optimiser": lambda node: OPTIMISERS[node["optimiser"]],
            "named": lambda node: self._class(node["named"])(*map(self.decode, node["items"])),
            "class": self._dataclass,
        }

    def decode(self, node: Json) -> Any:
        """The tree that gave this JSON."""
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        for kind, make in self._kinds.items():
            if kind in node:
                return make(node)
        raise ValueError(f"an unknown entry {sorted(node)}")

    def _tensor(self, node: dict[str, Json]) -> Tensor:
        stored, place = self._tensors[node["tensor"]], self._place(node)
        strides = node.get("strides")
        if strides is None:
            made = torch.empty(stored.shape, dtype=stored.dtype, device=place)
        else:
            made = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=place)
        return made.copy_(stored)

    def _array(self, node: dict[str, Json]) -> Tensor:
        data, kind = bytearray.fromhex(node["array"]), DTYPES[node["dtype"]]
        flat = torch.frombuffer(data, dtype=kind) if data else torch.empty(0, dtype=kind)
        return flat.reshape(node["shape"]).to(self._place(node))

    def _place(self, node: dict[str, Json]) -> torch.device:
        return _CPU if node["on"] == "cpu" else self._device

    def _class(self, name: str) -> type[Any]:
        if name not in self._classes:
            raise InputError(
                f"The checkpoint contains a {name}, which this run cannot use. Use the method it was written with."
            )
        return self._classes[name]

    def _dataclass(self, node: dict[str, Json]) -> Any:
        cls = self._class(node["class"])
        held, names = node["fields"], {field.name for field in fields(cls)}
        if set(held) != names:
            raise InputError(
                f"The checkpoint holds a {cls.__name__} with other fields than in this version:"
                f" {', '.join(sorted(names ^ set(held)))}. Continue with the version that wrote it."
            )
        made = object.__new__(cls)
        for name, item in held.items():
            object.__setattr__(made, name, self.decode(item))  # a frozen dataclass too
        return made


def is_opaque(node: Json) -> bool:
    """Whether part of the tree was noted but not stored."""
    if isinstance(node, list):
        return any(map(is_opaque, node))
    return isinstance(node, dict) and ("opaque" in node or any(map(is_opaque, node.values())))


def difference(was: Json, now: Json, path: str) -> tuple[str, Json, Json] | None:
    """The first difference of two encoded trees: its path, and both values."""
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
    """An encoded tree as a reader would write it.

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
