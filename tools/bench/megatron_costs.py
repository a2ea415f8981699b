"""What packed groups and replicated sequences cost in a dense model, in floating-point operations and bytes, and how
context parallelism divides the costs among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Group:
    """Equal groups: how many, the responses of each, and tokens of a prompt and of a response."""

    responses: int
    prompt_len: int
    response_len: int
    groups: int = 1

    def rows(self, packed: bool) -> int:
        """Of all groups."""
        prompts = 1 if packed else self.responses
        return self.groups * (prompts * self.prompt_len + self.responses * self.response_len)

    @property
    def tokens(self) -> int:
        """Of responses, in all groups."""
        return self.groups * self.responses * self.response_len

    def pairs(self, packed: bool) -> float:
        """Of a query and a key that it sees, in all groups."""
        prompts = 1 if packed else self.responses
        p, r = self.prompt_len, self.response_len
        return self.groups * (prompts * p * p / 2 + self.responses * (p * r + r * r / 2))


@dataclass(frozen=True)
class Model:
    """Of the decoder's layers and the head."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], layers: int | None = None) -> Model:
        """Of the settings of :data:`dualkv.models.CONFIGS`, cut to some layers."""
        names = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
        return cls(layers or settings["num_hidden_layers"], *(settings[name] for name in names))

    @property
    def weights_of_layers(self) -> int:
        """Without those of norms."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weights_of_head(self) -> int:
        return self.hidden * self.vocabulary


def flops(model: Model, group: Group, packed: bool, head_on_all_rows: bool = False) -> float:
    """Of a forward and a backward that computes nothing again: 6 for a weight and row, 12 for a pair and head dim."""
    rows = group.rows(packed)
    head = rows if head_on_all_rows else group.tokens
    attention = 12 * group.pairs(packed) * model.layers * model.heads * model.head_dim
    return 6.0 * (model.weights_of_layers * rows + model.weights_of_head * head) + attention


def saving(model: Model, group: Group, head_on_all_rows: bool = False) -> float:
    """FLOPs of replicated sequences over those of packed groups; the packed head runs on response tokens alone."""
    return flops(model, group, False, head_on_all_rows) / flops(model, group, True)
