"""Recorded runs: `python -m tools.bench.NAME ... --json FILE`, most of them on a GPU; `record` writes the files."""
