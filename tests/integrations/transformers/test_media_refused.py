"""Images in packed calls that do not fit: one sentence each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable  # noqa: E402
from dualkv.sequence_parallel import Shard  # noqa: E402
from tests.integrations.transformers.test_media import (  # noqa: E402
    CLIP,
    GRID,
    IMAGE,
    NONE,
    ONE,
    PLAIN,
    SIZES,
    TWO,
    make,
    plain_prompt,
    prompt,
    rollouts,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SHARD = Shard(dualkv.Layout.from_lengths([2], [[1, 1]]), None)


def without_tower(family: str, tower: str) -> tuple[Any, dict[str, Any]]:
    """An enabled model whose vision tower must not run, and the inputs of a packed call with images."""
    prompts, responses, media = rollouts(family, ONE, TWO)
    batch = dualkv.pack(prompts, responses, media=media)
    model = enable(make(family))
    getattr(model.model, tower).register_forward_pre_hook(lambda *_: pytest.fail("the vision tower ran"))
    return model, {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mm_token_type_ids": None}, r"mm_token_type_ids is missing, expected \[1, T\]"),
        ({"mm_token_type_ids": torch.zeros(1, 2)}, r"mm_token_type_ids has shape \(1, 2\), expected \(1, \d+\)"),
        ({"image_grid_thw": None}, "mm_token_type_ids marks 13 rows with 1, and no image_grid_thw came"),
        ({"image_grid_thw": None, "mm_token_type_ids": torch.zeros(1, 45), "input_ids": torch.full((1, 45), 5)},
         "pixel_values came without image_grid_thw, expected it for each image"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2]])}, "pixel_values has 52 patches, image_grid_thw count"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, 2, 2], [1, 6, 4], [1, 2, 2]]),
          "pixel_values": torch.zeros(56, 24)}, "videos or audio of 14 rows in all, input_ids has 13 of"),
        ({"image_grid_thw": torch.tensor([[1, 2, 2], [1, 4, 6], [1, 6, 4]])},
         r"image_grid_thw\[1\] has 6 rows, in segments 0 and \d of the layout"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 58, 48)}, "pixel_values came without input_ids"),
        ({"input_ids": torch.zeros(1, 5, dtype=torch.int64)}, r"input_ids has shape \(1, 5\), expected \[1, T\] ="),
        ({"input_features": torch.zeros(1)}, "input_features came together with dualkv: Qwen3VLModel runs packed with"),
        ({"deepstack_visual_embeds": [torch.zeros(1)]}, "deepstack_visual_embeds came together with dualkv"),
        ({"dualkv": SHARD}, r"input_ids has shape \(1, \d+\), expected \[1, T\] = \(1, 4\)"),
        ({"dualkv": 5}, "dualkv is a int, expected a dualkv.Layout"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(change: dict[str, Any], message: str) -> None:
    model, inputs = without_tower("Qwen3VL", "visual")
    inputs |= change
    for part in (model, model.model):
        with pytest.raises((ValueError, TypeError), match=message):
            part(**inputs)


def test_a_response_with_a_placeholder_is_refused() -> None:
    """A placeholder is refused by `pack`, and by the model, whose layout may come from elsewhere."""
    prompts, responses, media = rollouts("Qwen3VL", ONE)
    batch = dualkv.pack(prompts, responses, media=media)
    responses[2][1] = IMAGE
    for labels in ("gather", "roll"):
        with pytest.raises(ValueError, match=f"response of rollout 2 holds the token {IMAGE}, which stands for an im"):
            dualkv.pack(prompts, responses, media=media, labels=labels)
    row = len(prompts[0]) + 1
    batch.input_ids[0, row] = IMAGE
    with pytest.raises(ValueError, match=rf"row {row} of input_ids holds {IMAGE}, its mm_token_type_ids"):
        enable(make("Qwen3VL"))(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media)


@pytest.mark.parametrize("family", PLAIN)
def test_fewer_images_than_placeholders(family: str) -> None:
    """Models without grids refuse them before a vision tower runs, where an image's rows can be counted."""
    prompts, responses, media = rollouts(family, ONE, ONE)
    batch = dualkv.pack(prompts, responses, media=media)
    images = 1 if family in ("Idefics3", "SmolVLM") else 0  # the dimension of images
    fewer = {}
    for name, value in batch.media.items():
        dim = 0 if name == "image_segments" else images
        fewer[name] = value if name.endswith("type_ids") else value.narrow(dim, 0, value.shape[dim] - 1)
    message = r"describes 1 images, |rows, in segments 0 and \d of|3 images, input_ids 16 of their placeholders"
    with pytest.raises(ValueError, match=message):
        enable(make(family))(input_ids=batch.input_ids, dualkv=batch.layout, **fewer)


