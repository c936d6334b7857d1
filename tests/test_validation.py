"""Wrong types for every setting of everything public, found by walking the registries and the package's public names."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch

import nhgd
from nhgd._duration import seconds
from nhgd._validation import fitted
from nhgd.algorithm import ALGORITHMS
from nhgd.execution import EXECUTIONS
from nhgd.hypergradients import ESTIMATORS
from nhgd.inverse import CG, INVERSES, Iterative, SolveStats
from nhgd.likelihood import LIKELIHOODS
from nhgd.problem import Bilevel
from nhgd.schedule import Schedule
from nhgd.task import TASKS

# What the library makes, and nobody gives.
RESULTS = {"AlongReport", "Hypergradient", "Influence", "Plan", "Report", "Solution", "Table"}
STORED = {"LabelCleaner", "DatasetDistiller"}  # as scikit-learn has it, they look at their settings in fit
X, Y = torch.zeros(4, 2), torch.zeros(4)


def toy() -> Bilevel:
    return Bilevel(
        lambda theta, v, x: (theta - v).square().expand(len(x)),
        lambda theta, v, x: (theta - 3).square(),
        torch.tensor(0.0),
        torch.tensor(0.0),
    )


def everything() -> dict[str, Callable[..., Any]]:
    """Every class and function of the house that takes settings, by name."""
    found: dict[str, Any] = {}
    for registry in (INVERSES, ALGORITHMS, TASKS, ESTIMATORS, EXECUTIONS):
        found |= {cls.__name__: cls for cls in registry.values()}
    found |= {cls.__name__: cls for cls in Schedule.__subclasses__()}
    found |= {type(made).__name__: type(made) for made in LIKELIHOODS.values()}
    for name in (*nhgd.__all__, *STORED):
        thing = getattr(nhgd, name)
        is_error = isinstance(thing, type) and issubclass(thing, (Exception, Warning))
        if callable(thing) and not is_error and name not in RESULTS:
            found[name] = thing
    for package in (nhgd.inverse, nhgd.algorithm, nhgd.task, nhgd.execution, nhgd.hypergradients):
        found[f"{package.__name__}.resolve"] = package.resolve
    found["refined"] = nhgd.inverse.refined
    found["Solver.run"] = lambda **given: nhgd.Solver(toy(), [X], [X], method="aid-cg").run(**given)
    found["Solver.run"].__wrapped__ = nhgd.Solver.run
    return found


def parameters(thing: Any) -> dict[str, Any]:
    """The parameters of a class or a function with the types they may have."""
    function = thing.__init__ if isinstance(thing, type) else inspect.unwrap(thing)
    hints = get_type_hints(thing if isinstance(thing, type) and is_dataclass(thing) else function)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return {name: hints[name] for name in names if name in hints}


def kinds(hint: Any) -> Iterator[Any]:
    """The types that an annotation lists."""
    origin = get_origin(hint) or hint
    if origin in (Union, UnionType):
        for one in get_args(hint):
            yield from kinds(one)
    else:
        yield origin


def wrong(hint: Any) -> list[Any]:
    """Values that an annotation does not allow."""
    allowed = set(kinds(hint))
    if allowed & {Any, object, Iterable}:
        return []
    found: list[Any] = [object(), b"x", 1j]
    found += [None] if NoneType not in allowed else []
    found += ["no such thing"] if not allowed & {str, Path} else []
    found += [True, np.True_] if bool not in allowed else []
    found += [{"a": 1}] if dict not in allowed else []
    if not allowed & {int, float}:
        found += [5, np.int64(5)]
    if float not in allowed:
        found += [2.5, np.float32(2.5), torch.tensor(2.5)] if torch.Tensor not in allowed else [2.5]
    if int in allowed or float in allowed:
        found += [torch.zeros(3), 10**400]
    if Callable not in allowed and type not in allowed:
        found += [CG, print]
    if list not in allowed and tuple not in allowed and not any("Sequence" in str(kind) for kind in allowed):
        found.append([1, 2])
    return found


def given(thing: Any) -> dict[str, Any]:
    """What is needed to call a thing at all."""
    ready = {
        "problem": toy(),
        "inner_data": [X],
        "outer_data": [X],
        "inner_batch": X,
        "outer_batch": X,
        "inner": lambda theta, v, x: x,
        "outer": lambda theta, v, x: x.sum(),
        "theta": torch.zeros(2),
        "v": torch.zeros(2),
        "values": Y,
        "function": lambda k: 0.1,
        "task": "quadratic",
        "method": "nhgd",
        "execution": "inline",
        "estimator": "implicit",
        "inverse": "cg",
    }
    needed = {}
    for name, parameter in inspect.signature(inspect.unwrap(thing)).parameters.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            needed[name] = ready.get(name, 0.5)
    needed.pop("self", None)
    return needed


def called(thing: Any, name: str, value: Any) -> Any:
    """The thing with one parameter set, brought so far that it must have looked at it."""
    if name == "arrays":
        return thing(value)
    made = thing(**(given(thing) | {name: value}))
    if getattr(thing, "__name__", "") in STORED:
        return made.fit(np.zeros((6, 2)) + np.arange(6)[:, None], np.arange(6) % 2)
    return made


CASES = [(called_so, name) for called_so, thing in everything().items() for name in parameters(thing)]


@pytest.mark.parametrize("name", everything())
def test_every_annotation_can_be_read(name: str) -> None:
    """Those that cannot are not checked."""
    thing = everything()[name]
    function = thing.__init__ if isinstance(thing, type) else inspect.unwrap(thing)
    names = {
        n for n, p in inspect.signature(function).parameters.items() if n != "self" and p.kind is not p.VAR_KEYWORD
    }
    assert set(parameters(thing)) >= names


@pytest.mark.parametrize(("name", "parameter"), CASES, ids=[f"{name}.{parameter}" for name, parameter in CASES])
def test_a_value_of_the_wrong_type_is_refused_by_a_sentence_that_names_it(name: str, parameter: str) -> None:
    thing = everything()[name]
    for value in wrong(parameters(thing)[parameter]):
        try:
            called(thing, parameter, value)
        except nhgd.InputError as error:
            sentence = str(error)
        except Exception as error:
            pytest.fail(f"{parameter}={value!r}: {type(error).__name__}: {error}")
        else:
            pytest.fail(f"{parameter}={value!r} was accepted")
        assert sentence.endswith((".", "?", "!")), sentence
        assert "\n" not in sentence
        assert "object at 0x" not in sentence, sentence


NUMBERS = [
    (name, f.name)
    for name, thing in everything().items()
    if isinstance(thing, type) and is_dataclass(thing)
    for f in fields(thing)
    if f.init and type(f.default) in (int, float)
]


@pytest.mark.parametrize(("name", "parameter"), NUMBERS, ids=[f"{name}.{parameter}" for name, parameter in NUMBERS])
def test_numbers_of_numpy_and_of_torch_mean_what_pythons_do(name: str, parameter: str) -> None:
    thing: Any = everything()[name]
    plain = thing(**given(thing))
    usual = getattr(plain, parameter)
    kinds = (np.int64, np.int32) if isinstance(usual, int) else (np.float64, Fraction)
    for make in (*kinds, lambda x: torch.tensor(x, dtype=torch.int64 if isinstance(x, int) else torch.float64)):
        made = thing(**(given(thing) | {parameter: make(usual)}))
        assert made == plain
        assert type(getattr(made, parameter)) is type(usual)


@dataclass(frozen=True)
class Guest(Iterative):
    """An inverse of somebody else's that checks nothing itself."""

    name: ClassVar[str] = "guest"
    rate: float = 0.1
    kind: Literal["slow", "quick"] | None = None
    unknown: NoSuchName | None = None  # noqa: F821  an annotation that cannot be read here

    def solve(self, u: Any, oracle: Any, start: Any = None) -> tuple[Any, SolveStats]:
        return u, SolveStats(None, 0, True)


