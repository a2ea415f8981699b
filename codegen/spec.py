"""Specifications of kernels: what is fixed when a kernel is compiled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from codegen.tiles import (
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    MAX_PACKED_HEADS,
    MIXED,
    MIXED_RATIOS,
    BackwardTile,
    DqTile,
    ForwardTile,
    PartialTile,
    RowTile,
    backward_tile,
    forward_tile,
    kernel_head_dims,
    packed_heads,
)

DTYPES = ("bf16", "fp16")
ARCHS = ("sm_90a",)
GRADIENTS = ("qkv", "qk", "qv", "kv", "q", "k", "v")  # combinations that a backward computes
Tile = ForwardTile | BackwardTile | RowTile | PartialTile | DqTile
AnyTile = TypeVar("AnyTile", bound=Tile)
Features = Collection[str]  # names in FEATURES
TILES: dict[str, type[Tile]] = {  # each operation's tile configuration; its kernel is cute_kernels/<operation>.py
    "fwd": ForwardTile,
    "fwd_paths": ForwardTile,
    "bwd_preprocess": RowTile,
    "bwd": BackwardTile,
    "bwd_sum": PartialTile,
    "bwd_postprocess": DqTile,
}


FORWARDS = ("fwd", "fwd_paths")  # for prompts with responses, for trees of any depth
# What an operation's kernel may compute besides, in the order of its arguments.
FEATURES: dict[str, tuple[str, ...]] = {
    "fwd": ("sinks", "softcap"),
    "fwd_paths": ("window", "sinks", "softcap"),
    "bwd_preprocess": ("sinks", "dlse"),
    "bwd": ("window", "softcap"),
}
OF_VALUES = ("fwd", "fwd_paths", "bwd_preprocess", "bwd", "bwd_sum")  # depend on the head dim of values
PARTIAL = ("bwd_preprocess", "bwd", "bwd_sum")  # leave work out if fewer gradients are requested


@dataclass(frozen=True)
class KernelSpec(Generic[AnyTile]):
    """One specialization: what is fixed when a kernel is compiled. Lengths, groups, T, H, Hk and strides are not.

    Attributes:
        operation: one of TILES.
        dtype: "bf16" or "fp16".
        head_dim: native head dim; the same kernel runs every smaller multiple of 8.
        packed_heads: query heads of one KV head in a tile. Forward: the GQA ratio up to 16, beyond that a divisor of
            it. Backward: 1, whatever the ratio.
        tile: the operation's tile configuration.
        gradients: the gradients that a kernel of PARTIAL computes, one of GRADIENTS; "qkv" for other kernels.
        arch: "sm_90a".
        features: names of FEATURES of the operation, in that order. "window": a sliding window or chunks. "dlse": a
            gradient of the log-sum-exp.
        head_dim_v: native head dim of values (kernels of OF_VALUES), if it is another one than `head_dim`.

    Raises:
        ValueError: no kernel is written for a value.
        TypeError: the tile is another operation's, or a number is not an int.
    """

    operation: str
    dtype: str
    head_dim: int
    packed_heads: int
    tile: AnyTile
    gradients: str = "qkv"
    arch: str = "sm_90a"
    features: tuple[str, ...] = ()
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("operation", tuple(TILES)),
            ("dtype", DTYPES),
            ("head_dim", HEAD_DIMS),
            ("packed_heads", range(1, MAX_PACKED_HEADS + 1)),
            ("gradients", GRADIENTS if self.operation in PARTIAL else GRADIENTS[:1]),
            ("arch", ARCHS),
        ):
            value = getattr(self, name)
            if type(value) is not type(allowed[0]):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}), expected {_words(allowed)}")
            if value not in allowed:
                raise ValueError(f"{name} is {value!r}, expected {_words(allowed)}")
        tile = TILES[self.operation]
        if type(self.tile) is not tile:
            raise TypeError(f"tile is a {type(self.tile).__name__}, expected a {tile.__name__} for {self.operation}")
        for name, value in asdict(self.tile).items():
            if type(value) not in (int, bool) or value < 0:
                raise ValueError(f"tile.{name} is {value!r}, expected an integer of 0 or more")
        known = FEATURES.get(self.operation, ())
        if self.features != _own(self.operation, self.features):
            raise ValueError(f"features is {self.features!r}, expected a tuple of some of {known} in this order")
        if self.head_dim_v is not None:
            others = [of_v for of_qk, of_v in MIXED if of_qk == self.head_dim] if self.operation in OF_VALUES else []
            if type(self.head_dim_v) is not int or self.head_dim_v not in others:
                wanted = " or ".join(map(str, (*others, None)))
                of = f"{self.operation} at head_dim {self.head_dim}"
                raise ValueError(f"head_dim_v is {self.head_dim_v!r} of {of}, expected {wanted}")

    @property
    def head_dims(self) -> tuple[int, int]:
        """The native pair: of queries and keys, and of values."""
        return self.head_dim, self.head_dim_v or self.head_dim

    @property
    def symbol(self) -> str:
        """The exported function's name: a C identifier, different for different specifications."""
        digest = hashlib.sha256(self.to_json().encode()).hexdigest()[:8]
        of_v = f"v{self.head_dim_v}" if self.head_dim_v else ""
        shape = f"d{self.head_dim}{of_v}_h{self.packed_heads}_{self.gradients}"
        named = "_".join(("", *self.features))
        return f"dualkv_{self.operation}_{self.dtype}_{shape}{named}_{self.arch}_{digest}"

    @property
    def trees(self) -> bool:
        """Whether this is the forward for layouts deeper than two levels."""
        return self.operation == FORWARDS[True]

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON: features as one string, joined by "+"; without `head_dim_v` where it is None."""
        fields = asdict(self) | {"features": "+".join(self.features)}
        return {name: value for name, value in fields.items() if name != "head_dim_v" or value is not None}

    def to_json(self) -> str:
        return canonical_json(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> KernelSpec:
        """The inverse of `to_json`; raises like the constructor."""
        fields = json.loads(text)
        tile = TILES.get(fields["operation"])
        features = tuple(filter(None, fields.get("features", "").split("+")))
        return cls(**(fields | {"tile": tile(**fields["tile"]) if tile else fields["tile"], "features": features}))

    def __str__(self) -> str:
        tile = " ".join(f"{name}={value}" for name, value in asdict(self.tile).items())
        of_v = f"head_dim_v={self.head_dim_v} " if self.head_dim_v else ""
        shape = f"head_dim={self.head_dim} {of_v}packed_heads={self.packed_heads}"
        gradients = "" if self.gradients == "qkv" else f"gradients={self.gradients} "
        features = f"features={'+'.join(self.features)} " if self.features else ""
        return f"{self.operation} {self.dtype} {shape} {gradients}{features}{tile} {self.arch}"


def _own(operation: str, features: Iterable[str]) -> tuple[str, ...]:
    """Select the features of a call that an operation's kernel has, in their order."""
    return tuple(name for name in FEATURES.get(operation, ()) if name in features)


