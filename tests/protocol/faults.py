"""Faults put into the kernels' sources, each of which the simulator has to find.

`python -m pytest tests/protocol -n0 -k 'found and bwd_narrow'` tries those of the cases whose names begin so. To read
what the simulator says of one, make its edit by hand and run `python -m tests.protocol --kernel CASE`.
"""

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
SPLIT, SPLIT_FWD = "bwd_split d512", "fwd d512"
WIDE_WINDOW, NARROW_WINDOW = f"{WIDE} window", f"{NARROW} window"
END_OF_STEP = "        warpgroup.wait_group(0)\n        p.Q.consumer_release(stage)\n"
RELEASE_V = "V.consumer_release(V.stage(it), sync_warp=False)\n"

SINGLE_DS = Planted(  # an earlier version: the GPU hung
    "dS of the wide backward on one barrier",
    WIDE,
    (("bwd_wide.py", "dS = Signal.make(barriers, 2, producers=4)", "dS = Signal.make(barriers, 1, producers=4)"),),
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
        "bwd_narrow d128 few keys",
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
        "bwd_frame.py",
        "Pipeline.make(barriers, self.stages, producers=1, consumers=warps,",
        "Pipeline.make(barriers, self.stages, producers=1, consumers=warps - 1,",
    ),
    one(
        "a CTA leaves early",
        WIDE,
        "bwd_frame.py",
        "            self.sync_cluster()  # no CTA leaves while its peer may still write into it",
        "            pass",
    ),
    one(
        "a stage is loaded before it is empty", NARROW, "bwd_load.py", "        pipeline.producer_acquire(stage)\n", ""
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
    one("Q is not released", WIDE, "bwd_wide.py", END_OF_STEP, "        warpgroup.wait_group(0)\n"),
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
        "            p.dS.wait(it)\n            if const_expr(self.peer_buffers",
        "            if const_expr(self.peer_buffers",
    ),
    one("P is read before it is there", WIDE, "bwd_wide.py", "            p.P.wait(it)\n", ""),
    one(
        "P is overwritten before it is read",
        WIDE,
        "bwd_wide.py",
        "                p.dS.wait(it - 1)\n            for c",
        "                pass\n            for c",
    ),
    one("dS of the other CTA before it is there", WIDE, "bwd_wide.py", "        p.peer_dS.wait(it)\n", ""),
    one(
        "two buffers for dS of the other CTA",
        WIDE,
        "bwd_wide.py",
        "+ it % self.peer_buffers",
        "+ it % 2",
    ),
    one(
        "two buffers for dS of the other CTA, and no wait for its second warp group",
        "bwd_wide d192v128",
        "bwd_wide.py",
        "                p.Q.producer_acquire(p.Q.stage(it + 1))",
        "                pass",
    ),
    one(
        "V of as many bytes as K",
        "bwd_wide d192v128",
        "bwd_load.py",
        "(item.key, 0), s.V, self.head_dim_v, p.V)",
        "(item.key, 0), s.V, self.head_dim, p.V)",
    ),
    one(
        "dO of as many bytes as Q",
        "bwd_wide d192v128 kv",
        "bwd_load.py",
        "self.tile_m * columns * 2 + extra_bytes)",
        "self.tile_m * self.head_dim * 2 + extra_bytes)",
    ),
    one(
        "V of as many bytes as K in the forward",
        "fwd d192v128",
        "fwd_load.py",
        "self.tile_n * columns * 2)",
        "self.tile_n * self.head_dim * 2)",
    ),
    one(
        "one barrier for dS of the other CTA",
        WIDE,
        "bwd_wide.py",
        "peer_dS = Signal.make(barriers, 3, producers=1)",
        "peer_dS = Signal.make(barriers, 1, producers=1)",
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
        "            p.dq_order.added.wait(it)\n",
        "",
    ),
    one(
        "a grant for another block",
        WIDE_IN_ORDER,
        "bwd_wide.py",
        "while load_acquire(lock) != before:",
        "while load_acquire(lock) < before - 1:",
    ),
    one("grants run ahead", WIDE_IN_ORDER, "bwd_wide.py", "            p.dq_order.passed.wait_previous(it)\n", ""),
    one("Q is not released", NARROW, "bwd_narrow.py", END_OF_STEP, "        warpgroup.wait_group(0)\n"),
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
    one("dS is overwritten before it is read", NARROW, "bwd_narrow.py", "        p.dS.wait_previous(it)\n", ""),
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
        "dS = Signal.make(barriers, with_dq, producers=warps)",
        "dS = Signal.make(barriers, with_dq, producers=warps - 1)",
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
        "bwd_dq.py",
        "                pass\n"
        "            cute.arch.sync_warp()\n"
        "            p.dQ.consumer_wait(stage)\n"
        "            with cute.arch.elect_one():\n"
        "                bulk_add",
        "                pass\n"
        "            cute.arch.sync_warp()\n"
        "            with cute.arch.elect_one():\n"
        "                bulk_add",
    ),
    one(
        "dQ's stage is released before it is read",
        NARROW,
        "bwd_dq.py",
        "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n",
        "",
    ),
    one(
        "added to before it is cleared",
        NARROW,
        "bwd_dq.py",
        "            while load_acquire(self.lock_of(g, m_block, h, 0)) != CLEARED:\n                pass\n",
        "",
    ),
    one("said to be cleared too early", NARROW, "bwd_dq.py", "val=Int32(CLAIMED)", "val=Int32(CLEARED)"),
    one(
        "predecessors are not awaited",
        NARROW_IN_ORDER,
        "bwd_dq.py",
        "            while load_acquire(lock) != before:\n                pass\n",
        "",
    ),
    one(
        "a block is passed on before the sums are in memory",
        NARROW_IN_ORDER,
        "bwd_dq.py",
        "                cute.arch.cp_async_bulk_wait_group(0)\n",
        "",
    ),
    one(
        "a row of the table over one that is read",
        NARROW_WINDOW,
        "bwd_load.py",
        "                    p.Q.producer_acquire(stage)\n",
        "",
    ),
    one(
        "a row of the table is read before it is there",
        NARROW_WINDOW,
        "bwd_narrow.py",
        "            p.Q.consumer_wait(stage)\n            following",
        "            following",
    ),
    one(
        "a row of the table is read before it is there",
        WIDE_WINDOW,
        "bwd_wide.py",
        "                p.Q.consumer_wait(stage)\n                m_block, its_mask",
        "                m_block, its_mask",
    ),
    one(
        "steps of the other CTA are counted as own",
        "bwd_narrow d96 window",
        "bwd_window.py",
        "return own + cutlass.select_(self.is_own(row.flags, self.key_rank()), Int32(1), Int32(0))",
        "return own + 1",
    ),
    one(
        "rows of the other warp group",
        NARROW_WINDOW,
        "bwd_narrow.py",
        "(flags >> (4 * self.rank() + 2 * wg)) & 3",
        "(flags >> (4 * self.rank() + 2 * (1 - wg))) & 3",
    ),
    one(
        "dQ of the last step is not made",
        NARROW_WINDOW,
        "bwd_narrow.py",
        "            self.finish_last_dq(p, x, own - 1)\n",
        "            pass\n",
    ),
    one(
        "a block that the other CTA alone sees is not released",
        NARROW_WINDOW,
        "bwd_narrow.py",
        "            if not self.is_own(flags, self.rank()):\n                self.release_block(p, it)\n",
        "            if not self.is_own(flags, self.rank()):\n                pass\n",
    ),
    one(
        "dQ of a block that this CTA does not see",
        NARROW_WINDOW,
        "bwd_dq.py",
        "                if self.is_own(g.blocks[m_block, BlockFields.FLAGS], self.rank()):\n"
        "                    self.add_dq_block(",
        "                if True:\n                    self.add_dq_block(",
    ),
    one(
        "the second CTA does not wait for the first one",
        f"{NARROW_WINDOW} deterministic",
        "bwd_window.py",
        "cutlass.select_(first, Int32(1), Int32(0))",
        "Int32(0)",
    ),
    one(
        "a grant for another block",
        f"{WIDE_WINDOW} deterministic",
        "bwd_wide.py",
        "before = g.blocks[row, BlockFields.BEFORE] if",
        "before = g.blocks[item.block_begin, BlockFields.BEFORE] if",
    ),
    one("V is not released", FWD, "fwd.py", f"        {RELEASE_V}", ""),
    one(
        "V is released before it is read",
        FWD,
        "fwd.py",
        f"        warpgroup.wait_group(0)\n        {RELEASE_V}",
        f"        {RELEASE_V}        warpgroup.wait_group(0)\n",
    ),
    one("K is released before it is read", FWD, "fwd.py", "        warpgroup.wait_group(1)\n", ""),
    one("V is read before it is there", FWD, "fwd.py", "        V.consumer_wait(v_stage)\n", ""),
    one(
        "the probabilities change while they are read",
        FWD,
        "fwd.py",
        f"        warpgroup.wait_group(0)\n        {RELEASE_V}        round_to(acc_S, state.tOrP)\n",
        f"        round_to(acc_S, state.tOrP)\n        warpgroup.wait_group(0)\n        {RELEASE_V}",
    ),
    one("a skipped block is not awaited", FWD, "fwd.py", "            pipeline.consumer_wait(stage)\n", ""),
    one("Q is loaded over O", FWD, "fwd.py", "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),
    one(
        "O is stored before all warps wrote it",
        FWD,
        "fwd.py",
        "            cute.arch.fence_view_async_shared()\n            self.sync_rows(wg)\n",
        "            cute.arch.fence_view_async_shared()\n",
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
    one("a stage is loaded before it is empty", FWD, "fwd_load.py", "        pipeline.producer_acquire(stage)\n", ""),
    one(
        "Q is loaded before its stage is released",
        FWD,
        "fwd_frame.py",
        "        self.empty.wait(Stage(place, (self.part(count + 1, wg) // self.places + 1) % 2))\n",
        "",
    ),
    one("a key block is left out", PATHS, "work.py", "        self.run[1] -= 1\n", "        self.run[1] -= 2\n"),
    one(  # an earlier version: the GPU hung
        "the CTA's number is asked for by a part of a warp",
        SPLIT,
        "bwd_split.py",
        "marks.full[0], peer, *values)",
        "marks.full[0], 1 - self.rank(), *values)",
    ),
    one(
        "the CTA's number is asked for by one lane",
        WIDE,
        "bwd_wide.py",
        "copy_to_peer(target, source, bar, num_bytes, peer)",
        "copy_to_peer(target, source, bar, num_bytes, 1 - self.rank())",
    ),
    one(
        "a part is sent before the other CTA has read the one before",
        SPLIT,
        "bwd_split.py",
        "        pipe.producer_acquire(stage)\n        for c in range(chunks):\n",
        "        for c in range(chunks):\n",
    ),
    one(
        "a part is added before it is there",
        SPLIT,
        "bwd_split.py",
        "        pipe.consumer_wait(stage)\n        for c in range(chunks):\n",
        "        for c in range(chunks):\n",
    ),
    one(
        "the reader of a part tells its own CTA",
        SPLIT,
        "bwd_split.py",
        "cute.arch.mbarrier_arrive(self.empty[stage.index], cta)",
        "cute.arch.mbarrier_arrive(self.empty[stage.index])",
    ),
    one(  # an earlier version: wrong gradients on a GPU that other processes used too
        "a part is released while its loads are under way",
        SPLIT,
        "bwd_split.py",
        "        cute.arch.fence_acq_rel_cta()\n",
        "",
    ),
    one(
        "every warp expects all bytes of a part",
        SPLIT,
        "bwd_split.py",
        "pipe.expect(stage, 16 * chunks * 32)",
        "pipe.expect(stage, 16 * chunks * 128)",
    ),
    one(
        "parts of S and dP in one place",
        SPLIT,
        "bwd_split.py",
        "(which * (self.tile_n * self.tile_m) + tid * 4)",
        "(tid * 4)",
    ),
    one(
        "marks of a part of the keys are expected",
        SPLIT,
        "bwd_split.py",
        "full.expect(0, 4 * MARKS)",
        "full.expect(0, 4 * (MARKS - 4))",
    ),
    one(
        "P is handed over without a fence",
        SPLIT_FWD,
        "fwd_split.py",
        "[None, None, None, it % 2])\n        cute.arch.fence_view_async_shared()\n",
        "[None, None, None, it % 2])\n",
    ),
    one(
        "P is read before the other warp group has written it",
        SPLIT_FWD,
        "fwd_split.py",
        "        self.sync_rows(state.wg)\n        V = state.pipes.V\n",
        "        V = state.pipes.V\n",
    ),
    Planted(
        "one buffer for P",
        SPLIT_FWD,
        (
            ("fwd_split.py", "state.tOrP[None, None, None, it % 2]", "state.tOrP[None, None, None, it % 1]"),
            (
                "fwd_split.py",
                "thr.partition_D(own)[None, None, None, it % 2]",
                "thr.partition_D(own)[None, None, None, it % 1]",
            ),
        ),
    ),
    one(
        "numbers are read before they are exchanged",
        SPLIT_FWD,
        "fwd_split.py",
        "            numbers[r, quad, wg] = own[r]\n        self.sync_rows(wg)\n",
        "            numbers[r, quad, wg] = own[r]\n",
    ),
    one(
        "parts of S are read before they are exchanged",
        SPLIT_FWD,
        "fwd_split.py",
        "            cute.autovec_copy(given, parts[None, tid, j, state.wg])\n        self.sync_rows(state.wg)\n",
        "            cute.autovec_copy(given, parts[None, tid, j, state.wg])\n",
    ),
    one(
        "a quarter of K is not released",
        SPLIT_FWD,
        "fwd_split.py",
        "        self.finish_S(state, following, 1, 1)\n",
        "        warpgroup.wait_group(1)\n",
    ),
]
