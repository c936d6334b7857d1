"""Curvature in other processes against the inline run. Groups of 2 and 4 processes answer every question of this file."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._tree import tensors
from nhgd.algorithm import AID, NHGD, AbstractAlgorithm, NHGDSingle
from nhgd.errors import InputError, NhgdError, NonFiniteError, PeerError, RunError
from nhgd.execution import Distributed, Inline
from nhgd.execution.assignment import Assignment
from nhgd.execution.distributed import client
from nhgd.execution.distributed.messages import Messenger
from nhgd.execution.distributed.roles import Roles
from nhgd.execution.distributed.server import Server
from nhgd.execution.distributed.wire import Layout, from_bytes, shapes, to_bytes
from nhgd.execution.group import Outcome
from nhgd.inverse import CG, EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Refined
from nhgd.loop.loop import Loop, StepInfo
from nhgd.record import joined
from nhgd.ridge import Ridge
from nhgd.variable import Variable
from tests import catalogue, oracles
from tests.histories import CLOCKED
from tests.processes import together

Answers = dict[str, Any]
SAMPLES, BATCH, STEPS, INNER = 12, 4, 3, 5
INVERSES: dict[str, Any] = {
    "kfac": KFAC(damping=None, overhead=None),
    "kfac, kept bases": KFAC(invert_every=2, damping=None),
    "ekfac": EKFAC(invert_every=3, damping=None),
    "window": FisherWindow(window=24, damping=None, overhead=None),
    "dense": FisherDense(damping=None),
    "raw": FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset"),
    "diagonal": FisherDiagonal(damping=None, overhead=None),
    "refined": Refined(KFAC(damping=None, overhead=None), steps=2, matrix="ggn"),
}
LAGS = (0, 3)


class Mixed(nn.Module):
    """Two Linear layers, a convolution, and a parameter outside of all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 2, padding=1)
        self.first = nn.Linear(12, 4)
        self.last = nn.Linear(4, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> Any:
        z = self.conv(x.reshape(-1, 1, 1, 5)).flatten(1)[:, :12]
        return self.last(torch.tanh(self.first(z)) * self.scale)


def problem_of(net: Callable[[], nn.Module], l2: Any = 0.02) -> catalogue.Made:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        problem, inner, outer = catalogue.of_classifier(net(), features=5, shape=(5,), samples=SAMPLES)
    if l2 != 0.02:
        problem = nhgd.Bilevel(
            catalogue.cross_entropy,
            catalogue.mean_cross_entropy,
            problem.theta.given,
            problem.v.given,
            l2=l2,
            likelihood="categorical",
        )
    return problem, inner, outer


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def a_solver(execution: Any, method: Any, net: Any = small, l2: Any = 0.02, **settings: Any) -> nhgd.Solver:
    problem, (x, y, _), outer = problem_of(net, l2)
    data = nhgd.Data(x, y, batch=BATCH)
    kept = {"inner_steps": INNER, "outer_lr": 1.0, "inner_lr": 0.1} | settings
    return nhgd.Solver(problem, data, [outer], method=method, execution=execution, **kept)


def facts(solver: nhgd.Solver, solution: nhgd.Solution) -> Answers:
    """v, theta and the history without clocks, as plain values."""
    rows = [{k: v for k, v in row.items() if k not in (*CLOCKED, "bytes_sent", "lag")} for row in solution.history]
    return {
        "v": oracles.v_of(solver.problem).tolist(),
        "theta": oracles.theta_of(solver.problem).tolist(),
        "rows": rows,
        "stats": solution.stats,
    }


def solved(execution: Any, method: Any, steps: int = STEPS, **settings: Any) -> Answers:
    solver = a_solver(execution, method, **settings)
    try:
        return facts(solver, solver.run(steps=steps))
    finally:
        solver.close()


def said(work: Callable[[], Any]) -> tuple[str, str]:
    """The error of something that must fail."""
    try:
        work()
    except NhgdError as error:
        return type(error).__name__, str(error)
    return "nothing", ""


# What the processes do.


def in_two(rank: int, size: int, folder: str) -> Answers:
    """One inner rank, one curvature rank."""
    found: Answers = {}
    for name, inverse in INVERSES.items():
        for lag in LAGS:
            found[f"{name} {lag}"] = solved(Distributed(max_lag=lag), NHGD(inverse))
    found["trajectory"] = solved(Distributed(), NHGD(KFAC(), cross="trajectory"))
    found["fresh"] = solved(Distributed(), NHGD(KFAC(), curvature="fresh"))
    found["single"] = solved(Distributed(), NHGDSingle(KFAC()))
    found["aid"] = solved(Distributed(), AID(KFAC()))
    found["mixed"] = solved(Distributed(), NHGD(KFAC()), net=Mixed)
    found["ridge of its own"] = solved(Distributed(), NHGD(KFAC()), l2=ridge)
    found["overhead"] = overhead()
    found["twice"] = twice(rank)
    found["loop"] = loop(rank)
    found["stale"] = stale(rank)
    found["checkpoint"] = broken_off(rank, folder, Distributed)
    found["non-finite"] = said(lambda: solved(Distributed(), NHGD(KFAC()), inner_lr=1e200, steps=9))
    dist.barrier()
    found["idle"] = said(lambda: solved(Distributed(), AID(CG())))
    dist.barrier()
    found["too few"] = said(lambda: solved(Distributed(curvature_ranks=2), NHGD(KFAC())))
    found["many shapes"] = many_shapes()
    found["undelivered"] = undelivered(rank)
    dist.barrier()
    found["held"] = held()
    found["kept"] = kept_messages()
    return found


def many_shapes() -> Answers:
    """Batches of seven sizes in turn, where both sides remember three; and how many forms they have kept."""
    client.LAYOUTS = 3
    executor = Distributed()
    solver = of_many_sizes(executor)
    try:
        found = facts(solver, solver.run(steps=STEPS))
        kept: Any = executor.group.client or executor.group.server
        return found | {"forms": len(kept._layouts)}
    finally:
        solver.close()
        client.LAYOUTS = 64


def kept_messages() -> int:
    """How many messages this process holds in memory after twelve outer steps."""
    executor = Distributed()
    solver = a_solver(executor, NHGD(INVERSES["kfac"]))
    try:
        solver.run(steps=12)
        kept: Any = executor.group.client or executor.group.server
        return sum(len(sent) for sent in kept._sent)
    finally:
        solver.close()


def of_many_sizes(execution: Any) -> nhgd.Solver:
    problem, (x, y, i), outer = problem_of(small)
    batches = [(x[:size], y[:size], i[:size]) for size in range(2, 9)]
    return nhgd.Solver(problem, batches, [outer], method=NHGD(KFAC()), execution=execution, inner_steps=INNER)


def undelivered(rank: int) -> tuple[Any, ...]:
    """A curvature rank that lives but takes no messages any more: the end of the run cannot be told to it."""
    executor = Distributed(timeout=1.0)
    problem, _, _ = problem_of(small)
    executor.start(KFAC(), problem.theta)
    dist.barrier()
    found: tuple[Any, ...] = ()
    if rank == 0:
        began = time.monotonic()
        try:
            executor.group.finish(lambda: Outcome({}, []))
        except PeerError as error:
            cause = executor.group.root_cause(error)
            assert isinstance(cause, PeerError)
            found = cause.rank, cause.role, cause.silent, str(cause), time.monotonic() - began
    dist.barrier()
    executor.close()
    return found


def held() -> list[tuple[int, int]]:
    """Threads and open files of this process after each of twenty solvers."""
    found = []
    for _ in range(20):
        solved(Distributed(), NHGD(KFAC()), steps=1)
        gc.collect()
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return found


def ridge(v: Any) -> Any:
    return v.sigmoid().mean() * 0.1


def overhead() -> Answers:
    """Periods that a clock chose: the same in both processes."""
    solver = a_solver(Distributed(), NHGD(KFAC(overhead=0.5)))
    solver.run(steps=1)
    solver.close()
    return {"inverse": repr(solver.loop.inverse)}


def twice(rank: int) -> Answers:
    solver = a_solver(Distributed(), NHGD(KFAC()))
    solver.run(steps=1)
    try:
        return facts(solver, solver.run(steps=STEPS - 1))
    finally:
        solver.close()


def loop(rank: int) -> Answers:
    solver = a_solver(Distributed(), NHGD(INVERSES["kfac"]))
    for row in solver:
        if row["step"] == STEPS:
            break
    solver.close()
    found = {"v": oracles.v_of(solver.problem).tolist(), "theta": oracles.theta_of(solver.problem).tolist()}
    return found | {"steps": len(solver.history)}


def stale(rank: int) -> Answers:
    solver = a_solver(Distributed(max_lag=4, stale=True), NHGD(KFAC()))
    try:
        solution = solver.run(steps=STEPS)
    finally:
        solver.close()
    return {"lags": [row["lag"] for row in solution.history], "v": oracles.v_of(solver.problem).tolist()}


def broken_off(rank: int, folder: str, backend: Callable[[], Any]) -> Answers:
    """A run that was kept after two steps, and goes on for one."""
    place = Path(folder) / f"of {dist.get_world_size()}"
    solver = a_solver(backend(), NHGD(EKFAC()), checkpoint=place, checkpoint_every=2)
    solver.run(steps=2)
    solver.close()
    dist.barrier()
    return gone_on(backend(), place)


def gone_on(execution: Any, place: Path) -> Answers:
    problem, (x, y, _), outer = problem_of(small)
    data = nhgd.Data(x, y, batch=BATCH)
    solver = nhgd.Solver.resume(place, problem, data, [outer], execution=execution)
    try:
        return facts(solver, solver.run(steps=STEPS))
    finally:
        solver.close()


def in_four(rank: int, size: int, folder: str) -> Answers:
    """Two inner ranks and two curvature ranks, three and one, four and none."""
    found: Answers = {}
    for name in ("kfac", "ekfac", "refined"):
        for lag in LAGS:
            execution = Distributed(max_lag=lag, workers=2, curvature_ranks=2)
            found[f"{name} {lag}"] = solved(execution, NHGD(INVERSES[name]))
    for name in ("window", "dense", "raw", "diagonal"):
        found[f"{name} 3"] = solved(Distributed(max_lag=3), NHGD(INVERSES[name]))
    found["no ridge"] = solved(Distributed(curvature_ranks=2), NHGD(KFAC()), l2=0.0)
    found["mixed"] = solved(Distributed(curvature_ranks=3), NHGD(KFAC()), net=Mixed)
    found["all inner"] = solved(Distributed(curvature_ranks=0), NHGD(KFAC()))
    found["all inner, cg"] = solved(Distributed(curvature_ranks=0), AID(CG(damping=2.0)))
    found["stale"] = solved(Distributed(curvature_ranks=2, stale=True), NHGD(KFAC()))
    found["bytes"] = counted()
    found["checkpoint"] = broken_off(rank, folder, lambda: Distributed(curvature_ranks=2))
    found["three workers"] = gone_on(Distributed(curvature_ranks=1), Path(folder) / "of 2")
    found["undivided"] = said(lambda: solved(Distributed(curvature_ranks=2), NHGD(FisherWindow())))
    dist.barrier()
    found["too many"] = said(lambda: solved(Distributed(curvature_ranks=3), NHGD(KFAC())))
    dist.barrier()
    found["one fails at once"] = said(lambda: solved(Distributed(), StumblingAtOnce(rank)))
    dist.barrier()
    found["one fails"] = said(lambda: solved(Distributed(), Stumbling(rank)))
    return found


def counted() -> int:
    """The bytes that three inner ranks and a curvature rank exchange, without those of the team among itself."""
    executor = Distributed()
    solver = a_solver(executor, NHGD(KFAC(damping=None, overhead=None)))
    try:
        solver.run(steps=STEPS)
        return executor.measured().bytes_sent - executor.group.team.bytes_sent
    finally:
        solver.close()


@dataclass(frozen=True)
class Stumbling(AbstractAlgorithm):
    """A method that fails in one of the inner ranks, and elsewhere waits for it."""

    name: ClassVar[str] = "stumbling"
    rank: int = 0

    @property
    def online(self) -> Any:
        return KFAC()

    def init(self, loop: Loop) -> None:
        return None

    def step(self, loop: Loop, state: None) -> Any:
        if self.rank == 1:
            raise InputError("My shoes are untied. Tie them.")
        return None, StepInfo(0.0, float(loop.inner_step()), 0.0)


@dataclass(frozen=True)
class StumblingAtOnce(Stumbling):
    """A method that fails in one of the inner ranks while the solver is made, and elsewhere waits for it."""

    name: ClassVar[str] = "stumbling at once"

    def init(self, loop: Loop) -> None:
        if self.rank == 1:
            raise InputError("My shoes are untied. Tie them.")
        loop.division.assert_equal()


@cache
def answers(size: int) -> tuple[Answers, ...]:
    if size == 4:
        with tempfile.TemporaryDirectory() as folder:
            # The run of two processes that four go on with.
            together(kept_by_two, 2, folder)
            return tuple(together(in_four, 4, folder))
    with tempfile.TemporaryDirectory() as folder:
        return tuple(together(in_two, 2, folder))


def kept_by_two(rank: int, size: int, folder: str) -> None:
    broken_off(rank, folder, Distributed)


# What is asked of them.


@cache
def inline(name: str) -> Answers:
    return solved("inline", NHGD(INVERSES[name]))


def same(found: Answers, expected: Answers, exactly: bool) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-12, "atol": 1e-12}
    for key in ("v", "theta"):
        torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), **tolerance)
    if not exactly:
        return
    for row, other in zip(found["rows"], expected["rows"], strict=True):
        assert row == other


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a few steps of refinement are not enough
@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("name", INVERSES)
def test_a_curvature_rank_gives_the_inline_run_bit_for_bit_in_both_processes(name, lag):
    for found in answers(2):
        same(found[f"{name} {lag}"], inline(name), exactly=True)
        stats = found[f"{name} {lag}"]["stats"]
        assert stats["execution"]["processes"] == 2
        assert stats["execution"]["records"] == STEPS * INNER
        assert stats["execution"]["largest_lag"] <= lag
        assert stats["steps"] == STEPS


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        ("trajectory", NHGD(KFAC(), cross="trajectory"), {}),
        ("fresh", NHGD(KFAC(), curvature="fresh"), {}),
        ("single", NHGDSingle(KFAC()), {}),
        ("aid", AID(KFAC()), {}),
        ("mixed", NHGD(KFAC()), {"net": Mixed}),
        ("ridge of its own", NHGD(KFAC()), {"l2": ridge}),
        ("twice", NHGD(KFAC()), {}),
    ],
)
def test_so_do_other_methods_models_ridges_and_runs_in_two_parts(name, method, settings):
    expected = solved("inline", method, **settings)
    for found in answers(2):
        same(found[name], expected, exactly=True)


