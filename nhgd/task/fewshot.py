"""Features from which a new class is learnt by a few samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nhgd._solution import Solution
from nhgd._validation import counted, not_negative, positive
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.plot.png import image_grid, write_png
from nhgd.problem import Bilevel
from nhgd.schedule import Decay
from nhgd.task._classifier import cross_entropies
from nhgd.task._images import CLASSES, mean_and_deviation, read
from nhgd.task._inner_solver import lbfgs
from nhgd.task.base import AbstractTask, Instance

DATASETS = ("auto", "digits", "mnist", "fashion-mnist")
STEEPEST = 0.5  # of the cross-entropy in the scores: a bound on its curvature


@dataclass(frozen=True)
class EpisodeSamples:
    """Images (N, side, side), their labels within the episode (N,) and the episodes (N,), in order of these."""

    x: Tensor
    y: Tensor
    episode: Tensor

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """All of them as one batch."""
        return self.x, self.y, self.episode


@dataclass(frozen=True)
class Episodes:
    """Several small classification problems: what each is trained on, and what judges it."""

    support: EpisodeSamples
    query: EpisodeSamples
    count: int


@final
@dataclass(frozen=True)
class FewShot(AbstractTask):
    """Few-shot learning: features v such that a linear head, trained on a few images, knows new classes.

        inner: mean over episodes e of  mean CE( y, theta_e . v(x) ) + l2 ||theta_e||^2      over the support of e
        outer: mean cross-entropy of the same heads on the queries of the episodes

    An episode is a classification problem of its own: `ways` classes in a random order with `shots` images each, from
    which its head theta_e is trained, and further images of the same classes that judge it. The features are those of a
    small convolutional network, normalised for each image. Six of the ten classes make the episodes to learn from; the
    other four are held out, and make those that are reported. Each image lies at a random place of a canvas, `shift`
    pixels from the middle at most each way, because centred digits are told apart by their pixels alone. In the
    episodes to learn from a class may be turned by right angles, because six classes are few, and features that fit
    these alone do not last.

    test_accuracy is that of heads trained to the end on episodes of held-out classes, and test_deviation the standard
    error of that mean over episodes; random_test_accuracy is that with the network as it was before,
    pixel_test_accuracy that of a head on pixels; unadapted_accuracy is that without training a head, a guess, because
    labels mean something else in each episode.

    Args:
        dataset: "digits" (bundled), "mnist" or "fashion-mnist" (IDX files), or "auto": mnist when a folder was named,
            else digits.
        ways, shots, queries: classes of an episode, and images of each class in its support and among its queries.
        episodes, test_episodes: how many of either kind.
        classes: how many classes the first kind is made of; the second kind is made of the others.
        turns: by how many right angles, 1 to 4 with 0 among them, a class may be turned in the episodes to learn from.
        shift: None: an eighth of the side of an image.
        width: channels of the first convolution; the second has twice as many.
        l2: the ridge of a head.
        batch: episodes in an inner and an outer batch; None: all.
        inner_steps, outer_lr: of the solver.
        dtype: "float32" or "float64".

    References: L. Bertinetto, J. Henriques, P. Torr, A. Vedaldi, Meta-learning with differentiable closed-form solvers,
    2019; K. Lee, S. Maji, A. Ravichandran, S. Soatto, Meta-learning with differentiable convex optimization, 2019.
    Deviations: 1. a softmax head where those have least squares and support vector machines. 2. a fixed number of
    episodes, whose heads are kept from one outer step to the next.
    """

    name: ClassVar[str] = "fewshot"
    headline: ClassVar[str] = "test_accuracy"
    curve: ClassVar[str] = "test_accuracy"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {"dataset": "digits", "episodes": 20, "test_episodes": 30, "width": 4},
    }
    dataset: str = "auto"
    ways: int = 3
    shots: int = 5
    queries: int = 5
    episodes: int = 60
    test_episodes: int = 200
    classes: int = 6
    turns: int = 4
    shift: int | None = None
    width: int = 16
    l2: float = 0.05
    batch: int | None = None
    inner_steps: int = 10
    outer_lr: float = 0.01
    dtype: str = "float32"

    def __post_init__(self) -> None:
        self.check_choices(dataset=DATASETS, dtype=("float32", "float64"))
        sizes = {name: getattr(self, name) for name in ("shots", "queries", "episodes", "test_episodes", "width")}
        counted("fewshot", **sizes, inner_steps=self.inner_steps)
        if self.batch is not None:
            counted("fewshot", batch=self.batch)
        if self.turns not in (1, 2, 3, 4):
            raise InputError(f"fewshot: turns must be 1, 2, 3 or 4, got {self.turns}.")
        if self.shift is not None:
            not_negative("fewshot", shift=self.shift)
        positive("fewshot", l2=self.l2, outer_lr=self.outer_lr)
        if not (2 <= self.ways <= self.classes and self.ways <= CLASSES - self.classes):
            raise InputError(
                f"fewshot: an episode needs at least 2 ways, and no more than there are classes to learn from ({self.classes})"
                f" or classes held out ({CLASSES - self.classes}); got ways={self.ways}. Change ways or classes."
            )

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> FewShotInstance:
        generator = torch.Generator().manual_seed(seed)
        images = read(self.dataset, "mnist", data)
        order = torch.randperm(CLASSES, generator=generator)
        known = torch.isin(images.y, order[: self.classes])
        mean, deviation = mean_and_deviation(images.x[known], "fewshot")
        x = ((images.x - mean) / deviation).to(getattr(torch, self.dtype))
        train, held_out = (
            self._episodes(x, images.y, classes, count, turns, generator, device)
            for classes, count, turns in (
                (order[: self.classes], self.episodes, self.turns),
                (order[self.classes :], self.test_episodes, 1),
            )
        )
        network = self._network(seed).to(device, x.dtype)
        with torch.no_grad():
            size = network(train.support.x[:1]).shape[1]
        theta = torch.zeros(self.episodes, self.ways, size + 1, dtype=x.dtype, device=device)
        problem = Bilevel(_inner, _outer, theta, network, l2=self.l2 / self.episodes, likelihood="categorical")
        per_batch = self.batch or self.episodes
        return FewShotInstance(
            problem=problem,
            inner_data=Data(*train.support.batch, batch=per_batch * self.ways * self.shots, shuffle=False),
            outer_data=Data(*train.query.batch, batch=per_batch * self.ways * self.queries, shuffle=False),
            full_inner=train.support.batch,
            full_outer=train.query.batch,
            method="aid",
            steps=40,
            task=self,
            train=train,
            held_out=held_out,
            network=network,
            untrained=copy.deepcopy(network),
            theta=theta,
        )

    def _network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return nn.Sequential(
                nn.Unflatten(1, (1, -1)),
                *(nn.Conv2d(1, self.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
                *(nn.Conv2d(self.width, 2 * self.width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
                nn.Flatten(),
            )

    def _episodes(
        self,
        x: Tensor,
        y: Tensor,
        classes: Tensor,
        count: int,
        turns: int,
        generator: torch.Generator,
        device: torch.device,
    ) -> Episodes:
        """Draw episodes from images x (N, P) of some classes, each turned by one of this many right angles."""
        each = self.shots + self.queries
        of_class = {int(c): torch.nonzero(y == c).flatten() for c in classes}
        for c, mine in of_class.items():
            if len(mine) < each:
                raise InputError(
                    f"fewshot: shots + queries is {each}, but class {c} has only {len(mine)} images. Ask for fewer."
                )
        chosen = []
        for _ in range(count):
            ways = classes[torch.randperm(len(classes), generator=generator)[: self.ways]]
            for mine in (of_class[int(c)] for c in ways):
                chosen.append(mine[torch.randperm(len(mine), generator=generator)[:each]])
        pixels = self._placed(x[torch.cat(chosen)], generator).to(device)
        pixels = pixels.unflatten(0, (count, self.ways, each))
        angles = torch.randint(turns, (count, self.ways), generator=generator).to(device)
        for angle in range(1, turns):
            pixels[angles == angle] = pixels[angles == angle].rot90(angle, (-2, -1))

        def samples(which: slice) -> EpisodeSamples:
            part = pixels[:, :, which]
            episode, label, _ = torch.meshgrid(*(torch.arange(n, device=device) for n in part.shape[:3]), indexing="ij")
            return EpisodeSamples(part.flatten(0, 2), label.flatten(), episode.flatten())

        return Episodes(samples(slice(self.shots)), samples(slice(self.shots, None)), count)

    def _placed(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Images (N, P) at random places of a canvas, (N, side, side)."""
        side = round(x.shape[1] ** 0.5)
        shift = side // 8 if self.shift is None else self.shift
        canvas = x.new_full((len(x), side + 2 * shift, side + 2 * shift), float(x.min()))
        places = torch.randint(2 * shift + 1, (len(x), 2), generator=generator)
        for top, left in places.unique(dim=0).tolist():
            here = (places == torch.tensor([top, left])).all(1)
            canvas[here, top : top + side, left : left + side] = x[here].unflatten(1, (side, side))
        return canvas


