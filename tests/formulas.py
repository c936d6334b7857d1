"""Every algorithm once more, as a formula in the batches that it draws.

On `quadratic` one outer step of a method is a few lines of linear algebra. Here they are, written apart from the library. The
library runs on `Recorded` data, a `Replay` hands the formula the very batches that were drawn, in their order, and after
every outer step both must stand at the same theta and v, and the formula must have used every batch.

What a method draws besides its batches shows in them, or is in the state that it leaves (`Replay.state`): a random product has as many factors as batches are left of the outer
step, and the row that SABA replaces is that of the batch it asked for. The outer problem has no noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import ceil
from typing import TypeAlias

import torch
from torch import Tensor

from nhgd.schedule import Clock, Rate, as_schedule
from tests.replay import Batch, Replay

Formula: TypeAlias = Callable[[Replay], Iterator[tuple[Tensor, Tensor]]]  # theta and v after each outer step
Cross: TypeAlias = Callable[[Replay, Tensor], Tensor]  # (replay, theta) -> (d2_{theta,v} l)^T x, (p,)


def double_loop(cross: Cross, growth: float | None = None) -> Formula:
    """T inner steps from the last theta, or T (k + 1)^growth from zero, then v by the cross product."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        while True:
            steps = replay.inner_steps
            if growth is not None:
                theta, steps = replay.zeros()[0], ceil(steps * (replay.k + 1) ** growth - 1e-9)
            for _ in range(steps):
                theta = theta - replay.eta * replay.next().gradient(theta, v)
            v = replay.down(v, cross(replay, theta))
            yield theta, v

    return formula


def identity(replay: Replay, theta: Tensor) -> Tensor:
    """T1-T2: x = grad_theta f."""
    return replay.next().cross(replay.u(theta))


def solved(replay: Replay, theta: Tensor) -> Tensor:
    """AID with the system solved on the batch of the cross derivative."""
    batch = replay.next()
    return batch.cross(torch.linalg.solve(batch.H, replay.u(theta)))


def solved_on_all_data(replay: Replay, theta: Tensor) -> Tensor:
    """AID with the system solved, and the cross derivative taken, over all data."""
    batch = replay.everything()
    return batch.cross(torch.linalg.solve(batch.H, replay.u(theta)))


def neumann(factors: list[Batch], phi: float, u: Tensor) -> Tensor:
    """phi (u + (I - phi H_1) u + (I - phi H_2) (I - phi H_1) u + ...), (d,)."""
    total = u
    for batch in factors:
        u = u - phi * batch.H @ u
        total = total + u
    return phi * total


def random_product(factors: list[Batch], phi: float, terms: int, u: Tensor) -> Tensor:
    """terms phi (I - phi H_p) ... (I - phi H_1) u, (d,), with p below `terms`."""
    assert len(factors) < terms
    for batch in factors:
        u = u - phi * batch.H @ u
    return terms * phi * u


def series(products: Callable[[int], int], phi: float) -> Cross:
    """A Neumann series of so many products at outer step k, each on a batch of its own."""

    def cross(replay: Replay, theta: Tensor) -> Tensor:
        last, factors = replay.next(), [replay.next() for _ in range(products(replay.k))]
        return last.cross(neumann(factors, phi, replay.u(theta)))

    return cross


def random_series(products: Callable[[int], int], phi: float) -> Cross:
    """One random product with the mean of `series`."""

    def cross(replay: Replay, theta: Tensor) -> Tensor:
        last = replay.next()
        return last.cross(random_product(replay.rest(), phi, products(replay.k) + 1, replay.u(theta)))

    return cross


def shrinking_series(sizes: list[int], phi: float) -> Cross:
    """stocBiO's series: product k on sizes[k] samples, none of them twice."""

    def cross(replay: Replay, theta: Tensor) -> Tensor:
        last, factors = replay.next(), [replay.next() for _ in sizes]
        assert [len(batch.index.unique()) for batch in factors] == sizes == [len(batch.index) for batch in factors]
        return last.cross(neumann(factors, phi, replay.u(theta)))

    return cross


