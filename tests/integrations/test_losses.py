"""Tests of the rule that says which settings make a loss depend on the micro-batch; veRL's and TRL's own losses are in
their folders."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dualkv.integrations import losses


class Config(dict):
    """A configuration that is read both ways, as veRL's are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def actor(loss_mode: str = "vanilla", correction: Any = None, **settings: Any) -> Config:
    policy_loss = Config(loss_mode=loss_mode, rollout_correction=correction)
    return Config({"policy_loss": policy_loss, "loss_agg_mode": "token-mean", "loss_scale_factor": None} | settings)


def trainer(**settings: Any) -> SimpleNamespace:
    quiet = {
        "args": SimpleNamespace(steps_per_generation=2),
        "loss_type": "dapo",
        "top_entropy_quantile": 1.0,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "aux_loss_enabled": False,
        "router_aux_loss_coef": 0.0,
    }
    return SimpleNamespace(**quiet | settings)


NORMALIZED = {"loss_type": "reinforce", "rollout_is": "token", "rollout_is_batch_normalize": True}
SUM_NORM = {"loss_agg_mode": "seq-mean-token-sum-norm"}


def twice(warn: Callable[[Any], None], of: Any) -> None:
    warn(of)
    warn(of)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    losses._warn.cache_clear()
    yield
    losses._warn.cache_clear()


@pytest.mark.parametrize(
    ("config", "names", "remedy"),
    [
        (actor("geo_mean"), "actor.policy_loss.loss_mode=geo_mean adds up the means", "take gspo"),
        (actor("kl_cov"), "actor.policy_loss.loss_mode=kl_cov picks tokens", "actor.ppo_max_token_len_per_gpu"),
        (actor("clip_cov"), "actor.policy_loss.loss_mode=clip_cov picks tokens", "take another policy loss"),
        (actor("bypass_mode", NORMALIZED), "rollout_is_batch_normalize=True divides", "set it to False"),
        (actor(**SUM_NORM), "actor.loss_agg_mode=seq-mean-token-sum-norm without", "set actor.loss_scale_factor"),
    ],
)
def test_a_setting_of_verl_is_named_once(config: Config, names: str, remedy: str) -> None:
    with pytest.warns(UserWarning, match="packing changes which rollouts share one") as caught:
        twice(losses.warn_of_verl, config)
    (message,) = [str(w.message) for w in caught]
    assert message.startswith("dualkv: actor.")
    assert names in message
    assert remedy in message.partition("unpacked training: ")[2]


@pytest.mark.parametrize(
    "config",
    [
        actor(),
        *(actor(mode) for mode in ("gspo", "sapo", "gpg", "dppo_tv", "dppo_kl", "dro", "cispo")),
        *(actor(loss_agg_mode=mode) for mode in ("token-sum", "seq-mean-token-sum", "seq-mean-token-mean")),
        actor(**SUM_NORM, loss_scale_factor=4096),
        actor("bypass_mode", NORMALIZED | {"rollout_is_batch_normalize": False}),
        actor("bypass_mode", NORMALIZED | {"loss_type": "ppo_clip"}),  # uses no such weights
        actor("bypass_mode", NORMALIZED | {"rollout_is": None}),
        actor("vanilla", NORMALIZED),  # weights of the trainer, normalized over the whole batch
    ],
)
def test_other_settings_of_verl_are_quiet(config: Config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.warn_of_verl(config)


TRL = {
    "loss_type='bnpo'": {"loss_type": "bnpo"},
    "top_entropy_quantile=0.2": {"top_entropy_quantile": 0.2},
    "entropy_coef=0.01": {"_entropy_bonus_enabled": True, "entropy_coef": 0.01},
    "use_adaptive_entropy=True": {"_entropy_bonus_enabled": True, "use_adaptive_entropy": True},
    "router_aux_loss_coef=0.5": {"aux_loss_enabled": True, "router_aux_loss_coef": 0.5},
}


@pytest.mark.parametrize("name", TRL)
def test_a_setting_of_trl_is_named_once(name: str) -> None:
    with pytest.warns(UserWarning, match="have a micro-batch hold a whole update") as caught:
        twice(losses.warn_of_trl, trainer(**TRL[name]))
    (message,) = [str(w.message) for w in caught]
    assert message.startswith(f"dualkv: {name} ")


@pytest.mark.parametrize(
    "settings",
    [
        *({"loss_type": name} for name in ("grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")),
        *(of | {"args": SimpleNamespace(steps_per_generation=1)} for of in TRL.values()),
    ],
)
def test_other_settings_of_trl_are_quiet(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses.warn_of_trl(trainer(**settings))
