"""Attention forward on Hopper over packed groups: one launch for a whole micro-batch.

A cluster takes tiles: consecutive packed rows of one group with all `packed_heads` query heads of one KV head, 64 rows
(tokens x heads) a warp group. All its CTAs walk the same key blocks (work.py), so each loads a part of every block and
multicasts it. Softmax does not care about order: blocks that need the mask come first, then the unmasked loop.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.utils import LayoutEnum, SmemAllocator

from cute_kernels import items
from cute_kernels.accumulator import column, gemm, round_to, row_elements
from cute_kernels.mask import mask
from cute_kernels.softmax import FIRST_MAX, normalize, online_softmax, rescale
from cute_kernels.work import Schedule, Tile

SMEM_BYTES = 227 * 1024  # a CTA's shared memory
WG_ROWS = 64  # query rows of a warp group
BAR_WG = 1  # named barriers, one a warp group (0 is __syncthreads)


class ForwardKernel:
    """out = softmax(scale Q K^T, masked) V and its log-sum-exp; query q sees key k iff k <= q < visible_end[k].

    Compiled once for a dtype, a native head dim and a number of packed heads; at run time any T, H, Hk, group count,
    strides, and any head dim D <= head_dim that is a multiple of 8 (the copy engine reads columns past D as zeros and
    drops them on the way out).

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        q: [T, H, D] fp16 or bf16. H a multiple of Hk * packed_heads. T >= 1.
        k, v: [T, Hk, D], dtype of q.
        out: [T, H, D], dtype of q. Every element is written.
        lse: [H, T] fp32, natural log, contiguous along T. Every element is written.
        work: [n, 8] int32, the tiles of `dualkv.plan` for this kernel's tile, longest first (fields: items.py).
        segment_begin: [T] int32, the packed row where each row's segment begins.
        softmax_scale: fp32, above 0.
        num_sms: int32, multiprocessors of the device: CTAs launched at most.
        stream: taken from the environment (torch's current stream), not passed.
    q, k, v and out: last dimension contiguous, base address and all strides multiples of 16 bytes (8 elements).

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim, a multiple of 32 up to 256.
        packed_heads: query heads of one KV head in a tile, 1 to 16.
        tile_n, warp_groups, stages, q_in_registers, cluster: see codegen.tiles.ForwardTile.

    Raises:
        ValueError: a configuration that does not fit, in one sentence.
    """

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
        self.tokens_wg = WG_ROWS // packed_heads
        self.rows_wg = self.tokens_wg * packed_heads  # rows in use; the rest computes and is dropped
        self.regs_load, self.regs_mma = {1: (56, 256), 2: (24, 240), 3: (32, 160)}[warp_groups]
        # mbarriers: for Q one a warp group, for K and V one a stage
        self.FULL_Q, self.EMPTY_Q = 0, warp_groups
        first = 2 * warp_groups
        self.FULL_K, self.EMPTY_K, self.FULL_V, self.EMPTY_V, self.num_bars = [first + j * stages for j in range(5)]
        if self.smem_bytes() > SMEM_BYTES:
            raise ValueError(
                f"head_dim {head_dim}, tile_n {tile_n}, {stages} stages and {warp_groups} warp groups need "
                f"{self.smem_bytes()} bytes of shared memory, a CTA has {SMEM_BYTES}"
            )

    def smem_bytes(self) -> int:
        """Q (and O, unless it takes Q's place), K and V stages, mbarriers, alignment."""
        q_tiles = 2 if self.q_in_registers else 1
        rows = q_tiles * self.warp_groups * WG_ROWS + 2 * self.stages * self.tile_n
        return rows * self.head_dim * 2 + self.num_bars * 8 + 1024

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, kv_heads, dim = [cute.sym_int32() for _ in range(3)] + [cute.sym_int32(divisibility=8)]

        def packed(num_heads: cute.SymInt) -> cute.Tensor:
            strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
            return make_fake_tensor(self.dtype, (rows, num_heads, dim), strides, assumed_align=16)

        lse = make_fake_tensor(Float32, (heads, rows), (cute.sym_int64(), 1), assumed_align=4)
        work = make_fake_tensor(Int32, (cute.sym_int32(), items.NUM_FIELDS), (items.NUM_FIELDS, 1), assumed_align=16)
        segment_begin = make_fake_tensor(Int32, (rows,), (1,), assumed_align=4)
        q, k, v, out = packed(heads), packed(kv_heads), packed(kv_heads), packed(heads)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return q, k, v, out, lse, work, segment_begin, Float32(0.0), Int32(0), stream

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
        segment_begin: cute.Tensor,  # (T)
        softmax_scale: Float32,
        num_sms: Int32,
        stream: cuda.CUstream,
    ) -> None:
        dtype, D, N = self.dtype, self.head_dim, self.tile_n
        swizzle = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, dtype, D)
        atom = warpgroup.make_smem_layout_atom(swizzle, dtype)
        sQ_layout = cute.tile_to_shape(atom, (WG_ROWS, D, self.warp_groups), (0, 1, 2))  # O the same
        sK_layout = cute.tile_to_shape(atom, (N, D, self.stages), (0, 1, 2))  # V the same
        # The rows in use of a 64-row tile, as the copy engine sees them: chunks of a swizzle's width, rows within.
        width = cute.size(atom, mode=[1])
        rows_layout = cute.make_layout((self.rows_wg, (width, D // width)), stride=(width, (1, WG_ROWS * width)))
        q_box = ((self.packed_heads, self.tokens_wg), D)
        q_smem = cute.make_composed_layout(sQ_layout.inner, 0, rows_layout)
        kv_smem = cute.select(sK_layout, mode=[0, 1])

        q_source = warpgroup.OperandSource.RMEM if const_expr(self.q_in_registers) else warpgroup.OperandSource.SMEM
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        mma_qk = hopper.make_trivial_tiled_mma(
            dtype, dtype, K_major, K_major, Float32, (1, 1, 1), (WG_ROWS, N), q_source
        )
        mma_pv = hopper.make_trivial_tiled_mma(
            dtype, dtype, K_major, MN_major, Float32, (1, 1, 1), (WG_ROWS, D), warpgroup.OperandSource.RMEM
        )
        load, store = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        load_kv = load if const_expr(self.cluster == 1) else cpasync.CopyBulkTensorTileG2SMulticastOp()
        tma_Q, gQ = cpasync.make_tiled_tma_atom(load, self.packed(q), q_smem, q_box)
        tma_O, gO = cpasync.make_tiled_tma_atom(store, self.packed(out), q_smem, q_box)
        tma_K, gK = cpasync.make_tiled_tma_atom(load_kv, self.by_head(k), kv_smem, (N, D), self.cluster)
        tma_V, gV = cpasync.make_tiled_tma_atom(load_kv, self.by_head(v), kv_smem, (N, D), self.cluster)
        pairs = cute.make_tensor(  # out as 32-bit pairs of elements, for tiles that end within a box
            cute.recast_ptr(out.iterator, dtype=Int32),
            cute.make_layout(out.shape, stride=(out.stride[0] // 2, out.stride[1] // 2, 1)),
        )

        num_head_groups = q.shape[1] // self.packed_heads
        groups_per_kv = num_head_groups // k.shape[1]
        num_clusters = cutlass.min(work.shape[0] * num_head_groups, num_sms // self.cluster)
        self.kernel(
            tma_Q,
            gQ,
            tma_K,
            gK,
            tma_V,
            gV,
            tma_O,
            gO,
            pairs,
            lse,
            work,
            segment_begin,
            softmax_scale,
            num_head_groups,
            groups_per_kv,
            sQ_layout,
            rows_layout,
            sK_layout,
            mma_qk,
            mma_pv,
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

    # ---------------------------------------------------------------- kernel: set-up and roles
    @cute.kernel
    def kernel(
        self,
        tma_Q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_K: cute.CopyAtom,
        gK: cute.Tensor,
        tma_V: cute.CopyAtom,
        gV: cute.Tensor,
        tma_O: cute.CopyAtom,
        gO: cute.Tensor,
        pairs: cute.Tensor,
        lse: cute.Tensor,
        work: cute.Tensor,
        segment_begin: cute.Tensor,
        scale: Float32,
        num_head_groups: Int32,
        groups_per_kv: Int32,
        sQ_layout: cute.ComposedLayout,
        rows_layout: cute.Layout,
        sK_layout: cute.ComposedLayout,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
    ) -> None:
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sQ = smem.allocate_tensor(self.dtype, sQ_layout.outer, 1024, sQ_layout.inner)  # (64, D, warp groups)
        sK = smem.allocate_tensor(self.dtype, sK_layout.outer, 1024, sK_layout.inner)  # (N, D, stages)
        sV = smem.allocate_tensor(self.dtype, sK_layout.outer, 1024, sK_layout.inner)  # (N, D, stages)
        sO = sQ  # O takes Q's place unless Q leaves it early
        if const_expr(self.q_in_registers):
            sO = smem.allocate_tensor(self.dtype, sQ_layout.outer, 1024, sQ_layout.inner)
        bars = smem.allocate_array(cutlass.Int64, self.num_bars)
        if warp_idx == 0:
            for atom in (tma_Q, tma_K, tma_V, tma_O):
                cpasync.prefetch_descriptor(atom)
            self.init_barriers(bars)
        cute.arch.mbarrier_init_fence()
        self.sync_cluster()
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            if warp_idx == 0:
                self.load(
                    tma_Q, gQ, tma_K, gK, tma_V, gV, work, num_head_groups, groups_per_kv, sQ, rows_layout, sK, sV, bars
                )
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.mma(
                mma_qk,
                mma_pv,
                tma_O,
                gO,
                pairs,
                lse,
                work,
                segment_begin,
                scale,
                num_head_groups,
                sQ,
                rows_layout,
                sK,
                sV,
                sO,
                bars,
                warp_idx - 4,
            )
        if const_expr(self.cluster > 1):
            self.sync_cluster()  # no CTA leaves while its peers may still write into it

    def sync_cluster(self) -> None:
        if self.cluster == 1:
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def init_barriers(self, bars: cute.Pointer) -> None:
        readers = 4 * self.warp_groups * self.cluster  # warps that release a K or V stage
        q_readers = 4 if self.q_in_registers else 1  # its warps, or the one that stores O from there
        with cute.arch.elect_one():
            for first, count, arrivals in (
                (self.FULL_Q, self.warp_groups, 1),
                (self.EMPTY_Q, self.warp_groups, q_readers),
                (self.FULL_K, self.stages, 1),
                (self.EMPTY_K, self.stages, readers),
                (self.FULL_V, self.stages, 1),
                (self.EMPTY_V, self.stages, readers),
            ):
                for j in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(bars + first + j, arrivals)

    def rank(self) -> Int32:
        return Int32(0) if self.cluster == 1 else cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())

    def tile_and_heads(self, item: Int32, work: cute.Tensor, num_head_groups: Int32) -> tuple[Int32, Int32]:
        """The item's tile and head group: all heads of a tile follow one another, so the longest come first."""
        return item // num_head_groups, item % num_head_groups

    def ring(self, it: Int32) -> tuple[Int32, Int32]:
        """Block counter -> (stage, phase)."""
        return it % self.stages, (it // self.stages) & 1

    def first_token(self, tile: Tile, wg: Int32) -> Int32:
        """Packed row of a warp group's first token."""
        return tile.row + (self.rank() * self.warp_groups + wg) * self.tokens_wg

    def box(self, g: cute.Tensor, head_group: Int32, token: Int32) -> cute.Tensor:
        """The ((packed_heads, tokens_wg), D) box of q or out that starts at `token`."""
        tile = ((self.packed_heads, self.tokens_wg), self.head_dim)
        return cute.local_tile(cute.domain_offset(((0, token), 0), g[None, None, head_group]), tile, ((0, 0), 0))

    def rows_in_use(self, s: cute.Tensor, rows_layout: cute.Layout, wg: Int32) -> cute.Tensor:
        """A warp group's tile of sQ or sO as the copy engine sees it."""
        return cute.make_tensor(s[None, None, wg].iterator, rows_layout)

    # ---------------------------------------------------------------- producer warp
    @cute.jit
    def load(
        self,
        tma_Q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_K: cute.CopyAtom,
        gK: cute.Tensor,
        tma_V: cute.CopyAtom,
        gV: cute.Tensor,
        work: cute.Tensor,
        num_head_groups: Int32,
        groups_per_kv: Int32,
        sQ: cute.Tensor,
        rows_layout: cute.Layout,
        sK: cute.Tensor,
        sV: cute.Tensor,
        bars: cute.Pointer,
    ) -> None:
        schedule = Schedule.make(work.shape[0] * num_head_groups, self.cluster)
        bars_K, bars_V = (bars + self.FULL_K, bars + self.EMPTY_K), (bars + self.FULL_V, bars + self.EMPTY_V)
        it, q_phase = Int32(0), Int32(1)  # it: key blocks sent so far
        for r in cutlass.range(0, schedule.rounds(), 1, unroll=1):
            index, head_group = self.tile_and_heads(schedule.item(r), work, num_head_groups)
            tile = Tile.load(work, index, self.tile_n)
            kv_head = head_group // groups_per_kv
            gK_head, gV_head = gK[None, None, kv_head], gV[None, None, kv_head]
            previous = tile.key_row(Int32(0))
            self.load_block(tma_K, gK_head, sK, previous, it, *bars_K)
            for wg in cutlass.range_constexpr(self.warp_groups):
                full = bars + self.FULL_Q + wg
                cute.arch.mbarrier_wait(bars + self.EMPTY_Q + wg, q_phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, self.rows_wg * self.head_dim * 2)
                s, g = cpasync.tma_partition(
                    tma_Q,
                    0,
                    cute.make_layout(1),
                    cute.group_modes(self.rows_in_use(sQ, rows_layout, wg), 0, 2),
                    cute.group_modes(self.box(gQ, head_group, self.first_token(tile, wg)), 0, 2),
                )
                cute.copy(tma_Q, g, s, tma_bar_ptr=full)
            q_phase ^= 1
            for i in cutlass.range(1, tile.blocks, 1, unroll=1):  # K runs one block ahead of V, as it is used
                row = tile.key_row(i)
                self.load_block(tma_K, gK_head, sK, row, it + 1, *bars_K)
                self.load_block(tma_V, gV_head, sV, previous, it, *bars_V)
                previous = row
                it += 1
            self.load_block(tma_V, gV_head, sV, previous, it, *bars_V)
            it += 1

    def load_block(
        self,
        tma: cute.CopyAtom,
        g: cute.Tensor,
        s: cute.Tensor,
        row: Int32,
        it: Int32,
        full: cute.Pointer,
        empty: cute.Pointer,
    ) -> None:
        """Rows [row, row + N) of one head -> stage; each CTA of the cluster brings its part to all."""
        stage, phase = self.ring(it)
        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.tile_n * self.head_dim * 2)
        block = cute.local_tile(cute.domain_offset((row, 0), g), (self.tile_n, self.head_dim), (0, 0))
        ts, tg = cpasync.tma_partition(
            tma, self.rank(), cute.make_layout(self.cluster), cute.group_modes(s, 0, 2), cute.group_modes(block, 0, 2)
        )
        multicast = {} if self.cluster == 1 else {"mcast_mask": cutlass.Int16((1 << self.cluster) - 1)}
        cute.copy(tma, tg, ts[None, stage], tma_bar_ptr=full + stage, **multicast)

    # ---------------------------------------------------------------- MMA warp groups
    @cute.jit
    def mma(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        tma_O: cute.CopyAtom,
        gO: cute.Tensor,
        pairs: cute.Tensor,
        lse: cute.Tensor,
        work: cute.Tensor,
        segment_begin: cute.Tensor,
        scale: Float32,
        num_head_groups: Int32,
        sQ: cute.Tensor,
        rows_layout: cute.Layout,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sO: cute.Tensor,
        bars: cute.Pointer,
        warp_id: Int32,
    ) -> None:
        dtype, D, N = self.dtype, self.head_dim, self.tile_n
        wg = warp_id // 4
        lane, tid = cute.arch.lane_idx(), cute.arch.thread_idx()[0] % 128
        scale_log2 = scale * math.log2(math.e)
        sVt = cute.make_tensor(sV.iterator, cute.select(sV.layout, mode=[1, 0, 2]))  # (D, N, stages)
        thr_qk, thr_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        tSrK = mma_qk.make_fragment_B(thr_qk.partition_B(sK))  # (MMA, 1, D/16, stages)
        tOrV = mma_pv.make_fragment_B(thr_pv.partition_B(sVt))  # (MMA, 1, N/16, stages)
        tSrQ = (
            mma_qk.make_fragment_A(thr_qk.partition_A(sQ))[None, None, None, wg]
            if const_expr(not self.q_in_registers)
            else cute.make_rmem_tensor(mma_qk.partition_shape_A((WG_ROWS, D)), dtype)
        )  # D/4 registers
        tOrP = cute.make_rmem_tensor(mma_pv.partition_shape_A((WG_ROWS, N)), dtype)  # N/4 registers
        acc_O = cute.make_rmem_tensor(mma_pv.partition_shape_C((WG_ROWS, D)), Float32)  # D/2 registers
        row_max, row_sum, o_scale = [cute.make_rmem_tensor(2, Float32) for _ in range(3)]
        q_row, begin = [cute.make_rmem_tensor(2, Int32) for _ in range(2)]
        tile_row = warp_id % 4 * 16 + lane // 4  # of this warp group's 64: this thread has tile_row and tile_row + 8
        copy_Q = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype), mma_qk)
        copy_O = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype), mma_pv)
        thr_Q, thr_O = copy_Q.get_slice(tid), copy_O.get_slice(tid)
        schedule = Schedule.make(work.shape[0] * num_head_groups, self.cluster)
        it, q_phase = Int32(0), Int32(0)
        for r in cutlass.range(0, schedule.rounds(), 1, unroll=1):
            index, head_group = self.tile_and_heads(schedule.item(r), work, num_head_groups)
            tile = Tile.load(work, index, N)
            token = self.first_token(tile, wg)
            for j in cutlass.range_constexpr(2):
                q_row[j] = token + (tile_row + 8 * j) // self.packed_heads
                begin[j] = segment_begin[cutlass.min(q_row[j], tile.row_end - 1)]
            for x, initial in ((acc_O, 0.0), (row_max, FIRST_MAX), (row_sum, 0.0)):
                x.fill(initial)

            # first block: S = Q K^T, softmax
            cute.arch.mbarrier_wait(bars + self.FULL_Q + wg, q_phase)
            q_phase ^= 1
            if const_expr(self.q_in_registers):
                cute.copy(copy_Q, thr_Q.partition_S(sQ[None, None, wg]), thr_Q.retile(tSrQ))
            stage, phase = self.ring(it)
            acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((WG_ROWS, N)), Float32)  # N/2 registers
            cute.arch.mbarrier_wait(bars + self.FULL_K + stage, phase)
            gemm(mma_qk, acc_S, tSrQ, tSrK[None, None, None, stage], True)
            warpgroup.wait_group(0)
            self.release(bars + self.EMPTY_K + stage)
            if const_expr(self.q_in_registers):
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + self.EMPTY_Q + wg)  # the next tile's Q may come
            mask(acc_S, q_row, begin, *tile.mask_arguments(Int32(0)))
            online_softmax(acc_S, row_max, row_sum, o_scale, scale_log2)
            round_to(acc_S, tOrP)

            for i in cutlass.range(1, tile.masked, 1, unroll=1):
                masking = (q_row, begin, *tile.mask_arguments(i))
                self.mma_one_block(
                    mma_qk,
                    mma_pv,
                    tSrQ,
                    tSrK,
                    tOrP,
                    tOrV,
                    acc_O,
                    row_max,
                    row_sum,
                    o_scale,
                    scale_log2,
                    bars,
                    it,
                    masking,
                )
                it += 1
            for _ in cutlass.range(tile.masked, tile.blocks, 1, unroll=1):
                self.mma_one_block(
                    mma_qk, mma_pv, tSrQ, tSrK, tOrP, tOrV, acc_O, row_max, row_sum, o_scale, scale_log2, bars, it, None
                )
                it += 1

            # last block: O += P V
            stage, phase = self.ring(it)
            cute.arch.mbarrier_wait(bars + self.FULL_V + stage, phase)
            gemm(mma_pv, acc_O, tOrP, tOrV[None, None, None, stage], False)
            warpgroup.wait_group(0)
            self.release(bars + self.EMPTY_V + stage)
            it += 1
            row_lse = o_scale
            normalize(acc_O, row_max, row_sum, row_lse, scale)
            for j in cutlass.range_constexpr(2):
                in_use = tile_row + 8 * j < self.rows_wg
                if in_use and lane % 4 == 0 and q_row[j] < tile.row_end:
                    lse[head_group * self.packed_heads + (tile_row + 8 * j) % self.packed_heads, q_row[j]] = row_lse[j]
            self.store(
                acc_O,
                tma_O,
                self.box(gO, head_group, token),
                self.rows_in_use(sO, rows_layout, wg),
                sO[None, None, wg],
                copy_O,
                thr_O,
                pairs,
                head_group,
                q_row,
                tile_row,
                tile.row_end,
                token + self.tokens_wg <= tile.row_end,
                bars,
                warp_id,
            )
        cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory lives until the copy engine has read it

    @cute.jit
    def release(self, bar: cute.Pointer) -> None:
        """This warp is done with a stage: tell the producer of every CTA that writes into it."""
        if const_expr(self.cluster == 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bar)
        else:
            if cute.arch.lane_idx() < self.cluster:
                cute.arch.mbarrier_arrive(bar, cute.arch.lane_idx())

    @cute.jit
    def mma_one_block(
        self,
        mma_qk: cute.TiledMma,
        mma_pv: cute.TiledMma,
        tSrQ: cute.Tensor,
        tSrK: cute.Tensor,
        tOrP: cute.Tensor,
        tOrV: cute.Tensor,
        acc_O: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        o_scale: cute.Tensor,
        scale_log2: Float32,
        bars: cute.Pointer,
        it: Int32,
        masking,
    ) -> None:
        """Both products in flight (S of this block, O += P V of the last one), then the softmax of S."""
        (v_stage, v_phase), (k_stage, k_phase) = self.ring(it), self.ring(it + 1)
        acc_S = cute.make_rmem_tensor(mma_qk.partition_shape_C((WG_ROWS, self.tile_n)), Float32)
        cute.arch.mbarrier_wait(bars + self.FULL_K + k_stage, k_phase)
        gemm(mma_qk, acc_S, tSrQ, tSrK[None, None, None, k_stage], True)
        cute.arch.mbarrier_wait(bars + self.FULL_V + v_stage, v_phase)
        gemm(mma_pv, acc_O, tOrP, tOrV[None, None, None, v_stage], False)
        warpgroup.wait_group(1)
        self.release(bars + self.EMPTY_K + k_stage)
        if const_expr(masking is not None):
            mask(acc_S, *masking)
        online_softmax(acc_S, row_max, row_sum, o_scale, scale_log2)
        warpgroup.wait_group(0)
        self.release(bars + self.EMPTY_V + v_stage)
        round_to(acc_S, tOrP)
        rescale(acc_O, o_scale)

    @cute.jit
    def store(
        self,
        acc_O: cute.Tensor,
        tma_O: cute.CopyAtom,
        gO: cute.Tensor,
        sO_rows: cute.Tensor,
        sO: cute.Tensor,
        copy_O: cute.TiledCopy,
        thr_O: cute.ThrCopy,
        pairs: cute.Tensor,
        head_group: Int32,
        q_row: cute.Tensor,
        tile_row: Int32,
        row_end: Int32,
        whole: cutlass.Boolean,
        bars: cute.Pointer,
        warp_id: Int32,
    ) -> None:
        """O to `out`: a whole box by the copy engine; where the tile ends within it, rows below row_end by hand."""
        wg = warp_id // 4
        tOrO = cute.make_rmem_tensor(acc_O.shape, self.dtype)
        round_to(acc_O, tOrO)
        if const_expr(self.q_in_registers):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # the previous tile's O has left sO
        cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)  # ... or all warps are done with Q
        if whole:
            cute.copy(copy_O, thr_O.retile(tOrO), thr_O.partition_D(sO))
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)
            if warp_id % 4 == 0:
                s, g = cpasync.tma_partition(
                    tma_O, 0, cute.make_layout(1), cute.group_modes(sO_rows, 0, 2), cute.group_modes(gO, 0, 2)
                )
                cute.copy(tma_O, s, g)  # columns past D are dropped
                cute.arch.cp_async_bulk_commit_group()
        else:
            values = cute.recast_tensor(tOrO, Int32)
            first = cute.arch.lane_idx() % 4
            for j in cutlass.range_constexpr(2):
                head = head_group * self.packed_heads + (tile_row + 8 * j) % self.packed_heads
                if tile_row + 8 * j < self.rows_wg and q_row[j] < row_end:
                    for e in row_elements(acc_O, j)[::2]:
                        if first + column(e) // 2 < pairs.shape[2] // 2:
                            pairs[q_row[j], head, first + column(e) // 2] = values[e // 2]
        if const_expr(not self.q_in_registers):
            if warp_id % 4 == 0:  # noqa: SIM102 (the outer one is decided when compiled)
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + self.EMPTY_Q + wg)  # the next tile's Q may come
