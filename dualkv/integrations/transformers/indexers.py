"""Attention layers with an indexer, which selects the keys that a query attends to: `index_topk` keys (DeepSeek V3.2),
or blocks of keys (MiniMax M3, Qwen4-exp).

A query that sees no more keys than that attends to all of them, whatever the indexer's scores are. So a packed call
whose paths are no longer selects nothing. On longer paths the model's own code scores a chunk of rows at a time: it
gets the rows, and a cache that returns the index keys of their path. Its one call of `topk` has the scores; of equal
ones the earlier key is taken. What the layer hands to its attention function are the sets of
:mod:`dualkv.integrations.transformers.selected`, in place of indices.

Sets are made once. A layer that is computed again for its backward, and the second pass of a walk, get those of the
forward: scores that are computed again may differ in rounding, and a backward of other sets would be silently wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from dualkv.branches import Again, Branch, checkpointed
from dualkv.integrations import patching
from dualkv.integrations.transformers import masks, selected
from dualkv.layout import Layout
from dualkv.ops.attention import checked
from dualkv.ops.features import Features
from dualkv.packed_rows import packed_rows
from dualkv.sequence_parallel import Shard, check_heads

LAYER_TYPES = "indexed_attention", "minimax_m3_sparse"  # entries of `config.layer_types`
ARGUMENTS = "indices", "block_indices"  # of attention functions: what indexers return
BUDGET, SETS = "token_budget", f"{patching.OURS}sets"  # of indexers that return masks: their limit, and our sets
POOLS, MAKE_MASK = "index_kpool", "build_attention_mask_from_topk"  # of indexers whose layers make masks of indices


def of_layer(module: nn.Module) -> Any:
    """The indexer of an attention layer, if the layer has one of a kind that is described above."""
    indexer = getattr(module, "indexer", None)
    if not isinstance(indexer, nn.Module) or not getattr(indexer, f"{POOLS}_always_select_tail", True):
        return None  # without the last keys of a path a row may see none, for which masks see all, also later ones
    keys, *others = (
        isinstance(getattr(indexer, name, None), int) for name in ("index_topk", "topk_blocks", BUDGET, POOLS)
    )
    takes = inspect.signature(type(indexer).forward).parameters
    return indexer if any(others) or (keys and "attention_mask" in takes and "position_ids" in takes) else None


def longest_path(config: Any) -> int | None:
    """The tokens of a path up to which models of a configuration attend to all keys; None: there is no such limit."""
    limit = getattr(config, "index_topk", getattr(config, "indexer_budget", None))
    if LAYER_TYPES[1] in (getattr(config, "layer_types", None) or ()):
        limit = config.index_topk_blocks * config.index_block_size
    return limit if isinstance(limit, int) else None


def selects(config: Any, dualkv: Any) -> bool:
    """Whether rows of a call see more keys than indexers of this configuration select; dualkv: the packed rows."""
    return _is_longer(longest_path(config), dualkv)


def _is_longer(limit: int | None, dualkv: Any) -> bool:
    return limit is not None and packed_rows(dualkv).whole._segments.longest_path > limit


def refuse(name: str, config: Any, dualkv: Any) -> None:
    """Raises ValueError for a kind of packed rows, as layers get them, that cannot select keys in a model."""
    if selects(config, dualkv) and type(dualkv) not in (Layout, Shard, Branch):
        raise ValueError(
            f"the longest path of the layout is longer than {longest_path(config)} tokens, from where the indexers of"
            f" {name} select keys, and comes in a {type(dualkv).__name__}: expected a Layout, a Shard or a walk"
        )


# ---------------------------------------------------------------- the seams
def install(module: nn.Module) -> None:
    """Let the indexer of an attention layer, if it has one, select keys in packed calls."""
    if (indexer := of_layer(module)) is not None:
        patching.of(module).before(_hand_on)
        patching.of(indexer).replace(patching.LAYOUT, None)
        patching.of(indexer).replace("forward", partial(_forward, indexer))
        patching.of(indexer).replace(SETS, None)
    if hasattr(type(module), MAKE_MASK):  # layers without an indexer get the indices of the one before
        patching.of(module).replace(MAKE_MASK, partial(_make_mask, module))
        patching.of(module).replace(SETS, None)


def _make_mask(layer: Any, topk_indices: torch.Tensor, query_states: torch.Tensor, kv_length: int) -> torch.Tensor:
    """The method of a layer that makes a mask of indices: its own one, or a packed call's mask beside their sets."""
    if (sets := getattr(topk_indices, SETS, None)) is None:
        own: torch.Tensor = getattr(type(layer), MAKE_MASK)(layer, topk_indices, query_states, kv_length)
        return own
    patching.hand(layer, sets, SETS)
    return masks.of_all_keys(query_states.device)


