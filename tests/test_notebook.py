"""What notebooks show of results: tables whose text is escaped, and figures."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.base import BaseEstimator

import nhgd
from nhgd._html import table
from nhgd.task import Quadratic

NASTY = "<script>alert('&')</script>"


def cells(html: str) -> list[list[str]]:
    """The texts of a table's rows, unescaped."""
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [[unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in rows]


@pytest.fixture(scope="module")
def instance():
    return Quadratic.preset("quick").build(0, torch.device("cpu"))


@pytest.fixture(scope="module")
def report(instance):
    return nhgd.check(instance.problem, instance.full_inner, instance.full_outer, inverses=["cg", "identity"])


def test_text_in_tables_is_escaped():
    html = table([NASTY], [[NASTY]], title=NASTY, notes=[NASTY])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 4


def test_a_sentence_reaches_to_the_end_of_its_row():
    html = table(["inverse", "cosine", "ms"], [["cg", "it refused"]])
    assert 'colspan="2"' in html
    assert cells(html)[1] == ["cg", "it refused"]


def test_a_report_shows_what_its_text_shows(report):
    html, text = report._repr_html_(), str(report)
    assert cells(html)[0] == ["inverse", "cosine", "rel. error", "ms", "MB", "residual", "hvps"]
    lines = text.splitlines()[2:4]
    assert [row[:1] + row[3:] for row in cells(html)[1:]] == [line.split()[:1] + line.split()[3:] for line in lines]
    assert all(unescape(note) in text for note in re.findall(r"<p>(.*?)</p>", html))
    assert len(re.findall(r"<p>", html)) == len(report.warnings) + len(report.advice)


def test_the_sentence_of_an_inverse_that_refused_is_escaped(report):
    refused = replace(report, rows=[report.rows[0] | {"error": NASTY}])
    assert "<script" not in refused._repr_html_()
    assert cells(refused._repr_html_())[1][-1] == NASTY
    assert f"cg              {NASTY}" in str(refused).splitlines()


def test_a_plan_has_a_row_for_each_inverse_and_its_note(instance):
    plan = nhgd.plan(instance.problem, inverses=["cg", "exact"])
    noted = replace(plan, rows=[row | {"note": NASTY} for row in plan.rows])
    assert [row[0] for row in cells(noted._repr_html_())[1:]] == ["cg", "exact"]
    assert "<script" not in noted._repr_html_()
    assert str(noted).splitlines()[-1].endswith(f"  {NASTY}")


def test_a_solution_shows_its_first_and_last_losses_and_its_metrics(instance):
    solution = instance.start().run(steps=3)
    rows = {row[0]: row[1:] for row in cells(solution._repr_html_())}
    first, last = solution.history[0], solution.history[-1]
    assert rows["outer loss"] == [f"{first['outer_loss']:.4g}", f"{last['outer_loss']:.4g}"]
    assert rows["v error"] == [f"{first['v_error']:.4g}", f"{last['v_error']:.4g}"]
    assert "3 outer steps" in solution._repr_html_()


def test_a_figure_shows_itself_without_pyplot(instance):
    shown = instance.start().run(steps=2).plot()._repr_png_()
    assert shown.startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def fitted():
    random = np.random.default_rng(0)
    x = random.normal(size=(120, 2))
    truth = np.where(x[:, 0] > 0, NASTY, "other")
    y = truth.copy()
    y[:12] = np.where(truth[:12] == NASTY, "other", NASTY)
    return nhgd.LabelCleaner(steps=2, random_state=0).fit(x[:90], y[:90], x[90:], truth[90:])


def test_the_picture_of_a_cleaner_is_scikit_learns(fitted):
    fresh = nhgd.LabelCleaner(steps=2)
    assert (
        fresh._repr_mimebundle_()["text/html"].count("sk-")
        == BaseEstimator._repr_mimebundle_(fresh)["text/html"].count("sk-")
        > 0
    )
    assert "sk-" in fitted._repr_mimebundle_()["text/html"]
    assert fitted._repr_mimebundle_()["text/plain"] == repr(fitted)


def test_what_a_cleaner_found_comes_below_it_escaped(fitted):
    for html in (fitted._repr_html_(), fitted._repr_mimebundle_()["text/html"]):
        found = html[html.rindex("<div><strong>") :]
        assert f"{len(fitted.label_issues_)} of 90 labels are suspect" in found
        assert "<script" not in found
        counts = {(row[0], row[1]): int(row[2]) for row in cells(found)[1:]}
        assert sum(counts.values()) == len(fitted.label_issues_) > 0
        assert set(counts) <= {(NASTY, "other"), ("other", NASTY)}


def test_a_cleaner_shown_as_text_has_no_html(fitted):
    with config_context(display="text"):
        assert not hasattr(fitted, "_repr_html_")
        assert set(fitted._repr_mimebundle_()) == {"text/plain"}
