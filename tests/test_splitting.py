"""K-FAC with large factors split into blocks on their diagonals."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._shape import Shape
from nhgd.inverse import KFAC
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.eigenbasis import decomposed
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.splitting import blocks
from nhgd.ridge import Ridge
from tests import oracles
from tests.catalogue import normal
from tests.test_record import weighing


class Flat(nn.Module):
    """Flatten, of any memory order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)


NETS: dict[str, Any] = {
    "bias": (lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)), (8, 5)),
    "no bias": (lambda: nn.Sequential(nn.Linear(6, 4, bias=False), nn.Tanh(), nn.Linear(4, 3, bias=False)), (8, 6)),
    "places": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Flat(), nn.Linear(8, 3)), (8, 2, 4)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), Flat(), nn.Linear(16, 3)), (8, 2, 3, 3)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), Flat(), nn.Linear(16, 3)),
        (8, 2, 3, 3),
    ),
}


def made(name: str) -> tuple[nhgd.Bilevel, Any]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    return weighing(make(), normal(*shape))


def masked(name: str, problem: nhgd.Bilevel, batch: Any, most: int) -> Tensor:
    """The dense matrix of K-FAC with everything beside the blocks of its factors left out, without the ridge."""
    total = torch.zeros(problem.theta.numel, problem.theta.numel, dtype=torch.float64)
    mean = oracles.losses(problem, batch)[1].detach().mean()
    for a, g, at in oracles.kronecker_factors(problem, batch):
        in_groups = name == "groups" and len(a) < 8  # the convolution
        for factor, even in ((a, False), (g, True)):
            if not in_groups:
                of = torch.arange(len(factor)) // blocks(len(factor), most, even)[1]
                factor.mul_(of[:, None] == of)
        places = at.reshape(-1)
        total[places[:, None], places] += torch.kron((g / mean).contiguous(), a.contiguous())
    return total


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("most", [2, 3, 4])
@pytest.mark.parametrize("solver", ["eigen", "kept"])
def test_the_solve_is_that_of_the_blocks(name: str, most: int, solver: str) -> None:
    problem, batch = made(name)
    inverse = KFAC(split=most, damping=None, invert_every=1 if solver == "kept" else None)
    state = learn(inverse, problem, [batch])
    u = torch.randn(problem.theta.numel, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, _ = inverse.solve(state, u, Ridge(0.04))
    matrix = masked(name, problem, batch, most) + 0.04 * torch.eye(len(u), dtype=u.dtype)
    torch.testing.assert_close(matrix @ x, u, rtol=1e-8, atol=1e-10)


def test_an_uneven_ridge_is_solved_in_blocks_too() -> None:
    problem, batch = made("bias")
    inverse = KFAC(split=2, damping=None)
    state = learn(inverse, problem, [batch])
    u = torch.ones(problem.theta.numel, dtype=torch.float64)
    ridge = torch.rand(problem.theta.numel, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.1
    x, _ = inverse.solve(state, u, Ridge(ridge))
    matrix = masked("bias", problem, batch, 2) + torch.diag(ridge)
    torch.testing.assert_close(matrix @ x, u, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
def test_what_is_gathered_is_scattered_back(name: str) -> None:
    problem, batch = made(name)
    state: KroneckerState = learn(KFAC(split=2), problem, [batch])
    u, x = torch.rand(problem.theta.numel).double(), torch.zeros(problem.theta.numel).double()
    for layer in state.inputs:
        state.scatter(layer, state.gather(layer, u), x)
    assert torch.equal(u, x)


def test_blocks_take_less_memory_and_work() -> None:
    theta = nhgd.Bilevel(lambda *a: None, lambda *a: None, nn.Linear(3071, 3072), torch.zeros(())).theta  # type: ignore[arg-type, return-value]
    assert KFAC().memory(theta) < 0.85 * KFAC(split=None).memory(theta)
    shape = Shape.of(theta, 8).in_blocks(1024)
    assert shape.layers[0][:3] == (9, 1024, 1024)
    assert KFAC().split == 1024
    with pytest.raises(nhgd.InputError, match="split"):
        KFAC(split=0)


def test_layers_take_turns_after_the_build_up() -> None:
    """In each period every layer is decomposed once, and its basis is of the factors of that observation."""
    problem, batch = made("bias")
    inverse = KFAC(effort=Effort(invert_every=2, invert_at=(1,)))
    recorder = Recorder(problem, "layer", couples=False)
    state = inverse.init(problem.theta)
    renewed: list[list[str]] = []
    for _ in range(7):
        with torch.no_grad():
            problem.v.given.add_(0.5)
        before = state.bases
        state = inverse.observe(state, recorder.step(batch).record)
        changed = [n for n in state.bases if n not in before or state.bases[n] is not before[n]]
        own = [n for n in changed if n not in before or not same(state.bases[n], before[n])]
        for name in own:
            assert same(state.bases[name], decomposed(state, name)._asdict())
        renewed.append(own)
    assert renewed[0] == ["0.weight", "2.weight"]
    assert all(len(names) == 1 for names in renewed[1:])
    assert all({*a, *b} == {"0.weight", "2.weight"} for a, b in pairwise(renewed[1:]))


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[field], b[field]) for field in a)
