"""Faults put into the kernels' sources, each of which the simulator has to find."""

from __future__ import annotations

from typing import NamedTuple


class Planted(NamedTuple):
    """
    Attributes:
        name: what is wrong.
        case: it is found in this one.
        edits: (file, text that it has once, what takes its place).
    """

    name: str
    case: str
    edits: tuple[tuple[str, str, str], ...]


WIDE, NARROW, FWD, PATHS = "bwd_wide d256 do_stages 1", "bwd_narrow d128", "fwd d128", "fwd_paths d128"
WIDE_IN_ORDER, NARROW_IN_ORDER = f"{WIDE} deterministic", f"{NARROW} deterministic"
RELEASE_V = "V.consumer_release(V.stage(it), sync_warp=False)\n"
END_OF_BLOCK = "        warpgroup.wait_group(0)\n        self.release(s.bars + self.EMPTY_Q + stage)\n"

SINGLE_DS = Planted(  # as it was: the GPU hung
    "dS of the wide backward on one barrier",
    WIDE,
    (
        (
            "bwd_wide.py",
            '("DS", 2, 4)',
            '("DS", 1, 4)',
        ),
        (
            "bwd_wide.py",
            "            slot, phase = self.ring(it, 2)\n"
            "            cute.arch.mbarrier_wait(bars + self.DS + slot, phase)\n",
            "            cute.arch.mbarrier_wait(bars + self.DS, it & 1)\n",
        ),
        (
            "bwd_wide.py",
            "        slot, phase = self.ring(it, 2)\n"
            "        cute.arch.mbarrier_wait(state.bars + self.DS + slot, phase)\n",
            "        cute.arch.mbarrier_wait(state.bars + self.DS, it & 1)\n",
        ),
        (
            "bwd_wide.py",
            "mbarrier_arrive(s.bars + self.DS + it % 2)",
            "mbarrier_arrive(s.bars + self.DS)",
        ),
    ),
)


def one(name: str, case: str, *edit: str) -> Planted:
    file, old, new = edit
    return Planted(name, case, ((file, old, new),))


