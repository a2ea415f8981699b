"""OpenMP's waiting threads sleep in the command line's own process; imported before torch, which loads OpenMP.

Where something else runs too, spinning threads made the demo on two busy cores several times as slow. OpenMP reads its
environment when it is loaded. A program that imports dualkv as a library keeps its environment as it is.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise


def _is_the_command() -> bool:
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # while Python looks the module up
        return ("-m", "dualkv") in pairwise(sys.orig_argv)
    return os.path.basename(program) == "dualkv"


IS_THE_COMMAND = _is_the_command()  # `dualkv ...` or `python -m dualkv`, no program that imports dualkv
if IS_THE_COMMAND:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
