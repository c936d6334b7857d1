"""The damping of a run's horizon: what it solves, how it adapts, and what it says."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from nhgd import variable
from nhgd.algorithm import AID, NHGD
from nhgd.errors import InputError, InverseWarning
from nhgd.hypergradients.implicit import SolveWarnings
from nhgd.inverse import CG, KFAC, Exact, FisherDense, FisherDiagonal, FisherWindow, Refined
from nhgd.inverse.capabilities import follows_horizon
from nhgd.loop import mover
from nhgd.loop.horizon import Horizon, best_combination
from nhgd.task.quadratic import Quadratic
from tests import catalogue, oracles

CPU = torch.device("cpu")


def hand(make, damping, cross_at):
    """One outer step with the exact Fisher matrix of the last point, damped."""
    problem, inner, outer = make()
    before = oracles.v_of(problem)
    oracles.assign(problem.theta.given, cross_at)
    matrix = oracles.fisher(problem, inner) + oracles.ridge_hessian(problem)
    at = nhgd.oracle.Oracle(problem, [inner], outer)
    u = at.outer()
    x = torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype), u.theta)
    w = at.hvp(x) + damping * x  # and x gets its right length by the one product of the first outer step
    x = x * (x.dot(u.theta) / x.dot(w)) if x.dot(w) > 0 and x.dot(u.theta) > 0 else x
    return before - 0.1 * torch.cat([(f - c).reshape(-1) for f, c in zip(u.v, at.cross(x), strict=True)])


@pytest.mark.parametrize("make", [catalogue.weighted_logistic, catalogue.mlp_module])
def test_the_first_outer_step_answers_for_one_inner_loop(make):
    """damping = 1 / (eta T), and the length of x is that of the damped system."""
    inverse = FisherWindow(window=len(make()[1][0]), records="sample")
    problem, inner, outer = make()
    settings = {"inner_lr": 0.2, "inner_steps": 4, "outer_lr": 0.1}
    solver = nhgd.Solver(problem, [inner], [outer], NHGD(inverse, observe="end", cross="final"), **settings)
    solver.state.horizon.ahead = lambda first, second: torch.zeros_like(second)  # of which there is a test below
    solver.state.horizon.determined = (
        True  # of what is left of u where it is not, tests/test_sampling_error.py has tests
    )
    row = solver.step()
    assert row["damping"] == pytest.approx(1 / (0.2 * 4))
    assert row["horizon"] == 1.0
    torch.testing.assert_close(problem.v.flat(), hand(make, 1 / 0.8, problem.theta.flat()))


@pytest.mark.parametrize(
    ("optimizer", "travelled"),
    [
        (None, 0.8),
        (lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9), 8.0),
    ],
)
def test_momentum_lengthens_the_way_that_theta_travels(optimizer, travelled):
    problem, inner, outer = catalogue.weighted_logistic()
    settings = {"inner_steps": 4, "outer_lr": 0.1} | (
        {"inner_lr": 0.2} if optimizer is None else {"inner_optimizer": optimizer}
    )
    row = nhgd.Solver(problem, [inner], [outer], NHGD(FisherWindow()), **settings).step()
    assert row["damping"] == pytest.approx(1 / travelled)


def test_adam_inside_travels_as_far_as_its_steps_are_long():
    """With a gradient that stays as it is, Adam moves by lr a step: the way is the sum of lr over the gradient's size."""
    inner = lambda theta, v, batch: (batch[0] * theta).sum(1) + 0 * v  # noqa: E731
    theta = torch.zeros(3, dtype=torch.float64)
    problem = nhgd.Bilevel(inner, lambda t, v, b: (t**2).sum() + v, theta=theta, v=torch.zeros((), dtype=torch.float64))
    batch = (torch.full((5, 3), 4.0, dtype=torch.float64),)
    solver = nhgd.Solver(
        problem, [batch], [batch], NHGD(FisherWindow(), cross="final"), inner_steps=3,
        inner_optimizer=lambda p: torch.optim.Adam(p, lr=0.1), outer_lr=0.0 + 1e-9,
    )  # fmt: skip
    assert solver.step()["damping"] == pytest.approx(1 / (3 * 0.1 / 4), rel=1e-6)


