"""Walks under FSDP2 on two ranks with unequal trees: no rank waits for another, and gradients are those of one
process."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dualkv
from dualkv.data.parts import plan_parts
from dualkv.integrations.transformers import enable, recompute_layers
from dualkv.walks import _empty, _kinds, _together
from tests.integrations.tiny import make_model
from tests.integrations.transformers.test_walks import group
from tests.ranks import on_ranks

# The groups of each rank: of several trunks and of none, fewer parts, and no part.
LARGE, SMALL = group(48, [7] * 6), group(9, [5, 3])
CASES = {"fewer": (LARGE, SMALL), "none": (SMALL, None), "equal": (LARGE, LARGE)}
ROWS = 24


def of(rollouts: Any) -> dualkv.PackedSequences | None:
    return None if rollouts is None else dualkv.pack_sequences(*rollouts)


class Policy(nn.Module):
    """A model with its head and loss in one forward."""

    def __init__(self, lm: Any, recomputed: bool = False) -> None:
        super().__init__()
        self.lm = enable(lm, check=False).train()
        if recomputed:
            recompute_layers(self.lm)

    def forward(self, rows: Any, layout: Any, one: Any = None, **media: Any) -> torch.Tensor | None:
        hidden = self.lm.model(input_ids=rows.input_ids, dualkv=layout, **media).last_hidden_state
        if one is not None and not one.has_loss:
            return one.zero_loss(hidden, self.lm.lm_head.weight) if one.has_graph else None
        logp, _ = dualkv.response_logprobs(hidden, self.lm.lm_head.weight, rows)
        return ((torch.cat(rows.unpack(logp)) if one is None else rows.expand(logp)).exp() * 3).sum()


def backwards(policy: Any, passes: Any) -> str:
    """Run passes with their backwards; FSDP and DDP take the mean over two ranks. Returns the kinds of the passes."""
    kinds = ""
    for one in passes:
        with one:
            loss = policy(one.part, one.branch, one)
        one.backward(None if loss is None else 2 * loss)
        kinds += one.kind
    return kinds


def on_a_rank(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    said = "budget is 0, expected 1 or more" if rank else "1 of the 2 ranks of group refused their batch or budget"
    with pytest.raises(ValueError, match=said):
        next(dualkv.walk_passes(of(SMALL), 0 if rank else ROWS, group=dist.group.WORLD))
    for name, given in CASES.items():
        for tied, recomputed in [(False, True), (True, False)]:
            plain = Policy(make_model(tie_word_embeddings=tied))
            for rollouts in given:
                if (batch := of(rollouts)) is not None:
                    plain(batch, batch.layout).backward()
            policy = Policy(make_model(tie_word_embeddings=tied), recomputed)
            for part in (*policy.lm.model.layers, policy):
                fully_shard(part, mesh=mesh)
            kinds = backwards(policy, dualkv.walk_passes(of(given[rank]), ROWS, group=dist.group.WORLD))
            for (parameter, p), (_, wanted) in zip(policy.named_parameters(), plain.named_parameters(), strict=True):
                got = p.grad.full_tensor()
                error = float((got - wanted.grad).abs().max() / wanted.grad.abs().max())
                assert error < 1e-5, (name, tied, recomputed, parameter, error)
            print(f"rank {rank}: {name}, {kinds}", flush=True)
        check_ddp(given, rank)
    dist.destroy_process_group()


def check_ddp(given: Any, rank: int) -> None:
    """DDP reduces nothing in the ranks' own walks, and all gradients in the backward of one more row without a loss."""
    plain, policy = Policy(make_model()), nn.parallel.DistributedDataParallel(Policy(make_model(), True))
    for rollouts in given:
        if (batch := of(rollouts)) is not None:
            plain(batch, batch.layout).backward()
    with policy.no_sync():
        backwards(policy, dualkv.walk_passes(mine, ROWS) if (mine := of(given[rank])) is not None else ())
    one = _empty("G", "cpu")
    with one:
        loss = policy(one.part, one.branch, one)
    one.backward(loss)
    for parameter, wanted in zip(policy.parameters(), plain.parameters(), strict=True):
        assert float((parameter.grad - wanted.grad).abs().max() / wanted.grad.abs().max()) < 1e-5


def test_two_ranks_with_unequal_trees() -> None:
    said = on_ranks(2, "tests.integrations.transformers.test_walk_ranks:on_a_rank")
    for name in CASES:
        kinds = re.findall(f": {name}, ([FG]*)", said)  # lines of two ranks may run into each other
        assert len(kinds) == 4
        assert len(set(kinds)) == 1, "ranks run passes of the same kinds"


def test_kinds_that_ranks_agree_on() -> None:
    kinds = [_kinds(plan_parts(dualkv.pack_sequences(*rollouts), ROWS), True) for rollouts in (LARGE, SMALL)]
    assert kinds[0].count("F") >= 2
    assert kinds[1] == "G"
    assert "".join(_together([*kinds, ""])) == kinds[0]
    assert "".join(_together(["FGG", "FFG", "G"])) == "FFGG"
    with pytest.raises(ValueError, match="batch is None, expected a batch, or a group"):
        next(dualkv.walk_passes(None, ROWS))
