"""Sequences that share much are in one micro-batch; settings are refused before Ray starts anything."""

from __future__ import annotations

import re
import sys
from functools import reduce
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
from skyrl.backends.skyrl_train.workers.worker_utils import SampleBasedBatchIterator, TokenBasedBatchIterator
from skyrl.train.entrypoints import main_base

from dualkv.integrations import actions, patching
from dualkv.integrations.skyrl import entrypoint, install, workers
from dualkv.integrations.skyrl.batches import WEIGHTS, PackedBatchIterator
from tests.documents import blocks
from tests.integrations.skyrl.runs import configuration, rollouts, tensors


def data(groups: int = 4, steps: bool = False) -> Any:
    sequences, attention_mask, width, loss_mask = tensors(groups, steps)
    batch = TrainingInputBatch({"sequences": sequences, "attention_mask": attention_mask, "loss_mask": loss_mask})
    batch.metadata = {"response_length": width}
    return batch


@pytest.mark.parametrize("steps", [False, True])
def test_micro_batches_hold_groups_and_come_back_in_order(steps: bool) -> None:
    batch, (_, prompts) = data(steps=steps), rollouts(0, 4, steps)
    found = PackedBatchIterator(batch, 130)
    plan = found._microbatches
    assert sorted(i for own in plan for i in own) == list(range(len(batch)))
    assert len(found) == len(set(prompts)) == 4
    assert all(len({prompts[i] for i in own}) == 1 for own in plan)
    assert len(TokenBasedBatchIterator(batch, 130)) >= 8
    outputs = [TrainingInputBatch({"output": own["sequences"]}) for own in found]
    for output in outputs:
        output.metadata = batch.metadata
    assert torch.equal(found.reorder_and_combine_batches(outputs)["output"], batch["sequences"])


def test_weights_are_those_of_skyrls_micro_batches() -> None:
    """Weighted sums over planned micro-batches are the means over SkyRL's, weighted by their sequences."""
    batch = data()
    values = torch.rand(batch["loss_mask"].shape)
    expected = 0.0
    for own in TokenBasedBatchIterator(batch, 130)._microbatches:
        mask = batch["loss_mask"][own]
        expected += float((values[own] * mask).sum() / mask.sum()) * len(own) / len(batch)
    planned = PackedBatchIterator(batch, 130, weighted=True)
    found = sum(
        float((values[own] * batch["loss_mask"][own] * micro.metadata[WEIGHTS][:, None]).sum())
        for own, micro in zip(planned._microbatches, planned, strict=True)
    )
    assert found == pytest.approx(expected, rel=1e-5)
    assert WEIGHTS not in batch.metadata


def test_whose_micro_batches_stay() -> None:
    batch = data()
    assert type(workers._iterator(batch, 2, 130, False)) is PackedBatchIterator
    assert type(workers._iterator(batch, 2, -1, False)) is SampleBasedBatchIterator
    batch["pixel_values"] = torch.zeros(len(batch), 1)
    assert type(workers._iterator(batch, 2, 130, False)) is TokenBasedBatchIterator


@pytest.mark.parametrize(("name", "is_sum"), [("regular", True), ("gspo", True), ("kl_cov", False), ("own", False)])
def test_losses_that_select_among_tokens_keep_skyrls_micro_batches(name: str, is_sum: bool) -> None:
    cfg = SimpleNamespace(algorithm=SimpleNamespace(policy_loss_type=name), max_tokens_per_microbatch=130)
    worker: Any = SimpleNamespace(cfg=cfg)
    actions.warn.cache_clear()
    if is_sum:
        assert workers.PackedPolicyWorker._is_sum(worker, None)
    else:
        with pytest.warns(UserWarning, match=f"the policy loss {name}"):
            assert not workers.PackedPolicyWorker._is_sum(worker, None)
    assert workers.PackedPolicyWorker._is_sum(worker, "cross_entropy")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("strategy", "megatron", "trainer.strategy is megatron, expected fsdp"),
        ("policy.sequence_parallel_size", 2, "trainer.policy.sequence_parallel_size is 2, expected 1"),
        ("ref.sequence_parallel_size", 2, "trainer.ref.sequence_parallel_size is 2"),
        ("algorithm.enable_sample_support_replay", True, "trainer.algorithm.enable_sample_support_replay is True"),
    ],
)
def test_settings_are_refused(name: str, value: Any, says: str) -> None:
    cfg = configuration("none")
    *parts, last = name.split(".")
    setattr(reduce(getattr, parts, cfg.trainer), last, value)
    with pytest.raises(ValueError, match=says):
        install(cfg)
    with pytest.raises(ValueError, match=says):
        workers.PackedRefWorker(cfg=cfg.trainer)


def test_install_changes_the_workers_that_skyrl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with patching.Changes(fsdp_worker) as changed, changed.watched():
        install(configuration("none"))
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import CriticWorker, PolicyWorker, RefWorker

        for made, cls in zip((PolicyWorker, CriticWorker, RefWorker), workers.WORKERS.values(), strict=True):
            assert issubclass(made.__ray_metadata__.modified_class, cls)
            # Ray hands the class on by its name, so the process of the worker imports this integration.
            assert b"dualkv.integrations.skyrl.workers" in ray.cloudpickle.dumps(cls)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Any]:
    """The configurations with which `python -m dualkv.integrations.skyrl` trains."""
    trained: list[Any] = []
    monkeypatch.setattr(main_base, "initialize_ray", lambda _cfg: None)
    monkeypatch.setattr(entrypoint, "train", lambda cfg: None)
    remote = SimpleNamespace(remote=trained.append)
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _function: remote)
    monkeypatch.setattr(sys, "argv", ["skyrl", *words])
    with patching.Changes(main_base) as changed, changed.watched():
        entrypoint.main()
    return trained


WORDS = [
    "trainer.policy.model.path=none", "trainer.logger=console", "trainer.placement.colocate_all=false",
    "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8", "generator.n_samples_per_prompt=4",
    "trainer.placement.policy_num_gpus_per_node=2", "trainer.placement.ref_num_gpus_per_node=2",
]  # fmt: skip


def test_the_command_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    (cfg,) = run(monkeypatch, *WORDS, "trainer.max_tokens_per_microbatch=99")
    assert cfg.trainer.max_tokens_per_microbatch == 99


BUDGET = "trainer.max_tokens_per_microbatch"


@pytest.mark.parametrize(
    ("word", "error", "says"),
    [
        ("trainer.policy.sequence_parallel_size=2", ValueError, "sequence_parallel_size is 2, expected 1"),
        ("trainer.override_entrypoint=mine", ValueError, "=mine .* dualkv.integrations.skyrl.install"),
        (f"{BUDGET}=abc", TypeError, f"^{BUDGET} is 'abc', expected a number of packed tokens$"),
        (f"{BUDGET}=1e4", TypeError, rf"^{BUDGET} is 10000\.0, expected a number of packed tokens$"),
        (f"{BUDGET}=true", TypeError, f"^{BUDGET} is True, expected a number of packed tokens$"),
    ],
)
def test_the_command_refuses(word: str, error: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(error, match=says):
        run(monkeypatch, *WORDS, word)


def test_the_settings_of_the_page() -> None:
    (block,) = blocks("skyrl.md", {"text"})
    words = re.sub(r"#.*", "", block).split()
    assert words[:3] == ["python", "-m", "dualkv.integrations.skyrl"]
    cfg = configuration("none", *words[3:])
    assert cfg.trainer.max_tokens_per_microbatch == 16384
    workers.refuse(cfg.trainer)
