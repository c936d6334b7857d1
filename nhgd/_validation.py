"""Validation of settings by their annotations: one check for every class and function that takes settings.

A class of settings inherits from `Validated`, a function is decorated by `validated`. Types are checked first, then
what the class itself asks of its values; where both would complain, the class's own sentence is the better one and is
kept. Numbers of NumPy, and tensors that hold one number, become Python's; so do texts of NumPy and of an Enum.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from numbers import Integral, Real
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, TypeGuard, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from nhgd.errors import InputError, unknown

F = TypeVar("F", bound=Callable[..., Any])
LARGEST = 2**63 - 1  # of the whole numbers that torch and NumPy take
_NOTHING: Any = object()
_PLAIN = (bool, int, float, str)
_WORDS = {
    NoneType: "None",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    torch.dtype: "a torch.dtype",
    np.ndarray: "a NumPy array",
}


def _nothing_more(_: Any) -> None:
    """The default for classes without further checks."""


def _checked_first(own: Callable[[Any], None]) -> Callable[[Any], None]:
    """The class's own checks, run after the types of its values."""

    @wraps(own)
    def __post_init__(self: Any) -> None:
        if type(self).__post_init__ is not __post_init__:
            own(self)  # the first link of a chain of super().__post_init__() has checked everything
            return
        wrong = _misfit(self)
        if wrong is None:
            own(self)
            for name, hint in _settings(type(self)).items():
                _check_choice(type(self).__name__, name, getattr(self, name), hint)
            return
        refusal, value = wrong
        if value is None or isinstance(value, _PLAIN):  # other callables cannot be described
            try:
                own(self)
            except InputError:
                raise
            except Exception:  # noqa: S110  what a value of the wrong type does there is no news
                pass
        raise refusal

    return __post_init__


class Validated:
    """A dataclass whose fields are checked against their annotations when it is made, before its own `__post_init__`.

    Subclasses of subclasses, also those of other packages, are checked without doing anything for it.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__post_init__" in vars(cls):
            cls.__post_init__ = _checked_first(vars(cls)["__post_init__"])

    __post_init__ = _checked_first(_nothing_more)


def _misfit(self: Any) -> tuple[InputError, Any] | None:
    """The first value that its annotation does not allow, with the sentence for it. Numbers become Python's own."""
    if not is_dataclass(self):
        return None
    for name, hint in _settings(type(self)).items():
        value = getattr(self, name)
        fit = fitted(value, hint)
        if fit is _NOTHING:
            return _refusal(type(self).__name__, name, value, hint), value
        if fit is not value:
            object.__setattr__(self, name, fit)
    return None


def validated(function: F) -> F:
    """A function whose arguments are checked against their annotations first."""
    return validated_but()(function)


def validated_but(*names: str) -> Callable[[F], F]:
    """The same, some arguments left to the function, because it has better words for what may be wrong with them."""
    return lambda function: _checking(function, names)


def _checking(function: F, but: Sequence[str]) -> F:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own words for arguments that are missing or too many
        is_constructor = function.__name__ == "__init__"
        owner = type(args[0]).__name__ if is_constructor else function.__name__
        hints = _annotations(function)
        for name, value in bound.arguments.items():
            if name in hints and name not in but:
                bound.arguments[name] = _argument(owner, bound.signature.parameters[name], value, hints[name])
        return function(*bound.args, **bound.kwargs)

    return cast(F, checked)


def _argument(owner: str, parameter: inspect.Parameter, value: Any, hint: Any) -> Any:
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        return value
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return tuple(admitted(owner, f"{parameter.name}[{i}]", item, hint) for i, item in enumerate(value))
    return admitted(owner, parameter.name, value, hint)


def admitted(owner: str, name: str, value: Any, hint: Any) -> Any:
    """A value as its annotation has it, or a sentence.

    >>> admitted("CG", "steps", np.int64(3), int)
    3
    >>> admitted("KFAC", "beta", "x", float | None)
    Traceback (most recent call last):
    nhgd.errors.InputError: KFAC: beta must be a number or None, got 'x'.
    """
    fit = fitted(value, hint)
    if fit is _NOTHING:
        raise _refusal(owner, name, value, hint)
    _check_choice(owner, name, fit, hint)
    return fit


def check_settings(thing: Any) -> None:
    """Check the attributes that a constructor only stores, as scikit-learn's estimators do, against its annotations."""
    for name, hint in _annotations(type(thing).__init__).items():
        if hasattr(thing, name):
            admitted(type(thing).__name__, name, getattr(thing, name), hint)


