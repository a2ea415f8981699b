"""Packed updates of veRL's Megatron engine against its own, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dualkv.integrations.verl.routes import objection, packed
from tests.integrations.verl.rollouts import nested
from tests.integrations.verl.test_equivalence import SCORES, distance, of_all_ranks, steps
from tests.integrations.verl_megatron.scenarios import FOUR, ONE, TWO

Results = Callable[[str], list[dict[str, Any]]]
ALL = ONE | TWO | FOUR
EXACT = [name for name, s in ALL.items() if not name.startswith("stock") or name == "stock-tp2"]
MATTERS = ("model", "temperature", "settings", "turns", "groups", "router_replay", "counted")


def reference(name: str) -> str:
    """The scenario of veRL's own engine on one rank that computes the same."""
    same = {key: ALL[name][key] for key in MATTERS if key in ALL[name]}
    return next(
        known for known, s in ONE.items() if not s["packed"] and {key: s[key] for key in MATTERS if key in s} == same
    )


@pytest.mark.parametrize("name", EXACT)
def test_update(name: str, results: Results) -> None:
    found, stock = results(name), results(reference(name))
    assert [f.get("error") for f in found] == [None] * len(found)
    for what in SCORES:
        if what in stock[0]:
            got, expected = of_all_ranks(found, what), of_all_ranks(stock, what)
            assert got.shape == expected.shape
            assert (got - expected).abs().max() < 1e-5
    metrics = next(f["metrics"] for f in found if f["metrics"])
    for metric in ("loss", "grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss"):
        assert metrics[metric] == pytest.approx(stock[0]["metrics"][metric], rel=1e-5)
    for f in found:
        assert distance(f["weights"], stock[0]["weights"]) < 1e-4
        assert distance(steps(f), steps(stock[0])) < 1e-2
    assert [f["said"] for f in found] == [[]] * len(found)
    assert ("dualkv/tokens_packed" in metrics) == ALL[name]["packed"]


def test_reference_policy(results: Results) -> None:
    found, stock = results("reference-policy")[0], results("stock")[0]
    assert (found["log_probs"] - stock["log_probs"]).abs().max() < 1e-5
    assert found["infer_metrics"]["dualkv/tokens_packed"] < found["infer_metrics"]["dualkv/tokens_replicated"]


@pytest.mark.parametrize("name", ["saved-packed", "saved-stock"])
def test_a_run_goes_on_with_the_other_engine(name: str, results: Results) -> None:
    """The other engine goes on from the run's checkpoint, with the optimizer's state."""
    found = results(name)[0]
    assert "error" not in found
    assert found["metrics_after"]["loss"] == pytest.approx(found["metrics"]["loss"], rel=1e-5)
    assert distance(found["weights_after"], found["weights"]) < 1e-4


def test_micro_batches_are_equal_on_all_ranks(results: Results) -> None:
    """One micro-batch would hold all rollouts of one rank, and two those of the other."""
    for name in ("dp2", "pp2-dp2"):
        assert next(f["metrics"]["dualkv/micro_batches"] for f in results(name) if f["metrics"]) == 2


def test_routes_that_differ_are_counted(results: Results) -> None:
    """The metric counts rows that rollouts share; the first rollout's are replayed, as `test_update` checks."""
    assert results("r3")[0]["metrics"]["dualkv/routes_differing"] == 0
    assert 0.1 < results("r3-differing")[0]["metrics"]["dualkv/routes_differing"] < 0.9
    assert "dualkv/routes_differing" not in results("moe")[0]["metrics"]


def test_routes_of_shared_rows() -> None:
    """Two rollouts share two rows: at the first one the order of experts differs, at the second one an expert."""
    routes = torch.arange(16, dtype=torch.int16).reshape(8, 1, 2)
    routes[4], routes[5] = routes[0].flip(-1), torch.tensor([2, 9])
    data = {"input_ids": nested([torch.zeros(4), torch.zeros(4)]), "routed_experts": nested([*routes.split(4)])}
    found = packed(data, "R2", np.array([0, 1, 2, 3, 0, 1, 4, 5]), 7)
    assert found.experts[:, 0].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [12, 13], [14, 15], [0, 0]]
    assert found.known.tolist() == [True] * 6 + [False]
    assert (found.shared, found.differing) == (2, 1)
    assert objection(data, "R2", [(1, 2)]) == ""
    assert objection(data, "R2", [(3, 2)]).startswith("routed_experts has (layers, experts) (1, 2), expected (3, 2) as")
    data["routed_experts"] = nested([routes[:3], routes[4:]])
    assert objection(data, "R3", [(1, 2)]) == ""
    assert objection(data, "R2", [(1, 2)]) == "routed_experts of rollout 0 has 3 rows, expected 4, its tokens"


def test_loss_on_prompts_is_verls(results: Results) -> None:
    found, stock = results("prompt-in-loss")[0], results("stock-prompt-in-loss")[0]
    assert found["said"] == ["dualkv: a batch runs with its prompts replicated, because prompt tokens are in the loss"]
    assert found["metrics"]["loss"] == stock["metrics"]["loss"]
    assert all(torch.equal(found["weights"][name], w) for name, w in stock["weights"].items())


REFUSED = {
    "too-long": "budget is 20 tokens, group 1 needs 35 for its prompt and response 2 alone",
    "fused-ragged-temperature": "the rollouts have 16 temperatures, veRL's fused heads on strategy megatron take one:",
    "dropout": "attention_dropout is 0.1, expected 0:",
    "gated-delta-nets": "experimental_attention_variant is 'gated_delta_net', expected none: mbridge builds no gated",
    "interleaved-stages": "actor.megatron.virtual_pipeline_model_parallel_size is 2, model.model_type=dualkv expects",
    "dynamic-context-parallel": "actor.megatron.dynamic_context_parallel is True, model.model_type=dualkv expects",
    "replay-without-experts": "actor.megatron.router_replay.mode is 'R2', expected 'disabled': no layer has experts",
    "replay-without-routes": "router_replay.mode is 'R3' and the batch has no routed_experts, expected those of every",
    "batch-invariant": "fused_kernel_options.dualkv_batch_invariant is True, expected none on strategy megatron: use",
    "keep": "fused_kernel_options.dualkv_keep is 'attention', strategy megatron has settings of its own:",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, results: Results) -> None:
    """The error is one sentence, on every rank."""
    assert all(f["error"].startswith(f"ValueError: {REFUSED[name]}") for f in results(name))


def test_error_of_one_rank_is_raised_on_all(results: Results) -> None:
    assert [f["error"] for f in results("one-rank-too-long")] == [
        "ValueError: another data-parallel rank found no micro-batches for its rollouts, see its error",
        "ValueError: budget is 33 tokens, group 0 needs 35 for its prompt and response 0 alone",
    ]
