"""Who keeps the checkpoints of a run: when one is due, how it is written, and what was written last."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nhgd.algorithm.base import AbstractAlgorithm
from nhgd.algorithm.stage import Stage
from nhgd.checkpoint import contents, files
from nhgd.checkpoint.settings import packed, to_continue
from nhgd.checkpoint.tree import Classes, Unkept, expected, pack, unpack
from nhgd.errors import InputError
from nhgd.problem import Bilevel

USUAL = 30.0  # seconds
SHARE = 0.02  # of the time, at most, goes into checkpoints unless the user says how often


class Saved:
    """A checkpoint that was read: what a new solver needs to know first, and the rest for `Keeper.put_back`."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.document, self.tensors, self.number = files.read(self.path)

    @property
    def step(self) -> int:
        """The outer steps that had been taken."""
        return int(self.document["step"])

    def settings(self, given: Mapping[str, Any], problem: Bilevel) -> dict[str, Any]:
        """The settings of the solver that goes on; a problem or settings that do not fit are refused."""
        contents.check_portrait(self.path, self.document["problem"], problem)
        found = to_continue(self.path, self.document["settings"], given, problem)
        return {"checkpoint": self.path} | found

    def tree(self, name: str, classes: Classes, device: torch.device) -> Any:
        """One part of what was kept."""
        try:
            return unpack(self.document[name], self.tensors, classes, device)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.path} holds no {name} that this nhgd can read ({error}).") from error


class Keeper:
    """Writes the checkpoints of one run.

    Args:
        path: the folder they go into. What another run left there stays until this one writes its first.
        steps: outer steps between two of them.
        seconds: between two of them. Without either, 30, and so many more that they take a fiftieth of the time at most.
        stage, algorithm, state: of the run, before its first step.
        settings: of the solver, as given.
    """

    def __init__(
        self,
        path: str | Path,
        steps: int | None,
        seconds: float | None,
        stage: Stage,
        algorithm: AbstractAlgorithm,
        state: Any,
        settings: Mapping[str, Any],
    ) -> None:
        files.safetensors()
        self.path = Path(path)
        files.check_writable(self.path)
        self._steps, self._seconds = steps, seconds
        self._classes = contents.classes(stage, state)
        self._fixed = {
            "problem": contents.portrait(stage.problem),
            "optimisers": contents.optimisers(stage),
            "settings": packed(settings, algorithm),
        }
        self.step: int | None = None  # the outer step of the last one
        self._number: int | None = None
        self._written = time.monotonic()
        self._took = 0.0

    def due(self, step: int) -> bool:
        """Whether one is to be written after this outer step."""
        if self._steps is not None:
            return step % self._steps == 0
        interval = max(USUAL, self._took / SHARE) if self._seconds is None else self._seconds
        return time.monotonic() - self._written >= interval

    def rehearse(self, stage: Stage, state: Any, rest: Mapping[str, Any]) -> None:
        """Refuse a run that could not be kept, before its first step."""
        self._document(stage, state, rest)

    def write(self, stage: Stage, state: Any, rest: Mapping[str, Any]) -> None:
        """Keep the run as it stands between two outer steps."""
        began = time.monotonic()
        document, tensors = self._document(stage, state, rest)
        self._number = files.write(self.path, document, tensors, self._number)
        self.step = stage.clock.k
        self._written = time.monotonic()
        self._took = self._written - began

    def _document(
        self, stage: Stage, state: Any, rest: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        written = {
            "step": stage.clock.k,
            "torch": torch.__version__,
            "threads": stage.threads,
            "python": platform.python_version(),
            **self._fixed,
        }
        try:
            inverse = pack(stage.inverse, "inverse", tensors, opaque=True)
            kept = {"stage": contents.of_stage(stage), "state": state, **rest}
            written |= {name: pack(part, name, tensors, self._classes) for name, part in kept.items()}
        except Unkept as found:
            raise InputError(
                f"A checkpoint cannot hold a {found.kind}, which stands at {found.path} of this run. States and metrics are"
                " made of tensors, numbers, text, lists, tuples, dicts and the dataclasses that their fields announce."
            ) from found
        return written | {"inverse": inverse}, tensors

    def last(self) -> str:
        """A sentence that says which checkpoint is the last good one, with a space before it; nothing if there is none."""
        return "" if self.step is None else f" The last good checkpoint is {self.path}, outer step {self.step}."

    def put_back(self, saved: Saved, stage: Stage) -> tuple[Any, dict[str, Any]]:
        """Bring a fresh stage to where the saved run stood; the state of its method, and the rest that was kept."""
        contents.check_optimisers(saved.path, saved.document["optimisers"], self._fixed["optimisers"])
        stage.take_threads(saved.document["threads"])
        _warn_of_other_arithmetic(saved, stage.threads)
        device = stage.problem.theta.device
        self._use_inverse(saved, stage)
        found = saved.tree("stage", self._classes, device)
        contents.into_stage(stage, found)
        # The walks draw random numbers; where the generators end is put right by the caller afterwards.
        stage.inner.go_to(found["inner_data"])
        stage.outer.go_to(found["outer_data"])
        if self.path.absolute() == saved.path.absolute():
            self.step, self._number = saved.step, saved.number
        names = set(saved.document) - {*self._fixed, "step", "torch", "threads", "python", "stage", "state", "inverse"}
        rest = {name: saved.tree(name, {}, device) for name in sorted(names)}
        return saved.tree("state", self._classes, device), rest

    def _use_inverse(self, saved: Saved, stage: Stage) -> None:
        """Periods that a clock has chosen are taken over: measured again, they may come out differently."""
        node = saved.document["inverse"]
        if stage.inverse is None or node == pack(stage.inverse, "inverse", {}, opaque=True):
            return
        stage.use(saved.tree("inverse", expected(stage.inverse), stage.problem.theta.device))


def _warn_of_other_arithmetic(saved: Saved, threads: int) -> None:
    was = saved.document["torch"], saved.document["threads"]
    now = torch.__version__, threads
    if was != now:
        warnings.warn(
            f"{saved.path} was written with torch {was[0]} and {was[1]} thread(s); now it is {now[0]} and {now[1]}. The run goes"
            " on, but its last digits may differ from those of an unbroken run.",
            stacklevel=4,
        )
