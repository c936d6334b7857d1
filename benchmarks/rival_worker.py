"""One participant of benchmarks/rivals.py, in the environment of its own library; it needs NumPy and that library alone.

    python benchmarks/rival_worker.py NAME JOB.npz

It reads lines: `size C` sets the outer step such that the first hypergradient moves the weights that it touches by C in the mean,
`steps N` takes outer steps, and `state` answers with theta, v and the CPU seconds of all steps so far. `hypergradient FILE`
answers with that of a small problem at its optimum. Every answer is one line of JSON; arrays go to a file beside the job.
The adapters are written for this comparison, from the documentation of each library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")
import numpy as np

INNER_STEPS, BATCH, RATE, RIDGE, PRODUCTS = 10, 1024, 0.1, 1e-4, 10


class Samples:
    """Batches without replacement, pass after pass."""

    def __init__(self, samples: int, batch: int, seed: int) -> None:
        self.random, self.samples, self.batch, self.place = np.random.default_rng(seed), samples, batch, samples

    def next(self) -> Any:
        if self.place >= self.samples:
            self.place, self.order = 0, self.random.permutation(self.samples)
        self.place += self.batch
        return self.order[self.place - self.batch : self.place]


class Torch:
    """What participants in torch share: the losses and the data."""

    def __init__(self, job: Any, batch: int = BATCH) -> None:
        import torch

        torch.set_num_threads(1)
        self.torch = torch
        self.x, self.y = torch.from_numpy(job["x"]), torch.from_numpy(job["y"])
        self.outer_x, self.outer_y = torch.from_numpy(job["outer_x"]), torch.from_numpy(job["outer_y"])
        self.theta = torch.zeros(10, self.x.shape[1], dtype=self.x.dtype, requires_grad=True)
        self.v = torch.full((len(self.x),), 0.5, dtype=self.x.dtype, requires_grad=True)
        self.samples = Samples(len(self.x), batch, 0)
        self.size = 0.0

    def batch(self) -> Any:
        index = self.torch.from_numpy(self.samples.next())
        return self.x[index], self.y[index], index

    def inner(self, theta: Any, v: Any, batch: Any) -> Any:
        f = self.torch.nn.functional
        x, y, index = batch
        losses = f.cross_entropy(f.linear(x, theta), y, reduction="none")
        return (v[index] * losses).mean() + RIDGE * theta.square().sum()

    def outer(self, theta: Any) -> Any:
        f = self.torch.nn.functional
        return f.cross_entropy(f.linear(self.outer_x, theta), self.outer_y)

    def step(self) -> Any:
        """One outer step; its hypergradient."""
        gradient = self.hypergradient()
        with self.torch.no_grad():
            self.v.sub_(gradient, alpha=self.size).clamp_(0, 1)
        return gradient.numpy()

    def hypergradient(self) -> Any:
        """Each library's own."""
        raise NotImplementedError

    def at(self, theta: Any, v: Any) -> Any:
        """The hypergradient at an optimum, over the samples as one batch."""
        self.theta.data.copy_(self.torch.from_numpy(theta))
        self.v.data.copy_(self.torch.from_numpy(v))
        return self.hypergradient().numpy()

    def point(self) -> tuple[Any, Any]:
        return self.theta.detach().numpy().copy(), self.v.detach().numpy().copy()


class ByHand(Torch):
    """The floor: gathers, the last batch's cross product, and the identity for the inverse."""

    def hypergradient(self) -> Any:
        grad = self.torch.autograd.grad
        for _ in range(INNER_STEPS):
            batch = self.batch()
            (g,) = grad(self.inner(self.theta, self.v.detach(), batch), self.theta)
            with self.torch.no_grad():
                self.theta.sub_(g, alpha=RATE)
        (u,) = grad(self.outer(self.theta), self.theta)
        (g,) = grad(self.inner(self.theta, self.v, batch), self.theta, create_graph=True)
        return -grad(g, self.v, u)[0]


