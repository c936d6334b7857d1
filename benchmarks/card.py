"""The paper's tables on one GPU, several experiments at the same time: python -m benchmarks.card PARTS OUT --data DIR

Eager outer steps leave a large GPU nearly idle, so a process for each of its host's cores shares it, by CUDA's
multi-process service where that is installed. Every method of a table has as many neighbours; how many stands in the JSON.

    fair      step sizes by search, then several seeds of equal seconds
    own       the library's own forms
    printed   the paper's settings, 1,000 outer steps or as many as fit the time

Each experiment takes the parts in their order, within the same time. The same command goes on where it was interrupted.
What is found lies in OUT, an experiment a folder, with its log; `python -m benchmarks.reproduction OUT` takes it over. With
--tuned benchmarks/results/reproduction the fair part takes the step sizes that were found before, but for the methods of
--again. Runs by the paper's settings share their time: each has at least its part of it, and what others leave.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

DATA = {"cleaning": "mnist", "distillation-5": "fashion-mnist", "distillation-100": "fashion-mnist"}
BOTH = {"longest": "1000s"}  # of the printed settings; a run's share of the time ends it before
SHORT = {"search": "1s", "budget": "3s", "own": "10s", "seeds": "5"} | BOTH
LONG = {"search": "2.5s", "budget": "12s", "own": "40s", "seeds": "3"} | BOTH
MARGIN = 12.0  # seconds for the runs that have begun, and for writing
PATIENCE = 30.0  # seconds for putting a table together once the time is up
# What `python -m nhgd.reproduce` is given.
EXPERIMENTS: dict[str, list[str]] = {
    name: [word for option, value in options.items() for word in (f"--{option}", value)]
    for name, options in {**dict.fromkeys(DATA, SHORT), "pde": LONG}.items()
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", help="names of parts, by commas")
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="the folder of mnist and fashion-mnist")
    parser.add_argument("--seconds", type=float, default=600.0, help="for all parts together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="experiments, by commas; default: all")
    parser.add_argument("--jobs", default="4,3,4,5", help="runs at the same time, for each of the experiments taken")
    parser.add_argument("--skip", default="", help="parts of an experiment, such as pde:fair, by commas")
    parser.add_argument("--printed-seeds", default="1", help="of the runs by the paper's settings")
    parser.add_argument("--tuned", type=Path, help="a folder of earlier results, whose step sizes are taken")
    parser.add_argument("--again", default="", help="methods that are searched for again, by commas")
    parser.add_argument("--further", default="", help="further options for each, such as '--quick'")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    shared = given.device.startswith("cuda") and start_sharing(given.out, surroundings)
    print(f"multi-process service: {'on' if shared else 'off'}", flush=True)
    chains = []
    taken = [name for name in EXPERIMENTS if not given.only or name in given.only.split(",")]
    jobs = [int(count) for count in given.jobs.split(",")][: len(taken)]
    jobs += [jobs[-1]] * (len(taken) - len(jobs))
    for name, count in zip(taken, jobs, strict=True):
        own = [*EXPERIMENTS[name], "--jobs", str(count), "--beside", str(sum(jobs) - count), *known(name, given)]
        chains.append(threading.Thread(target=chain, args=(name, own, given, end, surroundings)))
        chains[-1].start()
    for one in chains:
        one.join()
    if shared:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=surroundings, timeout=3, check=False)
    return 0


def known(name: str, given: argparse.Namespace) -> list[str]:
    """The options for step sizes that an earlier result has."""
    path = None if given.tuned is None else given.tuned / f"{name}.json"
    if path is None or not path.exists():
        return []
    methods = [row["method"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["fair"]]
    again = [method for method in given.again.split(",") if method in methods]
    return ["--tuned", str(path), *(["--again", ",".join(again)] if again else [])]


def chain(name: str, options: list[str], given: argparse.Namespace, end: float, surroundings: dict[str, str]) -> None:
    """One experiment's parts, one after the other; what is not done when the time is up is ended."""
    folder = given.out / name
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "nhgd.reproduce", name, "--out", str(folder), "--device", given.device, *options]
    command += ["--data", str(given.data / DATA[name])] if name in DATA else []
    command += given.further.split()
    with (given.out / f"{name}.log").open("a") as log:
        for part in given.parts.split(","):
            left = end - time.monotonic() - MARGIN
            if f"{name}:{part}" in given.skip.split(",") or left < MARGIN:
                continue
            own = ["--only", part, "--seconds", f"{left:.0f}"]
            own += ["--seeds", given.printed_seeds] if part == "printed" else []
            process = subprocess.Popen([*command, *own], stdout=log, stderr=log, env=surroundings)
            try:
                code: int | str = process.wait(max(1.0, end - MARGIN / 2 - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                code = "ended when the time was up"
            print(f"{name}, {part}: {code}, {end - time.monotonic():.0f} s left", flush=True)
        # No run begins any more: the table of all parts is put together from the runs that ended.
        with suppress(subprocess.TimeoutExpired):
            subprocess.run([*command, "--seconds", "0.001"], stdout=log, stderr=log, env=surroundings, timeout=PATIENCE)


def start_sharing(out: Path, surroundings: dict[str, str]) -> bool:
    """Start CUDA's multi-process service; whether it runs."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        return False
    for name in ("pipe", "log"):
        (out / "mps" / name).mkdir(parents=True, exist_ok=True)
        surroundings[f"CUDA_MPS_{name.upper()}_DIRECTORY"] = str((out / "mps" / name).resolve())
    return subprocess.run(["nvidia-cuda-mps-control", "-d"], env=surroundings, timeout=20, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
