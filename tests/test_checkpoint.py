"""Checkpoints: a run that was broken off goes on bit for bit, and nothing else is ever read from a file."""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nhgd
from nhgd._tree.encoding import Decoder, Encoder, Unencodable, expected
from nhgd.algorithm import AID, NHGD, TTSA
from nhgd.checkpoint import writer
from nhgd.checkpoint.files import newest
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Nystrom, Refined
from nhgd.schedule import Decay, Power
from nhgd.task import Quadratic
from tests import catalogue
from tests.commands import answer, invoke, refusal
from tests.histories import CLOCKED

# How good a solve is does not matter here, only that it is the same again.
pytestmark = pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")


class BrokenOffError(Exception):
    """What ends a run in these tests."""


def breaking(after: int, metrics: Callable[[Any, Any], dict[str, float]] | None = None) -> Any:
    """Metrics that end the run when they are asked for once more than `after` times."""
    asked = []

    def measure(theta: Any, v: Any) -> dict[str, float]:
        asked.append(1)
        if len(asked) > after:
            raise BrokenOffError
        return {"asked": 1.0} if metrics is None else metrics(theta, v)

    return measure


@dataclass
class Setting:
    """A problem with its data and the settings of its solver, built anew by `make`."""

    make: Callable[[], tuple[nhgd.Bilevel, Any, Any]]
    settings: dict[str, Any]

    def solver(self, **more: Any) -> nhgd.Solver:
        return nhgd.Solver(*self.make(), **{"metrics": breaking(99), **self.settings, **more})

    def broken_off(self, path: Path, steps: int = 6, at: int = 5, **more: Any) -> None:
        """Run until step `at`, with checkpoints after every third, and leave nothing but the last of them."""
        running = self.solver(metrics=breaking(at - 1), checkpoint=path, checkpoint_every=3, **more)
        with pytest.raises(BrokenOffError):
            running.run(steps=steps)

    def resumed(self, path: Path, **given: Any) -> nhgd.Solver:
        return nhgd.Solver.resume(path, *self.make(), **{"metrics": breaking(99), **given})

    def goes_on(self, path: Path, **given: Any) -> nhgd.Solver:
        """Six steps unbroken and six broken off in the fifth are the same, bit for bit."""
        whole = self.solver()
        expected = whole.run(steps=6)
        self.broken_off(path)
        continued = self.resumed(path, **given)
        assert continued.loop.clock.k == 3
        found = continued.run(steps=6)
        assert_same(whole, expected, continued, found)
        return continued


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: x for k, x in row.items() if k not in CLOCKED} for row in history]


def assert_same(whole: nhgd.Solver, expected: Any, continued: nhgd.Solver, found: Any) -> None:
    for a, b in ((whole.problem.v, continued.problem.v), (whole.problem.theta, continued.problem.theta)):
        assert torch.equal(a.flat(), b.flat())
        for name, buffer in a.named_buffers().items():
            assert torch.equal(buffer, b.named_buffers()[name])
    assert timeless(found.history) == timeless(expected.history)
    assert found.result == expected.result
    assert found.stats["oracle_calls"] == expected.stats["oracle_calls"]
    seconds = [row["seconds"] for row in found.history]
    assert seconds == sorted(seconds)


def quadratic(method: Any = "aid", **settings: Any) -> Setting:
    def make() -> tuple[nhgd.Bilevel, Any, Any]:
        made = Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))
        return made.problem, made.inner_data, made.outer_data

    return Setting(make, {"method": method, "inner_steps": 3, **settings})


def classifier(method: Any, net: Callable[[], nn.Module] | None = None, **settings: Any) -> Setting:
    """Sample weights for a small net on batches of four of ten samples."""

    def make() -> tuple[nhgd.Bilevel, Any, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)) if net is None else net()
            problem, inner, outer = catalogue.of_classifier(made)
        return problem, nhgd.Data(*inner[:2], batch=4), nhgd.Data(*outer, batch=3)

    def two(model: Any, v: Any, batch: Any) -> Tensor:  # Data adds an index that the outer loss has no use for
        return F.cross_entropy(model(batch[0]), batch[1])

    def with_outer() -> tuple[nhgd.Bilevel, Any, Any]:
        problem, inner, outer = make()
        problem.outer = two
        return problem, inner, outer

    return Setting(with_outer, {"method": method, "inner_steps": 3, "inner_lr": 0.2, "outer_lr": 0.5, **settings})


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("case", catalogue.ALGORITHMS, ids=lambda case: case.name)
def test_every_algorithm_goes_on_bit_for_bit(case, tmp_path):
    settings = case.settings | {"inner_steps": min(case.settings.get("inner_steps", 5), 5)}
    quadratic(case.method, **settings).goes_on(tmp_path / "a")


