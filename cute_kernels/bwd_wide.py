"""Attention backward for head dims 192 and 256: every product that sums over keys or rows is split along the head dim.

S and dP have a warp group's share of the keys each. P and dS pass through shared memory to all warp groups, and dV^T,
dK^T and dQ^T have 64 columns of the head dim (two times 64 for head dim 256) in each.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from cute_kernels.accumulator import column, gemm, round_to
from cute_kernels.bwd_frame import BackwardFrame, add_to_global, transpose_8x8


@dataclass
class State:
    """What a warp group's loop over query blocks works on."""

    mma_S: cute.TiledMma
    mma_dKV: cute.TiledMma
    mma_dQ: cute.TiledMma
    frags: dict[str, Any]  # operands in shared memory; of those split along the head dim, a list
    acc_P: cute.Tensor  # of the next block
    acc_dK: list[cute.Tensor]
    acc_dV: list[cute.Tensor]
    acc_dQ: list[cute.Tensor]
    stat: cute.Tensor  # (row or row + 8, lse2 or dpsum, stage)
    copy: cute.TiledCopy  # P and dS to shared memory
    P_dst: cute.Tensor
    tid: Int32
    dq_dst: cute.Pointer  # this thread's place in block 0
    num_blocks: Int32  # query blocks a head
    scale_log2: Float32
    bars: cute.Pointer
    masks: tuple[Any, ...]


