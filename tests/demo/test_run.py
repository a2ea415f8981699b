"""The main job in small: both ways against each other and against plain transformers; that mistakes would show."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dualkv.demo.update
from dualkv.data.packing import PackedBatch
from dualkv.data.rollouts import ByteTokenizer, Rollouts, draw_rollouts
from dualkv.demo.measure import PeakMemory
from dualkv.demo.run import DRIFT, TOLERANCE, Differences, judge, run_demo
from dualkv.demo.settings import DemoSettings
from dualkv.demo.update import GRPO, train
from dualkv.integrations.transformers import batches, heads
from dualkv.models import load_model

pytestmark = pytest.mark.usefixtures("one_thread", "smaller_tiny")
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"groups": 2, "prompt_len": 40, "responses": 3, "response_len": 12, "steps": 2, "device": "cpu"}
ONCE: dict[str, Any] = SMALL | {"steps": 1}
TURNS: dict[str, Any] = SMALL | {"turns": 3, "responses": 6, "prompt_len": 24, "response_len": 5}


def ragged_rollouts() -> Rollouts:
    """Groups of 3, 1, 4 and 1, prompts from one token on, empty responses among them."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(257, (n,), generator=generator)

    lens = [[5, 0, 9], [7], [1, 30, 2, 0], [0]]
    rewards = [[0.5, 1.0, -2.0], [3.0], [0.0, 1.0, 0.25, 0.75], [1.0]]
    return Rollouts([ids(n) for n in (13, 1, 21, 4)], [[ids(r) for r in group] for group in lens], rewards)


def write(path: Path, rollouts: Rollouts) -> str:
    groups = zip(rollouts.prompts, rollouts.responses, rollouts.rewards, strict=True)
    path.write_text(
        "\n".join(
            json.dumps({"prompt": p.tolist(), "responses": [x.tolist() for x in r], "rewards": w}) for p, r, w in groups
        )
    )
    return str(path)


# ---------------------------------------------------------------------- both ways
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_drawn_rollouts_agree(dtype: str) -> None:
    result = run_demo(DemoSettings(dtype=dtype, **SMALL))
    first, second = result.updates
    assert first.largest <= TOLERANCE[dtype]
    assert 0 < second.largest <= TOLERANCE[dtype] * DRIFT
    assert result.exact
    assert list(result.ways) == ["replicated", "packed"]
    assert result.ways["replicated"].tokens == 2 * 3 * 52
    assert result.ways["packed"].tokens == 2 * (40 + 3 * 12)


def test_a_hybrid_model_agrees() -> None:
    assert run_demo(DemoSettings(model="tiny-hybrid", **ONCE | {"prompt_len": 70})).exact


def test_rollouts_from_a_file_agree_in_any_micro_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", ragged_rollouts())
    one, many = (
        run_demo(DemoSettings(rollouts=path, dtype="float64", steps=2, device="cpu", budget=budget))
        for budget in (None, 52)
    )
    assert one.exact
    assert many.exact
    assert one.ways["packed"].micro_batches == 1
    for way in one.ways:
        assert many.ways[way].micro_batches > one.ways[way].micro_batches


def test_drawn_turns_agree_packed_as_trees() -> None:
    result = run_demo(DemoSettings(dtype="float64", **TURNS))
    assert result.exact
    assert result.updates[0].largest <= 1e-10
    assert list(result.ways) == ["replicated", "tree"]
    # Two, four, then six different turns, and the environment's answers to the first two; some begin alike.
    assert 215 < result.ways["tree"].tokens <= 2 * (24 + 2 * 10 + 4 * 10 + 6 * 5)


