"""Policy updates of veRL on this machine's GPUs, its own engine or packed groups:

    torchrun --nproc-per-node 4 -m tools.bench.verl --engine dualkv --model qwen3-8b --max-tokens 73760 --json ours.json
    torchrun --nproc-per-node 4 -m tools.bench.verl --engine verl --model qwen3-8b --micro-batch 8 --json verl.json

    torchrun --nproc-per-node 1 -m tools.bench.verl --trace trace-tau2-0-n4-x0.5 --max-tokens 65536 --json traces.json

`--rows` runs many of them one after another; a row that fails (that does not fit, say) records why. A trace is one of
`dualkv trees`: the turns that it trains are responses, with tool outputs in their masks, and the packed engine shares
everything that they have in common. veRL's own engine then needs `--attention ragged`. The worker is veRL's own, with
veRL's loss, without sampling and without a Ray cluster: prompts, responses and weights are random. (veRL 0.9.1's engine
takes a fused head with FSDP2 only where it is tied to the embedding; here the head is gathered for it.)
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import typer
from accelerate import init_empty_weights
from tensordict import NonTensorData, TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, TrainingWorkerConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

from dualkv.bench import traces
from dualkv.bench.run import in_words
from dualkv.integrations.verl import MODEL_TYPE, work
from dualkv.integrations.verl.work import rollouts_by_tag
from dualkv.models import CONFIGS
from tools.bench import harness, ragged, stock_attention
from tools.bench.random_weights import random_model, random_shards, save_config
from tools.bench.record import JsonPath, Record


class Engine(StrEnum):
    VERL = "verl"
    DUALKV = "dualkv"


Groups = Annotated[int, typer.Option(help="Prompts in an update of each data-parallel rank.")]
MaxTokens = Annotated[int | None, typer.Option(help="Or tokens, packed ones with packed groups.")]
Untimed = Annotated[int, typer.Option(help="Whole updates before them, where the first one of a row compiles.")]
Rows = Annotated[
    Path | None, typer.Option(help="A JSON list of options, each laid over those given here; run one by one.")
]


GRPO: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.001}  # beside veRL's defaults, so the mean over tokens


@dataclass(frozen=True, kw_only=True)
class Common:
    """The settings of a measurement on any strategy."""

    engine: Annotated[Engine, typer.Option(help="veRL's own, or packed groups.")] = Engine.DUALKV
    model: harness.Model = "tiny"
    layers: harness.AllLayers = None
    groups: Groups = 1
    responses: harness.Responses = 32
    prompt_len: harness.PromptLen = 8192
    response_len: harness.ResponseLen = 2048
    micro_batch: Annotated[int | None, typer.Option(help="Rollouts a micro-batch.")] = None
    max_tokens: MaxTokens = None
    attention: str = "fa2"
    head: str = "torch"
    dtype: Annotated[str, typer.Option(help="Of the computation: bf16 or fp32.")] = "bf16"
    updates: Annotated[int, typer.Option(help="To measure; a fresh worker makes a small one before.")] = 3
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, constant.")] = 1e-6
    trace: str | None = None
    untimed: Untimed = 0

    def same_worker(self, other: Common) -> bool:
        """Whether the worker of `other` serves these settings: they differ in rollouts and micro-batches alone."""
        free = ("groups", "responses", "micro_batch", "max_tokens", "updates", "untimed", "trace")
        if (self.trace is None) != (other.trace is None):
            return False
        return replace(other, **{name: getattr(self, name) for name in free}) == self


@dataclass(frozen=True, kw_only=True)
class Settings(Common):
    """The settings of a measurement with FSDP2."""

    attention: Annotated[
        str,
        typer.Option(
            help=f"Of veRL's own engine: {', '.join(stock_attention.CALLS)}, ragged, or transformers' name of one."
        ),
    ] = "fa2"
    head: Annotated[str, typer.Option(help="veRL's unfused, torch, triton or liger.")] = "torch"
    liger: Annotated[bool, typer.Option(help="Liger's norms, rotary embedding and MLP.")] = False
    checkpointing: Annotated[bool, typer.Option(help="Compute layers again in the backward.")] = True
    keep: Annotated[str, typer.Option(help="But not attention, or products; with packed groups.")] = "nothing"
    fast: Annotated[bool, typer.Option(help="Fused norms, rotary embeddings and MLPs; with packed groups.")] = False
    sequence_parallel: Annotated[int, typer.Option(help="Ulysses degree; with packed groups.")] = 1
    walk: Annotated[bool, typer.Option(help="Groups larger than --max-tokens; update once with --untimed 1.")] = False
    trace: Annotated[str | None, typer.Option(help="Rollouts of this trace, packed as trees.")] = None
    trees: bool = False
    batch_invariant: bool = False


Kind = TypeVar("Kind", bound=Common)
Check = Callable[[Any, Any], dict[str, Any]]  # of settings and a worker


PATCHED: dict[Any, tuple[dict[str, Any], Any]] = {}


def restore(cls: Any) -> None:
    """Takes out what veRL and Liger put into a model's class and module: fused heads, norms, rotary embedding."""
    modeling = sys.modules[cls.__module__]
    names, cls.forward = PATCHED.setdefault(cls, (dict(vars(modeling)), cls.forward))
    vars(modeling).update(names)