class TorchOpt(Torch):
    """Implicit differentiation by conjugate gradients."""

    def __init__(self, job: Any, batch: int = BATCH) -> None:
        super().__init__(job, batch)
        import torchopt

        def optimality(theta: Any, v: Any, batch: Any) -> Any:
            return self.torch.func.grad(self.inner, argnums=0)(theta, v, batch)

        solve = torchopt.linear_solve.solve_cg(maxiter=PRODUCTS, atol=0.0)

        @torchopt.diff.implicit.custom_root(optimality, argnums=1, solve=solve)
        def solved(theta: Any, v: Any, batch: Any) -> Any:
            return theta.clone()

        self.solved = solved

    def hypergradient(self) -> Any:
        for _ in range(INNER_STEPS):
            batch = self.batch()
            (g,) = self.torch.autograd.grad(self.inner(self.theta, self.v.detach(), batch), self.theta)
            with self.torch.no_grad():
                self.theta.sub_(g, alpha=RATE)
        found = self.solved(self.theta.detach().requires_grad_(), self.v, batch)
        return self.torch.autograd.grad(self.outer(found), self.v)[0]


class Higher(Torch):
    """Unrolling of the inner loop."""

    def __init__(self, job: Any, batch: int = BATCH) -> None:
        super().__init__(job, batch)
        import higher

        self.higher = higher
        self.model = self.torch.nn.Linear(self.x.shape[1], 10, bias=False).to(self.x.dtype)

    def hypergradient(self) -> Any:
        torch, model = self.torch, self.model
        model.weight.data.copy_(self.theta.detach())
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        with self.higher.innerloop_ctx(model, optimizer) as (net, steps):
            for _ in range(INNER_STEPS):
                x, y, index = self.batch()
                losses = torch.nn.functional.cross_entropy(net(x), y, reduction="none")
                (weight,) = net.parameters()
                steps.step((self.v[index] * losses).mean() + RIDGE * weight.square().sum())
            (weight,) = net.parameters()
            found = torch.autograd.grad(self.outer(weight), self.v)[0]
            self.theta.data.copy_(weight.detach())
        return found


