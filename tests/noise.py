"""How far from its end a method may lie when its batches are noisy.

On `quadratic` one outer step of a method is a formula in the second moments of the batches it draws. Here each method is that
formula, written with matrices and apart from the library, for many runs at once, which differ by their batches alone. The
largest error of CHAINS of them is the `level` that a run may reach. A right implementation is one more such run, so all
CHAINS + 1 errors are exchangeable, and its own is the largest of them with the probability

    P(error > level) <= 1 / (CHAINS + 1) = FAILURE

which is exact: nothing is assumed of the distribution, of the length of the run, of its transient or of a small step. The
seed of the run is fixed, so the exam is passed or failed once for all; a fresh seed would fail it with this probability.
The outer problem has no noise, as in the analysis of the paper.

The error is the distance from where the method ends without noise. Some methods end elsewhere with noise, because they
divide by a noisy quantity. For these the centre is the mean of as many further runs, and the error the distance from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from nhgd.schedule import Clock, Rate, resolve
from nhgd.task import Instance

CHAINS = 99
FAILURE = 1 / (CHAINS + 1)  # 1 %


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """A matrix times a vector in every chain: (N, m, n) and (N, n)."""
    return (matrix @ vector[..., None])[..., 0]


@dataclass(frozen=True)
class Drawn:
    """What one batch, another one in every chain, makes of the inner problem.

    grad_theta l = H theta + X v - r and grad_v l = X^T theta + C v + s, in every chain.
    """

    lab: Lab
    weights: Tensor  # (N, n): 1 / B for the samples of the batch
    H: Tensor  # (N, d, d), the ridge included
    X: Tensor  # (N, d, p)
    r: Tensor  # (N, d)
    C: Tensor  # (N, p, p)
    s: Tensor  # (N, p)

    def gradient(self, theta: Tensor, v: Tensor) -> Tensor:
        """grad_theta l."""
        return times(self.H, theta) + times(self.X, v) - self.r

    def in_v(self, theta: Tensor, v: Tensor) -> Tensor:
        """grad_v l."""
        return times(self.X.mT, theta) + times(self.C, v) + self.s

    def cross(self, x: Tensor) -> Tensor:
        """X^T x."""
        return times(self.X.mT, x)

    def scores(self, theta: Tensor, v: Tensor) -> Tensor:
        """The residual of every sample, (N, n)."""
        return theta @ self.lab.a.T - self.lab.b - v @ self.lab.c.T

    def fisher(self, theta: Tensor, v: Tensor) -> Tensor:
        """The empirical Fisher matrix, (N, d, d), without the ridge."""
        rows = self.weights * self.scores(theta, v).square()
        return (rows @ self.lab.outer_products).unflatten(1, (self.lab.d, self.lab.d))


class Lab:
    """The small quadratic with a stream of batches for every chain, shuffled pass by pass as `nhgd.Data` does.

    Args:
        batch: samples in a batch; it must divide their number.
        inner_lr, outer_lr, inner_steps, steps: of the run.
        chains: how many runs there are.
        independent: every batch is drawn from all samples, whatever was drawn before.
    """

    def __init__(
        self,
        instance: Instance,
        batch: int,
        inner_lr: Rate,
        outer_lr: Rate,
        inner_steps: int,
        steps: int,
        chains: int = CHAINS,
        independent: bool = False,
    ) -> None:
        self.a, self.b, self.c = instance.full_inner
        self.answers = instance.extra
        self.n, self.d, self.p = len(self.a), self.a.shape[1], self.c.shape[1]
        assert self.n % batch == 0
        self.batch, self.inner_steps, self.steps, self.chains = batch, inner_steps, steps, chains
        self.rates = resolve(inner_lr, "inner_lr"), resolve(outer_lr, "outer_lr")
        self.independent = independent
        self.generator = torch.Generator().manual_seed(0)
        self.ridge = instance.problem.ridge_diagonal()[0] * torch.eye(self.d, dtype=self.a.dtype)
        self.outer_products = (self.a[:, :, None] * self.a[:, None, :]).flatten(1)  # (n, d d)
        rows = torch.cat([self.a, self.b[:, None], self.c], dim=1)
        self.moments = (rows[:, :, None] * rows[:, None, :]).flatten(1)  # (n, (d + 1 + p)^2)
        self.order = torch.zeros(chains, self.n, dtype=torch.int64)
        self.position = torch.full((chains,), self.n)
        self.curvature = self.answers.B.T @ self.answers.B / len(self.answers.B)  # of f in theta, (d, d)
        self.pull = self.answers.B.T @ self.answers.target / len(self.answers.B)
        self.all = self.drawn(torch.full((chains, self.n), 1 / self.n, dtype=self.a.dtype))
        self.k = 0

    @property
    def eta(self) -> float:
        """The inner step size now."""
        return self.rates[0].rate(Clock(k=self.k))

    @property
    def alpha(self) -> float:
        """The outer step size now."""
        return self.rates[1].rate(Clock(k=self.k))

    def walk(self) -> Iterator[int]:
        """The outer steps, one after the other."""
        for k in range(self.steps):
            self.k = k
            yield k

    def zeros(self, *shape: int) -> Tensor:
        """(N, ...)."""
        return torch.zeros(self.chains, *shape, dtype=self.a.dtype)

    def drawn(self, weights: Tensor) -> Drawn:
        """The second moments of the samples with these weights, (N, n)."""
        d, size = self.d, self.d + 1 + self.p
        found = (weights @ self.moments).unflatten(1, (size, size))
        right, rest = found[:, :d, d], found[:, d + 1 :, d + 1 :]
        return Drawn(
            self, weights, found[:, :d, :d] + self.ridge, -found[:, :d, d + 1 :], right, rest, found[:, d + 1 :, d]
        )

    def next(self, who: Tensor | None = None) -> Drawn:
        """The next batch of every chain. Only the streams of those in `who`, (N,), move on."""
        stale = self.position >= self.n
        if bool(stale.any()):
            self.order[stale] = self._shuffled(int(stale.sum()))
            self.position[stale] = 0
        index = self.order.gather(1, self.position[:, None] + torch.arange(self.batch))
        step = self.n if self.independent else self.batch
        self.position += step if who is None else step * who
        return self._of(index)

    def some(self, size: int) -> Drawn:
        """So many samples, none twice, drawn from all of them."""
        return self._of(self._shuffled(self.chains)[:, :size])

    def _shuffled(self, count: int) -> Tensor:
        return torch.rand(count, self.n, generator=self.generator).argsort(1)

    def _of(self, index: Tensor) -> Drawn:
        return self.drawn(self.zeros(self.n).scatter_(1, index, 1 / index.shape[1]))

    def random(self, below: int) -> Tensor:
        """A whole number for every chain, (N,)."""
        return torch.randint(below, (self.chains,), generator=self.generator)

    def u(self, theta: Tensor) -> Tensor:
        """grad_theta f."""
        return theta @ self.curvature - self.pull

    def down(self, v: Tensor, cross: Tensor) -> Tensor:
        """v after a step along grad_v f - cross."""
        return v - self.alpha * (self.answers.rho * v - cross)


Run: TypeAlias = Callable[[Lab], Tensor]  # -> v at the end, (N, p)
Linear: TypeAlias = Callable[[Lab, Tensor, Tensor], Tensor]  # (lab, theta, v) -> X^T x, (N, p)


@dataclass
class Learner:
    """A matrix learnt from the inner steps. The base class learns nothing and is the identity."""

    matrix: Tensor = field(default_factory=lambda: torch.zeros(()))

    def begin(self, lab: Lab) -> None:
        """A new outer step."""

    def observe(self, lab: Lab, batch: Drawn, theta: Tensor, v: Tensor) -> None:
        """One inner step, taken from theta."""

    def solve(self, lab: Lab, u: Tensor) -> Tensor:
        """x."""
        return u


@dataclass
class Kronecker(Learner):
    """K-FAC of one linear output: running means of a a^T and of the squared score, each batch fading by beta."""

    score: Tensor = field(default_factory=lambda: torch.zeros(()))
    mass: float = 0.0
    beta: float = 0.95

    def observe(self, lab: Lab, batch: Drawn, theta: Tensor, v: Tensor) -> None:
        """Move both means."""
        self.mass = self.beta * self.mass + 1 - self.beta
        rate = (1 - self.beta) / self.mass
        squares = (batch.weights * batch.scores(theta, v).square()).sum(1)
        self.matrix = self.matrix + rate * (batch.H - lab.ridge - self.matrix)
        self.score = self.score + rate * (squares - self.score)

    def solve(self, lab: Lab, u: Tensor) -> Tensor:
        """(G A + ridge)^{-1} u."""
        return torch.linalg.solve(self.score[:, None, None] * self.matrix + lab.ridge, u)


@dataclass
class Window(Learner):
    """The Fisher matrix of the last batches."""

    batches: int = 3
    exact: bool = False
    last: list[Tensor] = field(default_factory=list)

    def observe(self, lab: Lab, batch: Drawn, theta: Tensor, v: Tensor) -> None:
        """The oldest batch goes."""
        self.last = [*self.last, batch.H - lab.ridge if self.exact else batch.fisher(theta, v)][-self.batches :]

    def solve(self, lab: Lab, u: Tensor) -> Tensor:
        """Their mean, and the ridge."""
        return torch.linalg.solve(torch.stack(self.last).mean(0) + lab.ridge, u)


@dataclass
class Average(Learner):
    """The mean Fisher matrix of this outer step's batches and, worth one of them, the last estimate."""

    count: float = 0.0

    def begin(self, lab: Lab) -> None:
        """What was learnt counts once."""
        self.count = min(self.count, 1.0)

    def observe(self, lab: Lab, batch: Drawn, theta: Tensor, v: Tensor) -> None:
        """Move the mean."""
        self.count += 1
        self.matrix = self.matrix + (batch.fisher(theta, v) - self.matrix) / self.count

    def solve(self, lab: Lab, u: Tensor) -> Tensor:
        """F and the ridge."""
        return torch.linalg.solve(self.matrix + lab.ridge, u)


