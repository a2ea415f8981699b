"""Packed groups in models of megatron-core: `enable(model)`, then pass `packed_seq_params=PackedGroups(layout)`."""

from codegen.packages import require
from codegen.surface import borrowing

require("megatron-core", __name__)
with borrowing("megatron-core", __name__):
    from dualkv.integrations.megatron.enabling import disable as disable
    from dualkv.integrations.megatron.enabling import enable as enable
    from dualkv.integrations.megatron.rows import PackedGroups as PackedGroups
    from dualkv.integrations.megatron.rows import Predictions as Predictions
    from dualkv.integrations.megatron.walks import measure_rows as measure_rows
    from dualkv.integrations.megatron.walks import walk_passes as walk_passes
