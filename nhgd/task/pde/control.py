"""Control of a heated plate by a network that solves the heat equation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor
from typing_extensions import override

from nhgd._solution import Solution
from nhgd._validation import counted, not_negative, positive
from nhgd.algorithm import NHGD, AbstractAlgorithm
from nhgd.data.loader import Data
from nhgd.errors import InputError
from nhgd.inverse import FisherWindow
from nhgd.plot.heat import draw_control, draw_state
from nhgd.problem import Bilevel
from nhgd.schedule import Decay, Rate
from nhgd.task._inner_solver import adam, gauss_newton
from nhgd.task.base import AbstractTask, Instance
from nhgd.task.pde.heat import END, NODES, SIDE, Heat, QuadraticForm, continuous, grid, on_grid, state, target
from nhgd.task.pde.jet import JetNet, TanhNet

FRESH = 1000  # after the seed: points that were not trained on
STARTS_KEPT = 4

_STARTS: dict[Any, Tensor] = {}  # of this process: where theta is after its pretraining, by what that depends on


@dataclass(frozen=True)
class Truth:
    """The control's true value without any network: on the reference grid and over the whole domain."""

    on_grid: QuadraticForm
    continuous: QuadraticForm

    def control(self, v: TanhNet) -> Tensor:
        """The control at the 201 times, in float64 on the CPU."""
        weight = next(v.parameters())
        with torch.no_grad():
            found: Tensor = v(self.on_grid.times[:, None].to(weight))[:, 0].double().cpu()
        return found

    def values(self, v: TanhNet) -> dict[str, float]:
        """Both readings of the objective."""
        f = self.control(v)
        return {"true_objective_grid": self.on_grid.value(f), "true_objective": self.continuous.value(f)}


