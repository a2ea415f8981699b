"""Faults put into the kernels' sources, each of which the simulator has to find.

Each is a name, the case that finds it, and edits: (file, text that it has once, what takes its place).
"""

from __future__ import annotations

from typing import NamedTuple


class Planted(NamedTuple):
    name: str
    case: str
    edits: tuple[tuple[str, str, str], ...]


def _one(name: str, case: str, file: str, old: str, new: str) -> Planted:
    return Planted(name, case, ((file, old, new),))


SINGLE_DS = Planted(  # as it was: hangs were seen on the GPU
    "dS of the wide backward on one barrier",
    "bwd_wide d256 do_stages 1",
    (
        ("bwd_wide.py", '("DS", 2, 4)', '("DS", 1, 4)'),
        (
            "bwd_wide.py",
            "            slot, phase = self.ring(it, 2)\n            cute.arch.mbarrier_wait(bars + self.DS + slot, phase)\n",
            "            cute.arch.mbarrier_wait(bars + self.DS, it & 1)\n",
        ),
        (
            "bwd_wide.py",
            "        slot, phase = self.ring(it, 2)\n        cute.arch.mbarrier_wait(state.bars + self.DS + slot, phase)\n",
            "        cute.arch.mbarrier_wait(state.bars + self.DS, it & 1)\n",
        ),
        ("bwd_wide.py", "mbarrier_arrive(s.bars + self.DS + it % 2)", "mbarrier_arrive(s.bars + self.DS)"),
    ),
)

NARROW, WIDE, FWD = "bwd_narrow d128", "bwd_wide d256 do_stages 1", "fwd d128"
END_OF_BLOCK = "        warpgroup.wait_group(0)\n        self.release(s.bars + self.EMPTY_Q + stage)\n"

