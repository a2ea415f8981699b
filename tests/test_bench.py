"""The benchmark without a GPU: work counted against brute force, peers that compute the same, figures and JSON."""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from dataclasses import replace

import pytest
import torch
import torch.utils.flop_counter  # before aten ops are replaced below: it looks them up
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import dualkv
from dualkv import cli
from dualkv.bench import command, fa4, inputs, run, show, sides, timing
from dualkv.bench.workloads import DIRECTIONS, NAMED, Workload, of_rollouts, parse, random_workload

LENS = st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=4)), min_size=1, max_size=4)


# ---------------------------------------------------------------- workloads
@settings(deadline=None)
@given(LENS)
def test_flops_against_brute_force(groups):
    workload = Workload("x", tuple(p for p, _ in groups), tuple(tuple(r) for _, r in groups), 6, 2, 40)
    pairs, row = 0, 0
    for prompt, responses in groups:
        prompt_rows = range(row, row + prompt)
        row += prompt
        pairs += sum(1 for q in prompt_rows for k in prompt_rows if k <= q)
        for length in responses:
            own = range(row, row + length)
            row += length
            pairs += sum(1 for q in own for k in (*prompt_rows, *own) if k <= q)
    assert workload.visible_pairs() == pairs
    assert workload.flops("fwd") == pairs * 6 * 40 * 4
    assert workload.flops("bwd") == pairs * 6 * 40 * 10  # five products instead of two
    assert workload.flops("both") == pairs * 6 * 40 * 14


def test_the_main_workload_has_the_known_work():
    assert NAMED["n32-p8192-r2048"].flops("fwd") == pytest.approx(10.45e12, rel=1e-3)


def test_trees_have_the_known_shape():
    binary, agent = NAMED["binary-p4096-r1024"].layout(), NAMED["agent-t10-r512"].layout()
    assert (binary.depth, binary.num_tokens, binary.nominal_tokens) == (5, 4096 + 30 * 1024, 16 * 8 * 1024)
    assert (agent.depth, agent.nominal_tokens) == (10, 32 * 10 * 512), "32 rollouts of 10 turns"
    assert agent.num_segments < 200, "which share turns"
    assert set(NAMED["agent-t10-r512"].response_lens[0]) == {512}


def test_sides_know_the_sequences_of_a_tree():
    made = inputs.Inputs(Workload("t", (3,), ((2, 1, 4, 1),), 2, 1, 8, parent=(-1, 0, 1, 1, 0)), "cpu")
    assert [rows.tolist() for rows in made.replicated()] == [
        [0, 1, 2, 3, 4, 5],
        [0, 1, 2, 3, 4, 6, 7, 8, 9],
        [0, 1, 2, 10],
    ]
    with pytest.raises(ValueError, match="computes prompts and responses, t has 3 levels"):
        made.groups  # noqa: B018


