"""One walk over trees of every kind."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, namedtuple
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from nhgd import _tree
from nhgd._tree import flatten, kind_of, leaves, map_leaves, map_tensors, named_tensors, tensors, unflatten
from nhgd.record import LayerRecord, LayerStatistics, PerSampleGradients

Pair = namedtuple("Pair", "x y")


@dataclass
class Branch:
    x: Tensor
    note: str = "kept"
    later: Tensor = field(init=False, repr=False)

    @cached_property
    def doubled(self) -> Tensor:
        return 2 * self.x


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


def ones() -> Tensor:
    return torch.ones(2)


TREES: dict[str, tuple[Any, list[str]]] = {
    "tensor": (ones(), [""]),
    "tuple": ((ones(), 1, ones()), ["[0]", "[2]"]),
    "lists": ([[ones()], UserList([ones()])], ["[0][0]", "[1][0]"]),
    "dict": ({"b": ones(), "a": (ones(),), 3: ones()}, ["['b']", "['a'][0]", "[3]"]),
    "mappings": ([OrderedDict(x=ones()), UserDict(x=ones()), MappingProxyType({"x": ones()})], ["[0]['x']", "[1]['x']", "[2]['x']"]),
    "named tuple": (Pair(ones(), {"z": ones()}), ["[0]", "[1]['z']"]),
    "dataclass": (Branch(ones()), [".x"]),
    "slots": (Slotted(ones()), [".x"]),
    "parameter": ({"p": nn.Parameter(ones())}, ["['p']"]),
    "nothing": ((None, "text", torch.Size([2]), {}), []),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_every_walk_meets_the_same_tensors_in_the_same_order(name: str) -> None:
    tree, paths = TREES[name]
    assert [path for path, _ in named_tensors(tree)] == paths
    seen: list[Tensor] = []
    map_tensors(seen.append, tree)
    for walked in ([t for _, t in named_tensors(tree)], seen, flatten(tree)[1]):
        assert [id(t) for t in walked] == [id(t) for t in tensors(tree)]


@pytest.mark.parametrize("name", TREES)
def test_a_mapped_tree_is_of_the_same_kind_and_the_given_one_stays(name: str) -> None:
    tree, paths = TREES[name]
    before = [t.clone() for t in tensors(tree)]
    tripled = map_tensors(lambda t: 3 * t, tree)
    assert type(tripled) is type(tree) or isinstance(tree, nn.Parameter)
    assert [path for path, _ in named_tensors(tripled)] == paths
    assert all(torch.equal(t, 3 * b) for t, b in zip(tensors(tripled), before, strict=True))
    assert all(torch.equal(t, b) for t, b in zip(tensors(tree), before, strict=True))


@pytest.mark.parametrize("name", TREES)
def test_a_flat_tree_is_put_together_again(name: str) -> None:
    tree, _ = TREES[name]
    if name == "dataclass":
        tree.later = ones()  # all fields must be set
    structure, found = flatten(tree)
    again = unflatten(structure, [t + 1 for t in found])
    assert [path for path, _ in leaves(again)] == [path for path, _ in leaves(tree)]
    assert all(torch.equal(a, t + 1) for a, t in zip(tensors(again), found, strict=True))
    with pytest.raises(ValueError, match="more tensors than slots"):
        unflatten(structure, [*found, ones()])


def test_what_a_dataclass_has_computed_of_its_tensors_is_computed_again() -> None:
    tree = Branch(ones())
    tree.extra = "also kept"  # type: ignore[attr-defined]
    assert tree.doubled.tolist() == [2.0, 2.0]
    mapped = map_tensors(lambda t: 3 * t, tree)
    assert mapped.doubled.tolist() == [6.0, 6.0]
    assert (mapped.note, mapped.extra) == ("kept", "also kept")  # type: ignore[attr-defined]


def test_objects_of_other_kinds_are_leaves() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    assert kind_of(PackedSequence) is kind_of(nn.Linear) is kind_of(torch.Size) is None
    assert [leaf for _, leaf in leaves({"a": packed, "b": [None]})] == [packed, None]
    assert tensors({"a": packed}) == []
    assert map_leaves(type, (1, [packed])) == (int, [PackedSequence])


def test_fields_of_records_that_hold_no_tensor_are_not_walked() -> None:
    layer = LayerRecord("w", None, None, (ones(),), ((ones(), ones()),), ones())
    record = LayerStatistics((layer,), ("b",), ones(), None, 2, (1, 1))
    kind = kind_of(LayerStatistics)
    assert kind is not None
    assert [id(part) for part in kind.holders(record)] == [id(record.layers), id(record.other_rows), id(None), id(())]
    assert len(tensors(record)) == 5
    assert len(tensors(PerSampleGradients(ones(), 2))) == 1


def test_classes_made_for_each_batch_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tree.walk, "_CLASSES", 4)
    monkeypatch.setattr(_tree.walk, "_kinds", {})
    for _ in range(20):
        made = namedtuple("Made", "x")(ones())
        assert len(tensors(made)) == 1
        assert len(_tree.walk._kinds) <= 4
