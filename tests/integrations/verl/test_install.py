"""This environment is what `pip install 'dualkv[verl]'` makes, all of it and nothing else, and veRL starts in it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(of: str) -> tuple[set[str], list[str]]:
    """The packages that a requirement asks for, down to the last one, and what is missing or has another version."""
    names, missing, seen, left = set(), [], set(), [Requirement(of)]
    while left:
        asked = left.pop()
        try:
            found = distribution(asked.name)
        except PackageNotFoundError:
            missing.append(str(asked))
            continue
        if not asked.specifier.contains(found.version, prereleases=True):
            missing.append(f"{asked}, here {found.version}")
        names.add(canonicalize_name(asked.name))
        for extra in {"", *asked.extras}:
            if (asked.name, extra) not in seen:
                seen.add((asked.name, extra))
                needs = [Requirement(text) for text in found.requires or ()]
                left += [r for r in needs if r.marker is None or r.marker.evaluate({"extra": extra})]
    return names, missing


def test_it_has_what_the_extra_asks_for_and_nothing_else() -> None:
    names, missing = required("dualkv[verl]")
    assert missing == []
    assert {"verl", "transferqueue", "cachetools", "uvicorn", "ray", "aiohttp"} <= names  # with veRL's extras
    here = {canonicalize_name(d.name) for d in distributions(path=[sysconfig.get_path("purelib")])}
    assert here - names == set(), "requirements.txt has what no user would get"


def test_the_entry_point_imports() -> None:
    """The entry point imports with the plugin, which veRL loads by itself, and without the platform of these tests."""
    modules = "verl.trainer.main_ppo, verl.trainer.ppo.v1, verl.workers.rollout.llm_server"
    program = f"import {modules}, sys; assert 'dualkv.integrations.verl.trainer' in sys.modules"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
