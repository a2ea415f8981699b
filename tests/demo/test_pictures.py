"""The demo on pictures that it draws: both ways agree, and its patches are those of transformers' processor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dualkv.demo.pictures import draw, patches
from dualkv.demo.run import run_demo
from dualkv.demo.settings import DemoSettings
from dualkv.models import load_model
from tests.integrations.tiny import SIZES
from tests.integrations.transformers.test_media import make

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"model": "qwen3-vl-tiny", "prompt_len": 20, "responses": 3, "response_len": 6, "steps": 2, "device": "cpu"}


def test_both_ways_agree_on_pictures() -> None:
    found = run_demo(DemoSettings(**SMALL, check=True))
    assert found.exact
    replicated, packed = found.ways["replicated"], found.ways["packed"]
    assert packed.tokens[0] < replicated.tokens[0] / 2
    # Of float64, in which a mistake that both ways share would show.
    assert max(apart.gradients for apart in found.to_truth.values()) < 1e-4


def test_patches_are_those_of_a_processor() -> None:
    picture = draw(96, 64, torch.Generator().manual_seed(0))
    settings = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    processor = Qwen2VLImageProcessorPil(**settings, do_resize=False, do_rescale=False, do_normalize=False)
    expected = processor(np.ascontiguousarray(picture.numpy()), return_tensors="pt", input_data_format="channels_first")
    assert expected["image_grid_thw"].tolist() == [[1, 12, 8]]
    torch.testing.assert_close(patches(picture, 8, 2, 2), expected["pixel_values"])


def test_all_ways_agree_on_turns_with_pictures() -> None:
    found = run_demo(DemoSettings(**SMALL | {"turns": 2, "responses": 4, "steps": 1, "groups": 1}, check=True))
    assert found.exact
    replicated, packed, tree = (found.ways[way].tokens[0] for way in ("replicated", "packed", "tree"))
    assert tree < packed < replicated
    assert max(apart.gradients for apart in found.to_truth.values()) < 1e-4


def test_a_folder_of_a_model_that_sees_pictures(tmp_path: Path) -> None:
    load_model(SMALL["model"], torch.float32, torch.device("cpu"), 0).save_pretrained(tmp_path)
    of_folder, named = (
        run_demo(DemoSettings(**SMALL | {"model": x, "steps": 1})) for x in (str(tmp_path), SMALL["model"])
    )
    assert of_folder.exact
    assert of_folder.ways["packed"].losses == named.ways["packed"].losses


def test_pictures_of_other_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "vocab_size", 320)
    make("Gemma3").save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="model is of type gemma3, which sees pictures and has no vision_start_token_id"
    ):
        run_demo(DemoSettings(**SMALL | {"model": str(tmp_path)}))
