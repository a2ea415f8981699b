"""veRL's FSDP engine on packed groups: `model.model_type=dualkv`.

veRL's own computation of a micro-batch stays, with its heads, temperature, losses and sequence parallelism. It gets the
packed rows instead of the sequences. In packed rows each response starts with its own copy of the prompt's last token,
so that the label of every row is the next row's token, as in veRL's sequences. Only rows that predict a response token
reach the head. Their values are put where the sequences would have them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers as hf
from tensordict import TensorDict
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLAttention
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLAttention
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeGatedDeltaNet
from verl.utils import tensordict_utils as tu
from verl.utils import torch_functional as verl_F
from verl.utils.device import get_device_id, get_device_name
from verl.utils.metric import Metric
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import detach_tree, postprocess_batch_func

from dualkv.arrays import to_device
from dualkv.branches import Branch
from dualkv.canary import Compared, picked
from dualkv.data.media import SEGMENTS
from dualkv.data.memory import RowCosts
from dualkv.integrations import patching, transformers
from dualkv.integrations.metrics import RATIO
from dualkv.integrations.recurrent import sharded
from dualkv.integrations.transformers import adapters, fused, heads, invariant, layers, media, recurrent, support
from dualkv.integrations.transformers.placed import Placed
from dualkv.integrations.verl import canary, equal_bits, options, walked
from dualkv.integrations.verl import data as verl_data
from dualkv.integrations.verl.batches import MODEL_TYPE, PacksBatches, packed_parts, temperatures
from dualkv.integrations.verl.data import PackedRollouts, Rollouts
from dualkv.integrations.verl.ratio import Ratio, Weights
from dualkv.integrations.verl.walked import PartRows, WalksBatches
from dualkv.layout import Layout
from dualkv.packed_rows import PackedRows
from dualkv.sequence_parallel import HeadRows, Shard, padded

FSDP = ["fsdp", "fsdp2"]
STRATEGIES = [*FSDP, "megatron"]
OTHERS = ["veomni", "torchtitan", "automodel", "fsdp_turbo"]

# veRL puts attention of its own into these classes, which calls FlashAttention around transformers' registry.
OWN_ATTENTION = {cls: cls.forward for cls in (Qwen2VLAttention, Qwen2_5_VLAttention)}

# So it does with these layers of Qwen3.5, which then hand on where sequences begin, and nothing else.
RECURRENT = (Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet)
for _cls in RECURRENT:
    recurrent.install_in(_cls)
# Models that see images get forwards that run the whole tower on every rank of Ulysses, their decoders such that split
# rows behind it.
SEEING = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe", "Glm4v", "Qwen3_5", "Qwen3_5Moe")
_seeing = [getattr(hf, f"{family}{part}Model") for family in SEEING for part in ("", "Text")]
OWN_LAYERS = {cls: cls.forward for cls in (Qwen3_5DecoderLayer, Qwen3_5MoeDecoderLayer, *RECURRENT, *_seeing)}

# Settings, beside the tensors, that veRL reads from a micro-batch to make a model's inputs and outputs.
SETTINGS = ("pad_mode", "use_fused_kernels", "calculate_entropy", "calculate_sum_pi_squared")


@dataclass
class Running:
    """The packed micro-batch that the model runs now; the decoder's hooks read it.

    branch: of a part of a walk.
    unsplit: splits rows, where veRL gives each rank all.
    whole: of the rows of all ranks, where the model's tower is to be told whose images it runs.
    """

    packed: PackedRollouts
    branch: Branch | None = None
    layout: Layout | PackedRows | None = None
    head: HeadRows | None = None
    unsplit: Shard | None = None
    whole: Layout | None = None


@EngineRegistry.register(model_type=MODEL_TYPE, backend=FSDP, device="cuda")
class DualKVEngine(WalksBatches, PacksBatches, FSDPEngineWithLMHead):
    """veRL's FSDP and FSDP2 engine for language models, with the rollouts of equal prompts packed, or all as trees.

    A batch that cannot be packed (:func:`dualkv.integrations.verl.data.not_packable`) runs as in veRL, and a warning
    gives the reason, once. The constructor raises ValueError, before weights are loaded, for a model that
    :func:`dualkv.integrations.transformers.enable` refuses, and for options that contradict each other.
    """

    def __init__(self, model_config: Any, *args: Any, **kwargs: Any) -> None:
        self._running: Running | None = None
        self._updates = 0
        self._compared: Compared | None = None
        self._row_costs: dict[bool, RowCosts] = {}  # by whether passes are without gradients
        self._scored = Weights()  # of old log-probs
        self._ratio: float | None = None
        self._read_options(model_config)
        model = _without_weights(self._of_decoder(model_config.hf_config))
        self._checked = model is not None
        _refuse(model_config, model, self._options)
        super().__init__(model_config, *args, **kwargs)
        self.row_ranks = self.model_ranks = ranks = self.engine_config.ulysses_sequence_parallel_size
        if model is not None and ranks > 1:
            sharded.refuse(recurrent.mixers(model), ranks)
        if self._options.keeping is not None:
            walked.refuse(model_config, self.engine_config, self._options.keeping)
        if self._options.batch_invariant:
            equal_bits.refuse(model_config, self.engine_config, self._options)
            # veRL compiles its entropies, in each process other kernels.
            chunked = self.engine_config.entropy_from_logits_with_chunking
            self.compute_entropy_from_logits = (
                verl_F.entropy_from_logits_with_chunking if chunked else verl_F.entropy_from_logits
            )

    @staticmethod
    def _of_decoder(config: Any) -> Any:
        """A configuration whose model has the decoder that the engine builds."""
        return config

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        if hasattr(module, "v_head"):
            raise ValueError(
                f"{type(module).__name__} is TRL's model with a value head, whose rows are not packed: expected a model"
                " that transformers has for token classification"
            )
        restore_attention()
        transformers.enable(
            module,
            deterministic=self.engine_config.full_determinism,
            check=not self._checked,
            batch_invariant=self._options.batch_invariant,
        )
        decoder = module.get_decoder()
        if self._options.batch_invariant:
            invariant.install(module, [decoder], every_call=True)
        # The hook passes the layout as a keyword argument, because checkpointing replays the keyword arguments of the
        # decoder's layers and no other state of a hook, and because fused heads pass none on to the decoder. It runs
        # before the checks of `enable` (prepend).
        changes = patching.of(decoder, "engine")
        changes.before(self._enter_decoder, first=True)
        changes.behind(self._leave_decoder)
        for part in module.modules():
            if media.family(type(part)) is not None:
                patching.of(part, "engine").before(self._enter_images)
        if self._options.fast and not self.model_config.use_liger:  # else veRL has put Liger's kernels in place
            fused.fuse(module)
        self._pairs_a_row = layers.pairs_a_row(module)
        if self.model_config.enable_gradient_checkpointing:
            transformers.recompute_layers(module, self._options.keep, layers=self._options.keep_layers)
        return module

    def _enter_decoder(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        running = self._running
        if running is None:
            return args, kwargs
        kwargs = {**kwargs, "dualkv": running.layout}
        if running.unsplit is not None and running.whole is None:
            kwargs |= _split(running.unsplit, kwargs)
        return args, kwargs

    def _enter_images(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook of the model that sees images: it gets the layout, and this rank's rows."""
        running = self._running
        if running is None or (running.whole is None and running.branch is None):
            return args, kwargs
        named = dict(zip(layers.arguments(type(module)), args, strict=False)) | kwargs
        if running.branch is not None:
            placed = media.place(module, named, running.branch)
            if placed is None:  # no rank has images: veRL's forward runs the tower on zeros, for gradients of zero
                return args, kwargs
            running.layout = placed
            return (), {**named, "dualkv": placed}
        assert running.whole is not None
        media.ask(module, named, running.whole, running.unsplit)
        if running.unsplit is not None:
            named |= _split(running.unsplit, named)
        return (), {**named, "dualkv": running.layout}

    def _leave_decoder(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        if self._running is not None and self._running.head is not None:
            output.last_hidden_state = output.last_hidden_state[:, self._running.head.rows]
        # A fused head reads the head's weight without calling the head, so FSDP2 does not gather the weight. (The
        # backward shards it again, as every parameter that was used.)
        if self.model_config.use_fused_kernels and (head := self._sharded_head()) is not None:
            head.unshard()
        return output

    def _build_lora_module(self, module: nn.Module) -> nn.Module:
        module = super()._build_lora_module(module)
        if self.model_config.use_fused_kernels:
            heads.refuse_adapter(module, "use_fused_kernels is True", "set use_fused_kernels=False")
        decoders = layers.decoders(module)
        unproven = invariant.objections(module, decoders) if self._options.batch_invariant else ()
        for sentence in (*adapters.objections(module, decoders), *unproven):
            raise ValueError(sentence)
        if self._options.batch_invariant:  # the products of adapters too
            invariant.install(module, decoders, every_call=True)
        for decoder in decoders:
            adapters.remember(decoder)
        return module

    def _sharded_head(self) -> FSDPModule | None:
        head = self.module.get_output_embeddings()
        return head if isinstance(head, FSDPModule) else None

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        result = super().forward_step(micro_batch, loss_function, forward_only)
        self._leave_head(forward_only)
        return result

    def _leave_head(self, forward_only: bool) -> None:
        """Shard the head again, which no backward does."""
        head = self._sharded_head()
        if forward_only and head is not None and head not in self._held:
            head.reshard()

    def _images(self) -> verl_data.Images | str:
        """Find what is packed beside text, or say why nothing is."""
        families = media.families(self.module)
        if not families or any(how.ahead for how in families):
            return f"images of {self.module.config.model_type} are not known to run packed in veRL"
        inputs = tuple(name for how in families for name in how.inputs if name not in media.OF_AUDIO)
        return verl_data.Images(inputs, media.marks(self.module.config))

    # ------------------------------------------------------------------ a batch, in micro-batches of whole groups
    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        restore_attention()  # another engine may have been built since
        walk = None if self._options.keeping is None else functools.partial(self._plan_walk, data, forward_only)
        planned = self._plan(data, self._images(), walk=walk)
        if planned is None:
            self._refuse_replicated()
            return super().forward_backward_batch(data, loss_function, forward_only)
        rollouts, parts = planned
        keep_values = forward_only or tu.get_non_tensor_data(data, "return_model_output", False)
        every = self._options.canary
        with_canary = not forward_only and every is not None and self._updates % every == 0
        self._updates += not forward_only
        self._compared = None
        ratio = None if forward_only else self._compared_ratio(data, rollouts)
        run = self._run_each if self._planned is None else self._walk
        done: list[tuple[list[int], dict[str, Any]]] = []
        first: dict[str, Any] = {}
        for of_rollouts, output in run(data, rollouts, parts, loss_function, forward_only):
            first = first or output.get("model_output", {})
            if ratio is not None:
                ratio.add(of_rollouts, output["model_output"]["log_probs"])
            if not keep_values:
                output.pop("model_output", None)
            done.append((of_rollouts, output))
        if with_canary and "log_probs" in first:  # by the same weights: no step has been made
            self._compare(data, rollouts, done[0][0], first["log_probs"])
        if forward_only and self.optimizer is not None and "log_probs" in first:
            self._scored.note(self.module, self.optimizer)
        self._ratio = None if ratio is None else ratio.value(self.get_data_parallel_group())
        # The values are in the order of `done`, as with veRL's dynamic batch size; veRL restores the batch's order.
        order = tu.get_tensordict({}, {"use_dynamic_bsz": True})
        indices, outputs = zip(*done, strict=True)
        result = postprocess_batch_func(output_lst=list(outputs), indices=list(indices), data=order)
        if self._planned is not None:  # veRL averages equally many values of each rank, and ranks have other parts
            of_parts = {name: x for name, x in result["metrics"].items() if isinstance(x, Metric)}
            result["metrics"] |= {name: Metric(x.aggregation, x.aggregate()) for name, x in of_parts.items()}
        return result

    def _run_each(
        self,
        data: TensorDict,
        rollouts: Rollouts,
        parts: list[list[int]],
        loss_function: Callable[..., Any] | None,
        forward_only: bool,
    ) -> Iterator[tuple[list[int], dict[str, Any]]]:
        """Run micro-batches in one pass each; their rollouts, and veRL's outputs."""
        for number, (micro_batch, packed) in enumerate(packed_parts(data, rollouts, parts)):
            self._running = Running(packed)
            try:
                with torch.profiler.record_function(f"micro_batch{number}"):  # veRL's name of it in a trace
                    micro_batch = verl_data.on_device(micro_batch, get_device_id())
                    output = self._run(micro_batch, loss_function, forward_only, number == len(parts) - 1)
            finally:
                self._running = None
            yield parts[number], output

    def _compared_ratio(self, data: TensorDict, rollouts: Rollouts) -> Ratio | None:
        """Prepare to compare an update with its old log-probs, if this engine has computed any with these adapters."""
        same = self._scored.are(self.module, self.optimizer) if "old_log_probs" in data else None
        return None if same is None else Ratio(data, rollouts, get_device_id(), differs=not same)

    def _compare(self, data: TensorDict, rollouts: Rollouts, some: list[int], log_probs: torch.Tensor) -> None:
        """Run the canary on some rollouts: a micro-batch's, or two of a walk, which run packed without a graph."""
        if self._planned is not None:
            lens = rollouts.response_lens[some].tolist()
            few = sorted({*picked(lens, canary.ROLLOUTS, self._updates)})
            some, found = [some[i] for i in few], [log_probs.unbind()[i] for i in few]
            log_probs = torch.nested.as_nested_tensor(found, layout=torch.jagged)
        micro_batch, of_packed = tu.index_select_tensor_dict(data, some), rollouts.select(np.array(some))
        self._compared = canary.compared(self, micro_batch, of_packed, log_probs, self._updates)

    def _refuse_replicated(self) -> None:
        """Raises ValueError for replicated rows that recurrent layers would mix, without an error of veRL's."""
        # veRL puts layers into Qwen3.5 that are told where sequences begin.
        if not self.use_remove_padding or self.pass_packed_cu_seqlens:
            return
        for name, mixer in recurrent.mixers(self.module)[:1]:
            raise ValueError(
                f"a batch cannot be packed (a warning says why), and veRL would run it in rows without padding, where"
                f" recurrent layers such as {name} ({type(mixer).__name__}) do not see where a sequence begins: set"
                " actor_rollout_ref.model.use_remove_padding=False"
            )

    def _run(
        self, micro_batch: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool, last: bool
    ) -> dict[str, Any]:
        if forward_only:
            with torch.no_grad():
                return self.forward_step(micro_batch, loss_function=loss_function, forward_only=True)[1]
        with self._gradient_sync_context(is_last_micro_batch=last):
            loss, output = self.forward_step(micro_batch, loss_function=loss_function, forward_only=False)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return output

    def _forward_part(
        self, part: PartRows, branch: Branch, loss_function: Callable[..., Any] | None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """veRL's loss and output of a part of a walk; zero where it has no values, or no loss is asked for."""
        self._running = Running(part.packed, branch)
        forward_only = not torch.is_grad_enabled()
        try:
            if not part.has_values or loss_function is None:
                return self._forward_without_loss(part)
            found = self.forward_step(part.micro_batch, loss_function=loss_function, forward_only=forward_only)
        finally:
            self._running = None
        return found

    def _forward_without_loss(self, part: PartRows) -> tuple[torch.Tensor, dict[str, Any]]:
        """Make zero and the values of a part. Unlike `forward_step` this does not wait for the GPU.

        Zero has a graph of the model's outputs if there is one, because FSDP2 reduces only gradients that exist.
        """
        inputs, arguments = self.prepare_model_inputs(part.micro_batch)
        found: dict[str, Any] = {}
        with self._autocast():
            output = self.module(**inputs, use_cache=False)
            if part.has_values:
                values = self.prepare_model_outputs(output, arguments, part.micro_batch, None)
                found = {"model_output": detach_tree(values), "loss": 1.0, "metrics": {}}
        self._leave_head(forward_only=not torch.is_grad_enabled())
        with_graph = [x for x in output.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        zeros = [x.flatten()[:0].float().sum() for x in with_graph]
        return torch.stack(zeros).sum() if zeros else torch.zeros(()), found

    def _autocast(self) -> AbstractContextManager[Any]:
        """Make the autocast of veRL's forward."""
        dtype = self._autocast_dtype
        return nullcontext() if dtype == torch.float32 else torch.autocast(get_device_name(), dtype)

    def forward_of(self, micro_batch: TensorDict, packed: PackedRollouts | None) -> dict[str, Any]:
        """The output of a forward: of packed rollouts, or as veRL computes them."""
        self._running = None if packed is None else Running(packed)
        try:
            return self._run(micro_batch, None, forward_only=True, last=True)
        finally:
            self._running = None

    def _more_metrics(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if self._options.keeping is not None:
            found["walked_parts"] = float(self._walked_parts * (self._planned is not None))
        if self._ratio is not None:
            found[RATIO.removeprefix("dualkv/")] = self._ratio
        if self._compared is not None:
            found["packed_vs_separate"] = self._compared.difference
        return found

    # ------------------------------------------------------------------ a micro-batch
    def _get_packed_pad_size(self, packed_length: int) -> int:
        """Fill up a micro-batch whose norms would sum in another order."""
        bucket = super()._get_packed_pad_size(packed_length)
        return max(bucket, invariant.LEAST_ROWS - packed_length) if self._options.batch_invariant else bucket

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        running = self._running
        if running is None:
            return super().prepare_model_inputs(micro_batch)
        packed = running.packed
        # veRL prepares the rows on the host, where nothing waits for the GPU, which still runs the micro-batch before.
        device, on_host = micro_batch["input_ids"].device, packed.layout
        rows = _as_sequences(micro_batch, packed.input_ids, on_host.offsets.to(torch.int64))
        of_images = packed.position_ids
        of_text = on_host.position_ids
        if running.branch is not None:
            of_text = torch.from_numpy(running.branch.part.positions)
        rows["position_ids"] = torch.nested.nested_tensor_from_jagged(
            of_text if of_images is None else of_images,
            rows["input_ids"].offsets(),
            jagged_dim=1 if of_images is None else 2,
        )
        temperature = temperatures(micro_batch["temperature"], packed)
        if isinstance(temperature, torch.Tensor):
            temperature = temperature.cpu()
        tu.assign_non_tensor(rows, temperature=temperature)
        inputs, outputs = super().prepare_model_inputs(rows)

        # veRL pads to a bucket, and then to a multiple of the number of sequence-parallel ranks.
        bucket = self._get_packed_pad_size(on_host.num_tokens)
        layout = padded(padded(on_host.to(device), bucket), outputs["pad_size"] - bucket)
        shard = Shard(layout, self.ulysses_parallel_group if self.use_ulysses_sp else None)
        of_batch = shard if self.use_ulysses_sp else layout
        running.layout = running.branch or of_batch
        if packed.labels is not None:
            outputs["input_ids_rmpad_rolled"] = packed.labels
        on_device = {name: to_device(x, device) for name, x in (inputs | packed.media).items() if torch.is_tensor(x)}
        inputs |= packed.media | on_device
        if of_images is not None:
            running.layout = Placed(of_batch, shard.split(inputs["position_ids"][1:], 2))
        if inputs["input_ids"].shape[1] > shard.num_tokens:
            running.unsplit = shard
        if packed.media and (running.unsplit is not None or not packed.media.keys().isdisjoint(SEGMENTS.values())):
            running.whole = layout
        head = HeadRows.of(packed.head_rows, shard.rank, shard.num_tokens, shard.world_size)
        running.head = head.to(device)
        for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
            outputs[name] = to_device(outputs[name][head.rows], device)
        outputs["pad_size"] = 0
        for name in ("cu_seqlens", "cu_seqlens_cpu"):  # of packed rows as sequences, for veRL's layers of Qwen3.5
            inputs.pop(name, None)
        if "shift_labels" in inputs:
            inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"][None]
        return inputs, outputs

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Callable[..., Any] | None,
    ) -> dict[str, torch.Tensor]:
        running = self._running
        if running is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        assert running.head is not None
        sequences = micro_batch["input_ids"]

        def compute(output: Any, arguments: dict[str, Any], count: int) -> dict[str, torch.Tensor]:
            offsets = to_device(torch.tensor([0, count]), sequences.device)
            rows = _as_sequences(micro_batch, sequences.values().new_zeros(count), offsets)
            prepare = super(DualKVEngine, self).prepare_model_outputs
            found = prepare(output, arguments, rows, logits_processor_func)
            return {name: nested.values() for name, nested in found.items()}

        if self._options.batch_invariant:
            values = equal_bits.by_blocks(compute, output.logits, output_args)
        else:
            values = compute(output, output_args, len(running.head.rows) * self.ulysses_sequence_parallel_size)
        return {name: running.packed.to_sequences(x[running.head.values], sequences) for name, x in values.items()}


def register_other(strategy: str, cause: ImportError | None = None) -> None:
    """Register an engine that raises an error: which strategy to set, or why that of megatron was not imported."""

    class OtherEngine(BaseEngine):
        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            check_strategy(strategy)
            says = f"strategy=megatron takes megatron-core, and Megatron-Bridge or mbridge: {cause}"
            raise ModuleNotFoundError(says, name="megatron.core") from cause

    EngineRegistry.register(model_type=MODEL_TYPE, backend=strategy, device=["cuda", "npu"])(OtherEngine)


for _strategy in OTHERS:
    register_other(_strategy)


def check_strategy(strategy: str) -> None:
    """Raises ValueError for a strategy that does not support packed groups."""
    if strategy not in STRATEGIES:
        raise ValueError(
            f"model.model_type={MODEL_TYPE} packs groups on strategy {', '.join(STRATEGIES)}, not on {strategy}: set"
            f" actor_rollout_ref.actor.strategy=fsdp2, or leave model.model_type out to train without dualkv"
        )


def _refuse(model_config: Any, model: nn.Module | None, given: options.Options) -> None:
    """Raise ValueError for a model that cannot be packed with the options, a fused head of veRL's that leaves out what
    the model has beside the head's weight, and options of gradient checkpointing without it.

    veRL and Liger patch the classes of models while the engine builds one. This check runs before, on transformers' own
    classes.
    """
    if model is not None:
        restore_attention()
        support.refuse(model, trains=True, batch_invariant=given.batch_invariant)
        if model_config.use_fused_kernels and (beside := transformers.head(model).beside_weight):
            raise ValueError(
                f"use_fused_kernels is True and {type(model).__name__} makes its logits with {', '.join(beside)}, which"
                " veRL's fused heads leave out: set use_fused_kernels=False"
            )
    for name in (options.KEEP, options.KEEP_LAYERS):
        value = given.given.get(name)
        if value not in (None, "nothing", "all") and not model_config.enable_gradient_checkpointing:
            raise ValueError(
                f"fused_kernel_options.{name} is {value!r} with enable_gradient_checkpointing=False, where layers keep"
                " everything: leave the option out, or set model.enable_gradient_checkpointing=True"
            )


def _without_weights(config: Any) -> nn.Module | None:
    """The model of a configuration on the meta device; None where its code comes with the weights or does not run
    there. Then `enable` and the first call with a layout check the model that veRL builds."""
    try:
        return support.without_weights(config)
    except Exception:
        return None


def restore_attention() -> None:
    """Put transformers' own attention back into classes that veRL changed, and its own layers of Qwen3.5 and models
    that see images into packed calls; veRL's stay for replicated rows."""
    for cls, forward in OWN_ATTENTION.items():
        patching.of(cls).replace("forward", forward)
    layer: Any
    for layer, own in OWN_LAYERS.items():
        if inspect.unwrap(layer.forward) is not inspect.unwrap(own):
            patching.of(layer).replace("forward", _packed_by(own, layer.forward))


def _packed_by(own: Callable[..., Any], of_verl: Callable[..., Any]) -> Callable[..., Any]:
    """The forward `own` in a call with a layout, and `of_verl` in others."""

    @functools.wraps(own)
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (of_verl if kwargs.get("dualkv") is None else own)(module, *args, **kwargs)

    return forward


def _split(shard: Shard, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """This rank's rows of a model's inputs."""
    of_rows = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1}
    return {name: shard.split(inputs[name], dim) for name, dim in of_rows.items() if inputs.get(name) is not None}


def _as_sequences(micro_batch: TensorDict, ids: torch.Tensor, offsets: torch.Tensor) -> TensorDict:
    """A micro-batch of the given rows, with `offsets` [S+1], that has the settings of `micro_batch`."""
    rows = TensorDict(
        {"input_ids": torch.nested.nested_tensor_from_jagged(ids, offsets)}, batch_size=[len(offsets) - 1]
    )
    found = {name: tu.get_non_tensor_data(micro_batch, name, None) for name in SETTINGS if name in micro_batch}
    tu.assign_non_tensor(rows, use_remove_padding=True, **found)
    return rows
