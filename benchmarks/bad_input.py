"""Bad input to the command line and to Python: each must end in one sentence and with the right exit code.

    python -m benchmarks.bad_input benchmarks/results/bad-input-cpu.json

A command must exit with 2, or with 1 if the machine failed; print one line on standard error that begins with "Error: ", and the
same as JSON with --json; leave nothing behind; and end within a time limit. A Python call must raise InputError (or RunError)
with a one-line sentence. Most commands run in this process; those that concern the process itself (its streams, its arguments
as bytes, its limits) run in one of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

import nhgd
from benchmarks.environment import environment
from benchmarks.fuzz import Hang, idx, limited
from nhgd.cli._program import app

LIMIT = 60.0  # seconds for one case
QUICK = ("run", "quadratic", "--preset", "quick", "--steps", "2", "--device", "cpu")
CLEAN = ("clean", "train.csv", "--label", "y", "--trusted", "trusted.csv", "--steps", "2", "--device", "cpu")
X = torch.zeros(4, 2)


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        kind: what it is about.
        given: the words of a command, a line for a shell, or a function to be called.
        code: with which a command is to exit.
        files: writes what the command is to find, into the folder it runs in.
        words: that the sentence must have.
    """

    kind: str
    given: tuple[str, ...] | str | Callable[[], Any]
    code: int = 2
    files: Callable[[], Any] | None = None
    words: str = ""


def table(**columns: Any) -> bytes:
    rows = zip(*columns.values(), strict=True)
    return "\n".join([",".join(columns), *(",".join(map(str, row)) for row in rows), ""]).encode()


def good(rows: int = 60, seed: int = 0) -> dict[str, list[Any]]:
    draw = np.random.default_rng(seed)
    size = draw.normal(size=rows)
    return {
        "size": list(size.round(3)),
        "colour": list(draw.choice(["red", "blue"], rows)),
        "y": list((size > 0).astype(int)),
    }


def tables(train: bytes | None = None, trusted: bytes | None = None) -> Callable[[], None]:
    def write() -> None:
        Path("train.csv").write_bytes(table(**good()) if train is None else train)
        Path("trusted.csv").write_bytes(table(**good(30, 1)) if trusted is None else trusted)

    return write


def images(spoil: Callable[[bytes], bytes], name: str = "train-images-idx3-ubyte") -> Callable[[], None]:
    def write() -> None:
        Path("data").mkdir()
        for part, count in (("train", 60), ("t10k", 20)):
            pixels = np.random.default_rng(0).integers(0, 256, (count, 6, 6)).astype(np.uint8)
            for kind, array in (("images-idx3", pixels), ("labels-idx1", (np.arange(count) % 10).astype(np.uint8))):
                file = f"{part}-{kind}-ubyte"
                Path("data", file).write_bytes(spoil(idx(array)) if file == name else idx(array))

    return write


def odd_files(place: str) -> Callable[[], None]:
    """A pipe, a socket, a folder and links to devices, where a file should be."""

    def write() -> None:
        tables()()
        if place == "pipe":
            os.mkfifo("odd")
        elif place == "socket":
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind("odd")
        elif place == "folder":
            Path("odd").mkdir()
        elif place == "dangling link":
            Path("odd").symlink_to("nowhere")
        elif place == "loop":
            Path("odd").symlink_to("odd")
        else:
            Path("odd").symlink_to(place)

    return write


