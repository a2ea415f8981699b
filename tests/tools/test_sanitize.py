"""tools.sanitize without a GPU: its cases, what it reads in recorded output, and its verdicts."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from codegen.tiles import BACKWARD_TILES, FORWARD_TILES, HEAD_DIMS, backward_tile, forward_tile
from dualkv.ops import hopper
from tools import filed
from tools.bench import record
from tools.sanitize import __main__ as sanitize
from tools.sanitize import cases, controls, known, reading, show, target

DATA = Path(__file__).parents[1] / "files" / "sanitize"


# ---------------------------------------------------------------- cases
def test_every_native_head_dim_is_there_and_a_padded_one():
    assert set(cases.HEAD_DIMS) - set(HEAD_DIMS) == {cases.PADDED}


def test_edges_are_those_of_the_tiles():
    """A length of every tile size in use, of one less and of one more, as a prompt and as a response."""
    layout = cases.LAYOUTS["edges"]
    sizes = {tile.tile_n for tile in FORWARD_TILES.values()}
    sizes |= {size for tile in BACKWARD_TILES.values() for size in (tile.tile_m, tile.tile_n)}
    wanted = {size + d for size in sizes for d in (-1, 0, 1)} | {0, 1}
    assert wanted <= set(layout.prompt_lens)
    assert wanted <= {length for group in layout.response_lens for length in group}


def test_every_tile_of_a_native_head_dim_runs():
    """Tiles without clusters run too, and with windows also the tiles beyond the short ones."""
    for head_dim in HEAD_DIMS:
        tried = [case.specs() for case in cases.cases(head_dim, "memcheck")]
        forward, backward = {specs[0].tile for specs in tried}, {specs[2].tile for specs in tried}
        assert {forward_tile(head_dim, ["window"], short) for short in (False, True)} <= forward
        assert {forward_tile(head_dim, few_keys=few) for few in (False, True)} <= forward
        assert {
            backward_tile(head_dim, fixed, few_keys=few) for fixed in (False, True) for few in (False, True)
        } <= backward


def test_every_kernel_of_a_gradient_of_lse_runs():
    for head_dim in cases.HEAD_DIMS:
        first = {case.specs()[1] for case in cases.cases(head_dim, "memcheck")}
        assert {spec.features for spec in first} == {(), ("sinks",), ("dlse",), ("sinks", "dlse")}


@pytest.mark.parametrize("fill", [False, True])
def test_cases_are_calls_that_the_library_takes(fill, monkeypatch, one_thread):
    monkeypatch.setattr(target, "DEVICE", "cpu")
    tried = [case for case in cases.cases(64, "memcheck") if case.layout == "tree" or case.lse_grad]
    assert {name for case in tried for name in case.features} == {"window", "sinks"}
    for case in tried:
        target.run_case(case, fill)


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_windows_are_shorter_than_what_they_are_tried_on(tool):
    """A window that hides nothing runs the kernels without one."""
    for case in (case for head_dim in cases.HEAD_DIMS for case in cases.cases(head_dim, tool)):
        longest = cases.LAYOUTS[case.layout]._segments.longest_path
        assert "window" not in case.features or case.window < longest, case.name


def test_a_case_of_few_keys_runs_the_kernels_that_it_names(monkeypatch):
    ran = {}

    def least():
        return [getattr(hopper, name) for name in target.FEW_KEYS]

    before = least()
    monkeypatch.setattr(target, "run_case", lambda case, _: ran.update({case.name: least()}))
    monkeypatch.setattr(target.torch.cuda, "init", lambda: None)
    monkeypatch.setattr(target.torch.cuda, "synchronize", lambda: None)
    target.main("memcheck", "64")
    assert ran == {case.name: [0] * 3 if case.few_keys else before for case in cases.cases(64, "memcheck")}
    assert len(ran) == len(list(cases.cases(64, "memcheck"))), "no two cases of one name"


# ---------------------------------------------------------------- reading
def test_races_of_an_h200():
    found = reading.parse((DATA / "racecheck.log").read_text())
    assert found.begun == found.ended
    ((report, count),) = found.reports.items()
    assert report.what == "Error: Race reported between Write access"
    assert count == 1536
    assert {reading.short(symbol) for symbol, _ in report.places} == {"bwd_narrow.NarrowBackward"}
    assert [offset for _, offset in report.places] == [0xD10, 0x17E0, 0x22D0, 0x2320]


@pytest.mark.parametrize(("kept", "whole"), [(1536, False), (1537, True)])
def test_a_racecheck_whose_reports_are_full_has_not_finished(monkeypatch, kept, whole):
    """The tool goes on, and says so in one process of two."""
    monkeypatch.setattr(sanitize, "RACES", kept)
    said = sanitize.read("racecheck", "64", (DATA / "racecheck.log").read_text(), 1.0)["unfinished"]
    assert (not said) is whole
    assert whole or said.startswith("1,536 reports")


# ---------------------------------------------------------------- verdicts
PROGRAM = """#!{python}
import sys
tool, what = sys.argv[-2:]
print("========= COMPUTE-SANITIZER")
for name in {cases!r} if what != "controls" else {controls!r}[tool]:
    print("@@ case: " + name, flush=True)
    if (tool, name) in {bad!r}:
        print("========= Invalid __global__ write of size 4 bytes\\n=========     at kernel+0x20")
    if (tool, name) == {dies!r}:
        sys.exit(7)
    print("@@ end")
