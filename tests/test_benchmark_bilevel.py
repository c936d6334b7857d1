"""The solver for benchopt's benchmark_bilevel: its derivatives, what it reaches, and a run within benchopt itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
FILE = ROOT / "integrations/benchmark_bilevel/nhgd_solver.py"
jax = pytest.importorskip("jax")
pytest.importorskip("benchopt")
N, DIM = 40, 3


@pytest.fixture(scope="module")
def plugin():
    spec = importlib.util.spec_from_file_location("nhgd_solver", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quadratic(seed, cross):
    """A function as the benchmark has them: a mean over a slice of samples, jitted; and its matrices."""
    jnp, draw = jax.numpy, np.random.default_rng(seed)
    hessians = np.eye(DIM) + 0.1 * draw.random((N, DIM, 1)) * draw.random((N, 1, DIM))
    hessians = 0.5 * (hessians + hessians.transpose(0, 2, 1))
    linear = draw.normal(size=(N, DIM))
    parts = [jnp.asarray(part, dtype="float32") for part in (hessians, linear)]

    def f(inner_var, outer_var, start=0, batch_size=1):
        h = jax.lax.dynamic_slice(parts[0], (start, 0, 0), (batch_size, DIM, DIM))
        b = jax.lax.dynamic_slice(parts[1], (start, 0), (batch_size, DIM))
        each = jax.vmap(lambda h, b: 0.5 * inner_var @ h @ inner_var + b @ inner_var)(h, b)
        return jnp.mean(each) + cross * outer_var @ inner_var + (1 - cross) * 0.5 * outer_var @ outer_var

    return jax.jit(f, static_argnames="batch_size"), hessians.mean(0), linear.mean(0)


def objective(inner, outer):
    zeros = jax.numpy.zeros(DIM)
    return {
        "f_inner": inner, "f_outer": outer, "n_inner_samples": N, "n_outer_samples": N, "inner_var0": zeros,
        "outer_var0": zeros - 2,
    }  # fmt: skip


def solver_of(plugin, **more):
    made = plugin.Solver.get_instance() if hasattr(plugin.Solver, "get_instance") else plugin.Solver()
    defaults = {key: values[0] for key, values in plugin.Solver.parameters.items()}
    vars(made).update(defaults | more)
    return made


def test_derivatives_are_those_of_the_formula(plugin):
    f, _, _ = quadratic(0, 0.7)
    made = plugin.SampleLosses(f, lambda x: x, lambda x: x)
    theta, v = (torch.randn(DIM, requires_grad=True) for _ in range(2))
    index = torch.tensor([3, 0, 17])
    losses = made(theta, v, index)
    expected = [float(f(theta.detach().numpy(), v.detach().numpy(), start=int(i), batch_size=1)) for i in index]
    torch.testing.assert_close(losses, torch.tensor(expected))
    (gradient,) = torch.autograd.grad(losses.mean(), theta, create_graph=True)
    x = torch.randn(DIM)
    product, cross = torch.autograd.grad(gradient @ x, (theta, v))
    hessian = np.mean(
        [jax.hessian(lambda t, i=i: f(t, v.detach().numpy(), start=int(i)))(theta.detach().numpy()) for i in index], 0
    )
    torch.testing.assert_close(product, torch.from_numpy(hessian) @ x)
    torch.testing.assert_close(cross, 0.7 * x)


@pytest.mark.parametrize("method", ["aid-cg", "soba", "nhgd"])
def test_a_method_reaches_the_optimum_of_the_benchmarks_interface(plugin, method):
    """theta* = -H^-1 (b + v); the gradient of the value function must fall by a lot."""
    (inner, h, b), (outer, h_out, b_out) = quadratic(0, 1.0), quadratic(1, 0.0)

    def value_gradient(v):
        theta = -np.linalg.solve(h, b + v)
        return v - np.linalg.solve(h, h_out @ theta + b_out)

    made = solver_of(plugin, method=method, batch_size="full", step_size=0.3, eval_freq=20, outer_ratio=2.0)
    made.set_objective(**objective(inner, outer))
    calls = iter(range(8))
    made.run(lambda: next(calls, None) is not None)
    found = made.get_result()
    before, after = (np.linalg.norm(value_gradient(np.asarray(v))) for v in (np.full(DIM, -2.0), found["outer_var"]))
    assert after < (0.2 if method == "nhgd" else 1e-3) * before
    assert found["inner_var"].shape == (DIM,)


def test_variables_keep_their_form(plugin):
    """Trees of arrays, as the benchmark's data cleaning has them."""

    def f(inner_var, outer_var, start=0, batch_size=1):
        return jax.numpy.sum((inner_var["a"] - outer_var["b"][0]) ** 2) + jax.numpy.sum(inner_var["c"] ** 2)

    made = solver_of(plugin, method="aid-cg", batch_size=8)
    trees = {"a": jax.numpy.ones((2, 2)), "c": jax.numpy.ones(1)}, {"b": (jax.numpy.ones((2, 2)),)}
    made.set_objective(f, f, N, N, *trees)
    made.run(iter([True, False]).__next__)
    found = made.get_result()
    assert jax.tree_util.tree_structure(found["inner_var"]) == jax.tree_util.tree_structure(trees[0])
    assert jax.tree_util.tree_structure(found["outer_var"]) == jax.tree_util.tree_structure(trees[1])