def test_turns_from_a_file_agree_in_any_micro_batches(tmp_path: Path) -> None:
    """Sequences that end inside others, count other tokens of what they share, or none."""
    text = list(range(7, 40))
    sequences = [text[:20], text[:9], [*text[:12], 3, 4], [*text[:12], 3, 5], text[:20], text[:5]]
    masks = [[int(i > 5 + k and (i + k) % 3 > 0) for i in range(len(s))] for k, s in enumerate(sequences)]
    assert not any(masks[-1])
    other = {"prompt": [1, 2], "responses": [[3], [4, 5]], "rewards": [1, 0]}
    lines = [{"sequences": sequences, "loss_masks": masks, "rewards": [0, 1, 2, 3, 5, 4]}, other]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = DemoSettings(rollouts=str(tmp_path / "turns.jsonl"), dtype="float64", steps=2, device="cpu")
    results = [run_demo(dataclasses.replace(settings, budget=budget)) for budget in (None, 22)]
    assert all(result.exact for result in results)
    assert results[0].ways["tree"].tokens == (20 + 2 + 1) + (2 + 3)
    assert results[1].ways["tree"].micro_batches > results[0].ways["tree"].micro_batches == 1


@pytest.mark.parametrize("checkpointing", [False, True])
def test_half_precision_is_judged_by_float32(checkpointing: bool) -> None:
    result = run_demo(DemoSettings(dtype="bfloat16", gradient_checkpointing=checkpointing, **ONCE))
    assert result.exact
    assert 1e-5 < result.to_truth["packed"].gradients < 0.2
    assert "from float32" in result.verdict


def test_a_head_that_is_more_than_its_weight(tmp_path: Path) -> None:
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=1))
    torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    model.save_pretrained(tmp_path / "phi")
    assert run_demo(DemoSettings(model=str(tmp_path / "phi"), **ONCE)).exact


def test_ratios_to_other_micro_batches_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are multiples of 16, as a CPU's functions compute the last elements of a tensor by other code."""

    def ratios(turns: int) -> list[float | None]:
        sizes = TURNS | {"prompt_len": 48, "response_len": 16, "steps": 1, "turns": turns}
        return [way.ratio for way in run_demo(DemoSettings(batch_invariant=True, **sizes)).ways.values()]

    assert [ratios(turns) for turns in (1, 3)] == [[None, 1.0]] * 2
    enable = dualkv.demo.update.enable
    monkeypatch.setattr(dualkv.demo.update, "enable", lambda model, **_: enable(model))
    assert ratios(3)[1] != 1.0, "or the test could not fail"


# ---------------------------------------------------------------------- that a mistake shows
def test_a_wrong_token_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    right = batches.pack

    def wrong(*args: Any) -> PackedBatch:
        batch = right(*args)
        batch.input_ids[0, 3] = (batch.input_ids[0, 3] + 1) % 257
        return batch

    monkeypatch.setattr(batches, "pack", wrong)
    result = run_demo(DemoSettings(**ONCE))
    assert not result.exact
    assert "float64" not in result.verdict, "nothing to decide"


def test_drift_beyond_the_allowance_is_settled_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio that one way clips and the other does not, by a rounding: whole gradients differ."""
    monkeypatch.setattr("dualkv.demo.run.DRIFT", 0.001)
    monkeypatch.setitem(TOLERANCE, "float64", 1e-7)
    result = run_demo(DemoSettings(**SMALL))
    assert result.exact
    assert "float32; which float64 decides: largest difference" in result.verdict


def test_a_mistake_in_later_updates_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake may show late, such as a KL term that one way forgets: at the first update it has no gradient."""
    right = train

    def forgets(model: Any, way: str, *args: Any) -> Any:
        if way == "packed":
            monkeypatch.setattr(dualkv.demo.update, "GRPO", dataclasses.replace(GRPO, kl_coef=0.0))
        else:
            monkeypatch.setattr(dualkv.demo.update, "GRPO", GRPO)
        return right(model, way, *args)

    monkeypatch.setattr("dualkv.demo.run.train", forgets)
    result = run_demo(DemoSettings(**SMALL))
    assert result.updates[0].largest <= TOLERANCE["float32"]
    assert not result.exact


