"""What layers account for, where a first batch shows nothing and where later ones differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.inverse.capabilities import warnings_for
from nhgd.objective import Objective
from tests import oracles
from tests.catalogue import cross_entropy, normal


def weighing(net: nn.Module, x: Tensor) -> tuple[nhgd.Bilevel, Any]:
    """Sample weights for a classifier with three classes."""
    problem = nhgd.Bilevel(cross_entropy, lambda net, v, batch: v.sum(), net.double(), normal(len(x)), 0.02)
    return problem, (x, torch.arange(len(x)) % 3, torch.arange(len(x)))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class Scaled(nn.Linear):
    """Multiplies its weight by a number that can be changed."""

    factor = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.factor, self.bias)


class Gated(nn.Linear):
    """Uses its weight a second time, behind a gate."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.gate * F.linear(x.flip(1), self.weight)


class TwoBiases(nn.Module):
    """Two layers with one weight and a bias each, the second behind a gate that is closed at first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x) + self.gate * self.b(x.flip(1))))


class OneBias(TwoBiases):
    """Two layers with a weight each and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(3, 3)
        self.b.bias = self.a.bias


class Unfolded(nn.Conv2d):
    """A convolution whose kernel is centred first."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


def patched() -> nn.Module:
    """A plain layer whose forward was replaced."""
    layer = nn.Linear(3, 3)
    layer.forward = lambda x: F.linear(x, layer.weight.relu(), layer.bias)  # type: ignore[method-assign]
    return layer


def before_a_head(layer: nn.Module, width: int = 3) -> nn.Module:
    head = nn.Linear(width, 3)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), head)


FLAT, IMAGE = (5, 3), (5, 1, 3, 3)
SILENT: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a subclass behind a zero head": (lambda: before_a_head(Scaled(3, 3)), FLAT),
    "a convolution behind a zero head": (lambda: before_a_head(Unfolded(1, 2, 2), 8), IMAGE),
    "a patched layer behind a zero head": (lambda: before_a_head(patched()), FLAT),
    "two uses in one layer": (lambda: before_a_head(Gated()), FLAT),
    "two biases": (TwoBiases, FLAT),
    "one bias": (OneBias, FLAT),
}


@pytest.mark.parametrize("name", SILENT)
@pytest.mark.parametrize("weights", ["some", "none in the first batch"])
def test_a_silent_first_batch_proves_nothing(name: str, weights: str) -> None:
    """Zero heads, closed gates and weights of zero hide what a layer computes; it shows in the next step."""
    make, shape = SILENT[name]
    for kind in ("sample", "layer"):
        net = make()
        problem, batch = weighing(net, normal(*shape))
        if weights != "some":
            problem.v.given.fill_(-float("inf"))
        recorder = Recorder(problem, kind)  # type: ignore[arg-type]
        assert recorder.step(batch).record is not None
        with torch.no_grad():
            problem.v.given.copy_(normal(len(batch[0])))
            for parameter in net.parameters():
                parameter.copy_(normal(*parameter.shape))
        record = recorder.step(batch).record
        assert record is not None
        if kind == "sample":
            close(record.rows, oracles.rows(problem, batch))
        else:
            close(record.other_rows, oracles.rows(problem, batch)[:, _places(problem, record.other_names)])


def _places(problem: nhgd.Bilevel, names: tuple[str, ...]) -> list[int]:
    slices = problem.theta.slices()
    return [i for name in names for i in range(slices[name].start, slices[name].stop)]


class Branching(nn.Module):
    """Uses a weight outside its layer where the data say so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.a(x))
        if float(x.detach().abs().max()) > 50:
            z = torch.tanh(F.linear(z, self.a.weight))
        return self.head(z)


@pytest.mark.filterwarnings("ignore:Per-sample gradients could not be vectorised")
def test_control_flow_that_changes_later() -> None:
    problem, (x, y, i) = weighing(Branching(), normal(5, 3))
    recorder, large = Recorder(problem, "sample"), 60 * x / x.abs()
    for batch in ((x, y, i), (large, y, i), (x, y, i)):
        close(recorder.step(batch).record.rows, oracles.rows(problem, batch))
    recorder = Recorder(problem, "layer")
    recorder.step((x, y, i))
    with pytest.raises(nhgd.InputError, match=r"'a.weight' is used outside its layer in this batch.*records='sample'"):
        recorder.step((large, y, i))
    first = Recorder(problem, "layer")  # the other way round it is no layer from the beginning
    assert all(first.step((b, y, i)).record.other_names == ("a.weight", "a.bias") for b in (large, x))


