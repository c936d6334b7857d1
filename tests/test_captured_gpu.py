"""Outer steps captured as CUDA graphs beside plain ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd.algorithm import AID, NHGD, NHGDSingle
from nhgd.inverse import CG, EKFAC, KFAC, FisherDiagonal, FisherWindow, Refined
from nhgd.schedule import Decay

pytestmark = [
    pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore::nhgd._stagnation.StagnationWarning"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FULL = KFAC(overhead=None)
METHODS = {
    "identity": "aid-identity",
    "soba": "soba",
    "cg": AID(CG(steps=4)),
    "kfac": NHGD(FULL),
    "kfac, final": NHGD(FULL, cross="final"),
    "kfac within a budget": NHGD(),
    "ekfac": NHGD(EKFAC(overhead=None)),
    "diagonal": NHGD(FisherDiagonal(overhead=None)),
    "refined": NHGD(Refined(FULL, steps=3)),
}
WINDOW = FisherWindow(window=90, fisher="exact")
OF_WHOLE_BATCHES = {
    "window": NHGD(replace(WINDOW, overhead=None)),
    "natural": NHGD(WINDOW, inner="natural", natural_steps=2),
    "natural, observed at the end": NHGD(
        replace(WINDOW, records="sample", damping=1e-4), inner="natural", observe="end", natural_floor=1e-6
    ),
}


def inner(model, v, batch):
    x, y, i = batch
    z = model(x)
    return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights=v[i], outputs=z)


def outer(model, v, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def run(method, compile, steps=40, batch=40, inner=inner, **settings):
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)).double().cuda()
    x, y = (
        torch.randn(120, 12, generator=generator).double().cuda(),
        torch.randint(3, (120,), generator=generator).cuda(),
    )
    v = torch.full((90,), 0.5, dtype=torch.float64, device="cuda")
    problem = nhgd.Bilevel(inner, outer, net, v, l2=1e-2, likelihood="categorical")
    settings = {"inner_steps": 3, "inner_lr": 0.2, "outer_lr": 0.5, "project_v": (0, 1)} | settings
    data = nhgd.Data(x[:90], y[:90], batch=batch), nhgd.Data(x[90:], y[90:])
    return nhgd.Solver(problem, *data, method=method, compile=compile, **settings).run(steps=steps)


def assert_repeated(solution):
    assert solution.stats["compile"]["taken"] == "graph", solution.stats["compile"]["why"]
    assert solution.stats["compile"]["repeated"] > 5


@pytest.mark.parametrize("name", METHODS)
def test_repeated_steps_end_where_plain_ones_do(name):
    found = run(METHODS[name], "auto")
    assert_repeated(found)
    assert [row["step"] for row in found.history] == list(range(1, 41))
    if name != "kfac within a budget":  # which is another for captured steps
        torch.testing.assert_close(found.v, run(METHODS[name], False).v, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", OF_WHOLE_BATCHES)
def test_steps_with_a_window_of_the_whole_batch_end_where_plain_ones_do(name):
    found, wanted = (run(OF_WHOLE_BATCHES[name], compile, batch=None, outer_lr=0.05) for compile in ("auto", False))
    assert_repeated(found)
    torch.testing.assert_close(found.v, wanted.v, rtol=1e-6, atol=1e-8)
    assert found.history[-1].get("taken_back") == wanted.history[-1].get("taken_back")


@pytest.mark.parametrize("made", [True, False], ids=["by the user", "by the run"])
def test_schedules_momentum_and_a_capturable_adam(made):
    settings = {
        "inner_lr": Decay(0.1),
        "inner_optimizer": lambda leaves: torch.optim.SGD(leaves, lr=0.1, momentum=0.9, nesterov=True),
        "outer_lr": Decay(0.05),
        "outer_optimizer": (lambda leaves: torch.optim.Adam(leaves, lr=0.05, capturable=True))
        if made
        else torch.optim.Adam,
    }
    found = run(NHGD(FULL), "auto", **settings)
    assert_repeated(found)
    torch.testing.assert_close(found.v, run(NHGD(FULL), False, **settings).v, rtol=1e-6, atol=1e-8)


def test_numbers_that_are_not_finite_are_reported_with_their_step():
    with pytest.raises(nhgd.NhgdError, match="Outer step 31:"):
        run("aid-identity", "auto", inner_lr=lambda k: 1e300 if k == 30 else 0.2)


def test_a_capture_that_fails_leaves_the_device_as_it_was():
    def reading(model, v, batch):
        found = inner(model, v, batch)
        assert found.values.sum().item() > 0
        return found

    found = run("aid-identity", "auto", inner=reading)
    assert found.stats["compile"]["taken"] == "eager"
    assert "could not be captured" in found.stats["compile"]["why"]
    assert torch.rand(3, device="cuda").shape == (3,)
    assert_repeated(run("aid-identity", "auto"))


def test_a_single_loop_is_captured():
    found = run(NHGDSingle(FULL), "auto", steps=60)
    assert_repeated(found)
    torch.testing.assert_close(found.v, run(NHGDSingle(FULL), False, steps=60).v, rtol=1e-6, atol=1e-8)
