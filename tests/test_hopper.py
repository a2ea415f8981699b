"""The Hopper dispatch without a GPU: what it serves, what the kernel is handed, and that no length reaches its spec."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codegen import store
from codegen.spec import forward_spec
from cute_kernels import items
from dualkv import Layout, hopper, plan
from dualkv.layout import segments_of


def segments(layout):
    return segments_of(layout.offsets, layout.parent)


def random_inputs(tokens, heads, kv_heads, head_dim, dtype=torch.bfloat16):
    return [torch.randn(tokens, h, head_dim).to(dtype) for h in (heads, kv_heads, kv_heads)]


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
    monkeypatch.setattr(hopper, "_upload", lambda array, stream: torch.from_numpy(array))
    monkeypatch.setattr(hopper, "_refuse_capture", lambda device, lacking: None)
    monkeypatch.setattr(hopper, "_num_sms", lambda device: 132)
    monkeypatch.setattr(hopper.ForwardPlan, "use", lambda self, stream: None)
    monkeypatch.setattr(hopper, "_upload_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    hopper._kernel.cache_clear()
    yield seen
    hopper._kernel.cache_clear()


groups = st.lists(st.tuples(st.integers(0, 200), st.lists(st.integers(0, 200), max_size=5)), min_size=1, max_size=6)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups)
def test_one_kernel_serves_every_length(launches, lens):
    """Over all examples together, each shape of heads loads one kernel, whatever the batch."""
    layout = Layout.from_lengths([p for p, _ in lens], [r for _, r in lens])
    if not layout.num_tokens:
        return
    for heads, kv_heads, head_dim in ((4, 1, 64), (8, 2, 64), (6, 1, 48), (34, 2, 128)):
        hopper.forward(*random_inputs(layout.num_tokens, heads, kv_heads, head_dim), segments(layout), 0.125)
    assert len(launches.loaded) == len({(4, 64), (6, 48), (17, 128)})


def test_the_kernel_gets_the_plan_and_fresh_outputs(launches):
    layout = Layout.from_lengths([300, 0], [[77, 1, 200], [5]])
    q, k, v = random_inputs(layout.num_tokens, 8, 2, 96, torch.float16)
    out, lse = hopper.forward(q, k, v, segments(layout), 0.1)
    ((spec, arguments),) = launches
    assert spec == forward_spec("fp16", 96, 4)
    assert all(a is b for a, b in zip(arguments[:3], (q, k, v), strict=True)), "no copies"
    assert arguments[3] is out
    assert arguments[4] is lse
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (8, layout.num_tokens), torch.float32)
    work, begin, scale, sms = arguments[5:]
    expected = plan.forward_work(segments(layout), spec.tile.tokens(4), spec.tile.tile_n)
    assert np.array_equal(work.numpy(), expected)
    assert work.shape[1] == items.NUM_FIELDS
    assert begin.tolist() == plan.segment_begin(segments(layout)).tolist()
    assert (scale, sms) == (0.1, 132)


def test_the_plan_is_made_once_for_all_layers_and_shapes_that_share_it(launches, monkeypatch):
    made = []
    real = plan.forward_work
    monkeypatch.setattr(plan, "forward_work", lambda *a: made.append(a) or real(*a))
    layout = Layout.from_lengths([300], [[77, 200]])
    for _ in range(3):
        hopper.forward(*random_inputs(layout.num_tokens, 8, 2, 128), segments(layout), 0.1)
        hopper.forward(*random_inputs(layout.num_tokens, 4, 1, 120, torch.float16), segments(layout), 0.1)
    assert len(made) == 1
    hopper.forward(*random_inputs(layout.num_tokens, 8, 1, 128), segments(layout), 0.1)
    assert len(made) == 2
    assert len({id(arguments[6]) for _, arguments in launches}) == 1, "one segment_begin"


def test_slices_of_a_fused_projection_are_read_where_they_lie():
    fused = torch.randn(50, (8 + 2 + 2) * 64).bfloat16()
    parts = fused.split([8 * 64, 2 * 64, 2 * 64], dim=1)
    for part in parts:
        x = part.view(50, -1, 64)
        assert hopper.tma_ready(x) is x
    x = torch.randn(4, 50, 64).bfloat16().transpose(0, 1)
    assert hopper.tma_ready(x) is x, "heads before tokens"


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
    copy = hopper.tma_ready(x)
    assert copy is not x
    assert copy.stride() == (x.shape[1] * 64, 64, 1)
    assert copy.data_ptr() % 16 == 0
    assert torch.equal(copy, x)


def test_reasons_why_no_kernel_serves():
    flat, deep = Layout.from_lengths([4], [[2]]), Layout.from_segments([0, 2, 4, 6], [-1, 0, 1])
    q = torch.zeros(6, 2, 64, dtype=torch.bfloat16)
    assert hopper.unsupported(q, segments(flat)) == "cpu devices"
    assert hopper.unsupported(q.float(), segments(flat)) == "torch.float32 inputs"
    assert hopper.unsupported(q, segments(deep)) == "layouts of 3 levels"


def test_other_gpus_are_named(monkeypatch):
    for capability in ((8, 0), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        reason = hopper.device_unsupported.__wrapped__(torch.device("cuda:0"))
        assert reason == (None if capability == (9, 0) else f"compute capability {capability[0]}.0")
