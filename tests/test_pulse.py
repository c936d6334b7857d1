"""Signs of life: who is missed, when, and how waits are broken then. One process plays several ranks."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from nhgd.errors import RunError
from nhgd.execution.distributed import heartbeat as pulses
from nhgd.execution.distributed.channel import Channel, abort
from nhgd.execution.distributed.heartbeat import Pulse
from nhgd.execution.distributed.roles import Roles

ROLES = Roles(1, 1)
LONG = 60.0


@pytest.fixture
def ranks(monkeypatch):
    """A function that makes the pulse of a rank; before everyone has met a second is allowed instead of thirty."""
    monkeypatch.setattr(pulses, "START", 1.0)
    keeper = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made = []

    def rank(number: int, timeout: float = 0.5) -> Pulse:
        store = TCPStore("127.0.0.1", keeper.port, is_master=False, timeout=timedelta(seconds=5))
        made.append(Pulse(PrefixStore("here", store), ROLES, number, timeout))
        made[-1].start()
        made[-1].engage()
        return made[-1]

    yield rank
    for one in made:
        one.stop()


def until_lost(pulse: Pulse, alarm: threading.Event) -> str | None:
    assert alarm.wait(LONG)
    return pulse.lost()


def heard(pulse: Pulse) -> threading.Event:
    alarm = threading.Event()
    pulse.on_loss(lambda _: alarm.set())
    return alarm


def test_who_does_not_arrive_is_named(ranks):
    alone = ranks(0)
    with pytest.raises(RunError, match=r"Rank 1 \(curvature\) did not arrive within 1 s\. Start all"):
        alone.meet()


def test_who_stands_still_after_it_has_arrived_is_named_before_all_have_met(ranks):
    first, second = ranks(0), ranks(1)
    alarm = heard(first)
    first.meet()
    second.stop()
    assert until_lost(first, alarm) == "Rank 1 (curvature) gave no sign of life for 1 s."


def test_once_all_have_met_the_limit_is_the_callers(ranks):
    first, second = ranks(0), ranks(1)
    alarm = heard(first)
    for one in (first, second):
        one.meet()
        one.met()
    second.stop()
    assert until_lost(first, alarm) == "Rank 1 (curvature) gave no sign of life for 0.5 s."


def test_last_words_before_the_meeting_reach_the_others(ranks):
    first, second = ranks(0), ranks(1)
    second.say("My data is gone. Fetch it.")
    alarm = heard(first)
    assert until_lost(first, alarm) == "Rank 1 (curvature) stopped: My data is gone. Fetch it."


def test_who_asks_after_the_alarm_hears_of_it_at_once(ranks):
    first, second = ranks(0), ranks(1)
    alarm = heard(first)
    second.say("it was interrupted.")
    assert alarm.wait(LONG)
    late: list[str] = []
    first.on_loss(late.append)
    assert late == ["Rank 1 (curvature) stopped: it was interrupted."]


def test_an_alarm_that_fails_does_not_silence_the_others(ranks):
    first, second = ranks(0), ranks(1)

    def fails(sentence: str) -> None:
        raise ValueError(sentence)

    first.on_loss(fails)
    alarm = heard(first)
    second.say("it was interrupted.")
    assert alarm.wait(LONG)


def test_who_has_done_its_part_may_go_and_the_others_know(ranks):
    first, second = ranks(0), ranks(1)
    first.meet()
    second.meet()
    second.release()
    assert not second.part(0.1)
    first.release()
    assert first.part(LONG)
    assert second.part(LONG)


def one_run_each(ranks, timeout: float) -> tuple[Pulse, Pulse]:
    """Two that have done one run together, and know it of each other."""
    first, second = ranks(0, timeout), ranks(1, timeout)
    for one in (first, second):
        one.meet()
    for one in (first, second):
        one.met()
    second.release()
    while not first.acknowledged([1]):
        time.sleep(0.005)
    first.release()
    assert first.part(LONG)
    assert second.part(LONG)
    return first, second


def test_who_dies_in_a_second_run_is_not_excused_by_the_first(ranks):
    first, second = one_run_each(ranks, 0.5)
    second._ended = True  # killed as the second run begins: no beat and no word any more
    second._hurry.set()
    for thread in second._threads:
        thread.join(LONG)
    alarm = heard(first)
    first.engage()
    assert until_lost(first, alarm) == "Rank 1 (curvature) gave no sign of life for 0.5 s."


def test_the_end_of_a_second_run_is_known_however_short_it_was(ranks):
    first, second = one_run_each(ranks, 20.0)  # beats a second apart
    first.engage()
    second.engage()
    second.release()
    second.stop()
    deadline = time.monotonic() + LONG
    while not first.acknowledged([1]):
        assert time.monotonic() < deadline
        assert first.lost() is None
        time.sleep(0.005)


class Nccl:
    """Stands in for an NCCL group, of which there is none without GPUs: what waits in it, only abort() ends."""

    def __init__(self, inside: bool, fails: bool = False) -> None:
        self.aborted = threading.Event()
        self._fails = fails
        self._inside = Nccl(False, fails) if inside else None
        if not inside:
            self.abort = self._abort

    def _abort(self) -> None:
        self.aborted.set()
        if self._fails:
            raise RuntimeError("NCCL error: the communicator was aborted already")

    def _get_backend(self, device: torch.device) -> Any:
        return self._inside

    def wait(self) -> None:
        place = self if self._inside is None else self._inside
        assert place.aborted.wait(LONG)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["of the group", "of its backend"])
def test_a_wait_on_the_gpu_is_broken_by_an_abort(inside, fails):
    group = Nccl(inside, fails)
    waiting = threading.Thread(target=group.wait, daemon=True)
    waiting.start()
    breaking = abort(group)
    waiting.join(LONG)
    breaking.join(LONG)
    assert not waiting.is_alive()
    assert not breaking.is_alive()


def test_a_lost_process_aborts_the_group_on_the_gpu(ranks):
    group = Nccl(False)
    wire = ProcessGroupGloo(HashStore(), 0, 1, timedelta(seconds=5))
    pulse = ranks(0)
    channel = Channel(wire, 0, pulse, group, device_tag=1)
    ranks(1).say("it was interrupted.")
    assert group.aborted.wait(LONG)
    assert channel.failure == "Rank 1 (curvature) stopped: it was interrupted."
    channel.close()
