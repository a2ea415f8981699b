"""Packed groups in veRL, without a fork: an engine and trainers that a configuration names (see docs/verl.md).

    actor_rollout_ref.model.model_type=dualkv      the engine of actor and reference policy
    trainer.v1.trainer_mode=dualkv_sync            a trainer that keeps groups on one rank; also dualkv_colocate_async
                                                   and dualkv_separate_async

veRL imports this package by itself in every process (entry point `verl.plugins`).
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec

from dualkv.integrations import require

require("verl")

try:
    import verl  # noqa: F401  (loads its plugins before this one uses it)

    from dualkv.integrations.verl.engine import MODEL_TYPE, DualKVEngine
except Exception as error:
    # veRL drops what its plugins raise, and would later not know the engine's name.
    warnings.warn(f"dualkv: the veRL plugin is not available: {error}", stacklevel=1)
    raise

if find_spec("transfer_queue"):  # veRL's trainers need it, its workers do not
    try:
        import dualkv.integrations.verl.trainer  # noqa: F401
    except ImportError as error:
        warnings.warn(f"dualkv: veRL's trainers that keep groups whole are not available: {error}", stacklevel=1)

__all__ = ["MODEL_TYPE", "DualKVEngine"]
