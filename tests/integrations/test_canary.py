"""`dualkv.packed_vs_separate`: silent for every model that is right, in fp32 and bf16, and loud for planted faults.

Measured over the models here (4 batches each): differences are at most 0.34 of their bound in fp32, 0.28 in bf16 and
0.54 in bf16 with experts; single tokens at most 3.8 bounds of 10. The planted faults are 1.5 bounds and more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dualkv
from dualkv import canary
from dualkv.integrations.transformers import enable
from tests.integrations.tiny import ARCHITECTURES, FEATURED, VOCAB, make_featured, make_model
from tests.integrations.transformers.test_recurrent import make as make_recurrent
from tests.ranks import on_ranks

DTYPES = (torch.float32, torch.bfloat16)
RECURRENT = ("nemotron_h", "qwen3_next")


def drawn(seed: int = 0, labels: Any = "gather") -> dualkv.PackedBatch:
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, VOCAB, (60 + 7 * i,), generator=draw) for i in range(3)]
    responses = [[torch.randint(3, VOCAB, (n,), generator=draw) for n in (40, 33, 0, 21)] for _ in prompts]
    return dualkv.pack(prompts, responses, labels=labels)


def trees(seed: int = 0) -> dualkv.PackedSequences:
    """Turns that branch, with a mask of the tokens that count."""
    draw = torch.Generator().manual_seed(seed)
    a, b, c, d = (torch.randint(3, VOCAB, (n,), generator=draw) for n in (50, 30, 20, 40))
    sequences = [torch.cat(parts) for parts in ((a, b, c), (a, b, d), (a, d), (c, a))]
    return dualkv.pack_sequences(sequences, [[i > 30 and i % 3 > 0 for i in range(len(s))] for s in sequences])


def logprobs(model: Any, batch: Any, **layout: Any) -> torch.Tensor:
    """Compute log-probs from the model's logits, as a trainer does."""
    logits = model(input_ids=batch.input_ids.clone(), **layout).logits[0, batch.predict_rows].float()
    return logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]


def found(model: Any, batch: Any, logp: Any = None, **settings: Any) -> canary.Compared:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return dualkv.packed_vs_separate(model, batch, logp, **settings)


# ---------------------------------------------------------------- no false alarm
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in [*ARCHITECTURES, *FEATURED]]
    + [
        (name, dtype)
        for name in ("qwen3", *RECURRENT, "deep")
        for dtype in DTYPES
        if (name, dtype) != ("qwen3", DTYPES[1])
    ],
    ids=str,
)
def test_a_model_that_is_right_raises_no_alarm(name: str, dtype: torch.dtype) -> None:
    if name in RECURRENT:
        model = make_recurrent(name, dtype)
    elif name == "deep":
        model = make_model("qwen3", dtype, num_hidden_layers=12)
    else:
        model = make_featured(name, 16, dtype) if name in FEATURED else make_model(name, dtype)
    enable(model, check=False).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed, batch in enumerate((drawn(), drawn(1, "roll"), trees())):
            compared = dualkv.packed_vs_separate(model, batch, seed=seed, error=True)
            assert 0 < compared.difference < 0.75 * compared.bound
            assert compared.within


def test_log_probs_of_the_trainer_are_compared_with_its_temperature() -> None:
    model, batch = enable(make_model()), drawn()
    logits = model(input_ids=batch.input_ids, dualkv=batch.layout).logits[0, batch.predict_rows] / 0.7
    logp = logits.log_softmax(-1).gather(1, batch.targets[:, None])[:, 0]
    assert found(model, batch, logp, temperature=0.7).within
    assert not found(model, batch, logp).within
    rows = batch.unpack(logp)
    assert found(model, batch, logp + 0, rollouts=40, temperature=0.7).within, "more than there are"
    rows[5].data.add_(0)
    some = torch.cat([row + (n == 4) for n, row in enumerate(rows)])
    assert found(model, batch, some, rollouts=12, temperature=0.7).difference == pytest.approx(1, rel=1e-3)


