"""Benchmarks in small, on the CPU: their ways compute the same, and figures have what pages show of them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import typer

tf = pytest.importorskip("transformers")

from dualkv.integrations.recurrent import rules  # noqa: E402
from dualkv.models import CONFIGS  # noqa: E402
from tests.integrations.tiny import SIZES  # noqa: E402
from tools.bench import fp8, harness, hybrid, images, indexers, invariance, prompt_share, routes, walk  # noqa: E402
from tools.bench.step import Sizes  # noqa: E402

CPU = torch.device("cpu")


# ---------------------------------------------------------------- the prompt's share
SHARES = Sizes("tiny", layers=1, responses=4, prompt_len=48, response_len=16, micro_batch=2, repeats=1, chunk_size=10,
               dtype="float32")  # fmt: skip


def test_both_ways_compute_the_same_group_in_turns():
    written = list(prompt_share.measure(SHARES, [0.25, 0.7], 2, 0.0, "math", CPU))
    assert [len(figures["points"]) for figures in written] == [1, 2, 2, 2]
    few, many = written[-1]["points"]
    assert [(p["prompt_len"], p["response_len"]) for p in (few, many)] == [(16, 48), (48, 16)]
    assert few["rows"] == {"replicated": 4 * 64, "packed": 16 + 4 * 48}
    assert many["rows"] == {"replicated": 4 * 64, "packed": 48 + 4 * 16}
    assert 1 < few["flop_ratio"] < many["flop_ratio"]
    for figures in (few, many):
        assert figures["logp_rms"] < 1e-5
        assert [len(times) for times in figures["seconds"].values()] == [2, 2]
        assert figures["speed_up"] > 0


def test_a_turn_lasts_as_long_as_it_is_told(monkeypatch):
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    assert harness.turn(lambda: None, 2.5) == [1, 1, 1]
    assert harness.turn(lambda: None, 0.0) == [1]


def test_a_share_without_a_prompt_is_refused():
    with pytest.raises(ValueError, match=r"got a share of 0\.01 of 64 tokens"):
        prompt_share.point(SHARES, 0.01)


# ---------------------------------------------------------------- hybrids, walks
HYBRID = Sizes("tiny-hybrid", layers=4, responses=3, prompt_len=8, response_len=5, micro_batch=2, repeats=1,
              chunk_size=10, dtype="float32")  # fmt: skip
GROUPS = hybrid.Groups(groups=1, responses=2, prompt_len=8, response_len=4)


def test_parts():
    """The test takes 10 s: the functions of PyTorch loop over the rows of a chunk."""
    parts = ["mixer", "shares", "step", "distance"]
    before = rules.convolve, rules.scan
    *_, figures = hybrid.measure(HYBRID, GROUPS, GROUPS, parts, CPU)
    assert not [part for part in parts if "error" in figures[part]]
    assert figures["mixer"]["rows"] == 8 + 3 * 5
    assert len(figures["mixer"]["packed"]) == len(figures["mixer"]["one_call"]) == 5
    for ranks in hybrid.DEGREES:
        share = figures["shares"][f"of {ranks}"]
        assert len(share["seconds"]) == len(figures["shares"]["whole"]) == 5
        assert share["share_over_whole_by_ranks"] > 0
    assert [figures["step"][way]["rows"] for way in ("packed", "replicated")] == [23, 39]
    assert figures["step"]["times_as_fast"] > 0
    for distances in (figures["distance"][way] for way in ("packed", "replicated")):
        assert max(distances.values()) < 1e-5
    assert (rules.convolve, rules.scan) == before


@pytest.mark.usefixtures("one_thread")
def test_walks_compute_the_same(monkeypatch):
    monkeypatch.setitem(CONFIGS, "smallest", SIZES | {"model_type": "qwen3", "num_hidden_layers": 6})
    sizes = walk.Sizes("smallest", 2, 1, 16, "float32")
    jobs = ["60x6x8@76:0.9"]
    for figures in walk.measure(sizes, jobs, list(walk.PARTS), CPU):
        made = figures["jobs"]
    assert list(made) == jobs
    for of_job in made.values():
        for part, ways in of_job["parts"].items():
            assert ways["walked"]["memory"] < of_job["limit"]
            assert ways["walked"]["bytes"] < 1.05 * ways["walked"]["planned_bytes"] or part == "update"
            assert ways["walked"]["sum"] == pytest.approx(ways["cut"]["sum"], rel=1e-4)


@pytest.mark.parametrize("text", ["60x6x8", "60x6@9:1", "nothing@9:1"])
def test_other_jobs_of_walks_are_refused(text):
    with pytest.raises(typer.BadParameter, match=text.partition("@")[0]):
        walk.Job.parse(text, 50)


def test_jobs_of_walks_by_default():
    job = walk.Job.parse(walk.JOBS[3], 1000)
    assert job.rows == 13708 // 3
    assert walk.Job.parse("9x2x3@whole:0.6", 50)[3:] == (15, 0.6)


# ---------------------------------------------------------------- images, indexers, routes, FP8, invariance
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("turns", [0, 2])
def test_both_ways_compute_the_same_of_images(turns: int) -> None:
    sizes = images.Sizes(layers=1, responses=3, response_len=5, images=2, side=2, text=7, micro_batch=2, repeats=1,
                         tiny=True, turns=turns, walk=6 * turns)  # fmt: skip
    figures = images.measure(sizes, CPU)
    assert figures["logp_rms_apart"] < 1e-5
    assert 1 < figures["flop_ratio"] < 3
    walked = {f"{part}, walked" for part in ("visual", "language_model", "lm_head") if turns}
    assert figures["gradients_apart"].keys() == {"visual", "language_model", "lm_head"} | walked
    assert max(figures["gradients_apart"].values()) < 1e-5


def test_a_layer_with_an_indexer() -> None:
    from tests.integrations.transformers.test_indexers import INDEXER
    from tests.integrations.transformers.test_latent import EXPERTS, LATENT

    config = tf.DeepseekV32Config(**SIZES | LATENT | EXPERTS | INDEXER | {"num_hidden_layers": 1})
    assert indexers.published(4, 2048).index_head_dim == 128
    model = indexers.make_layer(config, CPU, torch.float32)
    found = indexers.measure(model, prompt_len=20, response_len=5, responses=4, together=3, repeats=1)
    assert found["rows"] == {"packed": 40, "apart": 100}
    assert found["distance"]["largest"] < 1e-5
    assert found["flex"] == "torch.float32 inputs"
    assert {found[name].keys() >= {"packed", "apart"} for name in ("step", "forward", "selection")} == {True}


def test_routes_agree_as_far_as_rounding_lets_them() -> None:
    found = routes.measure(routes.Sizes(layers=2, hidden=64, experts=8, chosen=2, prompt=80, rollouts=2), torch.float32)
    assert found["choices"] >= found["rows"] >= found["prefix"] > 0.9


@pytest.mark.filterwarnings("ignore:dualkv. Qwen3Model has .* layers of the class Float8Linear")
@pytest.mark.parametrize("recipe", [None, *fp8.RECIPES])
def test_packed_rows_are_within_the_noise_of_fp8(recipe):
    pytest.importorskip("torchao", reason="torchao, which emulates FP8 on CPUs, is not installed")
    sizes = fp8.Sizes(layers=2, prompts=(24, 9), responses=(8, 5))
    found = fp8.measure(sizes, torch.float32, recipe)
    if recipe is None:
        assert max(value for distances in found.values() for value in distances.values()) < 1e-5
        return
    log_probs, gradients = found["log_probs"], found["gradients"]
    assert log_probs["noise"] > 1e-3
    assert gradients["noise"] > 1e-2
    if recipe == "tensorwise":  # what a micro-batch holds matters, packed or not
        assert 1e-4 < log_probs["packed"] < 2 * log_probs["noise"]
        assert log_probs["micro_batches"] > 1e-4
        assert gradients["packed"] < 2 * gradients["noise"]
    else:
        assert log_probs["packed"] < 1e-5
        assert 1e-4 < gradients["packed"] < gradients["noise"] / 2
    assert gradients["noise_packed"] < 1.5 * gradients["noise"]


@pytest.mark.parametrize("rows", [0, 1, 256])
def test_rows_that_differ_fail_the_command(monkeypatch, rows):
    """The exit code is not the number of rows, of which a process reports the last eight bits."""
    found = {"differ": {"batch_invariant": {"hidden_states": 0, "logp": rows}}}
    monkeypatch.setattr(invariance, "updated", lambda *_: found)
    with pytest.raises(SystemExit) as caught:
        invariance.update(device="cpu")
    assert caught.value.code == bool(rows)
    assert isinstance(caught.value.code, bool)