@dataclass(frozen=True)
class Narrower(Guest):
    """One that inherits, and asks something of its values."""

    name: ClassVar[str] = "narrower"
    times: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.times * self.rate > 1:
            raise nhgd.InputError("too much.")


def test_a_class_of_another_package_is_checked_without_doing_anything() -> None:
    with pytest.raises(nhgd.InputError, match="Guest: rate must be a number, got 'x'"):
        Guest(rate="x")  # type: ignore[arg-type]
    with pytest.raises(nhgd.InputError, match=r"There is no kind of Guest called 'slw'\. Did you mean 'slow'"):
        Guest(kind="slw")  # type: ignore[arg-type]
    assert Guest(unknown=3, kind="quick").unknown == 3  # type: ignore[arg-type]
    with pytest.raises(nhgd.InputError, match="Narrower: rate must be a number"):
        Narrower(rate=[1])  # type: ignore[arg-type]
    with pytest.raises(nhgd.InputError, match="too much"):
        Narrower(rate=np.float32(0.5), times=np.int64(3))
    assert type(Narrower(rate=np.float32(0.5)).rate) is float


def test_a_better_sentence_of_the_class_itself_is_kept() -> None:
    with pytest.raises(nhgd.InputError, match=r"CG: steps must be a whole number of at least 1, got 2\.5"):
        CG(steps=2.5)  # type: ignore[arg-type]
    with pytest.raises(nhgd.InputError, match=r"There is no matrix of Refined called 'hesian'. Did you mean 'hessian'"):
        nhgd.inverse.Refined(CG(), matrix="hesian")  # type: ignore[arg-type]