# ---------------------------------------------------------------- faults that are planted are seen
def row_mean(model: Any) -> Any:
    """A layer that reads its whole row."""
    model.model.layers[0].register_forward_hook(lambda _m, _a, out: out + 0.5 * out.mean(1, keepdim=True))


def batch_norm(model: Any) -> Any:
    norm = nn.BatchNorm1d(48).to(model.dtype)
    model.model.norm.register_forward_hook(lambda _m, _a, out: norm(out.transpose(1, 2)).transpose(1, 2))
    model.add_module("batch_norm", norm)


def by_the_longest_position(model: Any) -> Any:
    """Make rotary embeddings depend on the longest sequence of a call."""

    def scaled(_module: Any, args: Any, kwargs: Any, out: Any) -> Any:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        angle = 0.3 * (positions.max() > 100)
        return tuple(x.roll(1, -1) * angle + x for x in out)

    model.model.rotary_emb.register_forward_hook(scaled, with_kwargs=True)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "a layer that averages over the row": row_mean,
    "batch norm": batch_norm,
    "rotary embeddings of the longest position": by_the_longest_position,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_model_is_seen(fault: str, dtype: torch.dtype) -> None:
    model = enable(make_model("qwen3", dtype), check=False).train()
    FAULTS[fault](model)
    batch = long_and_short() if "longest" in fault else drawn()
    for logp in (None, logprobs(model, batch, dualkv=batch.layout)):
        with pytest.warns(UserWarning, match="packed log-probs differ from those of the rollouts alone by"):
            compared = dualkv.packed_vs_separate(model, batch, logp)
        assert compared.difference > 1.5 * compared.bound
        with pytest.raises(ValueError, match="packed log-probs differ"):
            dualkv.packed_vs_separate(model, batch, logp, error=True)


def long_and_short() -> dualkv.PackedBatch:
    """A group that is longer than 100 tokens beside one that is not, most rollouts in the latter."""
    draw = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, VOCAB, (n,), generator=draw) for n in (90, 20, 30, 30, 30, 30)]
    return dualkv.pack(ids[:2], [ids[2:3], ids[2:]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fault_of_the_trainer_is_seen(dtype: torch.dtype) -> None:
    """The layout forgotten, weights that have changed since, another head."""
    model, batch = enable(make_model("qwen3", dtype)), drawn()
    right = logprobs(model, batch, dualkv=batch.layout)
    assert found(model, batch, right).within
    forgotten = logprobs(model, batch)
    assert not found(model, batch, forgotten).within
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.3)
    assert not found(model, batch, right).within
    assert found(model, batch).within


@pytest.mark.parametrize("adapter", ["LoraConfig", "aLoRA"])
def test_adapters(adapter: str) -> None:
    """LoRA with dropout is right, and its log-probs of training are not compared; aLoRA reads a whole row."""
    peft = pytest.importorskip("peft")
    settings = {"alora_invocation_tokens": [8, 9]} if adapter == "aLoRA" else {"lora_dropout": 0.5}
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], init_lora_weights=False, **settings
    )
    prompts = [torch.arange(3, 15), torch.tensor([50, 51, 8, 9, 52])]
    responses = [[torch.arange(20, 25), torch.arange(40, 47)], [torch.arange(60, 66)]]
    batch = dualkv.pack(prompts, responses)
    model = peft.get_peft_model(make_model(), config).train()
    if adapter == "aLoRA":  # refused before it runs
        with pytest.raises(ValueError, match="ALora"):
            enable(model, check=False)
        return
    enable(model, check=False)
    assert found(model, batch, rollouts=3).within
    noisy = logprobs(model, batch, dualkv=batch.layout)
    assert found(model, batch, noisy, rollouts=3).within


