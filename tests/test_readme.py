"""What the README shows runs as it stands (on the CPU, with a tiny model)."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tests.integrations.tiny import VOCAB, make_model

ROOT = Path(__file__).parent.parent


def test_code_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    space = {
        "model": make_model("qwen3"),
        "prompts": [torch.randint(0, VOCAB, (n,)) for n in (9, 4)],
        "responses": [[torch.randint(0, VOCAB, (n,)) for n in lens] for lens in ((3, 5, 1), (7,))],
    }
    for block in blocks:
        exec(block.replace('"cuda"', '"cpu"'), space)
    assert [len(row) for row in space["rows"]] == [3, 5, 1, 7]
    assert space["out"].shape == (512 + 8 * 128 + 70 + 130 + 91, 16, 128)


def test_what_the_readme_names_exists():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (ROOT / target).exists(), target
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE):
        assert command in targets, command
