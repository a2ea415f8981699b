"""The argument of a call of a megatron-core model with packed groups: it carries a layout through the layers."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from dualkv.arrays import IntArray, outside_inference_mode
from dualkv.context_parallel import ContextShard
from dualkv.data.counts import last_segments, layout_of, paths, rollouts_of_segments
from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.integrations.recurrent.sharded import trees_of
from dualkv.integrations.recurrent.walked import Trees
from dualkv.layout import Layout
from dualkv.sequence_parallel import Shard, padded

Count = Literal["rollouts", "rows"]
SHARDS = {"a2a": Shard, "all_gather": ContextShard}


class _OneRank:
    """A group of one rank, for which megatron-core returns the rotary frequencies of all positions. Otherwise it would
    cut them into the shares of its own context parallelism, and packed groups have other shares."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = _OneRank()  # one, because megatron-core caches frequencies by it


class PackedGroups(PackedSeqParams):
    """A layout on its way through a megatron-core model, as `packed_seq_params`.

    Make one for each micro-batch, on every rank of the model from the same layout. With context parallelism every rank
    holds an equal share of the rows. With "a2a" it runs attention on all rows and a share of the heads
    (:class:`dualkv.sequence_parallel.Shard`), with "all_gather" on its own rows and all heads
    (:class:`dualkv.context_parallel.ContextShard`), for any number of ranks.

    Attributes:
        shard: this rank's rows, with the layout of all of them.
        length: as given.
        count: as given.
        runs_again: whether the layer that runs now is known to be recomputed.

    Args:
        layout: which of the T rows belong to which prompt and response; of any depth, on the device of the model. Or
            the batch that has it: :func:`dualkv.pack_sequences` says where rollouts end, which `count` needs to know.
        multiple: rows of a rank become a multiple of it: the tensor-parallel size, with sequence parallelism. The
            layout is padded with rows that see themselves alone.
        length: T becomes this number, `seq_length` of megatron-core's schedules, for interleaved pipeline stages. They
            exchange micro-batches of one length.
        cp_group: the context-parallel ranks, by default megatron-core's. All of them construct it together.
        cp_comm_type: what context-parallel ranks exchange, in the words of megatron-core's config: "a2a" (heads) or
            "all_gather" (keys and values).
        count: what the routers of experts count, for expert biases, auxiliary losses and the z-loss. "rollouts": each
            row as often as there are rollouts with it, so that biases and losses are those of separate sequences, and
            rows that pad the layout not at all; "rows": each row once.

    Raises:
        TypeError: the layout is neither a :class:`dualkv.Layout` nor a batch.
        ValueError: a layout of more rows than `length`, a `length` that the ranks cannot share, another exchange or
            count;
            context-parallel ranks have different layouts. All ranks that construct it raise it.
    """

    runs_again = False

    def __init__(
        self,
        layout: Layout | PackedBatch | PackedSequences,
        multiple: int = 1,
        *,
        length: int | None = None,
        cp_group: dist.ProcessGroup | None = None,
        cp_comm_type: str = "a2a",
        count: Count = "rollouts",
    ) -> None:
        batch, layout = layout, layout_of(layout)
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

    def _begin(self, longest: int) -> None:
        """Set megatron-core's fields: the model makes rotary frequencies for so many positions."""
        super().__init__(qkv_format="dualkv", max_seqlen_q=longest, max_seqlen_kv=longest, cp_group=ONE_RANK)
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def layout(self) -> Layout:
        """The layout of all rows, padded."""
        return self.shard.layout

    def trees(self, layer: int) -> Trees:
        """The trees of a call of a recurrent layer."""
        return trees_of(self.shard)

    def split(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's rows of `input_ids`, `position_ids` or labels; zeros in rows that pad the layout.

        Args:
            x: rows of the layout along `dim`, with or without those that pad it.
            dim: of the rows.

        Returns:
            `num_tokens` rows along `dim`.

        Raises:
            ValueError: another number of rows.
        """
        return self.shard.split(x, dim)

    def gather(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """The rows of all context-parallel ranks, on each of them, differentiable as :meth:`Shard.gather` is.

        Args:
            x: `num_tokens` rows along `dim`.
            dim: of the rows.

        Returns:
            All rows of `layout` along `dim`.

        Raises:
            ValueError: another number of rows.
        """
        return self.shard.gather(x, dim)

    def predictions(self, batch: PackedBatch | PackedSequences) -> Predictions:
        """The response tokens that this rank's rows predict.

        Args:
            batch: of which `layout` is the layout.

        Returns:
            Their rows and tokens; its `gather` makes one tensor for all ranks of what is computed of them.
        """
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

    def _frequencies(self, by_position: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 1, 1, D]: the rotary frequencies of this rank's rows, taken from [longest path, 1, 1, D].

        One result serves all layers of a model, which get the same tensor.
        """
        if self._gathered is None or self._gathered[0] is not by_position:
            expected = (self.max_seqlen_q, 1, 1)
            if by_position.shape[:-1] != expected:
                raise ValueError(
                    f"rotary_pos_emb has shape {tuple(by_position.shape)}, expected {(*expected, 'D')}: frequencies of"
                    " the positions of the layout's longest path"
                )
            positions = self.shard.position_ids.to(by_position.device)
            self._gathered = by_position, by_position.index_select(0, positions)
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

        Every rank computes the same loss of it, and its own values get their gradient: as megatron-core's schedules and
        gradient reductions expect, a loss over all context-parallel ranks, not over their number.
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
