"""ms-swift's GRPO on packed rows: whatever the rollouts of a micro-batch begin with in common is computed once.

    import dualkv.integrations.swift    # the whole file that `swift rlhf --external_plugins` names

The import puts :class:`GRPOTrainer` in the place of ms-swift's trainer of `--rlhf_type grpo`.
"""

from __future__ import annotations

from typing import Any

import torch

from codegen.packages import require
from codegen.surface import borrowing, irreplaceable, unfit

require("ms-swift", __name__)
require("transformers", __name__)

with borrowing("ms-swift", __name__):
    from swift.rlhf_trainers import grpo_trainer
    from swift.trainers import TrainerFactory
    from swift.tuners import SwiftModel

from dualkv.data.gain import MIN_SHARED
from dualkv.data.trees import pack_sequences
from dualkv.integrations.metrics import count_rows
from dualkv.integrations.transformers import enable, logprobs

__all__ = ["GRPOTrainer"]

INSTEAD = "or leave dualkv.integrations.swift out"
# What a batch of text has; row by row, in padding-free rows with all sequences end to end.
OF_TEXT = {"input_ids", "attention_mask", "position_ids"}


class GRPOTrainer(grpo_trainer.GRPOTrainer):
    """`swift.rlhf_trainers.GRPOTrainer` that computes once what rollouts of a micro-batch share.

    Arguments, losses and metrics are ms-swift's; docs/ms-swift.md has the metrics that are added. Rows are packed as
    trees: prompts, and turns that rollouts have in common, of 8 tokens or more. Policy, reference (a model, or the
    policy without its adapters) and teacher run packed. Values of tokens that are not trained are 0, where ms-swift
    computes them and leaves them out of its losses and metrics.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses,
            `use_liger_kernel`, sequence parallelism, a multimodal model, tuners that are ms-swift's own (not PEFT's);
            in training for inputs other than text.
    """

    def __init__(self, model: Any, ref_model: Any = None, *args: Any, **kwargs: Any) -> None:
        _refuse(model, kwargs["args"], kwargs["template"])
        for one in (model, ref_model, kwargs.get("teacher_model")):
            if one is not None:
                enable(one)
        super().__init__(model, ref_model, *args, **kwargs)

    def _get_per_token_logps_and_entropies_single(
        self, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, compute_entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probs [B, W] of the last W columns, and entropies if asked for; 0 at tokens that do not count."""
        given = {name: value for name, value in model_inputs.items() if value is not None}
        if others := sorted(given.keys() - OF_TEXT):
            raise ValueError(f"the batch has {', '.join(others)}: text alone is packed, {INSTEAD}")
        ids, mask = given["input_ids"], grpo_batch.completion_mask
        if self.template.padding_free:
            frame = {"position_ids": given["position_ids"]}
            of_row = _of_row(mask, grpo_batch.seq_lengths)
        else:
            frame = {"attention_mask": given["attention_mask"]}
            of_row = mask
        batch = pack_sequences(ids, of_row, min_shared=MIN_SHARED, **frame)
        count_rows(self, batch, ids)
        logps, entropies = (
            values.new_zeros(mask.shape).masked_scatter(mask, batch.unpack(values, like=of_row)[of_row])
            for values in logprobs(model, batch, self.temperature)
        )
        return logps, entropies if compute_entropy else None


def _of_row(mask: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """A mask [B, W] of the ends of sequences, `lens` [B] columns each and aligned right -> [1, sum of lens], end to
    end."""
    column = torch.arange(mask.shape[1], device=mask.device)
    return mask[column >= mask.shape[1] - lens[:, None]][None]


def _refuse(model: Any, args: Any, template: Any) -> None:
    """Raises ValueError for what would run replicated, or wrong."""
    if args.use_liger_kernel:
        why = "use_liger_kernel is True, whose loss takes hidden states of padded rows from the model: set it to False"
    elif template.sequence_parallel_size > 1:
        size = template.sequence_parallel_size
        why = f"sequence_parallel_size is {size}, whose ranks share rows in another attention: set it to 1"
    elif model.model_meta.is_multimodal:
        why = f"{type(model).__name__} is a multimodal model, and text alone is packed: train a model of text"
    elif isinstance(model, SwiftModel):
        found = ", ".join(sorted({type(one.config).__name__ for one in model.adapters.values()}))
        why = f"the model has a tuner of ms-swift's own ({found}), not known to run packed: take one of PEFT, as lora"
    else:
        return
    raise ValueError(f"{why}, {INSTEAD}")


if _said := irreplaceable(
    grpo_trainer.GRPOTrainer,
    GRPOTrainer,
    "_get_per_token_logps_and_entropies_single",
    "template padding_free temperature completion_mask seq_lengths _metrics",
):
    raise ImportError(f"{__name__} cannot run: {unfit('ms-swift', _said)}")
TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.GRPOTrainer"
