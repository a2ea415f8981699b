"""docs/api.md is what the sources say, and the docstrings say what a caller has to know."""

from __future__ import annotations

import ast

import pytest

import dualkv
from tools import api

PUBLIC = [item for module in api.MODULES for item in api.public(module)]
FUNCTIONS = [item for item in PUBLIC if isinstance(item.node, ast.FunctionDef) and not item.is_value]
CANNOT_FAIL = {  # but as `torch.Tensor.to` does
    "Layout.to",
    "PackedBatch.to",
    "PackedSequences.to",
    "dualkv.integrations.transformers.disable",
}


def test_the_page_is_current():
    assert api.PAGE.read_text() == api.page(), "run `python -m tools.api`"


def test_everything_that_is_imported_is_described():
    names = {item.name.removeprefix("dualkv.") for item in PUBLIC} | set(api.MODULES)
    for name in dualkv.__all__:
        assert name in names or any(module.startswith(f"dualkv.{name}") for module in api.MODULES), name


@pytest.mark.parametrize("item", PUBLIC, ids=lambda item: item.name)
def test_public_names_have_docstrings(item):
    assert item.docstring
    if item.is_value:
        assert item.returns


@pytest.mark.parametrize("item", FUNCTIONS, ids=lambda item: item.name)
def test_functions_say_shapes_and_errors(item):
    said = api.sections(item.docstring)
    given = {name.lstrip("*") for key in api.entries(said.get("Args", "")) for name in key.split(", ")}
    names = [parameter.arg for parameter in item.parameters]
    if len(names) > 1:
        assert [name for name in names if name not in given] == []
    described = api.entries(said.get("Args", ""))
    for parameter in item.parameters:
        kind = ast.unparse(parameter.annotation) if parameter.annotation else ""
        if kind.startswith("torch.Tensor") and described:
            text = next(t for key, t in described.items() if parameter.arg in key.split(", "))
            assert "[" in text or "as for" in text, f"{parameter.arg} has no shape"
    if names and item.name not in CANNOT_FAIL:
        assert "Raises" in said
    if "Tensor" in item.returns and "Returns" not in said:
        assert "[" in said[""], "what is returned has no shape"


def test_a_docstring_in_its_parts():
    arguments = "Args:\n    q: [T, D] what\n        is asked.\n    k, v: [T, D] what answers."
    text = f"One.\n\n{arguments}\n\nRaises:\n    OSError: no.\n\nMore."
    assert api.sections(text) == {
        "": "One.\n\nMore.",
        "Args": "q: [T, D] what\n    is asked.\nk, v: [T, D] what answers.",
        "Raises": "OSError: no.",
    }
    assert api.entries(api.sections(text)["Args"]) == {"q": "[T, D] what is asked.", "k, v": "[T, D] what answers."}
