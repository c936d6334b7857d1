"""The steps of torch's optimisers as functions of the gradient, which can be differentiated.

    SGD      b <- momentum b + (1 - dampening) g,      theta <- theta - lr b      (nesterov: g + momentum b)
    Adam     m <- beta_1 m + (1 - beta_1) g,     s <- beta_2 s + (1 - beta_2) g^2
             theta <- theta - lr m / (1 - beta_1^t) / ( sqrt(s / (1 - beta_2^t)) + eps )

with the weight decay of each. Everything is entry by entry, so the derivative of a step in the gradient is a diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from nhgd.errors import InputError

Moments: TypeAlias = "dict[str, Any]"
KNOWN = (SGD, Adam, AdamW)


class UpdateRule:
    """Goes on where an optimiser stands, without moving its parameters.

    Args:
        optimizer: SGD, Adam or AdamW.
        targets: its parameters, in the order of theta's leaves.
        owner: whose it is, for errors.
    """

    def __init__(self, optimizer: Optimizer, targets: Sequence[Tensor], owner: str) -> None:
        if type(optimizer) not in KNOWN or any(group.get("amsgrad") for group in optimizer.param_groups):
            kind = "amsgrad" if type(optimizer) in KNOWN else type(optimizer).__name__
            raise InputError(
                f"{owner} needs the derivative of the inner optimiser's steps, which is known for SGD, Adam and AdamW, with"
                f" momentum and weight decay, but not for {kind}. Use one of them as inner_optimizer."
            )
        self.optimizer = optimizer
        self.targets = list(targets)
        of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self.groups = [of[id(target)] for target in targets]
        self.moments: list[Moments] = [dict(optimizer.state.get(target, {})) for target in targets]

    def step(self, theta: Sequence[Tensor], gradient: Sequence[Tensor], lr: float | Tensor | None) -> list[Tensor]:
        """theta after one step, with the graph of both; a step size of None is that of each group."""
        move = _sgd if type(self.optimizer) is SGD else _adam
        return [
            move(p, g, moments, group, group["lr"] if lr is None else lr)
            for p, g, moments, group in zip(theta, gradient, self.moments, self.groups, strict=True)
        ]

    @torch.no_grad()
    def write(self) -> None:
        """Leave the optimiser with the moments after the steps."""
        for target, moments in zip(self.targets, self.moments, strict=True):
            if moments:
                held = {name: value.detach() if isinstance(value, Tensor) else value for name, value in moments.items()}
                self.optimizer.state[target] = held

    @torch.no_grad()
    def slopes(self, gradient: Sequence[Tensor], lr: float | None) -> list[Tensor | float]:
        """- d theta / d gradient of the last step that the optimiser took, entry by entry, along this gradient.

        A weight decay that Adam adds to the gradient is left out of the derivative of its denominator.
        """
        slope = _sgd_slope if type(self.optimizer) is SGD else _adam_slope
        return [
            slope(g, moments, group, group["lr"] if lr is None else lr)
            for g, moments, group in zip(gradient, self.moments, self.groups, strict=True)
        ]


def _sgd(p: Tensor, g: Tensor, moments: Moments, group: dict[str, Any], lr: Any) -> Tensor:
    g = -g if group["maximize"] else g
    if group["weight_decay"]:
        g = g + group["weight_decay"] * p
    if group["momentum"]:
        before = moments.get("momentum_buffer")
        now = g if before is None else group["momentum"] * before + (1 - group["dampening"]) * g
        moments["momentum_buffer"] = now
        g = g + group["momentum"] * now if group["nesterov"] else now
    moved: Tensor = p - lr * g
    return moved


def _sgd_slope(g: Tensor, moments: Moments, group: dict[str, Any], lr: float) -> float:
    if not group["momentum"]:
        return float(lr)
    share = 1 - group["dampening"]
    return float(lr * (1 + group["momentum"] * share if group["nesterov"] else share))


def _adam(p: Tensor, g: Tensor, moments: Moments, group: dict[str, Any], lr: Any) -> Tensor:
    (first, second), decay = group["betas"], group["weight_decay"]
    g = -g if group["maximize"] else g
    if decay and _is_decoupled(group):
        p = p - lr * decay * p
    elif decay:
        g = g + decay * p
    step = moments.get("step", torch.zeros((), dtype=torch.float32)) + 1
    zeros = torch.zeros_like(g)
    m = first * moments.get("exp_avg", zeros) + (1 - first) * g
    s = second * moments.get("exp_avg_sq", zeros) + (1 - second) * g.square()
    moments |= {"step": step, "exp_avg": m, "exp_avg_sq": s}
    moved: Tensor = p - lr * m / (1 - first ** float(step)) / _denominator(s, float(step), group)
    return moved


def _denominator(s: Tensor, step: float, group: dict[str, Any]) -> Tensor:
    """sqrt(s / (1 - beta_2^t)) + eps. Where s is 0 so was every gradient, and the root counts as a constant."""
    known = s > 0
    root = torch.where(known, torch.where(known, s, 1.0).sqrt(), 0.0)
    scale: float = (1 - group["betas"][1] ** step) ** 0.5
    found: Tensor = root / scale + group["eps"]
    return found


def _adam_slope(g: Tensor, moments: Moments, group: dict[str, Any], lr: float) -> Tensor:
    (first, second), step = group["betas"], float(moments["step"])
    m, s = moments["exp_avg"], moments["exp_avg_sq"]
    g = -g if group["maximize"] else g
    denominator, known = _denominator(s, step, group), s > 0
    root = torch.where(known, s, 1.0).sqrt() * (1 - second**step) ** 0.5
    bend = torch.where(known, m * (1 - second) * g / (root * denominator), 0.0)
    found: Tensor = lr / (1 - first**step) / denominator * ((1 - first) - bend)
    return -found if group["maximize"] else found


def _is_decoupled(group: dict[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay"))
