"""Models and batches as slime, NeMo-RL and Megatron-Bridge make them, packed against their own way, in fp32.

The frameworks do not run here. Written after what they do, by their sources of August 2026: layer specs and arguments
of `GPTModel`, the form of a micro-batch, and where log-probs are taken from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

import dualkv
from dualkv.integrations.megatron import PackedGroups, enable
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import EXPERTS, SMALL, VOCAB

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


def log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """logits [n, V / ranks], targets [n] -> [n]"""
    return -tensor_parallel.vocab_parallel_cross_entropy(logits.float().clone(), targets)  # it works in place


def of_responses(values: torch.Tensor, data: Rollouts, before: int) -> list[torch.Tensor]:
    """values [B, L], each so many columns before its token -> those of each response"""
    ends = [len(t) - before for t in data.tokens]
    return [row[end - len(m) : end] for row, end, m in zip(values, ends, data.loss_masks, strict=True)]


def padded(rows: list[torch.Tensor], value: Any = 0) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


# ---------------------------------------------------------------- slime
def of_slime(packed: bool, experts: bool = False) -> GPTModel:
    """Build a model as its `model_provider` does; `--spec` names a function that returns the enabled spec."""
    settings = SMALL | (EXPERTS if experts else {})
    config = TransformerConfig(**settings)
    if experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=None, moe_grouped_gemm=False, qk_layernorm=True, multi_latent_attention=False
        )
    torch.manual_seed(0)
    return GPTModel(
        config=config,
        transformer_layer_spec=enable(spec) if packed else spec,
        vocab_size=VOCAB,
        max_sequence_length=64,
        pre_process=True,
        post_process=True,
        fp16_lm_cross_entropy=False,
        parallel_output=True,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_percent=1.0,
        rotary_base=10000,
        rope_scaling=False,
    )


def slime(model: GPTModel, data: Rollouts, packed: bool) -> list[torch.Tensor]:
    """Log-probs of responses: a list of samples, with one row of all their tokens, which is padded."""
    lens = [len(mask) for mask in data.loss_masks]
    if packed:
        masks = [torch.arange(len(t)) >= len(t) - n for t, n in zip(data.tokens, lens, strict=True)]
        batch = dualkv.pack_sequences(data.tokens, masks)
        groups = PackedGroups(batch)
        logits = model(batch.input_ids, batch.position_ids, None, packed_seq_params=groups)
        return list(batch.unpack(log_probs(logits[0, batch.predict_rows], batch.targets)))
    pad = torch.full((-sum(map(len, data.tokens)) % 16,), PAD)
    # megatron-core's attention on a CPU has no packed format: each sequence of the row runs alone.
    logits = torch.cat([model(t[None], torch.arange(len(t))[None], None)[0] for t in [*data.tokens, pad] if len(t)])
    found, end = [], 0
    for tokens, n in zip(data.tokens, lens, strict=True):
        end += len(tokens)
        found.append(log_probs(logits[end - n - 1 : end - 1], tokens[-n:]))
    return found


# ---------------------------------------------------------------- Megatron-Bridge and NeMo-RL
def layer_spec(config: Provider) -> Any:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )


@dataclass
class Provider(TransformerConfig):
    """A config that builds a model, as Megatron-Bridge's `GPTModelProvider` does, which NeMo-RL takes too."""

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


