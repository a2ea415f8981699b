"""Models whose hidden states and log-probs of a sequence have the same bits whatever it is packed with.

Attention is batch-invariant by its plan (:func:`dualkv.attention`). What else a decoder computes of a row, such as
norms and activations, does not read other rows. That leaves products with weights, which run for a fixed number of rows
at a time (:mod:`dualkv.fixed_rows`). So do those of a vision tower, whose attention sees one image at a time.
:func:`differing_rows` checks a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from dualkv.fixed_rows import linear
from dualkv.integrations import patching
from dualkv.integrations.transformers import adapters, layers, media, recurrent
from dualkv.layout import Layout

# Classes that see images and whose towers are proven: these attend to one image, or one window of it, at a time.
TOWERS = ("Qwen2VLModel", "Qwen2_5_VLModel", "Qwen3VLModel")
CHUNKED = ("eager", "sdpa")  # attention of these towers that is called for each image
# The sums of a norm are made by as many threads as its rows leave: in another order if they are fewer.
LEAST_ROWS = 32


class Calls:
    """Whether the last call of a model was packed. Layers that are recomputed in the backward are of that call."""

    packed = False

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of a decoder, and of a model that sees images."""
        layout = kwargs.get("dualkv")
        self.packed = layout is not None
        rows = getattr(layout, "num_tokens", LEAST_ROWS)
        if rows < LEAST_ROWS and next(module.parameters()).is_cuda:
            raise ValueError(
                f"batch_invariant is True and the batch has {rows} rows, expected at least {LEAST_ROWS}: norms of fewer"
                " rows sum in another order"
            )


def install(model: nn.Module, decoders: Iterable[PreTrainedModel], every_call: bool = False) -> None:
    """Make packed calls of a model batch-invariant, to which there are no :func:`objections`. Its keyword arguments say
    which calls are packed, unless `every_call` is, as in an engine whose hooks hand on layouts later."""
    calls = Calls()
    calls.packed = every_call
    for module in () if every_call else (*decoders, *_seeing(model)):
        patching.of(module).before(calls.note)
    for module in model.modules():
        if _is_linear(module):
            patching.of(module).replace("forward", partial(_forward, module, calls))
            patching.of(module).replace(patching.INVARIANT, True)
        elif _is_patches(module):
            patching.of(module).replace("forward", partial(_forward_patches, module, calls))
    for module in layers.attention_modules(model):
        patching.of(module).replace(patching.INVARIANT, True)


def objections(model: nn.Module, decoders: list[PreTrainedModel]) -> Iterator[str]:
    """Say what keeps a model from being batch-invariant."""
    why = "expected a model whose parts are proven, or batch_invariant=False"
    for seeing in _seeing(model):
        yield from _objections_to_tower(seeing, why)
    for kind, names, _ in adapters.of(model):
        if kind != "LORA" or ":" in names:
            yield f"batch_invariant is True with adapters of {kind} ({names}), which are not known to be so: {why}"
    for decoder in decoders:
        for name, mixer in recurrent.mixers(decoder):
            yield f"batch_invariant is True and {name} ({type(mixer).__name__}) is recurrent: {why}"
        yield from _other_products(decoder, why, _is_linear)


def _seeing(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a model that put features of images in the place of embeddings."""
    return [module for module in model.modules() if media.family(type(module)) is not None]


def _objections_to_tower(seeing: nn.Module, why: str) -> Iterator[str]:
    if not any(c.__name__ in TOWERS for c in type(seeing).__mro__):
        name = type(seeing).__name__
        yield f"batch_invariant is True of {name}, whose images are not known to be so: {why}"
        return
    tower: Any = seeing.visual
    if (attention := tower.config._attn_implementation) not in CHUNKED:
        yield f"batch_invariant is True and the vision tower has attention {attention!r}, expected one of {CHUNKED}"
    yield from _other_products(tower, why, lambda module: _is_linear(module) or _is_patches(module))


def _other_products(model: nn.Module, why: str, is_known: Callable[[nn.Module], bool]) -> Iterator[str]:
    for name, module in model.named_modules():
        wide = any(x.dim() > 1 for x in module.parameters(recurse=False))
        if wide and not is_known(module) and not isinstance(module, nn.Embedding):  # rows of tables, no products
            yield f"batch_invariant is True and {name} ({type(module).__name__}) has products of its own: {why}"


def _is_patches(module: nn.Module) -> TypeGuard[nn.Conv3d]:
    """Whether a module is a convolution over patches that do not overlap: a product for each patch."""
    return (
        isinstance(module, nn.Conv3d)
        and type(module).forward is nn.Conv3d.forward
        and module.kernel_size == module.stride
        and module.groups == 1
        and module.padding == (0, 0, 0)
        and module.dilation == (1, 1, 1)
    )


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a module is an `nn.Linear` with that class's own forward, or was one before :func:`install`."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _forward(module: nn.Linear, calls: Calls, x: torch.Tensor) -> torch.Tensor:
    product = linear if calls.packed else nn.functional.linear
    result: torch.Tensor = product(x, module.weight, module.bias)
    return result


def _forward_patches(module: nn.Conv3d, calls: Calls, x: torch.Tensor) -> torch.Tensor:
    """x [n, C, *kernel_size] -> [n, columns, 1, 1, 1]"""
    if not calls.packed or x.shape[2:] != module.kernel_size:
        return nn.Conv3d.forward(module, x)
    made = linear(x.flatten(1), module.weight.flatten(1), module.bias)
    return made[:, :, None, None, None]


# ---------------------------------------------------------------- the check
# Segments of two groups, one of them with turns: lengths and parents. Sequences that share rows have one length, for
# rotary embeddings that depend on it. On a CPU the last elements of a tensor, beyond a multiple of 16, may be computed
# by other code.
LENGTHS = ((192, -1), (64, 0), (64, 1), (64, 1), (128, 0), (128, 0), (64, -1), (128, 6), (128, 6))
PACKINGS = ([6, 8, 0, 5, 1, 3], [0, 1, 2], [0, 4], [0, 1, 2, 3, 4, 5], [6, 7])  # in the order of a layout of their own


@torch.no_grad()
def differing_rows(model: Any, shorter: int = 1) -> int:
    """Count the rows of two groups whose hidden states differ in bits from those in other packings.

    Args:
        model: enabled; what is called with token ids and returns its hidden states first, such as `model.model`.
        shorter: divides the lengths of all segments, which are up to 192 tokens.

    Returns:
        0 for a model that is enabled with `batch_invariant=True`.
    """
    table = model.get_input_embeddings()
    draw = torch.Generator().manual_seed(0)
    lengths = np.array([length // shorter for length, _ in LENGTHS])
    offsets = np.append(0, np.cumsum(lengths))
    ids = torch.randint(table.num_embeddings // 16, table.num_embeddings, (int(offsets[-1]),), generator=draw)
    where = table.weight.device

    def hidden(segments: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(np.concatenate([np.arange(*offsets[s : s + 2]) for s in segments]))
        place = {s: i for i, s in enumerate(segments)}
        parent = [place.get(LENGTHS[s][1], -1) for s in segments]
        layout = Layout.from_segments(np.append(0, np.cumsum(lengths[segments])), parent, where)
        return model(input_ids=ids[rows][None].to(where), dualkv=layout)[0][0], rows.to(where)

    whole, _ = hidden([*range(len(LENGTHS))])
    found = 0
    for segments in PACKINGS:
        some, rows = hidden(segments)
        found += int((some != whole[rows]).any(1).sum())
    return found
