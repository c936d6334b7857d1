"""Models divided by `fully_shard`, and K-FAC divided over workers, do what one process does with the whole.

One group of 2 processes (and one of 4, slow) answers every question of this file; the answers of one worker come from this
process, with a plain model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nhgd
from nhgd._shards import whole
from nhgd.algorithm import AID, NHGD
from nhgd.data_parallel import AbstractTeam, Alone, Team
from nhgd.errors import InputError
from nhgd.execution import Distributed, Inline
from nhgd.inverse import CG, EKFAC, KFAC
from tests.processes import together
from tests.test_team import BATCH, Scaled, _said, data, made, net, outcome

Answers = dict[str, Any]


def sharded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0] if isinstance(model, nn.Sequential) else model.conv)
    return fully_shard(model)


def scaled() -> nn.Module:
    """A convolution of two channels, and a parameter outside of layers."""
    return Scaled().double()


ADAMW = partial(torch.optim.AdamW, weight_decay=0.0)
MOMENTUM = partial(torch.optim.SGD, momentum=0.9)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "kfac": (NHGD(KFAC()), {}),
    "kfac, AdamW": (NHGD(KFAC()), {"inner_optimizer": ADAMW, "inner_lr": 0.02}),
    "kfac, periods": (NHGD(KFAC(invert_every=2)), {"inner_optimizer": MOMENTUM, "inner_lr": 0.05}),
    "kfac, no ridge": (NHGD(KFAC(damping=None), cross="trajectory"), {"l2": 0.0}),
    "kfac, refined": (NHGD(refine=2), {"project": 1.5}),
    "kfac, scaled losses": (
        NHGD(KFAC(overhead=None)),
        {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=10**6)},
    ),
    "kfac, at rest": (NHGD(KFAC(invert_every=2, kept_dtype=torch.float16, offload=True)), {}),
    "cg": (AID(CG(steps=4)), {"inner_optimizer": ADAMW, "inner_lr": 0.02}),
    "f2sa": ("f2sa", {"inner_optimizer": ADAMW, "inner_lr": 0.02}),
    "bome": ("bome", {}),
}


def solver(
    team: AbstractTeam, problem: nhgd.Bilevel, method: Any, divide: bool = False, **settings: Any
) -> nhgd.Solver:
    x, y = data()
    given = {"inner_steps": 3, "inner_lr": 0.3, "outer_lr": 0.5} | settings
    execution = given.pop("execution", Inline(team=team, divide=divide))
    batches, judges = nhgd.Data(x, y, batch=BATCH), nhgd.Data(x.flip(0), y.flip(0), batch=13)
    return nhgd.Solver(problem, batches, judges, method=method, execution=execution, **given)


def found_by(
    team: AbstractTeam, case: str, wrap: Callable[[nn.Module], nn.Module], divide: bool, **more: Any
) -> Answers:
    method, settings = CASES[case][0], CASES[case][1] | more
    torch.manual_seed(1)
    model = wrap(scaled() if case == "kfac" else net())
    problem = made(model)
    problem.l2 = settings.get("l2", problem.l2)
    run = solver(team, problem, method, divide, **{name: value for name, value in settings.items() if name != "l2"})
    found = outcome(run, 3)
    if run.loop.inverse is not None and run.loop.inverse.learner is not None:
        found["layers"] = sorted(run.executor.state()[0].inputs)
    moments = [t for state in run.loop.theta.optimizer.state.values() for t in state.values() if t.ndim]
    found["moments"] = sum(local(t).numel() for t in moments)
    problem.reshard()
    kept = dict(model.named_parameters())
    found["given back"] = np.concatenate([whole(p).detach().flatten().numpy() for p in kept.values()])
    found["held"] = sum(local(p).numel() for p in kept.values())
    return found


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def trained_by_fsdp(team: Team) -> Answers:
    """A module that was used here and given back is trained by FSDP's own hooks as one that never was."""
    x, y = data()
    found = []
    for used in (True, False):
        torch.manual_seed(1)
        model = sharded(net())
        if used:
            problem = made(model)
            solver(team, problem, NHGD(KFAC()), inner_lr=1e-30).run(steps=1)  # theta stays
            problem.reshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            F.cross_entropy(model(x[team.rank :: 2]), y[team.rank :: 2]).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]).detach().numpy())
    return {"used": found[0], "never used": found[1]}


