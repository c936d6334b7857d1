"""N workers with slices of a batch do what one worker does with all of it.

One group of 2 processes and one of 4 answer every question of this file; the answers of one worker come from this process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd.algorithm import AID, BSA, MRBO, NHGD, VRBO, AbstractAlgorithm, AmIGO, NHGDSingle, StocBiO
from nhgd.data_parallel import AbstractTeam, Alone, Team, divided
from nhgd.errors import InputError, RunError
from nhgd.execution import Inline
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Neumann
from nhgd.loop.loop import Loop
from nhgd.loop.settings import LoopSettings
from nhgd.oracle import Oracle
from nhgd.task import Cleaning
from tests import oracles
from tests.processes import together

SIZES = (2, 4)
SAMPLES, BATCH = 33, 8  # the last batch of a pass has one sample: fewer than there are workers
Answers = dict[str, Any]


def net(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 3)).double()


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


def eights() -> list[Any]:
    x, y = data()
    return [(x[i : i + 8], y[i : i + 8], torch.arange(i, i + 8)) for i in range(0, 32, 8)]


class Scaled(nn.Module):
    """A convolution, and a parameter outside of Linear and Conv2d layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2)
        self.out = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        image = F.pad(x, (0, 4)).reshape(-1, 1, 3, 3)
        found: Tensor = self.out(self.scale * self.conv(image).tanh().flatten(1))
        return found


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 5, dtype=torch.float64, generator=generator)
    return x, (x[:, :3] + torch.randn(SAMPLES, 3, dtype=torch.float64, generator=generator)).argmax(1)


def made(
    model: nn.Module | None = None,
    total: bool = False,
    weighted: bool = True,
    entries: int = SAMPLES,
    device: str = "cpu",
) -> nhgd.Bilevel:
    """Weights of samples; `total` makes the outer loss a sum, which cannot be divided as a mean."""
    l2 = 0.05
    if model is None:
        torch.manual_seed(1)
        model = net().to(device)

    def inner(model: Any, v: Tensor, batch: Any) -> nhgd.Losses:
        x, y, i = batch
        z = model(x)
        return nhgd.Losses(F.cross_entropy(z, y, reduction="none"), v[i].sigmoid() if weighted else None, z)

    def outer(model: Any, v: Tensor, batch: Any) -> Tensor:
        fit = F.cross_entropy(model(batch[0]), batch[1], reduction="sum" if total else "mean")
        return fit + 0.01 * v.square().sum() if entries == SAMPLES else fit

    v = torch.linspace(-1, 1, entries, dtype=torch.float64).to(device)
    if not weighted:

        def ridge(v: Tensor) -> Tensor:
            return l2 * v.mean().exp()

        return nhgd.Bilevel(inner, outer, model, v, l2=ridge, likelihood="categorical")
    return nhgd.Bilevel(inner, outer, model, v, l2=l2, likelihood="categorical")


def solver(team: AbstractTeam, problem: nhgd.Bilevel, method: str | AbstractAlgorithm, **settings: Any) -> nhgd.Solver:
    x, y = data()
    given: dict[str, Any] = {"inner_steps": 3, "inner_lr": 0.3, "outer_lr": 0.5} | settings
    inner_data = given.pop("inner_data", nhgd.Data(x, y, batch=BATCH))
    outer_data = nhgd.Data(x.flip(0), y.flip(0), batch=13)
    return nhgd.Solver(problem, inner_data, outer_data, method=method, execution=Inline(team=team), **given)


def outcome(run: nhgd.Solver, steps: int) -> Answers:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nhgd.errors.InverseWarning)
        solution = run.run(steps=steps)
    return {
        "v": run.problem.v.flat().cpu().numpy(),
        "theta": run.problem.theta.flat().cpu().numpy(),
        "losses": np.array([[row["outer_loss"], row["inner_loss"]] for row in solution.history]),
        "calls": run.loop.calls.as_dict(),
    }


