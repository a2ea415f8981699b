"""Measure what a row of a model takes in memory, for budgets in bytes."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualkv.arrays import check_integers, positive
from dualkv.branches import Branch, Keeping
from dualkv.data.gain import PAIRS_A_ROW
from dualkv.data.memory import ROWS_AT_ONCE, RowCosts
from dualkv.data.parts import plan_parts
from dualkv.data.trees import PackedSequences
from dualkv.layout import Layout
from dualkv.logprobs import leaves
from dualkv.walks import Forward, Loss, check_functions

LONG = 4  # times the rows of a part: a path in whose attention the peak lies


def measure_rows(
    forward: Forward,
    input_ids: torch.Tensor,
    loss: Loss | None = None,
    *,
    rows: int = 256,
    gradients: torch.dtype = torch.float32,
    on_host: bool = False,
    pairs: float = PAIRS_A_ROW,
) -> RowCosts:
    """Measure the bytes of a row in passes of :func:`dualkv.walk`, by a few forwards and backwards of small parts.

    Gradients of parameters are not touched: the backward computes those of activations alone. On a GPU the peak of its
    allocator is read, and reset. Elsewhere tensors are counted as PyTorch's operations make them.

    Args:
        forward: of a part, as for :func:`dualkv.walk`.
        input_ids: tokens, any number of them; they are repeated as needed.
        loss: of a part, as for :func:`dualkv.walk`: what the head takes is measured too. None: leave memory for it.
        rows: of the smaller parts. The larger one has twice as many, the longest path eight times as many.
        gradients, on_host: as for :func:`dualkv.walk`.
        pairs: of the result.

    Raises:
        ValueError: rows below 1, no tokens, and as :func:`dualkv.walk`.
        TypeError: tokens that are no tensor of integers, and as :func:`dualkv.walk`.
    """
    rows, keeping = positive("rows", rows), Keeping(gradients, on_host)
    check_functions(forward=(forward, "(input_ids, branch)"))
    check_functions(False, loss=(loss, "(hidden states, part)"))
    tokens = _repeated(input_ids, rows)
    run = partial(_run, forward, tokens, keeping)

    def of_head(own: int) -> float:
        """Bytes at the peak of the head of a part."""
        if loss is None:
            return 0.0
        (part,) = plan_parts(_one_sequence(tokens[: own + 1]), own + 1)
        with torch.no_grad():
            hidden = forward(part.input_ids, Branch(part))
        found = 0.0
        for _ in range(2):  # what the first call allocates is no cost of a pass
            with torch.enable_grad(), Peak(input_ids.device) as peak:
                value = loss(hidden.detach().requires_grad_(), part)
                torch.autograd.grad(value, [*leaves(value)])
                del value
            found = peak.bytes
        return found

    with torch.enable_grad(), torch.random.fork_rng([input_ids.device] if input_ids.is_cuda else []):
        run(1, rows, True)  # what first calls allocate belongs to no row
        graph, saved, beside = list[float](), list[float](), list[float]()
        path = kept = 0.0
        for keeps_all in (True, False):
            small, large = run(1, rows, keeps_all), run(1, 2 * rows, keeps_all)
            graph.append((large.peak - small.peak) / rows)
            saved.append((large.saved - small.saved) / rows)
            # Behind a long path the peak is in attention. A short one is hidden by a peak elsewhere in the layer.
            long = run(2 * LONG * rows, rows, keeps_all)
            if keeps_all:
                path = max(0.0, (long.peak - run(LONG * rows, rows, True).peak) / (LONG * rows))
                kept = long.kept / (2 * LONG * rows)
            beside.append(max(0.0, long.peak - path * 2 * LONG * rows) / rows)
        head = of_head(rows)
        of_row = max(0.0, of_head(2 * rows) - head) / rows
    head = max(0.0, head - of_row * rows)
    at_end = saved[0] + of_row, saved[1] + of_row
    heads, others = _heads(long.widths)
    return RowCosts(kept, path, graph[0], graph[1], pairs, heads, head, (beside[0], beside[1]), at_end, others)


def measure_sharded_rows(
    forward: Forward, input_ids: torch.Tensor, most: int, keeping: Keeping | None = None
) -> RowCosts:
    """Measure the bytes of a row of a model whose weights are gathered for each layer, as FSDP does.

    What gathered weights take does not depend on rows, and few rows would take less. So this looks only at what more
    rows take; recomputed rows are as many as `most`, a budget of rows. The head is not measured, and no row counts
    less than a recomputed one. Under `torch.no_grad` passes have no graph.
    """
    many = positive("most // 2", most // 2)
    few, below = min(256, many), max(1, min(many, ROWS_AT_ONCE // 2) // LONG)
    tokens = _repeated(input_ids, max(many, below))
    run = partial(_run, forward, tokens, keeping or Keeping())
    with torch.random.fork_rng([input_ids.device] if input_ids.is_cuda else []):
        run(1, few, True)  # what first calls allocate belongs to no row
        pairs = ((run(1, n, keeps_all), run(1, 2 * n, keeps_all), n) for n, keeps_all in ((few, True), (many, False)))
        graph, recomputed = ((larger.peak - smaller.peak) / n for smaller, larger, n in pairs)
        short, long = (run(n * LONG * below, below, False) for n in (1, 2))
    # The peak may lie where weights are gathered.
    widest = max(long.widths.values(), default=0)
    path, kept = max(widest, (long.peak - short.peak) / (LONG * below)), long.kept / (2 * LONG * below)
    heads, others = _heads(long.widths if torch.is_grad_enabled() else {})  # a forward computes all at once
    found = RowCosts(kept, path, max(graph, recomputed), recomputed, kv_heads=heads, other_heads=others)
    # The path's share of the peak in attention, some of whose heads run after others: the rest is of own rows.
    share = found.of_path((2 * LONG + 1) * below) * 2 * LONG / (2 * LONG + 1)
    beside = min(recomputed, max(0.0, long.peak - share) / below)
    return found._replace(beside_path=(found.graph - (recomputed - beside), beside))


def _repeated(input_ids: torch.Tensor, rows: int) -> torch.Tensor:
    """Tokens for a part of so many rows behind the longest path."""
    check_integers("input_ids", input_ids)
    if not input_ids.numel():
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}, expected some tokens")
    return input_ids.reshape(-1).repeat(-(-(2 * LONG + 1) * rows // input_ids.numel()))


def _heads(widths: dict[int, int]) -> tuple[int, tuple[tuple[int, float], ...]]:
    """Return `kv_heads` and `other_heads` of :class:`RowCosts` for :attr:`Branch.widths`."""
    if not widths:
        return 1, ()
    widest = max(widths, key=lambda heads: widths[heads])
    return widest, tuple((heads, width / widths[widest]) for heads, width in widths.items() if heads != widest)


def _run(forward: Forward, tokens: torch.Tensor, keeping: Keeping, path: int, own: int, keeps_all: bool) -> _Bytes:
    """Run a part of so many rows behind a path."""
    training = torch.is_grad_enabled()
    *above, last = plan_parts(_one_sequence(tokens[: path + own], False), own)
    trunks: list[Branch] = []
    for part in above:
        trunks.append(Branch(part, trunks, keeping))
        with torch.no_grad():
            forward(part.input_ids, trunks[-1])
        if training:
            trunks[-1].reserve()
    branch = Branch(last, trunks, keeping)
    branch.keeps = keeps_all
    branch.begin(has_graph=training)
    with Peak(tokens.device) as peak:
        hidden = forward(last.input_ids, branch)
        branch.end()
        saved = peak.now()
        if training:
            branch.backward(hidden.sum(), inputs=[branch.anchor])
    return _Bytes(peak.bytes, saved, sum(trunk.kept_bytes for trunk in trunks), branch.widths)


def _one_sequence(ids: torch.Tensor, counts: bool = True) -> PackedSequences:
    """Make a batch of one sequence, whose tokens count or not. `pack_sequences` would note that it shares nothing."""
    rows = np.arange(len(ids))
    layout = Layout.from_segments([0, len(ids)], [-1], ids.device)
    return PackedSequences(ids[None], layout, rows, np.array([len(ids)]), (rows > 0) & counts)


class _Bytes(NamedTuple):
    """Bytes at the peak of a part and at the end of its forward, bytes that its path keeps, and the widths of layers
    (:attr:`Branch.widths`)."""

    peak: float
    saved: float
    kept: float
    widths: dict[int, int]


SHARE = 0.9  # of a GPU's memory that plans may count on


def room(device: torch.device, to_come: int) -> float:
    """Return the bytes of a GPU that passes may take beside what is allocated now and so many bytes that will be."""
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return SHARE * total - others - torch.cuda.memory_allocated(device) - to_come


class Peak:
    """The most bytes of tensors in a `with` statement beyond those at its beginning, in `bytes`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes = device, 0
        self._alive: _Alive | None = None

    def __enter__(self) -> Self:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._begin = torch.cuda.memory_allocated(self.device)
        else:
            self._alive = _Alive()
            self._alive.__enter__()
        return self

    def now(self) -> float:
        """Return the bytes of tensors beyond those at the beginning."""
        return self._alive.now if self._alive is not None else torch.cuda.memory_allocated(self.device) - self._begin

    def __exit__(self, *error: Any) -> None:
        if self._alive is not None:
            self._alive.__exit__(*error)
            self.bytes = self._alive.most
        else:
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._begin


class _Alive(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in (x.untyped_storage() for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            if storage._cdata not in self._counted | before:
                self._counted.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return out

    def _drop(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size
