"""Every backend against the inline one, and what happens when something goes wrong beside the inner loop."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._tree import tensors
from nhgd.algorithm import AID, NHGD, NHGDSingle
from nhgd.errors import InputError, RunError
from nhgd.execution import AbstractExecutor, Device, Inline, Stream, Thread, resolve
from nhgd.execution._queue import Launched
from nhgd.execution.base import Traffic
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Identity, Refined
from nhgd.inverse.capabilities import begun
from nhgd.oracle import Oracle
from nhgd.record import PerSampleGradients
from tests import catalogue, oracles
from tests.histories import CLOCKED

BESIDE = {"thread": Thread, "device": lambda **settings: Device("cpu", **settings)}
INVERSES = {
    "kfac": KFAC(),
    "kfac, kept bases": KFAC(invert_every=2),
    "ekfac": EKFAC(),
    "window": FisherWindow(window=24, overhead=None),
    "dense": FisherDense(),
    "dense inverse, reset": FisherDense(form="inverse", update="ema", beta=0.8, warm="reset"),
    "raw": FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset"),
    "diagonal": FisherDiagonal(),
    "refined": Refined(KFAC(), steps=2, matrix="ggn"),
}


def solved(execution, method, make=catalogue.mlp_module, steps=4, **settings):
    """A run on batches of four, its v, its theta and its history without clocks."""
    problem, inner, outer = make()
    optimizer = settings.pop(
        "inner_optimizer", lambda leaves: torch.optim.SGD(leaves, 0.1, momentum=0.9, nesterov=True)
    )
    solver = nhgd.Solver(
        problem,
        nhgd.Data(*inner[:-1], batch=4) if len(inner) == 3 else [inner],
        [outer],
        method=method,
        inner_steps=5,
        inner_optimizer=optimizer,
        outer_lr=0.1,
        execution=execution,
        **settings,
    )
    try:
        solution = solver.run(steps=steps)
    finally:
        solver.close()
    rows = [{k: v for k, v in row.items() if k not in (*CLOCKED, "bytes_sent")} for row in solution.history]
    return oracles.v_of(problem), oracles.theta_of(problem), rows, solution


@pytest.mark.parametrize("max_lag", [0, 1, None])
@pytest.mark.parametrize("backend", BESIDE)
@pytest.mark.parametrize("name", INVERSES)
@pytest.mark.filterwarnings("ignore::nhgd.InverseWarning")  # a few steps of refinement are not enough
def test_every_backend_equals_inline_bit_for_bit(name, backend, max_lag):
    method = NHGD(INVERSES[name])
    v, theta, rows, _ = solved("inline", method)
    v2, theta2, rows2, solution = solved(BESIDE[backend](max_lag=max_lag), method)
    assert torch.equal(v, v2)
    assert torch.equal(theta, theta2)
    assert rows == rows2
    largest = [row["largest_lag"] for row in solution.history]
    assert solution.stats["execution"]["largest_lag"] == max(largest) <= (8 if max_lag is None else max_lag)
    assert solution.stats["execution"]["records"] == 20


@pytest.mark.parametrize(
    "method", [NHGDSingle(KFAC()), AID(KFAC()), NHGD(KFAC(), cross="trajectory"), NHGD(KFAC(), cross="final")]
)
@pytest.mark.parametrize("backend", BESIDE)
def test_other_algorithms_equal_inline_too(method, backend):
    v, theta, rows, _ = solved("inline", method)
    v2, theta2, rows2, _ = solved(BESIDE[backend](), method)
    assert torch.equal(v, v2)
    assert torch.equal(theta, theta2)
    assert rows == rows2


class Deferred(AbstractExecutor):
    """All that a backend must have: here records are kept, and folded in when the state is asked for."""

    name = "deferred"

    def start(self, inverse, theta, v=None):
        super().start(inverse, theta, v)
        self.kept, self.waiting = self.learner.init(theta), []

    def begin(self):
        self.waiting.append(None)

    def submit(self, record):
        self.waiting.append(record)
        self.traffic.records += 1

    def state(self, wait=False):
        assert wait
        for record in self.waiting:
            self.kept = begun(self.learner, self.kept) if record is None else self.learner.observe(self.kept, record)
        self.waiting.clear()
        return self.kept, 0

    def restore(self, state):
        self.kept = state


@pytest.mark.parametrize("name", ["kfac", "dense inverse, reset"])
def test_five_methods_make_an_executor(name, tmp_path):
    method = NHGD(INVERSES[name])
    v, theta, rows, _ = solved("inline", method)
    v2, theta2, rows2, _ = solved(Deferred(), method, checkpoint=str(tmp_path), checkpoint_every=1)
    assert torch.equal(v, v2)
    assert torch.equal(theta, theta2)
    assert rows == rows2


def test_the_seam_of_an_executor_is_small():
    public = {n for n, item in vars(AbstractExecutor).items() if not n.startswith("_") and callable(item)}
    assert len(public) <= 10, public
    assert len(AbstractExecutor.__abstractmethods__) <= 4  # and `start`, which is extended


@pytest.mark.parametrize("make", [catalogue.ridge_scalar, catalogue.plain_tensor])
@pytest.mark.parametrize("backend", BESIDE)
def test_a_single_leaf_and_a_learnt_ridge(make, backend):
    method = NHGD(FisherDense(records="raw", form="inverse", update="ema", beta=0.8))
    settings = {"inner_optimizer": None, "inner_lr": 0.05}
    v, theta, *_ = solved("inline", method, make, **settings)
    v2, theta2, *_ = solved(BESIDE[backend](), method, make, **settings)
    assert torch.equal(v, v2)
    assert torch.equal(theta, theta2)


def test_an_optimiser_may_use_the_gradient_as_scratch():
    """Nesterov momentum over several tensors at once writes into the gradient, which must not be the record's."""

    def scribbling(leaves):
        return torch.optim.SGD(leaves, 0.05, momentum=0.9, nesterov=True, foreach=True)

    method = NHGD(FisherDense(records="raw", form="inverse", update="ema", beta=0.8))
    v, theta, *_ = solved("inline", method, catalogue.ridge_scalar, inner_optimizer=scribbling)
    v2, theta2, *_ = solved("thread", method, catalogue.ridge_scalar, inner_optimizer=scribbling)
    assert torch.equal(v, v2)
    assert torch.equal(theta, theta2)


