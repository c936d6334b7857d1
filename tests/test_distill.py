"""`nhgd distill`: a folder of images or an .npz in, a few learnt images and their accuracy out."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import nhgd
from nhgd.data.image_folder import read_image_folder
from nhgd.data.labelled_images import read_labelled_images
from tests.commands import answer, invoke, refusal, refusals, strict_json

QUICK = ("--steps", 2)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


def quiet(done, words):
    """A bar that shows nothing."""


def bars(count=24, side=4, seed=0):
    """Upright and level bars, and noise."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 60, (count, side, side))
    y = np.arange(count) % 2
    for i, label in enumerate(y):
        x[(i, slice(None), i % side) if label else (i, i % side)] += 180
    return x.astype(np.uint8), y


def npz(name="a.npz", **arrays):
    x, y = bars()
    np.savez(name, **({"X": x, "y": y} | arrays))
    return name


def learnt(folder):
    """What a command has written."""
    with np.load(Path(folder, "distilled.npz"), allow_pickle=False) as arrays:
        return dict(arrays)


def pictures(folder="pics", size=(4, 4), mode="L"):
    x, y = bars()
    for i, (pixels, label) in enumerate(zip(x, y, strict=True)):
        place = Path(folder, ("level", "upright")[label])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).convert(mode).save(place / f"{i:02}.png")
    return folder


def test_images_in_a_folder_and_in_an_archive_give_the_same():
    x, y = bars()
    order = np.argsort(y, kind="stable")  # as the folder lists them
    found = answer("distill", pictures(), "--per-class", 2, "--steps", 20, "--out", "a")
    same = answer(
        "distill",
        npz(X=x[order], y=np.array(["level", "upright"])[y[order]]),
        "--per-class",
        2,
        "--steps",
        20,
        "--out",
        "b",
    )
    assert found["accuracy"] == same["accuracy"]
    first, second = (learnt(out) for out in "ab")
    np.testing.assert_array_equal(first["images"], second["images"])
    assert first["images"].shape == (4, 4, 4)
    assert first["labels"].tolist() == second["labels"].tolist() == ["level", "level", "upright", "upright"]
    assert strict_json(Path("a/result.json").read_text()) == found
    assert (found["train"], found["held_out"], found["distilled"], found["steps"]) == (20, 4, 4, 20)
    assert {"distilled", "everything", "as_many_real_ones"} == set(found["accuracy"])
    with Image.open("a/images.png") as drawn:
        assert min(drawn.size) > 200
    assert sorted(path.name for path in Path("a").iterdir()) == ["distilled.npz", "images.png", "result.json"]


def test_the_accuracies_are_those_of_the_held_out_images():
    x, y = bars(60)
    found = answer("distill", npz(X=x, y=y), "--steps", 40, "--seed", 3, "--out", "a")
    data = read_labelled_images(Path("a.npz"), None, quiet)
    test, train = data.split(0.2, 3)
    assert np.array_equal(np.sort(np.concatenate([test, train])), np.arange(60))
    assert np.bincount(data.codes[test]).tolist() == [6, 6]
    rows = data.flat
    distiller = nhgd.DatasetDistiller(1, steps=40, random_state=3).fit(rows[train], y[train])
    np.testing.assert_allclose(learnt("a")["images"].reshape(2, -1), distiller.images_, rtol=1e-5, atol=1e-3)
    assert found["accuracy"]["distilled"] == distiller.score(rows[test], y[test])
    assert found["accuracy"]["everything"] == 1.0


def test_for_people():
    result = invoke("distill", npz(), *QUICK, "--out", "a")
    assert result.exit_code == 0
    assert "2 images of 4 x 4 pixels, learnt from 20 in" in result.stdout
    assert [
        line.split()[-2] for line in result.stdout.splitlines() if line.startswith(("the dis", "as many", "every"))
    ] == ["2", "2", "20"]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((24, 4, 4, 3), (4, 4, 3)),
        ((24, 3, 4, 4), (4, 4, 3)),
        ((24, 1, 4, 4), (4, 4, 1)),
        ((24, 9), (3, 3, 1)),
        ((24, 10), (1, 10, 1)),
        ((24, 4, 5), (4, 5, 1)),
    ],
)
def test_shapes_of_an_archive(shape, expected):
    x = np.random.default_rng(0).normal(size=shape)
    data = read_labelled_images(Path(saved(images=x, labels=np.arange(24.0) % 2)), None, quiet)
    assert data.images.shape == (24, *expected)
    assert data.classes.tolist() == [0, 1]
    if shape == (24, 3, 4, 4):
        np.testing.assert_array_equal(data.images[5, 1, 2], x[5, :, 1, 2])


