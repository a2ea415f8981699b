"""Values of another head dim where an implementation takes equal ones: padded, and cut again."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from codegen import tiles
from dualkv import Layout
from dualkv.ops import composition, dispatch, hopper, padding, reference
from dualkv.ops.features import Window
from tests import oracle

TREE = Layout.from_segments([0, 3, 5, 5, 9, 10, 12], [-1, 0, 1, 2, 0, -1])


def test_pairs_go_to_the_kernel_that_costs_least():
    wanted = [(192, 128), (160, 64), (192, 136), (128, 192), (96, 64), (128, None), (256, 8)]
    native = [(192, 128), (192, 128), (192, 192), (192, 192), (96, 96), (128, 128), (256, 256)]
    assert [tiles.kernel_head_dims(*pair) for pair in wanted] == native
    assert padding.for_kernel(160, 64) == (160, 64)
    assert padding.for_kernel(64, 80) == (80, 80)
    for bad in ((192, 12), (0, 128), (520, 128)):
        with pytest.raises(ValueError, match=f"head_dim is {min(bad, key=lambda d: not (d % 8 or not 0 < d <= 256))}"):
            tiles.kernel_head_dims(*bad)


@pytest.mark.parametrize("kernel", [True, False], ids=["hopper", "composition"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(24, 16), (8, 24), (16, 16)])
@pytest.mark.parametrize("gradients", ["qkv", "q", "kv"])
def test_the_ops_on_a_gpu(monkeypatch, kernel, head_dim, head_dim_v, gradients):
    """The reference in the place of what runs there: it gets equal head dims and the scale of the true ones."""
    seen = []

    def taking(function):
        def run(**call):
            seen.append({x.shape[2] for x in call.values() if isinstance(x, torch.Tensor) and x.dim() == 3})
            return function(**call)

        return run

    module = hopper if kernel else composition
    for name in ("forward", "backward"):
        monkeypatch.setattr(module, name, taking(getattr(reference, name)))
    monkeypatch.setattr(hopper, "unsupported", lambda *_: None if kernel else "this test")
    monkeypatch.setattr(composition, "unsupported", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda q: nullcontext())
    torch.manual_seed(0)
    rows = TREE.num_tokens
    q, k, v = (torch.randn(rows, *shape).double() for shape in ((4, head_dim), (2, head_dim), (2, head_dim_v)))
    dout, dlse, sinks = (
        torch.randn(rows, 4, head_dim_v).double(),
        torch.randn(4, rows).double(),
        torch.randn(4).double(),
    )
    softcap = 1.5 if kernel else None  # which the composition does not compute
    layout, features = (TREE.offsets, TREE.parent, 0.3), (4, None, sinks, softcap)
    out, lse = dispatch._fwd_cuda(q, k, v, *layout, False, *features)
    grads = dispatch._bwd_cuda(dout, q, k, v, out, lse, *layout, False, gradients, *features, False, dlse)
    want = oracle.attention_and_grads(
        q, k, v, TREE.offsets, TREE.parent, 0.3, dout, dlse, sinks, window=4, softcap=softcap
    )  # fmt: skip
    assert Window(4).hides(TREE._segments.longest_path)
    assert seen == [{max(head_dim, head_dim_v)}] * 2
    for name, got, right in zip(("out", "lse", "q", "k", "v", "dsinks"), (out, lse, *grads), want, strict=True):
        if name in "qkv" and name not in gradients:
            assert got.shape == (0,)
        else:
            assert got.is_contiguous()
            torch.testing.assert_close(got, right)
