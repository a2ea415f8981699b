"""The forward's CTAs without clusters, here for all layouts of two levels: the tests of other files, on them."""

from __future__ import annotations

import pytest
import torch

from codegen.spec import backward_specs, forward_spec
from codegen.tiles import FEW_KEYS_FORWARD_TILES, MIXED
from dualkv.ops import hopper
from tests.gpu import test_forward as fwd
from tests.gpu import test_head_dims_of_values as values
from tests.gpu import test_windows as windows

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = [head_dim for head_dim in FEW_KEYS_FORWARD_TILES if isinstance(head_dim, int)]
PAIRS = [pair for pair in MIXED if pair in FEW_KEYS_FORWARD_TILES]
of_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)
of_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [forward_spec(t, d, h, few_keys=True) for t in DTYPES for d in HEAD_DIMS for h in (1, 4)]
    specs += [forward_spec("bf16", d, 8, few_keys=True) for d in HEAD_DIMS]
    specs += [forward_spec("bf16", 128, h, few_keys=True) for h in range(1, 17)]
    specs += [forward_spec("bf16", d, 4, features=("sinks",), few_keys=True) for d in HEAD_DIMS]
    for d, of_v in PAIRS:
        ratios = [("bf16", ratio) for ratio in values.RATIOS] + [("fp16", 4)]
        specs += [forward_spec(*kind, head_dim_v=of_v, few_keys=True) for kind in [(t, d, h) for t, h in ratios]]
        specs += backward_specs("bf16", d, head_dim_v=of_v).present
        specs += backward_specs("fp16", d, True, head_dim_v=of_v).present
    for d in HEAD_DIMS:
        specs += [s for fixed in (False, True) for s in backward_specs("bf16", d, fixed, features=("sinks",)).present]
    compile_all(specs)


@pytest.fixture(autouse=True)
def few_keys(monkeypatch):
    """All layouts are taken for ones whose clusters see other keys."""
    found, made = [], hopper._kernel

    def noting(dtype, head_dim, ratio, device, trees=False, features=(), short=False, head_dim_v=None, few_keys=False):
        spec, kernel = made(dtype, head_dim, ratio, device, trees, features, short, head_dim_v, True)
        found.append(spec)
        return spec, kernel

    monkeypatch.setattr(hopper, "_kernel", noting)
    yield
    assert found
    assert all(spec.tile.cluster == 1 for spec in found)


@of_dtypes
@of_head_dims
@pytest.mark.parametrize("name", fwd.LAYOUTS)
def test_layouts(name, head_dim, dtype):
    fwd.test_layouts(name, head_dim, DTYPES[dtype])


@pytest.mark.parametrize("ratio", [*range(1, 17), 17, 24])
def test_gqa_ratios(ratio):
    for name in ("ragged groups", "many in a tile"):
        fwd.check(*fwd.inputs(fwd.LAYOUTS[name], 3 * ratio, 3), fwd.LAYOUTS[name])


@pytest.mark.parametrize("head_dim", range(72, 129, 8))
def test_head_dims(head_dim):
    fwd.test_head_dims(head_dim)


@of_head_dims
def test_tails(head_dim):
    fwd.test_tails(head_dim)


@pytest.mark.parametrize("num_sms", [1, 2, 7])
@of_head_dims
def test_a_few_ctas_take_all_the_work(head_dim, num_sms):
    for name in ("ragged groups", "aligned"):
        fwd.check(*fwd.inputs(fwd.LAYOUTS[name], head_dim=head_dim), fwd.LAYOUTS[name], num_sms)


@of_dtypes
@pytest.mark.parametrize("name", fwd.HOSTILE)
def test_hostile_values(name, dtype):
    fwd.test_hostile_values(name, DTYPES[dtype])


@pytest.mark.parametrize("growth", [4, 30, 100])
@pytest.mark.parametrize("num_sms", [1, 6, 132])
@of_head_dims
def test_outgrown_references(head_dim, num_sms, growth):
    fwd.test_outgrown_references(head_dim, num_sms, growth)


@pytest.mark.parametrize(("key", "first"), [(100, 600), (1690, 1700), (2005, 2100)])
@of_dtypes
@of_head_dims
def test_every_height_of_an_outlier(head_dim, dtype, key, first):
    fwd.test_every_height_of_an_outlier(head_dim, DTYPES[dtype], key, first)


@pytest.mark.parametrize("name", fwd.LARGE)
def test_large_layouts(name):
    fwd.test_large_layouts(name)


def test_more_than_2_to_the_31_elements():
    fwd.test_more_than_2_to_the_31_elements()


def test_nan_and_inf_stay_in_their_group():
    fwd.test_nan_and_inf_stay_in_their_group()


@of_head_dims
def test_nan_and_inf_stay_in_their_response(head_dim):
    fwd.test_nan_and_inf_stay_in_their_response(head_dim)


@pytest.mark.parametrize(("own", "context"), [(125, 126.5), (126, 127.5), (124.5, 128.5), (126.5, 125), (100, 140)])
@of_head_dims
def test_keys_far_above_the_others(head_dim, own, context):
    fwd.test_keys_far_above_the_others(head_dim, own, context)


@of_head_dims
def test_sinks(head_dim):
    for name in ("one group", "ragged groups", "long"):
        windows.check(windows.LAYOUTS[name], {"sinks": True}, head_dim)


@pytest.mark.parametrize("ratio", values.RATIOS)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_values_of_another_head_dim(pair, ratio):
    values.test_ratios(pair, ratio)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_values_of_another_head_dim_in_fp16(pair):
    windows.check(windows.LAYOUTS["ragged groups"], {}, pair[0], 8, 2, torch.float16, True, head_dim_v=pair[1])
