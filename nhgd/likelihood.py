"""What the model's outputs parametrise, which defines the Fisher matrix in output space.

For a loss l(z) = -log p(y | z) the Fisher matrix of one sample in its outputs z is Lambda = E_y[ dl/dz dl/dz^T ], the
expectation over the model's own labels. A likelihood gives a root of it, Lambda = sum_k r_k r_k^T, and a random root
with E[ r r^T ] = Lambda; pulled back through the model they give the exact and the sampled Fisher matrix of theta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd import _tape as tape
from nhgd._validation import Validated
from nhgd.errors import InputError, unknown


@dataclass(frozen=True)
class AbstractLikelihood(Validated, ABC):
    """Roots of the Fisher matrix in output space. Subclass it for a likelihood of your own."""

    name: ClassVar[str]

    @abstractmethod
    def roots(self, outputs: Tensor, losses: Tensor) -> Tensor:
        """(K, *outputs.shape) with sum_k r_k r_k^T = Lambda for each sample.

        Args:
            outputs: (B, ...), in the graph of `losses`.
            losses: (B,), unweighted.
        """

    def verify(self, outputs: Tensor, losses: Tensor) -> None:
        """Refuse losses that are evidently not those of this likelihood; by default nothing is checked."""
        return

    def sample(self, outputs: Tensor, losses: Tensor) -> Tensor:
        """(1, *outputs.shape), random, with E[ r r^T ] = Lambda: a random sign on every root, summed."""

        def drawn(roots: int) -> Tensor:
            return torch.randint(0, 2, (roots, len(losses)), device=outputs.device) * 2 - 1

        return self.signed(outputs, losses, drawn)

    def signed(self, outputs: Tensor, losses: Tensor, signs: Callable[[int], Tensor]) -> Tensor:
        """The roots with a sign each, summed, (1, *outputs.shape). `signs` gives those of K roots, (K, B)."""
        roots = self.roots(outputs, losses)
        factors = signs(len(roots)).to(roots)
        return (roots * factors.reshape(*factors.shape, *[1] * (roots.ndim - 2))).sum(0, keepdim=True)


@final
@dataclass(frozen=True)
class Categorical(AbstractLikelihood):
    """Class scores z, (B, C), with softmax cross-entropy: Lambda = diag(p) - p p^T.

        r_k = sqrt(p_k) (e_k - p)

    Of sequences or images, (B, ..., C), the loss of a sample is a sum over places t, with a factor c_t each that is
    read off the loss itself: 1/T for a mean, 0 where a mask hides a place. Lambda has a block c_t (diag(p_t) - p_t
    p_t^T) for each place, and each place has roots, or a label, of its own.

    >>> r = Categorical().roots(torch.zeros(1, 2), torch.zeros(1))[:, 0]
    >>> r.T @ r
    tensor([[ 0.2500, -0.2500],
            [-0.2500,  0.2500]])
    """

    name: ClassVar[str] = "categorical"

    @override
    def verify(self, outputs: Tensor, losses: Tensor) -> None:
        """The Hessian of cross-entropy in the scores is Lambda itself, whatever the labels."""
        if outputs.ndim < 3:
            _same_curvature(self, outputs, losses)
            return
        p, root = _precise(outputs).softmax(-1), _roots_of_factors(outputs, losses)
        if not bool(root.any()):
            raise InputError(
                "likelihood='categorical' does not describe these losses: they do not depend on the class scores in"
                f" Losses.outputs, of shape {tuple(outputs.shape)}. Return the same outputs that the losses were"
                " computed from, with shape (B, C), or (B, ..., C) of sequences."
            )

        def product(x: Tensor) -> Tensor:  # without a root for each class of each place
            return root.square() * p * (x - (p * x).sum(-1, keepdim=True))

        _compare(self, outputs, losses, product)

    @override
    def roots(self, outputs: Tensor, losses: Tensor) -> Tensor:
        """One root for each class, of each place."""
        if outputs.ndim < 2:
            raise InputError(
                "The categorical likelihood needs outputs of shape (B, C), or (B, ..., C) of sequences, but"
                f" Losses.outputs has shape {tuple(outputs.shape)}."
            )
        p = _precise(outputs).softmax(-1)
        if outputs.ndim > 2:
            eye = torch.eye(p[0].numel(), dtype=p.dtype, device=p.device)
            return torch.stack([self._signed(outputs, losses, unit.expand(len(p), -1)) for unit in eye])
        eye = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return p.T.sqrt()[:, :, None] * (eye[:, None, :] - p[None])

    @override
    def signed(self, outputs: Tensor, losses: Tensor, signs: Callable[[int], Tensor]) -> Tensor:
        """sum_k s_k r_k = s sqrt(p) - p (s . sqrt(p)), without the roots."""
        return self._signed(outputs, losses, signs(outputs[0].numel()).T.to(_precise(outputs[:0])))[None]

    def _signed(self, outputs: Tensor, losses: Tensor, signs: Tensor) -> Tensor:
        """The same for signs (B, K)."""
        p = _precise(outputs).softmax(-1)
        with_signs = signs.reshape(p.shape) * p.sqrt()
        found = with_signs - p * with_signs.sum(-1, keepdim=True)
        return found if outputs.ndim == 2 else found * _roots_of_factors(outputs, losses)

    @override
    def sample(self, outputs: Tensor, losses: Tensor) -> Tensor:
        """The scores of labels drawn from the model, one for each place: e_y - p, times the root of its factor."""
        p = _precise(outputs).softmax(-1)
        y = torch.multinomial(p.flatten(0, -2), 1).reshape(*p.shape[:-1], 1)
        drawn = torch.zeros_like(p).scatter_(-1, y, 1.0) - p
        return (drawn if outputs.ndim == 2 else drawn * _roots_of_factors(outputs, losses))[None]


@final
@dataclass(frozen=True)
class Bernoulli(AbstractLikelihood):
    """Logits z, (B,) or (B, M), with binary cross-entropy summed over M: Lambda = diag(p (1 - p)).

    >>> Bernoulli().roots(torch.zeros(3), torch.zeros(3))[0]
    tensor([0.5000, 0.5000, 0.5000])
    """

    name: ClassVar[str] = "bernoulli"

    @override
    def verify(self, outputs: Tensor, losses: Tensor) -> None:
        """The Hessian of cross-entropy in the logits is Lambda itself, whatever the labels."""
        _same_curvature(self, outputs, losses)

    @override
    def roots(self, outputs: Tensor, losses: Tensor) -> Tensor:
        """One root for each logit."""
        p = _precise(outputs).sigmoid()
        return _columns((p * (1 - p)).sqrt())


@final
@dataclass(frozen=True)
class Gaussian(AbstractLikelihood):
    """Predictions z, (B, ...), with a squared error: Lambda = c I, c the curvature of the loss that was returned.

    c is 1 for 0.5 |z - y|^2, 2 for |z - y|^2 and 2/M for its mean over M outputs; it is read off the loss itself.

    >>> z = torch.zeros(3, 1, requires_grad=True)
    >>> Gaussian().roots(z, z.square().sum(1))[0].T
    tensor([[1.4142, 1.4142, 1.4142]])
    """

    name: ClassVar[str] = "gaussian"

    @override
    def verify(self, outputs: Tensor, losses: Tensor) -> None:
        """The Hessian of a squared error is diagonal."""
        _same_curvature(self, outputs, losses)

    @override
    def roots(self, outputs: Tensor, losses: Tensor) -> Tensor:
        """One root for each output."""
        with torch.enable_grad():
            slope = torch.autograd.grad(losses.sum(), outputs, create_graph=True, materialize_grads=True)[0]
            curvature = torch.zeros_like(_precise(outputs))
            if slope.requires_grad:
                found = torch.autograd.grad(slope.sum(), outputs, retain_graph=True, materialize_grads=True)
                curvature = _precise(found[0])
        upwards = ~(curvature < 0).any() & (curvature > 0).any()
        tape.defer(_refuse_flat, tape.reading(upwards))
        return _columns(curvature.sqrt())


def _roots_of_factors(outputs: Tensor, losses: Tensor) -> Tensor:
    """sqrt(c_t) of cross-entropy summed over places with factors c_t, (B, ..., 1): the slopes are c_t (p_t - e_y)."""
    with torch.enable_grad():
        found = torch.autograd.grad(losses.sum(), outputs, retain_graph=True, materialize_grads=True)[0]
    slope, p = _precise(found), _precise(outputs).softmax(-1)
    total = p.masked_fill(slope <= 0, 0.0).sum(-1, keepdim=True)
    return (slope.clamp_min(0).sum(-1, keepdim=True) / total.clamp_min(torch.finfo(p.dtype).tiny)).sqrt()


def _refuse_flat(upwards: float) -> None:
    if not upwards:
        raise InputError(
            "The gaussian likelihood needs losses that are a squared error of Losses.outputs, but they do not"
            " curve upwards in them. Return the same tensor that the losses were computed from."
        )


def _same_curvature(likelihood: AbstractLikelihood, outputs: Tensor, losses: Tensor) -> None:
    """Compare the Hessian of the losses in the outputs with Lambda, along one random direction for each sample."""
    roots = likelihood.roots(outputs, losses)  # (K, B, ...)

    def product(x: Tensor) -> Tensor:
        along = (roots * x).reshape(*roots.shape[:2], -1).sum(2)  # (K, B)
        return (roots * along.reshape(*along.shape, *[1] * (roots.ndim - 2))).sum(0)

    _compare(likelihood, outputs, losses, product)


def _compare(
    likelihood: AbstractLikelihood, outputs: Tensor, losses: Tensor, product: Callable[[Tensor], Tensor]
) -> None:
    """The same, given the product of Lambda with one direction for each sample."""
    probe = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
    rounding = max(1e-3, 4 * torch.finfo(outputs.dtype).eps)
    with torch.enable_grad():
        slope = torch.autograd.grad(losses.sum(), outputs, create_graph=True, materialize_grads=True)[0]
        found = torch.zeros_like(probe)
        if slope.requires_grad:
            found = torch.autograd.grad(slope, outputs, probe, retain_graph=True, materialize_grads=True)[0]
    found, expected = _precise(found), product(_precise(probe))
    if not torch.allclose(found, expected, rtol=0.05, atol=rounding * float(expected.abs().max()) + 1e-4):
        ratio = float(found.norm() / expected.norm().clamp_min(torch.finfo(expected.dtype).tiny))
        raise InputError(
            f"likelihood='{likelihood.name}' does not describe these losses: their curvature in Losses.outputs is"
            f" about {ratio:.3g} times what it says. Sum over the outputs of a sample instead of averaging, put class"
            " weights and masks into Losses.weights, and return the same outputs that the losses were computed from."
        )


def _precise(tensor: Tensor) -> Tensor:
    """At least float32: under autocast outputs have half precision, but what is computed from them need not."""
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _columns(root: Tensor) -> Tensor:
    """The diagonal matrix of each sample as K columns: (B, ...) -> (K, B, ...)."""
    flat = root.reshape(root.shape[0], -1)
    eye = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device)
    return (eye[:, None, :] * flat[None]).reshape(flat.shape[1], *root.shape)


LIKELIHOODS: dict[str, AbstractLikelihood] = {made.name: made for made in (Categorical(), Bernoulli(), Gaussian())}


def resolve(likelihood: str | AbstractLikelihood | None) -> AbstractLikelihood | None:
    """A likelihood from its name or from itself; None for None."""
    if not isinstance(likelihood, str):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise unknown("likelihood", likelihood, LIKELIHOODS)
    return LIKELIHOODS[likelihood]
