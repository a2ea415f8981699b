"""`python -m tools.bench.real_layers --json docs/results/real-layers-h200.json`: attention of a real model's layers.

Random numbers have neither the massive activations of trained models nor their attention sinks. This takes q, k, v of
every layer of a model in fp32 on a long text, divided into a prompt and responses, rounds them to 16 bits, and compares
attention, forward and backward, with float64: of the packed group, of the same rows as a tree of three levels, and of
FlashAttention from the separate sequences. Its gradients of the prompt's keys and values are summed over these in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from itertools import accumulate
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dualkv
from dualkv import Layout
from dualkv.bench.fa4 import Varlen
from dualkv.bench.inputs import Inputs, added
from dualkv.bench.show import markdown_table
from dualkv.bench.workloads import Workload
from dualkv.data.rollouts import load_tokenizer
from dualkv.models import load_model
from tools.bench.record import OptionalJsonPath, Record

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = 128  # keys of a block of the forward
NAMES = "out", "dq", "dk", "dv"
WAYS = {  # of a record, and of the table
    "groups": "packed",
    "tree": "packed as a tree",
    "fa4": "separate, FlashAttention-4",
    "sdpa": "separate, FlashAttention of PyTorch's SDPA",
}
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Results = list[torch.Tensor]


def capture(model: Any, sequences: list[torch.Tensor]) -> tuple[list[list[Rows]], list[float]]:
    """q [P + R, H, D], k and v [P + R, Hk, D] of each sequence [P + R], by layer; and the scale of each layer's scores.

    Raises:
        ValueError: a layer that is not plain full attention.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: dict[int, list[Rows]] = {}
    scales: dict[int, float] = {}

    def keep(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, **named: Any) -> Any:
        layer = module.layer_idx
        for feature in ("sliding_window", "softcap", "s_aux"):
            if named.get(feature) is not None:
                raise ValueError(f"layer {layer} has {feature}, expected a model with full attention alone")
        layers.setdefault(layer, []).append(
            (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
        )
        scales[layer] = named.get("scaling") or query.shape[-1] ** -0.5
        return sdpa_attention_forward(module, query, key, value, *rest, **named)

    AttentionInterface.register("captured", keep)
    model.set_attn_implementation("captured")
    with torch.no_grad():
        for ids in sequences:
            model.base_model(input_ids=ids[None], use_cache=False)
    return [layers[i] for i in sorted(layers)], [scales[i] for i in sorted(scales)]


def packed(parts: list[torch.Tensor], prompt_len: int) -> torch.Tensor:
    """The rows of a group: the first sequence's prompt, and each one's response."""
    return torch.cat([parts[0][:prompt_len], *(part[prompt_len:] for part in parts)])


def dense(rows: list[torch.Tensor], seen: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [T, H, D] in float64, and the base-2 scores [H, T, T] of all pairs, -inf where they are not seen."""
    q, k, v = (x.double().transpose(0, 1) for x in rows)
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = (q @ k.mT * (scale / math.log(2))).masked_fill(~seen, float("-inf"))
    return ((scores * math.log(2)).softmax(-1) @ v).transpose(0, 1), scores.detach()


def with_gradients(leaves: list[torch.Tensor], dout: torch.Tensor, attend: Callable[..., torch.Tensor]) -> Results:
    """(out, dq, dk, dv) of attention over copies of the leaves."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def by_sdpa(rows: list[torch.Tensor], workload: Workload, scale: float, dout: torch.Tensor) -> Results:
    """(out, dq, dk, dv) of the group by SDPA on each sequence; rows of the prompt count in the first one."""

    def attend(*leaves: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if dout.is_cuda else SDPBackend.MATH):
            q, k, v = (x.transpose(0, 1)[None] for x in leaves)
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    (prompt_len,), (lens,) = workload.prompt_lens, workload.response_lens
    own = dout[prompt_len:].split(lens)
    parts = [x[prompt_len:].split(lens) for x in rows]
    found = []
    for i in range(len(lens)):
        leaves = [torch.cat([x[:prompt_len], part[i]]) for x, part in zip(rows, parts, strict=True)]
        counted = dout[:prompt_len] if i == 0 else torch.zeros_like(dout[:prompt_len])
        found.append(with_gradients(leaves, torch.cat([counted, own[i]]), attend))
    results = [packed([part[n] for part in found], prompt_len).float() for n in range(4)]
    for n in (2, 3):
        results[n][:prompt_len] = torch.stack([part[n][:prompt_len].float() for part in found]).sum(0)
    return results


def by_fa4(rows: list[torch.Tensor], workload: Workload, scale: float, dout: torch.Tensor) -> Results:
    """(out, dq, dk, dv) of the group by FlashAttention-4 on all sequences; each has a part of the prompt's dout."""
    inputs = Inputs(workload, str(dout.device))
    (inputs.q, inputs.k, inputs.v), inputs.dout, inputs.scale = rows, dout, scale
    call = Varlen(inputs, inputs.replicated(), inputs.replicated(), True)
    call.forward()
    out = inputs.empty()
    out[call.q_rows] = call.out
    call.ready()
    call.backward()
    parts = (rows[0], call.q_rows, call.dq), (rows[1], call.k_rows, call.dk), (rows[2], call.k_rows, call.dv)
    return [out, *(added(like.float(), [(at, x)]) for like, at, x in parts)]  # their sums stay fp32


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def judge(rows: list[torch.Tensor], workload: Workload, scale: float) -> dict[str, Any]:
    """Figures of one layer."""
    device, (prompt_len,), (lens,) = rows[0].device, workload.prompt_lens, workload.response_lens
    number = torch.tensor([0] * prompt_len + [i + 1 for i, n in enumerate(lens) for _ in range(n)], device=device)
    at = torch.arange(len(number), device=device)
    seen = (at[:, None] >= at) & ((number == 0) | (number[:, None] == number))
    generator = torch.Generator(device).manual_seed(0)
    dout = torch.randn(rows[0].shape, generator=generator, device=device).to(rows[0].dtype)
    kept = []

    def true(*leaves: torch.Tensor) -> torch.Tensor:
        out, scores = dense(list(leaves), seen, scale)
        kept.append(scores)
        return out

    truth = with_gradients([x.double() for x in rows], dout.double(), true)
    half = prompt_len // 2
    offsets = [0, *accumulate([half, prompt_len - half, *lens])]
    layouts = {
        "groups": workload.layout(str(device)),
        "tree": Layout.from_segments(offsets, [-1, 0, *[1] * len(lens)], device),
    }
    found, recomputed = {}, {}
    for name, layout in layouts.items():
        with dualkv.RecomputePasses() as passes:
            found[name] = with_gradients(
                rows, dout, lambda q, k, v, layout=layout: dualkv.attention(q, k, v, layout, scale)
            )
        recomputed[name] = {"rows": passes.rows, "tiles": passes.tiles, "of_tiles": passes.all_tiles}
    if device.type == "cuda" and rows[0].dtype != torch.float32:
        with suppress(ModuleNotFoundError):
            found["fa4"] = by_fa4(rows, workload, scale, dout)
    found["sdpa"] = by_sdpa(rows, workload, scale, dout)
    (scores,) = kept
    near = (at[:, None] // BLOCK == at // BLOCK) & seen
    above = scores.amax(-1) - scores.masked_fill(~near, float("-inf")).amax(-1)
    share = (scores * math.log(2)).softmax(-1)[..., 0]
    keys, values = ((x.double().norm(dim=-1) / x.double().norm(dim=-1).median(0).values) for x in rows[1:])
    return {
        "error": {
            way: {name: relative(x, y) for name, x, y in zip(NAMES, results, truth, strict=True)}
            for way, results in found.items()
        },
        "recomputed": recomputed,
        "largest_score": float(scores.masked_fill(~seen, 0).abs().max()) * math.log(2),
        "share_of_first_token": float(share.mean()),
        "above_own_block_log2": float(above.max()),
        "norm_over_median": {  # of a KV head
            "largest_key": float(keys.max()),
            "first_key": [float(keys[0].min()), float(keys[0].max())],
            "first_value": [float(values[0].min()), float(values[0].max())],
        },
        "largest_q": float(rows[0].abs().max()),
        "largest_k": float(rows[1].abs().max()),
    }


def markdown(record: dict[str, Any]) -> str:
    """Tabulate the largest errors of any layer."""
    by_dtype = list(record["dtypes"].values())
    rows = []
    for way in by_dtype[0][0]["error"]:
        errors = [[max(layer["error"][way][name] for layer in layers) for layers in by_dtype] for name in NAMES]
        rows.append([WAYS[way], *(" / ".join(f"{error:.1e}" for error in of_dtypes) for of_dtypes in errors)])
    layers = [layer for layers in by_dtype for layer in layers]
    passes = [layer["recomputed"][way] for layer in layers for way in layer["recomputed"]]
    tiles, of_tiles = (sum(found[name] for found in passes) for name in ("tiles", "of_tiles"))
    score, share, above = (
        max(layer[name] for layer in layers)
        for name in ("largest_score", "share_of_first_token", "above_own_block_log2")
    )
    value = min(layer["norm_over_median"]["first_value"][0] for layer in layers)
    return markdown_table([f"error, {' / '.join(record['dtypes'])}", *NAMES], rows) + (
        f"\n\nThe largest score is {score:.0f}. The first token gets up to {100 * share:.0f} % of a layer's attention,"
        f" and the norm of its value is down to {value:.2f} of the median. Scores are up to 2^{above:.0f} above the"
        f" largest of their row's own block: of {of_tiles:,} tiles at most {tiles:,} took a"
        " [recompute pass](design.md#forward)."
    )


def main(
    json_to: OptionalJsonPath = None,
    model: Annotated[str, typer.Option(help="A model with weights: smollm2, a folder or a GGUF file.")] = "smollm2",
    prompt_len: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 4096,
    response_len: Annotated[int, typer.Option(help="Tokens of each response.")] = 200,
    responses: Annotated[int, typer.Option(help="Responses.")] = 4,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(DTYPES)}; bf16 and fp16 by default.")] = None,
    layers: Annotated[int | None, typer.Option(help="Only so many layers; the first ones.")] = None,
) -> None:
    """Compare attention of a real model's layers with float64."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record(json_to, gpu=device.type == "cuda")
    loaded = load_model(model, torch.float32, device, 0)
    text = torch.tensor(load_tokenizer(model).encode("\n\n".join(topics[name] for name in sorted(topics))[:200_000]))
    prompt, pieces = text[:prompt_len], text[prompt_len:].split(response_len)
    sequences = [torch.cat([prompt, piece]).to(device) for piece in pieces[:responses]]
    captured, scales = capture(loaded, sequences)
    del loaded
    figures: dict[str, Any] = {"model": model.rpartition("/")[2], "prompt_len": prompt_len}
    figures |= {"response_len": response_len, "responses": responses, "dtypes": {}}
    for name in dtype or ("bf16", "fp16"):
        found = figures["dtypes"][name] = []
        for number, (parts, scale) in enumerate(zip(captured[:layers], scales, strict=False)):
            rows = [packed([part[n] for part in parts], prompt_len).to(DTYPES[name]).contiguous() for n in range(3)]
            (_, heads, head_dim), (_, kv_heads, head_dim_v) = rows[0].shape, rows[2].shape
            shape: dict[str, Any] = {
                "heads": heads,
                "kv_heads": kv_heads,
                "head_dim": head_dim,
                "head_dim_v": head_dim_v,
            }
            lens = (response_len,) * responses
            of_layer = Workload("real", (prompt_len,), (lens,), dtype="fp16" if name == "fp16" else "bf16", **shape)
            found.append(judge(rows, of_layer, scale))
            record.write(figures, [name, number, found[-1]])


if __name__ == "__main__":
    typer.run(main)
