"""Recurrent layers on packed rows: a segment starts from the state that its parent leaves.

:mod:`.waves` orders the segments of a layout, :mod:`.ops` runs convolutions and scans in that order, and :mod:`.seams`
leads the recurrent layers of transformers' models to these (:mod:`.earlier`: those before 5.17). :mod:`.kernels`
chooses flash-linear-attention's kernels, :mod:`.walked` keeps what parts of a walked tree start from, and
:mod:`.sharded` exchanges rows with other ranks.
"""

from dualkv.integrations.transformers.recurrent.earlier import CACHES, without_libraries
from dualkv.integrations.transformers.recurrent.seams import (
    LAYER_TYPES,
    install,
    install_in,
    mixers,
    objections,
    on_reference,
    pointwise,
)
from dualkv.integrations.transformers.recurrent.sharded import refuse
from dualkv.integrations.transformers.recurrent.walked import enter

__all__ = [
    "CACHES",
    "LAYER_TYPES",
    "enter",
    "install",
    "install_in",
    "mixers",
    "objections",
    "on_reference",
    "pointwise",
    "refuse",
    "without_libraries",
]
