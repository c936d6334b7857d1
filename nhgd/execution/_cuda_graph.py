"""Work on a record that is captured once as a CUDA graph and then replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd._tree import map_tensors, tensors
from nhgd.inverse._learned.graph import Graphable
from nhgd.record import InnerRecord, LayerStatistics

LAYOUTS = 64  # graphs kept at most: one for each size of a batch, and for each gain where that changes
ROOM = 2**28  # bytes that graphs hold, or four times the record
USUAL = 3  # how often a layout must be met before a graph is worth its making
FORGET = 1000  # layouts remembered that were met too seldom for a graph


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Any


class GraphCache:
    """The graphable work of an inverse on one record or on several, whose kernels are launched all at once.

    A thread that launches many small kernels takes Python's lock from the inner loop at each of them. What is returned
    lives in memory that the next call writes to again: use it on the same stream before that.
    """

    def __init__(self) -> None:
        self._met: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self._pool: Any = None
        self._held = 0  # bytes
        self.due = False  # whether a layout was met often enough, and a call that may capture should come

    def __call__(
        self,
        graphables: Sequence[Graphable],
        records: Sequence[InnerRecord],
        joined: Callable[[list[Any]], Any],
        given: list[list[Tensor]] | None = None,
        capture: bool = True,
    ) -> Any:
        """The result of the work for these records, joined; replayed from a graph if there is one.

        `given` are the tensors of each record, where they are known. A graph is captured by calls with `capture`. Those
        must be in the inner loop's thread: until torch 2.13 no other thread may draw random numbers on the GPU
        meanwhile, such as those of dropout.
        """
        given = [tensors(record) for record in records] if given is None else given
        flat = [tensor for some in given for tensor in some]
        key = _key(graphables, records, given, joined)
        found = self._graphs.get(key)
        if found is None:
            self._met[key] += 1
            if len(self._met) > FORGET:
                self._met.clear()
            if self._worth_it(key, flat):
                self.due = not capture
                found = self._capture(key, graphables, records, joined) if capture else None
            if found is None:
                with torch.no_grad():
                    return joined(
                        [graphable.work(record) for graphable, record in zip(graphables, records, strict=True)]
                    )
        torch._foreach_copy_(found.inputs, flat)
        found.graph.replay()
        return found.result

    def prepare(self, graphable: Graphable, record: InnerRecord, joined: Callable[[list[Any]], Any]) -> None:
        """Capture the work on such records, if it is due for them. Nothing is done with the record."""
        self.due = False
        given = tensors(record)
        key = _key([graphable], [record], [given], joined)
        if key not in self._graphs and self._worth_it(key, given):
            self._capture(key, [graphable], [record], joined)

    def _worth_it(self, key: Hashable, given: list[Tensor]) -> bool:
        size = sum(t.numel() * t.element_size() for t in given)
        full = len(self._graphs) >= LAYOUTS or self._held + size > max(ROOM, 4 * size)
        return self._met[key] > USUAL and not full

    def _capture(
        self,
        key: Hashable,
        graphables: Sequence[Graphable],
        records: Sequence[InnerRecord],
        joined: Callable[[list[Any]], Any],
    ) -> _Graph:
        before = torch.cuda.memory_allocated()
        fixed = [map_tensors(lambda t: t.clone(memory_format=torch.contiguous_format), record) for record in records]
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()  # one for all, because they run one after another
        # Other threads may allocate meanwhile, which only a thread-local capture allows.
        with (
            torch.no_grad(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
            ),
        ):
            result = joined([graphable.work(record) for graphable, record in zip(graphables, fixed, strict=True)])
        made = _Graph(graph, [tensor for record in fixed for tensor in tensors(record)], result)
        self._held += max(0, torch.cuda.memory_allocated() - before)  # with what the graph leaves, which stays
        self._graphs[key] = made
        return made


def _key(
    graphables: Sequence[Graphable], records: Sequence[InnerRecord], given: list[list[Tensor]], joined: Hashable
) -> Hashable:
    """What a graph depends on. Computed for each record, so it must be fast."""
    works = [graphable.key for graphable in graphables]
    forms = [(type(r), r.samples, _names(r), len(some)) for r, some in zip(records, given, strict=True)]
    return (joined, *works, *forms, *[(t.shape, t.dtype, t.stride()) for some in given for t in some])


def _names(record: InnerRecord) -> Hashable:
    return tuple(layer.weight for layer in record.layers) if isinstance(record, LayerStatistics) else ()
