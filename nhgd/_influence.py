"""Which training samples helped or hurt a prediction: `influence`.

    scores[q, i] = w_i <s_i, H^{-1} grad_theta f_q> / N

s_i is the gradient of training sample i's loss, f_q the outer loss of query q alone. That is the hypergradient of f_q
in the weight of sample i, with its sign turned, for every sample and query at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from nhgd._progress import Tick, bar
from nhgd._recording.normalisation import normalises_by_batch
from nhgd._recording.query_gradients import QueryGradients, cut
from nhgd._recording.recorder import Recorder
from nhgd._surroundings import library_settings
from nhgd._validation import check_seed, validated_but
from nhgd.data import Data
from nhgd.data.batch import Batch, common_length, first_bad, move
from nhgd.data.loader import reiterable
from nhgd.errors import InputError, InverseWarning, NonFiniteError
from nhgd.inverse import AbstractInverse, resolve
from nhgd.inverse._learned.layers import layer_shapes
from nhgd.inverse._learned.learning import learn
from nhgd.inverse._learned.periods import LayerMeans
from nhgd.inverse.base import POOR, Iterative, Learned
from nhgd.inverse.capabilities import FactorisesProducts, SettlesInSecondWalk, operator, with_learner
from nhgd.losses import check_weight
from nhgd.objective import OracleCalls
from nhgd.oracle import Oracle
from nhgd.problem import Bilevel
from nhgd.record import LayerRecord, LayerStatistics
from nhgd.ridge import Ridge

MEMORY, LEAST_MEMORY = 2 * 2**30, 2**20


@dataclass(frozen=True)
class Influence:
    """The influence of training samples on queries.

    Attributes:
        scores: (queries, training samples), on the CPU, both in the order of their data. scores[q, i] is, to first
            order, how much the loss of query q would rise if training sample i were left out. Positive: the sample
            lowered the query's loss.
        query_losses: (queries,), at the current theta.
        stats: inverse, its notes, residual (the largest of an inverse that iterates, else None), walks over the
            training data that took scores, and the counts of `OracleCalls`.
    """

    scores: Tensor
    query_losses: Tensor
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def total(self) -> Tensor:
        """The influence of every training sample on the mean loss of the queries, (training samples,)."""
        return self.scores.mean(0)

    def helpful(self, count: int = 10, query: int | None = None) -> Tensor:
        """The training samples that lowered the loss of a query, or of all queries, the most."""
        return self._ranked(query)[:count]

    def harmful(self, count: int = 10, query: int | None = None) -> Tensor:
        """The training samples that raised the loss of a query, or of all queries, the most."""
        return self._ranked(query).flip(0)[:count]

    def _ranked(self, query: int | None) -> Tensor:
        return (self.total if query is None else self.scores[query]).argsort(descending=True, stable=True)


@validated_but("inverse")
def influence(
    problem: Bilevel,
    train_data: Iterable[Batch],
    query_data: Iterable[Batch],
    inverse: str | AbstractInverse = "ekfac",
    memory: int = MEMORY,
    seed: int = 0,
    progress: bool | None = None,
) -> Influence:
    """How much each training sample lowered the loss of each query, at the current theta, which stays as it is.

    One walk over the training data takes the scores of as many queries as fit in `memory`; before it, one or two walks
    teach an inverse that learns. No model is trained. A module should be in evaluation mode.

    Args:
        problem: a `Bilevel` with theta at, or near, an inner optimum. A query is one sample of the outer loss.
        train_data: batches of the inner problem: an `nhgd.Data`, whose order is kept although it shuffles, a DataLoader
            that does not shuffle, a list of batches, or one batch as a tuple or dict of tensors.
        query_data: batches of the outer problem, in the same forms.
        inverse: a name or an object, for example `nhgd.inverse.EKFAC(damping=1e-3)`. Where `beta` is left at its
            default, batches do not fade: at one theta all samples count the same. EKFAC takes its moments in a second
            walk, in the eigenbasis of all training data.
        memory: bytes for gradients of queries and of samples. The scores themselves come on top.
        seed: what dropout is drawn from, if a module is left in training mode.
        progress: a bar on standard error; by default on a terminal only.

    >>> x = torch.tensor([[1.0], [1.0], [-1.0]])
    >>> y = torch.tensor([1.0, 1.0, 1.0])
    >>> problem = Bilevel(
    ...     inner=lambda theta, v, batch: v[batch[2]] * (batch[0] @ theta - batch[1]).square(),
    ...     outer=lambda theta, v, batch: (batch[0] @ theta - batch[1]).square().mean(),
    ...     theta=torch.tensor([1 / 3]), v=torch.ones(3))
    >>> found = influence(problem, Data(x, y), Data(torch.tensor([[2.0]]), torch.tensor([2.0])), inverse="exact")
    >>> [[round(score, 3) for score in row] for row in found.scores.tolist()]
    [[1.185, 1.185, -2.37]]

    References: P. W. Koh, P. Liang, Understanding black-box predictions via influence functions, 2017; R. Grosse et
    al., Studying large language model generalization with influence functions, 2023.
    """
    check_seed(seed)
    problem.refuse_inference()
    _refuse_batch_statistics(problem)
    if memory < LEAST_MEMORY:
        raise InputError(f"influence: memory is the bytes for gradients, at least {LEAST_MEMORY:,}, got {memory:,}.")
    method, calls = _for_one_theta(resolve(inverse)), OracleCalls()
    room = memory // (2 * max(4, problem.theta.dtype.itemsize))  # numbers for queries, and as many for samples
    most = max(1, room // _largest_row(problem))
    train, queries = _Batches(problem, train_data, "train_data"), _Batches(problem, query_data, "query_data")
    with library_settings(), bar("influence", progress) as tick:
        solver = _LinearSystem(problem, method, train, most, seed, calls, tick)
        rows, losses, taken = [], [], 0
        for values, gradients in _blocks(problem, queries, max(1, room // problem.theta.numel), seed):
            calls.outer_gradients += len(values)
            taken += len(values)
            tick(0.5, f"scores of {taken} queries")
            adjoints = torch.stack([solver(u) for u in gradients])
            rows.append(_products(problem, adjoints, train.walk(most), seed, calls).cpu())
            losses.append(values.cpu())
    if not rows:
        raise InputError("query_data yields no batch. Provide at least one, for example [(x, y)].")
    check_weight(problem.lowest_weight())
    scores = torch.cat(rows)
    if not bool(torch.isfinite(scores).all()):
        raise NonFiniteError(
            f"The influence by {method.name} contains nan or inf. Add l2 to the problem, set damping of the inverse, or"
            " look for samples whose gradient is not finite."
        )
    stats = {"inverse": method.name, "notes": solver.notes, "residual": solver.warned_residual(), "walks": len(rows)}
    return Influence(scores, torch.cat(losses), stats | calls.as_dict())


def _for_one_theta(inverse: AbstractInverse) -> AbstractInverse:
    """The inverse without fading of batches, unless that was set: at one theta all samples count the same."""
    learner = inverse.learner
    if not isinstance(learner, LayerMeans):
        return inverse
    default = next(f.default for f in fields(learner) if f.name == "beta")
    if getattr(learner, "beta", None) != default:
        return inverse
    settings: dict[str, Any] = {"beta": None}
    return with_learner(inverse, replace(learner, **settings))


def _refuse_batch_statistics(problem: Bilevel) -> None:
    root = problem.theta.root
    if root is not None and any(normalises_by_batch(module) for module in root.modules()):
        raise InputError(
            "A BatchNorm of the model is in training mode, where a sample has no gradient of its own. Call model.eval()"
            " before influence."
        )


def _largest_row(problem: Bilevel) -> int:
    """The most numbers of a sample's gradient that are held at once: those of a layer, or of all else."""
    shapes = layer_shapes(problem.theta) if problem.theta.root is not None else {}
    layers = [groups * out * columns for groups, out, columns in shapes.values()]
    return max(1, *layers, problem.theta.numel - sum(layers))


