"""Attention backward on Hopper over packed groups: what every head dim shares (signature, set-up, warps' roles).

A CTA owns a block of keys of one KV head and walks over its query heads and their blocks of query rows:
    S = Q K^T - lse / scale    P = exp2(scale_log2 * S)         dV += P^T dO
    dP = dO V^T - dpsum        dS = P * dP                      dK += dS^T Q    dQ += dS K  (in global memory, fp32)
dK and dV stay in fp32 registers until the end, so a group's heads and queries are summed without atomics and in a fixed
order. The CTAs of a cluster own neighbouring key blocks; each loads a part of every Q and dO block and multicasts it.
Products are transposed: rows of S^T and dP^T are keys, rows of dQ^T columns of the head dim.
`bwd_narrow` (up to head dim 128) and `bwd_wide` (192, also with values of 128, and 256) say how products are laid out.

A CTA has three warp groups. Warp 0 is the producer (bwd_load), warps 1 to 3 assist with dQ, and the other two warp
groups, warps 4 to 11 (`warp_id` 0 to 7), are the consumers, which issue the products (MMA warps). All of them go
through the same sequence of steps: step `it` is one block of query rows of one head. In the narrow kernel the last
steps may be those of the cluster's other CTA alone: Q and dO come in all `steps`, dS and dQ end after this CTA's
`own_steps` (SavedItem). Warps hand data to each other through pipelines and signals (pipeline.py). A signal has no
empty barriers; "held up by" names what keeps its producer from running ahead:

    in      pipeline      stages      full: arrivals of              empty: arrivals of
    both    K, V          1 each      the producer, and bytes;       (loaded once, never overwritten)
                                      wide: peer_K comes with K
    both    Q, with its   2           the producer, and bytes        8 MMA warps of every CTA of the cluster
            statistics
    both    dO            narrow 2,   the producer, and bytes        8 MMA warps of every CTA of the cluster
                          wide 1
    narrow  dS            1           8 MMA warps                    (the same barrier: NarrowPipelines says why)
    narrow  dQ            1 a warp    4 MMA warps of the warp group  the warp that adds this part up (1 or 2)
                          group
    wide    P             1           4 MMA warps of the first one   (held up by dS: WidePipelines says why)
    wide    dS            2           4 MMA warps of the second one  (held up by peer_dS; without dQ by P)
    wide    peer_dS       3           warp 3, and bytes of the peer  (held up by dO; of 96 rows by Q too)
    wide    dq_order      2           see DqOrder; if deterministic

Besides, warps wait at the cluster's barrier (set-up and end); at named barriers of the MMA warps, where these remove
NaN and infinity (bwd_contain); for words in global memory (`locks`), which say that dQ is cleared or whose turn it is
to add; and warp 3 for warp 1 (narrow, `dq_progress`), only so that it does not clear too far ahead.

A pipeline is declared in `pipelines`, as a field of the kernel's `...Pipelines`, which also numbers its mbarriers. To
add one:

1. Declare it there. One that some gradients do not need has 0 stages for them, as dS and dQ of the narrow kernel.
2. Add what it protects to `Shared`, `smem_order`, `allocate` and `smem_bytes`. At head dims 128 and 256 the tiles leave
   room for a few mbarriers only. What `smem_bytes` forgets is not refused when the kernel is compiled; `dualkv
   precompile` then shows 0 in the column CTA/SM.
3. Use it on both sides, in every step, also by warps that do not need the data. The producer's steps are those of
   `Producer.load_queries`, which both kernels share. The MMA warps' are `block`, `skip_block` and `release_block`
   (narrow; the last one only for what comes in all `steps`), or `values_step` and `keys_step` (wide).
4. Run, compile and compare the kernels as CONTRIBUTING.md says ("Changes to kernels"), and plant faults in
   tests/protocol/faults.py, which the simulator must find.
"""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp, warpgroup
from cutlass.utils import LayoutEnum, SmemAllocator

