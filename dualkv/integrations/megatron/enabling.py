"""Enable models of megatron-core.

`enable` takes a layer spec, before a model is built from it, or a built `GPTModel` or `HybridModel`. It puts subclasses
in place of megatron-core's classes: of `SelfAttention` and `MLASelfAttention`, which gather the rotary frequencies by
the layout's positions, of the core attention (`DotProductAttention` of the local spec, `TEDotProductAttention` of
Transformer Engine's), which runs :func:`dualkv.attention`, of `GatedDeltaNet` and `MambaMixer` (:mod:`.recurrent`), and
of experts' `TopKRouter`, which counts rollouts. None has parameters or state of its own, so checkpoints do not change.
Calls without :class:`PackedGroups` run megatron-core's code.

The format of :class:`PackedGroups` is called "dualkv". A layer that is not enabled and gets it raises an error, instead
of running all groups as one sequence: attention by what it asks of formats, recurrent layers by a wrapped forward.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, TypeVar

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import Router, TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from codegen.surface import irreplaceable, unfit
from dualkv.integrations import flash_linear_attention, patching
from dualkv.integrations.megatron import media
from dualkv.integrations.megatron.checked import Checked, refuse_beside
from dualkv.integrations.megatron.configs import counted, refuse, window_of
from dualkv.integrations.megatron.recurrent import LAYERS, MIXERS, READS, HybridModel, mixer_of
from dualkv.integrations.megatron.routers import ROUTERS
from dualkv.integrations.megatron.rows import ONE_RANK, PackedGroups
from dualkv.integrations.patching import Changes, swap

MODELS: tuple[type, ...] = (GPTModel,) if HybridModel is None else (GPTModel, HybridModel)
Target = TypeVar("Target")
CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
ROTARY = ("rope", "yarn")
MULTIMODAL = "mrope"


# ---------------------------------------------------------------- the modules
class _PackedSelfAttention(Checked, SelfAttention):
    """[rows, 1, C] -> [rows, 1, C] and a bias: rows of this context-parallel rank, with sequence parallelism the share
    of this tensor-parallel rank."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if (packed := self._enter(hidden_states, packed_seq_params, kwargs, args)) is not None:
            if rotary_pos_emb is not None:
                rotary_pos_emb = packed._frequencies(rotary_pos_emb, self.config.mrope_section is not None)
            elif not getattr(self.config, "is_hybrid_model", False):
                raise ValueError(
                    f"layer {self.layer_number} gets no rotary_pos_emb, expected a model whose position_embedding_type"
                    f" is {' or '.join(ROTARY)}, or one whose config has is_hybrid_model"
                )
        kwargs |= {"rotary_pos_emb": rotary_pos_emb, "packed_seq_params": packed_seq_params}
        return super().forward(hidden_states, attention_mask, *args, **kwargs)


