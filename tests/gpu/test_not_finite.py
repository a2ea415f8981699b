"""NaN and infinity in one response: others keep their results, and what sees them gets what mathematics says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from codegen.spec import backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS
from dualkv import Layout
from tests.not_finite import (
    BROKEN,
    INF,
    LENGTHS,
    NAN,
    SEGMENTS,
    WHERE,
    broken,
    check,
    inputs,
    limits,
    mathematics,
    step,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LAYOUTS = [*((d, 4, 1) for d in HEAD_DIMS if d != 128), (80, 8, 2), (128, 8, 2), (128, 3, 3)]  # D, H, Hk
TREE = [0, 45, 69, 106, 107, 177, 287, 307, 340, 358], [-1, 0, 1, 1, 0, 4, 4, 0, -1]


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(dtype, d, h // hk) for d, h, hk in LAYOUTS for dtype in DTYPES]
    compile_all(forward_spec(*kind) for kind in kinds)
    compile_all(s for dtype, d, _ in kinds for fixed in (False, True) for s in backward_specs(dtype, d, fixed).present)
    compile_all([forward_spec("bf16", 128, 4, trees=True)])
    compile_all(s for part in ("q", "k", "v", "kv") for s in backward_specs("bf16", 128, False, part).present)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), LAYOUTS)
def test_a_broken_response_leaves_others_their_results(head_dim, heads, kv_heads, value, dtype):
    layout = Layout.from_lengths(*LENGTHS, device="cuda")
    tensors = inputs(layout, head_dim, heads, kv_heads, DTYPES[dtype])
    clean = step(tensors, layout, False)
    for case, (names, where) in enumerate(itertools.product(BROKEN, WHERE)):
        for turn in range(2):  # every way to break meets every segment in one of the tests
            segment = SEGMENTS[(case + 2 * turn + head_dim // 32) % 4]
            rows = slice(*layout.offsets[segment : segment + 2].tolist())
            changed = broken(tensors, names, rows, where, value)
            got = step(changed, layout, deterministic=bool(turn))
            want = mathematics(*changed, layout.visible_end)
            check(("out", "dq", "dk", "dv"), got, want, clean, rows, limits(names, value))


@pytest.mark.parametrize("needs", ["q", "k", "v", "kv"])
def test_gradients_asked_in_part(needs):
    layout = Layout.from_lengths(*LENGTHS, device="cuda")
    tensors = inputs(layout, 128, 8, 2, torch.bfloat16)
    clean = step(tensors, layout, False, needs)
    for names, where in itertools.product(BROKEN, WHERE):
        rows = slice(*layout.offsets[2:4].tolist())
        changed = broken(tensors, names, rows, where, NAN)
        out, *grads = mathematics(*changed, layout.visible_end)
        want = [out, *(grad for name, grad in zip("qkv", grads, strict=True) if name in needs)]
        check(("out", *needs), step(changed, layout, False, needs), want, clean, rows)


@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_others_keep_their_bits_where_responses_fill_tiles(value):
    forward, tile = forward_spec("bf16", 128, 4).tile, backward_specs("bf16", 128, True).main.tile
    length = math.lcm(forward.tokens(4), tile.tile_m, tile.cluster * tile.tile_n)
    layout = Layout.from_lengths([length], [[length] * 3], device="cuda")
    tensors = inputs(layout, 128, 8, 2, torch.bfloat16)
    want = step(tensors, layout, True)
    rows = slice(2 * length, 3 * length)
    got = step(broken(tensors, ("k", "v"), rows, "rows", value), layout, True)
    others = torch.ones(layout.num_tokens, dtype=torch.bool, device="cuda")
    others[rows] = False
    for x, y in zip(got[:2], want[:2], strict=True):
        assert torch.equal(x[others], y[others])
    assert not got[3][:length].isfinite().any(), "the prompt's dv has what the broken response adds to it"
    others[:length] = False  # keys of the prompt
    for x, y in zip(got[2:], want[2:], strict=True):
        assert torch.equal(x[others], y[others])


def test_segments_of_trees():
    layout = Layout.from_segments(*TREE, "cuda")
    tensors = inputs(layout, 128, 8, 2, torch.bfloat16)
    clean = step(tensors, layout, False)
    for names, where, leaf in itertools.product(BROKEN, WHERE, (2, 3, 5, 7)):
        rows = slice(*layout.offsets[leaf : leaf + 2].tolist())
        changed = broken(tensors, names, rows, where, NAN)
        want = mathematics(*changed, layout.visible_end)
        check(("out", "dq", "dk", "dv"), step(changed, layout, False), want, clean, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("tree", [False, True])
def test_one_infinity_costs_little(tree, name, dtype):
    """An overflow in one layer must not look like a hang. The shortest turn counts, as others may use the GPU."""
    lengths = torch.tensor(TREE[0]).diff().repeat(16) * 8
    offsets, parent = [0, *lengths.cumsum(0).tolist()], [p if p < 0 else p + 9 * g for g in range(16) for p in TREE[1]]
    layout = (
        Layout.from_segments(offsets, parent, "cuda") if tree else Layout.from_lengths([512] * 16, [[60] * 16] * 16)
    )
    layout = layout.to("cuda")
    clean = inputs(layout, 128, 32, 8, DTYPES[dtype])
    infinite = broken(clean, (name,), slice(100, 101), "rows", INF)
    times = {"clean": [], "infinite": []}
    for _ in range(6):
        for which, tensors in (("clean", clean), ("infinite", infinite)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            step(tensors, layout, False)
            end.record()
            end.synchronize()
            times[which].append(begin.elapsed_time(end))
    assert min(times["infinite"]) < 3 * min(times["clean"]), times
