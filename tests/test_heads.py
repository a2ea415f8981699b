"""Parts of a head that are called: they make each row by itself, and the same twice, or they are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dualkv import pack, response_logprobs
from dualkv.heads import Head

WIDTH, VOCABULARY = 6, 11
BATCH = pack([[1, 2, 3], [4]], [[[5, 6], [7]], [[8, 9, 10]]])
BATCH.layout.mark_used()


def hidden(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    states = torch.randn(1, BATCH.layout.num_tokens, WIDTH, generator=torch.Generator().manual_seed(1))
    return states.to(dtype)


class Own(nn.Module):
    """A module of a user: `states` says what is before its product."""

    def __init__(self, states: Callable[[Any, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=dtype)
        self.draw = torch.Generator().manual_seed(0)
        self.states, self.calls = states, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(self.states(self, x))


def dropped(own: Own, x: torch.Tensor, p: float) -> torch.Tensor:
    return nn.functional.dropout(x, p, own.training)


# What reads other rows or draws: always, or in training alone.
ALWAYS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "mean": lambda own, x: x - x.mean(-2, keepdim=True),
    "a little of the mean": lambda own, x: x - 0.01 * x.mean(0),
    "maximum": lambda own, x: x / x.abs().amax(0),
    "place": lambda own, x: x + torch.arange(len(x))[:, None],
    "number of rows": lambda own, x: x / len(x),
    "neighbour": lambda own, x: x + x.roll(1, 0),
    "own generator": lambda own, x: x + torch.randn(x.shape, generator=own.draw),
    "noise": lambda own, x: x + torch.randn_like(x),
}
IN_TRAINING: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda own, x: dropped(own, x, 0.5),
    "rare dropout": lambda own, x: dropped(own, x, 1e-6),
    "dropout that does not show yet": lambda own, x: x + 0.0 * dropped(own, x, 0.5),
    "dropped module": lambda own, x: x * (torch.rand(1) > 0.05) if own.training else x,
    "batch norm": lambda own, x: own.norm(x),
}
EXACT: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "cap": lambda own, x: 3 * torch.tanh(x / 3),
    "norm": lambda own, x: nn.functional.layer_norm(x, (WIDTH,)),
    "zeros": lambda own, x: x.relu() * 0,
    "a draw that does nothing": lambda own, x: x * (torch.rand(1) >= 0),
}


def calls(head: Head) -> list[Callable[[], Any]]:
    return [lambda: response_logprobs(hidden(), head, BATCH), lambda: head.logits(hidden())]


def as_before(own: Own) -> Head:
    own.linear = nn.Identity()  # type: ignore[assignment]
    return Head(torch.randn(VOCABULARY, WIDTH, dtype=torch.float64), before=own)


@pytest.mark.parametrize("place", ["module", "before", "function"])
@pytest.mark.parametrize("name", [*ALWAYS, *IN_TRAINING])
def test_what_reads_other_rows_or_draws_is_refused(name: str, place: str) -> None:
    """The first call that would be wrong raises, and leaves random numbers and statistics as they were."""
    own = Own((ALWAYS | IN_TRAINING)[name])
    head = {"module": lambda: Head(module=own), "before": lambda: as_before(own), "function": None}[place]
    whole = Head(module=lambda x: own(x)) if head is None else head()
    where = "what is before the head" if place == "before" else "the head's module"
    who = "function <lambda>" if place == "function" else "Own"
    if name in IN_TRAINING:
        own.eval()
        for call in calls(whole):
            call()
        own.train()
    state, mean = torch.get_rng_state(), own.norm.running_mean.clone()  # type: ignore[union-attr]
    for call in calls(whole):
        with pytest.raises(ValueError, match=rf"{where} \(.*{who}\).*each row by itself.*logits_to_keep"):
            call()
    assert torch.equal(torch.get_rng_state(), state)
    if place != "function":  # whose module nobody sees
        assert torch.equal(own.norm.running_mean, mean)  # type: ignore[arg-type]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", EXACT)
def test_what_makes_each_row_by_itself_runs(name: str, training: bool) -> None:
    own = Own(EXACT[name]).train(training)
    logp, _ = response_logprobs(hidden(), Head(module=own), BATCH, chunk_size=2)
    z = own(hidden()[0, BATCH.predict_rows]).log_softmax(-1)
    torch.testing.assert_close(logp, z.gather(1, BATCH.targets[:, None])[:, 0])


@pytest.mark.parametrize("least", [-torch.inf, torch.finfo(torch.float32).min])
def test_logits_of_unused_tokens_hide_nothing(least: float) -> None:
    for kind, refused in ((EXACT["cap"], False), (ALWAYS["mean"], True)):
        own = Own(kind, torch.float32)
        head = Head(module=lambda x, own=own: own(x).masked_fill(torch.arange(VOCABULARY) == 0, least))
        if refused:
            with pytest.raises(ValueError, match="each row by itself"):
                head.logits(hidden(torch.float32))
        else:
            head.logits(hidden(torch.float32))


def test_low_precision_is_no_difference() -> None:
    """Wide layers one after another in bf16, where a row alone rounds otherwise; a mean over rows shows still."""
    torch.manual_seed(0)
    layers = [nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 4000)]
    states = torch.randn(8, 512, dtype=torch.bfloat16)
    Head(module=nn.Sequential(*layers).bfloat16()).logits(states)
    mean = nn.Sequential(*layers).bfloat16()
    with pytest.raises(ValueError, match="each row by itself"):
        Head(module=lambda x: mean(x - 0.01 * x.mean(0))).logits(states)


def test_a_module_is_checked_once_in_each_mode() -> None:
    own = Own(EXACT["cap"])

    def count(head: Head) -> int:
        own.calls = 0
        response_logprobs(hidden(), head, BATCH)
        return own.calls

    first, then, in_training, later = (
        count(Head(module=own.train(training))) for training in (False, False, True, True)
    )
    assert then == later < first == in_training
    bound, function = count(Head(module=own.forward)), [count(Head(module=lambda x: own(x))) for _ in range(2)]
    assert bound == then
    assert function == [first, first]


def test_gradients_under_autocast_after_the_check() -> None:
    """The check leaves no cast of a weight in autocast's cache, from which no gradient would come."""
    before, linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
    with torch.autocast("cpu", torch.bfloat16):
        logp, _ = response_logprobs(hidden(torch.float32), Head(linear.weight, before=before), BATCH)
        logp.sum().backward()
    assert before.weight.grad is not None
    assert before.weight.grad.norm() > 0


def test_a_result_that_is_no_tensor_is_named() -> None:
    with pytest.raises(ValueError, match="the head's module makes a tuple, expected a tensor"):
        response_logprobs(hidden(), Head(module=lambda x: (x, x)), BATCH)  # type: ignore[arg-type,return-value]


def test_logits_keep_the_leading_dimensions() -> None:
    head = Head(module=Own(EXACT["cap"]))
    for shape in ((), (3,), (2, 3), (1, 0)):
        assert head.logits(torch.randn(*shape, WIDTH, dtype=torch.float64)).shape == (*shape, VOCABULARY)
