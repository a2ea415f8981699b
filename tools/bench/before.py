"""`python -m tools.bench.before FOLDER`: kernels of an earlier commit and today's, in turns in one process.

FOLDER holds the earlier commit's kernels, made there: `dualkv precompile --out FOLDER --head-dims 128 --gqa 4
--deterministic`. Both are called by today's host code, so they must take the same arguments. Results are compared too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from codegen import precompiled, store
from codegen.spec import TILES, BackwardSpecs, KernelSpec, backward_specs, forward_spec
from codegen.store import Kernel
from dualkv.bench import run, sides
from dualkv.bench.inputs import Inputs, Side
from dualkv.bench.show import markdown_table
from dualkv.bench.timing import Meter, sustained, timed
from dualkv.bench.workloads import EIGHT, parse
from dualkv.ops import hopper
from tools.bench.record import OptionalJsonPath, Record

BEFORE, NOW = "before", "now"


def kernels_in(folder: Path) -> dict[KernelSpec, Callable[[], Kernel]]:
    """Make a function for each kernel in a folder that loads it, whatever sources and compiler made it.

    Raises:
        ValueError: there is none.
    """
    found: dict[KernelSpec, Callable[[], Kernel]] = {}
    for path in sorted(p.parent for p in folder.glob("*/kernel.json")):
        record = precompiled.record_of(path)
        spec = todays(record["spec"])
        found[spec] = lambda path=path, spec=spec, symbol=record["symbol"]: store.open_entry(path, spec, symbol)  # type: ignore[misc]
    if not found:
        raise ValueError(f"FOLDER is {str(folder)!r}, expected a folder that `dualkv precompile --out` made")
    return found


def todays(spec: dict[str, Any]) -> KernelSpec:
    """The specification of an earlier kernel without the options of its tile that exist no more."""
    names = {field.name for field in fields(TILES[spec["operation"]])}
    tile = {name: value for name, value in spec["tile"].items() if name in names}
    return KernelSpec.from_json(store.canonical_json(spec | {"tile": tile}))


class Kernels:
    """One of the two sets of kernels; calls of its sides load from it."""

    current: str | None = None

    def __init__(
        self,
        name: str,
        load: Callable[[KernelSpec], Kernel],
        forward: Callable[..., KernelSpec] = forward_spec,
        backward: Callable[..., BackwardSpecs] = backward_specs,
    ) -> None:
        self.name, self.load, self.forward, self.backward = name, load, forward, backward

    def use(self) -> None:
        if Kernels.current != self.name:
            Kernels.current = self.name
            store.load = self.load  # type: ignore[assignment]
            store.load_all = lambda specs: [self.load(spec) for spec in specs]
            hopper.forward_spec, hopper.backward_specs = self.forward, self.backward
            hopper._kernel.cache_clear()
            hopper._backward_kernels.cache_clear()

    def side(self, deterministic: bool) -> Callable[[Inputs, str], Side]:
        return lambda inputs, direction: switched(self.use, inputs, direction, deterministic)


def switched(use: Callable[[], None], inputs: Inputs, direction: str, deterministic: bool = False) -> Side:
    """The side of our kernels, those that `use` puts in place, before each call again."""
    use()
    side = sides.ours(inputs, direction, deterministic)

    def call() -> Any:
        use()
        return side.call()

    return replace(side, call=call)


def earlier(folder: Path) -> Callable[[KernelSpec], Kernel]:
    """Loads the earlier kernels, each once."""
    known, loaded = kernels_in(folder), dict[KernelSpec, Kernel]()

    def load(spec: KernelSpec) -> Kernel:
        if spec not in loaded:
            if spec not in known:
                raise ValueError(f"{folder} has no kernel {spec}: make it there with the earlier commit")
            loaded[spec] = known[spec]()
        return loaded[spec]

    return load


def earlier_specs(folder: Path) -> tuple[Callable[..., KernelSpec], Callable[..., BackwardSpecs]]:
    """`forward_spec` and `backward_specs` as the earlier kernels have them, for short segments too."""
    known = set(kernels_in(folder))
    of_forward: Callable[..., KernelSpec] = forward_spec
    of_backward = cast(Callable[..., BackwardSpecs], backward_specs)

    def forward(*given: Any, few_keys: bool) -> KernelSpec:
        found = of_forward(*given, few_keys=few_keys)
        return found if found in known else of_forward(*given)

    def backward(*given: Any, few_keys: bool) -> BackwardSpecs:
        found = of_backward(*given, few_keys=few_keys)
        return found if known.issuperset(found.present) else of_backward(*given)

    return forward, backward


def ratios(calls: tuple[Callable[[], Any], Callable[[], Any]], pairs: int, turn: Callable[[Any], float]) -> list[float]:
    """The first call's time over the second's, of `pairs` pairs of turns, each first in every other pair.

    turn: milliseconds of a call, in one turn of it.
    """
    found = []
    for i in range(pairs):
        ms = [0.0, 0.0]
        for which in (0, 1) if i % 2 == 0 else (1, 0):
            ms[which] = turn(calls[which])
        found.append(ms[0] / ms[1])
    return found


def single(call: Callable[[], Any], pause: float) -> float:
    """A turn of one call.

    It is timed after an untimed one, so that the GPU waits for no host, and before a pause, so that the card stays
    below its power limit: at the limit its clock moves by several per cent from turn to turn.
    """
    call()
    begin, end = timed(call)
    end.synchronize()
    time.sleep(pause)
    return begin.elapsed_time(end)


def back_to_back(call: Callable[[], Any], seconds: float) -> float:
    """A turn of calls one behind the other, as training makes them."""
    ms: float = sustained(call, single(call, 0.0), seconds, Meter())["ms"]
    return ms


def speed(found: list[float]) -> dict[str, float]:
    """The earlier time over today's: median of the pairs, and its quartiles."""
    lower, middle, upper = statistics.quantiles(found, n=4, method="inclusive")
    return {"speed": middle, "lower_quartile": lower, "upper_quartile": upper}