# Of two layers inputs and scores with a factor for each sample, and the weights.
LAYERS = BATCH * ((5 + 6 + 1) + (6 + 3 + 1) + 1)
D, NUMBER = 5 * 6 + 6 + 6 * 3 + 3, 8


def test_what_crosses_is_what_the_inverse_needs():
    records = STEPS * INNER
    solve = (D + 1 + D) * NUMBER  # u and one number for the ridge there, x back
    sent = {name: answers(2)[0][f"{name} 0"]["stats"]["execution"]["bytes_sent"] for name in INVERSES}
    assert sent["kfac"] == sent["window"] == sent["diagonal"] == records * LAYERS * NUMBER + STEPS * solve
    assert sent["dense"] == records * BATCH * D * NUMBER + STEPS * solve
    assert sent["raw"] == records * D * NUMBER + STEPS * solve
    # Refined asks once for every preconditioned residual.
    assert sent["refined"] == records * LAYERS * NUMBER + 2 * STEPS * solve


def test_every_inner_rank_counts_what_crosses_for_all_of_them():
    # Each sends its part of a record and hears x; the first sends u.
    expected = STEPS * (INNER * LAYERS + D + 1 + 3 * D) * NUMBER
    assert [found["bytes"] for found in answers(4)[:3]] == [expected] * 3


