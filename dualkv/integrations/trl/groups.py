"""TRL's trainers of sampled groups (GRPO, RLOO, GMPO) on packed groups.

Log-probs and entropies of a micro-batch come from one packed row, by TRL's own head; losses and metrics get the padded
[B, R] as before. After TRL shuffles a generation batch, the rollouts of each prompt are put together again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import trl
from trl.extras.profiling import profiling_decorator
from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from dualkv.arrays import check_bool, positive
from dualkv.canary import packed_vs_separate
from dualkv.data.media import OF_TOKENS, SequenceMedia, entries, grouped, within
from dualkv.data.memory import Memory
from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.heads import autocast_now
from dualkv.integrations import losses
from dualkv.integrations.metrics import RATIO, count_rows, furthest_ratio, log_ratios
from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import adapters, media, suspended
from dualkv.integrations.trl import common, probe
from dualkv.integrations.trl.common import Batch, Walks

Base: Any = object  # stands for the trainer that follows the mixin

# What TRL hands on about images; COUNTS say how many of them each rollout has.
COUNTS = {"num_images", "num_tiles"}
OF_IMAGES = {"pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", *COUNTS}
LOG_PROBS = "_get_per_token_logps_and_entropies"
AT = "dualkv_at"  # in a micro-batch: the places of its rollouts in TRL's shuffle
OLD = "old_per_token_logps"  # in a micro-batch: [B, R]
REPLACED = f"{LOG_PROBS} _compute_loss _prepare_inputs _generate_and_score_completions _generate_single_turn"
READ = "_buffered_inputs _step _metrics _is_vlm use_transformers_continuous_batching accelerator"


class PackedGroups(Base):
    """A mixin for TRL's trainers that sample groups: it computes once what the rollouts of a micro-batch share.

    It goes before `trl.GRPOTrainer`, `trl.RLOOTrainer` or a subclass of these. Arguments, losses and metrics are TRL's:

        class GMPOTrainer(PackedGroups, trl.experimental.gmpo.GMPOTrainer):
            pass

    Log-probs, entropies, losses and gradients are those of the padded batch up to rounding, the load balancing loss of
    a mixture of experts too. Of text, other beginnings that rollouts share are computed once too, if that saves 2 % of
    the cost or more. A multiple of `num_generations` as `per_device_train_batch_size` splits no group; a group that is
    split repeats what it shares. docs/trl.md has the order of rollouts, and the metrics that are added.

    Args:
        model, args, kwargs: TRL's.
        fast: as for :func:`dualkv.integrations.transformers.enable`, for the policy.
        canary: optimizer steps from one canary (:func:`dualkv.packed_vs_separate`) to the next, the first one in the
            first step; none by default, and for models with images.
        walk: for micro-batches that do not fit into memory in one pass: the packed row runs in parts
            (:func:`dualkv.walk_values`). A budget of rows; a :class:`dualkv.Memory`, in which the fastest way is taken,
            which a log entry names; or True: the GPU's memory is measured in the first micro-batch. One process. Bytes
            leave out what a vision tower takes. Each loss needs one backward (:class:`dualkv.KnownLoss`).
        batch_invariant: as for :func:`dualkv.integrations.transformers.enable`, for policy and reference; in one
            process, or with DDP. Then prompts alone are shared, and equal rollouts, and
            :func:`dualkv.response_logprobs` takes the place of TRL's head.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses, a
            vision-language model whose images do not run packed, PEFT adapters that `enable` refuses,
            `neftune_noise_alpha`, a `canary` below 1, or a `walk` below 1, with `fast`, `canary`, the load balancing
            loss or other ranks; `batch_invariant` with `fast`, `canary`, `walk`, `cast_lm_head_to_fp32`, dropout, or
            ranks that share weights; in training for `walk=True` off a GPU, inputs other than text and images, and
            images that do not fit their placeholders.
        TypeError: a `walk` of another type, `batch_invariant` that is not a bool.
    """

    _buffered_inputs: Any  # micro-batches of a generation batch, or None
    _weights_of_old = -1  # the step in which their old log-probs were computed

    def __init__(
        self,
        model: Any,
        *args: Any,
        fast: bool = False,
        canary: int | None = None,
        walk: bool | int | Memory | None = None,
        batch_invariant: bool = False,
        **kwargs: Any,
    ) -> None:
        check_bool("batch_invariant", batch_invariant)
        others = {"fast": fast, "canary": canary, "walk": walk}
        if batch_invariant and any(others.values()):
            said = " and ".join(f"{name} {value}" for name, value in others.items() if value)
            raise ValueError(f"batch_invariant is True together with {said}, expected it without fast, canary and walk")
        self._invariant = False
        self._canary = None if canary is None else positive("canary", canary)
        walk = common.checked_walk(walk)
        self._walks: Walks | None = None
        self._canary_step = -1  # the last step that had one
        bases = type(self).__mro__
        theirs = bases[bases.index(PackedGroups) + 1]
        probe.refuse_replaced(theirs, PackedGroups, REPLACED, READ)
        common.refuse_model(model)
        super().__init__(model, *args, **kwargs)
        probe.of_groups(self, theirs, PackedGroups)
        if self._is_vlm and not media.families(self.model):
            raise ValueError(
                f"processing_class is a multimodal processor, and images of {type(self.model).__name__} are not known"
                " to run packed: use TRL's own trainer"
            )
        common.refuse_trainer(self)
        if walk is not None:
            common.refuse_walk(self, fast=fast, canary=canary)
        if batch_invariant:
            common.refuse_invariant(self)
        common.enable_all(self, fast, batch_invariant)
        if batch_invariant:
            for one in (self.model, getattr(self, "ref_model", None)):
                if one is not None:
                    common.fix_head(adapters.without(self.accelerator.unwrap_model(one)), self.temperature)
        self._invariant = batch_invariant
        self._walks = None if walk is None else Walks(self, walk)
        # Gemma's marks make rows see each other, so those of the processor alone serve.
        ahead = any(how.ahead for how in media.families(self.model))
        self._marks = {} if ahead else media.marks(self.model.config)
        losses.warn(losses.trl_settings(self))

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
        if self._walks is not None and size < len(input_ids):  # the loss is one of all of them
            self._walks.loss_of = None
        images = _media(others, len(input_ids))
        outputs = [
            self._packed(model, ids, mask, logits_to_keep, compute_aux_loss, images[i * size : (i + 1) * size])
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
        images: list[Batch],
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """One micro-batch as one packed row."""
        at = ids.shape[1] - response_width
        response_mask = mask[:, at:]
        found = _seen(images, ids, mask, self._marks) if images else None
        parts = ids[:, :at], mask[:, :at], ids[:, at:], response_mask, found
        batch = common.pack_fixed(*parts) if self._invariant else common.pack_rollouts(*parts)
        count_rows(self, batch, ids)
        if self._walks is not None and response_mask.any():
            with self.accelerator.autocast():
                names = "log_probs", "entropy"
                walked = common.walk_head(model, batch, self._walks, names, response_mask, media=found)
            return walked["log_probs"], walked.get("entropy"), None
        with self.accelerator.autocast():
            if self._invariant:
                outputs, rows, aux_loss = *common.call_fixed(model, cast(PackedSequences, batch)), None
            else:
                outputs, aux_loss = common.call(model, self.accelerator.unwrap_model(model), batch, with_aux_loss)
                rows = common.rows_of_tokens(batch)
                self._compare(model, batch, outputs.log_probs)
        # A reference model's head makes no entropies.
        return (
            common.at_tokens(outputs.log_probs, rows, response_mask),
            None if outputs.entropy is None else common.at_tokens(outputs.entropy, rows, response_mask),
            aux_loss,
        )

    def _compare(self, model: Any, batch: PackedBatch | PackedSequences, log_probs: torch.Tensor) -> None:
        """Run the canary, if this is the first micro-batch of a step that has one; `log_probs` [1, T] belong to
        labels."""
        step = self.state.global_step
        if self._canary is None or step % self._canary or step == self._canary_step or self._is_vlm:
            return
        if not (model.training and torch.is_grad_enabled()):  # log-probs of the old policy or a reference
            return
        self._canary_step = step
        logp = log_probs[0].detach().index_select(0, batch.predict_rows)
        compared = packed_vs_separate(model, batch, logp, seed=step, temperature=self.temperature)
        self._metrics["train"]["dualkv/packed_vs_separate"].append(compared.difference)

    def _prepare_inputs(self, generation_batch: Any) -> Batch:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self._buffered_inputs is not before:
            self._weights_of_old = self.state.global_step
            steps, size = self.args.steps_per_generation, len(self._buffered_inputs[0]["prompt_ids"])
            if steps > 1 and self.args.gradient_accumulation_steps % steps == 0:
                images = OF_IMAGES | {*OF_TOKENS}
                self._shuffled = [{k: v for k, v in b.items() if k not in images} for b in self._buffered_inputs]
                self._seen: list[tuple[torch.Tensor, ...]] = []
                for batch, at in zip(self._buffered_inputs, torch.arange(steps * size).split(size), strict=True):
                    batch[AT] = at
            self._buffered_inputs = _regrouped(self._buffered_inputs, self._marks)
            inputs = self._buffered_inputs[self._step % steps]
        return inputs

    def _generate_and_score_completions(self, inputs: Any) -> Batch:
        with self._kept() as found:
            batch: Batch = super()._generate_and_score_completions(inputs)
        if "old_logps" in batch:  # RLOO's sums of the log-probs that TRL computes first
            batch[OLD] = found[0][0]
        return batch

    @contextmanager
    def _kept(self) -> Iterator[list[tuple[torch.Tensor, ...]]]:
        """Keep what the calls for log-probs return."""
        own, found = getattr(self, LOG_PROBS), []

        def keep(*args: Any, **kwargs: Any) -> Any:
            found.append(own(*args, **kwargs))
            return found[-1]

        with Changes(self) as changes:
            changes.replace(LOG_PROBS, keep)
            yield found

    def _compute_loss(self, model: Any, inputs: Batch) -> torch.Tensor:
        """The loss of a micro-batch. With the last one of a generation batch come the metrics of TRL's micro-batches,
        whose means weigh all micro-batches alike."""
        if self._walks is not None and torch.is_grad_enabled() and self.accelerator.distributed_type == "NO":
            self._walks.loss_of = partial(self._loss_of, inputs, autocast_now(self.accelerator.device.type))
        if self._invariant and "old_logps" in inputs:  # sums of other numbers of rollouts may have other bits
            inputs = {**inputs, "old_logps": (inputs[OLD] * inputs["completion_mask"]).sum(1)}
        with self._kept() as found:
            loss: torch.Tensor = super()._compute_loss(model, inputs)
        logps, entropies, _ = found[-1]
        self._compare_with_old(inputs, logps)
        if AT not in inputs:
            return loss
        self._seen.append((inputs[AT], logps.detach(), entropies.detach()))
        if len(self._seen) == len(self._shuffled):
            at, *values = (torch.cat(parts) for parts in zip(*self._seen, strict=True))
            self._seen = []
            order = at.argsort().to(loss.device)
            split = [of_all[order].split(len(inputs[AT])) for of_all in values]
            self._count_as_trl(model, list(zip(*split, strict=True)))
        return loss

    def _compare_with_old(self, inputs: Batch, logps: torch.Tensor) -> None:
        """Note the ratio that is furthest from 1, where old log-probs are those of the weights that the model has."""
        if OLD not in inputs or not self.model.training or self.state.global_step != self._weights_of_old:
            return
        counted = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        found = self.accelerator.gather(log_ratios(logps, inputs[OLD], counted))
        values = self._metrics["train"][RATIO]  # one, because TRL logs the mean
        values[:] = [furthest_ratio(found, values)]

    def _loss_of(
        self, inputs: Batch, autocast: tuple[str, torch.dtype, bool], values: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Compute TRL's loss of a micro-batch whose log-probs and entropies are given, and leave the trainer as it
        is."""
        with Changes(self) as changes, torch.autocast(*autocast):
            changes.replace("_metrics", {mode: defaultdict(list) for mode in self._metrics})
            changes.replace(LOG_PROBS, lambda *_, **__: (values["log_probs"], values.get("entropy"), None))
            with changes.watched():  # the controller of entropies
                loss: torch.Tensor = super()._compute_loss(self.model, inputs)
        return loss

    def _count_as_trl(self, model: Any, values: list[tuple[torch.Tensor, ...]]) -> None:
        """Replace the metrics of the last micro-batches by those of TRL's micro-batches, which have the `values`."""
        as_trl: defaultdict[str, list[float]] = defaultdict(list)
        with torch.no_grad(), Changes(self) as changes:
            changes.replace("_metrics", {**self._metrics, "train": as_trl})
            # They have metrics of their own, and a controller that counts calls.
            for name in {"aux_loss_enabled", "_entropy_bonus_enabled"} & vars(self).keys():
                changes.replace(name, False)
            for inputs, own in zip(self._shuffled, values, strict=True):
                changes.replace(LOG_PROBS, lambda *_, _own=own, **__: (*_own, None))
                super()._compute_loss(model, inputs)
        for name, of_batches in as_trl.items():
            self._metrics["train"][name][-len(of_batches) :] = of_batches

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self.use_transformers_continuous_batching:
            return super()._generate_single_turn(*args, **kwargs)
        with suspended(self.model):  # continuous batching recognizes attention implementations by name
            return super()._generate_single_turn(*args, **kwargs)


