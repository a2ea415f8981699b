"""Count what the kernels compute of a workload whose rows see some of the keys before them: numpy, no GPU."""

from __future__ import annotations

import numpy as np

from codegen.spec import backward_specs, forward_spec
from codegen.tiles import BackwardTile, ForwardTile, kernel_head_dims
from cute_kernels.abi import WG_ROWS, part_rows
from cute_kernels.abi import BackwardFields as items
from cute_kernels.abi import BlockFields as fields
from cute_kernels.abi import PathFields as paths
from dualkv.arrays import positions
from dualkv.bench.workloads import Workload
from dualkv.ops.plan.backward import BackwardWork
from dualkv.ops.plan.paths import PathWork, path_work
from dualkv.ops.plan.windowed import windowed_work
from dualkv.segments import segments_of

NUM_SMS = 132  # of an H100 or H200


def executed_over_useful(workload: Workload, direction: str) -> float | None:
    """Multiplications that the tensor cores execute over those of visible (query, key) pairs, in all products of a
    direction ("fwd" or "bwd"); None where they see all, whose plans are others."""
    reach, layout = workload.reach, workload.layout()
    if reach is None or direction not in ("fwd", "bwd"):
        return None
    segments, native = segments_of(layout.offsets, layout.parent), kernel_head_dims(*workload.head_dims)
    if direction == "fwd":
        ratio = workload.heads // workload.kv_heads
        spec = forward_spec(workload.dtype, native[0], ratio, True, workload.names, reach.short, native[1])
        tile, packed = spec.tile, spec.packed_heads
        done = forward_pairs(path_work(segments, tile.tokens(packed), tile.tile_n, reach, tile.parts), tile, packed)
    else:
        main = backward_specs(workload.dtype, native[0], features=workload.names, head_dim_v=native[1]).main.tile
        work = windowed_work(segments, reach, main, workload.heads, workload.kv_heads, NUM_SMS)
        done = backward_pairs(work, main)
    return done / workload.visible_pairs()


def forward_pairs(work: PathWork, tile: ForwardTile, packed_heads: int) -> float:
    """(query, key) pairs a head: rows of the products of each part, times the keys of the blocks that it walks."""
    parts = (
        work.items[:, paths.NUM_FIELDS :].reshape(len(work.items), tile.parts, paths.NUM_PART_FIELDS).astype(np.int64)
    )
    walked = (
        parts[:, :, paths.END] - parts[:, :, paths.BEGIN] + work.items[:, None, paths.BLOCKS] - parts[:, :, paths.REST]
    )
    return int(walked.sum()) * tile.tile_n * WG_ROWS / packed_heads


def backward_pairs(work: BackwardWork, tile: BackwardTile) -> float:
    """(query, key) pairs a head, the mean over the five products. Where warp groups leave rows out, dQ's does not."""
    assert work.blocks is not None
    own_head = work.items[work.items[:, items.KV_HEAD] == 0].astype(np.int64)
    count = own_head[:, items.BLOCK_END] - own_head[:, items.BLOCK_BEGIN]
    flags = work.blocks[np.repeat(own_head[:, items.BLOCK_BEGIN], count) + positions(count), fields.FLAGS]
    block = tile.tile_n * tile.tile_m
    if tile.tile_n == WG_ROWS:
        return float(len(flags) * tile.cluster * block)
    rows = np.zeros(4, np.int64)
    few = part_rows(tile.tile_m)
    rows[[fields.FIRST_ROWS, fields.WHOLE, fields.LAST_ROWS]] = few, tile.tile_m, few
    total = 0.0
    for rank in range(tile.cluster):
        own = flags >> (fields.OWN + rank) & 1
        seen = sum(rows[flags >> (4 * rank + 2 * wg) & 3] for wg in range(tile.tile_n // WG_ROWS)) * own
        total += (4 * WG_ROWS * int(seen.sum()) + block * int((seen > 0).sum())) / 5
    return total
