"""Changes of models and libraries are made in one module, and undone there."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dualkv.integrations import patching
from dualkv.integrations.patching import Changes

FOLDER = Path(patching.__file__).parent
# Attributes that other modules may not set, whatever the object. Of classes and modules of other packages they may set
# none at all.
ATTRIBUTES = re.compile(
    r"forward|__\w+__|_attn_implementation|_?gradient_checkpointing(_func)?|_forward_(pre_)?hooks\w*|dualkv_\w+"
)
# What other modules change by itself: copies of configurations, objects of their own, and in `rotary.py` what the
# embedding sets in its calls.
OWN = {
    "openrlhf/batches.py": {"setattr self"},
    "openrlhf/strategy.py": {"vars self"},
    "transformers/adapters.py": {"setattr small", "torch_module.register_module_module_registration_hook"},
    "transformers/heads.py": {"setattr part"},
    "transformers/earlier.py": {"vars self"},
    "transformers/rotary.py": {"setattr module"},
    "transformers/selfcheck.py": {"config._attn_implementation"},
    "transformers/shrink.py": {"setattr config", "setattr part", "setattr small", "vars part"},
    "trl/common.py": {"setattr model"},  # the decoder, put aside while what the head takes is measured
}


def changed(source: str) -> Iterator[str]:
    """Iterate over what a module changes: attributes, entries of `vars`, hooks."""
    nodes = [*ast.walk(ast.parse(source))]
    foreign = {
        (name.asname or name.name).split(".")[0]
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dualkv"))
        for name in node.names
    }
    for node in nodes:
        stored = isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
        if isinstance(node, ast.Attribute) and stored:
            owner = ast.unparse(node.value)
            if owner != "self" and (ATTRIBUTES.fullmatch(node.attr) or owner.split(".")[0] in foreign):
                yield ast.unparse(node)
        elif isinstance(node, ast.Subscript) and stored:
            yield from entries(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            yield f"{node.func.id} {ast.unparse(node.args[0])}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if re.fullmatch("register_.+_hook", node.func.attr):
                yield ast.unparse(node.func)
            if node.func.attr in ("update", "pop", "setdefault", "clear"):
                yield from entries(node.func.value)


def entries(of: ast.expr) -> Iterator[str]:
    """Iterate over the object whose attributes are the entries of this dictionary, if it is `vars` or `__dict__`."""
    if isinstance(of, ast.Call) and ast.unparse(of.func) == "vars":
        yield f"vars {ast.unparse(of.args[0])}"
    if isinstance(of, ast.Attribute) and of.attr == "__dict__":
        yield f"vars {ast.unparse(of.value)}"


def test_one_module_changes_models_and_libraries() -> None:
    found = {
        str(path.relative_to(FOLDER)): set(changed(path.read_text()))
        for path in FOLDER.rglob("*.py")
        if path.name != "patching.py"
    }
    assert {file: owners for file, owners in found.items() if owners} == OWN


@pytest.mark.parametrize(
    ("line", "change"),
    [
        ("model.forward = f", "model.forward"),
        ("a, cls.__call__ = b", "cls.__call__"),
        ("call.__code__ = call.__code__.replace()", "call.__code__"),
        ("del module._forward_pre_hooks", "module._forward_pre_hooks"),
        ("setattr(module, name, value)", "setattr module"),
        ("vars(module)['forward'] = f", "vars module"),
        ("module.__dict__['forward'] = f", "vars module"),
        ("vars(file).update(names)", "vars file"),
        ("layer.register_forward_pre_hook(f)", "layer.register_forward_pre_hook"),
        ("from deepspeed import utils as tools\ntools.Engine = Own", "tools.Engine"),
        ("import x.y\nx.y.z = 1", "x.y.z"),
        ("from dualkv.data import rows\nrows.x = 1", None),
        ("config.layer_types = []", None),
        ("x.y[0] = z", None),
    ],
)
def test_the_scan_sees_changes(line: str, change: str | None) -> None:
    assert list(changed(line)) == ([] if change is None else [change])


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
