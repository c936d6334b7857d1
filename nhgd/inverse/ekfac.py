"""EKFAC: K-FAC's eigenbasis with the right variances in it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from nhgd import _tape as tape
from nhgd.errors import InputError
from nhgd.inverse._learned.eigenbasis import Basis, Solve, decompositions
from nhgd.inverse._learned.kronecker import AbstractKronecker
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.layer_ridge import LayerRidge, Uneven
from nhgd.inverse._learned.statistics import merge, second_moments
from nhgd.record import LayerStatistics, batch_mean, pool_of


@dataclass
class EKFACState(KroneckerState):
    """K-FAC's state with the second moments of the gradients in the kept eigenbasis, (G, out, in) for each layer."""

    moments: dict[str, Tensor] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class EKFAC(AbstractKronecker[EKFACState]):
    """EKFAC: K-FAC's eigenbasis, with the second moments of per-sample gradients in place of its eigenvalues.

    With Q_A and Q_G the eigenvectors of K-FAC's factors and S_i = sum_t g_it a_it^T the gradient of sample i:

        M = mean_i w_i (Q_G^T S_i Q_A)^2            entry by entry
        X = Q_G [ (Q_G^T U Q_A) / (M + 2 l2 + damping) ] Q_A^T

    M is the diagonal of the layer's Fisher matrix in that basis, so no other diagonal is nearer to it in the Frobenius
    norm, and its trace is exact. No per-sample gradient is formed for layers that see one place.

    The basis has to exist when the moments are taken. It is made at the first observation, and again at every multiple
    of `invert_every`, from the running factors. M is then carried over. It stands for A (x) G with a correction that is
    diagonal in the old basis; the diagonal of that matrix in the new basis is

        M <- D_new + (R_G * R_G) (M - D_old) (R_A * R_A)^T,    R_A = Q_A_new^T Q_A_old,   R_G = Q_G_new^T Q_G_old

    with D the diagonal of A (x) G in either basis. Entries below zero are set to zero, and the trace is kept. M stays
    as it is where the eigenvectors only changed their order or signs. After one batch M is exact; after several it is
    exact as long as the basis stayed the same.

    A ridge that differs within a layer is no diagonal in that basis: it takes conjugate gradients, as in `KFAC`. Where
    it has the form of rows times columns, over more than three decades, K-FAC's basis for that ridge preconditions
    them, if it costs no more than they do.

    Args:
        damping, beta, fisher, factor_every, overhead, effort, dense_limit, dtype, offload: as in `KFAC`.
        invert_every: observations from one basis to the next.
        invert_phase: as in `KFAC`.

    >>> EKFAC().invert_every
    10

    References: T. George et al., Fast approximate natural gradient descent in a Kronecker-factored eigenbasis, 2018,
    algorithm 1.

    Deviations: 1. The moments are carried over to a new basis, where the paper starts them again, because a solve may
    come at any step. 2. They are weighted like K-FAC's factors, and running means with bias correction.
    """

    name: ClassVar[str] = "ekfac"
    moments: ClassVar[int] = 1
    invert_every: int | None = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.invert_every is None:
            raise InputError(
                "EKFAC: invert_every must be a number, because the eigenbasis has to exist while moments are taken in it."
            )

    def _empty(self, starts: dict[str, int], sizes: dict[str, int]) -> EKFACState:
        return EKFACState(starts, sizes)

    def settled(self, state: EKFACState) -> tuple[EKFAC, EKFACState]:
        """For a second walk over the same batches: the eigenbasis of the factors of the first, which then stays.

        After the second walk the moments are exact in it.
        """
        state = self.awake(state)
        bases = {layer: basis._asdict() for layer, basis in decompositions(state, state.inputs, None).items()}
        settled = replace(self, invert_every=sys.maxsize, invert_phase=0, overhead=None)
        return settled, replace(state, mass=0.0, bases=bases, moments={})

    def _refreshed(self, before: EKFACState, state: EKFACState, record: LayerStatistics, rate: float) -> EKFACState:
        bases, moments = dict(state.bases), dict(state.moments)
        due = self.is_due(state.observed)
        wanted = [name for name in state.inputs if due or name not in bases]
        pool = pool_of(record)
        renewed = tape.eager(lambda: decompositions(state, wanted, pool)) if wanted else {}
        for name, new in renewed.items():
            old = bases.get(name)
            bases[name] = new._asdict()
            if old is not None:
                moments[name] = _carried(moments[name], *before.factors(name), Basis(**old), new)
        batch = {}
        for layer in record.layers:
            basis = Basis(**bases[layer.weight])
            a, g = layer.inputs.to(basis.input_values.dtype), layer.scores.to(basis.input_values.dtype)
            a = torch.einsum("btgi,gij->btgj", a, basis.input_vectors)
            g = torch.einsum("kbtgo,gop->kbtgp", g, basis.score_vectors)
            batch[layer.weight] = second_moments(a, g) / (record.samples or 1)
        batch = dict(zip(batch, batch_mean(record, list(batch.values())), strict=True))
        return replace(state, bases=bases, moments=merge(moments, batch, rate))

    def _trace(self, state: EKFACState, layer: str) -> Tensor:
        return state.moments[layer].sum()

    def _layer_solver(self, state: EKFACState, layer: str, extra: float) -> Solve:
        return Basis(**state.bases[layer]).solver("EKFAC", layer, state.moments[layer], extra)

    def _uneven_solver(self, state: EKFACState, layer: str, ridge: LayerRidge, notes: dict[str, Any]) -> Solve:
        basis, moments = Basis(**state.bases[layer]), state.moments[layer]
        precondition: Solve | None = None
        if ridge.separable and ridge.is_wide and ridge.pays(self._iterations):
            new = ridge.basis(layer, *basis.factors(), basis)
            near = ridge.solver(new, ridge.diagonal(new, basis, moments))
            precondition = lambda y: basis.rotate(near(basis.back(y)))  # noqa: E731
        averaged = basis.solver("EKFAC", layer, moments, ridge.mean)
        system = Uneven(basis, moments, ridge.entries, precondition=precondition)
        return system.solver(lambda: averaged, self._iterations, notes)


def _carried(moments: Tensor, a: Tensor, g: Tensor, old: Basis, new: Basis) -> Tensor:
    """The diagonal, in the new basis, of A (x) G corrected so that its diagonal in the old one is `moments`."""

    def product(basis: Basis) -> Tensor:
        """The diagonal of A (x) G in a basis, (G, out, in)."""
        in_a = (basis.input_vectors.mT @ a @ basis.input_vectors).diagonal(dim1=1, dim2=2)
        in_g = (basis.score_vectors.mT @ g @ basis.score_vectors).diagonal(dim1=1, dim2=2)
        return in_g[:, :, None] * in_a[:, None, :]

    r_a = (new.input_vectors.mT @ old.input_vectors).square()
    r_g = (new.score_vectors.mT @ old.score_vectors).square()
    found = (product(new) + r_g @ (moments - product(old)) @ r_a.mT).clamp_min(0)
    total, wanted = (m.sum((1, 2), keepdim=True) for m in (found, moments))
    return found * torch.where(total > 0, wanted / total, 0.0)