class Betty(Torch):
    """Its engine, whose outer optimiser keeps the hypergradient in place of moving v."""

    def __init__(self, job: Any, batch: int = BATCH) -> None:
        super().__init__(job, batch)
        import logging

        from betty.configs import Config, EngineConfig
        from betty.engine import Engine
        from betty.problems import ImplicitProblem

        logging.disable(logging.CRITICAL)
        torch, me = self.torch, self

        class Weights(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.v = torch.nn.Parameter(me.v.detach().clone())

        class Outer(ImplicitProblem):
            def training_step(self, batch: Any) -> Any:
                return me.outer(self.inner.module.weight)

        class Inner(ImplicitProblem):
            def training_step(self, batch: Any) -> Any:
                return me.inner(self.module.weight, self.outer.module.v, batch)

        class Endless:
            def __iter__(self) -> Any:
                while True:
                    yield me.batch()

            def __len__(self) -> int:
                return 10**9

        class Keep(torch.optim.Optimizer):
            def __init__(self, parameters: Any) -> None:
                super().__init__(parameters, {})

            def step(self, closure: Any = None) -> None:
                (parameter,) = self.param_groups[0]["params"]
                me.found = parameter.grad.detach().clone()

        model, weights = torch.nn.Linear(self.x.shape[1], 10, bias=False).to(self.x.dtype), Weights()
        torch.nn.init.zeros_(model.weight)
        settings = Config(type="cg", cg_iterations=PRODUCTS, unroll_steps=INNER_STEPS, cg_alpha=1.0)
        outer = Outer(
            name="outer",
            module=weights,
            optimizer=Keep(weights.parameters()),
            train_data_loader=[[(self.torch.zeros(1),)]],
            config=Config(first_order=True, retain_graph=True),
        )
        inner = Inner(
            name="inner",
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
            train_data_loader=Endless(),
            config=settings,
        )
        levels = {"u2l": {outer: [inner]}, "l2u": {inner: [outer]}}
        self.engine = Engine(config=EngineConfig(train_iters=10**9), problems=[outer, inner], dependencies=levels)
        self.engine.train()
        self.net, self.weights = inner.module, outer.module
        self.found: Any = None

    def hypergradient(self) -> Any:
        self.net.weight.data.copy_(self.theta.detach())
        self.weights.v.data.copy_(self.v.detach())
        self.found = None
        for _ in range(INNER_STEPS):
            self.engine.train_step()
        self.theta.data.copy_(self.net.weight.detach())
        if self.found is None:
            raise RuntimeError("betty took no outer step")
        return self.found


class Jaxopt:
    """Implicit differentiation by conjugate gradients, compiled."""

    def __init__(self, job: Any, batch: int = BATCH) -> None:
        import jax
        import jax.numpy as jnp
        from jaxopt import implicit_diff, linear_solve

        jax.config.update("jax_enable_x64", job["x"].dtype == np.float64)
        self.jnp = jnp
        x, y, outer_x, outer_y = (jnp.asarray(job[name]) for name in ("x", "y", "outer_x", "outer_y"))
        self.theta = jnp.zeros((10, x.shape[1]), x.dtype)
        self.v = jnp.full((len(x),), 0.5, x.dtype)
        self.samples = Samples(len(x), batch, 0)
        self.size = 0.0

        def losses(theta: Any, a: Any, labels: Any) -> Any:
            logits = a @ theta.T
            return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]

        def inner(theta: Any, v: Any, index: Any) -> Any:
            return (v[index] * losses(theta, x[index], y[index])).mean() + RIDGE * (theta**2).sum()

        slope = jax.grad(inner)

        def solve(matvec: Any, b: Any) -> Any:
            return linear_solve.solve_cg(matvec, b, maxiter=PRODUCTS, tol=0.0)

        @implicit_diff.custom_root(slope, solve=solve)
        def solved(theta: Any, v: Any, index: Any) -> Any:
            return theta

        @jax.jit
        def moved(theta: Any, v: Any, index: Any) -> Any:
            return theta - RATE * slope(theta, v, index)

        @jax.jit
        def hypergradient(theta: Any, v: Any, index: Any) -> Any:
            return jax.grad(lambda w: losses(solved(theta, w, index), outer_x, outer_y).mean())(v)

        @jax.jit
        def stepped(v: Any, gradient: Any, size: Any) -> Any:
            return jnp.clip(v - size * gradient, 0, 1)

        self.moved, self.gradient, self.stepped = moved, hypergradient, stepped

    def restart(self) -> None:
        """Begin again with what is compiled, for the shorter last batch of a pass too."""
        last = self.jnp.arange(len(self.v) % self.samples.batch or self.samples.batch)
        self.moved(self.theta, self.v, last)
        self.gradient(self.theta, self.v, last)
        self.theta, self.v = self.jnp.zeros_like(self.theta), self.jnp.full_like(self.v, 0.5)
        self.samples = Samples(len(self.v), self.samples.batch, 0)
        self.stepped(self.v, self.v, 0.0)

    def found(self) -> Any:
        for _ in range(INNER_STEPS):
            index = self.jnp.asarray(self.samples.next())
            self.theta = self.moved(self.theta, self.v, index)
        return self.gradient(self.theta, self.v, index)

    def step(self) -> Any:
        gradient = self.found()
        self.v = self.stepped(self.v, gradient, self.size)
        return np.asarray(gradient)

    def at(self, theta: Any, v: Any) -> Any:
        self.theta, self.v = self.jnp.asarray(theta), self.jnp.asarray(v)
        return np.asarray(self.found())

    def point(self) -> tuple[Any, Any]:
        return np.asarray(self.theta), np.asarray(self.v)