def test_forms_of_records_are_forgotten_on_both_sides():
    solver = of_many_sizes(Inline())
    expected = facts(solver, solver.run(steps=STEPS))
    for found in answers(2):
        same(found["many shapes"], expected, exactly=True)
        assert found["many shapes"]["forms"] == 3


def test_messages_that_have_arrived_are_let_go_of():
    inner, curvature = (found["kept"] for found in answers(2))
    assert inner == curvature == 0


def test_a_run_whose_end_cannot_be_told_fails_by_a_sentence_and_fields():
    rank, role, silent, sentence, _ = answers(2)[0]["undelivered"]
    assert (rank, role, silent) == (1, "curvature", 1.0)
    assert sentence.startswith("Rank 1 (curvature) did not answer within 1 s.")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads and files in /proc")
def test_twenty_solvers_leave_no_thread_and_no_file_open():
    for found in answers(2):
        assert found["held"][19] <= found["held"][1]


def test_the_history_tells_bytes_and_times():
    for found in answers(2):
        execution = found["kfac 3"]["stats"]["execution"]
        assert execution["curvature_seconds"] > 0
        assert execution["waited_seconds"] > 0


def test_the_callers_own_loop_ends_in_both_processes():
    for found in answers(2):
        same(found["loop"] | {"rows": []}, inline("kfac") | {"rows": []}, exactly=True)
        assert found["loop"]["steps"] == STEPS


