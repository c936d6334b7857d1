"""The floor of the inverse's error where the model is wrong by a total variation epsilon_D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nhgd.inverse import FisherDense
from nhgd.reproduce.theory.inner_loop import Estimator, Followed, distances
from nhgd.reproduce.theory.models import Softmax, hessian
from nhgd.reproduce.theory.rates import begun
from nhgd.reproduce.theory.slopes import fitted, fitted_norms
from nhgd.theory import Constants, misspecification


def floor(
    model: Softmax,
    shares: Sequence[float],
    runs: int,
    T: int,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """What remains of the error after T steps on data of which a share comes from elsewhere, beside its limit and its
    bound.

    Measured is the distance of the mean over the runs, so that the noise of single runs does not hide the floor.
    """
    rows, matrices = [], []
    for nth, share in enumerate(shares):
        wrong = mixed(model, share)
        H, fisher = wrong.fisher, fisher_of(wrong)
        epsilon = total_variation(wrong)
        followed = Followed(Estimator(FisherDense(form="inverse")), runs, len(wrong.phi))
        loop = begun(wrong, runs, 1, seed + nth, {"average": followed})
        loop.run(T)
        matrices.append(followed.M - H)
        rows.append(
            {
                "share": share,
                "epsilon_D": epsilon,
                "H - I": _norm(H - fisher),
                "measured H - I": _norm((followed.M - H).mean(0)),
                "bound": misspecification(_constants(wrong), epsilon),
                "inverse": _norm(torch.linalg.inv(fisher) - torch.linalg.inv(H)),
                "measured inverse": _norm(torch.linalg.inv(followed.M.mean(0)) - torch.linalg.inv(H)),
                "inverse of one run": float(distances(followed.A, torch.linalg.inv(H).expand(runs, -1, -1)).mean()),
            }
        )
        tick()
    x = [row["epsilon_D"] for row in rows]
    exact = fitted(x, torch.tensor([[row["H - I"] for row in rows]], dtype=torch.float64))
    measured = fitted_norms(x, torch.stack(matrices, 1))
    return {"T": T, "runs": runs, "rows": rows, "aim": 1.0, "exact": exact.slope, "measured": measured.as_dict()}


def mixed(model: Softmax, share: float) -> Softmax:
    """Of every label's distribution a share is replaced by one that the model cannot represent; phi is the new
    optimum.
    """
    angles = model.x.cumsum(-1).sin()
    other = torch.softmax(3 * torch.stack([angles[:, k % angles.shape[1]] for k in range(model.classes)], -1), -1)
    given = (1 - share) * model.truth + share * other
    wrong = replace(model, given=given)
    phi = model.phi
    for _ in range(60):
        phi = phi - torch.linalg.solve(hessian(wrong.expected)(phi), torch.func.grad(wrong.expected)(phi))
    return replace(wrong, phi=phi)


def total_variation(model: Softmax) -> float:
    """Between the data and the model at its optimum."""
    return float((model.probabilities(model.phi) - model.truth).abs().sum(-1).mean()) / 2


def fisher_of(model: Softmax) -> Tensor:
    """The expectation of the outer product of a sample's gradient at the optimum, under the data: a sum."""
    total = torch.zeros(len(model.phi), len(model.phi), dtype=torch.float64)
    for label in range(model.classes):
        y = torch.full((1, len(model.x)), label)
        scores = model.score(model.phi[None], (model.x[None], y))[0]  # (n, D)
        total += (model.truth[:, label, None] * scores).T @ scores
    return total / len(model.x)


def _constants(model: Softmax) -> Constants:
    """Constants whose bound of the gradient is that of a softmax sample, sqrt(2) |x|, and whose curvature is |x|^2 /
    2.
    """
    size = float(model.x.norm(dim=1).max())
    L, gradient = size**2 / 2, 2**0.5 * size
    return Constants(mu=1e-9 * L, L=L, R=gradient / (4 * L), C_1=gradient / 2, d_2=len(model.phi))


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2))