def test_drawn_workloads_are_the_same_every_time_and_of_all_kinds():
    drawn = [parse(f"random-1-{i}") for i in range(40)]
    assert drawn == [random_workload(1, i) for i in range(40)]
    assert drawn[0] != replace(parse("random-2-0"), name=drawn[0].name)
    kinds = {(w.head_dim, w.heads // w.kv_heads) for w in drawn}
    assert kinds == set(itertools.product((64, 96, 128, 192, 256), (1, 4, 8, 16)))
    for w in drawn:
        [prompt], [responses] = w.prompt_lens, w.response_lens
        assert 256 <= prompt <= 65536
        assert 1 <= len(responses) <= 64
        assert 8 <= min(responses) <= max(responses) <= 4096
        assert w.flops("fwd") <= 2e13  # some ms
        assert prompt + sum(responses) <= 2**17  # some GB of tensors
    assert max(w.prompt_lens[0] for w in drawn) > 32768
    assert any(len(set(w.response_lens[0])) > 1 for w in drawn)


@pytest.mark.parametrize(
    ("text", "prompts", "responses"),
    [
        ("8192:32x2048", (8192,), ((2048,) * 32,)),
        ("700:130,911;40:", (700, 40), ((130, 911), ())),
        (" 5 : 2 x 3 , 4", (5,), ((3, 3, 4),)),
        ("0:7", (0,), ((7,),)),
    ],
)
def test_workloads_by_lengths(text, prompts, responses):
    workload = parse(text)
    assert (workload.prompt_lens, workload.response_lens) == (prompts, responses)


@pytest.mark.parametrize("text", ["n32", "5", "a:1", "5:1,,2", "5:x3", "5:2x", ";", "5:-1", "5:1.5"])
def test_bad_workloads(text):
    with pytest.raises(ValueError, match=re.escape(f"workload {text!r} is neither a name such as")):
        parse(text)


def test_bad_shapes():
    with pytest.raises(ValueError, match="no tokens"):
        parse("0:")
    for change in ({"heads": 9}, {"head_dim": 84}, {"dtype": "fp32"}):
        with pytest.raises(ValueError, match=f"{next(iter(change))} is"):
            NAMED["n32-p8192-r2048"].with_shape(**change)
    assert NAMED["n32-p8192-r2048"].with_shape(heads=64, dtype=None).name == "n32-p8192-r2048 heads=64"


ROLLOUTS = [{"prompt": "abcde", "responses": ["abc", [1, 2]], "rewards": [0, 1]},
            {"prompt": [7] * 9, "responses": ["", "xy", "z"], "rewards": [0, 1, 1]}]  # fmt: skip


def test_workloads_of_a_rollouts_file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(json.dumps(group) for group in ROLLOUTS))
    (whole,) = of_rollouts(path)
    assert (whole.name, whole.prompt_lens, whole.response_lens) == ("rollouts.jsonl", (5, 9), ((3, 2), (0, 2, 1)))
    batches = of_rollouts(path, budget=13)
    assert [b.name for b in batches] == ["rollouts.jsonl 1/2", "rollouts.jsonl 2/2"]
    assert sorted(zip([b.prompt_lens for b in batches], [b.response_lens for b in batches], strict=True)) == [
        ((5,), ((3, 2),)), ((9,), ((0, 2, 1),)),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="budget"):
        of_rollouts(path, budget=5)


# ---------------------------------------------------------------- sides
def _dense(q, k, v, scale, causal):
    """Attention of one sequence, the last query on the last key if causal; out [n, H, D], lse [H, n]."""
    ratio = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(ratio, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * scale
    if causal:
        n, m = q.shape[0], k.shape[0]
        hidden = torch.arange(m) > torch.arange(n)[:, None] + m - n
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)


def _spans(cu_q, cu_k):
    spans = [zip(c[:-1].tolist(), c[1:].tolist(), strict=True) for c in (cu_q, cu_k)]
    return [(slice(*a), slice(*b)) for a, b in zip(*spans, strict=True)]


def _varlen(q, k, v, cu_q, cu_k, scale, causal):
    parts = [_dense(q[a], k[b], v[b], scale, causal) for a, b in _spans(cu_q, cu_k)]
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def _varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal):
    """As FlashAttention does it: p from the given lse, and rowsum(dout * out) from the given out."""
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    ratio, (rows, heads, _) = q.shape[1] // k.shape[1], q.shape
    assert dout.shape == out.shape == q.shape
    assert lse.shape == (heads, rows)
    for a, b in _spans(cu_q, cu_k):
        ks, vs = (x[b].repeat_interleave(ratio, 1) for x in (k, v))
        n, m = len(q[a]), len(ks)
        scores = torch.einsum("qhd,khd->hqk", q[a], ks) * scale
        if causal:
            scores = scores.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + m - n, float("-inf"))
        p = (scores - lse[:, a, None]).exp()
        ds = p * (torch.einsum("qhd,khd->hqk", dout[a], vs) - (dout[a] * out[a]).sum(-1).T[:, :, None]) * scale
        dq[a] = torch.einsum("hqk,khd->qhd", ds, ks)
        for grad, full in (
            (dk, torch.einsum("hqk,qhd->khd", ds, q[a])),
            (dv, torch.einsum("hqk,qhd->khd", p, dout[a])),
        ):
            grad[b] = full.unflatten(1, (-1, ratio)).sum(2)
    return dq, dk, dv