def _hand_on(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of an attention layer: its indexer finds the call's packed rows."""
    patching.hand(module.indexer, kwargs.get("dualkv"))


def _forward(indexer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward of an indexer: its own one, or the sets of a packed call, [1, S, t, W], empty where all are seen."""
    own, dualkv = type(indexer).forward, getattr(indexer, patching.LAYOUT)
    patching.hand(indexer, None)
    if dualkv is None:
        return own(indexer, *args, **kwargs)
    given = inspect.signature(own).bind(indexer, *args, **kwargs).arguments
    budget = getattr(indexer, BUDGET, None)
    limit = longest_path(indexer.config) if budget is None else budget
    sets = given["hidden_states"].new_empty(0, 0, 0, dtype=torch.int32)
    if _is_longer(limit, dualkv):
        sets = _once(indexer, dict(given), dualkv)
    if hasattr(indexer, POOLS):  # its layer makes a mask, and may hand indices to the next layer
        indices = sets.new_zeros(1)
        patching.hand(indices, sets[None], SETS)
        return indices
    if budget is None:
        return sets[None]
    patching.hand(indexer, sets[None], SETS)  # its layer hands a mask on alone
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=sets.device)


def with_sets(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an attention function in a packed call, with the sets of a layer that hands it a mask alone."""
    for holder in (module, getattr(module, "indexer", None)):
        if (sets := getattr(holder, SETS, None)) is not None:
            patching.hand(holder, None, SETS)
            return arguments | {ARGUMENTS[0]: sets}
    return arguments


def given_sets(arguments: dict[str, Any]) -> torch.Tensor | None:
    """The sets [S, t, W] among the arguments of an attention function in a packed call, [0, 0, 0] where rows see all
    keys; None of a layer without an indexer."""
    found = next((arguments[name] for name in ARGUMENTS if arguments.get(name) is not None), None)
    return found[0] if isinstance(found, torch.Tensor) and found.dtype == torch.int32 and found.dim() == 4 else None


_MADE: WeakKeyDictionary[Any, dict[int, torch.Tensor]] = WeakKeyDictionary()  # sets, by checkpointed region and indexer


@torch.compiler.disable
def _once(indexer: nn.Module, given: dict[str, Any], dualkv: Any) -> torch.Tensor:
    """The sets of a call of an indexer; those of the forward where the layer is computed again."""
    if isinstance(dualkv, Branch):
        call = indexer, dualkv.call_of(indexer)
        return dualkv.noted(call, _Selection(indexer, given, dualkv, call).sets)
    region = checkpointed()
    if isinstance(region, Again) and id(indexer) in (made := _MADE.get(region.region, {})):
        return made[id(indexer)]
    if torch._C._current_graph_task_id() >= 0:
        raise ValueError(
            f"{type(indexer).__name__} is computed again in a backward, and the keys that it selected before are not"
            " known: expected torch.utils.checkpoint(..., use_reentrant=False), once around a layer"
        )
    sets = _Selection(indexer, given, dualkv, None).sets()
    if region is not None:
        made = _MADE.setdefault(region, {})
        if id(indexer) in made:
            raise ValueError(
                f"{type(indexer).__name__} runs twice in a checkpointed region, expected once: it could not be known"
                " which keys belong to which call when the region is computed again"
            )
        made[id(indexer)] = sets
    return sets


# ---------------------------------------------------------------- attention
def attend(
    module: nn.Module, dualkv: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sets: torch.Tensor,
    softmax_scale: float | None, features: Features,
) -> torch.Tensor:  # fmt: skip
    """Attention of a call's rows to the keys of their sets.

    Args:
        dualkv: the call's packed rows, as layers get them.
        q, k, v: [t, H, D], [t, Hk, D], [t, Hk, Dv].
        sets: [S, t, W].
        softmax_scale, features: as for :func:`dualkv.attention`; of features sinks alone.

    Returns:
        out [t, H, Dv].

    Raises:
        ValueError: other features, or heads that the ranks cannot share.
    """
    if others := [name for name in features.names if name != "sinks"]:
        raise ValueError(f"{type(module).__name__} has an indexer and {', '.join(others)}, expected sinks alone")
    call = checked(q, k, v, softmax_scale, features)
    if isinstance(dualkv, Branch):
        dualkv.check_gradients()
        dualkv.note_width(call.q, call.k, call.v, 1)  # all heads run at once
        key = module, dualkv.call_of(module)
        if dualkv.part.is_trunk:
            dualkv.keep(key, call.k, call.v)
        if above := dualkv.of_path(key):
            k, v = (torch.cat(pair) for pair in zip(above, (call.k, call.v), strict=True))
            call = call._replace(k=k, v=v)
        return selected.attend(call, sets, dualkv.layout.offsets, dualkv.layout.parent)
    if not isinstance(dualkv, Shard) or dualkv.world_size == 1:
        layout = packed_rows(dualkv).whole
        return selected.attend(call, sets, layout.offsets, layout.parent)
    check_heads("q", call.q.shape[1], dualkv.world_size)
    q, k, v, of_rows = dualkv.to_heads([call.q, call.k, call.v, sets.transpose(0, 1)])
    if (sinks := features.sinks) is not None:
        call = call._replace(features=features._replace(sinks=dualkv.share(sinks)))
    out = selected.attend(
        call._replace(q=q, k=k, v=v), of_rows.transpose(0, 1), dualkv.layout.offsets, dualkv.layout.parent
    )
    return dualkv.to_rows(out)


def mask_without_layout(
    module: Any, mask: torch.Tensor | None, query: torch.Tensor, keys: int, arguments: dict[str, Any]
) -> torch.Tensor | None:
    """The mask of a call without a layout, without keys that the indexer did not select; its indices are taken out of
    the arguments. The layers do this themselves for implementations that are called eager or sdpa.

    Args:
        mask: [B, 1, S, keys], bool or added to scores.
        query: [B, H, S, D].
    """
    if (blocks := arguments.pop("block_indices", None)) is not None:
        positions = arguments["position_ids"]
        return module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, positions)
    if (indices := arguments.pop("indices", None)) is None or mask is None:
        return mask
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=mask.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(query.dtype).min)


