"""Which rollouts run together: whole groups or neighbours in a tree, equally many micro-batches on every data-parallel
rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dualkv.data.microbatch import plan_micro_batches
from dualkv.integrations.verl.data import Rollouts


def plan(rollouts: Rollouts, *, max_tokens: int | None, max_rollouts: int, min_count: int = 1) -> list[list[int]]:
    """The rollouts of each micro-batch, each rollout once; the same plan every time.

    Args:
        rollouts: of this rank.
        max_tokens: packed tokens that a micro-batch may hold; None for a number of rollouts.
        max_rollouts: rollouts that a micro-batch may hold, read where `max_tokens` is None.
        min_count: micro-batches to make at least.

    Raises:
        ValueError: a rollout longer than `max_tokens`, fewer rollouts than micro-batches.
    """
    if rollouts.trees:
        shared = rollouts.packed_once
        if max_tokens is None:
            runs = shared.runs(shared.tokens, min_count, most=max_rollouts)
        else:
            runs = shared.runs(max_tokens, min_count)
        return [run.tolist() for run in runs]
    members = rollouts.members()
    if max_tokens is None:
        # A rollout counts 1 and its prompt nothing: the packed tokens of an empty response to a prompt of one token.
        prompts: Sequence[int] = [1] * len(members)
        responses = [[0] * len(m) for m in members]
    else:
        prompts = [int(rollouts.prompt_lens[m[0]]) for m in members]
        responses = [rollouts.response_lens[m].tolist() for m in members]
    budget = max_rollouts if max_tokens is None else max_tokens
    found = plan_micro_batches(prompts, responses, budget, min_count=min_count, labels="roll")
    return [[int(members[g][i]) for g, at in m.parts for i in at] for m in found]


def plan_on_all_ranks(
    rollouts: Rollouts | None,
    *,
    max_tokens: int | None,
    max_rollouts: int,
    group: dist.ProcessGroup,
    device: torch.device | str | int,
) -> list[list[int]] | None:
    """:func:`plan` with the largest count of all ranks in `group`; None where one of them cannot pack its rollouts.

    Every rank of the group calls it, and all of them return a plan, None, or raise: a rank that went its own way would
    leave the others waiting in a collective.

    Args:
        rollouts: of this rank; None if it cannot pack them.
        max_tokens: as for :func:`plan`.
        max_rollouts: as for :func:`plan`.
        group: the data-parallel ranks.
        device: where the group's collectives take their tensors.

    Raises:
        ValueError: what :func:`plan` raises, here or on another rank.
    """
    parts: list[list[int]] = []
    error = ""
    if rollouts is not None:
        try:
            parts = plan(rollouts, max_tokens=max_tokens, max_rollouts=max_rollouts)
        except ValueError as e:
            error = str(e)
    fewest = -len(rollouts) if rollouts is not None else 0
    flags = torch.tensor([rollouts is None, bool(error), len(parts), fewest], dtype=torch.int64, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    unpackable, failed, count, fewest = flags.tolist()
    if unpackable or rollouts is None:
        return None
    if failed:
        raise ValueError(error or "another data-parallel rank found no micro-batches for its rollouts, see its error")
    if count > -fewest:
        raise ValueError(f"a data-parallel rank needs {count} micro-batches, another one has only {-fewest} rollouts")
    if count > len(parts):
        parts = plan(rollouts, max_tokens=max_tokens, max_rollouts=max_rollouts, min_count=count)
    return parts
