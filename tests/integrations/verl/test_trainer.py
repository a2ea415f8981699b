"""Trainers that keep groups whole, and the configuration lines that choose them."""

from __future__ import annotations

import re
import warnings
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import verl
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import PPOTrainerSync, get_trainer_cls
from verl.workers.engine import EngineRegistry, FSDPEngineWithLMHead

from dualkv.branches import Keeping
from dualkv.integrations import losses
from dualkv.integrations.transformers.masks import Visible, by_config
from dualkv.integrations.verl import options, walked
from dualkv.integrations.verl.critic import DualKVCritic
from dualkv.integrations.verl.data import Rollouts
from dualkv.integrations.verl.work import (
    FULL,
    balance,
    of_full_attention,
    packed,
    rank_works,
    replicated,
    rollouts_by_tag,
)
from dualkv.ops.features import Window


def random_rollouts(seed: int, groups: int, size: int | None = None) -> Rollouts:
    """Make shuffled rollouts: `size` responses a prompt, or 1 to 8."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, groups) if size is None else np.full(groups, size)
    group = np.repeat(np.arange(groups), sizes)
    prompts = rng.integers(1, 4000, groups)[group]
    order = rng.permutation(len(group))
    return rollouts_by_tag(group[order].tolist(), prompts[order].tolist(), rng.integers(0, 3000, len(group)).tolist())


def parts_of(rollouts: Rollouts, order: list[list[int]], updates: int) -> int:
    """(group, update of a rank) pairs: as many as there are groups, if none is cut."""
    return sum(len(set(rollouts.group[part])) for rank in order for part in np.array_split(np.array(rank), updates))


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_equal_size_stay_whole(seed: int) -> None:
    rollouts = random_rollouts(seed, groups=48, size=8)
    order = balance(rollouts, num_ranks=4, num_updates=3)
    assert parts_of(rollouts, order, 3) == 48
    assert [len(rank) for rank in order] == [96] * 4
    assert sorted(i for rank in order for i in rank) == list(range(384))
    loads = [work.workload for work in rank_works(rollouts, order, 3)]
    assert max(loads) < 1.03 * np.mean(loads)


@pytest.mark.parametrize("seed", range(5))
def test_ragged_groups_are_hardly_cut(seed: int) -> None:
    rollouts = random_rollouts(seed, groups=60)
    size = len(rollouts) // 8 * 8
    rollouts = rollouts.select(np.arange(size))
    order = balance(rollouts, num_ranks=4, num_updates=2)
    assert sorted(i for rank in order for i in rank) == list(range(size))
    # Eight parts are to be filled exactly: at most one cut for each.
    assert parts_of(rollouts, order, 2) <= len(set(rollouts.group)) + 8


def test_a_group_larger_than_a_ranks_update_is_cut() -> None:
    rollouts = rollouts_by_tag(["a"] * 8, [100] * 8, [10] * 8)
    order = balance(rollouts, num_ranks=2, num_updates=2)
    assert [len(rank) for rank in order] == [4, 4]
    assert [work.tokens for work in rank_works(rollouts, order, 2)] == [2 * (99 + 2 * 11)] * 2


def test_rollouts_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="got 6 rollouts, expected a multiple of 2 ranks times 2 updates"):
        balance(rollouts_by_tag(["a"] * 6, [1] * 6, [1] * 6), num_ranks=2, num_updates=2)


def test_work_of_packed_rows() -> None:
    """Squares count the pairs of which one sees the other twice, as the square of a length does of causal attention."""
    rollouts = rollouts_by_tag(["a", "b", "a"], [3, 5, 3], [2, 0, 4])
    assert replicated(rollouts).tokens == 5 + 5 + 7
    assert replicated(rollouts).squares == 25 + 25 + 49
    assert packed(rollouts).tokens == (2 + 3 + 5) + (4 + 1)
    # Of 2 and 4 tokens behind a prompt of 3, all of which but the last token is counted once.
    assert packed(rollouts).squares == 25 + 49 - 4 + 25


def test_work_of_windows_and_chunks() -> None:
    """The work is twice the visible pairs less one a row, the mean over layers."""
    rollouts = rollouts_by_tag(["a", "b", "a"], [30, 5, 30], [20, 0, 41])

    def squares(visible: Visible, begin: int, end: int) -> int:
        p = np.arange(end)
        low = np.zeros(end, np.int64) if visible == Visible() else Window(*visible).lowest(p)
        return int((2 * (p - low) + 1)[begin:].sum())

    layers = [Visible(window=7), Visible(window=7), Visible(chunk=16), Visible()]
    for kinds in ([x] for x in layers):
        assert replicated(rollouts, kinds).squares == sum(squares(kinds[0], 0, n) for n in (50, 5, 71))
        assert packed(rollouts, kinds).squares == sum(squares(kinds[0], *x) for x in ((0, 50), (29, 71), (0, 5)))
    each = [packed(rollouts, [x]).squares for x in layers]
    assert packed(rollouts, layers).squares == pytest.approx(np.mean(each), abs=1)


def test_flops_of_windows_are_not_counted_twice() -> None:
    from transformers import Gemma3TextConfig
    from verl.utils.flops_counter import FlopsCounter

    config = Gemma3TextConfig(sliding_window=512)
    rollouts = random_rollouts(0, groups=5)
    full, windows = (replicated(rollouts, layers) for layers in (FULL, by_config(config)))
    assert windows.squares < full.squares
    counter = FlopsCounter(of_full_attention(config))
    attention = 6 * config.head_dim * config.num_attention_heads * config.num_hidden_layers / 1e12
    less = attention * (full.squares - windows.squares)
    assert full.flops(counter) - windows.flops(counter) == pytest.approx(less, rel=1e-6)


def test_recurrent_layers_beside_windows_stay_recurrent() -> None:
    from transformers import MiniMaxConfig

    kinds = ["full_attention", "linear_attention"]
    config = MiniMaxConfig(num_hidden_layers=2, layer_types=kinds, sliding_window=512)
    assert Visible(window=512) in by_config(config)
    assert of_full_attention(config).layer_types == kinds


def test_flops_are_verls_for_replicated_rollouts() -> None:
    from transformers import Qwen3Config
    from verl.utils.flops_counter import FlopsCounter

    counter = FlopsCounter(Qwen3Config())
    rollouts = random_rollouts(0, groups=5)
    lengths = (rollouts.prompt_lens + rollouts.response_lens).tolist()
    assert replicated(rollouts).flops(counter) == pytest.approx(counter.estimate_flops(lengths, 1.0)[0], rel=1e-9)


# ---------------------------------------------------------------- trainers
CONFIG = {
    "trainer": {"v1": {"trainer_mode": "dualkv_sync", "sync": {}}, "critic_warmup": 0},
    "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 4, "shuffle": False}, "rollout": {"n": 4}},
}


def test_batch_is_cut_into_whole_groups() -> None:
    """The trainer's batch is cut as veRL's dispatch and mini-batches cut it: 2 ranks, 2 updates of 16 rollouts."""
    rollouts = random_rollouts(3, groups=8, size=4)
    tags = [
        {"prompt_len": p, "response_len": r, "seq_len": p + r}
        for p, r in zip(rollouts.prompt_lens.tolist(), rollouts.response_lens.tolist(), strict=True)
    ]
    keys = [f"a_uid-{g}_{i}_0" for i, g in enumerate(rollouts.group.tolist())]
    batch = KVBatchMeta(keys=keys, tags=tags, partition_id="train")
    trainer = object.__new__(get_trainer_cls("dualkv_sync"))
    trainer.config = OmegaConf.create(CONFIG)
    trainer.use_critic, trainer.global_steps, trainer.tokenizer = False, 1, SimpleNamespace(eos_token_id=0)
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 0, 1, 1]})
    metrics: dict[str, Any] = {}
    batch = trainer._balance_batch(batch, metrics)
    assert sorted(batch.keys) == sorted(keys)
    assert [dict(zip(keys, tags, strict=True))[key] for key in batch.keys] == batch.tags
    updates = [batch.keys[at : at + 8] for at in range(0, 32, 8)]
    assert [len({key.split("_")[1] for key in update}) for update in updates] == [2] * 4
    assert metrics["dualkv/tokens_packed_all_ranks"] == packed(rollouts).tokens
    assert 1 <= metrics["dualkv/balance_slowest_over_mean"] < 1.2
    assert metrics["global_seqlen/balanced_max"] >= metrics["global_seqlen/balanced_min"]


@pytest.mark.parametrize("name", ["one_step_off_policy.ray_trainer", "fully_async_policy.fully_async_trainer"])
def test_other_trainers_keep_groups_whole_with_use_prefix_grouper(name: str) -> None:
    """veRL's own order of a batch, cut as its dispatch and mini-batches cut it: 2 ranks, 2 updates of 16 rollouts."""
    module = import_module(f"verl.experimental.{name}")
    assert module.SeparateRayPPOTrainer._balance_batch is RayPPOTrainer._balance_batch
    trainer = object.__new__(module.SeparateRayPPOTrainer)
    trainer.use_prefix_grouper, trainer.actor_rollout_wg = True, SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    rollouts = random_rollouts(3, groups=8, size=4).select(np.arange(32))
    rollouts = rollouts.select(np.argsort(rollouts.group, kind="stable"))  # as sampled: a prompt's after each other
    lengths = torch.from_numpy(rollouts.prompt_lens + rollouts.response_lens)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    tensors = {"attention_mask": mask.long(), "group": torch.from_numpy(rollouts.group)}
    batch = DataProto.from_dict(tensors, {"uid": np.array([f"uid-{g}" for g in rollouts.group], object)})
    trainer._balance_batch(batch, metrics={})
    assert [len(set(update.tolist())) for update in batch.batch["group"].split(8)] == [2] * 4


