"""Checks that a decoder computes packed groups exactly: a small copy runs a tree packed and replicated, on the CPU.

The copy has the decoder's class, its configuration in small (see :mod:`dualkv.integrations.transformers.shrink`), its
PEFT adapters and random weights. So the check does not touch the weights or the device of the model. Each stage runs
once for a configuration, when it is first needed, and takes about a second at most.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedConfig, PreTrainedModel

from dualkv.branches import Branch
from dualkv.data.trees import PackedSequences
from dualkv.draws import Draws, Shape, seed_all
from dualkv.integrations import patching
from dualkv.integrations.transformers import adapters, checkpointing, indexers, invariant, layers, recurrent, rotary
from dualkv.integrations.transformers.earlier import without_libraries
from dualkv.integrations.transformers.shrink import shrink
from dualkv.integrations.transformers.traced import where_traced
from dualkv.layout import Layout
from dualkv.ops import backends
from dualkv.packed_rows import PackedRows
from dualkv.walks import walk

# Relative difference allowed in the worst row of hidden states and in the worst gradient. fp32 rounding stays below
# 1e-5 in hidden states; a wrong position or key makes more than 1e-2.
TOLERANCE = 1e-3

# Segment lengths and parents of the tree: a group with three responses, one empty and one of a single token; a group
# with a prompt of one token; a tree of three levels.
LENGTHS = [7, 9, 0, 1, 1, 12, 3, 5, 3, 2, 8, 4]
PARENTS = [-1, 0, 0, 0, -1, 4, 4, -1, 7, 8, 8, 7]
# Of models whose rotary embedding depends on the length of the sequence: sequences that share rows are of one length,
# or of no more tokens than the threshold (6 in the small copy), here also of just so many and of one more.
EVEN_LENGTHS = [7, 9, 9, 1, 1, 0, 4, 5, 4, 4, 4, 0, 8, 8, 2, 4, 1, 3, 4, 0, 13, 3]
EVEN_PARENTS = [-1, 0, 0, -1, 3, 3, 3, -1, 7, 8, 8, 7, 11, 7, -1, 14, 14, -1, 17, -1, 19, 19]
BUDGET = 6  # rows of a part of the walk: some segments are cut, some parts have several

# What is compared: hidden states in evaluation; hidden states and gradients in training, where every random draw is
# one number; the same of `dualkv.walk`, a part at a time, and of layers that keep their products; the bits of hidden
# states in several packings.
Stage = Literal["evaluation", "training", "walk", "products", "invariance"]
ASKED = "dualkv_asked"  # attribute of an enabled decoder: its adapters in small, `enable`, and the stages that ran

Key = tuple[type, str, str, Stage]
_VERDICTS: dict[Key, str | None] = {}
_ALONE = threading.RLock()  # a check changes settings of the process


class CannotRunError(ValueError):
    """The packed call of a small copy is refused, though the replicated call runs."""


class OneDrawError(CannotRunError):
    """A draw that a call makes once for all of its rows changes the result."""


def check(
    decoder: PreTrainedModel, enable: Callable[..., Any], small: Sequence[Any] = (), stage: Stage = "evaluation"
) -> None:
    """Raises ValueError, in one sentence, if what a stage compares differs in a small copy of a decoder, of which only
    class and configuration are read, with adapters of :func:`dualkv.integrations.transformers.adapters.shrunk`. Each
    pair of them is checked once in a process."""
    verdict = verdict_of(class_of(decoder), decoder.config, enable, small, stage)
    if verdict is not None:
        raise ValueError(verdict)


def ask_later(decoder: PreTrainedModel, small: Sequence[Any], enable: Callable[..., Any]) -> None:
    """Lets the first call of a decoder in training, in a walk or with kept products run that stage of the check; the
    decoder notes what :func:`refuse_unproved` reads."""
    patching.of(decoder).replace(ASKED, (tuple(small), enable, ("evaluation",)))


def refuse_unproved(decoder: PreTrainedModel, packed: PackedRows) -> None:
    """Raises ValueError if a call of an enabled decoder is of a kind that its small copy does not compute, or if other
    adapters or noise came to the decoder since."""
    adapters.refuse_later(decoder)
    if decoder.training:
        _ask(decoder, "training")
        if "products" in decoder.__dict__.get(checkpointing.KEPT, ()):
            _ask(decoder, "products")
    if packed.is_part:
        _ask(decoder, "walk")


def _ask(decoder: PreTrainedModel, stage: Stage) -> None:
    asked = decoder.__dict__.get(ASKED)
    if asked is not None and stage not in asked[2] and (verdict := _verdict_of_call(decoder, stage)) is not None:
        raise ValueError(verdict)


@where_traced
def _verdict_of_call(decoder: nn.Module, stage: Stage) -> str | None:
    """Say in one sentence why a call of this stage is refused; None if it may run, and later calls of the stage then
    skip the check."""
    small, enable, asked = vars(decoder)[ASKED]
    verdict = verdict_of(class_of(decoder), decoder.config, enable, small, stage)
    if verdict is None:
        patching.of(decoder).replace(ASKED, (small, enable, (*asked, stage)))
    return verdict


def class_of(module: nn.Module) -> type[Any]:
    """The class of a module; fully_shard replaces it by a subclass of its own."""
    return next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule))


def verdict_of(
    cls: type[Any],
    config: PreTrainedConfig,
    enable: Callable[..., Any],
    small: Sequence[Any] = (),
    stage: Stage = "evaluation",
) -> str | None:
    """Say in one sentence why decoders of this class and configuration are refused; None if they run packed."""
    of_adapters = json.dumps([x.to_dict() for x in small], sort_keys=True, default=str)
    key = cls, json.dumps(config.to_dict(), sort_keys=True, default=str), of_adapters, stage
    if key not in _VERDICTS:
        run = torch.compiler.disable(_verdict)  # the caller may be compiled
        _VERDICTS[key] = run(cls, config, enable, small, stage)
    return _VERDICTS[key]


def _verdict(
    cls: type[Any], config: PreTrainedConfig, enable: Callable[..., Any], small: Sequence[Any], stage: Stage
) -> str | None:
    name = cls.__name__
    try:
        of, differs = difference(cls, shrink(config), enable, small, stage)
    except CannotRunError as error:
        return _unproved(name, _with_own_thresholds(cls, config, enable, small, stage) or error)
    except Exception as error:
        if small:  # adapters that do not fit the copy are judged by their type alone
            return verdict_of(cls, config, enable, (), stage)
        return _unproved(name, _with_own_thresholds(cls, config, enable, small, stage) or error)
    if differs <= TOLERANCE:
        return None
    if stage == "invariance":
        return f"{name} is not batch-invariant: {differs:.0f} rows of a small copy have other bits in other packings"
    how = {
        "evaluation": "",
        "training": " in training",
        "walk": " a part at a time (dualkv.walk)",
        "products": " with kept products",
    }[stage]
    by = " with its PEFT adapters" if small else ""
    return (
        f"{name}{by} does not compute packed groups{how} as it computes replicated sequences: {of} of a small copy"
        f" differ by {differs:.2g} relative"
    )


def _with_own_thresholds(cls: type[Any], config: PreTrainedConfig, *rest: Any) -> Exception | None:
    """The error of a copy that keeps the model's own thresholds, so that the message names these; None if it runs."""
    try:
        difference(cls, shrink(config, thresholds=False), *rest)
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


