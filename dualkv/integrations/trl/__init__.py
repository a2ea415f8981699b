"""TRL's trainers on packed groups: the whole model computes each prompt once for all of its rollouts or answers.

    from dualkv.integrations.trl import GRPOTrainer    # instead of trl's; everything else stays

:class:`GRPOTrainer` and :class:`RLOOTrainer` sample groups, and :class:`PackedGroups` does the same for subclasses of
TRL's. :class:`DPOTrainer` and :class:`RewardTrainer` train on pairs of answers.
:class:`dualkv.integrations.trl.online_dpo.OnlineDPOTrainer` samples pairs.
"""

from codegen.packages import require
from codegen.surface import borrowing

require("trl", __name__)
require("transformers", __name__)
with borrowing("trl", __name__):
    from dualkv.integrations.trl.groups import GRPOTrainer, PackedGroups, RLOOTrainer
    from dualkv.integrations.trl.pairs import DPOTrainer, RewardTrainer

__all__ = ["DPOTrainer", "GRPOTrainer", "PackedGroups", "RLOOTrainer", "RewardTrainer"]