def amigo(K: int, beta: float) -> Formula:
    """SGD on the linear system, from the last x."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        x = replay.zeros()[0]

        def cross(replay: Replay, theta: Tensor) -> Tensor:
            nonlocal x
            for _ in range(K):
                x = x - beta * (replay.next().H @ x - replay.u(theta))
            return replay.next().cross(x)

        return double_loop(cross)(replay)

    return formula


def unrolled(last: int | None = None) -> Formula:
    """Differentiation through the inner steps, all or the last few."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        while True:
            visited = [replay.next() for _ in range(replay.inner_steps)]
            for batch in visited:
                theta = theta - replay.eta * batch.gradient(theta, v)
            back, cross = replay.u(theta), torch.zeros_like(v)
            for batch in visited[::-1][:last]:
                cross = cross + replay.eta * batch.cross(back)
                back = back - replay.eta * batch.H @ back
            v = replay.down(v, cross)
            yield theta, v

    return formula


@dataclass
class Kronecker:
    """K-FAC of one linear output: running means of a a^T and of the squared score, each batch fading by beta."""

    A: Tensor | float = 0.0
    G: Tensor | float = 0.0
    mass: float = 0.0
    beta: float = 0.95

    def begin(self) -> None:
        """A new outer step: what was learnt stays."""

    def observe(self, batch: Batch, theta: Tensor, v: Tensor) -> None:
        """Move both means."""
        self.mass = self.beta * self.mass + 1 - self.beta
        rate = (1 - self.beta) / self.mass
        self.A = self.A + rate * (batch.H - batch.ridge_matrix - self.A)
        self.G = self.G + rate * (batch.residuals(theta, v).square().mean() - self.G)

    def matrix(self, ridge: Tensor) -> Tensor:
        """G A + ridge."""
        return self.G * self.A + ridge


@dataclass
class Window:
    """The Fisher matrix of the last batches."""

    batches: int
    exact: bool = False
    last: list[Tensor] = field(default_factory=list)

    def begin(self) -> None:
        """A new outer step: what was learnt stays."""

    def observe(self, batch: Batch, theta: Tensor, v: Tensor) -> None:
        """The oldest batch goes."""
        new = batch.H - batch.ridge_matrix if self.exact else batch.fisher(theta, v)
        self.last = [*self.last, new][-self.batches :]

    def matrix(self, ridge: Tensor) -> Tensor:
        """Their mean, and the ridge."""
        return torch.stack(self.last).mean(0) + ridge


@dataclass
class Average:
    """The mean Fisher matrix of this outer step's batches and, worth one of them, the last estimate."""

    F: Tensor | float = 0.0
    count: float = 0.0

    def begin(self) -> None:
        """What was learnt counts once."""
        self.count = min(self.count, 1.0)

    def observe(self, batch: Batch, theta: Tensor, v: Tensor) -> None:
        """Move the mean."""
        self.count += 1
        self.F = self.F + (batch.fisher(theta, v) - self.F) / self.count

    def matrix(self, ridge: Tensor) -> Tensor:
        """F and the ridge."""
        return self.F + ridge


@dataclass
class Literal:
    """The identity and the outer products of batch gradients, as the paper prints it, afresh in each outer step."""

    F: Tensor | float = 0.0
    beta: float = 0.8

    def begin(self) -> None:
        """The identity."""
        self.F = 0.0

    def observe(self, batch: Batch, theta: Tensor, v: Tensor) -> None:
        """The smoothed rank-one update, of the matrix in place of its inverse."""
        if isinstance(self.F, float):
            self.F = torch.eye(len(theta), dtype=theta.dtype)
        g = batch.gradient(theta, v)
        self.F = self.beta * self.F + (1 - self.beta) * g.outer(g)

    def matrix(self, ridge: Tensor) -> Tensor:
        """The ridge is in the gradients."""
        assert isinstance(self.F, Tensor)
        return self.F


Learner: TypeAlias = Kronecker | Window | Average | Literal