@dataclass
class Literal(Learner):
    """The inverse of the identity and the outer products of batch gradients, as the paper prints it, afresh each time."""

    beta: float = 0.8

    def begin(self, lab: Lab) -> None:
        """The identity."""
        self.matrix = torch.eye(lab.d, dtype=lab.a.dtype).expand(lab.chains, -1, -1)

    def observe(self, lab: Lab, batch: Drawn, theta: Tensor, v: Tensor) -> None:
        """The smoothed rank-one update, of the matrix in place of its inverse."""
        g = batch.gradient(theta, v)
        self.matrix = self.beta * self.matrix + (1 - self.beta) * g[:, :, None] * g[:, None, :]

    def solve(self, lab: Lab, u: Tensor) -> Tensor:
        """A u."""
        return torch.linalg.solve(self.matrix, u)


def double_loop(end: Linear, growth: float | None = None) -> Run:
    """T inner steps from the last theta, or T (k + 1)^growth from zero, then v by X^T x."""

    def run(lab: Lab) -> Tensor:
        theta, v = lab.zeros(lab.d), lab.zeros(lab.p)
        for _ in lab.walk():
            steps = lab.inner_steps
            if growth is not None:
                theta, steps = lab.zeros(lab.d), int(-(-(steps * (lab.k + 1) ** growth - 1e-9) // 1))
            for _ in range(steps):
                theta = theta - lab.eta * lab.next().gradient(theta, v)
            v = lab.down(v, end(lab, theta, v))
        return v

    return run


def learning(make: Callable[[], Learner], batches: int | str = 1, exact: bool = False, trajectory: bool = False) -> Run:
    """NHGD: the matrix is learnt from the inner steps; the cross derivative on further batches, all data or on the way.

    exact: x is refined until it solves the system over all data.
    """

    def run(lab: Lab) -> Tensor:
        theta, v, learner = lab.zeros(lab.d), lab.zeros(lab.p), make()
        for _ in lab.walk():
            learner.begin(lab)
            visited = []
            for _ in range(lab.inner_steps):
                batch = lab.next()
                learner.observe(lab, batch, theta, v)
                visited.append(batch)
                theta = theta - lab.eta * batch.gradient(theta, v)
            x = torch.linalg.solve(lab.all.H, lab.u(theta)) if exact else learner.solve(lab, lab.u(theta))
            drawn = [lab.all] if batches == "all" else [lab.next() for _ in range(int(batches))]
            over = visited if trajectory else drawn
            v = lab.down(v, torch.stack([batch.cross(x) for batch in over]).mean(0))
        return v

    return run


def series(products: Callable[[int], int], phi: float, randomised: bool = False) -> Linear:
    """A Neumann series of so many products at outer step k, each on a batch of its own, or one random product."""

    def end(lab: Lab, theta: Tensor, v: Tensor) -> Tensor:
        cross, x = lab.next(), lab.u(theta)
        if not randomised:
            total = x
            for _ in range(products(lab.k)):
                x = x - phi * times(lab.next().H, x)
                total = total + x
            return cross.cross(phi * total)
        terms = products(lab.k) + 1
        p = lab.random(terms)
        for j in range(int(p.max())):
            who = j < p
            x = x - phi * who[:, None] * times(lab.next(who).H, x)
        return cross.cross(terms * phi * x)

    return end


def shrinking(sizes: list[int], phi: float) -> Linear:
    """stocBiO's series: product k on sizes[k] samples."""

    def end(lab: Lab, theta: Tensor, v: Tensor) -> Tensor:
        cross = lab.next()
        x = total = lab.u(theta)
        for size in sizes:
            x = x - phi * times(lab.some(size).H, x)
            total = total + x
        return cross.cross(phi * total)

    return end


def amigo(K: int, beta: float) -> Run:
    """SGD on the linear system, from the last x."""

    def run(lab: Lab) -> Tensor:
        x = lab.zeros(lab.d)

        def end(lab: Lab, theta: Tensor, v: Tensor) -> Tensor:
            nonlocal x
            for _ in range(K):
                x = x - beta * (times(lab.next().H, x) - lab.u(theta))
            return lab.next().cross(x)

        return double_loop(end)(lab)

    return run


def unrolled(last: int | None = None) -> Run:
    """Differentiation through the inner steps, all or the last few."""

    def run(lab: Lab) -> Tensor:
        theta, v = lab.zeros(lab.d), lab.zeros(lab.p)
        for _ in lab.walk():
            visited = []
            for _ in range(lab.inner_steps):
                visited.append(lab.next())
                theta = theta - lab.eta * visited[-1].gradient(theta, v)
            back, cross = lab.u(theta), lab.zeros(lab.p)
            for batch in visited[::-1][:last]:
                cross = cross + lab.eta * batch.cross(back)
                back = back - lab.eta * times(batch.H, back)
            v = lab.down(v, cross)
        return v

    return run


def penalty(multiplier: float, shared: bool) -> Run:
    """F2SA with a constant multiplier."""

    def run(lab: Lab) -> Tensor:
        theta, pulled, v = lab.zeros(lab.d), lab.zeros(lab.d), lab.zeros(lab.p)
        for _ in lab.walk():
            for _ in range(lab.inner_steps):
                batch = lab.next()
                theta = theta - lab.eta * batch.gradient(theta, v)
                other = batch if shared else lab.next()
                pulled = pulled - lab.eta * (other.gradient(pulled, v) + lab.u(pulled) / multiplier)
            batch = lab.next()
            other = batch if shared else lab.next()
            v = lab.down(v, -multiplier * (other.in_v(pulled, v) - batch.in_v(theta, v)))
        return v

    return run


def barrier(pulled_lr: Rate, strength: float = 0.5) -> Run:
    """BOME with the barrier strength ||grad q||^2."""

    def run(lab: Lab) -> Tensor:
        pulled, v = lab.zeros(lab.d), lab.zeros(lab.p)
        for _ in lab.walk():
            theta = pulled
            for _ in range(lab.inner_steps):
                theta = theta - lab.eta * lab.next().gradient(theta, v)
            batch = lab.next()
            q, q_v = batch.gradient(pulled, v), batch.in_v(pulled, v) - batch.in_v(theta, v)
            f, f_v = lab.u(pulled), lab.answers.rho * v
            size = q.square().sum(1) + q_v.square().sum(1)
            multiplier = (strength - ((f * q).sum(1) + (f_v * q_v).sum(1)) / size).clamp_min(0)[:, None]
            pulled = pulled - resolve(pulled_lr, "pulled_lr").rate(Clock(k=lab.k)) * (f + multiplier * q)
            v = lab.down(v, -multiplier * q_v)
        return v

    return run


def soba(lab: Lab) -> Tensor:
    """theta, x and v at once, on one batch."""
    theta, x, v = lab.zeros(lab.d), lab.zeros(lab.d), lab.zeros(lab.p)
    for _ in lab.walk():
        theta, x, v = soba_step(lab, lab.next(), theta, x, v)
    return v


def soba_step(lab: Lab, batch: Drawn, theta: Tensor, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One iteration of SOBA."""
    return (
        theta - lab.eta * batch.gradient(theta, v),
        x - lab.eta * (times(batch.H, x) - lab.u(theta)),
        lab.down(v, batch.cross(x)),
    )


def saba(lab: Lab) -> Tensor:
    """SOBA with a table of what each batch of a fixed partition said last."""
    theta, x, v = lab.zeros(lab.d), lab.zeros(lab.d), lab.zeros(lab.p)
    parts = [lab.next() for _ in range(lab.n // lab.batch)]

    def said(part: Drawn) -> Tensor:
        return torch.cat([part.gradient(theta, v), times(part.H, x), part.cross(x)], dim=1)

    table = torch.stack([said(part) for part in parts])  # (parts, N, 2 d + p)
    every = torch.arange(lab.chains)
    for _ in lab.walk():
        i = lab.random(len(parts))
        new = torch.stack([said(part) for part in parts])[i, every]
        g, product, cross = (new - table[i, every] + table.mean(0)).split([lab.d, lab.d, lab.p], dim=1)
        table[i, every] = new
        theta, x, v = theta - lab.eta * g, x - lab.eta * (product - lab.u(theta)), lab.down(v, cross)
    return v


def fsla(eta: float) -> Run:
    """theta, then x, then v with recursive momentum."""

    def run(lab: Lab) -> Tensor:
        theta, x, v = lab.zeros(lab.d), lab.zeros(lab.d), lab.zeros(lab.p)
        v_last, direction, rho = v, v, lab.answers.rho
        for _ in lab.walk():
            x_last = x
            theta = theta - lab.eta * lab.next().gradient(theta, v)
            x = x - lab.eta * (times(lab.next().H, x) - lab.u(theta))
            batch = lab.next()
            new, old = rho * v - batch.cross(x), rho * v_last - batch.cross(x_last)
            direction = new if lab.k == 0 else new + (1 - eta) * (direction - old)
            v_last, v = v, v - lab.alpha * direction
        return v

    return run


def momentum(products: int, phi: float, randomised: bool, eta: float = 0.5) -> Run:
    """MRBO and SUSTAIN: recursive momentum on both levels, a Neumann series or one random product of it in between."""

    def run(lab: Lab) -> Tensor:
        theta, v = lab.zeros(lab.d), lab.zeros(lab.p)
        here = last = theta, v
        h_theta, h_v = theta, v
        for _ in lab.walk():
            batch, cross = lab.next(), lab.next()
            count = lab.random(products + 1) if randomised else torch.full((lab.chains,), products)
            factors = [(j < count, lab.next(j < count)) for j in range(int(count.max()))]

            def along(theta: Tensor, v: Tensor, factors=factors, cross=cross) -> Tensor:
                x = total = lab.u(theta)
                for who, factor in factors:
                    x = x - phi * who[:, None] * times(factor.H, x)
                    total = total + x
                return lab.answers.rho * v - cross.cross(phi * ((products + 1) * x if randomised else total))

            here = theta, v
            g, F = batch.gradient(*here), along(*here)
            if lab.k:
                g = g + (1 - eta) * (h_theta - batch.gradient(*last))
                F = F + (1 - eta) * (h_v - along(*last))
            last, h_theta, h_v = here, g, F
            theta, v = theta - lab.eta * h_theta, v - lab.alpha * h_v
        return v

    return run


def vrbo(K: int, phi: float, q: int) -> Run:
    """SPIDER on both levels, all data every q steps."""

    def run(lab: Lab) -> Tensor:
        theta, v = lab.zeros(lab.d), lab.zeros(lab.p)

        def along(factors: list[Drawn], cross: Drawn, theta: Tensor, v: Tensor) -> Tensor:
            x = total = lab.u(theta)
            for factor in factors:
                x = x - phi * times(factor.H, x)
                total = total + x
            return lab.answers.rho * v - cross.cross(phi * total)

        h_theta, h_v = theta, v
        for _ in lab.walk():
            if lab.k % q == 0:
                h_theta, h_v = lab.all.gradient(theta, v), along([lab.all] * K, lab.all, theta, v)
            before = theta, v
            v = v - lab.alpha * h_v
            for t in range(lab.inner_steps + 1):
                if t == lab.inner_steps and (lab.k + 1) % q == 0:
                    break
                batch, cross = lab.next(), lab.next()
                factors = [lab.next() for _ in range(K)]
                h_theta = h_theta + batch.gradient(theta, v) - batch.gradient(*before)
                h_v = h_v + along(factors, cross, theta, v) - along(factors, cross, *before)
                if t < lab.inner_steps:
                    before = theta, v
                    theta = theta - lab.eta * h_theta
        return v

    return run


def identity(lab: Lab, theta: Tensor, v: Tensor) -> Tensor:
    """T1-T2: x = grad_theta f."""
    return lab.next().cross(lab.u(theta))


def solved(lab: Lab, theta: Tensor, v: Tensor) -> Tensor:
    """AID with the system solved, and the cross derivative taken, over all data."""
    return lab.all.cross(torch.linalg.solve(lab.all.H, lab.u(theta)))


@dataclass(frozen=True)
class Level:
    """Where runs with noise end, (p,), and the largest relative error of CHAINS of them."""

    centre: Tensor
    error: float


def relative(found: Tensor, centre: Tensor) -> Tensor:
    """|found - centre| / |centre|, of one vector or of one in every row."""
    return (found - centre).norm(dim=-1) / centre.norm()


def level(run: Run, lab: Lab, end: Tensor | None) -> Level:
    """What is allowed to runs like those of the lab, about `end`, or about their own mean where it is None."""
    found = run(lab)
    centre = found[CHAINS:].mean(0) if end is None else end
    return Level(centre, float(relative(found[:CHAINS], centre).max()))
