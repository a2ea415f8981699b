"""Tests that what DualKV does to models, in veRL's engine too, and to files of veRL's transformers is undone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from dualkv.integrations import patching
from dualkv.integrations.verl import options
from dualkv.integrations.verl.engine import OWN_ATTENTION, OWN_LAYERS, DualKVEngine, restore_attention
from tests.integrations import states
from tests.integrations.tiny import make_model
from tests.integrations.transformers.test_patching import FILES, as_imported, test_disable_leaves_nothing

__all__ = ["as_imported", "test_disable_leaves_nothing"]


def of_verl(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stands for a forward that veRL puts into a class."""


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_an_engine_leaves_nothing_in_its_model(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(FSDPEngineWithLMHead, "_build_module", lambda _: model)
    engine: Any = object.__new__(DualKVEngine)
    engine._checked, engine._running = True, None
    engine._options = options.read({"dualkv_batch_invariant": batch_invariant})
    engine.engine_config = SimpleNamespace(full_determinism=False)
    engine.model_config = SimpleNamespace(use_liger=False, enable_gradient_checkpointing=False, use_fused_kernels=False)
    before = states.of_model(model)
    assert engine._build_module() is model
    decoder = model.get_decoder()
    assert list(decoder._forward_hooks.values()) == [engine._leave_decoder]
    assert next(iter(decoder._forward_pre_hooks.values())) == engine._enter_decoder
    patching.undo(model)
    assert states.differences(before, states.of_model(model)) == []


def test_forwards_that_verl_has_replaced_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for cls in (*OWN_ATTENTION, *OWN_LAYERS):
        monkeypatch.setattr(cls, "forward", of_verl)
    before = states.of_files(FILES)
    for _ in range(2):
        restore_attention()
        assert all(cls.forward is own for cls, own in OWN_ATTENTION.items())
        assert not any(cls.forward is of_verl for cls in OWN_LAYERS)
        for cls in OWN_ATTENTION:  # as another engine does
            cls.forward = of_verl
    restore_attention()
    patching.undo_process()
    assert states.differences(before, states.of_files(FILES)) == []
