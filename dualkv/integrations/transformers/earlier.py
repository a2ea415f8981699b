"""Recurrent layers of transformers before 5.17, which do not hand a layout on to functions of their modeling file.

Gated delta nets call functions that an instance holds, with arguments that they choose: a packed call runs their
forward on a :class:`StandIn` that holds functions of ours. Mamba-2 and the short convolutions of LFM2 have all in one
method; a packed call runs the same computation around our convolution and scan. Some modules do not hand on what they
are called with; their part finds the layout in an attribute then.

As in :mod:`.recurrent`, forwards are replaced in classes, once, and a call without a layout runs the forward that was
there.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dualkv.integrations import patching
from dualkv.integrations.patching import Changes
from dualkv.integrations.recurrent.walked import at_layer

Tensor = torch.Tensor
Forward = Callable[..., Any]

# The functions that a gated delta net of an earlier transformers finds in itself.
CONV, DELTA = "causal_conv1d_fn", "chunk_gated_delta_rule"
GATED = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
MAMBA2 = ("NemotronHMamba2Mixer", "FalconH1Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer")
SHORT = ("Lfm2ShortConv", "Lfm2MoeShortConv")

# Modules that call a part of theirs without the arguments that they got, and that part: by the recurrent layer. Those
# around gated delta nets do so in transformers 5.5, which veRL 0.9.1 takes too.
SILENT = {
    "Qwen3NextGatedDeltaNet": {"Qwen3NextDecoderLayer": "Qwen3NextGatedDeltaNet"},
    "Qwen3_5GatedDeltaNet": {"Qwen3_5DecoderLayer": "Qwen3_5GatedDeltaNet"},
    "Qwen3_5MoeGatedDeltaNet": {"Qwen3_5MoeDecoderLayer": "Qwen3_5MoeGatedDeltaNet"},
    "NemotronHMamba2Mixer": {"NemotronHBlock": "NemotronHMamba2Mixer"},
    "FalconH1Mixer": {"FalconH1Model": "FalconH1DecoderLayer", "FalconH1DecoderLayer": "FalconH1Mixer"},
    "Lfm2ShortConv": {"Lfm2DecoderLayer": "Lfm2ShortConv"},
    "Lfm2MoeShortConv": {"Lfm2MoeDecoderLayer": "Lfm2MoeShortConv"},
}

# What gated delta nets take from libraries, by names of their modeling file; None where these are not installed.
LIBRARIES = ("FusedRMSNormGated", CONV, "causal_conv1d_update", DELTA, "fused_recurrent_gated_delta_rule")


def knows(cls: type[Any]) -> bool:
    """Whether a class of transformers is a recurrent layer as it was before 5.17."""
    names = inspect.unwrap(cls.forward).__code__.co_names
    if cls.__name__ in GATED:
        return CONV in names and DELTA in names
    method = "torch_forward" if cls.__name__ in MAMBA2 else "slow_forward" if cls.__name__ in SHORT else None
    return method in names


def packed_forward(cls: type[Any], conv: Forward, delta: Callable[[Forward], Forward], mamba2: Forward) -> Forward:
    """`forward(layer, hidden_states, layout, **kwargs)` of packed rows, for a class that :func:`knows` knows: by a
    convolution and a scan of packed rows (of :mod:`dualkv.integrations.recurrent.rules`), and `delta`, which makes the
    gated delta rule of packed rows of transformers' function."""
    if cls.__name__ in GATED:
        rule = delta(getattr(sys.modules[cls.__module__], f"torch_{DELTA}"))
        return partial(_gated, inspect.unwrap(cls.forward), conv, rule)
    return partial(_short, conv) if cls.__name__ in SHORT else partial(_mamba2, conv, mamba2)


def replaced(own: Forward, packed: Forward) -> Forward:
    """The forward of a recurrent layer: `packed` with a layout, `own` without one."""

    @wraps(own)
    def forward(layer: Any, hidden_states: Tensor, *args: Any, dualkv: Any = None, **kwargs: Any) -> Any:
        layout = getattr(layer, patching.LAYOUT, None) if dualkv is None else dualkv
        if layout is None:
            return own(layer, hidden_states, *args, **kwargs)
        return packed(layer, hidden_states, at_layer(layout, layer), **kwargs)  # a hook may not have seen it

    return forward


def speak(names: dict[str, Any], mixer: str) -> None:
    """Lets layouts come to the recurrent layers of class `mixer`, past the silent modules of a modeling file."""
    for around, part in SILENT.get(mixer, {}).items():  # Bamba's and Granite's speak
        patching.of(names[around]).replace("forward", _holding(names[around].forward, part))
        if part != mixer:
            patching.of(names[part]).replace("__call__", _taking(names[part].__call__))


