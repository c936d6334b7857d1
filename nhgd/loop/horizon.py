"""How far ahead a hypergradient answers: the damping that a run adds to its inner Hessian, and how good x was."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.errors import percent
from nhgd.loop.gain import Gain
from nhgd.oracle import Oracle
from nhgd.problem import LARGE
from nhgd.variable import products

MEMORY = 0.8  # of the running mean of cosines, for each outer step
POWER = 0.75
RENEWED = 0.5  # of the error of the outer gradient, by each measurement
STEADY = 0.8  # the largest memory of the running mean of adjoints
# Outer steps for which v has persisted before a longer horizon is taken, where v has too many entries
UNDETERMINED = 1e3
# Inner loops beyond which the damping is negligible; the second without a ridge, where nothing else is added.
LONGEST = (1e8, 1e4)
EVERY = 4  # outer steps from one reading to the next, after the first few
LAG = 2  # outer steps after which readings of a GPU are heeded: it never waits for the host, nor the host for it
SHARE = 0.05  # of the inner loop's gradients that may be spent on measuring
# The same for a large model: the products of few samples take up to twice as long as these gradients, by their calls.
SHARE_OF_LARGE = 0.01
PRODUCT = 2.5  # gradients that a Hessian product with a graph of its own is worth
POOR, GOOD = 0.25, 0.75  # shares of the predicted gain, as Levenberg and Marquardt have them
TRUST = (1.0, 1e6)
LENGTH = 100.0  # the largest factor by which x is rescaled
SUSPECT = 0.5  # the residual from which on the learnt matrix is compared with none
WORSE = 0.5  # of the gain of no matrix
PERSISTENT = 0.9  # cosine
AHEAD = 4.0  # inner loops; a straight line leads astray in the end
EARLY = 5  # outer steps that the running means above remember
ARRIVES = 4.0  # halves that theta may still have to go where the noise of outer batches is worth averaging
FAR = 10.0  # length of a Newton step relative to theta
STREAK = 3  # poor measurements in a row that cause a warning
RISE = 3.0  # of the lowest outer loss
FITTED = 0.05  # of the first outer loss
SETTLED = 20  # outer steps


@dataclass
class Horizon:
    """The damping of the implicit formula within a run, adapted as it goes.

    T inner steps of size eta from the current theta answer a change of v by the Neumann series of T terms, which is
    close to (H + I / (eta T))^{-1}: slow directions have no time to respond. A change that persists over m outer steps
    has m inner loops:

        damping = trust / (eta T m),     m = ((1 + rho) / (1 - rho))^(3/4)

    rho is the running mean of the cosine between successive adjoints x. If x turns from one outer step to the next,
    because v changes the problem that the inner loop sees, m is about 1; as v settles, rho tends to 1, m grows without
    bound and the damping vanishes. (1 + rho) / (1 - rho) is the memory, in steps, of a first-order autoregressive
    process; the power keeps m below it, because overestimating the horizon costs more than underestimating it. x also
    persists where theta is slow, so m is halved, to no less than 1, while the outer loss falls by far less than the
    hypergradients predict (`Gain`).

    If v has more entries than the outer samples have labels, the outer loss does not determine v: a better response
    only overfits those samples sooner. Then m = max(1, (1 + rho) / (1 - rho) / 1000), that of unrolling until v has
    settled. The noise of outer batches and inner steps also accumulates in so many entries. Cross derivatives that come
    from the inner steps are therefore taken along a running mean of x, with rho as its memory, which keeps persistent
    components and averages noise:

        average <- r average + (1 - r) x,     r = min(max(rho, 0), 0.8)

    There the gradient u of the outer samples itself says less and less about any others: as these are fitted, it falls
    to the size of its own sampling error. If a pass over them is one batch, their halves tell that error now and then,

        error = |u_half - u|^2          by leaf of theta; the mean of both halves errs by as much as they differ

    and of u only what exceeds it counts (`Learned` inverses say in which directions, `significant`).

    theta has not arrived either when v moves. The two halves of an inner loop, in which v stands still, tell where it
    is going: if the second is q times as long as the first, the rest is a geometric series. So the outer gradients are
    those at

        theta_T + min(q / (1 - q), 2 m, 8) (theta_T - theta_{T/2}),     q = mean (s_1.s_2) / mean (s_1.s_1)

    s_1 and s_2 being the two halves' ways and the means running over outer steps; nowhere else if q is not above 0.
    That is as far ahead as x looks, four inner loops at most, and nothing where theta arrives or only wanders with its
    batches.

    q / (1 - q) also tells whether a v that is not determined is worth a hypergradient of several outer batches: up to
    4, two inner loops. Above, theta is only passing, and less noise fits v to a theta that it will not be judged by.
    The first five outer steps cannot tell, and take several: noise moves v farthest there.

    Now and then, for at most a twentieth of the inner loop's work, of a large model a fiftieth, Hessian products
    measure x against the damped system:

        w = (H + damping I) x,     residual = |w - u| / |u|

    If x turns (rho below 0.9), one product adapts the trust as Levenberg and Marquardt do. With an exact learnt matrix
    x would lower x.(H + damping I)x / 2 - u.x by u.x / 2; the ratio of the actual to this predicted reduction is 2 -
    x.w / x.u. Below 1/4, or with negative curvature along x, the trust is doubled; above 3/4 it is halved, to no less
    than 1. x is also rescaled.

    If x persists, a second product refines it along z = P^{-1} (u - w), with P the learnt matrix. The best a x + b z is
    used, and its difference is kept for later outer steps,

        x = scale P^{-1} u + correction,     correction <- rho correction at each outer step

    so that a settled run converges to the exact adjoint by preconditioned descent.

    A learnt matrix may be worse than none: the squared gradients of energies say nothing about their curvature. Where
    the residual is above a half, the next measurement spends one more product, along u. By their best multiples x and u
    lower x.(H + damping I)x / 2 - u.x by

        (x.u)^2 / (2 x.w)     and     (u.u)^2 / (2 u.(H + damping I)u)

    If x achieves less than half as much as u twice in a row, u takes the place of P^{-1} u, with its best scale, and z
    = scale (u - w), until P^{-1} u achieves more again.

    Attributes:
        cosine: the running mean, on the device of x; `rho` is its last reading.
        halves: the running means of s_1.s_1 and s_1.s_2, there too; `left` is q / (1 - q) of their last reading, the
            halves of inner loops that theta still has to go.
        gain: the fall of the outer loss beside its prediction.
        warm: whether theta is warm-started at each outer step.
        determined: whether the outer samples have at least as many labels as v has entries, or their number is unknown.
        adjoint: the last x.
        average: the running mean of x, if v is not determined.
        error: the running mean of the squared error by leaf, (leaves,), where it is measured.
        trust, scale, correction: as above.
        suspect, worse, plain: whether the learnt matrix is to be compared with none, how often in a row it was worse,
            and whether it is used no more.
        poor, far: how many measurements in a row found x poor, and theta far from its inner optimum.
        taken: outer steps that were read.
        noted: the numbers of outer steps with their running means, of which it is too early to heed them.
        steps: outer steps that were judged.
        first, lowest, recent: the first outer loss, the lowest running mean of it, and the present one.
    """

    cosine: Tensor
    halves: Tensor
    gain: Gain
    warm: bool = True
    determined: bool = True
    adjoint: Tensor | None = None
    average: Tensor | None = None
    error: Tensor | None = None
    rho: float = 0.0
    left: float = math.inf
    taken: int = 0
    trust: float = 1.0
    scale: float = 1.0
    correction: Tensor | None = None
    suspect: bool = False
    worse: int = 0
    plain: bool = False
    poor: int = 0
    far: int = 0
    first: float = math.nan
    lowest: float = math.inf
    recent: float = math.nan
    steps: int = 0
    noted: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def start(cls, device: torch.device, warm: bool = True, determined: bool = True) -> Horizon:
        """The horizon before the first outer step, for a run whose theta is warm-started, or is not."""
        zeros = torch.zeros(6, dtype=torch.float64, device=device)
        gain = Gain(zeros[3:].clone())
        return cls(zeros[0].clone(), zeros[1:3].clone(), gain, warm=warm, determined=determined)

    @property
    def horizon_loops(self) -> float:
        """m: the number of inner loops that a change of v persists for; one without warm starts."""
        loops = self._persistence
        return loops if loops <= 1 else max(1.0, loops / self.gain.caution)

    @property
    def _persistence(self) -> float:
        """m before it is divided by the caution."""
        if not self.warm:
            return 1.0
        rho = min(max(self.rho, -0.9), 1 - 1e-12)
        steps = (1 + rho) / (1 - rho)
        return float(steps**POWER) if self.determined else max(1.0, steps / UNDETERMINED)

    def damping(self, travelled: float, ridge: bool) -> float:
        """For an inner loop whose step sizes sum to `travelled`, of a problem with a ridge or without one."""
        loops = min(self.horizon_loops, LONGEST[0 if ridge else 1])
        return self.trust / (travelled * loops) if travelled > 0 else 0.0

    def observe(self, x: Tensor) -> None:
        """Compare x with the last one."""
        if self.adjoint is not None:
            found = products(x, self.adjoint)
            size = found.diagonal().sqrt().prod()
            cosine = torch.where(size > 0, found[0, 1] / size, self.cosine)
            self.cosine = self.cosine.lerp(cosine, 1 - MEMORY)
        self.adjoint = x
        if self.correction is None and tape.repeatable():  # so that captured steps have one form
            self.correction = torch.zeros_like(x)
        if self.determined:
            return
        if self.average is None:
            self.average = x
        else:
            kept = tape.on_device(tape.number(lambda: self.kept))
            new = tape.on_device(tape.number(lambda: 1 - self.kept))
            self.average = kept * self.average + new * x

    def ahead(self, first: Tensor, second: Tensor) -> Tensor:
        """How far theta still goes, from the ways it went in the two halves of the inner loop."""
        self.halves = self.halves.lerp(products(first, second)[0], 1 - MEMORY)
        size, along = self.halves
        most = tape.on_device(tape.number(lambda: self.farthest / (1 + self.farthest)))
        q = torch.where(size > 0, along / size, 0.0).clamp(min=0.0).clamp(max=most)
        return (q / (1 - q)).to(second.dtype) * second

    def erred(self, error: Tensor) -> None:
        """Take in a measured error of the outer gradient."""
        self.error = error if self.error is None else self.error.lerp(error, RENEWED)

    @property
    def farthest(self) -> float:
        """The halves of inner loops that are looked ahead at most."""
        return 2 * min(max(self.horizon_loops, 1.0), AHEAD)

    @property
    def kept(self) -> float:
        """How much the running mean of x keeps of itself."""
        return min(max(self.rho, 0.0), STEADY)

    def means(self) -> Tensor:
        """The running means, (6,)."""
        return torch.cat([self.cosine.reshape(1), self.halves, self.gain.means])

    @staticmethod
    def reads(step: int) -> bool:
        """Whether the running means of this step are heeded: those of every few alone."""
        return step < EVERY or step % EVERY == EVERY - 1

    @property
    def lags(self) -> bool:
        """Whether running means are heeded some steps later, when a GPU has long computed them."""
        return self.cosine.is_cuda

    def note(self, step: int, means: Sequence[float]) -> None:
        """Keep the running means of a step, which is `LAG` steps behind when they are heeded."""
        if self.reads(step):
            self.noted = (*self.noted, (float(step), *means))

    def read(self, step: int) -> None:
        """Heed the running means that are due at the end of this step."""
        self.taken = step + 1
        if not self.lags:
            if self.reads(step):
                self._heed(self.means().tolist())
            return
        for made, *means in self.noted:
            if made <= step - LAG:
                self._heed(means)
        self.noted = tuple(kept for kept in self.noted if kept[0] > step - LAG)

    def _heed(self, means: Sequence[float]) -> None:
        self.rho, size, along, *others = means
        self.left = max(along, 0.0) / (size - along) if size > along else math.inf
        self.gain.read(others, self._persistence)

    @property
    def averages(self) -> bool:
        """Whether a hypergradient takes several outer batches: v is determined, or theta arrives, or it is too early to
        say.
        """
        return self.determined or self.taken < EARLY or self.left <= ARRIVES

    @property
    def persists(self) -> bool:
        """Whether successive adjoints are similar, so that findings about one hold for the next."""
        return self.warm and self.rho >= PERSISTENT

    def due(self, step: int, inner_steps: int, recorded: Callable[[int], bool] | None = None) -> bool:
        """Whether products may be spent at this outer step.

        recorded: whether the outer step that comes so many after this one has a record. If one has where products are
            due, and the next has none, products wait for that: captured steps are of fewer kinds.
        """
        share = SHARE_OF_LARGE if self._is_large else SHARE
        period: int = max(EVERY, math.ceil((1 + sum(self._further)) * PRODUCT / (share * max(inner_steps, 1))))
        place = step % period
        if recorded is None or place > 1 or step == place:  # the first steps are not captured
            return place == 0
        waits = recorded(-place) and not recorded(1 - place)
        return place == int(waits)

    @property
    def compares(self) -> bool:
        """Whether a measurement compares the learnt matrix with none."""
        return self.suspect or self.plain

    @property
    def _is_large(self) -> bool:
        return self.adjoint is not None and self.adjoint.numel() > LARGE

    @property
    def _further(self) -> tuple[bool, bool]:
        """Whether a measurement takes a product along z, and one to compare with.

        On a GPU both or none: another kind of captured steps would cost more.
        """
        persists, compares = self.persists, self.compares
        if self.lags and not self._is_large:
            return persists or compares, persists or compares
        return persists, compares

    def corrected(self, x: Tensor, u: Tensor) -> Tensor:
        """The learnt inverse's x for u, or u where no matrix is better, with the scale and the correction that are
        known.
        """
        x = u if self.plain else x
        x = x if self.scale == 1.0 and not tape.repeatable() else x * tape.on_device(tape.number(lambda: self.scale))
        if self.correction is not None:
            self.correction = self.correction * tape.on_device(tape.number(lambda: max(self.rho, 0.0)))
            x = x + self.correction
        return x

    def as_used(self, x: Tensor, u: Tensor) -> Tensor:
        """x as the last outer step would have used it; changes nothing."""
        x = u if self.plain else x
        return self.scale * x if self.correction is None else self.scale * x + self.correction

    def measured(
        self,
        at: Oracle,
        u: Tensor,
        x: Tensor,
        solve: Callable[[Tensor], Tensor],
        gradient: Callable[[], Tensor] | None,
        learnt: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """A better x by one product to three, with notes; also updates the horizon.

        Args:
            at: the point, damped.
            x: as `corrected` gave it.
            solve: the learnt inverse.
            gradient: gives that of the inner objective where the inner loop ended, or nearly there.
            learnt: the learnt inverse's own x; None: x itself.
        """
        if self.plain:
            scale = tape.on_device(tape.number(lambda: self.scale))
            solve = lambda r: scale * r  # noqa: E731
        # Before the products, beside whose graph no vector more should be held than must be
        newton = x.new_zeros(()) if gradient is None else solve(gradient()).norm()
        w = at.hvp(x)
        along_z, beside = self._further
        z = solve(u - w)
        hz = at.hvp(z) if along_z else None
        other = u if learnt is None or not self.plain else learnt
        ho = at.hvp(other) if beside else None
        known = {"u": u, "x": x, "w": w, "z": z, "hz": hz, "other": other, "ho": ho}
        given = {name: vector for name, vector in known.items() if vector is not None}
        of_all, places = products(*given.values()), {name: i for i, name in enumerate(given)}
        none = newton.new_zeros((), dtype=torch.float64)
        pairs = "u u, x u, x w, z u, x hz, z hz, x x, z z, x z, w w, w u, w hz, hz hz, hz u, other u, other ho"
        named = [pair.split() for pair in pairs.split(", ")]
        numbers = [of_all[places[a], places[b]] if a in places and b in places else none for a, b in named]
        here = at.problem.theta.flat()
        numbers = [*numbers[:-2], newton.double(), torch.linalg.vector_norm(here, dtype=torch.float64), *numbers[-2:]]
        stacked, outcome = torch.stack(numbers), dict[str, Any]()

        def look() -> None:
            found, persists, compares = stacked.tolist(), self.persists, self.compares
            a, b, notes = self._learnt(found[:-2], persists, gradient is not None)
            swapped = self._compared(found[-2], found[-1], found) if compares and notes else None
            # Where the other is better x gives way, and so does its correction.
            learnt = (a, b, 0.0) if swapped is None else (0.0, 0.0, swapped)
            kept = learnt[0] if persists else float(swapped is None)
            outcome.update(zip(("a", "b", "c", "kept", "notes"), (*learnt, kept, notes), strict=True))

        tape.eager(look)
        if tape.tape() is None and not outcome["notes"]:
            return x, {}
        a = tape.on_device(tape.number(lambda: outcome["a"]))
        b = tape.on_device(tape.number(lambda: outcome["b"]))
        if (along_z or beside) and self.correction is not None:
            self.correction = self.correction * tape.on_device(tape.number(lambda: outcome["kept"]))
        if along_z:
            self.correction = b * z if self.correction is None else self.correction + b * z
        better = a * x + b * z
        if beside:
            better = better + tape.on_device(tape.number(lambda: outcome["c"])) * other
        return better, tape.host_value(lambda: outcome["notes"])

    def _learnt(self, found: list[float], persists: bool, moved: bool) -> tuple[float, float, dict[str, Any]]:
        """a and b of the best a x + b z, with notes; no notes if the numbers are degenerate."""
        if not (found[0] > 0 and found[6] > 0 and all(map(math.isfinite, found))):
            return 1.0, 0.0, {}
        uu, xu, xw, zu, xhz, zhz, xx, zz, xz, ww, wu, whz, hzhz, hzu, newton_length, length = found
        sound = xu > 0 and xw > 0
        gain = 2 - xw / xu if sound else -1.0
        if persists:
            self.trust = max(self.trust / 2, TRUST[0])
        elif gain < POOR:
            self.trust = min(self.trust * 2, TRUST[1])
        elif gain > GOOD:
            self.trust = max(self.trust / 2, TRUST[0])
        a, b = best_combination(xw, xhz, zhz, xu, zu) if persists else (xu / xw if sound else 1.0, 0.0)
        a, b = min(max(a, 1 / LENGTH), LENGTH), min(max(b, -LENGTH), LENGTH)
        self.scale = self.scale * a if self.plain else min(max(self.scale * a, 1 / LENGTH), LENGTH)
        left = a * a * ww + 2 * a * b * whz + b * b * hzhz - 2 * a * wu - 2 * b * hzu + uu
        residual = math.sqrt(max(left, 0.0) / uu)
        refined = math.sqrt(max(xx + 2 * xz + zz, 0.0) * xx)
        distance = newton_length / length if length > 0 else 0.0
        self.suspect = residual > SUSPECT
        self.poor = self.poor + 1 if gain < POOR else 0
        self.far = self.far + 1 if distance > FAR else 0
        notes = {"residual": residual, "cosine": (xx + xz) / refined if refined > 0 else 0.0}
        return a, b, notes | ({"inner_distance": distance} if moved else {})

    def _compared(self, ou: float, oh: float, found: list[float]) -> float | None:
        """The multiple of the other candidate that takes the place of x, if one achieves enough more; None
        otherwise.
        """
        xu, xw = found[1], found[2]
        mine = xu * xu / xw if xu > 0 and xw > 0 else 0.0
        other = ou * ou / oh if ou > 0 and oh > 0 else 0.0
        self.worse = self.worse + 1 if not self.plain and mine < WORSE * other else 0
        if not other > 0 or not (other > mine if self.plain else self.worse > 1):
            return None
        self.plain, self.scale = not self.plain, ou / oh
        return self.scale

    def signature(self, step: int, inner_steps: int, recorded: Callable[[int], bool]) -> tuple[Any, ...]:
        """What decides which work an outer step does here, numbers aside."""
        known = self.correction is None, self.adjoint is None, self.error is None, self.plain
        return (self.due(step, inner_steps, recorded) and self._further, *known)

    def warning_for(self, loss: float) -> str | None:
        """Why the hypergradient is not to be trusted, in a sentence with the remedy; None where nothing speaks
        against it.
        """
        self.steps += 1
        self.first = loss if math.isnan(self.first) else self.first
        self.recent = loss if math.isnan(self.recent) else 0.9 * self.recent + 0.1 * loss
        self.lowest = min(self.lowest, self.recent)
        if self.poor >= STREAK:
            raised = f", although its damping was raised {self.trust:.3g}-fold" if self.trust >= 1.01 else ""
            return (
                f"The last {self.poor} Hessian products found that x does not solve the damped system{raised}:"
                " the statistics are stale or far from the Hessian. Use nhgd-refined or aid-cg, give the problem a likelihood, or lower the outer step."
            )
        if self.steps > SETTLED and self.far >= STREAK:
            return (
                "theta is far from its inner optimum: a Newton step would be many times as long as theta itself. The"
                " hypergradient describes an optimum that theta never reaches. Take more inner steps, a larger inner"
                " step, or l2."
            )
        if self.steps > SETTLED and self.lowest > 0 and self.recent > RISE * self.lowest:
            return (
                f"The outer loss has risen {self.recent / self.lowest:.2g}-fold above its lowest mean, against what"
                " the hypergradient predicts. Lower the outer step, take more inner steps, or examine the problem"
                " with nhgd check."
            )
        if self.steps > SETTLED and not self.determined and self.first > 0 and self.recent < FITTED * self.first:
            return (
                f"The outer loss has fallen to {percent(self.recent / self.first)} % of where it began, and v has more entries than"
                " the outer data have labels: these are nearly fitted exactly, and v may suit others less. Judge v on samples"
                " that it has not seen, stop earlier, or give more outer data."
            )
        return None


def best_combination(xx: float, xz: float, zz: float, xu: float, zu: float) -> tuple[float, float]:
    """a, b such that a x + b z minimises y.A y / 2 - u.y, from products with A and u; of x alone if A is not
    positive there.

    >>> best_combination(2.0, 0.0, 1.0, 1.0, 1.0)
    (0.5, 1.0)
    """
    determinant = xx * zz - xz * xz
    if xx > 0 and determinant > 1e-10 * xx * abs(zz):
        return (xu * zz - zu * xz) / determinant, (zu * xx - xu * xz) / determinant
    return (xu / xx if xx > 0 and xu > 0 else 1.0), 0.0
