"""Attention forward on Hopper over packed groups: signature, set-up, layouts and loads.

A cluster takes tiles: consecutive packed rows of one group with all `packed_heads` query heads of one KV head, 64 rows
(tokens x heads) a warp group. All its CTAs walk the same key blocks (work.py), so each loads a part of every block and
multicasts it. `fwd` has what the warp groups compute.
"""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from cute_kernels import fakes, fwd_walk
from cute_kernels.abi import WG_ROWS, warp_group_tokens
from cute_kernels.abi import ForwardFields as items
from cute_kernels.cluster import SMEM_BYTES, Clustered
from cute_kernels.fwd_walk import Walk
from cute_kernels.work import Tile, first_and_step

AGAIN_WORDS = 63  # of 32 bits, one an item of the cluster; its items beyond share bits with its first


class Atoms(NamedTuple):
    """Copies by the copy engine (TMA)."""

    Q: cute.CopyAtom
    K: cute.CopyAtom
    V: cute.CopyAtom
    O: cute.CopyAtom


class Global(NamedTuple):
    """Tensors in global memory; Q to O as coordinates for the copy engine."""

    Q: cute.Tensor  # ((packed_heads, T), D, head groups)
    K: cute.Tensor  # (T, D, Hk)
    V: cute.Tensor  # (T, D, Hk)
    O: cute.Tensor  # ((packed_heads, T), D, head groups)
    q: cute.Tensor  # (T, H, D), as q, k and v were passed
    k: cute.Tensor  # (T, Hk, D)
    v: cute.Tensor  # (T, Hk, D)
    pairs: cute.Tensor  # (T, H, D / 2), out as pairs of elements in 32 bits
    lse: cute.Tensor  # (H, T)
    work: cute.Tensor  # (n, fields)
    schedule: cute.Tensor  # (items, 2)
    bounds: cute.Tensor  # what the mask reads: (T) segment_begin of rows, or in a tree (T + N) visible_end of keys
    regions: cute.Tensor | None = None  # (m, 2), of trees


class Shared(NamedTuple):
    """Tensors and barriers in shared memory."""

    Q: cute.Tensor  # (64, D, q_places), and O
    K: cute.Tensor  # (N, D, stages)
    V: cute.Tensor  # (N, D, stages)
    bars: cute.Pointer
    item: cute.Tensor  # (words, q_places) whose Q is there: the tile's fields, its head group, the warp group's Walk
    again: cute.Tensor  # (1 + AGAIN_WORDS) one past the last item to be done again; a bit for each of the cluster's


