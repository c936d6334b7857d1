"""An endless walk over a loader, whose position can be kept and found again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nhgd import _tape as tape
from nhgd._randomness import generators, set_generators
from nhgd._tree import tensors
from nhgd.data.batch import Batch, fingerprint, move
from nhgd.data.loader import Data, Walk, gathered_rows, reiterable
from nhgd.data.padding import Padded, Places
from nhgd.errors import InputError


class _Drawn(NamedTuple):
    """The sample indices of a batch that the host has not needed yet."""

    samples: np.ndarray[Any, Any]


class BatchStream:
    """An endless walk over a re-iterable loader, pass after pass, with batches moved to one device.

    Args:
        source: the loader.
        name: what messages call it.
        device: where batches go.
        remember: note the states of the random generators whenever the source may draw from them, so that `position`
            can describe the walk.
    """

    def __init__(self, source: Iterable[Batch], name: str, device: torch.device, remember: bool = False) -> None:
        self.source = reiterable(source, name)
        self.name = name
        self.device = device
        self.remember = remember
        self.passes = 0
        self._last: Batch = None
        self._walk: Iterator[Batch] | None = None
        self._taken = 0
        self.drawn = 0  # batches, of all passes
        self.pads = False  # whether shorter batches of `Data` are filled up
        self._places: Places | None = None  # of those
        self._start: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None

    @property
    def values(self) -> int | None:
        """The numbers in the smallest tensor of a pass, usually its labels; None if that would need a walk over the
        data.

        A DataLoader has one for each of its samples.
        """
        source = self.source
        if isinstance(source, Data):
            return min(t.numel() for t in source.tensors)
        if isinstance(source, DataLoader):
            return len(source.dataset) if isinstance(source.dataset, Sized) else None
        if isinstance(source, (list, tuple)):
            counts = [min((t.numel() for t in tensors(batch) if t.ndim), default=None) for batch in source]
            return None if None in counts else sum(count for count in counts if count is not None)
        return None

    @property
    def batches(self) -> int | None:
        """The batches of a pass; None if the source does not tell."""
        try:
            return len(self.source) if isinstance(self.source, Sized) else None
        except TypeError:  # a loader of an endless data set has a length, but no value for it
            return None

    def peek(self) -> Batch:
        """The first batch of a pass, without advancing the walk or torch's generator."""
        before = torch.get_rng_state()
        try:
            return BatchStream(self.source, self.name, self.device).next()
        finally:
            torch.set_rng_state(before)

    @property
    def last(self) -> Batch:
        """The batch that was drawn last."""
        if isinstance(self._last, _Drawn):
            self._last = self.gathered(torch.from_numpy(self._last.samples))
        return self._last

    def next(self) -> Batch:
        """The next batch; a new pass starts after the last."""
        noting = tape.tape()
        if noting is not None:
            if self.is_constant:
                tape.effect(lambda: self._advance(next))
                return self.constant
            return noting.batch(self)
        return self.gathered(self.next_padded()) if self.pads else self._advance(next)

    def next_index(self) -> Tensor:
        """The sample indices of the next batch, for a source that is `Data`."""
        return torch.from_numpy(self._drawn())

    def _drawn(self) -> np.ndarray[Any, Any]:
        def drawn(walk: Iterator[Batch]) -> Batch:
            assert isinstance(walk, Walk)
            return _Drawn(walk.next_index())

        found: _Drawn = self._advance(drawn)
        return found.samples

    def next_padded(self) -> Tensor:
        """The same for a batch that is filled up with a sample of its own, and in the last place how many count."""
        assert isinstance(self.source, Data)
        filled = np.empty(self.source.batch + 1, dtype=np.int64)
        self.draw_into(filled)
        return torch.from_numpy(filled)

    def draw_into(self, place: np.ndarray[Any, Any]) -> None:
        """Write the sample indices of the next batch where they will be sent from."""
        samples = self._drawn()
        count = len(samples)
        place[:count] = samples
        if self.pads:
            place[count:] = samples[0]
            place[-1] = count

    @property
    def longest(self) -> int:
        """The samples of a full batch of `Data`."""
        assert isinstance(self.source, Data)
        return self.source.batch

    def drawing(self) -> Callable[[], Tensor]:
        """What a tape notes of the next batch: how its index is drawn."""
        return self.next_padded if self.pads else self.next_index

    def gathered(self, index: Tensor) -> Batch:
        """The batch of some samples of `Data`, filled up if the index is."""
        assert isinstance(self.source, Data)
        if len(index) > self.source.batch:
            last = self._last
            samples = len(last.samples) if isinstance(last, _Drawn) else self.source.batch
            batch = self.gathered(index[:-1])
            if self._places is None:
                self._places = Places.of(batch, self.device)
            return Padded.of(batch, index[-1].to(self.device), samples, self._places)
        at = {device: index.to(device) for device in {t.device for t in self.source.columns}}
        columns = [gathered_rows(t, at[t.device]) for t in self.source.tensors]
        return (*columns, at[self.source.columns[-1].device])  # the index of a sample is itself

    def bytes(self, samples: int) -> int:
        """What so many samples of `Data` take."""
        assert isinstance(self.source, Data)
        return sum(samples * t[:1].numel() * t.element_size() for t in self.source.tensors)

    def gathered_together(self, indices: Sequence[Tensor]) -> list[Batch]:
        """The batches of equally long indices, by as many operations as one of them takes."""
        assert isinstance(self.source, Data)
        together = torch.stack(list(indices))  # (n, B), or one more for how many count
        batch = self.source.batch
        rows = together[:, :batch].reshape(-1)
        columns = [gathered_rows(t, rows).unflatten(0, (len(indices), -1)) for t in self.source.tensors]
        found = list(zip(*(column.unbind() for column in columns), rows.view(len(indices), -1).unbind(), strict=True))
        if together.shape[1] == batch or self._places is None:
            return [tuple(parts) for parts in found]
        return Padded.several(found, together[:, batch:], self._places)

    @property
    def is_constant(self) -> bool:
        """Whether there is one batch only, which is the same in every pass."""
        source = self.source
        return len(source) == 1 if type(source) in (Data, list, tuple) else False  # type: ignore[arg-type]

    @property
    def constant(self) -> Batch:
        """The only batch."""
        return next(iter(self.source))

    def refusal(self) -> str | None:
        """Why the batches of a captured step cannot be gathered on the device, as a clause; None if they can."""
        source = self.source
        if self.is_constant:
            found = list(tensors(self.constant))
        elif isinstance(source, Data) and type(source).__iter__ is Data.__iter__:
            found = list(source.columns)
        else:
            return f"{self.name} is not an nhgd.Data, whose batches can be gathered on the device"
        if any(t.device != self.device for t in found):
            return f"{self.name} is not on {self.device}: give Data(..., device=...)"
        return None

    def sizes(self, count: int) -> tuple[int, ...]:
        """The samples of the next batches."""
        source = self.source
        if self.is_constant or not isinstance(source, Data):
            return ()
        taken = self._taken if self._walk is not None else 0
        return tuple(source.size((taken + i) % len(source)) for i in range(count))

    def _advance(self, take: Callable[[Iterator[Batch]], Batch]) -> Batch:
        for _ in range(2):
            if self._walk is None:
                self._start = self._drawn_from() if self.remember and self._may_draw else None
                self._walk = iter(self.source)
                self._taken = 0
                self.passes += 1
            if self.remember and not isinstance(self.source, (Data, list, tuple)):
                self._before = self._drawn_from()
            try:
                batch = take(self._walk)
            except StopIteration:
                self._walk = None
                continue
            self._taken += 1
            self.drawn += 1
            self._last = batch if isinstance(batch, _Drawn) else move(batch, self.device)
            return self._last
        raise InputError(f"{self.name} yields no batch. Provide at least one, for example [(x, y)].")

    @property
    def _may_draw(self) -> bool:
        """Whether walking over the source may draw random numbers."""
        if isinstance(self.source, Data):
            return self.source.shuffle and self.source.batch < self.source.samples
        return not isinstance(self.source, (list, tuple))

    def _own(self) -> list[torch.Generator]:
        """The generators that a DataLoader and its samplers were given, each once."""
        found: dict[int, torch.Generator] = {}
        places: list[Any] = [self.source]
        for place in places:
            generator = getattr(place, "generator", None)
            if isinstance(generator, torch.Generator):
                found[id(generator)] = generator
            if len(places) < 8:
                parts = (getattr(place, name, None) for name in ("sampler", "batch_sampler"))
                places += [part for part in parts if part is not None]
        return list(found.values())

    def _drawn_from(self) -> dict[str, Any]:
        return {"global": generators(self.device), "own": [g.get_state() for g in self._own()]}

    def _draw_from(self, state: dict[str, Any]) -> None:
        set_generators(state["global"], self.device)
        self._own_to(state["own"])

    def _own_to(self, states: list[Tensor]) -> None:
        own = self._own()
        if len(own) != len(states):
            raise InputError(
                f"{self.name} had {len(states)} random generator(s) of its own and now has {len(own)}. Use the loader"
                " of the saved run."
            )
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)

    def position(self) -> dict[str, Any]:
        """The position of the walk, for `go_to`. Needs `remember`."""
        assert self.remember
        return {
            "passes": self.passes,
            "taken": self._taken,
            "start": self._start,
            "before": self._before,
            "own": [g.get_state() for g in self._own()],
            "last": None if self.passes == 0 else fingerprint(self.last),
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Walk to a position of an equal source: its pass is begun again and as many batches are passed over.

        The global generators are left wherever this takes them. A source that then gives another batch than it gave
        before is refused, because the run would go on with other data.
        """
        self.passes, self._taken = position["passes"], position["taken"]
        self._start, self._before = position["start"], position["before"]
        if self.passes:
            if self._start is not None:
                self._draw_from(self._start)
            self._walk = iter(self.source)
            batch: Batch = None
            for i in range(self._taken):
                if i == self._taken - 1 and self._before is not None:
                    set_generators(self._before["global"], self.device)
                batch = next(self._walk, None)
                if batch is None:
                    break
            self._last = move(batch, self.device)
            if batch is None or fingerprint(self._last) != position["last"]:
                raise InputError(
                    f"{self.name} does not reproduce the batches of the saved run: the data differ, or their order"
                    " does not come from torch's, NumPy's or Python's global generator. Use the same data, or"
                    f" {self.name}=nhgd.Data(...), which is reproducible."
                )
        self._own_to(position["own"])
