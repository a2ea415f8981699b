"""Log-probs whose bits do not depend on micro-batches: `model.fused_kernel_options.dualkv_batch_invariant=True`.

The model is enabled with `batch_invariant=True`, and paths are cut where trained tokens begin, whatever else is in a
micro-batch. What remains are veRL's functions of logits. A GPU orders the sums of a row by the number of rows of a
call, so these functions get equally many rows in every call here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from dualkv.integrations.verl.options import BATCH_INVARIANT, FAST, WALK, Options

ROWS = 256  # of logits in a call
ALIGNED = 8  # logits of a row: rows of bf16 then begin at multiples of 16 bytes, which counts in the order of sums
Compute = Callable[[Any, dict[str, Any], int], dict[str, torch.Tensor]]


def refuse(model_config: Any, engine_config: Any, options: Options) -> None:
    """Raises ValueError for settings of an FSDP engine with which log-probs are not known to be batch-invariant."""
    vocabulary = model_config.hf_config.get_text_config().vocab_size
    for name, value, expected in (
        *((f"fused_kernel_options.{name}", options.given.get(name, False), False) for name in (WALK, FAST)),
        ("use_fused_kernels", model_config.use_fused_kernels, False),
        ("use_liger", model_config.use_liger, False),
        ("ulysses_sequence_parallel_size", engine_config.ulysses_sequence_parallel_size, 1),
        ("qat.enable", bool(getattr(getattr(engine_config, "qat", None), "enable", False)), False),
        ("vocab_size", vocabulary, vocabulary // ALIGNED * ALIGNED),
    ):
        if value != expected:
            wanted = f"a multiple of {ALIGNED}" if name == "vocab_size" else expected
            raise ValueError(
                f"fused_kernel_options.{BATCH_INVARIANT} is True together with {name}={value}, expected {wanted}: the"
                " bits of log-probs are not known to be equal then"
            )


def by_blocks(compute: Compute, logits: torch.Tensor, of_rows: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Compute values [U] by name of logits [1, U, V] and tensors [U] by name (others are handed on), for ROWS rows at a
    time: `compute` takes an output with logits [1, ROWS, V], tensors [ROWS], and their number."""
    found: dict[str, list[torch.Tensor]] = {}
    for number, block in enumerate(logits[0].split(ROWS)):
        begin, count = number * ROWS, len(block)
        some = {
            name: _filled(x[begin : begin + count]) if isinstance(x, torch.Tensor) else x for name, x in of_rows.items()
        }
        for name, values in compute(SimpleNamespace(logits=_filled(block)[None]), some, ROWS).items():
            found.setdefault(name, []).append(values[:count])
    return {name: torch.cat(values) for name, values in found.items()}


def _filled(x: torch.Tensor) -> torch.Tensor:
    """x [n, ...] -> [ROWS, ...], with ones behind the n rows."""
    return x if len(x) == ROWS else torch.cat([x, x.new_ones(ROWS - len(x), *x.shape[1:])])
