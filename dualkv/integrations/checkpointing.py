"""Gradient checkpointing of a model's layers that keeps what is worth its memory.

A packed group has fewer rows than its replicated sequences, and leaves memory for results that checkpointing would
compute again. :func:`recompute_layers` keeps attention's, or all products', and lets the last layers keep everything
where a limit of memory allows.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

from dualkv.integrations import layers

Model = TypeVar("Model", bound=nn.Module)

_ATTENTION = [torch.ops.dualkv.fwd.default]
_aten = torch.ops.aten
KEEP: dict[str, list[Any]] = {
    "nothing": [],
    "attention": _ATTENTION,
    "products": [*_ATTENTION, _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default],
}


def recompute_layers(model: Model, keep: str = "nothing", *, memory: float | None = None) -> Model:
    """Gradient checkpointing of every layer, with some results kept and not computed again.

    Packed groups have fewer rows and so leave memory for kept results. Attention is the first to keep: its output and
    log-sum-exp are small for the time that they take. Results do not depend on `keep` or `memory`.

    Args:
        model: a transformers model, changed in place. Wrappers (FSDP, PEFT) may be applied before or after.
        keep: "nothing" keeps only the input of each layer. "attention" also keeps out and lse of
            :func:`dualkv.attention`: T * H * (2 * Dv + 4) bytes a layer in bf16. "products" also keeps the results of
            all matrix products, so that only elementwise operations are computed again: T rows of every projection,
            about 86 kB a row and layer for Qwen3-8B.
        memory: GiB that the tensors of this process may take on the model's GPU at the peak of a step. As many of the
            last layers as fit are not checkpointed at all. The first call with gradients leaves out one layer, which
            costs no memory at the peak, and measures; later calls leave out what the measured memory allows, less for
            longer batches. One process only, because ranks that recompute different layers would wait for each other.

    Returns:
        The same model.

    Raises:
        ValueError: another `keep`; "products" for a model whose rotary embedding overwrites them (Liger's, in a model
            without norms of q and k); `memory` that is not positive, off a GPU, beside other ranks, or for a model
            whose layers cannot be left out one by one.
    """
    if keep not in KEEP:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(KEEP)}")
    if keep == "products":
        _refuse_overwritten_products(model)
    device = next(model.parameters()).device
    if memory is not None:
        _refuse_memory(memory, device)
    arguments: dict[str, Any] = {"use_reentrant": False}
    if keep != "nothing":
        arguments["context_fn"] = partial(create_selective_checkpoint_contexts, KEEP[keep])
    # transformers renamed it within version 5.
    enable_it: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable_it(arguments)
    for decoder in layers.decoders(model):
        forget(decoder)
        if memory is not None:
            decoder.register_forward_pre_hook(_Fit(decoder, memory, device), with_kwargs=True)
    return model


def forget(decoder: nn.Module) -> None:
    """Takes away a limit of memory that an earlier call set."""
    for key, hook in list(decoder._forward_pre_hooks.items()):
        if isinstance(hook, _Fit):
            hook.leave_out(0)
            hook.remove()
            del decoder._forward_pre_hooks[key]
            decoder._forward_pre_hooks_with_kwargs.pop(key, None)


def _refuse_memory(memory: float, device: torch.device) -> None:
    if not memory > 0:
        raise ValueError(f"memory is {memory}, expected a positive number of GiB")
    if device.type != "cuda":
        raise ValueError(f"memory is {memory} GiB for a model on {device}, expected a model on a GPU")
    if _ranks() > 1:
        raise ValueError(
            f"memory is {memory} GiB among {_ranks()} ranks, expected one process: ranks that recompute different"
            " layers would wait for each other"
        )


def most(model: nn.Module) -> float | None:
    """GiB of 0.9 of a GPU's memory: the rest is for what PyTorch's allocator cannot fill. None where no limit works."""
    device = next(model.parameters()).device
    one_by_one = all(layers_to_leave_out(decoder) for decoder in layers.decoders(model))
    if device.type != "cuda" or _ranks() > 1 or not one_by_one:
        return None
    return 0.9 * torch.cuda.get_device_properties(device).total_memory / 2**30


def _ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _refuse_overwritten_products(model: nn.Module) -> None:
    """Raises ValueError if Liger's kernel rotates q and k in place, unseen by PyTorch: kept ones would rotate twice."""
    for name, module, _ in layers.decoder_layers(model):
        rotate = inspect.unwrap(type(module).forward).__globals__.get("apply_rotary_pos_emb")
        if getattr(rotate, "__module__", "").startswith("liger_kernel") and not hasattr(module, "q_norm"):
            raise ValueError(
                f"{name} ({type(module).__name__}) rotates its projections in place by Liger's kernel, which keep="
                "'products' would do twice: use keep='attention', or Liger with rope=False"
            )