def test_a_tensor_that_requires_a_gradient_is_no_number() -> None:
    """It would be cut from its graph without a word."""
    with pytest.raises(nhgd.InputError, match="that requires a gradient"):
        CG(tol=torch.tensor(0.1, requires_grad=True))  # type: ignore[arg-type]


def test_elements_of_a_pair_are_looked_at() -> None:
    assert fitted((np.float64(1.0), 2), tuple[float, float]) == (1.0, 2)
    for pair in (("a", 1), (1,), (1, 2, 3), "ab", 5):
        with pytest.raises(nhgd.InputError, match="project_v must be a box"):
            nhgd.Solver(toy(), [X], [X], project_v=pair)  # type: ignore[arg-type]


def test_a_box_may_be_open_to_one_side() -> None:
    assert solver(project_v=(0, float("inf"))).run(steps=1).history
    assert solver(project_v=(np.float32(0), np.int64(2)), project=np.float64(3)).run(steps=1).history


def solver(**settings: Any) -> Any:
    return nhgd.Solver(toy(), [X], [X], method="aid-cg", **settings)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, True, 1.5, "1", None])
def test_a_seed_is_one_that_every_generator_takes(seed: Any) -> None:
    for call in (
        lambda: solver(seed=seed),
        lambda: nhgd.hypergradient(toy(), X, X, seed=seed),
        lambda: nhgd.check(toy(), X, X, inverses=["cg"], seed=seed),
        lambda: nhgd.task.Quadratic.preset("quick").build(seed, torch.device("cpu")),
    ):
        with pytest.raises(nhgd.InputError, match="seed must"):
            call()
    assert solver(seed=2**63 - 1).run(steps=1).history
    assert solver(seed=np.int64(1), inner_steps=np.int32(2)).run(steps=np.int64(1)).history
    assert nhgd.task.Quadratic.preset("quick").build(np.int64(1), torch.device("cpu"))


@pytest.mark.parametrize("found", [None, 3.0, [1.0], "a", {1: 2.0}])
def test_metrics_that_are_nothing_by_name(found: Any) -> None:
    with pytest.raises(nhgd.InputError, match=r"metrics\(\)"):
        solver(metrics=lambda theta, v: found).run(steps=1)


def test_metrics_may_be_numbers_of_any_kind() -> None:
    found = {"a": 1, "b": torch.tensor(0.5), "c": np.float32(0.25), "d": float("nan")}
    row = solver(metrics=lambda theta, v: found).run(steps=1).history[0]
    assert [row[name] for name in "abc"] == [1, 0.5, 0.25]
    assert all(type(row[name]) in (int, float) for name in "abcd")


@pytest.mark.parametrize("place", [5, b"x", "a\0b", "", "x" * 300, "/".join(["x" * 200] * 30), 2.5, ["a"]])
def test_a_checkpoint_has_a_name_that_can_be(place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(nhgd.InputError, match="checkpoint"):
        solver(checkpoint=place)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(2, device="meta"), "meta device"),
        (lambda: torch.zeros(2).to_sparse(), "sparse"),
        (lambda: {"a": torch.zeros(2).to_sparse()}, "sparse"),
        (lambda: torch.nn.Linear(2, 1, device="meta"), "meta device"),
    ],
)
def test_variables_that_hold_no_dense_numbers(make: Callable[[], Any], words: str) -> None:
    inner, outer = (lambda theta, v, x: x), (lambda theta, v, x: x.sum())
    for variables in ((make(), torch.zeros(2)), (torch.zeros(2), make())):
        with pytest.raises(nhgd.InputError, match=words):
            Bilevel(inner, outer, *variables)
    if isinstance(make(), torch.Tensor):
        with pytest.raises(nhgd.InputError, match=words):
            nhgd.Data(make())


@pytest.mark.parametrize("where", ["meta", "mps", "cpu:3", "xla", "cuda:99", "no such", "cuda:99999999999999999999"])
def test_curvature_is_kept_on_devices_that_are(where: str) -> None:
    with pytest.raises(nhgd.InputError, match=r"device|kept on"):
        solver(execution=f"device:{where}")


