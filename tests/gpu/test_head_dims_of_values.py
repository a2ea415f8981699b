"""Values of another head dim than queries and keys, padded for the kernels and for PyTorch's calls, against float64."""

from __future__ import annotations

import pytest

from codegen.spec import backward_specs, forward_spec
from codegen.tiles import HEAD_DIMS, kernel_head_dims
from dualkv.ops import hopper
from tests.gpu.test_windows import BF16, FP16, HOPPER, LAYOUTS, check, draw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")]

WINDOW, ALL = {"window": 100}, {"window": 200, "sinks": True, "softcap": 5.0}
# Native head dims and others, either of the two the wider one; features that tests/gpu/test_windows.py compiles.
CASES = [
    *((pair, features) for pair in ((192, 128), (96, 64), (64, 192), (176, 72)) for features in ({}, WINDOW)),
    ((192, 256), WINDOW),
    *((pair, features) for pair in ((128, 64), (40, 128), (256, 192)) for features in ({}, ALL)),
]


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    if HOPPER:
        kinds = [(dtype, d) for d in HEAD_DIMS for dtype in ("bf16", "fp16")]
        specs = [forward_spec(*kind, 4, trees=deep) for kind in kinds for deep in (False, True)]
        compile_all(
            specs + [s for kind in kinds for fixed in (False, True) for s in backward_specs(*kind, fixed).present]
        )


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("pair", "features"), CASES, ids=str)
@pytest.mark.parametrize("name", ["ragged groups", "tree"])
def test_pairs(name, pair, features, deterministic):
    dtype = FP16 if deterministic and not features else BF16
    check(LAYOUTS[name], features, pair[0], 8, 2, dtype, deterministic, bool(features), head_dim_v=pair[1])


@pytest.mark.parametrize("pair", [(192, 128), (64, 128)], ids=str)
def test_the_kernel_gets_one_head_dim_and_no_more_than_it_needs(pair, monkeypatch):
    seen, real = [], hopper.forward
    monkeypatch.setattr(hopper, "forward", lambda *given: seen.append([x.shape[2] for x in given[:3]]) or real(*given))
    check(LAYOUTS["one group"], {}, pair[0], head_dim_v=pair[1])
    of_qk, of_v = kernel_head_dims(*pair)
    assert all(dims == ([max(pair)] * 3 if of_qk == of_v else [pair[0], pair[0], pair[1]]) for dims in seen)


@pytest.mark.parametrize("features", [{}, {"window": 37}, {"chunk": 50, "sinks": True}], ids=str)
@pytest.mark.parametrize("pair", [(192, 128), (64, 80)], ids=str)
@pytest.mark.filterwarnings("ignore:dualkv. no kernel for")
def test_the_composition(pair, features, monkeypatch):
    """Its parts come rounded, and their sum is rounded again: up to three roundings for plain PyTorch's one."""
    monkeypatch.setattr(hopper, "unsupported", lambda q: "this test")
    for name in ("ragged groups", "tree"):
        for what, got, plain, want in draw(LAYOUTS[name], features, pair[0], 8, 2, BF16, True, False, pair[1], 0):
            if what != "dsinks":  # in which terms of all rows cancel
                assert (got.double() - want).norm() <= 3 * (plain.double() - want).norm() + 1e-5 * want.norm(), what
