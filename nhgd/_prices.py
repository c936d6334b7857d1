"""What operations cost: a few constants that were measured once on one machine, and what they make of a block of work.

`benchmarks/prices.py` measures them; `benchmarks/results/prices-cpu.json` and `prices-h200.json` are its results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nhgd._cost import Operation

_LOW = (torch.bfloat16, torch.float16)
LARGE = 2**20  # numbers: larger arrays are not in a cache, and come from the system page by page


@dataclass(frozen=True)
class Prices:
    """Seconds of operations in float32; float64 takes twice as long.

    Attributes:
        multiplication: and addition, in a large matrix product.
        thin: the smallest dimension of a matrix product that runs at half that speed.
        number: read or written.
        call: of one operation from Python, whatever it does.
        eigh, eigh_square, eigh_row: of an eigendecomposition, by the cube, by the square and by the number of its rows.
        cholesky: of a factorisation, by the cube of its rows.
        half: how much of the time of a multiplication one of bfloat16 or float16 takes.
        ahead: whether calls are made while the device still works on earlier ones, so that the longer of the two
            counts.
    """

    multiplication: float
    thin: float
    number: float
    call: float
    eigh: float
    eigh_square: float
    cholesky: float
    half: float = 1.0
    ahead: bool = False
    eigh_row: float = 0.0

    def of(self, operations: Sequence[Operation], gradient: float) -> float:
        """Seconds of all operations, given those of an inner gradient."""
        return sum(o.times * self._one(o, gradient) for o in operations)

    def _one(self, operation: Operation, gradient: float) -> float:
        kind, size, _, double = operation
        if kind == "gradient":
            return gradient
        if kind == "product":
            return 2 * gradient
        each = {
            "matmul": self.multiplication * size,
            "eigh": self.eigh * size**3 + self.eigh_square * size**2 + self.eigh_row * size,
            "cholesky": self.cholesky * size**3,
            "pass": self.number * size * (2 if size > LARGE else 1),
            "call": self.call,
        }[kind]
        return each * (2 if double and kind != "call" else 1)


PRICES = {
    "cpu": Prices(2.4e-11, 20.0, 1.2e-10, 1.2e-5, 9e-11, 2.2e-8, 9e-12),
    "cuda": Prices(1e-13, 40.0, 2e-12, 2e-5, 1e-12, 0.0, 1.5e-13, half=0.03, ahead=True, eigh_row=1e-5),
}


class Priced(TorchDispatchMode):
    """Adds up the cost of the operations inside a block, from their shapes.

    >>> with Priced(Prices(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)) as priced:
    ...     product = torch.ones(10, 20) @ torch.ones(20, 30)
    >>> priced.seconds
    6000.0
    """

    def __init__(self, prices: Prices) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without annotations
        self.prices = prices
        self.calls = 0.0
        self.work = 0.0

    @property
    def seconds(self) -> float:
        """Of everything so far."""
        return max(self.calls, self.work) if self.prices.ahead else self.calls + self.work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        prices = self.prices
        if func.namespace == "profiler":
            return result  # marks that hooks such as those of fully_shard leave for a profiler
        if func is torch.ops.aten._to_copy.default:
            return result  # the number of autocast's casts depends on where it was entered, and a budget must not
        self.calls += prices.call
        if not func.is_view:
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            every = (*given, *(t for t in tree_leaves(result) if isinstance(t, Tensor)))
            numbers = sum(t.numel() * (0.5 if t.dtype in _LOW else 1.0) for t in every)
            formula = flop_registry.get(func._overloadpacket)
            if formula is not None:
                # Of attention, what follows queries, keys and values are sums over their rows.
                factors = given[:4] if "attention" in func.__name__ else given
                smallest = _smallest([tuple(t.shape) for t in factors])
                flops = float(formula(*args, **kwargs, out_val=result))
                each = prices.multiplication
                if max((t.dtype.itemsize for t in given if t.is_floating_point()), default=4) < 4:
                    each *= prices.half
                self.work += each * flops / 2 * (1 + prices.thin / smallest)
            self.work += prices.number * numbers
        return result


def _smallest(shapes: Sequence[tuple[int, ...]]) -> int:
    """The smallest dimension of a product; of a convolution, that of its weight as a matrix."""
    images = [s for s in shapes if len(s) == 4]
    if images:
        weight = min(images, key=prod)
        return max(1, min(weight[0], prod(weight[1:])))
    return max(1, min((n for s in shapes if len(s) > 1 for n in s[-2:]), default=1))


def prices_of(device: torch.device) -> Prices:
    """The prices of a kind of device; those of a GPU if it is unknown."""
    return PRICES["cpu" if device.type == "cpu" else "cuda"]