def test_a_stale_state_lags_no_more_than_allowed():
    first, second = answers(2)
    assert first["stale"]["v"] == second["stale"]["v"]
    assert all(0 <= lag <= 4 for lag in first["stale"]["lags"])


def test_periods_that_a_clock_chose_are_the_same_everywhere():
    first, second = answers(2)
    assert first["overhead"] == second["overhead"]


def test_a_kept_run_goes_on_bit_for_bit():
    expected = solved("inline", NHGD(EKFAC()))
    for found in answers(2):
        same(found["checkpoint"], expected, exactly=True)
    for found in answers(4):
        same(found["checkpoint"], expected, exactly=False)
        same(found["three workers"], expected, exactly=False)


def test_a_run_that_fails_tells_the_others_why():
    (kind, sentence), (other, reason) = (found["non-finite"] for found in answers(2))
    assert kind == "NonFiniteError"
    assert other == "PeerError"
    assert reason == f"Rank 0 (inner) stopped: {sentence}"


def test_what_cannot_be_is_refused_by_a_sentence():
    for found in answers(2):
        assert found["idle"][0] == "InputError"
        assert "learns nothing" in found["idle"][1]
        assert "make 3" in found["too few"][1]
    for found in answers(4):
        assert "cannot be divided" in found["undivided"][1]
        assert "Use fewer" in found["too many"][1]


