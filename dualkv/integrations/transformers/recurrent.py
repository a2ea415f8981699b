"""The recurrent layers of transformers' models, and how a layout reaches their convolutions and scans.

A recurrent layer of transformers calls functions of its modeling file and hands its keyword arguments on to them. So
does a model to its layers. :func:`install` replaces these functions, once in a file, by functions that look for a
`dualkv=layout` among their arguments; a call without it runs the function that was there. Nothing else of a model
changes, and copies and pickles of models need no record of it. MiniMax's layer holds its recurrence itself: there the
forward of its class is replaced in the same way. So are those of layers before transformers 5.17 (:mod:`.earlier`).

With a layout, the packed functions run outside the graph of `torch.compile`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
import transformers
from torch import nn

from dualkv.integrations import flash_linear_attention, patching
from dualkv.integrations.recurrent import kernels
from dualkv.integrations.recurrent.ops import convolve, padded, scan
from dualkv.integrations.recurrent.rules import (
    chunk_scan,
    convolution,
    convolution_of_paths,
    delta_rule,
    mamba2,
    varlen,
)
from dualkv.integrations.recurrent.sharded import trees_of
from dualkv.integrations.recurrent.walked import Trees
from dualkv.integrations.recurrent.waves import Wave
from dualkv.integrations.transformers import earlier, masks

Tensor = torch.Tensor

CONV, FUSED = "causal_conv1d_fn", "mamba2_split_conv1d_scan_combined"
DELTA, KDA, MAMBA2 = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"

# The recurrent layers that run packed, by the names of their classes: the functions that their forward calls.
MIXERS: dict[str, tuple[str, ...]] = {
    "Qwen3NextGatedDeltaNet": (CONV, DELTA),
    "Qwen3_5GatedDeltaNet": (CONV, DELTA),
    "Qwen3_5MoeGatedDeltaNet": (CONV, DELTA),
    "OlmoHybridGatedDeltaNet": (CONV, DELTA),
    "LaraMiniGatedDeltaNet": (CONV, DELTA),
    "KimiLinearDeltaAttention": (CONV, KDA),
    "BailingHybridDeltaAttention": (CONV, KDA),
    "Glm5NextTextLinearAttention": (CONV, KDA),
    "NemotronHMamba2Mixer": (CONV, MAMBA2, FUSED),
    "FalconH1Mixer": (CONV, MAMBA2, FUSED),
    "BambaMixer": (CONV, MAMBA2, FUSED),
    "GraniteMoeHybridMambaLayer": (CONV, MAMBA2, FUSED),
    "Zamba2MambaMixer": (CONV, MAMBA2, FUSED),
    "Lfm2ShortConv": (CONV,),
    "Lfm2MoeShortConv": (CONV,),
    "Lfm3ShortConv": (CONV,),
    "MiniMaxLightningAttention": (),
    "ZayaCCAProjection": (),
    "Qwen4ExpTextGatedDeltaNet": (CONV, DELTA),
    "Qwen4ExpTextPLELayer": (),
}
# Those of them that read a few rows back and get no keyword arguments from the layer around them.
LACKING = ("ZayaCCAProjection", "Qwen4ExpTextPLELayer")

# Blocks of Nemotron-H that have no rows but their own: they stand where other models have attention.
POINTWISE = ("NemotronHMLP", "NemotronHMoE")

# Entries of `config.layer_types` for the layers above; the layers themselves are checked, not these names.
LAYER_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe", "mamba", "attention")

# Arguments by which a layer continues a sequence or separates sequences, which a layout does itself.
STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states")
BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")


# ---------------------------------------------------------------- the recurrent layers of a model
def mixers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The recurrent layers that run packed: (name, module)."""
    return [(name, module) for name, module in model.named_modules() if _known(type(module)) is not None]


def pointwise(model: nn.Module) -> list[str]:
    """The names of blocks that compute every row by itself and stand for a whole layer."""
    return [name for name, module in model.named_modules() if _named(type(module), POINTWISE) is not None]


