"""Prepare batches for the engines of all strategies: micro-batches of whole groups, and the metrics of the work."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_torch_device
from verl.utils.flops_counter import FlopsCounter, get_device_flops
from verl.workers.config import ActorConfig, CriticConfig

from dualkv.data.microbatch import plan_micro_batches
from dualkv.integrations import losses
from dualkv.integrations.transformers.masks import by_config
from dualkv.integrations.verl import data as verl_data
from dualkv.integrations.verl import options, work
from dualkv.integrations.verl.data import PackedRollouts, Rollouts
from dualkv.integrations.verl.walked import Planned

MODEL_TYPE = "dualkv"


class PacksBatches:
    """A mixin for veRL's engines.

    An engine calls :meth:`_read_options` before it is built, and `_plan` for a batch.
    """

    stock_type = "language_model"  # the type of model that the rest of veRL expects
    row_ranks: int  # ranks that share the rows of a micro-batch, whose budgets of tokens add up
    model_ranks: int  # ranks that compute the same rollouts

    def _read_options(self, model_config: Any) -> None:
        self._options = options.of(model_config)
        if self._options.packed is False:
            raise ValueError(
                f"fused_kernel_options.{options.PACKED} is False with model.model_type={MODEL_TYPE}, which packs: leave"
                " one of them out"
            )
        model_config.model_type = self.stock_type
        self._done: tuple[work.Work, work.Work, int] | None = None
        self._counter = FlopsCounter(work.of_full_attention(model_config.hf_config))
        self._layers = by_config(model_config.hf_config)

    # ------------------------------------------------------------------ micro-batches
    def _plan(
        self,
        data: TensorDict,
        images: verl_data.Images | str,
        error: str = "",
        walk: Callable[[Rollouts | None, int], Planned | None] | None = None,
    ) -> tuple[Rollouts, list[list[int]]] | None:
        """Plan a batch for all data-parallel ranks at once: its rollouts, and the rollouts of each micro-batch.

        None, and a warning, for a batch that veRL has to run itself. Otherwise the batch gets the settings by which
        veRL's losses divide. A ValueError of one rank (`error`, or a rollout that is too long) is raised on all.

        walk: all ranks call it with their rollouts and the budget of tokens, for a plan in which some run in parts.
        """
        reason, given = verl_data.not_packable(data, images), self._options
        rollouts = None if reason else verl_data.read(data, given.min_shared, images, given.batch_invariant)
        dynamic = tu.get_non_tensor_data(data, "use_dynamic_bsz", True)
        max_tokens = data["max_token_len_per_gpu"] * self.row_ranks if dynamic else None
        self._planned = walk(rollouts, max_tokens) if walk is not None and max_tokens is not None else None
        if self._planned is not None:
            parts: list[list[int]] | None = [unit.rollouts.tolist() for unit in self._planned.units]
        else:
            parts = plan_on_all_ranks(
                rollouts,
                max_tokens=max_tokens,
                max_rollouts=0 if dynamic else data["micro_batch_size_per_gpu"],
                group=self.get_data_parallel_group(),  # type: ignore[attr-defined]
                device=get_device_id(),
                error=error,
            )
        if parts is None or rollouts is None:
            why = reason or "another data-parallel rank cannot pack its own"
            if given.batch_invariant:
                raise ValueError(
                    f"fused_kernel_options.{options.BATCH_INVARIANT} is True of a batch that cannot be packed: {why}"
                )
            warnings.warn(f"dualkv: a batch runs with its prompts replicated, because {why}", stacklevel=3)
            return None
        tokens = data["loss_mask"].sum().to(get_device_id())
        dist.all_reduce(tokens, group=self.get_data_parallel_group())  # type: ignore[attr-defined]
        tu.assign_non_tensor(
            data,
            batch_num_tokens=tokens.item(),
            dp_size=self.get_data_parallel_size(),  # type: ignore[attr-defined]
            sp_size=self.row_ranks,
        )
        packed = sum((work.packed(rollouts.select(np.array(part)), self._layers) for part in parts), work.NOTHING)
        self._done = (packed, work.replicated(rollouts, self._layers), len(parts))
        return rollouts, parts

    # ------------------------------------------------------------------ metrics of a batch
    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        # With veRL's own trainers this is the first place where dualkv sees the loss.
        config = getattr(loss_function, "keywords", {}).get("config")
        if isinstance(config, ActorConfig | CriticConfig) and dist.get_rank() == 0:
            losses.warn(losses.verl_settings(config, "actor" if isinstance(config, ActorConfig) else "critic"))
        return self._measured(super().train_batch, data, loss_function, passes=3)  # type: ignore[misc]

    def infer_batch(self, data: TensorDict, loss_function: Callable[..., Any] | None = None) -> Any:
        return self._measured(super().infer_batch, data, loss_function, passes=1)  # type: ignore[misc]

    def _measured(
        self, run: Callable[..., Any], data: TensorDict, loss_function: Callable[..., Any] | None, passes: int
    ) -> Any:
        """`passes` is 3 for forward and backward and 1 for a forward; the FLOP counter always counts 3."""
        self._done = None
        start = time.perf_counter()
        result = run(data, loss_function)
        get_torch_device().synchronize()
        seconds = time.perf_counter() - start
        if self._done is None or not self.is_mp_src_rank_with_outputs():
            return result
        packed, replicated, micro_batches = self._done
        peak = get_device_flops() * seconds * self.model_ranks
        metrics = {
            "micro_batches": micro_batches,
            "tokens_packed": packed.tokens,
            "tokens_replicated": replicated.tokens,
            "dedup_ratio": replicated.tokens / packed.tokens,
            "mfu_hardware": packed.flops(self._counter) * passes / 3 / peak,
            "mfu_effective": replicated.flops(self._counter) * passes / 3 / peak,
        }
        metrics |= self._more_metrics()
        result["metrics"].update({f"dualkv/{name}": [value] for name, value in metrics.items()})
        return result

    def _more_metrics(self) -> dict[str, float]:
        """Return the metrics that one engine alone has."""
        return {}


# ---------------------------------------------------------------- micro-batches
def plan(rollouts: Rollouts, *, max_tokens: int | None, max_rollouts: int, min_count: int = 1) -> list[list[int]]:
    """The rollouts of each micro-batch: at most so many packed tokens, or rollouts if `max_tokens` is None. Each
    rollout occurs once, and equal arguments give the same plan.

    Raises:
        ValueError: a rollout is longer than `max_tokens`, or there are fewer rollouts than micro-batches (`min_count`).
    """
    if rollouts.trees:
        shared = rollouts.packed_once
        if max_tokens is None:
            runs = shared.runs(shared.tokens, min_count, most=max_rollouts)
        else:
            runs = shared.runs(max_tokens, min_count)
        return [run.tolist() for run in runs]
    members = rollouts.members()
    if max_tokens is None:
        # Lengths that make the budget count rollouts: an empty response to a prompt of one token is 1 packed token, and
        # its prompt 0.
        prompts: Sequence[int] = [1] * len(members)
        responses = [[0] * len(m) for m in members]
    else:
        prompts = [int(rollouts.prompt_lens[m[0]]) for m in members]
        responses = [rollouts.response_lens[m].tolist() for m in members]
    budget = max_rollouts if max_tokens is None else max_tokens
    found = plan_micro_batches(prompts, responses, budget, min_count=min_count, labels="roll")
    return [[int(members[g][i]) for g, at in m.parts for i in at] for m in found]


def plan_on_all_ranks(
    rollouts: Rollouts | None,
    *,
    max_tokens: int | None,
    max_rollouts: int,
    group: dist.ProcessGroup,
    device: torch.device | str | int,
    error: str = "",
) -> list[list[int]] | None:
    """:func:`plan` with the largest count of all ranks in `group`; None if any rank cannot pack its rollouts.

    Every rank of the group calls this function. All of them return a plan, or all return None, or all raise.

    Args:
        rollouts: the rollouts of this rank; None if this rank cannot pack them.
        max_tokens, max_rollouts: as for :func:`plan`.
        group: the data-parallel ranks, whose collectives take tensors on the device.
        error: why this rank refuses its rollouts; empty if it does not.

    Raises:
        ValueError: `error`, or :func:`plan` raised it, here or on another rank.
    """
    parts: list[list[int]] = []
    if rollouts is not None and not error:
        try:
            parts = plan(rollouts, max_tokens=max_tokens, max_rollouts=max_rollouts)
        except ValueError as e:
            error = str(e)
    fewest = -len(rollouts) if rollouts is not None else 0
    flags = torch.tensor([rollouts is None, bool(error), len(parts), fewest], dtype=torch.int64, device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    unpackable, failed, count, fewest = flags.tolist()
    if unpackable or rollouts is None:
        return None
    if failed:
        raise ValueError(error or "another data-parallel rank found no micro-batches for its rollouts, see its error")
    if count > -fewest:
        raise ValueError(f"a data-parallel rank needs {count} micro-batches, another one has only {-fewest} rollouts")
    if count > len(parts):
        parts = plan(rollouts, max_tokens=max_tokens, max_rollouts=max_rollouts, min_count=count)
    return parts


def packed_parts(
    data: TensorDict, rollouts: Rollouts, parts: list[list[int]]
) -> Iterator[tuple[TensorDict, PackedRollouts]]:
    """Each micro-batch, as veRL's losses see it and packed."""
    for part in parts:
        micro_batch = tu.index_select_tensor_dict(data, part)
        yield micro_batch, verl_data.pack(micro_batch, rollouts.select(np.array(part)))


def temperatures(of_rollouts: Any, packed: PackedRollouts) -> Any:
    """A number unchanged; temperatures [N] of rollouts as [S] of packed segments, whose predicting rows share one."""
    if not isinstance(of_rollouts, torch.Tensor):
        return of_rollouts
    return of_rollouts[packed.source.to(of_rollouts.device)]
