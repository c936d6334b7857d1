"""What is kept of a run stays: full disks, second runs, damage, signals, forged files."""

from __future__ import annotations

import copy
import errno
import gc
import hashlib
import json
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import nhgd
from benchmarks import file_faults
from nhgd._results import Folder
from nhgd.checkpoint import SavedCheckpoint, disk, files, lock
from nhgd.checkpoint.files import newest, numbered
from nhgd.execution import Thread
from nhgd.task import Quadratic
from tests.commands import answer, invoke, refusal, strict_json
from tests.test_checkpoint import RUN, Setting, assert_same, classifier, quadratic, rewritten, timeless

pytestmark = pytest.mark.skipif(os.name != "posix", reason="locks, signals and special files of POSIX")


def kept(path: Path, steps: int = 4, kind: Setting | None = None, **settings: Any) -> Setting:
    """A run of so many steps, every one of which was kept."""
    found = kind or quadratic("nhgd")
    found.solver(checkpoint=path, checkpoint_every=1, **settings).run(steps=steps)
    return found


def names(path: Path) -> list[str]:
    return sorted(place.name for place in path.iterdir())


# Disks that fail.


@pytest.fixture(scope="module")
def failing(tmp_path_factory):
    if not sys.platform.startswith("linux") or shutil.which("cc") is None:
        pytest.skip("lets operations of Linux fail, by a library that takes a C compiler")
    return file_faults.compiled(tmp_path_factory.mktemp("library"))


@pytest.mark.parametrize("scenario", ["writing checkpoints", "reading a checkpoint"])
def test_any_file_operation_may_fail_and_nothing_is_lost(scenario, failing):
    """One errno for each operation; `python -m benchmarks.file_faults` tries each with each."""
    stride = {"writing checkpoints": 4, "reading a checkpoint": 2}[scenario]
    rows = file_faults.trials(failing, scenario, file_faults.ERRNOS, stride)
    assert len({row["operation"] for row in rows}) >= 4
    assert len({row["errno"] for row in rows}) == 5
    assert [row for row in rows if not row["good"]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", ["the first checkpoints", "overwriting an earlier run", "nhgd run --out --checkpoint", "pictures"]
)
def test_any_file_operation_may_fail_at_the_first_checkpoint_and_in_a_command(scenario, failing):
    rows = file_faults.trials(failing, scenario, file_faults.ERRNOS)
    assert [row for row in rows if not row["good"]] == []


