"""Models and batches as Megatron-Bridge makes them, packed against its own way, in fp32.

The framework does not run here. Written after what it does, by its sources of August 2026: the provider of a model, the
form of a micro-batch, and a loss by the model's own head. test_updates.py has what slime and NeMo-RL do: an enabled
spec, and log-probs of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import dualkv
from dualkv.integrations.megatron import PackedGroups, enable
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import SMALL, VOCAB

PAD = 0


@dataclass
class Rollouts:
    """Two groups and a lone rollout, ragged, with tokens of tools that are not trained."""

    tokens: list[torch.Tensor]
    loss_masks: list[torch.Tensor]  # of responses
    weights: list[torch.Tensor]  # of responses, in the loss


def rollouts() -> Rollouts:
    g = torch.Generator().manual_seed(3)

    def draw(n: int) -> torch.Tensor:
        return torch.randint(1, VOCAB, (n,), generator=g)

    responses = [[draw(n) for n in lens] for lens in ((4, 9, 2), (7, 5), (3,))]
    prompts = [draw(n) for n in (11, 6, 8)]
    tokens = [torch.cat([p, r]) for p, rs in zip(prompts, responses, strict=True) for r in rs]
    flat = [r for rs in responses for r in rs]
    return Rollouts(tokens, [torch.arange(len(r)) % 4 != 2 for r in flat], [torch.randn(len(r)) for r in flat])


def of_responses(values: torch.Tensor, data: Rollouts, before: int) -> list[torch.Tensor]:
    """values [B, L], each so many columns before its token -> those of each response"""
    ends = [len(t) - before for t in data.tokens]
    return [row[end - len(m) : end] for row, end, m in zip(values, ends, data.loss_masks, strict=True)]


def padded(rows: list[torch.Tensor], value: Any = 0) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def layer_spec(config: Provider) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )


@dataclass
class Provider(TransformerConfig):
    """A config that builds a model, as Megatron-Bridge's `GPTModelProvider` does."""

    vocab_size: int = VOCAB
    seq_length: int = 64
    position_embedding_type: str = "rope"
    transformer_layer_spec: Callable[[Provider], Any] = layer_spec
    hooks: tuple[Callable[[list[Any]], list[Any]], ...] = ()

    def provide(self) -> GPTModel:
        torch.manual_seed(0)
        model = GPTModel(
            self,
            transformer_layer_spec=self.transformer_layer_spec(self),
            vocab_size=self.vocab_size,
            max_sequence_length=self.seq_length,
            parallel_output=True,
            share_embeddings_and_output_weights=True,
            position_embedding_type=self.position_embedding_type,
            pre_process=True,
            post_process=True,
        )
        models = [model]
        for hook in self.hooks:
            models = hook(models)
        return models[0]


def of_bridge(packed: bool) -> GPTModel:
    """Build a model whose provider has a hook that runs before the model is wrapped."""
    return Provider(**SMALL, hooks=(lambda models: [enable(m) for m in models],) if packed else ()).provide()


def bridge(model: GPTModel, data: Rollouts, packed: bool) -> list[torch.Tensor]:
    """Compute a loss for each token, by the model's own head: `labels` [B, L] are the next tokens."""
    tokens, last = padded(data.tokens, PAD), torch.tensor([PAD])
    labels = padded([torch.cat([t[1:], last]) for t in data.tokens], PAD)
    loss_mask = padded([_at(mask, t, len(t) - 1) for mask, t in zip(data.loss_masks, data.tokens, strict=True)])
    if packed:
        is_token = padded([torch.ones(len(t)) for t in data.tokens])
        batch = dualkv.pack_sequences(tokens, loss_mask[:, :-1], attention_mask=is_token, labels="roll")
        losses = model(
            batch.input_ids,
            batch.position_ids,
            None,
            labels=batch.labels.clamp(min=0),
            packed_seq_params=PackedGroups(batch),
        )
        losses = batch.unpack(losses[0, batch.predict_rows], like=loss_mask[:, :-1])
    else:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        losses = model(tokens, positions, None, labels=labels) * loss_mask
    return of_responses(-losses, data, 1)


def _at(mask: torch.Tensor, tokens: torch.Tensor, end: int) -> torch.Tensor:
    """A response's mask among the columns of its sequence, where the response ends before column `end`."""
    whole = torch.zeros(len(tokens), dtype=mask.dtype)
    whole[end - len(mask) : end] = mask
    return whole


def test_packed_rows_of_a_framework() -> None:
    cpu.parallel()
    data, found = rollouts(), []
    for packed in (True, False):
        model = of_bridge(packed)
        logps = torch.cat(bridge(model, data, packed))
        loss = -(logps * torch.cat(data.weights) * torch.cat(data.loss_masks)).sum() / torch.cat(data.loss_masks).sum()
        loss.backward()
        found.append((logps.detach(), loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (logps, loss, gradients), (expected, wanted, theirs) = found
    assert expected.std() > 0.5
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-5)
    assert gradients.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max().clamp(min=1e-3), name
