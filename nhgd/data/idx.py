"""Image sets as IDX files, the format MNIST and Fashion-MNIST are published in. Nothing is ever unpickled."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np

from nhgd._path import check_file, expanded
from nhgd.data.fetch import cache
from nhgd.errors import InputError

LARGEST = 2**29  # bytes of one file, unpacked; MNIST has 47 million
_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}


@dataclass(frozen=True)
class ImageSet:
    """Images (N, rows, columns) and labels (N,), as bytes, for training and for testing."""

    train_images: np.ndarray[Any, np.dtype[np.uint8]]
    train_labels: np.ndarray[Any, np.dtype[np.uint8]]
    test_images: np.ndarray[Any, np.dtype[np.uint8]]
    test_labels: np.ndarray[Any, np.dtype[np.uint8]]


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Read one IDX file of bytes, plain or gzip, and check its magic number, its sizes and its length.

    The first bytes decide which it is: browsers unpack files without renaming them.
    """
    check_file(path)
    try:
        with open(path, "rb") as start:
            packed = start.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            return _parse(file, path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}). Download it again.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from error


def _parse(file: BufferedIOBase, path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    head = file.read(4)
    if len(head) < 4 or head[:2] != b"\0\0":
        raise InputError(
            f"{path} is not an IDX file: it begins with {head.hex() or 'nothing'}, not with 0000. Download it again."
        )
    if head[2] != 0x08 or not 1 <= head[3] <= 4:
        raise InputError(
            f"{path} is an IDX file of another kind (magic number {head.hex()}); bytes were expected (0x08). Download it again."
        )
    sizes = file.read(4 * head[3])
    if len(sizes) < 4 * head[3]:
        raise InputError(f"{path} ends within its header. Download it again.")
    shape = struct.unpack(f">{head[3]}I", sizes)
    expected = math.prod(shape)
    if max(expected, *shape) > LARGEST:  # also where another length is 0: NumPy makes no such shape
        raise InputError(
            f"{path} claims {' x '.join(map(str, shape))} bytes, which is not an image set: at most {LARGEST} are"
            " read. Download it again."
        )
    data = file.read(expected + 1)
    if len(data) != expected:
        found = "more" if len(data) > expected else str(len(data))
        raise InputError(
            f"{path} is truncated or corrupt: its header promises {expected} bytes, but it holds {found}."
            " Download it again."
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def find(name: str, data: str | Path | None, cached: bool = False) -> Path | None:
    """The folder that holds the four files of an image set: under `data`, else under NHGD_DATA; None when neither is
    set.

    A place that was named but does not hold the files is an error: there is no silent fallback. With `cached`, what
    `nhgd data fetch` has left is taken when no place was named.
    """
    asked = str(data) if data is not None else os.environ.get("NHGD_DATA")
    if not asked:
        folder = cache() / name
        return folder if cached and all(_file(folder, stem) for stem in _FILES.values()) else None
    root = expanded("NHGD_DATA" if data is None else "--data", asked)
    if not root.is_dir():
        what = f"{root} is a file, not a folder." if root.exists() else f"There is no folder {root}."
        raise InputError(f"{what} Point --data or NHGD_DATA at the IDX files of {name}.")
    for folder in (root / name, root):
        if all(_file(folder, stem) for stem in _FILES.values()):
            return folder
    for folder in (root / name, root):
        absent = [stem for stem in _FILES.values() if not _file(folder, stem)]
        if len(absent) < len(_FILES):
            raise InputError(f"{folder} holds a part of {name}, but no {absent[0]}(.gz). Add it.")
    raise InputError(
        f"{root} holds no {name}: looked for {_FILES['train_images']}(.gz) and its three companions there and in"
        f" {root / name}. Point --data or NHGD_DATA at them."
    )


def _file(folder: Path, stem: str) -> Path | None:
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    return None


def read_images(folder: Path) -> ImageSet:
    """Read and cross-check the four files of an image set."""
    arrays = {}
    for key, stem in _FILES.items():
        path = _file(folder, stem)
        if path is None:
            raise InputError(f"{folder} holds no {stem}(.gz).")
        arrays[key] = read_idx(path)
    for part in ("train", "test"):
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if images.ndim != 3 or labels.ndim != 1:
            raise InputError(
                f"{folder}: the {part} files do not hold images and labels ({images.ndim} and {labels.ndim} axes)."
                " Were files mixed up?"
            )
        if len(images) != len(labels):
            raise InputError(
                f"{folder}: {len(images)} {part} images but {len(labels)} labels. The files must belong together."
            )
        if len(labels) == 0:
            raise InputError(f"{folder}: the {part} files hold no samples.")
        if int(labels.max()) > 9:
            row = int(np.argmax(labels > 9))
            raise InputError(f"{folder}: {part} label {row} is {int(labels[row])}; labels must lie between 0 and 9.")
    here, there = (arrays[f"{part}_images"].shape[1:] for part in ("train", "test"))
    if 0 in here:
        raise InputError(
            f"{folder}: the images have no pixels ({' x '.join(map(str, here))}). Download the files again."
        )
    if here != there:
        sizes = " and ".join(" x ".join(map(str, shape)) for shape in (here, there))
        raise InputError(
            f"{folder}: the training and test images must have the same size, but they have {sizes} pixels."
        )
    return ImageSet(**arrays)
