"""The forward's online softmax, its own source run on numbers that round and flush to zero as the GPU's do.

A row's reference moves in masked blocks only, so scores can outgrow the reference in blocks without a mask, and the
reference can move afterwards by more than 2^126. Whatever the order of blocks, a tile must end with the right row or
with a sum that calls for the recompute pass.
"""

import operator
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cutlass")
from cute_kernels import accumulator, softmax

THREADS, ELEMENTS = 4, 8  # threads that hold a row; a thread's elements of a block, of two rows
TINY = np.finfo(np.float32).tiny
TILES, BOUND = 150, 2.0**-10
SCALE = float(np.float32(0.3))  # times log2(e)
RECOMPUTE_ABOVE = softmax.SUM_LIMIT


class Number:
    """fp32 numbers of the four threads that hold a row; results below 2^-126 are 0."""

    def __init__(self, x):
        self.wide = np.broadcast_to(np.asarray(x, np.float64), THREADS)
        x = self.wide.astype(np.float32)
        self.x = np.where(np.abs(x) < TINY, np.float32(0), x)

    def _with(self, other, operation):
        with np.errstate(all="ignore"):
            return Number(operation(self.x, number(other).x))

    def __add__(self, other):
        return self._with(other, operator.add)

    def __sub__(self, other):
        with np.errstate(all="ignore"):
            return Number(self.wide - number(other).x)  # of a product: one instruction, rounded once

    def __mul__(self, other):
        with np.errstate(all="ignore"):
            return Number(self.x.astype(np.float64) * number(other).x)

    def __rsub__(self, other):
        return number(other) - self

    def __rmul__(self, other):
        return self * other

    def __neg__(self):
        return Number(-self.wide)

    def __gt__(self, other):
        return self.x > number(other).x


def number(x):
    return x if isinstance(x, Number) else Number(x)


def exp2(x, fastmath):
    with np.errstate(all="ignore"):
        return Number(np.exp2(x.x))


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """The functions of `softmax` on Numbers."""
    cute = SimpleNamespace(
        size=len,
        math=SimpleNamespace(exp2=exp2),
        arch=SimpleNamespace(
            fmax=lambda a, b: Number(np.fmax(a.x, number(b).x)),
            warp_reduction_max=lambda x, threads_in_group: Number(x.x.max()),
            warp_reduction_sum=lambda x, threads_in_group: Number(x.x.sum()),
        ),
    )
    select = SimpleNamespace(select_=lambda where, a, b: Number(np.where(where, number(a).x, number(b).x)))
    for name, value in (("cute", cute), ("cutlass", select), ("Float32", Number)):
        monkeypatch.setattr(softmax, name, value)
    monkeypatch.setattr(accumulator, "cute", cute)


def tile(rng):
    """Scores [blocks, ELEMENTS, THREADS], most near one another and a few far; whether each block is masked."""
    blocks = rng.integers(2, 7)
    scores = rng.uniform(-3, 3, (blocks, ELEMENTS, THREADS))
    for _ in range(rng.integers(1, 4)):
        scores[rng.integers(blocks), rng.integers(ELEMENTS), rng.integers(THREADS)] += rng.choice(
            (60, 100, 124, 126, 130)
        )
    scores += rng.choice((-140, 0, 0, 90)) + rng.choice((0, 0, 3), (blocks, 1, 1))
    if rng.random() < 0.2:
        scores = scores * 0 + rng.choice((-1e38, -1e31, -1e6, 1e6, 1e31, 1e38))
    masked = rng.random(blocks) < 0.5
    masked[0] = True
    hidden = masked[:, None, None] & (rng.random(scores.shape) < 0.3)
    return np.where(hidden, -np.inf, scores / SCALE).astype(np.float32), masked


def rows(scores, values, masked):
    """Sums of p * value and of p of the tile's two rows, as a warp group makes them, and whether each fits."""
    row_max, row_sum = [Number(softmax.FIRST_MAX)] * 2, [Number(0.0)] * 2
    out, factor = [Number(0.0)] * 2, [Number(1.0)] * 2
    for block, value, mask in zip(scores, values, masked, strict=True):
        acc = [Number(x) for x in block]
        if mask:
            softmax.online_softmax(acc, row_max, row_sum, factor, SCALE)
            out = [o * f for o, f in zip(out, factor, strict=True)]
        else:
            softmax.fixed_softmax(acc, row_max, row_sum, SCALE)
        for r in range(2):
            for e in accumulator.row_elements(acc, r):
                out[r] = out[r] + acc[e] * value[e]
    with np.errstate(all="ignore"):
        found, total = ([x.x.astype(np.float64).sum() for x in row] for row in (out, row_sum))
        fits = [
            t + f * 0.0 <= RECOMPUTE_ABOVE and abs(m.x[0]) * SCALE <= softmax.REFERENCE_LIMIT
            for f, t, m in zip(found, total, row_max, strict=True)
        ]
    return found, total, fits


def right(row, scores, values, found, total):
    """Whether found / total is the softmax-weighted mean of a row's values."""
    elements = accumulator.row_elements([0] * ELEMENTS, row)
    s, v = scores[:, elements].astype(np.float64), values[:, elements]
    p = np.exp2((s - s.max()) * SCALE)
    with np.errstate(all="ignore"):
        return abs(found[row] / total[row] - (p * v).sum() / p.sum()) <= BOUND * (p * abs(v)).sum() / p.sum()


