"""Images and videos in packed calls: against each rollout run alone with its own copy of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import disable, enable  # noqa: E402
from dualkv.integrations.transformers import media as families  # noqa: E402
from dualkv.sequence_parallel import Shard  # noqa: E402
from tests.integrations.tiny import SIZES, assert_close, gradients  # noqa: E402
from tests.ranks import one_rank  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SOUND, IMAGE, VIDEO, START = 86, 88, 89, 90  # the ids behind are those of other special tokens
SPECIAL = ("image_token", "video_token", "vision_start_token", "vision_end_token", "image_start_token",
           "image_end_token", "video_start_token", "video_end_token", "audio_token", "audio_start_token")  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
TOWER = {"depth": 2, "num_heads": 2, "patch_size": 2, "temporal_patch_size": 2, "spatial_merge_size": 2}
WIDE = TOWER | {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48}
AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "num_mel_bins": 8,
         "output_dim": 48, "downsample_hidden_size": 2, "n_window": 50}  # fmt: skip
WINDOWS = WIDE | {"window_size": 8, "fullatt_block_indexes": [1], "tokens_per_second": 3}
PLACES = WIDE | {"num_position_embeddings": 16}
DEEP = PLACES | {"deepstack_visual_indexes": [0, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8}  # fmt: skip
# Models that give an image's rows the positions of its grid: settings of text and vision.
GRID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VL": ({}, TOWER | {"embed_dim": 16, "hidden_size": 48, "mlp_ratio": 2}),
    "Qwen2_5_VL": ({}, WINDOWS),
    "Qwen3VL": ({}, DEEP),
    "Qwen3VLMoe": (EXPERTS, DEEP),
    "Qwen3_5": (DELTA, PLACES),
    "Qwen3_5Moe": (DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}, PLACES),
    "Qwen2_5OmniThinker": ({}, WINDOWS),
    "Qwen3OmniMoeThinker": (EXPERTS, DEEP),
    "Glm4v": ({}, WIDE | {"image_size": 8}),
    "Glm4vMoe": ({"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
                  "first_k_dense_replace": 1}, WIDE | {"image_size": 8}),
    "Glm46V": ({}, WIDE | {"image_size": 8}),
    "GlmOcr": ({}, WIDE | {"image_size": 8}),
}  # fmt: skip
BY_FRAME = ("Qwen3VL", "Qwen3VLMoe", "Qwen3_5", "Qwen3_5Moe", "Glm4v", "Glm4vMoe", "Glm46V", "GlmOcr")
LAYERS = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = LAYERS | {"image_size": 8, "patch_size": 4}
CLIP, PIXTRAL = SQUARE | {"model_type": "clip_vision_model"}, LAYERS | {"model_type": "pixtral", "patch_size": 2}
TILES = {"image_grid_pinpoints": [[8, 16], [16, 8], [16, 16]]}
# Models whose images have positions as text has: the type of their decoder, settings of vision and of the whole.
PLAIN: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "InternVL": ("qwen2", LAYERS | {"image_size": [8, 8], "patch_size": [2, 2]}, {}),
    "Llava": ("llama", CLIP, {}),
    "VipLlava": ("llama", CLIP, {"vision_feature_layers": [-1, -2]}),
    "LlavaNext": ("mistral", CLIP, TILES),
    "LlavaNextVideo": ("llama", CLIP, TILES),
    "LlavaOnevision": ("qwen2", SQUARE | {"model_type": "siglip_vision_model", "vision_use_head": False}, TILES),
    "Mistral3": ("mistral", PIXTRAL | {"image_size": 16}, {"spatial_merge_size": 2}),
    "Idefics3": ("llama", SQUARE | {"patch_size": 2}, {}),
    "SmolVLM": ("llama", SQUARE | {"patch_size": 2}, {}),
    "Gemma3": ("gemma3_text", SQUARE | {"patch_size": 2}, {"mm_tokens_per_image": 4}),
    "Gemma4": (
        "gemma4_text",
        LAYERS
        | {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        {},
    ),
}


def make(family: str) -> Any:
    torch.manual_seed(0)
    model = _made(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.any() and parameter.dim() > 1:  # Gemma 3's projection of images
                parameter.normal_(0, 0.2)
            if name.endswith("A_log"):  # slow decays: sums of fast ones differ by less than fp32's digits
                parameter.normal_(-3)
    return model


def _made(family: str) -> Any:
    if family in PLAIN:
        text, vision, settings = PLAIN[family]
        text_config = SIZES | {"model_type": text}
        if family.startswith("Gemma"):
            text_config |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
        token = {"image_token_id": IMAGE} if family in ("InternVL", "Idefics3", "SmolVLM") else {
            "image_token_index": IMAGE, "video_token_index": VIDEO}  # fmt: skip
        if family == "Gemma4":
            text_config |= {"global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
                            "use_bidirectional_attention": "vision"}  # fmt: skip
            token = {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": VIDEO + 1}
        config = getattr(tf, f"{family}Config")(text_config=text_config, vision_config=vision, **settings, **token)
        return getattr(tf, f"{family}ForConditionalGeneration")(config).train()
    text, vision = GRID[family]
    ids = {f"{name}_id": IMAGE + i for i, name in enumerate(SPECIAL)}
    if "Omni" in family:
        ids |= {"audio_token_id": SOUND, "audio_start_token_id": SOUND + 1}
        ids["audio_config"] = AUDIO
    text = SIZES | {"rope_parameters": dict(ROPE)} | text
    config = getattr(tf, f"{family}Config")(text_config=text, vision_config=vision, **ids)
    return getattr(tf, f"{family}ForConditionalGeneration")(config).train()


def prompt(draw: torch.Generator, family: str, *media: tuple[int, int, int]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids and what a processor returns for a text with images; a grid of several frames is that of a video."""

    def text(count: int) -> list[int]:
        return torch.randint(3, 80, (count,), generator=draw).tolist()

    ids = text(3)
    entry: dict[str, list[Any]] = {}
    kinds = [0] * 3
    for grid in media:
        name, kind, token = ("pixel_values_videos", 2, VIDEO) if grid[0] > 1 else ("pixel_values", 1, IMAGE)
        token = IMAGE if family.startswith("Glm") else token
        patches = torch.randn(grid[0] * grid[1] * grid[2], 24, generator=draw)
        entry.setdefault(name, []).append(patches)
        entry.setdefault("video_grid_thw" if kind == 2 else "image_grid_thw", []).append(torch.tensor([grid]))
        if kind == 2 and family == "Qwen2_5_VL":
            entry["second_per_grid_ts"] = [*entry.get("second_per_grid_ts", []), 0.7]
        if kind == 2 and "Omni" in family:
            entry.setdefault("video_second_per_grid", []).append(torch.tensor([0.7]))
        by_frame = family in BY_FRAME  # frames of a video lie apart, between time stamps
        for _ in range(grid[0] if by_frame else 1):
            rows = grid[1] * grid[2] // 4 * (1 if by_frame else grid[0])
            ids += [START, *[token] * rows, START + 1, *text(2)]
            kinds += [0, *[kind] * rows, 0, 0, 0]
    joined = {name: values if name == "second_per_grid_ts" else torch.cat(values) for name, values in entry.items()}
    return torch.tensor(ids), joined | {"mm_token_type_ids": torch.tensor([kinds])}


