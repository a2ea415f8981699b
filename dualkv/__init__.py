"""Training on many rollouts of one prompt without paying for the prompt more than once."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dualkv.openmp import IS_THE_COMMAND  # before torch is imported

if TYPE_CHECKING or not IS_THE_COMMAND:  # the command line refuses a bad file before torch is imported
    from dualkv.data.memory import Memory, RowCosts
    from dualkv.data.microbatch import MicroBatch, plan_micro_batches
    from dualkv.data.packing import PackedBatch, pack, pack_padded
    from dualkv.data.planning import MemoryPlan, plan_in_memory
    from dualkv.data.trees import PackedSequences, pack_sequences, plan_sequences
    from dualkv.heads import Head
    from dualkv.integrations.unenabled import watch  # noqa: F401  (refuses layouts for models that are not enabled)
    from dualkv.layout import Layout
    from dualkv.logprobs import response_logprobs
    from dualkv.ops.attention import attention
    from dualkv.row_costs import measure_rows
    from dualkv.walked_values import KnownLoss, walk_values, walk_whole
    from dualkv.walks import walk, walk_passes

if TYPE_CHECKING:  # what __getattr__ brings
    from dualkv import grpo, integrations
    from dualkv.canary import packed_vs_separate
    from dualkv.observer import observe
    from dualkv.ops.compat import flash_attn_dualkv_varlen_func
    from dualkv.recompute_passes import RecomputePasses

__version__ = "0.2.0"
__all__ = [
    "Head",
    "KnownLoss",
    "Layout",
    "Memory",
    "MemoryPlan",
    "MicroBatch",
    "PackedBatch",
    "PackedSequences",
    "RecomputePasses",
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
    "plan_in_memory",
    "plan_micro_batches",
    "plan_sequences",
    "response_logprobs",
    "walk",
    "walk_passes",
    "walk_values",
    "walk_whole",
]


# Where __getattr__ finds names. `import dualkv` brings all but the last four at once, the command line none.
_MODULES = {
    "Memory": "data.memory",
    "RowCosts": "data.memory",
    "MemoryPlan": "data.planning",
    "plan_in_memory": "data.planning",
    "MicroBatch": "data.microbatch",
    "plan_micro_batches": "data.microbatch",
    "PackedBatch": "data.packing",
    "pack": "data.packing",
    "pack_padded": "data.packing",
    "PackedSequences": "data.trees",
    "pack_sequences": "data.trees",
    "plan_sequences": "data.trees",
    "Head": "heads",
    "Layout": "layout",
    "response_logprobs": "logprobs",
    "attention": "ops.attention",
    "measure_rows": "row_costs",
    "walk": "walks",
    "walk_passes": "walks",
    "KnownLoss": "walked_values",
    "walk_values": "walked_values",
    "walk_whole": "walked_values",
    "packed_vs_separate": "canary",
    "observe": "observer",
    "RecomputePasses": "recompute_passes",
    "flash_attn_dualkv_varlen_func": "ops.compat",
}


def __getattr__(name: str) -> Any:
    """Import the attributes that `import dualkv` defers until they are used."""
    if name in ("grpo", "integrations"):
        return import_module(f"dualkv.{name}")
    if name in _MODULES:
        import_module("dualkv.integrations.unenabled")  # as above
        found = getattr(import_module(f"dualkv.{_MODULES[name]}"), name)
        globals()[name] = found  # the next time this function is not asked
        return found
    raise AttributeError(f"module 'dualkv' has no attribute {name!r}")
