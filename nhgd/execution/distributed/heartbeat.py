"""Signs of life: who is still there, and the last words of those who are not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from nhgd.errors import RunError
from nhgd.execution.distributed.address import opened, printable, sealed
from nhgd.execution.distributed.roles import Roles

# Seconds, at least, for a sign of life until everyone has met. Imports hold Python's lock, on a crowded machine for seconds,
# and programs that were started together do not all start at the same speed.
START = 30.0


class Pulse:
    """Every process writes a number into a shared store, again and again, and reads those of the others.

    A process whose number stays the same for `timeout` seconds is lost, and so is the store's keeper when the store does
    not answer for so long; until everyone has met, START seconds are allowed where that is more. A process that fails
    leaves its last words there, and one that has done its part says so and may leave. The store is a torch.distributed
    one, through a connection that nobody else uses. Two daemon threads are at work, because a store whose keeper is paused
    never answers: one beats, one watches the time.

    Args:
        store: where to write; this object's own connection.
        roles: who the others are.
        rank: of this process.
        timeout: seconds without a sign of life after which a process counts as lost.
        keeper: the rank that keeps the store, or None when no rank does.
    """

    def __init__(self, store: Any, roles: Roles, rank: int, timeout: float, keeper: int | None = None) -> None:
        self._store, self._roles, self._rank, self._timeout, self._writer = store, roles, rank, timeout, keeper
        self._others = [other for other in range(roles.world) if other != rank]
        self._interval = min(1.0, timeout / 5)
        self._limit = max(timeout, START)
        self._beats = 0
        self._words: str | None = None
        self._done = False
        self._parts = 0  # how often this process has done its part
        self._told: tuple[int, str | None, bool, int] = (0, None, False, 0)  # what the store knows of us
        self._hurry = threading.Event()
        self._ended = False
        self._round = time.monotonic()
        self._numbers: dict[int, tuple[int | None, float]] = {}  # None: not seen yet
        self._last_words: dict[int, str] = {}
        self._excused: set[int] = set()
        self._done_by: dict[int, int] = {}
        self._alarms: list[Callable[[str], None]] = []
        self._alarmed: str | None = None
        self._alarming = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        self._engaged = False

    @property
    def engaged(self) -> bool:
        """Whether the others are needed now: only then is a loss a loss."""
        return self._engaged

    def engage(self) -> None:
        """The others are needed from now on, and we are needed by them."""
        if not self._engaged:
            self._engaged, self._done = True, False
            self._excused.clear()

    def acknowledged(self, ranks: Iterable[int]) -> bool:
        """Whether these have done their part of what this process is about to end."""
        if all(self._done_by.get(rank, 0) > self._parts for rank in ranks):
            return True
        self._hurry.set()
        return False

    def part(self, patience: float = 2.0) -> bool:
        """Wait a moment for the others to have done their parts, too; whether they have."""
        deadline = time.monotonic() + patience
        while self._done and not self._ended and len(self._excused) < len(self._others):
            if time.monotonic() > deadline or self._last_words:
                return False
            self._hurry.set()
            time.sleep(0.005)
        return self._done

    def release(self) -> None:
        """This process has done its part, and the others know it when this returns."""
        if self._engaged:
            self._engaged, self._done = False, self._words is None
            self._parts += self._done
            # Not by the flag, which is that of an earlier run until the next beat.
            self._publish(lambda: self._told[3] >= self._parts or not self._done)

    def start(self) -> None:
        """Begin to beat. From now on a process that stands still is noticed, and so is one that does not arrive."""
        self._round = now = time.monotonic()
        self._numbers = dict.fromkeys(self._others, (None, now))
        for work in (self._beat, self._watch):
            thread = threading.Thread(target=work, name=f"nhgd pulse {work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def meet(self) -> None:
        """Wait until everyone beats."""
        while self._unseen():
            self.check()
            time.sleep(0.02)

    def met(self) -> None:
        """Everyone is here: the limit is `timeout` from now on."""
        now = time.monotonic()
        self._numbers = dict.fromkeys(self._others, (-1, now))
        self._round = now
        self._limit = self._timeout

    def check(self) -> None:
        """Raise when a process is lost."""
        sentence = self.lost()
        if sentence is not None:
            raise RunError(sentence)

    def _unseen(self) -> list[int]:
        return [other for other, (number, _) in self._numbers.items() if number is None]

    @staticmethod
    def _key(rank: int) -> str:
        return f"nhgd/pulse/{rank}"

    def on_loss(self, alarm: Callable[[str], None]) -> None:
        """Call this once, with a sentence, when a process that is needed is lost: from a thread of the pulse, or at once."""
        with self._alarming:
            self._alarms.append(alarm)
            lost = self._alarmed
        if lost is not None:
            alarm(lost)

    def lost(self) -> str | None:
        """Who is lost, as a sentence, or None."""
        for other, words in list(self._last_words.items()):
            return self._stopped(other, words)
        now, limit = time.monotonic(), self._limit
        if now - self._round > limit:
            who = "The store of the process group" if self._writer is None else self._roles.called(self._writer)
            return f"{who} could not be reached for {limit:g} s."
        late = [other for other, (_, heard) in self._numbers.items() if now - heard > limit]
        late = [other for other in late if other not in self._excused]
        absent = [other for other in late if other in self._unseen()]
        if absent:
            return (
                f"{self._named(absent)} did not arrive within {limit:g} s. Start all processes at once, or allow more time, such"
                " as timeout=120."
            )
        return f"{self._named(late)} gave no sign of life for {limit:g} s." if late else None

    def _named(self, ranks: list[int]) -> str:
        return " and ".join(self._roles.called(rank) for rank in ranks)

    def why(self, rank: int) -> str | None:
        """Why a process closed its connection: its last words, for which we wait a moment. None: it had done its part."""
        deadline = time.monotonic() + 2 * self._interval
        self._hurry.set()
        while time.monotonic() < deadline and not self._ended:
            if rank in self._excused:
                return None
            if rank in self._last_words:
                break
            time.sleep(0.02)
        for other, said in [(rank, self._last_words.get(rank)), *self._last_words.items()]:
            if said is not None:
                return self._stopped(other, said)
        return f"{self._roles.called(rank)} is gone: it closed its connection without a word."

    def _stopped(self, rank: int, words: str) -> str:
        """What to make of last words: those of a process that lost another name the one that was lost first."""
        return words if words.startswith("Rank ") else f"{self._roles.called(rank)} stopped: {words}"

    def say(self, words: str, patience: float = 2.0) -> None:
        """Leave last words for the others; the first ones count."""
        self._words = self._words or words
        self._publish(lambda: self._told[1] is not None, patience)

    def _publish(self, known: Callable[[], bool], patience: float = 2.0) -> None:
        """Beat at once, and wait until the store knows; not where it cannot be reached."""
        deadline = min(time.monotonic() + patience, self._round + self._limit)
        while not known() and time.monotonic() < deadline and not self._ended:
            self._hurry.set()
            time.sleep(0.005)

    def stop(self) -> None:
        """Beat no more. A thread inside of torch while Python ends would abort the process, so they are waited for."""
        self._ended = True
        self._hurry.set()
        self._over.set()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _beat(self) -> None:
        self._store.set_timeout(timedelta(seconds=max(1.0, self._timeout)))
        while not self._ended:
            self._hurry.clear()
            unseen = self._unseen()
            try:
                self._beats += 1
                telling = self._beats, self._words, self._done, self._parts
                key = self._key(self._rank)
                self._store.set(key, sealed(key, json.dumps(telling)))
                # A key that is not there yet would be waited for.
                here = [o for o in self._others if o not in unseen or self._store.check([self._key(o)])]
                found = self._store.multi_get([self._key(other) for other in here]) if here else []
                now = time.monotonic()
                for other, message in zip(here, found, strict=True):
                    text = opened(self._key(other), message.decode(errors="replace"))
                    if text is None:
                        continue  # a stranger's
                    number, words, done, self._done_by[other] = json.loads(text)
                    if number != self._numbers[other][0]:
                        self._numbers[other] = number, now
                    if words is not None:
                        self._last_words[other] = printable(words)
                    # Of this run, not of one before: then it is as often done as we are, or will be.
                    excused = done and self._done_by[other] >= self._parts + self._engaged
                    (self._excused.add if excused else self._excused.discard)(other)
                self._told = telling
                self._round = now
            except Exception:
                # The connection is broken or the store is gone: the watch will say so when the time is up.
                self._over.wait(self._interval / 5)
            self._hurry.wait(0.05 if unseen else self._interval)

    def _watch(self) -> None:
        while not self._ended:
            self._over.wait(self._interval / 4)
            sentence = self.lost() if self.engaged else None
            if sentence is not None:
                with self._alarming:
                    self._alarmed = sentence
                    alarms = list(self._alarms)
                for alarm in alarms:
                    with suppress(Exception):  # one that fails must not keep the others from being heard
                        alarm(sentence)
                return