def commands() -> Iterator[Case]:
    """Commands that run in this process."""
    for words in (
        ("lst",),
        ("runn", "l2"),
        ("run",),
        ("run", "no such"),
        ("check", "x"),
        ("bench", "x"),
        ("data", "x"),
    ):
        yield Case("names", words)
    for words in (
        ("data", "fetch", "mnits"),
        ("run", "l2", "--method", "nghd"),
        ("run", "l2", "--preset", "qick"),
        ("clean",),
    ):
        yield Case("names", words)
    for words in (
        ("--execution", "inlin"),
        ("--device", "gpu"),
        ("--device", "cuda:99"),
        ("--device", "cpu:1"),
        ("--no-such", "1"),
    ):
        yield Case("names", (*QUICK, *words))
    for words in (
        ("check", "quadratic", "--inverses", "cgg"),
        ("check", "quadratic", "--inverses", ","),
        ("demo", "--no-such"),
    ):
        yield Case("names", words)
    for device in ("meta", "mps", "cpu:3", "xla", "cuda:7", "x", ":", "cuda:-1", "cuda:99999999999999999999"):
        yield Case("devices", (*QUICK, "--execution", f"device:{device}"))
    for option in (
        "--out",
        "--data",
        "--method",
        "--preset",
        "--execution",
        "--checkpoint",
        "--device",
        "--budget",
        "--set",
    ):
        yield Case("empty", (*QUICK, option, ""))
        yield Case("empty", (*QUICK, f"{option}="))
    for words in (("run", ""), ("",), ("clean", "", "--label", "y"), ("check", "quadratic", "--inverses", "")):
        yield Case("empty", words)
    for option, value in (
        *(("--steps", text) for text in ("0", "-1", "x", "1.5", "1e3", "")),
        *(("--seed", text) for text in ("-1", "x", str(2**63), str(2**64), "1.5", str(10**40))),
        *(("--budget", text) for text in ("0", "-1s", "x", "5d", "inf", "nan", "1e400")),
        *(("--checkpoint-every", text) for text in ("0", "-1", "x", "5 s 3")),
        *(("--max-restarts", text) for text in ("-1", "1", "x")),
    ):
        yield Case(
            "numbers",
            (*QUICK, "--checkpoint", "c", option, value) if "checkpoint" in option else (*QUICK, option, value),
        )
    for setting in (
        *(
            "dim",
            "dim=",
            "dim=x",
            "dim=0",
            "dim=-1",
            "dim=2.5",
            f"dim={10**30}",
            "=5",
            "",
            "nosuch=1",
            "inner_lr=0",
            "inner_lr=x",
        ),
        *(
            "inner_lr=nan",
            "inner_lr=inf",
            "inner_lr=-1",
            "inner_steps=0",
            "inner_steps=1.5",
            "inner_steps=True",
            "outer_lr=1e999",
        ),
        *(
            "inverse=cgg",
            "inverse.steps=0",
            "inverse.nosuch=1",
            "solver.nosuch=1",
            "method.nosuch=1",
            "task.nosuch=1",
            "x.y.z=1",
        ),
        *(
            "batches=0",
            "batches=x",
            "project=-1",
            "project=x",
            "project_v=1,0",
            "project_v=1",
            "project_v=a,b",
            "outer_clip=0",
        ),
        *(
            "inner_optimizer=addam",
            "max_lag=1",
            "max_lag=x",
            "execution.nosuch=1",
            "condition=0.5",
            "noise=-1",
            "l2=-1",
            "rho=nan",
        ),
        *("warm_start=maybe", "metrics_every=0", "inner_optimizer=5", "samples=0", "outer_dim=0", "batch=0", "l2=0 0"),
    ):
        yield Case("settings", (*QUICK, "--set", setting))
    long = "x" * 300
    for option in ("--out", "--checkpoint"):
        for name in (long, "/".join(["x" * 200] * 30), f"a/{long}/b", "é" * 200):
            yield Case("long names", (*QUICK, option, name))
        yield Case("places", (*QUICK, option, "train.csv"), files=tables())
        yield Case("places", (*QUICK, option, "train.csv/x"), files=tables())
        yield Case("places", (*QUICK, option, "/proc/nhgd"))
        yield Case("places", (*QUICK, option, "/dev/null"))
    for name in ("result.json", "history.jsonl", "curve.png"):
        yield Case("places", (*QUICK, "--out", "o"), files=lambda name=name: Path("o", name).mkdir(parents=True))
    for words in (("--resume",), ("--checkpoint-every", "5"), ("--data", "."), ("--resume", "--checkpoint-every", "5")):
        yield Case("options", (*QUICK, *words))
    for out in (
        long,
        "x" * 252 + ".csv",
        "/".join(["y" * 200] * 30),
        ".",
        "train.csv",
        "/proc/w.csv",
        "/dev/full",
        "train.csv/w",
    ):
        yield Case("clean --out", (*CLEAN, "--out", out), files=tables())
    for kind in ("pipe", "socket", "folder", "/dev/zero", "/dev/null", "/dev/full", "dangling link", "loop"):
        yield Case("no files", ("clean", "odd", "--label", "y"), files=odd_files(kind))
        yield Case("no files", (*CLEAN, "--trusted", "odd"), files=odd_files(kind))
        yield Case("no files", ("run", "cleaning", "--set", "dataset=mnist", "--data", "odd"), files=odd_files(kind))
    many = {f"c{i}": ["1", "2"] for i in range(3000)} | {"y": ["a", "b"]}
    for train in (
        *(
            b"",
            b"\n\n",
            b"a,b,y\n",
            b"a,b\n1,2,3\n",
            b"a,a,y\n1,2,3\n",
            b"a,,y\n1,2,3\n",
            b"a;b;y\n1;2;3\n",
            b"a\tb\n1\t2\n",
        ),
        *(
            b"\xff\xfe",
            b"a,y\n\0,1\n",
            b'a,y\n"1,2\n',
            b"a,y\n\xe9,1\n",
            b"\x1f\x8b\x08\0",
            b"PK\x03\x04",
            b"\x89PNG\r\n",
        ),
        *(
            table(size=["x"] * 3, colour=["1", "2", "3"], y=[1, 1, 1]),
            table(y=[0, 1] * 9),
            b"size,colour,y\n" + b"9" * 200_000,
        ),
        table(**good() | {"size": ["1e99"] * 60}),
        table(**good() | {"size": ["1e300"] * 60}),
        table(**good() | {"size": ["inf"] * 60}),
        table(**good() | {"size": [""] * 60}),
        table(**good() | {"y": list(range(60))}),
        table(**good() | {"weight": [1] * 60}),
        table(**many),
    ):
        yield Case("tables", CLEAN, files=tables(train=train))
    for trusted in (
        b"",
        b"y\n1\n",
        table(**good() | {"size": ["1e40"] * 60}),
        table(**good() | {"y": ["maybe"] * 60}),
        b"\0" * 100,
    ):
        yield Case("tables", CLEAN, files=tables(trusted=trusted))
    for words in (
        ("--label", "Y"),
        ("--ignore", "x"),
        ("--categorical", "x"),
        ("--ignore", "y"),
        ("--steps", "0"),
        ("--seed", "-1"),
    ):
        yield Case("clean", (*CLEAN, *words), files=tables())
    huge = b"\0\0\x08\x03" + struct.pack(">III", 2**20, 1024, 2)
    for spoil in (
        *(
            lambda b: b"",
            lambda b: b[:3],
            lambda b: b[:10],
            lambda b: b[:-1],
            lambda b: b + b"x",
            lambda b: b"\x89PNG" + b,
        ),
        *(
            lambda b: b"\0\0\x0d" + b[3:],
            lambda b: b[:4] + b"\xff" * 12 + b[16:],
            lambda b: huge,
            lambda b: b"\x1f\x8b" + b,
        ),
        *(
            lambda b: b[:4] + b"\0" * 12,
            lambda b: b"\0\0\x08\0",
            lambda b: b"\0\0\x08\xff" + b[4:],
            lambda b: b"\0" * 5000,
        ),
    ):
        yield Case("images", ("run", "cleaning", "--set", "dataset=mnist", "--data", "data"), files=images(spoil))
        yield Case("images", ("run", "distillation", "--set", "dataset=mnist", "--data", "data"), files=images(spoil))
    yield Case("places", ("run", "cleaning", "--set", "dataset=mnist", "--data", "~nobody-at-all/x"))
    odd = "a\nb\x1b[31m\r\u202e\x07"
    for words in (
        ("run", odd),
        (odd,),
        (*QUICK, "--set", f"{odd}=1"),
        (*QUICK, "--set", f"dim={odd}"),
        ("clean", odd, "--label", "y"),
    ):
        yield Case("characters", words)
    header = table(**{'"a\nb\x1b[31m"': [1, 2], "y": [0, 1]})
    yield Case("characters", CLEAN, files=tables(train=header))
    yield Case("characters", ("run", "cleaning", "--data", odd))
    for size in (10**8, 10**11, 10**14):
        yield Case("memory", (*QUICK, "--set", f"dim={size}"), code=1)
    yield Case("memory", (*QUICK, "--set", f"samples={10**13}"), code=1)
    yield Case("memory", ("run", "l2", "--set", "dataset=synthetic", "--set", f"features={10**12}"), code=1)