class GRPOTrainer(PackedGroups, trl.GRPOTrainer):
    """`trl.GRPOTrainer` that computes once what rollouts of a micro-batch share, see :class:`PackedGroups`."""


class RLOOTrainer(PackedGroups, trl.RLOOTrainer):
    """`trl.RLOOTrainer` that computes once what rollouts of a micro-batch share, see :class:`PackedGroups`."""


def _media(given: Batch, rollouts: int) -> list[Batch]:
    """Split what a processor returned into one batch for each rollout; an empty list without any. TRL joins images of
    all rollouts end to end, or padded to as many in each, and values of tokens as [B, P + R]."""
    found = {name: value for name, value in given.items() if value is not None}
    if unknown := found.keys() - OF_IMAGES - {*OF_TOKENS}:
        raise ValueError(
            f"the batch has {', '.join(sorted(unknown))}: text and images are packed, use TRL's own trainer"
        )
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


def _seen(images: list[Batch], ids: torch.Tensor, mask: torch.Tensor, marks: dict[int, int]) -> SequenceMedia:
    """The images (of :func:`_media`) of rollouts [B, L] where the mask is set. `marks` has kinds of placeholders by
    their ids, where the processor returned no values of tokens."""
    if not any(name in row for row in images for name in OF_TOKENS):
        kinds = torch.zeros_like(ids)
        for token, kind in marks.items():
            kinds[ids == token] = kind
        images = [
            row | {OF_TOKENS[0]: own[None]} if row and marks else row for row, own in zip(images, kinds, strict=True)
        ]
    found = entries(images, [ids.shape[1]] * len(ids)) or []
    return SequenceMedia([within(*pair) for pair in zip(found, (mask != 0).cpu().numpy(), strict=True)])