def _normalised(z: Tensor) -> Tensor:
    """Features (N, M) without their mean and length, and a one for the bias, (N, M + 1)."""
    return F.pad(F.layer_norm(z, z.shape[1:]), (0, 1), value=1.0)


def _scores(theta: Tensor, z: Tensor, episode: Tensor) -> Tensor:
    """Of heads theta (E, ways, M + 1) for features z (N, M + 1), (N, ways)."""
    return torch.einsum("nwm,nm->nw", theta[episode], z)


def _inner(theta: Tensor, v: nn.Module, batch: Any) -> Losses:
    x, y, episode, *_ = batch
    scores = _scores(theta, _normalised(v(x)), episode)
    return Losses(cross_entropies(scores, y), outputs=scores)


def _outer(theta: Tensor, v: nn.Module, batch: Any) -> Tensor:
    x, y, episode, *_ = batch
    return F.cross_entropy(_scores(theta, _normalised(v(x)), episode), y)


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class FewShotInstance(Instance):
    """The problem with the episodes of held-out classes.

    Attributes:
        task: the settings it was built from.
        train, held_out: the episodes to learn from, and those of the other classes.
        network, untrained: v, and a copy of it as it was.
        theta: the heads, (episodes, ways, features + 1).
    """

    task: FewShot
    train: Episodes
    held_out: Episodes
    network: nn.Module
    untrained: nn.Module
    theta: Tensor

    @override
    def solver_settings(self) -> dict[str, Any]:
        """Adam outside; inside steps that no features make too long, because each has the same length."""
        count, size = self.theta.shape[0], self.theta.shape[2]
        return {
            "inner_steps": self.task.inner_steps,
            "inner_lr": count / (STEEPEST * size + 2 * self.task.l2),
            "outer_lr": Decay(self.task.outer_lr, final=0.1),
            "outer_optimizer": torch.optim.Adam,
            "metrics_every": 10,
        }

    @override
    def metrics(self, theta: Tensor, v: nn.Module) -> dict[str, float]:
        return {"test_accuracy": float(self._known(v).mean())}

    @override
    def summary(self, solution: Solution) -> dict[str, float]:
        found = self._known(self.network)
        query = self.held_out.query
        unadapted = _scores(torch.zeros_like(self.theta), _normalised(self.network(query.x)), 0 * query.episode)
        return {
            **self.losses(),
            "test_accuracy": float(found.mean()),
            "test_deviation": float(found.std() / len(found) ** 0.5),
            "unadapted_accuracy": float((unadapted.argmax(1) == query.y).double().mean()),
            "random_test_accuracy": float(self._known(self.untrained).mean()),
            "pixel_test_accuracy": float(self._known(nn.Flatten()).mean()),
        }

    @torch.no_grad()
    def _known(self, network: Callable[[Tensor], Tensor]) -> Tensor:
        """The part of its queries that each episode of held-out classes gets right, after training its head, (E,)."""
        support, query, count = self.held_out.support, self.held_out.query, self.held_out.count
        heads = self._trained(_normalised(network(support.x)).detach(), support, count, 1e-3)
        hits = _scores(heads, _normalised(network(query.x)), query.episode).argmax(1) == query.y
        by_episode: Tensor = hits.double().unflatten(0, (count, -1))
        return by_episode.mean(1)

    def _trained(self, z: Tensor, support: EpisodeSamples, count: int, tol: float) -> Tensor:
        """Heads trained to the end on features z (N, M + 1), (count, ways, M + 1)."""
        heads = z.new_zeros(count, self.task.ways, z.shape[1]).requires_grad_()

        def value() -> Tensor:
            return (
                F.cross_entropy(_scores(heads, z, support.episode), support.y)
                + self.task.l2 / count * heads.square().sum()
            )

        lbfgs(value, [heads], tol)
        return heads.detach()

    @override
    def solve_inner(self) -> float:
        tol = 1e-4 if self.task.dtype == "float32" else 1e-8
        with torch.no_grad():
            z = _normalised(self.network(self.train.support.x))
        self.problem.theta.assign(self._trained(z, self.train.support, self.train.count, tol).flatten())
        gradient = torch.autograd.grad(self.problem.objective(self.full_inner), self.problem.theta.leaves)
        return float(torch.cat([g.flatten() for g in gradient]).norm())

    @override
    @torch.no_grad()
    def pictures(self, folder: Path) -> list[Path]:
        """The first episode of held-out classes: a line for each class, its shots and, after a gap, the queries taken
        for it.

        Those that are of another class are shown in negative.
        """
        support, query = self.held_out.support, self.held_out.query
        heads = self._trained(_normalised(self.network(support.x)), support, self.held_out.count, 1e-3)
        first = query.episode == 0
        taken = _scores(heads, _normalised(self.network(query.x[first])), query.episode[first]).argmax(1)
        low, high = support.x.min(), support.x.max()
        shots = ((support.x[support.episode == 0] - low) / (high - low)).unflatten(0, (self.task.ways, -1))
        asked = (query.x[first] - low) / (high - low)
        asked = torch.where((taken == query.y[first])[:, None, None], asked, 1 - asked)
        columns = self.task.shots + 1 + int(torch.bincount(taken).max())
        page = torch.ones(self.task.ways, columns, *asked.shape[1:], dtype=asked.dtype, device=asked.device)
        for c in range(self.task.ways):
            mine = torch.cat([shots[c], torch.ones_like(asked[:1]), asked[taken == c]])
            page[c, : len(mine)] = mine
        zoom = max(1, 56 // asked.shape[1])
        return [write_png(folder / "episode.png", image_grid(page.flatten(0, 1), columns, zoom))]
