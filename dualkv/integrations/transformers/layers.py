"""The attention layers of a transformers model: which there are, what they compute, and why they cannot run packed."""

from __future__ import annotations

import dis
import inspect
import re
from collections.abc import Callable, Container, Iterator
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from codegen.tiles import HEAD_DIMS
from dualkv.data.gain import PAIRS_A_ROW
from dualkv.integrations import patching
from dualkv.integrations.transformers import indexers, masks, media, recurrent
from dualkv.ops.features import Features

# Entries of `config.layer_types` that packed groups run.
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Arguments of attention functions that change softmax(q k^T) v and are not computed.
UNSUPPORTED = {
    "dropout": "attention dropout",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "output_attentions": "attention weights as an output",
    "cu_seq_lens_q": "sequence lengths next to the layout",
    "cu_seq_lens_k": "sequence lengths next to the layout",
}

# Keyword arguments that a model passes to every layer and that do not change attention.
NEUTRAL = {
    *("input_ids", "position_ids", "use_cache", "cache_position", "num_items_in_batch", "labels", "shift_labels"),
    *("return_dict", "logits_to_keep", "output_hidden_states", "output_router_logits", "debug_io"),
}

# Attributes of attention modules that repeat an argument of their attention function, by that argument.
REPEATED = {"s_aux": "sinks", "softcap": "attn_logit_softcapping"}

# Layers that attend to images. Their models skip them in calls without images, and a layout refuses images of these.
OF_IMAGES = ("MllamaTextCrossAttention",)

# Heads that make one result for a whole input, by the end of their class's name: what they make.
POOLING = {
    r"For(?!Token|AudioFrame)\w*Classification": "one row of logits",
    r"ForMultipleChoice|DoubleHeadsModel|ForNextSentencePrediction": "one row of logits",
    r"ForQuestionAnswering\w*": "one distribution of starts and one of ends",
    r"ForReward\w*|RewardModel": "one reward",
}

# Models that make the masks of their decoder with a rule for blocks of images, also of text alone.
OWN_MASKS = ("Gemma4UnifiedModel",)
OF_ANOTHER_MODEL = "shared_kv_states"  # an input of drafters, with a default that their calls refuse


# ---------------------------------------------------------------- the attention modules of a model
Route = tuple[AttentionInterface, Callable[..., Any]]
_ROUTES: dict[type, Route | None] = {}  # a dictionary, not functools.cache: dynamo reads it while it traces


def route(cls: type[nn.Module]) -> Route | None:
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


def _code(of: Any) -> Any:
    """The code of the forward of a module or class, below decorators and hooks."""
    return getattr(inspect.unwrap(of.forward), "__code__", None)


_ARGUMENTS: dict[type, tuple[str, ...]] = {}


def arguments(cls: type[nn.Module]) -> tuple[str, ...]:
    """The names of the arguments of `cls.forward`, in order."""
    if cls not in _ARGUMENTS:
        _ARGUMENTS[cls] = tuple(inspect.signature(cls.forward).parameters)[1:]
    return _ARGUMENTS[cls]


def makes_masks(cls: type[nn.Module]) -> bool:
    """Whether `cls.forward` makes attention masks, for itself or for a model that it contains."""
    code = _code(cls)
    return code is not None and any(name.startswith("create_") and "mask" in name for name in code.co_names)


def numbers_rows(cls: type[nn.Module]) -> bool:
    """Whether `cls.forward` numbers the rows of its input where it gets no position_ids, as a decoder does."""
    code = _code(cls)
    return code is not None and "arange" in code.co_names


def padding_before_positions(decoder: nn.Module) -> int | None:
    """The padding's id in a decoder that numbers the tokens of a sequence from this id on, by itself only (RoBERTa)."""
    embeddings = (module for module in decoder.children() if hasattr(module, "create_position_ids_from_input_ids"))
    found = next(embeddings, None)
    return None if found is None else cast(int, found.padding_idx)


def behind_padding(padding: int, tokens: torch.Tensor, position_ids: torch.Tensor, name: str) -> torch.Tensor:
    """The positions of RoBERTa's kin, which begin behind the padding's id and do not count tokens of that id.

    Raises:
        ValueError: such a token is among the tokens [1, t]; on a GPU an asynchronous assertion fails.
    """
    if not tokens.is_floating_point():
        pads = (tokens == padding).any()
        message = f"a token is {name}'s pad_token_id ({padding}), which its positions skip: leave padding out"
        if pads.device.type != "cpu":
            torch._assert_async(~pads, message)
        elif pads:
            raise ValueError(message)
    return position_ids + padding + 1


def drops_arguments(cls: type[nn.Module]) -> bool:
    """Whether `cls.forward` takes further keyword arguments and never reads them."""
    forward = inspect.unwrap(cls.forward)
    name = next((p.name for p in inspect.signature(forward).parameters.values() if p.kind is p.VAR_KEYWORD), None)
    return name is not None and not any(x.argval == name for x in dis.get_instructions(forward))


