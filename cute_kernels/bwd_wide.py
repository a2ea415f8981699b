"""Attention backward for head dims 192 and 256: two MMA warp groups with different work, and clusters that share dQ.

One warp group makes S, P and dV of the CTA's 64 keys, the other dP, dS and dK; P and dS feed dV and dK from registers.
Neither waits for a product of the other's, and the tensor cores always have one of them to work for.

dQ of 64 keys at a time would be too much to add up in global memory. So the CTAs of a cluster hand each other dS, and
each makes one half of dQ over the keys of both, which halves what is added. Each warp group has a tile of 64 columns.
Head dim 192 has three: the middle one is the second warp group's, for one half of the query rows in either CTA. That
warp group's other work takes longer.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup

from cute_kernels.accumulator import gemm, part, round_to
from cute_kernels.bwd_contain import BAR_CONTAIN
from cute_kernels.bwd_frame import BackwardFrame
from cute_kernels.bwd_stats import stat_keys, stat_product, stat_rows
from cute_kernels.cluster import SMEM_BYTES
from cute_kernels.ptx import copy_to_peer, load_acquire, load_volatile, store_release


@dataclass
class State:
    """What a warp group's loop over query blocks works on."""

    mma_S: cute.TiledMma
    mma_dKV: cute.TiledMma
    mma_dQ: cute.TiledMma
    frags: dict[str, cute.Tensor]  # operands in shared memory
    acc: Any  # dV or dK
    acc_dQ: Any  # this and dq_dst: see `with_dq`
    stats: list[Any]  # what is added to S and dP
    P: cute.Tensor  # (8, M/16): this thread's part of P^T in shared memory
    copy_dS: cute.TiledCopy
    dS_dst: cute.Tensor
    tid: Int32
    dq_dst: Any  # this thread's place in block 0
    num_blocks: Int32  # query blocks a head
    scale_log2: Float32
    bars: cute.Pointer
    masks: tuple[Any, ...]
    sQ: cute.Tensor
    sdO: cute.Tensor
    sStat: cute.Tensor

    def stat(self, which: int, stage: Int32) -> Any:
        """The product that is added to S (0) or dP (1) of a stage."""
        product, keys, rows = self.stats[which]
        return product, keys, rows[None, None, None, stage]