@functools.cache
def counting(family: str) -> Any:
    """A model that says how many rows images have."""
    return make(family).eval()


def plain_media(draw: torch.Generator, family: str, *media: tuple[int, int, int]) -> dict[str, Any]:
    """Make the output of a processor for images of such sizes (halved) beside ids."""
    if not media:
        return {}

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    sizes = torch.tensor([(2 * h, 2 * w) for _, h, w in media])
    if family == "InternVL":
        return {"pixel_values": pixels(sum(1 + (h * w > 8) for _, h, w in media), 3, 8, 8)}
    if family in ("Llava", "VipLlava", "Gemma3"):
        return {"pixel_values": pixels(len(media), 3, 8, 8)}
    if family in ("Idefics3", "SmolVLM"):
        mask = torch.zeros(1, len(media), 8, 8, dtype=torch.int64)
        for i, (h, w) in enumerate(sizes.tolist()):
            mask[0, i, :h, :w] = 1
        return {"pixel_values": pixels(1, len(media), 3, 8, 8) * mask[:, :, None], "pixel_attention_mask": mask}
    if family == "Mistral3":
        return {"pixel_values": pixels(len(media), 3, *sizes.amax(0).tolist()), "image_sizes": sizes}
    if family == "Gemma4":  # padded to 32 patches
        places = torch.full((len(media), media[0][0], 32, 2), -1)
        for i, (_, h, w) in enumerate(media):
            places[i, :, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w)).flip(1)
        patches = pixels(*places.shape[:3], 12).sigmoid()
        if media[0][0] == 1:
            return {"pixel_values": patches[:, 0], "image_position_ids": places[:, 0]}
        found = {"pixel_values_videos": patches.flatten(0, 1), "video_position_ids": places.flatten(0, 1)}
        return found | {"num_frames_per_video": torch.full((len(media),), media[0][0])}
    if media[0][0] > 1:
        return {"pixel_values_videos": pixels(len(media), media[0][0], 3, 8, 8)}
    tiles = [tf.models.llava_next.modeling_llava_next.image_size_to_num_patches(size, TILES["image_grid_pinpoints"], 8)
             for size in sizes.tolist()]  # fmt: skip
    found = {"pixel_values": pixels(len(media), max(tiles), 3, 8, 8), "image_sizes": sizes}
    return found | ({"batch_num_images": torch.tensor([len(media)])} if family == "LlavaOnevision" else {})


