"""`torch.ops.dualkv.fwd` and `torch.ops.dualkv.bwd`, and the backends that compute them; `dualkv.ops.dispatch` has the
schema of both."""

from dualkv.ops.dispatch import check_scale

__all__ = ["check_scale"]
