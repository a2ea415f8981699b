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
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.trainer import RayPPOTrainer

from dualkv.integrations.skyrl import workers
from tests.integrations import trainings
from tests.integrations.tiny import make_model

N = 4  # rollouts of a prompt
STOCK = (fsdp_worker.FSDPPolicyWorkerBase, fsdp_worker.FSDPCriticWorkerBase, fsdp_worker.FSDPRefWorkerBase)
PACKED = (workers.PackedPolicyWorker, workers.PackedCriticWorker, workers.PackedRefWorker)


def save(folder: Path, **settings: Any) -> str:
    """Saves a tiny model. SkyRL's padding micro-batches have tokens below 100."""
    torch.manual_seed(0)
    make_model("qwen3", vocab_size=128, **settings).float().save_pretrained(folder)
    return str(folder)


def rollouts(seed: int, groups: int, steps: bool = False, untrained: int = -1) -> tuple[dict[str, Any], list[str]]:
    """N rollouts of each prompt (:func:`trainings.rollouts`), and the names of their prompts. With `steps` they are
    step-wise trajectories: each turn is a sequence whose prompt is all that came before."""
    found: list[dict[str, Any]] = []
    for one in trainings.rollouts(seed, groups, N, untrained):
        whole, trajectory = one.prompt + one.response, TrajectoryID(f"{seed}, {one.group}", one.number)
        parts = [(len(one.prompt), len(whole))]
        if steps and one.turn:
            parts = [(len(one.prompt), len(one.prompt + one.turn)), (len(whole) - len(one.own), len(whole))]
        for begin, end in parts:
            own = slice(begin - len(one.prompt), end - len(one.prompt))
            found.append({
                "prompt_token_ids": whole[:begin], "response_ids": whole[begin:end], "rewards": one.reward,
                "loss_masks": [int(counts) for counts in one.trained[own]], "rollout_logprobs": one.log_probs[own],
                "trajectory_ids": trajectory, "is_last_step": end == len(whole),
            })  # fmt: skip
    uids = [row["trajectory_ids"].instance_id for row in found]
    names = [name for name in found[0] if steps or name not in ("trajectory_ids", "is_last_step")]
    return {name: [row[name] for row in found] for name in names}, uids


def tensors(groups: int, steps: bool = False) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Make SkyRL's tensors of rollouts: sequences and attention_mask [B, L], the number W of columns of actions, and
    loss_mask [B, W]."""
    made, _ = rollouts(0, groups, steps)
    responses, masks = made["response_ids"], made["loss_masks"]
    rewards = [[0.0] * len(response) for response in responses]
    found = convert_prompts_responses_to_batch_tensors(0, made["prompt_token_ids"], responses, rewards, masks)
    return found[0], found[1], found[2].shape[1], found[4]


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
