"""Tests of the probes of other packages: what changed is found by name, what did not change runs."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from codegen import packages, surface

ROOT = Path(__file__).parents[2]


def test_the_newest_versions_tried_are_those_that_are_installed():
    """The environments of the tests say them."""
    pins = "".join((ROOT / f"tests/integrations/{name}/requirements.txt").read_text() for name in ("trl", "megatron"))
    for name in ("trl", "megatron-core"):
        tried = packages.PACKAGES[name].tried
        assert f"{name}=={tried}" in pins, name
        assert max(re.findall(rf"{name}==([\d.]+)", pins), key=packages.release) == tried
    pinned = re.search(r"transformers==([\d.]+)", (ROOT / "constraints.txt").read_text())
    newest = packages.PACKAGES["transformers"].tried
    assert pinned is not None
    assert newest is not None
    assert packages.release(newest) >= packages.release(pinned[1])


def test_a_name_that_is_gone_is_said(monkeypatch):
    monkeypatch.setattr(packages, "found", lambda name: "1.19.0")
    with pytest.raises(ImportError) as caught, surface.borrowing("trl", "it"):
        from codegen.packages import split_tensor_dict  # type: ignore[attr-defined]  # noqa: F401
    says = "it cannot run: trl 1.19.0 does not fit (tried up to 1.16.0: pip install 'trl<=1.16.0'): "
    assert str(caught.value).startswith(f"{says}cannot import name 'split_tensor_dict'")
    assert caught.value.name == "trl"
    says = "^it cannot run: trl 1.19.0 imports flashless, which is not installed$"
    with pytest.raises(ImportError, match=says), surface.borrowing("trl", "it"):
        import flashless.attention  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ValueError, match="its own"), surface.borrowing("trl", "it"):
        raise ValueError("its own")


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        (lambda q, k, mask_plan, lse=None, *, scale=None: None, True),
        (lambda sample_q, sample_k, sample_mask_plan, sample_lse=None, *, scale=None, more=1: None, True),
        (lambda *tensors, scale=None: None, True),
        (lambda k, q, mask_plan, lse, *, scale: None, False),  # another order
        (lambda q, k, mask_plan, *, scale=None: None, False),
        (lambda q, k, mask_plan, lse, **options: None, False),  # `scale` is swallowed
        (lambda q, k, mask_plan, lse, *, scale, more: None, False),
    ],
)
def test_calls(found: Callable[..., Any], fits: bool):
    module = types.ModuleType("theirs")
    assert surface.uncallable(module, "run", "q") == "theirs has no run"
    module.run = found  # type: ignore[attr-defined]
    said = surface.uncallable(module, "run", "q k mask_plan lse", "scale")
    assert (said is None) == fits, said
    assert fits or str(said).startswith("theirs.run(")


class Theirs:
    """Stands for a class of another package."""

    def __init__(self):
        self.kept = None

    def loss(self):
        return self._logps(1, mask=2), [self._single() for _ in range(2)]

    def _logps(self, ids, mask, entropy=False):
        return self.kept

    def _single(self):
        return 1

    def _left(self, ids):
        return ids


class Ours:
    def _logps(self, ids, mask, **others):
        return self

    def _single(self, *args, **kwargs):
        return self

    def _left(self, ids):
        return ids

    _gone = _left


def test_replaced_methods():
    assert surface.irreplaceable(Theirs, Ours, "_logps _single", "kept loss") is None
    assert surface.irreplaceable(Theirs, Ours, "_gone") == "Theirs has no method _gone"
    assert surface.irreplaceable(Theirs, Ours, "_left") == "Theirs does not call its method _left"
    assert surface.irreplaceable(Theirs, Ours, "", "lost") == "Theirs has no lost"


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (lambda self, ids, attention_mask: 0, "does not begin with the arguments self, ids, mask"),
        (lambda self, mask, ids: 0, "does not begin with the arguments self, ids, mask"),
        (lambda self, ids: 0, "does not begin with the arguments self, ids, mask"),
        (lambda self, ids, mask, images: 0, None),
    ],
)
def test_arguments_of_replaced_methods(method: Callable[..., Any], said: str | None):
    changed = type("Changed", (Theirs,), {"_logps": method})
    found = surface.irreplaceable(changed, Ours, "_logps")
    assert (found is None) == (said is None)
    assert said is None or (str(found).startswith("Changed._logps(self, ") and str(found).endswith(said))


def test_arguments_that_ours_lacks_or_names():
    narrow = type("Narrow", (), {"_logps": lambda self, ids, mask: 0})
    named = type("Named", (), {"_logps": lambda self, *args, layout=None, **kwargs: 0})
    assert str(surface.irreplaceable(Theirs, narrow, "_logps")).endswith("has the arguments entropy more")
    assert str(surface.irreplaceable(Theirs, named, "_logps")).endswith("has no argument layout")
