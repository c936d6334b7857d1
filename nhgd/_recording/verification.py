"""The checks of records: at every new form of the graph, and now and then later.

At a theta nearby, where nothing is zero by accident, samples must not influence each other, and the scores of a layer
must add up to its gradient; a layer whose scores do not is not recorded as one. Nothing of that draws from the run's
random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nhgd import _tape as tape
from nhgd._randomness import generators_restored
from nhgd._recording.accounting import check_independent, fits
from nhgd._recording.leaf_call import adds_up, rows_of, summed
from nhgd._recording.normalisation import held_statistics
from nhgd._recording.taps import TappedPass, Taps, scale_of
from nhgd.data.batch import Batch
from nhgd.errors import InputError
from nhgd.likelihood import AbstractLikelihood
from nhgd.losses import Losses
from nhgd.problem import FEW
from nhgd.record import FoldedLayer, LayerRecord

FORMS = 16  # of the graph that are verified when they first appear; later ones now and then


class Verification:
    """What is known about the layers of a model.

    Attributes:
        unaccounted: parameters that were met outside their layers.
        foreign: parameters whose gradient was seen not to be what the scores of their calls add up to.
        suffices: whether the calls of the last pass gave the gradient of every parameter.
        recorded: weights, with biases, that records held as layers.
        likely: whether the likelihood was compared with the losses.
    """

    def __init__(self, taps: Taps) -> None:
        self.taps = taps
        self.unaccounted: set[str] = set()
        self.foreign: set[str] = set()
        self.suffices = True
        self.recorded: dict[str, str | None] = {}
        self._forms: dict[int, set[str]] = {}  # of verified graphs, with the layers that were not informative there
        self._records = 0
        self.likely = False

    def memory(self) -> dict[str, Any]:
        """What later records depend on, as plain values."""
        return {
            "unaccounted": sorted(self.unaccounted),
            "foreign": sorted(self.foreign),
            "suffices": self.suffices,
            "layers": dict(self.recorded),
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Restore what `memory` returned."""
        self.unaccounted, self.recorded = set(memory["unaccounted"]), dict(memory["layers"])
        self.foreign, self.suffices = set(memory["foreign"]), bool(memory["suffices"])

    def before_record(self) -> None:
        """A record is about to be made."""
        tape.effect(self._count)
        if self.taps.norms:
            return
        problem = self.taps.problem
        for root in (problem.theta.root, problem.v.root):
            for name, module in root.named_modules() if root is not None else ():
                if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
                    raise InputError(
                        f"Per-sample curvature is not defined with BatchNorm in training mode ({name!r}), where samples"
                        " influence each other. Use kfac, ekfac or fisher_diagonal, which learn from the batch objective; or"
                        " call model.eval() on it, or use GroupNorm or LayerNorm."
                    )

    def _count(self) -> None:
        self._records += 1

    @property
    def _now_and_then(self) -> bool:
        return self._records & (self._records - 1) == 0

    def is_due(self, found: TappedPass) -> bool:
        """Whether the layers are to be verified: in a graph of a new form, or of one that left something open."""
        if not found.calls:
            return False
        if found.form not in self._forms:
            return len(self._forms) < FORMS or self._now_and_then
        return bool(self._forms[found.form]) and self._now_and_then

    def verify(self, found: TappedPass, batch: Batch | None) -> None:
        """Verify the layers of a pass before its graph is used, if that is due.

        Args:
            batch: for verification in a separate pass; None: on this pass.
        """
        if not self.is_due(found):
            return
        here = batch is None
        wrong = self._verify(found, found.form, found.after_norms) if here else self._verified(batch, found)
        self.foreign |= wrong
        found.outside_layers |= wrong

    def note(self, found: TappedPass, own: Sequence[Tensor | None]) -> None:
        """Note the parameters that the layers of a pass do not account for, given the gradient that the scores are a
        part of.
        """
        otherwise = self._computing_otherwise(found, own)
        found.outside_layers |= otherwise | self.foreign
        found.native -= otherwise | self.foreign | self._leaves_computing_otherwise(found, own)
        self.suffices = found.outside_layers <= found.native
        found.news = not found.outside_layers <= self.unaccounted
        self.unaccounted |= found.outside_layers

    def _computing_otherwise(self, found: TappedPass, own: Sequence[Tensor | None]) -> set[str]:
        """Parameters of subclasses of layers whose gradient is not what their scores add up to."""
        chosen = [
            i for i, call in enumerate(found.calls) if not call.is_plain and call.weight not in found.outside_layers
        ]
        if not chosen:
            return set()
        calls, scores = [found.calls[i] for i in chosen], [found.scores[i] for i in chosen]
        gradients = dict(zip(self.taps.problem.theta.names, own, strict=True))
        return {
            name
            for layer in self.taps.layer_records(calls, [scores], scale_of(found.losses))
            if not fits(layer, gradients)[0]
            for name in (layer.weight, layer.bias)
            if name is not None
        }

    def _leaves_computing_otherwise(self, found: TappedPass, own: Sequence[Tensor | None]) -> set[str]:
        """Parameters of modules of unknown code whose gradient is not the sum of the rows of all their calls."""
        theta, losses = self.taps.problem.theta, found.losses
        chosen = {n for call in found.leaf_calls if not call.is_known for n in call.names.values()} & found.native
        if not chosen:
            return set()
        gradients = dict(zip(theta.names, own, strict=True))
        ones = torch.ones_like(losses.values)
        totals: dict[str, list[Tensor]] = {name: [] for name in chosen}
        for call, score in zip(found.leaf_calls, found.scores[found.of_leaves], strict=True):
            names = chosen & set(call.names.values())
            own_rows = rows_of(call, [score], ones) if names and call.fits(score, len(ones)) else None
            for name in names:
                totals[name].append(ones.new_full((1, 1), torch.nan) if own_rows is None else own_rows[name])
        for name, rows in self.taps.rows_of_layers(found, [found.scores], ones, chosen):
            totals[name].append(rows)
        eps = max((torch.finfo(s.dtype).eps for s in found.scores if s is not None), default=0.0)
        return {n for n, parts in totals.items() if not adds_up(summed(parts), gradients[n], eps)}

    def _verified(self, batch: Batch, seen: TappedPass) -> set[str]:
        """Verify the layers, nearby if the graph has the same form there; parameters that they do not account for.

        Of a large model, a few samples show as much.
        """
        # Statistics that a batch is normalised by are held, but should be of several samples.
        few = self.taps.problem.few(batch, 2 * FEW) if seen.batch_objective else self.taps.problem.few(batch)
        if few is not None:
            try:
                return self._verified_on(few, seen.form)
            except InputError:
                raise
            except Exception:  # noqa: S110  # the user's function may not take so few
                pass
        return self._verified_on(batch, seen.form)

    def _verified_on(self, batch: Batch, form: int) -> set[str]:
        problem, theta = self.taps.problem, self.taps.problem.theta
        held = held_statistics() if self.taps.norms else nullcontext()
        with generators_restored(theta.device), problem.guarded(seed=0, twice=False), held, torch.enable_grad():
            with theta.nearby():
                try:
                    found: TappedPass | None = self.taps.forward(batch)
                except Exception:  # the user's function may not know such a place
                    found = None
                if found is not None and found.form == form and bool(torch.isfinite(found.losses.values).all()):
                    return self._verify(found, form)
            return self._verify(self.taps.forward(batch), form)

    def _verify(self, found: TappedPass, form: int, first: int = 0) -> set[str]:
        """Refuse samples that influence each other; note parameters whose gradient differs from the sum of their
        layer's scores.

        Calls before the first to be looked at are those in front of a BatchNorm, through which samples do.
        """
        theta = self.taps.problem.theta
        losses = replace(found.losses, weights=None)
        grad, wrt = self.taps.problem.scaling.grad, (*theta.leaves, *found.edges)
        given = grad(losses.mean(), wrt, retain_graph=True, allow_unused=True)
        own, scores = dict(zip(theta.names, given, strict=False)), given[len(theta.leaves) :][: len(found.calls)]
        seen = check_independent(losses.values, found.calls[first:], scores[first:])
        seen |= {call.weight for call in found.calls[:first]}
        wrong: set[str] = set()
        for layer in self.taps.layer_records(found.calls, [scores], scale_of(losses)):
            if layer.weight in found.outside_layers:
                continue  # and its calls may not even fit together
            good, telling = fits(layer, own)
            if not good:
                wrong |= {name for name in (layer.weight, layer.bias) if name is not None}
            if not telling:
                seen.discard(layer.weight)
        self._forms[form] = {call.weight for call in found.calls} - seen
        return wrong

    def accounted(self, layers: Sequence[LayerRecord]) -> list[LayerRecord]:
        """The layers that are all of their parameters' gradients."""
        return [x for x in layers if x.weight not in self.unaccounted and x.bias not in self.unaccounted]

    def check_recorded(self, layers: Sequence[LayerRecord | FoldedLayer]) -> None:
        """Refuse a weight that was recorded as a layer and is now used outside of it: such records do not combine."""
        for weight, bias in self.recorded.items():
            if weight in self.unaccounted or bias in self.unaccounted:
                raise InputError(
                    f"{weight!r} is used outside its layer in this batch, but not in earlier ones, whose curvature"
                    " was recorded by layer. Use FisherWindow(records='sample') or fisher_dense, which support any"
                    " model, or an inverse that uses Hessian products, such as cg."
                )
        self.recorded |= {layer.weight: layer.bias for layer in layers}

    def check_likelihood(self, likelihood: AbstractLikelihood, outputs: Tensor, losses: Losses) -> None:
        """Compare the likelihood with the losses, once."""
        if not self.likely:
            with generators_restored(self.taps.problem.theta.device):
                likelihood.verify(outputs, losses.values)
            self.likely = True
