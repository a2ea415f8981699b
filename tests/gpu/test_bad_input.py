"""Bad input on a GPU: the CPU's sentences, and nothing is launched or allocated. (compat's: test_compat.py.)"""

from __future__ import annotations

import pytest
import torch

import dualkv
from dualkv import hopper
from tests.test_attention import BAD, GOOD, LAYOUT, bad_backwards, nothing_runs

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == hopper.CAPABILITY
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]

__all__ = ["nothing_runs"]  # a fixture


def there(x):
    return x if x.device.type == "meta" else x.to("cuda")


@pytest.fixture
def nothing_is_launched(nothing_runs):
    """No kernel, copy or fill reaches the GPU between the fixture's `begin()` and the end of the test."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def begin():
        torch.cuda.synchronize()
        profiler.start()

    yield begin
    torch.cuda.synchronize()
    profiler.stop()
    assert not [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize(("q", "k", "v", "error", "words"), BAD)
def test_bad_tensors(q, k, v, error, words, nothing_is_launched):
    q, k, v = there(q), there(k), there(v)
    nothing_is_launched()
    with pytest.raises(error, match=words.replace("q on cpu", "q on cuda:0")) as caught:
        dualkv.attention(q, k, v, LAYOUT)
    assert "\n" not in str(caught.value)


def test_tensors_of_two_devices(nothing_is_launched):
    good, offsets = GOOD.to("cuda"), LAYOUT.offsets.to("cuda")
    nothing_is_launched()
    with pytest.raises(ValueError, match="k is on cpu and q on cuda:0, expected one device"):
        dualkv.attention(good, GOOD, good, LAYOUT)
    with pytest.raises(ValueError, match="offsets is on cuda:0, expected a CPU tensor"):
        torch.ops.dualkv.fwd(good, good, good, offsets, LAYOUT.parent, 1.0)


def test_bad_layouts_and_scales(nothing_is_launched):
    good = GOOD.to("cuda")
    nothing_is_launched()
    with pytest.raises(TypeError, match="layout is a list, expected a dualkv"):
        dualkv.attention(good, good, good, [0, 3, 5])
    with pytest.raises(ValueError, match="softmax_scale"):
        dualkv.attention(good, good, good, LAYOUT, softmax_scale=-1.0)


def test_bad_arguments_of_the_backward(nothing_is_launched):
    good, lse = GOOD.to("cuda"), torch.zeros(4, 5, device="cuda")
    bad = bad_backwards(good, good, lse)
    nothing_is_launched()
    for dout, *saved in bad:
        with pytest.raises(ValueError, match="expected"):
            torch.ops.dualkv.bwd(dout, good, good, good, *saved, LAYOUT.offsets, LAYOUT.parent, 1.0)


def test_something_that_is_launched_is_seen():
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profiler.start()
    torch.ones(5, device="cuda")
    torch.cuda.synchronize()
    profiler.stop()
    assert [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