def plain_prompt(
    draw: torch.Generator, family: str, *media: tuple[int, int, int]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids and media of a model of PLAIN."""
    entry = plain_media(draw, family, *media)
    ids = torch.randint(3, 80, (3,), generator=draw).tolist()
    if entry:
        model, film = counting(family).model, "pixel_values_videos" in entry
        with torch.no_grad():
            found = (model.get_video_features if film else model.get_image_features)(**entry).pooler_output
        rows = sum(x.numel() for x in found) // SIZES["hidden_size"]
        each = [len(x) for x in found] if len(found) == len(media) else [rows // len(media)] * len(media)
        for count in each:
            ids += [*[VIDEO if film else IMAGE] * count, *torch.randint(3, 80, (2,), generator=draw).tolist()]
    if family.startswith("Gemma"):  # its rows of an image see each other
        marks = torch.tensor(ids)
        name = "token_type_ids" if family == "Gemma3" else "mm_token_type_ids"
        entry[name] = ((marks == IMAGE) + 2 * (marks == VIDEO))[None]
    return torch.tensor(ids), entry


def rollouts(family: str, *groups: tuple[tuple[int, int, int], ...]) -> Any:
    """Prompts, responses and media of rollouts; the rollouts of a group are apart from each other."""
    draw = torch.Generator().manual_seed(1)
    of_groups = [(prompt if family in GRID else plain_prompt)(draw, family, *group) for group in groups]
    lens = [3, 0, 6, 1, 4]
    order = [g for _ in range(2) for g in range(len(groups))] + [0]
    responses = [torch.randint(3, 80, (lens[i % 5],), generator=draw) for i in range(len(order))]
    copies = [{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in of_groups[g][1].items()} for g in order]
    return [of_groups[g][0] for g in order], responses, copies


def without(entry: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if name not in names}


Rollout = tuple[torch.Tensor, dict[str, Any]]  # all tokens, and what a processor returns for them


def whole(ids: torch.Tensor, response: torch.Tensor, entry: dict[str, Any]) -> Rollout:
    """A rollout of a prompt, what a processor returned for that, and a response of text."""
    kinds = {name: pad(x, (0, len(response))) for name, x in entry.items() if "type_ids" in name}
    return torch.cat([ids, response]), entry | kinds


def alone(model: Any, ids: torch.Tensor, entry: dict[str, Any]) -> torch.Tensor:
    """Hidden states of one sequence."""
    how = families.family(type(model.model))
    assert how is not None
    inputs = without(entry, *{families.KINDS} - {*how.inputs}) | {"input_ids": ids[None]}
    if how.by_ids:  # which counts positions of images only with a mask
        inputs["attention_mask"] = torch.ones_like(ids[None])
    return model.model(use_cache=False, **inputs).last_hidden_state[0]


def log_probs(model: Any, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model.lm_head(hidden).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def weights_of(trained: list[torch.Tensor]) -> torch.Tensor:
    return torch.randn(sum(map(len, trained)), generator=torch.Generator().manual_seed(7))


def separate(
    family: str, rollouts: list[Rollout], trained: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Hidden states of each rollout by itself, log-probs of its tokens at `trained` [n_i], and gradients of their
    weighted sum."""
    model = make(family)
    hidden = [alone(model, *rollout) for rollout in rollouts]
    of_rollouts = zip(hidden, rollouts, trained, strict=True)
    values = [log_probs(model, states[at - 1], ids[at]) for states, (ids, _), at in of_rollouts]
    (torch.cat(values) * weights_of(trained)).sum().backward()
    return hidden, values, gradients(model)


def assert_gradients(model: Any, expected: dict[str, torch.Tensor]) -> None:
    assert any("vis" in name and gradient.norm() > 0 for name, gradient in expected.items())
    # Some are zero but for rounding: biases of keys.
    floor = torch.stack([gradient.norm() for gradient in expected.values()]).mean().item()
    for name, gradient in gradients(model).items():
        error, norm = (gradient - expected[name]).norm().item(), expected[name].norm().item()
        assert error <= 1e-5 * max(norm, floor), f"{name}: {error} against a norm of {norm}, on average {floor}"


def compare(family: str, batch: Any, rollouts: list[Rollout], trained: list[torch.Tensor]) -> None:
    """Compare hidden states, log-probs of trained tokens and gradients of packed rollouts with those of each by
    itself."""
    model = enable(make(family))
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media).last_hidden_state
    values = batch.unpack(log_probs(model, hidden[0, batch.predict_rows], batch.targets))
    (torch.cat(values) * weights_of(trained)).sum().backward()
    states, expected, expected_gradients = separate(family, rollouts, trained)
    for i, got in enumerate(batch.unpack_sequences(hidden)):
        assert_close(f"hidden states of rollout {i}", got, states[i], 1e-5)
        assert_close(f"log-probs of rollout {i}", values[i], expected[i], 1e-5)
    assert_gradients(model, expected_gradients)