@pytest.fixture
def small_disk():
    """No file may grow beyond so many bytes; the system's own error, which safetensors makes its own of."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[0] if size is None else size, before[1]))

    yield limit
    limit(None)


def test_tensors_that_do_not_fit_on_the_disk_end_the_run_with_a_sentence(tmp_path, small_disk):
    kind = quadratic("nhgd")
    solver = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    solver.step()
    small_disk(200)
    with pytest.raises(
        nhgd.RunError, match=r"could not be written: .*The last good checkpoint is .*/a, outer step 1\.$"
    ):
        solver.step()
    small_disk(None)
    assert names(tmp_path / "a") == ["checkpoint-000001"]
    assert kind.resumed(tmp_path / "a").loop.clock.k == 1


def test_an_error_of_safetensors_on_reading_is_a_sentence(tmp_path):
    kind = kept(tmp_path / "a", 1)
    place = newest(tmp_path / "a")[1]
    (place / "tensors.safetensors").write_bytes(b"")
    document = json.loads((place / "run.json").read_text())
    document["tensors_sha256"] = hashlib.sha256(b"").hexdigest()
    (place / "run.json").write_text(json.dumps(document))
    with pytest.raises(nhgd.InputError, match=r"tensors\.safetensors is damaged"):
        kind.resumed(tmp_path / "a")


def test_everything_is_brought_to_disk_before_the_rename(tmp_path, monkeypatch):
    """The files, then their folder, then the rename, then the folder above."""
    solver = quadratic("nhgd").solver(checkpoint=tmp_path / "a")
    solver.step()
    order: list[str] = []
    opened: dict[int, str] = {}
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def noted_open(path: Any, *more: Any, **extra: Any) -> int:
        handle = real_open(path, *more, **extra)
        opened[handle] = Path(path).name
        return handle

    def noted_fsync(handle: int) -> None:
        real_fsync(handle)
        order.append(opened[handle])

    def noted_rename(a: Any, b: Any) -> None:
        real_rename(a, b)
        order.append(f"rename to {Path(b).name}")

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    solver.save()
    renamed = order.index("rename to checkpoint-000001")
    assert set(order[:renamed]) == {"tensors.safetensors", "history.jsonl", "run.json", f".draft-{os.getpid()}"}
    assert order[renamed - 1] == f".draft-{os.getpid()}"
    assert order[renamed + 1] == "a"


def test_a_draft_is_never_read_and_goes_with_the_next_checkpoint(tmp_path):
    kind = kept(tmp_path / "a", 2)
    (tmp_path / "a" / ".draft-1").mkdir()
    (tmp_path / "a" / ".draft-1" / "run.json").write_text("half")
    kind.resumed(tmp_path / "a").run(steps=3)
    assert names(tmp_path / "a") == ["checkpoint-000002", "checkpoint-000003"]


# One run in a folder.


def test_a_folder_that_holds_a_run_is_refused_before_any_work(tmp_path):
    kind = kept(tmp_path / "a")
    before = {file: file.read_bytes() for file in (tmp_path / "a").rglob("*.*")}
    problem, inner, outer = kind.make()
    problem.inner = problem.outer = None  # nobody asks for a loss
    with pytest.raises(
        nhgd.InputError, match=r"contains the checkpoints of an earlier run.*Solver\.resume.*overwrite=True"
    ):
        nhgd.Solver(problem, inner, outer, checkpoint=tmp_path / "a")
    assert {file: file.read_bytes() for file in (tmp_path / "a").rglob("*.*")} == before
    # Not even one that is damaged is walked over.
    (tmp_path / "b" / "checkpoint-000001").mkdir(parents=True)
    with pytest.raises(nhgd.InputError, match="contains the checkpoints of an earlier run"):
        kind.solver(checkpoint=tmp_path / "b")
    # Nor one that a resumed run is to be kept in from now on.
    with pytest.raises(nhgd.InputError, match="contains the checkpoints of an earlier run"):
        kind.resumed(tmp_path / "a", checkpoint=tmp_path / "b")
    with pytest.raises(nhgd.InputError, match="overwrite=True applies to a checkpoint folder"):
        kind.solver(overwrite=True)


def test_an_earlier_run_stays_until_the_new_one_writes_its_first(tmp_path):
    kind = kept(tmp_path / "a")
    new = kind.solver(checkpoint=tmp_path / "a", overwrite=True, checkpoint_every=2, seed=1)
    new.step()
    assert SavedCheckpoint(tmp_path / "a").step == 4
    assert new.checkpoint.last().endswith("/a still contains the earlier run, which was to be overwritten.")
    new.step()
    assert SavedCheckpoint(tmp_path / "a").step == 2
    assert names(tmp_path / "a") == ["checkpoint-000005", "lock"]
    new.close()
    assert names(tmp_path / "a") == ["checkpoint-000005"]


HOLDING = """
import sys, time, torch, nhgd
from nhgd.task import Quadratic
made = Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))
solver = made.start("nhgd", checkpoint=sys.argv[1], checkpoint_every=1, inner_steps=2)
solver.step()
print("here", flush=True)
time.sleep(120)
"""


def test_a_folder_with_a_run_at_work_is_refused_until_that_is_dead(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "here\n"
        kind = quadratic("nhgd", inner_steps=2)
        (tmp_path / "a" / ".draft-of-the-other").mkdir()
        for begin in (
            lambda: kind.resumed(tmp_path / "a"),
            lambda: kind.solver(checkpoint=tmp_path / "a", overwrite=True),
        ):
            with pytest.raises(nhgd.InputError, match=rf"is in use by another run, process {other.pid}\. Wait"):
                begin()
        assert (tmp_path / "a" / ".draft-of-the-other").exists()
        said = refusal(*RUN, "--checkpoint", tmp_path / "a", "--resume")
        assert f"is in use by another run, process {other.pid}." in said
    finally:
        other.kill()
        other.communicate()
    # The lock has died with it, by whatever death.
    assert kind.resumed(tmp_path / "a").run(steps=1).history[-1]["step"] == 2
    assert names(tmp_path / "a") == ["checkpoint-000002", "checkpoint-000003"]


def test_within_a_process_a_run_at_work_is_left_alone_and_an_idle_one_gives_way(tmp_path):
    kind = quadratic()
    refused: list[str] = []

    def measure(theta: Any, v: Any) -> dict[str, float]:
        try:
            kind.resumed(tmp_path / "a")
        except nhgd.InputError as error:
            refused.append(str(error))
        return {}

    first = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=1, metrics=measure, metrics_every=2)
    first.step()
    first.step()
    assert "There is no checkpoint in" in refused[0]
    assert "is in use by another run of this process" in refused[1]
    second = kind.resumed(tmp_path / "a")  # the first is alive and idle
    second.run(steps=3)
    with pytest.raises(nhgd.RunError, match="contains checkpoints that this run did not write: another run has used"):
        first.step()
    assert SavedCheckpoint(tmp_path / "a").step == 5


def test_a_run_that_went_on_elsewhere_after_it_was_read_is_not_begun_twice(tmp_path, monkeypatch):
    kind = kept(tmp_path / "a", 2)
    original = SavedCheckpoint.settings

    def overtaken(self: SavedCheckpoint, *given: Any) -> Any:
        monkeypatch.setattr(SavedCheckpoint, "settings", original)
        kind.resumed(tmp_path / "a").run(steps=3)
        return original(self, *given)

    monkeypatch.setattr(SavedCheckpoint, "settings", overtaken)
    with pytest.raises(nhgd.InputError, match="another run has used the folder meanwhile"):
        kind.resumed(tmp_path / "a")
    assert SavedCheckpoint(tmp_path / "a").step == 3


def test_a_forked_process_does_not_hold_the_lock(tmp_path):
    solver = quadratic().solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    solver.step()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            solver.step()
        except nhgd.RunError as error:
            os.write(theirs, str(error).encode())
        time.sleep(60)
        os._exit(0)
    os.close(theirs)
    try:
        assert b"is in use by another run" in os.read(ours, 10_000)
        solver.close()
        assert quadratic().resumed(tmp_path / "a").run(steps=2)  # while the child lives
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ours)


def test_refusals_and_overwrite_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    again = (*RUN, "--steps", 2, "--checkpoint", "kept")
    assert "partial" in answer(*again)
    monkeypatch.setattr(nhgd.task.Quadratic, "build", None)  # nothing is prepared for a run that is refused
    assert "kept contains the checkpoints of an earlier run" in refusal(*again)
    assert "Omit one of them" in refusal(*again, "--resume", "--overwrite")
    assert "--overwrite needs --checkpoint" in refusal(*RUN, "--overwrite")
    assert "/proc" in refusal(*RUN, "--checkpoint", "/proc")
    assert "/proc/a/b cannot be written" in refusal(*RUN, "--checkpoint", "/proc/a/b")
    Path("out").mkdir()
    (Path("out") / "result.json").mkdir()
    os.mkfifo("out/history.jsonl")
    assert "has a folder result.json, where a file must be written" in refusal(*RUN, "--out", "out")
    (Path("out") / "result.json").rmdir()
    assert "has a device or a pipe history.jsonl, where" in refusal(*RUN, "--out", "out")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "here")
    assert answer(*again, "--overwrite")["steps"] == 2
    assert names(Path("kept")) == ["checkpoint-000002"]


# Two checkpoints, and what remains of them.


def flipped(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def emptied(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def replaced_by_a_file(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("no folder")


def zero(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def plug(file: Path) -> None:
    file.unlink()
    here = Path.cwd()
    os.chdir(file.parent)  # the name of a socket may not be long
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(file.name)
    finally:
        os.chdir(here)


FILES = ("tensors.safetensors", "run.json", "history.jsonl")
DAMAGE: dict[str, Callable[[Path], Any]] = {
    "an empty folder": emptied,
    "a file": replaced_by_a_file,
    "deep": lambda place: (place / "run.json").write_text("[" * 100_000),
    "deeply named": lambda place: (place / "run.json").write_text('{"a":' * 100_000),
    "huge": lambda place: os.truncate(place / "run.json", disk.LARGEST + 1),
    "text": lambda place: (place / "run.json").write_bytes(b"\xff\xfe"),
} | {
    f"{word} {name}": (lambda place, change=change, name=name: change(place / name))
    for name in FILES
    for word, change in (
        ("flipped", flipped),
        ("truncated", lambda file: os.truncate(file, file.stat().st_size - 2)),
        ("empty", lambda file: os.truncate(file, 0)),
        ("missing", Path.unlink),
        ("/dev/zero as", zero),
        ("a pipe as", pipe),
        ("a socket as", plug),
        ("a folder as", lambda file: (file.unlink(), file.mkdir())),
    )
}


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """A run of four steps, the last two kept, and what six unbroken ones give."""
    path = tmp_path_factory.mktemp("run") / "a"
    kind = kept(path)
    whole = kind.solver()
    return path, kind, whole, whole.run(steps=6)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_falls_back_to_the_one_before(damage, a_run, tmp_path):
    source, kind, whole, expected = a_run
    path = tmp_path / "a"
    shutil.copytree(source, path)
    damage(path / "checkpoint-000004")
    with pytest.warns(
        UserWarning, match=r"checkpoint-000004.*continues from the previous checkpoint, .*000003, outer step 3\."
    ):
        continued = kind.resumed(path)
    assert continued.loop.clock.k == 3
    assert_same(whole, expected, continued, continued.run(steps=6))
    assert names(path) == ["checkpoint-000006", "checkpoint-000007"]
    # Where both are damaged, it is said of the newest, and nothing hangs or is used.
    for place in ("checkpoint-000006", "checkpoint-000007"):
        damage(path / place)
    with pytest.raises(
        nhgd.InputError, match=r"checkpoint-000007.*Restore the folder from a copy, or start the run again\."
    ):
        kind.resumed(path)


def test_a_version_of_the_future_is_not_walked_past(tmp_path):
    kind = kept(tmp_path / "a")
    file = newest(tmp_path / "a")[1] / "run.json"
    file.write_text(file.read_text().replace('"version": 3', '"version": 4'))
    with pytest.raises(nhgd.InputError, match="has checkpoint format 4"):
        kind.resumed(tmp_path / "a")


@pytest.mark.parametrize("what", ["the folder", "the newest"])
def test_a_folder_that_is_deleted_under_a_run_is_made_again(what, tmp_path):
    kind = quadratic("nhgd")
    whole = kind.solver()
    expected = whole.run(steps=6)
    solver = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    for _ in range(3):
        solver.step()
    shutil.rmtree(tmp_path / "a" if what == "the folder" else newest(tmp_path / "a")[1])
    assert solver.checkpoint.last() == ""
    with pytest.warns(UserWarning, match=r"were deleted during the run\. It continues"):
        solver.step()
    solver.step()
    solver.close()
    continued = kind.resumed(tmp_path / "a")
    assert continued.loop.clock.k == 5
    assert_same(whole, expected, continued, continued.run(steps=1))


@pytest.mark.parametrize("place", [None, 5, b"b", "", "b\0"])
def test_a_run_goes_on_in_a_folder_that_can_be(place, tmp_path):
    kind = kept(tmp_path / "a")
    with pytest.raises(nhgd.InputError, match=r"(?i)folder|name"):
        kind.resumed(tmp_path / "a", checkpoint=place)
    if place is not None:
        with pytest.raises(nhgd.InputError):
            kind.resumed(place)


def test_a_lock_needs_no_room_on_the_disk(tmp_path, small_disk):
    small_disk(0)
    try:
        solver = quadratic("nhgd").solver(checkpoint=tmp_path / "a")
        assert names(tmp_path / "a") == ["lock"]
        with pytest.raises(nhgd.InputError, match=r"is in use by another run\. Wait"):
            second_lock(tmp_path / "a")
        solver.close()
    finally:
        small_disk(None)
    assert names(tmp_path) == []


def second_lock(path: Path) -> None:
    """As another process would try: the one of this process is asked not to give way."""
    (held,) = (one for key, one in lock._held.items() if key == os.path.realpath(path))
    held.busy = True
    try:
        lock.Lock(path).acquire()
    finally:
        held.busy = False


def test_a_folder_without_locks_is_spoken_of_once(tmp_path, monkeypatch):
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", refused)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        solver = quadratic("nhgd").solver(checkpoint=tmp_path / "a", checkpoint_every=1)
        solver.run(steps=2)
        solver.run(steps=2)
        kept(tmp_path / "b")
    found = [str(one.message) for one in said if "without locks" in str(one.message)]
    assert [sentence.split()[0] for sentence in found] == [str(tmp_path / "a"), str(tmp_path / "b")]


def test_an_interruption_leaves_nothing_half_removed(tmp_path, monkeypatch):
    solver = quadratic("nhgd").solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    for _ in range(2):
        solver.step()
    real = os.rmdir

    def interrupted(*given: Any, **more: Any) -> None:
        monkeypatch.setattr(os, "rmdir", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rmdir", interrupted)
    with pytest.raises(KeyboardInterrupt, match="outer step 3"):
        solver.step()
    solver.close()
    assert names(tmp_path / "a") == ["checkpoint-000002", "checkpoint-000003"]


@pytest.mark.parametrize("operation", ["mkdir", "hash_file", "write_file", "to_disk", "rename"])
def test_a_folder_that_is_deleted_while_a_checkpoint_is_written_is_made_again(operation, tmp_path, monkeypatch):
    kind = quadratic("nhgd")
    whole = kind.solver()
    expected = whole.run(steps=6)
    solver = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    for _ in range(3):
        solver.step()
    owner = os if hasattr(os, operation) else files
    real = getattr(owner, operation)

    def after_the_folder_is_gone(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(owner, operation, real)
        shutil.rmtree(tmp_path / "a")
        return real(*given, **more)

    monkeypatch.setattr(owner, operation, after_the_folder_is_gone)
    with pytest.warns(UserWarning, match=r"were deleted during the run\. It continues"):
        solver.step()
    assert solver.checkpoint.last() == f" The last good checkpoint is {tmp_path / 'a'}, outer step 4."
    solver.step()
    solver.close()
    assert len(names(tmp_path / "a")) == 2
    continued = kind.resumed(tmp_path / "a")
    assert_same(whole, expected, continued, continued.run(steps=1))


def test_a_folder_that_cannot_be_made_again_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
    solver = quadratic("nhgd").solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    solver.step()
    real = files.write_file

    def replaced(*given: Any) -> None:
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        (tmp_path / "a").touch()
        real(*given)

    monkeypatch.setattr(files, "write_file", replaced)
    with pytest.raises(nhgd.RunError, match=r"cannot be written: .*Choose another checkpoint folder\.$"):
        solver.step()
    assert (tmp_path / "a").is_file()


# The history.


def written_bytes(solver: nhgd.Solver, monkeypatch: Any) -> int:
    """How many bytes one save writes."""
    sizes: list[int] = []
    real = os.write

    def counted(handle: int, data: Any) -> int:
        sizes.append(real(handle, data))
        return sizes[-1]

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", counted)
        solver.save()
    return sum(sizes)


def test_a_save_costs_the_same_after_any_number_of_rows(tmp_path, monkeypatch):
    kind = quadratic("nhgd")
    solver = kind.solver(checkpoint=tmp_path / "a")
    row = solver.step()
    for _ in range(3):
        solver.save()
    few = written_bytes(solver, monkeypatch)
    solver.history.extend(row | {"step": k} for k in range(2, 20_001))
    solver.save()
    solver.save()
    assert written_bytes(solver, monkeypatch) < few + 100
    solver.step()
    assert written_bytes(solver, monkeypatch) < few + 2 * len(json.dumps(row)) + 100
    solver.close()
    # Also after it was read, and all of it comes back.
    continued = kind.resumed(tmp_path / "a")
    assert continued.history == solver.history
    for _ in range(2):
        continued.save()
    assert written_bytes(continued, monkeypatch) < few + 100
    for number, _ in numbered(tmp_path / "a"):
        shutil.copytree(files.called(tmp_path / "a", number), tmp_path / f"b{number}" / "checkpoint-000001")
        assert SavedCheckpoint(tmp_path / f"b{number}").rows == SavedCheckpoint(tmp_path / "a").rows


def test_rows_after_the_checkpoint_that_is_gone_on_from_are_not_seen_again(tmp_path):
    kind = kept(tmp_path / "a", 6)
    expected = kind.solver().run(steps=9)
    flipped(newest(tmp_path / "a")[1] / "run.json")
    with pytest.warns(UserWarning, match="outer step 5"):
        continued = kind.resumed(tmp_path / "a", checkpoint_every=1)
    assert [row["step"] for row in continued.history] == [1, 2, 3, 4, 5]
    found = continued.run(steps=9)
    assert timeless(found.history) == timeless(expected.history)
    assert timeless(kind.resumed(tmp_path / "a").history) == timeless(expected.history)


@pytest.mark.parametrize("every", [1, 3])
def test_what_a_loop_adds_to_a_row_is_kept(every, tmp_path):
    kind = quadratic("nhgd")
    solver = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=every)
    for i, row in enumerate(solver):
        row["mine"] = i
        if i == 6:
            break
    solver.save()
    assert [row["mine"] for row in kind.resumed(tmp_path / "a").history] == list(range(7))


@pytest.mark.parametrize("more", [1, 3, 6])
def test_a_history_that_was_cleared_is_kept_as_it_is(more, tmp_path):
    kind = quadratic("nhgd")
    solver = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=100)
    solver.run(steps=4)
    solver.history.clear()
    solver.run(steps=more)
    assert kind.resumed(tmp_path / "a").history == solver.history
    assert [row["step"] for row in solver.history] == list(range(5, 5 + more))


def test_a_copy_of_the_folder_that_shares_its_files_is_left_as_it_is(tmp_path):
    kind = quadratic("nhgd")
    solver = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=1)
    solver.run(steps=6)
    shutil.copytree(tmp_path / "a", tmp_path / "b", copy_function=os.link)
    before = {file: file.read_bytes() for file in (tmp_path / "b").rglob("*") if file.is_file()}
    solver.run(steps=9)
    assert {file: file.read_bytes() for file in before} == before
    copied = kind.resumed(tmp_path / "b")
    for _ in range(4):
        copied.step()
    copied.close()
    assert len(kind.resumed(tmp_path / "a", checkpoint=tmp_path / "c").history) == 15
    for place in ("a", "b"):
        assert {file.stat().st_nlink for file in (tmp_path / place).rglob("history.jsonl")} == {1}


def test_rows_may_hold_tensors_and_what_is_no_number(tmp_path):
    odd = {
        "t": torch.tensor([0.1, float("inf")]),
        "half": torch.ones((), dtype=torch.bfloat16),
        "none": torch.zeros(0, 2),
    }
    more = {"nan": float("nan"), "tensor": "x", "deep": [{"map": (1, None)}]}
    kind = quadratic()
    solver = kind.solver(checkpoint=tmp_path / "a")
    solver.step().update(odd | more)  # as the notes of a method may
    solver.save()
    row = kind.resumed(tmp_path / "a").history[0]
    for name, value in odd.items():
        assert row[name].dtype == value.dtype
        assert torch.equal(row[name], value)
    assert (row["tensor"], row["deep"]) == ("x", [{"map": (1, None)}])
    assert row["nan"] != row["nan"]


# Signals.

SIGNALLED = """
import os, signal, sys, torch, nhgd
from nhgd.task import Quadratic
number, place = int(sys.argv[1]), sys.argv[2]
made = Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))
solver = made.start("nhgd", checkpoint=place, inner_steps=2)
inner, calls = solver.problem.inner, []


