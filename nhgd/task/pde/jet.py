"""Derivatives carried forward through a tanh network.

A jet is the value of a function at a point with its first derivatives and a Laplacian. Through an affine map each part
is multiplied by the same matrix, and through tanh

    a = tanh(z),   a_i = s z_i,   La = s Lz - 2 a s sum_i z_i^2,      s = 1 - a^2

so one forward pass gives all of them and one reverse pass the gradient of anything made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhgd.errors import InputError


@dataclass(frozen=True)
class Jet:
    """A function at N points: its value (N,), its gradient (N, d) and its Laplacian in space (N,)."""

    value: Tensor
    gradient: Tensor
    laplacian: Tensor


@final
class JetNet(nn.Module):
    """A tanh network with one output and its derivatives.

    A layer is a Linear without bias on inputs with a constant feature in front: 1 where the value passes, 0 where
    derivatives do. So a sample is one sequence of d + 2 places to each layer, and what an inner step records of it is
    right as it is. The first column of a weight is its bias.

    Args:
        sizes: inputs, hidden widths, and 1.
        space: how many of the first coordinates are space; the Laplacian is over these.
        seed: of the weights: Glorot-normal, with biases zero.

    >>> net = JetNet((3, 64, 64, 64, 64, 1), space=2, seed=0)
    >>> sum(p.numel() for p in net.parameters())
    12801
    """

    def __init__(self, sizes: Sequence[int], space: int, seed: int) -> None:
        super().__init__()
        if len(sizes) < 2 or min(sizes) < 1 or sizes[-1] != 1:
            raise InputError(f"A network needs inputs, hidden widths and one output, such as (3, 32, 1); got {sizes}.")
        if not 0 <= space <= sizes[0]:
            raise InputError(f"A network of {sizes[0]} coordinates cannot have {space} spatial ones.")
        self.sizes = tuple(sizes)
        self.space = space
        self.layers = nn.ModuleList(glorot(sizes, seed))

    def forward(self, x: Tensor) -> Tensor:
        """The values at points (N, d): (N,)."""
        h = F.pad(x, (1, 0), value=1.0)
        for layer in self.layers[:-1]:
            h = F.pad(torch.tanh(layer(h)), (1, 0), value=1.0)
        found: Tensor = self.layers[-1](h)[:, 0]
        return found

    def jet(self, x: Tensor) -> Jet:
        """The values and derivatives at points (N, d)."""
        n, d = x.shape
        one = F.pad(x.new_ones(n, 1, 1), (0, 0, 0, d + 1))  # (N, d + 2, 1)
        slopes = torch.eye(d, dtype=x.dtype, device=x.device).expand(n, d, d)
        h = torch.cat([one, torch.cat([x[:, None], slopes, x.new_zeros(n, 1, d)], 1)], 2)  # (N, d + 2, 1 + d)
        for layer in self.layers[:-1]:
            z = layer(h)  # (N, d + 2, width)
            a = torch.tanh(z[:, :1])
            s = 1 - a * a
            squares = z[:, 1 : 1 + self.space].square().sum(1, keepdim=True)
            h = torch.cat([one, torch.cat([a, s * z[:, 1:-1], s * (z[:, -1:] - 2 * a * squares)], 1)], 2)
        last = self.layers[-1](h)[:, :, 0]  # (N, d + 2)
        return Jet(last[:, 0], last[:, 1:-1], last[:, -1])


@final
class TanhNet(nn.Module):
    """A tanh network on points (N, d), started as `JetNet` is but with ordinary layers: a control.

    >>> TanhNet((1, 32, 32, 1), seed=0)(torch.zeros(5, 1)).shape
    torch.Size([5, 1])
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for drawn in glorot(sizes, seed):
            layer = nn.utils.skip_init(nn.Linear, drawn.in_features - 1, drawn.out_features)
            with torch.no_grad():
                layer.weight.copy_(drawn.weight[:, 1:])
                layer.bias.zero_()
            self.layers.append(layer)

    def forward(self, x: Tensor) -> Tensor:
        """(N, d) -> (N, outputs)."""
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        found: Tensor = self.layers[-1](x)
        return found


def glorot(sizes: Sequence[int], seed: int) -> list[nn.Linear]:
    """Layers with the bias as first column of the weight: Glorot-normal, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for width, out in pairwise(sizes):
        layer = nn.utils.skip_init(nn.Linear, width + 1, out, bias=False)
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight[:, 1:] = torch.randn(out, width, generator=generator) * (2 / (width + out)) ** 0.5
        layers.append(layer)
    return layers
