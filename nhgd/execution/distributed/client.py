"""What an inner rank sends to the curvature ranks, and requests from them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from nhgd.errors import RunError
from nhgd.execution.base import Traffic
from nhgd.execution.distributed.messages import Message, Messenger, Tag, Word, error_from_text
from nhgd.execution.distributed.wire import Layout, size_of, to_bytes
from nhgd.execution.group import Outcome
from nhgd.record import InnerRecord

LAYOUTS = 64  # of records that both sides remember; others are sent again
Parts = Callable[[int], tuple[dict[str, Any] | None, Sequence[Tensor]]]  # text and tensors for each curvature rank


def credit_period(max_lag: int) -> int:
    """After how many records a curvature rank acknowledges them."""
    return max(1, max_lag // 2)


class Client:
    """The connections of one inner rank to all curvature ranks.

    Records are sent without waiting for them to arrive. Each curvature rank says now and then how many are in its
    state, and `submit` waits while more than `max_lag` are not.

    Args:
        messenger: what sends and receives.
        max_lag: how many records may be outstanding.
        traffic: counts bytes and waiting time.
    """

    def __init__(self, messenger: Messenger, max_lag: int, traffic: Traffic) -> None:
        self._messenger: Messenger | None = messenger
        self._servers = messenger.roles.servers
        self._max_lag, self._period = max_lag, credit_period(max_lag)
        self._traffic = traffic
        self._layouts: dict[tuple[int, Layout], tuple[int, int]] = {}  # the number and the bytes of the last ones
        self._sent: list[deque[tuple[int, list[Any]]]] = [deque() for _ in self._servers]
        self._messages = 0
        self._credits = [0] * len(self._servers)  # that were received
        self._folded = [0] * len(self._servers)  # records that are in the state, as far as is known
        self.carried = 0  # bytes between the curvature ranks and the other inner ranks

    @property
    def messenger(self) -> Messenger:
        """What sends and receives, until the client is closed."""
        if self._messenger is None:
            raise RunError("The distributed executor is closed. Make a new one for another run.")
        return self._messenger

    @property
    def is_first(self) -> bool:
        """Whether this rank sends requests and control messages for all inner ranks."""
        return self.messenger.rank == 0

    def submit(self, parts: Sequence[InnerRecord]) -> None:
        """Send a record in parts, one to each curvature rank; wait if too many are outstanding."""
        self._traffic.records += 1
        for part, record in enumerate(parts):
            self._send_record(part, record)
        lag = self._lag()
        self._traffic.largest_lag = max(self._traffic.largest_lag, min(lag, self._max_lag))
        if lag > self._max_lag:
            with self._waiting():
                for part, folded in enumerate(self._folded):
                    if self._traffic.records - folded > self._max_lag:
                        self._collect(part, self._traffic.records - self._max_lag)

    def _lag(self) -> int:
        return self._traffic.records - min(self._folded)

    def _send_record(self, part: int, record: InnerRecord) -> None:
        layout, tensors = Layout.of(record)
        if not self.is_first and not layout.is_part:
            return  # every worker has the whole of it, and one of them is enough
        key = part, layout
        text = None
        if key not in self._layouts:
            # The number of the oldest layout is given to the new one, by which the other side forgets the same.
            full = len(self._layouts) >= LAYOUTS
            place = self._layouts.pop(next(iter(self._layouts)))[0] if full else len(self._layouts)
            self._layouts[key] = place, size_of(layout.shapes)
            text = layout.to_text()
        number, size = self._layouts[key]
        self._traffic.bytes_sent += size
        # A copy, made before the next inner step can change anything.
        self._send(part, Word.RECORD, number, text, data=to_bytes([t.detach() for t in tensors]))

    def _send(self, part: int, word: Word, number: int = 0, text: Any = None, **given: Any) -> None:
        self._messages += 1
        works = self.messenger.send(self._servers[part], Tag.ORDERS, word, number, text, **given)
        self._sent[part].append((self._messages, works))

    def tell(self, word: Word, parts: Parts | None = None) -> None:
        """Send something else than a record, in its order, from the first inner rank."""
        if self.is_first:
            for part in range(len(self._servers)):
                text, tensors = (None, ()) if parts is None else parts(part)
                self._send(part, word, 0, text, tensors=[t.cpu() for t in tensors])

    def ask(self, word: Word, parts: Parts | None = None, overtake: bool = False, alone: bool = False) -> list[Message]:
        """Ask every curvature rank and wait for the answers; of several inner ranks the first asks for all.

        Args:
            word: the request.
            parts: what each curvature rank is given.
            overtake: whether the answer is wanted before the records that are outstanding are in the state.
            alone: whether the first inner rank alone is answered.
        """
        if self.is_first:
            for part in range(len(self._servers)):
                text, tensors = (None, ()) if parts is None else parts(part)
                if word == Word.SOLVE:
                    self._traffic.bytes_sent += sum(t.numel() * t.element_size() for t in tensors)
                self._send(part, word, int(overtake), text, tensors=[t.cpu() for t in tensors])
        elif alone:
            return []
        with self._waiting():
            found = [self.messenger.receive(server, Tag.REPLIES) for server in self._servers]
            for part, message in enumerate(found):
                self._collect(part, message.text["records"] // self._period * self._period)
                self._note(part, message.text["records"], message.text["received"][self.messenger.rank])
        seconds = [message.text["seconds"] for message in found]
        self._traffic.curvature_seconds = max(self._traffic.curvature_seconds, *seconds)
        others = [rank for rank in self.messenger.roles.inner if rank != self.messenger.rank]
        self.carried = sum(message.text["carried"][rank] for message in found for rank in others)
        for message in found:
            if message.word == Word.ERROR:
                raise error_from_text(message.text)
        return found

    def _collect(self, part: int, records: int) -> None:
        """Receive acknowledgements of a curvature rank until this many records are in its state."""
        while self._credits[part] * self._period < records:
            found, received = self.messenger.receive_numbers(self._servers[part], Tag.CREDITS, 2)
            self._credits[part] += 1
            self._note(part, found, received)

    def _note(self, part: int, records: int, received: int) -> None:
        self._folded[part] = max(self._folded[part], records)
        sent = self._sent[part]
        while sent and sent[0][0] <= received:
            sent.popleft()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._traffic.waited_seconds += time.perf_counter() - began

    def finish(self, outcome: Outcome) -> None:
        """Let the curvature ranks go, when they have everything."""
        self.ask(Word.FINISH, lambda part: (outcome.text, outcome.tensors))

    def close(self) -> None:
        """Close the connections."""
        self._messenger = None
        for sent in self._sent:
            sent.clear()