def lines() -> Iterator[Case]:
    """Lines for a shell, each in a process of its own."""
    for line in ("list", "list --json", "--version", "data --help"):
        yield Case("full output", f"{line} > /dev/full", code=1)
    yield Case("closed output", "list >&-", code=1)
    yield Case("closed output", "lst 2>&-")
    yield Case("closed output", "lst --json 2>&-")
    yield Case("closed output", "lst <&- >&-")
    for line in (
        "run $'\\xff'",
        "$'\\xff'",
        "run quadratic --set $'dim=\\xff'",
        "clean $'\\xff' --label y",
        "run l2 --data $'\\xff'",
    ):
        yield Case("bytes", line)
    yield Case("limits", "run quadratic --preset quick --steps 1 --set dim=100000000", code=1)


def problem(**changes: Any) -> nhgd.Bilevel:
    given = {
        "inner": lambda theta, v, x: (theta - v).square().expand(len(x)),
        "outer": lambda theta, v, x: (theta - 3).square(),
        "theta": torch.tensor(0.0),
        "v": torch.tensor(0.0),
    }
    return nhgd.Bilevel(**(given | changes))


def solver(**settings: Any) -> nhgd.Solver:
    return nhgd.Solver(**({"problem": problem(), "inner_data": [X], "outer_data": [X], "method": "aid-cg"} | settings))


