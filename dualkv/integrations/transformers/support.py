"""Says whether a model runs packed, and why not, from its configuration alone: `dualkv doctor --model`."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from codegen.tiles import takes_head_dim
from dualkv.integrations.transformers import indexers, invariant, layers, masks, media, recurrent, rotary, selfcheck
from dualkv.integrations.transformers.enabling import enable
from dualkv.models import CONFIGS, read_config
from dualkv.ops import padding

# The auto classes that may build a configuration's model; the first that knows the configuration does.
AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM", "AutoModel")


@dataclass(frozen=True)
class Verdict:
    """The result of :func:`examine`.

    Attributes:
        model: the argument of :func:`examine`.
        architecture: the name of the class that was examined.
        layers: attention layers and recurrent layers of the decoder, one sentence for each kind.
        refusals: why `enable` refuses the model, one sentence for each reason; empty if the model runs packed.
        notes: inputs or settings that a call refuses although the model runs packed.
    """

    model: str
    architecture: str
    layers: list[str]
    refusals: list[str]
    notes: list[str]

    @property
    def runs(self) -> bool:
        """Whether the model runs packed."""
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        return asdict(self) | {"runs": self.runs}


def examine(model: str) -> Verdict:
    """Checks the fields of the model, built in full size without weights, then runs its small copy (see `enable`).

    Args:
        model: a folder or file with a config.json, the name of a model in the local cache of Hugging Face's hub, or a
            name in :data:`dualkv.models.CONFIGS`.

    Raises:
        ValueError: no such model, or transformers cannot build it.
    """
    config = load_config(model)
    try:
        built = without_weights(config)
    except Exception as error:
        says = " ".join(str(error).split())[:300]
        raise ValueError(f"{model}: transformers cannot build this model: {type(error).__name__}: {says}") from error
    return Verdict(model, type(built).__name__, _layers(built), refusals(built), _notes(built))


def load_config(model: str) -> PreTrainedConfig:
    """The configuration of a model, from local files only; see :func:`examine`."""
    if (fields := read_config(model)) is not None:
        return config_of(fields, model)
    try:
        return cast(PreTrainedConfig, AutoConfig.from_pretrained(model, local_files_only=True))
    except OSError as error:
        raise ValueError(
            f"model {model!r} is neither a folder or file with a config.json, nor in the local cache of Hugging Face's"
            f" hub, nor one of {', '.join(CONFIGS)}"
        ) from error


def config_of(fields: Any, where: str) -> PreTrainedConfig:
    """The configuration that has the fields of a config.json; `where` names the file in messages."""
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if kind is None:
        raise ValueError(f"{where} is no configuration of a model, expected an object with model_type")
    try:
        cls = type(AutoConfig.for_model(kind))
    except ValueError as error:
        raise ValueError(
            f"{where} has model_type {kind!r}, which transformers {transformers.__version__} lacks: a type of your own"
            " is registered by an import (--import of dualkv doctor)"
        ) from error
    return cls.from_dict(fields)


def without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    """The model of a configuration on the meta device: the architecture that it names, or the first auto class's.

    Raises:
        ValueError: transformers has no such model, for example because its code comes with its weights.
    """
    config = copy.deepcopy(config)
    with torch.device("meta"):
        for name in config.architectures or []:
            if (cls := getattr(transformers, name, None)) is not None:
                return cast(PreTrainedModel, cls._from_config(config, attn_implementation="eager"))
        for name in AUTO_CLASSES:
            auto = getattr(transformers, name, AutoModel)
            if type(config) in auto._model_mapping or name == AUTO_CLASSES[-1]:
                return cast(PreTrainedModel, auto.from_config(config, attn_implementation="eager"))
    raise AssertionError("the last auto class takes every configuration")


def refusals(model: nn.Module) -> list[str]:
    """Give every reason why `enable` refuses a model, one sentence each: by its fields, and if they pass, by its small
    copy."""
    found = _grouped(layers.objections(model))
    for decoder in [] if found else layers.decoders(model):
        try:
            selfcheck.check(decoder, enable)
        except ValueError as error:
            found.append(str(error))
    return found


def refuse(model: nn.Module, trains: bool = False, batch_invariant: bool = False) -> None:
    """Raises ValueError for a model, which may be on the meta device, that `enable` refuses; on request also if its
    first call in training is refused, or if it is not batch-invariant. The model does not change."""
    found, decoders = refusals(model), layers.decoders(model)
    found += invariant.objections(model, decoders) if batch_invariant and not found else []
    asked: dict[selfcheck.Stage, bool] = {"training": trains, "invariance": batch_invariant}
    for stage in [stage for stage, runs in asked.items() if runs and not found]:
        verdicts = [selfcheck.verdict_of(type(x), x.config, enable, stage=stage) for x in decoders]
        found += [verdict for verdict in verdicts if verdict is not None]
    if found:
        raise ValueError(found[0])


def _grouped(sentences: Iterable[str]) -> list[str]:
    """Merges sentences that differ only in the layer into one sentence with the number of layers."""
    of_kind: dict[str, list[str]] = {}
    for sentence in dict.fromkeys(sentences):
        of_kind.setdefault(re.sub(r"^(layer |.*?layers\.)\d+", "", sentence), []).append(sentence)
    return [same[0] if len(same) == 1 else f"{same[0]} ({len(same)} such layers)" for same in of_kind.values()]


def _layers(model: nn.Module) -> list[str]:
    """The layers that can run packed groups: a count for each class, head dim, GQA ratio and features."""
    kinds: Counter[str] = Counter()
    for module in layers.attention_modules(model):
        dim, of_values = _head_dims(module)
        dims = f"head dim {dim}" if dim == of_values else f"head dims {dim} and {of_values} of values"
        groups = getattr(module, "num_key_value_groups", None)
        about = [dims] * bool(dim) + [f"{groups} query heads a KV head"] * bool(groups)
        kinds[", ".join([type(module).__name__, *about, *features(module)])] += 1
    kinds.update(f"{type(module).__name__}, recurrent" for _, module in recurrent.mixers(model))
    return [f"{number} x {kind}" for kind, number in kinds.items()]


def _head_dims(module: Any) -> tuple[int | None, int | None]:
    """A layer's head dim of queries and keys, and of values, as far as it has fields of known names."""
    dim = getattr(module, "qk_head_dim", None) or getattr(module, "head_dim", None)
    return dim, getattr(module, "v_head_dim", None) or dim