def build(s: Settings) -> Any:
    """The worker of this rank, for a model with random weights."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        config = save_config(s.model, s.layers, Path(folder))
        restore(AutoModelForCausalLM._model_mapping[type(config)])
        torch.manual_seed(0)  # every worker has the same weights
        patches.enter_context(mock.patch.object(AutoModelForCausalLM, "from_pretrained", random_model))
        if not config.tie_word_embeddings:
            for name, fake in (
                ("get_init_weight_context_manager", lambda **_: init_empty_weights),
                ("fsdp2_load_full_state_dict", random_shards),
            ):
                patches.enter_context(mock.patch.object(transformer_impl, name, fake))
        return make_worker(s, Path(folder))


def gather_head(module: Any) -> None:
    """A fused head reads the head's weight without calling it, where FSDP2 would gather it."""
    head = module.get_output_embeddings()

    def gather(*_: Any) -> None:
        head.unshard()

    if isinstance(head, FSDPModule):
        module.get_decoder().register_forward_hook(gather)


# Any ratio counts: where clipping decides, tokens at its bound would make other gradients in each dtype.
UNCLIPPED = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}


def set_loss(worker: Any, s: Common, **changed: Any) -> None:
    """veRL's loss for the rollouts of `s`, with some settings of its own."""
    of = {"strategy": worker.engine_config.strategy, "rollout_n": s.responses, "ppo_micro_batch_size_per_gpu": 1}
    worker.set_loss_fn(partial(ppo_loss, config=ActorConfig(**of, **GRPO | changed)))


def make_worker(s: Settings, folder: Path) -> Any:
    """veRL's worker of this rank for the model in `folder`, with veRL's loss."""
    attention = s.attention
    if attention == "ragged":
        attention = ragged.NAME
    elif attention in stock_attention.CALLS:
        attention = stock_attention.register(attention, s.prompt_len + s.response_len)
    batching = {"max_token_len_per_gpu": s.max_tokens, "micro_batch_size_per_gpu": s.micro_batch}
    fsdp = FSDPEngineConfig(
        strategy="fsdp2",
        model_dtype="fp32",
        mixed_precision={"param_dtype": s.dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_dynamic_bsz=s.max_tokens is not None,
        ulysses_sequence_parallel_size=s.sequence_parallel,
        use_no_sync_for_gradient_accumulation=True,  # gradients are reduced once, at an update's last micro-batch
        **batching,
        **{f"infer_{name}": value for name, value in batching.items()},
    )
    optimizer = FSDPOptimizerConfig(lr=s.learning_rate, total_training_steps=100, lr_warmup_steps=0)
    model = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        enable_gradient_checkpointing=s.checkpointing,
        override_config={"attn_implementation": attention},
        use_liger=s.liger,
        use_fused_kernels=s.head != "unfused",
        fused_kernel_options={
            "impl_backend": s.head,
            "dualkv_keep": s.keep,
            "dualkv_trees": s.trees or s.trace is not None,
            "dualkv_batch_invariant": s.batch_invariant,
            "dualkv_walk": s.walk,
            "dualkv_fast": s.fast,
        },
    )
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type=MODEL_TYPE if s.engine is Engine.DUALKV else "language_model",
            model_config=model,
            engine_config=fsdp,
            optimizer_config=optimizer,
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    if s.engine is Engine.VERL and s.head != "unfused":
        gather_head(worker.engine.module)
    set_loss(worker, s)
    return worker


FEW = 2  # rollouts of the update that is not measured
RESERVE = 16 << 30  # bytes, for streams beside the default one and for libraries that do not ask PyTorch


