"""Trees: dataclasses, named tuples, tuples, lists and mappings with tensors and plain values as leaves.

Batches, records, states, messages and checkpoints are such trees, and all of them are walked here. Anything that is not
one of these containers is a leaf, including an object with tensors as attributes and a tuple with its own `.to()`.

torch.utils._pytree walks only containers whose exact class is registered. The classes of users' batches are not
(dataclasses, the mappings of tokenisers), and registering them would change how torch.func treats them elsewhere. So
containers are recognised by their kind, once for each class.
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
