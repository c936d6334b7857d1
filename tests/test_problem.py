"""What a problem accepts, evaluates and refuses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd.oracle import Oracle
from nhgd.problem import UnusedWarning
from tests import oracles
from tests.catalogue import PROBLEMS, Make, batchnorm_train, mlp_module, normal, plain_tensor, weighted_logistic

X, Y = torch.ones(4, 3, dtype=torch.float64), torch.arange(4, dtype=torch.float64)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def problem(inner: Any = None, outer: Any = None, **options: Any) -> nhgd.Bilevel:
    """Least squares with one number as v, with the part under test replaced."""
    given = {"theta": normal(3), "v": normal()} | options
    return nhgd.Bilevel(
        inner or (lambda theta, v, batch: (batch[0] @ theta - batch[1]).square() * v.exp()),
        outer or (lambda theta, v, batch: (batch[0] @ theta - batch[1]).square().mean()),
        **given,
    )


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_the_objective_is_the_weighted_mean_plus_the_ridge(make: Make) -> None:
    made, inner_batch, outer_batch = make()
    with oracles.undisturbed(made), made.guarded():
        close(made.objective(inner_batch), oracles.objective(made, inner_batch))
        close(made.outer_value(outer_batch), oracles.outer(made, outer_batch))
        close(made.ridge_diagonal(), 2 * oracles.ridge(made).detach())


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_validation_disturbs_nothing(make: Make) -> None:
    made, inner_batch, outer_batch = make()
    with oracles.undisturbed(made):
        made.validate(inner_batch, outer_batch)


@pytest.mark.parametrize("make", PROBLEMS, ids=lambda make: make.__name__)
def test_other_leaves_are_seen(make: Make) -> None:
    made, batch, _ = make()
    theta, v = normal(made.theta.numel), normal(made.v.numel)
    with oracles.undisturbed(made), made.guarded():
        found = made.objective(batch, made.theta.unflatten(theta), made.v.unflatten(v))
    close(found, oracles.objective(made, batch, theta, v))


def test_weights_are_not_normalised() -> None:
    weights = torch.tensor([0.0, 1, 2, 5], dtype=torch.float64)
    made = problem(lambda theta, v, batch: (theta.sum().expand(4), weights))
    close(made.losses((X, Y)).mean(), 2 * made.theta.given.sum())


@pytest.mark.parametrize("returned", ["tensor", "tuple", "losses"])
def test_three_ways_to_return_losses(returned: str) -> None:
    def inner(theta: Tensor, v: Tensor, batch: Any) -> Any:
        values = (batch[0] @ theta - batch[1]).square()
        weights = torch.full((4,), 2.0, dtype=torch.float64) * v.exp()
        return {
            "tensor": weights * values,
            "tuple": (values, weights),
            "losses": nhgd.Losses(values, weights),
        }[returned]

    made = problem(inner)
    expected = 2 * made.v.given.exp() * (X @ made.theta.given - Y).square().mean()
    close(made.objective((X, Y)).detach(), expected)


# The ridge.


@pytest.mark.parametrize(
    "l2",
    [
        lambda v: v["scalar"],
        lambda v: {"w": v["w"], "b": v["b"]},
        lambda v: {"w": v["scalar"], "b": v["b"]},
        lambda v: {"w": v["b"][0, 0].expand(2, 3), "b": v["scalar"].reshape(1)},
    ],
)
def test_the_ridge_as_a_function(l2: Any) -> None:
    theta = {"w": normal(2, 3), "b": normal(1, 1)}
    v = {"scalar": normal().exp(), "w": normal(2, 3).exp(), "b": normal(1, 1).exp()}
    made = nhgd.Bilevel(lambda theta, v, batch: theta["w"].sum(1), lambda theta, v, batch: 0.0, theta, v, l2)
    tree = l2(v) if isinstance(l2(v), dict) else {"w": l2(v), "b": l2(v)}
    close(made.ridge().detach(), (tree["w"] * theta["w"] ** 2).sum() + (tree["b"] * theta["b"] ** 2).sum())
    close(made.ridge_diagonal(), 2 * oracles.ridge(made).detach())
    gradient = torch.autograd.grad(made.ridge(), made.theta.leaves)
    close(oracles.join(gradient), 2 * oracles.ridge(made).detach() * oracles.theta_of(made))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "0.1", None, torch.tensor(0.1), {"w": 0.1}])
def test_a_ridge_that_is_no_ridge(bad: Any) -> None:
    """A tensor is refused too: it would not follow v."""
    with pytest.raises(nhgd.InputError, match="l2 must be a number of at least 0 or a function of v such as"):
        problem(l2=bad)


def test_a_ridge_in_a_tensor_is_told_why_and_what_to_do() -> None:
    with pytest.raises(
        nhgd.InputError, match=r"got a Tensor. It would not follow v; for a constant .* pass float\(l2\)"
    ):
        problem(l2=torch.tensor(0.1))


@pytest.mark.parametrize("low", [-0.5, float("nan")])
def test_a_ridge_below_zero(low: float) -> None:
    made = problem(l2=lambda v: torch.tensor([1.0, low, 1.0], dtype=torch.float64) + 0 * v)
    with pytest.raises(nhgd.InputError, match=r"l2\(v\) is (-0.5|nan) for 'theta'.*exp\(\) or softplus\(\)"):
        made.validate((X, Y), (X, Y))


@pytest.mark.parametrize(
    ("l2", "sentence"),
    [
        (lambda v: {"a": v}, r"missing \['w', 'b'\], unknown \['a'\]"),
        (lambda v: {"w": v.expand(5), "b": v}, r"l2\(v\) has shape \(5,\) for 'w', which has shape \(2, 3\)"),
        (lambda v: v.expand(2), "must return a scalar Tensor, or one tensor for each parameter"),
        (lambda v: 1.0, "must return a scalar Tensor"),
    ],
)
def test_a_ridge_of_the_wrong_shape(l2: Any, sentence: str) -> None:
    made = problem(theta={"w": normal(2, 3), "b": normal(1)}, l2=l2)
    with pytest.raises(nhgd.InputError, match=sentence):
        made.ridge()


# Refusals of what the functions return.


@pytest.mark.parametrize(
    ("inner", "sentence"),
    [
        (lambda t, v, b: (b[0] @ t)[:, None], r"losses of shape \(4, 1\)"),
        (lambda t, v, b: b[0] * t * v, r"losses of shape \(4, 3\).*reduction='none'"),
        (lambda t, v, b: (b[0] @ t)[:3] * v, "returned 3 losses for a batch of 4 samples"),
        (lambda t, v, b: ((b[0] @ t), v.expand(3)), r"weights of shape \(3,\) for losses of shape \(4,\)"),
        (lambda t, v, b: ((b[0] @ t), v.expand(4, 1)), r"weights of shape \(4, 1\)"),
        (lambda t, v, b: ((b[0] @ t), 0.5), "weights of shape float"),
        (lambda t, v, b: ((b[0] @ t).mean(), v), "Weights need one loss for each sample"),
        (lambda t, v, b: ((b[0] @ t), -v.exp().expand(4)), r"weight of sample 0 of the batch is -.*project_v=\(0, 1\)"),
        (lambda t, v, b: None, "returned a NoneType"),
        (lambda t, v, b: [b[0] @ t], "returned a list"),
        (lambda t, v, b: torch.arange(4), "must return floating-point losses"),
        (lambda t, v, b: nhgd.Losses(b[0] @ t, outputs=t), r"Losses.outputs has shape \(3,\)"),
        (lambda t, v, b: (b[0] @ t) * v / (b[1] - 2).abs().sqrt(), "inner loss is (-?inf|nan) for sample 2"),
        (lambda t, v, b: ((b[0] @ t), v / (b[1] - 1)), "inner weight is (-?inf|nan) for sample 1"),
        (lambda t, v, b: (b[0] @ t.detach()) * v, "inner loss does not depend on theta.*without .detach"),
        (lambda t, v, b: b[1] + v.detach(), "inner loss does not depend on theta"),
        (lambda t, v, b: (b[0] @ t).square(), "v enters neither the inner nor the outer problem"),
        (lambda t, v, b: (b[0] @ t - b[0] @ t).abs().sqrt() + v, "finite, but its gradient contains nan or inf"),
    ],
)
@pytest.mark.parametrize("l2", [0.0, 0.1])
def test_refusals_of_the_inner_function(inner: Any, sentence: str, l2: float) -> None:
    with pytest.raises(nhgd.InputError, match=sentence):
        problem(inner, l2=l2).validate((X, Y), (X, Y))


@pytest.mark.parametrize(
    ("outer", "sentence"),
    [
        (lambda t, v, b: b[0] @ t, r"outer\(\) returned a tensor of shape \(4,\).*.mean\(\)"),
        (lambda t, v, b: 1.0, r"outer\(\) returned a float"),
        (lambda t, v, b: t.sum() / 0, "outer loss is (-?inf|nan) at the starting point"),
    ],
)
def test_refusals_of_the_outer_function(outer: Any, sentence: str) -> None:
    with pytest.raises(nhgd.InputError, match=sentence):
        problem(outer=outer).validate((X, Y), (X, Y))


def test_v_may_enter_anywhere() -> None:
    plain: Any = lambda t, v, b: (b[0] @ t - b[1]).square()  # noqa: E731
    problem(plain, l2=lambda v: v.exp()).validate((X, Y), (X, Y))
    problem(plain, lambda t, v, b: t.sum() * v).validate((X, Y), (X, Y))
    problem().validate((X, Y), (X, Y))


def test_a_bad_batch_is_named_with_its_row() -> None:
    bad = X.clone()
    bad[2, 1] = float("nan")
    with pytest.raises(nhgd.InputError, match=r"The inner batch contains nan or inf: tensor \[0\], row 2"):
        problem().validate((bad, Y), (X, Y))
    with pytest.raises(nhgd.InputError, match=r"The outer batch contains nan or inf: tensor \['x'\], row 2"):
        problem().validate((X, Y), {"x": bad, "y": Y})


@pytest.mark.parametrize(
    "inner",
    [
        lambda t, v, b: (b[0] @ t - b[1]).square() * v,  # torch fails to broadcast
        lambda t, v, b: (b[0] @ t).square() * v,  # y is not used at all
    ],
)
def test_uneven_batches(inner: Any) -> None:
    with pytest.raises(nhgd.InputError, match=r"different lengths: \[0\] has 4 rows, \[1\] has 3 rows"):
        problem(inner).validate((X, Y[:3]), (X, Y))


def test_errors_of_the_users_own_pass_through() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        problem(lambda t, v, b: b[0] @ t[:2] * v).validate((X, Y), (X, Y))


@pytest.mark.parametrize(
    "options",
    [{"likelihood": "categoric"}, {"likelihood": "softmax"}],
)
def test_an_unknown_likelihood(options: Any) -> None:
    with pytest.raises(
        nhgd.InputError, match=r"There is no likelihood called .* Known: bernoulli, categorical, gaussian"
    ):
        problem(**options)
    with pytest.raises(nhgd.InputError, match="Did you mean 'categorical'"):
        problem(likelihood="categoric")


def test_a_likelihood_is_looked_at_when_it_is_given() -> None:
    with pytest.raises(nhgd.InputError, match="likelihood must be text or a likelihood object"):
        problem(likelihood=object())
    assert problem(likelihood="gaussian").likelihood == nhgd.likelihood.Gaussian()


def test_theta_and_v_need_memory_of_their_own() -> None:
    both = normal(3)
    with pytest.raises(nhgd.InputError, match="theta and v share the memory of 'v'"):
        problem(theta=both, v=both)
    with pytest.raises(nhgd.InputError, match="theta and v share the memory of 'scale'"):
        problem(theta={"w": both}, v={"scale": both.view(3)})
    net = nn.Linear(2, 2)
    with pytest.raises(nhgd.InputError, match="share the memory of 'weight'"):
        problem(theta=net, v=net)


# What a guarded pass leaves alone.


def test_guarded_passes_replay_and_leave_the_generator_alone() -> None:
    made, _, _ = mlp_module()
    before = torch.get_rng_state()
    with made.guarded(seed=3):
        first = torch.rand(4)
    with made.guarded(seed=3):
        assert torch.equal(torch.rand(4), first)
    with made.guarded(seed=4):
        assert not torch.equal(torch.rand(4), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_guarded_pass_seeds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.manual_seed also reseeds every accelerator, whose state a run on the CPU does not keep."""
    made, _, _ = weighted_logistic()
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with made.guarded(seed=0):
        pass
    assert not seeded