def _blocks(problem: Bilevel, queries: _Batches, most: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Outer losses and their gradients of as many queries as there is room for, whatever batches they come in."""
    found, held = QueryGradients(problem), 0
    waiting: list[tuple[Tensor, Tensor]] = []
    for batch in queries.walk():
        for values, gradients in found.of(batch, most, seed):
            if held and held + len(values) > most:
                yield _joined(waiting)
                waiting, held = [], 0
            waiting.append((values, gradients))
            held += len(values)
    if waiting:
        yield _joined(waiting)


def _joined(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([values for values, _ in pairs]), torch.cat([gradients for _, gradients in pairs])


def _products(problem: Bilevel, adjoints: Tensor, batches: Iterator[Batch], seed: int, calls: OracleCalls) -> Tensor:
    """w_i <s_i, x_q> / N for all x of (Q, D) and all samples, (Q, N), in one walk over the batches."""
    theta = problem.theta
    parts = dict(zip(theta.names, adjoints.split(list(theta.sizes), dim=1), strict=True))
    matrices: dict[str, Tensor] = {}  # of a layer, bias included, (Q, G out in)
    recorder = Recorder(problem, "layer", calls=calls)
    found = []
    with problem.guarded(seed):
        for batch in batches:
            record = recorder.step(batch).record
            assert isinstance(record, LayerStatistics)
            total = adjoints.new_zeros(len(adjoints), record.samples)
            for layer in record.layers:
                if layer.weight not in matrices:
                    matrices[layer.weight] = _matrix(layer, parts)
                rows = torch.einsum("btgo,btgi->bgoi", layer.scores[0], layer.inputs).flatten(1)
                total += (matrices[layer.weight].to(rows.dtype) @ rows.T).to(total.dtype)
            if record.other_rows is not None:
                others = torch.cat([parts[name] for name in record.other_names], dim=1)
                total += (others.to(record.other_rows.dtype) @ record.other_rows.T).to(total.dtype)
            found.append(total if record.weights is None else total * record.weights.sqrt().to(total.dtype))
    scores: Tensor = torch.cat(found, dim=1)
    return scores / scores.shape[1]


def _matrix(layer: LayerRecord, parts: dict[str, Tensor]) -> Tensor:
    """A layer's part of every x, (Q, G out in), the bias in its last column."""
    out = layer.scores.shape[3] * layer.scores.shape[4]
    found: Tensor = parts[layer.weight].unflatten(1, (out, -1))
    if layer.bias is not None:
        found = torch.cat([found, parts[layer.bias].unsqueeze(2)], dim=2)
    return found.flatten(1)


class _Batches:
    """Batches in an order that is the same in every walk, on the device of theta, cut where they are too large."""

    def __init__(self, problem: Bilevel, source: Any, name: str) -> None:
        self.device, self.name = problem.theta.device, name
        if isinstance(source, (Tensor, dict)) or (
            isinstance(source, tuple) and source and all(isinstance(item, Tensor) for item in source)
        ):
            source = [source]  # one batch
        if isinstance(source, DataLoader) and not _in_order(source):
            raise InputError(
                f"{name} is a DataLoader that does not go through its samples in order, so scores could not be told apart."
                " Create it with shuffle=False, or pass nhgd.Data(x, y, batch=1024)."
            )
        self.source = reiterable(source, name)

    def walk(self, most: int | None = None) -> Iterator[Batch]:
        """The batches, each with at most so many samples if it can be cut."""
        empty = True
        for batch in self._whole():
            empty = False
            bad = first_bad(batch)
            if bad:
                raise InputError(f"{self.name} contains nan or inf: {bad}. Remove or impute such samples first.")
            moved, samples = move(batch, self.device), common_length(batch)
            if most is None or samples is None or samples <= most:
                yield moved
                continue
            for first in range(0, samples, most):
                yield cut(moved, first, min(first + most, samples))
        if empty:
            raise InputError(f"{self.name} yields no batch. Provide at least one, for example [(x, y)].")

    def _whole(self) -> Iterator[Batch]:
        data = self.source
        if isinstance(data, Data):  # in the order of its tensors, although it shuffles
            for first in range(0, data.samples, data.batch):
                yield tuple(t[first : first + data.batch] for t in data.columns)
        else:
            yield from data


def _in_order(loader: DataLoader[Any]) -> bool:
    sampler = loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)
    return sampler is None or not isinstance(sampler, RandomSampler)


