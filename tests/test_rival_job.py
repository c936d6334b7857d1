"""The cleaning job of benchmarks/rival_job.py: its protocol, on a set small enough to be quick."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import rival_job
from tests.idx_files import image_set, write


@pytest.fixture
def job(tmp_path):
    folder = write(tmp_path / "mnist", image_set(train=400))
    return rival_job.load(folder, seed=0, trusted=100, training=300)


def test_the_samples_are_standardised_and_half_of_the_labels_drawn_anew(job):
    x = job.train[0]
    assert x.shape == (300, 37)
    assert torch.equal(x[:, -1], torch.ones(300))
    everything = torch.cat([job.train[0], job.trusted[0]])[:, :-1]
    assert float(everything.mean()) == pytest.approx(0, abs=1e-5)
    assert float(everything.std()) == pytest.approx(1, rel=1e-5)
    # 300 labels, each wrong with probability 0.45: beyond six deviations of 0.029 by chance in less than 1e-8 of all cases.
    assert float(job.right.double().mean()) == pytest.approx(0.55, abs=0.18)


@pytest.mark.filterwarnings("ignore:cg ended:nhgd.InverseWarning")  # on batches of 20
@pytest.mark.parametrize(("method", "all_batches"), [("aid-identity", False), ("aid-cg-10", False), ("itd", True)])
def test_the_first_outer_step_moves_what_it_touches_by_c(job, method, all_batches, monkeypatch):
    monkeypatch.setattr(rival_job, "BATCH", 20)
    size = rival_job.outer_step_size(job, method, 0)
    with rival_job.solver(job, method, 0, outer_optimizer=torch.optim.SGD, outer_lr=1e-3 * size) as started:
        started.step()
        moved = (started.problem.v.flat() - 0.5).abs()
    touched = moved > 0
    assert int(touched.sum()) == (200 if all_batches else 20)
    # The precision of numbers beside 0.5 limits how well a move of 1e-3 is known.
    assert float(moved[touched].mean()) == pytest.approx(1e-3 * (0.3 if all_batches else 1.0), rel=1e-2)


def test_a_method_whose_adjoint_begins_at_zero_is_measured_later(job):
    assert 0 < rival_job.outer_step_size(job, "soba", 0) < float("inf")


def test_the_area_counts_pairs_and_equal_scores_by_half():
    score = torch.tensor([0.1, 0.4, 0.4, 0.9])
    positive = torch.tensor([False, False, True, True])
    assert rival_job.area(score, positive) == pytest.approx((1 + 0.5 + 1 + 1) / 4)


def test_runs_are_written_as_they_end_and_those_of_other_methods_kept(tmp_path, capsys):
    folder = write(tmp_path / "mnist", image_set(train=400))
    out = tmp_path / "job.json"
    words = ["--data", str(folder), "--out", str(out), "--seeds", "0", "--seconds", "0.1"]
    words += ["--training", "300", "--trusted", "100"]
    rival_job.main([*words, "--methods", "aid-identity"])
    rival_job.main([*words, "--methods", "itd"])
    found = json.loads(out.read_text())
    assert [run["method"] for run in found["runs"]] == ["aid-identity", "itd"]
    assert found["environment"]["device"] == "cpu"
    for run in found["runs"]:
        assert run["steps"] >= 1
        assert run["cpu_seconds"] >= 0.1
        assert 0 <= run["auc"] <= 1
    assert "| itd |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        rival_job.main([*words, "--methods", "itd", "--seconds", "0.2"])
