"""`nhgd distill`: a few images that stand for many."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from nhgd._duration import seconds
from nhgd._progress import bar
from nhgd._results import check_files, folder, jsonable
from nhgd._validation import counted
from nhgd.cli._options import Device, Json, Seed, checked_seed, device_called
from nhgd.cli._output import console, print_json, table
from nhgd.data.labelled_images import LabelledImages, read_labelled_images
from nhgd.errors import InputError, unknown
from nhgd.plot.distilled import draw_distilled
from nhgd.task._classifier import MODELS, Architecture, trained

Array = np.ndarray[Any, Any]
FILES = ("distilled.npz", "images.png", "result.json")
STEPS = 300
LARGEST_SIDE = 512


def distill(
    images: Annotated[
        Path,
        typer.Argument(
            metavar="IMAGES", help="A folder with one sub-folder of images for each class, or an .npz with X and y."
        ),
    ],
    per_class: Annotated[int, typer.Option(help="How many images to learn for each class.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for distilled.npz, images.png and result.json.")] = Path(
        "distilled"
    ),
    steps: Annotated[
        int | None,
        typer.Option(help=f"Outer steps, at most; default: {STEPS}, or what the budget allows.", show_default=False),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(help="Time limit for learning: 60s, 5m, 1h.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="The model that the images are learnt for: linear or mlp.")] = "linear",
    size: Annotated[
        int | None,
        typer.Option(
            help="Side to which images of a folder are scaled, in pixels; default: their most frequent size, at most 64.",
            show_default=False,
        ),
    ] = None,
    held_out: Annotated[float, typer.Option(help="The share of each class on which accuracy is measured.")] = 0.2,
    seed: Seed = 0,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Learn a few images for each class such that a model trained on them alone does well, and measure how well."""
    _check(per_class, steps, budget, model, size, held_out)
    check_files(out, *FILES)
    distiller = _distiller(per_class, steps, budget, model, seed, device, as_json)
    with bar("reading the images") as tick:
        data = read_labelled_images(images, size, tick)
    test, train = data.split(held_out, distiller.random_state)
    fewest = int(np.bincount(data.codes[train]).min())
    if per_class > fewest:
        raise InputError(
            f"--per-class is {per_class}, but one class has only {fewest} images to learn from. Ask for fewer."
        )
    with folder(out) as place:
        assert place is not None
        started = time.perf_counter()
        distiller.fit(data.flat[train], data.codes[train])
        taken = time.perf_counter() - started
        accuracy = _accuracy(distiller, data, train, test)
        learnt = distiller.images_.reshape(len(data.classes), per_class, *data.images.shape[1:])
        answer = {
            "images": str(images),
            "classes": [str(name) for name in data.classes],
            "shape": list(data.images.shape[1:]),
            "train": len(train),
            "held_out": len(test),
            "distilled": len(distiller.images_),
            "accuracy": accuracy,
            "seconds": taken,
            "steps": distiller.n_iter_,
            "seed": seed,
            "settings": {"per_class": per_class, "model": model, "size": size, "held_out": held_out, "l2": distiller.l2}
            | {"lr": distiller.lr, "steps": distiller.steps, "budget": budget, "device": str(distiller.device)},
            "out": str(out),
        }

        def written(beside: Path) -> list[Path]:
            np.savez_compressed(
                beside / FILES[0],
                images=_without_grey(learnt.reshape(-1, *learnt.shape[2:])).astype(np.float32),
                labels=np.repeat(data.classes, per_class),
            )
            title = f"{answer['distilled']} images in place of {len(train):,}"
            draw_distilled(beside / FILES[1], learnt, answer["classes"], title, "in distilled.npz")
            text = json.dumps(jsonable(answer), indent=2, allow_nan=False) + "\n"
            (beside / FILES[2]).write_text(text, encoding="utf-8")
            return [beside / name for name in FILES]

        place.write_all(f"The results in {out}", written)
    if as_json:
        print_json(answer)
    else:
        _tell(answer)


