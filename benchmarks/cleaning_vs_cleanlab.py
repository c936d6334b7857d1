"""LabelCleaner beside cleanlab's find_label_issues, on the same noisy labels and with the same linear model.

    pip install cleanlab
    python -m benchmarks.cleaning_vs_cleanlab benchmarks/results/cleaning-vs-cleanlab-cpu.json [--data DIR] [--seeds 3]

cleanlab gets probabilities by 5-fold cross-validation, as it asks for: a softmax classifier on standardised features with
LabelCleaner's own ridge, trained to the end in every fold. LabelCleaner is run twice: with a small trusted set, for which
cleanlab has no use and which makes the comparison uneven, and without one, where both know the same. What counts is the F1
of finding the labels that are wrong. Digits: 1,200 samples and 200 trusted ones; with --data MNIST too: 10,000 and 1,000,
and 60 outer steps in place of LabelCleaner's 150.
What the file holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

from benchmarks.environment import environment
from nhgd.data.idx import find, read_images
from nhgd.sklearn.cleaner import LabelCleaner, NoTrustedSetWarning
from nhgd.task._classifier import Split, fit, softmax_classifier
from nhgd.task._labels import corrupt

CLASSES = 10
NOISES = [("uniform", 0.2), ("uniform", 0.5), ("pair", 0.2), ("pair", 0.4)]


def f1(suspect: np.ndarray, wrong: np.ndarray) -> float:
    return float(2 * (suspect & wrong).sum() / max(suspect.sum() + wrong.sum(), 1))


def sets(data: str | None) -> dict[str, tuple[np.ndarray, np.ndarray, int, int, int]]:
    """Samples, labels, how many are for training and trusted, and LabelCleaner's outer steps."""
    X, y = load_digits(return_X_y=True)
    found = {"digits": (X, y, 1200, 200, 150)}
    folder = find("mnist", data) if data else None
    if folder is not None:
        images = read_images(folder)
        rows = images.train_images.reshape(len(images.train_images), -1) / 255.0
        found["mnist"] = (rows, images.train_labels.astype(int), 10_000, 1_000, 60)
    return found


def out_of_sample(X: np.ndarray, y: np.ndarray, l2: float, seed: int) -> np.ndarray:
    """The probabilities of each class, (N, C), from the folds a sample is not in."""
    found = np.zeros((len(y), CLASSES))
    for train, test in StratifiedKFold(5, shuffle=True, random_state=seed).split(X, y):
        center, deviation = X[train].mean(0), X[train].std(0)
        scale = np.where(deviation > 0, deviation, 1.0)
        x, other = (torch.as_tensor((X[part] - center) / scale, dtype=torch.float32) for part in (train, test))
        model = softmax_classifier(x, CLASSES)
        fit(model, Split(x, torch.as_tensor(y[train])), l2, 3e-3)
        with torch.no_grad():
            found[test] = model(other).softmax(1).numpy()
    return found


def compare(
    X: np.ndarray, y: np.ndarray, train: int, trusted: int, steps: int, kind: str, rate: float, seed: int
) -> dict[str, Any]:
    """The three on the same labels."""
    from cleanlab.filter import find_label_issues  # here, so that the table can be written without it

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator).numpy()
    rows, guide, rest = order[:train], order[train : train + trusted], order[train + trusted : train + trusted + 10_000]
    noisy = corrupt(torch.as_tensor(y[rows]), rate, kind, CLASSES, generator).numpy()
    wrong = noisy != y[rows]
    found: dict[str, Any] = {"noise": kind, "rate": rate, "seed": seed}
    for name, given in (("", (X[guide], y[guide])), ("_without_trusted", ())):
        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoTrustedSetWarning)
            cleaner = LabelCleaner(steps=steps, random_state=seed).fit(X[rows], noisy, *given)
        found[f"seconds{name}"] = time.perf_counter() - started
        found[f"f1{name}"] = f1(cleaner.weights_ < 0.5, wrong)
        found[f"test_accuracy{name}"] = float(cleaner.score(X[rest], y[rest]))
    started = time.perf_counter()
    theirs = find_label_issues(noisy, out_of_sample(X[rows], noisy, cleaner.l2, seed), n_jobs=1)
    return found | {"f1_cleanlab": f1(theirs, wrong), "seconds_cleanlab": time.perf_counter() - started}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each kind of noise, with means over the seeds."""
    lines = [
        "| data | noise | LabelCleaner, trusted set | LabelCleaner, none | cleanlab |",
        "| --- | --- | --- | --- | --- |",
    ]
    for key in dict.fromkeys((row["data"], row["noise"], row["rate"]) for row in rows):
        mine = [row for row in rows if (row["data"], row["noise"], row["rate"]) == key]
        means = [float(np.mean([row[name] for row in mine])) for name in ("f1", "f1_without_trusted", "f1_cleanlab")]
        lines.append(f"| {key[0]} | {key[1]} {key[2]:.0%} | {' | '.join(f'{m:.3f}' for m in means)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": []}
    if options.out.exists():
        result = json.loads(options.out.read_text(encoding="utf-8"))
    result["environment"] = environment(torch.device("cpu"))
    known = {(row["data"], row["noise"], row["rate"], row["seed"]) for row in result["rows"]}
    for name, (X, y, train, trusted, steps) in sets(options.data).items():
        for kind, rate in NOISES:
            for seed in range(options.seeds):
                if (name, kind, rate, seed) in known:
                    continue
                row = {"data": name} | compare(X, y, train, trusted, steps, kind, rate, seed)
                result["rows"].append(row)
                options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
                print({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}, flush=True)
    print("\n".join(table(result["rows"])))


if __name__ == "__main__":
    main()