def disturbed(*given):
    calls.append(1)
    if len(calls) in map(int, sys.argv[3].split(",")):
        os.kill(os.getpid(), number)
    return inner(*given)


solver.problem.inner = disturbed
try:
    solver.run(steps=50)
except KeyboardInterrupt as stop:
    print(stop, solver.loop.clock.k, sep="|")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def signalled(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SIGNALLED, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_ctrl_c_in_the_middle_of_a_step_keeps_the_run_at_a_whole_one(tmp_path):
    found = signalled(int(signal.SIGINT), tmp_path / "a", "20")
    sentence, step = found.stdout.strip().rsplit("|", 1)
    assert sentence == f"The last good checkpoint is {tmp_path / 'a'}, outer step {step}.", found.stderr

    def started(**more: Any) -> nhgd.Solver:
        made = Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))
        return made.start("nhgd", inner_steps=2, **more)

    continued = started(resume=True, checkpoint=tmp_path / "a")
    assert continued.loop.clock.k == int(step) > 0
    whole = started()
    assert_same(whole, whole.run(steps=9), continued, continued.run(steps=9))


def test_a_second_ctrl_c_does_not_wait_and_keeps_nothing_that_is_not_whole(tmp_path):
    found = signalled(int(signal.SIGINT), tmp_path / "a", "19,20")
    assert found.stdout.startswith("|"), found.stderr
    assert not (tmp_path / "a").exists()


