"""`python -m tools.precompile ...` is `dualkv precompile ...`, from a checkout that is not installed."""

from __future__ import annotations

import sys

from dualkv.cli import commands

if __name__ == "__main__":
    sys.argv[:1] = ["dualkv", "precompile"]
    commands.main()
