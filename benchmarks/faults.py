"""Distributed runs whose processes are killed, paused or cut off at random moments.

    python -m benchmarks.faults benchmarks/results/faults-cpu.json --times 20

Each trial starts `nhgd run cleaning --execution distributed` in its own folder and harms one process at a random moment: while
processes start, while they run, while a checkpoint is being written, or when the run ends. It then records how the run ended:
the exit code, the error message, the time it took, whether a process is left, and whether the run can be resumed with another
number of workers. The network is cut between two network namespaces, which takes root on Linux.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.checkpoint import SavedCheckpoint, exists
from nhgd.checkpoint.files import newest

CLEANING = ("run", "cleaning", "--preset", "quick", "--method", "nhgd", "--device", "cpu")
QUADRATIC = (
    "run",
    "quadratic",
    "--method",
    "nhgd-window",
    "--set",
    "window=32",
    "--set",
    "inner_steps=2",
    "--device",
    "cpu",
)  # quick to start
EVERY = 5  # outer steps between two checkpoints
MANY, FEW = 1_000_000, 40  # outer steps: of a run that is harmed on its way, and of one that is harmed at its end
STORE_PORT = 29555  # where processes meet that a network connects
DRAFT = ".draft-"  # how the folder of a checkpoint is called while it is written
PHASES = ("starting", "running", "writing", "ending")
_numbers = itertools.count()


@dataclass(frozen=True)
class Moment:
    """When a run is harmed: so many seconds after it was started (starting), after its first checkpoint (running), after it
    began to write a checkpoint (writing), or to write its last one (ending)."""

    phase: str
    seconds: float

    @classmethod
    def of(cls, phase: str, choose: random.Random) -> Moment:
        """A random one. Writing takes milliseconds, and most of what happens at the end happens at once."""
        longest = {"starting": 8.0, "running": 3.0, "writing": 0.003, "ending": 1.0}[phase]
        return cls(phase, longest * choose.random() ** (3 if phase == "ending" else 1))

    @property
    def steps(self) -> int:
        """How many outer steps the run is to take."""
        return FEW if self.phase == "ending" else MANY

    def wait(self, checkpoint: Path, began: float, running: Any, limit: float = 120.0) -> None:
        """Until the moment has come, or the run has ended."""
        deadline = time.monotonic() + limit
        last = FEW // EVERY
        while self.phase != "starting" and running():
            if self.phase == "running" and exists(checkpoint):
                break
            if self.phase == "ending" and (newest(checkpoint) or (0,))[0] + drafts(checkpoint) >= last:
                break
            if self.phase == "writing" and exists(checkpoint) and drafts(checkpoint):
                break
            if time.monotonic() > deadline:
                raise TimeoutError("The run did not come so far.")
            time.sleep(0.0005)
        since = began if self.phase == "starting" else time.monotonic()
        time.sleep(max(0.0, self.seconds - (time.monotonic() - since)))


def drafts(checkpoint: Path) -> bool:
    """Whether a checkpoint is being written."""
    return checkpoint.is_dir() and any(place.name.startswith(DRAFT) for place in checkpoint.iterdir())


def seen(checkpoint: Path, steps: int) -> str:
    """In which phase a run is, as far as its folder tells."""
    if not exists(checkpoint):
        return "starting"
    if drafts(checkpoint):
        return "writing"
    return "ending" if (newest(checkpoint) or (0,))[0] >= steps // EVERY else "running"


class Trial:
    """One distributed run in a folder of its own.

    Args:
        folder: where its checkpoints go.
        settings: of the executor, as --set takes them.
        more: further arguments of `nhgd run`.
        steps: outer steps.
        task: what is run.
    """

    def __init__(
        self, folder: Path, settings: Sequence[str], *more: str, steps: int = MANY, task: Sequence[str] = CLEANING
    ) -> None:
        self.checkpoint = folder / "checkpoint"
        self.known: dict[int, int] = {}
        self.task, self.steps = task, steps
        self.process = start(command(task, self.checkpoint, steps, *distributed(settings), *more))

    def ranks(self) -> dict[int, int]:
        """The processes that the launcher has started, by rank; those that were ever seen are remembered for `left`."""
        found = {}
        for place in Path("/proc").iterdir():
            if not place.name.isdecimal():
                continue
            with suppress(OSError, ValueError, KeyError):
                parts = (place / "environ").read_bytes().split(b"\0")
                words = dict(part.decode(errors="replace").partition("=")[::2] for part in parts if b"=" in part)
                if words.get("NHGD_LAUNCHER") == str(self.process.pid):
                    found[int(words["RANK"])] = int(place.name)
        self.known |= {pid: rank for rank, pid in found.items()}
        return found

    def wait_for(self, count: int, running: bool, limit: float = 120.0) -> None:
        """Until so many processes are there and, when `running`, a checkpoint is."""
        deadline = time.monotonic() + limit
        while time.monotonic() < deadline and self.process.poll() is None:
            if len(self.ranks()) == count and (self.kept() or not running):
                return
            time.sleep(0.02)
        self.process.kill()
        raise TimeoutError(f"The run did not come up: {self.process.communicate()}")

    def kept(self) -> bool:
        """Whether there is a checkpoint."""
        return exists(self.checkpoint)

    def end(self, limit: float) -> dict[str, Any]:
        """How it ended: exit code, seconds, sentence, and the ranks that are left."""
        return ended(self.process, limit, self.checkpoint.parent, self.steps) | {"left": self.left()}

    def left(self) -> list[int]:
        """The ranks whose processes are still there."""
        return sorted(rank for pid, rank in self.known.items() if Path(f"/proc/{pid}").exists())


def command(task: Sequence[str], checkpoint: Path, steps: int, *more: str) -> list[str]:
    """A run that is kept in `checkpoint`."""
    found = [sys.executable, "-m", "nhgd", *task, "--steps", str(steps), "--json", *more]
    return [*found, "--checkpoint", str(checkpoint), "--checkpoint-every", str(EVERY)]


def start(words: Sequence[str], **more: str) -> subprocess.Popen[bytes]:
    """A process with one thread for each of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)


