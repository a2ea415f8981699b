"""`python -m tools.bench.megatron --json megatron.json`: a megatron-core model packed and replicated.

Qwen3-8B's shape, cut to some layers, as megatron-core builds it from its local spec (Transformer Engine is not needed),
with random weights in bf16. Whole layers are recomputed. An update is the forward and backward of all micro-batches;
the optimizer is left out. The local spec's own attention holds the scores of all pairs, so replicated sequences run the
fastest attention of PyTorch and FlashAttention-4 that the machine has, in the place of megatron-core's core attention.
With `--model qwen3.5-9b` three of four layers are gated delta nets, by flash-linear-attention's kernels in all ways.
Cases: of :data:`CASES`. Ways:

- packed; the head runs on the rows that predict response tokens.
- replicated: the same head.

`torchrun --nproc-per-node 2 -m tools.bench.megatron --json ranks.json` runs two ranks, of which one of :data:`LAYOUTS`
after the other is made: the time of a packed update, then log-probs and gradients of a small model against one GPU.
Tensor and context parallelism divide a group. Pipeline stages run :data:`GROUPS` of them, a micro-batch each, by
megatron-core's schedule. Data-parallel ranks run one each, and megatron-core's DistributedDataParallel adds gradients.
"""

from __future__ import annotations

import copy
import gc
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any, NamedTuple
from unittest import mock

import torch
import torch._dynamo.config
import torch.distributed as dist
import typer
from torch.utils.checkpoint import checkpoint

import dualkv
from dualkv.bench.run import in_words
from dualkv.models import CONFIGS
from tools.bench import harness, stock_attention
from tools.bench.megatron_costs import Group, Model, flops, saving
from tools.bench.record import JsonPath, Record

CASES = {"main": Group(32, 8192, 2048)}
WAYS = "packed", "replicated"


class Run(NamedTuple):
    """Options of the command line."""

    model: Model
    micro_batch: int
    repeats: int
    stock_repeats: int
    chunk_size: int
    dtype: torch.dtype
    fused: bool
    device: torch.device


# ---------------------------------------------------------------- the model
def start() -> None:
    """Makes this process a rank, once."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:  # torchrun did not start this process: it is the only rank
            store = dist.TCPStore("127.0.0.1", 0, is_master=True)
            dist.init_process_group(backend, store=store, rank=0, world_size=1)


def with_nets(spec: Any, is_net: Sequence[Any], norm: Any) -> Any:
    """Make a block of layers of a local spec, some with a gated delta net in place of attention. megatron-core's own
    function for that takes the modules of Transformer Engine alone."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    net = copy.deepcopy(spec)
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=norm, out_proj=RowParallelLinear)
    net.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
    return TransformerBlockSubmodules([net if one else spec for one in is_net], norm)


def make_model(run: Run, tp: int = 1, cp: int = 1, pp: int = 1) -> Any:
    """This rank's part of a GPTModel from an enabled local spec, in new groups of ranks."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dualkv.integrations.megatron import enable

    start()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    shape, hybrid = run.model, {}
    if (nets := shape.nets) is not None:
        hybrid = {
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": nets.interval,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": nets.key_dim,
            "linear_value_head_dim": nets.value_dim,
            "linear_num_key_heads": nets.key_heads,
            "linear_num_value_heads": nets.value_heads,
            "attention_output_gate": True,
        }
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        qk_layernorm=True,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=run.dtype,
        bf16=run.dtype == torch.bfloat16,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=run.dtype,
        variable_seq_lengths=pp > 1,
        moe_token_dispatcher_type="alltoall",  # the other one refuses that, in models without experts too
        batch_p2p_comm=run.device.type == "cuda",
        use_cpu_initialization=run.device.type == "cpu",
        gradient_accumulation_fusion=False,
        bias_activation_fusion=run.fused,
        bias_dropout_fusion=run.fused,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **hybrid,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if nets is not None:
        stage, own = parallel_state.get_pipeline_model_parallel_rank(), shape.layers // pp
        spec = with_nets(spec, shape.is_net[stage * own : (stage + 1) * own], WrappedTorchNorm)
    model = GPTModel(
        config, enable(spec), shape.vocabulary, 1 << 20, position_embedding_type="rope", rotary_base=1_000_000,
        rotary_percent=1.0 if nets is None else 0.25,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    return model.to(run.device, run.dtype).train()


@contextmanager
def attention_of_sequences(model: Any, name: str) -> Iterator[None]:
    """Replace megatron-core's core attention by one of :data:`stock_attention.CALLS` in this context."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
        """query [L, B, H, D], key and value [L, B, Hk, D] -> [L, B, H * D]."""
        q, k, v = (x.transpose(0, 1) for x in (query, key, value))
        return stock_attention.CALLS[name](q, k, v, stock_attention.Rule()).transpose(0, 1).flatten(2)

    mixers = [layer.self_attention for layer in model.decoder.layers]
    cores = [mixer.core_attention for mixer in mixers if hasattr(mixer, "core_attention")]
    try:
        for core in cores:
            core.forward = forward
        yield
    finally:
        for core in cores:
            del core.forward


