"""Load an example on real weights with a small model, bytes for tokens and a task of its own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dualkv.data.rollouts import ByteTokenizer
from dualkv.models import load_model

EXAMPLES = Path(__file__).parent.parent / "examples"


class Dataset(list[dict[str, str]]):
    def score_answer(self, answer: str, entry: dict[str, str]) -> float:
        return sum("a" <= c <= "z" for c in answer) / max(len(answer), 1)


def create_dataset(name: str, seed: int, size: int, **settings: Any) -> Dataset:
    return Dataset({"question": f"{name} {seed + i}?", "answer": "abcde"[i % 5]} for i in range(40))


def small_model(name: str, *args: Any) -> Any:
    model = load_model("tiny", *args)
    model.config.eos_token_id = 256
    return model


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example of that name, as a module that others import until the test ends."""
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=create_dataset))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "load_model", small_model)
    monkeypatch.setattr(module, "LocalTokenizer", lambda name: ByteTokenizer())
    return module
