"""Automatic mixed precision: around the library, and inside the user's functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow
from nhgd.inverse._learned.learning import learn
from nhgd.oracle import Oracle

DIGITS = 2.0**-8  # of bfloat16


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Weigh(nn.Module):
    """An outer variable that is a module, whose Linear layer autocast casts too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, index: Tensor) -> Tensor:
        return self.layer(torch.cos(index[:, None] * torch.arange(1.0, 5.0)))[:, 0].float().sigmoid()


class Tokens(nn.Module):
    """Tables of tokens and of places, the first of which is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places, self.norm = nn.Embedding(4, 4), nn.Embedding(2, 4), nn.RMSNorm(4)
        self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        ids = (x.float() * 2).floor().long().remainder(4)
        z = self.norm(self.table(ids) + self.places(torch.arange(2)))
        return self.head(torch.tanh(self.layer(z))).mean(1)[:, :3]


class Small(nn.Module):
    """A transformer of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), (12, 3)),
    "conv": (lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3)), (12, 1, 4, 4)),
    "norm": (lambda: nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3)), (12, 3)),
    "transformer": (Small, (12, 2, 3)),
    "tokens": (Tokens, (12, 2)),
}


def made(
    name: str, inside: bool, v: str = "tensor", dtype: torch.dtype = torch.float32
) -> tuple[nhgd.Bilevel, Any, Any]:
    """Weighted classification, with autocast inside both functions or with none."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x, y = make().to(dtype), torch.randn(shape).to(dtype), torch.arange(12) % 3

    def model(net: Any, x: Tensor) -> Tensor:
        if not inside:
            return net(x)
        with bfloat16():
            return net(x)

    def weights(v: Any, index: Tensor) -> Tensor:
        if isinstance(v, Tensor):
            return v[index].sigmoid()
        if not inside:
            return v(index)
        with bfloat16():
            return v(index)

    def inner(net: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = model(net, x)
        return nhgd.Losses(F.cross_entropy(z.float(), y, reduction="none"), weights(v, i), z)

    def outer(net: Any, v: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(net, batch[0]).float(), batch[1])

    chosen = torch.zeros(12) if v == "tensor" else Weigh()
    problem = nhgd.Bilevel(inner, outer, net, chosen, l2=0.05, likelihood="categorical")
    return problem, (x, y, torch.arange(12)), (x[:6], y[:6])


METHODS = ["nhgd", "nhgd-window", "aid-identity", "aid-cg", "aid-ekfac", "soba", "itd", "f2sa"]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("v", ["tensor", "module"])
def test_autocast_around_a_run_is_autocast_inside_the_functions(method: str, v: str) -> None:
    """Bit for bit, so nothing else is rounded, and no cast of old weights is used."""
    results = []
    for inside in (True, False):
        problem, inner_batch, outer_batch = made("norm", inside, v)
        solver = nhgd.Solver(problem, [inner_batch], [outer_batch], method=method, inner_steps=3, outer_lr=1.0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            solver.run(steps=2)
            net: Any = problem.theta.given
            after = net(inner_batch[0])
        assert torch.is_autocast_cache_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            assert torch.equal(net(inner_batch[0]), after)  # the caller's next pass is not of old weights either
        results.append((problem.theta.flat(), problem.v.flat(), [row["outer_loss"] for row in solver.history]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert len(set(results[0][2])) == 2


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("inverse", ["kfac", "fisher_window", "cg", "exact"])
def test_autocast_around_a_hypergradient_and_a_check(inverse: str) -> None:
    found = []
    for inside in (True, False):
        problem, inner_batch, outer_batch = made("norm", inside)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            grad = nhgd.hypergradient(problem, inner_batch, outer_batch, inverse=inverse).grad
            row = nhgd.check(problem, inner_batch, outer_batch, inverses=[inverse]).rows[0]
            learnt = nhgd.Solver(problem, [inner_batch], [outer_batch], metrics=lambda net, v: {"m": float(v.sum())})
            assert learnt.step()["m"] == float(problem.v.given.sum())
        found.append((grad, row["cosine"], row["relative_error"]))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_records_under_autocast_are_those_of_float32_rounded(name: str, fisher: Any) -> None:
    for kind in ("sample", "layer"):
        records = []
        for inside in (True, False):
            problem, batch, _ = made(name, inside)
            records.append(Recorder(problem, kind, fisher).step(batch).record)  # type: ignore[arg-type]
        rounded, exact = records
        if kind == "sample":
            assert rounded.rows.dtype == torch.float32
            assert 0 < relative(rounded.rows, exact.rows) < 8 * DIGITS
            continue
        assert rounded.other_names == exact.other_names
        for ours, theirs in zip(rounded.layers, exact.layers, strict=True):
            assert ours.inputs.dtype == ours.scores.dtype == torch.float32
            assert relative(ours.inputs, theirs.inputs) < 6 * DIGITS
            assert relative(ours.scores, theirs.scores) < 8 * DIGITS
        if exact.other_rows is not None:
            assert relative(rounded.other_rows, exact.other_rows) < 8 * DIGITS


def test_the_sampled_fisher_under_autocast() -> None:
    """With many draws the mean is that of the exact one; at 400 draws its error is about 0.07, and below 0.2 but for one seed in 1e6."""
    problem, batch, _ = made("linear", inside=True)
    exact = Recorder(problem, "sample", "exact").step(batch).record.rows
    recorder, total = Recorder(problem, "sample", "sampled"), 0.0
    for _ in range(400):
        rows = recorder.step(batch).record.rows
        total = total + rows.T @ rows / 400
    assert relative(total, exact.T @ exact) < 0.2


@pytest.mark.parametrize("kind", ["batch", "raw"])
def test_batch_records_under_autocast(kind: Any) -> None:
    rows = []
    for inside in (True, False):
        problem, batch, _ = made("norm", inside)
        record = Recorder(problem, kind).step(batch).record
        rows.append(record.row if kind == "batch" else record.raw)
    assert rows[0].dtype == torch.float32
    assert relative(*rows) < 6 * DIGITS


INVERSES = [KFAC(), EKFAC(), FisherDense(), FisherWindow(), FisherDiagonal(), FisherWindow(records="sample")]


@pytest.mark.parametrize("name", NETS)
def test_every_learnt_inverse_under_autocast(name: str) -> None:
    """Statistics are in float32 at least, and those of the float32 model up to the digits that bfloat16 has."""
    for inverse in INVERSES:
        states = []
        for inside in (True, False):
            problem, batch, _ = made(name, inside)
            states.append(learn(inverse, problem, [batch, batch]).tensors())
        for path, tensor in states[0].items():
            if tensor.is_floating_point():
                assert tensor.dtype in (torch.float32, torch.float64), (inverse, path)
        floats = [p for p in states[1] if "bases" not in p and states[1][p].is_floating_point()]
        floats = [p for p in floats if float(states[1][p].norm()) > 0 and "vectors" not in p]
        assert floats
        for path in floats:
            assert relative(states[0][path], states[1][path]) < 12 * DIGITS, (inverse, path)


@pytest.mark.parametrize("name", NETS)
def test_products_under_autocast(name: str) -> None:
    found: list[list[Tensor]] = []
    for inside in (True, False):
        problem, inner_batch, outer_batch = made(name, inside)
        at = Oracle(problem, [inner_batch], outer_batch)
        x = torch.randn(at.numel, generator=torch.Generator().manual_seed(1))
        products = [at.hvp(x), at.ggn(x), at.empirical_fisher(x), *at.cross(x), at.gradient(), at.outer().theta]
        assert all(t.dtype == torch.float32 for t in products)
        found.append(products)
    for rounded, exact in zip(*found, strict=True):
        assert relative(rounded, exact) < 12 * DIGITS


def test_a_weight_used_elsewhere_through_the_copy_that_autocast_keeps() -> None:
    """Two uses in one pass share one cast of the weight, so the leaf itself has one use in the graph."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + F.linear(x.flip(1), self.a.weight)

    NETS["twice"] = (Twice, (12, 3))
    try:
        problem, batch, _ = made("twice", inside=True)
        reference, _, _ = made("twice", inside=False)
        record = Recorder(problem, "layer").step(batch).record
        assert record.other_names == ("a.weight", "a.bias")
        rows = [Recorder(p, "sample").step(batch).record.rows for p in (problem, reference)]
    finally:
        del NETS["twice"]
    assert relative(*rows) < 6 * DIGITS


