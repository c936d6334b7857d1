"""Tasks: their closed forms, their data, their metrics."""

from __future__ import annotations

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_score, recall_score, roc_auc_score
from torch import nn

import nhgd
from nhgd.algorithm import NHGD
from nhgd.data.idx import read_idx, read_images
from nhgd.inverse import KFAC
from nhgd.oracle import Oracle
from nhgd.task import L2, Cleaning, Quadratic
from nhgd.task._classifier import Split, fit, largest_curvature, softmax_classifier
from nhgd.task._labels import NOISES, area, corrupt, detection_scores
from nhgd.task._overfitting import OverfittingWarning
from nhgd.task._parser import convert, kinds
from nhgd.task._weighting import WEIGHTINGS, ByLoss, ByNet, Clip, Sigmoid
from tests import catalogue, idx_files, oracles

CPU = torch.device("cpu")


def built(task, seed=0):
    return task.build(seed, CPU)


@pytest.mark.parametrize("case", catalogue.TASKS, ids=lambda case: case.name)
class TestEveryTask:
    def test_the_same_seed_gives_the_same_run_bit_for_bit(self, case):
        def go():
            instance = built(case.make(), seed=5)
            solution = instance.start(case.method, seed=5).run(steps=case.steps)
            summary = instance.summary(solution)
            return oracles.v_of(instance.problem), oracles.theta_of(instance.problem), summary, solution.history

        state = torch.get_rng_state()
        first, second = go(), go()
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert first[2] == second[2]
        losses = [[row["outer_loss"] for row in run[3]] for run in (first, second)]
        assert losses[0] == losses[1]

    def test_another_seed_gives_other_data(self, case):
        first, second = built(case.make(), 0), built(case.make(), 1)
        with torch.no_grad():
            values = [
                float(i.problem.objective(i.full_inner)) + float(i.problem.outer_value(i.full_outer))
                for i in (first, second)
            ]
            tensors = [
                torch.cat([t.double().reshape(-1) for t in i.full_outer if torch.is_tensor(t)]) for i in (first, second)
            ]
        assert values[0] != values[1] or not torch.equal(*tensors)

    def test_lowers_the_outer_loss(self, case):
        instance = built(case.make())
        solution = instance.start(case.method).run(steps=case.steps)
        assert instance.summary(solution)["outer_loss"] < solution.history[0]["outer_loss"]
        assert {"outer_loss", "inner_loss"} <= set(instance.summary(solution))

    def test_summary_tells_the_losses_of_all_data(self, case):
        instance = built(case.make())
        solution = instance.start(case.method, metrics_every=2).run(steps=3)
        summary, problem = instance.summary(solution), instance.problem
        assert summary["outer_loss"] == pytest.approx(float(oracles.outer(problem, instance.full_outer)), rel=1e-6)
        assert summary["inner_loss"] == pytest.approx(float(oracles.objective(problem, instance.full_inner)), rel=1e-6)

    def test_solve_inner_ends_where_the_gradient_vanishes(self, case):
        instance = built(case.make())
        said = instance.solve_inner()
        gradient = float(oracles.gradient(instance.problem, instance.full_inner).norm())
        assert gradient <= case.tol
        assert said == pytest.approx(gradient, rel=0.5, abs=1e-12)

    def test_every_preset_can_be_made_and_an_unknown_one_is_named(self, case):
        cls = type(case.make())
        for preset in cls.presets:
            assert isinstance(cls.preset(preset), cls)
        with pytest.raises(nhgd.InputError, match="Did you mean 'quick'"):
            cls.preset("quik")

    def test_settings_given_as_text(self, case):
        task = case.make()
        text = {f: str(getattr(task, f)) for f in kinds(type(task))}
        assert task.with_settings(text) == task
        with pytest.raises(nhgd.InputError, match="There is no setting"):
            task.with_settings({"nonsense": "1"})