INVERSES = [
    KFAC(),
    KFAC(invert_every=4),
    KFAC(solver="cholesky"),
    EKFAC(),
    FisherWindow(window=12),
    FisherWindow(window=12, overhead=None),
    FisherWindow(window=12, records="sample", fisher="exact"),
    FisherDense(),
    FisherDense(form="inverse", update="ema"),
    FisherDiagonal(),
    Nystrom(rank=5),
    Refined(KFAC(), steps=3),
    CG(steps=5),
]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")
@pytest.mark.parametrize("inverse", INVERSES, ids=repr)
def test_every_inverse_goes_on_bit_for_bit(inverse, tmp_path):
    classifier(NHGD(inverse)).goes_on(tmp_path / "a")


WAYS = [
    NHGD(cross="lagged"),
    NHGD(cross="trajectory"),
    NHGD(cross="final"),
    NHGD(inner="natural"),
    NHGD(curvature="fresh"),
]


@pytest.mark.parametrize("method", WAYS, ids=repr)
def test_every_way_of_nhgd_goes_on_bit_for_bit(method, tmp_path):
    classifier(method).goes_on(tmp_path / "a")


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a net with dropout is not convex
def test_buffers_dropout_and_frozen_layers_go_on(tmp_path):
    def net() -> nn.Module:
        made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Linear(4, 3))
        made[0].requires_grad_(False)
        return made

    classifier("aid-cg-3", net).goes_on(tmp_path / "a")


class Unseen(nn.Module):
    """Draws dropout and then follows a branch that depends on the data, which vmap cannot: the second way to take rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.drop, self.a = nn.Parameter(torch.ones(3)), nn.Dropout(0.3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.drop(x * self.scale)
        return self.a(z) if float(x.detach()[0, 0]) > -100 else z


class Sometimes(nn.Module):
    """Uses a weight outside its layer in the first step of a run alone, where a bias is still zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        nn.init.zeros_(self.b.bias)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.a(x))
        return self.b(z if bool(self.b.bias.detach().any()) else z @ self.a.weight)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3))


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning", "ignore:Per-sample gradients could not be vectorised")
@pytest.mark.parametrize(
    ("method", "net"),
    [
        ("nhgd", dropping),
        ("nhgd-window", dropping),
        ("nhgd-refined", dropping),
        ("nhgd_single", dropping),
        (AID(EKFAC(fisher="sampled")), dropping),
        (AID(FisherDense(fisher="exact")), dropping),
        ("nhgd", Unseen),
        ("nhgd-window", Unseen),
        ("nhgd", Sometimes),
        ("aid-fisher_dense", Sometimes),
    ],
    ids=lambda given: given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__),
)
def test_what_a_recorder_does_once_is_no_part_of_the_run(method, net, tmp_path):
    """A run that goes on has a new recorder, which looks at the model again, and draws nothing for that."""
    classifier(method, net).goes_on(tmp_path / "a")


momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"inner_optimizer": torch.optim.Adam, "outer_optimizer": torch.optim.Adam, "outer_lr": 0.1}, ()),
        ({"inner_optimizer": momentum, "outer_optimizer": torch.optim.RMSprop}, ("inner_optimizer",)),
        ({"inner_optimizer": partial(torch.optim.LBFGS, lr=0.5, max_iter=3)}, ("inner_optimizer",)),
        ({"inner_lr": Power(0.3, 0.5), "outer_lr": Decay(0.5, final=0.1)}, ()),
        ({"inner_lr": lambda k: 0.3 / (k + 1), "project_v": lambda v: v.clamp(-0.1, 0.1)}, ("inner_lr", "project_v")),
        ({"project": 0.5, "project_v": (-0.1, 0.2), "outer_clip": 0.05, "seed": 7}, ()),
    ],
    ids=["adam", "momentum", "lbfgs", "schedules", "functions", "projections"],
)
def test_optimisers_schedules_and_projections_go_on(settings, again, tmp_path):
    kind = quadratic(**settings)
    kind.goes_on(tmp_path / "a", **{name: settings[name] for name in again})
    if again:
        with pytest.raises(nhgd.InputError, match=rf"cannot hold {again[0]} \(a function\).*{again[0]}=\.\.\."):
            kind.resumed(tmp_path / "a")