def test_a_settled_run_is_exact():
    """As v settles the damping vanishes, and the fixed point is the optimum in closed form."""
    instance = Quadratic.preset("quick").build(0, CPU)
    running = instance.start("nhgd")
    solution = running.run(steps=120)
    best = instance.answers.v_star()
    assert float((instance.problem.v.given - best).norm() / best.norm()) < 0.01
    dampings = [row["damping"] for row in solution.history]
    assert dampings[-1] < 1e-4 * dampings[0]


def test_persistent_adjoints_lengthen_the_horizon_and_turning_ones_do_not():
    still, turning = Horizon.start(CPU), Horizon.start(CPU)
    generator = torch.Generator().manual_seed(0)
    for k in range(60):
        still.observe(torch.ones(50) + 0.01 * torch.randn(50, generator=generator))
        turning.observe(torch.randn(50, generator=generator))
        still.read(k), turning.read(k)
    assert still.horizon_loops > 1000
    assert turning.horizon_loops < 2
    assert still.damping(1.0, ridge=True) < 1e-3 < turning.damping(1.0, ridge=True)


def test_where_each_inner_loop_begins_anew_the_horizon_is_one_loop():
    horizon = Horizon.start(CPU, warm=False)
    for k in range(20):
        horizon.observe(torch.ones(3))
        horizon.read(k)
    assert horizon.horizon_loops == 1.0


class Stiff:
    """A point whose matrix is known."""

    def __init__(self, matrix):
        self.matrix = matrix
        self.problem = type("P", (), {"theta": type("V", (), {"flat": lambda _: torch.ones(len(matrix)).double()})()})()

    def hvp(self, x):
        return self.matrix @ x


def test_trust_follows_levenberg_and_marquardt():
    """An x that is far too long doubles the damping; one that is right halves it, to one at least."""
    u = torch.tensor([1.0, 0.0]).double()
    at, horizon = Stiff(torch.diag(torch.tensor([10.0, 1.0])).double()), Horizon.start(CPU)
    better, notes = horizon.measured(at, u, u.clone(), lambda r: r, None)  # the learnt matrix was the identity
    assert horizon.trust == 2.0
    torch.testing.assert_close(better, u / 10)  # the right length, by the product
    assert notes["residual"] == pytest.approx(0.0, abs=1e-7)
    horizon.measured(at, u, u / 10, lambda r: r / 10, None)
    assert horizon.trust == 1.0


def test_a_persistent_adjoint_is_refined_until_it_is_exact():
    matrix = torch.tensor([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]]).double()
    u = torch.tensor([1.0, -1.0, 2.0]).double()
    at, horizon = Stiff(matrix), Horizon.start(CPU)
    horizon.rho = 1.0
    wrong = torch.tensor([1.0, 0.2, 3.0]).double()
    residuals = []
    for _ in range(25):
        x, notes = horizon.measured(at, u, horizon.corrected(wrong * u, u), lambda r: wrong * r, None)
        residuals.append(notes["residual"])
    torch.testing.assert_close(x, torch.linalg.solve(matrix, u), rtol=1e-5, atol=1e-6)
    assert residuals[-1] < 1e-5 < residuals[0]
    torch.testing.assert_close(horizon.corrected(wrong * u, u), x)  # and is kept between measurements


def test_a_learnt_matrix_that_is_worse_than_none_gives_way():
    """The matrix says the opposite of the truth: after two comparisons u takes its place, with its best length."""
    u = torch.tensor([1.0, 1.0]).double()
    matrix = torch.diag(torch.tensor([100.0, 1.0])).double()
    wrong = torch.tensor([100.0, 0.01]).double()
    at, horizon = Stiff(matrix), Horizon.start(CPU)
    seen = []
    for _ in range(4):
        learnt = wrong * u
        x, notes = horizon.measured(at, u, horizon.corrected(learnt, u), lambda r: wrong * r, None, learnt)
        seen.append((horizon.suspect, horizon.plain))
    assert seen == [(True, False), (True, False), (True, True), (True, True)]  # suspected, worse, worse again
    torch.testing.assert_close(x, u * float(u @ u / (u @ matrix @ u)))
    torch.testing.assert_close(horizon.as_used(learnt, u), x)
    right = 1 / matrix.diagonal()  # and returns where it is better again
    horizon.measured(at, u, horizon.corrected(right * u, u), lambda r: right * r, None, right * u)
    assert not horizon.plain
    torch.testing.assert_close(horizon.corrected(right * u, u), torch.linalg.solve(matrix, u))
    assert notes["residual"] > 0.5


