"""The record of every compiled kernel's registers, memory and instructions: a change shows without a GPU.

`python -m codegen.manifest tests/codegen/manifest.json` compiles every specialization and rewrites the record; with
`--check` it compares instead, all kernels or the ones that `--only` names; with `--changed` it keeps what the record
says of kernels whose sources and compiler are the record's. The CPU tests (tests/codegen/test_manifest.py) compile a
part of the kernels and check that the record was compiled from these sources.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codegen import cubin, store, toolchain
from codegen.precompiled import record_of
from codegen.select import feature_table
from codegen.spec import FORWARDS, TILES, KernelSpec, table
from codegen.tiles import BackwardTile
from cute_kernels.abi import WG_ROWS

SUMS = ("REDG", "UBLKRED")  # instructions that add to dQ: from registers, by the copy engine
COUNTER = "ATOMG.E.ADD.STRONG.GPU"  # takes the next item of a deterministic backward
WATCHED = ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "ATOMG", *SUMS, "STL", "LDL")
EXPECTED = {  # kinds of instructions that an operation's kernel must have
    **dict.fromkeys(FORWARDS, ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")),
    "bwd": ("HGMMA", "UTMALDG", "USETMAXREG"),
}
USUALLY_ZERO: dict[str, Any] = {"stack": 0, "spill_stores": 0, "spill_loads": 0, "wgmma_warnings": []}
OPERANDS = {"bf16": r".BF16", "fp16": ""}  # how a wgmma's name ends
_NAME = re.compile(r"(\w+) (\w+) (head_dim=\d+ (?:head_dim_v=\d+ )?packed_heads=)(\d+)(.*)")
RESOURCES = ("registers", "stack", "spill_stores", "spill_loads", "shared_memory", "wgmma_warnings")


def recorded_specs() -> list[KernelSpec]:
    """The kernels that the record holds."""
    return table() + feature_table()


def describe(specs: list[KernelSpec], folder: Path, jobs: int) -> Iterator[tuple[KernelSpec, dict[str, Any]]]:
    """Compile `specs` into `folder`. Yields each spec and the description of its kernel, in order."""
    for spec, entry in store.fill(specs, folder, jobs):
        record = record_of(entry)
        code = {"instructions": instructions(entry)}
        yield spec, {name: record[name] for name in RESOURCES} | code


def instructions(entry: Path) -> dict[str, int]:
    """Count each watched instruction; wgmma by shape and types, register budgets by value."""
    found: Counter[str] = Counter()
    for name, operands in re.findall(
        r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", cubin.sass(entry / "kernel.cubin")
    ):
        kind = name.split(".")[0]
        if kind in WATCHED:
            found[f"{name} {operands.strip()}" if kind == "USETMAXREG" else name] += 1
    return dict(sorted(found.items()))


def sources() -> dict[str, str]:
    """sha256 of each operation's code."""
    return {operation: toolchain.source_digest(operation) for operation in TILES}


def spills_once_a_pass(spec: KernelSpec) -> bool:
    """Whether a kernel may spill one register: the number of the pass, stored where a pass begins and loaded where it
    ends, outside of the loops over tiles. ptxas does so in fp16 at head dim 256 where packed heads leave rows over."""
    return (spec.operation, spec.dtype, spec.head_dim) == ("fwd", "fp16", 256) and WG_ROWS % spec.packed_heads != 0


def problems(spec: KernelSpec, described: dict[str, Any]) -> list[str]:
    """List what is wrong with a kernel: spills, serialized wgmma, local memory, missing instructions."""
    code = described["instructions"]
    once = spills_once_a_pass(spec)
    most = {"stack": 8, "spill_stores": 4, "spill_loads": 4} if once else {}
    found = [
        f"{name} is {described[name]}, expected {most.get(name, 0)}"
        for name in RESOURCES[1:4]
        if described[name] > most.get(name, 0)
    ]
    found += [f"ptxas runs wgmma one by one ({code})" for code in described["wgmma_warnings"]]
    found += [f"{code[n]} {n} instructions use local memory" for n in ("STL", "LDL") if code.get(n, 0) > once]
    for kind in EXPECTED.get(spec.operation, ()):
        if not any(name.startswith(kind) for name in code):
            found.append(f"no {kind} instruction")
    if spec.operation == "bwd" and "q" in spec.gradients and not any(name.startswith(SUMS) for name in code):
        found.append(f"no {' or '.join(SUMS)} instruction")
    if isinstance(spec.tile, BackwardTile) and spec.tile.deterministic and COUNTER not in code:
        found.append(f"no {COUNTER} instruction")
    return found


def differences(recorded: dict[str, Any] | None, described: dict[str, Any]) -> list[str]:
    """The fields that differ from the record: the recorded value, then the present one."""
    if recorded is None:
        return ["not in the manifest"]
    return [f"{name}: recorded {recorded[name]}, now {now}" for name, now in described.items() if recorded[name] != now]


