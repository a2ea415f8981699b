"""Training on many rollouts of one prompt without paying for the prompt more than once."""

from importlib import import_module
from typing import Any

from dualkv.attention import attention
from dualkv.layout import Layout
from dualkv.logprobs import response_logprobs
from dualkv.microbatch import MicroBatch, plan_micro_batches
from dualkv.packing import PackedBatch, pack, pack_padded

__version__ = "0.1.0"
__all__ = [
    "Layout",
    "MicroBatch",
    "PackedBatch",
    "attention",
    "grpo",
    "integrations",
    "pack",
    "pack_padded",
    "plan_micro_batches",
    "response_logprobs",
]


def __getattr__(name: str) -> Any:
    """Submodules that `import dualkv` leaves for when they are used."""
    if name in ("grpo", "integrations"):
        return import_module(f"dualkv.{name}")
    raise AttributeError(f"module 'dualkv' has no attribute {name!r}")