def check(family: str, *groups: tuple[tuple[int, int, int], ...], labels: str = "gather") -> None:
    compare_groups(family, *rollouts(family, *groups), len(groups), labels)


def compare_groups(
    family: str,
    prompts: list[torch.Tensor],
    responses: list[torch.Tensor],
    media: list[dict[str, Any]],
    groups: int,
    labels: str = "gather",
) -> None:
    batch = dualkv.pack(prompts, responses, media=media, labels=labels)
    assert batch.layout.num_groups == groups
    wholes = [whole(*x) for x in zip(prompts, responses, media, strict=True)]
    trained = [torch.arange(len(x), len(ids)) for x, (ids, _) in zip(prompts, wholes, strict=True)]
    compare(family, batch, wholes, trained)


ONE, TWO, NONE, FILM = ((1, 4, 6),), ((1, 2, 2), (1, 6, 4)), (), ((2, 2, 4),)


# All families run images of trees (test_media_turns.py); the media of these are joined in other ways.
@pytest.mark.parametrize(
    "family",
    ["Qwen2VL", "Qwen3_5", "Qwen2_5OmniThinker", "Glm4v", "InternVL", "LlavaNext", "LlavaOnevision", "Mistral3",
     "Idefics3", "Gemma3", "Gemma4"],
)  # fmt: skip
def test_images_of_several_groups(family: str) -> None:
    check(family, ONE, TWO, NONE, ONE)


@pytest.mark.parametrize("family", [*GRID, "LlavaNextVideo", "LlavaOnevision", "Gemma4"])
def test_videos(family: str) -> None:
    beside = () if family in PLAIN or family.startswith("Glm") else ((1, 4, 4),)
    check(family, FILM + beside, NONE, FILM, labels="roll")


