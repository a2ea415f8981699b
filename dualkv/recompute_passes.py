"""Count the tiles of the forward that the Hopper kernels may compute twice, by what attention takes and returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from codegen.spec import KernelSpec, forward_spec
from codegen.tiles import ForwardTile
from cute_kernels.abi import warp_group_tokens
from dualkv.arrays import IntArray
from dualkv.ops.features import Features
from dualkv.ops.hopper import DTYPES, forward_launches
from dualkv.ops.plan.paths import first_keys, tiled_runs
from dualkv.segments import Segments, segments_of

# As in cute_kernels/softmax.py, as powers of two.
RESCALE_AT = 8  # a row's maximum may exceed its reference by so much
SUM_LIMIT = 64  # for the sum of a row's probabilities
REFERENCE_LIMIT = 2**12  # for a reference
LARGEST = 127  # fp32's


class RecomputePasses(TorchDispatchMode):
    """Count tiles that may take the recompute pass of the forward on Hopper GPUs, in the calls of attention under it.

        with dualkv.RecomputePasses() as passes:
            loss(model, batch).backward()
        print(passes)

    The forward takes maxima of a row's scores up to the row's own key alone. Where the sum of a row's probabilities
    exceeds 2^64 by that reference maximum, or the reference is beyond 2^12 in powers of two, the same launch computes
    the row's tile once more, with all maxima: as exact, and in more than twice the time.

    All numbers are upper bounds, by the log-sum-exp that the call returned, whichever backend computed it, and by
    scores of some keys before a row. 0 says that there was no recompute pass.

    Attributes:
        calls: of attention.
        all_rows: rows times query heads of these calls.
        all_tiles: their tiles, times the parts of the query heads that a tile takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.all_rows = self.all_tiles = 0
        self._found: list[torch.Tensor] = []  # rows and tiles of each call, on its device: reading waits for it

    @property
    def rows(self) -> int:
        """Rows times query heads that may have outgrown their reference."""
        return sum(int(found[0]) for found in self._found)

    @property
    def tiles(self) -> int:
        """Tiles, times parts of the query heads, with such a row."""
        return sum(int(found[1]) for found in self._found)

    def __str__(self) -> str:
        return (
            f"{self.calls:,} calls of attention: at most {self.tiles:,} of {self.all_tiles:,} tiles took a recompute"
            f" pass, for {self.rows:,} of {self.all_rows:,} rows"
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if func is torch.ops.dualkv.fwd.default and results[0].numel():
            names = (argument.name for argument in func._schema.arguments)
            self._count(results[1], **dict(zip(names, args, strict=False)), **(kwargs or {}))
        return results

    def _count(
        self, lse: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor,
        parent: torch.Tensor, softmax_scale: float, **options: Any,
    ) -> None:  # fmt: skip
        segments = segments_of(offsets, parent)
        asked = Features(**{name: options[name] for name in Features._fields if name in options})
        features = asked.of_call(segments.longest_path, lse.dtype)
        self.calls += 1
        for heads, spec in _launches(q, k, v, segments, features):
            key = spec.operation, spec.tile, spec.packed_heads, features.reach, features.batch_invariant
            grid = segments.cached(("recompute_passes", *key), partial(_grid, segments, spec, features))
            found = _outgrown(q, k, v, lse, grid, softmax_scale, features.softcap)[heads]
            of_parts = found.unflatten(0, (-1, spec.packed_heads)).any(1)
            tiles = torch.zeros(len(of_parts), grid.tiles, device=q.device)
            tiles.index_add_(1, torch.from_numpy(grid.tile).to(q.device), of_parts.float())
            self.all_rows += found.numel()
            self.all_tiles += tiles.numel()
            self._found.append(torch.stack([found.sum(), tiles.count_nonzero()]))


class _Grid(NamedTuple):
    """The rows of a layout as tiles take them.

    Attributes:
        asks: [T] bool, whether the row has a query.
        lowest: [T] the first key of the row's own segment whose block raises the reference; all up to the row do.
        tile: [T] the number of the row's tile.
        tiles: their number.
    """

    asks: Any
    lowest: IntArray
    tile: IntArray
    tiles: int


def _launches(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments, features: Features
) -> Iterator[tuple[list[int], KernelSpec[ForwardTile]]]:
    """The launches that would run the call on a Hopper GPU, with the query heads of each; in bf16 if the kernels take
    the dtype no more than another device."""
    (_, heads, head_dim), (_, kv_heads, head_dim_v), window = q.shape, v.shape, features.reach
    per_kv = heads // kv_heads
    trees = segments.max_depth > 2 or window is not None or features.batch_invariant
    short = window is not None and window.short
    dtype = DTYPES.get(q.dtype, "bf16")
    for taken, few in forward_launches(segments, trees, head_dim, per_kv, kv_heads, head_dim_v):
        own = [first + head for first in range(0, heads, per_kv) for head in taken]
        spec = forward_spec(dtype, head_dim, len(taken), trees, features.names, short, head_dim_v, few_keys=few)
        yield own, spec


def _grid(segments: Segments, spec: KernelSpec[ForwardTile], features: Features) -> _Grid:
    roots, group, row = segments.roots, segments.group_of_row, np.arange(segments.total)
    part, size = warp_group_tokens(spec.packed_heads), spec.tile.tokens(spec.packed_heads)
    run, run_end = tiled_runs(segments, size, features.batch_invariant)
    of_run = segments.segment_of_row if features.batch_invariant else group
    first_row = run[of_run]
    since = np.maximum(row - first_row, 0)
    count = -(-(run_end - run) // size)
    begin = segments.offsets[segments.segment_of_row]
    # Blocks that end behind the first row of a row's warp group raise the reference. In two regions blocks begin where
    # the region does, with the first response of the tile; in trees anywhere.
    first = lowest = first_row + since // part * part
    if not spec.trees:
        prompt_end = segments.offsets[roots + 1][group]
        in_tile = np.maximum(first_row + since // size * size, prompt_end)
        region = begin[np.where(row < prompt_end, row, in_tile)]
        lowest = region + np.maximum(first - region, 0) // spec.tile.tile_n * spec.tile.tile_n
    elif features.reach is not None:
        lowest = np.maximum(first, first_keys(segments, features.reach))
    tile = (np.cumsum(count) - count)[of_run] + since // size
    return _Grid(row >= first_row, np.maximum(lowest, begin), tile, int(count.sum()))


def _outgrown(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, grid: _Grid, softmax_scale: float,
    softcap: float | None,
) -> torch.Tensor:  # fmt: skip
    """[H, T] bool: rows that may have outgrown their reference."""
    wide = lse.dtype
    q = q.to(wide).unflatten(1, (k.shape[1], -1))  # [T, Hk, H / Hk, D]
    before = np.arange(len(q)) - grid.lowest
    reach = torch.from_numpy(before).to(q.device)[:, None, None]
    largest = torch.full(q.shape[:3], -math.inf, dtype=wide, device=q.device)
    for back in range(int(before.max()) + 1):
        scores = (q[back:] * k[: len(k) - back, :, None].to(wide)).sum(-1) * softmax_scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(reach[back:] < back, -math.inf)
        largest[back:] = torch.maximum(largest[back:], scores)
    largest, whole = (x / math.log(2) for x in (largest.flatten(1).t(), lse))
    # O, which is O's final value times the row's sum at most, must be finite too.
    growth = (LARGEST - v.to(wide).abs().amax().log2()).clamp(max=SUM_LIMIT) - RESCALE_AT
    fits = (whole - largest <= growth) & (whole <= REFERENCE_LIMIT) & (largest >= RESCALE_AT - REFERENCE_LIMIT)
    return ~fits & torch.from_numpy(grid.asks).to(q.device)
