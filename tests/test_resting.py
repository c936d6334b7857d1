"""Factors that rest in the host's memory, and eigenvectors kept in few digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._memory import PeakMemory
from nhgd.algorithm import AID, NHGD
from nhgd.inverse import EKFAC, KFAC
from nhgd.inverse._learned import resting
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.resting import polished
from nhgd.ridge import Ridge
from tests.catalogue import normal
from tests.test_peak import made as of_size


def made() -> tuple[nhgd.Bilevel, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    x, y = normal(16, 6), torch.arange(16) % 3

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.cross_entropy(net(batch[0]), batch[1], reduction="none"), v[batch[2]].sigmoid())

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), (batch[1] + (batch[2] < 4)) % 3)

    return nhgd.Bilevel(inner, outer, net.double(), normal(16), 0.02), (x, y, torch.arange(16))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What has travelled to the host; on the CPU every tensor is there already, and a copy stands for it."""
    travelled: list[Tensor] = []

    def to_host(tensor: Tensor) -> Tensor:
        travelled.append(tensor.clone())
        return travelled[-1]

    monkeypatch.setattr(resting, "to_host", to_host)
    return travelled


@pytest.mark.parametrize("inverse", [KFAC(), KFAC(overhead=None), KFAC(invert_every=2), KFAC(split=4), EKFAC()])
def test_an_offloaded_run_is_the_same_run(inverse: Any, host: list[Tensor]) -> None:
    ends = []
    for offload in (False, True):
        problem, batch = made()
        own = type(inverse)(**{**vars(inverse), "offload": offload})
        solver = nhgd.Solver(problem, [batch], [batch], NHGD(inverse=own), inner_steps=3)
        solver.run(steps=3)
        ends.append((problem.theta.flat(), problem.v.flat(), solver.loop.executor.keep()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    state = ends[1][2]
    known = {id(t) for t in host}
    kinds = [state.inputs, state.scores, *state.bases.values(), getattr(state, "moments", {})]
    resting_tensors = [t for kind in kinds for t in kind.values()]
    assert resting_tensors
    assert all(id(t) in known for t in resting_tensors)


def test_layers_that_share_a_factor_share_it_on_the_host(host: list[Tensor]) -> None:
    a, g = torch.eye(3).expand(1, 3, 3), torch.eye(2).expand(1, 2, 2)
    state = KFAC().init(made()[0].theta)
    state.inputs, state.scores = {"a": a, "b": a}, {"a": g, "b": g.clone()}
    kept = resting.at_rest(state, True, None)
    assert kept.inputs["a"] is kept.inputs["b"]
    assert len(host) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("split", [None, 4])
def test_eigenvectors_of_few_digits_give_the_same_solution(dtype: torch.dtype, split: int | None) -> None:
    problem, batch = made()
    u = torch.linspace(-1, 1, problem.theta.numel, dtype=torch.float64)
    solved = []
    for kept in (None, dtype):
        inverse = KFAC(damping=1e-3, invert_every=1, kept_dtype=kept, split=split)
        state = learn(inverse, problem, [batch])
        if kept is not None:
            assert all(b["input_vectors"].dtype is dtype for b in state.bases.values())
            assert all(b["input_values"].dtype is torch.float64 for b in state.bases.values())
        solved.append(inverse.solve(state, u, Ridge(0.01))[0])
    assert 0 < float((solved[1] - solved[0]).norm() / solved[0].norm()) < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_with_the_factors_are_needed_and_suffice(dtype: torch.dtype) -> None:
    """Factors with eigenvalues over four decades, solved with a damping of a hundredth of a percent."""
    generator = torch.Generator().manual_seed(0)

    def factor(n: int) -> tuple[Tensor, Tensor, Tensor]:
        q = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
        values = 10 ** -torch.linspace(0, 4, n, dtype=torch.float64)
        return q, values, (q * values @ q.T)[None]

    (q_a, in_a, a), (q_g, in_g, g) = factor(60), factor(40)
    b = g @ torch.randn(1, 40, 60, generator=generator, dtype=torch.float64) @ a
    values = in_g[:, None] * in_a[None] + 1e-4
    true = q_g @ (q_g.T @ b @ q_a / values) @ q_a.T
    few_a, few_g = q_a.to(dtype).double(), q_g.to(dtype).double()

    def near(r: Tensor) -> Tensor:
        return few_g @ (few_g.T @ r @ few_a / values) @ few_a.T

    errors = [float((x - true).norm() / true.norm()) for x in (near(b), polished(a, g, 1e-4, near)(b))]
    assert errors[0] > 1e-2
    assert errors[1] < 1e-3


def test_an_uneven_ridge_is_solved_as_without() -> None:
    problem, batch = made()
    u = torch.linspace(-1, 1, problem.theta.numel, dtype=torch.float64)
    ridge = Ridge(torch.linspace(0.01, 0.1, problem.theta.numel, dtype=torch.float64))
    solved = []
    for kept in (None, torch.bfloat16):
        inverse = KFAC(damping=None, invert_every=1, kept_dtype=kept)
        solved.append(inverse.solve(learn(inverse, problem, [batch]), u, ridge)[0])
    torch.testing.assert_close(solved[1], solved[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{}, {"inverse": {"invert_every": 2}}])
def test_a_run_with_few_digits_is_close_and_resumes(settings: dict[str, Any], tmp_path: Path) -> None:
    ends = []
    for kept in (None, torch.float16):
        problem, batch = made()
        inverse = KFAC(kept_dtype=kept, **settings.get("inverse", {}))
        folder = tmp_path / str(kept)
        solver = nhgd.Solver(problem, [batch], [batch], AID(inverse=inverse), inner_steps=3, checkpoint=folder)
        solver.run(steps=2)
        solver.close()
        problem, _ = made()
        resumed = nhgd.Solver.resume(folder, problem, [batch], [batch])
        resumed.run(steps=2)
        resumed.run(steps=2)
        ends.append((problem.v.flat(), problem))
        resumed.close()
        straight, _ = made()
        nhgd.Solver(straight, [batch], [batch], AID(inverse=inverse), inner_steps=3).run(steps=4)
        assert torch.equal(straight.v.flat(), problem.v.flat())
    assert not torch.equal(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[1][0], ends[0][0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["transformer", "resnet"])
def test_plan_tells_the_peak_with_few_digits(name: str) -> None:
    def inverse() -> KFAC:
        return KFAC(kept_dtype=torch.bfloat16)

    problem, inner, _ = of_size(name)
    planned = nhgd.plan(problem, inner, inverses=[inverse(), KFAC()]).rows
    with PeakMemory() as alive:
        problem, inner, outer = of_size(name)
        solver = nhgd.Solver(problem, [inner], [outer], NHGD(inverse()), inner_steps=3, inner_lr=0.01, compile=False)
        solver.run(steps=3)
    assert planned[0]["peak_bytes"] == pytest.approx(alive.bytes, rel=0.15)
    theta = problem.theta
    assert inverse().kept(theta) < KFAC().kept(theta)


def test_on_a_gpu_plan_leaves_out_what_rests_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    theta = made()[0].theta
    monkeypatch.setattr(theta, "device", torch.device("cuda"), raising=False)
    assert KFAC(offload=True).kept(theta) < 3 * theta.numel * 8
    assert KFAC(offload=True).kept(theta) < KFAC().kept(theta)
    assert KFAC(offload=True).memory(theta) == KFAC().memory(theta)


def test_settings_that_would_be_ignored_are_errors() -> None:
    for settings in ({"solver": "cholesky"}, {"overhead": None}):
        with pytest.raises(nhgd.InputError, match="kept from one solve"):
            KFAC(kept_dtype=torch.bfloat16, **settings)
    with pytest.raises(nhgd.InputError, match="kept_dtype must be"):
        KFAC(kept_dtype=torch.int8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("inverse", [KFAC(), EKFAC()])
def test_on_a_gpu_factors_rest_in_main_memory(inverse: Any) -> None:
    ends = []
    for offload in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).cuda()
        x, y = torch.randn(32, 64).cuda(), (torch.arange(32) % 10).cuda()
        problem = nhgd.Bilevel(
            lambda net, v, b: nhgd.Losses(F.cross_entropy(net(b[0]), b[1], reduction="none"), v.sigmoid()),
            lambda net, v, b: F.cross_entropy(net(b[0]), b[1]),
            net,
            torch.zeros(32, device="cuda"),
            1e-3,
        )
        own = type(inverse)(**{**vars(inverse), "offload": offload})
        solver = nhgd.Solver(problem, [(x, y)], [(x, y)], NHGD(inverse=own), inner_steps=3, compile=False)
        solver.run(steps=3)
        state = solver.loop.executor.keep()
        ends.append(problem.v.flat())
    assert all(t.device.type == "cpu" and t.is_pinned() for t in (*state.inputs.values(), *state.scores.values()))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-7)
