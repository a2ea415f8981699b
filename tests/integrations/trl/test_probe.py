"""TRL's surface is probed when a trainer is made: a changed one is refused, in one sentence, before training."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import trl

from codegen import packages
from dualkv.integrations.trl import GRPOTrainer, probe
from tests.integrations.trl.runs import make_trainer

LOGPS = "_get_per_token_logps_and_entropies"
OWN: Any = getattr(trl.GRPOTrainer, LOGPS)


@pytest.fixture(autouse=True)
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages.found
    monkeypatch.setattr(packages, "found", lambda name: "1.19.0" if name == "trl" else found(name))
    monkeypatch.setattr(probe, "PROVED", set())


def shifted(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands for log-probs of other tokens."""
    logps, entropies, aux = OWN(self, *args, **kwargs)
    return logps.roll(1, 1), entropies, aux


def two(self: Any, *args: Any, **kwargs: Any) -> Any:
    return OWN(self, *args, **kwargs)[:2]


shifted.__signature__ = two.__signature__ = inspect.signature(OWN)  # type: ignore[attr-defined]


def renamed(self: Any, model: Any, ids: Any, mask: Any, logits_to_keep: int) -> None:
    raise AssertionError


def test_a_newer_version_that_fits_runs(folder: Path) -> None:
    make_trainer(GRPOTrainer, folder / "fits")
    assert {GRPOTrainer} == probe.PROVED


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (shifted, r"values of a small model differ by [\d.]+ when packed"),
        (two, r"a small model raises ValueError: not enough values to unpack"),
        (renamed, rf"GRPOTrainer\.{LOGPS}\(.*\).* does not begin with the arguments self, model,"),
        (None, rf"GRPOTrainer has no method {LOGPS}"),
    ],
)
def test_a_changed_method_is_refused(changed: Any, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if changed is None:
        monkeypatch.delattr(trl.GRPOTrainer, LOGPS)
    else:
        monkeypatch.setattr(trl.GRPOTrainer, LOGPS, changed)
    start = re.escape("trl 1.19.0 does not fit (tried up to 1.16.0: pip install 'trl<=1.16.0'): ")
    with pytest.raises(ImportError, match=f"cannot run: {start}{said}"):
        make_trainer(GRPOTrainer, folder / "changed")
