"""TRL's asynchronous GRPO with :func:`dualkv.attention` behind its own prefix trees. It is in `trl.experimental`.

    from dualkv.integrations.trl.async_grpo import AsyncGRPOTrainer    # instead of trl.experimental.async_grpo's

TRL lays a micro-batch out as a prefix tree and gives each layer the rows of every path, end to end, whose keys and
values it gathers for FlashAttention-3. Here the tree becomes a layout, and the model is enabled: nothing is gathered,
and models run that TRL refuses for the sake of that kernel (sinks, chunks, recurrent layers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from codegen.surface import borrowing

with borrowing("trl", __name__):
    from trl.experimental.async_grpo import async_grpo_trainer as theirs
    from trl.experimental.async_grpo.packing import TreeRow

    Padded: Any = theirs.AsyncGRPOTrainer
    MAKE, HEAD, FLOPS = theirs.create_model_from_path, theirs.add_fused_lm_head, theirs.compute_flops_per_token

from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import enable
from dualkv.integrations.trl import probe
from dualkv.integrations.trl.common import Batch, refuse_model, refuse_trainer
from dualkv.layout import Layout

PATHS = ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")
KNOWN = {"full_attention", "sliding_attention"}  # the layers that TRL's trees run


class AsyncGRPOTrainer(Padded):
    """`trl.experimental.async_grpo.AsyncGRPOTrainer` whose attention reads shared keys and values where they are.

    Arguments, rows, losses and metrics are TRL's: a token is computed once for the samples of a micro-batch that share
    it and the next one. The load balancing loss of a mixture of experts counts rows of the tree, as TRL's trainer does.
    Metrics of utilization ("perf/mfu_fwd_bwd", "perf/mfu_wall_clock") are NaN where TRL cannot count a model's FLOP.

    Args:
        model, args, kwargs: TRL's.
        fast: as for :class:`dualkv.integrations.trl.PackedGroups`.

    Raises:
        ValueError: by the constructor for a model that :func:`dualkv.integrations.transformers.enable` refuses,
            PEFT adapters that `enable` refuses, or `neftune_noise_alpha`.
    """

    def __init__(self, model: Any, *args: Any, fast: bool = False, **kwargs: Any) -> None:
        probe.refuse_replaced(Padded, AsyncGRPOTrainer, "compute_loss _log_step_metrics", "aux_loss_enabled")
        refuse_model(model)
        with _unrefused():
            super().__init__(model, *args, **kwargs)
        probe.of_trees(self, partial(_captured, self), _packed)
        refuse_trainer(self)
        enable(self.model, fast=fast)

    def compute_loss(
        self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss over the same rows, whose model gets a layout."""
        return super().compute_loss(partial(_packed, model), inputs, return_outputs, num_items_in_batch)

    def _log_step_metrics(self) -> None:
        with Changes(theirs) as changes:
            changes.replace("compute_flops_per_token", _flop_or_nan)
            super()._log_step_metrics()


def layout_of(index: torch.Tensor, offsets: torch.Tensor, of_paths: torch.Tensor) -> Layout:
    """The layout of one of TRL's prefix trees.

    A path ends with the rows of its own segment; the row before these is the last one of the parent.

    Args:
        index: [K] integers, the packed rows of the paths to all segments, end to end.
        offsets: [S+1] integers, the first packed row of each segment, then their number.
        of_paths: [S+1] integers, where each path begins in `index`, then K.
    """
    rows, q, k = (x.cpu().numpy() for x in (index, offsets, of_paths))
    before = k[1:] - np.diff(q) - 1
    parent = np.searchsorted(q, rows[before.clip(min=0)], "right") - 1
    return Layout.from_segments(q, np.where(before >= k[:-1], parent, -1), index.device)


def _packed(model: Callable[..., Any], **given: Any) -> Any:
    """Call an enabled model with what TRL's trainer gives a model."""
    layout = layout_of(*(given[name] for name in PATHS))
    return model(**{name: x for name, x in given.items() if not name.startswith("tree_")}, dualkv=layout)


@contextmanager
def _unrefused() -> Iterator[None]:
    """A context in which TRL's constructor does not see that a model has sinks, or layers that its own trees lack: TRL
    asks between making the model and its head, and the model shows other names meanwhile."""
    restore: list[Callable[[], None]] = []

    def make(*args: Any, **kwargs: Any) -> Any:
        model = MAKE(*args, **kwargs)
        config, of_model = model.config.get_text_config(), Changes(model)
        kinds, stock = getattr(config, "layer_types", None), model.named_parameters

        def named(*args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            return ((name.replace(".sinks", ".sinks_"), x) for name, x in stock(*args, **kwargs))

        def put_back() -> None:
            of_model.undo()
            if kinds is not None:
                config.layer_types = kinds

        restore.append(put_back)
        of_model.replace("named_parameters", named)
        if kinds is not None:
            config.layer_types = [kind if kind in KNOWN else "full_attention" for kind in kinds]
        return model

    def add_head(*args: Any, **kwargs: Any) -> Any:
        while restore:
            restore.pop()()
        return HEAD(*args, **kwargs)

    with Changes(theirs) as changes:
        changes.replace("create_model_from_path", make)
        changes.replace("add_fused_lm_head", add_head)
        yield


def _flop_or_nan(config: Any, seq_len: int) -> float:
    try:
        return float(FLOPS(config, seq_len))
    except AttributeError:  # it reads fields that some mixtures of experts do not have
        return math.nan


class _Captured(Exception):
    """Ends TRL's loss where it calls the model."""


def _captured(trainer: Any, samples: list[Batch]) -> tuple[Batch, Batch]:
    """The inputs of TRL's loss for one row of samples, and what it gives the model."""
    row = TreeRow()
    for sample in samples:
        row.add(sample)
    inputs = theirs.DataCollatorForRollout(0)([[row]])
    found: Batch = {}

    def capture(**given: Any) -> None:
        found.update(given)
        raise _Captured

    with Changes(trainer) as changes:
        changes.replace("aux_loss_enabled", False)
        with suppress(_Captured):
            Padded.compute_loss(trainer, capture, inputs)
    return inputs, found
