"""`python -m tools.tables`: write the tables of README and docs anew from the figures in docs/results/.

A table stands between `<!-- table NAME -->` and `<!-- end -->`; a test holds the documents to what this writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tools import cold_start

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "deployment.md")
UPDATES = {
    "update-cpu": "tiny Qwen3, fp32, 2 CPU cores",
    "update-h200-composition": "Qwen3-0.6B, bf16, H200, PyTorch's attention composed",
    "update-h200-p4096": "Qwen3-0.6B, bf16, H200, kernels",
    "update-h200": "Qwen3-0.6B, bf16, H200, kernels",
}
OURS, PEER = "dualkv", "fa4-3-calls"


def _load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def updates() -> str:
    """One GRPO update each: tokens, seconds and peak memory, replicated and packed.

    Last: how far log-probs and gradients of the packed way are from a wider dtype, in units of the replicated way's.
    """
    rows = []
    for name, what in UPDATES.items():
        run = _load(name)
        a, b, s = run["ways"]["replicated"], run["ways"]["packed"], run["settings"]
        row = [what, f"{s['prompt_len']}, {s['responses']} x {s['response_len']}"]
        row.append(f"{a['tokens'][0]:,} / {b['tokens'][0]:,}")
        ratio = a["total_seconds"] / b["total_seconds"]
        row.append(f"{a['total_seconds']:.2f} / {b['total_seconds']:.2f} s ({ratio:.1f}x)")
        if a["peak_bytes"] and b["peak_bytes"]:
            memory = f"{a['peak_bytes'] / 2**30:.1f} / {b['peak_bytes'] / 2**30:.1f} GiB"
            row.append(f"{memory} ({a['peak_bytes'] / b['peak_bytes']:.1f}x)")
        else:
            row.append("not recorded")
        away = run["to_truth"]
        ratios = [away["packed"][what] / away["replicated"][what] for what in ("logp_rms", "gradients") if away]
        row.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        rows.append(row)
    head = ["one update", "P, N x R", "tokens", "time", "peak memory above the weights"]
    return _markdown([*head, "distance from fp32*"], rows)


def _against_peer(name: str) -> str:
    rows = []
    for result in _load(name)["results"]:
        w, ours, peer = result["workload"], result["sides"][OURS], result["sides"][PEER]
        row = [w["name"]]
        row += [f"{x['sustained_ms']:.2f} ({x['sustained_tflops']:.0f})" for x in (ours, peer)]
        row += [f"{ours['speed_against_reference']:.2f}", f"{ours['joules']:.1f} / {peer['joules']:.1f}"]
        rows.append(row)
    return _markdown(("workload", "DualKV, ms (TFLOP/s)", "FlashAttention-4, 3 calls", "ratio", "J a call"), rows)


def peers() -> str:
    """The forward of every side on one workload."""
    (result,) = _load("forward-h200-peers")["results"]
    rows = [
        (name, f"{x['sustained_ms']:.1f}", f"{x['sustained_tflops']:.0f}", f"{x['joules']:.1f}")
        for name, x in result["sides"].items()
    ]
    return _markdown((result["workload"]["name"], "ms", "TFLOP/s", "J a call"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "updates": updates,
    "forward": lambda: _against_peer("forward-h200"),
    "head-dims": lambda: _against_peer("forward-h200-head-dims"),
    "peers": peers,
    "cold-start": lambda: cold_start.markdown(_load("cold-start-h200")),
}


def filled(text: str) -> str:
    """A document with its tables as the figures give them."""
    return re.sub(
        r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text()))
