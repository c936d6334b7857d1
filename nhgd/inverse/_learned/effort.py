"""How much of the inner steps a learnt inverse takes, so that its cost stays within a budget."""

from __future__ import annotations

from dataclasses import dataclass

from nhgd._recording.sampling import Sampling


@dataclass(frozen=True)
class Effort:
    """Which inner steps are recorded, how much of them, and when factors are decomposed: by step numbers alone.

    Attributes:
        samples: how many of each batch a record takes; None: all.
        places: how many of each sample a record takes at layers with more of them; None: all.
        every, last: of each `every` inner steps the last `last` are recorded; None: the first one.
        invert_every: observations from one decomposition of all factors to the next.
        small: factors with up to this many rows are decomposed at every observation.
        build_up_small: the same at those of the build-up, which are more; None: as `small` says.
        memory: samples that a running mean remembers, or a window holds; None: as `beta` or `window` says.
        build_up: inner steps at the beginning, of which more are recorded, so that there is something to invert.
        build_up_every, build_up_last: which of these, in the same way.
        build_up_samples: of each batch in these records; None: all, and all places.
        invert_at: observations at the beginning at which all factors are decomposed; None: in the build-up they are in
            each solve, and nothing is kept.
        iterations: at most this many of conjugate gradients in a solve with an uneven ridge; None: as many as are
            used outside of a run.

    >>> effort = Effort(samples=8, every=10, invert_every=5, build_up=20, build_up_samples=64, invert_at=(10, 22))
    >>> [step for step in range(50) if effort.records(step)] == [*range(20), 20, 30, 40]
    True
    >>> [seen for seen in range(1, 40) if effort.inverts(seen)]
    [10, 22, 27, 32, 37]
    >>> ends = Effort(every=10, last=1, build_up=20, build_up_every=10, build_up_last=2)  # of inner loops of ten steps
    >>> [step for step in range(50) if ends.records(step)], ends.observed_in_build_up
    ([8, 9, 18, 19, 29, 39, 49], 4)
    """

    samples: int | None = None
    places: int | None = None
    every: int = 1
    last: int | None = None
    invert_every: int = 1
    small: int = 0
    build_up_small: int | None = None
    memory: int | None = None
    build_up: int = 0
    build_up_every: int = 1
    build_up_last: int | None = None
    build_up_samples: int | None = None
    invert_at: tuple[int, ...] | None = None
    iterations: int | None = None

    def records(self, step: int) -> bool:
        """Whether an inner step, counted from 0 over the whole run, is recorded."""
        building = step < self.build_up
        every, last = (self.build_up_every, self.build_up_last) if building else (self.every, self.last)
        place = (step if building else step - self.build_up) % every
        return place == 0 if last is None else place >= every - last

    @property
    def observed_in_build_up(self) -> int:
        """How many records the build-up has."""
        return sum(map(self.records, range(self.build_up)))

    def sampling(self, step: int) -> Sampling | None:
        """How much of the record of an inner step is taken; None: everything."""
        building = step < self.build_up
        samples = self.build_up_samples if building else self.samples
        places = None if building and samples is None else self.places
        return None if samples is None and places is None else Sampling(samples, places, step)

    def in_full(self, observed: int) -> bool:
        """Whether observation number `observed` was taken in full, and is decomposed in each solve."""
        return observed <= self.observed_in_build_up and self.invert_at is None

    def refreshes(self, observed: int) -> int:
        """Factors with up to this many rows are decomposed at this observation.

        >>> [Effort(small=9, build_up=2, build_up_small=4, invert_at=(2,)).refreshes(seen) for seen in (1, 2, 3)]
        [4, 4, 9]
        """
        building = self.build_up_small is not None and observed <= self.observed_in_build_up
        return min(self.small, self.build_up_small or 0) if building else self.small

    def inverts(self, observed: int) -> bool:
        """Whether all factors are decomposed at this observation, counted from 1."""
        if self.invert_at is None:  # nothing was kept until then, so the first one after it is due
            later = observed - self.observed_in_build_up
            return later > 0 and (later - 1) % self.invert_every == 0
        last = max(self.invert_at, default=0)
        return observed in self.invert_at or (observed > last and (observed - last) % self.invert_every == 0)

    def share(self, observed: int) -> tuple[int, int] | None:
        """Which layers are decomposed at this observation, as k of every n of them, where they take turns.

        They do after the decompositions of the build-up, so that no step takes long; None before. The first ones come
        last: of fewer layers than there are turns, none is decomposed again before most of a period's records came.

        >>> [Effort(invert_every=3, invert_at=(2,)).share(seen) for seen in (2, 3, 4, 5)]
        [None, (2, 3), (1, 3), (0, 3)]
        """
        last = 0 if self.invert_at is None else max(self.invert_at, default=0)
        if self.invert_every == 1 or self.invert_at is None or observed <= last:
            return None
        return (last - observed) % self.invert_every, self.invert_every

    def beta(self, beta: float | None, samples: int, observed: int) -> float | None:
        """The forgetting factor of the next record, which has `samples`, after `observed` observations."""
        if self.memory is None or beta is None or self.in_full(observed + 1):
            return beta
        return max(0.0, 1 - samples / self.memory)
