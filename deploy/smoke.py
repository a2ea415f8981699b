"""`python deploy/smoke.py` in an environment that dualkv was installed into: whether it works there, on the CPU.

Without transformers the demo must say what it lacks; with it, it runs.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import dualkv

SMALL = ["demo", "--device", "cpu", "--steps", "1", "--prompt-len", "40", "--responses", "2", "--response-len", "8"]


def installed() -> str:
    """The version; fails for one that is imported from sources."""
    place = Path(dualkv.__file__)
    if Path(sys.prefix) not in place.parents:
        sys.exit(f"dualkv is imported from {place.parent}, expected from {sys.prefix}: run this elsewhere")
    version = importlib.metadata.version("dualkv")
    assert version == dualkv.__version__, f"metadata says {version}, the package {dualkv.__version__}"
    return version


def attention() -> float:
    """Largest difference between a packed group and its sequences one by one: outputs and gradients."""
    prompt, responses = 7, [4, 1, 6]
    layout = dualkv.Layout.from_lengths([prompt], [responses])
    packed = torch.randn(3, layout.num_tokens, 2, 16, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(layout.num_tokens, 2, 16, dtype=torch.float64)
    out = dualkv.attention(*packed.unbind(), layout)
    (gradient,) = torch.autograd.grad(out, packed, dout)

    loss, difference, begin = torch.zeros((), dtype=torch.float64), 0.0, prompt
    for i, length in enumerate(responses):
        rows = torch.cat([torch.arange(prompt), torch.arange(begin, begin + length)])
        q, k, v = packed[:, rows].transpose(1, 2)
        alone = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        difference = max(difference, float((alone - out[rows]).abs().max().detach()))
        asked = slice(0, None) if i == 0 else slice(prompt, None)  # the prompt's gradient counts once
        loss = loss + (alone[asked] * dout[rows[asked]]).sum()
        begin += length
    (expected,) = torch.autograd.grad(loss, packed)
    return max(difference, float((gradient - expected).abs().max()))


def logprobs() -> int:
    """Response tokens whose log-probs came back, a row each."""
    batch = dualkv.pack([[1, 2, 3]], [[[4, 5], [6]]])
    hidden = dualkv.attention(*torch.randn(3, batch.layout.num_tokens, 1, 8), batch.layout)[:, 0]
    logp, entropy = dualkv.response_logprobs(hidden, torch.randn(9, 8), batch)
    assert [len(row) for row in batch.unpack(logp)] == [2, 1]
    assert entropy.min() >= 0
    return len(logp)


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """`dualkv ...` by the script that the installation made."""
    script = Path(sys.prefix) / "bin" / "dualkv"
    return subprocess.run([script, *words], capture_output=True, text=True)


def main() -> None:
    print(f"dualkv {installed()} in {sys.prefix}, Python {sys.version.split()[0]}, torch {torch.__version__}")
    difference = attention()
    assert difference < 1e-12, difference
    print(f"attention, forward and backward: largest difference {difference:.1e}")
    print(f"log-probs of {logprobs()} response tokens")
    for words in (["doctor"], ["bench", "--list"]):
        done = command(*words)
        assert done.returncode == 0, done.stderr
        print(f"dualkv {' '.join(words)}: {len(done.stdout.splitlines())} lines")
    demo = command(*SMALL)
    if importlib.util.find_spec("transformers") is None:
        said = demo.stderr.strip()
        assert demo.returncode == 1, said
        assert "\n" not in said, said
        assert "pip install 'dualkv[transformers]'" in said, said
        print(f"dualkv demo without transformers: {said}")
    else:
        assert demo.returncode == 0, demo.stderr + demo.stdout
        verdict = demo.stdout[demo.stdout.index("EXACT") :]
        print(f"dualkv demo: {' '.join(verdict.split())}")


if __name__ == "__main__":
    main()
