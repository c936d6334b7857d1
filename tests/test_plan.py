"""Plans: what is counted is what is done, and the batch that is given is the one that is planned for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import nhgd
from nhgd._cost import Operation, Work, work
from nhgd._recording.recorder import Recorder
from nhgd._shape import Shape
from nhgd.inverse import resolve
from nhgd.inverse._learned.learning import learn
from nhgd.oracle import Oracle
from tests import catalogue, oracles

LEARNT = ("kfac", "ekfac", "fisher_window", "fisher_dense")


class Done(TorchDispatchMode):
    """What is really run: multiplications in matrix products, and the sizes of factorisations."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplications = 0.0
        self.factorised: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        packet = getattr(torch.ops.aten, name.rstrip("_"), None)  # addmm_ takes what addmm does
        if packet in flop_registry:
            self.multiplications += flop_registry[packet](*args, **(kwargs or {}), out_val=found) / 2
        if name in ("mv", "addmv_"):
            self.multiplications += args[-2].numel()
        for kind, known in (("eigh", "_linalg_eigh"), ("cholesky", "linalg_cholesky_ex")):
            if name == known:
                matrix = args[0]
                self.factorised[kind, matrix.shape[-1]] += matrix[..., 0, 0].numel()
        return found


def planned(operations: list[Operation]) -> tuple[float, Counter[tuple[str, int]]]:
    """The same as `Done` has, of operations that were counted from shapes."""
    multiplications = sum(o.size * o.times for o in operations if o.kind == "matmul")
    factorised: Counter[tuple[str, int]] = Counter()
    for o in operations:
        if o.kind in ("eigh", "cholesky"):
            factorised[o.kind, int(o.size)] += int(o.times)
    return multiplications, +factorised


def classifier(net: nn.Module, samples: int, *shape: int) -> tuple[nhgd.Bilevel, Any]:
    torch.manual_seed(0)
    net = net.double()
    batch = torch.randn(samples, *shape, dtype=torch.float64), torch.arange(samples) % 4, torch.arange(samples)

    def inner(model: nn.Module, v: torch.Tensor, b: Any) -> nhgd.Losses:
        z = model(b[0])
        return nhgd.Losses(F.cross_entropy(z, b[1], reduction="none"), weights=torch.sigmoid(v[b[2]]), outputs=z)

    return nhgd.Bilevel(
        inner,
        lambda model, v, b: F.cross_entropy(model(b[0]), b[1]),
        net,
        torch.zeros(samples, dtype=torch.float64),
        l2=0.1,
    ), batch


def mlp() -> tuple[nhgd.Bilevel, Any, dict[str, int]]:
    return *classifier(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4)), 50, 40), {}


def net_of_convolutions() -> tuple[nhgd.Bilevel, Any, dict[str, int]]:
    layers = nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 4)
    return *classifier(nn.Sequential(*layers), 12, 2, 6, 6), {"0.weight": 16, "2.weight": 4, "4.weight": 1}


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.parametrize("made", [mlp, net_of_convolutions], ids=["mlp", "convolutions"])
def test_what_is_counted_is_what_is_done(made: Any, name: str) -> None:
    """Factorisations are those that are made, and multiplications are right to a factor of three."""
    problem, batch, places = made()
    inverse = resolve(name)
    state = learn(inverse, problem, [batch])
    counted: Work = work(inverse, Shape.of(problem.theta, len(batch[0]), places))
    at = Oracle(problem, [batch], batch)
    u = at.outer().theta
    with Done() as done:
        inverse.apply(state, u, at)
    multiplications, factorised = planned(counted.solve)
    assert factorised == done.factorised
    assert multiplications / 3 <= done.multiplications <= 3 * multiplications
    with problem.guarded(0):
        record = Recorder(problem, inverse.records, inverse.fisher).step(batch).record
    assert record is not None
    with Done() as done:
        inverse.observe(state, record)  # the second one, which makes no new basis
    periodic = [o for o in counted.step if o.times >= 1]
    multiplications, _ = planned(periodic)
    assert multiplications / 3 <= done.multiplications <= 3 * multiplications


