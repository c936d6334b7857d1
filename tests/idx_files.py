"""Small image sets in MNIST's own format, whole and spoilt."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np

NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as the content of an IDX file."""
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(np.uint8).tobytes()


def image_set(train: int = 120, test: int = 30, side: int = 6) -> dict[str, np.ndarray]:
    """Random images in which class c has a bright pixel c, by file name."""
    random = np.random.default_rng(0)
    made = {}
    for part, count in (("train", train), ("t10k", test)):
        labels = random.permutation(np.arange(count) % 10)
        images = random.integers(0, 120, (count, side, side))
        images.reshape(count, -1)[np.arange(count), labels] = 255
        made[f"{part}-images-idx3-ubyte"] = images
        made[f"{part}-labels-idx1-ubyte"] = labels
    return made


def write(folder: Path, arrays: dict[str, np.ndarray], packed: bool = False) -> Path:
    """Write an image set into a folder, plain or as .gz, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    return folder
