"""States that can be moved, saved and compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from nhgd.inverse._learned.state import State
from tests.storage import stored


@dataclass
class Full(State):
    """Everything a state may hold."""

    matrix: Tensor
    count: int = 0
    share: float = 0.0
    flag: bool = False
    nothing: Tensor | None = None
    empty: dict[str, Tensor] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)


def example() -> Full:
    return Full(
        matrix=torch.randn(3, 3, dtype=torch.float64),
        count=2**60 + 1,
        share=0.1,
        flag=True,
        layers={
            "0.weight": {"a": torch.randn(2), "b": torch.arange(3), "t": 4},
            "with/slash#int": torch.ones(1),
            "with space": {"deep/er": {"x": torch.zeros(()), "y#float": -0.5}},
        },
    )


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    return bool(a == b)


def test_a_state_comes_back_from_disk() -> None:
    state = example()
    back = stored(state)
    assert same(vars(back), vars(state))
    assert [type(value) for value in (back.count, back.share, back.flag)] == [int, float, bool]


def test_a_moved_state_is_the_same() -> None:
    state = example()
    assert same(vars(state.to("cpu")), vars(state))
    assert state.to("meta").matrix.device.type == "meta"
    assert state.to("meta").share == state.share


def test_a_clone_has_memory_of_its_own() -> None:
    state = example()
    clone = state.clone()
    expected = {k: t.clone() for k, t in state.tensors().items()}
    state.matrix.zero_()
    state.layers["0.weight"]["a"].zero_()
    assert same(clone.tensors(), expected)


def test_a_state_names_its_tensors_as_python_does() -> None:
    assert list(example().tensors()) == [
        ".matrix",
        ".layers['0.weight']['a']",
        ".layers['0.weight']['b']",
        ".layers['with/slash#int']",
        ".layers['with space']['deep/er']['x']",
    ]


def test_a_state_says_what_a_copy_would_share() -> None:
    state = Full(torch.zeros(1), layers={"a": "text"})
    for copied in (state.clone, lambda: state.to("cpu")):
        with pytest.raises(TypeError, match=r"A state cannot hold a str \(\.layers\['a'\]\)"):
            copied()