class TestQuadratic:
    def test_theta_star_is_where_newton_ends(self):
        instance = built(Quadratic.preset("quick"))
        v = torch.randn(3, dtype=torch.float64)
        oracles.assign(instance.problem.v.given, v)
        exact = oracles.solve_inner(instance.problem, instance.full_inner)
        torch.testing.assert_close(instance.answers.theta_star(v), exact, rtol=1e-11, atol=1e-12)

    def test_matrices_are_those_of_autograd(self):
        instance = built(Quadratic.preset("quick"))
        hessian = oracles.hessian(instance.problem, instance.full_inner)
        cross = oracles.cross(instance.problem, instance.full_inner)
        torch.testing.assert_close(instance.answers.hessian, hessian, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(instance.answers.cross, cross, rtol=1e-12, atol=1e-12)

    def test_hypergradient_is_the_derivative_of_phi(self):
        instance = built(Quadratic.preset("quick"))
        answers, v = instance.answers, torch.randn(3, dtype=torch.float64, requires_grad=True)
        slope = torch.autograd.grad(answers.phi(v), v)[0]
        torch.testing.assert_close(answers.hypergradient(v.detach()), slope, rtol=1e-9, atol=1e-12)
        differences = oracles.finite_differences(
            lambda at: oracles.phi(instance.problem, instance.full_inner, instance.full_outer, at), v.detach(), 1e-2
        )
        torch.testing.assert_close(answers.hypergradient(v.detach()), differences, rtol=1e-8, atol=1e-9)

    @pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
    def test_nhgd_hypergradient_agrees_to_nine_digits(self, noise):
        instance = built(Quadratic(noise=noise))
        oracles.assign(instance.problem.v.given, torch.randn(5, dtype=torch.float64))
        instance.solve_inner()
        got = nhgd.hypergradient(instance.problem, instance.full_inner, instance.full_outer, inverse="exact")
        want = instance.answers.hypergradient(oracles.v_of(instance.problem))
        torch.testing.assert_close(got.grad, want, rtol=1e-9, atol=1e-9 * float(want.norm()))
        assert got.value == pytest.approx(float(instance.answers.phi(oracles.v_of(instance.problem))), rel=1e-12)

    def test_v_star_is_stationary_and_lowest(self):
        answers = built(Quadratic()).answers
        best = answers.v_star()
        assert float(answers.hypergradient(best).norm()) < 1e-12
        for _ in range(5):
            assert float(answers.phi(best + 0.1 * torch.randn(5, dtype=torch.float64))) > float(answers.phi(best))

    def test_a_well_specified_problem_has_its_fisher_matrix_near_its_hessian(self):
        """Noise 1 draws from the model, so |F - H| / |H| is of order sqrt(d / n): 0.16 here, where noise 2 gives 3."""
        distances = {}
        for noise in (1.0, 2.0):
            instance = built(Quadratic(dim=5, samples=2000, noise=noise))
            oracles.assign(instance.problem.v.given, torch.zeros(5, dtype=torch.float64))
            instance.solve_inner()
            at = Oracle(instance.problem, [instance.full_inner])
            eye = torch.eye(5, dtype=torch.float64)
            fisher = torch.stack([at.empirical_fisher(e) for e in eye])
            distances[noise] = float((fisher - instance.answers.hessian).norm() / instance.answers.hessian.norm())
        assert distances[1.0] < 0.25 < 2 < distances[2.0]

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"l2": 0.0, "samples": 10}, "needs l2 above 0"),
            ({"rho": 0.0, "outer_dim": 30}, "needs rho above 0"),
            ({"condition": 0.5}, "condition must be at least 1"),
            ({"dim": 0}, "dim must be"),
            ({"noise": float("nan")}, "noise must be"),
        ],
    )
    def test_problems_without_an_answer_are_refused(self, changes, words):
        with pytest.raises(nhgd.InputError, match=words):
            Quadratic(**changes)


