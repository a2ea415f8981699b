"""What an integration says whose library is not installed."""

from importlib.util import find_spec

import pytest

import dualkv.integrations


@pytest.mark.parametrize("name", ["trl", "verl"])
def test_the_sentence_names_the_extra(name: str) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(
        ImportError, match=rf"dualkv\.integrations\.{name} needs {name}: pip install 'dualkv\[{name}\]'"
    ):
        getattr(dualkv.integrations, name)
