"""The table of tile configurations, chosen by measurement on an H200. CONTRIBUTING.md says how to add a head dim.

Nothing here imports CuTe or torch, so that the host's plan can use it.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from cute_kernels.abi import WG_ROWS, partial_floats, warp_group_tokens

MAX_PACKED_HEADS = 16
NARROW = 128  # largest head dim whose backward is cute_kernels.bwd_narrow; beyond it is bwd_wide (cute_kernels/bwd.py)


@dataclass(frozen=True)
class ForwardTile:
    """Tile of :class:`cute_kernels.fwd.ForwardKernel`.

    Attributes:
        tile_n: keys a block.
        warp_groups: MMA warp groups a CTA, 64 query rows each; of head dim 512 pairs of them, which share the rows.
        stages: K blocks (and V blocks) in flight; of head dim 512 quarters of a K block.
        cluster: CTAs that walk the same keys and share them by multicast.
    """

    tile_n: int
    warp_groups: int = 2
    stages: int = 2
    cluster: int = 2

    @property
    def parts(self) -> int:
        """Equal parts of a tile, one a warp group of the cluster."""
        return self.cluster * self.warp_groups

    def tokens(self, packed_heads: int) -> int:
        """Packed rows (tokens) in a tile, which a cluster takes."""
        return self.parts * warp_group_tokens(packed_heads)


HeadDims = int | tuple[int, int]  # of q, k and v; or of q and k, and another one of v
Tiles = dict[HeadDims, ForwardTile]
FORWARD_TILES: Tiles = {
    64: ForwardTile(tile_n=128, warp_groups=3, stages=3, cluster=1),
    96: ForwardTile(tile_n=96, warp_groups=3, stages=3),
    128: ForwardTile(tile_n=64, warp_groups=3, stages=4),
    192: ForwardTile(tile_n=96),
    256: ForwardTile(tile_n=64),
    512: ForwardTile(tile_n=64, warp_groups=1, stages=4),
    (192, 128): ForwardTile(tile_n=64, warp_groups=3, stages=3),
}
# Native head dims, in ascending order; TMA fills smaller ones with zeros.
HEAD_DIMS = tuple(head_dim for head_dim in FORWARD_TILES if isinstance(head_dim, int))
MIXED = tuple(pair for pair in FORWARD_TILES if isinstance(pair, tuple))  # native, with another head dim of v
HEAD_DIM_PAIRS = tuple((head_dim, head_dim) for head_dim in HEAD_DIMS) + MIXED  # (of q and k, of v)
MIXED_RATIOS = (1, 8, 16)  # GQA ratios of models with such values: MLA, MiMo-V2

WINDOW_TILES: Tiles = FORWARD_TILES | {  # with windows and chunks: 128 keys and a tile of 24 or 32 rows are two blocks
    64: ForwardTile(tile_n=80, warp_groups=3, stages=4, cluster=1),
    128: ForwardTile(tile_n=64, warp_groups=3, stages=4, cluster=1),  # a cluster's CTAs see other keys: 3 to 8 % slower
    192: ForwardTile(tile_n=80),
    (192, 128): ForwardTile(tile_n=96),
}
SHORT_WINDOW = 1024
SHORT_WINDOW_TILES = WINDOW_TILES | {  # up to SHORT_WINDOW: a cluster's CTAs see other keys; from 4096 on 5 % slower
    256: ForwardTile(tile_n=64, cluster=1),  # with 80 keys ptxas spills
}
SHORT_WINDOW_SINKS_TILES = SHORT_WINDOW_TILES | {  # sinks take registers: with 64 keys ptxas spills
    256: ForwardTile(tile_n=48, cluster=1),
}
FEW_KEYS_ROWS = 2**17  # packed rows times KV heads: smaller calls fill the GPU too few times to gain
FEW_KEYS_COST = 1.15  # time by the plan with clusters, over the time without: from here on most layouts gain
FEW_KEYS_FORWARD_TILES: Tiles = {  # from FEW_KEYS_ROWS and FEW_KEYS_COST on: where segments are short, a cluster's CTAs
    # see other keys. Head dims 192 and 256 gain and lose by it.
    head_dims: replace(FORWARD_TILES[head_dims], cluster=1)
    for head_dims in (96, 128, (192, 128))
}
PARTS_COST = 0.99  # time by the plan of the heads in two parts, over that of all at once: launched up to here
SOFTCAP_TILES = FORWARD_TILES | {  # tanh takes registers: with 128 keys ptxas spills
    64: ForwardTile(tile_n=112, warp_groups=3, stages=3, cluster=1),
}


HEAD_DIM_RULE = f"a multiple of 8 up to {HEAD_DIMS[-1]}"  # of what kernels take, natively or padded


def takes_head_dim(head_dim: int) -> bool:
    return head_dim % 8 == 0 and 0 < head_dim <= HEAD_DIMS[-1]


def kernel_head_dim(head_dim: int) -> int:
    """The native head dim whose kernel runs `head_dim`.

    Raises:
        ValueError: no kernel takes `head_dim`.
    """
    if not takes_head_dim(head_dim):
        raise ValueError(f"head_dim is {head_dim}, expected {HEAD_DIM_RULE}")
    return next(d for d in HEAD_DIMS if d >= head_dim)


def kernel_head_dims(head_dim: int, head_dim_v: int | None = None) -> tuple[int, int]:
    """The native pair whose kernel runs q and k of `head_dim` and v of `head_dim_v` (None: the same) at least cost.

    Raises:
        ValueError: no kernel takes one of them.
    """
    wanted = head_dim, head_dim if head_dim_v is None else head_dim_v
    for one in wanted:
        kernel_head_dim(one)
    return min((pair for pair in HEAD_DIM_PAIRS if pair[0] >= wanted[0] and pair[1] >= wanted[1]), key=sum)


def native_key(head_dim: int, head_dim_v: int | None) -> HeadDims:
    """The key of the native pair in a table of tiles."""
    native, native_v = kernel_head_dims(head_dim, head_dim_v)
    return native if native == native_v else (native, native_v)


def packed_heads(heads_per_kv: int, long_window: bool = False) -> int:
    """Query heads of a KV head in one tile: all of them up to 16, else the divisor that fills tiles best.

    long_window: of more than SHORT_WINDOW keys, or chunks. There 5 heads, which leave 4 of a warp group's 64 rows idle,
        are slower together than one by one; 6 and 10 to 15, which leave 4 or more, follow them unmeasured. In a short
        window a tile of few tokens counts for more: it sees fewer keys.
    """
    if heads_per_kv <= MAX_PACKED_HEADS and not (long_window and WG_ROWS % heads_per_kv > 1):
        return heads_per_kv
    divisors = [n for n in range(1, MAX_PACKED_HEADS + 1) if heads_per_kv % n == 0]
    return max(divisors, key=lambda n: (WG_ROWS // n * n, n))


def head_parts(heads_per_kv: int) -> list[range]:
    """The query heads of a KV head in the two parts that fill most of a warp group's rows; in one part if all heads
    together leave at most one row idle, or are more than a tile takes."""
    if heads_per_kv > MAX_PACKED_HEADS or WG_ROWS % heads_per_kv <= 1:
        return [range(heads_per_kv)]

    def rows(first: int) -> float:
        """Rows of warp groups that the parts take for each token."""
        return sum(WG_ROWS / warp_group_tokens(heads) for heads in (first, heads_per_kv - first))

    first = min(range(heads_per_kv // 2, heads_per_kv), key=rows)
    return [range(first), range(first, heads_per_kv)]


def forward_tile(
    head_dim: int, features: Collection[str] = (), short: bool = False, head_dim_v: int | None = None,
    few_keys: bool = False,
) -> ForwardTile:  # fmt: skip
    """The forward's tile for head dims (any that :func:`kernel_head_dims` takes); GQA ratios share it.

    Args:
        features: see codegen.spec.KernelSpec.
        short: the window or chunk is of SHORT_WINDOW keys or fewer.
        few_keys: the CTAs of a cluster see other keys, as with short segments. Nothing changes with a window or
            softcapping.
    """
    tiles = SOFTCAP_TILES if "softcap" in features else FORWARD_TILES
    if few_keys and not {"window", "softcap"} & set(features):
        tiles = FORWARD_TILES | FEW_KEYS_FORWARD_TILES
    if "window" in features:
        of_short = SHORT_WINDOW_SINKS_TILES if "sinks" in features else SHORT_WINDOW_TILES
        tiles = of_short if short else WINDOW_TILES
    return tiles[native_key(head_dim, head_dim_v)]


# ---------------------------------------------------------------- backward
@dataclass(frozen=True)
class BackwardTile:
    """Tile of :class:`cute_kernels.bwd_frame.BackwardFrame`.

    Attributes:
        tile_m: packed rows a query block.
        tile_n: keys a CTA.
        stages: Q blocks in flight, and as many dO blocks as there is room for.
        cluster: CTAs with neighbouring keys that share Q and dO by multicast; beyond head dim 128, dQ's work too. Of
            head dim 512 it is 1: there are pairs of CTAs, which share the keys.
        deterministic: dQ is summed in the order of the keys.
    """

    tile_m: int
    tile_n: int = 128
    stages: int = 2
    cluster: int = 2
    deterministic: bool = False

    @property
    def ctas(self) -> int:
        """CTAs that take a work item together. CTAs of 64 keys are never alone."""
        return 2 if self.tile_n == 64 else self.cluster

    def partial_floats(self, head_dim: int, head_dim_v: int) -> int:
        """Floats of an item's partial dK and dV of a native pair."""
        return partial_floats(head_dim, head_dim_v, self.tile_n, self.cluster)