def refusals(team: Team, folder: str) -> dict[str, str]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    def after_reshard() -> None:
        problem = made(sharded(net()))
        problem.reshard()
        solver(team, problem, NHGD(KFAC()))

    def as_v() -> None:
        nhgd.Bilevel(lambda *_: torch.zeros(1), lambda *_: torch.zeros(()), torch.zeros(2), sharded(net()))

    def half() -> None:
        made(fully_shard(net(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))

    problem = made(sharded(net()))
    return {
        name: _said(ask)
        for name, ask in {
            "no team": lambda: solver(Alone(), problem, NHGD(KFAC())),
            "checkpoint": lambda: solver(team, problem, NHGD(KFAC()), checkpoint=folder),
            "divided checkpoint": lambda: solver(team, made(), NHGD(KFAC()), True, checkpoint=folder),
            "ekfac": lambda: solver(team, made(), NHGD(EKFAC()), True),
            "natural": lambda: solver(team, made(), NHGD(inner="natural"), True).run(steps=1),
            "lbfgs": lambda: solver(team, problem, NHGD(KFAC()), inner_optimizer=torch.optim.LBFGS).run(steps=1),
            "observing": lambda: nhgd.observing(problem),
            "after reshard": after_reshard,
            "v": as_v,
            "half": half,
        }.items()
    }


def everything(rank: int, size: int, folder: str) -> Answers:
    team = Team.of()
    assert isinstance(team, Team)
    found: Answers = {}
    for case in CASES:
        found[f"{case}, sharded"] = found_by(team, case, sharded, divide=False)
        if case.startswith("kfac"):
            found[f"{case}, both"] = found_by(team, case, sharded, divide=True)
    found["kfac, replicated"] = found_by(team, "kfac", DistributedDataParallel, divide=True)
    if size == 2:
        found |= {"fsdp": trained_by_fsdp(team), "refusals": refusals(team, folder)}
    execution = Distributed(curvature_ranks=0, divide=True)  # which ends the group that it meets in
    found["kfac, both, as torchrun starts it"] = found_by(team, "kfac", sharded, True, execution=execution)
    return found


@cache
def answers(size: int) -> list[Answers]:
    with tempfile.TemporaryDirectory() as folder:
        return together(everything, size, folder)


@cache
def alone(case: str) -> Answers:
    return found_by(Alone(), case, lambda model: model, divide=False)


WAYS = [
    *(f"{case}, sharded" for case in CASES),
    *(f"{case}, both" for case in CASES if case.startswith("kfac")),
    "kfac, replicated",
    "kfac, both, as torchrun starts it",
]


def case_of(way: str) -> str:
    """The longest name of a case that a way begins with."""
    return max((case for case in CASES if way.startswith(case + ",")), key=len)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_divided_over_ranks_it_is_the_run_of_one_process(way: str, size: int) -> None:
    one, ranks = alone(case_of(way)), [rank[way] for rank in answers(size)]
    for found in ranks:
        for key in ("v", "theta", "losses", "given back"):
            assert np.abs(found[key] - one[key]).max() < 1e-10, key
        assert np.array_equal(found["theta"], found["given back"])
        assert np.array_equal(found["v"], ranks[0]["v"])
        assert found["calls"] == one["calls"]
    assert np.abs(one["v"] - np.linspace(-1, 1, len(one["v"]))).max() > 1e-4


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", WAYS)
def test_each_rank_holds_its_part(way: str, size: int) -> None:
    one, ranks = alone(case_of(way)), [rank[way] for rank in answers(size)]
    if way.endswith("replicated"):
        assert all(found["held"] == one["held"] for found in ranks)
    else:
        for key in ("held", "moments"):  # a rank may have none of a small parameter, but all together have all
            assert sum(found[key] for found in ranks) == one[key], key
            assert all(found[key] < one[key] or not one[key] for found in ranks)
    if "layers" in one:
        layers = [found["layers"] for found in ranks]
        if not way.endswith("sharded"):
            assert sorted(name for some in layers for name in some) == one["layers"]
            assert sum(map(bool, layers)) == min(size, len(one["layers"]))
        else:
            assert all(some == one["layers"] for some in layers)


def test_fsdp_goes_on_where_nhgd_ended() -> None:
    for rank in answers(2):
        assert np.abs(rank["fsdp"]["used"] - rank["fsdp"]["never used"]).max() < 1e-12


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no team", "divided by fully_shard over 2 ranks"),
        ("checkpoint", "moments are divided by fully_shard"),
        ("divided checkpoint", "Omit one of the two"),
        ("ekfac", "cannot be divided over workers"),
        ("natural", "the whole curvature"),
        ("lbfgs", "LBFGS cannot move theta"),
        ("observing", "does not support a theta divided by fully_shard"),
        ("after reshard", "Make a new Bilevel"),
        ("v", "supported for theta alone"),
        ("half", "Omit its mp_policy"),
    ],
)
def test_what_is_not_supported_is_refused_with_the_remedy(what: str, words: str) -> None:
    for rank in answers(2):
        said = rank["refusals"][what]
        assert said.startswith("InputError")
        assert words in said


def test_dividing_over_workers_excludes_curvature_ranks() -> None:
    with pytest.raises(InputError, match="Set curvature_ranks=0"):
        Distributed(divide=True)
