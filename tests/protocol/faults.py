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


WIDE, NARROW, FWD, PATHS = "bwd_wide d256", "bwd_narrow d128", "fwd d128", "fwd_paths d128"
WIDE_IN_ORDER, NARROW_IN_ORDER = f"{WIDE} deterministic", f"{NARROW} deterministic"
END_OF_STEP = "        warpgroup.wait_group(0)\n        p.Q.consumer_release(stage)\n"

SINGLE_DS = Planted(  # an earlier version: the GPU hung
    "dS of the wide backward on one barrier",
    WIDE,
    (("bwd_wide.py", "dS=Signal.make(barriers, 2, producers=4)", "dS=Signal.make(barriers, 1, producers=4)"),),
)


def one(name: str, case: str, *edit: str) -> Planted:
    file, old, new = edit
    return Planted(name, case, ((file, old, new),))


PLANTED = [
    SINGLE_DS,
    one(
        "an empty barrier does not count the other CTA",
        WIDE,
        "pipeline.py",
        "consumers * cluster), cluster)",
        "consumers), cluster)",
    ),
    one(
        "a pipeline's producer waits for the other phase",
        NARROW,
        "pipeline.py",
        "cute.arch.mbarrier_wait(self.empty[stage.index], stage.phase ^ 1)",
        "cute.arch.mbarrier_wait(self.empty[stage.index], stage.phase)",
    ),
    one(
        "a consumer does not wait",
        NARROW,
        "pipeline.py",
        '        """Wait until the stage is full."""\n        self.full.wait(stage)\n',
        '        """Wait until the stage is full."""\n',
    ),
    one(
        "every lane arrives",
        "bwd_narrow d128 cluster 1",
        "pipeline.py",
        "        with cute.arch.elect_one():\n            cute.arch.mbarrier_arrive(bar)\n",
        "        cute.arch.mbarrier_arrive(bar)\n",
    ),
    one(
        "a consumer releases its own CTA's stage only",
        WIDE,
        "pipeline.py",
        "cute.arch.mbarrier_arrive(bar, cute.arch.lane_idx())",
        "cute.arch.mbarrier_arrive(bar)",
    ),
    one(
        "one arrival too few expected",
        WIDE,
        "bwd_wide.py",
        '"consumers": warps,',
        '"consumers": warps - 1,',
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
        "        pipeline.producer_acquire(stage)\n",
        "",
    ),
    one(
        "too many bytes expected",
        NARROW,
        "bwd_load.py",
        "stat_bytes = 2 * self.tile_m * STAT_COLUMNS",
        "stat_bytes = 4 * self.tile_m * STAT_COLUMNS",
    ),
    one(
        "items in the order of the grid",
        WIDE_IN_ORDER,
        "bwd_frame.py",
        "cute.arch.make_warp_uniform(load_of_cta(s.item + ITEM_WORDS, 0))",
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
        END_OF_STEP,
        "        warpgroup.wait_group(0)\n",
    ),
    one(
        "Q is released before it is read",
        WIDE,
        "bwd_wide.py",
        END_OF_STEP,
        "        p.Q.consumer_release(stage)\n        warpgroup.wait_group(0)\n",
    ),
    one(
        "dS is sent before it is there",
        WIDE,
        "bwd_wide.py",
        "            p.dS.wait(it)\n            bar",
        "            bar",
    ),
    one(
        "P is read before it is there",
        WIDE,
        "bwd_wide.py",
        "            p.P.wait(it)\n",
        "",
    ),
    one(
        "P is overwritten before it is read",
        WIDE,
        "bwd_wide.py",
        "                p.dS.wait(it - 1)\n            for c",
        "                pass\n            for c",
    ),
    one(
        "dS of the other CTA before it is there",
        WIDE,
        "bwd_wide.py",
        "        p.peer_dS.wait(it)\n",
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
        "one barrier for dS of the other CTA",
        WIDE,
        "bwd_wide.py",
        "peer_dS=Signal.make(barriers, 3, producers=1)",
        "peer_dS=Signal.make(barriers, 1, producers=1)",
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
        "self.own_dS(it)])\n        cute.arch.fence_view_async_shared()\n",
        "self.own_dS(it)])\n",
    ),
    one(
        "dQ is added without a grant",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "            p.dq_order.granted.wait(it)\n",
        "            pass\n",
    ),
    one(
        "a block is passed on before this CTA has added",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "                p.dq_order.added.wait(it)\n",
        "",
    ),
    one(
        "a grant for another block",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "while load_acquire(lock) != before:",
        "while load_acquire(lock) < before - 1:",
    ),
    one(
        "grants run ahead",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "                p.dq_order.passed.wait_previous(it)\n",
        "",
    ),
    one(
        "Q is not released",
        NARROW,
        "bwd_narrow.py",
        END_OF_STEP,
        "        warpgroup.wait_group(0)\n",
    ),
    one(
        "Q is released before it is read",
        NARROW,
        "bwd_narrow.py",
        END_OF_STEP,
        "        p.Q.consumer_release(stage)\n        warpgroup.wait_group(0)\n",
    ),
    one(
        "a block that is skipped is not released",
        NARROW,
        "bwd_narrow.py",
        "        p.dO.consumer_release(stage)\n        p.Q.consumer_release(stage)\n\n",
        "        p.Q.consumer_release(stage)\n\n",
    ),
    one(
        "dS is overwritten before it is read",
        NARROW,
        "bwd_narrow.py",
        "        p.dS.wait_previous(it)\n",
        "",
    ),
    one(
        "one buffer for dS",
        NARROW,
        "bwd_narrow.py",
        "x.dS_target[None, None, None, it % self.buffers]",
        "x.dS_target[None, None, None, 0]",
    ),
    one(
        "dS without a fence",
        NARROW,
        "bwd_narrow.py",
        "retile(source), target)\n        cute.arch.fence_view_async_shared()\n",
        "retile(source), target)\n",
    ),
    one(
        "dS counts seven warps",
        NARROW,
        "bwd_narrow.py",
        "dS=Signal.make(barriers, with_dq, producers=warps)",
        "dS=Signal.make(barriers, with_dq, producers=warps - 1)",
    ),
    one(
        "dQ is overwritten before the copy engine has read it",
        NARROW,
        "bwd_narrow.py",
        "        p.dQ.producer_acquire(stage)\n",
        "",
    ),
    one(
        "dQ leaves before it is there",
        NARROW,
        "bwd_narrow.py",
        "                    pass\n"
        "                cute.arch.sync_warp()\n"
        "                p.dQ.consumer_wait(stage)\n"
        "                with cute.arch.elect_one():\n"
        "                    bulk_add",
        "                    pass\n"
        "                cute.arch.sync_warp()\n"
        "                with cute.arch.elect_one():\n"
        "                    bulk_add",
    ),
    one(
        "dQ's stage is released before it is read",
        NARROW,
        "bwd_narrow.py",
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "",
    ),
    one(
        "added to before it is cleared",
        NARROW,
        "bwd_narrow.py",
        "                while load_acquire(self.lock_of(g, m_block, h, 0)) != CLEARED:\n                    pass\n",
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
        "predecessors are not awaited",
        NARROW_IN_ORDER,
        "bwd_narrow.py",
        "                while load_acquire(lock) != before:\n                    pass\n",
        "",
    ),
    one(
        "a block is passed on before the sums are in memory",
        NARROW_IN_ORDER,
        "bwd_narrow.py",
        "                    cute.arch.cp_async_bulk_wait_group(0)\n",
        "",
    ),
    one(
        "V is not released",
        FWD,
        "fwd.py",
        "        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n",
        "",
    ),
    one(
        "V is released before it is read",
        FWD,
        "fwd.py",
        "        warpgroup.wait_group(0)\n        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n",
        "        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n        warpgroup.wait_group(0)\n",
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
        "        cute.arch.mbarrier_wait(bars + self.FULL_V + v_stage, v_phase)\n",
        "",
    ),
    one(
        "the probabilities change while they are read",
        FWD,
        "fwd.py",
        "        warpgroup.wait_group(0)\n"
        "        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n"
        "        round_to(acc_S, x.tOrP)\n",
        "        round_to(acc_S, x.tOrP)\n"
        "        warpgroup.wait_group(0)\n"
        "        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n",
    ),
    one(
        "a block that is left out is not awaited",
        FWD,
        "fwd.py",
        "            cute.arch.mbarrier_wait(bars + full + stage, phase)\n            self.arrive",
        "            self.arrive",
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
        "            if warp_id",
        "            cute.arch.fence_view_async_shared()\n            if warp_id",
    ),
    one(
        "O is stored again while it is stored",
        FWD,
        "fwd.py",
        "            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the next turn may store it"
        " again, and the CTA may end\n",
        "",
    ),
    one(
        "a CTA leaves early",
        FWD,
        "fwd_frame.py",
        "        self.sync_cluster()\n        return s.again[0]",
        "        return s.again[0]",
    ),
    one(
        "one arrival too few expected",
        FWD,
        "fwd_frame.py",
        "readers = 4 * self.warp_groups * self.cluster",
        "readers = 4 * self.warp_groups * self.cluster - 1",
    ),
    one(
        "a stage is loaded before it is empty",
        FWD,
        "fwd_frame.py",
        "        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)\n",
        "",
    ),
    one(
        "the item is written after Q is said to be there",
        FWD,
        "fwd_frame.py",
        "            cute.arch.mbarrier_wait(s.bars + self.EMPTY_Q + place, phase)\n",
        "",
    ),
    one(
        "a key block is left out",
        PATHS,
        "fwd_paths.py",
        "        self.run[1] -= 1\n",
        "        self.run[1] -= 2\n",
    ),
]
