"""How work on a device is captured: as CUDA graphs."""

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

from nhgd._tape import Overlap


class Segment(Protocol):
    """A stretch of captured work."""

    def replay(self) -> None:
        """Run it again on the same memory."""


class AbstractCapture(ABC):
    """Captures the work of a step, in one segment or in several.

    Attributes:
        overlaps: whether work that is independent of what follows runs beside it.
        gathers_ahead: whether batches are gathered where a step starts, and not just before they are used.
    """

    name: str
    overlaps: bool = True
    gathers_ahead: bool = True

    @abstractmethod
    def open(self) -> None:
        """Begin a segment: work is captured and does not run."""

    @abstractmethod
    def close(self) -> Segment:
        """End the segment."""

    @abstractmethod
    def abandon(self) -> None:
        """Clean up after an error during capture."""

    @abstractmethod
    def settled(self) -> None:
        """Leave capture: all segments of the step are closed."""

    @contextmanager
    def early(self) -> Iterator[Overlap]:
        """A context for work that depends on nothing in the segment."""
        yield Overlap()

    @contextmanager
    def overlapped(self, kept: tuple[Tensor, ...]) -> Iterator[Overlap]:
        """A context for work that may overlap with what follows. `kept`, which it reads, stays alive."""
        yield Overlap()

    def join(self) -> None:  # noqa: B027
        """Wait for all overlapped work."""

    def refusal(self, device: torch.device) -> str | None:
        """Why work on a device cannot be captured, or None."""
        return None


class _OnStream(Overlap):
    def __init__(self, capture: CudaCapture) -> None:
        self._capture, self._segment, self.done = capture, capture.segment, torch.cuda.Event()

    @override
    def join(self) -> None:
        if self._segment == self._capture.segment:  # the end of a segment joins all
            self._capture.stream.wait_event(self.done)


@final
class CudaCapture(AbstractCapture):
    """CUDA graphs in one memory pool, which they can share because they run one after another."""

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
            gc.disable()  # a finaliser may call the device
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
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # between two eager sections
            graph.capture_end()
        return graph  # type: ignore[no-any-return]  # torch's own

    @contextmanager
    @override
    def early(self) -> Iterator[Overlap]:
        with self._on(self._early, self._began) as work:
            yield work

    @contextmanager
    @override
    def overlapped(self, kept: tuple[Tensor, ...]) -> Iterator[Overlap]:
        self._kept.append(kept)
        here = torch.cuda.Event()
        here.record(self.stream)
        with self._on(self._side, here) as work:
            yield work

    @contextmanager
    def _on(self, stream: Any, after: Any) -> Iterator[Overlap]:
        if not self.overlaps:
            yield Overlap()
            return
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
        except RuntimeError:  # the error has already ended the capture
            _free_generator()
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


def _free_generator() -> None:
    """Let the device draw random numbers again: a capture that failed leaves its generator as if it were still on."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