def make_rollouts(s: Common, vocab: int, rank: int) -> TensorDict:
    """Random rollouts of one data-parallel rank, without padding; of a trace the same on every rank."""
    generator = torch.Generator().manual_seed(rank)
    if s.trace is not None:
        found = traces.split(s.trace, vocab)
        prompts, responses, masks = ([torch.from_numpy(x) for x in listed] for listed in zip(*found, strict=True))
    else:
        n = s.groups * s.responses
        rows = torch.randint(vocab, (s.groups, s.prompt_len), generator=generator).repeat_interleave(s.responses, 0)
        prompts = list(rows)
        responses = list(torch.randint(vocab, (n, s.response_len), generator=generator))
        masks = [torch.ones_like(response) for response in responses]
    return make_batch(prompts, responses, masks, torch.randn(len(prompts), generator=generator))


def make_batch(
    prompts: list[torch.Tensor], responses: list[torch.Tensor], masks: list[torch.Tensor], advantages: torch.Tensor
) -> TensorDict:
    """veRL's batch without padding, of B times [P_i] and [R_i] with masks of the tokens that count, and advantages [B];
    with old log-probs that are nearly those of random weights."""
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    tensors: dict[str, list[torch.Tensor]] = {
        "input_ids": [torch.cat(pair) for pair in zip(prompts, responses, strict=True)],
        "position_ids": [torch.arange(length) for length in lengths],
        "prompts": prompts,
        "responses": responses,
        "response_mask": masks,
        "loss_mask": masks,
        "advantages": [a.repeat(len(r)) for a, r in zip(advantages, responses, strict=True)],
        "old_log_probs": [torch.full((len(r),), -12.0) for r in responses],
        "ref_log_prob": [torch.full((len(r),), -12.0) for r in responses],
    }
    nested = {name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in tensors.items()}
    data = TensorDict(nested, batch_size=[len(prompts)])
    tu.assign_non_tensor(data, temperature=1.0, calculate_entropy=False, global_token_num=NonTensorData(lengths))
    return data


def one_update(s: Common, data: TensorDict) -> TensorDict:
    """The rollouts, as one batch that a worker takes."""
    tu.assign_non_tensor(data, mini_batch_size=len(data), global_batch_size=len(data), use_dynamic_bsz=True)
    tu.assign_non_tensor(data, max_token_len_per_gpu=s.max_tokens, dataloader_kwargs={"shuffle": False})
    return data


def whole_batch(s: Common, worker: Any) -> TensorDict:
    """The rollouts of `s`, as one batch that the worker takes."""
    vocab = worker.model_config.hf_config.vocab_size
    return one_update(s, make_rollouts(s, vocab, worker.engine.get_data_parallel_rank()))


def log_probs_of(data: TensorDict, worker: Any, output: str = "log_probs") -> list[torch.Tensor]:
    """Compute the log-probs (or the entropy) of the responses of a batch, fp32, by the worker's forward; none on a rank
    whose output veRL does not take."""
    data = data.copy()
    tu.assign_non_tensor(data, compute_loss=False)
    lens = (data[name].offsets().diff().tolist() for name in ("prompts", "responses"))
    found = worker.infer_batch(data)
    rows = zip(found[output].unbind(), *lens, strict=True) if found is not None else ()
    return [row[p - 1 : p - 1 + r].float() for row, p, r in rows]


def log_probs_on(s: Common, worker: Any) -> list[torch.Tensor]:
    """Compute the log-probs of the responses of `s` (:func:`log_probs_of`)."""
    return log_probs_of(whole_batch(s, worker), worker)


def set_log_probs(data: TensorDict, log_probs: list[torch.Tensor], *names: str) -> None:
    given = [x.to(data["responses"].device) for x in log_probs]
    for name in names:
        data[name] = torch.nested.as_nested_tensor(given, layout=torch.jagged)