def parents(model: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that contain module `name`, innermost first, `model` last."""
    while name:
        name = name.rpartition(".")[0]
        yield name, model.get_submodule(name)


def decoder_layers(model: nn.Module) -> list[tuple[str, nn.Module, PreTrainedModel]]:
    """Attention modules that take their attention from the registry: (name, module, decoder).

    Layers of OF_IMAGES are left out.
    The decoder is the innermost pretrained model that contains the module; it makes the masks. Models without a causal
    layer or without token ids (the vision tower of a multimodal model) are no decoders.
    """
    found = []
    for name, module in model.named_modules():
        if route(type(module)) is not None and not is_of_images(type(module)):
            owners = (parent for _, parent in parents(model, name) if isinstance(parent, PreTrainedModel))
            owner = next(owners, None)
            if owner is not None and "input_ids" in arguments(type(owner)):
                found.append((name, module, owner))
    causal = {id(owner) for _, module, owner in found if is_causal(module)}
    return [layer for layer in found if id(layer[2]) in causal]


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The attention layers that can run packed groups."""
    return [module for _, module, _ in decoder_layers(model)]


def decoders(model: nn.Module) -> list[PreTrainedModel]:
    """The decoders of these layers, each once."""
    return list({id(owner): owner for _, _, owner in decoder_layers(model)}.values())


def pairs_a_row(model: Any) -> float:
    """Count the pairs of a query and a key that take as many FLOP as a row's products in a layer; experts as if all
    ran. The weights are not sharded yet."""
    config, decoder = model.config.get_text_config(), model.base_model
    layer = next((x[0] for x in decoder.children() if isinstance(x, nn.ModuleList) and len(x)), None)
    heads = getattr(config, "num_attention_heads", None)
    if layer is None or not heads:
        return PAIRS_A_ROW
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    weights = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    return max(1.0, weights / (2 * heads * head_dim))


def is_of_images(cls: type[nn.Module]) -> bool:
    """Whether a layer is one of OF_IMAGES. Wrappers make subclasses of a layer's class."""
    return any(c.__name__ in OF_IMAGES for c in cls.__mro__)


def is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", False))


class UnderOwnName:
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


# ---------------------------------------------------------------- what a layer computes
def describe(module: nn.Module) -> str:
    """An attention layer, for messages."""
    return f"layer {getattr(module, 'layer_idx', '?')} ({type(module).__name__})"


def features(module: nn.Module, mask: Any, given: dict[str, Any]) -> Features:
    """Read a layer's features in a packed call from the mask and the arguments that its attention function gets.

    The mask says which keys a row sees, as it does without a layout. FlashAttention's functions of transformers go by
    the argument `sliding_window` instead: a model whose mask says something else has no one meaning.

    Raises:
        ValueError: the mask is the model's own; an argument contradicts mask or module, or is not computed.
    """
    layer = describe(module)
    has_indexer = indexers.given_sets(given) is not None
    refuse_arguments(layer, given, ("sliding_window", *REPEATED, *indexers.ARGUMENTS * has_indexer))
    visible = masks.read(mask, selects=has_indexer)
    if visible is None:
        if masks.is_answer(mask):
            raise ValueError(
                f"{layer} gets a mask with a rule of the model's own, which dualkv.attention cannot compute"
            )
        raise ValueError(
            f"{layer} got a layout outside a call of its enabled model, or the model makes its own attention mask or"
            " position bias, which dualkv.attention does not compute"
        )
    window = given.get("sliding_window")
    if window is not None and (min(window, masks.LONGEST) if type(window) is int else window) != visible.window:
        sees = "all keys" if visible == masks.Visible() else ", ".join(_shown(*x) for x in visible._asdict().items())
        raise ValueError(f"{layer} uses sliding_window={window!r}, and its mask says {sees}: expected one meaning")
    for name, attribute in REPEATED.items():
        value, held = given.get(name), getattr(module, attribute, None)
        if (value is None) != (held is None) or (isinstance(value, int | float) and value != held):
            raise ValueError(
                f"{layer} has {_shown(attribute, held)} and hands {_shown(name, value)} to its attention function:"
                " expected one value"
            )
    return Features(*visible, given.get("s_aux"), given.get("softcap"), patching.INVARIANT in vars(module))


def has_temperature(module: nn.Module) -> bool:
    """Whether a layer is one of Llama 4's that multiply queries by a temperature which grows with the row's number."""
    return getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)


def temperature(module: nn.Module, positions: torch.Tensor) -> torch.Tensor:
    """[T] fp64 factor for the queries of such a layer: the temperature of a row's position, in its own unpacked
    sequence, over the temperature of the row's number."""
    floor_scale, attn_scale = cast(float, module.floor_scale), cast(float, module.attn_scale)

    def of(position: torch.Tensor) -> torch.Tensor:
        return (torch.log1p(torch.floor((position.float() + 1.0) / floor_scale)) * attn_scale + 1.0).double()

    return of(positions) / of(torch.arange(len(positions), device=positions.device))


