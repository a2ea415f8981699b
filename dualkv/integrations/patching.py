"""Every change that DualKV makes to a model or to another library, and the records that undo them.

:class:`Changes` are the attributes and hooks that one object got. :func:`of` finds them:

- A module of a model holds its own changes, in parts that are undone apart from each other. So copies, pickles,
  wrappers and parts of a model are undone by themselves. :func:`undo` undoes a model.
- The changes of a class or of a file of a library are in one record of the process. :func:`undo_process` undoes these.

A change that somebody has replaced meanwhile stays as it is. Two kinds of changes say themselves what they stand for,
and are undone by that: the name of an attention implementation (:func:`stock_attention`), and megatron-core's classes
(:func:`swap`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from types import CellType, FunctionType, TracebackType
from typing import Any, Self

from torch import nn
from torch.utils.hooks import RemovableHandle

OURS = "dualkv_"  # begins the names of attributes that nobody else sets
RECORD, LAYOUT = f"{OURS}changes", f"{OURS}layout"
INVARIANT = f"{OURS}batch_invariant"  # of attention and linear layers whose packed calls are
# Prefixes of names of attention implementations, by `deterministic`. The name of the model's own implementation
# follows, because transformers looks for parts of that name ("flash" decides how masks and caches are made).
PREFIX = {False: "dualkv|", True: "dualkv-deterministic|"}

PREPARED: set[type] = set()  # classes of models whose files were changed; dynamo reads it while it traces
_PROCESS: dict[Any, Changes] = {}  # by class or module


class _Absent:
    """The value of an attribute that an object does not have itself: the class is its own copy and pickle."""


class Changes:
    """The attributes and hooks that one object got. A `with` statement undoes them when its body ends."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self._attributes: dict[str, tuple[Any, Any]] = {}  # by name: the value that was set, and the one before
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def replace(self, name: str, value: Any) -> None:
        """Set an attribute of the object."""
        before = vars(self.target).get(name, _Absent)
        setattr(self.target, name, value)
        self._note(name, before)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note the attributes that others set or delete in this context."""
        before = dict(vars(self.target))
        try:
            yield
        finally:
            for name in before.keys() | vars(self.target).keys():
                self._note(name, before.get(name, _Absent))

    def before(self, hook: Callable[..., Any], *, first: bool = False) -> None:
        """Register a forward pre-hook, which gets keyword arguments too."""
        self._hooks.append(self.target.register_forward_pre_hook(hook, with_kwargs=True, prepend=first))

    def behind(self, hook: Callable[..., Any], *, first: bool = False, with_kwargs: bool = False) -> None:
        """Register a forward hook."""
        self._hooks.append(self.target.register_forward_hook(hook, with_kwargs=with_kwargs, prepend=first))

    def undo(self) -> None:
        """Remove the hooks, and give each attribute that is as it was set the value from before."""
        for hook in self._hooks:
            hook.remove()
        for name, (_, before) in self._attributes.items():
            if not self._is_set(name, vars(self.target).get(name, _Absent)):
                continue
            if before is _Absent:
                delattr(self.target, name)
            else:
                setattr(self.target, name, before)
        self._attributes, self._hooks = {}, []

    def _note(self, name: str, before: Any) -> None:
        now = vars(self.target).get(name, _Absent)
        if now is not before:
            was = self._attributes[name][1] if self._is_set(name, before) else before
            self._attributes[name] = now, was

    def _is_set(self, name: str, value: Any) -> bool:
        """Whether an attribute of this value is as it was set here."""
        return name in self._attributes and (name.startswith(OURS) or self._attributes[name][0] is value)


def of(target: Any, part: str = "enable") -> Changes:
    """The changes of a module of a model, or of a class or module of a library, to which more can be added.

    part: "enable", "fast" and "kept" are of :mod:`dualkv.integrations.transformers`, "engine" of veRL, "trainer" of
    other trainers.
    """
    if not isinstance(target, nn.Module):
        return _PROCESS.setdefault(target, Changes(target))
    parts: dict[str, Changes] = vars(target).setdefault(RECORD, {})
    return parts.setdefault(part, Changes(target))


@contextmanager
def watched(model: nn.Module, part: str) -> Iterator[None]:
    """Note the attributes that others set or delete in the modules of a model in this context."""
    with ExitStack() as noted:
        for module in model.modules():
            noted.enter_context(of(module, part).watched())
        yield


def undo(model: nn.Module, *parts: str) -> None:
    """Undo the changes of these parts in all modules of a model, by default of every part.

    With the part "enable" configurations name the models' own attention implementations again.
    """
    for module in model.modules():
        found: dict[str, Changes] = vars(module).get(RECORD, {})
        for part in [x for x in reversed(found) if x in parts or not parts]:
            found.pop(part).undo()
        if RECORD in vars(module) and not found:
            delattr(module, RECORD)
        config = getattr(module, "config", None)
        if (not parts or "enable" in parts) and (stock := stock_attention(config)) is not None:
            name_attention(config, stock)


def undo_process() -> None:
    """Undo the changes of classes and files of other libraries.

    Enabled models should be disabled before. DualKV makes these changes again where it needs them. Names in registries
    of other libraries stay: they do nothing unless a configuration has them.
    """
    while _PROCESS:
        _PROCESS.popitem()[1].undo()
    PREPARED.clear()


# ---------------------------------------------------------------- marks
def marked(function: Any) -> Any:
    """Mark a function that takes layouts, and return it."""
    function._of_dualkv = True
    return function


def is_marked(function: Any) -> bool:
    return hasattr(function, "_of_dualkv")


def hand(target: Any, given: Any, name: str = LAYOUT) -> None:
    """Leave a call's layout, or what `name` says, with a module or tensor whose callers do not hand it on."""
    setattr(target, name, given)