BACKWARD_TILES: dict[HeadDims, BackwardTile] = {
    64: BackwardTile(tile_m=128),
    96: BackwardTile(tile_m=96),
    128: BackwardTile(tile_m=80),
    192: BackwardTile(tile_m=80, tile_n=64),
    256: BackwardTile(tile_m=64, tile_n=64),
    512: BackwardTile(tile_m=64, tile_n=64, cluster=1),
    (192, 128): BackwardTile(tile_m=96, tile_n=64),
}
FEW_KEYS_WALK = 1.03  # query rows that clusters of two walk, over the rows that CTAs without clusters walk
FEW_KEYS_TILES: dict[HeadDims, BackwardTile] = {  # from FEW_KEYS_ROWS and FEW_KEYS_WALK on: where segments are short,
    # fewer rows see the keys of both CTAs of a cluster
    head_dim: replace(BACKWARD_TILES[head_dim], cluster=1)
    for head_dim in (64, 96, 128)
}
WINDOW_ROWS: dict[HeadDims, int] = {  # tile_m with a window; with 96 rows ptxas runs products one by one
    (192, 128): 80,
}
SOFTCAP_ROWS: dict[HeadDims, tuple[int, int]] = {  # tile_m with softcapping, without and with a window: tanh takes
    # registers, and ptxas would spill
    64: (128, 96),
    96: (80, 80),
    128: (80, 48),
    (192, 128): (96, 96),
}


