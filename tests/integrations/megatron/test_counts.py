"""Tests of what routers count: expert biases, auxiliary losses and the z-loss of packed rows against separate
sequences, by megatron-core itself, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualkv
from dualkv.integrations.megatron import PackedGroups, disable, enable
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import AGAIN, COUNTED, EXPERTS, VOCAB, build, layer_spec

LENGTH = 9  # of each sequence: megatron-core counts a batch of equal ones without padding
AUX = {"moe_aux_loss_coeff": 0.5}
KINDS: dict[str, dict[str, Any]] = {
    "aux": AUX | {"moe_router_load_balancing_type": "aux_loss"},
    "each sequence": AUX | {"moe_router_load_balancing_type": "seq_aux_loss"},
    "global": AUX | {"moe_router_load_balancing_type": "global_aux_loss"},
    "z": {"moe_z_loss_coeff": 0.3},
    "bias": {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "all": COUNTED,
    # Without seq_aux_loss: megatron-core 0.16 takes a batch's tokens for those of one sequence there.
    "per token": COUNTED
    | {
        "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
        "moe_aux_loss_coeff": [0.3, 0.4],
        "calculate_per_token_loss": True,
    },
    "all, recomputed": COUNTED | AGAIN,
}


def tokens(g: torch.Generator, n: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (n,), generator=g)


def groups() -> tuple[dualkv.PackedBatch, list[torch.Tensor]]:
    """Two groups."""
    g = torch.Generator().manual_seed(0)
    prompts = [tokens(g, 6), tokens(g, 4)]
    responses = [[tokens(g, LENGTH - len(p)) for _ in range(n)] for p, n in zip(prompts, (3, 2), strict=True)]
    whole = [torch.cat([p, r]) for p, rs in zip(prompts, responses, strict=True) for r in rs]
    return dualkv.pack(prompts, responses), whole


def trees() -> tuple[dualkv.PackedSequences, list[torch.Tensor]]:
    """Three levels, and a rollout that is there twice."""
    g = torch.Generator().manual_seed(1)
    root, turn = tokens(g, 3), tokens(g, 2)
    grown = [torch.cat([root, turn, tokens(g, 4)]) for _ in range(3)] + [torch.cat([root, tokens(g, 6)])]
    whole = [*grown, grown[1], tokens(g, LENGTH)]
    batch = dualkv.pack_sequences(whole)
    assert batch.layout.depth == 3
    return batch, whole


def run(model: Any, ids: torch.Tensor, packed: PackedGroups | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Gradients of the auxiliary losses alone, and buffers of the routers."""
    positions = torch.arange(ids.shape[1])[None].expand_as(ids) if packed is None else packed.layout.position_ids[None]
    logits = model(ids, positions, None, packed_seq_params=packed)
    (logits * 0).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, {name: b.clone() for name, b in model.named_buffers() if ".router." in name}


def compare(found: Any, wanted: Any, bound: float = 1e-5) -> None:
    assert found[0].keys() == wanted[0].keys()
    for name, gradient in wanted[0].items():
        assert (found[0][name] - gradient).abs().max() <= bound * gradient.abs().max()
    assert found[1].keys() == wanted[1].keys()
    for name, buffer in wanted[1].items():
        assert torch.equal(found[1][name], buffer), name


@pytest.mark.parametrize("make", [groups, trees])
@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_those_of_separate_sequences(kind: str, make: Any) -> None:
    """Padding rows count nothing. Counts by rows, as megatron-core makes them, are others."""
    cpu.parallel()
    settings = EXPERTS | KINDS[kind]
    batch, whole = make()
    wanted = run(build(layer_spec(**settings), settings).train(), torch.stack(whole))
    packed = PackedGroups(batch, 3)
    assert packed.layout.num_tokens > batch.layout.num_tokens
    ids = packed.split(batch.input_ids)
    compare(run(build(enable(layer_spec(**settings)), settings).train(), ids, packed), wanted)
    rows = PackedGroups(batch, 3, count="rows")
    by_rows = run(build(enable(layer_spec(**settings)), settings).train(), ids, rows)
    with pytest.raises(AssertionError):
        compare(by_rows, wanted, 1e-2)
    enabled = enable(build(layer_spec(**settings), settings).train())  # in place
    compare(run(enabled, ids, packed), wanted)
    enabled.zero_grad()
    stock = build(layer_spec(**settings), settings).train()
    assert [type(m) for m in disable(enabled).modules()] == [type(m) for m in stock.modules()]


