"""Count the floating-point operations of packed groups and replicated sequences in a dense or hybrid
model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
class Nets:
    """The sizes of gated delta nets, which all layers have in place of attention but every `interval`-th."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    interval: int


@dataclass(frozen=True)
class Model:
    """The sizes of a model: its decoder's layers and its head. With `nets` attention has an output gate, as in
    Qwen3.5."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    nets: Nets | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any], layers: int | None = None) -> Model:
        """Take the sizes from the settings of :data:`dualkv.models.CONFIGS`, cut to some layers."""
        nets = None
        if "linear_num_key_heads" in settings:
            of_nets = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
            sizes = *(settings[f"linear_{name}"] for name in of_nets), settings["full_attention_interval"]
            nets = Nets(*sizes)
        names = (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
        )
        found = cls(layers or settings["num_hidden_layers"], *(settings[name] for name in names))
        return replace(found, nets=nets)

    @property
    def is_net(self) -> list[bool]:
        """Whether each layer has a gated delta net in place of attention."""
        return [self.nets is not None and (layer + 1) % self.nets.interval > 0 for layer in range(self.layers)]

    @property
    def weights_of_layers(self) -> int:
        """The number of the layers' weights, without those of norms and convolutions."""
        columns = self.layers * 3 * self.intermediate
        gates = 0 if self.nets is None else self.heads
        columns += self.is_net.count(False) * (2 * (self.heads + self.kv_heads) + gates) * self.head_dim
        if (nets := self.nets) is not None:
            of_keys, of_values = 2 * nets.key_dim * nets.key_heads, (3 * nets.value_dim + 2) * nets.value_heads
            columns += self.is_net.count(True) * (of_keys + of_values)
        return columns * self.hidden

    @property
    def weights_of_head(self) -> int:
        return self.hidden * self.vocabulary


def flops(model: Model, group: Group, packed: bool) -> float:
    """Count the FLOP of a forward and a backward without recomputation: 6 for a weight and row, 12 for a pair and head
    dim. Scans of gated delta nets, some hundredths of their products, are left out."""
    attention = 12 * group.pairs(packed) * model.is_net.count(False) * model.heads * model.head_dim
    return 6.0 * (model.weights_of_layers * group.rows(packed) + model.weights_of_head * group.tokens) + attention


def saving(model: Model, group: Group) -> float:
    """FLOPs of replicated sequences over the FLOPs of packed groups."""
    return flops(model, group, False) / flops(model, group, True)
