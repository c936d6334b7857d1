"""What a run drew: its batches, recorded, and handed to the formula of its method in the same order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import nhgd
from nhgd.schedule import Clock, Rate, as_schedule
from nhgd.task import Instance


class Recorded(nhgd.Data):
    """Data that note the samples, (B,), of each batch that is drawn from them."""

    def __init__(self, *columns: Tensor, batch: int) -> None:
        super().__init__(*columns, batch=batch)
        self.drawn: deque[Tensor] = deque()

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for batch in super().__iter__():
            self.drawn.append(batch[-1])
            yield batch

    def take(self, index: Tensor) -> tuple[Tensor, ...]:
        """The samples with these indices."""
        self.drawn.append(index)
        return super().take(index)


@dataclass(frozen=True)
class Batch:
    """l = mean_i 0.5 (a_i . theta - b_i - c_i . v)^2 + 0.5 ridge |theta|^2 and its derivatives, on some samples."""

    index: Tensor  # (B,)
    a: Tensor  # (B, d)
    b: Tensor  # (B,)
    c: Tensor  # (B, p)
    ridge: float

    @cached_property
    def ridge_matrix(self) -> Tensor:
        """(d, d)."""
        return self.ridge * torch.eye(self.a.shape[1], dtype=self.a.dtype)

    @cached_property
    def H(self) -> Tensor:
        """d2_theta l, (d, d)."""
        return self.a.T @ self.a / len(self.a) + self.ridge_matrix

    def residuals(self, theta: Tensor, v: Tensor) -> Tensor:
        """(B,)."""
        return self.a @ theta - self.b - self.c @ v

    def value(self, theta: Tensor, v: Tensor) -> float:
        """l."""
        return float(0.5 * self.residuals(theta, v).square().mean() + 0.5 * self.ridge * theta.dot(theta))

    def gradient(self, theta: Tensor, v: Tensor) -> Tensor:
        """grad_theta l, (d,)."""
        return self.a.T @ self.residuals(theta, v) / len(self.a) + self.ridge * theta

    def in_v(self, theta: Tensor, v: Tensor) -> Tensor:
        """grad_v l, (p,)."""
        return -self.c.T @ self.residuals(theta, v) / len(self.a)

    def cross(self, x: Tensor) -> Tensor:
        """(d2_{theta,v} l)^T x, (p,)."""
        return -self.c.T @ (self.a @ x) / len(self.a)

    def fisher(self, theta: Tensor, v: Tensor) -> Tensor:
        """The empirical Fisher matrix, (d, d), without the ridge."""
        rows = self.a * self.residuals(theta, v)[:, None]
        return rows.T @ rows / len(rows)


class Replay:
    """The batches that a run on the small quadratic drew, and what a formula needs besides.

    Args:
        instance: its inner data are `Recorded`.
        inner_lr, outer_lr, inner_steps: of the run.
    """

    k: int = 0  # the outer step
    state: Any = None  # of the method after that step

    def __init__(self, instance: Instance, inner_lr: Rate, outer_lr: Rate, inner_steps: int) -> None:
        assert isinstance(instance.inner_data, Recorded)
        self.data = instance.inner_data
        self.answers = instance.answers
        self.ridge = float(instance.problem.ridge_diagonal()[0])
        self.d, self.p = self.answers.cross.shape
        self.inner_steps = inner_steps
        self.rates = as_schedule(inner_lr, "inner_lr"), as_schedule(outer_lr, "outer_lr")

    @property
    def eta(self) -> float:
        """The inner step size now."""
        return self.rates[0].rate(Clock(k=self.k))

    @property
    def alpha(self) -> float:
        """The outer step size now."""
        return self.rates[1].rate(Clock(k=self.k))

    def zeros(self) -> tuple[Tensor, Tensor]:
        """Where theta, (d,), and v, (p,), begin."""
        return torch.zeros(self.d, dtype=torch.float64), torch.zeros(self.p, dtype=torch.float64)

    def next(self) -> Batch:
        """The next batch that was drawn."""
        return self._of(self.data.drawn.popleft())

    def rest(self) -> list[Batch]:
        """All that are left of this outer step."""
        return [self.next() for _ in range(len(self.data.drawn))]

    def everything(self) -> Batch:
        """All data, drawn as one pass over them."""
        index = torch.cat([self.data.drawn.popleft() for _ in range(len(self.data))])
        assert sorted(index.tolist()) == list(range(self.data.samples))
        return self._of(index)

    def _of(self, index: Tensor) -> Batch:
        return Batch(index, *(column[index] for column in self.data.tensors), ridge=self.ridge)

    def u(self, theta: Tensor) -> Tensor:
        """grad_theta f, (d,)."""
        return self.answers.B.T @ (self.answers.B @ theta - self.answers.target) / len(self.answers.B)

    def f_v(self, v: Tensor) -> Tensor:
        """grad_v f, (p,)."""
        return self.answers.rho * v

    def down(self, v: Tensor, cross: Tensor) -> Tensor:
        """v after a step along grad_v f - cross."""
        return v - self.alpha * (self.f_v(v) - cross)
