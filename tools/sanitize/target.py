"""The checked program: `python -m tools.sanitize.target TOOL controls|HEAD_DIM` runs its cases, each one announced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

import dualkv
from codegen.tiles import kernel_head_dim
from cute_kernels.abi import clears_ahead
from dualkv.ops import hopper
from tools.sanitize import controls
from tools.sanitize.cases import LAYOUTS, OPTIONS, Case, cases

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda"
FEW_KEYS = ("FEW_KEYS_ROWS", "FEW_KEYS_WALK", "FEW_KEYS_COST")  # of ops.hopper, from which on kernels have no clusters
MARK, END, FAILED = "@@ case: ", "@@ end", "@@ failed: "


def announced(name: str, run: Callable[[], None]) -> None:
    """Run a case; one that fails leaves the next ones their chance, as far as the process goes on."""
    print(f"{MARK}{name}", flush=True)
    try:
        run()
        torch.cuda.synchronize()
    except Exception as e:
        print(f"{FAILED}{type(e).__name__}: {' '.join(str(e).split())[:300]}", flush=True)
    else:
        print(END, flush=True)


def run_case(case: Case, fill: bool) -> None:
    layout = LAYOUTS[case.layout]
    heads, kv_heads = case.heads
    generator = torch.Generator(DEVICE).manual_seed(0)
    of_v = case.head_dim_v or case.head_dim
    shapes = (heads, case.head_dim), (kv_heads, case.head_dim), (kv_heads, of_v), (heads, of_v)
    q, k, v, dout = (
        torch.randn(
            layout.num_tokens, *shape, device=DEVICE, dtype=DTYPES[case.dtype], generator=generator
        ).requires_grad_(i < 3 and "qkv"[min(i, 2)] in case.gradients)
        for i, shape in enumerate(shapes)
    )
    features: dict[str, Any] = {name: case.window if name == "window" else OPTIONS[name] for name in case.features}
    if "sinks" in features:
        features["sinks"] = torch.full((heads,), features["sinks"], device=DEVICE).requires_grad_()
    dlse = torch.randn(heads, layout.num_tokens, device=DEVICE, generator=generator) if case.lse_grad else None
    host = layout.offsets, layout.parent, case.head_dim**-0.5, case.deterministic
    if fill:
        with torch.no_grad():
            torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty then fills what it makes
            out, lse = torch.ops.dualkv.fwd(q, k, v, *host, **features)
            stored = case.deterministic and clears_ahead(kernel_head_dim(case.head_dim))  # the first of dQ's sums
            torch.use_deterministic_algorithms(stored, warn_only=True)
            torch.ops.dualkv.bwd(dout, q, k, v, out, lse, *host, case.gradients, dlse=dlse, **features)
            torch.use_deterministic_algorithms(False)
    else:
        call = (q, k, v, layout)
        results = dualkv.attention(*call, deterministic=case.deterministic, return_lse=True, **features)
        some = slice(1 + case.lse_grad)
        torch.autograd.backward(results[some], (dout, dlse)[some])


def main(tool: str, what: str) -> None:
    torch.cuda.init()
    if what == "controls":
        for name, run in controls.CORRECT.items():
            announced(name, run)
        for name, run in controls.RACY.items():
            announced(name, run)
        announced(*controls.PLANTED[tool])  # last: a fault may end the process
        return
    for case in cases(int(what), tool):
        # initcheck does not see what the copy engine stores. What was filled before counts as initialized: outputs of
        # the forward, and the backward's workspace where the copy engine stores in it. So what is reported of the
        # backward is about what its own kernels leave to each other.
        least: dict[str, Any] = {name: 0 if case.few_keys else getattr(hopper, name) for name in FEW_KEYS}
        with patch.multiple(hopper, **least):
            announced(case.name, lambda case=case: run_case(case, tool == "initcheck"))  # type: ignore[misc]


if __name__ == "__main__":
    main(*sys.argv[1:])
