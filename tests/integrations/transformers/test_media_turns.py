"""Images in responses and turns of rollouts: against each rollout run alone with its own copies of all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import pad

import dualkv

pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable
from tests.integrations.transformers.test_media import (
    FILM,
    GRID,
    IMAGE,
    NONE,
    ONE,
    PLAIN,
    TWO,
    VIDEO,
    Rollout,
    compare,
    make,
    plain_prompt,
    prompt,
    without,
)

pytestmark = pytest.mark.usefixtures("one_thread")
WIDE = ((1, 6, 2),)


def turn(draw: torch.Generator, family: str, grids: Any) -> Rollout:
    """Text with images, and what a processor returns for it."""
    ids, entry = (prompt if family in GRID else plain_prompt)(draw, family, *grids)
    if not {"mm_token_type_ids", "token_type_ids"} & entry.keys():
        entry["mm_token_type_ids"] = ((ids == IMAGE) + 2 * (ids == VIDEO))[None]
    return ids, entry


def merged(*turns: Rollout) -> Rollout:
    """The text of all turns, and what a processor returns for it."""
    entry: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, one in turns for name in one):
        values = [one[name] for _, one in turns if name in one]
        if isinstance(values[0], list):
            entry[name] = [x for value in values for x in value]
            continue
        dim = int("type_ids" in name or any("pixel_attention_mask" in one for _, one in turns))
        most = torch.tensor([x.shape for x in values]).amax(0).tolist()
        for i, x in enumerate(values):
            sizes = [0 if at == dim else most[at] - n for at, n in enumerate(x.shape)]
            values[i] = pad(x, [n for size in reversed(sizes) for n in (0, size)])
        entry[name] = torch.cat(values, dim)
    return torch.cat([ids for ids, _ in turns]), entry


def tree(family: str) -> list[Rollout]:
    """Rollouts of a tree of depth 3: images in the prompt, a shared turn, leaves, one of them twice, a video in a turn;
    one without any, and two of equal text with other images."""
    draw = torch.Generator().manual_seed(4)
    films = not family.startswith("Glm") if family in GRID else family in ("Gemma4", "LlavaNextVideo", "LlavaOnevision")
    start, one, two = (turn(draw, family, grids) for grids in (ONE, TWO, FILM if films else WIDE))
    text, leaf = turn(draw, family, NONE), turn(draw, family, WIDE)
    other = {name: x + 0.25 if name == "pixel_values" else x for name, x in leaf[1].items()}
    return [
        merged(start, one, leaf),
        merged(start, one, (leaf[0], other)),
        merged(start, one, text),
        merged(start, two, start),
        merged(turn(draw, family, NONE), text),
        merged(start, two, text, leaf),
    ]


LABELS = [(family, ("gather", "roll")[i % 2]) for i, family in enumerate([*GRID, *PLAIN])]


@pytest.mark.parametrize(("family", "labels"), LABELS)
def test_images_in_turns_of_trees(family: str, labels: Any) -> None:
    rollouts = tree(family)
    ids, media = map(list, zip(*rollouts, strict=True))
    masks = [torch.arange(len(x)) % 3 == 1 for x in ids]
    batch = dualkv.pack_sequences(ids, masks, labels=labels, media=media)
    # LLaVA-OneVision's images are cut by the number of images of a text, so they stay together.
    assert batch.layout.num_tokens < (1 if family == "LlavaOnevision" else 0.8) * batch.layout.nominal_tokens
    compare(family, batch, rollouts, [mask.nonzero()[:, 0] for mask in masks])


@pytest.mark.parametrize(
    ("family", "labels"), [("Qwen2_5_VL", "roll"), ("Gemma3", "gather"), ("LlavaOnevision", "roll")]
)
def test_images_in_responses(family: str, labels: Any) -> None:
    """Two prompts; responses with images, text alone, and nothing."""
    draw = torch.Generator().manual_seed(4)
    prompts = [turn(draw, family, ONE), turn(draw, family, NONE)]
    empty = torch.zeros(0, dtype=torch.int64), {}
    answers = [turn(draw, family, grids) for grids in (WIDE, NONE, TWO)] + [empty, turn(draw, family, ONE)]
    of = [0, 1, 1, 0, 0]
    given: dict[str, Any] = {"media": [prompts[g][1] for g in of], "response_media": [a for _, a in answers]}
    batch = dualkv.pack([prompts[g][0] for g in of], [ids for ids, _ in answers], labels=labels, **given)
    assert batch.layout.num_groups == 2
    rollouts = [merged(prompts[g], answer) for g, answer in zip(of, answers, strict=True)]
    trained = [torch.arange(len(prompts[g][0]), len(x)) for g, (x, _) in zip(of, rollouts, strict=True)]
    compare(family, batch, rollouts, trained)

    def padded(name: str, rows: list[torch.Tensor], left: bool) -> dict[str, Any]:
        most = max(map(len, rows)) + 2
        at = [(most - len(x), 0) if left else (1, most - len(x) - 1) for x in rows]
        mask = [pad(torch.ones(len(x)), a) for x, a in zip(rows, at, strict=True)]
        entries = given["media" if left else "response_media"]
        for i, entry in enumerate(entries):
            entries[i] = {k: pad(v, at[i]) if "type_ids" in k else v for k, v in entry.items()}
        return {
            f"{name}_ids": torch.stack([pad(x, a) for x, a in zip(rows, at, strict=True)]),
            f"{name}_mask": torch.stack(mask),
        }

    of_rows = padded("prompt", [prompts[g][0] for g in of], True) | padded("response", [x for x, _ in answers], False)
    same = dualkv.pack_padded(**of_rows, labels=labels, **given)
    assert torch.equal(same.input_ids, batch.input_ids)
    assert same.media.keys() == batch.media.keys()
    assert all(torch.equal(same.media[name], x) for name, x in batch.media.items())
    grouped = dualkv.pack(
        [ids for ids, _ in prompts], [[answers[i][0] for i in (0, 3, 4)], [answers[i][0] for i in (1, 2)]],
        labels=labels, media=[entry for _, entry in prompts],
        response_media=[[answers[i][1] for i in (0, 3, 4)], [answers[i][1] for i in (1, 2)]],
    )  # fmt: skip
    assert all(torch.equal(grouped.media[name], x) for name, x in batch.media.items())


def test_what_sequences_share() -> None:
    """Equal images in equal text, wherever they are; never a part of one. Plans count them too."""
    draw = torch.Generator().manual_seed(4)
    start, after, end = turn(draw, "Qwen3VL", ONE), turn(draw, "Qwen3VL", WIDE), turn(draw, "Qwen3VL", NONE)
    copy = {name: x.clone() for name, x in start[1].items()}
    other = copy | {"pixel_values": copy["pixel_values"] + 1}
    rollouts = [merged(start, after), merged((start[0], copy), end), merged((start[0], other), end)]
    ids, media = map(list, zip(*rollouts, strict=True))
    batch = dualkv.pack_sequences(ids, media=media)
    # The third one shares the text before its image alone.
    before = int((start[0] == IMAGE).int().argmax())
    assert batch.layout.num_tokens == sum(map(len, ids)) - len(start[0]) - before
    assert batch.media["image_grid_thw"].tolist() == [[1, 4, 6], [1, 6, 2], [1, 4, 6]]
    assert (batch.media["mm_token_type_ids"] == (batch.input_ids == IMAGE)).all()
    assert batch.to("meta").media["pixel_values"].device.type == "meta"
    budget = len(ids[0]) + len(end[0])
    assert dualkv.plan_sequences(ids, budget) == [[0, 1, 2]]  # of text
    assert dualkv.plan_sequences(ids, budget, media=media) == [[0, 1], [2]]
    wide = max(map(len, ids)) + 3
    rows = torch.stack([pad(x, (wide - len(x), 0)) for x in ids])
    mask = torch.stack([pad(torch.ones(len(x)), (wide - len(x), 0)) for x in ids])
    kinds = [
        {**entry, "mm_token_type_ids": pad(entry["mm_token_type_ids"], (wide - len(x), 0))} for x, entry in rollouts
    ]
    same = dualkv.pack_sequences(rows, attention_mask=mask, media=kinds)
    assert torch.equal(same.input_ids, batch.input_ids)
    assert all(torch.equal(same.media[name], x) for name, x in batch.media.items())
    # A branch behind an image repeats it where branches have their own copies of the token before them.
    last = [torch.tensor([7, IMAGE, IMAGE, x]) for x in (5, 6)]
    entry = {"pixel_values": torch.ones(8, 24), "image_grid_thw": torch.tensor([[1, 2, 4]]),
             "mm_token_type_ids": torch.tensor([0, 1, 1, 0])}  # fmt: skip
    for labels, expected in (("gather", 5), ("roll", 7)):
        assert dualkv.pack_sequences(last, media=[entry, entry], labels=labels).layout.num_tokens == expected


def test_the_canary_sees_images_of_trees() -> None:
    rollouts = tree("Qwen3VL")
    ids, media = map(list, zip(*rollouts, strict=True))
    batch, model = dualkv.pack_sequences(ids, media=media), enable(make("Qwen3VL"))
    with pytest.raises(ValueError, match="batch has images and media is None"):
        dualkv.packed_vs_separate(model, batch)
    assert dualkv.packed_vs_separate(model, batch, rollouts=3, media=media, error=True).difference < 1e-4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m[:1], ValueError, "media has 1 entries for 2 token sequences"),
        (lambda m: [m[0], without(m[1], "mm_token_type_ids")], ValueError,
         r"media\[1\] has pixel_values and no mm_token_type_ids: expected one value a token"),
        (lambda m: [m[0], m[1] | {"mm_token_type_ids": 0 * m[1]["mm_token_type_ids"]}], ValueError,
         r"media\[1\]\['pixel_values'\] has 28 patches for 0 placeholder tokens"),
        (lambda m: [m[0], without(m[1], "pixel_values", "image_grid_thw")], ValueError,
         r"media\[1\]\['pixel_values'\] has 0 patches for 7 placeholder tokens"),
        (lambda m: [m[0], None], ValueError,
         rf"token \d+ of the sequence of media\[1\] is {IMAGE}, which stands for an image or video elsewhere"),
        (lambda m: [m[0], m[1] | {name: m[1][name][n:] for name, n in (("pixel_values", 4), ("image_grid_thw", 1))}],
         ValueError, r"has 24 patches for 7 placeholder tokens, those of media\[0\] have 24 for 6"),
    ],
)  # fmt: skip
def test_media_of_sequences_that_do_not_fit(change: Any, error: type[Exception], message: str) -> None:
    draw = torch.Generator().manual_seed(2)
    (first, a), (second, b) = turn(draw, "Qwen3VL", ONE), turn(draw, "Qwen3VL", TWO)
    with pytest.raises(error, match=message):
        dualkv.pack_sequences([first, second], media=change([a, b]))
    for media in ([a], [[a], [b, None]], {"x": 1}):
        with pytest.raises((ValueError, TypeError), match=r"^response_media"):
            dualkv.pack([[3], [4]], [[first], [second]], response_media=media)


def test_equal_images_of_other_placeholders() -> None:
    """Tokens count beside content: each sequence keeps its own ids."""
    entry = {"pixel_values": torch.ones(1, 3, 8, 8), "mm_token_type_ids": torch.tensor([0, 1, 1, 0])}
    ids = [[5, IMAGE, 91, 6], [5, 91, IMAGE, 6]]
    batch = dualkv.pack_sequences(ids, media=[entry, entry])
    assert [x.tolist() for x in batch.unpack_sequences(batch.input_ids)] == ids


def test_images_that_one_text_lacks_and_another_has_too_many() -> None:
    """Test that they are refused, though they add up to as many as there are placeholders in one packed row."""
    draw = torch.Generator().manual_seed(2)
    for family, message in (("InternVL", "3 images for 8"), ("Idefics3", "3 images for"), ("Gemma3", "3 images for")):
        ids, even = turn(draw, family, ((1, 2, 2),) * 2)
        dim = int("pixel_attention_mask" in even)
        names = [name for name in even if "type_ids" not in name]
        less = even | {name: even[name].narrow(dim, 0, 1) for name in names}
        more = even | {name: torch.cat([even[name], less[name]], dim) for name in names}
        for given in ({"media": [less, more]}, {"response_media": [less, more]}):
            other = [torch.tensor([3])] * 2
            texts = ([ids] * 2, other) if "media" in given else (other, [ids] * 2)
            with pytest.raises(ValueError, match=message):
                dualkv.pack(*texts, **given)
        with pytest.raises(ValueError, match=rf"^response_media\[0\].*{message}"):
            dualkv.pack([ids], [ids], media=[less], response_media=[more])
        with pytest.raises(ValueError, match=rf"^media\[1\].*{message}"):
            dualkv.pack_sequences([ids, ids], media=[less, more])
