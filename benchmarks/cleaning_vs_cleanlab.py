"""LabelCleaner beside cleanlab's find_label_issues, on the same data and with the same kind of model.

    pip install cleanlab
    python -m benchmarks.cleaning_vs_cleanlab --out benchmarks/results/cleaning-vs-cleanlab.json [--data DIR] [--seeds 3]

The same noisy labels go to both. cleanlab gets out-of-sample probabilities of a linear model by 5-fold cross-validation,
as it asks for; LabelCleaner also gets a small trusted set, which cleanlab has no use for: that is the difference one buys.
Without --data the digits alone are used; with it, MNIST too (10,000 samples, 1,000 trusted).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cleanlab.filter import find_label_issues
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.environment import environment
from nhgd.data.idx import find, read_images
from nhgd.estimators.cleaner import LabelCleaner
from nhgd.task.labels import corrupt

NOISES = [("uniform", 0.2), ("uniform", 0.5), ("pair", 0.2), ("pair", 0.4)]


def f1(suspect: np.ndarray, wrong: np.ndarray) -> float:
    return float(2 * (suspect & wrong).sum() / max(suspect.sum() + wrong.sum(), 1))


def sets(data: str | None) -> dict[str, tuple[np.ndarray, np.ndarray, int, int]]:
    X, y = load_digits(return_X_y=True)
    found = {"digits": (X, y, 1200, 200)}
    folder = find("mnist", data) if data else None
    if folder is not None:
        images = read_images(folder)
        rows = images.train_images.reshape(len(images.train_images), -1) / 255.0
        found["mnist"] = (rows, images.train_labels.astype(int), 10_000, 1_000)
    return found


def compare(
    X: np.ndarray, y: np.ndarray, train: int, trusted: int, kind: str, rate: float, seed: int
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator).numpy()
    rows, guide, rest = order[:train], order[train : train + trusted], order[train + trusted : train + trusted + 10_000]
    noisy = corrupt(torch.as_tensor(y[rows]), rate, kind, 10, generator).numpy()
    wrong = noisy != y[rows]
    started = time.perf_counter()
    cleaner = LabelCleaner(random_state=seed).fit(X[rows], noisy, X[guide], y[guide])
    ours = time.perf_counter() - started
    started = time.perf_counter()
    model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (2 * cleaner.l2 * train), max_iter=300))
    probabilities = cross_val_predict(model, X[rows], noisy, cv=5, method="predict_proba")
    theirs = find_label_issues(noisy, probabilities)
    taken = time.perf_counter() - started
    return {
        "noise": kind,
        "rate": rate,
        "seed": seed,
        "f1": f1(cleaner.weights_ < 0.5, wrong),
        "f1_cleanlab": f1(theirs, wrong),
        "seconds": ours,
        "seconds_cleanlab": taken,
        "test_accuracy": float(cleaner.score(X[rest], y[rest])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    print(f"{'data':<8}{'noise':<10}{'rate':>5}{'F1':>9}{'cleanlab':>10}{'accuracy':>10}{'seconds':>9}")
    for name, (X, y, train, trusted) in sets(options.data).items():
        for kind, rate in NOISES:
            found = [compare(X, y, train, trusted, kind, rate, seed) for seed in range(options.seeds)]
            rows += [{"data": name} | row for row in found]
            mean = {key: float(np.mean([row[key] for row in found])) for key in found[0] if key != "noise"}
            print(
                f"{name:<8}{kind:<10}{rate:>5}{mean['f1']:>9.3f}{mean['f1_cleanlab']:>10.3f}"
                f"{mean['test_accuracy']:>10.3f}{mean['seconds']:>9.1f}",
                flush=True,
            )
    if options.out is not None:
        result = {"environment": environment(torch.device("cpu")), "rows": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