def test_trainer_is_verls_to_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSync, "__init__", lambda self, config: setattr(self, "config", config))
    trainer = get_trainer_cls("dualkv_sync")(OmegaConf.create(CONFIG))
    assert trainer.config.trainer.v1.trainer_mode == "sync"
    shuffled = OmegaConf.merge(OmegaConf.create(CONFIG), {"actor_rollout_ref": {"actor": {"shuffle": True}}})
    with pytest.warns(UserWarning, match="dualkv: actor.shuffle spreads the rollouts of a prompt over updates"):
        get_trainer_cls("dualkv_sync")(shuffled)
    losses._warn.cache_clear()
    of_micro_batches = OmegaConf.merge(
        OmegaConf.create(CONFIG), {"actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": "geo_mean"}}}}
    )
    with pytest.warns(UserWarning, match="dualkv: actor.policy_loss.loss_mode=geo_mean adds up the means"):
        get_trainer_cls("dualkv_sync")(of_micro_batches)


# ---------------------------------------------------------------- what is refused before anything starts
OTHERS = ("veomni", "torchtitan", "automodel", "fsdp_turbo")


@pytest.mark.parametrize("strategy", OTHERS)
def test_other_strategies_say_what_to_use(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"model.model_type=dualkv packs groups on strategy fsdp, fsdp2, megatron, not on {strategy}: set actor_"
    with pytest.raises(ValueError, match=says):
        EngineRegistry.new("dualkv", strategy, model_config=None, engine_config=SimpleNamespace(strategy=strategy))
    monkeypatch.setattr(PPOTrainerSync, "__init__", lambda *_: pytest.fail("veRL's trainer was made"))
    config = {"actor_rollout_ref": {"model": {"model_type": "dualkv"}, "actor": {"strategy": strategy}}}
    with pytest.raises(ValueError, match=says):
        get_trainer_cls("dualkv_sync")(OmegaConf.merge(OmegaConf.create(CONFIG), config))


def test_every_strategy_of_verl_is_known() -> None:
    """The strategies are read from veRL's sources: most of its engines cannot be imported here."""
    engines = Path(verl.__file__).parent / "workers/engine"
    found = set()
    for source in engines.glob("*/*.py"):
        for backends in re.findall(
            r"EngineRegistry\.register\([^)]*backend=([^)]*?)(?:, device|\))", source.read_text()
        ):
            found |= set(re.findall(r'"(\w+)"', backends))
    assert found == {"fsdp", "fsdp2", "megatron", *OTHERS}


@pytest.mark.skipif(find_spec("megatron") is not None, reason="megatron-core is installed")
def test_megatron_says_what_to_install() -> None:
    says = r"^strategy=megatron .* mbridge: .* needs megatron-core 0\.16\.1 .*not installed: pip install 'dualkv\[mega"
    with pytest.raises(ModuleNotFoundError, match=says) as found:
        EngineRegistry.new("dualkv", "megatron", model_config=None, engine_config=SimpleNamespace(strategy="megatron"))
    assert isinstance(found.value.__cause__, ImportError)


LLAMA, GRANITE = transformers.LlamaConfig(head_dim=520), transformers.GraniteConfig(logits_scaling=8.0)
SMALL = transformers.Qwen3Config(num_hidden_layers=1, vocab_size=8)
LAYERS = r"layers\.0\."
OF_LOG_PROBS = "expected none: it is of log-probs$"


@pytest.mark.parametrize(
    ("model_types", "config", "given", "says"),
    [
        ("both", LLAMA, {}, rf"{LAYERS}self_attn \(LlamaAttention\) has head dim 520"),
        ("both", transformers.OlmoHybridConfig(), {}, rf"{LAYERS}linear_attn \(OlmoHybridGatedDeltaNet\) of transf"),
        ("both", GRANITE, {}, r"use_fused_kernels is True and GraniteForCausalLM .* the scale 0\.125"),
        ("both", None, {"dualkv_tree": True}, "fused_kernel_options has dualkv_tree, expected names among dualkv, "),
        ("dualkv", SMALL, {"dualkv": False}, "fused_kernel_options.dualkv is False with model.model_type=dualkv"),
        ("dualkv", SMALL, {"dualkv_keep": "products"}, "'products' with enable_gradient_checkpointing=False, where"),
        ("dualkv", transformers.Qwen3MoeConfig(), {"dualkv_batch_invariant": True}, "experts .* has products of its"),
        ("value_model", None, {"dualkv": None, "dualkv_trees": True}, r"^critic\..*dualkv_trees is set without"),
        ("value_model", SMALL, {"dualkv_canary": 50}, rf"^critic\..*dualkv_canary is 50, {OF_LOG_PROBS}"),
        ("value_model", SMALL, {"dualkv_batch_invariant": True}, rf"dualkv_batch_invariant is True, {OF_LOG_PROBS}"),
    ],
)
def test_an_engine_refuses_what_it_does_not_run_when_it_is_made(
    model_types: str, config: Any, given: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine checks options and configuration before weights are read, and before vLLM starts."""
    monkeypatch.setattr(FSDPEngineWithLMHead, "__init__", lambda *_, **__: pytest.fail("veRL's engine was made"))
    given = {name: value for name, value in ({"dualkv": True} | given).items() if value is not None}
    for model_type in ("dualkv", "value_model") if model_types == "both" else (model_types,):
        of_verl = SimpleNamespace(
            hf_config=config,
            fused_kernel_options=given,
            use_fused_kernels=config is GRANITE,
            enable_gradient_checkpointing=False,
        )
        with pytest.raises(ValueError, match=says):
            EngineRegistry.new(model_type, "fsdp2", model_config=of_verl)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ulysses_sequence_parallel_size": 2}, "together with ulysses_sequence_parallel_size=2, expected 1"),
        ({"pad_to_length": True}, "pad_to_length=True, expected False"),
        ({"use_dynamic_bsz": False}, "use_dynamic_bsz=False, expected True"),
        ({"enable_activation_offload": True}, "enable_activation_offload=True, expected False"),
        ({"mixed_precision": {"param_dtype": "fp32"}}, "_gradients is bf16 and mixed_precision.param_dtype is fp32"),
    ],
)
def test_a_walk_is_refused_beside_what_it_does_not_run_with(changed: dict[str, Any], says: str) -> None:
    found = {"ulysses_sequence_parallel_size": 1, "pad_to_length": False, "use_dynamic_bsz": True}
    found |= {"enable_activation_offload": False, "hf_config": SimpleNamespace(model_type="qwen3")}
    of_verl = SimpleNamespace(**found | {"mixed_precision": None} | changed)
    with pytest.raises(ValueError, match=says):
        walked.refuse(of_verl, of_verl, Keeping(torch.bfloat16))


def test_options_of_walks() -> None:
    assert [options.read(given).keeping for given in (None, {}, {"dualkv_walk": True})] == [None, None, Keeping()]
    assert options.read(LITTLE).keeping == Keeping(torch.bfloat16, on_host=True)


LITTLE = {"dualkv_walk": True, "dualkv_walk_gradients": "bf16", "dualkv_walk_on_host": True}
NAMES, VALUE = "fused_kernel_options has", "fused_kernel_options."


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"dualkv_tree": True}, f"{NAMES} dualkv_tree, expected names among dualkv, "),
        ({"Dualkv_trees": True}, f"{NAMES} Dualkv_trees, expected names among dualkv, "),
        ({"dual_kv_trees": True}, f"{NAMES} dual_kv_trees, expected names among dualkv, "),
        ({"duakv_walk": True}, f"{NAMES} duakv_walk, expected names among dualkv, "),
        ({"dualkv_fast": "false"}, f"{VALUE}dualkv_fast is 'false', expected true or false"),
        ({"dualkv": 1}, f"{VALUE}dualkv is 1, expected true or false"),
        ({"dualkv_batch_invariant": 1}, f"{VALUE}dualkv_batch_invariant is 1, expected true or false"),
        ({"dualkv_trees": 0}, f"{VALUE}dualkv_trees is 0, expected true, false or 1 token or more to share"),
        ({"dualkv_canary": 0}, f"{VALUE}dualkv_canary is 0, expected 1 or more"),
        ({"dualkv_keep": "atention"}, f"{VALUE}dualkv_keep is 'atention', expected one of nothing, attention"),
        ({"dualkv_keep": ["attention"]}, rf"{VALUE}dualkv_keep is \['attention'\], expected one of nothing"),
        ({"dualkv_keep_layers": 8}, f"{VALUE}dualkv_keep_layers is 8 and dualkv_keep is 'nothing', expected one of"),
        ({"dualkv_keep_layers": 0}, f"{VALUE}dualkv_keep_layers is 0, expected 1 or more"),
        ({"dualkv_walk": 8192}, f"{VALUE}dualkv_walk is 8192, expected true or false"),
        (LITTLE | {"dualkv_walk_on_host": 1}, f"{VALUE}dualkv_walk_on_host is 1, expected true or false"),
        (LITTLE | {"dualkv_walk_gradients": ["bf16"]}, rf"{VALUE}dualkv_walk_gradients is \['bf16'\], expected fp32"),
        (LITTLE | {"dualkv_walk_gradients": "fp16"}, f"{VALUE}dualkv_walk_gradients is 'fp16', expected fp32 or bf16"),
        ({"dualkv_walk_on_host": True}, f"{VALUE}dualkv_walk_on_host is set without dualkv_walk=True, expected both"),
    ],
)
def test_options_that_would_do_nothing_or_something_else_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        options.read({"impl_backend": "torch"} | given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (True, "fused_kernel_options is True, expected names and values"),
        ({"dualkv_keep_layers": "8"}, f"{VALUE}dualkv_keep_layers is '8', expected an integer"),
        ({"dualkv_keep_layers": True}, f"{VALUE}dualkv_keep_layers is True, expected an integer"),
    ],
)
def test_options_of_another_type_are_refused(given: Any, says: str) -> None:
    with pytest.raises(TypeError, match=f"^{says}"):
        options.read(given)


PACKS = {"model_type": "dualkv"}
ON_MEGATRON = {"strategy": "megatron", "model": {"fused_kernel_options": {"dualkv": True}}}


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        ("dualkv_trees", True, "^dualkv_trees is set, where nothing reads it: expected actor_rollout_ref.model.fused_"),
        ("actor_rollout_ref.fused_kernel_options.dualkv_walk", True, "^actor_rollout_ref.fused_kernel_options.dual"),
        ("actor_rollout_ref.model.override_config.dualkv_fast", True, "override_config.dualkv_fast is set, where no"),
        ("trainer.v1.dualkv_walk", True, "^trainer.v1.dualkv_walk is set, .* expected actor_rollout_ref.model.fused_k"),
        ("trainer.v1.dualkv_colocate_async.parameter_sync_step", 4, r"nothing reads it: expected trainer\.v1\.coloc"),
        ("actor_rollout_ref.model", PACKS | {"fused_kernel_options": {"dualkv_tree": True}}, "has dualkv_tree, exp"),
        ("actor_rollout_ref.model.fused_kernel_options.dualkv_trees", True, "is set without .*model_type=dualkv, exp"),
        ("critic.model.fused_kernel_options.dualkv_trees", True, "^critic.* is set without dualkv=True, expected bo"),
        ("critic", ON_MEGATRON, "packs groups on strategy fsdp and fsdp2, not on megatron: set critic.strategy=fsdp2"),
        ("critic.model.model_type", "dualkv", "set .critic.model.fused_kernel_options.dualkv=True$"),
    ],
)
def test_a_trainer_refuses_options_before_any_worker_starts(
    at: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PPOTrainerSync, "__init__", lambda *_: pytest.fail("veRL's trainer was made"))
    config = OmegaConf.merge(OmegaConf.create(CONFIG), {"actor_rollout_ref": {"actor": {"strategy": "fsdp2"}}})
    OmegaConf.update(config, at, value, force_add=True)
    with pytest.raises(ValueError, match=says):
        get_trainer_cls("dualkv_sync")(config)


def test_a_trainer_warns_where_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPOTrainerSync, "__init__", lambda *_: None)
    config = OmegaConf.create(CONFIG)
    OmegaConf.update(config, "actor_rollout_ref.model.model_type", "language_model", force_add=True)
    with pytest.warns(UserWarning, match=r"model_type is language_model, so nothing is packed: set it to dualkv"):
        get_trainer_cls("dualkv_sync")(config)
    for at, value in (
        ("actor_rollout_ref.model.model_type", "dualkv_observe"),
        ("critic", {"strategy": "fsdp", "model": {"fused_kernel_options": {"dualkv": True}}}),
    ):
        other = OmegaConf.create(CONFIG)
        OmegaConf.update(other, at, value, force_add=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            get_trainer_cls("dualkv_sync")(other)


def test_trls_value_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """veRL takes it for models that transformers does not have for token classification."""
    monkeypatch.setattr(FSDPEngineWithLMHead, "_build_module", lambda _: SimpleNamespace(v_head=None))
    with pytest.raises(ValueError, match="SimpleNamespace is TRL's model with a value head, whose rows are not packed"):
        object.__new__(DualKVCritic)._build_module()


def test_plugin_is_found_by_its_entry_point() -> None:
    found = [e.value for e in entry_points(group="verl.plugins") if e.name == "dualkv"]
    assert found == ["dualkv.integrations.verl"]