@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a few steps of refinement are not enough
@pytest.mark.parametrize("name", [f"{name} {lag}" for name in ("kfac", "ekfac", "refined") for lag in LAGS])
def test_two_inner_and_two_curvature_ranks_give_the_inline_run(name):
    for found in answers(4):
        same(found[name], inline(name.rpartition(" ")[0]), exactly=False)
        assert found[name]["stats"]["execution"]["processes"] == 4


@pytest.mark.parametrize("name", ["window", "dense", "raw", "diagonal"])
def test_three_inner_ranks_with_one_curvature_rank_give_the_inline_run(name):
    for found in answers(4):
        same(found[f"{name} 3"], inline(name), exactly=False)


@pytest.mark.parametrize(
    ("name", "method", "settings"),
    [
        ("no ridge", NHGD(KFAC()), {"l2": 0.0}),
        ("mixed", NHGD(KFAC()), {"net": Mixed}),
        ("all inner", NHGD(KFAC()), {}),
        ("all inner, cg", AID(CG(damping=2.0)), {}),
    ],
)
def test_divided_layers_agree_on_the_damping_and_on_parameters_outside(name, method, settings):
    expected = solved("inline", method, **settings)
    for found in answers(4):
        same(found[name], expected, exactly=False)


@pytest.mark.parametrize("when", ["one fails", "one fails at once"])
def test_an_error_in_one_inner_rank_ends_all(when):
    kinds = [found[when] for found in answers(4)]
    assert kinds[1] == ("InputError", "My shoes are untied. Tie them.")
    for rank in (0, 2, 3):
        assert kinds[rank] == ("PeerError", "Rank 1 (inner) stopped: My shoes are untied. Tie them.")


# The parts.


