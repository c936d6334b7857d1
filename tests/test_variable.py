"""theta and v as one vector, and the way back to what the user gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import nhgd
from nhgd.variable import Variable
from tests import oracles
from tests.catalogue import PROBLEMS, Make, normal


def kinds() -> list[Any]:
    return [normal(2, 3), {"a": normal(2), "b": normal()}, nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()]


@pytest.mark.parametrize("kind", range(3))
def test_assign_writes_into_the_users_own_tensors(kind: int) -> None:
    given = kinds()[kind]
    variable = Variable(given, "theta")
    assert torch.equal(variable.flat(), oracles.flat(given))
    memory = [t.data_ptr() for t in oracles.named(given).values()]
    value = normal(variable.numel)
    variable.assign(value)
    assert torch.equal(oracles.flat(given), value)
    assert [t.data_ptr() for t in oracles.named(given).values()] == memory


@pytest.mark.parametrize("kind", range(3))
def test_flatten_undoes_unflatten(kind: int) -> None:
    variable = Variable(kinds()[kind], "theta")
    vector = normal(variable.numel)
    parts = variable.unflatten(vector)
    assert [p.shape for p in parts] == [leaf.shape for leaf in variable.leaves]
    assert torch.equal(variable.flatten(parts), vector)
    for name, place in variable.slices().items():
        assert torch.equal(vector[place], parts[variable.names.index(name)].reshape(-1))
    like = variable.like(parts)
    assert torch.equal(oracles.join([like] if isinstance(like, Tensor) else list(like.values())), vector)


@given(st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=1, max_size=5))
@settings(max_examples=50, deadline=None)
def test_any_shapes_survive_the_way_there_and_back(shapes: list[list[int]]) -> None:
    assume(not all(0 in shape for shape in shapes))
    variable = Variable({str(i): torch.zeros(shape, dtype=torch.float64) for i, shape in enumerate(shapes)}, "theta")
    vector = torch.arange(variable.numel, dtype=torch.float64)
    variable.assign(vector)
    assert torch.equal(variable.flat(), vector)
    assert variable.numel == sum(variable.sizes)


def test_a_missing_part_counts_as_zeros() -> None:
    variable = Variable({"a": normal(2), "b": normal(2)}, "theta")
    assert torch.equal(variable.flatten([None, torch.ones(2)]), torch.tensor([0.0, 0, 1, 1], dtype=torch.float64))


def test_a_plain_tensor_is_trained_where_it_is() -> None:
    tensor = torch.zeros(3)
    variable = Variable(tensor, "theta")
    variable.assign(torch.ones(3))
    assert torch.equal(tensor, torch.ones(3))
    assert not tensor.requires_grad


def test_what_does_not_require_a_gradient_is_frozen() -> None:
    fixed, trained = torch.ones(2), torch.zeros(2, requires_grad=True)
    variable = Variable({"fixed": fixed, "trained": trained}, "theta")
    assert variable.names == ("trained",)
    with variable.view([torch.full((2,), 5.0)]) as seen:
        assert seen["fixed"] is fixed
        assert torch.equal(seen["trained"], torch.full((2,), 5.0))
    index = Variable({"index": torch.arange(2), "w": torch.zeros(2)}, "theta")
    assert index.names == ("w",)


def test_mixed_precision_promotes() -> None:
    variable = Variable({"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}, "theta")
    assert variable.dtype == variable.flat().dtype == torch.float64
    assert [p.dtype for p in variable.unflatten(variable.flat())] == [torch.float32, torch.float64]


class Encoder(nn.Module):
    """A module used through its attributes, with a weight under two names and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.again = nn.Linear(2, 2)
        self.again.weight = self.encoder.weight
        self.lstm = nn.LSTM(2, 1, batch_first=True)