def test_a_layout_of_prompts_and_responses_says_where_rollouts_end() -> None:
    cpu.parallel()
    batch, whole = groups()
    wanted = run(build(layer_spec(**COUNTED), COUNTED).train(), torch.stack(whole))
    model = build(enable(layer_spec(**COUNTED)), COUNTED).train()
    compare(run(model, batch.input_ids, PackedGroups(batch.layout)), wanted)
    plain = dualkv.Layout.from_segments([0, LENGTH, 2 * LENGTH], [-1, -1])  # each sequence is a rollout
    wanted = run(build(layer_spec(**COUNTED), COUNTED).train(), torch.stack(whole[:2]))
    model = build(enable(layer_spec(**COUNTED)), COUNTED).train()
    compare(run(model, torch.cat(whole[:2])[None], PackedGroups(plain)), wanted)


def test_ragged_sequences() -> None:
    """Each in a micro-batch of its own: the mean of their losses, and the sum of their tokens."""
    cpu.parallel()
    settings = EXPERTS | AUX | {"moe_router_load_balancing_type": "seq_aux_loss"} | KINDS["bias"]
    g = torch.Generator().manual_seed(2)
    prompts = [tokens(g, 5), tokens(g, 3)]
    responses = [[tokens(g, n) for n in lens] for lens in ((4, 1, 7), (2, 6))]
    batch = dualkv.pack(prompts, responses)
    packed = run(build(enable(layer_spec(**settings)), settings).train(), batch.input_ids, PackedGroups(batch))
    alone = build(layer_spec(**settings), settings).train()
    sequences = [torch.cat([p, r]) for p, rs in zip(prompts, responses, strict=True) for r in rs]
    for sequence in sequences:
        gradients, buffers = run(alone, sequence[None])
    compare(packed, ({name: x / len(sequences) for name, x in gradients.items()}, buffers))


def test_a_model_that_runs_without_packed_groups_counts_as_before() -> None:
    cpu.parallel()
    batch, whole = groups()
    model = build(enable(layer_spec(**COUNTED)), COUNTED).train()
    run(model, batch.input_ids, PackedGroups(batch))
    model.zero_grad()
    for name, buffer in model.named_buffers():
        if "tokens_per_expert" in name or "ga_steps" in name:
            buffer.zero_()
    compare(run(model, torch.stack(whole)), run(build(layer_spec(**COUNTED), COUNTED).train(), torch.stack(whole)), 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            r"recompute_modules is \['moe'\] and moe_router_enable_expert_bias True, expected without 'moe' or"
            r" recompute_granularity='full', or PackedGroups\(count='rows'\): ",
        ),
        (
            {"mlp_chunks_for_training": 2},
            "mlp_chunks_for_training is 2 and moe_router_enable_expert_bias True, expected 1",
        ),
    ],
)
def test_configs_whose_routers_would_not_know(settings: dict[str, Any], says: str) -> None:
    cpu.parallel()
    batch, _ = groups()
    model = build(enable(layer_spec(**COUNTED)), COUNTED).train()
    for name, value in settings.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=f"^{says}"):
        run(model, batch.input_ids, PackedGroups(batch))
    if "recompute_modules" in settings:
        model.config.recompute_granularity = None
    else:
        model.config.mlp_chunks_for_training = 1
    run(model, batch.input_ids, PackedGroups(batch))


def test_what_is_not_known_is_refused() -> None:
    cpu.parallel()
    batch, _ = trees()
    model = build(enable(layer_spec(**COUNTED)), COUNTED).train()
    with pytest.raises(ValueError, match=r"^the layout has 3 levels, .*pack_sequences, or count='rows'"):
        run(model, batch.input_ids, PackedGroups(batch.layout))
    run(model, batch.input_ids, PackedGroups(batch.layout, count="rows"))
    with torch.no_grad():  # nothing counts there
        model.eval()(batch.input_ids, batch.position_ids, None, packed_seq_params=PackedGroups(batch.layout))
    with pytest.raises(ValueError, match=r"^count is 'tokens', expected 'rollouts' or 'rows'$"):
        PackedGroups(batch, count="tokens")  # type: ignore[arg-type]
    router = model.train().decoder.layers[1].mlp.router
    attention = model.decoder.layers[0].self_attention
    packed = PackedGroups(batch)
    rows, frequencies = torch.zeros(packed.layout.num_tokens, 1, 32), model.rotary_pos_emb(packed.max_seqlen_q)
    attention(rows, None, packed_seq_params=packed, rotary_pos_emb=frequencies)
    with pytest.raises(ValueError, match=r"^the router of layer 2 runs after the attention of layer 1, expected"):
        router(rows)
    router = model.decoder.layers[0].mlp.router
    with pytest.raises(ValueError, match=rf"^the router of layer 1 gets 3 rows, expected {len(rows)}, or"):
        router(rows[:3])
    with pytest.raises(ValueError, match=r"^padding_mask came together with PackedGroups"):
        router(rows, torch.zeros(len(rows), 1, dtype=torch.bool))
