"""One random call: how it is drawn, run, and judged."""

from __future__ import annotations

import json
import math
import random
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from unittest.mock import patch

import numpy as np
import torch

import dualkv
from codegen.tiles import HEAD_DIMS, MIXED, SHORT_WINDOW, kernel_head_dims
from dualkv import Layout
from dualkv.ops import backends, hopper
from dualkv.ops.features import Features
from tests.fuzz import dense

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
STRIDES = ("contiguous", "fused", "heads first", "unaligned", "wider rows")
MASSIVE = "massive activations"
VALUES = (
    "normal", "large scores", "small scores", "equal keys", "an outlier", "far keys", "low scores", "far scale",
    MASSIVE,
)  # fmt: skip
# Around the sizes of tiles and of the reference's chunks.
EDGES = tuple(n + d for n in (16, 32, 64, 80, 96, 112, 128, 176, 192, 256) for d in (-1, 0, 1))


def gpu_ratios(dtype, head_dim):
    """GQA ratios: on a GPU each is a kernel of its own at every native head dim, so all of them at one only."""
    if dtype == "bf16":
        return (1, 2, 3, 4, 5, 7, 8, 16) if 96 < head_dim <= 128 else (1, 4, 8)
    return (1, 4)


FEATURES = ("window", "chunk", "sinks", "softcap", "lse_grad", "head_dim_v")  # of cases, if not None or False
TREE_RATIOS = (1, 4, 8)  # likewise, of trees of more than two levels


class WrongResult(AssertionError):
    """A result that differs from float64 by more than it may."""


class NoMemory(Exception):
    """The dense results need more memory than other processes leave."""


@dataclass(frozen=True)
class Case:
    """A call of `dualkv.attention` (kind "attention") or `flash_attn_dualkv_varlen_func` (kind "compat").

    attention: `lengths` and `parent` of the segments; `sinks` are drawn about that number, in q's dtype or fp32;
    `lse_grad`: lse has a gradient too; `backend`: what computes it, where that serves it (see :func:`here`). compat:
    `lengths` [P, R_0, R_1, ...], `q_lens`, `causal`.
    """

    kind: str
    device: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    parent: tuple[int, ...] = ()
    q_lens: tuple[int, ...] = ()
    causal: bool = True
    deterministic: bool = False
    scale: float | None = None
    strides: str = "contiguous"
    values: str = "normal"
    needs: str = "qkv"
    seed: int = 0
    window: int | None = None
    chunk: int | None = None
    sinks: float | None = None
    softcap: float | None = None
    lse_grad: bool = False
    head_dim_v: int | None = None  # None: the head dim of q and k
    backend: str | None = None  # None: the first that serves the call
    few_keys: bool = False  # our kernels for many short segments run, whatever the lengths are
    batch_invariant: bool = False

    def to_json(self):
        return json.dumps(asdict(self), indent=1)

    @property
    def head_dims(self):
        return self.head_dim, self.head_dim_v or self.head_dim

    @classmethod
    def from_json(cls, text):
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(text).items()})


# ---------------------------------------------------------------- draw
def _length(rng, longest):
    kind = rng.random()
    if kind < 0.35:
        return rng.randint(0, 4)
    if kind < 0.7:
        return rng.randint(0, min(70, longest))
    if kind < 0.9:
        return min(rng.choice(EDGES), longest)
    return rng.randint(0, longest)


def _segments(rng, longest, tokens):
    """lengths, parent: groups of responses mostly, sometimes trees of up to 64 levels; at most `tokens` in all."""
    shape = rng.random()
    if shape > 0.9:
        return _deep_tree(rng, tokens)
    lengths, parent, path = [], [], []
    groups, responses = (rng.randint(10, 40), 3) if shape < 0.1 else (rng.randint(1, 4), rng.randint(0, 8))
    for _ in range(groups):
        path = [len(lengths)]
        lengths.append(_length(rng, longest))
        parent.append(-1)
        for _ in range(rng.randint(0, responses)):
            if shape > 0.7:
                path = path[: rng.randint(1, len(path))]
            parent.append(path[-1] if shape > 0.7 else path[0])
            path.append(len(lengths))
            lengths.append(_length(rng, longest))
    while sum(lengths) > tokens:
        at = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[at] //= 2
    if sum(lengths) == 0 and rng.random() < 0.9:
        lengths[-1] = 1
    return tuple(lengths), tuple(parent)


