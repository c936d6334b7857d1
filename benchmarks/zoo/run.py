"""One run of one method on one problem, and what is kept of it."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn

import nhgd
from benchmarks.zoo.case import Batch, Builder, Case
from nhgd.stop import AbstractStop, Spent

Record: TypeAlias = dict[str, Any]
START = "start"  # the name of a run without outer steps: v as it was given


def equivalents(row: Mapping[str, Any]) -> int:
    """Gradient-equivalents in counters: every gradient, Hessian product and cross product is one."""
    return int(row["gradients"] + row["hvps"] + row["cross"])


@dataclass(frozen=True)
class Equivalents(AbstractStop[int]):
    """So many gradient-equivalents. The outer step that would go beyond is the last."""

    name: ClassVar[str] = "equivalents"
    limit: int

    def init(self) -> int:
        """Nothing spent."""
        return 0

    def update(self, state: int, row: Mapping[str, Any]) -> int:
        """The counters are totals."""
        return equivalents(row)

    def holds(self, spent: Spent, state: int) -> bool:
        """All spent."""
        return state >= self.limit


def run_on(problem: nhgd.Bilevel, batch: Batch, iterations: int = 300) -> float:
    """Train theta to its end at this v, by L-BFGS on all samples; the norm of the gradient there."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in problem.theta.leaves]
    optimizer = torch.optim.LBFGS(
        leaves, max_iter=iterations, tolerance_grad=1e-10, tolerance_change=1e-20, line_search_fn="strong_wolfe"
    )

    def closure() -> torch.Tensor:
        value = problem.objective(batch, leaves)
        for leaf, slope in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            leaf.grad = slope
        return value.detach()

    with problem.guarded(seed=0), torch.enable_grad():
        optimizer.step(closure)
        gradient = torch.autograd.grad(problem.objective(batch, leaves), leaves)
    problem.theta.assign(torch.cat([leaf.detach().reshape(-1) for leaf in leaves]))
    settle_buffers(problem, batch)
    return float(torch.stack([g.square().sum() for g in gradient]).sum().sqrt())


@torch.no_grad()
def settle_buffers(problem: nhgd.Bilevel, batch: Batch) -> None:
    """Make the running statistics of BatchNorm, which the outer loss sees, those of all samples at this theta."""
    given = problem.theta.given
    found = given.modules() if isinstance(given, nn.Module) else ()
    layers = [(module, module.momentum) for module in found if isinstance(module, nn.BatchNorm2d)]
    if layers:
        for module, _ in layers:
            module.momentum = 1.0
        problem.objective(batch)
        for module, momentum in layers:
            module.momentum = momentum


def judged(case: Case, iterations: int = 300) -> Record:
    """The outer loss at this v on the samples that choose and on those that count, the inner problem run on."""
    found: Record = {}
    for name, batch in (("selection", case.selection), ("held_out", case.held_out)):
        if case.adapted is not None:
            problem, inner = case.adapted(batch)
            found["inner_gradient"] = run_on(problem, inner, iterations)
        else:
            problem = case.problem
            if name == "selection":
                found["inner_gradient"] = run_on(problem, case.training_batch, iterations)
        with problem.guarded(seed=0), torch.no_grad():
            found[f"{name}_loss"] = float(problem.outer_value(batch))
            if case.score is not None:
                with problem.theta.view() as theta, problem.v.view() as v:
                    found[f"{name}_score"] = float(case.score(theta, v, batch))
    return found


def run(
    builder: Builder,
    method: str,
    seed: int,
    outer_lr: float,
    digits: Path | None = None,
    share: float = 1.0,
    iterations: int = 300,
) -> Record:
    """Solve and judge.

    Args:
        builder: of the problem.
        method: a name, or "start" for none.
        seed: of the data, of the start and of the run.
        outer_lr: Adam's.
        digits: where to read them from.
        share: of the problem's own budget.
        iterations: of the optimiser that trains theta to its end.
    """
    case = builder(seed, digits)
    record: Record = {"failed": None, "warnings": {}}
    began = time.process_time()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if method != START:
                solver = nhgd.Solver(
                    case.problem,
                    case.inner,
                    case.outer,
                    method=method,
                    inner_steps=case.inner_steps,
                    inner_lr=case.inner_lr,
                    outer_optimizer=torch.optim.Adam,
                    outer_lr=outer_lr,
                    project_v=case.project_v,
                    seed=seed,
                )
                record |= solved(solver, round(share * case.budget))
        except nhgd.NhgdError as error:
            record["failed"] = f"{type(error).__name__}: {error}"
    record["cpu_seconds"] = time.process_time() - began
    record["warnings"] = dict(Counter(f"{item.category.__name__}: {item.message}"[:300] for item in said))
    if record["failed"] is None:
        record |= judged(case, iterations)
    return record


def solved(solver: nhgd.Solver, limit: int) -> Record:
    """What a run within the budget tells of itself."""
    solution = solver.run(stop=[Equivalents(limit)], progress=False)
    calls, last = solution.stats["oracle_calls"], solution.history[-1]
    return {
        "steps": solution.stats["steps"],
        "gradient_equivalents": equivalents(calls),
        "equivalents_a_step": equivalents(calls) / solution.stats["steps"],
        "oracle_calls": calls,
        "inverse": solution.stats["inverse"],
        "poor_solves": solution.stats["poor_solves"],
        "stagnation": solution.stats["stagnation"],
        "last_outer_loss": last["outer_loss"],
        "last": {key: last[key] for key in ("residual", "damping", "inner_distance") if key in last},
    }
