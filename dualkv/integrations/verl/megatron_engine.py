"""veRL's Megatron engine on packed groups: `model.model_type=dualkv` with `strategy=megatron`.

veRL builds the model, by Megatron-Bridge or mbridge, and keeps its optimizer, checkpoints, losses and vocab-parallel
heads. Every pipeline stage packs the same micro-batches. As in the FSDP engine, only rows that predict a response token
reach the head, and their values are put where veRL's sequences would have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import lcm
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from torch import nn
from verl.models.mcore.model_forward_fused import FusedOutputProcessorContext, fused_output_processor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron.router_replay_patch import RouterReplay, RouterReplayAction
from verl.utils.megatron.router_replay_utils import (
    is_moe_layer,
    iter_model_routers,
    merge_nested_router_maps,
    pp_gather,
    set_model_router_replay_action,
)
from verl.utils.megatron_utils import unwrap_model
from verl.utils.seqlen_balancing import restore_dynamic_batch
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead
from verl.workers.engine.utils import postprocess_batch_func

from dualkv.data.trees import PackedSequences
from dualkv.integrations import megatron, patching
from dualkv.integrations.megatron.configs import counted, refuse
from dualkv.integrations.verl import options, routes
from dualkv.integrations.verl.batches import MODEL_TYPE, PacksBatches, packed_parts, temperatures
from dualkv.integrations.verl.data import PackedRollouts, Rollouts
from dualkv.sequence_parallel import HeadRows, Shard, padded

# A setting of a micro-batch: the rows of all ranks, padding included; or the tokens of rollouts.
PACKED_ROWS = "dualkv_rows"
# Attributes of veRL's engine configuration: values that packed groups need, and why.
NEEDED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dynamic_context_parallel": ((False,), "all context-parallel ranks share the rows of a packed group"),
    "virtual_pipeline_model_parallel_size": ((None, 1), "packed groups do not run through interleaved stages in veRL"),
    "use_megatron_fsdp": ((False,), "it has not been tried"),
}


@EngineRegistry.register(model_type=MODEL_TYPE, backend="megatron", device="cuda")
class DualKVMegatronEngine(PacksBatches, MegatronEngineWithLMHead):
    """veRL's Megatron engine for language models, with the rollouts of equal prompts packed, or all as trees.

    A batch that cannot be packed (see :func:`dualkv.integrations.verl.data.not_packable`) runs as in veRL, and a
    warning gives the reason, once. The constructor raises ValueError for settings that packed groups do not run with,
    `initialize`, before weights are loaded, for a configuration that :func:`dualkv.integrations.megatron.enable`
    refuses, on every rank the same.
    """

    mini_layer_topk_idx_list: list[torch.Tensor]  # veRL's: routes that are recorded, of each micro-batch

    def __init__(self, model_config: Any, engine_config: Any, *args: Any, **kwargs: Any) -> None:
        self._head_rows: torch.Tensor | None = None  # of the packed micro-batch that the model runs now
        self._replay: RouterReplayAction | None = None  # what routers do with routes in the batch that runs now
        self._routes = [0, 0]  # rows of the batch whose routes several rollouts recorded; how many of them differ
        self.row_ranks = engine_config.context_parallel_size
        self._read_options(model_config)
        _refuse(model_config, engine_config, self._options)
        super().__init__(model_config, engine_config, *args, **kwargs)
        self.model_ranks = torch.distributed.get_world_size() // self.get_data_parallel_size()

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        config = self.tf_config if self.provider is None else self.provider
        refuse(config)
        for name, why in (
            ("fp8", "rows are not padded to its blocks"),
            ("fp4", "rows are not padded to its blocks"),
            ("mrope_section", "Megatron-Bridge's models with images were not run in veRL"),
            ("multi_latent_attention", "veRL replaces methods of these layers, which was not tried"),
            (
                "experimental_attention_variant",
                "mbridge builds no gated delta nets, and Megatron-Bridge builds them of Transformer Engine's layers,"
                " with which packed rows were not run",
            ),
        ):
            if getattr(config, name, None):
                raise ValueError(f"{name} is {getattr(config, name)!r}, expected none: {why}")
        mode = self.engine_config.router_replay.mode
        if mode != "disabled" and not config.num_moe_experts:
            why = "no layer has experts"
            raise ValueError(f"actor.megatron.router_replay.mode is {mode!r}, expected 'disabled': {why}")

    def _build_megatron_module(self) -> list[nn.Module]:
        modules: list[nn.Module] = super()._build_megatron_module()
        for module in modules:
            gpt = unwrap_model(megatron.enable(module))
            if not isinstance(gpt, GPTModel):
                raise ValueError(
                    f"the model is a {type(gpt).__name__}, expected megatron-core's GPTModel, of text alone"
                )
            if gpt.post_process:
                patching.of(gpt.decoder, "engine").behind(self._leave_decoder)
        return modules

    def _leave_decoder(self, _module: nn.Module, _args: Any, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, 1, C] -> [K, 1, C]: with sequence parallelism of this rank's rows."""
        return hidden if self._head_rows is None else hidden.index_select(0, self._head_rows)

    # ------------------------------------------------------------------ a batch, in micro-batches of whole groups
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        mode, recorded = self.engine_config.router_replay.mode, None
        replayed = tu.get_non_tensor_data(data, "enable_routing_replay", False)
        records = replayed and forward_only and mode == "R2" and data.get(routes.ROUTES, None) is None
        error = routes.objection(data, mode, self._shapes_of_routes()) if replayed and not records else ""
        if self.engine_config.use_fused_kernels:
            error = error or _objection(data)
        planned = self._plan(data, "images are not packed on strategy megatron", error)
        if planned is None:
            return super().forward_backward_batch(data, loss_function, forward_only)
        rollouts, parts = planned
        if self.tf_config.calculate_per_token_loss:
            self._count_rows(data, rollouts, parts)
        self._routes = [0, 0]
        self._replay = None
        if records:
            self.mini_layer_topk_idx_list = []
        if replayed:
            self._replay = RouterReplayAction.RECORD if records else RouterReplayAction.REPLAY_FORWARD
            RouterReplay.set_global_router_replay_action(self._replay)
        finish = partial(self.postprocess_micro_batch_func, forward_only=forward_only, loss_function=loss_function)
        outputs = get_forward_backward_func()(
            forward_step_func=partial(self._packed_step, count=len(parts), finish=finish),
            data_iterator=packed_parts(data, rollouts, parts),
            model=self.module,
            num_microbatches=len(parts),
            seq_length=1,  # stages tell each other the shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )
        if records:
            of_stage = merge_nested_router_maps(self.mini_layer_topk_idx_list)
            recorded = restore_dynamic_batch(pp_gather(of_stage, self.tf_config), parts)
        if replayed:
            RouterReplay.clear_global_indices()
            RouterReplay.clear_global_router_replay_action()
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        # The values are in the order of `parts`, as with veRL's dynamic batch size; veRL restores the batch's order.
        order = tu.get_tensordict({}, {"use_dynamic_bsz": True})
        found = postprocess_batch_func(output_lst=outputs, indices=parts, data=order)
        if recorded is not None:
            found["model_output"][routes.ROUTES] = recorded
        return found

    def _shapes_of_routes(self) -> list[tuple[int, int]]:
        """(layers, experts of a token): of all layers, or of the layers with experts."""
        config = self.tf_config
        with_experts = sum(is_moe_layer(config, i) for i in range(config.num_layers))
        return [(n, config.moe_router_topk) for n in sorted({with_experts, config.num_layers})]

    def _more_metrics(self) -> dict[str, float]:
        shared, differing = self._routes
        replays = self._replay is RouterReplayAction.REPLAY_FORWARD
        return {"routes_differing": differing / max(shared, 1)} if replays else {}

    # ------------------------------------------------------------------ rows of ranks
    def _ranks(self) -> tuple[int, int]:
        """(rank, ranks) that share the rows of a micro-batch: context parallel, within it sequence parallel."""
        rank, ranks = parallel_state.get_context_parallel_rank(), self.row_ranks
        if self.tf_config.sequence_parallel:
            tensor = parallel_state.get_tensor_model_parallel_world_size()
            rank, ranks = rank * tensor + parallel_state.get_tensor_model_parallel_rank(), ranks * tensor
        return rank, ranks

    def _added(self, rows: int) -> int:
        """Rows behind a micro-batch's, so that every rank has equally many."""
        bucket = self.engine_config.pad_to_length_bucket if self.engine_config.pad_to_length else 1
        return -rows % lcm(self._ranks()[1], bucket)

    def _count_rows(self, data: TensorDict, rollouts: Rollouts, parts: list[list[int]]) -> None:
        """Tells veRL by how many rows megatron-core will divide gradients, on all data-parallel ranks together: by
        tokens of rollouts, where routers count those."""
        of_parts = (int(rollouts.select(np.array(part)).packed_once.tree().offsets[-1]) for part in parts)
        number = sum(rows + self._added(rows) for rows in of_parts)
        if counted(self.tf_config):
            number = int((rollouts.prompt_lens + rollouts.response_lens).sum())
        total = torch.tensor(number, device=get_device_id())
        torch.distributed.all_reduce(total, group=self.get_data_parallel_group())
        tu.assign_non_tensor(data, routed_num_tokens=total.item())

    def _routed_num_tokens(self, data: TensorDict) -> torch.Tensor:
        rows = tu.get_non_tensor_data(data, PACKED_ROWS, None)
        if rows is None:
            found: torch.Tensor = super()._routed_num_tokens(data)
            return found
        return torch.tensor(rows, device=get_device_id())

    # ------------------------------------------------------------------ a micro-batch
    def _packed_step(
        self,
        batches: Iterator[tuple[TensorDict, PackedRollouts]],
        model: nn.Module,
        *,
        count: int,
        finish: Callable[..., Any],
    ) -> tuple[Any, Callable[..., Any]]:
        """A step of megatron-core's schedules, with one of `count` micro-batches and this stage's part of the model:
        the output, and a function that makes a loss of it, veRL's `finish`."""
        micro_batch, packed = next(batches)
        micro_batch = micro_batch.to(get_device_id())
        device = micro_batch["input_ids"].device
        tu.assign_non_tensor(micro_batch, num_micro_batch=count)
        gpt = unwrap_model(model)
        rank, ranks = self._ranks()
        added = self._added(len(packed.input_ids))
        heads = self.tf_config.num_attention_heads // self.tf_config.tensor_model_parallel_size
        exchange = "all_gather" if heads % self.row_ranks else "a2a"
        layout: Any = padded(packed.layout.to(device), added)
        if counted(self.tf_config):  # routers need to know where rollouts end
            of_rollouts, lens = packed.packed_rows.numpy(), micro_batch["input_ids"].offsets().diff().cpu().numpy()
            layout = PackedSequences(packed.input_ids[None], layout, of_rollouts, lens, np.ones(len(of_rollouts), bool))
        groups = megatron.PackedGroups(layout, cp_comm_type=exchange)
        shard = groups.shard
        rows = groups._rollouts.tokens if counted(self.tf_config) else groups.layout.num_tokens
        tu.assign_non_tensor(micro_batch, **{PACKED_ROWS: rows})
        places = packed.head_rows if shard.world_size == 1 else shard.places.cpu()[packed.head_rows]
        head = HeadRows.of(places, rank, groups.layout.num_tokens // ranks, ranks).to(device)

        def of_head(values: torch.Tensor, fill: Any) -> torch.Tensor:
            """[1, K * ranks]: the values of the head's rows among the values [T] of this context-parallel rank."""
            found = values.new_full((1, len(head.rows) * ranks), fill)
            found[0, head.values] = values[packed.head_rows.to(values.device)]
            return found.chunk(shard.world_size, 1)[shard.rank]

        input_ids = packed.input_ids.to(device)
        labels = of_head(input_ids.roll(-1), 0)
        inputs = {
            "input_ids": groups.split(input_ids[None]),
            "position_ids": None,
            "attention_mask": None,
            "packed_seq_params": groups,
        }
        if self._replay is RouterReplayAction.REPLAY_FORWARD:
            self._set_routes(gpt, micro_batch, packed, shard)
        fused = bool(self.engine_config.use_fused_kernels)
        if fused:
            inputs |= self._of_fused_head(gpt, micro_batch, labels)
        self._head_rows = head.rows if gpt.post_process else None
        try:
            output = model(**inputs)
        finally:
            self._head_rows = None
        if self._replay is RouterReplayAction.RECORD:
            self.mini_layer_topk_idx_list.append(self._recorded(gpt, micro_batch, packed, shard))
        elif self._replay:  # layers that are computed again in the backward take the routes of their micro-batch
            set_model_router_replay_action(gpt, RouterReplayAction.REPLAY_BACKWARD)
        if gpt.post_process:
            if fused:
                values = {"log_probs": output.log_probs}
                if tu.get_non_tensor_data(micro_batch, "calculate_entropy", False):
                    values["entropy"] = output.entropy
            else:
                of_segments = torch.as_tensor(temperatures(micro_batch["temperature"], packed), dtype=torch.float32)
                lengths = packed.layout.offsets.diff().to(device)
                of_rows = of_segments.to(device).expand(len(lengths)).repeat_interleave(lengths)
                values = self._of_head(output, labels, of_head(of_rows, 1.0), micro_batch)
            sequences = micro_batch["input_ids"]
            whole = {name: shard.join(value.flatten()) for name, value in values.items()}
            output = {name: packed.to_sequences(value[head.values], sequences) for name, value in whole.items()}
        return output, partial(finish, data=micro_batch)

    def _set_routes(self, gpt: nn.Module, micro_batch: TensorDict, packed: PackedRollouts, shard: Shard) -> None:
        """Gives this rank's routers the experts of its share of the rows."""
        mode, rows = self.engine_config.router_replay.mode, shard.layout.num_tokens
        found = routes.packed(micro_batch, mode, packed.packed_rows.numpy(), rows)
        self._routes = [self._routes[0] + found.shared, self._routes[1] + found.differing]
        rank, ranks = self._ranks()
        mine = shard.order.cpu()[rank * (rows // ranks) :][: rows // ranks]
        experts, known = found.experts[mine].to(get_device_id()), found.known[mine]
        mask = None if known.all() else known.to(get_device_id())
        set_model_router_replay_action(gpt, RouterReplayAction.REPLAY_FORWARD)
        for number, router in iter_model_routers(gpt):
            layer = number - 1
            if experts.shape[1] != self.tf_config.num_layers:  # the layers with experts alone
                layer = sum(is_moe_layer(self.tf_config, i) for i in range(layer))
            router.set_target_indices(experts[:, layer], replay_mask=mask)

    def _recorded(self, gpt: nn.Module, micro_batch: TensorDict, packed: PackedRollouts, shard: Shard) -> torch.Tensor:
        """Nested [rows, layers, k] int16 on the host: where routers of this stage sent the rows of each rollout."""
        routers = [router for _, router in sorted(iter_model_routers(gpt), key=lambda found: found[0])]
        rows = shard.layout.num_tokens
        if routers:
            found = torch.stack([router.recorded_topk_idx for router in routers], 1).to(torch.int32)
            if self.tf_config.sequence_parallel:
                found = _of_all(found, parallel_state.get_tensor_model_parallel_group())
            found = _of_all(found, parallel_state.get_context_parallel_group())
        else:
            found = torch.empty(rows, 0, self.tf_config.moe_router_topk, dtype=torch.int32)
        if len(found) != rows:
            raise ValueError(f"routers recorded {len(found)} rows, expected {rows}, the packed ones of all ranks")
        of_sequences = found.cpu().to(torch.int16)[shard.places.cpu()][packed.packed_rows]
        return torch.nested.nested_tensor_from_jagged(of_sequences, micro_batch["input_ids"].offsets().cpu())

    def _of_head(
        self, logits: torch.Tensor, labels: torch.Tensor, temperature: torch.Tensor, micro_batch: TensorDict
    ) -> dict[str, torch.Tensor]:
        """Log-probs, and what else veRL is asked for, [1, rows] of logits [1, rows, V / tensor-parallel size]."""
        settings = {
            name: tu.get_non_tensor_data(micro_batch, name, False)
            for name in ("calculate_entropy", "calculate_sum_pi_squared")
        }
        found: dict[str, torch.Tensor] = self._lm_head_logits_processor(
            logits,
            labels,
            temperature,
            **settings,
            distillation_use_topk=False,
            distillation_only=False,
            logits_processor_func=None,
            batch=micro_batch,
            data_format="thd",
        )
        return found

    def _of_fused_head(self, gpt: nn.Module, micro_batch: TensorDict, labels: torch.Tensor) -> dict[str, Any]:
        """Arguments of the model for veRL's fused head."""
        temperature = float(torch.as_tensor(micro_batch["temperature"]).flatten()[0])
        if hasattr(gpt, "forward_backup"):  # veRL replaced `forward`, because megatron-core is older than 0.18
            return {"labels": labels, "temperature": temperature}
        return {
            "labels": labels,
            "output_processor": fused_output_processor,
            "output_processor_context": FusedOutputProcessorContext(temperature=temperature),
        }


def _of_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """x [n, ...] -> [ranks * n, ...], without a gradient."""
    found = x.new_empty(torch.distributed.get_world_size(group) * len(x), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(found, x.contiguous(), group=group)
    return found


def _objection(data: TensorDict) -> str:
    """Say why veRL's fused heads do not compute a batch; empty if they do."""
    if tu.get_non_tensor_data(data, "calculate_sum_pi_squared", False):
        return "calculate_sum_pi_squared needs logits, which fused heads do not make: set use_fused_kernels=False"
    found = torch.as_tensor(data["temperature"]).unique()
    if len(found) > 1:
        return (
            f"the rollouts have {len(found)} temperatures, veRL's fused heads on strategy megatron take one: set"
            " use_fused_kernels=False"
        )
    return ""


def _refuse(model_config: Any, engine_config: Any, given: options.Options) -> None:
    """Raises ValueError for settings of veRL with which packed groups do not run."""
    for name, (values, why) in NEEDED.items():
        value = getattr(engine_config, name)
        if value not in values:
            raise ValueError(
                f"actor.megatron.{name} is {value!r}, model.model_type={MODEL_TYPE} expects {values[0]!r}: {why}"
            )
    for name, part, why in (
        ("model.mtp", model_config.mtp, "the next token of a packed row is not always the next row"),
        ("actor.megatron.qat", engine_config.qat, "it has not been tried"),
    ):
        if part.enable:
            raise ValueError(f"{name}.enable is True, model.model_type={MODEL_TYPE} expects False: {why}")
    own = "strategy megatron has settings of its own: set actor.megatron.override_transformer_config"
    of_fsdp = "expected none on strategy megatron: use fsdp2"
    for name, why in (
        (options.FAST, own),
        (options.KEEP, f"{own}.recompute_granularity"),
        (options.KEEP_LAYERS, f"{own}.recompute_granularity"),
        (options.WALK, of_fsdp),
        (options.BATCH_INVARIANT, of_fsdp),
        (options.CANARY, of_fsdp),
    ):
        if (value := given.given.get(name)) not in (None, False, "nothing"):
            raise ValueError(f"fused_kernel_options.{name} is {value!r}, {why}")