@pytest.fixture
def fake_peers(monkeypatch):
    """FlashAttention-4 and PyTorch's FlashAttention as plain PyTorch; nothing is compiled."""

    def check(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        assert max_seqlen_k == cu_seqlens_k.diff().max()
        return cu_seqlens_q, cu_seqlens_k

    def fwd(q, k, v, *, softmax_scale, causal, return_lse, **lengths):
        assert return_lse
        return (*_varlen(q, k, v, *check(**lengths), softmax_scale, causal), None, None, None)

    def bwd(q, k, v, out, dout, lse, *, softmax_scale, causal, deterministic, **lengths):
        calls.append(deterministic)
        return _varlen_backward(dout, q, k, v, out, lse, *check(**lengths), softmax_scale, causal)

    calls: list[bool] = []
    interface = types.ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = fwd, bwd
    cute = types.ModuleType("flash_attn.cute")
    cute.interface = interface
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    random = torch.zeros(1), torch.ones(1)

    def aten(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale):
        return (*_varlen(q, k, v, cu_q, cu_k, scale, causal), *random, None)

    def aten_backward(dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale):
        assert (seed, offset) == random
        return _varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, scale, causal)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)

    def flex(q, k, v, *, block_mask, scale, enable_gqa):
        i = torch.arange(q.shape[2])
        seen = block_mask.mask_mod(0, 0, i[:, None], i)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(flex_attention, "flex_attention", flex)  # which has no backward on the CPU
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(sides.hopper, "unsupported", lambda q: None)
    return calls


class Fp32Inputs(inputs.Inputs):
    def __init__(self, workload):
        super().__init__(workload, "cpu")
        self.q, self.k, self.v, self.dout = (x.float() for x in (self.q, self.k, self.v, self.dout))


SIDE_WORKLOADS = ["40:7,1,33", "30:5,0,9;0:11,4;21:;1:6", "16:", "0:12"]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", sides.SIDES)
@pytest.mark.parametrize("text", SIDE_WORKLOADS)
def test_every_side_computes_the_same(fake_peers, text, name, direction):
    if not sides.of_direction([name], direction):
        return
    made = Fp32Inputs(parse(text).with_shape(heads=4, kv_heads=2, head_dim=16))
    leaves = [x.clone().requires_grad_() for x in (made.q, made.k, made.v)]
    out = dualkv.attention(*leaves, made.layout)
    expected = (out.detach(),) if direction == "fwd" else torch.autograd.grad(out, leaves, made.dout)
    with torch.no_grad():
        side = sides.SIDES[name](made, direction)
        assert run.run_checked(side, expected) < 1e-5
        first = [x.clone() for x in side.results()]
        for part in side.parts.values():
            part()
        side.call()  # again, over what the first call left
        assert run.difference(side.results(), tuple(first)) == 0
    assert set(side.extra) <= set(side.parts)
    if name.startswith("fa4") and direction != "fwd":
        assert set(fake_peers) == {name.endswith("deterministic")}


@pytest.mark.parametrize("direction", ["bwd", "both"])
def test_deterministic_is_passed_on(fake_peers, monkeypatch, direction):
    asked = []

    def attention(q, k, v, layout, softmax_scale, deterministic=None, return_lse=False):
        if not return_lse:  # else it makes what a backward reads
            asked.append(deterministic)
        return (q, None) if return_lse else q * k.mean() * v.mean()

    def bwd(dout, q, k, v, out, lse, offsets, parent, softmax_scale, deterministic):
        asked.append(deterministic)
        return q, k, v

    monkeypatch.setattr(sides, "dualkv", types.SimpleNamespace(attention=attention))
    monkeypatch.setattr(torch.ops.dualkv, "bwd", bwd)
    made = Fp32Inputs(parse("9:3").with_shape(heads=2, kv_heads=2, head_dim=8))
    for name in ("dualkv", "dualkv-deterministic"):
        with torch.no_grad():
            sides.SIDES[name](made, direction).call()
    assert asked == [False, True]


def test_parts_of_the_three_calls(fake_peers):
    made = Fp32Inputs(parse("40:7,1,33").with_shape(heads=4, kv_heads=2, head_dim=16))
    with torch.no_grad():
        found = {direction: fa4.three_calls(made, direction) for direction in DIRECTIONS}
    assert {direction: (list(side.parts), side.extra) for direction, side in found.items()} == {
        "fwd": (["prompt", "context", "own", "merge"], ("merge",)),
        "bwd": (["prompt", "context", "own", "sum"], ("sum",)),
        "both": (["merge", "sum"], ("merge", "sum")),
    }