class _PackedMLASelfAttention(Checked, MLASelfAttention):
    """Packed self-attention with latent attention: q, k and v are expanded to all heads before the core attention.

    megatron-core's class makes its rotary frequencies itself, and for what it takes for a row of one sequence.
    """

    core_attention: Any
    rotary_pos_emb: Any

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if self._enter(hidden_states, packed_seq_params, kwargs, args) is not None:
            self.core_attention.latent_scale = self.softmax_scale
        return super().forward(hidden_states, attention_mask, *args, packed_seq_params=packed_seq_params, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        arguments = hidden_states, key_value_states, position_ids
        if not isinstance(packed_seq_params, PackedGroups):
            return super().get_query_key_value_tensors(*arguments, packed_seq_params, **kwargs)
        packed, rotary = packed_seq_params, self.rotary_pos_emb

        def of_rows(*_: Any, **__: Any) -> Any:
            found = type(rotary).forward(rotary, packed.max_seqlen_q, cp_group=ONE_RANK)
            if isinstance(found, tuple):  # of YaRN, with a factor
                return packed._frequencies(found[0]), *found[1:]
            return packed._frequencies(found)

        with Changes(rotary) as changes:
            changes.replace("forward", of_rows)
            return super().get_query_key_value_tensors(*arguments, None, **kwargs)


class _CoreAttention(nn.Module):
    """query [rows, 1, H, D], key and value [rows, 1, Hk, D], of this tensor-parallel rank's heads and this
    context-parallel rank's rows -> [rows, 1, H * D]; of latent attention values may have another head dim."""

    config: Any
    layer_number: int

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(packed_seq_params, PackedGroups):
            kwargs |= {"attention_bias": attention_bias, "packed_seq_params": packed_seq_params}
            return super().forward(query, key, value, attention_mask, *args, **kwargs)
        refuse_beside(attention_mask=attention_mask, attention_bias=attention_bias)
        config, offset = self.config, getattr(self, "softmax_offset", None)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        out = packed_seq_params.shard.attention_of(self.layer_number)(
            *(x.reshape(len(x), *x.shape[-2:]) for x in (query, key, value)),  # bridges' layers leave dimension 1 out
            softmax_scale=getattr(self, "latent_scale", config.softmax_scale),
            deterministic=config.deterministic_mode,
            window=window_of(config) if windowed else None,
            sinks=None if offset is None else offset.flatten(),
        )
        return out.reshape(len(out), 1, -1)


class _PackedDotProductAttention(_CoreAttention, DotProductAttention):
    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        # megatron-core's class refuses context parallelism; `forward` does so for what is not PackedGroups. The head
        # dims of latent attention, which it does not take, are those of the tensors.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        kwargs = {name: value for name, value in kwargs.items() if name not in ("k_channels", "v_channels")}
        super().__init__(alone, *args, **kwargs)
        self.config = config

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        if self.config.context_parallel_size > 1 and not isinstance(packed_seq_params, PackedGroups):
            raise ValueError(
                f"context_parallel_size is {self.config.context_parallel_size} and packed_seq_params"
                f" {type(packed_seq_params).__name__}, expected PackedGroups: megatron-core's DotProductAttention sees"
                " the rows of its own rank alone"
            )
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


ATTENTION: dict[type, type] = {SelfAttention: _PackedSelfAttention, MLASelfAttention: _PackedMLASelfAttention}
CORE: dict[type, type] = {DotProductAttention: _PackedDotProductAttention}

if HAVE_TE:

    class _PackedTEDotProductAttention(_CoreAttention, TEDotProductAttention):
        pass

    CORE[TEDotProductAttention] = _PackedTEDotProductAttention

PACKED = ATTENTION | CORE | MIXERS | ROUTERS
STOCK = {packed: own for own, packed in PACKED.items()}

# What the classes here replace of megatron-core's: methods, and what they read.
BORROWED: dict[type, tuple[str, str]] = {
    SelfAttention: ("__init__ forward", "config layer_number core_attention attn_mask_type"),
    MLASelfAttention: ("__init__ forward get_query_key_value_tensors", "core_attention rotary_pos_emb softmax_scale"),
    DotProductAttention: ("__init__ forward", "config layer_number softmax_offset"),
    **{kind: ("__init__ forward", reads) for kind, reads in READS.items()},
    TopKRouter: (
        "routing _apply_aux_loss _apply_seq_aux_loss _apply_global_aux_loss apply_z_loss"
        " attach_and_log_load_balancing_loss",
        "get_aux_loss_coeff local_tokens_per_expert enable_expert_bias global_tokens_per_expert ga_steps topk"
        " tp_group tp_cp_group tp_dp_cp_group",
    ),
}


def _know(cls: Any) -> None:
    """Add self-attention of a bridge to the classes that have packed ones."""
    if media.is_attention(cls) and cls not in PACKED:
        packed = type(f"_Packed{cls.__name__}", (_PackedSelfAttention, cls), {"__module__": __name__})
        ATTENTION[cls] = PACKED[cls] = packed
        STOCK[packed] = cls


@functools.cache
def _check_borrowed(cls: type) -> None:
    """Raises ImportError for a class of megatron-core that the one here does not replace as it should."""
    methods, reads = BORROWED.get(cls, ("forward", ""))
    if (said := irreplaceable(cls, PACKED[cls], methods, reads)) is not None:
        raise ImportError(f"packed groups cannot run: {unfit('megatron-core', said)}", name="megatron.core")


# ---------------------------------------------------------------- refusals
def _name(found: Any) -> str:
    return found.__name__ if isinstance(found, type) else type(found).__name__


def _check_attention(where: str, attention: Any, core: Any, crossed: Any, mask_type: Any) -> None:
    """Raises ValueError for a layer (named `where`) whose attention is not causal self-attention of megatron-core, by
    the classes of its self-attention or recurrent layer, of the core attention in it and of its cross-attention."""
    _know(attention)
    if crossed is not IdentityOp:
        raise ValueError(f"{where} has cross-attention ({_name(crossed)}), expected a layer of a decoder without it")
    if STOCK.get(attention, attention) in MIXERS:
        _check_borrowed(STOCK.get(attention, attention))
        if (reason := flash_linear_attention.refusal()) is not None:
            raise ValueError(f"{where} is {_name(attention)}: {reason}")
        return
    for part, found, expected in (("self_attention", attention, ATTENTION | MIXERS), ("core_attention", core, CORE)):
        if STOCK.get(found, found) not in expected:
            names = " or ".join(_name(one) for one in expected)
            raise ValueError(f"{part} of {where} is {_name(found)}, expected megatron-core's {names}")
        _check_borrowed(STOCK.get(found, found))
    if mask_type not in CAUSAL:
        shown = getattr(mask_type, "name", mask_type)
        raise ValueError(f"{where} has attn_mask_type {shown}, expected {' or '.join(t.name for t in CAUSAL)}")


def _check_router(where: str, found: Any) -> None:
    """Raises ValueError for a layer whose experts get their tokens of another class."""
    if STOCK.get(found, found) not in ROUTERS:
        names = " or ".join(map(_name, ROUTERS))
        raise ValueError(f"the router of {where} is {_name(found)}, expected megatron-core's {names}")
    _check_borrowed(STOCK.get(found, found))


# ---------------------------------------------------------------- specs and models
def _specs(spec: Any) -> list[TransformerLayerSubmodules]:
    """The parts of each layer of a spec of a layer or of a block of layers."""
    if isinstance(spec, TransformerLayerSubmodules):
        return [spec]
    if isinstance(spec, TransformerBlockSubmodules):
        return [inner for layer in spec.layer_specs or [] for inner in _specs(layer)]
    if isinstance(spec, ModuleSpec):
        return _specs(spec.submodules)
    raise TypeError(
        f"{type(spec).__name__} is neither a GPTModel nor the spec of a transformer layer or block of megatron-core"
    )


def _experts(where: str, mlp: Any) -> MoESubmodules | None:
    """The parts of a layer's experts; None where its spec has none."""
    if isinstance(mlp, functools.partial):
        kind, found = mlp.func, mlp.keywords.get("submodules")
    elif isinstance(mlp, ModuleSpec):
        kind, found = mlp.module, mlp.submodules
    else:
        kind, found = mlp, None
    if isinstance(found, MoESubmodules):
        return found
    if isinstance(kind, type) and issubclass(kind, MoELayer):
        raise ValueError(f"{_name(kind)} of {where} has no MoESubmodules, expected them: they name its router")
    return None


def _routers(layer: nn.Module) -> list[Router]:
    return [module for module in layer.modules() if isinstance(module, Router)]


def decoder_model(model: nn.Module) -> Any:
    """The GPTModel or HybridModel that a model is or holds; raises ValueError for other models."""
    found = [module for module in model.modules() if isinstance(module, MODELS)]
    if len(found) != 1:
        names = " or ".join(map(_name, MODELS))
        raise ValueError(f"{type(model).__name__} holds {len(found)} {names}, expected one")
    return found[0]


def layers_of(model: nn.Module) -> list[Any]:
    """The layers of a model's decoder, on this pipeline stage; raises ValueError for other models."""
    found = list(decoder_model(model).decoder.layers)
    for layer in found:
        if not isinstance(layer, LAYERS):
            names = " or ".join(map(_name, LAYERS))
            raise ValueError(f"the decoder has a {type(layer).__name__}, expected {names} only")
    return found


def enable(target: Target) -> Target:
    """Lets a megatron-core model run packed groups. Calls without :class:`PackedGroups` do not change.

    Either the spec, before the model is built from it, or the built model:

        spec = enable(get_gpt_layer_local_spec(...))
        model = GPTModel(config, spec, ...)

    Then, on every rank,

        logits = model(batch.input_ids, batch.position_ids, None, packed_seq_params=PackedGroups(batch))

    input_ids is [1, T], the groups of :func:`dualkv.pack` or `pack_sequences` in one packed row. The attention mask is
    None. Routers of experts count rollouts. `deterministic_mode` of the config gives bitwise equal gradients.

    Args:
        target: a `ModuleSpec` or the submodules of a transformer layer or block, or a `GPTModel` or `HybridModel`,
            alone or in wrappers (DDP, `Float16Module`). It is changed in place.

    Returns:
        The same object.

    Raises:
        ValueError: a layer that is neither megatron-core's causal `SelfAttention` or `MLASelfAttention` with its own
            core attention nor its `GatedDeltaNet` or `MambaMixer`, a router that is not its `TopKRouter`, or a config
            that :mod:`dualkv.integrations.megatron.configs` refuses. Of a spec the config is checked when a layer is
            built. Every rank raises the same error. Calls raise ValueError for what docs/megatron.md names.
        TypeError: neither a spec nor a model.
    """
    if not isinstance(target, nn.Module):
        layers = _specs(target)
        for number, layer in enumerate(layers):
            inner, crossed = layer.self_attention, layer.cross_attention
            crossed = crossed.module if isinstance(crossed, ModuleSpec) else crossed
            where = f"layer {number} of the spec"
            if not isinstance(inner, ModuleSpec):
                raise ValueError(f"self_attention of {where} is {_name(inner)}, expected the ModuleSpec of one")
            core = getattr(inner.submodules, "core_attention", None)
            _check_attention(where, inner.module, core, crossed, inner.params.get("attn_mask_type"))
            if (experts := _experts(where, layer.mlp)) is not None:
                _check_router(where, experts.router)
        _swap(target, PACKED)
        return target
    layers, model = layers_of(target), decoder_model(target)
    refuse(model.config)
    if isinstance(model, GPTModel):
        latent = model.config.multi_latent_attention
        if model.position_embedding_type not in (known := ROTARY if latent else (*ROTARY, MULTIMODAL)):
            expected = ", ".join(map(repr, known))
            raise ValueError(f"position_embedding_type is {model.position_embedding_type!r}, expected {expected}")
        if (section := model.config.mrope_section) is not None and model.position_embedding_type != MULTIMODAL:
            raise ValueError(
                f"mrope_section is {section!r} and position_embedding_type {model.position_embedding_type!r}, expected"
                f" None or {MULTIMODAL!r}"
            )
    else:
        _check_hybrid(model)
    for layer in layers:
        where, inner = f"layer {layer.layer_number}", mixer_of(layer)
        if isinstance(model, GPTModel) or not isinstance(inner, IdentityOp):  # layers of hybrids have one part
            core, mask_type = getattr(inner, "core_attention", None), getattr(inner, "attn_mask_type", None)
            crossed = type(getattr(layer, "cross_attention", IdentityOp()))
            _check_attention(where, type(inner), type(core), crossed, mask_type)
        for router in _routers(layer):
            _check_router(where, type(router))
            if isinstance(inner, IdentityOp) and (names := counted(model.config)):
                raise ValueError(
                    f"{names[0]} is {getattr(model.config, names[0])!r}, expected none in a {_name(type(model))}: the"
                    f" router of {where} has no attention that says which rollouts share a row"
                )
    patching.undo(target, "enable")
    if getattr(model, "position_embedding_type", None) == MULTIMODAL:
        media.enable(target, model)
    _swap(target, PACKED)
    return target


def _check_hybrid(model: Any) -> None:
    """Raises ValueError for a HybridModel that cannot run packed groups, whatever its layers."""
    kind, ranks = model.position_embedding_type, model.config.context_parallel_size
    if kind not in (*ROTARY, "none"):
        expected = ", ".join(map(repr, (*ROTARY, "none")))
        raise ValueError(f"position_embedding_type is {kind!r}, expected {expected}")
    if kind == "none" and not model.config.is_hybrid_model:
        raise ValueError("is_hybrid_model is False, expected True: attention gets no rotary_pos_emb then")
    if kind != "none" and ranks > 1:
        raise ValueError(
            f"position_embedding_type is {kind!r} and context_parallel_size {ranks}, expected 'none' or 1: HybridModel"
            " cuts rotary frequencies into shares of its own"
        )
    if model.mtp_num_depths:
        raise ValueError(
            f"hybrid_layer_pattern is {model.hybrid_layer_pattern!r}, expected none of multi-token prediction: the next"
            " token of a packed row is not always the next row"
        )


def disable(target: Target) -> Target:
    """Undoes :func:`enable`; a spec or model that was not enabled does not change. Returns the same object."""
    if isinstance(target, nn.Module):
        patching.undo(target, "enable")
    _swap(target, STOCK)
    return target


def _swap(target: Any, classes: dict[type, type]) -> None:
    """Puts the classes' values in the place of their keys, in every layer of a spec or model. Layers whose attention is
    another one, or none, stay as they are."""
    if isinstance(target, nn.Module):
        for layer in layers_of(target):
            inner = mixer_of(layer)
            for module in (inner, getattr(inner, "core_attention", None), *_routers(layer)):
                swap(module, "__class__", classes)
        return
    for layer in _specs(target):
        inner = layer.self_attention
        if isinstance(inner, ModuleSpec) and inner.module in classes:
            swap(inner, "module", classes)
            swap(inner.submodules, "core_attention", classes)
        if (experts := _experts("", layer.mlp)) is not None:
            swap(experts, "router", classes)
