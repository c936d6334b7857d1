"""Distributed runs whose processes are killed, paused or cut off at random moments.

    python -m benchmarks.faults benchmarks/results/faults-cpu.json --times 20

Each trial starts `nhgd run cleaning --execution distributed` in its own folder, harms one process at a random moment, and
looks at how the run ends: its exit code, its sentence, how long that took, whether a process is left, and whether the run
goes on from its checkpoint, in one process, to the number of steps it was to take. The network is cut between two network
namespaces, which takes root on Linux.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment
from nhgd.checkpoint import Saved, exists

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
        self, folder: Path, settings: Sequence[str], *more: str, steps: int = 1_000_000, task: Sequence[str] = CLEANING
    ) -> None:
        self.checkpoint = folder / "checkpoint"
        self.known: dict[int, int] = {}
        self.task = task
        self.process = self._start(steps, *distributed(settings), *more)

    def _start(self, steps: int, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nhgd", *self.task, "--steps", str(steps), "--json", *more]
        command += ["--checkpoint", str(self.checkpoint), "--checkpoint-every", "5"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)

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
            time.sleep(0.05)
        self.process.kill()
        raise TimeoutError(f"The run did not come up: {self.process.communicate()}")

    def kept(self) -> bool:
        """Whether there is a checkpoint."""
        return exists(self.checkpoint)

    def end(self, limit: float) -> dict[str, Any]:
        """How it ended: exit code, seconds, sentence, and the ranks that are left."""
        began = time.monotonic()
        try:
            out, err = self.process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            self.ranks()
            self.process.kill()
            out, err = self.process.communicate()
            return {"hung": True, "code": None, "seconds": limit, "sentence": err.decode()[-500:], "left": self.left()}
        return {
            "hung": False,
            "code": self.process.returncode,
            "seconds": round(time.monotonic() - began, 2),
            "sentence": json.loads(out).get("error") if out.strip() else err.decode()[-500:],
            "left": self.left(),
        }

    def left(self) -> list[int]:
        """The ranks whose processes are still there."""
        return sorted(rank for pid, rank in self.known.items() if Path(f"/proc/{pid}").exists())

    def resumes(self, *more: str, further: int = 5) -> bool:
        """Whether the run goes on from its checkpoint, in one process or as `more` says, to some steps more."""
        steps = further + (Saved(self.checkpoint).step if self.kept() else 0)
        process = self._start(steps, "--resume", *more)
        out, _ = process.communicate(timeout=180)
        return process.returncode == 0 and json.loads(out)["steps"] == steps


def distributed(settings: Sequence[str]) -> list[str]:
    """The arguments for distributed execution."""
    return ["--execution", "distributed", *(part for setting in settings for part in ("--set", setting))]


def harmed(
    kind: str,
    rank: int,
    world: int,
    moment: float | None,
    timeout: float,
    resume: Sequence[str] = (),
    task: Sequence[str] = CLEANING,
) -> dict[str, Any]:
    """One trial: a process is killed or paused, so many seconds after the start, or (None) just after a checkpoint."""
    settings = [f"timeout={timeout:g}", f"workers={world - 1}"]
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), settings, task=task)
        trial.wait_for(world, running=moment is None)
        time.sleep(random.random() if moment is None else moment)
        phase = "running" if trial.kept() else "starting"
        pid = trial.ranks()[rank]
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        # A process that hangs before it has met the others is given a minute to arrive.
        found = trial.end(limit=timeout + 20 + (60 if phase == "starting" else 0))
        for pid in trial.known:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)  # nobody, unless the trial has failed
        return {
            "kind": kind,
            "rank": rank,
            "processes": world,
            "phase": phase,
            "timeout": timeout,
            **found,
            "resumed_by": " ".join(resume) or "one process",
            "resumed": trial.resumes(*resume),
        }


@contextmanager
def namespaces() -> Iterator[tuple[str, str, str]]:
    """Two network namespaces with a wire between them: their names and the wire's end in the first."""
    tag = f"{os.getpid() % 10000}"
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
        yield *names, wires[0]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def cut_off(moment: float, timeout: float) -> dict[str, Any]:
    """One trial: two processes in two network namespaces, and the wire between them is cut."""
    with namespaces() as (*names, wire), tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        started = []
        for rank, name in enumerate(names):
            environment = os.environ | {
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.231.77.1",
                "MASTER_PORT": "29555",
                "GLOO_SOCKET_IFNAME": wire if rank == 0 else wire.replace("va", "vb"),
            }
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "nhgd",
                *CLEANING,
                "--steps",
                "1000000",
                "--json",
            ]
            command += [
                *distributed([f"timeout={timeout:g}"]),
                "--checkpoint",
                str(checkpoint),
                "--checkpoint-every",
                "5",
            ]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment))
        deadline = time.monotonic() + 120
        while not exists(checkpoint) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(moment)
        _ip("-n", names[0], "link", "set", wire, "down")
        began = time.monotonic()
        ends = []
        for process in started:
            try:
                out, err = process.communicate(timeout=max(1.0, timeout + 20 - (time.monotonic() - began)))
                hung = False
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                hung = True
            sentence = json.loads(out).get("error") if out.strip() else err.decode()[-500:]
            ends.append({"hung": hung, "code": process.returncode, "sentence": sentence})
        seconds = round(time.monotonic() - began, 2)
        left = [rank for rank, process in enumerate(started) if Path(f"/proc/{process.pid}").exists()]
        command = [sys.executable, "-m", "nhgd", *CLEANING, "--json", "--resume", "--checkpoint", str(checkpoint)]
        steps = Saved(checkpoint).step + 5
        found = subprocess.run([*command, "--steps", str(steps)], capture_output=True, timeout=180, check=False)
        resumed = found.returncode == 0 and json.loads(found.stdout)["steps"] == steps
        return {"kind": "cut", "timeout": timeout, "seconds": seconds, "ranks": ends, "left": left, "resumed": resumed}


