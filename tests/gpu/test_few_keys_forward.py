"""The forward's CTAs without clusters, here for all layouts of two levels: the tests of other files, on them."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch

from codegen.spec import backward_specs, forward_spec
from codegen.tiles import FEW_KEYS_FORWARD_TILES, MIXED
from dualkv.ops import hopper
from tests.gpu import test_forward as fwd
from tests.gpu import test_head_dims_of_values as values
from tests.gpu import test_windows as windows

HEAD_DIMS = [head_dim for head_dim in FEW_KEYS_FORWARD_TILES if isinstance(head_dim, int)]
PAIRS = [pair for pair in MIXED if pair in FEW_KEYS_FORWARD_TILES]
of_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    specs = [forward_spec(t, d, h, few_keys=True) for t in ("bf16", "fp16") for d in HEAD_DIMS for h in (1, 4)]
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


def each(*tests):
    """Make parameters of every combination of arguments of each test; other arguments of it are fixtures."""
    return [
        pytest.param(test, dict(zip(arguments, some, strict=True)), id=f"{test.__name__}-{'-'.join(map(str, some))}")
        for test, arguments in tests
        for some in itertools.product(*arguments.values())
    ]


def run(test, arguments, request):
    """Call a test of another file."""
    fixtures = inspect.signature(test).parameters.keys() - arguments
    test(**arguments, **{name: request.getfixturevalue(name) for name in fixtures})


OF_HEAD_DIMS = {"head_dim": HEAD_DIMS}
OF_DTYPES = OF_HEAD_DIMS | {"dtype": [torch.bfloat16, torch.float16]}
TESTS = each(
    (fwd.test_layouts, {"name": fwd.LAYOUTS} | OF_DTYPES),
    (fwd.test_head_dims, {"head_dim": range(72, 129, 8)}),
    (fwd.test_tails, OF_HEAD_DIMS),
    (fwd.test_hostile_values, {"name": fwd.HOSTILE, "dtype": OF_DTYPES["dtype"]}),
    (fwd.test_outgrown_references, OF_HEAD_DIMS | {"num_sms": [1, 6, 132], "growth": [4, 30, 100]}),
    *(
        (fwd.test_every_height_of_an_outlier, OF_DTYPES | {"key": [key], "first": [first]})
        for key, first in ((100, 600), (1690, 1700), (2005, 2100))
    ),
    (fwd.test_large_layouts, {"name": fwd.LARGE}),
    (fwd.test_more_than_2_to_the_31_elements, {}),
    (fwd.test_nan_and_inf_stay_in_their_group, {}),
    (fwd.test_nan_and_inf_stay_in_their_response, OF_HEAD_DIMS),
    *(
        (fwd.test_keys_far_above_the_others, OF_HEAD_DIMS | {"own": [own], "context": [context]})
        for own, context in ((125, 126.5), (126, 127.5), (124.5, 128.5), (126.5, 125), (100, 140))
    ),
    (values.test_ratios, {"pair": PAIRS, "ratio": values.RATIOS}),
)


@pytest.mark.parametrize(("test", "arguments"), TESTS)
def test_those_of_other_files(test, arguments, request):
    run(test, arguments, request)


@pytest.mark.parametrize("ratio", [*range(1, 17), 17, 24])
def test_gqa_ratios(ratio):
    for name in ("ragged groups", "many in a tile"):
        fwd.check(*fwd.inputs(fwd.LAYOUTS[name], 3 * ratio, 3), fwd.LAYOUTS[name])


@pytest.mark.parametrize("num_sms", [1, 2, 7])
@of_head_dims
def test_a_few_ctas_take_all_the_work(head_dim, num_sms):
    for name in ("ragged groups", "aligned"):
        fwd.check(*fwd.inputs(fwd.LAYOUTS[name], head_dim=head_dim), fwd.LAYOUTS[name], num_sms)


@of_head_dims
def test_sinks(head_dim):
    for name in ("one group", "ragged groups", "long"):
        windows.check(windows.LAYOUTS[name], {"sinks": True}, head_dim)


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_values_of_another_head_dim_in_fp16(pair):
    windows.check(windows.LAYOUTS["ragged groups"], {}, pair[0], 8, 2, torch.float16, True, head_dim_v=pair[1])
