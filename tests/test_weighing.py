"""The cross derivative from plain passes, where v weighs samples or moves the ridge, against dense derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._recording.lagged_cross import LaggedCross
from nhgd._recording.recognition import recognise
from nhgd._recording.recorder import Recorder
from nhgd._recording.weighing import Weighing
from nhgd.algorithm import NHGD
from nhgd.inverse import CG, KFAC, FisherDense, FisherWindow, Identity, Refined
from nhgd.objective import Objective
from nhgd.problem import Bilevel
from nhgd.record import LayerStatistics
from tests import catalogue, oracles
from tests.catalogue.problems import Made, classes, mean_cross_entropy, normal
from tests.test_nhgd import outer_gradients, stepped


def seeded(make: Any) -> Any:
    def made() -> Made:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            return make()

    made.__name__ = make.__name__
    return made


def classifier(net: nn.Module, v: Any, weigh: Any, l2: Any = 0.02, shape: tuple[int, ...] = (3,)) -> Made:
    """Ten samples, weighed by `weigh(v, x, index)`."""
    features = int(torch.tensor(shape).prod())
    x, y = classes(10, features)
    a, b = classes(8, features)

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = model(x)
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weigh(v, x, i), z)

    problem = nhgd.Bilevel(inner, mean_cross_entropy, net.double(), v, l2=l2, likelihood="categorical")
    return problem, (x.reshape(-1, *shape), y, torch.arange(10)), (a.reshape(-1, *shape), b)


def own(v: Tensor, x: Tensor, i: Tensor) -> Tensor:
    return v[i]


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), *between, nn.Linear(4, 3))


@seeded
def zero_weights() -> Made:
    """Several weights are 0, one is next to nothing, and the others differ."""
    v = torch.rand(10, dtype=torch.float64)
    v[::3], v[1] = 0.0, 1e-300
    return classifier(nn.Linear(3, 3), v, own)


@seeded
def no_weight_at_all() -> Made:
    return classifier(mlp(), torch.zeros(10, dtype=torch.float64), own)


@seeded
def sequences() -> Made:
    net = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(4, 3))
    return classifier(net, torch.rand(10, dtype=torch.float64), own, shape=(6,))


@seeded
def grouped_convolution() -> Made:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2, groups=2, padding_mode="reflect"), nn.Flatten(), nn.Linear(16, 3)
    )
    return classifier(net, torch.rand(10, dtype=torch.float64), own, shape=(2, 3, 3))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(torch.tanh(self.a(x)))))


@seeded
def called_twice() -> Made:
    return classifier(Twice(), torch.rand(10, dtype=torch.float64), own)


@seeded
def weights_of_losses() -> Made:
    """Weights that a small net makes of the losses, held constant in theta; and a ridge for each layer."""
    x, y = classes(10)
    v = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        values = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return nhgd.Losses(values, v(values.detach()[:, None])[:, 0].exp())

    return nhgd.Bilevel(inner, mean_cross_entropy, mlp().double(), v, l2=0.02), (x, y), classes(8)


@seeded
def weights_and_ridges() -> Made:
    """v weighs the samples and holds a ridge for each layer."""
    v = {"w": torch.rand(10, dtype=torch.float64), "ridge": normal(2) - 3}
    names = ("0.weight", "0.bias", "2.weight", "2.bias")

    def l2(v: Any) -> dict[str, Tensor]:
        return {name: v["ridge"][int(name[0] == "2")].exp() for name in names}

    return classifier(mlp(), v, lambda v, x, i: v["w"][i], l2)


@seeded
def layer_norm() -> Made:
    return classifier(mlp(nn.LayerNorm(4)), torch.rand(10, dtype=torch.float64), own)


class Gained(nn.Module):
    """A gain beside layers, in a module that holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gain = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.body(x)


@seeded
def gain() -> Made:
    return classifier(Gained(), torch.rand(10, dtype=torch.float64), own)


