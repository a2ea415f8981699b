"""The kernels' machine code against its record: registers, spills, shared memory, wgmma, TMA and register budgets.

A head dim decides the tile and so the code; the dtype only names other operand types, the packed heads only other boxes
and divisions. So the CPU suite compiles every head dim at the packed heads that differ in kind (1, 4, 7: rows left
over, 16: the most), every number of packed heads at one head dim, and both dtypes. `make check-kernels` compares all of
them. After a change that is meant, `make manifest` records it.

Of the backward it compiles every head dim's main kernel, with and without deterministic sums; of the small kernels
around it those of one head dim for each order of dQ and statistics (64, 128, 192); and one head dim's in fp16.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from codegen import manifest, store
from codegen.spec import backward_specs, forward_spec, table
from codegen.tiles import HEAD_DIMS, MAX_PACKED_HEADS

ROOT = Path(__file__).parents[2]
RECORD = json.loads(Path(__file__).with_name("manifest.json").read_text())
SPECS = sorted(
    {forward_spec("bf16", d, h) for d in HEAD_DIMS for h in (1, 4, 7, 16)}
    | {forward_spec("bf16", 128, h) for h in range(1, MAX_PACKED_HEADS + 1)}
    | {forward_spec("fp16", d, 4) for d in HEAD_DIMS}
    | {backward_specs("bf16", d, fixed).main for d in HEAD_DIMS for fixed in (False, True)}
    | {spec for d in (64, 128, 192) for spec in backward_specs("bf16", d)}
    | {backward_specs("bf16", 128, deterministic=True).slab_sum}
    | set(backward_specs("fp16", 128)),
    key=str,
)


@pytest.fixture(scope="module")
def described():
    return dict(manifest.describe(SPECS, ROOT / "build" / "kernels", os.cpu_count() or 1))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_kernel_is_as_recorded(described, spec):
    now = described[spec]
    assert manifest.problems(spec.operation, now) == []
    differences = manifest.differences(RECORD["kernels"].get(str(spec)), now)
    made_by = manifest.versions(store.add(spec, ROOT / "build" / "kernels"))
    assert differences == [], f"recorded by {RECORD['versions']}, now {made_by}; if it is meant: make manifest"


def test_record_covers_the_table_and_has_no_problem():
    assert set(RECORD["kernels"]) == set(map(str, table()))
    for spec in table():
        assert manifest.problems(spec.operation, RECORD["kernels"][str(spec)]) == [], spec


def test_problems_are_found():
    good = RECORD["kernels"][str(forward_spec("bf16", 128, 4))]
    code = good["instructions"]
    assert manifest.problems("fwd", good | {"spill_stores": 8}) == ["spill_stores is 8, expected 0"]
    assert manifest.problems("fwd", good | {"wgmma_warnings": ["C7512"]}) == ["ptxas runs wgmma one by one (C7512)"]
    assert manifest.problems("fwd", good | {"instructions": code | {"LDL": 2}}) == [
        "2 LDL instructions use local memory"
    ]
    without = {name: n for name, n in code.items() if not name.startswith("UTMALDG")}
    assert manifest.problems("fwd", good | {"instructions": without}) == ["no UTMALDG instruction"]
    main = RECORD["kernels"][str(backward_specs("bf16", 128).main)]
    without = {name: n for name, n in main["instructions"].items() if not name.startswith("REDG")}
    assert manifest.problems("bwd", main | {"instructions": without}) == ["no REDG instruction"]
    assert manifest.differences(good, good | {"registers": 200}) == [
        f"registers: recorded {good['registers']}, now 200"
    ]
    assert manifest.differences(None, good) == ["not in the manifest"]
