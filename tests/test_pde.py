"""The PDE task: jets, residuals in closed form, the true objective, and hypergradients against the exact adjoint."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.hypergradients.implicit import implicit
from nhgd.inverse import FisherWindow
from nhgd.inverse._learned.learning import learn
from nhgd.oracle import Oracle
from nhgd.task import PDE
from nhgd.task._inner_solver import adam, gauss_newton
from nhgd.task.pde.equation import AbstractResidual, box, sides
from nhgd.task.pde.heat import (
    END,
    NODES,
    SIDE,
    Heat,
    continuous,
    duhamel,
    flow,
    gauss,
    grid,
    on_grid,
    responses,
    state,
    target,
)
from nhgd.task.pde.jet import JetNet, TanhNet

CPU = torch.device("cpu")
NU = 1e-3
TINY = PDE(interior=40, side=6, initial=8, width=6, depth=2, times=6, pretraining=5, steps=3, dtype="float64")


def exact_window(points, damping):
    return FisherWindow(window=len(points[0]), fisher="exact", records="sample", damping=damping)


class TestJet:
    @pytest.mark.parametrize(("sizes", "space"), [((3, 7, 5, 1), 2), ((2, 6, 1), 2), ((1, 4, 4, 1), 1), ((3, 5, 1), 0)])
    def test_agrees_with_autograd(self, sizes, space):
        net = JetNet(sizes, space, seed=3).double()
        with torch.no_grad():
            for layer in net.layers:
                layer.weight[:, 0] = torch.randn(len(layer.weight))
        x = torch.rand(9, sizes[0], dtype=torch.float64)
        jet = net.jet(x)
        for i, point in enumerate(x):
            value = lambda p: net(p[None])[0]  # noqa: E731
            hessian = torch.autograd.functional.hessian(value, point)
            first = torch.autograd.functional.jacobian(value, point)
            torch.testing.assert_close(jet.value[i], value(point), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(jet.gradient[i], first, rtol=1e-10, atol=1e-10)
            second = sum((hessian[j, j] for j in range(space)), torch.zeros(()).double())
            torch.testing.assert_close(jet.laplacian[i], second, rtol=1e-10, atol=1e-10)

    def test_starts_as_glorot_said_and_the_paper_counts(self):
        net = JetNet((3, 64, 64, 64, 64, 1), 2, seed=0)
        assert sum(p.numel() for p in net.parameters()) == 12_801
        for layer in net.layers:
            assert not layer.weight[:, 0].any()
            width, out = layer.in_features - 1, layer.out_features
            # A sample deviation of n normal numbers is off by 1/sqrt(2 n); four of these fail once in 16,000.
            allowed = 4 / math.sqrt(2 * width * out)
            assert float(layer.weight.detach()[:, 1:].std()) == pytest.approx((2 / (width + out)) ** 0.5, rel=allowed)
        control = TanhNet((1, 32, 32, 1), seed=0)
        assert sum(p.numel() for p in control.parameters()) == 1_153
        assert not any(layer.bias.any() for layer in control.layers)

    @pytest.mark.parametrize("sizes", [(3,), (3, 4, 2), (3, 0, 1)])
    def test_refuses_sizes(self, sizes):
        with pytest.raises(nhgd.InputError, match="one output"):
            JetNet(sizes, 0, seed=0)
        with pytest.raises(nhgd.InputError, match="spatial"):
            JetNet((2, 3, 1), 3, seed=0)


class Rod(AbstractResidual):
    """-u'' = 1 on (0, 1) with u(0) = v_0 and u(1) = v_1: u = x (1 - x) / 2 + (1 - x) v_0 + x v_1."""

    dimension = 1
    space = 1

    def sample(self, seed):
        low, high = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        return box(12, low, high, (*seed, 0)), sides(2, low, high, (*seed, 1))

    def residuals(self, u, control, x):
        return -u.laplacian - 1, u.value - torch.where(x[:, 0] < 0.5, control[0], control[1])

    def outer(self, net, control, batch):
        return (net(batch) - torch.sin(3 * batch[:, 0])).square().mean()

    @staticmethod
    def hypergradient(v, x):
        ends = torch.stack([1 - x, x], 1)
        return 2 * ends.T @ (x * (1 - x) / 2 + ends @ v - torch.sin(3 * x)) / len(x)


def rod():
    equation = Rod()
    net, v = equation.net((8,), seed=0).double(), torch.tensor([0.3, -0.7], dtype=torch.float64)
    return equation, equation.problem(net, v), equation.collocation((0,), dtype=torch.float64)


class TestResidual:
    def test_every_condition_counts_one(self):
        equation, problem, points = rod()
        found = equation.inner(problem.theta.given, problem.v.given, points)
        own = [found.values[points[1] == kind].mean() for kind in (0, 1)]
        torch.testing.assert_close(found.mean(), own[0] + own[1])
        assert points[2].tolist() == [16 / 12] * 12 + [16 / 4] * 4

    def test_solves_the_equation(self):
        _, problem, points = rod()
        assert gauss_newton(problem, points, 60, floor=1e-10) < 1e-5
        x = torch.linspace(0, 1, 21, dtype=torch.float64)
        with torch.no_grad():
            found = problem.theta.given(x[:, None])
        torch.testing.assert_close(found, x * (1 - x) / 2 + 0.3 * (1 - x) - 0.7 * x, rtol=0, atol=1e-4)

    def test_window_solve_is_the_dense_gauss_newton_solve(self):
        """Away from the optimum too: rows are those of the residual's Jacobian, and Woodbury loses nothing."""
        _, problem, points = rod()
        leaves = [leaf.detach() for leaf in problem.theta.leaves]
        jacobian = torch.func.jacrev(lambda leaves: problem.losses(points, theta=leaves).outputs)(leaves)
        J = torch.cat([part.flatten(1) for part in jacobian], 1)  # (N, D)
        rows = Recorder(problem, "sample", "exact").step(points).record.rows
        torch.testing.assert_close(rows, (2 * points[2]).sqrt()[:, None] * J, rtol=1e-11, atol=1e-12)
        matrix = 2 * J.T @ (points[2][:, None] * J) / len(J)
        for damping in (1e-2, 1e-5):
            inverse = exact_window(points, damping)
            at, u = Oracle(problem, [points]), torch.randn(problem.theta.numel, dtype=torch.float64)
            got, _ = inverse.apply(learn(inverse, problem, [points]), u, at)
            want = torch.linalg.solve(matrix + damping * torch.eye(len(u), dtype=torch.float64), u)
            torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9 * float(want.norm()))

    def test_hypergradient_of_two_boundary_controls_is_the_closed_form(self):
        equation, problem, points = rod()
        gauss_newton(problem, points, 60, floor=1e-10)
        x = torch.linspace(0, 1, 33, dtype=torch.float64)
        got = nhgd.hypergradient(problem, points, x[:, None], inverse=exact_window(points, 1e-9))
        want = equation.hypergradient(problem.v.given.detach(), x)
        torch.testing.assert_close(got.grad, want, rtol=0, atol=1e-3 * float(want.norm()))

    def test_empirical_fisher_fades_with_the_residuals(self):
        _, problem, points = rod()
        gauss_newton(problem, points, 60, floor=1e-10)
        sizes = {
            fisher: Recorder(problem, "sample", fisher).step(points).record.rows.norm()
            for fisher in ("empirical", "exact")
        }
        assert sizes["empirical"] < 1e-3 * sizes["exact"]

    def test_descends_to_the_best_ends(self):
        """Two numbers, a convex outer problem: least squares."""
        _, problem, points = rod()
        gauss_newton(problem, points, 40, floor=1e-10)
        x = torch.linspace(0, 1, 33, dtype=torch.float64)
        method = nhgd.algorithm.NHGD(
            exact_window(points, 1e-8), observe="end", inner="natural", natural_steps=1, natural_floor=1e-10
        )
        solver = nhgd.Solver(problem, [points], [x[:, None]], method=method, outer_lr=0.8)
        solver.run(steps=60)
        ends = torch.stack([1 - x, x], 1)
        best = torch.linalg.lstsq(ends, (torch.sin(3 * x) - x * (1 - x) / 2)[:, None]).solution[:, 0]
        torch.testing.assert_close(problem.v.given.detach(), best, rtol=0, atol=5e-3)

    def test_adam_lowers_the_residuals(self):
        _, problem, points = rod()
        before = float(problem.objective(points).detach())
        adam(problem, points, 50, 1e-2)
        assert float(problem.objective(points).detach()) < 0.5 * before
        assert all(leaf.grad is None for leaf in problem.theta.leaves)

    def test_needs_samples_in_the_first_dimension(self):
        _, problem, points = rod()
        with pytest.raises(nhgd.InputError, match="samples as first dimension"):
            gauss_newton(problem, (points[0], points[1][:3], points[2]), 1, floor=1e-8)


