"""Batches and where they come from."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import nhgd
from nhgd._memory import PeakMemory
from nhgd._tree import map_tensors, named_tensors, tensors
from nhgd.data import BatchStream, Data, reiterable
from nhgd.data.batch import common_length, first_bad, lengths, move

CPU = torch.device("cpu")


@given(samples=st.integers(1, 40), batch=st.integers(1, 50), shuffle=st.sampled_from([True, False, "blocks"]))
@settings(max_examples=60, deadline=None)
def test_a_pass_yields_every_sample_once_with_its_index(samples: int, batch: int, shuffle: Any) -> None:
    x, y = torch.arange(samples) * 10, torch.arange(samples).float()
    data = Data(x, y, batch=batch, shuffle=shuffle)
    for _ in range(2):
        batches = list(data)
        assert len(batches) == len(data) == -(-samples // batch)
        assert all(len(b[0]) == min(batch, samples) for b in batches[:-1])
        index = torch.cat([i for _, _, i in batches])
        assert torch.equal(index.sort().values, torch.arange(samples))
        assert torch.equal(torch.cat([a for a, _, _ in batches]), x[index])
        assert torch.equal(torch.cat([b for _, b, _ in batches]), y[index])
        if not shuffle:
            assert torch.equal(index, torch.arange(samples))


def test_a_new_order_at_every_pass_from_the_global_generator() -> None:
    data = Data(torch.arange(50), batch=10)

    def order() -> Tensor:
        return torch.cat([i for _, i in data])

    torch.manual_seed(3)
    first, second = order(), order()
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    assert torch.equal(order(), first)


def test_blocks_are_neighbours_in_the_memory_of_the_tensors() -> None:
    x = torch.arange(23) * 10
    data = Data(x, batch=5, shuffle="blocks")
    torch.manual_seed(0)
    starts = []
    for _ in range(4):
        around = 0
        for a, index in data:
            assert torch.equal(index, (index[0] + torch.arange(len(a))) % 23)
            shares = a.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert shares == (int(index[-1]) >= int(index[0]))
            around += not shares
            starts.append(int(index[0]))
        assert around <= 1
    assert len(set(starts)) > 10
    torch.manual_seed(0)
    assert [int(index[0]) for _ in range(4) for _, index in data] == starts
    torch.manual_seed(0)
    walks = [iter(data), iter(data)]
    wanted = [index for _, index in walks[0]]
    torch.manual_seed(0)
    assert all(torch.equal(torch.from_numpy(walks[1].next_index()), index) for index in wanted)


def test_batches_are_contiguous() -> None:
    for x, _ in Data(torch.randn(20, 3), batch=8):
        assert x.is_contiguous()


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(20, 3, dtype=torch.float64),
        torch.randn(3, 20).T,
        torch.randn(1, 4).expand(20, 4),
        torch.randn(20, 2, 3, 3).to(memory_format=torch.channels_last),
    ],
    ids=["contiguous", "transposed", "expanded", "channels last"],
)
def test_batches_are_slices_of_the_permuted_tensors_bit_for_bit_and_stride_for_stride(x: Tensor) -> None:
    torch.manual_seed(5)
    order = torch.randperm(20)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    batches = list(Data(x, batch=8))
    assert torch.equal(torch.get_rng_state(), after)
    assert [len(i) for _, i in batches] == [8, 8, 4]
    for found, wanted, index, slice_of_order in zip(
        [b[0] for b in batches], x[order].split(8), [b[1] for b in batches], order.split(8), strict=True
    ):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()  # in another order in memory sums may come out differently
        assert torch.equal(index, slice_of_order)


def test_no_shuffled_copy_of_the_data_is_held() -> None:
    x = torch.randn(4000, 50)
    stream = BatchStream(Data(x, batch=100), "inner_data", CPU)
    with PeakMemory() as peak:
        stream.peek()
        for _ in range(100):  # two passes and a half
            stream.next()
    # Two orders and two batches, of the pass that ends and of the one that begins.
    assert peak.bytes < 0.25 * x.nbytes


def test_a_full_batch_is_not_copied() -> None:
    x = torch.randn(5, 2)
    (found, index), *rest = list(Data(x))
    assert not rest
    assert found.data_ptr() == x.data_ptr()
    assert torch.equal(index, torch.arange(5))


def test_take_gives_the_samples_asked_for() -> None:
    x = torch.randn(9, 2)
    data = Data(x, torch.arange(9), batch=4)
    a, b, i = data.take(torch.tensor([7, 0, 7]))
    assert torch.equal(a, x[[7, 0, 7]])
    assert b.tolist() == i.tolist() == [7, 0, 7]


def test_numpy_arrays_are_taken() -> None:
    x = np.arange(6.0).reshape(3, 2)
    fixed = x.copy()
    fixed.flags.writeable = False
    for array in (x, fixed, x[::-1][::-1], x[::-1]):
        (found, _) = next(iter(Data(array)))
        assert found.dtype == torch.float64
        assert np.array_equal(found.numpy(), array)


@pytest.mark.parametrize(
    ("arrays", "options", "sentence"),
    [
        ((), {}, "Data needs at least one tensor"),
        ((torch.zeros(3), torch.zeros(4)), {}, "different length: 3, 4"),
        ((torch.tensor(1.0),), {}, "one of them is a scalar"),
        ((torch.zeros(0, 3),), {}, "length 0"),
        ((torch.zeros(3),), {"batch": 0}, "batch must be a whole number of at least 1, got 0"),
        ((torch.zeros(3),), {"batch": 1.5}, "batch must be a whole number"),
        ((torch.tensor([[0.0, 1], [2, float("nan")]]),), {}, r"Data: tensor \[0\], row 1 contains nan or inf"),
        ((torch.zeros(2), torch.tensor([0.0, float("inf")])), {}, r"tensor \[1\], row 1"),
    ],
)
def test_refusals_of_data(arrays: Any, options: Any, sentence: str) -> None:
    with pytest.raises(nhgd.InputError, match=sentence):
        Data(*arrays, **options)


# Streams.


def test_a_stream_walks_pass_after_pass() -> None:
    stream = BatchStream([(torch.tensor([1]),), (torch.tensor([2]),)], "inner_data", CPU)
    assert [int(stream.next()[0]) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert stream.passes == 3


@given(samples=st.integers(1, 12), batch=st.integers(1, 12), wanted=st.integers(1, 30))
@settings(max_examples=30, deadline=None)
def test_a_stream_repeats_no_sample_within_a_pass(samples: int, batch: int, wanted: int) -> None:
    stream = BatchStream(Data(torch.arange(samples), batch=batch), "inner_data", CPU)
    length = -(-samples // batch)
    found = [stream.next()[1] for _ in range(wanted)]
    for start in range(0, wanted, length):
        seen = torch.cat(found[start : start + length])
        assert len(seen.unique()) == len(seen)
    assert stream.passes == -(-wanted // length)


def test_a_loader_is_taken() -> None:
    loader = DataLoader(TensorDataset(torch.arange(6), torch.arange(6) * 2), batch_size=4)
    stream = BatchStream(loader, "inner_data", CPU)
    x, y = stream.next()
    assert torch.equal(y, 2 * x)
    assert [len(stream.next()[0]) for _ in range(3)] == [2, 4, 2]


@pytest.mark.parametrize("source", [[], (), DataLoader(TensorDataset(torch.zeros(0, 2)))])
def test_an_empty_source_says_so(source: Any) -> None:
    stream = BatchStream(source, "outer_data", CPU)
    with pytest.raises(nhgd.InputError, match=r"outer_data yields no batch. Provide at least one"):
        stream.next()


def generator() -> Iterator[Tensor]:
    yield torch.zeros(2)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (generator(), "one-shot iterator"),
        (iter([torch.zeros(2)]), "one-shot iterator"),
        (zip([1], [2], strict=True), "one-shot iterator"),
        (torch.zeros(3, 2), "a single tensor"),
        ((torch.zeros(3), torch.zeros(3)), "a tuple of tensors, which looks like one batch"),
        ({"x": torch.zeros(3)}, "a dict, which yields no batches"),
        ("data.csv", "a str, which yields no batches"),
        (TensorDataset(torch.zeros(3)), "TensorDataset, which yields no batches"),
        (None, "a NoneType, which yields no batches"),
    ],
)
def test_what_is_not_a_source_of_batches(source: Any, sentence: str) -> None:
    with pytest.raises(nhgd.InputError, match=rf"inner_data is .*{sentence}.*Pass inner_data=nhgd.Data\(x, y"):
        reiterable(source, "inner_data")


# The structure of a batch.

Pair = namedtuple("Pair", ["x", "y"])
NESTED = {"pair": Pair(torch.zeros(2), [torch.ones(2, 3), "text"]), "n": 5, "scalar": torch.tensor(1.0)}


def test_a_batch_may_be_nested() -> None:
    assert [path for path, _ in named_tensors(NESTED)] == ["['pair'][0]", "['pair'][1][0]", "['scalar']"]
    doubled = map_tensors(lambda t: 2 * t, NESTED)
    assert isinstance(doubled["pair"], Pair)
    assert torch.equal(doubled["pair"].y[0], torch.full((2, 3), 2.0))
    assert doubled["pair"].y[1] == "text"
    assert doubled["n"] == 5
    assert lengths(NESTED) == {"['pair'][0]": 2, "['pair'][1][0]": 2}
    assert common_length(NESTED) == 2
    assert common_length((torch.zeros(2), torch.zeros(3))) is None
    assert common_length(None) is None


def test_moving_to_where_it_is_copies_nothing() -> None:
    moved = move(NESTED, CPU)
    assert all(a is b for a, b in zip(tensors(moved), tensors(NESTED), strict=True))


def test_the_first_bad_number_is_found() -> None:
    assert first_bad(NESTED) is None
    assert first_bad((torch.arange(3), torch.zeros(0, 2))) is None
    bad = torch.zeros(3, 2, 2)
    bad[1, 0, 1] = float("nan")
    assert first_bad({"x": [bad]}) == "tensor ['x'][0], row 1"
    assert first_bad(bad) == "tensor x, row 1"
    assert first_bad(torch.tensor(float("inf"))) == "tensor x"


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda", "Data: PyTorch cannot use a CUDA device here. Use device='cpu'."),
        (torch.device("cuda", 3), "Data: PyTorch cannot use a CUDA device here. Use device='cpu'."),
        ("cudo", "There is no device for Data called 'cudo'. Did you mean 'cuda'?"),
        ("meta", "Data: the meta device holds no numbers."),
    ],
    ids=str,
)
def test_a_device_that_is_not_there_is_named_with_a_sentence(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(nhgd.InputError, match=re.escape(message)):
        Data(torch.zeros(3), device=device)


def test_a_gpu_that_is_not_there_is_named_by_its_number(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(nhgd.InputError, match="there is no cuda:3: this machine has 1 CUDA device"):
        Data(torch.zeros(3), device="cuda:3")


def test_a_device_that_is_there_is_taken():
    assert Data(torch.zeros(3), device="cpu").tensors[0].device.type == "cpu"
