"""Backends on a CUDA device against the inline one. Two GPUs are stood for by two streams of one, and by the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nhgd
from nhgd.algorithm import AID, NHGD, NHGDSingle
from nhgd.execution import Device, Stream, Thread
from nhgd.inverse import EKFAC, KFAC, FisherDense, FisherDiagonal, FisherWindow, Refined
from nhgd.record import tensors
from nhgd.recorder import Recorder
from tests import catalogue

pytestmark = [
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


def made(device, width=24):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 3)).double().to(device)
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


def solved(execution, method, device="cuda", steps=6):
    problem, inner, outer = made(device)
    solver = nhgd.Solver(
        problem,
        inner,
        outer,
        method=method,
        inner_steps=5,
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
        inline.submit(record)
        with torch.cuda.stream(side._side):
            spin @ spin  # the side stream falls behind
        side.submit(record)
        del record
        for _ in range(4):
            torch.empty(32, 256, dtype=torch.float64, device="cuda").fill_(float("nan"))
    side.drain()
    found, expected = side.snapshot()[0].tensors(), inline.snapshot()[0].tensors()
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
    state, _ = executor.snapshot()
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
    assert all(t.device.type == "cpu" for t in executor.snapshot()[0].tensors().values())
    executor.close()


def test_times_are_those_of_the_device():
    _, _, solution = solved("stream", NHGD(KFAC()))
    for row in solution.history[1:]:
        assert 0 < row["curvature_seconds"] < 1
        assert 0 <= row["overlap"] <= 1
