"""Work on a record that is captured once as a CUDA graph and then replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd.inverse.base import Steady
from nhgd.record import InnerRecord, LayerStatistics, mapped, tensors

LAYOUTS = 64  # graphs kept at most: one for each size of a batch, and for each gain where that changes
ROOM = 2**26  # bytes for the inputs of graphs, or of four of the largest
USUAL = 3  # how often a layout must be met before a graph is worth its making
FORGET = 1000  # layouts remembered that were met too seldom for a graph


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any


class Replay:
    """The steady work of an inverse on one record or on several, whose kernels are launched all at once.

    A thread that launches many small kernels takes Python's lock from the inner loop at each of them. What is returned lives
    in memory that the next call writes to again: use it on the same stream before that.
    """

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool: Any = None
        self._held = 0  # bytes

    def __call__(
        self, steadies: Sequence[Steady], records: Sequence[InnerRecord], joined: Callable[[list[Any]], Any]
    ) -> Any:
        """What the work gives for each record, joined; computed by a graph where there is one for such records."""
        given = [list(tensors(record)) for record in records]
        key = tuple((s.key, _layout(r, ts)) for s, r, ts in zip(steadies, records, given, strict=True))
        flat = [tensor for some in given for tensor in some]
        found = self._graphs.get(key)
        if found is None:
            self._met[key] += 1
            size = sum(t.numel() * t.element_size() for t in flat)
            full = len(self._graphs) >= LAYOUTS or self._held + size > max(ROOM, 4 * size)
            if self._met[key] <= USUAL or full:
                if len(self._met) > FORGET:
                    self._met.clear()
                with torch.no_grad():
                    return joined([steady.work(record) for steady, record in zip(steadies, records, strict=True)])
            found = self._graphs[key] = self._captured(steadies, records, joined)
            self._held += size
        torch._foreach_copy_(found.inputs, flat)
        found.graph.replay()
        return found.result

    def _captured(
        self, steadies: Sequence[Steady], records: Sequence[InnerRecord], joined: Callable[[list[Any]], Any]
    ) -> _Graph:
        fixed = [mapped(record, lambda t: t.clone(memory_format=torch.contiguous_format)) for record in records]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all, because they run one after another
        # Other threads go on allocating meanwhile, which only a capture of this thread's own work allows.
        with (
            torch.no_grad(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ),
        ):
            result = joined([steady.work(record) for steady, record in zip(steadies, fixed, strict=True)])
        return _Graph(graph, [tensor for record in fixed for tensor in tensors(record)], result)


def _layout(record: InnerRecord, given: list[Tensor]) -> Hashable:
    names = tuple(layer.weight for layer in record.layers) if isinstance(record, LayerStatistics) else ()
    kinds = tuple((t.shape, t.dtype, t.stride()) for t in given)
    return type(record), record.samples, names, kinds
