"""Rotary embeddings that depend on the length of the whole sequence: transformers' longrope and dynamic NTK.

These modules read the length from the largest position of their call. A packed call holds sequences of many lengths,
and a rank or a part of a tree holds parts of them. So a forward hook runs the module's own forward again, once for each
kind of length in the call: for the rows of these sequences, with the last position of such a sequence behind them.
Every row gets what its own sequence gets alone, in a call of a new module. (Dynamic NTK keeps what an earlier, longer
call left; a packed call starts as new, and leaves the module as new.)

Rows that sequences share have one factor. Where their sequences need several, the call is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from dualkv.arrays import IntArray
from dualkv.integrations import patching
from dualkv.integrations.transformers import layers
from dualkv.integrations.transformers.placed import Placed
from dualkv.packed_rows import PackedRows, packed_rows
from dualkv.segments import OP_TAGS, Segments, segments_of

DECORATED_IN = "transformers.modeling_rope_utils"  # dynamic_rope_update, which reads the largest position


class Scaling(NamedTuple):
    """The dependence of a rotary embedding on the length of its sequence.

    Attributes:
        kind: transformers' name of it.
        bounds: lengths, ascending: what is computed changes above each of them.
        every: above this length each one has factors of its own; None: there is no such length.
    """

    kind: str
    bounds: tuple[int, ...]
    every: int | None = None

    def alike(self, lengths: IntArray) -> IntArray:
        """Map each length to one that stands for all lengths with the same factors."""
        stands = np.append(self.bounds, self.bounds[-1] + 1)[np.searchsorted(self.bounds, lengths)]
        return stands if self.every is None else np.where(lengths > self.every, lengths, stands)

    def says(self) -> str:
        """Describe the scaling in error messages."""
        above = [f"sequences of more than {bound} tokens" for bound in self.bounds if bound != self.every]
        if self.every is not None:
            above.append(f"sequences of each length above {self.every} tokens")
        return f"has other factors for {' and for '.join(above)} ({self.kind})"


def scaling(module: nn.Module, layer_type: str | None = None) -> Scaling | None:
    """Read how a rotary embedding of transformers depends on the length; None if it does not.

    layer_type: of embeddings that hold one for each type of layer.
    """
    kind, config = getattr(module, "rope_type", None), getattr(module, "config", None)
    settings = getattr(config, "rope_parameters", None) or {}
    if isinstance(kind, dict):
        kind, settings = kind.get(layer_type), settings.get(layer_type) or {}
    if not isinstance(kind, str):
        return None
    every: Any = module.original_max_seq_len if "dynamic" in kind else None
    bounds: set[Any] = set() if every is None else {every}
    if kind == "longrope" or (kind != "default" and "long_mscale" in settings):  # the latter is Phi-3.5-MoE's
        bounds.add(settings["original_max_position_embeddings"])
    return Scaling(kind, tuple(sorted(bounds)), every) if bounds else None


def is_decorated(module: nn.Module) -> bool:
    """Whether transformers' own rule for the length runs before a module's forward."""
    forward: Any = type(module).forward
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__") == DECORATED_IN:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def depends_on_length(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding of this kind."""
    return bool(_scalings(module)) and is_decorated(module)


def _scalings(module: nn.Module) -> list[Scaling]:
    """All kinds in an embedding."""
    kinds: Any = getattr(module, "rope_type", None)
    types = kinds if isinstance(kinds, dict) else (None,)
    return [how for layer_type in types if (how := scaling(module, layer_type)) is not None]


