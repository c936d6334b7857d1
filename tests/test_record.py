"""Records of inner steps against a loop over samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._tree import map_tensors, tensors
from nhgd.inverse import FisherDense, FisherWindow, capabilities
from nhgd.likelihood import AbstractLikelihood
from nhgd.objective import Objective, OracleCalls
from nhgd.oracle import Oracle
from nhgd.record import BatchGradient, LayerStatistics, PerSampleGradients
from tests import oracles
from tests.catalogue import PER_SAMPLE, PROBLEMS, Made, Make, cross_entropy, normal, plain_tensor, weighted_logistic


def weighing(net: nn.Module, x: Tensor, likelihood: str | None = None) -> tuple[nhgd.Bilevel, Any]:
    """Sample weights for a classifier with three classes; the first weight is all but zero."""
    v = normal(len(x))
    v[0] = -60.0
    problem = nhgd.Bilevel(cross_entropy, lambda net, v, batch: v.sum(), net.double(), v, 0.02, likelihood)
    return problem, (x, torch.arange(len(x)) % 3, torch.arange(len(x)))


def assembled(record: LayerStatistics, problem: nhgd.Bilevel) -> Tensor:
    """The rows (K B, D) that the layers and the others of a record stand for, written out with a loop."""
    pieces: dict[str, Tensor] = {}
    for layer in record.layers:
        scores, inputs = layer.scores, layer.inputs  # (K, B, T, G, out), (B, T, G, in + 1)
        found = torch.stack(
            [
                torch.stack(
                    [
                        torch.stack(
                            [scores[k, i, :, g].T @ inputs[i, :, g] for g in range(layer.groups)],
                        )
                        for i in range(record.samples)
                    ]
                )
                for k in range(len(scores))
            ]
        ).flatten(0, 1)  # (K B, G, out, in + 1)
        if layer.bias is not None:
            pieces[layer.bias], found = found[..., -1].flatten(1), found[..., :-1]
        pieces[layer.weight] = found.flatten(1)
    if record.other_rows is not None:
        sizes = [dict(zip(problem.theta.names, problem.theta.sizes, strict=True))[n] for n in record.other_names]
        pieces |= dict(zip(record.other_names, record.other_rows.split(sizes, dim=1), strict=True))
    return torch.cat([pieces[name] for name in problem.theta.names], dim=1)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x)))


class Gated(nn.Module):
    """A weight that is used a second time outside its layer, behind a gate that is closed at first."""

    def __init__(self, gate: float) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 3)
        self.register_buffer("gate", torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)) + self.gate * (x @ self.a.weight))


class Tokens(nn.Module):
    """The output layer shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class Sequence(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4)
        self.relu = nn.ReLU(inplace)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.a(x))).mean(1)


class Gained(nn.Module):
    """A layer whose output is scaled, by a module that holds other modules: only a pass of its own shows the gain's rows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.gain = layer, nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.layer(x)


def gained(layer: nn.Module) -> nn.Module:
    return Gained(layer)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 2, batch_first=True)
        self.head = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Normalised(nn.Linear):
    """A Linear that computes something else than its name says."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(input=x)


class TwoStrides(nn.Module):
    """Two convolutions with one weight and different strides."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 1, 2, bias=False)
        self.b = nn.Conv2d(1, 1, 2, stride=2, bias=False)
        self.b.weight = self.a.weight
        self.head = nn.Linear(13, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.a(x).flatten(1), self.b(x).flatten(1)], 1))


class TwoBiases(nn.Module):
    """Two layers with one weight and a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def partly_frozen(frozen: str) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    net[0].get_parameter(frozen).requires_grad_(False)
    return net


def conv(channels: int = 1, shape: tuple[int, int] = (4, 4), **options: Any) -> tuple[Callable[[], nn.Module], Tensor]:
    """A convolution with options, an average over places and a linear layer."""

    def make() -> nn.Module:
        layer = nn.Conv2d(channels, 2, **{"kernel_size": 2} | options)
        return nn.Sequential(layer, nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten(), nn.Linear(4, 3))

    return make, (5, channels, *shape)


FLAT, ROW, IMAGE = (5, 3), (5, 2, 3), (5, 1, 4, 4)
# A network, the shape of its input, and the parameters that no layer accounts for.
NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[str, ...]]] = {
    "bias": (lambda: nn.Linear(3, 3), FLAT, ()),
    "no bias": (lambda: nn.Linear(3, 3, bias=False), FLAT, ()),
    "sequence": (Sequence, ROW, ()),
    "inplace": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)),
        FLAT,
        (),
    ),
    "inplace on a sequence": (lambda: Sequence(inplace=True), ROW, ()),
    "inplace after conv": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(18, 3)),
        IMAGE,
        (),
    ),
    "conv": (*conv(), ()),
    "conv no bias": (*conv(bias=False), ()),
    "conv stride": (*conv(stride=2), ()),
    "conv stride by side": (*conv(stride=(1, 2), kernel_size=(1, 2)), ()),
    "conv padding": (*conv(padding=1, stride=2), ()),
    "conv padding by side": (*conv(padding=(1, 0), kernel_size=3), ()),
    "conv dilation": (*conv(dilation=2), ()),
    "conv groups": (*conv(channels=2, groups=2), ()),
    "conv same": (*conv(padding="same", kernel_size=3), ()),
    "conv same, even": (*conv(padding="same", kernel_size=(2, 3), dilation=(1, 2)), ()),
    "conv valid": (*conv(padding="valid"), ()),
    "conv circular": (*conv(padding=1, padding_mode="circular"), ()),
    "conv reflect": (*conv(padding=(1, 2), padding_mode="reflect", channels=2, groups=2), ()),
    "conv circular same": (*conv(padding="same", padding_mode="circular"), ()),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 3)),
        (5, 1, 3),
        ("0.weight", "0.bias"),
    ),
    "called twice": (Twice, FLAT, ()),
    "two biases": (TwoBiases, FLAT, ("a.weight", "a.bias", "b.bias")),
    "used elsewhere": (lambda: Gated(1.0), FLAT, ("a.weight",)),
    "used behind a closed gate": (lambda: Gated(0.0), FLAT, ("a.weight",)),
    "attention": (Attention, (5, 2, 4), ()),
    "attention, as many places as samples": (Attention, (5, 5, 4), ()),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        FLAT,
        ("1.weight", "1.bias"),
    ),
    "frozen weight": (lambda: partly_frozen("weight"), FLAT, ("0.bias",)),
    "frozen bias": (lambda: partly_frozen("bias"), FLAT, ()),
    "subclass": (lambda: Normalised(3, 3), FLAT, ("weight", "bias")),
    "checkpointed": (Checkpointed, FLAT, ()),
    "keyword": (Keyword, FLAT, ()),
    "two strides": (TwoStrides, IMAGE, ("a.weight",)),
    "weight norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        FLAT,
        ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1"),
    ),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch's own remark on asymmetric padding
