"""Natural hypergradient descent: the curvature is learnt while the inner problem is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._recording.lagged_cross import LaggedCross
from nhgd._recording.recognition import Recognition
from nhgd._validation import counted, not_negative
from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.errors import InputError
from nhgd.inverse import AbstractInverse, FisherDense, FisherWindow, Learned
from nhgd.inverse._learned.automatic import completed
from nhgd.inverse.capabilities import follows_horizon, preconditioner
from nhgd.loop.calibration import calibrate
from nhgd.loop.horizon import Horizon
from nhgd.loop.hypergradient import hypergradient
from nhgd.loop.levenberg_marquardt import LevenbergMarquardt
from nhgd.loop.loop import Loop, Product, StepInfo
from nhgd.objective import Objective
from nhgd.oracle import Oracle
from nhgd.problem import LARGE, Bilevel

OUTER_SHARE = 10  # inner steps for each outer batch beyond the first
UNSETTLED = 2  # outer steps whose x no later one uses: theta has hardly begun, and x is another after each inner loop
CROSSES = 2  # inner steps of a large model that give the cross derivative, each a third of a pass
Cross = Literal["auto", "lagged", "final", "trajectory"]
Inner = Literal["optimizer", "natural"]
Observe = Literal["all", "end"]
CurvatureMode = Literal["carried", "fresh"]


class Visit(NamedTuple):
    """What repeats the cross derivative of an inner step: the point, the objective and its dropout."""

    theta: Tensor
    objective: Objective


class Ahead:
    """A factorisation that is begun before it is needed."""

    def factorise(self, inverse: AbstractInverse, curvature: Any, at: Oracle) -> None:
        """Begin it, beside what follows."""
        with tape.overlapped() as self._work:
            self._solver = preconditioner(inverse, curvature, at)

    def __call__(self, u: Tensor) -> Tensor:
        """x for the right-hand side u."""
        self._work.join()
        return self._solver(u)


@dataclass
class NHGDState:
    """Where theta started (empty with warm starts, which do not return there), the last adjoint, the damping of natural
    steps, how v was seen to enter the inner problem, and the horizon of steps that are not natural.
    """

    theta: Tensor
    adjoint: Tensor | None = None
    marquardt: LevenbergMarquardt | None = None
    recognition: Recognition | None = None
    horizon: Horizon | None = None


@final
@dataclass(frozen=True)
class NHGD(AbstractAlgorithm):
    """Natural hypergradient descent: the inverse is learnt from the inner steps themselves.

        repeat K times:
            for t = 0 .. T-1:
                theta <- Pi( theta - eta_t g_t ),    g_t = grad_theta l(v, theta, batch_t)
                A     <- update of A by what step t computed          (the inverse, on any executor)
                L     <- ( t L + d2_{theta,v} l(v, theta, batch_t) ) / (t + 1)
            v <- Pi( v - alpha ( grad_v f - L^T A grad_theta f ) )

    L is never formed. With x = A grad_theta f, L^T x is computed in one of three ways:

        cross="lagged"        mean_t (d2_{theta,v} l_t)^T x_{k-1}     inside the last inner steps, as many as one pass
                                                                      over the data has, along the x of the previous
                                                                      outer step; its running mean if v is not
                                                                      determined
        cross="trajectory"    mean_t (d2_{theta,v} l_t)^T x_k         at each step's theta and batch once more
        cross="final"         (d2_{theta,v} l)^T x_k                  at the last theta, over `batches` fresh batches

    "lagged" costs one more product for each layer of these inner steps, and uses every sample of theirs: those of
    earlier steps it would only see again, at an older theta. It needs a v that only weighs samples or moves the ridge:

        (d2_{theta,v} l)^T x = (1/B) sum_i (dw_i/dv) <s_i, x> + sum( (dl2/dv) 2 theta x ),      s_i the gradient of l_i

    The first outer step detects this, and verifies it along a random vector against the derivative of the gradient's
    graph; "final" and "trajectory" then need no such graph either. The run's stats["cross"] report the result. The
    first outer step has no previous x, and the second one that of a theta which had hardly begun: both use their own,
    at the last theta over the last of these batches.

    With damping="auto" both derivatives of f are means over several outer batches, if the outer samples determine v, or
    theta arrives and the cross derivative is not "lagged": one, and one more for every ten inner steps, up to a pass
    over the outer data.

    Args:
        inverse: a learned one; None: K-FAC if theta has Linear or Conv2d layers, else the window, with fisher="auto".
        refine: preconditioned CG steps on top of it; 0 for none. The products run over `batches`.
        cross: "lagged", "trajectory" or "final" as above; "auto": "lagged" if v weighs samples, the scores of the inner
            steps' own passes give the cross derivative, and theta is warm-started; otherwise "final".
        batches: fresh inner batches at the end of the inner loop, or "all" for one pass over the data: for the cross
            derivative of "final" and for the products of a refined solve. They are drawn only if one of these needs
            them.
        warm_start: theta continues from the last outer step; otherwise each inner loop starts where the first one did.
        curvature: "carried" over outer steps, or "fresh" at each.
        observe: "all" inner steps, or "end": the batches of the cross derivative, once, after the inner loop. This
            takes one more pass and far fewer updates of A; it suits an inverse with expensive updates and full batches.
            The curvature is then that of the final point; natural steps start with the previous one.
        inner: "optimizer" for the optimiser's own steps, or "natural" for steps preconditioned by the same inverse,
            with Levenberg-Marquardt damping. Natural steps need inline execution.
        natural_lr: the length of a natural step, 1 for the full one.
        natural_steps: natural steps in an inner loop, because one is worth many of an optimiser's; None: the solver's
            inner_steps.
        natural_floor: the least damping of natural steps; in float32 curvature below about 1e-6 of the largest is
            noise.

    >>> NHGD(cross="trajectory").name
    'nhgd'

    References: Natural Hypergradient Descent, algorithm 1; equation for A: `FisherDense`.
    Deviations: 1. by default the statistics are per-sample and Kronecker-factored, because the outer product of a
    batch's mean gradient is not the Fisher matrix; the literal method, as the paper's experiments run it (smoothed
    update, M batches at the end), is the preset "nhgd-paper", and algorithm 1 as printed is
    NHGD(FisherDense(form="inverse", update="average", records="raw"), cross="trajectory"). 2. L has no warm start: its
    initial weight in the recursion is zero. 3. "lagged" multiplies the L of this inner loop by the x of the last one,
    because L is then never needed again; x moves as slowly as v and theta do, and once they converge nothing lags.
    """

    name: ClassVar[str] = "nhgd"
    accumulates: ClassVar[bool] = True
    inverse: AbstractInverse | None = None
    refine: int = 0
    cross: Cross = "auto"
    batches: int | str = 1
    warm_start: bool = True
    curvature: CurvatureMode = "carried"
    observe: Observe = "all"
    inner: Inner = "optimizer"
    natural_lr: float = 1.0
    natural_steps: int | None = None
    natural_floor: float = 0.0

    def __post_init__(self) -> None:
        check_batches("NHGD", self.batches)
        not_negative("NHGD", refine=self.refine, natural_floor=self.natural_floor)
        if not 0 < self.natural_lr <= 1:
            raise InputError(f"NHGD: natural_lr must lie between 0 and 1, got {self.natural_lr}.")
        if self.natural_steps is not None:
            counted("NHGD", natural_steps=self.natural_steps)

    @classmethod
    @override
    def presets(cls) -> dict[str, AbstractAlgorithm]:
        literal = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")
        return {
            "nhgd-paper": cls(inverse=literal, cross="final", batches=5),
            "nhgd-window": cls(inverse=FisherWindow()),
            "nhgd-refined": cls(refine=5),
        }

    @override
    def prepared(self, problem: Bilevel) -> NHGD:
        inverse = completed(self.inverse, self.refine, problem.theta)
        if self.inner == "natural" and inverse.learner is None:
            raise InputError(
                f"inner='natural' preconditions the inner steps by curvature learnt from them, and {inverse.name} learns"
                " none. Use kfac or fisher_window."
            )
        return replace(self, inverse=inverse, refine=0)

    @property
    @override
    def online(self) -> AbstractInverse | None:
        return self.inverse

    @property
    @override
    def not_repeatable(self) -> str | None:
        if self.inner == "natural" and not isinstance(
            None if self.inverse is None else self.inverse.learner, FisherWindow
        ):
            return "natural steps by another inverse than the window read its damping on the host"
        if self.cross == "trajectory" or self.curvature == "fresh":
            return "only cross='lagged' and 'final' and carried curvature are captured"
        return None

    @property
    @override
    def uses_inner_optimizer(self) -> bool:
        return self.inner != "natural"

    @override
    def init(self, loop: Loop) -> NHGDState:
        """Note the start of theta, and decide how much of the inner steps the curvature records."""
        if self.observe == "all" and self.inner == "optimizer" and self.curvature == "carried":
            calibrate(loop)  # otherwise there is little to save, or a step that uses the curvature at once
        marquardt = LevenbergMarquardt(self.natural_lr, self.natural_floor) if self.inner == "natural" else None
        # A natural step answers at once in every direction.
        horizon = None if marquardt is not None else loop.horizon(self.warm_start)
        theta = loop.problem.theta
        start = theta.leaves[0].new_empty(0) if self.warm_start else theta.flat()
        return NHGDState(start, marquardt=marquardt, horizon=horizon)

    @override
    def step(self, loop: Loop, state: NHGDState) -> tuple[NHGDState, StepInfo]:
        inverse = loop.inverse
        assert inverse is not None
        if not self.warm_start:
            loop.problem.theta.assign(state.theta)
        if self.curvature == "fresh":
            loop.executor.start(inverse, loop.problem.theta)
        lagged = None
        known = state.adjoint if loop.clock.k >= UNSETTLED else None
        if known is not None and self._way(loop, state.recognition) == "lagged":
            average = None if state.horizon is None else state.horizon.average
            lagged = loop.lagged_cross(known if average is None else average)
        visits: list[Visit] = []
        steps = (
            loop.settings.inner_steps if state.marquardt is None else self.natural_steps or loop.settings.inner_steps
        )
        crossing = self._crossing(loop, steps)
        halves, losses = list[Tensor](), list[Tensor]()
        ahead = Ahead() if self._factorises_ahead else None
        # Copies of a large theta would cost more than they tell.
        looks_ahead = state.horizon is not None and self.warm_start and loop.problem.theta.numel <= LARGE
        half = steps // 2 if looks_ahead else 0
        for t in range(steps):
            if half and t in (steps - 2 * half, steps - half):
                halves.append(loop.problem.theta.flat())
            beside = None if ahead is None or t < steps - 1 else partial(ahead.factorise, inverse)
            losses.append(self._inner(loop, state, visits, lagged if t in crossing else None, beside))
        recognition = self._recognised(loop, state.recognition)
        way = self._way(loop, recognition)
        # If neither the cross derivative nor the solve needs a batch, the last one serves for diagnosis.
        needed = way == "final" or not isinstance(inverse, Learned) or self.observe == "end"
        batches = loop.inner_batches(self.batches) if needed else [loop.recent[-1]]
        if self.observe == "end":
            for batch in batches:
                loop.gradient(loop.objective(batch), always=True)
        plain = recognition is not None and recognition.role in ("weights", "ridge")

        def cross(at: Oracle) -> Product:
            if lagged is not None:
                return lambda x: lagged.mean(loop.division.summed)
            if way == "trajectory":
                return partial(trajectory_cross, loop, visits, plain)
            return loop.plain_cross(loop.oracle([loop.recent[-1]]) if way == "lagged" else at)

        # Products of the solve leave the graph of a gradient behind, from which a cross derivative is cheaper than a
        # pass.
        own = way != "final" or (plain and isinstance(inverse, Learned))
        count = 1 if state.horizon is None else outer_batches(loop, state.horizon, steps, way)
        found, lag, noted = hypergradient(
            loop, batches, state.adjoint, cross if own else None, state.horizon, halves, count, ahead
        )
        norm = loop.move_v(found.leaves)
        notes = {"inverse": inverse.name} | noted
        if state.marquardt is not None:
            marquardt = state.marquardt
            notes["damping"] = tape.host_value(lambda: marquardt.damping)
            notes["taken_back"] = tape.host_value(lambda: marquardt.taken_back)
        info = StepInfo(found.value, tape.reading(torch.stack(losses).mean()), norm, lag, notes)
        loop.remarks["cross"] = {"way": way} | ({} if recognition is None else vars(recognition))
        return replace(state, adjoint=found.adjoint, recognition=recognition), info

    def _may_lag(self, loop: Loop) -> bool:
        """Whether the cross derivative is to come from inner steps, if it can. A compiled model would run uncompiled
        there.
        """
        return self.cross == "lagged" or (
            self.cross == "auto" and self.warm_start and not loop.problem.theta.is_compiled
        )

    def _way(self, loop: Loop, recognition: Recognition | None) -> str:
        """Of taking the cross derivative."""
        if self.cross == "auto":
            # Where another pass is needed in each inner step, many samples are not worth that much.
            weighs = recognition is not None and recognition.role == "weights" and recognition.source == "scores"
            return "lagged" if weighs and self._may_lag(loop) else "final"
        return self.cross

    def _crossing(self, loop: Loop, steps: int) -> range:
        """The inner steps that give a lagged cross derivative: the last ones, as many as a pass over the data has.

        In each it takes one of the three products of a gradient with every layer. For a large model these are what a
        step costs, so a few steps give it, for less than a single pass would cost.
        """
        within = steps if loop.inner.batches is None else min(steps, loop.inner.batches)
        every = max(1, ceil(steps / CROSSES)) if self.cross == "auto" and loop.problem.theta.numel > LARGE else 1
        return range(steps - 1 - (within - 1) // every * every, steps, every)

    def _recognised(self, loop: Loop, known: Recognition | None) -> Recognition | None:
        """How v enters the inner problem, if the cross derivative depends on it; determined once, on the last inner
        batch.
        """
        assert loop.inverse is not None
        if known is not None or (self.cross == "final" and not isinstance(loop.inverse, Learned)):
            return known
        found = loop.recognise(in_step=self._may_lag(loop))
        if self.cross == "lagged" and found.note is not None:
            raise InputError(
                f"cross='lagged' needs a v that only weighs samples or moves the ridge; here {found.note}. Use"
                " cross='final' or cross='trajectory'."
            )
        return found

    @property
    def _factorises_ahead(self) -> bool:
        """Whether what a hypergradient solves with is known before the last natural step is taken, so that a device
        factorises both matrices at the same time.
        """
        natural = self.inner == "natural" and self.observe == "all"
        return natural and isinstance(self.inverse, FisherWindow) and tape.tape() is not None

    def _inner(
        self,
        loop: Loop,
        state: NHGDState,
        visits: list[Visit],
        lagged: LaggedCross | None,
        beside: Callable[[Any, Oracle], None] | None,
    ) -> Tensor:
        if self.cross == "trajectory":
            objective = loop.objective(loop.inner_batch(), loop.seed())
            visits.append(Visit(loop.problem.theta.flat(), objective))
        else:
            objective = None
        if state.marquardt is not None:
            # Where the last inner loop ended, this one begins, so its curvature serves the first step.
            known = self.observe == "end" and loop.clock.t == 0 and loop.clock.k > 0 and self.curvature == "carried"
            record = not (known and self.warm_start)
            return state.marquardt.step(loop, objective, record, lagged, beside)
        return loop.inner_step(objective, record=self.observe == "all", cross=lagged)


def outer_batches(loop: Loop, horizon: Horizon, steps: int, way: str) -> int:
    """How many outer batches a hypergradient takes: one, and if they determine v, or theta arrives, more for a tenth of
    the inner loop's gradients, up to a pass over the data.

    Lagged products follow a running mean of x if v is not determined, so they need no other.
    """
    averages = horizon.determined or (horizon.averages and way != "lagged")
    if not follows_horizon(loop.inverse) or not averages:
        return 1
    within = loop.outer.batches
    return min(1 + steps // OUTER_SHARE, steps if within is None else max(within, 1))


def trajectory_cross(loop: Loop, visits: list[Visit], plain: bool, x: Tensor) -> list[Tensor]:
    """L^T x with L the mean cross derivative over the inner steps: each is visited again, one at a time.

    plain: by passes that need no graph of a gradient.
    """
    problem = loop.problem
    here = problem.theta.flat()
    total = [torch.zeros_like(leaf) for leaf in problem.v.leaves]
    try:
        for visit in visits:
            problem.theta.assign(visit.theta)
            at = loop.replay(visit.objective)
            for t, part in zip(total, (loop.plain_cross(at) if plain else at.cross)(x), strict=True):
                t.add_(part, alpha=1 / len(visits))
    finally:
        problem.theta.assign(here)
    return total
