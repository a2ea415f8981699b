"""The data that parts of the forward's kernels hand to each other, bundled by the memory that holds it."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_kernels.mask import PathBounds
from cute_kernels.pipeline import Pipeline, Stage, WrappingPipeline
from cute_kernels.work import AnyTile


class Atoms(NamedTuple):
    """Copies by the copy engine (TMA)."""

    Q: cute.CopyAtom
    K: cute.CopyAtom
    V: cute.CopyAtom
    O: cute.CopyAtom


class Features(NamedTuple):
    """Arguments of the kernel's features; None without the feature."""

    first_key: cute.Tensor | None  # (T)
    sinks: cute.Tensor | None  # (H)
    softcap: Float32 | None


class Arguments(NamedTuple):
    """Tensors as they are passed; see :class:`cute_kernels.forward.frame.ForwardFrame`."""

    q: cute.Tensor  # (T, H, D)
    k: cute.Tensor  # (T, Hk, D)
    v: cute.Tensor  # (T, Hk, Dv)
    out: cute.Tensor  # (T, H, Dv)
    lse: cute.Tensor  # (H, T)
    work: cute.Tensor  # (n, fields)
    schedule: cute.Tensor  # (items, 2)
    bounds: cute.Tensor | PathBounds  # what the mask reads: (T) segment_begin of rows, or the bounds of a path
    regions: cute.Tensor | None  # (m, 2), of trees
    features: Features


class Global(NamedTuple):
    """Tensors in global memory, Q to O as coordinates for the copy engine; and numbers."""

    mQ: cute.Tensor  # ((packed_heads, T), D, first heads)
    mK: cute.Tensor  # (T, D, Hk)
    mV: cute.Tensor  # (T, Dv, Hk)
    mO: cute.Tensor  # ((packed_heads, T), Dv, first heads)
    mV_rows: cute.Tensor  # (T, Hk, Dv)
    mO_pairs: cute.Tensor  # (T, H, Dv / 2), out as pairs of elements in 32 bits
    mLSE: cute.Tensor  # (H, T)
    work: cute.Tensor  # (n, fields)
    schedule: cute.Tensor  # (items, 2)
    bounds: cute.Tensor | PathBounds  # see Arguments
    regions: cute.Tensor | None
    sinks: cute.Tensor | None  # (H)
    softcap: Float32 | None
    scale: Float32
    heads_per_kv: Int32


@dataclass(frozen=True)
class QueryPipeline(Pipeline):
    """Q and work item of each warp group's part of a tile.

    O of a part takes the place of its Q until it is stored, so places are the stages of `empty`: parts take them in
    turn, warp group by warp group and tile by tile. A warp group releases a part's place as it begins its next part,
    and as it begins its first one, the place of a part before, which was never there. The stages of `full` are two for
    each warp group, so that a warp group waits for every phase of its own ones.

    Invariant: a place is loaded only after all warps of the warp group have read the Q and the item that were there, by
    the barrier before O is written, and after the copy engine has read that O.
    """

    warp_groups: int = 1

    @property
    def places(self) -> int:
        """The number of places, from `warp_groups` to twice as many."""
        return self.empty.count

    def part(self, count: Int32, wg: Int32 | int) -> Int32:
        """Number of a warp group's part of the count-th tile, from 2 * places on."""
        return 2 * self.places + count * self.warp_groups + wg

    def place(self, count: Int32, wg: Int32 | int) -> Int32:
        """The place of Q and the item of the count-th tile."""
        return self.part(count, wg) % self.places

    def stage(self, count: Int32, wg: Int32 | int) -> Stage:
        """The stage of `full` for the count-th tile."""
        return Stage(count % 2 * self.warp_groups + wg, count // 2 % 2)

    def producer_acquire(self, count: Int32, wg: int) -> tuple[Stage, Int32]:
        """Wait until the place for the count-th tile may be written. Returns the stage of `full`, and the place.

        The first parts that are released are the ones before the first tile, one a warp group. So a place's releases
        are counted from `warp_groups` parts before the first one on.
        """
        place = self.place(count, wg)
        self.empty.wait(Stage(place, (self.part(count + 1, wg) // self.places + 1) % 2))
        return self.stage(count, wg), place

    def release_previous(self, count: Int32, wg: Int32) -> None:
        """The calling thread releases the place of the tile before the count-th one."""
        self.empty.arrive(self.place(count - 1, wg))


class Pipelines(NamedTuple):
    """The pipelines at the top of `frame`.

    Code that calls a method of `s.pipes.K` within a dynamic loop or branch gives the pipeline a local name before. The
    DSL would take the call for a change of `s`, and carry all of its members through the loop.
    """

    Q: QueryPipeline
    K: WrappingPipeline
    V: WrappingPipeline


class Handed(NamedTuple):
    """The shared memory through which two warp groups that share rows hand numbers to each other."""

    P: cute.Tensor  # (64, N, 2) probabilities of two blocks
    parts: cute.Tensor  # (4, 128, N/16, 2) fp32: a group's part of S of the other one's keys
    numbers: cute.Tensor  # (2, 32, 2) fp32: of each row of a thread, of four threads each, of the two groups


class Shared(NamedTuple):
    """Shared memory."""

    sQ: cute.Tensor  # (64, D, q_places), and O in its first Dv columns
    sK: cute.Tensor  # (N, D, stages)
    sV: cute.Tensor  # (N, Dv, stages)
    pipes: Pipelines
    item: cute.Tensor  # (item_fields, q_places) whose Q is there: the tile's fields, first head, the warp group's Walk
    recompute: cute.Tensor  # (1 + RECOMPUTE_WORDS) one past the last item to recompute; a bit for each of the cluster's
    handed: Handed | None  # where two warp groups share rows


class Thread(NamedTuple):
    """A thread of an MMA warp."""

    warp_id: Int32  # of the MMA warps
    wg: Int32  # warp group
    row: Int32  # of the warp group's 64 rows the thread has this one and the one 8 below


class Part(NamedTuple):
    """The part of a tile that a warp group takes, as one of its threads sees it."""

    tile: AnyTile
    first_head: Int32  # of packed_heads query heads
    thread: Thread


class Rows(NamedTuple):
    """The state of a thread's two query rows."""

    token: cute.Tensor  # (2) packed row
    max: cute.Tensor  # (2) reference maximum of the online softmax
    sum: cute.Tensor  # (2) of probabilities, this thread's part
    scale: cute.Tensor  # (2) of O, as the reference maximum moves


class State(NamedTuple):
    """The state of a warp group's loop over key blocks. Operands are registers (R a thread), or descriptors of shared
    memory."""

    tSrQ: cute.Tensor  # (MMA, 1, D/16), shared memory
    tSrK: cute.Tensor  # (MMA, 1, D/16, stages), shared memory
    tOrP: cute.Tensor  # (MMA, 1, N/16), N/4 R; or (MMA, 1, N/16, 2), shared memory
    tOrV: cute.Tensor  # (MMA, 1, N/16, stages), shared memory
    acc_O: cute.Tensor  # (64, Dv), Dv/2 R
    rows: Rows
    sV: cute.Tensor  # (N, Dv, stages)
    pipes: Pipelines
    bounds: cute.Tensor | PathBounds  # what the mask reads
    scale_log2: Float32
    cap_factor: Float32 | None  # see softmax.cap
    wg: Int32
    handed: Handed | None
