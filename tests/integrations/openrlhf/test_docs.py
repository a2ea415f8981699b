"""The command of docs/openrlhf.md has flags that OpenRLHF takes, and reaches the packed strategy."""

from __future__ import annotations

import re
from pathlib import Path

from tests.documents import blocks
from tests.integrations.openrlhf import cpu
from tests.integrations.openrlhf.runs import flags

COMMAND = "python -m dualkv.integrations.openrlhf "


def test_the_flags_of_the_page(folder: Path) -> None:
    (block,) = blocks("openrlhf.md", {"text"})
    words = re.sub(r"#.*", "", block).split()
    assert " ".join(words).startswith(COMMAND)
    args = cpu.arguments(*flags(str(folder / "model"), *words[3:]))
    assert args.train.dynamic_batch_enable
    assert args.train.max_tokens_per_gpu == args.rollout.max_tokens_per_gpu == 16384
