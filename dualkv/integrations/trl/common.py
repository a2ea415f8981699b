"""The common parts of TRL's trainers on packed rows: refusals of models, packing, the load balancing loss."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoConfig
from trl.trainer.utils import FusedCausalLMOutput

from dualkv.arrays import positive
from dualkv.branches import Branch
from dualkv.data.gain import MIN_SHARED, pays_over
from dualkv.data.media import SequenceMedia
from dualkv.data.memory import Memory, RowCosts
from dualkv.data.packing import PackedBatch, pack_padded
from dualkv.data.parts import TreePart, plan_parts
from dualkv.data.planning import arrange
from dualkv.data.rows import IGNORED
from dualkv.data.trees import PackedSequences, begins_of_spans, pack_tree, tree_of
from dualkv.integrations import patching
from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import adapters, enable, head, layers, support
from dualkv.integrations.transformers.experts import load_balancing_loss
from dualkv.logprobs import response_logprobs
from dualkv.prefixes import PrefixTree, SharedPrefixes, shared_prefixes
from dualkv.row_costs import measure_rows, room
from dualkv.walked_values import KnownLoss, walk_values

Batch = dict[str, Any]
logger = logging.getLogger(__name__)


def refuse_model(model: Any) -> None:
    """Raises ValueError for a model that cannot be packed, before TRL loads weights and starts vLLM."""
    if isinstance(model, str):
        try:
            model = support.without_weights(AutoConfig.from_pretrained(model))
        except Exception:
            # The path, revision or code may need TRL's own arguments; `enable` checks the model that TRL makes.
            return
    support.refuse(model)


def refuse_trainer(trainer: Any) -> None:
    """Raises ValueError for a trainer with noise by the length of rows (NEFTune), or whose model has PEFT adapters that
    cannot run packed."""
    if (alpha := trainer.args.neftune_noise_alpha) is not None:
        raise ValueError(
            f"neftune_noise_alpha is {alpha}, noise divided by the square root of the length of a row, and rows of a"
            " prompt belong to sequences of several lengths: leave it out, or use TRL's own trainer"
        )
    for sentence in adapters.objections(trainer.model, layers.decoders(trainer.model)):
        raise ValueError(sentence)


def checked_walk(walk: bool | int | Memory | None) -> bool | int | Memory | None:
    """Return the argument `walk` of a trainer, None for False; raises TypeError or ValueError for what is no budget."""
    if isinstance(walk, bool):
        return walk or None
    return walk if walk is None or isinstance(walk, Memory) else positive("walk", walk)


class Walks:
    """The walks of a trainer's micro-batches.

    Attributes:
        budget: rows, or a limit of memory; True until it is measured, in the first micro-batch.
        head: the policy with TRL's head; None: what the trainer calls.
        loss_of: the loss of what TRL's head will say of each token of the next micro-batch, [N, R] by name; None: not
            known before.
        known: losses of the micro-batches before.
    """

    def __init__(self, trainer: Any, budget: bool | int | Memory) -> None:
        self.trainer, self.budget = trainer, budget
        self.head: Callable[..., Any] | None = None
        self.loss_of: Callable[[dict[str, torch.Tensor]], torch.Tensor] | None = None
        self.known = KnownLoss(torch.sum)
        self._said: set[str] = set()

    def arrange(
        self, batch: PackedSequences, values_first: bool, media: SequenceMedia | None = None
    ) -> tuple[PackedSequences, int | list[TreePart]]:
        """Choose how a micro-batch, whose rows have one label each, runs: as it is packed in one pass or in parts, cut,
        or left alone. Says why where that is another way than before. For `values_first` see :func:`plan_parts`.

        Returns:
            (a batch of the same sequences in the same order, a budget of rows or its parts).
        """
        if self.budget is True:
            self.budget = Memory(self._bytes(), self._costs(batch))
            logger.info("walk: %s", self.budget)
        if not isinstance(self.budget, Memory):
            return batch, self.budget
        ends = np.cumsum(batch._lens)[:-1]

        def sequences() -> list[npt.NDArray[Any]]:
            return np.split(batch.input_ids[0].cpu().numpy()[batch._rows], ends)

        def shared_tokens() -> SharedPrefixes:
            return shared_by(sequences(), media).at_least(MIN_SHARED).one_label_a_row()

        parts, shared, why = arrange(
            batch, lambda: shared_tokens() if media is None else media.whole(shared_tokens()), self.budget, values_first
        )
        if (way := why.translate(_NO_DIGITS)) not in self._said:
            self._said.add(way)
            logger.warning("walk: %s (micro-batches in %.1f GiB)", why, self.budget.bytes / 2**30)
        if shared is not None:
            batch = pack_tree(shared.tree(), sequences(), batch._mask, "roll", batch.device, seen=media)
            parts = plan_parts(batch, self.budget, values_first=values_first)
        return batch, parts

    def _bytes(self) -> float:
        """Return the bytes that are left beside weights, their gradients and two states of the optimizer.

        Raises:
            ValueError: not on a GPU.
        """
        device = self.trainer.accelerator.device
        if device.type != "cuda":
            raise ValueError(
                f"walk is True on {device}, expected rows or a dualkv.Memory: only a GPU says what is free"
            )
        trained = [p for p in self.trainer.model.parameters() if p.requires_grad]
        optimizer = self.trainer.optimizer
        to_come = sum(p.nbytes for p in trained if p.grad is None)
        if optimizer is None or not optimizer.state:
            to_come += 2 * sum(p.nbytes for p in trained)
        return room(device, to_come)

    def _costs(self, batch: PackedSequences) -> RowCosts:
        """Measure what a row and TRL's head take in training."""
        model = adapters.without(self.trainer.accelerator.unwrap_model(self.trainer.model))
        decoder, name, head = model.base_model, model.base_model_prefix, self.head or model

        def forward(input_ids: torch.Tensor, branch: Branch) -> torch.Tensor:
            hidden: torch.Tensor = decoder(input_ids=input_ids, dualkv=branch, use_cache=False).last_hidden_state
            return hidden

        def loss(hidden: torch.Tensor, part: TreePart) -> torch.Tensor:
            setattr(model, name, _Done(hidden, decoder.get_input_embeddings()))
            try:
                made = head(input_ids=part.input_ids, shift_labels=part.input_ids, fused_lm_head=True)
            finally:
                setattr(model, name, decoder)
            return torch.stack([made[x].sum() for x in ("log_probs", "entropy") if made.get(x) is not None]).sum()

        modes = [(module, module.training) for module in model.modules()]
        model.train()  # gradient checkpointing
        try:
            return measure_rows(forward, batch.input_ids, loss, pairs=layers.pairs_a_row(model))
        finally:
            for module, mode in modes:
                module.training = mode


