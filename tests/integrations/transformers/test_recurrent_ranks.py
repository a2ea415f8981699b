"""Recurrent layers, and attention with windows, chunks and sinks, over the rows of 2 and 4 ranks, against one rank."""

from __future__ import annotations

import importlib
import itertools
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dualkv import Layout, sequence_parallel
from dualkv.context_parallel import ContextShard
from dualkv.context_plan import shares
from dualkv.sequence_parallel import Shard
from tests.ranks import on_ranks

pytest.importorskip("transformers")

from dualkv.integrations.recurrent import kernels, ops, rules, sharded, waves
from dualkv.integrations.transformers import enable, recompute_layers
from tests.integrations.doubled import double_throughout
from tests.integrations.tiny import LAYOUT, gradients, make_featured, token_ids
from tests.integrations.transformers import test_recurrent
from tests.integrations.transformers.test_recurrent import FAMILIES, make, random_forest

KINDS = (Shard, ContextShard)
WAYS = {  # and whether layers run again in the backward
    "float32": ((ContextShard, False), (Shard, True)),
    "float64": ((Shard, False), (ContextShard, True)),
}
# olmo_hybrid: a gradient of decays, a sum of numbers of both signs, differs by up to 1.2e-5. In fp64 it does by 3e-14.
LARGEST = {"float64": 1e-11, "float32": 1e-5, "float32 olmo_hybrid": 3e-5}


def layout_of(segments: list[tuple[int, int]]) -> Layout:
    return Layout.from_segments(np.cumsum([0, *(n for n, _ in segments)]), [p for _, p in segments])


# (length, parent) of segments. Two groups with empty responses and such that are shorter than a convolution, amid whose
# responses a second rank begins; a group that is longer than a chunk of 64; trees with empty segments.
FOREST = layout_of(
    [(60, -1), (1, 0), (9, 0), (0, 0), (2, 0), (65, 0), (2, -1), (1, 6), (2, 6), (2, 6), (1, 9), (1, 10), (0, 9),
     (0, -1), (2, 13), (3, 13), (1, -1), (3, 16), (30, 16), (5, -1), (2, 19), (1, 20), (66, 20), (1, 22), (3, 22),
     (0, 19), (4, 25), (1, 25)]
)  # fmt: skip
TINY = layout_of([(2, -1), (0, 0), (1, 0)])  # fewer rows than four ranks
OFTEN = [family for family in test_recurrent.OFTEN if family in FAMILIES]  # one of each kind of layer
ATTENTION = ("gpt_oss", "llama4")  # windows and sinks; chunks and a temperature that counts the rows of a rank


def cases(families: str) -> list[tuple[str, Layout]]:
    """Families of "often" or "all", over FOREST, and some over TINY."""
    found = [(x, FOREST) for x in (OFTEN if families == "often" else FAMILIES)] + [(x, TINY) for x in OFTEN]
    return found + [(x, LAYOUT) for x in ATTENTION]


def model_of(family: str, dtype: torch.dtype) -> Any:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    made = make_featured(family, 5, dtype, **heads) if family in ATTENTION else make(family, dtype)
    return enable(made, check=False)


def results(model: Any, layout: Layout, given: Any, ids: torch.Tensor, **media: Any) -> dict[str, torch.Tensor]:
    """Hidden states and log-probs of own rows in their places among all, zeros elsewhere; gradients of the own loss."""
    shard = given if isinstance(given, Shard) else Shard(given, None)
    draw, rows = torch.Generator().manual_seed(1), layout.num_tokens
    model.zero_grad()
    decoder = getattr(model, "model", model.base_model)
    hidden = decoder(input_ids=shard.split(ids, 1), dualkv=given, **media).last_hidden_state[0]
    labels, of_token = torch.randint(3, 80, (rows,), generator=draw), torch.randn(rows, generator=draw).to(hidden)
    weight = torch.randn(rows, hidden.shape[1], generator=draw).to(hidden)
    logits = model.get_output_embeddings()(hidden)
    logp = logits.log_softmax(-1).gather(1, shard.split(labels)[:, None])[:, 0]
    ((hidden * shard.split(weight)).sum() + (logp * shard.split(of_token)).sum()).backward()
    whole = {"hidden": hidden.detach(), "logp": logp.detach()}
    for name, x in whole.items():
        whole[name] = x.new_zeros(shard.layout.num_tokens, *x.shape[1:]).index_copy_(0, shard.rows, x)[:rows]
    return whole | {f"gradient of {name}": g.clone() for name, g in gradients(model).items()}


