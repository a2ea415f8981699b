"""The backward's CTAs without clusters, here for all layouts: the tests of other files, on them."""

from __future__ import annotations

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
from tests.gpu.test_few_keys_forward import each, run

HEAD_DIMS = list(FEW_KEYS_TILES)


@pytest.fixture(scope="module", autouse=True)
def kernels(compile_all):
    kinds = [(t, d, fixed) for t in ("bf16", "fp16") for d in HEAD_DIMS for fixed in (False, True)]
    kinds += [("bf16", d, fixed, part) for d in HEAD_DIMS for fixed in (False, True) for part in GRADIENTS[1:]]
    compile_all(spec for kind in kinds for spec in backward_specs(*kind, few_keys=True).present)
    compile_all(forward_spec(t, d, h) for t in ("bf16", "fp16") for d in HEAD_DIMS for h in (1, 4, 7, 8, 16))
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


OF_HEAD_DIMS, OF_ORDERS = {"head_dim": HEAD_DIMS}, {"deterministic": [False, True]}
OF_DTYPES = {"dtype": [torch.bfloat16, torch.float16]}
TESTS = each(
    (bwd.test_layouts, {"name": bwd.LAYOUTS} | OF_HEAD_DIMS | OF_DTYPES),
    (bwd.test_deterministic, {"name": bwd.LAYOUTS} | OF_HEAD_DIMS),
    (trees.test_backward, {"name": trees.LAYOUTS} | OF_HEAD_DIMS | OF_ORDERS),
    (bwd.test_gqa_ratios, {"ratio": [1, 5, 7, 40]}),
    (bwd.test_scales, {"scale": [1e-37, 0.5]} | OF_HEAD_DIMS | OF_DTYPES),
    (bwd.test_prompts_that_ask_nothing_get_zeros, OF_HEAD_DIMS | OF_ORDERS),
    (trees.test_a_part_below_a_path, OF_HEAD_DIMS | OF_ORDERS),
    (
        bwd.test_parts_of_the_gradients,
        {"name": ["ragged groups", "split"]} | OF_HEAD_DIMS | {"gradients": GRADIENTS[1:]},
    ),
    (bwd.test_tails, OF_HEAD_DIMS),
    (bwd.test_a_hundred_deterministic_runs, {"name": ["one group", "ragged groups", "split"]} | OF_HEAD_DIMS),
    (bwd.test_a_fixed_order_while_other_work_holds_the_device, OF_HEAD_DIMS),
    (bwd.test_items_of_a_fixed_order_come_from_a_counter, OF_HEAD_DIMS),
    *(
        (dispatch.test_gradients, OF_HEAD_DIMS | {"heads": [heads], "kv_heads": [kv_heads]} | OF_DTYPES | OF_ORDERS)
        for heads, kv_heads in ((4, 4), (8, 2), (7, 1), (34, 2))
    ),
    (dispatch.test_gradients_of_keys_and_values_are_bitwise_equal, OF_HEAD_DIMS),
    (dispatch.test_graph_capture_of_forward_and_backward, OF_ORDERS),
    (dispatch.test_nothing_compiles_or_loads_when_the_batch_changes, {}),
    (dispatch.test_gradients_of_strided_inputs, {}),
    (dispatch.test_gradients_of_some_inputs, {}),
    (dispatch.test_a_dropped_layout_leaves_its_plan_to_the_kernel, {}),
    (dispatch.test_pytorchs_switch_orders_the_sums_too, {}),
    (dispatch.test_gradient_checkpointing_and_autocast, {}),
    *(
        (
            not_finite.test_a_broken_response_leaves_others_their_results,
            OF_HEAD_DIMS
            | {"heads": [heads], "kv_heads": [kv_heads], "dtype": ["bf16", "fp16"]}
            | {"value": [not_finite.NAN, not_finite.INF, -not_finite.INF]},
        )
        for heads, kv_heads in ((8, 2), (3, 3))
    ),
    (not_finite.test_gradients_asked_in_part, {"needs": ["q", "k", "v", "kv"]}),
    (not_finite.test_segments_of_trees, {}),
    (
        not_finite.test_others_keep_their_bits_where_responses_fill_tiles,
        {"value": [not_finite.NAN, not_finite.INF]},
    ),
)


@pytest.mark.parametrize(("test", "arguments"), TESTS)
def test_those_of_other_files(test, arguments, request):
    run(test, arguments, request)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_split_key_blocks(head_dim, deterministic):
    tile = backward_specs("bf16", head_dim, deterministic, few_keys=True).main.tile
    assert hopper.backward_plan(bwd.SPLIT._segments, torch.device("cuda", 0), tile, 8, 1).num_partials
    bwd.check(*bwd.inputs(bwd.SPLIT, 8, 1, head_dim), bwd.SPLIT, deterministic)
