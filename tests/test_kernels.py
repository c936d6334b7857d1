"""Attention keeps its fused kernel unless a second derivative is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nhgd
from nhgd.oracle import Oracle


class Noted(TorchDispatchMode):
    """Which kernels attention runs on inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if "attention" in name or name in ("_softmax", "_safe_softmax"):
            self.names.add("fused" if "attention" in name else "math")
        return func(*args, **(kwargs or {}))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.norm, self.head = nn.Linear(4, 12), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return self.head(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0].mean(1))


def made() -> tuple[nhgd.Bilevel, Any, Any]:
    torch.manual_seed(0)
    x, y = torch.randn(6, 3, 4), torch.arange(6) % 3

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), v[batch[2]].sigmoid(), z)

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    problem = nhgd.Bilevel(inner, outer, Attending(), torch.zeros(6), 0.01, "categorical")
    return problem, (x, y, torch.arange(6)), (x, y)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("cross", ["lagged", "final"])
@pytest.mark.parametrize("inverse", ["kfac", "ekfac", "fisher_diagonal"])
def test_a_settled_run_takes_no_second_derivative(cross: Any, inverse: str) -> None:
    problem, inner, outer = made()
    method = nhgd.algorithm.NHGD(nhgd.inverse.resolve(inverse), cross=cross)
    solver = nhgd.Solver(problem, [inner], [outer], method=method, inner_steps=2)
    solver.run(steps=2)
    with Noted() as noted:
        solver.step()
    assert noted.names == {"fused"}


def test_products_run_on_a_kernel_that_has_a_second_derivative() -> None:
    problem, inner, outer = made()
    at = Oracle(problem, [inner], outer)
    with Noted() as noted:
        at.outer()
    assert noted.names == {"fused"}
    with Noted() as noted:
        at.hvp(torch.ones(at.numel))
    assert noted.names == {"math"}