OBJECTIVE = """
    from benchopt import BaseObjective

    class Objective(BaseObjective):
        name = "Bilevel Optimization"
        min_benchopt_version = "1.6.1"

        def set_data(self, f_inner, f_outer, n, dim):
            self.f_inner, self.f_outer, self.n, self.dim = f_inner, f_outer, n, dim

        def get_one_result(self):
            import jax.numpy as jnp
            return dict(inner_var=jnp.zeros(self.dim), outer_var=jnp.zeros(self.dim))

        def evaluate_result(self, inner_var, outer_var):
            return dict(value=float(((inner_var - 1) ** 2).sum()))

        def get_objective(self):
            import jax.numpy as jnp
            zeros = jnp.zeros(self.dim)
            return dict(f_inner=self.f_inner, f_outer=self.f_outer, n_inner_samples=self.n, n_outer_samples=self.n,
                        inner_var0=zeros, outer_var0=zeros)
"""
DATASET = """
    from benchopt import BaseDataset

    class Dataset(BaseDataset):
        name = "tiny"

        def get_data(self):
            import jax
            import jax.numpy as jnp
            inner = jax.jit(lambda t, v, start=0, batch_size=1: 0.5 * jnp.sum((t - v) ** 2), static_argnames="batch_size")
            outer = jax.jit(lambda t, v, start=0, batch_size=1: 0.5 * jnp.sum((t - 1) ** 2), static_argnames="batch_size")
            return dict(f_inner=inner, f_outer=outer, n=20, dim=2)
"""


@pytest.mark.slow
def test_benchopt_runs_it(tmp_path):
    place = tmp_path / "benchmark"
    for name, text in (
        ("objective.py", OBJECTIVE),
        ("datasets/tiny.py", DATASET),
        ("solvers/nhgd_solver.py", FILE.read_text()),
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(textwrap.dedent(text))
    words = [
        "-m",
        "benchopt",
        "run",
        str(place),
        "-s",
        "nhgd[method=[aid-cg,soba]]",
        "-d",
        "tiny",
        "-n",
        "5",
        "-r",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, *words, "--no-plot", "--output", "found"], capture_output=True, text=True, cwd=tmp_path, timeout=500, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = place.glob("outputs/**/found.parquet")
    table = SimpleNamespace(rows=pytest.importorskip("pandas").read_parquet(found))
    last = table.rows.groupby("solver_name").objective_value.last()
    assert len(last) == 2
    assert (last < 0.3).all()  # from 2
