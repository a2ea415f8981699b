"""Training on many rollouts of one prompt without paying for the prompt more than once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dualkv import openmp  # noqa: F401  (before torch is imported)
from dualkv.data.memory import Memory, RowCosts
from dualkv.data.microbatch import MicroBatch, plan_micro_batches
from dualkv.data.packing import PackedBatch, pack, pack_padded
from dualkv.data.trees import PackedSequences, pack_sequences, plan_sequences
from dualkv.heads import Head
from dualkv.integrations.unenabled import watch  # noqa: F401  (refuses layouts for models that are not enabled)
from dualkv.layout import Layout
from dualkv.logprobs import response_logprobs
from dualkv.ops.attention import attention
from dualkv.row_costs import measure_rows
from dualkv.walks import walk, walk_passes, walk_whole

if TYPE_CHECKING:  # what __getattr__ brings
    from dualkv import grpo, integrations
    from dualkv.canary import packed_vs_separate
    from dualkv.observer import observe
    from dualkv.ops.compat import flash_attn_dualkv_varlen_func

__version__ = "0.2.0"
__all__ = [
    "Head",
    "Layout",
    "Memory",
    "MicroBatch",
    "PackedBatch",
    "PackedSequences",
    "RowCosts",
    "attention",
    "flash_attn_dualkv_varlen_func",
    "grpo",
    "integrations",
    "measure_rows",
    "observe",
    "pack",
    "pack_padded",
    "pack_sequences",
    "packed_vs_separate",
    "plan_micro_batches",
    "plan_sequences",
    "response_logprobs",
    "walk",
    "walk_passes",
    "walk_whole",
]


def __getattr__(name: str) -> Any:
    """Import the attributes that `import dualkv` defers until they are used: submodules, the canary, the observer and
    the paper's function."""
    if name == "grpo":
        return import_module("dualkv.grpo")
    if name == "flash_attn_dualkv_varlen_func":
        return import_module("dualkv.ops.compat").flash_attn_dualkv_varlen_func
    if name == "packed_vs_separate":
        return import_module("dualkv.canary").packed_vs_separate
    if name == "observe":
        return import_module("dualkv.observer").observe
    raise AttributeError(f"module 'dualkv' has no attribute {name!r}")
