"""The fuzzer: saved cases, a few fresh ones, and that it sees a single wrong element."""

from __future__ import annotations

import importlib.metadata
import itertools
from dataclasses import replace

import pytest
import torch

import dualkv
from codegen.tiles import SHORT_WINDOW, kernel_head_dims
from dualkv import Layout
from dualkv.ops import backends, reference
from tests.fuzz import __main__ as fuzz
from tests.fuzz import dense
from tests.fuzz.case import (
    GPU_CUDNN,
    GPU_FEATURES,
    MASSIVE,
    Case,
    NoMemory,
    WrongResult,
    compat_inputs,
    compat_mask,
    here,
    inputs,
    reduce,
    run,
    seeded,
    segment_mask,
)
from tools import filed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", fuzz.saved("cpu"))
def test_saved_cases(name):
    run(Case.from_json((fuzz.CASES / name).read_text()))


def test_fresh_cases():
    for index in range(200):
        run(seeded("suite", index, "cpu"))


def test_cases_come_back_from_their_seed_and_from_json():
    for device in ("cpu", "cuda"):
        for index in range(20):
            case = seeded("again", index, device)
            assert case == seeded("again", index, device)
            assert case == Case.from_json(case.to_json())


WRONG = {
    "an element of out": (
        "forward",
        0,
        lambda out: out[3, 0, 0:1].add_(4 * torch.finfo(out.dtype).eps * out.abs().max()),
    ),
    "a row of dq": ("backward", 0, lambda dq: dq[5].mul_(1.02)),
    "a sink's gradient": ("backward", 3, lambda dsinks: dsinks[:1].mul_(1.05)),
    "an element of dv": ("backward", 2, lambda dv: dv[6, 0, 1:2].mul_(1.03)),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_element_is_seen_reduced_and_saved(name, monkeypatch, tmp_path, capsys):
    function, which, damage = WRONG[name]
    right = getattr(reference, function)

    def damaged(**call):
        results = right(**call)
        if len(results[which]) > (0 if which == 3 else 6):
            damage(results[which])
        return results

    monkeypatch.setattr(reference, function, damaged)
    monkeypatch.setattr(fuzz, "CASES", tmp_path)
    monkeypatch.setattr(fuzz, "FAILURES", 1)
    monkeypatch.setattr("sys.argv", ["fuzz", "--cases", "300", "--seed", "bad", "--device", "cpu"])
    assert fuzz.main() == 1
    assert "case" in capsys.readouterr().out
    saved = [Case.from_json(path.read_text()) for path in tmp_path.glob("*.json")]
    assert saved
    for case in saved:
        assert fuzz.wrong(case)
        assert sum(case.lengths) <= 8, "7 rows show it"
        assert (case.heads, case.head_dim, case.strides, case.values) == (1, 8, "contiguous", "normal")
    monkeypatch.setattr(reference, function, right)
    assert all(fuzz.wrong(case) is None for case in saved)


def test_what_raises_is_a_failure_too(monkeypatch, tmp_path, capsys):
    def broken(**call):
        raise RuntimeError("no such luck\nand more")

    monkeypatch.setattr(reference, "backward", broken)
    monkeypatch.setattr(fuzz, "CASES", tmp_path)
    monkeypatch.setattr("sys.argv", ["fuzz", "--cases", "300", "--seed", "bad", "--device", "cpu"])
    assert fuzz.main() == 1
    said = capsys.readouterr().out
    assert "raised RuntimeError: no such luck\n" in said
    assert f"{fuzz.FAILURES} failures are enough" in said
    assert list(tmp_path.glob("*.json"))


def test_a_clean_run_says_what_it_tried(monkeypatch, tmp_path, capsys):
    record = tmp_path / "record.json"
    monkeypatch.setattr(
        "sys.argv", ["fuzz", "--cases", "5", "--seed", "suite", "--device", "cpu", "--json", str(record)]
    )
    assert fuzz.main() == 0
    assert "seed suite on cpu: 5 cases" in capsys.readouterr().out
    (record,) = filed.read(record)["runs"]
    assert record["failed"] == 0
    assert record["tried"]["cases"] == 5
    assert record["versions"]["torch"] == importlib.metadata.version("torch")


def test_the_bound_of_dS_that_is_scaled_before_it_is_rounded():
    """The bound allows for dS that is scaled before it is rounded, as in PyTorch's memory-efficient attention. This
    case once failed on a GPU."""
    case = replace(seeded("h3", 1200, "cuda"), device="cpu")
    assert (case.dtype, case.causal, case.kv_heads) == ("fp16", False, case.heads)
    context, *own = case.lengths
    mask, largest = torch.from_numpy(compat_mask(context, own, list(case.q_lens), False)), 0.0
    for seed in range(1, 5):
        (q, kc, vc, kd, vd), dout = compat_inputs(replace(case, seed=seed))
        k, v = torch.cat([kc, kd]), torch.cat([vc, vd])
        x, y, z, g = [x.float().transpose(0, 1) for x in (q, k, v, dout)]
        p = (x @ y.mT * case.scale).masked_fill(~mask, -torch.inf).softmax(-1).half().float()
        ds = p * (g @ z.mT - (g * (p @ z).half().float()).sum(-1, keepdim=True))
        before, after = (ds * case.scale).half().float(), ds.half().float() * case.scale
        scaled_first, scaled_last = ((r.mT @ x).half().transpose(0, 1) for r in (before, after))
        wants = [dense.attention(q, k, v, mask, case.scale, dout, 4.0, scaled_dS=s)["dk"] for s in (False, True)]
        largest = max(largest, wants[0].ratio(scaled_first))
        assert wants[1].ratio(scaled_first) <= 1
        assert wants[0].ratio(scaled_last) <= 0.5
    assert largest > 1, "the other bound is too tight for it"


@pytest.mark.parametrize("name", ["one-key", "large-scores"])
def test_the_bound_of_dq_with_a_cap_in_fp16(name):
    """The backward rounds P times the slope of the cap, which may be subnormal. These cases once failed on a GPU."""
    case = replace(Case.from_json((fuzz.CASES / f"cuda-fp16-capped-{name}.json").read_text()), device="cpu")
    largest = torch.zeros(2)
    for seed in range(20):
        for coarser in (False, True):
            dq, want = dq_with_a_cap(replace(case, seed=seed), 64.0 if coarser else 1.0)
            largest[int(coarser)] = max(largest[int(coarser)], want.ratio(dq))
    assert largest[0] <= 1
    assert largest[1] > 1, "the bound is too wide to see steps 64 times as wide"


def dq_with_a_cap(case, coarser):
    """dq [T, H, D] fp16 as the kernels round it, but for sums; P times the slope to fp16 of numbers `coarser` times
    smaller. And what it should be."""
    (q, k, v), dout = inputs(case, (sum(case.lengths), case.heads), *[(sum(case.lengths), case.kv_heads)] * 2)
    sinks = None if case.sinks is None else torch.full((case.heads,), case.sinks)
    mask = torch.from_numpy(segment_mask(case.lengths, case.parent))
    scale = case.scale or case.head_dim**-0.5
    want = dense.attention(q, k, v, mask, scale, dout, sinks=sinks, softcap=case.softcap)["dq"]
    x, y, z, g = (t.double().transpose(0, 1) for t in (q, k, v, dout))
    y, z = (t.repeat_interleave(case.heads // case.kv_heads, 0) for t in (y, z))
    tanh = (x @ y.mT * scale / case.softcap).tanh()
    scores = (case.softcap * tanh).masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - (lse if sinks is None else lse.logaddexp(sinks.double()[:, None, None]))).exp()
    delta = (g * (p.half().double() @ z).half().double()).sum(-1, keepdim=True)
    sloped = (p * (1 - tanh * tanh) / coarser).half().double() * coarser
    ds = (sloped * (g @ z.mT - delta)).half().double()
    return (scale * ds @ y).half().transpose(0, 1), want


def test_cases_of_some_kernels_alone(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(fuzz, "attempt", lambda case: (seen.append(case.head_dims), (0.5, None))[1])
    words = ["--cases", "60", "--seed", "some", "--device", "cuda", "--native", "512", "192/128"]
    monkeypatch.setattr("sys.argv", ["fuzz", *words])
    assert fuzz.main() == 0
    assert "60 cases" in capsys.readouterr().out
    assert len(seen) == 60
    assert {max(pair) > 256 for pair in seen} == {True, False}
    assert all(max(pair) > 256 or (128 < pair[0] <= 192 and pair[1] <= 128) for pair in seen)
    monkeypatch.setattr("sys.argv", ["fuzz", "--native", "100"])
    with pytest.raises(SystemExit):
        fuzz.main()


def test_too_little_memory_is_no_failure(monkeypatch, capsys):
    """The dense results of a case, or of what it is reduced to, may need more memory than there is."""
    results = iter([NoMemory(), 0.5, WrongResult("off"), NoMemory(), 0.5])

    def run(_case):
        result = next(results)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(fuzz, "run", run)
    monkeypatch.setattr(fuzz, "save", lambda case, why: print(why, fuzz.wrong(case)))
    monkeypatch.setattr("sys.argv", ["fuzz", "--cases", "3", "--seed", "some", "--device", "cuda"])
    assert fuzz.main() == 1
    said = capsys.readouterr().out
    assert "3 cases" in said
    assert "1 failed" in said
    assert "1 not tried: out of memory" in said
    assert "off None" in said


def test_a_call_that_runs_out_of_memory_is_a_failure(monkeypatch):
    def no_memory(*_args, **_kwargs):
        raise torch.OutOfMemoryError("too much")

    case = seeded("memory", 0, "cpu")
    with monkeypatch.context() as patched:
        patched.setattr(dense, "attention", no_memory)
        with pytest.raises(NoMemory):
            fuzz.attempt(case)
    monkeypatch.setattr("tests.fuzz.case.dualkv.attention", no_memory)
    monkeypatch.setattr("tests.fuzz.case.dualkv.flash_attn_dualkv_varlen_func", no_memory)
    assert fuzz.attempt(case) == (0.0, "raised OutOfMemoryError: too much")


def test_reduction_ends_where_nothing_simpler_fails():
    case = seeded("reduce", 1, "cpu")
    assert reduce(case, lambda other: False) == case
    assert sum(reduce(case, lambda other: True).lengths) == 0


def test_deep_trees_and_long_windows_are_drawn():
    """Long windows and chunks have tiles of their own, which every kind of call with features draws."""
    depths, sizes, kinds = [], {"window": 0, "chunk": 0}, set()
    for index in range(5000):
        case, depth = seeded("long", index, "cuda"), []
        for up in case.parent:
            depth.append(depth[up] + 1 if up >= 0 else 1)
        depths.append(max(depth, default=0))
        for name in sizes:
            if SHORT_WINDOW < (getattr(case, name) or 0) < sum(case.lengths[:2]):
                sizes[name] += 1
                kinds.add((case.dtype, kernel_head_dims(*case.head_dims)))
    assert sum(d > 2 for d in depths) > 250
    assert max(depths) > 40
    assert min(sizes.values()) > 40
    assert kinds == set(GPU_FEATURES)


def test_some_calls_are_drawn_for_cudnn():
    """The calls are ones that it takes, of a few forms."""
    some = [case for case in (seeded("cudnn", index, "cuda") for index in range(1500)) if case.backend]
    forms = {(case.dtype, case.head_dim, case.heads // case.kv_heads) for case in some}
    assert forms == set(GPU_CUDNN)
    assert all(ratio in GPU_FEATURES[dtype, (head_dim, head_dim)] for dtype, head_dim, ratio in forms)
    assert 50 < len(some) < 200
    assert {(case.backend, case.kind, case.softcap, case.needs) for case in some} == {
        ("cudnn", "attention", None, "qkv")
    }
    assert {case.lse_grad for case in some} == {True, False}
    for name in ("window", "chunk", "sinks"):
        assert any(getattr(case, name) is not None for case in some)
    assert not any(seeded("cudnn", index, "cpu").backend for index in range(300))


def test_massive_activations_outgrow_references_on_a_gpu():
    """Some rows of most such calls may take the recompute pass, and not all rows."""
    some = [case for case in (seeded("massive", index, "cuda") for index in range(400)) if case.values == MASSIVE]
    assert 30 < len(some) < 90
    shares = []
    for case in [case for case in some if case.kind == "attention" and case.heads * max(case.head_dims) <= 256][:6]:
        layout = Layout.from_segments([0, *itertools.accumulate(case.lengths)], case.parent)
        rows = layout.num_tokens
        (q, k, v), _ = inputs(replace(case, device="cpu"), (rows, case.heads), *[(rows, case.kv_heads)] * 2)
        with dualkv.RecomputePasses() as passes:
            dualkv.attention(q, k, v, layout, case.scale)
        shares.append(passes.rows / passes.all_rows)
    assert sum(0 < share < 0.9 for share in shares) >= 3


@pytest.mark.parametrize("refuses", [None, "this test"])
def test_calls_by_cudnn_are_counted(refuses, monkeypatch, tmp_path, capsys):
    """The record counts the calls that cuDNN runs; the first backend that serves the others runs them."""
    found = replace(backends.BACKENDS["reference"], refuses=lambda *given: refuses)
    monkeypatch.setitem(backends.BACKENDS, "cudnn", found)
    monkeypatch.setattr(backends, "order", lambda device: ("reference",))  # where none is asked for
    monkeypatch.setattr(fuzz, "seeded", lambda *given: replace(seeded(*given), backend="cudnn"))
    record = tmp_path / "record.json"
    words = ["--cases", "20", "--seed", "suite", "--device", "cpu", "--json", str(record)]
    monkeypatch.setattr("sys.argv", ["fuzz", *words])
    assert fuzz.main() == 0
    assert "20 cases" in capsys.readouterr().out
    (record,) = filed.read(record)["runs"]
    assert record["tried"].get("cudnn", 0) == (0 if refuses else 20)
    case = replace(seeded("suite", 1, "cpu"), backend="cudnn")
    assert here(case).backend == (None if refuses else "cudnn")
