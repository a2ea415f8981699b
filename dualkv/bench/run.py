"""Sides in turns on one workload, and the report of a run: figures, machine, versions, commit.

All sides run in one process, in turns. Power, not the clock rate, limits an H200, so every round runs one side back to
back for a while (*sustained*) before the next; the median over rounds counts. A turn of the last side goes before and
is not counted: the first one then follows another side's turn, as all others do, not a pause. *Cold* is single calls
after a pause.
TFLOP/s are counted on deduplicated work (:meth:`Workload.flops`), the prompt once, whatever a side repeats.
"""

from __future__ import annotations

import datetime
import gc
import hashlib
import itertools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from codegen import packages, toolchain
from dualkv.bench import inputs, sides
from dualkv.bench.inputs import Side
from dualkv.bench.sides import of_direction
from dualkv.bench.timing import PART_CALLS, Clock, Meter, TimeUp, cold_ms, sustained
from dualkv.bench.workloads import Workload
from dualkv.progress import Track, untracked

SCHEMA = 2
REFERENCE = "fa4-3-calls"  # the peer that speeds are given against
MAX_DIFFERENCE = 0.03  # of results, by norms; two bf16 computations of the same differ by less than 0.01
PACKAGES = (
    "torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "apache-tvm-ffi", "numpy",
    "liger-kernel", "magi_attention",
)  # fmt: skip
# Variables that make FlashAttention-4 and cuDNN keep compiled kernels in files: else they compile in every process.
PEER_CACHES = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLEX_ATTENTION_CUTE_DSL_CACHE_ENABLED"
ROOT = Path(__file__).parents[2]
SOURCES = ("dualkv", "codegen", "cute_kernels")
STAMP = ROOT / ".stamp.json"  # what git said of a checkout that was copied without it: tools/stamp.py


# ---------------------------------------------------------------- one workload in one direction
def difference(results: tuple[torch.Tensor, ...], reference: tuple[torch.Tensor, ...]) -> float:
    """The largest ||result - reference|| / ||reference|| of the tensors."""
    return max(
        ((x.float() - y.float()).norm() / y.float().norm()).item() for x, y in zip(results, reference, strict=True)
    )


def run_checked(side: Side, reference: tuple[torch.Tensor, ...] | None) -> float | None:
    """Run once; how far the results are from the reference's, None without one.

    Raises:
        RuntimeError: an element of a result was not written; results that are not those of the reference.
    """
    side.call()
    results = side.results()
    if any(x.isnan().any() for x in results):
        raise RuntimeError("the results hold NaN, or elements that were not written")
    if reference is None:
        return None
    apart = difference(results, reference)
    if not apart <= MAX_DIFFERENCE:
        raise RuntimeError(f"computes something else: its results are {apart:.2g} from the first side's, by norms")
    return apart


def summary(cold: float, rounds: list[dict[str, Any]], flops: int) -> dict[str, Any]:
    """The figures of one side: medians over rounds."""
    figures: dict[str, Any] = {"cold_ms": cold, "cold_tflops": flops / cold / 1e9, "rounds": rounds}
    if rounds:
        names = dict.fromkeys(name for r in rounds for name in r if name != "calls")
        middle = {name: statistics.median(r[name] for r in rounds if name in r) for name in names}
        figures |= {"sustained_ms": middle.pop("ms"), **middle}
        figures["sustained_tflops"] = flops / figures["sustained_ms"] / 1e9
    return figures


@torch.no_grad()
def bench(
    workload: Workload, direction: str, names: Sequence[str], seconds: float, rounds: int, clock: Clock, meter: Meter,
    track: Track = untracked,
) -> dict[str, Any]:  # fmt: skip
    """All sides in turns. A side that fails is reported with its error; so is one that the time limit leaves out. Sides
    that are ready by then have their turns all the same."""
    ready: dict[str, Side] = {}
    figures: dict[str, dict[str, Any]] = {name: {} for name in names}
    cold: dict[str, float] = {}
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    made = inputs.Inputs(workload)
    reference: tuple[torch.Tensor, ...] | None = None

    def attempt(name: str, step: Callable[[], Any]) -> None:
        if "error" in figures[name]:
            return
        try:
            with _no_arguments():
                step()
        except Exception as e:
            figures[name]["error"] = _why(e)
            ready.pop(name, None)

    what = f"{workload.name} {direction}"
    for name in track(names, f"{what}: cold", len(names)):

        def prepare(name: str = name) -> None:
            nonlocal reference
            clock.check()
            side = sides.SIDES[name](made, direction)
            apart = run_checked(side, reference)
            if reference is None:
                reference = tuple(x.clone() for x in side.results())
                figures[name]["compared_with"] = name
            else:
                figures[name]["difference"] = apart
            ready[name] = side

        def single(name: str = name) -> None:
            side = ready[name]
            cold[name] = cold_ms(side.call)
            figures[name]["parts"] = {
                part: {"cold_ms": cold_ms(call, PART_CALLS, pause=0.0), "in_total": part not in side.extra}
                for part, call in side.parts.items()
            }

        attempt(name, prepare)
        attempt(name, single)
    turns = [name for _ in range(rounds) for name in names]
    last = next((name for name in reversed(cold) if name in ready), None)
    if turns and last:
        attempt(last, partial(sustained, ready[last].call, cold[last], seconds, meter))
    for name in track(turns, f"{what}: sustained", len(turns)):

        def turn(name: str = name) -> None:
            measured[name].append(sustained(ready[name].call, cold[name], seconds, meter))

        attempt(name, turn)

    flops = workload.flops(direction)
    for name in names:
        if name in cold:
            figures[name] |= summary(cold[name], measured[name], flops)
    theirs = figures.get(REFERENCE, {}).get("sustained_ms")
    for mine in figures.values():
        if theirs and "sustained_ms" in mine:
            mine["speed_against_reference"] = theirs / mine["sustained_ms"]
    layout = workload.layout()
    shape = {"tokens": layout.num_tokens, "dedup_ratio": layout.dedup_ratio}
    return {
        "workload": {name: value for name, value in asdict(workload).items() if value not in (None, False)} | shape,
        "direction": direction,
        "flops": flops,
        "reference": REFERENCE,
        "sides": figures,
    }


