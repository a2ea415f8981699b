"""`python -m tools.bench.attention [NAME ...]`: the recorded runs of `dualkv bench`, into docs/results/NAME.json.

Tables and statements of README and docs come from these files (`python -m tools.tables` writes them).
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer

from dualkv.bench.run import PEER_CACHES
from dualkv.bench.sides import SIDES
from dualkv.bench.workloads import EIGHT, MAIN, NAMED, SLOW, parse
from dualkv.cli import commands
from tools import filed, tables
from tools.tables import RESULTS


def _options(option: str, values: Iterable[str]) -> str:
    return " ".join(f"{option} {value}" for value in values)


_TREES = [name for name, workload in NAMED.items() if workload.parent]
_HEADS = [name for name in NAMED if re.fullmatch(f"{MAIN}-d\\d+-gqa\\d", name)]
_TENSOR_PARALLEL = [name for name in NAMED if name.startswith(f"{MAIN}-tp")]
_LONG = MAIN, "n16-p32768-r2048"
_WINDOWS = [
    *(f"{lengths}-{shape}" for shape in ("w4096", "w512-d256", "w1024-d256", "w128-d64") for lengths in _LONG),
    *(name for name in NAMED if name.endswith("-c8192")),
    *(f"g64-n8-{shape}" for shape in ("w128-d64", "w512-d256", "w1024-d256")),
]
_VALUES = [name for name in NAMED if "-d192v128-" in name]
_D512 = [name for name in NAMED if "-d512-" in name]
_RANDOM = [f"random-1-{i}" for i in range(40)]
_TRACES = [
    "trace-branched-0", MAIN, "trace-swe-dropped-0-n4-t16", "trace-tau2-0", "trace-treepo-2", "trace-search-0-n40",
]  # fmt: skip
_TREE_PEERS = _options("-s", ["dualkv", "cudnn-intervals", "fa4-prompt-copied"])
_TWO = _options("-s", ["dualkv", "fa4-3-calls"])
# cuDNN has no kernels of head dim 192 for q, k and v alike: its side then has a refusal in the place of figures.
_THREE = f"{_TWO} -s cudnn-intervals"
_PEERS = _options("-s", ["dualkv", *tables.WINDOW_PEERS])
_CUDNN = _options("-s", ["dualkv", "cudnn-intervals"])
_VALUES_PEERS = _options("-s", ["dualkv", *tables.VALUES_PEERS])
_SLOW_PEERS = _options("-s", ["dualkv", *tables.VALUES_PEERS, "flex"])
_MOST = *SLOW, *EIGHT, f"{MAIN}-d256-gqa4"
_PYTORCH = _options("-s", ["dualkv-flash", "torch-flash-replicated", "dualkv-flex"])
_OTHERS = MAIN, "g64-n8", "g128-n8-short", "agent-t10-r512", f"{MAIN}-w128-d64", f"{MAIN}-w4096"
_LAST = "flex", "fa4-3-calls-deterministic"  # compile long
_ALL = _options("-s", sorted(SIDES, key=lambda name: name in _LAST and 1 + _LAST.index(name)))
# Shorter turns show what the card did before: after a pause it takes up to 880 W for 0.2 s, and less behind that. With
# turns of 0.4 s a side that draws more than the limit gains some per cent, and the side after it loses them.
_TURNS, _SHORT_TURNS, _FEATURE_TURNS = "--seconds 2 --rounds 3", "--seconds 1 --rounds 2", "--seconds 2 --rounds 2"

LENGTHS = "prompt_lens", "response_lens", "parent"  # of a workload
FIELDS = "direction", "flops"  # of a result
OF_A_SIDE = (
    "error", "difference", "parts", "cold_ms", "rounds", "sustained_ms", "sustained_tflops", "joules", "power_w",
    "sm_clock_mhz", "speed_against_reference",
)  # fmt: skip

AMPERE = "composition-ampere"  # by :func:`as_ampere`
# name: options of `dualkv bench`
RECORDS = {
    "forward": f"-d fwd {_TWO} {_TURNS} {_options('-w', EIGHT)}",
    "backward": f"-d bwd {_TWO} -s dualkv-deterministic {_TURNS} {_options('-w', EIGHT)}",
    "backward-head-dims": f"-d bwd {_THREE} {_SHORT_TURNS} {_options('-w', _HEADS)}",
    "forward-head-dims": f"-d fwd {_THREE} {_SHORT_TURNS} {_options('-w', _HEADS)}",
    "backward-tensor-parallel": f"-d bwd {_THREE} {_SHORT_TURNS} {_options('-w', _TENSOR_PARALLEL)}",
    "random-forward": f"-d fwd {_THREE} {_SHORT_TURNS} {_options('-w', _RANDOM)}",
    "random-backward": f"-d bwd {_THREE} {_SHORT_TURNS} {_options('-w', _RANDOM)}",
    "trees": f"-d fwd,bwd {_CUDNN} -s fa4-replicated -s flex {_SHORT_TURNS} {_options('-w', _TREES)}",
    "traces": f"-d fwd,bwd {_TREE_PEERS} -s fa4-replicated {_FEATURE_TURNS} {_options('-w', _TRACES)}",
    "traces-backward": f"-d bwd {_TREE_PEERS} {_FEATURE_TURNS} {_options('-w', _TRACES)}",
    "traces-flex": f"-d fwd,bwd -s dualkv -s flex {_FEATURE_TURNS} -w {_TRACES[0]}",
    "windows": f"-d fwd,bwd {_PEERS} {_FEATURE_TURNS} {_options('-w', _WINDOWS)}",
    "values": f"-d fwd,bwd {_VALUES_PEERS} {_FEATURE_TURNS} {_options('-w', _VALUES)}",
    "d512": f"-d fwd,bwd -s dualkv -s flex {_FEATURE_TURNS} {_options('-w', _D512)}",
    "cudnn": f"-d fwd,bwd {_CUDNN} {_FEATURE_TURNS} {_options('-w', _MOST)}",
    "slow": f"-d fwd,bwd {_SLOW_PEERS} {_SHORT_TURNS} {_options('-w', SLOW)}",
    "magi": f"-d fwd,bwd -s dualkv -s magi-ranges {_FEATURE_TURNS} {_options('-w', (*EIGHT[:3], *EIGHT[4:]))}",
    "composition-h200": f"-d fwd,bwd,both {_PYTORCH} {_SHORT_TURNS} -w {MAIN}",
    "composition-ampere": f"-d fwd,bwd,both {_PYTORCH} {_SHORT_TURNS} {_options('-w', _OTHERS)}",
    "flex-backend": "-d both -s dualkv-flash -s dualkv-flex --seconds 0.5 --rounds 2"
    " -w g64-n8 -w n64-p4096-r256 -w g128-n8-short",
    "both": f"-d both {_THREE} -s fa4-replicated {_SHORT_TURNS} -w {MAIN} -w n64-p4096-r256",
    "peers": f"-d fwd,bwd {_ALL} {_SHORT_TURNS} -w {MAIN}",
}


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Some of {', '.join(RECORDS)}. Default: all but {AMPERE}, which runs alone."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where the files go.")] = RESULTS,
    time_limit: Annotated[float | None, typer.Option(help="Seconds that all may take together, compiling too.")] = None,
) -> None:
    """Run some of the recorded benchmarks and write their figures, after each result: a run that is cut keeps them."""
    asked = names or [name for name in RECORDS if name != AMPERE]
    if unknown := [name for name in asked if name not in RECORDS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(RECORDS)}")
    if AMPERE in asked:
        if len(asked) > 1:
            raise typer.BadParameter(f"{AMPERE} changes how Triton compiles, so it runs without other records")
        as_ampere()
    os.environ.update(dict.fromkeys(PEER_CACHES, "1"))  # in processes begun here, and what is imported later
    end = time.monotonic() + time_limit if time_limit else math.inf
    failed: list[str] = []
    for name in asked:  # in one process: loading the peers takes longer than some of the runs
        if (limit := end - time.monotonic()) < 1:
            print(f"{name}: no time left, nothing is recorded", flush=True)
            continue
        path = folder / f"{name}.json"
        more = ["--json", str(path), *(["--time-limit", f"{limit:.1f}"] if limit < math.inf else [])]
        print(f"dualkv bench {RECORDS[name]}", flush=True)
        try:
            commands.app(["bench", *shlex.split(RECORDS[name]), *more], standalone_mode=False)
            path.write_text(filed.text(kept(filed.read(path))))
        except Exception as e:  # the others are still worth recording
            failed.append(f"{name}: {type(e).__name__}: {e}")
            print(failed[-1], flush=True)
    if failed:
        sys.exit("\n".join(failed))


def as_ampere() -> None:
    """Make Triton compile products for warps, not warp groups, and PyTorch take its tiles for an A100, from here on.

    On a Hopper GPU Triton makes FlexAttention's products by instructions that FlashAttention-2 does not have, and that
    no Ampere or Ada card has.
    """
    import torch._inductor.config
    from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic

    os.environ["DISABLE_MMA_V3"] = "1"  # Triton's
    torch._inductor.config.force_disable_caches = True  # a kept graph has Hopper's tiles and instructions
    for name in ("get_flex_attn_fwd_configs", "get_flex_attn_bwd_configs"):
        chosen = getattr(CUDAConfigHeuristic, name)

        def of_a100(*given: Any, chosen: Callable[..., Any] = chosen) -> Any:
            with mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)):
                return chosen(*given)

        setattr(CUDAConfigHeuristic, name, of_a100)


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """A report without the lengths that a workload's name stands for, and with those figures of its sides that tables
    and documents are made from."""
    results = []
    for result in report["results"]:
        given = result["workload"]
        named = json.loads(json.dumps(asdict(parse(given["name"]))))
        workload = {field: value for field, value in given.items() if field not in LENGTHS or named[field] != value}
        sides = {name: _side(side) for name, side in result["sides"].items()}
        fields = {field: result[field] for field in FIELDS if result[field] is not None}
        results.append({"workload": workload, **fields, "sides": sides})
    return report | {"results": results}


def _side(side: dict[str, Any]) -> dict[str, Any]:
    """Shorten one side of a result: rounds keep their milliseconds, and only parts that the total leaves out are
    kept."""
    shorter = {name: side[name] for name in OF_A_SIDE if name in side}
    if "parts" in shorter:
        shorter["parts"] = {name: part for name, part in side["parts"].items() if not part["in_total"]}
    if "rounds" in shorter:
        shorter["rounds"] = [r["ms"] for r in side["rounds"]]
    return shorter


if __name__ == "__main__":
    typer.run(main)
