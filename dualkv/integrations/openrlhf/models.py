"""OpenRLHF's actor, reference, critic and reward model on packed rows.

Each model gets another `forward` that takes and returns what its own one does: [B, L] ids and masks, values of [B, W]
actions. In between, sequences are one packed row in which each shared beginning is stored once.
"""

from __future__ import annotations

from typing import Any

import torch
from openrlhf.models import Actor
from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from dualkv.integrations import actions, patching
from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import adapters, enable, logprobs
from dualkv.integrations.transformers.experts import load_balancing_loss

# Arguments of the actor's forward that carry no inputs of a model. All others are images.
NO_INPUTS = {"allgather_logits", "return_logprobs", "ring_attn_group", "packed_seq_lens"}


def pack_model(model: nn.Module) -> None:
    """Let a model of OpenRLHF compute once what sequences of a batch begin with in common.

    Call this function before DeepSpeed wraps the model. Calls with images, and calls without an `action_mask`, which
    ask an actor for all of its logits, run as before; the first call with images says so.

    Args:
        model: an `openrlhf.models.Actor` (actor, reference), or what `get_llm_for_sequence_regression` returned
            (critic, reward model), with LoRA or without. It is changed in place.

    Raises:
        ValueError: another model, or one that :func:`dualkv.integrations.transformers.enable` refuses.
    """
    if isinstance(model, Actor):
        _pack_actor(model)
        return
    plain = adapters.without(model)
    forward = {"CriticModel": _critic, "RewardModel": _reward}.get(type(plain).__name__)
    if forward is None or not hasattr(plain, "value_head_prefix"):
        raise ValueError(
            f"model is a {type(plain).__name__}, expected an Actor, or a model of get_llm_for_sequence_regression"
        )
    enable(getattr(plain, plain.base_model_prefix))
    patching.of(plain, "trainer").replace("forward", forward(plain))


def _pack_actor(actor: Any) -> None:
    enable(actor.model)
    plain, stock = adapters.without(actor.model), actor.forward
    decoder = plain.get_decoder()

    def forward(
        sequences: torch.Tensor,  # [B, L]
        action_mask: torch.Tensor | None = None,  # [B, W], column t of L - 1 is about token t + 1
        attention_mask: torch.Tensor | None = None,  # [B, L]
        return_output: bool = False,
        return_entropy: bool = False,
        **others: Any,
    ) -> Any:
        has_images = bool(others.keys() - NO_INPUTS)
        if has_images:
            actions.say_images(type(plain).__name__, "OpenRLHF")
        if has_images or action_mask is None or attention_mask is None:
            asked = {"return_output": return_output, "return_entropy": return_entropy, **others}
            return stock(sequences, action_mask, attention_mask, **asked)
        batch = actions.pack(sequences, attention_mask, action_mask)
        routed: list[Any] = []
        with Changes(decoder) as watched:
            watched.behind(lambda _module, _args, out: routed.append(out.get("router_logits")))
            values, entropies = logprobs(actor.model, batch, actor.temperature)
        made = batch.unpack(values, like=action_mask)
        if not return_output:
            return made
        output: Any = MoeCausalLMOutputWithPast()
        if routed[0] is not None:
            output["aux_loss"] = load_balancing_loss(plain, routed[0], batch)
        if return_entropy:
            output.entropy = batch.unpack(entropies, like=action_mask)
        return made, output

    patching.of(actor, "trainer").replace("forward", forward)


def _critic(plain: Any) -> Any:
    """The forward of a critic: the value of each token of an action, from the row that predicts the token."""
    stock = plain.forward

    def forward(
        input_ids: torch.Tensor,
        action_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
        **others: Any,
    ) -> Any:
        if action_mask is None or attention_mask is None:
            return stock(input_ids, action_mask, attention_mask, return_output, **others)
        batch = actions.pack(input_ids, attention_mask, action_mask)
        values, outputs = actions.head_values(plain, batch, batch.predict_rows)
        if plain.normalize_reward:
            values = (values - plain.mean) / plain.std
        made = batch.unpack(values.float(), like=action_mask)
        return (made, outputs) if return_output else made

    return forward


def _reward(plain: Any) -> Any:
    """The forward of a reward model: the value of each sequence's last token."""

    def forward(
        input_ids: torch.Tensor, attention_mask: torch.Tensor, return_output: bool = False, **_others: Any
    ) -> Any:
        batch = actions.pack(input_ids, attention_mask)
        rows = torch.arange(batch.layout.num_tokens, device=input_ids.device)
        last = torch.stack([own[-1] for own in batch.unpack_sequences(rows)])
        values, outputs = actions.head_values(plain, batch, last)
        if not plain.training and plain.normalize_reward:
            values = (values - plain.mean) / plain.std
        return (values, outputs) if return_output else values

    return forward