def test_judge() -> None:
    def apart(x: float) -> Differences:
        return Differences(x, x, x, x)

    nan = float("nan")
    assert judge("float32", [apart(1e-6), apart(9e-4)], {})[0]
    assert not judge("float32", [apart(1e-6), apart(1.1e-3)], {})[0]
    assert not judge("float64", [apart(1e-9)], {})[0]
    for name, value in itertools.product(("logp", "loss", "gradients"), (1.1e-5, nan)):
        assert not judge("float32", [apart(0.0)._replace(**{name: value})], {})[0]
        assert not judge("float32", [apart(0.0), apart(0.0), apart(0.0)._replace(**{name: 100 * value})], {})[0]
    for of_packed, exact in ((0.019, True), (0.021, False), (nan, False)):
        assert judge("bfloat16", [apart(0.1)], {"replicated": apart(0.01), "packed": apart(of_packed)})[0] is exact


# ---------------------------------------------------------------------- micro-batches, models, measurements
@pytest.mark.parametrize("way", batches.WAYS)
def test_log_probs_are_those_of_the_plain_model_in_any_micro_batches(way: str) -> None:
    model, rollouts = load_model("tiny", torch.float64, CPU, seed=1), ragged_rollouts()
    expected = []
    with torch.no_grad():
        for prompt, response in zip(rollouts.flat_prompts, rollouts.flat_responses, strict=True):
            logp = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected.append(logp.gather(1, response[:, None])[:, 0])
    for budget in (51, 60, 200):
        made = batches.WAYS[way](rollouts, budget, CPU)
        assert all(batch.tokens <= budget for batch in made)
        places = torch.cat([batch.places for batch in made])
        assert torch.equal(places.sort().values, torch.arange(54))
    settings = DemoSettings(budget=60, steps=1, device="cpu")
    _, [update] = train(model, way, rollouts, settings)
    torch.testing.assert_close(update.logp, torch.cat(expected), rtol=0, atol=1e-12)


def test_budgets() -> None:
    rollouts = ragged_rollouts()
    with pytest.raises(ValueError, match="budget is 50 tokens, the longest prompt with its response has 51"):
        batches.WAYS["replicated"](rollouts, 50, CPU)
    with pytest.raises(ValueError, match="budget is 50 tokens, group 2 needs 51"):
        batches.WAYS["packed"](rollouts, 50, CPU)
    assert batches.longest_sequence(rollouts) == 51
    assert batches.rows_of_one_group(rollouts) == 4 * 51


def test_rollouts_that_no_update_can_use() -> None:
    empty = Rollouts([torch.tensor([1])], [[torch.zeros(0, dtype=torch.int64)]], [[1.0]])
    with pytest.raises(ValueError, match="no response tokens"):
        train(load_model("tiny", torch.float32, CPU, 0), "packed", empty, DemoSettings(device="cpu"))
    turns = draw_rollouts(ByteTokenizer(), 1, 9, 2, 4, 2, seed=0)
    with pytest.raises(ValueError, match="masks"):
        batches.packed_batches(turns, 99, CPU)


def test_a_model_whose_logits_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model("tiny", torch.float32, CPU, 0)
    forward = type(model).forward

    def other(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * 0.9
        return out

    monkeypatch.setattr(heads, "_RULES", {})
    monkeypatch.setattr(type(model), "forward", other)
    for way in ("replicated", "packed"):
        with pytest.raises(ValueError, match=r"Qwen3ForCausalLM .*logits_to_keep"):
            train(model, way, ragged_rollouts(), DemoSettings(device="cpu"))


def test_a_local_model_and_its_vocabulary(tmp_path: Path) -> None:
    load_model("tiny", torch.float32, CPU, 5).save_pretrained(tmp_path / "model")
    assert run_demo(DemoSettings(model=str(tmp_path / "model"), **ONCE)).exact


def test_peak_memory_of_the_process() -> None:
    peak = PeakMemory(CPU)
    x = torch.ones(2**26)  # 256 MiB, gone before anything counts
    del x
    with peak.measured():
        x = torch.ones(2**24)  # 64 MiB
        del x
    if peak.bytes is None:
        pytest.skip("needs Linux with a writable /proc/self/clear_refs")
    assert 60 < peak.bytes / 2**20 < 80
    with peak.measured():
        pass
    assert 60 < peak.bytes / 2**20 < 80