def unchanged(
    specs: list[KernelSpec], recorded: dict[str, Any], made_by: dict[str, str], made_from: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Select from a manifest the kernels that this compiler (`versions`) made from these sources."""
    if recorded["versions"] != made_by:
        return {}
    same = {str(s) for s in specs if recorded["sources"].get(s.operation) == made_from[s.operation]}
    return {name: described for name, described in recorded["kernels"].items() if name in same}


def versions(entry: Path) -> dict[str, str]:
    """The compiler that made an entry, in whichever Python."""
    record = record_of(entry)
    of_any_python = {name: version for name, version in record["compiler"].items() if name != "compiler-sha256"}
    return {**of_any_python, "ptxas": record["ptxas"]}


def text(manifest: dict[str, Any]) -> str:
    """JSON: a line for kernels that are alike but for the dtype of their operands, which DTYPE stands for."""
    alike: dict[str, dict[str, dict[str, list[int]]]] = {}
    for name, described in manifest["kernels"].items():
        operation, dtype, before, heads, behind = _NAME.fullmatch(name).groups()  # type: ignore[union-attr]
        code = {_general(n, dtype): count for n, count in described["instructions"].items()}
        kept = {key: value for key, value in described.items() if value or key not in USUALLY_ZERO}
        ours = alike.setdefault(json.dumps(kept | {"instructions": code}, sort_keys=True), {})
        ours.setdefault(f"{operation} DTYPE {before}N{behind}", {}).setdefault(dtype, []).append(int(heads))
    kernels = [f"  [{described}, {json.dumps(names)}]" for described, names in alike.items()]
    head = [f' "{name}": {json.dumps(manifest[name], sort_keys=True)},' for name in ("versions", "sources")]
    return "\n".join(["{", *head, ' "kernels": [', ",\n".join(kernels), " ]", "}", ""])


def read(path: Path) -> dict[str, Any]:
    """The manifest in a file: under `kernels` each kernel's description by its name."""
    made: dict[str, Any] = json.loads(path.read_text())
    kernels: dict[str, Any] = {}
    for kept, alike in made["kernels"]:
        for name, heads_of in alike.items():
            for dtype, heads in heads_of.items():
                code = {n.replace("DTYPE", OPERANDS[dtype]): count for n, count in kept["instructions"].items()}
                described = USUALLY_ZERO | kept | {"instructions": code}
                kernels |= {name.replace("DTYPE", dtype).replace("=N", f"={n}"): described for n in heads}
    return made | {"kernels": kernels}


def _general(instruction: str, dtype: str) -> str:
    """A wgmma's name with DTYPE where it names operands of the kernel's dtype."""
    return re.sub(rf"^(HGMMA\.\w+\.F32){OPERANDS[dtype]}$", r"\1DTYPE", instruction)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile every specialization and record registers, memory and code.")
    parser.add_argument("path", type=Path, help="the manifest")
    parser.add_argument("--check", action="store_true", help="compare with the manifest instead of writing it")
    parser.add_argument("--only", default="", metavar="TEXT", help="with --check: kernels whose names contain it")
    parser.add_argument("--changed", action="store_true", help="keep kernels of the same sources and compiler")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="compiles at a time")
    parser.add_argument("--folder", type=Path, default=Path("build/kernels"), help="where compiled kernels are kept")
    arguments = parser.parse_args()
    if arguments.check and arguments.changed:
        parser.error("--changed is given with --check, expected one of them")
    if arguments.only and not arguments.check:
        parser.error("--only needs --check: the record is of all kernels")
    recorded = read(arguments.path)["kernels"] if arguments.check else {}
    specs, kernels, wrong, made_from = [s for s in recorded_specs() if arguments.only in str(s)], {}, 0, sources()
    if not specs:
        parser.error(f"--only is {arguments.only!r}, which no kernel's name contains (such as {recorded_specs()[0]})")
    made_by = {} if arguments.check else versions(store.add(specs[0], arguments.folder))
    if arguments.changed:
        kernels = unchanged(specs, read(arguments.path), made_by, made_from)
        specs = [spec for spec in specs if str(spec) not in kernels]
        print(f"{len(kernels)} kernels are of the same sources and compiler", flush=True)
    for spec, described in describe(specs, arguments.folder, arguments.jobs):
        kernels[name := str(spec)] = described
        found = problems(spec, described) + (differences(recorded.get(name), described) if arguments.check else [])
        wrong += bool(found)
        print("\n    ".join([f"{len(kernels)} {name}", *found]), flush=True)
    if not arguments.check:
        manifest = {"versions": made_by, "sources": made_from, "kernels": kernels}
        arguments.path.write_text(text(manifest))
    if wrong:
        sys.exit(f"{wrong} of {len(specs)} kernels have problems, listed above")


if __name__ == "__main__":
    main()
