"""Describe how a model makes logits from its last hidden states, and which weights are known to be only a part of that.

:func:`dualkv.integrations.transformers.head` reads a model's :class:`Head`; :func:`dualkv.response_logprobs` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakTensorKeyDictionary

from dualkv.arrays import check_bool
from dualkv.draws import Draws, random_states, untouched

GATHERED = (
    "call the head inside of the forward of the module that gathers its weights, take logits by"
    " model(..., logits_to_keep=batch.predict_rows), or for a vocabulary over ranks see docs/fsdp.md"
)
INSTEAD = "take its logits by model(..., dualkv=layout, logits_to_keep=batch.predict_rows)"
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
        before: what the model computes of hidden states in front of the head: [n, C] -> [n, C].
        module: in the place of `weight` and `bias`, whatever makes logits of rows: [n, C] -> [n, V]. Both must make
            each row by itself, and the same twice, so no dropout may be active. The first use checks this on a few
            random rows: of an `nn.Module` once, and once in training; of another function in each call.
        batch_invariant: :func:`dualkv.response_logprobs` multiplies `weight` with `chunk_size` rows each time, or calls
            `module` with as many, so that the bits of a row's log-probs do not depend on what it is packed with.

    Raises:
        TypeError: a weight or bias that is no floating point tensor; `before` or `module` that is no function.
        ValueError: shapes that do not match, a scale that is 0 or not finite, a cap that is not above 0 and finite,
            both `weight` and `module` or neither of them, a bias beside a module, a weight or bias sharded over ranks.
    """

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    before: Rows | None = None
    module: Rows | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if (self.weight is None) == (self.module is None):
            found = "neither" if self.weight is None else "both"
            raise ValueError(f"the head has {found} of weight and module, expected one of them")
        check_bool("the head's batch_invariant", self.batch_invariant)
        for name, part in (("before", self.before), ("module", self.module)):
            if part is not None and not callable(part):
                raise TypeError(f"the head's {name} is a {type(part).__name__}, expected a function of rows")
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
            *([] if self.module is None else [named(self.module)]),
            *["a bias"] * (self.bias is not None),
            *[f"the scale {self.scale:g}"] * (self.scale != 1.0),
            *[f"the cap {self.softcap}"] * (self.softcap is not None),
            *([] if self.before is None else [f"{named(self.before)} in front of the head"]),
        ]

    def in_front(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, C] -> what the head multiplies [n, C]; ValueError for a `before` that cannot be used."""
        if self.before is None:
            return hidden
        check_rows(BEFORE, self.before, hidden)
        return apply(BEFORE, self.before, hidden)

    def scale_over(self, temperature: float) -> tuple[float, float | None, float]:
        """(divisor, cap, factor) for logits s of the product, divided by a temperature: cap * tanh(s * factor / cap) /
        divisor. Without a cap (None) the scale is a part of the divisor, and costs nothing."""
        if self.softcap is None:
            return temperature / self.scale, None, 1.0
        return temperature, self.softcap, self.scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., C] -> logits [..., V], all at a time, with gradients.

        The product runs in the dtype of the inputs, as a model's own head does; what follows is fp32 (fp64 for fp64).
        """
        states = self.in_front(hidden.reshape(-1, hidden.shape[-1]))
        if self.module is not None:
            check_rows(MODULE, self.module, states)
            logits = apply(MODULE, self.module, states)
        else:
            assert self.weight is not None
            logits = nn.functional.linear(states, self.weight, self.bias)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = logits.reshape(*hidden.shape[:-1], logits.shape[-1])
        if self.softcap is not None:
            return self.softcap * torch.tanh(logits / (self.softcap / self.scale))
        return logits if self.scale == 1.0 else logits * self.scale


