"""The job of a profile: one direction of a workload, and the kernels that run it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from codegen import tiles
from codegen.spec import KernelSpec, backward_specs, forward_spec
from dualkv.bench.workloads import Workload
from dualkv.ops import hopper
from dualkv.segments import segments_of

DIRECTIONS = ("fwd", "bwd")
TABLES: dict[str, dict[tiles.HeadDims, Any]] = {"fwd": tiles.FORWARD_TILES, "bwd": tiles.BACKWARD_TILES}


def changed(entry: Any, given: Mapping[str, int]) -> Any:
    """A tile configuration with other values.

    Raises:
        ValueError: a field that it has not.
    """
    known = asdict(entry)
    for name in given:
        if name not in known:
            raise ValueError(f"tile has no field {name!r}, expected some of {', '.join(known)}")
    return replace(entry, **{name: type(known[name])(value) for name, value in given.items()})


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        workload: groups, heads, head dim and dtype.
        direction: of DIRECTIONS.
        deterministic: of the backward.
        tile: fields of the direction's tile configuration that differ from the table's, for a tuner. Layouts of
            short segments take it too.
    """

    workload: Workload
    direction: str
    deterministic: bool = False
    tile: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction is {self.direction!r}, expected {' or '.join(DIRECTIONS)}")
        changed(TABLES[self.direction][self.native], self.tile)

    @property
    def native(self) -> tiles.HeadDims:
        """Head dims of the kernels that run it, as tables of tiles name them."""
        return tiles.native_key(*self.workload.head_dims)

    def use_tile(self) -> None:
        """Make `tile` the table's in this process, before any kernel is chosen."""
        if self.tile:
            table = TABLES[self.direction]
            table[self.native] = changed(table[self.native], self.tile)
            tiles.FEW_KEYS_TILES.clear()
            tiles.FEW_KEYS_FORWARD_TILES.clear()

    def specs(self) -> dict[str, KernelSpec]:
        """The specifications by operation, in the order of their launches."""
        w, layout = self.workload, self.workload.layout()
        segments, ratio, more = segments_of(layout.offsets, layout.parent), w.heads // w.kv_heads, dict[str, Any]()
        if self.direction == "fwd":
            trees = layout.depth > 2
            (_, few_keys), *more_launches = hopper.forward_launches(
                segments, trees, w.head_dim, ratio, w.kv_heads, w.head_dim_v
            )
            if more_launches:
                raise ValueError(f"the forward of {ratio} query heads a KV head is two launches here, expected one")
            more = {"head_dim_v": w.head_dim_v, "few_keys": few_keys}
            found: tuple[KernelSpec, ...] = (forward_spec(w.dtype, w.head_dim, ratio, trees, **more),)
        else:
            more = {"head_dim_v": w.head_dim_v, "few_keys": hopper.few_keys_backward(segments, w.kv_heads, None)}
            found = tuple(backward_specs(w.dtype, w.head_dim, self.deterministic, **more).present)
        return {spec.operation: spec for spec in found}

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Job:
        workload = dict(given["workload"])
        workload["prompt_lens"] = tuple(workload["prompt_lens"])
        workload["response_lens"] = tuple(map(tuple, workload["response_lens"]))
        workload["parent"] = tuple(workload.get("parent", ()))
        return cls(Workload(**workload), given["direction"], given["deterministic"], given["tile"])


def read_tile(given: list[str]) -> dict[str, int]:
    """`name=value` each."""
    tile = {}
    for text in given:
        name, _, value = text.partition("=")
        if not value.isdecimal():
            raise ValueError(f"--tile is {text!r}, expected NAME=NUMBER, such as tile_n=144")
        tile[name] = int(value)
    return tile
