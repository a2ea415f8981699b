"""Enable models of Hugging Face transformers.

No module of a model is replaced, unless `fast=True` asks for it. (Functions of transformers' modeling files are, for
recurrent layers; see :mod:`dualkv.integrations.transformers.recurrent`.) `enable` registers one more attention
implementation and names it in the decoder's config. With a layout this implementation runs :func:`dualkv.attention`.
Without a layout it runs the implementation that was there before. The registered name contains the name of that
implementation (`dualkv|sdpa`). A saved config names no implementation. Hooks and notes are made by
:mod:`dualkv.integrations.patching`, whose records copies and pickles of a model contain.

A forward pre-hook on the decoder checks each call once, before the first layer. transformers makes no [T, T] mask: its
mask functions say which keys each layer sees (:mod:`dualkv.integrations.transformers.masks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from dualkv.arrays import check_bool, check_model
from dualkv.branches import Branch
from dualkv.data.rows import forgotten_layout
from dualkv.integrations import patching
from dualkv.integrations.patching import PREFIX, stock_attention
from dualkv.integrations.recurrent import sharded, walked
from dualkv.integrations.transformers import (
    adapters,
    checkpointing,
    earlier,
    fused,
    heads,
    indexers,
    invariant,
    labels,
    layers,
    masks,
    media,
    recurrent,
    rotary,
    selfcheck,
    towers,
)
from dualkv.integrations.transformers.placed import Placed
from dualkv.layout import Layout
from dualkv.packed_rows import PackedRows, packed_rows
from dualkv.segments import OP_TAGS, segments_of
from dualkv.sequence_parallel import Shard

NGRAMS = "ple_input_ids"  # an argument of Qwen4-exp's layers: token ids
Model = TypeVar("Model", bound=nn.Module)


# ---------------------------------------------------------------- a call with a layout
@torch.library.custom_op("dualkv::position_ids", mutates_args=(), tags=OP_TAGS)
def _position_ids(
    tokens: torch.Tensor, position_ids: torch.Tensor | None, offsets: torch.Tensor, parent: torch.Tensor
) -> torch.Tensor:
    """The layout's position ids [1, T] int64 for `tokens` [1, T, ...]; raises if the given ones differ.

    This is an op, so that a compiled model also checks every batch. On a GPU the comparison is an asynchronous
    assertion, which stops the process at the next synchronisation. The host does not wait for the device here.
    """
    layout = Layout(segments_of(offsets, parent), offsets, parent, tokens.device)
    return _checked_positions(tokens, position_ids, layout.position_ids[None], layout)


@_position_ids.register_fake
def _(
    tokens: torch.Tensor, position_ids: torch.Tensor | None, offsets: torch.Tensor, parent: torch.Tensor
) -> torch.Tensor:
    return tokens.new_empty(tokens.shape[:2], dtype=torch.int64)


def _checked_positions(
    tokens: torch.Tensor, position_ids: torch.Tensor | None, own: torch.Tensor, text: Layout | PackedRows
) -> torch.Tensor:
    """A copy of `own`, the positions of the layout; raises if the tokens or the given positions do not fit them.

    Multimodal rotary embeddings take positions as [3, 1, T], or as [4, 1, T] with those of text before them.

    Args:
        tokens: [1, T, ...].
        position_ids: as given, or None.
        own: [1, T], or [3, 1, T] with images.
        text: has the positions [T] of the text, where `own` has three rows.
    """
    if tokens.shape[1] != own.shape[-1]:
        raise ValueError(f"the model is given {tokens.shape[1]} tokens, the layout has {own.shape[-1]}")
    if position_ids is not None:
        expected = own
        if position_ids.dim() == 3 and own.dim() == 2 and len(position_ids) in (3, 4):
            expected = own.expand(len(position_ids), 1, -1)
        elif len(position_ids) == 4 and own.dim() == 3:
            expected = torch.cat([text.position_ids.to(own.device)[None, None], own])
        if position_ids.shape != expected.shape or position_ids.device != own.device:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)} on {position_ids.device},"
                f" expected {tuple(expected.shape)} on {own.device} (leave it out to use the layout's)"
            )
        differs = position_ids != expected
        if differs.device.type != "cpu":
            torch._assert_async(~differs.any(), "position_ids are not the layout's")
        elif differs.any():
            at = differs.nonzero()[0].tolist()
            raise ValueError(
                f"position_ids{at} is {int(position_ids[tuple(at)])}, the layout's is {int(expected[tuple(at)])}"
                " (leave it out to use the layout's)"
            )
    return own.clone()


def _positions(tokens: torch.Tensor, position_ids: torch.Tensor | None, dualkv: object) -> torch.Tensor:
    """[1, T], the position of each of the tokens [1, T, ...]; raises if the tokens or the given ones do not fit. With
    images the positions may be [3, 1, T]."""
    packed = packed_rows(dualkv)
    whole = packed.whole
    if packed.rows is None and not packed.has_positions:
        found = _position_ids(tokens.detach(), position_ids, whole.offsets, whole.parent)
        return cast(torch.Tensor, found)
    own = packed.position_ids.to(tokens.device)
    text = packed.layout if isinstance(packed, Placed) else packed
    return _checked_positions(tokens, position_ids, own[None] if own.dim() == 1 else own, text)


def _enter_decoder(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the decoder: checks a call with a layout, fills in positions, cache and mask."""
    layout = kwargs.get("dualkv")
    if layout is None:
        _refuse_forgotten(module, args, kwargs)
        return None
    packed = _checked(layout)
    selfcheck.refuse_unproved(module, packed)
    if isinstance(part := packed.layout if isinstance(packed, Placed) else packed, Branch):
        part.check_module(module)
        checkpointing.keep_all(module, part.keeps, part.at_end)
    name = type(module).__name__
    if type(module) not in patching.PREPARED:  # an unpickled model, before any `enable` of this process
        recurrent.install(module)
    if not packed.has_positions:  # otherwise the inputs are those of a model that runs images
        media.refuse(module, kwargs)
        media.refuse_unplaced(module, kwargs, packed)
    if stock_attention(module.config) is None:
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
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = masks.request(tokens.device)
    elif not masks.is_of_packed_call(mask):
        raise ValueError(
            "attention_mask came together with dualkv: the layout says which rows see each other, leave the mask out"
        )
    if kwargs.get("use_cache") or any(kwargs.get(cache) is not None for cache in earlier.CACHES):
        raise ValueError("past_key_values or use_cache came together with dualkv: packed groups run without a cache")
    indexers.refuse(name, module.config, packed.of_layers)
    if isinstance(packed.of_layers, Shard):
        sharded.refuse(recurrent.mixers(module), packed.of_layers.world_size)
    # Layers that hand no keyword arguments on would not refuse any.
    layers.refuse_arguments(f"a call of {name}", kwargs, ("dualkv", *layers.arguments(type(module))))
    # With images, given positions are compared with the model's where the images are placed.
    given = None if packed.has_positions else kwargs.get("position_ids")
    position_ids = _positions(tokens, given, layout)
    if (padding := layers.padding_before_positions(module)) is not None:
        position_ids = layers.behind_padding(padding, tokens, position_ids, name)
    changed = {"use_cache": False, "attention_mask": mask, "position_ids": position_ids, "dualkv": packed.of_layers}
    return args, {**kwargs, **changed}


