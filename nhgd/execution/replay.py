"""Work on a record that is captured once as a CUDA graph and then replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd.inverse.base import Steady
from nhgd.record import InnerRecord, LayerStatistics, mapped, tensors

LAYOUTS = 4  # graphs kept: the usual batch, the short one at the end of a pass, and a few more
USUAL = 3  # how often a layout must be met before a graph is worth its making
FORGET = 1000  # layouts remembered that were met too seldom for a graph


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any


class Replay:
    """The steady work of an inverse, whose kernels are launched all at once.

    A thread that launches many small kernels takes Python's lock from the inner loop at each of them. What is returned lives
    in memory that the next call writes to again: use it on the same stream before that.
    """

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, steady: Steady, record: InnerRecord) -> Any:
        """What the work gives for a record, computed by a graph where there is one for such records."""
        given = list(tensors(record))
        key = steady.key, _layout(record, given)
        found = self._graphs.get(key)
        if found is None:
            self._met[key] += 1
            if self._met[key] <= USUAL or len(self._graphs) >= LAYOUTS:
                if len(self._met) > FORGET:
                    self._met.clear()
                return steady.work(record)
            found = self._graphs[key] = self._captured(steady, record)
        torch._foreach_copy_(found.inputs, given)
        found.graph.replay()
        return found.result

    def _captured(self, steady: Steady, record: InnerRecord) -> _Graph:
        fixed = mapped(record, lambda tensor: tensor.clone(memory_format=torch.contiguous_format))
        graph = torch.cuda.CUDAGraph()
        # Other threads go on allocating meanwhile, which only a capture of this thread's own work allows.
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            result = steady.work(fixed)
        return _Graph(graph, list(tensors(fixed)), result)


def _layout(record: InnerRecord, given: list[Tensor]) -> Hashable:
    names = tuple(layer.weight for layer in record.layers) if isinstance(record, LayerStatistics) else ()
    kinds = tuple((t.shape, t.dtype, t.stride()) for t in given)
    return type(record), record.samples, names, kinds
