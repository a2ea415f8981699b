"""PEFT's adapters on packed rows: which compute a row from that row alone, and which read or place other rows.

An adapter runs packed if it gives a row what it gives the same row of a separate sequence. :data:`TYPES` says so of
every type of PEFT 0.21, :data:`VARIANTS` of every variant of LoRA; a test runs each of them. A type that the tables do
not know is refused, because nobody has compared it. The modules that PEFT puts into a model say which types it has, so
PEFT is not imported here.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from codegen.packages import require
from dualkv.integrations import patching
from dualkv.integrations.transformers import scales
from dualkv.integrations.transformers.traced import where_traced

# What runs packed, and reasons of what does not.
EXACT = ""
OWN_TOKENS = "puts tokens of its own, or their keys, before every sequence, which packed groups do not support"
WHOLE_ROW = "reads all rows of a call, and packed rows belong to several sequences"
UNKNOWN = "is of a type that nobody has compared with separate sequences; check=False lets it run unproved"
BY_SEQUENCE = "chooses weights for each sequence of a call, and a packed row holds several"

EXACT_TYPES = """
    ADALORA ADAMSS ADAPTION_PROMPT BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA
    LOKR LORA MISS OFT OSF PEANUT PSOFT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA
    VERA WAVEFT XLORA"""
EXACT_VARIANTS = """
    ArrowLinearVariant BdLoraLinearVariant DoraConv1dVariant DoraConv2dVariant DoraConv3dVariant DoraEmbeddingVariant
    DoraLinearVariant KasaLinearVariant MiCAEmbeddingVariant MiCALinearVariant QALoraLinearVariant"""

# By the name of PEFT's type.
TYPES: dict[str, str] = {
    **dict.fromkeys(EXACT_TYPES.split(), EXACT),
    **dict.fromkeys(
        ["CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "PROMPT_TUNING"], OWN_TOKENS
    ),
    "LILY": f"{WHOLE_ROW} (its router averages over them)",
    "POLY": BY_SEQUENCE,
    "SHADOW": f"{WHOLE_ROW} (its shadow model attends to them)",
}

# Variants of LoRA, by PEFT's class.
VARIANTS: dict[str, str] = {
    **dict.fromkeys(EXACT_VARIANTS.split(), EXACT),
    "ALoraLinearVariant": f"{WHOLE_ROW} (alora_invocation_tokens are found once in a row, and switch what follows)",
    "MontecloraLinearVariant": "draws weights in training once for all rows of a call",
    "VeloraLinearVariant": f'{WHOLE_ROW} (velora_config averages over them; init_type="random" runs packed)',
}

# Fields of configurations, by type, with which an adapter fits the small copy of the self-check.
SMALL: dict[str, dict[str, Any]] = {
    "BOFT": {"boft_block_size": 4, "boft_block_num": 0},
    "C3A": {"block_size": 4},
    "FOURIERFT": {"n_frequency": 16},
    "OFT": {"oft_block_size": 4, "r": 0},
    "ROAD": {"group_size": 4},
    "TRAINABLE_TOKENS": {"token_indices": list(range(8, 40))},
    "VBLORA": {"vector_length": 4, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 16},
}
# Fields that name layers or parameters of the model, and what they are in a copy.
OF_THE_MODEL: dict[str, Any] = {
    **dict.fromkeys(("exclude_modules", "layer_replication", "layers_pattern", "layers_to_transform")),
    **dict.fromkeys(("modules_to_save", "target_parameters", "trainable_token_indices")),
    "alpha_pattern": {},
    "rank_pattern": {},
}
RANK = 4  # in a copy
SEEN = "dualkv_seen"  # attribute of an enabled decoder, a `Seen`

# How often this process has added what may be an adapter, or a layer of FP8, to a module; a list, which dynamo reads.
ADDED = [0]


def _count(module: nn.Module, name: str, child: Any) -> None:
    """Hook of PyTorch: a child is added to a module. PEFT adds further adapters of a layer to ModuleDicts."""
    if type(child).__module__.startswith(("peft.", *scales.PACKAGES)) or isinstance(module, nn.ModuleDict):
        ADDED[0] += 1


torch_module.register_module_module_registration_hook(_count)


# ---------------------------------------------------------------- which adapters a model has
def kind(module: nn.Module) -> str | None:
    """The name of PEFT's type of a module that PEFT made, None of others; a class of another package that extends
    PEFT's layers alone is named by itself."""
    for cls in type(module).__mro__:
        if (found := re.match(r"peft\.tuners\.(\w+)\.\w", cls.__module__)) and found[1] != "mixed":
            return found[1].upper()
        if cls.__name__ in ("BaseTunerLayer", "BaseTuner"):
            return type(module).__name__
    return None


