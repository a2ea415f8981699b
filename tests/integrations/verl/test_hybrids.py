"""Hybrid models in veRL, packed against veRL's own engine on padded rows (see `PADDED` in scenarios.py)."""

from __future__ import annotations

import pytest

from tests.integrations.verl import test_equivalence
from tests.integrations.verl.scenarios import HYBRIDS
from tests.integrations.verl.test_equivalence import Results

PACKED = [name for name, settings in HYBRIDS.items() if settings["packed"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_scores_and_updates(name: str, results: Results) -> None:
    test_equivalence.test_scores(name, results)
    test_equivalence.test_updates(name, results)
    test_equivalence.test_nothing_fell_back(name, results)
    metrics = results(name)[0]["metrics"]
    assert metrics["dualkv/tokens_packed"] < metrics["dualkv/tokens_replicated"]


def test_prompts_are_packed_once(results: Results) -> None:
    """The one family of the default run is compared in test_equivalence.py, by the name "hybrid"."""
    metrics, of_others = (results(name)[0]["metrics"] for name in ("hybrid", "dynamic-tight"))
    for name in ("tokens_packed", "tokens_replicated", "micro_batches"):
        assert metrics[f"dualkv/{name}"] == of_others[f"dualkv/{name}"]


def test_recurrent_layers_of_other_kinds_are_refused(results: Results) -> None:
    found = results("olmo-hybrid")[0]
    assert found["error"].startswith("ValueError: layers.0.linear_attn (OlmoHybridGatedDeltaNet) of transformers 5.")
    assert found["error"].endswith(" does not call causal_conv1d_fn, by which a layout reaches a recurrent layer")


def test_sequence_parallelism_is_refused(results: Results) -> None:
    for found in results("sp2-hybrid"):
        assert found["error"] == (
            "ValueError: ulysses_sequence_parallel_size is 2 and model.layers.0.linear_attn (Qwen3_5GatedDeltaNet) is a"
            " recurrent layer, which needs the states of the rows of all ranks before it: set"
            " ulysses_sequence_parallel_size=1"
        )


def test_replicated_rows_without_padding_are_refused(results: Results) -> None:
    """veRL would let the recurrent layers run from one sequence into the next."""
    assert results("hybrid-prompt-in-loss")[0]["error"] == (
        "ValueError: a batch cannot be packed (a warning says why), and veRL would run it in rows without padding,"
        " where recurrent layers such as model.layers.0.linear_attn (Qwen3_5GatedDeltaNet) do not see where a sequence"
        " begins: set actor_rollout_ref.model.use_remove_padding=False"
    )
    assert "error" not in results("hybrid-padded-prompt-in-loss")[0]
