"""`nhgd influence`: which training samples of a task helped or hurt its predictions."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

import nhgd
from nhgd import task as tasks
from nhgd._experiment.changes import for_inverses, for_task, parse
from nhgd._influence import Influence
from nhgd._progress import bar
from nhgd._results import check_files, folder, jsonable
from nhgd._validation import counted
from nhgd.cli._options import (
    Changes,
    DataFolder,
    Device,
    Json,
    Out,
    Preset,
    Seed,
    Task,
    checked_seed,
    device_called,
    keep_to_threads,
)
from nhgd.cli._output import console, number, print_json, table
from nhgd.inverse import AbstractInverse, resolve
from nhgd.inverse._learned.layers import layer_shapes
from nhgd.task import AbstractTask

FILES = ("scores.npz", "result.json")


def influence(
    task: Task,
    inverse: Annotated[
        str | None,
        typer.Option(
            help="Name such as ekfac, kfac or cg-100; default: ekfac where the model has Linear or Conv2d layers, else"
            " fisher_window.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, typer.Option(help="How many of the most helpful and the most harmful samples to list.")] = 10,
    out: Out = None,
    seed: Seed = 0,
    device: Device = "auto",
    data: DataFolder = None,
    preset: Preset = "default",
    changes: Changes = None,
    as_json: Json = False,
) -> None:
    """Influence of every training sample on every outer sample of a task, at its solved inner problem.

    --out writes scores.npz, with scores (queries, samples), their mean over the queries and the queries' losses, and
    result.json. A positive score means that the sample lowered the query's loss.
    """
    counted("influence", **{"--top": top})
    if out is not None:
        check_files(out, *FILES)
    chosen, rest = for_task(tasks.resolve(task, preset), parse(changes))
    asked = None if inverse is None else _changed(chosen, inverse, rest)
    where = device_called(device)
    keep_to_threads(chosen.threads, where)
    with bar("influence") as tick:
        tick(0.0, "building the task")
        instance = chosen.build(checked_seed(seed), where, data)
        if asked is None:
            layered = instance.problem.theta.root is not None and layer_shapes(instance.problem.theta)
            asked = _changed(chosen, "ekfac" if layered else "fisher_window", rest)
        tick(0.3, "solving the inner problem")
        instance.solve_inner()
        tick(1.0, "")
    began = time.perf_counter()
    found = nhgd.influence(instance.problem, instance.inner_data, instance.outer_data, asked, seed=seed)
    answer = {"task": task, "preset": preset, "seed": seed, "seconds": time.perf_counter() - began}
    answer |= _described(found, top) | {"metrics": instance.influence_metrics(found.total)}
    answer["out"] = None if out is None else str(out)
    with folder(out) as place:
        if place is not None:
            place.write_all(f"The results in {out}", lambda beside: _written(beside, found, answer))
    if as_json:
        print_json(answer)
    else:
        _tell(answer)


def _changed(task: AbstractTask, name: str, changes: dict[str, str]) -> AbstractInverse:
    """The inverse of this name with settings such as ekfac.damping=1e-3."""
    return for_inverses(task, {name: resolve(name)}, changes)[name]


def _described(found: Influence, top: int) -> dict[str, Any]:
    total = found.total

    def listed(samples: torch.Tensor) -> list[dict[str, Any]]:
        return [{"sample": int(i), "influence": float(total[i])} for i in samples]

    queries, samples = found.scores.shape
    return {
        "queries": queries,
        "samples": samples,
        "query_loss": float(found.query_losses.mean()),
        "deviation": float(found.scores.double().std(correction=0)),
        "helpful": listed(found.helpful(top)),
        "harmful": listed(found.harmful(top)),
        "stats": found.stats,
    }


def _written(beside: Path, found: Influence, answer: dict[str, Any]) -> list[Path]:
    np.savez_compressed(
        beside / FILES[0],
        scores=found.scores.numpy(),
        total=found.total.numpy(),
        query_losses=found.query_losses.numpy(),
    )
    text = json.dumps(jsonable(answer), indent=2, allow_nan=False) + "\n"
    (beside / FILES[1]).write_text(text, encoding="utf-8")
    return [beside / name for name in FILES]


def _tell(answer: dict[str, Any]) -> None:
    out = console()
    title = (
        f"{answer['task']}, seed {answer['seed']}: {answer['samples']} training samples on {answer['queries']} queries by"
        f" {answer['stats']['inverse']}, {answer['seconds']:.2g} s"
    )
    listed = table(title, "helpful sample", "influence", "harmful sample", "influence ")
    for good, bad in zip(answer["helpful"], answer["harmful"], strict=True):
        cells = [(str(row["sample"]), number(row["influence"], ".3g")) for row in (good, bad)]
        listed.add_row(*cells[0], *cells[1])
    out.print(listed)
    out.print(
        "\nInfluence: how much the mean loss of the queries would rise, to first order, if the sample were left out."
    )
    for name, value in answer["metrics"].items():
        out.print(f"{name}: {value:.3f}")
    if answer["out"] is not None:
        out.print(f"\n{' and '.join(FILES)} are in {answer['out']}.")
