"""`dualkv doctor --check`: what each backend computes on this GPU, against the reference, and how long it takes."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch

import dualkv
from dualkv import Layout
from dualkv.bench import timing
from dualkv.bench.run import in_words
from dualkv.ops import backends

BOUND = 0.02  # of a result or gradient, by norms, in bf16; what kernels that are right show is below 0.01
SECONDS = 0.3  # of calls back to back, which are timed in their last three quarters: the GPU's clock is up by then
LAYOUTS = {
    "1 group, P 4096, 16 x 512": ([4096], [[512] * 16]),
    "8 groups, P 100..800, R 0..300": (list(range(100, 900, 100)), [[300, 0, 1, 64 * g + 33] for g in range(8)]),
}
TREE = [0, 700, 1200, 1300, 1812, 1940, 2500, 2501, 3000], [-1, 0, 1, 1, 0, 4, 4, -1]
HEADS = (16, 4, 128, 128), (16, 16, 192, 128), (8, 2, 256, 256), (8, 4, 64, 64)
FEATURES: tuple[dict[str, Any], ...] = (
    {},
    {"window": 200},
    {"sinks": True},
    {"softcap": 30.0},
    {"deterministic": True},
)


@dataclass(frozen=True)
class Line:
    """One backend on one case. `worst` is the largest ||x - reference|| / ||reference|| of out and gradients. It and
    the times are None where `says` has an error or a refusal."""

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


def cases() -> Iterator[tuple[str, Layout, tuple[int, int, int, int], dict[str, Any]]]:
    """Every layout with plain attention, every head dim and every feature."""
    layouts = {name: Layout.from_lengths(*lengths) for name, lengths in LAYOUTS.items()}
    layouts["tree of 4 levels"] = Layout.from_segments(*TREE)
    one = next(iter(layouts))
    for name, layout in layouts.items():
        yield f"{name}, D 128", layout, HEADS[0], {}
    for heads in HEADS[1:]:
        yield f"{one}, D {heads[2]}, Dv {heads[3]}", layouts[one], heads, {}
    for features in FEATURES[1:]:
        yield f"{one}, {next(iter(features))}", layouts[one], HEADS[0], features


def run(device: torch.device, names: list[str] | None = None, every: Iterator[Any] | None = None) -> Iterator[Line]:
    """A line for each case and backend, the reference left out."""
    asked = names or [name for name in backends.BACKENDS if name != "reference"]
    for case, layout, heads, features in every or cases():
        made = _drawn(layout, heads, device)
        want = _computed(made, layout, features, "reference", torch.float32)[0]
        for name in asked:
            q, _, v, _, _ = made
            reason = backends.BACKENDS[name].unsupported(q, v, features.get("softcap"), None)
            if reason:
                yield Line(name, case, None, None, None, f"refused: does not serve {reason}")
                continue
            try:
                with redirect_stderr(io.StringIO()):  # cuDNN tells of each kernel that it compiles
                    got, forward_ms, backward_ms = _computed(made, layout, features, name, torch.bfloat16)
            except Exception as e:  # a backend that fails is a finding, and the others are still to be checked
                yield Line(name, case, None, None, None, in_words(e))
                continue
            errors = [((a.float() - b).norm() / b.norm()).item() for a, b in zip(got, want, strict=True)]
            worst = max(math.inf if math.isnan(error) else error for error in errors)
            says = "exact to rounding" if worst <= BOUND else f"WRONG: expected at most {BOUND}"
            if worst <= BOUND and features.get("deterministic") and not _repeats(made, layout, features, name):
                says = "WRONG: gradients differ from call to call with deterministic=True"
            yield Line(name, case, worst, forward_ms, backward_ms, says)


Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _drawn(layout: Layout, heads: tuple[int, int, int, int], device: torch.device) -> Drawn:
    """q, k, v, dout in bf16 and sinks in fp32."""
    h, kv, d, dv = heads
    generator = torch.Generator(device).manual_seed(layout.num_tokens)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    rows = layout.num_tokens
    q, k, v, dout = (draw(rows, *shape).bfloat16() for shape in ((h, d), (kv, d), (kv, dv), (h, dv)))
    return q, k, v, dout, draw(h)


def _computed(
    made: Drawn, layout: Layout, features: dict[str, Any], backend: str, dtype: torch.dtype
) -> tuple[list[torch.Tensor], float, float]:
    """(out, dq, dk, dv), dsinks where there are some, and milliseconds of a forward and of a backward; the reference
    is not timed."""
    q, k, v = (x.to(dtype).requires_grad_() for x in made[:3])
    given, leaves = dict(features), [q, k, v]
    if "sinks" in features:
        leaves.append(made[4].clone().requires_grad_())
        given["sinks"] = leaves[3]

    def forward() -> torch.Tensor:
        return dualkv.attention(q, k, v, layout, backend=backend, **given)

    def backward(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, made[3].to(dtype), retain_graph=True)

    out = forward()
    results = [out.detach(), *backward(out)]
    if backend == "reference":
        return results, 0.0, 0.0
    return results, _milliseconds(forward, q.device), _milliseconds(lambda: backward(out), q.device)


def _repeats(made: Drawn, layout: Layout, features: dict[str, Any], backend: str) -> bool:
    """Whether two calls have the same gradients, bit for bit."""
    given = features | ({"sinks": made[4]} if "sinks" in features else {})

    def gradients() -> tuple[torch.Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in made[:3])
        out = dualkv.attention(q, k, v, layout, backend=backend, **given)
        return torch.autograd.grad(out, (q, k, v), made[3])

    return all(map(torch.equal, gradients(), gradients()))


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """On a GPU the median of calls back to back, as benchmarks time them; elsewhere of one call."""
    begin = time.perf_counter()
    call()
    if device.type != "cuda":
        return (time.perf_counter() - begin) * 1e3
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        once = (time.perf_counter() - begin) * 1e3
        return float(timing.sustained(call, once, SECONDS, timing.Meter())["ms"])
