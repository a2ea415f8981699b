"""The common parts of trainings that are compared: what a CPU lacks, rollouts of turns, and what a run computed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import BitsAndBytesConfig, TrainerCallback

from tests.integrations.tiny import VOCAB
from tests.ranks import on_ranks

# For QLoRA, with products in fp32.
NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,
)


# ---------------------------------------------------------------- what a CPU lacks
def stand_in(modules: dict[str, str]) -> None:
    """Put modules in the place of packages that need a GPU; their names, separated by spaces, are None."""
    for name, names in modules.items():
        module: Any = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(dict.fromkeys(names.split()))
        sys.modules[name] = module


def without_cuda(device: Any) -> None:
    """Make CUDA's functions do nothing; the current device is another one."""
    setattr(torch.cuda, "current_device", lambda: device)  # noqa: B010
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda *_: None)


# ---------------------------------------------------------------- rollouts
class Rollout(NamedTuple):
    """Token ids, of which those of the tool are not trained on, with what is known of a response."""

    group: int
    number: int
    prompt: list[int]
    turn: list[int]
    tool: list[int]
    own: list[int]
    trained: list[bool]
    log_probs: list[float]
    reward: float

    @property
    def response(self) -> list[int]:
        return self.turn + self.tool + self.own


def rollouts(seed: int, groups: int, count: int, untrained: int = -1) -> Iterator[Rollout]:
    """Draw `count` rollouts of each prompt, of other lengths; those of every second prompt share a turn and a tool's
    answer. Nothing is trained on in the group `untrained`."""
    chosen = torch.Generator().manual_seed(seed)

    def text(length: int) -> list[int]:
        return torch.randint(4, VOCAB, (length,), generator=chosen).tolist()

    for group in range(groups):
        prompt, turn, tool = text(20 + 13 * group), text(9 * (group % 2)), text(11 * (group % 2))
        for number in range(count):
            own = text(2 + 5 * number)
            trained = [*[True] * len(turn), *[False] * len(tool), *[True] * len(own)]
            old = (torch.randn(len(trained), generator=chosen) / 10 - 4).tolist()
            reward = float(torch.rand(1, generator=chosen))
            trained = [one and group != untrained for one in trained]
            yield Rollout(group, number, prompt, turn, tool, own, trained, old, reward)


# ---------------------------------------------------------------- runs of transformers' trainer
@dataclass
class Run:
    """The values that a training made on the way.

    Attributes:
        logps, entropies: of each call, in the order of the calls.
        losses: of each micro-batch.
        gradients: before each optimizer step, by name.
        logs: what was logged at each step.
        completions: token ids of each micro-batch, padded.
        weights: after the run.
    """

    logps: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    completions: list[torch.Tensor] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def end(self, trainer: Any) -> None:
        """Take the logs and the weights of a trainer that is done."""
        self.logs = trainer.state.log_history
        self.weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


class Gradients(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self.run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: nn.Module, **_: Any) -> None:
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.run.gradients.append(grads)


# ---------------------------------------------------------------- runs of two ranks
def of_ranks(function: str, folder: Path) -> list[dict[str, Any]]:
    """Run a function of a module on two ranks; the runs that each rank saved, by name."""
    on_ranks(2, function, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def assert_equal_results(ours: dict[str, Any], theirs: dict[str, Any], atol: float) -> None:
    """Compare values of tokens, and weights by name, which may differ by `atol`."""
    for made, expected in zip(ours["values"], theirs["values"], strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)
    assert ours["weights"].keys() == theirs["weights"].keys()
    for name, expected in theirs["weights"].items():
        torch.testing.assert_close(ours["weights"][name], expected, rtol=1e-4, atol=atol, msg=name)


def assert_equal_metrics(ours: dict[str, Any], theirs: dict[str, Any], but: Collection[str] = ()) -> None:
    """Compare the metrics of each update, but for some, whose names are without those of policy or critic."""
    for update, (found, expected) in enumerate(zip(ours["metrics"], theirs["metrics"], strict=True)):
        for name, value in expected.items():
            if "dualkv/" not in name and (name.partition("/")[2] or name) not in but:
                assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-4, nan_ok=True), (update, name)
