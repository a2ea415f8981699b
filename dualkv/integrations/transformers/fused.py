"""Norms, rotary embeddings and MLPs of a model in fused kernels: Liger's where they are, compiled pieces otherwise."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from codegen import packages
from dualkv.integrations.transformers import layers

ROTARY = "apply_rotary_pos_emb"
_CHANGES = "_dualkv_fused"  # attribute of a fused decoder: of each changed module what was added, and what was before


def is_fused(model: nn.Module) -> bool:
    """Whether :func:`fuse` has changed the model."""
    return any(_CHANGES in vars(decoder) for decoder in layers.decoders(model))


def fuse(model: nn.Module) -> None:
    """Runs the elementwise parts of every layer in fused kernels, with the rounding of these kernels.

    They are Liger's where `liger_kernel` is installed, knows the model's type and the model is on a GPU. Otherwise
    norms, gated MLPs and the rotary embedding go through `torch.compile`, each by itself. Other models of the process
    do not change.
    """
    unfuse(model)
    for decoder in layers.decoders(model):
        file = sys.modules[type(decoder).__module__]
        names, before = dict(vars(file)), {name: dict(vars(m)) for name, m in decoder.named_modules()}
        if _by_liger(model, decoder):
            rotary = vars(file).get(ROTARY)
            vars(file).update(names)  # Liger replaces functions and classes of all models
            _set_rotary(decoder, rotary)
        else:
            _compile(_pieces(decoder))
            _set_rotary(decoder)
        changes = {}
        for name, module in decoder.named_modules():
            now, was = vars(module), before[name]
            changed = {key: value for key, value in was.items() if now[key] is not value}
            if changed or now.keys() != was.keys():
                changes[name] = {key: now[key] for key in now.keys() - was.keys()}, changed
        vars(decoder)[_CHANGES] = changes


def unfuse(model: nn.Module) -> None:
    """Undoes :func:`fuse`."""
    for decoder in layers.decoders(model):
        for name, (added, changed) in vars(decoder).pop(_CHANGES, {}).items():
            attributes = vars(decoder.get_submodule(name))
            for key, value in added.items():
                if attributes.get(key) is value:  # else of another's, such as Accelerate's hooks
                    del attributes[key]
            attributes.update(changed)


def _by_liger(model: nn.Module, decoder: nn.Module) -> bool:
    """Puts Liger's kernels in place; False if there are none for this model here."""
    if packages.lacking("liger-kernel") or next(decoder.parameters()).device.type != "cuda":
        return False
    from liger_kernel.transformers import monkey_patch as liger

    owner: Any = next((m for m in model.modules() if hasattr(m, "config") and decoder in m.children()), decoder)
    apply = liger.MODEL_TYPE_TO_APPLY_LIGER_FN.get(owner.config.model_type)
    if apply is None:
        return False
    losses = [name for name in inspect.signature(apply).parameters if name.endswith("cross_entropy")]
    apply(model=owner, **dict.fromkeys(losses, False))
    return True


def _compile(modules: Iterable[nn.Module]) -> None:
    """Compiles each module by itself. One whose forward has been replaced already (Accelerate's hooks) stays as it is.

    Sizes of parameters are compiled in, so norms of hidden states and of heads do not share code.
    """
    compiled = cache(_by_form)  # one for modules of one class and these sizes
    for module in modules:
        forward = type(module).forward
        if "forward" not in vars(module) and isinstance(forward, FunctionType):
            sizes = tuple(p.shape for p in module.parameters())
            vars(module)["forward"] = MethodType(compiled(forward, sizes), module)


def _by_form(function: Callable[..., Any], sizes: tuple[torch.Size, ...] = ()) -> Callable[..., Any]:
    """The function, compiled for each form of its tensors. `sizes`: of its module's parameters.

    `torch.compile` compiles one code eight times at most; further calls run as they are. It compiles anew with and
    without gradients, and for sizes of 0 and 1. So each such form has code of its own.
    """
    forms: dict[Any, Callable[..., Any]] = {}

    @wraps(function, updated=())  # a bound method is pickled by its name
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a model that is compiled as a whole
            return function(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        form = torch.is_grad_enabled(), *((x.requires_grad, *(min(n, 2) for n in x.shape)) for x in tensors)
        if form not in forms:
            forms[form] = torch.compile(_own(function, sizes, form), dynamic=True)
        return forms[form](*args, **kwargs)

    return call


@cache
def _own(function: Callable[..., Any], sizes: tuple[torch.Size, ...], form: tuple[Any, ...]) -> Callable[..., Any]:
    """Wrap the function in a code object of its own for a form. PyTorch keeps what it has compiled of a code object for
    good, so all models share the wrapper, and so does a model that is fused again."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


def _set_rotary(decoder: nn.Module, rotary: Any = None) -> None:
    """Lets the attention layers of this model alone call another rotary embedding.

    It is a global name of transformers' modeling file. So each layer's forward becomes the same code with global names
    of its own. A layer whose forward has been replaced already (Accelerate's hooks) stays as it is.

    rotary: the file's own, compiled, if it is None.
    """
    compiled = cache(_by_form)  # one for all layers
    for module in layers.attention_modules(decoder):
        forward = type(module).forward
        inner = inspect.unwrap(forward)
        if "forward" in vars(module) or not isinstance(inner, FunctionType) or ROTARY not in inner.__code__.co_names:
            continue
        names = dict(inner.__globals__)
        names[ROTARY] = rotary or compiled(names[ROTARY])
        del names["__name__"]  # a model that is compiled as a whole would look in the file instead
        if (own := _with_names(forward, names)) is not None:
            vars(module)["forward"] = MethodType(own, module)


def _with_names(function: Any, names: dict[str, Any]) -> FunctionType | None:
    """A function with other global names. Decorators around it are kept: transformers has some that rename arguments.
    None if one of them is no closure over what it decorates."""
    if not isinstance(function, FunctionType):
        return None
    code, name, defaults, closure = (
        function.__code__, function.__name__, function.__defaults__, function.__closure__
    )  # fmt: skip
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        own = FunctionType(code, names, name, defaults, closure)
    else:
        changed = _with_names(inner, names)
        if changed is None or all(cell.cell_contents is not inner for cell in closure or ()):
            return None
        cells = tuple(CellType(changed) if cell.cell_contents is inner else cell for cell in closure or ())
        own = FunctionType(code, function.__globals__, name, defaults, cells)
        vars(own)["__wrapped__"] = changed
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def _pieces(decoder: nn.Module) -> Iterator[nn.Module]:
    """Norms and gated MLPs. A mixture of experts is none: its shapes depend on the routes."""
    for name, module in decoder.named_modules():
        gated = all(
            isinstance(getattr(module, part, None), nn.Linear) for part in ("gate_proj", "up_proj", "down_proj")
        )
        if gated or "norm" in name.rpartition(".")[2]:
            yield module
