"""Audio in packed calls of Qwen-Omni's thinkers: against each rollout run alone with its own copy of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualkv

pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable
from tests.integrations.transformers.test_media import NONE, ONE, SOUND, compare, compare_groups, make, prompt

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ["Qwen2_5OmniThinker", "Qwen3OmniMoeThinker"]


def heard(draw: torch.Generator, family: str, frames: tuple[int, ...], *images: Any) -> tuple[Any, dict[str, Any]]:
    """Ids and what a processor returns for a text with audio of so many frames, and images behind it."""
    ids, entry = prompt(draw, family, *images)
    del entry["mm_token_type_ids"]
    if not frames:
        return ids, entry
    features, mask = torch.zeros(len(frames), 8, max(frames)), torch.zeros(len(frames), max(frames), dtype=torch.int64)
    parts = []
    for i, count in enumerate(frames):
        features[i, :, :count] = torch.randn(8, count, generator=draw)
        mask[i, :count] = 1
        of_chunks = sum(-(-min(100, count - begin) // 8) for begin in range(0, count, 100))
        rows = ((count - 1) // 2 - 1) // 2 + 1 if "2_5" in family else of_chunks
        parts += [SOUND + 1, *[SOUND] * rows, SOUND - 1, 5]
    return torch.cat([torch.tensor(parts), ids]), entry | {"input_features": features, "feature_attention_mask": mask}


def rollouts(family: str) -> Any:
    """Prompts with audio and an image, with two audios, with text alone, and with other audio of the same ids."""
    draw = torch.Generator().manual_seed(1)
    of_groups = [heard(draw, family, frames, *images)
                 for frames, images in (((130,), ONE), ((130, 217), NONE), ((), NONE), ((), ONE))]  # fmt: skip
    ids, entry = of_groups[0]
    of_groups.append(
        (ids, entry | {"input_features": entry["input_features"] + entry["feature_attention_mask"][:, None]})
    )
    order = [0, 1, 2, 3, 4, 0, 1, 4]
    responses = [torch.randint(3, 80, (n,), generator=draw) for n in (3, 0, 6, 1, 4, 2, 5, 3)]
    copies = [{k: v.clone() for k, v in of_groups[g][1].items()} for g in order]
    return [of_groups[g][0] for g in order], responses, copies


@pytest.mark.parametrize("family", FAMILIES)
def test_audio_of_several_groups(family: str) -> None:
    prompts, responses, media = rollouts(family)
    assert len(dualkv.pack(prompts, responses, media=media).media["input_features"]) == 4
    compare_groups(family, prompts, responses, media, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_audio_in_turns(family: str) -> None:
    """Audio of equal content is shared, other audio of the same ids is not."""
    prompts, responses, media = rollouts(family)
    sequences = [torch.cat(x) for x in zip(prompts, responses, strict=True)]
    masks = [torch.arange(len(x)) >= len(ids) for x, ids in zip(sequences, prompts, strict=True)]
    for ids, entry in zip(sequences, media, strict=True):
        kinds = 3 * (ids == SOUND) + (ids == 88)
        if entry:
            entry["mm_token_type_ids"] = kinds[None]
    batch = dualkv.pack_sequences(sequences, masks, media=media)
    assert len(batch.media["input_features"]) == 4
    compare(family, batch, list(zip(sequences, media, strict=True)), [mask.nonzero()[:, 0] for mask in masks])


def changed(family: str, **other: Any) -> dict[str, Any]:
    """The inputs of a packed call with some others."""
    prompts, responses, media = rollouts(family)
    batch = dualkv.pack(prompts, responses, media=media)
    return {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media, **other}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"use_audio_in_video": True}, "use_audio_in_video came together with dualkv"),
        ({"audio_feature_lengths": torch.tensor([3])}, r"audio_feature_lengths came together with dualkv: Qwen3O"),
        ({"feature_attention_mask": None}, r"input_features has shape \(4, 8, 217\), feature_attention_mask None"),
        ({"feature_attention_mask": torch.ones(4, 217)}, "feature_attention_mask describes 4 images, videos or au"),
        ({"feature_attention_mask": (torch.arange(217) < torch.tensor([[40], [130], [217], [130]])).long()},
         "has audio of 40 frames beside longer audio, expected 100 frames or more"),
        ({"audio_segments": torch.tensor([0, 0, 3, 9])}, "1 of input_features is one of segment 0 of the layout"),
    ],
)  # fmt: skip
def test_calls_that_are_refused(other: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        enable(make(FAMILIES[1]))(**changed(FAMILIES[1], **other))


def test_audio_that_no_value_marks() -> None:
    ids, entry = heard(torch.Generator().manual_seed(1), FAMILIES[0], (130,), *ONE)
    entry["mm_token_type_ids"] = (ids == 88).long()[None]
    with pytest.raises(ValueError, match=r"media\[0\] has input_features and no 3 in mm_token_type_ids"):
        dualkv.pack_sequences([ids], [torch.ones_like(ids)], media=[entry])
