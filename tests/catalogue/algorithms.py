"""Every algorithm: how it runs on the small quadratic, where it must end, and the formula of its steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nhgd.algorithm import (
    AID,
    ALSET,
    BOME,
    BSA,
    F2SA,
    FSLA,
    HOAG,
    ITD,
    MASOBA,
    MRBO,
    NHGD,
    PZOBO,
    SABA,
    SAMA,
    SOBA,
    SRBA,
    SUSTAIN,
    TTSA,
    VRBO,
    AbstractAlgorithm,
    AmIGO,
    NHGDMomentum,
    NHGDSingle,
    StocBiO,
)
from nhgd.inverse import (
    CG,
    KFAC,
    Broyden,
    FisherDense,
    FisherWindow,
    FixedPoint,
    Identity,
    Neumann,
    Nystrom,
    QuadraticSGD,
)
from nhgd.schedule import Power
from nhgd.task import Instance, Quadratic
from tests import formulas
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
from tests.replay import Recorded


def noisy_instance(noise: float = 1.0) -> Instance:
    """The small quadratic with every sample there four times, and batches of a third of them that are recorded.

    The copies make the noise of a batch small enough for the step sizes below.
    """
    instance = Quadratic.preset("quick").with_settings({"noise": noise}).build(5, torch.device("cpu"))
    columns = tuple(column.repeat(4, *[1] * (column.ndim - 1)) for column in instance.full_inner)
    return replace(instance, inner_data=Recorded(*columns, batch=80), full_inner=columns)


@dataclass(frozen=True)
class AlgorithmCase:
    """An algorithm, how to run it on the small quadratic (d = 6, p = 3, n = 60), where it must end, and its formula.

    Args:
        method: the algorithm.
        label: what tells this case from others of the same algorithm.
        end: the v it converges to with full batches: v_star, or what its own bias predicts in closed form.
        settings: of the solver, over those of the task.
        steps: outer steps that suffice.
        tol: relative error of v then.
        formula: its outer step, from the batches that it draws; None: that of another case.
        noisy: settings of the solver on `noisy_instance`, over those above.
        noise: of the task there; below 1 the Fisher matrix falls short of the Hessian.
        noisy_method: the algorithm there, where it is not the same.
        wrong: a method that is a little off there, so that it must fail the formula.
        real_method: the algorithm on real problems, where it would take too long as it is.
    """

    method: AbstractAlgorithm
    label: str = ""
    end: Callable[[Instance], Tensor] = v_star
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 150
    tol: float = 1e-4
    formula: formulas.Formula | None = None
    noisy: dict[str, Any] = field(default_factory=dict)
    noise: float = 1.0
    noisy_method: AbstractAlgorithm | None = None
    wrong: AbstractAlgorithm | None = None
    real_method: AbstractAlgorithm | None = None

    @property
    def name(self) -> str:
        """The name of the algorithm, and what tells this case from its others."""
        return f"{self.method.name} {self.label}".strip()


def products_growing_like_the_root(k: int) -> int:
    """Those of TTSA(K=2), whose growth is "sqrt"."""
    return int(2 * math.sqrt(1 + k))


def products_growing_like_the_logarithm(k: int) -> int:
    """Those of TTSA(K=2, growth="log")."""
    return int(2 * (1 + math.log(1 + k)))


def always(products: int) -> Callable[[int], int]:
    """The same number of products in every outer step."""
    return lambda k: products


FAST = {"inner_steps": 8, "inner_lr": 1.5, "outer_lr": 1.0}  # near the largest stable steps of the small quadratic
FALLING = Power(1.0, 1.0, offset=12)
# So many inner steps that the batches of an outer step are not a whole number of passes, which are three batches long:
# otherwise the cross derivative would always be taken on what the inner steps have left of a pass.
CALM = {"inner_steps": 4, "inner_lr": 0.6, "outer_lr": FALLING}
# Single loops: one inner step for each outer one, so inner_lr is as large as the curvature allows.
SINGLE = {"inner_steps": 1, "inner_lr": Power(0.9, 0.3), "outer_lr": FALLING}
BOME_RATE = Power(0.5, 1.0, offset=40)

PLAIN = KFAC(damping=None, overhead=None)  # its fixed point is known in closed form
EXACTLY = CG(steps=50, tol=1e-14)

ALGORITHMS: list[AlgorithmCase] = [
    # The inverses of aid that solve the system share one formula, in two cases.
    AlgorithmCase(
        AID(),
        settings=FAST,
        steps=60,
        formula=formulas.double_loop(formulas.solved),
        noisy=CALM,
        noisy_method=AID(EXACTLY),
        wrong=AID(Identity()),
    ),
    AlgorithmCase(
        AID(batches="all"),
        label="all data",
        settings=FAST,
        steps=60,
        formula=formulas.double_loop(formulas.solved_on_all_data),
        noisy=CALM,
        noisy_method=AID(EXACTLY, batches="all"),
        wrong=AID(EXACTLY),
    ),
    AlgorithmCase(
        AID(Neumann(terms=100, tol=1e-6)),
        label="neumann",
        settings=FAST,
        steps=60,
    ),
    AlgorithmCase(
        AID(FixedPoint(steps=100, tol=1e-6)),
        label="fixed_point",
        settings=FAST,
        steps=60,
    ),
    AlgorithmCase(
        AID(Identity()),
        label="identity",
        end=ends_with(identity_matrix),
        settings=FAST,
        steps=100,
        formula=formulas.double_loop(formulas.identity),
        noisy=CALM,
        wrong=AID(Identity(scale=1 + 1e-6)),
    ),
    AlgorithmCase(
        AID(Broyden(steps=20)),
        label="broyden",
        settings=FAST,
        steps=60,
    ),
    AlgorithmCase(
        AID(Nystrom(rank=6)),
        label="nystrom",
        settings=FAST,
        steps=60,
    ),
    AlgorithmCase(
        AID(QuadraticSGD(steps=150)),
        label="sgd",
        settings=FAST,
        steps=60,
    ),
    AlgorithmCase(
        NHGD(),
        settings=FAST,
        steps=80,
        tol=0.01,
    ),
    AlgorithmCase(
        NHGD(PLAIN),
        label="kfac",
        end=ends_with(kfac_matrix),
        settings=FAST,
        steps=80,
        formula=formulas.learning(formulas.Kronecker),
        noisy=CALM,
        wrong=NHGD(replace(PLAIN, beta=0.951)),
    ),
    AlgorithmCase(
        NHGD(FisherWindow(window=480, damping=None, overhead=None)),
        label="window",
        end=ends_with(fisher_matrix),
        settings=FAST,
        steps=80,
        formula=formulas.learning(lambda: formulas.Window(batches=6)),
        noisy=CALM,
        wrong=NHGD(FisherWindow(window=400, damping=None, overhead=None)),
    ),
    AlgorithmCase(
        NHGD(FisherWindow(window=480, fisher="exact", damping=None, overhead=None)),
        label="exact window",
        settings=FAST,
        steps=60,
        formula=formulas.learning(lambda: formulas.Window(batches=6, exact=True)),
        noisy=CALM,
        wrong=NHGD(FisherWindow(window=480, damping=None, overhead=None)),
        real_method=NHGD(FisherWindow(window=40, fisher="exact", damping=None, overhead=None)),
    ),
    AlgorithmCase(
        NHGD(FisherDense(damping=None)),
        label="dense",
        end=ends_with(fisher_matrix),
        settings=FAST,
        steps=80,
        formula=formulas.learning(formulas.Average),
        noisy=CALM,
        wrong=NHGD(FisherDense(damping=1e-6)),
    ),
    AlgorithmCase(
        NHGD.presets()["nhgd-paper"],
        label="paper",
        end=ends_with(literal_matrix(0.8, 8)),
        settings={**FAST, "outer_lr": 0.5},
        steps=100,
        formula=formulas.learning(formulas.Literal, batches=5),
        noisy=CALM,
        wrong=NHGD.presets()["nhgd-refined"],
    ),
    AlgorithmCase(
        NHGD(PLAIN, refine=6, batches="all"),
        label="refined",
        settings=FAST,
        steps=60,
        formula=formulas.learning(formulas.Kronecker, on_all_data=True, exact=True),
        noisy=CALM,
        wrong=NHGD(PLAIN, refine=3, batches="all"),
    ),
    AlgorithmCase(
        NHGD(PLAIN, refine=6, batches="all", cross="trajectory"),
        label="trajectory",
        settings=FAST,
        steps=60,
        formula=formulas.learning(formulas.Kronecker, on_all_data=True, exact=True, trajectory=True),
        noisy=CALM,
        wrong=NHGD(PLAIN, refine=6, batches="all"),
    ),
    AlgorithmCase(
        NHGD(PLAIN, inner="natural"),
        label="natural",
        end=ends_with(kfac_matrix),
        settings={"inner_steps": 5},
        formula=formulas.natural,
        noisy={"outer_lr": 0.01},
        noise=0.2,  # so that steps are also taken back, and the damping raised, lowered and kept
        wrong=NHGD(PLAIN, inner="natural", natural_lr=1 - 1e-6),
    ),
    AlgorithmCase(
        ITD(),
        end=ends_with(unrolled_matrix(4)),
        settings={"inner_steps": 4},
        formula=formulas.unrolled(),
        noisy={"outer_lr": FALLING},
        wrong=ITD(truncate=3),
    ),
    AlgorithmCase(
        ITD(),
        label="long",
        settings={"inner_steps": 50, "inner_lr": 1.69, "outer_lr": 1.5},
        steps=40,
    ),
    AlgorithmCase(
        ITD(truncate=3),
        label="truncated",
        end=ends_with(unrolled_matrix(3)),
        settings={"inner_steps": 10, "outer_lr": 1.0},
        steps=80,
        formula=formulas.unrolled(last=3),
        noisy={"inner_steps": 4, "outer_lr": FALLING},
        wrong=ITD(truncate=2),
    ),
    AlgorithmCase(
        F2SA(first=1.0, growth=0.0),
        end=ends_with(penalty_matrix(1.0)),
        settings={"inner_steps": 4, "inner_lr": 0.3},
        formula=formulas.penalty(1.0, shared=False),
        noisy={"inner_steps": 1, "outer_lr": Power(0.8, 1.0, offset=6)},
        wrong=F2SA(first=1 + 1e-6, growth=0.0),
    ),
    AlgorithmCase(
        F2SA(first=1e4, shared=True),
        label="growing",
        settings={"inner_steps": 6, "inner_lr": 1.6},
        formula=formulas.penalty(2.0, shared=True, growth=1 / 7),
        noisy=CALM,
        noisy_method=F2SA(first=2.0, shared=True),
        wrong=F2SA(first=2.0, growth=0.142, shared=True),
    ),
    AlgorithmCase(
        F2SA(first=2.0, growth=0.0, shared=True),
        label="shared",
        end=ends_with(penalty_matrix(2.0)),
        settings={"inner_steps": 4, "outer_lr": 1.0},
        steps=100,
        formula=formulas.penalty(2.0, shared=True),
        noisy=CALM,
        wrong=F2SA(first=2.0, growth=0.0, pace=1 + 1e-6, shared=True),
    ),
    AlgorithmCase(
        PZOBO(directions="all", mu=1.0),
        label="coordinates",
        end=ends_with(unrolled_matrix(4)),
        settings={"inner_steps": 4},
        formula=formulas.perturbed(1.0, everywhere=True),
        noisy={"outer_lr": FALLING},
        wrong=PZOBO(directions=3, mu=1.0),
        real_method=PZOBO(directions=2, mu=0.5),  # not a loop for each of the weights
    ),
    AlgorithmCase(
        PZOBO(directions=2, mu=0.5),
        end=ends_with(unrolled_matrix(4)),
        settings={"inner_steps": 4, "outer_lr": Power(0.3, 0.6, offset=20)},
        steps=250,
        tol=0.05,
        formula=formulas.perturbed(0.5),
        noisy={"outer_lr": FALLING},
        wrong=PZOBO(directions="all", mu=0.5),
    ),
    AlgorithmCase(
        SAMA(radius=1.0),
        end=ends_with(unrolled_matrix(1)),
        formula=formulas.adapted(),
        noisy={"inner_steps": 4, "outer_lr": FALLING},
        wrong=SAMA(radius=1.0, nudge=1e-4),
    ),
    # Its error falls like 1 / k; tests/test_first_order.py follows it further.
    AlgorithmCase(
        BOME(pulled_lr=BOME_RATE),
        end=ends_with(unrolled_matrix(5)),
        settings={"inner_steps": 5, "outer_lr": BOME_RATE},
        steps=400,
        tol=0.05,
        formula=formulas.barrier(BOME_RATE),
        noisy={"inner_lr": 0.6},
        wrong=BOME(pulled_lr=BOME_RATE, strength=0.5 + 1e-6),
    ),
    # Here and below, a wide `tol` is for the noise of a random product, which full batches do not remove.
    AlgorithmCase(
        BSA(K=5, phi=0.5),
        end=ends_with(neumann_matrix(4, 0.5)),
        settings={"inner_steps": 2, "outer_lr": Power(1.0, 0.6)},
        steps=120,
        tol=0.12,
        formula=formulas.double_loop(formulas.random_series(always(4), 0.5), growth=0.5),
        noisy={"inner_lr": 0.9, "outer_lr": Power(1.0, 1.0, offset=6)},
        wrong=BSA(K=5, phi=0.5 + 1e-6),
    ),
    AlgorithmCase(
        BSA(K=5, phi=0.5, estimator="sum", growth=0.0),
        label="sum, constant",
        end=ends_with(neumann_matrix(4, 0.5), cold_start(8)),
        settings={"inner_steps": 8, "outer_lr": 1.5},
        steps=60,
        formula=formulas.double_loop(formulas.series(always(4), 0.5), growth=0.0),
        noisy={"inner_lr": 0.6, "outer_lr": FALLING},
        wrong=BSA(K=5, phi=0.5, estimator="sum", growth=0.1),
    ),
    AlgorithmCase(
        ALSET(K=5, phi=0.5),
        end=ends_with(neumann_matrix(4, 0.5)),
        settings={"inner_steps": 3, "outer_lr": Power(1.0, 0.6)},
        steps=200,
        tol=0.08,
        formula=formulas.double_loop(formulas.random_series(always(4), 0.5)),
        noisy={**CALM, "inner_steps": 3},
        wrong=ALSET(K=6, phi=0.5),
    ),
    AlgorithmCase(
        ALSET(K=5, phi=0.5, estimator="sum"),
        label="sum",
        end=ends_with(neumann_matrix(4, 0.5)),
        settings={"inner_steps": 5, "outer_lr": 1.0},
        steps=80,
        formula=formulas.double_loop(formulas.series(always(4), 0.5)),
        noisy=CALM,
        wrong=ALSET(K=5, phi=0.5 + 1e-6, estimator="sum"),
    ),
    AlgorithmCase(
        StocBiO(K=4, phi=0.5, B=30, mu=0.3),
        end=ends_with(neumann_matrix(4, 0.5)),
        settings={"inner_steps": 5, "outer_lr": 1.0},
        steps=80,
        formula=formulas.double_loop(formulas.shrinking_series([120, 102, 87, 74], 0.5)),
        noisy=CALM,
        wrong=StocBiO(K=4, phi=0.5, B=30, mu=0.31),
    ),
    AlgorithmCase(
        AmIGO(K=3, beta=0.9),
        settings={"inner_steps": 5, "outer_lr": 1.0},
        steps=80,
        formula=formulas.amigo(3, 0.9),
        noisy=CALM,
        wrong=AmIGO(K=3, beta=0.9 + 1e-6),
    ),
    AlgorithmCase(
        VRBO(K=2, phi=0.5, q=3),
        end=ends_with(neumann_matrix(2, 0.5)),
        settings={"inner_steps": 3, "outer_lr": 1.5},
        steps=50,
        formula=formulas.vrbo(K=2, phi=0.5, q=3),
        noisy={"inner_lr": 0.5, "outer_lr": 0.7},
        wrong=VRBO(K=2, phi=0.5, q=4),
    ),
    AlgorithmCase(
        SOBA(),
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        formula=formulas.soba,
        noisy={"inner_lr": 0.5, "outer_lr": 0.1},
        wrong=SOBA(adjoint_lr=0.5 + 1e-6),
    ),
    AlgorithmCase(
        MASOBA(),
        settings={"inner_lr": 1.5, "outer_lr": 0.1},
        steps=400,
        formula=formulas.soba_averaged(0.2),
        noisy={"inner_lr": 0.5, "outer_lr": 0.1},
        wrong=MASOBA(momentum=0.2 + 1e-6),
    ),
    AlgorithmCase(
        SRBA(q=4),
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        formula=formulas.srba(q=4),
        noisy={"inner_lr": 0.5, "outer_lr": 0.1},
        wrong=SRBA(q=4, adjoint_lr=0.5 + 1e-6),
    ),
    AlgorithmCase(
        SABA(),
        settings={"inner_lr": 1.5, "outer_lr": 0.2},
        steps=250,
        formula=formulas.saba,
        noisy={"inner_lr": 0.5, "outer_lr": 0.1},
        wrong=SABA(adjoint_lr=0.5 + 1e-6),
    ),
    AlgorithmCase(
        TTSA(K=5, phi=0.1, growth="none"),
        end=ends_with(neumann_matrix(5, 0.1)),
        settings={"inner_lr": 1.5, "outer_lr": 2.0},
        steps=60,
        formula=formulas.double_loop(formulas.series(always(5), 0.1)),
        noisy=SINGLE,
        wrong=TTSA(K=5, phi=0.1 + 1e-6, growth="none"),
    ),
    AlgorithmCase(
        TTSA(K=5, phi=0.1, growth="none", estimator="randomised"),
        label="randomised",
        end=ends_with(neumann_matrix(5, 0.1)),
        settings={"inner_lr": 0.9, "outer_lr": Power(2.0, 0.6)},
        steps=150,
        tol=0.03,
        formula=formulas.double_loop(formulas.random_series(always(5), 0.1)),
        noisy=SINGLE,
        wrong=TTSA(K=5, phi=0.1, growth="none"),
    ),
    AlgorithmCase(
        TTSA(),
        label="growing",
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        formula=formulas.double_loop(formulas.series(products_growing_like_the_root, 0.8)),
        noisy=SINGLE,
        noisy_method=TTSA(K=2, phi=0.8),
        wrong=TTSA(K=2, phi=0.8, growth="log"),
    ),
    AlgorithmCase(
        TTSA.presets()["ttsa-original"],
        label="original",
        settings={"inner_lr": 1.5, "outer_lr": Power(1.0, 0.6)},
        steps=100,
        tol=0.3,
        formula=formulas.double_loop(formulas.random_series(products_growing_like_the_logarithm, 0.5)),
        noisy=SINGLE,
        noisy_method=TTSA(K=2, phi=0.5, estimator="randomised", growth="log"),
        wrong=TTSA(K=2, phi=0.5 + 1e-6, estimator="randomised", growth="log"),
    ),
    AlgorithmCase(
        FSLA(),
        settings={"inner_lr": 1.5, "outer_lr": 0.4},
        steps=250,
        formula=formulas.fsla(momentum=0.5),
        noisy={"inner_lr": Power(0.6, 0.3), "outer_lr": Power(0.3, 0.5)},
        wrong=FSLA(momentum=0.5 + 1e-6),
    ),
    AlgorithmCase(
        MRBO(K=5, phi=0.1),
        end=ends_with(neumann_matrix(5, 0.1)),
        settings={"inner_lr": 1.5, "outer_lr": 2.0},
        steps=60,
        formula=formulas.both_momenta(5, 0.1, randomised=False),
        noisy=SINGLE,
        wrong=MRBO(K=5, phi=0.1, inner_momentum=0.5 + 1e-6),
    ),
    AlgorithmCase(
        SUSTAIN(K=6, phi=0.1),
        end=ends_with(neumann_matrix(5, 0.1)),
        settings={"inner_lr": 0.9, "outer_lr": Power(2.0, 0.6)},
        steps=150,
        tol=0.04,
        formula=formulas.both_momenta(5, 0.1, randomised=True),
        noisy=SINGLE,
        wrong=SUSTAIN(K=6, phi=0.1, outer_momentum=0.5 + 1e-6),
    ),
    AlgorithmCase(
        SUSTAIN(K=6, phi=0.1, estimator="sum"),
        label="sum",
        end=ends_with(neumann_matrix(5, 0.1)),
        settings={"inner_lr": 1.5, "outer_lr": 2.0},
        steps=60,
        formula=formulas.both_momenta(5, 0.1, randomised=False),
        noisy=SINGLE,
        wrong=SUSTAIN(K=6, phi=0.1),
    ),
    AlgorithmCase(
        NHGDSingle(PLAIN),
        end=ends_with(kfac_matrix),
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        formula=formulas.learning(formulas.Kronecker),
        noisy=SINGLE,
        wrong=NHGDSingle(replace(PLAIN, beta=0.951)),
    ),
    AlgorithmCase(
        NHGDSingle(PLAIN, refine=6, batches="all"),
        label="refined",
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        formula=formulas.learning(formulas.Kronecker, on_all_data=True, exact=True),
        noisy=SINGLE,
        wrong=NHGDSingle(PLAIN, refine=3, batches="all"),
    ),
    AlgorithmCase(
        HOAG(),
        settings={"inner_steps": 2, "inner_lr": 1.5, "outer_lr": 0.5},
        steps=150,
        formula=formulas.hoag(rounds=2),
        noisy={"inner_steps": 2, "inner_lr": 0.6, "outer_lr": 0.7},
        noisy_method=HOAG(tolerance=1e-6, rounds=2),
        wrong=HOAG(tolerance=1e-6, rounds=2, adaptive=False),
        real_method=HOAG(rounds=2),
    ),
    AlgorithmCase(
        NHGDMomentum(PLAIN),
        end=ends_with(kfac_matrix),
        settings={"inner_lr": 1.5, "outer_lr": 1.0},
        steps=100,
        formula=formulas.learning_momenta(formulas.Kronecker),
        noisy=SINGLE,
        wrong=NHGDMomentum(PLAIN, outer_momentum=0.5 + 1e-6),
    ),
]