@pytest.mark.parametrize(
    ("family", "kinds", "swapped"),
    [
        # One image and two placeholder blocks; two images and one block; and no other image beside text alone.
        ("InternVL", False, (((1, 2, 2), (1, 2, 2)), ((1, 2, 2),))),
        ("Qwen2_5OmniThinker", False, (((1, 2, 2), (1, 2, 2)), ((1, 2, 2),))),
        ("Llava", False, (((1, 2, 2), (1, 2, 2)), NONE)),
        ("LlavaNext", True, (((1, 2, 4), (1, 4, 4)), ((1, 4, 4),))),
        ("Mistral3", True, (((1, 4, 4), (1, 2, 4), (1, 2, 4)), ((1, 4, 4),))),
    ],
)
def test_images_of_other_prompts(family: str, kinds: bool, swapped: Any) -> None:
    """Prompts lack images that others have too many. The totals agree: only the packer knows whose image is whose."""
    draw = torch.Generator().manual_seed(3)
    make_prompt = prompt if family in GRID else plain_prompt
    (first, a), (second, b) = (make_prompt(draw, family, *grids) for grids in swapped)
    for ids, entry in ((first, a), (second, b)):
        entry.pop("mm_token_type_ids", None)
        if kinds:
            entry["mm_token_type_ids"] = (ids == IMAGE).long()[None]
    names = [name for name in a if name != "mm_token_type_ids"]
    held = {name: len(a[name]) // len(swapped[0]) for name in names}  # equal images here
    of_last = {name: a[name][-held[name] :] for name in names}
    a |= {name: a[name][: -held[name]] for name in names}
    b |= {name: torch.cat([of_last[name], b[name]]) if name in b else of_last[name] for name in names}
    batch = dualkv.pack([first, second], [[[3]], [[4]]], media=[a, b])
    message = f"image, video or audio {len(swapped[0]) - 1} of pixel_values is one of segment 2 of the layout"
    with pytest.raises(ValueError, match=message):
        enable(make(family))(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media)


def test_models_and_parts_that_run_text_alone() -> None:
    """Images are refused by keyword and by position; a decoder itself runs text whose images another model places."""
    images = torch.zeros(4, 8)
    config = tf.AyaVisionConfig(text_config=SIZES | {"model_type": "cohere2"}, vision_config=CLIP)
    unknown = enable(tf.AyaVisionForConditionalGeneration(config))
    ids = torch.arange(3, 12)[None]
    layout = dualkv.Layout.from_lengths([5], [[2, 2]])
    for call in (
        lambda **x: unknown(ids, images, **x),
        lambda **x: unknown.model(input_ids=ids, pixel_values=images, **x),
    ):
        with pytest.raises(
            ValueError, match=r"pixel_values came together with dualkv: AyaVision\w+ is not known to run"
        ):
            call(dualkv=layout)
    decoder = enable(make("Qwen3VL")).model.language_model
    with pytest.raises(ValueError, match="deepstack_visual_embeds came to Qwen3VLTextModel with a layout, and no hook"):
        decoder(input_ids=ids, dualkv=layout, deepstack_visual_embeds=[images])
    thinker = enable(make("Qwen2_5OmniThinker"))
    with pytest.raises(
        ValueError, match="inputs_embeds came to Qwen2_5OmniThinkerTextModel with a layout, and no hook"
    ):
        thinker.model.forward(input_ids=ids, dualkv=layout)  # as PEFT calls the outermost model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_position_ids": torch.full((3, 32, 2), -1)}, "image_position_ids describes 3 images, "),
        ({"image_position_ids": None}, "pixel_values came without image_position_ids, expected it for each image"),
        ({"mm_token_type_ids": torch.zeros(1, 3)}, r"mm_token_type_ids has shape \(1, 3\), expected \(1, \d+\)"),
        ({"input_features": torch.zeros(1)}, "input_features came together with dualkv: Gemma4Model runs packed"),
    ],
)  # fmt: skip
def test_calls_of_gemma_4_that_are_refused(change: dict[str, Any], message: str) -> None:
    model, inputs = without_tower("Gemma4", "vision_tower")
    with pytest.raises(ValueError, match=message):
        model(**inputs | change)


def test_neighbouring_images_of_two_segments_are_refused() -> None:
    """Gemma 3 takes the rows of both for one image."""
    layout = dualkv.Layout.from_segments([0, 6, 6, 12], [-1, 0, 1])
    ids = torch.tensor([[5, 6, *[IMAGE] * 8, 7, 8]])
    marks, model = (ids == IMAGE).long(), enable(make("Gemma3"))
    with pytest.raises(ValueError, match="segment 2 begins with an image and segment 0, above it, ends with one"):
        model(input_ids=ids, token_type_ids=marks, pixel_values=torch.ones(2, 3, 8, 8), dualkv=layout)
    text = torch.randint(3, 80, (1, 12))
    with pytest.raises(ValueError, match="pixel_values has 1 images, input_ids 0 of their placeholders"):
        model(input_ids=text, token_type_ids=0 * marks, pixel_values=torch.zeros(1, 3, 8, 8), dualkv=layout)


def test_forgotten_images_are_refused() -> None:
    prompts, responses, media = rollouts("LlavaNext", ONE)
    batch = dualkv.pack(prompts, responses, media=media)
    with pytest.raises(ValueError, match=r"LlavaNextModel got the packed input_ids of a batch with pixel_values witho"):
        enable(make("LlavaNext"), check=False)(input_ids=batch.input_ids, dualkv=batch.layout)
