"""Images in Megatron-Bridge's models: packed rollouts against each alone, the vision tower included, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualkv
from dualkv.integrations.megatron import PackedGroups, disable, enable
from tests.integrations.megatron import cpu, images
from tests.integrations.megatron.updates import AGAIN, EXPERTS, MULTIMODAL, build, layer_spec
from tests.ranks import on_ranks

bridged = pytest.mark.skipif(not images.bridge(), reason="Megatron-Bridge is not installed")
FAMILIES = ("qwen2.5", "qwen3")


@bridged
@pytest.mark.parametrize("family", FAMILIES)
def test_images(family: str) -> None:
    found = images.compare(family, **AGAIN | EXPERTS if family == "qwen3" else {})
    assert max(found.values()) < 1e-5
    assert len(found) > 50


@bridged
@pytest.mark.parametrize("family", [pytest.param("qwen2.5", marks=pytest.mark.slow), "qwen3"])
def test_ranks_that_share_rows_and_heads(family: str, tmp_path: Path) -> None:
    on_ranks(2, "tests.integrations.megatron.images:main", str(tmp_path), family)
    for rank in range(2):
        assert max(torch.load(tmp_path / f"{rank}.pt").values()) < 1e-5


@bridged
def test_a_model_enabled_and_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of text show, so the bounds separate right from wrong. Calls without PackedGroups do not change."""
    cpu.parallel()
    model, hand = images.build("qwen3"), PackedGroups._place
    alone = images.update(model, False)
    again = images.update(disable(model), False)
    assert torch.equal(alone.logp, again.logp)
    batch = packed()
    with pytest.raises((AssertionError, RuntimeError)):  # a stock model does not take packed groups
        call(model, batch, **batch.media)
    expected = call(enable(model), batch, **batch.media)
    monkeypatch.setattr(PackedGroups, "_place", lambda self, position_ids: hand(self, batch.position_ids.expand(3, -1)))
    assert (call(model, batch, **batch.media) - expected).abs().max() > 1e-2


def packed() -> dualkv.PackedSequences:
    group = images.rollouts()[1]
    return dualkv.pack_sequences([x.ids for x in group], media=[x.media for x in group])


def call(model: Any, batch: Any, **media: Any) -> torch.Tensor:
    found: torch.Tensor = model(batch.input_ids, packed_seq_params=PackedGroups(batch), **media)
    return found


@bridged
def test_refused() -> None:
    cpu.parallel()
    model, batch = images.build("qwen2.5"), packed()
    grid, pixels = batch.media["image_grid_thw"], batch.media["pixel_values"]

    def says(message: str, **media: Any) -> None:
        with pytest.raises(ValueError, match=message):
            call(model, batch, **media)

    says(r"^mm_token_type_ids marks \d+ rows with 1, and no image_grid_thw came")
    says("^pixel_values has 16 patches, image_grid_thw counts", **batch.media | {"pixel_values": pixels[:16]})
    says(
        r"^image_grid_thw\[0\] has \d+ rows, in segments \d+ and \d+ of the layout: expected each segment's images",
        **batch.media | {"image_grid_thw": torch.tensor([[1, 2, len(pixels) // 2]])},
    )
    says("^pixel_values_videos came with PackedGroups: Qwen25VLModel runs packed with", pixel_values_videos=pixels)
    for name in ("context_parallel_size", "pipeline_model_parallel_size"):
        setattr(model.config, name, 2)
        says(f"^images came and {name} is 2, expected 1: it was not tried$", **batch.media)
        setattr(model.config, name, 1)
    assert len(grid) == 4  # one of them in two rollouts
    nobody = nn.Module()
    nobody.part = disable(model).language_model
    with pytest.raises(ValueError, match=r"^Module calls a GPTModel with position_embedding_type 'mrope', expected "):
        enable(nobody)


def test_positions_of_a_model_without_a_tower() -> None:
    """A caller who places images gives their positions. A batch with images does not run without."""
    cpu.parallel()
    settings = {"mrope_section": MULTIMODAL["mrope_section"]}
    model = enable(build(layer_spec(), settings, **MULTIMODAL["arguments"]))
    batch = packed()
    with pytest.raises(ValueError, match=r"^the batch of PackedGroups has pixel_values, which the model did not get: "):
        model(batch.input_ids, None, None, packed_seq_params=PackedGroups(batch))
    with pytest.raises(ValueError, match=r"^position_ids has shape \(1, 9\), expected \[3, T\]$"):
        PackedGroups(batch, position_ids=torch.zeros(1, 9))
    spec_alone = build(enable(layer_spec()), settings, **MULTIMODAL["arguments"])
    positions = batch.position_ids.expand(3, 1, -1)
    with pytest.raises(ValueError, match=r"^the spec of a model with multimodal positions was enabled, "):
        spec_alone(batch.input_ids, positions, None, packed_seq_params=PackedGroups(batch))
