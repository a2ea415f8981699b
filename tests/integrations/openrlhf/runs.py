"""Rollouts, and trainings with OpenRLHF's own trainer: updates of actor and critic from rollouts."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tests.integrations.openrlhf.cpu as cpu  # isort: skip

import deepspeed
import torch
import torch.distributed as dist
from openrlhf.trainer.ppo_trainer import BasePPOTrainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import ReferenceModelActor
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.utils import deepspeed as place
from openrlhf.utils import get_strategy
from openrlhf.utils.deepspeed import DeepspeedStrategy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dualkv.integrations.openrlhf import PackedStrategy
from tests.integrations import trainings
from tests.integrations.tiny import VOCAB, make_model

N = 4  # rollouts of a prompt


def save(folder: Path, architecture: str = "qwen3") -> str:
    """Saves a tiny model and a tokenizer."""
    torch.manual_seed(0)
    make_model(architecture).float().save_pretrained(folder)
    words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t3")
    names = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **names).save_pretrained(folder)
    return str(folder)


def rollouts(seed: int, groups: int, untrained: int = -1) -> list[Any]:
    """N rollouts of each prompt (:func:`trainings.rollouts`)."""
    made = []
    for one in trainings.rollouts(seed, groups, N, untrained):
        tokens, before = torch.tensor([one.prompt + one.response]), len(one.prompt) - 1
        made.append(
            Experience(
                sequences=tokens,
                attention_mask=torch.ones_like(tokens),
                action_mask=torch.tensor([[False] * before + one.trained]),
                rollout_log_probs=torch.tensor([[0.0] * before + one.log_probs]),
                prompts=[f"{seed}, {one.group}"],
                labels=[""],
                images=[None],
                mm_train_inputs=[None],
                rewards=torch.tensor([one.reward]),
                response_length=torch.tensor([len(one.response)]),
                truncated=torch.tensor([False]),
                total_length=torch.tensor([float(tokens.numel())]),
                info={"reward": torch.zeros(1)},
            )
        )
    return made


def flags(path: str, *more: str) -> list[str]:
    ranks = dist.get_world_size()
    groups = 2 * ranks
    sizes = {"rollout.batch_size": groups, "rollout.n_samples_per_prompt": N, "train.batch_size": N * groups}
    sizes |= {
        "rollout.micro_batch_size": N,
        "train.micro_batch_size": N,
        "actor.num_gpus_per_node": ranks,
    }
    found = ["--actor.model_name_or_path", path, "--reward.remote_url", "none", "--vllm.num_engines", "1"]
    found += ["--vllm.sync_backend", "gloo", "--actor.adam.lr", "1e-2", "--critic.adam.lr", "1e-2"]
    return [*found, *(word for name, size in sizes.items() for word in (f"--{name}", str(size))), *more]


def train(path: str, kind: type[DeepspeedStrategy], *more: str, updates: int = 3) -> dict[str, Any]:
    """Three updates. Returns the experiences as lists of tensors, the metrics and the weights of actor and critic."""
    args = cpu.arguments(*flags(path, *more))
    args.ds.attn_implementation = "sdpa"
    args.ds.packing_samples &= kind is PackedStrategy  # OpenRLHF's own packing needs FlashAttention
    with patch.object(place, "DeepspeedStrategy", kind):
        strategy = get_strategy(args)

    def group(decorated: Any, *others: Any) -> Any:
        worker = cpu.worker(decorated)
        worker.init_model_from_pretrained(pickle.loads(pickle.dumps(strategy)), path, *others)  # as Ray hands it over
        return cpu.Group(worker)

    actor = group(PolicyModelActor, updates, None)
    reference = group(ReferenceModelActor) if args.algo.kl.init_coef > 0 else None
    critic = group(CriticModelActor, updates) if args.critic.model_name_or_path else None
    trainer = BasePPOTrainer(strategy, actor, critic, None, reference, None, actor.worker.tokenizer)
    make, made = trainer.experience_maker.make_experience_batch, []

    def record(samples: Any) -> Any:
        found = make(samples)
        made.append(dict(sorted((i, row) for e in found for i, row in zip(e.index, rows(e), strict=True))))
        return found

    trainer.experience_maker.make_experience_batch = record
    metrics = []
    for step in range(updates):
        status, _ = trainer.train_step(rollouts(step, 2 * dist.get_world_size(), untrained=step), step)
        metrics.append({k: v for k, v in status.items() if isinstance(v, float) and "timing" not in k})
    models = {"actor": actor.worker.actor.model, **({"critic": critic.worker.critic} if critic else {})}
    return {
        "values": [values for update in made for values in update.values()],
        "metrics": metrics,
        "weights": {f"{name}: {k}": w for name, engine in models.items() for k, w in weights(engine).items()},
    }


def rows(experience: Any) -> list[torch.Tensor]:
    """[3, tokens] of each rollout: log-probs, those of the reference, and values."""
    own = experience.action_log_probs
    several = [own, *(v for v in (experience.base_action_log_probs, experience.values) if torch.is_tensor(v))]
    masks = experience.attention_mask[:, 1:].bool()
    return [torch.stack([v[i][mask] for v in several]) for i, mask in enumerate(masks)]


def weights(engine: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, weight in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            found[name] = weight.detach().clone()
    return found
