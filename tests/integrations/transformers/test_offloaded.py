"""Models whose weights accelerate's hooks bring to each layer: packed calls equal those of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dualkv

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate

from dualkv.branches import Branch
from dualkv.context_parallel import ContextShard
from dualkv.integrations.transformers import enable
from dualkv.integrations.transformers.ahead import Ahead
from dualkv.integrations.transformers.placed import Placed
from dualkv.sequence_parallel import Shard
from tests.integrations.tiny import make_model
from tests.integrations.transformers import test_media as images

CPU = torch.device("cpu")


def dispatched(model: Any, folder: Path) -> Any:
    """One layer on disk, the others where they run."""
    places = {"lm_head": "cpu", "model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{i}": "disk" if i else "cpu" for i in range(len(model.model.layers))}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


HOOKS: dict[str, Callable[[Any, Path], Any]] = {
    "cpu_offload": lambda model, folder: accelerate.cpu_offload(model, CPU),
    "cpu_offload, no device": lambda model, folder: accelerate.cpu_offload(model),
    "disk_offload": lambda model, folder: accelerate.disk_offload(model, folder, CPU),
    "device_map": dispatched,
}


@pytest.mark.parametrize("family", ["Gemma4", "Qwen3VL"])
def test_offloaded_models_with_images(family: str) -> None:
    """The layers of Gemma 4 get a layout with images that see ahead."""
    prompts, responses, media = images.rollouts(family, ((1, 4, 4),))
    batch = dualkv.pack(prompts, responses, media=media)
    given = {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}
    with torch.no_grad():
        wanted = enable(images.make(family).eval()).model(**given).last_hidden_state
        model = images.make(family).eval()
        accelerate.cpu_offload(model.model.language_model.layers, CPU)  # some vision towers cannot be offloaded
        assert torch.equal(enable(model).model(**given).last_hidden_state, wanted)


@pytest.mark.parametrize("first", ["enable", "hooks"])
@pytest.mark.parametrize("hooks", HOOKS)
def test_offloaded_models_run_packed(hooks: str, first: str, tmp_path: Path) -> None:
    batch = dualkv.pack_sequences([[5, 6, 7, 8, 9], [5, 6, 7, 10], [5, 6, 11, 12, 13, 14]])
    layout = batch.layout
    plain = enable(make_model())

    def walked(model: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def forward(input_ids: torch.Tensor, branch: Any) -> torch.Tensor:
            found.append(model(input_ids=input_ids, dualkv=branch).logits)
            return found[-1]

        dualkv.walk(batch, 3, forward)
        return found

    def whole(model: Any) -> list[torch.Tensor]:
        one = layout, Shard(layout, None), ContextShard(layout, None)
        return [model(input_ids=batch.input_ids, dualkv=of_rows).logits for of_rows in one]

    with torch.no_grad():
        wanted = whole(plain) + walked(plain)
        model = make_model()
        model = HOOKS[hooks](enable(model) if first == "enable" else model, tmp_path)
        assert any(p.is_meta for p in model.parameters()), "nothing is offloaded"
        found = whole(enable(model)) + walked(model)
    assert len(found) > 4
    assert all(map(torch.equal, found, wanted))


def test_what_goes_under_dualkv_moves() -> None:
    """Hooks call `to` with None, a device or its number, and `non_blocking`. Anything without `to` stays as it is."""
    batch = dualkv.pack([[1, 2], [3]], [[[4, 5]], [[6], [7]]])
    layout, rows = batch.layout, torch.arange(2)
    ahead = Placed(layout, layout.position_ids[None], Ahead(rows, rows, layout, True))
    sequences = dualkv.pack_sequences([[1, 2], [1, 3]])
    for given in (layout, Shard(layout, None), ContextShard(layout, None), ahead, batch, sequences):
        assert given.to(None, non_blocking=True) is given
        assert given.to("cpu", non_blocking=True) is given
        there = given.to(torch.device("meta"), non_blocking=True)
        assert type(there) is type(given)
        assert there.position_ids.is_meta
        assert not given.position_ids.is_meta
    assert there.layout == sequences.layout
    moved = ahead.to("meta")
    assert moved.layout.visible_end.is_meta
    assert moved.ahead.queries.is_meta
    assert moved.ahead.layout.device.type == "meta"
    shard = Shard(layout, None)
    assert not shard.rows.is_meta
    assert shard.to("meta").rows.is_meta
    assert not hasattr(Branch, "to")
