"""Attention over the rows of four ranks against the same attention in one process."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dualkv
from dualkv.context_parallel import ContextShard
from dualkv.sequence_parallel import Shard, contiguous, padded
from tests.ranks import on_ranks

RANKS = 4
KINDS = (Shard, ContextShard)
HEADS, HEAD_DIM, HEAD_DIM_V = 12, 8, 16
KV_HEADS = (1, 2, 3, 4, 6, 12)  # fewer than ranks, more, and neither a multiple nor a divisor of them
# Features of each call, and whether the heads have sinks.
CASES = [(kv_heads, {}, False) for kv_heads in KV_HEADS] + [
    (1, {"window": 3, "softcap": 2.0}, True),
    (3, {"chunk": 4}, False),
    (6, {"window": 8}, True),
    (12, {}, True),
]
LAYOUT = dualkv.Layout.from_lengths([7, 1, 5, 0], [[4, 0, 9], [2, 6], [3], [3, 2]])  # 42 rows: two more are needed


def inputs(kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and the output's gradient, fp64, two rows of nothing behind them, which have no part in a loss."""
    generator = torch.Generator().manual_seed(kv_heads)
    rows = LAYOUT.num_tokens + 2
    shapes = [(rows, HEADS, HEAD_DIM), (rows, kv_heads, HEAD_DIM), (rows, kv_heads, HEAD_DIM_V)]
    shapes.append((rows, HEADS, HEAD_DIM_V))
    found = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    found[-1][-2:] = 0
    return found


def sinks(wanted: bool) -> torch.Tensor | None:
    """[H] of all heads."""
    return torch.linspace(-2, 2, HEADS, dtype=torch.float64).requires_grad_() if wanted else None


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for kind in KINDS:
        shard = kind(LAYOUT, dist.group.WORLD)
        for case, (kv_heads, features, with_sinks) in enumerate(CASES):
            q, k, v, dout = (shard.split(x).clone() for x in inputs(kv_heads))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            learned = sinks(with_sinks)
            out = shard.attention(*leaves, softmax_scale=0.3, sinks=learned, **features)
            out.backward(dout)
            found[kind, case] = [shard.gather(x.detach()) for x in (out, *(x.grad for x in leaves))]
            found[kind, case, "sinks"] = None if learned is None else learned.grad
        found[kind, "positions"] = shard.gather(shard.position_ids)
    found["odd heads"] = odd_heads(rank)
    found["refused"] = [refused(kind, layout) for kind in KINDS for layout in (LAYOUT, ONE_ROW)]
    found["some gradients"] = some_gradients()
    shard = Shard(LAYOUT, dist.group.WORLD)
    found["errors"] = [
        said(shard.attention, torch.zeros(11, 6, 8), *[torch.zeros(11, 2, 8)] * 2),
        said(shard.attention, torch.zeros(11, 12, 8), *[torch.zeros(11, 5, 8)] * 2),
        said(shard.attention, torch.zeros(10, 12, 8), *[torch.zeros(10, 2, 8)] * 2),
        said(shard.attention, torch.zeros(11, 12, 8), *[torch.zeros(11, 2, 8)] * 2, sinks=torch.zeros(3)),
        said(shard.split, torch.zeros(45)),
        said(shard.split, torch.zeros(40)),
        said(shard.gather, torch.zeros(2, 10), 1),
        said(shard.to_heads, [torch.zeros(11, 2), torch.zeros(11, 6, 8)]),
    ]
    found["differing"] = differing(rank)
    rows, weights = rows_and_weights()
    mine = shard.split(rows, 1).requires_grad_()
    whole = shard.gather(mine.square(), 1)
    (whole * weights).sum().backward()
    found["shared"] = mine.detach(), whole.detach(), mine.grad
    for kind in KINDS:
        shard = kind(LAYOUT, dist.group.WORLD)
        heads = shard.to_heads([shard.split(x) for x in of_heads()])
        found[kind, "heads"] = heads, shard.to_rows(heads[1]), shard.order, shard.rows
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


