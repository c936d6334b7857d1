"""Which parameters of a model belong to Linear and Conv2d layers."""

from __future__ import annotations

from torch import nn

from nhgd._recording.accounting import held
from nhgd.variable import Variable


def layer_shapes(theta: Variable) -> dict[tuple[str, ...], tuple[int, int, int]]:
    """(groups, out, in), the column of a bias included, of each layer by the names of its weight and bias.

    Without a module, every tensor of two or more dimensions is taken for the weight of a layer without bias.
    """
    if theta.root is None:
        return {
            (name,): (1, leaf.shape[0], leaf.numel() // max(1, leaf.shape[0]))
            for name, leaf in zip(theta.names, theta.leaves, strict=True)
            if leaf.ndim in (2, 4)
        }
    names = {id(leaf): name for name, leaf in zip(theta.names, theta.leaves, strict=True)}
    found: dict[tuple[str, ...], tuple[int, int, int]] = {}
    for module in theta.root.modules():
        weight = held(module, "weight") if isinstance(module, (nn.Linear, nn.Conv2d)) else None
        if weight is not None and id(weight) in names:
            pair = tuple(names[id(t)] for t in (weight, held(module, "bias")) if id(t) in names)
            groups = module.groups if isinstance(module, nn.Conv2d) else 1
            out, columns = weight.shape[0], weight[0].numel()
            found[pair] = (groups, out // groups, columns + len(pair) - 1)
    return found
