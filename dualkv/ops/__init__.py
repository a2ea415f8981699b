"""`torch.ops.dualkv.fwd` and `torch.ops.dualkv.bwd`: schema, checks, dispatch, fake and autograd.

    fwd(q, k, v, offsets, parent, softmax_scale, deterministic=False) -> (out, lse)
    bwd(dout, q, k, v, out, lse, offsets, parent, softmax_scale, deterministic=False, gradients="qkv") -> (dq, dk, dv)

q, dout, out [T, H, D]; k, v [T, Hk, D]; lse [H, T] fp32, natural log (fp64 for fp64 inputs). `gradients` names the
inputs whose gradients are asked, in the order of "qkv"; those of the others come back empty, of shape [0].

`offsets` [S+1] and `parent` [S] are the host tensors of a :class:`dualkv.Layout`, wherever q, k, v live: nothing is
read back from a GPU, and inductor, which never puts an op with CPU inputs into a CUDA graph of its own, cannot replay
one layout's work for another. What a layout needs on the device is made at its first call and kept as long as those two
tensors.
"""

from dualkv.ops.dispatch import check_scale

__all__ = ["check_scale"]
