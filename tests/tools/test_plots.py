"""Plots of records (tools/plots): what they show, in both colour schemes, and that nothing is cut off."""

from __future__ import annotations

import pytest

from tools import plots

POINTS = [
    {
        "prompt_len": p,
        "response_len": 100 - p,
        "rows": {"replicated": 1600, "packed": p + 16 * (100 - p)},
        "speed_up": up,
    }
    for p, up in ((10, 1.05), (50, 1.8), (95, 6.25))
]
RECORD = {"gpu": {"name": "NVIDIA H200"}, "settings": {"responses": 16, "length": 100, "layers": 8}, "points": POINTS}


def test_a_plot_is_the_same_at_every_run_and_has_both_schemes():
    drawn = plots.prompt_share(RECORD)
    assert drawn == plots.prompt_share(RECORD)
    assert "H200; replicated with FlashAttention-4" in drawn.partition("</title>")[0]
    assert "font-family: 'DejaVu Sans', sans-serif" in drawn
    rules = drawn.partition("prefers-color-scheme: dark")[2].partition("</style>")[0]
    for light, dark in plots.DARK.items():
        assert f"'fill: {light}'] {{ fill: {dark}" in rules
        assert f": {light}" in drawn.partition("</style>")[2]


def test_a_plot_with_a_part_outside_is_refused():
    with pytest.raises(ValueError, match="has parts outside of the picture of 2 x 2 inches"):
        plots._drawn(2, 2, "a title that is wider than the picture is", lambda axes: None)