class Slow:
    """An inverse whose `observe` waits for a gate, so that a test decides when curvature goes on."""

    def __init__(self, inverse):
        self.gate = threading.Event()
        self.inside = inverse

    def __getattr__(self, name):
        return getattr(self.inside, name)

    @property
    def learner(self):
        return self

    def observe(self, state, record):
        assert self.gate.wait(20)
        return self.inside.observe(state, record)


def started(executor, inverse, count):
    """An executor fed with `count` records of a classifier; the records too."""
    problem, batch, _ = catalogue.mlp_module()
    recorder = Recorder(problem, inverse.records, inverse.fisher)
    executor.start(inverse, problem.theta, problem.v)
    executor.begin()
    return [recorder.step(batch).record for _ in range(count)], problem


def test_submit_does_not_wait_below_max_lag_and_waits_at_it():
    inverse, executor = Slow(KFAC()), Thread(max_lag=3)
    records, _ = started(executor, inverse, 4)
    for record in records[:3]:
        executor.submit(record)  # returns although nothing is folded in yet
    ended = threading.Event()

    def fourth():
        executor.submit(records[3])
        ended.set()

    waiting = threading.Thread(target=fourth, daemon=True)
    waiting.start()
    assert not ended.wait(0.2)
    inverse.gate.set()
    assert ended.wait(20)
    executor.drain()
    assert executor.state()[0].observed == 4
    found = executor.measured()
    assert found.largest_lag == 3
    assert executor.measured().largest_lag == 0  # a new one
    assert found.waited_seconds > 0.1
    executor.close()