def test_one_inverse_is_a_list_of_one() -> None:
    for one in ("cg", CG()):
        assert [row["inverse"] for row in nhgd.check(toy(), X, X, inverses=one).rows] == ["cg"]
        assert [row["inverse"] for row in nhgd.plan(toy(), inverses=one).rows] == ["cg"]


@pytest.mark.parametrize("make", [float, np.float32, np.int64, np.array, torch.tensor, Fraction])
def test_a_radius_and_a_box_may_be_numbers_of_any_kind(make: Callable[[int], Any]) -> None:
    made = solver(project=make(2), project_v=(make(0), make(1)))
    made.run(steps=2)
    assert float(made.problem.theta.flat().abs()) <= 2
    assert 0 < float(made.problem.v.flat()) <= 1
    kept = made.loop.settings
    assert all(type(one) in (int, float) for one in (kept.project, *kept.project_v))


@pytest.mark.parametrize("box", [[0, 1], np.array([0.0, 1.0]), torch.tensor([0.0, 1.0])])
def test_a_box_may_be_any_pair(box: Any) -> None:
    assert solver(project_v=box).loop.settings.project_v == (0, 1)


@pytest.mark.parametrize(
    "settings",
    [
        {"project": True},
        {"project": np.array([1.0, 2.0])},
        {"project": torch.tensor(0.0)},
        {"project": Fraction(10) ** 400},
        {"project_v": np.array(1.0)},
        {"project_v": torch.zeros(2, 2)},
        {"project_v": np.array([1.0, 0.0])},
        {"project_v": (False, True)},
        {"project_v": "01"},
    ],
)
def test_a_radius_and_a_box_that_are_none_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(nhgd.InputError, match=r"^project(_v)? must be a (radius above 0|box \(low, high\))"):
        solver(**settings)


class Chosen(str, enum.Enum):
    EXACT = "exact"


@pytest.mark.parametrize("text", [np.str_("exact"), Chosen.EXACT])
def test_texts_of_numpy_and_of_an_enum_are_texts(text: str) -> None:
    made = nhgd.inverse.KFAC(fisher=text)
    assert made == nhgd.inverse.KFAC(fisher="exact")
    assert type(made.fisher) is str
    assert type(fitted(text, str | None)) is str
    with pytest.raises(nhgd.InputError, match="exakt"):
        nhgd.inverse.KFAC(fisher=np.str_("exakt"))


class Pair(NamedTuple):
    low: float
    high: float


def test_a_named_tuple_stays_one() -> None:
    found = fitted(Pair(np.float64(1), np.float64(2)), tuple[float, float])
    assert found == Pair(1.0, 2.0)
    assert type(found) is Pair
    assert type(found.low) is float


def test_a_number_is_no_truth_value() -> None:
    """What is 1 was meant as a number, perhaps for the setting beside; NumPy's truth values are what they say."""
    data = torch.zeros(4, 2)
    with pytest.raises(nhgd.InputError, match=r"shuffle must be True or False or .blocks., got 1"):
        nhgd.Data(data, batch=2, shuffle=1)
    nhgd.Data(data, batch=2, shuffle=np.bool_(True))


@pytest.mark.parametrize("estimator", [nhgd.LabelCleaner, nhgd.DatasetDistiller])
@pytest.mark.parametrize("settings", [{"verbose": 0}, {"verbose": 1}, {"device": torch.device("cpu")}])
def test_estimators_take_what_is_customary(estimator: Any, settings: dict[str, Any]) -> None:
    rows = np.random.default_rng(0).normal(size=(40, 2))
    labels = (rows[:, 0] > 0).astype(int)
    trusted = (rows[:8], labels[:8]) if estimator is nhgd.LabelCleaner else ()
    estimator(steps=2, **settings).fit(rows, labels, *trusted)


@pytest.mark.parametrize("budget", [1e-5, 1e20, np.float32(0.5), torch.tensor(2.0), Fraction(1, 3), 3])
def test_a_budget_may_be_any_number_above_zero(budget: Any) -> None:
    assert seconds(budget) == pytest.approx(float(budget))


@pytest.mark.parametrize("budget", [0.0, -1e-5, float("inf"), float("nan"), True, "1e-5x", "", "-1"])
def test_a_budget_that_is_no_time_is_refused(budget: Any) -> None:
    with pytest.raises(nhgd.InputError, match="A budget is a time such as 30"):
        seconds(budget)