def test_outer_gradients_are_those_of_where_theta_is_going():
    """In one direction theta creeps, in another it arrives: what is left of the way is a geometric series, cut off."""
    horizon = Horizon.start(CPU)
    steps = torch.tensor([0.5, 0.5]).double()
    for factor, ahead in ((0.5, 1.0), (0.1, 1 / 9), (0.99, 2.0), (0.0, 0.0), (-0.4, 0.0)):
        horizon.halves.zero_()
        torch.testing.assert_close(horizon.ahead(steps, factor * steps), ahead * factor * steps)


@pytest.mark.parametrize(
    ("rho", "caution", "determined", "halves"),
    [
        (0.0, 1.0, True, 2.0),
        (-0.5, 1.0, True, 2.0),
        (0.5, 1.0, True, 2 * 3**0.75),
        (0.5, 1.9, True, 2 * 3**0.75 / 1.9),
        (0.9, 1.0, True, 8.0),
        (0.9, 1.0, False, 2.0),
    ],
)
def test_they_are_taken_no_further_ahead_than_x_looks(rho, caution, determined, halves):
    """2 m halves of an inner loop, between one loop and four; with less to go, where the series ends."""
    horizon = Horizon.start(CPU, determined=determined)
    horizon.rho, horizon.gain.caution = rho, caution
    step = torch.tensor([0.5, 0.5]).double()
    torch.testing.assert_close(horizon.ahead(step, 0.99 * step), halves * 0.99 * step)
    horizon.halves.zero_()
    torch.testing.assert_close(horizon.ahead(step, 0.6 * step), 1.5 * 0.6 * step)


def test_theta_reaches_its_optimum_along_the_slow_direction():
    """On a quadratic whose inner loop halves the way in four loops, four loops ahead is nearer to the end than one."""
    rate, theta, end = 0.5**0.25, torch.tensor([3.0]).double(), torch.tensor([1.0]).double()
    half, there = math.sqrt(rate), {}
    for rho in (0.0, 0.99):
        horizon = Horizon.start(CPU)
        horizon.rho = rho
        middle, last = (end + (theta - end) * half**k for k in (1, 2))
        there[rho] = last + horizon.ahead(middle - theta, last - middle)
    assert abs(there[0.99] - end) < 0.5 * abs(there[0.0] - end)


@pytest.mark.parametrize("inner_steps", [1, 4, 5])
def test_a_run_looks_ahead_by_the_halves_of_its_inner_loop(inner_steps, monkeypatch):
    """grad f is taken at theta_T + c (theta_T - theta_{T/2}); the rest of the formula at theta_T."""
    problem, inner, outer = catalogue.weighted_logistic()
    inverse = FisherWindow(window=64, overhead=None)
    solver = nhgd.Solver(
        problem, [inner], [outer], NHGD(inverse, cross="final"), inner_steps=inner_steps, inner_lr=0.2, outer_lr=1e-9
    )
    solver.state.horizon.determined = True
    theta, v = problem.theta.flat(), problem.v.flat()
    ways, taken = [theta], list[torch.Tensor]()
    outer_of = nhgd.oracle.Oracle.outer

    def noting(at):
        taken.append(problem.theta.flat())
        return outer_of(at)

    monkeypatch.setattr(nhgd.oracle.Oracle, "outer", noting)
    for _ in range(inner_steps):
        theta = theta - 0.2 * oracles.gradient(problem, inner, theta, v)
        ways.append(theta)
    solver.step()
    half = inner_steps // 2
    there = theta
    if half:
        first, second = ways[-1 - half] - ways[-1 - 2 * half], theta - ways[-1 - half]
        q = min(float(first @ second / (first @ first)), 2 / 3)
        there = theta + q / (1 - q) * second
        assert q > 0
    torch.testing.assert_close(taken, [there])
    torch.testing.assert_close(problem.theta.flat(), theta)
    expected = nhgd.oracle.Oracle(problem, [inner], outer).outer_value()  # the loss itself is that of theta
    assert solver.history[-1]["outer_loss"] == pytest.approx(expected, rel=1e-6)