class Augmented(Dataset[Any]):
    """Samples with noise that is drawn whenever one is asked for."""

    def __init__(self, *tensors: Tensor, source: str = "torch") -> None:
        self.tensors, self.source = tensors, source

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        draw = {"torch": lambda: float(torch.rand(())), "numpy": lambda: np.random.rand(), "python": random.random}  # noqa: NPY002
        return (self.tensors[0][i] + 0.1 * draw[self.source](), *(t[i] for t in self.tensors[1:]))


class Shuffled:
    """A loader with a generator that nobody else can see."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors, self.hidden = tensors, np.random.default_rng(0)

    def __iter__(self) -> Any:
        for part in self.hidden.permutation(len(self.tensors[0])).reshape(-1, 20):
            yield tuple(t[torch.from_numpy(part)] for t in self.tensors)


def loaded(kind: str, *tensors: Tensor) -> Any:
    if kind == "shuffled":
        return DataLoader(TensorDataset(*tensors), batch_size=20, shuffle=True)
    if kind == "own generator":
        generator = torch.Generator().manual_seed(3)
        return DataLoader(TensorDataset(*tensors), batch_size=20, shuffle=True, generator=generator)
    if kind == "list":
        return [tuple(t[i : i + 20] for t in tensors) for i in range(0, 60, 20)]
    if kind == "hidden":
        return Shuffled(*tensors)
    return DataLoader(Augmented(*tensors, source=kind), batch_size=25, shuffle=True)


def with_loader(kind: str, method: Any = "aid") -> Setting:
    def make() -> tuple[nhgd.Bilevel, Any, Any]:
        made = Quadratic(dim=6, outer_dim=3, samples=60).build(0, torch.device("cpu"))
        return made.problem, loaded(kind, *made.full_inner), made.outer_data

    return Setting(make, {"method": method, "inner_steps": 3, "inner_lr": 0.3, "outer_lr": 0.3})


@pytest.mark.parametrize("method", [AID(CG(steps=3)), AID(CG(steps=3), batches="all")], ids=["one", "all"])
@pytest.mark.parametrize("kind", ["shuffled", "own generator", "list", "torch", "numpy", "python"])
@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # few steps of CG
def test_loaders_go_on_from_their_position(kind, method, tmp_path):
    with_loader(kind, method).goes_on(tmp_path / "a")


def test_a_loader_that_cannot_be_walked_again_is_refused(tmp_path):
    kind = with_loader("hidden")
    kind.broken_off(tmp_path / "a", steps=12, at=8)
    with pytest.raises(
        nhgd.InputError, match=r"inner_data does not reproduce the batches of the saved run.*nhgd\.Data"
    ):
        kind.resumed(tmp_path / "a")


def test_other_data_are_refused(tmp_path):
    kind = quadratic()
    kind.broken_off(tmp_path / "a")
    problem, inner, outer = kind.make()
    inner.tensors[0].mul_(1.01)
    with pytest.raises(nhgd.InputError, match="inner_data does not reproduce the batches of the saved run"):
        nhgd.Solver.resume(tmp_path / "a", problem, inner, outer, metrics=None)
    problem, inner, outer = kind.make()
    shorter = nhgd.Data(*(t[:10] for t in inner.tensors), batch=20)
    with pytest.raises(nhgd.InputError, match="inner_data does not reproduce the batches of the saved run"):
        nhgd.Solver.resume(tmp_path / "a", problem, shorter, outer, metrics=None)


@pytest.mark.parametrize("brief", [0.0, 0.02])
def test_a_budget_decides_the_same_when_a_run_is_resumed(tmp_path, monkeypatch, brief):
    """Within the build-up and beyond it, few samples a record or all of them at first."""
    monkeypatch.setattr("nhgd._budget.BRIEF", brief)
    kind = classifier(NHGD(KFAC(overhead=0.05)))
    first = kind.solver(checkpoint=tmp_path / "a")
    first.run(steps=8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    continued = kind.resumed(tmp_path / "b")
    assert first.loop.inverse.effort is not None
    assert continued.loop.inverse == first.loop.inverse
    assert torch.equal(continued.run(steps=14).v, first.run(steps=6).v)


def test_a_window_within_its_budget_goes_on_bit_for_bit(tmp_path):
    """With its exact matrix, of one record in each inner loop."""
    kind = quadratic(NHGD(FisherWindow(fisher="auto")))
    inverse = kind.goes_on(tmp_path / "a").loop.inverse
    assert inverse.fisher == "exact"
    assert [inverse.effort.records(step) for step in range(3)] == [False, False, True]
    assert kind.resumed(tmp_path / "a").loop.inverse == inverse


def test_batchnorm_within_its_budget_goes_on_bit_for_bit(tmp_path):
    """The first record of a run, and of one that is resumed, looks at the likelihood by a pass that does not count."""

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))

    continued = classifier(NHGD(KFAC(fisher="auto")), net).goes_on(tmp_path / "a")
    assert continued.loop.inverse.effort.build_up_last == 2


def test_a_run_is_continued_not_repeated(tmp_path):
    kind = quadratic()
    expected = kind.solver().run(steps=9).v
    kind.broken_off(tmp_path / "a", steps=9, at=8)
    # The stop rules of then hold where none are given.
    found = kind.resumed(tmp_path / "a").run()
    assert len(found.history) == 9
    assert torch.equal(found.v, expected)
    # A run that had come to its end is at its end; a longer one goes on.
    again = kind.resumed(tmp_path / "a")
    assert len(again.run(steps=9).history) == 9
    assert len(again.run(steps=2).history) == 11
    # The second run of a solver is broken off at its own beginning.
    later = kind.resumed(tmp_path / "a")
    assert len(later.run().history) == 11


def test_seconds_and_patience_that_were_used_up_count(tmp_path):
    kind = quadratic(outer_lr=1e-12)  # the outer loss comes to stand still
    whole = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=2).run(plateau=3, steps=50)
    again = kind.resumed(tmp_path / "a").run(plateau=3)
    assert (again.result, len(again.history)) == (whole.result, len(whole.history)) == ("plateau", len(whole.history))
    longer, expected = kind.resumed(tmp_path / "a").run(plateau=5), kind.solver().run(plateau=5)
    assert len(longer.history) == len(expected.history) > len(whole.history)
    spent = kind.resumed(tmp_path / "a")
    assert spent.seconds == longer.stats["seconds"]
    assert spent.run(budget=whole.stats["seconds"]).result == "budget"
    assert len(spent.history) == len(longer.history)


def test_the_callers_own_loop_is_kept_too(tmp_path):
    kind = quadratic()
    expected = kind.solver().run(steps=6).v
    for row in kind.solver(checkpoint=tmp_path / "a", checkpoint_every=2):
        if row["step"] == 5:
            break
    continued = kind.resumed(tmp_path / "a")
    assert continued.checkpoint.step == 4
    for row in continued:
        if row["step"] == 6:
            break
    assert torch.equal(continued.solution().v, expected)
    continued.step()
    continued.save()
    assert continued.checkpoint.step == 7
    with pytest.raises(nhgd.InputError, match="no checkpoint folder"):
        kind.solver().save()


@pytest.mark.parametrize(("first", "then"), [("thread", "thread"), ("inline", "thread"), ("thread", "inline")])
def test_a_run_goes_on_wherever_its_curvature_is_kept(first, then, tmp_path):
    kind = classifier(NHGD(EKFAC()))
    whole = kind.solver()
    expected = whole.run(steps=6)
    kind.broken_off(tmp_path / "a", execution=first)
    continued = kind.resumed(tmp_path / "a", execution=then)
    found = continued.run()
    assert found.stats["execution"]["name"] == then
    assert_same(whole, expected, continued, found)
    continued.close()


def test_a_run_may_be_kept_elsewhere_from_now_on(tmp_path):
    kind = quadratic()
    kind.broken_off(tmp_path / "a")
    files = {place: place.read_bytes() for place in (tmp_path / "a").rglob("*.*")}
    continued = kind.resumed(tmp_path / "a", checkpoint=tmp_path / "b")
    assert continued.checkpoint.last() == ""
    continued.run()
    assert continued.checkpoint.last().endswith("/b, outer step 6.")
    assert {place: place.read_bytes() for place in (tmp_path / "a").rglob("*.*")} == files
    assert kind.resumed(tmp_path / "b").loop.clock.k == 6


def test_the_core_does_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    quadratic().solver().run(steps=1)
    with pytest.raises(nhgd.InputError, match=r"Checkpoints need safetensors: pip install 'nhgd\[checkpoint\]'"):
        quadratic().solver(checkpoint=tmp_path / "a")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "method", [NHGD(KFAC()), NHGD(EKFAC()), NHGD(FisherWindow(window=12)), "soba", "saba"], ids=repr
)
def test_runs_on_a_device_go_on_bit_for_bit(method, tmp_path):
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 3))

    here = classifier(method, net, inner_optimizer=torch.optim.Adam if isinstance(method, NHGD) else None)

    def make() -> tuple[nhgd.Bilevel, Any, Any]:
        problem, inner, outer = here.make()
        theta, v = problem.theta.given.cuda(), problem.v.given.cuda()
        return nhgd.Bilevel(problem.inner, problem.outer, theta, v, 0.02, problem.likelihood), inner, outer

    Setting(make, here.settings).goes_on(tmp_path / "a")
    here.settings["execution"] = "inline"
    with pytest.raises(nhgd.InputError, match="was written on cuda, and theta is on cpu now"):
        here.resumed(tmp_path / "a")


def test_a_checkpoint_changes_nothing(tmp_path):
    """Neither the run that is kept nor the caller's generators, when it is written and when it is read."""
    kind = classifier("nhgd")
    expected = kind.solver().run(steps=4)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    found = kind.solver(checkpoint=tmp_path / "a", checkpoint_every=1).run(steps=4)
    kind.resumed(tmp_path / "a")
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
    assert before[2] == random.getstate()
    assert torch.equal(found.v, expected.v)
    assert timeless(found.history) == timeless(expected.history)
    assert sorted(place.name for place in (tmp_path / "a").iterdir()) == ["checkpoint-000003", "checkpoint-000004"]


