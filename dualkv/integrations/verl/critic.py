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
from dualkv.integrations.verl.options import BATCH_INVARIANT, CANARY, PACKED, PLACES, Options, of


@EngineRegistry.register(model_type="value_model", backend=FSDP, device="cuda", vendor="nvidia")
class DualKVCritic(DualKVEngine, FSDPEngineWithValueHead):
    """veRL's FSDP and FSDP2 engine for value models, with the rollouts of equal prompts packed, or all as trees.

    Values, losses, metrics and refusals are as in :class:`DualKVEngine`; a model with TRL's value head is refused too.
    """

    stock_type = "value_model"

    def _read_options(self, model_config: Any) -> None:
        super()._read_options(model_config)
        refuse_of_log_probs(self._options)

    def __new__(cls, model_config: Any, *args: Any, **kwargs: Any) -> Any:
        given = of(model_config)
        refuse_alone(given)
        if given.packed:
            return super().__new__(cls)
        return FSDPEngineWithValueHead(model_config, *args, **kwargs)

    @staticmethod
    def _of_decoder(config: Any) -> Any:
        """veRL puts a head for each token on the decoder, whatever head the configuration names."""
        config = copy.deepcopy(config)
        config.architectures = None
        return config


def refuse_alone(options: Options) -> None:
    """Raises ValueError for options of a critic that is not packed."""
    if name := options.alone:
        raise ValueError(f"{PLACES[1]}.{name} is set without {PACKED}=True, expected both")


def refuse_of_log_probs(options: Options) -> None:
    """Raises ValueError for options of log-probs, which a critic does not have."""
    for name in (BATCH_INVARIANT, CANARY):
        if value := options.given.get(name):
            raise ValueError(f"{PLACES[1]}.{name} is {value}, expected none: it is of log-probs")
