"""`enable(fast=True)` and layers that keep results, on a GPU: gradients stay."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import dualkv
from dualkv.draws import Draws

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import checkpointing, enable, kept, recompute_layers  # noqa: E402

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


def test_layers_that_keep_more_take_more_memory_and_change_no_gradient() -> None:
    model, taken, before = enable(make_model(), deterministic=True), [], None
    for keep, layers in (("nothing", None), ("attention", None), ("products", 4), ("products", None), ("all", 4)):
        recompute_layers(model, keep, layers=layers)
        found, peak = step(model)
        assert before is None or all(map(torch.equal, found, before)), (keep, layers)
        before = found
        taken.append(peak)
    assert taken == sorted(taken), taken
    assert taken[3] - taken[2] > 2**29, taken  # the products of a layer take 0.15 GiB


def test_kept_logits_change_no_gradient() -> None:
    vocabulary, generator = 32768, torch.Generator().manual_seed(1)
    prompt, *responses = (torch.randint(vocabulary, (n,), generator=generator) for n in (2048, *[512] * 12))
    batch = dualkv.pack([prompt], [responses]).to("cuda")
    model = recompute_layers(enable(make_model(vocabulary=vocabulary), deterministic=True), "attention")

    def step(kept_chunks: int) -> tuple[list[torch.Tensor], int]:
        hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout, use_cache=False).last_hidden_state
        before = torch.cuda.memory_allocated()
        weight = model.lm_head.weight
        logp, _ = dualkv.response_logprobs(hidden, weight, batch, chunk_size=512, kept_chunks=kept_chunks)
        held = torch.cuda.memory_allocated() - before
        logp.mean().backward()
        gradients = [p.grad.cpu() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return gradients, held

    (before, least), (found, most) = step(0), step(5)
    assert all(map(torch.equal, found, before))
    assert round((most - least) / (512 * vocabulary * 2), 1) == 5  # of other tensors a few are kept in one way alone


def test_fast_is_as_near_to_fp64_as_plain() -> None:
    """Liger's kernels run where they are installed, else the compiler's."""
    exact, *_ = step(enable(make_model(2).double(), check=False))
    apart = []
    for fast in (False, True):
        found, _ = step(enable(make_model(2), fast=fast))
        differences = [(x.double() - y).square().sum() for x, y in zip(found, exact, strict=True)]
        apart.append(float(torch.stack(differences).sum().sqrt()))
    assert apart[1] <= 1.1 * apart[0], apart


# ---------------------------------------------------------------- kept products that the model overwrites
SMALL = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
}  # fmt: skip


def make_olmo(clip: float | None = 0.05) -> Any:
    return tf.OlmoForCausalLM(tf.OlmoConfig(**SMALL, clip_qkv=clip))


def make_gpt_oss() -> Any:
    heads = {"num_key_value_heads": 2, "head_dim": 64, "sliding_window": 128}
    return tf.GptOssForCausalLM(tf.GptOssConfig(**SMALL, **heads, num_local_experts=4, num_experts_per_tok=2))


def make_gemma3n() -> Any:
    own = {
        "vocab_size_per_layer_input": 512, "num_key_value_heads": 2, "head_dim": 64, "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 0, "laurel_rank": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    }  # fmt: skip
    return tf.Gemma3nForCausalLM(tf.Gemma3nTextConfig(**SMALL, **own))


def make_adapted() -> Any:
    peft = pytest.importorskip("peft")
    model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=64))
    model = peft.get_peft_model(model, peft.AdaLoraConfig(total_step=10, target_modules=["q_proj", "down_proj"]))
    model.enable_input_require_grads()
    return model


OVERWRITE = {"olmo": make_olmo, "gpt_oss": make_gpt_oss, "gemma3n": make_gemma3n, "adalora": make_adapted}


def randomized(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make().to(torch.bfloat16).train()
        for p in model.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.05)
    return model


def gradients(model: Any) -> list[torch.Tensor]:
    ids = torch.randint(512, (1, LAYOUT.num_tokens), generator=torch.Generator().manual_seed(1)).cuda()
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, dualkv=LAYOUT, use_cache=False).logits.float().square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def apart(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Relative difference of all gradients."""
    pairs = list(zip(found, expected, strict=True))
    difference = sum(float((x.double() - y.double()).square().sum()) for x, y in pairs)
    return (difference / sum(float(y.double().square().sum()) for _, y in pairs)) ** 0.5


