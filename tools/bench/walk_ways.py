"""The ways in which the benchmark of walks runs a job: cut into micro-batches, and walked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dualkv.branches import Branch
from dualkv.data.memory import RowCosts
from dualkv.data.parts import TreePart
from dualkv.data.trees import PackedSequences, plan_sequences
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.logprobs import response_logprobs
from dualkv.row_costs import measure_rows
from dualkv.walks import walk
from tools.bench import harness


class Runner:
    """A transformers model, and the ways to run a job; `sizes` and jobs are those of :mod:`tools.bench.walk`."""

    def __init__(self, sizes: Any, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        config = harness.make_config(sizes.model, sizes.layers)
        self.model = enable(harness.make_model(config, sizes.dtype, device))
        self.head = head(self.model)
        recompute_layers(self.model, "nothing")
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.compiled = device.type == "cuda"

    def forward(self, ids: torch.Tensor, rows: Any) -> torch.Tensor:
        hidden: torch.Tensor = self.model.get_decoder()(input_ids=ids, dualkv=rows, use_cache=False).last_hidden_state
        return hidden

    def values(self, part: str, hidden: torch.Tensor, rows: PackedSequences | TreePart) -> torch.Tensor:
        """Compute [m] values of trained tokens: a sum of hidden states, or log-probs."""
        if part == "layers":
            return hidden[0, rows.predict_rows].float().sum(-1) / hidden.shape[-1]
        return response_logprobs(hidden, self.head, rows, chunk_size=self.sizes.chunk_size, compiled=self.compiled)[0]

    def of_batch(self, part: str, batch: PackedSequences) -> torch.Tensor:
        """Compute the values of the trained tokens of a packed micro-batch."""
        return self.values(part, self.forward(batch.input_ids, batch.layout), batch)

    def cut(self, part: str, job: Any) -> Callable[[], list[torch.Tensor]]:
        batches = [job.pack(chosen, self.device) for chosen in plan_sequences(job.sequences, job.rows)]

        def run() -> list[torch.Tensor]:
            found = []
            for batch in batches:
                values = torch.cat(batch.unpack(self.of_batch(part, batch)))
                (values.sum() / 1000).backward()
                found.append(values.detach().sum())
            return found

        return run

    def walked(self, part: str, batch: PackedSequences, parts: list[TreePart]) -> Callable[[], list[torch.Tensor]]:
        def run() -> list[torch.Tensor]:
            found = []

            def loss(hidden: torch.Tensor, rows: TreePart) -> torch.Tensor:
                values = rows.expand(self.values(part, hidden, rows))
                found.append(values.detach().sum())
                return values.sum() / 1000

            walk(batch, parts, self.forward, loss)
            return found

        return run

    def costs(self, job: Any) -> RowCosts:
        """Measure the bytes of a row."""
        tokens = job.sequences[0].to(self.device)

        def loss(hidden: torch.Tensor, part: TreePart) -> torch.Tensor:
            return self.values("update", hidden, part).sum()

        def forward(ids: torch.Tensor, branch: Branch) -> torch.Tensor:
            return self.forward(ids, branch)

        config, layer = self.model.config, self.model.get_decoder().layers[0]
        head_dim = getattr(config, "head_dim", config.hidden_size)
        return measure_rows(forward, tokens, loss, **self.rows_and_pairs(job, layer, head_dim))

    def rows_and_pairs(self, job: Any, layer: torch.nn.Module, head_dim: int) -> dict[str, Any]:
        """Choose the rows to measure, and the pairs that cost as much as a row of the layer."""
        weights = sum(parameter.numel() for parameter in layer.parameters())
        rows = min(1024, max(16, job.rows // 16))
        return {"rows": rows, "pairs": weights / (2 * self.model.config.num_attention_heads * head_dim)}