from cute_kernels import fakes
from cute_kernels.abi import LOCKS, STAT_COLUMNS, BlockFields, partial_floats
from cute_kernels.abi import BackwardFields as items
from cute_kernels.bwd_arguments import BackwardPipelines, Global, Item, Load, Loads, Mask, SavedItem, Shared
from cute_kernels.bwd_contain import BackwardContainment
from cute_kernels.bwd_load import Producer
from cute_kernels.bwd_results import Results, as_pairs
from cute_kernels.bwd_stats import KEYS_BYTES, by_block, fake_stats, fill_keys
from cute_kernels.cluster import check_smem
from cute_kernels.pipeline import MbarrierAllocator, Pipeline, Signal, init_mbarriers
from cute_kernels.ptx import load_of_cta, store_volatile

ITEM_WORDS = len(SavedItem._fields)
BLOCK_WORDS = 4  # of a row of the table of query blocks, for each stage


def split_rows(head_dim: int) -> bool:
    """Whether the warp groups of the main kernel share the rows of dQ, and not its columns."""
    return head_dim == 64


class BackwardFrame(Producer, BackwardContainment, Results):
    """dK and dV (or their partial sums), and dQ added up in fp32. Runs between the preprocess and the postprocess.

    Compiled once for a dtype and native head dims; at run time any T, H, Hk (H a multiple), group count, strides, and
    any head dims D <= head_dim and Dv <= head_dim_v that are multiples of 8 (the copy engine reads columns past them as
    zeros). Without head_dim_v the two are one, and Dv is D.

    Arguments of the compiled kernel, in order (`fake_arguments` builds matching fakes):
        q: [T, H, D] fp16 or bf16. T >= 1.
        k: [T, Hk, D], dtype of q.
        v: [T, Hk, Dv], dtype of q.
        dout: [T, H, Dv], dtype of q.
        stats: [H, nm * tile_m * STAT_COLUMNS] bf16 from the preprocess, nm = ceil(T / tile_m).
        dk, dv: [T, Hk, D] and [T, Hk, Dv], dtype of q, or [0] where not asked. Rows of items with partial sums are left
            alone, all others written.
        dq_acc: [H * nm * tile_m * head_dim] fp32: unscaled dQ in the order of registers, of blocks that are added to;
            before, zeros from the preprocess, or anything where `clears_ahead`. May be empty where dQ is not asked.
        partials: [n * partial_floats()] fp32 (may be empty): partial sums of dK and dV, as far as these are asked.
        locks: [lock_words(H * nm)] int32, zeros from the preprocess: LOCKS of each query block, the first of which is
            not 0 once something was added to the block's dQ; last the counter of items begun, used if deterministic.
            May be empty where dQ is not asked, and beyond head dim 128 unless deterministic.
        work: [n, 11] int32, the items of `dualkv.ops.plan.backward` in order (fields: abi.BackwardFields).
        visible_end: [T] int32.
        softmax_scale: fp32.
        stream: taken from the environment (torch's current stream), not passed.
        of the features that the kernel has, in this order:
            window: blocks [n, 4] int32, rows of abi.BlockFields, of which the items have intervals; position
                [nm * tile_m] int32, of every row on its path, anything past T; end_position [T] int32, one past the
                last position that sees each key.
            softcap: fp32 above 0: scores are softcap * tanh(softmax_scale * S / softcap).
    q, k, v, dout, dk, dv: last dimension contiguous, base address and all strides multiples of 16 bytes (8 elements).

    NaN and infinity stay with the pairs that see them: bwd_contain says how.

    Args:
        dtype: cutlass.BFloat16 or cutlass.Float16.
        head_dim: native head dim.
        head_dim_v: native head dim of v and dout, if it is another one.
        gradients: which of dQ, dK and dV are made: a part of "qkv" in that order. Products that they do not need are
            left out.
        tile_m, tile_n, stages, cluster: see codegen.tiles.BackwardTile.
        deterministic: dQ is summed in the order of the keys, so that two runs are bitwise equal. Needs a plan made for
            this, whose items wait only for items before them. Clusters take the items in that order from a counter as
            they begin to run. So no cluster waits for one that has not begun, whichever the device starts first. dK
            and dV are bitwise equal in any case. Without dQ the option changes nothing.

    Raises:
        ValueError: a configuration that does not fit, in one sentence.
    """

    HEAD_DIMS: tuple[int, ...]
    MIXED: tuple[tuple[int, int], ...] = ()  # head_dim and head_dim_v
    warp_groups = 2  # of MMA warps
    flags_ahead = False  # with a window: MMA warps read the flags of the next step
    regs_load, regs_mma = 24, 240  # registers a thread of the first warp group, and of the MMA warps

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
        deterministic: bool = False,
        features: tuple[str, ...] = (),
        head_dim_v: int | None = None,
    ) -> None:
        if dtype not in (cutlass.BFloat16, cutlass.Float16):
            raise ValueError(f"dtype is {dtype}, expected BFloat16 or Float16")
        if head_dim not in self.HEAD_DIMS:
            raise ValueError(f"head_dim is {head_dim}, expected {' or '.join(map(str, self.HEAD_DIMS))}")
        self.head_dim_v = head_dim if head_dim_v is None else head_dim_v
        if (head_dim, self.head_dim_v) not in (*((d, d) for d in self.HEAD_DIMS), *self.MIXED):
            allowed = [head_dim, *(of_v for of_qk, of_v in self.MIXED if of_qk == head_dim)]
            raise ValueError(f"head_dim_v is {head_dim_v}, expected {' or '.join(map(str, allowed))}")
        if cluster not in (1, 2):
            raise ValueError(f"got clusters of {cluster}, expected 1 or 2")
        self.dtype, self.head_dim, self.tile_m, self.tile_n = dtype, head_dim, tile_m, tile_n
        self.stages, self.cluster = stages, cluster
        self.want_dq, self.want_dk, self.want_dv = (name in gradients for name in "qkv")
        self.deterministic = deterministic and self.want_dq
        self.windowed, self.capped = "window" in features, "softcap" in features
        self.want_dp = self.want_dq or self.want_dk
        self.check_tile()
        self.divide()
        barriers = MbarrierAllocator()
        self.pipelines(barriers)
        self.num_bars = barriers.num_bars
        check_smem(self.smem_bytes(), f"head_dim {head_dim}, {tile_m} x {tile_n} and {stages} stages")

    # ---------------------------------------------------------------- what the head dims do differently
    def check_tile(self) -> None:
        """Raise ValueError for a tile that the products cannot take."""
        raise NotImplementedError

    def divide(self) -> None:
        """Divide columns among CTAs, if they are; from then on `head_dim` and `head_dim_v` are a CTA's."""

    @property
    def dq_columns(self) -> int:
        """Columns of dQ in global memory."""
        return self.head_dim

    @property
    def row_ctas(self) -> int:
        """CTAs that share Q and dO by multicast."""
        return self.cluster

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

    @property
    def smem_order(self) -> tuple[str, ...]:
        """The order of tensors in shared memory (fields of `Shared`; "small": all that is no tile), from the first
        address on; worth 1 % (docs/tuning.md, "What lies where").

        "small" is never last: memcheck takes the first operand of a product for 2 KB a warp, it seems, which then
        reached past the end (docs/sanitizers.md).
        """
        raise NotImplementedError

    def first_block(self, item: Item) -> Int32:
        """This CTA adds nothing to dQ of the item's query blocks before this one."""
        return item.block_begin

    def pipelines(self, barriers: MbarrierAllocator) -> BackwardPipelines:
        """Declare the kernel's pipelines: on the host to count their mbarriers, on the device to use them."""
        raise NotImplementedError

    def key_signals(self, barriers: MbarrierAllocator) -> tuple[Signal, Signal]:
        """K and V, which the producer loads once."""
        return Signal.make(barriers, 1, producers=1), Signal.make(barriers, 1, producers=1)

    def row_pipelines(self, barriers: MbarrierAllocator) -> tuple[Pipeline, Pipeline]:
        """Q (with the rows' statistics) and dO, from the producer to all MMA warps of the cluster."""
        warps, cluster = 4 * self.warp_groups, self.row_ctas
        Q = Pipeline.make(barriers, self.stages, producers=1, consumers=warps, cluster=cluster)
        dO = Pipeline.make(barriers, self.do_stages, producers=1, consumers=warps, cluster=cluster)
        return Q, dO

    def mma_S(self) -> cute.TiledMma:
        """S^T and dP^T of one warp group."""
        raise NotImplementedError

    def mma_dKV(self, columns: int) -> cute.TiledMma:
        """dV (64, Dv) += P^T dO of one warp group, or dK (64, D) += dS^T Q. P^T and dS^T come from registers."""
        K_major, MN_major = warpgroup.OperandMajorMode.K, warpgroup.OperandMajorMode.MN
        shape, source = (64, columns), warpgroup.OperandSource.RMEM
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, K_major, MN_major, Float32, (1, 1, 1), shape, source
        )

    def assist(
        self, g: Global, s: Shared, p: BackwardPipelines, item: Item, heads_per_kv: Int32, warp_idx: Int32
    ) -> None:
        """Warps 1, 2 and 3."""
        raise NotImplementedError

    def mma(
        self,
        g: Global,
        s: Shared,
        p: BackwardPipelines,
        item: Item,
        scale: Float32,
        heads_per_kv: Int32,
        warp_id: Int32,
    ) -> None:
        """The MMA warps, 0 to 7."""
        raise NotImplementedError

    # ---------------------------------------------------------------- sizes
    @property
    def item_words(self) -> int:
        """Words of the saved item; if deterministic, then its index in `work`."""
        return ITEM_WORDS + self.deterministic

    def smem_bytes(self) -> int:
        """Statistics, keys' columns, mbarriers and words; K and V, Q and dO stages, P and dS, dQ."""
        words = 1 + self.item_words
        small = 2 * STAT_COLUMNS * self.tile_m * self.stages + KEYS_BYTES + 8 * self.num_bars + 4 * words
        small += 4 * BLOCK_WORDS * self.stages * self.windowed
        keys = self.tile_n * (self.k_columns + self.head_dim_v + self.peer_columns)
        rows = (self.stages * self.head_dim + self.do_stages * self.head_dim_v) * self.tile_m
        probs = self.buffers * self.tile_m * self.tile_n
        return -(-small // 1024) * 1024 + 2 * (keys + rows + probs) + 4 * self.staged_floats

    def partial_floats(self) -> int:
        """Floats of the partial sums of an item: see abi.partial_floats."""
        return partial_floats(self.head_dim, self.head_dim_v, self.tile_n, self.cluster)

    def fake_arguments(self) -> tuple[object, ...]:
        """Arguments for `cute.compile(kernel, *kernel.fake_arguments(), options=...)`: dynamic shapes and strides."""
        rows, heads, kv_heads, dim = cute.sym_int32(), cute.sym_int32(), cute.sym_int32(), fakes.head_dim()
        dim_v = dim if self.head_dim_v == self.head_dim else fakes.head_dim()
        q, dout = (fakes.packed(self.dtype, rows, heads, of) for of in (dim, dim_v))
        k, v = (fakes.packed(self.dtype, rows, kv_heads, of) for of in (dim, dim_v))
        absent = fakes.flat(self.dtype, cute.sym_int32())
        dk, dv = (
            fakes.packed(self.dtype, rows, kv_heads, of) if wanted else absent
            for wanted, of in ((self.want_dk, dim), (self.want_dv, dim_v))
        )
        stats = fake_stats(heads, self.tile_m)
        work = fakes.table(items.NUM_FIELDS)
        visible_end = fakes.flat(Int32, rows)
        locks = fakes.flat(Int32, cute.sym_int64())
        dq_acc, partials = (fakes.flat(Float32, cute.sym_int64(), fakes.ALIGNMENT) for _ in range(2))
        features: list[object] = []
        if self.windowed:
            features.append(fakes.table(BlockFields.NUM_FIELDS))
            features += [fakes.flat(Int32, cute.sym_int32()) for _ in range(2)]
        if self.capped:
            features.append(Float32(0.0))
        arguments = q, k, v, dout, stats, dk, dv, dq_acc, partials, locks, work, visible_end
        return *arguments, Float32(0.0), fakes.stream(), *features

    # ---------------------------------------------------------------- host side
    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,  # (T, H, D)
        k: cute.Tensor,  # (T, Hk, D)
        v: cute.Tensor,  # (T, Hk, Dv)
        dout: cute.Tensor,  # (T, H, Dv)
        stats: cute.Tensor,  # (H, nm * M * STAT_COLUMNS)
        dk: cute.Tensor,  # (T, Hk, D)
        dv: cute.Tensor,  # (T, Hk, Dv)
        dq_acc: cute.Tensor,  # (H * nm * M * head_dim)
        partials: cute.Tensor,  # (n * partial_floats)
        locks: cute.Tensor,  # (lock_words(H * nm))
        work: cute.Tensor,  # (n, 11)
        visible_end: cute.Tensor,  # (T)
        softmax_scale: Float32,
        stream: cuda.CUstream,
        *features: object,
    ) -> None:
        left = iter(features)
        tables = [next(left) if self.windowed else None for _ in range(3)]
        cap = next(left) if self.capped else None
        stats = by_block(stats, q.shape[0], self.tile_m)
        g = Global(stats, dk, dv, dq_acc, partials, locks, work, visible_end, *tables, cap)
        self.launch(q, k, v, dout, g, softmax_scale, stream)

    def launch(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        g: Global,
        softmax_scale: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """The kernel. g: with dk and dv as they were given."""
        M, N = self.tile_m, self.tile_n
        load = cpasync.CopyBulkTensorTileG2SOp()
        load_rows = load if self.row_ctas == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp()
        Q, dO = [
            Load(*cpasync.make_tiled_tma_atom(load_rows, self.by_head(x), layout, (M, columns), self.row_ctas))
            for x, layout, columns in (
                (q, cute.select(self.layout_Q(), mode=[0, 1]), self.head_dim),
                (dout, cute.select(self.layout_dO(), mode=[0, 1]), self.head_dim_v),
            )
        ]
        K = Load(*cpasync.make_tiled_tma_atom(load, self.by_head(k), self.layout_K(), (N, self.k_columns)))
        peer_K = None
        if self.peer_columns:
            shape = (N, self.peer_columns)
            peer_K = Load(*cpasync.make_tiled_tma_atom(load, self.by_head(k), self.layout_peer_K(), shape))
        V = Load(*cpasync.make_tiled_tma_atom(load, self.by_head(v), self.layout_V(), (N, self.head_dim_v)))
        dk = as_pairs(g.dk) if self.want_dk else g.dk
        dv = as_pairs(g.dv) if self.want_dv else g.dv
        self.kernel(
            Loads(Q, dO, K, V, peer_K),
            g._replace(dk=dk, dv=dv),
            softmax_scale,
            q.shape[1] // k.shape[1],
        ).launch(
            grid=[g.work.shape[0] * self.cluster, 1, 1],
            block=[128 * (1 + self.warp_groups), 1, 1],
            cluster=[self.cluster, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    def by_head(self, x: cute.Tensor) -> cute.Tensor:
        """(T, H, D) -> (T, D, H)"""
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))

    # ---------------------------------------------------------------- layouts in shared memory
    def row_atom(self, columns: int, at_least: int = 0) -> cute.ComposedLayout:
        """The widest swizzle for rows of `columns` elements (and of `at_least`, where a view is that narrow)."""
        swizzle = hopper.get_smem_layout_atom(LayoutEnum.ROW_MAJOR, self.dtype, math.gcd(columns, at_least))
        return warpgroup.make_smem_layout_atom(swizzle, self.dtype)

    def layout_K(self) -> cute.ComposedLayout:
        atom = self.row_atom(self.k_columns, self.head_dim)
        return cute.tile_to_shape(atom, (self.tile_n, self.k_columns), (0, 1))

    def layout_V(self) -> cute.ComposedLayout:
        return cute.tile_to_shape(self.row_atom(self.head_dim_v), (self.tile_n, self.head_dim_v), (0, 1))

    def layout_peer_K(self) -> cute.ComposedLayout:
        atom = self.row_atom(self.peer_columns, self.head_dim)
        return cute.tile_to_shape(atom, (self.tile_n, self.peer_columns), (0, 1))

    def layout_Q(self) -> cute.ComposedLayout:
        return cute.tile_to_shape(self.row_atom(self.head_dim), (self.tile_m, self.head_dim, self.stages), (0, 1, 2))

    def layout_dO(self) -> cute.ComposedLayout:
        shape = self.tile_m, self.head_dim_v, self.do_stages
        return cute.tile_to_shape(self.row_atom(self.head_dim_v), shape, (0, 1, 2))

    def layout_dS(self) -> cute.ComposedLayout:
        """Keys are contiguous."""
        return cute.tile_to_shape(self.row_atom(self.tile_n), (self.tile_m, self.tile_n, self.buffers), (0, 1, 2))

    # ---------------------------------------------------------------- kernel: set-up and roles
    @cute.kernel
    def kernel(self, loads: Loads, g: Global, scale: Float32, heads_per_kv: Int32) -> None:
        warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        s = self.allocate()
        barriers = MbarrierAllocator(s.bars)
        p = self.pipelines(barriers)
        mbarriers = barriers.kinds
        if const_expr(self.deterministic):
            counter = self.lock_of(g, Int32(0), g.stats.shape[0], Int32(0))  # behind all locks
            self.take_index(warp_idx, counter, s.item + ITEM_WORDS)
        else:
            item = Item.load(g.work, cute.arch.block_idx()[0] // self.cluster, self.key_rank(), self.tile_n)
        if warp_idx == 0:
            init_mbarriers(mbarriers)
            cute.arch.mbarrier_init_fence()
            with cute.arch.elect_one():
                store_volatile(s.dq_progress, Int32(0))
            cute.arch.sync_warp()
        if warp_idx == 1:
            with cute.arch.elect_one():
                for load in (loads.K, loads.V, loads.Q, loads.dO):
                    cpasync.prefetch_descriptor(load.atom)
        if warp_idx == 2:
            self.fill_keys(s)
            cute.arch.fence_view_async_shared()
        if const_expr(self.deterministic):
            self.sync_cluster()  # the index is there
            index = cute.arch.make_warp_uniform(load_of_cta(s.item + ITEM_WORDS, 0))
            item = Item.load(g.work, index, self.key_rank(), self.tile_n)
        if warp_idx == 3:
            steps = [(item.block_end - begin) * heads_per_kv for begin in (self.first_block(item), item.block_begin)]
            self.save_item(s, SavedItem(item.kv_head, item.key, item.key_end, item.partial, *steps))
        self.arrive_cluster()
        if warp_idx == 0:  # keys are this CTA's alone: their loads do not wait for the other CTAs
            self.load_keys(loads, s, p, item)
        if warp_idx < 4:
            cute.arch.setmaxregister_decrease(self.regs_load)
            self.await_cluster()
            if warp_idx == 0:
                self.load_queries(loads, g, s, p, item, heads_per_kv)
            self.assist(g, s, p, item, heads_per_kv, warp_idx)
        else:
            cute.arch.setmaxregister_increase(self.regs_mma)
            self.mma(g, s, p, item, scale, heads_per_kv, warp_idx - 4)
        if const_expr(self.cluster > 1):
            self.sync_cluster()  # no CTA leaves while its peer may still write into it

    def allocate(self) -> Shared:
        """Shared memory, in `smem_order`."""
        layouts = {
            "K": self.layout_K,
            "V": self.layout_V,
            "Q": self.layout_Q,
            "dO": self.layout_dO,
            "dS": self.layout_dS,
        }
        if self.peer_columns:
            layouts["peer_K"] = self.layout_peer_K
        smem = SmemAllocator()
        tiles: dict[str, cute.Tensor | None] = {"dQ": None, "peer_K": None}
        blocks = None
        for name in self.smem_order:
            if name == "small":
                stats = smem.allocate_tensor(BFloat16, cute.make_layout((STAT_COLUMNS, self.tile_m, self.stages)), 128)
                stat_keys = smem.allocate_tensor(BFloat16, cute.make_layout(KEYS_BYTES // 2), 16).iterator
                bars = smem.allocate_array(Int64, self.num_bars)
                words = [smem.allocate_array(Int32, n) for n in (1, self.item_words)]
                if self.windowed:
                    blocks = smem.allocate_tensor(Int32, cute.make_layout((BLOCK_WORDS, self.stages)), 16)
            elif name in layouts:
                layout = layouts[name]()
                tiles[name] = smem.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner)
            elif self.staged_floats:
                tiles[name] = smem.allocate_tensor(Float32, cute.make_layout(self.staged_floats), 128)
        named = {"bars": bars, "dq_progress": words[0], "item": words[1], "blocks": blocks}
        return Shared(**tiles, **named, stats=stats, stat_keys=stat_keys)

    @cute.jit
    def take_index(self, warp_idx: Int32, counter: cute.Pointer, index: cute.Pointer) -> None:
        """Deterministic: the index of the cluster's item in `work`, which is the number of clusters that took one
        before, to shared memory of its first CTA."""
        if warp_idx == 3 and self.rank() == 0:
            with cute.arch.elect_one():
                store_volatile(index, cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu"))

    def fill_keys(self, s: Shared) -> None:
        """The keys' columns that statistics are multiplied with, by one warp."""
        fill_keys(s.stat_keys)

    # ---------------------------------------------------------------- MMA warp groups: what the head dims share
    def warp_group(self, warp_id: Int32) -> tuple[Int32, Int32, Int32]:
        """The warp group of an MMA warp, and the thread's number within the warp group and the warp."""
        return warp_id // 4, cute.arch.thread_idx()[0] % 128, cute.arch.lane_idx()

    def mask_of(self, g: Global, item: Item, first_key: Int32, warp_id: Int32) -> Mask:
        """Make the calling thread's mask. first_key: the first key of its warp group."""
        key, visible_end = [cute.make_rmem_tensor(2, Int32) for _ in range(2)]
        lane = cute.arch.lane_idx()
        for r in range(2):
            n = first_key + warp_id % 4 * 16 + lane // 4 + 8 * r
            key[r] = n - lane % 4 * 2
            visible_end[r] = self.visible_end(g, item, n) - lane % 4 * 2
        if const_expr(self.windowed):
            end_position = cute.make_rmem_tensor(2, Int32)
            for r in range(2):
                n = first_key + warp_id % 4 * 16 + lane // 4 + 8 * r
                end_position[r] = g.end_position[cutlass.min(n, item.key_end - 1)]
            return Mask(key, visible_end, Int32(0), Int32(0), end_position, g.position)
        return Mask(key, visible_end, item.unmasked_begin, item.unmasked_end)

    @cute.jit
    def visible_end(self, g: Global, item: Item, n: Int32) -> Int32:
        """One past the last query row that sees key n; 0 past the item's keys."""
        return g.visible_end[n] if n < item.key_end else 0

    def await_keys(self, s: Shared, p: BackwardPipelines, mask: Mask) -> Mask:
        """Wait for the set-up of the cluster and for K and V. Returns the mask, of all blocks if keys are broken."""
        self.await_cluster()
        p.K.wait(0)
        if not self.want_dp:
            return mask
        p.V.wait(0)
        return mask._replace(unmasked_begin=self.contain_keys(s, mask.unmasked_begin))

    def copy_of_dS(self) -> cute.TiledCopy:
        """The copy from the registers of an accumulator of S^T to shared memory, where keys are contiguous."""
        return cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(True, 4), self.dtype), self.mma_S())

    @cute.jit
    def next_block(self, m_block: Int32, h: Int32, item: Item, heads_per_kv: Int32) -> tuple[Int32, Int32]:
        """Query block and head of the next step; see `Producer.load_queries`."""
        h += 1
        if h == (item.kv_head + 1) * heads_per_kv:
            h = item.kv_head * heads_per_kv
            m_block -= 1
        return m_block, h

    def dq_block(self, dq_acc: cute.Pointer, num_blocks: Int32, m_block: Int32, h: Int32) -> cute.Pointer:
        """The address where dQ of a query block of a head is added up; `num_blocks`: of a head."""
        return dq_acc + (Int64(h) * num_blocks + m_block) * (self.tile_m * self.dq_columns)

    def lock_of(self, g: Global, m_block: Int32, h: Int32, which: Int32 | int) -> cute.Pointer:
        """One of the locks of a query block of a head."""
        return g.locks.iterator + ((Int64(h) * g.stats.shape[1] + m_block) * LOCKS + which)

    def transposed(self, x: cute.Tensor) -> cute.Tensor:
        """The transposed view of a tile in shared memory, or of a ring of tiles."""
        modes = [1, 0, 2] if cute.rank(x) == 3 else [1, 0]
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=modes))
