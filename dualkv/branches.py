"""Trees past memory: walked depth-first, a part at a time, with gradients of the paths' keys and values added up.

    def forward(input_ids, branch):
        return model.model(input_ids=input_ids, dualkv=branch).last_hidden_state

    def loss(hidden, part):
        logp, _ = dualkv.response_logprobs(hidden, head(model), part)
        return -(part.expand(logp) * advantages[part.places]).sum()

    dualkv.walk(batch, budget, forward, loss)  # as loss.backward() of the whole batch

Every row is computed once, as in one pass over the whole tree. A part reads the keys and values of the path above it,
which are kept for each call of a layer. Its backward adds to their gradients. A trunk's own backward runs once all
parts below it are done, from its loss and these gradients. So what is held at a time is a path's trunks and one part.
The sums are those of the whole tree, in another order: gradients of kept keys and values are added in fp32. For
recurrent layers, the states and the last inputs of convolutions are kept, wherever parts below leave the path
(:mod:`dualkv.integrations.transformers.recurrent.walked`).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dualkv.data.parts import TreePart, plan_parts
from dualkv.data.rows import check_used
from dualkv.data.trees import PackedSequences
from dualkv.layout import Layout
from dualkv.ops.attention import attention
from dualkv.packed_rows import PackedRows

Forward = Callable[[torch.Tensor, "Branch"], torch.Tensor]
Loss = Callable[[torch.Tensor, TreePart], torch.Tensor]


class _Kept(NamedTuple):
    """Tensors of a trunk in a layer (keys and values, say): in its graph, and cut off for the parts below."""

    made: tuple[torch.Tensor, ...]
    read: tuple[torch.Tensor, ...]


class _Again(NamedTuple):
    """A checkpointed region that runs again.

    Attributes:
        region: the object that identifies the region in the forward too.
        run: the object that identifies this recomputation.
    """

    region: Any
    run: Any


def _checkpointed() -> Any:
    """The innermost checkpointed region that runs: itself in a forward, :class:`_Again` when it runs again, else None.

    torch.utils.checkpoint has no name for it that a function inside could ask for. Both times its hooks for saved
    tensors hold the region's frame. A caller refuses what this does not recognize.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not inspect.isfunction(pack := inspect.unwrap(hooks[0])):
        return None
    held = inspect.getclosurevars(pack).nonlocals
    again = held.get("target_frame_ref")
    return held.get("frame") if again is None else _Again(again(), pack)


