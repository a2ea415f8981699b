"""Packed groups in models of Hugging Face transformers: `enable(model)`, then `model(..., dualkv=layout)`.

Nothing in a model is replaced. `enable` registers one more attention implementation and names it in the decoder's
config. With a layout this implementation runs :func:`dualkv.attention`. Without a layout it runs the implementation
that was there before. The registered name contains the name of that implementation (`dualkv|sdpa`), so copies of a
model, several models in one process and pickles need no other record. A saved config names no implementation.

A forward pre-hook on the decoder checks each call once, before the first layer, and prevents transformers from making
a [T, T] mask.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from dualkv.integrations import require

require("transformers")

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from codegen.tiles import HEAD_DIMS
from dualkv.integrations import selfcheck
from dualkv.layout import Layout, segments_of
from dualkv.ops.attention import attention
from dualkv.sequence_parallel import Shard

Model = TypeVar("Model", bound=nn.Module)

# Prefixes of the registered names, by `deterministic`. The name of the model's own implementation follows, because
# transformers looks for parts of that name ("flash" decides how masks and caches are made).
PREFIX = {False: "dualkv|", True: "dualkv-deterministic|"}

# Arguments of attention functions and attributes of attention modules that change softmax(q k^T) v.
FEATURES = {
    "sliding_window": "a sliding window",
    "softcap": "logit softcapping",
    "attn_logit_softcapping": "logit softcapping",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "dropout": "attention dropout",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "output_attentions": "attention weights as an output",
    "cu_seq_lens_q": "sequence lengths next to the layout",
    "cu_seq_lens_k": "sequence lengths next to the layout",
}

ATTRIBUTES = ("sliding_window", "softcap", "attn_logit_softcapping", "sinks")

# Keyword arguments that a model passes to every layer and that do not change attention.
NEUTRAL = {
    "position_ids",
    "use_cache",
    "cache_position",
    "num_items_in_batch",
    "shift_labels",
    "return_dict",
    "logits_to_keep",
    "output_hidden_states",
    "output_router_logits",
    "debug_io",
}

# Names that processors and models use for inputs other than text.
MEDIA = re.compile(r"pixel|image|video|audio|visual|vision|speech|grid_thw|input_features|mm_token_type_ids|deepstack")

# Heads that make one row of logits for a whole input.
POOLING = ("ForSequenceClassification", "ForMultipleChoice", "DoubleHeadsModel")

# Shape of the mask of a call with a layout. No model makes a mask of this shape, and attention cannot compute with it.
NO_MASK = (1, 1, 0, 0)


# ---------------------------------------------------------------- the attention modules of a model
Route = tuple[AttentionInterface, Callable[..., Any]]
_ROUTES: dict[type, Route | None] = {}  # a dictionary, not functools.cache: dynamo reads it while it traces


def _route(cls: type[nn.Module]) -> Route | None:
    """The registry and the eager function from which `cls.forward` takes its attention; None if it uses no registry."""
    if cls not in _ROUTES:
        forward = inspect.unwrap(cls.forward)
        code = getattr(forward, "__code__", None)
        found = None
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            names = forward.__globals__
            eager = [names[n] for n in code.co_names if n.endswith("eager_attention_forward") and n in names]
            found = (names["ALL_ATTENTION_FUNCTIONS"], eager[0]) if eager else None
        _ROUTES[cls] = found
    return _ROUTES[cls]


_ARGUMENTS: dict[type, tuple[str, ...]] = {}


def _arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments of `cls.forward`, in order."""
    if cls not in _ARGUMENTS:
        _ARGUMENTS[cls] = tuple(inspect.signature(cls.forward).parameters)[1:]
    return _ARGUMENTS[cls]


