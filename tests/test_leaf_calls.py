"""Parameters outside of Linear and Conv2d whose rows come from the pass of the inner step itself, against a loop over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._recording.weighing import Weighing
from nhgd.inverse import EKFAC, KFAC, FisherDiagonal
from nhgd.inverse._learned.learning import learn
from nhgd.objective import Objective, OracleCalls
from tests import oracles
from tests.catalogue import cross_entropy, normal
from tests.test_record import assembled, close


class Sequential(nn.Module):
    """Layers on sequences, with the mean over places as the output."""

    def __init__(self, *layers: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*layers), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).mean(1))


class Tokens(nn.Module):
    """A table of tokens, another of places, and an output layer that may share the first."""

    def __init__(self, tied: str = "", places: str = "arange", norm: bool = True) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(3, 4, padding_idx=2), nn.Embedding(3, 4)
        self.norm = nn.LayerNorm(4) if norm else nn.Identity()
        self.head = nn.Linear(4, 3, bias=tied != "function")
        self.tied, self.kind = tied, places
        if tied == "module":
            self.head.weight = self.table.weight
        elif tied == "function":
            del self.head

    def forward(self, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        places = {
            "arange": lambda: self.places(at),
            "one row": lambda: self.places(at[None]),
            "unsqueezed": lambda: self.places(at)[None],
            "expanded": lambda: self.places(at.expand_as(ids)),
            "twice as large": lambda: 2 * self.places(at),
        }[self.kind]()
        x = self.norm(self.table(ids) + places)
        if self.tied == "function":
            return F.linear(torch.tanh(x), self.table.weight).mean(1)
        return self.head(torch.tanh(x)).mean(1)


class HandWritten(nn.Module):
    """RMSNorm as it is often written."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LoRA(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, layers: bool) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.layers = layers
        if layers:
            self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        else:
            self.a, self.b = nn.Parameter(torch.rand(2, 4)), nn.Parameter(torch.rand(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.layers:
            return self.base(x) + 2 * self.up(self.down(x))
        return self.base(x) + 2 * (x @ self.a.T) @ self.b.T


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.norm(x)) ** 3)).mean(1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False)).mean(1)


def image(layer: nn.Module, outputs: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(outputs, 3))


IDS = torch.tensor([[0, 1, 1], [1, 0, 2], [2, 2, 0], [0, 0, 0], [1, 2, 1]])
ROW = (5, 3, 4)
NETS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "LayerNorm": (lambda: Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), ROW),
    "LayerNorm of two dimensions": (lambda: Sequential(nn.LayerNorm((3, 4))), ROW),
    "LayerNorm without bias": (lambda: Sequential(nn.LayerNorm(4, bias=False)), ROW),
    "RMSNorm": (lambda: Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), ROW),
    "RMSNorm of a large eps": (lambda: Sequential(nn.RMSNorm(4, eps=0.5)), ROW),
    "GroupNorm": (lambda: image(nn.GroupNorm(2, 4), 16), (5, 4, 2, 2)),
    "GroupNorm on rows": (lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 3)), (5, 4)),
    "a norm that is called twice": (Twice, ROW),
    "BatchNorm in evaluation mode": (lambda: image(nn.BatchNorm2d(1), 9).eval(), (5, 1, 3, 3)),
    "Embedding": (Tokens, IDS),
    "places in a row": (lambda: Tokens(places="one row"), IDS),
    "places, unsqueezed": (lambda: Tokens(places="unsqueezed"), IDS),
    "places of every sample": (lambda: Tokens(places="expanded"), IDS),
    "tied": (lambda: Tokens(tied="module"), IDS),
    "tied by a function": (lambda: Tokens(tied="function"), IDS),
    "Conv1d": (lambda: image(nn.Conv1d(2, 2, 2, stride=2, groups=2), 4), (5, 2, 4)),
    "Conv3d": (lambda: image(nn.Conv3d(1, 2, 2), 2), (5, 1, 2, 2, 2)),
    "ConvTranspose1d": (lambda: image(nn.ConvTranspose1d(1, 2, 2, stride=2), 12), (5, 1, 3)),
    "ConvTranspose2d": (lambda: image(nn.ConvTranspose2d(2, 2, 2, groups=2, padding=1), 2), (5, 2, 2, 2)),
    "ConvTranspose3d": (lambda: image(nn.ConvTranspose3d(1, 1, 2), 8), (5, 1, 1, 1, 1)),
    "PReLU": (lambda: image(nn.PReLU(2), 4), (5, 2, 2)),
    "RMSNorm by hand": (lambda: Sequential(nn.Linear(4, 4), HandWritten()), ROW),
    "LoRA of parameters": (lambda: Sequential(LoRA(layers=False)), ROW),
    "LoRA of layers": (lambda: Sequential(LoRA(layers=True)), ROW),
    "checkpointed": (Checkpointed, ROW),
    "TransformerEncoderLayer": (
        lambda: Sequential(nn.TransformerEncoderLayer(4, 2, 5, 0.0, batch_first=True, norm_first=True)),
        ROW,
    ),
    "attention with keys of another width": (
        lambda: Attending(nn.MultiheadAttention(4, 1, bias=False, batch_first=True, kdim=2, vdim=2)),
        ROW,
    ),
}