def _check(
    per_class: int, steps: int | None, budget: str | None, model: str, size: int | None, held_out: float
) -> None:
    """Refuse, before anything is read, settings that cannot be."""
    counted("distill", **{"--per-class": per_class})
    if steps is not None:
        counted("distill", **{"--steps": steps})
    if budget is not None:
        seconds(budget)
    if model not in MODELS:
        raise unknown("model", model, MODELS)
    if size is not None and not 1 <= size <= LARGEST_SIDE:
        raise InputError(f"--size must be a whole number from 1 to {LARGEST_SIDE}, got {size}.")
    if not 0 < held_out < 1:
        raise InputError(f"--held-out must be above 0 and below 1, got {held_out}.")


def _distiller(
    per_class: int, steps: int | None, budget: str | None, model: str, seed: int, device: str, as_json: bool
) -> Any:
    try:
        from nhgd.sklearn.distiller import DatasetDistiller
    except ModuleNotFoundError:
        raise InputError("Distilling images needs scikit-learn: pip install 'nhgd[cli]'.") from None
    return DatasetDistiller(
        per_class,
        model,
        steps=STEPS if steps is None and budget is None else steps,
        budget=budget,
        device=str(device_called(device)),
        verbose=None if as_json else True,
        random_state=checked_seed(seed) % 2**32,
    )


def _accuracy(distiller: Any, data: LabelledImages, train: Array, test: Array) -> dict[str, float]:
    """On held-out images, of the same model trained on the distilled images, on all others, and on as many of them."""
    rows, codes = data.flat, data.codes
    random = np.random.default_rng(distiller.random_state)
    some = [random.permutation(train[codes[train] == c])[: distiller.per_class] for c in range(len(data.classes))]
    found = {"distilled": float(distiller.score(rows[test], codes[test]))}
    for name, chosen in (("everything", train), ("as_many_real_ones", np.concatenate(some))):
        found[name] = _trained_on(distiller, rows[chosen], codes[chosen], rows[test], codes[test])
    return found


def _trained_on(distiller: Any, X: Array, y: Array, X_test: Array, y_test: Array) -> float:
    """The accuracy of a new model trained on these, on the scale of the distiller."""
    center, scale = distiller._center, distiller._scale
    x, x_test = (torch.as_tensor((rows - center) / scale) for rows in (X, X_test))
    architecture = Architecture(distiller.model, hidden=distiller.hidden)
    labels = torch.as_tensor(y)
    model, _ = trained(architecture, x, labels, len(distiller.classes_), distiller.l2, distiller.random_state, tol=1e-4)
    with torch.no_grad():
        return float((model(x_test).argmax(1) == torch.as_tensor(y_test)).double().mean())


def _without_grey(images: Array) -> Array:
    """Grey images without their one channel."""
    return images[..., 0] if images.shape[-1] == 1 else images


def _tell(answer: dict[str, Any]) -> None:
    out, accuracy = console(), answer["accuracy"]
    high, wide, _ = answer["shape"]
    out.print(
        f"{answer['distilled']} images of {wide} x {high} pixels, learnt from {answer['train']} in {answer['seconds']:.1f} s"
        f" ({answer['steps']} steps).\n"
    )
    counted = table(
        f"accuracy on {answer['held_out']} held-out images",
        f"the {answer['settings']['model']} model trained on",
        "images",
        "accuracy",
    )
    for words, name, images in (
        ("the distilled images", "distilled", answer["distilled"]),
        ("as many real ones, at random", "as_many_real_ones", answer["distilled"]),
        ("everything", "everything", answer["train"]),
    ):
        counted.add_row(words, str(images), f"{accuracy[name]:.3f}")
    out.print(counted)
    out.print(f"\n{', '.join(FILES[:-1])} and {FILES[-1]} are in {answer['out']}.")
