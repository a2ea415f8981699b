"""The ways of :mod:`tools.bench.walk` in a megatron-core model, as :mod:`tools.bench.megatron` builds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._dynamo.config

from dualkv.data.memory import RowCosts
from dualkv.data.parts import TreePart
from dualkv.data.trees import PackedSequences, plan_sequences
from dualkv.integrations.megatron import PackedGroups, measure_rows, walk_passes
from dualkv.models import CONFIGS
from tools.bench.megatron import Run, hidden_states, logprobs, make_model
from tools.bench.megatron_costs import Model


@dataclass
class MegatronRunner:
    """The model, and the ways to run a job, like :class:`tools.bench.walk.Runner`.

    Attributes:
        sizes: `tools.bench.walk.Sizes`.
    """

    sizes: Any
    device: torch.device

    def __post_init__(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # of megatron-core's compiled functions, which see many forms
        dtype, cuda = getattr(torch, self.sizes.dtype), self.device.type == "cuda"
        shape = Model.of(CONFIGS[self.sizes.model], self.sizes.layers)
        self.model = make_model(Run(shape, 1, 1, 1, self.sizes.chunk_size, dtype, cuda, self.device))
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def values(self, part: str, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute [m] values of tokens from the hidden states [m, C] that predict them."""
        if part == "layers":
            return hidden.float().sum(-1) / hidden.shape[-1]
        return logprobs(self.model, hidden, targets, self.sizes.chunk_size)

    def cut(self, part: str, job: Any) -> Callable[[], list[torch.Tensor]]:
        batches = [job.pack(chosen, self.device) for chosen in plan_sequences(job.sequences, job.rows)]

        def run() -> list[torch.Tensor]:
            found = []
            for batch in batches:
                rows = PackedGroups(batch)
                hidden = hidden_states(self.model, batch.input_ids, batch.position_ids, None, packed_seq_params=rows)
                values = self.values(part, hidden[batch.predict_rows, 0], batch.targets)
                values = torch.cat(batch.unpack(values))
                (values.sum() / 1000).backward()
                found.append(values.detach().sum())
            return found

        return run

    def walked(self, part: str, batch: PackedSequences, parts: list[TreePart]) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            found = []
            for one in walk_passes(self.model, [batch], parts):
                loss = None
                with one:
                    ids, positions, rows = one.input_ids, one.position_ids, one.packed
                    hidden = hidden_states(self.model, ids, positions, None, packed_seq_params=rows)
                    if one.has_loss:
                        mine = one.predictions
                        values = one.part.expand(self.values(part, hidden[mine.predict_rows, 0], mine.targets))
                        found.append(values.detach().sum())
                        loss = values.sum() / 1000
                del hidden
                one.backward(loss)
            return found

        return run

    def costs(self, job: Any) -> RowCosts:
        config = self.model.config
        weights = sum(parameter.numel() for parameter in self.model.decoder.layers[0].parameters())
        rows = min(1024, max(16, job.rows // 16))
        pairs = weights / (2 * config.num_attention_heads * config.kv_channels)

        def loss(hidden: torch.Tensor, one: Any) -> torch.Tensor:
            mine = one.predictions
            return self.values("update", hidden[mine.predict_rows, 0], mine.targets).sum()

        with mock.patch.object(self.model, "post_process", False):  # the head is in `loss`
            return measure_rows(self.model, job.sequences[0].to(self.device), loss, rows=rows, pairs=pairs)
