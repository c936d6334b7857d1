"""The other processes of a run, as its solver sees them: they learn of errors and results, or are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from nhgd._solution import Solution
from nhgd.checkpoint import Checkpoints, Progress
from nhgd.execution.group import Group, Outcome


class Peers:
    """Informs the other processes of a run.

    Attributes:
        waiting: whether steps were taken whose results they have not received.
    """

    def __init__(self, group: Group, checkpoints: Checkpoints) -> None:
        self._group = group
        self._checkpoints = checkpoints
        self.waiting = False

    @contextmanager
    def informed(self) -> Iterator[None]:
        """On an error, inform the other processes so that none waits for this one, and release the folder."""
        try:
            yield
        except BaseException as error:
            self._checkpoints.release()
            self._group.fail(error)
            raise

    def finish(self, progress: Progress, solution: Solution) -> None:
        """Send the result of the run to the processes that served it."""

        def outcome() -> Outcome:
            values = {
                "history": progress.history,
                "stats": solution.stats,
                "result": solution.result,
                "step": progress.loop.clock.k,
                "seconds": progress.seconds,
            }
            return Outcome(values, progress.loop.problem.point())

        with self.informed(), self._checkpoints.named_in_errors():
            self._group.finish(outcome)
        self.waiting = False

    def serve(self, progress: Progress) -> Solution:
        """Keep curvature for the processes of the inner loop until they have finished; returns their result."""
        loop, problem = progress.loop, progress.loop.problem
        with self.informed(), self._checkpoints.named_in_errors(), loop.computing():
            values, point = self._group.serve()
        problem.set_point(point)
        progress.history, progress.seconds, loop.clock.k = values["history"], values["seconds"], values["step"]
        return Solution(problem.v.given, problem.theta.given, progress.history, values["stats"], values["result"])
