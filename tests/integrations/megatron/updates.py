"""One update of a small model, on packed micro-batches and on replicated sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

import dualkv
from dualkv.integrations.megatron import PackedGroups, enable
from tests.integrations.megatron import cpu
from tools.bench.megatron import with_nets

VOCAB = 64
SMALL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 48,
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.3,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "pipeline_dtype": torch.float32,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",
    "batch_p2p_comm": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
}
# All that counts tokens; a bias makes routers choose other experts, from the second update on.
COUNTED = EXPERTS | {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.5, 0.4],
    "moe_z_loss_coeff": 0.1,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
RECURRENT = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": [1, 0],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "init_method_std": 0.1,
}
HYBRID = {
    k: v for k, v in RECURRENT.items() if k not in ("experimental_attention_variant", "linear_attention_freq")
} | {
    "pattern": "MG*-",
    "num_layers": 4,
    "is_hybrid_model": True,
    "mamba_state_dim": 8,
    "mamba_head_dim": 12,
    "mamba_num_groups": 2,
    "mamba_num_heads": 4,
}
MULTIMODAL = {"mrope_section": [2, 3, 3], "arguments": {"position_embedding_type": "mrope"}}
LAYERS = {"linear_attention_freq": [0, 1], "pipeline_model_parallel_size": 1}  # of attention, and a gated delta net
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
}


def config(**settings: Any) -> TransformerConfig:
    """Fields of YaRN are none of a TransformerConfig, which is asked for them all the same."""
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    found = kind(**SMALL | {k: v for k, v in settings.items() if not k.startswith(("yarn_", "pattern"))})
    for name in settings.keys() - vars(found).keys():
        setattr(found, name, settings[name])
    return found


def layer_spec(norms: bool = True, **settings: Any) -> Any:
    spec = get_gpt_layer_local_spec(
        num_experts=settings.get("num_moe_experts"),
        multi_latent_attention=settings.get("multi_latent_attention"),
        qk_layernorm=norms,
        normalization="RMSNorm",
    )
    recurrent = settings.get("linear_attention_freq")
    if norms and recurrent is None:
        return spec
    norm = WrappedTorchNorm
    if not norms:  # With sequence parallelism megatron-core has norms of Transformer Engine and Apex only.
        norm = spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = IdentityOp
    is_net = recurrent or [0] * settings.get("num_layers", SMALL["num_layers"])
    if (stages := settings.get("pipeline_model_parallel_size", 1)) > 1:
        own = len(is_net) // stages
        is_net = is_net[own * parallel_state.get_pipeline_model_parallel_rank() :][:own]
    return with_nets(spec, is_net, norm)


def hybrid(settings: dict[str, Any], norms: bool = True, **arguments: Any) -> Any:
    """An enabled HybridModel of local layers."""
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer

    attention, net = layer_spec(norms, **settings | LAYERS).layer_specs
    norm, mlp, add = attention.submodules.input_layernorm, attention.submodules.mlp, attention.submodules.mlp_bda

    def layer(kind: type, **parts: Any) -> ModuleSpec:
        return ModuleSpec(kind, submodules=TransformerLayerSubmodules(**parts))

    def mixing(spec: Any) -> ModuleSpec:
        mixer = spec.submodules.self_attention
        return layer(TransformerLayer, input_layernorm=norm, self_attention=mixer, self_attn_bda=add)

    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attending = enable(mixing(attention))  # megatron-core's own refuses context parallelism when built
    kinds = HybridStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(norm, mixer, add)),
        gdn_layer=mixing(net),
        attention_layer=attending,
        mla_layer=attending,
        mlp_layer=layer(MLPLayer, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add),
        moe_layer=layer(TransformerLayer, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add),
    )
    torch.manual_seed(0)
    found = HybridModel(
        config(**settings),
        ModuleSpec(HybridStack, submodules=kinds),
        VOCAB,
        64,
        settings["pattern"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **arguments,
    )
    return enable(found)


def build(spec: Any, settings: dict[str, Any], stage: int | None = None, **arguments: Any) -> GPTModel:
    """The part of a model of this rank and interleaved stage, with the same weights every time."""
    torch.manual_seed(stage or 0)
    arguments = {"position_embedding_type": "rope", "parallel_output": True} | arguments
    where = {} if stage is None else {"ignore_virtual": False, "vp_stage": stage}
    return GPTModel(
        config(**settings),
        spec,
        VOCAB,
        64,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        vp_stage=stage,
        **arguments,
    )


# ---------------------------------------------------------------- micro-batches
class MicroBatch(NamedTuple):
    """Rows of a model, and the M tokens whose log-probs are asked for, with the rows that predict them."""

    input_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    batch: dualkv.PackedBatch | dualkv.PackedSequences | dualkv.Layout | None  # that PackedGroups is given
    predict_rows: torch.Tensor  # [M]
    targets: torch.Tensor  # [M]
    unpack: Callable[[torch.Tensor], list[torch.Tensor]]  # [M] to one tensor a rollout
    weights: torch.Tensor  # in the loss, of the log-probs of all rollouts


def rollouts(seed: int = 0) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """(packed, replicated): ragged groups, groups of one response, an empty response, trees."""
    g = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (n,), generator=g)

    prompts = [[tokens(5), tokens(2)], [tokens(4)], [tokens(1), tokens(6), tokens(3)]]
    responses = [
        [[tokens(3), tokens(1), tokens(4)], [tokens(3)]],
        [[tokens(4), tokens(0)]],
        [[tokens(n)] for n in (3, 2, 1)],
    ]
    batches: list[Any] = [dualkv.pack(p, r) for p, r in zip(prompts, responses, strict=True)]
    root, turn = tokens(4), tokens(3)
    grown = [torch.cat([root, tokens(2)]), *(torch.cat([root, turn, tokens(n)]) for n in (3, 2)), root, tokens(3)]
    batches.append(dualkv.pack_sequences(grown))
    whole = [
        [torch.cat([p, r]) for p, rs in zip(ps, rss, strict=True) for r in rs]
        for ps, rss in zip(prompts, responses, strict=True)
    ]
    packed, replicated = [], []
    for batch, sequences in zip(batches, [*whole, grown], strict=True):
        counts = [len(row) for row in batch.unpack(batch.targets)]
        weights = torch.randn(sum(counts), generator=g)
        tokens_asked = batch.predict_rows, batch.targets
        packed.append(MicroBatch(batch.input_ids, batch.position_ids, batch, *tokens_asked, batch.unpack, weights))
        for sequence, some in zip(sequences, weights.split(counts), strict=True):
            rows = torch.arange(len(sequence) - len(some), len(sequence)) - 1
            ids, positions = sequence[None], torch.arange(len(sequence))[None]
            replicated.append(MicroBatch(ids, positions, None, rows, sequence[rows + 1], lambda x: [x], some))
    assert [b.layout.depth for b in batches] == [2, 2, 2, 3]
    return packed, replicated


LENGTH = 40  # of all micro-batches that interleaved stages exchange


def longer(batch: MicroBatch, multiple: int) -> MicroBatch:
    """A sequence with rows behind it that predict nothing that is asked for."""
    missing = -batch.input_ids.shape[1] % multiple
    ids, positions = (torch.nn.functional.pad(x, (0, missing)) for x in (batch.input_ids, batch.position_ids))
    return batch._replace(input_ids=ids, position_ids=positions)


def grid(positions: torch.Tensor) -> torch.Tensor:
    """[1, T] -> [3, 1, T]: positions of frames, height and width as an image's rows have them."""
    return torch.stack([positions, positions // 2, positions % 3])


def _step(found: list[torch.Tensor], count: int) -> Callable[..., Any]:
    def step(batches: Any, model: GPTModel) -> Any:
        batch = next(batches)
        ids, positions, asked, params = batch.input_ids, batch.position_ids, batch, None
        if batch.batch is not None:
            config = model.config
            multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
            length = LENGTH if config.virtual_pipeline_model_parallel_size else None
            given: dict[str, Any] = {"length": length, "cp_comm_type": config.cp_comm_type or "a2a"}
            if config.mrope_section:
                given["position_ids"] = grid(positions)
            params = PackedGroups(batch.batch, multiple, **given)
            ids, positions, asked = params.split(ids), params.split(positions), params.predictions(batch)
        elif model.config.mrope_section:
            positions = grid(positions)
        out = model(ids, positions, None, packed_seq_params=params)

        def loss(logits: torch.Tensor) -> Any:
            logp = -tensor_parallel.vocab_parallel_cross_entropy(logits[0, asked.predict_rows], asked.targets)
            logp = torch.cat(batch.unpack(logp if params is None else asked.gather(logp)))
            found.append(logp.detach())
            return (logp * batch.weights).sum() * count, {}  # megatron-core divides by the number of micro-batches

        return out, loss

    return step


class Update(NamedTuple):
    """Log-probs [M] on the last pipeline stage, else None; and the gradients of this rank's parameters."""

    logp: torch.Tensor | None
    gradients: dict[str, torch.Tensor]


def update(stages: list[GPTModel], batches: list[MicroBatch]) -> Update:
    """One backward of all micro-batches by megatron-core's schedule for this number of pipeline stages."""
    found: list[torch.Tensor] = []
    several = len(stages) > 1
    for stage in stages:
        stage.zero_grad()
    get_forward_backward_func()(
        forward_step_func=_step(found, len(batches)),
        data_iterator=[iter(batches) for _ in stages] if several else iter(batches),
        model=stages if several else stages[0],
        num_microbatches=len(batches),
        seq_length=LENGTH if several else 64,
        micro_batch_size=1,
        forward_only=False,
    )
    group = parallel_state.get_context_parallel_group()
    named = {f"{i}.{name}": p for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
    for p in named.values():
        if p.grad is not None and dist.get_world_size(group) > 1:  # as megatron-core's DistributedDataParallel does
            dist.all_reduce(p.grad, group=group)
            p.grad /= dist.get_world_size(group)
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    assert len(gradients) == len(named)
    return Update(torch.cat(found) if found else None, gradients)


class Difference(NamedTuple):
    """The largest differences: of log-probs, and of gradients relative to the largest entry of each."""

    logp: float | None
    gradients: float


def difference(a: Update, b: Update) -> Difference:
    logp = None if a.logp is None or b.logp is None else (a.logp - b.logp).abs().max().item()
    assert a.gradients.keys() == b.gradients.keys()
    gradients = [
        ((x - b.gradients[name]).abs().max() / b.gradients[name].abs().max().clamp(min=1e-3)).item()
        for name, x in a.gradients.items()
    ]
    assert max(x.abs().max().item() for x in b.gradients.values()) > 0.1
    return Difference(logp, max(gradients))


def packed_against_replicated(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    norms: bool = True,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Difference:
    """Compare packed and replicated updates on this rank, of a model that is built from an enabled spec.

    Args:
        tp, pp, ep, cp: ranks of each kind of parallelism.
        norms: whether the layers have norms.
        arguments: of the model.
        settings: of its config.
    """
    settings |= {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "qk_layernorm": norms,
    }

    interleaved = settings.get("virtual_pipeline_model_parallel_size")

    def made(cp: int) -> list[GPTModel]:
        cpu.parallel(tp, pp, ep, cp, interleaved)
        changed = settings | {"context_parallel_size": cp}
        stages = [
            hybrid(changed, norms, **arguments or {})
            if "pattern" in changed
            else build(enable(layer_spec(norms, **changed)), changed, stage, **arguments or {})
            for stage in (range(interleaved) if interleaved else [None])
        ]
        if "mrope_section" in changed:
            stages = [enable(stage) for stage in stages]
        with torch.no_grad():
            for name, parameter in [named for stage in stages for named in stage.named_parameters()]:
                if name.endswith("softmax_offset"):
                    parameter.copy_(torch.linspace(-1, 2, len(parameter)))
                if name.endswith(
                    "A_log"
                ):  # else states decay within a row or two, and gradients of decays are rounding
                    parameter.copy_(torch.linspace(-3, -1, len(parameter)))
        return stages

    stages = made(cp)
    packed, replicated = rollouts(parallel_state.get_data_parallel_rank())
    found = update(stages, packed)
    if cp > 1:
        stages = made(1)
    if interleaved and len(replicated) % pp:  # interleaved stages take no other number; it is no part of the loss
        replicated.append(replicated[-1]._replace(weights=torch.zeros_like(replicated[-1].weights)))
    multiple = LENGTH if interleaved else 2 if settings.get("sequence_parallel") else 1
    expected = update(stages, [longer(batch, multiple) for batch in replicated])
    if found.logp is not None and expected.logp is not None:
        expected = expected._replace(logp=expected.logp[: len(found.logp)])
    return difference(found, expected)


def packed_on_ranks(tp: int = 1, cp: int = 1, **settings: Any) -> list[float]:
    """Compare routers on several ranks with one rank: the largest difference of gradients, relative to the largest
    entry, and of the tokens of experts. Layers have no norms, which sequence parallelism does not run on a CPU."""
    settings |= {"qk_layernorm": False, "init_method_std": 0.1}

    def found(tp: int, cp: int, **more: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        changed = settings | {"tensor_model_parallel_size": tp, "context_parallel_size": cp} | more
        cpu.parallel(tp, cp=cp)
        model = build(enable(layer_spec(False, **changed)), changed)
        update([model], rollouts()[0])
        routers = [layer.mlp.router for layer in model.decoder.layers]
        gradients = [router.weight.grad for router in routers]
        tokens = [router.local_tokens_per_expert for router in routers]
        for x in gradients:
            dist.all_reduce(x, group=parallel_state.get_tensor_model_parallel_group())
        for x in tokens:
            dist.all_reduce(x, group=parallel_state.get_tensor_and_context_parallel_group())
        return gradients, tokens

    of_ranks, alone = found(tp, cp), found(1, 1, sequence_parallel=False)
    return [
        max(((x - y).abs().max() / scale(y)).item() for x, y in zip(a, b, strict=True))
        for a, b, scale in zip(of_ranks, alone, (lambda y: y.abs().max(), lambda y: 1), strict=True)
    ]