def records(net: Callable[[], nn.Module], kind: Any, fisher: Any = "empirical") -> tuple[Any, Any]:
    problem, inner, _ = problem_of(net)
    return problem, Recorder(problem, kind, fisher).step(inner).record


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("kind", ["layer", "sample"])
@pytest.mark.parametrize("net", [small, Mixed])
def test_a_record_survives_the_wire(net, kind, fisher):
    problem, record = records(net, kind, fisher)
    layout, given = Layout.of(record)
    agreed = Layout.from_text(json.loads(json.dumps(layout.to_text())))
    assert agreed == layout
    assert hash(agreed) == hash(layout)
    again = agreed.record(from_bytes(agreed.shapes, to_bytes(given)))
    for ours, theirs in zip(tensors(record), tensors(again), strict=True):
        assert torch.equal(ours, theirs)
    inverse = KFAC() if kind == "layer" else FisherDense()
    states = [inverse.observe(inverse.init(problem.theta), r).tensors() for r in (record, again)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("kind", ["layer", "sample"])
def test_shards_join_to_the_record_of_the_batch(kind, fisher):
    problem, whole = records(Mixed, kind, fisher)
    _, (x, y, i), _ = problem_of(Mixed)
    recorder = Recorder(problem, kind, fisher)
    shards = [recorder.step((x[part], y[part], i[part])).record for part in (slice(0, 5), slice(5, SAMPLES))]
    inverse = KFAC() if kind == "layer" else FisherDense()
    ours, theirs = (inverse.observe(inverse.init(problem.theta), r).tensors() for r in (joined(shards), whole))
    for key, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_rows_of_shards_join_in_the_order_of_the_batch(fisher):
    """Sums over samples do not see the order; a window, whose places belong to samples, does."""
    _, (x, y, i), _ = problem_of(Mixed)
    for kind in ("layer", "sample"):
        problem, whole = records(Mixed, kind, fisher)
        recorder = Recorder(problem, kind, fisher)
        shards = [recorder.step((x[part], y[part], i[part])).record for part in (slice(0, 5), slice(5, SAMPLES))]
        ours = joined(shards)
        if kind == "sample":
            torch.testing.assert_close(ours.rows, whole.rows)
        else:
            torch.testing.assert_close(ours.other_rows, whole.other_rows)
            for own, expected in zip(ours.layers, whole.layers, strict=True):
                torch.testing.assert_close(own.inputs, expected.inputs)
                torch.testing.assert_close(own.scores, expected.scores)
        window = FisherWindow(window=SAMPLES, records=kind, fisher=fisher)
        found, expected = (window.observe(window.init(problem.theta), record).gram for record in (ours, whole))
        torch.testing.assert_close(found, expected)


def test_a_kept_factor_is_of_the_ridge_that_it_was_made_with():
    """A curvature rank factorises once for several right-hand sides at one point, and again where the ridge differs."""
    problem, record = records(small, "layer")
    inverse = KFAC()
    server = Server(Messenger(None, None, Roles(0, 1), 0, 1.0), inverse, problem.theta, 8)
    server._state = state = inverse.observe(inverse.init(problem.theta), record)
    u = torch.ones(problem.theta.numel, dtype=torch.float64)
    for l2 in (0.1, 0.1, 0.1, 0.3, 0.3):
        ridge = torch.full_like(u, 2 * l2)
        _, (x,) = server._solved(False, None, u, ridge)
        expected, _ = inverse.solve(state, u, Ridge(ridge))
        torch.testing.assert_close(x, expected)


def test_bytes_of_several_kinds_stand_where_they_may():
    given = [torch.arange(3, dtype=torch.int8), torch.randn(2, 2, dtype=torch.float64), torch.tensor(True)]
    for ours, theirs in zip(given, from_bytes(shapes(given), to_bytes(given)), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def test_layers_are_divided_by_cost_and_everything_has_one_owner():
    net = nn.Sequential(nn.Linear(30, 2), nn.Linear(2, 2), nn.Linear(2, 20))
    theta = Variable(net, "theta")
    division = Assignment(KFAC(), theta, 2)
    assert {name: division.owner[name] for name in theta.names if "weight" in name} == {
        "0.weight": 0,
        "1.weight": 1,
        "2.weight": 1,
    }
    vector = torch.arange(theta.numel)
    pieces = [division.gather(vector, part) for part in range(2)]
    assert sum(len(piece) for piece in pieces) == theta.numel
    assert torch.equal(division.scatter(pieces), vector)


def test_numbers_of_processes_that_cannot_be_are_refused():
    with pytest.raises(InputError, match="There are 4 process"):
        Roles.of(4, 2, 1)
    with pytest.raises(InputError, match="curvature_ranks"):
        Distributed(curvature_ranks=-1)
    with pytest.raises(InputError, match="workers"):
        Distributed(workers=0)
    with pytest.raises(InputError, match="timeout"):
        Distributed(timeout=0)


def test_alone_the_remedy_is_named(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="torchrun --nproc-per-node 2") as caught:
        a_solver("distributed", NHGD(KFAC()))
    assert "nhgd run TASK --execution distributed" in str(caught.value)
    assert not isinstance(caught.value, (RunError, NonFiniteError))
    assert isinstance(a_solver(Inline(), NHGD(KFAC())).executor, Inline)


@pytest.mark.parametrize(("world", "gpus", "backend"), [(2, 1, "gloo"), (2, 2, "cpu:gloo,cuda:nccl")])
def test_nccl_only_where_each_process_of_a_group_of_ones_own_has_a_gpu(world, gpus, backend, monkeypatch):
    """Two processes on one GPU would wait for each other there for ever."""
    from nhgd.execution.distributed import group

    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(group.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(group.dist, "get_world_size", lambda: world)
    assert group._backend() == backend
