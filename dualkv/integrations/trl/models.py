"""What TRL's trainers on packed rows share: refusals of models, the load balancing loss, counts of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig

from dualkv.integrations import models
from dualkv.integrations.experts import load_balancing_loss
from dualkv.integrations.transformers import enable
from dualkv.layout import Layout

Batch = dict[str, Any]


def refuse_model(model: Any) -> None:
    """Raises ValueError for a model that cannot be packed, before TRL loads weights and starts vLLM."""
    if isinstance(model, str):
        try:
            model = models.without_weights(AutoConfig.from_pretrained(model))
        except Exception:
            # The path, revision or code may need TRL's own arguments; `enable` checks the model that TRL makes.
            return
    models.refuse(model)


def refuse_prompt_learning(model: Any) -> None:
    """Raises ValueError for a model with a PEFT adapter that adds tokens."""
    for name, config in getattr(model, "peft_config", {}).items():
        if config.is_prompt_learning:
            raise ValueError(
                f"the PEFT adapter {name!r} ({config.peft_type.value}) puts tokens of its own before every prompt, "
                "which packed groups do not support: use TRL's own trainer, or an adapter such as LoRA"
            )


def enable_all(trainer: Any, fast: bool) -> None:
    """Enables the policy, `fast` or not, and the reference model of a trainer."""
    enable(trainer.model, fast=fast)
    if trainer.ref_model is not None:
        enable(trainer.ref_model)


def without_adapters(model: Any) -> Any:
    """The transformers model within a PEFT model; any other model as it is."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def count_rows(trainer: Any, layout: Layout, padded: torch.Tensor) -> None:
    """Adds to a trainer's metrics the rows of a micro-batch, packed and padded."""
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in {
        "tokens_packed": layout.num_tokens,
        "tokens_padded": padded.numel(),
        "dedup_ratio": padded.numel() / layout.num_tokens,
    }.items():
        metrics[f"dualkv/{name}"].append(value)


def call_with_aux_loss(model: Callable[..., Any], plain: nn.Module, inputs: Batch) -> tuple[Any, torch.Tensor]:
    """The model's outputs, and the load balancing loss of the padded batch (TRL's head counts the packed rows).

    Args:
        model: takes `inputs` and `fused_lm_head=True`.
        plain: the same model without wrappers.
        inputs: of a packed batch, with the layout as "dualkv".
    """
    found: list[Any] = []
    decoder = cast(Any, plain).get_decoder()
    hook = decoder.register_forward_hook(lambda _module, _args, out: found.append(out.router_logits))
    try:
        outputs = model(**inputs, fused_lm_head=True, output_router_logits=True)
    finally:
        hook.remove()
    return outputs, load_balancing_loss(plain, found[0], inputs["dualkv"])
