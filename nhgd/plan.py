"""Memory and time of every inverse, before anything is allocated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nhgd.data.batch import Batch, move
from nhgd.errors import InputError
from nhgd.inverse import INVERSES, AbstractInverse, resolve
from nhgd.memory import synchronise
from nhgd.problem import Bilevel
from nhgd.validation import validated


@dataclass(frozen=True)
class Plan:
    """What each inverse would need.

    Attributes:
        rows: one dict for each inverse: inverse, bytes (its state and one solve, beyond the graph of an inner gradient),
            milliseconds (of one solve), fits (in the memory that is free now), note.
        dimension: D, the number of inner parameters.
        outer_dimension: the number of outer parameters.
        free_bytes: memory free on theta's device, None where it cannot be asked.
        gradient_milliseconds: one inner gradient: measured where a batch was given, else estimated from D.
    """

    rows: list[dict[str, Any]]
    dimension: int
    outer_dimension: int
    free_bytes: int | None
    gradient_milliseconds: float
    measured: bool

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        how = "measured" if self.measured else "estimated"
        lines = [
            f"D = {self.dimension}, outer D = {self.outer_dimension}, one inner gradient {self.gradient_milliseconds:.3g} ms"
            f" ({how})",
            f"{'inverse':<16}{'memory':>12}{'ms':>12}  note",
        ]
        for row in self.rows:
            lines.append(f"{row['inverse']:<16}{readable(row['bytes']):>12}{row['milliseconds']:>12.3g}  {row['note']}")
        return "\n".join(lines)


@validated
def plan(
    problem: Bilevel,
    inner_batch: Batch | None = None,
    inverses: str | AbstractInverse | Sequence[str | AbstractInverse] | None = None,
    batch_size: int = 1024,
) -> Plan:
    """Estimate bytes and milliseconds of each inverse. Nothing of the estimated size is allocated.

    Args:
        problem: a `Bilevel`.
        inner_batch: with one, an inner gradient is timed; without, its time is estimated as 6 D operations a sample.
        inverses: names or objects; default: all that are known.
        batch_size: samples a batch, for the estimate.

    >>> problem = Bilevel(lambda t, v, x: (x @ t - v) ** 2, lambda t, v, x: t.sum(), torch.zeros(1000), torch.zeros(()))
    >>> {row["inverse"]: row["bytes"] for row in plan(problem, inverses=["cg", "exact"]).rows}
    {'cg': 24000, 'exact': 24000000}
    """
    theta = problem.theta
    asked = [inverses] if isinstance(inverses, (str, AbstractInverse)) else inverses
    chosen = [resolve(i) for i in (list(INVERSES) if asked is None else asked)]
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}.")
    flops = _flops_per_second(theta.device, theta.dtype)
    if inner_batch is None:
        gradient = 6.0 * theta.numel * batch_size / flops
    else:
        gradient = _time_gradient(problem, move(inner_batch, theta.device))
    free = free_bytes(theta.device)
    rows = []
    for inverse in chosen:
        size = inverse.memory(theta)
        products = theta.numel if inverse.products is None else inverse.products
        # A Hessian product costs about two gradients; a dense solve D^3 / 3 operations beside its products.
        work = 2 * gradient * products + (theta.numel**3 / 3 / flops if inverse.products is None else 0.0)
        notes = []
        if free is not None and size > free:
            notes.append(f"does not fit: {readable(free)} free")
        limit = getattr(inverse, "max_dim", None)
        if limit is not None and theta.numel > limit:
            notes.append(f"refused above max_dim = {limit}")
        notes.extend(inverse.cautions(theta))
        rows.append(
            {
                "inverse": inverse.name,
                "bytes": size,
                "milliseconds": 1e3 * (work + size / 1e10),
                "fits": free is None or size <= free,
                "note": "; ".join(notes),
            }
        )
    return Plan(rows, theta.numel, problem.v.numel, free, 1e3 * gradient, inner_batch is not None)


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a device now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def readable(size: int) -> str:
    """Bytes for people.

    >>> readable(20_000_000)
    '20.0 MB'
    """
    number = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """What this machine does on a matrix product that takes a few milliseconds."""
    size = 512 if device.type == "cpu" else 4096
    a = torch.ones(size, size, device=device, dtype=dtype)
    a @ a
    synchronise(device)
    started = time.perf_counter()
    a @ a
    synchronise(device)
    return 2.0 * size**3 / max(time.perf_counter() - started, 1e-9)


def _time_gradient(problem: Bilevel, batch: Batch) -> float:
    def gradient() -> None:
        with problem.guarded(seed=0), torch.enable_grad():
            torch.autograd.grad(problem.objective(batch), problem.theta.leaves, allow_unused=True)
        synchronise(problem.theta.device)

    gradient()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        gradient()
        times.append(time.perf_counter() - started)
    return sorted(times)[1]