def _refuse_forgotten(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises ValueError for a call without a layout whose tokens are those of a packed batch, unless a mask
    [1, 1, T, T] or positions say what rows see.

    Compiled functions leave that to what asks for the layout's use afterwards (:func:`dualkv.data.rows.check_used`).
    """
    tokens, mask = args[0] if args else kwargs.get("input_ids"), kwargs.get("attention_mask")
    if torch.compiler.is_compiling() or (layout := forgotten_layout(tokens)) is None:
        return
    # transformers separates sequences where positions begin anew. So groups that share nothing are computed right.
    s = layout._segments
    apart = (s.first_position + s.lengths)[s.is_leaf].sum() == s.total and kwargs.get("position_ids") is not None
    if (mask is None or getattr(mask, "ndim", 0) == 2) and not apart:
        raise ValueError(
            f"{type(module).__name__} got the packed input_ids of {layout!r} without dualkv, so every row would see all"
            " rows before it: pass dualkv=batch.layout"
        )


def _checked(dualkv: object) -> PackedRows:
    packed = packed_rows(dualkv)
    packed.whole._check_of_all_rows("dualkv")
    return packed


def _enter_head(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the models that contain the decoder: refuses what would shift rows, places images.

    A model that makes the decoder's masks gets the request for them, one that numbers its rows the positions.
    """
    layout = kwargs.get("dualkv")
    if layout is None:
        _refuse_forgotten(module, args, kwargs)
        if not torch.compiler.is_compiling():
            towers.ask(module, {})  # a call before may have ended in an error
        return None
    _checked(layout)
    named = dict(zip(layers.arguments(type(module)), args, strict=False)) | kwargs
    runs_images = media.family(type(module)) is not None
    if not runs_images and not media.passes_on(module):
        media.refuse(module, named)
    labels.refuse_shifts(module, named)
    if runs_images:
        args, kwargs = (), _with_images(module, named)
    else:
        kwargs = {**kwargs, **_for_decoder(module, layers.arguments(type(module))[len(args) :], named)}
    if named.get("attention_mask") is None and layers.makes_masks(type(module)):
        kwargs = {**kwargs, "attention_mask": masks.request(module.device)}
    return args, kwargs


def _enter_outermost(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of the head that callers call. One within it may get their arguments without the labels."""
    if kwargs.get("dualkv") is not None:
        labels.refuse_alone(module, dict(zip(layers.arguments(type(module)), args, strict=False)) | kwargs)
    return _enter_head(module, args, kwargs)


def _for_decoder(module: PreTrainedModel, left: tuple[str, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments that a model would make by itself, other than a packed call of its decoder takes them.

    left: the names of the arguments that did not come by position.
    """
    made: dict[str, Any] = {}
    if "use_cache" in left and named.get("use_cache") is None:
        made["use_cache"] = False
    tokens = named["input_ids"] if named.get("input_ids") is not None else named.get("inputs_embeds")
    numbers = "position_ids" in left and named.get("position_ids") is None and layers.numbers_rows(type(module))
    if numbers and tokens is not None and tokens.dim() > 1:
        made["position_ids"] = _positions(tokens, None, named["dualkv"])
    return made


def _with_images(module: PreTrainedModel, named: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model that runs images, with the positions of all rows."""
    layout, how = named["dualkv"], media.family(type(module))
    assert how is not None
    tokens = named["input_ids"] if named.get("input_ids") is not None else named.get("inputs_embeds")
    if tokens is None or tokens.dim() < 2 or tokens.shape[0] != 1:
        return named  # which the decoder refuses
    with_media = media.given(named) or named.get(media.BLOCKS) is not None or packed_rows(layout).runs_towers
    if with_media and torch.compiler.is_compiling():
        raise ValueError(f"images came to a compiled {type(module).__name__} {media.UNPLACED}")
    media.refuse_forgotten(module, named)
    over_ranks = isinstance(layout, Shard) and not layout.is_part and not torch.compiler.is_compiling()
    found = media.place(module, named, layout) if with_media or over_ranks else None
    if not media.takes_blocks(module):  # some tokenizers return it, and these models ignore it
        named = {name: value for name, value in named.items() if name != media.BLOCKS}
    placed = layout if found is None else found
    packed = packed_rows(placed)
    if not packed.has_positions and how.by_ids:  # its decoder takes placed layouts only
        placed = Placed(layout, packed.position_ids[None].to(tokens.device))
    changed = {
        "dualkv": placed,
        "position_ids": _positions(tokens, named.get("position_ids"), placed),
        "use_cache": named.get("use_cache") or False,  # some make a cache unless told otherwise
    }
    return {**named, **changed}


def _keep_layout(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of decoder layers that do not hand keyword arguments on: their attention finds the layout.

    transformers' gradient checkpointing runs a layer again without this hook.
    """
    if kwargs.get("dualkv") is not None and module.training and getattr(module, "gradient_checkpointing", False):
        raise ValueError(
            f"{type(module).__name__} is set to gradient checkpointing and does not hand keyword arguments on to its"
            " attention, which would lack the layout when it runs again: call gradient_checkpointing_disable"
        )
    _hand_on(module, args, kwargs)


def _hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of modules whose parts get no keyword arguments, and find the layout."""
    for part in module.children():
        if hasattr(part, patching.LAYOUT):
            patching.hand(part, kwargs.get("dualkv"))


def _take_layout(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of attention in such a layer."""
    layout = module.dualkv_layout
    if layout is None:
        return None
    patching.hand(module, None)
    return args, {**kwargs, "dualkv": layout}


def _mark(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of layers with n-grams (Qwen4-exp), whose token ids bring the layout along: checkpointing runs a
    layer again without the hooks of the layer."""
    _hand_on(module, args, kwargs)
    if kwargs.get("dualkv") is None:
        return None
    ids = kwargs[NGRAMS].view_as(kwargs[NGRAMS])
    patching.hand(ids, kwargs["dualkv"])
    return args, {**kwargs, NGRAMS: ids}


def _take_marked(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook of the n-grams in such a layer."""
    expected, layout = module.dualkv_layout, getattr(args[1], patching.LAYOUT, None)
    patching.hand(module, None)
    if expected is not layout and expected is not None:
        raise ValueError(f"{type(module).__name__} got other token ids than its layer, which has a layout for them")
    return None if layout is None else (args, {**kwargs, "dualkv": layout})


# ---------------------------------------------------------------- the registered implementations
def _packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dualkv: object,
    deterministic: bool,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, H, T, D], key and value [1, Hk, T, D] -> [1, T, H, D]."""
    if is_causal is False or not layers.is_causal(module):
        raise ValueError(
            f"{layers.describe(module)} is not causal self-attention, the only kind that dualkv.attention computes"
        )
    kwargs = indexers.with_sets(module, kwargs)
    features, sets = layers.features(module, attention_mask, kwargs), indexers.given_sets(kwargs)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    if layers.has_temperature(module):
        positions = _positions(q[None], None, dualkv)[0]
        q = (q * layers.temperature(module, positions)[:, None, None]).to(q.dtype)
    if sets is not None and sets.numel():
        return indexers.attend(module, dualkv, q, k, v, sets, scaling, features)[None], None
    run = packed_rows(dualkv).attention_of(module)
    out = run(q, k, v, softmax_scale=scaling, deterministic=deterministic, **features._asdict())
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
        dualkv: object = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if dualkv is not None:
            return _packed_attention(module, query, key, value, attention_mask, dualkv, deterministic, **kwargs)
        if masks.is_answer(attention_mask):
            raise ValueError(
                f"{layers.describe(module)} is not handed the layout that the model was called with:"
                f" {type(module).__name__}'s callers do not pass keyword arguments on"
            )
        route = layers.route(type(module))
        assert route is not None, f"{type(module).__name__} was called without going through the registry"
        interface, eager = route
        if in_place:
            attention_mask = indexers.mask_without_layout(module, attention_mask, query, key.shape[2], kwargs)
        own = interface.get_interface(base, eager)
        seen_as = module if in_place else layers.UnderOwnName(module, base)
        return own(seen_as, query, key, value, attention_mask, **kwargs)

    make = ALL_MASK_ATTENTION_FUNCTIONS.get(base)

    def mask(*, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if masks.is_request(attention_mask):
            return masks.answer(**kwargs)
        return None if make is None else make(attention_mask=attention_mask, **kwargs)

    AttentionInterface.register(name, patching.marked(forward))
    AttentionMaskInterface.register(name, mask)
    return name


def _configs(model: nn.Module) -> list[Any]:
    """The configs of decoders and of their layers, which name the implementation, each once."""
    configs = (config for _, module, owner in layers.decoder_layers(model) for config in (module.config, owner.config))
    return list({id(config): config for config in configs}.values())


def enable(
    model: Model, *, deterministic: bool = False, check: bool = True, fast: bool = False, batch_invariant: bool = False
) -> Model:
    """Lets `model(input_ids=..., dualkv=layout)` run packed groups. Calls without a layout do not change.

        model(input_ids=batch.input_ids, dualkv=batch.layout)

    The batch is the result of :func:`dualkv.pack` or `pack_sequences`. With a layout every attention layer runs
    :func:`dualkv.attention`, with the windows or chunks of the mask that its model would make, and with its sinks and
    softcapping. Recurrent layers start each segment from the state that its parent leaves. input_ids is [1, T], all
    groups in one packed row (or inputs_embeds [1, T, C]). position_ids may be left out; given ones [1, T] (multimodal
    [3, 1, T] or [4, 1, T]) must be the layout's, which a device-side assertion checks on a GPU. With sequence
    parallelism `dualkv` is a :class:`dualkv.sequence_parallel.Shard`, and T counts the rows of this rank. Models of
    :data:`dualkv.integrations.transformers.media.FAMILIES` take `**batch.media` too, that of all rows on every rank.
    Noise and auxiliary losses of a shared prompt are drawn and counted once.

    Wrapped models (DDP, FSDP, `torch.compile`) may be enabled before or after the wrapping, PEFT's after its adapters
    are added. A second call sets the options again, and judges adapters that are new.

    Args:
        model: a transformers model or a wrapper around one. It is changed in place: the attention implementation of
            its config, and forward pre-hooks.
        deterministic: bitwise equal gradients from run to run. Models with one config object have one setting.
        check: run a small copy of the decoder (its class, its configuration with fewer layers, heads and columns,
            random weights) on the CPU, packed and replicated, and refuse the model if hidden states differ. The check
            takes about a second, once for each configuration in a process. The first call in training, of a walk and
            with kept products checks gradients too. The model itself is not run.
        fast: also run norms, rotary embeddings and MLPs in fused kernels, with their rounding: Liger's where
            `liger_kernel` is installed and knows the model, compiled ones otherwise. Layers that are checkpointed, not
            reentrantly, keep attention, unless `recompute_layers` says what they keep.
        batch_invariant: the bits of a row's hidden states and log-probs depend on its path alone, and on where that is
            cut into segments (:mod:`dualkv.integrations.transformers.invariant`). Not with `fast`, walks or context
            parallelism.

    Returns:
        The same model.

    Raises:
        ValueError: the small copy differs or cannot run; a layer does not take its attention from transformers'
            registry, is not causal, has a recurrent state of an unknown kind, a head dim above 512 or a mask with a
            rule of the model's own; a head makes one result for a whole input; installed kernels of recurrent layers
            have no right backward on this GPU; windows or chunks of less than 1 key; PEFT's adapters that read other
            rows or add some, or that nobody has judged (docs/transformers.md has a table); parts that are not known to
            be batch-invariant, if that is asked for.
            A call with a layout raises ValueError for attention dropout in training, noise that is not drawn for each
            row (dropped layers, NEFTune) and statistics over rows in training, other adapters than before, masks,
            caches, images that do not match their placeholders or that the model is not known to run packed, a token
            count or positions other than the layout's, and sequences that share rows and get different rotary factors
            by their lengths.
        TypeError: `model` is no module; another argument is not a bool.
    """
    check_model(model)
    of_names = {"deterministic": deterministic, "check": check, "fast": fast, "batch_invariant": batch_invariant}
    for name, value in of_names.items():
        check_bool(name, value)
    if fast and batch_invariant:
        raise ValueError(
            "batch_invariant is True with fast=True, whose kernels are not proven: expected one of the two"
        )
    layers.refuse(model)
    inner = layers.decoders(model)
    unproven = invariant.objections(model, inner) if batch_invariant else ()
    for sentence in (*adapters.objections(model, inner, known_alone=check), *unproven):
        raise ValueError(sentence)
    disable(model)
    if batch_invariant:
        invariant.install(model, inner)
    for decoder in inner:
        if check:
            small = adapters.shrunk(model, decoder)
            selfcheck.check(decoder, enable, small)
            selfcheck.ask_later(decoder, small, enable)
            if batch_invariant:
                selfcheck.check(decoder, enable, small, "invariance")
        adapters.remember(decoder)
    for decoder in inner:
        recurrent.install(decoder)
        for name, mixer in recurrent.mixers(decoder):
            around = decoder.get_submodule(name.rpartition(".")[0])
            if recurrent.lacks_arguments(mixer):
                marks = NGRAMS in layers.arguments(type(around))
                patching.of(around).before(_mark if marks else _hand_on)
                patching.of(mixer).replace(patching.LAYOUT, None)
                patching.of(mixer).before(_take_marked if marks else _take_layout)
            patching.of(mixer).before(walked.enter)
    for config in _configs(model):
        patching.name_attention(config, _register(config._attn_implementation, deterministic))
    for name, module, _ in layers.decoder_layers(model):
        layer = model.get_submodule(name.rpartition(".")[0])
        if layers.drops_arguments(type(layer)):
            patching.of(layer).before(_keep_layout)
            patching.of(module).replace(patching.LAYOUT, None)
            patching.of(module).before(_take_layout)
        indexers.install(module)
    rotary.enable(model)  # behind the hook that hands attention its layout, before the decoder's, which unpacks it
    for module in model.modules():
        if media.family(type(module)) is not None:
            towers.install(module)
    within: set[nn.Module] = set()  # the heads so far; a module comes before its parts
    for module in model.modules():
        if module in inner:
            patching.of(module).before(_enter_decoder)
        elif isinstance(module, PreTrainedModel) and any(part in inner for part in module.modules()):
            patching.of(module).before(_enter_head if module in within else _enter_outermost)
            within.update(module.modules())
    heads.known(model)
    if fast:
        fused.fuse(model)
        for decoder in inner:
            patching.of(decoder).before(checkpointing.keep_attention)
    return model


def disable(model: Model) -> Model:
    """Undoes :func:`enable`; a model that was not enabled does not change. Returns the same model."""
    check_model(model)
    patching.undo(model, "fast", "enable")
    return model


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """A context in which an enabled model has its own attention and layers, as continuous batching needs it.

        with suspended(model):
            answers = model.generate_batch(prompts)

    Configs name the model's own implementation, and layers that `fast` changed run as they were. Calls with a layout
    raise ValueError. Afterwards the model is enabled as before, with the same `deterministic` and `fast`.

    Args:
        model: a transformers model or a wrapper around one. One that is not enabled does not change.
    """
    check_model(model)
    names = [(config, config._attn_implementation) for config in _configs(model)]
    was_fused = fused.is_fused(model)
    patching.undo(model, "fast")
    try:
        for config, name in names:
            patching.name_attention(config, stock_attention(config) or name)
        yield
    finally:
        for config, name in names:
            patching.name_attention(config, name)
        if was_fused:
            fused.fuse(model)


# A pickled model names its implementation. Importing this module registers the usual ones, for unpickling.
for _name in ("eager", *AttentionInterface._global_mapping):
    for _deterministic in PREFIX:
        if not _name.startswith(tuple(PREFIX.values())):
            _register(_name, _deterministic)
