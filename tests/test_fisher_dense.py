"""The dense Fisher matrix and its rank-one inverse: equal to their definitions, and safe where the paper's are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.errors import InputError, NonFiniteError
from nhgd.inverse._learned.learning import learn
from nhgd.inverse.fisher_dense import DenseState, FisherDense
from nhgd.oracle import Oracle
from nhgd.record import BatchGradient, PerSampleGradients
from tests import catalogue, oracles
from tests.storage import stored

D = 50


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def oracle(size: int = D, l2: Any = 0.0) -> Oracle:
    """A point whose only use is its ridge."""
    problem = nhgd.Bilevel(
        lambda theta, v, batch: (batch @ theta - v).square(),
        lambda theta, v, batch: theta.sum(),
        torch.zeros(size, dtype=torch.float64),
        torch.ones(size, dtype=torch.float64),
        l2=l2,
    )
    return Oracle(problem, [torch.zeros(1, size, dtype=torch.float64)])


def per_sample(rows: Tensor) -> PerSampleGradients:
    return PerSampleGradients(rows, len(rows))


def taught(inverse: FisherDense, batches: Tensor) -> DenseState:
    state = inverse.init(oracle(batches.shape[2]).problem.theta)
    for rows in batches:
        state = inverse.observe(state, per_sample(rows))
    return state


def fisher(rows: Tensor) -> Tensor:
    return rows.T @ rows / len(rows)


def weights_of(inverse: FisherDense, steps: int) -> tuple[float, Tensor]:
    """The weight of the prior and of every observation, from the definition and not from a recursion."""
    ages = torch.arange(steps - 1, -1, -1, dtype=torch.float64)
    if inverse.update == "average":
        t0 = inverse.t0 if inverse.form == "inverse" else 0.0
        return t0 / (t0 + steps), torch.full((steps,), 1 / (t0 + steps), dtype=torch.float64)
    weights = (1 - inverse.beta) * inverse.beta**ages
    prior = inverse.beta**steps
    return (prior, weights) if inverse.form == "inverse" else (0.0, weights / (1 - prior))


def definition(inverse: FisherDense, batches: Tensor) -> Tensor:
    """What F, or the inverse of A, is by definition after these batches."""
    prior, weights = weights_of(inverse, len(batches))
    total = torch.einsum("t,tbd,tbe->de", weights, batches, batches) / batches.shape[1]
    return total + prior * inverse.prior * torch.eye(batches.shape[2], dtype=torch.float64)


def error(found: Tensor, true: Tensor) -> float:
    return float((found - true).norm() / true.norm())


UPDATES = [{"update": "average"}, {"update": "average", "t0": 3.0}, {"update": "ema", "beta": 0.99}]
FORMS = ["matrix", "inverse"]


@pytest.mark.parametrize("options", UPDATES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [1, 7, 80])
def test_a_few_steps_equal_the_definition(form: Any, options: Any, batch: int) -> None:
    inverse = FisherDense(form=form, prior=0.5, **options)
    batches = normal(4, batch, D)
    matrix = taught(inverse, batches).matrix
    true = definition(inverse, batches)
    assert error(matrix, torch.linalg.inv(true) if form == "inverse" else true) < 1e-12
    assert torch.equal(matrix, matrix.T) if form == "inverse" else error(matrix.T, matrix) < 1e-15


@pytest.mark.parametrize("options", UPDATES)
@pytest.mark.parametrize("form", FORMS)
def test_two_thousand_full_rank_steps_equal_the_definition(form: Any, options: Any) -> None:
    inverse = FisherDense(form=form, **options)
    batches = normal(2000, 1, D) * torch.linspace(0.3, 3, D, dtype=torch.float64)
    at, u = oracle(l2=0.05), normal(D, seed=1)
    x, stats = inverse.apply(taught(inverse, batches), u, at)
    true = definition(inverse, batches)
    if form == "matrix":
        true = true + 0.1 * torch.eye(D, dtype=torch.float64)
    assert error(x, torch.linalg.solve(true, u)) < 1e-8
    assert (stats.residual, stats.hvps, stats.converged) == (None, 0, True)
    assert stats.notes["observed"] == 2000


def test_average_is_the_papers_rank_one_update_with_a_prior_worth_t0() -> None:
    inverse = FisherDense(form="inverse", update="average", records="batch", t0=2)
    state = inverse.init(oracle(5).problem.theta)
    a = torch.eye(5, dtype=torch.float64)
    for t, g in enumerate(normal(6, 5), start=2):
        p = a @ g
        a = (t + 1) / t * a - (t + 1) / t**2 * torch.outer(p, p) / (1 + g.dot(p) / t)
        state = inverse.observe(state, BatchGradient(g, 7 * g, 4))
        torch.testing.assert_close(state.matrix, a, rtol=1e-12, atol=0)


def test_ema_is_the_papers_smoothed_update_of_the_raw_gradient() -> None:
    inverse = FisherDense(form="inverse", update="ema", beta=0.8, records="raw")
    state = inverse.init(oracle(5).problem.theta)
    a = torch.eye(5, dtype=torch.float64)
    for g in normal(6, 5):
        p = a @ g
        a = a / 0.8 - 0.2 / 0.64 * torch.outer(p, p) / (1 + 0.25 * g.dot(p))
        state = inverse.observe(state, BatchGradient(None, g, 4))
        torch.testing.assert_close(state.matrix, a, rtol=1e-12, atol=0)


def test_the_first_step_is_defined() -> None:
    # The printed weights divide by t = 0.
    state = FisherDense(form="inverse").init(oracle(3).problem.theta)
    state = FisherDense(form="inverse").observe(state, per_sample(torch.eye(3, dtype=torch.float64)[:1]))
    torch.testing.assert_close(state.matrix, torch.diag(torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)))


def test_the_matrix_needs_no_prior_and_corrects_the_bias_of_its_start() -> None:
    batches = normal(1, 6, 4)
    for options in UPDATES:
        assert error(taught(FisherDense(**options), batches).matrix, fisher(batches[0])) < 1e-14


# What the ridge and the damping do.


@pytest.mark.parametrize("l2", [0.1, lambda v: 0.05 + v.square().cumsum(0) / 10])
@pytest.mark.parametrize("damping", [None, 0.0, 0.3])
def test_ridge_and_damping_are_exact(l2: Any, damping: float | None) -> None:
    batches, u, at = normal(3, 4, 8), normal(8, seed=1), oracle(8, l2)
    x, stats = FisherDense(damping=damping).apply(taught(FisherDense(), batches), u, at)
    shifted = definition(FisherDense(), batches) + oracles.ridge_hessian(at.problem)
    shifted += (damping or 0.0) * torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(x, torch.linalg.solve(shifted, u), rtol=1e-12, atol=1e-12)
    assert stats.notes["damping"] == (damping or 0.0)


def test_without_a_ridge_the_damping_is_a_share_of_the_mean_diagonal() -> None:
    batches, u = normal(3, 4, 8), normal(8, seed=1)
    x, stats = FisherDense().apply(taught(FisherDense(), batches), u, oracle(8))
    true = definition(FisherDense(), batches)
    damping = 1e-3 * float(true.diagonal().mean())
    assert stats.notes["damping"] == pytest.approx(damping, rel=1e-12)
    shifted = true + damping * torch.eye(8, dtype=torch.float64)
    assert error(x, torch.linalg.solve(shifted, u)) < 1e-10


def test_the_ridge_is_not_in_the_fisher_matrix() -> None:
    # Trap: 2 lambda theta is part of the gradient an optimiser sees, and its outer product is no curvature.
    problem, inner_batch, _ = catalogue.weighted_logistic()
    plain = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given, l2=0.0)
    f = oracles.fisher(plain, inner_batch)
    for given in (problem, plain):
        torch.testing.assert_close(learn(FisherDense(), given, [inner_batch]).matrix, f, rtol=1e-12, atol=1e-14)
    u = normal(problem.theta.numel)
    x, _ = FisherDense().apply(learn(FisherDense(), problem, [inner_batch]), u, Oracle(problem, [inner_batch]))
    torch.testing.assert_close(f @ x + 0.1 * x, u)


def test_weights_enter_once_not_squared() -> None:
    problem, inner_batch, _ = catalogue.weighted_logistic()
    values, weights, _ = oracles.losses(problem, inner_batch)
    s = oracles.scores(problem, inner_batch)
    once = torch.einsum("b,bd,be->de", weights, s, s) / len(values)
    found = learn(FisherDense(), problem, [inner_batch]).matrix
    torch.testing.assert_close(found, once.detach(), rtol=1e-12, atol=1e-14)
    with pytest.raises(InputError, match="square them"):
        learn(FisherDense(records="batch"), problem, [inner_batch])
    state = learn(FisherDense(records="raw"), problem, [inner_batch])  # literal by definition
    g = oracles.gradient(problem, inner_batch)
    torch.testing.assert_close(state.matrix, torch.outer(g, g), rtol=1e-10, atol=1e-14)


def at_the_optimum_of_least_squares() -> tuple[nhgd.Bilevel, Tensor, Tensor]:
    x, y = normal(10, 3), normal(10, seed=1)
    problem = nhgd.Bilevel(
        lambda theta, v, batch: 0.5 * (batch[0] @ theta - batch[1]).square(),
        lambda theta, v, batch: theta.sum() + v,
        torch.linalg.lstsq(x, y[:, None]).solution[:, 0],
        torch.ones((), dtype=torch.float64),
    )
    return problem, x, y


def test_a_batch_gradient_estimates_f_when_scaled_and_f_over_b_when_not() -> None:
    # All 100 pairs of 10 samples, so that the mean over batches of two is an expectation and holds exactly.
    problem, x, y = at_the_optimum_of_least_squares()
    f = oracles.fisher(problem, (x, y))
    pairs = torch.cartesian_prod(torch.arange(10), torch.arange(10))
    batches = [(x[pair], y[pair]) for pair in pairs]
    torch.testing.assert_close(learn(FisherDense(), problem, batches).matrix, f, rtol=1e-10, atol=1e-12)
    scaled = learn(FisherDense(records="batch"), problem, batches).matrix
    torch.testing.assert_close(scaled, f, rtol=1e-10, atol=1e-12)
    raw = learn(FisherDense(records="raw"), problem, batches).matrix
    torch.testing.assert_close(raw, f / 2, rtol=1e-10, atol=1e-12)


def test_a_full_batch_gradient_at_the_optimum_says_nothing() -> None:
    problem, x, y = at_the_optimum_of_least_squares()
    assert float(learn(FisherDense(records="raw"), problem, [(x, y)]).matrix.norm()) < 1e-25
    assert error(learn(FisherDense(), problem, [(x, y)]).matrix, oracles.fisher(problem, (x, y))) < 1e-12


@pytest.mark.parametrize("make", [catalogue.mlp_module, catalogue.plain_tensor, catalogue.weighted_logistic])
def test_the_exact_fisher_matrix_is_the_ggn(make: Any) -> None:
    problem, inner_batch, _ = make()
    state = learn(FisherDense(fisher="exact"), problem, [inner_batch])
    torch.testing.assert_close(state.matrix, oracles.ggn(problem, inner_batch), rtol=1e-10, atol=1e-12)


# What a new outer step begins from.


@pytest.mark.parametrize("update", ["average", "ema"])
@pytest.mark.parametrize("form", FORMS)
def test_begin_carries_over_as_asked(form: Any, update: Any) -> None:
    first, second = normal(5, 3, 6), normal(4, 3, 6, seed=1)
    for warm in ("prior", "accumulate", "reset"):
        inverse = FisherDense(form=form, update=update, warm=warm, t0=2, beta=0.7)
        state = inverse.begin(taught(inverse, first))
        for rows in second:
            state = inverse.observe(state, per_sample(rows))
        found = torch.linalg.inv(state.matrix) if form == "inverse" else state.matrix
        if warm == "reset":
            true = definition(inverse, second)
        elif warm == "accumulate" or (form == "inverse" and update == "ema"):
            true = definition(inverse, torch.cat([first, second]))
        else:
            # The last estimate stands for two observations before the four new ones.
            new = [fisher(rows) for rows in second]
            decay = 1.0 if update == "average" else 0.7
            weights = [sum(decay**a for a in (4, 5)), *(decay**a for a in (3, 2, 1, 0))]
            mixed = [definition(inverse, first), *new]
            true = sum(w * m for w, m in zip(weights, mixed, strict=True)) / sum(weights)
        assert error(found, true) < 1e-11
        assert state.observed == 9


def test_reset_averages_the_current_inner_loop_alone() -> None:
    # Theorem 1 averages the current T gradients; what came before has no weight.
    inverse = FisherDense(warm="reset")
    state = inverse.begin(taught(inverse, 1e6 * normal(5, 3, 6)))
    rows = normal(3, 6, seed=1)
    assert error(inverse.observe(state, per_sample(rows)).matrix, fisher(rows)) < 1e-14


def test_a_single_observation_is_not_carried_over_as_many() -> None:
    inverse = FisherDense(warm="prior", t0=100)
    rows = normal(2, 3, 6)
    state = inverse.begin(taught(inverse, rows[:1]))
    assert error(inverse.observe(state, per_sample(rows[1])).matrix, definition(inverse, rows)) < 1e-14


# The guard.


def rank_ten(steps: int) -> tuple[Tensor, Tensor]:
    """Gradients in ten of fifty dimensions, rounded to float32, and a basis of where they lie."""
    basis = torch.linalg.qr(normal(D, 10))[0]
    return (normal(steps, 1, 10, seed=1) @ basis.T).float(), basis


def test_the_literal_ema_overflows_in_float32_and_the_guard_stops_it_before() -> None:
    batches, _ = rank_ten(2000)
    a = torch.eye(D)
    literal = None
    for t, g in enumerate(batches[:, 0]):
        p = a @ g
        a = a / 0.8 - 0.2 / 0.64 * torch.outer(p, p) / (1 + 0.25 * g.dot(p))
        if not bool(torch.isfinite(a).all()):
            literal = t
            break
    assert literal is not None
    inverse = FisherDense(form="inverse", update="ema", beta=0.8, dtype=torch.float32)
    state = inverse.init(oracle().problem.theta)
    message = ""
    for rows in batches[:literal]:
        try:
            state = inverse.observe(state, per_sample(rows))
        except NonFiniteError as caught:
            message = str(caught)
            break
        assert bool(torch.isfinite(state.matrix).all())
    assert f"observation {state.observed + 1} the inverse has wound up" in message
    assert "by 1.25 in" in message
    assert "form='matrix' or fisher_window" in message


def test_an_inner_loop_that_diverges_is_not_called_wound_up() -> None:
    """Ridge regression whose ridge has become so strong that gradient steps overshoot."""
    torch.manual_seed(0)
    x, target = normal(20, 4), normal(20, seed=1)
    problem = nhgd.Bilevel(
        lambda theta, v, batch: (batch[0] @ theta - batch[1]).square(),
        lambda theta, v, batch: (batch[0] @ theta - batch[1]).square().mean(),
        torch.ones(4, dtype=torch.float64),
        torch.full((4,), 9.0, dtype=torch.float64),
        l2=lambda v: v.exp(),
    )
    solver = nhgd.Solver(problem, [(x, target)], [(x, target)], method="nhgd-paper", inner_lr=0.1)
    with pytest.raises(
        NonFiniteError, match=r"times as long as those before it, so the inner loop diverges\. Lower"
    ) as caught:
        solver.run(steps=1)
    assert "wound up" not in str(caught.value)
    assert "form='matrix'" not in str(caught.value)


@pytest.mark.parametrize(("sizes", "cause"), [((1.0, 1e5, 1e10), "diverges"), ((1e7,), "should the prior be (now 1)")])
def test_gradients_that_outgrow_the_prior_are_told_from_an_inverse_that_winds_up(
    sizes: tuple[float, ...], cause: str
) -> None:
    inverse = FisherDense(form="inverse", update="ema", beta=0.8, records="raw")
    state = inverse.init(oracle().problem.theta)
    with pytest.raises(NonFiniteError) as caught:  # noqa: PT012
        for size in sizes:
            row = size * normal(D)
            state = inverse.observe(state, BatchGradient(None, row, 1))
    assert cause in str(caught.value)
    assert "wound up" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_guard_can_restart_from_the_prior(dtype: torch.dtype) -> None:
    batches, _ = rank_ten(400)
    inverse = FisherDense(form="inverse", update="ema", beta=0.8, dtype=dtype, guard="restart")
    state, at, u = inverse.init(oracle().problem.theta), oracle(), normal(D)
    before = 0
    for rows in batches:
        state = inverse.observe(state, per_sample(rows))
        assert bool(torch.isfinite(inverse.apply(state, u, at)[0]).all())
        if state.restarts > before:
            assert torch.equal(state.matrix, torch.eye(D, dtype=dtype))
            before = state.restarts
    assert before > 0
    assert inverse.apply(state, u, at)[1].notes["restarts"] == before
    assert state.observed == 400


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("options", UPDATES)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_low_rank_are_right_where_they_lie_or_stopped(form: Any, options: Any, scale: float) -> None:
    batches, basis = rank_ten(2000)
    batches = batches * scale
    inverse = FisherDense(form=form, prior=scale**2, **options)
    at, u = oracle(l2=0.05 * scale**2), basis @ normal(10, seed=2)
    try:
        x, _ = inverse.apply(taught(inverse, batches), u, at)
    except NonFiniteError:
        assert form == "inverse"
        assert inverse.update == "ema"
        return
    true = definition(inverse, batches.double())
    if form == "matrix":
        true += 0.1 * scale**2 * torch.eye(D, dtype=torch.float64)
    assert error(basis.T @ x, basis.T @ torch.linalg.solve(true, u)) < 1e-3


@pytest.mark.parametrize(("dtype", "beta"), [(torch.float64, 0.8), (torch.float64, 0.9), (torch.float32, 0.9)])
def test_until_the_guard_acts_the_inverse_is_right(dtype: torch.dtype, beta: float) -> None:
    batches, basis = rank_ten(400)
    inverse = FisherDense(form="inverse", update="ema", beta=beta, dtype=dtype)
    state = inverse.init(oracle().problem.theta)
    true = torch.eye(10, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match="wound up"):  # noqa: PT012
        for rows in batches:
            state = inverse.observe(state, per_sample(rows))
            inside = rows.double() @ basis
            true = beta * true + (1 - beta) * inside.T @ inside
            assert error(basis.T @ state.matrix.double() @ basis, torch.linalg.inv(true)) < 1e-3
    assert state.observed > 20


def test_nothing_non_finite_gets_through() -> None:
    bad = torch.ones(2, 4)
    bad[1, 2] = torch.inf
    for form in FORMS:
        inverse = FisherDense(form=form, guard="restart")
        state = inverse.init(oracle(4).problem.theta)
        with pytest.raises(NonFiniteError, match="observation 1 contains nan or inf"):
            inverse.observe(state, per_sample(bad))
        with pytest.raises(NonFiniteError, match="solution"):
            inverse.apply(state, torch.full((4,), torch.nan), oracle(4, 0.1))


# Manners.


def test_before_any_observation_there_is_the_prior_or_the_ridge() -> None:
    u = normal(4)
    for inverse, l2, true in (
        (FisherDense(form="inverse", prior=0.5), 0.0, u / 0.5),
        (FisherDense(), 0.1, u / 0.2),
        (FisherDense(damping=0.5), 0.0, u / 0.5),
    ):
        x, _ = inverse.apply(inverse.init(oracle(4).problem.theta), u, oracle(4, l2))
        torch.testing.assert_close(x, true)
    with pytest.raises(InputError, match=r"observed no inner step yet.*l2 above 0, or pass damping"):
        FisherDense().apply(FisherDense().init(oracle(4).problem.theta), u, oracle(4))


def test_a_singular_matrix_is_refused() -> None:
    inverse = FisherDense(damping=0.0)
    with pytest.raises(InputError, match="larger damping"):
        inverse.apply(taught(inverse, torch.zeros(1, 2, 4, dtype=torch.float64)), normal(4), oracle(4))


@pytest.mark.parametrize("form", FORMS)
def test_solve_is_linear_symmetric_and_pure(form: Any) -> None:
    inverse, at = FisherDense(form=form), oracle(8, 0.05)
    state = taught(inverse, normal(5, 3, 8))
    before = state.clone()
    a, b = normal(8, seed=1), normal(8, seed=2)
    xa, xb = inverse.apply(state, a, at)[0], inverse.apply(state, b, at)[0]
    torch.testing.assert_close(inverse.apply(state, 2 * a - b, at)[0], 2 * xa - xb)
    torch.testing.assert_close(a.dot(xb), b.dot(xa))
    for name, tensor in state.tensors().items():
        assert torch.equal(tensor, before.tensors()[name])
    assert at.calls.hvps == 0


@pytest.mark.parametrize("form", FORMS)
def test_the_state_moves_and_saves(form: Any) -> None:
    inverse = FisherDense(form=form, update="ema")
    state = taught(inverse, normal(5, 3, 8))
    loaded = stored(state.to("cpu"))
    rows = normal(3, 8, seed=1)
    copy = state.clone()
    one, two = inverse.observe(state, per_sample(rows)), inverse.observe(loaded, per_sample(rows))
    assert torch.equal(one.matrix, two.matrix)
    assert replace(one, matrix=None) == replace(two, matrix=None)
    assert not torch.equal(copy.matrix, one.matrix)


def test_float64_by_default_whatever_theta_is() -> None:
    problem = nhgd.Bilevel(lambda t, v, x: x @ t * v, lambda t, v, x: t.sum(), torch.zeros(3), torch.ones(()), l2=0.1)
    at = Oracle(problem, [torch.ones(2, 3)])
    state = learn(FisherDense(), problem, [torch.ones(2, 3)])
    assert state.matrix.dtype == torch.float64
    x, _ = FisherDense().apply(state, torch.ones(3), at)
    assert x.dtype == torch.float32


def test_memory_is_at_least_the_state() -> None:
    theta = oracle(20).problem.theta
    for form in FORMS:
        held = FisherDense(form=form).init(theta).matrix
        assert held.numel() * held.element_size() <= FisherDense(form=form).memory(theta)
    with pytest.raises(InputError, match=r"20 x 20 array.*fisher_window or kfac, or raise max_dim"):
        FisherDense(max_dim=19).init(theta)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"beta": 0.0}, "beta must lie between 0 and 1.*update='average'"),
        ({"beta": 1.0}, "beta must lie between 0 and 1"),
        ({"t0": 0.5}, "t0.*at least 1"),
        ({"prior": 0.0}, "prior must be above 0"),
        ({"limit": -1.0}, "limit must be above 0"),
        ({"damping": -1.0}, "damping must be 0 or more"),
        ({"form": "inverse", "damping": 0.1}, "form='inverse' cannot hold a constant damping.*form='matrix'"),
        ({"form": "matrx"}, "Did you mean 'matrix'"),
        ({"update": "mean"}, "Known: average, ema"),
        ({"warm": "cold"}, "Known: accumulate, prior, reset"),
        ({"guard": "halt"}, "Known: restart, stop"),
        ({"records": "layer"}, "Known: batch, raw, sample"),
        ({"fisher": "true"}, "Known: auto, empirical, exact, sampled"),
        ({"fisher": "exact", "records": "batch"}, "needs per-sample gradients.*records='sample'"),
        ({"fisher": "exact", "records": "raw"}, "needs per-sample gradients"),
        ({"dtype": torch.float16}, "torch.float64 or torch.float32"),
    ],
)
def test_bad_settings_are_refused_with_the_remedy(options: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        FisherDense(**options)


def test_a_record_of_another_kind_is_refused() -> None:
    problem, inner_batch, _ = catalogue.ridge_scalar()
    record = Recorder(problem, "layer").step(inner_batch).record
    with pytest.raises(InputError, match="received a LayerStatistics"):
        FisherDense().observe(FisherDense().init(problem.theta), record)
