"""How the processes of a run are watched by the one that started them: real processes that do little."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from nhgd.checkpoint import last_kept
from nhgd.cli import _launch as launch
from nhgd.cli._launch import Member
from nhgd.errors import RunError
from nhgd.execution.distributed.roles import Roles

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes are handed on")
ROLES = Roles(1, 1)
HEAD = "import os, sys, time; say = lambda letter: os.write(int(sys.argv[1]), letter); "
WELL = "say(b'.'); say(b'!')"
STAYS = "\nwhile True: say(b'.'); time.sleep(0.05)"


@contextlib.contextmanager
def started(*programs: str) -> Iterator[list[Member]]:
    """Processes as `launch` starts them, with other programs; all are gone in the end."""
    members = []
    try:
        for rank, program in enumerate(programs):
            ours, theirs = os.pipe()
            os.set_blocking(ours, False)
            command = [sys.executable, "-S", "-c", HEAD + program, str(theirs)]
            process = subprocess.Popen(command, pass_fds=(theirs,))
            os.close(theirs)
            members.append(Member(rank, process, ours, time.monotonic()))
        yield members
    finally:
        launch._end(members)


def watched(*programs: str, timeout: float = 0.5) -> tuple[int, str | None]:
    with started(*programs) as members:
        return launch._watch(members, ROLES, timeout)


def test_when_all_end_well_there_is_nothing_to_say():
    assert watched(WELL, WELL, timeout=60.0) == (0, None)


def test_who_stays_after_the_run_is_done_is_ended_by_a_sentence_and_the_run_is_good():
    expected = "The run is done, but Rank 1 (curvature) did not end within 0.5 s after it, and was ended."
    assert watched(WELL, STAYS) == (0, expected)


def test_so_is_the_first_when_it_has_said_that_its_results_are_written():
    expected = "The run is done, but Rank 0 (inner) did not end within 0.5 s after it, and was ended."
    assert watched(WELL + STAYS, WELL) == (0, expected)


def test_who_has_done_its_part_may_fall_while_the_first_writes_its_results():
    falls = WELL + "; os.kill(os.getpid(), 9)"
    code, why = watched(f"time.sleep(1); {WELL}", falls, timeout=60.0)
    assert (code, why) == (0, "The run is done, but Rank 1 (curvature) ended with signal SIGKILL after it.")


def test_who_falls_before_has_failed_the_run(monkeypatch):
    monkeypatch.setattr(launch, "NOTICING", 0.2)
    assert watched(STAYS, "os.kill(os.getpid(), 9)") == (1, None)


@pytest.mark.parametrize("program", ["time.sleep(600)", "say(b'.'); time.sleep(600)"])
def test_who_stands_still_is_named_from_its_very_start(monkeypatch, program):
    monkeypatch.setattr(launch, "START", 1.0)
    assert watched(STAYS, program) == (1, "Rank 1 (curvature) gave no sign of life for 1 s.")


def test_a_started_process_beats_before_it_imports_anything():
    # The first import of the program is of something that never ends.
    ours, theirs = os.pipe()
    program = launch.FIRST.replace("from nhgd.cli import main", "while True: time.sleep(1)")
    environment = os.environ | {launch.SIGNS: str(theirs)}
    process = subprocess.Popen([sys.executable, "-c", program], pass_fds=(theirs,), env=environment)
    os.close(theirs)
    try:
        assert os.read(ours, 1) == launch.ALIVE
        assert os.read(ours, 1) == launch.ALIVE
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def fallen(says: bytes = b"") -> list[Member]:
    """Two processes that were killed; the first had said something on standard error."""
    with started("os.kill(os.getpid(), 9)", "os.kill(os.getpid(), 9)") as members:
        for member in members:
            member.failed = member.process.wait()
        members[0].said += says
        return members


def test_what_the_first_process_has_said_is_not_said_again(capsys):
    members = fallen(b"Error: Rank 1 (curvature) is gone.\n")
    assert launch._concluded(1, None, members, ROLES, silent=False) == 1
    assert capsys.readouterr().out == ""
    # It was ended before it could print the JSON object that was asked for.
    assert launch._concluded(1, None, members, ROLES, silent=True) == 1
    assert json.loads(capsys.readouterr().out) == {"error": "Rank 1 (curvature) is gone."}


def test_what_the_first_process_could_not_say_is_said_for_it(capsys):
    with pytest.raises(RunError, match=r"Rank 0 \(inner\) ended with signal SIGKILL\."):
        launch._concluded(1, None, fallen(), ROLES, silent=True)
    with pytest.raises(RunError, match="no sign of life"):
        launch._concluded(1, "Rank 1 (curvature) gave no sign of life for 30 s.", fallen(), ROLES, silent=True)
    assert launch._concluded(0, "The run is done, but ...", fallen(), ROLES, silent=False) == 0
    assert capsys.readouterr().err == "Warning: The run is done, but ...\n"


@pytest.mark.parametrize(
    ("more", "added"), [("lambda: ' It is kept.'", " It is kept."), ("lambda: time.sleep(600)", "")]
)
def test_the_last_resort_ends_a_process_that_does_not_notice(more, added):
    program = (
        f"import time; from nhgd.cli._launch import end_now; end_now('Rank 1 is gone.', {more}, 0.0); time.sleep(600)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (1, f"Error: Rank 1 is gone.{added}\n")


def test_a_checkpoint_that_cannot_be_read_is_not_named_and_no_error(tmp_path):
    assert last_kept(tmp_path) == ""
    (tmp_path / "checkpoint-000001").mkdir()
    (tmp_path / "checkpoint-000001" / "run.json").write_text("{")
    assert last_kept(tmp_path) == ""
