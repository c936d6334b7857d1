"""Influence of training samples on queries: against dense matrices, per-sample gradients, hypergradients and retraining."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nhgd
from tests import oracles
from tests.catalogue import Make, normal, of_classifier
from tests.catalogue.problems import LAYERED, PER_SAMPLE, batchnorm_train, settled, weighted_logistic
from tests.commands import answer, refusal

pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")


def truth(problem: nhgd.Bilevel, inner_batch: Any, outer_batch: Any, matrix: Tensor) -> Tensor:
    """w_i <s_i, H^{-1} grad f_q> / N with one gradient for each sample and query, (Q, N)."""
    weights, rows = oracles.losses(problem, inner_batch)[1].detach(), oracles.scores(problem, inner_batch)
    queries = []
    for q in range(len(outer_batch[0])):
        theta = oracles.theta_of(problem).requires_grad_()
        value = oracles.outer(problem, oracles.one(outer_batch, q), theta)
        queries.append(torch.autograd.grad(value, theta)[0])
    return torch.stack(queries) @ torch.linalg.solve(matrix, (weights[:, None] * rows).T) / len(rows)


def data(batch: Any, size: int) -> list[Any]:
    """The batch in pieces."""
    return [tuple(t[i : i + size] for t in batch) for i in range(0, len(batch[0]), size)]


def mlp() -> tuple[nhgd.Bilevel, Any, Any]:
    return of_classifier(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), samples=14)


@pytest.mark.parametrize("make", PER_SAMPLE, ids=lambda make: make.__name__)
def test_scores_are_those_of_the_dense_hessian(make: Make) -> None:
    problem, inner_batch, outer_batch = make()
    expected = truth(problem, inner_batch, outer_batch, oracles.hessian(problem, inner_batch))
    with oracles.undisturbed(problem):
        found = nhgd.influence(problem, [inner_batch], [outer_batch], inverse="exact")
    torch.testing.assert_close(found.scores, expected, rtol=1e-8, atol=1e-10)
    losses = [oracles.outer(problem, oracles.one(outer_batch, q)) for q in range(len(outer_batch[0]))]
    torch.testing.assert_close(found.query_losses, torch.stack(losses).detach())


@pytest.mark.parametrize("make", LAYERED, ids=lambda make: make.__name__)
def test_ekfac_is_that_of_all_samples_whatever_their_batches(make: Make) -> None:
    problem, inner_batch, outer_batch = make()
    matrix = oracles.ekfac(problem, inner_batch) + oracles.ridge_hessian(problem)
    expected = truth(problem, inner_batch, outer_batch, matrix)
    for pieces in ([inner_batch], data(inner_batch, 3)):
        found = nhgd.influence(problem, pieces, data(outer_batch, 5), nhgd.inverse.EKFAC(damping=None))
        torch.testing.assert_close(found.scores, expected, rtol=1e-7, atol=1e-9)
        assert found.stats["walks"] == 1


@pytest.mark.parametrize("inverse", ["kfac", "fisher_dense", "fisher_window", "fisher_diagonal", "cg", "identity"])
def test_little_memory_and_small_batches_change_nothing(inverse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, inner_batch, outer_batch = mlp()
    expected = nhgd.influence(problem, [inner_batch], [outer_batch], inverse)
    monkeypatch.setattr("nhgd._influence.LEAST_MEMORY", 1)
    found = nhgd.influence(problem, [inner_batch], [outer_batch], inverse, memory=2 * 8 * 2 * problem.theta.numel)
    assert found.stats["walks"] == 4  # two queries at a time, of eight
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-9, atol=1e-12)


def test_the_hypergradient_in_the_weights_is_the_mean_over_queries() -> None:
    problem, inner_batch, outer_batch = mlp()
    found = nhgd.influence(problem, [inner_batch], [outer_batch], "exact")
    v = problem.v.given  # the weight is sigmoid(v)
    expected = nhgd.hypergradient(problem, inner_batch, outer_batch, "exact").grad
    torch.testing.assert_close(-found.total * (1 - v.sigmoid()), expected)


def test_sign_and_size_are_those_of_leaving_a_sample_out() -> None:
    """The first-order prediction against training again, with enough samples for it to hold."""
    x, true = normal(300, 3), normal(3)
    y = x @ true + 0.5 * normal(300)
    a = normal(4, 3)

    def inner(theta: Tensor, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses((batch[0] @ theta - batch[1]).square(), v[batch[2]])

    problem = nhgd.Bilevel(
        inner,
        lambda theta, v, batch: (batch[0] @ theta - batch[1]).square().mean(),
        normal(3),
        torch.ones(300).double(),
    )
    train, queries = nhgd.Data(x, y, batch=50), nhgd.Data(a, a @ true + normal(4))
    whole = (x, y, torch.arange(300))
    oracles.assign(problem.theta.given, oracles.solve_inner(problem, whole))
    found = nhgd.influence(problem, train, queries, "exact")
    for i in (0, 7, 190):
        v = torch.ones(300, dtype=torch.float64)
        v[i] = 0.0
        theta = oracles.solve_inner(problem, whole, v)
        losses = (a @ theta - queries.tensors[1]).square()
        torch.testing.assert_close(losses - found.query_losses, found.scores[:, i], rtol=0.05, atol=1e-5)


def test_order_is_that_of_the_data_although_it_shuffles() -> None:
    plain, (x, y, index), outer_batch = mlp()
    expected = nhgd.influence(plain, (x, y, index), outer_batch, "exact").scores
    without_index = lambda model, v, batch: plain.outer(model, v, batch[:2])  # noqa: E731
    problem = nhgd.Bilevel(plain.inner, without_index, plain.theta.given, plain.v.given, plain.l2)
    found = nhgd.influence(problem, nhgd.Data(x, y, batch=4), nhgd.Data(*outer_batch, batch=3), "exact").scores
    torch.testing.assert_close(found, expected)
    loader = DataLoader(TensorDataset(x, y, index), batch_size=5)
    torch.testing.assert_close(nhgd.influence(problem, loader, outer_batch, "exact").scores, expected)
    with pytest.raises(nhgd.InputError, match="shuffle=False"):
        nhgd.influence(problem, DataLoader(TensorDataset(x, y, index), shuffle=True), outer_batch)


def test_a_sample_of_weight_zero_has_no_influence() -> None:
    problem, inner_batch, outer_batch = weighted_logistic()
    with torch.no_grad():
        problem.v.given[3] = -1e9
    scores = nhgd.influence(problem, [inner_batch], [outer_batch], "exact").scores
    assert not scores[:, 3].any()
    assert scores[:, 2].any()


def test_an_outer_function_that_cannot_be_vectorised_is_taken_query_by_query() -> None:
    problem, inner_batch, outer_batch = settled(weighted_logistic)
    expected = nhgd.influence(problem, [inner_batch], [outer_batch], "exact").scores

    def outer(theta: Any, v: Any, batch: Any) -> Tensor:
        float(batch[0].sum())  # which vmap refuses
        return problem.outer(theta, v, batch)

    branching = nhgd.Bilevel(problem.inner, outer, problem.theta.given, problem.v.given, problem.l2)
    torch.testing.assert_close(nhgd.influence(branching, [inner_batch], [outer_batch], "exact").scores, expected)


def test_helpful_and_harmful_samples_are_ranked() -> None:
    problem, inner_batch, outer_batch = mlp()
    found = nhgd.influence(problem, [inner_batch], [outer_batch])
    assert found.helpful(3).tolist() == found.scores.mean(0).topk(3).indices.tolist()
    assert found.harmful(2, query=1).tolist() == (-found.scores[1]).topk(2).indices.tolist()


def test_fading_is_off_unless_it_was_set() -> None:
    problem, inner_batch, outer_batch = mlp()
    pieces = data(inner_batch, 2)
    plain, same = (nhgd.influence(problem, pieces, [outer_batch], i).scores for i in ("kfac", nhgd.inverse.KFAC()))
    torch.testing.assert_close(plain, same)
    faded = nhgd.influence(problem, pieces, [outer_batch], nhgd.inverse.KFAC(beta=0.5)).scores
    assert (faded - plain).norm() > 1e-3 * plain.norm()


def test_what_cannot_be_asked_is_refused() -> None:
    problem, inner_batch, outer_batch = batchnorm_train()
    with pytest.raises(nhgd.InputError, match=r"model\.eval\(\)"):
        nhgd.influence(problem, [inner_batch], [outer_batch])
    problem, inner_batch, outer_batch = mlp()
    with pytest.raises(nhgd.InputError, match="memory"):
        nhgd.influence(problem, [inner_batch], [outer_batch], memory=10)
    with pytest.raises(nhgd.InputError, match="yields no batch"):
        nhgd.influence(problem, [inner_batch], [])
    bad = (outer_batch[0].clone().fill_(float("nan")), outer_batch[1])
    with pytest.raises(nhgd.InputError, match="query_data contains nan"):
        nhgd.influence(problem, [inner_batch], [bad])


def test_a_poor_solve_is_said() -> None:
    problem, inner_batch, outer_batch = mlp()
    with pytest.warns(nhgd.InverseWarning, match="relative residual"):
        found = nhgd.influence(problem, [inner_batch], [outer_batch], nhgd.inverse.CG(steps=1))
    assert found.stats["residual"] > 0.1


def test_sequences_add_up_over_their_places() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    def inner(model: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        return nhgd.Losses(F.mse_loss(model(batch[0]), batch[1], reduction="none").sum((1, 2)), v[batch[2]].exp())

    def outer(model: Any, v: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    problem = nhgd.Bilevel(inner, outer, net, normal(6), l2=0.1)
    inner_batch, outer_batch = (normal(6, 5, 2), normal(6, 5, 2), torch.arange(6)), (normal(3, 4, 2), normal(3, 4, 2))
    expected = truth(problem, inner_batch, outer_batch, oracles.hessian(problem, inner_batch))
    found = nhgd.influence(problem, [inner_batch], [outer_batch], "exact")
    torch.testing.assert_close(found.scores, expected, rtol=1e-8, atol=1e-10)


def test_the_command_writes_its_scores(tmp_path: Path) -> None:
    said = answer(
        "influence", "cleaning", "--preset", "quick", "--set", "weights=sigmoid", "--out", tmp_path, "--top", 2
    )
    with np.load(tmp_path / "scores.npz") as kept:
        scores = kept["scores"]
    assert scores.shape == (said["queries"], said["samples"]) == (100, 300)
    order = scores.mean(0).argsort()
    assert [row["sample"] for row in said["harmful"]] == order[:2].tolist()
    assert [row["sample"] for row in said["helpful"]] == order[::-1][:2].tolist()
    assert said["metrics"]["auc"] > 0.75
    assert json.loads((tmp_path / "result.json").read_text())["query_loss"] == said["query_loss"]


@pytest.mark.parametrize("task", ["fewshot", "l2", "distillation"])
def test_the_command_knows_other_tasks(task: str) -> None:
    said = answer("influence", task, "--preset", "quick")
    assert said["stats"]["inverse"] == ("fisher_window" if task == "fewshot" else "ekfac")
    assert said["deviation"] > 0


def test_the_commands_refusals_are_sentences() -> None:
    assert "ekfac.damping" in refusal("influence", "l2", "--set", "inner_steps=3")
    assert "--top must be" in refusal("influence", "l2", "--top", 0)
