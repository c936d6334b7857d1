"""`nhgd demo`: the main job on data that ships with scikit-learn. Clean a noisy label set, and compare methods."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nhgd._path import check_folder
from nhgd._results import folder, jsonable
from nhgd._solution import Solution
from nhgd.cli._options import Json, Seed, checked_seed
from nhgd.cli._output import console, number, print_json, table
from nhgd.plot.demo import ShownSamples, draw
from nhgd.task._classifier import Split, accuracy, fit, softmax_classifier
from nhgd.task._images import CLASSES
from nhgd.task._labels import detection_scores
from nhgd.task.cleaning import Cleaning, LabelSets

TASK = Cleaning(
    dataset="digits",
    noise=0.4,
    noise_kind="flip",
    train=1200,
    trusted=100,
    evaluation=50,
)
METHODS = ("nhgd", "aid-cg", "aid-identity")
STEPS = 100


@dataclass(frozen=True)
class Cleaned:
    """The result of one method: the weights (N,) of the step that the evaluation split chose, and the run."""

    weights: Tensor
    solution: Solution
    summary: dict[str, float]


def demo(
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("nhgd-demo"),
    as_json: Json = False,
) -> None:
    """Clean a label set of which 40 % is wrong: accuracy before and after, and the wrong labels found. About 15 s."""
    started = time.perf_counter()
    check_folder("--out", out)
    with folder(out) as place, one_thread():
        sets = TASK.load(checked_seed(seed), torch.device("cpu"))
        cleaned = {method: clean(method, seed, sets) for method in METHODS}
        best = cleaned[METHODS[0]].weights
        answer = {**numbers(best, sets), "seed": seed, "method": METHODS[0], "steps": STEPS}
        answer["methods"] = [
            {
                "method": method,
                "outer_loss": run.summary["outer_loss"],
                "test_accuracy": answer["accuracy"]["cleaned"]
                if run.weights is best
                else retrained(run.weights >= 0.5, sets),
                "f1": detection_scores(run.weights, sets.wrong)["f1"],
                "seconds": run.solution.stats["seconds"],
                "hvps": run.solution.stats["oracle_calls"]["hvps"],
            }
            for method, run in cleaned.items()
        ]
        assert place is not None
        images = sets.pixels.reshape(-1, sets.side, sets.side)
        samples = ShownSamples(images, sets.train.y, sets.true_labels, sets.wrong)
        answer["picture"] = str(place.write("demo.png", lambda path: draw(path, answer, best, samples)))
        answer["seconds"] = time.perf_counter() - started
        answer["out"] = str(out)
        place.write_texts({"result.json": json.dumps(jsonable(answer), indent=2, allow_nan=False) + "\n"})
    if as_json:
        print_json(answer)
    else:
        tell(answer)


@contextmanager
def one_thread() -> Iterator[None]:
    """Arrays this small are not worth a second thread, and waiting for one costs much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def clean(method: str, seed: int, sets: LabelSets) -> Cleaned:
    """Learn the weights by a method, and select the outer step with the lowest evaluation loss."""
    instance = TASK.build(seed, torch.device("cpu"))
    lowest, kept = float("inf"), torch.empty(0)

    def watching(theta: Any, v: Any) -> dict[str, float]:
        nonlocal lowest, kept
        row = instance.metrics(theta, v)
        if row["evaluation_loss"] < lowest:
            lowest, kept = row["evaluation_loss"], TASK.sample_weights(theta, v, sets).clone()
        return row

    solver = instance.start(method, seed)
    solver.metrics = watching
    solution = solver.run(steps=STEPS)
    return Cleaned(kept, solution, instance.summary(solution))


def retrained(keep: Tensor, sets: LabelSets) -> float:
    """Test accuracy of a model trained from nothing, to the end, on the training samples kept and all trusted ones."""
    x = torch.cat([sets.train.x[keep], sets.trusted.x, sets.evaluation.x]).double()
    y = torch.cat([sets.train.y[keep], sets.trusted.y, sets.evaluation.y])
    model = softmax_classifier(x, CLASSES)
    fit(model, Split(x, y), TASK.l2, 1e-6)
    with torch.no_grad():
        return accuracy(model(sets.test.x.double()), sets.test.y)


def numbers(weights: Tensor, sets: LabelSets) -> dict[str, Any]:
    """The accuracy before and after, and that of trusted data alone and of perfect knowledge."""
    kept, wrong = weights >= 0.5, sets.wrong
    everything = torch.ones_like(wrong)
    return {
        "samples": len(wrong),
        "trusted": len(sets.trusted.y) + len(sets.evaluation.y),
        "test_samples": len(sets.test.y),
        "accuracy": {
            "as_given": retrained(everything, sets),
            "trusted_alone": retrained(~everything, sets),
            "cleaned": retrained(kept, sets),
            "perfect": retrained(~wrong, sets),
        },
        "wrong": int(wrong.sum()),
        "found": int((~kept & wrong).sum()),
        "false_alarms": int((~kept & ~wrong).sum()),
    }


def tell(answer: dict[str, Any]) -> None:
    """Two tables and what to try next."""
    out = console()
    samples, trusted, wrong = answer["samples"], answer["trusted"], answer["wrong"]
    out.print(
        f"{samples} images of digits, {wrong} of them with a wrong label. {trusted} more have trusted labels."
        f" {answer['method']} learns from those which labels to trust, without knowing which are wrong.\n"
    )
    kept = samples - answer["found"] - answer["false_alarms"]
    trained = table("A linear classifier trained on the trusted images and on", "", "images", "test accuracy")
    for words, count, key in (
        ("all labels as given", samples, "as_given"),
        ("nothing else", 0, "trusted_alone"),
        (f"what {answer['method']} believes", kept, "cleaned"),
        ("the true labels (unknown in practice)", samples - wrong, "perfect"),
    ):
        trained.add_row(
            words, str(count), number(answer["accuracy"][key], ".3f"), style="bold" if key == "cleaned" else ""
        )
    out.print(trained)
    out.print(
        f"\nWrong labels found: {answer['found']} of {wrong}, with {answer['false_alarms']} false alarms among"
        f" {samples - wrong} correct ones.\n"
    )
    compared = table(
        f"The same by other methods, {answer['steps']} outer steps each",
        "method", "outer loss", "test accuracy", "F1 of finding", "Hessian products", "seconds",
    )  # fmt: skip
    for row in answer["methods"]:
        compared.add_row(
            row["method"],
            number(row["outer_loss"], ".3f"),
            number(row["test_accuracy"], ".3f"),
            number(row["f1"], ".3f"),
            str(row["hvps"]),
            number(row["seconds"], ".1f"),
        )
    out.print(compared)
    accuracy, tests = answer["accuracy"]["cleaned"], answer["test_samples"]
    error = (accuracy * (1 - accuracy) / tests) ** 0.5
    out.print(
        f"\n{tests} test images determine an accuracy to about {error:.3f}; another --seed splits them differently."
    )
    out.print(f"\nPicture: {answer['picture']}   (all in {answer['seconds']:.0f} s)\n")
    out.print("Try next:")
    out.print("  nhgd check cleaning --inverses kfac,cg,identity     how good is each hypergradient?")
    out.print("  nhgd run l2 --method nhgd --out runs/l2              another problem, with its curve")
