"""Libraries for bilevel problems side by side: what an outer step costs, what 15 seconds buy, and how right a hypergradient is.

    python -m benchmarks.rivals install ENVIRONMENTS
    python -m benchmarks.rivals run benchmarks/results/rivals-cpu.json --environments ENVIRONMENTS --data DATA_DIR
    python -m benchmarks.rivals draw docs/rivals.png

Each library is installed from the package index into an environment of its own, with torch held at one version; those that
cannot be installed are named with the reason. The job is that of benchmarks/rival_job.py: MNIST with half of its labels drawn
anew, a weight for each of 50,000 samples, a linear softmax model, ten inner steps on batches of 1,024, plain steps of v whose
size moves the weights that the first hypergradient touches by 1 in the mean (by 0.3 for all ten batches).

Every participant is a process of its own on one thread (benchmarks/rival_worker.py). All of them are kept on one processor and
take blocks of outer steps in turns, until each has used so many CPU seconds. Reading, compiling and the first step, which
measures the size of the others, do not count. After each block the weights are judged by the area under the curve, outside of
the clock. `ratio` is the CPU time of an outer step over that of the loop written by hand, which gathers its batches by index.

A method whose solver is wrong may still be quick, so the hypergradient of a small problem is compared with the exact one: 200
samples, 20 features, 10 classes, at its optimum, with 10 products where the solver takes products.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import rival_job
from benchmarks.environment import environment
from benchmarks.zoo.words import numbers

TORCH = "torch==2.13.0"
LIBRARIES = {
    "torchopt": [TORCH, "torchopt"],
    "betty-ml": [TORCH, "betty-ml"],
    "higher": [TORCH, "higher"],
    "boat-torch": [TORCH, "boat-torch"],
    "hypergrad": [TORCH, "hypergrad"],
    "hypertorch": [TORCH, "hypertorch"],
    "jaxopt": ["jax", "jaxopt"],
}
OWN = ""  # the environment of this process
PARTICIPANTS = {
    "by hand": OWN,
    "TorchOpt CG": "torchopt",
    "Betty CG": "betty-ml",
    "higher unroll": "higher",
    "jaxopt CG": "jaxopt",
    "nhgd": OWN,
    "nhgd, eager": OWN,
}
NOT_RUN = {
    "boat-torch": "installs; no adapter is written for it, whose methods are chosen by JSON files",
    "hypergrad": "installs; no adapter is written for it",
}
TARGETS = (0.944, 0.96)


def install(folder: Path) -> None:
    """An environment for each library; the outcome of pip in installed.json."""
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n", encoding="utf-8")
    found: dict[str, str] = {}
    for name, packages in LIBRARIES.items():
        place = folder / name
        if not (place / "bin/python").exists():
            venv.create(place, with_pip=True)
        words = ["-m", "pip", "install", "--quiet", "-c", str(constraints), "numpy", *packages]
        done = subprocess.run([str(place / "bin/python"), *words], capture_output=True, text=True, check=False)
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        found[name] = "installed" if done.returncode == 0 else errors[0][:300] if errors else "pip failed"
        print(name, found[name], flush=True)
    (folder / "installed.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


class Worker:
    """A participant's process."""

    def __init__(self, name: str, environments: Path, job: Path) -> None:
        library = PARTICIPANTS[name]
        python = str(environments / library / "bin/python") if library else sys.executable
        script = Path(__file__).with_name("rival_worker.py")
        settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "" if library else str(script.parent.parent)}
        self.name = name
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(script), name, str(job)],
            env=settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, words: str) -> dict[str, Any]:
        """The answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(words + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            while line and not line.startswith("{"):  # what the library itself prints
                line = self.process.stdout.readline()
        except OSError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the process ended"}
        return answer

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.wait(30)


def judged(worker: Worker, job: rival_job.Job) -> dict[str, float]:
    """What the weights and the model are worth by now."""
    answer = worker.ask("state")
    with np.load(answer["file"]) as state:
        theta, v = torch.from_numpy(state["theta"]), torch.from_numpy(state["v"])
    right = F.linear(job.test[0], theta).argmax(1) == job.test[1]
    return {
        "seconds": answer["seconds"],
        "auc": rival_job.area(v, job.right),
        "test_accuracy": float(right.double().mean()),
    }


def raced(seed: int, names: Sequence[str], given: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """One seed: all participants in turns."""
    job = rival_job.load(given.data, seed)
    path = folder / f"job-{seed}.npz"
    (x, y), (outer_x, outer_y) = job.train, job.trusted
    np.savez(path, x=x.numpy(), y=y.numpy(), outer_x=outer_x.numpy(), outer_y=outer_y.numpy())
    workers = {name: Worker(name, given.environments, path) for name in names}
    runs: dict[str, dict[str, Any]] = {}
    for name, worker in workers.items():
        answer = worker.ask("size 1")
        runs[name] = {"name": name, "seed": seed, "curve": [], "steps": 0} | answer
    active = [name for name in names if "error" not in runs[name]]
    while active:
        for name in list(active):
            run = runs[name]
            answer = workers[name].ask(f"steps {given.block}")
            if "error" in answer:
                run |= answer
                active.remove(name)
                continue
            run["steps"] += given.block
            run["curve"].append(judged(workers[name], job))
            if answer["seconds"] >= given.seconds:
                active.remove(name)
    for worker in workers.values():
        worker.close()
    path.unlink()
    for run in runs.values():
        if run["curve"]:
            run |= {"milliseconds": 1e3 * run["curve"][-1]["seconds"] / run["steps"]} | run["curve"][-1]
            half = len(run["curve"]) // 2
            later = run["curve"][-1]["seconds"] - run["curve"][half - 1]["seconds"] if half else 0.0
            run["later_milliseconds"] = 1e3 * later / ((len(run["curve"]) - half) * given.block) if half else None
            for target in TARGETS:
                reached = [point["seconds"] for point in run["curve"] if point["auc"] >= target]
                run[f"seconds_to_{target}"] = reached[0] if reached else None
    return list(runs.values())


def small_problem(path: Path) -> torch.Tensor:
    """Write a problem at its optimum; returns its exact hypergradient, by dense algebra in float64."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, outer_x, truth = normal(200, 20), normal(100, 20), normal(20, 10)
    y, outer_y = (x @ truth + normal(200, 10)).argmax(1), (outer_x @ truth).argmax(1)
    v = torch.rand(200, generator=generator, dtype=torch.float64) + 0.1

    def inner(theta: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(F.linear(x, theta.reshape(10, 20)), y, reduction="none")
        return (v * losses).mean() + 1e-4 * theta.square().sum()

    def hessian(theta: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.autograd.functional.hessian(lambda t: inner(t, v), theta)
        return found

    theta = torch.zeros(200, dtype=torch.float64)
    for _ in range(50):
        gradient = torch.func.grad(inner)(theta, v)
        theta = theta - torch.linalg.solve(hessian(theta), gradient)
    assert float(torch.func.grad(inner)(theta, v).norm()) < 1e-10
    u = torch.func.grad(lambda t: F.cross_entropy(F.linear(outer_x, t.reshape(10, 20)), outer_y))(theta)
    solved = torch.linalg.solve(hessian(theta), u)
    exact = -torch.func.grad(lambda w: torch.func.grad(inner)(theta, w) @ solved)(v)
    rate = 1 / torch.linalg.eigvalsh(hessian(theta))[-1]
    arrays = {
        "rate": rate,
        "x": x,
        "y": y,
        "outer_x": outer_x,
        "outer_y": outer_y,
        "theta": theta.reshape(10, 20),
        "v": v,
    }
    np.savez(path, **{name: array.numpy() for name, array in arrays.items()})
    return exact


def accuracies(names: Sequence[str], environments: Path, folder: Path) -> dict[str, Any]:
    """The relative error and the cosine of each hypergradient, or why there is none."""
    path = folder / "small.npz"
    exact = small_problem(path)
    found: dict[str, Any] = {}
    for name in names:
        worker = Worker(name, environments, path)
        answer = worker.ask(f"hypergradient {path}")
        worker.close()
        if "error" in answer:
            found[name] = answer
            continue
        with np.load(answer["file"]) as state:
            got = torch.from_numpy(state["gradient"])
        cosine = float(got @ exact / (got.norm() * exact.norm()))
        found[name] = {"relative_error": float((got - exact).norm() / exact.norm()), "cosine": cosine}
    return found


def middle(runs: Sequence[dict[str, Any]], key: str) -> float | None:
    """The median over the seeds; a target that a seed never reached counts as later than any other."""
    values = [float("inf") if run.get(key) is None else float(run[key]) for run in runs]
    found = median(values) if values else float("inf")
    return None if found == float("inf") else found


def summary(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each participant: medians over the seeds."""
    keys = ("auc", "test_accuracy", "steps", *(f"seconds_to_{target}" for target in TARGETS))
    by_hand = {run["seed"]: run for run in result["runs"] if run["name"] == "by hand"}
    rows = []
    for name in dict.fromkeys(run["name"] for run in result["runs"]):
        runs = [run for run in result["runs"] if run["name"] == name and "milliseconds" in run]
        if not runs:
            continue
        row: dict[str, Any] = {"name": name} | {key: middle(runs, key) for key in keys}
        for key, of in (("ratio", "milliseconds"), ("later_ratio", "later_milliseconds")):
            floors = [by_hand.get(run["seed"], {}).get(of) for run in runs]  # none, if that way was not asked for
            parts = [run[of] / floor for run, floor in zip(runs, floors, strict=True) if run[of] and floor]
            row[key] = median(parts) if parts else None
        rows.append(row | result["accuracy"].get(name, {}))
    return rows


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(result: dict[str, Any]) -> str:
    """The summary in Markdown."""
    lines = [
        f"| participant | ratio | error of a hypergradient | AUC | test accuracy | CPU seconds to AUC {TARGETS[0]} |",
        "| --- " * 6 + "|",
    ]
    for row in summary(result):
        lines.append(
            f"| {row['name']} | {shown(row['ratio'], '.2f')} | {shown(row.get('relative_error'), '.1g')}"
            f" | {shown(row['auc'], '.3f')} | {shown(row['test_accuracy'], '.3f')}"
            f" | {shown(row[f'seconds_to_{TARGETS[0]}'], '.1f')} |"
        )
    return "\n".join(lines)


def draw(result: dict[str, Any], out: Path) -> None:
    """The area under the curve over CPU time, the median of the seeds."""
    from nhgd.plot.figure import figure
    from nhgd.plot.style import line_of, save, styled

    with styled():
        made = figure(6.2, 4.2)
        axes = made.subplots()
        for place, name in enumerate(dict.fromkeys(run["name"] for run in result["runs"])):
            runs = [run for run in result["runs"] if run["name"] == name and run["curve"]]
            count = min((len(run["curve"]) for run in runs), default=0)
            seconds = [median(run["curve"][i]["seconds"] for run in runs) for i in range(count)]
            areas = [median(run["curve"][i]["auc"] for run in runs) for i in range(count)]
            axes.plot(seconds, areas, label=name, **line_of(place))
        axes.set(xlabel="CPU seconds", ylabel="AUC of the weights", title="Cleaning MNIST, medians of the seeds")
        axes.legend(fontsize=7.5)
        save(made, [out])


def main(arguments: Sequence[str] | None = None) -> None:
    """Install, run or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("install").add_argument("environments", type=Path)
    drawing = commands.add_parser("draw")
    drawing.add_argument("out", type=Path)
    drawing.add_argument("--result", type=Path, default=Path("benchmarks/results/rivals-cpu.json"))
    running = commands.add_parser("run")
    running.add_argument("out", type=Path)
    running.add_argument("--environments", type=Path, required=True)
    running.add_argument("--data", type=Path, required=True, help="a folder with the IDX files of MNIST")
    running.add_argument("--seeds", type=numbers, default=[0, 1, 2, 3, 4])
    running.add_argument("--seconds", type=float, default=15.0, help="of the processor, for each participant")
    running.add_argument(
        "--block", type=int, default=10, help="outer steps of one participant before the next has its turn"
    )
    running.add_argument("--participants", default=";".join(PARTICIPANTS), help="separated by semicolons")
    given = parser.parse_args(arguments)
    if given.command == "install":
        install(given.environments)
        return
    if given.command == "draw":
        draw(json.loads(given.result.read_text(encoding="utf-8")), given.out)
        return
    names = [name for name in given.participants.split(";") if name]
    noted = given.environments / "installed.json"
    result: dict[str, Any] = {
        "environment": environment(torch.device("cpu")),
        "settings": {"seconds": given.seconds, "block": given.block, "seeds": list(given.seeds)},
        "installed": json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {},
        "not_run": NOT_RUN,
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        result["accuracy"] = accuracies(names, given.environments, folder)
        for seed in given.seeds:
            result["runs"] += raced(seed, names, given, folder)
            given.out.write_text(json.dumps(result) + "\n", encoding="utf-8")
            print(table(result), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    main()