def backward_tile(
    head_dim: int, deterministic: bool = False, features: Collection[str] = (), head_dim_v: int | None = None,
    few_keys: bool = False,
) -> BackwardTile:  # fmt: skip
    """The backward's tile for head dims (any that :func:`kernel_head_dims` takes); GQA ratios share kernels.

    Args:
        features: see codegen.spec.KernelSpec.
        few_keys: few rows see the keys of both CTAs of a cluster, as with short segments. Nothing changes with a window
            or softcapping.
    """
    native = native_key(head_dim, head_dim_v)
    tile = BACKWARD_TILES[native]
    if few_keys and not {"window", "softcap"} & set(features):
        tile = FEW_KEYS_TILES.get(native, tile)
    if "window" in features and native in WINDOW_ROWS:
        tile = replace(tile, tile_m=WINDOW_ROWS[native])
    if "softcap" in features and native in SOFTCAP_ROWS:
        tile = replace(tile, tile_m=SOFTCAP_ROWS[native]["window" in features])
    return replace(tile, deterministic=True) if deterministic else tile


@dataclass(frozen=True)
class RowTile:
    """Tile of :class:`cute_kernels.bwd_preprocess.BackwardPreprocess`: `tile_m` as in the :class:`BackwardTile`."""

    tile_m: int


@dataclass(frozen=True)
class DqTile:
    """Tile of :class:`cute_kernels.bwd_postprocess.BackwardPostprocess`: `tile_m` as in the :class:`BackwardTile`."""

    tile_m: int


@dataclass(frozen=True)
class PartialTile:
    """Tile of :class:`cute_kernels.bwd_sum.PartialSum`: `tile_n` and `cluster` as in the :class:`BackwardTile`."""

    tile_n: int
    cluster: int
