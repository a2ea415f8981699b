"""The Hopper dispatch without a GPU: what it serves, what the kernel is handed, and that no length reaches its spec."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from codegen import store
from codegen.spec import GRADIENTS, backward_specs, forward_spec
from cute_kernels.abi import LOCKS, STAT_COLUMNS, BackwardFields
from dualkv import Layout
from dualkv.ops import dispatch, hopper, tensors
from dualkv.ops.features import Features, Window
from dualkv.ops.plan import backward as plan_backward
from dualkv.ops.plan import forward as plan_forward
from dualkv.ops.plan import paths as plan_paths
from dualkv.segments import segments_of
from tests.strategies import binary_tree
from tools.process import ROOT


def segments(layout):
    return segments_of(layout.offsets, layout.parent)


def random_backward(tokens, heads, kv_heads, head_dim, dtype=torch.bfloat16, head_dim_v=None):
    """dout, q, k, v, out, lse"""
    q, k, v = random_inputs(tokens, heads, kv_heads, head_dim, dtype, head_dim_v)
    dout, out = (torch.randn(tokens, heads, v.shape[2]).to(q.dtype) for _ in range(2))
    return dout, q, k, v, out, torch.randn(heads, tokens)


def random_inputs(tokens, heads, kv_heads, head_dim, dtype=torch.bfloat16, head_dim_v=None):
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, head_dim_v or head_dim)
    return [torch.randn(tokens, *shape).to(dtype) for shape in shapes]


@pytest.fixture
def launches(monkeypatch):
    """Every launch's (spec, arguments); `specs` loaded are in `launches.loaded`. CPU tensors pass for CUDA ones."""

    class Launches(list):
        def __init__(self):
            self.loaded = []

    seen = Launches()

    def load(spec):
        seen.loaded.append(spec)
        return lambda *arguments: seen.append((spec, arguments))

    monkeypatch.setattr(store, "load", load)
    monkeypatch.setattr(store, "load_all", lambda specs: [load(spec) for spec in specs])
    monkeypatch.setattr(hopper, "_upload", lambda array, device: torch.from_numpy(array))
    monkeypatch.setattr(hopper, "_refuse_capture", lambda device, lacking: None)
    monkeypatch.setattr(hopper, "_num_sms", lambda device: 132)
    monkeypatch.setattr(tensors.Plan, "use", lambda self, device: None)
    loaders = hopper._kernel, hopper._backward_kernels
    for loader in loaders:
        loader.cache_clear()
    yield seen
    for loader in loaders:
        loader.cache_clear()


def test_each_device_has_its_own_plan_of_a_layout(launches, monkeypatch):
    """Two GPUs in one process, of which the meta device stands for the second."""
    monkeypatch.setattr(hopper, "_upload", lambda array, device: torch.from_numpy(array).to(device))
    layout = Layout.from_lengths([300], [[77, 128]])
    dout, q, k, v, out, lse = random_backward(layout.num_tokens, 4, 2, 64)
    for _ in range(2):
        for device in ("cpu", "meta"):
            launches.clear()
            there = [x.to(device) for x in (dout, q, k, v, out, lse)]
            made = hopper.forward(*there[1:4], segments(layout), 0.125)
            made += hopper.backward(*there, segments(layout), 0.125)
            assert {x.device.type for x in made} == {device}
            handed = [x for _, arguments in launches for x in arguments if isinstance(x, torch.Tensor)]
            assert len(handed) > 15
            assert {x.device.type for x in handed} == {device}