class TestL2:
    @pytest.mark.parametrize("task", [L2(), L2.preset("quick")], ids=["breast_cancer", "synthetic"])
    def test_newton_reaches_1e_12(self, task):
        assert built(task).solve_inner() <= 1e-12

    def test_exact_hypergradient_is_the_slope_of_the_solved_problem(self):
        instance = built(L2(dataset="synthetic", samples=60, features=3, decoys=1))
        problem, inner, outer = instance.problem, instance.full_inner, instance.full_outer
        instance.solve_inner()
        got = nhgd.hypergradient(problem, inner, outer, inverse="exact").grad
        want = oracles.finite_differences(lambda v: oracles.phi(problem, inner, outer, v), oracles.v_of(problem))
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-9)

    def test_the_ridge_learns_to_switch_noise_off(self):
        instance = built(L2(dataset="synthetic", samples=600, features=4, decoys=4))
        instance.start("aid-exact", inner_steps=50).run(steps=60)
        ridge = oracles.v_of(instance.problem)
        assert float(ridge[4:8].mean()) > float(ridge[:4].mean()) + 1

    def test_the_step_size_is_stable_everywhere_in_the_box(self):
        instance = built(L2())
        low, high = instance.solver_settings()["project_v"]
        for v in (low, high):
            oracles.assign(instance.problem.v.given, torch.full_like(oracles.v_of(instance.problem), v))
            top = torch.linalg.eigvalsh(oracles.hessian(instance.problem, instance.full_inner))[-1]
            assert instance.solver_settings()["inner_lr"] <= 1 / float(top)

    def test_splits_are_disjoint_and_standardised(self):
        instance = built(L2(decoys=0))
        x = instance.full_inner[0]
        torch.testing.assert_close(x.mean(0), torch.zeros_like(x[0]), rtol=0, atol=1e-12)
        torch.testing.assert_close(x.std(0), torch.ones_like(x[0]), rtol=1e-12, atol=0)
        rows = {tuple(row) for row in x.tolist()} | {tuple(row) for row in instance.full_outer[0].tolist()}
        assert len(rows) == len(x) + len(instance.full_outer[0])


def identified(n):
    """Images that are their own number, so that a sample can be followed through splits."""
    return torch.arange(n, dtype=torch.float32).reshape(n, 1).expand(n, 4) / n


