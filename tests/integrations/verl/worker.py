"""Ranks of veRL's training workers on the CPU: each runs the scenarios it is given and saves what came out of each.

A scenario is a dictionary of settings, each with a default (see where they are read); `run` names the function.
"""

from __future__ import annotations

import json
import logging
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import verl
from hydra import compose, initialize_config_dir
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from transformers import AutoModelForTokenClassification
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import (
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import no_padding_2_padding

import dualkv
from dualkv import branches
from dualkv.data.memory import Memory
from dualkv.data.planning import MemoryPlan, PlannedBatch
from dualkv.integrations import patching
from dualkv.integrations.verl import options, walked
from dualkv.integrations.verl.engine import restore_attention
from dualkv.ops import reference
from dualkv.prefixes import SharedPrefixes
from tests.integrations.doubled import double_throughout
from tests.integrations.verl.rollouts import MODELS, UPDATE, make_rollouts, nested
from tools.bench import verl as bench_verl

SCORES = ("log_probs", "entropy", "sum_pi_squared", "values")
FORWARDS = {model: model.forward for model, _ in MODELS.values()}


def _of_fsdp(s: dict[str, Any], batching: dict[str, Any], actor: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Configurations of the engine, its optimizer and the actor."""
    dtype = s.get("param_dtype", "fp32")
    engine = FSDPEngineConfig(
        strategy=s.get("strategy", "fsdp2"),
        model_dtype="fp32",
        use_torch_compile=False,
        use_dynamic_bsz="budget" in s,
        ulysses_sequence_parallel_size=s.get("sp", 1),
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        pad_to_length="pad_to" in s,
        pad_to_length_bucket=s.get("pad_to", 1),
        **batching,
        **s.get("engine", {}),
    )
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10, lr_warmup_steps=0, weight_decay=0.0)
    return engine, optimizer, FSDPActorConfig(strategy=engine.strategy, fsdp_config=engine, optim=optimizer, **actor)


def megatron() -> Any:
    """Import megatron-core where a scenario needs it: not every environment has it."""
    return import_module("tests.integrations.verl_megatron.cpu")


def make_worker(s: dict[str, Any], models: Path) -> Any:
    """A `TrainingWorker` with veRL's PPO loss, or as a critic with its value loss."""
    for model, forward in FORWARDS.items():
        model.forward = forward  # veRL puts fused heads into the class
    batching = {"max_token_len_per_gpu": s.get("budget", 0), "micro_batch_size_per_gpu": s.get("rollouts", 4)}
    batching |= {f"infer_{name}": value for name, value in batching.items()}
    of_actor = {
        "rollout_n": 4,
        "ppo_micro_batch_size_per_gpu": 4,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coeff": 0.01,
        "policy_loss": PolicyLossConfig(loss_mode=s.get("loss", "vanilla")),
        "loss_agg_mode": s.get("mean", "token-mean"),
    }
    make = megatron().configurations if s.get("strategy") == "megatron" else _of_fsdp
    engine, optimizer, actor = make(s, batching, of_actor)
    fused, is_critic = s.get("fused"), s.get("model") == "critic"
    model = HFModelConfig(
        path=str(models / (s.get("model", "dense") + "-fp64" * s.get("fp64", False))),
        load_tokenizer=False,
        use_remove_padding=s.get("remove_padding", True),
        enable_gradient_checkpointing=s.get("checkpointing", True),
        override_config={"attn_implementation": s.get("attention", "sdpa")},
        use_fused_kernels=fused is not None,
        fused_kernel_options={"impl_backend": fused, "dualkv_keep": s.get("keep", "nothing")}
        | ({"dualkv_keep_layers": s["keep_layers"]} if "keep_layers" in s else {})
        | ({"dualkv_trees": s["trees"]} if "trees" in s else {})
        | ({"dualkv_fast": s["fast"]} if "fast" in s else {})
        | ({"dualkv_canary": s["canary"]} if "canary" in s else {})
        | ({"dualkv_batch_invariant": s["equal_bits"]} if "equal_bits" in s else {})
        | ({"dualkv_walk": True, "dualkv_walk_on_host": s.get("on_host", False)} if "walk" in s else {})
        | ({"dualkv": s["packed"]} if is_critic else {}),
        lora_rank=s.get("lora", 0),
    )
    saved = ["model", "optimizer", "extra"]
    if make is not _of_fsdp:
        # This engine of veRL asks the tokenizer, and saves it; "extra" is the state of CUDA's random numbers.
        model.tokenizer = SimpleNamespace(pad_token_id=0, save_pretrained=lambda _: None)
        saved.remove("extra")
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="value_model" if is_critic else "dualkv" if s["packed"] else s.get("type", "language_model"),
            model_config=model,
            engine_config=engine,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(save_contents=saved, load_contents=saved),
        )
    )
    # veRL loads a critic with FlashAttention, which needs a GPU.
    load, sdpa = AutoModelForTokenClassification.from_pretrained, {"attn_implementation": "sdpa"}
    with patch.object(AutoModelForTokenClassification, "from_pretrained", lambda **kwargs: load(**kwargs | sdpa)):
        worker.reset()
    if not s["packed"]:
        restore_attention()  # veRL's own attention of Qwen2.5-VL needs FlashAttention
    loss = partial(ppo_loss, config=actor)
    if is_critic:
        critic = FSDPCriticConfig(strategy=engine.strategy, ppo_micro_batch_size_per_gpu=4, optim=optimizer)
        loss = partial(value_loss, config=critic)
    worker.set_loss_fn(loss)
    return worker