@pytest.mark.parametrize("name", NETS)
def test_layers_and_rows_equal_the_loop(name: str) -> None:
    make, shape, others = NETS[name]
    problem, batch = weighing(make(), normal(*shape))
    expected = oracles.rows(problem, batch)
    found = Recorder(problem, "sample").step(batch).record
    assert isinstance(found, PerSampleGradients)
    assert found.samples == len(batch[0])
    close(found.rows, expected)
    layers = Recorder(problem, "layer").step(batch).record
    assert isinstance(layers, LayerStatistics)
    assert layers.other_names == others
    close(assembled(layers, problem), expected)


def test_parameters_outside_layers_are_reached_through_attributes() -> None:
    """The module has no forward; its norm is evaluated one sample at a time with other tensors in place."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.ModuleDict({"linear": nn.Linear(3, 3), "norm": nn.LayerNorm(3)})

    problem, batch = weighing(Parts(), normal(5, 3))
    problem.inner = lambda parts, v, batch: cross_entropy(
        lambda x: parts.encoder["norm"](parts.encoder["linear"](x)), v, batch
    )
    with oracles.undisturbed(problem):
        record = Recorder(problem, "layer").step(batch).record
    assert record.other_names == ("encoder.norm.weight", "encoder.norm.bias")
    close(assembled(record, problem), oracles.rows(problem, batch))


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
def test_every_problem_equals_the_loop(make: Make) -> None:
    problem, batch, _ = make()
    with oracles.undisturbed(problem):
        found = Recorder(problem, "sample").step(batch).record
        layers = Recorder(problem, "layer").step(batch).record
    close(found.rows, oracles.rows(problem, batch))
    close(assembled(layers, problem), found.rows)
    close(found.rows.T @ found.rows / found.samples, oracles.fisher(problem, batch))


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("kind", [None, "raw"])
def test_the_gradient_has_the_ridge_and_the_weights(make: Make, kind: Any) -> None:
    problem, batch, _ = make()
    step = Objective(problem, batch).step() if kind is None else Recorder(problem, kind).step(batch)
    close(oracles.join(step.gradient), oracles.gradient(problem, batch))
    close(step.value, oracles.objective(problem, batch).detach())
    assert [g.shape for g in step.gradient] == [leaf.shape for leaf in problem.theta.leaves]


def test_tied_embedding() -> None:
    problem, batch = weighing(Tokens(), torch.tensor([[0, 1], [1, 1], [2, 0], [0, 0]]))
    found = Recorder(problem, "sample").step(batch).record
    close(found.rows, oracles.rows(problem, batch))
    assert Recorder(problem, "layer").step(batch).record.other_names == ("embedding.weight", "head.bias")


def test_a_use_that_opens_later_is_accounted_for() -> None:
    problem, batch = weighing(Gated(0.0), normal(5, 3))
    recorder = Recorder(problem, "sample")
    recorder.step(batch)
    problem.theta.given.gate.fill_(1.0)
    close(recorder.step(batch).record.rows, oracles.rows(problem, batch))


def test_a_layer_that_appears_later_is_verified_too() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.finalise = nn.Linear(3, 3), nn.Linear(3, 3), False

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + (self.b(x) + x @ self.b.weight if self.finalise else 0.0)

    problem, batch = weighing(Late(), normal(5, 3))
    recorder = Recorder(problem, "sample")
    close(recorder.step(batch).record.rows, oracles.rows(problem, batch))
    problem.theta.given.finalise = True
    close(recorder.step(batch).record.rows, oracles.rows(problem, batch))


def test_functional_call_with_a_dict_and_a_module_outside() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    theta = {name: p.detach().clone() for name, p in net.named_parameters()}

    def inner(theta: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = torch.func.functional_call(net, theta, (batch[0],))
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"), v[batch[2]].sigmoid())

    problem = nhgd.Bilevel(inner, lambda theta, v, batch: v.sum(), theta, normal(5))
    batch = (normal(5, 3), torch.arange(5) % 3, torch.arange(5))
    record = Recorder(problem, "layer").step(batch).record
    assert [layer.weight for layer in record.layers] == ["0.weight", "2.weight"]
    assert record.other_names == ()
    close(assembled(record, problem), oracles.rows(problem, batch))


def test_the_model_called_twice_by_the_inner_function() -> None:
    def inner(net: Any, v: Any, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, i = batch
        return (net(x) - net(2 * x).tanh()).square().sum(1) + F.cross_entropy(net(x), y, reduction="none"), v[i].exp()

    problem = nhgd.Bilevel(inner, lambda net, v, batch: v.sum(), nn.Linear(3, 3).double(), normal(5))
    batch = (normal(5, 3), torch.arange(5) % 3, torch.arange(5))
    record = Recorder(problem, "layer").step(batch).record
    assert record.layers[0].inputs.shape == (5, 3, 1, 4)
    close(assembled(record, problem), oracles.rows(problem, batch))


def test_zero_weights_give_zero_rows() -> None:
    problem, batch, _ = plain_tensor()
    problem.v.given[:3] = -float("inf")  # exp(-inf) = 0
    rows = Recorder(problem, "sample").step(batch).record.rows
    assert torch.equal(rows[:3], torch.zeros_like(rows[:3]))
    close(rows, oracles.rows(problem, batch))
    net, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    net.v.given[:2] = -float("inf")
    rows = Recorder(net, "sample").step(batch).record.rows
    assert torch.equal(rows[:2], torch.zeros_like(rows[:2]))
    close(rows, oracles.rows(net, batch))


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
def test_a_batch_of_one(make: Make) -> None:
    problem, batch, _ = make()
    batch = oracles.one(batch, 1)
    rows = Recorder(problem, "sample").step(batch).record.rows
    assert rows.shape == (1, problem.theta.numel)
    close(rows, oracles.rows(problem, batch))


def test_the_weights_of_a_layer_record() -> None:
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    close(Recorder(problem, "layer").step(batch).record.weights, problem.v.given.sigmoid())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_at_an_optimum_is_still_a_layer(dtype: torch.dtype) -> None:
    """Without a ridge the gradient there is rounding error, which says nothing about other uses of the weight."""
    x, y = normal(50, 1, 5, 5).to(dtype), normal(50, 2, 4, 4).to(dtype)
    net = nn.Conv2d(1, 2, 2, bias=False).to(dtype)
    places = F.unfold(x, 2).transpose(1, 2).flatten(0, 1)  # (B T, 4)
    with torch.no_grad():
        solution = torch.linalg.lstsq(places, y.flatten(2).transpose(1, 2).flatten(0, 1)).solution
        net.weight.copy_(solution.T.reshape(2, 1, 2, 2))
    problem = nhgd.Bilevel(
        lambda net, v, batch: (net(batch[0]) - batch[1]).square().mean((1, 2, 3)) * v.exp(),
        lambda net, v, batch: v,
        net,
        torch.zeros((), dtype=dtype),
    )
    record = Recorder(problem, "layer").step((x, y)).record
    assert record.other_names == ()
    assert record.layers[0].rows()[0].dtype == dtype


# The exact and the sampled Fisher matrix.


def squared(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    return {
        "half": lambda z, y: 0.5 * (z - y).square().sum(1),
        "sum": lambda z, y: (z - y).square().sum(1),
        "mean": lambda z, y: F.mse_loss(z, y, reduction="none").mean(1),
    }[kind]


def of_likelihood(kind: str, net: nn.Module, repeat: int = 1) -> tuple[nhgd.Bilevel, Any]:
    """A weighted problem of each kind; every sample is repeated."""
    x, i = normal(4, 3).repeat_interleave(repeat, 0), torch.arange(4).repeat_interleave(repeat)
    loss: Callable[[Tensor, Tensor], Tensor]
    if kind == "categorical":
        y, loss = i % 3, lambda z, y: F.cross_entropy(z, y, reduction="none")
    elif kind == "bernoulli":
        y = torch.stack([i % 2, (i + 1) % 2, i % 2], 1).double()
        loss = lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction="none").sum(1)  # noqa: E731
    else:
        y, loss = normal(4, 3)[i], squared(kind)

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        return nhgd.Losses(loss(z, batch[1]), v[batch[2]].exp(), z)

    likelihood = kind if kind in ("categorical", "bernoulli") else "gaussian"
    problem = nhgd.Bilevel(inner, lambda net, v, batch: v.sum(), net.double(), normal(4), 0.02, likelihood)
    return problem, (x, y, i)


def matrix(record: Any, problem: nhgd.Bilevel) -> Tensor:
    rows = record.rows if isinstance(record, PerSampleGradients) else assembled(record, problem)
    return rows.T @ rows / record.samples


def mixed() -> nn.Module:
    """A network with parameters inside and outside Linear layers."""
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3), nn.Linear(3, 3))


KINDS = ["categorical", "bernoulli", "half", "sum", "mean"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("record", ["sample", "layer"])
def test_the_exact_fisher_is_the_ggn(kind: str, record: Any) -> None:
    problem, batch = of_likelihood(kind, mixed())
    found = Recorder(problem, record, "exact").step(batch).record
    close(matrix(found, problem), oracles.ggn(problem, batch))


def test_the_exact_fisher_is_the_mean_over_labels() -> None:
    problem, batch = of_likelihood("categorical", mixed())
    p = oracles.losses(problem, batch)[2].softmax(1).detach()
    labels = [torch.full_like(batch[1], c) for c in range(3)]
    found = Recorder(problem, "sample", "exact").step(batch).record
    close(matrix(found, problem), oracles.label_fisher(problem, batch, labels, list(p.T)))


def test_the_exact_fisher_of_binary_labels() -> None:
    problem, batch, _ = weighted_logistic()
    p = oracles.losses(problem, batch)[2].sigmoid().detach()
    labels = [torch.zeros_like(batch[1]), torch.ones_like(batch[1])]
    found = Recorder(problem, "sample", "exact").step(batch).record
    close(matrix(found, problem), oracles.label_fisher(problem, batch, labels, [1 - p, p]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_sampled_fisher_is_right_on_average(kind: str) -> None:
    """1,000 draws for each of 4 samples. Each of at most 900 entries may be six standard errors off: a correct sampler
    fails with a probability below 1e-5, and the seed is fixed."""
    problem, batch = of_likelihood(kind, mixed(), repeat=1000)
    record = Recorder(problem, "sample", "sampled").step(batch).record
    assert record.rows.shape[0] == record.samples
    products = record.rows[:, :, None] * record.rows[:, None, :]  # (B, D, D)
    error = products.mean(0) - oracles.ggn(problem, oracles.every(batch, 1000))
    # The four samples are strata: only the draws within one vary.
    spread = products.unflatten(0, (4, 1000)).var(1).mean(0).sqrt() / len(products) ** 0.5
    assert bool((error.abs() <= 6 * spread + 1e-12).all())


def test_a_likelihood_of_ones_own() -> None:
    class Constant(AbstractLikelihood):
        name = "constant"

        def roots(self, outputs: Tensor, losses: Tensor) -> Tensor:
            return torch.ones_like(outputs)[None]

    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    problem.likelihood = Constant()
    rows = Recorder(problem, "sample", "exact").step(batch).record.rows
    weights = problem.v.given.sigmoid().sqrt()[:, None]
    close(rows, weights * oracles.jacobians(problem, batch).sum(1))


@pytest.mark.parametrize(
    ("likelihood", "loss", "ratio"),
    [
        ("categorical", lambda z, y: F.cross_entropy(z, y, reduction="none") / 3, "0.333"),
        ("categorical", lambda z, y: F.cross_entropy(z, y, torch.tensor([1.0, 5, 1]).double(), reduction="none"), ""),
        ("categorical", lambda z, y: F.cross_entropy(2 * z, y, reduction="none"), ""),
        ("categorical", lambda z, y: (z - F.one_hot(y, 3)).square().sum(1), ""),
        (
            "bernoulli",
            lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).double(), reduction="none").mean(1),
            "0.333",
        ),
        ("gaussian", lambda z, y: (z - y[:, None]).sum(1).square(), ""),
    ],
)
@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_a_likelihood_that_is_not_that_of_the_losses(likelihood: str, loss: Any, ratio: str, fisher: Any) -> None:
    """A wrong scale is invisible to an optimiser and wrong in a hypergradient."""
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3), likelihood=likelihood)

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        return nhgd.Losses(loss(z, batch[1]), v[batch[2]].exp(), z)

    problem.inner = inner
    sentence = rf"likelihood='{likelihood}' does not describe these losses.*about {ratio}.*times what it says"
    with pytest.raises(nhgd.InputError, match=sentence):
        Recorder(problem, "sample", fisher).step(batch)


def test_smoothed_labels_have_the_same_fisher() -> None:
    problem, batch = of_likelihood("categorical", mixed())

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        z = net(batch[0])
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none", label_smoothing=0.1), v[batch[2]].exp(), z)

    problem.inner = inner
    found = Recorder(problem, "sample", "exact").step(batch).record
    close(matrix(found, problem), oracles.ggn(problem, batch))


def test_sure_predictions_are_not_taken_for_a_wrong_likelihood() -> None:
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3), likelihood="categorical")
    oracles.assign(problem.theta.given, 1e3 * oracles.theta_of(problem))
    rows = Recorder(problem, "sample", "exact").step(batch).record.rows
    close(rows.T @ rows / 5, oracles.ggn(problem, batch))


# The gradient of a batch as a record.


def test_the_scale_of_a_batch_record() -> None:
    problem, batch, _ = plain_tensor()
    problem.v.given.fill_(0.7)
    weight, samples = float(torch.tensor(0.7, dtype=torch.float64).exp()), len(batch[0])
    record = Recorder(problem, "batch").step(batch).record
    assert isinstance(record, BatchGradient)
    mean = oracles.scores(problem, batch).mean(0)
    close(record.row, (samples * weight) ** 0.5 * mean)
    assert record.raw is None
    raw = Recorder(problem, "raw").step(batch).record
    assert isinstance(raw, BatchGradient)
    close(raw.raw, oracles.gradient(problem, batch))
    assert raw.row is None


def test_a_batch_record_of_one_sample_is_its_row() -> None:
    problem, batch, _ = plain_tensor()
    batch = oracles.one(batch, 2)
    close(Recorder(problem, "batch").step(batch).record.row, oracles.rows(problem, batch)[0])


def test_a_batch_record_with_a_module_as_v() -> None:
    """Its weights carry a graph to v."""
    weigh = nn.Linear(3, 1).double()
    nn.init.zeros_(weigh.weight)
    problem = nhgd.Bilevel(
        lambda net, v, x: (net(x).square().sum(1), v(x)[:, 0].exp()),
        lambda net, v, x: net(x).sum(),
        nn.Linear(3, 2).double(),
        weigh,
    )
    x = normal(5, 3)
    row = Recorder(problem, "batch").step(x).record.row
    close(row, (5 * float(weigh.bias.detach().exp())) ** 0.5 * oracles.scores(problem, x).mean(0))


def test_negative_weights_do_not_vanish() -> None:
    """Validation refuses them; should they come later, they show as nan, or in words."""
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    inner = problem.inner
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values, problem.v.given)
    problem.v.given.fill_(1.0)
    problem.v.given[2] = -1.0
    rows = Recorder(problem, "sample").step(batch).record.rows
    assert torch.isnan(rows).any(1).tolist() == [False, False, True, False, False]
    problem.v.given.fill_(-1.0)
    with pytest.raises(nhgd.InputError, match="A weight is -1"):
        Recorder(problem, "batch").step(batch)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_weights_of_another_dtype_are_exact(dtype: torch.dtype) -> None:
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    inner, weights = problem.inner, torch.tensor([3, 0, 7, 1, 2]).to(dtype)
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values, weights[args[2][2]])
    rows = Recorder(problem, "sample").step(batch).record.rows
    close(rows, weights.double().sqrt()[:, None] * oracles.scores(problem, batch))


def test_a_batch_record_refuses_uneven_weights() -> None:
    problem, batch, _ = plain_tensor()
    with pytest.raises(nhgd.InputError, match="weights of a batch differ"):
        Recorder(problem, "batch").step(batch)
    record = Recorder(problem, "raw").step(batch).record
    assert record.row is None
    close(record.raw, oracles.gradient(problem, batch))


def test_a_batch_record_of_zero_weights_is_zero() -> None:
    problem, batch, _ = plain_tensor()
    problem.v.given.fill_(-float("inf"))
    assert torch.equal(Recorder(problem, "batch").step(batch).record.row, torch.zeros(6, dtype=torch.float64))


# Refusals.


def test_batchnorm_in_training_is_refused() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    problem, batch = weighing(net, normal(5, 3))
    with pytest.raises(nhgd.InputError, match=r"BatchNorm in training mode \('1'\).*model.eval\(\)"):
        Recorder(problem, "layer").step(batch)
    Recorder(problem, "raw").step(batch)
    assert net[1].num_batches_tracked == 1


@pytest.mark.parametrize("mix", [lambda z: z - z.mean(0), lambda z: z.cumsum(0), lambda z: z.roll(1, 0)])
def test_samples_that_influence_each_other_are_refused(mix: Callable[[Tensor], Tensor]) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return mix(self.a(x))

    problem, batch = weighing(Mixing(), normal(5, 3))
    with pytest.raises(nhgd.InputError, match="depends on another sample"):
        Recorder(problem, "layer").step(batch)
    plain = nhgd.Bilevel(lambda theta, v, x: (mix(x @ theta) - v).square(), lambda theta, v, x: v, normal(3), normal())
    with pytest.raises(nhgd.InputError, match="samples influence each other"):
        Recorder(plain, "sample").step(batch[0])


@pytest.mark.parametrize("length", [2, 5])
def test_sequence_first_is_refused(length: int) -> None:
    """Also when the sequence happens to be as long as the batch."""

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x.transpose(0, 1))).cumsum(0)[-1]

    problem, batch = weighing(SequenceFirst(), normal(5, length, 3))
    with pytest.raises(nhgd.InputError, match="first dimension"):
        Recorder(problem, "layer").step(batch)


@pytest.mark.parametrize("kind", ["sample", "layer", "batch"])
def test_a_scalar_loss_is_refused(kind: Any) -> None:
    problem = nhgd.Bilevel(
        lambda net, v, x: net(x).square().mean() * v.exp(), lambda net, v, x: v, nn.Linear(3, 3).double(), normal()
    )
    with pytest.raises(nhgd.InputError, match=r"needs per-sample losses.*shape \(B,\)"):
        Recorder(problem, kind).step(normal(5, 3))
    close(
        oracles.join(Objective(problem, normal(1, 3) * 0 + 1).step().gradient),
        oracles.gradient(problem, torch.ones(1, 3).double()),
    )


def test_the_exact_fisher_says_what_it_lacks() -> None:
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    with pytest.raises(nhgd.InputError, match="pass likelihood='categorical'"):
        Recorder(problem, "sample", "exact")
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3), likelihood="categorical")
    with pytest.raises(nhgd.InputError, match="needs per-sample records"):
        Recorder(problem, "batch", "exact")
    inner = problem.inner
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values)
    with pytest.raises(nhgd.InputError, match=r"needs the model's outputs: return nhgd.Losses"):
        Recorder(problem, "sample", "exact").step(batch)
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values, outputs=inner(*args).outputs.detach())
    with pytest.raises(nhgd.InputError, match="detached from theta"):
        Recorder(problem, "sample", "sampled").step(batch)
    problem.inner = lambda *args: nhgd.Losses(inner(*args).values, outputs=inner(*args).outputs[:, :, None])
    with pytest.raises(nhgd.InputError, match=r"do not depend on the class scores.*\(5, 3, 1\).*shape \(B, C\)"):
        Recorder(problem, "sample", "exact").step(batch)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z: nhgd.Losses(-z.square().sum(1), outputs=z),
        lambda z: nhgd.Losses(z.sum(1), outputs=z),
        lambda z: nhgd.Losses(z.abs().sum(1), outputs=z),
        lambda z: nhgd.Losses(z.square().sum(1), outputs=2 * z),
    ],
)
def test_what_is_not_gaussian(loss: Callable[[Tensor], nhgd.Losses]) -> None:
    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3), likelihood="gaussian")
    problem.inner = lambda net, v, batch: loss(net(batch[0]))
    with pytest.raises(nhgd.InputError, match=r"a squared error of Losses.outputs"):
        Recorder(problem, "sample", "exact").step(batch)


# Manners.


def test_no_hook_is_left_after_an_exception() -> None:
    def inner(net: Any, v: Any, batch: Any) -> Tensor:
        net(batch[0])
        assert nn.modules.module._global_forward_hooks
        raise KeyError("from the user's function")

    problem, batch = weighing(nn.Linear(3, 3), normal(5, 3))
    problem.inner = inner
    with pytest.raises(KeyError):
        Recorder(problem, "layer").step(batch)
    assert not nn.modules.module._global_forward_hooks


class Branching(nn.Module):
    """Follows a branch that depends on the data, which vmap cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x * self.scale) if float(x.detach()[0, 0]) > -100 else x


