"""The categorical likelihood of sequences: a factor for each place, read off the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.likelihood import Categorical
from nhgd.oracle import Oracle

MASK = torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.float64)
SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda losses: losses.mean(1),
    "sum": lambda losses: losses.sum(1),
    "mask": lambda losses: (losses * MASK).sum(1),
}


def made(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (3, 4, 5), losses (3,), and the Hessian of each loss in its scores, (3, 20, 20)."""
    torch.manual_seed(0)
    z = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    y = torch.randint(5, (3, 4))

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return SUMS[name](F.cross_entropy(z.transpose(1, 2), y, reduction="none"))

    hessians = [
        torch.autograd.functional.hessian(lambda x, i=i: loss(x[None], y[i : i + 1]).sum(), z[i].detach())
        for i in range(3)
    ]
    return z, loss(z, y), torch.stack(hessians).reshape(3, 20, 20)


@pytest.mark.parametrize("name", SUMS)
class TestSequences:
    def test_roots_are_those_of_the_hessian(self, name: str) -> None:
        z, losses, hessian = made(name)
        Categorical().verify(z, losses)
        roots = Categorical().roots(z, losses).flatten(2)  # (K, B, 20)
        torch.testing.assert_close(torch.einsum("kbi,kbj->bij", roots, roots), hessian)

    @pytest.mark.parametrize("how", ["sample", "signed"])
    def test_random_roots_have_it_as_their_second_moment(self, name: str, how: str) -> None:
        z, losses, hessian = made(name)
        drawn = []
        for _ in range(3000):
            if how == "sample":
                drawn.append(Categorical().sample(z, losses)[0])
            else:
                drawn.append(Categorical().signed(z, losses, lambda k: torch.randint(0, 2, (k, 3)) * 2 - 1)[0])
        rows = torch.stack(drawn).flatten(2)
        # The standard deviation of an entry is below 0.01; with a fixed seed nothing is left to chance.
        torch.testing.assert_close(torch.einsum("kbi,kbj->bij", rows, rows) / 3000, hessian, atol=0.04, rtol=0)


def test_losses_of_another_kind_are_refused() -> None:
    z, _, _ = made("mean")
    with pytest.raises(nhgd.InputError, match="does not describe these losses"):
        Categorical().verify(z, z.square().mean((1, 2)))


def test_a_sequence_model_has_the_gauss_newton_matrix() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 4)).double()
    x, y = torch.randn(5, 3, 2, dtype=torch.float64), torch.randint(4, (5, 3))

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        return nhgd.Losses(F.cross_entropy(z.transpose(1, 2), batch[1], reduction="none").mean(1), v.sigmoid(), z)

    v = torch.randn(5, dtype=torch.float64)
    problem = nhgd.Bilevel(inner, lambda net, v, batch: net(batch[0]).sum(), net, v, likelihood="categorical")
    record: Any = Recorder(problem, "sample", "exact").step((x, y)).record
    at = Oracle(problem, [(x, y)], (x, y))
    matrix = torch.stack([at.ggn(row) for row in torch.eye(problem.theta.numel, dtype=torch.float64)])
    torch.testing.assert_close(record.rows.T @ record.rows / 5, matrix)
