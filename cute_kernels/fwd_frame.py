"""Attention forward on Hopper over packed groups: arguments, shared memory, pipelines and roles.

A cluster takes tiles: consecutive packed rows of one group with `packed_heads` query heads of one KV head, 64 rows
(tokens x heads) a warp group. All its CTAs walk the same key blocks (work.py), so each loads a part of every block and
multicasts it. `fwd_load` has what the producer warp does, `fwd` what the MMA warp groups compute.

Pipelines (pipeline.py), all filled by the producer warp, which has the copy engine bring the data:

    data                  consumer                                stages              arrivals: full, empty
    Q and its work item   a warp group; the warp that had O       2 a group, in       1, 1
                          stored from Q's place releases it       q_places
    K                     every MMA warp of the cluster           stages              1, 4 * warp_groups * cluster
    V                     every MMA warp of the cluster           stages              1, 4 * warp_groups * cluster

Besides, each warp group meets at a named barrier of its own (BAR_WG), and the cluster at its barrier after each pass.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from cute_kernels import fakes
from cute_kernels.abi import WG_ROWS, ForwardFields, warp_group_tokens
from cute_kernels.cluster import SMEM_BYTES, Clustered, check_smem
from cute_kernels.fwd_walk import Walk
from cute_kernels.mask import PathBounds
from cute_kernels.pipeline import MbarrierAllocator, Pipeline, Stage, WrappingPipeline, init_mbarriers
from cute_kernels.work import AnyTile, Tile, first_and_step

RECOMPUTE_WORDS = 63  # of 32 bits, one an item of the cluster; items beyond share bits with its first ones


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
    """Tensors as they are passed; see :class:`ForwardFrame`."""

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

    Q: cute.Tensor  # ((packed_heads, T), D, first heads)
    K: cute.Tensor  # (T, D, Hk)
    V: cute.Tensor  # (T, Dv, Hk)
    O: cute.Tensor  # ((packed_heads, T), Dv, first heads)
    v: cute.Tensor  # (T, Hk, Dv)
    pairs: cute.Tensor  # (T, H, Dv / 2), out as pairs of elements in 32 bits
    lse: cute.Tensor  # (H, T)
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
    """See the top of this file.

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

    Q: cute.Tensor  # (64, D, q_places), and O in its first Dv columns
    K: cute.Tensor  # (N, D, stages)
    V: cute.Tensor  # (N, Dv, stages)
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


