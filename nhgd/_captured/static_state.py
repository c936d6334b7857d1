"""The state of a run at fixed memory addresses: variables, optimisers, and the states of a method."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nhgd._randomness import generators, set_generators
from nhgd._tree import map_leaves, map_tensors
from nhgd.checkpoint import Progress
from nhgd.inverse.base import Learned


class Place(NamedTuple):
    """A leaf of a tree, and its container."""

    path: str
    owner: Any
    key: Any
    value: Any

    def now(self) -> Any:
        """The leaf at present."""
        return getattr(self.owner, self.key) if is_dataclass(self.owner) else self.owner[self.key]

    def put(self, value: Any) -> None:
        """Replace the leaf."""
        if is_dataclass(self.owner):
            object.__setattr__(self.owner, self.key, value)
        else:
            self.owner[self.key] = value


def places(tree: Any, path: str = "", owner: Any = None, key: Any = None) -> Iterator[Place]:
    """The leaves of dataclasses, dicts and lists."""
    if is_dataclass(tree) and not isinstance(tree, type):
        for name, item in vars(tree).items():
            yield from places(item, f"{path}.{name}", tree, name)
    elif isinstance(tree, dict):
        for name, item in tree.items():
            yield from places(item, f"{path}[{name!r}]", tree, name)
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            yield from places(item, f"{path}[{i}]", tree, i)
    else:
        yield Place(path, owner, key, tree)


class StaticState:
    """The states of a run, whose tensors keep their addresses while their values change."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loop = progress.loop
        self._slots: dict[str, Tensor] = {}
        self._floats: set[str] = set()
        self._point: list[Tensor] = []
        self._counted: dict[str, Place] | None = None
        self.allocate()

    def allocate(self) -> None:
        """Give every tensor of the states memory of its own; numbers that an inverse has learnt become tensors."""
        progress, executor = self._progress, self._loop.executor
        progress.state = map_tensors(torch.clone, progress.state)
        if self._learner is not None:
            device = self._loop.problem.theta.device
            state = executor.keep()
            state = map_leaves(lambda leaf: _number(leaf, device), map_tensors(torch.clone, state))
            self._floats = {p.path for p in places(executor.keep()) if type(p.value) is float}
            executor.restore(state)
        self._slots = {p.path: p.value for p in self._places() if isinstance(p.value, Tensor)}

    def release(self) -> None:
        """Turn the numbers of an inverse back into floats, for a checkpoint or an eager step."""
        if self._learner is not None:
            for place in places(self._loop.executor.keep()):
                if place.path in self._floats and isinstance(place.value, Tensor):
                    place.put(float(place.value))

    def reattach(self) -> bool:
        """Undo `release`; False if the states were replaced meanwhile."""
        self._counted = None
        for place in list(self._places()):
            slot = self._slots.get(place.path)
            if slot is not None and type(place.value) is float:
                slot.fill_(place.value)
                place.put(slot)
        found = {p.path: p.value for p in self._places() if isinstance(p.value, Tensor)}
        return found.keys() == self._slots.keys() and all(found[path] is t for path, t in self._slots.items())

    @property
    def _learner(self) -> Learned[Any] | None:
        return None if self._loop.inverse is None else self._loop.inverse.learner

    def _trees(self) -> list[tuple[str, Any]]:
        found = [("state", self._progress.state)]
        return found if self._learner is None else [*found, ("curvature", self._loop.executor.keep())]

    def _places(self) -> Iterator[Place]:
        for name, tree in self._trees():
            yield from places(tree, name)

    def settle(self, rebind: bool = True) -> bool:
        """Copy the states that a step has left back to their fixed addresses. False if their form has changed.

        rebind: let the states hold those tensors. Without it they stay as they are, because eager sections of a
        captured step may refer to them.
        """
        self._counted = None
        found = [p for p in self._places() if isinstance(p.value, Tensor)]
        if {p.path: (p.value.shape, p.value.dtype) for p in found} != {
            path: (t.shape, t.dtype) for path, t in self._slots.items()
        }:
            return False
        memory = {t.untyped_storage().data_ptr() for t in self._slots.values()}
        moved = [(p, p.value) for p in found if p.value is not self._slots[p.path]]
        # A tensor may have come from another's place.
        apart = [(p, t.clone() if t.untyped_storage().data_ptr() in memory else t) for p, t in moved]
        _copy_together([self._slots[place.path] for place, _ in apart], [tensor for _, tensor in apart])
        if rebind:
            for place, _ in apart:
                place.put(self._slots[place.path])
        return True

    def counters(self) -> dict[str, Any]:
        """Integers and other leaves of the states that are not tensors."""
        return {p.path: p.value for p in self._places() if not isinstance(p.value, Tensor)}

    def owners(self) -> dict[str, int]:
        """The container of each leaf, by its id."""
        return {p.path: id(p.owner) for p in self._places()}

    def count(self, steps: dict[str, int]) -> None:
        """Increase integers of the states. Their places are found once, until an eager step replaces them."""
        if self._counted is None or not steps.keys() <= self._counted.keys():
            self._counted = {p.path: p for p in self._places() if type(p.value) is int}
        for path, more in steps.items():
            place = self._counted[path]
            place.put(place.now() + more)

    def tensors(self) -> list[Tensor]:
        """Everything a step changes."""
        return [*self.point(), *self._moments(), *self._slots.values()]

    def point(self) -> list[Tensor]:
        """theta and v, and their buffers."""
        if not self._point:
            variables = (self._loop.problem.theta, self._loop.problem.v)
            self._point += [leaf.detach() for variable in variables for leaf in variable.leaves]
            self._point += [b for variable in variables for b in variable.named_buffers().values()]
        return self._point

    @property
    def precision(self) -> torch.dtype:
        """Of theta."""
        return self._loop.problem.theta.dtype

    def in_place(self) -> bool:
        """Whether theta and v still have their addresses."""
        leaves = [leaf for variable in (self._loop.problem.theta, self._loop.problem.v) for leaf in variable.leaves]
        return all(a.data_ptr() == b.data_ptr() for a, b in zip(leaves, self.point(), strict=False))

    def _moments(self) -> list[Tensor]:
        movers = (self._loop.theta, self._loop.v)
        states = [state for mover in movers for state in mover.optimizer.state.values()]
        return [t for state in states for t in state.values() if isinstance(t, Tensor)]

    def snapshot_host(self) -> Callable[[], None]:
        """Note what the host keeps; the function that is returned restores it."""
        progress, loop = self._progress, self._loop
        recording, executor = loop._recording, loop.executor
        objects = [loop.clock, loop.calls, loop.theta, loop.v, loop.inner, loop.outer, executor.traffic]
        if recording is not None:
            objects += [recording, recording.verification, recording.roots]
        kept = [(o, dict(vars(o))) for o in objects]
        walks = [(stream, copy.copy(stream._walk)) for stream in (loop.inner, loop.outer)]
        trees = [(p.owner, p.key, p.value) for p in self._places() if p.owner is not None]
        state, curvature = progress.state, None if self._learner is None else executor.keep()
        recent, device = list(loop.recent), loop.problem.theta.device
        drawn = generators(device)

        def restore() -> None:
            self._counted = None
            for o, values in kept:
                vars(o).update(values)
            for stream, walk in walks:
                stream._walk = walk
            for owner, key, value in trees:
                Place("", owner, key, None).put(value)
            progress.state = state
            if self._learner is not None:
                executor.restore(curvature)
            loop.recent.clear()
            loop.recent.extend(recent)
            set_generators(drawn, device)

        return restore


def _number(leaf: Any, device: torch.device) -> Any:
    return torch.tensor(leaf, dtype=torch.float64, device=device) if type(leaf) is float else leaf


@torch.no_grad()
def _copy_together(slots: list[Tensor], values: list[Tensor]) -> None:
    """Copy tensors to their places; on a GPU those of one dtype by one kernel."""
    kinds: dict[Any, list[int]] = {}
    for i, (slot, value) in enumerate(zip(slots, values, strict=True)):
        alike = slot.is_cuda and value.device == slot.device and value.dtype == slot.dtype
        kinds.setdefault(slot.dtype if alike else i, []).append(i)
    for members in kinds.values():
        if len(members) > 1:
            torch._foreach_copy_([slots[i] for i in members], [values[i] for i in members])
        else:
            slots[members[0]].copy_(values[members[0]])
