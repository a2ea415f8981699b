"""Launches of every kernel with real plans of small layouts, and what must come out of them.

Head dims, stages, warp groups and clusters come from the tile table. Only the backward's query blocks are smaller,
because no warp waits for their rows.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from codegen import tiles
from cute_kernels.abi import LOCKS, clears_ahead
from dualkv.layout import Layout
from dualkv.ops.features import Window
from dualkv.ops.plan import backward as plan_backward
from dualkv.ops.plan import forward as plan_forward
from dualkv.ops.plan import paths as plan_paths
from dualkv.ops.plan import windowed as plan_windowed
from dualkv.ops.plan.schedule import schedule
from dualkv.segments import segments_of
from tests.protocol.lanes import BFloat16, Float16, Now, first_lane
from tests.protocol.machine import Machine, Schedule
from tests.protocol.memory import Flat, Host, View
from tests.protocol.sources import kernels
from tests.protocol.state import GARBAGE, Agent, Fault

Edits = tuple[tuple[str, str, str], ...]
SCALE, CAP = 0.125, 50.0


@dataclass(frozen=True)
class Case:
    """A launch.

    Attributes:
        name: for the command line; begins with the kernel's.
        cluster, warps: CTAs a cluster, and warps a CTA.
        start: launches it on the machine that runs; returns the check of what came out.
    """

    name: str
    cluster: int
    warps: int
    start: Callable[[Any, Machine], Callable[[], None]]

    def run(self, schedule: Schedule, edits: Edits = ()) -> int:
        """Run under one schedule, with the kernels' sources edited; returns its steps, or raises Fault."""
        loaded = kernels(*edits)
        machine = Machine(schedule, clusters_at_once=schedule.random.randint(1, 3))
        Now.machine = machine
        gc.disable()  # it takes a third of the time otherwise
        try:
            self.start(loaded, machine)()
        finally:
            gc.enable()
        return machine.steps

    def again(self, schedule: Schedule) -> str:
        """The command that runs one schedule of `schedules` again."""
        return f"python -m tests.protocol --kernel '{self.name}' --schedules 1 --seed {schedule.seed}"

    def slow(self) -> list[str]:
        """List what a schedule may slow down."""
        warps = (f"warp {w} of rank {r}" for r in range(self.cluster) for w in range(self.warps))
        return ["loads", "stores", "sends", *warps]


