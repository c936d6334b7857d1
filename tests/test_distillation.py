"""Distillation: exact hypergradients of images, accuracies from scratch, pictures."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from matplotlib.image import imread
from sklearn.linear_model import LogisticRegression
from torch import nn
from typer.testing import CliRunner

import nhgd
from nhgd.cli._program import app
from nhgd.inverse import KFAC, FisherWindow, Refined
from nhgd.paper import EXPERIMENTS, TABLE
from nhgd.plot.png import image_grid, write_png
from nhgd.task import Distillation
from nhgd.task._classifier import Architecture, accuracy_of, cross_entropies, largest_curvature, mean_loss, trained
from nhgd.task.distillation import distilling, nhgd_for, some_of_each
from tests import idx_files, oracles

CPU = torch.device("cpu")
QUICK = Distillation.preset("quick")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tiny(model, features=4, classes=3, per_class=2, l2=0.02):
    """A problem with six images of four pixels, its full inner batch and an outer batch."""
    labels = torch.arange(classes).repeat_interleave(per_class)
    problem = distilling(model.double(), normal(len(labels), features), l2)
    x = normal(30, features, seed=1)
    return problem, (labels, torch.arange(len(labels))), (x, x[:, :classes].argmax(1))


def close(found, expected, tol=1e-8):
    return float((found - expected).norm() / expected.norm()) < tol


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return idx_files.write(tmp_path_factory.mktemp("data") / "fashion-mnist", idx_files.image_set(train=1000))


class TestHypergradient:
    @pytest.mark.parametrize("bias", [False, True])
    def test_the_exact_window_of_a_linear_model_gives_the_true_one(self, bias):
        problem, inner, outer = tiny(nn.Linear(4, 3, bias=bias))
        oracles.raise_deferred(problem, inner)
        window = nhgd_for(6, 3, None, None).inverse
        found = nhgd.hypergradient(problem, inner, outer, inverse=window)
        assert close(found.grad.flatten(), oracles.hypergradient(problem, inner, outer))
        assert found.stats.residual < 1e-8

    def test_and_of_a_network_that_of_its_gauss_newton_matrix(self):
        problem, inner, outer = tiny(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))
        matrix = oracles.ggn(problem, inner) + oracles.ridge_hessian(problem)
        found = nhgd.hypergradient(problem, inner, outer, inverse=nhgd_for(6, 3, None, None).inverse)
        assert close(found.grad.flatten(), oracles.hypergradient(problem, inner, outer, matrix))

    def test_it_is_the_slope_of_what_a_model_trained_to_the_end_loses(self):
        problem, inner, outer = tiny(nn.Linear(4, 3, bias=False))
        oracles.raise_deferred(problem, inner)
        found = nhgd.hypergradient(problem, inner, outer, inverse=FisherWindow(window=6, fisher="exact"))
        along = normal(24, seed=2)
        slope = oracles.slope(lambda v: oracles.phi(problem, inner, outer, v), oracles.v_of(problem), along)
        assert slope == pytest.approx(float(found.grad.flatten() @ along), rel=1e-6)

    def test_images_outside_the_inner_batch_do_not_count(self):
        problem, (labels, index), outer = tiny(nn.Linear(4, 3))
        found = nhgd.hypergradient(problem, (labels[2:4], index[2:4]), outer, inverse="cg").grad
        assert torch.equal(found[[0, 1, 4, 5]], torch.zeros(4, 4, dtype=torch.float64))
        assert bool((found[2:4] != 0).all())


class TestSuitedMethod:
    def test_few_images_are_solved_exactly_and_many_by_factors(self):
        few, many, drawn = nhgd_for(50, 10, None, None), nhgd_for(1000, 10, None, None), nhgd_for(1000, 10, 128, 30)
        assert isinstance(few.inverse, FisherWindow)
        assert (few.inverse.window, few.inverse.fisher, few.inner, few.natural_steps) == (50, "exact", "natural", 1)
        assert isinstance(many.inverse, KFAC)
        assert (many.refine, many.inner, many.natural_steps) == (5, "natural", 2)
        assert (drawn.refine, drawn.inner) == (5, "optimizer")

    def test_a_number_of_inner_steps_that_is_asked_for_holds_for_natural_ones_too(self):
        instance = QUICK.with_settings({"inner_steps": "3"}).build(0, CPU)
        instance.start().run(steps=1)
        assert instance.algorithm().natural_steps is None
        assert instance.solver_settings()["inner_steps"] == 3

    def test_other_names_mean_what_they_mean_everywhere(self):
        instance = QUICK.build(0, CPU)
        assert instance.algorithm("aid-cg").name == "aid"
        assert isinstance(instance.algorithm("nhgd-refined").inverse, Refined)
        assert instance.algorithm("nhgd") == instance.algorithm()

    def test_theta_follows_the_images_with_one_step_each(self):
        instance = QUICK.with_settings({"dtype": "float64"}).build(0, CPU)
        instance.start().run(steps=30)
        theta = oracles.theta_of(instance.problem)
        instance.solve_inner()
        assert close(theta, oracles.theta_of(instance.problem), 0.02)


class TestData:
    @pytest.mark.parametrize("preset", sorted(Distillation.presets))
    def test_every_preset_builds_and_moves_its_images(self, preset, folder):
        task = Distillation.preset(preset)
        data = None if task.dataset == "digits" else folder.parent
        instance = task.build(0, CPU, data)
        v = instance.problem.v.given
        before = v.clone()
        assert v.shape == (10 * task.per_class, 36 if data else 64)
        assert len(instance.full_inner[0]) == 10 * task.per_class
        instance.start(metrics_every=9).run(steps=2)
        assert bool((v.detach() != before).any())

    def test_the_papers_preset_runs_without_naming_a_method(self, folder):
        command = ["run", "distillation", "--preset", "paper-5", "--steps", "2", "--device", "cpu", "--json"]
        found = CliRunner().invoke(app, [*command, "--data", str(folder.parent)], catch_exceptions=False)
        assert json.loads(found.stdout)["method"] == "nhgd"
        aloud = CliRunner().invoke(app, [*command[:-1], "--data", str(folder.parent)], catch_exceptions=False)
        assert "the paper prints beta = 0 here" in aloud.stderr

    def test_small_products_are_not_shared_among_threads(self):
        assert Distillation().threads == Distillation.preset("paper-100").threads == 1
        assert Distillation.preset("paper-5").threads is Distillation(model="mlp").threads is None

    def test_the_papers_numbers(self):
        five, hundred = Distillation.preset("paper-5"), Distillation.preset("paper-100")
        assert (five.per_class, five.bias, five.l2, five.batch, five.outer_batch) == (5, False, 1 / 15680, None, None)
        assert (hundred.per_class, hundred.batch, hundred.inner_steps, hundred.batches) == (100, 128, 30, 5)

    @pytest.mark.parametrize("preset", ["paper-5", "paper-100"])
    def test_the_printed_step_sizes_are_stable_at_the_first_images(self, preset):
        """Below 2 / lambda, with lambda the largest curvature of the inner problem; at real images they are not."""
        task = Distillation.preset(preset).with_settings({"dataset": "digits", "per_class": 5})
        printed = [row.eta for row in TABLE[EXPERIMENTS["distillation", preset]].values()]
        inverses = [row.beta for name, row in TABLE[EXPERIMENTS["distillation", preset]].items() if name == "amigo"]

        def limit(task: Distillation) -> float:
            """At theta = 0 the Hessian is (I / C - 1 / C^2) x X^T X / n + 2 l2, C the classes."""
            instance = task.build(0, CPU)
            assert not bool(instance.problem.theta.flat().any())
            v = instance.v.double()
            return 2 / (0.1 * float(torch.linalg.matrix_norm(v, 2)) ** 2 / len(v) + 2 * task.l2)

        assert limit(task) > 50 > max(printed + inverses) == max(printed)
        assert limit(task.with_settings({"start": "real"})) < max(printed)

    def test_pixels_are_standardised_and_training_samples_all_there(self, folder):
        sets = Distillation(per_class=1).load(0, CPU, folder)
        assert float(sets.x.mean()) == pytest.approx(0, abs=1e-5)
        assert float(sets.x.std()) == pytest.approx(1, rel=1e-5)
        pixels = (sets.x * sets.deviation + sets.mean) * 255
        raw = idx_files.image_set(train=1000)["train-images-idx3-ubyte"].reshape(1000, -1)
        assert sorted(map(tuple, pixels.round().int().tolist())) == sorted(map(tuple, raw.tolist()))

    @pytest.mark.parametrize("start", ["mean", "real", "noise"])
    def test_first_images(self, start, folder):
        task = Distillation(start=start, per_class=3)
        instance = task.build(0, CPU, folder)
        v, sets = instance.problem.v.given, instance.sets
        assert sets.labels.tolist() == [c for c in range(10) for _ in range(3)]
        means = torch.stack([sets.x[sets.y == c].mean(0) for c in sets.labels.tolist()])
        if start == "real":
            for image, label in zip(v, sets.labels, strict=True):
                assert int(label) in sets.y[(sets.x == image).all(1)]
        else:
            rest = v - means if start == "mean" else v
            assert 0.08 < float(rest.std()) < 0.12

    def test_auto_starts_many_images_from_real_ones(self, folder):
        few, many = (Distillation(per_class=n).build(0, CPU, folder) for n in (19, 20))
        real = [bool((i.sets.x == i.problem.v.given[0]).all(1).any()) for i in (few, many)]
        assert real == [False, True]

    def test_some_of_each_class_and_none_twice(self):
        y = torch.tensor([0, 1, 1, 0, 2, 2, 2, 2])
        found = some_of_each(y, 3, 2, torch.Generator().manual_seed(0))
        assert y[found].tolist() == [0, 0, 1, 1, 2, 2]
        assert len(set(found.tolist())) == 6

    def test_more_images_than_the_rarest_class_has_are_refused(self, folder):
        Distillation(per_class=100).load(0, CPU, folder)
        with pytest.raises(nhgd.InputError, match="per_class is 101, but class 0 has only 100 training samples"):
            Distillation(per_class=101).load(0, CPU, folder)

    @pytest.mark.parametrize("box", [False, True])
    def test_pixels_stay_between_black_and_white_if_asked(self, box):
        instance = QUICK.with_settings({"box": box, "outer_lr": 1.0}).build(0, CPU)
        solution = instance.start(metrics_every=99).run(steps=5)
        pixels = instance.problem.v.given.detach() * instance.sets.deviation + instance.sets.mean
        inside = float(pixels.min()) >= -1e-6 and float(pixels.max()) <= 1 + 1e-6
        assert inside == box
        assert len(solution.history) == 5

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dataset": "fashion-mnist"}, "fashion-mnist was requested, but no folder was given"),
            ({"dataset": "digit"}, "Did you mean 'digits'"),
            ({"model": "mpl"}, "Did you mean 'mlp'"),
            ({"per_class": 0}, "per_class must be a whole number"),
            ({"l2": 0.0}, "l2 must be above 0"),
            ({"start": "random"}, "start of distillation"),
        ],
    )
    def test_refusals(self, settings, message, monkeypatch):
        monkeypatch.delenv("NHGD_DATA", raising=False)
        with pytest.raises(nhgd.InputError, match=message):
            Distillation(**settings).build(0, CPU)

    def test_bundled_digits_take_no_folder(self, folder):
        with pytest.raises(nhgd.InputError, match="would be ignored"):
            QUICK.build(0, CPU, folder)

    def test_a_class_without_samples_is_named(self, tmp_path):
        arrays = idx_files.image_set()
        arrays["train-labels-idx1-ubyte"] = arrays["train-labels-idx1-ubyte"] % 9
        with pytest.raises(nhgd.InputError, match="no sample of class 9"):
            Distillation().build(0, CPU, idx_files.write(tmp_path, arrays))


class TestNumbers:
    def test_few_learnt_images_beat_as_many_real_ones(self):
        instance = QUICK.build(0, CPU)
        found = instance.summary(instance.start(metrics_every=99).run(steps=60))
        assert found["test_accuracy"] > 0.9
        assert found["test_accuracy"] > found["random_test_accuracy"] + 0.1
        assert found["other_test_accuracy"] > found["random_test_accuracy"]
        assert found["images"] == 10
        assert found["scratch_gradient"] < 1e-6

    def test_accuracies_from_scratch_know_nothing_of_the_runs_theta(self):
        instance = QUICK.build(0, CPU)
        solution = instance.start().run(steps=3)
        before = instance.summary(solution)
        with torch.no_grad():
            for leaf in instance.problem.theta.leaves:
                leaf.copy_(normal(*leaf.shape, seed=3))
        after = instance.summary(solution)
        alike = ("test_accuracy", "other_test_accuracy", "random_test_accuracy")
        assert [before[key] for key in alike] == [after[key] for key in alike]
        assert before["loop_test_accuracy"] != after["loop_test_accuracy"]

    def test_a_network_can_be_distilled_too(self):
        instance = QUICK.with_settings({"model": "mlp", "hidden": 8}).build(0, CPU)
        solution = instance.start(metrics_every=99).run(steps=10)
        assert solution.history[-1]["outer_loss"] < solution.history[0]["outer_loss"]
        assert instance.summary(solution)["scratch_gradient"] < 1e-4

    def test_a_small_loss_keeps_its_digits(self):
        scores = 20 * normal(40, 3)
        labels = scores.argmax(1)
        exact = F.cross_entropy(scores, labels, reduction="none")
        rounded = scores.float()
        found = cross_entropies(rounded, labels)
        assert found.dtype == torch.float32
        again = F.cross_entropy(rounded.double(), labels, reduction="none")
        torch.testing.assert_close(found.double(), again, rtol=1e-6, atol=0)
        torch.testing.assert_close(cross_entropies(scores, labels), exact, rtol=0, atol=0)

    def test_training_from_scratch_ends_where_scikit_learn_does(self):
        x, l2 = normal(30, 4), 0.01
        y = (x[:, :3] + normal(30, 3, seed=1)).argmax(1)
        model, norm = trained(Architecture(bias=False), x, y, 3, l2)
        other = LogisticRegression(C=1 / (2 * l2 * 30), fit_intercept=False, tol=1e-10, max_iter=1000)
        other.fit(x.numpy(), y.numpy())
        np.testing.assert_allclose(model.weight.detach().numpy(), other.coef_, atol=1e-5)
        assert norm <= 1e-6
        assert accuracy_of(model, x, y) == other.score(x.numpy(), y.numpy())
        assert accuracy_of(model, x, y, batch=7) == accuracy_of(model, x, y)

    def test_a_mean_in_batches_is_the_mean(self):
        model, x = Architecture("mlp", hidden=3).build(4, 3, seed=0), normal(10, 4)
        y = torch.arange(10) % 3
        assert mean_loss(model, x, y, batch=3) == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-12)

    def test_building_a_network_leaves_the_generator_alone(self):
        state = torch.get_rng_state()
        first, second = (Architecture("mlp").build(4, 3, seed=1)[0].weight for _ in range(2))
        assert torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), state)

    def test_the_bound_on_the_curvature_holds(self):
        problem, inner, _ = tiny(nn.Linear(4, 3), l2=0.0)
        top = float(torch.linalg.eigvalsh(oracles.hessian(problem, inner))[-1])
        bound = largest_curvature(problem.v.given)
        assert top <= bound <= 10 * top


class TestPictures:
    def test_a_grid_puts_every_image_in_its_place(self):
        images = torch.arange(12.0).reshape(3, 2, 2) / 12
        found = image_grid(images, columns=2, zoom=3)
        assert found.shape == (21, 21)
        small = found[1::3, 1::3]
        assert torch.equal(small[1:3, 1:3], images[0])
        assert torch.equal(small[1:3, 4:6], images[1])
        assert torch.equal(small[4:6, 1:3], images[2])
        assert bool((small[4:6, 4:6] == 1).all())

    def test_a_png_reads_back(self, tmp_path):
        pixels = torch.linspace(-0.2, 1.2, 35).reshape(5, 7)
        found = imread(write_png(tmp_path / "a.png", pixels))
        np.testing.assert_allclose(found, pixels.clamp(0, 1).numpy(), atol=0.5 / 255 + 1e-6)
        with pytest.raises(nhgd.InputError, match="rows, columns"):
            write_png(tmp_path / "b.png", torch.zeros(3))

    def test_the_command_line_writes_the_learnt_images(self, tmp_path):
        command = ["run", "distillation", "--preset", "quick", "--steps", "2", "--device", "cpu", "--json"]
        found = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "a")], catch_exceptions=False)
        metrics = json.loads(found.stdout)["metrics"]
        assert {"outer_loss", "inner_loss", "test_accuracy", "loop_test_accuracy", "other_test_accuracy"} <= set(
            metrics
        )
        names = {path.name for path in (tmp_path / "a").iterdir()}
        assert names == {"run.json", "result.json", "history.jsonl", "curve.png", "images.png"}
        high, wide = imread(tmp_path / "a" / "images.png").shape[:2]
        assert min(high, wide) > 400  # ten images and their names, large
