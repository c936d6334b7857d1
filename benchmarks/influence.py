"""Influence scores: agreement with kronfluence, speed beside it, and the linear datamodelling score, as JSON.

    python -m benchmarks.influence benchmarks/results/influence-cpu.json [--tiny] [--parts retraining]

Models of the bundled digits, from a linear one to a small convolutional net, trained by L-BFGS with a ridge from a fixed start.
Scores are those of every training sample on every test sample.

Agreement: the mean over queries of Spearman's rank correlation with kronfluence's EKFAC scores (pip install kronfluence, needed
for this part alone). Kronfluence's Fisher matrix is once the empirical one, as `nhgd.inverse.EKFAC` has by default, and once
the one with labels drawn from the model, kronfluence's default, beside `EKFAC(fisher="exact")`; damping is the same number,
2 l2, on both sides.

Speed: processor time of factors and scores together, on one thread, the two in turns: the median, and the median of the ratios of
a turn. Kronfluence keeps factors and scores in files; on models as small as these, that and its set-up are most of its time.

Linear datamodelling score: models trained again on random halves of the data, several seeds each; for every query, Spearman's
correlation over the halves between the mean loss found and the loss that the sum of scores of the absent samples predicts
(S. M. Park et al., TRAK: attributing model behavior at scale, 2023, with losses in place of margins); the mean over the queries
and its standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import json
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import nhgd
from benchmarks.environment import environment

L2 = 1e-3


def digits(train: int, queries: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Standardised images and labels of both parts, with a fifth of the training labels wrong."""
    found = load_digits()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(found.target), generator=generator)
    x, y = torch.tensor(found.data, dtype=torch.float32)[order], torch.tensor(found.target)[order]
    x = (x - x[:train].mean()) / x[:train].std()
    wrong = torch.rand(train, generator=generator) < 0.2
    shift = torch.randint(1, 10, (train,), generator=generator)
    y[:train] = torch.where(wrong, (y[:train] + shift) % 10, y[:train])
    return x[:train], y[:train], x[train : train + queries], y[train : train + queries]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 10))


INVERSES = {
    "ekfac": nhgd.inverse.EKFAC(),
    "ekfac, exact Fisher": nhgd.inverse.EKFAC(fisher="exact"),
    "kfac": nhgd.inverse.KFAC(),
    "fisher_diagonal": nhgd.inverse.FisherDiagonal(),
    "identity": nhgd.inverse.Identity(),
}
MODELS: dict[str, Callable[[], nn.Module]] = {"linear": linear, "mlp": mlp, "conv": conv}
RETRAINED = ("linear", "mlp")


def trained(make: Callable[[], nn.Module], x: Tensor, y: Tensor, seed: int, steps: int) -> nn.Module:
    """The ridge is L2 per sample, whatever the number of samples."""
    torch.manual_seed(seed)
    model = make()
    optimiser = torch.optim.LBFGS(
        model.parameters(), max_iter=steps, history_size=20, line_search_fn="strong_wolfe", tolerance_change=1e-12
    )

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(model(x), y) + L2 * sum(p.square().sum() for p in model.parameters())
        value.backward()
        return value

    optimiser.step(closure)
    return model


def problem_of(model: nn.Module, samples: int) -> nhgd.Bilevel:
    def inner(model: nn.Module, v: Tensor, batch: Any) -> nhgd.Losses:
        x, y, index = batch
        z = model(x)
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v[index], z)

    def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return nhgd.Bilevel(inner, outer, model, torch.ones(samples), l2=L2, likelihood="categorical")


def ours(model: nn.Module, data: tuple[Tensor, ...], inverse: Any, batch: int) -> tuple[Tensor, float]:
    """Scores, (Q, N), and seconds."""
    x, y, a, b = data
    problem = problem_of(model, len(y))
    began = time.process_time()
    found = nhgd.influence(problem, nhgd.Data(x, y, batch=batch), nhgd.Data(a, b), inverse)
    return found.scores, time.process_time() - began


