"""The example scripts for veRL: what they start is a configuration that veRL takes, by its own checks."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.config import omega_conf_to_dataclass, validate_config

EXAMPLES = Path(__file__).parents[3] / "examples"


def started(name: str, folder: Path, *words: str) -> tuple[int, list[str]]:
    """Exit code of a script, and the words of the `python` that it started."""
    (folder / "python").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$WORDS"\n')
    (folder / "python").chmod(0o755)
    env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "WORDS": str(folder / "words")}
    done = subprocess.run(["bash", str(EXAMPLES / name), *words], env=env, capture_output=True)
    found = (folder / "words").read_text().splitlines() if (folder / "words").exists() else []
    return done.returncode, found


def configuration(name: str, folder: Path, *more: str) -> Any:
    code, words = started(name, folder, "model", "train.parquet", "validation.parquet", *more)
    assert code == 0
    assert words[:2] == ["-m", "verl.trainer.main_ppo"]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=words[2:])


@pytest.mark.filterwarnings("ignore:Disabled critic")
@pytest.mark.parametrize("name", ["verl_grpo.sh", "verl_dapo.sh"])
def test_configurations_are_valid(name: str, tmp_path: Path) -> None:
    config = configuration(name, tmp_path, "trainer.nnodes=2")
    validate_config(config, need_reference_policy(config), need_critic(config))
    for part in ("actor", "rollout"):
        omega_conf_to_dataclass(config.actor_rollout_ref[part])
    omega_conf_to_dataclass(config.algorithm)
    assert not need_critic(config)
    assert config.trainer.nnodes == 2  # what follows the files goes to veRL, too
    assert config.actor_rollout_ref.model.model_type == "dualkv"
    assert config.actor_rollout_ref.model.fused_kernel_options.dualkv_keep == "attention"
    assert get_trainer_cls(config.trainer.v1.trainer_mode).stock_mode == "sync"
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu >= longest
    assert config.data.train_batch_size % config.actor_rollout_ref.actor.ppo_mini_batch_size == 0


def test_dapo(tmp_path: Path) -> None:
    config = configuration("verl_dapo.sh", tmp_path)
    assert not need_reference_policy(config)
    assert omega_conf_to_dataclass(config.actor_rollout_ref.actor).clip_ratio_high == 0.28
    manager = get_reward_manager_cls(config.reward.reward_manager.name)(config, tokenizer=None, compute_score=None)
    assert manager.overlong_buffer_cfg.enable
    assert manager.max_resp_len == config.data.max_response_length
    assert omega_conf_to_dataclass(config.algorithm).filter_groups.enable


def test_without_files_they_say_what_is_missing(tmp_path: Path) -> None:
    for name in ("verl_grpo.sh", "verl_dapo.sh"):
        assert started(name, tmp_path, "model") == (2, [])
