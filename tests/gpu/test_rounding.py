"""Every value of the results is within what rounding to 16 bits explains, as float64 computes it value by value.

A bound in units of the sum of magnitudes alone would be too narrow for dq and dk. The backward takes dpsum from the
rounded out, and that error is there in full where dP - dpsum is small.
"""

from __future__ import annotations

import pytest
import torch

import dualkv
from codegen.spec import backward_specs, forward_spec
from dualkv import Layout

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (64, 128, 256)
LENGTHS = [300, 20], [[24, 37, 1, 70, 210], [133, 18]]
TREE = [0, 145, 269, 306, 307, 377, 487, 507, 640], [-1, 0, 1, 1, 0, 4, 4, 0]
NAMES = "out", "dq", "dk", "dv"
FP32 = 2.0**-14  # relative, of scores of up to some dozens and of sums in fp32


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    compile_all(forward_spec(dtype, d, 4, trees=tree) for dtype in DTYPES for d in HEAD_DIMS for tree in (False, True))
    compile_all(s for dtype in DTYPES for d in HEAD_DIMS for fixed in (False, True)
                for s in backward_specs(dtype, d, fixed).present)  # fmt: skip


def exact_and_bounds(q, k, v, dout, visible_end, dtype):
    """float64 out, dq, dk, dv [T, heads, D], and how far each value may be off by rounding.

    P, dS and the results are rounded to 16 bits: by `unit` of their size, in fp16 by `least` at least. At head dim 256
    and above dS is made of a rounded P.
    """
    unit, least = torch.finfo(dtype).eps / 2, (2.0**-25 if dtype == torch.float16 else 0.0)
    ratio, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5
    q, k, v, dout = (x.double().transpose(0, 1) for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(ratio, 0) for x in (k, v))
    row = torch.arange(q.shape[1], device=q.device)
    mask = (row[None] <= row[:, None]) & (row[:, None] < visible_end[None])
    p = torch.where(mask, q @ k.mT * scale, -torch.inf).softmax(-1)
    out, dp = p @ v, dout @ v.mT
    dpsum = (dout * out).sum(-1, keepdim=True)
    ds = p * (dp - dpsum)

    off_p = torch.where(mask, p * (unit + FP32) + least, 0.0)
    off_out = off_p @ v.abs() + unit * out.abs() + least
    off_dpsum = (dout.abs() * off_out).sum(-1, keepdim=True) + FP32 * (dout * out).abs().sum(-1, keepdim=True)
    off_dp = FP32 * (dout.abs() @ v.mT.abs())
    off_ds = torch.where(mask, p * (off_dpsum + off_dp) + (off_p + p * unit) * (dp - dpsum).abs() + least, 0.0)

    exact = [out, ds @ k * scale, ds.mT @ q * scale, p.mT @ dout]
    off = [off_out, off_ds @ k.abs() * scale, off_ds.mT @ q.abs() * scale, off_p.mT @ dout.abs()]
    for results in (exact, off):
        results[2:] = [x.unflatten(0, (-1, ratio)).sum(1) for x in results[2:]]
    off[1:] = [x + unit * y.abs() + least for x, y in zip(off[1:], exact[1:], strict=True)]
    return [x.transpose(0, 1) for x in exact], [x.transpose(0, 1) for x in off]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [False, True])
def test_every_value_is_within_what_rounding_explains(tree, dtype, head_dim, seed):
    layout = Layout.from_segments(*TREE, "cuda") if tree else Layout.from_lengths(*LENGTHS, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(layout.num_tokens, heads, head_dim) for heads in (8, 2, 2, 8)]
    tensors = [torch.randn(x, device="cuda", generator=generator).to(DTYPES[dtype]) for x in shapes]
    leaves = [x.requires_grad_() for x in tensors[:3]]
    out = dualkv.attention(*leaves, layout, deterministic=seed % 2 == 1)
    got = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
    with torch.no_grad():
        exact, off = exact_and_bounds(*tensors, layout.visible_end, DTYPES[dtype])
    worst = {n: float(((x - y).abs() / z).max()) for n, x, y, z in zip(NAMES, got, exact, off, strict=True)}
    print(worst)
    assert max(worst.values()) <= 1.0, worst