def test_the_best_combination_is_that_of_two_equations():
    generator = torch.Generator().manual_seed(1)
    root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    matrix = root @ root.T + torch.eye(4).double()
    x, z, u = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    basis = torch.stack([x, z], 1)
    expected = torch.linalg.solve(basis.T @ matrix @ basis, basis.T @ u)
    found = best_combination(*(float(n) for n in (x @ matrix @ x, x @ matrix @ z, z @ matrix @ z, x @ u, z @ u)))
    torch.testing.assert_close(torch.tensor(found).double(), expected)
    assert best_combination(-1.0, 0.0, 1.0, 1.0, 1.0) == (1.0, 0.0)


def test_which_inverses_follow_the_horizon():
    for made in (KFAC(), FisherWindow(), FisherDiagonal(), FisherDense(), Refined(KFAC()), CG(damping="auto")):
        assert follows_horizon(made)
    for made in (CG(), Exact(), KFAC(damping=None), KFAC(damping=0.1), FisherDense(form="inverse", update="ema")):
        assert not follows_horizon(made)
    assert not follows_horizon(None)
    with pytest.raises(InputError, match="damping"):
        KFAC(damping="automatic")


def test_a_fixed_damping_and_cg_on_the_damped_system():
    """CG with damping='auto' solves what the horizon damps; without, the plain system."""
    problem, inner, outer = catalogue.weighted_logistic()
    settings = {"inner_lr": 0.2, "inner_steps": 4, "outer_lr": 1e-12}
    row = nhgd.Solver(problem, [inner], [outer], AID(CG(steps=60, damping="auto")), **settings).step()
    assert row["damping"] == pytest.approx(1 / 0.8)
    at = nhgd.oracle.Oracle(problem, [inner], outer)
    at.damp(1 / 0.8)
    x, _ = CG(steps=60, damping="auto").solve(at.outer().theta, at)
    dense = oracles.hessian(problem, inner)
    expected = torch.linalg.solve(dense + torch.eye(len(dense)).double() / 0.8, at.outer().theta)
    torch.testing.assert_close(x, expected, rtol=1e-6, atol=1e-9)
    row = nhgd.Solver(problem, [inner], [outer], AID(FisherWindow(damping=0.3)), **settings).step()
    assert "horizon" not in row


def test_hypergradient_and_check_have_no_horizon():
    problem, inner, outer = catalogue.settled(catalogue.weighted_logistic)
    plain = nhgd.hypergradient(problem, inner, outer, inverse=FisherWindow(window=64, damping=None))
    auto = nhgd.hypergradient(problem, inner, outer, inverse=FisherWindow(window=64))
    assert all(torch.equal(a, b) for a, b in zip(plain.leaves, auto.leaves, strict=True))


def representation(steps, seed=0):
    """A backbone as v, a head as theta: what v moves is all that the inner problem sees."""
    torch.manual_seed(seed)
    x = torch.randn(200, 20)
    y = (x[:, 0] * x[:, 1] > 0).long()
    backbone, head = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()), nn.Linear(8, 2)

    def inner(head, backbone, batch):
        outputs = head(backbone(batch[0]))
        return nhgd.Losses(F.cross_entropy(outputs, batch[1], reduction="none"), outputs=outputs)

    def outer(head, backbone, batch):
        return F.cross_entropy(head(backbone(batch[0])), batch[1])

    problem = nhgd.Bilevel(inner, outer, theta=head, v=backbone, l2=1e-3, likelihood="categorical")
    data = nhgd.Data(x[:100], y[:100], batch=50), nhgd.Data(x[100:], y[100:], batch=100)
    return nhgd.Solver(
        problem, *data, method="nhgd", inner_lr=0.5, outer_optimizer=torch.optim.Adam, outer_lr=0.01, seed=seed
    )


def test_history_tells_how_good_the_hypergradient_was(tmp_path):
    solver = representation(12)
    rows = solver.run(steps=12).history
    measured = [row for row in rows if row["residual"] is not None]
    assert [row["step"] for row in measured] == [1, 6, 11]
    for row in measured:
        assert -1 <= row["cosine"] <= 1
        assert row["inner_distance"] >= 0
        assert math.isfinite(row["residual"])
    assert all(row["damping"] > 0 for row in rows)