def lacks_arguments(mixer: nn.Module) -> bool:
    """Whether the layer around a recurrent layer hands it no keyword arguments."""
    return _named(type(mixer), LACKING) is not None


def _named(cls: type[Any], names: Any) -> type[Any] | None:
    """The class of transformers among `cls` and its bases (FSDP subclasses the classes of modules) with such a name."""
    of_transformers = (c for c in cls.__mro__ if c.__module__.startswith("transformers.models."))
    return next((c for c in of_transformers if c.__name__ in names), None)


def _known(cls: type[Any]) -> type[Any] | None:
    return _named(cls, MIXERS)


def _has_bias(projection: Any) -> bool:
    """Whether queries or keys of a projection get a bias, of its own or of an adapter (PEFT's `lora_bias`)."""
    parts = projection.q_proj, projection.k_proj
    return any(name.split(".")[-1] == "bias" for part in parts for name, _ in part.named_parameters())


def objections(decoder: nn.Module, attention: list[str]) -> Iterator[str]:
    """Reasons why the recurrent layers of a decoder cannot run packed; `attention` names its attention modules."""
    known = mixers(decoder)
    for name, module in known:
        cls = _known(type(module))
        assert cls is not None
        code = inspect.unwrap(cls.forward).__code__
        missing = [seam for seam in MIXERS[cls.__name__] if seam not in code.co_names]
        if "forward" in vars(module):
            yield (
                f"{name} ({cls.__name__}) has a forward of its own in place of its class's (kernels of the hub,"
                " accelerate's hooks): it goes past the functions by which a layout reaches a recurrent layer"
            )
        elif cls.__name__ == "ZayaCCAProjection" and _has_bias(cast(Any, module)):
            yield f"{name} ({cls.__name__}) has biases before its convolutions, which zeros before a sequence lack"
        elif earlier.knows(cls) or cls.__name__ in LACKING:
            continue
        elif missing or not code.co_flags & inspect.CO_VARKEYWORDS:
            lacks = f"call {missing[0]}" if missing else "take keyword arguments"
            yield (
                f"{name} ({cls.__name__}) of transformers {transformers.__version__} does not {lacks}, by which a"
                " layout reaches a recurrent layer"
            )
    names = [name for name, _ in known]
    unknown: dict[str, nn.Module] = {}
    for name, module in decoder.named_modules():
        within = name in attention or any(name == other or name.startswith(f"{other}.") for other in names)
        # A module around layers hands a cache on to them.
        around = any(other.startswith(f"{name}.") for other in (*names, *attention)) or not name
        if not within and not around and _looks_recurrent(module):
            unknown[name] = module
    for name, module in unknown.items():
        if not any(other.startswith(f"{name}.") for other in unknown):  # those around are handed its cache
            yield f"{name} ({type(module).__name__}) carries a recurrent state, and is of no kind that runs packed"
    gated = any(DELTA in MIXERS[c.__name__] for _, m in known if (c := _known(type(m))) is not None)
    if gated and (reason := flash_linear_attention.refusal()) is not None:
        yield reason


def _looks_recurrent(module: nn.Module) -> bool:
    """Whether a module has what recurrent layers of transformers have: a convolution, decays or a cache of states."""
    return (
        any(isinstance(child, nn.Conv1d) for child in module.children())
        or "A_log" in module._parameters
        or "cache_params" in inspect.signature(type(module).forward).parameters
    )


# ---------------------------------------------------------------- installing the functions
_REFERENCE = [False]  # whether calls without a layout run transformers' PyTorch functions; see on_reference


def install(model: nn.Module) -> None:
    """Leads layouts to the recurrent layers of a model, and to others of its modeling file."""
    found = {cls for _, module in mixers(model) if (cls := _known(type(module))) is not None}
    for base in type(model).__mro__:
        if base.__module__.startswith("transformers.models."):
            found |= {cls for name, cls in vars(sys.modules[base.__module__]).items() if name in MIXERS}
    for cls in found:
        install_in(cls)
    patching.PREPARED.add(type(model))