@pytest.mark.parametrize(("net", "shape"), [(Branching, FLAT), (Recurrent, ROW)])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_the_slow_way_gives_the_same_rows_and_one_warning(net: Any, shape: tuple[int, ...], fisher: Any) -> None:
    problem, batch = weighing(net(), normal(*shape), likelihood="categorical")
    recorder = Recorder(problem, "sample", fisher)
    with pytest.warns(UserWarning, match="could not be vectorised"):
        first = recorder.step(batch).record
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = recorder.step(batch).record
    assert torch.equal(first.rows, second.rows)
    expected = oracles.fisher(problem, batch) if fisher == "empirical" else oracles.ggn(problem, batch)
    close(matrix(first, problem), expected)


def test_dropout_makes_rows_of_the_pass_that_was_made() -> None:
    """The rows of a layer come from the masks of the inner step itself, so they add up to its gradient."""
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    problem, batch = weighing(net, normal(5, 3))
    problem.l2 = 0.0
    step = Recorder(problem, "sample").step(batch)
    root = problem.v.given.sigmoid().sqrt()
    close(root @ step.record.rows / 5, oracles.join(step.gradient))


def test_calls_are_counted() -> None:
    problem, batch, _ = plain_tensor()
    calls = OracleCalls()
    recorder = Recorder(problem, "sample", calls=calls)
    recorder.step(batch)
    recorder.step(batch)
    # Each step takes one pass for its gradient and one for its rows, which no layer gives.
    assert calls.as_dict() == {
        "gradients": 4,
        "inner_gradients": 4,
        "outer_gradients": 0,
        "hvps": 0,
        "cross": 0,
        "samples": 40,
    }


