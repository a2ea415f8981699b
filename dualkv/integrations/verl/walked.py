"""Groups and trees larger than a micro-batch's budget of tokens, walked in veRL's FSDP engines: `dualkv_walk=True`.

The budget stays a number of packed tokens. A walk may take 1.1 times the memory that an update of micro-batches of so
many takes in all, with the model's own checkpointing. All micro-batches of a rank are parts then: those of walked
trees (:mod:`dualkv.walks`), and one for each other micro-batch. Data-parallel ranks run passes of the same kinds
together (:func:`dualkv.walk_passes`).

veRL's losses take whole rollouts. A part is a micro-batch of the rollouts that it alone predicts. Where a rollout lies
in several parts, a pass over all parts without a graph comes first: the loss is computed of its values, and their
gradients go into the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine.utils import detach_tree

from dualkv.arrays import IntArray, positions, to_device
from dualkv.branches import Branch, Keeping
from dualkv.data.media import OF_TOKENS
from dualkv.data.memory import Memory, RowCosts
from dualkv.data.parts import Fitting, TreePart, costed, fitting, numbered
from dualkv.data.planning import PlannedBatch, plan_shared
from dualkv.data.trees import PackedSequences
from dualkv.integrations.transformers.media import POSITIONS
from dualkv.integrations.verl import data as verl_data
from dualkv.integrations.verl.data import PackedRollouts, Rollouts
from dualkv.integrations.verl.options import GRADIENTS, WALK, Options
from dualkv.layout import Layout
from dualkv.row_costs import measure_sharded_rows, room
from dualkv.walks import Pass, State, part_passes

logger = logging.getLogger(__name__)
NONE = np.zeros(0, np.int64)
MOST = 1.1  # times the memory without a walk, weights and gradients included
ROWS = "input_ids", "position_ids", "multi_modal_inputs"


def refuse(model_config: Any, engine_config: Any, keeping: Keeping) -> None:
    """Raises ValueError for settings of an engine that does not walk with them."""
    for name, value, expected in (
        ("ulysses_sequence_parallel_size", engine_config.ulysses_sequence_parallel_size, 1),
        ("pad_to_length", engine_config.pad_to_length, False),
        ("use_dynamic_bsz", engine_config.use_dynamic_bsz, True),
        ("enable_activation_offload", model_config.enable_activation_offload, False),
    ):
        if value != expected:
            raise ValueError(
                f"{WALK} is set together with {name}={value}, expected {expected}: such rows are not walked"
            )
    computed = (engine_config.mixed_precision or {}).get("param_dtype", "bf16")
    if keeping.sum_dtype(PrecisionType.to_dtype(computed)) != keeping.gradients:
        raise ValueError(
            f"fused_kernel_options.{GRADIENTS} is bf16 and mixed_precision.param_dtype is {computed}, whose sums are"
            " fp32: leave the option out"
        )


def is_large(rollouts: Rollouts, max_tokens: int) -> bool:
    """Whether a group or tree has more packed tokens than a micro-batch may have."""
    shared = rollouts.packed_once
    new = shared.lengths[shared.order] - shared.common
    return bool((np.add.reduceat(new, np.flatnonzero(shared.common == 0)) > max_tokens).any())


class PartRollouts(PackedRollouts):
    """A part, whose values come in the order of the response tokens that it predicts."""

    def to_sequences(self, values: torch.Tensor, sequences: Any) -> torch.Tensor:
        """values [U, ...] -> [m, ...]."""
        return values[to_device(self.value, values.device)]


def of_ids(ids: torch.Tensor) -> PartRollouts:
    """Rows [t] on the host that predict nothing."""
    none = torch.zeros(0, dtype=torch.int64)
    layout = Layout.from_segments([0, len(ids)], [-1])
    return PartRollouts(ids, layout, none.new_zeros(1), none, none, none, none, None, {}, ids)


@dataclass(frozen=True)
class Unit:
    """A planned micro-batch, in one part or more.

    n rollouts, M response tokens.

    Attributes:
        rollouts: [n] indices in the batch.
        micro_batch: of these, as veRL's losses see them, or their rows alone (`ROWS`).
        packed: the same.
        parts: numbered on from those of other units.
        token_part: [M] the part that predicts each response token.
        bytes: that its passes take at most if none keeps all layers.
        home: [n] the part that predicts a rollout's last token, or has it, where nothing is predicted.
        whole: whether each rollout is predicted by one part.
    """

    rollouts: IntArray
    micro_batch: TensorDict
    packed: PackedRollouts
    parts: list[TreePart]
    token_part: IntArray
    home: IntArray
    whole: bool
    bytes: float
    of_token: IntArray = field(repr=False)  # [M] rollouts

    @property
    def batch(self) -> PackedSequences:
        return self.parts[0].batch

    def ids_of(self, part: TreePart) -> torch.Tensor:
        """[t] on the host."""
        return self.packed.input_ids[torch.from_numpy(part.rows)]

    def tokens_of(self, part: TreePart) -> IntArray:
        """[m] the response tokens that a part predicts."""
        return np.flatnonzero(self.token_part == part.index)

    def members(self, part: TreePart) -> IntArray:
        """The rollouts whose loss is computed in a part, as indices in the unit."""
        return np.flatnonzero(self.home == part.index)

    def of_part(self, part: TreePart, members: IntArray | None) -> PackedRollouts:
        """The rows of a part, with values for the sequences of `members`, or for response tokens without any."""
        local = np.full(self.batch.layout.num_tokens, -1, np.int64)
        local[part.rows] = np.arange(len(part.rows))
        tokens, head_rows = self.tokens_of(part), self.packed.head_rows.numpy()
        heads, value = np.unique(self.packed.value.numpy()[tokens], return_inverse=True)
        own = local[head_rows[heads]]
        # Runs of rows of one rollout, for temperatures: those of rows that predict nothing do not matter.
        rollout = np.zeros(len(part.rows), np.int64)
        rollout[own[value]] = self.of_token[tokens]
        if members is not None:
            number = np.zeros(len(self.home), np.int64)
            number[members] = np.arange(len(members))
            rollout = number[rollout]
        begins = np.flatnonzero(np.append(True, np.diff(rollout) != 0))
        layout = Layout.from_segments(np.append(begins, len(rollout)), np.full(len(begins), -1))
        labels = self.packed.input_ids.roll(-1)
        rows = torch.from_numpy(part.rows)
        of_sequences = tokens
        if members is not None:
            lens = np.diff(self.micro_batch["input_ids"].offsets().cpu().numpy())[members]
            r = np.bincount(self.of_token, minlength=len(self.home))[members]
            of_sequences = np.repeat(np.cumsum(lens) - r - 1, r) + positions(r)
        kind = PartRollouts if members is None else PackedRollouts
        arrays = (rollout[begins], own, value.reshape(-1), of_sequences, part.rows)
        source, heads_of_part, value_of, of_rows, packed_rows = (torch.from_numpy(x) for x in arrays)
        return kind(
            self.packed.input_ids[rows], layout, source, heads_of_part, value_of, of_rows, packed_rows, None, {},
            labels[rows],
        )  # fmt: skip


class PartRows(NamedTuple):
    """A pass of a part, as the engine runs it.

    Attributes:
        micro_batch: on the device; of rollouts whose loss the pass computes, or settings alone.
        members: the rollouts whose loss the pass computes, as indices in the unit.
        tokens: the response tokens whose values it computes, or takes gradients of, where no rollout is whole.
    """

    packed: PackedRollouts
    micro_batch: TensorDict
    members: IntArray = NONE
    tokens: IntArray = NONE

    @property
    def has_values(self) -> bool:
        return len(self.members) + len(self.tokens) > 0


class Planned(NamedTuple):
    """The plan of a batch of which some trees are walked, on this rank or on others.

    Attributes:
        units: walked ones first, so that ranks run the first passes of trunks together.
        holds: whether parameters stay gathered between passes without a graph.
    """

    units: list[Unit]
    holds: bool


def units(
    data: TensorDict, rollouts: Rollouts, batches: Sequence[PlannedBatch], memory: Memory, device: Any
) -> list[Unit]:
    """Make planned micro-batches, in parts within the memory. Raises ValueError for one that does not fit."""
    made: list[Unit] = []
    count = 0
    for one in batches:
        chosen = np.array(one.sequences)
        some = rollouts.select(chosen)
        if one.way == "alone":
            apart = np.zeros_like(some.packed_once.common)
            some = replace(some, packed_once=replace(some.packed_once, common=apart))
        micro_batch = _selected(data, one.sequences)
        made.append(_unit(chosen, micro_batch, some, memory, count, device, one.walk))
        count += len(made[-1].parts)
    return made


def _selected(data: TensorDict, rollouts: list[int]) -> TensorDict:
    """Select rollouts of a batch, which is left as it is if they are all of it."""
    return data if rollouts == list(range(len(data))) else tu.index_select_tensor_dict(data, rollouts)


def _unit(
    chosen: IntArray,
    micro_batch: TensorDict,
    rollouts: Rollouts,
    memory: Memory,
    count: int,
    device: Any,
    planned: Fitting | None,
) -> Unit:
    packed = verl_data.pack(micro_batch, rollouts)
    none = np.zeros(0, np.int64)
    ids = to_device(packed.input_ids[None], device)
    media = dict[str, Any](packed.media)  # stays in host memory
    if media:
        kinds = [kind * (packed.input_ids == token) for token, kind in rollouts.marks.items()]
        media[OF_TOKENS[0]] = torch.stack(kinds).sum(0)[None]
        media |= {} if packed.position_ids is None else {POSITIONS: packed.position_ids[1:, None]}
    batch = PackedSequences(ids, packed.layout.to(device), none, none, none > 0, media=media)
    p, r = rollouts.prompt_lens, rollouts.response_lens
    of_token = np.repeat(np.arange(len(r)), r)
    predicts = packed.head_rows.numpy()[packed.value.numpy()]
    ends = np.cumsum(p + r)
    last = packed.packed_rows.numpy()[np.where(r > 0, ends - 2, ends - 1)]

    def made(found: Fitting) -> Unit:
        part_of = np.empty(batch.layout.num_tokens, np.int64)
        for part in found.parts:
            part_of[part.rows] = part.index + count
        parts = numbered(found.parts, count)
        home, token_part = part_of[last], part_of[predicts]
        whole = bool((home[of_token] == token_part).all())
        most = costed(found.parts, memory, False)
        of_passes = found.bytes if most is None else most.bytes
        return Unit(chosen, micro_batch, packed, parts, token_part, home, whole, of_passes, of_token)

    found = _of_batch(planned, batch) or fitting(batch, memory)
    if found is None:
        raise ValueError(f"a micro-batch of {batch.layout.num_tokens} rows does not fit into parts")
    unit = made(found)
    if not unit.whole:
        # Parts that cut no response, where they do not take more time than a pass over all rows ahead.
        uncut = fitting(batch, memory, least=int(r.max()) + 1)
        if uncut is not None and uncut.time <= found.time + batch.layout.num_tokens:
            other = made(uncut)
            unit, found = (other, uncut) if other.whole else (unit, found)
    if len(unit.parts) > 1:
        logger.info("dualkv: rollouts %d to %d run in parts: %s", chosen.min(), chosen.max(), found)
    return unit


def _of_batch(planned: Fitting | None, batch: PackedSequences) -> Fitting | None:
    """Return planned parts as parts of a batch with the same layout, else None."""
    if planned is None or batch.media:  # which end beside images
        return None
    own, other = batch.layout, planned.parts[0].batch.layout
    if not (torch.equal(own.offsets, other.offsets) and torch.equal(own.parent, other.parent)):
        return None
    return planned._replace(parts=[replace(part, batch=batch) for part in planned.parts])


@dataclass
class Values:
    """Values of the response tokens of a unit, and their gradients.

    Attributes:
        of: by name, [M].
        gradients: by name, [M]; empty before the loss is known.
    """

    of: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)

    def put(self, tokens: IntArray, total: int, found: dict[str, torch.Tensor]) -> None:
        """Take the values [m] of tokens of one part."""
        for name, x in found.items():
            into = self.of.setdefault(name, x.new_zeros(total, *x.shape[1:]))
            into[to_device(torch.from_numpy(tokens), x.device)] = x

    def carry(self, tokens: IntArray) -> Callable[..., Any]:
        """Make the loss of a part that has these gradients."""

        def loss(model_output: dict[str, torch.Tensor], data: Any, dp_group: Any = None) -> Any:
            shares = []
            for name, x in model_output.items():
                gradient = self.gradients.get(name)
                own = 0.0 if gradient is None else gradient[to_device(torch.from_numpy(tokens), x.device)]
                shares.append((x * own).sum())
            return torch.stack([share.float() for share in shares]).sum(), {}

        return loss


def _rows_of(one: Pass, unit: Unit | None, one_rollout: TensorDict) -> PartRows:
    """Make the rows of a pass, empty without a unit; passes without values have the settings of `one_rollout`."""
    if unit is None:
        return PartRows(of_ids(torch.zeros(1, dtype=torch.int64)), one_rollout)
    members = unit.members(one.part) if unit.whole and one.is_last else NONE
    tokens = unit.tokens_of(one.part) if not unit.whole and one.is_last else NONE
    if len(members):
        micro_batch = tu.index_select_tensor_dict(unit.micro_batch, members.tolist())
        packed = unit.of_part(one.part, members)
        return PartRows(packed, verl_data.on_device(micro_batch, get_device_id()), members)
    if len(tokens):
        micro_batch = verl_data.on_device(unit.micro_batch, get_device_id())
        return PartRows(unit.of_part(one.part, None), micro_batch, tokens=tokens)
    return PartRows(of_ids(unit.ids_of(one.part)), one_rollout)


class WalksBatches:
    """A mixin for veRL's FSDP engines of packed batches, whose `forward_step` runs what `_running` holds."""

    _options: Options
    _planned: Planned | None
    _walked_parts = 0
    _held: Sequence[Any] = ()  # modules that stay gathered after passes without a graph

    # ------------------------------------------------------------------ a plan, on all data-parallel ranks
    def _plan_walk(
        self: Any, data: TensorDict, forward_only: bool, rollouts: Rollouts | None, tokens: int
    ) -> Planned | None:
        """Plan a batch, if a group or tree of any rank has more packed tokens than a micro-batch, and some is walked;
        `rollouts` are None on a rank that cannot pack them. Raises ValueError for rollouts that fit in no way, here or
        on another rank."""
        unpackable, large = self._on_any_rank(rollouts is None, rollouts is not None and is_large(rollouts, tokens))
        if unpackable or rollouts is None or not large:
            return None
        row = self._measured_costs(data, forward_only, tokens)
        half = 0.5  # a row, for rounding
        memory = Memory(self._walk_bytes(forward_only, (tokens + half) * row.recomputed), row)
        batches, made, error = list[PlannedBatch](), list[Unit](), ""
        try:
            plan = plan_shared(rollouts.packed_once, memory)
            logger.info("dualkv: %s", plan)
            batches = sorted(plan.batches, key=lambda one: one.way != "walked")
        except ValueError as found:
            error = str(found)
        if not self._on_any_rank(any(one.way == "walked" for one in batches))[0]:
            self._agree(error, tokens)
            return None
        try:
            made = [] if error else units(data.select(*ROWS, strict=False), rollouts, batches, memory, get_device_id())
        except ValueError as found:
            error = str(found)
        gathered = sum(p.numel() for p in self.module.parameters()) * self._autocast_dtype.itemsize
        has_room = all(unit.bytes + gathered <= memory.bytes for unit in made)
        holds = self._agree(error, tokens, has_room)
        if holds:
            logger.info("dualkv: parameters stay gathered between passes without a graph")
        return Planned(made, holds)

    def _walk_bytes(self: Any, forward_only: bool, of_tokens: float) -> float:
        """Return the bytes that passes may take, from those of a micro-batch of as many tokens as one may have."""
        every = list(self.module.parameters())
        own = [p.to_local() if isinstance(p, DTensor) else p for p in every]
        new = [x for x, p in zip(own, every, strict=True) if p.requires_grad and p.grad is None and not forward_only]
        to_come = sum(x.nbytes for x in new)
        is_gpu = torch.cuda.is_available()
        stays = to_come + (torch.cuda.memory_allocated() if is_gpu else sum(x.nbytes for x in own))
        wanted = of_tokens + (MOST - 1) * (stays + of_tokens)
        return max(of_tokens, min(wanted, room(torch.device("cuda"), to_come))) if is_gpu else wanted

    def _agree(self: Any, error: str, tokens: int, has_room: bool = True) -> bool:
        """Whether all ranks have room; raises ValueError on all of them where one has an error."""
        failed, full = self._on_any_rank(bool(error), not has_room)
        if error:
            raise ValueError(f"{WALK}: of {tokens} packed tokens a micro-batch, {error}")
        if failed:
            raise ValueError("another data-parallel rank found no micro-batches for its rollouts, see its error")
        return not full

    def _on_any_rank(self: Any, *flags: bool) -> list[bool]:
        found = torch.tensor(flags, dtype=torch.int64, device=get_device_id())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.get_data_parallel_group())
        return [bool(flag) for flag in found.tolist()]

    def _measured_costs(self: Any, data: TensorDict, forward_only: bool, tokens: int) -> RowCosts:
        """Measure what a row takes, once with gradients and once without. All ranks run the same passes."""
        if forward_only not in self._row_costs:
            one, ids = tu.index_select_tensor_dict(data, [0]), data["input_ids"].values().to(get_device_id())
            one = verl_data.on_device(one, get_device_id())

            def forward(ids: torch.Tensor, branch: Branch) -> torch.Tensor:
                return self._forward_part(PartRows(of_ids(ids[0].cpu()), one), branch, None)[0]

            with self._measuring(), torch.no_grad() if forward_only else nullcontext():
                found = measure_sharded_rows(forward, ids, max(2, tokens // 2), self._options.keeping)
            self._row_costs[forward_only] = found._replace(pairs=self._pairs_a_row)
            logger.info("dualkv: %s", self._row_costs[forward_only])
        return self._row_costs[forward_only]

    @contextmanager
    def _measuring(self: Any) -> Iterator[None]:
        """Keep parameters of FSDP2 gathered that would take more than the measured rows: the embedding and the head,
        and all if `reshard_after_forward` is False."""
        always = not self.engine_config.reshard_after_forward
        sharded = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        self._held = [module for module in sharded if always or isinstance(module, nn.Embedding | nn.Linear)]
        for module in self._held:
            module.set_reshard_after_backward(False, recurse=False)
            if not always:
                module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in self._held:
                module.set_reshard_after_backward(True, recurse=False)
                if not always:
                    module.set_reshard_after_forward(True, recurse=False)
                module.reshard()
            self._held = []

    # ------------------------------------------------------------------ a batch
    def _walk(
        self: Any,
        data: TensorDict,
        rollouts: Rollouts,
        _parts: Sequence[list[int]],
        loss_function: Callable[..., Any] | None,
        forward_only: bool,
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Run the planned micro-batches, all of their parts one after another; rollouts, and veRL's outputs of them."""
        # Planned before the batch got the settings by which losses divide.
        every = [replace(unit, micro_batch=_selected(data, unit.rollouts.tolist())) for unit in self._planned.units]
        self._walked_parts = sum(len(unit.parts) for unit in every if len(unit.parts) > 1)
        one = verl_data.on_device(tu.index_select_tensor_dict(data, [0]), get_device_id())
        apart = [unit for unit in every if not unit.whole]
        values = {id(unit.batch): Values() for unit in apart}
        state = State(training=False)
        with self._gathered():
            if not forward_only:
                for _ in self._run_parts(apart, values, one, loss_function, state):
                    pass
                for unit in apart:
                    loss = self._loss_of(unit, values[id(unit.batch)], loss_function, forward_only)
                    yield unit.rollouts.tolist(), loss
            yield from self._run_parts(every, values, one, loss_function, state if forward_only else state.then())
        if forward_only:
            for unit in apart:
                yield unit.rollouts.tolist(), self._loss_of(unit, values[id(unit.batch)], loss_function, forward_only)

    @contextmanager
    def _gathered(self: Any) -> Iterator[None]:
        """Keep the parameters of FSDP2 gathered between passes where there is memory for all of them: in the whole
        batch if `reshard_after_forward` is False, else from pass to pass without a graph."""
        sharded = [module for module in self.module.modules() if isinstance(module, FSDPModule)]
        always = not self.engine_config.reshard_after_forward
        if self._planned.holds and not always:
            self._held = [module for module in sharded if module is not self.module]  # the root is gathered anyway
        for module in sharded if always else []:
            module.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            for module in self._held:
                module.set_reshard_after_forward(True, recurse=False)
            for module in sharded:
                module.set_reshard_after_backward(True, recurse=False)
                module.reshard()
            self._held = []

    def _run_parts(
        self: Any,
        some: list[Unit],
        values: dict[int, Values],
        one_rollout: TensorDict,
        loss_function: Callable[..., Any] | None,
        state: State,
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Run the parts of units; the rollouts and outputs of those that are whole. The others leave or take values."""
        of_batch = {id(unit.batch): unit for unit in some}
        parts = [part for unit in some for part in unit.parts]
        passes = part_passes(parts, state, self._options.keeping, self.get_data_parallel_group(), get_device_id())
        with torch.set_grad_enabled(state.training):
            for number, one in enumerate(passes):
                with torch.profiler.record_function(f"micro_batch{number}"):
                    unit = of_batch.get(id(one.part.batch))
                    part = _rows_of(one, unit, one_rollout)
                    carried = Values() if unit is None or unit.whole else values[id(unit.batch)]
                    loss = loss_function if len(part.members) else carried.carry(part.tokens) if one.has_graph else None
                    output = self._run_pass(one, part, loss)
                if unit is not None and len(part.members):
                    yield unit.rollouts[part.members].tolist(), output
                elif unit is not None and len(part.tokens) and not one.has_graph:
                    carried.put(part.tokens, len(unit.token_part), output["model_output"])

    def _run_pass(self: Any, one: Pass, part: PartRows, loss_function: Callable[..., Any] | None) -> dict[str, Any]:
        sync: AbstractContextManager[None] = nullcontext()
        for module in self._held:
            module.set_reshard_after_forward(one.has_graph, recurse=False)
        if one.has_graph:
            sync = self._gradient_sync_context(is_last_micro_batch=one.is_last_graph)
        with sync:
            with one:
                loss, output = self._forward_part(part, one.branch, loss_function)
            if one.has_graph and self.scaler is not None:
                loss = self.scaler.scale(loss)
            one.backward(loss if one.has_graph else None)
        return output

    def _loss_of(
        self: Any, unit: Unit, values: Values, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> dict[str, Any]:
        """Compute veRL's loss of a unit from the values of its tokens, and the gradients of these."""
        micro_batch = verl_data.on_device(unit.micro_batch, get_device_id())
        sequences = micro_batch["input_ids"]
        loss, metrics = torch.ones(()), dict[str, Any]()
        with torch.set_grad_enabled(not forward_only):
            leaves = {name: x.detach().requires_grad_(not forward_only) for name, x in values.of.items()}
            model_output = {name: unit.packed.tokens_to_sequences(x, sequences) for name, x in leaves.items()}
            if loss_function is not None:
                with self._autocast():
                    loss, metrics = loss_function(
                        model_output=model_output, data=micro_batch, dp_group=self.get_data_parallel_group()
                    )
        if not forward_only:
            loss.backward()
            values.gradients = {name: x.grad for name, x in leaves.items() if x.grad is not None}
        return {"model_output": detach_tree(model_output), "loss": loss.detach().item(), "metrics": metrics}
