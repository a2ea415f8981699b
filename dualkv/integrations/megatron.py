"""Packed groups in models of megatron-core: `enable(model)`, then `model(..., packed_seq_params=PackedGroups(layout))`.

`enable` takes a layer spec, before a model is built from it, or a built `GPTModel`. It puts two subclasses in place of
megatron-core's classes: one of `SelfAttention`, which gathers the rotary frequencies by the layout's positions, and one
of the core attention (`DotProductAttention` of the local spec, `TEDotProductAttention` of Transformer Engine's), which
runs :func:`dualkv.attention`. Neither has parameters or state of its own, so checkpoints do not change. Calls without
:class:`PackedGroups` run megatron-core's code.

The format of :class:`PackedGroups` is called "dualkv". An attention module of megatron-core that gets it raises an
error: its own packed format ("thd") would run all groups as one sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from dualkv.integrations import require

require("megatron")

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention
from torch import nn

from codegen.tiles import HEAD_DIMS
from dualkv.layout import Layout
from dualkv.ops.attention import attention

Target = TypeVar("Target")
CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
ROTARY = ("rope", "yarn")

# Fields of a TransformerConfig: the value that packed groups need, and why. Some versions lack some of them.
NEEDED: dict[str, tuple[Any, str]] = {
    "multi_latent_attention": (False, "latent attention is not computed"),
    "context_parallel_size": (1, "the rows of a packed group are not split over ranks"),
    "virtual_pipeline_model_parallel_size": (None, "packed groups do not run through interleaved stages yet"),
    "attention_dropout": (0, "attention dropout is not computed"),
    "mrope_section": (None, "multimodal rotary embeddings have positions that a layout does not say"),
    "mtp_num_layers": (None, "the next token of a packed row is not always the next row"),
    "fused_single_qkv_rope": (False, "megatron-core runs it for unpacked sequences only"),
    "fp8_dot_product_attention": (False, "attention is computed in 16 bits or more"),
    "fp8_multi_head_attention": (False, "attention is computed in 16 bits or more"),
    "qk_clip": (False, "the largest attention logit is not recorded"),
    "log_max_attention_logit": (False, "the largest attention logit is not recorded"),
    "batch_invariant_mode": (False, "kernels choose their order of summation by the layout"),
    "cuda_graph_impl": ("none", "a CUDA graph would repeat the attention of one layout"),
    "enable_cuda_graph": (False, "a CUDA graph would repeat the attention of one layout"),
    "external_cuda_graph": (False, "a CUDA graph would repeat the attention of one layout"),
    "moe_expert_capacity_factor": (None, "which tokens an expert drops depends on all rows of a micro-batch"),
}


# ---------------------------------------------------------------- what a call is given
class PackedGroups(PackedSeqParams):
    """A layout on its way through a megatron-core model, as `packed_seq_params`.

    Make one for each micro-batch, on every pipeline stage from the same layout.

    Attributes:
        layout: which of the T rows belong to which prompt and response; of any depth, on the device of the model.

    Raises:
        TypeError: the layout is not a :class:`dualkv.Layout`.
    """

    def __init__(self, layout: Layout) -> None:
        if not isinstance(layout, Layout):
            raise TypeError(f"layout is a {type(layout).__name__}, expected a dualkv.Layout")
        longest = layout._segments.longest_path  # positions for which the model makes rotary frequencies
        super().__init__(qkv_format="dualkv", max_seqlen_q=longest, max_seqlen_kv=longest)
        self.layout = layout
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None

    def _frequencies(self, by_position: torch.Tensor) -> torch.Tensor:
        """[T, 1, 1, D]: of rotary frequencies [longest path, 1, 1, D] those of each row.

        One result serves all layers of a model, which get the same tensor.
        """
        if self._gathered is None or self._gathered[0] is not by_position:
            expected = (self.max_seqlen_q, 1, 1)
            if by_position.shape[:-1] != expected:
                raise ValueError(
                    f"rotary_pos_emb has shape {tuple(by_position.shape)}, expected {(*expected, 'D')}: frequencies of"
                    " the positions of the layout's longest path"
                )
            positions = self.layout.position_ids.to(by_position.device)
            self._gathered = by_position, by_position.index_select(0, positions)
        return self._gathered[1]


# ---------------------------------------------------------------- the two modules
class _PackedSelfAttention(SelfAttention):
    """[T, 1, C] -> [T, 1, C] and a bias; with sequence parallelism T / tensor_model_parallel_size rows on each rank."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        refuse(config)
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: Any,
    ) -> Any:
        if isinstance(packed_seq_params, PackedGroups):
            self._check(hidden_states, packed_seq_params.layout, kwargs)
            if rotary_pos_emb is None:
                raise ValueError(
                    f"layer {self.layer_number} gets no rotary_pos_emb, expected a model whose position_embedding_type"
                    f" is {' or '.join(ROTARY)}"
                )
            rotary_pos_emb = packed_seq_params._frequencies(rotary_pos_emb)
        return super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )

    def _check(self, hidden_states: torch.Tensor, layout: Layout, others: dict[str, Any]) -> None:
        for name in ("inference_context", "inference_params"):
            if others.get(name) is not None:
                raise ValueError(f"{name} came together with PackedGroups: packed groups run without a cache")
        ranks = self.config.tensor_model_parallel_size if self.config.sequence_parallel else 1
        rows, batch = hidden_states.shape[0] * ranks, hidden_states.shape[1]
        if (rows, batch) != (layout.num_tokens, 1):
            raise ValueError(
                f"layer {self.layer_number} gets {batch} sequences of {rows} tokens, expected one of"
                f" {layout.num_tokens}: all groups of the layout in one packed row"
            )


