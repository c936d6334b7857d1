"""How much of the inner steps a learnt inverse may use within a share of the inner loop's cost, from shapes alone.

The operations of the inner loop and of the curvature are counted and priced by a few constants that were measured once
on one machine (`benchmarks/prices.py`, `benchmarks/results/prices-cpu.json`, `prices-h200.json`). The same model and
batches therefore give the same decisions everywhere, also when a run is resumed.

The share also limits the number of gradients: extra backward passes of records may be no greater a part of all, however
cheap they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from nhgd._cost import Operation, kronecker, windowed, work
from nhgd._prices import Prices
from nhgd._shape import Shape
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.layer_ridge import ITERATIONS
from nhgd.inverse._learned.periods import Periodic
from nhgd.inverse.fisher_window import FisherWindow
from nhgd.inverse.kfac import KFAC

BUILD_UP = 10  # outer steps
BUILD_UP_SHARE = 6.0  # how many times the overhead these may take
MORE_PASSES = 2  # times as many passes as later an outer step of these may take
BRIEF_RECORD = 0.002  # seconds of a record and its decompositions that every inner loop may end with
BRIEF = 0.02  # seconds of curvature in an outer step that are always allowed: in these steps, and with a window in all
FEWEST = 32  # samples of a record, where the batch has them: fewer cost as much
FEW_PLACES = 8  # of a sample
FEW_ITERATIONS = 5  # of conjugate gradients in a solve
NEEDED = 4  # samples for each row of the widest factor before it is first inverted, if possible
ENOUGH = 8  # that a running mean holds later


def affordable_passes(overhead: float, steps: int) -> int:
    """The passes over a batch that curvature may take in an outer step, in addition to those of the inner loop and
    hypergradient.

    >>> affordable_passes(0.1, 10), affordable_passes(0.1, 20), affordable_passes(0.01, 20)
    (1, 2, 1)
    """
    return max(1, int(overhead * (steps + 1) * (1 + 1e-12)))


@dataclass(frozen=True)
class Budget:
    """The cost of a learnt inverse on a model, and the share of it that may be spent.

    Attributes:
        shape: of the model and its batches.
        gradient: seconds of the inner gradient of a batch.
        inner: seconds of an inner step.
        steps: of an inner loop.
        prices: of operations.
        passes: backward passes over the batch that a record takes in addition to that of its inner step.
        single: whether a solve follows each inner step, and not where the inner loop ends.
    """

    shape: Shape
    gradient: float
    inner: float
    steps: int
    prices: Prices
    passes: int = 0
    single: bool = False

    def effort(self, inverse: Periodic[Any]) -> Effort | None:
        """How much the inverse records within its overhead; None: everything, because it can.

        One record for each inner loop, with as many samples as half of the budget left by the solve pays for; or with
        all of them, more often; or with few, less often. The other half pays for decompositions. At the beginning there
        is more.
        """
        assert inverse.overhead is not None
        if isinstance(inverse, FisherWindow):
            return self._of_window(inverse, inverse.overhead)
        allowed = inverse.overhead * self.inner * self.steps
        most = affordable_passes(inverse.overhead, self.steps)
        solve, invert = self.solve(inverse), self.invert(inverse)
        left = max(allowed - solve, allowed / 2)
        if self.steps * self.record(inverse, None, None) + invert <= left and self.steps * self.passes <= most:
            return None
        iterations = self._iterations(inverse, allowed / 2)
        solve = self.solve(inverse, iterations)
        left = max(allowed - solve, allowed / 2)
        half = left / 2
        least = self._period(most) if self.passes else 1
        loops = max(1, least // self.steps)  # from one record to the next, at least
        samples, places = self._affordable(inverse, half * loops)
        every = max(self.steps, least)
        cost = self.record(inverse, samples, places)
        if cost > half * loops or samples == self.shape.samples:
            every = max(least, ceil(self.steps * cost / half))
        later = Effort(
            samples=None if samples >= self.shape.samples else samples,
            places=places,
            every=every,
            invert_every=max(1, ceil(invert * self.steps / (half * every))),
            small=self._small(inverse, half * every / self.steps / 4),
            memory=self._memory(inverse, samples, every),
            iterations=None if iterations == ITERATIONS else iterations,
        )
        brief = max(self.steps, least)
        if every > brief and brief % self.steps == 0 and self.record(inverse, None, None) + invert <= BRIEF_RECORD:
            last = None if self.single else 1
            later = Effort(every=brief, last=last, memory=self._memory(inverse, self.shape.samples, brief))
        return self._with_build_up(inverse, later, BUILD_UP_SHARE * allowed, most)

    def _period(self, most: int) -> int:
        """Inner steps from one record to the next, at least, if an outer step may take this many extra passes."""
        records = most // self.passes
        return ceil(self.steps / records) if records else self.steps * ceil(self.passes / most)

    def _with_build_up(self, inverse: Periodic[Any], later: Effort, each: float, most: int) -> Effort:
        """The same effort with a build-up phase, as far as the given seconds of each outer step allow.

        Inner steps are recorded until a factor has seen several times as many samples as it has rows: before that,
        directions it has not seen count as flat, and x is far too long there. The rest of the budget pays for repeated
        decompositions. Records are of every inner step, or of the last ones of each loop, as far as their passes allow.
        """
        steps, samples = self.steps, self.shape.samples
        a_loop, limit = steps, BUILD_UP * steps
        if self.passes:
            a_loop = max(1, min(steps, MORE_PASSES * most // self.passes))
            limit = max(1, min(BUILD_UP * a_loop, BUILD_UP * MORE_PASSES * most // self.passes))
        invert, solve = self.invert(inverse), self.solve(inverse)
        if a_loop * self.record(inverse, None, None) + invert + solve <= max(each - solve, BRIEF):
            few = ceil(ENOUGH * self.widest / samples) if self.passes else limit
            return self._built_up(later, min(limit, max(a_loop, few)), a_loop)
        total = BUILD_UP * max(each - solve, 0.0)
        fixed, one = self._linear(inverse, later.places)
        wanted = NEEDED * self.widest
        rows = min(samples, ceil(wanted / a_loop))
        length = min(limit, max(a_loop, ceil(wanted / rows)))
        pays = max(total - invert, total / 3) / length  # for each record
        rows = max(min(rows, FEWEST), min(rows, int((pays - fixed) / one)))
        left = total - length * (fixed + one * rows)
        end = ceil(length / a_loop)
        least = 1 if end == 1 else 2  # the first has too few samples if they do not fit into one inner loop
        count = max(least, min(3, int(left / invert))) if invert > 0 else 1
        outer = (1, max(end, 5)) if count == 2 else (1, max(end, 3), BUILD_UP)[:count]
        more = int((left - count * invert) / (length * one))
        rows = min(samples, max(rows, min(rows + more, ceil(2 * wanted / length))))
        small = min(later.small, self._small(inverse, left / length / 4))
        found = replace(self._built_up(later, length, a_loop), build_up_samples=rows, build_up_small=small)
        return replace(found, invert_at=tuple(dict.fromkeys(sum(map(found.records, range(k * steps))) for k in outer)))

    def _built_up(self, later: Effort, records: int, a_loop: int) -> Effort:
        """The same effort with at least this many records at the beginning, spread over the inner loops."""
        if a_loop == self.steps:
            return replace(later, build_up=records)
        every, last = self._places(a_loop)
        return replace(later, build_up=ceil(records / a_loop) * self.steps, build_up_every=every, build_up_last=last)

    def _places(self, a_loop: int) -> tuple[int, int | None]:
        """Which steps of each inner loop are recorded: the last ones, unless the first solve comes before those."""
        return (ceil(self.steps / a_loop), None) if self.single else (self.steps, a_loop)

    def _of_window(self, inverse: FisherWindow, overhead: float) -> Effort | None:
        """The last inner steps of a loop that the budget pays for, and a window that a solve can afford and ten outer
        steps fill.

        Older samples would belong to another theta. A very cheap record is made in every outer step; otherwise records
        are of one loop in several, except at the beginning, until the window is full or has twice as many rows as theta
        has parameters.
        """
        steps, passes = self.steps, self.passes
        allowed, most = overhead * self.inner * steps, affordable_passes(overhead, steps)
        length = inverse.length
        record, solve = self._windowed(inverse, length)
        if steps * record + solve <= allowed and steps * passes <= most:
            return None
        bearable = max(allowed, BRIEF)
        while solve > bearable / 2 and length > FEWEST:
            length = max(FEWEST, length // 2)
            record, solve = self._windowed(inverse, length)
        left = max(allowed - solve, allowed / 2)
        last = min(steps, int(left / record))
        if record + solve <= bearable:
            last = max(last, 1)
        if passes:
            last = min(last, most // passes)
        loops = 1 if last else ceil(max(record / left, passes / most))
        last = max(last, 1)
        added = 1 if inverse.records == "batch" else self.shape.samples  # by a record
        length = min(length, added * last * max(1, BUILD_UP // loops))
        every, places = self._places(last)
        if loops == 1:
            return Effort(every=every, last=places, memory=length)
        roots = self.shape.outputs if inverse.fisher == "exact" else 1
        full = ceil(min(length, 2 * self.shape.numel / roots) / added)
        paid = max(1, BUILD_UP * MORE_PASSES * most // passes) if passes else full
        begun = min(full, paid, BUILD_UP) * steps
        return Effort(
            every=loops * steps,
            last=places,
            memory=length,
            build_up=begun,
            build_up_every=every,
            build_up_last=places,
        )

    def _windowed(self, inverse: FisherWindow, length: int) -> tuple[float, float]:
        """Seconds of a record and of a solve for a window that holds this many samples."""
        found = windowed(inverse, self.shape, length)
        return self.prices.of(found.step, self.gradient), self.prices.of(found.solve, self.gradient)

    def _iterations(self, inverse: Periodic[Any], seconds: float) -> int:
        """Conjugate-gradient iterations that the given seconds pay for, at least a few, if the ridge needs any."""
        if not isinstance(inverse, AbstractKronecker) or all(layer.ridge == "even" for layer in self.shape.layers):
            return ITERATIONS
        counts = range(ITERATIONS, FEW_ITERATIONS, -1)
        return next((count for count in counts if self.solve(inverse, count) <= seconds), FEW_ITERATIONS)

    def _affordable(self, inverse: Periodic[Any], seconds: float) -> tuple[int, int | None]:
        """How many samples, and places of each, a record can have in the given seconds."""
        most = self.shape.samples
        places = self._fewest_places(inverse)
        fixed, one = self._linear(inverse, places)
        least = min(most, self._efficient(fixed, one))
        samples = max(least, min(most, int((seconds - fixed) / one)))
        limit = max((layer.places for layer in self.shape.layers), default=1)
        while places is not None and samples == most and places < limit:
            if self.record(inverse, samples, 2 * places) > seconds:
                break
            places = 2 * places if 2 * places < limit else None
        return samples, places

    def _efficient(self, fixed: float, one: float) -> int:
        """The least number of samples for which the fixed cost of a record is no more than a third of it."""
        return max(FEWEST, ceil(2 * fixed / one))

    def _linear(self, inverse: Periodic[Any], places: int | None) -> tuple[float, float]:
        """Seconds of a record, and of each sample in it."""
        one, two = self.record(inverse, 1, places), self.record(inverse, 2, places)
        return one - (two - one), max(two - one, 1e-12)

    def _fewest_places(self, inverse: Periodic[Any]) -> int | None:
        """Only sums over places can do with a few of them; the squares of sums cannot."""
        many = any(layer.places > FEW_PLACES for layer in self.shape.layers)
        return FEW_PLACES if isinstance(inverse, KFAC) and many else None

    def _memory(self, inverse: Periodic[Any], samples: int, every: int) -> int | None:
        """The samples that a running mean holds: enough for its widest factor, and no more than it would hold of all.

        Where fewer inner steps are recorded than there are outer ones, `beta` would remember what theta and v have long
        left.
        """
        beta = getattr(inverse, "beta", None)
        if not isinstance(beta, float) or (samples >= self.shape.samples and every < self.steps):
            return None
        return max(samples, min(ceil(self.shape.samples / (1 - beta)), ceil(ENOUGH * self.widest)))

    def _small(self, inverse: Periodic[Any], seconds: float) -> int:
        """The largest factors that can be decomposed at every record, with all smaller ones, in the given seconds."""
        if not isinstance(inverse, KFAC):
            return 0
        sizes = sorted((n, layer.groups) for layer in self.shape.layers for n in (layer.columns, layer.out))
        spent = 0.0
        for n, groups in sizes:
            spent += self.prices.of([Operation("eigh", n, groups)], self.gradient)
            if spent > seconds:  # then none of this size
                return max((smaller for smaller, _ in sizes if smaller < n), default=0)
        return max((n for n, _ in sizes), default=0)

    @property
    def widest(self) -> int:
        """Rows of the widest factor."""
        return max((n for layer in self.shape.layers for n in (layer.columns, layer.out)), default=1)

    def record(self, inverse: Periodic[Any], samples: int | None, places: int | None) -> float:
        """Seconds of recording an inner step and folding it in, all of it or a part."""
        shape = self.shape
        if samples is not None:
            shape = replace(shape, samples=min(samples, shape.samples))
        if places is not None:
            few = tuple(layer._replace(places=min(layer.places, places)) for layer in shape.layers)
            shape = replace(shape, layers=few)
        if isinstance(inverse, AbstractKronecker):
            return self.prices.of(kronecker(inverse, shape, True).step, self.gradient)
        return self.prices.of(work(inverse, shape).step, self.gradient)

    def invert(self, inverse: Periodic[Any]) -> float:
        """Seconds of all decompositions."""
        if not isinstance(inverse, AbstractKronecker) or (isinstance(inverse, KFAC) and inverse.solver != "eigen"):
            return 0.0
        return self.prices.of(kronecker(inverse, self.shape, True).bases, self.gradient)

    def solve(self, inverse: Periodic[Any], iterations: int = ITERATIONS) -> float:
        """Seconds of a solve, decompositions left out but for those that the ridge asks for in each."""
        if isinstance(inverse, AbstractKronecker):
            return self.prices.of(kronecker(inverse, self.shape, True, iterations).solve, self.gradient)
        return self.prices.of(work(inverse, self.shape).solve, self.gradient)
