"""The data that parts of the backward's main kernels hand to each other, bundled by the memory that holds it."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.abi import BackwardFields as items
from cute_kernels.pipeline import Pipeline, Signal


# ---------------------------------------------------------------- global memory
class Load(NamedTuple):
    """A copy by the copy engine (TMA), and the coordinates of its tensor in global memory."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Loads(NamedTuple):
    """Tensors that the copy engine brings to shared memory."""

    Q: Load  # (T, D, H)
    dO: Load  # (T, Dv, H)
    K: Load  # (T, D, Hk)
    V: Load  # (T, Dv, Hk)
    peer_K: Load | None  # (T, D, Hk), beyond head dim 128: K of the cluster's other CTA


class Global(NamedTuple):
    """Tensors in global memory."""

    stats: cute.Tensor  # (H, query blocks, M * STAT_COLUMNS)
    dk: cute.Tensor  # (T, Hk, D / 2) as pairs of elements in 32 bits
    dv: cute.Tensor  # (T, Hk, Dv / 2)
    dq_acc: cute.Tensor  # (H * query blocks * M * D), sums of dQ
    partials: cute.Tensor  # partial sums of dK and dV
    locks: cute.Tensor
    work: cute.Tensor  # (items, fields)
    visible_end: cute.Tensor  # (T)
    blocks: cute.Tensor | None = None  # with a window: (rows, fields), see abi.BlockFields
    position: cute.Tensor | None = None  # (query blocks * M)
    end_position: cute.Tensor | None = None  # (T) one past the last position that sees a key
    cap: Float32 | None = None  # of scores


# ---------------------------------------------------------------- shared memory
class Shared(NamedTuple):
    """Tensors in shared memory, and words of 32 bits."""

    K: cute.Tensor  # (N, k_columns)
    V: cute.Tensor  # (N, Dv)
    Q: cute.Tensor  # (M, D, stages)
    dO: cute.Tensor  # (M, Dv, do_stages)
    dS: cute.Tensor  # (M, N, buffers); beyond head dim 128 the first buffer is P
    dQ: cute.Tensor | None  # (M * D), up to head dim 128: dQ on its way to global memory
    peer_K: cute.Tensor | None  # (N, peer_columns), beyond
    stats: cute.Tensor  # (STAT_COLUMNS, M, stages): lse and dpsum of query rows
    stat_keys: cute.Pointer  # the keys' side of the products with them
    bars: cute.Pointer  # mbarriers, which belong to pipelines
    dq_progress: cute.Pointer  # one word: the block whose dQ is being added up
    item: cute.Pointer  # words of SavedItem; if deterministic, then the item's index in `work`
    blocks: cute.Tensor | None  # (words, stages), with a window: fields of the query block whose Q is in a stage


class SavedItem(NamedTuple):
    """The fields of their item that warps need after their loops, during which no register holds them. In this order in
    `Shared`."""

    kv_head: Int32
    key: Int32
    key_end: Int32
    partial: Int32
    own_steps: Int32  # blocks (of all heads) to whose dQ this CTA adds
    steps: Int32  # blocks that the cluster loads


# ---------------------------------------------------------------- registers
@dataclass(frozen=True)
class Item:
    """A CTA's part of a work item."""

    kv_head: Int32
    key: Int32  # the CTA's first one
    key_end: Int32  # one past the item's last one
    block_begin: Int32  # query blocks [block_begin, block_end)
    block_end: Int32
    unmasked_begin: Int32  # rows [unmasked_begin, unmasked_end) need no mask
    unmasked_end: Int32
    partial: Int32  # number of its partial sums of dK and dV; -1: it writes dK and dV
    order: Int32  # deterministic: its number among the items of its KV head, and which items add to dQ before it
    previous_end: Int32
    previous: Int32

    @classmethod
    def load(cls, work: cute.Tensor, index: Int32, rank: Int32, tile_n: int) -> "Item":
        """The part of CTA `rank` of a cluster in item `index` of `work` (fields: abi.BackwardFields)."""
        field = [work[index, f] for f in range(items.NUM_FIELDS)]
        key = field[items.KEY] + rank * tile_n
        unmasked_end = cutlass.select_(rank == 0, field[items.UNMASKED_END], field[items.UNMASKED_END + 1])
        blocks = field[items.BLOCK_BEGIN], field[items.BLOCK_END]
        order = field[items.ORDER], field[items.PREVIOUS_END], field[items.PREVIOUS]
        unmasked = key + tile_n - 1, unmasked_end
        return cls(field[items.KV_HEAD], key, field[items.KEY_END], *blocks, *unmasked, field[items.PARTIAL], *order)

    def predecessors(self, m_block: Int32) -> Int32:
        """The number of items that add to dQ of a query block before this one."""
        return cutlass.select_(m_block < self.previous_end, self.order, self.previous + 1)


class TableRow(NamedTuple):
    """A row of the table of query blocks: see abi.BlockFields."""

    m_block: Int32
    flags: Int32
    shift: Int32


class Mask(NamedTuple):
    """The query rows that see a thread's two keys, in an accumulator whose rows are keys.

    The thread's first column is subtracted from both, so that they compare with `accumulator.column`.
    """

    key: cute.Tensor  # (2) first query row that sees the key, which is the key's own
    visible_end: cute.Tensor  # (2) one past the last
    unmasked_begin: Int32  # rows [unmasked_begin, unmasked_end) see all keys of the CTA
    unmasked_end: Int32
    # with a window; the last two fields, and unmasked_end, are a block's
    end_position: cute.Tensor | None = None  # (2) one past the last position that sees the key
    position: cute.Tensor | None = None  # of all query rows, in global memory
    shift: Int32 | None = None  # see abi.BlockFields
    several: Int32 | None = None


# ---------------------------------------------------------------- pipelines
@dataclass(frozen=True)
class BackwardPipelines:
    """The mbarriers of a CTA that the main kernels have in common; `bwd_frame` lists all."""

    K: Signal
    V: Signal
    Q: Pipeline
    dO: Pipeline