def added_up(got: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Sums of the results of all ranks, on one rank."""
    whole = torch.cat([x.flatten() for x in got.values()])
    dist.reduce(whole, rank)
    parts = whole.split([x.numel() for x in got.values()])
    return {name: part.view_as(got[name]) for name, part in zip(got, parts, strict=True)}


def norms_of_gradients(found: dict[str, torch.Tensor]) -> list[float]:
    return [x.norm().item() for name, x in found.items() if name.startswith("gradient")]


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], least: float) -> tuple[float, str]:
    """The largest relative difference, and of what it is. Gradients that rounding alone makes (of a bias that the
    softmax cancels) count as of norm `least`."""
    return max(
        ((got[name] - x).norm().item() / max(x.norm().item(), least * name.startswith("gradient")), name)
        for name, x in expected.items()
    )


def on_each(ranks: int, run: str, *arguments: str) -> list[dict[str, Any]]:
    """Call a function of this folder with its rank and the arguments on each rank; what it returns passes as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(ranks, f"{__name__}:on_a_rank", folder, f"{__name__.rpartition('.')[0]}.{run}", *arguments)
        return [json.loads(Path(f"{folder}/{rank}").read_text()) for rank in range(ranks)]


def on_a_rank(rank: int, folder: str, run: str, *arguments: str) -> None:
    module, _, name = run.partition(":")
    dist.init_process_group("gloo")
    found = getattr(importlib.import_module(module), name)(rank, *arguments)
    Path(f"{folder}/{rank}").write_text(json.dumps(found))
    dist.destroy_process_group()


def refused() -> str:
    """Return the error of a model whose heads the ranks cannot share."""
    shard = Shard(FOREST, dist.group.WORLD)
    model = enable(make("qwen3_5_text", linear_num_key_heads=1, linear_num_value_heads=3), check=False)
    with pytest.raises(ValueError, match="heads") as error:
        model(input_ids=shard.split(token_ids(FOREST), 1), dualkv=shard)
    return str(error.value)


def run(rank: int, dtype: str, families: str) -> dict[str, Any]:
    ranks = dist.get_world_size()
    found: dict[str, Any] = {"refused": refused()}
    with double_throughout() if dtype == "float64" else nullcontext():
        for number, (family, layout) in enumerate(cases(families)):
            compares = number % ranks == rank
            model = model_of(family, getattr(torch, dtype))
            ids = token_ids(layout)
            expected = results(model, layout, layout, ids) if compares else {}
            for kind, recompute in WAYS[dtype]:
                if recompute:
                    recompute_layers(model)
                # One of the ways runs the library's convolution, by its stand-in.
                library = {"convolution": lambda *_: test_recurrent.library_convolution} if recompute else {}
                with patch.multiple(kernels, **library) if library else nullcontext():
                    got = results(model, layout, kind(layout, dist.group.WORLD), ids)
                whole = added_up(got, number % ranks)
                if compares:
                    way = f"{family} {layout.num_tokens} {kind.__name__} {recompute}"
                    found[way] = difference(whole, expected, 1e-6 * max(norms_of_gradients(expected)))
    return found


@pytest.mark.parametrize(
    ("ranks", "dtype", "families"),
    [
        (4, "float32", "often"),
        pytest.param(4, "float32", "all", marks=pytest.mark.slow),
        pytest.param(2, "float32", "all", marks=pytest.mark.slow),
        pytest.param(2, "float64", "all", marks=pytest.mark.slow),
        pytest.param(4, "float64", "all", marks=pytest.mark.slow),
    ],
)
def test_as_on_one_rank(ranks: int, dtype: str, families: str) -> None:
    found: dict[str, Any] = {}
    for of_rank in on_each(ranks, "test_recurrent_ranks:run", dtype, families):
        found |= of_rank
        assert found.pop("refused") == (
            "recurrent layer layers.0.linear_attn (Qwen3_5GatedDeltaNet) has 3 heads, expected a multiple of the"
            f" {ranks} sequence-parallel ranks"
        )
    assert len(found) == len(cases(families)) * 2
    for way, (error, of) in found.items():
        assert error < LARGEST.get(f"{dtype} {way.split()[0]}", LARGEST[dtype]), (way, of)


# ---------------------------------------------------------------- the plan of a convolution
def of_rank(kind: type[Shard], layout: Layout, ranks: int, rank: int) -> Shard:
    """A shard without a group."""
    shard = kind(layout, None, multiple=ranks)
    shard.rank, shard.world_size, shard.num_tokens = rank, ranks, shard.layout.num_tokens // ranks
    if isinstance(shard, ContextShard):
        shard.shares = shares(shard.layout._segments, ranks)
    return shard


@pytest.mark.parametrize("seed", range(20))
def test_convolutions_of_ranks_read_the_rows_of_others(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = random_forest(seed)
    if not layout.num_tokens:
        return
    for kind, ranks, back in itertools.product(KINDS, (2, 3, 8), (1, 3, 5)):
        whole = of_rank(kind, layout, ranks, 0).layout
        weight, cpu = torch.randn(2, back + 1, dtype=torch.float64), torch.device("cpu")
        x = torch.randn(1, 2, whole.num_tokens, dtype=torch.float64)
        expected = ops.convolve(rules.convolution, waves.windows(whole, back, cpu), x, weight, None)
        shards = [of_rank(kind, layout, ranks, rank) for rank in range(ranks)]
        plans = [sharded.windows(shard, back, cpu) for shard in shards]
        own = [x[:, :, shard.rows] for shard in shards]
        sent = [rows[0].t()[plan.halo.sent].split(plan.halo.sent_to) for rows, plan in zip(own, plans, strict=True)]
        for rank, (shard, plan) in enumerate(zip(shards, plans, strict=True)):
            received = [of[rank] for of in sent]
            assert [len(rows) for rows in received] == plan.halo.received_from
            monkeypatch.setattr(sequence_parallel, "sent", lambda *_, received=received: torch.cat(received))
            of_library = ops.convolve_at_once, test_recurrent.library_convolution
            for convolve, conv in ((ops.convolve, rules.convolution), of_library):
                out = convolve(conv, plan, own[rank], weight, None)
                torch.testing.assert_close(out, expected[:, :, shard.rows], rtol=1e-12, atol=1e-12)
