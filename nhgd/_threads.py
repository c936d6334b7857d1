"""How many CPU threads a small problem uses: one.

An operation of a fraction of a millisecond gains little from a second thread, and threads that wait for a busy core
spin: on two cores shared with another process a small run took twenty times as long on two threads as on one. Whether a
problem is small follows from the shapes of its operations and not from a clock, so that a resumed run makes the same
choice: sums differ in their last digits with another number of threads.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from nhgd.data.batch import Batch, move
from nhgd.problem import Bilevel

Function = TypeVar("Function", bound=Callable[..., Any])

SMALL = 5e7  # floating-point operations in the largest single operation: a millisecond or two of one core
PER_NUMBER = 16  # what reading or writing a number costs, in floating-point operations of a matrix product


class LargestOperation(TorchDispatchMode):
    """Counts the floating-point operations of the largest single operation inside this block, from shapes.

    >>> with LargestOperation() as largest:
    ...     product = torch.ones(100, 200) @ torch.ones(200, 300)
    >>> largest.flops
    12000000.0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own, without annotations
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            numbers = sum(t.numel() for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
            formula = flop_registry.get(func._overloadpacket)
            flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=result))
            self.flops = max(self.flops, flops, float(PER_NUMBER * numbers))
        return result


def are_chosen() -> bool:
    """Whether somebody has said how many threads torch is to take: by the environment, or by torch.set_num_threads."""
    if any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return True
    return torch.get_num_threads() != _FIRST or _FIRST not in _usual()


def suited(flops: float, device: torch.device) -> int | None:
    """How many threads suit work whose largest operation takes this many floating-point operations; None: leave
    torch's choice.
    """
    if device.type != "cpu" or flops > SMALL or torch.get_num_threads() == 1 or are_chosen():
        return None
    return 1


@contextmanager
def measuring(device: torch.device) -> Iterator[LargestOperation]:
    """Measure the size of the operations inside, if it can matter; otherwise report infinity."""
    found = LargestOperation()
    if device.type != "cpu" or torch.get_num_threads() == 1 or are_chosen():
        found.flops = float("inf")
        yield found
        return
    with found:
        yield found


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """A context in which this thread computes on `count` threads. None: no change."""
    before = torch.get_num_threads()
    if threads is None or threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def on_suited_threads(function: Function) -> Function:
    """Let a function of a problem and an inner batch compute on as many threads as suit a gradient on that batch."""
    names = list(inspect.signature(function).parameters)[:2]

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        problem, batch = (args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names))
        with limited(_suited_to(problem, batch)):
            return function(*args, **kwargs)

    return cast("Function", run)


def _suited_to(problem: Any, batch: Batch) -> int | None:
    if not isinstance(problem, Bilevel) or batch is None:
        return None

    def value() -> Tensor:
        return problem.objective(move(batch, problem.theta.device))

    with problem.guarded():
        return suited_to(value, problem.theta.leaves)


def suited_to(value: Callable[[], Tensor], leaves: Sequence[Tensor]) -> int | None:
    """How many threads suit the gradient of a value in some leaves; None: leave them. The caller's random numbers
    stay.
    """
    device = leaves[0].device
    try:
        with measuring(device) as found:
            if found.flops == float("inf"):
                return None
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.autograd.grad(value(), leaves, allow_unused=True)
    except Exception:  # the caller will hit the same error and report it better
        return None
    return suited(found.flops, device)


def _usual() -> set[int]:
    """The thread counts that torch may have chosen itself: the available cores, with or without siblings."""
    if not hasattr(os, "sched_getaffinity"):
        return {_FIRST}  # there is no telling
    mine = os.sched_getaffinity(0)
    return {len(mine), len({_siblings(core) for core in mine})}


def _siblings(core: int) -> str:
    """What distinguishes physical cores."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(core)


_FIRST = torch.get_num_threads()  # before the user had time to change it, in most programs
