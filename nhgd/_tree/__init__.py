"""Trees: dataclasses, named tuples, tuples, lists and mappings with tensors and plain values as leaves.

Batches, records, states, messages and checkpoints are such trees, and all of them are walked here. Anything that is not one of
these containers is a leaf, also an object that holds tensors as attributes, and a tuple with a `.to()` of its own.

torch.utils._pytree walks containers that were registered by their exact class. The batches of a user's loader are of classes
nobody has registered (dataclasses, the mappings of tokenisers), and registering them would change what torch.func does with
them elsewhere; so a container is recognised by what it is, and how is worked out once for each class.
"""

from __future__ import annotations

from nhgd._tree.walk import (
    Slot,
    Structure,
    children,
    flatten,
    kind_of,
    leaves,
    map_leaves,
    map_tensors,
    named_tensors,
    tensors,
    unflatten,
)

__all__ = [
    "Slot",
    "Structure",
    "children",
    "flatten",
    "kind_of",
    "leaves",
    "map_leaves",
    "map_tensors",
    "named_tensors",
    "tensors",
    "unflatten",
]