class ForwardFrame(Clustered):
    """out = softmax(scale Q K^T, masked) V and its log-sum-exp; query q sees key k iff k <= q < visible_end[k].

    Compiled once for a dtype, a native head dim and a number of packed heads; at run time any T, H, Hk, group count,
    strides, and any head dim D <= head_dim that is a multiple of 8 (the copy engine reads columns past D as zeros and
    drops them on the way out).

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        q: [T, H, D] fp16 or bf16. H a multiple of Hk * packed_heads. T >= 1.
        k, v: [T, Hk, D], dtype of q.
        out: [T, H, D], dtype of q. Every element is written.
        lse: [H, T] fp32, natural log, contiguous along T. Every element is written.
        work: [n, 8] int32, the tiles of `dualkv.plan` for this kernel's tile (fields: abi.ForwardFields).
        schedule: [n * H / packed_heads, 2] int32, `dualkv.schedule` for as many clusters as are launched: every tile of
            every head group once, as (tile, head group). Of c clusters, each takes every c-th.
        segment_begin: [T] int32, the packed row where each row's segment begins.
        softmax_scale: fp32, above 0.
        num_sms: int32, multiprocessors of the device: CTAs launched at most.
        stream: taken from the environment (torch's current stream), not passed.
    q, k, v and out: last dimension contiguous, base address and all strides multiples of 16 bytes (8 elements).

    What is not finite in Q and K touches only the rows that see it. In V it may also touch rows of its own segment that
    come before it (0 * NaN is NaN in the tensor cores), as far as their tile; never a row of another response or group.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim, a multiple of 32 up to 256.
        packed_heads: query heads of one KV head in a tile, 1 to 16.
        tile_n, warp_groups, stages, q_in_registers, cluster: see codegen.tiles.ForwardTile.

    Raises:
        ValueError: a configuration that does not fit, in one sentence.
    """

    num_fields = items.NUM_FIELDS
    walks = True  # a warp group walks the blocks that its rows see, not all of the tile's

    @property
    def item_words(self) -> int:
        return self.num_fields + 1 + (len(Walk._fields) if self.walks else 0)

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        packed_heads: int,
        *,
        tile_n: int,
        warp_groups: int = 2,
        stages: int = 2,
        q_in_registers: bool = True,
        cluster: int = 2,
    ) -> None:
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype is {dtype}, expected BFloat16 or Float16")
        if head_dim % 32 or not 32 <= head_dim <= 256:
            raise ValueError(f"head_dim is {head_dim}, expected a multiple of 32 from 32 to 256")
        if not 1 <= packed_heads <= 16:
            raise ValueError(f"packed_heads is {packed_heads}, expected 1 to 16")
        if tile_n % (8 * cluster) or tile_n % 16 or not 16 <= tile_n <= 256:
            raise ValueError(f"tile_n is {tile_n}, expected a multiple of {max(16, 8 * cluster)} up to 256")
        if warp_groups not in (1, 2, 3) or cluster not in (1, 2, 4):
            raise ValueError(f"got {warp_groups} warp groups and clusters of {cluster}, expected 1 to 3 and 1, 2 or 4")
        self.dtype, self.head_dim, self.packed_heads = dtype, head_dim, packed_heads
        self.tile_n, self.warp_groups, self.stages = tile_n, warp_groups, stages
        self.q_in_registers, self.cluster = q_in_registers, cluster
        self.tokens_wg = warp_group_tokens(packed_heads)
        self.rows_wg = self.tokens_wg * packed_heads  # rows in use; the rest computes and is dropped
        self.regs_load, self.regs_mma = {1: (56, 256), 2: (24, 240), 3: (32, 160)}[warp_groups]
        # O takes its Q's place. If there is room, the next tile's Q has another one, and comes as early as its keys.
        self.q_stages = 2 if self.smem_bytes(q_stages=2) <= SMEM_BYTES else 1
        if self.smem_bytes(self.q_stages) > SMEM_BYTES:
            raise ValueError(
                f"head_dim {head_dim}, tile_n {tile_n}, {stages} stages and {warp_groups} warp groups need "
                f"{self.smem_bytes(self.q_stages)} bytes of shared memory, a CTA has {SMEM_BYTES}"
            )
        # mbarriers: for Q one a place, for K and V one a stage
        self.q_places = self.q_stages * warp_groups
        self.FULL_Q, self.EMPTY_Q = 0, self.q_places
        first = 2 * self.q_places
        self.FULL_K, self.EMPTY_K, self.FULL_V, self.EMPTY_V, self.num_bars = [first + j * stages for j in range(5)]
        self.first_count = 2 * self.q_stages  # so that those of tiles before are not negative
        self.k_early = warp_groups == 3  # see fwd.await_early

    def smem_bytes(self, q_stages: int) -> int:
        """Q and O, K and V stages, mbarriers, `item` and `again`, alignment."""
        q_places = q_stages * self.warp_groups
        rows = q_places * WG_ROWS + 2 * self.stages * self.tile_n
        bars = 2 * q_places + 4 * self.stages
        words = q_places * self.item_words + 1 + AGAIN_WORDS
        return rows * self.head_dim * 2 + bars * 8 + words * 4 + 1024

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, kv_heads, dim = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), fakes.head_dim()
        q, out = [fakes.packed(self.dtype, rows, heads, dim) for _ in range(2)]
        k, v = [fakes.packed(self.dtype, rows, kv_heads, dim) for _ in range(2)]
        lse, segment_begin = fakes.by_head(Float32, heads, rows), fakes.flat(Int32, rows)
        work, schedule = fakes.table(items.NUM_FIELDS, align=16), fakes.table(2, align=8)
        return q, k, v, out, lse, work, schedule, segment_begin, Float32(0.0), Int32(0), fakes.stream()

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, D)
        out: cute.Tensor,  # (T, H, D)
        lse: cute.Tensor,  # (H, T)
        work: cute.Tensor,  # (n, 8)
        schedule: cute.Tensor,  # (n * head groups, 2)
        segment_begin: cute.Tensor,  # (T)
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ) -> None:
        self.launch(q, k, v, out, lse, work, schedule, (segment_begin,), softmax_scale, num_sms, stream)

    def launch(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        work: cute.Tensor,
        schedule: cute.Tensor,
        tables: tuple[cute.Tensor, ...],  # the rest of Global
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ) -> None:
        q_smem = cute.make_composed_layout(self.q_layout().inner, 0, self.rows_layout())
        q_box = ((self.packed_heads, self.tokens_wg), self.head_dim)
        kv_smem, kv_box = cute.select(self.kv_layout(), mode=[0, 1]), (self.tile_n, self.head_dim)
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_kv = load if const_expr(self.cluster == 1) else cpasync.CopyBulkTensorTileG2SMulticastOp()
        tma_Q, gQ = cpasync.make_tiled_tma_atom(load, self.packed(q), q_smem, q_box)
        tma_O, gO = cpasync.make_tiled_tma_atom(store, self.packed(out), q_smem, q_box)
        tma_K, gK = cpasync.make_tiled_tma_atom(load_kv, self.by_head(k), kv_smem, kv_box, self.cluster)
        tma_V, gV = cpasync.make_tiled_tma_atom(load_kv, self.by_head(v), kv_smem, kv_box, self.cluster)
        pairs_layout = cute.make_layout(
            (q.shape[0], q.shape[1], q.shape[2] // 2), stride=(out.stride[0] // 2, out.stride[1] // 2, 1)
        )
        pairs = cute.make_tensor(cute.recast_ptr(out.iterator, dtype=Int32), pairs_layout)
        num_clusters = cutlass.min(schedule.shape[0], num_sms // self.cluster)
        self.kernel(
            Atoms(tma_Q, tma_K, tma_V, tma_O),
            Global(gQ, gK, gV, gO, q, k, v, pairs, lse, work, schedule, *tables),
            softmax_scale,
            q.shape[1] // self.packed_heads // k.shape[1],
        ).launch(
            grid=[num_clusters * self.cluster, 1, 1],
            block=[128 * (1 + self.warp_groups), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def packed(self, x: cute.Tensor) -> cute.Tensor:
        """(T, H, D) -> ((packed_heads, T), D, head groups)"""
        G, (T, H, D), (sT, sH, sD) = self.packed_heads, x.shape, x.stride
        return cute.make_tensor(x.iterator, cute.make_layout(((G, T), D, H // G), stride=((sH, sT), sD, sH * G)))

    def by_head(self, x: cute.Tensor) -> cute.Tensor:
        """(T, Hk, D) -> (T, D, Hk)"""
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))

    # ---------------------------------------------------------------- layouts and products
    def smem_atom(self) -> cute.ComposedLayout:
        kind = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, self.head_dim)
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def q_layout(self) -> cute.ComposedLayout:
        """(64, D, q_places), of Q and O in shared memory."""
        return cute.tile_to_shape(self.smem_atom(), (WG_ROWS, self.head_dim, self.q_places), (0, 1, 2))

    def kv_layout(self) -> cute.ComposedLayout:
        """(N, D, stages), of K and V in shared memory."""
        return cute.tile_to_shape(self.smem_atom(), (self.tile_n, self.head_dim, self.stages), (0, 1, 2))

    def rows_layout(self) -> cute.Layout:
        """The rows in use of a 64-row tile as the copy engine sees them: chunks of a swizzle's width, rows within."""
        width = cute.size(self.smem_atom(), mode=[1])
        return cute.make_layout((self.rows_wg, (width, self.head_dim // width)), stride=(width, (1, WG_ROWS * width)))

    def mma_qk(self) -> cute.TiledMma:
        """S (64, N) = Q (64, D) K^T"""
        K_major = warpgroup.OperandMajorMode.K
        source = warpgroup.OperandSource.RMEM if self.q_in_registers else warpgroup.OperandSource.SMEM
        shape = (WG_ROWS, self.tile_n)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, K_major, K_major, Float32, (1, 1, 1), shape, source
        )

    def mma_pv(self) -> cute.TiledMma:
        """O (64, D) += P (64, N) V"""
        P_major, V_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        source, shape = warpgroup.OperandSource.RMEM, (WG_ROWS, self.head_dim)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, P_major, V_major, Float32, (1, 1, 1), shape, source
        )

    # ---------------------------------------------------------------- kernel: set-up and roles
    @cute.kernel
    def kernel(self, atoms: Atoms, g: Global, scale: Float32, groups_per_kv: Int32) -> None:
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        q_layout, kv_layout = self.q_layout(), self.kv_layout()
        sQ = allocator.allocate_tensor(self.dtype, q_layout.outer, 1024, q_layout.inner)
        sK = allocator.allocate_tensor(self.dtype, kv_layout.outer, 1024, kv_layout.inner)
        sV = allocator.allocate_tensor(self.dtype, kv_layout.outer, 1024, kv_layout.inner)
        bars = allocator.allocate_array(cutlass.Int64, self.num_bars)
        item = allocator.allocate_tensor(Int32, cute.make_layout((self.item_words, self.q_places)), 8)
        again = allocator.allocate_tensor(Int32, cute.make_layout(1 + AGAIN_WORDS), 8)
        s = Shared(sQ, sK, sV, bars, item, again)
        if warp_idx == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
            self.init_barriers(s.bars)
            for j in cutlass.range(cute.arch.lane_idx(), 1 + AGAIN_WORDS, 32, unroll=1):
                s.again[j] = 0
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            self.load(atoms, g, s, groups_per_kv, warp_idx)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.mma(atoms, g, s, scale, groups_per_kv, warp_idx - 4)

    def mma(self, atoms: Atoms, g: Global, s: Shared, scale: Float32, groups_per_kv: Int32, warp_id: Int32) -> None:
        """What an MMA warp does."""
        raise NotImplementedError

    def tile(self, g: Global, fields: cute.Tensor | list[Int32]) -> Any:
        """A work item of these fields."""
        return Tile.load(fields, self.tile_n)

    # ---------------------------------------------------------------- items, and which are done again
    def share(self, g: Global) -> Int32:
        """How many items the cluster has."""
        first, step = first_and_step(self.cluster)
        return (g.schedule.shape[0] - first + step - 1) // step

    @cute.jit
    def wanted(self, again: cute.Tensor, n: Int32, turn: Int32) -> cutlass.Boolean:
        """Whether the cluster's n-th item is done in a turn."""
        wanted = turn == 0
        if not wanted:
            word, bit = self.again_bit(n)
            wanted = (again[word] & bit) != 0
        return wanted

    @cute.jit
    def note(self, again: cute.Tensor, n: Int32) -> None:
        """A warp notes the cluster's n-th item for the next turn, in every CTA of the cluster."""
        word, bit = self.again_bit(n)
        for rank in cutlass.range_constexpr(self.cluster):
            place = again.iterator
            if const_expr(self.cluster > 1):
                place = cute.arch.map_dsmem_ptr(place, rank)
            with cute.arch.elect_one():
                cute.arch.atomic_max(place, n + 1, sem="relaxed", scope="cluster")
                cute.arch.atomic_or(place + word, bit, sem="relaxed", scope="cluster")

    def again_bit(self, n: Int32) -> tuple[Int32, Int32]:
        """Where `again` has the cluster's n-th item: (word, bit of it)."""
        n = n % (32 * AGAIN_WORDS)
        return 1 + n // 32, Int32(1) << n % 32

    def end_turn(self, s: Shared) -> Int32:
        """One past the last item that the cluster does again, once all its warps are through.

        Nor may a CTA leave while its peers still write into it, so every thread comes here at the end of every turn.
        """
        self.sync_cluster()
        return s.again[0]

    @cute.jit
    def init_barriers(self, bars: cute.Pointer) -> None:
        readers = 4 * self.warp_groups * self.cluster  # warps that release a K or V stage
        kinds = (
            (self.FULL_Q, self.q_places, 1),
            (self.EMPTY_Q, self.q_places, 1),  # the warp that stores O from there
            (self.FULL_K, self.stages, 1),
            (self.EMPTY_K, self.stages, readers),
            (self.FULL_V, self.stages, 1),
            (self.EMPTY_V, self.stages, readers),
        )
        self.init_mbarriers(bars, kinds)

    def ring(self, at: Int32) -> tuple[Int32, Int32]:
        """A key block's place in the ring of stages, counted over two rounds -> (stage, phase)."""
        second = at >= self.stages
        return cutlass.select_(second, at - self.stages, at), cutlass.select_(second, Int32(1), Int32(0))

    def after(self, at: Int32) -> Int32:
        """The next block's place."""
        return cutlass.select_(at == 2 * self.stages - 1, Int32(0), at + 1)

    def q_place(self, count: Int32, wg: Int32) -> tuple[Int32, Int32]:
        """(place, phase) of a warp group's Q of the count-th tile; tiles are counted from `first_count` on.

        The MMA warps let go of a tile's place as they begin the next one. So as they begin a tile, the place for the
        one q_stages - 1 later becomes empty, which makes the phase of EMPTY_Q that of count + 1 - q_stages.
        """
        return count % self.q_stages * self.warp_groups + wg, count // self.q_stages % 2

    def first_token(self, tile: Tile, wg: Int32) -> Int32:
        """Packed row of a warp group's first token."""
        return tile.row + (wg * self.cluster + self.rank()) * self.tokens_wg

    def token(self, tile: Tile, wg: Int32, tile_row: Int32) -> Int32:
        """Packed row of one of a warp group's 64 rows."""
        return self.first_token(tile, wg) + tile_row // self.packed_heads

    def in_use(self, tile: Tile, wg: Int32, tile_row: Int32) -> cutlass.Boolean:
        """Whether one of a warp group's 64 rows is a query's; the others hold anything and are not stored."""
        return (tile_row < self.rows_wg) & (self.token(tile, wg, tile_row) < tile.row_end)

    def last_token(self, tile: Tile, wg: Int32) -> Int32:
        """Its last one's, or the tile's."""
        return cutlass.min(self.first_token(tile, wg) + self.tokens_wg, tile.row_end) - 1

    @cute.jit
    def walk(self, g: Global, tile: Tile, wg: Int32) -> Walk:
        """The blocks of a tile that a warp group walks; one without rows, those of the last row."""
        last = self.last_token(tile, wg)
        first = cutlass.min(self.first_token(tile, wg), last)
        first_begin, last_begin = tile.own_begin, tile.own_begin
        if tile.straddles:
            first_begin, last_begin = g.bounds[first], g.bounds[last]
        return fwd_walk.walk(tile, first, last, first_begin, last_begin)

    def box(self, x: cute.Tensor, head_group: Int32, token: Int32) -> cute.Tensor:
        """The ((packed_heads, tokens_wg), D) box of q or out that starts at `token`."""
        tile = ((self.packed_heads, self.tokens_wg), self.head_dim)
        return cute.local_tile(cute.domain_offset(((0, token), 0), x[None, None, head_group]), tile, ((0, 0), 0))

    def partition(self, atom: cute.CopyAtom, shared: cute.Tensor, box: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        """(shared, global) sides of a copy of one warp group's Q or O; `shared` is its (64, D) tile."""
        in_use = cute.make_tensor(shared.iterator, self.rows_layout())
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(in_use, 0, 2), cute.group_modes(box, 0, 2)
        )

    # ---------------------------------------------------------------- producer warps
    @cute.jit
    def load(self, atoms: Atoms, g: Global, s: Shared, groups_per_kv: Int32, warp_idx: Int32) -> None:
        """Warp 0 loads, the others only take part at the end of a turn."""
        at, count, stop = Int32(0), Int32(self.first_count), self.share(g)
        first, step = first_and_step(self.cluster)
        word = self.look_up(g, first)
        for turn in cutlass.range(2, unroll=1):
            if warp_idx == 0:
                for n in cutlass.range(0, stop, 1, unroll=1):
                    if self.wanted(s.again, n, turn):
                        if turn != 0:
                            word = self.look_up(g, first + n * step)
                        then = cutlass.min(first + (n + 1) * step, g.schedule.shape[0] - 1)
                        at, word = self.load_tile(atoms, g, s, word, then, groups_per_kv, at, count)
                        count += 1
            stop = self.end_turn(s)

    @cute.jit
    def look_up(self, g: Global, item: Int32) -> Int32:
        """An item, a word a lane: its tile's fields, then its head group. Two loads, one after the other."""
        lane, word = cute.arch.lane_idx(), g.schedule[item, 1]
        if lane < self.num_fields:
            word = g.work[g.schedule[item, 0], lane]
        return word

    @cute.jit
    def load_tile(
        self,
        atoms: Atoms,
        g: Global,
        s: Shared,
        word: Int32,
        then: Int32,
        groups_per_kv: Int32,
        at: Int32,
        count: Int32,
    ) -> tuple[Int32, Int32]:
        """Q and key blocks of an item, the first one at place `at`.

        word: of the item, from `look_up`.
        then: number of the item to look up meanwhile.

        Returns the place after the last block, and the word of `then`.
        """
        lane = cute.arch.lane_idx()
        *fields, head_group = [cute.arch.shuffle_sync(word, j) for j in range(self.num_fields + 1)]
        tile, kv_head = self.tile(g, fields), head_group // groups_per_kv
        K = (atoms.K, g.K[None, None, kv_head], s.K, s.bars + self.FULL_K, s.bars + self.EMPTY_K)
        V = (atoms.V, g.V[None, None, kv_head], s.V, s.bars + self.FULL_V, s.bars + self.EMPTY_V)
        previous = tile.key_row(Int32(0))
        self.load_block(*K, previous, at)
        for wg in cutlass.range_constexpr(self.warp_groups):
            place, phase = self.q_place(count, wg)[0], self.q_place(count + 1 - self.q_stages, wg)[1]
            full = s.bars + self.FULL_Q + place
            cute.arch.mbarrier_wait(s.bars + self.EMPTY_Q + place, phase)
            box = self.box(g.Q, head_group, self.first_token(tile, wg))
            tQs, tQg = self.partition(atoms.Q, s.Q[None, None, place], box)
            cute.copy(atoms.Q, tQg, tQs, tma_bar_ptr=full)
            if lane <= self.num_fields:
                s.item[lane, place] = word
            if const_expr(self.walks):
                with cute.arch.elect_one():
                    for j, value in enumerate(self.walk(g, tile, wg)):
                        s.item[self.num_fields + 1 + j, place] = value
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows_wg * self.head_dim * 2)
        word = self.look_up(g, then)
        for i in cutlass.range(1, tile.blocks, 1, unroll=1):  # K runs one block ahead of V, as it is used
            row = tile.key_row(i)
            self.load_block(*K, row, self.after(at))
            self.load_block(*V, previous, at)
            previous = row
            at = self.after(at)
        self.load_block(*V, previous, at)
        return self.after(at), word

    def load_block(
        self,
        atom: cute.CopyAtom,
        x: cute.Tensor,  # (T, D)
        shared: cute.Tensor,  # (N, D, stages)
        full: cute.Pointer,
        empty: cute.Pointer,
        row: Int32,
        at: Int32,
    ) -> None:
        """Rows [row, row + N) of one head -> stage; each CTA of the cluster brings its part to all."""
        stage, phase = self.ring(at)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_n * self.head_dim * 2)
        block = cute.local_tile(cute.domain_offset((row, 0), x), (self.tile_n, self.head_dim), (0, 0))
        ctas = cute.make_layout(self.cluster)
        ts, tg = cpasync.tma_partition(
            atom, self.rank(), ctas, cute.group_modes(shared, 0, 2), cute.group_modes(block, 0, 2)
        )
        multicast = {} if self.cluster == 1 else {"mcast_mask": cutlass.Int16((1 << self.cluster) - 1)}
        cute.copy(atom, tg, ts[None, stage], tma_bar_ptr=full + stage, **multicast)