def _parents(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that contain module `name`, innermost first, `model` last."""
    while name:
        name = name.rpartition(".")[0]
        yield name, model.get_submodule(name)


def _decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module, PreTrainedModel]]:
    """Attention modules that take their attention from the registry: (name, module, decoder).

    The decoder is the innermost pretrained model that contains the module; it makes the masks. Models without a causal
    layer or without token ids (the vision tower of a multimodal model) are no decoders.
    """
    found = []
    for name, module in model.named_modules():
        if _route(type(module)) is not None:
            owners = (parent for _, parent in _parents(model, name) if isinstance(parent, PreTrainedModel))
            owner = next(owners, None)
            if owner is not None and "input_ids" in _arguments(type(owner)):
                found.append((name, module, owner))
    causal = {id(owner) for _, module, owner in found if _is_causal(module)}
    return [layer for layer in found if id(layer[2]) in causal]


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention layers that can run packed groups."""
    return [module for _, module, _ in _decoder_layers(model)]


def _decoders(model: nn.Module) -> list[PreTrainedModel]:
    """The decoders of these layers, each once."""
    return list({id(owner): owner for _, _, owner in _decoder_layers(model)}.values())


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", False))


def _base(config: Any) -> str | None:
    """The model's own implementation if `config` names a registered one of this module, else None."""
    name = config._attn_implementation or ""
    return next((name.removeprefix(prefix) for prefix in PREFIX.values() if name.startswith(prefix)), None)


# ---------------------------------------------------------------- refusals of models
def _unsupported(name: str, value: Any) -> str | None:
    """The unsupported feature that `name=value`, an attribute or argument of an attention layer, asks for, or None."""
    if value is None or value is False or (name == "dropout" and value == 0):
        return None
    shown = f"{name} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{name}={value!r}"
    feature = f"{FEATURES[name]} ({shown})" if name in FEATURES else f"the argument {shown}"
    return f"{feature}, which dualkv.attention does not compute"


def _objections(model: nn.Module) -> Iterator[str]:
    """Reasons, by a model's fields, why it cannot run packed groups: wrong visibility or unsupported attention."""
    layers = _decoder_layers(model)
    if not layers:
        yield f"{type(model).__name__} has no causal attention layer that goes through transformers' attention registry"
    for module in model.modules():
        head = next((c.__name__ for c in type(module).__mro__ if c.__name__.endswith(POOLING)), None)
        if head is not None:
            yield (
                f"{type(module).__name__} makes one row of logits for its whole input, which packed sequences share:"
                " use a head that makes one for each token (ForTokenClassification)"
            )
    for decoder in _decoders(model):
        config, name = decoder.config, type(decoder).__name__
        for at, kind in enumerate(getattr(config, "layer_types", None) or []):
            if kind != "full_attention":
                yield f"layer {at} of {name} is {kind}, dualkv.attention computes full_attention only"
        if decoder._is_stateful:
            yield f"{name} carries a recurrent state along the rows, which would mix packed responses"
        if getattr(config, "is_encoder_decoder", False):
            yield f"{name} is an encoder-decoder model, dualkv.attention is causal self-attention only"
        if config.output_attentions:
            yield f"{name} is configured with output_attentions=True, dualkv.attention makes no weights"
        if config._attn_implementation is None:
            yield f"{name} has no attention implementation set, call set_attn_implementation first"
    for name, module, _ in layers:
        layer = f"{name} ({type(module).__name__})"
        if not _is_causal(module):
            yield f"{layer} is not causal self-attention, the only kind that dualkv.attention computes"
        for attribute in ATTRIBUTES:
            if (feature := _unsupported(attribute, getattr(module, attribute, None))) is not None:
                yield f"{layer} uses {feature}"
        dim = getattr(module, "head_dim", None)
        if isinstance(dim, int) and dim > HEAD_DIMS[-1]:
            yield f"{layer} has head dim {dim}, dualkv.attention computes up to {HEAD_DIMS[-1]}"
        # Every layer of the stack must be a known attention layer: another kind of layer may mix rows in its own way.
        stack = next((up for up, parent in _parents(model, name) if isinstance(parent, nn.ModuleList)), None)
        if stack is None:
            continue
        for index, other in model.get_submodule(stack).named_children():
            if not any(known.startswith(f"{stack}.{index}.") for known, _, _ in layers):
                yield (
                    f"{stack}.{index} ({type(other).__name__}) has no causal attention that goes through transformers'"
                    " attention registry"
                )


def _refuse_model(model: nn.Module) -> None:
    """Raises ValueError for a model that cannot run packed groups, by its fields."""
    for sentence in _objections(model):
        raise ValueError(sentence)


# ---------------------------------------------------------------- a call with a layout
@torch.library.custom_op("dualkv::position_ids", mutates_args=())
def _position_ids(
    tokens: torch.Tensor, position_ids: torch.Tensor | None, offsets: torch.Tensor, parent: torch.Tensor
) -> torch.Tensor:
    """The layout's position ids [1, T] int64 for `tokens` [1, T, ...]; raises if the given ones differ.

    This is an op, so that a compiled model also checks every batch. On a GPU the comparison is an asynchronous
    assertion, which stops the process at the next synchronisation. The host does not wait for the device here.
    """
    layout = Layout(segments_of(offsets, parent), offsets, parent, tokens.device)
    return _checked_positions(tokens, position_ids, layout.position_ids[None])


@_position_ids.register_fake
def _(
    tokens: torch.Tensor, position_ids: torch.Tensor | None, offsets: torch.Tensor, parent: torch.Tensor
) -> torch.Tensor:
    return tokens.new_empty(tokens.shape[:2], dtype=torch.int64)


def _checked_positions(tokens: torch.Tensor, position_ids: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
    """A copy of `own` [1, T], the layout's positions; raises if the tokens or the given positions do not fit them."""
    if tokens.shape[1] != own.shape[1]:
        raise ValueError(f"the model is given {tokens.shape[1]} tokens, the layout has {own.shape[1]}")
    if position_ids is not None:
        if position_ids.shape != own.shape or position_ids.device != own.device:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)} on {position_ids.device},"
                f" expected {tuple(own.shape)} on {own.device} (leave it out to use the layout's)"
            )
        differs = position_ids != own
        if differs.device.type != "cpu":
            torch._assert_async(~differs.any(), "position_ids are not the layout's")
        elif differs.any():
            at = int(differs.int().argmax())
            raise ValueError(
                f"position_ids[0, {at}] is {int(position_ids[0, at])}, the layout's is {int(own[0, at])}"
                " (leave it out to use the layout's)"
            )
    return own.clone()


