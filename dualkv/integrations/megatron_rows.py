"""What a call of a megatron-core model is given: the layout, this rank's rows of it, and what its rows predict."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from dualkv.integrations import require

require("megatron")

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.layout import Layout
from dualkv.sequence_parallel import Shard, padded


class _OneRank:
    """A group that asks megatron-core for the rotary frequencies of all positions: it would cut them into the shares
    of its own context parallelism, which are not those of packed groups."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = _OneRank()  # one, because megatron-core caches frequencies by it


def _check_the_same(layout: Layout, group: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks of the group if their layouts differ."""
    digest = hashlib.blake2b(layout.offsets.numpy().tobytes(), digest_size=7)
    digest.update(layout.parent.numpy().tobytes())
    number = int.from_bytes(digest.digest(), "big")
    ends = torch.tensor([number, -number], device=layout.device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    if ends.sum().item():
        raise ValueError(
            f"layouts differ between the {dist.get_world_size(group)} context-parallel ranks (this one has"
            f" {layout.num_tokens} rows), expected one layout on all of them"
        )


class PackedGroups(PackedSeqParams):
    """A layout on its way through a megatron-core model, as `packed_seq_params`.

    Make one for each micro-batch, on every rank of the model from the same layout. With context parallelism every rank
    holds an equal share of the rows, in their order; attention runs on all rows and a share of the heads
    (:class:`dualkv.sequence_parallel.Shard`), so that all ranks have the same work.

    Attributes:
        shard: this rank's rows, with the layout of all of them.
        length: as given.

    Args:
        layout: which of the T rows belong to which prompt and response; of any depth, on the device of the model.
        multiple: rows of a rank become a multiple of it: the tensor-parallel size, with sequence parallelism. The
            layout is padded with rows that see themselves alone.
        length: T becomes this number, `seq_length` of megatron-core's schedules, for interleaved pipeline stages. They
            exchange micro-batches of one length.
        cp_group: the context-parallel ranks, by default megatron-core's. All of them construct it together.

    Raises:
        TypeError: the layout is not a :class:`dualkv.Layout`.
        ValueError: a layout of more rows than `length`, a `length` that the ranks cannot share; context-parallel ranks
            have different layouts. All ranks that construct it raise it.
    """

    def __init__(
        self,
        layout: Layout,
        multiple: int = 1,
        *,
        length: int | None = None,
        cp_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is a {type(layout).__name__}, expected a dualkv.Layout")
        group = cp_group or parallel_state.get_context_parallel_group(check_initialized=False)
        self.shard = Shard(layout, group, multiple)
        if self.shard.world_size > 1:
            _check_the_same(layout, group)
        self.length = length
        if length is not None:
            unit = self.shard.world_size * multiple
            if length % unit:
                raise ValueError(f"length is {length}, expected a multiple of {unit}, which ranks share")
            if length < layout.num_tokens:
                raise ValueError(f"layout has {layout.num_tokens} rows, expected at most length={length}")
            self.shard = Shard(padded(layout, length - layout.num_tokens), group, multiple)
        longest = self.layout._segments.longest_path  # positions for which the model makes rotary frequencies
        super().__init__(qkv_format="dualkv", max_seqlen_q=longest, max_seqlen_kv=longest, cp_group=ONE_RANK)
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def layout(self) -> Layout:
        """Of all rows, padded."""
        return self.shard.layout

    def split(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's rows of `input_ids`, `position_ids` or labels; zeros in rows that pad the layout.

        Args:
            x: rows of the layout along `dim`, with or without those that pad it.
            dim: of the rows.

        Returns:
            `num_tokens` rows along `dim`.

        Raises:
            ValueError: more rows than the layout's.
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
        places = ((rows >= start) & (rows < start + self.shard.num_tokens)).nonzero().flatten()
        return Predictions(rows[places] - start, batch.targets[places], places, len(rows), self.shard.group)

    def _frequencies(self, by_position: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 1, 1, D]: of rotary frequencies [longest path, 1, 1, D] those of each row of this rank.

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