def ended(process: subprocess.Popen[bytes], limit: float, folder: Path, steps: int) -> dict[str, Any]:
    """How a process ended, within so many seconds: whether it hung, its exit code, whether the run was done, its sentence."""
    began = time.monotonic()
    hung = False
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        hung = True
        process.kill()
        out, err = process.communicate()
    said: dict[str, Any] = json.loads(out) if out.strip() else {}
    lines = err.decode(errors="replace").splitlines()
    told = [line for line in lines if line.startswith(("Error: ", "Warning: The run is done"))]
    sentence = said.get("error") or (told[-1].removeprefix("Error: ") if told else "")
    return {
        "hung": hung,
        "code": None if hung else process.returncode,
        "done": said.get("steps") == steps,
        "seconds": round(time.monotonic() - began, 2),
        "sentence": sentence.replace(str(folder), "DIR"),  # no place of this machine
    }


def resumes(checkpoint: Path, task: Sequence[str], *more: str, further: int = 5) -> bool:
    """Whether a run goes on from its checkpoint, as `more` says, to some steps more; where there is none it begins anew."""
    steps = further + (SavedCheckpoint(checkpoint).step if exists(checkpoint) else 0)
    process = start(command(task, checkpoint, steps, "--resume", *more))
    out, _ = process.communicate(timeout=300)
    return process.returncode == 0 and json.loads(out)["steps"] == steps


def distributed(settings: Sequence[str]) -> list[str]:
    """The arguments for distributed execution."""
    return ["--execution", "distributed", *(part for setting in settings for part in ("--set", setting))]


def limit(timeout: float) -> float:
    """Seconds in which a harmed run must have ended.

    A dead process is seen at once, and a silent one after the timeout. Then the others are given seconds to say why they fail,
    and to end. Those who are not connected yet begin to wait when they have started, which is not counted.
    """
    return timeout + 15