def _refuse_media(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for name, value in (*zip(_arguments(type(module)), args, strict=False), *kwargs.items()):
        if MEDIA.search(name) and _has_tensor(value):
            raise ValueError(
                f"{name} came together with dualkv: only text runs packed, because the rows of an image, a video or"
                " audio have positions that a layout does not know; run such a batch without a layout"
            )


def _has_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


def _enter_decoder(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the decoder: checks a call with a layout, fills in positions, cache and mask."""
    layout = kwargs.get("dualkv")
    if layout is None:
        return None
    if not isinstance(layout, Layout | Shard):
        raise TypeError(f"dualkv is a {type(layout).__name__}, expected a dualkv.Layout")
    name = type(module).__name__
    _refuse_media(module, (), kwargs)
    if _base(module.config) is None:
        raise ValueError(
            f"{name} was set to {module.config._attn_implementation!r} after dualkv was enabled: enable the model again"
        )
    if len(args) > 1:
        raise ValueError(f"{name} got {len(args)} positional arguments, expected only input_ids: name the others")
    tokens = next((x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None), None)
    if tokens is None:
        raise ValueError(f"{name} got neither input_ids nor inputs_embeds")
    if tokens.dim() < 2 or tokens.shape[0] != 1:
        raise ValueError(
            f"input_ids has shape {tuple(tokens.shape[:2])}, expected [1, T]: all groups in one packed row"
        )
    if kwargs.get("attention_mask") is not None:
        raise ValueError("attention_mask came together with dualkv: the layout says who sees whom, leave the mask out")
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise ValueError("past_key_values or use_cache came together with dualkv: packed groups run without a cache")
    mask = torch.empty(NO_MASK, device=tokens.device)  # transformers makes no mask if it gets one of 4 dims
    given = kwargs.get("position_ids")
    if isinstance(layout, Shard):
        position_ids = _checked_positions(tokens, given, layout.position_ids.to(tokens.device)[None])
    else:
        position_ids = _position_ids(tokens.detach(), given, layout.offsets, layout.parent)
    return args, {**kwargs, "use_cache": False, "attention_mask": mask, "position_ids": position_ids}


def _enter_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the models that contain the decoder: refuses images, and labels that would be shifted."""
    if kwargs.get("dualkv") is None:
        return
    _refuse_media(module, args, kwargs)
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "labels came together with dualkv and would be shifted by one row, from response to response: pass the"
            " label of each row as shift_labels too, or use dualkv.response_logprobs"
        )


HOOKS = (_enter_decoder, _enter_head)


# ---------------------------------------------------------------- the registered implementations
class _UnderOwnName:
    """An attention module whose config names the model's own implementation, which FlashAttention's function reads."""

    class _Config:
        def __init__(self, config: Any, base: str) -> None:
            self._config, self._attn_implementation = config, base

        def __getattr__(self, name: str) -> Any:
            return getattr(self._config, name)

    def __init__(self, module: nn.Module, base: str) -> None:
        self._module, self.config = module, self._Config(module.config, base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _layer(module: nn.Module) -> str:
    return f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"


def _packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    layout: Layout | Shard,
    deterministic: bool,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D]."""
    layer = _layer(module)
    for name, value_of in kwargs.items():
        if name not in NEUTRAL and (feature := _unsupported(name, value_of)) is not None:
            raise ValueError(f"{layer} uses {feature}")
    if is_causal is False or not _is_causal(module):
        raise ValueError(f"{layer} is not causal self-attention, the only kind that dualkv.attention computes")
    if attention_mask is None or attention_mask.shape != NO_MASK:
        raise ValueError(
            f"{layer} got a layout outside a call of its enabled model, or the model makes its own attention mask or"
            " position bias, which dualkv.attention does not compute"
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if isinstance(layout, Shard):
        out = layout.attention(q, k, v, softmax_scale=scaling, deterministic=deterministic)
    else:
        out = attention(q, k, v, layout, softmax_scale=scaling, deterministic=deterministic)
    return out.unsqueeze(0), None


def _register(base: str, deterministic: bool) -> str:
    """Registers an implementation that runs packed groups with a layout and `base` without one; returns its name."""
    name = PREFIX[deterministic] + base
    in_place = base in ("eager", "sdpa")

    def forward(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        dualkv: Layout | Shard | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if dualkv is not None:
            return _packed_attention(module, query, key, value, attention_mask, dualkv, deterministic, **kwargs)
        if isinstance(attention_mask, torch.Tensor) and attention_mask.shape == NO_MASK:
            raise ValueError(
                f"{_layer(module)} is not handed the layout that the model was called with: {type(module).__name__}'s"
                " callers do not pass keyword arguments on"
            )
        route = _route(type(module))
        assert route is not None, f"{type(module).__name__} was called without going through the registry"
        interface, eager = route
        own = interface.get_interface(base, eager)
        seen_as = module if in_place else _UnderOwnName(module, base)
        return own(seen_as, query, key, value, attention_mask, **kwargs)

    AttentionInterface.register(name, forward)
    if base in ALL_MASK_ATTENTION_FUNCTIONS:
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def _configs(model: nn.Module) -> list[Any]:
    """The configs of decoders and of their layers, which name the implementation, each once."""
    configs = (config for _, module, owner in _decoder_layers(model) for config in (module.config, owner.config))
    return list({id(config): config for config in configs}.values())


def enable(model: Model, *, deterministic: bool = False, check: bool = True) -> Model:
    """Lets `model(input_ids=..., dualkv=layout)` run packed groups. Calls without a layout do not change.

    With a layout every attention layer runs :func:`dualkv.attention`. No attention mask is made and no cache is kept:

        model(input_ids=batch.input_ids, position_ids=batch.position_ids, dualkv=batch.layout)

    The batch is the result of :func:`dualkv.pack` or `pack_sequences`; a layout may have any depth. input_ids is
    [1, T], all groups in one packed row (or inputs_embeds [1, T, C]). position_ids [1, T] must be the layout's
    positions, which are filled in when position_ids is left out. On a GPU wrong positions end in a device-side
    assertion. With sequence parallelism `dualkv` is a :class:`dualkv.sequence_parallel.Shard`, and T counts the rows of
    this rank. The model cannot shift labels. Rotary embeddings that depend on the longest sequence of a batch see the
    longest packed sequence. Auxiliary losses over tokens (the load balancing loss of a mixture of experts) count a
    shared prompt once; the replicated sequences count it once a response.

    Wrapped models (DDP, FSDP, PEFT, `torch.compile`) may be enabled before or after the wrapping. A second call only
    sets `deterministic` again.

    Args:
        model: a transformers model or a wrapper around one. It is changed in place: the attention implementation of
            its config, and forward pre-hooks.
        deterministic: bitwise equal gradients from run to run.
        check: run a small copy of the decoder (its class, its configuration with fewer layers, heads and columns,
            random weights) on the CPU, packed and replicated, and refuse the model if hidden states differ. The check
            takes about a second, once for each configuration in a process. The model itself is not run.

    Returns:
        The same model.

    Raises:
        ValueError: the small copy differs or cannot run (see `check`); a layer does not take its attention from
            transformers' registry, has a sliding window, softcapping, sinks or a recurrent state, or is not causal; a
            head makes one row of logits for a whole input.
            A call with a layout raises ValueError for attention dropout in training, masks, caches, images, and a token
            count or positions other than the layout's.
    """
    _refuse_model(model)
    inner = _decoders(model)
    disable(model)
    if check:
        for decoder in inner:
            selfcheck.check(decoder, enable)
    for config in _configs(model):
        config._attn_implementation = {"": _register(config._attn_implementation, deterministic)}
    for module in model.modules():
        if module in inner:
            module.register_forward_pre_hook(_enter_decoder, with_kwargs=True)
        elif isinstance(module, PreTrainedModel) and any(part in inner for part in module.modules()):
            module.register_forward_pre_hook(_enter_head, with_kwargs=True)
    return model


def disable(model: Model) -> Model:
    """Undoes :func:`enable`; a model that was not enabled does not change. Returns the same model."""
    for config in _configs(model):
        base = _base(config)
        if base is not None:
            config._attn_implementation = {"": base}
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook in HOOKS:
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    return model


# ---------------------------------------------------------------- gradient checkpointing
_ATTENTION = [torch.ops.dualkv.fwd.default]
_aten = torch.ops.aten
KEEP: dict[str, list[Any]] = {
    "nothing": [],
    "attention": _ATTENTION,
    "products": [*_ATTENTION, _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default],
}


def recompute_layers(model: Model, keep: str = "nothing") -> Model:
    """Gradient checkpointing of every layer, with some results kept and not computed again.

    Packed groups have fewer rows and so leave memory for kept results. Attention is the first to keep: its output and
    log-sum-exp are small for the time that they take. Results do not depend on `keep`.

    Args:
        model: a transformers model, changed in place. Wrappers (FSDP, PEFT) may be applied before or after.
        keep: "nothing" keeps only the input of each layer. "attention" also keeps out and lse of
            :func:`dualkv.attention`: T * H * (2 * D + 4) bytes a layer in bf16. "products" also keeps the results of
            all matrix products, so that only elementwise operations are computed again: T rows of every projection,
            about 86 kB a row and layer for Qwen3-8B.

    Returns:
        The same model.

    Raises:
        ValueError: another `keep`; "products" for a model whose rotary embedding overwrites them (Liger's, in a model
            without norms of q and k).
    """
    if keep not in KEEP:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(KEEP)}")
    arguments: dict[str, Any] = {"use_reentrant": False}
    if keep != "nothing":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, KEEP[keep])
    if keep == "products":
        _refuse_overwritten_products(model)
    # transformers renamed it within version 5.
    enable_it: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable_it(arguments)
    return model


def _refuse_overwritten_products(model: nn.Module) -> None:
    """Raises ValueError if Liger's kernel rotates q and k in place, unseen by PyTorch: kept ones would rotate twice."""
    for name, module, _ in _decoder_layers(model):
        rotate = inspect.unwrap(type(module).forward).__globals__.get("apply_rotary_pos_emb")
        if getattr(rotate, "__module__", "").startswith("liger_kernel") and not hasattr(module, "q_norm"):
            raise ValueError(
                f"{name} ({type(module).__name__}) rotates its projections in place by Liger's kernel, which keep="
                "'products' would do twice: use keep='attention', or Liger with rope=False"
            )


# A pickled model names its implementation. Importing this module registers the usual ones, for unpickling.
for _name in ("eager", *AttentionInterface._global_mapping):
    for _deterministic in PREFIX:
        if not _name.startswith(tuple(PREFIX.values())):
            _register(_name, _deterministic)