def test_what_does_not_fit_is_named(tmp_path):
    kind = quadratic(TTSA(K=5), outer_lr=Power(0.1, 0.5), inner_optimizer=momentum)
    kind.broken_off(tmp_path / "a")
    problem, inner, outer = kind.make()
    again = {"inner_optimizer": momentum}
    for settings, message in (
        ({"method": "aid"}, "method was TTSA.*, and AID.* is given now"),
        ({"method": TTSA(K=6)}, r"method\.K was 5 when .* was written, and 6 is given now"),
        ({"outer_lr": 0.1}, r"outer_lr was Power\(lr=0\.1, power=0\.5, offset=1\.0\) when .*, and 0\.1 is given"),
        ({"outer_lr": Power(0.1, 0.7)}, r"outer_lr\.power was 0\.5 when .*, and 0\.7 is given"),
        ({"inner_steps": 4}, "inner_steps was 3 when"),
        ({"seed": 1}, "seed was 0 when"),
        ({"project_v": (0, 1)}, r"project_v was None when .*, and \(0, 1\) is given"),
        ({"inner_optimizer": None}, "inner_optimizer was a function when .*, and None is given"),
        ({"inner_optimizer": torch.optim.RMSprop}, "inner_optimizer was a function when .*, and RMSprop is given"),
        ({"inner_optimizer": torch.optim.RMSprop([torch.zeros(1)])}, "does not hold exactly"),
        ({"inner_optimizer": lambda p: torch.optim.RMSprop(p)}, "The inner optimiser was SGD when .* is RMSprop now"),
        ({"inner_optimizer": partial(momentum, momentum=0.8)}, r"had momentum = 0\.9 when .* has 0\.8 now"),
        ({"inner_optimiser": momentum}, "Did you mean 'inner_optimizer'"),
    ):
        with pytest.raises(nhgd.InputError, match=message):
            nhgd.Solver.resume(tmp_path / "a", problem, inner, outer, **({"metrics": None} | again | settings))


