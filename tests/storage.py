"""Trees that go to disk and come back."""

from __future__ import annotations

import json
from typing import TypeVar

import torch
from safetensors.torch import load, save

from nhgd._tree.encoding import Decoder, Encoder, expected

T = TypeVar("T")


def stored(tree: T) -> T:
    """The tree as it comes back from JSON and safetensors."""
    encoder = Encoder()
    text = json.dumps(encoder.encode(tree, "tree"), allow_nan=False)
    data = save({name: tensor.contiguous() for name, tensor in encoder.tensors.items()})
    back: T = Decoder(load(data), expected(tree), torch.device("cpu")).decode(json.loads(text))
    return back
