"""What the stream executor keeps account of, without a GPU: streams, events and graphs are stood for by stand-ins.

Work on a stand-in's stream is done at once, but its events come when a test lets them, or when they are waited for. That
numbers, memory and order are right on a true GPU is the matter of test_execution_gpu.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nhgd
from nhgd._recording.recorder import Recorder
from nhgd._tree import map_tensors, tensors
from nhgd.algorithm import NHGD
from nhgd.errors import NonFiniteError, RunError
from nhgd.execution import Inline, Stream
from nhgd.execution import _cuda_graph as replays
from nhgd.execution._stopwatch import Stopwatch
from nhgd.inverse import KFAC, FisherDense
from nhgd.record import BatchGradient
from tests import catalogue

GPU = torch.device("cuda", 0)
LITERAL = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="reset")


class Card:
    """A GPU as far as the executor asks for one."""

    def __init__(self) -> None:
        self.held = False  # whether events are kept back
        self.waited = 0  # how often the host waited for one that was
        self.captured = 0
        card = self

        class CardStream:
            def __init__(self, device: Any = GPU, priority: int = 0) -> None:
                self.device = GPU

            def wait_stream(self, other: Any) -> None: ...

            def wait_event(self, event: Any) -> None: ...

            def record_event(self) -> Any:
                event = CardEvent()
                event.record(self)
                return event

        class CardEvent:
            def __init__(self, enable_timing: bool = False) -> None:
                self.come = True

            def record(self, stream: Any = None) -> None:
                self.come = not card.held

            def query(self) -> bool:
                return self.come or not card.held

            def synchronize(self) -> None:
                card.waited += not self.query()
                self.come = True

            def elapsed_time(self, other: Any) -> float:
                return 1.0

        self.Stream, self.Event = CardStream, CardEvent
        self.current = CardStream()

    def switch(self, stream: Any) -> None:
        self.current = stream


class Graph:
    """The work, done again on what stands in its inputs."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def replay(self) -> None:
        self.work()


@pytest.fixture
def card(monkeypatch):
    card = Card()
    for name, found in {
        "Stream": card.Stream,
        "Event": card.Event,
        "current_stream": lambda device=None: card.current,
        "set_stream": card.switch,
        "device_count": lambda: 1,
    }.items():
        monkeypatch.setattr(torch.cuda, name, found)
    prepare = Stream._prepare
    monkeypatch.setattr(
        Stream, "_prepare", lambda self, theta: prepare(self, SimpleNamespace(device=GPU, sizes=theta.sizes))
    )  # type: ignore[arg-type]
    monkeypatch.setattr(Stream, "_received", lambda self, record: record)
    monkeypatch.setattr(Stream, "_there", Stream._on_side)

    def captured(self, key, graphables, records, joined):  # type: ignore[no-untyped-def]
        card.captured += 1
        fixed = [map_tensors(torch.clone, record) for record in records]
        result = torch.empty(4, dtype=torch.float64)

        def work() -> None:
            found = joined([s.work(r) for s, r in zip(graphables, fixed, strict=True)])
            if found is not None:
                result.copy_(found)

        made = replays._Graph(Graph(work), [t for r in fixed for t in tensors(r)], result)  # type: ignore[arg-type]
        self._graphs[key] = made
        return made

    monkeypatch.setattr(replays.GraphCache, "_capture", captured)
    return card


def solved(execution: Any, inverse: Any, steps: int = 8, inner_steps: int = 7) -> tuple[Any, Any]:
    problem, inner, outer = catalogue.mlp_module()
    solver = nhgd.Solver(
        problem, [inner], [outer], method=NHGD(inverse), inner_steps=inner_steps, inner_lr=0.1, execution=execution
    )
    solution = solver.run(steps=steps)
    solver.close()
    return problem, solution


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 2, 3, 8, 30])
@pytest.mark.parametrize("update", ["ema", "average"])
def test_every_lag_gives_what_inline_gives(card, update, max_lag, held):
    inverse = FisherDense(form="inverse", update=update, beta=0.8, records="raw", warm="reset")
    expected, _ = solved("inline", inverse)
    card.held = held
    executor = Stream(max_lag=max_lag)
    found, solution = solved(executor, inverse)
    assert torch.equal(found.v.flat(), expected.v.flat())
    assert torch.equal(found.theta.flat(), expected.theta.flat())
    assert all(row["largest_lag"] <= max_lag for row in solution.history)
    assert solution.stats["execution"]["records"] == 56
    if not held:
        assert card.captured > 0
        assert card.waited == 0


@pytest.mark.parametrize("steps", [1, 4, 5, 6, 11])
def test_loops_of_any_length_are_whole(card, steps):
    expected, _ = solved("inline", LITERAL, inner_steps=steps)
    found, solution = solved(Stream(), LITERAL, inner_steps=steps)
    assert torch.equal(found.v.flat(), expected.v.flat())
    assert solution.stats["execution"]["records"] == 8 * steps


