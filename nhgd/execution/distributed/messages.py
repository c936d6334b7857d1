"""Messages between inner and curvature ranks: point-to-point sends of torch.distributed, each with a time limit.

A message is a head of four numbers, followed by its text and by the bytes of its tensors, if any. The head says
how long they are, so that a record whose layout the receiver knows is a head and one flat tensor.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nhgd.errors import InputError, NhgdError, NonFiniteError, PeerError, RunError
from nhgd.execution.distributed.roles import Roles
from nhgd.execution.distributed.wire import from_bytes, shapes, to_bytes

ERRORS: dict[str, type[NhgdError]] = {cls.__name__: cls for cls in (InputError, RunError, NonFiniteError)}


class Tag(IntEnum):
    """Which way a message goes, and what for."""

    ORDERS = 1  # from an inner rank, in order: what changes the state, and what asks for it
    REPLIES = 2  # to an inner rank
    CREDITS = 3  # to an inner rank: the number of records in the state


class Word(IntEnum):
    """Kinds of messages."""

    START = 1
    BEGIN = 2
    RECORD = 3
    RESTORE = 4
    FINISH = 5
    SOLVE = 11  # x for u
    DRAIN = 12  # an answer when everything sent so far is in the state
    MARK = 13  # keep the current state for the following solves
    KEEP = 14  # the state itself
    DIAGONAL = 15  # this rank's part of the mean diagonal
    REPLY = 21
    ERROR = 22


@dataclass
class Message:
    """What came: its kind, a number of the sender's, its text, and the bytes of its tensors."""

    word: int
    number: int
    text: dict[str, Any]
    data: Tensor

    def tensors(self) -> list[Tensor]:
        """Those that were sent with a text."""
        return from_bytes(self.text.get("shapes", []), self.data)


class Messenger:
    """Sends and receives messages in a process group, to which all ranks belong.

    Args:
        group: on gloo.
        device_group: on NCCL, for the tensors of a GPU, or None. Those of one sender must be received in their order.
        roles: what errors call the others.
        rank: of this process.
        timeout: seconds to wait for another process.
    """

    def __init__(self, group: Any, device_group: Any, roles: Roles, rank: int, timeout: float) -> None:
        self.group, self.device_group = group, device_group
        self.roles, self.rank, self.timeout = roles, rank, timeout

    def send(
        self,
        target: int,
        tag: Tag,
        word: Word,
        number: int = 0,
        text: dict[str, Any] | None = None,
        tensors: Sequence[Tensor] = (),
        data: Tensor | None = None,
    ) -> list[Any]:
        """Start sending tensors, or their bytes; returns the works to wait for, which keep the memory alive."""
        if data is None and tensors:
            text, data = (text or {}) | {"shapes": shapes(tensors)}, to_bytes([t.detach() for t in tensors])
        if data is not None and data.is_cuda and self.device_group is None:
            data = data.cpu()
        on_device = data is not None and data.is_cuda
        size = 0 if data is None else data.numel()
        written = b"" if text is None else json.dumps(text).encode()
        head = torch.tensor([word, number, len(written), -size if on_device else size])
        works = [self._isend(head, target, tag, self.group)]
        if written:
            works.append(self._isend(torch.frombuffer(bytearray(written), dtype=torch.uint8), target, tag, self.group))
        if data is not None and size:
            works.append(self._isend(data, target, tag, self.device_group if on_device else self.group))
        return works

    def receive(self, source: int, tag: Tag, device: torch.device | None = None) -> Message:
        """The next message of another process; its bytes arrive on `device` if they are on a GPU."""
        head = torch.empty(4, dtype=torch.int64)
        self._irecv(head, source, tag, self.group)
        word, number, length, size = head.tolist()
        text: dict[str, Any] = {}
        if length:
            written = torch.empty(length, dtype=torch.uint8)
            self._irecv(written, source, tag, self.group)
            text = json.loads(written.numpy().tobytes())
        data = torch.empty(abs(size), dtype=torch.uint8, device=device if size < 0 else None)
        if size:
            self._irecv(data, source, tag, self.device_group if size < 0 else self.group)
        if size < 0:
            torch.cuda.synchronize(device)
        return Message(word, number, text, data)

    def send_numbers(self, target: int, tag: Tag, *numbers: int) -> list[Any]:
        """Start sending integers."""
        return [self._isend(torch.tensor(numbers), target, tag, self.group)]

    def receive_numbers(self, source: int, tag: Tag, count: int) -> list[int]:
        """Whole numbers of another process."""
        found = torch.empty(count, dtype=torch.int64)
        self._irecv(found, source, tag, self.group)
        numbers: list[int] = found.tolist()
        return numbers

    def wait(self, works: Sequence[Any], other: int) -> None:
        """Wait until a message has arrived."""
        for work in works:
            self._wait(work, other)

    def _isend(self, tensor: Tensor, target: int, tag: Tag, group: Any) -> Any:
        try:
            return dist.isend(tensor, target, group=group, tag=tag)
        except RuntimeError as error:
            raise self._lost(target, None) from error

    def _irecv(self, tensor: Tensor, source: int, tag: Tag, group: Any) -> None:
        try:
            work = dist.irecv(tensor, source, group=group, tag=tag)
        except RuntimeError as error:
            raise self._lost(source, None) from error
        self._wait(work, source)

    def _wait(self, work: Any, other: int) -> None:
        began, seconds = time.monotonic(), self.timeout
        try:
            done = work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:  # what gloo raises when the time is over, and when a connection is closed
            raise self._lost(other, seconds if time.monotonic() - began >= 0.9 * seconds else None) from error
        if done is False:
            raise self._lost(other, seconds)

    def _lost(self, other: int, silent: float | None) -> PeerError:
        return lost(self.roles, [other], silent)


def lost(roles: Roles, ranks: Sequence[int], silent: float | None) -> PeerError:
    """The error for processes that did not answer in time, or whose connections were closed.

    >>> lost(Roles(1, 1), [1], 30.0)
    PeerError('Rank 1 (curvature) did not answer within 30 s. If it is at work, allow more time, such as timeout=120.')
    """
    names = " and ".join(map(roles.called, ranks))
    if silent is None:
        verb = "is gone: it has" if len(ranks) == 1 else "are gone: they have"
        sentence = f"{names} {verb} closed the connection."
    else:
        more = f"If it is at work, allow more time, such as timeout={max(120, 4 * round(silent))}."
        sentence = f"{names} did not answer within {silent:g} s. {more}"
    return PeerError(sentence, ranks[0], roles.role(ranks[0]), silent)


def error_to_text(error: NhgdError) -> dict[str, Any]:
    """An error as text."""
    kind = next(name for name, cls in reversed(ERRORS.items()) if isinstance(error, cls) or cls is InputError)
    return {"kind": kind, "sentence": error.reason}


def error_from_text(text: dict[str, Any]) -> NhgdError:
    """The error that was sent.

    >>> error_from_text(error_to_text(NonFiniteError("no number")))
    NonFiniteError('no number')
    """
    return ERRORS[text["kind"]](text["sentence"])