def test_recurrent_layers_are_kept_off_kernels_without_a_second_derivative() -> None:
    recurrent = nhgd.Bilevel(lambda *a: None, lambda *a: None, nn.LSTM(2, 2), torch.zeros(1))
    plain, _, _ = weighted_logistic()
    for made, expected in ((recurrent, False), (plain, True)):
        with made.guarded():
            assert torch.backends.cudnn.enabled is expected
        assert torch.backends.cudnn.enabled


def test_the_generator_is_restored_after_an_exception() -> None:
    made, _, _ = weighted_logistic()
    before = torch.get_rng_state()
    with pytest.raises(IndexError), made.guarded(seed=0):
        torch.rand(3)[4]
    assert torch.equal(torch.get_rng_state(), before)


def test_outer_and_second_order_passes_do_not_touch_batch_statistics() -> None:
    made, inner_batch, outer_batch = batchnorm_train()
    point = Oracle(made, [inner_batch], outer_batch)
    norm, x = made.theta.given[0], normal(made.theta.numel)
    with oracles.undisturbed(made):
        point.outer()
        point.hvp(x)
        point.cross(x)
        point.gradient()
        point.empirical_fisher(x)
        point.ggn(x)
    assert norm.num_batches_tracked == 0
    assert torch.equal(norm.running_mean, torch.zeros(3, dtype=torch.float64))


