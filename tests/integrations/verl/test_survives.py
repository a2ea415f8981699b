"""Tests of what must not stop a training run or be silently wrong, and of what falls back to veRL's own computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from verl.utils import tensordict_utils as tu

from dualkv.integrations.verl.data import Images, not_packable, pack, read
from tests.integrations.verl.rollouts import IMAGE, make_rollouts
from tests.integrations.verl.test_equivalence import distance, of_all_ranks

Results = Callable[[str], list[dict[str, Any]]]


def test_rollout_longer_than_the_budget(results: Results) -> None:
    assert results("too-long")[0]["error"] == (
        "ValueError: budget is 20 tokens, group 1 needs 35 for its prompt and response 2 alone"
    )


def test_trees_are_refused_in_a_sentence(results: Results) -> None:
    assert results("trees-too-long")[0]["error"] == (
        "ValueError: budget is 40 tokens, rollout 14 needs 52 for itself alone"
    )


def test_error_of_one_rank_is_raised_on_all(results: Results) -> None:
    """The rollout of 35 tokens is on the second rank, whose groups start with it."""
    assert [f["error"] for f in results("dp2-one-rank-too-long")] == [
        "ValueError: another data-parallel rank found no micro-batches for its rollouts, see its error",
        "ValueError: budget is 33 tokens, group 0 needs 35 for its prompt and response 0 alone",
    ]


def test_a_rank_with_fewer_groups(results: Results) -> None:
    """One micro-batch would hold all rollouts of one rank where the other needs two: both run two."""
    found, stock = results("dp2-one-group-and-four"), results("stock-one-group-and-four")
    assert found[0]["metrics"]["dualkv/micro_batches"] == 2
    assert (of_all_ranks(found, "log_probs") - of_all_ranks(stock, "log_probs")).abs().max() < 1e-5
    assert all(distance(f["weights"], stock[0]["weights"]) < 1e-4 for f in found)


def test_one_token_differs_in_a_declared_group(results: Results) -> None:
    found, stock = results("one-token-differs")[0], results("stock-one-token-differs")[0]
    assert found["said"] == [
        "dualkv: rollouts 3 and 4 have the uid uid-1, but their prompts differ at token 11; each is packed with equal"
        " prompts only"
    ]
    assert (found["log_probs"] - stock["log_probs"]).abs().max() < 1e-5
    assert found["infer_metrics"]["dualkv/tokens_packed"] == 175 + 22


def test_all_responses_truncated_to_nothing(results: Results) -> None:
    found = results("truncated-to-nothing")[0]
    assert "error" not in found
    assert found["log_probs"].shape == (16, 0)
    assert found["metrics"]["dualkv/tokens_packed"] == ((4 + 4) + (8 + 3) + 1 + (2 + 8)) / 2
    # No token, no loss: veRL skips an update whose gradient is not finite.
    assert distance(found["weights"], found["before"]) == 0


@pytest.mark.parametrize("name", ["restarted", "walk-restarted"])
def test_worker_restarted_from_a_checkpoint(name: str, results: Results) -> None:
    found = results(name)[0]
    assert found["metrics"].get("dualkv/walked_parts", 1) > 0
    assert found["metrics_after"]["loss"] == found["metrics"]["loss"]
    assert all(torch.equal(found["weights_after"][name], w) for name, w in found["weights"].items())


WHY = {
    "multimodal": "it holds images, audio or video, and images of qwen3 are not known to run packed in veRL",
    "prompt-in-loss": "prompt tokens are in the loss",
    "distillation": "top-k distillation reads the teacher's values at every row",
}


@pytest.mark.parametrize("name", list(WHY))
def test_falls_back_and_says_so_once(name: str, results: Results) -> None:
    found = results(name)[0]
    assert found["said"] == [f"dualkv: a batch runs with its prompts replicated, because {WHY[name]}"]


def test_images_that_are_packed_and_those_that_are_not() -> None:
    data = make_rollouts({"model": "images"}, 1, 0)
    packs = Images(("pixel_values", "image_grid_thw"), {IMAGE: 1})
    assert not_packable(data, packs) is None
    assert not_packable(data, "why") == "it holds images, audio or video, and why"
    three = data.copy()
    three["position_ids"] = torch.nested.nested_tensor_from_jagged(
        data["position_ids"].values()[1:], data["position_ids"].offsets(), jagged_dim=2
    )
    del three["multi_modal_inputs"]  # text alone
    for what, why in ((packs, "expected 4: text, frames, height and width"), ("why", "and why")):
        assert not_packable(three, what) == f"its positions have 3 rows, {why}"
    assert not_packable(data, Images(("pixel_values",), {IMAGE: 1})) == (
        "it holds image_grid_thw, which is not known to run packed"
    )
    rows = read(data, None, packs)
    assert rows.group.tolist() == read(make_rollouts({}, 1, 0)).group.tolist()
    packed = pack(data, rows)
    assert packed.media["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 4], [1, 2, 6], [1, 6, 4]]
    assert packed.media["pixel_values"].shape == (24 + 16 + 12 + 24, 24)
    other = make_rollouts({"model": "images"}, 1, 0)
    seen = [dict(getattr(entry, "data", entry)) for entry in other["multi_modal_inputs"]]
    at = next(i for i, entry in enumerate(seen) if entry)
    seen[at]["pixel_values"] = seen[at]["pixel_values"] + 1
    tu.assign_non_tensor_stack(other, "multi_modal_inputs", seen)
    assert read(other, None, packs).group.max() == rows.group.max() + 1  # the same ids, another image
    data["position_ids"].values()[2, 18] += 1  # of a shared row
    with pytest.raises(ValueError, match="position_ids differ between rollouts with equal prompts"):
        pack(data, rows)
    data["input_ids"].values()[-1] = IMAGE
    assert "multi_modal_inputs[15]['pixel_values'] has 24 patches for 7 placeholder tokens" in not_packable(data, packs)


def test_images_of_responses_are_shared_by_their_content() -> None:
    data = make_rollouts({"model": "images", "screens": True}, 1, 0)
    packs = Images(("pixel_values", "image_grid_thw"), {IMAGE: 1})
    assert not_packable(data, packs) is None
    prompts, trees = (pack(data, read(data, shared, packs)) for shared in (None, 1))
    # Of groups of 3, 3, 5, 2, 1 and 2 rollouts all but one have an image; the first two of a group share theirs.
    assert [len(x.media["image_grid_thw"]) for x in (prompts, trees)] == [4 + 15, 4 + 15 - 6]


def test_multimodal_batch_is_verls(results: Results) -> None:
    found, stock = results("multimodal")[0], results("stock")[0]
    assert torch.equal(found["log_probs"], stock["log_probs"])
    assert "dualkv/tokens_packed" not in found["infer_metrics"]


def test_loss_on_prompts_is_verls(results: Results) -> None:
    found, stock = results("prompt-in-loss")[0], results("stock-prompt-in-loss")[0]
    assert found["metrics"]["loss"] == stock["metrics"]["loss"]
    assert all(torch.equal(found["weights"][name], w) for name, w in stock["weights"].items())


def test_a_loss_of_ones_own_on_responses_is_exact(results: Results) -> None:
    found, stock = (results(f"{name}-loss-of-responses")[0]["metrics"] for name in ("packed", "stock"))
    assert found["loss"] == pytest.approx(stock["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(stock["grad_norm"], rel=1e-4)


def test_a_loss_of_ones_own_on_prompts_is_no_number(results: Results) -> None:
    """The log-probs of prompts are not computed."""
    found, stock = (results(f"{name}-loss-of-prompts")[0] for name in ("packed", "stock"))
    assert math.isfinite(stock["metrics"]["loss"])
    assert math.isnan(found["metrics"]["loss"])


def test_all_ranks_fall_back_with_one(results: Results) -> None:
    found = results("dp2-one-rank-multimodal")
    because = "dualkv: a batch runs with its prompts replicated, because "
    assert [f["said"] for f in found] == [
        [because + "another data-parallel rank cannot pack its own"],
        [because + WHY["multimodal"]],
    ]
    stock = results("stock")
    assert (of_all_ranks(found, "log_probs") - of_all_ranks(stock, "log_probs")).abs().max() < 1e-5


def test_configuration_chooses_the_engine(results: Results) -> None:
    found = results("from-configuration")[0]
    assert "error" not in found
    assert found["actor"] == found["ref"] == "DualKVEngine FSDPQwen3ForCausalLM"
    assert found["critic, packed=True"] == "DualKVCritic value_model"
    assert found["critic, packed=False"] == "FSDPEngineWithValueHead value_model"


def test_ranges_of_profiles_are_verls(results: Results) -> None:
    found, stock = (results(name)[0]["ranges"] for name in ("profiled", "stock-profiled"))
    assert found == stock
    assert stock == {"mini_batch0": 1, "mini_batch1": 1, "micro_batch0": 3, "micro_batch1": 1}
