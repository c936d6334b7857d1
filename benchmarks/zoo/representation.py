"""Hyper-representation: v is a backbone, theta a linear head on few samples.

    python -m benchmarks.zoo.representation --methods nhgd,itd --inner-steps 10,50,100 --seeds 0-4

As a script it prints the test accuracy of the convolutional problem after 60 outer steps of Adam with step size 0.01, with the
head as the run left it and every method at its defaults.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.zoo.case import Batch, Case, accuracy, digits
from benchmarks.zoo.words import numbers, words

WIDTH = 16  # features


def case(backbone: nn.Module, seed: int, file: Path | None, shape: tuple[int, ...]) -> Case:
    """Ten digits from 100 samples, on features that 400 others choose."""
    parts = digits(seed, file, 100, 400, 300)
    support, validation, selection, test = [(x.reshape(-1, *shape), y) for x, y in parts]

    def inner(head: nn.Module, v: nn.Module, batch: Batch) -> nhgd.Losses:
        logits = head(v(batch[0]))
        return nhgd.Losses(F.cross_entropy(logits, batch[1], reduction="none"), outputs=logits)

    def outer(head: nn.Module, v: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(head(v(batch[0])), batch[1])

    return Case(
        nhgd.Bilevel(inner, outer, theta=nn.Linear(WIDTH, 10), v=backbone, l2=1e-3, likelihood="categorical"),
        nhgd.Data(*support, batch=50),
        nhgd.Data(*validation, batch=100),
        selection,
        test,
        inner_lr=0.5,
        score=lambda head, v, batch: accuracy(head(v(batch[0])), batch[1]),
    )


def conv(seed: int, file: Path | None = None) -> Case:
    """Two convolutions and a linear layer, 2,728 numbers."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(128, WIDTH), nn.Tanh()),
    )
    return case(backbone, seed, file, (1, 8, 8))


def mlp(seed: int, file: Path | None = None) -> Case:
    """Two linear layers, 2,608 numbers."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, WIDTH), nn.Tanh())
    return case(backbone, seed, file, (64,))


def accuracy_after(
    method: str, seed: int, inner_steps: int, file: Path | None = None, outer_steps: int = 60
) -> dict[str, Any]:
    """Test accuracy, on all samples that are neither in the support nor in the validation set, and what was warned of."""
    made = conv(seed, file)
    solver = nhgd.Solver(
        made.problem,
        made.inner,
        made.outer,
        method=method,
        inner_steps=inner_steps,
        inner_lr=made.inner_lr,
        outer_optimizer=torch.optim.Adam,
        outer_lr=0.01,
        seed=seed,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            solution = solver.run(steps=outer_steps, progress=False)
        except nhgd.NhgdError as error:
            return {"accuracy": float("nan"), "failed": str(error), "warnings": len(said)}
    x, y = (torch.cat(both) for both in zip(made.selection, made.held_out, strict=True))
    assert made.score is not None
    with torch.no_grad():
        found = made.score(solution.theta, solution.v, (x, y))
    return {"accuracy": found, "failed": None, "warnings": len(said)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=words, default=["nhgd", "aid-identity", "aid-cg-10", "itd", "soba"])
    parser.add_argument("--inner-steps", type=numbers, default=[10, 50, 100])
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--digits", type=Path, help="a file of `python -m benchmarks.zoo --export-digits FILE`")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| method | inner steps | test accuracy | by seed | warnings |\n| --- | --- | --- | --- | --- |")
    for steps in given.inner_steps:
        for method in given.methods:
            runs = [accuracy_after(method, seed, steps, given.digits) for seed in given.seeds]
            found = [run["accuracy"] for run in runs]
            spread = f" ± {stdev(found):.3f}" if len(found) > 1 else ""
            each = " ".join(f"{value:.3f}" for value in found)
            print(
                f"| {method} | {steps} | {mean(found):.3f}{spread} | {each} | {sum(r['warnings'] for r in runs)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
