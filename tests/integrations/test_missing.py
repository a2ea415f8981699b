"""What an integration says whose library is not installed."""

from importlib.util import find_spec

import pytest

import dualkv.integrations


@pytest.mark.skipif(find_spec("verl") is not None, reason="veRL is installed")
def test_verl() -> None:
    with pytest.raises(ImportError, match=r"dualkv\.integrations\.verl needs verl: pip install 'dualkv\[verl\]'"):
        _ = dualkv.integrations.verl