class TestCleaning:
    def test_splits_are_disjoint_and_complete(self, monkeypatch):
        monkeypatch.setattr("nhgd.task._images.digits", lambda: (identified(200), torch.arange(200) % 10))
        sets = Cleaning(train=100, trusted=40, evaluation=30).load(0, CPU)
        parts = [sets.train.x, sets.trusted.x, sets.evaluation.x, sets.test.x]
        assert [len(p) for p in parts] == [100, 40, 30, 30]
        assert len({float(row[0]) for p in parts for row in p}) == 200
        # Labels travel with their images; only the training labels are touched.
        number = (sets.pixels[:, 0] * 200).round().long()
        assert torch.equal(sets.true_labels, number % 10)
        assert torch.equal(sets.wrong, sets.train.y != sets.true_labels)

    def test_pixels_are_standardised_by_the_training_set(self):
        sets = Cleaning.preset("quick").load(0, CPU)
        assert float(sets.train.x.mean()) == pytest.approx(0, abs=1e-5)
        assert float(sets.train.x.std()) == pytest.approx(1, abs=1e-5)
        assert float(sets.trusted.x.mean()) != pytest.approx(0, abs=1e-5)
        assert sets.side == 8

    def test_weights_stay_in_their_box_and_move(self):
        instance = built(Cleaning.preset("quick").with_settings({"weights": "clip"}))
        instance.start("aid-identity", outer_lr=1.0).run(steps=3)
        v = oracles.v_of(instance.problem)
        assert float(v.min()) == 0
        assert float(v.max()) == 1

    @pytest.mark.parametrize("weights", list(WEIGHTINGS))
    def test_reported_numbers_are_those_of_the_step_with_the_lowest_evaluation_loss(self, weights):
        instance = built(Cleaning.preset("quick").with_settings({"weights": weights}))
        solution = instance.start("aid-identity").run(steps=6)
        summary = instance.summary(solution)
        best = min(solution.history, key=lambda row: row["evaluation_loss"])
        assert summary["selected_step"] == best["step"]
        assert all(summary[key] == best[key] for key in ("test_accuracy", "f1", "auc", "evaluation_loss"))
        assert all(summary[f"final_{key}"] == solution.history[-1][key] for key in ("test_accuracy", "f1", "auc"))

    def test_final_numbers_are_of_the_end_when_metrics_are_taken_rarely(self):
        often = built(Cleaning.preset("quick"))
        rarely = built(Cleaning.preset("quick"))
        wanted = often.summary(often.start("aid-identity").run(steps=4))
        got = rarely.summary(rarely.start("aid-identity", metrics_every=3).run(steps=4))
        assert got["final_f1"] == wanted["final_f1"]
        assert got["final_evaluation_loss"] == pytest.approx(wanted["final_evaluation_loss"], rel=1e-6)

    @pytest.mark.parametrize("weights", list(WEIGHTINGS))
    def test_trusted_samples_inside_are_not_those_that_judge(self, weights):
        task = Cleaning(dataset="digits", train=100, trusted=41, weights=weights, trusted_inside=0.5, warm_up=0)
        instance = built(task)
        sets = instance.sets
        assert len(instance.full_inner[0]) == 100 + 20
        assert len(instance.full_outer[0]) == 21
        known = {tuple(row) for row in instance.full_inner[0].tolist()}
        assert not any(tuple(row) in known for row in instance.full_outer[0].tolist())
        found = instance.problem.losses(instance.full_inner).weights
        assert torch.equal(found[100:], torch.ones(20))
        own = task.sample_weights(instance.problem.theta.given, instance.problem.v.given, sets)
        assert torch.equal(found[:100], own)
        assert instance.solver_settings()["project_v"] == ((0.0, 1.0) if weights == "clip" else None)

    def test_the_share_inside_by_itself(self):
        for weights, inside in (("loss", 20), ("net", 20), ("clip", 0), ("sigmoid", 0)):
            instance = built(Cleaning(dataset="digits", train=100, trusted=41, weights=weights, warm_up=0))
            assert len(instance.full_inner[0]) == 100 + inside

    def test_theta_starts_solved_or_after_steps_or_at_zero(self):
        def gradient(**settings):
            instance = built(Cleaning(dataset="digits", train=100, trusted=40, **settings))
            return float(oracles.gradient(instance.problem, instance.full_inner).norm()), instance

        at_zero, instance = gradient(warm_up=0)
        assert float(oracles.theta_of(instance.problem).norm()) == 0
        state = torch.get_rng_state()
        after, _ = gradient(warm_up=200)
        assert torch.equal(torch.get_rng_state(), state)
        solved, _ = gradient()
        assert solved <= 1e-2
        assert after < 0.2 * at_zero
        untouched, _ = gradient(weights="clip")
        assert untouched > 0.2

    def test_another_model_by_name_or_by_function(self):
        quick = {"train": 400, "dataset": "digits", "warm_up": 50}
        made = [
            Cleaning(**quick, model="mlp", hidden=16),
            Cleaning(**quick, model=lambda features, classes: torch.nn.Sequential(
                torch.nn.Unflatten(1, (1, 8, 8)), torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(),
                torch.nn.ReLU(), torch.nn.Linear(4 * 36, classes),
            )),
        ]  # fmt: skip
        for task, size in zip(made, (64 * 16 + 16 + 160 + 10, 4 * 9 + 4 + 4 * 36 * 10 + 10), strict=True):
            first, second = built(task), built(task)
            assert first.problem.theta.numel == size
            assert torch.equal(oracles.theta_of(first.problem), oracles.theta_of(second.problem))
            summary = first.summary(first.start().run(steps=5))
            assert summary["test_accuracy"] > 0.7
            assert summary["auc"] > 0.8

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"noise": 1.0}, "at least 0 and below 1; got 1.0"),
            ({"noise": -0.1}, "at least 0 and below 1"),
            ({"noise": float("nan")}, "at least 0 and below 1"),
            ({"trusted_inside": 1.0}, "trusted_inside must be 0 or more and below 1"),
            ({"momentum": 1.0}, "momentum must be"),
            ({"warm_up": "solvd"}, "'solved' or a number of inner steps"),
            ({"warm_up": -1}, "warm_up must be 0 or more"),
            ({"weights": "slip"}, "Did you mean 'clip'"),
            ({"model": "liner"}, "Did you mean 'linear'"),
            ({"outer_lr": 0.0}, "outer_lr must be above 0"),
            ({"start": 0.4}, "between 0.5 and 1"),
            ({"model": lambda features, classes: 3}, "returned a int"),
            ({"model": lambda features, classes: torch.nn.Linear(features, 3)}, r"two samples gave \(2, 3\)"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, settings, words):
        with pytest.raises(nhgd.InputError, match=words):
            built(Cleaning(dataset="digits", **settings))

    def test_a_free_weight_for_each_sample_overfits_and_the_run_says_so(self):
        changes = {
            "dataset": "digits",
            "train": 500,
            "inner_steps": 20,
            "inner_lr": 0.1,
            "outer": "adam",
            "outer_lr": 0.3,
        }
        for trusted, rises in ((30, True), (50, False)):
            instance = built(Cleaning.preset("paper").with_settings(changes | {"trusted": trusted}))
            # The weights of a horizon without end, and of one batch an outer step, grow slowly enough for both kinds.
            method = NHGD(KFAC(factor_every=5, damping=None), cross="final")
            solution = instance.start(method).run(steps=100)
            with pytest.warns(OverfittingWarning, match="overfit the trusted samples.*or weights=loss"):
                summary = instance.summary(solution)
            best = min(solution.history, key=lambda row: row["evaluation_loss"])
            rise = summary["final_evaluation_loss"] / best["evaluation_loss"] - 1
            # Either the evaluation loss rises, or it stays while the trusted loss leaves it behind.
            assert (rise > 0.1) == (summary["overfitting"] > 0.1) == rises
            assert summary["gap"] > 0.5
            assert summary["outer_loss"] < 0.2 * summary["final_evaluation_loss"]

    def test_the_default_does_not(self):
        instance = built(Cleaning(dataset="digits", noise=0.5, noise_kind="uniform", trusted=50, train=500))
        summary = instance.summary(instance.start().run(steps=60))  # a warning would be an error
        assert summary["overfitting"] < 0.1
        assert summary["gap"] < 0.5
        assert summary["f1"] > 0.9

    def test_methods_that_take_plain_steps_alone_get_them(self):
        instance = built(Cleaning.preset("quick"))
        for method in ("itd", "truncated", "bome", "f2sa"):
            algorithm = instance.algorithm(method)
            assert instance.settings_for(algorithm)["inner_optimizer"] is None
            instance.start(method).step()
        assert instance.settings_for(instance.algorithm("soba"))["inner_optimizer"] is not None

    def test_batches_reach_the_methods_that_average_over_them(self):
        instance = built(Cleaning.preset("quick").with_settings({"batches": "3"}))
        assert instance.algorithm("aid").batches == 3
        assert instance.algorithm("nhgd-paper").batches == 3
        assert built(Cleaning.preset("quick")).algorithm("nhgd-paper").batches == 5

    def test_step_size_from_the_largest_curvature(self):
        x = torch.randn(50, 3, dtype=torch.float64)
        rows = F.pad(x, (0, 1), value=1.0)
        bound = 0.5 * float(torch.linalg.eigvalsh(rows.T @ rows / 50)[-1])
        assert largest_curvature(x, steps=500) == pytest.approx(bound, rel=1e-6)
        y = torch.randint(10, (50,))
        problem = nhgd.Bilevel(
            lambda model, v, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"),
            lambda model, v, batch: v.sum(),
            softmax_classifier(x, 10),
            torch.zeros(1, dtype=torch.float64),
        )
        assert float(torch.linalg.eigvalsh(oracles.hessian(problem, (x, y)))[-1]) <= bound

    def test_fit_is_the_logistic_regression_of_scikit_learn(self):
        x, y = catalogue.normal(60, 3), torch.arange(60) % 10
        model = softmax_classifier(x, 10)
        assert fit(model, Split(x, y), 0.01, 1e-7) <= 1e-7
        # scikit-learn minimises sum CE + |theta|^2 / (2 C), so C = 1 / (2 N l2); the bias is a feature that is always 1.
        other = LogisticRegression(C=1 / (2 * 60 * 0.01), fit_intercept=False, tol=1e-8, max_iter=10_000)
        other.fit(F.pad(x, (0, 1), value=1.0).numpy(), y.numpy())
        ours = torch.cat([model.weight, model.bias[:, None]], dim=1).detach()
        torch.testing.assert_close(ours, torch.as_tensor(other.coef_), rtol=1e-4, atol=1e-5)


