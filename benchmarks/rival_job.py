"""The job on which bilevel libraries are compared: clean half-random labels of MNIST within 15 seconds on one processor.

    python -m benchmarks.rival_job --data DATA_DIR --out rival-job.json
    python -m benchmarks.rival_job --data DATA_DIR --out rival-job.json --methods nhgd,itd --seeds 0-4

50,000 samples are standardised by one mean and deviation and get a column of ones; half of the labels are drawn anew; 5,000
other samples are trusted. theta is a linear softmax model, 10 x 785, from zero, with l2 = 1e-4. v is a weight in [0, 1] for
each sample, from 0.5.

An outer step is 10 inner steps of 0.1 on batches of 1,024 without replacement, a hypergradient with all trusted samples, and a
plain gradient step of v. The size of this step is chosen such that the first one moves the weights it touches by c on average:
c = 1, or 0.3 for methods whose hypergradient touches the samples of all ten inner batches. A first solver of the same method
measures it, which also warms up; neither that nor reading the data counts.

The result is the area under the curve of the weights (against which labels are right), the test accuracy, and the number of
outer steps.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment
from benchmarks.zoo.case import Batch, accuracy
from benchmarks.zoo.words import numbers, words
from nhgd.data.idx import find, read_images

METHODS = ["nhgd", "aid-identity", "aid-cg-10", "itd"]
BATCH = 1024
INNER_STEPS = 10
COLUMNS = ("auc", "test_accuracy", "steps", "gradient_equivalents")


@dataclass(frozen=True)
class Job:
    """The data for one seed: noisy training samples, trusted ones and test samples, and which labels are right."""

    train: Batch
    trusted: Batch
    test: Batch
    right: Tensor


def load(data: Path, seed: int, trusted: int = 5000, training: int = 50_000) -> Job:
    """Draw the samples, and new labels for half of them."""
    folder = find("mnist", data)
    assert folder is not None
    found = read_images(folder)
    generator = torch.Generator().manual_seed(seed)
    images = torch.from_numpy(found.train_images.copy()).float().flatten(1)
    middle, deviation = images.mean(), images.std()

    def prepared(x: Tensor) -> Tensor:
        return torch.cat([(x - middle) / deviation, torch.ones(len(x), 1)], 1)

    labels = torch.from_numpy(found.train_labels.copy()).long()
    order = torch.randperm(len(labels), generator=generator)
    validation, train = order[:trusted], order[trusted : trusted + training]
    truth = labels[train]
    drawn = torch.rand(len(truth), generator=generator) < 0.5
    noisy = torch.where(drawn, torch.randint(10, truth.shape, generator=generator), truth)
    tests = torch.from_numpy(found.test_images.copy()).float().flatten(1)
    return Job(
        (prepared(images[train]), noisy),
        (prepared(images[validation]), labels[validation]),
        (prepared(tests), torch.from_numpy(found.test_labels.copy()).long()),
        noisy == truth,
    )


def inner(model: nn.Module, v: Tensor, batch: Batch) -> nhgd.Losses:
    """Weighted cross-entropy."""
    x, y, index = batch
    logits = model(x)
    return nhgd.Losses(F.cross_entropy(logits, y, reduction="none"), weights=v[index], outputs=logits)


def outer(model: nn.Module, v: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of trusted samples."""
    return F.cross_entropy(model(batch[0]), batch[1])


