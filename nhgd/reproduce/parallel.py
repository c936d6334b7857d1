"""`nhgd reproduce parallel`: algorithm 2 and figure 1, the same run serially and with curvature kept elsewhere.

The paper keeps the inverse on a second GPU, and says that this takes no extra run time. Here the serial run is compared
with each way of overlap that the machine has: a thread, a second stream, a second device, a second process. Two things
are asked of each: is the result that of the serial run, and how much of the time that curvature takes is hidden. No
overlap can be faster than the larger of curvature alone and everything else alone.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from nhgd._results import jsonable
from nhgd._threads import limited
from nhgd.algorithm import NHGD
from nhgd.comparison.formats import aligned
from nhgd.comparison.trial import environment
from nhgd.data.device import usable_device
from nhgd.errors import RunError
from nhgd.execution import AbstractExecutor, Distributed
from nhgd.task import Cleaning

LIMIT = 300.0  # seconds for two processes to start, to work and to end
WARM = 2  # outer steps before the clock is read
ROUNDS = 2  # of which the faster counts


def parallel(
    quick: bool,
    data: Path | None,
    device: str = "auto",
    seed: int = 0,
    say: Callable[[str], None] = lambda words: None,
    steps: int | None = None,
) -> dict[str, Any]:
    """The paper's inverse on the cleaning task, by every execution that the machine has.

    Args:
        quick: fewer samples and steps.
        data: the folder of MNIST; a quick run does without, and takes the digits of scikit-learn.
        device: of the inner loop.
        seed: of all runs.
        say: told what comes next.
        steps: outer steps that are timed; None: 20, or 8 in a quick run.
    """
    asked = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    here = str(usable_device("reproduce", asked))
    task, count = _task(quick, data), (8 if quick else 20) if steps is None else steps
    ways = ["inline", "thread"]
    if here.startswith("cuda"):
        ways += ["stream", "device:cpu", *(["device:cuda:1"] if torch.cuda.device_count() > 1 else [])]
    found: dict[str, dict[str, Any]] = {}
    for nth in range(ROUNDS):  # in turns, so that noise affects all equally
        for name in [*ways, "distributed"]:
            say(f"{name}, {nth + 1} of {ROUNDS}")
            if name == "distributed":
                row = _in_two_processes(task, data, here, seed, count)
            else:
                with limited(1 if here == "cpu" else torch.get_num_threads()):
                    row = _taken(task, data, here, seed, count, name)
            if name not in found or row["milliseconds"] < found[name]["milliseconds"]:
                found[name] = row
    serial = found["inline"]
    curvature = serial["curvature_milliseconds"]
    floor = max(serial["milliseconds"] - curvature, curvature)
    rows = [
        {
            "execution": name,
            **{key: value for key, value in row.items() if key not in ("v", "dimension")},
            "speedup": serial["milliseconds"] / row["milliseconds"],
            "largest_difference_of_v": float((row["v"] - serial["v"]).abs().max()),
        }
        for name, row in found.items()
    ]
    plain = jsonable(
        {
            "experiment": "parallel",
            "quick": quick,
            "device": here,
            "seed": seed,
            "dimension": serial["dimension"],
            "outer_steps": count,
            "inner_steps": task.inner_steps,
            "best_speedup": serial["milliseconds"] / floor,
            "rows": rows,
            "environment": environment(torch.device(here)),
        }
    )
    assert isinstance(plain, dict)
    return plain


def text(found: Mapping[str, Any]) -> str:
    """The executions side by side."""
    title = (
        f"parallel{', quick' if found['quick'] else ''}: the paper's update of a {found['dimension']:,} x {found['dimension']:,}"
        f" inverse in {found['inner_steps']} inner steps, on {found['device']}; median of {found['outer_steps']} outer steps"
    )
    head = ["execution", "ms/outer step", "speedup", "ms of curvature", "ms waited", "largest difference of v"]
    lines = [
        [
            row["execution"],
            f"{row['milliseconds']:.3g}",
            f"{row['speedup']:.2f}",
            f"{row['curvature_milliseconds']:.3g}",
            f"{row['waited_milliseconds']:.3g}",
            f"{row['largest_difference_of_v']:.1e}",
        ]
        for row in found["rows"]
    ]
    best = f"Perfect overlap would be {found['best_speedup']:.2f} times as fast as the serial run."
    return "\n".join([title, "", *aligned([head, *lines]), "", best])


def _task(quick: bool, data: Path | None) -> Cleaning:
    task = Cleaning.preset("paper")
    if not quick:
        return task
    if data is None and not os.environ.get("NHGD_DATA"):
        return task.with_settings({"dataset": "digits"})
    return task.with_settings({"train": 2000, "trusted": 500, "evaluation": 500})


def _taken(
    task: Cleaning, data: Path | None, device: str, seed: int, steps: int, execution: str | AbstractExecutor
) -> dict[str, Any]:
    """One run: where v went, and the median of what an outer step took."""
    instance = task.build(seed, torch.device(device), data)
    literal = NHGD.presets()["nhgd-paper"]
    with instance.start(literal, seed, execution) as solver:
        solver.metrics = None
        solver.run(steps=WARM, progress=False)
        before = solver.executor.traffic
        begun = before.curvature_seconds, before.waited_seconds
        solution = solver.run(steps=steps, progress=False)
        times = [after["seconds"] - row["seconds"] for row, after in pairwise(solution.history[WARM - 1 :])]
        traffic = solver.executor.traffic
        v = solution.v
        assert isinstance(v, Tensor)
        return {
            "v": v.detach().double().cpu(),
            "dimension": instance.problem.theta.flat().numel(),
            "milliseconds": 1e3 * median(times),
            "curvature_milliseconds": 1e3 * (traffic.curvature_seconds - begun[0]) / steps,
            "waited_milliseconds": 1e3 * (traffic.waited_seconds - begun[1]) / steps,
            "largest_lag": traffic.largest_lag,
            "bytes_sent": traffic.bytes_sent,
        }


def _in_two_processes(task: Cleaning, data: Path | None, device: str, seed: int, steps: int) -> dict[str, Any]:
    """The same with curvature in a process of its own: rank 0 takes inner steps, rank 1 keeps the inverse.

    A single GPU is shared by both, and messages between them pass through the host.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="nhgd-") as folder:
        answers, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(target=_work, args=(rank, folder, sender, task, data, device, seed, steps), daemon=True)
            for rank in range(2)
        ]
        try:
            for process in processes:
                process.start()
            sender.close()
            if not answers.poll(LIMIT):
                raise RunError(
                    f"Two processes gave no answer within {LIMIT:g} seconds. Run the experiment on a quieter machine."
                )
            answer = answers.recv()
            for process in processes:
                process.join(LIMIT)
        except EOFError:
            raise RunError("A process of the two ended without an answer. Run the experiment again.") from None
        finally:
            for process in processes:
                process.kill()
    if isinstance(answer, str):
        raise RunError(f"A run of two processes failed: {answer}")
    return {**answer, "v": torch.tensor(answer["v"], dtype=torch.float64)}


def _work(
    rank: int, folder: str, sender: Any, task: Cleaning, data: Path | None, device: str, seed: int, steps: int
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
        found = _taken(task, data, device, seed, steps, Distributed(timeout=LIMIT))
        if rank == 0:
            sender.send(found | {"v": found["v"].tolist()})
    except BaseException as error:  # whatever it is, the first process is to say so
        sender.send(f"{type(error).__name__}: {error}")
    finally:
        sender.close()
        if dist.is_initialized():
            dist.destroy_process_group()
