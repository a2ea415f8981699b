"""The tables in README and docs are those of the recorded figures."""

from __future__ import annotations

import itertools
import json
import re
import shlex

import pytest

from dualkv.bench import sides
from dualkv.bench.run import SCHEMA
from dualkv.bench.workloads import directions, parse
from tools import filed, tables
from tools.bench import attention, tune
from tools.bench.record import NO_MEMORY, runs_of


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_recorded_figures(path):
    text = path.read_text()
    assert "<!-- table" in text
    assert tables.filled(text) == text, "run `python -m tools.tables`"


def test_figures_in_the_words_of_the_readme_are_those_of_the_tables():
    text = re.sub(r"<!-- table.*?<!-- end -->|```.*?```", "", tables.DOCUMENTS[0].read_text(), flags=re.DOTALL)
    named = set(re.findall(r"\b\d+\.\d+(?=x| s\b| to | times)", text))
    assert len(named) >= 6
    recorded = "".join(tables.TABLES[name]() for name in ("headline", "main-shapes", "trace-verl"))
    assert named <= set(re.findall(r"\d+\.\d+", recorded))


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_figures_say_where_they_come_from(path):
    record = filed.read(path)
    for run in runs_of(record):
        assert {"date", "commit", "changed_files", "gpu", "versions"} <= set(run)
        assert len(run["commit"]) == 40
    assert path.read_text() == filed.laid_out(path), "run `python -m tools.tables`"