def learning(
    make: Callable[[], Learner],
    batches: int = 1,
    on_all_data: bool = False,
    exact: bool = False,
    trajectory: bool = False,
) -> Formula:
    """NHGD: the matrix is learnt from the inner steps, and the cross derivative taken on further batches, or on the way.

    exact: x is refined until it solves the system over the further batches.
    """

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        (theta, v), learner = replay.zeros(), make()
        while True:
            learner.begin()
            visited = [replay.next() for _ in range(replay.inner_steps)]
            for batch in visited:
                learner.observe(batch, theta, v)
                theta = theta - replay.eta * batch.gradient(theta, v)
            further = [replay.everything()] if on_all_data else [replay.next() for _ in range(batches)]
            matrix = further[0].H if exact else learner.matrix(further[0].ridge_matrix)
            x = torch.linalg.solve(matrix, replay.u(theta))
            over = visited if trajectory else further
            v = replay.down(v, torch.stack([batch.cross(x) for batch in over]).mean(0))
            yield theta, v

    return formula


def natural(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
    """NHGD with K-FAC and natural inner steps, whose damping is adapted as Levenberg and Marquardt do."""
    (theta, v), learner, damping = replay.zeros(), Kronecker(), 0.0
    while True:
        for _ in range(replay.inner_steps):
            batch = replay.next()
            learner.observe(batch, theta, v)
            g, before = batch.gradient(theta, v), batch.value(theta, v)
            matrix, eye = learner.matrix(batch.ridge_matrix), torch.eye(len(theta), dtype=theta.dtype)
            damping = damping or 0.1 * float(g.norm() / torch.linalg.solve(matrix, g).norm())
            for _ in range(3):
                x = torch.linalg.solve(matrix + damping * eye, g)
                gain = before - batch.value(theta - x, v)
                if gain >= 0:
                    theta, ratio = theta - x, gain / float(0.5 * g.dot(x))
                    damping *= 2 if ratio < 0.25 else 1 / 3 if ratio > 0.75 else 1
                    break
                damping *= 4
        further = replay.next()
        x = torch.linalg.solve(learner.matrix(further.ridge_matrix), replay.u(theta))
        v = replay.down(v, further.cross(x))
        yield theta, v


def penalty(first: float, shared: bool, growth: float = 0.0) -> Formula:
    """F2SA with the multiplier first (k + 1)^growth."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        pulled = theta
        while True:
            multiplier = first * (replay.k + 1) ** growth
            for _ in range(replay.inner_steps):
                batch = replay.next()
                other = batch if shared else replay.next()
                theta = theta - replay.eta * batch.gradient(theta, v)
                pulled = pulled - replay.eta * (other.gradient(pulled, v) + replay.u(pulled) / multiplier)
            batch = replay.next()
            other = batch if shared else replay.next()
            v = replay.down(v, -multiplier * (other.in_v(pulled, v) - batch.in_v(theta, v)))
            yield theta, v

    return formula


def adapted(momentum: float = 0.0) -> Formula:
    """SAMA, whose differences are exact here: x = (1 - dampening) eta u, with dampening 0."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        buffer = torch.zeros_like(theta)
        while True:
            for _ in range(replay.inner_steps):
                buffer = momentum * buffer + replay.next().gradient(theta, v)
                theta = theta - replay.eta * buffer
            v = replay.down(v, replay.next().cross(replay.eta * replay.u(theta)))
            yield theta, v

    return formula


def barrier(pulled_lr: Rate, strength: float = 0.5) -> Formula:
    """BOME with the barrier strength ||grad q||^2."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        pulled, v = replay.zeros()
        while True:
            theta = pulled
            for _ in range(replay.inner_steps):
                theta = theta - replay.eta * replay.next().gradient(theta, v)
            batch = replay.next()
            q, q_v = batch.gradient(pulled, v), batch.in_v(pulled, v) - batch.in_v(theta, v)
            f, f_v = replay.u(pulled), replay.f_v(v)
            size = q.dot(q) + q_v.dot(q_v)
            multiplier = (strength - (f.dot(q) + f_v.dot(q_v)) / size).clamp_min(0)
            pulled = pulled - as_schedule(pulled_lr, "pulled_lr").rate(Clock(k=replay.k)) * (f + multiplier * q)
            v = replay.down(v, -multiplier * q_v)
            yield theta, v

    return formula


def soba(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
    """theta, x and v at once, on one batch."""
    theta, v = replay.zeros()
    x = theta
    while True:
        batch = replay.next()
        theta, x, v = (
            theta - replay.eta * batch.gradient(theta, v),
            x - replay.eta * (batch.H @ x - replay.u(theta)),
            replay.down(v, batch.cross(x)),
        )
        yield theta, v


def soba_averaged(momentum: float) -> Formula:
    """theta, x and v at once, v along a moving average of its directions."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        x, h = theta, v
        while True:
            batch = replay.next()
            new = replay.f_v(v) - batch.cross(x)
            h = new if replay.k == 0 else h + momentum * (new - h)
            theta, x, v = (
                theta - replay.eta * batch.gradient(theta, v),
                x - replay.eta * (batch.H @ x - replay.u(theta)),
                v - replay.alpha * h,
            )
            yield theta, v

    return formula


def srba(q: int) -> Formula:
    """SOBA's directions corrected by how the same batch saw the last point; all data every q steps."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        here = before = theta, theta, v

        def said(batch: Batch, theta: Tensor, x: Tensor, v: Tensor) -> list[Tensor]:
            return [batch.gradient(theta, v), batch.H @ x - replay.u(theta), replay.f_v(v) - batch.cross(x)]

        while True:
            if replay.k % q == 0:
                h = said(replay.everything(), *here)
            else:
                batch = replay.next()
                h = [d + new - old for d, new, old in zip(h, said(batch, *here), said(batch, *before), strict=True)]
            before, rates = here, (replay.eta, replay.eta, replay.alpha)
            here = tuple(z - rate * d for z, rate, d in zip(here, rates, h, strict=True))
            yield here[0], here[2]

    return formula


def perturbed(mu: float, everywhere: bool = False) -> Formula:
    """PZOBO: the inner loop once more at v + mu u, along the directions that were drawn or along all coordinates."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        while True:
            visited = [replay.next() for _ in range(replay.inner_steps)]

            def trained(v: Tensor, theta: Tensor = theta, visited: list[Batch] = visited) -> Tensor:
                for batch in visited:
                    theta = theta - replay.eta * batch.gradient(theta, v)
                return theta

            theta = trained(v)
            rows = torch.eye(len(v), dtype=v.dtype) if everywhere else replay.state.directions
            terms = [(trained(v + mu * u) - theta).dot(replay.u(theta)) / mu * u for u in rows]
            total = torch.stack(terms).sum(0) / (1 if everywhere else len(rows))
            v = replay.down(v, -total)
            yield theta, v

    return formula


def saba(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
    """SOBA with a table of what each batch of a fixed partition said last."""
    theta, v = replay.zeros()
    x = theta
    parts = [replay.next() for _ in range(len(replay.data))]

    def said(part: Batch) -> Tensor:
        return torch.cat([part.gradient(theta, v), part.H @ x, part.cross(x)])

    table = torch.stack([said(part) for part in parts])  # (parts, 2 d + p)
    while True:
        batch = replay.next()
        (i,) = (j for j, part in enumerate(parts) if torch.equal(part.index, batch.index))
        new = said(batch)
        g, product, cross = (new - table[i] + table.mean(0)).split([replay.d, replay.d, replay.p])
        table[i] = new
        theta, x, v = theta - replay.eta * g, x - replay.eta * (product - replay.u(theta)), replay.down(v, cross)
        yield theta, v


def fsla(momentum: float) -> Formula:
    """theta, then x, then v with recursive momentum."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        x, v_last, direction = theta, v, v
        while True:
            x_last = x
            theta = theta - replay.eta * replay.next().gradient(theta, v)
            x = x - replay.eta * (replay.next().H @ x - replay.u(theta))
            batch = replay.next()
            new, old = replay.f_v(v) - batch.cross(x), replay.f_v(v_last) - batch.cross(x_last)
            direction = new if replay.k == 0 else new + (1 - momentum) * (direction - old)
            v_last, v = v, v - replay.alpha * direction
            yield theta, v

    return formula


def both_momenta(products: int, phi: float, randomised: bool, momentum: float = 0.5) -> Formula:
    """MRBO and SUSTAIN: recursive momentum on both levels, a Neumann series or one random product of it in between."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = theta_last, v_last = h_theta, h_v = replay.zeros()
        while True:
            batch, cross, factors = replay.next(), replay.next(), replay.rest()
            assert randomised or len(factors) == products

            def along(theta: Tensor, v: Tensor, factors: list[Batch] = factors, cross: Batch = cross) -> Tensor:
                u = replay.u(theta)
                x = random_product(factors, phi, products + 1, u) if randomised else neumann(factors, phi, u)
                return replay.f_v(v) - cross.cross(x)

            keep = 0.0 if replay.k == 0 else 1 - momentum
            h_theta = batch.gradient(theta, v) + keep * (h_theta - batch.gradient(theta_last, v_last))
            h_v = along(theta, v) + keep * (h_v - along(theta_last, v_last))
            theta_last, v_last = theta, v
            theta, v = theta - replay.eta * h_theta, v - replay.alpha * h_v
            yield theta, v

    return formula


def hoag(rounds: int) -> Formula:
    """HOAG with exact solves, where noise keeps the inner gradient above its tolerance: the step size follows f."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = replay.zeros()
        eps, factor, last, moved, before = 1e-6, 1.0, float("inf"), 0.0, 0.0
        while True:
            everything = replay.everything()
            for _ in range(rounds * replay.inner_steps):
                theta = theta - replay.eta * replay.next().gradient(theta, v)
            B, target = replay.answers.B, replay.answers.target
            f = float(0.5 * (B @ theta - target).square().mean() + 0.5 * replay.answers.rho * v.dot(v))
            if f - eps <= last + before * (1 + moved) - moved**2 / (2 * replay.alpha * factor):
                factor = factor / 0.95 if last < float("inf") else factor
            elif f > last:
                factor = factor / 2
            direction = replay.f_v(v) - everything.cross(torch.linalg.solve(everything.H, replay.u(theta)))
            new = v - replay.alpha * factor * direction
            last, moved, before, v, eps = f, float((new - v).norm()), eps, new, 0.9 * eps
            yield theta, v

    return formula


def learning_momenta(make: Callable[[], Learner], momentum: float = 0.5) -> Formula:
    """NHGD with recursive momentum on both levels: the same samples and the same matrix at both points."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        (theta, v), learner = replay.zeros(), make()
        theta_last, v_last, h_theta, h_v = theta, v, theta, v
        while True:
            learner.begin()
            batch, further = replay.next(), replay.next()
            learner.observe(batch, theta, v)
            matrix = learner.matrix(further.ridge_matrix)

            def along(theta: Tensor, v: Tensor, matrix: Tensor = matrix, further: Batch = further) -> Tensor:
                return replay.f_v(v) - further.cross(torch.linalg.solve(matrix, replay.u(theta)))

            keep = 0.0 if replay.k == 0 else 1 - momentum
            h_theta = batch.gradient(theta, v) + keep * (h_theta - batch.gradient(theta_last, v_last))
            h_v = along(theta, v) + keep * (h_v - along(theta_last, v_last))
            theta_last, v_last = theta, v
            theta, v = theta - replay.eta * h_theta, v - replay.alpha * h_v
            yield theta, v

    return formula


def vrbo(K: int, phi: float, q: int) -> Formula:
    """SPIDER on both levels, all data every q steps."""

    def formula(replay: Replay) -> Iterator[tuple[Tensor, Tensor]]:
        theta, v = h_theta, h_v = replay.zeros()

        def along(factors: list[Batch], cross: Batch, theta: Tensor, v: Tensor) -> Tensor:
            return replay.f_v(v) - cross.cross(neumann(factors, phi, replay.u(theta)))

        while True:
            if replay.k % q == 0:
                everything = replay.everything()
                h_theta, h_v = everything.gradient(theta, v), along([everything] * K, everything, theta, v)
            before = theta, v
            v = v - replay.alpha * h_v
            corrections = replay.inner_steps + ((replay.k + 1) % q > 0)  # none at the end, where all data follow
            for t in range(corrections):
                batch, cross, factors = replay.next(), replay.next(), [replay.next() for _ in range(K)]
                h_theta = h_theta + batch.gradient(theta, v) - batch.gradient(*before)
                h_v = h_v + along(factors, cross, theta, v) - along(factors, cross, *before)
                if t < replay.inner_steps:
                    before = theta, v
                    theta = theta - replay.eta * h_theta
            yield theta, v

    return formula