class TestPoints:
    def test_sides_are_all_covered(self):
        """Each of the four sides: on it exactly, and a point in every cell of 8 x 8 over the other coordinate and time."""
        walls = Heat().sample((0,))[1].reshape(4, 256, 3)
        for which, (coordinate, end) in enumerate(((0, 0.0), (0, 1.0), (1, 0.0), (1, 1.0))):
            assert (walls[which, :, coordinate] == end).all()
            other, t = walls[which, :, 1 - coordinate], walls[which, :, 2] / END
            cells = (other * 8).long().clamp(0, 7) * 8 + (t * 8).long().clamp(0, 7)
            assert len(cells.unique()) == 64
        inner = [walls[0, :, 1:], walls[1, :, 1:], walls[2, :, [0, 2]], walls[3, :, [0, 2]]]
        assert all(not torch.equal(inner[i], inner[j]) for i in range(4) for j in range(i))

    def test_inside_and_beginning(self):
        inside, _, first = Heat().sample((0,))
        assert len(inside) == 1024
        assert (first[:, 2] == 0).all()
        assert float(inside[:, 2].max()) > 1.99
        assert bool((inside > 0).all())
        assert bool((inside < torch.tensor([1.0, 1.0, END])).all())
        assert len(first[:, :2].mul(8).long().unique(dim=0)) == 64

    def test_seeds_tell_sets_apart(self):
        low, high = torch.zeros(2), torch.ones(2)
        first, again, other = (box(16, low.double(), high.double(), seed) for seed in ((0,), (0,), (1,)))
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert box(3, low.double(), 0 * high.double(), (0,)).tolist() == [[0.0, 0.0]] * 3


