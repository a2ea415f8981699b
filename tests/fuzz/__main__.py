"""`python -m tests.fuzz`: random cases until a count or a time is reached; see `tests/fuzz/__init__.py`."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import secrets
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import dualkv
from codegen.tiles import HEAD_DIM_PAIRS, kernel_head_dims
from tests.fuzz.case import FEATURES, VALUES, Case, NoMemory, WrongResult, here, reduce, run, seeded
from tools.bench.record import NO_MEMORY, Record

CASES = Path(__file__).parent / "cases"
FAILURES = 5  # saved before a run ends
WITH_FEATURES, RECOMPUTED = "with features", "perhaps a recompute pass"  # counts of tried cases


def saved(device):
    """Files in CASES of cases on a device, which the suites replay.

    Raises:
        ValueError: there is none.
    """
    if not (found := sorted(path.name for path in CASES.glob(f"{device}-*.json"))):
        raise ValueError(f"no case of {device} is in {CASES}, expected one at least")
    return found


def attempt(case):
    """(the largest error as a part of its bound, None), or (0, what is wrong).

    Raises:
        NoMemory: there is nothing to compare with.
        torch.AcceleratorError: the device is of no more use to this process.
    """
    try:
        return run(case), None
    except WrongResult as e:
        return 0.0, str(e)
    except (torch.AcceleratorError, NoMemory):
        raise
    except Exception as e:
        return 0.0, f"raised {type(e).__name__}: {str(e).splitlines()[0]}"


def wrong(case):
    """Say what is wrong with the case; None if nothing is, or if there is too little memory to tell."""
    try:
        return attempt(case)[1]
    except NoMemory:
        return None


def save(case, why):
    """The reduced case as a file that the suites replay."""
    case = reduce(case, wrong)
    path = CASES / f"{case.device}-{hashlib.sha256(case.to_json().encode()).hexdigest()[:10]}.json"
    path.write_text(case.to_json() + "\n")
    print(f"  {why}\n  reduced and saved as {path}: {wrong(case)}", flush=True)


def native_pair(text):
    """ "512" or "192/128": head dims of kernels."""
    of_qk, _, of_v = text.partition("/")
    pair = int(of_qk), int(of_v or of_qk)
    if pair not in HEAD_DIM_PAIRS:
        raise ValueError(f"{text} is none of {HEAD_DIM_PAIRS}")
    return pair


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000, help="stop after so many that were tried (%(default)s)")
    parser.add_argument("--seconds", type=float, default=120.0, help="stop after that long (%(default)s)")
    parser.add_argument("--seed", default=None, help="of an earlier run; drawn by default")
    parser.add_argument("--start", type=int, default=0, help="index of the first case (%(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--values", choices=VALUES, help="cases of these alone (others are drawn and skipped)")
    parser.add_argument(
        "--native", type=native_pair, nargs="+", default=HEAD_DIM_PAIRS, metavar="D or D/DV",
        help="cases that kernels of these head dims run, such as 512 192/128 (others are drawn and skipped)",
    )  # fmt: skip
    parser.add_argument(
        "--featured", action="store_true",
        help="cases with a window, chunks, sinks or softcapping (others are drawn and skipped)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="add what was tried, and how much failed, to the runs in this file")
    options = parser.parse_args()
    seed = options.seed or secrets.token_hex(4)
    record = Record(options.json, options.device == "cuda")
    print(f"seed {seed} on {options.device}: up to {options.cases} cases, {options.seconds:.0f} s", flush=True)
    begin, worst, failed, tried = time.monotonic(), 0.0, 0, Counter()
    said = begin
    for index in itertools.count(options.start):
        now = time.monotonic()
        if now - begin > options.seconds or tried["cases"] == options.cases:
            break
        if now - said > 10:
            said = now
            print(f"  {tried['cases']} cases, {failed} failed, worst {worst:.2f} of its bound", flush=True)
        case = here(seeded(seed, index, options.device))
        features = [name for name in FEATURES if getattr(case, name) is not getattr(Case, name)]  # None or False
        changed = not {"window", "chunk", "sinks", "softcap"}.isdisjoint(features)  # in what attention computes
        if options.values not in (None, case.values) or kernel_head_dims(*case.head_dims) not in options.native:
            continue
        if options.featured and not changed:
            continue
        try:
            with dualkv.RecomputePasses() as passes:
                ratio, why = attempt(case)
        except NoMemory:
            tried.update([NO_MEMORY])
            torch.cuda.empty_cache()
            continue
        except torch.AcceleratorError:
            print(f"case {index} of seed {seed} broke the device:\n{case.to_json()}", flush=True)
            raise
        tried.update(["cases", case.kind, case.dtype, f"{case.kind} {case.dtype}", case.strides, case.values])
        tried.update(features + [WITH_FEATURES] * changed + [case.backend] * (case.backend is not None))
        tried.update([RECOMPUTED] * (passes.rows > 0))
        worst = max(worst, ratio)
        if why:
            failed += 1
            print(f"case {index} of seed {seed}:", flush=True)
            save(case, why)
        if failed == FAILURES:
            print(f"{FAILURES} failures are enough: stopping", flush=True)
            break
    seconds = time.monotonic() - begin
    print(
        f"seed {seed} on {options.device}: {tried['cases']} cases in {seconds:.0f} s, {failed} failed, "
        f"worst error {worst:.2f} of its bound, {tried[NO_MEMORY]} {NO_MEMORY}"
    )
    record.append(
        {
            "seed": seed,
            "start": options.start,
            "device": options.device,
            "seconds": round(seconds, 1),
            "failed": failed,
            "worst_part_of_bound": round(worst, 3),
            "tried": dict(sorted(tried.items())),
        }
    )
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors: more threads would only wait for each other
    sys.exit(main())
