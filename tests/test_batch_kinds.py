"""Batches of every kind a loader yields: their samples are counted, shared out and moved alike."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import nhgd
from nhgd._tree import map_tensors, named_tensors
from nhgd.data import BatchStream
from nhgd.data.batch import common_length, fingerprint, first_bad, move
from nhgd.oracle import Oracle
from tests.catalogue import mlp_module, normal

CPU, META = torch.device("cpu"), torch.device("meta")


class Encoding(UserDict):  # type: ignore[type-arg]
    """As tokenisers return: a mapping that is no dict, with attributes of its own."""

    note = "none"

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Record:
    x: Tensor
    y: Tensor
    i: Tensor
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor
    i: Tensor


class Fixed(Mapping[str, Tensor]):
    """A mapping that cannot be changed."""

    def __init__(self, items: dict[str, Tensor]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Tensor:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Graphs:
    """Tensors as attributes, and a way to move them: as libraries for graphs have it."""

    def __init__(self, x: Tensor, y: Tensor, i: Tensor) -> None:
        self.x, self.y, self.i = x, y, i
        self.edges = torch.zeros(2, 7)

    def to(self, device: Any, **options: Any) -> Graphs:
        return Graphs(self.x.to(device), self.y.to(device), self.i.to(device))


Three = namedtuple("Three", "x y i")
KINDS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "dict": lambda x, y, i: {"x": x, "y": y, "i": i},
    "OrderedDict": lambda x, y, i: OrderedDict(x=x, y=y, i=i),
    "defaultdict": lambda x, y, i: defaultdict(list, x=x, y=y, i=i),
    "UserDict": lambda x, y, i: UserDict(x=x, y=y, i=i),
    "encoding": lambda x, y, i: Encoding(x=x, y=y, i=i),
    "mapping proxy": lambda x, y, i: MappingProxyType({"x": x, "y": y, "i": i}),
    "mapping": lambda x, y, i: Fixed({"x": x, "y": y, "i": i}),
    "dataclass": lambda x, y, i: Record(x, y, i, ["a"]),
    "frozen dataclass": Frozen,
    "named tuple": Three,
    "nested": lambda x, y, i: ((x, [UserDict(y=y)]), Frozen(i, i, i)),
    "graphs": Graphs,
}
SEEN = [kind for kind in KINDS if kind != "graphs"]


def taken(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        return batch[0][0], batch[0][1][0]["y"], batch[1].x
    if isinstance(batch, Mapping):
        return batch["x"], batch["y"], batch["i"]
    return batch.x, batch.y, batch.i


def ragged(kind: str) -> list[Any]:
    """Batches of 8, 8 and 4 samples."""
    torch.manual_seed(0)
    x, y = normal(20, 4), normal(20)
    return [KINDS[kind](x[c], y[c], torch.arange(20)[c]) for c in (slice(0, 8), slice(8, 16), slice(16, 20))]


def regression() -> nhgd.Bilevel:
    def inner(theta: Tensor, v: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, i = taken(batch)
        return 0.5 * (x @ theta - y) ** 2, v[i]

    torch.manual_seed(1)
    return nhgd.Bilevel(inner, lambda t, v, b: (t - 1).square().sum(), normal(4), normal(20).sigmoid(), l2=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches_count_by_their_samples(kind: str) -> None:
    """The mean over three batches is that over all their samples, whatever holds them."""
    problem, outer_batch = regression(), torch.zeros(3)
    for inverse in ("exact", "neumann"):
        found = nhgd.hypergradient(problem, None, outer_batch, inverse=inverse, inner_data=ragged(kind))
        known = nhgd.hypergradient(problem, None, outer_batch, inverse=inverse, inner_data=ragged("dict"))
        assert torch.equal(found.grad, known.grad)
    at = Oracle(problem, ragged(kind), outer_batch)
    at.gradient()
    assert (at.calls.samples, at.calls.inner_gradients) == (20, 3)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("kind", ["UserDict", "frozen dataclass", "graphs"])
@pytest.mark.parametrize("method", ["nhgd-window", "aid-cg", "saba", "itd", "soba"])
def test_runs_on_batches_of_every_kind(kind: str, method: str) -> None:
    if kind == "graphs" and method == "nhgd-window":
        pytest.skip("rows of a tensor need samples that can be taken alone; this is refused, see below")
    results = []
    for each in (kind, "dict"):
        problem = regression()
        solver = nhgd.Solver(problem, ragged(each), [torch.zeros(3)], method=method, inner_steps=4, inner_lr=0.01)
        solver.run(steps=3)
        results.append((problem.v.flat(), solver.history[-1]["samples"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_what_cannot_be_taken_apart_is_refused_where_it_must_be() -> None:
    problem = regression()
    with pytest.raises(nhgd.InputError, match="need a batch whose tensors all have the samples as first dimension"):
        nhgd.hypergradient(problem, ragged("graphs")[0], torch.zeros(3), inverse="fisher_window")
    problem.inner = lambda theta, v, batch: (batch.x @ theta - batch.y).square().mean() * v.mean()
    one = nhgd.hypergradient(problem, ragged("graphs")[0], torch.zeros(3))  # nothing is shared out
    assert one.grad.shape == (20,)
    batches = ragged("graphs")
    batches[0] = (batches[0], torch.zeros(2))
    problem.inner = lambda theta, v, batch: theta.square().sum() * v.mean()
    with pytest.raises(nhgd.InputError, match=r"number of samples.*unclear.*Return losses of shape \(B,\)"):
        nhgd.hypergradient(problem, None, torch.zeros(3), inner_data=batches)
    outer = [Graphs(normal(n, 1), normal(n), torch.arange(n)) for n in (3, 2)]
    solver = nhgd.Solver(regression(), ragged("dict"), outer, method="vrbo", inner_steps=2, inner_lr=0.01)
    with pytest.raises(nhgd.InputError, match="number of samples in each batch of outer_data is unclear"):
        solver.run(steps=1)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_kept_moved_and_looked_into(kind: str) -> None:
    batch = ragged(kind)[0]
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert all(t.device == META for t in taken(moved))
    assert all(t.device == CPU for t in taken(batch))
    assert all(a is b for a, b in zip(taken(move(batch, CPU)), taken(batch), strict=True))
    assert first_bad(batch) is None
    before = fingerprint(batch)
    taken(batch)[0][2, 1] = float("nan")
    assert "row 2" in str(first_bad(batch))
    assert fingerprint(batch) != before
    with pytest.raises(nhgd.InputError, match="contains nan or inf"):
        nhgd.Solver(regression(), [batch], [torch.zeros(3)])
    assert taken(BatchStream([batch], "inner_data", META).next())[0].device == META


@pytest.mark.parametrize("kind", SEEN)
def test_samples_are_counted_and_sliced(kind: str) -> None:
    batch = ragged(kind)[0]
    assert common_length(batch) == 8
    part = map_tensors(lambda t: t[2:5], batch)
    assert type(part) is type(batch)
    assert common_length(part) == 3
    assert all(torch.equal(a, b[2:5]) for a, b in zip(taken(part), taken(batch), strict=True))
    assert common_length(batch) == 8


def test_what_a_batch_holds_beside_tensors_is_kept() -> None:
    batch = ragged("dataclass")[0]
    assert map_tensors(lambda t: t + 1, batch).names == ["a"]
    encoding = Encoding(x=torch.zeros(2))
    encoding.note = "mine"
    assert map_tensors(lambda t: t + 1, encoding).note == "mine"
    assert map_tensors(lambda t: t + 1, encoding).x.tolist() == [1.0, 1.0]
    assert encoding.x.tolist() == [0.0, 0.0]
    assert map_tensors(lambda t: t, defaultdict(list, x=torch.zeros(1)))["none"] == []
    assert [path for path, _ in named_tensors((ragged("frozen dataclass")[0], {"z": torch.zeros(1)}))] == [
        "[0].x",
        "[0].y",
        "[0].i",
        "[1]['z']",
    ]


def test_a_packed_sequence_is_moved_by_itself() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    batch = (packed, torch.zeros(2))
    assert common_length(batch) is None  # its rows are not samples
    assert isinstance(map_tensors(lambda t: t[:1], batch)[0], PackedSequence)
    assert first_bad((pack_sequence([torch.tensor([[1.0], [float("inf")]])]), torch.zeros(1))) is not None

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 1)

        def forward(self, x: Any) -> Tensor:
            return self.head(self.cell(x)[1][0])[:, 0]

    sequences = [torch.randn(n, 2).double() for n in (3, 2, 2)]
    batches = [(pack_sequence(sequences), torch.ones(3)), (pack_sequence(sequences[:1]), torch.ones(1))]
    problem = nhgd.Bilevel(
        lambda net, v, b: (net(b[0]) - v * b[1]).square(),
        lambda net, v, b: v.square() + 0 * net(b[0]).sum(),
        Recurrent().double(),
        torch.ones((), dtype=torch.float64),
        l2=0.1,
    )
    at = Oracle(problem, batches)
    parts = [Oracle(problem, [batch]).gradient() for batch in batches]
    torch.testing.assert_close(at.gradient(), 0.75 * parts[0] + 0.25 * parts[1])
    assert at.calls.samples == 4
    with pytest.raises(nhgd.InputError, match="is a UserDict, which yields no batches"):
        nhgd.Solver(problem, UserDict(x=torch.zeros(2)), batches)


BESIDE = {
    "graphs": lambda n: Graphs(normal(3), normal(3), torch.arange(3)),
    "graphs of as many": lambda n: Graphs(normal(n), normal(n), torch.arange(n)),
    "packed": lambda n: pack_sequence([normal(2 + i % 3, 2) for i in range(n)], enforce_sorted=False),
    "numbers": np.arange,
    "other numbers": lambda n: np.zeros(3),
    "strings": lambda n: np.array(["a"] * n),
}


@pytest.mark.parametrize("kind", BESIDE)
@pytest.mark.parametrize("inverse", ["cg", "kfac"])
def test_what_lies_beside_the_tensors_changes_nothing(kind: str, inverse: str) -> None:
    torch.manual_seed(0)
    batch = (normal(16, 4), normal(16), torch.arange(16))
    net = nn.Linear(4, 1).double()
    problem = nhgd.Bilevel(
        lambda m, v, b: (0.5 * (m(b[0])[:, 0] - b[1]) ** 2, v[b[2]]),
        lambda m, v, b: (m(b[0])[:, 0] - 1).square().mean(),
        net,
        normal(16).sigmoid(),
        l2=0.05,
    )
    alone = nhgd.hypergradient(problem, batch, batch, inverse=inverse).grad
    beside = (*batch, BESIDE[kind](16))
    torch.testing.assert_close(nhgd.hypergradient(problem, beside, beside, inverse=inverse).grad, alone)
    with pytest.raises(nhgd.InputError, match=r"different lengths: .*\[4\] has 5 rows"):
        nhgd.hypergradient(problem, (*beside, torch.zeros(5)), batch, inverse=inverse)


def test_numpy_arrays_do_not_hide_how_many_samples_there_are() -> None:
    assert common_length((torch.zeros(3, 2), np.array(["a", "b"]))) == 3
    assert common_length((torch.zeros(3, 2), Graphs(torch.zeros(3), torch.zeros(3), torch.zeros(3)))) is None


@pytest.mark.parametrize("method", ["nhgd", "aid-cg", "itd"])
def test_a_batch_without_samples_is_refused(method: str) -> None:
    problem, (x, y, i), outer = mlp_module()
    empty = (x[:0], y[:0], i[:0])
    with pytest.raises(nhgd.InputError, match=r"the batch has no samples\. Leave empty batches out"):
        nhgd.hypergradient(problem, empty, outer, inverse="cg")
    solver = nhgd.Solver(problem, [(x, y, i), empty], [outer], method=method, inner_steps=3)
    with pytest.raises(nhgd.InputError, match="the batch has no samples"):
        solver.step()