_NO_DIGITS = {ord(digit): None for digit in "0123456789,."}


class _Done(nn.Module):
    """A decoder whose hidden states are known."""

    def __init__(self, hidden: torch.Tensor, embedding: nn.Module) -> None:
        super().__init__()
        self.hidden, self.embed_tokens = hidden, embedding

    def get_input_embeddings(self) -> nn.Module:  # transformers looks there before it returns the head
        return self.embed_tokens

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.hidden)


def refuse_walk(trainer: Any, **others: Any) -> None:
    """Raises ValueError for a trainer whose micro-batches cannot be walked; `others` are arguments of the trainer that
    have no walk beside them."""
    given = {name: value for name, value in others.items() if value}
    if getattr(trainer, "aux_loss_enabled", False):
        given["router_aux_loss_coef"] = trainer.router_aux_loss_coef
    if trainer.accelerator.num_processes > 1:
        given["number of processes"] = trainer.accelerator.num_processes
    if given:
        said = " and ".join(f"{name} {value}" for name, value in given.items())
        raise ValueError(
            f"walk is given together with {said}, expected one process, without fast, canary or the load balancing"
            " loss (router_aux_loss_coef=0)"
        )


def refuse_invariant(trainer: Any) -> None:
    """Raises ValueError for a trainer whose log-probs cannot be batch-invariant."""
    expected = "expected one process, or DDP"
    if (kind := trainer.accelerator.distributed_type) not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise ValueError(f"batch_invariant is True with {kind.value}, whose ranks share weights: {expected}")
    if getattr(trainer.args, "cast_lm_head_to_fp32", False):  # RLOO has none
        raise ValueError("batch_invariant is True with cast_lm_head_to_fp32, expected a head of the model's dtype")
    for name, module in trainer.model.named_modules():
        if isinstance(module, nn.Dropout) and module.p > 0:
            raise ValueError(
                f"batch_invariant is True and {name} is a dropout of {module.p}, expected 0 (disable_dropout=True)"
            )


def enable_all(trainer: Any, fast: bool, batch_invariant: bool = False) -> None:
    """Enables the policy, `fast` or not, and the reference model of a trainer that has one."""
    enable(trainer.model, fast=fast, batch_invariant=batch_invariant)
    if getattr(trainer, "ref_model", None) is not None:
        enable(trainer.ref_model, batch_invariant=batch_invariant)


