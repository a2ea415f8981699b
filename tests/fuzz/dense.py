"""Dense float64 attention under any mask, and how far from it a computation in fewer bits may be, element by element.

The bounds follow the roundings of FlashAttention's algorithm, so a single wrong element shows whatever its neighbours
are. With u the unit roundoff of the inputs' dtype, and r the relative error of a probability (from that of its score):

    out     P rounded before P V, the result rounded:            (u + r) P|V| + u|out|
    delta   rowsum(dO * out) of the rounded out, less dlse:      |dO| . (bound of out)
    dV      P rounded before P^T dO, the result rounded:         P^T (u + r)|dO| + u|dV|
    dS      from P, dP = dO V^T and delta, rounded twice:        E = 2u|dS| + r P(|dP| + |delta|) + P (error of delta)
    dQ, dK  scale dS K and scale dS^T Q, the result rounded:     scale E|K| + u|dQ|, scale E^T|Q| + u|dK|

With a cap the error of a score shrinks with the slope 1 - tanh^2 (its largest within that error), and the error of tanh
itself, TANH, comes times the cap. dS has the slope as a factor, off by 2 |tanh| (error of tanh). In fp16, P times the
slope may be rounded to a subnormal number. The share of a sink in its row, exp(sink - lse), is a probability P too;
dsink = -sum(P delta).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Relative error of sums in the wide type (fp32; fp64 for fp64 inputs) over some hundred terms, tensor cores included.
SUMS = {torch.float32: 2.0**-19, torch.float64: 2.0**-47}
# Absolute error of tanh: as 1 - 2 / (exp(2 x) + 1) with a fast exponential and reciprocal, twice 2^-22.
TANH = {torch.float32: 2.0**-21, torch.float64: 2.0**-50}
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


def attention(q, k, v, mask, scale, dout, roundings=1.0, dlse=None, sinks=None, softcap=None, scaled_dS=False):
    """{out, lse, dq, dk, dv}: a Result each; with sinks dsinks too.

    q, dout [Tq, H, D], k, v [Tk, Hk, D] of any one dtype; mask [Tq, Tk] bool, True where a query sees a key, at least
    one a query; dlse [H, Tq], sinks [H] of any dtype. `roundings` multiplies u, for computations that round partial
    results too; `scaled_dS`: that round scale dS, which may be subnormal in fp16, and not dS.
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
    scores, error = q @ k.mT * scale, sums * (q.abs() @ k.abs().mT * scale)  # of the sum of a score's terms
    slope, slope_error = 1.0, 0.0
    if softcap is not None:
        tanh, steepest = (scores / softcap).tanh(), 1 - ((scores.abs() - error).clamp(min=0) / softcap).tanh().square()
        tanh_error = error * steepest / softcap + TANH[wide] + sums * tanh.abs()
        scores, error = softcap * tanh, softcap * tanh_error
        slope, slope_error = 1 - tanh.square(), 2 * tanh.abs() * tanh_error + sums
    scores = scores.masked_fill(~mask, float("-inf"))
    lse, of_sink = scores.logsumexp(-1, keepdim=True), 0.0
    if sinks is not None:
        sink = sinks.double()[:, None, None]
        lse = torch.logaddexp(lse, sink)
        p_sink = (sink - lse).exp()
        of_sink = sums * p_sink * sink.abs()
    p = (scores - lse).exp()
    out = p @ v
    r = 2 * (sums * (1 + lse.abs()) + F.pad(error.masked_fill(~mask, 0), (0, 1)).amax(-1, keepdim=True) + of_sink)
    p_v = p @ v.abs()
    out_bound = (u + r + sums) * p_v + u * out.abs() + tiny * (seen @ v.abs() + 1)

    dp, delta = dout @ v.mT, (dout * out).sum(-1, keepdim=True)
    dp_size, delta_size = dout.abs() @ v.abs().mT, (dout.abs() * p_v).sum(-1, keepdim=True)
    if dlse is not None:
        delta, delta_size = delta - dlse.double()[..., None], delta_size + dlse.double().abs()[..., None]
    ds = p * (dp - delta)
    delta_error = (dout.abs() * out_bound).sum(-1, keepdim=True) + sums * delta_size
    ds_error = 2 * u * ds.abs() + p * ((r + sums) * (dp_size + delta_size) + delta_error)
    smallest = max(1.0, 1 / scale) if scaled_dS else 1.0  # in units of tiny: what dS is rounded to at least
    ds, ds_error = ds * slope, ds_error * slope + slope_error * (ds.abs() + ds_error)
    ds_error += tiny * (smallest + dp_size + delta_size) * seen  # P, with a cap P (1 - tanh^2), and dS may be subnormal
    dq, dk, dv = scale * ds @ k, scale * ds.mT @ q, p.mT @ dout
    dq_bound = scale * (ds_error + sums * ds.abs()) @ k.abs()
    dk_bound = scale * (ds_error + sums * ds.abs()).mT @ q.abs()
    dv_bound = (p * (u + r + sums) + tiny * seen).mT @ dout.abs()

    def result(value, bound):
        return Result(value, SLACK * (bound + u * value.abs() + roundings * tiny))

    kv = {name: (by_kv_head(x), by_kv_head(b)) for name, x, b in (("dk", dk, dk_bound), ("dv", dv, dv_bound))}
    results = {
        "out": Result(out.transpose(0, 1), SLACK * out_bound.transpose(0, 1)),
        "lse": Result(lse.squeeze(-1), SLACK * r.squeeze(-1)),
        "dq": result(dq.transpose(0, 1), dq_bound.transpose(0, 1)),
        "dk": result(*kv["dk"]),
        "dv": result(*kv["dv"]),
    }
    if sinks is not None:
        p_error = p_sink * (r + 2 * sums * (1 + sink.abs() + lse.abs())) + tiny
        value, bound = (
            -(p_sink * delta).sum(1),
            (p_error * delta_size + p_sink * (delta_error + sums * delta.abs())).sum(1),
        )
        rounding = torch.finfo(sinks.dtype).eps / 2 * value.abs() + torch.finfo(sinks.dtype).tiny
        results["dsinks"] = Result(value.squeeze(-1), SLACK * (bound + rounding).squeeze(-1))
    return results