def rollouts_of(s: dict[str, Any], worker: Any) -> TensorDict:
    return make_rollouts(s, worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank())


def score(worker: Any, data: TensorDict) -> dict[str, Any]:
    """Log-probs and entropy, or values, [N, Rmax], 0 behind each response; empty if veRL takes none of this rank."""
    data = data.clone()
    tu.assign_non_tensor(data, compute_loss=False)
    found = worker.infer_batch(data)
    if found is None:
        return {}
    values = {name: no_padding_2_padding(found[name], data) for name in SCORES if name in found}
    return values | {"infer_metrics": numbers(tu.get(found, "metrics"))}


def train(worker: Any, data: TensorDict) -> dict[str, float]:
    """One update for every eight rollouts of all ranks; the metrics that veRL collects."""
    data = data.clone()
    tu.assign_non_tensor(
        data, mini_batch_size=UPDATE, global_batch_size=UPDATE, seed=1, dataloader_kwargs={"shuffle": False}
    )
    found = worker.train_mini_batch(data)
    return {} if found is None else numbers(tu.get(found, "metrics"))


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The mean of each metric over ranks and updates."""
    flat = {name: torch.tensor(value).float().reshape(-1) for name, value in metrics.items() if value is not None}
    return {name: float(value.mean()) for name, value in flat.items()}


def weights(worker: Any) -> dict[str, torch.Tensor]:
    if worker.engine_config.strategy == "megatron":
        return megatron().weights(worker)
    state = worker.engine.module.state_dict()
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).float().clone() for k, v in state.items()}


@contextmanager
def in_fp64() -> Iterator[None]:
    """Compute in fp64 whatever veRL, which has no fp64, and transformers compute in fp32."""
    torch.storage._dtype_to_storage_type_map()  # pickles of tensors read dtypes from this table, made by the first one
    sums = patch.dict(options.SUMS, fp32=torch.float64)
    with double_throughout(), sums, patch.object(branches, "_SUMS", [*branches._SUMS, torch.float64]):
        yield


def walk_large(shared: SharedPrefixes, memory: Memory, min_shared: int = 1) -> MemoryPlan:
    """Walk every tree that is no micro-batch, where the planner would cut trees so small."""
    starts = np.flatnonzero(shared.common == 0)
    trees = [shared.order[a:b] for a, b in zip(starts, [*starts[1:], len(shared)], strict=True)]
    rows = [shared.select(tree).tokens for tree in trees]
    walks = [n * memory.row.recomputed > memory.bytes for n in rows]
    made = [
        PlannedBatch(tree.tolist(), "walked" if walk else "packed", min_shared, n)
        for tree, n, walk in zip(trees, rows, walks, strict=True)
    ]
    return MemoryPlan(made, 0.0, [])


# ---------------------------------------------------------------- scenarios: on all ranks, each gives what it has
def both(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Log-probs and entropy, then two updates."""
    # Walks of as many rows as micro-batches, whatever weights these models have.
    planner = patch.multiple(walked, plan_shared=walk_large, MOST=1.0) if s.get("walk") == "large" else nullcontext()
    compiler = patch.object(torch, "compile", partial(torch.compile, backend="eager"))  # kernels are the GPU suite's
    with compiler, planner:
        worker = make_worker(s, models)
        data = rollouts_of(s, worker)
        found: dict[str, Any] = {"before": weights(worker), **score(worker, data)}
        with patch.object(reference, "forward", wraps=reference.forward) as attention:
            found["metrics"] = train(worker, data)
    modules = worker.engine.module.modules() if s.get("fast") else ()
    compiled = sum("forward" in vars(module) for module in modules)
    return found | {"weights": weights(worker), "attention_calls": attention.call_count, "compiled": compiled}


