"""Reports: a page says what the numbers say, escapes what it was given, and refuses what is damaged."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import shutil
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import nhgd
from nhgd.comparison.formats import mean_and_deviation
from nhgd.errors import InputError
from nhgd.plot.png import write_png
from nhgd.report import report
from nhgd.report.chart import Line, chart, log_ticks, ticks
from nhgd.report.html import VOID, element
from nhgd.report.page import Page, Section
from tests.commands import answer, invoke, refusal

HOSTILE = "</script><script>alert('\"&<b>')</script>"
METHODS = {"aid-cg": "aid-cg", HOSTILE: "soba", "ttsa": "ttsa"}


class Tree(HTMLParser):
    """The elements of a page; raises where tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.tables = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append(["", dict(attributes).get("data-value")])

    def handle_startendtag(self, tag, attributes):
        assert tag in VOID
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, words):
        self.words.append(words)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1][0] += words

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def table():
    return nhgd.bench("quadratic", methods=METHODS, seeds=2, budget="60g", settings={"outer_lr": [0.03, 0.1]})


@pytest.fixture
def folder(table, tmp_path):
    (tmp_path / "bench.json").write_text(table.to_json())
    return tmp_path


def page_of(folder):
    return Tree(report(folder).read_text(encoding="utf-8"))


def test_a_page_stands_alone(folder):
    text = report(folder).read_text()
    page = Tree(text)
    assert not {"link", "iframe", "object", "base", "form"} & {tag for tag, _ in page.tags}
    addresses = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert addresses
    assert all(address.startswith(("data:image/png;base64,", "#")) for address in addresses)
    # What may run and what may style is named by its hash; everything else is refused by the browser.
    (rule,) = [m["content"] for m in page.named("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    for kind in ("script", "style"):
        (inside,) = [part.split(f"</{kind}>")[0] for part in text.split(f"<{kind}>")[1:]]
        assert f"sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}" in rule
    assert rule.startswith("default-src 'none'")
    anchors = {attributes.get("id") for _, attributes in page.tags}
    assert {address[1:] for address in addresses if address.startswith("#")} <= anchors


def test_the_numbers_are_those_of_the_table(folder, table):
    page = page_of(folder)
    head, *rows = page.tables[0]
    titles = [words for words, _ in head]
    assert [name for (name, _), *_ in rows] == list(METHODS)
    checked = 0
    for row in table.summary:
        if (title := row["metric"].replace("_", " ")) not in titles:
            continue
        shown, value = next(line for line in rows if line[0][0] == row["method"])[titles.index(title)]
        assert float(value) == row["mean"]
        assert shown == mean_and_deviation(row).replace("+-", "±")
        checked += 1
    assert checked >= 2 * len(METHODS)
    costs = {row["method"]: row for row in table.costs}
    for line in rows:
        assert float(line[titles.index("steps")][1]) == costs[line[0][0]]["steps"]
    assert all(note in page.words for note in table.notes)
    assert sum("chosen" in cell for row in page.tables[3] for cell, _ in row) == len(METHODS)


def test_the_best_mean_of_each_column_is_marked(folder, table):
    text = report(folder).read_text()
    name = table.about["headline"]
    best = min((row for row in table.summary if row["metric"] == name), key=lambda row: row["mean"])
    assert f'class="best" data-value="{best["mean"]!r}"' in text


def test_a_curve_passes_through_its_values():
    xs, ys = [0.0, 1.0, 2.0, 4.0], [1.0, None, 0.5, 0.25]
    drawn = chart([Line("a", 0, xs, ys, [0.9, None, 0.4, 0.2], [1.1, None, 0.6, 0.3])], "seconds", "loss")
    page = Tree(drawn)
    (line,) = [a["d"] for a in page.named("path") if a["class"] == "line"]
    places = [tuple(map(float, place.split())) for place in line[1:].split("L")]
    (dot,) = page.named("circle")  # the value before the gap stands alone
    places.insert(0, (float(dot["cx"]), float(dot["cy"])))
    # Equal differences of values are equal differences of places: 0 -> 2 -> 4, and 1 -> 0.5 -> 0.25.
    assert places[2][0] - places[1][0] == pytest.approx(places[1][0] - places[0][0], abs=0.2)
    assert places[2][1] - places[1][1] == pytest.approx((places[1][1] - places[0][1]) / 2, abs=0.2)


def test_values_over_many_powers_of_ten_take_a_logarithmic_axis():
    drawn = chart([Line("a", 0, [0, 1, 2], [1.0, 0.1, 0.01])], "seconds", "loss")
    (line,) = [a["d"] for a in Tree(drawn).named("path")]
    first, second, third = (float(place.split()[1]) for place in line[1:].split("L"))
    assert third - second == pytest.approx(second - first, abs=0.2)
    assert "loss (logarithmic)" in drawn
    assert "(logarithmic)" not in chart([Line("a", 0, [0, 1, 2], [1.0, 0.1, -0.01])], "seconds", "loss")


def test_a_chart_without_a_number_says_so():
    assert "There is no number of loss" in chart([Line("a", 0, [0.0], [None])], "seconds", "loss")


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_lie_inside_and_apart(low, width):
    high = low + width
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-6 * width <= tick <= high + 1e-6 * width for tick in found)
    apart = [b - a for a, b in pairwise(found)]
    assert apart == pytest.approx([apart[0]] * len(apart), rel=1e-3)


@given(st.floats(1e-8, 1e8), st.floats(40, 1e12))
def test_logarithmic_ticks_lie_inside(low, ratio):
    found = log_ticks(low, low * ratio)
    assert 2 <= len(found) <= 14
    assert found == sorted(found)
    assert all(low <= tick <= low * ratio for tick in found)


@given(st.text(), st.text())
def test_text_is_escaped_wherever_it_stands(words, name):
    page = Tree(Page(words, name, words, [Section(name, element("p", words, title=name, data_of=words))]).to_html())
    assert len(page.named("script")) == 1
    normal = words.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "�")
    given_there = [attributes["data-of"] for attributes in page.named("p") if "data-of" in attributes]
    assert [one.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "�") for one in given_there] == [normal]


