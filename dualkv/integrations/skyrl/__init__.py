"""SkyRL's PPO and GRPO on packed rows: its models compute once what sequences of a micro-batch begin with in common.

    python -m dualkv.integrations.skyrl ...    # instead of skyrl.train.entrypoints.main_base; the arguments stay

The remote function of an entrypoint of one's own calls :func:`install` before it makes SkyRL's trainer.
"""

from codegen.packages import require
from codegen.surface import borrowing, irreplaceable, unfit

require("skyrl", __name__)
require("transformers", __name__)
with borrowing("skyrl", __name__):
    from dualkv.integrations.skyrl import batches, models, workers
    from dualkv.integrations.skyrl.models import PackedModel
    from dualkv.integrations.skyrl.workers import install

__all__ = ["PackedModel", "install"]

_said = (
    irreplaceable(models.HFModelWrapper, PackedModel, "forward", "model logprobs_chunk_size")
    or irreplaceable(
        batches.TokenBasedBatchIterator,
        batches.PackedBatchIterator,
        "_create_microbatch_from_indices",
        "data _microbatches _num_padding_microbatches _sync_num_microbatches",
    )
    or irreplaceable(
        workers.fsdp_worker.FSDPPolicyWorkerBase,
        workers.PackedPolicyWorker,
        "_forward_backward_micro",
        "init_model forward forward_backward get_microbatch_iterator HFModelWrapper model strategy cfg",
    )
    or irreplaceable(
        workers.fsdp_worker.FSDPCriticWorkerBase,
        workers.PackedCriticWorker,
        "",
        "init_model forward forward_backward get_microbatch_iterator get_llm_for_sequence_regression model strategy",
    )
)
if _said:
    raise ImportError(f"{__name__} cannot run: {unfit('skyrl', _said)}")
