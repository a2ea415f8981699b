"""Which source line each machine instruction comes from.

Profiled kernels carry no line information: the store's artefacts should not name folders of the machine that built
them. A twin compiled with it has the same instructions (checked here), so its lines are those of the profiled one.
"""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen import KernelError, cubin, toolchain
from codegen.spec import KernelSpec

ROOT = Path(__file__).parents[2]
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
LINE = re.compile(r'//## File "([^"]+)", line (\d+)')
Place = tuple[str, int]


def kernel_lines(spec: KernelSpec, folder: Path) -> dict[str, Any]:
    """Lines of the kernel in `folder` (an entry of the store).

    Returns:
        symbol: the kernel's name as profilers show it. lines: {offset of an instruction: [file, line]}, or why_not.
    """
    own = folder / "kernel.cubin"
    found: dict[str, Any] = {"symbol": cubin.resources(own.read_bytes()).function}
    try:
        if lacking := toolchain.lacking():
            return found | {"why_not": lacking}
        with tempfile.TemporaryDirectory() as made:
            twin = _compile_with_lines(spec, Path(made))
            places, code = parse_sass(_nvdisasm("-g", twin))
        if code != parse_sass(_nvdisasm("-c", own))[1]:
            return found | {"why_not": "compiled with line information the kernel has other instructions"}
    except (KernelError, OSError, subprocess.SubprocessError) as e:
        return found | {"why_not": " ".join(str(e).split())[:300]}
    return found | {"lines": places}


def _compile_with_lines(spec: KernelSpec, folder: Path) -> Path:
    environment = {
        **os.environ,
        "CUTE_DSL_ARCH": spec.arch,
        "CUTE_DSL_LINEINFO": "1",
        "CUTE_DSL_KEEP_PTX": "1",
        "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p),
    }
    command = [sys.executable, "-P", "-W", "ignore", "-m", "codegen.compile"]
    done = subprocess.run(
        command, cwd=folder, env=environment, input=spec.to_json(), capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise KernelError(f"the compile with line information failed: {done.stderr.strip()[-200:]}")
    return folder / "kernel.cubin"


def _nvdisasm(option: str, path: Path) -> str:
    command = [cubin._nvdisasm(), option, "-c", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def parse_sass(text: str) -> tuple[dict[int, Place], list[str]]:
    """({offset: (file, line)}, instructions in order) of nvdisasm's text; files relative to the project."""
    places: dict[int, Place] = {}
    code: list[str] = []
    here: Place | None = None
    for line in text.splitlines():
        if place := LINE.search(line):
            path = Path(place[1])
            inside = path.is_relative_to(ROOT)
            here = (path.relative_to(ROOT).as_posix() if inside else path.name), int(place[2])
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[2])
            if here is not None:
                places[int(instruction[1], 16)] = here
    return places, code


# ---------------------------------------------------------------- where warps wait
SOURCE_WIDTH = 90
ALL = "# Samples"
REASON = re.compile(r"stall_(\w+)$")


@dataclass(frozen=True)
class Hot:
    """A place in a kernel and the samples that found a warp waiting there.

    Attributes:
        where: "file:line", or the offset of an instruction.
        samples: of warps at this place, whether or not they waited. share: of the kernel's.
        reasons: (what for, share of these samples), the two most frequent.
        instruction: the most sampled one here.
        source: the line's text, "" where it is not at hand.
    """

    where: str
    samples: int
    share: float
    reasons: list[tuple[str, float]]
    instruction: str
    source: str


def read_samples(text: str) -> dict[str, list[dict[str, str]]]:
    """Rows of each kernel, of ncu's source page as CSV."""
    kernels: dict[str, list[dict[str, str]]] = {}
    rows: list[dict[str, str]] = []
    head: list[str] = []
    for row in csv.reader(text.splitlines()):
        if row[:1] == ["Kernel Name"]:
            rows = kernels.setdefault(row[1], [])
        elif row[:2] == ["Address", "Source"]:
            head = row
        elif head and len(row) >= len(head) - 1:
            rows.append(dict(zip(head, row, strict=False)))
    return kernels


def hot_of(folder: Path, operation: str | None, symbol: str, limit: int, by_line: bool) -> tuple[list[Hot], str | None]:
    """The places of one kernel of a profile with the most samples, and why they are instructions if they are.

    Raises:
        OSError, ValueError: the profile is not whole.
    """
    samples = read_samples((folder / "source.csv").read_text())
    entry = json.loads((folder / "lines.json").read_text()).get(operation, {"why_not": "not a kernel of this project"})
    why_not = entry.get("why_not") if by_line else "instructions asked for"
    places = {} if why_not else {int(at): (file, line) for at, (file, line) in entry["lines"].items()}
    return hot(samples.get(symbol, []), places, limit), why_not


def hot(rows: list[dict[str, str]], places: Mapping[int, Place], limit: int) -> list[Hot]:
    """The places with the most samples.

    Args:
        rows: instructions of one kernel, from `read_samples`.
        places: {offset: (file, line)}; empty: instructions stand for themselves.
        limit: how many.
    """
    if not rows:
        return []
    base = int(rows[0]["Address"], 16)
    groups: dict[tuple[str, int], list[dict[str, str]]] = {}
    for row in rows:
        offset = int(row["Address"], 16) - base
        place = places.get(offset, ("?", 0)) if places else (f"+{offset:#x}", 0)
        groups.setdefault(place, []).append(row)
    total = sum(_count(row, ALL) for row in rows) or 1
    found = []
    for (file, line), some in groups.items():
        samples = sum(_count(row, ALL) for row in some)
        reasons: Counter[str] = Counter()
        for row in some:
            named = {match[1]: _count(row, name) for name in row if (match := REASON.match(name))}
            reasons.update(named)
            reasons["gmma and others"] += max(_count(row, ALL) - sum(named.values()), 0)
        top = [(name, count / samples) for name, count in reasons.most_common(2) if count]
        most = max(some, key=lambda row: _count(row, ALL))["Source"].strip()
        where = f"{file}:{line}" if places else file
        found.append(Hot(where, samples, samples / total, top, most, _source(file, line) if places else ""))
    return sorted((h for h in found if h.samples), key=lambda h: -h.samples)[:limit]


def _count(row: Mapping[str, str], name: str) -> int:
    text = row.get(name, "").replace(",", "")
    return int(float(text)) if text not in ("", "-") else 0


def _source(file: str, line: int) -> str:
    """The line as it is here now."""
    try:
        return (ROOT / file).read_text().splitlines()[line - 1].strip()[:SOURCE_WIDTH]
    except (OSError, IndexError):
        return ""