def test_compiled_modules_are_recorded() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    problem, batch = weighing(net, normal(5, 3))
    expected = oracles.rows(problem, batch)
    problem.theta = nhgd.Bilevel(
        problem.inner, problem.outer, torch.compile(net, backend="eager"), problem.v.given
    ).theta
    record = Recorder(problem, "layer").step(batch).record
    assert [layer.weight for layer in record.layers] == ["0.weight", "2.weight"]
    close(assembled(record, problem), expected)


def test_float32_stays_float32() -> None:
    made: Made = plain_tensor()
    x, y, i = made[1]
    problem = nhgd.Bilevel(made[0].inner, made[0].outer, made[0].theta.given.float(), made[0].v.given.float(), 0.1)
    batch = (x.float(), y.float(), i)
    step = Recorder(problem, "sample").step(batch)
    assert step.record.rows.dtype == step.gradient[0].dtype == step.value.dtype == torch.float32
    torch.testing.assert_close(step.record.rows.double(), oracles.rows(*made[:2]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["raw", "batch", "sample", "layer"])
def test_the_tensors_of_a_record_come_in_the_order_in_which_they_are_mapped(kind: Any) -> None:
    """Workers gather them in the one order and put them back in the other."""
    net = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    problem, batch = weighing(net, normal(6, 4))
    if kind == "batch":
        problem, batch = (
            nhgd.Bilevel(lambda t, v, x: x @ t - v, lambda t, v, x: t.sum(), normal(4), normal()),
            normal(6, 4),
        )
    record = Recorder(problem, kind, "empirical").step(batch).record
    assert record is not None
    seen: list[Tensor] = []
    map_tensors(lambda t: (seen.append(t), t)[1], record)
    walked = list(tensors(record))
    assert len(walked) == len(seen) >= {"raw": 1, "batch": 1, "sample": 1, "layer": 8}[kind]
    assert all(a is b for a, b in zip(walked, seen, strict=True))


# Weights that depend on theta.


@pytest.mark.parametrize("kind", ["sample", "layer", "batch"])
@pytest.mark.parametrize("v", ["tensor", "module"])
def test_weights_that_depend_on_theta_are_constants_in_the_rows(kind: Any, v: str) -> None:
    """Rows are sqrt(w_i) s_i whether or not the weights are detached; the gradient is that of what was written."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, losses: Tensor) -> Tensor:
            return self.layer(losses[:, None])[:, 0].sigmoid()

    gain: Any = Gain().double() if v == "module" else normal(2)

    def made(detach: bool) -> tuple[nhgd.Bilevel, Any]:
        def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
            values = F.cross_entropy(net(batch[0]), batch[1], reduction="none")
            known = values.detach() if detach else values
            if kind == "batch":
                known = known.mean().expand_as(known)  # equal, as that record needs them
            weights = v(known) if isinstance(v, nn.Module) else (v[0] + v[1] * known).sigmoid()
            return nhgd.Losses(values, weights)

        problem = nhgd.Bilevel(inner, lambda net, v, batch: normal(), net, gain, 0.02)
        return problem, (x, torch.arange(5) % 3)

    net = nn.Sequential(nn.Linear(3, 4), gained(nn.LayerNorm(4)), nn.Linear(4, 3)).double()
    x = normal(5, 3)
    (detached, batch), (free, _) = made(True), made(False)
    calls = OracleCalls()
    expected, found = Recorder(detached, kind).step(batch), Recorder(free, kind, calls=calls).step(batch)
    for a, b in zip(tensors(found.record), tensors(expected.record), strict=True):
        close(a, b)
    if kind == "sample":
        close(found.record.rows, oracles.rows(free, batch))
        x0 = normal(free.theta.numel)
        close(
            found.record.rows.T @ (found.record.rows @ x0) / 5 + 0.04 * x0, Oracle(free, [batch]).empirical_fisher(x0)
        )
    close(oracles.join(found.gradient), oracles.gradient(free, batch))
    assert not torch.allclose(found.gradient[0], expected.gradient[0])
    assert calls.inner_gradients == (2 if kind == "batch" else 3)


def test_weights_of_an_outer_module_take_no_further_pass() -> None:
    weigh = nn.Linear(3, 1).double()
    problem = nhgd.Bilevel(
        lambda net, v, x: nhgd.Losses(net(x).square().sum(1), v(x)[:, 0].exp()),
        lambda net, v, x: net(x).sum(),
        nn.Linear(3, 3).double(),
        weigh,
    )
    calls = OracleCalls()
    Recorder(problem, "sample", calls=calls).step(normal(5, 3))
    assert calls.inner_gradients == 1


# Dropout.


def gone_through(problem: nhgd.Bilevel, batch: Any, state: Tensor) -> Tensor:
    """Rows of a pass whose random numbers begin at a state of the generator, by a loop over its own losses."""
    torch.set_rng_state(state)
    losses = problem.losses(batch)
    weights = torch.ones_like(losses.values) if losses.weights is None else losses.weights.detach()
    rows = [torch.autograd.grad(value, problem.theta.leaves, retain_graph=True) for value in losses.values]
    return torch.stack([oracles.join(row) for row in rows]) * weights.sqrt()[:, None]


class Checked(nn.Module):
    """Dropout inside a part that is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))


