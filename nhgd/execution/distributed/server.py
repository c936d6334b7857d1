"""A curvature rank: it folds in records and answers requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd.errors import NhgdError
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.assignment import Assignment
from nhgd.execution.distributed.client import credit_period
from nhgd.execution.distributed.messages import Message, Messenger, Tag, Word, error_to_text
from nhgd.execution.distributed.wire import Layout, from_bytes, from_message, to_message
from nhgd.execution.group import Outcome
from nhgd.inverse._learned.damping import damped
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.state import State
from nhgd.inverse.base import Learned
from nhgd.inverse.capabilities import begun, operator, significant
from nhgd.record import InnerRecord, joined
from nhgd.ridge import Ridge
from nhgd.variable import Variable

UNREAD = 32  # messages to an inner rank, the oldest of which it has read by then


class _Record(NamedTuple):
    """One record of an inner step, the parts of all inner ranks joined."""

    record: InnerRecord


class Server:
    """A curvature rank: the state of an inverse, or this rank's part of it, and the messages that change or read it.

    A thread receives while the main one folds in, so that a question may overtake the records that wait.

    Args:
        messenger: what sends and receives.
        inverse: the inverse to keep.
        theta: the parameters.
        max_lag: how many records an inner rank may be ahead.
    """

    def __init__(self, messenger: Messenger, inverse: Learned[Any], theta: Variable, max_lag: int) -> None:
        self._messenger, self._roles = messenger, messenger.roles
        self._part = messenger.rank - self._roles.workers
        self.inverse, self._theta, self._device = inverse, theta, theta.device
        self._assignment = Assignment(self.inverse, theta, self._roles.curvature)
        self._layouts: dict[tuple[int, int], Layout] = {}  # as many as the senders have numbers for
        self._changed = threading.Condition()
        self._waiting: deque[Message | _Record | BaseException] = deque()
        self._urgent: deque[Message] = deque()
        self._received = [0] * self._roles.workers  # messages of each inner rank
        self._sent: list[deque[list[Any]]] = [deque() for _ in self._roles.inner]
        self._busy = Stopwatch(self._device)
        self._seconds = 0.0
        self._state: Any = None
        self._marked: Any = None
        self._changes = 0
        self._operator: tuple[tuple[int, bool, bytes], Any] | None = None
        self._records = 0
        self._period = credit_period(max_lag)
        self._carried = [
            0
        ] * self._roles.workers  # bytes of records, u, the ridge and x, by the inner rank at the other end
        self._error: NhgdError | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether a thread is waiting for an inner rank."""
        return self._thread is not None and self._thread.is_alive()

    @torch.no_grad()
    def serve(self) -> Outcome:
        """Serve until the inner ranks have finished; returns the outcome as the first of them tells it."""
        self._thread = thread = threading.Thread(target=self._receive, name="nhgd receiver", daemon=True)
        thread.start()
        while True:
            message = self._next()
            if isinstance(message, BaseException):
                raise message
            if isinstance(message, _Record):
                self._fold(message.record)
            elif message.word >= Word.SOLVE:
                self._answer(message)
            elif message.word == Word.FINISH:
                thread.join()
                self._answer(message)
                for inner, sent in enumerate(self._sent):
                    while sent:
                        self._messenger.wait(sent.popleft(), inner)
                shapes_alone = {key: value for key, value in message.text.items() if key != "shapes"}
                return Outcome(shapes_alone, message.tensors())
            else:
                self._change(message)

    def close(self) -> None:
        """Close the connections."""
        for sent in self._sent:
            sent.clear()

    # Receiving.

    def _receive(self) -> None:
        """In the thread: until the end of a run, or the loss of a process."""
        try:
            while True:
                message = self._take(0)
                found = self._complete(message) if message.word == Word.RECORD else message
                with self._changed:
                    if isinstance(found, Message) and found.number and found.word >= Word.SOLVE:
                        self._urgent.append(found)
                    else:
                        self._waiting.append(found)
                    self._changed.notify_all()
                if message.word == Word.FINISH:
                    return
        except BaseException as error:
            with self._changed:
                self._waiting.append(error)
                self._changed.notify_all()

    def _take(self, inner: int) -> Message:
        found = self._messenger.receive(inner, Tag.ORDERS, self._device)
        self._received[inner] += 1
        return found

    def _next(self) -> Message | _Record | BaseException:
        with self._changed:
            while not self._urgent and not self._waiting:
                self._changed.wait(0.5)  # a wait without a limit keeps Ctrl-C out on some platforms
            return self._urgent.popleft() if self._urgent else self._waiting.popleft()

    def _complete(self, message: Message) -> _Record:
        """A record, completed by the parts of the other inner ranks if it is partial."""
        first, is_part = self._record(0, message)
        shards = [first]
        for inner in self._roles.inner[1:] if is_part else ():
            shards.append(self._record(inner, self._take(inner))[0])
        return _Record(joined(shards))

    def _record(self, inner: int, message: Message) -> tuple[InnerRecord, bool]:
        key = inner, message.number
        if message.text:
            self._layouts[key] = Layout.from_text(message.text)
        self._carried[inner] += message.data.numel()
        layout = self._layouts[key]
        tensors = from_bytes(layout.shapes, message.data)
        return layout.record([t.to(self._device) for t in tensors]), layout.is_part

    # Keeping.

    def _fold(self, record: InnerRecord) -> None:
        try:
            with self._busy.running():
                if self._error is None:
                    self._state = self.inverse.observe(self._state, record)
        except NhgdError as error:
            self._error = error  # sent with the next answer, as the inline run would raise it here
        self._changes += 1
        self._records += 1
        if self._records % self._period == 0:
            for inner in self._roles.inner:
                self._send(
                    inner, self._messenger.send_numbers(inner, Tag.CREDITS, self._records, self._received[inner])
                )

    def _change(self, message: Message) -> None:
        try:
            if message.word == Word.START:
                self._state = self.inverse.init(self._theta)
                self._error = None
            elif message.word == Word.RESTORE:
                fresh = self.inverse.init(self._theta)
                self._state = from_message(message.text, message.tensors(), fresh, self._device)
            else:
                self._state = begun(self.inverse, self._state)
        except NhgdError as error:
            self._error = error
        self._changes += 1

    def _send(self, inner: int, works: list[Any]) -> None:
        """Keep a message alive until it has arrived."""
        sent = self._sent[inner]
        sent.append(works)
        if len(sent) > UNREAD:
            self._messenger.wait(sent.popleft(), inner)

    # Answering.

    def _answer(self, request: Message) -> None:
        targets: Sequence[int] = [0] if request.word == Word.KEEP else self._roles.inner
        word = Word.REPLY
        text: dict[str, Any] = {}
        tensors: list[Tensor] = []
        try:
            if self._error is not None and request.word != Word.FINISH:
                raise self._error
            text, tensors = self._found(request)
        except NhgdError as error:
            self._error = None
            word, text = Word.ERROR, error_to_text(error)
        if request.word == Word.SOLVE:
            self._carried[0] += request.data.numel()
            for inner in targets:
                self._carried[inner] += sum(t.numel() * t.element_size() for t in tensors)
        self._seconds += self._busy.take()
        text |= {"records": self._records, "received": self._received}
        text |= {"seconds": self._seconds, "carried": self._carried}
        for inner in targets:
            works = self._messenger.send(inner, Tag.REPLIES, word, 0, text, [t.cpu() for t in tensors])
            self._send(inner, works)

    def _found(self, request: Message) -> tuple[dict[str, Any], list[Tensor]]:
        if request.word == Word.SOLVE:
            return self._solved(request.text["marked"], request.text["damping"], *request.tensors())
        if request.word == Word.MARK:
            self._marked = self._state.clone() if isinstance(self._state, State) else self._state
            self._operator = None
        elif request.word == Word.KEEP:
            return to_message(self._assignment.own(self._state, self._part))
        elif request.word == Word.DIAGONAL:
            assert isinstance(self.inverse, AbstractKronecker)
            state = self._marked if request.text["marked"] else self._state
            return {"mean": self.inverse.mean_diagonal(state)}, []
        return {}, []

    def _solved(
        self, marked: bool, damping: float | None, own: Tensor, sent: Tensor, error: Tensor | None = None
    ) -> tuple[dict[str, Any], list[Tensor]]:
        own, sent = own.to(self._device), sent.cpu()
        u = self._assignment.spread(own, self._part, torch.zeros(self._theta.numel, dtype=own.dtype, device=own.device))
        state = self._marked if marked else self._state
        if error is not None:
            found, _ = significant(self.inverse, state, u, error.to(u.device), self._theta.slices())
            return {}, [self._assignment.gather(found, self._part)]
        inverse = self.inverse if damping is None else damped(self.inverse, damping)
        ridge = Ridge.of(sent).to(u.device)
        key = self._changes, marked, sent.numpy().tobytes()
        notes: dict[str, Any] = {}
        if self._operator is not None and self._operator[0] == key:
            # A second right-hand side at the same point: factorise once for this one and those after it.
            if self._operator[1] is None:
                self._operator = key, operator(inverse, state, ridge)
            x = self._operator[1](u)
        else:
            x, stats = inverse.solve(state, u, ridge)
            notes = {"residual": stats.residual, "hvps": stats.hvps, "converged": stats.converged, "notes": stats.notes}
            self._operator = key, None
        return notes, [self._assignment.gather(x, self._part)]