def embeddings(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of this kind in a model."""
    return [module for module in model.modules() if depends_on_length(module)]


def notes(model: nn.Module) -> list[str]:
    """Say what calls of a model refuse, one sentence for each kind of embedding."""
    names = dict.fromkeys(_name(module, how) for module in embeddings(model) for how in _scalings(module))
    return [f"{name}: calls in which they share rows with others are refused" for name in names]


# ---------------------------------------------------------------- hooks
def enable(model: nn.Module) -> None:
    """Registers the hooks on rotary embeddings and on the modules that call them."""
    for module in embeddings(model):
        patching.of(module).replace(patching.LAYOUT, None)
        patching.of(module).behind(of_own_sequences, with_kwargs=True)
    for module in model.modules():
        if not isinstance(module, nn.ModuleList) and any(True for _ in _held(module)):
            patching.of(module).before(hand_layout)
            patching.of(module).behind(take_layout_back)


def _held(module: nn.Module) -> Iterator[nn.Module]:
    """The rotary embeddings that a module calls: its own ones and those in its lists."""
    for part in module.children():
        if isinstance(part, nn.ModuleList):
            yield from _held(part)
        elif hasattr(part, "rope_type") and hasattr(part, patching.LAYOUT):
            yield part


def hand_layout(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of what calls rotary embeddings, a decoder or each of its layers: they find the layout."""
    for part in _held(module):
        patching.hand(part, kwargs.get("dualkv"))


def take_layout_back(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forward hook of the same modules."""
    for part in _held(module):
        patching.hand(part, None)


def of_own_sequences(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Forward hook of a rotary embedding: in a packed call, each row's factors are those of its own sequence."""
    layout: Any = module.dualkv_layout
    if layout is None:
        return None
    given = dict(zip(layers.arguments(type(module)), args, strict=False)) | kwargs
    how = scaling(module, given.get("layer_type"))
    if how is None:
        return None
    packed = packed_rows(layout)
    if torch.compiler.is_compiling() and packed.rows is None and not packed.has_positions and how.every is None:
        position_ids, whole = given["position_ids"], packed.whole
        of_rows = _alike_in_graph(position_ids, whole.offsets, whole.parent, [*how.bounds], _name(module, how))
        return _evaluated(module, given, of_rows, [*how.bounds, how.bounds[-1] + 1])
    return _outside_graphs(module, given, how, layout)


@torch.compiler.disable
def _outside_graphs(module: nn.Module, given: dict[str, Any], how: Scaling, layout: Any) -> Any:
    position_ids = given["position_ids"]
    values, of_rows = _alike(packed_rows(layout), how, _name(module, how), position_ids.device)
    if how.every is None:
        return _evaluated(module, given, of_rows, values)
    prefix = f"{given['layer_type']}_" if isinstance(module.rope_type, dict) else ""
    found = None
    for value in values:
        _as_new(module, prefix, position_ids.device)
        found = _evaluated(module, given, of_rows, [value], found)
    _as_new(module, prefix, position_ids.device)
    return found


def _name(module: nn.Module, how: Scaling) -> str:
    return f"{type(module).__name__} {how.says()}"


def _evaluated(
    module: nn.Module, given: dict[str, Any], of_rows: torch.Tensor | None, values: list[int], before: Any = None
) -> Any:
    """Run the module on rows [T]: the rows of each value in a call of their own, with that value's last position. Other
    rows keep their results from `before`.

    Args:
        of_rows: [T] the length that stands for that of each row's sequence; None: all have the only value.

    Returns:
        As the module's forward returns it: a tensor [..., T, D] or a tuple of such.
    """
    position_ids, found = given["position_ids"], before
    count = position_ids.shape[-1]
    for value in values:
        own = None if of_rows is None else of_rows == value
        at = position_ids if own is None else position_ids.where(own, position_ids.new_zeros(()))
        last = position_ids.new_full((*position_ids.shape[:-1], 1), value - 1)
        new = module.forward(**(given | {"position_ids": torch.cat([at, last], -1)}))
        parts = new if isinstance(new, tuple) else (new,)
        rows = tuple(part.narrow(-2, 0, count) for part in parts)
        if found is not None and own is not None:
            earlier = found if isinstance(found, tuple) else (found,)
            rows = tuple(torch.where(own[:, None], x, y) for x, y in zip(rows, earlier, strict=True))
        found = rows if isinstance(new, tuple) else rows[0]
    return found


def _as_new(module: Any, prefix: str, device: torch.device) -> None:
    """Takes back what calls of longer sequences left in an embedding of dynamic NTK."""
    module.register_buffer(f"{prefix}inv_freq", getattr(module, f"{prefix}original_inv_freq").to(device), False)
    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


# ---------------------------------------------------------------- lengths
def _alike(packed: PackedRows, how: Scaling, name: str, device: torch.device) -> tuple[list[int], torch.Tensor | None]:
    """The lengths that stand for those of the call's sequences, see :meth:`Scaling.alike`, and for each of its rows
    [T] the one of its own sequence; None if there is only one.

    Raises:
        ValueError: rows are shared by sequences of different factors.
    """
    segments, rows = packed.whole._segments, packed.rows
    if isinstance(packed, Placed) and packed.of_all.dim() == 3:
        # Positions of images count fewer than the rows. Reading them waits for the device, as placing images does.
        ends = _ends(segments, packed.of_all)
        of_all = _of_segments(segments, how, name, ends)[segments.segment_of_row]
        return _on_device(of_all if rows is None else of_all[rows.cpu().numpy()], device)
    values, of_rows = segments.cached(
        ("rotary", how, device), lambda: _on_device(_alike_of(segments, how, name), device)
    )
    if of_rows is not None and rows is not None:
        of_rows = of_rows[rows.to(device)]
    return values, of_rows


def _on_device(found: IntArray, device: torch.device) -> tuple[list[int], torch.Tensor | None]:
    values = np.unique(found).tolist()
    return values, torch.from_numpy(found).to(device) if len(values) > 1 else None


def _alike_of(segments: Segments, how: Scaling, name: str) -> IntArray:
    """[T] of all rows, whose positions are those of text; made once a layout."""

    def make() -> IntArray:
        ends = segments.first_position + segments.lengths
        return _of_segments(segments, how, name, ends)[segments.segment_of_row]

    return segments.cached(("rotary", how), make)


def _ends(segments: Segments, position_ids: torch.Tensor) -> IntArray:
    """[S] for each segment, 1 more than the highest of the positions [3, 1, T] on the path down to its end."""
    highest = position_ids.amax((0, 1)).double().cpu().numpy()
    ends = np.zeros(len(segments.parent))
    np.maximum.at(ends, segments.segment_of_row, highest + 1)
    for level in segments.levels[1:]:
        ends[level] = np.maximum(ends[level], ends[segments.parent[level]])
    return np.ceil(ends).astype(np.int64)


def _of_segments(segments: Segments, how: Scaling, name: str, ends: IntArray) -> IntArray:
    """[S] the length that stands for those of all sequences through a segment.

    ends: [S] tokens of the sequence that ends with each segment.
    """
    longest = np.where(segments.ends_sequence, ends, 0)
    shortest = np.where(segments.ends_sequence, ends, np.iinfo(np.int64).max)
    for level in reversed(segments.levels[1:]):
        np.maximum.at(longest, segments.parent[level], longest[level])
        np.minimum.at(shortest, segments.parent[level], shortest[level])
    found = how.alike(longest)
    differ = (found != how.alike(shortest)) & (segments.lengths > 0)
    if differ.any():
        s = int(np.argmax(differ))
        raise ValueError(
            f"{name}, and rows {segments.offsets[s]} to {segments.offsets[s + 1] - 1} of the layout are shared by"
            f" sequences of {shortest[s]} to {longest[s]} tokens: expected sequences of equal factors to share rows, so"
            " pack the others apart from them"
        )
    return found


@torch.library.custom_op("dualkv::rotary_lengths", mutates_args=(), tags=OP_TAGS)
def _alike_in_graph(
    position_ids: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor, bounds: list[int], name: str
) -> torch.Tensor:
    """[T] int64 on the device of position_ids, see :func:`_alike_of`: an op, so that a compiled model checks every
    batch."""
    found = _alike_of(segments_of(offsets, parent), Scaling("longrope", tuple(bounds)), name)
    return torch.from_numpy(found).to(position_ids.device, copy=True)


@_alike_in_graph.register_fake
def _(
    position_ids: torch.Tensor, offsets: torch.Tensor, parent: torch.Tensor, bounds: list[int], name: str
) -> torch.Tensor:
    return position_ids.new_empty(position_ids.shape[-1:], dtype=torch.int64)