def kronfluence_scores(
    name: str, model: nn.Module, data: tuple[Tensor, ...], empirical: bool, batch: int, damping: float | None = 2 * L2
) -> tuple[Tensor, float]:
    """The same by kronfluence, with its factors kept in a temporary folder, as it does."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task
    from torch.utils.data import TensorDataset

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            labels = torch.distributions.Categorical(logits=logits.detach()).sample() if sample else batch[1]
            return F.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    x, y, a, b = data
    copy = MODELS[name]()  # it changes the model that it is given
    copy.load_state_dict(model.state_dict())
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        began = time.process_time()
        task = Classification()
        analyzer = Analyzer(
            "benchmark", prepare_model(copy, task), task, cpu=True, output_dir=folder, disable_tqdm=True
        )
        train, queries = TensorDataset(x, y), TensorDataset(a, b)
        analyzer.fit_all_factors(
            "factors",
            train,
            per_device_batch_size=batch,
            factor_args=FactorArguments(strategy="ekfac", use_empirical_fisher=empirical),
        )
        analyzer.compute_pairwise_scores(
            "scores",
            "factors",
            queries,
            train,
            per_device_query_batch_size=len(b),
            per_device_train_batch_size=batch,
            score_args=ScoreArguments(damping_factor=damping),
        )
        scores = analyzer.load_pairwise_scores("scores")["all_modules"]
        return scores, time.process_time() - began


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, ...]) -> float:
    return float((model(data[2]).argmax(1) == data[3]).double().mean())


def agreement(name: str, model: nn.Module, data: tuple[Tensor, ...], batch: int) -> dict[str, float]:
    """Mean rank correlations over the queries; kronfluence with itself, too, for two draws of labels."""
    exact, empirical = (ours(model, data, INVERSES[label], batch)[0] for label in ("ekfac, exact Fisher", "ekfac"))
    theirs = kronfluence_scores(name, model, data, True, batch)[0]
    torch.manual_seed(0)
    first, second = (kronfluence_scores(name, model, data, False, batch)[0] for _ in range(2))
    pairs = {
        "nhgd and kronfluence, empirical Fisher": (empirical, theirs),
        "nhgd with exact and kronfluence with sampled Fisher": (exact, first),
        "kronfluence with two draws of the sampled Fisher": (first, second),
    }
    return {label: float(rank_correlation(a, b).mean()) for label, (a, b) in pairs.items()}


def speed(name: str, model: nn.Module, data: tuple[Tensor, ...], batch: int, runs: int) -> dict[str, Any]:
    """Seconds of EKFAC factors and scores, the two in turns after one that is not counted."""
    taken: dict[str, list[float]] = {"nhgd": [], "kronfluence": []}
    for run in range(runs + 1):
        ways = {
            "nhgd": lambda: ours(model, data, INVERSES["ekfac"], batch)[1],
            "kronfluence": lambda: kronfluence_scores(name, model, data, True, batch)[1],
        }
        for key in sorted(ways, reverse=bool(run % 2)):
            seconds = ways[key]()
            if run:
                taken[key].append(seconds)
    ratios = [b / a for a, b in zip(taken["nhgd"], taken["kronfluence"], strict=True)]
    return {key: statistics.median(values) for key, values in taken.items()} | {"ratio": statistics.median(ratios)}


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, of every row, (Q,)."""
    ranks = [t.double().argsort(1).argsort(1).double() for t in (a, b)]
    centred = [r - r.mean(1, keepdim=True) for r in ranks]
    return (centred[0] * centred[1]).sum(1) / (centred[0].norm(dim=1) * centred[1].norm(dim=1))


