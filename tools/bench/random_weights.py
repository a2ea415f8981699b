"""Models of named configurations with random weights, in the place of those that veRL reads from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from verl.utils.device import get_device_id

from tools.bench.harness import make_config


def save_config(model: str, layers: int | None, folder: Path) -> Any:
    """The configuration of a named model, saved for veRL to read."""
    config = make_config(model, layers)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    return config


def random_model(*_: Any, config: Any, torch_dtype: torch.dtype, **__: Any) -> Any:
    """Replace `AutoModelForCausalLM.from_pretrained`: one block of random numbers, repeated, for every weight.

    Random numbers for billions of weights would take minutes, and the time of an update does not depend on them.
    """
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    block = torch.randn(1 << 20, dtype=torch_dtype, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.is_meta:  # the first rank sends its own
                continue
            if "norm" in name:
                weight.fill_(1)
                continue
            for part in weight.view(-1).split(len(block)):
                part.copy_(block[: len(part)])
    return model


def random_shards(module: torch.nn.Module, *_: Any) -> None:
    """Replace `fsdp2_load_full_state_dict`: each rank makes its share of the weights where it belongs."""
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.to_empty(device=get_device_id())
    with torch.no_grad():
        for name, weight in module.named_parameters():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.fill_(1) if "norm" in name else local.normal_(0, 0.02)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