DROPPING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 3)), (20, 3)),
    "checkpointed": (Checked, (5, 3)),
    "recurrent": (lambda: nn.Sequential(Recurrent(), nn.Dropout(0.5)), (5, 2, 3)),
    "transformer": (
        lambda: nn.Sequential(
            nn.TransformerEncoderLayer(3, 1, 4, 0.4, batch_first=True), nn.Flatten(), nn.Linear(6, 3)
        ),
        (5, 2, 3),
    ),
}


@pytest.mark.parametrize("name", DROPPING)
def test_all_rows_are_of_one_dropout_mask(name: str) -> None:
    """Also those of parameters outside layers, so that products of the two are right."""
    make, shape = DROPPING[name]
    problem, batch = weighing(make().train(), normal(*shape))
    state = torch.get_rng_state()
    found = Recorder(problem, "sample").step(batch).record
    close(found.rows, gone_through(problem, batch, state))
    torch.set_rng_state(state)
    layers = Recorder(problem, "layer").step(batch).record
    assert layers.other_names
    close(assembled(layers, problem), found.rows)


@pytest.mark.parametrize("inverse", [FisherDense(), FisherWindow()], ids=repr)
def test_blocks_between_layers_and_others_under_dropout(inverse: Any) -> None:
    problem, batch = weighing(DROPPING["norm"][0]().train(), normal(20, 3))
    state = torch.get_rng_state()
    recorder = Recorder(problem, inverse.records, couples=capabilities.couples(inverse))
    kept = inverse.observe(inverse.init(problem.theta), recorder.step(batch).record)
    rows = gone_through(problem, batch, state)
    if isinstance(inverse, FisherDense):
        close(kept.matrix, rows.T @ rows / 20)
    else:
        close(kept.gram[:20, :20], rows @ rows.T)