def test_another_model_is_named_before_anything_of_it_moves(tmp_path):
    def net(width: int = 3, frozen: float = 0.0, **options: Any) -> nn.Module:
        made = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width, **options), nn.Linear(width, 3))
        made[1].weight.requires_grad_(False).add_(frozen)
        return made

    kind = classifier("aid-identity", net)
    kind.broken_off(tmp_path / "a")
    for other, message in (
        (partial(net, 4), r"theta\['0\.weight'\] is float64 of shape \(4, 3\), but it was float64 of shape \(3, 3\)"),
        (partial(net, frozen=1.0), r"the frozen theta\['1\.weight'\] has different values"),
        (partial(net, track_running_stats=False), r"holds the buffer theta\['1\.running_mean'\], which is now missing"),
        (lambda: nn.Linear(3, 3), r"holds theta\['0\.weight'\], which is now missing"),
    ):
        changed = replace(classifier("aid-identity", other))
        problem, inner, outer = changed.make()
        before = problem.theta.flat()
        with pytest.raises(nhgd.InputError, match=message):
            nhgd.Solver.resume(tmp_path / "a", problem, inner, outer, metrics=None)
        assert torch.equal(before, problem.theta.flat())
    problem, inner, outer = kind.make()
    problem = nhgd.Bilevel(problem.inner, problem.outer, problem.theta.given, problem.v.given.float(), l2=0.02)
    with pytest.raises(nhgd.InputError, match=r"v is float32 of shape \(10,\), but it was float64"):
        nhgd.Solver.resume(tmp_path / "a", problem, inner, outer, metrics=None)


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the contents of a checkpoint, with hashes that fit."""
    file = newest(path)[1] / "run.json"
    document = json.loads(file.read_text())
    change(document["contents"])
    document["contents_sha256"] = hashlib.sha256(json.dumps(document["contents"]).encode()).hexdigest()
    file.write_text(json.dumps(document))


def test_damaged_files_are_refused(tmp_path):
    kind = quadratic("nhgd")
    kind.broken_off(tmp_path / "a")
    place = newest(tmp_path / "a")[1]
    good = {file.name: file.read_bytes() for file in place.iterdir()}
    tensors, rest = good["tensors.safetensors"], good["run.json"]
    for name, bad, message in (
        ("tensors.safetensors", tensors[:-8], "tensors.safetensors is damaged"),
        ("tensors.safetensors", tensors[:-1] + bytes([tensors[-1] ^ 1]), "tensors.safetensors is damaged"),
        ("run.json", rest[:-100], "run.json is damaged"),
        ("run.json", rest.replace(b'"step": 3', b'"step": 4'), "run.json is damaged"),
        ("run.json", b"[]", "it is not an nhgd checkpoint"),
        ("run.json", b"\xff\xfe", "run.json is damaged"),
        ("run.json", rest.replace(b'"version": 3', b'"version": 4'), "has checkpoint format 4"),
        ("run.json", None, "cannot be read: No such file"),
    ):
        for other, content in good.items():
            (place / other).write_bytes(content)
        if bad is None:
            (place / name).unlink()
        else:
            assert bad != good[name]
            (place / name).write_bytes(bad)
        with pytest.raises(nhgd.InputError, match=message):
            kind.resumed(tmp_path / "a")
    with pytest.raises(nhgd.InputError, match="There is no checkpoint in"):
        kind.resumed(tmp_path / "b")


def test_a_class_is_never_looked_up_by_its_name(tmp_path, monkeypatch):
    kind = quadratic("nhgd")
    kind.broken_off(tmp_path / "a")
    for module, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
        monkeypatch.setattr(module, name, None)
    kind.resumed(tmp_path / "a")

    def strange(contents: dict[str, Any]) -> None:
        contents["state"]["class"] = "subprocess.Popen"

    rewritten(tmp_path / "a", strange)
    with pytest.raises(nhgd.InputError, match=r"contains a subprocess\.Popen, which this run cannot use"):
        kind.resumed(tmp_path / "a")

    def other_fields(contents: dict[str, Any]) -> None:
        contents["state"]["class"] = "nhgd.algorithm.nhgd.NHGDState"
        contents["state"]["fields"]["command"] = "ls"

    rewritten(tmp_path / "a", other_fields)
    with pytest.raises(nhgd.InputError, match="a NHGDState with other fields than in this version: command"):
        kind.resumed(tmp_path / "a")


class Pair(NamedTuple):
    """For the tree."""

    first: Tensor
    second: Any


@dataclass(frozen=True)
class Leaf:
    """For the tree."""

    value: float
    pair: Pair | None = None


@dataclass
class Branch:
    """For the tree."""

    leaves: list[Leaf]
    kind: torch.dtype = torch.float32


def test_trees_come_back_with_their_layout():
    column_major = torch.linalg.eigh(torch.randn(4, 4).double().cov())[1]
    assert not column_major.is_contiguous()
    tree = {
        "branch": Branch([Leaf(0.1, Pair(column_major, (1, [None, True]))), Leaf(float("nan"))], torch.bfloat16),
        "numbers": {0: 2**70, "a/b": -0.0, (1, 2): float("-inf"), "half": torch.ones(3, dtype=torch.bfloat16)},
        "views": [torch.arange(12).reshape(3, 4).T[::2], torch.zeros(()).expand(3), torch.zeros(0, 2)],
        "numpy": np.float32(0.1),
    }
    encoder = Encoder()
    node = json.loads(json.dumps(encoder.encode(tree, "x")))
    tensors = {name: t.clone() for name, t in encoder.tensors.items()}
    back = Decoder(tensors, expected(tree), torch.device("cpu")).decode(node)
    found = back["branch"].leaves[0].pair.first
    assert torch.equal(found, column_major)
    assert found.stride() == column_major.stride()
    assert found.data_ptr() != column_major.data_ptr()
    assert type(back["branch"].leaves[0].pair) is Pair
    assert back["branch"].leaves[0].pair.second == (1, [None, True])
    assert np.isnan(back["branch"].leaves[1].value)
    assert back["branch"].kind is torch.bfloat16
    numbers = back["numbers"]
    assert (numbers[0], numbers["a/b"], numbers[1, 2]) == (2**70, 0.0, float("-inf"))
    assert str(numbers["a/b"]) == "-0.0"
    assert numbers["half"].dtype is torch.bfloat16
    for one, other in zip(back["views"], tree["views"], strict=True):
        assert torch.equal(one, other)
    assert back["numpy"] == float(np.float32(0.1))
    assert set(expected(Branch)) >= {f"{__name__}.{name}" for name in ("Branch", "Leaf", "Pair")}


def test_what_cannot_be_kept_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(Unencodable):
        Encoder().encode({"a": object()}, "x")

    class Counter:
        pass

    @dataclass(frozen=True)
    class Strange(AID):
        def init(self, loop: Any) -> Any:
            return Counter()

    with pytest.raises(nhgd.InputError, match="cannot hold a Counter, found at state of this run"):
        quadratic(Strange()).solver(checkpoint=tmp_path / "a")
    solver = quadratic().solver(checkpoint=tmp_path / "a")
    solver.step()["odd"] = {1}
    with pytest.raises(nhgd.InputError, match="cannot hold a set, found at history/0/odd"):
        solver.save()
    (tmp_path / "file").touch()
    with pytest.raises(nhgd.InputError, match="cannot be a folder"):
        quadratic().solver(checkpoint=tmp_path / "file" / "a")
    for every in (0, -1, True, 1.5, "often", "0"):
        with pytest.raises(nhgd.InputError, match=r"checkpoint_every (is|must be) a whole number|A budget is a time"):
            quadratic().solver(checkpoint=tmp_path / "a", checkpoint_every=every)


def test_errors_name_the_last_good_checkpoint(tmp_path):
    problem, inner, outer = quadratic().make()
    x, y, z = inner.tensors
    spoilt = x.clone()
    spoilt[3, 1] = float("nan")
    data = [(x, y, z)] * 5 + [(spoilt, y, z)]

    def solver(**settings: Any) -> nhgd.Solver:
        return nhgd.Solver(problem, data, outer, method="aid-identity", inner_steps=1, **settings)

    with pytest.raises(
        nhgd.InputError, match=r"contains nan or inf.*The last good checkpoint is .*/a, outer step 2\.$"
    ):
        solver(checkpoint=tmp_path / "a", checkpoint_every=2).run(steps=9)
    problem, inner, outer = quadratic().make()
    wild = nhgd.Solver(problem, inner, outer, "aid", 60, lambda k: 0.1 if k < 3 else 1e6, checkpoint=tmp_path / "b")
    with pytest.raises(nhgd.NonFiniteError, match=r"Outer step 4.*(?<!checkpoint is)$"):
        wild.run(steps=9)
    assert newest(tmp_path / "b") is None


def test_checkpoints_take_a_small_part_of_the_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    keeper = quadratic().solver(checkpoint=tmp_path / "a").checkpoint
    now[0] += 29.9
    assert not keeper.due(5)
    now[0] += 0.2
    assert keeper.due(5)
    keeper._took = 3.0  # a large model: one in 150 seconds is a fiftieth of the time
    assert not keeper.due(5)
    now[0] += 120
    assert keeper.due(5)
    timed = quadratic().solver(checkpoint=tmp_path / "a", checkpoint_every="2m").checkpoint
    now[0] += 119
    assert not timed.due(5)
    now[0] += 2
    assert timed.due(5)
    counted = quadratic().solver(checkpoint=tmp_path / "a", checkpoint_every=4).checkpoint
    assert [k for k in range(1, 13) if counted.due(k)] == [4, 8, 12]


def test_other_arithmetic_is_warned_about(tmp_path):
    kind = quadratic()
    kind.broken_off(tmp_path / "a")

    def older(contents: dict[str, Any]) -> None:
        contents["torch"] = "2.0.0"

    rewritten(tmp_path / "a", older)
    with pytest.warns(UserWarning, match=r"was written with torch 2\.0\.0 .* last digits may differ"):
        kind.resumed(tmp_path / "a")


KILLED = """
import os, pathlib, random, signal, sys, time
import torch
import nhgd
from nhgd.checkpoint.files import newest
from nhgd.task import Quadratic

