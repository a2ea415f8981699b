"""The kernels' machine code against its record: registers, spills, shared memory, wgmma, TMA and register budgets.

A compile takes seconds, so there are four sizes of this check. `make test` compiles SAMPLE, the small kernels around
the backward, and a forward in test_compile.py. `.ci/run` compiles KINDS, one of each kind of code. `pytest
tests/codegen/test_manifest.py -m ''` compiles SPECS, which differ in every way that shapes the code. `make
check-kernels` compiles all. Kernels that lie compiled in build/kernels, from the same sources and by the same compiler,
are not compiled again. The others are as recorded because the sources are the ones that all of them were compiled from.
After a change that is meant, `make manifest` records it.

A head dim decides the tile and so the code; the dtype only names other operand types, the packed heads only other
boxes and divisions. So SPECS are every head dim; at one head dim packed heads that leave rows over (7), and fp16; and
the forward of trees at a narrow and a wide head dim.

Of the backward SPECS has every head dim's main kernel, with deterministic sums at a narrow and a wide one; of the small
kernels around it those of one head dim for each order of dQ and statistics (64, 128, 192), and of 192 with values of
128; one main kernel in fp16; and the kernels of layouts of short segments. Of parts of the gradients, those that
are recorded at the head dim that training meets most and at a wide one, and each of the others, which are not recorded,
at one of the two. Of windows, sinks and softcapping, at two head dims and but for deterministic sums, the kernels whose
features no other one has with more.

KINDS are of these: packed heads that leave rows over; the forwards of one and two warp groups and of trees with
windows; of the backward each class (narrow, wide, split), one with features, one with deterministic sums, one without
clusters and one of a part of the gradients; and a small kernel with sinks.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from codegen import manifest, store
from codegen.select import feature_table
from codegen.spec import TILES, backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS, MIXED
from tests.codegen.real import FOLDER

RECORD = manifest.read(Path(__file__).with_name("manifest.json"))
FEATURED = [s for s in feature_table() if s.head_dim in (64, 256) and not getattr(s.tile, "deterministic", False)]


def more(one, other):
    """Whether a kernel has the features of another one of its operation and head dim, and more."""
    features = (set(spec.features) for spec in (other, one))
    return (one.operation, one.head_dim) == (other.operation, other.head_dim) and set.__lt__(*features)


MOST = {spec for spec in FEATURED if not any(more(other, spec) for other in FEATURED)}
SPECS = sorted(
    {forward_spec("bf16", d, 4) for d in HEAD_DIMS}
    | {forward_spec("bf16", 128, 7), forward_spec("fp16", 128, 4), backward_specs("fp16", 128).main}
    | {forward_spec("bf16", d, 4, trees=True) for d in (64, 256)}
    | {forward_spec("bf16", d, 4, few_keys=True) for d in (96, 128)}
    | {backward_specs("bf16", d).main for d in HEAD_DIMS}
    | {backward_specs("bf16", d, deterministic=True).main for d in (128, 256)}
    | set(backward_specs("bf16", 128, few_keys=True).present)
    | {spec for d in (64, 128, 192) for spec in backward_specs("bf16", d).present}
    | {backward_specs("bf16", 128, deterministic=True).partial_sum}
    | {forward_spec("bf16", d, 1, head_dim_v=of_v) for d, of_v in MIXED}
    | {spec for d, of_v in MIXED for spec in backward_specs("bf16", d, head_dim_v=of_v).present}
    | {spec for part in ("q", "kv") for spec in backward_specs("bf16", 128, gradients=part).present}
    | {backward_specs("bf16", 256, gradients=part).main for part in ("q", "kv")}
    | MOST,
    key=str,
)
SMALL = backward_specs("bf16", 64)
SAMPLE = {SMALL.preprocess, SMALL.partial_sum, SMALL.postprocess}
KINDS = SAMPLE | {
    SMALL.main,
    forward_spec("bf16", 64, 4, trees=True),
    forward_spec("fp16", 128, 4),
    forward_spec("bf16", 128, 7),
    forward_spec("bf16", 128, 4, few_keys=True),
    forward_spec("bf16", 512, 4),
    *(s for s in MOST if s.operation == "fwd_paths" and s.head_dim == 256 and s.tile.cluster == 1),
    *(s for s in MOST if s.operation == "bwd" and s.head_dim == 256),
    *(s for s in MOST if s.operation == "bwd_preprocess" and s.features == ("sinks",)),
    backward_specs("bf16", 128, deterministic=True).main,
    backward_specs("bf16", 128, few_keys=True).main,
    backward_specs("bf16", 128, gradients="q").main,
    backward_specs("bf16", 512).main,
}
NOT_RECORDED = [(128, "v"), (128, "qk"), (256, "k"), (256, "qv")]


def describe(specs):
    return dict(manifest.describe(sorted(specs, key=str), FOLDER, os.cpu_count() or 1))


@pytest.fixture(scope="module")
def described(request):
    """The kernels that the selected tests ask for, compiled side by side."""
    tests = [item for item in request.session.items if item.originalname == "test_kernel_is_as_recorded"]
    return describe({test.callspec.params["spec"] for test in tests})


def marks(spec):
    return () if spec in SAMPLE else pytest.mark.kernels if spec in KINDS else pytest.mark.slow


@pytest.mark.parametrize("spec", [pytest.param(spec, id=str(spec), marks=marks(spec)) for spec in SPECS])
def test_kernel_is_as_recorded(described, spec):
    now = described[spec]
    assert manifest.problems(spec, now) == []
    differences = manifest.differences(RECORD["kernels"].get(str(spec)), now)
    made_by = manifest.versions(store.add(spec, FOLDER))
    assert differences == [], f"recorded by {RECORD['versions']}, now {made_by}; if it is meant: make manifest"


def test_every_operation_is_compiled():
    assert set(SPECS) > KINDS > SAMPLE
    assert len(KINDS) == len(SAMPLE) + 13
    assert {spec.operation for spec in KINDS} == set(TILES)


def test_record_covers_the_table_and_has_no_problem():
    assert set(RECORD["kernels"]) == set(map(str, manifest.recorded_specs()))
    for spec in manifest.recorded_specs():
        assert manifest.problems(spec, RECORD["kernels"][str(spec)]) == [], spec


def test_all_were_compiled_from_these_sources():
    """A change of the kernels asks for all of them to be compiled again."""
    assert RECORD["sources"] == manifest.sources(), "the kernels' sources changed since the record: make manifest"


def test_kernels_that_are_alike_are_described_once(tmp_path):
    made = {"versions": {"ptxas": "1"}, "sources": {"fwd": "a"}, "kernels": {}}
    for spec in manifest.recorded_specs()[:40]:
        operands = ".BF16" if spec.dtype == "bf16" else ""
        code = {f"HGMMA.64x80x16.F32{operands}": 3, "HGMMA.64x96x16.F32.BF16": 2, "UTMALDG.3D": spec.packed_heads // 9}
        made["kernels"][str(spec)] = {"registers": 9, "stack": spec.head_dim // 90, "instructions": code}
    zeros = manifest.USUALLY_ZERO
    made["kernels"] = {name: zeros | described for name, described in made["kernels"].items()}
    path = tmp_path / "manifest.json"
    path.write_text(manifest.text(made))
    assert manifest.read(path) == made
    assert 4 <= path.read_text().count('"registers": 9') <= 8, "a line for kernels that are alike"


def test_kernels_of_the_same_sources_and_compiler_are_kept():
    specs, sources = manifest.recorded_specs(), RECORD["sources"] | {"bwd": "other"}
    kept = manifest.unchanged(specs, RECORD, RECORD["versions"], sources)
    assert set(kept) == {str(spec) for spec in specs if spec.operation != "bwd"}
    assert all(described == RECORD["kernels"][name] for name, described in kept.items())
    assert not manifest.unchanged(specs, RECORD, RECORD["versions"] | {"ptxas": "other"}, RECORD["sources"])


def products(described):
    return sum(n for name, n in described["instructions"].items() if name.startswith("HGMMA"))


@pytest.mark.slow
def test_gradients_that_are_not_asked_cost_no_products():
    """Products of S and, but for dV alone, dP; and of each gradient asked. Every part compiles without a problem."""
    parts = {backward_specs("bf16", d, gradients=part).main for d, part in NOT_RECORDED}
    parts |= {spec for spec in SPECS if spec.operation == "bwd" and spec.gradients != "qkv"}
    found = describe(parts | {backward_specs("bf16", spec.head_dim).main for spec in parts})
    for spec in parts:
        assert manifest.problems(spec, found[spec]) == [], spec
        full = found[backward_specs("bf16", spec.head_dim).main]
        assert products(found[spec]) < products(full), spec
        summed = any(name.startswith(manifest.SUMS) for name in found[spec]["instructions"])
        assert summed == ("q" in spec.gradients), spec
    whole, alone, full, k = (found[backward_specs("bf16", 256, gradients=g).main] for g in ("kv", "q", "qkv", "k"))
    scores = products(whole) + products(alone) - products(full)
    assert products(k) == (products(whole) + scores) // 2


def test_problems_are_found():
    spec = forward_spec("bf16", 128, 4)
    good = RECORD["kernels"][str(spec)]
    code = good["instructions"]
    assert manifest.problems(spec, good | {"spill_stores": 8}) == ["spill_stores is 8, expected 0"]
    assert manifest.problems(spec, good | {"wgmma_warnings": ["C7512"]}) == ["ptxas runs wgmma one by one (C7512)"]
    assert manifest.problems(spec, good | {"instructions": code | {"LDL": 2}}) == [
        "2 LDL instructions use local memory"
    ]
    without = {name: n for name, n in code.items() if not name.startswith("UTMALDG")}
    assert manifest.problems(spec, good | {"instructions": without}) == ["no UTMALDG instruction"]
    spec = backward_specs("bf16", 128).main
    main = RECORD["kernels"][str(spec)]
    without = {name: n for name, n in main["instructions"].items() if not name.startswith(manifest.SUMS)}
    assert manifest.problems(spec, main | {"instructions": without}) == ["no REDG or UBLKRED instruction"]
    assert manifest.problems(backward_specs("bf16", 128, gradients="kv").main, main | {"instructions": without}) == []
    spec = backward_specs("bf16", 128, deterministic=True).main
    without = {name: n for name, n in RECORD["kernels"][str(spec)]["instructions"].items() if name != manifest.COUNTER}
    assert manifest.problems(spec, main | {"instructions": without}) == [f"no {manifest.COUNTER} instruction"]
    assert manifest.differences(good, good | {"registers": 200}) == [
        f"registers: recorded {good['registers']}, now 200"
    ]
    assert manifest.differences(None, good) == ["not in the manifest"]