class _LinearSystem:
    """u -> H^{-1} u, with all that does not depend on u done once.

    Attributes:
        notes: of the first solve of an inverse that learnt.
    """

    def __init__(
        self,
        problem: Bilevel,
        inverse: AbstractInverse,
        train: _Batches,
        most: int,
        seed: int,
        calls: OracleCalls,
        tick: Tick,
    ) -> None:
        self.name = inverse.name
        self.notes: dict[str, Any] = {}
        self._residuals: list[float] = []
        learner = inverse.learner
        cuts = most if isinstance(learner, LayerMeans) else None  # others may count batches
        tick(0.0, "learning the curvature")
        state = learn(inverse, problem, train.walk(cuts), seed, calls) if learner is not None else None
        if isinstance(learner, SettlesInSecondWalk):
            tick(0.25, "learning the curvature")
            learner, state = learner.settled(state)
            state = learn(learner, problem, train.walk(cuts), seed, calls, state)
        self._learner, self._inverse, self._state = learner, inverse, state
        self._at: Oracle | None = None
        number = problem.ridge_number()
        self._ridge = Ridge(problem.ridge_diagonal() if number is None else number)
        if not isinstance(inverse, Learned):
            self._at = Oracle(problem, list(train.walk()), seed=seed, calls=calls)
        self._fast: Callable[[Tensor], Tensor] | None = None

    def __call__(self, u: Tensor) -> Tensor:
        if self._fast is not None:
            return self._fast(u)
        inverse = self._inverse
        if self._at is not None and isinstance(inverse, Iterative) and isinstance(inverse, FactorisesProducts):
            self._fast = inverse.operator(self._at)
            return self._fast(u)
        if self._at is not None:
            x, stats = inverse.apply(self._state, u, self._at)
            self._residuals += [] if stats.residual is None else [stats.residual]
            return x
        assert self._learner is not None
        x, stats = self._learner.solve(self._state, u, self._ridge)
        self.notes = {k: v for k, v in stats.notes.items() if isinstance(v, (bool, int, float, str))}
        self._fast = operator(self._learner, self._state, self._ridge)
        return x

    def warned_residual(self) -> float | None:
        """The largest residual of an inverse that iterates, with a warning if it is large."""
        if not self._residuals:
            return None
        worst = max(self._residuals)
        if not worst <= POOR:
            warnings.warn(
                f"{self.name} ended with a relative residual of up to {worst:.2g}, so its scores are not those of the inner"
                " Hessian. Give it more steps, add l2 to the problem, or use another inverse.",
                InverseWarning,
                stacklevel=4,
            )
        return worst
