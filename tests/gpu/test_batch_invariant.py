"""Rows whose bits depend on their path alone, whatever they are packed with; as exact as without."""

from __future__ import annotations

import random

import pytest
import torch

import dualkv
from codegen.spec import forward_spec
from dualkv import Layout
from tests import oracle
from tests.gpu.test_forward import LAYOUTS, inputs
from tools.bench import invariance

CALLS = [(heads, dtype) for heads in invariance.HEADS for dtype in ("bf16", "fp16")]
TREE = Layout.from_segments([0, 150, 200, 260, 700, 710, 900], [-1, 0, 1, 1, 0, 4])


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [
        forward_spec(dtype, dim, heads // kv_heads, True, head_dim_v=dim_v)
        for (dim, dim_v, heads, kv_heads), dtype in [*CALLS, *((heads, "bf16") for heads in invariance.OTHERS)]
    ]
    specs += [forward_spec("bf16", 128, 4, True, name, short) for name, short in invariance.FEATURES_OF_KERNELS]
    compile_all([*specs, *(forward_spec("bf16", 128, 4, trees) for trees in (False, True))])


@pytest.mark.parametrize(("heads", "dtype"), CALLS, ids=str)
def test_rows_have_the_same_bits_in_every_batch(heads, dtype):
    rng = random.Random(str((heads, dtype)))
    for seed in range(40):
        case = invariance.draw(rng, seed)._replace(heads=heads, dtype=dtype, features={})
        assert invariance.differing(case, "cuda", rng, batch_invariant=True)[0] == 0, case


@pytest.mark.parametrize("heads", invariance.OTHERS, ids=str)
def test_other_head_dims(heads):
    rng = random.Random(str(heads))
    for seed in range(10):
        case = invariance.draw(rng, seed)._replace(heads=heads, dtype="bf16", features={})
        assert invariance.differing(case, "cuda", rng, batch_invariant=True)[0] == 0, case


@pytest.mark.parametrize("features", invariance.FEATURES[1:], ids=str)
def test_features(features):
    rng = random.Random(str(features))
    for seed in range(30):
        case = invariance.draw(rng, seed)._replace(heads=(128, 128, 8, 2), dtype="bf16", features=features)
        assert invariance.differing(case, "cuda", rng, batch_invariant=True)[0] == 0, case


def test_without_it_bits_depend_on_the_batch():
    rng = random.Random(0)
    case = invariance.draw(rng, 0)._replace(
        lengths=(500, 333, 512, 77, 129), parent=(-1, 0, 0, 0, 0), heads=(128, 128, 8, 2), dtype="bf16", scale=8.0,
        features={},
    )  # fmt: skip
    assert invariance.differing(case, "cuda", rng)[0] > 0


@pytest.mark.parametrize("name", [*LAYOUTS, "tree", "silent prompts"])
def test_results_are_as_exact_as_without(name):
    """The bound is twice plain PyTorch's error against float64, as of every other call. Large scores take the recompute
    pass."""
    layout = {"tree": TREE, "silent prompts": LAYOUTS["one group"].without_prompt_queries()}.get(name) or LAYOUTS[name]
    layout = layout.to("cuda")
    for scale in (1.0, 30.0):
        q, k, v = inputs(layout)
        q = q * scale
        out, lse = dualkv.attention(q, k, v, layout, batch_invariant=True, return_lse=True)
        arguments = layout.offsets, layout.parent, 128**-0.5
        want, want_lse = oracle.attention(q.double(), k.double(), v.double(), *arguments)
        plain, _ = oracle.attention(q, k, v, *arguments)
        asks = torch.arange(len(q), device="cuda") >= (300 if name == "silent prompts" else 0)
        error, plain_error = ((x.double() - want)[asks] for x in (out, plain))
        assert error.abs().max() <= 2 * plain_error.abs().max() + 1e-5
        assert error.norm() <= 2 * plain_error.norm() + 1e-5 * want.norm()
        assert (lse - want_lse)[:, asks].abs().max() <= 1e-4 * max(1.0, want_lse.abs().max().item() / 100)
