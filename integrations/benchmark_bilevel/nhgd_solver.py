"""nhgd's methods as a solver of benchopt's benchmark_bilevel (https://github.com/benchopt/benchmark_bilevel).

Copy this file into `solvers/` of a checkout of that benchmark, and install nhgd beside it:

    cp nhgd_solver.py benchmark_bilevel/solvers/
    benchopt run benchmark_bilevel -s "nhgd[method=[aid-cg,soba]]" -s SOBA -d simulated

The benchmark's problems are functions of JAX; torch sees their losses, one for each sample, with first and second derivatives
by JAX. So every method runs as it is, and its time includes the way between the two: compare it with the benchmark's own
solvers by iterations and by what they reach, not by milliseconds.
"""

from benchopt import BaseSolver
from benchopt.stopping_criterion import SufficientProgressCriterion

try:
    from benchmark_utils.constants import PATIENCE
except ImportError:  # outside of the benchmark, as in tests
    PATIENCE = 100

import warnings
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.flatten_util import ravel_pytree

import nhgd


class Solver(BaseSolver):
    """One of nhgd's methods, with constant step sizes."""

    name = "nhgd"
    requirements = ["pip::nhgd", "jax", "jaxlib"]
    stopping_criterion = SufficientProgressCriterion(patience=PATIENCE, strategy="callback")
    sampling_strategy = "callback"
    parameters = {
        "method": ["nhgd", "aid-cg", "stocbio", "soba"],
        "step_size": [0.1],
        "outer_ratio": [1.0],
        "inner_steps": [10],
        "batch_size": [64],
        "eval_freq": [16],
        "random_state": [1],
    }

    @staticmethod
    def get_next(stop_val):
        """The number of evaluations after this one."""
        return stop_val + 1

    def set_objective(self, f_inner, f_outer, n_inner_samples, n_outer_samples, inner_var0, outer_var0):
        """The benchmark's problem; what JAX compiles is compiled here, outside of the clock."""
        inner0, self.inner_tree = ravel_pytree(inner_var0)
        outer0, self.outer_tree = ravel_pytree(outer_var0)
        self.start = torch.from_numpy(np.array(inner0)), torch.from_numpy(np.array(outer0))
        self.functions = [SampleLosses(f, self.inner_tree, self.outer_tree) for f in (f_inner, f_outer)]
        whole = self.batch_size == "full"
        self.batches = [
            nhgd.Data(torch.arange(n), batch=n if whole else min(self.batch_size, n))
            for n in (n_inner_samples, n_outer_samples)
        ]
        with _quiet(), self._begin() as solver:
            solver.step()

    def run(self, callback):
        """Outer steps, `eval_freq` between two evaluations."""
        with self._begin() as solver:
            while callback():
                with _quiet():
                    for _ in range(self.eval_freq):
                        solver.step()

    def get_result(self):
        """Both variables, in the form that the benchmark gave."""
        return {
            "inner_var": self.inner_tree(jnp.asarray(self.theta.numpy())),
            "outer_var": self.outer_tree(jnp.asarray(self.v.numpy())),
        }

    def _begin(self):
        self.theta, self.v = (tensor.clone() for tensor in self.start)
        inner, outer = self.functions
        problem = nhgd.Bilevel(
            lambda theta, v, batch: inner(theta, v, batch[-1]),
            lambda theta, v, batch: outer(theta, v, batch[-1]).mean(),
            theta=self.theta,
            v=self.v,
        )
        return nhgd.Solver(
            problem,
            *self.batches,
            method=self.method,
            inner_steps=self.inner_steps,
            inner_lr=self.step_size,
            outer_lr=self.step_size / self.outer_ratio,
            seed=self.random_state,
        )


@contextmanager
def _quiet():
    """Without the warning that torch cannot vectorise over functions of JAX, whose samples are differentiated one by one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Per-sample gradients could not be vectorised")
        yield


class SampleLosses:
    """The losses (B,) of samples by a function of the benchmark, f(inner, outer, start=i, batch_size=1) for sample i."""

    def __init__(self, f, inner_tree, outer_tree):
        def losses(theta, v, index):
            inner, outer = inner_tree(theta), outer_tree(v)
            return jax.vmap(lambda i: f(inner, outer, start=i, batch_size=1))(index)

        def first(theta, v, index, along):
            return jax.vjp(lambda theta, v: losses(theta, v, index), theta, v)[1](along)

        def second(theta, v, index, along, in_theta, in_v):
            _, pull = jax.vjp(lambda theta, v, along: first(theta, v, index, along), theta, v, along)
            return pull((in_theta, in_v))

        self.losses, self.first, self.second = jax.jit(losses), jax.jit(first), jax.jit(second)

    def __call__(self, theta, v, index):
        return _Losses.apply(self, theta, v, index)


class _Losses(torch.autograd.Function):
    """The losses; their backward pass is a function of its own, so that it can be differentiated."""

    @staticmethod
    def forward(ctx, by, theta, v, index):
        ctx.by = by
        ctx.save_for_backward(theta, v, index)
        return _to_torch(by.losses(*map(_to_jax, (theta, v, index))))

    @staticmethod
    def backward(ctx, along):
        return None, *_Gradient.apply(ctx.by, *ctx.saved_tensors, along), None


class _Gradient(torch.autograd.Function):
    """The derivative of the losses along (B,), in theta and v."""

    @staticmethod
    def forward(ctx, by, theta, v, index, along):
        ctx.by = by
        ctx.save_for_backward(theta, v, index, along)
        return tuple(map(_to_torch, by.first(*map(_to_jax, (theta, v, index, along)))))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, in_theta, in_v):
        in_theta_, in_v_, in_along = ctx.by.second(*map(_to_jax, (*ctx.saved_tensors, in_theta, in_v)))
        return None, _to_torch(in_theta_), _to_torch(in_v_), None, _to_torch(in_along)


def _to_jax(tensor):
    return jnp.asarray(tensor.detach().contiguous().numpy())


def _to_torch(array):
    return torch.from_numpy(np.array(array))
