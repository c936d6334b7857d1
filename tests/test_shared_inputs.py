"""Layers that are given the same tensor have one factor of their inputs, which is kept and decomposed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhgd
from nhgd._plan import sharing
from nhgd._recording.sampling import Sampling
from nhgd.algorithm import NHGD
from nhgd.inverse import EKFAC, KFAC
from nhgd.inverse._learned import eigenbasis
from nhgd.inverse._learned.effort import Effort
from nhgd.inverse._learned.eigenbasis import decomposed, decompositions
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.statistics import merge
from nhgd.ridge import Ridge
from tests.catalogue import normal
from tests.test_record import weighing


class Attention(nn.Module):
    """Separate projections of one tensor, or of copies of it."""

    def __init__(self, copies: bool, bias: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=bias)
        self.head = nn.Linear(6, 3)
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.embed(x))
        q, k, v = (layer(x.clone() if self.copies else x) for layer in (self.q, self.k, self.v))
        return self.head(F.scaled_dot_product_attention(q, k, v)).mean(1)


def made(copies: bool, bias: bool = True) -> tuple[nhgd.Bilevel, Any]:
    torch.manual_seed(0)
    return weighing(Attention(copies, bias), normal(8, 5, 4))


def pointers(tensors: dict[str, Tensor]) -> int:
    return len({t.data_ptr() for t in tensors.values()})


@pytest.mark.parametrize("split", [None, 4])
@pytest.mark.parametrize("way", ["held", "run", "micro-batches", "sampled"])
@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_states_equal_those_held_separately(make: Any, way: str, split: int | None) -> None:
    settings = {"split": split} if make is KFAC else {}
    if make is EKFAC and split:
        pytest.skip("EKFAC keeps its factors whole")
    effort = Effort(samples=4, places=3, every=1) if way == "sampled" else None
    inverse = make(damping=1e-2, invert_every=2, effort=effort, **settings)
    states = []
    for copies in (True, False):
        problem, batch = made(copies)
        if way == "held":
            states.append(learn(inverse, problem, [batch, batch, batch]))
            continue
        solver = nhgd.Solver(
            problem,
            [batch],
            [batch],
            NHGD(inverse=inverse),
            inner_steps=3,
            accumulate=2 if way == "micro-batches" else 1,
        )
        solver.run(steps=1)
        states.append(solver.loop.executor.keep())
    apart, shared = states
    names = ["q.weight", "k.weight", "v.weight"]
    assert pointers({n: apart.inputs[n] for n in names}) == 3
    assert pointers({n: shared.inputs[n] for n in names}) == 1
    assert pointers(shared.scores) == len(shared.scores)
    if split is None:
        assert pointers({n: shared.bases[n]["input_vectors"] for n in names}) == 1
    if way == "sampled":  # other places are drawn, so that only the structure is the same
        assert {n: t.shape for n, t in apart.inputs.items()} == {n: t.shape for n, t in shared.inputs.items()}
        return
    for kind in ("inputs", "scores", "weights", "blocks"):
        for name, tensor in getattr(apart, kind).items():
            torch.testing.assert_close(getattr(shared, kind)[name], tensor, rtol=1e-12, atol=1e-14)
    u = torch.linspace(-1, 1, sum(apart.sizes.values()), dtype=torch.float64)
    solved = [inverse.solve(state, u, Ridge(0.02))[0] for state in states]
    torch.testing.assert_close(solved[1], solved[0], rtol=1e-9, atol=1e-12)


def test_a_layer_without_a_bias_has_other_inputs() -> None:
    problem, batch = made(copies=False, bias=False)
    state = learn(KFAC(), problem, [batch])
    assert state.inputs["q.weight"] is state.inputs["k.weight"]
    assert state.inputs["v.weight"].shape[1] == state.inputs["q.weight"].shape[1] - 1


def test_layers_that_part_ways_have_factors_of_their_own() -> None:
    problem, batch = made(copies=False)
    state = learn(KFAC(), problem, [batch])
    problem.theta.root.copies = True
    both = learn(KFAC(), problem, [batch], state=state)
    assert pointers({n: both.inputs[n] for n in ("q.weight", "k.weight", "v.weight")}) == 3
    torch.testing.assert_close(both.inputs["q.weight"], state.inputs["q.weight"])


def test_equal_means_are_tied_again() -> None:
    """As after a resume, which reads every tensor on its own; unequal ones are not."""
    new = torch.ones(2, 2)
    means = {"a": torch.eye(2), "b": torch.eye(2), "c": 2 * torch.eye(2)}
    found = merge(means, dict.fromkeys("abc", new), 0.5)
    assert found["a"] is found["b"] is not found["c"]
    torch.testing.assert_close(found["c"], torch.eye(2) + 0.5)
    assert means["a"] is not means["b"]


@pytest.mark.parametrize("together", [512, 0])
def test_decompositions_made_together_are_those_made_one_by_one(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "TOGETHER", together)
    calls = []
    plain = eigenbasis.eigenvalues

    def counted(name: str, matrix: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(matrix))
        return plain(name, matrix)

    monkeypatch.setattr(eigenbasis, "eigenvalues", counted)
    problem, batch = made(copies=False)
    state = learn(KFAC(split=4, damping=1e-2), problem, [batch])
    calls.clear()
    found = decompositions(state, state.inputs, None)
    # 8 distinct factors: the inputs of q, k and v are one; by size, blocks of 6 x 6 scores are halves of 3 rows
    made_of = {tuple(f.shape[1:]) for layer in state.inputs for f in state.blocks_of(layer)}
    assert len(calls) == (len(made_of) if together else 8)
    for layer in state.inputs:
        alone = decomposed(state, layer)
        for one, other in zip(found[layer], alone, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    u = torch.linspace(-1, 1, sum(state.sizes.values()), dtype=torch.float64)
    kept = KFAC(split=4, damping=1e-2)
    x = kept.solve(state, u, Ridge(0.02))[0]
    monkeypatch.setattr(eigenbasis, "TOGETHER", 0)
    torch.testing.assert_close(kept.solve(state, u, Ridge(0.02))[0], x, rtol=1e-12, atol=1e-14)


def test_a_factor_that_is_not_finite_is_named() -> None:
    problem, batch = made(copies=False)
    state = learn(KFAC(), problem, [batch])
    state.scores["k.weight"] = state.scores["k.weight"] * float("nan")
    with pytest.raises(nhgd.NhgdError, match=r"k\.weight"):
        decompositions(state, state.inputs, None)


def test_plan_counts_what_is_shared_once() -> None:
    planned = []
    for copies in (True, False):
        problem, batch = made(copies)
        assert sharing(problem, batch) == (frozenset() if copies else {"k.weight", "v.weight"})
        row = nhgd.plan(problem, batch, inverses=[KFAC(split=None)]).rows[0]
        planned.append((row["bytes"], KFAC(split=None).saved(problem.theta, sharing(problem, batch))))
    factor = 7 * 7 * 8
    assert planned[1][1] == (2 * 3 * factor, 2 * 2 * factor)
    assert planned[0][0] - planned[1][0] == planned[1][1][0]


def test_a_sample_of_the_places_is_one_for_all_that_share_them() -> None:
    drawn = Sampling(None, 2, 0).drawn(4, None, [[5], [5], [5]], [0, 0, 2])
    assert drawn.places[0] is drawn.places[1]
    assert drawn.places[2] is not drawn.places[0]