groups = st.lists(st.tuples(st.integers(0, 200), st.lists(st.integers(0, 200), max_size=5)), min_size=1, max_size=6)
SPLIT = [(1500, [100] * 3)]  # 34 query heads of one KV head: key blocks whose queries are split


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups)
def test_one_kernel_serves_every_length(launches, lens):
    """Each shape of heads loads one kernel over all examples together, whatever the batch."""
    layout = Layout.from_lengths([p for p, _ in lens], [r for _, r in lens])
    if not layout.num_tokens:
        return
    for heads, kv_heads, head_dim in ((4, 1, 64), (8, 2, 64), (6, 1, 48), (34, 2, 128)):
        hopper.forward(*random_inputs(layout.num_tokens, heads, kv_heads, head_dim), segments(layout), 0.125)
    assert len(launches.loaded) == len({(4, 64), (6, 48), (17, 128)})


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups, st.booleans(), st.sampled_from(GRADIENTS))
@example(SPLIT, False, "qkv")
@example(SPLIT, True, "qkv")
@example(SPLIT, True, "q")
@example(SPLIT, True, "v")
def test_the_backward_hands_its_kernels_whole_workspaces(launches, lens, deterministic, gradients):
    """Sizes as the kernels' docstrings ask. Over all examples, a head dim loads its kernels, each way, once."""
    layout = Layout.from_lengths([p for p, _ in lens], [r for _, r in lens])
    tokens = layout.num_tokens
    if not tokens:
        return
    for heads, kv_heads, head_dim, head_dim_v in ((4, 1, 64, 64), (34, 1, 64, 64), (6, 3, 136, 136), (16, 1, 192, 128)):
        specs = backward_specs("bf16", head_dim, deterministic, gradients, head_dim_v=head_dim_v)
        tile, native = specs.main.tile, specs.main.head_dim
        inputs = random_backward(tokens, heads, kv_heads, head_dim, head_dim_v=head_dim_v)
        launches.clear()
        dq, dk, dv, _ = hopper.backward(
            *inputs, segments(layout), 0.125, deterministic=deterministic, gradients=gradients
        )
        plan = plan_backward.backward_work(segments(layout), tile, heads, kv_heads, 132, tile.deterministic)
        assert [spec for spec, _ in launches] == [
            spec for spec in specs.present if spec.operation != "bwd_sum" or plan.num_partials
        ]
        called = {spec.operation: arguments for spec, arguments in launches}
        dout, q, k, v, out, lse = inputs
        assert_same(called["bwd_preprocess"][:3], (out, dout, lse))
        *_, stats, dq_sums, locks, scale = called["bwd_preprocess"]
        blocks = -(-tokens // tile.tile_m)
        assert scale == 0.125
        assert stats.shape == (heads, blocks * tile.tile_m * STAT_COLUMNS)
        assert dq_sums.shape == (heads * blocks * tile.tile_m * native if "q" in gradients else 0,)
        assert (stats.dtype, dq_sums.dtype) == (torch.bfloat16, torch.float32)
        assert locks.dtype == torch.int32
        locked = "q" in gradients and (deterministic or native <= 128)
        assert locks.numel() == (heads * blocks * LOCKS + 1 if locked else 0)
        partials, work, visible_end = (called["bwd"][i] for i in (8, 10, 11))
        assert_same(called["bwd"], (q, k, v, dout, stats, dk, dv, dq_sums, partials, locks, work, visible_end, 0.125))
        assert partials.numel() == (
            plan.num_partials * tile.partial_floats(*specs.main.head_dims) if gradients != "q" else 0
        )
        assert partials.numel() <= tokens * heads * native / 4
        assert np.array_equal(work.numpy(), plan.items)
        assert visible_end.dtype == torch.int32
        assert visible_end.tolist() == segments(layout).visible_end.tolist()
        assert plan.num_partials or lens != SPLIT or heads != 34
        if plan.num_partials and gradients != "q":
            assert np.array_equal(called["bwd_sum"][1].numpy(), plan.sums)
            assert_same(called["bwd_sum"][::2], (partials, dk))
            assert called["bwd_sum"][3] is dv
        if "q" in gradients:
            assert_same(called["bwd_postprocess"], (dq_sums, locks, dq, 0.125))
        for name, grad, x in (("q", dq, q), ("k", dk, k), ("v", dv, v)):
            shape = x.shape if name in gradients else (0,)
            assert (grad.shape, grad.dtype, grad.is_contiguous()) == (shape, x.dtype, True)
    assert len(launches.loaded) <= 3 * 2 * 4 * len(GRADIENTS)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_the_backward_hands_its_kernels_the_arguments_of_features(launches, head_dim):
    layout = Layout.from_lengths([300], [[77, 200]])
    tokens, seg = layout.num_tokens, segments(layout)
    inputs, sinks, by_row = random_backward(tokens, 4, 2, head_dim), torch.randn(4), torch.randn(tokens, 4)
    tile = backward_specs("bf16", head_dim, features=("window", "softcap")).main.tile
    blocks = -(-tokens // tile.tile_m)
    *_, dsinks = hopper.backward(*inputs, seg, 0.125, Features(40, None, sinks, 30.0), by_row.t())
    called = {spec.operation: (spec.features, arguments) for spec, arguments in launches}
    features, arguments = called["bwd_preprocess"]
    assert features == ("sinks", "dlse")
    assert len(arguments) == 10
    assert arguments[7] is sinks
    assert arguments[8].shape == (4, blocks)
    assert torch.equal(arguments[9], by_row.t())
    assert arguments[9].is_contiguous()
    assert dsinks.shape == (4,)
    features, arguments = called["bwd"]
    assert features == ("window", "softcap")
    table, position, end_position, softcap = arguments[13:]
    assert arguments[10][:, BackwardFields.BLOCK_END].max() == len(table)
    assert position.shape == (blocks * tile.tile_m,)
    assert (position[:tokens] < end_position).all()
    assert (end_position <= position[:tokens] + 40).all()
    assert softcap == 30.0
    launches.clear()
    hopper.backward(*inputs, seg, 0.125, Features(softcap=30.0))
    assert launches[1][1][13:] == (30.0,)
    assert len(launches[0][1]) == 7


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "few"),
    [
        (([200] * 128, [[150] * 8] * 128), 8, True),
        (([100] * 16, [[1000] * 16] * 16), 8, True),
        (([1200] * 24, [[800] * 8] * 24), 8, True),
        (([600] * 2, [[400] * 8] * 2), 8, False),  # few rows
        (([600] * 64, [[400] * 8] * 64), 1, True),
        (([600] * 32, [[400] * 8] * 32), 1, False),
        (([2400] * 8, [[1600] * 8] * 8), 8, True),
        (([100] * 4, [[8000]] * 4), 8, True),
        (([4096] * 4, [[2048] * 8] * 4), 8, False),  # long prompts
        (([8192], [[2048] * 32]), 8, False),
    ],
)
def test_layouts_whose_rows_see_few_keys(lengths, kv_heads, few):
    seg = segments(Layout.from_lengths(*lengths))
    assert hopper.few_keys_backward(seg, kv_heads, None) == few
    assert not hopper.few_keys_backward(seg, kv_heads, Window(128))
    assert not hopper.few_keys_backward(seg, kv_heads, Window(chunk=10**6))