@pytest.mark.parametrize("fisher", ["exact", "sampled"])
def test_other_fisher_matrices_under_dropout(fisher: Any) -> None:
    problem, batch = weighing(DROPPING["norm"][0]().train(), normal(5, 3), likelihood="categorical")
    state = torch.get_rng_state()
    record = Recorder(problem, "sample", fisher).step(batch).record
    torch.set_rng_state(state)
    losses = problem.losses(batch)
    likelihood = nhgd.likelihood.Categorical()
    roots = (likelihood.roots if fisher == "exact" else likelihood.sample)(losses.outputs, losses.values)
    rows = [
        oracles.join(torch.autograd.grad(z, problem.theta.leaves, r, retain_graph=True)) * w.sqrt()
        for root in roots
        for z, r, w in zip(losses.outputs, root, losses.weights, strict=True)
    ]
    close(record.rows, torch.stack(rows))


def test_noise_that_no_generator_of_torch_shows() -> None:
    """Rows are of the pass that was made, whatever its random numbers come from."""
    own, seen = torch.Generator().manual_seed(3), []

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        seen.append(own.get_state())
        noise = 1 + torch.randn(len(batch[0]), 4, generator=own, dtype=torch.float64)
        z = net[2](net[1](net[0](batch[0])) * noise)
        return nhgd.Losses(F.cross_entropy(z, batch[1], reduction="none"))

    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    problem, batch = weighing(net, normal(5, 3))
    problem.inner = inner
    recorder = Recorder(problem, "sample")
    for _ in range(2):
        first = len(seen)
        rows = recorder.step(batch).record.rows
        own.set_state(seen[first])
        close(rows, gone_through(problem, batch, torch.get_rng_state()))


