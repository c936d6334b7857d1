"""Messages between processes, over point-to-point sends of torch.distributed.

A message is an envelope with a head of six numbers, text in JSON, and the bytes of tensors; what is too large for an
envelope follows it. Empty envelopes lie ready at the receiver, because gloo sends nothing that is not waited for. Lanes
are independent of each other and keep their order. A daemon thread for each incoming lane waits for the next message, so
that the main thread only ever waits in Python, where Ctrl-C and the news of a lost process reach it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd.errors import RunError
from nhgd.execution.distributed.heartbeat import Pulse
from nhgd.execution.distributed.wire import from_bytes, shapes, to_bytes

HEAD = 6  # numbers: kind, a number of the sender's, bytes of text, of tensors here, of tensors that follow, and how
ENVELOPE = 2**18  # bytes
READY = 4  # envelopes
BESIDE, ON_DEVICE = 1, 2  # how tensors follow: on gloo, or on the GPU's own wire
SILENT = 9  # a lane on which nothing is sent: it only breaks when the other is gone
FOREVER = timedelta(days=1000)  # gloo breaks the whole group when a wait times out, and an idle lane is no fault


class Lane(NamedTuple):
    """One direction between two processes."""

    source: int
    target: int
    tag: int


@dataclass
class Message:
    """What came: its kind, a number, a dict, and tensors; where the text names no tensors, their bytes."""

    kind: int
    number: int
    text: dict[str, Any]
    tensors: list[Tensor]
    size: int  # bytes of the tensors


class Channel:
    """The lanes of one process.

    Args:
        group: a gloo process group of everybody, whose waits never time out.
        rank: of this process in it.
        pulse: who is alive.
        device_group: an NCCL group of everybody, for tensors on a GPU, or None. It knows no lanes, so one alone may use it.
        device_tag: of that lane.
    """

    def __init__(self, group: Any, rank: int, pulse: Pulse, device_group: Any = None, device_tag: int = 0) -> None:
        self._group, self._rank, self._pulse = group, rank, pulse
        self._device_group, self._device_tag = device_group, device_tag
        self.changed = threading.Condition()
        self.inbox: dict[Lane, deque[Message]] = {}
        self._out: dict[Lane, deque[tuple[int, Any]]] = {}
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._posted = self._delivered = 0
        self._threads = [threading.Thread(target=self._deliver, name="nhgd sender", daemon=True)]
        self._ended = False
        self.failure: str | None = None
        self._left: set[int] = set()
        self.interrupts: list[Callable[[], Any]] = [lambda: interrupt(group, rank)]
        if device_group is not None:
            self.interrupts.append(lambda: abort(device_group))
        pulse.on_loss(self.fail)
        for other in range(group.size()):
            if other != rank:
                self.listen(other, SILENT)
        self._threads[0].start()

    def listen(self, source: int, tag: int, device: torch.device | None = None) -> Lane:
        """Receive what another process sends on a lane; bodies on the GPU's own wire come to `device`."""
        lane = Lane(source, self._rank, tag)
        self.inbox[lane] = deque()
        thread = threading.Thread(target=self._receive, args=(lane, device), name=f"nhgd {lane}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return lane

    def send(
        self,
        target: int,
        tag: int,
        kind: int,
        text: Any = None,
        tensors: Sequence[Tensor] = (),
        number: int = 0,
        mark: int = 0,
    ) -> int:
        """Send a message without waiting for it to arrive; the bytes of its tensors. `mark` is for `arrived`."""
        content = as_text([text or {}, shapes(tensors)]) if text or tensors else None
        return self.send_packed(target, tag, kind, number, content, to_bytes(tensors) if tensors else None, mark)

    def send_packed(
        self,
        target: int,
        tag: int,
        kind: int,
        number: int = 0,
        text: Tensor | None = None,
        data: Tensor | None = None,
        mark: int = 0,
    ) -> int:
        """As `send`, with everything in bytes already, which must not change any more."""
        works = self._out.setdefault(Lane(self._rank, target, tag), deque())
        on_device = data is not None and data.is_cuda and self._device_group is not None and tag == self._device_tag
        if data is not None and data.is_cuda and not on_device:
            data = data.cpu()
        size = 0 if data is None else data.numel()
        length = 0 if text is None else -(-text.numel() // 16) * 16  # numbers after it stand where they may
        inside = not on_device and 8 * HEAD + length + size <= ENVELOPE
        follows = 0 if inside or not size else ON_DEVICE if on_device else BESIDE
        numbers = [kind, number, length, size if inside else 0, 0 if inside else size, follows]
        parts = [torch.tensor(numbers).view(torch.uint8)]
        if text is not None:
            parts += [text, torch.full((length - text.numel(),), 32, dtype=torch.uint8)]
        if data is not None and inside:
            parts.append(data)
        try:
            works.append((mark, self._group.send([torch.cat(parts)], target, tag)))
            if follows == BESIDE:
                works.append((mark, self._group.send([data], target, tag + 100)))
            elif follows == ON_DEVICE:
                works.append((mark, self._device_group.send([data], target, 0)))
        except RuntimeError:
            self._broken(target)
            self.check()
        return size

    def post(
        self,
        target: int,
        tag: int,
        kind: int,
        number: int = 0,
        text: Tensor | None = None,
        tensors: Sequence[Tensor] = (),
        mark: int = 0,
    ) -> None:
        """As `send`, from a thread that does nothing else; the tensors must not change in the meantime, and that is checked."""
        self._posted += 1
        versions = [t._version for t in tensors]
        self._outbox.put((target, tag, kind, number, text, tensors, mark, versions))

    def _deliver(self) -> None:
        try:
            with torch.no_grad():
                self._deliver_all()
        except Exception as error:  # a thread that ended without a word would leave everybody waiting
            self.fail(f"A record could not be sent ({type(error).__name__}: {error}).")

    def _deliver_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            target, tag, kind, number, text, tensors, mark, versions = message
            data = to_bytes(tensors) if tensors else None
            if [t._version for t in tensors] != versions:
                self.fail(
                    "A tensor of an inner step was changed in place while its record was on its way. Let inner() and the loader"
                    " make new tensors, or set max_lag=0."
                )
            try:
                self.send_packed(target, tag, kind, number, text, data, mark)
            except RunError:
                return  # who waits will hear of it
            self._delivered += 1

    def arrived(self, target: int, tag: int, mark: int) -> None:
        """Messages on a lane up to this mark have arrived: let go of their memory."""
        works = self._out.get(Lane(self._rank, target, tag))
        while works and works[0][0] <= mark:
            works.popleft()

    def flush(self, patience: float) -> list[int]:
        """Wait until everything sent has arrived; the ranks to which something has not when nothing moved for so many seconds."""
        moved, since = -1, time.monotonic()
        sent: list[tuple[int, Any]] = []
        arrived: list[int] = []
        waiting: threading.Thread | None = None
        while self.failure is None and time.monotonic() - since < patience:
            if self._delivered + len(arrived) > moved:
                moved, since = self._delivered + len(arrived), time.monotonic()
            if waiting is None and self._delivered == self._posted:
                sent = self._sent()
                waiting = threading.Thread(target=self._await, args=(sent, arrived), name="nhgd flush", daemon=True)
                self._threads.append(waiting)
                waiting.start()
            elif waiting is not None and not waiting.is_alive():
                break
            time.sleep(0.001)
        if waiting is None:
            return sorted({target for target, _ in self._sent()})
        return sorted({target for target, _ in sent[len(arrived) :]})

    def _sent(self) -> list[tuple[int, Any]]:
        """What was sent, to whom; the sender may send more meanwhile."""
        return [(lane.target, work) for lane, works in list(self._out.items()) for _, work in list(works)]

    def _await(self, sent: Sequence[tuple[int, Any]], arrived: list[int]) -> None:
        for target, work in sent:
            try:
                work.wait()
            except RuntimeError:
                self._broken(target)  # no fault where the other has done its part: then it had everything
            arrived.append(target)

    def check(self) -> None:
        """Raise when a process that is needed is lost."""
        for other in list(self._left):
            if self.failure is None and self._pulse.engaged:
                self._broken(other)
        if self.failure is not None:
            raise RunError(self.failure)

    def wait(self, ready: Callable[[], Any]) -> Any:
        """Until something holds, in a way that Ctrl-C and the news of a lost process interrupt."""
        with self.changed:
            while True:
                found = ready()
                if found:
                    return found
                self.check()
                self.changed.wait(0.2)

    def take(self, lane: Lane) -> Message:
        """The next message on a lane."""
        waiting = self.inbox[lane]
        self.wait(lambda: waiting)
        with self.changed:
            return waiting.popleft()

    def fail(self, sentence: str) -> None:
        """Nothing can go on: tell the others, and wake everybody who waits here, also inside torch."""
        with self.changed:
            if self.failure is not None:
                return
            self.failure = sentence
            self.changed.notify_all()
        self._pulse.say(sentence, 0.5)  # before the others see our connections close
        for interrupt in self.interrupts:
            interrupt()

    def close(self) -> bool:
        """End the threads. Nothing may be on its way any more. Whether all of them have ended."""
        self._ended = True
        self._outbox.put(None)
        if self.failure is None:
            self._threads += [thread for thread in (self.interrupts[0](),) if thread is not None]
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._out.clear()
        return not any(thread.is_alive() for thread in self._threads)

    def _broken(self, other: int) -> None:
        """The connection to another process is closed: a fault, unless nobody needs anybody any more."""
        self._left.add(other)
        if self._ended or self.failure is not None or not self._pulse.engaged:
            return
        why = self._pulse.why(other)
        if why is not None and not self._ended and self._pulse.engaged:
            self.fail(why)

    def _receive(self, lane: Lane, device: torch.device | None) -> None:
        ready: deque[tuple[Tensor, Any]] = deque()
        try:
            while True:
                while len(ready) < (1 if lane.tag == SILENT else READY):
                    envelope = torch.empty(ENVELOPE, dtype=torch.uint8)
                    ready.append((envelope, self._group.recv([envelope], lane.source, lane.tag)))
                envelope, work = ready.popleft()
                work.wait()
                message = self._opened(envelope, lane, device)
                with self.changed:
                    self.inbox[lane].append(message)
                    self.changed.notify_all()
        except RuntimeError:
            self._broken(lane.source)
        except Exception as error:  # a thread that ended without a word would leave everybody waiting
            self.fail(f"A message of rank {lane.source} could not be read ({type(error).__name__}: {error}).")

    def _opened(self, envelope: Tensor, lane: Lane, device: torch.device | None) -> Message:
        kind, number, length, size, beside, follows = envelope[: 8 * HEAD].view(torch.int64).tolist()
        place = 8 * HEAD + length
        text, layout = json.loads(envelope[8 * HEAD : place].numpy().tobytes()) if length else ({}, [])
        data = envelope[place : place + size]
        if follows:
            where = device if follows == ON_DEVICE else None
            data = torch.empty(beside, dtype=torch.uint8, device=where)
            if follows == ON_DEVICE:
                self._device_group.recv([data], lane.source, 0).wait()
                torch.cuda.synchronize(device)
            else:
                self._group.recv([data], lane.source, lane.tag + 100).wait()
        return Message(kind, number, text, from_bytes(layout, data) if layout else [data], data.numel())


def interrupt(group: Any, rank: int) -> threading.Thread | None:
    """Break every wait in a gloo group of which this is the member `rank`, by one that times out."""
    others = [other for other in range(group.size()) if other != rank]

    def work() -> None:
        for other in others:
            # A connection that is closed already refuses at once, and breaks no wait for the others.
            with suppress(RuntimeError):
                group.recv([torch.empty(1)], other, 99).wait(timedelta(milliseconds=1))

    return _aside(work) if others else None


def abort(group: Any) -> threading.Thread:
    """Break every wait in an NCCL group. These are kernels on the GPU: nothing that times out elsewhere reaches them."""

    def work() -> None:
        # Which of them has it depends on the version of torch.
        holder = group if hasattr(group, "abort") else group._get_backend(torch.device("cuda"))
        if hasattr(holder, "abort"):
            holder.abort()

    return _aside(work)


def _aside(work: Callable[[], Any]) -> threading.Thread:
    """Do it in a thread of its own, because the one that calls may be the one that must not stand still."""

    def run() -> None:
        with suppress(Exception):  # the group is broken, which is what was wanted
            work()

    thread = threading.Thread(target=run, name="nhgd interrupt", daemon=True)
    thread.start()
    return thread


def as_text(content: Any) -> Tensor:
    """JSON as bytes."""
    return torch.frombuffer(bytearray(json.dumps(content, default=str).encode()), dtype=torch.uint8)
