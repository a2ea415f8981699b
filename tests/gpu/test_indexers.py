"""Attention to sets on a GPU: compiled FlexAttention in bf16 against PyTorch's chunks in fp32."""

from __future__ import annotations

import pytest
import torch

from dualkv import Layout
from dualkv.integrations.transformers import selected
from dualkv.ops import compiling

pytestmark = pytest.mark.any_gpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("kv_heads", "dims", "sets", "own"), [(8, (192, 128), 1, None), (2, (128, 128), 2, 700)])
def test_flex_reads_sets(kv_heads: int, dims: tuple[int, int], sets: int, own: int | None) -> None:
    """Latent attention's head dims with sinks; blocks' form without, of the last rows alone."""
    layout = Layout.from_segments([0, 1000, 1300, 1350, 1700], [-1, 0, 0, 2], "cuda")
    rows = layout.num_tokens if own is None else own
    torch.manual_seed(0)
    q, dout = (torch.randn(rows, 8, dim, device="cuda").bfloat16() for dim in dims)
    k, v = (torch.randn(1700, kv_heads, dim, device="cuda").bfloat16() for dim in dims)
    at = layout.position_ids[-rows:]
    chosen = torch.rand(sets, rows, layout._segments.longest_path, device="cuda") < 0.3
    chosen[:, torch.arange(rows), at] = True
    words = selected.packed_bits(chosen & (torch.arange(chosen.shape[2], device="cuda") <= at[:, None]))
    sinks = None if own else torch.randn(8, device="cuda")
    call, failed = (words, layout._segments, dims[0] ** -0.5, sinks), len(compiling.failures)
    out, lse = selected._forward_with_flex(*call, q, k, v)
    found = [out, lse, *selected._backward_with_flex(*call, dout, q, k, v, out, lse)]
    wide, wide_lse = selected._forward_in_chunks(*call, *(x.float() for x in (q, k, v)))
    given = [x.float() for x in (dout, q, k, v)]
    expected = [wide, wide_lse, *selected._backward_in_chunks(*call, *given, wide, wide_lse)]
    assert len(compiling.failures) == failed
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), found, expected, strict=True):
        assert (x.float() - y).norm() <= 0.01 * y.norm(), name  # bf16 rounds to 2^-9
