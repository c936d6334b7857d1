"""Images and labels in an .npz file, from which nothing is executed and no more is unpacked than is allowed."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from nhgd._path import check_file
from nhgd.data.csv_file import and_more
from nhgd.errors import InputError, Problems

Array = np.ndarray[Any, Any]
MOST_BYTES = 2**32  # of an array
IMAGES, LABELS = ("X", "images"), ("y", "labels")
BROKEN = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    zlib.error,
    zipfile.BadZipFile,
)


def read_image_archive(path: Path) -> tuple[Array, list[Any]]:
    """Images (N, H, W, C) and their labels. All that is wrong with the two arrays is refused together.

    Images may also be (N, H, W), (N, C, H, W) with one or three channels, or (N, P), taken to be square if P is.
    """
    check_file(path)
    problems = Problems()
    x, y = None, None
    try:
        with zipfile.ZipFile(path) as archive, np.load(path, allow_pickle=False) as arrays:
            with problems.gathered():
                x = _array(path, archive, arrays, IMAGES)
            with problems.gathered():
                y = _array(path, archive, arrays, LABELS)
    except BROKEN as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a whole .npz file: {_said(error)}. Write it with numpy.savez.") from error
    if x is not None:
        with problems.gathered():
            x = _images(path, x)
    if y is not None:
        with problems.gathered():
            _check_labels(path, y)
    if x is not None and y is not None and y.ndim == 1 and len(x) != len(y):
        problems.add(f"{path} has {len(x)} images but {len(y)} labels. Each image needs one.")
    problems.refuse()
    assert x is not None
    assert y is not None
    return x, [int(label) if isinstance(label, float) else label for label in y.tolist()]


def _array(path: Path, archive: zipfile.ZipFile, arrays: Any, names: tuple[str, ...]) -> Array:
    """The array of one of these names, once its head says how large it is."""
    present = [name for name in names if name in arrays.files]
    if len(present) != 1:
        called = " or ".join(names)
        has = and_more(sorted(arrays.files)) if arrays.files else "nothing"
        raise InputError(
            f"{path} has {'both' if present else 'no'} {called.replace(' or ', ' and ') if present else called}; it holds"
            f" {has}. {'Keep one of them' if present else f'Save the array as {names[0]}'}."
        )
    (name,) = present
    try:
        with archive.open(f"{name}.npy") as member:
            read = np.lib.format.read_array_header_1_0
            if np.lib.format.read_magic(member) != (1, 0):
                read = np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
        if dtype.hasobject:
            raise InputError(
                f"{path}: {name} holds Python objects, which could run code when they are read. Save plain numbers, or"
                " strings as labels."
            )
        size = math.prod(shape) * dtype.itemsize
        if size > MOST_BYTES:
            raise InputError(
                f"{path}: {name} claims {' x '.join(map(str, shape))} numbers, {size / 2**30:.1f} GiB, more than"
                f" {MOST_BYTES / 2**30:.0f}. Save fewer or smaller images."
            )
        found: Array = arrays[name]
    except BROKEN as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"{path}: {name} is damaged: {_said(error)}. Write the file again with numpy.savez."
        ) from error
    return found


def _images(path: Path, x: Array) -> Array:
    if x.dtype.kind not in "biuf":
        raise InputError(f"{path}: the images are of type {x.dtype}. They must be whole or real numbers.")
    shape = x.shape
    if x.ndim == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        x = x.transpose(0, 2, 3, 1)
    elif x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 2:
        side = math.isqrt(shape[1])
        x = x.reshape(len(x), *((side, side) if side * side == shape[1] else (1, shape[1])), 1)
    if x.ndim != 4 or x.shape[3] not in (1, 3):
        raise InputError(
            f"{path}: images must have shape (N, H, W), (N, H, W, 3) or (N, pixels), but theirs is {shape}. Leave"
            " transparency out."
        )
    if not x.size:
        raise InputError(f"{path}: there are no images, or none with pixels: their shape is {shape}.")
    for start in range(0, len(x), 256) if x.dtype.kind == "f" else ():
        bad = ~np.isfinite(x[start : start + 256]).reshape(len(x[start : start + 256]), -1).all(1)
        if bad.any():
            raise InputError(
                f"{path}: image {start + int(bad.argmax())} holds numbers that are not finite. Replace them."
            )
    return x


def _check_labels(path: Path, y: Array) -> None:
    if y.ndim != 1:
        raise InputError(f"{path}: labels must have shape (N,), one for each image, but theirs is {y.shape}.")
    if y.dtype.kind not in "biufU":
        raise InputError(f"{path}: the labels are of type {y.dtype}. They must be whole numbers or strings.")
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == y.round()).all()):
        raise InputError(f"{path}: the labels must be whole numbers or strings, but some are fractions or not finite.")


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
