"""DatasetDistiller: NumPy in, a few samples and a classifier out."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

import nhgd
from nhgd.sklearn.distiller import DatasetDistiller
from tests.scikit_learn import scikit_learn_checks

QUICK = {"per_class": 1, "steps": 60, "random_state": 0}


@scikit_learn_checks(DatasetDistiller(per_class=2, steps=3, batch_size=50, random_state=0))
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
def test_scikit_learn_finds_nothing_to_object_to(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def digits():
    X, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return X[order[:1000]], y[order[:1000]], X[order[1000:]], y[order[1000:]]


def test_one_learnt_image_a_class_beats_a_real_one(digits):
    X, y, X_test, y_test = digits
    distiller = nhgd.DatasetDistiller(**QUICK).fit(X, y)
    real = [np.flatnonzero(y == c)[0] for c in range(10)]
    baseline = LogisticRegression(max_iter=1000).fit(X[real] / 16, y[real]).score(X_test / 16, y_test)
    assert distiller.score(X_test, y_test) > max(0.88, baseline + 0.1)
    assert distiller.images_.shape == (10, 64)
    assert distiller.labels_.tolist() == list(range(10))
    assert distiller.n_iter_ == len(distiller.history_) == 60
    np.testing.assert_allclose(distiller.predict_proba(X_test).sum(1), 1.0)


def test_it_predicts_by_a_model_trained_on_the_images_alone(digits):
    X, y, X_test, _ = digits
    distiller = DatasetDistiller(per_class=2, steps=5, l2=1e-3, random_state=0).fit(X, y)
    center, spread = X.mean(), X.std()

    def rows(X):
        return np.column_stack([(X - center) / spread, np.ones(len(X))])  # the ridge covers the bias too

    other = LogisticRegression(C=1 / (2 * 1e-3 * 20), fit_intercept=False, tol=1e-10, max_iter=10_000)
    other.fit(rows(distiller.images_), distiller.labels_)
    np.testing.assert_allclose(distiller.predict_proba(X_test), other.predict_proba(rows(X_test)), atol=1e-4)


@pytest.mark.parametrize("scale", ["all", "feature"])
def test_images_are_in_the_units_of_the_data(digits, scale):
    X, y, X_test, _ = digits
    settings = {**QUICK, "steps": 3, "scale": scale}
    units = 4.0 if scale == "all" else np.where(np.arange(64) % 2, 4.0, 0.5)
    plain = DatasetDistiller(**settings).fit(X, y)
    other = DatasetDistiller(**settings).fit(units * X + 8, y)
    varied = X.std(0) > 0 if scale == "feature" else np.full(64, True)  # what never varies has no unit
    found, expected = other.images_[:, varied], (units * plain.images_ + 8)[:, varied]
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-2)
    assert (other.predict(units * X_test + 8) == plain.predict(X_test)).mean() > 0.99


@pytest.mark.parametrize("scale", ["all", "feature"])
def test_bytes_will_do_and_no_more_than_a_batch_is_made_of_them(digits, scale, monkeypatch):
    X, y = digits[0].astype(np.uint8), digits[1]
    sizes = []
    standardised = DatasetDistiller._standardised
    monkeypatch.setattr(
        DatasetDistiller, "_standardised", lambda self, X: (sizes.append(len(X)), standardised(self, X))[1]
    )
    distiller = DatasetDistiller(per_class=1, steps=9, batch_size=300, scale=scale, random_state=0).fit(X, y)
    assert set(sizes) == {300, 100}
    axis = None if scale == "all" else 0
    deviation = X.std(axis)
    np.testing.assert_allclose(distiller._center, np.broadcast_to(X.mean(axis), 64))
    np.testing.assert_allclose(distiller._scale, np.broadcast_to(np.where(deviation > 0, deviation, 1), 64))


def test_same_seed_same_images(digits):
    X, y, *_ = digits
    made = [DatasetDistiller(per_class=1, steps=3, random_state=seed).fit(X, y).images_ for seed in (0, 0, 1)]
    np.testing.assert_array_equal(made[0], made[1])
    assert (made[0] != made[2]).any()


def test_labels_of_any_kind_and_a_network(digits):
    X, y, X_test, y_test = digits
    names = np.array(["even", "odd"])
    distiller = DatasetDistiller(per_class=3, model="mlp", hidden=16, steps=100, random_state=0).fit(X, names[y % 2])
    assert distiller.labels_.tolist() == ["even"] * 3 + ["odd"] * 3
    assert distiller.score(X_test, names[y_test % 2]) > 0.8


def test_a_budget_alone_will_do(digits):
    X, y, *_ = digits
    assert DatasetDistiller(per_class=1, steps=None, budget="0.05s", random_state=0).fit(X, y).n_iter_ >= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"per_class": 0}, "per_class must be a whole number"),
        ({"per_class": 1001}, "per_class is 1001, more than the 1000 samples of X"),
        ({"steps": None}, "needs to know when to stop"),
        ({"l2": 0.0}, "l2 must be above 0"),
        ({"scale": "features"}, "Did you mean 'feature'"),
        ({"model": "tree"}, "There is no model called"),
    ],
)
def test_refusals(digits, settings, message):
    with pytest.raises(nhgd.InputError, match=message):
        DatasetDistiller(**settings).fit(*digits[:2])


def test_one_class_is_refused(digits):
    with pytest.raises(nhgd.InputError, match="one class only"):
        DatasetDistiller().fit(digits[0], np.zeros(1000))
