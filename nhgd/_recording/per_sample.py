"""Gradients of one sample at a time, for parameters that no Linear or Conv2d layer accounts for."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from nhgd._randomness import generators_restored, set_states, state_bytes, states
from nhgd._scaling import Scaling
from nhgd._tree import map_tensors, named_tensors
from nhgd.data.batch import Batch, common_length
from nhgd.errors import InputError
from nhgd.losses import Losses
from nhgd.problem import Bilevel

TOGETHER = 16  # samples whose backward passes over the graph of a whole batch are vectorised, each as large as one


class OneSampleGradients:
    """Evaluates the inner function on batches of one sample, all of them at once through torch.func.vmap.

    Where vmap cannot follow the inner function, one backward pass for each sample is used, after one warning. The first
    time, the loss of a sample alone is compared with its loss in the batch: where samples influence each other, the
    gradient of one sample is not defined.

    That is a second forward pass. Where the rows must be those of the first, because dropout was drawn in it,
    `from_graph` takes them from its graph, by a backward pass for each sample.

    Attributes:
        slow: whether vmap could not follow.
        compared: whether samples were evaluated alone.
        noisy: whether two passes differ although torch's global generators do not move.
    """

    def __init__(self, problem: Bilevel) -> None:
        self.problem = problem
        self.slow = False
        self.noisy = False
        self.compared = False

    def look(self, batch: Batch) -> None:
        """Compare samples alone with samples in their batch, once."""
        if not self.compared:
            self.compared = True
            theta = self.problem.theta
            with generators_restored(theta.device), self.problem.guarded(seed=0), torch.no_grad():
                with theta.nearby():
                    try:
                        known = bool(torch.isfinite(self.problem.losses(batch).values).all())
                        trouble = self._influence(batch) if known else None
                    except Exception:  # the user's function may not know such a place
                        known = False
                if not known:
                    trouble = self._influence(batch)
            if trouble is not None:
                raise InputError(trouble)

    def rows(self, batch: Batch, losses: Losses, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """Rows sqrt(w_i) s_i, or sqrt(w_i) s_ik for K seeds, of the named parameters, (K B, D_named)."""
        with self.problem.guarded():
            if not self.slow:
                before = states(self.problem.theta.device)
                try:
                    rows = self.problem.scaling.taken(
                        lambda: self._vectorised(batch, names, seeds),
                        lambda found: [found],
                        lambda: set_states(before, self.problem.theta.device),
                    )
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    if isinstance(error, InputError):
                        raise
                    self.slow = True
                    set_states(before, self.problem.theta.device)  # a resumed run knows it and does not try
                    warnings.warn(
                        "Per-sample gradients could not be vectorised"
                        f" ({str(error).splitlines()[0]}); one backward pass for each sample is used instead.",
                        stacklevel=3,
                    )
            if self.slow:
                rows = self._one_by_one(batch, names, seeds)
        return _weighted(rows, losses)

    def from_graph(self, losses: Losses, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """The same from the graph of the losses, which must still be there."""
        theta = self.problem.theta
        chosen = [leaf for n, leaf in zip(theta.names, theta.leaves, strict=True) if n in names]
        source = losses.values if seeds is None else losses.outputs
        assert source is not None
        unit = torch.ones_like(losses.values)
        found = [
            torch.cat([_pulled(self.problem.scaling, source, chosen, column, some) for some in _pieces(len(unit))])
            for column in ([unit] if seeds is None else seeds)
        ]
        return _weighted(torch.stack(found).to(_precision(theta.dtype)), losses)

    def _influence(self, batch: Batch) -> str | None:
        """How the loss of the first or last sample changes if it is alone or among copies of itself; None if it does
        not.

        This is asked at a theta nearby: where losses vanish, as at a perfect fit, there would be nothing to see but
        rounding.
        """
        samples, theta = _samples(batch), self.problem.theta
        before = state_bytes(theta.device)
        together = self.problem.losses(batch).values
        if state_bytes(theta.device) != before:
            return None  # dropout and the like: two passes differ anyway
        size = float(together.abs().max())
        rounding = 1e3 * max(torch.finfo(leaf.dtype).eps for leaf in theta.leaves)
        if not torch.allclose(self.problem.losses(batch).values, together, rtol=rounding, atol=rounding * size):
            self.noisy = True
            return None
        for i in {0, samples - 1}:
            # Alone, other kernels may round differently, in half precision visibly; among copies, hardly ever.
            copies = _picked(batch, [i] * samples, samples)
            found = (
                self.problem.losses(copies).values[i],
                self.problem.losses(_only(batch, i, samples)).values,
            )
            for loss, among, most in zip(found, ("among copies of itself", "alone"), (1e-3, 2e-2), strict=True):
                if not torch.allclose(loss, together[i], rtol=5 * most, atol=most * size):
                    return (
                        f"The loss of sample {i} is {float(together[i]):.4g} in its batch and {float(loss):.4g} {among}, so"
                        " samples influence each other. Per-sample curvature needs independent samples in the first"
                        " dimension (no batch statistics, batch-first sequences)."
                    )
        return None

    def _vectorised(self, batch: Batch, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """(K, B, D_other)."""
        theta = self.problem.theta
        samples = _samples(batch)
        tensors = dict(named_tensors(batch))
        mapped = {path: t for path, t in tensors.items() if t.ndim and t.shape[0] == samples}

        def loss(chosen: dict[str, Tensor], rows: dict[str, Tensor], seed: Tensor | None) -> Tensor:
            values = iter(rows[path].unsqueeze(0) if path in rows else t for path, t in tensors.items())
            one = map_tensors(lambda _: next(values), batch)
            full = [chosen.get(n, leaf.detach()) for n, leaf in zip(theta.names, theta.leaves, strict=True)]
            return _scalar(self.problem.losses(one, theta=full), seed)

        # A loss of one sample is as many times as large as its part of the mean, for which the scale is.
        scaling = self.problem.scaling
        factor = scaling.scale / samples

        def scaled(chosen: dict[str, Tensor], rows: dict[str, Tensor], seed: Tensor | None) -> Tensor:
            return loss(chosen, rows, seed) * factor if scaling.active else loss(chosen, rows, seed)

        chosen = {n: leaf.detach() for n, leaf in zip(theta.names, theta.leaves, strict=True) if n in names}
        dtype = _precision(theta.dtype)
        found = []
        for seed in [None] if seeds is None else seeds:
            dims = (None, 0, None if seed is None else 0)
            per_sample = torch.func.vmap(torch.func.grad(scaled), in_dims=dims, randomness="different")
            grads = per_sample(chosen, mapped, seed)
            found.append(torch.cat([grads[name].reshape(samples, -1).to(dtype) for name in names], dim=1))
        return torch.stack(found).detach() / factor if scaling.active else torch.stack(found).detach()

    def _one_by_one(self, batch: Batch, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """(K, B, D_other)."""
        theta = self.problem.theta
        chosen = [leaf for n, leaf in zip(theta.names, theta.leaves, strict=True) if n in names]
        samples, dtype = _samples(batch), _precision(theta.dtype)

        def row(i: int, seed: Tensor | None) -> Tensor:
            with torch.enable_grad():
                scalar = _scalar(self.problem.losses(_only(batch, i, samples)), None if seed is None else seed[i])
                found = self.problem.scaling.grad(scalar, chosen, materialize_grads=True, allow_unused=True)
            return torch.cat([g.reshape(-1).to(dtype) for g in found])

        columns = [None] if seeds is None else seeds
        return torch.stack([torch.stack([row(i, seed) for i in range(samples)]) for seed in columns])


def _pieces(samples: int) -> list[range]:
    return [range(first, min(first + TOGETHER, samples)) for first in range(0, samples, TOGETHER)]


def _pulled(scaling: Scaling, source: Tensor, chosen: Sequence[Tensor], column: Tensor, some: range) -> Tensor:
    """Gradients of some samples' entries of a tensor along a column, (len(some), D_chosen)."""
    along = source.new_zeros(len(some), *source.shape)
    along[torch.arange(len(some)), torch.arange(some.start, some.stop)] = column[some.start : some.stop].to(along.dtype)
    found: Sequence[Tensor | None]
    try:
        found = scaling.grad(source, chosen, along, retain_graph=True, allow_unused=True, is_grads_batched=True)
    except RuntimeError:  # some operation cannot be vectorised
        single = [scaling.grad(source, chosen, a, retain_graph=True, materialize_grads=True) for a in along]
        found = [torch.stack(grads) for grads in zip(*single, strict=True)]
    parts = [
        along.new_zeros(len(some), leaf.numel()) if g is None else g.reshape(len(some), -1)
        for g, leaf in zip(found, chosen, strict=True)
    ]
    dtype = _precision(parts[0].dtype)
    return torch.cat([part.to(dtype) for part in parts], dim=1).detach()


