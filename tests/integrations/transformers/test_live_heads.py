"""Heads of live models that are not what their classes make: each runs exactly, or its first use is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

tf = pytest.importorskip("transformers")

import dualkv  # noqa: E402
from dualkv.integrations.transformers import enable, head, logprobs  # noqa: E402
from tests.integrations.transformers.test_heads import (  # noqa: E402
    CAPPED,
    SMALL,
    adapters,
    check,
    rollouts,
    through_head,
    tiny,
    wrapped,
)
from tests.integrations.transformers.test_wrapped import check as check_wrapped  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


class Capping(nn.Module):
    """A head with a weight, a bias and a cap, which takes whole sequences [B, T, C] alone."""

    def __init__(self, width: int = 48, vocabulary: int = 96) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.3)
        self.bias = nn.Parameter(torch.randn(vocabulary))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        _, _, _ = states.shape
        return 3.0 * torch.tanh(nn.functional.linear(self.before(states), self.weight, self.bias) / 3.0)

    def before(self, states: torch.Tensor) -> torch.Tensor:
        return states


class Centring(Capping):
    def before(self, states: torch.Tensor) -> torch.Tensor:
        return states - states.mean(-2, keepdim=True)


class CentringTokens(Capping):
    """A head whose mean is over the tokens of a sequence [1, T, C], and would be over the columns of rows [n, C]."""

    def before(self, states: torch.Tensor) -> torch.Tensor:
        return states - states.mean(1, keepdim=True)


class Dropping(Capping):
    """A head whose dropout is no module."""

    def before(self, states: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(states, 0.5, self.training)


class Normed(Capping):
    """A batch norm of the rows of a call, and of known statistics in evaluation."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.norm = nn.BatchNorm1d(self.weight.shape[1])

    def before(self, states: torch.Tensor) -> torch.Tensor:
        return self.norm(states.flatten(0, -2)).view(states.shape)


ALWAYS, IN_TRAINING = [Centring, CentringTokens], [Dropping, Normed]


def of_class(kind: type[Capping]) -> Any:
    """Make a model whose class makes the head, and scales what the head makes."""

    class Made(tf.CohereForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.lm_head = kind(config.hidden_size, config.vocab_size)

    torch.manual_seed(0)
    return Made(tf.CohereConfig(**SMALL, logit_scale=0.3, tie_word_embeddings=False)).eval()


def assigned(kind: type[Capping], name: str = "cohere") -> Any:
    model = tiny(name)
    torch.manual_seed(1)
    model.lm_head = kind()
    return model.eval()


def refused(model: Any, who: str) -> None:
    """Both ways to log-probs raise, and leave the module's statistics as they were."""
    _, _, batch = rollouts()
    enable(model, check=False)
    buffers = [buffer.clone() for buffer in model.buffers()]
    hidden = model.base_model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
    calls: list[Callable[[], Any]] = [
        lambda: dualkv.response_logprobs(hidden, head(model), batch),
        lambda: head(model).logits(hidden),
        lambda: logprobs(model, batch),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"{re.escape(who)}.*each row by itself.*logits_to_keep"):
            call()
    assert all(map(torch.equal, buffers, model.buffers()))


@pytest.mark.parametrize("make", [of_class, assigned])
@pytest.mark.parametrize("kind", [Capping, *ALWAYS, *IN_TRAINING])
def test_a_head_that_is_a_module_of_its_own(make: Callable[[type[Capping]], Any], kind: type[Capping]) -> None:
    model = make(kind)
    if kind in ALWAYS:
        refused(model, kind.__name__)
        return
    assert head(model).beside_weight == [kind.__name__, "the scale 0.3"]
    check(model)
    check_wrapped(model, model)
    if kind in IN_TRAINING:
        refused(model.train(), kind.__name__)
    else:
        check(model.train())


def test_a_head_that_is_called_by_keyword() -> None:
    class Made(tf.Qwen3ForCausalLM):
        def forward(self, input_ids: torch.Tensor, dualkv: Any = None, use_cache: bool = False) -> Any:
            hidden = self.model(input_ids=input_ids, dualkv=dualkv, use_cache=use_cache).last_hidden_state
            return tf.modeling_outputs.CausalLMOutputWithPast(logits=self.lm_head(input=hidden))

    model = Made(tf.Qwen3Config(**SMALL)).eval()
    check(model)
    check_wrapped(model, model)


def test_a_module_in_front_of_the_head() -> None:
    """A live module takes the place of ModernBert's, which the small copy runs."""

    class Mixing(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return torch.tanh(states - self.factor * states.mean(1, keepdim=True))

    model = enable(tiny("modernbert"), check=False)
    model.lm_head = Mixing(0.0)
    check(model)
    model.lm_head = Mixing(0.5)
    with pytest.raises(ValueError, match=r"before the head \(Mixing\).*each row by itself"):
        through_head(model)


def test_a_head_within_a_wrapper() -> None:
    """The head reads PEFT's trained copy and adapters as they are now."""
    model = wrapped(tiny(), adapters()["modules_to_save"])
    enable(model, check=False)
    base = model.get_base_model()
    assert head(model).module is None
    copies = base.lm_head.modules_to_save
    hook = copies["default"].register_forward_hook(lambda _module, _args, out: out * 0.5)
    check(model, base)
    hook.remove()
    copies["default"] = Capping()
    check(model, base)
    copies["default"] = Centring()
    refused(base, "ModulesToSaveWrapper")
    model = wrapped(tiny(), adapters()["lora"])
    base = model.get_base_model()
    base.lm_head.lora_A["default"].register_forward_hook(lambda _module, _args, out: out - out.mean(-2, keepdim=True))
    refused(base, "peft.tuners.lora.layer.Linear")


def test_weights_that_are_elsewhere_are_not_called() -> None:
    """ZeRO-3 leaves weights without values outside of the forward."""
    model = assigned(Capping)
    model.lm_head.weight.data = torch.empty(0)
    model.lm_head.register_forward_pre_hook(lambda *_: pytest.fail("called"))
    with pytest.raises(ValueError, match=r"CohereForCausalLM's head has no values here.*logits_to_keep"):
        head(model)


def test_a_capped_model_with_a_head_of_its_own() -> None:
    """The cap of the class follows the live module."""
    model = assigned(Capping, "gemma2")
    assert head(model).softcap == CAPPED["final_logit_softcapping"]
    check(model)
