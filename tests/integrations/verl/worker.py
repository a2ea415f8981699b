"""One rank of veRL training workers on the CPU: runs every scenario it is given and saves what came out.

    python -m tests.integrations.verl.worker SCENARIOS.json FOLDER       (RANK, WORLD_SIZE, ... in the environment)
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 97
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # large: attention must matter
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def save_models(folder: Path) -> None:
    """Tiny models with random weights, the same every time."""
    for name, config, model in (
        ("dense", Qwen3Config(**SIZES), Qwen3ForCausalLM),
        ("one_kv_head", Qwen3Config(**SIZES | {"num_key_value_heads": 1}), Qwen3ForCausalLM),
        ("moe", Qwen3MoeConfig(**SIZES, **EXPERTS), Qwen3MoeForCausalLM),
    ):
        torch.manual_seed(0)
        model(config).save_pretrained(folder / name)


# Prompt length, response lengths. Two updates take the first and the last eight rollouts, so the third group is cut.
GROUPS = [(1, [4, 9, 1]), (23, [7, 0, 12]), (30, [3, 5, 8, 2, 6]), (5, [4, 2]), (9, [11]), (14, [6, 3])]


def rollouts(groups: list[tuple[int, list[int]]], ranks: int, rank: int) -> TensorDict:
    """The rollouts of `rank`: of each update's eight the first or the second half, where there are two ranks."""
    generator = torch.Generator().manual_seed(7)

    def draw(n: int) -> torch.Tensor:
        return torch.randint(1, VOCAB, (n,), generator=generator)

    prompts, responses, uids = [], [], []
    for g, (prompt_len, response_lens) in enumerate(groups):
        prompt = draw(prompt_len)
        for n in response_lens:
            prompts.append(prompt)
            responses.append(draw(n))
            uids.append(f"uid-{g}")
    noise = [torch.randn(3, len(r), generator=generator) for r in responses]
    mine = [i for i in range(len(prompts)) if (i % 8) * ranks // 8 == rank]

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([rows[i] for i in mine], layout=torch.jagged)

    sequences = [torch.cat(x) for x in zip(prompts, responses, strict=True)]
    ones = nested([torch.ones_like(r) for r in responses])
    data = TensorDict(
        {
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(len(s)) for s in sequences]),
            "prompts": nested(prompts),
            "responses": nested(responses),
            "response_mask": ones,
            "loss_mask": ones.clone(),
            "advantages": nested([n[0] for n in noise]),
            # Off the policy, so that ratios are clipped and the KL term is not 0.
            "old_log_probs": nested([n[1] - 4 for n in noise]),
            "ref_log_prob": nested([n[2] - 4 for n in noise]),
        },
        batch_size=[len(mine)],
    )
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor_stack(data, "uid", [uids[i] for i in mine])
    tu.assign_non_tensor(data, global_token_num=NonTensorData([len(s) for s in sequences]))
    return data


def make_worker(s: dict[str, Any], models: Path) -> Any:
    """A `TrainingWorker` with veRL's PPO loss; `s` a scenario of test_equivalence.py."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config import TrainingWorkerConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    dtype = s.get("param_dtype", "fp32")
    batching = {
        "use_dynamic_bsz": s.get("dynamic", False),
        "max_token_len_per_gpu": s.get("budget", 0),
        "micro_batch_size_per_gpu": s.get("rollouts", 4),
    }
    infer = {f"infer_{name}": value for name, value in batching.items() if name != "use_dynamic_bsz"}
    engine = FSDPEngineConfig(
        strategy=s.get("strategy", "fsdp2"),
        model_dtype="fp32",
        use_torch_compile=False,
        ulysses_sequence_parallel_size=s.get("sp", 1),
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        pad_to_length=s.get("pad_to", 0) > 0,
        pad_to_length_bucket=max(s.get("pad_to", 0), 1),
        **s.get("engine", {}),
        **batching,
        **infer,
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, lr_warmup_steps=0, weight_decay=0.0)
    actor = FSDPActorConfig(
        strategy=engine.strategy,
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=4,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coeff=0.01,
        fsdp_config=engine,
        optim=optimizer,
        **s.get("actor", {}),
    )
    fused = s.get("fused")
    model = HFModelConfig(
        path=str(models / s.get("model", "dense")),
        load_tokenizer=False,
        use_remove_padding=s.get("remove_padding", True),
        enable_gradient_checkpointing=s.get("checkpointing", True),
        override_config={"attn_implementation": "sdpa"},
        use_fused_kernels=fused is not None,
        fused_kernel_options={"impl_backend": fused},
        **s.get("model_options", {}),
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="dualkv" if s["packed"] else "language_model",
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=actor))
    return worker


def run(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Log-probs and entropy, then two updates; every rank gives what veRL collects from it."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    torch.manual_seed(1)
    worker = make_worker(s, models)
    engine = worker.engine
    data = rollouts(s.get("groups", GROUPS), engine.get_data_parallel_size(), engine.get_data_parallel_rank())
    tu.assign_non_tensor(data, temperature=s.get("temperature", 0.8), calculate_entropy=True, **s.get("settings", {}))

    scored = data.clone()
    tu.assign_non_tensor(scored, compute_loss=False)
    scored = worker.infer_batch(scored)
    scored = scored.get() if hasattr(scored, "get") and not isinstance(scored, TensorDict) else scored
    found: dict[str, Any] = {}
    if scored is not None:
        for name in ("log_probs", "entropy"):
            found[name] = response_from_nested(scored[name], data["response_mask"]).values()
        found["infer_metrics"] = dict(tu.get(scored, "metrics"))

    size = 8
    tu.assign_non_tensor(
        data, mini_batch_size=size, global_batch_size=size, seed=1, dataloader_kwargs={"shuffle": False}
    )
    trained = worker.train_mini_batch(data)
    if trained is not None:
        found["metrics"] = {
            k: float(torch.tensor(v).float().mean()) for k, v in tu.get(trained, "metrics").items() if k != "lr"
        }
    found["weights"] = weights(engine.module)
    return found


def weights(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = module.state_dict()
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).float().clone() for k, v in state.items()}


def main(scenarios: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, scenario in json.loads(scenarios.read_text()).items():
        found: dict[str, Any] = {}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                found = EXTRA.get(scenario.get("run", ""), run)(scenario, folder)
            except Exception as error:
                found["error"] = f"{type(error).__name__}: {error}"
                if dist.get_world_size() > 1:  # the others wait for this rank: nothing more can run
                    torch.save(found, folder / f"{name}.{dist.get_rank()}")
                    raise
        found["warnings"] = [str(w.message) for w in said if "dualkv" in str(w.message)]
        torch.save(found, folder / f"{name}.{dist.get_rank()}")
    dist.barrier()
    dist.destroy_process_group()


EXTRA: dict[str, Callable[[dict[str, Any], Path], dict[str, Any]]] = {}

if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