def good(row: dict[str, Any]) -> bool:
    """Whether a trial ended as it should: in time, with exit code 1 and the culprit named, nobody left, resumable."""
    if row["kind"] == "cut":
        ended = all(end["code"] == 1 and not end["hung"] for end in row["ranks"])
        named = all(f"Rank {1 - rank} " in end["sentence"] for rank, end in enumerate(row["ranks"]))
    else:
        ended, named = row["code"] == 1 and not row["hung"], f"Rank {row['rank']} " in str(row["sentence"])
    return ended and named and not row["left"] and row["resumed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--timeout", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default="kill-curvature,kill-inner,pause,cut")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(given.out.read_text())["trials"] if given.out.exists() else []
    for kind in given.kinds.split(","):
        done = sum(row["trial"] == kind for row in rows)
        for number in range(done, given.times):
            random.seed(f"{given.seed} {kind} {number}")
            world = 2 if number % 2 else 3  # one inner rank, or two that share the batches
            moment = random.uniform(0, 10) if number % 4 == 0 else None
            resume = distributed(["workers=2"]) if number % 10 == 9 else []
            if kind == "cut":
                row = cut_off(random.uniform(0, 3), given.timeout)
            elif kind == "pause":
                row = harmed("pause", random.randrange(world), world, moment, given.timeout, resume)
            else:
                rank = world - 1 if kind == "kill-curvature" else random.randrange(world - 1)
                row = harmed("kill", rank, world, moment, given.timeout, resume)
            row = {"trial": kind, "good": good(row), **row}
            rows.append(row)
            print(f"{kind} {number + 1}: {'good' if row['good'] else row}", file=sys.stderr, flush=True)
            summary = {
                name: {
                    "trials": len(some),
                    "good": sum(row["good"] for row in some),
                    "longest_seconds": max(row["seconds"] for row in some),
                }
                for name in dict.fromkeys(row["trial"] for row in rows)
                if (some := [row for row in rows if row["trial"] == name])
            }
            content = {"environment": environment(torch.device("cpu")), "summary": summary, "trials": rows}
            given.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
