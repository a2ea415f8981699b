"""What a veRL batch holds, read on the host: lengths, groups, and what keeps it from being packed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from verl.utils import tensordict_utils as tu

import dualkv
from dualkv.layout import IntArray, positions

logger = logging.getLogger(__name__)
_said: list[str] = []  # agents may make prompts differ in every batch, which is worth saying once


def _host(x: torch.Tensor) -> IntArray:
    return x.detach().cpu().numpy().astype(np.int64)


def _nested_lens(x: Any) -> IntArray:
    offsets = _host(x.offsets())
    return offsets[1:] - offsets[:-1]


@dataclass(frozen=True)
class Rollouts:
    """The N rollouts of one veRL batch.

    Attributes:
        prompt_lens: [N] tokens of each prompt.
        response_lens: [N] tokens of each response.
        group: [N] the group of each rollout; groups are counted in the order in which they first appear.
    """

    prompt_lens: IntArray
    response_lens: IntArray
    group: IntArray

    def __len__(self) -> int:
        return len(self.group)

    def members(self) -> list[IntArray]:
        """The rollouts of each group."""
        order = np.argsort(self.group, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.group))[:-1])


def not_packable(data: Any) -> str | None:
    """Why veRL's own computation has to run this batch (a TensorDict), or None."""
    if any(key not in data for key in ("prompts", "responses", "loss_mask")) or not data["input_ids"].is_nested:
        return "it does not consist of prompts and responses without padding in between"
    if tu.get_non_tensor_data(data, "distillation_use_topk", False) or tu.get_non_tensor_data(
        data, "distillation_only", False
    ):
        return "top-k distillation reads the teacher's values at every row"
    if data["position_ids"].dim() == 3 or any(_modalities(entry) for entry in data.get("multi_modal_inputs", [])):
        return "it holds images, audio or video"
    sequences, prompts, responses = _nested_lens(data["input_ids"]), _prompt_lens(data), _response_lens(data)
    if not np.array_equal(prompts + responses, sequences):
        return "its sequences are not a prompt followed by a response"
    if (prompts == 0).any():
        return f"the prompt of rollout {int(np.argmin(prompts))} is empty"
    mask = data["loss_mask"]
    columns = _nested_lens(mask) if mask.is_nested else np.full(len(data), mask.shape[1])
    expected = responses if mask.is_nested else np.full(len(data), data["responses"].shape[-1])
    if not np.array_equal(columns, expected):
        return "prompt tokens are in the loss"
    if not np.array_equal(_host(data["position_ids"].values()), positions(sequences)):
        return "its positions do not count from 0 in every sequence"
    return None


def _modalities(entry: Any) -> bool:
    """Whether a rollout's entry of `multi_modal_inputs` holds anything."""
    entry = getattr(entry, "data", entry)
    return bool(entry) and any(value is not None for value in entry.values())


def _prompt_lens(data: Any) -> IntArray:
    prompts = data["prompts"]
    if prompts.is_nested:
        return _nested_lens(prompts)
    return _host(data["attention_mask"][:, : prompts.shape[1]].sum(1))


def _response_lens(data: Any) -> IntArray:
    responses = data["responses"]
    if responses.is_nested:
        return _nested_lens(responses)
    return _host(data["attention_mask"][:, data["prompts"].shape[1] :].sum(1))


def read(data: Any) -> Rollouts:
    """The rollouts of a batch that :func:`not_packable` has nothing against.

    Groups are equal prompts, whatever the `uid`s say, because only equal prompts can be shared. Prompts that differ
    under one `uid` are named in a warning, once: sampling means them to be equal, unless an agent makes them so.
    """
    prompt_lens, response_lens = _prompt_lens(data), _response_lens(data)
    sequences = data["input_ids"]
    tokens, starts = _host(sequences.values()), _host(sequences.offsets())[:-1]
    found: dict[bytes, int] = {}
    prompts = (tokens[start : start + length] for start, length in zip(starts, prompt_lens, strict=True))
    group = np.array([found.setdefault(p.tobytes(), len(found)) for p in prompts], np.int64)
    rollouts = Rollouts(prompt_lens, response_lens, group)
    uids = tu.get(data, "uid")
    if isinstance(uids, list) and (text := _differing_prompts(rollouts, uids, tokens, starts)) and not _said:
        _said.append(text)
        logger.warning(text)
    return rollouts


def _differing_prompts(rollouts: Rollouts, uids: list[Any], tokens: IntArray, starts: IntArray) -> str | None:
    """The first two rollouts of one `uid` and two prompts, in words."""
    first: dict[Any, int] = {}
    for i, uid in enumerate(uids):
        j = first.setdefault(uid, i)
        if rollouts.group[i] == rollouts.group[j]:
            continue
        a, b = (tokens[starts[r] : starts[r] + rollouts.prompt_lens[r]] for r in (j, i))
        both = min(len(a), len(b))
        differs = np.flatnonzero(a[:both] != b[:both])
        where = f"at token {differs[0]}" if len(differs) else f"in length ({len(a)} and {len(b)} tokens)"
        return (
            f"dualkv: rollouts {j} and {i} have the uid {uid}, but their prompts differ {where};"
            " each is packed with equal prompts only"
        )
    return None


@dataclass(frozen=True)
class PackedRollouts:
    """One micro-batch: its rollouts packed, and where their values belong in veRL's sequences.

    Attributes:
        batch: in the "roll" style, on the host: each row predicts the next row.
        sequence_rows: [M] int64, on the host: for each response token in packed order, the row of the replicated
            sequences, laid end to end in the order of the micro-batch, that predicts it.
    """

    batch: dualkv.PackedBatch
    sequence_rows: torch.Tensor


def pack(data: Any, rollouts: Rollouts) -> PackedRollouts:
    """Pack a micro-batch.

    Args:
        data: N rollouts, a TensorDict.
        rollouts: what :func:`read` said about these N.
    """
    p, r = rollouts.prompt_lens, rollouts.response_lens
    sequences = [s.cpu() for s in data["input_ids"].unbind()]
    batch = dualkv.pack(
        [s[:n] for s, n in zip(sequences, p.tolist(), strict=True)],
        [s[n:] for s, n in zip(sequences, p.tolist(), strict=True)],
        labels="roll",
        group_ids=rollouts.group,
    )
    first = np.cumsum(p + r) - r - 1  # the last row of each prompt
    order = batch.order
    rows = np.repeat(first[order], r[order]) + positions(r[order])
    return PackedRollouts(batch, torch.from_numpy(rows))