def saved(**arrays):
    np.savez("own.npz", **arrays)
    return "own.npz"


def test_images_of_other_sizes_are_scaled_to_cover_and_cut():
    folder = Path(pictures(size=(8, 8)))
    wide = np.zeros((8, 24), dtype=np.uint8)
    wide[:, 8:16] = 200  # what is left once both sides are cut off
    Image.fromarray(wide).save(folder / "level" / "wide.png")
    images, labels = read_image_folder(folder, None, quiet)
    assert images.shape == (25, 8, 8, 1)
    assert (images[labels.index("upright") - 1] == 200).all()
    assert read_image_folder(folder, 5, quiet)[0].shape == (25, 5, 5, 1)
    Image.new("RGB", (8, 8), (250, 0, 0)).save(folder / "upright" / "red.jpg")
    images, _ = read_image_folder(folder, None, quiet)
    assert images.shape == (26, 8, 8, 3)
    assert np.abs(images[-1].astype(int) - [250, 0, 0]).max() < 10
    big = Path(pictures("big", size=(200, 100)))
    assert read_image_folder(big, None, quiet)[0].shape == (24, 32, 64, 1)


def test_sixteen_bits_are_scaled_rather_than_cut_off():
    folder = Path(pictures())
    deep = np.linspace(0, 65535, 16).reshape(4, 4).astype(np.uint16)
    Image.fromarray(deep).save(folder / "level" / "00.png")
    images, _ = read_image_folder(folder, None, quiet)
    np.testing.assert_array_equal(images[0, :, :, 0], (255 * np.linspace(0, 1, 16)).reshape(4, 4).astype(np.uint8))


def png(width, height):
    """The head of a PNG file that claims this size."""

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")


def test_all_that_is_wrong_with_a_folder_is_said_at_once():
    folder = Path(pictures())
    level = folder / "level"
    (level / "words.png").write_text("hello")
    (level / "empty.jpg").touch()
    (level / "bomb.png").write_bytes(png(60_000, 60_000))
    (level / "large.png").write_bytes(png(8_000, 8_000))
    whole = (level / "00.png").read_bytes()
    (level / "cut.png").write_bytes(whole[: len(whole) - 30])
    (level / "loop.png").symlink_to("loop.png")
    os.mkfifo(level / "pipe.png")
    (level / "self").symlink_to(".")
    (level / ".hidden").write_text("mine")
    (level / "Thumbs.db").write_text("theirs")
    (folder / "loose.png").write_bytes(whole)
    (folder / "bare").mkdir()
    found = refusals("distill", folder)
    for words in (
        "loose.png lies outside of the folders of the classes",
        "bare is the folder of a class, but has no images",
        "level is the folder of a class, but has folders inside: self",
        "2 files (level/empty.jpg and level/words.png) cannot be used: no image of a format that Pillow knows",
        "2 files (level/bomb.png and level/large.png) cannot be used: more than 33,554,432 pixels",
        "level/loop.png cannot be used: Too many levels of symbolic links",
        "level/pipe.png cannot be used: it is a pipe, not a file",
        "level/cut.png cannot be used: damaged (",
    ):
        assert sum(words in sentence for sentence in found) == 1, (words, found)
    assert len(found) == 8


def test_damaged_images_in_an_otherwise_good_folder():
    folder = Path(pictures())
    for name in ("00.png", "02.png"):
        whole = (folder / "level" / name).read_bytes()
        (folder / "level" / name).write_bytes(whole[: len(whole) - 30])
    assert "2 files (level/00.png and level/02.png) cannot be used: damaged" in refusal("distill", folder)


def test_folders_that_cannot_be():
    Path("bare").mkdir()
    assert "has no folders" in refusal("distill", "bare")
    assert "cannot be read" in refusal("distill", "nowhere")
    one = Path(pictures("one"))
    for path in (one / "level").iterdir():
        path.unlink()
    (one / "level").rmdir()
    assert "one class only, 'upright'" in refusal("distill", "one")
    few = Path(pictures("few"))
    for path in list((few / "level").iterdir())[1:]:
        path.unlink()
    assert "'level' has one image only" in refusal("distill", "few")


def test_more_than_fits_is_refused_before_it_is_read(monkeypatch):
    monkeypatch.setattr("nhgd.data.image_folder.MOST_BYTES", 100)
    assert "Make them smaller with --size" in refusal("distill", pictures())
    monkeypatch.setattr("nhgd.data.image_archive.MOST_BYTES", 100)
    monkeypatch.setattr(np.lib.npyio.NpzFile, "__getitem__", None)
    first, second = refusals("distill", npz())
    assert "X claims 24 x 4 x 4 numbers" in first
    assert "y claims 24 numbers" in second