def install_in(cls: type[Any]) -> None:
    """Leads layouts to a class of recurrent layers."""
    file = sys.modules[cls.__module__]
    if earlier.knows(cls):
        _install_earlier(cls, vars(file))
        return
    replaced = {seam: WRAPPERS[seam] for seam in MIXERS[cls.__name__]}
    for seam, wrap in (replaced | {"create_recurrent_attention_mask": _mask}).items():
        if (own := vars(file).get(seam)) is not None and not patching.is_marked(own):
            patching.of(file).replace(seam, patching.marked(wrap(own)))
    if not replaced and not patching.is_marked(cls.forward):
        patching.of(cls).replace("forward", patching.marked(FORWARDS[cls.__name__](cls.forward)))


def _install_earlier(cls: type[Any], names: dict[str, Any]) -> None:
    if patching.is_marked(cls.forward):
        return
    packed = earlier.packed_forward(cls, _conv(convolution), WRAPPERS[DELTA], _mamba2(chunk_scan))
    patching.of(cls).replace("forward", patching.marked(earlier.replaced(cls.forward, packed)))
    earlier.speak(names, cls.__name__)


@contextmanager
def on_reference(model: nn.Module) -> Iterator[None]:
    """Runs the recurrent layers of a model by transformers' PyTorch functions, which run on the CPU.

    transformers calls the kernels of an installed library for tensors on the CPU too.
    """
    install(model)
    before, _REFERENCE[0] = _REFERENCE[0], True
    try:
        with earlier.in_one_chunk(mixer for _, mixer in mixers(model)):
            yield
    finally:
        _REFERENCE[0] = before


