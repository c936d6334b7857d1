"""Where work on a device is captured: as CUDA graphs."""

from __future__ import annotations

import gc
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._tape import Aside


class Segment(Protocol):
    """A piece of captured work."""

    def replay(self) -> None:
        """Do it again, on the same memory."""


class AbstractCapture(ABC):
    """Captures the work of a step, in one segment or in several."""

    name: str

    @abstractmethod
    def open(self) -> None:
        """From here on work is captured, and not done."""

    @abstractmethod
    def close(self) -> Segment:
        """The segment ends here."""

    @abstractmethod
    def abandon(self) -> None:
        """Something went wrong while a segment was open, or between two."""

    @abstractmethod
    def settled(self) -> None:
        """All segments of a step were closed."""

    @contextmanager
    def early(self) -> Iterator[Aside]:
        """Work inside depends on nothing in the segment."""
        yield Aside()

    @contextmanager
    def aside(self, kept: tuple[Tensor, ...]) -> Iterator[Aside]:
        """Work inside depends on what came before, and may go on beside what follows. What it reads is not let go of."""
        yield Aside()

    def join(self) -> None:  # noqa: B027
        """All that went on beside is done."""

    def refusal(self, device: torch.device) -> str | None:
        """Why work on a device cannot be captured; None where it can."""
        return None


class _OnStream(Aside):
    def __init__(self, capture: CudaCapture) -> None:
        self._capture, self._segment, self.done = capture, capture.segment, torch.cuda.Event()

    @override
    def join(self) -> None:
        if self._segment == self._capture.segment:  # the end of a segment has joined all
            self._capture.stream.wait_event(self.done)


@final
class CudaCapture(AbstractCapture):
    """CUDA graphs, all of them in one pool of memory, because they run one after another."""

    name = "graph"

    def __init__(self) -> None:
        self._early: Any = None
        self._side: Any = None
        self._forked: set[Any] = set()
        self._kept: list[Any] = []
        self._pool: Any = None
        self.stream: Any = None
        self._graph: Any = None
        self._outside: Any = None
        self._began: Any = None
        self._collects = True
        self.segment = 0

    @override
    def refusal(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"CUDA graphs need a CUDA device, and theta is on {device.type}"

    @override
    def open(self) -> None:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self.stream, self._early, self._side = (torch.cuda.Stream() for _ in range(3))
        if self._outside is None:
            torch.cuda.synchronize()
            self.stream.wait_stream(torch.cuda.current_stream())
            self._outside = torch.cuda.stream(self.stream)
            self._outside.__enter__()
            self._collects = gc.isenabled()
            gc.disable()  # what is let go of meanwhile may ask something of the device
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._began = torch.cuda.Event()
        self._began.record(self.stream)

    @override
    def close(self) -> Segment:
        self.join()
        self.segment += 1
        graph, self._graph = self._graph, None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # between two islands
            graph.capture_end()
        return graph  # type: ignore[no-any-return]  # torch's own

    @contextmanager
    @override
    def early(self) -> Iterator[Aside]:
        with self._on(self._early, self._began) as work:
            yield work

    @contextmanager
    @override
    def aside(self, kept: tuple[Tensor, ...]) -> Iterator[Aside]:
        self._kept.append(kept)
        here = torch.cuda.Event()
        here.record(self.stream)
        with self._on(self._side, here) as work:
            yield work

    @contextmanager
    def _on(self, stream: Any, after: Any) -> Iterator[Aside]:
        work = _OnStream(self)
        stream.wait_event(after)
        self._forked.add(stream)
        with torch.cuda.stream(stream):
            yield work
        work.done.record(stream)

    @override
    def join(self) -> None:
        for stream in self._forked:
            self.stream.wait_stream(stream)
        self._forked.clear()

    @override
    def abandon(self) -> None:
        self._forked.clear()
        graph, self._graph = self._graph, None
        try:
            if graph is not None:
                graph.capture_end()
        except RuntimeError:  # the capture was broken off by what went wrong
            pass
        finally:
            self.settled()

    @override
    def settled(self) -> None:
        if self._outside is not None:
            self._kept.clear()
            self._outside.__exit__(None, None, None)
            self._outside = None
            if self._collects:
                gc.enable()
            torch.cuda.current_stream().wait_stream(self.stream)
