"""Multi-token prediction on packed rows: what its gradients would be if the next row were taken for the next token.

    python -m tools.bench.prediction --json docs/results/prediction-cpu.json

A small Qwen3 with one prediction layer as transformers builds it (DeepSeek-V3's: the hidden state of a token beside the
embedding of the next one), random weights, on the CPU. The layer's losses of response tokens, three ways:

- separate: every sequence alone;
- next_row: packed, tokens rolled by one row, as megatron-core rolls them. The prompt's last row gets the first token of
  the first response, and all responses attend to it;
- copied: packed, the prompt's last row once for each response.

Gradients of the last two are compared with those of the first, as norms of differences over the norm: of the
prediction layer, and of the model below it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer

import dualkv
from dualkv.integrations.transformers import selfcheck
from tools.bench.record import OptionalJsonPath, Record

VOCABULARY = 128
SHAPE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    prompt: int = 64
    responses: tuple[int, ...] = (32, 20, 44, 12, 27, 38, 16, 50)


@dataclass
class Rows:
    """Rows of a prediction layer: each has the hidden state of a row of the model, and a next token.

    Attributes:
        states, tokens: [n] rows of the model, and ids of next tokens.
        positions: [n] of the states.
        visible: [n, n] which rows see which.
        predict, targets: [m] rows with a loss, and the ids that they predict.
    """

    states: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    visible: torch.Tensor
    predict: torch.Tensor
    targets: torch.Tensor


class Predictor(torch.nn.Module):
    def __init__(self) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM, modeling_layers
        from transformers.models.qwen3 import modeling_qwen3 as qwen3

        super().__init__()
        config = Qwen3Config(vocab_size=VOCABULARY, **SHAPE, attn_implementation="eager")
        torch.manual_seed(0)
        self.below = Qwen3ForCausalLM(config)
        self.layer = modeling_layers.MtpLayer(config, qwen3.Qwen3DecoderLayer, qwen3.Qwen3RMSNorm, 0)
        with torch.no_grad():
            selfcheck.randomize(self, seed=0)
        self.double()

    def losses(self, hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
        """[m] from the model's hidden states [T, C]."""
        states, positions = hidden[rows.states][None], rows.positions[None]
        mask = torch.zeros(rows.visible.shape, dtype=hidden.dtype).masked_fill(~rows.visible, -1e9)[None, None]
        rotary = self.below.model.rotary_emb(states, positions)
        out = self.layer(self.below.model.embed_tokens(rows.tokens)[None], states, rotary, mask, positions, None)
        logits = self.below.lm_head(out[0, rows.predict])
        return torch.nn.functional.cross_entropy(logits, rows.targets, reduction="none")

    def hidden(self, ids: torch.Tensor, visible: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] of the model below."""
        mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e9)[None, None]
        found: torch.Tensor = self.below.model(ids[None], attention_mask=mask, position_ids=positions[None])[0][0]
        return found

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        self.zero_grad()
        loss.backward()
        parts: dict[str, list[torch.Tensor]] = {"layer": [], "below": []}
        for name, parameter in self.named_parameters():
            if parameter.grad is not None:
                parts[name.partition(".")[0]].append(parameter.grad.flatten())
        return {name: torch.cat(some).clone() for name, some in parts.items()}


def seen(layout: dualkv.Layout) -> torch.Tensor:
    """[T, T] the rows that rows see."""
    found = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for path in selfcheck.sequence_rows(layout):
        rows = torch.tensor(path)
        found[rows[:, None], rows] = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
    return found


def rows_of(ids: torch.Tensor, layout: dualkv.Layout, prompt: int) -> Rows:
    """The rows of the prediction layer for packed rows `ids` [T], with copies of the prompt's last row."""
    paths = [torch.tensor(path) for path in selfcheck.sequence_rows(layout)]
    lens = [prompt - 1, *(len(path) - prompt for path in paths)]
    own = dualkv.Layout.from_segments([0, *torch.tensor(lens).cumsum(0).tolist()], [-1, *[0] * len(paths)])
    states, after = [paths[0][: prompt - 1]], [paths[0][1:prompt]]
    predict, targets, begin = [], [], prompt - 1
    for path in paths:  # a response's rows: the prompt's last row, and its own but the last
        states.append(path[prompt - 1 : -1])
        after.append(path[prompt:])
        found = torch.arange(begin - 1, begin + len(path) - prompt - 1)
        found[0] = prompt - 2  # the row with the prompt's last token predicts the first one of each response
        predict.append(found)
        targets.append(ids[path[prompt:]])
        begin += len(path) - prompt
    rows = torch.cat(states)
    positions = layout.position_ids[rows]
    return Rows(rows, ids[torch.cat(after)], positions, seen(own), torch.cat(predict), torch.cat(targets))


def next_rows(ids: torch.Tensor, layout: dualkv.Layout, prompt: int) -> Rows:
    """The rows of the prediction layer if every next token were that of the next row."""
    predict = torch.arange(prompt - 2, layout.num_tokens - 2)
    return Rows(
        torch.arange(layout.num_tokens), ids.roll(-1), layout.position_ids, seen(layout), predict, ids[predict + 2]
    )


def measure(sizes: Sizes) -> dict[str, dict[str, float]]:
    """Compute the distances of gradients, by way and part."""
    draw = torch.Generator().manual_seed(1)
    layout = dualkv.Layout.from_lengths([sizes.prompt], [list(sizes.responses)])
    ids = torch.randint(VOCABULARY, (layout.num_tokens,), generator=draw)
    model = Predictor()
    alone = torch.zeros((), dtype=torch.float64)
    for path in selfcheck.sequence_rows(layout):
        own = dualkv.Layout.from_lengths([sizes.prompt], [[len(path) - sizes.prompt]])
        hidden = model.hidden(ids[path], seen(own), own.position_ids)
        alone = alone + model.losses(hidden, rows_of(ids[path], own, sizes.prompt)).sum()
    expected = model.gradients(alone)
    found: dict[str, dict[str, float]] = {}
    for name, make in {"next_row": next_rows, "copied": rows_of}.items():
        hidden = model.hidden(ids, seen(layout), layout.position_ids)
        got = model.gradients(model.losses(hidden, make(ids, layout, sizes.prompt)).sum())
        found[name] = {part: float((got[part] - x).norm() / x.norm()) for part, x in expected.items()}
    return found


def main(json_to: OptionalJsonPath = None) -> None:
    record, sizes = Record(json_to, gpu=False), Sizes()
    found: dict[str, Any] = measure(sizes)
    for name, distances in found.items():
        print(f"{name:9}", ", ".join(f"{part} {value:.2e}" for part, value in distances.items()))
    record.write({"sizes": asdict(sizes), "distances": found})


if __name__ == "__main__":
    typer.run(main)