# ---------------------------------------------------------------- it leaves everything as it was
def test_random_states_modes_buffers_and_gradients_are_left_alone() -> None:
    model = enable(make_model(), check=False).train()
    batch_norm(model)
    model.model.layers[0].dropout = nn.Dropout(0.5)
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    state = torch.get_rng_state()
    found(model, drawn())
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert {name for name, x in model.named_buffers() if not torch.equal(x, buffers[name])} == set()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_number_of_forwards_is_the_number_asked_for() -> None:
    """The number holds for every batch of a rank: fewer rollouts than asked for, none with a token."""
    model, calls = enable(make_model()), []
    model.register_forward_pre_hook(lambda _m, _a, kwargs: calls.append("dualkv" in kwargs), with_kwargs=True)
    empty = dualkv.pack([[5, 6, 7]], [[[], []]])
    for batch in (drawn(), dualkv.pack([[5, 6, 7]], [[[8, 9]]]), empty):
        logp = torch.zeros(len(batch.targets))
        calls.clear()
        compared = found(model, batch, logp, rollouts=3)
        assert calls == [False, True] * 3
    assert (compared.difference, compared.largest) == (0, 0)
    assert canary.picked([3] * 5, 5, 0) != canary.picked([3] * 5, 5, 1)
    assert sorted(canary.picked([3, 0, 1, 2, 7, 7], 5, 1)) == [0, 2, 3, 4, 5]


def test_what_is_not_finite_is_an_alarm() -> None:
    model, batch = enable(make_model()), drawn()
    logp = logprobs(model, batch, dualkv=batch.layout).detach()
    logp[:] = float("nan")
    assert not found(model, batch, logp).within


def test_bad_input_is_one_sentence() -> None:
    model, batch = enable(make_model()), drawn()
    with pytest.raises(TypeError, match=r"batch is a Layout, expected what dualkv.pack"):
        dualkv.packed_vs_separate(model, batch.layout)
    with pytest.raises(TypeError, match="logp must be a tensor, got a list"):
        dualkv.packed_vs_separate(model, batch, [0.0])
    with pytest.raises(ValueError, match=r"logp has shape \(3,\), expected \[282\]"):
        dualkv.packed_vs_separate(model, batch, torch.zeros(3))
    with pytest.raises(ValueError, match="rollouts is 0, expected 1 or more"):
        dualkv.packed_vs_separate(model, batch, rollouts=0)
    with pytest.raises(ValueError, match="media has 1 entries for 12 rollouts"):
        dualkv.packed_vs_separate(model, batch, media=[None])
    with pytest.raises(ValueError, match="Qwen3Model has no logits"):
        dualkv.packed_vs_separate(model.model, batch)


# ---------------------------------------------------------------- ranks
def wrapped_on_a_rank(rank: int, folder: str) -> None:
    """A step of FSDP2 and of DDP with a canary between forward and backward, and without; ranks differ in rollouts."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for name in ("fsdp2", "ddp"):
        for with_canary in (False, True):
            model: Any = enable(make_model(), check=False).train()
            if name == "fsdp2":
                mesh = dist.init_device_mesh("cpu", (2,))
                for layer in model.model.layers:
                    fully_shard(layer, mesh=mesh)
                model = fully_shard(model, mesh=mesh)
            else:
                model = DistributedDataParallel(model)
            batch = drawn(rank) if rank else dualkv.pack([[5, 6, 7]], [[[8, 9]]])
            logp = logprobs(model, batch, dualkv=batch.layout)
            if with_canary:
                results[name] = found(model, batch, logp, rollouts=2)
                broken = logp + 1.0 * (rank == 1)
                try:
                    dualkv.packed_vs_separate(model, batch, broken, error=True)
                except ValueError as error:
                    results[name, "error"] = str(error)
            (-logp.mean()).backward()
            grads = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
            results[name, with_canary] = grads
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def test_ranks_run_as_many_forwards_and_come_to_one_verdict(tmp_path: Path) -> None:
    on_ranks(2, "tests.integrations.test_canary:wrapped_on_a_rank", str(tmp_path))
    of_ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for results in of_ranks:
        for name in ("fsdp2", "ddp"):
            assert results[name].within
            assert results[name] == of_ranks[0][name]
            assert results[name, "error"] == of_ranks[0][name, "error"]
            assert len(results[name, True]) > 10
            for a, b in zip(results[name, True], results[name, False], strict=True):
                assert torch.equal(a, b)
