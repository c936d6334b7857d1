"""The update of a dense inverse: several steps in one pass, and the pass on a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

import nhgd
from nhgd.inverse import FisherDense
from nhgd.inverse._learned import woodbury
from nhgd.inverse._learned.woodbury import fold_row, fold_rows, fold_steps
from nhgd.record import BatchGradient

LITERAL = FisherDense(form="inverse", update="ema", beta=0.8, records="raw")


def rows(count, size=9, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def start(size=9):
    x = rows(2 * size, size, seed=1)
    return torch.linalg.inv(x.T @ x / len(x))


@pytest.mark.parametrize("gains", [[0.2] * 6, [1 / k for k in range(2, 8)]], ids=["ema", "average"])
def test_steps_in_one_pass_are_the_steps_one_by_one(gains):
    one, together, given = start(), start(), rows(6)
    wanted = torch.stack([fold_row(one, row, gain) for row, gain in zip(given, gains, strict=True)])
    found = fold_steps(together, given, gains)
    assert torch.allclose(together, one, rtol=1e-12, atol=1e-13)
    assert torch.allclose(found, wanted, rtol=1e-12)
    inverted = torch.linalg.inv(start())
    for row, gain in zip(given, gains, strict=True):
        inverted = (1 - gain) * inverted + gain * torch.outer(row, row)
    assert torch.allclose(together, torch.linalg.inv(inverted), rtol=1e-9, atol=1e-12)
    assert torch.equal(together, together.T)


def taught(inverse, given):
    problem = nhgd.Bilevel(
        lambda theta, v, batch: (batch @ theta - v).square(),
        lambda theta, v, batch: theta.sum(),
        torch.zeros(9, dtype=torch.float64),
        torch.ones((), dtype=torch.float64),
    )
    state = inverse.begin(inverse.init(problem.theta))
    for row in given:
        state = inverse.observe(state, BatchGradient(None, row, samples=4))
    return inverse, state


def solved(inverse, state):
    u = torch.arange(9, dtype=torch.float64)
    return inverse.solve(state, u, nhgd.ridge.Ridge(0.0))[0]


def lengths_noted(passes, function, matrix, roots, scale):
    passes.append(len(roots))
    return function(matrix, roots, scale)


@pytest.mark.parametrize("update", ["ema", "average"])
@pytest.mark.parametrize("steps", [3, 4, 10])
def test_an_inverse_that_folds_several_steps_solves_as_one_that_does_not(update, steps, monkeypatch):
    plain = replace(LITERAL, update=update)
    passes = []
    original = woodbury.subtract_outer
    monkeypatch.setattr(woodbury, "subtract_outer", partial(lengths_noted, passes, original))
    wanted = taught(plain, rows(steps))
    assert passes == [1] * steps
    passes.clear()
    inverse, state = taught(replace(plain, fold=4), rows(steps))
    assert len(state.waiting) == steps % 4
    assert torch.allclose(solved(inverse, state), solved(*wanted), rtol=1e-11)
    assert passes == [4] * (steps // 4) + ([steps % 4] if steps % 4 else [])
    assert state.waiting == []
    assert state.observed == wanted[1].observed == steps
    assert state.curvature == pytest.approx(wanted[1].curvature, rel=1e-12)
    assert torch.allclose(solved(inverse, state), solved(*wanted), rtol=1e-11)


def test_steps_that_wait_are_made_before_the_next_outer_step():
    inverse, state = taught(replace(LITERAL, fold=10), rows(3))
    begun = inverse.begin(state)
    assert begun.waiting == []
    assert begun.observed == 3


def test_the_guard_sees_each_of_them():
    one_direction = 3 * torch.eye(9, dtype=torch.float64)[0]
    said = []
    for fold in (1, 10):
        inverse = replace(LITERAL, fold=fold, limit=20.0)
        with pytest.raises(nhgd.NonFiniteError, match="the inverse has wound up") as error:
            taught(inverse, [one_direction] * 30)
        said.append(str(error.value).split(":")[1])
    assert said[0] == said[1]
    assert "at observation" in said[0]


def test_a_large_array_is_updated_by_halves(monkeypatch):
    monkeypatch.setattr(woodbury, "BLOCK", 4)
    given = rows(3)
    found, wanted = start(), start()
    woodbury.subtract_outer(found, given, 1.5)
    assert torch.equal(found, found.T)
    assert torch.allclose(found, 1.5 * wanted - given.T @ given, rtol=1e-13, atol=1e-13)


def test_a_run_that_folds_is_resumed(tmp_path):
    pytest.importorskip("safetensors")
    method = nhgd.algorithm.NHGD(inverse=replace(LITERAL, fold=5), cross="final", curvature="carried")

    def solver(**settings):
        x = rows(20, 3)
        problem = nhgd.Bilevel(
            lambda theta, v, batch: (batch[0] @ theta - v).square(),
            lambda theta, v, batch: (theta - 1).square().sum(),
            torch.zeros(3, dtype=torch.float64),
            torch.ones((), dtype=torch.float64),
        )
        return nhgd.Solver(problem, nhgd.Data(x, batch=8), [x], method=method, inner_steps=7, **settings)

    wanted = solver().run(steps=6)
    solver(checkpoint=tmp_path).run(steps=3)
    fresh = solver()
    again = nhgd.Solver.resume(tmp_path, fresh.problem, fresh.loop.inner.source, fresh.loop.outer.source).run(steps=6)
    assert torch.equal(again.v, wanted.v)


@pytest.mark.parametrize(
    "settings", [{"form": "matrix"}, {"records": "sample"}, {"guard": "restart"}], ids=lambda s: next(iter(s))
)
def test_only_rank_one_updates_of_the_inverse_can_wait(settings):
    with pytest.raises(nhgd.InputError, match="fold = 2"):
        replace(LITERAL, fold=2, **settings)


def test_an_inverse_is_passed_over_however_lapack_left_it():
    inverse = start()
    assert not inverse.is_contiguous()  # its columns lie together
    for matrix in (inverse, inverse.contiguous()):
        view = woodbury.by_rows(matrix)
        assert view.is_contiguous()
        assert view.data_ptr() == matrix.data_ptr()
    assert woodbury.by_rows(inverse[::2, ::2]) is None


def noted(taken, function, *given):
    taken.append(1)
    return function(*given)


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class TestOnTheGPU:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("size", [9, 64, 130])
    def test_the_kernel_does_what_torch_does_and_is_taken(self, dtype, size, monkeypatch):
        pytest.importorskip("triton")
        results = {}
        for kernel in (True, False):
            taken, subtracted = [], []
            if kernel:
                module = woodbury._kernel()
                assert module is not None
                monkeypatch.setattr(module, "fold", partial(noted, taken, module.fold))
                monkeypatch.setattr(module, "subtract", partial(noted, subtracted, module.subtract))
            else:
                monkeypatch.setattr(woodbury, "_kernel", lambda: None)
            a = [start(size).to("cuda", dtype) for _ in range(3)]
            given = rows(5, size).to("cuda", dtype)
            numbers = [torch.stack([fold_row(a[0], row, 0.2) for row in given])]
            fold_rows(a[1], given, 0.2)
            numbers.append(fold_steps(a[2], given, [0.2] * 5))
            assert (len(taken), len(subtracted)) == ((6, 1) if kernel else (0, 0))
            results[kernel] = a, numbers
            monkeypatch.undo()
        tolerance = 1e-11 if dtype is torch.float64 else 1e-3
        for found, wanted in zip(results[True][0], results[False][0], strict=True):
            assert torch.equal(found, found.T)
            assert float((found - wanted).norm() / wanted.norm()) < tolerance
        for found, wanted in zip(results[True][1], results[False][1], strict=True):
            assert torch.allclose(found, wanted, rtol=tolerance)

    @pytest.mark.parametrize("count", [1, 2, 10, 16, 17])
    def test_float32_is_near_float64_and_twice_the_same(self, count):
        size, gains = 600, [1 / (k + 20) for k in range(count)]
        wanted, given = start(size), rows(count, size)
        found = [wanted.to("cuda", torch.float32) for _ in range(2)]
        numbers = [fold_steps(a, given.to("cuda", torch.float32), gains) for a in found]
        expected = fold_steps(wanted, given, gains)
        assert torch.equal(found[0], found[1])
        assert torch.equal(numbers[0], numbers[1])
        assert float((found[0].cpu() - wanted).norm() / wanted.norm()) < 1e-6
        assert torch.allclose(numbers[0].cpu().double(), expected, rtol=1e-5)

    def test_a_captured_update_is_the_eager_one(self):
        size = 130
        eager, repeated = (start(size).to("cuda", torch.float32) for _ in range(2))
        row = torch.zeros(size, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        fold_row(eager.clone(), row + 1, 0.2)  # compiled before
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            numbers = fold_row(repeated, row, 0.2)
        for given in rows(4, size).to("cuda", torch.float32):
            row.copy_(given)
            graph.replay()
            assert torch.equal(numbers, fold_row(eager, given, 0.2))
            assert torch.equal(repeated, eager)

    @pytest.mark.parametrize("place", [0, 7])
    @pytest.mark.parametrize("value", [float("nan"), -50.0])
    @pytest.mark.parametrize("count", [1, 3])
    def test_the_guard_sees_an_array_that_is_lost(self, count, value, place):
        inverse = torch.eye(130, device="cuda")
        inverse[place, place] = value
        numbers = fold_steps(inverse, torch.eye(130, device="cuda")[:count], [0.1] * count)
        assert not bool((numbers[:, 2] > 0).any())  # the least entry of the diagonal
        assert place != 0 or not bool(numbers[0, 1] > 0)  # what the first row divides by
