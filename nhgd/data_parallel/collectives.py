"""The workers that share one inner batch, and what they exchange."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from math import prod
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from nhgd._validation import positive
from nhgd.errors import InputError, PeerError, RunError

RANK_SEED = 0x9E3779B97F4A7C15  # far apart, so that the seeds of one worker are never those of another


class AbstractTeam(ABC):
    """The workers that share one inner batch: `size` of them, this one being number `rank`."""

    rank: int
    size: int
    bytes_sent: int

    @abstractmethod
    def agreed(self, number: float) -> float:
        """The first worker's number."""

    @abstractmethod
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors in place by those of the first worker."""

    @abstractmethod
    def assert_equal(self, **things: Iterable[Tensor]) -> None:
        """Stop the run if named values that should be equal on all workers are not."""

    def seed(self, seed: int) -> int:
        """A seed of this worker's own from one that all workers know."""
        return (seed + self.rank * RANK_SEED) % 2**63


@final
class Alone(AbstractTeam):
    """One worker: nothing is divided and nothing is exchanged.

    >>> Alone().agreed(0.5), Alone().size
    (0.5, 1)
    """

    rank = 0
    size = 1
    bytes_sent = 0

    @override
    def agreed(self, number: float) -> float:
        return number

    @override
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        pass

    @override
    def assert_equal(self, **things: Iterable[Tensor]) -> None:
        pass