def fitted(value: Any, hint: Any) -> Any:
    """The value, or the Python number it holds, if the annotation allows it; else `_NOTHING`.

    Annotations of the contents of functions, iterables and mappings are not checked.
    """
    origin = get_origin(hint) or hint
    if origin is Any:
        return value
    if origin in (Union, UnionType):
        return next((fit for fit in (fitted(value, one) for one in get_args(hint)) if fit is not _NOTHING), _NOTHING)
    if origin is Literal:
        kinds = {type(choice) for choice in get_args(hint)}
        return (
            fitted(value, str)
            if isinstance(value, str) and str in kinds
            else value
            if type(value) in kinds
            else _NOTHING
        )
    if hint is None or origin is NoneType:
        return value if value is None else _NOTHING
    if origin in (bool, int, float):
        return _number(value, origin)
    if origin is str:  # NumPy's too, and those of an Enum
        return value if type(value) is str else str.__str__(value) if isinstance(value, str) else _NOTHING
    if origin is Path:
        return value if isinstance(value, os.PathLike) and isinstance(os.fspath(value), str) else _NOTHING
    if origin is Callable:
        return value if callable(value) else _NOTHING
    if origin is type:
        wanted = get_args(hint)[0] if get_args(hint) else object
        is_one = is_class(value) and (not is_class(wanted) or issubclass(value, wanted))
        return value if is_one else _NOTHING
    if origin in (tuple, Sequence, list):
        return _several(value, hint, origin)
    if origin in (Iterable, Iterator) or not isinstance(origin, type):
        return value  # checked later, or not a type: Any, a type variable, an unknown name
    return value if isinstance(value, origin) else _NOTHING


def number(value: Any) -> Any:
    """The Python number in a NumPy or tensor scalar; other values are unchanged.

    >>> number(torch.tensor(0.5)), number("x")
    (0.5, 'x')
    """
    fit = _number(value, float)
    return value if fit is _NOTHING else fit


def _number(value: Any, kind: type) -> Any:
    """A number of Python's, of NumPy's or in a tensor, as Python's; a truth value is no number."""
    if isinstance(value, Tensor):
        if value.ndim > 0 or value.requires_grad or value.is_complex() or value.device.type == "meta":
            return _NOTHING
        value = value.item()
    elif isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        value = value.item()
    if kind is bool or isinstance(value, bool):
        return value if kind is bool and isinstance(value, bool) else _NOTHING
    if kind is int:
        return value if isinstance(value, int) and abs(value) <= LARGEST else _NOTHING
    if isinstance(value, int):
        if abs(value) <= LARGEST:
            return value
        return float(value) if abs(value) <= sys.float_info.max else _NOTHING
    try:
        return value if isinstance(value, float) else float(value) if isinstance(value, Real) else _NOTHING
    except OverflowError:
        return _NOTHING


def _several(value: Any, hint: Any, origin: Any) -> Any:
    """A sequence, with its elements checked if they are at hand. Strings do not count as sequences."""
    if isinstance(value, (str, bytes, Mapping)) and origin is not Sequence:
        return _NOTHING
    if isinstance(value, (str, bytes, Tensor)) or not hasattr(value, "__iter__"):
        return _NOTHING
    if not isinstance(value, (tuple, list)):
        return value if origin is Sequence else _NOTHING
    kinds = get_args(hint)
    if origin is tuple and kinds and kinds[-1] is not Ellipsis:
        if len(kinds) != len(value):
            return _NOTHING
    else:
        kinds = (kinds[0] if kinds else Any,) * len(value)
    found = [fitted(item, kind) for item, kind in zip(value, kinds, strict=True)]
    if any(fit is _NOTHING for fit in found):
        return _NOTHING
    if all(a is b for a, b in zip(found, value, strict=True)):
        return value
    made = getattr(value, "_make", type(value))  # as a named tuple has it
    return made(found)


def _check_choice(owner: str, name: str, value: Any, hint: Any) -> None:
    """Refuse a text that is none of those to choose from, where nothing else the annotation allows would take it."""
    possible = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    choices = [choice for one in possible if get_origin(one) is Literal for choice in get_args(one)]
    others = [one for one in possible if get_origin(one) is not Literal]
    if choices and value not in choices and all(fitted(value, one) is _NOTHING for one in others):
        raise unknown(f"{name} of {owner}", str(value), map(str, choices))


def _refusal(owner: str, name: str, value: Any, hint: Any) -> InputError:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if whole and fitted(0, hint) is not _NOTHING:  # a whole number is right, this one is not
        return InputError(
            f"{owner}: {name} must lie between -2^63 and 2^63, got one with {len(str(abs(value)))} digits."
        )
    return InputError(f"{owner}: {name} must be {' or '.join(dict.fromkeys(_words(hint)))}, got {shown(value)}.")


