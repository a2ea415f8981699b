"""`torch.ops.dualkv.fwd` and `torch.ops.dualkv.bwd`: schema, checks, dispatch, fake and autograd.

    fwd(q, k, v, offsets, parent, softmax_scale, deterministic=False,
        window=None, chunk=None, sinks=None, softcap=None, backend=None) -> (out, lse)
    bwd(dout, q, k, v, out, lse, offsets, parent, softmax_scale, deterministic=False, gradients="qkv",
        window=None, chunk=None, sinks=None, softcap=None, dlse=None, backend=None) -> (dq, dk, dv, dsinks)

q [T, H, D]; k [T, Hk, D]; v [T, Hk, Dv]; dout, out [T, H, Dv]; sinks [H] in q's dtype or fp32; lse [H, T] fp32, natural
log, sinks included (fp64 for fp64 inputs). dlse [H, T] is the gradient of lse, None for zero. `gradients` names the
inputs whose gradients are computed, in the order of "qkv"; the other gradients are empty, of shape [0]. dsinks is [H]
in the dtype of lse, or [0] without sinks. `backend` names what computes the call, None for the first one that serves it
(`dualkv.ops.backends`). :func:`dualkv.attention` has the formulas.

`offsets` [S+1] and `parent` [S] are the host tensors of a :class:`dualkv.Layout`, on the CPU for any device of q, k, v.
So nothing is read back from a GPU. And inductor never puts an op with CPU inputs into a CUDA graph of its own, so it
cannot replay one layout's work for another. A layout's plan is made on the device at the layout's first call, and is
kept as long as these two tensors.
"""

from dualkv.ops.dispatch import check_scale

__all__ = ["check_scale"]
