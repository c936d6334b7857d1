"""Signs of life: who is still there, and the last words of those who are not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from nhgd.errors import RunError
from nhgd.execution.roles import Roles


class Pulse:
    """Every process writes a number into a shared store, again and again, and reads those of the others.

    A process whose number stays the same for `timeout` seconds is lost, and so is the store's keeper when the store does
    not answer for so long. A process that fails leaves its last words there, and one that has done its part says so and
    may leave. The store is a torch.distributed one, through a connection that nobody else uses. Two daemon threads are at work, because a store whose keeper is
    paused never answers: one beats, one watches the time.

    Args:
        store: where to write; this object's own connection.
        roles: who the others are.
        rank: of this process.
        timeout: seconds without a sign of life after which a process counts as lost.
        keeper: the rank that keeps the store, or None when no rank does.
    """

    def __init__(self, store: Any, roles: Roles, rank: int, timeout: float, keeper: int | None = None) -> None:
        self._store, self._roles, self._rank, self._timeout, self._keeper = store, roles, rank, timeout, keeper
        self._others = [other for other in range(roles.world) if other != rank]
        self._interval = min(1.0, timeout / 5)
        self._beats = 0
        self._words: str | None = None
        self._done = False
        self._told: tuple[int, str | None, bool] = (0, None, False)  # what the store knows of us
        self._hurry = threading.Event()
        self._ended = False
        self._round = time.monotonic()
        self._numbers: dict[int, tuple[int, float]] = {}
        self._last_words: dict[int, str] = {}
        self._excused: set[int] = set()
        self._alarms: list[Callable[[str], None]] = []
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

    def release(self) -> None:
        """This process has done its part, and the others know it when this returns."""
        if self._engaged:
            self._engaged, self._done = False, self._words is None
            self._publish(lambda: self._told[2] or not self._done)

    def start(self, patience: float) -> None:
        """Begin to beat, and wait until everyone does."""
        self._store.set_timeout(timedelta(seconds=max(1.0, self._timeout)))
        self._store.set(self._key(self._rank), json.dumps([0, None, False]))
        deadline = time.monotonic() + patience
        missing = list(self._others)
        while missing:
            missing = [other for other in missing if not self._store.check([self._key(other)])]
            if missing and time.monotonic() > deadline:
                names = ", ".join(self._roles.called(other) for other in missing)
                raise RunError(f"After {patience:g} s not all processes have arrived. Missing: {names}.")
            if missing:
                time.sleep(0.02)
        self._round = now = time.monotonic()
        self._numbers = dict.fromkeys(self._others, (-1, now))
        for work in (self._beat, self._watch):
            thread = threading.Thread(target=work, name=f"nhgd pulse {work.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @staticmethod
    def _key(rank: int) -> str:
        return f"nhgd/pulse/{rank}"

    def on_loss(self, alarm: Callable[[str], None]) -> None:
        """Call this, from a thread of the pulse, once, with a sentence, when a process that is needed is lost."""
        self._alarms.append(alarm)

    def lost(self) -> str | None:
        """Who is lost, as a sentence, or None."""
        for other, words in list(self._last_words.items()):
            return self._stopped(other, words)
        now = time.monotonic()
        late = (other for other, (_, heard) in self._numbers.items() if now - heard > self._timeout)
        silent = [other for other in late if other not in self._excused]
        if now - self._round > self._timeout:
            who = "The store of the process group" if self._keeper is None else self._roles.called(self._keeper)
            return f"{who} could not be reached for {self._timeout:g} s."
        if silent:
            names = " and ".join(self._roles.called(other) for other in silent)
            return f"{names} gave no sign of life for {self._timeout:g} s."
        return None

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
        """Beat at once, and wait until the store knows."""
        deadline = time.monotonic() + patience
        while not known() and time.monotonic() < deadline and not self._ended:
            self._hurry.set()
            time.sleep(0.005)

    def stop(self) -> None:
        """Beat no more. A thread inside of torch while Python ends would abort the process, so they are waited for."""
        self._ended = True
        self._hurry.set()
        self._over.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def _beat(self) -> None:
        while not self._ended:
            self._hurry.clear()
            try:
                self._beats += 1
                telling = self._beats, self._words, self._done
                self._store.set(self._key(self._rank), json.dumps(telling))
                found = self._store.multi_get([self._key(other) for other in self._others]) if self._others else []
                now = time.monotonic()
                for other, text in zip(self._others, found, strict=True):
                    number, words, done = json.loads(text)
                    if number != self._numbers[other][0]:
                        self._numbers[other] = number, now
                    if words is not None:
                        self._last_words[other] = words
                    (self._excused.add if done else self._excused.discard)(other)
                self._told = telling
                self._round = now
            except Exception:
                # The connection is broken or the store is gone: the watch will say so when the time is up.
                self._over.wait(self._interval / 5)
            self._hurry.wait(self._interval)

    def _watch(self) -> None:
        while not self._ended:
            self._over.wait(self._interval / 4)
            sentence = self.lost() if self.engaged else None
            if sentence is not None:
                for alarm in self._alarms:
                    alarm(sentence)
                return