def features(module: Any) -> list[str]:
    """Name what a layer's attention has beside a softmax over all keys, in words."""
    at = getattr(module, "layer_idx", None)
    of_layers = masks.by_config(module.config)
    window, chunk = of_layers[at or 0] if len(of_layers) > 1 else of_layers[0]
    cap = getattr(module, "attn_logit_softcapping", None)
    return [
        *[f"window {window}"] * bool(window),
        *[f"chunks of {chunk}"] * bool(chunk),
        *["sinks"] * (getattr(module, "sinks", None) is not None),
        *[f"softcapping {cap}"] * bool(cap),
    ]


def _notes(model: PreTrainedModel) -> list[str]:
    inputs = [
        name
        for name in layers.arguments(type(model))
        if media.MEDIA.search(name) and not name.startswith(("use_", "output_", "vision_feature", "mm_encoder"))
    ]
    runs = {name for how in media.families(model) for name in how.inputs}
    packed = [name for name in inputs if name in runs]
    refused = [name for name in inputs if name not in runs]
    notes = [f"beside text, {', '.join(packed)} run packed"] if packed else []
    notes += [f"{'text only: ' * (not packed)}{', '.join(refused)} beside a layout are refused"] if refused else []
    if (limit := indexers.longest_path(model.config.get_text_config())) is not None:
        notes.append(f"on paths of more than {limit} tokens indexers select keys: attention runs on FlexAttention")
    for dim, of_values in dict.fromkeys(map(_head_dims, layers.attention_modules(model))):
        if not dim or not of_values or not takes_head_dim(dim) or not takes_head_dim(of_values):
            continue  # unknown, or refused
        if (given := padding.for_kernel(dim, of_values)) != (dim, of_values):
            notes.append(f"kernels take head dims {dim} and {of_values} of values padded to {given[0]}")
    notes += rotary.notes(model)
    dropout = getattr(model.config.get_text_config(), "attention_dropout", 0) or 0
    if dropout:
        notes.append(f"attention_dropout={dropout} is refused in training: set it to 0")
    return notes