def schedules(case: Case, count: int, seed: int = 0) -> list[Schedule]:
    """Make schedules of the seeds from `seed` on. One of three is fair, one goes by priorities, one slows something
    down, each in turn."""
    slow, chosen = case.slow(), range(seed, seed + count)
    return [Schedule(i, slow=slow[i // 3 % len(slow)] if i % 3 == 0 else None, priorities=i % 3 == 1) for i in chosen]


def segments(prompts: list[int], responses: list[list[int]]) -> Any:
    layout = Layout.from_lengths(prompts, responses)
    return segments_of(layout.offsets, layout.parent)


def _here(agent: Agent) -> list[Any]:
    """Note the warp and the time of this step."""
    return [agent.index, int(agent.clock[agent.index]), agent.name]


def _at_end(agent: Agent) -> list[Any]:
    """Note the time when a warp has waited for the copy that it starts; it is not known yet."""
    when: list[Any] = []
    agent.bulk_open.then.append(lambda: when.extend(_here(agent)))  # type: ignore[union-attr]
    return when


def barrier_names(pipelines: Any, name: str = "") -> dict[int, str]:
    """Name the mbarriers of a kernel's pipelines, by their numbers: "Q.empty, stage 1"."""
    if hasattr(pipelines, "arrivals"):
        return {pipelines.first + j: f"{name}, stage {j}" for j in range(pipelines.count)}
    found: dict[int, str] = {}
    for field in getattr(pipelines, "__dataclass_fields__", getattr(pipelines, "_fields", ())):
        found |= barrier_names(getattr(pipelines, field), f"{name}.{field}".lstrip("."))
    return found


# ---------------------------------------------------------------- backward
class Gradients:
    """The sums of the backward's main kernel, and what they should be."""

    def __init__(self, kernel: Any, seg: Any, work: Any, heads: int, kv_heads: int, window: Window | None) -> None:
        self.kernel, self.seg, self.work, self.heads, self.kv_heads = kernel, seg, work, heads, kv_heads
        self.M, self.N = kernel.tile_m, kernel.tile_n
        row, visible_end = np.arange(seg.total), np.asarray(seg.visible_end)
        self.visible = (row <= row[:, None]) & (row[:, None] < visible_end)  # [query, key]
        if window is not None:
            position = (seg.first_position - seg.offsets[:-1])[seg.segment_of_row] + row
            self.visible &= position >= window.lowest(position)[:, None]
        pad = np.zeros((-seg.total % self.M, seg.total), bool)
        self.block_sees = np.concatenate([self.visible, pad]).reshape(-1, self.M, seg.total).any(1)  # [block, key]
        self.num_blocks = -(-seg.total // self.M)
        # of ("dk", KV head, 16 keys' first, which part of the columns)
        self.of_keys: dict[Any, list[frozenset[Any]]] = defaultdict(list)
        self.columns = frozenset(range(0, kernel.dq_columns, kernel.head_dim))  # where CTAs' parts begin
        self.of_queries: dict[Any, list[frozenset[Any]]] = defaultdict(list)  # of (block, place in it)
        self.writers: dict[Any, list[Any]] = {}  # (component, epoch, name) of the last ones, nothing yet of copies

    def __call__(self, machine: Machine, what: str, where: Any, prov: frozenset[Any]) -> None:
        agent = machine.agent
        if what in ("dk", "dv"):
            rows = where["row"] if agent.mask is None else where["row"][agent.mask]
            part = agent.cta.rank if len(self.columns) > 1 else 0
            self.of_keys[what, where["head"], int(rows.min()), part].append(prov)
        else:
            self.add(machine, what, first_lane(where), prov)

    def add(self, machine: Machine, what: str, at: int, prov: frozenset[Any]) -> None:
        """Record an addition to dQ."""
        agent, floats = machine.agent, self.M * self.kernel.dq_columns
        block, place = divmod(at, floats)
        if what == "dq_acc":  # zeros: of the whole block, a quad after another
            self.writers[block, "cleared"] = _here(agent)
            return
        cleared = self.writers.get((block, "cleared"))
        if cleared is not None and not agent.knows(*cleared[:2]):
            raise Fault(f"{agent.name} adds to dQ of block {block}, and nothing says that {cleared[2]} has cleared it")
        before = self.of_queries[block, place]
        if self.kernel.deterministic:
            last = self.writers.get((block, place))
            if last is not None and not (last and agent.knows(*last[:2])):
                raise Fault(f"{agent.name} adds to dQ of block {block}, and nothing says that the last sum is there")
            self.writers[block, place] = _here(agent) if agent.bulk_open is None else _at_end(agent)
        if what == "dq =":
            if before:
                raise Fault(f"{agent.name} stores to dQ of block {block} after others have added to it")
        elif cleared is None and not before and clears_ahead(self.kernel.head_dim):
            raise Fault(f"{agent.name} adds to dQ of block {block} before anybody has cleared it")
        before.append(prov)

    def operands(self, dS: Any) -> tuple[Any, Any]:
        """The tags of (keys, queries) that dS or P is made of: they fit each other."""
        keys, queries, columns = set(), set(), defaultdict(set)
        read = {term for term in dS if term[0] == "stats"}  # by the warp, with softcapping
        queries.update((head, col // 8) for _, head, _, col in read)
        dS = dS - read
        for term in dS:
            for part in term:
                for name, head, row, col in (x for x in part if len(x) == 4):
                    if name in ("K", "V"):
                        keys.add((head, row))
                        columns[name].add(col)
                    elif name == "stats":
                        queries.add((head, col // 8))
                    else:
                        queries.add((head, row))
        if any(found != self.columns for found in columns.values()):
            raise Fault(f"P or dS is made of columns {dict(columns)}")
        if len(keys) != 1 or len(queries) != 1 or ("nothing",) in {x for term in dS for part in term for x in part}:
            raise Fault(f"P or dS is made of keys {keys} and queries {queries}")
        (key,), (query,) = keys, queries
        return key, query

    def check(self) -> None:
        kernel, seg, M, N, per_kv = self.kernel, self.seg, self.M, self.N, self.heads // self.kv_heads
        for name in ("dk", "dv"):
            if not getattr(kernel, f"want_{name}"):
                continue
            for kv_head, columns in product(range(self.kv_heads), range(len(self.columns))):
                found: dict[int, set[Any]] = {}
                for (what, head, row, part), sums in self.of_keys.items():
                    if (what, head, part) == (name, kv_head, columns):
                        found[row] = self.summed(sums)
                for key in range(seg.total):
                    first = max((row for row in found if row <= key < row + 16), default=None)
                    blocks = np.flatnonzero(self.block_sees[:, key]).tolist()
                    wanted = {(kv_head * per_kv + h, mb * M) for h in range(per_kv) for mb in blocks}
                    if first is None or not wanted <= found[first]:
                        missing = wanted - (found[first] if first is not None else set())
                        raise Fault(f"{name} of key {key}, KV head {kv_head}, lacks the query blocks {sorted(missing)}")
        if not kernel.want_dq:
            return
        added: dict[int, list[Any]] = defaultdict(list)
        for (block, place), sums in self.of_queries.items():
            added[block].append((place, [self.keys_of(prov, block) for prov in sums]))
        for h in range(self.heads):
            for mb in range(self.num_blocks):
                needed = self.block_sees[mb]
                for place, sums in added[h * self.num_blocks + mb]:
                    once = [key for keys in sums for key in keys]
                    if len(set(once)) != len(once):
                        raise Fault(f"dQ of block {mb}, head {h}, has keys twice: {sorted(once)}")
                    order = [self.place_of(min(keys), h // per_kv, mb) for keys in sums]
                    if kernel.deterministic and order != sorted(order):
                        raise Fault(f"dQ of block {mb}, head {h}, has its sums in the order {order}")
                    lacking = needed.copy()
                    for first in once:
                        lacking[first : first + N] = False
                    if lacking.any():
                        raise Fault(
                            f"dQ of block {mb}, head {h}, place {place}, lacks the keys {np.flatnonzero(lacking)}"
                        )
                if not added[h * self.num_blocks + mb]:
                    raise Fault(f"nothing is added to dQ of block {mb}, head {h}")

    def place_of(self, key: int, kv_head: int, block: int) -> int:
        """Find the item that adds to a block and whose CTAs' first keys these are: its first key, or with a window its
        index among those that start."""
        steps = range(0, self.kernel.row_ctas * self.N, self.N)
        of_keys = [i for i, x in enumerate(self.work.items) if x[0] == kv_head and key - int(x[1]) in steps]
        if self.work.blocks is None:
            return max(int(self.work.items[i, 1]) for i in of_keys)
        return next(i for i in of_keys if block in self.work.blocks[slice(*self.work.items[i, 3:5]), 0])

    def summed(self, sums: list[frozenset[Any]]) -> set[Any]:
        """The query blocks in dK or dV of some keys: (head, row)."""
        found: set[Any] = set()
        for prov in set(sums):
            for P, other in (term for term in prov if len(term) == 2):  # besides, what is not finite is added by hand
                _, query = self.operands(P)
                tags = {(head, row) for _, head, row, _ in other}
                if tags != {query}:
                    raise Fault(f"a product of P or dS of {query} and of {tags}")
                found.add(query)
        return found

    def keys_of(self, prov: frozenset[Any], block: int) -> list[int]:
        """The first key of each key block in a sum for dQ."""
        h, mb = divmod(block, self.num_blocks)
        found = []
        for K, dS in (term for term in prov if len(term) == 2):
            if K is GARBAGE or not dS:
                if not dS:
                    found.append(next(iter(K))[2])
                    continue
                raise Fault(f"dQ of block {mb}, head {h}, is made of nothing")
            key, query = self.operands(dS)
            if {(head, row) for _, head, row, _ in K} != {key} or query != (h, mb * self.M):
                raise Fault(f"dQ of block {mb}, head {h}, is made of {K} and of dS of keys {key} and queries {query}")
            found.append(key[1])
        return found


def backward(
    name: str, head_dim: int, gradients: str, layout: Any, *, heads: int = 1, kv_heads: int = 1, tile_m: int = 32,
    window: Window | None = None, softcap: float | None = None, parents: list[int] | None = None,
    head_dim_v: int | None = None, few_keys: bool = False, **tile: Any,
) -> Case:  # fmt: skip
    """A launch of the backward's main kernel. parents: of a tree, where `layout` is lengths of segments."""
    config, of_v = tiles.backward_tile(head_dim, head_dim_v=head_dim_v, few_keys=few_keys), head_dim_v or head_dim
    options = {"tile_m": tile_m, "tile_n": config.tile_n, "stages": config.stages, "cluster": config.cluster, **tile}
    made = tiles.BackwardTile(**options)
    if parents is None:
        seg = segments(*layout)
    else:
        seg = segments_of(torch.tensor(np.append(0, np.cumsum(layout))), torch.tensor(parents))
    more: list[Any] = []
    if window is None:
        work = plan_backward.backward_work(seg, made, heads, kv_heads, 4, made.deterministic)
    else:
        work = plan_windowed.windowed_work(seg, window, made, heads, kv_heads, 4)
        arrays = work.blocks, *plan_windowed.position_tables(seg, window, made)
        more = [Host(*x) for x in zip(("blocks", "position", "end_position"), arrays, strict=True)]
    asked = {"window": window, "softcap": softcap}
    features = tuple(feature for feature, value in asked.items() if value is not None)

    def start(loaded: Any, machine: Machine) -> Callable[[], None]:
        kernel = loaded.bwd.backward_kernel(
            BFloat16, head_dim, gradients=gradients, features=features, head_dim_v=head_dim_v, **options
        )
        machine.barrier_names = barrier_names(kernel.pipelines(loaded.pipeline.MbarrierAllocator()))
        total, blocks = seg.total, -(-seg.total // tile_m)
        q, dout = (View(*x) for x in (("Q", (total, heads, head_dim)), ("dO", (total, heads, of_v))))
        k, v, dk, dv = (
            View(x, (total, kv_heads, of_v if "v" in x.lower() else head_dim)) for x in ("K", "V", "dk", "dv")
        )
        stats = View("stats", (heads, blocks * tile_m * 8), ("head", "col"))
        dq_acc = Flat("dq_acc", heads * blocks * tile_m * head_dim)
        locks = Flat("locks", heads * blocks * LOCKS + 1)
        out = Gradients(kernel, seg, work, heads, kv_heads, window)
        machine.stores = out
        tables = Host("work", work.items), Host("visible_end", np.asarray(seg.visible_end))
        given = q, k, v, dout, stats, dk, dv, dq_acc, Flat("partials", 0), locks, *tables, SCALE, None
        kernel(*given, *more, *([] if softcap is None else [softcap]))
        return out.check

    return Case(name, 2 if head_dim > 256 else made.cluster, 12, start)


# ---------------------------------------------------------------- forward
class Outputs:
    """The stores of the forward, and what they should be."""

    def __init__(self, kernel: Any, seg: Any, first_heads: list[int], per_kv: int, window: Window | None) -> None:
        self.kernel, self.first_heads, self.per_kv = kernel, first_heads, per_kv
        self.visible_end, self.total = np.asarray(seg.visible_end), seg.total
        self.first_key = np.zeros(seg.total, int) if window is None else plan_paths.first_keys(seg, window)
        self.columns = range(0, kernel.head_dim_v, kernel.v_columns)  # where parts of O and V begin
        self.parts_of_K = frozenset(range(0, kernel.head_dim, kernel.k_columns))
        self.stored: set[tuple[int, int, int]] = set()  # (row, head, first column)
        self.on_its_way: dict[Any, Any] = {}

    def __call__(self, machine: Machine, what: str, where: Any, prov: frozenset[Any]) -> None:
        packed, agent = self.kernel.packed_heads, machine.agent
        if what == "out box":
            first, head = where["row"], where["head"]
            rows, heads = range(first, first + self.kernel.tokens_wg), range(head, head + packed)
            self.store_box(machine, (first, head))
            for column in self.columns:
                self.look(prov, list(rows), first, head, column)
                self.stored.update((row, head, column) for row in rows for head in heads)
        elif what == "out":
            mask = slice(None) if agent.mask is None else agent.mask
            rows, heads = (np.broadcast_to(where[x], (32,))[mask].tolist() for x in ("row", "head"))
            columns = {v[3] for term in prov if len(term) == 2 for v in term[1]}
            if len(columns) != 1:
                raise Fault(f"{agent.name} stores O of columns {columns}")
            self.look(prov, sorted(set(rows)), None, max(h for h in self.first_heads if h <= heads[0]), *columns)
            self.stored.update((row, head, *columns) for row, head in zip(rows, heads, strict=True))

    def store_box(self, machine: Machine, key: Any) -> None:
        """The recompute pass may store what the first pass has stored, once that is over."""
        agent, last = machine.agent, self.on_its_way.get(key)
        if last is not None and not (last and agent.knows(*last[:2])):
            raise Fault(f"{agent.name} stores the rows from {key[0]} on again while they are being stored")
        self.on_its_way[key] = _at_end(agent)

    def look(self, prov: frozenset[Any], rows: list[int], first: int | None, head: int, column: int) -> None:
        """A part of O from a column on, of some rows of the packed heads from a first one on."""
        blocks = []
        for term in prov:
            if len(term) != 2:
                continue
            P, ((_, v_head, v_row, v_column),) = term
            if v_column != column:
                continue
            (((q_head, q_row), (k_head, k_row)),) = {(q[1:3], k[1:3]) for (q,), (k,) in P}
            if {k[3] for _, (k,) in P} != self.parts_of_K:
                raise Fault(f"S of keys {k_row} is of K's columns from {sorted(k[3] for _, (k,) in P)} on")
            if (v_head, v_row) != (k_head, k_row) or k_head != head // self.per_kv:
                raise Fault(f"P of keys {k_row}, KV head {k_head}, meets V of keys {v_row}, KV head {v_head}")
            if q_head != head or (first is not None and q_row != first) or not q_row <= rows[0]:
                raise Fault(f"rows {rows} of the heads from {head} on have the queries from {q_row}, head {q_head}, on")
            blocks.append(k_row)
        if len(set(blocks)) != len(blocks):
            raise Fault(f"rows {rows} have keys twice: {sorted(blocks)}")
        seen = np.zeros(self.total + self.kernel.tile_n, bool)
        for row in blocks:
            seen[row : row + self.kernel.tile_n] = True
        for row in rows:
            wanted = (self.visible_end[: row + 1] > row) & (np.arange(row + 1) >= self.first_key[row])
            lacking = np.flatnonzero(wanted & ~seen[: row + 1])
            if len(lacking):
                raise Fault(f"row {row} of the heads from {head} on lacks the keys {lacking.tolist()}")

    def check(self) -> None:
        heads = [first + i for first in self.first_heads for i in range(self.kernel.packed_heads)]
        wanted = {(row, head, x) for row in range(self.total) for head in heads for x in self.columns}
        if lacking := wanted - self.stored:
            raise Fault(f"nobody stores (row, head, first column) of {sorted(lacking)}")


def forward(
    name: str, head_dim: int, layout: Any, *, heads: int, kv_heads: int, fp16: bool = False,
    parents: list[int] | None = None, window: Window | None = None, features: tuple[str, ...] = (), short: bool = True,
    head_dim_v: int | None = None, few_keys: bool = False, taken: range | None = None,
) -> Case:  # fmt: skip
    """A launch of the forward, or of that for trees (`layout`: lengths of segments). One cluster takes all tiles.

    features: besides a window.
    taken: query heads of each KV head that the launch takes; None: all.
    """
    has = (*([] if window is None else ["window"]), *features)
    config, of_v = tiles.forward_tile(head_dim, has, short, head_dim_v, few_keys), head_dim_v or head_dim
    per_kv = heads // kv_heads
    taken = taken or range(per_kv)
    packed = tiles.packed_heads(len(taken))
    first_heads = [first + head for first in range(0, heads, per_kv) for head in taken[::packed]]
    tokens = config.tokens(packed)
    if parents is None:
        seg = segments(*layout)
        work = plan_forward.forward_work(seg, tokens, config.tile_n)
        cost = plan_forward.tile_cost(work, config.tile_n)
        tables = [("segment_begin", plan_forward.segment_begin(seg))]
    else:
        seg = segments_of(torch.tensor(np.append(0, np.cumsum(layout))), torch.tensor(parents))
        made = plan_paths.path_work(seg, tokens, config.tile_n, window, config.parts)
        work, cost = made.items, plan_paths.tile_cost(made.items)
        ends = np.concatenate([np.asarray(seg.visible_end), np.zeros(config.tile_n, np.int64)])
        tables = [("regions", made.regions), ("visible_end", ends)]
    items = schedule(cost, len(first_heads), kv_heads, 1, seg.total * head_dim * 4, True)
    items[:, 1] = np.array(first_heads)[items[:, 1]]

    def start(loaded: Any, machine: Machine) -> Callable[[], None]:
        module = loaded.fwd_split if head_dim > 256 else loaded.fwd if parents is None else loaded.fwd_paths
        name = "Split" * (head_dim > 256) + ("ForwardKernel" if parents is None else "PathForwardKernel")
        cls = getattr(module, name)
        kernel = cls(
            Float16 if fp16 else BFloat16, head_dim, packed, **asdict(config), features=has, head_dim_v=head_dim_v
        )
        barriers = loaded.pipeline.MbarrierAllocator()
        machine.barrier_names = barrier_names(kernel.pipelines(barriers, kernel.q_places))
        q, out = (View(*x) for x in (("Q", (seg.total, heads, head_dim)), ("out", (seg.total, heads, of_v))))
        k, v = (View(*x) for x in (("K", (seg.total, kv_heads, head_dim)), ("V", (seg.total, kv_heads, of_v))))
        lse = View("lse", (heads, seg.total), ("head", "row"))
        found = Outputs(kernel, seg, first_heads, per_kv, window)
        machine.stores = found
        arrays = Host("work", work), Host("schedule", items), *(Host(*x) for x in tables)
        of_features = {"window": [], "sinks": [View("sinks", (heads,), ("head",))], "softcap": [CAP]}
        if window is not None:
            of_features["window"] = [Host("first_key", plan_paths.first_keys(seg, window))]
        given = [x for name in has for x in of_features[name]]
        kernel(q, k, v, out, lse, *arrays, SCALE, config.cluster, None, *given)
        return found.check

    return Case(name, config.cluster, 4 * (1 + config.warp_groups * (1 + (head_dim > 256))), start)


def cases() -> list[Case]:
    """Every kernel, head dim and mode; layouts with several items or tiles, and few blocks."""
    found = []
    wide, narrow = ([50, 20], [[60, 20], []]), ([90, 20], [[30, 80, 10], [40]])
    for deterministic in (False, True):
        after = " deterministic" * deterministic
        for d in tiles.HEAD_DIMS:
            kernel, layout = ("bwd_narrow", narrow) if d <= tiles.NARROW else ("bwd_wide", wide)
            if d > 256:
                kernel = "bwd_split"
            found.append(backward(f"{kernel} d{d}{after}", d, "qkv", layout, deterministic=deterministic))
        # As many rows as in the table: that decides how many buffers there are for dS.
        more = {"head_dim_v": 128, "heads": 2, "tile_m": 96, "deterministic": deterministic}
        found.append(backward(f"bwd_wide d192v128{after}", 192, "qkv", wide, **more))
        more = {"heads": 2, "few_keys": True, "deterministic": deterministic}
        for d in tiles.FEW_KEYS_TILES:
            found.append(backward(f"bwd_narrow d{d} few keys{after}", d, "qkv", ([90], [[30, 50]]), **more))
    for gradients in ("q", "kv"):
        found.append(backward(f"bwd_wide d192v128 {gradients}", 192, gradients, wide, head_dim_v=128))
    for gradients in ("q", "k", "v", "kv"):
        found.append(backward(f"bwd_wide d256 {gradients}", 256, gradients, wide))
        found.append(backward(f"bwd_narrow d128 {gradients}", 128, gradients, narrow))
        found.append(backward(f"bwd_narrow d128 few keys {gradients}", 128, gradients, narrow, few_keys=True))
    windowed = ([70, 40], [[60, 90, 20], [30]])
    for deterministic in (False, True):
        after = " deterministic" * deterministic
        options = {"heads": 2, "window": Window(40), "deterministic": deterministic}
        for d in (64, 96, 128):
            heads = {"heads": 1 if d == 96 else 2}
            found.append(backward(f"bwd_narrow d{d} window{after}", d, "qkv", windowed, **options | heads))
        tree = {"parents": [-1, 0, 1, 1, 0, -1], "window": Window(chunk=50), "deterministic": deterministic}
        found.append(backward(f"bwd_narrow d128 chunks{after}", 128, "qkv", [90, 30, 60, 20, 40, 30], **tree))
        # Blocks see keys of both CTAs, and many behind them keys of the second CTA alone.
        groups = [1, 129, 200, 64, 37], [[5, 70], [], [100, 0, 300, 17], [64] * 3, [3] * 10]
        far = options | {"heads": 1, "tile_m": 128, "window": Window(300)}
        found.append(backward(f"bwd_narrow d64 window groups{after}", 64, "qkv", groups, **far))
        narrow_one = options | {"cluster": 1}
        found.append(backward(f"bwd_narrow d64 window cluster 1{after}", 64, "qkv", windowed, **narrow_one))
        for dims, of_v in (("192", None), ("192v128", 128), ("256", None)):
            more = options | {"head_dim_v": of_v}
            found.append(backward(f"bwd_wide d{dims} window{after}", int(dims[:3]), "qkv", windowed, **more))
        found.append(backward(f"bwd_split d512 window{after}", 512, "qkv", windowed, **options))
        found.append(backward(f"bwd_wide d256 chunks{after}", 256, "qkv", [90, 30, 60, 20, 40, 30], **tree))
    for gradients in ("q", "kv"):
        for kernel, d in (("wide", 256), ("narrow", 128)):
            name = f"bwd_{kernel} d{d} {gradients} window softcap"
            found.append(backward(name, d, gradients, windowed, window=Window(40), softcap=30.0))
    found.append(backward("bwd_wide d256 softcap", 256, "qkv", wide, softcap=30.0))
    found.append(backward("bwd_narrow d128 softcap", 128, "qkv", narrow, softcap=30.0))
    found.append(backward("bwd_wide d192 two heads", 192, "qkv", ([30], [[20, 10]]), heads=2))
    found.append(backward("bwd_narrow d64 two KV heads", 64, "qkv", ([30], [[40]]), heads=4, kv_heads=2))
    for d, of_v in tiles.HEAD_DIM_PAIRS:
        dims, more = (f"d{d}", {}) if of_v == d else (f"d{d}v{of_v}", {"head_dim_v": of_v})
        more |= {"heads": 4, "kv_heads": 1}
        found.append(forward(f"fwd {dims}", d, ([130, 30], [[40, 7], [10]]), **more))
        if tiles.native_key(d, of_v) in tiles.FEW_KEYS_FORWARD_TILES:
            found.append(forward(f"fwd {dims} few keys", d, ([130, 30], [[40, 7], [10]]), **more, few_keys=True))
        lengths, parents = [70, 30, 50, 20, 10, 20], [-1, 0, 1, 1, 0, -1]
        found.append(forward(f"fwd_paths {dims}", d, lengths, **more, parents=parents))
        window, lengths, parents = Window(size=40), [130, 90, 20, 0, 70], [-1, 0, 1, 0, 0]
        more |= {"parents": parents, "window": window}
        found.append(forward(f"fwd_paths {dims} window", d, lengths, **more))
    del more["head_dim_v"]
    found.append(forward("fwd_paths d256 long window", 256, lengths, **more, short=False))
    found.append(forward("fwd d128 fp16", 128, ([130, 30], [[40, 7], [10]]), heads=4, kv_heads=1, fp16=True))
    both = {"heads": 4, "kv_heads": 1, "features": ("sinks", "softcap")}
    found.append(forward("fwd d128 sinks softcap", 128, ([130, 30], [[40, 7], [10]]), **both))
    chunks = {"parents": [-1, 0, 0, -1], "window": Window(chunk=48)}
    found.append(forward("fwd_paths d64 chunks sinks softcap", 64, [100, 70, 30, 20], **both, **chunks))
    found.append(forward("fwd d96 two KV heads", 96, ([60], [[40, 7]]), heads=4, kv_heads=2))
    for d, heads in ((128, range(4)), (128, range(4, 5)), (512, range(4, 6))):
        of_kv = {"heads": 12 if d == 512 else 10, "kv_heads": 2, "taken": heads}
        found.append(forward(f"fwd d{d} some heads from {heads.start}", d, ([60], [[40, 7]]), **of_kv))
    return found
