"""Settings given as text, read as the types their fields have."""

from __future__ import annotations

from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from nhgd._validation import is_class
from nhgd.errors import InputError, unknown
from nhgd.inverse import AbstractInverse, resolve

_NOTHING = object()
_WORDS = {
    NoneType: "none",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "numbers with commas between",
    torch.dtype: "a dtype such as float64",
    str: "text",
}
_ORDER = {kind: i for i, kind in enumerate((NoneType, bool, int, float, tuple, Literal, str))}


def kinds(cls: type) -> dict[str, Any]:
    """The settings of a dataclass by name, with the types each may have."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls) if f.init}


def convert(name: str, value: Any, kind: Any) -> Any:
    """A setting given as text, as the first of the types its field may have that the text can be read as.

    >>> convert("batch", "32", int | None), convert("flag", "no", bool), convert("radius", "none", float | None)
    (32, False, None)
    >>> convert("project_v", "0,1", tuple[float, float])
    (0.0, 1.0)
    """
    if not isinstance(value, str):
        return value
    possible = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for one in sorted(possible, key=lambda k: _ORDER.get(get_origin(k) or k, len(_ORDER))):
        found = _read(value.strip(), one)
        if found is not _NOTHING:
            return found
    choices = [str(choice) for k in possible if get_origin(k) is Literal for choice in get_args(k)]
    words = [_WORDS[k] for k in (get_origin(k) or k for k in possible) if k in _WORDS]
    if choices and set(words) <= {_WORDS[NoneType]}:
        raise unknown(f"choice for {name}", value, choices)
    words += choices
    raise InputError(f"{name} must be {' or '.join(words) or 'set in Python'}, got {value!r}.")


def _read(text: str, kind: Any) -> Any:
    """The text as one type, or _NOTHING."""
    low = text.lower()
    if kind is NoneType:
        return None if low in ("none", "null") else _NOTHING
    if kind is bool:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(low, _NOTHING)
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        return text if text in get_args(kind) else _NOTHING
    if is_class(kind) and issubclass(kind, AbstractInverse):
        return resolve(text)
    if kind is torch.dtype:
        found = getattr(torch, low, None)
        return found if isinstance(found, torch.dtype) else _NOTHING
    try:
        if kind in (int, float):
            return kind(low)
        if get_origin(kind) is tuple and "," in text:
            return tuple(float(part) for part in low.strip("()[]").split(","))
    except ValueError:
        pass
    return _NOTHING