def loaded(executor: Stream, inverse: Any = LITERAL) -> tuple[Any, Any]:
    problem, batch, _ = catalogue.mlp_module()
    executor.start(inverse, problem.theta, problem.v)
    executor.begin()
    recorder = Recorder(problem, inverse.records)
    return problem, lambda: recorder.step(batch).record


def test_records_are_gathered_launched_and_waited_for_at_max_lag(card):
    card.held = True
    executor = Stream(max_lag=8)
    _, record = loaded(executor)
    for _ in range(4):
        executor.submit(record())
    assert not executor.queue.launched
    executor.submit(record())
    assert [launched.records for launched in executor.queue.launched] == [5]
    for _ in range(3):
        executor.submit(record())
    assert card.waited == 0
    assert executor.measured().largest_lag == 8
    executor.submit(record())  # a ninth: the first five are waited for
    assert card.waited == 1
    assert not executor.queue.launched
    state, lag = executor.state()
    assert (state.observed, lag) == (9, 0)
    assert card.waited == 1
    executor.raise_deferred()
    assert executor.queue.launched  # not there yet
    executor.drain()
    assert executor.state()[0].observed == 9
    assert card.waited == 2
    executor.close()


def test_memory_is_kept_until_the_card_is_done_and_a_change_is_noticed(card):
    card.held = True
    executor = Stream(max_lag=2)
    _, record = loaded(executor)
    first, second = record(), record()
    executor.submit(first)
    executor.submit(second)
    assert executor.queue.launched[0].given[0][0] is first.raw
    second.raw.add_(1)
    with pytest.raises(RunError, match="changed in place"):
        executor.drain()
    with pytest.raises(RunError, match="changed in place"):
        executor.submit(record())
    executor.close()


def test_the_guard_is_heard_before_v_moves_and_in_the_words_of_inline(card):
    said = []
    wound = FisherDense(form="inverse", update="ema", beta=0.2, records="raw", limit=1e3)
    for execution in ("inline", Stream()):
        problem, inner, outer = catalogue.mlp_module()
        solver = nhgd.Solver(
            problem, [inner], [outer], method=NHGD(wound), inner_steps=7, inner_lr=0.1, execution=execution
        )
        with pytest.raises(NonFiniteError, match="wound up") as caught:
            solver.run(steps=30)
        said.append((len(solver.history), problem.v.flat().tolist(), str(caught.value)))
        solver.close()
    assert said[0] == said[1]


def test_a_restarting_guard_goes_to_the_thread(card):
    inverse = FisherDense(form="inverse", update="ema", beta=0.2, records="raw", limit=1e3, guard="restart")
    expected, _ = solved("inline", inverse)
    executor = Stream()
    found, _ = solved(executor, inverse)
    assert torch.equal(found.v.flat(), expected.v.flat())
    assert not executor._ahead_of[BatchGradient]


def test_a_state_goes_back_into_a_stream(card):
    inline, executor = Inline(), Stream(max_lag=2)
    problem, record = loaded(executor)
    inline.start(LITERAL, problem.theta)
    inline.begin()
    given = [record() for _ in range(6)]
    for one in given[:3]:
        inline.submit(one)
    executor.restore(inline.keep().clone())
    for one in given[3:]:
        inline.submit(one)
        executor.submit(one)
    assert torch.equal(executor.keep().matrix, inline.keep().matrix)
    assert executor.keep().curvature == inline.keep().curvature
    executor.close()


def test_the_usual_work_of_the_thread_is_captured_by_the_inner_loop(card, monkeypatch):
    prepared = []

    def prepare(self, graphable, record, joined):  # type: ignore[no-untyped-def]
        self.due = False
        prepared.append((graphable.key, record.samples))

    monkeypatch.setattr(replays.GraphCache, "prepare", prepare)
    expected, _ = solved("inline", KFAC())
    found, _ = solved(Stream(), KFAC())
    assert torch.equal(found.v.flat(), expected.v.flat())
    assert prepared
    assert card.captured == 0  # never in the thread


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("max_lag", [0, 1, 2, 8])
def test_each_launch_is_judged_by_its_own_numbers(card, max_lag, held):
    inline, executor = Inline(), Stream(max_lag=max_lag)
    for _ in range(2):  # started again, launches are counted from the first place of the log
        problem, record = loaded(executor)
        inline.start(LITERAL, problem.theta)
        card.held = held
        for length in (7, 1, 12, 5, 30):
            inline.begin()
            executor.begin()
            for scale in range(1, length + 1):
                given = map_tensors(lambda t, scale=scale: t * scale, record())  # type: ignore[misc]
                inline.submit(given)
                executor.submit(given)
            found, expected = executor.keep(), inline.keep()
            assert (found.curvature, found.observed) == (expected.curvature, expected.observed)
            assert torch.equal(found.matrix, expected.matrix)
        card.held = False
    executor.close()


def test_a_new_outer_step_is_told_of_even_where_no_record_follows(card):
    executor = Stream()
    _, record = loaded(executor)
    executor.submit(record())
    assert not torch.equal(executor.state()[0].matrix, torch.eye(len(executor.keep().matrix), dtype=torch.float64))
    executor.begin()
    state, lag = executor.state()
    assert torch.equal(state.matrix, torch.eye(len(state.matrix), dtype=torch.float64))
    assert (state.observed, lag) == (1, 0)
    executor.close()


