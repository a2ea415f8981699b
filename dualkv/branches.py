"""Parts of a tree that run one after another, and the tensors that trunks keep for the parts below them.

A :class:`Branch` stands in the place of a layout: `model(..., dualkv=branch)`. Its attention reads the keys and values
that the trunks above it keep for each call of a layer, and its backward adds to their gradients. For recurrent layers
trunks keep states and the last inputs of convolutions, wherever parts below leave the path
(:mod:`dualkv.integrations.recurrent.walked`). :mod:`dualkv.walks` runs branches in order.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from dualkv.arrays import check_bool, outside_inference_mode, to_device
from dualkv.data.media import OF_TOKENS
from dualkv.data.memory import heads_at_once
from dualkv.data.parts import TreePart
from dualkv.layout import Layout
from dualkv.ops.attention import attention, checked
from dualkv.ops.features import Features
from dualkv.packed_rows import PackedRows

_SUMS = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Keeping:
    """The way in which trunks keep their tensors.

    Attributes:
        gradients: dtype of the sums of gradients, if it is wider than the kept tensor's; float64 stays float64.
        on_host: keep keys, values and states in host memory (pinned for a GPU); the sums stay on the device.
    """

    gradients: torch.dtype = torch.float32
    on_host: bool = False

    def __post_init__(self) -> None:
        if self.gradients not in _SUMS:
            raise ValueError(f"gradients is {self.gradients}, expected torch.float32 or torch.bfloat16")
        check_bool("on_host", self.on_host)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, self.gradients)


class Kept:
    """Tensors of a trunk in one call of a layer, keys and values for example, and the sums of their gradients; `made`
    are the tensors of the trunk's second pass, in its graph."""

    def __init__(self, tensors: Sequence[torch.Tensor], keeping: Keeping) -> None:
        self._keeping, self._device = keeping, tensors[0].device
        self._tensors: list[torch.Tensor] = [_compact(x.detach(), keeping.on_host) for x in tensors]
        self._versions = [_version(x) for x in self._tensors]
        self._sums: list[torch.Tensor | None] = [None] * len(tensors)
        self.made: tuple[torch.Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self._sums)

    def read(self, index: int) -> torch.Tensor:
        """Return a tensor on the device of the trunk, unless it has been written in place (RuntimeError)."""
        kept = self._tensors[index]
        if _version(kept) != self._versions[index]:
            raise RuntimeError(
                "keys, values or a state that a trunk of a walk keeps have been written in place after the layer read"
                " them, expected no writes: parts below read them too (write into a copy)"
            )
        return kept.to(self._device, non_blocking=True)

    def add(self, index: int, gradient: torch.Tensor, heads: slice | None = None) -> None:
        """Add a part's gradient of the first rows of a tensor, or of some KV heads of them."""
        total = self._sums[index]
        if total is None:
            total = self._sums[index] = self._zeros(index)
        own = total[: len(gradient)]
        own = own if heads is None else own[:, heads]
        own += gradient

    def reserve(self) -> None:
        """Make the sums that there are not yet."""
        self._sums = [self._zeros(i) if x is None else x for i, x in enumerate(self._sums)]

    def _zeros(self, index: int) -> torch.Tensor:
        kept = self._tensors[index]
        return torch.zeros(kept.shape, dtype=self._keeping.sum_dtype(kept.dtype), device=self._device)

    def drop_tensors(self) -> None:
        """Free the tensors once all parts that read them are done. The sums stay."""
        self._tensors = []

    def roots(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take the tensors of the second pass that have a graph, each with its gradient."""
        if not self.made and any(total is not None for total in self._sums):
            raise ValueError(
                "the second pass of a trunk left out a layer that ran in the first one, whose keys, values or states"
                " have gradients of the parts below: expected the same layers in both (layers may be left out by"
                " torch's random numbers, which both passes draw alike)"
            )
        found = []
        for made, total in zip(self.made, self._sums, strict=False):
            if made.requires_grad and total is not None:
                found.append((made, total.to(made.dtype)))
        self.made, self._sums = (), [None] * len(self._sums)
        return found

    @property
    def bytes(self) -> int:
        """Bytes of the tensors on the device, and of the sums that there are."""
        kept = 0 if self._keeping.on_host else sum(x.nbytes for x in self._tensors)
        return kept + sum(x.nbytes for x in self._sums if x is not None)


def _compact(x: torch.Tensor, on_host: bool) -> torch.Tensor:
    """Copy x to the host, or copy it where it is a part of a larger tensor that it would hold, or where nothing would
    tell of writes into it."""
    if not on_host:
        return x.clone() if x.untyped_storage().nbytes() > x.nbytes or x.is_inference() else x
    there = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    return there.copy_(x, non_blocking=True)


def _version(x: torch.Tensor) -> int:
    """The number of writes into x; inference tensors do not count them."""
    return 0 if x.is_inference() else x._version


class _Read(torch.autograd.Function):
    """Kept tensors as a part reads them; the backward adds to the sums of their gradients."""

    @staticmethod
    def forward(ctx: Any, _anchor: torch.Tensor, kept: Kept) -> Any:
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        read = [kept.read(i) for i in range(len(kept))]
        return tuple(x.view_as(x) for x in read)  # autograd writes into what it gets

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                ctx.kept.add(index, gradient)
        return None, None


class _Path(NamedTuple):
    """The kept keys and values that a call reads, of the first rows of each trunk."""

    pieces: list[tuple[Kept, int]]

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.pieces)

    def read(self, index: int) -> list[torch.Tensor]:
        """Return the pieces, each [rows, Hk, D or Dv]; index: 0 for keys, 1 for values."""
        return [kept.read(index)[:rows] for kept, rows in self.pieces]

    def add(self, index: int, gradient: torch.Tensor, heads: slice) -> None:
        """Add the gradient [P + t, ...] of some KV heads of the pieces and own rows, which are left out."""
        begin = 0
        for kept, rows in self.pieces:
            kept.add(index, gradient[begin : begin + rows], heads)
            begin += rows


class _Attention(torch.autograd.Function):
    """`torch.ops.dualkv.fwd` of own rows over a path's keys and values and their own.

    The op takes one number of rows for q, k and v. So q, and in the backward out, its gradient and the log-sum-exp, are
    padded for the path's rows, which have no queries. The padded tensors live in one layer at a time, and behind a long
    path the backward runs some KV heads after others (:func:`heads_at_once`): what is saved are own rows alone.
    """

    @staticmethod
    def forward(
        ctx: Any, _anchor: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        sinks: torch.Tensor | None, path: _Path, layout: Layout, scale: float, deterministic: bool, features: Features,
        backend: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        rows = path.rows
        ctx.set_materialize_grads(False)
        ctx.path, ctx.layout, ctx.scale, ctx.deterministic = path, layout, scale, deterministic
        ctx.features, ctx.backend = features._replace(sinks=None), backend
        with torch._C._AutoDispatchBelowAutograd(), _PADDED.set():
            out, lse = torch.ops.dualkv.fwd(
                _behind(q, rows), torch.cat([*path.read(0), k]), torch.cat([*path.read(1), v]), layout.offsets,
                layout.parent, scale, deterministic, *features, backend,
            )  # fmt: skip
        out, lse = out[rows:].clone(), lse[:, rows:].clone()  # a view would hold the path's rows
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.version = _version(out)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        if out._version > ctx.version:
            raise RuntimeError(
                f"out of a branch's attention has been written in place {out._version - ctx.version} times after the"
                " forward, expected none: the backward reads it (write into a copy)"
            )
        path, layout, rows = ctx.path, ctx.layout, ctx.path.rows
        keys, values, kv_heads = path.read(0), path.read(1), k.shape[1]
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        dsinks = None if sinks is None else torch.empty_like(sinks)
        at_once = heads_at_once(rows + len(q), kv_heads)
        for begin in range(0, kv_heads, at_once):
            of_kv = slice(begin, min(begin + at_once, kv_heads))
            of_q = slice(*(x * (q.shape[1] // kv_heads) for x in (of_kv.start, of_kv.stop)))
            some_k, some_v = (torch.cat([y[:, of_kv] for y in (*xs, x)]) for xs, x in ((keys, k), (values, v)))
            of_path = lse.new_full((of_q.stop - of_q.start, rows), torch.inf)
            some_dlse = None if dlse is None else torch.cat([torch.zeros_like(of_path), dlse[of_q]], 1)
            some_dq, some_dk, some_dv, some_dsinks = torch.ops.dualkv.bwd(
                _behind(dout[:, of_q], rows), _behind(q[:, of_q], rows), some_k, some_v, _behind(out[:, of_q], rows),
                torch.cat([of_path, lse[of_q]], 1), layout.offsets, layout.parent, ctx.scale, ctx.deterministic, "qkv",
                *ctx.features._replace(sinks=None if sinks is None else sinks[of_q]), some_dlse, ctx.backend,
            )  # fmt: skip
            path.add(0, some_dk, of_kv)
            path.add(1, some_dv, of_kv)
            dq[:, of_q], dk[:, of_kv], dv[:, of_kv] = some_dq[rows:], some_dk[rows:], some_dv[rows:]
            if dsinks is not None:
                dsinks[of_q] = some_dsinks
            del some_k, some_v, some_dq, some_dk, some_dv
        return None, dq, dk, dv, dsinks, *[None] * 6


class _Padded:
    """Whether attention of padded rows runs now. What saves an op's results would save the padding too."""

    def __init__(self) -> None:
        self.now = False

    @contextmanager
    def set(self) -> Iterator[None]:
        self.now = True
        try:
            yield
        finally:
            self.now = False


_PADDED = _Padded()


def is_padded() -> bool:
    """Say whether the attention that runs now has rows of a path, which are not worth keeping."""
    return _PADDED.now


def _behind(own: torch.Tensor, rows: int) -> torch.Tensor:
    """own [t, ...] behind so many rows of zeros, which are written once."""
    found = own.new_empty(rows + len(own), *own.shape[1:])
    found[:rows].zero_()
    found[rows:] = own
    return found


class Again(NamedTuple):
    """A checkpointed region that runs again, by what identifies it in the forward too, and this recomputation."""

    region: Any
    run: Any


def checkpointed() -> Any:
    """The innermost checkpointed region that runs: itself in a forward, :class:`Again` when it runs again, else None.

    torch.utils.checkpoint has no name for it that a function inside could ask for. Both times its hooks for saved
    tensors hold the region's frame. A caller refuses what this does not recognize.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not inspect.isfunction(pack := inspect.unwrap(hooks[0])):
        return None
    cells = zip(pack.__code__.co_freevars, pack.__closure__ or (), strict=True)  # not inspect.getclosurevars: slow
    held = {name: cell.cell_contents for name, cell in cells if name in ("frame", "target_frame_ref")}
    again = held.get("target_frame_ref")
    return held.get("frame") if again is None else Again(again(), pack)


class Branch(PackedRows):
    """A part of a tree behind its path: in the place of a layout in `model(..., dualkv=branch)`.

    A trunk runs twice where there are gradients: first without a graph, for what it keeps, then with one.

    Attributes:
        part: its rows.
        layout: of the path's rows and its own.
        num_tokens: own rows.
        keeps: the share of checkpointed layers, the last ones, that keep everything in this call and do not run again.
        anchor: a leaf that gives what reads kept tensors a place in the graph. It gets no gradient.
        at_end: callbacks for the end of the present pass's forward.
        unread: inputs of an image of each kind that towers run where the part has none, because other ranks wait.
        has_images: whether the batch has some.
        took_images: whether a model placed them.
        widths: of the attention layers that ran, by KV heads: the bytes of rows of the path in the widest (queries,
            keys, values and results, padded, with their gradients where there are some).
    """

    def __init__(
        self,
        part: TreePart,
        above: Sequence[Branch] = (),
        keeping: Keeping | None = None,
        modes: dict[Any, bool] | None = None,
        writes: dict[Any, int] | None = None,
    ) -> None:
        """above: the branches of `part.path`; modes, writes: those of the walk's modules, noted by
        :meth:`check_module`; None for `writes`: they are not checked."""
        self.part, self.layout, self._above = part, part.seen, tuple(above)
        self.num_tokens, self.keeps = len(part.rows), part.keeps
        self._keeping, self._modes = keeping or Keeping(), {} if modes is None else modes
        self._writes = writes
        self._kept: dict[Hashable, Kept] = {}
        self.widths: dict[int, int] = {}
        self._noted: dict[Hashable, torch.Tensor] = {}
        self.anchor = torch.zeros((), requires_grad=True)
        self.unread: dict[str, dict[str, Any]] = {}
        self.has_images, self.took_images = any(name not in OF_TOKENS for name in part.batch.media), False
        self.at_end = ExitStack()
        self.begin(torch.is_grad_enabled() and not part.is_trunk)

    is_part = True

    @property
    def runs_towers(self) -> bool:  # type: ignore[override]
        return self.has_images or bool(self.unread)

    @property
    def whole(self) -> Layout:
        """The layout of the batch."""
        return self.part.batch.layout

    @property
    def rows(self) -> torch.Tensor:
        """[num_tokens] int64, on the host: the packed rows of the batch."""
        return torch.from_numpy(self.part.rows)

    @cached_property
    @outside_inference_mode
    def position_ids(self) -> torch.Tensor:
        """[num_tokens] int64: the position of each own row in its sequence."""
        return to_device(torch.from_numpy(self.part.positions), self.part.device)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the branch keeps for the parts below and for itself, with sums of gradients that there are."""
        return sum(kept.bytes for kept in self._kept.values()) + sum(x.nbytes for x in self._noted.values())

    def begin(self, has_graph: bool) -> None:
        """Begin a pass. The second one of a trunk, with a graph, frees what the first one kept."""
        self._has_graph, self._done = has_graph, False
        # The calls of each layer in the forward: the checkpointed region of each call, or None.
        self._calls: dict[Hashable, list[weakref.ref[Any] | None]] = {}
        self._again: dict[Hashable, int] = {}  # calls so far of the region that runs again now
        self._run: Any = None
        if has_graph:
            for kept in self._kept.values():
                kept.drop_tensors()

    def end(self) -> None:
        """End the forward of the present pass: layers that come from now on are recomputed."""
        self._done = True
        self.at_end.close()

    @property
    def runs_again(self) -> bool:
        """Whether the forward of the present pass has ended, so that layers that run now are recomputed."""
        return self._done

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute :meth:`attention_with_lse` without the log-sum-exp."""
        return self.attention_with_lse(q, k, v, *args, **kwargs)[0]

    def attention_with_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        softmax_scale: float | None = None,
        deterministic: bool = False,
        *,
        layer: Hashable,
        backend: str | None = None,
        **features: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:func:`dualkv.attention` of the own rows over the path's kept keys and values and their own.

        Args:
            q, k, v: as for :func:`dualkv.attention`, [num_tokens, ...]; a trunk keeps k and v.
            softmax_scale, deterministic, backend, features: as for :func:`dualkv.attention`.
            layer: names the layer: the same in all branches. The n-th call of a layer in a forward reads what the n-th
                calls of the path kept.

        Returns:
            out [num_tokens, H, Dv], lse [H, num_tokens].

        Raises:
            ValueError: a call that the path does not have, no gradients where the pass has them, a call that cannot be
                known (:meth:`call_of`), and what the attention refuses.
        """
        if q.shape[0] != self.num_tokens:
            raise ValueError(f"q has {q.shape[0]} rows, this part has {self.num_tokens}")
        self.check_gradients()
        call = layer, self.call_of(layer)
        path = _Path([(self._keys(above, call), n) for above, (_, n) in zip(self._above, self.part.path, strict=True)])
        asked = checked(q, k, v, softmax_scale, Features.given(**features))
        if asked.features.batch_invariant:
            raise ValueError(
                "batch_invariant is True in a walk, which merges parts of the keys of a row: expected False"
            )
        self.note_width(*asked[:3], k.shape[1])
        if self.part.is_trunk:
            self.keep(call, asked.k, asked.v)
        if not path.rows:
            given = features | {"sinks": asked.features.sinks}
            return attention(
                *asked[:3], self.layout, asked.softmax_scale, deterministic, **given, backend=backend, return_lse=True
            )
        found: tuple[torch.Tensor, torch.Tensor] = _Attention.apply(
            self.anchor, asked.q, asked.k, asked.v, asked.features.sinks, path, self.layout, asked.softmax_scale,
            deterministic, asked.features, backend,
        )  # fmt: skip
        return found

    def note_width(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int) -> None:
        """Note the width of an attention layer (`widths`); kv_heads: as many may run one after another."""
        width = (q.shape[1] + k.shape[1]) * (k.shape[2] + v.shape[2]) * k.itemsize
        if self._has_graph:
            width = 2 * width + 4 * q.shape[1] * q.shape[2]  # dq is summed in fp32
        self.widths[kv_heads] = max(width, self.widths.get(kv_heads, 0))

    def attention_of(self, layer: Hashable) -> Callable[..., torch.Tensor]:
        """:meth:`attention` of a layer."""
        return partial(self.attention, layer=layer)

    def check_gradients(self) -> None:
        """Raises ValueError if the pass has gradients and the layer that is running has none."""
        if self._has_graph and not torch.is_grad_enabled():
            raise ValueError(
                "a walk with gradients came to a layer without them, which would lose those of kept keys and values:"
                " gradient checkpointing needs use_reentrant=False, and models that run layers under torch.no_grad in a"
                " step cannot be walked"
            )

    def check_module(self, module: Any) -> None:
        """Raises ValueError if a module's mode or its parameters have changed between two passes of a walk: all passes
        are one function."""
        if self._modes.setdefault(module, module.training) != module.training:
            now, before = ("training" if mode else "evaluation" for mode in (module.training, not module.training))
            raise ValueError(
                f"{type(module).__name__} is in {now} mode in a pass of a walk, and was in {before} mode in one before,"
                " expected one mode until the backward is done: call train() or eval() before the walk"
            )
        if self._writes is None or torch.compiler.is_compiling():
            return
        writes = sum(_version(p) for p in module.parameters() if p.requires_grad)
        if self._writes.setdefault(module, writes) != writes:
            raise ValueError(
                f"parameters of {type(module).__name__} have been written into between two passes of a walk, expected"
                " no writes until its backward is done: call the optimizer's step behind it (optimizers that step"
                " within the backward cannot train by walks)"
            )

    def call_of(self, layer: Hashable) -> int:
        """The number of this call of a layer in the part's forward; every call of the layer gets one. A call that is
        recomputed in the backward has the number that it had in the forward. ValueError if that cannot be known."""
        calls = self._calls.setdefault(layer, [])
        if not self._done:
            region = None if torch.compiler.is_compiling() else checkpointed()
            calls.append(None if region is None else weakref.ref(region))
            return len(calls) - 1
        if len(calls) == 1:
            return 0
        # Regions run again in the backward's order, and each from its beginning.
        found = checkpointed()
        numbers: list[int] = []
        if isinstance(found, Again):
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
        """Keep tensors of a trunk for the parts below, or in its second pass note them for the backward. Checkpointed
        layers come here again in the backward, for which nothing is kept any more."""
        if self._done:
            return
        if not self._has_graph:
            self._kept[key] = Kept(tensors, self._keeping)
        elif key in self._kept:
            self._kept[key].made = tensors

    def kept_above(self, key: Hashable) -> tuple[torch.Tensor, ...]:
        """The tensors that the path keeps under a key; their gradients arrive in the trunk that made them."""
        for branch in self._above:
            if key in branch._kept:
                found: tuple[torch.Tensor, ...] = _Read.apply(self.anchor, branch._kept[key])
                return found
        raise ValueError(f"the path keeps nothing of {key!r}: a part above did not run it")

    def of_path(self, call: tuple[Hashable, int]) -> list[torch.Tensor]:
        """The tensors that the path keeps of a call of a layer, [rows of the path, ...] each; none where there is no
        path. Their gradients arrive in the trunks that made them."""
        pieces = [
            [kept[:rows] for kept in _Read.apply(self.anchor, self._keys(above, call))]
            for above, (_, rows) in zip(self._above, self.part.path, strict=True)
            if rows
        ]
        return [torch.cat(parts) for parts in zip(*pieces, strict=True)]

    def noted(self, call: tuple[Hashable, int], make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The result of `make` in the first pass of a call of a layer, also in later passes and recomputations."""
        if call not in self._noted:
            self._noted[call] = make()
        return self._noted[call]

    @staticmethod
    def _keys(branch: Branch, call: tuple[Hashable, int]) -> Kept:
        """The keys and values that a branch above keeps of a call."""
        if call not in branch._kept:
            layer, number = call
            times = f" {number + 1} times" if number else ""
            raise ValueError(f"the path has no keys of layer {layer!r}: a part above did not run it{times}")
        return branch._kept[call]

    def reserve(self) -> None:
        """Make the sums of gradients of all that is kept, which else are made when the first gradients come."""
        for kept in self._kept.values():
            kept.reserve()

    def backward(self, loss: torch.Tensor | None, inputs: Sequence[torch.Tensor] | None = None) -> None:
        """Run the backward from the part's loss, if it has one, and from the gradients of kept tensors.

        inputs: the leaves whose gradients are computed, all by default.
        """
        roots = [] if loss is None else [(loss, torch.ones_like(loss))]
        for kept in self._kept.values():
            roots += kept.roots()
        self._kept, self._done = {}, True
        if roots:
            tensors, gradients = zip(*roots, strict=True)
            torch.autograd.backward(tensors, gradients, inputs=inputs)
