"""How a variable moves: an optimiser and its step sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer

from nhgd import _tape as tape
from nhgd._beside import beside
from nhgd._shards import whole
from nhgd._validation import is_class, shown
from nhgd.errors import InputError
from nhgd.loop.settings import OptimizerFactory
from nhgd.schedule import Clock, Constant, Rate, Schedule, as_schedule
from nhgd.variable import Variable


class Mover:
    """Moves one variable by an optimiser with its step sizes."""

    def __init__(
        self, variable: Variable, level: str, optimizer: OptimizerFactory | None, rate: Rate | None, default: float
    ) -> None:
        self.variable = variable
        self._travelled = 0.0
        self._counts_in_double = False
        leaves = list(variable.moved)
        self._is_own = not isinstance(optimizer, Optimizer)  # made here, for this run alone
        self.schedule: Schedule | None = None if rate is None else as_schedule(rate, f"{level}_lr")
        if optimizer is None or (is_class(optimizer) and issubclass(optimizer, Optimizer)):
            self.schedule = self.schedule or as_schedule(default, f"{level}_lr")
            lr = self.schedule.rate(Clock())
            chosen: Any = SGD if optimizer is None else optimizer
            self.optimizer: Optimizer = chosen(leaves, lr=lr)
        elif isinstance(optimizer, Optimizer):
            self.optimizer = optimizer
        else:
            made = optimizer(leaves) if callable(optimizer) and not isinstance(optimizer, type) else None
            if not isinstance(made, Optimizer):
                returned = "" if made is None else f", which returned {shown(made)}"
                raise InputError(
                    f"{level}_optimizer must be a torch optimiser, its class, or a function of the parameters that returns one;"
                    f" got {shown(optimizer)}{returned}."
                )
            self.optimizer = made
        # A plain tensor is trained through an alias that requires a gradient; an optimiser may hold either of the two.
        held = {_identity(p): p for group in self.optimizer.param_groups for p in group["params"]}
        self.targets = [held.get(_identity(leaf), leaf) for leaf in leaves]
        if set(held) != {_identity(leaf) for leaf in leaves}:
            raise InputError(
                f"The {level} optimiser does not hold exactly the trainable tensors of {variable.role}. Pass a factory, for"
                f" example {level}_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)."
            )
        if level == "inner" and any(group.get("weight_decay") for group in self.optimizer.param_groups):
            warnings.warn(
                "The inner optimiser has weight_decay, which the hypergradient does not see. Set it to 0 and pass l2= to"
                " Bilevel instead.",
                stacklevel=4,
            )

    def reset_distance(self) -> None:
        """Start summing up step sizes."""
        self._travelled = 0.0

    @property
    def asks_moments(self) -> bool:
        """Whether `travelled` reads the optimiser's moments."""
        return not isinstance(self.optimizer, SGD)

    def travelled(self) -> float:
        """The sum of the step sizes since the departure, as plain gradient steps would have to have them.

        Momentum makes a step 1 / (1 - momentum) times as long in the end. Adam and its kin divide by sqrt(v); what they
        make of a gradient of the usual size is sum sqrt(v) / sum v times its length, over the coordinates.
        """
        factor = 1.0
        group = self.optimizer.param_groups[0]
        if isinstance(self.optimizer, SGD):
            factor = (1 - group["dampening"]) / (1 - group["momentum"]) if group["momentum"] else 1.0
        else:
            moments = [
                (moment, state.get("step"))
                for state in self.optimizer.state.values()
                for name in ("exp_avg_sq", "square_avg", "sum")
                if isinstance(moment := state.get(name), Tensor)
            ]
            if moments:
                decay = group["betas"][1] if "betas" in group else 0.0
                # Each device is asked once.
                kept = [moment for moment, _ in moments]
                devices = {moment.device for moment in kept}
                with beside():
                    each = [_root_and_sum([m for m in kept if m.device == device]).cpu() for device in devices]
                    roots, squares = torch.stack(each).sum(0)
                    step = float(whole(moments[0][1])) if moments[0][1] is not None else 1.0
                unbiased = 1 - decay**step if decay else 1.0
                ratio = float(roots / squares.clamp_min(torch.finfo(torch.float64).tiny)) * unbiased**0.5
                factor = ratio if squares > 0 else 1.0
        return self._travelled * factor

    def rate(self, clock: Clock) -> float:
        """The step size now."""
        return self.schedule.rate(clock) if self.schedule is not None else float(self.optimizer.param_groups[0]["lr"])

    def move(self, gradient: Sequence[Tensor], clock: Clock, closure: Callable[[], Tensor] | None = None) -> None:
        """One optimiser step along a gradient, one tensor a leaf. LBFGS asks `closure` for more of them."""
        if tape.tape() is not None:
            self._move_noted(gradient, clock)
            return
        if self.schedule is not None:
            lr = self.schedule.rate(clock)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self._travel(float(self.optimizer.param_groups[0]["lr"]))
        self.set_gradient(gradient)
        if not isinstance(self.optimizer, LBFGS):
            self._step()
        elif self.variable.shards is not None:
            raise InputError(
                f"LBFGS cannot move {self.variable.role}, which is divided by fully_shard. Use another optimiser, for example"
                " torch.optim.AdamW."
            )
        elif closure is not None:
            self.optimizer.step(closure)
        else:
            raise InputError(
                f"LBFGS asks for the loss of {self.variable.role} several times a step, which this method cannot"
                " provide. Use another optimiser, for example torch.optim.Adam."
            )
        for target in self.targets:
            target.grad = None

    def _step(self) -> None:
        """The optimiser's step; if parameters are divided over ranks, each moves its own part and gathers the
        others'.
        """
        variable = self.variable
        if self._counts_in_double and not self.optimizer.state:
            before = torch.get_default_dtype()
            torch.set_default_dtype(
                torch.float64
            )  # which counters are made in: 1 - 0.999^k would be rounded to four digits
            try:
                self.optimizer.step()
            finally:
                torch.set_default_dtype(before)
            return
        if variable.shards is None:
            self.optimizer.step()
            return
        variable.shards.write(variable.names, variable.leaves)
        self.optimizer.step()
        variable.shards.read(variable.names, variable.leaves)

    def _travel(self, lr: float) -> None:
        self._travelled += tape.now(lr)

    def _move_noted(self, gradient: Sequence[Tensor], clock: Clock) -> None:
        """The same step under capture: a scheduled step size is a number on the device."""
        groups = self.optimizer.param_groups
        lr = self.scheduled_rate(clock)
        tape.effect(lambda: self._travel(lr))
        self.set_gradient(gradient)
        rate = tape.on_device(lr)
        if isinstance(rate, Tensor) and type(self.optimizer) is SGD:
            self._take_sgd_step(rate)
        else:
            for group in groups:
                group["lr"] = rate if isinstance(rate, Tensor) else lr
            self.optimizer.step()
        for group in groups:  # no other code may see the number of this step
            group["lr"] = float(lr)
        for target in self.targets:
            target.grad = None

    def scheduled_rate(self, clock: Clock) -> float:
        """The step size now, in a step that is captured."""
        if isinstance(self.schedule, Constant):
            return self.rate(clock)
        return tape.number(lambda: self.rate(clock))

    @torch.no_grad()
    def _take_sgd_step(self, rate: Tensor) -> None:
        """What torch's own SGD does with a number."""
        for group in self.optimizer.param_groups:
            for target in group["params"]:
                g = -target.grad if group["maximize"] else target.grad
                if group["weight_decay"]:
                    g = g.add(target, alpha=group["weight_decay"])
                if group["momentum"]:
                    moment = self.optimizer.state[target]["momentum_buffer"]
                    moment.mul_(group["momentum"]).add_(g, alpha=1 - group["dampening"])
                    g = g.add(moment, alpha=group["momentum"]) if group["nesterov"] else moment
                target.addcmul_(g, -rate.to(target.dtype))

    def prepare(self, wanted: bool = True) -> None:
        """Let steps of an optimiser that was made here be captured, or not, where its class knows how; before the
        first of them.
        """
        if self._is_own and self.variable.device.type == "cuda" and not self.optimizer.state:
            given = self.optimizer.defaults.get("capturable", False)
            for group in self.optimizer.param_groups:
                if "capturable" in group:
                    group["capturable"] = wanted or given
                    self._counts_in_double = wanted and not given

    def refusal(self) -> str | None:
        """Why steps of this optimiser cannot be captured, as a clause; None if they can."""
        kind = type(self.optimizer).__name__
        if self.schedule is None and len({float(group["lr"]) for group in self.optimizer.param_groups}) > 1:
            return f"{kind} has several step sizes for {self.variable.role}"
        if type(self.optimizer) is SGD:
            return None
        if not all(group.get("capturable") for group in self.optimizer.param_groups):
            return f"{kind} moves {self.variable.role}: make it with capturable=True, or use SGD"
        return None

    def set_gradient(self, gradient: Sequence[Tensor]) -> None:
        """Store a gradient where the optimiser reads it."""
        shards = self.variable.shards
        for name, target, g in zip(self.variable.names, self.targets, gradient, strict=True):
            divided = shards is not None and name in shards.parts
            target.grad = shards.divide(g, target) if shards is not None and divided else g.to(target.dtype)

    def move_as_other(
        self, gradient: Sequence[Tensor], clock: Clock, moments: dict[str, dict[str, Any]], factor: float
    ) -> dict[str, dict[str, Any]]:
        """One step, of `factor` times the usual size, with moments by leaf in place of the optimiser's own, which stay.

        Returns the moments after it. The variable moves, which holds the value of another variable meanwhile.
        """
        if isinstance(self.optimizer, LBFGS):
            raise InputError(
                "LBFGS asks for the loss of theta several times a step, which this method cannot provide for its second"
                " inner variable. Use another inner optimiser, for example torch.optim.Adam."
            )
        names, groups, state = self.variable.names, self.optimizer.param_groups, self.optimizer.state
        own = {target: state.pop(target) for target in self.targets if target in state}
        rates = [group["lr"] for group in groups]
        for target, name in zip(self.targets, names, strict=True):
            if name in moments:
                state[target] = moments[name]
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = factor * (rate if self.schedule is None else self.schedule.rate(clock))
        self.set_gradient(gradient)
        self._step()
        found = {name: state.pop(t) for t, name in zip(self.targets, names, strict=True) if t in state}
        state.update(own)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for target in self.targets:
            target.grad = None
        return found

    @property
    def is_plain(self) -> bool:
        """Whether its steps are plain gradient steps of one size."""
        known = ("momentum", "weight_decay", "nesterov", "maximize")
        groups = self.optimizer.param_groups
        return (
            type(self.optimizer) is SGD
            and not any(group[name] for group in groups for name in known)
            and (self.schedule is not None or len({float(group["lr"]) for group in groups}) == 1)
        )

    def plain_rate(self, clock: Clock, owner: str) -> float:
        """The size of the next step, for a method that takes plain gradient steps; other optimisers are refused."""
        if not self.is_plain:
            raise InputError(
                f"{owner} takes plain gradient steps on theta, so it works with no other inner optimiser. Omit"
                " inner_optimizer and set inner_lr."
            )
        return self.rate(clock)


def _root_and_sum(moments: list[Tensor]) -> Tensor:
    """sum sqrt(m) and sum m over all moments, (2,) in float64; on a GPU by few calls, without copies in float64."""
    if any(hasattr(m, "full_tensor") or m.device.type != "cuda" or m.dtype.itemsize < 4 for m in moments):
        return torch.stack(
            [torch.stack([whole(m.double().sqrt().sum()), whole(m.double().sum())]) for m in moments]
        ).sum(0)
    return sums_of_roots(moments)


@torch.no_grad()
def sums_of_roots(moments: list[Tensor]) -> Tensor:
    """The same for whole tensors that hold no number below 0, of which the norm of order 1 is the sum."""
    norms = (torch._foreach_norm(torch._foreach_sqrt(moments), 1), torch._foreach_norm(moments, 1))
    return torch.stack([torch.stack(list(some)).double().sum() for some in norms])


def _identity(tensor: Tensor) -> int:
    """What tells tensors in different memory apart; a part of a divided one has no address of its own."""
    return id(tensor) if hasattr(tensor, "device_mesh") else tensor.data_ptr()