def test_what_was_gathered_is_launched_when_the_inner_loop_ends(card):
    executor = Stream()
    _, record = loaded(executor)
    for _ in range(7):
        executor.submit(record())
    assert [launched.records for launched in executor.queue.launched] == [5]
    assert not executor.inner_loop_ended()  # the host waits for none of it
    assert [launched.records for launched in executor.queue.launched] == [5, 2]
    executor.close()


@pytest.mark.parametrize("inner_steps", [5, 7])
def test_all_is_launched_when_the_outer_gradient_is_taken(card, inner_steps):
    problem, inner, outer = catalogue.mlp_module()
    executor = Stream()
    solver = nhgd.Solver(problem, [inner], [outer], method=NHGD(LITERAL), inner_steps=inner_steps, execution=executor)
    value, seen = problem.outer_value, []

    def noted(batch: Any, *leaves: Any) -> Any:
        seen.append((len(executor._gathered), sum(launched.records for launched in executor.queue.launched)))
        return value(batch, *leaves)

    problem.outer_value = noted  # type: ignore[method-assign]
    solver.step()
    assert seen == [(0, inner_steps)]
    solver.close()


def test_fresh_curvature_at_each_outer_step(card):
    inverse = FisherDense(form="inverse", update="ema", beta=0.8, records="raw", warm="accumulate")
    found = []
    for execution in ("inline", Stream(max_lag=2)):
        problem, inner, outer = catalogue.mlp_module()
        method = NHGD(inverse, curvature="fresh")
        solver = nhgd.Solver(problem, [inner], [outer], method=method, inner_steps=7, inner_lr=0.1, execution=execution)
        solver.run(steps=6)
        solver.close()
        found.append(problem.v.flat())
    assert torch.equal(*found)


class Sized:
    """An inverse whose numbers to look at are as many as theta has, and which counts what it was told."""

    def __init__(self) -> None:
        self.inside: Any = LITERAL
        self.learner = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    def observe(self, state: Any, record: Any, ready: Any = None) -> Any:
        return self.inside.observe(state, record, ready)

    def graphable(self, state: Any, record: Any) -> Any:
        found = self.inside.graphable(state, record)
        return found._replace(
            work=lambda given: torch.cat([found.work(given), given.raw]),
            finalise=lambda state, numbers: found.finalise(state, numbers[:4]),
        )


def test_another_theta_or_inverse_has_a_log_of_its_own(card):
    executor, inverse = Stream(), Sized()
    _, record = loaded(executor, inverse)
    executor.submit(record())
    assert executor.keep().observed == 1
    problem, batch, _ = catalogue.ridge_scalar()
    assert problem.theta.numel != len(executor.keep().matrix)
    executor.start(inverse, problem.theta)  # type: ignore[arg-type]
    recorder = Recorder(problem, "raw")
    executor.submit(recorder.step(batch).record)  # type: ignore[arg-type]
    assert executor.keep().observed == 1
    executor.start(LITERAL, problem.theta)
    assert executor._log is None
    executor.close()


def test_the_log_has_an_end_whatever_max_lag(card):
    card.held = True
    executor = Stream(max_lag=10**6)
    _, record = loaded(executor, FisherDense(form="inverse", update="average", records="raw"))
    one = record()
    for _ in range(5 * 80):
        executor.submit(one)
    assert executor._log is not None
    assert len(executor._log) == 64
    assert len(executor.queue.launched) < 64
    assert executor.keep().observed == 400
    executor.close()


def test_graphs_are_told_apart_by_all_that_they_were_made_for():
    graphable = LITERAL.graphable(LITERAL.init(catalogue.mlp_module()[0].theta), BatchGradient(None, torch.zeros(3), 4))
    assert graphable is not None

    def key(record: BatchGradient, joined: Any = len, work: Any = graphable) -> Any:
        return replays._key([work], [record], [list(tensors(record))], joined)

    base = BatchGradient(None, torch.zeros(4), 4)
    others = [
        key(BatchGradient(None, torch.zeros(5), 4)),
        key(BatchGradient(None, torch.zeros(4), 5)),
        key(BatchGradient(None, torch.zeros(4, dtype=torch.float64), 4)),
        key(BatchGradient(None, torch.zeros(8)[::2], 4)),
        key(base, joined=print),
        key(base, work=graphable._replace(key=1)),
    ]
    assert key(base) == key(BatchGradient(None, torch.ones(4), 4))
    assert len({key(base), *others}) == 7


def test_a_stopwatch_uses_beginnings_again_and_never_an_end_that_others_may_hold(card):
    watch = Stopwatch(GPU)
    stream = card.Stream()
    first = watch.begin(stream)
    last = watch.end(first, stream)
    assert watch.begin(stream) is not first  # not read yet
    assert watch.take() > 0
    again = [watch.begin(stream) for _ in range(3)]
    assert again[0] is first
    assert last not in again
