"""Random draws of a model in training, made comparable: every draw is one number, the same in every call.

A packed call draws for each of its rows once. :class:`Draws` makes the draws of a packed call and of replicated
sequences equal. What differs then is what packed rows change: noise whose size depends on the length of the row, and
statistics over rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Shape = tuple[int, ...]
SAMPLES = 512  # of a draw, for its extremes
MOST_NUMBERS = 2**24  # of a buffer that may be written to; larger ones are quantized weights


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operations on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def seed_all(devices: Iterable[torch.device], seed: int = 0) -> None:
    """Seed the generators of the CPU and of some devices, where `torch.manual_seed` would seed all GPUs."""
    for device in (torch.device("cpu"), *devices):
        default_generator(device).manual_seed(seed)


def random_states(device: torch.device) -> list[torch.Tensor]:
    """The states of the generators of the host and, if it is a GPU, of the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


@contextmanager
def untouched(module: nn.Module | None, devices: Iterable[torch.device]) -> Iterator[None]:
    """Leave random states, and the buffers of a module, such as the statistics of norms in training, as they were."""
    buffers = [
        (part, name, x, x.clone())
        for part in (() if module is None else module.modules())
        for name, x in part._buffers.items()
        if x is not None and not x.is_meta and x.numel() <= MOST_NUMBERS
    ]
    with torch.random.fork_rng([device for device in devices if device.type == "cuda"]):
        try:
            yield
        finally:
            for part, name, x, before in buffers:
                part._buffers[name] = x
                if not torch.equal(x, before):  # `_version` does not count what batch norm writes
                    x.copy_(before)


class Draws(TorchDispatchMode):
    """A mode in which a random operation fills its result with one number, which its arguments alone decide.

    Attributes:
        shapes: of all draws.
    """

    def __init__(self, of: Shape | None = None, extreme: int = 0) -> None:
        """of: the shape of draws that are extreme, each the least (extreme=-1) or largest (1) of SAMPLES; None: all."""
        super().__init__()
        self.of, self.extreme = of, extreme
        self.shapes: set[Shape] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func is torch.ops.aten.native_dropout.default:
            values, p = args[0], args[1]
            self.shapes.add(tuple(values.shape))
            if self.extreme < 0 and self.of is None:
                return torch.zeros_like(values), torch.zeros_like(values, dtype=torch.bool)
            return values / (1 - p), torch.ones_like(values, dtype=torch.bool)
        devices = [x.device for x in tree_leaves(args) if isinstance(x, torch.Tensor)]  # a factory has none
        device = devices[0] if devices else torch.device(kwargs.get("device") or "cpu")
        (kwargs.get("generator") or default_generator(device)).manual_seed(0)
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor) or not made.numel():
            return made
        shape = tuple(made.shape)
        self.shapes.add(shape)
        if self.extreme and self.of in (None, shape):
            found = made.clone()
            for _ in range(SAMPLES):
                pick = torch.minimum if self.extreme < 0 else torch.maximum
                found = pick(found, func(*args, **kwargs))
            return made.copy_(found)
        keeps = func.overloadpacket in (
            torch.ops.aten.bernoulli_,
            torch.ops.aten.bernoulli,
        )  # a dropout that drops none
        return made.fill_(1 if keeps else made.flatten()[0])
