"""Checks that a decoder computes packed groups exactly: a small copy runs a tree packed and replicated, on the CPU.

The copy has the decoder's class, its configuration in small (see :mod:`dualkv.integrations.shrink`) and random weights.
So the check does not touch the weights or the device of the model, and takes about a second.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from dualkv.integrations import recurrent, rotary
from dualkv.integrations.shrink import shrink
from dualkv.layout import Layout
from dualkv.ops import backends

# Relative difference allowed in the worst row of hidden states. fp32 rounding stays below 1e-5; a wrong position or key
# makes more than 1e-2.
TOLERANCE = 1e-3

# Segment lengths and parents of the tree: a group with three responses, one empty and one of a single token; a group
# with a prompt of one token; a tree of three levels.
LENGTHS = [7, 9, 0, 1, 1, 12, 3, 5, 3, 2, 8, 4]
PARENTS = [-1, 0, 0, 0, -1, 4, 4, -1, 7, 8, 8, 7]
# Of models whose rotary embedding depends on the length of the sequence: sequences that share rows are of one length,
# or of no more tokens than the threshold (6 in the small copy), here also of just so many and of one more.
EVEN_LENGTHS = [7, 9, 9, 1, 1, 0, 4, 5, 4, 4, 4, 0, 8, 8, 2, 4, 1, 3, 4, 0, 13, 3]
EVEN_PARENTS = [-1, 0, 0, -1, 3, 3, 3, -1, 7, 8, 8, 7, 11, 7, -1, 14, 14, -1, 17, -1, 19, 19]

_VERDICTS: dict[tuple[type, str], str | None] = {}
_ALONE = threading.RLock()  # a check changes settings of the process


class CannotRunError(ValueError):
    """The packed call of a small copy is refused, though the replicated call runs."""


def check(decoder: PreTrainedModel, enable: Callable[..., Any]) -> None:
    """Raises ValueError, in one sentence, if packed and replicated hidden states of a small copy differ.

    Args:
        decoder: only its class and configuration are read. Each pair of them is checked once in a process.
        enable: :func:`dualkv.integrations.transformers.enable`.
    """
    # fully_shard replaces the class of a module by a subclass of its own.
    cls = next(c for c in type(decoder).__mro__ if not issubclass(c, FSDPModule))
    verdict = verdict_of(cls, decoder.config, enable)
    if verdict is not None:
        raise ValueError(verdict)


def verdict_of(cls: type[Any], config: PreTrainedConfig, enable: Callable[..., Any]) -> str | None:
    """Why decoders of this class and configuration are refused, in one sentence; None if they run packed."""
    key = cls, json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _VERDICTS:
        _VERDICTS[key] = torch.compiler.disable(_verdict)(cls, config, enable)  # the caller may be compiled
    return _VERDICTS[key]


def _verdict(cls: type[Any], config: PreTrainedConfig, enable: Callable[..., Any]) -> str | None:
    name = cls.__name__
    try:
        differs = difference(cls, shrink(config), enable)
    except Exception as error:
        return _unproved(name, _with_own_thresholds(cls, config, enable) or error)
    if differs <= TOLERANCE:
        return None
    return (
        f"{name} does not compute packed groups as it computes replicated sequences: hidden states of a small copy"
        f" differ by {differs:.2g} relative"
    )


def _with_own_thresholds(cls: type[Any], config: PreTrainedConfig, enable: Callable[..., Any]) -> Exception | None:
    """The error of a copy that keeps the model's own thresholds, so that the message names these; None if it runs."""
    try:
        difference(cls, shrink(config, thresholds=False), enable)
    except Exception as error:
        return error
    return None


def _unproved(name: str, error: Exception) -> str:
    says = " ".join(str(error).split())
    if isinstance(error, CannotRunError):
        return f"{name} cannot run packed groups: {says}"
    return (
        f"{name} could not be checked: its small copy raises {type(error).__name__}: {says[:300]}; check=False enables"
        " the model unproved"
    )


