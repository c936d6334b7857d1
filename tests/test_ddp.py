"""Inner gradients through DistributedDataParallel against the team's own sums, and against one worker with all of a batch.

One group of 2 processes and one of 4 answer every question of this file; the answers of one worker come from this process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.algorithm import AID, NHGD, VRBO, AbstractAlgorithm
from nhgd.data_parallel import AbstractTeam, Alone, Team
from nhgd.errors import InputError
from nhgd.execution import Distributed
from nhgd.inverse import CG, KFAC, FisherDense
from nhgd.record import InnerStep, LayerStatistics, tensors
from nhgd.variable import Variable
from tests.commands import answer
from tests.processes import together
from tests.test_team import SAMPLES, Answers, Scaled, data, equal_bits, left_alone, made, net, outcome, solver

SIZES = (2, 4)
SEVENS = {"inner_data": nhgd.Data(*data(), batch=7)}  # parts of 7 and of 5 samples differ on 2 and on 4 workers
SMALL = 1e-4  # MiB in a bucket, so that there are several


def softmax() -> nn.Module:
    return nn.Linear(5, 3).double()


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)


class Experts(nn.Module):
    """Each sample goes to one of two layers, so that a part of a batch may leave one of them out."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        found = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(chosen == number).reshape(-1)
            if len(rows):
                found = found.index_add(0, rows, expert(x[rows]))
        return found


class Late(nn.Module):
    """A layer that joins later, whose weight is used outside of it as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.finalise = nn.Linear(5, 3)
        self.joined = False

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x)
        return found + self.finalise(x) + F.linear(x.square(), self.finalise.weight) if self.joined else found


class Counting(nn.Module):
    """A buffer that follows the samples a worker sees, and does not enter the loss."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.add_(x.detach().sum(0))
        found: Tensor = self.layer(x)
        return found


class Idle(nn.Module):
    """A parameter that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.idle = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(1)
    return make().double()


class Buckets:
    """A communication hook that counts what the wrapper's reducer sends, and the numbers the team sums itself."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self.numbers: list[int] = []
        self.own: list[int] = []

        def reduce(state, bucket):  # type: ignore[no-untyped-def]  # a wrapper refuses annotations that are strings
            self.numbers.append(bucket.buffer().numel())
            return allreduce_hook(None, bucket)  # type: ignore[arg-type]

        wrapper.register_comm_hook(None, reduce)

    @contextmanager
    def watching(self, team: Team) -> Iterator[None]:
        summing = team.summing

        def watched(given: Any) -> Any:
            self.own.append(sum(t.numel() for t in given))
            return summing(given)

        team.summing = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del team.summing


METHODS: dict[str, tuple[AbstractAlgorithm, dict[str, Any]]] = {
    "kfac exact": (NHGD(KFAC(fisher="exact", beta=None)), {}),
    "now and then": (NHGD(KFAC(factor_every=2)), {}),
    "natural": (NHGD(inner="natural"), {}),
    "at the end": (NHGD(observe="end", batches="all"), {}),
    "lbfgs": (AID(CG(steps=3)), {"inner_optimizer": lbfgs}),
    "vrbo": (VRBO(K=2, large=2), {}),
}
FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "views of buckets": {"gradient_as_bucket_view": True},
}


def runs(team: AbstractTeam, wrap: Callable[[nn.Module], nn.Module], methods: bool) -> Answers:
    found: Answers = {}
    two = SEVENS | {"inner_steps": 2}
    found["softmax"] = outcome(solver(team, made(wrap(seeded(softmax))), NHGD(FisherDense()), **two), 20)
    found["mlp"] = outcome(solver(team, made(wrap(seeded(net))), NHGD(KFAC()), **two), 20)
    for name, (method, settings) in METHODS.items() if methods else ():
        found[name] = outcome(solver(team, made(wrap(seeded(net))), method, **SEVENS, **settings), 3)
    if methods:
        found["convolution"] = outcome(solver(team, made(wrap(seeded(Scaled))), NHGD(KFAC()), **SEVENS), 3)
    return found


