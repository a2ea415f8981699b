"""Describe how a model makes logits from its last hidden states, and which weights are known to be only a part of that.

:func:`dualkv.integrations.transformers.head` reads a model's :class:`Head`; :func:`dualkv.response_logprobs` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

GATHERED = (
    "call the head inside of the forward of the module that gathers its weights, take logits by"
    " model(..., logits_to_keep=batch.predict_rows), or for a vocabulary over ranks see docs/fsdp.md"
)
Rows = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False, repr=False)  # a repr would print the weight
class Head:
    """Logits of hidden states: `cap(scale * (before(hidden) @ weight.T + bias))`, `cap(s) = softcap tanh(s / softcap)`.

    Make one for a model of your own; :func:`dualkv.integrations.transformers.head` makes the heads of transformers'
    models.

    Attributes:
        weight: [V, C], floating point; None with `module`.
        bias: [V], of the dtype and device of `weight`, or None.
        scale: finite and not 0; multiplies logits and bias, before the cap.
        softcap: above 0 and finite, or None.
        before: what the model computes of hidden states in front of the head, row by row: [..., C] -> [..., C].
        module: in the place of `weight` and `bias`, whatever makes logits of rows, each by itself: [n, C] -> [n, V]. A
            head with an adapter is called as it is. It must give the same logits twice, so no dropout may be active.

    Raises:
        TypeError: a weight or bias that is no floating point tensor.
        ValueError: shapes that do not match, a scale that is 0 or not finite, a cap that is not above 0 and finite,
            both `weight` and `module` or neither of them, a bias beside a module, a weight or bias sharded over ranks.
    """

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    before: Rows | None = None
    module: Rows | None = None

    def __post_init__(self) -> None:
        if (self.weight is None) == (self.module is None):
            found = "neither" if self.weight is None else "both"
            raise ValueError(f"the head has {found} of weight and module, expected one of them")
        for name, tensor, dims in (("weight", self.weight, ["V", "C"]), ("bias", self.bias, ["V"])):
            if tensor is not None:
                check_tensor(f"the head's {name}", tensor)
                if tensor.dim() != len(dims):
                    shape = tuple(tensor.shape)
                    raise ValueError(f"the head's {name} has shape {shape}, expected [{', '.join(dims)}]")
        if self.bias is not None:
            if self.weight is None:
                raise ValueError("the head has a bias beside module, expected a bias only beside weight")
            if self.bias.shape[0] != self.weight.shape[0]:
                rows = self.weight.shape[0]
                raise ValueError(f"the head's bias has shape {tuple(self.bias.shape)}, weight has {rows} rows")
            if (self.bias.dtype, self.bias.device) != (self.weight.dtype, self.weight.device):
                raise ValueError(
                    f"the head's bias is {self.bias.dtype} on {self.bias.device}, weight {self.weight.dtype} on"
                    f" {self.weight.device}, expected one dtype and device"
                )
        for name, number in (("scale", self.scale), *([("softcap", self.softcap)] * (self.softcap is not None))):
            if isinstance(number, bool) or not isinstance(number, int | float):
                what = f"a {type(number).__name__}" if isinstance(number, torch.Tensor) else repr(number)
                raise TypeError(f"the head's {name} is {what}, expected a Python number")
            if not math.isfinite(number) or number == 0 or (name == "softcap" and number < 0):
                expected = "above 0" if name == "softcap" else "other than 0"
                raise ValueError(f"the head's {name} is {number}, expected a finite number {expected}")

    @property
    def beside_weight(self) -> list[str]:
        """Name everything beside `weight` that changes the logits, in words; empty if nothing does."""
        return [
            *["an adapter or a module of its own"] * (self.module is not None),
            *["a bias"] * (self.bias is not None),
            *[f"the scale {self.scale:g}"] * (self.scale != 1.0),
            *[f"the cap {self.softcap}"] * (self.softcap is not None),
            *[f"{type(self.before).__name__} in front of the head"] * (self.before is not None),
        ]

    def in_front(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., C] -> what the head multiplies [..., C].

        Raises:
            ValueError: `before` has a weight of which this rank has a part.
        """
        return hidden if self.before is None else apply("what is before the head", self.before, hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., C] -> logits [..., V], all at a time, with gradients.

        The product runs in the dtype of the inputs, as a model's own head does; what follows is fp32 (fp64 for fp64).
        """
        states = self.in_front(hidden)
        if self.module is not None:
            logits = apply("the head's module", self.module, states)
        else:
            assert self.weight is not None
            logits = torch.nn.functional.linear(states, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap is not None:
            return self.softcap * torch.tanh(logits / (self.softcap / self.scale))
        return logits if self.scale == 1.0 else logits * self.scale


def check_tensor(name: str, tensor: object, instead: str = GATHERED) -> None:
    """Raises TypeError for anything but a floating point tensor, and as :func:`check_whole`."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        found = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(f"{name} must be a floating point tensor, got {found}")
    check_whole(name, tensor, instead)


def check_whole(name: str, tensor: torch.Tensor, instead: str = GATHERED) -> None:
    """Raises ValueError for a DTensor: `instead` says what to do."""
    if hasattr(tensor, "placements"):  # a DTensor, whose module takes long to import
        shape, placements = tuple(tensor.shape), tuple(tensor.placements)
        raise ValueError(f"{name} is a DTensor {shape} of placements {placements}, expected a plain tensor: {instead}")


def apply(name: str, rows: Rows, states: torch.Tensor) -> torch.Tensor:
    """rows(states), where `rows` is a part of a head.

    Raises:
        ValueError: `rows` has a weight of which this rank has a part, or makes a tensor of that kind.
    """
    try:
        made = rows(states)
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        for of_weight, weight in rows.named_parameters() if isinstance(rows, torch.nn.Module) else ():
            check_whole(f"{of_weight} of {name} ({type(rows).__name__})", weight)
        raise ValueError(f"{name} meets a DTensor, expected plain tensors: {GATHERED}") from error
    check_whole(f"the result of {name}", made)
    return made


# Of weights that are known to be a model's head: raises ValueError if the head is more than the weight.
KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def of_weight(weight: torch.Tensor) -> Head:
    """The head that is a weight [V, C] alone.

    Raises:
        ValueError: the weight is known to be a model's head, and not all of it.
    """
    check_tensor("head", weight)
    if weight.dim() != 2:
        raise ValueError(f"head must have two dimensions [V, C], got shape {tuple(weight.shape)}")
    if (refuse := KNOWN.get(weight)) is not None:
        refuse(weight)
    return Head(weight)