def _deep_tree(rng, tokens):
    """Short segments, most of them behind the last one; branches begin anywhere on the path."""
    parent, path = [], []
    branches = rng.choice((0.02, 0.1, 0.3))
    for s in range(rng.randint(3, 90)):
        if len(path) == 64 or (path and rng.random() < branches):
            path = path[: rng.randint(0, len(path) - 1)]
        parent.append(path[-1] if path else -1)
        path.append(s)
    lengths = [rng.choice((0, 1, 1, 2, 3, 7)) for _ in parent]
    lengths[rng.randrange(len(lengths))] += rng.randint(1, tokens // 2)
    while sum(lengths) > tokens:
        lengths[max(range(len(lengths)), key=lengths.__getitem__)] //= 2
    return tuple(lengths), tuple(parent)


def _deep(parent):
    """Whether it is a tree of more than two levels."""
    return any(up >= 0 and parent[up] >= 0 for up in parent)


def _compat(rng, longest, tokens):
    """lengths [P, R_0, ...], q_lens, causal; at most `tokens` positions in all sequences together."""
    lengths = [_length(rng, longest) for _ in range(1 + rng.randint(1, 6))]
    while lengths[0] * (len(lengths) - 1) + sum(lengths[1:]) > tokens:
        at = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[at] //= 2
    context, *own = lengths
    kind = rng.random()
    if kind < 0.35:
        q_lens = [r + (context if i == 0 else 0) for i, r in enumerate(own)]
    elif kind < 0.6:
        q_lens = own
    else:
        q_lens = [rng.randint(0, context + r) for r in own]
    return tuple(lengths), tuple(q_lens), rng.random() < 0.7


# Of kernels with features on a GPU, each set of which is a kernel of its own: dtype, native head dims, GQA ratios.
GPU_FEATURES = {
    ("bf16", (64, 64)): (1, 8),
    ("bf16", (96, 96)): (4,),
    ("bf16", (128, 128)): (1, 4, 8),
    ("bf16", (192, 192)): (8,),
    ("bf16", (192, 128)): (8,),
    ("bf16", (256, 256)): (1, 4),
    ("bf16", (512, 512)): (4,),
    ("fp16", (64, 64)): (4,),
    ("fp16", (128, 128)): (4,),
}

# Calls by cuDNN's backend: dtype, head dim, GQA ratio. Few, because cuDNN compiles for each of them, for one group or
# several and for a fixed order; and of GPU_FEATURES, whose kernels run them where cuDNN does not.
GPU_CUDNN = ("bf16", 64, 1), ("bf16", 128, 4), ("bf16", 256, 1), ("fp16", 128, 4)
CUDNN_SHARE = 0.1  # of calls that it could run
# cuDNN's results may be off by so many times the bounds of our kernels. Where our lse is held to 1e-4
# (tests/gpu/test_forward.py) cuDNN's is held to 2e-4 (tests/gpu/test_backends.py); and a sink rescales an out that was
# rounded before. The smallest bound that holds is not known.
CUDNN_BOUNDS = 2.0
FEW_KEYS_SHARE = 0.3  # of calls on a GPU
INVARIANT_SHARE = 0.15  # of calls of attention
MASSIVE_SHARE = 0.15  # of calls with another scale than a far one
LONG_SHARE = 0.3  # of calls on a GPU with a window or chunks: of more than SHORT_WINDOW keys, where tiles are others


def _features(rng, lengths):
    """Any of the features, windows and chunks from 1 to beyond the longest path."""
    names = {name for name in ("sinks", "softcap") if rng.random() < 0.3} | {rng.choice(("window", "chunk", ""))}
    kind, most = rng.random(), max(1, sum(lengths))
    size = rng.randint(1, 4) if kind < 0.2 else min(rng.choice(EDGES), most) if kind < 0.6 else rng.randint(1, most)
    drawn = {
        "window": size,
        "chunk": size,
        "sinks": rng.choice((0.0, 0.0, -4.0, 6.0)),
        "softcap": rng.choice((0.5, 5.0, 30.0, 50.0)),
    }
    return {name: value for name, value in drawn.items() if name in names}


def draw(rng, device):
    """A case for "cpu" or "cuda"; `rng` a random.Random."""
    gpu = device == "cuda"
    longest, tokens = (600, 900) if gpu else (140, 220) if rng.random() < 0.05 else (24, 80)
    kinds = ("bf16", "fp16") if gpu and rng.random() < 0.95 else tuple(DTYPES)
    common = {
        "device": device,
        "dtype": rng.choice(kinds),
        "seed": rng.getrandbits(31),
        "strides": rng.choice(STRIDES),
        "values": rng.choice((VALUES[0], *VALUES[:-1])),
        "scale": rng.choice((None, None, None, 0.02, 0.5)),
    }
    if gpu:
        native = rng.random() < 0.7
        common["head_dim"] = rng.choice((*HEAD_DIMS, 128)) if native else 8 * rng.randint(1, HEAD_DIMS[-1] // 8)
        ratio = rng.choice(gpu_ratios(common["dtype"], common["head_dim"]))
        common["kv_heads"] = rng.randint(1, 3 if ratio < 8 else 1)
    else:
        ratio = rng.choice((1, 2, 3, 5))
        common["kv_heads"] = rng.randint(1, 2)
        common["head_dim"] = 8 * rng.choice((1, 1, 2, 3, 8))
    common["heads"] = ratio * common["kv_heads"]
    if common["values"] == "far scale":
        common["scale"] = 2.0 ** (rng.uniform(-12, 8) if common["dtype"] == "fp16" else rng.uniform(-98, 98))
    if rng.random() < 0.2:
        lengths, q_lens, causal = _compat(rng, longest, tokens)
        return _with_pair(rng, Case("compat", lengths=lengths, q_lens=q_lens, causal=causal, **common))
    lengths, parent = _segments(rng, longest, tokens)
    if gpu and common["values"] == "far keys" and rng.random() < 0.5:
        # A first response so long that warp groups walk its blocks without a mask, apart from the context's last one.
        lengths, parent = (rng.randint(1, 200), rng.randint(700, 1600), rng.randint(1, 300)), (-1, 0, 0)
    if gpu and _deep(parent) and ratio not in TREE_RATIOS:
        ratio = TREE_RATIOS[1]
        common["heads"] = ratio * common["kv_heads"]
    # Each choice of gradients is a kernel of its own: few of them on a GPU.
    some = not gpu or (common["dtype"] == "bf16" and common["head_dim"] == 128)
    needs = rng.choice(("qkv", "qkv", "q", "kv", "k", "v") if some else ("qkv",))
    case = Case(
        "attention", lengths=lengths, parent=parent, needs=needs, deterministic=rng.random() < 0.4, **common
    )  # fmt: skip
    case = _with_pair(rng, case)
    kernels = case.dtype, kernel_head_dims(*case.head_dims)
    if gpu and (ratio not in GPU_FEATURES.get(kernels, ()) or needs != "qkv"):
        return _by_cudnn(rng, case)
    features = _features(rng, lengths) if rng.random() < 0.7 else {}
    return _by_cudnn(rng, replace(case, lse_grad=rng.random() < 0.3, **features))


def _by_cudnn(rng, case):
    """Return the case, or sometimes a call for cuDNN's backend. It is drawn last, so that the other cases of a seed
    stay."""
    forms = [form for form in GPU_CUDNN if form[0] == case.dtype and case.device == "cuda"]
    if not forms or case.softcap is not None or rng.random() >= CUDNN_SHARE:
        return case
    _, head_dim, ratio = rng.choice(forms)
    heads = ratio * case.kv_heads
    return replace(case, backend="cudnn", head_dim=head_dim, head_dim_v=None, heads=heads, needs="qkv")


def here(case):
    """The case as this machine runs it: without its backend where that does not serve the call."""
    if case.backend is None or (case.device == "cuda" and not torch.cuda.is_available()):
        return replace(case, backend=None)
    q, v, dlse = (torch.empty(1, 1, d, dtype=DTYPES[case.dtype], device=case.device) for d in (*case.head_dims, 1))
    reason = backends.BACKENDS[case.backend].unsupported(
        q, v, Features(softcap=case.softcap), dlse if case.lse_grad else None
    )
    return replace(case, backend=None) if reason else case


def _with_pair(rng, case):
    """Draw another head dim for v sometimes, more often where it may be a native pair. The larger one stays, and with
    it the kernels that pad."""
    if rng.random() >= (0.6 if case.head_dim in dict(MIXED) else 0.35):
        return case
    smaller = [d for d in (8, 64, 96, 128) if d < case.head_dim]
    if not smaller:
        return replace(case, head_dim_v=8 * rng.randint(1, 4)) if case.device == "cpu" else case
    other = rng.choice((*smaller, 8 * rng.randint(1, case.head_dim // 8)))
    if rng.random() < 0.7:
        return replace(case, head_dim_v=other)
    return replace(case, head_dim=other, head_dim_v=case.head_dim)


# ---------------------------------------------------------------- run
def _strided(x, strides):
    """Copy the values into the strides that another program might use."""
    if strides == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if strides == "unaligned":
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if strides == "wider rows":
        return x.new_full((*x.shape[:2], x.shape[2] + 8), float("nan"))[..., : x.shape[2]].copy_(x)
    return x


def inputs(case, *shapes):
    """q, then keys and values in turns, of [rows, heads], and the gradient of the output, all from the case's seed."""
    generator = torch.Generator(case.device).manual_seed(case.seed)
    of_qk, of_v = case.head_dims

    def random(rows, heads, head_dim):
        x = torch.randn(rows, heads, head_dim, device=case.device, dtype=torch.float32, generator=generator)
        return x.to(DTYPES[case.dtype])

    q, *kv = [random(*shape, of_v if at and at % 2 == 0 else of_qk) for at, shape in enumerate(shapes)]
    keys = kv[0]
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    if case.values == "large scores":
        q.mul_(8)
    elif case.values == "small scores":
        q.mul_(1e-3)
    elif case.values == "equal keys" and len(keys):
        keys.copy_(keys[:1].expand_as(keys).clone())
    elif case.values == "an outlier" and len(keys):
        keys[case.seed % len(keys)].mul_(40)
    elif case.values == "far keys":
        _far_keys(case, q, kv[::2], scale)
    elif case.values == MASSIVE:
        _massive(case, q, kv, scale)
    elif case.values == "low scores":
        q[..., 0], keys[..., 0] = (sign * (1000 / scale) ** 0.5 for sign in (1, -1))
    elif case.values == "far scale":
        power = round(math.log2(scale) + math.log2(case.head_dim) / 2)
        q.mul_(2.0 ** -(power // 2))
        for x in kv[::2]:
            x.mul_(2.0 ** -(power - power // 2))
    tensors = [q, *kv]
    if case.strides == "fused" and case.kind == "attention":
        columns = [x.flatten(1) for x in tensors]
        fused = torch.cat(columns, 1).split([x.shape[1] for x in columns], 1)
        tensors = [x.unflatten(1, (-1, like.shape[2])) for x, like in zip(fused, tensors, strict=True)]
    else:
        tensors = [_strided(x, case.strides) for x in tensors]
    return tensors, _strided(random(*shapes[0], of_v), case.strides)


def far_heights(case, n):
    """[n] powers of two: about what every row's score of a key is, 0 of most keys, up to 2^130 of a few.

    Among them are pairs just below fp32's range and a little apart, one key near the end of the first segment and one
    behind it: whichever of the two a row meets first, the other one can move its reference by more than 2^126.
    """
    rng, heights = random.Random(case.seed), np.zeros(n)
    if rng.random() < 0.7:
        first = rng.uniform(118, 128)
        pair = [first, first + rng.uniform(-3, 6)]
        end = min(case.lengths[0], n - 1)
        heights[[rng.randint(max(end - 64, 0), end), rng.randint(end, n - 1)]] = (
            pair if rng.random() < 0.5 else pair[::-1]
        )
    else:
        for _ in range(rng.randint(1, 4)):
            heights[rng.randrange(n)] = rng.uniform(-130, 130)
    return heights


def _far_keys(case, q, parts, scale):
    """Every row's score of a key becomes the key's height, by one column of q and k, and a little noise."""
    carrier, ends = 16.0, np.cumsum([0, *map(len, parts)])
    if ends[-1] == 0:
        return
    heights = far_heights(case, int(ends[-1]))
    q.mul_(0.05)[..., 0] = carrier
    for x, begin, end in zip(parts, ends, ends[1:], strict=False):
        column = torch.from_numpy(heights[begin:end] * math.log(2) / (carrier * scale))
        x.mul_(0.05)[..., 0] = column[:, None].to(x)


def _massive(case, q, kv, scale):
    """Scores as layers of trained models have them: attention sinks, and channels that are large for all tokens.

    A sink is a sequence's first token, or one or two others. Most queries of most heads are like its key, by one
    column. In a layer of SmolLM2-135M (`tools.bench.real_layers`) its scores are up to 2^60 above a row's median, its
    key has a seventh of the median norm, its value a thirteenth. Heights are drawn beyond that, and keys of a hundred
    times the norm. Where another column is large in all keys of a head, as by the key biases of Qwen2.5, a row's scores
    have a large common part, which is rounded.
    """
    rng, generator = random.Random(case.seed), torch.Generator(case.device).manual_seed(case.seed + 2)
    n = sum(map(len, kv[::2]))
    if n == 0:
        return

    def random_like(*shape):
        return torch.randn(*shape, generator=generator, device=case.device)

    def by_head(heads, low, high):
        """[heads] powers of two between these."""
        return torch.tensor([2.0 ** rng.uniform(low, high) for _ in range(heads)], device=case.device)

    begins = np.cumsum([0, *case.lengths])[:-1]
    roots = [begin for begin, up in zip(begins, case.parent or (-1,), strict=False) if up < 0 and begin < n]
    sinks = [*roots, *(rng.randrange(n) for _ in range(rng.randint(0, 2)))]
    alike = by_head(case.kv_heads, 0, 5)
    heights = torch.tensor(
        [0.0 if rng.random() < 0.2 else rng.uniform(5, 130) for _ in range(case.kv_heads)], device=case.device
    )
    of_q = alike.repeat_interleave(case.heads // case.kv_heads) * by_head(case.heads, -2, 0)
    q[..., 0] = (of_q * (1 + 0.3 * random_like(len(q), case.heads))).to(q)
    keys, values = (torch.cat(kv[at::2]).float() for at in (0, 1))
    keys[..., 0] *= 0.1
    keys[sinks] *= 2.0 ** -rng.uniform(0, 3)
    keys[sinks, :, 0] = heights * math.log(2) / (alike * scale)
    values[sinks] *= 2.0 ** -rng.uniform(0, 8)
    if rng.random() < 0.5:
        columns = by_head(case.kv_heads, 3, 8.5)
        keys[..., 1] = columns * (1 + 0.02 * random_like(n, case.kv_heads))
        q[..., 1] = (by_head(case.heads, -3, rng.choice((4, 8.5))) * (1 + 0.1 * random_like(len(q), case.heads))).to(q)
    for at, whole in enumerate((keys, values)):
        for part, x in zip(kv[at::2], whole.split([len(part) for part in kv[at::2]]), strict=True):
            part.copy_(x)


def segment_mask(lengths, parent, window=None, chunk=None):
    """[T, T] bool: a row sees the rows before it, and itself, of its own segment and of those on the path above it, as
    far as the window reaches or the chunk begins."""
    on_path = np.zeros((len(lengths), len(lengths)), bool)
    for s, up in enumerate(parent):
        if up >= 0:
            on_path[s] = on_path[up]
        on_path[s, s] = True
    segment = np.repeat(np.arange(len(lengths)), lengths)
    mask = on_path[segment][:, segment] & np.tri(len(segment), dtype=bool)
    position = mask.sum(1) - 1
    if window is not None:
        mask &= position[:, None] - position < window
    if chunk is not None:
        mask &= position[:, None] // chunk == position // chunk
    return mask


def compat_mask(context, k_lens, q_lens, causal):
    """[sum(q_lens), context + sum(k_lens)] bool."""
    begins = context + np.cumsum(k_lens) - k_lens
    key = np.arange(context + sum(k_lens))
    rows = [np.zeros((0, len(key)), bool)]
    for begin, own, n in zip(begins, k_lens, q_lens, strict=True):
        position = np.where(key < context, key, context + key - begin)
        mine = (key < context) | ((key >= begin) & (key < begin + own))
        last = (context + own - n + np.arange(n))[:, None] if causal else np.full((n, 1), len(key))
        rows.append(mine & (position <= last))
    return np.concatenate(rows)


@contextmanager
def poisoned(wanted=True):
    """torch.empty fills what it makes with NaN or large integers, and backwards order their sums."""
    before, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(wanted or before, warn_only=wanted or warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _few_keys(wanted):
    """All layouts take the kernels of short segments, or none does."""
    return patch.multiple(hopper, FEW_KEYS_ROWS=0 if wanted else 2**62, FEW_KEYS_WALK=0, FEW_KEYS_COST=0)


def _attention(case):
    """-> call() -> {name: tensor}; dense results by name; which results must repeat bit for bit."""
    layout = Layout.from_segments([0, *np.cumsum(case.lengths).tolist()], case.parent, case.device)
    total = layout.num_tokens
    (q, k, v), dout = inputs(case, (total, case.heads), *[(total, case.kv_heads)] * 2)
    leaves = {n: x.detach().requires_grad_(n in case.needs) for n, x in zip("qkv", (q, k, v), strict=True)}
    generator = torch.Generator(case.device).manual_seed(case.seed + 1)
    random = partial(torch.randn, device=case.device, generator=generator)
    wanted, sinks, dlse = {n: leaves[n] for n in case.needs}, None, None
    if case.sinks is not None:
        narrow = torch.float32 if case.seed % 2 and case.dtype != "fp64" else q.dtype
        sinks = wanted["sinks"] = (random(case.heads) + case.sinks).to(narrow).requires_grad_()
    if case.lse_grad:
        dlse = random(case.heads, total).to(torch.float64 if case.dtype == "fp64" else torch.float32)

    def call():
        out, lse = dualkv.attention(
            *leaves.values(), layout, case.scale, case.deterministic, window=case.window, chunk=case.chunk, sinks=sinks,
            softcap=case.softcap, batch_invariant=case.batch_invariant, return_lse=True, backend=case.backend,
        )  # fmt: skip
        outputs, given = ((out,), (dout,)) if dlse is None else ((out, lse), (dout, dlse))
        grads = torch.autograd.grad(outputs, wanted.values(), given)
        return {"out": out.detach(), "lse": lse.detach(), **{f"d{n}": g for n, g in zip(wanted, grads, strict=True)}}

    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    mask = torch.from_numpy(segment_mask(case.lengths, case.parent, case.window, case.chunk)).to(case.device)
    want = dense.attention(
        q, k, v, mask, scale, dout, 1.0, dlse, None if sinks is None else sinks.detach(), case.softcap
    )
    exact = {"out", "lse", "dsinks"} | ({"dq", "dk", "dv"} if case.deterministic else set())
    if case.backend == "cudnn":
        want = {name: replace(result, bound=CUDNN_BOUNDS * result.bound) for name, result in want.items()}
    else:
        exact |= {"dk", "dv"}
    return call, want, set() if case.dtype in ("fp32", "fp64") else exact


def compat_inputs(case):
    """q, keys and values of the context and of sequences; dout"""
    context, *own = case.lengths
    rows = context, context, sum(own), sum(own)
    return inputs(case, (sum(case.q_lens), case.heads), *[(n, case.kv_heads) for n in rows])


def _compat_call(case):
    context, *own = case.lengths
    q_lens = list(case.q_lens)
    tensors, dout = compat_inputs(case)
    leaves = [x.detach().requires_grad_() for x in tensors]
    cu = [torch.tensor([0, *np.cumsum(x).tolist()], dtype=torch.int32, device=case.device) for x in (q_lens, own)]

    def call():
        out = dualkv.flash_attn_dualkv_varlen_func(
            *leaves, *cu, max(q_lens), context, max(own), softmax_scale=case.scale, causal=case.causal
        )
        dq, *dkv = torch.autograd.grad(out, leaves, dout)
        return {"out": out.detach(), "dq": dq, "dk": torch.cat(dkv[::2]), "dv": torch.cat(dkv[1::2])}

    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    mask = torch.from_numpy(compat_mask(context, own, q_lens, case.causal)).to(case.device)
    q, kc, vc, kd, vd = tensors
    # Copies of the context add gradients that were rounded on their own. Without a mask PyTorch's attention runs, a
    # sequence at a time, and rounds the gradient of each query head before it adds up those of a KV head. On a GPU that
    # is its memory-efficient attention where values have another head dim, which rounds dS times the scale.
    roundings = 2.0 if case.causal else 4.0
    keys, values = torch.cat([kc, kd]), torch.cat([vc, vd])
    scaled_dS = not case.causal and case.device == "cuda" and len(set(case.head_dims)) == 2
    want = dense.attention(q, keys, values, mask, scale, dout, roundings, scaled_dS=scaled_dS)
    return call, want, set()


def run(case):
    """The largest error of any result as a part of what it may be.

    Raises:
        WrongResult: that is above 1, a result's shape or dtype is not the input's, or two runs differ.
        NoMemory: there is nothing to compare with. If the call itself runs out of memory, its own error is raised.
    """
    case = here(case)
    try:
        call, want, exact = _attention(case) if case.kind == "attention" else _compat_call(case)
    except torch.OutOfMemoryError as error:
        raise NoMemory from error
    with poisoned(case.deterministic and case.device == "cuda"), _few_keys(case.few_keys):
        got = call()
        again = call() if case.device == "cuda" and exact else got
    worst = 0.0
    for name, x in got.items():
        if x.shape != want[name].value.shape:
            raise WrongResult(f"{name} has shape {tuple(x.shape)}, expected {tuple(want[name].value.shape)}")
        if name not in ("lse", "dsinks") and x.dtype != DTYPES[case.dtype]:
            raise WrongResult(f"{name} is {x.dtype}, expected {case.dtype}")
        ratio = want[name].ratio(x)
        if not ratio <= 1.0:
            raise WrongResult(f"{name} is off by {ratio:.3g} times what it may be")
        if name in exact and not torch.equal(x, again[name]):
            raise WrongResult(f"{name} differs from run to run")
        worst = max(worst, ratio)
    return worst


# ---------------------------------------------------------------- reduce
def _without(items, at):
    return items[:at] + items[at + 1 :]


def _simpler(case):
    """Simpler forms of the case, the largest steps first."""
    base = asdict(case)

    def changed(**change):
        return Case(**{**base, **change})

    for s in reversed(range(len(case.lengths))):
        if case.kind == "attention":
            up = case.parent[s]
            parent = [up if p == s else p for p in case.parent]
            parent = tuple(p - (p > s) for p in _without(tuple(parent), s))
            if up >= 0 or s not in case.parent:  # a prompt's responses would have none
                yield changed(lengths=_without(case.lengths, s), parent=parent)
        elif s > 0 and len(case.lengths) > 2:
            yield changed(lengths=_without(case.lengths, s), q_lens=_without(case.q_lens, s - 1))
    for s, n in enumerate(case.lengths):
        for less in {n // 2, n - n // 8, n - 1} - {n}:
            if less >= 0:
                lengths = (*case.lengths[:s], less, *case.lengths[s + 1 :])
                fits = tuple(min(q, lengths[0] + r) for q, r in zip(case.q_lens, lengths[1:], strict=False))
                yield changed(lengths=lengths, q_lens=fits)
    for name, value in (
        ("backend", None), ("kv_heads", 1), ("strides", "contiguous"), ("values", "normal"), ("deterministic", False),
        ("scale", None), ("window", None), ("chunk", None), ("sinks", None), ("softcap", None), ("lse_grad", False),
        ("needs", "qkv"), ("few_keys", False), ("batch_invariant", False), ("head_dim_v", None),
        ("dtype", "bf16" if case.device == "cuda" else "fp64"), ("head_dim", 64 if case.device == "cuda" else 8),
    ):  # fmt: skip
        if base[name] != value:
            heads = case.heads // case.kv_heads * value if name == "kv_heads" else case.heads
            yield changed(**{"heads": heads, name: value})
    if case.heads > case.kv_heads:
        yield changed(heads=case.kv_heads)


def reduce(case, fails, tries=1000):
    """A case that still fails and of which nothing simpler does (as far as `tries` calls of `fails` reach)."""
    found = True
    while found:
        found = False
        for candidate in _simpler(case):
            tries -= 1
            if tries < 0:
                return case
            if fails(candidate):
                case, found = candidate, True
                break
    return case


def seeded(seed, index, device):
    """Case `index` of a run: the same whatever ran before it."""
    rng = random.Random(f"{seed}/{index}/{device}")
    case = draw(rng, device)
    case = replace(case, few_keys=device == "cuda" and rng.random() < FEW_KEYS_SHARE)
    case = _longer(rng, case) if device == "cuda" and (case.window or case.chunk) else case
    case = _with_sinks(random.Random(f"{seed}/{index}/{device}/{MASSIVE}"), case)
    return _invariant(random.Random(f"{seed}/{index}/{device}/batch_invariant"), case)


def _invariant(rng, case):
    """Draw a batch-invariant call sometimes, where the kernel of trees is compiled. Other cases of a seed stay."""
    of_trees = case.device == "cpu" or case.heads // case.kv_heads in TREE_RATIOS
    asked = case.kind == "attention" and case.backend is None and of_trees and rng.random() < INVARIANT_SHARE
    return replace(case, batch_invariant=asked, few_keys=case.few_keys and not asked)


def _with_sinks(rng, case):
    """Draw massive activations sometimes; on a GPU in prompts of several blocks, so that rows meet a sink late. Other
    cases of a seed stay."""
    if case.values == "far scale" or rng.random() >= MASSIVE_SHARE:
        return case
    if case.device == "cuda" and case.kind == "attention" and not _deep(case.parent) and rng.random() < 0.7:
        lengths = rng.randint(200, 1000), rng.randint(1, 300), rng.randint(1, 300)
        case = replace(case, lengths=lengths, parent=(-1, 0, 0))
    return replace(case, values=MASSIVE)


def _longer(rng, case):
    """Draw longer segments sometimes, and a window or chunks of more than SHORT_WINDOW keys that hide some of them."""
    if rng.random() >= LONG_SHARE:
        return case
    lengths = rng.randint(1, 1100), rng.randint(1100, 1700), rng.randint(1, 900)
    size = rng.randint(SHORT_WINDOW + 1, sum(lengths[:2]) - 1)
    sizes = {name: size for name in ("window", "chunk") if getattr(case, name)}
    return replace(case, lengths=lengths, parent=(-1, 0, 0), **sizes)