class TestNoise:
    @pytest.mark.parametrize("kind", NOISES)
    @pytest.mark.parametrize("rate", [0.0, 0.25, 0.4, 1.0])
    def test_exactly_the_asked_share_is_touched(self, kind, rate):
        labels = torch.arange(1000) % 10
        noisy = corrupt(labels, rate, kind, 10, torch.Generator().manual_seed(0))
        changed = int((noisy != labels).sum())
        assert noisy.min() >= 0
        assert noisy.max() <= 9
        if kind == "uniform":
            # Each of n touched labels stays right with chance 1/10; six deviations are exceeded once in 5e8 draws.
            n = round(rate * 1000)
            assert abs(changed - 0.9 * n) <= 6 * (0.09 * n) ** 0.5
        else:
            assert changed == round(rate * 1000)
        if kind == "pair":
            assert torch.equal(noisy[noisy != labels], (labels[noisy != labels] + 1) % 10)

    def test_flips_reach_every_wrong_class(self):
        noisy = corrupt(torch.zeros(2000, dtype=torch.long), 1.0, "flip", 10, torch.Generator().manual_seed(0))
        assert set(noisy.tolist()) == set(range(1, 10))

    def test_the_same_generator_gives_the_same_noise(self):
        labels = torch.arange(50) % 10
        first, second = (corrupt(labels, 0.5, "flip", 10, torch.Generator().manual_seed(3)) for _ in range(2))
        assert torch.equal(first, second)

    @pytest.mark.parametrize(("rate", "kind"), [(1.5, "flip"), (-0.1, "flip"), (0.5, "flop")])
    def test_nonsense_is_refused(self, rate, kind):
        with pytest.raises(nhgd.InputError):
            corrupt(torch.zeros(3, dtype=torch.long), rate, kind, 10, torch.Generator())


