"""`enable(fast=True)` on a GPU: the limit of memory holds, layers keep more than attention, gradients stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations import checkpointing  # noqa: E402
from dualkv.integrations.transformers import enable, memory_for_logits, recompute_layers  # noqa: E402

pytestmark = pytest.mark.any_gpu
LAYOUT = dualkv.Layout.from_lengths([2048], [[512] * 12])


def make_model(layers: int = 8, vocabulary: int = 512) -> Any:
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = tf.Qwen3Config(**sizes, head_dim=128, num_hidden_layers=layers, vocab_size=vocabulary)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return tf.Qwen3ForCausalLM(config).to(torch.bfloat16).train()


def step(model: Any) -> tuple[list[torch.Tensor], int]:
    """Gradients, and the peak in bytes."""
    ids = torch.randint(512, (1, LAYOUT.num_tokens), generator=torch.Generator().manual_seed(1)).cuda()
    torch.cuda.reset_peak_memory_stats()
    model(input_ids=ids, dualkv=LAYOUT, use_cache=False).logits.float().square().mean().backward()
    gradients = [p.grad.cpu() for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return gradients, torch.cuda.max_memory_allocated()


def test_a_limit_of_memory_holds_and_changes_no_gradient() -> None:
    model = enable(make_model(), deterministic=True)
    recompute_layers(model, "attention")
    before, least = step(model)
    gradients, most = [], []
    for limit in (least + 2**30, 2 * least + 2**33):  # a layer keeps about 0.6 GiB
        recompute_layers(model, "attention", memory=limit / 2**30)
        for _ in range(4):
            found, peak = step(model)
            assert peak <= limit
        gradients.append(found)
        (fit,) = checkpointing._fits(model.model)
        most.append(fit.levels)
    assert checkpointing.PRODUCTS in most[0], most
    assert most[1] == [checkpointing.LEFT_OUT] * 8, most
    for found in gradients:
        assert all(map(torch.equal, found, before))


def test_logits_take_what_layers_leave_and_change_no_gradient() -> None:
    vocabulary, generator = 32768, torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(vocabulary, (n,), generator=generator) for n in (2048, *[512] * 12))
    batch = dualkv.pack([prompt], [responses]).to("cuda")
    model = enable(make_model(vocabulary=vocabulary), deterministic=True)

    def step() -> tuple[list[torch.Tensor], int, float | None]:
        torch.cuda.reset_peak_memory_stats()
        hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout, use_cache=False).last_hidden_state
        lent = memory_for_logits(model)
        logp, _ = dualkv.response_logprobs(hidden, model.lm_head.weight, batch, chunk_size=512, memory=lent)
        logp.mean().backward()
        gradients = [p.grad.cpu() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients, torch.cuda.max_memory_allocated(), lent

    recompute_layers(model, "attention")
    before, least, _ = step()
    limit = least + 2**29
    recompute_layers(model, "attention", memory=limit / 2**30)
    for _ in range(4):
        found, peak, lent = step()
        assert peak <= limit
        assert all(map(torch.equal, found, before))
    assert lent == limit / 2**30


def test_fast_is_as_near_to_fp64_as_plain() -> None:
    """By Liger's kernels where they are, else by the compiler's."""
    exact, *_ = step(enable(make_model(2).double(), check=False))
    apart = []
    for fast in (False, True):
        found, _ = step(enable(make_model(2), fast=fast))
        differences = [(x.double() - y).square().sum() for x, y in zip(found, exact, strict=True)]
        apart.append(float(torch.stack(differences).sum().sqrt()))
    assert apart[1] <= 1.1 * apart[0], apart
