"""SkyRL's policy, reference and critic on packed rows.

They take and return what SkyRL's own models do: [B, L] ids and masks, values of the last W columns. In between,
sequences are one packed row in which each shared beginning is stored once. Values at padding are 0.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from skyrl.backends.skyrl_train.workers import model_wrapper
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper

from dualkv.data.trees import PackedSequences
from dualkv.integrations import actions, patching
from dualkv.integrations.transformers import adapters, enable, logprobs

INSTEAD = "or leave dualkv.integrations.skyrl out"
REPLAY = f", which takes log-probs over a part of the vocabulary: set it to False, {INSTEAD}"
COUNTED = f"{patching.OURS}counted"  # attribute of a model: how many tokens it was given, and packed


class PackedModel(HFModelWrapper):
    """SkyRL's `HFModelWrapper`, whose model computes once what sequences of a batch begin with in common.

    Calls with images run as SkyRL runs them; the first one says so. The constructor raises ValueError for a model that
    :func:`dualkv.integrations.transformers.enable` refuses, a call for `enable_sample_support_replay`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        enable(self.model)
        patching.of(self, "trainer").replace(COUNTED, Counter())
        self.entropy_scale: torch.Tensor | None = None  # [B], of the next call's entropies

    def forward(
        self,
        sequences: torch.Tensor,
        num_actions: int,
        attention_mask: torch.Tensor,
        temperature: float = 1.0,
        return_output: bool = False,
        compute_entropy: bool = False,
        entropy_requires_grad: bool = True,
        **others: Any,
    ) -> Any:
        """Log-probs [B, num_actions] float32 of the last columns of `sequences` [B, L].

        With `return_output` also a dictionary. With `compute_entropy` its "entropy" is [B, L], in which column t is of
        the row that predicts token t + 1.
        """
        if others.get("enable_sample_support_replay"):
            raise ValueError(f"enable_sample_support_replay is True{REPLAY}")
        if any(others.get(name) is not None for name in ("pixel_values", "image_grid_thw")):
            actions.say_images(type(adapters.without(self.model)).__name__, "SkyRL")
            asked = (temperature, return_output, compute_entropy, entropy_requires_grad)
            return super().forward(sequences, num_actions, attention_mask, *asked, **others)
        batch = pack_actions(self, sequences, attention_mask, num_actions)
        values, entropies = logprobs(self.model, batch, temperature, chunk_size=self.logprobs_chunk_size)
        of_actions = sequences[:, -num_actions:]
        made = batch.unpack(values, like=of_actions)
        if not return_output:
            return made
        output = {}
        if compute_entropy:
            if not entropy_requires_grad:
                entropies = entropies.detach()
            of_tokens = batch.unpack(entropies, like=sequences)
            if self.entropy_scale is not None:
                of_tokens = of_tokens * self.entropy_scale.to(of_tokens.device)[:, None]
            output["entropy"] = of_tokens.roll(-1, 1)
        return made, output


def packed_critic(*args: Any, **kwargs: Any) -> Any:
    """SkyRL's `get_llm_for_sequence_regression`: the critic, which then runs packed."""
    critic = model_wrapper.get_llm_for_sequence_regression(*args, **kwargs)
    plain = adapters.without(critic)
    enable(getattr(plain, plain.base_model_prefix))
    stock, changes = plain.forward, patching.of(plain, "trainer")

    def forward(
        input_ids: torch.Tensor,
        num_actions: int | None = None,
        attention_mask: torch.Tensor | None = None,
        return_output: bool = False,
    ) -> Any:
        if num_actions is None or attention_mask is None:
            return stock(input_ids, num_actions, attention_mask, return_output)
        batch = pack_actions(plain, input_ids, attention_mask, num_actions)
        values, outputs = actions.head_values(plain, batch, batch.predict_rows)
        made = batch.unpack(values, like=input_ids[:, -num_actions:])
        return (made, outputs) if return_output else made

    changes.replace("forward", forward)
    changes.replace(COUNTED, Counter())
    return critic


def pack_actions(
    model: Any, sequences: torch.Tensor, attention_mask: torch.Tensor, num_actions: int
) -> PackedSequences:
    """Pack sequences [B, L], of which the tokens of the last columns count, and note in the model how many there are.

    SkyRL asks for values of all these columns, also where a short response leaves some of them to its prompt.
    """
    attended = attention_mask.bool()
    follows = attended & (attended.cumsum(1) > 1)  # nothing predicts a first token
    batch = actions.pack(sequences, attention_mask, follows[:, -num_actions:])
    counted: Counter[str] = getattr(model, COUNTED)
    counted.update(tokens=int(attended.sum()), packed=batch.layout.num_tokens)
    return batch
