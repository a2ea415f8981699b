"""`enable` or the layout forgotten: an error at the first place where it can be known."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_utils import AttentionInterface

import dualkv
from dualkv.integrations.transformers import disable, enable
from tests.integrations.tiny import ARCHITECTURES, make_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT, RESPONSES = [5, 6, 7, 8], [[9, 10], [11]]


def packed():
    return dualkv.pack([PROMPT], [RESPONSES])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_that_is_not_enabled(name, attention):
    model, batch = make_model(name, attention=attention), packed()
    with pytest.raises(ValueError, match=r"layer 0 \(.*Attention\) .*transformers\.enable\(model\)"):
        model(input_ids=batch.input_ids, dualkv=batch.layout)
    enable(model, check=False)
    model(input_ids=batch.input_ids, dualkv=batch.layout)
    disable(model)
    with pytest.raises(ValueError, match=r"transformers\.enable\(model\)"):
        model(input_ids=batch.input_ids, dualkv=batch.layout)


def test_functions_that_are_registered_later():
    seen = []

    def attend(module, query, key, value, mask, **kwargs):
        seen.append(kwargs)
        return query.transpose(1, 2), None

    AttentionInterface.register("of-this-test", attend)
    model, batch = make_model(attention="of-this-test"), packed()
    with pytest.raises(ValueError, match=r"transformers\.enable\(model\)"):
        model(input_ids=batch.input_ids, dualkv=batch.layout)
    assert not seen
    model(input_ids=batch.input_ids)
    assert seen


def test_a_new_layout_finds_transformers(monkeypatch):
    """A program that forgets `enable` may never import the integration."""
    monkeypatch.setattr(AttentionInterface, "get_interface", AttentionInterface.get_interface.__wrapped__)
    model = make_model()
    batch = packed()
    with pytest.raises(ValueError, match=r"transformers\.enable\(model\)"):
        model(input_ids=batch.input_ids, dualkv=batch.layout)


def test_layers_that_are_not_causal_may_get_a_layout():
    """Models of images hand all arguments on to their layers, which are not causal."""
    function = AttentionInterface().get_interface("sdpa", None)
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    module = torch.nn.Module()
    module.is_causal = False
    function(module, q, k, v, None, dualkv=packed().layout)
    module.is_causal = True
    with pytest.raises(ValueError, match=r"transformers\.enable\(model\)"):
        function(module, q, k, v, None, dualkv=packed().layout)


# ---------------------------------------------------------------- an enabled model without the layout
MODEL = {"model": lambda model: model, "decoder": lambda model: model.model}


@pytest.mark.parametrize("of", MODEL)
@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: model(batch.input_ids),
        lambda model, batch: model(input_ids=batch.input_ids),
        lambda model, batch: model(input_ids=batch.input_ids, position_ids=batch.position_ids),
        lambda model, batch: model(input_ids=batch.input_ids, attention_mask=torch.ones_like(batch.input_ids)),
    ],
)
def test_packed_tokens_without_their_layout(of, call):
    """Tokens need their layout even if an earlier call had it."""
    model, batch = enable(make_model(), check=False), packed()
    model(input_ids=batch.input_ids, dualkv=batch.layout)
    for one in (batch, dualkv.pack_sequences([PROMPT + r for r in RESPONSES])):
        with pytest.raises(ValueError, match=r"dualkv=batch\.layout"):
            call(MODEL[of](model), one)


def test_packed_tokens_that_need_no_layout():
    model, batch = enable(make_model(), check=False), packed()
    wanted = model(input_ids=batch.input_ids, dualkv=batch.layout).logits
    rows = torch.arange(batch.layout.num_tokens)
    mask = (rows <= rows[:, None]) & (rows[:, None] < batch.layout.visible_end)
    given = {"attention_mask": mask[None, None], "position_ids": batch.position_ids}
    torch.testing.assert_close(model(input_ids=batch.input_ids, **given).logits, wanted, rtol=0, atol=1e-5)
    # Groups that share nothing: transformers sees by the positions where sequences begin.
    apart = dualkv.pack([PROMPT, [1, 2]], [[RESPONSES[0]], [RESPONSES[1]]])
    wanted = model(input_ids=apart.input_ids, dualkv=apart.layout).logits
    given = {"position_ids": apart.position_ids, "use_cache": False}
    torch.testing.assert_close(model(input_ids=apart.input_ids, **given).logits, wanted, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"dualkv=batch\.layout"):
        model(input_ids=apart.input_ids)
    one = dualkv.pack([PROMPT], [[RESPONSES[0]]])
    model(input_ids=one.input_ids)
    batch.layout.mark_used()  # says that attention is not DualKV's
    model(input_ids=batch.input_ids)
    disable(model)
    model(input_ids=packed().input_ids)
