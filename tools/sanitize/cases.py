"""The cases that run under the sanitizers: edge shapes of every family of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from codegen import tiles
from codegen.spec import KernelSpec, backward_specs, forward_spec
from codegen.tiles import kernel_head_dim
from dualkv import Layout

_SIZES = {tile.tile_n for tile in tiles.FORWARD_TILES.values()}
_SIZES |= {size for tile in tiles.BACKWARD_TILES.values() for size in (tile.tile_m, tile.tile_n)}
_EDGES = [n + d for n in sorted(_SIZES) for d in (-1, 0, 1)]  # tiles' sizes of rows and keys, one less, one more
LAYOUTS = {
    "one token": Layout.from_lengths([1], [[]]),
    "few tokens": Layout.from_lengths([1, 1, 0, 3], [[1], [1, 0, 1], [1], [0, 0]]),
    "edges": Layout.from_lengths(
        [*_EDGES, 130, 1, 0, 70],
        [*([n, 1, 129 - n % 3] for n in reversed(_EDGES)), [1] * 70, [65, 0], [63, 0, 64], [0, 0]],
    ),
    "long prompt": Layout.from_lengths([600], [[500, 433, 477]]),  # at 8 heads and 1 KV head: split key blocks
    # Blocks that end among siblings, tiles with rows of many segments, and some tokens that nothing follows.
    "tree": Layout.from_segments(
        [0, 130, 200, 201, 330, 333, 340, 340, 341, 400, 530, 531, 540], [-1, 0, 1, 2, 2, 4, 4, 1, 0, 8, -1, 10]
    ),
    "short edges": Layout.from_lengths([63, 65, 0], [[1, 64], [40], [3, 5]]),
    "short prompt": Layout.from_lengths([256], [[256]]),  # split key blocks too
}
# (H, Hk). Of fp16 and the others two query heads a KV head, so that tiles of more tokens are there as well.
HEADS = {"long prompt": (8, 1), "short prompt": (8, 1), "edges": (4, 1), "short edges": (4, 1), "tree": (4, 1)}
TWO_A_KV_HEAD = (4, 2)
OPTIONS: dict[str, Any] = {"sinks": 1.5, "softcap": 20.0}  # of features; sinks: of every head
WINDOW, LONG_WINDOW = 70, tiles.SHORT_WINDOW + 26  # the second one's forward has another tile
PADDED = 80  # a head dim that is not native
HEAD_DIMS = tuple(sorted({*tiles.HEAD_DIMS, PADDED}))


@dataclass(frozen=True)
class Case:
    """One forward and one backward.

    Attributes:
        layout: of LAYOUTS.
        head_dim, dtype: of q, k and v.
        deterministic: of the backward.
        gradients: what the backward is asked for.
        features: "window" and names in OPTIONS.
        head_dim_v: of v, if it is another one.
        window: keys of the window, if that is one of the features.
        few_keys: CTAs without clusters, where there are kernels of them.
        lse_grad: the log-sum-exp has a gradient too.
    """

    layout: str
    head_dim: int
    dtype: str = "bf16"
    deterministic: bool = False
    gradients: str = "qkv"
    features: tuple[str, ...] = ()
    head_dim_v: int | None = None
    window: int = WINDOW
    few_keys: bool = False
    lse_grad: bool = False

    @property
    def name(self) -> str:
        extra = [self.dtype] * (self.dtype != "bf16") + ["deterministic"] * self.deterministic
        extra += [f"gradients of {self.gradients}"] * (self.gradients != "qkv") + ["+".join(self.features)]
        extra += [str(self.window)] * (self.window != WINDOW) + ["few keys"] * self.few_keys
        extra += ["gradient of lse"] * self.lse_grad
        of_v = f"/{self.head_dim_v}" if self.head_dim_v else ""
        return " ".join(filter(None, [self.layout, f"D={self.head_dim}{of_v}", *extra]))

    @property
    def heads(self) -> tuple[int, int]:
        """(H, Hk)"""
        return TWO_A_KV_HEAD if self.dtype == "fp16" else HEADS.get(self.layout, TWO_A_KV_HEAD)

    def specs(self) -> list[KernelSpec]:
        """The kernels that it runs."""
        heads, kv_heads = self.heads
        of_v, asked = self.head_dim_v, (self.deterministic, self.gradients)
        of_backward = (*self.features, *["dlse"] * self.lse_grad)
        backward = backward_specs(self.dtype, self.head_dim, *asked, of_backward, of_v, few_keys=self.few_keys)
        window = "window" in self.features
        trees = window or LAYOUTS[self.layout].depth > 2
        short = window and self.window <= tiles.SHORT_WINDOW
        of_forward = trees, self.features, short, of_v, self.few_keys
        forward = forward_spec(self.dtype, self.head_dim, heads // kv_heads, *of_forward)
        return [forward, *backward.present]


def cases(head_dim: int, tool: str) -> Iterator[Case]:
    """List the cases of a head dim and a tool.

    The wide backward hands P from one warp group to another, which racecheck takes for some 30,000 races a step, and
    keeps about a kilobyte of the host for each: it gets shorter lengths there.
    """
    short = tool == "racecheck" and head_dim > tiles.NARROW
    edges, prompt = ("short edges", "short prompt") if short else ("edges", "long prompt")
    for layout in ("one token", "few tokens", edges, prompt, "tree"):
        for deterministic in (False, True):
            yield Case(layout, head_dim, "bf16", deterministic)
    yield Case(edges, head_dim, "fp16")
    for gradients in ("q", "kv"):
        yield Case(edges if short else prompt, head_dim, "bf16", False, gradients)
    for layout, features in ((edges, ("window",)), ("tree", ("window", "sinks")), (edges, ("window", "softcap"))):
        for deterministic in (False, True):
            yield Case(layout, head_dim, "bf16", deterministic, features=features)
    yield Case(edges, head_dim, "bf16", False, features=("sinks", "softcap"))
    yield Case(edges, head_dim, lse_grad=True)
    yield Case(edges, head_dim, features=("sinks",), lse_grad=True)
    if not short:  # shorter lengths are all within that window, and run the kernels without one
        yield Case(prompt, head_dim, features=("window",), window=LONG_WINDOW)
    if kernel_head_dim(head_dim) in tiles.FEW_KEYS_TILES:
        for layout in (edges, prompt, "tree"):
            for deterministic in (False, True):
                yield Case(layout, head_dim, "bf16", deterministic, few_keys=True)
        for gradients in ("q", "kv"):
            yield Case(prompt, head_dim, gradients=gradients, few_keys=True)
    for of_v in (of_v for of_qk, of_v in tiles.MIXED if of_qk == head_dim):
        for layout in (edges, prompt, "tree"):
            for deterministic in (False, True):
                yield Case(layout, head_dim, "bf16", deterministic, head_dim_v=of_v)
        yield Case(edges, head_dim, "bf16", True, features=("window", "sinks"), head_dim_v=of_v)
        if (head_dim, of_v) in tiles.FEW_KEYS_FORWARD_TILES:
            yield Case(edges, head_dim, head_dim_v=of_v, few_keys=True)
