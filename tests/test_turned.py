"""Passes over many samples, in which products with few columns are taken with the long dimension last."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd import _turned
from nhgd._turned import MANY, Turned, turned

CPU = torch.device("cpu")


@pytest.fixture
def forms(monkeypatch):
    """The operations that were taken in a turned form."""
    taken = []

    def noting(name, form):
        def work(*args):
            found = form(*args)
            if found is not None:
                taken.append(name)
            return found

        return work

    monkeypatch.setattr(
        _turned,
        "_FORMS",
        {function: noting(function._overloadpacket.__name__, form) for function, form in _turned._FORMS.items()},
    )
    return taken


PRODUCTS = ["mm", "addmm"] if torch.backends.mkl.is_available() else []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_values_gradients_and_memory_are_those_of_a_plain_pass(bias, dtype, forms):
    torch.manual_seed(0)
    layer, x = nn.Linear(7, 5, bias=bias, dtype=dtype), torch.randn(400, 7, dtype=dtype)
    y = torch.randint(5, (400,))

    def work():
        z = layer(x)
        loss = F.cross_entropy(z, y)
        return z, loss, *torch.autograd.grad(loss, tuple(layer.parameters()))

    wanted = work()
    assert not forms
    with Turned():
        found = work()
    product = PRODUCTS[bias : bias + 1]
    assert forms == [*product, "_log_softmax", "_log_softmax_backward_data"]
    eps = torch.finfo(dtype).eps
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=100 * eps, atol=100 * eps)
        assert one.stride() == other.stride()
        assert type(one.grad_fn) is type(other.grad_fn)


def test_other_work_is_left_alone(forms):
    x = torch.randn(400, 7)
    with Turned():
        assert torch.equal(F.log_softmax(x, 0), x.log_softmax(0))
        x.T @ x
        x[:100] @ x[:5].T
        x.half() @ x[:5].half().T
        F.log_softmax(torch.randn(400, 50), 1)
    assert not forms


def test_it_is_for_many_samples_on_the_cpu(forms):
    x, w = torch.randn(400, 7), torch.randn(5, 7)
    with turned(CPU, MANY - 1):
        F.linear(x, w)
    with turned(CPU, None):
        F.linear(x, w)
    assert not forms
    with turned(CPU, MANY):
        F.linear(x, w)
    assert forms == PRODUCTS[:1]


@pytest.mark.parametrize("method", ["nhgd", "aid-identity"])
def test_a_run_takes_its_outer_passes_so(method, forms, monkeypatch):
    def run():
        torch.manual_seed(0)
        x, y = torch.randn(MANY + 40, 4).double(), torch.randint(3, (MANY + 40,))
        problem = nhgd.Bilevel(
            lambda model, v, batch: nhgd.Losses(
                F.cross_entropy(z := model(batch[0]), batch[1], reduction="none"), weights=v[batch[2]], outputs=z
            ),
            lambda model, v, batch: F.cross_entropy(model(batch[0]), batch[1]),
            nn.Linear(4, 3).double(),
            torch.full((40,), 0.5).double(),
            l2=1e-2,
            likelihood="categorical",
        )
        data = nhgd.Data(x[:40], y[:40], batch=20), nhgd.Data(x[40:], y[40:])
        settings = {"inner_steps": 3, "inner_lr": 0.2, "outer_lr": 0.5, "project_v": (0, 1), "compile": False}
        return nhgd.Solver(problem, *data, method=method, **settings).run(steps=4, progress=False)

    found = run()
    ahead = 2 if method == "nhgd" else 1
    assert forms.count("_log_softmax") == 4 * ahead
    assert forms.count("_log_softmax_backward_data") == 4
    monkeypatch.setattr(_turned, "MANY", 10**9)
    del forms[:]
    plain = run()
    assert not forms
    torch.testing.assert_close(found.v, plain.v, rtol=1e-10, atol=1e-12)
    for row, other in zip(found.history, plain.history, strict=True):
        assert row["outer_loss"] == pytest.approx(other["outer_loss"], rel=1e-12)
