"""A run's own random numbers, kept apart from the caller's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


class Randomness:
    """The state of every global generator, as a run sees it.

    Inside `scope` the generators of torch (CPU and the device in use), NumPy and Python are the run's; outside they are
    the caller's, as they were.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        caller = self._get()
        try:
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002  user code may draw from the global generator
            random.seed(seed)
            self._states = self._get()
        finally:
            self._set(caller)

    def _get(self) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None
        return torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()  # noqa: NPY002

    def _set(self, states: tuple[Any, ...]) -> None:
        cpu, cuda, numpy, python = states
        torch.set_rng_state(cpu)
        if self._cuda is not None and cuda is not None:
            torch.cuda.set_rng_state(cuda, self._cuda)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Draw from the run's generators inside."""
        caller = self._get()
        self._set(self._states)
        try:
            yield
        finally:
            self._states = self._get()
            self._set(caller)