def fix_head(model: Any, temperature: float) -> None:
    """Let :func:`call_fixed` call a model without wrappers, by :func:`dualkv.response_logprobs`: TRL's head multiplies
    as many rows as there are. Raises ValueError for a head whose products are not batch-invariant."""
    if not head(model).batch_invariant:
        found = type(model.get_output_embeddings()).__name__
        raise ValueError(
            f"batch_invariant is True and the head of {type(model).__name__} is a {found}, whose products are not known"
            " to be so: expected an nn.Linear"
        )
    own = model.forward

    @functools.wraps(getattr(own, "__func__", own))  # `generate` reads the signature
    def forward(self: Any, *args: Any, packed: PackedSequences | None = None, **kwargs: Any) -> Any:
        if packed is None:
            return own(*args, **kwargs)
        hidden = self.base_model(input_ids=packed.input_ids, dualkv=packed.layout, use_cache=False, **packed.media)
        log_probs, entropy = response_logprobs(hidden.last_hidden_state, head(self), packed, temperature)
        return FusedCausalLMOutput(log_probs=log_probs[None], entropy=entropy[None])

    patching.of(model, "trainer").replace("forward", types.MethodType(forward, model))


def call_fixed(model: Callable[..., Any], batch: PackedSequences) -> tuple[Any, torch.Tensor]:
    """An output with `log_probs` and `entropy` [1, M], whose bits do not depend on what a batch of :func:`pack_fixed`
    holds, and [K] the place of each token of the responses among the M, end to end."""
    outputs = model(packed=batch)
    places = torch.arange(outputs.log_probs.shape[1], device=batch.device)
    return outputs, torch.cat(batch.unpack(places))


def pack_rollouts(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    response_ids: torch.Tensor,
    response_mask: torch.Tensor,
    media: SequenceMedia | None = None,
) -> PackedBatch | PackedSequences:
    """A micro-batch for TRL's head, which takes one label a row: two rollouts share a token if they share the next one.

    Equal prompts are packed once, and so is everything else that rollouts begin with in common, if that saves enough
    (:func:`dualkv.data.gain.pays_over`) or there are images; then parts of fewer than `MIN_SHARED` tokens are repeated.

    Args:
        prompt_ids, prompt_mask, response_ids, response_mask: as for :func:`dualkv.pack_padded`.
        media: of prompts and responses.
    """
    batch = pack_padded(prompt_ids, prompt_mask, response_ids, response_mask, labels="roll")
    if media is None and batch.num_response_tokens == 0:
        return batch
    prompts, responses = tokens_of_rows(prompt_ids, prompt_mask), tokens_of_rows(response_ids, response_mask)
    sequences = joined(prompts, responses)
    tree, layout = prefix_tree(sequences, media), batch.layout
    others = layout.parent.numpy(), np.diff(layout.offsets.numpy())
    if media is None and not pays_over(tree.parent, tree.length, others):
        return batch
    of_responses = [np.arange(len(p) + len(r)) >= len(p) for p, r in zip(prompts, responses, strict=True)]
    return pack_tree(tree, sequences, np.concatenate(of_responses), "roll", prompt_ids.device, seen=media)


def pack_fixed(
    prompt_ids: torch.Tensor,
    prompt_mask: torch.Tensor,
    response_ids: torch.Tensor,
    response_mask: torch.Tensor,
    media: SequenceMedia | None = None,
) -> PackedSequences:
    """A micro-batch whose rollouts are cut where their responses begin, and nowhere else, whatever it holds. Arguments
    are those of :func:`pack_rollouts`. Raises ValueError for an empty prompt."""
    prompts, responses = tokens_of_rows(prompt_ids, prompt_mask), tokens_of_rows(response_ids, response_mask)
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt_mask[{i}] is 0 everywhere, expected a prompt of at least one token")
    sequences = joined(prompts, responses)
    masks = [np.arange(len(p) + len(r)) >= len(p) for p, r in zip(prompts, responses, strict=True)]
    cuts = begins_of_spans(masks, "gather", media)
    tree = tree_of(shared_by(sequences, media), 1, "gather", media, cuts)
    return pack_tree(tree, sequences, np.concatenate(masks), "gather", prompt_ids.device, seen=media)


def tokens_of_rows(ids: torch.Tensor, mask: torch.Tensor) -> list[npt.NDArray[Any]]:
    """ids, mask [N, L] -> N int64 arrays on the host of the tokens where the mask is set."""
    return [row[own] for row, own in zip(ids.long().cpu().numpy(), (mask != 0).cpu().numpy(), strict=True)]


