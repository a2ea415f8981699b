"""veRL's own FSDP engine, which also reports what packing would save in it: `model.model_type=dualkv_observe`."""

from __future__ import annotations

from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from dualkv.integrations.verl.batches import MODEL_TYPE
from dualkv.integrations.verl.engine import FSDP
from dualkv.observer import observe


@EngineRegistry.register(model_type=f"{MODEL_TYPE}_observe", backend=FSDP, device="cuda")
class ObservedEngine(FSDPEngineWithLMHead):
    """veRL's engine, unchanged, with :func:`dualkv.observe` on its model."""

    def __init__(self, model_config: Any, *args: Any, **kwargs: Any) -> None:
        model_config.model_type = "language_model"  # as the rest of veRL expects
        super().__init__(model_config, *args, **kwargs)

    def initialize(self) -> None:
        super().initialize()
        observe(self.module, labels="roll")