def test_float32_stays_float32() -> None:
    made, batch, _ = plain_tensor()
    x, y, i = batch
    made = nhgd.Bilevel(made.inner, made.outer, made.theta.given.float(), made.v.given.float(), lambda v: v[0].exp())
    batch = (x.float(), y.float(), i)
    point = Oracle(made, [batch], batch[:2])
    for found in (point.outer().theta, point.hvp(made.theta.flat()), point.cross(made.theta.flat())[0], point.dense()):
        assert found.dtype == torch.float32
    assert made.objective(batch).dtype == made.ridge().dtype == made.ridge_diagonal().dtype == torch.float32


def test_losses_of_a_scalar_are_accepted() -> None:
    made = problem(lambda t, v, b: (b[0] @ t - b[1]).square().mean() * v.exp())
    made.validate((X, Y), (X, Y))
    assert not made.losses((X, Y)).per_sample
    close(made.objective((X, Y)).detach(), (X @ made.theta.given - Y).square().mean() * made.v.given.exp())


def test_a_compiled_module_is_known_by_its_own_names() -> None:
    net = nn.Linear(3, 2)
    made = nhgd.Bilevel(
        lambda m, v, b: F.cross_entropy(m(b[0]), b[1], reduction="none") * v,
        lambda m, v, b: v,
        torch.compile(net, backend="eager"),
        torch.ones(()),
    )
    assert made.theta.names == ("weight", "bias")
    assert made.theta.leaves[0] is net.weight