class _CoreAttention(nn.Module):
    """query [T, 1, H, D], key and value [T, 1, Hk, D] of this rank's heads -> [T, 1, H * D]."""

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
            return super().forward(
                query,
                key,
                value,
                attention_mask,
                *args,
                attention_bias=attention_bias,
                packed_seq_params=packed_seq_params,
                **kwargs,
            )
        for name, given in (("attention_mask", attention_mask), ("attention_bias", attention_bias)):
            if given is not None:
                raise ValueError(f"{name} came together with PackedGroups: the layout says who sees whom, leave it out")
        config, offset = self.config, getattr(self, "softmax_offset", None)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, self.layer_number)
        out = attention(
            query.squeeze(1),
            key.squeeze(1),
            value.squeeze(1),
            packed_seq_params.layout,
            softmax_scale=config.softmax_scale,
            deterministic=config.deterministic_mode,
            window=_window(config) if windowed else None,
            sinks=None if offset is None else offset.flatten(),
        )
        return out.reshape(len(out), 1, -1)


class _PackedDotProductAttention(_CoreAttention, DotProductAttention):
    pass


PACKED: dict[type, type] = {SelfAttention: _PackedSelfAttention, DotProductAttention: _PackedDotProductAttention}

if HAVE_TE:

    class _PackedTEDotProductAttention(_CoreAttention, TEDotProductAttention):
        pass

    PACKED[TEDotProductAttention] = _PackedTEDotProductAttention

STOCK = {packed: stock for stock, packed in PACKED.items()}


# ---------------------------------------------------------------- refusals
def _window(config: Any) -> int | None:
    """Keys that a row of a windowed layer sees. `window_size` is (keys to the left, keys to the right)."""
    left = config.window_size[0]
    return None if left == -1 else left + 1


def _objections(config: Any) -> Iterator[str]:
    """Reasons, by a TransformerConfig, why its model cannot run packed groups."""
    for name, (needed, why) in NEEDED.items():
        value = getattr(config, name, needed)
        if (value or None) != (needed or None):
            yield f"{name} is {value!r}, expected {needed!r}: {why}"
    window = config.window_size
    if window and (window[0] < -1 or window[1] != 0):
        yield f"window_size is {tuple(window)}, expected (n, 0) or (-1, 0): causal attention sees no key to the right"
    dim = config.kv_channels
    if dim % 8 or not 8 <= dim <= HEAD_DIMS[-1]:
        yield f"kv_channels is {dim}, expected a multiple of 8 up to {HEAD_DIMS[-1]}"
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        yield (
            f"variable_seq_lengths is False and pipeline_model_parallel_size {config.pipeline_model_parallel_size},"
            " expected True: stages exchange micro-batches of different lengths"
        )


def refuse(config: Any) -> None:
    """Raises ValueError for the TransformerConfig of a model that cannot run packed groups."""
    for sentence in _objections(config):
        raise ValueError(sentence)


def _name(found: Any) -> str:
    return found.__name__ if isinstance(found, type) else type(found).__name__


