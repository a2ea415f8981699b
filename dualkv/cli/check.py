"""`dualkv doctor --check`: what each backend computes on this GPU, against the reference, and how long it takes."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import dualkv
from dualkv import Layout
from dualkv.bench import timing
from dualkv.bench.run import in_words
from dualkv.ops import backends
from dualkv.ops.features import Features

# Of a result or gradient, by norms. What kernels that are right show in bf16 is below 0.01; fp16 has three more bits.
BOUNDS = {torch.bfloat16: 0.02, torch.float16: 0.004}
SECONDS = 0.3  # of calls back to back, which are timed in their last three quarters: the GPU's clock is up by then
LAYOUTS = {
    "1 group, P 4096, 16 x 512": Layout.from_lengths([4096], [[512] * 16]),
    "8 groups, P 100..800, R 0..300": Layout.from_lengths(
        range(100, 900, 100), [[300, 0, 1, 64 * g + 33] for g in range(8)]
    ),
    "tree of 4 levels": Layout.from_segments(
        [0, 700, 1200, 1300, 1812, 1940, 2500, 2501, 3000], [-1, 0, 1, 1, 0, 4, 4, -1]
    ),
}
GROUP, GROUPS, TREE = LAYOUTS


class Case(NamedTuple):
    """A call of attention.

    Attributes:
        name: what the check prints.
        layout: of its rows.
        heads: H, Hk, D, Dv.
        features: arguments of `dualkv.attention`; in the place of sinks True, and `lse` True for a loss that has a
            gradient by the log-sum-exp too.
        dtype: of q, k and v.
    """

    name: str
    layout: Layout
    heads: tuple[int, int, int, int]
    features: Mapping[str, Any]
    dtype: torch.dtype


WORDS = {"lse": "gradient of lse"}  # of features in the names of cases
# FlexAttention compiles for up to a minute, and again for other head dims or dtypes, a window, a cap, and a gradient of
# lse. So the cases with fp16 and with that gradient check something else too, and a chunk comes with another layout.
MAIN = (16, 4, 128, 128)
CASES: tuple[tuple[str, tuple[int, int, int, int], dict[str, Any], torch.dtype], ...] = (
    (GROUP, MAIN, {}, torch.bfloat16),
    (GROUPS, MAIN, {}, torch.bfloat16),
    (TREE, MAIN, {}, torch.bfloat16),
    (GROUP, (16, 16, 192, 128), {}, torch.bfloat16),
    (GROUP, (16, 4, 192, 128), {"window": 129, "sinks": True, "lse": True}, torch.bfloat16),
    (GROUP, (8, 2, 256, 256), {}, torch.bfloat16),
    (GROUP, (8, 4, 64, 128), {}, torch.bfloat16),
    (GROUP, (8, 4, 64, 64), {}, torch.float16),
    (GROUP, MAIN, {"window": 200}, torch.bfloat16),
    (TREE, MAIN, {"chunk": 300}, torch.bfloat16),
    (GROUP, MAIN, {"sinks": True, "lse": True}, torch.bfloat16),
    (GROUP, MAIN, {"softcap": 30.0}, torch.bfloat16),
    (GROUP, MAIN, {"deterministic": True}, torch.bfloat16),
)


@dataclass(frozen=True)
class Line:
    """One backend on one case. `worst` is the largest ||x - reference|| / ||reference|| of out, gradients and a
    log-sum-exp that has a gradient. It and the times are None where `says` has an error or a refusal."""

    backend: str
    case: str
    worst: float | None
    forward_ms: float | None
    backward_ms: float | None
    says: str

    @property
    def wrong(self) -> bool:
        """Whether results are beyond the bound, not finite, or an error came in their place."""
        return self.says not in ("exact to rounding", "") and not self.says.startswith("refused")


def cases() -> Iterator[Case]:
    """Every layout, pair of head dims, dtype and feature."""
    for layout, heads, features, dtype in CASES:
        of_v = "" if heads[2] == heads[3] else f", Dv {heads[3]}"
        words = [*(["fp16"] if dtype == torch.float16 else []), *(WORDS.get(name, name) for name in features)]
        yield Case(", ".join([f"{layout}, D {heads[2]}{of_v}", *words]), LAYOUTS[layout], heads, features, dtype)


def run(device: torch.device, names: list[str] | None = None, every: Iterator[Case] | None = None) -> Iterator[Line]:
    """A line for each case and backend, the reference left out."""
    asked = names or [name for name in backends.BACKENDS if name != "reference"]
    for case in every or cases():
        made, bound = _drawn(case, device), BOUNDS[case.dtype]
        want = _computed(made, case, "reference", torch.float32)[0]
        features = Features(**{name: value for name, value in case.features.items() if name in Features._fields})
        for name in asked:
            dlse = made.dlse if "lse" in case.features else None
            reason = backends.BACKENDS[name].unsupported(made.q, made.v, features, dlse)
            if reason:
                yield Line(name, case.name, None, None, None, f"refused: does not serve {reason}")
                continue
            try:
                with redirect_stderr(io.StringIO()):  # cuDNN tells of each kernel that it compiles
                    got, forward_ms, backward_ms = _computed(made, case, name, case.dtype)
            except Exception as e:  # a backend that fails is a finding, and the others are still to be checked
                yield Line(name, case.name, None, None, None, in_words(e))
                continue
            errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
            worst = max(math.inf if math.isnan(error) else error for error in errors)
            says = "exact to rounding" if worst <= bound else f"WRONG: expected at most {bound}"
            if worst <= bound and case.features.get("deterministic") and not _repeats(made, case, name):
                says = "WRONG: gradients differ from call to call with deterministic=True"
            yield Line(name, case.name, worst, forward_ms, backward_ms, says)


class Drawn(NamedTuple):
    """q [T, H, D], k [T, Hk, D], v [T, Hk, Dv], dout [T, H, Dv] in the case's dtype; dlse [H, T] and sinks [H] fp32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor
    sinks: torch.Tensor


