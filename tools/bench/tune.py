"""`python -m tools.bench.tune -d bwd --head-dim 96`: tile configurations in turns, by head dim, workload and GQA ratio.

What the table of `codegen/tiles.py` is held to: what is fastest over the ratios of a head dim belongs there.
Candidates are changes of its entries, for every layout; without `--tile` those below. They are compiled side by side
first, and one that does not compile, or spills, or whose products run one by one, is left out and says so.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Annotated, Any

import torch
import typer

from codegen import KernelError, store
from codegen.spec import KernelSpec, backward_specs, forward_spec
from codegen.tiles import FEW_KEYS_FORWARD_TILES, FEW_KEYS_TILES, HeadDims
from dualkv.bench import run, sides
from dualkv.bench.inputs import Inputs, Side
from dualkv.bench.workloads import MAIN, Workload, parse
from dualkv.ops import hopper
from tools.bench.before import switched
from tools.bench.record import OptionalJsonPath, Record
from tools.ncu.job import TABLES, changed, read_tile

STANDS = "as it stands"
CANDIDATES: dict[str, dict[HeadDims, list[str]]] = {
    "fwd": {
        64: ["stages=4"],
        96: ["tile_n=80,stages=4", "tile_n=64,stages=4"],
        128: ["tile_n=80,stages=2", "cluster=1"],
        192: ["tile_n=112", "tile_n=80"],
        256: ["tile_n=80"],
        (192, 128): [
            "tile_n=112,warp_groups=2,stages=2",
            "tile_n=128,warp_groups=2,stages=2",
            "tile_n=80,warp_groups=3,stages=3",
        ],
    },
    "bwd": {
        64: ["tile_m=112", "tile_m=96"],
        96: ["tile_m=80", "tile_m=64"],
        128: ["tile_m=64"],
        192: ["tile_m=64", "tile_m=48"],
        256: ["tile_m=48"],
        (192, 128): ["tile_m=80", "tile_m=64"],
    },
}


class Candidate:
    """A changed entry of the table, which calls of its side put there first."""

    def __init__(self, direction: str, head_dim: HeadDims, changes: str = "") -> None:
        """changes: `name=value`, several with commas; none for the entry itself.

        Raises:
            ValueError: no such field, or not a number.
        """
        self.table, self.direction, self.head_dim, self.name = TABLES[direction], direction, head_dim, changes or STANDS
        self.tile = changed(self.table[head_dim], read_tile(changes.split(",")) if changes else {})

    def use(self) -> None:
        """Make it the table's entry; what was chosen by the one before is forgotten."""
        if self.table[self.head_dim] is not self.tile:
            self.table[self.head_dim] = self.tile
            hopper._kernel.cache_clear()
            hopper._backward_kernels.cache_clear()

    def specs(self, ratios: Sequence[int]) -> list[KernelSpec]:
        self.use()
        head_dim, of_v = pair(self.head_dim)
        if self.direction == "bwd":  # any ratio's
            return list(backward_specs("bf16", head_dim, head_dim_v=of_v).present)
        return [forward_spec("bf16", head_dim, ratio, head_dim_v=of_v) for ratio in ratios]

    def side(self, inputs: Inputs, direction: str) -> Side:
        return switched(self.use, inputs, direction)


def pair(head_dim: HeadDims) -> tuple[int, int | None]:
    """Head dim of q and k, and the head dim of v where it differs."""
    return (head_dim, None) if isinstance(head_dim, int) else head_dim


def named(head_dim: HeadDims) -> str:
    """Write a head dim as --head-dim takes it."""
    return "/".join(map(str, filter(None, pair(head_dim))))


def candidates(direction: str, head_dim: HeadDims, given: Sequence[str]) -> list[Candidate]:
    """The table's entry unchanged, then the changed ones."""
    changes = given or CANDIDATES[direction][head_dim]
    return [Candidate(direction, head_dim, text) for text in ("", *changes)]


def _fault(spec: KernelSpec) -> str | None:
    """Compiles a kernel where no store has it; what is wrong with it, if anything."""
    try:
        made = json.loads((store.entry(spec) / "kernel.json").read_text())
    except KernelError as e:
        return str(e).strip().splitlines()[-1][-200:]
    if made["wgmma_warnings"]:
        return f"products run one by one ({', '.join(made['wgmma_warnings'])})"
    return f"{made['spill_stores']} bytes spilled" if made["spill_stores"] else None


def compiled(tried: Sequence[Candidate], ratios: Sequence[int]) -> list[Candidate]:
    """Compile the candidates; returns those with kernels worth timing, and the table's, and says why the others are
    left out."""
    specs = {one.name: one.specs(ratios) for one in tried}
    unique = list(dict.fromkeys(spec for some in specs.values() for spec in some))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = dict(zip(unique, pool.map(_fault, unique), strict=True))
    ready = []
    for one in tried:
        why = next((faults[spec] for spec in specs[one.name] if faults[spec]), None)
        if why:
            print(f"D={named(one.head_dim)} {one.direction}, {one.name}: {why}")
        if not why or one.name == STANDS:
            ready.append(one)
    return ready


