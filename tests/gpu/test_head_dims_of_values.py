"""Values of another head dim than queries and keys, by kernels of their own or padded, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

from codegen.spec import GRADIENTS, backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS, MIXED, kernel_head_dims
from dualkv import Layout
from dualkv.ops import hopper
from tests import not_finite
from tests.gpu.test_backward import SPLIT, assert_parts
from tests.gpu.test_windows import BF16, FP16, LAYOUTS, check, draw

WINDOW, ALL = {"window": 100}, {"window": 200, "sinks": True, "softcap": 5.0}
# Native head dims and others, either of the two the wider one; features that tests/gpu/test_windows.py compiles.
CASES = [
    *((pair, features) for pair in ((192, 128), (96, 64), (64, 192), (176, 72)) for features in ({}, WINDOW)),
    *(((192, 256), WINDOW), ((512, 256), {}), ((264, 128), WINDOW), ((128, 512), WINDOW)),
    *((pair, features) for pair in ((128, 64), (40, 128), (256, 192)) for features in ({}, ALL)),
    *((pair, features) for pair in MIXED for features in (ALL, {"chunk": 50}, {"sinks": True}, {"softcap": 3.0})),
    *(((160, 40), features) for features in ({}, ALL)),
]
RATIOS = (1, 3, 8, 16, 24)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(dtype, d) for d in HEAD_DIMS for dtype in ("bf16", "fp16")]
    specs = [forward_spec(*kind, 4, trees=deep) for kind in kinds for deep in (False, True)]
    specs += [s for kind in kinds for fixed in (False, True) for s in backward_specs(*kind, fixed).present]
    for d, of_v in MIXED:
        more = {"head_dim_v": of_v}
        specs += [forward_spec("bf16", d, ratio, **more) for ratio in RATIOS]
        named = "window", "window+sinks+softcap", "sinks", "softcap", "sinks+softcap"
        for features, deep in itertools.product(named, (False, True)):
            if deep or "window" not in features:
                specs.append(forward_spec("bf16", d, 4, deep, features, **more))
        kinds = [((), part) for part in GRADIENTS]
        kinds += [((*some.split("+"), "dlse"), "qkv") for some in named]
        for (features, part), fixed in itertools.product(kinds, (False, True)):
            specs += backward_specs("bf16", d, fixed, part, features, **more).present
        for dtype, deep in itertools.product(("bf16", "fp16"), (False, True)):
            specs.append(forward_spec(dtype, d, 4, deep, **more))
            specs += backward_specs(dtype, d, deep, **more).present
    compile_all(specs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("pair", "features"), CASES, ids=str)
@pytest.mark.parametrize("name", ["ragged groups", "tree"])
def test_pairs(name, pair, features, deterministic):
    dtype = FP16 if deterministic and not features else BF16
    check(LAYOUTS[name], features, pair[0], 8, 2, dtype, deterministic, bool(features), head_dim_v=pair[1])


@pytest.mark.parametrize("pair", [(192, 128), (64, 128)], ids=str)
def test_the_kernel_gets_one_head_dim_and_no_more_than_it_needs(pair, monkeypatch):
    seen, real = [], hopper.forward
    monkeypatch.setattr(
        hopper, "forward", lambda **call: seen.append([call[x].shape[2] for x in "qkv"]) or real(**call)
    )
    check(LAYOUTS["one group"], {}, pair[0], head_dim_v=pair[1])
    of_qk, of_v = kernel_head_dims(*pair)
    assert all(dims == ([max(pair)] * 3 if of_qk == of_v else [pair[0], pair[0], pair[1]]) for dims in seen)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("pair", MIXED, ids=str)
def test_ratios(pair, ratio):
    for layout in (LAYOUTS["ragged groups"], LAYOUTS["long"]):
        check(layout, {}, pair[0], ratio, 1, head_dim_v=pair[1])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("pair", MIXED, ids=str)
def test_split_key_blocks(pair, deterministic):
    tile = backward_specs("bf16", pair[0], deterministic, head_dim_v=pair[1]).main.tile
    assert hopper.backward_plan(SPLIT._segments, torch.device("cuda", 0), tile, 8, 1).num_partials
    check(SPLIT, {}, pair[0], 8, 1, BF16, deterministic, head_dim_v=pair[1])
    check(SPLIT, {}, pair[0], 8, 1, BF16, deterministic, head_dim_v=pair[1] - 56)


@pytest.mark.parametrize("gradients", GRADIENTS[1:])
@pytest.mark.parametrize("pair", MIXED, ids=str)
def test_parts_of_the_gradients(pair, gradients):
    """The parts equal the gradients of all three together bit for bit; dQ does where its sums have an order."""
    for layout, deterministic in itertools.product((SPLIT, LAYOUTS["ragged groups"]), (False, True)):
        q, k, v, dout = not_finite.inputs(layout.to("cuda"), pair[0], 8, 1, BF16, pair[1])
        call = layout._segments, pair[0] ** -0.5
        saved = hopper.forward(q, k, v, *call)
        whole = hopper.backward(dout, q, k, v, *saved, *call, deterministic=deterministic and "q" in gradients)
        part = hopper.backward(dout, q, k, v, *saved, *call, deterministic=deterministic, gradients=gradients)
        assert_parts(part, whole, gradients, deterministic)


@pytest.mark.parametrize("value", [not_finite.NAN, not_finite.INF], ids=str)
@pytest.mark.parametrize("pair", MIXED, ids=str)
def test_what_is_not_finite_stays_with_the_rows_that_see_it(pair, value):
    layout = Layout.from_lengths(*not_finite.LENGTHS, device="cuda")
    tensors = not_finite.inputs(layout, pair[0], 4, 1, BF16, pair[1])
    clean = not_finite.step(tensors, layout, False)
    for case, (names, where) in enumerate(itertools.product(not_finite.BROKEN, not_finite.WHERE)):
        segment = not_finite.SEGMENTS[case % 4]
        rows = slice(*layout.offsets[segment : segment + 2].tolist())
        changed = not_finite.broken(tensors, names, rows, where, value)
        got = not_finite.step(changed, layout, deterministic=bool(case % 2))
        want = not_finite.mathematics(*changed, layout.visible_end)
        not_finite.check(("out", "dq", "dk", "dv"), got, want, clean, rows, not_finite.limits(names, value))


@pytest.mark.parametrize("features", [{}, {"window": 37}, {"chunk": 50, "sinks": True}], ids=str)
@pytest.mark.parametrize("pair", [(192, 128), (64, 80)], ids=str)
def test_the_composition(pair, features, monkeypatch):
    """The parts of the composition are rounded, and so is their sum: up to three roundings for plain PyTorch's one."""
    monkeypatch.setenv("DUALKV_BACKEND", "flash")
    for name in ("ragged groups", "tree"):
        for what, got, plain, want in draw(LAYOUTS[name], features, pair[0], 8, 2, BF16, True, False, pair[1], 0):
            if what != "dsinks":  # in which terms of all rows cancel
                assert (got.double() - want).norm() <= 3 * (plain.double() - want).norm() + 1e-5 * want.norm(), what