def test_a_stale_snapshot_says_what_it_lacks_and_is_left_alone():
    inverse, executor = Slow(KFAC()), Thread(max_lag=5, stale=True)
    records, _ = started(executor, inverse, 4)
    inverse.gate.set()
    executor.submit(records[0])
    executor.drain()
    inverse.gate.clear()
    for record in records[1:]:
        executor.submit(record)
    opener = threading.Timer(0.1, inverse.gate.set)  # a copy is made between two records, so one must end
    opener.start()
    state, lag = executor.state()
    assert state.observed + lag == 4
    assert lag >= 1
    kept = {key: t.clone() for key, t in state.tensors().items()}
    executor.drain()
    assert all(torch.equal(t, kept[key]) for key, t in state.tensors().items())
    assert executor.state() == (executor.queue.state, 0)
    executor.close()


def test_a_stale_run_lowers_the_outer_loss_and_reports_its_lag():
    _, _, rows, solution = solved(Thread(max_lag=2, stale=True), NHGD(KFAC()), steps=30)
    assert rows[-1]["outer_loss"] < rows[0]["outer_loss"]
    assert all(0 <= row["lag"] <= 2 for row in rows)
    assert solution.stats["execution"]["max_lag"] == 2


def test_what_the_thread_raises_is_raised_in_the_inner_loop():
    class Broken:
        def __getattr__(self, name):
            return getattr(inverse, name)

        @property
        def learner(self):
            return self

        def observe(self, state, record):
            raise InputError("the factor is singular")

    inverse, executor = KFAC(), Thread()
    records, _ = started(executor, Broken(), 1)
    executor.submit(records[0])
    with pytest.raises(InputError, match="singular"):
        executor.drain()
    with pytest.raises(InputError, match="singular"):
        executor.submit(records[0])
    executor.close()


def test_a_batch_refilled_in_place_is_noticed():
    class Refilled:
        """A loader that yields one buffer again and again, with other numbers in it."""

        def __init__(self, inner):
            self.inner, self.x = inner, inner[0].clone()

        def __iter__(self):
            for shift in range(4):
                self.x.copy_(self.inner[0] + shift)
                yield self.x, *self.inner[1:]

    problem, inner, _ = catalogue.mlp_module()
    slow = Slow(KFAC())
    executor = Thread()
    executor.start(slow, problem.theta)
    recorder = Recorder(problem, "layer")
    for batch in Refilled(inner):
        executor.submit(recorder.step(batch).record)
    slow.gate.set()
    with pytest.raises(RunError, match="changed in place"):
        executor.drain()
    executor.close()


def test_records_that_share_memory_with_v_are_copied():
    """Where v is the data itself, as in distillation, it moves while stale records wait."""
    problem, _, _ = catalogue.mlp_module()
    seen = []

    class Watching:
        def __getattr__(self, name):
            return getattr(FisherDiagonal(), name)

        @property
        def learner(self):
            return self

        def observe(self, state, record):
            seen.append(record.rows)
            return state

    executor = Thread()
    executor.start(Watching(), problem.theta, problem.v)
    v, other = problem.v.leaves[0].detach(), torch.zeros(1, 3)
    executor.submit(PerSampleGradients(v[None], 1))
    executor.submit(PerSampleGradients(other, 1))
    executor.drain()
    assert torch.equal(seen[0], v[None])
    assert seen[0].data_ptr() != v.data_ptr()
    assert seen[1] is other
    executor.close()


def test_close_ends_the_thread_and_can_be_repeated():
    before = threading.active_count()
    executor = Thread()
    records, problem = started(executor, KFAC(), 1)
    assert threading.active_count() == before + 1
    executor.close()
    executor.close()
    assert threading.active_count() == before
    with pytest.raises(RunError, match="closed"):
        executor.submit(records[0])
    executor.start(KFAC(), problem.theta)
    executor.submit(records[0])
    executor.drain()
    assert executor.state()[0].observed == 1
    executor.close()


