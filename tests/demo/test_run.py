"""The main job in small: both ways against each other and against plain transformers; that mistakes would show."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dualkv.demo.update
from dualkv.data.packing import PackedBatch
from dualkv.data.rollouts import Rollouts
from dualkv.demo.measure import PeakMemory
from dualkv.demo.run import DRIFT, TOLERANCE, Differences, judge, run_demo
from dualkv.demo.sampling import _cache_bytes, sample_responses
from dualkv.demo.settings import DemoSettings
from dualkv.demo.update import WAYS, PolicyTrainer, longest_sequence, replicated_tokens_of_one_group
from dualkv.grpo import ALGORITHMS
from dualkv.integrations.transformers import heads
from dualkv.layout import Layout
from dualkv.models import load_model

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"groups": 2, "prompt_len": 40, "responses": 3, "response_len": 12, "steps": 2, "device": "cpu"}
TURNS: dict[str, Any] = SMALL | {"turns": 3, "responses": 6, "prompt_len": 24, "response_len": 5}


def ragged_rollouts() -> Rollouts:
    """Groups of 3, 1 and 4, prompts from one token on, empty responses among them."""
    generator = torch.Generator().manual_seed(3)

    def ids(n: int) -> torch.Tensor:
        return torch.randint(257, (n,), generator=generator)

    lens = [[5, 0, 9], [7], [1, 30, 2, 0]]
    rewards = [[0.5, 1.0, -2.0], [3.0], [0.0, 1.0, 0.25, 0.75]]
    return Rollouts([ids(n) for n in (13, 1, 21)], [[ids(r) for r in group] for group in lens], rewards)


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
def test_live_rollouts_agree(dtype: str) -> None:
    result = run_demo(DemoSettings(dtype=dtype, **SMALL))
    first, second = result.updates["packed"]
    allowed = TOLERANCE[dtype]
    assert max(first.logp, first.loss, first.gradients, first.weights or 1.0) <= allowed
    assert second.largest <= allowed * DRIFT
    assert result.exact is True
    assert result.same_samples == (12, 12)
    replicated, packed = result.ways["replicated"], result.ways["packed"]
    assert replicated.rewards == packed.rewards
    assert len(packed.rewards) == 3
    assert replicated.metrics[1]["kl"] > 1e-6  # the reference stays where the policy was
    assert packed.tokens[0] == 2 * 40 + result.response_tokens[0]


def test_a_hybrid_model_samples_and_agrees() -> None:
    """One token has a hybrid's cache grow by keys and values of its one attention layer, not by states."""
    result = run_demo(DemoSettings(model="tiny-hybrid", **SMALL | {"prompt_len": 70, "steps": 1}))
    assert result.exact is True
    model = load_model("tiny-hybrid", torch.float32, CPU, 0)
    assert _cache_bytes(model, 2) - _cache_bytes(model, 1) == 2 * 2 * 64 * 4  # key and value: 2 heads of 64, fp32
    states = 3 * (4 * 32 * 32 + (2 * 2 * 32 + 4 * 32) * 4) * 4  # three layers: state, and inputs of 4 taps
    assert _cache_bytes(model, 0) == states


@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_sampling_from_shared_caches_is_sampling_from_the_whole_sequence(model: str) -> None:
    """Each token against the distribution of the model run on everything before it, without a cache."""
    policy = load_model(model, torch.float64, CPU, 0)
    prompts = [torch.arange(9), torch.arange(20, 29)]
    uniform = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for group, numbers, prompt in zip(
        sample_responses(policy, prompts, 3, 5, 257, None, 4), uniform, prompts, strict=True
    ):
        for response, of_response in zip(group, numbers, strict=True):
            with torch.no_grad():
                logits = policy(input_ids=torch.cat([prompt, response])[None]).logits[0, 8:-1, :257]
            cumulative = torch.softmax(logits, -1).cumsum(-1)
            assert torch.equal(torch.searchsorted(cumulative, of_response[:, None])[:, 0], response)


