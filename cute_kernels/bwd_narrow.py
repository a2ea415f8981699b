"""Attention backward for head dims up to 128: two MMA warp groups; P and dS feed dV and dK from registers.

Transposed products, so that rows are keys (S^T = K Q^T) or columns of the head dim (dQ^T = K^T dS^T). For S, dP, dV and
dK each warp group has 64 of the 128 keys. dQ needs all keys: dS passes through shared memory, and each warp group has
64 columns of the head dim, or (head dim 64) half of the query rows.

dQ leaves through shared memory too, from where a warp beside the loader has the copy engine add it to global memory, in
a fixed order when its turn has come: from registers, additions hold the products up. What is added to is cleared a few
blocks ahead, by whoever comes first, and so is still in L2: to clear it all before would write it to memory and back.
In a fixed order the first one of a block stores its values instead.

The tensor cores and what lies between products take about as long as each other, so warp groups must not wait for one
another. dQ is that of the block before: by then the other warp group's dS has long been there. One mbarrier a block
says both that it is and that the buffer of the one before may be written again.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.accumulator import gemm, part, round_to
from cute_kernels.bwd_contain import BAR_CONTAIN
from cute_kernels.bwd_frame import BackwardFrame, split_rows
from cute_kernels.bwd_stats import stat_keys, stat_product, stat_rows
from cute_kernels.bwd_walk import Walk, first_block, part_rows
from cute_kernels.ptx import (
    bulk_add,
    bulk_store,
    load_acquire,
    load_volatile,
    sleep,
    store_release,
    store_volatile,
)

AHEAD = 8  # blocks between clearing and adding up: some 20 us
CLAIMED, CLEARED = 1, 2  # of a block's dQ, whose lock is 0 before


@dataclass
class State:
    """What a warp group's loop over query blocks works on."""

    mma_S: cute.TiledMma
    mma_dKV: cute.TiledMma
    mma_dQ: cute.TiledMma
    mma_part: cute.TiledMma  # S and dP of a part of a block
    stats: dict[Any, Any]  # what is added to S (0) and dP (1); of a part by that and its first sixteen
    frags: dict[Any, cute.Tensor]  # operands in shared memory; of a part by name and first sixteen
    acc_dK: cute.Tensor
    acc_dV: cute.Tensor
    copy_dS: cute.TiledCopy
    dS_dst: cute.Tensor
    tid: Int32
    dq_dst: cute.Pointer | None  # this thread's place in the dQ that leaves
    scale_log2: Float32
    bars: cute.Pointer
    masks: tuple[Any, ...]
    seen: tuple[Int32, Int32]  # all rows that see keys of this warp group lie from the one to below the other
    sQ: cute.Tensor
    sdO: cute.Tensor
    sStat: cute.Tensor

    def stat(self, name: Any, stage: Int32) -> Any:
        """The product that is added to S or dP of a stage."""
        product, keys, rows = self.stats[name]
        return product, keys, rows[None, None, None, stage]