def counted(team: Team) -> Answers:
    """Who sends the gradient."""
    wrapper = DistributedDataParallel(seeded(net), bucket_cap_mb=SMALL)
    buckets = Buckets(wrapper)
    run = solver(team, made(wrapper), NHGD(KFAC()), **SEVENS)
    with buckets.watching(team):
        run.run(steps=4)
    return {
        "parameters": run.problem.theta.numel,
        "inner": run.loop.clock.total,
        "numbers": buckets.numbers,
        "own": buckets.own,
        "given back": run.solution().theta is wrapper,
    }


def inner_of(given: nn.Module, way: str = "whole", v: Any = None, l2: float = 0.05) -> nhgd.Bilevel:
    """Weights of samples, by a module or a tensor; the model is called as a whole, twice or by its parts."""

    def inner(model: Any, v: Any, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = model(x)
        if way == "twice":
            z = z + model(x.flip(1))
        if way == "by parts":
            z = z + model[3](model[0](x).relu())
        if way == "its own":  # the wrapper that it knows, in place of what it is given
            z = z + given(x)
        weights = v(x).squeeze(1).sigmoid() if isinstance(v, nn.Module) else v[i].sigmoid()
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), weights, z)

    def outer(model: Any, v: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    v = torch.linspace(-1, 1, SAMPLES, dtype=torch.float64) if v is None else v
    return nhgd.Bilevel(inner, outer, given, v, l2=l2, likelihood="categorical")


def parts_of(team: AbstractTeam, sizes: tuple[int, ...] = (7, 9, 6, 7)) -> list[Any]:
    x, y = data()
    index = torch.arange(SAMPLES)
    ends = np.cumsum(sizes)
    return [team.share(tuple(t[end - n : end] for t in (x, y, index))) for n, end in zip(sizes, ends, strict=True)]


def difference(one: InnerStep, other: InnerStep) -> float:
    """The largest between two steps: loss, gradient and every tensor of the record."""
    pairs = [(one.value, other.value), *zip(one.gradient, other.gradient, strict=True)]
    if one.record is not None and other.record is not None:
        pairs += list(zip(tensors(one.record), tensors(other.record), strict=True))
    return max(float((a - b).abs().max()) for a, b in pairs)


def compared(team: Team, make: Callable[[], nn.Module], kind: Any, **given: Any) -> Answers:
    """Steps of a recorder through a wrapper and past it, on the same parts."""
    wrapped = {key: given.pop(key) for key in list(given) if key not in ("fisher", "way", "v")}
    fisher = given.pop("fisher", "empirical")
    v = given.pop("v", None)
    wrapper = DistributedDataParallel(seeded(make), **wrapped)
    buckets = Buckets(wrapper)
    problem, plain = (inner_of(m, v=None if v is None else seeded(v), **given) for m in (wrapper, seeded(make)))
    through, past = Recorder(problem, kind, fisher), Recorder(plain, kind, fisher)
    mine = [torch.full_like(leaf, 2.5) for leaf in problem.theta.leaves]
    for leaf, gradient in zip(problem.theta.leaves, mine, strict=True):
        leaf.grad = gradient
    worst = max(difference(through.step(part), past.step(part)) for part in parts_of(team))
    kept = all(leaf.grad is g and bool((g == 2.5).all()) for leaf, g in zip(problem.theta.leaves, mine, strict=True))
    return {
        "difference": worst,
        "grad kept": kept,
        "no grad in v": all(leaf.grad is None for leaf in problem.v.leaves),
        "through": sum(buckets.numbers),
        "parameters": problem.theta.numel,
    }


def linear() -> nn.Module:
    return nn.Linear(5, 1)


def recorders(team: Team) -> Answers:
    found: Answers = {
        f"{kind}, {fisher}": compared(team, net, kind, fisher=fisher)
        for kind, fisher in ((None, "empirical"), ("layer", "empirical"), ("sample", "exact"), ("raw", "empirical"))
    }
    for name, flags in FLAGS.items():
        for way in ("whole", "twice", "by parts"):
            found[f"{name}, {way}"] = compared(team, net, "layer", way=way, **flags)
    found["plain, its own"] = compared(team, net, "layer", way="its own")
    found["v a module"] = compared(team, net, "layer", v=linear)
    found["v a module, no record"] = compared(team, net, None, v=linear)
    found["outside layers"] = compared(team, Scaled, "layer", bucket_cap_mb=SMALL)
    unused = {"find_unused_parameters": True}
    found["unused here and there"] = compared(team, Experts, None, **unused)
    found["unused everywhere"] = compared(team, Idle, "layer", **unused)
    found["unused in a static graph"] = compared(team, Idle, "layer", static_graph=True)
    return found


def late(team: Team) -> Answers:
    """A layer that joins after the first steps is looked at as those of the first step were."""
    models = [seeded(Late), seeded(Late)]
    wrapper = DistributedDataParallel(models[0], find_unused_parameters=True)
    buckets = Buckets(wrapper)
    through, past = (Recorder(inner_of(m), "layer") for m in (wrapper, models[1]))
    found, names = [], []
    for number, part in enumerate(parts_of(team)):
        for model in models:
            model.joined = number >= 2
        one, other = through.step(part), past.step(part)
        found.append(difference(one, other))
        assert isinstance(one.record, LayerStatistics)
        names.append(one.record.other_names)
    return {"difference": max(found), "others": names[-1], "buckets": len(buckets.numbers)}


def told(ask: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = ask()
    return found, [str(w.message) for w in said if "DistributedDataParallel" in str(w.message)]


def shared_memory(team: Team) -> Answers:
    """What the owner of the wrapper does with it before and after: its gradients are memory of the reducer."""
    wrapper = DistributedDataParallel(seeded(net), gradient_as_bucket_view=True)
    x, _ = data()
    for _ in range(2):
        wrapper.zero_grad()
        wrapper(x[team.rank :: team.size]).square().sum().backward()
    leaves = list(wrapper.parameters())
    before = [(leaf.grad, leaf.grad.clone()) for leaf in leaves if leaf.grad is not None]
    through, past = (Recorder(inner_of(m, l2=0.0)) for m in (wrapper, seeded(net)))  # a ridge would make new tensors
    steps = [(through.step(part), past.step(part)) for part in parts_of(team)]
    worst = max(difference(*pair) for pair in steps)  # after all of them, so that none may have written to another
    kept = [leaf.grad is g and torch.equal(g, value) for leaf, (g, value) in zip(leaves, before, strict=True)]
    found: Answers = {"kept": all(kept), "difference": worst}
    wrapper.zero_grad()
    wrapper(x[team.rank :: team.size]).square().sum().backward()
    after = [leaf.grad for leaf in leaves if leaf.grad is not None]
    found["after"] = max(float((g - value).abs().max()) for g, (_, value) in zip(after, before, strict=True))
    return found


def refusals(team: Team) -> Answers:
    """Where the wrapper cannot be used, the team sums, after a warning."""
    found: Answers = {}
    groups = [dist.new_group([rank]) for rank in range(team.size)]

    def elsewhere() -> nn.Module:
        return DistributedDataParallel(seeded(net), process_group=groups[team.rank])

    def frozen() -> nn.Module:
        model = seeded(net)
        wrapper = DistributedDataParallel(model)
        model[0].bias.requires_grad_(False)
        return wrapper

    def idle() -> nn.Module:
        return DistributedDataParallel(seeded(Idle))

    for wrap in (elsewhere, frozen, idle):
        run = solver(team, made(wrap()), AID(CG(steps=3)), **SEVENS)
        found[wrap.__name__] = told(lambda run=run: outcome(run, 3))  # type: ignore[misc]
    return found


def others(team: Team) -> Answers:
    """Buffers, dropout, no_sync, compiled modules, and hooks that compress."""
    found: Answers = {}
    for steps in (1, 3):
        model = seeded(Counting)
        run = solver(team, made(DistributedDataParallel(model)), NHGD(KFAC()), **SEVENS, inner_steps=steps)
        found[f"buffers {steps}"] = outcome(run, steps) | {"seen": model.seen.numpy()}

    def dropping() -> nn.Module:
        return net(dropout=0.5)

    for name in ("dropout", "dropout, team"):
        model = seeded(dropping)
        wrapped = DistributedDataParallel(model) if name == "dropout" else model
        run = solver(team, made(wrapped), NHGD(cross="trajectory"), inner_lr=0.1, **SEVENS)
        found[name] = outcome(run, 3)

    wrapper = DistributedDataParallel(seeded(net))
    with wrapper.no_sync():
        found["no_sync"] = outcome(solver(team, made(wrapper), NHGD(KFAC()), **SEVENS), 3)
        found["no_sync kept"] = not wrapper.require_backward_grad_sync

    wrapper = DistributedDataParallel(seeded(net))
    wrapper.register_comm_hook(None, fp16_compress_hook)
    found["half"] = outcome(solver(team, made(wrapper), NHGD(KFAC()), **SEVENS), 3)
    return found


def compiled(team: Team) -> Answers:
    def inside(module: nn.Module) -> nn.Module:
        return DistributedDataParallel(torch.compile(module, backend="eager"))

    def around(module: nn.Module) -> nn.Module:
        found: Any = torch.compile(DistributedDataParallel(module), backend="eager")
        return found

    found: Answers = {}
    for name, wrap in {"inside": inside, "around": around}.items():
        for record, method in (("recorded", NHGD(KFAC())), ("plain", AID(CG(steps=3)))):
            problem = made(wrap(seeded(net)))
            found[f"{name}, {record}"] = outcome(solver(team, problem, method, **SEVENS), 2)
            assert problem.theta.reducer is not None
            found[f"{name}, {record}"]["through"] = problem.theta.reducer.serves(team)
    return found


def asked_for(rank: int, size: int) -> Answers:
    """`ddp=True`: the inner ranks wrap theta themselves."""
    found: Answers = {}
    for name, keepers in (("workers", 0), ("curvature ranks", 1)):
        problem = made(seeded(net))
        x, y = data()
        run = nhgd.Solver(
            problem,
            SEVENS["inner_data"],
            nhgd.Data(x.flip(0), y.flip(0), batch=13),
            method=NHGD(KFAC()),
            inner_steps=3,
            inner_lr=0.3,
            outer_lr=0.5,
            execution=Distributed(curvature_ranks=keepers, ddp=True),
        )
        run.run(steps=3)
        team, reducer = run.loop.team, problem.theta.reducer
        found[name] = {
            "v": problem.v.flat().numpy(),
            "through": reducer is not None and isinstance(team, Team) and reducer.serves(team),
            "module": isinstance(run.solution().theta, nn.Sequential),
        }
        run.close()
    dist.barrier()
    found["stumbling"] = _said(lambda: stumbling(rank))
    return found


class Stumbling(nn.Module):
    """Fails in one process, in the middle of a run, while the others are on their way through the wrapper."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.left = 20 if rank == 1 else 10**6

    def forward(self, x: Tensor) -> Tensor:
        self.left -= 1
        if not self.left:
            raise InputError("My shoes are untied. Tie them.")
        found: Tensor = self.layer(x)
        return found


def stumbling(rank: int) -> None:
    execution = Distributed(curvature_ranks=0, ddp=True)
    run = nhgd.Solver(
        made(seeded(lambda: Stumbling(rank))), SEVENS["inner_data"], SEVENS["inner_data"], "nhgd", execution=execution
    )
    run.run(steps=50)


def everything(rank: int, size: int) -> Answers:
    team = Team.of()
    assert isinstance(team, Team)
    found: Answers = {"runs": runs(team, DistributedDataParallel, size == 2), "counted": counted(team)}
    found["team"] = runs(team, lambda module: module, False)
    if size == 2:
        found["recorders"] = recorders(team)
        found["late"] = late(team)
        found["shared memory"] = shared_memory(team)
        found["refusals"] = refusals(team)
        found["others"] = others(team)
        found["compiled"] = compiled(team)
    else:
        found["asked for"] = asked_for(rank, size)
    return found


@cache
def answers(size: int) -> list[Answers]:
    """What every rank of a group says."""
    return together(everything, size)


@cache
def alone() -> Answers:
    """What one worker says, which never hears of a team or a wrapper."""
    return runs(Alone(), lambda module: module, True)


def close(found: Answers, expected: Answers, tolerance: float = 1e-10) -> None:
    for key in ("v", "theta", "losses"):
        assert np.abs(found[key] - expected[key]).max() < tolerance, key


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for size in SIZES for name in ("softmax", "mlp", *([*METHODS, "convolution"] if size == 2 else []))],
)
def test_workers_under_the_wrapper_are_one_worker_with_all_of_a_batch(name: str, size: int) -> None:
    found = [rank["runs"][name] for rank in answers(size)]
    for key in ("v", "theta", "losses"):
        assert equal_bits([rank[key] for rank in found])
    close(found[0], alone()[name])
    assert found[0]["calls"] == alone()[name]["calls"]
    if name in ("softmax", "mlp"):
        close(found[0], answers(size)[0]["team"][name])


def test_the_runs_that_are_compared_move_v() -> None:
    for name, run in alone().items():
        assert np.abs(run["v"] - np.linspace(-1, 1, SAMPLES)).max() > 1e-4, name


@pytest.mark.parametrize("size", SIZES)
def test_the_reducer_sends_the_gradient_and_the_team_does_not(size: int) -> None:
    for rank in answers(size):
        found = rank["counted"]
        steps, parameters = found["inner"], found["parameters"]
        assert steps == 12
        # The first step goes past the wrapper, to see whether it can be used.
        assert sum(found["numbers"]) == (steps - 1) * parameters
        assert len(found["numbers"]) == 2 * (steps - 1) - 1  # after its first pass the wrapper makes two buckets
        assert found["own"].count(parameters + 5) == 1
        assert found["own"].count(5) == steps - 1
        assert found["own"].count(4) == 1  # and once which of the four parameters took no part
        assert found["given back"]


RECORDED = [
    "None, empirical",
    "layer, empirical",
    "sample, exact",
    "raw, empirical",
    *(f"{name}, {way}" for name in FLAGS for way in ("whole", "twice", "by parts")),
    "plain, its own",
    "v a module",
    "v a module, no record",
    "outside layers",
    "unused here and there",
    "unused everywhere",
    "unused in a static graph",
]


@pytest.mark.parametrize("name", RECORDED)
def test_a_step_and_its_record_are_those_of_the_team(name: str) -> None:
    for rank in answers(2):
        found = rank["recorders"][name]
        assert found["difference"] < 1e-12
        assert found["grad kept"]
        assert found["no grad in v"]
        assert found["through"] == 3 * found["parameters"]


def test_the_owner_of_the_wrapper_goes_on_with_it() -> None:
    for rank in answers(2):
        found = rank["shared memory"]
        assert found["kept"]
        assert found["difference"] < 1e-12
        assert found["after"] < 1e-12


def test_a_layer_that_joins_later_is_looked_at() -> None:
    for rank in answers(2):
        found = rank["late"]
        assert found["difference"] < 1e-12
        assert found["others"] == ("late.weight", "late.bias")
        assert found["buckets"] == 3


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("elsewhere", "its process group has the ranks [0] and the team has [0, 1]"),
        ("frozen", "it was made for other parameters than those that are trained"),
        ("idle", "'idle' took no part in the inner loss"),
    ],
)
def test_what_the_wrapper_cannot_do_the_team_does_after_one_warning(name: str, why: str) -> None:
    (first, said), (_, quiet) = (rank["refusals"][name] for rank in answers(2))
    assert len(said) == 1
    assert why in said[0]
    assert not quiet
    model = seeded(Idle if name == "idle" else net)
    if name == "frozen":
        model[0].bias.requires_grad_(False)
    close(first, outcome(solver(Alone(), made(model), AID(CG(steps=3)), **SEVENS), 3))


@pytest.mark.parametrize("steps", [1, 3])
def test_buffers_are_those_of_the_first_worker(steps: int) -> None:
    found = [rank["others"][f"buffers {steps}"] for rank in answers(2)]
    whole = seeded(Counting)
    close(found[0], outcome(solver(Alone(), made(whole), NHGD(KFAC()), **SEVENS, inner_steps=steps), steps))
    assert equal_bits([rank["seen"] for rank in found])
    assert np.abs(found[0]["seen"]).max() > 0
    assert not np.allclose(found[0]["seen"], whole.seen.numpy())


def test_settings_that_are_the_wrappers_own() -> None:
    found = [rank["others"] for rank in answers(2)]
    one = outcome(solver(Alone(), made(seeded(net)), NHGD(KFAC()), **SEVENS), 3)
    close(found[0]["no_sync"], one)
    assert found[0]["no_sync kept"]
    # Workers draw the masks that they draw without a wrapper.
    close(found[0]["dropout"], found[0]["dropout, team"])
    # A hook that rounds to half precision changes the numbers, alike everywhere.
    assert equal_bits([rank["half"]["v"] for rank in found])
    assert 1e-9 < np.abs(found[0]["half"]["v"] - one["v"]).max() < 1e-2


@pytest.mark.parametrize("where", ["inside", "around"])
def test_compiled_modules(where: str) -> None:
    for record, method in (("recorded", NHGD(KFAC())), ("plain", AID(CG(steps=3)))):
        found = answers(2)[0]["compiled"][f"{where}, {record}"]
        assert found["through"]
        close(found, outcome(solver(Alone(), made(seeded(net)), method, **SEVENS), 2))


@pytest.mark.parametrize("name", ["workers", "curvature ranks"])
def test_the_executor_wraps_theta_when_asked(name: str) -> None:
    one = outcome(solver(Alone(), made(seeded(net)), NHGD(KFAC()), **SEVENS), 3)
    found = [rank["asked for"][name] for rank in answers(4)]
    assert [rank["through"] for rank in found] == [True, True, True, name == "workers"]
    for rank in found:
        assert np.abs(rank["v"] - one["v"]).max() < 1e-10
        assert rank["module"]


def test_a_worker_that_fails_is_named_by_the_others() -> None:
    found = [rank["asked for"]["stumbling"] for rank in answers(4)]
    assert found.pop(1) == "InputError: My shoes are untied. Tie them."
    for said in found:
        assert said.startswith("RunError: ")
        assert "Rank 1" in said
        assert "My shoes are untied" in said


def test_from_the_command_line() -> None:
    run = ("run", "cleaning", "--method", "nhgd", "--steps", "2", "--preset", "quick")
    settings = ("--set", "dtype=float64", "--set", "train=60", "--set", "batch=21", "--set", "inner_steps=3")
    many = ("--execution", "distributed", "--set", "workers=2", "--set", "curvature_ranks=0", "--set", "ddp=true")
    found, one = answer(*run, *settings, *many), answer(*run, *settings)
    assert found["execution"]["processes"] == 2
    assert found["metrics"]["outer_loss"] == pytest.approx(one["metrics"]["outer_loss"], rel=1e-10)


def test_tensors_cannot_be_wrapped() -> None:
    with pytest.raises(InputError, match=r"ddp=True wraps theta in DistributedDataParallel, which takes an nn\.Module"):
        Distributed(ddp=True).join(Variable({"w": torch.zeros(2)}, "theta"))


def dying(rank: int, size: int) -> str:
    return left_alone(rank, DistributedDataParallel(seeded(net)))


def test_a_dead_worker_is_noticed_inside_the_wrapper_too() -> None:
    said, _ = together(dying, 2, lost=(1,), limit=60.0)
    assert said.startswith("RunError: Rank 0 of 2 has lost another worker: ")


def leaving_out(rank: int, size: int) -> str:
    """After the first step one worker's part uses fewer parameters than the wrapper was told to expect."""
    team = Team.of()
    assert isinstance(team, Team)
    model = seeded(Late)
    model.joined = True
    recorder = Recorder(inner_of(DistributedDataParallel(model)))
    first, second, *_ = parts_of(team)
    recorder.step(first)
    model.joined = rank == 0
    return _said(lambda: [recorder.step(second), recorder.step(first)])


def test_a_parameter_left_out_is_named_and_nobody_waits() -> None:
    found = together(leaving_out, 2, limit=60.0)
    assert found[1].startswith("InputError: 'late.weight', 'late.bias' took no part in the inner loss of a batch")
    assert found[0].startswith("RunError: Rank 0 of 2 has lost another worker: ")


def _said(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
