"""Batches as Megatron-Bridge makes them, with a loss by the model's own head, packed against its own way, in fp32.

The framework does not run here. Written after its sources of August 2026. test_updates.py has what slime and NeMo-RL
do: an enabled spec, and log-probs of logits.
"""

from __future__ import annotations

from typing import Any

import torch

import dualkv
from dualkv.integrations.megatron import PackedGroups, enable
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import VOCAB, build, layer_spec


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def rollouts() -> tuple[torch.Tensor, ...]:
    """Two groups and a lone rollout, ragged: tokens, next tokens, where there are tokens, and a loss mask of the tokens
    that predict trained ones, each [B, L]."""
    g = torch.Generator().manual_seed(3)
    tokens, masks = list[torch.Tensor](), list[torch.Tensor]()
    for length, lens in ((11, (4, 9, 2)), (6, (7, 5)), (8, (3,))):
        prompt = torch.randint(1, VOCAB, (length,), generator=g)
        for n in lens:
            tokens.append(torch.cat([prompt, torch.randint(1, VOCAB, (n,), generator=g)]))
            of_response = (torch.arange(n) % 4 != 2).float()  # a tool's tokens are not trained
            masks.append(torch.cat([torch.zeros(length - 1), of_response, torch.zeros(1)]))
    labels = [torch.cat([row[1:], torch.zeros(1, dtype=torch.int64)]) for row in tokens]
    return padded(tokens), padded(labels), padded([torch.ones(len(row)) for row in tokens]), padded(masks)


def own(model: Any, tokens: torch.Tensor, labels: torch.Tensor, _: Any, loss_mask: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None, labels=labels)
    return (losses * loss_mask)[:, :-1]


def packed(model: Any, tokens: torch.Tensor, _: Any, is_token: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    mask = loss_mask[:, :-1]
    batch = dualkv.pack_sequences(tokens, mask, attention_mask=is_token, labels="roll")
    labels, groups = batch.labels.clamp(min=0), PackedGroups(batch)
    losses = enable(model)(batch.input_ids, batch.position_ids, None, labels=labels, packed_seq_params=groups)
    return batch.unpack(losses[0, batch.predict_rows], like=mask)


def test_packed_rows_of_a_framework() -> None:
    cpu.parallel()
    data, found = rollouts(), []
    weights = torch.randn(data[0][:, 1:].shape)
    for compute in (packed, own):
        model = build(layer_spec(), {}, share_embeddings_and_output_weights=True)
        losses = compute(model, *data)
        (losses * weights).sum().backward()
        found.append((losses.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (losses, gradients), (expected, theirs) = found
    assert expected[expected != 0].std() > 0.5
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name