# ---------------------------------------------------------------- refusals of models
def refuse_arguments(what: str, given: dict[str, Any], known: Container[str]) -> None:
    """Raises ValueError for an argument of attention functions whose feature is not supported, but for `known` ones,
    which are judged elsewhere; `what` is given them."""
    for name, value in given.items():
        if name in NEUTRAL or name in known:
            continue
        if value is None or value is False or (name == "dropout" and value == 0):
            continue
        shown = _shown(name, value)
        feature = f"{UNSUPPORTED[name]} ({shown})" if name in UNSUPPORTED else f"the argument {shown}"
        raise ValueError(f"{what} uses {feature}, which dualkv.attention does not compute")


def _shown(name: str, value: Any) -> str:
    return f"{name} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"{name}={value!r}"


def _needed(model: PreTrainedModel) -> list[str]:
    """Inputs that every call of a model must have, but for token ids and what runs packed."""
    runs = {"self", "input_ids"} | {name for how in media.families(model) for name in how.inputs}
    parameters = inspect.signature(type(model).forward).parameters.values()
    free = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [
        p.name
        for p in parameters
        if p.name == OF_ANOTHER_MODEL or (p.default is p.empty and p.kind not in free and p.name not in runs)
    ]


def objections(model: nn.Module) -> Iterator[str]:
    """Reasons, by a model's fields, why it cannot run packed groups: wrong visibility or unsupported attention."""
    layers = decoder_layers(model)
    if not layers:
        if getattr(model, "_is_stateful", False):
            yield from recurrent.objections(model, [])
        yield f"{type(model).__name__} has no causal attention layer that goes through transformers' attention registry"
    if isinstance(model, PreTrainedModel) and (needed := _needed(model)):
        yield f"{type(model).__name__} takes no call without {', '.join(needed)}, which cannot run packed"
    for module in model.modules():
        names = [c.__name__ for c in type(module).__mro__]
        made = next((made for end, made in POOLING.items() if any(re.search(f"({end})$", x) for x in names)), None)
        if made is not None:
            yield (
                f"{type(module).__name__} makes {made} for its whole input, which packed sequences share: use a head"
                " that makes a row of logits for each token (ForTokenClassification)"
            )
        if any(c.__name__ in OWN_MASKS for c in type(module).__mro__):
            yield (
                f"{type(module).__name__} makes masks with a rule of its own, which dualkv.attention cannot compute:"
                " enable its text model"
            )
    for decoder in decoders(model):
        config, name = decoder.config, type(decoder).__name__
        hybrid = bool(recurrent.mixers(decoder))
        attention = {id(module) for _, module, _ in layers}
        own = [inner for inner, module in decoder.named_modules() if id(module) in attention]
        unfit = [*recurrent.objections(decoder, own)] if hybrid or decoder._is_stateful else []
        yield from unfit
        of_indexers = indexers.LAYER_TYPES * any(map(indexers.of_layer, attention_modules(decoder)))
        for at, kind in enumerate(getattr(config, "layer_types", None) or []):
            if kind not in (*LAYER_TYPES, *of_indexers) and not (hybrid and kind in recurrent.LAYER_TYPES):
                yield f"layer {at} of {name} is {kind}, dualkv.attention computes {', '.join(LAYER_TYPES)}"
        if decoder._is_stateful and not hybrid and not unfit:
            yield f"{name} carries a recurrent state along the rows, which would mix packed responses"
        if getattr(config, "is_encoder_decoder", False):
            yield f"{name} is an encoder-decoder model, dualkv.attention is causal self-attention only"
        if config.output_attentions:
            yield f"{name} is configured with output_attentions=True, dualkv.attention makes no weights"
        if config._attn_implementation is None:
            yield f"{name} has no attention implementation set, call set_attn_implementation first"
    known = (
        {name for name, _, _ in layers} | {name for name, _ in recurrent.mixers(model)} | {*recurrent.pointwise(model)}
    ) | {name for name, module in model.named_modules() if is_of_images(type(module))}
    for name, module, _ in layers:
        layer = f"{name} ({type(module).__name__})"
        if _code(module) is not _code(type(module)):
            yield (
                f"{layer} has a forward of its own, and a small copy runs that of its class: replace the forward of the"
                " class"
            )
        if not is_causal(module):
            yield f"{layer} is not causal self-attention, the only kind that dualkv.attention computes"
        dims = (getattr(module, name, None) for name in ("head_dim", "qk_head_dim", "v_head_dim"))
        if (widest := max((dim for dim in dims if isinstance(dim, int)), default=0)) > HEAD_DIMS[-1]:
            yield f"{layer} has head dim {widest}, dualkv.attention computes up to {HEAD_DIMS[-1]}"
        # Every layer of the stack must be a known attention layer: another kind of layer may mix rows in its own way.
        stack = next((up for up, parent in parents(model, name) if isinstance(parent, nn.ModuleList)), None)
        if stack is None:
            continue
        for index, other in model.get_submodule(stack).named_children():
            if not any(f"{found}.".startswith(f"{stack}.{index}.") for found in known):
                yield (
                    f"{stack}.{index} ({type(other).__name__}) has no causal attention that goes through transformers'"
                    " attention registry"
                )


def refuse(model: nn.Module) -> None:
    """Raises ValueError for a model that cannot run packed groups, by its fields."""
    for sentence in objections(model):
        raise ValueError(sentence)
