"""Packed groups in models of Hugging Face transformers: `enable(model)`, then `model(..., dualkv=layout)`."""

from codegen.packages import require
from codegen.surface import borrowing

require("transformers", __name__)
with borrowing("transformers", __name__):
    from dualkv.integrations.transformers.checkpointing import KEEP as KEEP
    from dualkv.integrations.transformers.checkpointing import recompute_layers as recompute_layers
    from dualkv.integrations.transformers.enabling import disable as disable
    from dualkv.integrations.transformers.enabling import enable as enable
    from dualkv.integrations.transformers.enabling import suspended as suspended
    from dualkv.integrations.transformers.heads import head as head
    from dualkv.integrations.transformers.wrapped import logprobs as logprobs
