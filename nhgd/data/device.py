"""Checks that a requested device exists."""

from __future__ import annotations

import torch

from nhgd.errors import InputError, unknown


def usable_device(owner: str, name: str | torch.device) -> torch.device:
    """The device called so, or a sentence.

    >>> usable_device("LabelCleaner", "cpu")
    device(type='cpu')
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise unknown(f"device for {owner}", str(name), ("cpu", "cuda")) from None
    if device.type == "meta":
        raise InputError(f"{owner}: the meta device holds no numbers. Use device='cpu' or 'cuda'.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise InputError(f"{owner}: PyTorch cannot use a CUDA device here. Use device='cpu'.")
        if device.index is not None and device.index >= count:
            raise InputError(f"{owner}: there is no {device}: this machine has {count} CUDA device(s), counted from 0.")
    elif device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise InputError(f"{owner}: PyTorch cannot use {device} here. Use device='cpu'.") from error
    return device