print("========= ERROR SUMMARY: 0 errors")
"""
NAMES = [case.name for case in cases.cases(64, "memcheck")]
PLANTED = {(tool, name) for tool, (name, _) in controls.PLANTED.items()}
ALL_CONTROLS = {tool: [*controls.CORRECT, *controls.RACY, name] for tool, (name, _) in controls.PLANTED.items()}


def run(monkeypatch, tmp_path, bad=frozenset(), dies=None):
    program = tmp_path / "compute-sanitizer"
    form = {"python": sys.executable, "cases": NAMES, "controls": ALL_CONTROLS, "bad": set(bad), "dies": dies}
    program.write_text(PROGRAM.format(**form))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitize, "find_program", lambda *_, **__: str(program))
    monkeypatch.setattr(sanitize.store, "fill", lambda *_: [])
    monkeypatch.setattr(sanitize.store, "where", lambda spec: None)
    monkeypatch.setattr(sanitize.store, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(sanitize, "_sass", lambda spec: ("other", {}))
    monkeypatch.setattr(record, "Meter", lambda: None)
    app = typer.Typer()
    app.command()(sanitize.main)
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["--head-dim", "64", "--json", str(out)])
    return done, filed.read(out)["tools"]


def test_clean(monkeypatch, tmp_path):
    done, tools = run(monkeypatch, tmp_path, PLANTED)
    assert done.exit_code == 0, done.output
    for tool in sanitize.TOOLS:
        assert tools[tool]["cases"] == len(NAMES)
        assert tools[tool]["reports"] == tools[tool]["unfinished"] == []
        assert tools[tool]["controls"][controls.PLANTED[tool][0]] == 1


def test_a_tool_that_sees_nothing_fails(monkeypatch, tmp_path):
    done, _ = run(monkeypatch, tmp_path, PLANTED - {("synccheck", "foreign_barrier")})
    assert done.exit_code == 1


def test_an_error_is_filed_and_fails(monkeypatch, tmp_path):
    done, tools = run(monkeypatch, tmp_path, {*PLANTED, ("memcheck", NAMES[3])})
    assert done.exit_code == 1
    (report,) = tools["memcheck"]["reports"]
    assert (report["cases"], report["unpaced"]) == (1, "deterministic" in NAMES[3])
    assert report["false_positive"] is None
    assert "AN ERROR" in done.output
    assert tools["racecheck"]["reports"] == []


def test_barriers_have_their_number():
    assert sanitize._kind("@P0 BAR.SYNC.DEFER_BLOCKING 0x1, 0x100") == "BAR.SYNC.DEFER_BLOCKING 0x1"
    assert sanitize._kind("@!P0 LDS.128 R20, [R17+0x33000]") == "LDS.128"


def test_a_process_that_dies_fails(monkeypatch, tmp_path):
    done, tools = run(monkeypatch, tmp_path, PLANTED, dies=("racecheck", NAMES[2]))
    assert done.exit_code == 1
    assert tools["racecheck"]["cases"] == 2
    assert "64: exit code 7" in tools["racecheck"]["unfinished"][0]


MET = {
    "what": "Barrier error detected. Divergent thread(s) in block.", "kernel": "fwd_paths.PathForwardKernel",
    "instructions": ["BAR.SYNC.DEFER_BLOCKING"],
}  # fmt: skip
MET_IN_BACKWARD = MET | {"kernel": "bwd_narrow.NarrowBackward", "instructions": ["BAR.SYNC.DEFER_BLOCKING 0x0"]}
FULL = {"what": "418048 errors were skipped (error buffer overflow).", "kernel": "", "instructions": []}
HANDED = {"what": "Race", "kernel": "bwd_wide.WideBackward", "instructions": ["STS.128", "LDS.128"]}
WORDS = {"what": "Race", "kernel": "bwd.FeaturedNarrow", "instructions": ["STS.128", "LDS"]}
POLLED = {
    "what": "Race", "kernel": "bwd_narrow.NarrowBackward", "instructions": ["STS", "LDS"], "unpaced": False,
}  # fmt: skip
RACE = {"what": "Error: Race reported between Write access", "kernel": "k", "instructions": ["UBLKCP.S.G", "LDS.128"]}


@pytest.mark.parametrize(
    ("tool", "report", "shown", "says"),
    [
        ("racecheck", RACE, {"bulk_ring": 3}, "bulk copy"),
        ("racecheck", RACE, {"bulk_ring": 0, "bulk_ring_no_syncwarp": 2}, "bulk copy, other lanes"),
        ("racecheck", RACE, {"bulk_ring": 0, "bulk_ring_no_syncwarp": 0}, None),
        ("racecheck", RACE | {"instructions": ["STS.128", "LDS.128"]}, {"bulk_ring": 3}, None),
        ("racecheck", HANDED, {"exchange": 3}, "handed over"),
        ("racecheck", HANDED | {"kernel": "bwd_narrow.NarrowBackward"}, {"exchange": 3}, None),
        ("racecheck", HANDED | {"kernel": "fwd_paths.PathForwardKernel"}, {"exchange": 3}, "handed over"),
        ("racecheck", HANDED | {"kernel": "bwd.FeaturedWide"}, {"exchange": 3}, "handed over"),
        ("racecheck", HANDED | {"kernel": "bwd.FeaturedNarrow"}, {"exchange": 3}, None),
        ("racecheck", WORDS, {"exchange": 3}, "handed over"),
        ("racecheck", WORDS | {"kernel": "bwd_narrow.NarrowBackward"}, {"exchange": 3}, None),
        ("racecheck", POLLED, {"polled": 1}, "polled"),
        ("racecheck", POLLED | {"kernel": "bwd.FeaturedNarrow"}, {"polled": 1}, "polled"),
        ("racecheck", POLLED | {"instructions": ["STS", "LDS.128"]}, {"polled": 1}, None),
        ("racecheck", POLLED | {"unpaced": True}, {"polled": 1}, None),
        ("memcheck", RACE, {"bulk_ring": 3}, None),
        ("synccheck", MET, {"meeting": 32}, "meeting"),
        ("synccheck", MET, {"meeting": 0}, None),
        ("synccheck", MET_IN_BACKWARD, {"meeting": 32}, "meeting"),
        ("synccheck", MET_IN_BACKWARD | {"instructions": ["BAR.SYNC.DEFER_BLOCKING 0x1"]}, {"meeting": 32}, None),
        ("synccheck", MET | {"what": "Barrier error detected. Invalid arguments."}, {"meeting": 32}, None),
        ("synccheck", FULL, {"meeting": 32}, "meeting, overflow"),
    ],
)  # fmt: skip
def test_a_false_positive_needs_its_control(tool, report, shown, says):
    assert known.why(tool, report, shown) == says
    assert says is None or says in known.REASONS


def test_the_page_names_errors_and_counts_false_positives_by_reason():
    def report(count, reason):
        return {"what": "Race.", "kernel": "fwd.K", "instructions": ["STS"], "cases": 2, "count": count} | {
            "false_positive": reason
        }

    tools = {
        "racecheck": {"reports": [report(3, "polled"), report(4, "polled"), report(5, None)], "unfinished": ["killed"]},
        "synccheck": {"reports": [report(6, "meeting")], "unfinished": []},
    }
    assert show.errors(tools) == [
        "racecheck: AN ERROR: 5 x Race in fwd.K (STS), 2 cases",
        "racecheck: not finished: killed",
    ]
    assert show.reasons(tools) == {"polled": 7, "meeting": 6}