PLANTED = [
    SINGLE_DS,
    one(
        "one arrival too few expected",
        WIDE,
        "bwd_frame.py",
        "users = 4 * self.warp_groups * self.cluster",
        "users = 4 * self.warp_groups * self.cluster - 1",
    ),
    one(
        "a CTA leaves early",
        WIDE,
        "bwd_frame.py",
        "            self.sync_cluster()  # no CTA leaves while its peer may still write into it",
        "            pass",
    ),
    one(
        "a stage is loaded before it is empty",
        NARROW,
        "bwd_load.py",
        "        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)\n",
        "",
    ),
    one(
        "a wait with the other parity",
        NARROW,
        "bwd_load.py",
        "cute.arch.mbarrier_wait(empty + stage, phase ^ 1)",
        "cute.arch.mbarrier_wait(empty + stage, phase)",
    ),
    one(
        "too many bytes expected",
        NARROW,
        "bwd_load.py",
        "size = 2 * self.tile_m * STAT_COLUMNS",
        "size = 4 * self.tile_m * STAT_COLUMNS",
    ),
    one(
        "every lane arrives",
        "bwd_narrow d128 cluster 1",
        "cluster.py",
        "            with cute.arch.elect_one():\n                cute.arch.mbarrier_arrive(bar)",
        "            cute.arch.mbarrier_arrive(bar)",
    ),
    one(
        "items in the order of the grid",
        WIDE_IN_ORDER,
        "bwd_frame.py",
        "cute.arch.make_warp_uniform(load_of_cta(kept + KEPT, 0))",
        "cute.arch.block_idx()[0] // self.cluster",
    ),
    one(
        "the item before it is known",
        NARROW_IN_ORDER,
        "bwd_frame.py",
        "            self.sync_cluster()  # the index is there\n",
        "",
    ),
    one(
        "Q is not released",
        WIDE,
        "bwd_wide.py",
        END_OF_BLOCK,
        "        warpgroup.wait_group(0)\n",
    ),
    one(
        "Q is released before it is read",
        WIDE,
        "bwd_wide.py",
        END_OF_BLOCK,
        "        self.release(s.bars + self.EMPTY_Q + stage)\n        warpgroup.wait_group(0)\n",
    ),
    one(
        "dS is sent before it is there",
        WIDE,
        "bwd_wide.py",
        "            cute.arch.mbarrier_wait(bars + self.DS + slot, phase)\n            full",
        "            full",
    ),
    one(
        "P is read before it is there",
        WIDE,
        "bwd_wide.py",
        "            cute.arch.mbarrier_wait(s.bars + self.P, it & 1)\n",
        "",
    ),
    one(
        "P is overwritten before it is read",
        WIDE,
        "bwd_wide.py",
        "                self.await_dS(s, it - 1)\n            for c",
        "                pass\n            for c",
    ),
    one(
        "dS of the other CTA before it is there",
        WIDE,
        "bwd_wide.py",
        "        cute.arch.mbarrier_wait(state.bars + self.PEER + slot, phase)\n",
        "",
    ),
    one(
        "two buffers for dS of the other CTA",
        WIDE,
        "bwd_wide.py",
        "return self.buffers - 3 + it % 3",
        "return self.buffers - 3 + it % 2",
    ),
    one(
        "one buffer for dS",
        WIDE,
        "bwd_wide.py",
        "return 1 + it % (self.do_stages + 1)",
        "return 1 + it % self.do_stages",
    ),
    one(
        "dS without a fence",
        WIDE,
        "bwd_wide.py",
        "                cute.arch.fence_view_async_shared()\n            cute.arch.sync_warp()",
        "            cute.arch.sync_warp()",
    ),
    one(
        "no turn is awaited",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "        self.await_turn(state.bars, it)\n",
        "",
    ),
    one(
        "a turn is passed on early",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "                cute.arch.mbarrier_wait(bars + self.ADDED + slot, phase)\n",
        "",
    ),
    one(
        "the turn of another block",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "while load_acquire(lock) != expected:",
        "while load_acquire(lock) < expected - 1:",
    ),
    one(
        "Q is not released",
        NARROW,
        "bwd_narrow.py",
        END_OF_BLOCK,
        "        warpgroup.wait_group(0)\n",
    ),
    one(
        "Q is released before it is read",
        NARROW,
        "bwd_narrow.py",
        END_OF_BLOCK,
        "        self.release(s.bars + self.EMPTY_Q + stage)\n        warpgroup.wait_group(0)\n",
    ),
    one(
        "a block that is left out is not released",
        NARROW,
        "bwd_narrow.py",
        "        self.release(s.bars + self.EMPTY_DO + stage)\n        self.release(s.bars + self.EMPTY_Q + stage)\n\n",
        "        self.release(s.bars + self.EMPTY_Q + stage)\n\n",
    ),
    one(
        "dS is overwritten before it is read",
        NARROW,
        "bwd_narrow.py",
        "        cute.arch.mbarrier_wait(state.bars + self.MET, it & 1 ^ 1)\n",
        "",
    ),
    one(
        "one buffer for dS",
        NARROW,
        "bwd_narrow.py",
        "dst = state.dS_dst[None, None, None, it % self.buffers]",
        "dst = state.dS_dst[None, None, None, 0]",
    ),
    one(
        "dS without a fence",
        NARROW,
        "bwd_narrow.py",
        "        cute.copy(state.copy_dS, state.copy_dS.get_slice(state.tid).retile(source), dst)\n"
        "        cute.arch.fence_view_async_shared()\n",
        "        cute.copy(state.copy_dS, state.copy_dS.get_slice(state.tid).retile(source), dst)\n",
    ),
    one(
        "seven warps meet",
        NARROW,
        "bwd_narrow.py",
        '("MET", 1, 8)',
        '("MET", 1, 7)',
    ),
    one(
        "dQ is overwritten before it has left",
        NARROW,
        "bwd_narrow.py",
        "        cute.arch.mbarrier_wait(state.bars + self.FREE + warp_id // 4, it & 1 ^ 1)\n",
        "",
    ),
    one(
        "dQ leaves before it is there",
        NARROW,
        "bwd_narrow.py",
        "                    pass\n"
        "                cute.arch.sync_warp()\n"
        "                cute.arch.mbarrier_wait(bars + self.STAGED + wg, it & 1)\n"
        "                with cute.arch.elect_one():\n"
        "                    bulk_add",
        "                    pass\n"
        "                cute.arch.sync_warp()\n"
        "                with cute.arch.elect_one():\n"
        "                    bulk_add",
    ),
    one(
        "dQ's place is let go before it is read",
        NARROW,
        "bwd_narrow.py",
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "",
    ),
    one(
        "added to before it is cleared",
        NARROW,
        "bwd_narrow.py",
        "                while load_acquire(self.lock_of(locks, h, num_blocks, mb, 0)) != CLEARED:\n"
        "                    pass\n",
        "",
    ),
    one(
        "said to be cleared too early",
        NARROW,
        "bwd_narrow.py",
        "val=Int32(CLAIMED)",
        "val=Int32(CLEARED)",
    ),
    one(
        "no turn is awaited",
        NARROW_IN_ORDER,
        "bwd_narrow.py",
        "                while load_acquire(lock) != turn:\n                    pass\n",
        "",
    ),
    one(
        "a turn is passed on before the sums are in memory",
        NARROW_IN_ORDER,
        "bwd_narrow.py",
        "                    cute.arch.cp_async_bulk_wait_group(0)\n",
        "",
    ),
    one(
        "V is not released",
        FWD,
        "fwd.py",
        f"        {RELEASE_V}",
        "",
    ),
    one(
        "V is released before it is read",
        FWD,
        "fwd.py",
        f"        warpgroup.wait_group(0)\n        {RELEASE_V}",
        f"        {RELEASE_V}        warpgroup.wait_group(0)\n",
    ),
    one(
        "K is released before it is read",
        FWD,
        "fwd.py",
        "        warpgroup.wait_group(1)\n",
        "",
    ),
    one(
        "V is read before it is there",
        FWD,
        "fwd.py",
        "        V.consumer_wait(v_stage)\n",
        "",
    ),
    one(
        "the probabilities change while they are read",
        FWD,
        "fwd.py",
        f"        warpgroup.wait_group(0)\n        {RELEASE_V}        round_to(acc_S, state.tOrP)\n",
        f"        round_to(acc_S, state.tOrP)\n        warpgroup.wait_group(0)\n        {RELEASE_V}",
    ),
    one(
        "a skipped block is not awaited",
        FWD,
        "fwd.py",
        "            pipeline.consumer_wait(stage)\n",
        "",
    ),
    one(
        "Q is loaded over O",
        FWD,
        "fwd.py",
        "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "",
    ),
    one(
        "O is stored before all warps wrote it",
        FWD,
        "fwd.py",
        "            cute.arch.fence_view_async_shared()\n"
        "            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)\n"
        "            if part.thread",
        "            cute.arch.fence_view_async_shared()\n            if part.thread",
    ),
    one(
        "the recompute pass stores O while it is being stored",
        FWD,
        "fwd.py",
        "            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the recompute pass may store it"
        ", and the CTA may end\n",
        "",
    ),
    one(
        "a CTA leaves early",
        FWD,
        "fwd_frame.py",
        "        self.sync_cluster()\n        return s.recompute[0]",
        "        return s.recompute[0]",
    ),
    one(
        "one arrival too few expected",
        FWD,
        "fwd_frame.py",
        "4 * self.warp_groups  # MMA warps of a CTA",
        "4 * self.warp_groups - 1",
    ),
    one(
        "a stage is loaded before it is empty",
        FWD,
        "fwd_load.py",
        "        pipeline.producer_acquire(stage)\n",
        "",
    ),
    one(
        "Q is loaded before its stage is released",
        FWD,
        "fwd_frame.py",
        "        self.empty.wait(Stage(stage.index, self.stage(count + 1 - self.q_stages, wg).phase))\n",
        "",
    ),
    one(
        "a key block is left out",
        PATHS,
        "work.py",
        "        self.run[1] -= 1\n",
        "        self.run[1] -= 2\n",
    ),
]