def test_rollouts_from_a_file_agree(tmp_path: Path) -> None:
    """Three updates on the same rollouts: ratios leave 1 and the clip range."""
    path = write(tmp_path / "rollouts.jsonl", ragged_rollouts())
    result = run_demo(DemoSettings(rollouts=path, dtype="float64", steps=3, learning_rate=5e-3, device="cpu"))
    assert result.exact is True
    assert result.updates["packed"][0].largest <= 1e-10
    assert result.same_samples is None
    assert result.ways["packed"].rewards == []
    assert result.response_tokens == [5 + 9 + 7 + 1 + 30 + 2] * 3
    clipped = [m["clip_fraction"] for m in result.ways["replicated"].metrics]
    assert clipped[0] == 0 < clipped[2]
    assert result.ways["packed"].metrics[2]["clip_fraction"] == pytest.approx(clipped[2])


def test_live_turns_agree_packed_as_prompts_and_as_trees() -> None:
    result = run_demo(DemoSettings(dtype="float64", **TURNS))
    assert result.exact is True
    for way in ("packed", "tree"):
        first, second = result.updates[way]
        assert max(first.logp, first.loss, first.gradients, first.weights or 1.0) <= 1e-10
        assert second.largest <= 1e-8
        assert result.ways[way].rewards == result.ways["replicated"].rewards
        assert result.ways[way].metrics[1] == pytest.approx(result.ways["replicated"].metrics[1], abs=1e-9)
    assert result.same_samples == (48, 48)
    assert result.response_tokens == [2 * 6 * 3 * 5] * 2  # of the environment none
    # Two, four, then six different turns, and the environment's answers to the first two; some begin alike.
    assert result.ways["packed"].tokens[0] == 2 * (24 + 6 * 25)
    assert 215 < result.ways["tree"].tokens[0] <= 2 * (24 + 2 * 10 + 4 * 10 + 6 * 5)
    assert "packed: largest difference" in result.verdict
    assert "tree: largest difference" in result.verdict


def test_turns_from_a_file_agree_in_any_micro_batches(tmp_path: Path) -> None:
    """Sequences that end inside others, count other tokens of what they share, or none."""
    text = list(range(7, 40))
    sequences = [text[:20], text[:9], [*text[:12], 3, 4], [*text[:12], 3, 5], text[:20], text[:5]]
    masks = [[int(i > 5 + k and (i + k) % 3 > 0) for i in range(len(s))] for k, s in enumerate(sequences)]
    assert not any(masks[-1])
    other = {"prompt": [1, 2], "responses": [[3], [4, 5]], "rewards": [1, 0]}
    lines = [{"sequences": sequences, "loss_masks": masks, "rewards": [0, 1, 2, 3, 5, 4]}, other]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = DemoSettings(
        rollouts=str(tmp_path / "turns.jsonl"), dtype="float64", steps=2, learning_rate=5e-3, device="cpu", check=True
    )
    results = [run_demo(dataclasses.replace(settings, budget=budget)) for budget in (None, 22)]
    for result in results:
        assert result.exact is True
        assert result.updates["tree"][0].largest <= 1e-10
        assert set(result.to_truth) == {"replicated", "packed", "tree"}
        assert max(away.largest for away in result.to_truth.values()) < 1e-10
        assert result.response_tokens == [sum(map(sum, masks)) + 3] * 2
    assert results[0].ways["tree"].tokens == [(20 + 2 + 1) + (2 + 3)] * 2
    assert results[1].ways["tree"].micro_batches[0] > results[0].ways["tree"].micro_batches[0] == 1
    assert results[1].ways["tree"].losses == pytest.approx(results[0].ways["replicated"].losses, abs=1e-12)


