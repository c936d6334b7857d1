"""A team whose numbers live on a GPU: over gloo through main memory, and over NCCL, which one GPU allows for one worker."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nhgd.algorithm import NHGD
from nhgd.data_parallel import Alone, Team
from nhgd.inverse import EKFAC, KFAC, FisherWindow
from tests.processes import together
from tests.test_team import equal_bits, made, net, outcome, quantities, solver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHODS = {
    "kfac": NHGD(KFAC()),
    "ekfac": NHGD(EKFAC()),
    "window": NHGD(FisherWindow(window=20)),
    "trajectory": NHGD(cross="trajectory"),
}


def on_gpu(rank: int, size: int) -> dict[str, Any]:
    team = Team.of()
    found: dict[str, Any] = {name: outcome(solver(team, made(device="cuda"), m), 3) for name, m in METHODS.items()}
    torch.manual_seed(4)
    dropped = made(net(dropout=0.5).cuda(), device="cuda")
    found["dropout"] = outcome(solver(team, dropped, METHODS["trajectory"], inner_lr=0.1), 3)
    torch.manual_seed(1)
    wrapper = DistributedDataParallel(net().cuda())
    found["ddp"] = outcome(solver(team, made(wrapper, device="cuda"), METHODS["kfac"]), 3)
    found["quantities"] = quantities(team, "cuda")
    groups = [dist.new_group([other], backend="nccl") for other in range(size)]
    found["nccl"] = quantities(Team(groups[rank]), "cuda")
    return found


@cache
def answers() -> list[dict[str, Any]]:
    """What both workers say."""
    return together(on_gpu, 2)


@pytest.mark.parametrize("name", METHODS)
def test_two_workers_on_a_gpu_are_one_on_the_cpu(name: str) -> None:
    one = outcome(solver(Alone(), made(), METHODS[name]), 3)
    for key in ("v", "theta"):
        assert equal_bits([rank[name][key] for rank in answers()])
        assert np.abs(answers()[0][name][key] - one[key]).max() < 1e-10


def test_a_module_in_distributed_data_parallel_gives_the_numbers_of_one_worker() -> None:
    one = outcome(solver(Alone(), made(), METHODS["kfac"]), 3)
    for key in ("v", "theta"):
        assert equal_bits([rank["ddp"][key] for rank in answers()])
        assert np.abs(answers()[0]["ddp"][key] - one[key]).max() < 1e-10


def test_replicas_with_dropout_stay_replicas() -> None:
    assert equal_bits([rank["dropout"]["v"] for rank in answers()])


@pytest.mark.parametrize("wire", ["quantities", "nccl"])
def test_every_quantity_is_that_of_the_whole_batch(wire: str) -> None:
    for name, value in quantities(Alone()).items():
        np.testing.assert_allclose(answers()[0][wire][name], value, rtol=1e-8, atol=1e-11, err_msg=name)