def gradients_on(
    s: Common, worker: Any, old_log_probs: list[torch.Tensor], on_host: bool = False
) -> dict[str, torch.Tensor]:
    """Compute the gradients of this rank's share of the parameters, fp32, after the rollouts of `s`, without clipping;
    no step is made.

    With the model's own `old_log_probs` ratios are near 1; with others a few tokens could be most of the gradient.
    """
    set_loss(worker, s, **UNCLIPPED)
    engine, found = worker.engine, dict[str, torch.Tensor]()
    data = whole_batch(s, worker)
    set_log_probs(data, old_log_probs, "old_log_probs", "ref_log_prob")

    def keep() -> float:
        for name, weight in engine.module.named_parameters():
            gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            where = "cpu" if on_host else gradient.device
            found[name.replace("_checkpoint_wrapped_module.", "")] = gradient.to(where, torch.float32, copy=True)
        engine.optimizer_zero_grad()
        return 0.0

    with mock.patch.object(engine, "optimizer_step", keep):
        worker.train_mini_batch(data)
    return found


def claim_memory() -> None:
    """Maps the GPU's free memory once, but for a reserve, so that no measured update waits for it."""
    if get_device_name() == "cuda":
        torch.empty(max(torch.cuda.mem_get_info()[0] - RESERVE, 0), dtype=torch.uint8, device="cuda")


def measure(s: Common, worker: Any, fresh: bool) -> dict[str, Any]:
    """Updates on the ranks of the default process group, each of all rollouts; the same figures on every rank.

    Before a fresh worker is measured it makes one update of a few rollouts, and its allocator takes the memory that is
    free, as it would have after some updates.
    """
    set_loss(worker, s)
    engine, ranks = worker.engine, worker.engine.get_data_parallel_size()
    counter = FlopsCounter(worker.model_config.hf_config)
    data = make_rollouts(s, worker.model_config.hf_config.vocab_size, engine.get_data_parallel_rank())
    tu.assign_non_tensor(data, use_dynamic_bsz=s.max_tokens is not None, dataloader_kwargs={"shuffle": False})
    if s.max_tokens is not None:
        tu.assign_non_tensor(data, max_token_len_per_gpu=s.max_tokens)

    device = get_torch_device()
    metrics: dict[str, Any] = {}

    def update(rollouts: int) -> float:
        """Seconds of one update with the first rollouts of each rank."""
        given = tu.index_select_tensor_dict(data, list(range(rollouts)))
        tu.assign_non_tensor(given, mini_batch_size=ranks * rollouts, global_batch_size=ranks * rollouts)
        if s.micro_batch is not None:
            tu.assign_non_tensor(given, micro_batch_size_per_gpu=min(s.micro_batch, rollouts))
        dist.barrier()
        device.synchronize()
        start = time.perf_counter()
        found = worker.train_mini_batch(given)
        device.synchronize()
        dist.barrier()
        metrics.update({} if found is None else tu.get(found, "metrics"))
        return time.perf_counter() - start

    warm_up = None
    if fresh:
        warm_up = update(min(FEW, len(data)))
        claim_memory()
    for _ in range(s.untimed):
        update(len(data))
    device.reset_peak_memory_stats()
    seconds = [update(len(data)) for _ in range(s.updates)]
    peak_gib = device.max_memory_allocated() / 2**30
    means = {
        name: float(torch.tensor(values).float().mean())
        for name, values in metrics.items()
        if name in ("mfu", "grad_norm") or name.startswith("dualkv/")
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (peak_gib, means))

    prompt_lens, response_lens = (data[name].offsets().diff().tolist() * ranks for name in ("prompts", "responses"))
    rollouts = rollouts_by_tag(list(range(len(prompt_lens))), prompt_lens, response_lens)  # shared tokens do not count
    nominal, median = work.replicated(rollouts), statistics.median(seconds)
    peak = get_device_flops() * dist.get_world_size()
    return {
        "seconds": {"warm_up": warm_up, "each": seconds, "median": median},
        "replicated_tokens": nominal.tokens,
        "replicated_tokens_per_second": nominal.tokens / median,
        "mfu_effective": nominal.flops(counter) / median / peak,
        "peak_gib": [peak for peak, _ in of_ranks],
        "metrics": next((means for _, means in of_ranks if means), {}),  # only some ranks of a model have them
    }


