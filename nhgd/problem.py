"""The problem: `Bilevel`, two functions of (theta, v, batch) and a ridge.

    min over v of  Phi(v) = f(v, theta*(v)),
    theta*(v) = argmin over theta of  mean_i( w_i l_i ) + sum( l2 * theta^2 )

Losses, weights, model outputs and the ridge are kept apart, because the Fisher matrix needs them apart.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from nhgd import _tape as tape
from nhgd._kernels import differentiable_kernels
from nhgd._randomness import seeded
from nhgd._scaling import NOT_SCALED, Scaling
from nhgd._surroundings import user_settings
from nhgd._tree import map_tensors
from nhgd._validation import shown, validated_but
from nhgd.data.batch import Batch, common_length, first_bad, lengths
from nhgd.data.padding import Padded
from nhgd.errors import InputError
from nhgd.likelihood import AbstractLikelihood
from nhgd.likelihood import resolve as resolve_likelihood
from nhgd.losses import InnerResult, Losses, as_losses, padded, uneven
from nhgd.schedule import Learnt
from nhgd.variable import Given, Variable

LARGEST = sys.float_info.max
# Parameters beyond which what a pass shows of the model, or of curvature now and then, is asked of a few samples: there
# a pass over a batch costs more than all that is around it, and a second derivative of it more memory than the inner
# steps.
LARGE = 2**20
FEW = 4
HEEDED = 16  # weights of so many passes are held before only the lowest of them is
Gradients: TypeAlias = "Sequence[Tensor | None]"


class UnusedWarning(UserWarning):
    """A part of theta or v that the losses do not depend on, so that it stays as it was given."""


class Bilevel:
    """A bilevel problem.

    Args:
        inner: (theta, v, batch) -> losses (B,), or (losses, weights), or `Losses`.
        outer: (theta, v, batch) -> a scalar.
        theta: the inner variable: a Tensor, a dict of Tensors or an nn.Module.
        v: the outer variable, of the same three kinds. The functions receive the kind that was given.
        l2: the ridge: a number, or a function of v that returns a scalar or one tensor a parameter (a Tensor for a
            Tensor theta, else a dict by parameter name; each broadcasts to its parameter). The inner objective gains
            sum(l2 * theta^2), biases included.
        likelihood: what `Losses.outputs` parametrise: "categorical", "bernoulli", "gaussian", or an object of a
            subclass of `nhgd.likelihood.AbstractLikelihood`. Needed by the exact and sampled Fisher matrices alone.

    >>> x, y = torch.randn(8, 2), torch.randn(8)
    >>> problem = Bilevel(
    ...     inner=lambda theta, v, batch: (x @ theta - y) ** 2,
    ...     outer=lambda theta, v, batch: (theta - 1).square().sum(),
    ...     theta=torch.zeros(2), v=torch.zeros(()), l2=lambda v: v.exp())
    >>> problem.theta.numel, problem.v.numel
    (2, 1)
    """

    @validated_but("theta", "v", "l2")
    def __init__(
        self,
        inner: Callable[[Any, Any, Any], InnerResult],
        outer: Callable[[Any, Any, Any], Tensor],
        theta: Given,
        v: Given,
        l2: float | Callable[[Any], Tensor | dict[str, Tensor]] = 0.0,
        likelihood: str | AbstractLikelihood | None = None,
    ) -> None:
        self.inner = inner
        self.outer = outer
        self.theta = Variable(theta, "theta")
        self.v = Variable(v, "v")
        if not callable(l2) and not (isinstance(l2, Real) and not isinstance(l2, bool) and 0 <= l2 <= LARGEST):
            kind = f"a {type(l2).__name__}" if not isinstance(l2, Real) else shown(l2)
            hint = " It would not follow v; for a constant ridge pass float(l2)." if isinstance(l2, Tensor) else ""
            raise InputError(
                f"l2 must be a number of at least 0 or a function of v such as lambda v: v.exp(), got {kind}.{hint}"
            )
        self.l2 = l2
        self.likelihood = resolve_likelihood(likelihood)
        self.scaling: Scaling = NOT_SCALED  # of backward passes
        self._heeded: list[Tensor] = []  # weights of which the lowest will be asked
        self._ridge: tuple[float, float] | None = None  # l2, and its Hessian
        shared = {t.untyped_storage().data_ptr() for t in self.theta.leaves if t.numel()}
        for name, leaf in zip(self.v.names, self.v.leaves, strict=True):
            if leaf.numel() and leaf.untyped_storage().data_ptr() in shared:
                raise InputError(f"theta and v share the memory of {name!r}; each needs tensors of its own.")

    def losses(self, batch: Batch, theta: Sequence[Tensor] | None = None, v: Sequence[Tensor] | None = None) -> Losses:
        """Evaluate the inner function at the given leaves (default: the current ones) and check its result."""
        with self.theta.view(theta) as theta_given, self.v.view(v) as v_given:
            try:
                with user_settings():
                    result = self.inner(theta_given, v_given, batch)
            except (RuntimeError, ValueError, IndexError) as error:
                found = lengths(batch)
                if len(set(found.values())) > 1:
                    raise InputError(uneven(found)) from error
                raise
        losses = as_losses(result, batch)
        return padded(losses, batch.share) if isinstance(batch, Padded) else losses

    def outer_value(
        self, batch: Batch, theta: Sequence[Tensor] | None = None, v: Sequence[Tensor] | None = None
    ) -> Tensor:
        """Evaluate the outer function at the given leaves (default: the current ones)."""
        found = lengths(batch)
        if len(found) == 2 and len(set(found.values())) > 1:
            raise InputError(uneven(found))
        with self.theta.view(theta) as theta_given, self.v.view(v) as v_given, user_settings():
            value = self.outer(theta_given, v_given, batch)
        if not isinstance(value, Tensor):
            raise InputError(f"outer() returned a {type(value).__name__}. Return a scalar Tensor.")
        if value.numel() != 1:
            raise InputError(
                f"outer() returned a tensor of shape {tuple(value.shape)}. Return a scalar: .mean() of it."
            )
        return value.reshape(())

    def ridge_coefficients(self, v: Sequence[Tensor] | None = None) -> list[Tensor | float]:
        """One coefficient for each leaf of theta, a number or a tensor that broadcasts to it."""
        if not callable(self.l2):
            return [float(self.l2)] * len(self.theta.leaves)
        with self.v.view(v) as v_given, user_settings():
            found = self.l2(v_given)
        if isinstance(found, dict):
            missing = [name for name in self.theta.names if name not in found]
            extra = [name for name in found if name not in self.theta.names]
            if missing or extra:
                raise InputError(
                    f"l2(v) must name every parameter of theta: missing {missing}, unknown {extra}."
                    f" The parameters are {list(self.theta.names)}."
                )
            coefficients: list[Tensor | float] = [found[name] for name in self.theta.names]
        elif isinstance(found, Tensor) and (found.numel() == 1 or len(self.theta.leaves) == 1):
            coefficients = [found.reshape(()) if found.numel() == 1 else found] * len(self.theta.leaves)
        else:
            raise InputError("l2(v) must return a scalar Tensor, or one tensor for each parameter of theta by name.")
        for coefficient, leaf, name in zip(coefficients, self.theta.leaves, self.theta.names, strict=True):
            if isinstance(coefficient, Tensor):
                try:
                    torch.broadcast_to(coefficient, leaf.shape)
                except RuntimeError:
                    raise InputError(
                        f"l2(v) has shape {tuple(coefficient.shape)} for {name!r}, which has shape {tuple(leaf.shape)}."
                    ) from None
        return coefficients

    def ridge(self, theta: Sequence[Tensor] | None = None, v: Sequence[Tensor] | None = None) -> Tensor:
        """sum( l2 * theta^2 ), with its graph."""
        leaves = self.theta.leaves if theta is None else theta
        if not callable(self.l2) and self.l2 == 0:
            return leaves[0].new_zeros(())
        terms = [(c * t.square()).sum() for c, t in zip(self.ridge_coefficients(v), leaves, strict=True)]
        found = [t.to(self.theta.dtype) for t in terms]
        return found[0] if len(found) == 1 else torch.stack(found).sum()

    @torch.no_grad()
    def ridge_value(self) -> Tensor:
        """The same number without a graph; of many numbers by one call for all leaves, that reads each of them once."""
        leaves = self.theta.leaves
        several = leaves[0].device.type == "cuda" or self.theta.numel > LARGE
        if callable(self.l2) or self.l2 == 0 or not several or any(leaf.dtype.itemsize < 4 for leaf in leaves):
            return self.ridge()
        norms = torch.stack([norm.to(self.theta.dtype) for norm in torch._foreach_norm(list(leaves))])
        return norms.square().sum() * self.l2

    def ridge_number(self) -> float | None:
        """2 * l2, in theta's precision, if it is the same for every coordinate and does not depend on v."""
        if callable(self.l2) or any(leaf.dtype != self.theta.dtype for leaf in self.theta.leaves):
            return None
        if self._ridge is None or self._ridge[0] != self.l2:  # rounded once, because rounding asks a tensor
            self._ridge = self.l2, float(torch.tensor(2 * float(self.l2), dtype=self.theta.dtype))
        return self._ridge[1]

    @torch.no_grad()
    def ridge_diagonal(self) -> Tensor:
        """The ridge's Hessian, 2 * l2 for every coordinate of theta, (D,)."""
        return self.theta.flatten(
            [
                torch.broadcast_to(torch.as_tensor(2 * c, dtype=leaf.dtype, device=leaf.device), leaf.shape)
                for c, leaf in zip(self.ridge_coefficients(), self.theta.leaves, strict=True)
            ]
        ).contiguous()

    def objective(
        self, batch: Batch, theta: Sequence[Tensor] | None = None, v: Sequence[Tensor] | None = None
    ) -> Tensor:
        """The inner objective on a batch, ridge included."""
        return self.losses(batch, theta, v).mean() + self.ridge(theta, v)

    def rate(self, learnt: Learnt) -> Tensor:
        """A learnt inner step size at the current v, with its graph."""
        with self.v.view() as v_given, user_settings():
            return learnt.at(v_given)

    def sizes(self, batches: Sequence[Batch]) -> list[int]:
        """The weights of several batches: their numbers of samples. If a batch does not show it, its losses do."""
        found = [common_length(batch) for batch in batches]
        if None in found:
            with self.guarded(seed=0), torch.no_grad():
                counted = [self.losses(b) if n is None else None for b, n in zip(batches, found, strict=True)]
            found = [
                n if losses is None or not losses.per_sample else losses.values.numel()
                for n, losses in zip(found, counted, strict=True)
            ]
        if None in found and len({tuple(lengths(batch).items()) for batch in batches}) > 1:
            raise InputError(
                "The number of samples in each inner batch is unclear, so batches cannot be weighted by size:"
                " inner() returned a scalar, and the tensors of a batch do not agree on their first dimension."
                " Return losses of shape (B,)."
            )
        return [n or 1 for n in found]

    def note_weights(self, losses: Losses) -> None:
        """Remember the lowest weight; no number is asked of a device before `lowest_weight` is."""
        if losses.weights is not None and losses.weights.numel():
            self._heeded.append(losses.weights.detach())
            if len(self._heeded) == HEEDED:
                self._heeded = [torch.cat([t.reshape(-1) for t in self._heeded]).amin()]

    def lowest_weight(self) -> Tensor | None:
        """The lowest weight since this was asked last, 0-dimensional, on the device it was made on."""
        weights, self._heeded = self._heeded, []
        return torch.cat([t.reshape(-1) for t in weights]).amin() if weights else None

    def point(self) -> list[Tensor]:
        """Copies of theta and v, each as one vector, and of their buffers."""
        return [self.theta.flat(), self.v.flat(), *(copy for _, copy in (*self.theta.buffers(), *self.v.buffers()))]

    def set_point(self, point: Sequence[Tensor]) -> None:
        """Put theta, v and their buffers to a point, of any device."""
        theta, v, *copies = point
        self.theta.assign(theta.to(self.theta.device))
        self.v.assign(v.to(self.v.device))
        for (buffer, _), copy in zip((*self.theta.buffers(), *self.v.buffers()), copies, strict=True):
            buffer.copy_(copy)

    def reshard(self) -> None:
        """Divide a theta that `fully_shard` had divided over the ranks again, with its values, when training is over.

        A `Bilevel` gathers such parameters; after this it can no longer be used. Every rank must call it.
        """
        if self.theta.shards is not None:
            self.theta.shards.release(self.theta.names, self.theta.leaves)

    @contextmanager
    def guarded(self, seed: int | None = None, live: bool = False, twice: bool = True) -> Iterator[None]:
        """The context of every pass other than an inner step.

        Buffers and training flags stay as they were, unless the pass is `live`: one that is an inner step as well. With
        a seed, dropout is drawn from it and the caller's generators are left alone, so that the same pass can be
        replayed. Compiled modules run uncompiled; attention and recurrent layers run on kernels that can be
        differentiated twice, unless the pass is differentiated once at most and says so.
        """
        with ExitStack() as stack:
            if not live:
                stack.enter_context(self.theta.undisturbed())
                stack.enter_context(self.v.undisturbed())
            if seed is not None and tape.tape() is None:  # captured steps draw no random numbers
                stack.enter_context(seeded(int(tape.now(seed)), self.theta.device))
            stack.enter_context(self.kernels(twice))
            yield

    def kernels(self, twice: bool = True) -> AbstractContextManager[None]:
        """A context in which modules run on kernels that can be differentiated, once or twice."""
        return differentiable_kernels(self.theta.recurrent or self.v.recurrent, twice)

    def few(self, batch: Batch, count: int = FEW) -> Batch | None:
        """A few samples of a batch for a large model; None where the whole batch is to be used."""
        samples = common_length(batch)
        if self.theta.numel <= LARGE or samples is None or samples <= 2 * count:
            return None
        given = tuple(batch) if isinstance(batch, Padded) else batch  # whose first samples count
        few: Batch = map_tensors(lambda t: t[:count] if t.ndim else t, given)
        return few

    @contextmanager
    def scaled(self, scaler: GradScaler | None) -> Iterator[None]:
        """A context whose backward passes are scaled, if there is a scaler. It falls where passes overflow, and never
        grows.
        """
        before = self.scaling
        self.scaling = before if scaler is None else Scaling(scaler, self.theta.device, grows=False)
        try:
            yield
        finally:
            self.scaling = before

    def refuse_inference(self) -> None:
        """Refuse to start in torch's inference mode."""
        if torch.is_inference_mode_enabled():
            raise InputError(
                "torch.inference_mode is on, and inside it no derivative can be taken. Leave that block first;"
                " torch.no_grad is harmless here."
            )

    def _on(self, name: str, batch: Batch, function: Callable[[Batch], Any]) -> Any:
        """The user's function on its first batch; a batch with too few entries gets a sentence."""
        try:
            return function(batch)
        except (IndexError, ValueError) as error:
            short = isinstance(error, IndexError) or "unpack" in str(error)
            if isinstance(error, InputError) or not short or not isinstance(batch, (tuple, list)):
                raise
            raise InputError(
                f"{name}() failed on a batch of {len(batch)} entries: {type(error).__name__}: {error}. If it also"
                " expects the index of each sample, which nhgd.Data appends, pass (x, y, torch.arange(len(x)))"
                " instead of (x, y)."
            ) from error

    def validate(self, inner_batch: Batch, outer_batch: Batch, rate: Learnt | None = None) -> None:
        """Evaluate both functions once and refuse, with a sentence, what no method could work with.

        Args:
            rate: the inner step size, if v enters there too.
        """
        self.refuse_inference()
        for name, batch in (("inner", inner_batch), ("outer", outer_batch)):
            bad = first_bad(batch)
            if bad:
                raise InputError(f"The {name} batch contains nan or inf: {bad}. Remove or impute such samples first.")
        with self.guarded(seed=0, twice=False), torch.enable_grad():
            losses = self._on("inner", inner_batch, self.losses)
            losses.check_finite()
            self.check_ridge()
            data = losses.mean()
            # Without the ridge, which always depends on theta.
            in_theta = _gradients(data, self.theta.leaves)
            in_v = _gradients(data + self.ridge() + (0.0 if rate is None else self.rate(rate)), self.v.leaves)
            del losses, data  # with their graph, before that of the outer loss is made
            value = self._on("outer", outer_batch, self.outer_value)
            if not bool(torch.isfinite(value)):
                raise InputError(f"The outer loss is {value.item()} at the starting point.")
            outer = _gradients(value, (*self.theta.leaves, *self.v.leaves))
        names = [*self.theta.names, *self.v.names]
        for name, g in zip(names * 2, (*in_theta, *in_v, *outer), strict=True):
            if g is not None and g.layout != torch.strided:
                raise InputError(
                    f"The gradient of {name!r} is sparse, which no method here supports. Create its nn.Embedding or"
                    " nn.EmbeddingBag with sparse=False."
                )
        if all(g is None for g in in_theta):
            raise InputError(
                "The inner loss does not depend on theta. Use the theta that inner() receives, without .detach() or"
                " .data."
            )
        if all(g is None for g in outer):
            raise InputError(
                "The outer loss depends on neither theta nor v: it carries no gradient. Use the theta and v that"
                " outer() receives, without .detach() or .data."
            )
        if all(g is None for g in (*in_v, *outer[len(in_theta) :])):
            raise InputError(
                "v enters neither the inner nor the outer problem, so there is nothing to learn. Use the v that"
                " inner(), outer() or l2() receives, without .detach() or .data."
            )
        for level, gradients in (("inner", (*in_theta, *in_v)), ("outer", outer)):
            if any(g is not None and not bool(torch.isfinite(g).all()) for g in gradients):
                raise InputError(
                    f"The {level} loss is finite, but its gradient contains nan or inf. Look for sqrt, log, a norm or"
                    " a division at 0 in it."
                )
        self._warn_unused(in_theta, in_v, outer[: len(in_theta)], outer[len(in_theta) :])

    def _warn_unused(
        self, in_theta: Gradients, in_v: Gradients, outer_in_theta: Gradients, outer_in_v: Gradients
    ) -> None:
        """Warn about parameters that would silently stay unchanged. Frozen tensors are not leaves and cause no
        warning.
        """
        idle = [
            name
            for name, *found, leaf in zip(self.v.names, in_v, outer_in_v, self.v.leaves, strict=True)
            if all(g is None for g in found) and leaf.numel()
        ]
        if idle:
            warnings.warn(
                f"On the first batches v's {_listed(idle)} {'enters' if len(idle) == 1 else 'enter'} neither the"
                " inner nor the outer problem, and will not change. Use what inner(), outer() or l2() receives, or"
                " remove it from v.",
                UnusedWarning,
                stacklevel=4,
            )
        free = [
            name
            for name, inner, outer, ridge in zip(
                self.theta.names, in_theta, outer_in_theta, self.ridge_coefficients(), strict=True
            )
            if inner is None and outer is not None and not bool((torch.as_tensor(ridge).detach() > 0).any())
        ]
        if free:
            warnings.warn(
                f"On the first batches theta's {_listed(free)} {'enters' if len(free) == 1 else 'enter'} the outer loss but not"
                " the inner one, so that nothing trains it and the inner Hessian is singular. Use it in inner(), add l2, or"
                " freeze it (requires_grad=False).",
                UnusedWarning,
                stacklevel=4,
            )

    @torch.no_grad()
    def check_ridge(self) -> None:
        """Refuse an l2(v) below 0, naming the parameter; a constant was checked when it was given."""
        if not callable(self.l2):
            return
        device = self.theta.device
        lows = [torch.as_tensor(c).detach().min().to(device, torch.float64) for c in self.ridge_coefficients()]
        for name, low in zip(self.theta.names, torch.stack(lows).tolist(), strict=True):
            if not 0 <= low < float("inf"):
                raise InputError(
                    f"l2(v) is {low:.3g} for {name!r}; a ridge must be at least 0. Pass it through exp() or softplus(), or"
                    " keep v above 0 with project_v=(0, 1)."
                )


def _gradients(value: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Gradients of a value, None for every leaf it does not depend on."""
    if not value.requires_grad:
        return (None,) * len(leaves)
    return torch.autograd.grad(value, leaves, allow_unused=True, retain_graph=True)


def _listed(names: Sequence[str], most: int = 5) -> str:
    """The names, a few of many.

    >>> _listed(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more