def calls() -> Iterator[Case]:
    """Calls of Python."""
    for name in ("KFAC", "EKFAC", "FisherDense", "FisherDiagonal", "FisherWindow"):
        for setting in ({"beta": "x"}, {"damping": "x"}, {"fisher": 5}, {"damping": [1]}, {"beta": torch.zeros(2)}):
            yield Case("inverses", lambda name=name, setting=setting: getattr(nhgd.inverse, name)(**setting))
    for inverse in (5, None, "cg", nhgd.inverse.CG, object()):
        yield Case("inverses", lambda inverse=inverse: nhgd.inverse.Refined(inverse))
        yield Case("algorithms", lambda inverse=inverse: nhgd.algorithm.AID(inverse=inverse))
    for settings in (
        *({"execution": value} for value in (5, None, nhgd.execution.Inline, "inlin", True)),
        *({"seed": value} for value in (2**64, -1, 1.5, "1", True)),
        *({"checkpoint": value} for value in (5, b"x", "a\0b", "", "x" * 300)),
        *({"inner_steps": value} for value in (True, 0, 1.5, "x", None)),
        *({"inner_lr": value} for value in ("x", 0, -1, float("nan"), [1], torch.zeros(2))),
        *({"method": value} for value in (5, None, nhgd.algorithm.AID, "")),
        *({"problem": value} for value in (None, 5, "quadratic")),
        *({"inner_data": value} for value in (None, 5, X, "x", iter([X]), [])),
        *({"metrics": value} for value in (5, "x", {})),
        *(
            {name: value}
            for name in ("project", "project_v", "inner_optimizer", "outer_clip", "max_lag")
            for value in ("x", object())
        ),
    ):
        yield Case("Solver", lambda settings=settings: solver(**settings))
    for found in (None, 5, [1], "a", {1: 2}):
        yield Case("Solver", lambda found=found: solver(metrics=lambda theta, v: found).run(steps=1))
    for given in ({}, {"steps": True}, {"steps": "x"}, {"steps": 0}, {"budget": "x"}, {"budget": []}, {"plateau": 1.5}):
        yield Case("Solver", lambda given=given: solver().run(**given))
    for changes in (
        *({"inner": value} for value in (None, 5, "x")),
        *(
            {"theta": value}
            for value in (
                None,
                5,
                [X],
                torch.zeros(2, device="meta"),
                torch.zeros(2).to_sparse(),
                torch.zeros(2).long(),
            )
        ),
        *({"v": value} for value in (None, {}, {"a": 5}, torch.eye(2).to_sparse(), torch.tensor(float("nan")))),
        *({"l2": value} for value in ("x", -1, None, True, torch.tensor(1.0))),
        *({"likelihood": value} for value in ("x",)),
    ):
        yield Case("Bilevel", lambda changes=changes: problem(**changes))
    for call in (nhgd.plan, lambda given: nhgd.check(given, X, X), lambda given: nhgd.hypergradient(given, X, X)):
        for given in (None, 5, X, "quadratic"):
            yield Case("functions", lambda call=call, given=given: call(given))
    for settings in ({"inverse": 5}, {"estimator": 5}, {"seed": 2**64}, {"inverse": "cgg"}, {"inner_data": 5}):
        yield Case("functions", lambda settings=settings: nhgd.hypergradient(problem(), X, X, **settings))
    for arrays in (
        (),
        (5,),
        ("x",),
        (None,),
        (X, X[:2]),
        (X[:0],),
        (torch.tensor(1.0),),
        (X * float("nan"),),
        (["a", "b"],),
    ):
        yield Case("Data", lambda arrays=arrays: nhgd.Data(*arrays))
    for settings in ({"batch": 0}, {"batch": True}, {"batch": "x"}, {"shuffle": "x"}):
        yield Case("Data", lambda settings=settings: nhgd.Data(X, **settings))
    for value in (5, None, [1.0], "x"):
        yield Case("Losses", lambda value=value: nhgd.Losses(value))
    for make in (
        *(lambda: nhgd.schedule.Power("x", 1), lambda: nhgd.schedule.Decay(None), lambda: nhgd.schedule.ByStep(5)),
        *(lambda: nhgd.task.Cleaning(noise="x"), lambda: nhgd.task.PDE(width="x"), lambda: nhgd.task.L2(samples=True)),
        *(lambda: nhgd.task.Quadratic.preset("x"), lambda: nhgd.task.Quadratic.preset(5), lambda: nhgd.task.resolve(5)),
        lambda: nhgd.task.Quadratic().build("x", torch.device("cpu")),
        *(
            lambda: nhgd.LabelCleaner(steps="x").fit(X, [0, 1, 0, 1]),
            lambda: nhgd.DatasetDistiller(lr="x").fit(X, [0, 1, 0, 1]),
        ),
        *(
            lambda: nhgd.execution.Thread(max_lag="x"),
            lambda: nhgd.execution.Device("meta"),
            lambda: nhgd.execution.resolve(5),
        ),
        lambda: nhgd.Solver.resume("no such folder", problem(), [X], [X]),
        lambda: nhgd.Solver.resume(5, problem(), [X], [X]),
        lambda: nhgd.Solver.resume("", problem(), [X], [X]),
    ):
        yield Case("others", make)