def _check_attention(where: str, attention: Any, core: Any, crossed: Any, mask_type: Any) -> None:
    """Raises ValueError for a layer whose attention is not causal self-attention of megatron-core.

    Args:
        where: the layer's name in the message.
        attention, core: the classes of its self-attention and of the core attention in it.
        crossed: the class of its cross-attention.
        mask_type: of its self-attention.
    """
    if crossed is not IdentityOp:
        raise ValueError(f"{where} has cross-attention ({_name(crossed)}), expected a layer of a decoder without it")
    for part, found, expected in (
        ("self_attention", attention, [SelfAttention]),
        ("core_attention", core, [stock for stock in PACKED if stock is not SelfAttention]),
    ):
        if STOCK.get(found, found) not in expected:
            names = " or ".join(_name(one) for one in expected)
            raise ValueError(f"{part} of {where} is {_name(found)}, expected megatron-core's {names}")
    if mask_type not in CAUSAL:
        shown = getattr(mask_type, "name", mask_type)
        raise ValueError(f"{where} has attn_mask_type {shown}, expected {' or '.join(t.name for t in CAUSAL)}")


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


def gpt_model(model: nn.Module) -> GPTModel:
    """The GPTModel that a model is or holds; raises ValueError for other models."""
    found = [module for module in model.modules() if isinstance(module, GPTModel)]
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__} holds {len(found)} GPTModel, expected one")
    return found[0]


def _layers(model: nn.Module) -> list[TransformerLayer]:
    """The layers of a GPTModel's decoder, on this pipeline stage; raises ValueError for other models."""
    found = list(gpt_model(model).decoder.layers)
    for layer in found:
        if not isinstance(layer, TransformerLayer):
            raise ValueError(f"the decoder has a {type(layer).__name__}, expected TransformerLayer only")
    return found


def enable(target: Target) -> Target:
    """Lets a megatron-core model run packed groups. Calls without :class:`PackedGroups` do not change.

    Either the spec, before the model is built from it, or the built model:

        spec = enable(get_gpt_layer_local_spec(...))
        model = GPTModel(config, spec, ...)

    Then, on every rank,

        logits = model(batch.input_ids, batch.position_ids, None, packed_seq_params=PackedGroups(batch.layout))

    input_ids is [1, T], the groups of :func:`dualkv.pack` or `pack_sequences` in one packed row. The attention mask is
    None. Every layer runs :func:`dualkv.attention` over this rank's heads, with the window of the layer and the softmax
    offset of its heads. With sequence parallelism T must be a multiple of the tensor-parallel size
    (:func:`dualkv.sequence_parallel.padded`). Auxiliary losses of experts count a shared prompt once. Recomputation of
    layers or of the core attention needs nothing else. `deterministic_mode` of the config gives bitwise equal gradients
    from run to run.

    Args:
        target: a `ModuleSpec` or the submodules of a transformer layer or block, or a `GPTModel`, alone or in wrappers
            (DDP, `Float16Module`). It is changed in place.

    Returns:
        The same object.

    Raises:
        ValueError: a layer whose attention is not causal `SelfAttention` of megatron-core with its own core attention,
            or a config with latent attention, attention dropout, context parallelism, interleaved pipeline stages,
            multimodal rotary embeddings, multi-token prediction, CUDA graphs, 8-bit attention, experts that drop
            tokens, a window to the right, or pipeline stages that exchange micro-batches of one length. Of a spec the
            config is checked when a layer is built. Every rank raises the same error.
            A call raises ValueError for an attention mask or bias, a cache, another number of tokens than the layout's,
            and a model without rotary embeddings.
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
        _swap(target, PACKED)
        return target
    layers = _layers(target)
    gpt = gpt_model(target)
    refuse(gpt.config)
    if gpt.position_embedding_type not in ROTARY:
        raise ValueError(
            f"position_embedding_type is {gpt.position_embedding_type!r}, expected {' or '.join(map(repr, ROTARY))}"
        )
    for layer in layers:
        inner = layer.self_attention
        core = getattr(inner, "core_attention", None)
        mask_type = getattr(inner, "attn_mask_type", None)
        _check_attention(f"layer {layer.layer_number}", type(inner), type(core), type(layer.cross_attention), mask_type)
    _swap(target, PACKED)
    return target


def disable(target: Target) -> Target:
    """Undoes :func:`enable`; a spec or model that was not enabled does not change. Returns the same object."""
    _swap(target, STOCK)
    return target


def _swap(target: Any, classes: dict[type, type]) -> None:
    """Puts the classes' values in the place of their keys, in every layer of a spec or model."""
    if isinstance(target, nn.Module):
        for layer in _layers(target):
            for module in (layer.self_attention, getattr(layer.self_attention, "core_attention", None)):
                module.__class__ = classes.get(type(module), type(module))
        return
    for layer in _specs(target):
        inner = layer.self_attention
        inner.module = classes.get(inner.module, inner.module)
        inner.submodules.core_attention = classes.get(inner.submodules.core_attention, inner.submodules.core_attention)
