"""Label noise, and how well it was found."""

from __future__ import annotations

import torch
from torch import Tensor

from nhgd.errors import InputError

NOISES = ("uniform", "flip", "pair")


def corrupt(labels: Tensor, rate: float, kind: str, classes: int, generator: torch.Generator) -> Tensor:
    """A noisy copy of labels (N,).

    Args:
        labels: the true classes.
        rate: the fraction of samples to touch, chosen at random, exactly round(rate N) of them.
        kind: "uniform": a uniformly random class, possibly the right one; "flip": a uniformly random wrong class;
            "pair": class c becomes c + 1.
        classes: how many classes there are.
        generator: where the randomness comes from.

    >>> corrupt(torch.tensor([0, 1, 2]), 1.0, "pair", 3, torch.Generator()).tolist()
    [1, 2, 0]
    """
    if not 0 <= rate <= 1:
        raise InputError(f"The noise rate must lie between 0 and 1, got {rate}.")
    if kind not in NOISES:
        raise InputError(f"The kind of noise must be one of {', '.join(NOISES)}, got {kind!r}.")
    count = round(rate * len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[:count]
    noisy = labels.clone()
    if kind == "uniform":
        noisy[chosen] = torch.randint(classes, (count,), generator=generator)
    elif kind == "flip":
        noisy[chosen] = (labels[chosen] + torch.randint(1, classes, (count,), generator=generator)) % classes
    else:
        noisy[chosen] = (labels[chosen] + 1) % classes
    return noisy


def with_every_class(labels: Tensor, start: int, stop: int, classes: int) -> Tensor:
    """An order of labels (N,) in which positions from `start` to `stop` hold every class, at least once.

    Only as many positions change as are needed: a class that is missing there changes places with one that is often
    there. None change where every class is there already, so that a split by chance stays what it was.

    >>> with_every_class(torch.tensor([0, 1, 2, 0, 0, 0]), 3, 6, 3).tolist()
    [0, 3, 4, 1, 2, 5]
    """
    order = torch.arange(len(labels))
    for c in range(classes):
        here = labels[order[start:stop]]
        if bool((here == c).any()):
            continue
        outside = torch.cat([order[:start], order[stop:]])
        mine = outside[labels[outside] == c]
        if not len(mine):
            raise InputError(
                f"There is no sample of class {c} among the {len(labels)} samples, but trusted samples of all"
                f" {classes} classes are needed. Add some."
            )
        often = int(torch.bincount(here, minlength=classes).argmax())
        if int((here == often).sum()) < 2:
            raise InputError(f"{stop - start} samples cannot contain all {classes} classes. Ask for more.")
        a, b = int((order == mine[0]).nonzero()), start + int((here == often).nonzero()[0])
        order[a], order[b] = order[b].clone(), order[a].clone()
    return order


def detection_scores(weights: Tensor, wrong: Tensor) -> dict[str, float]:
    """How well low weights point at wrong labels: precision, recall, f1 at weight 0.5, and the area under the ROC
    curve.

    Args:
        weights: (N,), between 0 and 1.
        wrong: (N,), whether the label is wrong.

    >>> detection_scores(torch.tensor([0.1, 0.9, 0.2]), torch.tensor([True, False, False]))["recall"]
    1.0
    """
    suspect = weights < 0.5
    hits = float((suspect & wrong).sum())
    precision = hits / max(float(suspect.sum()), 1.0)
    recall = hits / max(float(wrong.sum()), 1.0)
    f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
    return {
        "precision": precision,
        "recall": recall,
        "f1": f1,
        "auc": area(-weights, wrong),
        "suspects": float(suspect.sum()),
    }


def area(score: Tensor, positive: Tensor) -> float:
    """The area under the ROC curve: how often a positive scores above a negative, ties counting half.

    >>> area(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, False, False]))
    1.0
    """
    _, inverse, counts = torch.unique(score.double(), return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank = (last - (counts.double() - 1) / 2)[inverse]  # mean rank among equals, from 1
    n, m = float(positive.sum()), float((~positive).sum())
    if n == 0 or m == 0:
        return float("nan")
    return float((rank[positive].sum() - n * (n + 1) / 2) / (n * m))
