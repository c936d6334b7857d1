"""The device an estimator was told to use, made sure of."""

from __future__ import annotations

import torch

from nhgd.errors import InputError, unknown


def usable_device(owner: str, name: str) -> torch.device:
    """The device called so, or a sentence.

    >>> usable_device("LabelCleaner", "cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise unknown(f"device for {owner}", str(name), ("cpu", "cuda")) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{owner}: there is no CUDA device that PyTorch can use here. Use device='cpu'.")
    return device