def take_back(module: nn.Module) -> None:
    """Delete the attribute that :func:`hand` made."""
    delattr(module, LAYOUT)


# ---------------------------------------------------------------- changes that say what they stand for
def stock_attention(config: Any) -> str | None:
    """The model's own implementation if `config` names one of DualKV's, else None."""
    name = getattr(config, "_attn_implementation", None) or ""
    return next((name.removeprefix(prefix) for prefix in PREFIX.values() if name.startswith(prefix)), None)


def name_attention(config: Any, name: str) -> None:
    """Lets a configuration name an attention implementation, and its parts the ones that they name."""
    config._attn_implementation = {"": name}


def swap(target: Any, name: str, classes: Mapping[type, type]) -> None:
    """Put classes' values in the place of their keys, in an attribute (`__class__`: of the object itself).

    Each value of megatron-core's classes says what it stands for, also in models that are built from a changed spec.
    """
    found: Any = getattr(target, name, None)
    if found in classes:
        setattr(target, name, classes[found])


# ---------------------------------------------------------------- functions made of others
@cache
def with_own_code(function: Callable[..., Any], *key: Any) -> Callable[..., Any]:
    """Wrap a function in a code object of its own for each key.

    PyTorch keeps what it has compiled of a code object for good, so all users of a key share the wrapper.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def with_globals(function: Any, names: dict[str, Any]) -> FunctionType | None:
    """Copy a function with other global names.

    Decorators around it are kept. None if one of them is no closure over what it decorates.
    """
    if not isinstance(function, FunctionType):
        return None
    code, name, defaults, closure = (
        function.__code__, function.__name__, function.__defaults__, function.__closure__
    )  # fmt: skip
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        own = FunctionType(code, names, name, defaults, closure)
    else:
        changed = with_globals(inner, names)
        if changed is None or all(cell.cell_contents is not inner for cell in closure or ()):
            return None
        cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
        own = FunctionType(code, function.__globals__, name, defaults, cells)
        vars(own)["__wrapped__"] = changed
    own.__kwdefaults__ = function.__kwdefaults__
    return own