def replayed(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Run an update with routers that replay routes: those of the old log-probs (R2), or drawn ones (R3)."""
    worker = make_worker(s, models)
    data = rollouts_of(s, worker)
    tu.assign_non_tensor(data, enable_routing_replay=True)
    found: dict[str, Any] = {"before": weights(worker)}
    if s["router_replay"] == "R3":
        data["routed_experts"] = drawn_routes(s, data)
    else:
        scoring = data.clone()
        tu.assign_non_tensor(scoring, compute_loss=False)
        rank, recorded = worker.engine.get_data_parallel_rank(), worker.infer_batch(scoring)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        found_here = None if recorded is None else recorded["routed_experts"]
        dist.all_gather_object(of_ranks, (rank, found_here))  # veRL's trainer hands them on
        data["routed_experts"] = next(x for of, x in of_ranks if of == rank and x is not None)
    found |= score(worker, data)
    return found | {"metrics": train(worker, data), "weights": weights(worker)}


def not_routed(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Run routers that are to replay routes, without any routes."""
    worker = make_worker(s, models)
    data = rollouts_of(s, worker)
    tu.assign_non_tensor(data, enable_routing_replay=True)
    return score(worker, data)


def drawn_routes(s: dict[str, Any], data: TensorDict) -> torch.Tensor:
    """Draw two of four experts for each row and layer; equal at the shared rows of prompts, but for the rollouts of
    `s["differing"]`. Every other rollout has none for its last row, as inference engines record them."""
    found = []
    prompts, rows = ([len(x) for x in data[name].unbind()] for name in ("prompts", "input_ids"))
    for i, (prompt, count) in enumerate(zip(prompts, rows, strict=True)):
        parts = [(prompt + 1000 * (i in s.get("differing", ())), prompt - 1), (100 + i, count - prompt + 1 - i % 2)]
        draws = [torch.rand(n, 2, 4, generator=torch.Generator().manual_seed(seed)) for seed, n in parts]
        found.append(torch.cat(draws).topk(2).indices.short())
    return nested(found)


def observed(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Run `both` with veRL's engine that reports what packing would save in four training calls."""
    seen: list[Any] = []

    def observe(*args: Any, **kwargs: Any) -> None:
        seen.append(dualkv.observe(*args, 4, report=said.append, **kwargs))

    said: list[str] = []
    with patch("dualkv.integrations.verl.observed.observe", observe):
        found = both(s, models)
    return found | {"report": said, "rows": [f().gain.rows for f in (seen[0].as_they_come, seen[0].together)]}


def scored(s: dict[str, Any], models: Path) -> dict[str, Any]:
    worker = make_worker(s, models)
    return score(worker, rollouts_of(s, worker))


def old_and_new(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Log-probs by micro-batches of several budgets, then two updates by those of the worker, then one more."""
    worker = make_worker(s, models)
    data = rollouts_of(s, worker)
    if "lora" in s:
        train(worker, data)  # before, adapters add zeros
    scores = []
    for budget in s["budgets"]:
        some = data.clone()
        tu.assign_non_tensor(some, use_dynamic_bsz=True, max_token_len_per_gpu=budget)
        scores.append(score(worker, some))
    lens = [len(x) for x in data["responses"].unbind()]
    data["old_log_probs"] = nested([x[:n] for x, n in zip(scores[0]["log_probs"], lens, strict=True)])
    found = {"metrics": train(worker, data), "metrics_later": train(worker, data)}
    products = {name: x for name, x in worker.engine.module.named_modules() if isinstance(x, nn.Linear)}
    fixed = {name for name, x in products.items() if getattr(x, patching.INVARIANT, False)}
    return {**found, "scores": scores, "products": len(products), "others": sorted(products.keys() - fixed)}


def planted(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """A layer that reads its whole row, and a canary."""
    worker = make_worker(s, models)
    layer = worker.engine.module.get_decoder().layers[0]
    layer.register_forward_hook(lambda _m, _a, out: out + 0.5 * out.mean(1, keepdim=True))
    return {"metrics": train(worker, rollouts_of(s, worker))}


def multimodal(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """An image of which the model knows nothing, at the rank `at`: None is passed on to the model."""
    worker = make_worker(s, models)
    data = rollouts_of(s, worker)
    inputs: list[dict[str, Any]] = [{} for _ in range(len(data))]
    if worker.engine.get_data_parallel_rank() == s.get("at", 0):
        inputs[0] = {"pixel_values": torch.zeros(1)}
    tu.assign_non_tensor_stack(data, "multi_modal_inputs", inputs)
    worker.engine.module.register_forward_pre_hook(_without_pixels, with_kwargs=True, prepend=True)
    return score(worker, data)


def _without_pixels(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name != "pixel_values"}


def prompt_in_loss(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """Supervised fine-tuning on all tokens but the first."""
    worker = make_worker(s, models)
    worker.set_loss_fn(partial(sft_loss, config=None))
    data = rollouts_of(s, worker)
    data["loss_mask"] = nested([(torch.arange(len(x)) > 0).long() for x in data["input_ids"].unbind()])
    return {"metrics": train(worker, data), "weights": weights(worker)}


def loss_of_ones_own(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """A loss on whole rows of log-probs: of all tokens, or of those that `s["selected"]` selects, the responses'."""
    worker = make_worker(s, models)

    def loss(model_output: Any, data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, Any]]:
        values, ends = model_output["log_probs"].values(), data["input_ids"].offsets()[1:].tolist()
        predicts = torch.zeros(len(values), dtype=torch.bool)
        for end, length in zip(ends, [len(x) for x in data["responses"].unbind()], strict=True):
            predicts[end - length - 1 : end - 1] = True
        if s["selected"]:
            values = torch.where(predicts, values, 0)
        return -values.sum() / data["batch_num_tokens"] * data["dp_size"], {}

    worker.set_loss_fn(loss)
    return {"metrics": train(worker, rollouts_of(s, worker))}


def restarted(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """A worker that trains, saves and trains on, and another one, `after`, that goes on from what it saved."""
    saved = str(models / "checkpoint")
    worker = make_worker(s, models)
    data = rollouts_of(s, worker)
    train(worker, data)
    worker.save_checkpoint(saved)
    going_on = train(worker, data)
    found = {"weights": weights(worker), "metrics": going_on}
    other = make_worker(s | s.get("after", {}), models)
    if other.engine_config.strategy == "megatron":
        train(other, data)  # megatron-core reads torch's AdamW into an optimizer that has made a step only
    with torch.no_grad():  # megatron-core copies into weights that are not in half precision
        other.load_checkpoint(saved)
    if other.engine_config.strategy == "megatron":
        # megatron-core gives all weights one tensor for the number of steps, which torch's AdamW raises for each.
        for state in other.engine.optimizer.chained_optimizers[0].optimizer.state.values():
            state["step"] = state["step"].clone()
    return found | {"metrics_after": train(other, data), "weights_after": weights(other)}


def from_configuration(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """The engines that veRL makes from `s["overrides"]` of its trainer's configuration."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        paths = [f"actor_rollout_ref.model.path={models / 'dense'}", f"critic.model.path={models / 'critic'}"]
        config = compose("ppo_trainer", [*s["overrides"], *paths])
    found = {}
    # The reference policy lies in pinned memory, which only machines with a GPU have.
    pinned = patch("verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy", lambda pin_memory: OffloadPolicy())
    for role in ("actor", "ref"):
        worker = ActorRolloutRefWorker(config.actor_rollout_ref, role)
        with pinned:
            worker.init_model()
        engine = getattr(worker, role).engine
        found[role] = f"{type(engine).__name__} {type(engine.module).__name__}"
    for packed in (True, False):  # as veRL's trainers make one, up to the engine
        critic = omega_conf_to_dataclass(config.critic)
        critic.model.fused_kernel_options["dualkv"] &= packed
        critic.model.model_type = "value_model"
        engine = EngineRegistry.new(
            model_type="value_model",
            backend=critic.engine.strategy,
            model_config=critic.model,
            engine_config=critic.engine,
            optimizer_config=critic.optim,
            checkpoint_config=critic.checkpoint,
        )
        found[f"critic, packed={packed}"] = f"{type(engine).__name__} {engine.model_config.model_type}"
    return found


def profiled(s: dict[str, Any], models: Path) -> dict[str, Any]:
    """veRL's ranges in a trace of scores and two updates, and how often each occurs."""
    worker = make_worker(s, models)
    data = rollouts_of(s, worker)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        score(worker, data)
        train(worker, data)
    assert trace.profiler is not None  # `trace.events()` takes seconds
    names = (event.name() for event in trace.profiler.kineto_results.events())
    return {"ranges": Counter(name for name in names if "_batch" in name)}


def bench(s: dict[str, Any], _models: Path) -> dict[str, Any]:
    """Rows of the benchmark, as the command line reads them."""
    rows = [bench_verl.settings_of(row, bench_verl.Settings) for row in s["rows"]]
    return {"rows": list(bench_verl.measure_all(rows, bench_verl.build, s.get("distance")))}


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def main(rank: int, scenarios: str, folder: str) -> None:
    listed = json.loads(Path(scenarios).read_text())
    with megatron().on_cpu() if "megatron" in Path(scenarios).name else nullcontext():
        run_all(listed, Path(folder))


def run_all(scenarios: dict[str, Any], folder: Path) -> None:
    # FSDP1 broadcasts the weights of its first rank from GPUs only; all ranks load the same file here.
    torch.distributed.fsdp._init_utils._check_module_states_for_sync_module_states = lambda _: None
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, scenario in scenarios.items():
        found: dict[str, Any] = {}
        log = _Log()
        logging.getLogger("dualkv").addHandler(log)
        torch.manual_seed(1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")
            try:
                with in_fp64() if scenario.get("fp64") else nullcontext():
                    found = globals()[scenario.get("run", "both")](scenario, folder)
            except Exception as error:
                traceback.print_exc()  # in the log
                found["error"] = f"{type(error).__name__}: {error}"
        logging.getLogger("dualkv").removeHandler(log)
        found["said"] = [text for text in (*map(str, (w.message for w in said)), *log.said) if "dualkv" in text]
        torch.save(found, folder / f"{name}.{rank}")
        dist.barrier()  # a rank that waits in a collective, for one that raised, ends here with an error
    dist.destroy_process_group()