@pytest.mark.parametrize(("leaves", "few"), [(10, True), (1000, False)])
def test_trees_whose_rows_see_few_keys(leaves, few):
    assert hopper.few_keys_backward(segments(Layout.from_segments(*binary_tree(5, 3000, leaves))), 64, None) == few


@pytest.mark.parametrize("gradients", ["qkv", "q", "kv"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 120])
def test_the_backward_of_few_keys_has_a_tile_of_its_own(launches, monkeypatch, head_dim, deterministic, gradients):
    """Every kernel of the call and its plan has the tile. Each kind of layouts loads its kernels once."""
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 2 * 400)
    monkeypatch.setattr(hopper, "FEW_KEYS_WALK", 1.16)
    for prompt, responses, few in [
        (100, [77], False),
        (200, [50] * 4, True),
        (600, [60] * 4, False),
        (10, [300, 100], True),
    ] * 2:
        layout = Layout.from_lengths([prompt], [responses])
        seg = segments(layout)
        launches.clear()
        inputs = random_backward(layout.num_tokens, 34, 2, head_dim)
        hopper.backward(*inputs, seg, 0.1, deterministic=deterministic, gradients=gradients)
        specs = backward_specs("bf16", head_dim, deterministic, gradients, few_keys=few)
        tile = specs.main.tile
        made = plan_backward.backward_work(seg, tile, 34, 2, 132, tile.deterministic)
        assert [spec for spec, _ in launches] == [
            spec for spec in specs.present if spec.operation != "bwd_sum" or made.num_partials
        ]
        called = {spec.operation: arguments for spec, arguments in launches}
        assert np.array_equal(called["bwd"][10].numpy(), made.items)
        if gradients != "q":
            assert called["bwd"][8].numel() == made.num_partials * tile.partial_floats(*specs.main.head_dims)
    kinds = [backward_specs("bf16", head_dim, deterministic, gradients, few_keys=few) for few in (False, True)]
    assert len(launches.loaded) == sum(len(specs.present) for specs in kinds)


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "ratios"),
    [
        (([200] * 128, [[150] * 8] * 128), 8, (1, 2)),  # GQA ratios that take CTAs without clusters, of 1, 2, 4 and 8
        (([200] * 128, [[150] * 8] * 128), 1, (1, 2)),
        (([200] * 32, [[150] * 8] * 32), 1, ()),  # few rows
        (([610] * 64, [[390, 430] * 4] * 64), 8, (1, 2)),
        (([2400] * 8, [[1600] * 8] * 8), 8, ()),
        (([4096] * 4, [[2048] * 8] * 4), 8, ()),
        (([8192], [[2048] * 32]), 8, ()),
    ],
)
def test_layouts_whose_clusters_see_other_keys(lengths, kv_heads, ratios):
    seg = segments(Layout.from_lengths(*lengths))
    assert tuple(r for r in (1, 2, 4, 8) if hopper.few_keys_forward(seg, 128, r, kv_heads)) == ratios
    for head_dim, of_v in ((64, None), (192, None), (256, None), (512, None)):
        assert not hopper.few_keys_forward(seg, head_dim, 1, kv_heads, of_v), "which have no tile for it"
    assert hopper.few_keys_forward(seg, 192, 1, kv_heads, 128) == (1 in ratios)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(96, 96), (120, 120), (192, 128)])
