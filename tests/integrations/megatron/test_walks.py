"""Walks of trees past memory in megatron-core: log-probs and all gradients against one packed row and against separate
sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dualkv
import tests.ranks
from dualkv.integrations.megatron import measure_rows, walk_passes
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import AGAIN, COUNTED, EXPERTS, HYBRID, LATENT, RECURRENT, VOCAB
from tests.integrations.megatron.walks import (
    BIAS,
    FOUR,
    NO_NORMS,
    ROWS,
    SCENARIOS,
    error,
    loss_of,
    made,
    packed,
    separate,
    tree,
    walked,
)

CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.float64),
        (AGAIN, torch.float32),
        (CORE | {"softmax_type": "learnable", "window_size": (3, 0)}, torch.float32),
        (BIAS | AGAIN, torch.float32),
        (LATENT, torch.float32),
        (RECURRENT | AGAIN, torch.float32),
        (HYBRID, torch.float32),
    ],
    ids=["fp64", "each layer again", "core attention again", "experts", "latent", "recurrent", "hybrid"],
)
def test_one_rank(settings: dict[str, Any], dtype: torch.dtype) -> None:
    if "pattern" in settings and cpu.hybrid_block is None:
        pytest.skip("megatron-core before 0.19 has no HybridModel")
    model, given = made(settings, dtype), tree(dtype=dtype)
    row, alone = packed(model, given), separate(model, given)
    found = walked(model, [given], ROWS)
    assert found.kinds.count("F") > 2
    bounds = (1e-5, 1e-4) if dtype == torch.float32 else (1e-6, 1e-6)
    for wanted in (row, alone):
        assert all(x < bound for x, bound in zip(error(found, wanted), bounds, strict=True)), error(found, wanted)


def test_layers_that_keep_all_and_loss_of_whole_sequences() -> None:
    model, given = made(AGAIN | {"num_layers": 4}), tree(root=60)
    costs = measure_rows(model, given.batch.input_ids, rows=8)
    assert costs.recomputed < costs.graph
    # The head makes logits in fp32 once or more, while the layers of a pass wait.
    with_head = measure_rows(model, given.batch.input_ids, loss_of, rows=8)
    assert with_head[:4] == pytest.approx(costs[:4], rel=0.1)  # rotary frequencies are cached since
    for more, less in zip(with_head.saved, costs.saved, strict=True):
        assert 4 * VOCAB < more - less < 32 * VOCAB
    ran = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda *_: ran.append(torch.is_grad_enabled()))

    def graphs(rows: float) -> int:
        ran.clear()
        found = walked(model, [given], dualkv.Memory(rows, costs))
        assert max(error(found, wanted)) < 1e-4
        return sum(ran) - found.kinds.count("G") * len(model.decoder.layers)

    wanted = packed(model, given)
    assert graphs(1.2 * costs.graph * given.batch.layout.num_tokens) == 0  # no layer runs again
    assert graphs(64 * costs.recomputed) > 0
    # Gradients of values that a first walk computes: here those of the mean of each sequence, to the third.
    logp = walked(model, [given], ROWS, backward=False).logp.requires_grad_()
    lens = [len(x) for x in given.batch.unpack(given.batch.targets)]
    loss = torch.stack([x.mean() ** 3 for x in logp.split(lens)]).sum()
    (weights,) = torch.autograd.grad(loss, logp)
    weighed = given._replace(weights=weights)
    assert max(error(walked(model, [weighed], ROWS), packed(model, weighed))) < 1e-4


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("settings", "later", "words"),
    [
        ({}, {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 2, expected 1"),
        ({}, {"mrope_section": [2, 3, 3]}, r"mrope_section is \[2, 3, 3\], expected None"),
        ({"hidden_dropout": 0.1}, {}, "hidden_dropout is 0.1, expected none"),
        (COUNTED, {}, "moe_aux_loss_coeff is"),
        (EXPERTS | {"moe_z_loss_coeff": 0.1}, {}, "moe_z_loss_coeff is 0.1"),
        (EXPERTS, {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}, "is 'allgather'"),
        ({}, {"distribute_saved_activations": True}, "distribute_saved_activations is True"),
        (LATENT | CORE | {"recompute_modules": ["mla_up_proj"]}, {}, "recompute_modules has mla_up_proj"),
        ({}, {"context_parallel_size": 3}, "has 4 heads, expected a multiple of the 3"),
        (RECURRENT, {"context_parallel_size": 2}, "a model with recurrent layers, expected 1 in a walk"),
    ],
)
def test_refused_before_anything_runs(settings: dict[str, Any], later: dict[str, Any], words: str) -> None:
    """later: fields that the model is not built with here."""
    model = made(settings)
    vars(model.config).update(later)
    with pytest.raises(ValueError, match=words):
        walk_passes(model, [tree().batch], ROWS)


def test_refused_in_a_pass() -> None:
    model, given = made({}), tree()
    with pytest.raises(ValueError, match="budget is 0, expected 1 or more"):
        next(walk_passes(model, [given.batch], 0))
    passes = walk_passes(model, [given.batch], ROWS)
    one = next(passes)
    with one:
        pass
    with pytest.raises(ValueError, match="the model ran 0 times in a pass"):
        one.backward()
    with pytest.raises(ValueError, match="expected the pass's predictions"):
        one.packed.predictions(one.part)
    with pytest.raises(TypeError, match="batches is a PackedSequences, expected a list"):
        walk_passes(model, given.batch, ROWS)


# ---------------------------------------------------------------- two ranks
@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("walks")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tests.ranks, "SECONDS", 240)  # ranks that wait for each other end here
        tests.ranks.on_ranks(2, "tests.integrations.megatron.walks:main", str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_of_one_model(name: str, ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        logp, gradients = one[name]
        assert logp < 1e-5
        assert gradients < 1e-4


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    tests.ranks.on_ranks(4, "tests.integrations.megatron.walks:of_four", str(tmp_path))
    for rank in range(4):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert list(found) == list(FOUR)
        assert all(logp < 1e-5 and gradients < 1e-4 for logp, gradients in found.values()), found


@pytest.mark.parametrize("name", ["fewer", "none"])
@pytest.mark.parametrize("kind", ["expert", "data"])
def test_ranks_with_unequal_trees(kind: str, name: str, ranks: list[dict[str, Any]]) -> None:
    found = [one[f"{kind}, {name}"] for one in ranks]
    assert found[0][2] == found[1][2]  # ranks run passes of the same kinds
    assert {"F", "G"} == set(found[0][2])
    for logp, gradients, _ in found:
        assert logp < 1e-5
        assert gradients < 1e-4


@pytest.mark.parametrize("name", ["fewer", "none"])
def test_two_updates_of_ranks_with_unequal_trees(name: str, ranks: list[dict[str, Any]]) -> None:
    assert max(one[f"updates, {name}"] for one in ranks) < 1e-4


def test_a_tensor_parallel_rank_keeps_its_share(ranks: list[dict[str, Any]]) -> None:
    alone = measure_rows(made(NO_NORMS), tree().batch.input_ids, loss_of, rows=8)
    for one in ranks:
        assert one["costs"] == ranks[0]["costs"]
        assert one["costs"].kept == alone.kept / 2
        assert alone.graph / 2 < one["costs"].graph < alone.graph


def test_ranks_raise_together(ranks: list[dict[str, Any]]) -> None:
    first, second = (one["refused"] for one in ranks)
    assert first[0] == "budget is 0, expected 1 or more"
    assert second[0].startswith("1 of 2 ranks refused their batch or budget")
    assert first[1] == second[1]
    assert first[1].startswith("ranks of one model have different parts")
