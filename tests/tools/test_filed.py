"""Records come back from their layout as they were."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools import filed

VALUES = st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "absent", ""]) | st.just(1.5)
RECORDS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=30,
)


@given(RECORDS)
def test_entries_come_back(record):
    text = filed.text(record)
    assert filed.parse(text) == record
    assert filed.text(filed.parse(text)) == text


def test_an_environment_is_named_where_it_is_known(tmp_path):
    environment = {"gpu": {"name": "H200"}, "versions": {"torch": "2.11.0"}}
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "h200.json").write_text(json.dumps(environment))
    run, other = {"date": "today", **environment, "a": 1}, {"gpu": {"name": "H100"}, "versions": {}, "a": 2}
    for record in (run, other, {"runs": [run, other]}):
        path = tmp_path / "record.json"
        path.write_text(filed.text(record))
        path.write_text(filed.laid_out(path))
        assert filed.read(path) == record
        assert list(filed.read(path)) == list(record)
        assert path.read_text() == filed.laid_out(path)
        assert ("2.11.0" in path.read_text(), "H100" in path.read_text()) == (False, record != run)


@pytest.mark.parametrize("record", [{"columns": 1, "rows": 2}, [{"a": "-", "bbbbbbbbbb": 1}] * 9])
def test_what_means_something_else_in_the_layout_is_no_record(record):
    with pytest.raises(ValueError, match="which stand"):
        filed.text(record)
