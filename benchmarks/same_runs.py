"""Seeded runs over tasks, methods and executions, recorded once and compared bit for bit after a change.

    python -m benchmarks.same_runs record benchmarks/results/same-runs-cpu.json
    python -m benchmarks.same_runs compare benchmarks/results/same-runs-cpu.json

Each run is `nhgd run` in a process of its own, on one thread. Its metrics, its counters and its first 20 rows of history are
kept, except for clocks and the amount of traffic. Record before a change to the inside and compare after it. The numbers hold
for one machine and one torch: elsewhere, record anew from the older code.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import environment

ROWS = 20
# What a clock or the network tells.
VARIES = ("seconds", "inner_seconds", "curvature_seconds", "waited_seconds", "overlap", "largest_lag", "bytes_sent")
TEAM = "--execution distributed --set workers=2 --set curvature_ranks"
RUNS = (
    "quadratic --method nhgd",
    "quadratic --method nhgd-paper",
    "quadratic --method nhgd_single",
    "quadratic --method aid-exact",
    "quadratic --method aid-neumann",
    "quadratic --method aid-fixed_point",
    "quadratic --method aid-sgd",
    "quadratic --method aid-broyden",
    "quadratic --method aid-nystrom",
    "quadratic --method soba --set batch=40",
    "quadratic --method saba --set batch=40",
    "quadratic --method stocbio --set batch=40",
    "quadratic --method bsa --set batch=40",
    "quadratic --method alset --set batch=40",
    "quadratic --method amigo --set batch=40",
    "quadratic --method vrbo --set batch=40",
    "quadratic --method mrbo --set batch=40",
    "quadratic --method sustain --set batch=40",
    "quadratic --method ttsa --set batch=40",
    "quadratic --method fsla --set batch=40",
    "quadratic --method itd",
    "quadratic --method truncated",
    "quadratic --method f2sa",
    "quadratic --method bome",
    "cleaning --preset quick --method nhgd",
    "cleaning --preset quick --method nhgd --execution thread",
    "cleaning --preset quick --method nhgd --execution device:cpu",
    "cleaning --preset quick --method nhgd --execution distributed",
    f"cleaning --preset quick --method nhgd {TEAM}=1",
    f"cleaning --preset quick --method nhgd {TEAM}=0",
    f"cleaning --preset quick --method nhgd-window {TEAM}=1",
    f"cleaning --preset quick --method aid-cg {TEAM}=0",
    "cleaning --preset quick --method nhgd --set inner=natural",
    "cleaning --preset quick --method nhgd-refined",
    "cleaning --preset quick --method nhgd-window --execution thread",
    "cleaning --preset quick --method aid-cg",
    "cleaning --preset quick --method aid-ekfac --execution distributed",
    "cleaning --preset quick --method aid-identity",
    "cleaning --preset quick --method aid-fisher_diagonal",
    "cleaning --preset quick --method soba",
    "cleaning --preset quick --method f2sa-shared",
    "distillation --preset quick --method nhgd",
    "distillation --preset quick --method aid-cg",
    "l2 --method nhgd",
    "l2 --method aid-nystrom",
    "pde --preset quick --method nhgd",
    "pde --preset quick --method aid-cg",
)


def run(words: str, folder: Path) -> dict[str, Any]:
    """What a run says that no clock decides."""
    steps = "6" if words.startswith("pde") else "20"
    command = [sys.executable, "-m", "nhgd", "run", *words.split(), "--seed", "3", "--steps", steps, "--json"]
    done = subprocess.run(
        [*command, "--out", str(folder)], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        return {"failed": done.stderr.strip()[-500:]}
    result = json.loads(done.stdout)
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()[:ROWS]]
    return {
        "initial": result["initial"],
        "metrics": result["metrics"],
        "oracle_calls": result["oracle_calls"],
        "history": [{key: value for key, value in row.items() if key not in VARIES} for row in rows],
    }


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two records differ, as paths with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        return [text for key in keys for text in differences(one.get(key), other.get(key), f"{place}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [
            text for i, (a, b) in enumerate(zip(one, other, strict=True)) for text in differences(a, b, f"{place}/{i}")
        ]
    same = one == other or (one != one and other != other)
    return [] if same else [f"{place}: {one} became {other}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="runs whose words contain this text")
    given = parser.parse_args()
    chosen = [words for words in RUNS if given.only in words]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(given.jobs) as pool:
        found = dict(
            zip(chosen, pool.map(lambda i: run(chosen[i], Path(temporary) / str(i)), range(len(chosen))), strict=True)
        )
    if given.what == "record":
        machine = json.dumps(environment(torch.device("cpu")))
        lines = ",\n".join(f"{json.dumps(words)}: {json.dumps(kept)}" for words, kept in found.items())
        given.file.write_text(f'{{"environment": {machine},\n"runs": {{\n{lines}\n}}}}\n')
        print(json.dumps({words: "failed" in kept for words, kept in found.items() if "failed" in kept}))
        return 0
    before = json.loads(given.file.read_text())["runs"]
    wrong = 0
    for words, kept in found.items():
        told = differences(before.get(words), kept)
        wrong += bool(told)
        print(f"{words}: {'same' if not told else f'{len(told)} differences'}")
        for text in told[:5]:
            print(f"    {text[:300]}")
    print(f"{len(found) - wrong} of {len(found)} runs are the same")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
