"""Select the kernels that a set of attention shapes needs, and the options of `dualkv precompile` that select a
kernel."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from codegen.spec import (
    DTYPES,
    FEATURES,
    GRADIENTS,
    KernelSpec,
    backward_specs,
    forward_spec,
    table,
)
from codegen.tiles import MIXED, head_parts, kernel_head_dims

NAMES = tuple(dict.fromkeys((*FEATURES["fwd_paths"], *FEATURES["bwd_preprocess"])))  # of all features
DIRECTIONS = ("forward", "backward")


class Shape(NamedTuple):
    """Shape of attention layers: a head dim (a multiple of 8 up to 512), a GQA ratio, and features of calls (NAMES).

    `head_dim_v` is the head dim of values, None if it is the head dim of queries and keys. The backward's kernels do
    not depend on the GQA ratio. A call with a window of either kind that hides a key asks for the feature "window",
    other calls of the layer do not.
    """

    head_dim: int
    heads_per_kv: int
    features: tuple[str, ...] = ()
    head_dim_v: int | None = None

    @property
    def native(self) -> tuple[int, int]:
        """The native pair of the kernels: head dim of queries and keys, and of values."""
        return kernel_head_dims(self.head_dim, self.head_dim_v)


# Layers of models with windows, sinks and softcapping, one for each way in which features and tiles shape the code:
# gpt-oss, Phi-3, OLMo 3 and Mistral, MiMo-V2, Gemma 2 and 3. Sinks at head dim 128 stand for
# forwards of short segments with sinks.
FEATURED = [
    *(Shape(64, 8, features) for features in (("window",), ("window", "sinks"), ("sinks",))),
    Shape(96, 1, ("window",)),
    *(Shape(128, 4, features) for features in (("window",), ("softcap",), ("window", "softcap"), ("sinks",))),
    *(Shape(192, 8, ("window", "sinks"), head_dim_v) for head_dim_v in (None, 128)),
    *(Shape(256, 2, features) for features in (("window",), ("softcap",), ("window", "softcap"))),
    *(Shape(head_dim, 1, ("dlse",)) for head_dim in (64, 128, 256)),
]


def feature_table() -> list[KernelSpec]:
    """The kernels of FEATURED layers that `codegen.spec.table` does not list; they are recorded as that table's are."""
    plain = set(table())
    return [spec for spec in select(FEATURED, deterministic=True, trees=True) if spec.features and spec not in plain]


def select(
    shapes: Iterable[Shape],
    dtypes: Iterable[str] = DTYPES[:1],
    directions: Iterable[str] = DIRECTIONS,
    gradients: Iterable[str] = GRADIENTS[:1],
    deterministic: bool = False,
    trees: bool = False,
) -> list[KernelSpec]:
    """The kernels that the shapes need: each once, kernels of a shape together.

    Args:
        shapes: head dims and GQA ratios.
        dtypes: "bf16", "fp16".
        directions: of DIRECTIONS. Both have the kernels of both kinds of layouts, of short segments and of others.
        gradients: of codegen.spec.GRADIENTS, the gradients that backwards compute.
        deterministic: also the kernels of deterministic backwards.
        trees: also the forward's kernels for layouts deeper than two levels (the backward's kernels serve any layout).

    Raises:
        ValueError: a shape, feature, dtype, direction or part of the gradients without kernels.
    """
    dtypes, directions, gradients = list(dtypes), list(directions), list(gradients)
    for name, values, allowed in (
        ("dtypes", dtypes, DTYPES),
        ("directions", directions, DIRECTIONS),
        ("gradients", gradients, GRADIENTS),
    ):
        if not values or not set(values) <= set(allowed):
            raise ValueError(f"{name} is {','.join(values) or 'empty'}, expected some of {','.join(allowed)}")
    found: list[KernelSpec] = []
    for shape in shapes:
        if shape.heads_per_kv < 1:
            raise ValueError(f"the GQA ratio is {shape.heads_per_kv}, expected 1 or more")
        if not set(shape.features) <= set(NAMES):
            raise ValueError(f"features is {','.join(shape.features)}, expected some of {','.join(NAMES)}")
        head_dim, head_dim_v = shape.native
        for dtype in dtypes:
            if "forward" in directions:
                found += _forwards(dtype, shape, trees)
            if "backward" in directions:
                for asked in gradients:
                    for fixed in (False, True) if deterministic else (False,):
                        of_call = dtype, head_dim, fixed, asked, shape.features, head_dim_v
                        found += [s for few in (False, True) for s in backward_specs(*of_call, few).present]
    return list(dict.fromkeys(found))


def _forwards(dtype: str, shape: Shape, trees: bool) -> list[KernelSpec]:
    """The forward's kernels of a shape; kernels with windows, long and short ones, serve layouts of any depth."""
    window = "window" in shape.features
    which = ((True, False), (True, True)) if window else ((False, False), (True, False)) if trees else ((False, False),)
    head_dim, head_dim_v = shape.native
    return [
        forward_spec(dtype, head_dim, len(heads), deep, shape.features, short, head_dim_v, few_keys)
        for deep, short in which
        for heads in (range(shape.heads_per_kv), *([] if deep else head_parts(shape.heads_per_kv)))
        for few_keys in (False, True)
    ]


def words(spec: KernelSpec) -> list[str]:
    """The options of `dualkv precompile` that select `spec`; empty for a specification that no call needs."""
    # Softcapping, windows and values of another head dim change tiles of kernels that do not depend on them otherwise.
    others = ((), ("softcap",), ("window",), ("window", "softcap"))
    values = dict.fromkeys((spec.head_dim_v, *(of_v for of_qk, of_v in MIXED if of_qk == spec.head_dim)))
    for of_v, more, direction, deterministic in product(values, others, DIRECTIONS, (False, True)):
        shape = Shape(spec.head_dim, spec.packed_heads, tuple(dict.fromkeys((*spec.features, *more))), of_v)
        if spec in select([shape], [spec.dtype], [direction], [spec.gradients], deterministic, spec.trees):
            ratio = ["--gqa", str(shape.heads_per_kv)] if direction == "forward" else []
            part = ["--gradients", spec.gradients] if spec.gradients != GRADIENTS[0] else []
            features = ["--features", ",".join(shape.features)] if shape.features else []
            deep = ["--trees"] if spec.trees and "window" not in shape.features else []
            dims = "/".join(map(str, filter(None, (shape.head_dim, shape.head_dim_v))))
            return [
                "--head-dims", dims, *ratio, "--dtypes", spec.dtype, "--directions", direction,
                *part, *(["--deterministic"] if deterministic else []), *deep, *features,
            ]  # fmt: skip
    return []