torch.set_num_threads(1)
path, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])


def solver(path=path):
    made = Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))
    going_on = nhgd.checkpoint.exists(path)
    return made.start("nhgd", resume=going_on, checkpoint=path, checkpoint_every=1, inner_steps=2)


solver(path.with_name("first")).run(steps=1)  # what torch imports late is imported here, once for all children
chance = random.Random(0)
steps = []
for _ in range(kills):
    child = os.fork()
    if child == 0:
        try:
            solver().run(steps=10**6)
        finally:
            os._exit(1)
    before = newest(path)
    while newest(path) == before:  # its first checkpoint; it may fail, and then it has ended
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "the child ended by itself"
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.03))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), "the child ended by itself"
    steps.append(nhgd.checkpoint.SavedCheckpoint(path).step)
last = solver()
solution = last.run(steps=steps[-1] + 3)
expected = Quadratic(dim=6, outer_dim=3, samples=60, batch=20).build(0, torch.device("cpu"))
whole = expected.start("nhgd", inner_steps=2).run(steps=steps[-1] + 3)
print(steps)
assert steps == sorted(steps) and steps[-1] > steps[0] > 0, steps
assert torch.equal(solution.v, whole.v)
assert [row["outer_loss"] for row in solution.history] == [row["outer_loss"] for row in whole.history]
assert len(os.listdir(path)) == 2
print("same")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_run_killed_at_any_moment_goes_on(tmp_path):
    """One process is killed ten times while it does little but write checkpoints; the moments come from a fixed seed."""
    found = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "a"), "10"], capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.splitlines()[-1] == "same"


