"""Shorter batches of a captured run: filled up, they give what the short ones do, and steps are of few kinds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.algorithm import AID, NHGD
from nhgd.data.padding import Padded
from nhgd.data.stream import BatchStream
from nhgd.inverse import EKFAC, KFAC, FisherDiagonal
from nhgd.loop.mover import Mover
from nhgd.objective import Objective, OracleCalls
from nhgd.schedule import Clock
from nhgd.variable import Variable

pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning")
FULL = KFAC(overhead=None)


def weighted(model, v, batch):
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[i].sigmoid(), outputs=z)


def unweighted(model, v, batch):
    x, _, i = batch
    return (model(x) - v[i][:, None]).square().sum(1)


def coupled(model, v, batch):
    found = weighted(model, v, batch)
    return nhgd.Losses(found.values / found.values.detach().mean(), weights=found.weights)


def outer(model, v, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def solver(inner=weighted, method="aid-identity", batch=16, compile="graph", net=None, **settings):
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3)) if net is None else net
    x, y = torch.randn(60, 4, generator=generator).double(), torch.randint(3, (60,), generator=generator)
    problem = nhgd.Bilevel(inner, outer, net.double(), torch.zeros(45).double(), l2=1e-2, likelihood="categorical")
    data = nhgd.Data(x[:45], y[:45], batch=batch), nhgd.Data(x[45:], y[45:])
    settings = {"inner_steps": 5, "inner_lr": 0.2, "outer_lr": 0.5} | settings
    return nhgd.Solver(problem, *data, method=method, compile=compile, **settings)


@pytest.mark.parametrize("inner", [weighted, unweighted])
@pytest.mark.parametrize("count", [1, 13, 16])
def test_a_batch_that_is_filled_up_has_the_objective_of_its_samples(inner, count):
    loop = solver(inner).loop
    index = torch.arange(20, 20 + count)
    filled = loop.inner.gathered(torch.cat([index, index[:1].expand(16 - count), torch.tensor([count])]))
    short = loop.inner.gathered(index)
    assert isinstance(filled, Padded)
    assert len(filled[0]) == 16
    assert not isinstance(short, Padded)
    filled.samples = count
    calls = OracleCalls(), OracleCalls()
    one, other = Objective(loop.problem, filled, 0), Objective(loop.problem, short, 0)
    x = torch.linspace(-1, 1, loop.problem.theta.numel).double()
    assert one.value() == pytest.approx(other.value(), rel=1e-13)
    for name in ("gradient", "hvp", "fisher"):
        vector = () if name == "gradient" else (x,)
        torch.testing.assert_close(getattr(one, name)(*vector), getattr(other, name)(*vector), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(one.cross(x), other.cross(x), rtol=1e-12, atol=1e-14)
    for objective, counted in zip((one, other), calls, strict=True):
        objective.gradient(counted)
    assert calls[0].samples == calls[1].samples == count
    assert filled.passes == 1


def test_a_batch_that_is_filled_up_lies_where_its_data_do():
    data = nhgd.Data(torch.zeros(45, 4), batch=16)
    data.tensors = tuple(t.to("meta") for t in data.tensors)  # another device than that of indices, as a GPU is one
    data._index = data._index.to("meta")
    stream = BatchStream(data, "inner_data", torch.device("meta"))
    stream.pads = True
    batches = [stream.next() for _ in range(3)]
    assert all(isinstance(batch, Padded) for batch in batches)
    assert {t.device.type for batch in batches for t in (*batch, batch.share)} == {"meta"}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, True),
        ({"inner": unweighted}, True),
        ({"inner": coupled}, False),
        ({"inner": lambda model, v, batch: weighted(model, v, batch).mean()}, False),
        ({"batch": 15}, False),
        ({"batch": 45}, False),
        ({"method": NHGD(KFAC(overhead=None, beta=None))}, False),
        ({"method": NHGD(FULL, cross="final", batches=2)}, False),
        ({"compile": False}, False),
    ],
    ids=["weights", "no weights", "coupled", "scalar", "even", "one batch", "every sample", "several", "eager"],
)
def test_batches_are_filled_up_where_that_changes_nothing(settings, wanted):
    assert solver(**settings).loop.inner.pads is wanted


def test_batches_of_a_model_with_buffers_stay_as_they_are():
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    assert not solver(net=net).loop.inner.pads


@pytest.mark.parametrize(
    "method",
    [
        "aid-identity",
        NHGD(FULL),
        NHGD(FULL, cross="final"),
        AID(FULL),
        NHGD(EKFAC(overhead=None)),
        NHGD(FisherDiagonal(overhead=None)),
    ],
    ids=["identity", "lagged", "final", "aid", "ekfac", "diagonal"],
)
def test_steps_are_of_few_kinds_and_end_where_eager_ones_do(method):
    found = solver(method=method).run(steps=40)
    said = found.stats["compile"]
    assert said["captured"] <= 4, said  # the short batch lies at each of five places
    assert said["repeated"] >= 25, said
    assert "in every bit" in said["why"]
    wanted = solver(method=method, compile=False).run(steps=40)
    torch.testing.assert_close(found.v, wanted.v, rtol=1e-9, atol=1e-11)
    assert [row["samples"] for row in found.history] == [row["samples"] for row in wanted.history]


def test_wide_factors_are_solved_by_products_in_captured_steps_on_a_gpu(monkeypatch):
    def run(**settings):
        made = solver(method=NHGD(FULL), **settings)
        made.state.horizon.determined = True  # without a basis what of u is significant is decided by layer
        return made.run(steps=15)

    wanted = run(compile=False)
    taken = []
    original = KFAC._is_wide_on_a_gpu
    monkeypatch.setattr(
        KFAC, "_is_wide_on_a_gpu", lambda *given: taken.append(original(*given)) or nhgd._tape.repeatable()
    )
    found = run()
    assert taken
    assert not any(taken)  # it is no GPU
    torch.testing.assert_close(found.v, wanted.v, rtol=1e-4, atol=1e-6)


def test_the_counters_of_an_adam_for_captured_steps_are_not_rounded():
    theta = Variable(torch.ones(3), "theta")
    mover = Mover(theta, "outer", torch.optim.Adam, 0.1, 0.1)
    mover._counts_in_double = True  # as for a GPU
    mover.move([torch.ones(3)], Clock())
    (state,) = mover.optimizer.state.values()
    assert state["step"].dtype is torch.float64
    assert state["exp_avg"].dtype is torch.float32
    assert torch.get_default_dtype() is torch.float32
