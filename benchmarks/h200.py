"""Everything that is measured on a GPU, one after another, each with its own limit of time.

    python -m benchmarks.h200 OUT_DIR --data DATA_DIR

It needs torch and NumPy, and pytest where it is to run the tests for a GPU. DATA_DIR holds the four IDX files of MNIST, or the
folder `mnist` with them (train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, and t10k of both).
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from pathlib import Path

TESTS = ["tests/test_dense_update.py", "tests/test_captured_gpu.py"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=145, help="seconds for all of it")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    out, data = str(given.out), str(given.data)
    timed = ["--data", data, "--eager", "0"]
    methods = "aid-identity;nhgd, products;nhgd;aid-cg-10"
    jobs = {
        "dense update": ["benchmarks.dense_update", f"{out}/dense-update-h200.json"],
        "captured": [
            *("benchmarks.captured", f"{out}/captured-h200.json", *timed, "--methods", methods),
            *("--first", "1000", "--steps", "500", "--tasks", "distillation,cleaning"),
        ],
        "tests": ["pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        "floor": [
            *("benchmarks.floor", f"{out}/floor-h200.json", "--data", data, "--device", "cuda"),
            *("--first", "300", "--blocks", "5"),
        ],
        "PDE": ["benchmarks.captured", f"{out}/captured-pde-h200.json", *timed, "--methods", "", "--tasks", "pde"],
    }
    if importlib.util.find_spec("pytest") is None:
        del jobs["tests"]
    began, failed = time.monotonic(), 0
    for name, words in jobs.items():
        left = given.limit - (time.monotonic() - began)
        if left < 5:
            print(f"== {name}: no time left", flush=True)
            failed += 1
            continue
        started = time.monotonic()
        try:
            code = subprocess.run([sys.executable, "-m", *words], timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        failed += code != 0
        print(f"== {name}: exit code {code} after {time.monotonic() - started:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
