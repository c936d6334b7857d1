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
    not answer for so long. A process that ends on purpose leaves its last words there. The store is a torch.distributed
    one, through a connection that nobody else uses. Two daemon threads are at work, because a store whose keeper is
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
        self._said = threading.Event()
        self._hurry = threading.Event()
        self._ended = False
        self._round = time.monotonic()
        self._numbers: dict[int, tuple[int, float]] = {}
        self._last_words: dict[int, str] = {}
        self._alarms: list[Callable[[str], None]] = []
        self.engaged = False  # whether the others are needed now; who has done his part may leave

    def start(self, patience: float) -> None:
        """Begin to beat, and wait until everyone does."""
        self._store.set_timeout(timedelta(seconds=max(1.0, self._timeout)))
        self._store.set(self._key(self._rank), json.dumps([0, None]))
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
            threading.Thread(target=work, name=f"nhgd pulse {work.__name__}", daemon=True).start()

    @staticmethod
    def _key(rank: int) -> str:
        return f"nhgd/pulse/{rank}"

    def on_loss(self, alarm: Callable[[str], None]) -> None:
        """Call this, from a thread of the pulse, once, with a sentence, when a process that is needed is lost."""
        self._alarms.append(alarm)

    def lost(self) -> str | None:
        """Who is lost, as a sentence, or None."""
        for other, words in list(self._last_words.items()):
            return f"{self._roles.called(other)} stopped: {words}"
        now = time.monotonic()
        silent = [other for other, (_, heard) in self._numbers.items() if now - heard > self._timeout]
        if now - self._round > self._timeout:
            who = "The store of the process group" if self._keeper is None else self._roles.called(self._keeper)
            return f"{who} could not be reached for {self._timeout:g} s."
        if silent:
            names = " and ".join(self._roles.called(other) for other in silent)
            return f"{names} gave no sign of life for {self._timeout:g} s."
        return None

    def why(self, rank: int) -> str:
        """Why a process closed its connection: its last words, for which we wait a moment."""
        deadline = time.monotonic() + 2 * self._interval
        self._hurry.set()
        while rank not in self._last_words and time.monotonic() < deadline and not self._ended:
            time.sleep(0.02)
        words = self._last_words
        if rank in words:
            return f"{self._roles.called(rank)} stopped: {words[rank]}"
        for other, said in list(words.items()):
            return f"{self._roles.called(other)} stopped: {said}"
        return f"{self._roles.called(rank)} is gone: it closed its connection without a word."

    def say(self, words: str, patience: float = 2.0) -> None:
        """Leave last words for the others."""
        self._words = words
        self._hurry.set()
        self._said.wait(patience)

    def stop(self) -> None:
        """Beat no more."""
        self._ended = True
        self._hurry.set()

    def _beat(self) -> None:
        while not self._ended:
            words = self._words
            try:
                self._beats += 1
                self._store.set(self._key(self._rank), json.dumps([self._beats, words]))
                found = self._store.multi_get([self._key(other) for other in self._others]) if self._others else []
                now = time.monotonic()
                for other, text in zip(self._others, found, strict=True):
                    number, said = json.loads(text)
                    if number != self._numbers[other][0]:
                        self._numbers[other] = number, now
                    if said is not None:
                        self._last_words[other] = said
                self._round = now
                if words is not None:
                    self._said.set()
            except Exception:
                # The connection is broken or the store is gone: the watch will say so when the time is up.
                time.sleep(self._interval / 5)
            self._hurry.wait(self._interval)
            self._hurry.clear()

    def _watch(self) -> None:
        while not self._ended:
            time.sleep(self._interval / 4)
            sentence = self.lost() if self.engaged else None
            if sentence is not None:
                for alarm in self._alarms:
                    alarm(sentence)
                return