def test_the_forward_of_few_keys_has_a_kernel_and_a_plan_of_its_own(launches, monkeypatch, head_dim, head_dim_v):
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 2 * 400)
    for lengths, few in (
        (([100], [[77]]), False),
        (([9000], [[64] * 3]), False),
        (([40] * 9, [[60] * 4] * 9), True),
    ) * 2:
        layout = Layout.from_lengths(*lengths)
        seg = segments(layout)
        launches.clear()
        hopper.forward(*random_inputs(layout.num_tokens, 4, 2, head_dim, head_dim_v=head_dim_v), seg, 0.1)
        ((spec, arguments),) = launches
        assert spec == forward_spec("bf16", head_dim, 2, head_dim_v=head_dim_v, few_keys=few)
        assert spec.tile.cluster == 2 - few
        expected = plan_forward.forward_work(seg, spec.tile.tokens(2), spec.tile.tile_n)
        assert np.array_equal(arguments[5].numpy(), expected)
    assert len(launches.loaded) == 2


@pytest.mark.parametrize("per_kv", range(1, 25))
def test_launches_take_every_head_once(launches, monkeypatch, per_kv):
    """The heads of each tile are of one KV head. Two launches read and write the same tensors."""
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 0)
    monkeypatch.setattr(hopper, "FEW_KEYS_COST", np.inf)
    monkeypatch.setattr(hopper, "PARTS_COST", np.inf)
    layout, sinks = Layout.from_lengths([300], [[77, 200]]), torch.randn(2 * per_kv)
    q, k, v = random_inputs(layout.num_tokens, 2 * per_kv, 2, 64)
    out, lse = hopper.forward(q, k, v, segments(layout), 0.1, Features(sinks=sinks))
    assert len(launches) == (2 if per_kv in (5, 6, *range(10, 16)) else 1)
    taken = []
    for spec, arguments in launches:
        heads = spec.packed_heads
        assert_same((*arguments[:5], arguments[-1]), (q, k, v, out, lse, sinks))
        work, items_of_clusters = arguments[5:7]
        assert np.array_equal(work, plan_forward.forward_work(segments(layout), spec.tile.tokens(heads), 128))
        first = sorted(set(items_of_clusters[:, 1].tolist()))
        assert sorted(items_of_clusters.tolist()) == [[tile, head] for tile in range(len(work)) for head in first]
        assert all(head // per_kv == (head + heads - 1) // per_kv for head in first)
        taken += [head + i for head in first for i in range(heads)]
    assert sorted(taken) == list(range(2 * per_kv))


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "ratios"),
    [
        (([8192], [[2048] * 32]), 8, (5, 6, 10, 11, 12, 13, 14, 15)),  # GQA ratios whose heads take two launches
        (([3000], [[1500] * 24]), 8, (5, 6, 10, 11, 12, 13, 14, 15)),
        (([8192], [[2048] * 32]), 1, ()),  # few rows
        (([200] * 128, [[150] * 8] * 128), 8, (11, 13, 14)),  # of which tiles of all heads would leave most rows idle
    ],
)
def test_layouts_whose_heads_take_two_launches(lengths, kv_heads, ratios):
    seg = segments(Layout.from_lengths(*lengths))
    for ratio in range(1, 25):
        launches = hopper.forward_launches(seg, False, 128, ratio, kv_heads)
        assert (len(launches) == 2) == (ratio in ratios), ratio
        assert [head for heads, _ in launches for head in heads] == list(range(ratio))
        of_trees = hopper.forward_launches(seg, True, 128, ratio, kv_heads)
        assert of_trees == [(range(ratio), False)]