def measure_all(
    rows: Sequence[Kind],
    build: Callable[[Kind], Any],
    distance_on: list[str] | None = None,
    check: Check = lambda *_: {},
) -> Iterator[dict[str, Any]]:
    """Settings and figures of each row, or why it failed; neighbours that can share a worker do.

    `build` makes the worker of a row, and `check` gives figures of it before it makes any step.

    `distance_on` names traces: their rows get the distance of gradients from the gradients of veRL's own engine in
    fp32, by norms, before the worker makes any step, with that engine's old log-probs. The host keeps the gradients in
    fp32.
    """
    worker: Any = None
    of: Kind | None = None
    checked: dict[str, Any] = {}
    old: dict[str, list[torch.Tensor]] = {}
    exact: dict[str, dict[str, torch.Tensor]] = {}
    distances: dict[str, float] = {}
    if distance_on:
        first = replace(rows[0], engine=Engine.VERL, attention="ragged", dtype="fp32", trace=distance_on[0])
        worker = build(replace(first, head="torch"))
        for name in distance_on:
            old[name] = log_probs_on(replace(first, trace=name), worker)
            exact[name] = gradients_on(replace(first, trace=name), worker, old[name], True)
        worker = None
    for s in rows:
        start = time.perf_counter()
        try:
            fresh = of is None or not s.same_worker(of)
            if fresh:
                worker = of = None
                gc.collect()
                get_torch_device().empty_cache()
                worker = build(s)
                of = s
            built = time.perf_counter()
            if fresh:
                checked = check(s, worker)
                distances = {
                    name: harness.apart(gradients_on(replace(s, trace=name), worker, old[name]), wanted)
                    for name, wanted in exact.items()
                }
            found = measure(s, worker, fresh) | checked
            if s.trace in distances:
                found["gradients_from_fp32"] = distances[s.trace]
            found |= {"build_seconds": built - start, "measure_seconds": time.perf_counter() - built}
        except Exception as error:  # out of memory, say, which comes to all ranks alike
            found = {"error": in_words(error)}
            worker = of = None
        yield {"settings": asdict(s), "ranks": dist.get_world_size(), **found}


def settings_of(options: dict[str, Any], kind: type[Kind]) -> Kind:
    """Settings of a kind from the options of the command line.

    Raises:
        typer.BadParameter: an unknown option or model, or not one of the two sizes of micro-batches.
    """
    if options["model"] not in CONFIGS:
        raise typer.BadParameter(f"{options['model']!r} is none of {', '.join(CONFIGS)}")
    if (options["micro_batch"] is None) == (options["max_tokens"] is None):
        raise typer.BadParameter("expected one of --micro-batch and --max-tokens")
    if (trace := options.get("trace")) is not None:
        if traces.parse(trace) is None:
            raise typer.BadParameter(f"{trace!r} is no trace")
        if options["engine"] == Engine.VERL and options["attention"] != "ragged":
            raise typer.BadParameter("sequences of a trace differ in length: veRL's own engine needs attention ragged")
        if options["max_tokens"] is None:
            raise typer.BadParameter("a trace needs --max-tokens")
    if options["engine"] == Engine.VERL and options.get("sequence_parallel", 1) > 1:
        raise typer.BadParameter("--sequence-parallel is given with veRL's own engine, expected packed groups")
    if unknown := options.keys() - kind.__dataclass_fields__.keys():
        raise typer.BadParameter(f"a row has {', '.join(sorted(unknown))}, which is no option")
    return kind(**options | {"engine": Engine(options["engine"])})


def run(
    listed: list[Kind],
    json_to: Path,
    build: Callable[[Kind], Any],
    distance_on: list[str] | None = None,
    check: Check = lambda *_: {},
) -> None:
    """Measures rows on the ranks that torchrun started (:func:`measure_all`); the first rank prints and writes."""
    if get_device_name() == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if get_device_name() == "cuda" else "gloo")
    record, done = Record(json_to, get_device_name() == "cuda"), list[dict[str, Any]]()
    for figures in measure_all(listed, build, distance_on, check):
        done.append(figures)
        if dist.get_rank() == 0:
            record.write({"rows": done}, figures)
    dist.barrier()
    dist.destroy_process_group()


@harness.takes(Settings)
def main(
    json_to: JsonPath,
    settings: Settings,
    distance: Annotated[
        list[str] | None, typer.Option(help="Compare gradients with fp32 on these traces, of which there are rows.")
    ] = None,
    rows: Rows = None,
) -> None:
    """Measure policy updates of one engine; the first rank prints and writes the figures."""
    given = asdict(settings)
    listed = [settings_of(given | row, Settings) for row in (json.loads(rows.read_text()) if rows else [{}])]
    if unknown := sorted({*(distance or [])} - {s.trace for s in listed if s.trace}):
        raise typer.BadParameter(f"--distance is {', '.join(unknown)}, expected traces of rows")
    run(listed, json_to, build, distance)


if __name__ == "__main__":
    typer.run(main)
