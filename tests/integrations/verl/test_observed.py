"""`model.model_type=dualkv_observe`: the update of veRL's own engine, and numbers that are those of the packed one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Results = Callable[[str], list[dict[str, Any]]]


def test_it_changes_nothing_and_says_what_packing_does(results: Results) -> None:
    plain, found, packed = (results(name)[0] for name in ("stock-of-four", "observed", "of-four"))
    assert plain["log_probs"].equal(found["log_probs"])
    assert all(torch.equal(weight, found["weights"][name]) for name, weight in plain["weights"].items())
    assert any(not torch.equal(weight, found["before"][name]) for name, weight in plain["weights"].items())
    ours = {name for name in found["metrics"] if name.startswith("dualkv/")}
    assert not ours
    as_they_come, together = found["rows"]
    assert together == 2 * packed["metrics"]["dualkv/tokens_packed"]  # a mean over two updates
    assert as_they_come > together
    (text,) = found["report"]
    assert "4 training calls of FSDPQwen3ForCausalLM computed" in text
    assert f"{together:,} rows" in text
