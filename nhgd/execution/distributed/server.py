"""What a curvature rank does: it folds records in, and answers."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from nhgd.errors import NhgdError
from nhgd.execution._stopwatch import Stopwatch
from nhgd.execution.distributed.assignment import Division
from nhgd.execution.distributed.channel import Channel, Lane, Message
from nhgd.execution.distributed.protocol import Tag, Word, told
from nhgd.execution.distributed.roles import Roles
from nhgd.execution.distributed.wire import Layout, from_bytes, from_message, joined, to_message
from nhgd.inverse._learned.damping import damped
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.state import State
from nhgd.inverse.base import Learned
from nhgd.record import InnerRecord
from nhgd.ridge import Ridge
from nhgd.variable import Variable

# Requests that every inner rank waits for; the others are of the first alone.
FOR_ALL = (Word.SOLVE, Word.DRAIN, Word.MARK, Word.DIAGONAL)


class Serving:
    """A curvature rank: the state of an inverse, or this rank's part of it, and the messages that change or read it.

    Args:
        channel, roles, rank: the others.
        inverse: what is kept.
        theta: the parameters.
        max_lag: how many records an inner rank may be ahead.
    """

    def __init__(
        self, channel: Channel, roles: Roles, rank: int, inverse: Learned[Any], theta: Variable, max_lag: int
    ) -> None:
        self._channel, self._roles, self._part = channel, roles, rank - roles.workers
        self.inverse, self._theta, self._device = inverse, theta, theta.device
        self._division = Division(self.inverse, theta, roles.curvature)
        self._lanes = [channel.listen(inner, Tag.RECORDS, self._device) for inner in roles.inner]
        self._requests: deque[Message] = channel.inbox[channel.listen(0, Tag.REQUESTS)]
        self._layouts: dict[tuple[Lane, int], Layout] = {}  # as many as the senders have numbers for
        self._busy = Stopwatch(self._device)
        self._seconds = 0.0
        self._state: Any = None
        self._marked: Any = None
        self._operator: tuple[tuple[int, bool, bytes], Any] | None = None
        self._messages = 0  # of the first inner rank that are in the state
        self._records = 0
        self._credited = 0
        self._period = max(1, max_lag // 2)
        self._carried = [0] * roles.workers  # bytes of records, u, the ridge and x, by the inner rank at the other end
        self._error: NhgdError | None = None
        self._answers = 0

    @torch.no_grad()
    def serve(self) -> Message:
        """Until the inner ranks have finished: the first one's last message."""
        last: Message | None = None
        while last is None:
            self._channel.wait(lambda: self._due() or self._channel.inbox[self._lanes[0]])
            if self._due():
                with self._channel.changed:
                    request = self._requests.popleft()
                self._answer(request)
            else:
                last = self._change(self._channel.take(self._lanes[0]))
        for lane in self._lanes[1:]:
            self._channel.take(lane)
        return last

    def _due(self) -> bool:
        """Whether there is a request, and the state is as far as it asks for."""
        return bool(self._requests) and self._requests[0].number <= self._messages

    def _change(self, message: Message) -> Message | None:
        if message.kind == Word.FINISH:
            self._messages += 1
            return message
        try:
            if message.kind == Word.START:
                self._state = self.inverse.init(self._theta)
                self._error = None
            elif message.kind == Word.RESTORE:
                self._state = from_message(message.text, message.tensors, self.inverse.init(self._theta), self._device)
            elif message.kind == Word.BEGIN:
                self._state = self.inverse.begin(self._state)
            else:
                record = self._complete(message)
                with self._busy.running():
                    if self._error is None:
                        self._state = self.inverse.observe(self._state, record)
        except NhgdError as error:
            self._error = error  # told with the next answer, as the inline run would tell it here
        self._messages += 1
        self._operator = None
        if message.kind == Word.RECORD:
            self._records += 1
            self._credit()
        return None

    def _complete(self, message: Message) -> InnerRecord:
        """A record, with the parts of the other inner ranks where it is of one part."""
        first, is_part = self._record(self._lanes[0], message)
        if not is_part:
            return first
        shards = [first]
        for lane in self._lanes[1:]:
            other = self._channel.take(lane)
            shards.append(self._record(lane, other)[0])
        return joined(shards)

    def _record(self, lane: Lane, message: Message) -> tuple[InnerRecord, bool]:
        key = lane, message.number
        if message.text:
            self._layouts[key] = Layout.from_text(message.text)
        self._carried[lane.source] += message.size
        layout = self._layouts[key]
        tensors = from_bytes(layout.shapes, message.tensors[0])
        return layout.record([t.to(self._device) for t in tensors]), layout.is_part

    def _credit(self) -> None:
        if self._records - self._credited >= self._period or self._error is not None:
            self._credited = self._records
            for inner in self._roles.inner:
                self._channel.send(inner, Tag.REPLIES, Word.CREDIT, number=self._records, mark=self._answers)

    def _answer(self, request: Message) -> None:
        # Who asks has had the answer before, and the others are at most one behind.
        self._answers += 1
        for inner in self._roles.inner:
            self._channel.arrived(inner, Tag.REPLIES, self._answers - 3)
        targets = self._roles.inner if request.kind in FOR_ALL else [0]
        try:
            if self._error is not None:
                raise self._error
            text, tensors = self._found(request)
        except NhgdError as error:
            self._error = None
            for inner in targets:
                self._channel.send(inner, Tag.REPLIES, Word.ERROR, told(error), mark=self._answers)
            return
        if request.kind == Word.SOLVE:
            self._carried[0] += request.size
            for inner in targets:
                self._carried[inner] += sum(t.numel() * t.element_size() for t in tensors)
        self._seconds += self._busy.take()
        text |= {"records": self._records, "seconds": self._seconds, "carried": self._carried}
        self._credited = self._records
        for inner in targets:
            self._channel.send(inner, Tag.REPLIES, Word.REPLY, text, [t.cpu() for t in tensors], mark=self._answers)

    def _found(self, request: Message) -> tuple[dict[str, Any], list[Tensor]]:
        if request.kind == Word.SOLVE:
            return self._solved(request)
        if request.kind == Word.MARK:
            self._marked = self._state.clone() if isinstance(self._state, State) else self._state
            self._operator = None
        elif request.kind == Word.KEEP:
            return to_message(self._division.own(self._state, self._part))
        elif request.kind == Word.DIAGONAL:
            assert isinstance(self.inverse, AbstractKronecker)
            state = self._marked if request.text["marked"] else self._state
            return {"mean": self.inverse.mean_diagonal(state)}, []
        return {}, []

    def _solved(self, request: Message) -> tuple[dict[str, Any], list[Tensor]]:
        own, sent = request.tensors[0].to(self._device), request.tensors[1].cpu()
        u = self._division.spread(own, self._part, torch.zeros(self._theta.numel, dtype=own.dtype, device=own.device))
        marked, damping = request.text["marked"], request.text["damping"]
        state = self._marked if marked else self._state
        inverse = self.inverse if damping is None else damped(self.inverse, damping)
        ridge = Ridge.of(sent).to(u.device)
        key = self._messages, marked, sent.numpy().tobytes()
        notes: dict[str, Any] = {}
        if self._operator is not None and self._operator[0] == key:
            # A second right-hand side at the same point: factorise once for this one and those after it.
            if self._operator[1] is None:
                self._operator = key, inverse.operator(state, ridge)
            x = self._operator[1](u)
        else:
            x, stats = inverse.solve(state, u, ridge)
            notes = {"residual": stats.residual, "hvps": stats.hvps, "converged": stats.converged, "notes": stats.notes}
            self._operator = key, None
        return notes, [self._division.gather(x, self._part)]