class NarrowBackward(BackwardFrame):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (64, 96, 128)
    MET: int  # numbers of mbarriers
    STAGED: int
    FREE: int

    def check_tile(self) -> None:
        if self.tile_n != 128 or self.stages != 2 or not self.heads_inside:
            raise ValueError("expected tile_n 128, 2 stages and heads_inside")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 256:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 256")

    @property
    def k_columns(self) -> int:
        return -(-self.head_dim // 128) * 128 if self.head_dim > 64 else 64

    @property
    def buffers(self) -> int:
        return 2  # of dS

    @property
    def part(self) -> int:
        """Sixteens of rows in a part of a block."""
        return part_rows(self.tile_m) // 16

    @property
    def dq_warps(self) -> list[int]:
        """Of each warp group, those that hold columns of dQ."""
        return [4, 4 if split_rows(self.head_dim) else self.head_dim // 16 - 4]

    @property
    def staged_floats(self) -> int:
        return self.tile_m * self.head_dim if self.want_dq else 0

    @property
    def smem_order(self) -> tuple[str, ...]:
        if split_rows(self.head_dim) or not self.staged_floats:  # the former 1 % faster so; the latter have no "own"
            return "small", "K", "V", "Q", "dO", "dS", "own"
        return "K", "Q", "V", "dO", "dS", "small", "own"

    def own_barriers(self) -> list[tuple[str, int, int]]:
        """A block's dS written and the one before used; a warp group's dQ in shared memory; gone from there."""
        return [("MET", 1, 8), ("STAGED", 2, 4), ("FREE", 2, 1)] if self.want_dq else []

    @property
    def dq_rows(self) -> int:
        """Rows of dQ (columns of the product) a warp group."""
        return self.tile_m // 2 if split_rows(self.head_dim) else self.tile_m

    @property
    def dq_chunks(self) -> int:
        """Quads of floats of dQ a thread, for one query block."""
        return self.dq_rows // 8

    @property
    def dq_warp_floats(self) -> int:
        """Floats of dQ a warp, for one query block: [warp][chunk of 8 rows][lane][4]."""
        return 16 * self.dq_rows

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        dtype, shape = self.dtype, (1, 1, 1)
        mma_S = self.product_of_rows(self.tile_m)
        mma_dKV = hopper.make_trivial_tiled_mma(
            dtype, dtype, K_major, MN_major, Float32, shape, (64, self.head_dim), warpgroup.OperandSource.RMEM
        )
        mma_dQ = hopper.make_trivial_tiled_mma(dtype, dtype, MN_major, K_major, Float32, shape, (64, self.dq_rows))
        return mma_S, mma_dKV, mma_dQ

    def product_of_rows(self, rows: int) -> cute.TiledMma:
        """S or dP of so many query rows."""
        K_major = warpgroup.OperandMajorMode.K
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, K_major, K_major, Float32, (1, 1, 1), (64, rows))

    def rows_from(self, s: cute.Tensor, begin: int) -> cute.Tensor:
        """The part of a ring of blocks that begins with the sixteen `begin` of their rows."""
        tiler = tuple(cute.make_layout(n) for n in (16 * self.part, self.head_dim, self.stages))
        return cute.composition(cute.domain_offset((16 * begin, 0, 0), s), tiler)

    def statistics(self, sStat: cute.Tensor, sKeys: cute.Pointer) -> dict[Any, Any]:
        """The products that add rows' statistics, as in `State.stats`."""
        whole = self.tile_m // 16
        stats: dict[Any, Any] = {}
        for begin, end in ((0, whole), (0, self.part), (whole - self.part, whole)):
            product = stat_product(16 * (end - begin))
            rows = stat_rows(product, sStat, 16 * begin, 16 * (end - begin))
            for which in (0, 1):
                name = which if end - begin == whole else (which, begin)
                stats[name] = product, stat_keys(product, sKeys, which), rows
        return stats

    def first_block(self, item: Any) -> Int32:
        """In a fixed order it adds zeros to all blocks of the item, as its turn has to be passed on."""
        if self.deterministic:
            return item.block_begin
        return first_block(item.block_begin, item.block_end, item.key, item.key_end, self.tile_m)

    # ---------------------------------------------------------------- beside the loader
    @cute.jit
    def assist(
        self, warp_idx: Int32, sdS: cute.Tensor, own: Any, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32,
        bars: cute.Pointer, at: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        if const_expr(self.want_dq):
            for wg in cutlass.range_constexpr(2):
                if warp_idx == 1 + wg:
                    self.add_up(wg, own, dq_acc, locks, num_blocks, bars, at, item, heads_per_kv)
            if warp_idx == 3:
                self.clear_ahead(dq_acc, locks, num_blocks, at, item, heads_per_kv)

    @cute.jit
    def add_up(
        self, wg: cutlass.Constexpr, sdQ: cute.Tensor, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32,
        bars: cute.Pointer, at: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        """Add a warp group's part of dQ to global memory, block by block; in a fixed order when its turn has come.

        In a fixed order, the CTAs of a cluster add to the same rows one after the other. The second one's products go
        on until its next dQ is ready, so stages that the first one waits for are released.
        """
        kv_head, mb0, mb1, place = item.kv_head, item.block_begin, item.block_end, item.place
        mb, h, mine = mb1 - 1, kv_head * heads_per_kv, self.first_block(item)
        first, floats = 4 * wg * self.dq_warp_floats, self.dq_warps[wg] * self.dq_warp_floats
        for it in cutlass.range(0, (mb1 - mine) * heads_per_kv, 1, unroll=1):
            dst, src = self.dq_slot(dq_acc.iterator, h, num_blocks, mb) + first, sdQ.iterator + first
            if const_expr(self.deterministic):
                lock = self.lock_of(locks, h, num_blocks, mb, wg)
                turn = item.turn(mb) * self.cluster
                if const_expr(self.cluster == 2):
                    turn = cutlass.select_(self.rank() == 0, turn, place * 2 + 1)
                while load_acquire(lock) != turn:
                    pass
                cute.arch.sync_warp()
                cute.arch.mbarrier_wait(bars + self.STAGED + wg, it & 1)
                with cute.arch.elect_one():
                    if turn == 0:
                        bulk_store(dst, src, 4 * floats)
                    else:
                        bulk_add(dst, src, 4 * floats)
                    self.left(bars + self.FREE + wg)
                    cute.arch.cp_async_bulk_wait_group(0)
                    store_release(lock, place * self.cluster + self.rank() + 1)
            else:
                while load_acquire(self.lock_of(locks, h, num_blocks, mb, 0)) != CLEARED:
                    pass
                cute.arch.sync_warp()
                cute.arch.mbarrier_wait(bars + self.STAGED + wg, it & 1)
                with cute.arch.elect_one():
                    bulk_add(dst, src, 4 * floats)
                    self.left(bars + self.FREE + wg)
                    if const_expr(wg == 0):
                        store_volatile(at, it)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)

    def left(self, free: cute.Pointer) -> None:
        """What this thread has the copy engine read is no longer needed in shared memory."""
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.mbarrier_arrive(free)

    @cute.jit
    def clear_ahead(
        self, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32, at: cute.Pointer, item: Any,
        heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        """Zeros for the dQ of blocks that nobody has claimed yet, AHEAD of the one that this CTA is at."""
        if const_expr(self.deterministic):
            return
        kv_head, mb0, mb1 = item.kv_head, item.block_begin, item.block_end
        mb, h, lane, mine = mb1 - 1, kv_head * heads_per_kv, cute.arch.lane_idx(), self.first_block(item)
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        for it in cutlass.range(0, (mb1 - mine) * heads_per_kv, 1, unroll=1):
            with cute.arch.elect_one():  # one lane, and seldom: shared memory has no clock to spare
                while load_volatile(at) < it - AHEAD:
                    sleep(1000)
            cute.arch.sync_warp()
            lock, state = self.lock_of(locks, h, num_blocks, mb, 0), Int32(0)
            if lane == 0:
                state = load_acquire(lock)
                if state == 0:
                    state = Int32(
                        cute.arch.atomic_cas(lock, cmp=Int32(0), val=Int32(CLAIMED), sem="relaxed", scope="gpu")
                    )
            if cute.arch.shuffle_sync(state, 0) == 0:
                quads = self.tile_m * self.head_dim // 128  # a lane
                block = (self.dq_slot(dq_acc.iterator, h, num_blocks, mb) + lane * 4).align(16)
                dst = cute.make_tensor(block, cute.make_layout((4, quads), stride=(1, 128)))
                for i in cutlass.range(0, quads, 1, unroll=8):
                    cute.autovec_copy(zeros, dst[None, i])
                cute.arch.fence_proxy("async.global")  # the copy engine adds to them
                cute.arch.sync_warp()
                if lane == 0:
                    store_release(lock, CLEARED)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)

    # ---------------------------------------------------------------- MMA warp groups
    @cute.jit
    def mma(
        self,
        mma_S: cute.TiledMma,
        mma_dKV: cute.TiledMma,
        mma_dQ: cute.TiledMma,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq_acc: cute.Tensor,
        slabs: cute.Tensor,
        kept: cute.Pointer,
        visible_end: cute.Tensor,
        num_blocks: Int32,
        scale: Float32,
        heads_per_kv: Int32,
        sK: cute.Tensor,
        sV: cute.Tensor,
        sQ: cute.Tensor,
        sdO: cute.Tensor,
        sdS: cute.Tensor,
        sStat: cute.Tensor,
        sKeys: cute.Pointer,
        bars: cute.Pointer,
        item: Any,
        warp_id: Int32,
        sdQ: cute.Tensor | None,
    ) -> None:
        kv_head, n0, key_end, mb0, mb1 = item.kv_head, item.key, item.key_end, item.block_begin, item.block_end
        clean_begin, clean_end = item.clean_begin, item.clean_end
        D, M, N = self.head_dim, self.tile_m, self.tile_n
        wg, tid, lane = warp_id // 4, cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        sK_D = sK  # K's first D columns
        if const_expr(self.k_columns != D):
            layout = cute.tile_to_shape(self.row_atom(self.k_columns, D), (N, D), (0, 1))
            sK_D = cute.make_tensor(sK.iterator, layout.outer)
        dq_half = (0, 0) if const_expr(split_rows(self.head_dim)) else (wg, 0)
        sdS_rows = cute.local_tile(
            sdS, (self.dq_rows, N), (wg if const_expr(split_rows(self.head_dim)) else 0, 0, None)
        )
        mma_part = self.product_of_rows(16 * self.part)
        thr_S, thr_dKV, thr_dQ, thr_part = (mma.get_slice(0) for mma in (mma_S, mma_dKV, mma_dQ, mma_part))
        frags = {  # (MMA, 1, D/16, stages) and the like
            "K": mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(sK_D, (64, D), (wg, 0)))),
            "V": mma_S.make_fragment_A(thr_S.partition_A(cute.local_tile(sV, (64, D), (wg, 0)))),
            "Q": mma_S.make_fragment_B(thr_S.partition_B(sQ)),
            "dO": mma_S.make_fragment_B(thr_S.partition_B(sdO)),
            **{
                (name, begin): mma_part.make_fragment_B(thr_part.partition_B(self.rows_from(x, begin)))
                for name, x in (("Q", sQ), ("dO", sdO))
                for begin in (0, M // 16 - self.part)
            },
            "Qt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sQ))),
            "dOt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sdO))),
            "Kt": mma_dQ.make_fragment_A(thr_dQ.partition_A(cute.local_tile(self.transposed(sK), (64, N), dq_half))),
            "dS": mma_dQ.make_fragment_B(thr_dQ.partition_B(sdS_rows)),
        }
        acc_dK, acc_dV = [cute.make_rmem_tensor(mma_dKV.partition_shape_C((64, D)), Float32) for _ in range(2)]
        for acc, wanted in ((acc_dK, self.want_dk), (acc_dV, self.want_dv)):
            if const_expr(wanted):
                acc.fill(0.0)
        copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_S)
        dS_dst = copy_dS.get_slice(tid).partition_D(cute.local_tile(self.transposed(sdS), (64, M), (wg, 0, None)))
        key, key_visible = [cute.make_rmem_tensor(2, Int32) for _ in range(2)]
        for r in cutlass.range_constexpr(2):  # this thread's rows of S^T, less its first column
            n = n0 + wg * 64 + warp_id % 4 * 16 + lane // 4 + 8 * r
            key[r] = n - lane % 4 * 2
            key_visible[r] = (visible_end[n] if n < key_end else 0) - lane % 4 * 2

        seen_to = Int32(0)
        for n in (n0 + wg * 64 + lane, n0 + wg * 64 + 32 + lane):
            seen_to = cutlass.max(seen_to, visible_end[n] if n < key_end else 0)
        seen = n0 + wg * 64, cute.arch.warp_redux_sync(seen_to, "max")

        self.await_cluster()
        cute.arch.mbarrier_wait(bars + self.FULL_K, 0)
        if const_expr(self.want_dp):
            cute.arch.mbarrier_wait(bars + self.FULL_V, 0)
            clean_begin = self.clean_keys(sK, sV, clean_begin)

        dq_dst = None
        if const_expr(self.want_dq):
            dq_dst = sdQ.iterator + (warp_id * self.dq_warp_floats + lane * 4)
        state = State(
            mma_S, mma_dKV, mma_dQ, mma_part, self.statistics(sStat, sKeys), frags, acc_dK, acc_dV, copy_dS, dS_dst,
            tid, dq_dst, scale * math.log2(math.e), bars,
            (key, key_visible, clean_begin, clean_end), seen, sQ, sdO, sStat,
        )  # fmt: skip
        self.walk(state, (kv_head, mb0, mb1, self.first_block(item)), heads_per_kv, kept)
        if const_expr(self.want_dk):
            for e in cutlass.range_constexpr(cute.size(acc_dK)):
                acc_dK[e] = acc_dK[e] * scale
        if const_expr(self.want_dq and self.want_dv):
            self.mark_keys(acc_dV, sV, wg * 64 + warp_id % 4 * 16 + lane // 4)
        kv_head, n0, key_end, slab = (load_volatile(kept + j) for j in range(4))
        row = wg * 64 + warp_id % 4 * 16 + lane // 4  # of this CTA's keys
        if slab < 0:
            if const_expr(self.want_dk):
                self.store(acc_dK, dk, kv_head, n0 + row, key_end)
            if const_expr(self.want_dv):
                self.store(acc_dV, dv, kv_head, n0 + row, key_end)
        else:
            first = Int64(slab) * self.slab_floats() + self.rank() * (2 * N * D)
            if const_expr(self.want_dk):
                self.store_slab(acc_dK, slabs.iterator + first, row)
            if const_expr(self.want_dv):
                self.store_slab(acc_dV, slabs.iterator + (first + N * D), row)

    @cute.jit
    def walk(self, state: Any, blocks: Any, heads_per_kv: Int32, kept: cute.Pointer) -> None:
        """The loop over query blocks [mb0, mb1) of a KV head's query heads, from the last one down.

        Several loops: in the first blocks and the last there may be rows, or there may be only rows, that see none of
        this warp group's keys, and then none of the CTA's, from block `mine` down. Half a block of them is left out.
        """
        kv_head, mb0, mb1, mine = blocks
        mb, h, M = mb1 - 1, kv_head * heads_per_kv, self.tile_m
        seen, whole, rest, unseen = ((mb1 - i) * heads_per_kv for i in reversed(Walk.of(mine, mb1, *state.seen, M)))
        for it in cutlass.range(0, seen, 1, unroll=1):
            self.pass_over(state, it, mb)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
        for it in cutlass.range(seen, whole, 1, unroll=1):
            self.block(state, it, mb, 0, self.part)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
        for it in cutlass.range(whole, rest, 1, unroll=1):
            self.block(state, it, mb, 0, M // 16)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
        for it in cutlass.range(rest, unseen, 1, unroll=1):
            self.block(state, it, mb, M // 16 - self.part, M // 16)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
        added, total = (load_volatile(kept + 4 + j) for j in range(2))
        for it in cutlass.range(unseen, added, 1, unroll=1):
            self.pass_over(state, it, mb)
            mb, h = self.next_block(mb, h, mb0, mb1, kv_head, heads_per_kv)
        if const_expr(self.want_dq):
            cute.arch.mbarrier_wait(state.bars + self.MET, added - 1 & 1)
            acc_dQ = self.issue_dq(state, added - 1)
            warpgroup.wait_group(0)
            self.stage_dq(state, acc_dQ, added - 1)
        for it in cutlass.range(added, total, 1, unroll=1):
            self.let_go(state, it)

    def block(self, state: State, it: Int32, mb: Int32, begin: int, end: int) -> None:
        """S, dP, dV and dK of block `it`, whose query rows are block `mb`, and dQ of the one before. Nothing is in
        flight at either end, and few accumulators are at a time: else the compiler makes every product wait.

        begin, end: the sixteens of its rows that may see keys of this warp group.
        """
        s, (stage, phase), chunks, m0 = state, self.ring(it), end - begin, mb * self.tile_m
        whole = 16 * chunks == self.tile_m
        mma, Q, dO = (s.mma_S, "Q", "dO") if whole else (s.mma_part, ("Q", begin), ("dO", begin))
        stats = [s.stat(which if whole else (which, begin), stage) for which in (0, 1)]
        acc_S, acc_dP, dP = [cute.make_rmem_tensor(mma.partition_shape_C((64, 16 * chunks)), Float32) for _ in range(3)]
        cute.arch.mbarrier_wait(s.bars + self.FULL_Q + stage, phase)
        gemm(mma, acc_S, s.frags["K"], s.frags[Q][None, None, None, stage], True, more=stats[:1])
        cute.arch.mbarrier_wait(s.bars + self.FULL_DO + stage, phase)
        if self.want_dp:
            gemm(mma, acc_dP, s.frags["V"], s.frags[dO][None, None, None, stage], True, more=stats[1:])
        warpgroup.wait_group(1 if self.want_dp else 0)
        self.mask(acc_S, m0 + 16 * begin, *s.masks)
        for e in range(8 * chunks):
            acc_S[e] = cute.math.exp2(acc_S[e] * s.scale_log2, fastmath=True)
        # The compiler moves arithmetic that should run beside dP^T behind the wait for it, but not past a branch.
        cute.arch.mbarrier_wait(s.bars + self.FULL_K, 0)  # open since the start
        warpgroup.wait_group(0)
        if self.want_dp:
            for e in range(8 * chunks):
                dP[e] = acc_dP[e]
        self.contain(s, dP, stage, m0, begin)
        tP, tdS = [cute.make_rmem_tensor(s.mma_dKV.partition_shape_A((64, 16 * chunks)), self.dtype) for _ in range(2)]
        round_to(acc_S, tP)
        if self.want_dp:
            for e in range(8 * chunks):
                acc_dP[e] = acc_S[e] * dP[e]
            round_to(acc_dP, tdS)
        if self.want_dq:
            self.publish(s, tdS, it, begin)
        else:  # nor dS behind the issue of dV, for which there are not the registers
            cute.arch.mbarrier_wait(s.bars + self.FULL_K, 0)
        if self.want_dv:
            gemm(s.mma_dKV, s.acc_dV, tP, s.frags["dOt"][None, None, None, stage], False, begin)
        if self.want_dq:
            acc_dQ = self.issue_dq(s, it + 1)  # of the block before; of the first block whatever is in the buffer
            warpgroup.wait_group(1)  # dV
            self.release(s.bars + self.EMPTY_DO + stage)
        if self.want_dk:
            gemm(s.mma_dKV, s.acc_dK, tdS, s.frags["Qt"][None, None, None, stage], False, begin)
        warpgroup.wait_group(1 if self.want_dk else 0)  # dQ, or dV where there is none
        if self.want_dq:
            self.leave(s, acc_dQ, it)
        else:
            self.release(s.bars + self.EMPTY_DO + stage)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_Q + stage)

    def let_go(self, state: State, it: Int32) -> None:
        """A block that came because the other CTA of the cluster needs it."""
        stage, phase = self.ring(it)
        for full, empty in ((self.FULL_Q, self.EMPTY_Q), (self.FULL_DO, self.EMPTY_DO)):
            cute.arch.mbarrier_wait(state.bars + full + stage, phase)
            self.release(state.bars + empty + stage)

    def pass_over(self, state: State, it: Int32, mb: Int32) -> None:
        """A block whose rows see none of this warp group's keys: only dQ of the one before is to be made."""
        s, (stage, phase) = state, self.ring(it)
        cute.arch.mbarrier_wait(s.bars + self.FULL_Q + stage, phase)  # a stage may be released once it is full
        cute.arch.mbarrier_wait(s.bars + self.FULL_DO + stage, phase)
        self.contain_unseen(s, stage, mb * self.tile_m)
        if self.want_dq:
            self.publish(s, None, it)
            acc_dQ = self.issue_dq(s, it + 1)
            warpgroup.wait_group(0)
            self.leave(s, acc_dQ, it)
        self.release(s.bars + self.EMPTY_DO + stage)
        self.release(s.bars + self.EMPTY_Q + stage)

    # ---------------------------------------------------------------- what a block is made of
    @cute.jit
    def contain(self, state: Any, dP: cute.Tensor, stage: Int32, m0: Int32, begin: cutlass.Constexpr) -> None:
        """What is not finite in rows of Q and dO stays with the keys that see them. All MMA warps agree on it.

        dP: of rows from the sixteen `begin` on.
        """
        s, (key, key_visible, clean_begin, clean_end) = state, state.masks
        if self.any_broken(s.sStat, stage, m0, clean_begin, clean_end):
            if const_expr(self.want_dv):
                self.add_not_finite(s.acc_dV, s.sdO[None, None, stage], s.sStat, stage, m0, key, key_visible)
            if const_expr(self.want_dp):
                self.settle(dP, m0 + 16 * begin, key, key_visible)
            self.clean_rows(s, stage)

    @cute.jit
    def contain_unseen(self, state: Any, stage: Int32, m0: Int32) -> None:
        """As `contain`, where no row sees this warp group's keys."""
        _, _, clean_begin, clean_end = state.masks
        if self.any_broken(state.sStat, stage, m0, clean_begin, clean_end):
            self.clean_rows(state, stage)

    @cute.jit
    def clean_rows(self, state: Any, stage: Int32) -> None:
        """Q and dO of a block without what is not finite, by all MMA warps once they have seen it."""
        tid, threads = cute.arch.thread_idx()[0] - 128, 128 * self.warp_groups
        cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)
        self.clean(state.sQ[None, None, stage], tid, threads)
        self.clean(state.sdO[None, None, stage], tid, threads)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=BAR_CONTAIN, number_of_threads=threads)

    # ---------------------------------------------------------------- dQ
    def publish(self, state: State, tdS: cute.Tensor | None, it: Int32, begin: int = 0) -> None:
        """dS^T of block `it` to shared memory, once both warp groups are done with that of `it` - 2 there.

        tdS: of rows from the sixteen `begin` on, None for no rows; of the others it is 0.
        """
        cute.arch.mbarrier_wait(state.bars + self.MET, it & 1 ^ 1)
        source = cute.make_rmem_tensor(state.mma_S.partition_shape_C((64, self.tile_m)), self.dtype)
        first, size = 8 * begin, cute.size(tdS) if tdS is not None else 0
        for e in range(cute.size(source)):
            source[e] = tdS[e - first] if 0 <= e - first < size else self.dtype(0.0)
        dst = state.dS_dst[None, None, None, it % self.buffers]
        cute.copy(state.copy_dS, state.copy_dS.get_slice(state.tid).retile(source), dst)
        cute.arch.fence_view_async_shared()

    def issue_dq(self, state: State, it: Int32) -> cute.Tensor:
        """Issue dQ^T of the block whose dS is in the buffer of block `it`."""
        acc_dQ = cute.make_rmem_tensor(state.mma_dQ.partition_shape_C((64, self.dq_rows)), Float32)
        dS = state.frags["dS"][None, None, None, it % self.buffers]
        gemm(state.mma_dQ, acc_dQ, state.frags["Kt"], dS, True)
        return acc_dQ

    @cute.jit
    def leave(self, state: Any, acc_dQ: cute.Tensor, it: Int32) -> None:
        """dQ^T of block `it` - 1 is ready: its dS is used, and that of `it` is written."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(state.bars + self.MET)
        if it > 0:
            self.stage_dq(state, acc_dQ, it - 1)

    @cute.jit
    def stage_dq(self, state: Any, acc_dQ: cute.Tensor, it: Int32) -> None:
        """dQ^T of block `it`, which is ready, to shared memory for `add_up`."""
        warp_id = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 4
        cute.arch.mbarrier_wait(state.bars + self.FREE + warp_id // 4, it & 1 ^ 1)
        if warp_id < sum(self.dq_warps):
            place = state.dq_dst
            for c in cutlass.range_constexpr(self.dq_chunks):
                quad = cute.make_tensor((place + 128 * c).align(16), cute.make_layout(4))
                cute.autovec_copy(part(acc_dQ, 4 * c, 4), quad)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(state.bars + self.STAGED + warp_id // 4)