# Of four ranks, three have no row of a prompt: they compute nothing in one of their two parts.
ONE_ROW = dualkv.Layout.from_lengths([1], [[]])
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"k": (2, 2, 8)}, "k has 2 tokens and q {rows}, expected the same"),
    ({"v": (0, 3, 8)}, "v has 3 heads and k 2, expected the same"),
    ({"q": (0, 4, 12), "k": (0, 2, 12)}, "q has head_dim 12, expected a multiple of 8 up to 512"),
    ({"k": torch.float64}, "k is torch.float64 and q is torch.float32, expected one dtype"),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0, expected a number from 2^-100 to 2^100"),
    ({"window": 0}, "window is 0, expected 1 or more"),
    ({"window": 2, "chunk": 2}, "got window=2 and chunk=2, expected one of the two"),
    ({"sinks": torch.zeros(4, dtype=torch.float64)}, "sinks is torch.float64, expected q's torch.float32"),
]


def refused(kind: type[Shard], layout: dualkv.Layout) -> list[str]:
    """Return the errors of a rank for each wrong call, and the sum of a right one after them: the ranks are in step."""
    shard, found = kind(layout, dist.group.WORLD), []
    rows = shard.num_tokens
    for wrong, _ in WRONG:
        tensors = {"q": torch.ones(rows, 4, 8), "k": torch.ones(rows, 2, 8), "v": torch.ones(rows, 2, 8)}
        for name in tensors.keys() & wrong.keys():
            asked = wrong[name]
            if isinstance(asked, tuple):
                tensors[name] = torch.ones(asked[0] or rows, *asked[1:])
            else:
                tensors[name] = tensors[name].to(asked)
        found.append(said(shard.attention, **tensors, **{n: x for n, x in wrong.items() if n not in tensors}))
    right = shard.attention(torch.ones(rows, 4, 8), *[torch.ones(rows, 2, 8)] * 2)
    return [*found, f"{float(right.sum()) / rows:.3f}"]


@pytest.mark.parametrize("case", range(2 * len(KINDS)))
def test_every_rank_refuses_before_it_sends(case: int, ranks: list[dict]) -> None:
    rows = (11, 1)[case % 2]
    for found in ranks:
        assert found["refused"][case] == [*(text.format(rows=rows) for _, text in WRONG), "32.000"]


SHORTER = dualkv.Layout.from_lengths([7, 1, 5, 0], [[4, 0, 9], [2, 6], [2], [3, 3]])  # as many rows
LONGER = dualkv.Layout.from_lengths([7, 1, 5, 0], [[4, 0, 9], [2, 6], [3], [3, 9]])
# (what most ranks construct, what the last one does): another layout, more rows, another kind, another multiple.
USUAL, GATHERED = (Shard, LAYOUT, 1), (ContextShard, LAYOUT, 1)
DIFFERING: list[tuple[Any, Any]] = [
    (USUAL, (Shard, SHORTER, 1)),
    (GATHERED, (ContextShard, SHORTER, 1)),
    (USUAL, (Shard, LONGER, 1)),
    (GATHERED, (ContextShard, LONGER, 1)),
    (USUAL, GATHERED),
    (USUAL, (Shard, LAYOUT, 4)),
]


def differing(rank: int) -> list[str]:
    """Return the errors of a rank where the last one differs, and for a group that it may not be in; then the sum of a
    right call: the ranks are in step."""
    found = []
    for usual, odd in DIFFERING:
        kind, layout, multiple = odd if rank == RANKS - 1 else usual
        found.append(said(kind, layout, dist.group.WORLD, multiple))
    found.append(said(Shard, LAYOUT, dist.new_group([0, 1])))
    right = Shard(LAYOUT, dist.group.WORLD).attention(torch.ones(11, 4, 8), *[torch.ones(11, 2, 8)] * 2)
    return [*found, f"{float(right.sum()) / 11:.3f}"]


def test_ranks_that_differ_raise_together(ranks: list[dict]) -> None:
    for rank, found in enumerate(ranks):
        *differ, outside, right = found["differing"]
        for text, pair in zip(differ, DIFFERING, strict=True):
            kind, layout, multiple = pair[rank == RANKS - 1]
            rows = padded(layout, -layout.num_tokens % (RANKS * multiple)).num_tokens
            assert text.startswith("layouts differ between the 4 ranks of the group")
            assert f"a {kind.__name__} of {rows} rows" in text
        expected = "nothing raised" if rank < 2 else "this process is none of the ranks of group"
        assert outside.startswith(expected)
        assert right == "32.000"


