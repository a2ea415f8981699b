"""Bad input on a GPU: the CPU's sentences, and nothing is launched, copied or allocated."""

from __future__ import annotations

import pytest
import torch

import dualkv
from tests.bad_input import BAD, GOOD, LAYOUT, nothing_runs

DEVICE = "cuda:0"


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_one_sentence_before_anything_runs(bad, monkeypatch):
    """Cumulative lengths on the GPU too: they are copied to the host and nothing else is done."""
    call = bad.prepare(DEVICE, lengths=DEVICE)
    with nothing_runs(monkeypatch):
        bad.check(call, DEVICE)


def launched(calls):
    """Names of the kernels, copies and fills that reach the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call()
        torch.cuda.synchronize()
    return [e.name for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]


def test_nothing_is_launched_or_allocated():
    some = [bad for bad in BAD if not bad.values]
    calls = [bad.prepare(DEVICE) for bad in some]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert (
        launched(lambda bad=bad, call=call: bad.check(call, DEVICE) for bad, call in zip(some, calls, strict=True))
        == []
    )
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_something_that_is_launched_is_seen():
    assert launched([lambda: torch.ones(5, device=DEVICE)])


def test_tensors_of_two_devices():
    good, offsets = GOOD.to(DEVICE), LAYOUT.offsets.to(DEVICE)
    with pytest.raises(ValueError, match="k is on cpu and q on cuda:0, expected one device"):
        dualkv.attention(good, GOOD, good, LAYOUT)
    with pytest.raises(ValueError, match="offsets is on cuda:0, expected a CPU tensor"):
        torch.ops.dualkv.fwd(good, good, good, offsets, LAYOUT.parent, 1.0)