def fastest(results: Sequence[dict[str, Any]]) -> tuple[str, float]:
    """Return the candidate with the best mean speed over results of one head dim, and this speed over the speed of the
    table's entry (NaN where that did not run)."""
    by_name: dict[str, list[float]] = {}
    for result in results:
        ms = {name: side["sustained_ms"] for name, side in result["sides"].items() if "sustained_ms" in side}
        for name in ms if STANDS in ms else ():
            by_name.setdefault(name, []).append(ms[STANDS] / ms[name])
    complete = {name: statistics.geometric_mean(s) for name, s in by_name.items() if len(s) == len(results)}
    best = max(complete, key=lambda name: complete[name], default=STANDS)
    return best, complete.get(best, math.nan)


def main(
    direction: Annotated[str, typer.Option("-d", help="fwd or bwd.")] = "bwd",
    head_dim: Annotated[
        list[str] | None, typer.Option(help="Native ones, such as 128 and 192/128. Default: all.")
    ] = None,
    gqa: Annotated[list[int] | None, typer.Option(help="GQA ratios. Default: 1, 4 and 8.")] = None,
    workload: Annotated[
        list[str] | None, typer.Option("-w", help=f"By name or lengths, at 32 heads. Default: {MAIN}.")
    ] = None,
    tile: Annotated[
        list[str] | None, typer.Option(help="NAME=NUMBER,...: fields that differ from the table's.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of a turn.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="Turns of a candidate.")] = 3,
    json_to: OptionalJsonPath = None,
) -> None:
    """Time tile configurations against the table's, and say which is fastest at each head dim."""
    if direction not in TABLES:
        raise typer.BadParameter(f"-d is {direction!r}, expected fwd or bwd")
    known = {named(d): d for d in TABLES[direction]}
    dims, ratios = head_dim or list(known), gqa or [1, 4, 8]
    if unknown := set(dims) - set(known):
        raise typer.BadParameter(f"--head-dim is {min(unknown)}, expected some of {', '.join(known)}")
    if odd := [ratio for ratio in ratios if ratio < 1 or 32 % ratio]:
        raise typer.BadParameter(f"--gqa is {odd[0]}, expected divisors of 32 heads")
    try:
        workloads = [parse(text) for text in workload or [MAIN]]
    except ValueError as e:
        raise typer.BadParameter(str(e)) from None
    FEW_KEYS_TILES.clear()  # in this process: workloads of short segments take the candidates too
    FEW_KEYS_FORWARD_TILES.clear()
    record, filed_results = Record(json_to), list[dict[str, Any]]()
    turns = {"direction": direction, "seconds": seconds, "rounds": rounds}
    for d in dims:
        try:
            tried = candidates(direction, known[d], tile or [])
        except ValueError as e:
            raise typer.BadParameter(str(e)) from None
        entry, ready = tried[0], compiled(tried, ratios)
        print(f"D={d} {direction}: {len(ready)} of {len(tried)} to time", flush=True)
        results = []
        try:
            for groups, ratio in product(workloads, ratios):
                of_qk, of_v = pair(known[d])
                shape = groups.with_shape(heads=32, kv_heads=32 // ratio, head_dim=of_qk, head_dim_v=of_v)
                results.append({"groups": groups.name} | _timed(shape, direction, ready, seconds, rounds))
                filed_results.append(figures(results[-1]))
                record.write({"settings": turns, "results": filed_results}, filed_results[-1])
        finally:
            entry.use()
        best, gain = fastest(results)
        print(f"D={d} {direction}: {best}, {gain:.3f} times the speed of the table's", flush=True)


def _timed(
    workload: Workload, direction: str, ready: Sequence[Candidate], seconds: float, rounds: int
) -> dict[str, Any]:
    """`dualkv bench` with the candidates as its sides."""
    sides.SIDES.update({one.name: one.side for one in ready})
    try:
        names = [one.name for one in ready]
        return run.bench(workload, direction, names, seconds, rounds, run.Clock(None), run.Meter())
    finally:
        for one in ready:
            del sides.SIDES[one.name]
        torch.cuda.empty_cache()


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Choose the figures of a result that are filed; all results have the same turns."""
    w, kept = result["workload"], ("sustained_ms", "error")
    by_name = {name: {key: side[key] for key in kept if key in side} for name, side in result["sides"].items()}
    of_v = {"head_dim_v": w["head_dim_v"]} if w.get("head_dim_v") else {}
    shape = {"head_dim": w["head_dim"], **of_v, "gqa": w["heads"] // w["kv_heads"]}
    return {"workload": result["groups"], **shape, "sides": by_name}


if __name__ == "__main__":
    typer.run(main)
