"""The benchmark of updates on traces (tools/bench/trees), in small, on the CPU."""

from __future__ import annotations

import pytest
import torch
import typer

pytest.importorskip("transformers")

from dualkv.bench import trees
from dualkv.models import CONFIGS
from tests.integrations.tiny import SIZES
from tools import filed, tables
from tools.bench import trees as bench
from tools.bench.record import Record
from tools.bench.step import Update, make_model, step

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NAME = "trace-tau2-1-n3-t3-x0.01"


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setitem(CONFIGS, "smallest", SIZES | {"model_type": "qwen3", "num_hidden_layers": 1})
    return Update("smallest", 1, 0, 0, 0, 0, repeats=1, chunk_size=10, dtype="float32", optimizer=True)


def test_ways_compute_the_same(sizes):
    job = bench.Job.parse(f"{NAME}@100", 7, ["replicated", "nothing", *bench.WAYS[1:]])
    *_, figures = bench.measure(sizes, [job], 1e9, CPU)
    made = figures["traces"][f"{NAME}@100"]
    assert "'nothing'" in made["ways"].pop("nothing")["error"]
    for way in bench.WAYS:
        assert made["ways"][way]["logp_rms_from_first_way"] < 1e-5
        assert min(made["ways"][way]["planning"]) > 0
    rows = {way: made["ways"][way]["rows"] for way in bench.WAYS}
    assert rows["replicated"] == made["tokens"]
    assert made["packed_tokens"] < rows["packed"] == rows["gathered"] < made["tokens"]
    assert made["ways"]["replicated"]["done_flops"] == pytest.approx(made["flops"][0])
    assert made["ways"]["packed"]["done_flops"] >= made["flops"][1]
    assert made["ways"]["packed"]["micro_batches"] > 1, "cut, which repeats tokens"
    assert made["of_flop_ratio"] == pytest.approx(made["speed_up"] / made["flop_ratio"])
    assert f"share {made['share_ratio']:.2f}" in bench.line(NAME, made)


def test_flops_are_those_of_the_weights(sizes):
    model = make_model(sizes, CPU)
    layers = sum(w.numel() for w in model.model.layers.parameters() if w.dim() > 1)
    head = model.lm_head.weight.numel()
    assert trees.flops("smallest", 7, 0, 3) == 6 * (layers * 7 + head * 3)
    config = model.config
    assert trees.flops("smallest", 0, 5, 0) == 12 * 5 * config.num_attention_heads * config.head_dim


@pytest.mark.parametrize("text", ["nothing", "trace-tau2-0@", "trace-tau2-0@many", "trace-tau2-0=packed"])
def test_jobs(text):
    if text in ("nothing", "trace-tau2-0@many"):
        with pytest.raises(typer.BadParameter, match=text.rpartition("@")[2]):
            bench.Job.parse(text, 5, ["gathered"])
    else:
        assert bench.Job.parse(text, 5, ["gathered"]) == ("trace-tau2-0", 5, ["packed" if "=" in text else "gathered"])


def test_jobs_by_default():
    jobs = [bench.Job.parse(text, 65536, list(bench.WAYS)) for text in bench.JOBS]
    assert {way for job in jobs for way in job.ways} == set(bench.WAYS)
    for job in jobs:  # every sequence fits into a micro-batch
        sequences = bench.traces.parse(job.name).sequences
        assert max(sum(piece.tokens for piece in sequence) for sequence in sequences) <= job.budget


def test_record_cut_short(sizes, tmp_path):
    """A run that ends after any of its ways leaves a record of the ways before."""
    jobs = [bench.Job.parse(text, 100, []) for text in (f"{NAME}=packed,replicated", f"{NAME}@10=packed")]
    record = Record(tmp_path / "updates.json", gpu=False)
    found = []
    for figures in bench.measure(sizes, jobs, 1e9, CPU):
        record.write({"model": "smallest", "layers": 1, **figures})
        before = record.path.read_text()
        record.path.write_text(filed.laid_out(record.path))
        assert record.path.read_text() == before
        traces = filed.read(record.path)["traces"].values()
        found.append(
            [({way: "median" in run for way, run in made["ways"].items()}, "speed_up" in made) for made in traces]
        )
    first = ({"packed": True}, False)
    both = ({"packed": True, "replicated": True}, True)
    assert found == [[first], [both], [both, ({"packed": False}, False)]], "the smaller budget holds no sequence"


