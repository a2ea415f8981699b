"""Attention backward on Hopper over packed groups: what every head dim shares (signature, set-up, loads).

A CTA owns a block of keys of one KV head and walks over its query heads and their blocks of query rows:
    S = Q K^T - lse / scale    P = exp2(scale_log2 * S)         dV += P^T dO
    dP = dO V^T - dpsum        dS = P * dP                      dK += dS^T Q    dQ += dS K  (in global memory, fp32)
dK and dV stay in fp32 registers until the end, so a group's heads and queries are summed without atomics and in a fixed
order. The CTAs of a cluster own neighbouring key blocks; each loads a part of every Q and dO block and multicasts it.
Products are transposed: rows of S^T and dP^T are keys, rows of dQ^T columns of the head dim.
`bwd_narrow` and `bwd_wide` say how the products are laid out.
"""

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.utils import LayoutEnum, SmemAllocator

from cute_kernels.abi import LOCKS, STAT_COLUMNS, slab_floats
from cute_kernels.abi import BackwardFields as items
from cute_kernels.bwd_contain import BackwardContainment
from cute_kernels.bwd_load import Item, Loads
from cute_kernels.bwd_results import Results, as_pairs
from cute_kernels.bwd_stats import KEYS_BYTES, by_block, fake_stats, fill_keys
from cute_kernels.cluster import SMEM_BYTES
from cute_kernels.ptx import load_of_cta, store_volatile

KEPT = 6  # numbers of the item in shared memory


def split_rows(head_dim: int) -> bool:
    """Whether the warp groups of the main kernel share the rows of dQ, and not its columns."""
    return head_dim == 64