def check_tensor(name: str, tensor: object, instead: str = GATHERED, expected: str = "a floating point tensor") -> None:
    """Raises TypeError for anything but a floating point tensor, and as :func:`check_whole`."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        found = tensor.dtype if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(f"{name} must be {expected}, got {found}")
    check_whole(name, tensor, instead)


def check_whole(name: str, tensor: torch.Tensor, instead: str = GATHERED) -> None:
    """Raises ValueError for a DTensor: `instead` says what to do."""
    if hasattr(tensor, "placements"):  # a DTensor, whose module takes long to import
        shape, placements = tuple(tensor.shape), tuple(tensor.placements)
        raise ValueError(f"{name} is a DTensor {shape} of placements {placements}, expected a plain tensor: {instead}")


def apply(name: str, rows: Rows, states: torch.Tensor) -> torch.Tensor:
    """rows(states), where `rows` is a part of a head; ValueError if it has or makes sharded tensors."""
    try:
        made = rows(states)
    except RuntimeError as error:
        if "DTensor" not in str(error):
            raise
        owner = _owner(rows)
        for of_weight, weight in owner.named_parameters() if owner is not None else ():
            check_whole(f"{of_weight} of {name} ({type(owner).__name__})", weight)
        raise ValueError(f"{name} meets a DTensor, expected plain tensors: {GATHERED}") from error
    if not isinstance(made, torch.Tensor):
        raise ValueError(f"{name} makes a {type(made).__name__}, expected a tensor")
    check_whole(f"the result of {name}", made)
    return made


# ---------------------------------------------------------------- parts of a head that are called
BEFORE, MODULE = "what is before the head", "the head's module"
ROWS = 4  # of a check, each four times as large as the one before, so that a small part of a large row shows
BOUND = 0.03  # of relative differences, which rounding to bf16 explains
# Modules that have passed, and with which parts in training.
_PASSED: WeakKeyDictionary[nn.Module, set[tuple[Any, ...]]] = WeakKeyDictionary()


def _owner(rows: Any) -> nn.Module | None:
    """The module that is called, itself or by a method of it; None of a function."""
    while not isinstance(rows, nn.Module) and rows is not None:
        rows = getattr(rows, "__self__", None)
    return rows


def named(rows: Rows) -> str:
    """Name a part of a head that is called, in words."""
    if (owner := _owner(rows)) is None:
        return f"the function {getattr(rows, '__name__', type(rows).__name__)}"
    cls = type(owner)
    return f"the adapter {cls.__module__}.{cls.__name__}" if cls.__module__.startswith("peft.") else cls.__name__


@_disable_dynamo  # torch.compiler.disable imports the compiler at once
@torch.no_grad()
def check_rows(name: str, rows: Rows, like: torch.Tensor) -> None:
    """Raises ValueError if a part of a head makes other results of a row alone than beside others, or draws random
    numbers; a module is called for it once in each mode, with rows like those of `like` [n, C]. A weight that is zero,
    as those of adapters are before they are trained, hides what the module will read."""
    owner = _owner(rows)
    modes = () if owner is None else tuple((type(part), part.training) for part in owner.modules())
    if owner is not None and modes in _PASSED.setdefault(owner, set()):
        return
    what, device = f"{name} ({named(rows)})", like.device
    expected = f"expected each row by itself, and the same twice: {INSTEAD}"
    some = torch.randn(ROWS, like.shape[1], generator=torch.Generator().manual_seed(0), device="cpu")
    some = (some * 4.0 ** torch.arange(ROWS, device="cpu")[:, None]).to(like)
    with untouched(owner, [device]), torch.autocast(*autocast_now(device.type), cache_enabled=False):
        before = random_states(device)
        together = apply(name, rows, some)
        try:
            alone = torch.cat([apply(name, rows, row[None]) for row in some])
        except Exception as error:
            says = " ".join(str(error).split())[:300]
            raise ValueError(f"{what} does not run on one row ({says}), {expected}") from error
        if not all(map(torch.equal, before, random_states(device))):
            draws = [Draws(extreme=extreme) for extreme in (-1, 1)]
            found = []
            for each in draws:
                with each:
                    found.append(rows(some))
            # PEFT draws one number where it drops no module. Dropout may show only once its adapter is trained.
            if _differs(*found) > 0 or any(math.prod(shape) > 1 for shape in draws[0].shapes):
                raise ValueError(f"{what} draws random numbers, {expected}")
    if (differs := _differs(alone, together)) > BOUND:
        raise ValueError(
            f"{what} makes other results of rows alone than of the same rows together, by {differs:.2g} relative,"
            f" {expected}"
        )
    if owner is not None:
        _PASSED[owner].add(modes)


def _differs(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two results [n, ...], relative to the element and to its row's median."""
    if a.shape != b.shape:
        return math.inf
    worst = 0.0
    for x, y in zip(a.double(), b.double(), strict=True):
        typical = y[y.isfinite() & (y != 0)].abs().median()  # logits of unused tokens may be -inf, or nearly
        relative = torch.where(x == y, 0.0, (x - y).abs() / (y.abs() + typical)).nan_to_num(nan=math.inf)
        worst = max(worst, float(relative.max()))
    return worst


def autocast_now(device: str) -> tuple[str, torch.dtype, bool]:
    """The arguments of `torch.autocast` that are in force: device, dtype, whether it is on."""
    return device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)


# Of weights that are known to be a model's head: raises ValueError if the head is more than the weight.
KNOWN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def of_weight(weight: torch.Tensor) -> Head:
    """The head that is a weight [V, C] alone; ValueError for a weight that is known to be a part of a model's head."""
    check_tensor("head", weight, expected="a floating point tensor or a dualkv.Head")
    if weight.dim() != 2:
        raise ValueError(f"head must have two dimensions [V, C], got shape {tuple(weight.shape)}")
    if (refuse := KNOWN.get(weight)) is not None:
        refuse(weight)
    return Head(weight)
