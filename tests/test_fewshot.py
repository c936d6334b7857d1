"""Few-shot learning: what episodes are made of, and what their heads learn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression

import nhgd
from nhgd.task import FewShot
from tests import oracles

CPU = torch.device("cpu")
TINY = FewShot(dataset="digits", ways=2, shots=2, queries=1, episodes=2, test_episodes=3, width=1, shift=0, l2=0.2)


@pytest.fixture(scope="module")
def tiny():
    return TINY.with_settings({"dtype": "float64"}).build(0, CPU)


def test_episodes_of_both_kinds_have_classes_of_their_own(monkeypatch):
    """Images that say who they are: a class and a number, where the canvas is lowest."""
    images = torch.zeros(200, 16)
    images[:, 0], images[:, 1], labels = (
        1.0 + torch.arange(200) % 10,
        1.0 + torch.arange(200) // 10,
        torch.arange(200) % 10,
    )
    monkeypatch.setattr("nhgd.task._images.digits", lambda: (images, labels))
    task = FewShot(ways=3, shots=2, queries=4, episodes=12, test_episodes=9, shift=0, turns=1, width=1, dtype="float64")
    instance = task.build(0, CPU)
    low, seen = instance.train.support.x.min(), {}
    for name, episodes in (("train", instance.train), ("held_out", instance.held_out)):
        drawn = {}
        for part, each in ((episodes.support, 2), (episodes.query, 4)):
            assert part.x.shape == (episodes.count * 3 * each, 4, 4)
            assert torch.equal(part.episode, torch.arange(episodes.count).repeat_interleave(3 * each))
            for x, y, e in zip(part.x, part.y.tolist(), part.episode.tolist(), strict=True):
                drawn.setdefault((e, y), []).append((round(float(x[0, 0] - low), 6), round(float(x[0, 1] - low), 6)))
        for (e, y), who in drawn.items():
            assert len(set(who)) == len(who) == 6  # no image twice
            assert len({c for c, _ in who}) == 1  # a label is one class
            others = {c for (f, z), other in drawn.items() if f == e and z != y for c, _ in other}
            assert who[0][0] not in others  # and a class one label
        seen[name] = {c for who in drawn.values() for c, _ in who}
    assert not seen["train"] & seen["held_out"]
    assert (len(seen["train"]), len(seen["held_out"])) == (6, 4)


def test_images_keep_their_pixels_wherever_they_lie():
    x = torch.rand(40, 9, generator=torch.Generator().manual_seed(0)) + 1
    x[0, 0] = 0.5  # the lowest, which surrounds them
    placed = FewShot(shift=2)._placed(x, torch.Generator().manual_seed(1))
    assert placed.shape == (40, 7, 7)
    corners = set()
    for image, canvas in zip(x, placed, strict=True):
        found = [
            (i, j) for i in range(5) for j in range(5) if torch.equal(canvas[i : i + 3, j : j + 3].flatten(), image)
        ]
        assert len(found) == 1
        assert float(canvas.sum()) == pytest.approx(float(image.sum()) + 40 * 0.5, rel=1e-6)
        corners.add(found[0])
    assert len(corners) > 12  # of 25; fewer with a chance below 1e-9


def test_a_class_is_turned_as_a_whole_and_only_to_learn_from(monkeypatch):
    """A bright corner shows the angle: all images of a class in an episode share it."""
    images = torch.zeros(200, 16)
    images[:, 0] = 1.0
    monkeypatch.setattr("nhgd.task._images.digits", lambda: (images, torch.arange(200) % 10))
    instance = FewShot(ways=2, shots=1, queries=2, episodes=30, test_episodes=8, shift=0, width=1).build(0, CPU)
    found = []
    for episodes in (instance.train, instance.held_out):
        parts = [part.x.flatten(1).argmax(1) for part in (episodes.support, episodes.query)]
        assert torch.equal(parts[1], parts[0].repeat_interleave(2))
        found.append(set(parts[0].tolist()))
    assert found == [{0, 3, 12, 15}, {0}]


def test_a_head_is_the_logistic_regression_of_its_episode(tiny):
    tiny.solve_inner()
    support = tiny.train.support
    with torch.no_grad():
        z = tiny.network(support.x)
    z = F.pad((z - z.mean(1, keepdim=True)) / (z.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt(), (0, 1), value=1.0)
    for e in range(2):
        mine = support.episode == e
        # scikit-learn's two classes have one vector of scores, ours one each: w and -w with half the ridge on w.
        other = LogisticRegression(C=1 / (4 * 0.2), fit_intercept=False, tol=1e-12, max_iter=10_000)
        weights = torch.full((4,), 1 / 4, dtype=torch.float64).numpy()
        other.fit(2 * z[mine].numpy(), support.y[mine].numpy(), sample_weight=weights)
        ours = tiny.problem.theta.given[e].detach()
        torch.testing.assert_close(ours[1], torch.as_tensor(other.coef_[0]), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours[0], -ours[1], rtol=1e-6, atol=1e-8)


def test_the_exact_hypergradient_is_the_slope_of_the_solved_problem(tiny):
    inner, outer, problem = tiny.full_inner, tiny.full_outer, tiny.problem
    oracles.assign(problem.theta.given, oracles.solve_inner(problem, inner))
    got = nhgd.hypergradient(problem, inner, outer, inverse="exact").leaves
    direction = torch.randn(problem.v.numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    v, h = oracles.v_of(problem), 1e-5
    ends = [float(oracles.phi(problem, inner, outer, v + sign * h * direction)) for sign in (-1, 1)]
    assert float(oracles.join(got) @ direction) == pytest.approx((ends[1] - ends[0]) / (2 * h), rel=1e-5)


def test_no_features_make_the_inner_step_too_long(tiny):
    settings = tiny.solver_settings()
    top = torch.linalg.eigvalsh(oracles.hessian(tiny.problem, tiny.full_inner))[-1]
    assert settings["inner_lr"] * float(top) <= 2


def test_batches_are_whole_episodes():
    instance = FewShot(dataset="digits", episodes=5, test_episodes=2, width=1, batch=2).build(0, CPU)
    for data, each in ((instance.inner_data, 15), (instance.outer_data, 15)):
        episodes = [batch[2].bincount(minlength=5).tolist() for batch in data]
        assert episodes == [[each, each, 0, 0, 0], [0, 0, each, each, 0], [0, 0, 0, 0, each]]


def test_without_a_head_it_guesses_and_a_picture_shows_an_episode(tmp_path):
    instance = TINY.build(1, CPU)
    summary = instance.summary(instance.start(seed=1).run(steps=2))
    assert summary["unadapted_accuracy"] == pytest.approx(1 / 2)
    assert instance.metrics(instance.theta, instance.untrained)["test_accuracy"] == summary["random_test_accuracy"]
    assert summary["test_accuracy"] == instance.metrics(instance.theta, instance.network)["test_accuracy"]
    assert not torch.equal(oracles.flat(instance.network), oracles.flat(instance.untrained))
    (path,) = instance.pictures(tmp_path)
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_learning_helps_on_classes_it_has_not_seen():
    instance = FewShot.preset("quick").build(0, CPU)
    summary = instance.summary(instance.start(seed=0).run(steps=30))
    assert summary["test_accuracy"] > summary["random_test_accuracy"] + 0.03
    assert summary["test_accuracy"] > summary["pixel_test_accuracy"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ways": 5}, "classes held out"),
        ({"ways": 4, "classes": 3}, "classes to learn from"),
        ({"ways": 1}, "at least 2 ways"),
        ({"l2": 0.0}, "l2 must be"),
        ({"shift": -1}, "shift must be"),
        ({"turns": 5}, "turns must be 1, 2, 3 or 4"),
    ],
)
def test_settings_that_make_no_episode_are_refused(settings, words):
    with pytest.raises(nhgd.InputError, match=words):
        FewShot(**settings)


def test_more_images_than_there_are_cannot_be_asked_for():
    with pytest.raises(nhgd.InputError, match=r"shots \+ queries is 505, but class \d has only"):
        FewShot(dataset="digits", shots=500).build(0, CPU)
