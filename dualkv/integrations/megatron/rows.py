"""The argument of a call of a megatron-core model with packed groups: it carries a layout through the layers."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from dualkv.arrays import IntArray, outside_inference_mode, positive
from dualkv.context_parallel import ContextShard
from dualkv.data.counts import last_segments, layout_of, paths, rollouts_of_segments
from dualkv.data.media import SEGMENTS
from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.integrations.recurrent.sharded import trees_of
from dualkv.integrations.recurrent.walked import Trees
from dualkv.layout import Layout
from dualkv.sequence_parallel import Shard, padded

Count = Literal["rollouts", "rows"]
SHARDS = {"a2a": Shard, "all_gather": ContextShard}


class OneRank:
    """A group of one rank, for which megatron-core returns the rotary frequencies of all positions, uncut.

    A model's rotary embedding gets nothing else of a call, so it knows the PackedGroups. All are equal, because
    megatron-core caches frequencies by them.
    """

    def __init__(self, packed: PackedGroups | None = None) -> None:
        self.packed = None if packed is None else weakref.ref(packed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OneRank)

    def __hash__(self) -> int:
        return hash(OneRank)

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = OneRank()


class PackedGroups(PackedSeqParams):
    """A layout on its way through a megatron-core model, as `packed_seq_params`.

    Make one for each micro-batch, on every rank of the model from the same layout. With context parallelism every rank
    holds an equal share of the rows.

    Attributes:
        shard: this rank's rows, with the layout of all of them.
        position_ids: [3, 1, num_tokens] of this rank's rows, if given or placed by a model with a vision tower.
        runs_again: whether the layer that runs now is known to be recomputed.

    Args:
        layout: of the T rows, on the device of the model; or the batch that has it, which says where rollouts end.
        multiple: rows of a rank become a multiple of it: the tensor-parallel size, with sequence parallelism. The
            layout is padded with rows that see themselves alone.
        length: T becomes this number, `seq_length` of megatron-core's schedules, for interleaved pipeline stages.
        cp_group: the context-parallel ranks, by default megatron-core's. All of them construct it together.
        cp_comm_type: what context-parallel ranks exchange: "a2a" (heads, :class:`dualkv.sequence_parallel.Shard`) or
            "all_gather" (keys and values, :class:`dualkv.context_parallel.ContextShard`).
        count: what the routers of experts count. "rollouts": each row as often as there are rollouts with it, and rows
            that pad the layout not at all; "rows": each row once.
        position_ids: [3, T], for a `GPTModel` with "mrope" whose caller places images: frames, height and width of each
            row in its own unpacked sequence. By default those of text.

    Raises:
        TypeError: the layout is neither a :class:`dualkv.Layout` nor a batch; `multiple` or `length` is no integer.
        ValueError: `multiple` or `length` below 1, a layout of more rows than `length`, a `length` that the ranks
            cannot share, another exchange or count; positions of another shape; context-parallel ranks have different
            layouts. All ranks that construct it raise it.
    """

    runs_again = False
    position_ids: torch.Tensor | None = None

    def __init__(
        self,
        layout: Layout | PackedBatch | PackedSequences,
        multiple: int = 1,
        *,
        length: int | None = None,
        cp_group: dist.ProcessGroup | None = None,
        cp_comm_type: str = "a2a",
        count: Count = "rollouts",
        position_ids: torch.Tensor | None = None,
    ) -> None:
        batch, layout, multiple = layout, layout_of(layout), positive("multiple", multiple)
        length = None if length is None else positive("length", length)
        if count not in get_args(Count):
            raise ValueError(f"count is {count!r}, expected {' or '.join(map(repr, get_args(Count)))}")
        layout._check_of_all_rows("layout")
        if cp_comm_type not in SHARDS:
            raise ValueError(f"cp_comm_type is {cp_comm_type!r}, expected {' or '.join(map(repr, SHARDS))}")
        group = cp_group or parallel_state.get_context_parallel_group(check_initialized=False)
        ranks, rows = dist.get_world_size(group) if group else 1, layout.num_tokens
        self.length = length
        if length is not None:
            if length % (ranks * multiple):
                raise ValueError(f"length is {length}, expected a multiple of {ranks * multiple}, which ranks share")
            layout = padded(layout, max(length - rows, 0))
        self.shard = SHARDS[cp_comm_type](layout, group, multiple)
        if length is not None and length < rows:  # after the ranks have compared their layouts: all of them raise
            raise ValueError(f"layout has {rows} rows, expected at most length={length}")
        self._begin(self.layout._segments.longest_path)
        self.count = count
        self._batch = batch
        if position_ids is not None:
            self._place(position_ids)

    def _place(self, position_ids: torch.Tensor) -> None:
        """Set the positions of all rows, [3, T] or [3, 1, T]."""
        if position_ids.shape[0] != 3 or position_ids.numel() != 3 * position_ids.shape[-1]:
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}, expected [3, T]")
        self.position_ids = self.shard.split(position_ids.reshape(3, 1, -1), -1).to(self.layout.device)

    def _multimodal(self) -> torch.Tensor:
        """[3, 1, num_tokens]: frames, height and width of this rank's rows, for a model's rotary embedding, which then
        returns the frequencies of these rows."""
        self._by_row = True
        if self.position_ids is not None:
            return self.position_ids
        lacking = [name for name in SEGMENTS if name in getattr(self._batch, "media", {})]
        if lacking:
            raise ValueError(
                f"the batch of PackedGroups has {', '.join(lacking)}, which the model did not get: pass **batch.media"
                " to a model with a vision tower, or position_ids to PackedGroups"
            )
        return self.shard.position_ids.expand(3, 1, -1)

    def _begin(self, longest: int) -> None:
        """Set megatron-core's fields: the model makes rotary frequencies for so many positions."""
        super().__init__(qkv_format="dualkv", max_seqlen_q=longest, max_seqlen_kv=longest, cp_group=OneRank(self))
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._by_row = False

    @property
    def layout(self) -> Layout:
        """The layout of all rows, padded."""
        return self.shard.layout

    def trees(self, layer: int) -> Trees:
        """The trees of a call of a recurrent layer."""
        return trees_of(self.shard)

    def split(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's rows along `dim` of `input_ids`, `position_ids` or labels, which come with or without rows that
        pad the layout; zeros there. Raises ValueError for another number of rows."""
        return self.shard.split(x, dim)

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """All rows of `layout` along `dim` from each context-parallel rank's, on all of them, differentiable as
        :meth:`Shard.gather` is. Raises ValueError for another number of rows."""
        return self.shard.gather(x, dim)

    def predictions(self, batch: PackedBatch | PackedSequences) -> Predictions:
        """The response tokens of the batch that this rank's rows predict."""
        rows, start = batch.predict_rows, self.shard.rank * self.shard.num_tokens
        if self.shard.world_size == 1:
            return Predictions(rows, batch.targets, None, len(rows), None)
        among_all = self.shard.places.to(rows.device)[rows]
        places = ((among_all >= start) & (among_all < start + self.shard.num_tokens)).nonzero().flatten()
        return Predictions(among_all[places] - start, batch.targets[places], places, len(rows), self.shard.group)

    @cached_property
    @outside_inference_mode
    def _rollouts(self) -> Rollouts:
        """Find the rows of each rollout; raises ValueError where a layout does not say where rollouts end."""
        try:
            last = last_segments(self._batch)
        except ValueError as error:
            raise ValueError(f"{error}, or count='rows': routers of experts count by rollouts") from error
        times = rollouts_of_segments(self.layout, last)
        lengths = self.layout._segments.lengths
        device, order = self.layout.device, self.shard.rows

        def of_rows(of_segments: IntArray) -> torch.Tensor:
            return torch.from_numpy(of_segments.repeat(lengths)).to(device)[order]

        rollout, segment = (torch.from_numpy(x).to(device) for x in paths(self.layout, last))
        tokens = int((times * lengths).sum())
        return Rollouts(of_rows(times), of_rows(np.arange(len(times))), rollout, segment, len(times), len(last), tokens)

    def _frequencies(self, given: torch.Tensor, by_row: bool = False) -> torch.Tensor:
        """[num_tokens, 1, 1, D]: the rotary frequencies of this rank's rows, from [longest path, 1, 1, D] by position,
        or, `by_row`, from a multimodal rotary embedding. One result serves all layers, which get the same tensor."""
        of_path = self.max_seqlen_q, "positions of the layout's longest path"
        count, what = (self.shard.num_tokens, "rows") if by_row else of_path
        if given.shape[:-1] != (count, 1, 1):
            raise ValueError(
                f"rotary_pos_emb has shape {tuple(given.shape)}, expected {(count, 1, 1, 'D')}: frequencies of {what}"
            )
        if by_row:
            if not self._by_row:
                raise ValueError("the spec of a model with multimodal positions was enabled, expected enable(model)")
            return given
        if self._gathered is None or self._gathered[0] is not given:
            self._gathered = given, given.index_select(0, self.shard.position_ids.to(given.device))
        return self._gathered[1]


class Rollouts(NamedTuple):
    """The rows of the rollouts of a call, on its device.

    Attributes:
        times: [num_tokens] int64: rollouts that have each row of this context-parallel rank; 0 for rows that pad.
        segment: [num_tokens] int64: the segment of each of these rows.
        rollout_of_pair, segment_of_pair: [K] int64, a pair for each segment of each rollout.
        segments: of the layout.
        number: N, rollouts.
        tokens: of all of them, as separate sequences.
    """

    times: torch.Tensor
    segment: torch.Tensor
    rollout_of_pair: torch.Tensor
    segment_of_pair: torch.Tensor
    segments: int
    number: int
    tokens: int


class Predictions(NamedTuple):
    """Response tokens that the rows of this context-parallel rank predict.

    Attributes:
        predict_rows: [m] int64, among the rows of this rank.
        targets: [m] int64.
        places: [m] int64, among the batch's M response tokens; None where one rank has all of them.
        total: M.
        group: the context-parallel ranks.
    """

    predict_rows: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor | None
    total: int
    group: dist.ProcessGroup | None

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """[m] of this rank -> [M] of all ranks, in the order of `batch.targets`, which `batch.unpack` takes.

        Every rank computes the same loss of it, and its own values get their gradient, as megatron-core expects.
        """
        if self.places is None:
            return values
        whole = values.new_zeros(self.total).index_copy(0, self.places, values)
        found: torch.Tensor = _Total.apply(whole, self.group)
        return found


class _Total(torch.autograd.Function):
    """The sum over ranks; the gradient of a rank's part is that of the rank's own loss."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