class WideBackward(BackwardFrame):
    __doc__ = BackwardFrame.__doc__

    HEAD_DIMS = (192, 256)

    def check_tile(self) -> None:
        if self.tile_m != 64:
            raise ValueError(f"tile_m is {self.tile_m}, expected 64")
        if self.head_dim % (64 * self.warp_groups):
            raise ValueError(f"got {self.warp_groups} warp groups, expected each to have 64 columns of {self.head_dim}")
        unit = 16 * self.warp_groups
        if self.tile_n % unit or not unit <= self.tile_n <= 256:
            raise ValueError(f"tile_n is {self.tile_n}, expected a multiple of {unit} up to 256")

    @property
    def buffers(self) -> int:
        return 4  # P and dS of two blocks

    @property
    def column_tiles(self) -> int:
        """64-column tiles of the head dim a warp group."""
        return self.head_dim // (64 * self.warp_groups)

    @property
    def keys_wg(self) -> int:
        return self.tile_n // self.warp_groups

    @property
    def phases(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
        """Column tiles of dQ and dK whose products run together. Three warp groups lack registers for both at once."""
        both = [((t,), (t,)) for t in range(self.column_tiles)] if self.column_tiles > 1 else [((), (0,)), ((0,), ())]
        wanted = [(dq if self.want_dq else (), dk if self.want_dk else ()) for dq, dk in both]
        return tuple(phase for phase in wanted if any(phase))

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        dtype, shape, M, N = self.dtype, (1, 1, 1), self.tile_m, self.tile_n
        mma_S = hopper.make_trivial_tiled_mma(dtype, dtype, K_major, K_major, Float32, shape, (64, self.keys_wg))
        mma_dKV = hopper.make_trivial_tiled_mma(dtype, dtype, MN_major, MN_major, Float32, shape, (64, N))
        mma_dQ = hopper.make_trivial_tiled_mma(dtype, dtype, MN_major, K_major, Float32, shape, (64, M))
        return mma_S, mma_dKV, mma_dQ

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
        work: cute.Tensor,
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
        bars: cute.Pointer,
        item: Any,
        warp_id: Int32,
    ) -> None:
        kv_head, n0, key_end, mb0, mb1, clean_begin, clean_end, *_ = item
        D, M, N, tiles = self.head_dim, self.tile_m, self.tile_n, self.column_tiles
        wg, tid, lane = warp_id // 4, cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()
        thr_S, thr_dKV, thr_dQ = mma_S.get_slice(0), mma_dKV.get_slice(0), mma_dQ.get_slice(0)
        sQt, sdOt, sKt = self.transposed(sQ), self.transposed(sdO), self.transposed(sK)
        own = [wg * tiles + t for t in range(tiles)]  # this warp group's 64-column tiles
        frags = {
            "Q": mma_S.make_fragment_A(thr_S.partition_A(sQ)),
            "dO": mma_S.make_fragment_A(thr_S.partition_A(sdO)),
            "K": mma_S.make_fragment_B(thr_S.partition_B(cute.local_tile(sK, (self.keys_wg, D), (wg, 0)))),
            "V": mma_S.make_fragment_B(thr_S.partition_B(cute.local_tile(sV, (self.keys_wg, D), (wg, 0)))),
            "Qt": [
                mma_dKV.make_fragment_A(thr_dKV.partition_A(cute.local_tile(sQt, (64, M), (c, 0, None)))) for c in own
            ],
            "dOt": [
                mma_dKV.make_fragment_A(thr_dKV.partition_A(cute.local_tile(sdOt, (64, M), (c, 0, None)))) for c in own
            ],
            "Pt": mma_dKV.make_fragment_B(thr_dKV.partition_B(self.transposed(sdS))),  # dS^T is in it too
            "Kt": [mma_dQ.make_fragment_A(thr_dQ.partition_A(cute.local_tile(sKt, (64, N), (c, 0)))) for c in own],
            "dS": mma_dQ.make_fragment_B(thr_dQ.partition_B(sdS)),
        }
        acc_dK, acc_dV = [
            [cute.make_rmem_tensor(mma_dKV.partition_shape_C((64, N)), Float32) for _ in range(tiles if wanted else 0)]
            for wanted in (self.want_dk, self.want_dv)
        ]
        for acc in acc_dK + acc_dV:
            acc.fill(0.0)
        acc_dQ = [
            cute.make_rmem_tensor(mma_dQ.partition_shape_C((64, M)), Float32)
            for _ in range(tiles if self.want_dq else 0)
        ]
        row, col = warp_id % 4 * 16 + lane // 4, wg * self.keys_wg + lane % 4 * 2  # first element of S
        stat_layout = cute.make_layout((2, 2, self.stages), stride=(8, M, 2 * M))
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma_S)
        state = State(
            mma_S, mma_dKV, mma_dQ, frags, cute.make_rmem_tensor(mma_S.partition_shape_C((64, self.keys_wg)), Float32),
            acc_dK, acc_dV, acc_dQ, cute.make_tensor(sStat.iterator + row, stat_layout), copy,
            copy.get_slice(tid).partition_D(cute.local_tile(sdS, (M, self.keys_wg), (0, wg, None))), tid,
            dq_acc.iterator + (wg * (tiles * 128) + tid) * 4, num_blocks, scale * math.log2(math.e), bars,
            (row, n0 + col, key_end, visible_end, clean_begin, clean_end),
        )  # fmt: skip
        cute.arch.mbarrier_wait(bars + self.FULL_K, 0)
        if const_expr(self.want_dp):
            cute.arch.mbarrier_wait(bars + self.FULL_V, 0)
        total, mb, h = (mb1 - mb0) * heads_per_kv, mb1 - 1, kv_head * heads_per_kv
        acc_S = self.issue_scores(state, Int32(0), "Q", "K", self.FULL_Q)
        acc_dP = self.issue_dp(state, Int32(0))
        warpgroup.wait_group(0)
        self.probabilities(state, acc_S, Int32(0), mb)
        self.score_gradients(state, acc_dP, Int32(0))
        self.arrive(state)
        previous_mb, previous_h = mb, h
        for it in cutlass.range(0, total - 1, 1, unroll=1):
            previous, block = (previous_h, previous_mb), (h, mb)
            previous_mb, previous_h = mb, h
            mb, h = self.next_block(mb, h, mb0, mb1)
            self.step(state, it, previous, block, mb, False)
        self.step(state, total - 1, (previous_h, previous_mb), (h, mb), mb, True)
        if const_expr(self.want_dq):
            self.add_last_dq(state, total - 1, (h, mb), True)
        kv_head, n0, key_end, *_, slab, _ = self.item(work)  # read again: no register holds them during the loop
        for acc in acc_dK:
            for e in cutlass.range_constexpr(cute.size(acc)):
                acc[e] = acc[e] * scale
        first_col = (wg * tiles * 4 + warp_id % 4) * 16
        for t in cutlass.range_constexpr(tiles):
            if slab < 0:
                if const_expr(self.want_dk):
                    self.store(acc_dK[t], dk, kv_head, n0, key_end, first_col + 64 * t)
                if const_expr(self.want_dv):
                    self.store(acc_dV[t], dv, kv_head, n0, key_end, first_col + 64 * t)
            else:
                first = Int64(slab) * self.slab_floats() + self.rank() * (2 * N * D) + first_col + 64 * t
                if const_expr(self.want_dk):
                    self.store_slab(acc_dK[t], slabs.iterator + first)
                if const_expr(self.want_dv):
                    self.store_slab(acc_dV[t], slabs.iterator + (first + N * D))

    def issue_scores(self, state: State, it: Int32, rows: str, keys: str, full: int) -> cute.Tensor:
        """Issue S or dP of block `it`."""
        stage, phase = self.ring(it)
        acc = cute.make_rmem_tensor(state.acc_P.shape, Float32)
        cute.arch.mbarrier_wait(state.bars + full + stage, phase)
        gemm(state.mma_S, acc, state.frags[rows][None, None, None, stage], state.frags[keys], True)
        return acc

    def issue_dp(self, state: State, it: Int32) -> cute.Tensor | None:
        """Issue dP of block `it`, of which dS is made; dV alone needs only that dO is there."""
        if self.want_dp:
            return self.issue_scores(state, it, "dO", "V", self.FULL_DO)
        stage, phase = self.ring(it)
        cute.arch.mbarrier_wait(state.bars + self.FULL_DO + stage, phase)
        return None

    def probabilities(self, state: State, acc_S: cute.Tensor, it: Int32, mb: Int32) -> None:
        """P of block `it` from its scores, to registers (fp32) and, for dV, shared memory."""
        self.mask(acc_S, mb * self.tile_m, *state.masks)
        for r in range(2):
            lse2 = state.stat[r, 0, it % self.stages]
            for e in range(cute.size(acc_S)):
                if e // 2 % 2 == r:
                    state.acc_P[e] = cute.math.exp2(acc_S[e] * state.scale_log2 - lse2, fastmath=True)
        if self.want_dv:
            self.to_smem(state, state.acc_P, it % 2 * 2)

    def score_gradients(self, state: State, acc_dP: cute.Tensor | None, it: Int32) -> None:
        """dS = P * (dP - dpsum) of block `it`, to shared memory."""
        if acc_dP is None:
            return
        for r in range(2):
            dpsum = state.stat[r, 1, it % self.stages]
            for e in range(cute.size(acc_dP)):
                if e // 2 % 2 == r:
                    acc_dP[e] = state.acc_P[e] * (acc_dP[e] - dpsum)
        self.to_smem(state, acc_dP, it % 2 * 2 + 1)

    def to_smem(self, state: State, acc: cute.Tensor, buffer: Int32) -> None:
        rounded = cute.make_rmem_tensor(acc.shape, self.dtype)
        round_to(acc, rounded)
        cute.copy(state.copy, state.copy.get_slice(state.tid).retile(rounded), state.P_dst[None, None, None, buffer])

    def arrive(self, state: State) -> None:
        """This warp has written its part of P and dS, and has read all that it will of the buffers two blocks back."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(state.bars + self.DS)

    def step(self, state: State, it: Int32, previous: Any, block: Any, next_mb: Int32, last: bool) -> None:
        """Block `it`, whose P and dS are on the way to shared memory: its dV, dK and dQ, and the next block's P and dS.

        The last tile of dQ is added up during the next step, behind its first products. Nothing is in flight at either
        end: else the compiler makes every product wait.
        """
        s, stage = state, it % self.stages
        P = s.frags["Pt"][None, None, None, it % 2 * 2]
        dSt = s.frags["Pt"][None, None, None, it % 2 * 2 + 1]
        dS = s.frags["dS"][None, None, None, it % 2 * 2 + 1]
        cute.arch.mbarrier_wait(s.bars + self.DS, it & 1)
        # the next block's S with this block's dV; P while dV runs (three warp groups lack registers for S beside dQ)
        if not last and self.column_tiles > 1:
            acc_S = self.issue_scores(s, it + 1, "Q", "K", self.FULL_Q)
        for t, acc_dV in enumerate(s.acc_dV):
            gemm(s.mma_dKV, acc_dV, s.frags["dOt"][t][None, None, None, stage], P, False)
        if self.want_dq:
            self.add_last_dq(s, it - 1, previous, it > 0)
        if not last:
            if self.column_tiles == 1:
                acc_S = self.issue_scores(s, it + 1, "Q", "K", self.FULL_Q)
            warpgroup.wait_group(len(s.acc_dV) if self.column_tiles > 1 else 0)
            self.probabilities(s, acc_S, it + 1, next_mb)
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_DO + stage)
        # the next block's dP with this block's dQ and dK; dS while they run
        if not last:
            acc_dP = self.issue_dp(s, it + 1)
        ready: tuple[int, ...] = ()
        for phase, (dq_tiles, dk_tiles) in enumerate(self.phases):
            if phase:
                warpgroup.wait_group(0)
            for t in dq_tiles:
                gemm(s.mma_dQ, s.acc_dQ[t], s.frags["Kt"][t], dS, True)
            for t in dk_tiles:
                gemm(s.mma_dKV, s.acc_dK[t], s.frags["Qt"][t][None, None, None, stage], dSt, False)
            if phase == 0 and not last:
                warpgroup.wait_group(len(dq_tiles) + len(dk_tiles))
                self.score_gradients(s, acc_dP, it + 1)
            for t in ready:
                self.add_dq(s, it, block, t)
            ready = dq_tiles
        warpgroup.wait_group(0)
        self.release(s.bars + self.EMPTY_Q + stage)
        if not last:
            self.arrive(s)

    @cute.jit
    def add_last_dq(self, state: Any, it: Int32, block: Any, wanted: cutlass.Boolean) -> None:
        """The last tile of dQ of block `it` (head, query block), if wanted."""
        if wanted:
            self.add_dq(state, it, block, self.column_tiles - 1)
            self.pass_turn(state.bars)

    def add_dq(self, state: State, it: Int32, block: Any, tile: int) -> None:
        """Add a 64-column tile of dQ^T to block `it` (head, query block) in global memory."""
        if tile == 0:
            self.await_turn(state.bars, it)
        dst = self.dq_slot(state.dq_dst, block[0], state.num_blocks, block[1]) + tile * 512
        for c in range(self.tile_m // 8):
            add_to_global(dst + c * (8 * self.head_dim), *[state.acc_dQ[tile][4 * c + j] for j in range(4)])

    @cute.jit
    def mask(
        self,
        acc_S: cute.Tensor,
        m0: Int32,
        row: Int32,
        n: Int32,
        key_end: Int32,
        visible_end: cute.Tensor,
        clean_begin: Int32,
        clean_end: Int32,
    ) -> None:
        """S of query rows [m0, m0 + tile_m): keep key <= q < its visible_end. Most blocks skip it."""
        if m0 < clean_begin or m0 + self.tile_m > clean_end:
            for c in cutlass.range_constexpr(self.keys_wg // 8):
                for i in cutlass.range_constexpr(2):
                    key = n + column(4 * c + i)
                    key_visible = visible_end[key] if key < key_end else 0
                    for r in cutlass.range_constexpr(2):
                        q = m0 + row + 8 * r
                        e = 4 * c + 2 * r + i
                        acc_S[e] = acc_S[e] if (key <= q) & (q < key_visible) else -Float32.inf

    @cute.jit
    def store(
        self, acc: cute.Tensor, out: cute.Tensor, kv_head: Int32, n0: Int32, key_end: Int32, first_col: Int32
    ) -> None:
        """acc (16 columns a warp x keys) -> out (T, Hk, D/2 pairs): columns first_col to first_col + 15."""
        rounded = cute.make_rmem_tensor(cute.size(acc), self.dtype)
        round_to(acc, rounded)
        pairs, lane = cute.recast_tensor(rounded, Int32), cute.arch.lane_idx()
        for c in cutlass.range_constexpr(self.tile_n // 8):
            n = n0 + 8 * c + lane // 4
            for r in cutlass.range_constexpr(2):
                pair, place = transpose_8x8(pairs[2 * c + r]), first_col // 2 + 4 * r + lane % 4
                if n < key_end and place < out.shape[2]:
                    out[n, kv_head, place] = pair

    @cute.jit
    def store_slab(self, acc: cute.Tensor, slab: cute.Pointer) -> None:
        """acc (16 columns a warp x keys) -> slab [tile_n, head_dim] fp32, from the warp's first column on."""
        D, lane = self.head_dim, cute.arch.lane_idx()
        dst = cute.make_tensor(
            slab + lane // 4 + lane % 4 * (2 * D), cute.make_layout((2, 2, self.tile_n // 8), stride=(D, 8, 8 * D))
        )
        for e in cutlass.range_constexpr(cute.size(acc)):
            dst[e % 2, e // 2 % 2, e // 4] = acc[e]
