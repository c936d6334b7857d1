"""Layers that are solved together, as a GPU solves them, against layers that are solved one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.inverse import KFAC
from nhgd.inverse._learned import concurrent, eigenbasis, together
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.kronecker_state import KroneckerState
from nhgd.inverse._learned.learning import learn
from nhgd.problem import Bilevel
from nhgd.ridge import Ridge
from tests.catalogue import normal
from tests.test_record import weighing


class Flat(nn.Module):
    """Flatten, of any memory order."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)


class Scaled(nn.Module):
    """Scales that belong to no layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def deep() -> nn.Module:
    """Layers of equal shapes, layers that are split, and norms of one size and of another."""
    return nn.Sequential(
        *(part for _ in range(3) for part in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())),
        nn.Linear(6, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        Scaled(12),
        nn.Linear(12, 3),
    )


def problem_on(device: str) -> tuple[nhgd.Bilevel, Any]:
    """Weighted samples of three classes, and the labels that the outer loss wants."""
    torch.manual_seed(0)
    x, y = normal(16, 6).to(device), torch.arange(16, device=device) % 3

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.cross_entropy(net(batch[0]), batch[1], reduction="none"), v[batch[2]].sigmoid())

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1].flip(0))

    v = torch.zeros(16, dtype=torch.float64, device=device)
    return nhgd.Bilevel(inner, outer, deep().double().to(device), v), (x, y, torch.arange(16, device=device))


NETS: dict[str, Any] = {
    "deep": (deep, (16, 6)),
    "places": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Flat(), nn.Linear(8, 3)), (8, 2, 4)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), Flat(), nn.Linear(16, 3)),
        (8, 2, 3, 3),
    ),
}


def learnt(name: str, dense_limit: int) -> tuple[KFAC, KroneckerState, Bilevel]:
    torch.manual_seed(0)
    make, shape = NETS[name]
    problem, batch = weighing(make(), normal(*shape))
    effort = Effort(invert_every=2, invert_at=(1,))
    inverse = KFAC(effort=effort, split=6, damping=None, dense_limit=dense_limit)
    return inverse, learn(inverse, problem, [batch, batch]), problem


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ridge", [1e-14, 1e-6, 1e-2, 1.0])
@pytest.mark.parametrize("dense_limit", [8, 256])
def test_together_they_solve_what_they_solve_one_by_one(
    name: str, ridge: float, dense_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inverse, state, problem = learnt(name, dense_limit)
    u = torch.randn(problem.theta.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(eigenbasis, "NEGLIGIBLE", 0.0)
    alone, _ = inverse.solve(state, u, Ridge(ridge))
    taken = []
    one, all_blocks = together.stacked, together.block_solvers
    monkeypatch.setattr(together, "pays", lambda device: True)
    monkeypatch.setattr(together, "stacked", lambda *given: taken.append("layers") or one(*given))
    monkeypatch.setattr(together, "block_solvers", lambda *given: taken.append("blocks") or all_blocks(*given))
    found, _ = inverse.solve(state, u, Ridge(ridge))
    assert "layers" in taken
    assert ("blocks" in taken) == bool(state.blocks)
    torch.testing.assert_close(found, alone, rtol=1e-6, atol=1e-7 * float(alone.abs().max()))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ridge", [1e-6, 1e-2, 1.0])
def test_what_they_leave_out_is_little(name: str, ridge: float, monkeypatch: pytest.MonkeyPatch) -> None:
    inverse, state, problem = learnt(name, 8)
    u = torch.randn(problem.theta.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(together, "pays", lambda device: True)
    found, _ = inverse.solve(state, u, Ridge(ridge))
    monkeypatch.setattr(eigenbasis, "NEGLIGIBLE", 0.0)
    exact, _ = inverse.solve(state, u, Ridge(ridge))
    assert float((found - exact).norm() / exact.norm()) < 0.1


def test_blocks_without_enough_digits_are_left_to_eigenvalues(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    blocks = {"dense": rows.T @ rows, "diagonal": rows[0].square()}
    b = [torch.ones(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)]
    asked = []
    known = together.eigenvalues
    monkeypatch.setattr(together, "eigenvalues", lambda *given: asked.append(1) or known(*given))
    for extra, by_eigenvalues in ((1e-3, 0), (1e-18, 1)):
        asked.clear()
        dense, diagonal = together.block_solvers(blocks, extra)(b)
        assert len(asked) == by_eigenvalues
        torch.testing.assert_close(diagonal, b[1] / (blocks["diagonal"] + extra))
        values, vectors = torch.linalg.eigh(blocks["dense"])
        exact = vectors @ ((vectors.T @ b[0]) / (values.clamp_min(0) + extra))
        torch.testing.assert_close(dense, exact, rtol=1e-6, atol=0)


def test_a_run_solves_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole outer loop with an effort arrives where it does layer by layer, but for what is left out."""
    found = []
    for pays in (False, True):
        monkeypatch.setattr(together, "pays", lambda device, pays=pays: pays)
        monkeypatch.setattr(eigenbasis, "NEGLIGIBLE", 0.0)
        problem, batch = problem_on("cpu")
        inverse = KFAC(effort=Effort(every=2, invert_every=2, invert_at=(1,)), damping=1e-3)
        solver = nhgd.Solver(
            problem, [batch], [batch], method=nhgd.algorithm.NHGD(inverse), inner_steps=3, outer_lr=0.1
        )
        solver.run(steps=4)
        found.append(problem.v.flat())
    assert float(found[0].abs().max()) > 0.01  # v has moved
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("shapes", [[(1, 5)], [(3, 4), (1, 7), (2, 4)], [(1, 3)] * 20])
def test_decompositions_beside_each_other_are_the_same(shapes: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    named = []
    for i, (groups, n) in enumerate(shapes):
        x = torch.randn(groups, n, n, dtype=torch.float64, generator=generator)
        named.append((str(i), x @ x.mT))
    found = concurrent.decomposed_beside(named, eigenbasis.eigenvalues)
    for (name, matrix), (values, vectors) in zip(named, found, strict=True):
        own = [eigenbasis.eigenvalues(name, matrix[i : i + 1]) for i in range(len(matrix))]
        assert torch.equal(values, torch.cat([v for v, _ in own]))
        assert torch.equal(vectors, torch.cat([q for _, q in own]))


def test_factors_are_decomposed_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _, state, _ = learnt("deep", 8)
    alone = eigenbasis.decompositions(state, state.inputs, None)
    monkeypatch.setattr(concurrent, "pays", lambda matrices: True)
    beside = eigenbasis.decompositions(state, state.inputs, None)
    for layer, basis in alone.items():
        assert all(torch.equal(a, b) for a, b in zip(basis, beside[layer], strict=True))


def test_a_failure_beside_others_is_told() -> None:
    with pytest.raises(nhgd.NonFiniteError, match="bad"):
        concurrent.decomposed_beside([("bad", torch.full((1, 3, 3), torch.nan))], eigenbasis.eigenvalues)


def test_what_the_next_solve_alone_needs_is_decomposed_beside_the_inner_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that take turns have the bases that they have in a run which waits for them at once."""
    monkeypatch.setattr(concurrent, "pays", lambda matrices: True)
    began, found = [], []
    begin = concurrent.begun_beside
    monkeypatch.setattr(concurrent, "begun_beside", lambda *given: began.append(concurrent.later()) or begin(*given))
    later = concurrent.later
    for waits in (False, True):
        monkeypatch.setattr(concurrent, "later", lambda waits=waits: None if waits else later())
        problem, batch = problem_on("cpu")
        inverse = KFAC(effort=Effort(every=2, invert_every=3, invert_at=(1,)), damping=1e-3)
        solver = nhgd.Solver(
            problem, [batch], [batch], method=nhgd.algorithm.NHGD(inverse), inner_steps=3, outer_lr=0.1
        )
        solver.run(steps=6)
        state = solver.loop.executor.keep()
        found.append(
            [problem.v.flat(), problem.theta.flat()] + [t for basis in state.bases.values() for t in basis.values()]
        )
    assert all(map(torch.equal, *found))
    assert sum(some is not None for some in began) >= 8  # every second of 18 inner steps has a record


def test_a_failure_beside_the_inner_steps_is_told_by_the_next_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrent, "pays", lambda matrices: True)
    known, calls = eigenbasis.eigenvalues, []

    def fails(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(name)
        if len(calls) > 40:
            raise nhgd.NonFiniteError("bad")
        return known(name, matrix)

    monkeypatch.setattr(eigenbasis, "eigenvalues", fails)
    problem, batch = problem_on("cpu")
    inverse = KFAC(effort=Effort(every=2, invert_every=3, invert_at=(1,)), damping=1e-3)
    solver = nhgd.Solver(problem, [batch], [batch], method=nhgd.algorithm.NHGD(inverse), inner_steps=3, outer_lr=0.1)
    with pytest.raises(nhgd.NonFiniteError, match="bad"):
        solver.run(steps=20)