def _weighted(rows: Tensor, losses: Losses) -> Tensor:
    """(K, B, D) -> (K B, D), times the roots of the weights."""
    if losses.weights is not None:
        rows = rows * losses.weights.detach().sqrt().to(rows.dtype)[:, None]
    return rows.flatten(0, 1)


def _precision(dtype: torch.dtype) -> torch.dtype:
    """Of rows: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def _picked(batch: Batch, rows: list[int], samples: int) -> Batch:
    """A batch of chosen samples."""
    return map_tensors(lambda t: t[rows] if t.ndim and t.shape[0] == samples else t, batch)


def _only(batch: Batch, i: int, samples: int) -> Batch:
    """A batch of the i-th sample alone."""
    return map_tensors(lambda t: t[i : i + 1] if t.ndim and t.shape[0] == samples else t, batch)


def _samples(batch: Batch) -> int:
    samples = common_length(batch)
    if samples is None:
        raise InputError(
            "Per-sample gradients of parameters outside Linear and Conv2d layers need a batch whose tensors all have"
            " the samples as first dimension."
        )
    return samples


def _scalar(losses: Losses, seed: Tensor | None) -> Tensor:
    """The scalar to differentiate for one sample: its loss, or its outputs along a root."""
    if seed is None:
        return losses.values.sum()
    assert losses.outputs is not None
    return (losses.outputs[0] * seed).sum()
