"""Micro-batches of whole groups, or of neighbours in a tree; the same number on every data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dualkv.data.microbatch import plan_micro_batches
from dualkv.integrations.verl.data import Rollouts


def plan(rollouts: Rollouts, *, max_tokens: int | None, max_rollouts: int, min_count: int = 1) -> list[list[int]]:
    """The rollouts of each micro-batch. Each rollout occurs once, and equal arguments give the same plan.

    Args:
        rollouts: the rollouts of this rank.
        max_tokens: the most packed tokens of a micro-batch; None to limit the number of rollouts instead.
        max_rollouts: the most rollouts of a micro-batch, used only if `max_tokens` is None.
        min_count: the fewest micro-batches.

    Raises:
        ValueError: a rollout is longer than `max_tokens`, or there are fewer rollouts than micro-batches.
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
        # Lengths that make the budget count rollouts: an empty response to a prompt of one token is 1 packed token, and
        # its prompt 0.
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
    error: str = "",
) -> list[list[int]] | None:
    """:func:`plan` with the largest count of all ranks in `group`; None if any rank cannot pack its rollouts.

    Every rank of the group calls this function. All of them return a plan, or all return None, or all raise.

    Args:
        rollouts: the rollouts of this rank; None if this rank cannot pack them.
        max_tokens, max_rollouts: as for :func:`plan`.
        group: the data-parallel ranks.
        device: the device of the group's collectives.
        error: why this rank refuses its rollouts; empty if it does not.

    Raises:
        ValueError: `error`, or :func:`plan` raised it, here or on another rank.
    """
    parts: list[list[int]] = []
    if rollouts is not None and not error:
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