def test_a_wrong_mask_or_advantage_of_a_tree_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dualkv.demo.update.pack_sequences

    def later(sequences: Any, masks: Any, **kwargs: Any) -> Any:
        """Count another token instead, as many of them."""
        first = masks[0].clone()
        first[int(first.int().argmax())], first[-8] = False, True
        return right(sequences, [first, *masks[1:]], **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(dualkv.demo.update, "pack_sequences", later)
        assert run_demo(DemoSettings(**TURNS | {"steps": 1})).exact is False

    def swapped(*args: Any) -> Any:
        """Values of one rollout take the advantages of another."""
        return [dataclasses.replace(b, places=b.places.roll(15)) for b in dualkv.demo.update.tree_batches(*args)]

    monkeypatch.setitem(WAYS, "tree", swapped)
    result = run_demo(DemoSettings(**TURNS | {"steps": 1}))
    assert result.exact is False
    assert result.updates["packed"][0].largest <= TOLERANCE["float32"]


def test_a_small_budget_changes_nothing_but_the_micro_batches(tmp_path: Path) -> None:
    path = write(tmp_path / "rollouts.jsonl", ragged_rollouts())
    one = run_demo(DemoSettings(rollouts=path, dtype="float64", steps=1, device="cpu"))
    many = run_demo(DemoSettings(rollouts=path, dtype="float64", steps=1, device="cpu", budget=52))
    assert one.ways["packed"].micro_batches == [1]
    assert many.ways["packed"].micro_batches[0] > 1
    assert many.ways["replicated"].micro_batches[0] > one.ways["replicated"].micro_batches[0]
    assert many.exact is True
    assert many.ways["packed"].losses == pytest.approx(one.ways["packed"].losses, abs=1e-12)
    assert many.ways["packed"].metrics[0] == pytest.approx(one.ways["packed"].metrics[0], abs=1e-12)


def test_half_precision_is_judged_by_a_wider_dtype() -> None:
    result = run_demo(DemoSettings(dtype="bfloat16", **SMALL | {"steps": 1}))
    assert result.exact is True
    assert 1e-5 < result.to_truth["packed"].gradients < 0.2
    assert "from float32" in result.verdict
    unchecked = run_demo(DemoSettings(dtype="bfloat16", check=False, **SMALL | {"steps": 1}))
    assert unchecked.exact is None
    assert unchecked.to_truth == {}


def test_gradient_checkpointing_agrees() -> None:
    plain = run_demo(DemoSettings(dtype="float64", **SMALL | {"steps": 1}))
    again = run_demo(DemoSettings(dtype="float64", gradient_checkpointing=True, **SMALL | {"steps": 1}))
    assert again.exact is True
    assert again.ways["packed"].losses == plain.ways["packed"].losses


# ---------------------------------------------------------------------- that a mistake shows
def wrong_positions(batch: PackedBatch) -> PackedBatch:
    """Every response as if it followed the one before it."""
    lens = [(p, *r) for p, r in zip(batch.layout.prompt_lens, batch.layout.response_lens, strict=True)]
    chains = [[-1, *range(len(r) - 1)] for r in lens]
    shifts = [sum(len(r) for r in lens[:i]) for i in range(len(lens))]
    parent = [p if p < 0 else p + s for chain, s in zip(chains, shifts, strict=True) for p in chain]
    layout = Layout.from_segments(batch.layout.offsets, parent)
    return PackedBatch(batch.input_ids, layout, batch.label_style, batch.order, batch.padded_width)


def wrong_token(batch: PackedBatch) -> PackedBatch:
    ids = batch.input_ids.clone()
    ids[0, 3] = (ids[0, 3] + 1) % 257
    return PackedBatch(ids, batch.layout, batch.label_style, batch.order, batch.padded_width)


@pytest.mark.parametrize("spoil", [wrong_positions, wrong_token])
def test_a_wrong_batch_is_not_exact(monkeypatch: pytest.MonkeyPatch, spoil: Callable[..., PackedBatch]) -> None:
    right = dualkv.demo.update.pack
    monkeypatch.setattr(dualkv.demo.update, "pack", lambda *args, **kwargs: spoil(right(*args, **kwargs)))
    result = run_demo(DemoSettings(**SMALL | {"steps": 1}))
    assert result.exact is False


FOUR = '{"prompt":"What is two and two?","responses":["four","five"],"rewards":[1,0]}'


def short_answers(tmp_path: Path, **settings: Any) -> DemoSettings:
    (tmp_path / "four.jsonl").write_text(FOUR)
    return DemoSettings(rollouts=str(tmp_path / "four.jsonl"), device="cpu", **settings)


@pytest.mark.usefixtures("whole")
def test_weights_are_judged_as_a_step_of_adamw_allows(tmp_path: Path) -> None:
    """Gradients of a few tokens are all rounding in places, and AdamW makes full steps of their signs."""
    result = run_demo(short_answers(tmp_path))
    first = result.updates["packed"][0]
    assert first.before_step <= TOLERANCE["float32"] < (first.weights or 0.0)
    assert result.exact is True, result.verdict
    assert "float64" not in result.verdict


def test_drift_beyond_the_allowance_is_settled_in_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio that one way clips and the other does not, by a rounding, as DAPO's on FOUR: whole gradients differ."""
    monkeypatch.setattr("dualkv.demo.run.DRIFT", 0.01)
    monkeypatch.setitem(TOLERANCE, "float64", 1e-8)
    result = run_demo(short_answers(tmp_path))
    assert result.exact is True
    assert "float32; which float64 decides: largest difference" in result.verdict


def test_a_real_difference_of_short_answers_is_not_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference of weights alone counts too: one way takes steps 10 % longer."""
    settings = short_answers(tmp_path)
    with monkeypatch.context() as patch:
        right = dualkv.demo.update.pack
        patch.setattr(dualkv.demo.update, "pack", lambda *args, **kwargs: wrong_token(right(*args, **kwargs)))
        result = run_demo(settings)
        assert result.exact is False
        assert result.updates["packed"][0].before_step > TOLERANCE["float32"]
        assert "float64" not in result.verdict  # nothing to decide
    step = PolicyTrainer.step

    def longer(self: PolicyTrainer) -> Any:
        if self.way == "packed":
            self._optimizer.param_groups[0]["lr"] *= 1.1
        return step(self)

    monkeypatch.setattr(PolicyTrainer, "step", longer)
    result = run_demo(dataclasses.replace(settings, steps=1))
    assert result.updates["packed"][0].before_step <= TOLERANCE["float32"]
    assert result.exact is False
    assert "which float64 decides" in result.verdict


def test_a_mistake_in_later_updates_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake may show late, such as a KL term that one way forgets: at the first update it has no gradient."""
    right = PolicyTrainer._loss

    def forgets(self: PolicyTrainer, batch: Any, prepared: Any) -> Any:
        if self.way == "packed":
            prepared = dataclasses.replace(prepared, ref_logp=prepared.old_logp)
        return right(self, batch, prepared)

    monkeypatch.setattr(PolicyTrainer, "_loss", forgets)
    result = run_demo(DemoSettings(**SMALL))
    assert result.updates["packed"][0].largest <= TOLERANCE["float32"]
    assert result.exact is False


def test_judge() -> None:
    def apart(x: float) -> Differences:
        return Differences(x, x, x, x, x, x, x)

    assert judge("float32", [apart(1e-6), apart(9e-4)], {})[0] is True
    assert judge("float32", [dataclasses.replace(apart(1e-6), weights=9e-4)], {})[0] is True
    assert judge("float32", [dataclasses.replace(apart(1e-6), weights=1.1e-3)], {})[0] is False
    for name in ("logp", "loss", "gradients"):
        assert judge("float32", [dataclasses.replace(apart(0.0), **{name: 1.1e-5})], {})[0] is False
    assert judge("float32", [apart(1e-6), apart(1.1e-3)], {})[0] is False
    for name in ("logp", "loss", "gradients", "weights"):
        assert judge("float32", [dataclasses.replace(apart(0.0), **{name: float("nan")})], {})[0] is False
    assert judge("bfloat16", [apart(0.1)], {"packed": apart(float("nan")), "replicated": apart(0.01)})[0] is False
    assert judge("float64", [apart(1e-9)], {})[0] is False
    assert judge("bfloat16", [apart(0.1)], {})[0] is None
    assert judge("bfloat16", [apart(0.1)], {"packed": apart(0.019), "replicated": apart(0.01)})[0] is True
    assert judge("bfloat16", [apart(0.1)], {"packed": apart(0.021), "replicated": apart(0.01)})[0] is False


# ---------------------------------------------------------------------- one update
@pytest.mark.parametrize("way", WAYS)
def test_log_probs_and_entropy_are_those_of_the_plain_model(way: str) -> None:
    model, rollouts = load_model("tiny", torch.float64, CPU, seed=1), ragged_rollouts()
    expected, entropies = [], []
    with torch.no_grad():
        for prompt, group in zip(rollouts.prompts, rollouts.responses, strict=True):
            for response in group:
                logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
                logp = logits.log_softmax(-1)
                expected.append(logp.gather(1, response[:, None])[:, 0])
                entropies.append(-(logp.exp() * logp).sum(1))
    objective = ALGORITHMS["dapo"]
    trainer = PolicyTrainer(model, way, objective, longest_sequence(rollouts) * 2, learning_rate=1e-3)
    prepared = trainer.prepare(rollouts)
    torch.testing.assert_close(prepared.old_logp, torch.cat(expected), rtol=0, atol=1e-12)
    gradients = trainer.gradients(prepared)
    torch.testing.assert_close(gradients.logp, torch.cat(expected), rtol=0, atol=1e-12)
    assert gradients.metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), abs=1e-12)


