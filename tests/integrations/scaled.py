"""Tiny models of any type of transformers with scaled rotary embeddings, and sequences around the scale's threshold."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers as tf
from torch import nn

import dualkv
from dualkv.integrations.transformers import layers, rotary, selfcheck
from dualkv.integrations.transformers.shrink import shrink
from tools import zoo

THRESHOLD = 8  # tokens
BY_LENGTH = ("dynamic", "longrope")  # whose factors depend on the length of the sequence
FIXED = ("default", "linear", "yarn", "llama3")
_ORIGINAL = {"original_max_position_embeddings": THRESHOLD}
ONE_KIND = ("ernie4_5_vl_moe",)  # which refuses other kinds
# Sequences that share rows have one length, or at most so many tokens; some have just so many, some one more.
LAYOUT = dualkv.Layout.from_segments(
    np.cumsum([0, 7, 9, 9, 1, 1, 0, 6, 5, 4, 4, 4, 0, 8, 8, 3, 5, 1, 3, 6, 0, 13, 3]), selfcheck.EVEN_PARENTS
)
PATHS = sorted(selfcheck.sequence_rows(LAYOUT), key=len)  # dynamic embeddings keep what longer sequences leave


def parameters(rope: str, size: int, given: dict[str, Any], magnitudes: bool = False) -> dict[str, Any]:
    """rope_parameters of a kind.

    Args:
        rope: the kind.
        size: of the frequencies.
        given: those of the defaults.
        magnitudes: with those of Phi-3.5-MoE.
    """
    names = ("partial_rotary_factor", "mrope_section", "llama_4_scaling_beta")
    found = {name: given[name] for name in names if name in given} | {"rope_theta": 1e4, "rope_type": rope}
    if rope != "default":
        found |= _ORIGINAL | {"factor": 4.0}
        found |= {"short_mscale": 1.1, "long_mscale": 1.4} if magnitudes else {}
    if rope == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if rope == "longrope":
        found |= {"short_factor": [1.0 + i / 8 for i in range(size)], "long_factor": [3.0 + i for i in range(size)]}
    return found


def embeddings(model: nn.Module) -> list[Any]:
    """The rotary embeddings of a model's decoders that transformers can scale."""
    modules = (module for decoder in layers.decoders(model) for module in decoder.modules())
    return [x for x in modules if isinstance(getattr(x, "rope_type", None), str | dict) and rotary.is_decorated(x)]


def kinds(module: Any) -> list[str | None]:
    """The types of layers that an embedding serves; None alone: all."""
    return [*module.rope_type] if isinstance(module.rope_type, dict) else [None]


def configuration(kind: str, rope: str) -> tuple[type[Any], Any] | None:
    """The class and the configuration of a type in small; None if its defaults make no model here, or one without
    rotary embeddings or packed calls, or that has one kind of rotary embedding."""
    try:
        config = zoo.configuration(kind)
        auto = next(auto for auto, mapping in zoo.MAPPINGS.items() if type(config) in mapping)
        with torch.device("meta"):
            whole = getattr(tf, auto).from_config(config, attn_implementation="eager")
        small = shrink(whole.config, sizes=zoo.SIZES)
        default = type(whole)(copy.deepcopy(small))
    except Exception:
        return None
    found = embeddings(default)
    if not found or kind in ONE_KIND or next(layers.objections(whole), None) is not None:
        return None
    text = small.get_text_config()
    sizes = {layer: len(getattr(found[0], f"{layer}_inv_freq" if layer else "inv_freq")) for layer in kinds(found[0])}
    if None in sizes:
        text.rope_parameters = parameters(rope, sizes[None], text.rope_parameters, kind == "phimoe")
    else:
        for layer, size in sizes.items():
            if text.rope_parameters[layer]["rope_type"] != "proportional":  # whose layers have another head dim
                text.rope_parameters[layer] = parameters(rope, size, text.rope_parameters[layer])
    if vars(text).get("head_dim", 0) is None:  # transformers' rules for scales expect it
        text.head_dim = text.hidden_size // text.num_attention_heads
    if hasattr(text, "original_max_position_embeddings"):
        text.original_max_position_embeddings = THRESHOLD
    if rope == "dynamic":
        text.max_position_embeddings = THRESHOLD
    return type(whole), small


@torch.no_grad()
def make(kind: str, rope: str) -> Any:
    """A model of a type; None as for :func:`configuration`."""
    found = configuration(kind, rope)
    if found is None:
        return None
    cls, config = found
    config.dtype = torch.float32
    torch.manual_seed(zoo.SEED)
    model = cls(config).eval()
    selfcheck.randomize(model, zoo.SEED)
    return model


def token_ids(model: Any) -> torch.Tensor:
    """[1, T] of LAYOUT; its trees begin with different tokens."""
    ids, _ = zoo.inputs(model, LAYOUT)
    first = int(ids.min())
    begins = [path[0] for path in PATHS]
    for i, row in enumerate(sorted({*begins})):
        ids[0, row] = first + i
    return ids


@torch.no_grad()
def alone(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits [n, V] of each of PATHS, run by itself."""
    return [model(input_ids=ids[:, path], use_cache=False).logits[0] for path in PATHS]


def error(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative difference of a row."""
    return max(
        float(((x - y).norm(dim=-1) / y.norm(dim=-1)).nan_to_num(nan=torch.inf).max())
        for x, y in zip(got, expected, strict=True)
    )


@torch.no_grad()
def walked(model: Any, ids: torch.Tensor, budget: int) -> list[torch.Tensor]:
    """Compute the rows of :func:`alone` by an enabled model, in parts of so many rows."""
    batch = dualkv.pack_sequences([ids[0, path] for path in PATHS])
    rows: list[torch.Tensor | None] = [None] * batch.layout.num_tokens

    def forward(tokens: torch.Tensor, branch: Any) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=tokens, dualkv=branch).logits
        for row, of_row in zip(branch.part.rows.tolist(), logits[0], strict=True):
            rows[row] = of_row
        return logits

    dualkv.walk(batch, budget, forward)
    return batch.unpack_sequences(torch.stack([row for row in rows if row is not None]))


def dependence(module: Any) -> Iterator[tuple[str | None, bool]]:
    """Find, for each type of layers that an embedding serves, whether a row's factors depend on another, later row."""
    x = torch.zeros(1, 4, 8)
    for layer in kinds(module):
        if layer is not None and not hasattr(module, f"{layer}_inv_freq"):
            continue
        found = []
        for last in (3, 10**6):
            more = {} if layer is None else {"layer_type": layer}
            out = copy.deepcopy(module)(x, position_ids=torch.tensor([[0, 1, 2, last]]), **more)
            found.append([part[..., :3, :] for part in (out if isinstance(out, tuple) else (out,))])
        yield layer, not all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def pairs(types: tuple[str, ...] | list[str]) -> list[tuple[str, str]]:
    return list(itertools.product(types, BY_LENGTH))