class BackwardFrame(Loads, BackwardContainment, Results):
    """dK and dV (or their partial sums), and dQ added up in fp32. Runs between the preprocess and the postprocess.

    Compiled once for a dtype and a native head dim; at run time any T, H, Hk (H a multiple), group count, strides, and
    any head dim D <= head_dim that is a multiple of 8 (the copy engine reads columns past D as zeros).

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        q, dout: [T, H, D] fp16 or bf16. T >= 1.
        k, v: [T, Hk, D], dtype of q.
        stats: [H, nm * tile_m * STAT_COLUMNS] bf16 from the preprocess, nm = ceil(T / tile_m).
        dk, dv: [T, Hk, D], dtype of q, or [0] where not asked. Rows of items with a slab are left alone, all others
            written.
        dq_acc: [H * nm * tile_m * head_dim] fp32: unscaled dQ in the order of registers, of blocks that are added to;
            before, zeros from the preprocess, or anything where `clears_ahead`. May be empty where dQ is not asked.
        slabs: [n_slabs * slab_floats()] fp32 (may be empty): partial dK and dV; what is not asked is not written.
        locks: [lock_words(H * nm)] int32, zeros from the preprocess: LOCKS of each query block, the first of which is
            not 0 once something was added to the block's dQ; last the counter of items begun, used if deterministic.
            May be empty where dQ is not asked, and beyond head dim 128 unless deterministic.
        work: [n, 11] int32, the items of `dualkv.plan_backward` in order (fields: abi.BackwardFields).
        visible_end: [T] int32.
        softmax_scale: fp32.
        stream: taken from the environment (torch's current stream), not passed.
    q, k, v, dout, dk, dv: last dimension contiguous, base address and all strides multiples of 16 bytes (8 elements).

    What is not finite stays with the pairs that see it: bwd_contain says how.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim.
        gradients: which of dQ, dK and dV are made: a part of "qkv" in that order. Products that they do not need are
            left out.
        tile_m, tile_n, stages, cluster, heads_inside: see codegen.tiles.BackwardTile.
        deterministic: dQ is summed in the order of the keys, so that two runs are bitwise equal. Needs a plan made for
            it, whose items wait for items before them only. Clusters take the items in that order from a counter, as
            they begin to run: whichever the device starts first, none waits for one that has not begun, and each wait
            ends when those before it do. dK and dV are bitwise equal in any case. Changes nothing without dQ.

    Raises:
        ValueError: a configuration that does not fit, in one sentence.
    """

    HEAD_DIMS: tuple[int, ...]
    warp_groups = 2  # of MMA warps
    regs_load, regs_mma = 24, 240  # registers a thread of the first warp group, and of those

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        head_dim: int,
        *,
        gradients: str = "qkv",
        tile_m: int,
        tile_n: int = 128,
        stages: int = 2,
        cluster: int = 2,
        heads_inside: bool = False,
        deterministic: bool = False,
    ) -> None:
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype is {dtype}, expected BFloat16 or Float16")
        if head_dim not in self.HEAD_DIMS:
            raise ValueError(f"head_dim is {head_dim}, expected {' or '.join(map(str, self.HEAD_DIMS))}")
        if cluster not in (1, 2):
            raise ValueError(f"got clusters of {cluster}, expected 1 or 2")
        self.dtype, self.head_dim, self.tile_m, self.tile_n = dtype, head_dim, tile_m, tile_n
        self.stages, self.cluster, self.heads_inside = stages, cluster, heads_inside
        self.want_dq, self.want_dk, self.want_dv = (name in gradients for name in "qkv")
        self.deterministic = deterministic and self.want_dq
        self.want_dp = self.want_dq or self.want_dk
        self.check_tile()
        self.num_bars = 0
        for name, count, _ in self.barriers():  # the number of each kind's first mbarrier
            setattr(self, name, self.num_bars)
            self.num_bars += count
        if self.smem_bytes() > SMEM_BYTES:
            raise ValueError(
                f"head_dim {head_dim}, {tile_m} x {tile_n} and {stages} stages need {self.smem_bytes()} bytes of "
                f"shared memory, a CTA has {SMEM_BYTES}"
            )

    # What the head dims do differently
    def check_tile(self) -> None:
        """Raise ValueError for a tile that the products cannot take."""
        raise NotImplementedError

    @property
    def k_columns(self) -> int:
        """Columns of K in shared memory: head_dim, or more for the product that makes dQ."""
        return self.head_dim

    @property
    def buffers(self) -> int:
        """tile_m x tile_n tiles of P and dS in shared memory."""
        raise NotImplementedError

    @property
    def do_stages(self) -> int:
        """Blocks of dO in flight."""
        return self.stages

    @property
    def peer_columns(self) -> int:
        """Columns of the other CTA's K in shared memory. If not 0, the CTAs of a cluster hand each other dS, and each
        makes one half of the columns of dQ, over the keys of both."""
        return 0

    @property
    def staged_floats(self) -> int:
        """Floats of shared memory in which dQ waits to be added up."""
        return 0

    def first_block(self, item: Any) -> Int32:
        """This CTA adds nothing to dQ of the item's query blocks before this one."""
        return item.block_begin

    def own_barriers(self) -> list[tuple[str, int, int]]:
        """Kinds of mbarriers besides those of the loads: name, how many, arrivals that complete a phase."""
        raise NotImplementedError

    def assist(
        self, warp_idx: Int32, sdS: cute.Tensor, own: Any, dq_acc: cute.Tensor, locks: cute.Tensor, num_blocks: Int32,
        bars: cute.Pointer, at: cute.Pointer, item: Any, heads_per_kv: Int32,
    ) -> None:  # fmt: skip
        """What the warps beside the loader (1, 2 and 3) do. `own`: sKp or sdQ; `at`: a number that they share, 0."""
        raise NotImplementedError

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """The products S and dP; dV and dK; dQ."""
        raise NotImplementedError

    @property
    def kept(self) -> int:
        """Numbers of the item in shared memory; behind KEPT, if deterministic, its index in `work`."""
        return KEPT + self.deterministic

    def smem_bytes(self) -> int:
        """Statistics, keys' columns, mbarriers and what is kept; K and V, Q and dO stages, P and dS, dQ."""
        small = 2 * STAT_COLUMNS * self.tile_m * self.stages + KEYS_BYTES + 8 * self.num_bars + 4 * (1 + self.kept)
        keys = self.tile_n * (self.k_columns + self.head_dim + self.peer_columns)
        rows = (self.stages + self.do_stages) * self.tile_m * self.head_dim
        probs = self.buffers * self.tile_m * self.tile_n
        return -(-small // 1024) * 1024 + 2 * (keys + rows + probs) + 4 * self.staged_floats

    @property
    def smem_order(self) -> tuple[str, ...]:
        """What lies where in shared memory, from its first address on; worth 1 % (docs/tuning.md, "What lies where").

        "small": statistics, keys' columns, mbarriers and what is kept. Not last: memcheck takes the first operand of a
        product for 2 KB a warp, it seems, which then reached past the end (docs/sanitizers.md).
        """
        raise NotImplementedError

    def slab_floats(self) -> int:
        """Floats of an item's partial dK and dV: [cluster, 2, tile_n * head_dim]."""
        return slab_floats(self.head_dim, self.tile_n, self.cluster)

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, kv_heads, dim = [cute.sym_int32() for _ in range(3)] + [cute.sym_int32(divisibility=8)]

        def packed(num_heads: cute.SymInt) -> cute.Tensor:
            strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
            return make_fake_tensor(self.dtype, (rows, num_heads, dim), strides, assumed_align=16)

        def flat() -> cute.Tensor:
            return make_fake_tensor(Float32, (cute.sym_int64(),), (1,), assumed_align=16)

        q, dout, k, v = packed(heads), packed(heads), packed(kv_heads), packed(kv_heads)
        absent = make_fake_tensor(self.dtype, (cute.sym_int32(),), (1,), assumed_align=4)
        dk, dv = (packed(kv_heads) if wanted else absent for wanted in (self.want_dk, self.want_dv))
        stats = fake_stats(heads, self.tile_m)
        work = make_fake_tensor(Int32, (cute.sym_int32(), items.NUM_FIELDS), (items.NUM_FIELDS, 1), assumed_align=4)
        visible_end = make_fake_tensor(Int32, (rows,), (1,), assumed_align=4)
        locks = make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4)
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return q, k, v, dout, stats, dk, dv, flat(), flat(), locks, work, visible_end, Float32(0.0), stream

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, D)
        dout: cute.Tensor,  # (T, H, D)
        stats: cute.Tensor,  # (H, nm * M * STAT_COLUMNS)
        dk: cute.Tensor,  # (T, Hk, D)
        dv: cute.Tensor,  # (T, Hk, D)
        dq_acc: cute.Tensor,  # (H * nm * M * head_dim)
        slabs: cute.Tensor,  # (n_slabs * slab_floats)
        locks: cute.Tensor,  # (lock_words(H * nm))
        work: cute.Tensor,  # (n, 11)
        visible_end: cute.Tensor,  # (T)
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        D, M, N = self.head_dim, self.tile_m, self.tile_n
        atom = self.row_atom(D)
        sK_layout = cute.tile_to_shape(self.row_atom(self.k_columns, D), (N, self.k_columns), (0, 1))
        sV_layout = cute.tile_to_shape(atom, (N, D), (0, 1))
        sQ_layout = cute.tile_to_shape(atom, (M, D, self.stages), (0, 1, 2))
        sdO_layout = cute.tile_to_shape(atom, (M, D, self.do_stages), (0, 1, 2))
        sKp_layout, tma_Kp, gKp = None, None, None
        sdS_layout = cute.tile_to_shape(self.row_atom(N), (M, N, self.buffers), (0, 1, 2))  # keys contiguous

        def by_head(x: cute.Tensor) -> cute.Tensor:  # (T, H, D) -> (T, D, H)
            return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))

        load = cpasync.CopyBulkTensorTileG2SOp()
        load_q = load if const_expr(self.cluster == 1) else cpasync.CopyBulkTensorTileG2SMulticastOp()
        q_smem = cute.select(sQ_layout, mode=[0, 1])
        tma_Q, gQ = cpasync.make_tiled_tma_atom(load_q, by_head(q), q_smem, (M, D), self.cluster)
        tma_dO, gdO = cpasync.make_tiled_tma_atom(load_q, by_head(dout), q_smem, (M, D), self.cluster)
        tma_K, gK = cpasync.make_tiled_tma_atom(load, by_head(k), sK_layout, (N, self.k_columns))
        if const_expr(self.peer_columns):
            shape = (N, self.peer_columns)
            sKp_layout = cute.tile_to_shape(self.row_atom(self.peer_columns, D), shape, (0, 1))
            tma_Kp, gKp = cpasync.make_tiled_tma_atom(load, by_head(k), sKp_layout, shape)
        tma_V, gV = cpasync.make_tiled_tma_atom(load, by_head(v), sV_layout, (N, D))
        mma_S, mma_dKV, mma_dQ = self.tiled_mmas()
        self.kernel(
            tma_Q,
            gQ,
            tma_dO,
            gdO,
            tma_K,
            gK,
            tma_V,
            gV,
            tma_Kp,
            gKp,
            by_block(stats, q.shape[0], M),
            as_pairs(dk) if const_expr(self.want_dk) else dk,
            as_pairs(dv) if const_expr(self.want_dv) else dv,
            dq_acc,
            slabs,
            locks,
            work,
            visible_end,
            softmax_scale,
            q.shape[1] // k.shape[1],
            sK_layout,
            sV_layout,
            sQ_layout,
            sdO_layout,
            sKp_layout,
            sdS_layout,
            mma_S,
            mma_dKV,
            mma_dQ,
        ).launch(
            grid=[work.shape[0] * self.cluster, 1, 1],
            block=[128 * (1 + self.warp_groups), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def row_atom(self, columns: int, at_least: int = 0) -> cute.ComposedLayout:
        """The widest swizzle for rows of `columns` elements (and of `at_least`, where a view is that narrow)."""
        swizzle = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, math.gcd(columns, at_least))
        return warpgroup.make_smem_layout_atom(swizzle, self.dtype)

    # ---------------------------------------------------------------- kernel: set-up and roles
    @cute.kernel
    def kernel(
        self,
        tma_Q: cute.CopyAtom,
        gQ: cute.Tensor,
        tma_dO: cute.CopyAtom,
        gdO: cute.Tensor,
        tma_K: cute.CopyAtom,
        gK: cute.Tensor,
        tma_V: cute.CopyAtom,
        gV: cute.Tensor,
        tma_Kp: cute.CopyAtom | None,
        gKp: cute.Tensor | None,
        stats: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        dq_acc: cute.Tensor,
        slabs: cute.Tensor,
        locks: cute.Tensor,
        work: cute.Tensor,
        visible_end: cute.Tensor,
        scale: Float32,
        heads_per_kv: Int32,
        sK_layout: cute.ComposedLayout,
        sV_layout: cute.ComposedLayout,
        sQ_layout: cute.ComposedLayout,
        sdO_layout: cute.ComposedLayout,
        sKp_layout: cute.ComposedLayout | None,
        sdS_layout: cute.ComposedLayout,
        mma_S: cute.TiledMma,
        mma_dKV: cute.TiledMma,
        mma_dQ: cute.TiledMma,
    ) -> None:
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tiles = {"K": sK_layout, "V": sV_layout, "Q": sQ_layout, "dO": sdO_layout, "dS": sdS_layout, "own": sKp_layout}
        s = self.allocate(tiles)
        sK, sV, sQ, sdO, sdS, own = (s[name] for name in ("K", "V", "Q", "dO", "dS", "own"))
        sStat, sKeys, bars, at, kept = s["small"]
        if const_expr(self.deterministic):
            counter = self.lock_of(locks, stats.shape[0], stats.shape[1], Int32(0), Int32(0))  # behind all locks
            self.take_index(warp_idx, counter, kept + KEPT)
        else:
            item = Item.load(work, cute.arch.block_idx()[0] // self.cluster, self.rank(), self.tile_n)
        if warp_idx == 0:
            self.init_mbarriers(bars, [(getattr(self, name), *kind) for name, *kind in self.barriers()])
            cute.arch.mbarrier_init_fence()
            with cute.arch.elect_one():
                store_volatile(at, Int32(0))
            cute.arch.sync_warp()
        if warp_idx == 1:
            with cute.arch.elect_one():
                for atom in (tma_K, tma_V, tma_Q, tma_dO):
                    cpasync.prefetch_descriptor(atom)
        if warp_idx == 2:
            fill_keys(sKeys)
            cute.arch.fence_view_async_shared()
        if const_expr(self.deterministic):
            self.sync_cluster()  # the index is there
            index = cute.arch.make_warp_uniform(load_of_cta(kept + KEPT, 0))
            item = Item.load(work, index, self.rank(), self.tile_n)
        if warp_idx == 3:
            self.keep(kept, item, heads_per_kv)
        self.arrive_cluster()
        if warp_idx == 0:  # keys are this CTA's alone: they need not wait for the others
            if const_expr(self.peer_columns):
                self.load_peer_keys(tma_Kp, gKp, own, bars, item)
            self.load_keys(tma_K, gK, tma_V, gV, sK, sV, bars, item)
        num_blocks = stats.shape[1]
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            self.await_cluster()
            if warp_idx == 0:
                self.load_queries(tma_Q, gQ, tma_dO, gdO, stats, sQ, sdO, sStat, bars, item, heads_per_kv)
            self.assist(warp_idx, sdS, own, dq_acc, locks, num_blocks, bars, at, item, heads_per_kv)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.mma(
                mma_S,
                mma_dKV,
                mma_dQ,
                dk,
                dv,
                dq_acc,
                slabs,
                kept,
                visible_end,
                num_blocks,
                scale,
                heads_per_kv,
                sK,
                sV,
                sQ,
                sdO,
                sdS,
                sStat,
                sKeys,
                bars,
                item,
                warp_idx - 4,
                own,
            )
        if const_expr(self.cluster > 1):
            self.sync_cluster()  # no CTA leaves while its peer may still write into it

    def allocate(self, tiles: dict[str, cute.ComposedLayout | None]) -> dict[str, Any]:
        """What lies in shared memory, in `smem_order`.

        tiles: those in 16 bits. K (N, k_columns), V (N, D), Q (M, D, stages), dO (M, D, do_stages), dS (M, N, buffers),
            and as "own" the other CTA's K (N, peer_columns); where there is none, dQ is staged in its place.
        """
        smem, s = SmemAllocator(), dict[str, Any](own=None)
        for name in self.smem_order:
            tile = tiles.get(name)
            if name == "small":
                sStat = smem.allocate_tensor(BFloat16, cute.make_layout((STAT_COLUMNS, self.tile_m, self.stages)), 128)
                sKeys = smem.allocate_tensor(BFloat16, cute.make_layout(KEYS_BYTES // 2), 16).iterator
                bars = smem.allocate_array(cutlass.Int64, self.num_bars)
                s[name] = sStat, sKeys, bars, smem.allocate_array(Int32, 1), smem.allocate_array(Int32, self.kept)
            elif tile is not None:
                s[name] = smem.allocate_tensor(self.dtype, tile.outer, 1024, tile.inner)
            elif self.staged_floats:
                s[name] = smem.allocate_tensor(Float32, cute.make_layout(self.staged_floats), 128)
        return s

    @cute.jit
    def take_index(self, warp_idx: Int32, counter: cute.Pointer, index: cute.Pointer) -> None:
        """Of the cluster's item in `work`, into shared memory of its first CTA: how many clusters came here before."""
        if warp_idx == 3 and self.rank() == 0:
            with cute.arch.elect_one():
                store_volatile(index, cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu"))

    def keep(self, kept: cute.Pointer, item: Any, heads_per_kv: Int32) -> None:
        """What warps need of the item behind their loops, during which no register holds it."""
        steps = [(item.block_end - block) * heads_per_kv for block in (self.first_block(item), item.block_begin)]
        with cute.arch.elect_one():
            for j, field in enumerate((item.kv_head, item.key, item.key_end, item.slab, *steps)):
                store_volatile(kept + j, field)

    def barriers(self) -> list[tuple[str, int, int]]:
        """Kinds of mbarriers in order: name, how many, arrivals that complete a phase."""
        users = 4 * self.warp_groups * self.cluster  # MMA warps that read a stage
        stages, do_stages = self.stages, self.do_stages
        loads = [("FULL_Q", stages, 1), ("EMPTY_Q", stages, users), ("FULL_DO", do_stages, 1)]
        return [("FULL_K", 1, 1), ("FULL_V", 1, 1), *self.own_barriers(), *loads, ("EMPTY_DO", do_stages, users)]

    # ---------------------------------------------------------------- MMA warp groups: shared parts
    @cute.jit
    def release(self, bar: cute.Pointer) -> None:
        """`arrive`, once all lanes are there."""
        cute.arch.sync_warp()
        self.arrive(bar)

    @cute.jit
    def next_block(
        self, mb: Int32, h: Int32, mb0: Int32, mb1: Int32, kv_head: Int32 | int = 0, heads_per_kv: Int32 | int = 0
    ) -> tuple[Int32, Int32]:
        """The last two are read where heads_inside."""
        if const_expr(self.heads_inside):
            h += 1
            if h == (kv_head + 1) * heads_per_kv:
                h = kv_head * heads_per_kv
                mb -= 1
        else:
            mb -= 1
            if mb < mb0:
                mb = mb1 - 1
                h += 1
        return mb, h

    def dq_slot(self, dq_acc: cute.Pointer, h: Int32, num_blocks: Int32, mb: Int32) -> cute.Pointer:
        """Where the dQ of a query block of a head is added up."""
        return dq_acc + (Int64(h) * num_blocks + mb) * (self.tile_m * self.head_dim)

    def lock_of(self, locks: cute.Tensor, h: Int32, num_blocks: Int32, mb: Int32, which: Int32) -> cute.Pointer:
        """One of the locks of a query block of a head."""
        return locks.iterator + ((Int64(h) * num_blocks + mb) * LOCKS + which)

    def transposed(self, s: cute.Tensor) -> cute.Tensor:
        """The transposed view of a shared memory tile, or of a ring of tiles."""
        modes = [1, 0, 2] if cute.rank(s) == 3 else [1, 0]
        return cute.make_tensor(s.iterator, cute.select(s.layout, mode=modes))
