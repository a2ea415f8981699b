"""TRL's GRPO trainer on packed groups: the whole model computes each prompt once for all of its rollouts.

    from dualkv.integrations.trl import GRPOTrainer    # instead of trl's; everything else stays

The trainer changes two things in `trl.GRPOTrainer`. Log-probs and entropies of a micro-batch come from one packed row,
in which equal prompts are stored once. TRL's own head computes them, and losses and metrics get the padded [B, R] as
before. And after TRL shuffles the rollouts of a generation batch over its micro-batches, the rollouts of each prompt
are put together again.
"""

from __future__ import annotations

from typing import Any, cast

from dualkv.integrations import require

require("trl")

import numpy as np
import torch
import trl
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from trl.extras.profiling import profiling_decorator
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from dualkv.data.media import OF_TOKENS, grouped
from dualkv.data.packing import pack_padded
from dualkv.integrations import losses, media, models
from dualkv.integrations.transformers import disable, enable
from dualkv.layout import Layout

Batch = dict[str, Any]

# What TRL hands on about images; COUNTS say how many of them each rollout has.
COUNTS = {"num_images", "num_tiles"}
OF_IMAGES = {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", *COUNTS}


class GRPOTrainer(trl.GRPOTrainer):
    """`trl.GRPOTrainer` that computes each prompt of a micro-batch once. Arguments, losses and metrics are TRL's.

    Packed rows are exact: log-probs, entropies, losses and gradients are those of the padded batch up to rounding. The
    load balancing loss of a mixture of experts counts each token as often as the padded batch has it, so it is exact
    too. A prompt takes P - 1 rows and each of its rollouts R + 1. A micro-batch has `per_device_train_batch_size`
    rollouts, as in TRL. A multiple of `num_generations` splits no group; a group that is split repeats its prompt.

    After TRL's shuffle of a generation batch, the rollouts of a prompt are put next to each other, and groups in the
    order of their first rollout. So the order of groups and of the rollouts in a group comes from TRL's shuffle, and no
    other random number is drawn. With `steps_per_generation` above `gradient_accumulation_steps` an optimizer step
    takes whole groups, where TRL's takes rollouts of any group.

    Images in the prompt are kept once for each group too, in models whose images run packed
    (:data:`dualkv.integrations.media.FAMILIES`).

    More metrics, one value for each micro-batch: "dualkv/tokens_packed" and "dualkv/tokens_padded" are rows of the
    model, packed and as TRL pads them; "dualkv/dedup_ratio" is tokens_padded divided by tokens_packed.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses, a
            vision-language model whose images do not run packed, or prompt-learning PEFT; in training for images in
            completions, and inputs other than text and images.
    """

    _buffered_inputs: Any  # micro-batches of a generation batch, or None

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        _refuse_model(model)
        super().__init__(model, *args, **kwargs)
        if self._is_vlm and not media.families(self.model):
            raise ValueError(
                f"processing_class is a multimodal processor, and images of {type(self.model).__name__} are not known"
                " to run packed: use trl.GRPOTrainer"
            )
        for name, config in getattr(self.model, "peft_config", {}).items():
            if config.is_prompt_learning:
                raise ValueError(
                    f"the PEFT adapter {name!r} ({config.peft_type.value}) puts tokens of its own before every prompt, "
                    "which packed groups do not support: use trl.GRPOTrainer, or an adapter such as LoRA"
                )
        enable(self.model)
        if self.ref_model is not None:
            enable(self.ref_model)
        losses.warn_of_trl(self)

    @profiling_decorator
    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,  # [B, P + R]
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Log-probs [B, R], entropies [B, R] if asked for, and the load balancing loss if asked for."""
        size = batch_size or len(input_ids)
        of_prompts = _media(others, len(input_ids), input_ids.shape[1] - logits_to_keep)
        outputs = [
            self._packed(model, ids, mask, logits_to_keep, compute_aux_loss, of_prompts[i * size : (i + 1) * size])
            for i, (ids, mask) in enumerate(zip(input_ids.split(size), attention_mask.split(size), strict=True))
        ]
        logps, entropies, aux_losses = zip(*outputs, strict=True)
        return (
            torch.cat(logps),
            torch.cat(entropies) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def _packed(
        self,
        model: Any,
        ids: torch.Tensor,
        mask: torch.Tensor,
        response_width: int,
        with_aux_loss: bool,
        of_prompts: list[Batch],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """One micro-batch as one packed row."""
        at = ids.shape[1] - response_width
        batch = pack_padded(
            ids[:, :at], mask[:, :at], ids[:, at:], mask[:, at:], labels="roll", media=of_prompts or None
        )
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, value in {
            "tokens_packed": batch.layout.num_tokens,
            "tokens_padded": ids.numel(),
            "dedup_ratio": ids.numel() / batch.layout.num_tokens,
        }.items():
            metrics[f"dualkv/{name}"].append(value)

        inputs = {
            "input_ids": batch.input_ids,
            "shift_labels": batch.labels,
            "dualkv": batch.layout,
            **batch.media,
        }
        with self.accelerator.autocast():
            if with_aux_loss:
                outputs, aux_loss = self._with_aux_loss(model, inputs)
            else:
                outputs, aux_loss = model(**inputs, fused_lm_head=True), None

        def padded(values: torch.Tensor) -> torch.Tensor:  # [1, T] -> [B, R]
            return cast(torch.Tensor, batch.unpack(values[0].index_select(0, batch.predict_rows), "padded"))

        # A reference model's head makes no entropies.
        return (
            padded(outputs.log_probs),
            outputs.entropy if outputs.entropy is None else padded(outputs.entropy),
            aux_loss,
        )

    def _with_aux_loss(self, model: Any, inputs: Batch) -> tuple[Any, torch.Tensor]:
        """The model's outputs, and the load balancing loss of the padded batch (TRL's head counts the packed rows)."""
        plain = self.accelerator.unwrap_model(model)
        found: list[Any] = []
        hook = plain.get_decoder().register_forward_hook(lambda _module, _args, out: found.append(out.router_logits))
        try:
            outputs = model(**inputs, fused_lm_head=True, output_router_logits=True)
        finally:
            hook.remove()
        config = plain.config.get_text_config()
        times = _times(inputs["dualkv"]).to(inputs["input_ids"].device)[None]
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        loss = load_balancing_loss_func(found[0], experts, config.num_experts_per_tok, times)
        return outputs, cast(torch.Tensor, loss)

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            self._buffered_inputs = _regrouped(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        return inputs

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self.use_transformers_continuous_batching:
            return super()._generate_single_turn(*args, **kwargs)
        disable(self.model)  # continuous batching recognizes attention implementations by name
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            enable(self.model)


def _refuse_model(model: Any) -> None:
    """Raises ValueError for a model that cannot be packed, before TRL loads weights and starts vLLM."""
    if isinstance(model, str):
        try:
            model = models.without_weights(AutoConfig.from_pretrained(model))
        except Exception:
            # The path, revision or code may need TRL's own arguments; `enable` checks the model that TRL makes.
            return
    models.refuse(model)


def _media(given: Batch, rollouts: int, width: int) -> list[Batch]:
    """What a processor returned for the prompt of each rollout, apart; an empty list without any.

    Args:
        given: as TRL joins it: images of all rollouts end to end, or padded to as many in each; values of tokens
            [B, P + R].
        rollouts: B.
        width: P.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if unknown := found.keys() - OF_IMAGES - {*OF_TOKENS}:
        raise ValueError(f"the batch has {', '.join(sorted(unknown))}: text and images are packed, use trl.GRPOTrainer")
    for name in found.keys() & {*OF_TOKENS}:
        if found[name][:, width:].any():
            raise ValueError(f"{name} has images in completions: only those of prompts are packed, use trl.GRPOTrainer")
        found[name] = found[name][:, :width]
    apart = split_pixel_values_by_grid(found)
    for name in COUNTS:
        apart.pop(name, None)
    rows: list[Batch] = [{} for _ in range(rollouts if apart else 0)]
    for name, values in apart.items():
        if len(values) != rollouts:
            raise ValueError(f"{name} has {len(values)} entries for {rollouts} rollouts, expected as many")
        for i, row in enumerate(rows):
            value = values[i] if isinstance(values, list) else values[i : i + 1]
            if len(value):
                row[name] = value
    return rows


