"""Every algorithm: how it runs on the small quadratic, and where it must end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import nhgd
from nhgd.algorithm import (
    AID,
    ALSET,
    BOME,
    BSA,
    F2SA,
    FSLA,
    ITD,
    MRBO,
    NHGD,
    SABA,
    SOBA,
    SUSTAIN,
    TTSA,
    VRBO,
    AbstractAlgorithm,
    AmIGO,
    NHGDSingle,
    StocBiO,
)
from nhgd.inverse import FisherDense, FisherWindow
from nhgd.schedule import Power
from nhgd.task import Instance, Quadratic
from tests import noise
from tests.catalogue.ends import (
    cold_start,
    ends_with,
    fisher_matrix,
    identity_matrix,
    kfac_matrix,
    literal_matrix,
    neumann_matrix,
    penalty_matrix,
    unrolled_matrix,
    v_star,
)

BATCH = 80


def noisy_instance() -> Instance:
    """The small quadratic with every sample there four times and batches of a third of them.

    The copies change no answer and make the noise of a batch smaller against them. Of the first seeds this one has the
    largest v.
    """
    instance = Quadratic.preset("quick").build(5, torch.device("cpu"))
    columns = tuple(column.repeat(4, *[1] * (column.ndim - 1)) for column in instance.full_inner)
    return replace(instance, inner_data=nhgd.Data(*columns, batch=BATCH), full_inner=columns)


@dataclass(frozen=True)
class Noisy:
    """How an algorithm is run on `noisy_instance`.

    Args:
        run: the same method in `tests/noise.py`.
        settings: of the solver, over those of the task.
        steps: outer steps.
        own: the centre is the mean of such runs, because noise moves the end; otherwise it is the case's own end.
        make: the algorithm, where it is not the one of the case.
    """

    run: noise.Run
    settings: dict[str, Any]
    steps: int = 120
    own: bool = False
    make: Callable[[], AbstractAlgorithm] | None = None


@dataclass(frozen=True)
class AlgorithmCase:
    """An algorithm, how to run it on the small quadratic (d = 6, p = 3, n = 60), and where it must end.

    Args:
        make: the algorithm.
        end: the v it converges to with full batches: v_star, or what its own bias predicts in closed form.
        settings: of the solver, over those of the task.
        steps: outer steps that suffice.
        tol: relative error of v then.
        noisy: the same with noise; None: not examined. Each algorithm is in one form at least; where it is not in another,
            the two share what noise could upset, or the reason stands beside the case.
    """

    make: Callable[[], AbstractAlgorithm]
    end: Callable[[Instance], Tensor] = v_star
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 150
    tol: float = 1e-4
    noisy: Noisy | None = None
    label: str = ""

    @property
    def name(self) -> str:
        """The name of the algorithm, and what tells this case from its others."""
        return f"{self.make().name} {self.label}".strip()


FAST = {"inner_steps": 8, "inner_lr": 1.5, "outer_lr": 1.0}  # near the largest stable steps of the small quadratic
FALLING = Power(1.0, 1.0, offset=12)
# So many inner steps that the batches of an outer step are not a whole number of passes, which are three batches long:
# otherwise the cross derivative would always be taken on what the inner steps have left of a pass.
CALM = {"inner_steps": 4, "inner_lr": 0.6, "outer_lr": FALLING}
SINGLE = {"inner_lr": Power(0.9, 0.3), "outer_lr": FALLING}


ALGORITHMS: list[AlgorithmCase] = [
    # The inverses of aid that solve the system differ in nothing that noise could show, so one of them takes its exam. On
    # single batches they are biased: the mean of an inverse is not the inverse of the mean.
    AlgorithmCase(AID, settings=FAST, steps=60),
    AlgorithmCase(
        lambda: AID(batches="all"),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.double_loop(noise.solved), CALM, 60),
        label="all data",
    ),
    AlgorithmCase(lambda: AID(nhgd.inverse.Neumann(terms=100, tol=1e-6)), v_star, FAST, 60, label="neumann"),
    AlgorithmCase(lambda: AID(nhgd.inverse.FixedPoint(steps=100, tol=1e-6)), v_star, FAST, 60, label="fixed_point"),
    AlgorithmCase(
        lambda: AID(nhgd.inverse.Identity()),
        ends_with(identity_matrix),
        FAST,
        100,
        noisy=Noisy(noise.double_loop(noise.identity), CALM),
        label="identity",
    ),
    AlgorithmCase(lambda: AID(nhgd.inverse.Broyden(steps=20)), v_star, FAST, 60, label="broyden"),
    AlgorithmCase(lambda: AID(nhgd.inverse.Nystrom(rank=6)), v_star, FAST, 60, label="nystrom"),
    AlgorithmCase(lambda: AID(nhgd.inverse.QuadraticSGD(steps=150)), v_star, FAST, 60, label="sgd"),
    AlgorithmCase(NHGD, ends_with(kfac_matrix), FAST, 80, noisy=Noisy(noise.learning(noise.Kronecker), CALM)),
    AlgorithmCase(
        lambda: NHGD(FisherWindow(window=480)),
        ends_with(fisher_matrix),
        FAST,
        80,
        noisy=Noisy(noise.learning(lambda: noise.Window(batches=6)), CALM),
        label="window",
    ),
    AlgorithmCase(
        lambda: NHGD(FisherWindow(window=480, fisher="exact")),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.learning(lambda: noise.Window(batches=6, exact=True)), CALM),
        label="exact window",
    ),
    AlgorithmCase(
        lambda: NHGD(FisherDense()),
        ends_with(fisher_matrix),
        FAST,
        80,
        noisy=Noisy(noise.learning(noise.Average), CALM),
        label="dense",
    ),
    AlgorithmCase(
        lambda: NHGD.presets()["nhgd-paper"],
        ends_with(literal_matrix(0.8, 8)),
        {**FAST, "outer_lr": 0.5},
        100,
        noisy=Noisy(noise.learning(noise.Literal, 5), CALM, own=True),
        label="paper",
    ),
    AlgorithmCase(
        lambda: NHGD(refine=6, batches="all"),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.learning(noise.Kronecker, "all", exact=True), CALM, 60),
        label="refined",
    ),
    AlgorithmCase(
        lambda: NHGD(refine=6, batches="all", cross="trajectory"),
        v_star,
        FAST,
        60,
        noisy=Noisy(noise.learning(noise.Kronecker, "all", exact=True, trajectory=True), CALM, 60),
        label="trajectory",
    ),
    # Natural steps adapt their damping to the loss of each batch, which is no formula in the moments of the batches.
    AlgorithmCase(lambda: NHGD(inner="natural"), ends_with(kfac_matrix), {"inner_steps": 5}, label="natural"),
    AlgorithmCase(
        ITD, ends_with(unrolled_matrix(4)), {"inner_steps": 4}, noisy=Noisy(noise.unrolled(), {"outer_lr": FALLING})
    ),
    AlgorithmCase(ITD, settings={"inner_steps": 50, "inner_lr": 1.69, "outer_lr": 1.5}, steps=40, label="long"),
    AlgorithmCase(
        lambda: ITD(truncate=3),
        ends_with(unrolled_matrix(3)),
        {"inner_steps": 10, "outer_lr": 1.0},
        80,
        noisy=Noisy(noise.unrolled(3), {"inner_steps": 4, "outer_lr": FALLING}),
        label="truncated",
    ),
    AlgorithmCase(
        lambda: F2SA(first=1.0, growth=0.0),
        ends_with(penalty_matrix(1.0)),
        {"inner_steps": 4, "inner_lr": 0.3},
        noisy=Noisy(noise.penalty(1.0, False), {"inner_steps": 1, "outer_lr": Power(0.8, 1.0, offset=6)}, 300),
    ),
    AlgorithmCase(lambda: F2SA(first=1e4, shared=True), settings={"inner_steps": 6, "inner_lr": 1.6}, label="growing"),
    AlgorithmCase(
        lambda: F2SA(first=2.0, growth=0.0, shared=True),
        ends_with(penalty_matrix(2.0)),
        {"inner_steps": 4, "outer_lr": 1.0},
        100,
        noisy=Noisy(noise.penalty(2.0, True), CALM),
        label="shared",
    ),
    AlgorithmCase(
        lambda: BOME(pulled_lr=Power(0.5, 1.0, offset=40)),
        ends_with(unrolled_matrix(5)),
        {"inner_steps": 5, "outer_lr": Power(0.5, 1.0, offset=40)},
        400,
        tol=0.05,  # falls like 1 / k; tests/test_first_order.py follows it further
        noisy=Noisy(noise.barrier(Power(0.5, 1.0, offset=40)), {"inner_lr": 0.6}, own=True),
    ),
    AlgorithmCase(
        lambda: BSA(K=5, phi=0.5),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 2, "outer_lr": Power(1.0, 0.6)},
        120,
        tol=0.12,  # noise of the random product, which full batches do not remove
        noisy=Noisy(
            noise.double_loop(noise.series(lambda k: 4, 0.5, True), 0.5),
            {"inner_lr": 0.9, "outer_lr": Power(1.0, 1.0, offset=6)},
            80,
            own=True,
        ),
    ),
    AlgorithmCase(
        lambda: BSA(K=5, phi=0.5, estimator="sum", growth=0.0),
        ends_with(neumann_matrix(4, 0.5), cold_start(8)),
        {"inner_steps": 8, "outer_lr": 1.5},
        60,
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 4, 0.5), 0.0), {"inner_lr": 0.6, "outer_lr": FALLING}),
        label="sum, constant",
    ),
    AlgorithmCase(
        lambda: ALSET(K=5, phi=0.5),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 3, "outer_lr": Power(1.0, 0.6)},
        200,
        tol=0.08,  # noise of the random product, which full batches do not remove
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 4, 0.5, True)), {**CALM, "inner_steps": 3}),
    ),
    AlgorithmCase(
        lambda: ALSET(K=5, phi=0.5, estimator="sum"),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 5, "outer_lr": 1.0},
        80,
        label="sum",
    ),
    AlgorithmCase(
        lambda: StocBiO(K=4, phi=0.5, B=30, mu=0.3),
        ends_with(neumann_matrix(4, 0.5)),
        {"inner_steps": 5, "outer_lr": 1.0},
        80,
        noisy=Noisy(noise.double_loop(noise.shrinking([120, 102, 87, 74], 0.5)), CALM),
    ),
    AlgorithmCase(
        lambda: AmIGO(K=3, beta=0.9),
        settings={"inner_steps": 5, "outer_lr": 1.0},
        steps=80,
        noisy=Noisy(noise.amigo(3, 0.9), CALM),
    ),
    AlgorithmCase(
        lambda: VRBO(K=2, phi=0.5, q=3),
        ends_with(neumann_matrix(2, 0.5)),
        {"inner_steps": 3, "outer_lr": 1.5},
        50,
        noisy=Noisy(noise.vrbo(2, 0.5, 3), {"inner_lr": 0.5, "outer_lr": 0.7}, 40),  # constant steps: the noise is gone
    ),
    # Single loops: one inner step for each outer one, so inner_lr is as large as the curvature allows.
    AlgorithmCase(
        SOBA,
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        noisy=Noisy(noise.soba, {"inner_lr": 0.5, "outer_lr": 0.1}, 300),
    ),
    AlgorithmCase(
        SABA,
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        noisy=Noisy(noise.saba, {"inner_lr": 0.5, "outer_lr": 0.1}, 400),  # variance reduction: constant steps converge
    ),
    AlgorithmCase(
        lambda: TTSA(K=5, phi=0.1, growth="none"),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 1.5, "outer_lr": 2.0},
        60,
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 5, 0.1)), {**SINGLE, "inner_steps": 1}),
    ),
    AlgorithmCase(
        lambda: TTSA(K=5, phi=0.1, growth="none", estimator="randomised"),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 0.9, "outer_lr": Power(2.0, 0.6)},
        150,
        tol=0.03,  # the series is random with full batches too
        noisy=Noisy(noise.double_loop(noise.series(lambda k: 5, 0.1, True)), {**SINGLE, "inner_steps": 1}),
        label="randomised",
    ),
    AlgorithmCase(
        TTSA,
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        noisy=Noisy(
            noise.double_loop(noise.series(lambda k: int(2 * math.sqrt(1 + k)), 0.8)),
            {"inner_lr": Power(0.9, 0.3), "outer_lr": Power(1.0, 1.0, offset=6), "inner_steps": 1},
            100,
            make=lambda: TTSA(K=2, phi=0.8),
        ),
        label="growing",
    ),
    AlgorithmCase(
        lambda: TTSA.presets()["ttsa-original"],
        settings={"inner_lr": 1.5, "outer_lr": Power(1.0, 0.6)},
        steps=100,
        tol=0.3,
        noisy=Noisy(
            noise.double_loop(noise.series(lambda k: int(2 * (1 + math.log(1 + k))), 0.5, True)),
            {"inner_lr": Power(0.9, 0.3), "outer_lr": Power(1.0, 1.0, offset=6), "inner_steps": 1},
            120,
            own=True,
            make=lambda: TTSA(K=2, phi=0.5, estimator="randomised", growth="log"),
        ),
        label="original",
    ),
    AlgorithmCase(
        FSLA,
        settings={"inner_lr": 1.5, "outer_lr": 0.4},
        steps=250,
        noisy=Noisy(noise.fsla(0.5), {"inner_lr": Power(0.6, 0.3), "outer_lr": Power(0.3, 0.5)}, 250),
    ),
    AlgorithmCase(
        lambda: MRBO(K=5, phi=0.1),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 1.5, "outer_lr": 2.0},
        60,
        noisy=Noisy(noise.momentum(5, 0.1, False), SINGLE),
    ),
    AlgorithmCase(
        lambda: SUSTAIN(K=6, phi=0.1),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 0.9, "outer_lr": Power(2.0, 0.6)},
        150,
        tol=0.04,  # the series is random with full batches too
        noisy=Noisy(noise.momentum(5, 0.1, True), SINGLE),
    ),
    AlgorithmCase(
        lambda: SUSTAIN(K=6, phi=0.1, estimator="sum"),
        ends_with(neumann_matrix(5, 0.1)),
        {"inner_lr": 1.5, "outer_lr": 2.0},
        60,
        label="sum",
    ),  # with noise it is MRBO: tests/test_single_loop.py
    AlgorithmCase(
        NHGDSingle,
        ends_with(kfac_matrix),
        {"inner_lr": 1.5, "outer_lr": 1.0},
        100,
        noisy=Noisy(noise.learning(noise.Kronecker), {**SINGLE, "inner_steps": 1}),
    ),
    AlgorithmCase(
        lambda: NHGDSingle(refine=6, batches="all"),
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        noisy=Noisy(noise.learning(noise.Kronecker, "all", exact=True), {**SINGLE, "inner_steps": 1}, 80),
        label="refined",
    ),
]