# ---------------------------------------------------------------- selection
KEPT, ROTARY = ("keys", "rotary"), "position_embeddings"
HEADS = "n_heads", "num_heads", "index_n_heads"  # names of one number


class _HasKeys(Exception):
    """Ends an indexer's forward once its index keys are known."""


class _Selection:
    """A call of an indexer.

    Attributes:
        segments: of the rows whose keys the call's rows see; these are `begin` to `end` among them.
        of_pools: the indexer returns indices of pools of keys.
        of_budget: the indexer wants rotary factors of the keys' rows too, and returns a mask.
        noted: [rows of the segments, d] index keys, and these factors. Those of a chunk come behind those of its path.
        chunk: rows of the call that run now, and their path; None while keys of all are made.
    """

    def __init__(self, indexer: Any, given: dict[str, Any], dualkv: Any, call: Any) -> None:
        """given: its arguments by name. call: names it in a walk."""
        self.indexer, self.given, self.dualkv, self.call = indexer, given, dualkv, call
        self.segments, self.begin = dualkv._segments if isinstance(dualkv, Layout) else dualkv.layout._segments, 0
        if isinstance(dualkv, Branch):
            self.begin = self.segments.total - dualkv.num_tokens
        elif isinstance(dualkv, Shard):
            self.begin = dualkv.rank * dualkv.num_tokens
        self.end = self.begin + dualkv.num_tokens
        self.of_budget = hasattr(indexer, BUDGET)
        self.of_pools = hasattr(indexer, POOLS)
        self.noted: dict[str, torch.Tensor] = {}
        self.chunk: tuple[slice, list[tuple[int, int]]] | None = None

    @torch.no_grad()
    def sets(self) -> torch.Tensor:
        """[S, t, W] int32 of the call's rows."""
        with _disable_current_modes():  # those of layers that keep their products
            if isinstance(self.dualkv, Shard) and self.dualkv.world_size > 1:
                with suppress(_HasKeys):
                    self._run(None)
            heads = next(getattr(self.indexer, x) for x in HEADS if hasattr(self.indexer, x))
            size = max(1, selected.ELEMENTS // (heads * self.segments.longest_path))
            found = [self._of_chunk(*chunk) for chunk in selected.chunks(self.segments, self.begin, self.end, size)]
            if isinstance(self.dualkv, Branch) and self.dualkv.part.is_trunk and self.noted:
                self.dualkv.keep(self.call, *(self.noted[name][self.begin :] for name in KEPT if name in self.noted))
        return torch.cat(found, 1)

    def _run(self, visible: torch.Tensor | None) -> Any:
        """Run the model's own code for the rows of the chunk; visible: [c, n] of the keys of their path."""
        rows = slice(None) if self.chunk is None else self.chunk[0]
        layers = {self.indexer.layer_idx: SimpleNamespace(update_index=self._updated)}
        takes = inspect.signature(type(self.indexer).forward).parameters
        cache = "cache" if "cache" in takes else "past_key_values"  # transformers 5.24 renamed the argument
        named = {name: _cut(x, rows) for name, x in self.given.items() if x is not self.indexer}
        named[cache] = SimpleNamespace(update_indexer=self._updated, layers=layers)
        if "attention_mask" in named:
            named["attention_mask"] = None if visible is None else visible[None]
        if self.of_budget and visible is not None:
            named["attention_mask"] = visible[None, None]
            named[ROTARY] = self._rotary(*named[ROTARY])
        if self.of_pools:  # a mask of padding; the cache tells the length of the path
            named["attention_mask"] = _cut(self.given["attention_mask"], rows)
            if visible is not None:
                n = visible.shape[1]
                layers[self.indexer.layer_idx] = SimpleNamespace(
                    keys=visible.new_empty(1, n, 0), get_seq_length=lambda: n
                )
        return type(self.indexer).forward(self.indexer, **named)

    def _rotary(self, *of_rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rotary factors [1, n, r] of the rows' path from those of the chunk's rows [1, c, r]."""
        found = self._behind(torch.cat(of_rows, -1)[0], "rotary")
        return tuple(x[None] for x in found.split([x.shape[-1] for x in of_rows], -1))

    def _updated(self, new: torch.Tensor, *_layer: int) -> torch.Tensor:
        """Note index keys [.., rows, d]; return those of the rows' path. It stands for the method of a cache."""
        rows = new.flatten(0, -2)
        if self.chunk is None:
            self.noted["keys"] = self.dualkv.gather(rows)
            if self.of_budget:
                self.noted["rotary"] = self.dualkv.gather(torch.cat(self.given[ROTARY], -1)[0])
            raise _HasKeys
        seen = self._behind(rows, "keys")
        return seen.view(*new.shape[:-2], *seen.shape)

    def _behind(self, new: torch.Tensor, name: str) -> torch.Tensor:
        """[n, d] of the path of the chunk's rows, from those of the rows [c, d], which are noted."""
        assert self.chunk is not None
        if name not in self.noted:
            noted = self.noted[name] = new.new_empty(self.segments.total, new.shape[-1])
            if isinstance(self.dualkv, Branch) and self.begin:
                names = KEPT[: 1 + self.of_budget]
                noted[: self.begin] = self.dualkv.of_path(self.call)[names.index(name)]
        rows, path = self.chunk
        self.noted[name][self.begin + rows.start : self.begin + rows.stop] = new
        return selected.rows_of(self.noted[name], path)

    def _of_chunk(self, first: int, last: int, path: list[tuple[int, int]]) -> torch.Tensor:
        """[S, c, W] of the rows [first, last)."""
        self.chunk = slice(first - self.begin, last - self.begin), path
        n = sum(end - begin for begin, end in path)
        positions = torch.arange(n, device=self.given["hidden_states"].device)
        visible = positions <= positions[n - (last - first) :, None]
        if self.of_budget or self.of_pools:
            with first_of_equals():
                chosen = self._run(visible)[0]
            if self.of_pools:  # -1 stands for no key
                chosen = visible.new_zeros(len(visible), n + 1).scatter(-1, chosen.long() % (n + 1), True)[None, :, :n]
            chosen = chosen & visible
        else:
            with _Topk() as top:
                self._run(visible)
            chosen = top.chosen(visible, getattr(self.indexer, "block_size", 1))
        behind = -(-self.segments.longest_path // selected.BITS) * selected.BITS - n
        return selected.packed_bits(torch.nn.functional.pad(chosen, (0, behind)))


def _cut(x: Any, rows: slice) -> Any:
    """The rows of an argument [1, t, ...], or of each of a tuple; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(_cut(one, rows) for one in x)
    return x[:, rows] if isinstance(x, torch.Tensor) and x.dim() > 1 else x


class _Topk(TorchFunctionMode):
    """Notes what the forward of an indexer selects by its one call of `topk`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.topk:
            self.found.append(highest(args[0], result.values) & (args[0] > -torch.inf))
        return result

    def chosen(self, visible: torch.Tensor, block: int) -> torch.Tensor:
        """[S, c, n] of the keys that are `visible` [c, n]; block: keys that are chosen together."""
        (found,) = self.found
        of_keys = found.repeat_interleave(block, -1)[..., : visible.shape[-1]]
        return of_keys.view(-1, *visible.shape) & visible


def highest(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Mark those of scores [..., n] that have the highest values [..., k], which descend; of equal ones the first."""
    last = values[..., -1:]
    above, equal = scores > last, scores == last
    left = values.shape[-1] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))


@contextmanager
def first_of_equals() -> Iterator[None]:
    """A context in which `x.topk` takes the first of equal values, as packed calls do: PyTorch's own choice depends on
    how many values there are, and differs between the sequences of one prompt."""
    with _FirstOfEquals():
        yield


class _FirstOfEquals(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            values, indices = args[0].sort(dim=-1, descending=True, stable=True)
            return torch.return_types.topk((values[..., : args[1]], indices[..., : args[1]]))
        return func(*args, **(kwargs or {}))
