"""The recurrent layers of transformers' models on packed rows, by :mod:`dualkv.integrations.recurrent`.

:mod:`.seams` leads layouts to their convolutions and scans, :mod:`.earlier` to those of layers before 5.17.
"""

from dualkv.integrations.recurrent.sharded import refuse
from dualkv.integrations.recurrent.walked import enter
from dualkv.integrations.transformers.recurrent.earlier import CACHES, without_libraries
from dualkv.integrations.transformers.recurrent.seams import (
    LAYER_TYPES,
    install,
    install_in,
    lacks_arguments,
    mixers,
    objections,
    on_reference,
    pointwise,
)

__all__ = [
    "CACHES",
    "LAYER_TYPES",
    "enter",
    "install",
    "install_in",
    "lacks_arguments",
    "mixers",
    "objections",
    "on_reference",
    "pointwise",
    "refuse",
    "without_libraries",
]
