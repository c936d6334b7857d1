"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def house_rules() -> Iterator[None]:
    """Every test starts from the same seed and in float32, as a user would, and leaves no hook behind."""
    torch.manual_seed(0)
    assert torch.get_default_dtype() == torch.float32
    yield
    assert not nn.modules.module._global_forward_hooks