def _holding(own: Forward, part: str) -> Forward:
    """The forward of a module, which leaves the layout with its parts of class `part` meanwhile.

    A hook would not do: gradient checkpointing may run the forward alone again.
    """

    @wraps(own)
    def forward(around: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("dualkv")
        if layout is None:
            return own(around, *args, **kwargs)
        found = [m for m in around.modules() if any(c.__name__ == part for c in type(m).__mro__)]
        for module in found:
            patching.hand(module, layout)
        try:
            return own(around, *args, **kwargs)
        finally:
            for module in found:
                patching.take_back(module)

    return forward


def _taking(own: Forward) -> Forward:
    """The call of a decoder layer, before gradient checkpointing keeps its arguments: with the layout that it holds."""

    @wraps(own)
    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        layout = getattr(layer, patching.LAYOUT, None)
        return own(layer, *args, **kwargs if layout is None else {**kwargs, "dualkv": layout})

    return call


@contextmanager
def without_libraries(file: Any) -> Iterator[None]:
    """Make gated delta nets of a modeling file that are built in this context compute by PyTorch functions, which run
    on the CPU too."""
    names = vars(file)
    gated = any(isinstance(x, type) and name in GATED and knows(x) for name, x in names.items())
    with Changes(file) as changes:
        for name in LIBRARIES if gated else ():
            if name in names:
                changes.replace(name, None)
        yield


@contextmanager
def in_one_chunk(mixers: Iterable[nn.Module]) -> Iterator[None]:
    """Make Nemotron-H's layers among `mixers` compute up to 64 rows in one chunk in this context.

    Their PyTorch code adds up the states of chunks over the wrong axis (transformers 5.10), so that rows behind the
    first chunk have wrong results. The code of other families is right, and so is `rules.chunk_scan`.
    """
    with ExitStack() as undone:
        for mixer in mixers:
            if any(c.__name__ == "NemotronHMamba2Mixer" and knows(c) for c in type(mixer).__mro__):
                undone.enter_context(Changes(mixer)).replace("chunk_size", 64)
        yield


# ---------------------------------------------------------------- gated delta nets
class StandIn:
    """A recurrent layer with other functions."""

    def __init__(self, layer: nn.Module, **functions: Forward) -> None:
        self._layer = layer
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _gated(own: Forward, conv: Forward, rule: Forward, layer: Any, x: Tensor, layout: Any, **kwargs: Any) -> Any:
    def convolved(x: Tensor, **given: Any) -> Any:
        return conv(hidden_states=x, dualkv=layout, **given)

    functions: dict[str, Forward] = {CONV: convolved, DELTA: partial(rule, dualkv=layout)}
    return own(StandIn(layer, **functions), x, **kwargs)


# ---------------------------------------------------------------- Mamba-2 and short convolutions
def _mamba2(conv: Forward, scan: Forward, layer: Any, hidden_states: Tensor, layout: Any, **kwargs: Any) -> Tensor:
    """[1, T, C] -> [1, T, C]. Falcon-H1 scales what goes in, and may have no norm behind the scan."""
    refuse_cache(kwargs)
    states, dtype = layer.n_groups * layer.ssm_state_size, hidden_states.dtype
    projected = layer.in_proj(hidden_states * getattr(layer, "ssm_in_multiplier", 1))
    if hasattr(layer, "mup_vector"):
        projected = projected * layer.mup_vector
    gate, rows, dt = projected.split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    rows = _convolved(conv, layer.conv1d, rows.transpose(1, 2), layer.activation, layout, kwargs).transpose(1, 2)
    x, b, c = rows.split([layer.intermediate_size, states, states], -1)
    out = scan(
        x.unflatten(-1, (layer.num_heads, layer.head_dim)),
        _steps(layer, dt),
        -torch.exp(layer.A_log.float()),
        b.unflatten(-1, (layer.n_groups, layer.ssm_state_size)),
        c.unflatten(-1, (layer.n_groups, layer.ssm_state_size)),
        chunk_size=layer.chunk_size,
        D=layer.D,
        dualkv=layout,
    ).flatten(2)
    normed = layer.norm(out, gate) if getattr(layer, "mamba_rms_norm", True) else out * F.silu(gate)
    return layer.out_proj(normed.to(dtype))


def _steps(layer: Any, dt: Tensor) -> Tensor:
    """[1, T, H] in fp32 at least. Nemotron-H limits steps otherwise in its PyTorch code than in its kernels."""
    limit, cls = layer.time_step_limit, next(c for c in type(layer).__mro__ if c.__name__ in MAMBA2)
    fast = dt.is_cuda and vars(sys.modules[cls.__module__]).get("is_fast_path_available")
    if cls.__name__ == "NemotronHMamba2Mixer" and not fast:
        limit = layer.time_step_min, float("inf")
    steps = F.softplus(dt.to(torch.promote_types(dt.dtype, torch.float32)) + layer.dt_bias)
    return steps if limit is None else steps.clamp(*limit)


def _short(conv: Forward, layer: Any, hidden_states: Tensor, layout: Any, **kwargs: Any) -> Tensor:
    """[1, T, C] -> [1, T, C]."""
    refuse_cache(kwargs)
    b, c, x = layer.in_proj(hidden_states).transpose(-1, -2).chunk(3, -2)
    out = c * _convolved(conv, layer.conv, b * x, None, layout, kwargs)
    return layer.out_proj(out.transpose(-1, -2).contiguous())


def _convolved(
    conv: Forward, of: nn.Conv1d, x: Tensor, activation: str | None, layout: Any, given: dict[str, Any]
) -> Tensor:
    borders = {name: given[name] for name in ("seq_idx",) if name in given}  # which `conv` refuses
    found: Tensor = conv(
        hidden_states=x, weight=of.weight.squeeze(1), bias=of.bias, activation=activation, dualkv=layout, **borders
    )
    return found


# Arguments of models and layers that hold what earlier calls kept; `cache` alone from transformers 5.24 on.
CACHES = ("past_key_values", "cache", "cache_params")


def refuse_cache(given: dict[str, Any]) -> None:
    """Raises ValueError for a cache beside a layout."""
    for name in CACHES:
        if given.get(name) is not None:
            raise ValueError(f"{name} came together with dualkv: packed groups run without a cache")
