"""Backends on a CUDA device against the inline one. Two GPUs are stood for by two streams of one, and by the CPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._tree import map_tensors, tensors
from nhgd.algorithm import AID, NHGD, NHGDSingle
from nhgd.execution import Device, Stream, Thread
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Refined
from nhgd.oracle import Oracle
from nhgd.record import BatchGradient
from tests import catalogue

pytestmark = [
    pytest.mark.filterwarnings("ignore::nhgd.InverseWarning"),  # a few steps of refinement are not enough
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
INVERSES = {
    "kfac": KFAC(),
    "kfac, kept bases": KFAC(invert_every=2),
    "ekfac": EKFAC(),
    "window": FisherWindow(window=40),
    "dense": FisherDense(),
    "dense inverse, reset": FisherDense(form="inverse", update="ema", beta=0.8, warm="reset"),
    "raw": FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset"),
    "diagonal": FisherDiagonal(),
    "refined": Refined(KFAC(), steps=2, matrix="ggn"),
}
BESIDE = {
    "stream": Stream,
    "thread": Thread,
    "device, same GPU": lambda **settings: Device("cuda:0", **settings),
    "device, CPU": lambda **settings: Device("cpu", **settings),
}


def made(device, width=24, dropout=0.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = (
            nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3)).double().to(device)
        )
        x, y = catalogue.classes(96, 12)
        a, b = catalogue.classes(40, 12)
    problem = nhgd.Bilevel(
        catalogue.cross_entropy,
        catalogue.mean_cross_entropy,
        net,
        torch.zeros(96, dtype=torch.float64, device=device),
        l2=0.02,
        likelihood="categorical",
    )
    return problem, nhgd.Data(x.to(device), y.to(device), batch=32), [(a.to(device), b.to(device))]


def solved(execution, method, device="cuda", steps=6, inner_steps=5):
    problem, inner, outer = made(device)
    solver = nhgd.Solver(
        problem,
        inner,
        outer,
        method=method,
        inner_steps=inner_steps,
        inner_optimizer=lambda leaves: torch.optim.SGD(leaves, 0.1, momentum=0.9, nesterov=True),
        outer_lr=0.5,
        execution=execution,
    )
    try:
        solution = solver.run(steps=steps)
    finally:
        solver.close()
    return problem.v.flat().cpu(), problem.theta.flat().cpu(), solution


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_lag", [0, 2, None])
@pytest.mark.parametrize("backend", BESIDE)
@pytest.mark.parametrize("name", INVERSES)
def test_every_backend_equals_inline(name, backend, max_lag):
    method = NHGD(INVERSES[name])
    v, theta, _ = solved("inline", method)
    v2, theta2, solution = solved(BESIDE[backend](max_lag=max_lag), method)
    # On the CPU sums are taken in another order, which six outer steps of training make larger.
    loose = {"rtol": 1e-8, "atol": 1e-10} if backend == "device, CPU" else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(v2, v, **loose)
    torch.testing.assert_close(theta2, theta, **loose)
    assert solution.stats["execution"]["records"] == 30


@pytest.mark.parametrize("method", [NHGDSingle(KFAC()), AID(KFAC()), NHGD(KFAC(), cross="trajectory")])
@pytest.mark.parametrize("backend", ["stream", "device, same GPU"])
def test_other_algorithms_too(method, backend):
    v, theta, _ = solved("inline", method)
    v2, theta2, _ = solved(BESIDE[backend](), method)
    close(v2, v)
    close(theta2, theta)


@pytest.mark.parametrize("inner_steps", [3, 12])
@pytest.mark.parametrize("max_lag", [1, 8])
@pytest.mark.parametrize("curvature", ["carried", "fresh"])
def test_records_launched_by_the_inner_loop_over_many_outer_steps(curvature, max_lag, inner_steps):
    """Graphs of several sizes, places of the log used again, and a state made anew at each outer step."""
    inverse = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")
    method = NHGD(inverse, curvature=curvature)
    v, theta, _ = solved("inline", method, steps=15, inner_steps=inner_steps)
    v2, theta2, solution = solved(Stream(max_lag=max_lag), method, steps=15, inner_steps=inner_steps)
    close(v2, v)
    close(theta2, theta)
    assert solution.stats["execution"]["records"] == 15 * inner_steps


@pytest.mark.parametrize("name", INVERSES)
def test_inner_loop_on_the_cpu_and_curvature_on_the_gpu(name):
    method = NHGD(INVERSES[name])
    v, theta, _ = solved("inline", method, device="cpu")
    v2, theta2, _ = solved(Device("cuda:0"), method, device="cpu")
    torch.testing.assert_close(v2, v, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(theta2, theta, rtol=1e-8, atol=1e-10)


def test_memory_is_kept_for_the_side_stream():
    """Records are dropped at once by the inner loop, whose memory is handed out again while the side stream is behind."""
    problem, data, _ = made("cuda", width=256)
    batch = next(iter(data))
    recorder = Recorder(problem, "layer")
    inline, side = nhgd.execution.Inline(), Stream(max_lag=64)
    for executor in (inline, side):
        executor.start(KFAC(), problem.theta)
    spin = torch.randn(3000, 3000, device="cuda")
    for _ in range(30):
        record = recorder.step(batch).record
        # A copy: what one executor derives from a record is kept with it, in memory of its own stream.
        inline.submit(map_tensors(torch.clone, record))
        with torch.cuda.stream(side._side):
            spin @ spin  # the side stream falls behind
        side.submit(record)
        del record
        for _ in range(4):
            torch.empty(32, 256, dtype=torch.float64, device="cuda").fill_(float("nan"))
    side.drain()
    found, expected = side.state()[0].tensors(), inline.state()[0].tensors()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-12, atol=1e-12)
    side.close()


def test_the_state_is_not_changed_while_the_inner_stream_still_reads_it():
    """A slow solve of one outer step, and the records of the next already queued."""
    problem, data, _ = made("cuda")
    batch = next(iter(data))
    recorder = Recorder(problem, "sample")
    executor = Stream()
    executor.start(FisherDense(form="inverse", update="ema", beta=0.8), problem.theta)
    executor.begin()
    executor.submit(recorder.step(batch).record)
    executor.drain()
    state, _ = executor.state()
    kept = state.matrix.clone()
    spin = torch.randn(6000, 6000, device="cuda")
    for _ in range(20):
        spin = (spin @ spin).clamp(-1, 1)
    late = state.matrix * 1.0  # read after the spin
    executor.submit(recorder.step(batch).record)
    executor.drain()
    torch.cuda.synchronize()
    assert torch.equal(late, kept)
    executor.close()


def test_device_counts_bytes_both_ways():
    problem, data, _ = made("cuda")
    record = Recorder(problem, "layer").step(next(iter(data))).record
    executor = Device("cpu")
    executor.start(KFAC(), problem.theta)
    executor.submit(record)
    executor.drain()
    assert executor.measured().bytes_sent == sum(t.numel() * t.element_size() for t in tensors(record))
    assert all(t.device.type == "cpu" for t in executor.state()[0].tensors().values())
    executor.close()


def test_times_are_those_of_the_device():
    _, _, solution = solved("stream", NHGD(KFAC()))
    for row in solution.history[1:]:
        assert 0 < row["curvature_seconds"] < 1
        assert 0 <= row["overlap"] <= 1


LITERAL = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")
SLOW = 2_000_000_000  # cycles: about a second


def loaded(inverse, executor, warm_up=6):
    """An executor that has met enough records to have a graph, and the means to make more of them."""
    problem, data, _ = made("cuda")
    batch = next(iter(data))
    recorder = Recorder(problem, inverse.records)
    executor.start(inverse, problem.theta, problem.v)
    executor.begin()
    for _ in range(warm_up):
        executor.submit(recorder.step(batch).record)
        executor.drain()
    return problem, batch, recorder


def behind(executor):
    """The side stream has a second of work before all that comes."""
    with torch.cuda.stream(executor._side):
        torch.cuda._sleep(SLOW)


@pytest.mark.parametrize("inverse", [LITERAL, KFAC()], ids=["launched by the inner loop", "by the thread"])
def test_a_record_is_outstanding_until_the_device_is_done(inverse):
    executor = Stream(max_lag=2)
    _, batch, recorder = loaded(inverse, executor)
    executor.measured()
    behind(executor)
    for _ in range(2):
        executor.submit(recorder.step(batch).record)  # returns: two may be outstanding
    assert not executor._side.query()
    executor.submit(recorder.step(batch).record)  # the first must have been done
    found = executor.measured()
    assert found.largest_lag == 2
    assert found.waited_seconds > 0.1
    executor.drain()
    assert executor._side.query()
    assert executor.state()[0].observed == 9
    executor.close()


def test_the_inner_loop_launches_several_records_itself():
    executor = Stream(max_lag=8)
    _, batch, recorder = loaded(LITERAL, executor)
    behind(executor)
    for count in range(1, 7):
        executor.submit(recorder.step(batch).record)
        assert executor.queue.unfinished == 0  # nothing for the thread
        assert sum(launched.records for launched in executor.queue.launched) == (0 if count < 5 else 5)
    solving, state, lag = executor.curvature()  # waits for nothing
    assert not executor._side.query()
    assert (solving, lag, state.observed) == (LITERAL, 0, 12)
    kept = state.matrix.clone()  # the inner stream waits
    executor.drain()
    assert torch.equal(kept, executor.state()[0].matrix)
    assert torch.equal(kept, kept.T)
    executor.close()


@pytest.mark.parametrize("inverse", [LITERAL, KFAC()], ids=["launched by the inner loop", "by the thread"])
def test_a_tensor_changed_after_the_launch_is_noticed(inverse):
    executor = Stream()
    _, batch, recorder = loaded(inverse, executor)
    behind(executor)
    record = recorder.step(batch).record
    executor.submit(record)
    deadline = time.monotonic() + 20
    while executor.queue.unfinished and time.monotonic() < deadline:
        time.sleep(0.01)  # launched by now, and not yet read
    tensors(record)[0].add_(1)
    with pytest.raises(nhgd.errors.RunError, match="changed in place"):
        executor.drain()
    executor.close()


def test_a_stale_copy_waits_for_nothing_that_comes_after_it():
    class Gated:
        """An inverse of which a test decides when a record is launched."""

        def __init__(self, inverse):
            self.inverse, self.gate, self.learner = inverse, threading.Semaphore(0), self

        def __getattr__(self, name):
            return getattr(self.inverse, name)

        def graphable(self, state, record):
            return None

        def observe(self, state, record):
            assert self.gate.acquire(timeout=20)
            if state.observed == 1:
                torch.cuda._sleep(3 * SLOW)
            return self.inverse.observe(state, record)

    inverse = Gated(KFAC())
    executor = Stream(stale=True)
    problem, data, _ = made("cuda")
    batch = next(iter(data))
    recorder = Recorder(problem, "layer")
    executor.start(inverse, problem.theta, problem.v)
    for _ in range(2):
        executor.submit(recorder.step(batch).record)
    opener = threading.Timer(0.2, inverse.gate.release)  # the first: the copy is made after it
    opener.start()
    state, lag = executor.state()
    assert (state.observed, lag) == (1, 1)
    inverse.gate.release()
    deadline = time.monotonic() + 20
    while executor._side.query() and time.monotonic() < deadline:
        time.sleep(0.001)  # until the second record is launched
    torch.cuda.current_stream().record_event().synchronize()
    assert not executor._side.query()  # the second record is far from done, and the inner stream is not held up
    executor.drain()
    assert executor.state()[0].observed == 2
    executor.close()


def test_the_guard_speaks_late_and_in_the_words_of_the_inline_run():
    said = []
    problem, data, _ = made("cuda")
    batch = next(iter(data))
    for executor in (nhgd.execution.Inline(), Stream()):
        wound = FisherDense(form="inverse", update="ema", beta=0.2, records="raw", limit=1e6)
        recorder = Recorder(problem, "raw")
        executor.start(wound, problem.theta)
        executor.begin()

        def many(executor=executor, recorder=recorder):
            for _ in range(40):
                executor.submit(recorder.step(batch).record)
            executor.drain()

        with pytest.raises(nhgd.errors.NonFiniteError, match="wound up") as caught:
            many()
        said.append(str(caught.value))
        executor.close()
    assert said[0] == said[1]


@pytest.mark.parametrize("execution", ["inline", "stream"])
def test_a_run_is_ended_by_the_guard_before_v_moves(execution):
    wound = FisherDense(form="inverse", update="ema", beta=0.2, records="raw", limit=1e4)
    problem, inner, outer = made("cuda")
    solver = nhgd.Solver(problem, inner, outer, method=NHGD(wound), inner_steps=6, inner_lr=0.1, execution=execution)
    before = problem.v.flat()
    with pytest.raises(nhgd.errors.NonFiniteError, match=r"Outer step \d+: numbers became .*wound up.*put back"):
        solver.run(steps=30)
    assert solver.history or torch.equal(problem.v.flat(), before)
    solver.close()


@pytest.mark.parametrize("update", ["average", "ema"])
@pytest.mark.parametrize("guard", ["stop", "restart"])
def test_many_steps_of_the_rank_one_update_equal_inline(update, guard):
    inverse = FisherDense(form="inverse", update=update, beta=0.8, records="raw", warm="reset", guard=guard)
    method = NHGD(inverse, batches=2)
    v, theta, _ = solved("inline", method, steps=20)
    v2, theta2, solution = solved("stream", method, steps=20)
    close(v2, v)
    close(theta2, theta)
    assert solution.stats["execution"]["records"] == 100


@pytest.mark.parametrize("backend", BESIDE)
def test_after_a_second_start_records_are_still_waited_for(backend):
    """Algorithms start an executor again, when they have chosen the inverse; its thread goes on."""
    problem, data, _ = made("cuda")
    executor = BESIDE[backend]()
    inverse = FisherDense(records="raw")
    for _ in range(2):
        executor.start(inverse, problem.theta)
    row = torch.full((problem.theta.numel,), float("nan"), dtype=torch.float64, device="cuda")
    for _ in range(3):
        torch.cuda._sleep(SLOW // 4)
        made_late = row.clone().fill_(1.0)  # on the inner stream, after the sleep
        executor.submit(BatchGradient(None, made_late, 4))
    solving, state, _ = executor.curvature()
    x, _ = solving.apply(state, torch.ones_like(row), Oracle(problem, [next(iter(data))], None))
    assert bool(torch.isfinite(x).all())
    executor.drain()
    matrix = executor.state()[0].matrix.cpu()
    close(matrix, torch.ones_like(matrix))
    executor.close()


@pytest.mark.parametrize("inverse", [KFAC(), LITERAL], ids=["kfac", "raw"])
def test_dropout_is_drawn_while_graphs_are_captured(inverse):
    """A capture must not meet a draw of random numbers in another thread."""
    found = []
    for execution in ("inline", "stream"):
        problem, inner, outer = made("cuda", dropout=0.3)
        solver = nhgd.Solver(
            problem, inner, outer, method=NHGD(inverse), inner_steps=7, inner_lr=0.1, execution=execution, seed=3
        )
        solver.run(steps=12)
        found.append(problem.v.flat())
        if execution == "stream":
            assert solver.executor._replay._graphs
        solver.close()
    close(found[1], found[0])


@pytest.mark.parametrize("name", ["kfac", "raw", "diagonal"])
def test_curvature_that_begins_afresh_each_time_equals_inline(name):
    method = NHGD(INVERSES[name], curvature="fresh")
    v, theta, _ = solved("inline", method, steps=10)
    v2, theta2, _ = solved("stream", method, steps=10)
    close(v2, v)
    close(theta2, theta)
