"""Problems with data, metrics and known answers, one file each."""

from __future__ import annotations

from nhgd._registry import Registry
from nhgd._validation import validated
from nhgd.task.base import AbstractTask, Instance
from nhgd.task.cleaning import Cleaning
from nhgd.task.distillation import Distillation
from nhgd.task.fewshot import FewShot
from nhgd.task.imbalance import Imbalance
from nhgd.task.l2 import L2
from nhgd.task.own import OwnProblem
from nhgd.task.pde.control import PDE
from nhgd.task.quadratic import Quadratic

TASKS = Registry("task", AbstractTask, [found for found in list(vars().values()) if found is not OwnProblem])


@validated
def resolve(task: str | AbstractTask, preset: str = "default") -> AbstractTask:
    """A task from its name and a preset of it, or itself."""
    if isinstance(task, AbstractTask):
        return task
    cls = TASKS[task]
    with TASKS.making(task):
        return cls.preset(preset)


__all__ = [
    "L2",
    "PDE",
    "TASKS",
    "AbstractTask",
    "Cleaning",
    "Distillation",
    "FewShot",
    "Imbalance",
    "Instance",
    "OwnProblem",
    "Quadratic",
    "resolve",
]
