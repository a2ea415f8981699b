"""Random calls of the attention against float64: `python -m tests.fuzz --help`, or `make fuzz`.

A case that fails is reduced and saved under `cases/`, where the test suites (CPU here, GPU in tests/gpu) replay it.
"""
