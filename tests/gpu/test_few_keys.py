"""The backward's CTAs without clusters, here for all layouts: the tests of other files, on them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from codegen.spec import GRADIENTS, backward_specs, forward_spec
from codegen.tiles import FEW_KEYS_TILES
from dualkv.ops import hopper
from tests.gpu import test_backward as bwd
from tests.gpu import test_dispatch as dispatch
from tests.gpu import test_not_finite as not_finite
from tests.gpu import test_trees as trees
from tests.gpu.test_backward import another_process_loads_the_gpu  # noqa: F401
from tests.gpu.test_dispatch import only_the_kernel, seeded  # noqa: F401

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = list(FEW_KEYS_TILES)
of_head_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)
of_orders = pytest.mark.parametrize("deterministic", [False, True])
of_dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(t, d, fixed) for t in DTYPES for d in HEAD_DIMS for fixed in (False, True)]
    kinds += [("bf16", d, fixed, part) for d in HEAD_DIMS for fixed in (False, True) for part in GRADIENTS[1:]]
    compile_all(spec for kind in kinds for spec in backward_specs(*kind, few_keys=True).present)
    compile_all(forward_spec(t, d, h) for t in DTYPES for d in HEAD_DIMS for h in (1, 4, 7, 8, 16))
    compile_all(forward_spec("bf16", d, 4, trees=True) for d in HEAD_DIMS)


@pytest.fixture(autouse=True)
def few_keys(monkeypatch):
    """All layouts are taken for ones that are large enough, and walked less without clusters."""
    monkeypatch.setattr(hopper, "FEW_KEYS_ROWS", 0)
    monkeypatch.setattr(hopper, "FEW_KEYS_WALK", 0)
    monkeypatch.setattr(hopper, "FEW_KEYS_COST", math.inf)  # forwards as ever
    found, made = [], hopper._backward_kernels

    def noting(*arguments):
        specs, kernels = made(*arguments)
        found.append((specs.main.head_dim, replace(specs.main.tile, deterministic=False)))
        return specs, kernels

    monkeypatch.setattr(hopper, "_backward_kernels", noting)
    yield
    assert found
    assert all(tile == FEW_KEYS_TILES[head_dim] for head_dim, tile in found)


@of_dtypes
@of_head_dims
@pytest.mark.parametrize("name", bwd.LAYOUTS)
def test_layouts(name, head_dim, dtype):
    bwd.test_layouts(name, head_dim, DTYPES[dtype])


@of_head_dims
@pytest.mark.parametrize("name", bwd.LAYOUTS)
def test_deterministic(name, head_dim):
    bwd.test_deterministic(name, head_dim)


@of_orders
@of_head_dims
@pytest.mark.parametrize("name", trees.LAYOUTS)
def test_trees(name, head_dim, deterministic):
    trees.test_backward(name, head_dim, deterministic)


@pytest.mark.parametrize("ratio", [1, 5, 7, 40])
def test_gqa_ratios(ratio):
    bwd.test_gqa_ratios(ratio)


@of_dtypes
@of_head_dims
def test_scales(head_dim, dtype):
    for scale in (1e-37, 0.5):
        bwd.test_scales(scale, head_dim, DTYPES[dtype])


@of_orders
@of_head_dims
def test_split_key_blocks(head_dim, deterministic):
    tile = backward_specs("bf16", head_dim, deterministic, few_keys=True).main.tile
    assert hopper.backward_plan(bwd.SPLIT._segments, torch.device("cuda", 0), tile, 8, 1).num_partials
    bwd.check(*bwd.inputs(bwd.SPLIT, 8, 1, head_dim), bwd.SPLIT, deterministic)


@of_orders
@of_head_dims
def test_rows_that_ask_nothing(head_dim, deterministic):
    bwd.test_prompts_that_ask_nothing_get_zeros(head_dim, deterministic)
    trees.test_a_part_below_a_path(head_dim, deterministic)


@pytest.mark.parametrize("gradients", GRADIENTS[1:])
@of_head_dims
@pytest.mark.parametrize("name", ["ragged groups", "split"])
def test_parts_of_the_gradients(name, head_dim, gradients):
    bwd.test_parts_of_the_gradients(name, head_dim, gradients)


@of_head_dims
def test_tails(head_dim):
    bwd.test_tails(head_dim)


@pytest.mark.parametrize("name", ["one group", "ragged groups", "split"])
@of_head_dims
def test_a_hundred_deterministic_runs(name, head_dim, another_process_loads_the_gpu):  # noqa: F811
    bwd.test_a_hundred_deterministic_runs(name, head_dim, another_process_loads_the_gpu)


@of_head_dims
def test_a_fixed_order(head_dim, monkeypatch):
    bwd.test_a_fixed_order_while_other_work_holds_the_device(head_dim)
    bwd.test_items_of_a_fixed_order_come_from_a_counter(head_dim, monkeypatch)


# ---------------------------------------------------------------- the ops
@of_orders
@of_dtypes
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2), (7, 1), (34, 2)])
@of_head_dims
def test_gradients(only_the_kernel, head_dim, heads, kv_heads, dtype, deterministic):  # noqa: F811
    dispatch.test_gradients(only_the_kernel, head_dim, heads, kv_heads, DTYPES[dtype], deterministic)


@of_head_dims
def test_bits(only_the_kernel, head_dim):  # noqa: F811
    dispatch.test_gradients_of_keys_and_values_are_bitwise_equal(only_the_kernel, head_dim)


@of_orders
def test_graph_capture(only_the_kernel, deterministic):  # noqa: F811
    dispatch.test_graph_capture_of_forward_and_backward(only_the_kernel, deterministic)


@pytest.mark.parametrize(
    "test",
    [
        dispatch.test_nothing_compiles_or_loads_when_the_batch_changes,
        dispatch.test_gradients_of_strided_inputs,
        dispatch.test_gradients_of_some_inputs,
        dispatch.test_a_dropped_layout_leaves_its_plan_to_the_kernel,
        dispatch.test_pytorchs_switch_orders_the_sums_too,
        dispatch.test_gradient_checkpointing_and_autocast,
    ],
    ids=lambda test: test.__name__,
)
def test_calls(only_the_kernel, test):  # noqa: F811
    test(only_the_kernel)


# ---------------------------------------------------------------- NaN and infinity
@of_dtypes
@pytest.mark.parametrize("value", [not_finite.NAN, not_finite.INF, -not_finite.INF], ids=str)
@pytest.mark.parametrize(("head_dim", "heads"), [*itertools.product(HEAD_DIMS, [(8, 2), (3, 3)])])
def test_a_broken_response_leaves_others_their_results(head_dim, heads, value, dtype):
    not_finite.test_a_broken_response_leaves_others_their_results(head_dim, *heads, value, dtype)


@pytest.mark.parametrize("needs", ["q", "k", "v", "kv"])
def test_broken_values_where_gradients_are_asked_in_part(needs):
    not_finite.test_gradients_asked_in_part(needs)


def test_broken_values_in_trees():
    not_finite.test_segments_of_trees()


@pytest.mark.parametrize("value", [not_finite.NAN, not_finite.INF], ids=str)
def test_others_keep_their_bits(value):
    not_finite.test_others_keep_their_bits_where_responses_fill_tiles(value)
