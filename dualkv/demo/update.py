"""One GRPO policy update, replicated, with packed prompts or packed trees: micro-batches, log-probs, loss, step.

All ways take the same rollouts, the same objective and the same log-prob computation over the rows that predict
response tokens; they differ in the rows that the model computes and in its attention. Per-token values of an update are
flat, [M]: the tokens of response 0 of group 0 first, of each response those that count.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualkv.data.microbatch import plan_micro_batches
from dualkv.data.packing import PackedBatch, pack
from dualkv.data.rollouts import Rollouts
from dualkv.data.trees import PackedSequences, pack_sequences, plan_sequences
from dualkv.demo.measure import PeakMemory, Stopwatch
from dualkv.demo.pictures import of_rows
from dualkv.grpo import Algorithm, group_advantages, policy_loss, token_weights
from dualkv.integrations.transformers import disable, enable, head
from dualkv.layout import Layout
from dualkv.logprobs import response_logprobs
from dualkv.progress import Track, untracked

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---------------------------------------------------------------------- micro-batches
@dataclass(frozen=True)
class ModelBatch:
    """Some responses of an update as one input of the model.

    Attributes:
        inputs: keyword arguments of the model without its head.
        batch: its rows, [B * L] of a padded input: which of them predict which response tokens.
        places: [m] int64, the places in [M] of these tokens, in the order of :meth:`logprobs`.
    """

    inputs: dict[str, Any]
    batch: PackedBatch | PackedSequences
    places: torch.Tensor

    @property
    def tokens(self) -> int:
        """Rows that the model computes, padding included."""
        return self.batch.layout.num_tokens

    def logprobs(self, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of each response token, [m] and [m]."""
        hidden = model.base_model(**self.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        logp, entropy = response_logprobs(hidden, head(model), self.batch)
        return torch.cat(self.batch.unpack(logp)), torch.cat(self.batch.unpack(entropy))


def _places(rollouts: Rollouts, responses: Sequence[int], device: torch.device) -> torch.Tensor:
    """The places in [M] of the tokens of some responses, counted through all groups."""
    lens = rollouts.trained_lens
    starts = [0, *itertools.accumulate(lens)]
    return torch.cat([torch.arange(starts[i], starts[i] + lens[i]) for i in responses]).to(device)


def _counted(batch: PackedBatch, rollouts: Rollouts, responses: Sequence[int]) -> PackedBatch | PackedSequences:
    """The packed responses, counted through all groups, with their masks."""
    if rollouts.masks is None:
        return batch
    masks = rollouts.flat_masks
    return PackedSequences.from_batch(batch, [masks[i] for i in responses])


def replicated_batches(rollouts: Rollouts, budget: int, device: torch.device) -> list[ModelBatch]:
    """Every response behind its own copy of the prompt: right-padded batches of sequences of similar length.

    Right padding needs no attention mask: under causal attention no token sees the padding behind it, and no row of the
    padding is read. So attention runs its fastest causal path. Padding counts in the budget.

    Raises:
        ValueError: a budget below the longest sequence.
    """
    pairs = list(zip(rollouts.flat_prompts, rollouts.flat_responses, strict=True))
    total = [len(p) + len(r) for p, r in pairs]
    media = rollouts.flat_media
    order = sorted((i for i, n in enumerate(rollouts.trained_lens) if n), key=lambda i: -total[i])
    batches = []
    while order:
        width = total[order[0]]
        if budget < width:
            raise ValueError(f"budget is {budget} tokens, the longest prompt with its response has {width}")
        chosen, order = order[: budget // width], order[budget // width :]
        input_ids = torch.zeros(len(chosen), width, dtype=torch.int64)
        for row, i in enumerate(chosen):
            input_ids[row, : total[i]] = torch.cat(pairs[i])
        input_ids = input_ids.to(device)
        # As packed groups: one response each, and behind each the padding as a group of its own without responses.
        layout = Layout.from_lengths(
            [n for i in chosen for n in (len(pairs[i][0]), width - total[i])],
            [n for i in chosen for n in ([len(pairs[i][1])], [])],
            device,
        )
        layout.mark_used()  # separate sequences, which the model computes without it
        batch = PackedBatch(input_ids.view(1, -1), layout, "gather", np.arange(len(chosen)), width)
        counted = _counted(batch, rollouts, chosen)
        inputs = {"input_ids": input_ids, **of_rows([media[i] for i in chosen] if media else [], width, device)}
        batches.append(ModelBatch(inputs, counted, _places(rollouts, chosen, device)))
    return batches


def packed_batches(rollouts: Rollouts, budget: int, device: torch.device) -> list[ModelBatch]:
    """Packed groups: each prompt once, its responses behind it; a group beyond the budget is split.

    Raises:
        ValueError: a budget below one prompt with one of its responses.
    """
    ends = list(itertools.accumulate(rollouts.group_sizes, initial=0))
    trained, flat, shown = rollouts.trained_lens, rollouts.flat_responses, rollouts.response_media
    # Groups, as their responses that have a token to train on, counted through all groups.
    groups = [(g, [i for i in range(a, b) if trained[i]]) for g, (a, b) in enumerate(itertools.pairwise(ends))]
    groups = [(g, members) for g, members in groups if members]
    batches = []
    lens = [[len(flat[i]) for i in members] for _, members in groups]
    for plan in plan_micro_batches([len(rollouts.prompts[g]) for g, _ in groups], lens, budget):
        chosen = [[groups[at][1][k] for k in some] for at, some in plan.parts]
        of_groups = [groups[at][0] for at, _ in plan.parts]
        batch = pack(
            [rollouts.prompts[g] for g in of_groups],
            [[flat[i] for i in some] for some in chosen],
            media=None if rollouts.media is None else [rollouts.media[g] for g in of_groups],
            response_media=None if shown is None else [[shown[i] for i in some] for some in chosen],
        )
        members = [i for some in chosen for i in some]
        batches.append(_packed(_counted(batch, rollouts, members).to(device), _places(rollouts, members, device)))
    return batches


def tree_batches(rollouts: Rollouts, budget: int, device: torch.device, fixed_cuts: bool = False) -> list[ModelBatch]:
    """Packed trees: everything that rollouts begin with alike once in a micro-batch, over all groups; with fixed cuts
    see :func:`dualkv.pack_sequences`.

    Raises:
        ValueError: a budget below one prompt with one of its responses.
    """
    flat = zip(rollouts.flat_prompts, rollouts.flat_responses, rollouts.flat_masks, strict=True)
    rows = [(torch.cat([p, r]), torch.cat([torch.zeros(len(p), dtype=torch.bool), mask])) for p, r, mask in flat]
    kept = [i for i, n in enumerate(rollouts.trained_lens) if n]
    seen = rollouts.flat_media
    batches = []
    for plan in plan_sequences([rows[i][0] for i in kept], budget, media=[seen[i] for i in kept] if seen else None):
        chosen = [kept[i] for i in plan]
        media = [seen[i] for i in chosen] if seen else None
        sequences, masks = zip(*(rows[i] for i in chosen), strict=True)
        batch = pack_sequences(sequences, masks, fixed_cuts=fixed_cuts, media=media, device=device)
        batches.append(_packed(batch, _places(rollouts, chosen, device)))
    return batches


def _packed(batch: PackedBatch | PackedSequences, places: torch.Tensor) -> ModelBatch:
    return ModelBatch({"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}, batch, places)


# Each takes an update's rollouts, a budget (the most rows of a micro-batch) and the device of the inputs.
WAYS: dict[str, Callable[..., list[ModelBatch]]] = {
    "replicated": replicated_batches,
    "packed": packed_batches,
    "tree": tree_batches,
}


def replicated_tokens_of_one_group(rollouts: Rollouts) -> int:
    """Rows of the largest group as a padded batch: the default budget, under which both ways take a group at once."""
    groups = zip(rollouts.prompts, rollouts.responses, strict=True)
    return max(len(group) * (len(prompt) + max(map(len, group))) for prompt, group in groups)


def longest_sequence(rollouts: Rollouts) -> int:
    """Tokens of the longest prompt with its response: the smallest budget."""
    groups = zip(rollouts.prompts, rollouts.responses, strict=True)
    return max(len(prompt) + max(map(len, group)) for prompt, group in groups)


# ---------------------------------------------------------------------- the update
@dataclass(frozen=True)
class Prepared:
    """Rollouts with all that is fixed before the first update on them; per-token tensors are [M] on the device.

    `old_logp` None: those of the policy as it is, which holds for the first update.
    """

    micro_batches: list[ModelBatch]
    advantages: torch.Tensor
    weights: torch.Tensor
    old_logp: torch.Tensor | None
    ref_logp: torch.Tensor | None


@dataclass(frozen=True)
class Gradients:
    """The results of one update before its optimizer step, on the CPU.

    Attributes:
        logp: [M] log-probs of the response tokens.
        loss: of the whole update.
        metrics: "clip_fraction", "entropy" and, with a reference policy, "kl": weighted as the loss is.
        of: gradient of each parameter, by name.
    """

    logp: torch.Tensor
    loss: float
    metrics: dict[str, float]
    of: dict[str, torch.Tensor]


def _in_place(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """(places, values) of every micro-batch as one [M]."""
    places, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return torch.empty_like(values).index_copy_(0, places, values)


class PolicyTrainer:
    """GRPO updates of a causal language model in one of the three ways; keeps time and peak memory.

    Attributes:
        seconds: by phase: "packing" (making micro-batches), "old log-probs", "reference log-probs", "forward",
            "backward", "optimizer".
        memory: peak of log-probs, forward and backward so far, above the weights (gradients count).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        way: str,
        objective: Algorithm,
        budget: int,
        learning_rate: float,
        reference: PreTrainedModel | None = None,
        deterministic: bool = False,
        track: Track = untracked,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            model: updated in place.
            way: "replicated", "packed" (prompts) or "tree" (whatever is shared).
            objective: loss and its settings.
            budget: rows of a micro-batch are at most this.
            learning_rate: of AdamW.
            reference: the frozen policy of the KL term; needed when the objective has one.
            deterministic: PyTorch and packed attention use deterministic algorithms only.
            track: shows progress.
            batch_invariant: the packed ways' log-probs have equal bits in all micro-batches, and old ones come from the
                smallest.
        """
        self.model, self.way, self.objective, self.budget = model, way, objective, budget
        self.reference, self.deterministic = reference, deterministic
        self.batch_invariant = batch_invariant and way != "replicated"
        for each in (model, reference):
            if each is not None:
                disable(each)
                head(each)  # raises an error for a model whose logits are not known
                if way != "replicated":
                    enable(each, deterministic=deterministic, batch_invariant=batch_invariant)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
        self._track = track
        self._warm = model.device.type == "cpu"  # there a first call makes nothing
        self._watch = Stopwatch(model.device)
        self.seconds = self._watch.seconds
        self.memory = PeakMemory(model.device)

    def prepare(self, rollouts: Rollouts, only_first: bool = False) -> Prepared:
        """Micro-batches, advantages, and log-probs under the policy as it is and under the reference policy.

        Args:
            rollouts: of any number of groups.
            only_first: for one update alone, whose old policy is the policy itself: spares the old log-probs.

        Raises:
            ValueError: no response tokens, a budget that is too small, rewards that are not finite.
        """
        lens, device = rollouts.trained_lens, self.model.device
        if not sum(lens):
            raise ValueError("the rollouts have no response tokens, there is nothing to learn from")
        rewards = torch.tensor([r for group in rollouts.rewards for r in group], dtype=torch.float64)
        advantages = group_advantages(rewards, rollouts.group_sizes).repeat_interleave(torch.tensor(lens))
        weights = token_weights(lens, self.objective.mean)
        if not self._warm:
            with self._determinism():
                self._warm_up(rollouts)
        with self._measured():
            with self._watch.phase("packing"):
                micro_batches = of_old = self._batches(rollouts, self.budget)
                if self.batch_invariant:
                    of_old = self._batches(rollouts, longest_sequence(rollouts))
            old_logp = ref_logp = None
            if not only_first:
                with self._watch.phase("old log-probs"):
                    old_logp = self._logprobs(self.model, of_old, "old log-probs")
            if self.reference is not None:
                with self._watch.phase("reference log-probs"):
                    ref_logp = self._logprobs(self.reference, micro_batches, "reference log-probs")
        return Prepared(micro_batches, advantages.to(device), weights.to(device), old_logp, ref_logp)

    def gradients(self, prepared: Prepared) -> Gradients:
        """Loss and gradients of one update, accumulated over its micro-batches; :meth:`step` applies them."""
        logp: list[tuple[torch.Tensor, torch.Tensor]] = []
        totals: dict[str, torch.Tensor] = {}
        self.model.train()
        with self._measured():
            for batch in self._tracked(prepared.micro_batches, "forward and backward"):
                with self._watch.phase("forward"):
                    loss, metrics, part = self._loss(batch, prepared)
                with self._watch.phase("backward"):
                    loss.backward()
                logp.append((batch.places, part))
                for name, value in metrics.items():
                    totals[name] = totals.get(name, torch.zeros((), device=value.device)) + value.double()
                del loss, metrics, part  # the graph, before the next one is built
        self.model.eval()
        sums = {name: value.item() for name, value in totals.items()}
        of = {n: p.grad.to("cpu", copy=True) for n, p in self.model.named_parameters() if p.grad is not None}
        return Gradients(_in_place(logp).cpu(), sums.pop("loss"), sums, of)

    def step(self) -> dict[str, torch.Tensor]:
        """The optimizer's step on the gradients at hand; returns the new weights by name, on the CPU."""
        with self._watch.phase("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return {name: p.detach().to("cpu", copy=True) for name, p in self.model.named_parameters()}

    def _warm_up(self, rollouts: Rollouts) -> None:
        """A first micro-batch, neither timed nor kept: kernels are then loaded or compiled."""
        batch = self._batches(rollouts, self.budget)[0]
        self.model.train()
        batch.logprobs(self.model)[0].sum().backward()
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        self._warm = True

    def _batches(self, rollouts: Rollouts, budget: int) -> list[ModelBatch]:
        cuts = {"fixed_cuts": True} if self.batch_invariant and self.way == "tree" else {}
        made: list[ModelBatch] = WAYS[self.way](rollouts, budget, self.model.device, **cuts)
        return made

    def _loss(
        self, batch: ModelBatch, prepared: Prepared
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
        """(loss of a micro-batch, its share of the metrics, its log-probs): the latter two without gradient."""
        at, objective = batch.places, self.objective
        logp, entropy = batch.logprobs(self.model)
        weights = prepared.weights[at]
        loss, metrics = policy_loss(
            logp,
            logp.detach() if prepared.old_logp is None else prepared.old_logp[at],
            prepared.advantages[at],
            weights,
            objective.clip_low,
            objective.clip_high,
            ref_logp=None if prepared.ref_logp is None else prepared.ref_logp[at],
            kl_coef=objective.kl_coef,
        )
        metrics |= {"loss": loss.detach(), "entropy": (weights * entropy.detach()).sum()}
        return loss, metrics, logp.detach()

    @torch.no_grad()
    def _logprobs(self, model: PreTrainedModel, micro_batches: Sequence[ModelBatch], what: str) -> torch.Tensor:
        """[M] log-probs of the response tokens."""
        return _in_place([(b.places, b.logprobs(model)[0]) for b in self._tracked(micro_batches, what)])

    def _tracked(self, micro_batches: Sequence[ModelBatch], what: str) -> Iterable[ModelBatch]:
        return self._track(micro_batches, f"{self.way}: {what}", len(micro_batches))

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with self._determinism(), self.memory.measured():
            yield

    @contextmanager
    def _determinism(self) -> Iterator[None]:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(before or self.deterministic)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