class Nhgd:
    """This library, by its own driver."""

    def __init__(self, job: Any, batch: int = BATCH, method: str = "nhgd", compile: Any = "graph") -> None:
        import torch

        import nhgd
        from benchmarks import rival_job

        torch.set_num_threads(1)
        self.torch, self.job, self.nhgd = torch, job, nhgd
        tensors = {name: torch.from_numpy(job[name]) for name in ("x", "y", "outer_x", "outer_y")}
        self.settings = {"method": method, "compile": compile, "inner_steps": INNER_STEPS, "inner_lr": RATE}
        self.theta = torch.nn.Linear(tensors["x"].shape[1], 10, bias=False).to(tensors["x"].dtype)
        torch.nn.init.zeros_(self.theta.weight)
        self.v = torch.full((len(tensors["x"]),), 0.5, dtype=tensors["x"].dtype)
        self.problem = nhgd.Bilevel(
            rival_job.inner, rival_job.outer, theta=self.theta, v=self.v, l2=RIDGE, likelihood="categorical"
        )
        self.data = (
            nhgd.Data(tensors["x"], tensors["y"], batch=batch),
            nhgd.Data(tensors["outer_x"], tensors["outer_y"]),
        )
        self.noting = rival_job.Noting
        self.size = 0.0
        self.solver: Any = None

    def step(self) -> Any:
        if self.size == 0:
            kept: list[Any] = []

            def noting(parameters: Any) -> Any:
                kept.append(self.noting(parameters))
                return kept[-1]

            with self.nhgd.Solver(
                self.problem, *self.data, outer_optimizer=noting, **(self.settings | {"compile": False})
            ) as first:
                first.step()
            self.theta.weight.data.zero_()
            return kept[-1].gradient.numpy()
        if self.solver is None:
            self.solver = self.nhgd.Solver(
                self.problem,
                *self.data,
                outer_optimizer=self.torch.optim.SGD,
                outer_lr=self.size,
                project_v=(0, 1),
                **self.settings,
            )
        self.solver.step()
        return None

    def at(self, theta: Any, v: Any) -> Any:
        with self.torch.no_grad():
            self.theta.weight.copy_(self.torch.from_numpy(theta))
            self.v.copy_(self.torch.from_numpy(v))
        (inner,), (outer,) = (list(data) for data in self.data)
        name = self.settings["method"].removeprefix("aid-")
        inverse = {"nhgd": "refined-10"}.get(name, name)
        return self.nhgd.hypergradient(self.problem, inner, outer, inverse=inverse).grad.numpy()

    def point(self) -> tuple[Any, Any]:
        return self.theta.weight.detach().numpy().copy(), self.v.detach().numpy().copy()


PARTICIPANTS: dict[str, Any] = {
    "by hand": ByHand,
    "TorchOpt CG": TorchOpt,
    "higher unroll": Higher,
    "Betty CG": Betty,
    "jaxopt CG": Jaxopt,
    "nhgd": Nhgd,
    "nhgd, eager": lambda job, batch=BATCH: Nhgd(job, batch, compile=False),
    "nhgd aid-cg-10": lambda job, batch=BATCH: Nhgd(job, batch, "aid-cg-10"),
}


def main() -> None:
    name, path = sys.argv[1:3]
    job = dict(np.load(path))
    one, spent, folder = PARTICIPANTS[name](job), 0.0, os.path.dirname(path)
    for line in sys.stdin:
        word, *rest = line.split()
        answer: dict[str, Any] = {}
        try:
            if word == "size":
                gradient = one.step()
                touched = np.abs(gradient[gradient != 0])
                c = float(rest[0]) if len(touched) <= BATCH else 0.3 * float(rest[0])
                size = c / float(touched.mean())
                again = hasattr(one, "restart")
                if again:
                    one.restart()
                else:
                    one = PARTICIPANTS[name](job)
                one.size = answer["size"] = size
            elif word == "steps":
                began = time.process_time()
                for _ in range(int(rest[0])):
                    one.step()
                spent += time.process_time() - began
                answer["seconds"] = spent
            elif word == "state":
                where = os.path.join(folder, name.replace(" ", "-") + "-state.npz")
                theta, v = one.point()
                np.savez(where, theta=theta, v=v)
                answer |= {"file": where, "seconds": spent}
            elif word == "hypergradient":
                given = dict(np.load(rest[0]))
                global RATE
                RATE = float(given["rate"]) if name == "higher unroll" else 0.0  # unrolling needs steps, of 1 / L
                small = PARTICIPANTS[name](given, len(given["x"]))
                where = os.path.join(folder, name.replace(" ", "-") + "-gradient.npz")
                np.savez(where, gradient=small.at(given["theta"], given["v"]))
                answer["file"] = where
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
