"""`python -m tools.bench.images --json images.json`: forward and backward of a group with images in its prompt.

A Qwen3-VL of the 8B model's shape, cut to some decoder layers, with its whole vision tower, which is trained. Packed,
each image goes through the tower and the decoder once; replicated, once for each response, in micro-batches. Both ways
compute checkpointed layers again, and only rows that predict response tokens reach the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer
from torch.nn.functional import pad

import dualkv
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.models import CONFIGS
from tools.bench.record import JsonPath, Record
from tools.bench.repeats import repeated

IMAGE, START, END = 10, 11, 12  # with random weights any ids do
ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
          "temporal_patch_size": 2, "spatial_merge_size": 2, "out_hidden_size": 4096, "num_position_embeddings": 2304,
          "deepstack_visual_indexes": [8, 16, 24]}  # fmt: skip
VOCABULARY = 1000  # ids of text are below
# For a test of the program itself.
TINY = {"depth": 3, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "deepstack_visual_indexes": [0, 1]}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    layers: int
    responses: int
    response_len: int
    images: int
    side: int
    text: int
    micro_batch: int
    repeats: int
    tiny: bool


def make_model(sizes: Sizes, device: torch.device) -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = CONFIGS["qwen3-8b"] | {"num_hidden_layers": sizes.layers, "rope_parameters": ROPE}
    text |= {"max_position_embeddings": 262144}
    if sizes.tiny:
        text |= {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        text["vocab_size"] = VOCABULARY
    vision = VISION | (TINY if sizes.tiny else {})
    fields = {k: v for k, v in text.items() if k not in ("model_type", "rope_theta")}
    config = Qwen3VLConfig(
        text_config=fields, vision_config=vision, image_token_id=IMAGE, vision_start_token_id=START,
        vision_end_token_id=END, tie_word_embeddings=False, dtype=torch.bfloat16 if device.type == "cuda" else None,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = Qwen3VLForConditionalGeneration._from_config(config)
    return recompute_layers(model.to(device).train())


def make_group(sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Ids of the prompt, of the responses, and what a processor returns for the prompt."""
    draw = torch.Generator().manual_seed(0)

    def words(count: int) -> torch.Tensor:
        return torch.randint(20, VOCABULARY, (count,), generator=draw)

    rows = sizes.side**2
    image = torch.cat([torch.tensor([START]), torch.full((rows,), IMAGE), torch.tensor([END])])
    each = sizes.text // (sizes.images + 1)
    pieces = [x for _ in range(sizes.images) for x in (words(each), image)]
    prompt = torch.cat([*pieces, words(sizes.text - each * sizes.images)])
    responses = [words(sizes.response_len).to(device) for _ in range(sizes.responses)]
    media = {
        "pixel_values": torch.randn(sizes.images * rows * 4, 3 * 2 * 16**2, generator=draw),
        "image_grid_thw": torch.tensor([[1, 2 * sizes.side, 2 * sizes.side]] * sizes.images),
        "mm_token_type_ids": (prompt == IMAGE).int()[None],
    }
    return prompt.to(device), responses, {name: value.to(device) for name, value in media.items()}


def run_packed(model: Any, sizes: Sizes, group: Any, weights: torch.Tensor) -> torch.Tensor:
    prompt, responses, media = group
    batch = dualkv.pack([prompt], [responses], media=[media])
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media).last_hidden_state
    logp, _ = dualkv.response_logprobs(hidden, head(model), batch)
    (logp * weights.flatten()).sum().backward()
    return logp.detach().view(weights.shape)


def run_replicated(model: Any, sizes: Sizes, group: Any, weights: torch.Tensor) -> torch.Tensor:
    prompt, responses, media = group
    found = []
    for begin in range(0, sizes.responses, sizes.micro_batch):
        some = torch.stack(responses[begin : begin + sizes.micro_batch])
        ids = torch.cat([prompt.expand(len(some), -1), some], 1)
        kinds = pad(media["mm_token_type_ids"], (0, sizes.response_len)).expand(len(some), -1)
        hidden = model.model(
            input_ids=ids,
            pixel_values=media["pixel_values"].repeat(len(some), 1),
            image_grid_thw=media["image_grid_thw"].repeat(len(some), 1),
            mm_token_type_ids=kinds,
            use_cache=False,
        ).last_hidden_state
        batch = dualkv.pack([prompt] * len(some), list(some), group_ids=range(len(some)))  # rows as in `ids`
        batch.layout.mark_used()
        logp = dualkv.response_logprobs(hidden.flatten(0, 1), head(model), batch)[0].view(some.shape)
        (logp * weights[begin : begin + sizes.micro_batch]).sum().backward()
        found.append(logp.detach())
    return torch.cat(found)