@torch.no_grad()
def main(
    folder: Annotated[Path, typer.Argument(help="Kernels of the earlier commit.")],
    workload: Annotated[list[str] | None, typer.Option("-w", help="By name or lengths. Default: the eight.")] = None,
    direction: Annotated[list[str] | None, typer.Option("-d", help="fwd, bwd, deterministic. Default: all.")] = None,
    pairs: Annotated[int, typer.Option(help="Of turns, the earlier kernels' and today's.")] = 100,
    pause: Annotated[float, typer.Option(help="Seconds behind each call.")] = 0.005,
    seconds: Annotated[float, typer.Option(help="Of turns of many calls, 2 or more; 0: single calls, as above.")] = 0,
    json_to: OptionalJsonPath = None,
) -> None:
    """Time an earlier commit's kernels against today's. Given today's own kernels, the result is the method's error."""
    kernels = [Kernels(BEFORE, earlier(folder), *earlier_specs(folder)), Kernels(NOW, store.load)]
    turn = partial(back_to_back, seconds=seconds) if seconds else partial(single, pause=pause)
    settings = {"pairs": pairs, **({"seconds": seconds} if seconds else {"pause": pause})}
    results: list[dict[str, Any]] = []
    record = Record(json_to)
    load, load_all = store.load, store.load_all
    try:
        for name in workload or EIGHT:
            for asked in direction or ["fwd", "bwd", "deterministic"]:
                fixed, made = asked == "deterministic", Inputs(parse(name))
                before, now = (one.side(fixed)(made, "bwd" if fixed else asked) for one in kernels)
                run.run_checked(before, None)
                difference = run.run_checked(now, tuple(x.clone() for x in before.results()))
                found = speed(ratios((before.call, now.call), pairs, turn))
                results.append({"workload": name, "direction": asked, "difference": difference, **found})
                record.write({"settings": settings, "results": results}, results[-1])
                del made, before, now
                torch.cuda.empty_cache()
    finally:
        store.load, store.load_all = load, load_all
        hopper.forward_spec, hopper.backward_specs = forward_spec, backward_specs
    by_direction: dict[str, list[float]] = {}
    for r in results:
        by_direction.setdefault(r["direction"], []).append(r["speed"])
    rows = [
        [name, f"{statistics.geometric_mean(s):.4f}", f"{min(s):.4f}", f"{max(s):.4f}"]
        for name, s in by_direction.items()
    ]
    print(markdown_table(("earlier time over today's", "mean", "lowest", "highest"), rows))


if __name__ == "__main__":
    typer.run(main)
