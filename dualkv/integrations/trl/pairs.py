"""TRL's trainers on pairs of answers (DPO, reward models) on packed rows.

Both call the model with chosen and rejected sequences below each other, padded. :func:`pack_head` and
:func:`pack_score` put themselves before the `forward` of the model, inside of all wrappers, pack what comes, and return
what TRL's code expects of the padded batch.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import trl
from torch import nn
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from trl.trainer.utils import FusedCausalLMOutput

from dualkv.data.gain import MIN_SHARED
from dualkv.data.packing import IGNORED
from dualkv.data.trees import pack_sequences
from dualkv.integrations import patching
from dualkv.integrations.metrics import count_rows
from dualkv.integrations.transformers import support
from dualkv.integrations.trl import probe
from dualkv.integrations.trl.common import (
    Batch,
    at_tokens,
    call,
    enable_all,
    enable_policy,
    pack_rollouts,
    refuse_memory,
    refuse_model,
    refuse_trainer,
    rows_of_tokens,
    without_adapters,
)

NEUTRAL = ("use_cache", "return_dict", "margin")  # arguments of a model's call that change no result
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # of TRL's head


class DPOTrainer(trl.DPOTrainer):
    """`trl.DPOTrainer` that computes each prompt of a batch once. Arguments, losses and metrics are TRL's.

    The answers of a batch to one prompt are one group: the two of a pair, and those of other pairs with equal prompts.
    Whatever else sequences begin with in common is computed once too, where
    :class:`dualkv.integrations.trl.PackedGroups` would. The policy and the reference model run packed, precomputed
    log-probs of the reference too. Log-probs, losses and gradients are those of the padded batch up to rounding; the
    load balancing loss of a mixture of experts counts each token as often as the padded batch has it.

    More metrics, one value for each call of a model: "dualkv/tokens_packed", "dualkv/tokens_padded" and
    "dualkv/dedup_ratio", as for :class:`PackedGroups`.

    Args:
        model, args, kwargs: TRL's.
        fast, memory: as for :class:`dualkv.integrations.trl.PackedGroups`.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses, a
            dataset with images, PEFT adapters that `enable` refuses,
            `neftune_noise_alpha`, or a `memory` that :class:`PackedGroups` refuses; in training for inputs
            other than text.
    """

    _packed = False

    def __init__(self, model: Any, *args: Any, fast: bool = False, memory: float | None = None, **kwargs: Any) -> None:
        refuse_memory(fast, memory)
        reads = "_is_vision_dataset _metrics accelerator ref_model"
        probe.refuse_replaced(trl.DPOTrainer, DPOTrainer, "_precompute_ref_logps", reads)
        refuse_model(model)
        self._fast, self._memory = fast, memory
        super().__init__(model, *args, **kwargs)
        if self._is_vision_dataset:
            raise ValueError("train_dataset has images: pairs are packed as text alone, use TRL's own trainer")
        self._pack()

    def _pack(self) -> None:
        if not self._packed:
            refuse_trainer(self)
            probe.of_pairs(self, pack_head)
            enable_all(self, self._fast, self._memory)
            for model in (self.model, self.ref_model):
                if model is not None:
                    pack_head(without_adapters(self.accelerator.unwrap_model(model)), self)
            self._packed = True

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._pack()  # the constructor of TRL's trainer calls this
        return super()._precompute_ref_logps(*args, **kwargs)


class RewardTrainer(trl.RewardTrainer):
    """`trl.RewardTrainer` that computes each prefix that sequences of a batch share once.

    Arguments, losses and metrics are TRL's. Chosen and rejected sequences are compared token by token, so datasets need
    no column of prompts. Prefixes of fewer than 8 tokens are not shared.

    More metrics, as for :class:`DPOTrainer`.

    Args:
        model, args, kwargs: TRL's.
        fast, memory: as for :class:`dualkv.integrations.trl.PackedGroups`.

    Raises:
        ValueError: by the constructor for a model whose decoder :func:`dualkv.integrations.transformers.enable`
            refuses, a head other than transformers' usual one, PEFT adapters that `enable` refuses,
            `neftune_noise_alpha`, or a `memory` that :class:`PackedGroups` refuses; in training for inputs
            other than text.
    """

    def __init__(self, model: Any, *args: Any, fast: bool = False, memory: float | None = None, **kwargs: Any) -> None:
        refuse_memory(fast, memory)
        if isinstance(model, str):
            refuse_model(model)
        super().__init__(model, *args, **kwargs)
        refuse_trainer(self)
        pack_score(without_adapters(self.model), self, fast, memory)


def pack_head(model: Any, trainer: Any) -> None:
    """Lets a model with TRL's head compute shared prompts once: `model(..., labels=labels, fused_lm_head=True)`.

    Calls without `fused_lm_head` do not change.

    Args:
        model: an enabled model that `trl.trainer.utils.add_fused_lm_head` has changed, without wrappers.
        trainer: gets the metrics.
    """
    fused = model.forward

    @functools.wraps(getattr(fused, "__func__", fused))
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(*args, **kwargs)
        return _packed_head(self, fused, trainer, **kwargs)

    patching.of(model, "trainer").replace("forward", types.MethodType(forward, model))


def _packed_head(
    model: Any,
    fused: Callable[..., Any],
    trainer: Any,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    labels: torch.Tensor,
    output_router_logits: bool = False,
    **others: Any,
) -> FusedCausalLMOutput:
    """input_ids, attention_mask, labels [N, L] -> values of tokens [N, L - 1], 0 where a label is -100; no loss.

    A sequence is its prompt up to the first token with a label, and its response from there on. In a sequence that
    begins with a label, the first token is the prompt: nothing predicts it.
    """
    _refuse_others(others)
    is_token, column = attention_mask != 0, torch.arange(input_ids.shape[1], device=input_ids.device)
    labelled = is_token & (labels != IGNORED)
    first, end = (torch.where(mask.any(1), mask.byte().argmax(1), len(column)) for mask in (is_token, labelled))
    is_response = is_token & (column >= torch.maximum(end, first + 1)[:, None])
    batch = pack_rollouts(input_ids, is_token & ~is_response, input_ids, is_response)
    rows = rows_of_tokens(batch)
    count_rows(trainer, batch, input_ids)
    outputs, aux_loss = call(fused, model, batch, output_router_logits)
    scored = labelled[:, 1:]

    def padded(values: torch.Tensor) -> torch.Tensor:  # [1, T] -> [N, L - 1]
        return at_tokens(values, rows, is_response)[:, 1:].masked_fill(~scored, 0)

    made = {name: padded(values) for name in PER_TOKEN if (values := outputs.get(name)) is not None}
    return FusedCausalLMOutput(**made, label_mask=scored, aux_loss=aux_loss)


def pack_score(model: Any, trainer: Any, fast: bool = False, memory: float | None = None) -> None:
    """Lets a model with transformers' usual head of sequence classification compute shared prefixes once.

    Args:
        model: without wrappers; its decoder is enabled here.
        trainer: gets the metrics.
        fast, memory: as for :func:`enable_policy`.

    Raises:
        ValueError: a head of another kind, a decoder that is refused.
    """
    if not isinstance(model, GenericForSequenceClassification):
        raise ValueError(
            f"{type(model).__name__} is no GenericForSequenceClassification of transformers, the head that packed"
            " sequences are scored by: use TRL's own trainer"
        )
    decoder = getattr(model, model.base_model_prefix)
    support.refuse(decoder)
    enable_policy(decoder, fast, memory)
    padded = model.forward

    @functools.wraps(getattr(padded, "__func__", padded))
    def forward(
        self: Any,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        if input_ids is None or attention_mask is None:
            raise ValueError("input_ids and attention_mask are expected: only these are packed, use TRL's own trainer")
        _refuse_others(others)
        return _packed_score(self, trainer, input_ids, attention_mask)

    patching.of(model, "trainer").replace("forward", types.MethodType(forward, model))


def _packed_score(
    model: Any, trainer: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> SequenceClassifierOutputWithPast:
    """input_ids, attention_mask [N, L] -> logits [N, labels] of the rows that transformers' head takes."""
    # The last token that is not the padding token. It can lie before the end: some tokenizers pad with the token that
    # ends a sequence.
    padding = model.config.get_text_config().pad_token_id
    if padding is None:
        raise ValueError("pad_token_id of the model's configuration is None, expected the id of the padding token")
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    at = (column * (input_ids != padding)).argmax(1)
    is_token = attention_mask != 0
    if not is_token.gather(1, at[:, None]).all():
        raise ValueError("attention_mask leaves out the last token that is no padding, expected every token in it")
    place = (is_token.cumsum(1).gather(1, at[:, None])[:, 0] - 1).tolist()

    batch = pack_sequences([ids[mask] for ids, mask in zip(input_ids, is_token, strict=True)], min_shared=MIN_SHARED)
    count_rows(trainer, batch, input_ids)
    decoder: nn.Module = getattr(model, model.base_model_prefix)
    hidden = decoder(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state[0]
    rows = batch.unpack_sequences(torch.arange(batch.layout.num_tokens))
    scored = torch.stack([own[i] for own, i in zip(rows, place, strict=True)]).to(hidden.device)
    return SequenceClassifierOutputWithPast(logits=model.score(hidden[scored]))


def _refuse_others(others: Batch) -> None:
    """Raises ValueError for inputs of a model that are not packed."""
    given = sorted(name for name, value in others.items() if value is not None and name not in NEUTRAL)
    if given:
        raise ValueError(f"the batch has {', '.join(given)}: pairs are packed as text alone, use TRL's own trainer")