def test_a_view_reaches_attributes_tied_names_and_recurrent_layers() -> None:
    net = Encoder().double()
    variable = Variable(net, "theta")
    x = normal(3, 4, 2)
    other = Encoder().double()
    oracles.assign(other, normal(variable.numel))
    originals = [dict(m._parameters) for m in net.modules()]
    before = net.lstm(x)[0]
    with variable.view(list(Variable(other, "theta").leaves)) as seen:
        assert seen is net
        assert torch.equal(net.encoder(x), other.encoder(x))
        assert torch.equal(net.again(x), other.again(x))
        assert torch.equal(net.lstm(x)[0], other.lstm(x)[0])
    assert all(m._parameters[k] is p for m, held in zip(net.modules(), originals, strict=True) for k, p in held.items())
    assert net.lstm._flat_weights[0] is net.lstm.weight_ih_l0  # the other one would keep a graph alive
    assert torch.equal(net.lstm(x)[0], before)


def test_a_view_is_undone_after_an_exception() -> None:
    net = nn.Linear(2, 2)
    variable = Variable(net, "theta")
    with pytest.raises(KeyError), variable.view([torch.zeros(2, 2), torch.zeros(2)]):
        raise KeyError
    assert net.weight is variable.leaves[0]
    assert isinstance(net.weight, nn.Parameter)


def test_buffers_and_flags_are_kept() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())
    net[1].eval()
    variable = Variable(net, "theta")
    held, before = list(net.buffers()), [b.clone() for b in net.buffers()]
    with variable.undisturbed():
        net(torch.randn(5, 2))
        net.train()
        assert net[0].num_batches_tracked == 1
    assert all(a is b for a, b in zip(net.buffers(), held, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(net.buffers(), before, strict=True))
    assert [m.training for m in net.modules()] == [True, True, False]


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_the_order_is_the_users(make: Make) -> None:
    problem, _, _ = make()
    assert torch.equal(problem.theta.flat(), oracles.theta_of(problem))
    assert torch.equal(problem.v.flat(), oracles.v_of(problem))


SHARED = torch.zeros(2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3.0, "must be a Tensor, a dict of Tensors or an nn.Module, but it is a float"),
        ({}, "nothing to train: it is empty"),
        (nn.ReLU(), "nothing to train"),
        (nn.Linear(2, 2).requires_grad_(False), "every parameter is frozen"),
        ({"a": {"b": torch.zeros(2)}}, r"theta\['a'\] is a dict, not a Tensor. Nested dicts are not supported"),
        ({"a": 1.0}, r"theta\['a'\] is a float, not a Tensor"),
        (torch.arange(3), "theta has dtype torch.int64; only floating-point"),
        (torch.zeros(2, requires_grad=True) * 2, r"result of a computation.*Pass theta.detach\(\)"),
        ({"w": torch.zeros(2, requires_grad=True) * 2}, r"Pass theta\['w'\].detach\(\)"),
        (torch.tensor([1.0, float("nan")]), "theta contains nan or inf before the first step"),
        ({"w": torch.tensor([float("inf")])}, r"theta\['w'\] contains nan or inf"),
        ({"a": SHARED, "b": SHARED}, r"theta\['a'\] and theta\['b'\] are the same tensor"),
        (
            {"a": SHARED, "b": SHARED[1:]},
            r"theta\['a'\] and theta\['b'\] share memory.*Pass theta\['a'\]\.clone\(\) and",
        ),
        (torch.zeros(1).expand(3), r"theta has entries that share memory.*Pass theta\.clone\(\)"),
        ({"a": torch.zeros(3).as_strided((2, 2), (1, 1))}, r"theta\['a'\] has entries that share memory"),
        (torch.zeros(2, 0), "theta has nothing to train: it is empty"),
    ],
)
def test_refusals(given: Any, sentence: str) -> None:
    with pytest.raises(nhgd.InputError, match=sentence):
        Variable(given, "theta")


def test_entries_of_one_memory_that_do_not_overlap_are_taken() -> None:
    """Such as the weights of a recurrent layer that cuDNN has put together, or a layout with channels last."""
    memory = torch.arange(12.0)
    parts = {
        "a": memory[:4],
        "b": memory[4:].view(2, 4).T,
        "c": torch.zeros(2, 3, 2, 2).to(memory_format=torch.channels_last),
    }
    found = Variable(parts, "theta")
    assert found.sizes == (4, 8, 24)
    assert Variable({"a": memory[::2], "b": memory[1::2]}, "theta").numel == 12