@pytest.mark.parametrize("features", [Features(window=40), Features(batch_invariant=True)])
def test_windows_and_batch_invariant_calls_take_all_heads_in_one_launch(launches, monkeypatch, features):
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 0)
    monkeypatch.setattr(hopper, "PARTS_COST", np.inf)
    layout = Layout.from_lengths([300], [[77, 200]])
    hopper.forward(*random_inputs(layout.num_tokens, 10, 2, 128), segments(layout), 0.1, features)
    ((spec, _),) = launches
    assert spec.packed_heads == 5


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a is b or (isinstance(a, float) and a == b)


def test_the_backwards_plan_is_made_once_for_all_layers(launches, monkeypatch):
    made = []
    real = plan_backward.backward_work
    monkeypatch.setattr(plan_backward, "backward_work", lambda *a: made.append(a) or real(*a))
    layout = Layout.from_lengths([300], [[77, 200]])

    def run(heads, kv_heads, deterministic, dtype=torch.bfloat16):
        inputs = random_backward(layout.num_tokens, heads, kv_heads, 128, dtype)
        hopper.backward(*inputs, segments(layout), 0.1, deterministic=deterministic)

    for _ in range(3):
        run(8, 2, False)
        run(8, 2, False, torch.float16)
    assert len(made) == 1
    run(8, 2, True)
    run(8, 4, False)
    run(4, 2, False)
    assert len(made) == 4
    assert len({id(a[11]) for spec, a in launches if spec.operation == "bwd"}) == 1, "one visible_end"


def test_gradients_that_the_kernels_cannot_read_are_copied(launches):
    layout = Layout.from_lengths([30], [[7, 20]])
    dout, q, k, v, out, lse = random_backward(layout.num_tokens, 4, 2, 64)
    expanded = dout[:1, :1].expand_as(dout)
    lse_by_row = lse.t().contiguous().t()
    hopper.backward(expanded, q, k, v, out, lse_by_row, segments(layout), 0.1)
    (_, copy, copied_lse, *_), main = (arguments for _, arguments in launches[:2])
    assert main[3] is copy
    assert copy.is_contiguous()
    assert torch.equal(copy, expanded)
    assert copied_lse.is_contiguous()
    assert torch.equal(copied_lse, lse)