def timed(
    run: Callable[[], torch.Tensor], model: Any, repeats: int
) -> tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
    """Seconds and memory of a forward and backward; log-probs [N, R] and gradients of the last one."""
    gradients: dict[str, torch.Tensor] = {}

    def take_gradients() -> None:
        gradients.update((name, p.grad.cpu()) for name, p in model.named_parameters() if p.grad is not None)
        model.zero_grad(set_to_none=True)

    model.zero_grad(set_to_none=True)
    return *repeated(run, repeats, take_gradients), gradients


def measure(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    model, group = make_model(sizes, device), make_group(sizes, device)
    shape = sizes.responses, sizes.response_len
    weights = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) / sizes.response_len).to(device)
    held = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else None
    warm = [group[0], group[1][: sizes.micro_batch], group[2]]
    rows, logps, gradients = {}, {}, {}
    few = Sizes(**asdict(sizes) | {"responses": sizes.micro_batch})
    for way, run, repeats in (("replicated", run_replicated, 1), ("packed", run_packed, sizes.repeats)):
        if way == "packed":
            enable(model)
        run(model, few if way == "replicated" else sizes, warm if way == "replicated" else group,
            weights[: sizes.micro_batch] if way == "replicated" else weights)  # fmt: skip
        rows[way], logps[way], gradients[way] = timed(partial(run, model, sizes, group, weights), model, repeats)
    apart = {}
    for part in ("visual", "language_model", "lm_head"):
        names = [name for name in gradients["replicated"] if part in name]
        pairs = [(gradients["packed"][name].double(), gradients["replicated"][name].double()) for name in names]
        error, norm = (sum(float(x.square().sum()) for x in of) ** 0.5 for of in (
            [a - b for a, b in pairs], [b for _, b in pairs]))  # fmt: skip
        apart[part] = error / norm
    return {
        "rows": rows,
        "times_as_fast": rows["replicated"]["median"] / rows["packed"]["median"],
        "weights_gib": held,
        "logp_rms_apart": float((logps["packed"] - logps["replicated"]).double().square().mean().sqrt()),
        "gradients_apart": apart,
    }


def main(
    json_to: JsonPath,
    layers: Annotated[int, typer.Option(help="Of the decoder.")] = 8,
    responses: Annotated[int, typer.Option("--responses", "-n", help="Of the one prompt.")] = 16,
    response_len: Annotated[int, typer.Option("--response-len", "-r", help="Tokens of each response.")] = 1024,
    images: Annotated[int, typer.Option(help="Of the prompt.")] = 4,
    side: Annotated[int, typer.Option(help="Tokens a side of an image: 32 are 1,024 tokens.")] = 32,
    text: Annotated[int, typer.Option(help="Tokens of text in the prompt.")] = 500,
    micro_batch: Annotated[int, typer.Option(help="Replicated sequences at once; packed, the group is.")] = 4,
    repeats: Annotated[int, typer.Option(help="Packed; replicated it is one, after one micro-batch.")] = 3,
    tiny: Annotated[bool, typer.Option(help="A narrow model, to try the program.")] = False,
) -> None:
    """Measure forward and backward of a group with images, replicated and packed."""
    sizes = Sizes(layers, responses, response_len, images, side, text, micro_batch, repeats, tiny)
    cuda = torch.cuda.is_available()
    record = Record(json_to, cuda)
    figures = measure(sizes, torch.device("cuda" if cuda else "cpu"))
    record.write({"sizes": asdict(sizes), **figures})
    for name, value in figures.items():
        print(name, value, flush=True)


if __name__ == "__main__":
    typer.run(main)
