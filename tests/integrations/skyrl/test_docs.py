"""The command of docs/skyrl.md has a setting that SkyRL takes, and trains packed."""

from __future__ import annotations

import re

from dualkv.integrations.skyrl.workers import refuse
from tests.documents import blocks
from tests.integrations.skyrl.runs import configuration

COMMAND = "python -m dualkv.integrations.skyrl "


def test_the_settings_of_the_page() -> None:
    (block,) = blocks("skyrl.md", {"text"})
    words = re.sub(r"#.*", "", block).split()
    assert " ".join(words).startswith(COMMAND)
    cfg = configuration("none", *words[3:])
    assert cfg.trainer.max_tokens_per_microbatch == 16384
    refuse(cfg.trainer)
