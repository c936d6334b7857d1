"""Natural hypergradient descent in a single loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, final

from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import not_negative
from nhgd.algorithm.aid import check_batches
from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.errors import InputError
from nhgd.inverse import AbstractInverse, FisherDense
from nhgd.inverse._learned.automatic import completed
from nhgd.loop.calibration import calibrate
from nhgd.loop.horizon import Horizon
from nhgd.loop.hypergradient import hypergradient
from nhgd.loop.loop import Loop, StepInfo
from nhgd.problem import Bilevel


@dataclass
class NHGDSingleState:
    """The last adjoint, (D,), where a refined solve starts, and the horizon."""

    adjoint: Tensor | None = None
    horizon: Horizon | None = None


@final
@dataclass(frozen=True)
class NHGDSingle(AbstractAlgorithm):
    """Single-loop natural hypergradient descent: one inner step, one curvature update, one outer step.

        theta <- Pi( theta - eta grad_theta l(v, theta, batch) )
        A     <- update of A by what that step computed           (the inverse, on any executor)
        v     <- Pi( v - alpha ( grad_v f - (d2_{theta,v} l)^T A grad_theta f ) )

    The online inverse A stands where other single-loop methods keep an auxiliary vector that follows H^{-1} grad_theta
    f by one stochastic step at a time. A follows the Hessian alone, so that a change of grad_theta f, of the outer
    batch for example, is answered at once; an auxiliary vector answers it after as many steps as the Hessian's
    condition asks for. No Hessian product is taken: a step costs two inner gradients, one outer gradient and one cross
    product, and what the inverse needs to learn. One outer step is one such iteration: `inner_steps` is not used.

    What is proven and what is not. The paper's theorems are about the double loop: they need enough inner steps at a
    fixed v for theta to reach theta*(v) and for the Fisher matrix to be averaged there. None of them covers this
    method, which the paper leaves as future work, and no rate is claimed here. What holds by algebra: where theta, v
    and A come to rest, the hypergradient that vanishes is the one with A for H^{-1} at theta = theta*(v). That is the
    exact one when A is the inverse Hessian there (the exact Fisher matrix of a model linear in theta with a likelihood
    loss, or `refine` enough), and otherwise a biased one, by as much as A is, as in the double loop. That the iteration
    comes to rest needs alpha small against eta, as in every single-loop method; it is seen in the tests, not proven.

    Args:
        inverse: what learns; None: K-FAC where theta has Linear or Conv2d layers, else the window. Of FisherDense take
            warm="accumulate", or warm="prior" with a large t0: with t0 = 1 every step forgets half of what was learnt.
        refine: preconditioned CG steps on top of it; 0 for none. The products run over `batches`.
        batches: fresh inner batches for the cross derivative and these products, or "all" for one pass over the data.

    >>> NHGDSingle(refine=2).name
    'nhgd_single'

    References: Natural Hypergradient Descent, algorithm 1 with T = 1, and its conclusion on future work.
    Deviations: 1. this is an extension of that paper, with per-sample statistics as in `NHGD`. 2. the curvature is
    always carried over: it has one new observation for each outer step.
    """

    name: ClassVar[str] = "nhgd_single"
    inverse: AbstractInverse | None = None
    refine: int = 0
    batches: int | str = 1

    def __post_init__(self) -> None:
        check_batches("NHGDSingle", self.batches)
        not_negative("NHGDSingle", refine=self.refine)
        learner = None if self.inverse is None else self.inverse.learner
        if isinstance(learner, FisherDense) and learner.warm == "reset":
            raise InputError(
                "NHGDSingle makes one observation for each outer step, so an inverse that is reset at each, such as"
                " FisherDense(warm='reset'), never uses more than one. Use warm='accumulate' or warm='prior'."
            )

    @override
    def prepared(self, problem: Bilevel) -> NHGDSingle:
        return replace(self, inverse=completed(self.inverse, self.refine, problem.theta), refine=0)

    @property
    @override
    def online(self) -> AbstractInverse | None:
        return self.inverse

    @property
    @override
    def not_repeatable(self) -> str | None:
        return None

    @override
    def init(self, loop: Loop) -> NHGDSingleState:
        """Decide how much of the inner steps the curvature takes: ten of them count as an inner loop."""
        calibrate(loop, steps=10)
        return NHGDSingleState(horizon=loop.horizon())

    @override
    def step(self, loop: Loop, state: NHGDSingleState) -> tuple[NHGDSingleState, StepInfo]:
        loss = loop.inner_step()
        found, lag, noted = hypergradient(loop, loop.inner_batches(self.batches), state.adjoint, horizon=state.horizon)
        norm = loop.move_v(found.leaves)
        notes = {"inverse": "none" if loop.inverse is None else loop.inverse.name} | noted
        return NHGDSingleState(found.adjoint, state.horizon), StepInfo(
            found.value, tape.reading(loss), norm, lag, notes
        )