def test_the_ridge_as_one_number_is_what_stands_in_its_diagonal() -> None:
    def made(theta: Any, l2: Any) -> nhgd.Bilevel:
        def inner(theta: Any, v: Tensor, batch: Any) -> Tensor:
            total = theta if isinstance(theta, Tensor) else theta["a"].sum() + theta["b"].sum()
            return (total.sum() - v.sum()).square().reshape(1)

        return nhgd.Bilevel(inner, lambda theta, v, batch: inner(theta, v, batch).sum(), theta, torch.ones(2), l2=l2)

    for dtype in (torch.float32, torch.float64):
        for l2 in (0, 0.1, 3):
            problem = made(torch.zeros(3, dtype=dtype), l2)
            assert problem.ridge_diagonal().tolist() == [problem.ridge_number()] * 3
    assert made(torch.zeros(3), lambda v: v.exp().sum()).ridge_number() is None
    mixed = made({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, 0.1)
    assert mixed.ridge_number() is None


def test_inference_mode_is_named_as_the_cause() -> None:
    """Inside it nothing has a derivative, whatever inner() does."""
    from tests.catalogue import weighted_logistic

    problem, inner, outer = weighted_logistic()
    solver = nhgd.Solver(problem, [inner], [outer], method="aid-cg")
    with torch.inference_mode():
        for call in (
            lambda: problem.validate(inner, outer),
            lambda: nhgd.hypergradient(problem, inner, outer),
            lambda: nhgd.check(problem, inner, outer),
            lambda: nhgd.Solver(problem, [inner], [outer], method="aid-cg"),
            lambda: solver.run(steps=1),
            solver.step,
        ):
            with pytest.raises(nhgd.InputError, match=r"torch.inference_mode is on.*Leave that block"):
                call()
        born = torch.zeros(2)
    with pytest.raises(nhgd.InputError, match=r"theta was created inside torch.inference_mode.*clone\(\) it outside"):
        nhgd.Bilevel(lambda theta, v, x: (theta - v) * x, lambda theta, v, x: theta.sum(), born, torch.zeros(2))


# What is not used.


def used(names: tuple[str, ...], outer_names: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """Two losses that use these entries of v."""

    def inner(theta: Any, v: Any, batch: Any) -> Tensor:
        return (batch[0] @ theta["w"] - batch[1] - sum(v[name] for name in names)).square()

    def outer(theta: Any, v: Any, batch: Any) -> Tensor:
        return theta["w"].square().sum() + sum(v[name] ** 2 for name in outer_names)

    return inner, outer


def two_level(inner: Any, outer: Any, v: Any, theta: Any = None, **settings: Any) -> nhgd.Bilevel:
    theta = {"w": torch.zeros(3, dtype=torch.float64)} if theta is None else theta
    return nhgd.Bilevel(inner, outer, theta, v, **settings)


def entries(*names: str) -> dict[str, Tensor]:
    return {name: torch.zeros((), dtype=torch.float64) for name in names}


UNUSED = "v's 'c' enters neither the inner nor the outer problem, and will not change"


def test_an_unused_entry_of_v_is_said_once_and_stays() -> None:
    v = entries("a", "c")
    made = two_level(*used(("a",)), v, l2=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        nhgd.Solver(made, [(X, Y)], [(X, Y)], method="aid-cg").run(steps=3)
    assert [UNUSED in str(one.message) for one in said] == [True]
    assert said[0].category is UnusedWarning
    assert float(v["c"]) == 0.0
    assert float(v["a"]) != 0.0
    for function in (nhgd.check, nhgd.hypergradient):
        with pytest.warns(UnusedWarning, match=UNUSED) as noted:
            function(made, (X, Y), (X, Y), **({"inverses": ["cg"]} if function is nhgd.check else {"inverse": "cg"}))
        assert len(noted) == 1


def test_unused_parameters_of_a_module_are_named() -> None:
    v = torch.nn.Sequential(*(torch.nn.Linear(1, 1, dtype=torch.float64) for _ in range(4)))

    def inner(theta: Any, v: Any, batch: Any) -> Tensor:
        return (batch[0] @ theta["w"] - v[0](batch[1][:, None])[:, 0]).square()

    made = two_level(inner, used(())[1], v)
    with pytest.warns(UnusedWarning, match="'1.weight', '1.bias', '2.weight', '2.bias', '3.weight' and 1 more enter"):
        made.validate((X, Y), (X, Y))


def test_what_is_used_anywhere_or_frozen_is_not_said() -> None:
    """Warnings are errors here."""
    everywhere = two_level(*used(("a",), ("b",)), entries("a", "b", "c"), l2=lambda v: v["c"].exp())
    everywhere.validate((X, Y), (X, Y))
    frozen = {**entries("c"), "a": torch.zeros((), dtype=torch.float64, requires_grad=True)}
    two_level(*used(("a",)), frozen).validate((X, Y), (X, Y))
    idle = {"w": torch.zeros(3, dtype=torch.float64), "other": torch.zeros(2, dtype=torch.float64)}
    two_level(*used(("a",)), entries("a"), idle).validate((X, Y), (X, Y))  # in neither loss: it does no harm


def test_theta_that_only_the_outer_loss_uses_is_said_unless_a_ridge_holds_it() -> None:
    theta = {"w": torch.zeros(3, dtype=torch.float64), "head": torch.ones(2, dtype=torch.float64)}
    inner, _ = used(("a",))

    def outer(theta: Any, v: Any, batch: Any) -> Tensor:
        return theta["w"].square().sum() + theta["head"].square().sum()

    with pytest.warns(UnusedWarning, match="theta's 'head' enters the outer loss but not the inner one"):
        two_level(inner, outer, entries("a"), theta).validate((X, Y), (X, Y))
    two_level(inner, outer, entries("a"), theta, l2=0.1).validate((X, Y), (X, Y))


# What every method must notice.

EVERY = ["nhgd", "nhgd-window", "aid-cg", "aid-identity", "aid-exact", "soba", "f2sa", "bome", "itd", "saba", "ttsa"]


def regression(l2: Any, v: Tensor, weighted: bool) -> tuple[nhgd.Bilevel, list[Any], list[Any]]:
    """Least squares whose ridge, or whose weights, are v itself."""
    x, y = normal(12, 3), normal(12)

    def inner(net: Any, v: Tensor, batch: Any) -> Any:
        losses = 0.5 * (net(batch[0])[:, 0] - batch[1]) ** 2
        return (losses, v[batch[2]]) if weighted else losses

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return (net(batch[0])[:, 0] - batch[1]).square().mean()

    problem = nhgd.Bilevel(inner, outer, nn.Linear(3, 1).double(), v, l2)
    inner_data = [(x[c], y[c], torch.arange(12)[c]) for c in (slice(0, 6), slice(6, 12))]
    return problem, inner_data, [(x, 10 + y)]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("method", EVERY)
def test_a_ridge_that_becomes_negative_is_noticed(method: str) -> None:
    problem, inner_data, outer_data = regression(lambda v: v - 1, torch.tensor(1.01, dtype=torch.float64), False)
    solver = nhgd.Solver(
        problem, inner_data, outer_data, method=method, inner_lr=0.01, project_v=lambda v: torch.full_like(v, 0.9)
    )
    problem.v.given.fill_(1.01)  # the first step carries it below 1
    with pytest.raises(nhgd.InputError, match=r"l2\(v\) is -0\.\d+ for 'weight'; a ridge must be at least 0.*exp\(\)"):
        solver.run(steps=2)


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("method", EVERY)
def test_negative_weights_after_the_first_batch_are_noticed(method: str) -> None:
    v = torch.ones(12, dtype=torch.float64)
    v[8] = -0.2
    problem, inner_data, outer_data = regression(0.05, v, True)
    before = problem.v.flat()
    solver = nhgd.Solver(problem, inner_data, outer_data, method=method, inner_lr=0.01, inner_steps=2, outer_lr=1e-6)
    with pytest.raises(nhgd.InputError, match=r"(?i)weight.* is -0\.2\..*must be at least 0: clamp them"):
        solver.run(steps=3)
    torch.testing.assert_close(problem.v.flat(), before, rtol=0, atol=1e-3)


def test_negative_weights_of_a_later_batch_at_one_point() -> None:
    v = torch.ones(12, dtype=torch.float64)
    v[8] = -0.2
    problem, inner_data, outer_data = regression(0.05, v, True)
    for call in (nhgd.hypergradient, nhgd.check):
        options = {"inverse": "cg"} if call is nhgd.hypergradient else {"inverses": ["cg"]}
        with pytest.raises(nhgd.InputError, match=r"A weight of an inner batch is -0\.2"):
            call(problem, None, outer_data[0], inner_data=inner_data, **options)
        assert problem.lowest_weight() is None


def bags(kind: Any, **options: Any) -> nhgd.Bilevel:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = kind(5, 3, **options), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            found = self.words(x)
            return self.head(torch.tanh(found if found.ndim == 2 else found.mean(1)))

    def inner(net: Any, v: Tensor, batch: Any) -> Any:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="none"), v[batch[2]].sigmoid()

    def outer(net: Any, v: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1])

    return nhgd.Bilevel(inner, outer, Words().double(), torch.zeros(6, dtype=torch.float64), l2=0.1)


WORDS = torch.arange(12).reshape(6, 2) % 5, torch.arange(6) % 3, torch.arange(6)


@pytest.mark.parametrize("method", ["nhgd", "aid-cg", "f2sa", "soba", "itd"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_with_the_remedy(method: str, kind: Any) -> None:
    with pytest.raises(nhgd.InputError, match=r"gradient of 'words.weight' is sparse.*with sparse=False"):
        nhgd.Solver(bags(kind, sparse=True), [WORDS], [WORDS[:2]], method=method)


@pytest.mark.filterwarnings(
    "ignore:There is a performance drop", "ignore::nhgd.InverseWarning"
)  # the first of torch's vmap
@pytest.mark.parametrize("method", ["nhgd", "nhgd-window", "aid-cg", "soba", "itd", "aid-exact", "aid-nystrom"])
def test_what_has_no_second_derivative_is_refused_with_the_remedy(method: str) -> None:
    # The cross derivative in the sample weights needs one derivative in theta alone, so v enters the model too.
    problem = bags(nn.EmbeddingBag)
    inner = problem.inner
    problem.inner = lambda net, v, batch: inner(net, v, batch)[0] * (1 + v.mean() * net(batch[0]).square().sum(1))
    solver = nhgd.Solver(problem, [WORDS], [WORDS[:2]], method=method, inner_steps=2)
    with pytest.raises(
        nhgd.InputError, match=r"cannot differentiate the inner loss twice.*nn.Embedding and a mean.*f2sa"
    ):
        solver.run(steps=1)
    for first in ("f2sa", "bome"):
        nhgd.Solver(bags(nn.EmbeddingBag), [WORDS], [WORDS[:2]], method=first, inner_steps=2).run(steps=1)