class ForwardFrame(Clustered):
    """out = softmax(scale Q K^T, masked) V and its log-sum-exp; query q sees key k iff k <= q < visible_end[k].

    Compiled once for a dtype, native head dims and a number of packed heads; at run time any T, H, Hk, group count,
    strides, and any head dims D <= head_dim and Dv <= head_dim_v that are multiples of 8 (the copy engine reads columns
    past them as zeros and drops them on the way out). Without head_dim_v the two are one, and Dv is D.

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        q: [T, H, D] fp16 or bf16. H a multiple of Hk. T >= 1.
        k: [T, Hk, D], dtype of q.
        v: [T, Hk, Dv], dtype of q.
        out: [T, H, Dv], dtype of q. Every element of the heads in the schedule is written.
        lse: [H, T] fp32, natural log, contiguous along T. Written as out.
        work: [n, 8] int32, the tiles of `dualkv.ops.plan.forward` for this kernel's tile (fields: abi.ForwardFields).
        schedule: [items, 2] int32, `dualkv.ops.plan.schedule` for as many clusters as are launched: (tile, the first of
            packed_heads query heads of one KV head). Of c clusters, each takes every c-th.
        segment_begin: [T] int32, the packed row where each row's segment begins.
        softmax_scale: fp32, above 0.
        num_sms: int32, multiprocessors of the device: CTAs launched at most.
        stream: taken from the environment (torch's current stream), not passed.
        *features: the arguments of the kernel's features, in this order:
            first_key: [T] int32, of a window or chunks: the packed row of the first key that each row sees.
            sinks: [H] fp32, a natural-log logit in the denominator of each head's rows, neither scaled nor capped. lse
                contains it.
            softcap: fp32 above 0: scores are softcap * tanh(softmax_scale * q.k / softcap).
    q, k, v and out: last dimension contiguous, base address and all strides multiples of 16 bytes (8 elements).

    NaN and infinity in Q and K touch only the rows that see them. In V they may also touch rows of the same segment
    that come before them (0 * NaN is NaN in the tensor cores), as far as their tile; never a row of another response or
    group.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim, a multiple of 32 up to 256.
        head_dim_v: native head dim of v and out, likewise, if it is another one; not above head_dim.
        packed_heads: query heads of one KV head in a tile, 1 to 16.
        tile_n, warp_groups, stages, cluster: see codegen.tiles.ForwardTile.
        features: see codegen.spec.KernelSpec.

    Raises:
        ValueError: a configuration that does not fit, in one sentence.
    """

    tile_fields = ForwardFields.NUM_FIELDS
    finds_walks = True  # the producer works out which blocks a warp group walks; else they are in the tables
    max_head_dim = 256
    allowed_warp_groups: ClassVar[Sequence[int]] = (2, 3)
    allowed_stages: ClassVar[Sequence[int]] = range(1, 17)
    column_groups = 1  # MMA warp groups that share 64 rows, each with an equal part of O's columns

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        packed_heads: int,
        *,
        tile_n: int,
        warp_groups: int = 2,
        stages: int = 2,
        cluster: int = 2,
        features: tuple[str, ...] = (),
        head_dim_v: int | None = None,
    ) -> None:
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype is {dtype}, expected BFloat16 or Float16")
        if head_dim % 32 or not 32 <= head_dim <= self.max_head_dim:
            raise ValueError(f"head_dim is {head_dim}, expected a multiple of 32 from 32 to {self.max_head_dim}")
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        if self.head_dim_v % 32 or not 32 <= self.head_dim_v <= head_dim:  # O takes Q's place
            raise ValueError(f"head_dim_v is {head_dim_v}, expected a multiple of 32 from 32 to head_dim {head_dim}")
        if not 1 <= packed_heads <= 16:
            raise ValueError(f"packed_heads is {packed_heads}, expected 1 to 16")
        if tile_n % 16 or not 16 <= tile_n <= 256:
            raise ValueError(f"tile_n is {tile_n}, expected a multiple of 16 up to 256")
        if warp_groups not in self.allowed_warp_groups or cluster not in (1, 2):
            groups = " or ".join(map(str, self.allowed_warp_groups))
            raise ValueError(f"got {warp_groups} warp groups and clusters of {cluster}, expected {groups}, and 1 or 2")
        if stages not in self.allowed_stages:
            raise ValueError(f"stages is {stages}, expected {self.allowed_stages[0]} to {self.allowed_stages[-1]}")
        self.dtype, self.head_dim, self.packed_heads = dtype, head_dim, packed_heads
        self.tile_n, self.warp_groups, self.stages, self.cluster = tile_n, warp_groups, stages, cluster
        self.has = Features(*(name in features for name in ("window", "sinks", "softcap")))
        self.tokens_wg = warp_group_tokens(packed_heads)
        self.rows_wg = self.tokens_wg * packed_heads  # rows in use; the rest is computed and dropped
        self.regs_load, self.regs_mma = {2: (24, 240), 3: (32, 160)}[self.mma_groups]  # registers a thread
        # O takes its Q's place. Places beyond one a warp group let the next tile's Q come before this tile's O is out.
        numbers = range(2 * warp_groups, warp_groups, -1)
        self.q_places = next((n for n in numbers if self.smem_bytes(n) <= SMEM_BYTES), warp_groups)
        tile = f"head_dim {head_dim}, tile_n {tile_n}, {stages} stages and {warp_groups} warp groups"
        check_smem(self.smem_bytes(self.q_places), tile)
        self.fence_softmax = warp_groups == 3  # see fwd.compiler_fence

    @property
    def num_fields(self) -> int:
        """Numbers of a work item: a tile's, and perhaps what its warp groups walk."""
        return self.tile_fields

    @property
    def mma_groups(self) -> int:
        """MMA warp groups of a CTA."""
        return self.warp_groups * self.column_groups

    @property
    def k_columns(self) -> int:
        """Columns of a tile of K in shared memory."""
        return self.head_dim // self.column_groups

    @property
    def v_columns(self) -> int:
        """Columns of O that a warp group makes, and of a tile of V in shared memory."""
        return self.head_dim_v // self.column_groups

    @property
    def item_fields(self) -> int:
        """Numbers of a work item in shared memory: see `Shared.item`."""
        return self.num_fields + 1 + (len(Walk._fields) if self.finds_walks else 0)

    # ---------------------------------------------------------------- host side
    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, kv_heads, dim = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), fakes.head_dim()
        dim_v = dim if self.head_dim_v == self.head_dim else fakes.head_dim()
        q, out = [fakes.packed(self.dtype, rows, heads, of) for of in (dim, dim_v)]
        k, v = [fakes.packed(self.dtype, rows, kv_heads, of) for of in (dim, dim_v)]
        lse, segment_begin = fakes.by_head(Float32, heads, rows), fakes.flat(Int32, rows)
        work, schedule = fakes.table(ForwardFields.NUM_FIELDS, align=16), fakes.table(2, align=8)
        numbers = Float32(0.0), Int32(0), fakes.stream()
        features = fakes.flat(Int32, rows), fakes.flat(Float32, heads), Float32(0.0)
        own = [x for x, has in zip(features, self.has, strict=True) if has]
        return q, k, v, out, lse, work, schedule, segment_begin, *numbers, *own

    def features(self, given: tuple[object, ...]) -> Features:
        """The arguments of the kernel's features, which come last, by their names."""
        left = iter(given)
        return Features(*[next(left) if has else None for has in self.has])

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, Dv)
        out: cute.Tensor,  # (T, H, Dv)
        lse: cute.Tensor,  # (H, T)
        work: cute.Tensor,  # (n, 8)
        schedule: cute.Tensor,  # (items, 2)
        segment_begin: cute.Tensor,  # (T)
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
        *features: object,
    ) -> None:
        tables = work, schedule, segment_begin, None
        arguments = Arguments(q, k, v, out, lse, *tables, self.features(features))
        self.launch(arguments, softmax_scale, num_sms, stream)

    def launch(self, x: Arguments, softmax_scale: Float32, num_sms: Int32, stream: cuda.CUstream) -> None:
        swizzle, rows = self.smem_atom().inner, (self.packed_heads, self.tokens_wg)
        q_smem, o_smem = [
            cute.make_composed_layout(swizzle, 0, self.rows_layout(columns))
            for columns in (self.head_dim, self.head_dim_v)
        ]
        k_smem, v_smem = [
            cute.select(self.kv_layout(columns), mode=[0, 1]) for columns in (self.k_columns, self.v_columns)
        ]
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_kv = load if const_expr(self.cluster == 1) else cpasync.CopyBulkTensorTileG2SMulticastOp()
        K_box, V_box = (self.tile_n, self.k_columns), (self.tile_n, self.v_columns)
        tma_Q, gQ = cpasync.make_tiled_tma_atom(load, self.packed(x.q), q_smem, (rows, self.head_dim))
        tma_O, gO = cpasync.make_tiled_tma_atom(store, self.packed(x.out), o_smem, (rows, self.head_dim_v))
        tma_K, gK = cpasync.make_tiled_tma_atom(load_kv, self.by_head(x.k), k_smem, K_box, self.cluster)
        tma_V, gV = cpasync.make_tiled_tma_atom(load_kv, self.by_head(x.v), v_smem, V_box, self.cluster)
        pairs_layout = cute.make_layout(
            (x.q.shape[0], x.q.shape[1], x.out.shape[2] // 2), stride=(x.out.stride[0] // 2, x.out.stride[1] // 2, 1)
        )
        pairs = cute.make_tensor(cute.recast_ptr(x.out.iterator, dtype=Int32), pairs_layout)
        tables = x.lse, x.work, x.schedule, x.bounds, x.regions, x.features.sinks, x.features.softcap
        heads_per_kv = x.q.shape[1] // x.k.shape[1]
        num_clusters = cutlass.min(x.schedule.shape[0], num_sms // self.cluster)
        self.kernel(
            Atoms(tma_Q, tma_K, tma_V, tma_O),
            Global(gQ, gK, gV, gO, x.v, pairs, *tables, softmax_scale, heads_per_kv),
        ).launch(
            grid=[num_clusters * self.cluster, 1, 1],
            block=[128 * (1 + self.mma_groups), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def packed(self, x: cute.Tensor) -> cute.Tensor:
        """(T, H, D) -> ((packed_heads, T), D, first heads), of which neighbours overlap"""
        G, (T, H, D), (sT, sH, sD) = self.packed_heads, x.shape, x.stride
        return cute.make_tensor(x.iterator, cute.make_layout(((G, T), D, H - G + 1), stride=((sH, sT), sD, sH)))

    def by_head(self, x: cute.Tensor) -> cute.Tensor:
        """(T, Hk, D) -> (T, D, Hk)"""
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))

    # ---------------------------------------------------------------- shared memory
    def smem_bytes(self, q_places: int) -> int:
        """Q and O, K and V stages, mbarriers, `item` and `recompute`, alignment."""
        barriers = MbarrierAllocator()
        self.pipelines(barriers, q_places)
        elements = q_places * WG_ROWS * self.head_dim
        elements += self.stages * self.tile_n * (self.head_dim + self.head_dim_v)
        numbers = q_places * self.item_fields + 1 + RECOMPUTE_WORDS
        return elements * 2 + barriers.num_bars * 8 + numbers * 4 + 1024

    def smem_atom(self) -> cute.ComposedLayout:
        """The widest swizzle for rows of all tiles."""
        columns = math.gcd(self.head_dim, self.head_dim_v)
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, columns)
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def q_layout(self) -> cute.ComposedLayout:
        """(64, D, q_places), of Q in shared memory."""
        shape = (WG_ROWS, self.head_dim, self.q_places)
        return cute.tile_to_shape(self.smem_atom(), shape, (0, 1, 2))

    def output_tile(self, q_tile: cute.Tensor) -> cute.Tensor:
        """The (64, Dv) tile of O in the place of Q, a (64, D) tile."""
        if self.head_dim_v == self.head_dim:
            return q_tile
        layout = cute.tile_to_shape(self.smem_atom(), (WG_ROWS, self.head_dim_v), (0, 1))
        return cute.make_tensor(q_tile.iterator, layout.outer)

    def kv_layout(self, columns: int) -> cute.ComposedLayout:
        """(N, D or Dv, stages), of K or V in shared memory."""
        return cute.tile_to_shape(self.smem_atom(), (self.tile_n, columns, self.stages), (0, 1, 2))

    def rows_layout(self, columns: int) -> cute.Layout:
        """The rows in use of a 64-row tile as the copy engine sees them: chunks of a swizzle's width, rows within."""
        width = cute.size(self.smem_atom(), mode=[1])
        return cute.make_layout((self.rows_wg, (width, columns // width)), stride=(width, (1, WG_ROWS * width)))

    @cute.jit
    def allocate(self) -> tuple[Shared, MbarrierAllocator]:
        """Shared memory, and the mbarriers of its pipelines."""
        allocator = SmemAllocator()
        sQ, sK, sV = self.allocate_tiles(allocator)
        counted = MbarrierAllocator()
        self.pipelines(counted, self.q_places)
        barriers = MbarrierAllocator(allocator.allocate_array(cutlass.Int64, counted.num_bars))
        pipes = self.pipelines(barriers, self.q_places)
        item = allocator.allocate_tensor(Int32, cute.make_layout((self.item_fields, self.q_places)), 8)
        recompute = allocator.allocate_tensor(Int32, cute.make_layout(1 + RECOMPUTE_WORDS), 8)
        return Shared(sQ, sK, sV, pipes, item, recompute, self.allocate_handed(allocator)), barriers

    def allocate_tiles(self, allocator: SmemAllocator) -> list[cute.Tensor]:
        """Q, K and V of `Shared`."""
        layouts = self.q_layout(), self.kv_layout(self.head_dim), self.kv_layout(self.head_dim_v)
        return [allocator.allocate_tensor(self.dtype, x.outer, 1024, x.inner) for x in layouts]

    def allocate_handed(self, allocator: SmemAllocator) -> Handed | None:
        """`Shared.handed`"""
        return None

    # ---------------------------------------------------------------- pipelines
    def pipelines(self, barriers: MbarrierAllocator, q_places: int) -> Pipelines:
        """The kernel's pipelines; `barriers` hands out their mbarriers in this order."""
        groups, readers = self.warp_groups, 4 * self.warp_groups  # MMA warps of a CTA
        Q = QueryPipeline(barriers.take(2 * groups, 1), barriers.take(q_places, 1), warp_groups=groups)
        K, V = [
            WrappingPipeline.make(barriers, self.stages, producers=1, consumers=readers, cluster=self.cluster)
            for _ in range(2)
        ]
        return Pipelines(Q, K, V)

    # ---------------------------------------------------------------- kernel: roles
    @cute.kernel
    def kernel(self, atoms: Atoms, g: Global) -> None:
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        s, barriers = self.allocate()
        marks = s.recompute
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            init_mbarriers(barriers.kinds)
            for j in cutlass.range(cute.arch.lane_idx(), 1 + RECOMPUTE_WORDS, 32, unroll=1):
                marks[j] = 0
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            self.load(atoms, g, s, warp_idx)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.mma(atoms, g, s, warp_idx - 4)

    def load(self, atoms: Atoms, g: Global, s: Shared, warp_idx: Int32) -> None:
        """Run the warps beside the MMA warp groups."""
        raise NotImplementedError

    def mma(self, atoms: Atoms, g: Global, s: Shared, warp_id: Int32) -> None:
        """Run an MMA warp."""
        raise NotImplementedError

    # ---------------------------------------------------------------- work items, and the recompute pass
    def tile(self, g: Global, fields: cute.Tensor | list[Int32]) -> AnyTile:
        """The tile of a work item."""
        return Tile.load(fields, self.tile_n)

    def num_items(self, g: Global) -> Int32:
        """The number of items that the cluster has."""
        first, step = first_and_step(self.cluster)
        return (g.schedule.shape[0] - first + step - 1) // step

    @cute.jit
    def is_due(self, marks: cute.Tensor, n: Int32, recompute: Int32) -> Boolean:
        """Whether the cluster's n-th item is computed in the first pass (recompute 0) or the recompute pass (1)."""
        due = recompute == 0
        if not due:
            word, bit = self.recompute_bit(n)
            due = (marks[word] & bit) != 0
        return due

    @cute.jit
    def request_recompute(self, marks: cute.Tensor, n: Int32) -> None:
        """A warp marks the cluster's n-th item for the recompute pass, in every CTA of the cluster."""
        word, bit = self.recompute_bit(n)
        for rank in cutlass.range_constexpr(self.cluster):
            ptr = marks.iterator
            if const_expr(self.cluster > 1):
                ptr = cute.arch.map_dsmem_ptr(ptr, rank)
            with cute.arch.elect_one():
                cute.arch.atomic_max(ptr, n + 1, sem="relaxed", scope="cluster")
                cute.arch.atomic_or(ptr + word, bit, sem="relaxed", scope="cluster")

    def recompute_bit(self, n: Int32) -> tuple[Int32, Int32]:
        """The place of the mark of the cluster's n-th item: (word, bit of it)."""
        n = n % (32 * RECOMPUTE_WORDS)
        return 1 + n // 32, Int32(1) << n % 32

    def end_pass(self, s: Shared) -> Int32:
        """One past the last item that the cluster has to recompute, once all its warps have ended the pass.

        A CTA must not end while its peers still write into it, so every thread comes here at the end of every pass.
        """
        self.sync_cluster()
        return s.recompute[0]

    # ---------------------------------------------------------------- scores
    def scale(self, g: Global) -> Float32:
        """The scale of scores in the softmax; with softcapping, scores are between -1 and 1."""
        return g.softcap if const_expr(self.has.softcap) else g.scale

    def cap_factor(self, g: Global) -> Float32 | None:
        """See softmax.cap."""
        return g.scale / g.softcap * (2 * math.log2(math.e)) if const_expr(self.has.softcap) else None

    # ---------------------------------------------------------------- rows of a tile
    def first_token(self, tile: AnyTile, wg: Int32) -> Int32:
        """Packed row of a warp group's first token."""
        return tile.row + (wg * self.cluster + self.rank()) * self.tokens_wg

    def last_token(self, tile: AnyTile, wg: Int32) -> Int32:
        """Packed row of a warp group's last token, or of the tile's."""
        return cutlass.min(self.first_token(tile, wg) + self.tokens_wg, tile.row_end) - 1

    def token(self, part: Part, r: int) -> Int32:
        """Packed row of the thread's row r (0 or 1)."""
        return self.first_token(part.tile, part.thread.wg) + (part.thread.row + 8 * r) // self.packed_heads

    def head(self, part: Part, r: int) -> Int32:
        """Query head of the thread's row r."""
        return part.first_head + (part.thread.row + 8 * r) % self.packed_heads

    def in_use(self, part: Part, r: int) -> Boolean:
        """Whether the thread's row r is a query's; the others hold anything and are not stored."""
        return (part.thread.row + 8 * r < self.rows_wg) & (self.token(part, r) < part.tile.row_end)

    def box(self, x: cute.Tensor, columns: int, first_head: Int32, token: Int32) -> cute.Tensor:
        """The ((packed_heads, tokens_wg), D or Dv) box of q or out that starts at a head and a token."""
        tile = ((self.packed_heads, self.tokens_wg), columns)
        return cute.local_tile(cute.domain_offset(((0, token), 0), x[None, None, first_head]), tile, ((0, 0), 0))

    def group(self, thread: Thread) -> Int32:
        """The thread's warp group among all MMA warp groups of the CTA."""
        return thread.wg

    def column_part(self, thread: Thread) -> Int32 | int:
        """The number of the part of O's columns that the thread's warp group makes."""
        return 0

    def partition(
        self, atom: cute.CopyAtom, shared: cute.Tensor, columns: int, box: cute.Tensor
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """(shared, global) sides of a copy of one warp group's Q or O; `shared` is its (64, D or Dv) tile."""
        in_use = cute.make_tensor(shared.iterator, self.rows_layout(columns))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(in_use, 0, 2), cute.group_modes(box, 0, 2)
        )