@final
@dataclass(frozen=True)
class PDE(AbstractTask):
    """Control of the 2D heat equation: a source f(t) that makes the temperature follow a target.

        inner: mean ( u_t - nu (u_xx + u_yy) - f )^2  +  mean u^2 on the sides  +  mean u^2 at t = 0
        outer: mean ( u - u_ref )^2,     u_ref = 16 x (1 - x) y (1 - y) sin(pi t),  on [0, 1]^2 x [0, 2]

    theta is a network for u, v one for f, both with tanh. What is reported beside the network's own value of the
    objective (objective_net) is the true one, from a solution of the equation with the learnt f: on the 11 x 11 x 201
    grid of the public reference code (true_objective_grid), the reading nearest to the paper's figures, and over the
    whole domain (true_objective). u is linear in f, so both have a least value that no control can beat.

    Of nhgd the inverse is the exact Fisher matrix in residual space, observed once an outer step.

    Args:
        nu: the conductivity, which the paper does not give.
        interior, side, initial: points inside, on each of the four sides, and at t = 0.
        width, depth: of the network for u; control_width, control_depth: of the one for f.
        times: nodes in time of the outer points, which otherwise are those of the reference grid.
        inner: "natural": nhgd takes `natural_steps` Levenberg-Marquardt steps an outer step; "adam": `inner_steps` of
            Adam, as every other method does under either.
        pretraining: steps of that kind before the first outer step, at the first f.
        damping: of the inverse.
        floor: the least damping of natural steps; the smaller, the better the points are met and the worse what lies
            between them.
        outer_lr, hold: Adam's step for f, falling to a twentieth after `hold` of the run; 1 for never.
        clip: the largest norm of a hypergradient.
        steps: outer steps when the user does not say.
        dtype: "float32" or "float64".
    """

    name: ClassVar[str] = "pde"
    headline: ClassVar[str] = "true_objective"
    curve: ClassVar[str] = "true_objective"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "quick": {
            "interior": 512,
            "side": 48,
            "initial": 64,
            "width": 20,
            "depth": 3,
            "times": 21,
            "pretraining": 60,
            "steps": 200,
        },
        "paper": {
            "interior": 1024,
            "inner": "adam",
            "pretraining": 2000,
            "outer_lr": 0.01,
            "hold": 1.0,
            "clip": 1.0,
            "steps": 500,
        },
    }
    nu: float = 1e-3
    interior: int = 2048
    side: int = 256
    initial: int = 256
    width: int = 64
    depth: int = 4
    control_width: int = 32
    control_depth: int = 2
    times: int = NODES
    inner: Literal["natural", "adam"] = "natural"
    natural_steps: int = 1
    inner_steps: int = 50
    inner_lr: float = 1e-3
    pretraining: int = 100
    damping: float = 1e-4
    floor: float = 1e-6
    outer_lr: float = 0.01
    hold: float = 1 / 3
    clip: float = 0.1
    steps: int = 1000
    dtype: str = "float32"

    def __post_init__(self) -> None:
        positive(
            "pde", nu=self.nu, inner_lr=self.inner_lr, damping=self.damping, outer_lr=self.outer_lr, clip=self.clip
        )
        not_negative("pde", floor=self.floor, hold=self.hold)
        counted(
            "pde",
            **{
                name: getattr(self, name)
                for name in (
                    *("interior", "side", "initial", "width", "depth", "control_width", "control_depth"),
                    *("natural_steps", "inner_steps", "steps"),
                )
            },
        )
        if self.pretraining < 0:
            raise InputError(f"pde: pretraining must be 0 or more, got {self.pretraining}.")
        if self.times < 2:
            raise InputError(f"pde: times must be at least 2, got {self.times}.")
        self.check_choices(inner=("natural", "adam"), dtype=("float32", "float64"))

    @property
    @override
    def threads(self) -> int | None:
        """One for a small net: its arrays are too small to divide, and threads that wait for a busy core spin."""
        points = self.interior + 4 * self.side + self.initial
        return 1 if points * self.width < 50_000 else None

    @override
    def build(self, seed: int, device: torch.device, data: str | Path | None = None) -> Instance:
        self.refuse_data(data)
        dtype = getattr(torch, self.dtype)
        heat = Heat(self.nu, self.interior, self.side, self.initial)
        net = heat.net([self.width] * self.depth, seed).to(device, dtype)
        control = TanhNet((1, *[self.control_width] * self.control_depth, 1), seed + 1).to(device, dtype)
        problem = heat.problem(net, control)
        points = heat.collocation((seed,), device, dtype)
        outer_points = grid(SIDE, self.times).to(device, dtype)
        full_outer = (outer_points, target(*outer_points.T))
        self._pretrain(problem, points, seed)
        return PDEInstance(
            problem=problem,
            inner_data=Data(*points),
            outer_data=Data(*full_outer),
            full_inner=points,
            full_outer=full_outer,
            steps=self.steps,
            task=self,
            seed=seed,
            heat=heat,
            net=net,
            control=control,
            fresh=heat.collocation((seed, FRESH), device, dtype),
            truth=Truth(on_grid(self.nu), continuous(self.nu)),
        )

    def _pretrain(self, problem: Bilevel, points: tuple[Tensor, ...], seed: int) -> None:
        """Bring theta to its start, in place. Runs of several methods in one process begin at the same, computed
        once.
        """
        natural = self.inner == "natural"
        apart = replace(self, outer_lr=1.0, clip=1.0, hold=1.0, steps=1, inner_steps=1, natural_steps=1)
        key = (apart, seed, str(points[0].device), torch.get_num_threads())
        if key not in _STARTS:
            if natural:
                gauss_newton(problem, points, self.pretraining, floor=self.floor, seed=seed)
            else:
                adam(problem, points, self.pretraining, self.inner_lr)
            while len(_STARTS) >= STARTS_KEPT:
                del _STARTS[next(iter(_STARTS))]
            _STARTS[key] = problem.theta.flat()
        problem.theta.assign(_STARTS[key])


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class PDEInstance(Instance):
    """The equation with both networks.

    Attributes:
        task, seed: the settings it was built from.
        heat: the equation.
        net, control: theta and v.
        fresh: points that were not trained on.
        truth: the control's value without any network.
    """

    task: PDE
    seed: int
    heat: Heat
    net: JetNet
    control: TanhNet
    fresh: tuple[Tensor, ...]
    truth: Truth

    @override
    def solver_settings(self) -> dict[str, Any]:
        """Adam on both levels."""
        task = self.task
        outer_lr: Rate = task.outer_lr if task.hold >= 1 else Decay(task.outer_lr, final=0.05, hold=task.hold)
        return {
            "inner_steps": task.inner_steps,
            "inner_lr": task.inner_lr,
            "inner_optimizer": torch.optim.Adam,
            "outer_lr": outer_lr,
            "outer_optimizer": torch.optim.Adam,
            "outer_clip": task.clip,
        }

    @override
    def methods(self) -> dict[str, AbstractAlgorithm]:
        """nhgd with the exact Fisher matrix in residual space."""
        task = self.task
        inverse = FisherWindow(
            window=len(self.full_inner[0]), fisher="exact", records="sample", damping=task.damping, allow_large=True
        )
        nhgd = NHGD(inverse, observe="end")
        if task.inner == "natural":
            nhgd = replace(nhgd, inner="natural", natural_steps=task.natural_steps, natural_floor=task.floor)
        return {"nhgd": nhgd}

    @override
    def metrics(self, theta: JetNet, v: TanhNet) -> dict[str, float]:
        return self.truth.values(v)

    @override
    def summary(self, solution: Solution) -> dict[str, float]:
        """The network's own objective, the true ones with their bounds, and how well the equation is met."""
        points = grid(SIDE, NODES).to(self.full_outer[0])
        with torch.no_grad():
            found = self.net(points)
            on_fresh = self.heat.inner(self.net, self.control, self.fresh)
        true = state(self.task.nu, self.truth.control(self.control), SIDE).flatten()
        return {
            **self.losses(),
            "objective_net": float((found - target(*points.T)).square().mean()),
            **self.truth.values(self.control),
            "lower_bound_grid": self.truth.on_grid.bound(),
            "lower_bound": self.truth.continuous.bound(),
            "state_error": float((found.double().cpu() - true).square().mean()),
            "fresh_loss": float(on_fresh.mean()),
            **{
                f"fresh_{name}": float(on_fresh.values[self.fresh[1] == kind].mean())
                for kind, name in enumerate(("interior", "sides", "initial"))
            },
        }

    @override
    def pictures(self, folder: Path) -> list[Path]:
        """control.png, and state.png at three times."""
        f = self.truth.control(self.control)
        with torch.no_grad():
            learnt = self.net(grid(41, 9).to(self.full_outer[0])).double().cpu().reshape(41, 41, 9)
        true = state(self.task.nu, f, 41)[:, :, :: (NODES - 1) // 8]
        shown = [2, 4, 6]  # of nine times
        times = torch.linspace(0, END, 9, dtype=torch.float64)[shown]
        line = torch.linspace(0, 1, 41, dtype=torch.float64)
        wanted = target(*torch.meshgrid(line, line, times, indexing="ij"))
        return [
            draw_control(folder / "control.png", self.truth.on_grid, self.truth.continuous, f),
            draw_state(folder / "state.png", learnt[:, :, shown], true[:, :, shown], wanted, times.tolist()),
        ]

    @override
    def solve_inner(self) -> float:
        return gauss_newton(self.problem, self.full_inner, 200, floor=self.task.floor, seed=self.seed)
