"""Every file operation of a run made to fail in turn: is the last good checkpoint kept and named, and nothing half-written?

    python -m benchmarks.file_faults benchmarks/results/file-faults-cpu.json --jobs 2

A preloaded library (failing.c; it takes a C compiler and Linux) makes the n-th file operation of a run fail with an errno, for
n = 1, 2, ... until none is left, and for each errno. Covered are opening, reading, writing (of which half is written), syncing
to disk, renaming, removing, making folders and locking, by Python itself and by safetensors and matplotlib. Each trial is a
forked process in a folder of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

import nhgd
from benchmarks.environment import environment
from nhgd._results import folder
from nhgd.checkpoint import SavedCheckpoint, exists
from nhgd.cli._program import app
from nhgd.plot.png import write_png
from nhgd.task import Quadratic
from tests.histories import CLOCKED

ERRNOS = ("ENOSPC", "EIO", "EDQUOT", "ESTALE", "EACCES")
BEFORE, LAST = 3, 6  # outer steps: of the run that lies there already, and of the one that goes on


def instance() -> nhgd.task.Instance:
    return Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))


def started(path: Path, resume: bool = False, **settings: Any) -> nhgd.Solver:
    """A solver that keeps every step."""
    more = {"checkpoint": path, "checkpoint_every": 1, "inner_steps": 2} | settings
    return instance().start("nhgd", resume=resume, **more)


def timeless(history: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in CLOCKED} for row in history]


@cache
def unbroken(seed: int = 0) -> tuple[list[dict[str, Any]], torch.Tensor]:
    """The rows and v of a run that nothing happened to."""
    found = instance().start("nhgd", seed, inner_steps=2).run(steps=LAST)
    return timeless(found.history), found.v


@dataclass(frozen=True)
class Ended:
    """How the part of a scenario that was disturbed ended: done, or by an error; and what it said."""

    error: BaseException | None
    said: tuple[str, ...] = ()
    code: int = 0
    printed: str = ""
    solver: nhgd.Solver | None = None


def attempted(work: Callable[[], Any]) -> Ended:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            found = work()
        except BaseException as error:
            return Ended(error, tuple(str(one.message) for one in said))
    made = found if isinstance(found, nhgd.Solver) else None
    return Ended(None, tuple(str(one.message) for one in said), solver=made)


def sentence(ended: Ended) -> Iterator[str]:
    """What is wrong with how it ended."""
    error = ended.error
    if error is None:
        return
    if not isinstance(error, nhgd.NhgdError):
        yield f"{type(error).__name__} is no sentence: {error}"
    elif not str(error).strip().endswith(".") or "\n" in str(error):
        yield f"no sentence: {error}"


def kept(path: Path, ended: Ended, least: int, seeds: Sequence[int] = (0,)) -> Iterator[str]:
    """What is wrong with a folder of checkpoints: the last good one must be there, as named, and go on bit for bit."""
    names = sorted(os.listdir(path)) if path.exists() else []
    # A lock that could not be removed keeps nobody out once its holder has ended.
    odd = [name for name in names if not name.startswith("checkpoint-") and name != "lock"]
    if odd:
        yield f"left behind: {odd}"
    if not exists(path):
        if least:
            yield "no checkpoint is left"
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = SavedCheckpoint(path)
        if saved.step < least:
            yield f"the checkpoint is of step {saved.step}, and there was one of step {least}"
        said = str(ended.error or "")
        told = "The last good" in said or "still contains the earlier run" in said
        if ended.error is not None and "could not be written" in said and least and not told:
            yield f"the last good checkpoint is not named: {said}"
        if "The last good checkpoint is" in said:
            named = int(said.rsplit("outer step ", 1)[1].rstrip("."))
            if named > saved.step:
                yield f"step {named} is named and {saved.step} is there"
        seed = int(saved.document["settings"]["seed"])
        going_on = started(path, resume=True, seed=seed)
        found = going_on.run(steps=LAST)
    rows, v = unbroken(seed)
    if seed not in seeds or timeless(found.history) != rows or not torch.equal(found.v, v):
        yield "it does not go on as an unbroken run"


@dataclass(frozen=True)
class Scenario:
    """Something that is disturbed: what lies there before, what is done, and what must hold then."""

    before: Callable[[Path], Any]
    work: Callable[[Path], Callable[[], Any]]
    wrong: Callable[[Path, Ended], Iterator[str]]


def nothing(place: Path) -> None:
    pass


def earlier(place: Path, seed: int = 0) -> None:
    started(place / "c", seed=seed).run(steps=BEFORE)


def writing(place: Path) -> Callable[[], Any]:
    solver = started(place / "c", resume=True)
    return lambda: solver.run(steps=LAST)


def reading(place: Path) -> Callable[[], Any]:
    return lambda: started(place / "c", resume=True)


def after_reading(place: Path, ended: Ended) -> Iterator[str]:
    yield from sentence(ended)
    if ended.solver is not None:
        if ended.solver.loop.clock.k < BEFORE and not any(
            "continues from the previous checkpoint" in s for s in ended.said
        ):
            yield "an older checkpoint was taken without a word"
        ended.solver.close()
    yield from kept(place / "c", ended, BEFORE)


def after_writing(place: Path, ended: Ended) -> Iterator[str]:
    yield from sentence(ended)
    yield from kept(place / "c", ended, BEFORE if ended.error is not None else LAST)


def beginning(place: Path) -> Callable[[], Any]:
    return lambda: started(place / "c").run(steps=BEFORE)


def after_beginning(place: Path, ended: Ended) -> Iterator[str]:
    yield from sentence(ended)
    yield from kept(place / "c", ended, 0 if ended.error is not None else BEFORE)


def overwriting(place: Path) -> Callable[[], Any]:
    return lambda: started(place / "c", overwrite=True, seed=1).run(steps=2)


def after_overwriting(place: Path, ended: Ended) -> Iterator[str]:
    yield from sentence(ended)
    # The one of the earlier run, with three steps, or one of the new run, with one or two.
    yield from kept(place / "c", ended, 1 if ended.error is not None else 2, seeds=(0, 1) if ended.error else (1,))


def command(place: Path) -> Callable[[], Any]:
    words = ["run", "quadratic", "--preset", "quick", "--steps", "2", "--device", "cpu", "--json"]
    return lambda: spoken(
        [*words, "--out", str(place / "o"), "--checkpoint", str(place / "k"), "--checkpoint-every", "1"]
    )


def spoken(words: list[str]) -> None:
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            app(words)
    except SystemExit as end:
        raise CommandEndedError(int(end.code or 0), out.getvalue(), err.getvalue()) from None


class CommandEndedError(Exception):
    """A command has ended, with this exit code and these words."""


def after_command(place: Path, ended: Ended) -> Iterator[str]:
    if not isinstance(ended.error, CommandEndedError):
        yield f"no sentence and no exit code: {type(ended.error).__name__}: {ended.error}"
        return
    code, out, err = ended.error.args
    told = json.loads(out)
    files = sorted(path.name for path in (place / "o").iterdir()) if (place / "o").exists() else []
    if any(name.startswith(".") for name in files):
        yield f"left behind: {files}"
    for name in files:
        data = (place / "o" / name).read_bytes()
        whole = {
            "run.json": lambda data: json.loads(data)["steps"] == 2,
            "result.json": lambda data: json.loads(data)["steps"] == 2,
            # It grows with the run, so a run that fails leaves what it had.
            "history.jsonl": lambda data: len([json.loads(line) for line in data.splitlines()]) == 2 or bool(code),
            "curve.png": lambda data: data.startswith(b"\x89PNG") and b"IEND" in data[-12:],
        }.get(name)
        if whole is None or not whole(data):
            yield f"{name} is not whole"
    if code == 0 and not (
        told.get("steps") == 2 and files == ["curve.png", "history.jsonl", "result.json", "run.json"]
    ):
        yield f"done, but {files} and {told}"
    if code and (code not in (1, 2) or set(told) != {"error"} or f"Error: {told['error']}" not in err):
        yield f"exit code {code}: {told}, {err}"
    left = sorted(os.listdir(place / "k")) if (place / "k").exists() else []
    if any(not name.startswith("checkpoint-") and name != "lock" for name in left):
        yield f"left behind: {left}"
    if exists(place / "k") and SavedCheckpoint(place / "k").step not in (1, 2):
        yield "the checkpoint is of another step"
    if "The last good checkpoint" in err and not exists(place / "k"):
        yield "a checkpoint is named that is not there"


OLD = b"an older picture"


def older_picture(place: Path) -> None:
    (place / "o").mkdir()
    (place / "o" / "images.png").write_bytes(OLD)


def drawing(place: Path) -> Callable[[], Any]:
    def work() -> None:
        with folder(place / "o") as made:
            assert made is not None
            made.write_all("The pictures", lambda beside: [write_png(beside / "images.png", torch.eye(8))])

    return work


def after_drawing(place: Path, ended: Ended) -> Iterator[str]:
    yield from sentence(ended)
    if os.listdir(place / "o") != ["images.png"]:
        yield f"left behind: {os.listdir(place / 'o')}"
    data = (place / "o" / "images.png").read_bytes()
    if not (data == OLD or (data.startswith(b"\x89PNG") and b"IEND" in data[-12:])):
        yield "the picture is not whole"
    if ended.error is None and data == OLD:
        yield "there is no new picture"


SCENARIOS = {
    "writing checkpoints": Scenario(earlier, writing, after_writing),
    "reading a checkpoint": Scenario(earlier, reading, after_reading),
    "the first checkpoints": Scenario(nothing, beginning, after_beginning),
    "overwriting an earlier run": Scenario(earlier, overwriting, after_overwriting),
    "nhgd run --out --checkpoint": Scenario(nothing, command, after_command),
    "pictures": Scenario(older_picture, drawing, after_drawing),
}


def disturbed(name: str, code: str, number: int, template: Path) -> dict[str, Any]:
    """One trial, in this process: the operation of this number fails."""
    scenario, library = SCENARIOS[name], ctypes.CDLL(None)
    library.failing_last.restype = ctypes.c_char_p
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "place"
        shutil.copytree(template, place)
        work = scenario.work(place)
        library.failing_arm(os.fsencode(place), ctypes.c_long(number), ctypes.c_int(getattr(errno, code)))
        try:
            ended = attempted(work)
        finally:
            operations = library.failing_disarm()
        operation = library.failing_last().decode()
        try:
            wrong = list(scenario.wrong(place, ended))
        except BaseException as error:
            wrong = [f"{type(error).__name__}: {error}"]
        said = "" if ended.error is None else str(ended.error).replace(temporary, "DIR")
    return {
        "scenario": name,
        "errno": code,
        "number": number,
        "operation": operation,
        "operations": operations,
        "ended": "done" if ended.error is None or ended.error.args[:1] == (0,) else "sentence",
        "sentence": said[:300],
        "good": not wrong,
        **({"wrong": wrong} if wrong else {}),
    }


def forked(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a function gives in a forked process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(ours)
            with os.fdopen(theirs, "w") as pipe:
                json.dump(work(), pipe)
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"good": False, "wrong": ["the process died"], "operations": 0}


def one_after_the_other(name: str, codes: Sequence[str], stride: int = 1) -> None:
    """In a process with the library: all trials of a scenario as lines of JSON; of several errnos each operation gets one."""
    torch.set_num_threads(1)
    unbroken(), unbroken(1)
    with tempfile.TemporaryDirectory() as temporary:
        template, warm = Path(temporary) / "template", Path(temporary) / "warm"
        template.mkdir(), warm.mkdir()
        for place in (warm, template):
            SCENARIOS[name].before(place)
        ended = attempted(SCENARIOS[name].work(warm))  # what is imported late is imported here, once for all trials
        list(SCENARIOS[name].wrong(warm, ended))
        number = 1
        while True:
            code = codes[(number - 1) // stride % len(codes)]
            row = forked(lambda: disturbed(name, code, number, template))  # noqa: B023
            if row["good"] and row["operations"] < number:
                return
            print(json.dumps({"scenario": name, "errno": code, "number": number} | row), flush=True)
            number += stride
            if number > 5000:
                raise TimeoutError("There is no end of operations.")


def compiled(where: Path) -> Path:
    """The library whose operations fail."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise nhgd.InputError("This needs a C compiler called cc, gcc or clang.")
    made = where / "failing.so"
    source = Path(__file__).with_name("failing.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(made), str(source), "-ldl"], check=True)
    return made


def trials(library: Path, name: str, codes: Sequence[str], stride: int = 1) -> list[dict[str, Any]]:
    """All trials of a scenario, in processes of their own."""
    words = [sys.executable, "-m", "benchmarks.file_faults", "--within", name, "--errnos", ",".join(codes)]
    found = subprocess.run(
        [*words, "--stride", str(stride)],
        env=os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in found.stdout.splitlines()]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name in dict.fromkeys(row["scenario"] for row in rows):
        some = [row for row in rows if row["scenario"] == name]
        found[name] = {
            "trials": len(some),
            "good": sum(row["good"] for row in some),
            "operations": dict(Counter(row.get("operation", "") for row in some)),
            "ended": dict(Counter(row.get("ended", "died") for row in some)),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--errnos", default=",".join(ERRNOS))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--stride", type=int, default=1, help="fail every so many-th operation only")
    parser.add_argument("--within", help=argparse.SUPPRESS)
    given = parser.parse_args()
    codes = given.errnos.split(",")
    if given.within:
        one_after_the_other(given.within, codes, given.stride)
        return
    if given.out is None:
        parser.error("name a file for the results")
    rows: list[dict[str, Any]] = []
    lock = threading.Lock()
    with tempfile.TemporaryDirectory() as temporary:
        library = compiled(Path(temporary))

        def work(item: tuple[str, str]) -> None:
            found = trials(library, item[0], [item[1]], given.stride)
            with lock:
                rows.extend(found)
                bad = [row for row in found if not row["good"]]
                print(
                    f"{item[0]}, {item[1]}: {len(found) - len(bad)} of {len(found)} good", file=sys.stderr, flush=True
                )
                for row in bad:
                    print(row, file=sys.stderr, flush=True)

        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(work, [(name, code) for name in given.scenarios.split(",") for code in codes]))
    order = list(SCENARIOS)
    rows.sort(key=lambda row: (order.index(row["scenario"]), codes.index(row["errno"]), row["number"]))
    content = {"environment": environment(torch.device("cpu")), "summary": summary(rows), "trials": rows}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
