"""Runs that are killed at random moments and resumed: do they end as if nothing had happened?

    python -m benchmarks.kills benchmarks/results/kills-cpu.json --times 100 --jobs 2

Each trial runs `nhgd run TASK --method M --execution E --checkpoint DIR`, kills it by SIGKILL at a random moment after its first
checkpoint, and repeats the command with --resume. The folder must then equal that of an uninterrupted run: every tensor of
the last checkpoint (theta, v, moments, curvature, generators) and every row of the history except for its clocks, bit for bit.
Runs of one process are forked from one that has imported everything; distributed ones are started as users start them, and
killed together with their launcher.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.checkpoint import SavedCheckpoint, exists
from nhgd.cli._program import app
from tests.histories import CLOCKED

TASKS = {
    "quadratic": ("nhgd", "nhgd-window", "nhgd-paper", "aid-cg", "aid-neumann", "soba", "saba", "stocbio", "amigo", "bome",
                  "f2sa", "ttsa", "itd", "vrbo", "mrbo", "sustain", "fsla", "bsa", "alset", "nhgd_single"),
    "l2": ("nhgd", "aid", "nhgd-refined", "aid-nystrom", "aid-broyden", "soba"),
    "cleaning": ("nhgd", "nhgd-window", "nhgd-refined", "aid-cg", "aid-ekfac", "aid-identity"),
    "distillation": ("nhgd", "aid-cg"),
}  # fmt: skip
LEARNING = ("nhgd", "nhgd-window", "nhgd-refined", "aid-ekfac")  # methods whose curvature may be kept elsewhere
STEPS = {"quadratic": 40, "l2": 30, "cleaning": 12, "distillation": 8}


@dataclass(frozen=True)
class Case:
    """What is run."""

    task: str
    method: str
    execution: str

    def words(self, place: Path, every: int, *more: str) -> list[str]:
        found = ["run", self.task, "--preset", "quick", "--method", self.method, "--execution", self.execution]
        found += ["--steps", str(STEPS[self.task]), "--device", "cpu", "--json"]
        return [*found, "--checkpoint", str(place), "--checkpoint-every", str(every), *more]


def cases() -> list[Case]:
    """All kinds of runs, those of one process first."""
    here = [Case(task, method, "inline") for task, methods in TASKS.items() for method in methods]
    beside = [
        Case(task, method, execution)
        for task in ("cleaning", "quadratic")
        for method in TASKS[task]
        for execution in ("thread", "device:cpu")
        if method in LEARNING
    ]
    return here + beside


def chosen(number: int) -> Case:
    """The case of a trial: every tenth is distributed, the others take turns."""
    if number % 10 == 9:
        return Case("quadratic" if number % 20 == 9 else "cleaning", "nhgd-window", "distributed")
    known = cases()
    return known[(number - number // 10) * 7 % len(known)]


class Running:
    """A run, in a process of its own."""

    def __init__(self, case: Case, words: Sequence[str], log: Path) -> None:
        self._process = None
        if case.execution == "distributed":
            with log.open("wb") as out:
                self._process = subprocess.Popen([sys.executable, "-m", "nhgd", *words], stdout=out, stderr=out)
            self.pid = self._process.pid
            return
        self.pid = os.fork()
        if self.pid == 0:
            try:
                out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(out, 1)
                os.dup2(out, 2)
                app(list(words))
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(int(end.code or 0))
            finally:
                os._exit(1)

    def ended(self, wait: bool = False) -> int | None:
        """Its exit code, below 0 for a signal; None while it runs."""
        if self._process is not None:
            return self._process.wait() if wait else self._process.poll()
        found, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    def kill(self) -> bool:
        """Whether it was killed, and had not ended by itself the moment before."""
        os.kill(self.pid, signal.SIGKILL)
        return self.ended(wait=True) == -signal.SIGKILL


def contents(place: Path) -> tuple[dict[str, torch.Tensor], list[Any], int]:
    """The tensors, the rows and the step of the last checkpoint."""
    saved = SavedCheckpoint(place)
    rows = saved.history(torch.device("cpu"))
    return saved.tensors, [{k: x for k, x in row.items() if k not in CLOCKED} for row in rows], saved.step


def differences(one: Path, other: Path) -> list[str]:
    """Where two runs differ."""
    (tensors, rows, step), (others, other_rows, other_step) = contents(one), contents(other)
    wrong = [] if step == other_step else [f"steps {step} and {other_step}"]
    wrong += [f"row {i}" for i, (a, b) in enumerate(zip(rows, other_rows, strict=False)) if a != b]
    if len(rows) != len(other_rows) or set(tensors) != set(others):
        return [*wrong, "other rows or tensors"]
    same = {
        name: tensor.dtype == others[name].dtype and _equal(tensor, others[name]) for name, tensor in tensors.items()
    }
    return wrong + [name for name, is_same in same.items() if not is_same]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)))


def waited_for(running: Running, holds: Callable[[], bool], limit: float = 300.0) -> bool:
    """Whether something came to hold while the run went on."""
    deadline = time.monotonic() + limit
    while not holds():
        if running.ended() is not None:
            return False
        if time.monotonic() > deadline:
            running.kill()
            raise TimeoutError("The run did not come so far.")
        time.sleep(0.001)
    return True


def tried(number: int, seed: int) -> dict[str, Any]:
    """One trial, which its number and the seed determine but for the speed of the machine."""
    choose = random.Random(f"{seed} {number}")
    case = chosen(number)
    every = choose.choice((1, 1, 2, 3))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        whole = Running(case, case.words(folder / "whole", every), folder / "log")
        waited_for(whole, lambda: exists(folder / "whole"))
        began = time.monotonic()
        if whole.ended(wait=True) != 0:
            raise RuntimeError(f"{case}: {(folder / 'log').read_text()}")
        longest = time.monotonic() - began  # from its first checkpoint to its end
        for attempt in range(20):
            place = folder / f"killed-{attempt}"
            running = Running(case, case.words(place, every), folder / "log")
            if waited_for(running, lambda: exists(place)):  # noqa: B023
                time.sleep(choose.uniform(0, 0.9 * longest / (1 + attempt)))
                if running.ended() is None and running.kill():
                    break
        else:
            raise RuntimeError(f"{case} could not be killed in time.")
        if case.execution == "distributed":
            time.sleep(1.0)  # its processes end with their launcher
        names = sorted(os.listdir(place))
        reached = SavedCheckpoint(place).step
        again = Running(case, case.words(place, every, "--resume"), folder / "log")
        code = again.ended(wait=True)
        said = (folder / "log").read_text()
        wrong = [f"exit code {code}: {said[-500:]}"] if code else differences(folder / "whole", place)
        if f"Resuming from {place}" not in said:
            wrong.append("it began anew")
        if any(not name.startswith("checkpoint-") for name in os.listdir(place)):
            wrong.append(f"left behind: {os.listdir(place)}")
    return {
        "number": number,
        "task": case.task,
        "method": case.method,
        "execution": case.execution,
        "checkpoint_every": every,
        "steps": STEPS[case.task],
        "killed_after_checkpoint_of_step": reached,
        "while_writing": any(name.startswith(".draft-") for name in names),
        "good": not wrong,
        **({"wrong": [text.replace(temporary, "DIR") for text in wrong[:10]]} if wrong else {}),
    }


def several(numbers: Sequence[int], seed: int) -> None:
    """In a process of its own: trials, each as a line of JSON."""
    torch.set_num_threads(1)
    for task in TASKS:  # what is imported late is imported here, once for all that are forked
        with tempfile.TemporaryDirectory() as temporary:
            words = Case(task, "nhgd", "inline").words(Path(temporary) / "warm", 1)
            words[words.index("--steps") + 1] = "1"
            sys.stdout.flush()
            keep = os.dup(1)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            try:
                app(words)
            except SystemExit as end:
                if end.code:
                    raise RuntimeError(f"nhgd {' '.join(words)} failed.") from end
            finally:
                sys.stdout.flush()
                os.dup2(keep, 1)
    for number in numbers:
        print(json.dumps(tried(number, seed)), flush=True)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"kills": len(rows), "same_bit_for_bit": sum(row["good"] for row in rows)}
    found["while_a_checkpoint_was_written"] = sum(row["while_writing"] for row in rows)
    return found | {key: dict(Counter(row[key] for row in rows)) for key in ("task", "method", "execution")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--resume", action="store_true", help="keep the trials that the file holds already")
    parser.add_argument("--within", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.within:
        several([int(number) for number in given.within.split(",")], given.seed)
        return
    if given.out is None:
        parser.error("name a file for the results")
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["trials"] if given.resume else []
    done = {row["number"] for row in rows}
    lock = Lock()

    def work(numbers: Sequence[int]) -> None:
        words = [sys.executable, "-m", "benchmarks.kills", "--within", ",".join(map(str, numbers))]
        with subprocess.Popen(
            [*words, "--seed", str(given.seed)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                row = json.loads(line)
                with lock:
                    rows.append(row)
                    rows.sort(key=lambda row: row["number"])
                    words = f"{row['task']} by {row['method']}, {row['execution']}"
                    print(f"{row['number']}: {words}: {'same' if row['good'] else row}", file=sys.stderr, flush=True)
                    machine = environment(torch.device("cpu")) | {"trials_at_a_time": given.jobs}
                    content = {"environment": machine, "summary": summary(rows), "trials": rows}
                    given.out.write_text(json.dumps(content, indent=1) + "\n")
        if process.returncode:
            raise RuntimeError(f"The trials {list(numbers)} could not be finished.")

    left = [number for number in range(given.times) if number not in done]
    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(work, [left[job :: given.jobs] for job in range(given.jobs)]))
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
