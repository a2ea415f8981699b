"""The API page of the site: no public name is left out, and each has a docstring."""

from __future__ import annotations

import dualkv
from tools import api

PUBLIC = [item for module in api.MODULES for item in api.public(module)]


def test_the_page_has_every_public_name_with_its_signature():
    page = api.page()
    assert [item.name for item in PUBLIC if item.name.rpartition(".")[2] not in page] == []
    assert "attention(\n    q: torch.Tensor,\n" in page


def test_everything_that_is_imported_is_described():
    names = {item.name.removeprefix("dualkv.") for item in PUBLIC} | set(api.MODULES)
    for name in dualkv.__all__:
        assert name in names or any(module.startswith(f"dualkv.{name}") for module in api.MODULES), name


def test_public_names_have_docstrings():
    assert [item.name for item in PUBLIC if not item.docstring] == []