def test_micro_batches_of_both_ways_cover_every_token_once() -> None:
    rollouts = ragged_rollouts()
    for budget in (51, 60, 200):
        for make in WAYS.values():
            batches = make(rollouts, budget, CPU)
            places = torch.cat([b.places for b in batches]).sort().values
            assert torch.equal(places, torch.arange(sum(rollouts.response_lens)))
            assert all(b.tokens <= budget for b in batches)
    with pytest.raises(ValueError, match="budget is 50 tokens, the longest prompt with its response has 51"):
        WAYS["replicated"](rollouts, 50, CPU)
    with pytest.raises(ValueError, match="budget is 50 tokens, group 2 needs 51"):
        WAYS["packed"](rollouts, 50, CPU)
    assert longest_sequence(rollouts) == 51
    assert replicated_tokens_of_one_group(rollouts) == 4 * 51


def test_nothing_to_learn_from() -> None:
    rollouts = Rollouts([torch.tensor([1])], [[torch.zeros(0, dtype=torch.int64)]], [[1.0]])
    trainer = PolicyTrainer(load_model("tiny", torch.float32, CPU, 0), "packed", ALGORITHMS["grpo"], 9, 1e-3)
    with pytest.raises(ValueError, match="no response tokens"):
        trainer.prepare(rollouts)