def harmed(
    kind: str,
    rank: int,
    world: int,
    moment: Moment,
    timeout: float,
    resume: Sequence[str] = (),
    task: Sequence[str] = CLEANING,
    patience: float | None = None,
) -> dict[str, Any]:
    """One trial: a process is killed or paused. It has hung if it takes longer than `patience`, by default its `limit`."""
    settings = [f"timeout={timeout:g}", f"workers={world - 1}"]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), settings, steps=moment.steps, task=task)
        trial.wait_for(world, running=False)
        target = trial.ranks()[rank]
        began = time.monotonic()
        moment.wait(trial.checkpoint, began, lambda: trial.process.poll() is None)
        phase = seen(trial.checkpoint, moment.steps)
        was_there = True
        try:
            os.kill(target, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        except ProcessLookupError:
            was_there = False  # it had ended
        after = round(time.monotonic() - began, 2)
        found = trial.end(limit(timeout) if patience is None else patience)
        for pid in trial.known:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # nobody, unless the trial has failed
        return {
            "kind": kind,
            "rank": rank,
            "processes": world,
            "meant": moment.phase,
            "phase": phase,
            "after": after,
            "was_there": was_there,
            "timeout": timeout,
            **found,
            "resumed_by": " ".join(resume) or "one process",
            "resumed": resumes(trial.checkpoint, task, *resume),
        }


@contextmanager
def namespaces() -> Iterator[tuple[str, str, str, str]]:
    """Two network namespaces with a wire between them: their names, and the ends of the wire."""
    tag = f"{os.getpid() % 10000}-{next(_numbers)}"
    names = f"nhgd-a{tag}", f"nhgd-b{tag}"
    wires = f"va{tag}", f"vb{tag}"
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for name, wire, number in zip(names, wires, (1, 2), strict=True):
            _ip("link", "set", wire, "netns", name)
            _ip("-n", name, "addr", "add", f"10.231.77.{number}/24", "dev", wire)
            _ip("-n", name, "link", "set", wire, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield *names, *wires
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def cut_off(moment: Moment, timeout: float, resume: Sequence[str] = ()) -> dict[str, Any]:
    """One trial: two processes in two network namespaces, and the wire between them is cut."""
    with namespaces() as (*names, ours, theirs), tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        words = command(CLEANING, checkpoint, moment.steps, *distributed([f"timeout={timeout:g}"]))
        began = time.monotonic()
        started = [
            start(
                ["ip", "netns", "exec", name, *words],
                RANK=str(rank),
                LOCAL_RANK="0",
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="10.231.77.1",
                MASTER_PORT=str(STORE_PORT),
                GLOO_SOCKET_IFNAME=wire,
            )
            for rank, (name, wire) in enumerate(zip(names, (ours, theirs), strict=True))
        ]
        moment.wait(checkpoint, began, lambda: started[0].poll() is None)
        phase = seen(checkpoint, moment.steps)
        was_there = any(process.poll() is None for process in started)
        _ip("-n", names[0], "link", "set", ours, "down")
        after, cut = round(time.monotonic() - began, 2), time.monotonic()
        wait_for_arrivals(started)
        arrived = time.monotonic()
        ends = []
        for process in started:
            left = max(1.0, limit(timeout) - (time.monotonic() - arrived))
            ends.append(ended(process, left, Path(folder), moment.steps))
        return {
            "kind": "cut",
            "processes": 2,
            "meant": moment.phase,
            "phase": phase,
            "after": after,
            "was_there": was_there,
            "timeout": timeout,
            "starting_seconds": round(arrived - cut, 2),
            "seconds": round(time.monotonic() - arrived, 2),
            "ranks": ends,
            "left": [rank for rank, process in enumerate(started) if Path(f"/proc/{process.pid}").exists()],
            "resumed_by": " ".join(resume) or "one process",
            "resumed": resumes(checkpoint, CLEANING, *resume),
        }


def wait_for_arrivals(processes: Sequence[subprocess.Popen[bytes]], limit: float = 120.0) -> None:
    """Until each process has ended, or a socket of its network namespace shows that it has started and calls the others."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline and not all(p.poll() is not None or calls(p.pid) for p in processes):
        time.sleep(0.02)


def calls(pid: int) -> bool:
    """Whether a socket in the namespace of a process has the port of the store at one of its ends."""
    with suppress(OSError):
        text = "".join(Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6"))
        lines = [line.split() for line in text.splitlines()]
        return any(end.endswith(f":{STORE_PORT:04X}") for line in lines for end in line[1:3])
    return False


def good(row: dict[str, Any]) -> bool:
    """Whether a trial ended as it should: in time, nobody left, resumable; with exit code 1 and the culprit and the checkpoint
    named, or with exit code 0 where the run was done."""
    if row["left"] or not row["resumed"]:
        return False
    if not row["was_there"] and row["meant"] != "ending":
        return False  # it had failed before it was harmed
    kept = row["phase"] != "starting"
    if row["kind"] != "cut":
        return not row["hung"] and (row["done"] if row["code"] == 0 else _named(row, row["rank"], kept))
    # Of two that are cut off from each other at the end, one may have all it needs and the other not.
    at_the_end = row["meant"] == "ending"
    return all(
        not end["hung"]
        and (at_the_end and (end["done"] or rank > 0) if end["code"] == 0 else _named(end, 1 - rank, kept))
        for rank, end in enumerate(row["ranks"])
    )


def _named(end: dict[str, Any], rank: int, kept: bool) -> bool:
    """Whether a sentence names the rank, and the last checkpoint where there was one."""
    sentence = str(end["sentence"])
    return end["code"] == 1 and f"Rank {rank} " in sentence and (not kept or "The last good checkpoint is" in sentence)


def tried(kind: str, number: int, seed: int, timeout: float) -> dict[str, Any]:
    """One trial of a campaign, which the kind, the number and the seed determine but for the speed of the machine."""
    choose = random.Random(f"{seed} {kind} {number}")
    moment = Moment.of(PHASES[number % 4], choose)
    world = 3 if number % 8 < 4 else 2  # two inner ranks that share the batches, or one
    # With another number of workers than before: two in place of one, one process or one worker in place of two.
    resume = distributed(["workers=2"]) if kind == "cut" or world == 2 else []
    if kind == "cut":
        row = cut_off(moment, timeout, resume)
    elif kind == "pause":
        row = harmed("pause", choose.randrange(world), world, moment, timeout, resume)
    else:
        rank = world - 1 if kind == "kill-curvature" else choose.randrange(world - 1)
        row = harmed("kill", rank, world, moment, timeout, resume)
    return {"trial": kind, "number": number, "good": good(row), **row}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is to be known of each kind."""
    found = {}
    for name in dict.fromkeys(row["trial"] for row in rows):
        some = [row for row in rows if row["trial"] == name]
        ends = [end for row in some for end in row.get("ranks", [row])]
        waits = {phase: [row["seconds"] for row in some if row["phase"] == phase] for phase in PHASES}
        found[name] = {
            "trials": len(some),
            "good": sum(row["good"] for row in some),
            "phases": dict(Counter(row["phase"] for row in some)),
            "exit_codes": {str(code): count for code, count in Counter(end["code"] for end in ends).items()},
            "resumed_by": dict(Counter(row["resumed_by"] for row in some)),
            "longest_seconds": {phase: max(times) for phase, times in waits.items() if times},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--kinds", default="kill-curvature,kill-inner,pause,cut")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["trials"] if given.out.exists() else []
    have = {(row["trial"], row["number"]) for row in rows}
    kinds = given.kinds.split(",")
    todo = [(kind, number) for number in range(given.times) for kind in kinds if (kind, number) not in have]
    lock = threading.Lock()

    def work(item: tuple[str, int]) -> None:
        row = tried(*item, given.seed, given.timeout)
        with lock:
            rows.append(row)
            rows.sort(key=lambda row: (kinds.index(row["trial"]), row["number"]))
            print(f"{item[0]} {item[1]}: {'good' if row['good'] else row}", file=sys.stderr, flush=True)
            machine = environment(torch.device("cpu")) | {"trials_at_a_time": given.jobs}
            content = {"environment": machine, "summary": summary(rows), "trials": rows}
            given.out.write_text(json.dumps(content, indent=1) + "\n")

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(work, todo))
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
