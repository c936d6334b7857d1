"""Every task, small, with steps that lower its outer loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nhgd.task import L2, PDE, AbstractTask, Cleaning, Distillation, FewShot, Imbalance, Quadratic


@dataclass(frozen=True)
class TaskCase:
    """A task, small, with outer steps of a method that lower its outer loss, and the inner gradient norm it can solve to."""

    make: Callable[[], AbstractTask]
    method: str = "aid"
    steps: int = 5
    tol: float = 1e-11
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the task, and what tells this case from its others."""
        return f"{self.make().name} {self.label}".strip()


TASKS: list[TaskCase] = [
    TaskCase(lambda: Quadratic.preset("quick")),
    TaskCase(lambda: L2.preset("quick"), "nhgd"),
    TaskCase(lambda: L2.preset("ijcnn1-like").with_settings({"samples": 300, "batch": 40}), label="ijcnn1"),
    TaskCase(lambda: L2.preset("covtype-like").with_settings({"samples": 1500, "batch": 40}), label="covtype"),
    TaskCase(
        lambda: Cleaning.preset("quick").with_settings({"weights": "clip", "momentum": 0.0, "start": None}),
        "nhgd",
        tol=3e-3,
        label="clip",
    ),
    TaskCase(
        lambda: Cleaning(dataset="digits", train=200, trusted=60, dtype="float64", start=0.95), tol=1e-6, label="loss"
    ),
    TaskCase(
        lambda: Cleaning(dataset="digits", train=200, trusted=60, dtype="float64", weights="net"),
        steps=15,
        tol=1e-6,
        label="net",
    ),
    TaskCase(lambda: Distillation.preset("quick").with_settings({"dtype": "float64"}), "nhgd", tol=1e-8),
    TaskCase(
        lambda: FewShot(
            dataset="digits", ways=2, shots=2, queries=2, episodes=4, test_episodes=5, width=2, dtype="float64"
        ),
        tol=1e-8,
    ),
    TaskCase(
        lambda: Imbalance.preset("quick").with_settings({"most": 20, "ratio": 10.0, "dtype": "float64"}), tol=1e-6
    ),
    TaskCase(
        lambda: PDE(nu=0.1, interior=40, side=6, initial=8, width=9, depth=2, times=6, pretraining=40, dtype="float64"),
        "nhgd",
        15,
        tol=1e-6,
    ),
]
