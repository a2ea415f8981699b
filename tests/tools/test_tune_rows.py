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
    results = [result(1, 2.0, 1.6), lost, result(1, 5.0, 4.0, head_dim_v=64)]
    *_, entry, other, of_v, _ = tune_rows.tiles({"results": results}).splitlines()
    assert entry == "| 128 | as it stands | 2.00 | 3.00 |"
    assert other == "| 128 | cluster=1 | 1.60 (1.250) |  |"
    assert of_v == "| 128/64 | as it stands | 5.00 |  |"


def test_clusters_stand_beside_what_the_plan_says():
    results = [result(4, 2.0, 1.6), result(1, 2.0, 2.5), result(1, 1.0, 1.0, head_dim_v=64)]
    head, _, same, other = tune_rows.without_clusters({"results": results}).splitlines()
    costs = [tune_rows.cost_of_clusters(WORKLOAD, 128, None, ratio) for ratio in (1, 4)]
    assert head == "| workload | head dim | GQA 1 | GQA 4 |"
    assert same == f"| {WORKLOAD} | 128 | {costs[0]:.2f}, 0.800 | {costs[1]:.2f}, 1.250 |"
    assert other.startswith(f"| {WORKLOAD} | 128/64 | ")
    assert other.endswith(", 1.000 |  |")


def test_clusters_cost_where_segments_are_short():
    """The two CTAs of a cluster have other rows, and each walks the blocks of both."""
    short, long = (tune_rows.cost_of_clusters(lengths, 128, None, 1) for lengths in (WORKLOAD, "9000:2x9000"))
    assert short > 1.2 > 1.05 > long > 1