def _plain(own: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a call without a layout."""
    return inspect.unwrap(own) if _REFERENCE[0] else own


def _for(own: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """transformers' function for `x`: its PyTorch code on the CPU, where libraries' kernels do not run."""
    return inspect.unwrap(own) if x.device.type == "cpu" else own


def _checked(dualkv: object, given: dict[str, Any]) -> Trees:
    """The trees of a packed call; refuses what would continue or separate sequences beside them."""
    found = trees_of(dualkv)
    for name in (*STATES, *BORDERS):
        if given.get(name) is not None and given[name] is not False:
            raise ValueError(f"{name} came together with dualkv: a layout says itself where sequences begin")
    return found


def _meant(own: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that transformers' PyTorch function takes; it drops the others, which are of other layers."""
    parameters = inspect.signature(inspect.unwrap(own)).parameters
    return {name: given[name] for name in parameters if name in given and name not in STATES}


# ---------------------------------------------------------------- the functions of modeling files
def _seam(packed: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of functions and forwards of a modeling file: a call with `dualkv=layout` runs
    packed(own, trees, given) outside the graph of `torch.compile`, `given` the other arguments by name."""

    @torch.compiler.disable
    def with_layout(own: Callable[..., Any], dualkv: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(inspect.signature(inspect.unwrap(own)).parameters, args, strict=False)) | kwargs
        return packed(own, _checked(dualkv, given), given)

    def wrap(own: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(own)
        def call(*args: Any, dualkv: Any = None, **kwargs: Any) -> Any:
            return _plain(own)(*args, **kwargs) if dualkv is None else with_layout(own, dualkv, args, kwargs)

        return call

    return wrap


@_seam
def _conv(own: Callable[..., Any], trees: Trees, given: dict[str, Any]) -> Tensor:
    """`causal_conv1d_fn(x [1, C, T], weight [C, k], bias, activation=)`."""
    activation = {"activation": given["activation"]} if "activation" in given else {}
    x = given["hidden_states"]
    kernel = kernels.convolution(given.get("activation"), x.device)
    return convolution_of_paths(trees, _for(own, x), x, given["weight"], given.get("bias"), kernel, **activation)


def _delta_rule(kernel: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The gated delta rule and Kimi's delta attention, `(query, key, value, g=, beta=, ...) -> (out, state)`; rows with
    beta = 0 and g = 0 leave the state as it is."""

    @_seam
    def wrap(own: Callable[..., Any], trees: Trees, given: dict[str, Any]) -> tuple[Tensor, None]:
        meant = _meant(own, given)
        rows = [meant.pop(name) for name in ("query", "key", "value", "g", "beta")]
        return delta_rule(trees, rows, _for(own, rows[0]), kernel, **meant), None

    return wrap


@_seam
def _mamba2(own: Callable[..., Any], trees: Trees, given: dict[str, Any]) -> Tensor:
    """`(x, dt, A, B, C, chunk_size=, D=, dt_bias=, ...) -> out`."""
    if given.get("z") is not None:
        raise ValueError("mamba2_chunk_scan got a gate z together with dualkv: expected a gate outside of the scan")
    meant = _meant(own, given)
    x, dt, decay, b, c = (meant.pop(name) for name in ("hidden_states", "dt", "A", "B", "C"))
    return mamba2(trees, [x, dt, b, c], decay, _for(own, x), **meant)


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    """`mamba2_split_conv1d_scan_combined`, all in one kernel: None sends a layer to the functions above."""

    @wraps(own)
    def call(*args: Any, dualkv: Any = None, **kwargs: Any) -> Any:
        return _plain(own)(*args, **kwargs) if dualkv is None else None

    return call


# ---------------------------------------------------------------- MiniMax
@_seam
def _lightning(own: Callable[..., Any], trees: Trees, given: dict[str, Any]) -> tuple[Tensor, None]:
    """`MiniMaxLightningAttention.forward`."""
    earlier.refuse_cache(given)
    layer, hidden_states = given["self"], given["hidden_states"]
    shape = 1, trees.num_tokens, layer.num_attention_heads, 3 * layer.head_dim
    rows = layer.act_fn(layer.qkv_proj(hidden_states)).view(shape).split(layer.head_dim, -1)
    out = _lightning_scan(trees, list(rows), layer.slope_rate, layer.block_size).flatten(2)
    return layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * layer.norm(out)), None


def _lightning_scan(trees: Trees, rows: list[Tensor], slope: Tensor, block: int) -> Tensor:
    """q, k, v [1, t, H, D] and slope [H, 1, 1] -> [1, t, H, D]: state = exp(-slope) * state + k v^T, out = q state."""
    if not trees.num_tokens:
        return torch.zeros_like(rows[2])
    function = kernels.library("chunk_simple_gla", rows[0].device)
    rows, slope = trees.to_heads(rows), trees.share(slope)
    slope = slope.to(torch.promote_types(rows[0].dtype, torch.float32))

    def of_wave(rows: list[Tensor], initial: Tensor | None, wave: Wave) -> tuple[Tensor, Tensor | None]:
        assert function is not None
        return varlen(function, rows, {"g_gamma": -slope.flatten()}, initial, wave, {"scale": 1.0})

    def batch(rows: list[Tensor], initial: Tensor | None, keep: bool) -> tuple[Tensor, Tensor | None]:
        return _lightning_blocks(rows, initial, slope, block)

    if function is not None:
        return trees.to_rows(scan(trees, rows, of_wave))
    exists = torch.ones_like(rows[0][:, :, 0, 0])  # [1, T]; 0 at padding, for which no time passes
    return trees.to_rows(scan(trees, [*rows, exists], padded(batch)))


def _lightning_blocks(rows: list[Tensor], state: Tensor | None, slope: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """q, k, v [N, L, H, D], exists [N, L] -> out [N, L, H, D] and states [N, H, D, D], block by block of rows."""
    dtype = rows[0].dtype
    results = []
    for q, k, v, exists in zip(*(x.split(block, 1) for x in rows), strict=True):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [N, H, L, D]
        age = exists.to(slope.dtype).cumsum(1)[:, None]  # [N, 1, L]
        since = age[..., :, None] - age[..., None, :]  # [N, 1, L, L]
        decay = torch.exp(-slope * since.clamp(min=0)).tril().to(dtype)
        out = ((q @ k.transpose(-1, -2)) * decay) @ v
        rest = torch.exp(-slope * (age[..., -1:] - age)[..., None]).to(dtype)  # [N, H, L, 1]
        new = (k * rest).transpose(-1, -2) @ v
        if state is not None:
            out = out + (q * torch.exp(-slope * age[..., None]).to(dtype)) @ state
            new = new + torch.exp(-slope * age[..., -1:, None]).to(dtype) * state
        state = new
        results.append(out.transpose(1, 2))
    assert state is not None
    return torch.cat(results, 1), state


# ---------------------------------------------------------------- Zaya
@_seam
def _projection(own: Callable[..., Any], trees: Trees, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """`ZayaCCAProjection.forward`: two convolutions of queries and keys, and values half of the row before."""
    layer, columns = given["self"], given["hidden_states"].transpose(1, 2)
    heads = [layer.num_attention_heads, *[layer.num_key_value_heads] * 2]

    def project(x: Tensor) -> Tensor:
        return torch.cat(own(layer, x.transpose(1, 2), None), 2).flatten(2).transpose(1, 2)

    back = max(layer.conv_kernel_size, 1)
    found = trees.convolve(lambda windows, x: convolve(project, windows, x), columns, back)
    return found.transpose(1, 2).contiguous().unflatten(2, (-1, layer.head_dim)).split(heads, 2)


# ---------------------------------------------------------------- Qwen4-exp
@_seam
def _ngrams(own: Callable[..., Any], trees: Trees, given: dict[str, Any]) -> Tensor:
    """`Qwen4ExpTextPLELayer.forward`: embeddings of the last tokens, and a convolution, which read rows back."""
    layer = given["self"]
    ngrams = layer.ple_embedding

    def back(run: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
        """Run a function of sequences [N, L, C] on the paths of [1, t, C], with `rows` zeros before each."""

        def of_columns(x: Tensor) -> Tensor:
            return run(x.transpose(1, 2)).transpose(1, 2)

        found = trees.convolve(lambda windows, x: convolve(of_columns, windows, x), x.transpose(1, 2), rows)
        return found.transpose(1, 2).contiguous()

    def embedded(ids: Tensor, _cache: Any) -> Tensor:
        """Embed n-grams. Before a sequence stands the end of another one, here 0; fp64 has the integers."""
        eos = ngrams.eos_token_id
        behind = (ids - eos).double()[..., None]
        return back(lambda x: ngrams(x[..., 0].long() + eos, None), behind, ngrams.context_len)

    def convolved(x: Tensor, _cache: Any) -> Tensor:
        return back(lambda x: layer._short_conv(x, None), x, layer.short_conv_state_len)

    on_paths = earlier.StandIn(layer, ple_embedding=embedded, _short_conv=convolved)
    return cast(Tensor, own(on_paths, given["hidden_states"], given["input_ids"], None))


# ---------------------------------------------------------------- masks
def _mask(own: Callable[..., Any]) -> Callable[..., Any]:
    """`create_recurrent_attention_mask`: a packed call has no padding for a recurrent layer to hide."""

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return None if masks.is_request(kwargs.get("attention_mask")) else own(*args, **kwargs)

    return call


FORWARDS: dict[str, Callable[..., Any]] = {
    "MiniMaxLightningAttention": _lightning,
    "ZayaCCAProjection": _projection,
    "Qwen4ExpTextPLELayer": _ngrams,
}
WRAPPERS: dict[str, Callable[..., Any]] = {
    CONV: _conv,
    DELTA: _delta_rule("chunk_gated_delta_rule"),
    KDA: _delta_rule("chunk_kda"),
    MAMBA2: _mamba2,
    FUSED: _fused,
}
