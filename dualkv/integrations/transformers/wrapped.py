"""Log-probs of a packed batch through a model that is wrapped: its head runs where the wrapper has gathered it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dualkv.arrays import check_model
from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import heads
from dualkv.logprobs import response_logprobs

OURS = "input_ids", "inputs_embeds", "dualkv", "labels", "shift_labels", "logits_to_keep"


def logprobs(
    model: nn.Module,
    batch: PackedBatch | PackedSequences,
    temperature: float = 1.0,
    *,
    chunk_size: int = 1024,
    compiled: bool = False,
    kept_chunks: int = 0,
    **inputs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each trained token, and entropy, as :func:`dualkv.response_logprobs`, by one call of a model.

        logp, entropy = logprobs(model, batch)

    The call goes through the wrappers of the model (DDP, FSDP2 and PEFT are tested; FSDP1 and DeepSpeed were not run).
    In the place of the head's module :func:`dualkv.response_logprobs` runs, behind the hooks that gather its weight and
    behind autocast. So logits of `chunk_size` rows exist at a time, where `logits_to_keep` makes all of them.

    Args:
        model: a transformers model on which :func:`enable` was called, or a wrapper around one.
        batch: what :func:`dualkv.pack`, `pack_padded` or `pack_sequences` returned.
        temperature, chunk_size, compiled, kept_chunks: as for :func:`dualkv.response_logprobs`.
        inputs: of the model, such as `**batch.media`.

    Returns:
        logp, entropy: [M], see :func:`dualkv.response_logprobs`.

    Raises:
        ValueError: as for :func:`head` and :func:`dualkv.response_logprobs`; a head's module of which this rank has a
            part in its forward too (tensor parallel), that FSDP1 wraps by itself, or with a hook that may change its
            logits; a model that calls the module more or less than once, or that `torch.compile` wraps as a whole;
            inputs that this function sets, and labels.
        TypeError: another batch, `model` is no module.
    """
    check_model(model)
    if not isinstance(batch, PackedBatch | PackedSequences):
        raise TypeError(f"batch is a {type(batch).__name__}, expected a packed batch, such as dualkv.pack returns")
    if wrong := [name for name in OURS if name in inputs]:
        raise ValueError(f"{wrong[0]} is given, expected only inputs that the batch and log-probs leave open")
    outermost = _without_wrappers(model)
    module, head_of = heads.within(model)
    own_forward = module.forward
    found: list[torch.Tensor] = []

    def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        (states,) = (*args, *kwargs.values())
        left = head_of(own_forward)
        values = response_logprobs(
            states, left, batch, temperature, chunk_size=chunk_size, compiled=compiled, kept_chunks=kept_chunks
        )
        return torch.stack([value[None] for value in values], -1)  # [1, M, 2], no view: FSDP2 warns of views

    def keep(_module: nn.Module, _args: Any, made: torch.Tensor) -> torch.Tensor:
        found.append(made)  # behind the wrappers' hooks, which gather the weight again in the backward
        return made.detach().clone()  # what the model does to logits is in the head

    def result(_module: nn.Module, _args: Any, _out: Any) -> torch.Tensor:
        if len(found) != 1:
            raise ValueError(f"{type(outermost).__name__} called its head's module {len(found)} times, expected once")
        return found[0]

    with Changes(module) as of_head, Changes(outermost) as of_model:
        of_head.behind(keep)
        of_head.replace("forward", forward)
        of_model.behind(result, first=True)
        made = model(input_ids=batch.input_ids, dualkv=batch.layout, **inputs)
    logp, entropy = made[0].unbind(-1)
    return logp, entropy


def _without_wrappers(model: nn.Module) -> nn.Module:
    """The module whose outputs are what the wrappers see."""
    while True:
        if "_orig_mod" in model._modules:
            raise ValueError("model is compiled as a whole, expected it without torch.compile, or compiled layers")
        within = model._modules.get("module") or model._modules.get("_fsdp_wrapped_module")
        if within is None:
            return model
        model = within
