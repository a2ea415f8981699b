"""Routes to experts at packed rows, for veRL's router replay.

veRL hands out the experts of every row of a rollout, in `routed_experts`: recorded by the engine itself with the old
log-probs (mode R2), or by the inference engine (R3). A row that several rollouts share is computed once and has one
route, so routes that differ there are unified: the first rollout of the micro-batch that has a route gives it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
import torch
from verl.utils.megatron.router_replay_utils import build_r3_replay_mask

from dualkv.arrays import IntArray
from dualkv.data.rows import first_of_rows

ROUTES = "routed_experts"


class PackedRoutes(NamedTuple):
    """Routes of T packed rows.

    Attributes:
        experts: [T, layers, k] int64; 0 where no route is known.
        known: [T] bool: rows that have a route. The model routes the others itself.
        shared: rows that have routes of more than one rollout.
        differing: shared rows whose rollouts do not all go to the same experts.
    """

    experts: torch.Tensor
    known: torch.Tensor
    shared: int
    differing: int


def objection(data: Any, mode: str, shapes: Collection[tuple[int, int]]) -> str:
    """Say why the routes of a batch cannot be replayed; empty if they can.

    Args:
        data: the batch, a TensorDict.
        mode: "R2", or "R3", whose routes may end one row before the sequence.
        shapes: (layers, experts of a token) that the model takes.
    """
    routes = data.get(ROUTES, None)
    if routes is None:
        return f"router_replay.mode is {mode!r} and the batch has no {ROUTES}, expected those of every rollout"
    if not routes.is_nested:
        return f"{ROUTES} has shape {tuple(routes.shape)}, expected a nested tensor with the rows of every rollout"
    if (found := tuple(routes.values().shape[1:])) not in shapes:
        return f"{ROUTES} has (layers, experts) {found}, expected {' or '.join(map(str, shapes))} as the model"
    lens, rows = (x.offsets().diff().cpu() for x in (data["input_ids"], routes))
    missing = lens - rows
    wrong = (missing < 0) | (missing > (1 if mode == "R3" else 0))
    if wrong.any():
        i = int(wrong.nonzero()[0])
        return f"{ROUTES} of rollout {i} has {int(rows[i])} rows, expected {int(lens[i])}, its tokens"
    return ""


def packed(data: Any, mode: str, packed_rows: IntArray, total: int) -> PackedRoutes:
    """The routes of `total` packed rows of a micro-batch for which :func:`objection` returned nothing; `packed_rows`
    has the packed row of each row of the replicated sequences.

    In mode R3 veRL replays no route of the last row of a rollout, of which nothing is predicted, and none of rollouts
    without a response.
    """
    starts = data["input_ids"].offsets().cpu().numpy()
    nested = data[ROUTES]
    routes, begins = nested.values().cpu(), nested.offsets().cpu().numpy()
    recorded = np.arange(starts[-1]) + np.repeat((begins - starts)[:-1], np.diff(starts))  # rows of `routes`
    if mode == "R3":
        replayed = build_r3_replay_mask(data["input_ids"], data["response_mask"]).values().cpu().numpy()
        recorded, packed_rows = recorded[replayed], packed_rows[replayed]
    experts, differs = first_of_rows(packed_rows, routes[torch.from_numpy(recorded)], total)
    times = np.bincount(packed_rows, minlength=total)
    known = torch.from_numpy(times > 0)
    experts[~known] = 0
    return PackedRoutes(experts, known, int((times > 1).sum()), len(np.unique(packed_rows[differs])))
