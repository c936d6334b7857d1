"""`nhgd demo`: the main job on data that ships with scikit-learn. Clean a noisy label set, and compare methods."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from nhgd._experiment import Built, Experiment
from nhgd._path import check_folder
from nhgd._progress import bar
from nhgd._provenance import provenance
from nhgd._results import folder, jsonable
from nhgd._solution import Solution
from nhgd.cli._options import Json, Seed, checked_seed
from nhgd.cli._output import console, number, print_json, table
from nhgd.cli._run_folder import RunFolder
from nhgd.cli._run_folder import numbers as numbers_of
from nhgd.execution import Inline
from nhgd.plot.demo import ShownSamples, draw
from nhgd.report import report
from nhgd.stop import AbstractStop, Gradients, Steps, gradient_equivalents
from nhgd.task._classifier import Split, accuracy, fit, softmax_classifier
from nhgd.task._images import CLASSES
from nhgd.task._labels import detection_scores
from nhgd.task._overfitting import OverfittingWarning
from nhgd.task.cleaning import Cleaning, LabelSets

TASK = Cleaning(
    dataset="digits",
    noise=0.4,
    noise_kind="flip",
    train=1200,
    trusted=100,
    evaluation=50,
)
METHODS = ("nhgd", "aid-cg", "soba", "aid-identity")
STEPS = 100  # of the first method; the others take as many derivatives


@dataclass(frozen=True)
class Cleaned:
    """The result of one method: the weights (N,) of the step that the evaluation split chose, and the run.

    Attributes:
        weights, solution: as above.
        built, seed: what was run.
    """

    weights: Tensor
    solution: Solution
    built: Built
    seed: int

    @property
    def gradients(self) -> float:
        """What its derivatives cost, in gradients of a batch."""
        return gradient_equivalents(self.solution.history[-1])


def demo(
    context: typer.Context,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the picture, the numbers, the runs and their page.")] = Path(
        "nhgd-demo"
    ),
    as_json: Json = False,
) -> None:
    """Clean a label set of which 40 % is wrong: accuracy before and after, the wrong labels found, and four methods
    compared.
    """
    started = time.perf_counter()
    check_folder("--out", out)
    given: Any = context.find_root().command
    origin = provenance(given.given, torch.device("cpu"))
    with folder(out) as place, one_thread():
        sets = TASK.load(checked_seed(seed), torch.device("cpu"))
        cleaned: dict[str, Cleaned] = {}
        with bar("demo", lines=not as_json) as tick:
            for nth, method in enumerate(METHODS):
                tick(nth / len(METHODS), f"cleaning by {method}")
                first = next(iter(cleaned.values()), None)
                cleaned[method] = clean(
                    method, seed, sets, Steps(STEPS) if first is None else Gradients(first.gradients)
                )
            tick(1.0, "training with what each of them believes")
        summaries = {method: summary(run) for method, run in cleaned.items()}
        best = cleaned[METHODS[0]].weights
        answer = {**numbers(best, sets), "seed": seed, "method": METHODS[0], "steps": STEPS}
        answer["methods"] = [
            {
                "method": method,
                "outer_loss": summaries[method]["outer_loss"],
                "steps": len(run.solution.history),
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
        for method, run in cleaned.items():
            keep(place.path / "runs" / method, run, origin)
        answer["report"] = str(report(place.path))
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


def clean(method: str, seed: int, sets: LabelSets, stop: AbstractStop[Any]) -> Cleaned:
    """Learn the weights by a method, and select the outer step with the lowest evaluation loss."""
    experiment, _ = Experiment.chosen(TASK, "", method, {}, lambda rest: (None, dict(rest)))
    built = experiment.build(seed, torch.device("cpu"), None)
    instance = built.instance
    lowest, kept = float("inf"), torch.empty(0)

    def watching(theta: Any, v: Any) -> dict[str, float]:
        nonlocal lowest, kept
        row = instance.metrics(theta, v)
        if row["evaluation_loss"] < lowest:
            lowest, kept = row["evaluation_loss"], TASK.sample_weights(theta, v, sets).clone()
        return row

    with warnings.catch_warnings(), built.start(seed, Inline()) as solver:
        warnings.simplefilter(
            "ignore", OverfittingWarning
        )  # the last step is not used, but the one with the lowest loss
        solver.metrics = watching
        solution = solver.run(stop=[stop], progress=False)
    return Cleaned(kept, solution, built, seed)


def summary(run: Cleaned) -> dict[str, float]:
    """Its numbers, those of the selected step among them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OverfittingWarning)
        return run.built.instance.summary(run.solution)


def keep(path: Path, run: Cleaned, origin: dict[str, Any]) -> None:
    """Write the folder of a run, as `nhgd run --out` does."""
    settings = run.built.described()
    about = {"task": TASK.name, "method": run.built.method, "preset": "default", "seed": run.seed, "settings": settings}
    with folder(path) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore", OverfittingWarning)
        assert place is not None
        record = RunFolder(place, about | {"device": "cpu"} | origin, [])
        record.finish(about | numbers_of(run.solution), run.solution, run.built.instance)


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
        f"Methods compared, each with as many derivatives as {METHODS[0]} takes in {answer['steps']} steps",
        "method", "steps", "outer loss", "test accuracy", "F1 of finding", "Hessian products", "seconds",
    )  # fmt: skip
    for row in answer["methods"]:
        compared.add_row(
            row["method"],
            str(row["steps"]),
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
        " It is of a classifier trained anew on what each method believes; the report has that of the runs' own models."
    )
    out.print(f"\nPicture: {answer['picture']}   (all in {answer['seconds']:.0f} s)")
    out.print(f"Report:  {answer['report']}\n")
    out.print("Try next:")
    out.print("  nhgd check cleaning --inverses kfac,cg,identity        how good is each hypergradient?")
    out.print("  nhgd run l2 --method nhgd --out runs/l2                 another problem, with its curve")
    out.print("  nhgd bench cleaning --methods nhgd,soba --out compared  methods over several seeds, with equal times")