def test_a_run_with_a_horizon_resumes_bit_for_bit(tmp_path):
    whole = representation(9)
    whole.run(steps=9)
    first = representation(9)
    kept = nhgd.Solver(
        first.problem, first.loop.inner.source, first.loop.outer.source, method="nhgd", inner_lr=0.5,
        outer_optimizer=torch.optim.Adam, outer_lr=0.01, seed=0, checkpoint=tmp_path / "run",
    )  # fmt: skip
    kept.run(steps=5)
    other = representation(9)
    gone_on = nhgd.Solver.resume(
        tmp_path / "run", other.problem, other.loop.inner.source, other.loop.outer.source,
        outer_optimizer=torch.optim.Adam,
    )  # fmt: skip
    gone_on.run(steps=9)
    assert torch.equal(gone_on.problem.v.flat(), whole.problem.v.flat())


def test_an_outer_loss_that_rises_is_said_once():
    horizon = Horizon.start(CPU)
    doubts = [horizon.warning_for(loss) for loss in [1.0] * 30 + [9.0] * 10]
    assert doubts[:30] == [None] * 30
    assert "risen" in doubts[-1]
    solve_warnings = SolveWarnings()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for doubt in doubts:
            solve_warnings.warn(doubt)
    assert [w.category for w in caught] == [InverseWarning]


@pytest.mark.parametrize(
    ("determined", "low", "said"), [(False, 0.04, True), (False, 0.06, False), (True, 0.04, False)]
)
def test_outer_samples_that_are_fitted_exactly_are_warned_of(determined, low, said):
    """A twentieth of the first loss is what sound runs of label cleaning do not reach."""
    horizon = Horizon.start(CPU, determined=determined)
    found = [horizon.warning_for(loss) for loss in [1.0, *[low] * 60]]
    assert all(warning is None for warning in found[:20])
    assert any(warning is not None and "more entries" in warning for warning in found) is said


def test_the_sampled_fisher_matrix_gives_way_where_it_cannot_be_had():
    """By default K-FAC samples the model's own labels where outputs and likelihood are known, and else it does without."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 4), torch.randint(0, 3, (30,))
    for outputs, likelihood in ((True, "categorical"), (False, "categorical"), (True, "bernoulli")):
        model = nn.Linear(4, 3)

        def inner(theta, v, batch, outputs=outputs):
            z = theta(batch[0])
            values = F.cross_entropy(z, batch[1], reduction="none")
            return nhgd.Losses(values * v.exp(), outputs=z if outputs else None)

        problem = nhgd.Bilevel(
            inner, lambda t, v, b: F.cross_entropy(t(b[0]), b[1]), theta=model, v=torch.zeros(()), l2=0.01,
            likelihood=likelihood,
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            solver = nhgd.Solver(problem, [(x, y)], [(x, y)], method="nhgd", inner_steps=3)
            row = solver.step()
        sampled = outputs and likelihood == "categorical"
        assert row["inner_gradients"] == (6 if sampled else 4)  # two of three steps are recorded


def test_a_longer_horizon_is_for_a_v_that_the_outer_samples_determine():
    """With fewer samples than entries of v a better answer only fits them sooner, so it is for one loop until v has settled."""
    steady = torch.ones(50)
    for determined, few, settled in ((True, 50.0, 1e5), (False, 1.0, 1e2)):
        horizon = Horizon.start(CPU, determined=determined)
        horizon.rho = 0.99
        assert horizon.horizon_loops == pytest.approx(199**0.75 if determined else 1.0)
        assert horizon.horizon_loops >= few or not determined
        for k in range(200):
            horizon.observe(steady)
            horizon.read(k)
        assert horizon.horizon_loops > settled


@pytest.mark.parametrize(("samples", "determined"), [(11, False), (12, True), (None, True)])
def test_a_run_counts_its_outer_samples(samples, determined):
    """v has 12 entries."""
    problem, inner, (x, y) = catalogue.weighted_logistic()
    x, y = (torch.cat([t] * 2)[:samples] for t in (x, y))
    outer = Unsized([(x, y)]) if samples is None else [(x[:5], y[:5]), (x[5:], y[5:])]
    solver = nhgd.Solver(problem, [inner], outer, NHGD(FisherWindow()), inner_steps=1, inner_lr=0.1, outer_lr=0.1)
    assert solver.loop.outer.values == samples
    assert solver.loop.horizon().determined is determined


class Unsized:
    """A loader that does not tell how long it is."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def test_values_of_loaders():
    """Those of the smallest tensor, which the labels mostly are: of a sequence, one for each token."""
    x = torch.arange(6.0)
    dataset = torch.utils.data.TensorDataset(x, x)
    stream = nhgd.data.BatchStream
    assert stream(torch.utils.data.DataLoader(dataset, batch_size=4, drop_last=True), "outer_data", CPU).values == 6
    assert stream([(x, x), (x[:2], x[:2])], "outer_data", CPU).values == 8
    assert stream([torch.tensor(1.0)], "outer_data", CPU).values is None
    assert stream(nhgd.Data(torch.ones(5, 7), torch.ones(5, 3)), "outer_data", CPU).values == 15


