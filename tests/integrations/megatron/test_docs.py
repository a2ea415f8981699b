"""The code in docs/megatron.md runs."""

from __future__ import annotations

from typing import Any

import torch

from tests.documents import blocks
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import config


def test_the_step_of_the_page_runs() -> None:
    cpu.parallel()
    torch.manual_seed(0)
    lens = {9: (3, 5, 1), 4: (7,)}
    space: dict[str, Any] = {
        "config": config(),
        "prompts": [torch.randint(0, 128, (n,)) for n in lens],
        "responses": [[torch.randint(0, 128, (n,)) for n in group] for group in lens.values()],
    }
    for block in blocks("megatron.md", {"python"}):
        exec(block, space)
    assert [len(row) for row in space["found"]] == [3, 5, 1, 7]
    assert all(p.grad is not None for p in space["model"].parameters())
