"""The scaling model of benchmarks/parallel.md against the bytes that are sent and the library's division; its limits.

And the tables of all pages against the results they come from.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhgd
from benchmarks import scaling
from benchmarks.tables import pages
from nhgd.algorithm import NHGD
from nhgd.execution import Device
from nhgd.execution.assignment import Assignment
from nhgd.inverse import KFAC, FisherDense

WIDTHS = (5, 4, 3)
MACHINE = scaling.Machine("a made-up one", 1e12, 1e12, 1e11, 1e12, 1e-4, 1e-5, 1e-5)


def problem():
    torch.manual_seed(0)
    layers = [layer for a, b in pairwise(WIDTHS) for layer in (nn.Linear(a, b), nn.Tanh())]

    def inner(model, v, batch):
        return nhgd.Losses(F.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights=v[batch[2]])

    def outer(model, v, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    x, y = torch.randn(24, 5), torch.randint(3, (24,))
    found = nhgd.Bilevel(inner, outer, nn.Sequential(*layers[:-1]), torch.full((24,), 0.5), l2=1e-2)
    return found, nhgd.Data(x, y, batch=8), [(x, y)]


@pytest.mark.parametrize(
    ("inverse", "each"),
    [
        (KFAC(damping=None, overhead=None), scaling.Net.record_bytes),
        (FisherDense(form="inverse", update="ema", beta=0.8, records="raw"), scaling.Net.row_bytes),
    ],
)
def test_bytes_are_those_that_a_second_device_is_sent(inverse, each):
    net = scaling.mlp("small", WIDTHS, 8)
    bilevel, inner, outer = problem()
    there = Device("cpu")
    solver = nhgd.Solver(bilevel, inner, outer, method=NHGD(inverse), inner_steps=6, execution=there)
    solver.run(steps=2)
    sent = solver.executor.measured().bytes_sent
    solver.close()
    assert net.parameters == bilevel.theta.numel
    assert sent == 2 * (6 * each(net) + net.answer_bytes())


def test_factors_are_as_large_as_those_of_kfac():
    bilevel, inner, outer = problem()
    solver = nhgd.Solver(bilevel, inner, outer, method=NHGD(KFAC()), inner_steps=2)
    solver.run(steps=1)
    state, _ = solver.executor.state()
    kept = [*state.inputs.values(), *state.scores.values()]
    net = scaling.mlp("small", WIDTHS, 8)
    assert net.factor_numbers() == sum(t.numel() for t in kept)
    assert net.basis_work() == sum(t.shape[1] ** 3 for t in kept)


def test_layers_are_divided_as_by_the_library():
    widths = (9, 30, 12, 25, 4)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    theta = nhgd.Bilevel(lambda *_: None, lambda *_: None, model, torch.zeros(1)).theta
    owner = Assignment(KFAC(), theta, 3).owner
    expected = [{widths[int(n.split(".")[0])] for n, part in owner.items() if part == p} for p in range(3)]
    assert [{layer.inputs for layer in share} for share in scaling.mlp("", widths, 1).divided(3)] == expected


def test_one_gpu_is_the_sum_and_the_limits_hold():
    net = replace(scaling.MLP, batch=64)
    assert scaling.team(MACHINE, net, 1) == pytest.approx(MACHINE.inner(net) + MACHINE.kfac(net))
    assert scaling.all_reduce(1e9, 1) == 0
    # A sum over ever more workers sends twice its size over the slowest link, and never less for more workers.
    times = [scaling.all_reduce(1e9, n) for n in (2, 8, 16, 64, 1024)]
    assert times == sorted(times)
    assert times[1] == pytest.approx(2 * 7 / 8 * 1e9 / scaling.NVLINK, rel=1e-2)
    # Curvature beside the loop is never quicker than the slower of the two.
    for gpus in (2, 16, 256):
        ranks, seconds = scaling.best_keepers(MACHINE, net, gpus)
        assert seconds >= scaling.inner_of(MACHINE, net, gpus - ranks)
        assert seconds >= max(map(net.basis_work, net.divided(ranks))) / MACHINE.basis_rate / scaling.INNER_STEPS


def test_constants_are_read_from_a_measurement_of_streams():
    def row(case, inverse, batch, inner, curvature):
        milliseconds = {"inner": inner, "curvature": curvature}
        return {"case": case, "inverse": inverse, "batch": batch, "inner_steps": 10, "milliseconds": milliseconds}

    rows = [
        row("dense, the paper's rank-one update", "FisherDense(...)", 1024, 20.0, 10.0),
        row("K-FAC, MLP", "KFAC(invert_every=10)", 1024, 50.0, 1.0),
        row("K-FAC, MLP", "KFAC(invert_every=10)", 8192, 100.0, 300.0),
        row("K-FAC, MLP", "KFAC(solver='cholesky')", 8192, 100.0, 100.0),
        {"case": "one that failed", "error": "..."},
    ]
    found = scaling.machine_of_streams({"rows": rows}, 1e-5)
    assert found.overhead + found.overhead_a_layer == pytest.approx(2e-3)
    assert found.inner(replace(scaling.MLP, batch=8)) == pytest.approx(5e-3)
    assert found.inner(scaling.MLP) == pytest.approx(10e-3)
    assert found.dense(scaling.SOFTMAX) == pytest.approx(1e-3)
    # Factors of ten records, and one decomposition in ten records.
    assert found.kfac(scaling.MLP) == pytest.approx(30e-3)


def test_all_tables_can_be_made(tmp_path):
    rates = {key: value for key, value in vars(MACHINE).items() if key not in ("name", "submit")}
    (tmp_path / "constants-cpu.json").write_text(json.dumps({"rates": rates}))
    took = [
        {"execution": name, "submit_microseconds": took}
        for name, took in (("inline", 99), ("thread", 20), ("device", 30))
    ]
    (tmp_path / "submit-beside-cpu.json").write_text(json.dumps({"rows": took}))
    (cpu,) = scaling.read_machines(tmp_path)
    assert cpu == replace(MACHINE, name="two CPU cores", submit=1e-6 * 30)
    found = scaling.tables([cpu, MACHINE])
    assert {"counts", "constants", "second-gpu", "strong-mlp", "weak-mlp", "strong-transformer"} <= set(found)
    for table in found.values():
        lines = table.splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert len(lines) >= 3


def test_runs_of_one_measurement_stand_side_by_side_where_all_have_the_case():
    def row(case, batch, ratio):
        return {
            "case": case,
            "batch": batch,
            "rounds": 7,
            "ratio": ratio,
            "ratio_quartiles": [ratio - 0.1, ratio + 0.1],
        }

    first = {"rows": [row("a, batch 64", 64, 1.2), row("b", 1024, 1.3), {"case": "c", "error": "..."}]}
    second = {"rows": [row("c", 8, 2.0), row("a, batch 64", 64, 1.5)]}
    head, _, *rows = scaling.repeats_table([first, second]).splitlines()
    assert head == "| case | batch | rounds | run 1 | run 2 |"
    assert rows == ["| a | 64 | 7 | 1.20 (1.10 to 1.30) | 1.50 (1.40 to 1.60) |"]


@pytest.mark.parametrize(
    ("name", "found"),
    [*pages().items(), ("benchmarks/parallel.md", scaling.all_tables(scaling.ROOT / "benchmarks/results"))],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_pages_show_the_tables_of_the_committed_results(name, found):
    page = (scaling.ROOT / name).read_text(encoding="utf-8")
    for mark, table in found.items():
        assert f"<!-- table: {mark} -->\n\n{table}\n" in page, mark
