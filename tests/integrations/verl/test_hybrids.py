"""Hybrid models in veRL, packed against veRL's own engine on padded rows (see `PADDED` in scenarios.py)."""

from __future__ import annotations

from importlib.metadata import requires
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from tests.integrations.verl import test_equivalence
from tests.integrations.verl.rollouts import MODELS
from tests.integrations.verl.scenarios import HYBRIDS, OVER_FOUR, OVER_TWO
from tests.integrations.verl.test_equivalence import Results

PACKED = [name for name, settings in (HYBRIDS | OVER_TWO | OVER_FOUR).items() if settings["packed"]]


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


def test_ranks_that_cannot_share_heads_are_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(engine: Any, _: Any, engine_config: Any) -> None:
        engine.engine_config = engine_config

    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", make)
    of_verl = SimpleNamespace(hf_config=MODELS["qwen3_5_text"][1], fused_kernel_options=None, use_fused_kernels=False)

    def made(ranks: int) -> None:
        sizes = SimpleNamespace(ulysses_sequence_parallel_size=ranks)
        EngineRegistry.new("dualkv", "fsdp2", model_config=of_verl, engine_config=sizes)

    made(2)
    with pytest.raises(ValueError, match="heads") as error:
        made(3)
    assert str(error.value) == (
        "recurrent layer model.layers.0.linear_attn (Qwen3_5GatedDeltaNet) has 4 heads, expected a multiple of the 3"
        " sequence-parallel ranks"
    )


def test_earlier_recurrent_layers_are_still_needed() -> None:
    """Delete dualkv/integrations/transformers/earlier.py, and what is for it alone, once this fails."""
    [asked] = [r for r in map(Requirement, requires("verl") or []) if r.name == "transformers" and r.marker is None]
    newer = [*(f"5.{minor}" for minor in range(17, 100)), "6.0"]
    assert not [*asked.specifier.filter(newer)], "veRL takes transformers whose recurrent layers need no stand-ins"


def test_replicated_rows_without_padding_are_refused(results: Results) -> None:
    """veRL would let the recurrent layers run from one sequence into the next."""
    assert results("hybrid-prompt-in-loss")[0]["error"] == (
        "ValueError: a batch cannot be packed (a warning says why), and veRL would run it in rows without padding,"
        " where recurrent layers such as model.layers.0.linear_attn (Qwen3_5GatedDeltaNet) do not see where a sequence"
        " begins: set actor_rollout_ref.model.use_remove_padding=False"
    )
    assert "error" not in results("hybrid-padded-prompt-in-loss")[0]