@pytest.mark.parametrize("name", ["linear", "norm", "transformer", "tokens"])
def test_a_model_in_half_precision_has_statistics_of_float32(name: str) -> None:
    problem, batch, _ = made(name, inside=False, dtype=torch.bfloat16)
    reference, exact_batch, _ = made(name, inside=False)
    with torch.no_grad():
        for ours, theirs in zip(reference.theta.leaves, problem.theta.leaves, strict=True):
            ours.copy_(theirs)
    exact_batch = (batch[0].float(), *batch[1:])
    rows = [Recorder(p, "sample").step(b).record.rows for p, b in ((problem, batch), (reference, exact_batch))]
    assert rows[0].dtype == torch.float32
    assert relative(*rows) < 12 * DIGITS
    for inverse in INVERSES[:5]:
        state = learn(inverse, problem, [batch])
        kinds = {t.dtype for t in state.tensors().values() if t.is_floating_point()}
        assert kinds <= {torch.float32, torch.float64}


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("low", ["autocast", "parameters"])
@pytest.mark.parametrize("inverse", sorted(nhgd.inverse.INVERSES))
def test_hypergradients_of_every_inverse_in_few_digits(inverse: str, low: str) -> None:
    """Every inverse runs; those that solve a well-conditioned system agree with float64 up to their digits."""
    damped = {"damping": 1.0} if "damping" in nhgd.inverse.INVERSES[inverse].__dataclass_fields__ else {}
    chosen = nhgd.inverse.INVERSES[inverse](**damped)
    found = []
    for dtype in (torch.float64, torch.float32 if low == "autocast" else torch.bfloat16):
        problem, inner, outer = made("tokens", low == "autocast" and dtype is torch.float32, dtype=dtype)
        start = torch.linspace(-1, 1, problem.theta.numel).to(torch.bfloat16)
        problem.theta.assign(start.to(dtype))
        found.append(nhgd.hypergradient(problem, inner, outer, inverse=chosen).grad)
    assert torch.isfinite(found[1]).all()
    if damped and chosen.learner is not None:
        assert relative(found[1], found[0]) < 24 * DIGITS


