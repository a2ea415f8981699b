"""Random calls on the GPU: what once failed, and a few hundred fresh ones. `make fuzz` tries thousands."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from codegen.spec import backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS
from tests.fuzz import __main__ as fuzz
from tests.fuzz.case import (
    GPU_CUDNN,
    GPU_FEATURES,
    TREE_RATIOS,
    Case,
    gpu_ratios,
    here,
    run,
    seeded,
)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(dtype, d) for dtype in ("bf16", "fp16") for d in HEAD_DIMS]
    compile_all(
        forward_spec(*kind, ratio, few_keys=few)
        for kind in kinds
        for ratio in gpu_ratios(*kind)
        for few in (False, True)
    )
    compile_all(forward_spec(*kind, ratio, trees=True) for kind in kinds for ratio in TREE_RATIOS)
    fixed_few = list(itertools.product((False, True), repeat=2))
    compile_all(
        s for kind in kinds for fixed, few in fixed_few for s in backward_specs(*kind, fixed, few_keys=few).present
    )
    compile_all(feature_specs())
    parts = itertools.product(("q", "kv", "k", "v"), fixed_few)  # of bf16 at head dim 128
    compile_all(
        s for part, (fixed, few) in parts for s in backward_specs("bf16", 128, fixed, part, few_keys=few).present
    )


def feature_specs():
    """The kernels of calls with features, each once."""
    found = {}
    every = ("window", "sinks", "softcap")  # chunks run the kernels of windows
    sets = [names for n in range(len(every) + 1) for names in itertools.combinations(every, n)]
    for ((dtype, (head_dim, of_v)), ratios), features in itertools.product(GPU_FEATURES.items(), sets):
        for trees in (False, True) if "window" not in features else (True,):
            for ratio, short, few in itertools.product(ratios, (False, True), (False, True)):
                spec = forward_spec(dtype, head_dim, ratio, trees, features, short, of_v, few)
                found[spec.symbol] = spec
        for fixed, more, few in itertools.product((False, True), ((), ("dlse",)), (False, True)):
            asked = {"features": features + more, "head_dim_v": of_v, "few_keys": few}
            for spec in backward_specs(dtype, head_dim, fixed, **asked).present:
                found[spec.symbol] = spec
    return found.values()


@pytest.mark.parametrize("name", fuzz.saved("cuda"))
def test_saved_cases(name):
    run(Case.from_json((fuzz.CASES / name).read_text()))


def test_fresh_cases():
    for index in range(200):
        run(replace(seeded("suite", index, "cuda"), backend=None))


@pytest.mark.parametrize("form", GPU_CUDNN, ids=str)
def test_fresh_cases_by_cudnn(form):
    """A few of each, because cuDNN compiles for one group or several, and for a fixed order, besides."""
    every = (seeded("cudnn", index, "cuda") for index in itertools.count())
    cases = (
        case for case in every if case.backend and (case.dtype, case.head_dim, case.heads // case.kv_heads) == form
    )
    for case in itertools.islice(cases, 8):
        if here(case).backend is None:
            pytest.skip("cuDNN's backend does not run here")
        run(case)


@pytest.mark.parametrize("scale", [2.0**-100, 1e-30, 1e9, 2.0**100])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_scales_at_the_limits(head_dim, scale):
    run(
        Case(
            "attention", "cuda", "bf16", 4, 1, head_dim, (70, 90, 33), (-1, 0, 0), values="far scale", scale=scale
        )
    )  # fmt: skip
