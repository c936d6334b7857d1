"""Every executor, and what it needs to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nhgd.execution import AbstractExecutor, Device, Distributed, Inline, Stream, Thread


@dataclass(frozen=True)
class ExecutorCase:
    """An executor.

    Args:
        make: the executor.
        label: what tells this case from others of the same executor.
        device: where theta must be.
        processes: how many take part.
        same_arithmetic: whether curvature is kept on the kind of device that theta is on, so that all bits are those of inline.
    """

    make: Callable[..., AbstractExecutor]
    label: str = ""
    device: str = "cpu"
    processes: int = 1
    same_arithmetic: bool = True

    @property
    def name(self) -> str:
        """The name of the executor, and what tells this case from its others."""
        return f"{self.make().name} {self.label}".strip()


def on_the_cpu(**settings: int) -> AbstractExecutor:
    """Curvature on the CPU, wherever theta is."""
    return Device("cpu", **settings)


EXECUTORS = [
    ExecutorCase(Inline),
    ExecutorCase(Thread),
    ExecutorCase(on_the_cpu),
    ExecutorCase(on_the_cpu, label="from a GPU", device="cuda", same_arithmetic=False),
    ExecutorCase(Stream, device="cuda"),
    ExecutorCase(Distributed, processes=2),
]
