"""`python -m tools.bench.real_layers --json docs/results/real-layers-h200.json`: attention of a real model's layers.

Random numbers have neither the massive activations of trained models nor their attention sinks. This takes q, k, v of
every layer of a model on a long text, divided into a prompt and responses, and compares attention of the packed group,
forward and backward, with float64. FlashAttention computes the same from the separate sequences, in the same dtype;
gradients of the prompt's keys and values are summed over these in fp32.
"""

from __future__ import annotations

import math
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dualkv
from dualkv import Layout
from dualkv.data.rollouts import load_tokenizer
from dualkv.models import load_model
from tools.bench.record import OptionalJsonPath, Record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = 128  # keys of a block of the forward
OUTGROWN = 64  # the forward recomputes rows whose probabilities exceed 2^64 over the maximum up to their own block
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def capture(model: Any, sequences: list[torch.Tensor]) -> list[list[Rows]]:
    """q [P + R, H, D], k and v [P + R, Hk, D] of each sequence [P + R], by layer."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: list[list[Rows]] = [[] for _ in range(model.config.num_hidden_layers)]

    def keep(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        layers[module.layer_idx].append((query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)))
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    AttentionInterface.register("captured", keep)
    model.set_attn_implementation("captured")
    with torch.no_grad():
        for ids in sequences:
            model.model(input_ids=ids[None], use_cache=False)
    return layers


def packed(parts: list[torch.Tensor], prompt_len: int) -> torch.Tensor:
    """The rows of a group: the first sequence's prompt, and each one's response."""
    return torch.cat([parts[0][:prompt_len], *(part[prompt_len:] for part in parts)])


def dense(rows: list[torch.Tensor], seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [T, H, D] in float64, and the base-2 scores [H, T, T] of all pairs, -inf where they are not seen."""
    q, k, v = (x.double().transpose(0, 1) for x in rows)
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = (q @ k.mT * (q.shape[-1] ** -0.5 / math.log(2))).masked_fill(~seen, float("-inf"))
    return ((scores * math.log(2)).softmax(-1) @ v).transpose(0, 1), scores.detach()


def separate(rows: list[torch.Tensor], prompt_len: int, lens: list[int], dout: torch.Tensor) -> list[torch.Tensor]:
    """(out, dq, dk, dv) of the group by FlashAttention on each sequence; rows of the prompt count in the first one."""
    found: list[list[torch.Tensor]] = []
    own = dout[prompt_len:].split(lens)
    parts = [x[prompt_len:].split(lens) for x in rows]
    for i in range(len(lens)):
        leaves = [torch.cat([x[:prompt_len], part[i]]).requires_grad_() for x, part in zip(rows, parts, strict=True)]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if dout.is_cuda else SDPBackend.MATH):
            q, k, v = (x.transpose(0, 1)[None] for x in leaves)
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        counted = dout[:prompt_len] if i == 0 else torch.zeros_like(dout[:prompt_len])
        out.backward(torch.cat([counted, own[i]]))
        found.append([out.detach(), *gradients(leaves)])
    results = [packed([part[n] for part in found], prompt_len).float() for n in range(4)]
    for n in (2, 3):
        results[n][:prompt_len] = sum(part[n][:prompt_len].float() for part in found)
    return results


def gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.grad for x in leaves if x.grad is not None]


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def judge(rows: list[torch.Tensor], prompt_len: int, lens: list[int], layout: Layout) -> dict[str, Any]:
    """Figures of one layer."""
    number = torch.tensor(
        [0] * prompt_len + [i + 1 for i, n in enumerate(lens) for _ in range(n)], device=rows[0].device
    )
    at = torch.arange(len(number), device=number.device)
    seen = (at[:, None] >= at) & ((number == 0) | (number[:, None] == number))
    generator = torch.Generator(rows[0].device).manual_seed(0)
    dout = torch.randn(rows[0].shape, generator=generator, device=rows[0].device).to(rows[0].dtype)
    wide = [x.double().requires_grad_() for x in rows]
    truth, scores = dense(wide, seen)
    truth.backward(dout.double())
    expected = [truth.detach(), *gradients(wide)]
    leaves = [x.clone().requires_grad_() for x in rows]
    out = dualkv.attention(leaves[0], leaves[1], leaves[2], layout)
    out.backward(dout)
    ours = [out.detach(), *gradients(leaves)]
    theirs = separate(rows, prompt_len, lens, dout)
    near = (at[:, None] // BLOCK == at // BLOCK) & seen
    above = scores.amax(-1) - scores.masked_fill(~near, float("-inf")).amax(-1)
    names = ("out", "dq", "dk", "dv")
    share = (scores * math.log(2)).softmax(-1)[..., 0]
    norms = rows[1].float().norm(dim=-1)
    return {
        "error": {name: relative(x, y) for name, x, y in zip(names, ours, expected, strict=True)},
        "error_of_flash": {name: relative(x, y) for name, x, y in zip(names, theirs, expected, strict=True)},
        "largest_score": float(scores.masked_fill(~seen, 0).abs().max()) * math.log(2),
        "share_of_first_token": float(share.mean()),
        "largest_key_norm_over_median": float(norms.max() / norms.median()),
        "above_own_block_log2": float(above.max()),
        "rows_outgrown": int((above > OUTGROWN).sum()),
    }


def main(
    json_to: OptionalJsonPath = None,
    model: Annotated[str, typer.Option(help="A model with weights: smollm2, a folder or a GGUF file.")] = "smollm2",
    prompt_len: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    response_len: Annotated[int, typer.Option(help="Tokens of each response.")] = 200,
    responses: Annotated[int, typer.Option(help="Responses.")] = 4,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    layers: Annotated[int | None, typer.Option(help="Only so many layers; the first ones.")] = None,
) -> None:
    """Compare attention of a real model's layers with float64."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record(json_to, gpu=device.type == "cuda")
    loaded = load_model(model, DTYPES[dtype], device, 0)
    text = torch.tensor(load_tokenizer(model).encode("\n\n".join(topics[name] for name in sorted(topics))[:200_000]))
    prompt, pieces = text[:prompt_len], text[prompt_len:].split(response_len)
    sequences = [torch.cat([prompt, piece]).to(device) for piece in pieces[:responses]]
    layout = Layout.from_lengths([prompt_len], [[response_len] * responses], device)
    found = []
    for number, parts in enumerate(capture(loaded, sequences)[:layers]):
        rows = [packed([part[n] for part in parts], prompt_len).contiguous() for n in range(3)]
        found.append(judge(rows, prompt_len, [response_len] * responses, layout))
        print(number, found[-1], flush=True)
        figures = {"model": model.rpartition("/")[2], "dtype": dtype, "prompt_len": prompt_len}
        record.write(figures | {"response_len": response_len, "responses": responses, "layers": found})


if __name__ == "__main__":
    typer.run(main)
