"""Images over the rows of two ranks, against the same model on one: each rank runs the tower on its share of them."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dualkv
from dualkv.context_parallel import ContextShard
from dualkv.sequence_parallel import Shard

pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable
from tests.integrations.transformers import test_media_audio, test_media_turns
from tests.integrations.transformers.test_media import FILM, GRID, NONE, ONE, PLAIN, TWO, make, rollouts
from tests.integrations.transformers.test_recurrent_ranks import (
    added_up,
    difference,
    norms_of_gradients,
    on_each,
    results,
)

KINDS = (Shard, ContextShard)
# One of each way to run images; two kinds of towers take one image in all, so that a rank has none of its own.
OFTEN = ["Qwen3VL", "Qwen3_5", "InternVL", "LlavaNext", "Gemma3", "Gemma4"]
FEW = ("Qwen3VL", "LlavaNext")
FOUR = ((1, 4, 4), (1, 6, 4))


def cases(families: str) -> list[tuple[str, Any]]:
    """Families, and what they see or hear."""
    names = OFTEN if families == "often" else [*GRID, *PLAIN]
    # Mistral 3's own code fails for images of one row, when it gets no other.
    found: list[tuple[str, Any]] = [
        (family, (ONE, FOUR if family == "Mistral3" else TWO, NONE)) for family in names
    ] + [(family, (NONE, ONE)) for family in FEW]
    films = [x for x in names if x in (*GRID, "LlavaNextVideo", "LlavaOnevision", "Gemma4")]
    found += [
        (family, "audio") for family in (test_media_audio.FAMILIES if families == "all" else ["Qwen2_5OmniThinker"])
    ]
    found += [(family, "tree") for family in (names if families == "all" else ["Qwen3VL", "Gemma3"])]
    return found + [(family, (FILM, NONE)) for family in (films if families == "all" else ["Glm4v", "Gemma4"])]


def packed(family: str, groups: Any) -> Any:
    """Prompts with the images of `groups`, or with audio beside them, or a tree of depth 3."""
    if groups == "tree":
        ids, media = zip(*test_media_turns.tree(family), strict=True)
        return dualkv.pack_sequences(list(ids), [torch.arange(len(x)) % 3 == 1 for x in ids], media=list(media))
    prompts, responses, media = test_media_audio.rollouts(family) if groups == "audio" else rollouts(family, *groups)
    return dualkv.pack(prompts, responses, media=media)


def other_images(model: Any, batch: Any, rank: int) -> list[str]:
    """Return the errors of ranks that have other images, and of ranks of which one has none."""
    shard, found = Shard(batch.layout, dist.group.WORLD), []
    of_ranks = batch.media | {"pixel_values": batch.media["pixel_values"] + rank}, {} if rank else batch.media
    for media in of_ranks:
        with pytest.raises(ValueError, match="differ") as error:
            model(input_ids=shard.split(batch.input_ids, 1), dualkv=shard, **media)
        found.append(str(error.value))
    return found


def run(rank: int, families: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, (family, groups) in enumerate(cases(families)):
        batch = packed(family, groups)
        model, compares = enable(make(family), check=False), number % 2 == rank
        expected = results(model, batch.layout, batch.layout, batch.input_ids, **batch.media) if compares else {}
        for kind in KINDS:
            given = kind(batch.layout, dist.group.WORLD)
            got = results(model, batch.layout, given, batch.input_ids, **batch.media)
            of_ranks: list[Any] = [None, None]  # FSDP reduces gradients on all ranks
            dist.all_gather_object(of_ranks, [name for name, p in model.named_parameters() if p.grad is not None])
            assert of_ranks[0] == of_ranks[1]
            whole = added_up(got, number % 2)
            if compares:
                least = statistics.mean(norms_of_gradients(expected))
                found[f"{family} {groups} {kind.__name__}"] = difference(whole, expected, least)
        if family == "Qwen3VL" and groups == (ONE, TWO, NONE):
            found["refused"] = other_images(model, batch, rank)
    return found


@pytest.mark.parametrize("families", ["often", pytest.param("all", marks=pytest.mark.slow)])
def test_as_on_one_rank(families: str) -> None:
    found: dict[str, Any] = {}
    for rank, of_rank in enumerate(on_each(2, "test_media_ranks:run", families)):
        found |= of_rank
        others, some = found.pop("refused")
        assert others.startswith("pixel_values, image_grid_thw differ between the 2 ranks")
        assert some.startswith(("pixel_values, image_grid_thw", "images")[rank] + " differ between the 2 ranks")
    assert len(found) == len(cases(families)) * len(KINDS)
    # Gemma 4: with weights in fp64 the same ranks differ by 2e-7.
    assert [(way, *error) for way, error in found.items() if error[0] > (3e-5 if "Gemma4" in way else 1e-5)] == []
