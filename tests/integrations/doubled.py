"""Models in fp64 throughout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch


@contextmanager
def double_throughout() -> Iterator[None]:
    """Norms and scans compute in float32 whatever the model's dtype; here they stay in float64."""
    wide = patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with wide, patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield
