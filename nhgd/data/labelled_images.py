"""Images with labels as people have them: in a folder or in an .npz file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nhgd._path import check_file
from nhgd._progress import Tick
from nhgd.data.csv_file import quoted
from nhgd.data.image_archive import read_image_archive
from nhgd.data.image_folder import read_image_folder
from nhgd.errors import InputError, Problems

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LabelledImages:
    """Images and what they show.

    Attributes:
        images: (N, H, W, C), C being 1 or 3.
        codes: their classes, (N,), counted from 0.
        classes: the names of the classes, sorted.
    """

    images: Array
    codes: Array
    classes: Array

    @property
    def flat(self) -> Array:
        """One row for each image, (N, H W C)."""
        return self.images.reshape(len(self.images), -1)

    def split(self, share: float, seed: int) -> tuple[Array, Array]:
        """The indices of about this share of each class, at least one image of each, drawn at random; and of the
        rest.
        """
        random = np.random.default_rng(seed)
        members = [random.permutation(np.flatnonzero(self.codes == c)) for c in range(len(self.classes))]
        counts = [min(max(1, round(share * len(mine))), len(mine) - 1) for mine in members]
        held = np.concatenate([mine[:count] for mine, count in zip(members, counts, strict=True)])
        rest = np.concatenate([mine[count:] for mine, count in zip(members, counts, strict=True)])
        return np.sort(held), np.sort(rest)


def read_labelled_images(path: Path, size: int | None, tick: Tick) -> LabelledImages:
    """Read a folder with one sub-folder for each class, or an .npz file, and refuse what cannot be learnt from.

    Args:
        path: the folder or the file.
        size: the side to which images in a folder are scaled; None: see `read_image_folder`.
        tick: the progress bar.
    """
    if path.is_dir():
        images, labels = read_image_folder(path, size, tick)
    else:
        check_file(path)
        if size is not None:
            raise InputError("--size is for a folder of images; an .npz file has images of one size. Omit it.")
        images, labels = read_image_archive(path)
    problems = Problems()
    counts = Counter(labels)
    if len(counts) < 2:
        problems.add(f"{path} has images of one class only, {next(iter(counts))!r}. At least two are needed.")
    elif len(counts) > max(2, len(labels) // 2):
        problems.add(
            f"{path} has {len(counts)} classes but only {len(labels)} images. Check that the labels are classes."
        )
    elif single := sorted(str(name) for name, count in counts.items() if count < 2):
        problems.add(
            f"{path}: {quoted(single)} {'has' if len(single) == 1 else 'have'} one image only, and one of each class is held out. Add some."
        )
    if images.min() == images.max():
        problems.add(f"{path}: all pixels are equal, so there is nothing to learn from.")
    problems.refuse()
    classes, codes = np.unique(np.array(labels), return_inverse=True)
    return LabelledImages(images, codes, classes)
