"""`dualkv_batch_invariant=True`: log-probs have the same bits in all micro-batches, and first ratios are exactly 1."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3Config
from verl.utils import torch_functional
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from dualkv.integrations.metrics import RATIO
from dualkv.integrations.verl import equal_bits, options
from dualkv.integrations.verl.ratio import Ratio, Weights
from dualkv.integrations.verl.work import rollouts_by_tag
from tests.integrations.verl.rollouts import MODELS, nested
from tests.integrations.verl.scenarios import EQUAL_BITS, EQUAL_BITS_OF_TWO
from tests.integrations.verl.test_equivalence import of_all_ranks

Results = Callable[[str], list[dict[str, Any]]]
EQUAL = [*EQUAL_BITS, *EQUAL_BITS_OF_TWO]


def differing(found: list[dict[str, Any]]) -> int:
    """Log-probs and entropies of the first budget that others give other bits."""
    first, *others = ([f["scores"][i] for f in found] for i in range(len(found[0]["scores"])))
    return sum(
        int((of_all_ranks(first, what) != of_all_ranks(other, what)).sum())
        for other in others
        for what in ("log_probs", "entropy")
    )


@pytest.mark.parametrize("name", EQUAL)
def test_log_probs_do_not_depend_on_micro_batches(name: str, results: Results) -> None:
    found = results(name)
    assert differing(found) == 0
    batches = [scores["infer_metrics"]["dualkv/micro_batches"] for scores in found[0]["scores"]]
    assert batches == sorted(set(batches), reverse=True), "each budget has micro-batches of its own"


@pytest.mark.parametrize("name", EQUAL)
def test_the_ratio_at_equal_weights_is_one(name: str, results: Results) -> None:
    """The first update has the weights of the old log-probs, the three behind it have others."""
    for found in results(name):
        assert found["metrics"][RATIO] == 1.0
        assert found["metrics"]["dualkv/micro_batches"] > 1
        assert RATIO not in found["metrics_later"]


@pytest.mark.parametrize("name", EQUAL)
def test_every_product_takes_a_fixed_number_of_rows(name: str, results: Results) -> None:
    """There are seven in each of two layers and a head; with LoRA two more for each but the head; those of a tower."""
    more = {"equal-lora": 2 * 14, "equal-images": 14}
    for found in results(name):
        assert found["products"] == 15 + more.get(name, 0)
        assert found["others"] == []


def test_without_the_option_bits_differ(results: Results) -> None:
    (found,) = results("unequal")
    assert differing([found]) > 0
    assert found["metrics"][RATIO] != 1.0
    assert found["metrics"][RATIO] == pytest.approx(1, abs=1e-4)
    assert len(found["others"]) == found["products"]


@pytest.mark.parametrize(("one", "two"), [("equal", "dp2-equal"), ("equal-trees", "dp2-equal-trees")])
def test_ranks_compute_the_bits_of_one(one: str, two: str, results: Results) -> None:
    for what in ("log_probs", "entropy"):
        ours, theirs = (of_all_ranks([f["scores"][0] for f in results(name)], what) for name in (one, two))
        assert torch.equal(ours, theirs)


# ---------------------------------------------------------------- the parts
def test_functions_of_logits_get_a_fixed_number_of_rows() -> None:
    logits = torch.randn(1, 600, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    of_rows = {"labels": torch.arange(600) % 8, "temperature_is_one": False}
    seen: list[tuple[Any, ...]] = []

    def compute(output: Any, arguments: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
        (block,), labels = output.logits, arguments["labels"]
        seen.append((tuple(block.shape), tuple(labels.shape), count, arguments["temperature_is_one"]))
        return {"log_probs": block.log_softmax(-1).gather(1, labels[:, None])[:, 0], "top": block.amax(-1)}

    found = equal_bits.by_blocks(compute, logits, of_rows)
    assert seen == [((equal_bits.ROWS, 8), (equal_bits.ROWS,), equal_bits.ROWS, False)] * 3
    wanted = logits[0].log_softmax(-1).gather(1, of_rows["labels"][:, None])[:, 0]
    torch.testing.assert_close(found["log_probs"], wanted)
    assert torch.equal(found["top"], logits[0].amax(-1))
    ours, theirs = (torch.autograd.grad(x.square().sum(), logits)[0] for x in (found["log_probs"], wanted))
    torch.testing.assert_close(ours, theirs)


def test_the_ratio_is_of_response_tokens_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    rollouts = rollouts_by_tag(["a", "a"], [3, 3], [2, 4])
    old, counts = [torch.zeros(2), torch.zeros(4)], [torch.tensor([1, 0]), torch.tensor([0, 1, 1, 1])]
    data = {"old_log_probs": nested(old), "loss_mask": nested(counts)}
    # Rows of prompts and the last one predict no response token, and three others do not count.
    new = [torch.tensor([9.0, 9, 0, 9, 9]), torch.tensor([9.0, 9, 9, 0.25, 0, -0.5, 9])]

    def ratio(old_weights: bool) -> float | None:
        found = Ratio(data, rollouts, "cpu", differs=old_weights)
        found.add([1], nested(new[1:]))
        found.add([0], nested(new[:1]))
        return found.value(None)

    assert ratio(False) == pytest.approx(math.exp(-0.5))
    assert ratio(True) is None


def test_weights_are_known_again() -> None:
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), LoraConfig(target_modules=["0"], r=2))
    optimizer, weights = torch.optim.SGD(model.parameters(), lr=0.1), Weights()
    assert weights.are(model, optimizer) is None
    with model.disable_adapter():
        weights.note(model, optimizer)
    assert weights.are(model, optimizer) is None, "the pass was without adapters"
    weights.note(model, optimizer)
    assert weights.are(model, optimizer) is True
    before = copy.deepcopy(model.state_dict())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert weights.are(model, optimizer) is False
    model.load_state_dict(before)
    assert weights.are(model, optimizer) is True, "veRL's trainers put weights back"


@pytest.mark.parametrize("chunked", [False, True])
def test_an_engine_compiles_no_entropies_and_fills_up_few_rows(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"ulysses_sequence_parallel_size": 1, "qat": None, "entropy_from_logits_with_chunking": chunked}

    def make(engine: Any, *_: Any) -> None:
        engine.engine_config, engine.pad_to_length = SimpleNamespace(**settings), False
        engine.compute_entropy_from_logits = torch.compile

    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", make)
    options = {"dualkv_batch_invariant": True}
    given = {"hf_config": MODELS["of_sixteens"][1], "use_fused_kernels": False, "use_liger": False}
    engine: Any = EngineRegistry.new(
        "dualkv", "fsdp2", model_config=SimpleNamespace(**given, fused_kernel_options=options)
    )
    name = "entropy_from_logits_with_chunking" if chunked else "entropy_from_logits"
    assert engine.compute_entropy_from_logits is getattr(torch_functional, name)
    assert [engine._get_packed_pad_size(rows) for rows in (1, 31, 32, 100)] == [31, 1, 0, 0]


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"options": {"dualkv_walk": True}}, "fused_kernel_options.dualkv_walk=True, expected False"),
        ({"options": {"dualkv_fast": True}}, "fused_kernel_options.dualkv_fast=True, expected False"),
        ({"use_fused_kernels": True}, "use_fused_kernels=True, expected False"),
        ({"use_liger": True}, "use_liger=True, expected False"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses_sequence_parallel_size=2, expected 1"),
        ({"qat": SimpleNamespace(enable=True)}, "qat.enable=True, expected False"),
        ({"vocab_size": 32001}, "vocab_size=32001, expected a multiple of 8"),
    ],
)
def test_settings_that_are_not_exact_are_refused(changed: dict[str, Any], says: str) -> None:
    given = {"use_fused_kernels": False, "use_liger": False, "ulysses_sequence_parallel_size": 1, "qat": None}
    given |= {"vocab_size": 32000, "options": {}} | changed
    config = Qwen3Config(vocab_size=given["vocab_size"])
    of_verl = SimpleNamespace(**given, hf_config=config)
    with pytest.raises(ValueError, match=rf"dualkv_batch_invariant is True together with .*{says}"):
        equal_bits.refuse(of_verl, of_verl, options.read(given["options"]))


def test_a_batch_that_cannot_be_packed_is_refused(results: Results) -> None:
    assert results("equal-not-packed")[0]["error"] == (
        "ValueError: fused_kernel_options.dualkv_batch_invariant is True of a batch that cannot be packed:"
        " prompt tokens are in the loss"
    )
