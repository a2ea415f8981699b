"""Results of operations that a checkpointed layer keeps, safe from later writes into them.

A recomputation begins with kept results, so each must have the value that its operation gave it. Models write into
results afterwards: they clamp projections, add biases of experts or adapters to them, scale them in place. PyTorch's
own selective checkpointing keeps an alias. There such a write changes what is kept, unseen where a linear layer has
reshaped its result (`_unsafe_view`, a view with a version counter of its own), or the backward raises.

Here a kept result is an alias too, so that it costs no copy, but the mode that watches the forward sees every
operation before it runs. One that is about to write into the memory of a kept result, through whatever view, makes the
kept result a copy first. The model's own tensor is freed when the layer ends, as without a write, so one copy remains.
Writes that no operation shows while the layer runs, those of compiled code and those after the layer's end, move
version counters. A kept result with a counter that has moved is dropped and computed again. Kernels that are launched
past PyTorch and mark nothing are not seen: see :func:`dualkv.integrations.transformers.checkpointing.recompute_layers`.

A recomputation writes into what it is given, as the forward did, and so do some backward kernels. So each kept result
is given once. A second backward through the same graph computes it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dualkv.branches import is_padded

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default


def contexts(ops: Collection[Any]) -> tuple[Any, Any]:
    """Contexts of one call of a layer, its forward's and its recomputation's: a `context_fn` of PyTorch's `checkpoint`.
    Results of `ops`, overloads such as `torch.ops.aten.mm.default`, are kept."""
    if torch._guards.detect_fake_mode() is not None:  # a model that is compiled as a whole: there no tensor is written
        return create_selective_checkpoint_contexts(
            lambda _, op, *_args, **_kwargs: (
                CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE
            )
        )
    results: list[_Result] = []
    return _Forward(ops, results), _Recomputation(ops, results)


class _Kept:
    """A tensor as an operation returned it: an alias until something is about to write into its memory, then a copy."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = None  # None once it is lost
        self.counted: list[tuple[torch.Tensor, int]] = []  # aliases, and their version counters then
        self.tensor = self.count(tensor)

    def count(self, alias: torch.Tensor) -> torch.Tensor:
        """Watches the version counter of an alias; returns the alias without its graph."""
        # Below autograd, only the key ADInplaceOrView lets a detached tensor share the version counter.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            detached = alias.detach()
        self.counted.append((detached, detached._version))
        return detached

    def unwritten(self) -> torch.Tensor | None:
        """The tensor, or None if its memory has been written."""
        return self.tensor if all(alias._version == version for alias, version in self.counted) else None

    def copy(self) -> None:
        """Copy the tensor before something writes to it."""
        if self.counted:
            whole = self.unwritten()
            self.tensor, self.counted = None if whole is None else whole.clone(), []


class _Result:
    """The result of an operation in the forward, if it is kept."""

    def __init__(self, op: Any, out: Any = None) -> None:
        self.op = op
        self.is_tensor = isinstance(out, torch.Tensor)
        self.kept = [_Kept(x) for x in ([out] if self.is_tensor else out or [])]

    def take(self) -> Any:
        """Return the operation's result, once; None if it must be computed again."""
        tensors, self.kept = [kept.unwritten() for kept in self.kept], []
        if not tensors or any(x is None for x in tensors):
            return None
        return tensors[0] if self.is_tensor else tuple(tensors)


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, ops: Collection[Any], results: list[_Result]) -> None:
        super().__init__()
        self.ops, self.results = frozenset(ops), results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled parts of a layer run compiled."""
        return True


class _Forward(_Mode):
    def __init__(self, ops: Collection[Any], results: list[_Result]) -> None:
        super().__init__(ops, results)
        self.aliases: dict[int, list[_Kept]] = {}  # by the storage that they share with the model

    def __exit__(self, *error: Any) -> None:
        self.aliases.clear()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.aliases and (written := _written(func)) != ():
            for storage in _storages(_arguments(written, args, kwargs)):
                for kept in self.aliases.pop(storage, ()):
                    kept.copy()
        out = func(*args, **kwargs)
        if func in self.ops:
            self.results.append(self._kept(func, out) if not is_padded() else _Result(func))
        elif func is _UNSAFE_VIEW and self.aliases:
            for storage in _storages([out]):
                for kept in self.aliases.get(storage, ()):
                    kept.count(out)
        return out

    def _kept(self, op: Any, out: Any) -> _Result:
        result = _Result(op, out)
        for kept in result.kept:
            for storage in _storages([kept.tensor]):
                self.aliases.setdefault(storage, []).append(kept)
        return result


class _Recomputation(_Mode):
    def __enter__(self) -> Any:
        self.calls = iter(self.results)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.ops:
            result = next(self.calls, None)
            if result is None or result.op is not func:
                was = "none" if result is None else result.op
                raise RuntimeError(
                    f"a layer that is computed again calls {func} where its forward called {was}, expected the same"
                    " operations: it may depend on something that has changed in between"
                )
            if (kept := result.take()) is not None:
                return kept
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- what operations write
@cache
def _written(op: Any) -> tuple[tuple[int, str], ...] | None:
    """Places and names of the arguments that an operation writes; None where its schema does not say it.

    Collectives of c10d write without saying so. Operators of higher order have no schema.
    """
    schema = getattr(op, "_schema", None)
    if schema is None or op.namespace == "c10d":
        return None
    arguments = enumerate(schema.arguments)
    return tuple((i, x.name) for i, x in arguments if x.alias_info is not None and x.alias_info.is_write)


def _arguments(written: tuple[tuple[int, str], ...] | None, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    if written is None:
        return [*args, *kwargs.values()]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def _storages(arguments: Any) -> Iterator[int]:
    """The storages of tensors, also in lists, dictionaries and tensor subclasses."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            if is_traceable_wrapper_subclass(x):
                yield from _storages(getattr(x, name) for name in x.__tensor_flatten__()[0])
            else:
                yield x.untyped_storage()._cdata
        elif isinstance(x, list | tuple):
            yield from _storages(x)
        elif isinstance(x, dict):
            yield from _storages(x.values())
