"""Class weights: splits, weights and what is reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

import nhgd
from nhgd.task import Imbalance
from nhgd.task._classifier import Split
from nhgd.task.imbalance import balanced_accuracy

CPU = torch.device("cpu")
QUICK = Imbalance.preset("quick").with_settings({"dtype": "float64"})


@pytest.fixture(scope="module")
def instance():
    return QUICK.build(0, CPU)


def weights_of(instance):
    with torch.no_grad():
        return instance.problem.losses(instance.full_inner).weights


def test_counts_fall_by_the_same_factor_and_the_other_splits_are_even(instance):
    counts = sorted(instance.sets.counts.tolist(), reverse=True)
    assert counts == [round(40 * 20 ** (-k / 9)) for k in range(10)]
    assert (counts[0], counts[-1]) == (40, 2)
    for split in (instance.sets.judge, instance.sets.evaluation):
        assert torch.bincount(split.y).tolist() == [10] * 10
    assert QUICK.build(1, CPU).sets.counts.tolist() != instance.sets.counts.tolist()


def test_splits_are_disjoint(monkeypatch):
    pixels = torch.arange(300.0)[:, None].expand(300, 4) / 300
    monkeypatch.setattr("nhgd.task._images.digits", lambda: (pixels, torch.arange(300) % 10))
    sets = Imbalance(most=12, ratio=4.0, judge=3, evaluation=2).load(0, CPU)
    parts = [sets.train, sets.judge, sets.evaluation, sets.test]
    seen = torch.cat([part.x[:, 0] for part in parts])
    assert len(seen.unique()) == len(seen)
    assert len(sets.test.y) == 300 - 10 * (12 + 3 + 2)
    numbers = (seen - seen.min()) / (seen.max() - seen.min())
    assert torch.equal(sets.joint.y, torch.cat([sets.train.y, sets.judge.y]))
    assert len(numbers) == sum(len(part.y) for part in parts)


def test_the_first_weights_are_those_of_scikit_learn_and_their_mean_stays_one(instance):
    y = instance.sets.train.y
    balanced = compute_class_weight("balanced", classes=np.arange(10), y=y.numpy())
    torch.testing.assert_close(weights_of(instance), torch.as_tensor(balanced)[y], rtol=1e-12, atol=0)
    before = instance.v.clone()
    with torch.no_grad():
        instance.v.copy_(torch.randn(10, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
        found = weights_of(instance)
        instance.v.copy_(before)
    assert float(found.mean()) == pytest.approx(1, rel=1e-12)


def test_a_model_from_scratch_is_the_weighted_regression_of_scikit_learn(instance):
    train = instance.sets.train
    model = QUICK.from_scratch(train, torch.full((10,), 0.1), seed=0)
    other = LogisticRegression(
        C=1 / (2 * len(train.y) * QUICK.l2), fit_intercept=False, class_weight="balanced", tol=1e-8, max_iter=10_000
    )
    other.fit(F.pad(train.x, (0, 1), value=1.0).numpy(), train.y.numpy())
    ours = torch.cat([model.weight, model.bias[:, None]], dim=1).detach()
    torch.testing.assert_close(ours, torch.as_tensor(other.coef_), rtol=5e-3, atol=5e-3)


def test_balanced_accuracy_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 4, generator=generator), torch.randint(16, (60,), generator=generator).sqrt().long()
    expected = balanced_accuracy_score(y.numpy(), x.argmax(1).numpy())
    assert balanced_accuracy(nn.Identity(), Split(x, y)) == pytest.approx(expected, rel=1e-12)


def test_the_selected_step_is_the_one_with_the_lowest_evaluation_loss(tmp_path):
    instance = QUICK.build(0, CPU)
    solution = instance.start("aid-identity", outer_lr=0.3).run(steps=5)
    summary = instance.summary(solution)
    best = min(solution.history, key=lambda row: row["evaluation_loss"])
    assert summary["selected_step"] == best["step"]
    assert [summary[f"share_{c}"] for c in range(10)] == [best[f"share_{c}"] for c in range(10)]
    shares = torch.tensor([best[f"share_{c}"] for c in range(10)], dtype=torch.float64)
    assert float(shares.sum()) == pytest.approx(1, rel=1e-9)
    for prefix, split in (("", instance.sets.train), ("joint_", instance.sets.joint)):
        model = QUICK.from_scratch(split, shares, 0)
        assert summary[f"{prefix}balanced_accuracy"] == balanced_accuracy(model, instance.sets.test)
    (path,) = instance.pictures(tmp_path)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio": 200.0}, "every class has a training sample"),
        ({"ratio": 0.5}, "ratio must lie between"),
        ({"judge": 0}, "judge must be"),
        ({"model": "mpl"}, "Did you mean 'mlp'"),
    ],
)
def test_settings_that_make_no_set_are_refused(settings, words):
    with pytest.raises(nhgd.InputError, match=words):
        Imbalance(**settings)


def test_more_samples_than_there_are_cannot_be_asked_for():
    with pytest.raises(nhgd.InputError, match=r"is 420, but class \d has only"):
        Imbalance(dataset="digits", most=400).load(0, CPU)
