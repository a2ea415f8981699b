"""Inductor's CUDA graphs: every op that takes a layout's host tensors stays out of them."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx.experimental.proxy_tensor import make_fx

import dualkv
import dualkv.integrations.transformers  # defines ops too

OPS = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("dualkv::"))
LAYOUT = dualkv.Layout.from_lengths([4], [[2, 2]])


def test_the_ops_are_known():
    assert {"dualkv::fwd", "dualkv::bwd", "dualkv::position_ids", "dualkv::rotary_lengths"} <= set(OPS)


@pytest.mark.parametrize("name", OPS)
def test_ops_that_take_host_tensors_stay_out_of_cuda_graphs(name):
    """A graph would replay the plan of the layout that it was recorded with."""
    op = getattr(torch.ops.dualkv, name.removeprefix("dualkv::")).default
    takes = "offsets" in {argument.name for argument in op._schema.arguments}
    assert (torch.Tag.cudagraph_unsafe in op.tags) == takes


@pytest.mark.parametrize("backward", [False, True])
def test_inductor_sees_them_in_a_graph(backward):
    q, k, v = torch.randn(3, 8, 2, 8)
    out, lse = torch.ops.dualkv.fwd(q, k, v, LAYOUT.offsets, LAYOUT.parent, 1.0)

    def call(q, offsets, parent):
        if backward:
            return torch.ops.dualkv.bwd(q + 1, q, k, v, out, lse, offsets, parent, 1.0)
        return torch.ops.dualkv.fwd(q + 1, k, v, offsets, parent, 1.0)

    found = get_first_incompatible_cudagraph_node(make_fx(call)(q, LAYOUT.offsets, LAYOUT.parent))
    assert found.target is (torch.ops.dualkv.bwd if backward else torch.ops.dualkv.fwd).default