@pytest.mark.parametrize(
    "layout",
    [Layout.from_lengths([300, 0], [[77, 1, 200], [5]]), Layout.from_segments([0, 300, 377, 378, 500], [-1, 0, 1, 0])],
    ids=["groups", "tree"],
)
def test_the_kernel_gets_the_plan_and_fresh_outputs(launches, layout):
    """Trees have a kernel and a plan of their own."""
    q, k, v = random_inputs(layout.num_tokens, 8, 2, 96, torch.float16)
    seg, trees = segments(layout), layout.depth > 2
    out, lse = hopper.forward(q, k, v, seg, 0.1)
    ((spec, arguments),) = launches
    assert spec == forward_spec("fp16", 96, 4, trees)
    assert all(a is b for a, b in zip(arguments[:5], (q, k, v, out, lse), strict=True)), "no copies"
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (8, layout.num_tokens), torch.float32)
    work, items_of_clusters, *tables, scale, sms = arguments[5:]
    tile = spec.tile.tokens(4), spec.tile.tile_n
    if trees:
        expected = plan_paths.path_work(seg, *tile, None, spec.tile.parts)
        wanted = expected.items, expected.regions, np.append(seg.visible_end, [0] * spec.tile.tile_n)
    else:
        wanted = plan_forward.forward_work(seg, *tile), plan_forward.segment_begin(seg)
    for table, array in zip((work, *tables), wanted, strict=True):
        assert table.dtype == torch.int32
        assert np.array_equal(table, array)
    assert sorted(items_of_clusters.tolist()) == [[tile, head] for tile in range(len(work)) for head in (0, 4)]
    assert (scale, sms) == (0.1, 132)


def test_by_segment_no_tiles_share_a_mark_for_the_recompute_pass(launches, monkeypatch):
    """Calls that are batch-invariant: the plan of trees, cut by segments, in as many launches as marks allow."""
    layout = Layout.from_lengths([300], [[77, 200]])
    monkeypatch.setattr(hopper, "RECOMPUTE_MARKS", 1)
    monkeypatch.setattr(hopper, "_num_sms", lambda device: 4)
    hopper.forward(*random_inputs(layout.num_tokens, 8, 2, 128), segments(layout), 0.1, Features(batch_invariant=True))
    spec = forward_spec("bf16", 128, 4, trees=True)
    tile = spec.tile
    work = plan_paths.path_work(segments(layout), tile.tokens(4), tile.tile_n, None, tile.parts, by_segment=True).items
    assert len(launches) == len(work) * 2 // 2  # two clusters, a mark each
    assert all(taken == spec and np.array_equal(arguments[5], work) for taken, arguments in launches)
    scheduled = torch.cat([arguments[6] for _, arguments in launches]).tolist()
    assert sorted(scheduled) == [[tile, head] for tile in range(len(work)) for head in (0, 4)]


def test_the_host_counts_as_many_marks_as_the_kernel_has():
    source = (ROOT / "cute_kernels" / "fwd_frame.py").read_text()
    (words,) = re.findall(r"^RECOMPUTE_WORDS = (\d+)", source, re.MULTILINE)
    assert 32 * int(words) == hopper.RECOMPUTE_MARKS


def test_the_plan_is_made_once_for_all_layers_and_shapes_that_share_it(launches, monkeypatch):
    made = []
    real = plan_forward.forward_work
    monkeypatch.setattr(plan_forward, "forward_work", lambda *a: made.append(a) or real(*a))
    layout = Layout.from_lengths([300], [[77, 200]])
    for _ in range(3):
        hopper.forward(*random_inputs(layout.num_tokens, 8, 2, 128), segments(layout), 0.1)
        hopper.forward(*random_inputs(layout.num_tokens, 4, 1, 120, torch.float16), segments(layout), 0.1)
    assert len(made) == 1
    hopper.forward(*random_inputs(layout.num_tokens, 8, 1, 128), segments(layout), 0.1)
    assert len(made) == 2
    assert len({id(arguments[7]) for _, arguments in launches}) == 1, "one segment_begin"
    assert len({id(arguments[6]) for _, arguments in launches}) == 3, "a schedule for each number of heads"


