"""Numbers that are read from a GPU beside its work are those that are read after it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import nhgd
from nhgd import _beside
from nhgd.inverse import KFAC
from nhgd.inverse._learned.effort import Effort
from nhgd.loop import hypergradient
from tests.test_together import problem_on


def test_without_a_gpu_all_is_done_here_and_now() -> None:
    with _beside.marked(torch.device("cpu")), _beside.beside() as kept:
        assert kept == []
    assert _beside._current.mark is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_reads_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    used, found = [], []
    for beside in (False, True):
        problem, batch = problem_on("cuda")
        with monkeypatch.context() as patch:
            if not beside:
                patch.setattr(hypergradient, "marked", lambda *given: nullcontext())
            solver = nhgd.Solver(
                problem,
                [batch],
                [batch],
                method=nhgd.algorithm.NHGD(KFAC(effort=Effort(every=2, invert_every=3, invert_at=(1,)))),
                inner_steps=3,
                inner_optimizer=torch.optim.Adam,
                inner_lr=0.01,
                outer_lr=0.1,
                compile=False,
            )
            solver.run(steps=12)
        used.append(len(_beside._streams))
        found.append([problem.v.flat(), problem.theta.flat()])
    assert all(map(torch.equal, *found))
    assert used[0] < used[1]
    assert float(problem.v.flat().abs().min()) > 0
