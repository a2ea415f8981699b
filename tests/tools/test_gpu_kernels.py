"""The kernels that GPU tests ask for, noted without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codegen import KernelError, store
from codegen.spec import backward_specs, forward_spec
from dualkv.ops import hopper
from tools.gpu_kernels import Noting


def test_what_is_asked_for_is_noted():
    forward, backward = forward_spec("bf16", 128, 4), backward_specs("bf16", 128).present
    plugin = Noting()
    with plugin.standing_in():
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == hopper.CAPABILITY
        assert store.where(forward) is None
        assert [spec for spec, _ in store.fill(backward, Path("nowhere"))] == backward
        for ask in (lambda: store.load(forward), lambda: store.entry(forward), lambda: store.load_all(backward)):
            with pytest.raises(KernelError, match="noted"):
                ask()
    assert list(plugin.specs) == [forward, *backward]
    assert not torch.cuda.is_available()
    assert store.load.__module__ == "codegen.store"
