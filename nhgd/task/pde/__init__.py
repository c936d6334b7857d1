"""Control of the heat equation: the task, and the equation it is about."""

from nhgd.task.pde.control import PDE as PDE
