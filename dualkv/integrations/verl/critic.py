"""veRL's critic on packed groups: `critic.model.fused_kernel_options.dualkv=True`.

Every trainer of veRL makes its critic's engine under the type "value_model". The engine here has that name for NVIDIA's
GPUs, and hands critics without the option to veRL's own engine.
"""

from __future__ import annotations

import copy
from typing import Any

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

from dualkv.integrations.verl.engine import FSDP, DualKVEngine
from dualkv.integrations.verl.options import PACKED, PLACES, of


@EngineRegistry.register(model_type="value_model", backend=FSDP, device="cuda", vendor="nvidia")
class DualKVCritic(DualKVEngine, FSDPEngineWithValueHead):
    """veRL's FSDP and FSDP2 engine for value models, with the rollouts of equal prompts packed, or all as trees.

    Values, losses, metrics and refusals are as in :class:`DualKVEngine`; a model with TRL's value head is refused too.
    """

    stock_type = "value_model"

    def _read_options(self, model_config: Any) -> None:
        super()._read_options(model_config)
        self._options.refuse_of_log_probs()

    def __new__(cls, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        given = of(model_config)
        given.refuse_alone(PLACES[1], f"{PACKED}=True")
        if given.packed:
            return super().__new__(cls)
        return FSDPEngineWithValueHead(model_config, *args, **kwargs)

    @staticmethod
    def _of_decoder(config: Any) -> Any:
        """veRL puts a head for each token on the decoder, whatever head the configuration names."""
        config = copy.deepcopy(config)
        config.architectures = None
        return config