X, Y = bars()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"a": X, "y": Y}, ["has no X or images; it holds a and y"]),
        ({"X": X}, ["has no y or labels"]),
        ({"X": X, "images": X, "y": Y}, ["has both X and images"]),
        ({"X": X, "y": Y[:9]}, ["24 images but 9 labels"]),
        ({"X": X[:, 0, 0], "y": Y}, ["theirs is (24,)"]),
        ({"X": np.zeros((24, 4, 4, 4)), "y": Y}, ["theirs is (24, 4, 4, 4)", "transparency"]),
        ({"X": X[:0], "y": Y[:0]}, ["no images"]),
        ({"X": X.astype(str), "y": Y}, ["They must be whole or real numbers"]),
        ({"X": X * 1j, "y": Y}, ["complex128"]),
        ({"X": np.where(X[5, 0, 0] == X, np.nan, X), "y": Y}, ["holds numbers that are not finite"]),
        ({"X": X, "y": np.eye(2)[Y]}, ["labels must have shape (N,)"]),
        ({"X": X, "y": Y + 0.5}, ["fractions"]),
        ({"X": X, "y": np.where(Y, np.nan, 0)}, ["fractions or not finite"]),
        ({"X": X, "y": np.arange(24)}, ["24 classes but only 24 images"]),
        ({"X": X, "y": 0 * Y}, ["one class only"]),
        ({"X": 0 * X, "y": Y}, ["all pixels are equal"]),
        ({"X": np.array([None] * 24), "y": Y}, ["Python objects, which could run code"]),
    ],
)
def test_archives_that_cannot_be(arrays, words):
    assert all(word in refusal("distill", saved(**arrays)) for word in words)


def test_both_arrays_of_an_archive_are_examined():
    first, second = refusals("distill", saved(X=X * 1j, y=Y + 0.5))
    assert "complex128" in first
    assert "fractions" in second


def test_what_is_no_archive():
    Path("words.npz").write_text("hello")
    assert "not a whole .npz file" in refusal("distill", "words.npz")
    whole = Path(npz()).read_bytes()
    Path("cut.npz").write_bytes(whole[:-40])
    assert "not a whole .npz file" in refusal("distill", "cut.npz")
    np.save("one.npy", X)
    assert "not a whole .npz file" in refusal("distill", "one.npy")
    os.mkfifo("pipe.npz")
    assert "it is a pipe" in refusal("distill", "pipe.npz")
    spoilt = bytearray(whole)
    spoilt[200:260] = bytes(60)
    Path("spoilt.npz").write_bytes(bytes(spoilt))
    assert "X is damaged" in refusal("distill", "spoilt.npz")


def test_an_array_that_claims_more_than_any_memory_is_not_unpacked():
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (2**40, 2**20, 4)})
    with zipfile.ZipFile("bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", head.getvalue() + bytes(10**6))
        with archive.open("y.npy", "w") as member:
            np.lib.format.write_array(member, Y)
    assert "X claims 1099511627776 x 1048576 x 4 numbers" in refusal("distill", "bomb.npz")


def test_options_that_cannot_be(monkeypatch):
    monkeypatch.setattr(nhgd.DatasetDistiller, "fit", None)
    good = npz()
    for option, value, words in (
        ("--per-class", 0, "--per-class must be a whole number of at least 1"),
        ("--per-class", 11, "one class has only 10 images to learn from"),
        ("--steps", 0, "--steps must be"),
        ("--budget", "soon", "A budget is a time"),
        ("--model", "tree", "There is no model called 'tree'"),
        ("--size", 8, "--size is for a folder"),
        ("--size", 0, "--size must be"),
        ("--held-out", 1.0, "--held-out must be"),
        ("--seed", -1, "--seed must be"),
        ("--device", "gpu", "There is no device"),
        ("--out", good, "is a file"),
    ):
        assert words in refusal("distill", good, option, value)
    Path("a", "result.json").mkdir(parents=True)
    assert "has a folder result.json" in refusal("distill", good, "--out", "a")


def test_a_disk_that_is_full_leaves_nothing_half_written(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("nhgd.cli.distill.draw_distilled", full)
    result = invoke("distill", npz(), *QUICK, "--out", "a", "--json")
    assert result.exit_code == 1
    assert "No space left on device" in strict_json(result.stdout)["error"]
    assert not Path("a").exists()