class Attending(nn.Module):
    """Attention to something else than the queries."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention, self.head = attention, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        other = x[:, :2, :2].cos()
        return self.head(self.attention(x, other, other, need_weights=False)[0]).mean(1)


def made(name: str, likelihood: str | None = None, nets: dict[str, Any] = NETS) -> tuple[nhgd.Bilevel, Any]:
    """Sample weights for a classifier with three classes; the first weight is next to nothing."""
    torch.manual_seed(0)
    make, shape = nets[name]
    net = make().double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    v = normal(5)
    v[0] = -60.0
    x = shape if isinstance(shape, Tensor) else normal(*shape)
    problem = nhgd.Bilevel(cross_entropy, lambda net, v, batch: v.sum(), net, v, 0.02, likelihood)
    return problem, (x, torch.arange(5) % 3, torch.arange(5))


@pytest.mark.parametrize("name", NETS)
def test_rows_of_the_pass_equal_the_loop(name: str) -> None:
    problem, batch = made(name)
    expected = oracles.rows(problem, batch)
    calls = OracleCalls()
    record = Recorder(problem, "layer", calls=calls).step(batch).record
    close(assembled(record, problem), expected)
    assert calls.inner_gradients == 1  # no second pass over the model
    calls = OracleCalls()
    close(Recorder(problem, "sample", calls=calls).step(batch).record.rows, expected)
    assert calls.inner_gradients == 1


@pytest.mark.parametrize("name", NETS)
def test_roots_take_a_pass_each_and_no_other(name: str) -> None:
    problem, batch = made(name, "categorical")
    calls = OracleCalls()
    rows = assembled(Recorder(problem, "layer", "exact", calls).step(batch).record, problem)
    with sdpa_kernel(SDPBackend.MATH):
        close(rows.T @ rows / 5, oracles.ggn(problem, batch))
    assert calls.inner_gradients == 1 + 3


@pytest.mark.parametrize("name", NETS)
def test_the_cross_derivative_comes_from_the_same_scores(name: str) -> None:
    problem, batch = made(name)
    x = torch.randn(problem.theta.numel, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    weighing = Weighing(problem)
    found, source = weighing.cross(Objective(problem, batch, 0))(x)
    assert source == "scores"
    with sdpa_kernel(SDPBackend.MATH):
        expected = oracles.cross(problem, batch).T @ x
    torch.testing.assert_close(oracles.join(found), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inverse", [KFAC(dense_limit=4), EKFAC(), FisherDiagonal()], ids=lambda i: i.name)
def test_blocks_of_these_parameters_are_those_of_the_rows(inverse: Any) -> None:
    problem, batch = made("Embedding")
    rows = oracles.rows(problem, batch)
    state = learn(inverse, problem, [batch])
    places = problem.theta.slices()
    for name in ("table.weight", "places.weight", "norm.weight", "norm.bias"):
        own = rows[:, places[name]]
        if inverse.name == "fisher_diagonal":
            close(state.diagonal[places[name]], own.square().mean(0))
        elif state.blocks[name].ndim == 1:
            close(state.blocks[name], own.square().mean(0))
        else:
            close(state.blocks[name], own.T @ own / 5)


class Inconstant(nn.Module):
    """A scale that depends on the other samples, of a module whose code is unknown."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * (1 + 0 * x[:1]) + (self.scale * (2.0 if len(x) > 1 else 0.0))


@pytest.mark.parametrize("kind", ["places", "attention"])
def test_what_no_call_accounts_for_takes_the_general_way(kind: str) -> None:
    """The sum in which these places meet the samples is not of what the table gave; a third of a bias is no parameter."""
    attention = nn.MultiheadAttention(4, 1, batch_first=True, kdim=2, vdim=2)
    NETS["general"] = (
        (lambda: Tokens(places="twice as large"), IDS) if kind == "places" else (lambda: Attending(attention), ROW)
    )
    try:
        problem, batch = made("general")
    finally:
        del NETS["general"]
    calls = OracleCalls()
    record = Recorder(problem, "layer", calls=calls).step(batch).record
    close(assembled(record, problem), oracles.rows(problem, batch))
    assert calls.inner_gradients == 2
    _, source = Weighing(problem).cross(Objective(problem, batch, 0))(torch.ones(problem.theta.numel).double())
    assert source == "forward"


def test_a_module_that_computes_otherwise_on_one_sample_is_found_out() -> None:
    NETS["inconstant"] = (lambda: Sequential(Inconstant()), ROW)
    try:
        problem, batch = made("inconstant")
    finally:
        del NETS["inconstant"]
    recorder = Recorder(problem, "layer", couples=False)
    with pytest.raises(nhgd.InputError, match="samples influence each other"):
        recorder.step(batch)
    assert not recorder.verification.suffices
