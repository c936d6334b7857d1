"""What a file must hold for a page to be made from it."""

from __future__ import annotations

from typing import Any, TypeAlias

from nhgd.errors import InputError

# A type, several of them, a list of one shape ([shape]), a dict of one shape ({str: shape}), or fields by name, where a
# name that ends with "?" may be missing.
Shape: TypeAlias = Any
NUMBER = (int, float)
MAYBE_NUMBER = (int, float, type(None))
MAYBE_TEXT = (str, type(None))
WORDS = {
    str: "text",
    int: "a number",
    float: "a number",
    dict: "an object",
    list: "a list",
    type(None): "null",
    bool: "true",
}


def checked(value: Any, shape: Shape, where: str) -> Any:
    """The value, if it has the shape; else an error that says where it has not.

    >>> checked({"steps": 3}, {"steps": NUMBER, "seed?": int}, "run.json")
    {'steps': 3}
    >>> checked({"steps": "3"}, {"steps": NUMBER}, "run.json")
    Traceback (most recent call last):
    nhgd.errors.InputError: run.json is damaged: steps should be a number, but is text.
    """
    _walk(value, shape, where, "")
    return value


def _walk(value: Any, shape: Shape, where: str, path: str) -> None:
    if isinstance(shape, dict) and str in shape:
        _of_type(value, dict, where, path)
        for key, item in value.items():
            _walk(item, shape[str], where, f"{path}.{key}" if path else key)
    elif isinstance(shape, dict):
        _of_type(value, dict, where, path)
        for name, inside in shape.items():
            key = name.rstrip("?")
            if key in value:
                _walk(value[key], inside, where, f"{path}.{key}" if path else key)
            elif key == name:
                raise InputError(f"{where} is damaged: {path + ': ' if path else ''}{key} is missing.")
    elif isinstance(shape, list):
        _of_type(value, list, where, path)
        for nth, item in enumerate(value):
            _walk(item, shape[0], where, f"{path}[{nth}]")
    else:
        _of_type(value, shape, where, path)


def _of_type(value: Any, kind: Any, where: str, path: str) -> None:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if kind is not object and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
        wanted = " or ".join(dict.fromkeys(WORDS[one] for one in kinds))
        said = "true or false" if isinstance(value, bool) else WORDS.get(type(value), type(value).__name__)
        raise InputError(f"{where} is damaged: {path or 'it'} should be {wanted}, but is {said}.")
