"""Small models of Megatron-Bridge with vision towers, and updates of packed and of replicated rollouts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import megatron
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import gpt_model as gpt_model  # before the others, which it imports in a circle
from megatron.core.process_groups_config import ProcessGroupCollection

import dualkv
from dualkv.integrations.megatron import PackedGroups, enable
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import SMALL, layer_spec

START, END, IMAGE, VIDEO = 56, 57, 58, 59
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
SECTIONS = {"qwen2.5": [2, 3, 3], "qwen3": [4, 2, 2]}
TOWER = {
    "depth": 3,
    "num_heads": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "out_hidden_size": SMALL["hidden_size"],
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}


def bridge() -> bool:
    """Makes Megatron-Bridge's models importable, if it is installed. The `__init__` of its packages imports all of it,
    and with it Transformer Engine."""
    folder = next((Path(x) / "bridge" for x in megatron.__path__ if (Path(x) / "bridge/models/qwen_vl").is_dir()), None)
    if folder is None or importlib.util.find_spec("transformers") is None:
        return False
    inner = ("", "models", "models.qwen_vl", "models.qwen_vl.modelling_qwen3_vl", "training", "training.utils", "utils")
    for name in inner:
        package = ModuleType(f"megatron.bridge.{name}".rstrip("."))
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules.setdefault(package.__name__, package)
    return True


def settings(**more: Any) -> dict[str, Any]:
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return SMALL | {"qk_layernorm": False, "init_method_std": 0.25, "tensor_model_parallel_size": ranks} | more


class Tower(torch.nn.Module):
    """transformers' vision tower in the place of Megatron-Bridge's, which is made of Transformer Engine's layers."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

        self.tower = Qwen3VLVisionModel(vision_config("qwen3"))

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> Any:
        found = self.tower(hidden_states, grid_thw=grid_thw)
        return found.pooler_output, list(found.deepstack_features)


def vision_config(family: str) -> Any:
    if family == "qwen3":
        from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

        deep = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        return Qwen3VLVisionConfig(**TOWER, **deep)
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    return Qwen2_5_VLVisionConfig(**TOWER, window_size=8, fullatt_block_indexes=[1], tokens_per_second=3)


def build(family: str, **more: Any) -> Any:
    """A model with the same weights every time, on any number of ranks."""
    torch.manual_seed(0)
    given = settings(mrope_section=SECTIONS[family], **more)
    spec, groups = layer_spec(False, **more), ProcessGroupCollection.use_mpu_process_groups()
    if family == "qwen2.5":
        from megatron.bridge.models.qwen_vl.qwen25_vl_provider import Qwen25VLModelProvider

        provider = Qwen25VLModelProvider(
            **given, **TOKENS, vocab_size=64, seq_length=64, transformer_layer_spec=lambda _: spec,
            vision_config=vision_config(family), share_embeddings_and_output_weights=False,
        )  # fmt: skip
        provider.finalize()
        provider._pg_collection = groups
        model = provider.provide(pre_process=True, post_process=True)
    else:
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model as theirs
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import Qwen3VLTransformerConfig

        for layer in spec.layer_specs:  # as the model does itself with the spec of one layer
            layer.submodules.self_attention.module = theirs.Qwen3VLSelfAttention
        config = Qwen3VLTransformerConfig(**given, **TOKENS, vocab_size=64, language_max_sequence_length=64)
        config.use_hf_vision_model = False
        part = SimpleNamespace(submodules=SimpleNamespace(self_attention=SimpleNamespace()))
        with (
            patch.object(theirs, "Qwen3VLVisionModel", Tower),
            patch.object(theirs, "get_vit_layer_with_transformer_engine_spec", lambda: part),
        ):
            model = theirs.Qwen3VLModel(config, spec, vision_config(family), pg_collection=groups)
    return enable(model.train())


# ---------------------------------------------------------------- rollouts
class Text(NamedTuple):
    """Tokens, and what a processor returns for its images."""

    ids: torch.Tensor
    media: dict[str, torch.Tensor]