def _native(head_dim: int, head_dim_v: int | None) -> tuple[int, int | None]:
    """Head dims of a specification: its `head_dim` and `head_dim_v`."""
    native, native_v = kernel_head_dims(head_dim, head_dim_v)
    return native, None if native_v == native else native_v


def forward_spec(
    dtype: str, head_dim: int, heads_per_kv: int, trees: bool = False, features: Features = (), short: bool = False,
    head_dim_v: int | None = None, few_keys: bool = False,
) -> KernelSpec[ForwardTile]:  # fmt: skip
    """The forward kernel that runs a head dim (a multiple of 8 up to 512) and a GQA ratio, by the table of tiles.

    Args:
        trees: the kernel for layouts deeper than two levels, which also serves windows.
        features: of the call, names in FEATURES. A kernel has the ones that concern it.
        short: see `forward_tile`.
        head_dim_v: of values; None: `head_dim`.
        few_keys: see `forward_tile`; not of trees.
    """
    operation, (native, native_v) = FORWARDS[trees], _native(head_dim, head_dim_v)
    own = _own(operation, features)
    packed = packed_heads(heads_per_kv, long_window="window" in own and not short)
    tile = forward_tile(head_dim, own, short, head_dim_v, few_keys and not trees)
    return KernelSpec(operation, dtype, native, packed, tile, features=own, head_dim_v=native_v)


