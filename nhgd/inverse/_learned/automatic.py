"""Which online inverse suits a model."""

from __future__ import annotations

from torch import nn

from nhgd._recording.accounting import held
from nhgd.inverse.fisher_window import FisherWindow
from nhgd.inverse.kfac import KFAC
from nhgd.variable import Variable


def automatic(theta: Variable) -> KFAC | FisherWindow:
    """K-FAC where theta is a module with a trainable Linear or Conv2d layer, the window elsewhere."""
    leaves = {id(leaf) for leaf in theta.leaves}
    modules = theta.root.modules() if theta.root is not None else ()
    layered = any(isinstance(m, (nn.Linear, nn.Conv2d)) and id(held(m, "weight")) in leaves for m in modules)
    return KFAC() if layered else FisherWindow()