def some_gradients() -> dict[str, list[torch.Tensor | None]]:
    """Gradients of q, k and v of all rows where only some are asked for, and what a call without any keeps."""
    shard, found = ContextShard(LAYOUT, dist.group.WORLD), {}
    q, k, v, dout = (shard.split(x) for x in inputs(3))
    for wanted in ("q", "k", "kv", "qkv"):
        leaves = [x.clone().requires_grad_(name in wanted) for name, x in zip("qkv", (q, k, v), strict=True)]
        shard.attention(*leaves).backward(dout)
        found[wanted] = [None if x.grad is None else shard.gather(x.grad) for x in leaves]
    with torch.no_grad():
        found["none"] = [shard.gather(shard.attention(q, k, v))]
    found["out"] = [shard.gather(shard.attention(q, k, v.clone().requires_grad_()).detach())]
    return found


def test_some_gradients_are_those_of_all(ranks: list[dict]) -> None:
    for found in ranks:
        of = found["some gradients"]
        for wanted in ("q", "k", "kv"):
            for name, x, y in zip("qkv", of[wanted], of["qkv"], strict=True):
                assert (x is None) == (name not in wanted)
                assert x is None or torch.equal(x, y)
        assert torch.equal(of["none"][0], of["out"][0])


def odd_heads(rank: int) -> list[torch.Tensor]:
    """One head, which four ranks cannot share, under autocast and in a checkpoint: outputs and gradients of all rows,
    with and without ranks."""
    q, k, v, dout = (x[:, :1].float() for x in inputs(1))
    found = []
    shard = ContextShard(LAYOUT, dist.group.WORLD)
    for attention, part in (
        (shard.attention, shard.split),
        (lambda *x: dualkv.attention(*x, shard.layout), lambda x: x),
    ):
        leaves = [part(x).clone().requires_grad_() for x in (q, k, v)]
        with torch.autocast("cpu", torch.bfloat16):
            out = checkpoint(attention, *leaves, use_reentrant=False)
        out.backward(part(dout).bfloat16())
        whole = [out.detach(), *(x.grad for x in leaves)]
        found += [shard.gather(x) if part == shard.split else x for x in whole]
    return found


def test_one_head_of_four_ranks_under_autocast(ranks: list[dict]) -> None:
    for found in ranks:
        got, expected = found["odd heads"][:4], found["odd heads"][4:]
        assert got[0].dtype == torch.bfloat16
        assert torch.equal(got[0], expected[0])
        for x, y in zip(got[1:], expected[1:], strict=True):  # of keys and values sums of rounded sums
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def rows_and_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 42], and [2, 44] of the loss, of which the padding is a part."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 42, generator=generator), torch.randn(2, 44, generator=generator)


def of_heads() -> list[torch.Tensor]:
    """Heads in two dtypes: keys [44, 2, 3] for two of values [44, 8, 5] each, and decays [44, 8]."""
    generator = torch.Generator().manual_seed(0)
    shapes = {(44, 2, 3): torch.bfloat16, (44, 8, 5): torch.bfloat16, (44, 8): torch.float32}
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in shapes.items()]