METHODS: dict[str, str | AbstractAlgorithm] = {
    "kfac kept": NHGD(KFAC(invert_every=2)),
    "kfac cholesky": NHGD(KFAC(solver="cholesky")),
    "kfac exact": NHGD(KFAC(fisher="exact", beta=None)),
    "ekfac": NHGD(EKFAC(invert_every=2)),
    "diagonal": NHGD(FisherDiagonal()),
    "window": NHGD(FisherWindow(window=20)),
    "window of rows": NHGD(FisherWindow(window=5, records="sample")),
    "window exact": NHGD(FisherWindow(window=9, fisher="exact")),
    "dense": NHGD(FisherDense()),
    "dense exact": NHGD(FisherDense(fisher="exact", update="ema")),
    "dense inverse": NHGD(FisherDense(form="inverse")),
    "refined": NHGD(refine=3),
    "trajectory": NHGD(cross="trajectory"),
    "final": NHGD(cross="final"),
    "lagged": NHGD(cross="lagged"),
    "natural": NHGD(inner="natural"),
    "at the end": NHGD(observe="end", batches="all"),
    "nhgd-paper": "nhgd-paper",
    "nhgd_single": NHGDSingle(KFAC(overhead=None)),
    "aid-cg": AID(CG(steps=5), batches=2),
    "aid-neumann": AID(Neumann(terms=4)),
    "bsa": BSA(K=3),
    "amigo": AmIGO(K=2),
    "mrbo": MRBO(K=2),
    "stocbio": StocBiO(K=2),
    "vrbo": VRBO(K=2, large=2),
} | {name: name for name in ("alset", "bome", "f2sa", "fsla", "saba", "soba", "sustain", "ttsa")}
FEW = ("ekfac", "window", "dense inverse", "trajectory", "final", "lagged", "refined")  # for more than two workers
OTHERS = ("dense of many rows", "convolution", "batch gradients", "few entries of v")


def runs(team: AbstractTeam) -> Answers:
    found: Answers = {}
    task = Cleaning(
        dataset="digits", train=120, trusted=40, evaluation=30, batch=48, inner_steps=4, dtype="float64", batches=1
    )
    instance = task.build(0, torch.device("cpu"))
    run = instance.start(NHGD(KFAC()), execution=Inline(team=team), metrics_every=100)
    found["cleaning"] = outcome(run, 20)
    found["mlp"] = outcome(solver(team, made(), NHGD(KFAC())), 20)
    for name, method in METHODS.items():
        if team.size <= 2 or name in FEW:
            found[name] = outcome(solver(team, made(), method), 3)
    all_data = [(*data(), torch.arange(SAMPLES))]  # with three rows a sample, more of them than parameters
    dense = NHGD(FisherDense(fisher="exact"))
    found["dense of many rows"] = outcome(solver(team, made(), dense, inner_data=all_data), 3)
    if isinstance(team, Team):
        team.sparse_from = 1
    found["few entries of v"] = outcome(solver(team, made(entries=4000), NHGD(KFAC())), 3)
    if isinstance(team, Team):
        team.sparse_from = 2**14
    torch.manual_seed(2)
    found["convolution"] = outcome(solver(team, made(Scaled().double()), NHGD(KFAC())), 3)
    batch_gradients = NHGD(FisherDense(records="batch"))
    found["batch gradients"] = outcome(solver(team, made(weighted=False), batch_gradients, inner_data=all_data), 3)
    return found