def test_an_executor_closed_in_the_middle_of_its_work_can_be_used_again():
    inverse, executor = Slow(KFAC()), Thread()
    records, problem = started(executor, inverse, 2)
    executor.submit(records[0])
    opener = threading.Timer(0.1, inverse.gate.set)  # the thread is inside of `observe` when it is told to end
    opener.start()
    executor.close()
    opener.join()
    executor.start(inverse, problem.theta)
    for record in records:
        executor.submit(record)
    executor.drain()
    assert executor.state()[0].observed == 2
    executor.close()


def test_what_was_interrupted_is_looked_at_again():
    """Ctrl-C while the device is waited for; the device is stood for by a clock."""

    class Done:
        interrupted = False

        def query(self):
            return self.interrupted

        def synchronize(self):
            if not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt

    executor = Thread()
    started(executor, KFAC(), 0)
    seen = []
    executor.queue.launched.append(Launched(Done(), [], 1, lambda state: (seen.append(1), state)[1]))
    with pytest.raises(KeyboardInterrupt):
        executor.drain()
    assert not seen
    executor.drain()
    assert seen == [1]
    executor.close()


@pytest.mark.parametrize("execution", ["thread", "device:cpu", Thread()], ids=["thread", "device", "object"])
@pytest.mark.parametrize(
    ("method", "called"),
    [
        ("soba", "soba"),
        ("itd", "itd"),
        ("f2sa", "f2sa"),
        ("aid-cg", "aid with cg"),
        (AID(Identity()), "aid with identity"),
    ],
)
def test_an_execution_that_would_have_nothing_to_run_is_refused(method, called, execution):
    problem, inner, outer = catalogue.mlp_module()
    before = threading.active_count()
    expected = rf"The method {called} learns no curvature .* would have nothing to do\. Use inline execution, or"
    with pytest.raises(nhgd.InputError, match=expected):
        nhgd.Solver(problem, [inner], [outer], method=method, execution=execution)
    assert threading.active_count() == before


def test_device_counts_the_bytes_it_moves():
    problem, batch, _ = catalogue.mlp_module()
    executor = Device("cpu")
    inverse = KFAC()
    executor.start(inverse, problem.theta)
    record = Recorder(problem, "layer").step(batch).record
    executor.submit(record)
    executor.drain()
    expected = sum(t.numel() * t.element_size() for t in tensors(record))
    assert executor.measured().bytes_sent == expected
    executor.close()
    *_, solution = solved(Device("cpu"), NHGD(KFAC()))
    assert sum(row["bytes_sent"] for row in solution.history) == solution.stats["execution"]["bytes_sent"] > 0


@pytest.mark.parametrize("kind", ["raw", "batch"])
def test_of_the_gradient_of_a_batch_one_row_is_sent_and_u_the_ridge_and_x(kind):
    problem, batch, _ = catalogue.plain_tensor()
    problem.v.given.fill_(0.7)  # the kind "batch" needs equal weights
    inverse = FisherDense(records=kind)
    executor = Device("cpu")
    executor.start(inverse, problem.theta)
    executor.submit(Recorder(problem, kind).step(batch).record)
    executor.drain()
    row = 8 * problem.theta.numel
    assert executor.measured().bytes_sent == row
    solving, state, _ = executor.curvature()
    solving.apply(state, torch.ones(problem.theta.numel, dtype=torch.float64), Oracle(problem, [batch], None))
    assert executor.measured().bytes_sent == 3 * row + 8
    executor.close()


def test_the_state_of_a_device_is_that_of_inline_and_goes_back():
    problem, batch, _ = catalogue.mlp_module()
    record = Recorder(problem, "layer").step(batch).record
    found = []
    for executor in (Inline(), Device("cpu"), Thread()):
        executor.start(KFAC(), problem.theta)
        executor.submit(record)
        state, lag = executor.state(wait=True)
        assert lag == 0
        found.append(state.tensors())
        executor.restore(state.clone())
        executor.submit(record)
        assert executor.state(wait=True)[0].observed == 2
        executor.close()
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[key], found[0][key]) for key in other)


