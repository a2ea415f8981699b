"""TRL's trainers on packed groups: the whole model computes each prompt once for all of its rollouts or answers.

    from dualkv.integrations.trl import GRPOTrainer    # instead of trl's; everything else stays

:class:`GRPOTrainer` and :class:`RLOOTrainer` sample groups, and :class:`PackedGroups` does the same for subclasses of
TRL's. :class:`DPOTrainer`, :class:`KTOTrainer`, :class:`RewardTrainer` and :class:`SFTTrainer` train on datasets of
answers, which :func:`group_by_prompt` puts in order.
:class:`dualkv.integrations.trl.online_dpo.OnlineDPOTrainer` samples pairs.
"""

from codegen.packages import require
from codegen.surface import borrowing

require("trl", __name__)
require("transformers", __name__)
with borrowing("trl", __name__):
    from dualkv.integrations.trl.answers import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
    from dualkv.integrations.trl.datasets import group_by_prompt
    from dualkv.integrations.trl.groups import GRPOTrainer, PackedGroups, RLOOTrainer

__all__ = [
    "DPOTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "PackedGroups",
    "RLOOTrainer",
    "RewardTrainer",
    "SFTTrainer",
    "group_by_prompt",
]
