"""`nhgd reproduce theory`: the paper's theorems measured where their assumption on the model holds, and what they
claim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nhgd._threads import limited
from nhgd.comparison.trial import environment
from nhgd.reproduce.theory.misspecified import floor
from nhgd.reproduce.theory.models import Softmax, WellSpecified, examples
from nhgd.reproduce.theory.outer import convergence
from nhgd.reproduce.theory.rates import rates
from nhgd.reproduce.theory.tails import tails

WITHIN = 0.07  # of the slope that the theorems say
ENOUGH = 3  # models on which it must hold
EQUAL = 1e-8  # between the matrices followed here and those of FisherDense


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        runs: of an inner loop.
        steps, batch_steps: see `rates`.
        tail_runs, tail_steps: of the quantiles.
        outer_runs, T, K, K_values, longest: see `convergence`.
        shares, floor_runs, floor_steps: see `floor`.
    """

    runs: int = 200
    steps: tuple[int, ...] = (400, 800, 1600, 3200, 6400, 12800)
    batch_steps: tuple[int, ...] = (100, 200, 400, 800, 1600, 3200)
    tail_runs: int = 200
    tail_steps: int = 3200
    outer_runs: int = 32
    T: tuple[int, ...] = (100, 200, 400, 800, 1600)
    K: int = 8
    K_values: tuple[int, ...] = (16, 32, 64)
    longest: int = 1600
    shares: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    floor_runs: int = 100
    floor_steps: int = 6400

    @classmethod
    def quick(cls) -> Effort:
        """A tenth of it."""
        return cls(
            runs=100, steps=(200, 400, 800, 1600, 3200), batch_steps=(50, 100, 200, 400, 800), tail_steps=800,
            outer_runs=16, T=(50, 100, 200, 400), K_values=(16, 32), longest=400, floor_runs=40, floor_steps=1600,
        )  # fmt: skip

    @classmethod
    def smallest(cls) -> Effort:
        """For tests of the machinery: nothing can be concluded from it."""
        return cls(
            runs=4, steps=(20, 40), batch_steps=(20, 40), tail_runs=20, tail_steps=20, outer_runs=2, T=(20, 40), K=2,
            K_values=(1, 2), longest=20, shares=(0.1, 0.4), floor_runs=4, floor_steps=20,
        )  # fmt: skip


def theory(effort: Effort, seed: int = 0, say: Callable[[str], None] = lambda words: None) -> dict[str, Any]:
    """All measurements, and the claims that they bear on.

    Args:
        effort: how much to measure.
        seed: of all runs.
        say: told what comes next.
    """
    began = time.perf_counter()
    models = examples()
    with limited(1):  # the arrays are small, so a second thread would only wait

        def each(kind: str, measure: Callable[[WellSpecified], dict[str, Any]], names: list[str]) -> dict[str, Any]:
            found = {}
            for name in names:
                say(f"{kind}: {name}")
                found[name] = measure(models[name])
            return found

        everything = list(models)
        e = effort
        found: dict[str, Any] = {
            "rates": each("rates", lambda m: rates(m, e.runs, e.steps, e.batch_steps, seed), everything),
            "tails": each("tails", lambda m: tails(m, e.tail_runs, e.tail_steps, seed + 100), everything),
            "outer": each(
                "outer steps",
                lambda m: convergence(m, e.outer_runs, e.T, e.K, e.K_values, e.longest, seed + 200),
                ["quadratic", "gaussian mean", "logistic"],
            ),
        }
        say("wrong models")
        logistic = models["logistic"]
        assert isinstance(logistic, Softmax)
        found["misspecification"] = floor(logistic, e.shares, e.floor_runs, e.floor_steps, seed + 300)
        return {
            "experiment": "theory",
            "effort": {name: list(v) if isinstance(v, tuple) else v for name, v in vars(effort).items()},
            "seed": seed,
            "claims": claims(found),
            **found,
            "seconds": time.perf_counter() - began,
            "environment": environment(torch.device("cpu")),
        }


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each statement that can be held against a measurement: what it says, what was found, and whether it holds."""
    rates_of, tails_of, outer_of = found["rates"], found["tails"], found["outer"]
    rows = []
    for what, curve in (("the inverse", "inverse, average"), ("the cross derivative", "cross, trajectory")):
        slopes = {name: one["curves"][curve] for name, one in rates_of.items()}
        near = [name for name, one in slopes.items() if abs(one["slope"] - one["aim"]) <= WITHIN]
        rows.append(
            {
                "claim": f"the error of {what} falls as 1 / sqrt(T), one sample a step, average",
                "expected": f"slope -0.5 +- {WITHIN} on at least {ENOUGH} models",
                "found": _slopes(slopes),
                "held": len(near) >= min(ENOUGH, len(slopes)),
            }
        )
    for what, curve in (("theta", "theta"), ("the M-batch estimator with M = T", "cross, M = T fresh samples")):
        slopes = {name: one["curves"][curve] for name, one in rates_of.items()}
        over = " + q" if curve == "theta" else ""
        near = [name for name, one in slopes.items() if abs(one["slope"] - one["aim"]) <= WITHIN]
        rows.append(
            {
                "claim": f"the error of {what} falls as 1 / sqrt(T{over})",
                "expected": f"slope -0.5 +- {WITHIN} on at least {ENOUGH} models",
                "found": _slopes(slopes),
                "held": len(near) >= min(ENOUGH, len(slopes)),
            }
        )
    powers = {f"{name}, {part}": g for name, one in tails_of.items() for part, g in one["errors"].items()}
    rows.append(
        {
            "claim": "the (1 - delta) quantile of an error grows no faster than sqrt(log(1 / delta))",
            "expected": "power at most 1 within its interval, for the inverse, the cross derivative and theta of every model",
            "found": f"powers from {min(g['power'] for g in powers.values()):.2f} to {max(g['power'] for g in powers.values()):.2f}",
            "held": all(g["power_low"] <= 1 for g in powers.values()),
        }
    )
    for key, claim, expected in (
        ("in T", "from a stationary point, the mean squared hypergradient falls as log(K T) / T", "as steep as that"),
        ("in K above the noise", "with a long inner loop, what is above its noise falls as 1 / K", f"-1 +- {WITHIN}"),
    ):
        slopes = {name: one[key] for name, one in outer_of.items()}
        rows.append(
            {
                "claim": claim,
                "expected": f"slope {expected}, within its interval",
                "found": _slopes(slopes),
                "held": all(one["low"] <= one["aim"] + WITHIN for one in slopes.values()),
            }
        )
    wrong = found["misspecification"]
    rows.append(
        {
            "claim": "where the model is wrong by epsilon_D, |H - I| is of the order epsilon_D and below its bound",
            "expected": "slope near 1, every row below the bound, measured near the exact sum",
            "found": f"exact {wrong['exact']:.2f}, measured {wrong['measured']['slope']:.2f}",
            "held": all(row["H - I"] <= row["bound"] for row in wrong["rows"]),
        }
    )
    apart = max(one["largest_difference_from_FisherDense"] for one in rates_of.values())
    rows.append(
        {
            "claim": "the matrices followed are those of FisherDense(form='inverse')",
            "expected": f"relative difference below {EQUAL:g}",
            "found": f"{apart:.1e}",
            "held": apart < EQUAL,
        }
    )
    return rows


def _slopes(slopes: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {s['slope']:.2f} ({s['low']:.2f} to {s['high']:.2f})" for name, s in slopes.items())
