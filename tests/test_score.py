"""Inner data that depend on v: the score-function term, on samples that are drawn from a Bernoulli distribution."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nhgd
from nhgd.losses import score_weights

AIM = 0.6  # of theta, which at the inner optimum is the probability of a 1


def inner(theta: Tensor, v: Tensor, batch: Tensor) -> nhgd.Losses:
    """0.5 (theta - xi)^2 with xi drawn to be 1 with probability sigmoid(v), so theta*(v) is that."""
    log_p = batch * F.logsigmoid(v) + (1 - batch) * F.logsigmoid(-v)
    return nhgd.Losses(0.5 * (theta - batch).square(), weights=score_weights(log_p))


def outer(theta: Tensor, v: Tensor, batch: Tensor) -> Tensor:
    return 0.5 * (theta - AIM).square().sum()


def made(probability: float) -> nhgd.Bilevel:
    v = torch.tensor([probability]).double().logit()
    return nhgd.Bilevel(inner, outer, torch.tensor([probability]).double(), v)


@pytest.mark.parametrize("inverse", ["cg", "exact", "identity", "bfgs"])
def test_the_hypergradient_on_exact_proportions_is_that_of_the_expectation(inverse):
    """One 1 in four samples, p = 1/4: d theta*/dv = p (1 - p), by hand; without the weights nothing depends on v."""
    batch = torch.tensor([1.0, 0, 0, 0]).double()
    found = nhgd.hypergradient(made(0.25), batch, torch.zeros(1).double(), inverse=inverse)
    assert found.grad.item() == pytest.approx(0.25 * 0.75 * (0.25 - AIM), rel=1e-12)


class Drawn:
    """Batches from the current v."""

    def __init__(self, v: Tensor, generator: torch.Generator) -> None:
        self.v, self.generator = v, generator

    def __iter__(self):
        for _ in range(8):
            p = self.v.detach().sigmoid().expand(400)
            yield torch.bernoulli(p, generator=self.generator)


@pytest.mark.parametrize("method", ["aid-cg", "nhgd", "soba", "nhgd_momentum"])
def test_methods_find_the_distribution_whose_solution_is_wanted(method):
    """The mean of theta over the last steps: its deviation is below 0.01, so five of them fail in one run of a million."""
    problem = made(0.25)
    data = Drawn(problem.v.given, torch.Generator().manual_seed(0))
    settings = {"inner_steps": 5, "inner_lr": 0.3, "outer_lr": 1.0, "compile": False}
    solver = nhgd.Solver(problem, data, [torch.zeros(1).double()], method=method, **settings)
    found = []
    for row in solver:
        found.append(problem.v.given.sigmoid().item())
        if row["step"] == 160:
            break
    assert abs(sum(found[-60:]) / 60 - AIM) < 0.05
