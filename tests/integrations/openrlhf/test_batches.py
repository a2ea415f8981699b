"""Rollouts of a prompt share a rank, an update and a micro-batch; arguments are refused before anything is loaded."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import make_experience_batch, split_experience_batch
from openrlhf.utils import deepspeed, get_strategy
from openrlhf.utils.deepspeed import DeepspeedStrategy

from dualkv.integrations.openrlhf import PackedStrategy, install
from dualkv.integrations.openrlhf.batches import balance_experiences, packed_tokens, split_rollout_samples
from tests.documents import blocks
from tests.integrations.openrlhf import cpu
from tests.integrations.openrlhf.runs import N, flags, rollouts


def settings(ranks: int, budget: int = 10**6) -> Any:
    return SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=ranks),
        train=SimpleNamespace(dynamic_batch_enable=True),
        rollout=SimpleNamespace(max_tokens_per_gpu=budget),
    )


def shuffled(groups: int) -> list[Any]:
    """Experiences of two rollouts each, those of a prompt apart."""
    samples = rollouts(0, groups)
    items = [samples[i] for i in torch.randperm(len(samples), generator=torch.Generator().manual_seed(0))]
    items = [item for sample in items for item in split_experience_batch(sample)]
    return [make_experience_batch(items[at : at + 2]) for at in range(0, len(items), 2)]


def test_whole_groups_go_to_ranks() -> None:
    dealt = balance_experiences(shuffled(6), settings(2))
    assert [len(own.prompts) for own in dealt] == [3 * N, 3 * N]
    for own in dealt:
        assert all(own.prompts.count(prompt) == N for prompt in own.prompts)
    loads = [packed_tokens(split_experience_batch(own)) for own in dealt]
    assert max(loads) < 1.2 * min(loads)


@pytest.mark.parametrize("groups", [1, 3, 5])
def test_ranks_get_equally_many_rollouts(groups: int) -> None:
    dealt = balance_experiences(shuffled(groups), settings(2))
    assert [len(own.prompts) for own in dealt] == [N * groups // 2] * 2
    assert sum(own.prompts.count("0, 0") for own in dealt) == N


@pytest.mark.parametrize(("ranks", "budget"), [(1, 150), (2, 150), (4, 10**6), (3, 60)])
def test_batches_of_the_forward_passes(ranks: int, budget: int) -> None:
    samples = rollouts(0, 6)
    maker = SimpleNamespace(args=settings(ranks, budget), tokenizer=SimpleNamespace(pad_token_id=0))
    batches = split_rollout_samples(maker, samples)
    assert len(batches) % ranks == 0
    assert sorted(i for own in batches for i in own.index) == list(range(len(samples)))
    for own in batches:
        chosen = [samples[i] for i in own.index]
        assert packed_tokens(chosen) <= budget or len(chosen) == 1
    if budget == 150:
        assert max(len(set(own.prompts)) for own in batches) <= 2


def test_install_changes_what_get_strategy_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "DeepspeedStrategy", DeepspeedStrategy)
    args = cpu.arguments(*flags("none"))
    assert type(get_strategy(args)) is DeepspeedStrategy
    install()
    with pytest.warns(UserWarning, match=r"--train.dynamic_batch_enable"):
        made = get_strategy(args)
    assert type(made) is PackedStrategy


DYNAMIC = ["--train.dynamic_batch_enable"]


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (["--ds.ring_attn_size", "2"], "--ds.ring_attn_size is 2, expected 1"),
        (["--ds.tensor_parallel_size", "2"], "--ds.tensor_parallel_size is 2, expected 1"),
        (["--ds.use_liger_kernel"], "--ds.use_liger_kernel is True, expected False"),
        (["--ds.deepcompile"], "--ds.deepcompile is True, expected False"),
        ([*DYNAMIC, "--train.max_tokens_per_gpu", "0"], "--train.max_tokens_per_gpu is 0, expected at least 1"),
        ([*DYNAMIC, "--rollout.max_tokens_per_gpu", "-5"], "--rollout.max_tokens_per_gpu is -5, expected at least 1"),
    ],
)
def test_arguments_are_refused_by_the_command_line(more: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m dualkv.integrations.openrlhf` gets as far as the strategy, which comes before Ray starts anything."""
    import runpy

    monkeypatch.setattr(deepspeed, "DeepspeedStrategy", DeepspeedStrategy)
    monkeypatch.setattr(cpu.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "argv", ["train", *flags("none", *more)])
    with pytest.raises(ValueError, match=name):
        runpy.run_module("dualkv.integrations.openrlhf", run_name="__main__")


def test_the_flags_of_the_page(folder: Path) -> None:
    (block,) = blocks("openrlhf.md", {"text"})
    words = re.sub(r"#.*", "", block).split()
    assert words[:3] == ["python", "-m", "dualkv.integrations.openrlhf"]
    args = cpu.arguments(*flags(str(folder / "model"), *words[3:]))
    assert args.train.dynamic_batch_enable
    assert args.train.max_tokens_per_gpu == args.rollout.max_tokens_per_gpu == 16384
