"""Tables of tile configurations, from records in small."""

from __future__ import annotations

from tools.bench import tune, tune_rows

WORKLOAD = ";".join(["100:8x50"] * 4)


def result(gqa: int, of_two: float, alone: float, **of_v: int) -> dict:
    """Make a result of the benchmark as `tune` files it."""
    sides = {"as it stands": {"sustained_ms": of_two, "rounds": []}, "cluster=1": {"sustained_ms": alone}}
    shape = {"name": "with heads", "heads": 32, "kv_heads": 32 // gqa, "head_dim": 128, "head_dim_v": None} | of_v
    return tune.figures({"groups": WORKLOAD, "workload": shape, "sides": sides})


def test_tiles_stand_beside_the_entry():
    lost = result(4, 3.0, 3.0)
    lost["sides"]["cluster=1"] = {"error": "OutOfMemoryError"}
    forward, backward = [result(1, 2.0, 1.6), lost, result(1, 5.0, 4.0, head_dim_v=64)], [result(4, 3.0, 6.0)]
    assert tune_rows.tiles({"fwd": {"results": forward}, "bwd": {"results": backward}}).splitlines() == [
        "| head dim | other tiles: speed at GQA 1/4 |",
        "| --- | --- |",
        "| fwd 128 | cluster=1 1.250/- |",
        "| fwd 128/64 | cluster=1 1.250/- |",
        "| bwd 128 | cluster=1 -/0.500 |",
    ]