def test_k_fac_is_spared_the_passes_that_one_mask_takes() -> None:
    problem, batch = weighing(nn.Sequential(gained(nn.Linear(3, 4)), nn.Dropout(0.5), nn.Linear(4, 3)), normal(20, 3))
    counts = {}
    for couples in (True, False):
        calls = OracleCalls()
        Recorder(problem, "layer", calls=calls, couples=couples).step(batch)
        counts[couples] = calls.inner_gradients
    assert counts == {True: 21, False: 2}
    problem, batch = weighing(DROPPING["norm"][0]().train(), normal(20, 3))
    Recorder(problem, "layer", calls=(calls := OracleCalls())).step(batch)
    assert calls.inner_gradients == 1  # a norm's rows are of the pass itself
    assert not capabilities.couples(nhgd.inverse.KFAC())
    assert capabilities.couples(nhgd.inverse.Refined(FisherWindow()).learner)


# Passes that are counted.


@pytest.mark.parametrize(
    ("net", "fisher", "passes"),
    [
        (lambda: nn.Linear(3, 3), "empirical", 1),
        (lambda: nn.Linear(3, 3), "exact", 1 + 3),
        (lambda: nn.Linear(3, 3), "sampled", 1 + 1),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "empirical", 1),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "exact", 1 + 3),
        (lambda: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "sampled", 1 + 1),
        (lambda: gained(nn.Linear(3, 3)), "empirical", 1 + 1),
        (lambda: gained(nn.Linear(3, 3)), "exact", 1 + 3 + 3),
        (lambda: gained(nn.Linear(3, 3)), "sampled", 1 + 1 + 1),
    ],
)
def test_every_backward_pass_is_counted(net: Any, fisher: Any, passes: int) -> None:
    """With the passes of the first step that only look at the model left out, so that a run that goes on counts alike."""
    problem, batch = weighing(net(), normal(5, 3), likelihood="categorical")
    calls = OracleCalls()
    recorder = Recorder(problem, "layer", fisher, calls, couples=False)
    for step in (1, 2):
        recorder.step(batch)
        assert (calls.inner_gradients, calls.samples) == (step * passes, step * passes * 5)


