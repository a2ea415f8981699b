"""Dense float64 attention under any mask, and how far from it a computation in fewer bits may be, element by element.

The bounds follow the roundings of FlashAttention's algorithm, so a single wrong element shows whatever its neighbours
are. With u the unit roundoff of the inputs' dtype, and r the relative error of a probability (from that of its score):

    out     P rounded before P V, the result rounded:            (u + r) P|V| + u|out|
    delta   rowsum(dO * out) of the rounded out:                 |dO| . (bound of out)
    dV      P rounded before P^T dO, the result rounded:         P^T (u + r)|dO| + u|dV|
    dS      from P, dP = dO V^T and delta, rounded twice:        E = 2u|dS| + r P(|dP| + |delta|) + P (error of delta)
    dQ, dK  scale dS K and scale dS^T Q, the result rounded:     scale E|K| + u|dQ|, scale E^T|Q| + u|dK|
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Relative error of sums in the wide type (fp32; fp64 for fp64 inputs) over some hundred terms, tensor cores included.
SUMS = {torch.float32: 2.0**-19, torch.float64: 2.0**-47}
SLACK = 1.25  # second-order terms


@dataclass(frozen=True)
class Result:
    """`value` float64, and `bound`: how far from it each element may be."""

    value: torch.Tensor
    bound: torch.Tensor

    def ratio(self, got):
        """The largest error as a part of its bound; infinite for a value that is not finite."""
        if got.numel() == 0:
            return 0.0
        error = (got.double() - self.value).abs()
        worst = (error / self.bound.clamp(min=1e-300)).nan_to_num(float("inf"), float("inf")).max()
        return worst.item()


def attention(q, k, v, mask, scale, dout, roundings=1.0):
    """{out, lse, dq, dk, dv}: a Result each.

    q, dout [Tq, H, D], k, v [Tk, Hk, D] of any one dtype; mask [Tq, Tk] bool, True where a query sees a key, at least
    one a query. `roundings` multiplies u, for computations that round partial results too.
    """
    info = torch.finfo(q.dtype)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    u, sums = roundings * info.eps / 2, SUMS[wide]
    # The smallest steps: of subnormals in the inputs' dtype, and what the wide type may flush to zero.
    tiny = info.smallest_normal * info.eps / 2 + torch.finfo(wide).smallest_normal
    ratio = q.shape[1] // k.shape[1]
    q, k, v, dout = (x.double().transpose(0, 1) for x in (q, k, v, dout))  # [heads, rows, D]
    k, v = (x.repeat_interleave(ratio, 0) for x in (k, v))

    def by_kv_head(x):
        """[H, Tk, D] -> [Tk, Hk, D]: sums over the query heads of a KV head."""
        return x.unflatten(0, (-1, ratio)).sum(1).transpose(0, 1)

    seen = mask.to(torch.float64)
    size = (q.abs() @ k.abs().mT * scale).masked_fill(~mask, 0)  # of a score's terms
    scores = (q @ k.mT * scale).masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(-1, keepdim=True)
    p = (scores - lse).exp()
    out = p @ v
    r = 2 * sums * (1 + F.pad(size, (0, 1)).amax(-1, keepdim=True) + lse.abs())
    p_v = p @ v.abs()
    out_bound = (u + r + sums) * p_v + u * out.abs() + tiny * (seen @ v.abs() + 1)

    dp, delta = dout @ v.mT, (dout * out).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dp_size, delta_size = dout.abs() @ v.abs().mT, (dout.abs() * p_v).sum(-1, keepdim=True)
    delta_error = (dout.abs() * out_bound).sum(-1, keepdim=True) + sums * delta_size
    ds_error = 2 * u * ds.abs() + p * ((r + sums) * (dp_size + delta_size) + delta_error)
    ds_error += tiny * (1 + dp_size + delta_size) * seen
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, p.mT @ dout
    dq_bound = scale * (ds_error + sums * ds.abs()) @ k.abs()
    dk_bound = scale * (ds_error + sums * ds.abs()).mT @ q.abs()
    dv_bound = (p * (u + r + sums) + tiny * seen).mT @ dout.abs()

    def result(value, bound):
        return Result(value, SLACK * (bound + u * value.abs() + roundings * tiny))

    kv = {name: (by_kv_head(x), by_kv_head(b)) for name, x, b in (("dk", dk, dk_bound), ("dv", dv, dv_bound))}
    return {
        "out": Result(out.transpose(0, 1), SLACK * out_bound.transpose(0, 1)),
        "lse": Result(lse.squeeze(-1), SLACK * r.squeeze(-1)),
        "dq": result(dq.transpose(0, 1), dq_bound.transpose(0, 1)),
        "dk": result(*kv["dk"]),
        "dv": result(*kv["dv"]),
    }