class BackwardSpecs(NamedTuple):
    """The backward's kernels in the order of their launches."""

    preprocess: KernelSpec[RowTile]
    main: KernelSpec[BackwardTile]
    partial_sum: KernelSpec[PartialTile] | None  # for dK and dV; launched only if items are split
    postprocess: KernelSpec[DqTile] | None  # for dQ

    @property
    def present(self) -> list[KernelSpec]:
        return [spec for spec in self if spec is not None]


def backward_specs(
    dtype: str,
    head_dim: int,
    deterministic: bool = False,
    gradients: str = GRADIENTS[0],
    features: Features = (),
    head_dim_v: int | None = None,
    few_keys: bool = False,
) -> BackwardSpecs:
    """The backward kernels that run a head dim (a multiple of 8 up to 512), whatever the GQA ratio.

    Args:
        deterministic: concerns the sums of dQ; without dQ it changes nothing.
        features: of the call, names in FEATURES. Each kernel has the ones that concern it.
        head_dim_v: of values; None: `head_dim`.
        few_keys: see `backward_tile`.
    """
    native, native_v = _native(head_dim, head_dim_v)
    tile = backward_tile(head_dim, deterministic and "q" in gradients, features, head_dim_v, few_keys)

    def spec(operation: str, tile: AnyTile) -> KernelSpec[AnyTile]:
        asked = gradients if operation in PARTIAL else GRADIENTS[0]
        of_v = native_v if operation in OF_VALUES else None
        return KernelSpec(operation, dtype, native, 1, tile, asked, features=_own(operation, features), head_dim_v=of_v)

    return BackwardSpecs(
        spec("bwd_preprocess", RowTile(tile.tile_m)),
        spec("bwd", tile),
        None if gradients == "q" else spec("bwd_sum", PartialTile(tile.tile_n, tile.cluster)),
        spec("bwd_postprocess", DqTile(tile.tile_m)) if "q" in gradients else None,
    )


def table() -> list[KernelSpec]:
    """The specializations that training needs: with all gradients, with dQ alone, and with dK and dV.

    Other combinations of gradients have kernels too, compiled at first use. The forward of trees has kernels for every
    dtype and GQA ratio, but neither changes how that forward differs from the other one: one a head dim is listed. The
    forward of MIXED head dims is listed with MIXED_RATIOS.
    """
    forward = [
        forward_spec(dtype, d, h, head_dim_v=of_v, few_keys=few_keys)
        for d, of_v in HEAD_DIM_PAIRS
        for h in (range(1, MAX_PACKED_HEADS + 1) if d == of_v else MIXED_RATIOS)
        for dtype in DTYPES
        for few_keys in (False, True)
    ]
    trees = [forward_spec(DTYPES[0], d, 4, trees=True, head_dim_v=of_v) for d, of_v in HEAD_DIM_PAIRS]
    backward = [
        spec
        for d, of_v in HEAD_DIM_PAIRS
        for dtype in DTYPES
        for fixed in (False, True)
        for gradients in ("qkv", "q", "kv")
        for few_keys in (False, True)
        for spec in backward_specs(dtype, d, fixed, gradients, head_dim_v=of_v, few_keys=few_keys).present
    ]
    return list(dict.fromkeys(forward + trees + backward))


def canonical_json(value: Any) -> str:
    """One text for equal values, whatever the order of their keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _words(allowed: Any) -> str:
    if isinstance(allowed, range):
        return f"an integer from {allowed[0]} to {allowed[-1]}"
    return " or ".join(str(value) for value in allowed)
