"""`nhgd reproduce theory`: its models against autograd, its inner loop against the library's, and its fits."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import nhgd
import nhgd.reproduce.theory
from nhgd.inverse import FisherDense
from nhgd.reproduce.theory import Effort, theory
from nhgd.reproduce.theory.experiment import claims
from nhgd.reproduce.theory.inner_loop import Estimator, Followed, InnerLoop
from nhgd.reproduce.theory.misspecified import fisher_of, mixed, total_variation
from nhgd.reproduce.theory.models import Quadratic, Softmax, examples
from nhgd.reproduce.theory.outer import Outer
from nhgd.reproduce.theory.slopes import fitted
from nhgd.reproduce.theory.tails import growth
from tests.commands import answer, refusal

MODELS = examples()


def drawn(model, runs=3, batch=2):
    generator = torch.Generator().manual_seed(0)
    v = 0.2 * torch.randn(runs, model.W.shape[1], generator=generator, dtype=torch.float64)
    theta = model.solution(v) * 1.1
    return v, theta, model.draw((runs, batch), generator)


@pytest.mark.parametrize("name", MODELS)
def test_derivatives_are_those_of_the_likelihood(name):
    model = MODELS[name]
    v, theta, xi = drawn(model)
    gradients, cross = model.derivatives(v, theta, xi)

    def loss(v: Tensor, theta: Tensor, run: int, sample: int) -> Tensor:
        one = tuple(part[run : run + 1, sample : sample + 1] for part in xi)
        return model.negative_log_likelihood((model.scale(v[None]) * theta), one)[0, 0]

    for run in range(3):
        for sample in range(2):

            def gradient(v: Tensor, run=run, sample=sample) -> Tensor:
                return torch.func.grad(loss, argnums=1)(v, theta[run], run, sample)

            torch.testing.assert_close(gradients[run, sample], gradient(v[run]))
            torch.testing.assert_close(cross[run, sample], torch.func.jacrev(gradient)(v[run]))


@pytest.mark.parametrize("name", MODELS)
def test_the_solution_is_stationary_and_its_derivatives_are_expected_ones(name):
    model = MODELS[name]
    v = drawn(model)[0]

    def expected(v: Tensor, theta: Tensor) -> Tensor:
        return model.expected(model.scale(v[None])[0] * theta)

    at = v[0], model.solution(v)[0]
    assert torch.func.grad(expected, argnums=1)(*at).abs().max() < 1e-12
    torch.testing.assert_close(
        torch.func.jacrev(torch.func.grad(expected, argnums=1), argnums=1)(*at), model.hessian(v)[0]
    )
    torch.testing.assert_close(torch.func.jacrev(torch.func.grad(expected, argnums=1))(*at), model.cross(v)[0])


@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_the_hessian_of_a_right_model_is_its_fisher_matrix_and_of_a_wrong_one_is_not(name):
    model = MODELS[name]
    torch.testing.assert_close(fisher_of(model), model.fisher)
    assert total_variation(model) < 1e-15
    wrong = mixed(model, 0.4)
    assert torch.func.grad(wrong.expected)(wrong.phi).abs().max() < 1e-12
    assert total_variation(wrong) > 0.01
    assert (fisher_of(wrong) - wrong.fisher).norm() > 0.01 * wrong.fisher.norm()


@dataclass(frozen=True, eq=False)
class Scripted(Quadratic):
    """Draws that were made before."""

    made: list = field(default_factory=list)

    def draw(self, shape, generator):
        assert shape == (1, 1)
        return self.made.pop(0)


def test_the_inner_loop_is_that_of_algorithm_1():
    """The library's own solver on the same samples moves v to the same place."""
    model = MODELS["quadratic"]
    generator = torch.Generator().manual_seed(1)
    T, alpha = 7, 0.1
    samples = [model.draw((1, 1), generator) for _ in range(T)]
    v, theta = torch.full((4,), 0.1).double(), model.phi * 0.8
    script = Scripted(model.phi, model.W, model.x, made=list(samples))
    A = Followed(Estimator(FisherDense(form="inverse")), 1, 4)
    loop = InnerLoop(script, v[None], theta[None], 1, generator, {"A": A})
    loop.run(T)
    outer = Outer(model)
    f_v, f_theta = outer.gradients(v[None], loop.theta)
    expected = v - alpha * (f_v - (loop.cross.mT @ (A.A @ f_theta[..., None]))[..., 0])[0]

    problem = nhgd.Bilevel(
        lambda theta, v, batch: (batch[0] @ (v.exp() * theta) - batch[1]).square() / 2,
        lambda theta, v, batch: (theta - outer.target).square().sum() / 2 + 0.05 * v.square().sum(),
        theta.clone(),
        v.clone(),
    )
    mu, L = model.curvatures
    method = nhgd.algorithm.NHGD(FisherDense(form="inverse"), cross="trajectory")
    data = [(x[0], y[0]) for x, y in samples]
    solver = nhgd.Solver(
        problem, data, [torch.zeros(1).double()], method=method, inner_steps=T,
        inner_lr=nhgd.schedule.Strong(mu, L), outer_lr=alpha, compile=False,
    )  # fmt: skip
    solution = solver.run(steps=1)
    torch.testing.assert_close(solution.theta, loop.theta[0])
    torch.testing.assert_close(solution.v, expected[0] if expected.ndim > 1 else expected)


