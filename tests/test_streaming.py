"""Scores that are used where they arrive: the same records and cross derivatives as from held ones, in less memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import nhgd
from nhgd._memory import peak_of
from nhgd._recording import streaming
from nhgd._recording.accounting import LayerCall
from nhgd._recording.lagged_cross import LaggedCross
from nhgd._recording.recorder import Recorder
from nhgd._recording.sampling import Sampling
from nhgd._recording.streaming import Arrivals, product
from nhgd._recording.weighing import Weighing
from nhgd.inverse import EKFAC, KFAC, FisherDiagonal, capabilities
from nhgd.objective import Objective
from tests import oracles
from tests.test_leaf_calls import IDS, NETS, Sequential, Tokens, made

NAMES = ["LayerNorm", "Embedding", "TransformerEncoderLayer", "Conv1d", "checkpointed", "LoRA of layers"]
NAMES += ["attention with keys of another width", "places of every sample", "RMSNorm"]
CONV = "convolution"
OWN: dict[str, Any] = dict(NETS)  # the others' own stay as they are
OWN[CONV] = (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(True), nn.Flatten(), nn.Linear(8, 3)), (5, 1, 3, 3))
NORMED = "batch norm"
OWN[NORMED] = (
    lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2), nn.ReLU(True), nn.Flatten(), nn.Linear(8, 3)),
    (5, 1, 3, 3),
)


def records(name: str, inverse: Any, sampling: Sampling | None, streams: bool, likelihood: str | None = None) -> Any:
    problem, batch = made(name, likelihood, OWN)
    recorder = Recorder(problem, "layer", inverse.fisher, couples=False)
    found = []
    for _ in range(2):
        recorder.sampling, recorder.streams = sampling, streams
        recorder.fold = capabilities.fold(inverse) if streams else None
        found.append(recorder.step(batch))
    return problem, found


@pytest.mark.parametrize("name", [*NAMES, CONV, NORMED])
@pytest.mark.parametrize("inverse", [KFAC(), KFAC(fisher="sampled"), FisherDiagonal(), EKFAC()], ids=repr)
@pytest.mark.parametrize("sampling", [None, Sampling(3, 2, 7), Sampling(None, 1, 7)], ids=["all", "some", "places"])
def test_streamed_statistics_equal_held_ones(name: str, inverse: Any, sampling: Any) -> None:
    states, gradients = [], []
    for streams in (False, True):
        torch.manual_seed(3)
        problem, steps = records(name, inverse, sampling, streams, "categorical")
        state = inverse.init(problem.theta)
        for step in steps:
            state = inverse.observe(state, step.record)
        states.append(state.tensors())
        gradients.append(steps[1].gradient)
        whole = name == NORMED and inverse.fisher == "empirical"  # scores of roots of weights take another pass
        if streams and sampling is None and inverse.name == "kfac" and not whole:
            assert steps[1].record.folded
            assert not steps[1].record.layers
    assert states[0].keys() == states[1].keys()
    for path, held in states[0].items():
        if "vectors" not in path:  # whose signs are free
            torch.testing.assert_close(states[1][path], held, rtol=1e-9, atol=1e-12)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [*NAMES, "tied", CONV])
def test_a_streamed_cross_derivative_equals_a_held_one(name: str) -> None:
    problem, batch = made(name, nets=OWN)
    x = torch.randn(problem.theta.numel, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    found = [Weighing(problem).cross(Objective(problem, batch, 0), at_once=early)(x) for early in (True, False)]
    assert [source for _, source in found] == ["scores", "scores"]
    for a, b in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def deep() -> tuple[nhgd.Bilevel, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())])
    x = torch.randn(256, 4, 32)

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses((net(batch[0]) - 1).square().mean((1, 2)), v[batch[1]])

    problem = nhgd.Bilevel(inner, lambda net, v, batch: net(batch[0]).sum(), net, torch.rand(256), 0.01)
    return problem, (x, torch.arange(256))


def peak(work: Any) -> int:
    work()  # layers are verified the first time
    return peak_of(work)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "turned"), [(300, torch.backends.mkl.is_available()), (100, False)])
def test_products_of_many_samples_are_taken_with_samples_last(rows, turned, bias, monkeypatch) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias).double()
    x, score = (torch.randn(rows, n, generator=generator).double() for n in (6, 4))
    along = {"weight": torch.randn(4, 6, generator=generator).double(), "bias": torch.ones(4).double()}
    wanted = (score * (x @ along["weight"].T + (1 if bias else 0))).sum(1)
    plain: list[int] = []
    linear = F.linear
    monkeypatch.setattr(streaming.F, "linear", lambda *given: plain.append(1) or linear(*given))
    call = LayerCall(layer, "weight", "bias" if bias else None, x, score.shape)
    torch.testing.assert_close(product(call, score, along), wanted, rtol=1e-12, atol=1e-12)
    assert bool(plain) != turned


def test_nothing_is_held_for_the_whole_model() -> None:
    """The score of every layer is as large as its input: held, they would double what a plain step needs."""
    problem, batch = deep()
    plain = peak(lambda: Objective(problem, batch).step())
    found = {}
    for streams in (False, True):
        recorder = Recorder(problem, "layer", couples=False)
        recorder.streams, recorder.fold = streams, KFAC().fold if streams else None
        found[streams] = peak(lambda recorder=recorder: recorder.step(batch))
    scores = 12 * 256 * 4 * 32 * 4
    assert found[True] < plain + scores / 2
    assert found[False] > found[True] + scores / 2


def test_a_cross_derivative_holds_no_scores() -> None:
    problem, batch = deep()
    x = torch.randn(problem.theta.numel)
    found = {}
    for early in (True, False):
        weighing = Weighing(problem)
        found[early] = peak(lambda w=weighing, e=early: w.cross(Objective(problem, batch, 0), at_once=e)(x))
    plain = peak(lambda: Objective(problem, batch).step())
    scores = 12 * 256 * 4 * 32 * 4
    assert found[False] < plain + scores / 4
    assert found[True] > found[False] + scores / 2


def test_a_layer_of_unknown_code_is_held() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    OWN["scaled"] = (lambda: Sequential(Scaled(4, 4)), (5, 3, 4))
    try:
        problem, batch = made("scaled", nets=OWN)
    finally:
        del OWN["scaled"]
    recorder = Recorder(problem, "layer", couples=False)
    recorder.streams, recorder.fold = True, KFAC().fold
    record: Any = recorder.step(batch).record
    assert not record.folded
    assert [layer.weight for layer in record.layers] == ["head.weight"]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
def test_a_run_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    use = Arrivals._use
    monkeypatch.setattr(Arrivals, "_use", lambda self, i, s: (used.append(i), use(self, i, s))[1])
    torch.manual_seed(0)
    net = Tokens().double()
    y = torch.arange(5) % 3

    def inner(net: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.cross_entropy(net(batch[0]), batch[1], reduction="none"), v[batch[2]].sigmoid())

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    problem = nhgd.Bilevel(inner, outer, net, torch.zeros(5).double(), 0.01)
    solver = nhgd.Solver(problem, [(IDS, y, torch.arange(5))], [(IDS, y)], inner_steps=2)
    solver.run(steps=2)
    assert used
    assert bool(problem.v.given.ne(0).all())


@pytest.mark.parametrize("name", [*NAMES, CONV])
def test_a_step_that_is_recorded_too_gives_the_whole_cross_derivative(name: str) -> None:
    """Scores of norms and tables are held for the record, and count in the products as those that were used do."""
    problem, batch = made(name, nets=OWN)
    x = torch.randn(problem.theta.numel, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    found = []
    for streams in (False, True):
        recorder = Recorder(problem, "layer", couples=False)
        recorder.streams, recorder.fold = streams, KFAC().fold if streams else None
        for _ in range(2):  # in the first step layers are verified, and all scores held
            lagged = LaggedCross(Weighing(problem, recorder), x)
            objective = Objective(problem, batch, 0)
            tap = lagged.tap(recording=True)
            objective.step(tap)
            lagged.take(objective, tap)
            assert tap.source == "scores"
            found.append(lagged.mean(lambda terms: terms)[0])
    with sdpa_kernel(SDPBackend.MATH):
        expected = oracles.cross(problem, batch).T @ x
    for one in found:
        torch.testing.assert_close(one.flatten(), expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(found[2], found[3])