def said(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return str(error)
    return "nothing raised"


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(RANKS, "tests.test_sequence_parallel:run", folder)
        return [torch.load(Path(folder) / str(rank), weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_as_in_one_process(kind: type[Shard], case: int, ranks: list[dict]) -> None:
    kv_heads, features, with_sinks = CASES[case]
    *leaves, dout = inputs(kv_heads)
    rows = LAYOUT.num_tokens
    leaves = [x[:rows].clone().requires_grad_() for x in leaves]
    learned = sinks(with_sinks)
    out = dualkv.attention(*leaves, LAYOUT, softmax_scale=0.3, sinks=learned, **features)
    out.backward(dout[:rows])
    for i, expected in enumerate((out, *(x.grad for x in leaves))):
        for found in ranks:
            torch.testing.assert_close(found[kind, case][i][:rows], expected.detach(), rtol=1e-12, atol=1e-12)
    if learned is not None:
        of_ranks = [found[kind, case, "sinks"] for found in ranks]
        torch.testing.assert_close(sum(of_ranks), learned.grad, rtol=1e-12, atol=1e-12)
        share = HEADS // RANKS if kind is Shard else 0
        for rank, gradient in enumerate(of_ranks):
            expected_of = list(range(rank * share, (rank + 1) * share)) if share else list(range(HEADS))
            assert gradient.nonzero().flatten().tolist() == expected_of


def test_positions_are_those_of_each_ranks_rows(ranks: list[dict]) -> None:
    for found in ranks:
        for kind in KINDS:
            assert found[kind, "positions"].tolist() == [*LAYOUT.position_ids.tolist(), 0, 1]


def test_refusals_name_heads_rows_and_sinks(ranks: list[dict]) -> None:
    for found in ranks:
        assert found["errors"] == [
            "q has 6 heads, expected a multiple of the 4 sequence-parallel ranks",
            "q has 12 heads and k 5, expected q's to be a multiple of k's",
            "q has 10 rows, each rank of this layout holds 11",
            "sinks has shape (3,), expected [H] = (12,)",
            "x has 45 rows in dimension 0, expected 44, the layout's, or fewer by rows that pad it",
            "x has 40 rows in dimension 0, expected 44, the layout's, or fewer by rows that pad it",
            "x has 10 rows in dimension 1, each rank of this layout holds 11",
            "rows has 6 heads, expected a multiple of the 4 sequence-parallel ranks",
        ]


def test_rows_are_split_and_gathered(ranks: list[dict]) -> None:
    """A row's gradient is that of one rank's loss, not of all four."""
    rows, weights = rows_and_weights()
    padded_rows = torch.nn.functional.pad(rows, (0, 2))
    for rank, found in enumerate(ranks):
        mine, whole, gradient = found["shared"]
        here = slice(rank * 11, rank * 11 + 11)
        assert torch.equal(mine, padded_rows[:, here])
        assert torch.equal(whole, padded_rows.square())
        torch.testing.assert_close(gradient, 2 * mine * weights[:, here])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_rank_gets_its_heads_of_all_rows(kind: type[Shard], ranks: list[dict]) -> None:
    keys, values, decays = of_heads()
    for rank, found in enumerate(ranks):
        heads, back, order, rows = found[kind, "heads"]
        mine = slice(rank * 2, rank * 2 + 2)
        expected = keys[:, rank // 2, None], values[:, mine], decays[:, mine]
        for x, y in zip(heads, expected, strict=True):
            torch.testing.assert_close(x, y[order], rtol=0, atol=0)  # also the dtype
        assert torch.equal(back, values[rows])


def test_one_rank_needs_no_group() -> None:
    shard = Shard(LAYOUT, None, multiple=8)
    q, k, v, _ = (x[: LAYOUT.num_tokens] for x in inputs(2))
    q, k, v = (shard.split(x) for x in (q, k, v))
    assert (shard.num_tokens, shard.rank, shard.world_size) == (48, 0, 1)
    assert torch.equal(shard.gather(q), q)
    assert torch.equal(shard.attention(q, k, v), dualkv.attention(q, k, v, shard.layout))


def test_padding_sees_itself_alone() -> None:
    longer = padded(LAYOUT, 3)
    assert longer.num_tokens == LAYOUT.num_tokens + 3
    assert longer.position_ids.tolist()[-3:] == [0, 1, 2]
    assert longer.visible_end.tolist()[-4:] == [42, 45, 45, 45]
    assert padded(LAYOUT, 0) is LAYOUT
    nested = dualkv.pack_sequences([[1, 2], [1, 2, 3]]).layout
    assert padded(nested, 4).nominal_tokens == nested.nominal_tokens + 4 == 9
    with pytest.raises(ValueError, match="rows is -3, expected 0 or more"):
        padded(LAYOUT, -3)


@pytest.mark.parametrize("kind", [Shard, ContextShard])
@pytest.mark.parametrize(
    ("layout", "multiple", "error", "why"),
    [
        (LAYOUT, 0, ValueError, "multiple is 0, expected 1 or more"),
        (LAYOUT, -2, ValueError, "multiple is -2, expected 1 or more"),
        (LAYOUT, 1.5, TypeError, r"multiple is 1\.5, expected an integer"),
        ([0, 3, 5], 1, TypeError, r"layout is a list, expected a dualkv\.Layout"),
    ],
)
def test_bad_arguments(kind: type[Shard], layout: Any, multiple: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        kind(layout, None, multiple)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float32, torch.float64])
def test_copies_in_wider_elements_are_equal(dtype: torch.dtype) -> None:
    """Rows that begin, end or lie apart at no multiple of 8 bytes too, single numbers, and none."""
    x = torch.arange(5 * 3 * 64).reshape(5, 3, 64).remainder(7).to(dtype)
    views = [
        x,
        x[:, :, 8:40],
        x[:, :, 1:33],
        x[:, :, :7],
        x[:, :, ::2],
        x[..., :8],
        x[:0],
        x[0, 0, 0],
        x.transpose(1, 2),
    ]
    for view in (y for each in views for y in (each, each.transpose(0, 1) if each.dim() > 1 else each)):
        found = contiguous(view)
        assert found.is_contiguous()
        assert torch.equal(found, view)
