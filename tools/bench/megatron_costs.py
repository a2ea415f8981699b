"""Count the floating-point operations and bytes of packed groups and replicated sequences in a dense model, and how
context parallelism divides them among ranks."""

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
        """Count the rows of all groups."""
        prompts = 1 if packed else self.responses
        return self.groups * (prompts * self.prompt_len + self.responses * self.response_len)

    @property
    def tokens(self) -> int:
        """Count the tokens of responses in all groups."""
        return self.groups * self.responses * self.response_len

    def pairs(self, packed: bool) -> float:
        """Count the pairs of a query and a key that it sees, in all groups."""
        prompts = 1 if packed else self.responses
        p, r = self.prompt_len, self.response_len
        return self.groups * (prompts * p * p / 2 + self.responses * (p * r + r * r / 2))


@dataclass(frozen=True)
class Model:
    """The sizes of a model: its decoder's layers and its head."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], layers: int | None = None) -> Model:
        """Take the sizes from the settings of :data:`dualkv.models.CONFIGS`, cut to some layers."""
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
        """The number of the layers' weights, without those of norms."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weights_of_head(self) -> int:
        return self.hidden * self.vocabulary


def flops(model: Model, group: Group, packed: bool, head_on_all_rows: bool = False) -> float:
    """Count the FLOP of a forward and a backward without recomputation: 6 for a weight and row, 12 for a pair and head
    dim."""
    rows = group.rows(packed)
    head = rows if head_on_all_rows else group.tokens
    attention = 12 * group.pairs(packed) * model.layers * model.heads * model.head_dim
    return 6.0 * (model.weights_of_layers * rows + model.weights_of_head * head) + attention


def saving(model: Model, group: Group, head_on_all_rows: bool = False) -> float:
    """FLOPs of replicated sequences over the FLOPs of packed groups; the packed head runs on response tokens alone."""
    return flops(model, group, False, head_on_all_rows) / flops(model, group, True)


# ---------------------------------------------------------------- context parallelism
BYTES = 2  # of a number


def predicted_by(group: Group, ranks: int, rank: int) -> int:
    """Response tokens that a rank's rows predict, in the packing order of :func:`dualkv.pack`."""
    rows = -(-group.rows(True) // ranks)
    start, end = rank * rows, (rank + 1) * rows
    found, one = 0, group.rows(True) // group.groups
    for i in range(group.groups):
        first = i * one + group.prompt_len - 1  # the prompt's last row predicts the first token of every response
        last = first + group.responses * group.response_len
        found += group.responses * (start <= first < end) if group.response_len else 0
        # Rows behind it predict a token each, but for the last of every response.
        for j in range(group.responses):
            begin = first + 1 + j * group.response_len
            found += max(0, min(end, begin + group.response_len - 1, last) - max(start, begin))
    return found


def flops_of_rank(model: Model, group: Group, ranks: int, rank: int) -> float:
    """Count the part of :func:`flops` of packed groups that one context-parallel rank computes: a share of the rows in
    the layers, of the heads in attention, and the head for the tokens that its rows predict."""
    layers = flops(model, group, True) - 6.0 * model.weights_of_head * group.tokens
    return layers / ranks + 6.0 * model.weights_of_head * predicted_by(group, ranks, rank)
