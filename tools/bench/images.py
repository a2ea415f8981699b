"""`python -m tools.bench.images --json images.json`: forward and backward of a group with images in its prompt, with
`--turns` also in each turn of its responses, as agents see screenshots; with `--walk` also in parts of so many rows.

    python -m tools.bench.images --json agent.json -n 8 --images 6 --text 1536 --turns 6 -r 256

A Qwen3-VL of the 8B model's shape, cut to some decoder layers, with its whole vision tower, which is trained. Packed,
each image goes through the tower and the decoder once; replicated, once for each response, in micro-batches. Both ways
compute checkpointed layers again, and only rows that predict text of responses reach the head.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch.nn.functional import pad

import dualkv
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.models import CONFIGS
from tools.bench import harness
from tools.bench.record import JsonPath, Record

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
    """The model and the group."""

    layers: harness.Layers = 8
    responses: harness.Responses = 16
    response_len: Annotated[
        int, typer.Option("--response-len", "-r", help="Tokens of text of each response, or of each turn.")
    ] = 1024
    images: Annotated[int, typer.Option(help="Of the prompt.")] = 4
    side: Annotated[int, typer.Option(help="Tokens a side of an image: 32 are 1,024 tokens.")] = 32
    text: Annotated[int, typer.Option(help="Tokens of text in the prompt.")] = 500
    micro_batch: harness.MicroBatch = 4
    repeats: harness.Repeats = 3
    turns: Annotated[int, typer.Option(help="Of a response, an image and text each; 0: it is text.")] = 0
    walk: Annotated[int, typer.Option(help="Rows of a part; 0: no walk.")] = 0
    tiny: Annotated[bool, typer.Option(help="A narrow model, to try the program.")] = False


class Group(NamedTuple):
    """Ids of the prompt and of the responses, which tokens of a response count, and what a processor returns for the
    prompt and for each sequence."""

    prompt: torch.Tensor
    responses: list[torch.Tensor]
    mask: torch.Tensor
    media: dict[str, torch.Tensor]
    of_sequences: list[dict[str, torch.Tensor]]


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


def make_group(sizes: Sizes, device: torch.device) -> Group:
    draw = torch.Generator().manual_seed(0)

    def words(count: int) -> torch.Tensor:
        return torch.randint(20, VOCABULARY, (count,), generator=draw)

    rows = sizes.side**2
    image = torch.cat([torch.tensor([START]), torch.full((rows,), IMAGE), torch.tensor([END])])
    each = sizes.text // (sizes.images + 1)
    pieces = [x for _ in range(sizes.images) for x in (words(each), image)]
    prompt = torch.cat([*pieces, words(sizes.text - each * sizes.images)])
    text = torch.full((sizes.response_len,), 20)
    blank = torch.cat([image, text]).repeat(sizes.turns) if sizes.turns else text
    mask = blank >= 20
    responses = [blank.masked_scatter(mask, words(int(mask.sum()))) for _ in range(sizes.responses)]

    def pixels(images: int) -> torch.Tensor:
        return torch.randn(images * rows * 4, 3 * 2 * 16**2, generator=draw).to(device)

    def media_of(ids: torch.Tensor, values: torch.Tensor) -> dict[str, torch.Tensor]:
        grids = torch.tensor([[1, 2 * sizes.side, 2 * sizes.side]] * (len(values) // rows // 4))
        kinds = (ids == IMAGE).int()[None]
        return {"pixel_values": values, "image_grid_thw": grids.to(device), "mm_token_type_ids": kinds.to(device)}

    shared = pixels(sizes.images)
    of_sequences = [
        media_of(torch.cat([prompt, one]), torch.cat([shared, pixels(sizes.turns)]) if sizes.turns else shared)
        for one in responses
    ]
    on_device = [one.to(device) for one in responses]
    return Group(prompt.to(device), on_device, mask, media_of(prompt, shared), of_sequences)


def packed(sizes: Sizes, group: Group) -> dualkv.PackedSequences:
    if sizes.turns:
        sequences = [torch.cat([group.prompt, one]) for one in group.responses]
        masks = [pad(group.mask, (len(group.prompt), 0))] * len(sequences)
        return dualkv.pack_sequences(sequences, masks, media=group.of_sequences)
    batch = dualkv.pack([group.prompt], [group.responses], media=[group.media])
    return dualkv.PackedSequences.from_batch(batch)


def run_walked(model: Any, sizes: Sizes, group: Group, weights: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(weights).flatten()

    def forward(input_ids: torch.Tensor, branch: Any) -> torch.Tensor:
        hidden: torch.Tensor = model.model(input_ids=input_ids, dualkv=branch).last_hidden_state
        return hidden

    def loss(hidden: torch.Tensor, part: Any) -> torch.Tensor:
        values = part.expand(dualkv.response_logprobs(hidden, head(model), part)[0])
        found[part.places] = values.detach()
        return (values * weights.flatten()[part.places]).sum()

    dualkv.walk(packed(sizes, group), sizes.walk, forward, loss)
    return found.view_as(weights)


def run_packed(model: Any, sizes: Sizes, group: Group, weights: torch.Tensor) -> torch.Tensor:
    batch = packed(sizes, group)
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media).last_hidden_state
    logp, _ = dualkv.response_logprobs(hidden, head(model), batch)
    rows = torch.stack(batch.unpack(logp))
    (rows * weights).sum().backward()
    return rows.detach()


def run_replicated(model: Any, sizes: Sizes, group: Group, weights: torch.Tensor) -> torch.Tensor:
    prompt, found = group.prompt, []
    for begin in range(0, sizes.responses, sizes.micro_batch):
        some = torch.stack(group.responses[begin : begin + sizes.micro_batch])
        media = group.of_sequences[begin : begin + sizes.micro_batch]
        hidden = model.model(
            input_ids=torch.cat([prompt.expand(len(some), -1), some], 1),
            **{name: torch.cat([one[name] for one in media]) for name in media[0]},
            use_cache=False,
        ).last_hidden_state
        alone = dualkv.pack([prompt] * len(some), list(some), group_ids=range(len(some)))  # rows as in `input_ids`
        alone.layout.mark_used()
        batch = dualkv.PackedSequences.from_batch(alone, [group.mask] * len(some))
        logp = torch.stack(batch.unpack(dualkv.response_logprobs(hidden.flatten(0, 1), head(model), batch)[0]))
        (logp * weights[begin : begin + sizes.micro_batch]).sum().backward()
        found.append(logp.detach())
    return torch.cat(found)


def flop_ratio(model: Any, sizes: Sizes, group: Group) -> float:
    """FLOP of a replicated forward over those of a packed one: products of the decoder, its head and the tower."""

    def weights(module: Any) -> int:
        return sum(x.numel() for x in module.parameters() if x.dim() > 1)

    text = model.config.text_config
    prompt, own = len(group.prompt), len(group.responses[0])
    patches = sizes.side**2 * 4
    head_dim = getattr(text, "head_dim", text.hidden_size // text.num_attention_heads)
    a_pair = 2 * 2 * text.num_attention_heads * head_dim * text.num_hidden_layers
    vision = model.config.vision_config
    an_image = 2 * weights(model.model.visual.blocks) * patches + 4 * vision.hidden_size * vision.depth * patches**2
    heads = 2 * model.lm_head.weight.numel() * int(group.mask.sum()) * sizes.responses

    def of(prompts: int) -> float:
        rows, images = prompts * prompt + sizes.responses * own, prompts * sizes.images + sizes.responses * sizes.turns
        pairs = prompts * prompt**2 / 2 + sizes.responses * own * (prompt + own / 2)
        return 2 * weights(model.model.language_model.layers) * rows + a_pair * pairs + an_image * images + heads

    return of(sizes.responses) / of(1)


def measure(sizes: Sizes, device: torch.device) -> dict[str, Any]:
    model, group = make_model(sizes, device), make_group(sizes, device)
    shape = sizes.responses, int(group.mask.sum())
    weights = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) / shape[1]).to(device)
    ratio = flop_ratio(model, sizes, group)
    held = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else None
    warm = group._replace(responses=group.responses[: sizes.micro_batch])
    rows, logps, gradients = {}, {}, dict[str, dict[str, torch.Tensor]]()

    def take_gradients() -> None:
        gradients[way] = {name: gradient.cpu() for name, gradient in harness.gradients_of(model).items()}
        model.zero_grad(set_to_none=True)

    few = Sizes(**asdict(sizes) | {"responses": sizes.micro_batch})
    ways = [("replicated", run_replicated, 1), ("packed", run_packed, sizes.repeats)]
    ways += [("walked", run_walked, sizes.repeats)] * (sizes.walk > 0)
    for way, run, repeats in ways:
        if way == "packed":
            enable(model)
        run(model, few if way == "replicated" else sizes, warm if way == "replicated" else group,
            weights[: sizes.micro_batch] if way == "replicated" else weights)  # fmt: skip
        model.zero_grad(set_to_none=True)
        rows[way], logps[way] = harness.repeated(partial(run, model, sizes, group, weights), repeats, take_gradients)
    apart = {}
    for way, part in product(list(rows)[1:], ("visual", "language_model", "lm_head")):
        wanted = {name: x for name, x in gradients["replicated"].items() if part in name}
        found = {name: gradients[way][name] for name in wanted}
        apart[part if way == "packed" else f"{part}, {way}"] = harness.apart(found, wanted)
    return {
        "rows": rows,
        "times_as_fast": rows["replicated"]["median"] / rows["packed"]["median"],
        "flop_ratio": ratio,
        "weights_gib": held,
        "logp_rms_apart": harness.rms(logps["packed"], logps["replicated"]),
        "gradients_apart": apart,
    }


@harness.takes(Sizes)
def main(json_to: JsonPath, sizes: Sizes) -> None:
    """Measure forward and backward of a group with images, replicated and packed."""
    device = harness.best_device()
    record = Record(json_to, device.type == "cuda")
    figures = measure(sizes, device)
    record.write({"sizes": asdict(sizes), **figures}, figures)


if __name__ == "__main__":
    typer.run(main)
