"""The image sets that tasks read: scikit-learn's digits, or IDX files under a folder that the user names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nhgd.data.bundled import digits
from nhgd.data.idx import find, read_images
from nhgd.errors import InputError

CLASSES = 10
DIGITS = tuple("0123456789")
NAMES = {  # of the classes, where they are not digits
    "fashion-mnist": (
        "T-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "trainer", "bag", "ankle boot",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Pixels (N, P) between 0 and 1 with labels (N,), and a test set if the files have one."""

    x: Tensor
    y: Tensor
    test: tuple[Tensor, Tensor] | None


def read(dataset: str, preferred: str, data: str | Path | None) -> Images:
    """An image set.

    Args:
        dataset: "digits", "mnist", "fashion-mnist" or "auto".
        preferred: what "auto" means if a folder is given; otherwise it means the digits.
        data: the folder the user named, if any.
    """
    if dataset == "digits":
        if data is not None:
            raise InputError(
                "The digits come with scikit-learn, so --data would be ignored. Omit it or dataset=digits."
            )
        return Images(*digits(), test=None)
    name = preferred if dataset == "auto" else dataset
    folder = find(name, data, cached=dataset != "auto")
    if folder is not None:
        files = read_images(folder)
        test = _tensors(files.test_images, files.test_labels)
        return Images(*_tensors(files.train_images, files.train_labels), test)
    if dataset == "auto":
        return Images(*digits(), test=None)
    raise InputError(
        f"{'MNIST' if name == 'mnist' else name} was requested, but no folder was given. Download it with `nhgd data"
        f" fetch {name}`, or point --data or NHGD_DATA at its IDX files."
    )


def mean_and_deviation(x: Tensor, task: str) -> tuple[Tensor, Tensor]:
    """Of all pixels together; images that hold nothing to learn from are refused."""
    mean, deviation = x.mean(), x.std()
    if not deviation > 0:
        raise InputError(f"{task}: all pixels of the training images are equal, so there is nothing to learn from.")
    return mean, deviation


def _tensors(images: Any, labels: Any) -> tuple[Tensor, Tensor]:
    x = torch.from_numpy(images.copy()).flatten(1).float().div_(255)
    return x, torch.from_numpy(labels.copy()).long()
