"""Which online inverse suits a model."""

from __future__ import annotations

from nhgd.inverse._learned.layers import layer_shapes
from nhgd.inverse.base import AbstractInverse
from nhgd.inverse.fisher_window import FisherWindow
from nhgd.inverse.kfac import KFAC
from nhgd.inverse.refined import Refined
from nhgd.variable import Variable


def automatic(theta: Variable) -> KFAC | FisherWindow:
    """K-FAC if theta is a module with a trainable Linear or Conv2d layer, else the window.

    Both take a Fisher matrix of the model's own labels where the problem has a likelihood.
    """
    has_layers = theta.root is not None and layer_shapes(theta)
    return KFAC(fisher="auto") if has_layers else FisherWindow(fisher="auto")


def completed(inverse: AbstractInverse | None, refine: int, theta: Variable) -> AbstractInverse:
    """The inverse, or the one that suits the model, refined by this many steps of CG."""
    found = automatic(theta) if inverse is None else inverse
    return Refined(found, steps=refine) if refine and not isinstance(found, Refined) else found