def joined(prompts: list[npt.NDArray[Any]], responses: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """N times [P_i] and [R_i] -> N times [P_i + R_i]."""
    return [np.concatenate(pair) for pair in zip(prompts, responses, strict=True)]


def prefix_tree(sequences: list[npt.NDArray[Any]], media: SequenceMedia | None = None) -> PrefixTree:
    """Build the tree that :func:`pack_rollouts` uses for sequences where everything is shared."""
    return tree_of(shared_by(sequences, media), MIN_SHARED, "roll", media)


def shared_by(sequences: list[npt.NDArray[Any]], media: SequenceMedia | None) -> SharedPrefixes:
    """Find what sequences share, images by their content."""
    return shared_prefixes(sequences if media is None else media.tokens(sequences))


def rows_of_tokens(batch: PackedBatch | PackedSequences) -> torch.Tensor:
    """[M] the packed row that predicts each token of the responses, end to end; a row may predict several of them."""
    return torch.cat(batch.unpack(batch.predict_rows))


def at_tokens(values: torch.Tensor, rows: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """values [1, T] of packed rows, rows [M] of :func:`rows_of_tokens` -> [N, R], 0 where response_mask is not set.

    Gradients of a row that predicts several tokens are summed in a fixed order.
    """
    own = values[0][rows]  # the gradient of index_select is summed by atomics
    return own.new_zeros(response_mask.shape).masked_scatter(response_mask != 0, own)


def call(
    model: Callable[..., Any],
    plain: nn.Module,
    batch: PackedBatch | PackedSequences,
    with_aux_loss: bool,
    labels: torch.Tensor | None = None,
) -> tuple[Any, torch.Tensor | None]:
    """The outputs of TRL's head, and if asked for the load balancing loss of the padded batch (TRL's head counts packed
    rows).

    Args:
        model: takes the batch and `fused_lm_head=True`.
        plain: the same model without wrappers.
        batch: of :func:`pack_rollouts`.
        with_aux_loss: for a mixture of experts.
        labels: [1, T] those of the batch, or fewer of them: the head skips rows whose label is -100.
    """
    labels = batch.labels if labels is None else labels
    inputs = {"input_ids": batch.input_ids, "shift_labels": labels, "dualkv": batch.layout}
    inputs |= batch.media
    if not with_aux_loss:
        return model(**inputs, fused_lm_head=True), None
    found: list[Any] = []
    decoder = cast(Any, plain).get_decoder()
    with Changes(decoder) as watched:
        watched.behind(lambda _module, _args, out: found.append(out.router_logits))
        outputs = model(**inputs, fused_lm_head=True, output_router_logits=True)
    return outputs, load_balancing_loss(plain, found[0], batch)


def walk_head(
    model: Callable[..., Any],
    batch: PackedBatch | PackedSequences,
    walks: Walks,
    names: Sequence[str],
    response_mask: torch.Tensor,
    counts: torch.Tensor | None = None,
    media: SequenceMedia | None = None,
) -> dict[str, torch.Tensor]:
    """Compute what TRL's head says of each token of the responses, by walks, forward and backward.

    Args:
        model, batch: as for :func:`call`.
        walks: of the trainer.
        names: of outputs [1, T] of the head; those that it does not make are left out.
        response_mask: [N, R] of the batch, with a token at least.
        counts: [M] of the tokens of the responses; the head skips rows that predict none of them. None: all count.
        media: of the batch's sequences.

    Returns:
        [N, R] by name, 0 where response_mask is not set.
    """
    tree = PackedSequences.from_batch(batch) if isinstance(batch, PackedBatch) else batch
    known = None
    if torch.is_grad_enabled() and (loss_of := walks.loss_of) is not None:
        known, walks.loss_of = walks.known, None
        known.of_values = lambda found: loss_of(by_name(found))
    tree, budget = walks.arrange(tree, known is None or not known.is_sum, media)
    wanted = tree.labels if counts is None else labels_of(tree, counts)
    made: dict[str, torch.dtype] = {}

    def forward(input_ids: torch.Tensor, branch: Branch) -> Any:
        own = wanted[:, branch.rows.to(wanted.device)]
        return model(input_ids=input_ids, shift_labels=own, dualkv=branch, fused_lm_head=True)

    def values(outputs: Any, part: TreePart) -> torch.Tensor:
        found = {name: x for name in names if (x := outputs.get(name)) is not None}
        made.update({name: x.dtype for name, x in found.items()})
        columns = [x[0][part.predict_rows].to(outputs.log_probs.dtype) for x in found.values()]
        return part.expand(torch.stack(columns, 1))

    def by_name(found: torch.Tensor) -> dict[str, torch.Tensor]:
        places = torch.arange(len(found), device=found.device)
        columns = zip(made.items(), found.unbind(1), strict=True)
        return {name: at_tokens(x[None].to(dtype), places, response_mask) for (name, dtype), x in columns}

    return by_name(walk_values(tree, budget, forward, values, loss=known))


def labels_of(batch: PackedBatch | PackedSequences, counts: torch.Tensor) -> torch.Tensor:
    """Return the labels [1, T] of a batch, -100 in rows that predict no token of the responses [M] that counts."""
    rows = rows_of_tokens(batch)
    wanted = torch.zeros_like(batch.labels[0], dtype=torch.bool).index_fill(0, rows[counts], True)
    return batch.labels.masked_fill(~wanted, IGNORED)