def without(model: Any) -> Any:
    """The transformers model within a PEFT model; any other model as it is."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def is_layer(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's layers, around a layer of the model."""
    return any(cls.__name__ == "BaseTunerLayer" for cls in type(module).__mro__)


def of(model: nn.Module) -> tuple[tuple[str, str, int], ...]:
    """(type, names of adapters and variants, number of layers) of PEFT's layers in a model, sorted."""
    found = Counter(
        (kind(module) or "", ", ".join(_names(module, with_variants=True)))
        for module in model.modules()
        if is_layer(module)
    )
    return tuple((*key, number) for key, number in sorted(found.items()))


def _names(layer: Any, with_variants: bool = False) -> list[str]:
    """The names of a layer's adapters, on request also the names of their LoRA variants."""
    held = (getattr(layer, name, None) for name in (*layer.adapter_layer_names, *layer.other_param_names))
    by_name: list[Any] = [each for each in held if hasattr(each, "keys")]
    names = sorted({str(name) for each in by_name for name in [*each.keys()]})  # not all iterate over keys
    variants = (getattr(layer, "lora_variant", None) or {}) if with_variants else {}
    return [f"{name}: {type(variants[name]).__name__}" if name in variants else name for name in names]


def configs(model: nn.Module) -> dict[str, Any]:
    """PEFT's configurations that a model or what it contains names, by adapter."""
    found: dict[str, Any] = {}
    for module in model.modules():
        own = getattr(module, "peft_config", None)
        found |= own if isinstance(own, dict) else {}
    return found


# ---------------------------------------------------------------- refusals
def objections(model: nn.Module, decoders: Iterable[nn.Module], known_alone: bool = True) -> Iterator[str]:
    """Reasons why adapters of a model, with its wrappers, cannot run packed. `known_alone`: types and variants that
    nobody has judged are refused too."""
    for name, config in configs(model).items():
        if getattr(config, "is_prompt_learning", False):
            yield _sentence(f"{name!r} ({_type(config)})", TYPES.get(_type(config), OWN_TOKENS))
    unknown = UNKNOWN if known_alone else EXACT
    for module in model.modules():
        if (found := kind(module)) is not None and (reason := TYPES.get(found, unknown)):
            yield _sentence(found, reason)
        for adapter, variant in (getattr(module, "lora_variant", None) or {}).items():
            reason = VARIANTS.get(type(variant).__name__, unknown)
            if (getattr(module, "lora_velora_init_type", None) or {}).get(adapter) == "random":
                reason = EXACT
            if reason:
                yield _sentence(f"{adapter!r} ({type(variant).__name__})", reason)
    for decoder in decoders:
        for name, module in decoder.named_modules():
            if is_layer(module) and isinstance(getattr(module, "base_layer", None), nn.modules.conv._ConvNd):
                yield _sentence(f"of the convolution {name} ({type(module).__name__})", WHOLE_ROW)