@seeded
def tied() -> Made:
    """A weight that is used as a layer's and beside it."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.a(x)) @ self.a.weight

    return classifier(Tied(), torch.rand(10, dtype=torch.float64), own)


@seeded
def dropout() -> Made:
    return classifier(mlp(nn.Dropout(0.5)), torch.rand(10, dtype=torch.float64), own)


@seeded
def dropout_outside_layers() -> Made:
    return classifier(mlp(nn.Dropout(0.5), nn.LayerNorm(4)), torch.rand(10, dtype=torch.float64), own)


BY_SCORES = [
    zero_weights,
    no_weight_at_all,
    catalogue.mlp_module,
    catalogue.conv_net,
    catalogue.module_v,
    catalogue.frozen_layer,
    sequences,
    grouped_convolution,
    called_twice,
    weights_of_losses,
    weights_and_ridges,
    catalogue.ridge_tree,
    layer_norm,
    catalogue.batchnorm_eval,
]
FORWARD = [
    gain,
    tied,
    catalogue.batchnorm_train,
    catalogue.plain_tensor,
    catalogue.weighted_logistic,
]
PLAIN = BY_SCORES + FORWARD
BOX = (0.0, 9.0)  # for v where it is the weights


def vector(problem: Bilevel) -> Tensor:
    return torch.randn(problem.theta.numel, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


def dense(problem: Bilevel, batch: Any, x: Tensor) -> Tensor:
    """The cross derivative, transposed, times x by way of the whole matrix."""
    return oracles.cross(problem, batch).T @ x


@pytest.mark.parametrize("make", PLAIN, ids=lambda make: make.__name__)
def test_a_plain_pass_gives_the_dense_cross_derivative(make):
    problem, batch, _ = make()
    x = vector(problem)
    with oracles.undisturbed(problem):
        found, source = Weighing(problem).cross(Objective(problem, batch, 0))(x)
    torch.testing.assert_close(oracles.join(found), dense(problem, batch, x), rtol=1e-10, atol=1e-12)
    assert source == ("scores" if make in BY_SCORES or make is catalogue.ridge_scalar else "forward")


def in_step(problem: Bilevel, batch: Any, x: Tensor, recorder: Recorder | None = None) -> tuple[Any, Any, Any]:
    """An inner step with the cross derivative along x, its tap, and the mean over this one step."""
    lagged = LaggedCross(Weighing(problem, recorder), x)
    tap = lagged.tap(recording=recorder is not None)
    objective = Objective(problem, batch, 0)
    step = objective.step(tap)
    lagged.take(objective, tap)
    return step, tap, oracles.join(lagged.mean(lambda terms: terms))


@pytest.mark.parametrize("make", PLAIN, ids=lambda make: make.__name__)
def test_an_inner_step_gives_it_beside_the_same_gradient(make):
    problem, batch, _ = make()
    x = vector(problem)
    expected = dense(problem, batch, x)
    plain = Objective(problem, batch, 0).step()
    step, tap, found = in_step(problem, batch, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert tap.source == ("scores" if make in BY_SCORES else "forward")
    torch.testing.assert_close(step.value, plain.value, rtol=1e-14, atol=0)
    for one, other in zip(step.gradient, plain.gradient, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weigh", [own, lambda v, x, i: 1 * v[i]], ids=["index", "computed"])
def test_derivatives_of_indexed_weights_are_taken_together(weigh):
    """A sample may be in several batches, and only an index is held until the end."""
    problem, (x, y, i), _ = classifier(mlp(), normal(10).abs() + 0.1, weigh)
    batches = [(x[some], y[some], i[some]) for some in (torch.arange(6), torch.arange(3, 10), torch.arange(2, 5))]
    along = vector(problem)
    wanted = sum(dense(problem, batch, along) for batch in batches) / 3
    lagged = LaggedCross(Weighing(problem), along)
    for batch in batches:
        objective, tap = Objective(problem, batch, 0), lagged.tap(recording=False)
        objective.step(tap)
        assert (tap.pending is not None) == (weigh is own)
        lagged.take(objective, tap)
    found = oracles.join(lagged.mean(lambda terms: terms))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    part = lagged.tap(recording=False, whole=False)
    Objective(problem, batches[0], 0).step(part)
    assert part.pending is None  # its share of the step is not 1


@pytest.mark.parametrize(
    ("weigh", "in_passes", "unsorted"),
    [
        (own, True, True),
        (own, False, False),
        (lambda v, x, i: v[i // 4], True, False),  # samples that share a weight: the order of their sum matters
        (lambda v, x, i: v[i.clone()], True, False),
    ],
    ids=["samples", "any loader", "groups", "a copy"],
)
def test_indices_of_samples_need_no_order(monkeypatch, weigh, in_passes, unsorted):
    problem, (x, y, i), _ = classifier(mlp(), normal(10).abs() + 0.1, weigh)
    batches = [(x[some], y[some], i[some]) for some in (torch.arange(6), torch.arange(4, 10))]
    along = vector(problem)
    wanted = sum(dense(problem, batch, along) for batch in batches) / 2
    lagged = LaggedCross(Weighing(problem), along, in_passes=in_passes)
    for batch in batches:
        objective, tap = Objective(problem, batch, 0), lagged.tap(recording=False)
        objective.step(tap)
        assert tap.pending is not None
        lagged.take(objective, tap)
    taken, added = [], Tensor.index_add_
    monkeypatch.setattr(Tensor, "index_add_", lambda *given: taken.append(given) or added(*given))
    torch.testing.assert_close(oracles.join(lagged.mean(lambda terms: terms)), wanted, rtol=1e-10, atol=1e-12)
    assert bool(taken) is unsorted


def test_records_are_those_of_a_step_without_it():
    """Also of samples whose weight is 0 or next to nothing, which must not come to count by what stands in for it."""
    problem, batch, _ = zero_weights()
    plain = Objective(problem, batch, 0).step(Recorder(problem, "layer"))
    step, _, _ = in_step(problem, batch, vector(problem), Recorder(problem, "layer"))
    assert isinstance(step.record, LayerStatistics)
    assert isinstance(plain.record, LayerStatistics)
    (one,), (other,) = step.record.layers, plain.record.layers
    torch.testing.assert_close(one.scores, other.scores, rtol=1e-12, atol=1e-100)
    assert not one.scores[0, ::3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_of_no_weight_tells_its_product_in_few_digits_too(dtype):
    problem, batch, _ = zero_weights()
    x = vector(problem)
    expected = dense(problem, batch, x)
    net = nn.Linear(3, 3).to(dtype)
    net.load_state_dict(problem.theta.given.state_dict())
    low = nhgd.Bilevel(problem.inner, problem.outer, net, problem.v.given.to(torch.float32), l2=0.02)
    (_, tap, found) = in_step(low, (batch[0].to(dtype), *batch[1:]), x.to(dtype))
    assert tap.source == "scores"
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=20 * eps * float(expected.abs().max()))


@pytest.mark.parametrize("make", [dropout, dropout_outside_layers], ids=lambda make: make.__name__)
def test_dropout_is_that_of_the_step(make):
    problem, batch, _ = make()
    x = vector(problem)
    objective = Objective(problem, batch, 5)
    general = oracles.join(objective.cross(x))
    lagged = LaggedCross(Weighing(problem), x)
    tap = lagged.tap(recording=False)
    objective.step(tap)
    following = torch.rand(3)
    lagged.take(objective, tap)
    torch.testing.assert_close(oracles.join(lagged.mean(lambda t: t)), general, rtol=1e-10, atol=1e-12)
    objective.step()
    assert torch.equal(following, torch.rand(3))


def inside_losses() -> Made:
    problem, batch, outer = catalogue.mlp_module()

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        return nhgd.Losses(F.cross_entropy(model(x) * v[i, None].exp(), y, reduction="none"))

    return nhgd.Bilevel(inner, problem.outer, problem.theta.given, problem.v.given, l2=0.02), batch, outer


def weights_in_theta() -> Made:
    problem, batch, outer = catalogue.mlp_module()

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        values = F.cross_entropy(model(x), y, reduction="none")
        return nhgd.Losses(values, torch.sigmoid(v[i] - values))

    return nhgd.Bilevel(inner, problem.outer, problem.theta.given, problem.v.given, l2=0.02), batch, outer


class Straight(torch.autograd.Function):
    """A function whose backward pass is not its derivative, and which has no forward mode."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def without_forward_mode() -> Made:
    problem, batch, outer = gain()

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        return nhgd.Losses(F.cross_entropy(Straight.apply(10 * model(x)) / 10, y, reduction="none"), v[i])

    return nhgd.Bilevel(inner, problem.outer, problem.theta.given, problem.v.given, l2=0.02), batch, outer


