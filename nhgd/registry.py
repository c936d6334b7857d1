"""Names for things: the house's own, and what other packages add by entry point."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from nhgd.errors import InputError, unknown


class Registry(Mapping[str, type]):
    """A kind of thing by name: those given, then those installed under an entry-point group.

    Another package adds a method without touching this one by writing in its pyproject.toml, for example:

        [project.entry-points."nhgd.inverses"]
        mine = "my_package:MyInverse"

    Entry points are read when a name is not found at home or when all names are listed, not at import.
    """

    def __init__(self, kind: str, base: type, members: Iterable[object]) -> None:
        self.kind = kind
        self.group = f"nhgd.{kind}s"
        self.base = base
        self._own: dict[str, type] = {
            vars(m)["name"]: m for m in members if isinstance(m, type) and issubclass(m, base) and "name" in vars(m)
        }
        self._guests: dict[str, type] | None = None

    def _all(self) -> dict[str, type]:
        if self._guests is None:
            guests: dict[str, type] = {}
            for entry in entry_points(group=self.group):
                found: Any = entry.load()
                if not (isinstance(found, type) and issubclass(found, self.base)):
                    raise InputError(
                        f"The entry point {entry.name!r} of {self.group} is not a subclass of {self.base.__name__}."
                    )
                guests.setdefault(entry.name, found)
            self._guests = guests
        return self._guests | self._own

    def __getitem__(self, name: str) -> type:
        if not isinstance(name, str):
            raise InputError(f"The {self.kind} is given by a name or as an object; got a {type(name).__name__}.")
        if name in self._own:
            return self._own[name]
        everything = self._all()
        if name not in everything:
            raise unknown(self.kind, name, everything)
        return everything[name]

    def __contains__(self, name: object) -> bool:
        return name in self._all()

    def __iter__(self) -> Any:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