def test_a_subclass_that_changes_later() -> None:
    problem, batch = weighing(nn.Sequential(Scaled(3, 3), nn.Tanh(), nn.Linear(3, 3)), normal(5, 3))
    layer, recorder = problem.theta.given[0], Recorder(problem, "sample")
    layer.factor = 1.0
    for factor in (1.0, 1.0, 1.0, 0.5):
        layer.factor = factor
        close(recorder.step(batch).record.rows, oracles.rows(problem, batch))


def test_a_subclass_that_computes_the_same_is_a_layer() -> None:
    class Counted(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    problem, batch = weighing(nn.Sequential(Counted(3, 3), nn.Tanh(), nn.Linear(3, 3)), normal(5, 3))
    record = Recorder(problem, "layer").step(batch).record
    assert record.other_names == ()


def test_a_parameter_that_is_the_input_of_a_layer() -> None:
    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.a = nn.Parameter(normal(1, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(self.prompt.expand(len(x), 3)) + self.a(x))

    problem, batch = weighing(Prompt(), normal(5, 3))
    record = Recorder(problem, "layer").step(batch).record
    assert record.other_names == ("prompt",)
    close(record.other_rows, oracles.rows(problem, batch)[:, _places(problem, ("prompt",))])


def test_samples_that_mix_behind_a_zero_head_are_refused() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
            nn.init.zeros_(self.head.weight)

        def forward(self, x: Tensor) -> Tensor:
            z = self.a(x)
            return self.head(z - z.mean(0))

    problem, batch = weighing(Mixing(), normal(5, 3))
    with pytest.raises(nhgd.InputError, match="depends on another sample"):
        Recorder(problem, "layer").step(batch)


def test_samples_that_mix_from_a_later_batch_on_are_refused() -> None:
    class Mixing(Branching):
        def forward(self, x: Tensor) -> Tensor:
            z = torch.tanh(self.a(x))
            return self.head(z.cumsum(0) if float(x.abs().max()) > 50 else z)

    problem, (x, y, i) = weighing(Mixing(), normal(5, 3))
    recorder = Recorder(problem, "layer")
    recorder.step((x, y, i))
    with pytest.raises(nhgd.InputError, match="depends on another sample"):
        recorder.step((100 * x, y, i))


class Noise(nn.Module):
    """A parametrisation that draws random numbers and counts how often it is computed."""

    calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight + 0.1 * torch.randn_like(weight)


@pytest.mark.parametrize("tensor", ["weight", "bias"])
def test_a_parametrised_layer_is_computed_once_a_step(tensor: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    parametrize.register_parametrization(net[0], tensor, noise := Noise())
    problem, batch = weighing(net, normal(5, 3))
    recorder = Recorder(problem, "layer", couples=False)
    recorder.step(batch)
    before, state = noise.calls, torch.get_rng_state()
    plain = Objective(problem, batch).step()
    once, after = noise.calls - before, torch.get_rng_state()
    torch.set_rng_state(state)
    gradient = recorder.step(batch).gradient
    # Once in the step itself, and once in the pass that gives rows of parameters outside layers.
    assert (once, noise.calls - before) == (1, 3)
    assert all(torch.equal(a, b) for a, b in zip(gradient, plain.gradient, strict=True))
    torch.set_rng_state(after)
    count = noise.calls
    for inverse in (nhgd.inverse.KFAC(), nhgd.inverse.FisherWindow()):
        inverse.memory(problem.theta)
        warnings_for(inverse, problem.theta)
    nhgd.algorithm.NHGD().prepared(problem)
    assert noise.calls == count


@pytest.mark.parametrize("method", ["aid-kfac", "nhgd", "nhgd-window"])
def test_spectral_norm_takes_the_same_steps_with_and_without_a_record(method: str) -> None:
    def theta_after(method: str) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 5)), nn.Tanh(), nn.Linear(5, 3)).double()
        v = torch.zeros(8, dtype=torch.float64)
        problem = nhgd.Bilevel(cross_entropy, lambda n, v, b: F.cross_entropy(n(b[0]), b[1]), net, v, l2=0.1)
        x, y, i = normal(8, 4), torch.arange(8) % 3, torch.arange(8)
        nhgd.Solver(problem, [(x, y, i)], [(x, y)], method=method, inner_steps=5).run(steps=1)
        return problem.theta.flat()

    assert torch.equal(theta_after(method), theta_after("aid-identity"))