def test_ratios_to_other_micro_batches_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are multiples of 16, as a CPU's functions compute the last elements of a tensor by other code."""
    settings = DemoSettings(batch_invariant=True, **TURNS | {"prompt_len": 48, "response_len": 16, "steps": 1})
    ways = run_demo(settings).ways
    assert {name: way.ratio for name, way in ways.items()} == {"replicated": None, "packed": 1.0, "tree": 1.0}
    enable = dualkv.demo.update.enable
    monkeypatch.setattr(dualkv.demo.update, "enable", lambda model, **_: enable(model))
    ways = run_demo(settings).ways
    assert 1.0 not in {ways["packed"].ratio, ways["tree"].ratio}, "or the test could not fail"


@pytest.mark.parametrize("way", WAYS)
def test_deterministic_updates_are_bitwise_equal(way: str) -> None:
    runs = []
    for _ in range(2):
        model = load_model("tiny", torch.float32, CPU, seed=0)
        trainer = PolicyTrainer(model, way, ALGORITHMS["grpo"], 300, 1e-3, model, deterministic=True)
        trainer.gradients(trainer.prepare(ragged_rollouts()))
        runs.append(trainer.step())
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_warming_up_leaves_nothing_behind() -> None:
    model = load_model("tiny", torch.float32, CPU, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = PolicyTrainer(model, "packed", ALGORITHMS["grpo"], 300, 1e-3)
    trainer._warm_up(ragged_rollouts())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert trainer.seconds == {}


# ---------------------------------------------------------------------- settings, models, measurements


def test_a_head_that_is_more_than_its_weight(tmp_path: Path) -> None:
    """Samples, log-probs and gradients of both ways have its bias."""
    from transformers import PhiConfig, PhiForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    model = PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=1))
    torch.nn.init.normal_(model.lm_head.bias, std=3.0)
    model.save_pretrained(tmp_path / "phi")
    result = run_demo(DemoSettings(model=str(tmp_path / "phi"), **SMALL | {"steps": 1}))
    assert result.exact is True
    assert result.ways["packed"].metrics[0]["entropy"] < 5.0  # without the bias: 5.8, of 320 equal tokens


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
            PolicyTrainer(model, way, ALGORITHMS["grpo"], 300, 1e-3)


def test_a_local_model_and_its_vocabulary(tmp_path: Path) -> None:
    load_model("tiny", torch.float32, CPU, 5).save_pretrained(tmp_path / "model")
    result = run_demo(DemoSettings(model=str(tmp_path / "model"), **SMALL | {"steps": 1}))
    assert result.exact is True


def test_peak_memory_of_the_process() -> None:
    peak = PeakMemory(CPU)
    if peak.method.startswith("not measured"):
        pytest.skip(peak.method)
    x = torch.ones(2**26)  # 256 MiB, gone before anything counts
    del x
    with peak.measured():
        x = torch.ones(2**24)  # 64 MiB
        del x
    assert peak.bytes is not None
    assert 60 < peak.bytes / 2**20 < 80
    with peak.measured():
        pass
    assert 60 < peak.bytes / 2**20 < 80
