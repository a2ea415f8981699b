"""Gradient checkpointing of a model's layers that keeps what is worth its memory.

A packed group has fewer rows than its replicated sequences, and leaves memory for results that checkpointing would
compute again. :func:`recompute_layers` keeps attention's, or all products', and lets the last layers keep more where
a limit of memory allows.
"""

from __future__ import annotations

import inspect
import math
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dualkv.arrays import check_gib, check_model
from dualkv.integrations import patching
from dualkv.integrations.transformers import fused, kept, layers

Model = TypeVar("Model", bound=nn.Module)

_ATTENTION = [torch.ops.dualkv.fwd.default]
_aten = torch.ops.aten
_PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten._grouped_mm.default]
FIT = "dualkv_fit"  # attribute of a decoder with a limit of memory, a `_Fit`
KEEPS_PRODUCTS = "dualkv_keeps_products"  # attribute of a decoder some of whose layers keep them
KEEP: dict[str, list[Any]] = {
    "nothing": [],
    "attention": _ATTENTION,
    "products": [*_ATTENTION, *_PRODUCTS],
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
            about 86 kB a row and layer for Qwen3-8B. Where a model writes into one of them in place (`clip_qkv`,
            biases of grouped experts, adapters such as AdaLoRA), what is kept does not change
            (:mod:`dualkv.integrations.transformers.kept`). Kernels that write past PyTorch, launched without an
            operator and without `mark_dirty`, are not seen; of these Liger's rotary embedding is known, and refused.
        memory: GiB that the tensors of this process may take on the model's GPU at the peak of a step. As many of the
            last layers as fit keep their products, and if all of them do, as many as fit are not checkpointed at all.
            The first call with gradients leaves out one layer, which costs no memory at the peak, and measures; later
            calls keep what the measured memory allows, less for longer batches. :func:`memory_for_logits` lends the
            head what is left. One process only, because ranks that recompute different layers would wait for each
            other.

    Returns:
        The same model.

    Raises:
        ValueError: another `keep`; "products" for a model whose rotary embedding overwrites them (Liger's, in a model
            without norms of q and k); `memory` that is not positive, off a GPU, beside other ranks, or for a model
            whose layers cannot be left out one by one.
    """
    check_model(model)
    if keep not in KEEP:
        raise ValueError(f"keep is {keep!r}, expected one of {', '.join(KEEP)}")
    overwritten = _overwritten_products(model)
    if keep == "products" and overwritten:
        raise ValueError(overwritten)
    device = next(model.parameters()).device
    if memory is not None:
        _refuse_memory(memory, device)
    arguments: dict[str, Any] = {"use_reentrant": False}
    if keep != "nothing":
        arguments["context_fn"] = partial(kept.contexts, KEEP[keep])
    for decoder in layers.decoders(model):
        patching.undo(decoder, "kept")
        vars(decoder)[KEEPS_PRODUCTS] = keep == "products" or memory is not None
    # transformers renamed it within version 5.
    enable_it: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable_it(arguments)
    if memory is not None:
        for decoder in layers.decoders(model):
            fit = _Fit(decoder, memory, device, KEEP[keep], products=keep != "products" and not overwritten)
            patching.of(decoder, "kept").replace(FIT, fit)
            patching.of(decoder, "kept").before(fit)
    return model


def memory_for_logits(model: nn.Module) -> float | None:
    """GiB for `response_logprobs(..., memory=)` on the last hidden states of this model.

    It is the limit of :func:`recompute_layers`, so that logits take what layers leave. None without a limit, and in
    calls that measure what layers need: the first two, and those with more rows than any before.
    """
    check_model(model)
    fits = [fit for decoder in layers.decoders(model) for fit in _fits(decoder)]
    return fits[0].for_logits() if fits else None


def keep_attention(decoder: nn.Module, _args: Any, _kwargs: Any) -> None:
    """A forward pre-hook of a decoder: layers keep attention again after a trainer's own call of
    `gradient_checkpointing_enable`, if that asked for checkpointing that is not reentrant; a limit of memory does so
    by itself."""
    for layer in layers_to_leave_out(decoder) if torch.is_grad_enabled() and not _fits(decoder) else []:
        how = layer._gradient_checkpointing_func if layer.gradient_checkpointing else None
        if isinstance(how, partial) and how.keywords.get("use_reentrant") is False and "context_fn" not in how.keywords:
            contexts = partial(kept.contexts, KEEP["attention"])
            _set(layer, "_gradient_checkpointing_func", partial(how, context_fn=contexts))


@torch.compiler.disable
def keep_all(decoder: nn.Module, share: float, until: ExitStack) -> None:
    """Lets a share of the checkpointed layers, the last ones, keep all that their backward needs, until `until` is
    closed."""
    layers = [layer for layer in layers_to_leave_out(decoder) if layer.gradient_checkpointing] if share else []
    for layer in layers[math.ceil(len(layers) * (1 - share)) :]:
        until.enter_context(patching.Changes(layer)).replace("gradient_checkpointing", False)


@torch.compiler.disable
def _set(layer: nn.Module, name: str, value: Any) -> None:
    patching.of(layer, "kept").replace(name, value)


def _fits(decoder: nn.Module) -> list[_Fit]:
    return [decoder.__dict__[FIT]] if FIT in decoder.__dict__ else []


def _refuse_memory(memory: float, device: torch.device) -> None:
    check_gib("memory", memory)
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


def _overwritten_products(model: nn.Module) -> str | None:
    """Say why products cannot be kept: Liger's kernel rotates q and k in place, unseen by PyTorch, here twice. None if
    they can."""
    for name, module, _ in layers.decoder_layers(model):
        rotate = inspect.unwrap(module.forward).__globals__.get(fused.ROTARY)
        if getattr(rotate, "__module__", "").startswith("liger_kernel") and not hasattr(module, "q_norm"):
            return (
                f"{name} ({type(module).__name__}) rotates its projections in place by Liger's kernel, which keep="
                "'products' would do twice: use keep='attention', or Liger with rope=False"
            )
    return None


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


def _ends_with_product(hidden: torch.Tensor) -> bool:
    """Whether a layer adds the result of a product to its residual, so that no backward reads that result."""
    add = hidden.grad_fn
    if add is None or add.name() != "AddBackward0":
        return False
    for node, _ in add.next_functions:
        while node is not None and node.name() in ("ViewBackward0", "UnsafeViewBackward0"):
            node = node.next_functions[0][0]
        if node is not None and node.name() in ("MmBackward0", "AddmmBackward0"):
            return True
    return False


RECOMPUTED, PRODUCTS, LEFT_OUT = range(3)  # what a layer keeps: as `keep` says, its products too, everything


class _Fit:
    """A forward pre-hook of a decoder: sets what each of its layers keeps in this call.

    Let `need` be what a step takes beyond the memory that its forward starts with, with the last layer left out of
    checkpointing and the others recomputed. It is measured as the peak at the end of a backward, less what that step
    kept in other layers. A peak of something else makes it too large and never too small, and a layer that keeps more
    adds at most what it keeps. The last layer's backward directly follows its forward, so leaving it out adds nothing.
    For fewer rows half of `need` is taken as fixed: the gradients of the weights and the head's chunks of logits, which
    are less.

    Products are kept before anything else: what is computed from them takes nearly as much memory, and little time.
    """

    def __init__(
        self, decoder: nn.Module, limit: float, device: torch.device, keep: list[Any], products: bool = True
    ) -> None:
        """keep: operations whose results all layers keep. products: whether results of products may be kept."""
        self.limit, self.device, self.layers = limit * 2**30, device, layers_to_leave_out(decoder)
        if not self.layers:
            raise ValueError(
                f"memory is {limit} GiB for {type(decoder).__name__}, whose layers are not checkpointed one by one:"
                " expected layers of transformers' GradientCheckpointingLayer"
            )
        self.keep, self.may_keep_products = keep, products
        self.rows, self.need, self.learned = 0, 0.0, 0  # `need` is that of a call of these rows
        self.plain = 0.0  # bytes a row that a recomputed layer keeps
        self.more = [0.0, 0.0, 0.0]  # bytes a row beyond that, by what a layer keeps; 0 until they are measured
        self.logits = False  # whether the head asks for what is left
        self.call = 0, 0, 0.0  # rows, bytes at the start, bytes kept beyond recomputed layers, the last one not counted
        self.marks: list[int] = []  # bytes before each layer
        self.ended = False  # whether this call has left the last layer
        self.levels = [RECOMPUTED] * len(self.layers)
        self.products = 0  # in the forward of a layer
        self.last_is_read = True  # whether a backward reads the last product's result
        for layer in self.layers:
            patching.of(layer, "kept").before(self._mark)
        patching.of(self.layers[-1], "kept").behind(self._end)

    def set_levels(self, levels: list[int]) -> None:
        """Sets what each layer keeps."""
        self.levels = levels
        for layer, level in zip(self.layers, levels, strict=True):
            contexts = partial(self._contexts, level)
            _set(layer, "gradient_checkpointing", level != LEFT_OUT)
            _set(layer, "_gradient_checkpointing_func", partial(checkpoint, use_reentrant=False, context_fn=contexts))

    def _contexts(self, level: int) -> Any:
        """Make the contexts of one call of a layer: for its forward and for its recomputation."""
        count = 0
        not_read = self.products if self.products and not self.last_is_read else -1

        def keeps(op: Any) -> bool:
            nonlocal count
            if op in _PRODUCTS:
                count += 1
                self.products = max(self.products, count)
            return op in self.keep or (op in _PRODUCTS and level == PRODUCTS and count != not_read)

        return kept.contexts(KEEP["products"], keeps)

    def __call__(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not (decoder.training and torch.is_grad_enabled()):
            self.call = 0, 0, 0.0
            return
        given = next(x for x in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None)
        rows, start = given.shape[0] * given.shape[1], _allocated(self.device)
        self.set_levels(self._fitting(rows, start))
        self.call, self.marks, self.ended = (rows, start, 0.0), [], False

    def _fitting(self, rows: int, start: int) -> list[int]:
        """Choose what each layer keeps in a call of so many rows."""
        others, products, left_out, last = len(self.layers) - 1, 0, 0, LEFT_OUT
        if not (self.more[LEFT_OUT] and self.rows):
            return [RECOMPUTED] * others + [last]
        ratio = rows / self.rows
        room = (self.limit - start - self.need * max(ratio, (1 + ratio) / 2)) / rows
        if self.may_keep_products:
            each = self.more[PRODUCTS] or self.more[LEFT_OUT]  # to be measured: not more than everything
            products = _fit_in(room, each, others)
            room -= products * each
            if self.logits:  # At the head what the last layer keeps costs memory, for which logits give more.
                last = PRODUCTS
            elif products == others:
                left_out = _fit_in(room, self.more[LEFT_OUT] - each, others)
        else:
            left_out = _fit_in(room, self.more[LEFT_OUT], others)
        most = max(products, left_out)
        return [RECOMPUTED] * (others - most) + [PRODUCTS] * (most - left_out) + [LEFT_OUT] * left_out + [last]

    # Layers that are computed again call these hooks again, in some versions of transformers.
    def _mark(self, *_: Any) -> None:
        if self.call[0] and not self.ended:
            self.marks.append(_allocated(self.device))

    def _end(self, _layer: nn.Module, _args: Any, output: Any) -> None:
        rows, start, _ = self.call
        if not rows or self.ended:
            return  # no call with gradients
        self.ended = True
        hidden = output[0] if isinstance(output, tuple) else output
        ends = [*self.marks[1:], _allocated(self.device)]
        took = [(end - begin) / rows for begin, end in zip(self.marks, ends, strict=True)]
        if not self.more[LEFT_OUT]:
            self.plain = min(took[:-1], default=0.0)
            self.last_is_read = not _ends_with_product(hidden)
        for level in (PRODUCTS, LEFT_OUT):
            found = [each - self.plain for each, its in zip(took, self.levels, strict=True) if its == level]
            if found:
                self.more[level] = max(*found, 1 / rows)
        self.call = rows, start, rows * sum(max(each - self.plain, 0.0) for each in took[:-1])
        if hidden.requires_grad:
            # Here and not at the next call, because a user may reset the peak between steps.
            hidden.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(self._learn))

    def _learn(self) -> None:
        """Record the memory that a call needed, at the end of its backward."""
        rows, start, kept = self.call
        need = _peak(self.device) - start - kept
        self.learned += 1
        if rows > self.rows or (rows == self.rows and need < self.need):
            self.rows, self.need = rows, need

    def for_logits(self) -> float | None:
        """The limit for the head's logits in GiB. None at first: logits that fill the memory would hide what layers
        need, which is measured without them."""
        self.logits = True
        known = self.learned > 1 and 0 < self.call[0] <= self.rows
        return self.limit / 2**30 if known else None


def _fit_in(room: float, each: float, most: int) -> int:
    return min(most, max(0, int(room / each))) if each > 0 else 0
