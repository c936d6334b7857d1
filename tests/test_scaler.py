"""Loss scaling: passes under float16 autocast with a `torch.amp.GradScaler`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._scaling import Scaling
from nhgd.algorithm import AID, NHGD, AbstractAlgorithm
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow
from nhgd.inverse._learned.learning import learn
from tests import oracles

TINY = 1e-4  # a factor on the losses, with which most gradients vanish in float16
NETS = {
    "layers": lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
    "general": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 3)
    ),
    "batch": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)),
}


def made(
    net: str = "layers", dtype: torch.dtype = torch.float64, low: bool = False, factor: float = TINY
) -> tuple[nhgd.Bilevel, Any, Any]:
    """Weighted classification, its model under float16 autocast if `low`, its losses times a factor."""
    torch.manual_seed(0)
    model = NETS[net]().to(dtype)

    def logits(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16, enabled=low):
            return model(x)

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = logits(model, x)
        return nhgd.Losses(factor * F.cross_entropy(z.to(dtype), y, reduction="none"), v[i].sigmoid(), z)

    def outer(model: Any, v: Any, batch: Any) -> Tensor:
        return factor * F.cross_entropy(logits(model, batch[0]).to(dtype), batch[1])

    x, y, v = torch.randn(16, 6).to(dtype), torch.arange(16) % 3, torch.zeros(16, dtype=dtype)
    return nhgd.Bilevel(inner, outer, model, v, l2=1e-5), (x, y, torch.arange(16)), (x[:8], y[:8])


def scaler(scale: float = 2.0**14, **settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, **settings)


def ran(
    net: str,
    method: str | AbstractAlgorithm,
    scale: float | None,
    dtype: torch.dtype = torch.float64,
    low: bool = False,
    factor: float = TINY,
    **settings: Any,
) -> tuple[nhgd.Bilevel, nhgd.Solution]:
    problem, inner_batch, outer_batch = made(net, dtype, low, factor)
    if scale is not None:
        settings["scaler"] = scaler(scale)
    settings = {"inner_steps": 3, "inner_lr": 1e-3 / factor, "outer_lr": 1 / factor} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nhgd.InverseWarning)
        solver = nhgd.Solver(problem, [inner_batch], [outer_batch], method=method, **settings)
        return problem, solver.run(steps=3)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


METHODS = ["nhgd", "nhgd-window", "aid-identity", "aid-cg", "aid-ekfac", "aid-fisher_diagonal", "aid-neumann"]
METHODS += ["soba", "saba", "nhgd_single", "ttsa", "itd", "truncated", "f2sa", "bome", "sama", "bsa", "pzobo"]


@pytest.mark.parametrize("method", METHODS)
def test_a_scale_of_two_changes_no_bit(method: str) -> None:
    """In float64 a power of two is a factor without rounding, so whatever is not unscaled again would show."""
    found = [ran("layers", method, scale) for scale in (None, 2.0**60)]
    assert torch.equal(found[0][0].theta.flat(), found[1][0].theta.flat())
    assert torch.equal(found[0][0].v.flat(), found[1][0].v.flat())
    assert found[0][1].stats["scaler"] is None
    assert found[1][1].stats["scaler"] == {"scale": 2.0**60, "overflows": 0}


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize(
    "inverse", [KFAC(), KFAC(fisher="exact"), EKFAC(), FisherDiagonal(), FisherWindow(), FisherDense()]
)
def test_records_are_unscaled(net: str, inverse: Any) -> None:
    if net == "batch" and isinstance(inverse, (FisherWindow, FisherDense)):
        pytest.skip("refused with BatchNorm in training mode")
    states = []
    for scale in (None, 2.0**60):
        problem, batch, _ = made(net, factor=1.0)
        problem.likelihood = nhgd.likelihood.resolve("categorical")
        problem.scaling = Scaling(None if scale is None else scaler(scale), problem.theta.device)
        torch.manual_seed(1)
        states.append(learn(inverse, problem, [batch, batch]).tensors())
    for path, tensor in states[0].items():
        assert torch.equal(tensor, states[1][path]), path


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("net", NETS)
def test_a_pass_that_overflows_is_taken_again(net: str, accumulate: int) -> None:
    """With the dropout, and from the buffers, of the first time, so that the run is that without a scaler.

    The numbers of float32 end where those of a scaler do, at 2^128.
    """
    exact = KFAC(overhead=None)  # which the work of scaling would enter otherwise
    method = AID(inverse=exact) if net == "batch" else NHGD(inverse=exact)
    found = [ran(net, method, scale, torch.float32, factor=100.0, accumulate=accumulate) for scale in (None, 2.0**127)]
    overflows = found[1][1].stats["scaler"]["overflows"]
    assert overflows > 0
    assert found[1][1].stats["scaler"]["scale"] == 2.0 ** (127 - overflows)
    for one, other in zip(found[0][0].point(), found[1][0].point(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", ["nhgd", "aid-cg", "aid-ekfac", "soba", "itd"])
def test_float16_with_a_scaler_is_close_to_float64(method: str) -> None:
    exact = ran("layers", method, None)[0]
    errors = []
    for scale in (None, 2.0**34):  # far too large at first
        problem, solution = ran("layers", method, scale, torch.float32, low=True)
        errors.append([relative(problem.theta.flat(), exact.theta.flat()), relative(problem.v.flat(), exact.v.flat())])
    assert solution.stats["scaler"]["overflows"] > 0
    assert errors[1][0] < 1e-5
    assert errors[1][1] < 4e-3
    assert errors[0][0] > 10 * errors[1][0]
    assert errors[0][1] > 2 * errors[1][1]


def test_the_hypergradient_in_float16_against_the_dense_one() -> None:
    problem, inner_batch, outer_batch = made()
    matrix = oracles.ggn(problem, inner_batch) + oracles.ridge_hessian(problem)
    true = oracles.hypergradient(problem, inner_batch, outer_batch, matrix)
    low, inner_batch, outer_batch = made(dtype=torch.float32, low=True)
    own, inverse = scaler(2.0**40), nhgd.inverse.Refined(KFAC(), steps=40, matrix="ggn")
    found = nhgd.hypergradient(low, inner_batch, outer_batch, inverse=inverse, scaler=own).grad
    assert own.get_scale() < 2.0**40  # at which passes overflow
    assert not low.scaling.active
    assert relative(found, true) < 1e-2


def test_a_checkpoint_keeps_the_scale(tmp_path: Path) -> None:
    """It grows every third step and falls at each overflow, and goes on so after the interruption."""
    ends = []
    for parts in ([6], [2, 4]):
        for number, steps in enumerate(parts):
            problem, inner_batch, outer_batch = made(dtype=torch.float32, low=True)
            own = scaler(2.0**34, growth_interval=3)
            folder = tmp_path / str(len(parts))
            if number == 0:
                settings: dict[str, Any] = {"inner_steps": 2, "inner_lr": 10.0, "outer_lr": 1e4, "seed": 3}
                solver = nhgd.Solver(problem, [inner_batch], [outer_batch], scaler=own, checkpoint=folder, **settings)
            else:
                with pytest.raises(nhgd.InputError, match="cannot hold scaler"):
                    nhgd.Solver.resume(folder, problem, [inner_batch], [outer_batch])
                solver = nhgd.Solver.resume(folder, problem, [inner_batch], [outer_batch], scaler=own)
                solver.run(steps=2)  # what was asked for before
            solution = solver.run(steps=steps)
            solver.close()
        ends.append((problem.theta.flat(), problem.v.flat(), solution.stats["scaler"], own.state_dict()))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert ends[0][2:] == ends[1][2:]
    assert ends[0][2]["overflows"] > 0


def test_a_run_that_diverges_is_no_overflow() -> None:
    problem, (x, y, i), outer_batch = made()
    own = scaler(2.0**14)
    inner = problem.inner
    problem.inner = lambda net, v, b: nhgd.Losses(inner(net, v, b).values * float("inf"), v[b[2]].sigmoid())
    with pytest.raises(nhgd.NhgdError):
        nhgd.Solver(problem, [(x, y, i)], [outer_batch], method="aid-kfac", scaler=own).run(steps=1)
    assert own.get_scale() == 2.0**14
    # Infinite gradients of finite losses are looked for at lower scales, which are not kept.
    problem, inner_batch, outer_batch = made()
    first = problem.theta.leaves[0]
    first.register_hook(lambda g: g * float("nan"))
    with pytest.raises(nhgd.NhgdError):
        nhgd.Solver(problem, [inner_batch], [outer_batch], method="aid-identity", scaler=own).run(steps=1)
    assert own.get_scale() == 2.0**14


def test_what_a_scaler_does_not_go_with() -> None:
    problem, inner_batch, outer_batch = made(dtype=torch.float16)
    with pytest.raises(nhgd.InputError, match="float16"):
        nhgd.Solver(problem, [inner_batch], [outer_batch], scaler=scaler())
    off = torch.amp.GradScaler("cpu", enabled=False)
    problem, inner_batch, outer_batch = made()
    solution = nhgd.Solver(problem, [inner_batch], [outer_batch], scaler=off).run(steps=1)
    assert solution.stats["scaler"] is None

    class ShardedGradScaler(torch.amp.GradScaler):
        pass

    with pytest.raises(nhgd.InputError, match="ShardedGradScaler"):
        nhgd.Solver(problem, [inner_batch], [outer_batch], scaler=ShardedGradScaler("cpu"))


def test_captured_steps_are_refused_with_the_reason() -> None:
    problem, inner_batch, outer_batch = made()
    data = [nhgd.Data(*batch, batch=8) for batch in (inner_batch[:2], outer_batch)]
    with pytest.warns(UserWarning, match="loss scale"):
        solver = nhgd.Solver(problem, *data, method="aid-kfac", scaler=scaler(), compile="graph")
    solution = solver.run(steps=2)
    assert solution.stats["compile"]["taken"] == "eager"


@pytest.mark.parametrize("way", ["inner", "observe", "backward"])
def test_a_loop_of_ones_own_with_a_scaler(way: str) -> None:
    """The state is that of the same loop in float64 without a scaler."""
    states = []
    high = 2.0**24 if way == "backward" else 2.0**34  # which overflows
    for dtype, scale in ((torch.float64, None), (torch.float64, 2.0**30), (torch.float32, high)):
        torch.manual_seed(0)
        low = dtype is torch.float32
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

        def losses(net: Any, x: Tensor, y: Tensor, low: bool = low, dtype: torch.dtype = dtype) -> Tensor:
            with torch.autocast("cpu", dtype=torch.float16, enabled=low):
                z = net(x)
            return TINY * F.cross_entropy(z.to(dtype), y, reduction="none")

        problem = nhgd.Bilevel(
            lambda net, v, b: losses(net, *b),
            lambda net, v, b: losses(net, *b).mean(),
            net,
            torch.zeros(1, dtype=dtype),
        )
        x, y = torch.randn(16, 6, dtype=torch.float64).to(dtype), torch.arange(16) % 3
        own = None if scale is None else scaler(scale)
        optimizer = torch.optim.SGD(net.parameters(), lr=10.0)
        taken = 0
        with nhgd.observing(problem, inverse=KFAC(damping=1e-3), scaler=own) as curvature:
            while taken < 3:
                optimizer.zero_grad()
                if way == "inner":
                    loss = curvature.inner((x, y))
                elif way == "observe":
                    loss = curvature.observe(losses(net, x, y))
                else:
                    loss = losses(net, x, y).mean()
                if own is None:
                    loss.backward()
                    optimizer.step()
                    taken += 1
                    continue
                before = own.get_scale()
                own.scale(loss).backward()
                own.step(optimizer)
                own.update()
                taken += own.get_scale() >= before
        assert curvature.steps == 3
        states.append(curvature.state.tensors())
    exact, scaled, low = states
    for path, tensor in exact.items():
        assert torch.equal(scaled[path], tensor), path
        if tensor.is_floating_point() and "vectors" not in path:
            assert relative(low[path], tensor) < 4e-3, path


def test_the_scale_of_the_scores_reaches_no_statistics() -> None:
    """Against the oracle: rows of every sample, under float16 with losses that vanish in it."""
    problem, batch, _ = made()
    true = oracles.rows(problem, batch)
    low, batch, _ = made(dtype=torch.float32, low=True)
    errors = []
    for scale in (None, 2.0**24):
        low.scaling = Scaling(None if scale is None else scaler(scale), low.theta.device)
        record = Recorder(low, "sample").step(batch).record
        errors.append(relative(record.rows, true))
    assert errors[1] < 4e-3 < errors[0]


def test_layers_whose_scores_would_vanish_are_verified_scaled() -> None:
    """Scores that float16 rounds to few steps do not add up to the gradient, and a layer would pass for one of another kind."""
    torch.manual_seed(0)
    kinds = []
    for scale in (None, 2.0**24):
        low, batch, _ = made(dtype=torch.float32, low=True, factor=5e-6)
        low.scaling = Scaling(None if scale is None else scaler(scale), low.theta.device)
        recorder = Recorder(low, "layer", couples=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder.step(batch)
        kinds.append(recorder.verification.foreign)
    assert kinds[0]
    assert not kinds[1]