def test_an_interruption_between_steps_is_kept_and_one_within_is_not(tmp_path, monkeypatch):
    kind = quadratic("nhgd")

    def interrupted(*_: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kind.solver(checkpoint=tmp_path / "a", metrics=interrupted).run(steps=3)
    assert not (tmp_path / "a").exists()
    solver = kind.solver(checkpoint=tmp_path / "a")
    monkeypatch.setattr(solver, "_save_if_due", interrupted)
    with pytest.raises(KeyboardInterrupt, match="outer step 1"):
        solver.run(steps=3)
    assert SavedCheckpoint(tmp_path / "a").step == 1


def test_a_solver_that_is_told_to_stop_ends_after_its_step():
    kind = quadratic("nhgd")
    solver = kind.solver(metrics=lambda theta, v: solver.stop() or {})
    found = solver.run(steps=9)
    assert (found.result, len(found.history)) == ("stopped", 1)
    solver.metrics = None
    assert solver.run(steps=2).result == "steps"


def _with_usual_signals() -> None:
    """As at a terminal: tests that run in the background, or under nohup, are started with some signals ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def commanded(
    number: int, *words: Any, after: Callable[[], bool], twice: bool = False
) -> subprocess.CompletedProcess[str]:
    """A command that gets a signal once something holds."""
    process = subprocess.Popen(
        [sys.executable, "-m", "nhgd", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_with_usual_signals,
    )
    deadline = time.monotonic() + 120
    while not after() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    if twice:
        time.sleep(0.5)
        process.send_signal(number)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_a_command_with_what_was_reached(name, tmp_path):
    number = getattr(signal, name)
    place, out = tmp_path / "c", tmp_path / "o"
    words = (*RUN, "--steps", 10**6, "--checkpoint", place, "--checkpoint-every", 5, "--out", out, "--json")
    found = commanded(number, *words, after=lambda: bool(numbered(place)))
    assert found.returncode == 128 + number, found.stderr
    told = strict_json(found.stdout)
    assert told["partial"] is True
    assert told["result"] == "stopped"
    assert "true_outer_loss" in told["metrics"]
    written = strict_json((out / "result.json").read_text())
    assert written == told
    assert len((out / "history.jsonl").read_text().splitlines()) == told["steps"] > 0
    assert SavedCheckpoint(place).step == told["steps"]
    called = {"SIGINT": "Ctrl-C"}.get(name, name)
    assert f"Error: Stopped by {called} after outer step {told['steps']}. The last good checkpoint is" in found.stderr
    assert f"outer step {told['steps']}. The results so far are in {out}." in found.stderr
    assert "Traceback" not in found.stderr
    assert names(out) == ["curve.png", "history.jsonl", "result.json", "run.json"]
    if name == "SIGTERM":  # and it goes on as if nothing had been
        steps = told["steps"] + 2
        went_on = answer_of(*RUN, "--steps", steps, "--checkpoint", place, "--resume")
        assert went_on["metrics"] == answer_of(*RUN, "--steps", steps)["metrics"]
        assert went_on["partial"] is False


def answer_of(*words: Any) -> dict[str, Any]:
    found = invoke(*words, "--json")
    assert found.exit_code == 0, found.stderr
    return strict_json(found.stdout)


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_signal_while_a_command_prepares_ends_it_at_once_with_a_sentence(name, tmp_path):
    sign = tmp_path / "sign"
    program = (
        "import sys, time, nhgd.task; from nhgd.cli import main\n"
        f"def build(*given): open({str(sign)!r}, 'w').close(); time.sleep(100)\n"
        "nhgd.task.Quadratic.build = build\n"
        "main()\n"
    )
    place = tmp_path / "c"
    words = [*RUN, "--checkpoint", str(place), "--out", str(tmp_path / "o"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not sign.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(getattr(signal, name))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + getattr(signal, name)
    assert strict_json(out) == {"error": f"Stopped by {name}. Nothing was written."}
    assert err == f"Error: Stopped by {name}. Nothing was written.\n"
    assert names(tmp_path) == ["sign"]


def test_a_second_signal_ends_a_command_at_once(tmp_path):
    sign = tmp_path / "sign"
    program = (
        "import sys, time, nhgd; from nhgd.cli import main\n"
        f"def step(*given): open({str(sign)!r}, 'w').close(); time.sleep(100)\n"
        "nhgd.Solver._advance = step\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, *RUN, "--out", str(tmp_path / "o"), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not sign.exists() and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    first = process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert first == "SIGTERM: ending after this outer step; send it again to stop at once.\n"
    assert process.returncode == 143
    assert strict_json(out) == {"error": "Stopped by SIGTERM. Nothing was written."}
    assert "Traceback" not in err
    assert names(tmp_path) == ["sign"]


@pytest.mark.parametrize("moment", ["summary", "drawing", "printing"])
def test_a_signal_after_the_numbers_were_written_says_where_they_are(moment, tmp_path):
    """The first one ends the run early in the case of the summary; the second one is that which does not wait."""
    out, place = tmp_path / "o", tmp_path / "c"
    program = (
        "import os, signal, nhgd, nhgd.cli.run as command, nhgd.task.quadratic; from nhgd.cli import main\n"
        "def end(*given): os.kill(os.getpid(), signal.SIGTERM)\n"
        "def end_twice(*given): end(); end()\n"
        "def advance(solver, *given, advanced=nhgd.Solver._advance):\n"
        "    if solver.loop.clock.k == 2: end()\n"
        "    return advanced(solver, *given)\n"
    )
    program += {
        "summary": "nhgd.Solver._advance = advance\nnhgd.task.quadratic.QuadraticInstance.summary = end\n",
        "drawing": "import nhgd.cli._run_folder as folder\nfolder.draw_history = end_twice\n",
        "printing": "command.print_json = end_twice\n",
    }[moment]
    words = [*RUN, "--steps", "3" if moment != "summary" else "1000000", "--out", str(out), "--checkpoint", str(place)]
    found = subprocess.run(
        [sys.executable, "-c", f"{program}main()\n", *words, "--json"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 143, found.stderr
    assert strict_json((out / "result.json").read_text())["partial"] is (moment == "summary")
    known = f"The last good checkpoint is {place}, outer step 3. The results so far are in {out}."
    assert strict_json(found.stdout) == {"error": f"Stopped by SIGTERM. {known}"}


# Forged checkpoints.


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to everything in a JSON document."""
    found = [path]
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += nodes(value, (*path, key))
    return found


def changed(contents: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    place: Any = contents
    for key in path[:-1]:
        place = place[key]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value


STRANGE = [
    KeyError,
    None,
    -1,
    10**30,
    float("nan"),
    "x",
    [],
    {},
    {"tensor": "none"},
    {"class": "os.system", "fields": {}},
]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("method", ["nhgd", "nhgd-window", "soba"])
def test_forged_contents_with_hashes_that_fit_are_refused_by_a_sentence_or_run(method, tmp_path):
    kind = classifier(method, inner_optimizer=torch.optim.Adam)
    if method == "soba":
        kind = quadratic(method)
    kind.solver(checkpoint=tmp_path / "a").run(steps=2)
    file = newest(tmp_path / "a")[1] / "run.json"
    good = file.read_text()
    paths = [path for path in nodes(json.loads(good)["contents"]) if path]
    refused = 0
    for i, path in enumerate(paths[:: max(1, len(paths) // 100)]):
        value = STRANGE[i % len(STRANGE)]
        file.write_text(good)
        document = json.loads(good)
        changed(document["contents"], path, value)
        text = json.dumps(document["contents"])
        document["contents_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        file.write_text(json.dumps(document))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                continued = nhgd.Solver.resume(tmp_path / "a", *kind.make(), metrics=None, checkpoint=tmp_path / "b")
                continued.close()
        except nhgd.InputError:
            refused += 1
    assert refused > 60


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("run", "map", "first"), {"float": "nan"}),
        (("run", "map", "first"), float("nan")),
        (("run", "map", "steps"), 2.5),
        (("run", "map", "waited"), None),
        (("run", "map", "began"), {"float": "inf"}),
        (("run", "map", "best"), {"float": "nan"}),
        (("seconds",), {"float": "nan"}),
        (("loop", "map", "clock", "map", "k"), 10**9),
        (("loop", "map", "clock", "map", "__class__"), 3),
        (("loop", "map", "inner_data", "map", "taken"), 10**18),
        (("randomness", "map", "numpy_rest"), [10**6, 0, 0.0]),
        (("history", "rows"), 10**9),
        (("history", "bytes"), 10**18),
        (("settings", "outer_optimizerx"), 1),
        (("settings", "method", "fields", "batches"), 10**30),
    ],
    ids=lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_a_forged_number_never_runs_for_ever(path, value, tmp_path):
    kind = kept(tmp_path / "a", 1)
    rewritten(tmp_path / "a", lambda contents: changed(contents, path, value))
    with pytest.raises(nhgd.InputError):
        kind.resumed(tmp_path / "a")


# The solver's own end.


def curvature_threads() -> int:
    return sum(thread.name == "nhgd curvature" for thread in threading.enumerate())


def test_threads_end_with_the_solver():
    before = curvature_threads()
    kind = classifier("nhgd")
    with kind.solver(execution="thread") as solver:
        solver.run(steps=1)
        assert curvature_threads() == before + 1
    assert curvature_threads() == before
    kind.solver(execution="thread").run(steps=1)  # nobody closes it
    gc.collect()
    assert curvature_threads() == before
    # One that serves another solver by then is left alone.
    shared = Thread()
    solver = kind.solver(execution=shared)
    solver.run(steps=1)
    solver = kind.solver(execution=shared)
    gc.collect()
    solver.run(steps=1)
    assert curvature_threads() == before + 1
    del solver, shared
    gc.collect()
    assert curvature_threads() == before


def test_a_folder_is_free_again_when_its_solver_is_gone(tmp_path):
    solver = quadratic().solver(checkpoint=tmp_path / "a")
    assert names(tmp_path / "a") == ["lock"]
    del solver
    gc.collect()
    assert not (tmp_path / "a").exists()
    with quadratic().solver(checkpoint=tmp_path / "a") as solver:
        solver.step()
        solver.save()
        assert names(tmp_path / "a") == ["checkpoint-000001", "lock"]
    assert names(tmp_path / "a") == ["checkpoint-000001"]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_solver_is_not_copied(copied):
    solver = quadratic().solver()
    solver.step()
    with pytest.raises(nhgd.InputError, match=r"A Solver cannot be copied or pickled.*Solver\.resume"):
        copied(solver)


def test_results_that_belong_together_replace_older_ones_together(tmp_path):
    place = Folder(tmp_path)
    place.write_texts({"a": "old", "b": "old"})
    with pytest.raises(nhgd.RunError, match="b could not be written"):
        place.write_texts({"a": "new", "missing/b": "new"})
    assert (tmp_path / "a").read_text() == "old"


def test_what_a_killed_run_left_half_written_goes_when_it_is_resumed_at_its_end(tmp_path):
    kind = kept(tmp_path / "a", 3)
    (tmp_path / "a" / ".draft-999999-4").mkdir()
    continued = kind.resumed(tmp_path / "a")
    continued.run(steps=3)  # nothing is left to do
    continued.close()
    assert not [name for name in names(tmp_path / "a") if name.startswith(".draft")]