def test_eigendecompositions_that_are_kept_are_counted_with_the_steps() -> None:
    problem, batch, _ = mlp()
    shape = Shape.of(problem.theta, len(batch[0]))
    in_solve, in_steps = (work(nhgd.inverse.KFAC(invert_every=every), shape) for every in (None, 5))
    assert planned(in_solve.solve)[1] == Counter({("eigh", 41): 1, ("eigh", 30): 1, ("eigh", 31): 1, ("eigh", 4): 1})
    assert not planned(in_steps.solve)[1]
    assert sum(o.times for o in in_steps.step if o.kind == "eigh") == pytest.approx(4 / 5)


def test_refinement_factorises_once_and_applies_at_each_step() -> None:
    problem, batch, _ = mlp()
    shape = Shape.of(problem.theta, len(batch[0]))
    alone, refined = work(nhgd.inverse.KFAC(), shape), work(nhgd.inverse.Refined(nhgd.inverse.KFAC(), steps=3), shape)
    assert planned(refined.solve)[1] == planned(alone.solve)[1]
    assert planned(refined.solve)[0] == 4 * planned(alone.solve)[0]
    assert refined.step == alone.step


def test_a_plan_is_for_the_batch_that_is_given() -> None:
    problem, batch, _ = mlp()
    with oracles.undisturbed(problem):
        plan = nhgd.plan(problem, batch, inverses=["fisher_window", "fisher_dense", "cg"])
        half = nhgd.plan(problem, tuple(t[:25] for t in batch), inverses=["fisher_window", "fisher_dense", "cg"])
    assert (plan.samples, half.samples) == (50, 25)
    assert plan.measured
    whole_bytes, half_bytes = ([row["bytes"] for row in p.rows] for p in (plan, half))
    assert whole_bytes[0] > half_bytes[0]
    assert whole_bytes[1] - half_bytes[1] == 25 * problem.theta.numel * 8  # rows of the samples, in float64
    assert whole_bytes[2] == half_bytes[2]
    assert "once 1024 samples fill its window" in plan.rows[0]["note"]
    assert "batches of 50" in str(plan)


def test_a_row_tells_the_solve_and_the_step_apart() -> None:
    problem, batch, _ = mlp()
    rows = {row["inverse"]: row for row in nhgd.plan(problem, batch).rows}
    assert rows.keys() == set(nhgd.inverse.INVERSES)
    for name, row in rows.items():
        assert 0 < row["solve_milliseconds"] < row["milliseconds"]
        assert (row["step_milliseconds"] > 0) == (resolve(name).learner is not None)
    assert rows["cg"]["solve_milliseconds"] > rows["identity"]["solve_milliseconds"]


def test_places_of_convolutions_are_found_and_counted() -> None:
    problem, batch, places = net_of_convolutions()
    with oracles.undisturbed(problem):
        found = nhgd.plan(problem, batch, inverses=["kfac"]).rows[0]["bytes"]
    layers = Shape.of(problem.theta, len(batch[0]), places).layers
    seen = sum(layer.places * layer.groups * (layer.columns + layer.out) for layer in layers)
    assert found - nhgd.inverse.KFAC().memory(problem.theta) == 12 * seen * 8


def test_plans_are_made_also_for_what_learnt_inverses_refuse() -> None:
    for make in (catalogue.mlp_module, catalogue.ridge_scalar, catalogue.plain_tensor, catalogue.batchnorm_train):
        problem, inner, _ = make()
        with oracles.undisturbed(problem):
            plan = nhgd.plan(problem, inner)
        assert all(row["milliseconds"] > 0 for row in plan.rows)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"batch_size": "many"}, "batch_size must be a whole number"),
        ({"inner_batch": (1,), "batch_size": 3}, "batch_size would be ignored"),
    ],
)
def test_settings_that_cannot_be_are_refused(given: Any, sentence: str) -> None:
    with pytest.raises(nhgd.InputError, match=sentence):
        nhgd.plan(catalogue.mlp_module()[0], **given)