def judged(case: Case) -> str | None:
    """What is wrong with how a case ended, or None."""
    if callable(case.given):
        return judged_call(case.given)
    before = sorted(Path().rglob("*"))
    found = judged_line(case) if isinstance(case.given, str) else judged_command(case)
    left = [str(path) for path in sorted(Path().rglob("*")) if path not in before]
    return found or (f"left behind: {left[:3]}" if left else None)


def judged_call(call: Callable[[], Any]) -> str | None:
    try:
        with limited(LIMIT), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except (nhgd.InputError, nhgd.RunError) as error:
        return None if str(error) and "\n" not in str(error) else f"no sentence of one line: {str(error)[:200]!r}"
    except Hang:
        return f"no end within {LIMIT:.0f} s"
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "accepted"


def judged_command(case: Case) -> str | None:
    for more in ((), ("--json",)):
        try:
            with limited(LIMIT), warnings.catch_warnings():
                done = CliRunner().invoke(app, [*case.given, *more])
        except Hang:
            return f"no end within {LIMIT:.0f} s"
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            hung = isinstance(done.exception, Hang)
            return (
                f"no end within {LIMIT:.0f} s"
                if hung
                else f"{type(done.exception).__name__}: {str(done.exception)[:200]}"
            )
        wrong = judged_end(done.exit_code, done.stdout, done.stderr, case, bool(more))
        if wrong:
            return wrong
    return None