def _regrouped(batches: list[Batch], marks: dict[int, int]) -> list[Batch]:
    """Micro-batches of the same rollouts and sizes, with rollouts of equal prompts and images next to each other, and
    within these groups those whose responses begin alike. Values without a first dimension are equal in all batches.
    For `marks` see :func:`_seen`."""
    whole: Batch = {}
    batches = [split_pixel_values_by_grid(batch) for batch in batches]
    for name, first in batches[0].items():
        values = [batch[name] for batch in batches]
        if isinstance(first, torch.Tensor) and first.dim():
            whole[name] = torch.cat(values)
        else:
            whole[name] = [x for value in values for x in value] if isinstance(first, list) else first
    parts = "prompt", "completion"
    prompts, responses = (common.tokens_of_rows(whole[f"{part}_ids"], whole[f"{part}_mask"]) for part in parts)
    images = _media({name: whole[name] for name in (OF_IMAGES - COUNTS) | {*OF_TOKENS} if name in whole}, len(prompts))
    ids, mask = (torch.cat([whole[f"{part}_{what}"] for part in parts], 1) for what in ("ids", "mask"))
    seen = _seen(images, ids, mask, marks) if images else None
    sequences = common.joined(prompts, responses)
    keys = sequences if seen is None else seen.tokens(sequences)
    group = grouped([key[: len(prompt)].tobytes() for key, prompt in zip(keys, prompts, strict=True)], [])
    place = common.prefix_tree(sequences, seen).last  # what begins alike has neighbouring places
    order = np.lexsort((place, group)).tolist()
    for name, value in whole.items():
        if isinstance(value, list):
            whole[name] = [value[i] for i in order]
        elif isinstance(value, torch.Tensor) and value.dim():
            whole[name] = value[order]
    return [unsplit_pixel_values_by_grid(batch) for batch in split_tensor_dict(whole, len(batches))]