def _regrouped(batches: list[Batch]) -> list[Batch]:
    """Micro-batches of the same rollouts and sizes, with rollouts of equal prompts and images next to each other.

    Args:
        batches: with "prompt_ids" and "prompt_mask" [B, P]; images as TRL joins them. Values without a first dimension
            are equal in all batches.
    """
    whole: Batch = {}
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    for name, first in batches[0].items():
        values = [batch[name] for batch in batches]
        if isinstance(first, torch.Tensor) and first.dim():
            whole[name] = torch.cat(values)
        else:
            whole[name] = [x for value in values for x in value] if isinstance(first, list) else first
    prompts = torch.cat([whole["prompt_ids"], whole["prompt_mask"].to(whole["prompt_ids"].dtype)], 1).cpu().numpy()
    of_images = {name: whole[name] for name in OF_IMAGES - COUNTS if whole.get(name) is not None}
    images = [dict(zip(of_images, values, strict=True)) for values in zip(*of_images.values(), strict=True)]
    group = grouped([prompt.tobytes() for prompt in prompts], images)
    order = np.argsort(group, kind="stable").tolist()
    for name, value in whole.items():
        if isinstance(value, list):
            whole[name] = [value[i] for i in order]
        elif isinstance(value, torch.Tensor) and value.dim():
            whole[name] = value[order]
    return [unsplit_pixel_values_by_grid(batch) for batch in split_tensor_dict(whole, len(batches))]


def _times(layout: Layout) -> torch.Tensor:
    """[T] the number of rollouts that each packed row belongs to: for a prompt's row the number of its responses."""
    offsets, parent = layout.offsets.numpy(), layout.parent.numpy()
    times = np.bincount(parent[parent >= 0], minlength=len(parent))
    times[parent >= 0] = 1
    return torch.from_numpy(np.repeat(times, np.diff(offsets)))