def test_overlap_is_the_part_not_waited_for():
    assert Traffic(curvature_seconds=2.0, waited_seconds=0.5).overlap == 0.75
    assert Traffic().overlap == 0.0
    assert Traffic(curvature_seconds=1.0, waited_seconds=3.0).overlap == 0.0
    *_, solution = solved("inline", NHGD(KFAC()))
    assert solution.stats["execution"]["overlap"] == 0.0
    for row in solution.history:
        assert row["curvature_seconds"] > 0
        assert row["waited_seconds"] == pytest.approx(row["curvature_seconds"])
        assert row["inner_seconds"] > 0


def test_the_thread_works_while_the_inner_loop_does():
    """Two waits of the same length that run side by side: hidden, not added."""

    class Sleepy:
        def __getattr__(self, name):
            return getattr(inverse, name)

        @property
        def learner(self):
            return self

        def observe(self, state, record):
            time.sleep(0.02)
            try:
                return inverse.observe(state, record)
            finally:
                ended.release()

    inverse, ended = FisherDiagonal(), threading.Semaphore(0)
    executor = Thread()
    records, _ = started(executor, Sleepy(), 6)
    for record in records:
        executor.submit(record)
        assert ended.acquire(timeout=60)  # the inner loop takes at least as long
    executor.drain()
    found = executor.measured()
    assert found.curvature_seconds >= 0.12
    assert found.overlap > 0.5
    executor.close()


@pytest.mark.parametrize("single", [False, True])
def test_the_outer_gradient_and_the_graph_of_the_cross_derivative_are_made_while_curvature_is_under_way(single):
    problem, inner, outer = catalogue.mlp_module()
    slow = Slow(KFAC())
    asked = []
    losses, value = problem.losses, problem.outer_value

    def noted(kind, function):
        def asking(*given):
            asked.append(kind)
            if asked[-2:] == ["outer", "inner"]:
                slow.gate.set()  # only now may the records be folded in
            return function(*given)

        return asking

    problem.losses, problem.outer_value = noted("inner", losses), noted("outer", value)
    method = NHGDSingle(KFAC()) if single else NHGD(KFAC(), cross="final")
    solver = nhgd.Solver(problem, [inner], [outer], method=method, inner_steps=3, execution="thread")
    solver.executor.inverse = slow
    slow.gate.set()
    solver.step()  # the first record of a layer asks for more
    solver.executor.drain()
    asked.clear()
    slow.gate.clear()
    solver.step()
    # The outer loss at theta, and its gradients where theta is going; none after the solve.
    assert asked == (["inner", "outer", "inner"] if single else [*["inner"] * 3, "outer", "outer", "inner"])
    solver.close()


@pytest.mark.parametrize("execution", ["inline", "thread", "device:cpu"])
def test_what_the_outer_function_stumbles_over_is_not_told_before_its_cause(execution, monkeypatch):
    problem, inner, outer = catalogue.mlp_module()
    before = problem.theta.flat()
    inverse = FisherDense(form="inverse", update="ema", records="raw")
    observe, value = FisherDense.observe, problem.outer_value

    def slow(self, *given):
        time.sleep(0.02)
        return observe(self, *given)

    def checked(batch):
        if not bool(torch.isfinite(problem.theta.flat()).all()):
            raise ValueError("logits of nan, as torch.distributions would say")
        return value(batch)

    calls = []

    def spoil(theta):
        calls.append(theta)
        if len(calls) >= 4:  # once at the start, then after each inner step
            next(theta.parameters()).fill_(float("nan"))

    solver = nhgd.Solver(
        problem, [inner], [outer], method=NHGD(inverse), inner_steps=5, execution=execution, project=spoil
    )
    monkeypatch.setattr(FisherDense, "observe", slow)
    problem.outer_value = checked
    with pytest.raises(nhgd.errors.NonFiniteError, match="contains nan or inf"):
        solver.step()
    solver.close()
    assert torch.equal(problem.theta.flat(), before)