def of(*results):
    return inputs.Side(lambda: None, lambda: tuple(torch.tensor(x) for x in results))


def test_results_are_checked():
    with pytest.raises(RuntimeError, match="not written"):
        run.run_checked(of([1.0], [1.0, float("nan")]), None)
    assert run.run_checked(of([3.0, 4.0], [1.0]), (torch.tensor([3.0, 4.05]), torch.tensor([1.0]))) < 0.011
    with pytest.raises(RuntimeError, match=r"computes something else: its results are 0\.5 from"):
        run.run_checked(of([3.0, 4.0], [1.0]), (torch.tensor([3.0, 4.0]), torch.tensor([2.0])))


# ---------------------------------------------------------------- figures
class Event:
    """A call of `ms` milliseconds on a GPU that is not there."""

    ms, polls = 2.0, 7

    def synchronize(self):
        pass

    def query(self):
        """Through after some polls."""
        self.polls -= 1
        return self.polls < 0

    def elapsed_time(self, end):
        return self.ms


@pytest.fixture
def no_gpu(monkeypatch):
    def timed(call):
        call()
        return Event(), Event()

    monkeypatch.setattr(timing, "timed", timed)
    monkeypatch.setattr(timing, "PAUSE", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(inputs, "Inputs", Fp32Inputs)


def constant(value, parts=()):
    def make(inputs, direction):
        out = torch.full_like(inputs.q, value)
        return inputs_side(out, parts)

    def inputs_side(out, parts):
        return inputs.Side(lambda: None, lambda: (out,), {p: lambda: None for p in parts}, extra=("merge",))

    return make


def broken(inputs, direction):
    raise NotImplementedError("head_dim 16 is not\n supported")


def missing(inputs, direction):
    raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")


class FakeMeter(timing.Meter):
    def __init__(self):
        self.absent, self.taken = None, 0

    def sample(self):
        """690 W by a counter that moves at every third sample, 0.1 s apart."""
        self.taken += 1
        at = self.taken / 30
        return [timing.Sample(at, 69.0 * (self.taken // 3), 1500, 60)]

    def limits(self):
        return {"driver": "580.1", "nvml": "present", "max_sm_clock_mhz": 1980, "power_limit_w": 700.0}


def measured(monkeypatch, makers, limit=None, meter=None, direction="fwd"):
    monkeypatch.setattr(sides, "SIDES", makers)
    workload = parse("20:5,9").with_shape(heads=2, kv_heads=1, head_dim=16)
    done = []

    def track(items, what, total):
        items = list(items)
        assert len(items) == total
        for item in items:
            yield item
            done.append(item)

    clock, meter = timing.Clock(limit), meter or FakeMeter()
    result = run.bench(workload, direction, list(makers), 0.01, 3, clock, meter, track)
    assert len(done) == len(makers) * 4
    return workload, result


def test_figures_of_sides_in_turns(no_gpu, monkeypatch):
    makers = {"dualkv": constant(1.0), "fa4-3-calls": constant(1.01, ["own", "merge"]), "flex": broken}
    for direction in DIRECTIONS:
        workload, result = measured(monkeypatch, makers, direction=direction)
        mine, theirs, failed = result["sides"].values()
        flops = workload.flops(direction)
        assert (result["direction"], result["flops"]) == (direction, flops)
        assert mine["sustained_ms"] == theirs["sustained_ms"] == mine["cold_ms"] == 2.0
        assert mine["sustained_tflops"] == pytest.approx(flops / 2e-3 / 1e12)
        assert [len(side["rounds"]) for side in (mine, theirs)] == [3, 3]
        assert all(r["calls"] >= timing.MIN_CALLS for r in mine["rounds"])
        assert mine["power_w"] == pytest.approx(690.0)
        assert 0 < mine["joules"] < 690.0
        assert mine["sm_clock_mhz"] == 1500
        assert mine["speed_against_reference"] == 1.0
        assert theirs["difference"] == pytest.approx(0.01)
        assert theirs["parts"] == {
            "own": {"cold_ms": 2.0, "in_total": True}, "merge": {"cold_ms": 2.0, "in_total": False},
        }  # fmt: skip
        assert failed == {"error": "NotImplementedError: head_dim 16 is not supported"}


def test_a_side_that_computes_something_else_is_not_timed(no_gpu, monkeypatch):
    _, result = measured(monkeypatch, {"dualkv": constant(1.0), "flex": constant(1.25)})
    assert "sustained_ms" not in result["sides"]["flex"]
    assert "computes something else" in result["sides"]["flex"]["error"]


def test_sustained_is_the_median_of_rounds():
    rounds = [{"ms": ms, "calls": 9, "joules": j} for ms, j in ((3.0, 1.0), (1.0, 7.0), (2.0, 4.0))]
    figures = run.summary(4.0, 33.0, rounds, 8_000_000_000)
    assert figures["sustained_ms"] == 2.0
    assert figures["sustained_tflops"] == pytest.approx(4.0)
    assert figures["cold_tflops"] == pytest.approx(2.0)
    assert figures["joules"] == 4.0
    assert figures["host_us"] == 33.0


def test_energy_is_counted_between_movements_of_its_counter():
    """A counter that moves every 0.1 s, read every 0.01 s in a turn of 0.35 s: 4 movements, or 3 by a bad start."""
    for start in (0.0, 0.03, 0.08):
        times = [start + 0.01 * i for i in range(36)]
        samples = [timing.Sample(t, 1000.0 + 70.0 * int(t * 10 + 1e-9), 1600 + i % 3, 55) for i, t in enumerate(times)]
        figures = timing.energy(samples, 0.007)
        assert figures["power_w"] == pytest.approx(700.0)
        assert figures["joules"] == pytest.approx(4.9)
        assert figures["sm_clock_mhz"] == 1601
    assert set(timing.energy(samples[:9], 0.007)) == {"sm_clock_mhz", "temperature_c"}, "one movement tells nothing"
    assert timing.energy([], 0.007) == {}


def test_slow_calls_are_still_sampled(no_gpu):
    calls = []
    assert timing.sustained(lambda: calls.append(1), 5000.0, 0.0, FakeMeter())["calls"] == timing.MIN_CALLS
    timing.host_us(lambda: calls.append(1), 5000.0)
    assert len(calls) == timing.MIN_CALLS + 3


def test_long_calls_are_timed_a_few_times(no_gpu, monkeypatch):
    for took, count in ((1.0, timing.COLD_CALLS), (80.0, 4), (500.0, timing.FEW_CALLS)):
        calls = []
        monkeypatch.setattr(Event, "elapsed_time", lambda *_, took=took: took)
        assert timing.cold_ms(lambda: calls.append(1)) == took  # noqa: B023
        assert len(calls) == count


def test_what_is_ready_when_time_is_up_has_its_turns(no_gpu, monkeypatch):
    clock = iter([None, timing.TimeUp("the time limit")])

    def check(self):
        if (late := next(clock)) is not None:
            raise late

    monkeypatch.setattr(timing.Clock, "check", check)
    _, result = measured(monkeypatch, {"dualkv": constant(1.0), "flex": constant(1.0)}, limit=5.0)
    assert result["sides"]["dualkv"]["sustained_ms"] == 2.0
    assert result["sides"]["flex"] == {"error": "the time limit"}


def test_what_the_time_limit_leaves_out_is_said(fake_gpu, dualkv_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(timing.Clock, "up", property(lambda self: self.limit is not None))
    monkeypatch.setattr(timing.Clock, "check", lambda self: None)
    words = ["-w", "20:5", "-w", "9:", "-d", "fwd,bwd", "-s", "dualkv", "--seconds", 0.1, "--rounds", 1]
    code, _, err = dualkv_bench(*words, "--time-limit", 7, "--json", tmp_path / "b.json")
    assert code == 0
    assert "the time limit of 7 s left out 3 of 4 results" in err
    report = json.loads((tmp_path / "b.json").read_text())
    assert (report["asked"], len(report["results"])) == (4, 1), "one is always begun"


def test_the_time_limit_is_reported_not_silent(no_gpu, monkeypatch):
    _, result = measured(monkeypatch, {"dualkv": constant(1.0), "flex": constant(1.0)}, limit=-1.0)
    assert all("time limit" in side["error"] for side in result["sides"].values())


def test_without_nvml_the_figures_go_without_energy(no_gpu, monkeypatch):
    meter = timing.Meter()  # this machine has no GPU, or the test's fake sides use none
    meter.absent = "NVMLError: no driver"
    _, result = measured(monkeypatch, {"dualkv": constant(1.0)}, meter=meter)
    assert "joules" not in result["sides"]["dualkv"]
    assert result["sides"]["dualkv"]["sustained_ms"] == 2.0


def test_environment_names_what_was_used(tmp_path, monkeypatch):
    found = run.environment(None, commit="given")
    assert set(found) == {
        "date", "commit", "changed_files", "gpu", "python", "cuda", "versions",
    }  # fmt: skip
    assert torch.__version__.startswith(found["versions"]["torch"])  # which may lack the build, as +cu130
    assert set(found["versions"]) == set(run.PACKAGES)
    monkeypatch.setattr(run, "_git", lambda *arguments: {"rev-parse": "a" * 40, "status": "M x"}.get(arguments[0], ""))
    found = run.environment(None, commit="given")
    assert (found["commit"], found["changed_files"]) == ("a" * 40, ["M x"])
    # Installed inside a checkout of something else, which does not track this code.
    monkeypatch.setattr(run, "_git", lambda *arguments: None if arguments[0] == "ls-files" else "b" * 40)
    found = run.environment(None, commit="given")
    assert (found["commit"], found["changed_files"]) == ("given", None)
    monkeypatch.undo()
    monkeypatch.setattr(run, "ROOT", tmp_path)  # no checkout at all
    found = run.environment(None, commit="given")
    assert (found["commit"], found["changed_files"]) == ("given", None)
    assert run.environment(None)["commit"] == "unknown"


# ---------------------------------------------------------------- command line
@pytest.fixture
def dualkv_bench(monkeypatch, capsys):
    """Runs `dualkv bench ...` in this process: exit code, standard output, standard error."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["dualkv", "bench", *map(str, words)])
        monkeypatch.setenv("COLUMNS", "300")
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, *capsys.readouterr()

    return call


def test_command_line_without_a_gpu(dualkv_bench, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = dualkv_bench("--list")
    assert code == 0
    assert all(name in out for name in NAMED)
    code, out, _ = dualkv_bench("--list", "-w", "5:2x3", "--prompt-len", 7, "--responses", 3, "--response-len", 2)
    assert code == 0
    assert "7:3x2" in out
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(json.dumps(group) for group in ROLLOUTS))
    assert "rollouts.jsonl 2/2" in dualkv_bench("--list", "--rollouts", path, "--budget", 13)[1]
    for words, says in (
        (["-w", "nothing"], "workload 'nothing' is neither a name"),
        (["--head-dim", "84"], "head_dim is 84, expected"),
        (["-s", "cudnn"], "--side is 'cudnn', expected one of dualkv,"),
        (["-d", "fwd,back"], "--direction is 'fwd,back', expected some of fwd,bwd,both"),
        (["--responses", "3"], "give all three"),
        (["--budget", "3"], "go with --rollouts FILE, which is missing"),
        (["--rollouts", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        ([], "measures on a CUDA GPU and PyTorch sees none here"),
    ):
        code, out, err = dualkv_bench(*words)
        assert (code, out) == (1, "")
        assert err.startswith("dualkv: ")
        assert says in err
        assert err.count("\n") == 1


def test_directions_come_in_order():
    assert command.directions("both, fwd") == ["fwd", "both"]
    assert command.sides(["flex", "dualkv", "flex"]) == ["flex", "dualkv"]


@pytest.fixture
def fake_gpu(no_gpu, monkeypatch):
    properties = types.SimpleNamespace(name="H200", multi_processor_count=132, total_memory=2**37)
    for name, value in (
        ("is_available", lambda: True),
        ("current_device", lambda: 0),
        ("get_device_properties", lambda device: properties),
        ("empty_cache", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(run, "Meter", FakeMeter)
    makers = {"dualkv": constant(1.0, ["own", "merge"]), "dualkv-deterministic": constant(1.0), "flex": broken}
    for name, value in (*makers.items(), ("fa4-3-calls", missing)):
        monkeypatch.setitem(sides.SIDES, name, value)


def test_a_run(fake_gpu, dualkv_bench, tmp_path):
    paths = [tmp_path / name for name in ("b.json", "b.md", "b.png")]
    names = ["dualkv", "dualkv-deterministic", "flex", "fa4-3-calls"]
    code, out, err = dualkv_bench(
        "-w", "20:5", "-w", "9:", "--heads", 2, "--kv-heads", 1, "--head-dim", 16, "--seconds", 0.1, "--rounds", 1,
        *(word for name in names for word in ("-s", name)),
        "--json", paths[0], "--markdown", paths[1], "--plot", paths[2],
    )  # fmt: skip
    assert code == 0, err
    assert "flex was not measured 4 times: NotImplementedError: head_dim 16 is not supported" in err
    assert "fa4-3-calls was not measured 4 times: not installed: pip install flash-attn-4" in err
    assert "own 2.000, + merge 2.000" in out
    report = json.loads(paths[0].read_text())
    assert report["schema"] == run.SCHEMA
    assert set(report) == {*run.environment(None), "schema", "settings", "asked", "results"}
    assert report["asked"] == 4
    assert report["gpu"] == {
        "name": "H200", "multiprocessors": 132, "memory_gib": 128.0, "driver": "580.1", "nvml": "present",
        "max_sm_clock_mhz": 1980, "power_limit_w": 700.0,
    }  # fmt: skip
    assert report["settings"] == {"seconds": 0.1, "rounds": 1, "time_limit": None, "sides": names}
    shape = "heads=2 kv_heads=1 head_dim=16"
    assert [(r["workload"]["name"], r["direction"]) for r in report["results"]] == [
        (f"20:5 {shape}", "fwd"), (f"20:5 {shape}", "bwd"), (f"9: {shape}", "fwd"), (f"9: {shape}", "bwd"),
    ]  # fmt: skip
    for result in report["results"]:
        assert set(result) == {"workload", "direction", "flops", "reference", "sides", "took_s"}
        assert set(result["workload"]) == {
            "name", "prompt_lens", "response_lens", "heads", "kv_heads", "head_dim", "dtype", "parent", "tokens",
            "dedup_ratio",
        }  # fmt: skip
        assert set(result["sides"]["dualkv"]) == {
            "compared_with", "parts", "cold_ms", "cold_tflops", "host_us", "rounds", "sustained_ms",
            "sustained_tflops", "joules", "sm_clock_mhz", "power_w", "temperature_c",
        }  # fmt: skip
        assert set(result["sides"]["flex"]) == {"error"}
        assert ("dualkv-deterministic" in result["sides"]) == (result["direction"] == "bwd")
    text = paths[1].read_text()
    assert text.startswith("H200, 1980 MHz at most, held to 700 W; torch ")
    assert f"9: {shape}, backward: H=2 Hk=1 D=16 bf16, 9 tokens" in text
    assert len(re.findall(r"^\| dualkv \| 2.000 \|", text, re.MULTILINE)) == 4
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_json_on_standard_output(fake_gpu, dualkv_bench):
    code, out, err = dualkv_bench("-w", "9:", "--seconds", 0.1, "-s", "dualkv", "-d", "both", "--json", "-")
    assert code == 0
    assert [r["direction"] for r in json.loads(out)["results"]] == ["both"]
    assert "forward and backward" in err


def test_outputs_that_cannot_be_written_fail_before_the_work(fake_gpu, dualkv_bench, tmp_path):
    for option, name in (("--json", "no/a.json"), ("--markdown", "no/a.md"), ("--plot", "no/a.png"), ("--plot", "a.x")):
        code, out, err = dualkv_bench("-w", "9:", option, tmp_path / name)
        assert (code, out) == (1, "")
        assert name in err


def test_the_plot_leaves_out_what_was_not_measured(tmp_path):
    results = [
        {
            "direction": d,
            "workload": {"name": w},
            "sides": {"dualkv": {"sustained_tflops": 600.0}, "flex": {"error": "x"}},
        }
        for d in ("fwd", "both")
        for w in ("a", "b", "c", "d")
    ]
    show.plot({"gpu": {"name": "H200"}, "results": results}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- dualkv -->" in text
    assert "<!-- flex -->" not in text