@pytest.mark.parametrize("family", ["Gemma4", "Qwen3VL"])
def test_labels_of_rows_beside_images(family: str) -> None:
    """Gemma 4 hands labels on to its decoder, which hands all that it gets to its layers."""
    prompts, responses, media = rollouts(family, ONE, TWO)
    batch = dualkv.pack(prompts, responses, media=media, labels="roll")
    given = {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}
    model = enable(make(family).eval())
    logits = model(**given).logits
    loss = model(**given, labels=batch.labels, shift_labels=batch.labels).loss
    logp = logits[0, batch.predict_rows].log_softmax(-1).gather(1, batch.targets[:, None])
    torch.testing.assert_close(loss, -logp.mean(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", GRID)
def test_text_alone(family: str) -> None:
    """Positions of several rows are those of text, also after a call that left the model those of another batch."""
    check_text = rollouts(family, NONE, NONE)
    batch = dualkv.pack(*check_text[:2])
    model = enable(make(family).eval())
    model.model.rope_deltas = torch.tensor([[7]])
    plain = batch.position_ids
    with torch.no_grad():
        expected = [alone(model, *whole(*x)) for x in zip(*check_text, strict=True)]
        for position_ids in (None, plain, plain.expand(3, 1, -1), plain.expand(4, 1, -1)):
            hidden = model.model(input_ids=batch.input_ids, position_ids=position_ids, dualkv=batch.layout)[0]
            for i, got in enumerate(batch.unpack_sequences(hidden)):
                assert_close(f"hidden states of rollout {i}", got, expected[i], 1e-5)
    wrong = plain.expand(4, 1, -1).clone()
    wrong[2, 0, 5] += 1
    with pytest.raises(ValueError, match=r"position_ids\[2, 0, 5\] is 6, the layout's is 5"):
        model(input_ids=batch.input_ids, position_ids=wrong, dualkv=batch.layout)


def test_given_positions_are_compared_with_those_of_the_model() -> None:
    prompts, responses, media = rollouts("Qwen2_5_VL", ONE, TWO + FILM)
    batch = dualkv.pack(prompts, responses, media=media)
    model = enable(make("Qwen2_5_VL").eval())
    own = torch.zeros(3, 1, batch.layout.num_tokens, dtype=torch.int64)
    rows = batch.unpack_sequences(torch.arange(batch.layout.num_tokens))
    for at, *rollout in zip(rows, prompts, responses, media, strict=True):
        ids, entry = whole(*rollout)
        inputs = {name: value for name, value in entry.items() if "pixel" not in name}
        own[:, :, at] = model.model.get_rope_index(ids[None], **inputs)[0]
    inputs = {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}
    with torch.no_grad():
        expected = model(**inputs).logits
        for given in (own, torch.cat([batch.position_ids[None], own])):
            assert torch.equal(model(**inputs, position_ids=given).logits, expected)
            given[1, 0, 20] += 1
            message = rf"position_ids\[1, 0, 20\] is {given[1, 0, 20]}, the layout's is {given[1, 0, 20] - 1} "
            with pytest.raises(ValueError, match=message):
                model(**inputs, position_ids=given)
            given[1, 0, 20] -= 1
        with pytest.raises(ValueError, match=r"position_ids has shape \(1, \d+\) on cpu, expected \(3, 1, \d+\)"):
            model(**inputs, position_ids=batch.position_ids)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Gemma3"])
def test_generation_behind_images(family: str) -> None:
    """An enabled model's `generate` finds the inputs of its towers."""
    (ids, *_), _, (entry, *_) = rollouts(family, ONE)
    given = {"input_ids": ids[None], **entry, "max_new_tokens": 2, "do_sample": False}
    expected = make(family).eval().generate(**given)
    assert torch.equal(enable(make(family).eval()).generate(**given), expected)


# ---------------------------------------------------------------- packing
def test_a_function_in_the_place_of_the_tower_still_runs() -> None:
    model, batch = make("LlavaNext"), dualkv.pack(*rollouts("LlavaNext", ONE)[:2], media=rollouts("LlavaNext", ONE)[2])
    own, ran = model.model.get_image_features, []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        ran.append(kwargs)
        return own(*args, **kwargs)

    model.model.get_image_features = replaced
    enable(model, check=False).model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media)
    assert len(ran) == 1
    assert disable(model).model.get_image_features is replaced


def test_equal_prompts_have_equal_images() -> None:
    """One group for copies of an image, two for two images behind the same ids; a padded batch finds the same."""
    draw = torch.Generator().manual_seed(2)
    ids, entry = prompt(draw, "Qwen3VL", (1, 4, 4))
    other = entry | {"pixel_values": entry["pixel_values"].clone()}
    other["pixel_values"][5, 3] += 1
    copy = {name: value.clone() for name, value in entry.items()}
    media = [entry, other, copy]
    batch = dualkv.pack([ids] * 3, [[3], [4], [5]], media=media)
    assert batch.layout.response_lens == [[1, 1], [1]]
    assert torch.equal(batch.media["pixel_values"], torch.cat([entry["pixel_values"], other["pixel_values"]]))
    assert batch.media["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    assert (batch.media["mm_token_type_ids"] == (batch.input_ids == IMAGE)).all()
    assert batch.to("meta").media["pixel_values"].device.type == "meta"

    mask = pad(torch.ones(3, len(ids)), (4, 0))
    wide = pad(entry["mm_token_type_ids"], (4, 0))
    padded = dualkv.pack_padded(
        pad(ids.expand(3, -1), (4, 0)), mask, torch.tensor([[3], [4], [5]]), torch.ones(3, 1),
        media=[x | {"mm_token_type_ids": wide} for x in media], group_ids=[1, 2, 1],
    )  # fmt: skip
    assert torch.equal(padded.input_ids, batch.input_ids)
    assert all(torch.equal(padded.media[name], batch.media[name]) for name in batch.media)
    with pytest.raises(ValueError, match="pixel_values of rollouts 0 and 1 differ, but group_ids puts both into gr"):
        dualkv.pack([ids] * 3, [[3], [4], [5]], media=media, group_ids=[7, 7, 7])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, b: [a], ValueError, "media has 1 entries for 2 token sequences"),
        (lambda a, b: a, TypeError, "media is a dict, expected a list with one mapping"),
        (lambda a, b: [a, [b]], TypeError, r"media\[1\] is a list, expected a mapping or None"),
        (lambda a, b: [a, b | {"pixel_values": [b["pixel_values"]]}], TypeError,
         r"media\[1\]\['pixel_values'\] is a list, expected a tensor, an array or a list of numbers"),
        (lambda a, b: [a, b | {"pixel_values": b["pixel_values"][:-1]}], ValueError,
         r"media\[1\]\['pixel_values'\] has 27 patches, image_grid_thw counts 28"),
        (lambda a, b: [a, b | {"image_grid_thw": b["image_grid_thw"][0]}], ValueError,
         r"media\[1\]\['image_grid_thw'\] has shape \(3,\), expected \[images, 3\]"),
        # Two placeholders and one image; placeholders without images; images without placeholders.
        (lambda a, b: [a, b | {"pixel_values": b["pixel_values"][:4], "image_grid_thw": b["image_grid_thw"][:1]}],
         ValueError, r"has 4 patches for 7 placeholder tokens, those of media\[0\] have 24 for 6"),
        (lambda a, b: [a, without(b, "pixel_values", "image_grid_thw")], ValueError,
         r"media\[1\]\['pixel_values'\] has 0 patches for 7 placeholder tokens"),
        (lambda a, b: [a, b | {"mm_token_type_ids": b["mm_token_type_ids"][:, :-1]}], ValueError,
         r"media\[1\]\['mm_token_type_ids'\] has shape \(1, \d+\), its text has \d+ tokens"),
        (lambda a, b: [a, without(b, "mm_token_type_ids")], ValueError, "has no mm_token_type_ids, media.0. has it"),
        (lambda a, b: [a, b | {"pixel_values": b["pixel_values"][:, :-1]}], ValueError,
         r"media\[1\]\['pixel_values'\] has shape \(28, 23\) in torch.float32, media\[0\] \(24, 24\)"),
    ],
)  # fmt: skip
def test_media_that_cannot_be_packed(change: Any, error: type[Exception], message: str) -> None:
    draw = torch.Generator().manual_seed(2)
    (first, a), (second, b) = prompt(draw, "Qwen3VL", *ONE), prompt(draw, "Qwen3VL", *TWO)
    with pytest.raises(error, match=message):
        dualkv.pack([first, second], [[[3]], [[4]]], media=change(a, b))


