"""Micro-batches of sequences that share much, under SkyRL's own budget, which then counts packed tokens.

SkyRL's micro-batches balance tokens and take sequences of any prompt. Most of its losses are sums or means over
sequences, which do not depend on micro-batches. Two kinds do:

- The entropy bonus is a mean over a micro-batch's tokens, weighted by its sequences. Each token keeps the weight that
  it has in SkyRL's own micro-batches.
- Policy losses that select among the tokens of a micro-batch (clip_cov, kl_cov), and those that are not SkyRL's own:
  there SkyRL's micro-batches stay.
"""

from __future__ import annotations

from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossType
from skyrl.backends.skyrl_train.workers.worker_utils import TokenBasedBatchIterator

from dualkv.data.gain import MIN_SHARED
from dualkv.data.trees import plan_sequences
from dualkv.integrations import patching

WEIGHTS = f"{patching.OURS}entropy_weights"  # a name in the metadata of micro-batches
# The policy losses that are sums over sequences, each of which is a function of one sequence.
SUMS = {
    PolicyLossType.REGULAR,
    PolicyLossType.DUAL_CLIP,
    PolicyLossType.GSPO,
    PolicyLossType.SAPO,
    PolicyLossType.CISPO,
    PolicyLossType.DPPO,
    PolicyLossType.ROLLOUT_IS,
    PolicyLossType.CROSS_ENTROPY,
    PolicyLossType.IMPORTANCE_SAMPLING,
}


class PackedBatchIterator(TokenBasedBatchIterator):
    """SkyRL's iterator of micro-batches under a budget of tokens, which counts packed tokens.

    Ranks with fewer micro-batches than others get SkyRL's padding ones. A sequence above the budget has a micro-batch
    with those that it begins with. `weighted` micro-batches have in their metadata the weight [b] that the entropy of
    each trained token of a sequence has in the mean over SkyRL's own micro-batches.
    """

    def __init__(self, data: Any, max_tokens_per_microbatch: int, weighted: bool = False) -> None:
        super().__init__(data, max_tokens_per_microbatch)
        self._weights = self._stock_weights() if weighted else None
        self._microbatches = plan_sequences(
            data["sequences"],
            max_tokens_per_microbatch,
            attention_mask=data["attention_mask"],
            min_shared=MIN_SHARED,
            soft=True,
        )
        self._num_padding_microbatches = self._sync_num_microbatches() - len(self._microbatches)

    def _stock_weights(self) -> torch.Tensor:
        trained = self.data["loss_mask"].sum(1)
        weights = trained.new_zeros(trained.shape, dtype=torch.float32)
        for own in self._microbatches:
            weights[own] = len(own) / len(self.data) / trained[own].sum().clamp(min=1)
        return weights

    def _create_microbatch_from_indices(self, indices: list[int]) -> Any:
        microbatch = super()._create_microbatch_from_indices(indices)
        if self._weights is not None:
            microbatch.metadata = {**(microbatch.metadata or {}), WEIGHTS: self._weights[indices]}
        return microbatch
