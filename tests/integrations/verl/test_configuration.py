"""Lines of configuration and commands of the docs: veRL's trainer takes each of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import verl
from hydra import compose, initialize_config_dir

from tests.documents import shown, words_of

PAGE = Path(__file__).parents[3] / "docs" / "verl.md"
TABLE = PAGE.read_text().partition("| line | what it does |\n")[2].partition("\n\n")[0]
LINES = [line for row in TABLE.splitlines()[1:] for line in re.findall(r"`([^`]+)`", row.split("|")[1])]


TRAINER = ["python", "-m", "verl.trainer.main_ppo"]
COMMANDS = [words for _, command, _ in shown() if (words := words_of(command))[:3] == TRAINER]


def composed(overrides: list[str]) -> Any:
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides)


def override(line: str) -> str:
    """Write a line as on a command line: the page leaves out `actor_rollout_ref.`, and values that the user has to
    choose."""
    plus, name = ("+", line[1:]) if line.startswith("+") else ("", line)
    whole = name if name.split(".")[0] in ("actor_rollout_ref", "critic", "trainer") else f"actor_rollout_ref.{name}"
    return plus + (whole if "=" in whole else f"{whole}=1")


def test_the_table_is_found():
    assert "+actor_rollout_ref.model.model_type=dualkv" in LINES
    assert len(LINES) >= 7


@pytest.mark.parametrize("line", LINES)
def test_line_is_taken(line):
    name, _, value = override(line).lstrip("+").partition("=")
    found = composed([override(line)])
    for part in name.split("."):
        found = found[part]
    assert str(found) == value


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1])
def test_commands_are_taken(words):
    assert composed(words[3:]).actor_rollout_ref.model.model_type == "dualkv"
