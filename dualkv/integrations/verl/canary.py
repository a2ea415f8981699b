"""The canary of veRL's engine on packed groups: a few rollouts computed as veRL computes them, and compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils import ulysses

from dualkv import canary
from dualkv.integrations.verl import data as verl_data
from dualkv.integrations.verl.data import PackedRollouts, Rollouts

ROLLOUTS = 2


def compared(
    engine: Any, micro_batch: TensorDict, rollouts: Rollouts, log_probs: torch.Tensor, step: int
) -> canary.Compared:
    """Compare the log-probs of a micro-batch that has just run, with weights that have not changed since.

    Each rollout runs as veRL's own engine runs it, on one rank, and packed by itself. All data-parallel ranks call
    together. `log_probs` is nested [N, tokens], as the engine returned it; `step` picks the rollouts.
    """
    module, device = engine.module, log_probs.device
    chosen = canary.picked(rollouts.response_lens.tolist(), ROLLOUTS, step)
    pairs: list[canary.Pair] = []
    with canary.quiet(module, device, step) as (same_noise, was_noisy):
        if was_noisy:
            log_probs = _log_probs(engine, micro_batch, verl_data.pack(micro_batch, rollouts))
        of_rollouts = log_probs.unbind()
        for i in chosen:
            one = tu.index_select_tensor_dict(micro_batch, [i])
            by_itself = verl_data.pack(one, rollouts.select(np.array([i])))
            rows = by_itself.sequence_rows.to(device)
            same_noise()
            with _rows_on_one_rank(engine):
                alone = _log_probs(engine, one, None)
            same_noise()
            itself = _log_probs(engine, one, by_itself)
            pairs.append((of_rollouts[i][rows], alone.unbind()[0][rows], itself.unbind()[0][rows]))
    computed = {torch.float32, getattr(engine, "_autocast_dtype", torch.bfloat16)}
    # The standard deviation of logits, which not every head of veRL makes, is taken for 1.
    dtype, layers = canary.coarsest(module, computed, device), canary.num_layers(module)
    return canary.judge(canary.compare(pairs, dtype, 1.0, layers, device, engine.get_data_parallel_group()))


@contextmanager
def _rows_on_one_rank(engine: Any) -> Iterator[None]:
    """Make each rank compute all rows in this context. veRL splits rows with FlashAttention alone, and the canary is to
    be as little like the packed call as it can."""
    before = engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size
    group = ulysses.get_ulysses_sequence_parallel_group()
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = False, 1
    ulysses.set_ulysses_sequence_parallel_group(None)
    try:
        yield
    finally:
        engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = before
        ulysses.set_ulysses_sequence_parallel_group(group)


def _log_probs(engine: Any, micro_batch: TensorDict, packed: PackedRollouts | None) -> torch.Tensor:
    """Nested [N, tokens]; without `packed` as veRL computes them."""
    output = engine.forward_of(micro_batch, packed)
    found: torch.Tensor = output["model_output"]["log_probs"]
    return found
