"""A run's own random numbers, kept apart from the caller's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor


def generators(device: torch.device) -> dict[str, Any]:
    """The states of the global generators of torch (CPU and a CUDA device), NumPy and Python: tensors and numbers by
    name.
    """
    numpy: Any = np.random.get_state()  # noqa: NPY002
    version, python, gauss = random.getstate()
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": torch.from_numpy(numpy[1].astype(np.int64)),
        "numpy_rest": [int(numpy[2]), int(numpy[3]), float(numpy[4])],
        "python": torch.tensor(python, dtype=torch.int64),
        "python_rest": [version, gauss],
    }


def set_generators(state: dict[str, Any], device: torch.device) -> None:
    """Restore states that `generators` returned."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and isinstance(state["cuda"], Tensor):
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    np.random.set_state(("MT19937", state["numpy"].numpy().astype(np.uint32), *state["numpy_rest"]))  # noqa: NPY002
    version, gauss = state["python_rest"]
    random.setstate((version, tuple(state["python"].tolist()), gauss))


@contextmanager
def generators_restored(device: torch.device) -> Iterator[None]:
    """A context that restores the global generators, for work that a resumed run does again."""
    before = generators(device)
    try:
        yield
    finally:
        set_generators(before, device)


def states(device: torch.device) -> list[Tensor]:
    """The states of torch's global generators, of the CPU and of a CUDA device; faster than `generators`."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_states(found: list[Tensor], device: torch.device) -> None:
    """Restore states that `states` returned."""
    torch.set_rng_state(found[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(found[1], device)


def state_bytes(device: torch.device) -> tuple[bytes, ...]:
    """The states of torch's global generators as bytes, which any draw changes."""
    return tuple(state.numpy().tobytes() for state in states(device))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which torch draws from a seed, on the CPU and on one device; the generators are restored after
    it.
    """
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else [], device_type="cuda"):
        # torch.manual_seed would reseed every device, also those whose state was not kept.
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


class Randomness:
    """The state of every global generator, as a run sees it.

    Inside `scope` the generators of torch (CPU and the device in use), NumPy and Python are the run's; outside they are
    the caller's, as they were.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device
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
        """A context in which all draws come from the run's generators."""
        caller = self._get()
        self._set(self._states)
        try:
            yield
        finally:
            self._states = self._get()
            self._set(caller)

    def state(self) -> dict[str, Any]:
        """The states of the run's generators, as from `generators`."""
        with self.scope():
            return generators(self._device)

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the run's generators."""
        with self.scope():
            set_generators(state, self._device)
