"""What happens to a distributed run when one of its processes dies, hangs or is cut off.

A few harms here; `python -m benchmarks.faults` does twenty of each at random moments.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.faults import QUADRATIC, Moment, Trial, command, cut_off, distributed, good, harmed, start
from nhgd.checkpoint import SavedCheckpoint, exists
from tests.histories import CLOCKED

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
TIMEOUT = 3.0  # where a process is missed
LONG = 60.0  # where none is: a busy machine may be slow


def history(checkpoint: Path) -> list[dict[str, Any]]:
    """The rows of a run that is kept, without clocks and what depends on them."""
    rows = SavedCheckpoint(checkpoint).history(torch.device("cpu"))
    return [{k: x for k, x in row.items() if k not in (*CLOCKED, "bytes_sent", "lag")} for row in rows]


def test_a_killed_curvature_rank_ends_the_run_and_a_restart_goes_on_from_the_checkpoint(tmp_path):
    trial = Trial(tmp_path, [f"timeout={LONG}"], "--resume", "--max-restarts", "1", steps=100, task=QUADRATIC)
    trial.wait_for(2, running=True)
    first = trial.ranks()
    os.kill(first[1], signal.SIGKILL)
    out, err = trial.process.communicate(timeout=120)
    assert trial.process.returncode == 0, err.decode()
    assert json.loads(out)["steps"] == 100
    said = err.decode()
    assert "Rank 1 (curvature) ended with signal SIGKILL." in said
    assert "The last good checkpoint is" in said
    assert "Restarting, 1 of 1." in said
    assert "Resuming from" in said
    assert not trial.left()
    unharmed = start(command(QUADRATIC, tmp_path / "unharmed", 100))
    _, err = unharmed.communicate(timeout=120)
    assert unharmed.returncode == 0, err.decode()
    assert history(trial.checkpoint) == history(tmp_path / "unharmed")  # bit for bit


def test_a_paused_inner_rank_is_noticed_in_time_and_nobody_is_left(tmp_path):
    row = harmed(
        "pause", rank=1, world=3, moment=Moment("running", 0.5), timeout=TIMEOUT, patience=LONG, task=QUADRATIC
    )
    assert good(row), row
    assert "Rank 1 (inner) did not respond for 3 s: it is paused." in row["sentence"]
    assert "The last good checkpoint is" in row["sentence"]


@pytest.fixture
def minding_ctrl_c():
    """What a shell runs in the background ignores Ctrl-C, and so would all that is started from here."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("minding_ctrl_c")
def test_ctrl_c_ends_all_ranks(tmp_path):
    trial = Trial(tmp_path, [f"timeout={LONG}"], task=QUADRATIC)
    trial.wait_for(2, running=False)
    time.sleep(1.0)
    trial.process.send_signal(signal.SIGINT)
    found = trial.end(limit=120)
    assert found["code"] == 130
    assert not found["left"]


def test_sigterm_ends_all_ranks_with_what_was_reached(tmp_path):
    trial = Trial(tmp_path, [f"timeout={LONG}", "workers=2"], task=QUADRATIC)
    trial.wait_for(3, running=True)
    trial.process.send_signal(signal.SIGTERM)
    out, err = trial.process.communicate(timeout=120)
    assert trial.process.returncode == 143, err.decode()
    told = json.loads(out)
    assert told["partial"] is True
    assert SavedCheckpoint(trial.checkpoint).step == told["steps"]
    assert f"Stopped by SIGTERM after outer step {told['steps']}. The last good checkpoint is" in err.decode()
    assert not trial.left()


def test_the_ranks_end_with_the_one_that_started_them(tmp_path):
    trial = Trial(tmp_path, [f"timeout={LONG}"], task=QUADRATIC)
    trial.wait_for(2, running=True)
    trial.process.kill()
    trial.process.communicate()
    deadline = time.monotonic() + LONG
    while trial.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not trial.left()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("kind", ["kill", "pause"])
def test_any_rank_may_be_harmed_at_any_moment(kind, rank):
    row = harmed(
        kind, rank=rank, world=3, moment=Moment("running", 0.5), timeout=TIMEOUT, resume=distributed(["workers=2"])
    )
    assert good(row), row


@pytest.mark.slow
def test_a_rank_that_hangs_before_it_has_met_the_others_is_named():
    row = harmed("pause", rank=1, world=2, moment=Moment("starting", 0.2), timeout=TIMEOUT)
    assert good(row), row


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("ip") is None, reason="network namespaces take root and iproute2")
@pytest.mark.parametrize("phase", ["starting", "running"])
def test_a_cut_network_is_noticed_on_both_sides(phase):
    row = cut_off(Moment(phase, 0.5), TIMEOUT)
    assert good(row), row


@pytest.mark.slow
def test_torchrun_starts_again_and_goes_on(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "nhgd", "run", "cleaning"]
    words += ["--preset", "quick", "--method", "nhgd", "--device", "cpu", "--steps", "120", "--json", "--resume"]
    words += [*distributed([f"timeout={TIMEOUT}"]), "--checkpoint", str(checkpoint), "--checkpoint-every", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    deadline = time.monotonic() + 90
    while not exists(checkpoint) and time.monotonic() < deadline:
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err.decode()
    assert json.loads(out)["steps"] == 120
    assert "Resuming from" in err.decode()
    assert SavedCheckpoint(checkpoint).step == 120