class WideBackward(BackwardFrame):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (192, 256)
    P: int  # numbers of mbarriers
    DS: int
    TURN: int
    ADDED: int
    PASSED: int
    PEER: int

    def check_tile(self) -> None:
        if self.tile_n != 64 or self.cluster != 2 or self.stages != 2 or self.heads_inside:
            raise ValueError("expected tile_n 64, clusters of 2, 2 stages and not heads_inside")
        if self.tile_m % 16 or not 16 <= self.tile_m <= 96:
            raise ValueError(f"tile_m is {self.tile_m}, expected a multiple of 16 up to 96")

    @property
    def peer_columns(self) -> int:
        return 128

    @property
    def do_stages(self) -> int:
        """As many as there is room for: a block of dO is needed for about half a step."""
        keys, rows = self.tile_n * (2 * self.head_dim + self.peer_columns), 4 * self.tile_m * self.head_dim
        return 2 if 2 * (keys + rows + 7 * self.tile_m * self.tile_n) + 4096 <= SMEM_BYTES else 1

    @property
    def buffers(self) -> int:
        """P; dS of this CTA, which is read until the other CTA has released a block of dO; dS of the other CTA."""
        return 1 + (self.do_stages + 1) + 3

    @property
    def smem_order(self) -> tuple[str, ...]:
        return "K", "V", "Q", "dO", "dS", "small", "own"

    def own_barriers(self) -> list[tuple[str, int, int]]:
        """P, dS; the order of dQ's sums; dS of the other CTA.

        dS has two barriers, for even and odd blocks. On a single one, dS of block `it` + 1 can arrive before the
        exchange warp has seen that of block `it`; the warp would then wait for a phase that is over. It is never two
        blocks behind: dS of block `it` + 2 comes after dQ of block `it`, which waits for the barrier PEER of block
        `it`, where this CTA's exchange warp arrives after it has seen dS of block `it`.
        """
        warps = 4 * self.warp_groups
        return [("P", 1, 4), ("DS", 2, 4), ("TURN", 2, 1), ("ADDED", 2, warps), ("PASSED", 2, 1), ("PEER", 3, 1)]

    def dq_rows(self, wg: int) -> int:
        """Query rows of a warp group's tile of dQ: half of a block's where both CTAs have that tile."""
        return self.tile_m // 2 if self.head_dim == 192 and wg == 1 else self.tile_m

    def own_dS(self, it: Int32) -> Int32:
        """Buffer of this CTA's dS of block `it`."""
        return 1 + it % (self.do_stages + 1)

    def peer_dS(self, it: Int32) -> Int32:
        return self.buffers - 3 + it % 3

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        dtype, shape, M = self.dtype, (1, 1, 1), self.tile_m
        mma_S = hopper.make_trivial_tiled_mma(dtype, dtype, K_major, K_major, Float32, shape, (64, M))
        mma_dKV = hopper.make_trivial_tiled_mma(
            dtype, dtype, K_major, MN_major, Float32, shape, (64, self.head_dim), warpgroup.OperandSource.RMEM
        )
        return mma_S, mma_dKV, self.mma_dq(M)

    def mma_dq(self, rows: int) -> cute.TiledMma:
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        return hopper.make_trivial_tiled_mma(self.dtype, self.dtype, MN_major, K_major, Float32, (1, 1, 1), (64, rows))

    # ---------------------------------------------------------------- beside the loader
    @cute.jit
    def assist(
        self, warp_idx: Int32, sdS: cute.Tensor, own: Any, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32,
        bars: cute.Pointer, at: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        if warp_idx == 1:
            self.await_turns(locks, num_blocks, bars, item, heads_per_kv)
        if warp_idx == 2:
            self.pass_turns(locks, num_blocks, bars, item, heads_per_kv)
        if warp_idx == 3:
            self.exchange(sdS, bars, item, heads_per_kv)

    @cute.jit
    def await_turns(
        self, locks: cute.Tensor, num_blocks: Int32, bars: cute.Pointer, item: Any, heads_per_kv: Int32
    ) -> None:
        """Deterministic: see this CTA's turn at each of its blocks come, up to two blocks ahead of the MMA warps."""
        if const_expr(not self.deterministic):
            return
        kv_head, mb0, mb1 = item.kv_head, item.block_begin, item.block_end
        it = Int32(0)
        for h in cutlass.range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv, 1, unroll=1):
            for j in cutlass.range(0, mb1 - mb0, 1, unroll=1):
                mb = mb1 - 1 - j
                lock = self.lock_of(locks, h, num_blocks, mb, self.rank())
                expected = item.turn(mb)
                while load_acquire(lock) != expected:
                    pass
                cute.arch.sync_warp()
                slot, phase = self.ring(it, 2)
                cute.arch.mbarrier_wait(bars + self.PASSED + slot, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + self.TURN + slot)
                it += 1

    @cute.jit
    def pass_turns(
        self, locks: cute.Tensor, num_blocks: Int32, bars: cute.Pointer, item: Any, heads_per_kv: Int32
    ) -> None:
        """Deterministic: pass the turn on when this CTA's sums are in memory, for which no MMA warp waits."""
        if const_expr(not self.deterministic):
            return
        kv_head, mb0, mb1, place = item.kv_head, item.block_begin, item.block_end, item.place
        it = Int32(0)
        for h in cutlass.range(kv_head * heads_per_kv, (kv_head + 1) * heads_per_kv, 1, unroll=1):
            for j in cutlass.range(0, mb1 - mb0, 1, unroll=1):
                slot, phase = self.ring(it, 2)
                cute.arch.mbarrier_wait(bars + self.ADDED + slot, phase)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(bars + self.PASSED + slot)
                    store_release(self.lock_of(locks, h, num_blocks, mb1 - 1 - j, self.rank()), place + 1)
                it += 1

    def load_peer_keys(self, tma: cute.CopyAtom, g: cute.Tensor, s: cute.Tensor, bars: cute.Pointer, item: Any) -> None:
        """The other CTA's rows of K, in the columns of this CTA's part of dQ. They come with this CTA's K."""
        if self.want_dq:
            kv_head, n0, rank, shape = item.kv_head, item.key, self.rank(), (self.tile_n, self.peer_columns)
            first = n0 + (1 - 2 * rank) * self.tile_n, rank * (self.head_dim - self.peer_columns)
            tile = cute.local_tile(cute.domain_offset(first, g[None, None, kv_head]), shape, (0, 0))
            ts, tg = cpasync.tma_partition(
                tma, 0, cute.make_layout(1), cute.group_modes(s, 0, 2), cute.group_modes(tile, 0, 2)
            )
            with cute.arch.elect_one():
                cute.arch.mbarrier_expect_tx(bars + self.FULL_K, 2 * self.tile_n * self.peer_columns)
            cute.copy(tma, tg, ts, tma_bar_ptr=bars + self.FULL_K)

    @cute.jit
    def exchange(self, sdS: cute.Tensor, bars: cute.Pointer, item: Any, heads_per_kv: Int32) -> None:
        """This CTA's dS of every block to the other CTA.

        Its buffer there is free: dO of this block is here, so both CTAs have released what was in its place, and then
        they were done with dQ of three blocks back.
        """
        if const_expr(not self.want_dq):
            return
        total, size = (item.block_end - item.block_begin) * heads_per_kv, 2 * self.tile_m * self.tile_n
        for it in cutlass.range(0, total, 1, unroll=1):
            slot, phase = self.ring(it, 2)
            cute.arch.mbarrier_wait(bars + self.DS + slot, phase)
            full = bars + self.PEER + it % 3
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                source, dst = (sdS[None, None, i].iterator for i in (self.own_dS(it), self.peer_dS(it)))
                copy_to_peer(dst, source, full, size, 1 - self.rank())

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
        sKp: cute.Tensor | None,
    ) -> None:
        kv_head, n0, key_end, mb0, mb1 = item.kv_head, item.key, item.key_end, item.block_begin, item.block_end
        clean_begin, clean_end = item.clean_begin, item.clean_end
        D, M, N = self.head_dim, self.tile_m, self.tile_n
        wg, tid, lane = warp_id // 4, cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        rank = self.rank()
        thr_S, thr_dKV = mma_S.get_slice(0), mma_dKV.get_slice(0)
        frags = {
            "K": mma_S.make_fragment_A(thr_S.partition_A(sK)),
            "V": mma_S.make_fragment_A(thr_S.partition_A(sV)),
            "Q": mma_S.make_fragment_B(thr_S.partition_B(sQ)),
            "dO": mma_S.make_fragment_B(thr_S.partition_B(sdO)),
            "Qt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sQ))),
            "dOt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sdO))),
        }
        product = stat_product(M)
        rows = stat_rows(product, sStat, 0, M)
        stats = [(product, stat_keys(product, sKeys, which), rows) for which in (0, 1)]
        copy_dS = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), mma_S)
        dS_dst = copy_dS.get_slice(tid).partition_D(self.transposed(sdS))
        # P^T passes from a thread to the same thread of the other warp group: any order of elements serves.
        P = cute.make_tensor(
            cute.recast_ptr(sdS[None, None, 0].iterator, cute.make_swizzle(0, 4, 3)) + tid * 8,
            cute.make_layout((8, M // 16), stride=(1, 1024)),
        )
        key, key_visible = [cute.make_rmem_tensor(2, Int32) for _ in range(2)]
        for r in cutlass.range_constexpr(2):  # this thread's rows of S^T, less its first column
            n = n0 + warp_id % 4 * 16 + lane // 4 + 8 * r
            key[r] = n - lane % 4 * 2
            key_visible[r] = (visible_end[n] if n < key_end else 0) - lane % 4 * 2
        self.await_cluster()
        cute.arch.mbarrier_wait(bars + self.FULL_K, 0)
        if const_expr(self.want_dp):
            cute.arch.mbarrier_wait(bars + self.FULL_V, 0)
            clean_begin = self.clean_keys(sK, sV, clean_begin, sKp)
        acc = cute.make_rmem_tensor(mma_dKV.partition_shape_C((64, D)), Float32)  # dV or dK
        acc.fill(0.0)
        state = State(
            mma_S, mma_dKV, mma_dQ, frags, acc, None, stats, P, copy_dS, dS_dst, tid, None, num_blocks,
            scale * math.log2(math.e), bars, (key, key_visible, clean_begin, clean_end), sQ, sdO, sStat,
        )  # fmt: skip
        total, mb, h = (mb1 - mb0) * heads_per_kv, mb1 - 1, kv_head * heads_per_kv
        values, keys = [self.with_dq(state, i, dq_acc.iterator, sK, sKp, sdS) for i in range(2)]
        if wg == 0:
            self.loop(values, self.values_step, total, h, mb, mb0, mb1)
        else:
            self.loop(keys, self.keys_step, total, h, mb, mb0, mb1)
        kv_head, n0, key_end, slab = (load_volatile(kept + j) for j in range(4))
        row = warp_id % 4 * 16 + lane // 4
        first = Int64(slab) * self.slab_floats() + rank * (2 * N * D)
        if wg == 0:
            if const_expr(self.want_dv):
                if const_expr(self.want_dq):
                    self.mark_keys(acc, sV, row)
                self.store_keys(acc, dv, slabs.iterator + (first + N * D), slab, kv_head, n0, key_end, row)
        else:
            if const_expr(self.want_dk):
                for e in cutlass.range_constexpr(cute.size(acc)):
                    acc[e] = acc[e] * scale
                self.store_keys(acc, dk, slabs.iterator + first, slab, kv_head, n0, key_end, row)

    def with_dq(
        self, state: State, wg: int, dq_acc: cute.Pointer, sK: cute.Tensor, sKp: cute.Tensor, sdS: cute.Tensor
    ) -> State:
        """The state of a warp group with its part of dQ^T: a tile of 64 columns, over all or one half of the rows."""
        D, N, rank, rows = self.head_dim, self.tile_n, self.rank(), self.dq_rows(wg)
        shared = rows < self.tile_m  # the other CTA has the other rows
        mma = self.mma_dq(rows) if shared else state.mma_dQ
        thr = mma.get_slice(0)
        column_tile, rows_tile = (1, rank) if shared else (2 * rank + wg, 0)
        peer_tile = column_tile - rank * ((D - self.peer_columns) // 64)  # among the columns in sKp
        sKt = cute.local_tile(self.transposed(sK), (64, N), (column_tile, 0))
        sKpt = cute.local_tile(self.transposed(sKp), (64, N), (peer_tile, 0))
        frags = {
            "Kt": mma.make_fragment_A(thr.partition_A(sKt)),
            "Kpt": mma.make_fragment_A(thr.partition_A(sKpt)),
            "dS": mma.make_fragment_B(thr.partition_B(cute.local_tile(sdS, (rows, N), (rows_tile, 0, None)))),
        }
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, rows)), Float32)
        dst = dq_acc + rows_tile * (rows * D) + (column_tile * 128 + state.tid) * 4  # [chunk of 8 rows][thread][4]
        return replace(state, mma_dQ=mma, frags=state.frags | frags, acc_dQ=acc, dq_dst=dst)

    @cute.jit
    def loop(self, state: Any, step: Any, total: Int32, h: Int32, mb: Int32, mb0: Int32, mb1: Int32) -> None:
        step(state, Int32(0), (h, mb), mb, True)
        for it in cutlass.range(1, total, 1, unroll=1):
            previous = (h, mb)
            mb, h = self.next_block(mb, h, mb0, mb1)
            step(state, it, previous, mb, False)
        if const_expr(self.want_dq):
            self.await_dS(state, total - 1)
            self.issue_own_dq(state, total - 1)
            self.issue_peer_dq(state, total - 1)
            warpgroup.wait_group(0)
            self.finish_dq(state, total - 1, (h, mb))

    @cute.jit
    def store_keys(
        self, acc: cute.Tensor, out: cute.Tensor, slab_dst: cute.Pointer, slab: Int32, kv_head: Int32, n0: Int32,
        key_end: Int32, row: Int32,
    ) -> None:  # fmt: skip
        if slab < 0:
            self.store(acc, out, kv_head, n0 + row, key_end)
        else:
            self.store_slab(acc, slab_dst, row)

    def await_turn(self, bars: cute.Pointer, it: Int32) -> None:
        """Deterministic: wait until this CTA may add to the dQ of its block `it`."""
        if self.deterministic:
            slot, phase = self.ring(it, 2)
            cute.arch.mbarrier_wait(bars + self.TURN + slot, phase)

    def pass_turn(self, bars: cute.Pointer, it: Int32) -> None:
        """Deterministic: this warp has added to its block `it`."""
        if self.deterministic:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(bars + self.ADDED + it % 2)

    def await_dS(self, state: State, it: Int32) -> None:
        """Wait for dS of block `it`."""
        slot, phase = self.ring(it, 2)
        cute.arch.mbarrier_wait(state.bars + self.DS + slot, phase)

    def issue_own_dq(self, state: State, it: Int32) -> None:
        """Issue this warp group's part of dQ^T of block `it` over this CTA's keys, whose dS is there."""
        gemm(state.mma_dQ, state.acc_dQ, state.frags["Kt"], state.frags["dS"][None, None, None, self.own_dS(it)], True)

    def issue_peer_dq(self, state: State, it: Int32) -> None:
        """And over the other CTA's."""
        slot, phase = self.ring(it, 3)
        cute.arch.mbarrier_wait(state.bars + self.PEER + slot, phase)
        gemm(
            state.mma_dQ, state.acc_dQ, state.frags["Kpt"], state.frags["dS"][None, None, None, self.peer_dS(it)], False
        )

    def finish_dq(self, state: State, it: Int32, block: Any) -> None:
        self.await_turn(state.bars, it)
        dst = self.dq_slot(state.dq_dst, block[0], state.num_blocks, block[1])
        self.add_all(state.acc_dQ, dst, 8 * self.head_dim, 0, cute.size(state.acc_dQ) // 4)
        self.pass_turn(state.bars, it)

    @cute.jit
    def contain_values(self, state: Any, stage: Int32, do_stage: Int32, m0: Int32) -> None:
        """What is not finite in rows of dO stays with the keys that see them."""
        s, (key, key_visible, *clean) = state, state.masks
        if self.any_broken(s.sStat, stage, m0, *clean):
            sdO = s.sdO[None, None, do_stage]
            self.add_not_finite(s.acc, sdO, s.sStat, stage, m0, key, key_visible)
            self.clean_alone(sdO, s.tid, 0)

    @cute.jit
    def contain_keys(self, state: Any, acc_dP: cute.Tensor, stage: Int32, m0: Int32) -> None:
        """And of rows of Q. The other warp group may still read them for S, where such a row's P is infinite or 0."""
        s, (key, key_visible, clean_begin, clean_end) = state, state.masks
        if self.any_broken(s.sStat, stage, m0, clean_begin, clean_end):
            self.settle(acc_dP, m0, key, key_visible)
            if const_expr(self.want_dk):
                self.clean_alone(s.sQ[None, None, stage], s.tid, 1)

    @cute.jit
    def clean_alone(self, tile: cute.Tensor, tid: Int32, wg: cutlass.Constexpr) -> None:
        """`clean` by one warp group, once it has read what it needs."""
        bar = BAR_CONTAIN + 1 + wg
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)
        self.clean(tile, tid, 128)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=bar, number_of_threads=128)

    def values_step(self, state: State, it: Int32, previous: Any, mb: Int32, first: bool) -> None:
        """S, P and dV of block `it`; dQ of the block before. Nothing is in flight at either end."""
        s, (stage, phase) = state, self.ring(it)
        do_stage, do_phase = self.ring(it, self.do_stages)
        dq = self.want_dq and not first
        cute.arch.mbarrier_wait(s.bars + self.FULL_Q + stage, phase)
        acc_S = cute.make_rmem_tensor(s.mma_S.partition_shape_C((64, self.tile_m)), Float32)
        gemm(s.mma_S, acc_S, s.frags["K"], s.frags["Q"][None, None, None, stage], True, more=[s.stat(0, stage)])
        warpgroup.wait_group(0)
        self.mask(acc_S, mb * self.tile_m, *s.masks)
        tP = cute.make_rmem_tensor(s.mma_dKV.partition_shape_A((64, self.tile_m)), self.dtype)
        for c in range(self.tile_m // 16):  # 16 query rows at a time
            for e in range(8 * c, 8 * c + 8):
                acc_S[e] = cute.math.exp2(acc_S[e] * s.scale_log2, fastmath=True)
            round_to(part(acc_S, 8 * c, 8), part(tP, 8 * c, 8))
        if self.want_dp:
            if not first:  # the other warp group has read P of that block then; it may take until here
                self.await_dS(s, it - 1)
            for c in range(self.tile_m // 16):
                cute.autovec_copy(part(tP, 8 * c, 8), s.P[None, c])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.bars + self.P)
        if dq:
            self.issue_own_dq(s, it - 1)
            self.issue_peer_dq(s, it - 1)
        cute.arch.mbarrier_wait(s.bars + self.FULL_DO + do_stage, do_phase)
        if self.want_dv:
            self.contain_values(s, stage, do_stage, mb * self.tile_m)
        self.release(s.bars + self.EMPTY_Q + stage)
        if self.want_dv:
            gemm(s.mma_dKV, s.acc, tP, s.frags["dOt"][None, None, None, do_stage], False)
        if dq:
            warpgroup.wait_group(1 if self.want_dv else 0)
            self.finish_dq(s, it - 1, previous)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_DO + do_stage)

    def keys_step(self, state: State, it: Int32, previous: Any, mb: Int32, first: bool) -> None:
        """dP, dS and dK of block `it`; dQ of the block before. Nothing is in flight at either end."""
        s, (stage, phase) = state, self.ring(it)
        do_stage, do_phase = self.ring(it, self.do_stages)
        dq = self.want_dq and not first
        cute.arch.mbarrier_wait(s.bars + self.FULL_Q + stage, phase)
        cute.arch.mbarrier_wait(s.bars + self.FULL_DO + do_stage, do_phase)
        if self.want_dp:
            acc_dP, dO = cute.make_rmem_tensor(s.mma_S.partition_shape_C((64, self.tile_m)), Float32), s.frags["dO"]
            gemm(s.mma_S, acc_dP, s.frags["V"], dO[None, None, None, do_stage], True, more=[s.stat(1, stage)])
        if dq:
            self.await_dS(s, it - 1)
            self.issue_own_dq(s, it - 1)
        warpgroup.wait_group(1 if dq else 0)
        self.release(s.bars + self.EMPTY_DO + do_stage)
        if self.want_dp:
            cute.arch.mbarrier_wait(s.bars + self.P, it & 1)
            self.contain_keys(s, acc_dP, stage, mb * self.tile_m)
            tdS = cute.make_rmem_tensor(s.mma_dKV.partition_shape_A((64, self.tile_m)), self.dtype)
            for c in range(self.tile_m // 16):
                ds, prob = cute.make_rmem_tensor(8, Float32), cute.make_rmem_tensor(8, self.dtype)
                cute.autovec_copy(s.P[None, c], prob)
                for e in range(8):
                    ds[e] = Float32(prob[e]) * acc_dP[8 * c + e]
                round_to(ds, part(tdS, 8 * c, 8))
            if self.want_dq:
                source = cute.make_tensor(tdS.iterator, cute.make_layout(acc_dP.shape))
                dst = s.dS_dst[None, None, None, self.own_dS(it)]
                cute.copy(s.copy_dS, s.copy_dS.get_slice(s.tid).retile(source), dst)
                cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(s.bars + self.DS + it % 2)
        if dq:
            self.issue_peer_dq(s, it - 1)
        if self.want_dk:
            gemm(s.mma_dKV, s.acc, tdS, s.frags["Qt"][None, None, None, stage], False)
        if dq:
            warpgroup.wait_group(1 if self.want_dk else 0)
            self.finish_dq(s, it - 1, previous)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_Q + stage)
