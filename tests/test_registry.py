"""Names for things, also from other packages."""

from __future__ import annotations

from typing import Any

import pytest

import nhgd
from nhgd import registry
from nhgd.inverse import CG, AbstractInverse, Identity
from nhgd.registry import Registry


class Entry:
    """What importlib.metadata gives for an entry point."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target, self.loaded = name, target, 0

    def load(self) -> Any:
        self.loaded += 1
        return self.target


class Guest(AbstractInverse):
    """An inverse from another package."""

    name = "guest"

    def solve(self, state: Any, u: Any, at: Any, start: Any = None) -> Any:
        return u, None

    def memory(self, theta: Any) -> int:
        return 0


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """Entry points that tests may add to."""
    entries: list[Entry] = []

    def found(*, group: str) -> list[Entry]:
        assert group == "nhgd.inverses"
        return entries

    monkeypatch.setattr(registry, "entry_points", found)
    return entries


def made() -> Registry:
    return Registry("inverse", AbstractInverse, [CG, Identity, AbstractInverse, "text", int])


def test_members_are_those_with_a_name_of_their_own(installed: list[Entry]) -> None:
    assert dict(made()) == {"cg": CG, "identity": Identity}
    assert len(made()) == 2
    assert "cg" in made()
    assert "nothing" not in made()


def test_guests_are_found_and_loaded_once(installed: list[Entry]) -> None:
    installed.append(Entry("guest", Guest))
    names = made()
    assert names["cg"] is CG
    assert installed[0].loaded == 0  # names of the house need no look outside
    assert names["guest"] is Guest
    assert list(names) == ["guest", "cg", "identity"]
    assert installed[0].loaded == 1


def test_a_guest_does_not_take_a_name_of_the_house(installed: list[Entry]) -> None:
    installed.append(Entry("cg", Guest))
    assert made()["cg"] is CG
    assert dict(made())["cg"] is CG


def test_a_guest_of_the_wrong_kind_is_named_every_time(installed: list[Entry]) -> None:
    installed += [Entry("guest", Guest), Entry("wrong", dict)]
    names = made()
    for _ in range(2):
        with pytest.raises(
            nhgd.InputError, match=r"entry point 'wrong' of nhgd.inverses is not a subclass of Abstract"
        ):
            names["guest"]


@pytest.mark.parametrize(
    ("name", "hint"), [("cgg", "Did you mean 'cg'?"), ("Identity", "Did you mean 'identity'?"), ("zzz", "Known: cg")]
)
def test_an_unknown_name_gets_a_hint(installed: list[Entry], name: str, hint: str) -> None:
    with pytest.raises(nhgd.InputError) as caught:
        made()[name]
    assert f"There is no inverse called '{name}'." in str(caught.value)
    assert hint in str(caught.value)
    assert "Known: cg, identity." in str(caught.value)


def test_a_name_is_a_string(installed: list[Entry]) -> None:
    with pytest.raises(nhgd.InputError, match="given by a name or as an object; got a NoneType"):
        made()[None]  # type: ignore[index]


def test_an_installed_inverse_is_resolved_by_name(installed: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.append(Entry("guest", Guest))
    monkeypatch.setattr(nhgd.inverse.INVERSES, "_guests", None)
    assert isinstance(nhgd.inverse.resolve("guest"), Guest)