# ---------------------------------------------------------------- the comparison
Computed = tuple[list[torch.Tensor], dict[str, torch.Tensor]]  # hidden states [n, C] of each sequence, and gradients


def difference(
    cls: type[Any],
    config: PreTrainedConfig,
    enable: Callable[..., Any],
    small: Sequence[Any] = (),
    stage: Stage = "evaluation",
) -> tuple[str, float]:
    """The largest relative difference, over rows and gradients, between packed and replicated, with random weights.

    Returns:
        what differs most, and by how much.

    Raises:
        CannotRunError: the packed call is refused.
        ValueError: hidden states are not finite. Other errors of the model pass through.
    """
    with _ALONE, _untouched(_device(cls)), torch.no_grad():
        trial = _Trial(cls, config, small, trains=stage not in ("evaluation", "invariance"))
        if stage == "invariance":
            enable(trial.model, check=False, batch_invariant=True)
            return "rows", float(invariant.differing_rows(trial.model, shorter=4))
        with recurrent.on_reference(trial.model), torch.set_grad_enabled(stage != "evaluation"):
            replicated = trial.replicated()
            try:
                enable(trial.model, check=False)
                if stage == "products":
                    checkpointing.recompute_layers(trial.model, "products")
                packed = trial.walked() if stage == "walk" else trial.packed()
            except ValueError as error:
                raise CannotRunError(error) from error
            if stage == "training":
                trial.refuse_draws_of_calls()
    return trial.compare(replicated, packed)