weights_and_truth = st.integers(2, 40).flatmap(
    lambda n: st.tuples(
        # Few distinct values, so that ties are common.
        st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.75, 1.0]), min_size=n, max_size=n),
        st.lists(st.booleans(), min_size=n, max_size=n).filter(lambda flags: any(flags) and not all(flags)),
    )
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(weights_and_truth)
def test_finding_is_measured_as_scikit_learn_does(case):
    weights, wrong = torch.tensor(case[0], dtype=torch.float64), torch.tensor(case[1])
    got = detection_scores(weights, wrong)
    suspect = (weights < 0.5).numpy()
    assert got["auc"] == pytest.approx(roc_auc_score(wrong.numpy(), -weights.numpy()), abs=1e-12)
    assert got["f1"] == pytest.approx(f1_score(wrong.numpy(), suspect, zero_division=0), abs=1e-12)
    assert got["precision"] == pytest.approx(precision_score(wrong.numpy(), suspect, zero_division=0), abs=1e-12)
    assert got["recall"] == pytest.approx(recall_score(wrong.numpy(), suspect, zero_division=0), abs=1e-12)
    assert got["suspects"] == suspect.sum()


def test_the_area_is_undefined_where_one_kind_is_missing():
    assert area(torch.tensor([1.0, 2.0]), torch.tensor([True, True])) != area(torch.zeros(1), torch.tensor([True]))


LIKE = torch.zeros(1, dtype=torch.float64)


@pytest.mark.parametrize("weighting", [cls(5) for cls in WEIGHTINGS.values()], ids=list(WEIGHTINGS))
class TestEveryWeighting:
    def test_the_potential_has_the_weight_as_its_slope_and_is_its_integral(self, weighting):
        v = weighting.first(0.7, LIKE)
        losses = torch.rand(5, dtype=torch.float64).mul(4).requires_grad_()
        index = torch.arange(5)
        value = weighting.potential(v, losses, index)
        slope = torch.autograd.grad(value.sum(), losses)[0]
        torch.testing.assert_close(slope, weighting.weights(v, losses, index), rtol=1e-12, atol=0)
        zero = weighting.potential(v, torch.zeros_like(losses), index)
        places = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None] * losses.detach()  # (2001, 5)
        rows = torch.stack([weighting.weights(v, row, index) for row in places])
        area_below = torch.stack([torch.trapezoid(rows[:, i], places[:, i]) for i in range(5)])
        torch.testing.assert_close(value - zero, area_below, rtol=1e-6, atol=1e-8)

    def test_weights_are_constant_in_theta_and_never_rise_with_the_loss(self, weighting):
        losses = torch.linspace(0, 5, 5, requires_grad=True, dtype=torch.float64)
        v = weighting.first(None, LIKE)
        weights = weighting.weights(v, losses, torch.arange(5))
        assert (weights[1:] <= weights[:-1]).all()
        assert not weights.requires_grad or torch.autograd.grad(weights.sum(), losses, allow_unused=True) == (None,)

    def test_trusted_samples_count_in_full(self, weighting):
        v, losses, index = weighting.first(None, LIKE), torch.full((7,), 3.0, dtype=torch.float64), torch.arange(7)
        assert weighting.weights(v, losses, index)[5:].tolist() == [1.0, 1.0]
        assert torch.equal(weighting.potential(v, losses, index)[5:], losses[5:])


