"""Files as people have them: spoilt, cut, misspelt. A sentence with the remedy, exit code 2, and nothing written."""

from __future__ import annotations

import csv
import gzip
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

import nhgd
from nhgd._memory import out_of_memory
from nhgd.data.csv_file import CSVFile, read_table
from nhgd.data.features import Features, UnseenCategoryWarning
from nhgd.data.idx import read_idx, read_images
from nhgd.errors import unknown
from nhgd.task._labels import with_every_class
from tests import idx_files
from tests.commands import answer, invoke, refusal, refusals, strict_json

HEADER = ["size", "weighed", "colour", "y"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Every command runs in an empty folder, and no data folder is set or cached."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("NHGD_DATA", raising=False)
    monkeypatch.setenv("NHGD_CACHE", str(tmp_path / "cache"))


def rows(count, seed):
    """Two numbers and a colour that tell the label."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        size, weighed = rng.normal(size=2)
        colour = rng.choice(["red", "blue"])
        label = "yes" if size + (colour == "red") > 0.5 else "no"
        made.append([f"{size:.3f}", f"{weighed:.3f}", str(colour), label])
    return made


TRAIN, TRUSTED = rows(60, 0), rows(30, 1)


def text(body, header=HEADER, between=",", end="\n"):
    return end.join(between.join(map(str, row)) for row in [header, *body]) + end


def changed(body, row, column, cell):
    """The rows with one cell changed; rows are counted from 1, as the sentences do."""
    made = [list(line) for line in body]
    made[row - 1][HEADER.index(column)] = cell
    return made


def table(name, content):
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def clean(train, trusted=None, *more, label="y", out="w.csv"):
    """The arguments of a short `nhgd clean`."""
    given = () if trusted is None else ("--trusted", table("trusted.csv", trusted))
    return ("clean", table("train.csv", train), "--label", label, *given, "--steps", 2, "--out", out, *more)


GOOD = text(TRUSTED)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["train.csv is empty", "must name the columns"]),
        (b"\n\r\n\n", ["train.csv is empty"]),
        (text([]), ["has a header but no rows"]),
        (text([*TRAIN[:5], [*TRAIN[5], "x"]]), ["row 6: 5 cells where the header has 4", "quote cells"]),
        (text([*TRAIN[:5], TRAIN[5][:3]]), ["row 6: 3 cells where the header has 4"]),
        (text(TRAIN, ["size", "size", "colour", "y"]), ["names the column 'size' twice", "Rename"]),
        (text(TRAIN, ["size", "", "colour", "y"]), ["column 2 has no name", "--ignore"]),
        (text(changed(TRAIN, 3, "colour", "vermeil é")).encode("latin-1"), ["not text in UTF-8", "Save it"]),
        (text(TRAIN).encode("utf-16"), ["not text in UTF-8"]),
        (text(TRAIN).encode("utf-16-le"), ["line 1", "zero byte"]),
        (gzip.compress(text(TRAIN).encode()), ["not text in UTF-8"]),
        (text(TRAIN, between=";"), ["semicolons between its columns", "Pass --sep ';'"]),
        (text(TRAIN, between="\t"), ["tabs between its columns", "Pass --sep tab"]),
        (text(TRAIN).replace("red", '"red', 1), ["is not CSV", "quotation marks"]),
        (text(TRAIN).replace("blue", '"bl"ue', 1), ["is not CSV", "quotation marks"]),
        (text(changed(TRAIN, 4, "size", "")), ["row 4: nothing in the column 'size'", "--impute"]),
        (text(changed(TRAIN, 4, "size", "NaN")), ["row 4: 'NaN', which reads as missing, in the column 'size'"]),
        (text(changed(TRAIN, 4, "colour", " ")), ["row 4: nothing in the column 'colour'"]),
        (text([["", *row[1:]] for row in TRAIN]), ["the column 'size' is empty", "--ignore"]),
        (
            text([["", *row[1:]] for row in TRAIN[:59]] + TRAIN[59:]),
            ["rows 1, 2, 3 and 56 more: nothing in the column 'size'"],
        ),
        (text(changed(TRAIN, 4, "y", "")), ["row 4: nothing in the label column 'y'", "Give the row a label"]),
        (text(changed(TRAIN, 4, "y", "none")), ["row 4: 'none', which reads as missing, in the label column"]),
        (text(changed(TRAIN, 4, "size", "inf")), ["row 4: 'inf' in the column 'size'", "Correct it"]),
        (text([["inf", *row[1:]] for row in TRAIN]), ["rows 1, 2, 3 and 57 more: 'inf' in the column 'size'"]),
        (text(changed(TRAIN, 4, "size", "1e400")), ["row 4: '1e400' in the column 'size'"]),
        (text(changed(TRAIN, 4, "size", "1e300")), ["row 4: 1e300 in the column 'size' is too large"]),
        (text(changed(TRAIN, 4, "size", "abc")), ["row 4: 'abc' in the column 'size'", "--categorical"]),
        # Few different numbers and one stray word: still a mistake, and not twelve categories.
        (text(changed([[i % 11, *row[1:]] for i, row in enumerate(TRAIN)], 4, "size", "abc")), ["row 4: 'abc'"]),
        (text([[*row[:3], "yes"] for row in TRAIN]), ["every row has the label 'yes'"]),
        (text([[*row[:3], i / 7] for i, row in enumerate(TRAIN)]), ["60 different labels in 60 rows", "--label"]),
        (text([[row[3]] for row in TRAIN], ["y"]), ["no columns apart from the label"]),
        (text(TRAIN, ["weight", *HEADER[1:]]), ["already has a column 'weight'", "Rename it"]),
        (text([[f"n{i}", *r[1:]] for i, r in enumerate(TRAIN)]), ["60 distinct values", "--ignore"]),
    ],
)
def test_a_spoilt_table_is_refused(content, words):
    sentences = refusals(*clean(content, GOOD))
    assert any(all(word in sentence for word in words) for sentence in sentences), sentences


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["trusted.csv is empty"]),
        (text([row[:3] for row in TRUSTED], HEADER[:3]), ["no column of trusted.csv called 'y'"]),
        (text(TRUSTED, ["size", "wieghed", "colour", "y"]), ["called 'weighed'", "Did you mean 'wieghed'?"]),
        (text(changed(TRUSTED, 4, "size", "")), ["trusted.csv, row 4: nothing in the column 'size'"]),
        (text(changed(TRUSTED, 4, "size", "abc")), ["trusted.csv, row 4: 'abc' in the column 'size'"]),
        (text(changed(TRUSTED, 4, "y", "")), ["trusted.csv, row 4: nothing in the label column"]),
        (text(changed(TRUSTED, 4, "y", "maybe")), ["row 4: the label 'maybe' does not occur", "no, yes"]),
        (
            text([row for row in TRUSTED if row[3] == "no"]),
            ["at least two rows of every class", "there are fewer of 'yes'"],
        ),
    ],
)
def test_a_spoilt_trusted_table_is_refused(content, words):
    sentences = refusals(*clean(text(TRAIN), content))
    assert any(all(word in sentence for word in words) for sentence in sentences), sentences


def test_all_that_is_wrong_with_two_tables_is_said_at_once():
    """Rows that fit the header are examined although others do not, and keep their numbers."""
    train, trusted = [list(row) for row in TRAIN], [list(row) for row in TRUSTED]
    train[2] += ["x"]
    train[9], train[10] = train[9][:2], train[10][:2]
    train[4][0], train[5][0], train[12][1] = "abc", "inf", "1e300"
    train[7][2], train[8][1], train[11][3] = "", "NA", ""
    trusted[3][3], trusted[4][0], trusted[6][1] = "maybe", "x", ""
    found = refusals(*clean(text(train), text(trusted), "--ignore", "color"))
    expected = [
        "train.csv, row 3: 5 cells where the header has 4",
        "train.csv, rows 10 and 11: 2 cells where",
        "Did you mean 'colour'?",
        "train.csv, row 12: nothing in the label column 'y'",
        "train.csv, rows 5 and 6: 'abc' and 'inf' in the column 'size'",
        "train.csv, row 13: 1e300 in the column 'weighed' is too large",
        "train.csv: 2 cells are empty or read as missing, in the columns 'weighed' (row 9) and 'colour' (row 8)",
        "trusted.csv, row 5: 'x' in the column 'size'",
        "trusted.csv, row 7: nothing in the column 'weighed'",
        "trusted.csv, row 4: the label 'maybe' does not occur",
    ]
    assert len(found) == len(expected)
    assert all(words in sentence for words, sentence in zip(expected, found, strict=True)), found


def test_the_page_about_cleaning_shows_what_is_printed():
    page = Path(__file__).parents[1].joinpath("docs/cleaning.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```text\n(Error: .*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    train, trusted = [list(row) for row in TRAIN], [list(row) for row in TRUSTED]
    train[2] += ["x"]
    train[8] += ["x"]
    train[11][3], trusted[4][0] = "", "x"
    assert invoke(*clean(text(train), text(trusted))).stderr == shown


def test_a_file_that_cannot_be_read_does_not_hide_the_other():
    first, second = refusals(*clean(text([[*TRAIN[0], "x"], *TRAIN[1:]]), b"\xff"))
    assert "train.csv, row 1: 5 cells" in first
    assert "trusted.csv is not text in UTF-8" in second


def test_of_many_problems_the_first_are_printed_and_all_are_in_the_json():
    header = [f"c{i}" for i in range(40)] + ["y"]
    odd = [["abc"] * 40 + ["yes"]] + [["1"] * 40 + ["no"], ["2"] * 40 + ["yes"]] * 10
    found = refusals(*clean(text(odd, header)))
    assert len(found) == 40
    lines = invoke(*clean(text(odd, header))).stderr.splitlines()
    assert lines[0] == "Error: There are 40 problems."
    assert lines[1:] == [*(f"  {one}" for one in found[:20]), "  ... and 20 more."]


@pytest.mark.parametrize("names", [(";", ";"), ("\t", "tab"), ("\t", r"\t"), ("|", "|")])
def test_other_separators_are_read_and_written(names):
    between, called = names
    arguments = clean(text(TRAIN, between=between), text(TRUSTED, between=between), "--sep", called)
    assert answer(*arguments, "--cleaned", "c.csv")["rows"] == 60
    with open("w.csv", encoding="utf-8", newline="") as file:
        header, *body = csv.reader(file, delimiter=between)
    assert header == [*HEADER, "weight", "suspect", "suggested_label", "wrong_score"]
    assert [row[:4] for row in body] == TRAIN
    assert Path("c.csv").read_text().splitlines()[0] == between.join(HEADER)


def test_separators_that_cannot_be():
    good = text(TRAIN)
    for sep in ("ab", '"', "a", "\n"):
        assert "cannot separate columns" in refusal(*clean(good, GOOD, "--sep", sep))
    assert "trusted.csv has commas between its columns" in refusal(*clean(text(TRAIN, between=";"), GOOD, "--sep", ";"))
    german = [[row[0].replace(".", ","), *row[1:]] for row in TRAIN]
    sentence = refusal(*clean(text(german, between=";"), None, "--sep", ";"))
    assert "the column 'size' has commas in its numbers" in sentence


def test_options_of_clean_that_cannot_be():
    good = text(TRAIN)
    assert "Did you mean 'y'?" in refusal(*clean(good, GOOD, label="Y"))
    assert "Did you mean 'colour'?" in refusal(*clean(good, GOOD, "--ignore", "color"))
    assert "Did you mean 'colour'?" in refusal(*clean(good, GOOD, "--categorical", "coluor"))
    for option in ("--ignore", "--categorical"):
        assert f"cannot also be passed to {option}" in refusal(*clean(good, GOOD, option, "y"))
    assert "no columns apart from the label" in refusal(*clean(good, GOOD, "--ignore", "size,weighed,colour"))
    assert "cannot be read" in refusal("clean", "nothing.csv", "--label", "y")
    assert "cannot be read" in refusal("clean", ".", "--label", "y")
    assert "--label" in refusal("clean", "train.csv")
    assert "only one row" in (said := refusal(*clean(text(changed(TRAIN, 4, "y", "odd")))))
    assert "'odd'" in said
    assert "np." not in said


def test_an_output_that_cannot_or_must_not_be_is_found_out_before_the_work(monkeypatch):
    def never(*_, **__):
        raise AssertionError("the work began")

    monkeypatch.setattr(nhgd.LabelCleaner, "fit", never)
    good = text(TRAIN)
    Path("folder").mkdir()
    Path("link.csv").symlink_to("train.csv")
    os.mkfifo("pipe")
    assert "is a folder" in refusal(*clean(good, GOOD, out="folder"))
    assert "is a device or a pipe" in refusal(*clean(good, GOOD, out="pipe"))
    for out in ("train.csv", "folder/../train.csv", "link.csv"):
        assert "would overwrite the input train.csv" in refusal(*clean(good, GOOD, out=out))
    assert "would overwrite the input trusted.csv" in refusal(*clean(good, GOOD, out="trusted.csv"))
    assert "train.csv is a file" in refusal(*clean(good, GOOD, out="train.csv/w.csv"))
    assert Path("train.csv").read_text() == good
    if Path("/proc/self").exists():  # where even root cannot write
        for out in ("/proc/nhgd/w.csv", "/proc/w.csv"):
            assert "cannot be written" in refusal(*clean(good, GOOD, out=out))


def test_a_disk_that_fails_while_the_table_is_written_leaves_the_old_one(monkeypatch):
    class Full:
        def writerow(self, row):
            raise OSError(28, "No space left on device")

    Path("w.csv").write_text("old")
    arguments = clean(text(TRAIN), GOOD)
    before = sorted(Path.cwd().iterdir())
    monkeypatch.setattr(csv, "writer", lambda file, **_: file.write("half") and Full())
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    assert Path("w.csv").read_text() == "old"
    assert sorted(Path.cwd().iterdir()) == before


def read(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_tables_from_other_systems_mean_the_same():
    answer(*clean(text(TRAIN), GOOD))
    usual = read("w.csv")
    assert [list(row.values())[:4] for row in usual] == TRAIN
    numbers = [row | {"y": "1" if row["y"] == "yes" else "0"} for row in usual]
    for content in (
        text(TRAIN, end="\r\n").encode(),
        text(TRAIN, end="\r").encode(),
        b"\xef\xbb\xbf" + text(TRAIN).encode(),
        text(TRAIN).replace("\n", "\n\n").encode(),
        text(TRAIN).replace("red", '"red"').encode(),
    ):
        answer(*clean(content, GOOD))
        assert read("w.csv") == usual
    # Whole numbers as labels, which a tool that fills gaps wrote as decimals in one of the files.
    digit = {"yes": 1, "no": 0}
    answer(
        *clean(
            text([[*row[:3], digit[row[3]]] for row in TRAIN]),
            text([[*row[:3], float(digit[row[3]])] for row in TRUSTED]),
        )
    )
    found = read("w.csv")
    assert [row["y"] for row in found] == [row["y"] for row in numbers]
    assert [row["weight"] for row in found] == [row["weight"] for row in usual]
    assert {row["suggested_label"] for row in found} <= {"0", "1"}


def test_columns_of_the_trusted_table_may_stand_in_another_order_and_be_more():
    answer(*clean(text(TRAIN), GOOD))
    usual = read("w.csv")
    turned = text([[*row[::-1], "x"] for row in TRUSTED], [*HEADER[::-1], "more"])
    answer(*clean(text(TRAIN), turned))
    assert read("w.csv") == usual


def test_imputed_cells_stay_empty_in_the_output():
    train = changed(changed(TRAIN, 4, "size", ""), 9, "colour", "NA")
    answer(*clean(text(train), text(changed(TRUSTED, 2, "size", "?")), "--impute"))
    found = read("w.csv")
    assert (found[3]["size"], found[8]["colour"]) == ("", "NA")
    assert len(found) == 60


def test_a_category_that_no_row_to_clean_has_is_told():
    found = answer(*clean(text(TRAIN), text(changed(TRUSTED, 4, "colour", "green"))))
    (sentence,) = found["warnings"]
    assert "trusted.csv, row 4: 'green' in the column 'colour'" in sentence
    assert sentence in invoke(*clean(text(TRAIN), text(changed(TRUSTED, 4, "colour", "green")))).stdout.replace(
        "\n", ""
    )
    both = [["red"], ["blue"]]
    train, other = read_table(Path(table("a.csv", text(both, ["c"])))), table("b.csv", text([["green"]], ["c"]))
    features = Features().fit(train, ["c"])
    with pytest.warns(UnseenCategoryWarning, match="row 1: 'green'"):
        assert features.transform(read_table(Path(other))).tolist() == [[0.0, 0.0]]


def test_numbers_that_are_categories():
    codes = [["1"], ["2"], ["1"], ["10"]]
    rows = read_table(Path(table("a.csv", text(codes, ["code"]))))
    assert Features().fit(rows, ["code"]).transform(rows).tolist() == [[1.0], [2.0], [1.0], [10.0]]
    split = Features(categorical=frozenset({"code"})).fit(rows, ["code"])
    assert split.categories == {"code": ["1", "10", "2"]}
    assert split.transform(rows).sum(1).tolist() == [1.0] * 4


def test_without_a_trusted_table_the_option_is_named():
    (sentence,) = answer(*clean(text(TRAIN)))["warnings"]
    assert "--trusted FILE.csv" in sentence
    assert "X_trusted" not in sentence


# Image sets.


def image_files(folder, *, packed=False, **changes):
    arrays = idx_files.image_set()
    for key, change in changes.items():
        name = idx_files.NAMES[int(key[1:])]
        arrays[name] = change(arrays[name])
    return idx_files.write(Path(folder), arrays, packed)


def spoil(folder, name, change):
    path = Path(folder) / name
    path.write_bytes(change(path.read_bytes()))


def flipped(position):
    def change(content):
        return content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]

    return change


RUNS = {
    "cleaning": ("run", "cleaning", "--steps", "1", "--set", "inner_steps=1", "--out", "results"),
    "distillation": ("run", "distillation", "--steps", "1", "--out", "results"),
}


@pytest.mark.parametrize("task", RUNS)
def test_spoilt_image_sets_are_refused_by_every_task_that_reads_them(task):
    def said(folder):
        return refusal(*RUNS[task], "--data", folder)

    packed = f"{idx_files.NAMES[0]}.gz"
    image_files("sum", packed=True)
    spoil("sum", packed, flipped(-6))  # the checksum
    assert "CRC check failed" in said("sum")
    image_files("middle", packed=True)
    spoil("middle", packed, flipped(200))
    assert "Download it again." in said("middle")
    image_files("cut", packed=True)
    spoil("cut", packed, lambda content: content[:-100])
    assert "not a whole gzip file" in said("cut")
    image_files("magic")
    spoil("magic", idx_files.NAMES[3], lambda content: b"<!DOCTYPE html>" + content)
    assert "is not an IDX file: it begins with 3c21444f" in said("magic")
    assert "no sample of class 7" in said(image_files("few", _1=lambda y: np.where(y == 7, 6, y)))
    assert "no sample of class 0" in said(image_files("one", _1=lambda y: 0 * y + 3))
    assert "labels must lie between 0 and 9" in said(image_files("labels", _3=lambda y: y + 1))
    assert "119 labels" in said(image_files("count", _1=lambda y: y[:-1]))
    assert "the same size" in said(image_files("sizes", _2=lambda x: x[:, :, :4]))
    assert "no pixels" in said(image_files("flat", _0=lambda x: x[:, :0], _2=lambda x: x[:, :0]))
    (image_files("part") / idx_files.NAMES[2]).unlink()
    assert f"no {idx_files.NAMES[2]}(.gz)" in said("part")
    Path("empty").mkdir()
    assert "train-images-idx3-ubyte(.gz)" in said("empty")
    Path("file").write_text("mine")
    assert "file is a file, not a folder" in said("file")
    assert "There is no folder nowhere" in said("nowhere")


def test_too_few_images_to_set_trusted_ones_aside():
    few = {f"_{i}": lambda array: array[:30] for i in range(2)}
    assert "30 samples are too few" in refusal(*RUNS["cleaning"], "--data", image_files("few", **few))


def test_whether_a_file_is_packed_is_told_by_its_content():
    usual = read_images(image_files("plain"))
    image_files("named", packed=True)
    for name in idx_files.NAMES:
        spoil("named", f"{name}.gz", gzip.decompress)
    image_files("unnamed")
    spoil("unnamed", idx_files.NAMES[0], gzip.compress)
    for folder in ("named", "unnamed"):
        found = read_images(Path(folder))
        assert np.array_equal(found.train_images, usual.train_images)
        assert np.array_equal(found.test_labels, usual.test_labels)


@pytest.mark.parametrize("rate", ["1", "1.5", "-0.1", "nan", "inf"])
def test_a_noise_rate_outside_its_range(rate):
    sentence = refusal(*RUNS["cleaning"], "--set", f"noise={rate}")
    assert "noise" in sentence
    assert f"got {float(rate)}" in sentence


def test_a_split_gets_every_class_by_as_few_changes_as_possible():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        labels = torch.randint(5, (40,), generator=generator)
        labels[:5] = torch.arange(5)
        order = with_every_class(labels, 30, 40, 5)
        assert torch.equal(order.sort().values, torch.arange(40))
        before, after = labels[30:], labels[order][30:]
        assert set(after.tolist()) == set(range(5))
        assert int((order != torch.arange(40)).sum()) == 2 * (5 - len(before.unique()))
    with pytest.raises(nhgd.InputError, match="no sample of class 2 among the 3"):
        with_every_class(torch.tensor([0, 1, 1]), 0, 3, 3)
    with pytest.raises(nhgd.InputError, match="2 samples cannot contain all 3 classes"):
        with_every_class(torch.tensor([0, 1, 2]), 0, 2, 3)


def test_a_download_that_cannot_be_leaves_nothing(monkeypatch):
    assert "Did you mean 'mnist'?" in refusal("data", "fetch", "mnits", "--out", "a/b")
    assert "Did you mean 'fetch'?" in refusal("data", "fecth", "mnist")
    bare = invoke("data")
    assert (bare.exit_code, bare.stdout, bare.stderr) == (2, "", "Error: Missing command.\n")
    Path("file").write_text("mine")
    assert "file is a file" in refusal("data", "fetch", "mnist", "--out", "file")
    if Path("/proc/self").exists():
        assert "cannot be written" in refusal("data", "fetch", "mnist", "--out", "/proc/nhgd")

    def offline(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    monkeypatch.setattr(urllib.request, "urlopen", offline)
    result = invoke("data", "fetch", "mnist", "--out", "a/b", "--json")
    assert result.exit_code == 1
    sentence = strict_json(result.stdout)["error"]
    assert "could not be downloaded from any mirror" in sentence
    assert "point --data or NHGD_DATA at it" in sentence
    assert not Path("a").exists()


# In Python.


def test_numbers_too_large_to_compute_with():
    X = np.random.default_rng(0).normal(size=(40, 3))
    y = (X[:, 0] > 0).astype(int)
    huge = X.copy()
    huge[5, 1] = 1e300
    with pytest.raises(nhgd.InputError, match="Feature 1 of X holds numbers too large"):
        nhgd.LabelCleaner(steps=1).fit(huge, y, X, y)
    with pytest.raises(nhgd.InputError, match="Trusted sample 5 is too far"):
        nhgd.LabelCleaner(steps=1).fit(X, y, huge, y)
    for scale in ("all", "feature"):
        with pytest.raises(nhgd.InputError, match="numbers too large"):
            nhgd.DatasetDistiller(steps=1, scale=scale).fit(huge, y)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("fit", [nhgd.LabelCleaner(steps=1).fit, nhgd.DatasetDistiller(steps=1).fit])
def test_nan_and_inf_in_arrays(bad, fit):
    X = np.random.default_rng(0).normal(size=(40, 3))
    X[5, 1] = bad
    with pytest.raises(ValueError, match=r"NaN|infinity"):
        fit(X, np.arange(40) % 2)


def test_a_name_in_capitals_is_near():
    assert "Did you mean 'colour'?" in str(unknown("column", "Colour", ["colour", "size"]))
    assert "Did you mean 'COLOUR'?" in str(unknown("column", "colour", ["COLOUR", "size"]))


@pytest.mark.parametrize(
    ("train", "trusted", "words"),
    [
        ("1e99", "1", "Trusted sample 0 is too far from all others in feature 1"),
        ("1", "1e99", "Trusted sample 0 is too far from all others in feature 1"),
        ("1", "1e30", "is too far"),
    ],
)
def test_a_column_whose_numbers_overflow_is_refused(train, trusted, words):
    sentence = refusal(
        *clean(
            text([[r[0], train, *r[2:]] for r in TRAIN]), text([[r[0], trusted, *r[2:]] for r in TRUSTED]), "--seed", 1
        )
    )
    assert words in sentence


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "/dev/zero", "/dev/null", "link to /dev/zero"])
def test_what_is_no_file_is_not_opened(kind, tmp_path):
    place = Path("x")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place))
    elif kind == "folder":
        place.mkdir()
    elif kind.startswith("link"):
        place.symlink_to("/dev/zero")
    else:
        place = Path(kind)
    assert "cannot be read: it is a" in refusal("clean", place, "--label", "y")
    with pytest.raises(nhgd.InputError, match="cannot be read: it is a"):
        read_idx(place)
    good = clean(text(TRAIN), GOOD)
    assert "cannot be read: it is a" in refusal(*good, "--trusted", place)
    folder = tmp_path / "images"
    idx_files.write(folder, idx_files.image_set())
    spoilt = folder / "train-images-idx3-ubyte"
    spoilt.unlink()
    spoilt.symlink_to(place.absolute())
    assert "train-images" in refusal("run", "cleaning", "--set", "dataset=mnist", "--data", folder)


def test_no_more_bytes_are_unpacked_than_any_image_set_has():
    head = b"\0\0\x08\x03" + (2**20).to_bytes(4, "big") + (1024).to_bytes(4, "big") + (1).to_bytes(4, "big")
    Path("bomb").write_bytes(head)
    with pytest.raises(nhgd.InputError, match="claims 1048576 x 1024 x 1 bytes, which is not an image set"):
        read_idx(Path("bomb"))
    # No bytes at all, in a shape that no array can have.
    Path("empty").write_bytes(b"\0\0\x08\x04" + b"\0\0\0\0" + 3 * b"\xff\xff\xff\xff")
    with pytest.raises(nhgd.InputError, match="claims 0 x 4294967295 x 4294967295 x 4294967295 bytes"):
        read_idx(Path("empty"))


class Header(list):
    """Column names that must not be walked through for each column."""

    def index(self, *_):
        raise AssertionError("the header was searched")

    __contains__ = index


def test_a_wide_table_is_read_in_one_go():
    """Each column is found by its name at once: 10^5 of them took half an hour when each was searched for."""
    names = [f"c{i}" for i in range(1000)]
    wide = CSVFile(Path("t.csv"), Header(names), [["1"] * 1000, ["2"] * 1000])
    assert Features().fit(wide, names).transform(wide).tolist() == [[1.0] * 1000, [2.0] * 1000]


def test_a_sentence_does_not_list_ten_thousand_names():
    header = [f"c{i}" for i in range(10_000)]
    sentence = refusal(*clean(text([["1"] * 9_999 + ["a"], ["2"] * 9_999 + ["b"]], header)))
    assert "There is no column" in sentence
    assert len(sentence) < 2000
    assert "and 9900 more" in sentence


@pytest.mark.parametrize("option", ["--out", "--data", "--method", "--preset", "--execution", "--checkpoint"])
def test_an_empty_value_is_refused(option):
    for given in ((option, ""), (f"{option}=",)):
        assert refusal("run", "quadratic", *given) == f"{option} is empty. Give it a value, or omit it."


@pytest.mark.parametrize("option", ["--out", "--checkpoint"])
@pytest.mark.parametrize("name", ["x" * 300, "/".join(["x" * 200] * 30), "é" * 200])
def test_a_name_that_cannot_be_is_found_out_before_the_work(option, name, monkeypatch):
    monkeypatch.setattr(nhgd.Solver, "run", None)
    sentence = refusal("run", "quadratic", "--preset", "quick", option, name)
    assert sentence.startswith(option)
    assert sentence.endswith("Give another path.")
    assert "--out" in refusal(*clean(text(TRAIN), GOOD, out=name)[:-2], "--out", name)


def test_the_home_of_nobody(monkeypatch):
    args = ("run", "cleaning", "--set", "dataset=mnist")
    assert "--data is ~nobody-at-all/x, but there is no such user" in refusal(*args, "--data", "~nobody-at-all/x")
    monkeypatch.setenv("NHGD_DATA", "~nobody-at-all")
    assert "NHGD_DATA is ~nobody-at-all" in refusal(*args)
    monkeypatch.delenv("NHGD_DATA")
    monkeypatch.setenv("NHGD_CACHE", "~nobody-at-all")
    assert "NHGD_CACHE is ~nobody-at-all" in refusal("data", "fetch", "mnist")
    monkeypatch.setenv("NHGD_CACHE", "x" * 300)
    assert "The place for the files has a name of 300 bytes" in refusal("data", "fetch", "mnist")


def test_the_longest_name_that_can_be_is_written():
    """Beside it there is a file of another name for a while, which must not be longer."""
    longest = "x" * 251 + ".csv"
    answer(*clean(text(TRAIN), GOOD, out=longest))
    assert len(read(longest)) == len(TRAIN)


@pytest.mark.parametrize("name", ["run.json", "result.json", "history.jsonl", "curve.png"])
def test_a_folder_where_a_result_is_to_be_is_found_out_before_the_work(name, monkeypatch):
    monkeypatch.setattr(nhgd.Solver, "run", None)
    Path("out", name).mkdir(parents=True)
    assert f"has a folder {name}" in refusal("run", "quadratic", "--preset", "quick", "--out", "out")


def test_sentences_with_other_peoples_characters_take_one_line():
    odd = "a\nb\x1b[31m\r\u202e"
    for args in (("run", "cleaning", "--data", odd), ("run", odd), ("clean", odd, "--label", "y"), (odd,)):
        sentence = refusal(*args)
        assert r"a\nb\x1b[31m" in sentence
        assert sentence.isprintable()
    header = text(TRAIN, ["size", "weighed", f'"{odd}"', "y"])
    assert all(sentence.isprintable() for sentence in refusals(*clean(header, GOOD, label="yy")))


@pytest.mark.parametrize(
    ("size", "words"),
    [(10**8, "Out of memory"), (10**13, "Out of memory"), (10**30, "between -2^63 and 2^63")],
)
def test_more_than_the_machine_has_is_a_sentence(size, words):
    sentence = refusal("run", "quadratic", "--set", f"dim={size}", code=2 if size > 2**63 else 1)
    assert words in sentence


def test_what_says_that_memory_is_full():
    for error in (
        MemoryError(),
        MemoryError("Unable to allocate 7.45 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you ..."
        ),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"),
    ):
        sentence = out_of_memory(error)
        assert sentence.startswith("Out of memory")
        assert "\n" not in sentence
    with pytest.raises(MemoryError) as caught:
        np.zeros(2**50)
    assert "Unable to allocate" in out_of_memory(caught.value)
    with pytest.raises(RuntimeError) as full:
        torch.zeros(2**45)
    assert "can't allocate memory" in out_of_memory(full.value)
    for other in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("x"), KeyError("memory")):
        assert out_of_memory(other) is None


def shell(line):
    """The exit code and the two streams of a command line, in a process of its own."""
    here = {"PYTHONPATH": str(Path(nhgd.__file__).parents[1]), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    words = ["bash", "-c", f'"$PYTHON" -m nhgd {line}']
    done = subprocess.run(words, env=os.environ | here, capture_output=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_stream_that_is_full():
    sentence = b"Error: Standard output could not be written: No space left on device.\n"
    assert shell("list --json > /dev/full") == (1, b"", sentence)
    code, out, _ = shell("lst --json 2> /dev/full")
    assert code == 2
    assert "Did you mean 'list'" in strict_json(out)["error"]


def test_a_stream_that_is_closed():
    assert shell("list >&-") == (1, b"", b"Error: Standard output could not be written: Bad file descriptor.\n")
    code, out, err = shell("run quadratic --preset quick --steps 2 --out r --json 2>&-")
    assert (code, err) == (0, b"")
    assert strict_json(out)["steps"] == 2
    assert len(list(Path("r").iterdir())) == 4


def test_bytes_that_are_no_text():
    code, out, err = shell("run quadratic --preset quick --steps 1 --no-progress --out $'r\\xff'")
    assert (code, err) == (0, b"")
    assert rb"r\udcff" in out
    assert {path.name for path in Path(os.fsdecode(b"r\xff")).iterdir()} == {
        "run.json",
        "result.json",
        "history.jsonl",
        "curve.png",
    }
    found = strict_json((Path(os.fsdecode(b"r\xff")) / "result.json").read_text())
    assert found["out"] == r"r\udcff"
    odd = os.fsdecode(b"\xff")
    for args in (("run", odd), ("run", "quadratic", "--set", f"dim={odd}"), ("clean", odd, "--label", "y"), (odd,)):
        assert r"\udcff" in refusal(*args)
