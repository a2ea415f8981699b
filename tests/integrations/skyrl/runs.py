"""Rollouts, and trainings with SkyRL's own trainer: updates of policy and critic from what a generator returned."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.integrations.skyrl import cpu  # isort: skip

import torch
import torch.distributed as dist
from skyrl.backends.skyrl_train.utils.ppo_utils import repopulate_all_registries
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from dualkv.integrations.skyrl import workers
from tests.integrations.tiny import VOCAB, make_model

N = 4  # rollouts of a prompt
STOCK = (fsdp_worker.FSDPPolicyWorkerBase, fsdp_worker.FSDPCriticWorkerBase, fsdp_worker.FSDPRefWorkerBase)
PACKED = (workers.PackedPolicyWorker, workers.PackedCriticWorker, workers.PackedRefWorker)


def save(folder: Path, **settings: Any) -> str:
    """Saves a tiny model. SkyRL's padding micro-batches have tokens below 100."""
    torch.manual_seed(0)
    make_model("qwen3", vocab_size=128, **settings).float().save_pretrained(folder)
    return str(folder)


def rollouts(seed: int, groups: int, steps: bool = False, untrained: int = -1) -> tuple[dict[str, Any], list[str]]:
    """N rollouts of each prompt, of other lengths, and the names of their prompts.

    Those of every second prompt share a turn and a tool's answer, which is not trained on. With `steps` they are
    step-wise trajectories: each turn is a sequence whose prompt is all that came before. Nothing is trained on in the
    group `untrained`.
    """
    chosen = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(4, VOCAB, (length,), generator=chosen).tolist()

    made: dict[str, list[Any]] = {
        name: []
        for name in (
            "prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "trajectory_ids",
            "is_last_step",
        )
    }  # fmt: skip
    uids = []
    for group in range(groups):
        prompt, turn, tool = text(20 + 13 * group), text(9), text(11)
        for i in range(N):
            own, reward = text(2 + 5 * i), float(torch.rand(1, generator=chosen))
            if group % 2 and steps:
                parts = [(prompt, turn, [1] * 9), (prompt + turn + tool, own, [1] * len(own))]
            elif group % 2:
                parts = [(prompt, turn + tool + own, [1] * 9 + [0] * 11 + [1] * len(own))]
            else:
                parts = [(prompt, own, [1] * len(own))]
            for at, (before, response, mask) in enumerate(parts):
                drawn = torch.randn(len(response), generator=chosen) / 10 - 4
                values = (
                    before, response, reward, [m * (group != untrained) for m in mask], drawn.tolist(),
                    TrajectoryID(f"{seed}, {group}", i), at == len(parts) - 1,
                )  # fmt: skip
                for name, value in zip(made, values, strict=True):
                    made[name].append(value)
                uids.append(f"{seed}, {group}")
    if not steps:
        made = {name: value for name, value in made.items() if name not in ("trajectory_ids", "is_last_step")}
    return made, uids


def configuration(path: str, *more: str) -> Any:
    """SkyRL's configuration of a training of 2 prompts a rank, with the words behind its command."""
    ranks = dist.get_world_size()
    words = {
        "trainer.policy.model.path": path,
        "trainer.flash_attn": "false",  # and its packing: both need a GPU
        "trainer.remove_microbatch_padding": "false",
        "trainer.gradient_checkpointing": "false",
        "trainer.bf16": "false",
        "trainer.placement.colocate_all": "false",
        "trainer.placement.colocate_policy_ref": "false",
        "trainer.placement.policy_num_gpus_per_node": ranks,
        "trainer.placement.critic_num_gpus_per_node": ranks,
        "trainer.placement.ref_num_gpus_per_node": ranks,
        "trainer.train_batch_size": 2 * ranks,
        "trainer.policy_mini_batch_size": 2 * ranks,
        "trainer.critic_mini_batch_size": 2 * ranks,
        "trainer.micro_train_batch_size_per_gpu": N,
        "trainer.micro_forward_batch_size_per_gpu": N,
        "trainer.policy.optimizer_config.lr": 3e-4,
        "trainer.critic.optimizer_config.lr": 3e-4,
        "trainer.update_epochs_per_batch": 2,
        "generator.n_samples_per_prompt": N,
        "generator.sampling_params.temperature": 0.7,
        **{
            f"trainer.{role}.fsdp_config.mixed_precision": "{param_dtype: fp32, reduce_dtype: fp32}"
            for role in ("policy", "critic", "ref")
        },
    }
    return SkyRLTrainConfig.from_cli_overrides([*(f"{name}={value}" for name, value in words.items()), *more])


def train(path: str, classes: tuple[Any, Any, Any], *more: str, updates: int = 3) -> dict[str, Any]:
    """Three updates. Returns log-probs, those of the reference and values of each, the metrics and the weights."""
    cfg = configuration(path, *more)
    repopulate_all_registries()
    steps, settings = cfg.generator.step_wise_trajectories, cfg.trainer.algorithm
    policy, critic, ref = classes
    torch.manual_seed(1)
    groups = {"policy_actor_group": cpu.Group(policy, deepcopy(cfg.trainer), path, updates)}
    if cfg.trainer.critic.model.path:
        groups["critic_actor_group"] = cpu.Group(critic, deepcopy(cfg.trainer), cfg.trainer.critic.model.path, updates)
    if settings.use_kl_loss or settings.use_kl_in_reward:
        groups["ref_actor_group"] = cpu.Group(ref, deepcopy(cfg.trainer), path)
    trainer: Any = RayPPOTrainer.__new__(RayPPOTrainer)
    vars(trainer).update(
        cfg=cfg, tokenizer=SimpleNamespace(pad_token_id=0), dispatch=WorkerDispatch(cfg, **groups), global_step=0,
        ref_model=groups.get("ref_actor_group"), reward_kl_controller=None, all_metrics={}, all_timings={},
    )  # fmt: skip
    values, metrics = [], []
    for step in range(updates):
        made, uids = rollouts(step, 2 * dist.get_world_size(), steps, untrained=step)
        made, uids = trainer.postprocess_generator_output(made, uids)
        data = trainer.fwd_logprobs_values_reward(trainer.convert_to_training_input(made, uids))
        if settings.use_kl_in_reward:
            data = trainer.apply_reward_kl_penalty(data)
        data = trainer.compute_advantages_and_returns(data)
        data.pop("rewards")
        counts = data["response_mask"].bool()
        found = (data[name] for name in ("action_log_probs", "base_action_log_probs", "values"))
        values.append(torch.stack([v[counts] for v in found if v is not None]))
        trainer.train_critic_and_policy(data)
        metrics.append({k: v for k, v in trainer.all_metrics.items() if isinstance(v, float)})
        trainer.all_metrics = {}
    models = {name.partition("_")[0]: group.worker.model for name, group in groups.items() if "ref" not in name}
    return {
        "values": values,
        "metrics": metrics,
        "weights": {f"{role}: {n}": w for role, model in models.items() for n, w in weights(model).items()},
    }


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: w.detach().full_tensor().clone() for name, w in model.named_parameters()}
