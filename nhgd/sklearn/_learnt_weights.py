"""Weights of samples as a function of their loss, learnt by natural hypergradient descent."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from nhgd._randomness import Randomness
from nhgd._solution import Row
from nhgd._solver import Solver
from nhgd.data.loader import Data
from nhgd.inverse._krylov.spectrum import largest_eigenvalue
from nhgd.oracle import Oracle
from nhgd.task._classifier import Split
from nhgd.task._overfitting import WORST_RISE, OverfittingWarning
from nhgd.task._weighted_training import WeightedTraining, inner_settings, outer_settings
from nhgd.task._weighting import AbstractWeighting, ByLoss
from nhgd.variable import Given

Array = np.ndarray[Any, Any]
FEWEST = 30  # evaluation samples needed to detect overfitting


@dataclass(frozen=True)
class Parts:
    """Which samples do what.

    Attributes:
        noisy: those whose weights are learnt.
        guide: trusted ones, which train the model with weight 1; maybe none.
        judge: those whose loss the weights are to lower.
        evaluation: those that choose the outer step.
        robust: whether judge and evaluation may be labelled wrong, and have a bounded loss.
        times: how often each sample of the first, the third and the fourth counts, if not all of them once.
    """

    noisy: Split
    guide: Split
    judge: Split
    evaluation: Split
    robust: bool
    times: tuple[Tensor, Tensor, Tensor] | None = None


@final
@dataclass(frozen=True, eq=False)
class Counted(AbstractWeighting):
    """Weights of samples that count several times, trusted ones once: c_i w_i / mean c.

    Attributes:
        of: w_i.
        times: c_i over their mean, with those of the trusted samples.
    """

    of: AbstractWeighting
    times: Tensor

    @override
    def first(self, start: float | None, like: Tensor) -> Given:
        return self.of.first(start, like)

    @override
    def weights(self, v: Any, losses: Tensor, index: Tensor) -> Tensor:
        return self.times[index] * self.of.weights(v, losses, index)

    @override
    def potential(self, v: Any, losses: Tensor, index: Tensor) -> Tensor:
        return self.times[index] * self.of.potential(v, losses, index)

    @override
    def _learnt(self, v: Any, losses: Tensor, index: Tensor) -> Tensor:
        return self.of._learnt(v, losses, index)

    @override
    def _integral(self, v: Any, losses: Tensor, index: Tensor) -> Tensor:
        return self.of._integral(v, losses, index)


@dataclass(frozen=True)
class LearntWeights:
    """The model and (a, b) of the outer step with the lowest evaluation loss.

    Attributes:
        model, v: theta and (a, b).
        history: a row for each outer step, with evaluation_loss.
        step: how many steps led to it.
    """

    model: nn.Module
    v: Tensor
    history: list[Row]
    step: int

    @torch.no_grad()
    def of(self, split: Split) -> Array:
        """The weights of samples, (N,)."""
        losses = F.cross_entropy(self.model(split.x), split.y, reduction="none")
        index = torch.arange(len(losses), device=losses.device)
        found: Array = ByLoss(len(losses)).weights(self.v, losses, index).double().cpu().numpy()
        return found


def learn_weights(
    model: nn.Module,
    parts: Parts,
    l2: float,
    q: float,
    steps: int,
    inner_steps: int,
    batch_size: int,
    seed: int,
    advance: Callable[[str], None],
) -> LearntWeights:
    """Learn (a, b) of w = sigmoid(e^a (e^b - loss)) so that the model trained with these weights does well on the
    judge.

    Args:
        model: theta, which is trained in place.
        parts: the samples.
        l2: the ridge.
        q: of the bounded loss (1 - p_y^q) / q.
        steps, inner_steps, batch_size, seed: of the solver.
        advance: told of each outer step that is done.
    """
    weighting: AbstractWeighting = ByLoss(len(parts.noisy.y))
    times = None
    if parts.times is not None:
        times = torch.cat([parts.times[0], torch.ones_like(parts.guide.y, dtype=parts.times[0].dtype)])
        times = times / times.mean()
        weighting = Counted(len(parts.noisy.y), weighting, times)
    v: Any = weighting.first(None, parts.noisy.x)
    training = WeightedTraining(model, v, weighting, parts.noisy, parts.guide, l2)

    def losses_of(model: nn.Module, split: Split) -> Tensor:
        losses = F.cross_entropy(model(split.x), split.y, reduction="none")
        return (1 - (-q * losses).exp()) / q if parts.robust else losses

    def mean(losses: Tensor, times: Tensor | None) -> Tensor:
        return losses.mean() if times is None else (times * losses).sum() / times.sum()

    def outer(model: nn.Module, v: Tensor, batch: Any) -> Tensor:
        return mean(losses_of(model, Split(batch[0], batch[1])), None if parts.times is None else batch[2])

    best: dict[str, Any] = {"evaluation_loss": float("inf")}

    def evaluate(theta: nn.Module, v: Tensor) -> dict[str, float]:
        with torch.no_grad():
            losses = losses_of(theta, parts.evaluation)
        value = float(mean(losses, None if parts.times is None else parts.times[2]))
        if value < best["evaluation_loss"]:
            best.update(
                evaluation_loss=value,
                losses=losses,
                theta={name: tensor.detach().clone() for name, tensor in theta.state_dict().items()},
                v=v.detach().clone(),
                number=evaluations[0],
            )
        if evaluations[0]:
            advance(f"weights, step {evaluations[0]}/{steps}")
        evaluations[0] += 1
        return {"evaluation_loss": value}

    evaluations = [0]
    problem = training.problem(outer)
    training.start_solved()
    judged = Data(parts.judge.x, parts.judge.y, *([] if parts.times is None else [parts.times[1]]))
    solver = Solver(
        problem,
        training.data(batch_size),
        judged,
        method="nhgd",
        inner_steps=inner_steps,
        seed=seed,
        metrics=evaluate,
        **inner_settings(_step_size(training, problem, seed, times)),
        **outer_settings(0.1),
    )
    evaluate(model, v)  # the start may be best
    history = solver.run(steps=steps, progress=False).history
    with torch.no_grad():
        last, outer_loss = losses_of(model, parts.evaluation), float(outer(model, v, tuple(judged.tensors)))
    _warn_of_overfitting(history, best, last, outer_loss)
    chosen = copy.deepcopy(model)
    chosen.load_state_dict(best["theta"])
    return LearntWeights(chosen, best["v"], history, int(best["number"]))


def _step_size(training: WeightedTraining, problem: Any, seed: int, times: Tensor | None) -> float:
    if isinstance(training.model, nn.Linear):
        return training.step_size(times)
    with Randomness(seed, problem.theta.device).scope():
        batch = next(iter(training.data(1024)))
    top = largest_eigenvalue(Oracle(problem, [batch]), problem.theta.flat(), 20)
    return 0.5 / top if top > 0 else 0.01


def _warn_of_overfitting(history: list[Row], best: dict[str, Any], last: Tensor, outer_loss: float) -> None:
    """Warn if the evaluation loss rose by a tenth, and by more than chance, while that of the judge still fell."""
    if len(last) < FEWEST or best["number"] >= len(history):
        return
    rise = (last - best["losses"]).double()
    fell = outer_loss < history[best["number"]]["outer_loss"]
    chance = 2 * float(rise.std()) / len(rise) ** 0.5
    if fell and float(rise.mean()) > max(WORST_RISE * best["evaluation_loss"], chance):
        warnings.warn(
            f"The weights overfit the samples that judge them: after step {best['number']} of {len(history)} the loss on"
            f" held-out samples rose from {best['evaluation_loss']:.3g} to {float(last.mean()):.3g}. The weights of that step"
            " are used. Fewer steps would save time; more trusted samples would help.",
            OverfittingWarning,
            stacklevel=4,
        )
