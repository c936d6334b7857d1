"""Results that are gone on with: earlier step sizes, a share of the time for each run, parts of a table taken over."""

from __future__ import annotations

import copy
import json
import time
from dataclasses import replace

import pytest

from benchmarks import card, reproduction
from nhgd.comparison import comparison
from nhgd.comparison.budget import Allowance
from nhgd.comparison.comparison import before
from nhgd.comparison.trial import Trial, measured
from nhgd.errors import InputError
from nhgd.reproduce import Request
from nhgd.reproduce.command import known_sizes
from nhgd.reproduce.tables.experiment import _with, _without
from nhgd.reproduce.tables.plan import plan_of

TRIAL = Trial("quadratic", "quick", "soba", "soba", 0, {}, Allowance.read("500 steps"), longest=100.0)


def test_runs_that_may_end_early_share_the_time_that_is_left(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(comparison.time, "monotonic", lambda: now[0])
    ends = []
    for trial in before([replace(TRIAL, seed=seed) for seed in range(5)], 90.0, jobs=2):
        ends.append(trial.until)
        now[0] += 10.0  # each took less than its share
    # Of 90 seconds a third, for three rounds of two; what is left then is shared anew.
    assert ends == [30.0, 10 + 80 / 2, 20 + 70 / 2, 30 + 60.0, 40 + 50.0]
    now[0] = 91.0
    assert list(before([TRIAL], 90.0, jobs=2)) == []


def test_runs_of_a_fixed_time_have_it_whole():
    assert [one.until for one in before([replace(TRIAL, longest=None)], time.monotonic() + 60)] == [None]
    assert [one.until for one in before([TRIAL], None)] == [None]


def test_a_run_whose_time_is_up_keeps_its_outer_steps():
    few = replace(TRIAL, allowance=Allowance.read("3 steps"))
    late, timely = (measured(replace(few, until=time.monotonic() + more)) for more in (0.0, 600.0))
    assert [(run["error"], run["result"], run["steps"]) for run in (late, timely)] == [
        (None, "late", 1),
        (None, "steps", 3),
    ]


def result(**fair):
    rows = [
        {"method": name, "paper": None, "printed": None, "fair": {"settings": sizes}} for name, sizes in fair.items()
    ]
    return {"experiment": "cleaning", "quick": True, "rows": [*rows, {"method": "ttsa", "printed": None, "fair": None}]}


def test_step_sizes_of_an_earlier_result_take_the_place_of_a_search(tmp_path):
    path = tmp_path / "cleaning.json"
    sizes = {"soba": {"inner_lr": 0.1, "outer_lr": 0.01}, "nhgd": {"inner_lr": 0.1, "outer_lr": 0.3}}
    path.write_text(json.dumps(result(**sizes)))
    known = known_sizes(Request("cleaning", quick=True, tuned=path, again="nhgd"))
    assert known == {"soba": sizes["soba"]}
    grid = plan_of("cleaning", True, None).grid
    left = _without(grid, known | {"nhgd, natural inner": {}})
    assert "soba" not in left.methods
    assert "nhgd" in left.methods
    assert not [key for key in left.settings if key.startswith("nhgd, natural inner:")]
    final = _with(grid, known)
    assert (list(final.methods), final.settings) == (["soba"], {"soba:inner_lr": 0.1, "soba:outer_lr": 0.01})


@pytest.mark.parametrize(
    ("text", "more", "words"),
    [
        ("{}", {}, "is no result of nhgd reproduce"),
        ("[", {}, "is no result of nhgd reproduce"),
        (json.dumps(result() | {"quick": False}), {}, "is a result of cleaning. Give one of the same kind"),
        (json.dumps(result(soba={"outer_lr": 1.0})), {"again": "sobba"}, "Did you mean 'soba'"),
    ],
)
def test_what_is_no_such_result_is_refused(text, more, words, tmp_path):
    path = tmp_path / "cleaning.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        known_sizes(Request("cleaning", quick=True, tuned=path, **more))


def test_methods_to_search_for_again_need_a_result():
    with pytest.raises(InputError, match="which tuned gives"):
        Request("cleaning", again="nhgd")


def test_the_card_passes_step_sizes_on_where_there_are_some(tmp_path):
    (tmp_path / "cleaning.json").write_text(json.dumps(result(soba={}, nhgd={"outer_lr": 1.0})))
    given = type("Given", (), {"tuned": tmp_path, "again": "nhgd,nhgd_single"})
    assert card.known("cleaning", given) == ["--tuned", str(tmp_path / "cleaning.json"), "--again", "nhgd"]
    assert card.known("pde", given) == []


def test_a_part_that_was_measured_anew_takes_the_place_of_the_old_one():
    old = reproduction.read("cleaning")
    assert reproduction.adopted(old, old) == old
    new = copy.deepcopy(old)
    for row in new["rows"]:
        row["fair"] = None
        row["printed"] = row["printed"] and row["printed"] | {"steps": 10, "outer_loss": 7.0}
        if row["method"] in ("ttsa", "aid-cg-10"):
            row["printed"] = {"steps": 500, "seeds": 1, "failed": 0, "outer_loss": 9.0}
    new |= {"own": [{"method": "nhgd"}], "first_in_time": None, "tuning": []}
    new["protocols"]["printed"] = {"longest": 1000.0}
    found = reproduction.adopted(old, new)
    rows, before_it = ({row["method"]: row for row in one["rows"]} for one in (found, old))
    assert rows["ttsa"]["printed"]["outer_loss"] == rows["aid-cg-10"]["printed"]["outer_loss"] == 9.0
    assert rows["soba"]["printed"] == before_it["soba"]["printed"]  # which took more steps
    assert rows["soba"]["fair"] == before_it["soba"]["fair"]
    assert (found["own"], found["first_in_time"]) == (old["own"], old["first_in_time"])
    assert found["protocols"]["printed"] == {"longest": 1000.0}
    assert found["protocols"]["fair"] == old["protocols"]["fair"]
    again = copy.deepcopy(old)
    again["protocols"]["fair"]["known"] = ["stocbio"]
    again |= {"tuning": [], "first_in_time": {"first": "nhgd"}}
    again["rows"] = [row for row in again["rows"] if row["method"] != "ttsa"]
    found = reproduction.adopted(old, again)
    assert {one["method"] for one in found["tuning"]} == {"stocbio"}
    assert found["first_in_time"] == {"first": "nhgd"}
    rows = {row["method"]: row for row in found["rows"]}
    assert rows["ttsa"]["fair"] is None  # methods of one comparison were measured together
