"""Trees past memory in models of megatron-core: walks (:mod:`dualkv.walks`) on all ranks of a model.

    for one in walk_passes(model, batches, budget):
        with one:
            logits = model(one.input_ids, one.position_ids, None, packed_seq_params=one.packed)
            loss = loss_of(logits, one) if one.has_loss else None
        one.backward(loss)
    finalize_model_grads([model])

Tensor-parallel ranks keep the keys and values of their own heads. Context-parallel ranks share the rows of each part,
and exchange them for heads in attention, so each of them keeps all rows of its heads. Data-parallel ranks run passes of
the same kinds together, one that has none of a kind an empty one: experts on other ranks wait for each other's tokens
in every layer. Gradients add up in `main_grad`, and are reduced once.

megatron-core's checkpointing runs layers without a graph and then again, where the gradients of keys and values would
be lost. In a walk PyTorch's takes its place, or none where the plan lets layers keep all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dualkv
from dualkv.arrays import outside_inference_mode, to_device
from dualkv.branch_shards import BranchShard
from dualkv.branches import Branch, Keeping
from dualkv.data.counts import last_segments, paths, rollouts_of_segments
from dualkv.data.memory import RowCosts
from dualkv.data.parts import TreePart, numbered
from dualkv.data.trees import PackedSequences
from dualkv.integrations.megatron.configs import MEANING, counted, gathers_experts
from dualkv.integrations.megatron.enabling import decoder_model, layers_of
from dualkv.integrations.megatron.recurrent import MIXERS, mixer_of
from dualkv.integrations.megatron.rows import PackedGroups, Predictions, Rollouts
from dualkv.integrations.patching import Changes
from dualkv.integrations.recurrent.walked import Trees, Walked
from dualkv.sequence_parallel import HeadRows, check_heads
from dualkv.walks import Budget, Pass, State, check_loss, part_passes, parts_of

# Fields of a config and the values with which models are walked; why not with others.
NEEDED: dict[str, tuple[Any, str]] = {
    "pipeline_model_parallel_size": (1, "stages run micro-batches by schedules, which know no passes without a graph"),
    "mrope_section": (None, "each pass would need the features of all images"),
    "distribute_saved_activations": (False, "layers are recomputed by PyTorch, which keeps their inputs whole"),
    "cpu_offloading": (False, "it was not tried"),
    "fine_grained_activation_offloading": (False, "it was not tried"),
    "delay_wgrad_compute": (False, "gradients of weights would wait for a schedule"),
    "overlap_dispatch_backward_with_experts_wgrad": (False, "it was not tried"),
    "gtp_weight_remat_size": (1, "it was not tried"),
    "expert_gtp_weight_remat_size": (1, "it was not tried"),
}
RECOMPUTED = ("core_attn", "mlp")  # modules that may be recomputed in a walk


class PackedPart(PackedGroups):
    """A part of a walk on its way through a model."""

    shard: BranchShard

    def __init__(self, branch: Branch, multiple: int) -> None:
        group = parallel_state.get_context_parallel_group(check_initialized=False)
        self.shard = BranchShard(branch, group, multiple)
        self.length, self.count, self._batch = None, "rollouts", branch.part.batch
        self._begin(branch.layout._segments.longest_path)

    @property
    def runs_again(self) -> bool:  # type: ignore[override]
        return self.shard.branch.runs_again

    def predictions(self, batch: object) -> Predictions:
        """Raises ValueError: the head gets other rows."""
        raise ValueError("packed is that of a walk's pass, whose head gets few rows: expected the pass's predictions")

    def trees(self, layer: int) -> Trees:
        return Walked(self.shard.branch, layer)

    @cached_property
    @outside_inference_mode
    def _rollouts(self) -> Rollouts:
        """Find the rows of each rollout among those of the part. `tokens` are those of all parts."""
        batch, device = self.shard.branch.part.batch, self.layout.device
        segments, last = batch.layout._segments, last_segments(batch)
        times = rollouts_of_segments(batch.layout, last)
        own = torch.from_numpy(segments.segment_of_row[self.shard.branch.part.rows]).to(device)
        rollout, segment = (torch.from_numpy(x).to(device) for x in paths(batch.layout, last))
        of_rows = self.shard.own_rows(torch.from_numpy(times).to(device)[own]), self.shard.own_rows(own)
        tokens = int((times * segments.lengths).sum())
        return Rollouts(*of_rows, rollout, segment, len(times), len(last), tokens)


class MegatronPass:
    """One pass of a part, made by :func:`walk_passes`: a `with` statement for its forward, then :meth:`backward`.

    Attributes:
        packed: for `model(..., packed_seq_params=packed)`.
        part: the rows of all ranks; `part.expand` and `part.places` bring values of trained tokens to the rollouts.
        number: of its batch; None for an empty pass.
    """

    def __init__(self, one: Pass, model: Any, number: int | None) -> None:
        self._one, self._model, self.part, self.number = one, model, one.part, number
        self.packed = PackedPart(one.branch, multiple(model.config))
        self._running, self._outputs = ExitStack(), list[torch.Tensor]()

    @property
    def has_graph(self) -> bool:
        """Whether a backward follows. Passes of trunks that come first have none."""
        return self._one.has_graph

    @property
    def has_loss(self) -> bool:
        """Whether the loss of the part's trained tokens is computed in this pass."""
        return self._one.has_loss

    @property
    def kind(self) -> Literal["F", "G"]:
        """F without a graph, G with one."""
        return self._one.kind

    @property
    def input_ids(self) -> torch.Tensor:
        """[1, rows of this context-parallel rank] int64."""
        return self.packed.split(self._one.input_ids)

    @property
    def position_ids(self) -> torch.Tensor:
        """[1, rows of this context-parallel rank] int64."""
        return self.packed.shard.position_ids[None]

    @cached_property
    def _head(self) -> tuple[HeadRows, torch.Tensor]:
        """The rows that reach the head, and which of them predict the part's trained tokens."""
        asked = self.part._predicting if self.has_loss else np.zeros(0, np.int64)
        rows, of_tokens = (torch.from_numpy(x) for x in np.unique(asked, return_inverse=True))
        shard, ranks = self.packed.shard, multiple(self._model.config)
        rank = shard.rank * ranks + (parallel_state.get_tensor_model_parallel_rank() if ranks > 1 else 0)
        ranks *= shard.world_size
        return HeadRows.of(rows, rank, shard.layout.num_tokens // ranks, ranks), of_tokens

    @cached_property
    def predictions(self) -> Predictions:
        """The part's trained tokens, and the rows among the model's logits that predict them. The head runs on these
        rows alone, in passes without a loss on one row a rank."""
        (head, of_tokens), shard, targets = self._head, self.packed.shard, self.part.targets
        of_rank = len(head.rows) * multiple(self._model.config)
        rows = head.values[of_tokens]
        if shard.world_size == 1:
            return Predictions(to_device(rows, targets.device), targets, None, len(targets), None)
        places = (rows // of_rank == shard.rank).nonzero().flatten()
        rows, places = (to_device(x, targets.device) for x in (rows[places] % of_rank, places))
        return Predictions(rows, targets[places], places, len(targets), shard.group)

    def __enter__(self) -> Self:
        with ExitStack() as entering:
            branch = entering.enter_context(self._one).branch
            branch.check_module(self._model)
            self._outputs = entering.enter_context(_running(self._model, branch, self._head[0].rows))
            self._running = entering.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    def backward(self, loss: torch.Tensor | None = None) -> None:
        """Run the backward of a pass with a graph, and finish the pass. The loss is the part's share, which is
        multiplied as in megatron-core's schedules; None where it has none: then the backward of zero runs, so that all
        layers run theirs on all ranks. Raises errors as :meth:`dualkv.walks.Pass.backward` does."""
        config, outputs = self._model.config, self._outputs
        if len(outputs) != 1:
            raise ValueError(f"the model ran {len(outputs)} times in a pass, expected once, with one.packed")
        if loss is None and self.has_graph:
            loss = outputs[0].flatten()[:0].sum()  # 0 times an infinite logit is NaN
        elif loss is not None:
            check_loss(loss, self.has_graph)
            ranks = 1 if config.calculate_per_token_loss else self.packed.shard.world_size
            loss = loss * ranks
            if config.grad_scale_func is not None:
                loss = config.grad_scale_func(loss)
        outputs.clear()
        self._one.backward(loss)


def walk_passes(
    model: nn.Module,
    batches: Sequence[PackedSequences],
    budget: Budget,
    *,
    gradients: torch.dtype = torch.float32,
    on_host: bool = False,
) -> Iterator[MegatronPass]:
    """The passes of an update on all ranks of a model, in their order. Each one is run before the next is asked for.

    The gradients are those of one backward of all batches, whose loss is the sum of the parts'. Call
    `finalize_model_grads` behind them. Under `torch.no_grad` no pass has a graph, and each part runs once.

    Args:
        model: an enabled GPTModel or HybridModel, alone or in wrappers.
        batches: on all ranks of a model the same; data-parallel ranks may have different numbers of them, and none.
        budget: rows that have a graph at a time, or a :class:`dualkv.Memory` of :func:`measure_rows`; on all ranks of a
            model the same.
        gradients, on_host: as for :func:`dualkv.walk`.

    Raises:
        ValueError: a config that models are not walked with, at once; a batch or budget that :func:`dualkv.walk`
            refuses, on all ranks; ranks of a model with different parts.
        TypeError: batches are no list.
    """
    if not isinstance(batches, list | tuple):
        raise TypeError(f"batches is a {type(batches).__name__}, expected a list, of all batches of an update")
    found = decoder_model(model)
    refuse(model)
    return _passes(model, found, batches, budget, Keeping(gradients, on_host), State(torch.is_grad_enabled()))


def _passes(
    model: nn.Module, found: Any, batches: Sequence[PackedSequences], budget: Budget, keeping: Keeping, state: State
) -> Iterator[MegatronPass]:
    parts: list[TreePart] = []
    numbers: list[int] = []
    refusal: ValueError | TypeError | None = None
    try:
        planned = [(number, parts_of(batch, budget)) for number, batch in enumerate(batches)]
        if held := [name for batch in batches for name in batch.media]:
            raise ValueError(f"a batch has media ({', '.join(held)}), expected text in walks of megatron-core's models")
        # Walked ones first, so that ranks run the first passes of trunks together.
        for number, some in sorted(planned, key=lambda one: len(one[1]) == 1):
            numbers += [number] * len(some)
            parts += numbered(some, len(parts))
    except (ValueError, TypeError) as error:
        refusal = error
    keeps = _agreed(parts, refusal)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    several = group if dist.get_world_size(group) > 1 else None
    wrappers = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    for one in part_passes(parts, state, keeping, several, next(model.parameters()).device):
        if keeps is not None:
            one.branch.keeps = keeps
        is_own = any(one.part is part for part in parts[one.part.index :][:1])
        with ExitStack() as unreduced:
            for wrapper in wrappers:
                if not one.is_last_graph:
                    unreduced.enter_context(wrapper.no_sync())
            yield MegatronPass(one, found, numbers[one.part.index] if is_own else None)


def _agreed(parts: Sequence[TreePart], refusal: ValueError | TypeError | None) -> float | None:
    """Let all ranks agree on a walk: the share of layers that keep all in each pass, for experts on several ranks,
    which send tokens again in layers that are recomputed; else None. Raises the refusal, another rank's, or ValueError
    for different parts on ranks of one model."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    plan = hashlib.blake2b(digest_size=8)
    for part in parts:
        for numbers in (part.rows, part.offsets, part.parent, [part.is_trunk, part.keeps]):
            plan.update(np.asarray(numbers, np.float64).tobytes())
    mine = parallel_state.get_data_parallel_rank(), None if refusal else plan.hexdigest()
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (*mine, min((part.keeps for part in parts), default=1.0)), group)
    if refusal is not None:
        raise refusal
    refused = sum(found is None for _, found, _ in every)
    if refused:
        raise ValueError(
            f"{refused} of {len(every)} ranks refused their batch or budget, expected passes on all of them: the errors"
            " are theirs"
        )
    if len({one[:2] for one in every}) > len({rank for rank, *_ in every}):
        raise ValueError(
            "ranks of one model have different parts, expected the same batch and budget on all tensor- and"
            " context-parallel ranks"
        )
    if parallel_state.get_expert_model_parallel_world_size() == 1:
        return None
    return float(min(keeps for *_, keeps in every))


def measure_rows(
    model: nn.Module,
    input_ids: torch.Tensor,
    loss: Callable[[torch.Tensor, MegatronPass], torch.Tensor] | None = None,
    *,
    rows: int = 256,
    **options: Any,
) -> RowCosts:
    """Measure what a row of a part takes on a rank, for a :class:`dualkv.Memory`; all ranks call it together, and get
    the largest costs.

    Args:
        model, input_ids, rows, options: as for :func:`walk_passes` and :func:`dualkv.measure_rows`, which say what is
            refused too.
        loss: (the model's logits, pass) -> the loss of the pass: what the head takes is measured too. None: leave
            memory for it.
    """
    found = decoder_model(model)
    refuse(model)

    def run(one: MegatronPass, rows: torch.Tensor) -> torch.Tensor:
        with _running(found, one.packed.shard.branch, rows):
            out: torch.Tensor = model(one.input_ids, one.position_ids, None, packed_seq_params=one.packed)
        return out

    def forward(_ids: torch.Tensor, branch: Branch) -> torch.Tensor:
        """The hidden states of all rows. The head runs on one."""
        hidden: list[torch.Tensor] = []
        with Changes(found.decoder) as decoder:
            decoder.behind(lambda _module, _args, out: hidden.append(out))
            run(MegatronPass(Pass(branch, True, State(True)), found, None), torch.zeros(1, dtype=torch.int64))
        return hidden.pop()

    def of_hidden(hidden: torch.Tensor, part: TreePart) -> torch.Tensor:
        """The loss of hidden states that the decoder has computed."""
        assert loss is not None
        one = MegatronPass(Pass(Branch(part), True, State(True)), found, None)
        with Changes(found.decoder) as decoder:
            decoder.replace("forward", lambda *_, **__: hidden)
            return loss(run(one, one._head[0].rows), one)

    counts = [x for name, x in found.named_buffers() if name.endswith("local_tokens_per_expert")]
    before = [x.clone() for x in counts]
    with ExitStack() as changed:
        for module in found.modules():  # linear layers would write into main_grad
            for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
                if name in vars(module):
                    changed.enter_context(Changes(module)).replace(name, False)
        head = None if loss is None else of_hidden
        costs = dualkv.measure_rows(forward, input_ids, head, rows=rows, **options)
    for x, y in zip(counts, before, strict=True):
        x.copy_(y)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, costs)
    return RowCosts(*(_most(of_ranks) for of_ranks in zip(*every, strict=True)))


def _most(of_ranks: Sequence[Any]) -> Any:
    """The largest number, or the largest of each place."""
    return tuple(map(max, *of_ranks)) if isinstance(of_ranks[0], tuple) and len(of_ranks) > 1 else max(of_ranks)


# ---------------------------------------------------------------- a forward
@contextmanager
def _running(model: Any, branch: Branch, rows: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """The context of the forward of a pass, in which the decoder leaves `rows` of this rank; the model's outputs."""
    outputs: list[torch.Tensor] = []
    with Changes(tensor_parallel) as library, Changes(model.decoder) as decoder, Changes(model) as whole:
        checkpoints = _Checkpoints(branch.keeps, _CALLS.get(model.decoder, 0))
        library.replace("checkpoint", checkpoints)
        decoder.behind(lambda _module, _args, hidden: hidden.index_select(0, to_device(rows, hidden.device)))
        whole.behind(lambda _module, _args, output: outputs.append(output))
        yield outputs
        _CALLS[model.decoder] = checkpoints.calls


_CALLS = WeakKeyDictionary[nn.Module, int]()  # of megatron-core's `checkpoint` in a forward of a decoder


class _Checkpoints:
    """megatron-core's `checkpoint` in the forward of a pass, whose last layers keep all."""

    def __init__(self, keeps: float, of_forward: int) -> None:
        """of_forward: the calls of a forward; 0: not known."""
        self.recomputed = math.ceil(of_forward * (1 - keeps)) if of_forward or keeps == 1 else math.inf
        self.calls = 0

    def __call__(self, function: Callable[..., Any], _distribute: bool, *args: Any) -> Any:
        """Run a function, again in the backward if it has a graph and does not keep all."""
        self.calls += 1
        if self.calls > self.recomputed or not torch.is_grad_enabled():
            return function(*args)
        with set_checkpoint_early_stop(False):  # the exception that stops holds a layer's tensors until it is collected
            return checkpoint(function, *args, use_reentrant=False)


def multiple(config: Any) -> int:
    """Tensor-parallel ranks that share rows."""
    return int(config.tensor_model_parallel_size) if config.sequence_parallel else 1


# ---------------------------------------------------------------- what is not walked
def refuse(model: nn.Module) -> None:
    """Raises ValueError for a model that is not walked."""
    found = decoder_model(model)
    config = found.config
    for name, (needed, why) in NEEDED.items():
        if (value := getattr(config, name, needed)) != needed:
            raise ValueError(f"{name} is {value!r}, expected {needed!r} in a walk: {why}")
    for name in MEANING:
        if value := getattr(config, name, None):
            raise ValueError(f"{name} is {value!r}, expected none in a walk: trunks run twice, and both passes are one")
    for name in counted(config) if torch.is_grad_enabled() else ():
        if name != "moe_router_enable_expert_bias":
            raise ValueError(
                f"{name} is {getattr(config, name)!r}, expected none in a walk: a loss that counts the tokens of all"
                " rows is no sum over parts"
            )
    if gathers_experts(config):
        raise ValueError(
            "moe_token_dispatcher_type is 'allgather', expected 'alltoall' or 'flex' in a walk with experts on several"
            " ranks: parts differ in length between ranks"
        )
    modules = set(config.recompute_modules or ()) if config.recompute_granularity == "selective" else set()
    if others := sorted(modules - set(RECOMPUTED)):
        raise ValueError(
            f"recompute_modules has {', '.join(others)}, expected only {' and '.join(RECOMPUTED)} in a walk: others"
            " were not tried"
        )
    ranks = config.context_parallel_size
    check_heads("a tensor-parallel rank", config.num_attention_heads // config.tensor_model_parallel_size, ranks)
    if ranks > 1 and any(isinstance(mixer_of(layer), tuple(MIXERS)) for layer in layers_of(model)):
        raise ValueError(
            f"context_parallel_size is {ranks} in a model with recurrent layers, expected 1 in a walk: their states are"
            " not kept on several ranks"
        )
    for module in model.modules():
        if isinstance(module, _BaseDataParallel) and not isinstance(module, DistributedDataParallel):
            raise ValueError(f"the model is in a {type(module).__name__}, expected DistributedDataParallel in a walk")
