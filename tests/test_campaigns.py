"""The campaigns of benchmarks/: what they count is what is there. They themselves are run by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import nhgd
from benchmarks import bad_input, fuzz


@pytest.mark.parametrize(
    "make", [lambda: fuzz.Images(False), lambda: fuzz.Images(True), fuzz.Tables], ids=["idx", "gz", "csv"]
)
def test_changed_files_are_read_or_refused(make):
    found = fuzz.fuzz("here", make(), 1.0, 0, None)
    assert found["others"] == {}
    assert found["hangs"] == []
    assert found["read"] > 0
    assert found["refused"] > 0
    assert found["read"] + found["refused"] == found["tries"]


def test_a_fault_of_a_reader_is_counted_with_the_try_that_shows_it():
    def reader(choose: random.Random, folder: Path) -> None:
        assert not list(folder.iterdir())
        if choose.random() < 0.5:
            raise nhgd.InputError("no.")
        raise KeyError("x")

    found = fuzz.fuzz("broken", reader, 0.2, 0, None)
    (place, told), *rest = found["others"].items()
    assert not rest
    assert place.startswith("KeyError in test_campaigns.py")
    assert told["count"] + found["refused"] == found["tries"]
    again = fuzz.fuzz("broken", reader, 10.0, 0, told["first"])
    assert again["tries"] == 1
    assert list(again["others"]) == [place]


def test_a_hang_is_counted(monkeypatch):
    monkeypatch.setattr(fuzz, "LIMIT", 0.05)

    def forever(choose: random.Random, folder: Path) -> None:
        while True:
            pass

    assert fuzz.fuzz("slow", forever, 10.0, 0, 7)["hangs"] == [7]


def test_every_bad_call_is_refused():
    cases = list(bad_input.calls())
    assert len(cases) > 100
    wrong = {bad_input.shown(case): bad_input.judged_call(case.given) for case in cases}
    assert {shown: found for shown, found in wrong.items() if found is not None} == {}


def test_there_are_enough_bad_commands_and_each_is_another():
    cases = [*bad_input.commands(), *bad_input.lines()]
    assert len(cases) > 200
    assert len({case.kind for case in cases}) > 15


def test_what_does_not_end_as_it_should_is_found_out():
    def end(code=2, out="", err="Error: a sentence.\n", as_json=False):
        return bad_input.judged_end(code, out, err, bad_input.Case("here", ("run",)), as_json)

    assert end() is None
    assert end(as_json=True, out='{"error": "a"}') is None
    assert "exit code 1" in end(code=1)
    assert "traceback" in end(err="Traceback (most recent call last):\nKeyError: 1\n")
    assert "not one sentence" in end(err="Error: a\nb\n")
    assert "not printable" in end(err="Error: a\x1b[31m\n")
    assert "no JSON" in end(as_json=True, out="{")
    assert "standard output holds" in end(out="x")
    assert bad_input.judged_call(lambda: 5) == "accepted"
    assert bad_input.judged_call(lambda: {}["x"]) == "KeyError: 'x'"
    assert "one line" in bad_input.judged_call(lambda: (_ for _ in ()).throw(nhgd.InputError("a\nb")))