def leaves(value, path=()):
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for key, item in enumerate(value[:3]):
            yield from leaves(item, (*path, key))
    yield path


def test_nothing_in_a_result_becomes_markup(table, tmp_path):
    """Every text of the file is replaced by one that would end a script."""
    found = json.loads(table.to_json())

    def hostile(value):
        if isinstance(value, dict):
            return {key: hostile(item) for key, item in value.items()}
        if isinstance(value, list):
            return [hostile(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    replaced = hostile(found) | {name: found[name] for name in ("unit",)}
    replaced["summary"] = hostile(found["summary"]) + [dict(row, method=HOSTILE) for row in found["summary"]]
    replaced["environment"] = {HOSTILE: HOSTILE}
    replaced["settings"] = {HOSTILE: [HOSTILE]}
    replaced["notes"] = [HOSTILE]
    (tmp_path / "bench.json").write_text(json.dumps(replaced))
    page = page_of(tmp_path)
    assert len(page.named("script")) == 1
    assert not page.named("b")
    assert sum(HOSTILE in words for words in page.words) > 10


def test_a_damaged_file_is_a_sentence_and_never_a_traceback(table, tmp_path):
    """A field that is gone or is something else: an InputError, or a page that does not need it."""
    found = json.loads(table.to_json())
    found["curves"] = dict(list(found["curves"].items())[:1])
    rng = random.Random(0)
    paths = [path for path in leaves(found) if path]
    refused = []
    for path in rng.sample(paths, 120):
        damaged = copy.deepcopy(found)
        inside = damaged
        for key in path[:-1]:
            inside = inside[key]
        other = rng.choice(["gone", None, "text", 3, True, [], {}, [[]], {"a": {}}])
        if other == "gone":
            del inside[path[-1]]
        else:
            inside[path[-1]] = other
        (tmp_path / "bench.json").write_text(json.dumps(damaged))
        try:
            page_of(tmp_path)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 40
    assert all(str(tmp_path / "bench.json") in sentence for sentence in refused)


@pytest.fixture
def here(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no results"),
        (b"", "it is not JSON"),
        (b'{"task": "quadratic"', "it is not JSON"),
        (b"\xff\xfe", "it is not JSON"),
        (b"[]", "it should be an object, but is a list"),
        (b"{}", "task is missing"),
        (b'{"task": NaN}', "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
    ],
)
def test_a_folder_without_a_result_is_refused_in_one_sentence(content, words, here):
    (here / "a").mkdir()
    if content is not None:
        (here / "a" / "bench.json").write_bytes(content)
    assert words in refusal("report", "a")


def test_other_folders_that_are_refused(here):
    assert "nowhere is no folder" in refusal("report", "nowhere")
    (here / "a" / "bench.json").mkdir(parents=True)
    assert "is no file" in refusal("report", "a")
    (here / "file").write_text("")
    assert "file is no folder" in refusal("report", "file")


def test_the_command_prints_the_path(table, here):
    (here / "bench.json").write_text(table.to_json())
    assert answer("report", ".") == {"report": "report.html", "folder": "."}
    assert invoke("report", here).stdout == f"{here / 'report.html'}\n"


def test_pictures_of_a_comparison_are_those_of_the_chosen_settings(table, folder):
    found = json.loads(table.to_json())
    chosen = {row["method"]: row["settings"] for row in found["costs"]}
    white = write_png(folder / "white.png", nhgd.problem.torch.ones(4, 4)).read_bytes()
    for nth, row in enumerate(found["rows"]):
        row |= {"folder": f"runs/{nth}", "pictures": ["images.png"]}
        (folder / "runs" / str(nth)).mkdir(parents=True)
        right = row["settings"] == chosen[row["method"]]
        (folder / "runs" / str(nth) / "images.png").write_bytes(white if right else b"not drawn")
    (folder / "bench.json").write_text(json.dumps(found))
    drawn = page_of(folder).named("img")
    assert len(drawn) == len(METHODS)
    assert all(base64.b64decode(a["src"].partition(",")[2]) == white and a["alt"] for a in drawn)
    for names, words in ((["../../etc.png"], "not a file in it"), (["gone.png"], "is missing")):
        for row in found["rows"]:
            row["pictures"] = names
        (folder / "bench.json").write_text(json.dumps(found))
        with pytest.raises(InputError, match=words):
            report(folder)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "first"
    result = invoke("run", "quadratic", "--steps", 12, "--seed", 3, "--device", "cpu", "--no-progress", "--out", place)
    assert result.exit_code == 0, result.stderr
    return place


def test_the_page_of_a_run(run_folder, tmp_path):
    place = shutil.copytree(run_folder, tmp_path / "run")
    page = page_of(place)
    result = json.loads((place / "result.json").read_text())
    shown = {words: value for (words, _), (_, value), *_ in page.tables[0][1:]}
    assert {name.replace("_", " "): value for name, value in result["metrics"].items() if value is not None} == {
        name: float(value) for name, value in shown.items()
    }
    assert json.loads((place / "run.json").read_text())["command"] in page.words
    # The last line of a run that goes on may be half written, and there is no result then.
    (place / "result.json").unlink()
    rows = (place / "history.jsonl").read_text()
    (place / "history.jsonl").write_text(rows + '{"step": 13, "sec')
    assert any("no result yet" in words for words in page_of(place).words)
    (place / "history.jsonl").write_text('{"step": 1, "sec\n' + rows)
    with pytest.raises(InputError, match="line 1 is not JSON"):
        report(place)
    (place / "history.jsonl").write_text('{"step": "1", "seconds": 1.0}\n')
    with pytest.raises(InputError, match=r"Line 1 of .* step should be a number, but is text"):
        report(place)


def test_the_page_of_several_runs(run_folder, tmp_path):
    shutil.copytree(run_folder, tmp_path / "a")
    shutil.copytree(run_folder, tmp_path / "group" / "<b>")
    (tmp_path / "group" / "<b>" / "result.json").unlink()
    page = page_of(tmp_path)
    assert [row[0][0] for row in page.tables[0][1:]] == ["a", "group/<b>"]
    assert page.tables[0][2][3][0] == "no result"
    assert {a.get("data-of") for a in page.named("button")} >= {"0", "1"}