def _type(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def _sentence(which: str, reason: str) -> str:
    return f"the PEFT adapter {which} {reason}: use an adapter such as LoRA, or separate sequences"


class Seen(NamedTuple):
    """The adapters that :func:`remember` found.

    Attributes:
        added: :data:`ADDED` at that time.
        adapters: of :func:`of`.
        embedding: the name of the module of the decoder that embeds tokens; empty if it has none.
    """

    added: int
    adapters: tuple[tuple[str, str, int], ...]
    embedding: str


def remember(decoder: PreTrainedModel) -> None:
    """Notes the adapters of a decoder, so that :func:`refuse_later` notices others; says what FP8 layers it has."""
    scales.say(decoder)
    try:
        embedding = decoder.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    name = next((name for name, module in decoder.named_modules() if module is embedding), "")
    patching.of(decoder).replace(SEEN, Seen(ADDED[0], of(decoder), name))


def refuse_later(decoder: nn.Module) -> None:
    """Raises ValueError for what came to an enabled decoder since: other adapters, or in training NEFTune's noise."""
    seen = decoder.__dict__.get(SEEN)
    if seen is None:
        return
    if seen.added != ADDED[0] and (others := _others(decoder)) is not None:
        raise ValueError(others)
    # transformers' trainers set it while they train.
    if decoder.training and decoder.get_submodule(seen.embedding).__dict__.get("neftune_noise_alpha"):
        raise ValueError(
            f"{type(decoder).__name__} has neftune_noise_alpha: its noise is divided by the square root of the length"
            " of a row, and rows of a prompt belong to sequences of several lengths: set neftune_noise_alpha to None"
        )


@where_traced
def _others(decoder: nn.Module) -> str | None:
    """Say why other adapters than the remembered ones are refused; None if there are no others, which is noted."""
    seen: Seen = vars(decoder)[SEEN]
    scales.say(decoder)
    if (now := of(decoder)) == seen.adapters:
        patching.of(decoder).replace(SEEN, seen._replace(added=ADDED[0]))
        return None
    was, has = (
        ", ".join(f"{name} ({which}) in {number} layers" for name, which, number in x) or "none"
        for x in (seen.adapters, now)
    )
    return (
        f"{type(decoder).__name__} has other PEFT adapters than when dualkv was enabled (then {was}; now {has}): enable"
        " the model again"
    )


# ---------------------------------------------------------------- adapters on the small copy of the self-check
def shrunk(model: nn.Module, decoder: nn.Module) -> list[Any]:
    """Configurations for the small copy of a decoder of `model`: of its adapters with layers in the decoder.

    `target_modules` are regular expressions of the layers, with any index.

    Raises:
        ImportError: there are some, and PEFT is too old.
    """
    targets: dict[str, set[str]] = {}
    for name, module in decoder.named_modules():
        if is_layer(module) and type(module).__name__ != "ParamWrapper":
            for adapter in _names(module):
                targets.setdefault(adapter, set()).add(re.sub(r"\d+", r"\\d+", re.sub(r"([.])", r"\\\1", name)))
    found = []
    for name, config in configs(model).items():
        if name not in targets or getattr(config, "is_prompt_learning", False):
            continue
        small = copy.deepcopy(config)
        fields = {"r": RANK, "lora_alpha": RANK, "target_modules": "|".join(sorted(targets[name])), "task_type": None}
        if isinstance(how := getattr(config, "init_lora_weights", None), str) and how != "mica":
            fields["init_lora_weights"] = True  # others read the weights or data
        for field, value in (fields | OF_THE_MODEL | SMALL.get(_type(config), {})).items():
            if hasattr(small, field):
                setattr(small, field, value)
        found.append(small)
    if found:
        require("peft", "the check of adapters")
    return found


def put_on(model: nn.Module, small: Sequence[Any]) -> None:
    """Puts adapters of :func:`shrunk` with random weights on a small copy, which then are all that is trained."""
    if not small:
        return
    from peft import get_peft_model

    first, *others = (copy.deepcopy(config) for config in small)
    wrapped = get_peft_model(cast(Any, model), first, adapter_name="0")  # its layers are in the model itself
    for i, config in enumerate(others, 1):
        wrapped.add_adapter(str(i), config)
    if others:
        wrapped.base_model.set_adapter([str(i) for i in range(len(small))])
    draw = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.2)