def test_seconds_of_some_videos() -> None:
    """The seconds may be missing for some prompts, for some videos of a prompt, and in calls without `pack`."""
    prompts, responses, media = rollouts("Qwen2_5_VL", FILM, FILM + FILM)
    for seconds, message in (
        (
            None,
            r"media\[1\] has pixel_values_videos and no second_per_grid_ts, media\[0\] has it: expected all or none",
        ),
        (
            [0.7],
            r"media\[1\]\['second_per_grid_ts'\] has 1 entries for 2 videos of video_grid_thw, expected one a video",
        ),
    ):
        some = [entry | {"second_per_grid_ts": seconds} if i == 1 else entry for i, entry in enumerate(media)]
        with pytest.raises(ValueError, match=message):
            dualkv.pack(prompts, responses, media=some)
    for family, name in (("Qwen2_5_VL", "second_per_grid_ts"), ("Qwen2_5OmniThinker", "video_second_per_grid")):
        prompts, responses, media = rollouts(family, FILM, FILM + FILM)
        batch = dualkv.pack(prompts, responses, media=media)
        model, given = enable(make(family)), batch.media | {name: batch.media[name][:2]}
        with pytest.raises(ValueError, match=f"^{name} has 2 entries for 3 videos of video_grid_thw"):
            model(input_ids=batch.input_ids, dualkv=batch.layout, **given)
    del given[name]
    with pytest.raises(
        ValueError, match="video_grid_thw came without video_second_per_grid, expected one value a video"
    ):
        model(input_ids=batch.input_ids, dualkv=batch.layout, **given)


