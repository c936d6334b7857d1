"""When a run ends: one small class for each stop rule.

`Solver.run(steps=1000, budget="60s", plateau=50)` makes the rules of this file; `Solver.run(stop=[MyRule(...)])` adds
others. The run ends when the first of them holds, and `Solution.result` is the name of that one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, TypeVar, final

from typing_extensions import override

from nhgd._validation import Validated, shown
from nhgd.errors import InputError

S = TypeVar("S")
Row = Mapping[str, Any]  # of the history, one for each outer step
HVP = 2  # gradients that a product with a second derivative costs: two more passes through the graph of one
FALL = 1e-4  # of the outer loss: by how much it must fall for a plateau to end


@dataclass(frozen=True)
class Spent:
    """What a run has used so far.

    Attributes:
        steps: outer steps.
        seconds: of solving.
        requested: whether `Solver.stop` was called.
        gradients: gradient-equivalents, as `gradient_equivalents` counts them.
    """

    steps: int
    seconds: float
    requested: bool = False
    gradients: float = 0.0


def gradient_equivalents(counts: Mapping[str, float]) -> float:
    """What the derivatives of a row of the history cost, in gradients of one batch: a Hessian product counts as two.

    A cross derivative counts as one, beside the pass that some of them need and that is counted as a gradient. What an
    inverse computes without derivatives, such as an eigendecomposition, is not counted: that takes time, but no calls.

    >>> gradient_equivalents({"gradients": 11, "hvps": 20, "cross": 1})
    52.0
    """
    return float(counts["gradients"] + HVP * counts["hvps"] + counts["cross"])


@dataclass(frozen=True)
class AbstractStop(Validated, ABC, Generic[S]):
    """A stop rule: a frozen dataclass of its settings, whose memory of a run, if it needs one, is a state of type S.

    A state is a fold over the rows of the history, so a resumed run has it again without keeping it.

    Attributes:
        name: the `Solution.result` of a run that it ends.
        clocked: whether it reads `seconds`; data-parallel workers then agree on them.
    """

    name: ClassVar[str]
    clocked: ClassVar[bool] = False

    def init(self) -> S | None:
        """The state before the first step; None for rules without one."""
        return None

    def update(self, state: S, row: Row) -> S:
        """The state after one more outer step."""
        return state

    @abstractmethod
    def holds(self, spent: Spent, state: S) -> bool:
        """Whether the run ends here."""

    def fraction(self, spent: Spent) -> float:
        """The completed part of the run, 0 to 1, which schedules follow; 0 if the rule cannot tell."""
        return 0.0


@final
@dataclass(frozen=True)
class Steps(AbstractStop[None]):
    """Stop after `count` outer steps.

    >>> rule = Steps(10)
    >>> rule.holds(Spent(steps=9, seconds=0.0), None), rule.fraction(Spent(steps=9, seconds=0.0))
    (False, 0.9)
    """

    name: ClassVar[str] = "steps"
    count: int

    def __post_init__(self) -> None:
        _at_least_1("steps", self.count)

    @override
    def holds(self, spent: Spent, state: None) -> bool:
        return spent.steps >= self.count

    @override
    def fraction(self, spent: Spent) -> float:
        return spent.steps / self.count


@final
@dataclass(frozen=True)
class Budget(AbstractStop[None]):
    """Stop after `limit` seconds of solving; metrics and checkpoints do not count."""

    name: ClassVar[str] = "budget"
    clocked: ClassVar[bool] = True
    limit: float

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf"):
            raise InputError(f"A budget is a time above 0 in seconds, got {self.limit}.")

    @override
    def holds(self, spent: Spent, state: None) -> bool:
        return spent.seconds >= self.limit

    @override
    def fraction(self, spent: Spent) -> float:
        return spent.seconds / self.limit


@final
@dataclass(frozen=True)
class Gradients(AbstractStop[None]):
    """Stop after derivatives worth `limit` gradients, see `gradient_equivalents`: a budget that no clock disturbs."""

    name: ClassVar[str] = "gradients"
    limit: float

    def __post_init__(self) -> None:
        if not 0 < self.limit < float("inf"):
            raise InputError(f"A budget of gradients is a number above 0, got {self.limit}.")

    @override
    def holds(self, spent: Spent, state: None) -> bool:
        return spent.gradients >= self.limit

    @override
    def fraction(self, spent: Spent) -> float:
        return spent.gradients / self.limit


@dataclass(frozen=True)
class Stall:
    """The lowest outer loss that counted, and the outer steps since."""

    best: float = float("inf")
    steps: int = 0


@final
@dataclass(frozen=True)
class Plateau(AbstractStop[Stall]):
    """The outer loss has not fallen by a part of 1e-4 for `patience` outer steps.

    >>> rule = Plateau(patience=2)
    >>> state = rule.init()
    >>> for loss in (1.0, 0.5, 0.5, 0.49999):
    ...     state = rule.update(state, {"outer_loss": loss})
    >>> rule.holds(Spent(steps=4, seconds=0.0), state)
    True
    """

    name: ClassVar[str] = "plateau"
    patience: int

    def __post_init__(self) -> None:
        _at_least_1("plateau", self.patience)

    @override
    def init(self) -> Stall:
        return Stall()

    @override
    def update(self, state: Stall, row: Row) -> Stall:
        """Start again at a loss that is lower by enough, else count one more step."""
        loss, best = row["outer_loss"], state.best
        if best == float("inf") or loss < best - FALL * abs(best):
            return Stall(loss, 0)
        return Stall(best, state.steps + 1)

    @override
    def holds(self, spent: Spent, state: Stall) -> bool:
        return state.steps >= self.patience


@final
@dataclass(frozen=True)
class Requested(AbstractStop[None]):
    """`Solver.stop` was called, by a signal handler or another thread. Part of every run."""

    name: ClassVar[str] = "stopped"

    @override
    def holds(self, spent: Spent, state: None) -> bool:
        return spent.requested


_OWN: dict[str, type[AbstractStop[Any]]] = {rule.name: rule for rule in (Steps, Budget, Gradients, Plateau)}


def chosen(
    steps: int | None, seconds: float | None, plateau: int | None, further: Sequence[AbstractStop[Any]]
) -> list[AbstractStop[Any]]:
    """The rules of a run, in the order in which they are asked."""
    if isinstance(further, Mapping) or not all(isinstance(rule, AbstractStop) for rule in further):
        raise InputError(f"stop takes a list of rules, such as nhgd.stop.Plateau(50), got {shown(further)}.")
    return [
        *([] if steps is None else [Steps(steps)]),
        *([] if seconds is None else [Budget(seconds)]),
        *([] if plateau is None else [Plateau(plateau)]),
        *further,
    ]


class Run:
    """One call of `Solver.run`: its rules with their states, and its start.

    Args:
        rules: in the order in which they are asked.
        first: the outer steps that the solver had taken before.
        began: the seconds of solving before.
        gradients: the gradient-equivalents before.
    """

    def __init__(self, rules: Sequence[AbstractStop[Any]], first: int, began: float, gradients: float = 0.0) -> None:
        self.rules = (*rules, Requested())
        self.first = first
        self.began = began
        self.gradients = gradients
        self._states: list[Any] = [rule.init() for rule in self.rules]

    @property
    def clocked(self) -> bool:
        """Whether a rule reads the clock."""
        return any(rule.clocked for rule in self.rules)

    def note(self, row: Row) -> None:
        """One more outer step."""
        self._states = [rule.update(state, row) for rule, state in zip(self.rules, self._states, strict=True)]

    def ended_by(self, spent: Spent) -> str | None:
        """The name of the first rule that holds, if any does."""
        pairs = zip(self.rules, self._states, strict=True)
        return next((rule.name for rule, state in pairs if rule.holds(spent, state)), None)

    def steps_until_check(self, spent: Spent) -> int:
        """How many more outer steps may be taken before the rules must be checked; one if they read each row."""
        left = 2**30
        for rule in self.rules:
            if isinstance(rule, Steps):
                left = min(left, rule.count - spent.steps)
            elif not isinstance(rule, (Budget, Gradients, Requested)):
                return 1
        return max(1, left)

    def fraction(self, spent: Spent) -> float:
        """The part of the run that is over, by the rule that is nearest to its end."""
        return max(rule.fraction(spent) for rule in self.rules)

    def kept(self) -> dict[str, Any]:
        """The run as plain numbers, for a checkpoint. Rules from outside this file are stored by name only."""
        rules = [
            {"name": rule.name, "settings": asdict(rule) if type(rule) is _OWN.get(rule.name) else None}
            for rule in self.rules[:-1]
        ]
        return {"first": self.first, "began": self.began, "rules": rules}


@dataclass(frozen=True)
class Interrupted:
    """A run that a checkpoint was written in: its start and its rules.

    Attributes:
        first, began: as of `Run`.
        rules: those that were kept.
        lost: the names of those that could not be kept.
    """

    first: int
    began: float
    rules: tuple[AbstractStop[Any], ...]
    lost: tuple[str, ...]

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> Interrupted:
        """From what `Run.kept` gave."""
        own = [rule for rule in kept["rules"] if rule["settings"] is not None]
        return cls(
            kept["first"],
            kept["began"],
            tuple(_OWN[rule["name"]](**rule["settings"]) for rule in own),
            tuple(rule["name"] for rule in kept["rules"] if rule["settings"] is None),
        )

    def resumed(self, rules: Sequence[AbstractStop[Any]], history: Iterable[Row]) -> Run:
        """The resumed run: with its own rules unless others are given, and all earlier work counted."""
        if not rules and self.lost:
            raise InputError(
                f"A checkpoint cannot store the stop rule {' and '.join(self.lost)} of the interrupted run. Give the"
                " rules again: run(stop=[...])."
            )
        run = Run(rules or self.rules, self.first, self.began)
        for row in history:
            if row["step"] > self.first:
                run.note(row)
            elif row["step"] == self.first and any(isinstance(rule, Gradients) for rule in run.rules):
                run.gradients = gradient_equivalents(row)
        return run


def _at_least_1(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value}.")
