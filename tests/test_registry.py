"""Names for things, also from other packages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import nhgd
from nhgd import _registry as registry
from nhgd import hypergradients
from nhgd._registry import PluginWarning, Registry, summary
from nhgd.inverse import CG, AbstractInverse, Identity, Iterative


class Entry:
    """What importlib.metadata gives for an entry point."""

    def __init__(self, name: str, target: Any) -> None:
        self.name, self.target, self.loaded = name, target, 0
        self.dist = SimpleNamespace(name="guests", version="1.0")

    def load(self) -> Any:
        self.loaded += 1
        return self.target


class Guest(Iterative):
    """An inverse from another package."""

    name = "guest"

    def solve(self, u: Any, oracle: Any, start: Any = None) -> Any:
        return u, None


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


def test_a_guest_does_not_take_a_name_of_the_house_and_it_is_said(installed: list[Entry]) -> None:
    installed += [Entry("cg", Guest), Entry("guest", Guest), Entry("guest", Identity)]
    names = made()
    assert names["cg"] is CG
    with pytest.warns(PluginWarning) as said:
        assert dict(names) == {"guest": Guest, "cg": CG, "identity": Identity}
    sentences = [str(item.message) for item in said]
    assert len(sentences) == 2
    assert "The inverse 'cg' of the package guests 1.0 has the same name as one of nhgd itself" in sentences[0]
    assert "The inverse 'guest' of the package guests 1.0 has the same name as one of another package" in sentences[1]


class Unfinished(Iterative):
    """One that nobody can make."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class BareError(BaseException):
    pass


def raising(error: BaseException) -> Any:
    def load() -> Any:
        print("hello from the guest")
        raise error

    return load


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (raising(ImportError("no module\ncalled x")), r"could not be loaded \(ImportError: no module called x\)"),
        (raising(RuntimeError()), r"could not be loaded \(RuntimeError\)"),
        (raising(SystemExit(0)), r"could not be loaded \(SystemExit: 0\)"),
        (raising(Speechless()), r"could not be loaded \(Speechless\)"),
        (raising(BareError("base")), r"could not be loaded \(BareError: base\)"),
        (raising(SyntaxError("bad")), r"could not be loaded \(SyntaxError: bad\)"),
        (lambda: dict, "is not a subclass of AbstractInverse"),
        (lambda: CG(), "is not a subclass of AbstractInverse"),
        (lambda: None, "is not a subclass of AbstractInverse"),
        (lambda: Unfinished, "lacks what every inverse has: solve"),
    ],
)
def test_a_broken_guest_is_named_with_its_package_and_left_out(
    installed: list[Entry], broken: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Entry("bad", None)
    bad.load = broken  # type: ignore[method-assign]
    installed += [bad, Entry("guest", Guest)]
    names = made()
    with pytest.warns(PluginWarning, match=rf"The inverse 'bad' of the package guests 1\.0 {words}.*uninstall") as said:
        assert names["guest"] is Guest
    assert len(said) == 1
    assert list(names) == ["guest", "cg", "identity"]  # it is said once
    with pytest.raises(nhgd.InputError, match=r"There is no inverse called 'bad'\. Known: cg, guest, identity"):
        names["bad"]
    assert capsys.readouterr().out == ""  # which is for the answers of commands


def test_ctrl_c_while_a_guest_is_loaded_is_no_fault_of_the_guest(installed: list[Entry]) -> None:
    bad = Entry("bad", None)
    bad.load = raising(KeyboardInterrupt())  # type: ignore[method-assign]
    installed.append(bad)
    with pytest.raises(KeyboardInterrupt, match=r"^The inverse 'bad' of the package guests 1\.0 was being loaded\.$"):
        dict(made())


def test_a_class_without_words_is_listed_by_its_name() -> None:
    class Silent(Guest):
        pass

    assert summary(Silent) == "Silent"
    Silent.__doc__ = 5  # type: ignore[assignment]
    assert summary(Silent) == "Silent"


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
    with pytest.raises(nhgd.InputError, match="must be a name or an object, got a NoneType"):
        made()[None]  # type: ignore[index]


def test_an_installed_inverse_is_resolved_by_name(installed: list[Entry], monkeypatch: pytest.MonkeyPatch) -> None:
    installed.append(Entry("guest", Guest))
    monkeypatch.setattr(nhgd.inverse.INVERSES, "_plugins", None)
    assert isinstance(nhgd.inverse.resolve("guest"), Guest)


def demanding(base: type) -> Any:
    """A class of a kind that cannot be made without arguments, nor by a preset."""

    def __init__(self: Any, needed: int) -> None:
        pass

    return type("Demanding", (base,), {"name": "demanding", "__init__": __init__})


@pytest.mark.parametrize(
    ("names", "cls", "resolve"),
    [
        (nhgd.inverse.INVERSES, Identity, nhgd.inverse.resolve),
        (nhgd.algorithm.ALGORITHMS, nhgd.algorithm.AID, nhgd.algorithm.resolve),
        (nhgd.task.TASKS, nhgd.task.Quadratic, nhgd.task.resolve),
        (nhgd.execution.EXECUTIONS, nhgd.execution.Inline, nhgd.execution.resolve),
        (hypergradients.ESTIMATORS, hypergradients.Implicit, hypergradients.resolve),
    ],
)
def test_a_guest_that_cannot_be_made_from_its_name_is_named_with_its_package(
    names: Registry, cls: type, resolve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {names.group: [Entry("demanding", demanding(cls))]}
    monkeypatch.setattr(registry, "entry_points", lambda *, group: entries.get(group, []))
    monkeypatch.setattr(names, "_plugins", None)
    monkeypatch.setattr(names, "_owners", {})
    with pytest.raises(
        nhgd.InputError, match=rf"^The {names.kind} 'demanding' of the package guests 1\.0 cannot be made from its name"
    ):
        resolve("demanding")
    if names is nhgd.inverse.INVERSES:
        with pytest.raises(nhgd.InputError, match=r"^The inverse 'demanding' of the package guests"):
            nhgd.algorithm.resolve("aid-demanding")
    monkeypatch.setattr(names, "_plugins", None)