class TestTruth:
    def test_gauss_is_exact_for_polynomials(self):
        nodes, weights = gauss(8)
        for power in range(16):
            assert float((weights * nodes**power).sum()) == pytest.approx(1 / (power + 1), rel=1e-13)

    @pytest.mark.parametrize("tau", [0.01, 0.3, 2.0])
    @pytest.mark.parametrize("nu", [NU, 0.1, 1.0])
    def test_flow_is_the_sine_series(self, nu, tau):
        x = torch.linspace(0, 1, 7, dtype=torch.float64)
        m = torch.arange(1, 6001, 2, dtype=torch.float64)[:, None]
        series = (4 / (math.pi * m) * torch.sin(math.pi * m * x) * torch.exp(-nu * (math.pi * m) ** 2 * tau)).sum(0)
        found = flow(x, torch.tensor(tau, dtype=torch.float64), nu)
        torch.testing.assert_close(found, series, rtol=0, atol=1e-11)
        assert flow(x, torch.tensor(0.0).double(), nu)[1:-1].tolist() == [1.0] * 5

    def test_duhamel_is_exact_for_one_mode(self):
        """With nu so large that only the first mode lives, u solves an ordinary equation."""
        nu, times = 1.0, torch.linspace(0, END, NODES, dtype=torch.float64)
        half, zero = torch.tensor([0.5], dtype=torch.float64), torch.tensor([0])
        u = duhamel(*responses(half, zero, zero, nu))[0] @ torch.ones(NODES, dtype=torch.float64)
        m = torch.arange(1, 400, 2, dtype=torch.float64)
        both = (m[:, None] ** 2 + m**2) * math.pi**2 * nu
        sign = torch.where(((m[:, None] - 1) / 2 + (m - 1) / 2) % 2 == 0, 1.0, -1.0)
        graphable = 16 / (math.pi**2 * m[:, None] * m) * sign / both
        exact = (graphable * (1 - torch.exp(-both * times[:, None, None]))).sum((1, 2))
        torch.testing.assert_close(u, exact, rtol=1e-4, atol=1e-6)

    def test_the_state_is_that_of_the_matrices(self):
        f = torch.randn(NODES, dtype=torch.float64)
        line = torch.linspace(0, 1, 4, dtype=torch.float64)
        i, j = torch.tensor([1, 2, 1]), torch.tensor([1, 1, 0])
        u = duhamel(*responses(line, i, j, NU)) @ f
        torch.testing.assert_close(state(NU, f, 4)[i, j], u, rtol=1e-12, atol=1e-13)

    def test_no_control_leaves_the_target(self):
        assert on_grid(NU).c == pytest.approx(0.1169, abs=5e-5)
        assert continuous(NU).c == pytest.approx(0.1422, abs=5e-5)
        assert continuous(NU).c == pytest.approx((16 / 30) ** 2 / 2, rel=1e-9)  # mean of the target squared, by hand
        assert on_grid(NU).value(torch.zeros(NODES).double()) == on_grid(NU).c

    def test_lower_bounds(self):
        assert on_grid(NU).bound() == pytest.approx(0.0217, abs=5e-5)
        assert continuous(NU).bound() == pytest.approx(0.0372, abs=5e-5)

    @pytest.mark.parametrize("form", [on_grid, continuous])
    def test_no_smooth_control_beats_the_bound(self, form):
        form = form(NU)
        best = form.best()
        t = form.times
        for k in range(6):
            for size in (1e-2, -1e-2):
                assert form.value(best + size * torch.cos(k * math.pi * t / END)) > form.bound()
        f = torch.sin(3 * t) + t
        step = 1e-4 * torch.cos(t)
        slope = (form.value(f + step) - form.value(f - step)) / 2
        assert float(form.gradient(f) @ step) == pytest.approx(slope, rel=1e-8)

    def test_crank_nicolson_agrees(self):
        """Finite differences in space, Crank-Nicolson in time, on a grid that contains the reference grid."""
        n, steps = 200, 800
        h, dt = 1 / n, END / steps
        m = torch.arange(1, n, dtype=torch.float64)
        waves = math.sqrt(2 / n) * torch.sin(math.pi * m[:, None] * m / n)  # eigenvectors of the difference operator
        lam = -4 / h**2 * torch.sin(math.pi * m / (2 * n)).square() * NU
        both = lam[:, None] + lam
        ones = waves.sum(0)[:, None] * waves.sum(0)
        t = torch.linspace(0, END, steps + 1, dtype=torch.float64)
        f = torch.cos(2.5 * t) + 0.5 * t
        a, kept = torch.zeros_like(both), [torch.zeros_like(both)]
        for k in range(steps):
            a = ((1 + dt / 2 * both) * a + dt / 2 * (f[k] + f[k + 1]) * ones) / (1 - dt / 2 * both)
            if (k + 1) % 4 == 0:
                kept.append(a)
        u = torch.zeros(n + 1, n + 1, NODES, dtype=torch.float64)
        u[1:-1, 1:-1] = torch.einsum("xi,tij,yj->xyt", waves, torch.stack(kept), waves)
        on_nodes = u[:: n // 10, :: n // 10]
        control = f[::4]
        torch.testing.assert_close(state(NU, control, SIDE), on_nodes, rtol=0, atol=1e-3)
        wanted = target(*grid(SIDE, NODES).T).reshape(SIDE, SIDE, NODES)
        assert on_grid(NU).value(control) == pytest.approx(float((on_nodes - wanted).square().mean()), rel=1e-3)
        line = torch.linspace(0, 1, n + 1, dtype=torch.float64)
        misfit = (u - target(line[:, None, None], line[:, None], t[::4])).square()
        trapezoid = torch.trapezoid(torch.trapezoid(torch.trapezoid(misfit, dx=END / 200), dx=h), dx=h) / END
        assert continuous(NU).value(control) == pytest.approx(float(trapezoid), rel=1e-3)


def cosines(count):
    """A control that is a sum of cosines: its coefficients are v, so that a hypergradient is one in function space."""

    def control(v, t):
        k = torch.arange(count, dtype=t.dtype)
        return torch.cos(math.pi / END * k * t) @ v[:, None]

    return control


def against_the_adjoint(heat, net, count=6, steps=60, damping=1e-4):
    """cos(hypergradient, exact adjoint) over the first cosines, at the state of a smooth control."""
    control = cosines(count)
    equation = _WithCosines(heat, control)
    v = torch.zeros(count, dtype=torch.float64)
    v[1] = 0.7
    problem = equation.problem(net, v)
    points = heat.collocation((0,), dtype=torch.float64)
    gauss_newton(problem, points, steps, floor=1e-7)
    nodes = grid(SIDE, 51)
    inverse = exact_window(points, damping)
    at = Oracle(problem, [points], (nodes, target(*nodes.T)))
    got = implicit(at, inverse, learn(inverse, problem, [points])).leaves[0]
    t = on_grid(NU).times[:, None]
    basis = torch.cos(math.pi / END * torch.arange(count) * t)  # (201, count)
    want = basis.T @ on_grid(NU).gradient(basis @ v.detach())
    return float(got @ want / (got.norm() * want.norm())), float(got.norm() / want.norm())


class _WithCosines(AbstractResidual):
    """The heat equation with a control by cosines."""

    dimension, space = 3, 2

    def __init__(self, heat, control):
        self.heat, self.control = heat, control

    def sample(self, seed):
        return self.heat.sample(seed)

    def residuals(self, u, v, x):
        return self.heat.residuals(u, lambda t: self.control(v, t), x)

    def outer(self, net, v, batch):
        return self.heat.outer(net, v, batch)


class TestHypergradient:
    def test_exact_fisher_is_the_exact_adjoint_in_function_space(self):
        cosine, _ = against_the_adjoint(Heat(NU, 200, 20, 40), Heat().net((14, 14), 0).double())
        assert cosine > 0.99

    @pytest.mark.slow
    def test_and_more_so_with_more_points_and_a_larger_net(self):
        heat, net = Heat(NU, 1024, 96, 128), Heat().net((20, 20, 20), 0).double()
        cosine, size = against_the_adjoint(heat, net, steps=200, damping=1e-5)
        assert cosine > 0.99
        assert size == pytest.approx(1, rel=0.25)


class TestTask:
    def test_summary_holds_what_a_run_is_judged_by(self):
        instance = TINY.build(0, CPU)
        solution = instance.start().run(steps=3)
        summary = instance.summary(solution)
        assert {"outer_loss", "inner_loss", "objective_net", "true_objective_grid", "true_objective"} <= set(summary)
        assert summary["lower_bound_grid"] == on_grid(NU).bound() < summary["true_objective_grid"]
        assert summary["lower_bound"] == continuous(NU).bound() < summary["true_objective"]
        f = instance.truth.control(instance.problem.v.given)
        assert summary["true_objective_grid"] == on_grid(NU).value(f)
        assert solution.history[-1]["true_objective"] == summary["true_objective"]
        assert summary["fresh_loss"] == pytest.approx(
            summary["fresh_interior"] + summary["fresh_sides"] + summary["fresh_initial"]
        )
        net, nodes = instance.problem.theta.given, grid(SIDE, NODES)
        with torch.no_grad():
            own = float((net(nodes) - target(*nodes.T)).square().mean())
            apart = float((net(nodes) - state(NU, f, SIDE).flatten()).square().mean())
        assert summary["objective_net"] == pytest.approx(own)
        assert summary["state_error"] == pytest.approx(apart)

    @pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # few steps of CG
    def test_nhgd_is_the_exact_fisher_matrix_and_other_names_mean_what_they_mean(self):
        instance = TINY.build(0, CPU)
        method = instance.algorithm()
        assert (method.inner, method.observe, method.natural_steps) == ("natural", "end", 1)
        assert method.inverse == FisherWindow(
            window=72, fisher="exact", records="sample", damping=1e-4, allow_large=True
        )
        assert instance.algorithm("aid-cg").inverse == nhgd.inverse.CG()
        for name in ("aid-cg-2", "nhgd", "nhgd-window"):
            instance.start(name, inner_steps=2).run(steps=1)

    def test_the_paper_preset_takes_adam(self):
        paper = PDE.preset("paper")
        assert (paper.interior, paper.side, paper.initial, paper.width, paper.depth) == (1024, 256, 256, 64, 4)
        small = paper.with_settings({"interior": 30, "side": 4, "initial": 5, "width": 5, "depth": 1, "pretraining": 3})
        instance = small.with_settings({"times": 5, "steps": 2}).build(0, CPU)
        assert instance.solver_settings()["inner_steps"] == 50
        assert instance.solver_settings()["inner_optimizer"] is torch.optim.Adam
        assert instance.algorithm().inner == "optimizer"
        assert (
            instance.start().run(steps=2).stats["oracle_calls"]["inner_gradients"] == 2 * 53
        )  # rows of the exact Fisher matrix are a pass

    def test_a_small_net_wants_one_thread(self):
        assert PDE.preset("quick").threads == 1
        assert PDE().threads is None

    def test_pictures(self, tmp_path):
        pytest.importorskip("matplotlib")
        drawn = TINY.build(0, CPU).pictures(tmp_path)
        assert [path.name for path in drawn] == ["control.png", "state.png"]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"interior": 0}, "interior must be a whole number"),
            ({"nu": 0.0}, "nu must be above 0"),
            ({"inner": "sgd"}, "inner of pde"),
            ({"times": 1}, "times must be at least 2"),
            ({"pretraining": -1}, "pretraining must be 0 or more"),
            ({"dtype": "float16"}, "dtype of pde"),
        ],
    )
    def test_refusals(self, settings, message):
        with pytest.raises(nhgd.InputError, match=message):
            PDE(**settings)

    def test_reads_no_files(self):
        with pytest.raises(nhgd.InputError, match="reads no files"):
            TINY.build(0, CPU, "somewhere")


def test_the_example_finds_the_best_source():
    path = Path(__file__).parent.parent / "examples" / "pde_poisson.py"
    spec = importlib.util.spec_from_file_location("pde_poisson", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(["--tiny"]) < 0.02