def test_counted_passes_are_those_that_are_made() -> None:
    forward = []
    problem, batch = weighing(gained(nn.Linear(3, 3)), normal(5, 3))
    inner = problem.inner
    problem.inner = lambda *args: (forward.append(1), inner(*args))[1]
    calls = OracleCalls()
    recorder = Recorder(problem, "layer", calls=calls)
    recorder.step(batch)
    before = len(forward), calls.inner_gradients
    recorder.step(batch)
    assert (len(forward) - before[0], calls.inner_gradients - before[1]) == (2, 2)


# Losses that vanish.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(3))
def test_rounding_at_vanishing_losses_is_no_influence(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, theta = torch.randn(64, 200, dtype=dtype), torch.randn(200, dtype=dtype)
    problem = nhgd.Bilevel(
        lambda t, v, b: 0.5 * (b[0] @ t - b[1]) ** 2 + 0 * v, lambda t, v, b: t.sum(), theta.clone(), normal().to(dtype)
    )
    record = Recorder(problem, "sample").step((x, x @ theta)).record
    assert record.rows.shape == (64, 200)
    problem.inner = lambda t, v, b: 0.5 * (b[0] @ t - b[1] + (b[0] @ t - b[1]).mean()) ** 2 + 0 * v
    with pytest.raises(nhgd.InputError, match="samples influence each other"):  # and at a perfect fit it is seen too
        Recorder(problem, "sample").step((x, x @ theta))


class Heteroscedastic(nn.Module):
    """A mean for each sample, and scales of very different sizes, of which none may be negative."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.mean = nn.Linear(5, len(scales))
        self.scale = nn.Parameter(torch.tensor(scales))

    def forward(self, x: Tensor) -> Tensor:
        if not bool((self.scale >= 0).all()):
            raise ValueError("a scale is negative")
        return (self.mean(x) * (1 + self.scale)).sum(1)


@pytest.mark.parametrize("scales", [[1.0, 0.02], [1.0, 1e-6], [0.0, 2.0]])
@pytest.mark.parametrize("inverse", ["kfac", "fisher_window", "fisher_diagonal"])
@pytest.mark.parametrize("seed", range(3))
def test_positive_parameters_stay_positive_while_samples_are_looked_at(
    scales: list[float], inverse: str, seed: int
) -> None:
    torch.manual_seed(seed)
    batch = (normal(16, 5), normal(16), torch.arange(16))
    problem = nhgd.Bilevel(
        lambda m, v, b: ((m(b[0]) - b[1]) ** 2, v[b[2]]),
        lambda m, v, b: ((m(b[0]) - b[1]) ** 2).mean(),
        Heteroscedastic(scales).double(),
        torch.ones(16).double(),
        l2=0.1,
    )
    assert bool(torch.isfinite(nhgd.hypergradient(problem, batch, batch, inverse=inverse, seed=seed).grad).all())


def test_where_nothing_is_known_nearby_samples_are_compared_at_theta_itself() -> None:
    torch.manual_seed(0)
    theta = normal(4)
    here = theta.clone()

    def inner(t: Tensor, v: Tensor, b: tuple[Tensor, Tensor]) -> Tensor:
        assert torch.equal(t.detach(), here), "not trained for this"
        return (b[0] @ t - b[1] + (b[0] @ t).mean()) ** 2 * v

    problem = nhgd.Bilevel(inner, lambda t, v, b: t.sum(), theta, torch.ones(()).double())
    with pytest.raises(nhgd.InputError, match="samples influence each other"):
        nhgd.hypergradient(problem, (normal(6, 4), normal(6)), torch.zeros(2), inverse="fisher_window")