def difference(cls: type[Any], config: PreTrainedConfig, enable: Callable[..., Any]) -> float:
    """The largest relative difference, over rows, between packed and replicated hidden states with random weights.

    Raises:
        CannotRunError: the packed call is refused.
        ValueError: hidden states are not finite. Other errors of the model pass through.
    """
    with _ALONE, _untouched(), torch.no_grad():
        device = _device(cls)
        model: Any = _copy(cls, config)
        model.to(device)
        layout = tree(even=bool(rotary.embeddings(model)))
        paths = sequence_rows(layout)
        draw, vocabulary = torch.Generator().manual_seed(1), model.get_input_embeddings().num_embeddings
        first = vocabulary // 16  # the ids below are special tokens
        ids = torch.randint(first, vocabulary, (1, layout.num_tokens), generator=draw)
        ids = ids.to(device)
        with recurrent.on_reference(model):
            replicated = _alone(model, ids, paths)
            try:
                packed = enable(model, check=False)(input_ids=ids, dualkv=layout)[0]
            except ValueError as error:
                raise CannotRunError(error) from error
        packed = packed.cpu()
    worst = 0.0
    for expected, path in zip(replicated, paths, strict=True):
        got = packed[0, path].double()
        if not expected.isfinite().all():
            raise ValueError("the replicated hidden states are not finite")
        relative = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(relative.nan_to_num(nan=float("inf")).max()))
    return worst


def _alone(model: Any, ids: torch.Tensor, paths: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states [n, C] fp64 on the CPU of each sequence, given by its packed rows. Sequences of one length run
    together and none is padded, because a model may read the length of its call; short ones run first, because dynamic
    rotary embeddings keep what longer ones leave."""
    found: dict[int, torch.Tensor] = {}
    for length in sorted({*map(len, paths)}):
        some = [i for i, path in enumerate(paths) if len(path) == length]
        hidden = model(input_ids=ids[0, torch.tensor([paths[i] for i in some])], use_cache=False)[0]
        found |= zip(some, hidden.double().cpu(), strict=True)
    return [found[i] for i in range(len(paths))]


def tree(even: bool = False) -> Layout:
    """The tree that the copy runs: 55 tokens, paths of up to 16. even: sequences that share rows have one length, or
    no more tokens than the threshold."""
    lengths, parents = (EVEN_LENGTHS, EVEN_PARENTS) if even else (LENGTHS, PARENTS)
    return Layout.from_segments(np.cumsum([0, *lengths]), parents)


def sequence_rows(layout: Layout) -> list[list[int]]:
    """The packed rows of each replicated sequence."""
    offsets, parents = layout.offsets.tolist(), layout.parent.tolist()
    rows: list[list[int]] = []
    for ends, parent in zip(itertools.pairwise(offsets), parents, strict=True):
        rows.append((rows[parent] if parent >= 0 else []) + list(range(*ends)))
    return [rows[s] for s in range(len(parents)) if s not in parents]


@contextmanager
def _untouched() -> Iterator[None]:
    """Runs its body in fp32 on the CPU with one thread, which is faster for a small model.

    Functions that the caller has compiled run eagerly: Inductor would compile them for the CPU, in half a minute.

    The caller's settings and random state are restored afterwards.
    """
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    with (
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        backends.by_default(),
        torch.compiler.set_stance("force_eager"),
    ):
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        torch.manual_seed(0)  # else what a model draws for biases, and so the verdict, would depend on the caller
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            torch.set_float32_matmul_precision(precision)


def _device(cls: type[Any]) -> torch.device:
    """The CPU, or a GPU if Liger's kernels, which run on GPUs only, were patched into the class's modeling file."""
    names = vars(sys.modules[cls.__module__]).values()
    liger = any((getattr(x, "__module__", None) or "").startswith("liger_kernel") for x in names)
    return torch.device("cuda" if liger and torch.cuda.is_available() else "cpu")


def _copy(cls: type[Any], config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the CPU in fp32, with random weights that make attention and positions matter."""
    config.dtype = torch.float32
    config._attn_implementation = "eager"
    with recurrent.without_libraries(vars(sys.modules[cls.__module__])):
        model: PreTrainedModel = cls(config).eval()
    randomize(model, seed=0)
    return model


def randomize(model: nn.Module, seed: int) -> None:
    """Draws weights that make attention and positions matter, in place."""
    draw = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=draw)
            if name == "A_log":  # slow decays: fast ones would hide a wrong initial state of a recurrent layer
                parameter.copy_(noise - 3)
            elif isinstance(module, nn.Embedding):
                parameter.copy_(noise)
            elif parameter.dim() > 1:
                parameter.copy_(noise * 1.5 * max(parameter.shape[-2:]) ** -0.5)
            else:  # biases and norms, which start at 1 or at 0
                parameter.add_(noise * 0.2)