GENERAL = [inside_losses, weights_in_theta, without_forward_mode]


@pytest.mark.parametrize("make", GENERAL, ids=lambda make: make.__name__)
def test_elsewhere_the_gradient_is_differentiated(make):
    problem, batch, _ = make()
    x = vector(problem)
    expected = dense(problem, batch, x)
    found, source = Weighing(problem).cross(Objective(problem, batch, 0))(x)
    assert source == "graph"
    torch.testing.assert_close(oracles.join(found), expected, rtol=1e-10, atol=1e-12)
    _, tap, found = in_step(problem, batch, x)
    assert tap.source == "graph"
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("in_step", [True, False])
def test_recognition(in_step):
    def role(make: Any) -> Any:
        problem, batch, _ = make()
        before = oracles.theta_of(problem), torch.get_rng_state()
        with oracles.undisturbed(problem):
            found = recognise(Weighing(problem), Objective(problem, batch), in_step)
        assert torch.equal(before[0], oracles.theta_of(problem))
        assert torch.equal(before[1], torch.get_rng_state())
        return found

    for make in PLAIN:
        found = role(make)
        assert found.note is None
        assert found.difference < 1e-10
        assert found.role == ("ridge" if make is catalogue.ridge_tree else "weights")
    for make in GENERAL:
        assert role(make).role == "other"
        assert role(make).note is not None