def bridge_thd(model: GPTModel, data: Rollouts, packed: bool) -> list[torch.Tensor]:
    """Compute the same of one row [1, T] of all sequences, each padded to a multiple of 8, with their `cu_seqlens`."""
    if not packed:
        return bridge(model, data, packed)
    gaps = [-len(t) % 8 for t in data.tokens]
    row = torch.cat([torch.nn.functional.pad(t, (0, n), value=PAD) for t, n in zip(data.tokens, gaps, strict=True)])
    masks = [_at(mask, t, len(t) - 1) for mask, t in zip(data.loss_masks, data.tokens, strict=True)]
    loss_mask = torch.cat([torch.nn.functional.pad(m, (0, n)) for m, n in zip(masks, gaps, strict=True)])[None]
    ends = torch.tensor([0, *(len(t) + n for t, n in zip(data.tokens, gaps, strict=True))]).cumsum(0)
    batch = dualkv.pack_sequences(row[None], loss_mask[:, :-1], cu_seqlens=ends, labels="roll")
    groups, labels = PackedGroups(batch), batch.labels.clamp(min=0)
    losses = model(batch.input_ids, batch.position_ids, None, labels=labels, packed_seq_params=groups)
    losses = batch.unpack(losses[0, batch.predict_rows], like=loss_mask[:, :-1])[0]
    begins = ends.tolist()
    return [
        -losses[begin + len(t) - 1 - len(m) : begin + len(t) - 1]
        for begin, t, m in zip(begins, data.tokens, data.loss_masks, strict=False)
    ]


def _at(mask: torch.Tensor, tokens: torch.Tensor, end: int) -> torch.Tensor:
    """A response's mask among the columns of its sequence, where the response ends before column `end`."""
    whole = torch.zeros(len(tokens), dtype=mask.dtype)
    whole[end - len(mask) : end] = mask
    return whole


def of_nemo(packed: bool) -> GPTModel:
    """Build a model from a provider whose layer spec is a function of it."""
    spec = (lambda config: enable(layer_spec(config))) if packed else layer_spec
    return Provider(**SMALL, transformer_layer_spec=spec).provide()


def nemo(model: GPTModel, data: Rollouts, packed: bool) -> list[torch.Tensor]:
    """Log-probs [B, S] with a zero in front, of `input_ids` [B, S] with `input_lengths`, masked by `token_mask`."""
    ids, lengths = padded(data.tokens, PAD), torch.tensor([len(t) for t in data.tokens])
    token_mask = padded([_at(mask, t, len(t)) for mask, t in zip(data.loss_masks, data.tokens, strict=True)])
    if packed:
        is_token = torch.arange(ids.shape[1]) < lengths[:, None]
        batch = dualkv.pack_sequences(ids, token_mask, attention_mask=is_token)
        logits = model(batch.input_ids, batch.position_ids, None, packed_seq_params=PackedGroups(batch))
        logps = batch.unpack(log_probs(logits[0, batch.predict_rows], batch.targets), like=ids)
    else:
        logits = model(ids, torch.arange(ids.shape[1]).expand_as(ids), None)
        logps = log_probs(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).view(len(ids), -1)
        logps = torch.cat([torch.zeros(len(ids), 1), logps], 1) * token_mask
    return of_responses(logps, data, 0)


@pytest.mark.parametrize(
    ("build", "run"),
    [
        (of_slime, slime),
        (lambda packed: of_slime(packed, experts=True), slime),
        (of_bridge, bridge),
        (of_bridge, bridge_thd),
        (of_nemo, nemo),
    ],
    ids=["slime", "slime, experts", "Megatron-Bridge", "Megatron-Bridge, thd", "NeMo-RL"],
)
def test_packed_rows_of_a_framework(build: Callable[[bool], GPTModel], run: Callable[..., list[torch.Tensor]]) -> None:
    cpu.parallel()
    data, found = rollouts(), []
    for packed in (True, False):
        model = build(packed)
        logps = torch.cat(run(model, data, packed))
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


def test_a_hook_that_comes_before_the_last_change_of_the_spec() -> None:
    """Megatron-Bridge replaces the core attention of a spec for `attention_backend=local`, after it was enabled."""
    cpu.parallel()
    data = rollouts()

    def spec(config: Provider) -> Any:
        found = enable(layer_spec(config))
        found.submodules.self_attention.submodules.core_attention = layer_spec(
            config
        ).submodules.self_attention.submodules.core_attention
        return found

    model = Provider(**SMALL, transformer_layer_spec=spec).provide()
    with pytest.raises(AssertionError, match="Packed sequence is not supported by DotProductAttention"):
        nemo(model, data, True)
    assert len(nemo(enable(model), data, True)) == len(data.tokens)
