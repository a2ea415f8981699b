"""OpenRLHF's PPO and GRPO on packed rows: its models compute once what rollouts of a micro-batch begin with in common.

    python -m dualkv.integrations.openrlhf ...    # instead of openrlhf.cli.train_ppo_ray; the arguments stay

A script of one's own calls :func:`install` before OpenRLHF's `get_strategy`.
"""

from codegen.packages import require
from codegen.surface import borrowing

require("openrlhf", __name__)
require("transformers", __name__)
with borrowing("openrlhf", __name__):
    from dualkv.integrations.openrlhf.models import pack_model
    from dualkv.integrations.openrlhf.strategy import PackedStrategy, install

__all__ = ["PackedStrategy", "install", "pack_model"]