@torch.no_grad()
def test_the_first_weights():
    for cls in (Clip, Sigmoid):
        first = cls(3).weights(cls(3).first(None, LIKE), torch.ones(3), torch.arange(3))
        torch.testing.assert_close(first, torch.full_like(first, 0.5))
    for cls in (ByLoss, ByNet):
        v = cls(3).first(0.9, LIKE)
        found = cls(3).weights(v, LIKE, torch.zeros(1, dtype=torch.long))
        assert float(found) == pytest.approx(0.9, rel=1e-12)
        # Half at the threshold, which is where a sigmoid of slope 1 from 0.9 has its half.
        threshold = torch.tensor([0.9 / 0.1], dtype=torch.float64).log()
        assert float(cls(3).weights(v, threshold, torch.zeros(1, dtype=torch.long))) == pytest.approx(0.5)


images = arrays.arrays(np.uint8, arrays.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=6))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(images, st.booleans())
def test_idx_files_come_back_as_they_were(tmp_path_factory, array, packed):
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if packed else "a")
    content = idx_files.idx(array)
    path.write_bytes(gzip.compress(content) if packed else content)
    assert np.array_equal(read_idx(path), array)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(images.filter(lambda a: a.size > 0), st.data())
def test_an_idx_file_that_lost_a_part_is_refused(tmp_path_factory, array, data):
    content = idx_files.idx(array)
    path = tmp_path_factory.mktemp("idx") / "a"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(nhgd.InputError):
        read_idx(path)


def test_an_image_set_comes_back_as_it_was(tmp_path):
    made = idx_files.image_set()
    read = read_images(idx_files.write(tmp_path, made))
    for name, array in zip(
        ("train_images", "train_labels", "test_images", "test_labels"), idx_files.NAMES, strict=True
    ):
        assert np.array_equal(getattr(read, name), made[array])


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("3", float, 3.0),
        ("1e-3", float | None, 1e-3),
        (" none ", int | None, None),
        ("all", int | str, "all"),
        ("7", int | str, 7),
        ("Yes", bool, True),
        ("0", bool, False),
        ("(0, 2)", float | tuple[float, float] | None, (0.0, 2.0)),
        ("float32", torch.dtype | None, torch.float32),
        ("cg-3", nhgd.inverse.AbstractInverse, nhgd.inverse.CG(steps=3)),
    ],
)
def test_text_is_read_as_the_type_of_its_field(text, kind, value):
    got = convert("x", text, kind)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "kind"), [("3.5", int), ("x", float | None), ("2", bool), ("1,x", tuple[float, float])]
)
def test_text_that_cannot_be_read_is_refused(text, kind):
    with pytest.raises(nhgd.InputError, match="x must be"):
        convert("x", text, kind)


def test_a_model_of_ones_own_is_not_thrown_from_where_it_was_solved():
    """The inner step must suit the curvature where the run begins, not that of the first theta."""

    def network(features, classes):
        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes)
        )

    before = torch.get_rng_state()
    instance = replace(Cleaning.preset("quick"), model=network, start=None).build(0, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    history = instance.start(None, 0).run(steps=3).history
    assert all(row["inner_loss"] < 1.1 * history[0]["inner_loss"] for row in history)


def test_a_ridge_for_each_class_is_that_of_its_weights_and_its_bias():
    """By hand, with data of seven classes that scikit-learn makes."""
    instance = L2.preset("covtype-like").with_settings({"samples": 200}).build(0, torch.device("cpu"))
    problem, (x, y) = instance.problem, instance.full_inner
    generator = torch.Generator().manual_seed(0)
    W, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((7, 54), (7,)))
    v = torch.linspace(-5, -1, 7, dtype=torch.float64)
    problem.theta.assign(torch.cat([W.flatten(), b]))
    problem.v.assign(v)
    z = x @ W.T + b
    loss = -z.log_softmax(1)[torch.arange(len(y)), y].mean()
    expected = loss + (v.exp() * (W.square().sum(1) + b.square())).sum()
    assert float(problem.objective(instance.full_inner).detach()) == pytest.approx(float(expected), rel=1e-12)
    assert sorted(set(y.tolist())) == list(range(7))
