"""The command line of OpenRLHF's PPO with packed models: `python -m dualkv.integrations.openrlhf`."""

from __future__ import annotations

import runpy

from dualkv.integrations.openrlhf import install


def main() -> None:
    """Run `openrlhf.cli.train_ppo_ray` with the arguments of this process."""
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
