"""A few Hessian products on top of any inverse."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import counted, not_negative
from nhgd.errors import InputError
from nhgd.inverse._krylov.pcg import pcg
from nhgd.inverse.base import AbstractInverse, Learned, SolveStats, at_usual_scale, vector_bytes
from nhgd.inverse.capabilities import follows_horizon, label, preconditioner, products, warnings_for, with_learner
from nhgd.inverse.kfac import KFAC
from nhgd.oracle import Oracle
from nhgd.variable import Variable

Matrix = Literal["hessian", "ggn"]


@final
@dataclass(frozen=True)
class Refined(AbstractInverse):
    """Any inverse, made near-exact by a few preconditioned CG steps on the true Hessian.

    With M^{-1} the given inverse:

        r = u - H x,  z = M^{-1} r,  p = z
        repeat:  alpha = r.z / p.Hp;  x += alpha p;  r_new = r - alpha Hp;  z_new = M^{-1} r_new
                 p = z_new + (r_new.z_new / r.z) p

    One step from zero gives x = alpha M^{-1} u, the cheap correction of the scale of M. Products run over the batches
    of the point: one, several or all data. It stops early on negative curvature, and `notes["negative_curvature"]` is
    True; and, as in `CG`, a curvature of rounding size that leads to no smaller residual means that what is left of u,
    `notes["outside"]`, lies outside of the range of H. x is then the iterate of least residual; on negative curvature
    in the very first step it is M^{-1} u itself, shortened where its product is more than ten times as long as u.

    Args:
        inverse: what preconditions; one that learns is fed by the inner steps as it would be alone. It must be
            symmetric and positive.
        steps: products at most.
        matrix: "hessian", or "ggn" for the generalised Gauss-Newton matrix, which never has negative curvature when the
            loss is convex in the model's outputs.
        tol: relative residual at which to stop.

    >>> Refined(KFAC(damping=1e-3), steps=3).products
    3

    References: J. Nocedal, S. J. Wright, Numerical Optimization, 2006, algorithm 5.3 (preconditioned CG).
    Deviations: 1. the iterate of least residual is the best combination of iterates (`LeastResidual`).
    """

    name: ClassVar[str] = "refined"
    steps_field: ClassVar[str | None] = "steps"
    inverse: AbstractInverse = field(default_factory=KFAC)
    steps: int = 5
    matrix: Matrix = "hessian"
    tol: float = 1e-10

    def __post_init__(self) -> None:
        counted("Refined", steps=self.steps)
        not_negative("Refined", tol=self.tol)
        if isinstance(self.inverse, Refined):
            raise InputError("Refined cannot refine itself: use more steps instead.")

    @property
    def follows_horizon(self) -> bool:
        """Whether that of the inner inverse does."""
        return follows_horizon(self.inverse)

    @property
    def label(self) -> str:
        """refined(INVERSE, STEPS)."""
        return f"refined({label(self.inverse)}, {self.steps})"

    @property
    @override
    def learner(self) -> Learned[Any] | None:
        return self.inverse.learner

    def with_learner(self, learner: Learned[Any]) -> Refined:
        """The inverse inside with another learner."""
        return replace(self, inverse=with_learner(self.inverse, learner))

    @override
    def apply(self, state: Any, u: Tensor, oracle: Oracle, start: Tensor | None = None) -> tuple[Tensor, SolveStats]:
        """Iterate from `start` if it is better than zero, else from zero."""
        return at_usual_scale(u, start, lambda u, start: self._solve(state, u, oracle, start))

    def _solve(self, state: Any, u: Tensor, oracle: Oracle, start: Tensor | None) -> tuple[Tensor, SolveStats]:
        before = oracle.calls.hvps
        product = oracle.hvp if self.matrix == "hessian" else oracle.ggn
        precondition = preconditioner(self.inverse, state, oracle)
        x, residual, notes = pcg("Refined", product, u, self.steps, self.tol, start, precondition)
        notes["inverse"] = self.inverse.name
        converged = tape.defer(lambda left: left <= self.tol, residual)
        return x, SolveStats(residual, oracle.calls.hvps - before, converged, notes)

    @override
    def memory(self, theta: Variable) -> int:
        """The inverse inside, x, r, z, p and Hp, and the best x and r."""
        return self.inverse.memory(theta) + vector_bytes(theta, 7)

    def warnings_for(self, theta: Variable) -> list[str]:
        """The warnings of the inner inverse."""
        return warnings_for(self.inverse, theta)

    @property
    def products(self) -> int | None:
        """At most `steps`, one more to try a given start, one where the curvature is of rounding size, and those of
        the inverse
        inside at each step."""
        inside = products(self.inverse)
        return None if inside is None else self.steps * (1 + inside)