def test_attention_record_cut_short(tmp_path, monkeypatch):
    """Results that are missing, sides that the time limit left out, no record of FlexAttention."""

    def result(name, direction, **sides):
        return {"workload": {"name": name}, "direction": direction, "sides": sides}

    def measured(ms):
        return {"sustained_ms": ms, "sustained_tflops": 1400 / ms, "parts": {}}

    left_out = {"error": "the time limit was up"}
    results = [
        result("trace-branched-0", "fwd", dualkv=measured(2.0), **{"cudnn-intervals": measured(2.5)}, flex=left_out),
        result("trace-branched-0", "bwd", dualkv=left_out, **{"cudnn-intervals": left_out}),
        result("n32-p8192-r2048", "fwd", dualkv=measured(2.1)),
    ]
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    path = tmp_path / "traces.json"
    lines = []
    for count in range(len(results) + 1):
        path.write_text(filed.text({"asked": 12, "results": results[:count]}))
        lines.append(tables.filled("<!-- table trace-attention -->\n<!-- end -->").splitlines()[3:-1])
    assert list(map(len, lines)) == [0, 1, 1, 2]
    assert lines[2] == ["| trace-branched-0 | 700,  | 1.25x,  |  |  | failed,  |"], "no backward yet"
    assert lines[3][1] == "| n32-p8192-r2048 | 667,  |  |  |  |  |"


def test_tables_of_verl_and_trl_have_what_was_recorded(tmp_path, monkeypatch):
    """The tables are empty before a record, and show what a record has that was cut."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)

    def lines(name):
        return tables.filled(f"<!-- table {name} -->\n<!-- end -->").splitlines()[1:-1]

    assert lines("trace-verl") == lines("trace-trl") == ["Not recorded yet."]
    about = {"date": "2026-11-28T09:00:00+00:00", "commit": "0123456789", "changed_files": ["a.py"]}
    rows = [
        {"settings": {"engine": engine, "trace": trace}, "peak_gib": [50.0], "seconds": {"median": seconds}}
        | {"metrics": {"dualkv/dedup_ratio": 6.0}}
        for engine, trace, seconds in (("dualkv", "trace-tau2-1", 2.0), ("dualkv", "trace-search-0", 1.0))
    ]
    rows.append(rows[0] | {"settings": {"engine": "verl", "trace": "trace-tau2-1"}, "seconds": {"median": 7.0}})
    rows.append({"settings": {"engine": "verl", "trace": "trace-search-0"}, "error": "out of memory"})
    (tmp_path / "verl-h200-traces.json").write_text(filed.text(about | {"rows": rows}))
    assert lines("trace-verl")[-1] == "Recorded 2026-11-28 at commit 0123456 and 1 changed files."
    assert lines("trace-verl")[2:-2] == [
        "| trace-tau2-1 | 6.00 | 7.00, 50 | 2.00, 50 | 3.50x |",
        "| trace-search-0 | 6.00 |  | 1.00, 50 |  |",
    ]
    way = {"seconds": {"median": 2.0}, "peak_gib": 20.0, "gradients_from_fp32": 0.02}
    ways = {"padded": way, "tree": {"error": "out of memory"}}
    record = about | {"traces": {"trace-grpo-0": {"share_ratio": 1.1, "ways": ways}}}
    (tmp_path / "trl-h200-traces.json").write_text(filed.text(record))
    assert lines("trace-trl")[2:-2] == ["| trace-grpo-0 | 1.10 | 2.00, 20 | failed |  |"]


def test_gradients_of_ways_add_up_alike(sizes):
    """Weights differ in every token, so that a token in the wrong place shows."""
    trace = bench.traces.parse(NAME)
    rollouts = bench.Rollouts.of_trace(trace, SIZES["vocab_size"])
    weights = torch.randn(sum(int(m.sum()) for m in rollouts.masks), generator=torch.Generator().manual_seed(3))
    found = []
    for way in bench.WAYS:
        model = make_model(sizes, CPU)
        bench.prepared(model, way)
        step(model, bench.batches(way, rollouts, 150, CPU), weights, 16)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=1e-4 * float(found[0].abs().max()))