@pytest.mark.parametrize("bias", [True, False])
def test_inputs_are_held_as_the_backward_pass_holds_them(bias: bool) -> None:
    """Under autocast in fewer digits, and not beside the original; with hooks of saved tensors as they were given."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.LayerNorm(6), nn.Linear(6, 5, bias=bias), nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 1, 1)
    ).float()
    image = nn.Conv2d(2, 3, 2)
    given: dict[str, Tensor] = {}
    net[0].register_forward_hook(lambda module, args, output: given.update(norm=output.detach()))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.image = net, image

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.net(x).flatten(1).sum(1).float() + self.image(y).flatten(1).sum(1).float()

    def inner(model: Any, v: Tensor, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return nhgd.Losses(model(*batch).square(), v.sigmoid().expand(len(batch[0])))

    problem = nhgd.Bilevel(inner, lambda m, v, b: v.sum(), Both(), torch.zeros(()))
    batch = (torch.randn(4, 6), torch.randn(4, 2, 3, 3))
    taps = Recorder(problem, "layer", couples=False).taps
    held = {call.weight: call.input for call in taps.forward(batch).calls}
    assert set(held) == {"net.1.weight", "image.weight"}
    assert all(x.dtype == torch.bfloat16 for x in held.values())
    assert torch.equal(held["net.1.weight"], given["norm"].bfloat16())
    assert torch.equal(held["image.weight"], batch[1].bfloat16())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        kept = {call.weight: call.input for call in taps.forward(batch).calls}
    assert torch.equal(kept["net.1.weight"], given["norm"])
    assert torch.equal(kept["image.weight"], batch[1])