@pytest.mark.parametrize("records", ["sample", "batch", "raw"])
@pytest.mark.parametrize("update", ["average", "ema"])
def test_the_matrices_followed_are_those_of_the_library(records, update):
    followed = Followed(Estimator(FisherDense(form="inverse", update=update, records=records)), 3, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        followed.observe(torch.randn(3, 5, 4, generator=generator, dtype=torch.float64))
    assert followed.difference < 1e-12


def test_slopes_and_powers_of_exact_laws_are_found():
    x = [10.0, 100.0, 1000.0]
    errors = torch.tensor([[3 * value**-0.5 for value in x] for _ in range(4)])
    found = fitted(x, errors)
    assert found.slope == pytest.approx(-0.5)
    assert found.low == pytest.approx(found.high)
    u = (torch.arange(1, 4001, dtype=torch.float64) - 0.5) / 4000
    assert growth((-u.log()).sqrt())["power"] == pytest.approx(1, abs=0.01)  # the tail of the bound
    heavy = growth(-u.log())
    assert heavy["power"] == pytest.approx(2, abs=0.02)
    assert heavy["power_low"] > 1  # a heavier one is seen


@pytest.fixture(scope="module")
def smallest():
    return theory(Effort.smallest())


def test_what_is_measured_is_held_against_what_is_claimed(smallest):
    """The smallest effort proves nothing, and says so; a claim is held where the slopes are those of the theorems."""
    found = copy.deepcopy(smallest)
    assert {row["claim"] for row in found["claims"] if row["held"]} != {row["claim"] for row in found["claims"]}
    for one in found["rates"].values():
        assert one["largest_difference_from_FisherDense"] < 1e-12
        for name in ("inverse, average", "cross, trajectory", "theta", "cross, M = T fresh samples"):
            one["curves"][name]["slope"] = -0.52
    assert all(row["held"] for row in claims(found)[:4])
    for name in list(found["rates"])[:3]:
        found["rates"][name]["curves"]["inverse, average"]["slope"] = -0.42
    assert [row["held"] for row in claims(found)[:2]] == [False, True]


def test_the_command_writes_what_it_says(tmp_path, monkeypatch, smallest):
    monkeypatch.setattr(nhgd.reproduce.theory, "theory", lambda effort, seed, say: smallest | {"seed": seed})
    said = answer("reproduce", "theory", "--quick", "--out", tmp_path / "r")
    assert said["quick"]
    assert json.loads((tmp_path / "r" / "theory.json").read_text())["claims"] == said["claims"]
    assert {
        "theory.txt",
        "theory-rates.png",
        "theory-tails.png",
        "theory-outer.png",
        "theory-misspecification.png",
    } <= {p.name for p in (tmp_path / "r").iterdir()}


def test_the_commands_refusals_are_sentences(tmp_path):
    assert "There is no experiment" in refusal("reproduce", "theroy")
    assert "draws its own data" in refusal("reproduce", "theory", "--data", tmp_path)


def test_softmax_probabilities_are_those_drawn():
    model = Softmax.example()
    _, y = model.draw((1, 40_000), torch.Generator().manual_seed(0))
    found = torch.stack([(y == c).double().mean() for c in range(3)])
    assert (found - model.truth.mean(0)).abs().max() < 0.02  # eight deviations