PLANTED = [
    SINGLE_DS,
    # both backwards
    _one("one arrival too few expected", WIDE, "bwd_frame.py", "users = 4 * self.warp_groups * self.cluster", "users = 4 * self.warp_groups * self.cluster - 1"),
    _one("a CTA leaves early", WIDE, "bwd_frame.py", "            self.sync_cluster()  # no CTA leaves while its peer may still write into it", "            pass"),
    _one("a stage is loaded before it is empty", NARROW, "bwd_load.py", "        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)\n", ""),
    _one("a wait with the other parity", NARROW, "bwd_load.py", "cute.arch.mbarrier_wait(empty + stage, phase ^ 1)", "cute.arch.mbarrier_wait(empty + stage, phase)"),
    _one("too many bytes expected", NARROW, "bwd_load.py", "size = 2 * self.tile_m * STAT_COLUMNS", "size = 4 * self.tile_m * STAT_COLUMNS"),
    _one("every lane arrives", "bwd_narrow d128 cluster 1", "cluster.py", "            with cute.arch.elect_one():\n                cute.arch.mbarrier_arrive(bar)", "            cute.arch.mbarrier_arrive(bar)"),
    _one("items in the order of the grid", WIDE + " deterministic", "bwd_frame.py", "cute.arch.make_warp_uniform(load_of_cta(kept + KEPT, 0))", "cute.arch.block_idx()[0] // self.cluster"),
    _one("the item before it is known", NARROW + " deterministic", "bwd_frame.py", "            self.sync_cluster()  # the index is there\n", ""),
    # the wide one
    _one("Q is not released", WIDE, "bwd_wide.py", END_OF_BLOCK, "        warpgroup.wait_group(0)\n"),
    _one("Q is released before it is read", WIDE, "bwd_wide.py", END_OF_BLOCK, "        self.release(s.bars + self.EMPTY_Q + stage)\n        warpgroup.wait_group(0)\n"),
    _one("dS is sent before it is there", WIDE, "bwd_wide.py", "            cute.arch.mbarrier_wait(bars + self.DS + slot, phase)\n            full", "            full"),
    _one("P is read before it is there", WIDE, "bwd_wide.py", "            cute.arch.mbarrier_wait(s.bars + self.P, it & 1)\n", ""),
    _one("P is overwritten before it is read", WIDE, "bwd_wide.py", "                self.await_dS(s, it - 1)\n            for c", "                pass\n            for c"),
    _one("dS of the other CTA before it is there", WIDE, "bwd_wide.py", "        cute.arch.mbarrier_wait(state.bars + self.PEER + slot, phase)\n", ""),
    _one("two buffers for dS of the other CTA", WIDE, "bwd_wide.py", "return self.buffers - 3 + it % 3", "return self.buffers - 3 + it % 2"),
    _one("one buffer for dS", WIDE, "bwd_wide.py", "return 1 + it % (self.do_stages + 1)", "return 1 + it % self.do_stages"),
    _one("dS without a fence", WIDE, "bwd_wide.py", "                cute.arch.fence_view_async_shared()\n            cute.arch.sync_warp()", "            cute.arch.sync_warp()"),
    _one("no turn is awaited", WIDE + " deterministic", "bwd_wide.py", "        self.await_turn(state.bars, it)\n", ""),
    _one("a turn is passed on early", WIDE + " deterministic", "bwd_wide.py", "                cute.arch.mbarrier_wait(bars + self.ADDED + slot, phase)\n", ""),
    _one("the turn of another block", WIDE + " deterministic", "bwd_wide.py", "while load_acquire(lock) != expected:", "while load_acquire(lock) < expected - 1:"),
    # the narrow one
    _one("Q is not released", NARROW, "bwd_narrow.py", END_OF_BLOCK, "        warpgroup.wait_group(0)\n"),
    _one("Q is released before it is read", NARROW, "bwd_narrow.py", END_OF_BLOCK, "        self.release(s.bars + self.EMPTY_Q + stage)\n        warpgroup.wait_group(0)\n"),
    _one("a block that is left out is not released", NARROW, "bwd_narrow.py", "        self.release(s.bars + self.EMPTY_DO + stage)\n        self.release(s.bars + self.EMPTY_Q + stage)\n\n", "        self.release(s.bars + self.EMPTY_Q + stage)\n\n"),
    _one("dS is overwritten before it is read", NARROW, "bwd_narrow.py", "        cute.arch.mbarrier_wait(state.bars + self.MET, it & 1 ^ 1)\n", ""),
    _one("one buffer for dS", NARROW, "bwd_narrow.py", "dst = state.dS_dst[None, None, None, it % self.buffers]", "dst = state.dS_dst[None, None, None, 0]"),
    _one("dS without a fence", NARROW, "bwd_narrow.py", "        cute.copy(state.copy_dS, state.copy_dS.get_slice(state.tid).retile(source), dst)\n        cute.arch.fence_view_async_shared()\n", "        cute.copy(state.copy_dS, state.copy_dS.get_slice(state.tid).retile(source), dst)\n"),
    _one("seven warps meet", NARROW, "bwd_narrow.py", '("MET", 1, 8)', '("MET", 1, 7)'),
    _one("dQ is overwritten before it has left", NARROW, "bwd_narrow.py", "        cute.arch.mbarrier_wait(state.bars + self.FREE + warp_id // 4, it & 1 ^ 1)\n", ""),
    _one("dQ leaves before it is there", NARROW, "bwd_narrow.py", "                    pass\n                cute.arch.sync_warp()\n                cute.arch.mbarrier_wait(bars + self.STAGED + wg, it & 1)\n                with cute.arch.elect_one():\n                    bulk_add", "                    pass\n                cute.arch.sync_warp()\n                with cute.arch.elect_one():\n                    bulk_add"),
    _one("dQ's place is let go before it is read", NARROW, "bwd_narrow.py", "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),
    _one("added to before it is cleared", NARROW, "bwd_narrow.py", "                while load_acquire(self.lock_of(locks, h, num_blocks, mb, 0)) != CLEARED:\n                    pass\n", ""),
    _one("said to be cleared too early", NARROW, "bwd_narrow.py", "val=Int32(CLAIMED)", "val=Int32(CLEARED)"),
    _one("no turn is awaited", NARROW + " deterministic", "bwd_narrow.py", "                while load_acquire(lock) != turn:\n                    pass\n", ""),
    _one("a turn is passed on before the sums are in memory", NARROW + " deterministic", "bwd_narrow.py", "                    cute.arch.cp_async_bulk_wait_group(0)\n", ""),
    # the forward
    _one("V is not released", FWD, "fwd.py", "        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n", ""),
    _one("V is released before it is read", FWD, "fwd.py", "        warpgroup.wait_group(0)\n        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n", "        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n        warpgroup.wait_group(0)\n"),
    _one("K is released before it is read", FWD, "fwd.py", "        warpgroup.wait_group(1)\n", ""),
    _one("V is read before it is there", FWD, "fwd.py", "        cute.arch.mbarrier_wait(bars + self.FULL_V + v_stage, v_phase)\n", ""),
    _one("the probabilities change while they are read", FWD, "fwd.py", "        warpgroup.wait_group(0)\n        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n        round_to(acc_S, x.tOrP)\n", "        round_to(acc_S, x.tOrP)\n        warpgroup.wait_group(0)\n        self.arrive(bars + self.EMPTY_V + self.ring(at)[0])\n"),
    _one("a block that is left out is not awaited", FWD, "fwd.py", "            cute.arch.mbarrier_wait(bars + full + stage, phase)\n            self.arrive", "            self.arrive"),
    _one("Q is loaded over O", FWD, "fwd.py", "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),
    _one("O is stored before all warps wrote it", FWD, "fwd.py", "            cute.arch.fence_view_async_shared()\n            cute.arch.barrier(barrier_id=BAR_WG + wg, number_of_threads=128)\n            if warp_id", "            cute.arch.fence_view_async_shared()\n            if warp_id"),
    _one("O is stored again while it is stored", FWD, "fwd.py", "            cute.arch.cp_async_bulk_wait_group(0)  # O is out: the next turn may store it again, and the CTA may end\n", ""),
    _one("a CTA leaves early", FWD, "fwd_frame.py", "        self.sync_cluster()\n        return s.again[0]", "        return s.again[0]"),
    _one("one arrival too few expected", FWD, "fwd_frame.py", "readers = 4 * self.warp_groups * self.cluster", "readers = 4 * self.warp_groups * self.cluster - 1"),
    _one("a stage is loaded before it is empty", FWD, "fwd_frame.py", "        cute.arch.mbarrier_wait(empty + stage, phase ^ 1)\n", ""),
    _one("the item is written after Q is said to be there", FWD, "fwd_frame.py", "            cute.arch.mbarrier_wait(s.bars + self.EMPTY_Q + place, phase)\n", ""),
    _one("a key block is left out", "fwd_paths d128", "fwd_paths.py", "        self.run[1] -= 1\n", "        self.run[1] -= 2\n"),
]
