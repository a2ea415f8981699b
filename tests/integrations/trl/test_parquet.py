"""Rollouts in Parquet, which PyArrow reads: TRL's datasets bring it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dualkv.data.rollouts import ByteTokenizer, read_rollouts
from tests.data.test_files import CALL, FILES


def test_rollouts_of_art(tmp_path: Path) -> None:
    """A file that ART 0.5.18 wrote (`write_trajectory_groups_parquet`): what it trains is marked."""
    found = read_rollouts(FILES / "art-0.5.18.parquet", ByteTokenizer(), 320)
    assert found.rewards == [[1.0, 0.0]]
    assert found.masks is not None
    texts = []
    for response, mask in zip(found.responses[0], found.masks[0], strict=True):
        own = [t for t, m in zip(response.tolist(), mask.tolist(), strict=True) if m]
        calls, text = ByteTokenizer().decode(own).splitlines()
        assert json.loads(calls) == [CALL]
        texts.append(text)
    assert texts == ["It is 4.", "It is 5."]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"bad\.parquet: not Parquet"):
        read_rollouts(tmp_path / "bad.parquet", ByteTokenizer(), 320)
