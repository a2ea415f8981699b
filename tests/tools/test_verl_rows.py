"""Tables of veRL's updates, from rows as the benchmark files them."""

from __future__ import annotations

from typing import Any

from tools.bench import verl_rows

SETTINGS = {
    "model": "qwen3-8b", "layers": None, "groups": 1, "responses": 32, "prompt_len": 8192, "response_len": 2048,
    "algorithm": "grpo", "sequence_parallel": 1, "engine": "verl", "micro_batch": 8, "max_tokens": None,
}  # fmt: skip
PACKED = {"engine": "dualkv", "micro_batch": None, "max_tokens": 73760}


def row(seconds: float, ranks: int = 4, **settings: Any) -> verl_rows.Row:
    metrics = {"dualkv/mfu_hardware": 0.3, "dualkv/mfu_effective": 1.2} if settings.get("engine") else {"mfu": 0.4}
    return {
        "settings": SETTINGS | settings, "ranks": ranks, "metrics": metrics, "mfu_effective": 2 / seconds,
        "seconds": {"median": seconds}, "replicated_tokens_per_second": 1000 * ranks / seconds, "peak_gib": [7, 9.4],
    }  # fmt: skip


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_speed_up_is_over_the_fastest_of_the_same_work():
    other = row(1.0, responses=16)
    shared = row(5.0, groups=2, sequence_parallel=2, hold_gradients=False)
    full = {"settings": SETTINGS | {"micro_batch": 32}, "ranks": 4, "error": "OutOfMemoryError: of 150 GiB"}
    found = cells(verl_rows.updates([row(2.0, **PACKED), row(8.0), row(10.0, micro_batch=4), other, full, shared]))
    work = "qwen3-8b, whole, 4 GPUs; GRPO, 32 responses"
    assert found == [
        [work, "veRL, 8 responses", "8.00", "500", "25%", "25%", "9", ""],
        ["", "veRL, 4 responses", "10.00", "400", "20%", "20%", "9", ""],
        ["", "veRL, 32 responses", "OutOfMemoryError", "", "", "", "", ""],
        ["", "veRL, 8 responses on 2 GPUs, gradients reduced after each", "5.00", "800", "40%", "40%", "9", ""],
        ["", "packed, whole groups", "2.00", "2,000", "100%", "25%", "9", "2.50x"],
        ["qwen3-8b, whole, 4 GPUs; GRPO, 16 responses", "veRL, 8 responses", "1.00", "4,000", "200%", "200%", "9", ""],
    ]
