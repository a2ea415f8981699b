"""Tests of an integration whose library is not installed, however it is imported."""

import sys

import pytest

from dualkv import integrations


@pytest.mark.parametrize("name", integrations.__all__)
@pytest.mark.parametrize("line", ["dualkv.integrations.{name}", "from dualkv.integrations.{name} import x"])
def test_the_sentence_names_the_extra(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"dualkv.integrations.{name}", raising=False)
    monkeypatch.delitem(vars(integrations), name, raising=False)
    says = rf"^dualkv\.integrations\.{name} needs {name}: pip install 'dualkv\[{name}\]'$"
    with pytest.raises(ModuleNotFoundError, match=says):
        exec(f"import dualkv\n{line.format(name=name)}")
