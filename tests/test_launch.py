"""How the agent that starts the processes of a run reports their end: real processes that do little."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from nhgd.checkpoint import last_kept
from nhgd.cli import _launch, _started
from nhgd.cli._launch import launch
from nhgd.errors import InputError, RunError
from nhgd.execution.distributed.roles import Roles

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="processes are ended by signals"),
    # torch leaves the files open into which the processes write.
    pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed file:ResourceWarning"
    ),
]
ROLES = Roles(1, 1)
PROGRAM = """
import contextlib, os, signal, sys, time
sys.path.insert(0, {path!r})
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def fail(sentence, code=1, lost=None, checkpoint=False):
    from nhgd.cli._started import leave_error
    leave_error(sentence, code, "RunError", lost, checkpoint)
    sys.exit(code)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def pause():
    os.kill(os.getpid(), signal.SIGSTOP)
def wait_for_the_end_of_the_other():
    while not os.path.exists("other"):
        time.sleep(0.01)
    with contextlib.suppress(OSError):  # its place in /proc is empty or a zombie's
        while " Z " not in open(f"/proc/{{open('other').read()}}/stat").read():
            time.sleep(0.01)
{body}
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A function that launches a program, given by its lines, in place of the command line in two processes."""
    monkeypatch.setattr(_launch, "FAILING_SECONDS", 1.0)
    monkeypatch.setattr(_launch, "CLOSING_SECONDS", 1.0)
    package = tmp_path / "package" / "nhgd"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def run(body: str, restarts: int = 0, timeout: float = 1.0, checkpoint=str) -> int:
        root = str(Path(_started.__file__).parents[2])
        program = PROGRAM.format(path=root, body=body).replace("from nhgd.cli._started", "from _started")
        (package / "__main__.py").write_text(program.replace(repr(root), repr(str(Path(_started.__file__).parent))))
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        monkeypatch.chdir(package.parent)
        return launch([], ROLES, restarts, timeout, checkpoint)

    return run


def test_the_answer_of_the_first_process_is_ours(launched, capfdbinary):
    assert launched("print('answer of', rank)", timeout=60.0) == 0
    assert capfdbinary.readouterr().out == b"answer of 0\n"


def test_an_error_of_a_process_is_the_error_of_the_run(launched):
    with pytest.raises(RunError, match=r"^The disk is full\.$"):
        launched("fail('The disk is full.') if rank == 1 else time.sleep(600)")


def test_wrong_input_is_wrong_input_and_is_not_tried_again(launched, capfd):
    with pytest.raises(InputError, match=r"^No such task\.$"):
        launched("fail('No such task.', 2)", restarts=3)
    assert "Restarting" not in capfd.readouterr().err


def test_the_cause_is_preferred_to_what_the_others_saw_of_it(launched, monkeypatch):
    monkeypatch.setattr(_launch, "FAILING_SECONDS", 60.0)  # the other one may be late
    with pytest.raises(RunError, match=r"^The disk is full\.$"):
        launched("fail('Rank 1 is gone.', lost=1) if rank == 0 else (time.sleep(0.5), fail('The disk is full.'))")


def test_a_killed_process_is_named_with_its_signal_and_the_last_checkpoint(launched):
    with pytest.raises(RunError, match=r"^Rank 1 \(curvature\) ended with signal SIGKILL\. It is kept\.$"):
        launched("die() if rank == 1 else time.sleep(600)", checkpoint=lambda: " It is kept.")


def test_a_paused_process_is_named_and_killed(launched):
    with pytest.raises(RunError, match=r"^Rank 1 \(curvature\) did not respond for 1 s: it is paused\.$"):
        launched("pause() if rank == 1 else time.sleep(600)")


def test_a_process_that_others_did_not_hear_of_is_named_in_their_words(launched):
    with pytest.raises(RunError, match=r"^Rank 1 \(curvature\) did not answer\. It is kept\.$"):
        launched(
            "fail('Rank 1 (curvature) did not answer. It is kept.', lost=1, checkpoint=True) if rank == 0 else time.sleep(600)"
        )


def test_a_failed_run_is_started_again_and_says_why(launched, capfd):
    assert (
        launched("print('attempt', attempt); attempt or (die() if rank else time.sleep(600))", restarts=2, timeout=60.0)
        == 0
    )
    said = capfd.readouterr()
    assert said.out == "attempt 1\n"
    assert said.err == "Rank 1 (curvature) ended with signal SIGKILL. Restarting, 1 of 2.\n"


def test_one_that_does_not_end_with_a_run_that_is_done_can_only_be_a_warning(launched, capfd):
    assert launched("print('answer') if rank == 0 else time.sleep(600)", restarts=1) == 0
    said = capfd.readouterr()
    assert said.out == "answer\n"
    assert said.err == (
        "Warning: The run is done, but Rank 1 (curvature) did not end within 1 s after it, and was killed.\n"
    )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="one process sees the end of the other in /proc")
def test_one_that_dies_after_a_run_that_is_done_can_only_be_a_warning(launched, capfd):
    first = "open('part', 'w').write(str(os.getpid())); os.rename('part', 'other'); print('answer')"
    program = f"if rank == 0: {first}\nelse: wait_for_the_end_of_the_other(); die()"
    assert launched(program, restarts=1, timeout=60.0) == 0
    said = capfd.readouterr()
    assert said.out == "answer\n"
    assert said.err == "Warning: The run is done, but Rank 1 (curvature) ended with signal SIGKILL after it.\n"


def test_the_environment_and_the_handlers_of_signals_are_as_before(launched):
    before, handler = dict(os.environ), signal.getsignal(signal.SIGTERM)
    launched("pass", timeout=60.0)
    changed = {key for key in before.keys() | os.environ.keys() if before.get(key) != os.environ.get(key)}
    assert changed <= {"PYTHONPATH"}
    assert signal.getsignal(signal.SIGTERM) is handler


def test_an_error_is_left_to_the_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("NHGD_LAUNCHER", raising=False)
    assert not _started.leave_error("Gone.", 1, "PeerError", 3)  # torchrun prints a table, and we print the sentence
    monkeypatch.setenv("NHGD_LAUNCHER", "1")
    assert _started.leave_error("Gone.", 1, "PeerError", 3)
    told = json.loads((tmp_path / "error.json").read_text())
    assert (told["message"], told["lost"], told["checkpoint"]) == ("Gone.", 3, False)


def test_a_checkpoint_that_cannot_be_read_is_not_named_and_no_error(tmp_path):
    assert last_kept(tmp_path) == ""
    (tmp_path / "checkpoint-000001").mkdir()
    (tmp_path / "checkpoint-000001" / "run.json").write_text("{")
    assert last_kept(tmp_path) == ""
