"""Mixtures of experts of transformers on packed rows: losses counted per rollout, and recorded routes replayed.

Packed rows hold a shared token once. A load balancing loss over them therefore counts it once, over separate sequences
once a rollout: :func:`load_balancing_loss` has both. Routes that an inference engine recorded for each rollout become
routes of packed rows by :func:`routes_of_rows`, and :func:`replay_routes` makes a model's routers choose them:

    routes = routes_of_rows(batch, recorded).routes
    with replay_routes(model, routes):
        loss = ...  # of model(input_ids=batch.input_ids, dualkv=batch.layout)
        loss.backward()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from dualkv.arrays import IntArray, check_integers, check_model
from dualkv.data.counts import Batch, last_segments, layout_of, rollouts_of_segments
from dualkv.data.rows import first_of_rows
from dualkv.integrations.patching import Changes
from dualkv.layout import Layout

Count = Literal["rollouts", "rows"]
# Fields of configurations: the number of experts, and how many of them a row goes to.
EXPERTS = "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
CHOSEN = "num_experts_per_tok", "moe_top_k", "moe_topk", "top_k_experts"


# ---------------------------------------------------------------- the load balancing loss
def rollouts_of_rows(batch: Batch | Layout) -> IntArray:
    """[T] the number of rollouts that each packed row stands for.

    Args:
        batch: or the layout of prompts with responses, where a response is a rollout. In a layout without responses
            each segment is one.

    Raises:
        ValueError: a layout of more than two levels, which does not say where rollouts end.
    """
    layout = layout_of(batch)
    return np.repeat(rollouts_of_segments(layout, last_segments(batch)), layout._segments.lengths)


def load_balancing_loss(
    model: nn.Module, router_logits: Sequence[torch.Tensor], batch: Batch | Layout, *, count: Count = "rollouts"
) -> torch.Tensor:
    """transformers' load balancing loss of a packed call.

    Args:
        model: a transformers model, whose configuration has the numbers of experts.
        router_logits: [T, experts] of each layer: `outputs.router_logits` of a call with `output_router_logits=True`.
        batch: what the model ran.
        count: "rollouts": each row as often as there are rollouts with it, so that the loss is that of separate
            sequences; "rows": each row once, which is what a model's own `aux_loss` of packed rows is.

    Returns:
        A scalar, differentiable. It is not multiplied by the model's coefficient.

    Raises:
        ValueError: another `count`, a model without experts, layers that choose different numbers of experts, logits
            of no layer, or of another number of rows or experts.
        TypeError: `model` is no model.
    """
    if count not in get_args(Count):
        raise ValueError(f"count is {count!r}, expected one of {', '.join(get_args(Count))}")
    check_model(model)
    experts, chosen = (_number(model, names) for names in (EXPERTS, CHOSEN))
    total = layout_of(batch).num_tokens
    if router_logits is None or not len(router_logits):
        raise ValueError(f"router_logits is {router_logits}, expected those of a call with output_router_logits=True")
    if wrong := [len(logits) for logits in router_logits if len(logits) != total]:
        raise ValueError(f"router_logits has {wrong[0]} rows, the batch has {total}")
    if wrong := [logits.shape[-1] for logits in router_logits if logits.shape[-1] != experts]:
        raise ValueError(f"router_logits has {wrong[0]} columns, {type(model).__name__} has {experts} experts")
    times = np.ones(total, np.int64) if count == "rows" else rollouts_of_rows(batch)
    mask = torch.from_numpy(times).to(router_logits[0].device)[None]
    of_layers: Any = tuple(router_logits)
    return cast(torch.Tensor, load_balancing_loss_func(of_layers, experts, chosen, mask))


def _number(model: nn.Module, names: tuple[str, ...]) -> int:
    """The first of these fields that a model's configuration has, or a part of it (DBRX's `ffn_config`).

    Raises:
        ValueError: none, or numbers that differ from layer to layer.
    """
    config = getattr(model, "config", None)
    of_text = [config.get_text_config()] if isinstance(config, PreTrainedConfig) else []
    parts = [part for of in of_text for part in vars(of).values() if isinstance(part, PreTrainedConfig)]
    for part in (*of_text, *parts):
        for name in names:
            found = getattr(part, name, None)
            of_layers = set(found) if isinstance(found, list | tuple) else {found}
            if len(of_layers) > 1:
                raise ValueError(f"{name} of {type(model).__name__} is {found}, expected one number for all layers")
            if isinstance(number := next(iter(of_layers), None), int):
                return number
    raise ValueError(f"{type(model).__name__} has none of {', '.join(names)} in its configuration: no experts")


# ---------------------------------------------------------------- routes
class Routes(NamedTuple):
    """Recorded routes of packed rows.

    Attributes:
        routes: [L, T, k] int64 on the host: experts of each row in each layer; -1 where nothing was recorded.
        differing: the part, 0 to 1, of recorded tokens behind the first record of their row that went to other experts
            in some layer. A packed row has one route, the first rollout's.
    """

    routes: torch.Tensor
    differing: float


def routes_of_rows(batch: Batch, recorded: Sequence[torch.Tensor]) -> Routes:
    """Routes of packed rows from those that were recorded for each rollout.

    Args:
        batch: N rollouts.
        recorded: N tensors [n_i, L, k] of integers: experts of the first n_i tokens of prompt and response, as
            inference engines return them. A rollout may have fewer records than tokens.

    Raises:
        ValueError: not one tensor for each rollout, more records than tokens, other numbers of layers or experts.
        TypeError: records that are no tensors of integers.
    """
    total = batch.layout.num_tokens
    rows = [of.numpy() for of in batch.unpack_sequences(torch.arange(total))]
    if len(recorded) != len(rows):
        raise ValueError(f"recorded has {len(recorded)} entries for {len(rows)} rollouts, expected as many")
    for i, of in enumerate(recorded):
        check_integers(f"recorded[{i}]", of)
    if bad := [i for i, of in enumerate(recorded) if of.dim() != 3 or of.shape[1:] != recorded[0].shape[1:]]:
        shape = tuple(recorded[bad[0]].shape)
        raise ValueError(f"recorded[{bad[0]}] has shape {shape}, expected [tokens, layers, experts] of equal layers")
    if bad := [i for i, (own, found) in enumerate(zip(rows, recorded, strict=True)) if len(found) > len(own)]:
        i = bad[0]
        raise ValueError(f"recorded[{i}] has {len(recorded[i])} tokens, its rollout has {len(rows[i])}")
    of_records = np.concatenate([own[: len(found)] for own, found in zip(rows, recorded, strict=True)])
    routes, differs = first_of_rows(of_records, torch.cat([found.cpu() for found in recorded]), total)
    again = len(of_records) - len(np.unique(of_records))
    return Routes(routes.transpose(0, 1).contiguous(), int(differs.sum()) / again if again else 0.0)


def routers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module) of the modules of transformers that choose the experts of each row, in the order of layers."""
    check_model(model)

    def is_router(cls: type) -> bool:
        names = (c.__name__ for c in cls.__mro__ if c.__module__.startswith("transformers.models."))
        return any(name.lower().endswith("topkrouter") for name in names)

    return [(name, module) for name, module in model.named_modules() if is_router(type(module))]