@final
class Team(AbstractTeam):
    """The workers of a process group, on gloo or NCCL. Every worker must make the same calls in the same order.

    Sums come out with the same bits on every worker, so that replicas stay replicas.

    Args:
        group: the process group; None: the default one. `torch.distributed` must have been started.
        timeout: seconds after which a worker that does not take part counts as lost.
        sparse_from: the least number of entries for which `sparse_sum` looks for zeros.

    >>> Team.of.__name__
    'of'
    """

    def __init__(self, group: Any = None, timeout: float = 300.0, sparse_from: int = 2**14) -> None:
        positive("Team", timeout=timeout)
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "A team needs an initialised torch.distributed. Start the workers with torchrun and call"
                " torch.distributed.init_process_group('gloo') first."
            )
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self.timeout = timeout
        self.sparse_from = sparse_from
        self.bytes_sent = 0
        self.ranks = tuple(dist.get_process_group_ranks(self.group))
        self._nccl = "nccl" in str(dist.get_backend(self.group))

    @staticmethod
    def of(group: Any = None, timeout: float = 300.0) -> AbstractTeam:
        """The team of a process group; `Alone` if it has one member."""
        found = Team(group, timeout)
        return found if found.size > 1 else Alone()

    # Dividing.

    def parts(self, count: int) -> tuple[int, ...]:
        """How many of `count` things each worker has; numbers differ by one at most."""
        each, more = divmod(count, self.size)
        return tuple(each + (rank < more) for rank in range(self.size))

    def place(self, parts: Sequence[int]) -> slice:
        """The slice of this worker's part in the whole."""
        start = sum(parts[: self.rank])
        return slice(start, start + parts[self.rank])

    def divide(self, costs: Sequence[float]) -> list[int]:
        """Who does what: the dearest first, each to the worker that has least to do so far."""
        loads = [0.0] * self.size
        owners = [0] * len(costs)
        for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
            owners[item] = min(range(self.size), key=lambda rank: loads[rank])
            loads[owners[item]] += costs[item]
        return owners

    # Exchanging.

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over the workers; all of one dtype travel together. Those given stay as they are."""
        works = []
        for places in _by_dtype(tensors).values():
            flat = self._packed([tensors[i] for i in places])
            works.append((places, flat, self._start(dist.all_reduce, flat)))
            self._count(flat)
        found: dict[int, Tensor] = {}
        for places, flat, work in works:
            self._wait(work)
            found |= dict(zip(places, _unpacked(flat, [tensors[i] for i in places]), strict=True))
        return [found[i] for i in range(len(tensors))]

    def mean(self, tensors: Sequence[Tensor], parts: Sequence[int]) -> list[Tensor]:
        """The mean over the samples of a batch from each worker's mean over its own."""
        share = parts[self.rank] / sum(parts)
        return self.sum([t * share for t in tensors])

    def sparse_sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As `sum`, but sends only nonzero entries if they are few, such as the weights of one batch among many.

        Entries with their places travel when the most that a worker has, times the workers, is below a quarter of the
        bytes of the whole; all workers make the same decision. Terms are added in the order of the ranks.
        """
        if sum(t.numel() for t in tensors) < self.sparse_from or len({t.dtype for t in tensors}) != 1:
            return self.sum(tensors)
        flat = torch.cat([t.reshape(-1) for t in tensors])
        index = torch.nonzero(flat).reshape(-1)
        counts = self.counts(len(index))
        most = max(counts)
        if most * self.size * (flat.element_size() + index.element_size()) > flat.numel() * flat.element_size() / 4:
            return self.sum(tensors)
        values, places = self.gather([flat[index], index], counts)
        total = torch.zeros_like(flat)
        for some, where in zip(values.split(counts), places.split(counts), strict=True):
            total.index_add_(0, where, some)  # no entry twice in one worker's part: the order of additions is fixed
        return _unpacked(total, tensors)

    def gather(self, tensors: Sequence[Tensor], parts: Sequence[int]) -> list[Tensor]:
        """Concatenate rows of all workers in the order of the ranks; `parts` gives their numbers."""
        works = []
        most = max(parts)
        for places in _by_dtype(tensors).values():
            chosen = [tensors[i] for i in places]
            widths = [prod(t.shape[1:]) for t in chosen]
            mine = self._packed([t.reshape(-1) for t in chosen])
            padded = mine.new_zeros(most * sum(widths))
            padded[: len(mine)] = mine
            found = [torch.empty_like(padded) for _ in range(self.size)]
            works.append((places, widths, found, self._start(dist.all_gather, found, padded)))
            self._count(padded)
        gathered: dict[int, Tensor] = {}
        for places, widths, found, work in works:
            self._wait(work)
            rows = [
                f.split([n * w for w in widths] + [(most - n) * sum(widths)]) for f, n in zip(found, parts, strict=True)
            ]
            for position, place in enumerate(places):
                given = tensors[place]
                whole = torch.cat([pieces[position] for pieces in rows])
                gathered[place] = whole.to(given).reshape(sum(parts), *given.shape[1:])
        return [gathered[i] for i in range(len(tensors))]

    def exchange(self, likes: Sequence[Tensor], owners: Sequence[int], make: Callable[[int], Tensor]) -> list[Tensor]:
        """Distribute item i from its owner to every worker. Its shape, dtype and device are those of `likes[i]`."""
        works = []
        for owner in range(self.size):
            items = [i for i, who in enumerate(owners) if who == owner]
            for places in _by_dtype([likes[i] for i in items]).values():
                chosen = [items[p] for p in places]
                given = [likes[i] for i in chosen]
                if owner == self.rank:
                    flat = self._packed([make(i) for i in chosen])
                    self._count(flat)
                else:
                    dtype = _wire(given[0].dtype)
                    flat = torch.empty(sum(t.numel() for t in given), dtype=dtype, device=self._device(given[0]))
                source = self.ranks[owner]
                works.append((chosen, given, flat, self._start(dist.broadcast, flat, source)))
        found: dict[int, Tensor] = {}
        for chosen, given, flat, work in works:
            self._wait(work)
            found |= dict(zip(chosen, _unpacked(flat, given), strict=True))
        return [found[i] for i in range(len(likes))]

    def map(self, likes: Sequence[Tensor], costs: Sequence[float], make: Callable[[int], Tensor]) -> list[Tensor]:
        """Tensor i, shaped as `likes[i]`, made by one worker, on every one; the dearest are given out first."""
        return self.exchange(likes, self.divide(costs), make)

    def map_rows(self, count: int, make: Callable[[slice], Tensor]) -> Tensor:
        """A tensor of `count` rows, computed in parts by all workers."""
        parts = self.parts(count)
        return self.gather([make(self.place(parts))], parts)[0]

    # Agreeing.

    @override
    def agreed(self, number: float) -> float:
        like = torch.tensor(number, dtype=torch.float64)
        return float(self.exchange([like], [0], lambda _: like)[0])

    def any(self, flag: bool) -> bool:
        """Whether it holds on some worker."""
        return sum(self.counts(int(flag))) > 0

    def union(self, names: Iterable[str], known: Sequence[str]) -> set[str]:
        """Every name that some worker has, out of names that all workers know in the same order."""
        mine = set(names)
        found = self.sum([torch.tensor([float(name in mine) for name in known])])[0]
        return {name for name, count in zip(known, found.tolist(), strict=True) if count > 0}

    @torch.no_grad()
    @override
    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        given = list(tensors)
        for tensor, first in zip(given, self.exchange(given, [0] * len(given), given.__getitem__), strict=True):
            tensor.copy_(first)

    @override
    def assert_equal(self, **things: Iterable[Tensor]) -> None:
        """Stop the run if named values that should be equal on all workers are not."""
        digests = torch.tensor([[_digest(tensors) for tensors in things.values()]], dtype=torch.int64)
        found = self.gather([digests], [1] * self.size)[0]  # (size, things)
        for column, name in enumerate(things):
            others = [rank for rank in range(self.size) if found[rank, column] != found[0, column]]
            if others:
                raise RunError(
                    f"The workers have diverged: {name} of rank {', '.join(map(str, others))} differs from that of"
                    " rank 0. Something in inner(), outer(), a projection, an optimiser or the data depends on the"
                    " worker: use the same data, seed and kind of machine for all of them."
                )

    def counts(self, number: int) -> list[int]:
        """One whole number of each worker."""
        found: list[int] = self.gather([torch.tensor([number], dtype=torch.int64)], [1] * self.size)[0].tolist()
        return found

    # The wire.

    def _start(self, collective: Callable[..., Any], *args: Any) -> Any:
        """Start a collective; `_wait` completes it."""
        try:
            return collective(*args, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._lost(None) from error

    def _wait(self, work: Any) -> None:
        """Wait for a collective. Every wait for other workers is here."""
        began = time.monotonic()
        try:
            done = work.wait(timedelta(seconds=self.timeout))
        except RuntimeError as error:  # what gloo raises when the time is over, and when a connection is closed
            silent = time.monotonic() - began >= 0.9 * self.timeout
            raise self._lost(self.timeout if silent else None) from error
        if done is False:
            raise self._lost(self.timeout)

    def close(self) -> None:
        """Destroy the process group."""
        self.group = None

    def _lost(self, silent: float | None) -> PeerError:
        """The error for workers that did not answer within this time, or whose connection was closed."""
        reason = "a connection was closed" if silent is None else f"it did not answer within {silent:g} s"
        return PeerError(
            f"Rank {self.rank} of {self.size} has lost another worker: {reason}. Check the last output of the other"
            " workers, and restart all of them.",
            silent=silent,
        )

    def _device(self, like: Tensor) -> torch.device:
        """The device that the backend sends from: the GPU for NCCL, main memory for gloo."""
        if not self._nccl:
            return torch.device("cpu")
        return like.device if like.is_cuda else torch.device("cuda", torch.cuda.current_device())

    def _packed(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of one dtype as one vector of its own memory; half precision travels, and is summed, as float32."""
        device = self._device(tensors[0])
        return torch.cat([t.detach().reshape(-1).to(device, _wire(t.dtype)) for t in tensors])

    def _count(self, flat: Tensor) -> None:
        self.bytes_sent += flat.numel() * flat.element_size()


def _wire(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for i, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(i)
    return found


def _unpacked(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.split([t.numel() for t in likes])
    return [part.to(like.device, like.dtype).reshape(like.shape) for part, like in zip(parts, likes, strict=True)]


def _digest(tensors: Iterable[Tensor]) -> int:
    digest = hashlib.sha256()
    for tensor in tensors:
        # A copy: memory that NumPy has seen can never be freed, as fully_shard does.
        own = tensor.detach().reshape(-1).to("cpu", copy=True)
        digest.update(own.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little", signed=True)