def test_slices_of_a_fused_projection_are_read_where_they_lie():
    fused = torch.randn(50, (8 + 2 + 2) * 64).bfloat16()
    parts = fused.split([8 * 64, 2 * 64, 2 * 64], dim=1)
    for part in parts:
        x = part.view(50, -1, 64)
        assert tensors.tma_ready(x) is x
    x = torch.randn(4, 50, 64).bfloat16().transpose(0, 1)
    assert tensors.tma_ready(x) is x, "heads before tokens"


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(50, 4, 68).bfloat16()[:, :, :64],
        torch.randn(50 * 4 * 64 + 1).bfloat16()[1:].view(50, 4, 64),
        torch.randn(50, 4, 64).bfloat16()[:, :1].expand(50, 4, 64),
        torch.randn(1, 4, 64).bfloat16().expand(50, 4, 64),
        torch.randn(64, 4, 50).bfloat16().permute(2, 1, 0),
    ],
    ids=["stride of 68", "base off by 2 bytes", "one head expanded", "one token expanded", "last dim strided"],
)
def test_what_the_copy_engine_cannot_read_is_copied(x):
    copy = tensors.tma_ready(x)
    assert copy is not x
    assert copy.stride() == (x.shape[1] * 64, 64, 1)
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, x)


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_ops_run_the_kernels_where_they_serve(launches, monkeypatch, deterministic, switch):
    """PyTorch's switch for deterministic algorithms asks for ordered sums as well."""
    monkeypatch.setattr(hopper, "device_unsupported", lambda device: None)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: switch)
    layout = Layout.from_lengths([30], [[7, 20]])
    dout, q, k, v, out, lse = random_backward(layout.num_tokens, 4, 2, 64)
    arguments = layout.offsets, layout.parent, 0.1, deterministic
    got = dispatch._fwd_cuda(q, k, v, *arguments)
    grads = dispatch._bwd_cuda(dout, q, k, v, out, lse, *arguments)
    ((first, forward), (_, before), (main, backward), (_, after)) = launches
    assert first == forward_spec("bf16", 64, 2)
    assert main == backward_specs("bf16", 64, deterministic or switch).main
    assert_same(forward[3:5], got)
    assert_same((before[0], before[1], before[2], backward[3]), (out, dout, lse, dout))
    assert_same((after[2], *backward[5:7]), grads[:3])


def test_forward_tiles_are_kept_apart_by_what_their_tables_hold(launches):
    """Kernels of one layout and window whose tiles have as many tokens and keys, but another number of warp groups."""
    layout, window, device = Layout.from_lengths([300], [[77, 200]]), Window(40), torch.device("cpu")
    widths = {}
    for head_dim, ratio in ((128, 8), (256, 5), (64, 8), (192, 10)):
        spec = forward_spec("bf16", head_dim, ratio, True, ("window",))
        plan = hopper.ForwardPlan(segments(layout), device, spec, ratio, 1, window)
        ((work, *_),) = plan.launches
        widths[head_dim, ratio] = work.shape[1]
        fresh = hopper.ForwardPlan(segments(Layout.from_lengths([300], [[77, 200]])), device, spec, ratio, 1, window)
        assert torch.equal(work, fresh.launches[0][0])
    assert len(set(widths.values())) > 1


def test_a_plan_remembers_a_bounded_number_of_streams(monkeypatch):
    """A handle that is remembered is not recorded again; one that was forgotten is."""
    device, current, recorded = torch.device("cuda", 0), [0], []
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    tensor = SimpleNamespace(record_stream=recorded.append)
    plan = tensors.Plan(tensor, tensor)

    def use(*handles):
        recorded.clear()
        for current[0] in handles:
            plan.use(device)
        return recorded

    assert use(7, 7, 9, 7, 9) == [7, 7, 9, 9]
    few = range(tensors.MOST_STREAMS - 2)
    assert len(use(*(100 + n for n in few), 7, 9)) == 2 * len(few)
    for handle in range(1000, 11_000):
        assert use(handle) == [handle, handle]
        assert len(plan._used_on) <= tensors.MOST_STREAMS
    assert use(7, 7) == [7, 7]