def random_rows():
    """Yield, for each row of TILES random tiles, whether it is wrong and whether it needs the recompute pass."""
    rng = np.random.default_rng(0)
    for _ in range(TILES):
        scores, masked = tile(rng)
        values = rng.uniform(-1, 1, scores.shape)
        first, second = rows(scores, values, masked), rows(scores, values, np.ones(len(masked), bool))
        for r in range(2):
            if np.isneginf(scores[:, accumulator.row_elements([0] * ELEMENTS, r)]).all():
                continue
            yield not right(r, scores, values, *(first if first[2][r] else second)[:2]), not first[2][r]


def test_a_row_is_right_or_computed_again():
    wrong, again = np.sum(list(random_rows()), 0)
    assert wrong == 0
    assert 0 < again < TILES  # of 2 * TILES rows


@pytest.mark.parametrize("limit", ["SUM_LIMIT", "REFERENCE_LIMIT"])
def test_without_a_limit_rows_are_wrong(limit, monkeypatch):
    monkeypatch.setattr(softmax, limit, float("inf"))  # the sum's in online_softmax alone
    assert any(wrong for wrong, _ in random_rows())


def test_with_a_greater_first_reference_rows_are_wrong(monkeypatch):
    monkeypatch.setattr(softmax, "FIRST_MAX", -1e30)
    assert any(wrong for wrong, _ in random_rows())


@pytest.fixture
def approximations(monkeypatch):
    """Instructions as inexact as PTX says: ex2.approx by 2^-22 of the result, rcp.approx by half of that."""
    rng = np.random.default_rng(0)

    def emulate(function, error):
        def instruction(x, fastmath=True):
            with np.errstate(all="ignore"):
                return Number(function(x.x.astype(np.float64)) * (1 + error * rng.uniform(-1, 1, THREADS)))

        return instruction

    monkeypatch.setattr(softmax.cute.math, "exp2", emulate(np.exp2, 2.0**-22))
    monkeypatch.setattr(softmax.cute.math, "log", emulate(np.log, 2.0**-22), raising=False)
    monkeypatch.setattr(softmax.cute.arch, "rcp_approx", emulate(np.reciprocal, 2.0**-23), raising=False)


def test_softcap_is_tanh(approximations):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-30, 30, 4000), rng.uniform(-1, 1, 4000), rng.normal(0, 1e-3, 4000)])
    scores, factor = x.astype(np.float32).reshape(-1, THREADS), np.float32(2 / 50 * np.log2(np.e))
    acc = [Number(s * 50) for s in scores]
    softmax.cap(acc, factor)
    error = np.abs(np.array([a.x for a in acc]) - np.tanh(np.float32(scores * 50).astype(np.float64) / 50))
    assert error.max() < 2.0**-21
    special = Number(np.array([np.inf, -np.inf, np.nan, 1e9]))
    assert np.allclose(softmax.capped(special, factor).x, [1, -1, np.nan, 1], rtol=2.0**-21, equal_nan=True)
    special = Number(np.array([3e38, -3e38, 1e5, -1e5]))
    assert np.allclose(softmax.capped(special, factor).x, [1, -1, 1, -1], rtol=2.0**-21)


def normalized(acc, reference, rows, lse, sinks):
    """Normalize with references in natural logarithms and the sums of whole rows."""
    row_sum = [Number(np.array([x, 0, 0, 0])) for x in rows]  # of each thread
    softmax.normalize(acc, [Number(x) for x in reference], row_sum, lse, 1.0, [Number(x) for x in sinks])
    assert [x.x[0] for x in row_sum] == [np.float32(x) for x in rows]


def test_sinks_are_one_more_key(approximations):
    rng = np.random.default_rng(2)
    for _ in range(500):
        reference, rows = rng.normal(0, 30, 2), rng.uniform(1, 1000, 2)
        lse, sink = reference + np.log(rows), rng.choice([0.1, 3, 30, 300]) * rng.normal(size=2)
        value = rng.uniform(-1, 1, (ELEMENTS, THREADS))
        acc, found = [Number(value[i] * rows[i % 4 // 2]) for i in range(ELEMENTS)], [Number(0)] * 2
        normalized(acc, reference, rows, found, sink)
        for r in range(2):
            total = np.logaddexp(lse[r], sink[r])
            # A sum off by some part moves its logarithm by as much, which is added to the reference.
            assert abs(found[r].x - total).max() <= 2.0**-21 * (1 + abs(reference[r]) + abs(total))
            for e in accumulator.row_elements(acc, r):
                # Of the exponential, the argument's rounding counts, of which the bound has 300 and more.
                assert abs(acc[e].x - value[e] * np.exp(lse[r] - total)).max() <= 2.0**-13


@pytest.mark.filterwarnings("ignore:overflow")
def test_sinks_without_bounds(approximations):
    """-inf changes nothing; an infinite or very large one takes all of the row; NaN is the row's."""
    for lse in (-1e30, -50.0, 0.0, 7.5, 1e30):
        for sink, factor, total in (
            (-np.inf, 1, lse), (np.inf, 0, np.inf), (3e38, 0, 3e38), (-3e38, 1, lse), (np.nan, np.nan, np.nan)
        ):  # fmt: skip
            acc, found = [Number(0.75) for _ in range(ELEMENTS)], [Number(0)] * 2
            normalized(acc, [lse] * 2, [1.0] * 2, found, [sink] * 2)
            for r in range(2):
                assert np.allclose(found[r].x, np.float32(total), rtol=2.0**-23, atol=2.0**-21, equal_nan=True)
                for e in accumulator.row_elements(acc, r):
                    expected = np.full(THREADS, 0.75 * factor, np.float32)
                    assert np.allclose(acc[e].x, expected, rtol=2.0**-21, atol=0, equal_nan=True)