@contextmanager
def _no_arguments() -> Iterator[None]:
    """The DSL that FlashAttention-4 compiles with looks for its own options in sys.argv, and ends the program over a
    `-d bwd`, which it takes for its -diagnostic."""
    given = sys.argv
    sys.argv = given[:1]
    try:
        yield
    finally:
        sys.argv = given


def _why(error: Exception) -> str:
    if isinstance(error, TimeUp):
        return str(error)
    package = packages.of_module(str(error.name)) if isinstance(error, ModuleNotFoundError) else None
    return f"not installed: {package.install}" if package else in_words(error)


def in_words(error: Exception) -> str:
    """Write an error's class and message in one line, at most 500 characters, for reports that show it in place of
    figures."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


# ---------------------------------------------------------------- a run
def report(
    workloads: Sequence[Workload], directions: Sequence[str], names: Sequence[str], seconds: float, rounds: int,
    time_limit: float | None = None, track: Track = untracked,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yields the report after each of its results, the last one whole: every workload in every direction by all of the
    sides `names`, in `rounds` turns of so many seconds. After `time_limit` seconds nothing new is begun; `asked` in the
    report says of how many results."""
    meter, clock = Meter(), Clock(time_limit)
    settings = {"seconds": seconds, "rounds": rounds, "time_limit": time_limit, "sides": list(names)}
    asked = list(itertools.product(workloads, directions))
    whole = {"schema": SCHEMA, **environment(meter), "settings": settings, "asked": len(asked), "results": []}
    for workload, direction in asked:
        if whole["results"] and clock.up:
            break
        some, begin = of_direction(names, direction), time.monotonic()
        result = bench(workload, direction, some, seconds, rounds, clock, meter, track)
        whole["results"].append(result | {"took_s": time.monotonic() - begin})
        yield whole
        gc.collect()
        torch.cuda.empty_cache()


def environment(meter: Meter | None) -> dict[str, Any]:
    """GPU, driver, versions, commit and date of a run.

    `commit` and `changed_files` are those of the stamp, if it is of these very sources: a copy of a checkout may have
    git and yet know an earlier commit only. Else they are what git says; without git "unknown" and None.

    Raises:
        ValueError: there is no git, and the stamp is of other sources.
    """
    gpu: dict[str, Any] = {"name": "none"}
    if meter is not None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = {"name": properties.name, "multiprocessors": properties.multi_processor_count}
        gpu |= {"memory_gib": properties.total_memory / 2**30, **meter.limits()}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_provenance(),
        "gpu": gpu,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {package: toolchain.version(package) for package in PACKAGES},
    }


def checkout() -> dict[str, Any] | None:
    """Commit and changed files of this checkout, None where git cannot tell."""
    # An installed package may lie inside a checkout of something else, which tracks no file of it.
    if _git("ls-files", "--error-unmatch", __file__) is None:
        return None
    commit, changed = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no", *SOURCES)
    return None if commit is None or changed is None else {"commit": commit, "changed_files": changed.splitlines()}


def source_digest() -> str:
    """sha256 over the names and bytes of the files that `changed_files` is about."""
    found = hashlib.sha256()
    for path in sorted(p for folder in SOURCES for kind in ("*.py", "*.c") for p in (ROOT / folder).rglob(kind)):
        found.update(f"{path.relative_to(ROOT).as_posix()}\n".encode() + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _provenance() -> dict[str, Any]:
    """Commit and changed files, of the stamp or of git."""
    stamp: dict[str, Any] = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    if stamp and stamp.pop("source_digest") == source_digest():
        return stamp
    found = checkout()
    if stamp and not found:
        raise ValueError(
            f"{STAMP} is of other sources, expected the stamp of the sources beside it: run `python -m tools.stamp` in "
            "the checkout, then copy the checkout again"
        )
    return found or {"commit": "unknown", "changed_files": None}


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None if git fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
