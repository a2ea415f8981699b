"""Specifications: canonical, reversible, distinct, and the same for every batch."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from codegen import toolchain
from codegen.spec import GRADIENTS, TILES, KernelSpec, backward_specs, forward_spec, table
from codegen.tiles import (
    FEW_KEYS_FORWARD_TILES,
    FEW_KEYS_TILES,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    MIXED,
    MIXED_RATIOS,
    ForwardTile,
    head_parts,
)

SPEC = forward_spec("bf16", 128, 4)


def test_json_round_trip_and_symbols_over_the_whole_table():
    specs = table()
    forward, preprocess, main, partial_sum, postprocess = 16, 3, 2 + 2 + 1, 1 + 1, 1
    both = len(HEAD_DIMS) * (forward + preprocess + main + partial_sum + postprocess)
    both += len(MIXED) * (len(MIXED_RATIOS) + preprocess + main + partial_sum + postprocess)
    both += len(FEW_KEYS_TILES) * (main + partial_sum)
    both += sum(forward if head_dims in HEAD_DIMS else len(MIXED_RATIOS) for head_dims in FEW_KEYS_FORWARD_TILES)
    trees = len(HEAD_DIM_PAIRS)  # of one dtype and ratio
    assert len(specs) == len(set(specs)) == 2 * both + trees
    for spec in specs:
        assert KernelSpec.from_json(spec.to_json()) == spec
        assert re.fullmatch(r"[A-Za-z_]\w*", spec.symbol)
    assert len({spec.symbol for spec in specs}) == len(specs)


def test_heads_that_leave_rows_idle_are_taken_apart_in_long_windows():
    for ratio, taken in ((1, 1), (3, 3), (4, 4), (5, 1), (6, 2), (7, 7), (12, 4), (16, 16), (24, 8)):
        long, short, full = (
            forward_spec("bf16", 128, ratio, trees, features, is_short).packed_heads
            for trees, features, is_short in ((True, ("window",), False), (True, ("window",), True), (True, (), False))
        )
        assert long == taken
        assert short == full == (ratio if ratio <= 16 else taken)


def test_parts_of_heads_fill_more_rows():
    for ratio, first in ((5, 4), (6, 4), (10, 8), (11, 8), (12, 8), (13, 9), (14, 7), (15, 7)):
        assert head_parts(ratio) == [range(first), range(first, ratio)]
    for ratio in (1, 2, 3, 4, 7, 8, 9, 16, 17, 20, 24):
        assert head_parts(ratio) == [range(ratio)]


def test_every_head_dim_and_ratio_is_served_by_the_table():
    known = set(table())
    for head_dim, heads_per_kv in itertools.product(
        range(8, HEAD_DIMS[-1] + 1, 8), [*range(1, 17), 20, 24, 28, 32, 37, 48, 64, 128]
    ):
        spec = forward_spec("fp16", head_dim, heads_per_kv)
        assert spec in known
        assert spec.head_dim >= head_dim
        assert heads_per_kv % spec.packed_heads == 0
    for head_dim, deterministic in itertools.product(range(8, HEAD_DIMS[-1] + 1, 8), (False, True)):
        specs = backward_specs("fp16", head_dim, deterministic)
        assert known.issuperset(specs.present)
        assert {spec.head_dim for spec in specs} == {forward_spec("fp16", head_dim, 1).head_dim}
    for head_dim, head_dim_v in ((192, 128), (136, 8)):
        specs = backward_specs("fp16", head_dim, head_dim_v=head_dim_v)
        assert known.issuperset([*specs.present, forward_spec("fp16", head_dim, 32, head_dim_v=head_dim_v)])
        assert [spec.head_dims for spec in specs] == [(192, 128)] * 3 + [(192, 192)]
        assert specs.main.symbol.startswith("dualkv_bwd_fp16_d192v128_h1_qkv_sm_90a_")


def test_kernels_of_one_backward_agree_on_their_tiles():
    for (head_dim, of_v), deterministic, few in itertools.product(HEAD_DIM_PAIRS, *[(False, True)] * 2):
        specs = backward_specs("bf16", head_dim, deterministic, head_dim_v=of_v, few_keys=few)
        preprocess, main, partial_sum, postprocess = specs
        assert main.tile.deterministic == deterministic
        assert preprocess.tile.tile_m == postprocess.tile.tile_m == main.tile.tile_m
        assert (partial_sum.tile.tile_n, partial_sum.tile.cluster) == (main.tile.tile_n, main.tile.cluster)


def test_rows_that_see_few_keys_have_kernels_of_their_own():
    """The kernels are other ones only where the table has a tile for them, and neither with a window nor with
    softcapping."""
    known = set(table())
    for head_dim, of_v in HEAD_DIM_PAIRS:
        for features in ((), ("sinks", "dlse"), ("window",), ("softcap",), ("window", "softcap")):
            many, few = (backward_specs("bf16", head_dim, True, "qkv", features, of_v, x) for x in (False, True))
            own = of_v == head_dim in FEW_KEYS_TILES and not {"window", "softcap"} & set(features)
            assert (few.main != many.main) == (few.partial_sum != many.partial_sum) == own
            assert (few.preprocess, few.postprocess) == (many.preprocess, many.postprocess)
            assert features or known.issuperset(few.present)
    few = backward_specs("bf16", 120, few_keys=True)
    assert few == backward_specs("bf16", 128, few_keys=True)
    assert few.main.tile.cluster == few.partial_sum.tile.cluster == 1


def test_forwards_whose_rows_see_few_keys_have_kernels_of_their_own():
    """The kernels are other ones only where the table has a tile for them, and neither for trees nor with a window or
    softcapping."""
    known = set(table())
    for (head_dim, of_v), ratio in itertools.product(HEAD_DIM_PAIRS, MIXED_RATIOS):
        for trees, features in (
            (0, ()),
            (0, ("sinks",)),
            (0, ("softcap",)),
            (1, ()),
            (1, ("window",)),
            (1, ("window", "sinks")),
        ):
            many, few = (
                forward_spec("fp16", head_dim, ratio, bool(trees), features, head_dim_v=of_v, few_keys=x)
                for x in (False, True)
            )
            native = head_dim if head_dim == of_v else (head_dim, of_v)
            assert (few != many) == (native in FEW_KEYS_FORWARD_TILES and not trees and features in ((), ("sinks",)))
            assert few.tile == replace(many.tile, cluster=1 if few != many else many.tile.cluster)
            assert features or trees or few in known
    assert forward_spec("bf16", 120, 4, few_keys=True) == forward_spec("bf16", 128, 4, few_keys=True)


def test_parts_of_the_gradients_have_the_kernels_that_they_need():
    for gradients in GRADIENTS:
        specs = backward_specs("bf16", 128, gradients=gradients)
        assert {s.gradients for s in specs.present if s.operation != "bwd_postprocess"} == {gradients}
        assert (specs.postprocess is not None) == ("q" in gradients)
        assert (specs.partial_sum is not None) == (gradients != "q")
        fixed = backward_specs("bf16", 128, deterministic=True, gradients=gradients)
        assert fixed.main.tile.deterministic == ("q" in gradients)
        assert len({spec.symbol for spec in specs.present}) == len(specs.present)
    assert len({backward_specs("bf16", 128, gradients=g).main.symbol for g in GRADIENTS}) == len(GRADIENTS)
    with pytest.raises(ValueError, match="gradients is 'vk', expected qkv or qk or qv or kv or q or k or v"):
        backward_specs("bf16", 128, gradients="vk")


@pytest.mark.parametrize("operation", TILES)
def test_sources_are_what_python_imports(operation):
    """The sources are found without `ast`, which may raise where two threads parse at once."""
    sources = toolchain.sources(operation)
    modules = operation, *toolchain.ANOTHER_KERNEL.get(operation, ())
    needed = {"cute_kernels", *(f"cute_kernels.{module}" for module in modules)}
    for path in (path for name, path in sources.items() if not name.startswith("codegen.")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                module, names = node.module or "", [alias.name for alias in node.names]
                assert not node.level, f"{path} has a relative import, which is not followed"
                needed |= {module, *(f"{module}.{name}" for name in names if module == "cute_kernels")}
            elif isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
    needed = {name for name in needed if name.startswith("cute_kernels")}
    assert set(sources) == needed | {"codegen.compile", "codegen.runtime", "codegen.spec"}


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"operation": "fw"}, ValueError, "operation is 'fw', expected fwd"),
        ({"dtype": "fp32"}, ValueError, "dtype is 'fp32', expected bf16 or fp16"),
        ({"head_dim": 56}, ValueError, f"head_dim is 56, expected {' or '.join(map(str, HEAD_DIMS))}"),
        ({"head_dim": 128.0}, TypeError, r"head_dim is 128.0 \(float\)"),
        ({"packed_heads": 17}, ValueError, "packed_heads is 17, expected an integer from 1 to 16"),
        ({"packed_heads": True}, TypeError, r"packed_heads is True \(bool\)"),
        ({"gradients": "q"}, ValueError, "gradients is 'q', expected qkv"),
        ({"arch": "sm_100a"}, ValueError, "arch is 'sm_100a', expected sm_90a"),
        ({"tile": {"tile_n": 128}}, TypeError, "tile is a dict, expected a ForwardTile for fwd"),
        ({"tile": ForwardTile(tile_n=-1)}, ValueError, "tile.tile_n is -1, expected an integer of 0 or more"),
        ({"tile": ForwardTile(tile_n=128, stages=2.0)}, ValueError, "tile.stages is 2.0"),
    ],
)
def test_bad_values_are_named(change, error, says):
    with pytest.raises(error, match=says):
        dataclasses.replace(SPEC, **change)


def test_codegen_imports_neither_torch_nor_cutlass():
    program = "import sys, codegen.precompiled, codegen.spec, codegen.store; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {m.split(".")[0] for m in done.stdout.split()} & {"torch", "cutlass", "tvm_ffi", "numpy", "cuda"}
