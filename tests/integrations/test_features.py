"""Models with sliding windows, chunks, sinks, softcapping: packed groups against every replicated sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations import masks, selfcheck  # noqa: E402
from dualkv.integrations.transformers import enable, recompute_layers  # noqa: E402
from tests.integrations.test_transformers import double_throughout  # noqa: E402
from tests.integrations.tiny import (  # noqa: E402
    FEATURED,
    LAYOUT,
    TREE,
    Losses,
    assert_close,
    gradients,
    make_featured,
    paths,
    token_ids,
)

# Windows and chunks of fewer tokens than a prompt has, than a response, and than both; of 4, they end at any depth.
CASES = {"both": (LAYOUT, 3), "either": (LAYOUT, 5), "response": (LAYOUT, 8), "tree": (TREE, 4)}


def check(name: str, layout: dualkv.Layout, window: int, prepare: Any = lambda model: model) -> None:
    """Hidden states, log-probs and all gradients of a tiny model in fp64."""
    losses = Losses(layout, token_ids(layout), torch.float64)
    with double_throughout(name):
        model = make_featured(name, window, torch.float64).train()
        hidden, expected_logp, loss = losses.replicated(model)
        loss.backward()
        expected = gradients(model)
        model = prepare(enable(make_featured(name, window, torch.float64).train(), check=False))
        out = model(input_ids=losses.ids, dualkv=layout, output_hidden_states=True)
        logp, loss = losses.of_packed(out)
        loss.backward()
    for (path, _), reference in zip(paths(layout), hidden, strict=True):
        assert_close(f"hidden states of rows {path}", out.hidden_states[-1][0][..., path, :], reference, 1e-12)
    assert_close("log-probs", logp, expected_logp, 1e-12)
    for parameter, gradient in gradients(model).items():
        assert_close(parameter, gradient, expected[parameter], 1e-11)
    for parameter in (x for x in expected if x.endswith("sinks")):
        assert expected[parameter].abs().min() > 0


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FEATURED)
def test_packed_is_replicated(name: str, case: str) -> None:
    check(name, *CASES[case])


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_with_recomputed_layers(name: str) -> None:
    check(name, LAYOUT, 5, lambda model: recompute_layers(model, "attention"))


@pytest.mark.parametrize("name", ["gpt_oss", "llama4"])
def test_compiled_in_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = enable(make_featured(name, 5), check=False)
    ids = token_ids(LAYOUT)
    expected = model(input_ids=ids, dualkv=LAYOUT).logits
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids, dualkv=LAYOUT).logits, expected)


@pytest.mark.parametrize("off", [-1, 1])
@pytest.mark.parametrize("name", ["phimoe", "llama4"])
def test_enable_notices_a_window_that_is_off_by_one(name: str, off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read = masks.read

    def other(mask: Any) -> masks.Visible | None:
        found = read(mask)
        return found and masks.Visible(*(size and size + off for size in found))

    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    enable(make_featured(name, 100))
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    monkeypatch.setattr(masks, "read", other)
    with pytest.raises(ValueError, match="differ by"):
        enable(make_featured(name, 100))