def quantities(team: AbstractTeam, device: str = "cpu") -> Answers:
    """Everything a point and a record answer, on one batch of 13 and one of 2, at one place."""
    problem = made(device=device)
    x, y, index = (t.to(device) for t in (*data(), torch.arange(SAMPLES)))
    batches = [(x[:13], y[:13], index[:13]), (x[13:15], y[13:15], index[13:15])]
    division = stage_of(team, problem, batches, [(x[:11], y[:11])]).division
    at = Oracle.over(division.objectives(batches, seed=3), division.outer((x[:11], y[:11]), seed=3))
    generator = torch.Generator().manual_seed(9)
    u = torch.randn(problem.theta.numel, dtype=torch.float64, generator=generator).to(device)
    inner, (live, live_leaves) = at.inner_gradients(), at.live_gradient()
    product, cross = at.products(u)
    outer = at.outer()
    found: dict[str, Tensor | float] = {
        "hvp": at.hvp(u),
        "hvps": at.hvps(torch.stack([u, 2 * u]))[1],
        "hvp_on": at.hvp_on(0, u),
        "cross": at.cross(u)[0],
        "products": product,
        "products in v": cross[0],
        "ggn": at.ggn(u),
        "empirical_fisher": at.empirical_fisher(u),
        "gradient": at.gradient(),
        "live": live,
        "live_gradient": problem.theta.flatten(live_leaves),
        "inner value": inner.value,
        "inner in theta": inner.theta,
        "inner in v": inner.v[0],
        "inner_value": at.inner_value(),
        "outer value": outer.value,
        "outer in theta": outer.theta,
        "outer in v": outer.v[0],
        "outer_value": at.outer_value(),
    }
    for name, inverse in {
        "kfac": KFAC(),
        "ekfac": EKFAC(),
        "diagonal": FisherDiagonal(),
        "dense": FisherDense(),
        "dense inverse": FisherDense(form="inverse"),
        "window": FisherWindow(),
    }.items():
        executor = Inline(team=team)
        executor.start(inverse, problem.theta, problem.v)
        recorder = Recorder(problem, inverse.records)
        for batch in batches:
            step = division.objective(batch).step(recorder)
            assert step.record is not None
            executor.submit(step.record)
        found[f"solve by {name}"] = inverse.apply(executor.curvature().state, u, at)[0]
        found["loss of a step"] = step.value
        found["gradient of a step"] = problem.theta.flatten(step.gradient)
    return {name: np.asarray(value.cpu() if isinstance(value, Tensor) else value) for name, value in found.items()}


def stage_of(team: AbstractTeam, problem: nhgd.Bilevel, inner_data: Any, outer_data: Any = None) -> Loop:
    return Loop(problem, inner_data, outer_data or inner_data, LoopSettings(), Inline(team=team))


def exchanges(team: Team) -> Answers:
    """What is true of a team whatever the numbers; each entry is what the test looks at."""
    found: Answers = {}
    own, shard = divided((torch.arange(7.0), torch.arange(7)), team)
    assert shard is not None
    assert shard.parts is not None
    found["parts"] = shard.parts
    found["whole again"] = team.gather(list(own), shard.parts)[1].tolist()
    found["too few"] = divided(torch.zeros(1), team)[1] is None
    found["sum in half"] = team.sum([torch.ones(3, dtype=torch.bfloat16)])[0].tolist()

    sparse = torch.zeros(4000, dtype=torch.float64)
    sparse[torch.tensor([3, 10 + team.rank, 3999])] = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64) * (
        1 + team.rank
    )
    dense = torch.linspace(0, 1, 4000, dtype=torch.float64) + team.rank
    for name, tensor in (("few", sparse), ("many", dense)):
        team.sparse_from = 1
        before = team.bytes_sent
        summed = team.sparse_sum([tensor[:10], tensor[10:].reshape(2, -1)])
        sent = team.bytes_sent - before
        true = team.sum([tensor])[0]
        team.sparse_from = 2**14
        found[f"{name} entries"] = {
            "error": float((torch.cat([s.flatten() for s in summed]) - true).abs().max()),
            "bytes": sent,
        }

    owners = team.divide([8.0, 1.0, 27.0, 27.0, 1.0])
    made_here: list[int] = []

    def make(i: int) -> Tensor:
        made_here.append(i)
        return torch.full((2,), float(i))

    items = team.exchange([torch.empty(2)] * 5, owners, make)
    found["exchanged"] = [item.tolist() for item in items]
    found["made by its owner"] = made_here == [i for i, who in enumerate(owners) if who == team.rank]
    found["owners"] = owners
    found["agreed"] = team.agreed(10.0 + team.rank)
    found["union"] = sorted(team.union([str(team.rank)], ["0", "1", "2"]))
    return found


