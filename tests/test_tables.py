"""The tables in README and docs are those of the recorded figures."""

from __future__ import annotations

import json

import pytest

from tools import tables


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_documents_show_the_recorded_figures(path):
    text = path.read_text()
    assert "<!-- table" in text
    assert tables.filled(text) == text, "run `python -m tools.tables`"


@pytest.mark.parametrize("path", sorted(tables.RESULTS.glob("*.json")), ids=lambda path: path.name)
def test_figures_say_where_they_come_from(path):
    record = json.loads(path.read_text())
    assert {"date", "commit", "changed_files", "gpu", "versions"} <= set(record)
    assert len(record["commit"]) == 40
