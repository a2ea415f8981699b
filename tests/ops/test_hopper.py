"""The Hopper dispatch without a GPU: what it serves, what the kernel is handed, and that no length reaches its spec."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codegen import store
from codegen.spec import backward_specs, forward_spec
from dualkv import Layout
from dualkv.ops import dispatch, hopper, tensors
from dualkv.ops.features import Features, Window
from dualkv.ops.plan import forward as plan_forward
from dualkv.ops.plan import paths as plan_paths
from dualkv.segments import segments_of
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


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups)
def test_one_kernel_serves_every_length(launches, lens):
    """Each shape of heads loads one kernel over all examples together, whatever the batch."""
    layout = Layout.from_lengths([p for p, _ in lens], [r for _, r in lens])
    if not layout.num_tokens:
        return
    for heads, kv_heads, head_dim in ((4, 1, 64), (8, 2, 64), (6, 1, 48), (34, 2, 128)):
        hopper.forward(*random_inputs(layout.num_tokens, heads, kv_heads, head_dim), segments(layout), 0.125)
    assert len(launches.loaded) == len({(4, 64), (6, 48), (17, 128)})


def assert_same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a is b or (isinstance(a, float) and a == b)


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
    assert sorted(scheduled) == [[tile, group] for tile in range(len(work)) for group in range(2)]


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