def test_an_error_of_the_outer_function_itself_passes_through():
    problem, inner, outer = catalogue.mlp_module()
    solver = nhgd.Solver(problem, [inner], [outer], method=NHGD(KFAC()), inner_steps=3, execution="thread")

    def broken(batch, *leaves):
        raise KeyError("mine")

    problem.outer_value = broken
    with pytest.raises(KeyError, match="mine"):
        solver.step()
    solver.close()


@pytest.mark.parametrize("method", [NHGDSingle(KFAC()), AID(KFAC()), NHGD(KFAC())], ids=["single", "aid", "nhgd"])
def test_a_loader_that_fills_one_array_again_and_again_is_harmless(method, monkeypatch):
    _, (x, y, index), _ = catalogue.mlp_module()
    observe = KFAC.observe

    def slow(self, *given):
        time.sleep(0.01)
        return observe(self, *given)

    monkeypatch.setattr(KFAC, "observe", slow)

    class Loader:
        def __iter__(self):
            buffer = x.numpy().copy()
            for step in range(1000):
                buffer[:] = x.numpy() * (1 + step % 7)
                yield torch.from_numpy(buffer), y, index

    found = []
    for execution in ("inline", "thread"):
        problem, _, outer = catalogue.mlp_module()
        solver = nhgd.Solver(problem, Loader(), [outer], method=method, inner_steps=3, execution=execution)
        solver.run(steps=3)
        solver.close()
        found.append(problem.v.flat())
    assert torch.equal(*found)


def test_a_graph_is_kept_for_the_cross_derivative_only_where_there_is_a_wait(monkeypatch):
    prepared, asked = Oracle.prepare, []

    def prepare(self):
        asked.append(1)
        prepared(self)

    for execution in ("inline", Thread(max_lag=0)):  # with a wait: see above
        problem, inner, outer = catalogue.mlp_module()
        solver = nhgd.Solver(problem, [inner], [outer], method=NHGD(KFAC()), inner_steps=3, execution=execution)
        monkeypatch.setattr(Oracle, "prepare", prepare)
        asked.clear()
        solver.step()
        solver.close()
        assert not asked


def test_convolutions_and_several_calls_travel():
    def make():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 2, 2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 3))
        x, y = torch.randn(8, 1, 3, 3, dtype=torch.float64), torch.randint(3, (8,))
        problem = nhgd.Bilevel(
            catalogue.cross_entropy, catalogue.mean_cross_entropy, net.double(), torch.zeros(8).double(), l2=0.01
        )
        return problem, (x, y, torch.arange(8)), (x, y)

    with torch.random.fork_rng(devices=[]):
        v, theta, *_ = solved("inline", NHGD(KFAC()), make)
        for backend in BESIDE.values():
            v2, theta2, *_ = solved(backend(), NHGD(KFAC()), make)
            assert torch.equal(v, v2)
            assert torch.equal(theta, theta2)


def test_refusals_are_sentences():
    with pytest.raises(InputError, match="max_lag must be a whole number"):
        Thread(max_lag=-1)
    with pytest.raises(InputError, match="no lag to bound"):
        Inline(max_lag=2)
    with pytest.raises(InputError, match="Did you mean 'thread'"):
        resolve("tread")
    with pytest.raises(InputError, match="thread execution has no device"):
        resolve("thread:cpu")
    with pytest.raises(InputError, match="belong to the executor"):
        resolve(Thread(), max_lag=2)
    with pytest.raises(InputError, match="There is no device called 'nowhere'"):
        resolve("device:nowhere")
    problem, *_ = catalogue.mlp_module()
    with pytest.raises(InputError, match="CUDA device"):
        Stream().start(KFAC(), problem.theta)
    with pytest.raises(InputError, match="second GPU"):
        Device().start(KFAC(), problem.theta)
    with pytest.raises(InputError, match="inner='natural' needs"):
        solved("thread", NHGD(KFAC(), inner="natural"))
    assert isinstance(resolve("device:cpu", max_lag=3), Device)