def options_of(name):
    """Values by option of a record's command line, which has no switches."""
    words, values = shlex.split(attention.RECORDS[name]), {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        values.setdefault(option, []).append(value)
    return values


@pytest.mark.parametrize("name", attention.RECORDS)
def test_benchmarks_are_those_of_the_commands(name):
    """All of what the command asks for, or the part that was recorded."""
    made, options = filed.read(attention.RESULTS / f"{name}.json"), options_of(name)
    assert made["schema"] == SCHEMA
    assert set(made["settings"]["sides"]) <= set(sides.chosen(options["-s"]))
    asked = [(workload, direction) for workload in options["-w"] for direction in directions(*options["-d"])]
    assert [(r["workload"]["name"], r["direction"]) for r in made["results"]] == asked[: len(made["results"])]
    for result in made["results"]:  # lengths are not recorded: the name gives them
        workload = parse(result["workload"]["name"])
        given = (workload.layout().num_tokens, workload.flops(result["direction"]), workload.heads, workload.head_dim)
        assert given == (
            result["workload"]["tokens"],
            result["flops"],
            *map(result["workload"].get, ("heads", "head_dim")),
        )


def test_cudnn_is_asked_for_wherever_another_peer_is():
    """The records ask cuDNN for every shape and direction that FlashAttention-4 or FlexAttention is asked for, but for
    head dims beyond its own."""
    beside = {True: set(), False: set()}
    for name in attention.RECORDS:
        options = options_of(name)
        pairs = list(itertools.product(options["-w"], directions(*options["-d"])))
        for side in options["-s"]:
            if not side.startswith(("dualkv", "torch")):
                beside[side == "cudnn-intervals"].update(pairs)
    without = {max(parse(workload).head_dims) for workload, _ in beside[False] - beside[True]}
    assert without == {512}


def test_drawn_workloads_slower_than_a_peer_are_named(tmp_path, monkeypatch):
    def result(i, head_dim, ratio):
        workload = {"name": f"random-1-{i}", "head_dim": head_dim, "heads": 8, "kv_heads": 2}
        sides = {tables.OURS: {"sustained_ms": 2.0}, tables.CUDNN: {"error": "not supported"}}
        sides[tables.PEER] = {"sustained_ms": 2.0 * ratio} if ratio else {"error": "not supported"}
        if i == 5:
            sides[tables.CUDNN] = {"sustained_ms": 1.8}
        return {"workload": workload, "direction": "fwd" if i % 2 else "bwd", "sides": sides}

    results = [result(i, 64 if i < 4 else 96, r) for i, r in enumerate([1.1, 1.2, 0.96, 1.5, 0, 2.0])]
    made = {"date": "2026-01-02", "commit": "a" * 40, "settings": {"seconds": 1, "rounds": 2}}
    for name, some in (("forward", results[1::2]), ("backward", results[::2])):
        (tmp_path / f"random-{name}.json").write_text(json.dumps(made | {"results": some}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    text = tables.drawn()
    assert "| 64 | 1.20/1.35/1.50 |  | 0.96/1.03/1.10 |  |" in text
    assert "| 96 | 2.00/2.00/2.00 | 0.90/0.90/0.90 |  |  |" in text
    assert "Slower than a peer: random-1-2 bwd (D=128 H=32 Hk=32 P=3077 N=6 R=62..213) 0.96 over " in text
    assert " FlashAttention-4; random-1-5 fwd (" in text
    assert " 0.90 over cuDNN. Not measured: 1 of 6." in text


def test_tables_of_other_attention(tmp_path, monkeypatch):
    def result(direction, name="w", **ms):
        sides = {name.replace("_", "-"): {"sustained_ms": x, "sustained_tflops": 500.0} for name, x in ms.items()}
        return {"workload": {"name": name}, "direction": direction, "sides": sides}

    results = [result("fwd", dualkv=2.0, cudnn_intervals=3.0), result("bwd", dualkv=4.0)]
    results.append(result("fwd", dualkv=4.0, cudnn_intervals=5.0) | {"workload": {"name": "v"}})
    made = {"date": "2026-01-02", "commit": "a" * 40, "settings": {"seconds": 1, "rounds": 2}}
    (tmp_path / "cudnn.json").write_text(json.dumps(made | {"results": results, "asked": 4}))
    both = result("both", dualkv_flash=2.0, dualkv_flex=3.0)
    ampere = result("both", dualkv_flash=2.0, dualkv_flex=4.0, torch_flash_replicated=5.0)
    other = result("both", "other", dualkv_flash=2.0, dualkv_flex=1.0)
    alone = result("fwd", dualkv_flash=2.0, dualkv_flex=9.0)
    for name, some in (
        ("composition-h200", [both]),
        ("flex-backend", [other]),
        ("composition-ampere", [alone, ampere]),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(made | {"results": some}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "COMPARED", tables.COMPARED[:1])
    (row,) = tables.compared().splitlines()[2:]
    assert row.endswith(" (`cudnn`) | 2 | 1.25 to 1.50 | not measured | 2026-01-02, commit aaaaaaa |")
    assert tables.other_gpus().splitlines()[2:] == ["| w | 1.50 | 2.00 | 2.50 |", "| other | 0.50 |  |  |"]


def test_tables_of_speed_over_peers(tmp_path, monkeypatch):
    """The main shapes have both directions in a row; of a head dim's workloads the lowest figure stands."""

    def result(name, direction, **ms):
        rates = {"sustained_tflops": 100.0}
        sides = {side.replace("_", "-"): {"sustained_ms": x} | rates for side, x in ms.items()}
        return {"workload": {"name": name}, "direction": direction, "sides": sides}

    records = {
        "forward": [result("w", "fwd", dualkv=2.0, fa4_3_calls=3.0)],
        "backward": [result("w", "bwd", dualkv=4.0, fa4_3_calls=5.0, dualkv_deterministic=4.4)],
        "forward-head-dims": [
            result("n32-p8192-r2048-d64-gqa1", "fwd", dualkv=2.0, fa4_3_calls=3.0, cudnn_intervals=2.2),
            result("n32-p8192-r2048-d64-gqa4", "fwd", dualkv=2.0, fa4_3_calls=2.4),
        ],
        "backward-head-dims": [result("n32-p8192-r2048-d64-gqa1", "bwd", dualkv=2.0, cudnn_intervals=1.8)],
        "values": [result("g64-n8-d192v128-h16", "fwd", dualkv=2.0)],
        "d512": [result("g64-n8-d512-h16", "bwd", dualkv=2.0, flex=9.0)],
    }
    for name, results in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": results}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.main_shapes().splitlines()[2:] == ["| w | 100/100 | 1.50 | 100/100 | 1.25 | 1.10 |"]
    assert tables.head_dims().splitlines()[2:] == [
        "| 64 | 100 | 1.20 | 1.10 | 100 |  | 0.90 |",
        "| 192/128 | 100 |  |  |  |  |  |",
        "| 512 |  |  |  | 100 | 4.50 (FlexAttention) |  |",
    ]


def test_what_was_tried_says_what_failed(tmp_path, monkeypatch):
    about = {"date": "2026-01-02", "commit": "a" * 40, "gpu": {"name": "H200"}}
    fuzz = about | {"seed": "5", "failed": 2, "worst_part_of_bound": 1.5, "tried": {"cases": 5000}, "device": "cuda"}
    later = {"commit": "b" * 40, "worst_part_of_bound": 0.5, "date": "2026-01-03"}
    lacked = {"tried": {"cases": 5000, NO_MEMORY: 3}, "gpu": {"name": "NVIDIA H200 NVL"}}
    runs = [fuzz | later, fuzz | lacked, fuzz | {"device": "cpu", "gpu": {"name": "none"}}]
    reports = [
        {"what": "Invalid read. Of 4 bytes.", "count": 3, "false_positive": None},
        {"what": "Invalid write", "count": 9, "false_positive": "a reason"},
    ]
    tools = {"memcheck": {"cases": 40, "reports": reports, "unfinished": ["killed"]}}
    tools["racecheck"] = {"cases": 5, "reports": [], "unfinished": []}
    curve = [{"seconds": s, "allocated": s / 1000, "resident": s / 2} for s in (1000.0, 1690.0)]
    soak = {"seconds": 9999.0, "steps": {"a": 1000, "b": 500}, "problems": ["resident grew"], "curve": curve}
    modules = {"a.py": {"passed": 30, "skipped": 1}, "b.py": {"passed": 4, "failed": 2, "error": 1, "xfail": 1}}
    suite = {"modules": modules, "notes": ["a.py::test_one[2]", "1 skipped in a.py: needs two GPUs"]}
    for name, run in (
        ("fuzz-x", {"runs": runs}),
        ("sanitizer-x", {"tools": tools}),
        ("soak-x", soak),
        ("suite-x", suite),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(run if "runs" in run else about | run))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.trust().splitlines()[2:] == [
        "| random calls | 10,000 on H200, 5,000 on CPU | 6 | largest error 1.50 of its bound;"
        " 3 not tried: out of memory | 2026-01-03, commit bbbbbbb |",
        "| GPU tests | 38 on H200 | 3 | a.py::test_one[2]; 1 skipped | 2026-01-02, commit aaaaaaa |",
        "| compute-sanitizer: memcheck, racecheck | 45 on H200 | 3 | Invalid read; memcheck not finished: killed"
        " | 2026-01-02, commit aaaaaaa |",
        "| steps of long runs | 1,500 on H200 | 1 | resident grew | 2026-01-02, commit aaaaaaa |",
    ]


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


def tuned(gqa: int, of_two: float, alone: float, **of_v: int) -> dict:
    """Make a result of the benchmark as `tune` files it."""
    sides = {"as it stands": {"sustained_ms": of_two, "rounds": []}, "cluster=1": {"sustained_ms": alone}}
    shape = {"name": "with heads", "heads": 32, "kv_heads": 32 // gqa, "head_dim": 128, "head_dim_v": None} | of_v
    return tune.figures({"groups": "100:8x50", "workload": shape, "sides": sides})


def test_tiles_stand_beside_the_entry(tmp_path, monkeypatch):
    lost = tuned(4, 3.0, 3.0)
    lost["sides"]["cluster=1"] = {"error": "OutOfMemoryError"}
    forward, backward = [tuned(1, 2.0, 1.6), lost, tuned(1, 5.0, 4.0, head_dim_v=64)], [tuned(4, 3.0, 6.0)]
    about = {"date": "2026-01-02", "commit": "a" * 40, "settings": {"seconds": 1, "rounds": 2}}
    for name, results in (("fwd", forward), ("bwd", backward)):
        (tmp_path / f"tune-{name}-h200.json").write_text(json.dumps(about | {"results": results}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.tuned().splitlines()[:5] == [
        "| head dim | other tiles: speed at GQA 1/4 |",
        "| --- | --- |",
        "| forward 128 | cluster=1 1.250/- |",
        "| forward 128/64 | cluster=1 1.250/- |",
        "| backward 128 | cluster=1 -/0.500 |",
    ]