class Draw:
    """Parts of rollouts: text is a number of tokens, an image its height and width in patches."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def part(self, what: int | tuple[int, int]) -> tuple[list[int], torch.Tensor | None, tuple[int, int] | None]:
        if isinstance(what, int):
            return torch.randint(0, START, (what,), generator=self.random).tolist(), None, None
        height, width = what
        patches = torch.randn(height * width, 3 * 2 * 2 * 2, generator=self.random)
        return [START, *[IMAGE] * (height * width // 4), END], patches, what

    def text(self, *parts: Any) -> Text:
        ids = torch.tensor([token for part in parts for token in part[0]])
        images = [part for part in parts if part[1] is not None]
        media = {"mm_token_type_ids": (ids == IMAGE).int()}
        if images:
            media["pixel_values"] = torch.cat([part[1] for part in images])
            media["image_grid_thw"] = torch.tensor([[1, *part[2]] for part in images])
        return Text(ids, media)


def rollouts() -> list[list[Text]]:
    """Groups: images in a prompt and in responses; an agent's turns with screenshots, one of them twice; text."""
    draw = Draw()
    image, other, wide, tall = (draw.part(size) for size in ((4, 4), (4, 6), (2, 8), (6, 2)))
    prompt = [draw.part(3), image, draw.part(2)]
    group = [
        draw.text(*prompt, draw.part(4)),
        draw.text(*prompt, draw.part(1), wide, draw.part(2)),
        draw.text(*prompt, draw.part(2), image, draw.part(3)),
    ]
    root = [draw.part(2), other, draw.part(3)]
    turn = [*root, tall, draw.part(2)]
    tree = [
        draw.text(*turn, draw.part(3)),
        draw.text(*turn, image, draw.part(2)),
        draw.text(*root, wide, draw.part(4)),
        draw.text(*root, draw.part(2)),
        draw.text(draw.part(5)),
    ]
    start = draw.part(4)
    return [group, tree, [draw.text(start, draw.part(n)) for n in (2, 3)]]


class Found(NamedTuple):
    logp: torch.Tensor
    gradients: dict[str, torch.Tensor]


def update(model: Any, packed: bool) -> Found:
    """Log-probs of all tokens but first ones, and the gradients of a loss with a weight for each."""
    model.zero_grad()
    config, found = model.config, []
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    for group in rollouts():
        if packed:
            batch = dualkv.pack_sequences([x.ids for x in group], media=[x.media for x in group])
            groups = PackedGroups(batch, ranks)
            logits = model(
                input_ids=groups.split(batch.input_ids), position_ids=None, packed_seq_params=groups, **batch.media
            )
            logp = -tensor_parallel.vocab_parallel_cross_entropy(logits[0, batch.predict_rows], batch.targets)
            found += batch.unpack(logp)
            continue
        for ids, media in group:
            missing = -len(ids) % ranks
            given = {name: value for name, value in media.items() if name != "mm_token_type_ids"}
            rows = torch.nn.functional.pad(ids, (0, missing))[None]
            logits = model(input_ids=rows, position_ids=None, **given)
            logp = -tensor_parallel.vocab_parallel_cross_entropy(logits[0, : len(ids) - 1].clone(), ids[1:])
            found.append(logp)
    logp = torch.cat(found)
    (logp * torch.randn(len(logp), generator=torch.Generator().manual_seed(1))).sum().backward()
    group = parallel_state.get_tensor_model_parallel_group()
    for parameter in model.parameters():
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return Found(logp.detach(), gradients)


def compare(family: str, tp: int = 1, **more: Any) -> dict[str, float]:
    """The largest differences of packed from replicated rollouts: of log-probs, and of each gradient relative to its
    largest entry. The replicated rollouts of the tower run on one rank."""
    cpu.parallel(tp)
    model = build(family, **more)
    found, expected = update(model, True), update(model, False)
    if tp > 1:  # on several ranks the tower of Qwen3-VL does not get the gradients of all rows
        cpu.parallel()
        alone = update(build(family), False)
        of_tower = {name: x for name, x in alone.gradients.items() if name.startswith("vis")}
        expected = Found(alone.logp, expected.gradients | of_tower)
    assert found.gradients.keys() == expected.gradients.keys()
    differences = {"logp": (found.logp - expected.logp).abs().max().item()}
    for name, x in found.gradients.items():
        scale = expected.gradients[name].abs().max().clamp(min=1e-3)
        differences[name] = ((x - expected.gradients[name]).abs().max() / scale).item()
    return differences


def main(number: int, folder: str, family: str) -> None:
    with cpu.rank():
        bridge()
        torch.save(compare(family, 2, sequence_parallel=True), Path(folder) / f"{number}.pt")