class Branch(PackedRows):
    """A part of a tree behind its path: in the place of a layout in `model(..., dualkv=branch)`.

    Attributes:
        part: its rows.
        layout: of the path's rows and its own.
        num_tokens: own rows.
    """

    def __init__(self, part: TreePart, above: Sequence[Branch] = ()) -> None:
        """above: the branches of `part.path`."""
        self.part, self.layout, self._above = part, part.seen, tuple(above)
        self.num_tokens = len(part.rows)
        self._kept: dict[Hashable, _Kept] = {}
        self._gradients: dict[Hashable, tuple[torch.Tensor | None, ...]] = {}
        # The calls of each layer in the forward: the checkpointed region of each call, or None.
        self._calls: dict[Hashable, list[weakref.ref[Any] | None]] = {}
        self._again: dict[Hashable, int] = {}  # calls so far of the region that runs again now
        self._run: Any = None
        self._training, self._done = torch.is_grad_enabled(), False

    is_part = True

    @property
    def whole(self) -> Layout:
        """The layout of the batch."""
        return self.part.batch.layout

    @property
    def rows(self) -> torch.Tensor:
        """[num_tokens] int64, on the host: the packed rows of the batch."""
        return torch.from_numpy(self.part.rows)

    @property
    def position_ids(self) -> torch.Tensor:
        """[num_tokens] int64: the position of each own row in its sequence."""
        return self.layout.position_ids[self.part.path_rows :]

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        deterministic: bool = False,
        *,
        layer: Hashable,
        **features: Any,
    ) -> torch.Tensor:
        """:func:`dualkv.attention` of the own rows over the path's kept keys and values and their own.

        Args:
            q: [num_tokens, H, D].
            k, v: [num_tokens, Hk, D or Dv]; a trunk keeps them.
            softmax_scale, deterministic, features: as for :func:`dualkv.attention`.
            layer: names the layer: the same in all branches. The n-th call of a layer in a forward reads what the n-th
                calls of the path kept.

        Returns:
            out [num_tokens, H, Dv].

        Raises:
            ValueError: another number of rows, a layer or a call of it that the path does not have, no gradients where
                the walk has them, a layer that ran several times and is recomputed otherwise than by PyTorch's
                checkpointing, and what the attention refuses.
        """
        if q.shape[0] != self.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, this part has {self.num_tokens}")
        self.check_gradients()
        call = layer, self.call_of(layer)
        above = [self._read(branch, call, rows) for branch, (_, rows) in zip(self._above, self.part.path, strict=True)]
        if self.part.is_trunk:
            self.keep(call, k, v)
        rows = self.part.path_rows
        if rows:
            q = torch.cat([q.new_zeros(rows, *q.shape[1:]), q])
            k, v = (torch.cat([*(pair[i] for pair in above), x]) for i, x in enumerate((k, v)))
        return attention(q, k, v, self.layout, softmax_scale, deterministic, **features)[rows:]

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        """:meth:`attention` of a layer."""
        return partial(self.attention, layer=layer)

    def check_gradients(self) -> None:
        """Raises ValueError if the walk has gradients and the layer that is running has none."""
        if self._training and not torch.is_grad_enabled():
            raise ValueError(
                "a walk with gradients came to a layer without them, which would lose those of kept keys and values:"
                " gradient checkpointing needs use_reentrant=False, and models that run layers under torch.no_grad in a"
                " step cannot be walked"
            )

    def call_of(self, layer: Hashable) -> int:
        """The number of this call of a layer in the part's forward; every call of the layer gets one. A call that is
        recomputed in the backward has the number that it had in the forward.

        Raises:
            ValueError: a layer that ran several times is recomputed, and it cannot be known which call that is.
        """
        calls = self._calls.setdefault(layer, [])
        if not self._done:
            region = None if torch.compiler.is_compiling() else _checkpointed()
            calls.append(None if region is None else weakref.ref(region))
            return len(calls) - 1
        if len(calls) == 1:
            return 0
        # Regions run again in the backward's order, and each from its beginning.
        found = _checkpointed()
        numbers: list[int] = []
        if isinstance(found, _Again):
            if found.run is not self._run:
                self._run, self._again = found.run, {}
            numbers = [n for n, region in enumerate(calls) if region is not None and region() is found.region]
        so_far = self._again[layer] = self._again.get(layer, -1) + 1
        if so_far >= len(numbers):
            raise ValueError(
                f"layer {layer!r} ran {len(calls)} times in a part of a walk and is recomputed by other means than"
                " torch.utils.checkpoint(..., use_reentrant=False), or inside of another checkpoint, where it cannot be"
                " known which call that is: checkpoint these layers once, or not at all"
            )
        return numbers[so_far]

    def keep(self, key: Hashable, *tensors: torch.Tensor) -> None:
        """Keeps tensors of a trunk for the parts below. Checkpointed layers come here again in the part's backward,
        for which nothing is kept any more."""
        if not self._done:
            self._kept[key] = _Kept(tensors, tuple(x.detach().requires_grad_(x.requires_grad) for x in tensors))

    def kept_above(self, key: Hashable) -> tuple[torch.Tensor, ...]:
        """The tensors that the path keeps under a key; their gradients arrive in the trunk that made them.

        Raises:
            ValueError: nothing is kept there.
        """
        for branch in self._above:
            if key in branch._kept:
                return branch._kept[key].read
        raise ValueError(f"the path keeps nothing of {key!r}: a part above did not run it")

    @staticmethod
    def _read(branch: Branch, call: tuple[Hashable, int], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        if call not in branch._kept:
            layer, number = call
            times = f" {number + 1} times" if number else ""
            raise ValueError(f"the path has no keys of layer {layer!r}: a part above did not run it{times}")
        k, v = branch._kept[call].read
        return k[:rows], v[:rows]

    def collect(self) -> None:
        """Adds what a part below has left in the gradients of kept keys and values, in fp32 (fp64 for fp64)."""
        for layer, kept in self._kept.items():
            sums = self._gradients.get(layer, (None,) * len(kept.read))
            self._gradients[layer] = tuple(map(_added, sums, kept.read))

    def backward(self, loss: torch.Tensor | None) -> None:
        """Run the backward from the part's loss (None: it has none) and from the gradients of kept keys and values."""
        roots, gradients = ([], []) if loss is None else ([loss], [torch.ones_like(loss)])
        for layer, kept in self._kept.items():
            for made, gradient in zip(kept.made, self._gradients.get(layer, (None,) * len(kept.made)), strict=True):
                if made.requires_grad and gradient is not None:
                    roots.append(made)
                    gradients.append(gradient.to(made.dtype))
        self._kept, self._gradients, self._done = {}, {}, True
        if roots:
            torch.autograd.backward(roots, gradients)
        for branch in self._above:
            branch.collect()


def _check_loss(value: object, training: bool) -> None:
    """Raises TypeError or ValueError for what a loss of :func:`walk` must not return."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"loss returned a {type(value).__name__}, expected a tensor: the part's share of the loss")
    if value.numel() != 1:
        raise ValueError(
            f"loss returned a tensor of shape {tuple(value.shape)}, expected one number, the part's share of the loss:"
            " the weighted sum over its tokens"
        )
    if training and not value.requires_grad:
        raise ValueError(
            "loss returned a tensor without a gradient in a walk that has gradients: compute it of the hidden states,"
            " not under torch.no_grad and not detached, or walk under torch.no_grad"
        )


def _added(total: torch.Tensor | None, read: torch.Tensor) -> torch.Tensor | None:
    found, read.grad = read.grad, None
    if found is None:
        return total
    if total is None:
        return found.to(torch.promote_types(found.dtype, torch.float32))
    return total.add_(found)


def walk(batch: PackedSequences, budget: int, forward: Forward, loss: Loss | None = None) -> torch.Tensor:
    """Forward and backward of a tree of any size, a part at a time. Under `torch.no_grad` forward alone.

    Gradients arrive in the parameters as from one backward of the whole batch, whose loss is the sum of the parts'.

    Args:
        batch: the tree, or several.
        budget: rows of a part. What is held at a time are the rows of the longest path and of one part.
        forward: of a part: (input_ids [1, t], branch) -> hidden states [1, t, C]. The attention of each layer is
            `branch.attention(..., layer=...)`, as it is in a transformers model with `dualkv=branch`.
        loss: of a part: (hidden states, part) -> a scalar, the part's share of the loss. It is called for parts that
            predict trained tokens. :func:`dualkv.response_logprobs` takes the part in the place of a batch,
            `part.expand` brings its values to the rollouts, and `part.places` are their places in
            `torch.cat(batch.unpack(...))`.

    Returns:
        The sum of the losses, without gradient.

    Raises:
        ValueError: a budget below 1; a forward whose attention does not use the branch (:meth:`Layout.mark_used` of
            `branch.layout`); a loss that is not one number, or has no gradient where the walk has them; see
            :meth:`Branch.attention`.
        TypeError: another batch; a forward or loss that is not a function; a loss that returns no tensor.
    """
    parts = plan_parts(batch, budget)
    for name, function, form in (("forward", forward, "(input_ids, branch)"), ("loss", loss, "(hidden states, part)")):
        if not callable(function) and not (function is None and name == "loss"):
            raise TypeError(f"{name} is a {type(function).__name__}, expected a function of {form}")
    total: list[torch.Tensor] = []
    open_trunks: list[tuple[Branch, torch.Tensor | None]] = []
    training = torch.is_grad_enabled()

    def close() -> None:
        branch, value = open_trunks.pop()
        if training:
            branch.backward(value)

    for part in parts:
        on_path = {index for index, _ in part.path}
        while open_trunks and open_trunks[-1][0].part.index not in on_path:
            close()
        by_index = {branch.part.index: branch for branch, _ in open_trunks}
        branch = Branch(part, [by_index[index] for index, _ in part.path])
        hidden = forward(part.input_ids, branch)
        check_used(part.seen, "forward returned hidden states", "dualkv=branch")
        # The batch's layout counts as used for what is computed from the log-probs of all parts. A part that is one
        # path may run without its layout.
        batch.layout._segments.use.seen |= part.seen._segments.use.seen
        value = None
        if part.num_trained and loss is not None:
            value = loss(hidden, part)
            _check_loss(value, training)
            total.append(value.detach().reshape(()))
        open_trunks.append((branch, value))
        del hidden, value
        if not part.is_trunk:
            close()
    while open_trunks:
        close()
    return torch.stack(total).sum() if total else torch.zeros((), device=batch.device)