def behaviour(team: Team) -> Answers:
    found: Answers = {}
    x, y = data()

    # Workers that begin with different numbers take those of the first.
    torch.manual_seed(100 + team.rank)
    model = net()
    run = solver(team, made(model), NHGD(KFAC()))
    found["began alike"] = run.problem.theta.flat().numpy()

    # Dropout: different masks, the same replicas, and common generators that stay in step.
    torch.manual_seed(4)
    run = solver(team, made(net(dropout=0.5)), NHGD(KFAC(), cross="trajectory"), inner_lr=0.1)
    found["dropout"] = outcome(run, 3)
    state = run._progress.randomness.state()
    found["dropout"]["generator"] = [np.asarray(state["cpu"]), np.asarray(state["numpy"])]
    masks = []
    for seed in (1, 1, 2):
        loop = run.loop
        found_here = loop.oracle([(x[:8], y[:8], torch.arange(8))], None, seed)
        masks.append(found_here.gradient().numpy())
    found["dropout replayed"] = np.array_equal(masks[0], masks[1]) and not np.array_equal(masks[0], masks[2])

    # Over the inner steps of a loop in which nothing else draws, each step has masks of its own.
    seen: list[np.ndarray[Any, Any]] = []
    model = net(dropout=0.5)
    model[2].register_forward_hook(lambda module, given, result: seen.append((result != 0).numpy()))
    run = solver(team, made(model), AID(CG(steps=2)), inner_data=eights()[:1], inner_steps=6)
    run.step()  # finds out that the loss can be divided
    seen.clear()
    run.step()
    found["masks of inner steps"] = [mask for mask in seen if len(mask) == 8 // team.size][:6]

    # An outer loss that is a sum is computed by all; so is an inner loss with batch statistics.
    run = solver(team, made(total=True), NHGD(KFAC()))
    found["sum"] = outcome(run, 3)
    found["sum division"] = run.solution().stats["execution"]["division"]
    torch.manual_seed(4)
    run = solver(team, made(normalised()), AID(CG(steps=3)), inner_data=eights())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found["batchnorm"] = outcome(run, 3)
    found["batchnorm division"] = run.solution().stats["execution"]["division"]
    found["batchnorm warned"] = [str(w.message) for w in said]

    # A module in DistributedDataParallel.
    torch.manual_seed(1)
    wrapped = nn.parallel.DistributedDataParallel(net())
    run = solver(team, made(wrapped), NHGD(KFAC()))
    found["wrapped"] = outcome(run, 3)
    found["wrapped given back"] = run.solution().theta is wrapped

    # A loader with a DistributedSampler hands out parts.
    dataset = TensorDataset(x[:32], y[:32], torch.arange(32))
    sampler: Any = DistributedSampler(dataset, team.size, team.rank, shuffle=False)
    loader: Any = DataLoader(dataset, batch_size=8 // team.size, sampler=sampler)
    run = solver(team, made(), NHGD(KFAC()), inner_data=loader)
    found["sampler"] = outcome(run, 3)

    # Replicas that drift apart stop the run.
    run = solver(team, made(), NHGD(KFAC()))
    run.step()
    if team.rank == team.size - 1:
        with torch.no_grad():
            run.problem.v.leaves[0][3] += 1e-12
    for name, ask in {
        "drift": lambda: run.run(steps=1),
        "other data": lambda: solver(team, made(), NHGD(KFAC()), seed=team.rank).run(steps=1),
        "itd": lambda: solver(team, made(), "itd"),
    }.items():
        found[name] = _said(ask)

    found["budget"] = len(solver(team, made(), NHGD(KFAC())).run(budget=0.3).history)
    return found


def _said(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except (RunError, InputError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def everything(rank: int, size: int) -> Answers:
    team = Team.of()
    assert isinstance(team, Team)
    assert (team.rank, team.size) == (rank, size)
    return {
        "runs": runs(team),
        "quantities": quantities(team),
        "exchanges": exchanges(team),
        "behaviour": behaviour(team),
    }


@cache
def answers(size: int) -> list[Answers]:
    """What every rank of a group says."""
    return together(everything, size)


@cache
def alone() -> Answers:
    """What one worker says, which never hears of a team."""
    return {"runs": runs(Alone()), "quantities": quantities(Alone())}


def equal_bits(found: list[Any]) -> bool:
    return all(np.array_equal(np.asarray(f), np.asarray(found[0])) for f in found)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, size) for size in SIZES for name in ("cleaning", "mlp", *(METHODS if size == 2 else FEW), *OTHERS)],
)
def test_workers_with_parts_of_a_batch_are_one_worker_with_all_of_it(name: str, size: int) -> None:
    found, one = [rank["runs"][name] for rank in answers(size)], alone()["runs"][name]
    for key in ("v", "theta"):
        assert equal_bits([rank[key] for rank in found])
        assert np.abs(found[0][key] - one[key]).max() < 1e-10
    assert np.abs(found[0]["losses"] - one["losses"]).max() < 1e-10
    assert found[0]["calls"] == one["calls"]


def test_the_run_that_is_compared_moves_v() -> None:
    for name in ("cleaning", "mlp", *METHODS, *OTHERS):
        run = alone()["runs"][name]
        first = 0.5 if name == "cleaning" else np.linspace(-1, 1, len(run["v"]))
        assert np.abs(run["v"] - first).max() > 1e-4, name


@pytest.mark.parametrize("size", SIZES)
def test_every_quantity_is_that_of_the_whole_batch(size: int) -> None:
    for name, value in alone()["quantities"].items():
        found = [rank["quantities"][name] for rank in answers(size)]
        assert equal_bits(found), name
        np.testing.assert_allclose(found[0], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("size", SIZES)
def test_quantities_against_the_oracle(size: int) -> None:
    found, problem = answers(size)[0]["quantities"], made()
    x, y = data()
    batch = (x[:15], y[:15], torch.arange(15))  # the mean over both batches, by their sizes
    u = torch.randn(problem.theta.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    for name, value in {
        "hvp": oracles.hessian(problem, batch) @ u,
        "cross": oracles.cross(problem, batch).T @ u,
        "gradient": oracles.gradient(problem, batch),
        "empirical_fisher": oracles.damped_fisher(problem, batch) @ u,
    }.items():
        np.testing.assert_allclose(
            found[name], value.detach().numpy().reshape(found[name].shape), rtol=1e-8, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize("size", SIZES)
def test_what_is_exchanged(size: int) -> None:
    found = [rank["exchanges"] for rank in answers(size)]
    first = found[0]
    assert first["parts"] == ((4, 3) if size == 2 else (2, 2, 2, 1))
    assert first["whole again"] == list(range(7))
    assert first["too few"]
    assert first["sum in half"] == [size] * 3
    assert all(rank["few entries"]["error"] < 1e-15 for rank in found)
    assert all(rank["many entries"]["error"] == 0 for rank in found)
    assert first["few entries"]["bytes"] < 4000 * 8 / 100 < first["many entries"]["bytes"]
    assert first["exchanged"] == [[float(i)] * 2 for i in range(5)]
    assert all(rank["made by its owner"] for rank in found)
    assert first["owners"] == ([0, 1, 0, 1, 1] if size == 2 else [2, 3, 0, 1, 3])
    assert [rank["agreed"] for rank in found] == [10.0] * size
    assert first["union"] == ["0", "1"] if size == 2 else ["0", "1", "2"]


@pytest.mark.parametrize("size", SIZES)
def test_workers_stay_replicas(size: int) -> None:
    found = [rank["behaviour"] for rank in answers(size)]
    assert equal_bits([rank["began alike"] for rank in found])
    for name in ("dropout", "sum", "batchnorm", "wrapped", "sampler"):
        for key in ("v", "theta", "losses"):
            assert equal_bits([rank[name][key] for rank in found]), name
    for part in range(2):
        assert equal_bits([rank["dropout"]["generator"][part] for rank in found])
    assert all(rank["dropout replayed"] for rank in found)
    for rank in found:
        masks = {mask.tobytes() for mask in rank["masks of inner steps"]}
        assert len(masks) == len(rank["masks of inner steps"]) == 6
    assert len({rank["budget"] for rank in found}) == 1


@pytest.mark.parametrize("size", SIZES)
def test_what_cannot_be_divided_is_computed_by_all(size: int) -> None:
    first = answers(size)[0]["behaviour"]
    assert first["sum division"] == {"inner": "divided", "outer": "replicated"}
    assert first["batchnorm division"] == {"inner": "replicated", "outer": "replicated"}
    assert len(first["batchnorm warned"]) == 1
    assert "not the mean over its samples" in first["batchnorm warned"][0]
    assert not answers(size)[1]["behaviour"]["batchnorm warned"]
    one = outcome(solver(Alone(), made(total=True), NHGD(KFAC())), 3)
    assert np.abs(first["sum"]["v"] - one["v"]).max() < 1e-10
    torch.manual_seed(4)
    one = outcome(solver(Alone(), made(normalised()), AID(CG(steps=3)), inner_data=eights()), 3)
    assert np.abs(first["batchnorm"]["v"] - one["v"]).max() < 1e-12


@pytest.mark.parametrize("size", SIZES)
def test_modules_and_loaders_made_for_data_parallel_training(size: int) -> None:
    first = answers(size)[0]["behaviour"]
    one = outcome(solver(Alone(), made(), NHGD(KFAC())), 3)
    assert np.abs(first["wrapped"]["v"] - one["v"]).max() < 1e-10
    assert first["wrapped given back"]
    # The sampler deals samples out one by one, so the whole batch is the same eight samples in another order.
    dataset = TensorDataset(*(t[:32] for t in data()), torch.arange(32))
    loader: Any = DataLoader(dataset, batch_size=8)
    one = outcome(solver(Alone(), made(), NHGD(KFAC()), inner_data=loader), 3)
    assert np.abs(first["sampler"]["v"] - one["v"]).max() < 1e-10


@pytest.mark.parametrize("size", SIZES)
def test_workers_that_differ_are_told(size: int) -> None:
    for rank in answers(size):
        found = rank["behaviour"]
        assert found["drift"].startswith(
            f"RunError: The workers have diverged: v of rank {size - 1} differs from that of rank 0."
        )
        assert "the first inner batch of rank 1" in found["other data"]
        assert found["itd"].startswith("InputError: ITD differentiates")


def left_alone(rank: int, model: nn.Module | None = None) -> str:
    """What a worker says whose only colleague dies in the middle of a run."""
    run = solver(Team(timeout=20.0), made(model), NHGD(KFAC()))
    run.step()
    if rank == 1:
        os._exit(3)
    return _said(lambda: run.run(steps=50))


def dying(rank: int, size: int) -> str:
    return left_alone(rank)


def test_a_dead_worker_is_a_sentence_not_a_hang() -> None:
    found = together(dying, 2, lost=(1,), limit=60.0)
    assert found[0].startswith("PeerError: Rank 0 of 2 has lost another worker: ")
    assert found[1] is None


def test_a_team_needs_a_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(InputError, match="init_process_group"):
        Team()
