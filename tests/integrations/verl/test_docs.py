"""The commands of docs that need veRL: every line of configuration is taken."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl
from hydra import compose, initialize_config_dir

from tests.documents import shown, words_of

TRAINER = ["python", "-m", "verl.trainer.main_ppo"]
SHOWN = [words_of(command) for _, command, _ in shown()]


@pytest.mark.parametrize("words", [words for words in SHOWN if words[:3] == TRAINER], ids=lambda words: words[-1])
def test_configurations_are_taken(words):
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=words[3:])
    assert config.actor_rollout_ref.model.model_type == "dualkv"
