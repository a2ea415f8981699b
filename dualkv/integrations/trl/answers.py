"""TRL's trainers on datasets of answers (DPO, KTO, SFT, reward models) on packed rows.

They call the model with whole sequences, padded or end to end. :func:`pack_head` and :func:`pack_score` put themselves
before the `forward` of the model, inside of all wrappers, pack what comes, and return what TRL's code expects of its
batch.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import trl
from torch import nn
from torch.nn import functional
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast
from trl.trainer.utils import FusedCausalLMOutput

from dualkv.data.gain import MIN_SHARED
from dualkv.data.memory import Memory
from dualkv.data.rows import IGNORED
from dualkv.data.trees import NOTICE, pack_sequences
from dualkv.integrations import patching
from dualkv.integrations.metrics import count_rows
from dualkv.integrations.transformers import adapters, enable, support
from dualkv.integrations.trl import common, probe
from dualkv.integrations.trl.common import Batch, Walks

Base: Any = object  # stands for the trainer that follows the mixin
NEUTRAL = ("use_cache", "return_dict", "margin")  # arguments of a model's call that change no result
OF_ONE_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids", "seq_idx")
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")  # of TRL's head


class PackedAnswers(Base):
    """A mixin for TRL's trainers that call the model with TRL's head: what the sequences of a batch share runs once."""

    _packed = False
    _replaced = "_precompute_ref_logps"

    def __init__(
        self, model: Any, *args: Any, fast: bool = False, walk: bool | int | Memory | None = None, **kwargs: Any
    ) -> None:
        walk = common.checked_walk(walk)
        self._walks = None if walk is None else Walks(self, walk)
        bases = type(self).__mro__
        theirs = bases[bases.index(PackedAnswers) + 1]
        reads = "_is_vision_dataset _metrics accelerator" + " ref_model" * bool(self._replaced)
        probe.refuse_replaced(theirs, PackedAnswers, self._replaced, reads)
        common.refuse_model(model)
        self._fast = fast
        super().__init__(model, *args, **kwargs)
        if self._is_vision_dataset:
            raise ValueError("train_dataset has images: text alone is packed, use TRL's own trainer")
        self._pack()

    def _pack(self) -> None:
        if not self._packed:
            common.refuse_trainer(self)
            if self.args.torch_compile:
                raise ValueError(
                    "torch_compile is True, and batches are packed on the host within the model's call, which cannot be"
                    " compiled: leave it out, or use TRL's own trainer"
                )
            if self._walks is not None:
                common.refuse_walk(self, fast=self._fast)
            probe.of_answers(self, pack_head)
            common.enable_all(self, self._fast)
            for model in (self.model, getattr(self, "ref_model", None)):
                if model is not None:
                    pack_head(adapters.without(self.accelerator.unwrap_model(model)), self, self._walks)
            self._packed = True

    def _precompute_ref_logps(self, *args: Any, **kwargs: Any) -> Any:
        self._pack()  # the constructor of TRL's trainer calls this
        return super()._precompute_ref_logps(*args, **kwargs)


class DPOTrainer(PackedAnswers, trl.DPOTrainer):
    """`trl.DPOTrainer` that computes each prompt of a batch once. Arguments, losses and metrics are TRL's.

    The answers of a batch to one prompt are one group: the two of a pair, and those of other pairs with equal prompts.
    Whatever else sequences begin with in common is computed once too, where
    :class:`dualkv.integrations.trl.PackedGroups` would. The policy and the reference model run packed, precomputed
    log-probs of the reference too. Metrics are added as there, for each call of a model.

    Args:
        model, args, kwargs: TRL's.
        fast, walk: as for :class:`dualkv.integrations.trl.PackedGroups`.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses, a
            dataset with images, PEFT adapters that `enable` refuses, `neftune_noise_alpha`, `torch_compile`, or a
            `walk` that :class:`PackedGroups` refuses; in training for inputs other than text, and labels of a collator
            or dataset that are not the next tokens.
    """


class KTOTrainer(PackedAnswers, trl.KTOTrainer):
    """`trl.KTOTrainer` that computes each prompt of a batch once for its answers, and once for its KL examples.

    Arguments, losses and metrics are TRL's. Rows of a prompt share it within a batch, so the dataset should have them
    together: :func:`dualkv.integrations.trl.group_by_prompt`. The rest is as for :class:`DPOTrainer`.
    """


class SFTTrainer(PackedAnswers, trl.SFTTrainer):
    """`trl.SFTTrainer` that computes once what the sequences of a batch begin with in common.

    Arguments, losses and metrics are TRL's: losses on completions, on assistants' turns or on all tokens, padded or
    `padding_free`. Sequences share within a batch, so the dataset should have the rows of a prompt together
    (:func:`dualkv.integrations.trl.group_by_prompt`) and be read in its order (`train_sampling_strategy="sequential"`).
    The rest is as for :class:`DPOTrainer`.

    Raises:
        ValueError: as for :class:`DPOTrainer`; by the constructor also for `compute_loss_func` and
            `label_smoothing_factor`, whose losses take the logits of separate sequences.
    """

    _replaced = ""

    def __init__(self, model: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        if self.args.packing:
            warnings.warn(
                "dualkv: packing is True, which puts sequences into rows by their length, so answers to one prompt are"
                " apart and share little: set packing=False",
                stacklevel=2,
            )

    def _pack(self) -> None:
        if self.compute_loss_func is not None or (self.label_smoother is not None and self.args.loss_type == "nll"):
            name = "label_smoothing_factor" if self.compute_loss_func is None else "compute_loss_func"
            raise ValueError(
                f"{name} is given, a loss on the logits of separate sequences: leave it out, or use TRL's own trainer"
            )
        super()._pack()


class RewardTrainer(trl.RewardTrainer):
    """`trl.RewardTrainer` that computes each prefix that sequences of a batch share once.

    Arguments, losses and metrics are TRL's. Chosen and rejected sequences are compared token by token, so datasets need
    no column of prompts. Prefixes of fewer than 8 tokens are not shared. Metrics are added as by :class:`DPOTrainer`.

    Args:
        model, args, kwargs: TRL's.
        fast: as for :class:`dualkv.integrations.trl.PackedGroups`.

    Raises:
        ValueError: by the constructor for a model whose decoder :func:`dualkv.integrations.transformers.enable`
            refuses, a head other than transformers' usual one, PEFT adapters that `enable` refuses, or
            `neftune_noise_alpha`; in training for inputs other than text.
    """

    def __init__(self, model: Any, *args: Any, fast: bool = False, **kwargs: Any) -> None:
        if isinstance(model, str):
            common.refuse_model(model)
        super().__init__(model, *args, **kwargs)
        common.refuse_trainer(self)
        pack_score(adapters.without(self.model), self, fast)


def pack_head(model: Any, trainer: Any, walks: Walks | None = None) -> None:
    """Lets a model with TRL's head compute shared prompts once: `model(..., labels=labels, fused_lm_head=True)`.

    Args:
        model: an enabled model that `trl.trainer.utils.add_fused_lm_head` has changed, without wrappers. Calls without
            `fused_lm_head` do not change.
        trainer: gets the metrics.
        walks: for batches that run in parts; None: each is one pass.
    """
    fused = model.forward
    if walks is not None and walks.head is None:  # the policy comes first
        walks.head = fused

    @functools.wraps(getattr(fused, "__func__", fused))
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return fused(*args, **kwargs)
        return _packed_head(self, fused, trainer, walks, **kwargs)

    patching.of(model, "trainer").replace("forward", types.MethodType(forward, model))


def _packed_head(
    model: Any,
    fused: Callable[..., Any],
    trainer: Any,
    walks: Walks | None,
    *,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    output_router_logits: bool = False,
    **others: Any,
) -> FusedCausalLMOutput:
    """input_ids, attention_mask, labels [N, L] -> values of tokens [N, L - 1], 0 where a label is -100; no loss.

    Without an attention mask the sequences are end to end [1, L], and `others` say where they begin.

    A sequence is its prompt up to the first token with a label, and its response from there on. In a sequence that
    begins with a label, the first token is the prompt: nothing predicts it.

    Raises:
        ValueError: one row without `cu_seq_lens_q`; other inputs than text; a label that is not its own token, or that
            no token of its sequence predicts.
    """
    given, one_row = input_ids, attention_mask is None
    if attention_mask is None:
        starts = {name: others.pop(name, None) for name in OF_ONE_ROW}["cu_seq_lens_q"]
        if starts is None:
            raise ValueError("the batch has neither attention_mask nor cu_seq_lens_q, expected one of them")
        lens = starts.diff()
        is_token = torch.arange(int(lens.max()), device=lens.device) < lens[:, None]
        input_ids, labels = (x.new_full(is_token.shape, IGNORED).masked_scatter(is_token, x) for x in (given, labels))
    else:
        is_token = attention_mask != 0
    _refuse_others(others)
    column = torch.arange(input_ids.shape[1], device=input_ids.device)
    labelled = is_token & (labels != IGNORED)
    _refuse_labels(input_ids, labels, is_token, one_row)
    first, end = (torch.where(mask.any(1), mask.byte().argmax(1), len(column)) for mask in (is_token, labelled))
    is_response = is_token & (column >= torch.maximum(end, first + 1)[:, None])
    batch = common.pack_rollouts(input_ids, is_token & ~is_response, input_ids, is_response)
    rows = common.rows_of_tokens(batch)
    NOTICE.look(batch.layout, "dualkv.integrations.trl.group_by_prompt")
    count_rows(trainer, batch, given)
    counts = labelled[is_response]
    if walks is not None and is_response.any():
        found, aux_loss = common.walk_head(fused, batch, walks, PER_TOKEN, is_response, counts), None
    else:
        outputs, aux_loss = common.call(fused, model, batch, output_router_logits, common.labels_of(batch, counts))
        each = {name: x for name in PER_TOKEN if (x := outputs.get(name)) is not None}
        found = {name: common.at_tokens(x, rows, is_response) for name, x in each.items()}

    def of_batch(values: torch.Tensor) -> torch.Tensor:  # [N, L - 1] -> as TRL's
        return functional.pad(values, (1, 0))[is_token][None, 1:] if one_row else values

    scored = labelled[:, 1:]
    made = {name: of_batch(values[:, 1:].masked_fill(~scored, 0)) for name, values in found.items()}
    return FusedCausalLMOutput(**made, label_mask=of_batch(scored), aux_loss=aux_loss)


def pack_score(model: Any, trainer: Any, fast: bool = False) -> None:
    """Lets a model with transformers' usual head of sequence classification compute shared prefixes once.

    Args:
        model: without wrappers; its decoder is enabled here.
        trainer: gets the metrics.
        fast: as for :func:`dualkv.integrations.transformers.enable`.

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
    enable(decoder, fast=fast)
    padded = model.forward

    @functools.wraps(getattr(padded, "__func__", padded))
    def forward(
        self: Any, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **others: Any
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


def _refuse_labels(input_ids: torch.Tensor, labels: torch.Tensor, is_token: torch.Tensor, one_row: bool) -> None:
    """Raises ValueError for labels [N, L] that are not the tokens which follow in their sequences.

    TRL's head ignores the first column, except in one row, where the sequence before predicts it.
    """
    follows = functional.pad(is_token[:, 1:] & is_token[:, :-1], (1, 0))
    others = (labels != IGNORED) & (~follows | (labels != input_ids))
    others[:, 0] &= one_row
    if others.any():
        row, at = others.nonzero()[0].tolist()
        raise ValueError(
            f"labels[{row}, {at}] is {int(labels[row, at])}, expected -100, or {int(input_ids[row, at])} behind another"
            " token of its sequence: only labels that are the next tokens are packed, use TRL's own trainer"
        )


def _refuse_others(others: Batch) -> None:
    """Raises ValueError for inputs of a model that are not packed."""
    given = sorted(name for name, value in others.items() if value is not None and name not in NEUTRAL)
    if given:
        raise ValueError(f"the batch has {', '.join(given)}: text alone is packed, use TRL's own trainer")
