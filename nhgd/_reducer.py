"""Gradients of the workers' parts of a batch, summed by DistributedDataParallel while the backward pass goes on.

The wrapper's reducer acts on `.backward()` into `.grad`, and must see every backward pass whose forward pass it has seen. So
it is given one thing alone, the loss of an inner step: that loss, and not the module, stands in for what the wrapper calls.
inner() may then use the module as it likes, by its parts or several times, and is given the module itself, as everywhere
else. Everything that is not an inner step goes past the wrapper.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.distributed import get_process_group_ranks
from torch.nn.parallel import DistributedDataParallel

from nhgd.data_parallel import Team
from nhgd.errors import InputError


class Reducer:
    """What a DistributedDataParallel wrapper does for a team.

    Args:
        wrapper: with the settings its owner chose: buckets, unused parameters, a static graph, communication hooks.
        names, leaves: the parameters that are trained.
    """

    def __init__(self, wrapper: DistributedDataParallel, names: Sequence[str], leaves: Sequence[Tensor]) -> None:
        self.wrapper = wrapper
        self.names = tuple(names)
        self.leaves = tuple(leaves)
        self._own: list[BaseException] = []  # errors of the loss itself
        self._why_not: dict[tuple[int, ...], str | None] = {}  # by the ranks of a team

    def serves(self, team: Team) -> bool:
        """Whether gradients of this team's parts go through the wrapper; not before `consider`."""
        return self._why_not.get(team.ranks, "not yet known") is None

    def consider(self, team: Team, unused: Sequence[str]) -> None:
        """Find out, once for a team, whether the wrapper can do it, and say so where it cannot.

        All workers call this after a step whose gradient was taken past the wrapper. `unused` names parameters that took no
        part in it here; on a wrapper that does not expect such, the others would wait for them.
        """
        if team.ranks in self._why_not:
            return
        everywhere = sorted(team.union(unused, self.names))
        why = self._hindrance(team, everywhere)
        # One worker may see what others do not, and all must take the same way.
        if team.any(why is not None) and why is None:
            why = "another worker's wrapper cannot"
        self._why_not[team.ranks] = why
        if why is not None and team.rank == 0:
            warnings.warn(
                f"DistributedDataParallel does not sum the inner gradient, because {why}. The workers sum it themselves, after"
                " the backward pass and not during it; the numbers are the same.",
                stacklevel=2,
            )

    def _hindrance(self, team: Team, unused: Sequence[str]) -> str | None:
        wrapper = self.wrapper
        ranks = tuple(get_process_group_ranks(wrapper.process_group))
        if ranks != team.ranks:
            return f"its process group has the ranks {list(ranks)} and the team has {list(team.ranks)}"
        ignored = set(wrapper.parameters_to_ignore)
        known = {id(p) for name, p in wrapper.module.named_parameters() if name not in ignored and p.requires_grad}
        # The second number is from when the wrapper was made.
        counted = wrapper._get_ddp_logging_data().get("num_parameter_tensors", len(known))
        if known != {id(leaf) for leaf in self.leaves} or counted != len(known):
            return "it was made for other parameters than those that are trained (freeze them before wrapping)"
        if getattr(wrapper, "mixed_precision", None) is not None:
            return "its mixed precision is for its own forward pass (use torch.autocast in inner())"
        if unused and not self._expects_unused:
            listed = ", ".join(map(repr, unused))
            return f"{listed} took no part in the inner loss (freeze it, or set find_unused_parameters=True)"
        return None

    @property
    def _expects_unused(self) -> bool:
        return bool(self.wrapper.find_unused_parameters or self.wrapper.static_graph)

    @property
    def follows_first(self) -> bool:
        """Whether buffers are to be those of the first worker, as the wrapper makes them before each forward pass."""
        return bool(self.wrapper.will_sync_module_buffers())

    @contextmanager
    def translating_peer_errors(self, team: Team) -> Iterator[None]:
        """The setting of one `forward` and the `backward` that must follow it. What parameters hold as `.grad` is kept."""
        # With gradient_as_bucket_view that may be the reducer's own memory, which it writes to.
        before = [leaf.grad for leaf in self.leaves]
        copies = [g.clone() if self._shares_memory and g is not None else None for g in before]
        synced = self.wrapper.require_backward_grad_sync  # False inside no_sync(), where nothing would be summed
        try:
            self.wrapper.require_backward_grad_sync = True
            for leaf in self.leaves:
                leaf.grad = None
            self._own.clear()
            with team.translating_peer_errors(self._own):
                yield
        finally:
            self.wrapper.require_backward_grad_sync = synced
            for leaf, gradient, copy in zip(self.leaves, before, copies, strict=True):
                leaf.grad = gradient
                if gradient is not None and copy is not None:
                    gradient.copy_(copy)

    @property
    def _shares_memory(self) -> bool:
        return bool(self.wrapper.gradient_as_bucket_view)

    def forward(self, loss: Callable[[], Tensor]) -> Tensor:
        """A scalar as the wrapper's output."""
        wrapper, inside = self.wrapper, self.wrapper.module
        try:
            wrapper.module = _StandIn(inside, loss, self._own)
            # Not through hooks on the wrapper, which would see a loss where they expect outputs. With device_ids it moves its
            # arguments, and fails without any.
            found: Tensor = wrapper.forward(None)
        finally:
            wrapper.module = inside
        return found

    def backward(
        self, loss: Tensor, edges: Sequence[GradientEdge], retain_graph: bool
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """The mean over the workers of the loss's gradients, and this worker's own gradients at edges of the graph."""
        scores: list[Tensor | None] = [None] * len(edges)

        def keeper(position: int, output: int) -> Callable[[Sequence[Tensor | None]], None]:
            def keep(gradients: Sequence[Tensor | None]) -> None:
                scores[position] = gradients[output]

            return keep

        handles = [edge.node.register_prehook(keeper(i, edge.output_nr)) for i, edge in enumerate(edges)]
        try:
            # Only into these leaves: v may be in the graph too.
            torch.autograd.backward(loss, inputs=self.leaves, retain_graph=retain_graph)
        finally:
            for handle in handles:
                handle.remove()
        found = [leaf.grad for leaf in self.leaves]
        self._check_complete(found)
        return [g.clone() if self._shares_memory and g is not None else g for g in found], scores

    def _check_complete(self, found: Sequence[Tensor | None]) -> None:
        """A parameter without a gradient, where none was expected, leaves the reducer waiting and the sums undone."""
        if self._expects_unused:
            return
        missing = [name for name, g in zip(self.names, found, strict=True) if g is None]
        if missing:
            raise InputError(
                f"{', '.join(map(repr, missing))} took no part in the inner loss of a batch, though it did in that of the first,"
                " and DistributedDataParallel waits for it. Wrap the module with find_unused_parameters=True."
            )


class _StandIn(nn.Module):
    """Called by the wrapper in place of its module: computes a loss with it."""

    def __init__(self, inside: nn.Module, loss: Callable[[], Tensor], errors: list[BaseException]) -> None:
        super().__init__()
        self.inside = inside
        self._errors = errors
        self._loss: Callable[[], Tensor] | None = loss

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Those of the module, which the wrapper looks up by name."""
        return self.inside.named_buffers(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The loss; should that call the wrapper rather than what it is given, the module."""
        if self._loss is None:
            return self.inside(*args, **kwargs)
        loss, self._loss = self._loss, None
        try:
            return loss()
        except RuntimeError as error:
            self._errors.append(error)
            raise
