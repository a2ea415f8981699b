"""`logprobs(model, batch)`: log-probs and gradients of a wrapped model are those of each sequence by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

tf = pytest.importorskip("transformers")

import dualkv  # noqa: E402
from dualkv.integrations.transformers import enable, head, logprobs  # noqa: E402
from tests.integrations.transformers.test_heads import MORE, assert_same, own, rollouts, tiny  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def found(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, batch = rollouts()
    logp, entropy = logprobs(model, batch, 0.8, chunk_size=3)
    return torch.cat(batch.unpack(logp)), torch.cat(batch.unpack(entropy))


def check(model: nn.Module, plain: Any, names: Any = lambda name: name) -> None:
    """model: wrapped. plain: another one with its weights. names: turns a name of the first into one of the second."""
    got = found(model)
    assert_same(model, got, plain, own(plain), names)
    with torch.no_grad():
        assert torch.equal(found(model)[0], got[0])


@pytest.mark.parametrize("name", ["qwen3", *MORE])
def test_a_plain_model(name: str) -> None:
    model, plain = enable(tiny(name), check=False), tiny(name)
    check(model, plain)
    ids = torch.arange(3, 9)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)  # nothing is left behind


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"], None])
def test_adapters(targets: list[str] | None) -> None:
    """Adapters on the head run, and so does a copy of the head that is trained (`modules_to_save`)."""
    peft = pytest.importorskip("peft")
    models = []
    for _ in range(2):
        config = peft.LoraConfig(
            r=4, target_modules=targets or ["q_proj"], modules_to_save=None if targets else ["lm_head"]
        )
        models.append(peft.get_peft_model(tiny(), config))
    model, plain = models
    draw = torch.Generator().manual_seed(1)
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
            other.data.copy_(parameter.data)
    enable(model, check=False)
    check(model, plain)
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(found(model)[0], own(tiny())[0], rtol=1e-5, atol=1e-5)


def test_a_batch_without_trained_tokens() -> None:
    model = enable(tiny(), check=False)
    batch = dualkv.pack_sequences([[5, 6, 7], [5, 6]], [[0, 0, 0], [0, 0]])
    hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    kept = model(input_ids=batch.input_ids, dualkv=batch.layout, logits_to_keep=batch.predict_rows).logits
    assert kept.shape[:2] == (1, 0)
    for logp, entropy in (logprobs(model, batch), dualkv.response_logprobs(hidden, head(model), batch)):
        loss = batch.unpack(logp, "padded").sum() + entropy.sum()
        assert loss == 0
        model.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert (parameter.grad == 0).all(), name


def on_a_rank(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))

    def fresh() -> Any:
        model = tiny("gemma2")
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # else it is the embedding's
        return model

    check(DistributedDataParallel(enable(fresh())), fresh(), lambda name: name.removeprefix("module."))
    for parts in (lambda m: m.model.layers, lambda m: [*m.model.layers, m.lm_head]):
        model = enable(fresh())
        for part in (*parts(model), model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)  # the root too
        check(model, fresh())
    dist.destroy_process_group()


def test_ranks() -> None:
    said = on_ranks(2, "tests.integrations.transformers.test_wrapped:on_a_rank")
    assert "view tensor" not in said


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = enable(tiny(), check=False), rollouts()[2]
    before = dict(vars(model.lm_head))
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has the forward hook.*logits_to_keep"):
        logprobs(model, batch)
    hook.remove()
    for name in ("labels", "dualkv", "logits_to_keep"):
        with pytest.raises((ValueError, TypeError), match=name):
            logprobs(model, batch, **{name: batch.predict_rows})
    with pytest.raises(TypeError, match="batch is a Layout"):
        logprobs(model, batch.layout)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="compiled"):
        logprobs(torch.compile(model), batch)
    with pytest.raises(ValueError, match="no transformers model"):
        logprobs(nn.Linear(2, 2), batch)
    with pytest.raises(ValueError, match="temperature is 0"):
        logprobs(model, batch, 0.0)
    monkeypatch.setattr(model, "forward", partial(lambda f, **kw: [f(**kw), f(**kw)][0], model.forward))
    with pytest.raises(ValueError, match="Qwen3ForCausalLM called its head's module 2 times"):
        logprobs(model, batch)
    assert vars(model.lm_head).keys() == before.keys()
    assert not model.lm_head._forward_hooks
