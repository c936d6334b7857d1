"""Names for things: the house's own, and what other packages add by entry point."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any, Generic, TypeVar

from nhgd._validation import is_class
from nhgd.errors import InputError, NhgdError, unknown

T = TypeVar("T")


class PluginWarning(UserWarning):
    """What another package adds by entry point cannot be used."""


class Registry(Mapping[str, type[T]], Generic[T]):
    """A kind of thing by name: those given, then those installed under an entry-point group.

    Another package adds a method without touching this one by writing in its pyproject.toml, for example:

        [project.entry-points."nhgd.inverses"]
        mine = "my_package:MyInverse"

    Entry points are read when a name is not found at home or when all names are listed, not at import. One that cannot
    be used is left out, with a warning that names its package.
    """

    def __init__(self, kind: str, base: type[T], members: Iterable[object]) -> None:
        self.kind = kind
        self.group = f"nhgd.{kind}s"
        self.base = base
        self._own: dict[str, type[T]] = {
            vars(m)["name"]: m for m in members if isinstance(m, type) and issubclass(m, base) and "name" in vars(m)
        }
        self._plugins: dict[str, type[T]] | None = None
        self._owners: dict[str, str] = {}

    def _all(self) -> dict[str, type[T]]:
        if self._plugins is None:
            plugins: dict[str, type[T]] = {}
            for entry in entry_points(group=self.group):
                found = self._loaded(entry)
                if found is None:
                    continue
                if entry.name in self._own or entry.name in plugins:
                    holder = "nhgd itself" if entry.name in self._own else "another package"
                    self._warn(entry, f"has the same name as one of {holder}, which is used instead")
                    continue
                plugins[entry.name] = found
                self._owners[entry.name] = _owner(entry)
            self._plugins = plugins
        return self._plugins | self._own

    def _loaded(self, entry: EntryPoint) -> type[T] | None:
        """What a package offers, or None, with a warning, where that is no use: nobody's work is to end for it."""
        try:
            with redirect_stdout(sys.stderr):  # where a command prints one JSON object and nothing else
                found: Any = entry.load()
        except KeyboardInterrupt as stop:  # which is rarely the package's fault, but if it is, the note names it
            stop.args = (str(stop) or f"The {self.kind} {entry.name!r} {_owner(entry)} was being loaded.",)
            raise
        except BaseException as error:
            self._warn(entry, f"could not be loaded ({described(error)})")
            return None
        if not (is_class(found) and issubclass(found, self.base)):
            self._warn(entry, f"is not a subclass of {self.base.__name__}")
            return None
        if isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            self._warn(entry, f"lacks what every {self.kind} has: {missing}")
            return None
        return found

    def _warn(self, entry: EntryPoint, why: str) -> None:
        warnings.warn(
            f"The {self.kind} {entry.name!r} {_owner(entry)} {why}. It is ignored; fix or uninstall the package.",
            PluginWarning,
            stacklevel=5,
        )

    @contextmanager
    def making(self, name: str) -> Iterator[None]:
        """What goes wrong inside, where one is made from its name, is said of the package that it comes from."""
        try:
            yield
        except Exception as error:
            if isinstance(error, NhgdError) or name not in self._owners:
                raise
            raise InputError(
                f"The {self.kind} {name!r} {self._owners[name]} cannot be made from its name alone"
                f" ({described(error)}). Pass an object instead, or fix the package."
            ) from error

    def make(self, name: str, **settings: Any) -> T:
        """One of this name."""
        cls = self[name]
        with self.making(name):
            return cls(**settings)

    def owns(self, name: str) -> bool:
        """Whether it is one of the house; does not look at other packages."""
        return name in self._own

    def __getitem__(self, name: str) -> type[T]:
        if not isinstance(name, str):
            raise InputError(f"The {self.kind} must be a name or an object, got a {type(name).__name__}.")
        if name in self._own:
            return self._own[name]
        everything = self._all()
        if name not in everything:
            raise unknown(self.kind, name, everything)
        return everything[name]

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


def described(error: BaseException) -> str:
    """An error of another package in one line; not all of them can say what they are."""
    try:
        words = " ".join(str(error).split())
    except Exception:
        words = ""
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def _owner(entry: EntryPoint) -> str:
    dist = getattr(entry, "dist", None)
    return f"of the package {dist.name} {dist.version}" if dist is not None else "of an unknown package"


def summary(cls: type) -> str:
    """The first line of a class's docstring, or its name where it has none."""
    text = cls.__doc__
    lines = text.strip().splitlines() if isinstance(text, str) else []
    return lines[0] if lines else cls.__name__