def _words(hint: Any) -> Iterator[str]:
    """An annotation in the words of a sentence."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        for one in get_args(hint):
            yield from _words(one)
    elif origin is Literal:
        yield from map(repr, get_args(hint))
    elif hint is None or origin in _WORDS:
        yield _WORDS[NoneType if hint is None else origin]
    elif origin is Callable:
        yield "a function"
    elif origin is tuple:
        yield f"{len(get_args(hint))} numbers with commas between, in brackets"
    elif origin in (Sequence, list):
        within = get_args(hint)
        yield "a list" if not within else f"a list, each of which is {' or '.join(_words(within[0]))}"
    elif origin is type:
        yield f"a class of kind {get_args(hint)[0].__name__}" if get_args(hint) else "a class"
    else:
        called = getattr(origin, "__name__", str(origin))
        if called.startswith("Abstract"):
            called = f"{called.removeprefix('Abstract').lower()} object"
        yield f"{'an' if called[0] in 'aeiouAEIO' else 'a'} {called}"


def is_class(value: Any) -> TypeGuard[type]:
    """Whether it is a class; to Python 3.10 tuple[int] is a type, too, but one that nothing can be a subclass of."""
    return isinstance(value, type) and not isinstance(value, GenericAlias)


def shown(value: Any) -> str:
    """A value in the words of a sentence: as written if that is short, else its kind.

    >>> shown("x"), shown(int), shown([1, 2])
    ("'x'", 'the class int; give an object of it, int(...)', 'a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}; give an object of it, {value.__name__}(...)"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}{' that requires a gradient' if value.requires_grad else ''}"
    if value is None or isinstance(value, _PLAIN):
        text = repr(value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"a {type(value).__name__}"


def _settings(cls: Any) -> dict[str, Any]:
    """The fields of a dataclass that are given to its constructor, with what each may be."""
    known = _annotations(cls)
    return {f.name: known[f.name] for f in fields(cls) if f.init and f.name in known}


@cache
def _annotations(owner: Any) -> dict[str, Any]:
    """The annotations of a class or a function as types; one that cannot be read here is left out."""
    try:
        found = get_type_hints(owner)
    except Exception:
        found = {}
        for part in reversed(owner.__mro__ if isinstance(owner, type) else (inspect.unwrap(owner),)):
            for name, text in vars(part).get("__annotations__", getattr(part, "__annotations__", {})).items():
                one = type("One", (), {"__annotations__": {name: text}, "__module__": part.__module__})
                try:
                    found |= get_type_hints(one)
                except Exception:
                    found.pop(name, None)
    return {name: hint for name, hint in found.items() if name != "return"}


def positive(owner: str, **values: float) -> None:
    """Refuse values that are not finite and above zero.

    >>> positive("Strong", mu=0.0)
    Traceback (most recent call last):
    nhgd.errors.InputError: Strong: mu must be above 0, got 0.0.
    """
    for name, value in values.items():
        if not _is_number(value) or not 0 < value < float("inf"):
            raise InputError(f"{owner}: {name} must be {_finite(value)}above 0, got {value!r}.")


def not_negative(owner: str, **values: float) -> None:
    """Refuse values that are negative, infinite or undefined.

    >>> not_negative("CG", damping=-1.0)
    Traceback (most recent call last):
    nhgd.errors.InputError: CG: damping must be 0 or more, got -1.0.
    """
    for name, value in values.items():
        if not _is_number(value) or not 0 <= value < float("inf"):
            raise InputError(f"{owner}: {name} must be {_finite(value)}0 or more, got {value!r}.")


def counted(owner: str, **values: int) -> None:
    """Refuse anything but an integer of at least 1.

    >>> counted("CG", steps=2.5)
    Traceback (most recent call last):
    nhgd.errors.InputError: CG: steps must be a whole number of at least 1, got 2.5.
    """
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
            raise InputError(f"{owner}: {name} must be a whole number of at least 1, got {value!r}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that not every random generator takes.

    >>> check_seed(2**64)
    Traceback (most recent call last):
    nhgd.errors.InputError: seed must be a whole number from 0 to 2^63 - 1, got 18446744073709551616.
    """
    if not isinstance(seed, Integral) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise InputError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed!r}.")


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _finite(value: object) -> str:
    """A word more for what is above everything."""
    return "finite and " if value == float("inf") else ""
