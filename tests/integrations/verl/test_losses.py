"""veRL's own losses of the same rollouts in one micro-batch and in several: a warning for those that differ."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import verl.trainer.ppo.core_algos as algos
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

from dualkv.integrations import losses
from dualkv.integrations.verl.engine import DualKVEngine

MODES = sorted(algos.POLICY_LOSS_REGISTRY)
AGGREGATIONS = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
CORRECTION = {"loss_type": "reinforce", "rollout_is": "token"}
LENS = [3, 9, 5, 12, 2, 6]


def actor(mode: str = "vanilla", correction: dict[str, Any] | None = None, **settings: Any) -> FSDPActorConfig:
    policy_loss = PolicyLossConfig(
        loss_mode=mode,
        rollout_correction=correction or dict(CORRECTION),
        dro_beta=0.1,
        kl_cov_ratio=0.2,
        clip_cov_ratio=0.2,
        clip_cov_lb=0.0,
    )
    settings |= {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 4, "policy_loss": policy_loss}
    return FSDPActorConfig(**settings)


def total(config: FSDPActorConfig, cuts: list[list[int]]) -> float:
    """The loss of all rollouts: micro-batches are as wide as their longest response, and are added up, as veRL does."""
    draw = partial(torch.randn, len(LENS), max(LENS), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    old, new, advantages = -1 + 0.3 * draw(), -1 + 0.3 * draw(), draw()[:, :1].expand(-1, max(LENS))
    mask = torch.arange(max(LENS)) < torch.tensor(LENS)[:, None]
    of_all = {"dp_size": 1, "batch_num_tokens": sum(LENS), "global_batch_size": len(LENS)}
    config.global_batch_info.update(of_all, loss_scale_factor=config.loss_scale_factor)
    loss = 0.0
    for cut in cuts:
        width = max(LENS[i] for i in cut)
        parts = [x[cut, :width].clone() for x in (old, new, advantages, mask)]
        torch.manual_seed(0)  # clip_cov draws
        loss += algos.get_policy_loss_fn(config.policy_loss.loss_mode)(*parts, config.loss_agg_mode, config)[0].item()
    return loss


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param({"mode": mode}, id=mode) for mode in MODES),
        *(pytest.param({"loss_agg_mode": mode}, id=mode) for mode in AGGREGATIONS),
        pytest.param({"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 12}, id="scale factor"),
        *(
            pytest.param({"mode": "bypass_mode", "correction": CORRECTION | more}, id=f"weights {more}")
            for more in (
                {"rollout_is_batch_normalize": True},
                {"rollout_is_batch_normalize": True, "rollout_is": "sequence"},
                {"rollout_is_batch_normalize": True, "loss_type": "ppo_clip"},
                {"rollout_is_batch_normalize": True, "rollout_is": None},
            )
        ),
    ],
)
def test_a_loss_that_depends_on_micro_batches_is_known(config: dict[str, Any]) -> None:
    whole = total(actor(**config), [[0, 1, 2, 3, 4, 5]])
    cut = [total(actor(**config), cuts) for cuts in ([[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3], [4, 5]])]
    depends = any(abs(loss - whole) > 1e-9 * abs(whole) for loss in cut)
    assert bool(losses.verl_settings(actor(**config))) == depends, (whole, cut)


def test_the_engine_warns_where_verls_own_trainer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    losses._warn.cache_clear()
    engine = object.__new__(DualKVEngine)
    monkeypatch.setattr(DualKVEngine, "_measured", lambda *args, **kwargs: "result")
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    with pytest.warns(UserWarning, match="dualkv: actor.policy_loss.loss_mode=kl_cov picks tokens") as caught:
        assert [engine.train_batch(None, partial(print, config=actor("kl_cov"))) for _ in "ab"] == ["result"] * 2
    assert len(caught) == 1
    engine.train_batch(None, print)  # a loss of one's own