def _drawn(case: Case, device: torch.device) -> Drawn:
    (h, kv, d, dv), rows = case.heads, case.layout.num_tokens
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v, dout = (draw(rows, *shape).to(case.dtype) for shape in ((h, d), (kv, d), (kv, dv), (h, dv)))
    # As large as dout . v: left out, or with the other sign, it would be seen in dq and dk.
    return Drawn(q, k, v, dout, draw(h, rows) * dv**0.5, draw(h))


def _calls(
    made: Drawn, case: Case, backend: str, dtype: torch.dtype
) -> tuple[Callable[[], list[torch.Tensor]], Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]]:
    """The forward, which returns out and with the feature lse, and the backward of them: dq, dk, dv, and dsinks where
    there are sinks."""
    leaves = [x.to(dtype, copy=True).requires_grad_() for x in (made.q, made.k, made.v)]
    given: dict[str, Any] = {name: value for name, value in case.features.items() if name != "lse"}
    if "sinks" in given:
        leaves.append(made.sinks.clone().requires_grad_())
        given["sinks"] = leaves[3]
    count = 2 if "lse" in case.features else 1
    grads = [made.dout.to(dtype), made.dlse][:count]

    def forward() -> list[torch.Tensor]:
        q, k, v, *_ = leaves
        return list(dualkv.attention(q, k, v, case.layout, backend=backend, return_lse=True, **given)[:count])

    def backward(outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(outputs, leaves, grads, retain_graph=True)

    return forward, backward


def _computed(made: Drawn, case: Case, backend: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], float, float]:
    """Outputs and gradients (see `_calls`), and milliseconds of a forward and of a backward; the reference is not
    timed."""
    forward, backward = _calls(made, case, backend, dtype)
    outputs = forward()
    results = [*(x.detach() for x in outputs), *backward(outputs)]
    if backend == "reference":
        return results, 0.0, 0.0
    device = made.q.device
    return results, _milliseconds(forward, device), _milliseconds(lambda: backward(outputs), device)


def _repeats(made: Drawn, case: Case, backend: str) -> bool:
    """Whether two calls have the same gradients, bit for bit."""
    forward, backward = _calls(made, case, backend, case.dtype)
    return all(map(torch.equal, backward(forward()), backward(forward())))


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Time a call: on a GPU the median of calls back to back, as benchmarks do; elsewhere one call."""
    begin = time.perf_counter()
    call()
    if device.type != "cuda":
        return (time.perf_counter() - begin) * 1e3
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        once = (time.perf_counter() - begin) * 1e3
        return float(timing.sustained(call, once, SECONDS, timing.Meter())["ms"])