def test_a_last_token_of_an_image_is_not_copied() -> None:
    ids, entry = prompt(torch.Generator().manual_seed(2), "Qwen3VL", *ONE)
    entry["mm_token_type_ids"] = entry["mm_token_type_ids"][:, :-3]
    with pytest.raises(ValueError, match=r"\['mm_token_type_ids'\] ends with 1, expected 0: with labels='roll'"):
        dualkv.pack([ids[:-3]], [[[3], [4]]], media=[entry], labels="roll")


@pytest.mark.parametrize("family", ["Qwen3VL", "Gemma4"])
def test_a_compiled_decoder(family: str) -> None:
    """The whole model reads where images are, which graphs cannot."""
    prompts, responses, media = rollouts(family, ONE, TWO)
    batch = dualkv.pack(prompts, responses, media=media)
    inputs = {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}
    model = enable(make(family).eval())
    with torch.no_grad():
        expected = model(**inputs).logits
        if family == "Qwen3VL":
            with pytest.raises(ValueError, match=r"(pixel_values|visual_pos_masks|images) came to"):
                torch.compile(model, backend="eager")(**inputs)
            torch._dynamo.reset()
        model.get_decoder().compile(backend="eager", fullgraph=True)
        assert torch.equal(model(**inputs).logits, expected)


# ---------------------------------------------------------------- what else processors and layouts may hold
def test_small_gemma_4_models_are_causal_among_images() -> None:
    """Rows of images are causal where the config does not say "vision", and where no kinds of tokens are given."""
    prompts, responses, media = rollouts("Gemma4", ONE, TWO)
    batch = dualkv.pack(prompts, responses, media=media)
    for names, bidirectional in (((), None), (("mm_token_type_ids",), "vision")):
        model = make("Gemma4").eval()
        model.config.text_config.use_bidirectional_attention = bidirectional
        with torch.no_grad():
            given = without(batch.media, *names)
            hidden = enable(model).model(input_ids=batch.input_ids, dualkv=batch.layout, **given).last_hidden_state
            for i, got in enumerate(batch.unpack_sequences(hidden)):
                expected = alone(model, *whole(prompts[i], responses[i], without(media[i], *names)))
                assert_close(f"hidden states of rollout {i}", got, expected, 1e-5)


def test_kinds_of_tokens_that_a_model_does_not_take() -> None:
    ids, entry = plain_prompt(torch.Generator().manual_seed(2), "Llava", *ONE)
    entry["mm_token_type_ids"] = (ids == IMAGE).long()[None]
    batch = dualkv.pack([ids], [[[3], [4]]], media=[entry])
    enable(make("Llava"))(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media)
    text = dualkv.pack([ids % 80], [[[3], [4]]])
    zeros = torch.zeros_like(text.input_ids)
    for family in ("Llava", "Qwen3VL"):
        enable(make(family))(input_ids=text.input_ids, dualkv=text.layout, token_type_ids=zeros)


@one_rank()
def test_text_with_sequence_parallelism() -> None:
    """Decoders that take placed layouts only run too."""
    batch = dualkv.pack([torch.tensor([3, 4, 5, 6])], [[torch.tensor([7, 8]), torch.tensor([9, 1])]])
    shard = Shard(batch.layout, torch.distributed.group.WORLD)
    model = enable(make("Qwen2_5OmniThinker").eval())
    whole, own = (model(input_ids=batch.input_ids, dualkv=x).logits for x in (batch.layout, shard))
    assert torch.equal(whole, own)