# ---------------------------------------------------------------- as many layers as a limit allows
def _allocated(device: torch.device) -> int:
    """Bytes of tensors on the GPU now."""
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    """The most bytes of tensors that there were, since the start or the user's own reset."""
    return torch.cuda.max_memory_allocated(device)


def layers_to_leave_out(decoder: nn.Module) -> list[Any]:
    """The layers that are checkpointed one by one, in order."""
    return [m for m in decoder.modules() if m is not decoder and isinstance(m, GradientCheckpointingLayer)]


class _Fit:
    """A forward pre-hook of a decoder: sets which of its layers are checkpointed in this call.

    Let `need` be what a step takes beyond the memory that its forward starts with, with one layer left out. It is
    measured as the peak at the end of a backward, less what that step kept in further layers. A peak of something else
    makes it too large and never too small, and one more layer left out adds at most what it keeps. The last layer's
    backward directly follows its forward, so leaving it out adds nothing. For fewer rows half of `need` is taken as
    fixed: the gradients of the weights and the head's chunks of logits, which are less.
    """

    def __init__(self, decoder: nn.Module, limit: float, device: torch.device) -> None:
        self.limit, self.device, self.layers = limit * 2**30, device, layers_to_leave_out(decoder)
        if not self.layers:
            raise ValueError(
                f"memory is {limit} GiB for {type(decoder).__name__}, whose layers are not checkpointed one by one:"
                " expected layers of transformers' GradientCheckpointingLayer"
            )
        self.rows, self.need = 0, 0.0  # `need` is that of a call of these rows
        self.more = 0.0  # bytes a row that a layer keeps beyond a checkpointed one
        self.call = 0, 0, 0.0  # rows, bytes at the start, bytes kept in further layers
        self.marks: list[int] = []  # bytes before the first layer, the second and the last; these can be one
        measured = [layer.register_forward_pre_hook(self._mark) for layer in (*self.layers[:2], self.layers[-1])]
        self.handles = [*measured, self.layers[-1].register_forward_hook(self._end)]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def leave_out(self, count: int) -> None:
        """Leaves the last `count` layers out of checkpointing."""
        for at, layer in enumerate(self.layers):
            layer.gradient_checkpointing = at < len(self.layers) - count

    def __call__(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (decoder.training and torch.is_grad_enabled()):
            self.call = 0, 0, 0.0
            return
        given = next(x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        rows, start, further = given.shape[0] * given.shape[1], _allocated(self.device), 0
        if self.more:
            ratio = rows / self.rows
            need = self.need * max(ratio, (1 + ratio) / 2)
            further = max(0, int((self.limit - start - need) / (rows * self.more)))
        count = min(1 + further, len(self.layers))
        self.leave_out(count)
        self.call, self.marks = (rows, start, (count - 1) * rows * self.more), []

    def _mark(self, *_: Any) -> None:
        if self.call[0] and not self.more:
            self.marks.append(_allocated(self.device))

    def _end(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        if not self.call[0]:
            return  # no call with gradients
        if not self.more:
            first, second, before = self.marks[0], *self.marks[-2:]
            self.more = max((_allocated(self.device) - before) - (second - first), 1) / self.call[0]
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            # Here and not at the next call, because a user may reset the peak between steps.
            hidden.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._learn))

    def _learn(self) -> None:
        """At the end of a backward."""
        rows, start, kept = self.call
        need = _peak(self.device) - start - kept
        if rows > self.rows or (rows == self.rows and need < self.need):
            self.rows, self.need = rows, need
