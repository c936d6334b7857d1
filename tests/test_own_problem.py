"""A task from a function: what it is built from, compared and searched by, and what is refused."""

from __future__ import annotations

import pytest
import torch

import nhgd
from nhgd.task import TASKS, OwnProblem

X = torch.linspace(-1, 1, 12, dtype=torch.float64)


def ridge(seed):
    """How strongly to shrink one coefficient towards 0, learnt on other data."""
    torch.manual_seed(seed)
    y, y_judge = (2 * X + 0.3 * torch.randn(12, dtype=torch.float64) for _ in range(2))
    problem = nhgd.Bilevel(
        lambda theta, v, batch: 0.5 * (batch[0] * theta - batch[1]).square(),
        lambda theta, v, batch: 0.5 * (batch[0] * theta - batch[1]).square().mean(),
        theta=torch.zeros((), dtype=torch.float64),
        v=torch.tensor(-1.0, dtype=torch.float64),
        l2=lambda v: v.exp(),
    )
    return {
        "problem": problem,
        "inner_data": nhgd.Data(X, y, batch=4),
        "outer_data": [(X[:6], y_judge[:6]), (X[6:], y_judge[6:])],
        "inner_lr": 0.5,
        "outer_lr": 0.5,
        "metrics": lambda theta, v: {"distance": float((theta - 2).abs())},
    }


def test_losses_are_over_all_data():
    made = OwnProblem(ridge).build(0, torch.device("cpu"))
    parts = ridge(0)
    y = parts["inner_data"].tensors[1]
    assert made.losses()["inner_loss"] == pytest.approx(0.5 * float(y.square().mean()))
    judged = torch.cat([batch[1] for batch in parts["outer_data"]])
    assert made.losses()["outer_loss"] == pytest.approx(0.5 * float(judged.square().mean()))
    assert made.metrics(torch.tensor(1.5), None) == {"distance": 0.5}
    made.solve_inner()
    best = float((X * y).mean() / (X.square().mean() + 2 * torch.tensor(-1.0).exp()))
    assert float(made.problem.theta.given) == pytest.approx(best, rel=1e-4)


def test_methods_are_compared_on_it(tmp_path):
    table = nhgd.bench(ridge, ["aid-cg", "soba"], seeds=2, budget="100g", out=tmp_path)
    assert [(row["method"], row["seed"], row["error"]) for row in table.rows] == [
        (method, seed, None) for method in ("aid-cg", "soba") for seed in (0, 1)
    ]
    row = table.rows[0]
    parts = ridge(0)
    settings = {key: parts[key] for key in ("inner_lr", "outer_lr")}
    data = parts["inner_data"], parts["outer_data"]
    solver = nhgd.Solver(parts["problem"], *data, method="aid-cg", seed=0, metrics=parts["metrics"], **settings)
    solver.run(stop=[nhgd.stop.Gradients(100)])
    assert row["metrics"]["distance"] == float((parts["problem"].theta.given - 2).abs())
    assert table.plot(tmp_path / "a.png", "distance").exists()
    own = OwnProblem(ridge, headline="distance", selection="distance")
    assert "distance" in str(nhgd.bench(own, ["soba"], seeds=1, budget="50g")).splitlines()[2]


def test_its_settings_are_searched():
    pytest.importorskip("optuna")
    found = nhgd.sweep(ridge, "soba", trials=3, budget="60g")
    assert set(found.best["parameters"]) == {"outer_lr", "inner_lr"}
    assert found.trials[0]["parameters"] == {"outer_lr": 0.5, "inner_lr": 0.5}


def test_it_is_no_task_of_the_command_line():
    assert "own" not in TASKS


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (None, "must return the arguments of a Solver"),
        ({"problem": 1}, "must return the arguments of a Solver"),
        ({"problem": 1, "inner_data": [], "outer_data": []}, "must be an nhgd.Bilevel"),
        (ridge(0) | {"inner_lrr": 1}, "Did you mean 'inner_lr'"),
        (ridge(0) | {"method": "soba"}, "no setting in what"),
        (ridge(0) | {"outer_data": []}, "no batches"),
    ],
)
def test_what_a_function_must_return(made, words):
    with pytest.raises(nhgd.InputError, match=words):
        nhgd.bench(lambda seed: made, ["soba"], seeds=1, budget="20g")


def test_a_penalty_that_names_the_weights_is_told_what_to_do():
    """A newcomer's ridge: the only layer is used a second time, outside of its call."""
    torch.manual_seed(0)
    net, v, x, y = torch.nn.Linear(3, 1), torch.zeros(3), torch.randn(20, 3), torch.randn(20)

    def data_loss(net, batch):
        return (net(batch[0]).squeeze(1) - batch[1]).square()

    problem = nhgd.Bilevel(
        lambda net, v, batch: data_loss(net, batch) + (v.exp() * net.weight.square()).sum(),
        lambda net, v, batch: data_loss(net, batch).mean(),
        theta=net,
        v=v,
    )
    data = nhgd.Data(x, y)
    with pytest.raises(nhgd.InputError, match="a penalty on a layer's weights can be given as l2"):
        nhgd.Solver(problem, data, data, method="nhgd").step()
    assert len(nhgd.Solver(problem, data, data, method="nhgd-window").run(steps=1).history) == 1
