"""Changes of models and libraries are made in one module, and undone there."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from dualkv.integrations import patching
from dualkv.integrations.patching import Changes


class Part(nn.Module):
    scale = 1

    def forward(self, x: int) -> int:
        return x * self.scale


def double(_module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(2 * x for x in args), kwargs


def negate(_module: nn.Module, _args: Any, out: Any) -> Any:
    return -out


def test_parts_of_copies_are_undone_by_themselves() -> None:
    model = nn.Sequential(Part(), Part())
    before = [dict(vars(part)) for part in model]
    patching.of(model[0]).before(double)
    patching.of(model[0], "fast").replace("scale", 10)
    patching.of(model[1]).behind(negate)
    copies = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    assert [each(1) for each in copies] == [-20] * 3
    patching.undo(copies[1], "fast")
    patching.undo(copies[2][0])
    assert [each(1) for each in copies] == [-20, -2, -1]
    for each in copies:
        patching.undo(each)
        assert each(1) == 1
        assert [vars(part).keys() for part in each] == [part.keys() for part in before]
        assert not any(part._forward_hooks or part._forward_pre_hooks_with_kwargs for part in each)


def test_later_changes_of_others_stay() -> None:
    part = Part()
    patching.of(part).replace("scale", 3)
    patching.of(part).replace("scale", 4)
    part.scale = 5
    patching.of(part).replace("note", 1)
    patching.of(part).replace(patching.LAYOUT, None)
    patching.hand(part, "of a call that failed")
    patching.undo(part)
    assert (part.scale, hasattr(part, "note"), hasattr(part, patching.LAYOUT)) == (5, False, False)
    patching.of(part).replace("scale", 6)
    patching.of(part).replace("scale", 7)
    patching.undo(part)
    assert part.scale == 5


def test_changes_of_a_block() -> None:
    part = Part()
    with pytest.raises(KeyError), Changes(part) as changes:  # noqa: PT012
        changes.replace("scale", 3)
        changes.behind(negate)
        assert part(1) == -3
        raise KeyError
    assert (part(1), "scale" in vars(part)) == (1, False)


def test_changes_by_others_are_watched() -> None:
    part = Part()
    part.gone, part.other = 1, 2
    with patching.watched(part, "fast"):
        part.scale, part.other = 3, 4
        del part.gone
    patching.undo(part)
    assert (part.scale, part.gone, part.other) == (1, 1, 2)
    assert "scale" not in vars(part)


def test_classes_are_undone_with_the_process() -> None:
    class Own(Part):
        pass

    patching.of(Own).replace("scale", 3)
    patching.of(Own).replace("__call__", lambda self, x: self.forward(x) + 1)
    assert Own()(1) == 4
    patching.undo_process()
    assert Own()(1) == 1
    assert not {"scale", "__call__"} & vars(Own).keys()


def test_own_code_is_compiled_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    one, other, same = (patching.with_own_code(function, key) for key in (1, 2, 1))
    assert one is same
    assert one.__code__ is not other.__code__
    assert one(torch.zeros(1)) == 1
