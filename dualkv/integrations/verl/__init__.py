"""Packed groups in veRL, without a fork: engines and trainers, selected by the configuration (see docs/verl.md).

    actor_rollout_ref.model.model_type=dualkv      the engines of actor and reference policy
    actor_rollout_ref.model.model_type=dualkv_observe    veRL's own, and a report of what packing would save
    critic.model.fused_kernel_options.dualkv=True  the engine of the critic
    trainer.v1.trainer_mode=dualkv_sync            a trainer that keeps groups on one rank; also dualkv_colocate_async
                                                   and dualkv_separate_async

veRL imports this package in every process, by the entry point `verl.plugins`.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

from codegen.packages import require

try:
    require("verl", __name__)
    require("transformers", __name__)
    import verl  # noqa: F401  (veRL loads its plugins here, before this module uses veRL)

    from dualkv.integrations.verl.batches import MODEL_TYPE
    from dualkv.integrations.verl.critic import DualKVCritic
    from dualkv.integrations.verl.engine import DualKVEngine, register_other
    from dualkv.integrations.verl.observed import ObservedEngine
except Exception as error:
    # veRL ignores errors of plugins; without this warning only the engine's unknown name would show.
    warnings.warn(f"dualkv: the veRL plugin is not available: {error}", stacklevel=1)
    raise

try:
    require("megatron-core", f"{__name__}.megatron")
    import dualkv.integrations.verl.megatron_engine
except ImportError as error:  # raised when an engine is made; without megatron-core, or veRL's own engine
    register_other("megatron", error)

if find_spec("transfer_queue"):  # needed by veRL's trainers, not by its workers
    try:
        import dualkv.integrations.verl.trainer  # noqa: F401
    except ImportError as error:
        warnings.warn(f"dualkv: veRL's trainers that keep groups whole are not available: {error}", stacklevel=1)

__all__ = ["MODEL_TYPE", "DualKVCritic", "DualKVEngine", "ObservedEngine"]
