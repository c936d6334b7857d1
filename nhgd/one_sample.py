"""Gradients of one sample at a time, for parameters that no Linear or Conv2d layer accounts for."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nhgd.data.batch import Batch, common_length, leaves, transform
from nhgd.errors import InputError
from nhgd.problem import Bilevel, Losses


class OneSampleGradients:
    """Evaluates the inner function on batches of one sample, all of them at once through torch.func.vmap.

    Where vmap cannot follow the inner function, one backward pass for each sample is used, after one warning. The first
    time, the loss of every sample alone is compared with its loss in the batch: where samples influence each other, the
    gradient of one sample is not defined.
    """

    def __init__(self, problem: Bilevel) -> None:
        self.problem = problem
        self._slow = False
        self._compared = False

    def rows(self, batch: Batch, losses: Losses, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """Rows sqrt(w_i) s_i, or sqrt(w_i) s_ik for K seeds, of the named parameters, (K B, D_named)."""
        with self.problem.guarded():
            if not self._compared:
                self._compared = True
                self._compare(batch, losses)
            if not self._slow:
                try:
                    rows = self._vectorised(batch, names, seeds)
                except (RuntimeError, ValueError, NotImplementedError) as error:
                    if isinstance(error, InputError):
                        raise
                    self._slow = True
                    warnings.warn(
                        "Per-sample gradients could not be vectorised"
                        f" ({str(error).splitlines()[0]}); one backward pass for each sample is used instead.",
                        stacklevel=3,
                    )
            if self._slow:
                rows = self._one_by_one(batch, names, seeds)
        if losses.weights is not None:
            rows = rows * losses.weights.detach().sqrt()[:, None]
        return rows.flatten(0, 1)

    @torch.no_grad()
    def _compare(self, batch: Batch, losses: Losses) -> None:
        """Refuse a first or last sample that has another loss alone than in its batch."""
        samples = _samples(batch)
        together = losses.values.detach()
        for i in {0, samples - 1}:
            before = _generators(together)
            alone = self.problem.losses(_only(batch, i, samples)).values
            if any(not torch.equal(a, b) for a, b in zip(before, _generators(together), strict=True)):
                return  # dropout and the like: two passes differ anyway
            if not torch.allclose(alone, together[i], rtol=1e-2, atol=1e-3 * float(together.abs().max())):
                raise InputError(
                    f"The loss of sample {i} is {float(together[i]):.4g} in its batch and {float(alone):.4g} alone, so samples"
                    " influence each other. Per-sample curvature needs independent samples in the first dimension (no"
                    " batch statistics, batch-first sequences)."
                )

    def _vectorised(self, batch: Batch, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """(K, B, D_other)."""
        theta = self.problem.theta
        samples = _samples(batch)
        tensors = dict(leaves(batch))
        mapped = {path: t for path, t in tensors.items() if t.ndim and t.shape[0] == samples}

        def loss(chosen: dict[str, Tensor], rows: dict[str, Tensor], seed: Tensor | None) -> Tensor:
            values = iter(rows[path].unsqueeze(0) if path in rows else t for path, t in tensors.items())
            one = transform(batch, lambda _: next(values))
            full = [chosen.get(n, leaf.detach()) for n, leaf in zip(theta.names, theta.leaves, strict=True)]
            return _scalar(self.problem.losses(one, theta=full), seed)

        chosen = {n: leaf.detach() for n, leaf in zip(theta.names, theta.leaves, strict=True) if n in names}
        found = []
        for seed in [None] if seeds is None else seeds:
            dims = (None, 0, None if seed is None else 0)
            per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=dims, randomness="different")
            grads = per_sample(chosen, mapped, seed)
            found.append(torch.cat([grads[name].reshape(samples, -1).to(theta.dtype) for name in names], dim=1))
        return torch.stack(found).detach()

    def _one_by_one(self, batch: Batch, names: tuple[str, ...], seeds: Tensor | None) -> Tensor:
        """(K, B, D_other)."""
        theta = self.problem.theta
        chosen = [leaf for n, leaf in zip(theta.names, theta.leaves, strict=True) if n in names]
        samples = _samples(batch)

        def row(i: int, seed: Tensor | None) -> Tensor:
            with torch.enable_grad():
                scalar = _scalar(self.problem.losses(_only(batch, i, samples)), None if seed is None else seed[i])
                found = torch.autograd.grad(scalar, chosen, materialize_grads=True, allow_unused=True)
            return torch.cat([g.reshape(-1).to(theta.dtype) for g in found])

        columns = [None] if seeds is None else seeds
        return torch.stack([torch.stack([row(i, seed) for i in range(samples)]) for seed in columns])


def _only(batch: Batch, i: int, samples: int) -> Batch:
    """A batch of the i-th sample alone."""
    return transform(batch, lambda t: t[i : i + 1] if t.ndim and t.shape[0] == samples else t)


def _generators(like: Tensor) -> list[Tensor]:
    """The states of the generators that dropout draws from where a tensor lives."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(like.device)] if like.is_cuda else states


def _samples(batch: Batch) -> int:
    samples = common_length(batch)
    if samples is None:
        raise InputError(
            "Per-sample gradients of parameters outside Linear and Conv2d layers need a batch whose tensors all have"
            " the samples as first dimension."
        )
    return samples


def _scalar(losses: Losses, seed: Tensor | None) -> Tensor:
    """What is differentiated for one sample: its loss, or its outputs along a root."""
    if seed is None:
        return losses.values.sum()
    assert losses.outputs is not None
    return (losses.outputs[0] * seed).sum()
