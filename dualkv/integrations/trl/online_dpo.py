"""TRL's Online DPO, which samples two answers to each prompt, on packed groups. It is in `trl.experimental`."""

from __future__ import annotations

from typing import Any, cast

import torch

from codegen.surface import borrowing

with borrowing("trl", __name__):
    from trl.experimental.online_dpo import OnlineDPOTrainer as Padded

from dualkv.data.packing import pack_padded
from dualkv.integrations.trl import probe
from dualkv.integrations.trl.common import enable_all, refuse_model, refuse_trainer


class OnlineDPOTrainer(Padded):
    """`trl.experimental.online_dpo.OnlineDPOTrainer` that computes each prompt once for its two answers.

    Arguments and losses are TRL's, and so are metrics, but for four of them: "objective/kl",
    "objective/non_score_reward", "objective/rlhf_reward" and "objective/entropy" of TRL's trainer add up log-probs of
    padding behind an answer too. Here padding counts as 0.

    Args:
        model, args, kwargs: TRL's.
        fast: as for :class:`dualkv.integrations.trl.PackedGroups`.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses,
            PEFT adapters that `enable` refuses, or `neftune_noise_alpha`; in training for images, and prompts that the
            limit of TRL (`max_length`) cuts to nothing.
    """

    def __init__(self, model: Any, *args: Any, fast: bool = False, **kwargs: Any) -> None:
        probe.refuse_replaced(Padded, OnlineDPOTrainer, "_forward", "max_length ref_model")
        refuse_model(model)
        super().__init__(model, *args, **kwargs)
        refuse_trainer(self)
        enable_all(self, fast)

    def _forward(
        self,
        model: Any,
        prompt_ids: torch.Tensor,  # [N, P]
        prompt_mask: torch.Tensor,
        completion_ids: torch.Tensor,  # [N, R]
        completion_mask: torch.Tensor,
        vision_inputs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Log-probs [N, R] of the completions, 0 behind each."""
        if vision_inputs is not None:
            raise ValueError("the batch has images: text alone is packed, use TRL's own trainer")
        cut = max(prompt_ids.shape[1] + completion_ids.shape[1] - self.max_length, 0)  # as TRL does
        batch = pack_padded(prompt_ids[:, cut:], prompt_mask[:, cut:], completion_ids, completion_mask)
        logits = model(input_ids=batch.input_ids, dualkv=batch.layout, use_cache=False).logits[0]
        rows = logits[batch.predict_rows].log_softmax(-1)
        logps = torch.take_along_dim(rows, batch.targets[:, None], 1)[:, 0]
        return cast(torch.Tensor, batch.unpack(logps, "padded"))
