"""The command line of SkyRL's trainer with packed models."""

from __future__ import annotations

import sys
from typing import Any

import ray
from skyrl.train.entrypoints import main_base

from dualkv.integrations import patching
from dualkv.integrations.skyrl.workers import install, refuse

_stock_validate = main_base.validate_cfg


def train(cfg: Any) -> None:
    """Train by a configuration of SkyRL, in a process of Ray."""
    install(cfg)
    main_base.BasePPOExp(cfg).run()


def validate_cfg(cfg: Any) -> None:
    """Check a configuration as SkyRL does, and refuse what does not run packed, before Ray starts anything."""
    _stock_validate(cfg)
    refuse(cfg.trainer)


def main() -> None:
    """Run `skyrl.train.entrypoints.main_base` with the arguments of this process.

    Raises:
        ValueError: settings as :func:`install` refuses them; `trainer.override_entrypoint`.
        TypeError: as :func:`install`.
    """
    for word in sys.argv[1:]:
        if word.startswith("trainer.override_entrypoint="):
            raise ValueError(
                f"{word} trains in a function of its own, expected SkyRL's: call"
                " dualkv.integrations.skyrl.install(cfg) there, and use skyrl.train.entrypoints.main_base"
            )
    changes = patching.of(main_base)
    changes.replace("skyrl_entrypoint", ray.remote(num_cpus=1)(train))
    changes.replace("validate_cfg", validate_cfg)
    main_base.main()
