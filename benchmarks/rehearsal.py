"""A rehearsal of publication: build sdist and wheel, install them into empty environments, and run `nhgd demo` from there.

    python -m benchmarks.rehearsal --python python3.10 --python python3.11 --python python3.12 --python python3.13 \\
        --out benchmarks/results/rehearsal-cpu.json

For each Python: torch alone first, then the wheel without extras, whose core must import and run and whose command must say
what it lacks; then with the command line, from which the demo runs in an empty folder. Needs the network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

import nhgd
from benchmarks.environment import environment

ROOT = Path(__file__).parents[1]
CORE = """
import torch, nhgd
problem = nhgd.Bilevel(lambda theta, v, x: (theta - v).square().expand(len(x)), lambda theta, v, x: (theta - 3).square(),
                       theta=torch.tensor(0.0), v=torch.tensor(0.0))
data = [torch.zeros(4)]
print(round(float(nhgd.Solver(problem, data, data, method="aid-cg", outer_lr=0.3).run(steps=50).v), 3))
"""


def run(*command: str | Path, code: int = 0, **more: Any) -> subprocess.CompletedProcess[str]:
    """A command that must end with this code, and knows nothing of the repository."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=around, **more)
    if done.returncode != code:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}")
    return done


def built(folder: Path) -> tuple[Path, Path]:
    """The sdist, from the files that git knows, and the wheel that is made from it alone."""
    copy = folder / "source"
    for name in run("git", "ls-files", cwd=ROOT).stdout.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    run(sys.executable, "-m", "build", "--outdir", folder, copy)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Every file of the package is in the wheel, and nothing else; the sdist can be built from and read."""
    tracked = run("git", "ls-files", "nhgd", cwd=ROOT).stdout.split()
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert sorted(names) == sorted(tracked), set(names) ^ set(tracked)
    assert "nhgd/py.typed" in names
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {*tracked, "LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= inside
    assert not any(name.startswith(("tests/", "benchmarks/", "docs/")) for name in inside)
    assert f"nhgd-{nhgd.__version__}" in wheel.name
    assert f"nhgd-{nhgd.__version__}" in sdist.name


def rehearsed(python: str, wheel: Path, place: Path, first: str) -> dict[str, Any]:
    """Install and use the wheel under one Python; what was seen."""
    began = time.perf_counter()
    run(python, "-m", "venv", place / "venv")
    within, nhgd_command = place / "venv/bin/python", place / "venv/bin/nhgd"
    pip = [within, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    empty = place / "empty"
    empty.mkdir()
    run(*pip, first)
    run(*pip, wheel)
    assert run(within, "-c", CORE, cwd=empty).stdout.strip() == "3.0"
    lacking = run(nhgd_command, "list", code=2, cwd=empty)
    assert lacking.stderr == "The command line needs: pip install 'nhgd[cli]'\n"
    run(*pip, f"{wheel}[cli]")
    installed = time.perf_counter() - began
    run(within, "-m", "pip", "check")
    assert run(nhgd_command, "--version", cwd=empty).stdout == f"nhgd {nhgd.__version__}\n"
    began, used = time.perf_counter(), processor_seconds()
    demo = json.loads(run(nhgd_command, "demo", "--json", cwd=empty).stdout)
    took, used = time.perf_counter() - began, processor_seconds() - used
    assert (empty / demo["report"]).read_text().startswith("<!DOCTYPE html>")
    versions = run(within, "-c", "import sys, torch; print(sys.version.split()[0], torch.__version__)").stdout.split()
    return {
        "python": versions[0],
        "torch": versions[1],
        "seconds_to_install": round(installed, 1),
        "seconds_of_the_demo": round(took, 1),
        "processor_seconds_of_the_demo": round(used, 1),
        "demo": demo,
    }


def processor_seconds() -> float:
    """What ended child processes have computed: unlike the clock, it hardly depends on who else uses the machine."""
    times = os.times()
    return times.children_user + times.children_system


def main() -> None:
    """Build, check, and rehearse under each Python."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", help="an interpreter; may be given several times")
    parser.add_argument("--first", default="torch==2.13.0", help="what pip installs first")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = built(Path(folder))
        check_contents(sdist, wheel)
        print(f"{sdist.name} and {wheel.name}, {wheel.stat().st_size // 1024} KiB")
        for n, python in enumerate(given.python or [sys.executable]):
            place = Path(folder) / str(n)
            place.mkdir()
            row = rehearsed(python, wheel, place, given.first)
            rows.append(row)
            print(f"{row['python']}, torch {row['torch']}: demo in {row['seconds_of_the_demo']} s", flush=True)
            found = {"environment": environment(torch.device("cpu")), "wheel": wheel.name, "rows": rows}
            if given.out is not None:
                given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