def datamodelling(
    make: Callable[[], nn.Module],
    data: tuple[Tensor, ...],
    scores: dict[str, Tensor],
    halves: int,
    seeds: int,
    steps: int,
) -> dict[str, dict[str, float]]:
    """The linear datamodelling score of several methods, and its standard error over the queries."""
    x, y, a, b = data
    generator = torch.Generator().manual_seed(1)
    masks = torch.stack([torch.randperm(len(y), generator=generator) < len(y) // 2 for _ in range(halves)])
    losses = []
    for mask in masks:
        models = [trained(make, x[mask], y[mask], seed, steps) for seed in range(seeds)]
        with torch.no_grad():
            losses.append(torch.stack([F.cross_entropy(m(a), b, reduction="none") for m in models]).mean(0))
    found = torch.stack(losses, dim=1)  # (Q, halves)
    answer = {}
    for name, s in scores.items():
        correlation = rank_correlation(s.double() @ (~masks).double().T, found)
        answer[name] = {"score": float(correlation.mean()), "error": float(correlation.std() / len(correlation) ** 0.5)}
    return answer


PARTS = ("agreement", "speed", "retraining")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a JSON file; what it has of other parts stays")
    parser.add_argument("--parts", default=",".join(PARTS), help="agreement and speed need kronfluence")
    parser.add_argument("--tiny", action="store_true", help="a minute's worth, to see that it runs")
    given = parser.parse_args()
    parts = given.parts.split(",")
    torch.set_num_threads(1)
    samples, queries, steps = (300, 30, 50) if given.tiny else (1200, 200, 500)
    halves, seeds, runs = (6, 1, 1) if given.tiny else (30, 2, 3)
    data, batch = digits(samples, queries), 256
    answer = json.loads(given.out.read_text()) if given.out.exists() else {"models": {}}
    for name, make in MODELS.items():
        model = trained(make, data[0], data[1], 0, steps)
        row = answer["models"].setdefault(name, {})
        row |= {"parameters": sum(p.numel() for p in model.parameters()), "test_accuracy": accuracy(model, data)}
        if "agreement" in parts:
            row["agreement"] = agreement(name, model, data, batch)
        if "speed" in parts:
            row["seconds"] = speed(name, model, data, batch, runs)
        if "retraining" in parts and name in RETRAINED:
            scores = {label: ours(model, data, inverse, batch)[0] for label, inverse in INVERSES.items()}
            row["datamodelling"] = datamodelling(make, data, scores, halves, seeds, steps)
        answer["settings"] = {"samples": samples, "queries": queries, "steps": steps, "batch": batch, "l2": L2}
        answer["settings"] |= {"halves": halves, "seeds": seeds, "runs": runs}
        known = answer.get("environment", {}).get("kronfluence")
        answer["environment"] = environment(torch.device("cpu")) | {"kronfluence": _version() or known}
        given.out.write_text(json.dumps(answer, indent=2) + "\n")
        print(name, json.dumps(row, indent=2), flush=True)


def _version() -> str | None:
    """Kronfluence's, if it is installed here."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("kronfluence")
    return None


def tables(result: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/influence.md."""
    models = result["models"]
    agreement = ["| model | parameters | " + " | ".join(next(iter(models.values()))["agreement"]) + " |"]
    agreement.append("| --- " * (agreement[0].count("|") - 1) + "|")
    times = ["| model | nhgd, seconds | kronfluence, seconds | ratio |", "| --- | --- | --- | --- |"]
    for name, row in models.items():
        cells = " | ".join(f"{value:.3f}" for value in row["agreement"].values())
        agreement.append(f"| {name} | {row['parameters']:,} | {cells} |")
        found = row["seconds"]
        times.append(f"| {name} | {found['nhgd']:.2f} | {found['kronfluence']:.2f} | {found['ratio']:.1f} |")
    retrained = {name: row["datamodelling"] for name, row in models.items() if "datamodelling" in row}
    lines = ["| inverse | " + " | ".join(retrained) + " |", "| --- " * (len(retrained) + 1) + "|"]
    for inverse in next(iter(retrained.values())):
        cells = [f"{found[inverse]['score']:.3f} ± {found[inverse]['error']:.3f}" for found in retrained.values()]
        lines.append(f"| {inverse} | {' | '.join(cells)} |")
    return {"agreement": "\n".join(agreement), "speed": "\n".join(times), "retraining": "\n".join(lines)}


if __name__ == "__main__":
    main()