class _Trial:
    """A small copy of a decoder, and the batch of the tree's sequences."""

    def __init__(self, cls: type[Any], config: PreTrainedConfig, small: Sequence[Any], trains: bool) -> None:
        """trains: the copy runs in training mode, with gradients."""
        self.trains, self.device = trains, _device(cls)
        self.model: Any = _copy(cls, config)
        vocabulary = self.model.get_input_embeddings().num_embeddings
        adapters.put_on(self.model, small)
        self.model.to(self.device).train(trains)
        for module in layers.attention_modules(self.model):
            module.training = False  # without attention dropout, which the call of a model that has it refuses
        draw = torch.Generator().manual_seed(1)
        first = vocabulary // 16  # the ids below are special tokens
        layout = tree(even=bool(rotary.embeddings(self.model)))
        self.paths = sequence_rows(layout)
        lens = np.array([len(path) for path in self.paths])
        mask = np.arange(lens.sum()) != np.repeat(np.cumsum(lens) - lens, lens)
        ids = torch.randint(first, vocabulary, (1, layout.num_tokens), generator=draw)
        self.batch = PackedSequences(ids, layout, np.concatenate(self.paths), lens, mask)
        weight = torch.randn(layout.num_tokens, 1, generator=draw)
        self.weight = torch.zeros_like(weight)  # 0 where a row predicts nothing, which has no loss in a walk
        self.weight[self.batch.predict_rows] = weight[self.batch.predict_rows]
        self.shapes: list[frozenset[Shape]] = []  # of the random draws of each call

    def _called(self, draws: Draws | None = None, **inputs: Any) -> torch.Tensor:
        """Hidden states of a call whose random draws are all one number."""
        placed = {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        with draws or Draws() as draws:
            hidden: torch.Tensor = self.model(**placed)[0]
        self.shapes.append(frozenset(draws.shapes))
        return hidden

    def _loss(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Compute a loss of hidden states [t, C] of packed rows [t]. The last norm fixes the sums of a row and of its
        squares, so columns are weighted."""
        of_columns = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(2)).to(hidden.device)
        return ((hidden * of_columns).sum(-1) * self.weight[rows, 0].to(hidden.device)).sum()

    def _computed(self, hidden: list[torch.Tensor]) -> Computed:
        """Hidden states of each sequence, and the gradients that have come down."""
        found = {name: p.grad.cpu() for name, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad(set_to_none=True)
        return hidden, found

    def replicated(self) -> Computed:
        """[n, C] of each sequence. The loss counts each packed row once. Sequences of one length run together and none
        is padded, because a model may read the length of its call; short ones run first, because dynamic rotary
        embeddings keep what longer ones leave."""
        of_row = {row: i for i, path in reversed([*enumerate(self.paths)]) for row in path}
        found: dict[int, torch.Tensor] = {}
        for length in sorted({*map(len, self.paths)}):
            some = [i for i, path in enumerate(self.paths) if len(path) == length]
            rows = torch.tensor([self.paths[i] for i in some])
            with indexers.first_of_equals():
                hidden = self._called(input_ids=self.batch.input_ids[0, rows], use_cache=False)
            if not hidden.isfinite().all():
                raise ValueError("the replicated hidden states are not finite")
            if self.trains:
                first = torch.tensor([[of_row[row] == i for row in self.paths[i]] for i in some])
                self._loss(hidden[first], rows[first]).backward()
            found |= zip(some, hidden.detach().cpu(), strict=True)
        return self._computed([found[i] for i in range(len(self.paths))])

    def packed(self) -> Computed:
        hidden = self._called(input_ids=self.batch.input_ids, dualkv=self.batch.layout)[0]
        if self.trains:
            loss = self._loss(hidden, torch.arange(len(hidden)))
            with Draws():  # layers may run again
                loss.backward()
        return self._computed([hidden.detach().cpu()[path] for path in self.paths])

    def walked(self) -> Computed:
        """Compute hidden states and gradients by a walk, a part at a time."""
        found: dict[int, torch.Tensor] = {}

        def forward(input_ids: torch.Tensor, branch: Branch) -> torch.Tensor:
            hidden = self._called(input_ids=input_ids, dualkv=branch)
            found.update(zip(branch.part.rows.tolist(), hidden[0].detach(), strict=True))
            return hidden

        walk(self.batch, BUDGET, forward, lambda hidden, part: self._loss(hidden[0], torch.from_numpy(part.rows)))
        return self._computed([torch.stack([found[row] for row in path]).cpu() for path in self.paths])

    @torch.no_grad()
    def refuse_draws_of_calls(self) -> None:
        """Raises OneDrawError if a draw that has one shape in packed and replicated calls changes the result."""
        of_calls = frozenset.intersection(*self.shapes)
        inputs = {"input_ids": self.batch.input_ids, "dualkv": self.batch.layout}
        for shape in sorted(of_calls):
            least, most = (self._called(Draws(shape, extreme), **inputs) for extreme in (-1, 1))
            if not torch.equal(least, most):
                raise OneDrawError(
                    f"in training a draw of shape {shape} for all rows of a call changes the result, as a dropped layer"
                    " or dropout of weights does: replicated sequences draw for each, set its probability to 0"
                )

    def compare(self, replicated: Computed, packed: Computed) -> tuple[str, float]:
        """Find the largest relative difference: its name and its value."""
        worst = {"hidden states": 0.0, "gradients": 0.0}
        for expected, got in zip(replicated[0], packed[0], strict=True):
            relative = (got.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
            worst["hidden states"] = max(worst["hidden states"], float(relative.nan_to_num(nan=float("inf")).max()))
        largest = max((float(gradient.norm()) for gradient in replicated[1].values()), default=0.0)
        for name in replicated[1].keys() | packed[1].keys():
            expected, got = (found.get(name, torch.zeros(())) for found in (replicated[1], packed[1]))
            # Gradients that are nearly zero, as those of biases of keys, are compared with a thousandth of the largest.
            relative = (got - expected).norm() / (expected.norm() + 1e-3 * largest)
            worst["gradients"] = max(worst["gradients"], float(relative.nan_to_num(nan=float("inf"))))
        return max(worst.items(), key=lambda item: item[1])


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
def _untouched(device: torch.device) -> Iterator[None]:
    """Runs its body in fp32 on the CPU with one thread, which is faster for a small model, or on `device`.

    Functions that the caller has compiled run eagerly: Inductor would compile them for the CPU, in half a minute.

    The caller's settings and random state are restored afterwards.
    """
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    with (
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.inference_mode(False),
        _disable_current_modes(),  # of the caller, who may count operations
        torch._guards.tracing(None),  # the caller's graph, if the call is compiled
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
        backends.by_default(),
        torch.compiler.set_stance("force_eager"),
    ):
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        seed_all([device])  # else what a model draws for biases, and so the verdict, would depend on the caller
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
    _in_fp32(config)
    config._attn_implementation = "eager"
    with without_libraries(sys.modules[cls.__module__]):
        model: PreTrainedModel = cls(config).eval()
    randomize(model, seed=0)
    return model


def _in_fp32(config: PreTrainedConfig) -> None:
    """Sets the dtype of a configuration and of its parts, which models loaded in 16 bits have too."""
    config.dtype = torch.float32
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            _in_fp32(part)


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
            else:  # biases and norms, which start at 0 or at 1; scales, which start between, go by their start
                low, high = (float(x) for x in parameter.aminmax()) if parameter.numel() else (1.0, 1.0)
                parameter.add_(noise * 0.2 * (low if 0.01 < low == high < 1 else 1.0))