RUN = ("run", "quadratic", "--preset", "quick", "--device", "cpu")


def rows(out: Path) -> list[dict[str, Any]]:
    return timeless([json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()])


def test_run_resume_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    expected = answer(*RUN, "--steps", 7, "--out", "whole")
    fresh = invoke(*RUN, "--steps", 4, "--out", "parts", "--resume", "--checkpoint-every", 2)
    assert fresh.exit_code == 0
    assert "There is no checkpoint in parts/checkpoint yet: a new run begins." in fresh.stderr
    more = invoke(*RUN, "--steps", 7, "--out", "parts", "--resume", "--json")
    assert "Resuming from parts/checkpoint, outer step 4." in more.stderr
    found = json.loads(more.stdout)
    assert found["steps"] == 7
    assert found["metrics"] == expected["metrics"]
    assert found["oracle_calls"] == expected["oracle_calls"]
    assert rows(Path("parts")) == rows(Path("whole"))
    # RemoteInverse, by its own name, and no further than it is.
    assert answer(*RUN, "--steps", 3, "--checkpoint", "kept")["steps"] == 3
    assert json.loads(invoke(*RUN, "--steps", 3, "--checkpoint", "kept", "--resume", "--json").stdout)["steps"] == 3


def test_refusals_on_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "--resume needs the folder" in refusal(*RUN, "--resume")
    assert "--checkpoint-every needs a folder" in refusal(*RUN, "--checkpoint-every", 3)
    assert invoke(*RUN, "--steps", 2, "--checkpoint", "kept").exit_code == 0
    again = (*RUN, "--steps", 4, "--checkpoint", "kept", "--resume")
    assert "seed was 0 when kept was written" in refusal(*again, "--seed", 1)
    assert "inner_lr was" in refusal(*again, "--set", "inner_lr=0.01")
    file = newest(Path("kept"))[1] / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "is damaged" in refusal(*again)
