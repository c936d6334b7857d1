"""What a task, a preset, a method and settings as text choose together: one method on one task, before it runs."""

from nhgd._experiment.experiment import Built, Experiment

__all__ = ["Built", "Experiment"]
