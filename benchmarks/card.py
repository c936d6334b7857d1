"""The paper's tables on one GPU, several experiments at the same time: python -m benchmarks.card PARTS OUT --data DIR

Eager outer steps leave a large GPU nearly idle, so a process for each of its host's cores shares it, by CUDA's
multi-process service where that is installed. Every method of a table has as many neighbours; how many stands in the JSON.

    fair      step sizes by search, then several seeds of equal seconds
    own       the library's own forms
    printed   the paper's settings, 1,000 outer steps or as many as fit the time

Each experiment takes the parts in their order, within the same time. The same command goes on where it was interrupted.
What is found lies in OUT, an experiment a folder, with its log.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

DATA = {"cleaning": "mnist", "distillation-5": "fashion-mnist", "distillation-100": "fashion-mnist"}
BOTH = {"longest": "25s", "jobs": "4", "beside": "12"}
SHORT = {"search": "1s", "budget": "3s", "own": "10s", "seeds": "5"} | BOTH
LONG = {"search": "2.5s", "budget": "12s", "own": "40s", "seeds": "3"} | BOTH
MARGIN = 10.0  # seconds for the runs that have begun, and for writing
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
    parser.add_argument("--further", default="", help="further options for each, such as '--quick'")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    shared = given.device.startswith("cuda") and start_sharing(given.out, surroundings)
    print(f"multi-process service: {'on' if shared else 'off'}", flush=True)
    chains = []
    for name, options in EXPERIMENTS.items():
        if not given.only or name in given.only.split(","):
            chains.append(threading.Thread(target=chain, args=(name, options, given, end, surroundings)))
            chains[-1].start()
    for one in chains:
        one.join()
    if shared:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=surroundings, timeout=3, check=False)
    return 0


def chain(name: str, options: list[str], given: argparse.Namespace, end: float, surroundings: dict[str, str]) -> None:
    """One experiment's parts, one after the other; what is not done when the time is up is ended."""
    folder = given.out / name
    folder.mkdir(parents=True, exist_ok=True)
    for part in given.parts.split(","):
        left = end - time.monotonic() - MARGIN
        if left < 4 * MARGIN:
            return
        command = [sys.executable, "-m", "nhgd.reproduce", name, "--out", str(folder), "--device", given.device]
        command += ["--only", part, "--seconds", f"{left:.0f}", *options, *given.further.split()]
        command += ["--data", str(given.data / DATA[name])] if name in DATA else []
        with (given.out / f"{name}.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=surroundings)
            try:
                code: int | str = process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()
                code = "ended when the time was up"
        print(f"{name}, {part}: {code}, {end - time.monotonic():.0f} s left", flush=True)


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
