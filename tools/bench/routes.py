"""Recorded routes of rollouts that share a prompt: on how many prompt rows they agree.

    python -m tools.bench.routes --json docs/results/routes-cpu.json

A model of what an inference engine records, on the CPU: a Qwen3-MoE with random weights in bf16 runs the prompt of
every rollout as an engine does that caches no prefix, in chunks, each in a batch with other sequences. Chunks and
batches differ from rollout to rollout, and so does the rounding. The first rollout's routes, which a packed
row replays, are compared with those of each other rollout:

- choices: the part of (row, layer) with the same set of experts;
- rows: the part of prompt rows with the same sets in all layers;
- prefix: the part of prompt rows above the first one that differs, which could share a row exactly.

`fp32` is the same run in fp32. An engine with a prefix cache computes a prompt once, and its rollouts agree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import typer

from tools.bench.record import OptionalJsonPath, Record

VOCABULARY = 512


@dataclass(frozen=True)
class Sizes:
    layers: int = 24
    hidden: int = 256
    experts: int = 64
    chosen: int = 8
    prompt: int = 512
    rollouts: int = 8


def make_model(sizes: Sizes, dtype: torch.dtype) -> Any:
    """Build the model with the same weights every time."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=sizes.hidden, intermediate_size=sizes.hidden, num_hidden_layers=sizes.layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=sizes.hidden // 8, num_experts=sizes.experts,
        num_experts_per_tok=sizes.chosen, moe_intermediate_size=sizes.hidden // 4, initializer_range=0.06,
        norm_topk_prob=True,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).to(dtype).eval()


@torch.no_grad()
def recorded(model: Any, prompt: torch.Tensor, draw: torch.Generator) -> torch.Tensor:
    """[P, L, k] the experts of a prompt's rows, in ascending order; chunks and the rest of the batch are random."""
    from transformers import DynamicCache

    beside = int(torch.randint(4, (), generator=draw))
    ids = torch.cat([prompt[None], torch.randint(VOCABULARY, (beside, len(prompt)), generator=draw)])
    cache, begin, found = DynamicCache(config=model.config), 0, []
    while begin < len(prompt):
        end = min(begin + int(torch.randint(32, 160, (), generator=draw)), len(prompt))
        out = model.model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, output_router_logits=True)
        own = [logits.view(len(ids), end - begin, -1)[0] for logits in out.router_logits]
        found.append(torch.stack([x.topk(model.config.num_experts_per_tok, -1).indices for x in own], 1))
        begin = end
    return torch.cat(found).sort(-1).values


def measure(sizes: Sizes, dtype: torch.dtype) -> dict[str, float]:
    """Compute the parts that agree, means over the other rollouts."""
    model, draw = make_model(sizes, dtype), torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCABULARY, (sizes.prompt,), generator=draw)
    first, *others = (recorded(model, prompt, draw) for _ in range(sizes.rollouts))
    same = torch.stack([(own == first).all(-1) for own in others])  # [N - 1, P, L]
    rows = same.all(-1)
    prefix = rows.int().cumprod(-1)
    return {name: float(x.float().mean()) for name, x in (("choices", same), ("rows", rows), ("prefix", prefix))}


def main(json_to: OptionalJsonPath = None) -> None:
    record, sizes = Record(json_to, gpu=False), Sizes()
    found: dict[str, Any] = {}
    for name, dtype in {"bf16": torch.bfloat16, "fp32": torch.float32}.items():
        found[name] = measure(sizes, dtype)
        record.write({"sizes": asdict(sizes), "agree": found}, {name: found[name]})


if __name__ == "__main__":
    typer.run(main)
