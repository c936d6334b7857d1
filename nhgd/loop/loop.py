"""What an algorithm acts on: two data streams, two optimisers, projections and counters.

An algorithm says who moves when; how a step is taken, recorded, projected and counted is here, once for all of them.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, SGD, Optimizer
from torch.utils.data.distributed import DistributedSampler

from nhgd import _threads as threads
from nhgd._randomness import Randomness
from nhgd._recording.recorder import Recorder
from nhgd._tree import map_tensors, tensors
from nhgd._validation import shown
from nhgd.data.batch import Batch, move
from nhgd.data.loader import Data, Stream
from nhgd.data_parallel import Shard, Team
from nhgd.errors import InputError, NhgdError, NonFiniteError, RunError
from nhgd.execution.base import AbstractExecutor
from nhgd.hypergradients.base import Hypergradient
from nhgd.hypergradients.implicit import Complaints, implicit
from nhgd.inverse.base import AbstractInverse
from nhgd.loop.settings import LoopSettings, OptimizerFactory
from nhgd.loop.sharing import Level, is_mean_of_parts
from nhgd.oracle import Oracle, OracleCalls
from nhgd.problem import Bilevel
from nhgd.record import InnerStep
from nhgd.schedule import Clock, Rate, Schedule
from nhgd.schedule import resolve as resolve_rate
from nhgd.variable import Variable

MOST_BATCHES = 1_000_000  # at one point
RECENT = 64
STEP_SEED = 0x9E3779B1  # odd: torch's generator on a CPU takes the low 32 bits of a seed, and they differ at every step


@dataclass(frozen=True)
class StepInfo:
    """What one outer step tells: the losses, how far the curvature lagged, and anything else by name."""

    outer_loss: float
    inner_loss: float
    hypergradient_norm: float
    lag: int = 0
    notes: dict[str, Any] = field(default_factory=dict)


class Mover:
    """Moves one variable: an optimiser, its step sizes, and a projection."""

    def __init__(
        self, variable: Variable, level: str, optimizer: OptimizerFactory | None, rate: Rate | None, default: float
    ) -> None:
        self.variable = variable
        leaves = list(variable.leaves)
        self.schedule: Schedule | None = None if rate is None else resolve_rate(rate, f"{level}_lr")
        if optimizer is None or (isinstance(optimizer, type) and issubclass(optimizer, Optimizer)):
            self.schedule = self.schedule or resolve_rate(default, f"{level}_lr")
            lr = self.schedule.rate(Clock())
            chosen: Any = SGD if optimizer is None else optimizer
            self.optimizer: Optimizer = chosen(leaves, lr=lr)
        elif isinstance(optimizer, Optimizer):
            self.optimizer = optimizer
        else:
            made = optimizer(leaves) if callable(optimizer) and not isinstance(optimizer, type) else None
            if not isinstance(made, Optimizer):
                returned = "" if made is None else f", which returned {shown(made)}"
                raise InputError(
                    f"{level}_optimizer must be a torch optimiser, its class, or a function of the parameters that returns one;"
                    f" got {shown(optimizer)}{returned}."
                )
            self.optimizer = made
        # A plain tensor is trained through an alias that requires a gradient; an optimiser may hold either of the two.
        held = {p.data_ptr(): p for group in self.optimizer.param_groups for p in group["params"]}
        self._targets = [held.get(leaf.data_ptr(), leaf) for leaf in leaves]
        if set(held) != {leaf.data_ptr() for leaf in leaves}:
            raise InputError(
                f"The {level} optimiser does not hold exactly the trainable tensors of {variable.role}. Pass a factory, for"
                f" example {level}_optimizer=lambda params: torch.optim.Adam(params, lr=1e-3)."
            )
        if level == "inner" and any(group.get("weight_decay") for group in self.optimizer.param_groups):
            warnings.warn(
                "The inner optimiser has weight_decay, which the hypergradient does not see. Set it to 0 and pass l2= to"
                " Bilevel instead.",
                stacklevel=4,
            )

    def rate(self, clock: Clock) -> float:
        """The step size now."""
        return self.schedule.rate(clock) if self.schedule is not None else float(self.optimizer.param_groups[0]["lr"])

    def move(self, gradient: Sequence[Tensor], clock: Clock, closure: Callable[[], Tensor] | None = None) -> None:
        """One optimiser step along a gradient, one tensor a leaf. LBFGS asks `closure` for more of them."""
        if self.schedule is not None:
            lr = self.schedule.rate(clock)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.give(gradient)
        if not isinstance(self.optimizer, LBFGS):
            self.optimizer.step()
        elif closure is not None:
            self.optimizer.step(closure)
        else:
            raise InputError(
                f"LBFGS asks for the loss of {self.variable.role} several times a step, which this method cannot tell it there."
                " Use another optimiser, for example torch.optim.Adam."
            )
        for target in self._targets:
            target.grad = None

    def give(self, gradient: Sequence[Tensor]) -> None:
        """Put a gradient where the optimiser looks for it."""
        for target, g in zip(self._targets, gradient, strict=True):
            target.grad = g.to(target.dtype)


class Loop:
    """One run's data, optimisers, projections, executor and counters."""

    def __init__(
        self,
        problem: Bilevel,
        inner_data: Iterable[Batch],
        outer_data: Iterable[Batch],
        settings: LoopSettings,
        executor: AbstractExecutor,
        inverse: AbstractInverse | None = None,
    ) -> None:
        device = problem.theta.device
        self.problem = problem
        self.settings = settings
        self.inner = Stream(inner_data, "inner_data", device)
        self.outer = Stream(outer_data, "outer_data", device)
        self.calls = OracleCalls()
        self.complaints = Complaints()
        self.clock = Clock()
        self._threads: tuple[int, int] | None = (
            None  # CPU threads to compute on, and those that torch had at the choice
        )
        self.theta = Mover(problem.theta, "inner", settings.inner_optimizer, settings.inner_lr, 0.1)
        self.v = Mover(problem.v, "outer", settings.outer_optimizer, settings.outer_lr, 0.01)
        self.executor = executor
        executor.join(problem.theta)
        self.team = executor.team
        self.division: dict[Level, str] = {}  # what the team found out about each level: "divided" or "replicated"
        self.team.broadcast(self.replicas())
        # A loader of the user's own may fill one buffer again and again, while records of the steps before still share it.
        self._refills = executor.background and not isinstance(inner_data, (Data, list, tuple))
        self.recent: deque[Batch] = deque(maxlen=RECENT)  # this outer step's last inner batches, for diagnosis
        self._plain = Recorder(problem, calls=self.calls)
        self.use(inverse)

    @property
    def threads(self) -> int:
        """How many CPU threads steps are computed on: as many as were chosen, unless the user has changed them since."""
        now = torch.get_num_threads()
        return now if self._threads is None or now not in self._threads else self._threads[0]

    def choose_threads(self, count: int | None) -> None:
        """Compute on so many CPU threads from now on; None: on as many as torch takes."""
        self._threads = None if count is None else (count, torch.get_num_threads())

    def computing(self) -> AbstractContextManager[None]:
        """Inside, as many CPU threads are used as suit the problem; afterwards as many as before."""
        return threads.limited(self.threads)

    def take_threads(self, count: int) -> None:
        """Choose as a run did that is gone on with, where it chose and nobody has said otherwise since."""
        if (
            count in (1, torch.get_num_threads())
            and self.problem.theta.device.type == "cpu"
            and not threads.are_chosen()
        ):
            self.choose_threads(count)

    def use(self, inverse: AbstractInverse | None) -> None:
        """Keep the state of this inverse from now on, beginning afresh."""
        self.inverse = inverse
        self._recording: Recorder | None = None
        if inverse is not None:
            self.executor.start(inverse, self.problem.theta, self.problem.v)
            if inverse.records is not None:
                self._recording = Recorder(self.problem, inverse.records, inverse.fisher, self.calls, inverse.couples)

    def recorder_memory(self) -> dict[str, Any] | None:
        """What the recorder has found out about the model; None where nothing is recorded."""
        return None if self._recording is None else self._recording.memory()

    def recall(self, memory: dict[str, Any] | None) -> None:
        """Let the recorder go on with what another had found out."""
        if self._recording is not None and memory is not None:
            self._recording.recall(memory)

    def implicit(
        self,
        batches: Sequence[Batch],
        start: Tensor | None = None,
        cross: Callable[[Tensor], list[Tensor]] | None = None,
    ) -> tuple[Hypergradient, int]:
        """The hypergradient where the inner loop has ended, on these batches and the next outer one; the lag of its curvature.

        All that can be done without the curvature is done before it is waited for. Arguments as of the implicit formula.
        """
        executor = self.executor
        waiting = executor.inner_loop_ended()
        at = self.oracle(batches, self.outer.next())
        try:
            outer = at.outer()
            if cross is None and waiting:  # else the graph would only take memory
                at.prepare()
        except NhgdError:
            raise
        except Exception as error:
            # The user's function may stumble over a theta that the curvature of an earlier record already speaks of.
            own = RunError(str(error))
            found = executor.root_cause(own)
            if found is own:
                raise
            raise found from error
        inverse, curvature, lag = executor.curvature()
        return implicit(at, inverse, curvature, start, cross, outer, self.complaints), lag

    def seed(self) -> int:
        """A fresh seed for a pass that will be replayed."""
        return int(torch.randint(2**31 - 1, ()))

    def replicas(self) -> list[Tensor]:
        """What every worker of a team holds a copy of."""
        variables = (self.problem.theta, self.problem.v)
        tensors = [leaf.detach() for variable in variables for leaf in variable.leaves]
        return tensors + [buffer for variable in variables for buffer, _ in variable.buffers()]

    def assert_equal(self) -> None:
        """Stop the run when the workers of a team no longer hold the same."""
        if self.team.size > 1:
            problem = self.problem
            self.team.assert_equal(
                v=problem.v.leaves,
                theta=problem.theta.leaves,
                buffers=[buffer for variable in (problem.theta, problem.v) for buffer, _ in variable.buffers()],
            )

    def divided(self, level: Level, batch: Batch) -> Batch | Shard:
        """This worker's part of a batch, or all of it: without a team, and where the loss is not a mean over samples."""
        team = self.team
        if not isinstance(team, Team) or batch is None or isinstance(batch, Shard):
            return batch
        stream = self.inner if level == "inner" else self.outer
        if isinstance(getattr(stream.source, "sampler", None), DistributedSampler):
            self.division[level] = "divided"
            return team.adopt(batch)
        if self.division.get(level) == "replicated":
            return batch
        part = team.share(batch)
        if isinstance(part, Shard) and level not in self.division:
            team.assert_equal(**{f"the first {level} batch": tensors(batch)})
            mean = is_mean_of_parts(self.problem, level, batch, part)
            self.division[level] = "divided" if mean else "replicated"
            if level == "inner" and not mean and team.rank == 0:
                warnings.warn(
                    "The inner loss of a batch is not the mean over its samples (batch statistics, or a sum), so every worker"
                    " computes all of it and nothing is gained by a team. Return one loss for each sample.",
                    stacklevel=2,
                )
        return part if self.division.get(level) == "divided" else batch

    def inner_batch(self) -> Batch:
        """The next inner batch."""
        batch = self.inner.next()
        if self._refills:
            batch = map_tensors(_own, batch)
        self.recent.append(batch)
        return batch

    def inner_batches(self, count: int | str) -> list[Batch]:
        """The next `count` inner batches, or "all": one pass over the data."""
        if count == "all":
            return [move(batch, self.problem.theta.device) for batch in self.inner.source]
        if int(count) > MOST_BATCHES:
            raise InputError(
                f"batches = {count} would hold more than {MOST_BATCHES:,} inner batches at once. Use batches='all' for one pass over"
                " the data, or fewer."
            )
        return [self.inner_batch() for _ in range(int(count))]

    def gradient(self, batch: Batch, record: bool = True, always: bool = False, seed: int | None = None) -> InnerStep:
        """The inner gradient on a batch, its record handed to the executor when the inverse wants it, or `always`.

        With a seed dropout is drawn from it, as a point's first batch does whose seed is less by one.
        """
        wanted = (
            record
            and self._recording is not None
            and self.inverse is not None
            and (always or self.inverse.needs_record(self.clock.total))
        )
        recorder = self._recording if wanted and self._recording is not None else self._plain
        part = self.divided("inner", batch)
        if seed is not None:
            torch.manual_seed(seed)
        if isinstance(part, Shard):
            # Workers draw dropout each for its own samples, and the common generators stand still.
            own = self._seed_of_step() if seed is None else seed
            with Randomness(self.team.seed(own), self.problem.theta.device).scope():
                found = recorder.step(part)
        else:
            found = recorder.step(part)
        if found.record is not None:
            self.executor.submit(found.record)
        return found

    def _seed_of_step(self) -> int:
        """A seed for this inner step, from the common generator, which stays where it is."""
        before = torch.get_rng_state()
        seed = self.seed()
        torch.set_rng_state(before)
        return seed + STEP_SEED * self.clock.total

    def inner_step(self, batch: Batch | None = None, record: bool = True, seed: int | None = None) -> Tensor:
        """Draw a batch, take one projected optimiser step on theta, and return the loss before it."""
        chosen = self.inner_batch() if batch is None else batch
        found = self.gradient(chosen, record, seed=seed)

        def closure() -> Tensor:
            again = self.gradient(chosen, record=False)
            self.theta.give(again.gradient)
            return again.value

        self.move_theta(found.gradient, closure)
        return found.value

    def move_theta(self, direction: Sequence[Tensor], closure: Callable[[], Tensor] | None = None) -> None:
        """One projected optimiser step on theta along a direction, and one tick of the inner clock."""
        self.theta.move(direction, self.clock, closure)
        self.project_theta()
        self.tick()

    def tick(self) -> None:
        """One inner step was taken."""
        self.clock.t += 1
        self.clock.total += 1

    def plain_rate(self, owner: str) -> float:
        """The size of the next inner step for a method that takes plain gradient steps; other optimisers are refused."""
        optimizer = self.theta.optimizer
        known = ("momentum", "weight_decay", "nesterov", "maximize")
        if (
            type(optimizer) is not SGD
            or any(group[name] for group in optimizer.param_groups for name in known)
            or (self.theta.schedule is None and len({float(group["lr"]) for group in optimizer.param_groups}) > 1)
        ):
            raise InputError(
                f"{owner} takes plain gradient steps on theta, so it works with no other inner optimiser. Leave"
                " inner_optimizer away and set inner_lr."
            )
        return self.theta.rate(self.clock)

    @contextmanager
    def elsewhere(self, theta: Tensor, v: Tensor | None = None) -> Iterator[None]:
        """Inside, theta (D,), and v (P,) if given, stand at another place; afterwards they are back where they were."""
        here = self.problem.theta.flat(), self.problem.v.flat()
        self.problem.theta.assign(theta)
        if v is not None:
            self.problem.v.assign(v)
        try:
            yield
        finally:
            self.problem.theta.assign(here[0])
            if v is not None:
                self.problem.v.assign(here[1])

    def projected(self, theta: Tensor) -> Tensor:
        """A vector (D,) after the projection of theta, which stays where it is."""
        if self.settings.project is None:
            return theta
        with self.elsewhere(theta):
            self.project_theta()
            return self.problem.theta.flat()

    def shift_theta(self, change: Tensor) -> None:
        """Add a vector (D,) to theta, project, and let the inner clock tick."""
        self.problem.theta.assign(self.problem.theta.flat() + change)
        self.project_theta()
        self.tick()

    @torch.no_grad()
    def project_theta(self) -> None:
        """Bring theta back onto the ball of radius R, or apply the user's projection."""
        rule = self.settings.project
        if rule is None:
            return
        if callable(rule):
            with self.problem.theta.view() as theta:
                _apply(rule, theta)
            return
        assert isinstance(rule, (int, float))  # as the solver has checked
        leaves = self.problem.theta.leaves
        norm = torch.stack([leaf.norm().to(self.problem.theta.dtype) for leaf in leaves]).norm()
        shrink = (rule / norm.clamp_min(torch.finfo(norm.dtype).tiny)).clamp_max(1.0)
        for leaf in leaves:
            leaf.mul_(shrink.to(leaf.dtype))

    def oracle(self, inner_batches: Sequence[Batch], outer_batch: Batch, seed: int | None = None) -> Oracle:
        """The current point with these batches, divided among the team. A seed given twice replays dropout."""
        seed = self.seed() if seed is None else seed
        inner = [self.divided("inner", batch) for batch in inner_batches]
        return Oracle(self.problem, inner, self.divided("outer", outer_batch), seed, self.calls)

    def move_v(self, gradient: Sequence[Tensor]) -> float:
        """One projected optimiser step on v along the hypergradient, clipped; its norm before. Non-finite ones are refused."""
        numbers = [torch.stack([g.double().norm() for g in gradient]).norm()]
        low = self.problem.lowest_weight()
        if low is not None:
            numbers.append(low.to(numbers[0]))
        read: list[float] = torch.stack(numbers).tolist()  # in one transfer
        norm = read[0]
        self.executor.raise_deferred()  # nothing is under way any more, because a number has come from the device
        if norm != norm or norm == float("inf"):
            raise NonFiniteError("the hypergradient")
        self.problem.check_weight(min(read[1:], default=None))
        clip = self.settings.outer_clip
        if clip is not None and norm > clip:
            gradient = [g * (clip / norm) for g in gradient]
        self.v.move(gradient, self.clock)
        self.project_v()
        return norm

    @torch.no_grad()
    def project_v(self) -> None:
        """Bring v back into its box, or apply the user's projection."""
        rule = self.settings.project_v
        if rule is None:
            return
        if callable(rule):
            with self.problem.v.view() as v:
                _apply(rule, v)
            return
        assert not isinstance(rule, (int, float))  # as the solver has checked
        low, high = rule
        for leaf in self.problem.v.leaves:
            leaf.clamp_(low, high)

    def begin(self) -> None:
        """A new outer step: the inner clock restarts and the executor is told."""
        self.clock.t = 0
        self.recent.clear()
        self.problem.check_ridge()
        if (self.clock.k & (self.clock.k - 1) == 0 and self.clock.k > 0) or self.clock.k % 256 == 255:
            self.assert_equal()  # often at first, before time is spent on a run that will be refused at its end
        if self.inverse is not None:
            self.executor.begin()


def _own(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of one in the memory of NumPy or of another process: a change there leaves no trace."""
    return tensor.clone() if tensor.device.type == "cpu" and not tensor.untyped_storage().resizable() else tensor


def _apply(rule: Callable[[Any], Any], given: Any) -> None:
    """A projection of the user's own: it changes what it is given in place, or returns what to put there."""
    found = rule(given)
    if isinstance(found, Tensor) and isinstance(given, Tensor):
        given.copy_(found)
    elif isinstance(found, dict) and isinstance(given, dict):
        for name, tensor in found.items():
            given[name].copy_(tensor)
    elif found is not None and found is not given:
        raise InputError(
            f"A projection must change what it is given in place or return the like of it; it returned a"
            f" {type(found).__name__}."
        )