class Noting(torch.optim.Optimizer):
    """An optimiser that moves nothing and keeps the last gradient."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.gradient = torch.zeros(())

    def step(self, closure: Any = None) -> None:
        """Note it."""
        (parameter,) = self.param_groups[0]["params"]
        self.gradient = parameter.grad.detach().clone()


def solver(job: Job, method: str, seed: int, **settings: Any) -> nhgd.Solver:
    """A solver at the start."""
    model = nn.Linear(job.train[0].shape[1], 10, bias=False)
    nn.init.zeros_(model.weight)
    v = torch.full((len(job.right),), 0.5)
    return nhgd.Solver(
        nhgd.Bilevel(inner, outer, theta=model, v=v, l2=1e-4, likelihood="categorical"),
        nhgd.Data(*job.train, batch=BATCH),
        nhgd.Data(*job.trusted),
        method=method,
        inner_steps=INNER_STEPS,
        inner_lr=0.1,
        project_v=(0, 1),
        seed=seed,
        **settings,
    )


def outer_step_size(job: Job, method: str, seed: int) -> float:
    """The step that moves the weights which the first hypergradient touches by c in the mean.

    Where the first is zero, as it is for methods whose adjoint begins at zero, the one after as many further steps as an
    inner loop has is taken.
    """
    kept: list[Noting] = []

    def noting(parameters: list[Tensor]) -> Noting:
        kept.append(Noting(parameters))
        return kept[-1]

    with solver(job, method, seed, outer_optimizer=noting) as started:
        started.step()
        if not kept[-1].gradient.any():
            for _ in range(INNER_STEPS):
                started.step()
    touched = kept[-1].gradient != 0
    c = 1.0 if int(touched.sum()) <= BATCH else 0.3
    return c / float(kept[-1].gradient[touched].abs().mean())


def area(score: Tensor, positive: Tensor) -> float:
    """The chance that a positive sample has a higher score than a negative one; equal scores count half."""
    high, low = score[positive].double(), score[~positive].double().sort().values
    below, upto = torch.searchsorted(low, high), torch.searchsorted(low, high, right=True)
    return float((below + upto).double().mean() / 2 / len(low))


def solved(job: Job, method: str, seed: int, seconds: float) -> dict[str, Any]:
    """One run, and what it found."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        size = outer_step_size(job, method, seed)
        with solver(job, method, seed, outer_optimizer=torch.optim.SGD, outer_lr=size) as started:
            began = time.process_time()
            taken = 0.0
            while taken < seconds:
                started.step()
                taken = time.process_time() - began
            solution = started.solution()
    assert isinstance(solution.v, Tensor)
    assert isinstance(solution.theta, nn.Module)
    calls = solution.stats["oracle_calls"]
    with torch.no_grad():
        found = accuracy(solution.theta(job.test[0]), job.test[1])
    return {
        "auc": area(solution.v.detach(), job.right),
        "test_accuracy": found,
        "steps": solution.stats["steps"],
        "cpu_seconds": taken,
        "outer_lr": size,
        "gradient_equivalents": calls["gradients"] + calls["hvps"] + calls["cross"],
        "oracle_calls": calls,
        "warnings": sorted({str(item.message) for item in said}),
    }


def table(runs: Sequence[dict[str, Any]]) -> str:
    """One line for each method, means and deviations over the seeds."""
    lines = ["| method | AUC | test accuracy | outer steps | gradient-equivalents |", "| --- " * 5 + "|"]
    for method in dict.fromkeys(run["method"] for run in runs):
        cells = []
        for column in COLUMNS:
            values = [run[column] for run in runs if run["method"] == method]
            digits = 0 if isinstance(values[0], int) else 4
            spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.{digits}f}{spread}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every method with every seed; what the file holds of others is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="a folder with the IDX files of MNIST, or one above it"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", type=words, default=METHODS)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4])
    parser.add_argument("--seconds", type=float, default=15.0, help="of the processor, for the outer steps of a run")
    parser.add_argument("--training", type=int, default=50_000, help="samples")
    parser.add_argument("--trusted", type=int, default=5000, help="samples")
    given = parser.parse_args(arguments)
    settings = {"seconds": given.seconds, "training": given.training, "trusted": given.trusted}
    result: dict[str, Any] = {"settings": settings, "runs": []}
    if given.out.exists():
        result = json.loads(given.out.read_text(encoding="utf-8"))
        if result["settings"] != settings:
            parser.error(f"{given.out} was measured with other settings; name another file")
    result["environment"] = environment(torch.device("cpu"))
    for seed in given.seeds:
        job = load(given.data, seed, given.trusted, given.training)
        for method in given.methods:
            kept = [run for run in result["runs"] if (run["method"], run["seed"]) != (method, seed)]
            found = {"method": method, "seed": seed} | solved(job, method, seed, given.seconds)
            result["runs"] = [*kept, found]
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(method, seed, {name: found[name] for name in (*COLUMNS, "outer_lr")}, flush=True)
    print(table(result["runs"]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