# ---------------------------------------------------------------- micro-batches
Step = Callable[[], torch.Tensor]  # forward and backward; log-probs of response tokens


def hidden_states(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """[L, B, C] behind the last norm."""
    with mock.patch.object(model, "post_process", False):  # no head; the norm is the decoder's
        out: torch.Tensor = model(*args, **kwargs)
    return out


def logprobs(model: Any, hidden: torch.Tensor, targets: torch.Tensor, chunk_size: int) -> torch.Tensor:
    """hidden [m, C], targets [m] -> [m]; logits of a chunk at a time, made again in the backward."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def of(some: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        return -vocab_parallel_cross_entropy(model.output_layer(some[:, None])[0][:, 0], asked)

    parts = zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
    return torch.cat([checkpoint(of, *part, use_reentrant=False) for part in parts])


def rollouts(run: Run, group: Group) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    g = torch.Generator().manual_seed(0)
    draw = partial(torch.randint, run.model.vocabulary, generator=g)
    prompts = [draw((group.prompt_len,)) for _ in range(group.groups)]
    return prompts, [[draw((group.response_len,)) for _ in range(group.responses)] for _ in prompts]


def weights_of(run: Run, group: Group) -> torch.Tensor:
    """Draw the weights of the log-probs in the loss, [groups, response tokens of a group]."""
    drawn = torch.randn(group.tokens, generator=torch.Generator().manual_seed(1)) / group.tokens
    return drawn.view(group.groups, -1).to(run.device)


def packed_steps(run: Run, model: Any, group: Group, own: slice = slice(None), cp_comm_type: str = "a2a") -> list[Step]:
    """Make one step for all groups, or for `own` of them."""
    from dualkv.integrations.megatron import PackedGroups

    prompts, responses = rollouts(run, group)
    batch = dualkv.pack(prompts[own], responses[own]).to(run.device)
    weights = weights_of(run, group)[own].flatten()

    def step() -> torch.Tensor:
        packed = PackedGroups(batch.layout, cp_comm_type=cp_comm_type)
        asked = packed.predictions(batch)
        hidden = hidden_states(
            model, packed.split(batch.input_ids), packed.split(batch.position_ids), None, packed_seq_params=packed
        )
        logp = logprobs(model, hidden[asked.predict_rows, 0], asked.targets, run.chunk_size)
        logp = torch.cat(batch.unpack(asked.gather(logp)))
        (logp * weights).sum().backward()
        return logp.detach()

    return [step]


def replicated_steps(run: Run, model: Any, group: Group) -> list[Step]:
    """One for each micro-batch of sequences."""
    prompts, responses = rollouts(run, group)
    ids = torch.stack([torch.cat([p, r]) for p, rs in zip(prompts, responses, strict=True) for r in rs]).to(run.device)
    weights = weights_of(run, group).flatten()
    positions = torch.arange(ids.shape[1], device=run.device).expand(run.micro_batch, -1)
    asked = slice(group.prompt_len - 1, -1)  # rows that predict a response

    def step(some: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        hidden = hidden_states(model, some, positions[: len(some)], None).transpose(0, 1)[:, asked].flatten(0, 1)
        logp = logprobs(model, hidden, some[:, group.prompt_len :].flatten(), run.chunk_size)
        (logp * weight).sum().backward()
        return logp.detach()

    batches = zip(ids.split(run.micro_batch), weights.split(run.micro_batch * group.response_len), strict=True)
    return [partial(step, *batch) for batch in batches]


# ---------------------------------------------------------------- time and memory
def timed(model: Any, steps: list[Step], repeats: int, rows: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Seconds of all micro-batches, of so many rows, after two untimed runs of the first, and the peak of memory; the
    log-probs."""
    model.zero_grad(set_to_none=True)
    torch._dynamo.reset()
    # What is compiled may be compiled again for what the first backward leaves.
    begun, _ = harness.seconds_of(lambda: [steps[0]() for _ in range(2)])
    found: dict[str, Any] = {"rows": rows, "micro_batches": len(steps), "first": begun}
    model.zero_grad(set_to_none=True)
    measured, logp = harness.repeated(lambda: torch.cat([step() for step in steps]), repeats, model.zero_grad)
    return found | measured, logp


def tried(call: Callable[[], Any]) -> Any:
    """Return the result of the call, or the error that it raised."""
    try:
        return call()
    except Exception as error:
        return {"error": in_words(error)}
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---------------------------------------------------------------- one GPU
def measure(run: Run, cases: dict[str, Group], ways: list[str]) -> Iterator[tuple[dict[str, Any], Any]]:
    """The figures after each way of each case, and what is new in them."""
    figures: dict[str, Any] = {"cases": {}}
    model = make_model(run)
    heads = run.model.heads, run.model.kv_heads, run.model.head_dim
    for name, group in cases.items():
        found: dict[str, Any] = {"group": asdict(group), "rows": {}}
        found["flop_ratio"] = {"replicated": saving(run.model, group)}
        figures["cases"][name] = found
        length = group.prompt_len + group.response_len
        stock = "math"
        if run.device.type == "cuda" and "replicated" in ways:
            stock, found["stock_attention_seconds"] = stock_attention.fastest(run.micro_batch, length, *heads)
        found["stock_attention"] = stock
        first: torch.Tensor | None = None
        for way in ways:
            row = tried(partial(one_way, run, model, group, way, stock))
            if "error" not in row:
                logp = row.pop("logp")
                first = logp if first is None else first
                row["logp_rms_from_first_way"] = harness.rms(logp, first)
                row["tflops"] = flops(run.model, group, way == "packed") / 1e12 / row["median"]
                packed = found["rows"].get("packed", {}).get("median")
                if packed and way != "packed":
                    row["packed_is_faster_by"] = row["median"] / packed
                    row["of_flop_ratio"] = row["packed_is_faster_by"] / found["flop_ratio"][way]
            found["rows"][way] = row
            yield figures, {f"{name}, {way}": row}


def one_way(run: Run, model: Any, group: Group, way: str, stock: str) -> dict[str, Any]:
    if way == "packed":
        found, logp = timed(model, packed_steps(run, model, group), run.repeats, group.rows(True))
    else:
        steps = replicated_steps(run, model, group)
        with attention_of_sequences(model, stock):
            found, logp = timed(model, steps, run.stock_repeats, group.rows(False))
    return found | {"logp": logp}


# ---------------------------------------------------------------- several GPUs
SMALL = Model(layers=2, hidden=1024, intermediate=3072, heads=16, kv_heads=8, head_dim=128, vocabulary=8192)
SMALL_GROUP = Group(6, 700, 90, groups=4)
LAYOUTS = {"tensor": {"tp": 2}, "context": {"cp": 2}, "gathered": {"cp": 2}, "pipeline": {"pp": 2}, "data": {}}
CONTEXT = {"context": "a2a", "gathered": "all_gather"}  # cp_comm_type
GROUPS = {"pipeline": 4, "data": 2}  # in an update of all ranks; of the others one


def pipelined_step(run: Run, model: Any, group: Group) -> Step:
    """All groups, a micro-batch each, by megatron-core's schedule; log-probs on the last stage, else none."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from dualkv.integrations.megatron import PackedGroups

    batches = [dualkv.pack([p], [rs]).to(run.device) for p, rs in zip(*rollouts(run, group), strict=True)]
    weights = weights_of(run, group)

    def step() -> torch.Tensor:
        found = [torch.zeros(0, device=run.device)]

        def forward(given: Iterator[Any], stage: Any) -> Any:
            batch, weight = next(given)
            packed = PackedGroups(batch.layout)
            out = hidden_states(stage, batch.input_ids, batch.position_ids, None, packed_seq_params=packed)

            def loss(hidden: torch.Tensor) -> Any:
                logp = torch.cat(
                    batch.unpack(logprobs(stage, hidden[batch.predict_rows, 0], batch.targets, run.chunk_size))
                )
                found.append(logp.detach())
                return (logp * weight).sum() * len(batches), {}  # megatron-core divides by the number of micro-batches

            return out, loss

        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(zip(batches, weights, strict=True)),
            model=model,
            num_microbatches=len(batches),
            seq_length=batches[0].input_ids.shape[1],  # groups are equal
            micro_batch_size=1,
            forward_only=False,
        )
        return torch.cat(found)

    return step


def data_parallel_step(run: Run, model: Any, group: Group) -> Step:
    """This rank's groups; the gradients of all ranks, added up, are `main_grad` of the parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    model.config.calculate_per_token_loss = True  # gradients are added up; without it their mean is taken
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(model.config, settings, model)
    (own,) = packed_steps(run, model, group, own=slice(dist.get_rank(), None, dist.get_world_size()))

    def step() -> torch.Tensor:
        wrapped.zero_grad_buffer()
        logp = own()
        wrapped.finish_grad_sync()
        return logp

    return step


def steps_of(run: Run, model: Any, kind: str, group: Group) -> list[Step]:
    if kind == "pipeline":
        return [pipelined_step(run, model, group)]
    if kind == "data":
        return [data_parallel_step(run, model, group)]
    return packed_steps(run, model, group, cp_comm_type=CONTEXT.get(kind, "a2a"))


def shard(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A tensor-parallel rank's part of a weight of megatron-core."""
    if "linear_fc1" in name:  # gate, then up
        return torch.cat([half.chunk(ranks)[rank] for half in whole.chunk(2)])
    if "linear_proj" in name or "linear_fc2" in name:
        return whole.chunk(ranks, 1)[rank]
    return whole.chunk(ranks)[rank] if any(n in name for n in ("linear_qkv", "embedding", "output_layer")) else whole


def against_one_rank(run: Run, kind: str) -> dict[str, float]:
    """The largest difference of log-probs; and ||gradient - expected|| / ||expected|| over all weights."""
    group, rank, ranks = SMALL_GROUP, dist.get_rank(), dist.get_world_size()

    def of(model: Any, kind: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.zero_grad()
        logp = torch.cat([step() for step in steps_of(run, model, kind, group)])
        return logp, {n: p.main_grad if kind == "data" else p.grad for n, p in model.named_parameters()}

    alone = make_model(run)
    weights = {name: p.detach() for name, p in alone.named_parameters()}
    expected_logp, expected = of(alone, "one")
    several = make_model(run, **LAYOUTS[kind])

    def part_of(wanted: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """Cut a tensor of the whole model to this rank's part, for its parameter of that name."""
        if kind == "pipeline":  # a stage counts its own layers
            first = rank * run.model.layers // ranks
            name = re.sub(r"(?<=layers\.)\d+", lambda found: str(int(found[0]) + first), name)
        return shard(name, wanted[name], rank, ranks) if kind == "tensor" else wanted[name]

    with torch.no_grad():
        for name, p in several.named_parameters():
            p.copy_(part_of(weights, name))
    logp, gradients = of(several, kind)
    if kind == "data":
        expected_logp = expected_logp.view(group.groups, -1)[rank::ranks].flatten()
    apart = logp - expected_logp[: len(logp)]  # only the last stage has log-probs, of all groups
    sums = torch.zeros(4, device=run.device)
    for name, gradient in gradients.items():
        truth = part_of(expected, name)
        if kind in CONTEXT or (kind == "tensor" and ("q_layernorm" in name or "k_layernorm" in name)):
            dist.all_reduce(gradient)  # of this rank's rows, or heads
        sums[:2] += torch.stack([(x.double() ** 2).sum().float() for x in (gradient - truth, truth)])
    sums[2:] = torch.stack([apart.double().square().sum().float(), apart.new_tensor(len(apart))])
    dist.all_reduce(sums)
    largest = torch.stack([x.abs().max() for x in (apart, apart.new_zeros(1)) if len(x)]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return {
        "logp": float(largest),
        "logp_rms": float((sums[2] / sums[3]).sqrt()),
        "gradients": float((sums[0] / sums[1]).sqrt()),
    }


def measure_ranks(run: Run, group: Group) -> Iterator[tuple[dict[str, Any], Any]]:
    """The figures of this rank, after each of them, and what is new in them; those of rank 0 are recorded."""
    figures: dict[str, Any] = {"ranks": dist.get_world_size(), "group": asdict(group), "check": {}, "rows": {}}
    for kind in ("one", *LAYOUTS):
        groups = replace(group, groups=GROUPS.get(kind, 1) * group.groups)

        def once(kind: str = kind, groups: Group = groups) -> dict[str, Any]:
            model = make_model(run, **LAYOUTS.get(kind, {}))
            return timed(model, steps_of(run, model, kind, groups), run.repeats, groups.rows(True))[0]

        figures["rows"][kind] = tried(once)
        one = figures["rows"]["one"].get("median")
        if one and "median" in figures["rows"][kind]:
            figures["rows"][kind]["groups"] = groups.groups
            figures["rows"][kind]["times_as_fast"] = one * GROUPS.get(kind, 1) / figures["rows"][kind]["median"]
        yield figures, {kind: figures["rows"][kind]}
    for dtype in (torch.float32, torch.bfloat16):
        for kind in LAYOUTS:
            small = run._replace(model=SMALL, dtype=dtype, fused=False)
            name = f"{kind} {dtype}".replace("torch.", "")
            figures["check"][name] = tried(partial(against_one_rank, small, kind))
            yield figures, {name: figures["check"][name]}


# ---------------------------------------------------------------- the command
def main(
    json_to: JsonPath,
    model: Annotated[str, typer.Option(help="Dense or hybrid, of dualkv.models.CONFIGS; random weights.")] = "qwen3-8b",
    layers: Annotated[int, typer.Option(help="Of the model.")] = 8,
    cases: Annotated[str, typer.Option(help=f"Of {', '.join(CASES)}, with semicolons between.")] = ";".join(CASES),
    ways: Annotated[str, typer.Option(help=f"Of {', '.join(WAYS)}, with commas between.")] = ",".join(WAYS),
    group: Annotated[str | None, typer.Option(help="Responses, prompt, response: the first case has these.")] = None,
    micro_batch: Annotated[int, typer.Option(help="Replicated sequences at once; packed, all groups are.")] = 8,
    repeats: Annotated[int, typer.Option(help="Packed, after two untimed ones.")] = 3,
    stock_repeats: Annotated[int, typer.Option(help="Replicated, after a micro-batch twice.")] = 1,
    chunk_size: Annotated[int, typer.Option(help="Rows of the head at a time.")] = 4096,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    fused: Annotated[bool, typer.Option(help="megatron-core's compiled activation and residual.")] = True,
) -> None:
    """Measure a megatron-core model packed and replicated, or on two ranks; figures are written after each part."""
    cuda = torch.cuda.is_available()
    rank = int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    shape = Model.of(CONFIGS[model], layers)
    run = Run(shape, micro_batch, repeats, stock_repeats, chunk_size, getattr(torch, dtype), fused, device)
    chosen = {name: CASES[name] for name in cases.split(";")}
    if group:
        chosen[next(iter(chosen))] = Group(*map(int, group.split(",")))
    record = Record(json_to if rank == 0 else None, cuda)
    given = {name: value for name, value in run._asdict().items() if isinstance(value, (int, bool))}
    settings = {"settings": {"model": model, "shape": asdict(shape), "dtype": dtype} | given}
    torch._dynamo.config.recompile_limit = 64  # of what `fused` compiles
    start()
    several = dist.get_world_size() > 1
    found = measure_ranks(run, next(iter(chosen.values()))) if several else measure(run, chosen, ways.split(","))
    for figures, new in found:
        record.write({**settings, **figures})
        if rank == 0:
            print(new, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