@pytest.mark.parametrize("kind", OVERWRITE)
def test_products_that_a_model_overwrites_change_no_gradient(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation is the same arithmetic. Sums by atomics, of experts' rows, have another order in each run."""
    model, copied, copy = enable(randomized(OVERWRITE[kind]), deterministic=True, check=False), [], kept._Kept.copy
    monkeypatch.setattr(kept._Kept, "copy", lambda result: (copied.append(result), copy(result)))
    expected = gradients(model)
    again = apart(gradients(model), expected)
    assert again < 1e-2
    for keep in ("nothing", "attention", "products"):
        recompute_layers(model, keep)
        assert apart(gradients(model), expected) <= 4 * again, keep
        assert bool(copied) == (keep == "products"), keep


@pytest.mark.parametrize("fast", [False, True])
def test_gpt_oss_trains_with_kept_products(fast: bool) -> None:
    """The losses equal those of layers that recompute everything, whose fused kernels round in their own way."""
    ids = torch.randint(512, (1, LAYOUT.num_tokens), generator=torch.Generator().manual_seed(1)).cuda()

    def losses(keep: str) -> list[float]:
        model = enable(randomized(make_gpt_oss), deterministic=True, fast=fast, check=False)
        recompute_layers(model, keep)
        optimizer, found = torch.optim.Adam(model.parameters(), lr=1e-3), []
        for _ in range(6):
            logits = model(input_ids=ids, dualkv=LAYOUT, use_cache=False).logits[0].float()
            loss = torch.nn.functional.cross_entropy(logits, ids[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            found.append(loss.item())
        return found

    expected = losses("nothing")
    assert expected[-1] < expected[0]
    torch.testing.assert_close(losses("products"), expected, rtol=1e-4, atol=0)


def test_products_that_are_overwritten_take_no_more_memory() -> None:
    """The memory between the forward and the backward has one copy of each product, clamped in place or not."""
    ids, taken = torch.zeros(1, LAYOUT.num_tokens, dtype=torch.int64, device="cuda"), []
    for clip in (None, 0.05):
        model = recompute_layers(enable(randomized(lambda clip=clip: make_olmo(clip)), check=False), "products")
        gradients(model)
        model.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        logits = model(input_ids=ids, dualkv=LAYOUT, use_cache=False).logits
        taken.append(torch.cuda.memory_allocated() - before)
        del logits
    row = 2 * LAYOUT.num_tokens * SMALL["hidden_size"]  # bytes of one projection
    assert abs(taken[1] - taken[0]) < row, (taken, row)


def test_the_compilers_kernels_that_write_are_seen() -> None:
    linear = torch.nn.Linear(256, 256, bias=False, device="cuda")

    @torch.compile
    @torch.no_grad()
    def compiled(y: torch.Tensor) -> None:
        y.mul_(3).add_(1)

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        compiled(y.detach())
        return y.square()

    x = torch.randn(1, 64, 256, device="cuda", requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), x)
    contexts = partial(kept.contexts, checkpointing.KEEP["products"])
    (found,) = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False, context_fn=contexts).sum(), x)
    assert torch.equal(found, expected)


def test_draws_on_a_gpu_are_one_number_whatever_its_generator_has_drawn() -> None:
    drawn = []
    for _ in range(2):
        torch.rand(3, device="cuda")
        with Draws():
            drawn.append((torch.rand(64, device="cuda"), torch.empty(64, device="cuda").exponential_()))
    for first, second in zip(*drawn, strict=True):
        assert torch.equal(first, second)
        assert (first == first[0]).all()
