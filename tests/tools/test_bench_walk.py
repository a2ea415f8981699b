"""The benchmark of walks (tools/bench/walk), in small, on the CPU."""

from __future__ import annotations

import pytest
import torch
import typer

pytest.importorskip("transformers")

from dualkv.models import CONFIGS
from tests.integrations.tiny import SIZES
from tools.bench import walk as bench

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def test_ways_compute_the_same(monkeypatch):
    monkeypatch.setitem(CONFIGS, "smallest", SIZES | {"model_type": "qwen3", "num_hidden_layers": 6})
    sizes = bench.Sizes("smallest", 2, 1, 16, "float32")
    jobs = ["60x6x8@76:0.9"]
    for figures in bench.measure(sizes, jobs, list(bench.PARTS), CPU):
        made = figures["jobs"]
    assert list(made) == jobs
    for of_job in made.values():
        for part, ways in of_job["parts"].items():
            assert ways["walked"]["memory"] < of_job["limit"]
            assert ways["walked"]["bytes"] < 1.05 * ways["walked"]["planned_bytes"] or part == "update"
            assert ways["walked"]["sum"] == pytest.approx(ways["cut"]["sum"], rel=1e-4)


@pytest.mark.parametrize("text", ["60x6x8", "60x6@9:1", "nothing@9:1"])
def test_other_jobs_are_refused(text):
    with pytest.raises(typer.BadParameter, match=text.partition("@")[0]):
        bench.Job.parse(text, 50)


def test_jobs_by_default():
    job = bench.Job.parse(bench.JOBS[3], 1000)
    assert job.rows == 13708 // 3
    assert bench.Job.parse("9x2x3@whole:0.6", 50)[3:] == (15, 0.6)
