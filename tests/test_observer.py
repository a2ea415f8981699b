"""`dualkv.observe`: a training with it equals one without, and its numbers are those of packing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dualkv
from dualkv.data.gain import MIN_SHARED
from tests.integrations.tiny import make_model

P, GROUPS, N = 20, 2, 4


def rollouts() -> list[torch.Tensor]:
    """Rollouts of two prompts in turn, so that a call of four has two of each; of each prompt two share a turn."""
    draw = torch.Generator().manual_seed(0)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(3, 90, (n,), generator=draw)

    groups = []
    for g in range(GROUPS):
        prompt, turn = tokens(P + g), tokens(9)
        groups.append([torch.cat([prompt, *([turn] if i % 2 else []), tokens(3 + i)]) for i in range(N)])
    return [rollout for of_groups in zip(*groups, strict=True) for rollout in of_groups]


def padded(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(map(len, sequences)) + 2
    pad = [(width - len(s), 0) for s in sequences]
    return {
        "input_ids": torch.stack([torch.nn.functional.pad(s, p) for s, p in zip(sequences, pad, strict=True)]),
        "attention_mask": torch.stack([(torch.arange(width) >= p).long() for p, _ in pad]),
    }


def free(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return {"input_ids": torch.cat(sequences)[None], "position_ids": positions[None]}


def alone(sequences: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    shortest = min(map(len, sequences))
    return {"input_ids": torch.stack([s[:shortest] for s in sequences])}


def trained(model: Any, calls: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """Losses of one epoch, then the weights; between the steps a call without gradients."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), 0.1)
    for inputs in calls:
        with torch.no_grad():
            model(**inputs)
        loss = model(**inputs).logits.square().mean() + torch.rand(())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found + [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("form", [padded, free, alone])
@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_it_changes_nothing_and_says_what_packing_does(form: Any, labels: Any) -> None:
    sequences = rollouts()
    chunks = [sequences[:4], sequences[4:]]
    calls = [form(chunk) for chunk in chunks]
    if form is alone:
        chunks = [list(inputs["input_ids"]) for inputs in calls]
    results, said = [], []
    for watched in (True, False):
        torch.manual_seed(1)
        model = make_model("qwen3").train()
        if watched:
            found = dualkv.observe(model, 2, labels=labels, report=said.append)
        results.append(trained(model, calls))
        assert not model._forward_pre_hooks
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def rows(parts: list[list[torch.Tensor]]) -> list[int]:
        options = {"min_shared": MIN_SHARED, "labels": labels}
        return [dualkv.pack_sequences(part, **options).layout.num_tokens for part in parts]

    computed = sum(inputs["input_ids"].numel() for inputs in calls)
    one_group_each = [[s for chunk in chunks for s in chunk[g::2]] for g in range(GROUPS)]
    as_they_come, together = found.as_they_come(), found.together()
    assert found.calls == 2
    assert found.unread == 0
    assert as_they_come.gain.rows == sum(rows(chunks))
    assert as_they_come.largest == max(rows(chunks))
    assert together.gain.rows == sum(rows(one_group_each))
    assert together.largest == max(rows(one_group_each))
    assert together.gain.rows < as_they_come.gain.rows < computed == together.gain.replicated_rows
    (text,) = said
    assert text == str(found)
    assert f"2 training calls of Qwen3ForCausalLM computed {computed:,} rows" in text
    assert f"{together.gain.rows:,} rows ({computed / together.gain.rows:.2f}x)" in text
    assert f"about {together.gain.saved:.0%} less time; {together.largest:,} rows in the largest call" in text


def test_calls_that_cannot_be_read_are_said() -> None:
    said: list[str] = []
    dualkv.observe(model := torch.nn.Module().train(), 3, report=said.append)
    model.forward = lambda *_, **__: None
    model(inputs_embeds=torch.zeros(1, 2, 3))
    model(torch.ones(1, 4, dtype=torch.int64), position_ids=torch.tensor([[5, 6, 7, 8]]))  # a part of a longer row
    assert not said
    model(torch.ones(2, 4, dtype=torch.int64))
    assert "1 training calls of Module computed 8 rows" in said[0]
    assert "2 more could not be read (position_ids[0, 0] is 5" in said[0]
    dualkv.observe(model, 1, report=said.append)
    model(input_ids=torch.ones(1, 4, dtype=torch.int64), dualkv="a layout")
    assert said[1] == (
        "dualkv.observe: no training call of Module could be read; 1 more could not be read (the call is packed)"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"calls": 0}, ValueError, "calls is 0"),
        ({"labels": "left"}, ValueError, "labels is 'left'"),
        ({"report": "a.txt"}, TypeError, "report is a str"),
        ({"model": None}, TypeError, "model"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dualkv.observe(**{"model": torch.nn.Linear(1, 1), **arguments})