def test_what_persists_of_x_is_what_lagged_products_are_taken_along(monkeypatch):
    """average <- r average + (1 - r) x with r = rho between 0 and 0.8, and the next inner loop takes it."""
    problem, inner, outer = catalogue.mlp_module()
    assert problem.v.numel > len(outer[0])
    solver = nhgd.Solver(problem, [inner], [outer], NHGD(cross="lagged"), inner_steps=2, inner_lr=0.1, outer_lr=0.1)
    taken, lagged_cross = [], solver.loop.lagged_cross
    seen, observe = [], Horizon.observe

    def noting(horizon, x):
        seen.append((x.clone(), horizon.rho))
        observe(horizon, x)

    monkeypatch.setattr(Horizon, "observe", noting)
    monkeypatch.setattr(solver.loop, "lagged_cross", lambda x: (taken.append(x.clone()), lagged_cross(x))[1])
    for _ in range(7):
        solver.step()
    average = seen[0][0]
    assert len(taken) == 5  # of the first two outer steps there are none
    for k, (x, rho) in enumerate(seen[1:], start=1):
        if k > 1:
            torch.testing.assert_close(taken[k - 2], average)
        r = min(max(rho, 0.0), 0.8)
        average = r * average + (1 - r) * x
    assert max(rho for _, rho in seen) > 0.1


def test_noise_of_x_averages_out_and_what_turns_is_not_kept():
    generator = torch.Generator().manual_seed(0)
    truth = torch.ones(2000)
    horizon = Horizon.start(CPU, determined=False)
    for k in range(80):
        horizon.observe(truth + torch.randn(2000, generator=generator))
        horizon.read(k)
    # rho is about 1/2, so that the variance falls to (1 - r) / (1 + r), about a third
    assert (horizon.average - truth).square().mean() < 0.45
    turning = Horizon.start(CPU, determined=False)
    few = Horizon.start(CPU)
    for k in range(80):
        x = torch.randn(2000, generator=generator)
        turning.observe(x)
        turning.read(k)
        few.observe(truth)
    assert (turning.average - x).norm() < 0.1 * x.norm()
    assert few.average is None  # where v is determined


def test_moments_are_summed_by_few_calls():
    generator = torch.Generator().manual_seed(0)
    moments = [torch.rand(shape, generator=generator, dtype=torch.float64).square() for shape in ((3, 4), (5,), ())]
    sums = mover.sums_of_roots(moments)
    expected = [sum(float(m.sqrt().sum()) for m in moments), sum(float(m.sum()) for m in moments)]
    assert sums.tolist() == pytest.approx(expected)


def test_long_vectors_are_multiplied_in_pieces(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1000, generator=generator)
    whole, own = variable.dot(a, b), variable.dot(a, a)
    monkeypatch.setattr(variable, "PIECE", 64)
    assert variable.dot(a, b).dtype == torch.float64
    torch.testing.assert_close(variable.dot(a, b), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(variable.dot(a, a), own, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("records", "wanted"),
    [
        (lambda step: False, [0, 17, 34]),
        (lambda step: True, [0, 17, 34]),
        (lambda step: step % 17 == 0, [0, 18, 35]),  # the one after has none
        (lambda step: step % 34 == 0, [0, 17, 35]),
        (lambda step: step % 17 in (0, 1), [0, 17, 34]),
    ],
    ids=["none", "all", "there", "at every other", "at two"],
)
def test_a_measurement_waits_for_a_step_without_a_record(records, wanted):
    horizon = Horizon.start(torch.device("cpu"))
    due = [step for step in range(40) if horizon.due(step, 3, lambda later, step=step: records(step + later))]
    assert due == wanted