def judged_line(case: Case) -> str | None:
    here = {"PYTHONPATH": os.pathsep.join([str(Path(nhgd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    words = ["bash", "-c", f'"{sys.executable}" -m nhgd {case.given}']
    try:
        done = subprocess.run(
            words, env=os.environ | here, capture_output=True, timeout=LIMIT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return f"no end within {LIMIT:.0f} s"
    assert isinstance(case.given, str)
    silent = "2>&-" in case.given
    err = "Error: \n" if silent else done.stderr.decode(errors="replace")
    return judged_end(
        done.returncode, done.stdout.decode(), err, case, "--json" in case.given and ">" not in case.given
    )


def judged_end(code: int, out: str, err: str, case: Case, as_json: bool) -> str | None:
    """What is wrong with an exit code and two streams."""
    if "Traceback" in out + err:
        return f"traceback: {err.strip().splitlines()[-1][:200]}"
    if code != case.code:
        return f"exit code {code}, not {case.code}: {err.strip()[:200]}"
    errors = [line for line in err.splitlines() if line.startswith("Error: ")]
    others = [line for line in err.splitlines() if not line.startswith(("Error: ", "Warning: ", "Note: "))]
    if len(errors) != 1 or others:
        return f"not one sentence: {err[:300]!r}"
    if not errors[0].isprintable():
        return f"not printable: {errors[0][:200]!r}"
    if case.words not in errors[0]:
        return f"other words: {errors[0][:200]!r}"
    if as_json:
        try:
            said = json.loads(out)
        except ValueError:
            return f"no JSON: {out[:200]!r}"
        return None if list(said) == ["error"] else f"other JSON: {out[:200]!r}"
    return None if not out or isinstance(case.given, str) else f"standard output holds {out[:200]!r}"


@contextmanager
def within(folder: str) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="where the result goes, as JSON")
    parser.add_argument("--kind", help="only cases of this kind")
    given = parser.parse_args()
    out = given.out.absolute()
    torch.set_num_threads(1)
    os.environ.pop("NHGD_DATA", None)
    counts: dict[str, dict[str, int]] = {}
    wrong, slowest, began = [], (0.0, ""), time.monotonic()
    for way, cases in (("command", commands()), ("process", lines()), ("python", calls())):
        for case in cases:
            if given.kind not in (None, case.kind):
                continue
            with tempfile.TemporaryDirectory() as folder, within(folder):
                os.environ["NHGD_CACHE"] = str(Path(folder).parent / "no such cache")
                if case.files is not None:
                    case.files()
                started = time.monotonic()
                found = judged(case)
                slowest = max(slowest, (time.monotonic() - started, f"{case.kind}: {shown(case)}"))
            told = counts.setdefault(way, {}).setdefault(case.kind, 0)
            counts[way][case.kind] = told + 1
            if found is not None:
                wrong.append({"way": way, "kind": case.kind, "given": shown(case), "found": found})
                print(f"{way}, {case.kind}, {shown(case)}: {found}", flush=True)
    tries = sum(sum(kinds.values()) for kinds in counts.values())
    result = {
        "environment": environment(torch.device("cpu")),
        "tries": tries,
        "as_they_should": tries - len(wrong),
        "counts": counts,
        "seconds": time.monotonic() - began,
        "slowest": {"seconds": slowest[0], "case": slowest[1]},
        "wrong": wrong,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{tries - len(wrong)} of {tries} end as they should; the slowest took {slowest[0]:.1f} s ({slowest[1]}).")
    raise SystemExit(bool(wrong))


def shown(case: Case) -> str:
    if callable(case.given):
        values = case.given.__defaults__ or ()
        return f"line {case.given.__code__.co_firstlineno}, {', '.join(repr(value)[:60] for value in values)}"
    text = case.given if isinstance(case.given, str) else " ".join(case.given)
    return ascii(text if len(text) < 150 else f"{text[:147]}...")


if __name__ == "__main__":
    main()