@contextmanager
def replay_routes(model: nn.Module, routes: torch.Tensor) -> Iterator[None]:
    """Lets a model's routers choose the given experts; the experts' weights are the ones that the routers compute.

    It has to cover the backward too, where gradient checkpointing runs layers again.

    Args:
        model: a transformers model; every router of it calls `torch.topk` once for the experts.
        routes: [L, T, k] integers, of every router in the order of layers; k times -1 leave a row's choice to the
            router.

    Raises:
        ValueError: other numbers of routers, a row with -1 and experts, a router that runs other rows or does not
            choose by `torch.topk`; by the call of this function and by the call of the model.
        TypeError: routes are no tensor of integers.
    """
    found = routers(model)
    check_integers("routes", routes)
    if routes.dim() != 3 or len(routes) != len(found):
        raise ValueError(f"routes has shape {tuple(routes.shape)}, expected [{len(found)}, T, k]: one for each router")
    left = (routes < 0).sum(-1)
    if (partly := (left > 0) & (left < routes.shape[-1])).any():
        layer, row = partly.nonzero()[0].tolist()
        raise ValueError(f"routes[{layer}, {row}] is {routes[layer, row].tolist()}, expected experts, or -1 alone")
    with ExitStack() as undone:
        for (name, module), own in zip(found, routes, strict=True):
            if "forward" in vars(module):
                raise ValueError(f"{name} has a forward of its own: its routes cannot be replayed")
            undone.enter_context(Changes(module)).replace("forward", _replayed(name, module.forward, own))
        yield


def _replayed(name: str, own: Callable[..., Any], routes: torch.Tensor) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Chosen(routes) as chosen:
            found = own(*args, **kwargs)
        if chosen.times != 1:
            rows, k = routes.shape
            raise ValueError(
                f"{name} chose {k} experts for {rows} rows {chosen.times} times by torch.topk, expected once"
            )
        return found

    return forward


class _Chosen(TorchFunctionMode):
    """A mode in which `torch.topk(scores [T, experts], k)` returns the given experts and their scores."""

    def __init__(self, routes: torch.Tensor) -> None:
        super().__init__()
        self.routes, self.times = routes, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or found.indices.shape != self.routes.shape:
            return found
        self.times += 1
        routes = self.routes.to(found.indices.device)
        experts = torch.where(routes < 0, found.indices, routes)
        scores = args[0] if args else (kwargs or {})["input"]
        return torch.return_types.topk((scores.gather(-1, experts), experts))