def test_a_difference_from_the_graph_is_seen():
    """A backward pass that is not the derivative: forward mode is right about another function than the gradient's."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * grad

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
            return tangent

    problem, batch, _ = gain()

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        return nhgd.Losses(F.cross_entropy(Doubled.apply(model(x)), y, reduction="none"), v[i])

    odd = nhgd.Bilevel(inner, problem.outer, problem.theta.given, problem.v.given, l2=0.02)
    found = recognise(Weighing(odd), Objective(odd, batch), in_step=True)
    assert (found.role, found.source) == ("other", "forward")
    assert found.difference == pytest.approx(0.5)
    assert "differs by 0.5" in str(found.note)


def by_hand(
    make: Any,
    box: bool,
    outer_steps: int,
    batches: int = 1,
    inner_steps: int = 3,
    inner_lr: float = 0.2,
    outer_lr: float = 0.1,
) -> Any:
    """NHGD whose cross derivative runs along the x of the outer step before, over the inner steps of one pass; the first
    two are taken at the end.
    """
    problem, inner, outer = make()
    theta, v = oracles.theta_of(problem), oracles.v_of(problem)
    observed: list[Tensor] = []
    x = None
    for k in range(outer_steps):
        along = []
        for _ in range(inner_steps):
            oracles.assign(problem.theta.given, theta)
            oracles.assign(problem.v.given, v)
            observed.append(oracles.fisher(problem, inner))
            along.append(oracles.cross(problem, inner, theta, v))
            theta = theta - inner_lr * oracles.gradient(problem, inner, theta, v)
        last, x = (
            x,
            torch.linalg.solve(
                torch.stack(observed).mean(0) + oracles.ridge_hessian(problem),
                outer_gradients(problem, outer, theta, v)[0],
            ),
        )
        in_v = outer_gradients(problem, outer, theta, v)[1]
        pulled = (
            oracles.cross(problem, inner, theta, v).T @ x
            if k < 2 or last is None
            else torch.stack(along[-batches:]).mean(0).T @ last
        )
        v = v - outer_lr * (in_v - pulled)
        v = v.clamp(*BOX) if box else v
    return v, theta


LAYERED = [zero_weights, catalogue.mlp_module, catalogue.conv_net, weights_and_ridges]


@pytest.mark.parametrize(
    ("make", "cross"),
    [*((make, cross) for make in LAYERED for cross in ("auto", "lagged")), (catalogue.plain_tensor, "lagged")],
)
def test_lagged_outer_steps_by_hand(make, cross):
    for steps, batches in ((1, 1), (3, 1), (4, 2), (3, 5)):
        inverse = FisherDense(form="matrix", update="average", warm="accumulate", damping=None)
        box = BOX if make is zero_weights else None
        v, theta, running = stepped(make, NHGD(inverse, cross=cross), steps, batches=batches, project_v=box)
        expected_v, expected_theta = by_hand(make, box is not None, steps, batches)
        torch.testing.assert_close(v, expected_v, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(theta, expected_theta, rtol=1e-10, atol=1e-12)
    told = running.solution().stats["cross"]
    assert told["way"] == "lagged"
    assert told["source"] == ("forward" if make is catalogue.plain_tensor else "scores")
    assert told["difference"] < 1e-10
    assert told["note"] is None


def test_auto_is_final_where_v_does_not_weigh_samples_or_theta_begins_anew():
    for make, method in (
        (inside_losses, NHGD()),
        (catalogue.plain_tensor, NHGD()),  # no layer has scores, so that each inner step would take a further pass
        (catalogue.ridge_tree, NHGD()),
        (catalogue.mlp_module, NHGD(warm_start=False)),
    ):
        v, _, running = stepped(make, method, 3)
        assert running.solution().stats["cross"]["way"] == "final"
        other = NHGD(cross="final", warm_start=method.warm_start)
        torch.testing.assert_close(v, stepped(make, other, 3)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", GENERAL, ids=lambda make: make.__name__)
def test_lagged_is_refused_where_it_cannot_be(make):
    with pytest.raises(nhgd.InputError, match="Use cross='final' or cross='trajectory'"):
        stepped(make, NHGD(Identity(), cross="lagged"))


@pytest.mark.parametrize("cross", ["final", "trajectory"])
@pytest.mark.parametrize("make", [zero_weights, weights_and_ridges, catalogue.plain_tensor])
def test_final_and_trajectory_need_no_graph_of_a_gradient(make, cross, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise AssertionError("a gradient was differentiated")

    box = BOX if make is zero_weights else None
    running = stepped(make, NHGD(FisherWindow(window=20), cross=cross), project_v=box)[2]  # it is verified here
    monkeypatch.setattr(Objective, "graph", refuse)
    monkeypatch.setattr(Objective, "pull_back", refuse)
    running.step()
    assert running.solution().stats["cross"]["way"] == cross


def drawn(cross: str, method: Any, steps: int = 3) -> tuple[list[int], Any]:
    """The inner batches that a run has drawn after each outer step."""
    problem, (x, y, i), outer = catalogue.mlp_module()
    batches = [(x[i % 5 == k], y[i % 5 == k], i[i % 5 == k]) for k in range(5)]
    running = nhgd.Solver(problem, batches, [outer], method=method, inner_steps=4)
    count, next_one = [0], running.loop.inner.next

    def counting() -> Any:
        count[0] += 1
        return next_one()

    running.loop.inner.next = counting  # type: ignore[method-assign]
    found = []
    for _ in range(steps):
        running.step()
        found.append(count[0])
    return found, running


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # the net is not convex
def test_batches_are_drawn_only_where_they_are_used():
    assert drawn("lagged", NHGD(cross="lagged"))[0] == [4, 8, 12]
    assert drawn("trajectory", NHGD(cross="trajectory"))[0] == [4, 8, 12]
    assert drawn("final", NHGD(cross="final"))[0] == [5, 10, 15]
    for cross in ("lagged", "trajectory"):
        for inverse in (Refined(KFAC(), steps=2), CG(steps=3)):
            assert drawn(cross, NHGD(inverse, cross=cross))[0] == [5, 10, 15]
        assert drawn(cross, NHGD(cross=cross, observe="end"))[0] == [5, 10, 15]


def test_a_cross_derivative_of_an_inner_step_is_no_gradient_of_its_own():
    """Four inner steps an outer one. The first two outer steps have no x to use before them, and pass over the last batch again."""
    _, running = drawn("lagged", NHGD(KFAC(damping=None, overhead=None), cross="lagged"))
    rows = [(row["inner_gradients"], row["cross"], row["hvps"]) for row in running.history]
    assert rows == [(5, 1, 0), (10, 2, 0), (14, 4, 0)]  # later, three products of a layer are one gradient's worth
    assert running.history[-1]["samples"] == 14 * 2
    method = NHGD(FisherDense(records="raw", form="inverse"), cross="lagged")
    for batches, lagged in ((1, 1), (3, 3), (9, 4)):  # the last steps, as many as a pass over the data has
        running = stepped(catalogue.plain_tensor, method, 3, inner_steps=4, batches=batches)[2]
        assert running.history[-1]["cross"] == 2 + lagged
        # A pass in forward mode counts as a gradient.
        assert running.history[-1]["inner_gradients"] == 3 * 4 + 2 + lagged


def test_the_first_outer_steps_take_the_cross_derivative_of_their_last_batch():
    inverse = FisherDense(form="matrix", update="average", warm="accumulate", damping=None)
    _, running = drawn("lagged", NHGD(inverse, cross="lagged"), steps=2)
    problem, (x, y, i), outer = catalogue.mlp_module()
    theta, v, observed = oracles.theta_of(problem), oracles.v_of(problem), []
    batches = [(x[i % 5 == k], y[i % 5 == k], i[i % 5 == k]) for k in range(5)]
    for k in range(2):
        for batch in [batches[(4 * k + t) % 5] for t in range(4)]:
            oracles.assign(problem.theta.given, theta)
            oracles.assign(problem.v.given, v)
            observed.append(oracles.fisher(problem, batch))
            theta = theta - 0.1 * oracles.gradient(problem, batch, theta, v)
        A = torch.stack(observed).mean(0) + oracles.ridge_hessian(problem)
        in_theta, in_v = outer_gradients(problem, outer, theta, v)
        v = v - 0.01 * (in_v - oracles.cross(problem, batch, theta, v).T @ torch.linalg.solve(A, in_theta))
    torch.testing.assert_close(oracles.v_of(running.problem), v, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [NHGD(inner="natural"), NHGD(Refined(KFAC(), steps=3)), NHGD(KFAC(fisher="exact"))])
@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
def test_every_kind_of_inner_step_can_lag(method):
    *_, running = stepped(catalogue.mlp_module, method, 12, inner_steps=4, outer_lr=0.3)
    assert running.solution().stats["cross"]["way"] == "lagged"
    losses = [row["outer_loss"] for row in running.history]
    assert losses[-1] < losses[0]


def test_a_closure_of_the_optimiser_takes_it_once():
    def lbfgs(leaves: Any) -> Any:
        return torch.optim.LBFGS(leaves, lr=0.1, max_iter=3)

    *_, running = stepped(catalogue.mlp_module, NHGD(), 3, inner_lr=None, inner_optimizer=lbfgs, batches=3)
    assert running.history[-1]["cross"] == 2 + 1


def test_autocast_recognises_it_too():
    problem, batch, outer = zero_weights()
    net = nn.Linear(3, 3)
    x, y, i = batch
    low = nhgd.Bilevel(problem.inner, problem.outer, net, problem.v.given.float(), l2=0.02)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        running = nhgd.Solver(
            low, [(x.float(), y, i)], [(outer[0].float(), outer[1])], method=NHGD(), inner_steps=2, project_v=BOX
        )
        running.step()
        running.step()
    told = running.solution().stats["cross"]
    assert (told["way"], told["source"]) == ("lagged", "scores")
    assert told["difference"] < 0.06


def test_autocast_inside_the_functions_is_recognised_without_outputs():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))
    x, y = torch.randn(40, 6), torch.randint(3, (40,))

    def losses(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = model(batch[0])
        return F.cross_entropy(z.float(), batch[1], reduction="none")

    problem = nhgd.Bilevel(
        lambda model, v, batch: nhgd.Losses(losses(model, batch), v[batch[2]].sigmoid()),
        lambda model, v, batch: losses(model, batch).mean(),
        net,
        torch.zeros(40),
    )
    running = nhgd.Solver(problem, [(x, y, torch.arange(40))], [(x, y)], NHGD(), inner_steps=2, inner_lr=0.1)
    running.step()
    told = running.solution().stats["cross"]
    assert (told["way"], told["role"], told["source"]) == ("lagged", "weights", "scores")
    assert 1e-3 < told["difference"] < 0.06  # rounding of bfloat16, above what float32 is allowed


def test_a_compiled_model_stays_compiled():
    problem, _, _ = catalogue.mlp_module()
    compiled = torch.compile(problem.theta.given, backend="eager")
    assert nhgd.Bilevel(problem.inner, problem.outer, compiled, problem.v.given).theta.is_compiled
    assert not problem.theta.is_compiled
