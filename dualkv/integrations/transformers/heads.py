"""`head(model)`: how a transformers model makes logits of its last hidden states, proved on a small copy.

A model may do more than multiply by the head's weight: add a bias, scale or cap its logits, put a norm in front of the
head, or run an adapter on it. Modules say what they add, configurations the numbers, and which of the numbers a model's
code uses shows on a small copy: its logits are compared with those that each choice would make.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel

from dualkv.arrays import check_model
from dualkv.heads import INSTEAD, KNOWN, Head, Rows, check_whole
from dualkv.integrations import patching
from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import layers, recurrent, selfcheck
from dualkv.integrations.transformers.shrink import HIDDEN, shrink

# Fields of configurations that may hold the cap, or the factor of logits.
CAPS = re.compile(r".*soft_?cap")
FACTORS = re.compile(r".*(logit|lm_head)|output_mult")
WIDTHS = re.compile(r"dim_model_base$")  # by which hidden sizes are divided: MiniCPM's
READ = re.compile("|".join(f"(?:{names.pattern})" for names in (CAPS, FACTORS, WIDTHS)))
UNPADDED = re.compile(r".*unpadded.*vocab")  # some models leave logits out behind so many
# Relative difference of a row that rounding explains; fp32 stays below 1e-5.
TOLERANCE = 1e-4
LARGE = 1000.0  # a factor of logits that shows any cap

BY_HAND = "dualkv.Head(module=...)"
GATHER = "torch.distributed.", "deepspeed."  # modules of hooks that gather weights, and change no logits


def head(model: nn.Module) -> Head:
    """All that a transformers model does to its last hidden states, for :func:`dualkv.response_logprobs`.

        hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
        logp, entropy = dualkv.response_logprobs(hidden, head(model), batch)

    Weight, bias, scale, cap, and a module in front of the head are the model's own, so gradients reach them. A head
    that is more than an `nn.Linear`, such as one with an adapter of PEFT, is called as it is, and is trained; its first
    use checks that it makes each row by itself (:class:`dualkv.Head`). What a model does around its head is proved on a
    small copy (class and configuration of the model, random weights), once a configuration in a process, which takes
    about a second. Read the head anew for each batch: that is cheap, and sees adapters that were switched meanwhile.

    Args:
        model: a transformers model or a wrapper around one, such as PEFT's. With FSDP2 call `head` inside of the
            forward of the module that gathers the head's weight.

    Raises:
        ValueError: no transformers model with an output head within; logits of the small copy are not those of its
            head; this rank has a part of the weight only (tensor parallel, FSDP, ZeRO-3 outside of the forward); an
            adapter on the head with dropout in training. `model(..., logits_to_keep=batch.predict_rows)` serves these.
    """
    check_model(model)
    if (owners := _owners(model)) is None:
        raise ValueError(_no_head(model))
    whole, inner = owners
    rule = _rule(whole, inner)
    module: Any = output(inner)
    _remember(whole, inner)
    before: Rows | None = None
    if rule.before is not None:
        in_front = whole.get_submodule(rule.before)
        before = _on_rows(in_front)
        if not any(isinstance(part, FSDPModule) for part in in_front.modules()):  # FSDP2 gathers weights at the call
            _refuse_shards(inner, in_front)
    if (factor := rule.factor.of(whole.config)) != 1.0:
        before = _times(factor)
    return _behind(owners, rule, _is_linear(module), module, before)


def within(model: nn.Module) -> tuple[nn.Module, Callable[[Rows], Head]]:
    """The module that makes a model's logits, and a function for a forward in its place, which runs within its hooks:
    of the module's own forward it makes the head that is left.

    Raises:
        ValueError: as for :func:`head`; a hook of the module that may change its logits.
    """
    owners = _owners(model)
    if owners is None:
        raise ValueError(_no_head(model))
    module: Any = output(owners[1])
    changes = [hook for hook in module._forward_hooks.values() if not _gathers(hook)]
    if changes or hasattr(module, "_fsdp_wrapped_module"):
        found = f"the forward hook {changes[0]!r}" if changes else "FSDP1's wrapper of its own"
        raise ValueError(f"the head of {type(owners[1]).__name__} has {found}: {INSTEAD}")
    return module, partial(_behind, owners, _rule(*owners), _is_linear(module, with_hooks=False))


def _behind(
    owners: tuple[PreTrainedModel, PreTrainedModel], rule: Rule, linear: bool, forward: Rows, before: Rows | None = None
) -> Head:
    """Make the head behind the input of a model's module, whose weights are gathered: by its weight if it is `linear`,
    else by `forward`."""
    whole, inner = owners
    module: Any = output(inner)
    _refuse_shards(inner, module)
    made: dict[str, Any] = {
        "before": before,
        "scale": rule.scale.of(whole.config),
        "softcap": None if rule.cap is None else float(_at(whole.config, rule.cap)),
        "batch_invariant": any(patching.INVARIANT in vars(part) for part in module.modules()),
    }
    if linear:
        return Head(module.weight, module.bias, **made)
    _refuse_dropout(inner, module)
    return Head(module=_on_rows(forward), **made)


def known(model: nn.Module) -> None:
    """Lets :func:`dualkv.response_logprobs` refuse weights of a model's head that are not all of it, from now on."""
    if (owners := _owners(model)) is not None:
        _remember(*owners)


def _remember(whole: PreTrainedModel, inner: PreTrainedModel) -> None:
    refuse = partial(_refuse_part, weakref.ref(whole))
    for weight in cast(nn.Module, output(inner)).parameters():
        KNOWN[weight] = refuse


def output(model: PreTrainedModel) -> nn.Module | None:
    """The module that makes logits, or None."""
    found = model.get_output_embeddings()
    return found if isinstance(found, nn.Module) else None


def _refuse_part(model: Callable[[], PreTrainedModel | None], weight: torch.Tensor) -> None:
    """Raises ValueError if a weight of a model's head is not all of the head."""
    owner = model()
    if owner is None or _owners(owner) is None:
        return
    own = head(owner)
    if own.beside_weight or own.weight is not weight:
        beside = ", ".join(own.beside_weight) or "the weight that is active now"
        raise ValueError(
            f"head is a weight {list(weight.shape)} of {type(owner).__name__}, whose logits take {beside}:"
            " pass dualkv.integrations.transformers.head(model)"
        )


def refuse_adapter(model: nn.Module, why: str, instead: str) -> None:
    """Raises ValueError if a model's head is more than a linear layer, for heads that read its weight alone."""
    owners = _owners(model)
    if owners is not None and not _is_linear(module := output(owners[1])):
        raise ValueError(
            f"{why} and the head of {type(owners[1]).__name__} is a {type(module).__name__}, whose weight is not all of"
            f" it: {instead}"
        )


class Times(nn.Module):
    """Hidden states times a number, in front of the head."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.factor


_times = functools.cache(Times)  # one module, which is checked once


def _on_rows(module: Rows) -> Rows:
    """Make of a module that a model calls on one sequence [1, n, C] a method of it for rows [n, C]."""
    return MethodType(_on_sequence, module)


def _on_sequence(module: Rows, rows: torch.Tensor) -> torch.Tensor:
    return module(rows[None])[0]


def _owners(model: nn.Module) -> tuple[PreTrainedModel, PreTrainedModel] | None:
    """The outermost transformers model, and the outermost one within it that has a head; None if there is none."""
    whole = None
    for module in model.modules():  # mostly the first has it: models have thousands
        if isinstance(module, PreTrainedModel):
            whole = whole or module
            if output(module) is not None:
                return whole, module
    return None


def _no_head(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} is no transformers model with a head that makes logits of tokens, which its"
        f" get_output_embeddings returns, nor a wrapper around one: make a {BY_HAND}"
    )


def _is_linear(module: Any, with_hooks: bool = True) -> bool:
    """Whether a head multiplies by its `weight` and adds its `bias`, and nothing else happens when it is called, in its
    hooks too where they count."""
    inside = [module]
    if type(module).__name__ == "ModulesToSaveWrapper":  # of PEFT: its `weight` is that of the copy which is active
        inside = [module.original_module, *module.modules_to_save.values()]
    for part in inside:
        if selfcheck.class_of(part) is not nn.Linear or (
            "forward" in vars(part) and patching.INVARIANT not in vars(part)
        ):
            return False
    called = [part for part in (module, *inside) if with_hooks or part is not module]
    hooks = [hook for part in called for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
    return all(map(_gathers, hooks))


def _gathers(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(GATHER)


def _refuse_shards(model: PreTrainedModel, module: nn.Module) -> None:
    """Raises ValueError if this rank has a part of a weight."""
    for part in module.modules():
        for name, weight in part.named_parameters(recurse=False):
            what = f"the {name} of {type(model).__name__}'s head"
            check_whole(what, weight)
            if not weight.untyped_storage().size():  # FSDP1 and ZeRO-3 let go of it outside of the forward
                raise ValueError(f"{what} has no values here: {INSTEAD}")
            # The columns of a weight that is tied may be others than the layer says (Ovis 2).
            if type(part) is nn.Linear and name == "weight" and weight.shape[:-1] != (part.out_features,):
                raise ValueError(
                    f"{what} has shape {tuple(weight.shape)} here, expected {[part.out_features, part.in_features]}:"
                    f" this rank has a part of it; {INSTEAD}"
                )


def _refuse_dropout(model: PreTrainedModel, module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.Dropout) and part.training and part.p > 0:
            raise ValueError(
                f"the head of {type(model).__name__} has dropout {part.p} in training, and would run twice with other"
                f" random numbers: leave dropout out there (PEFT's lora_dropout), or {INSTEAD}"
            )


# ---------------------------------------------------------------- what a model does around its head
Path = tuple[str, ...]  # of a field: the names of the parts of a configuration, and the field's


@dataclass(frozen=True)
class Number:
    """A number that a model computes of its configuration: `(field / over) ** power`; 1 without a field.

    Attributes:
        field, over: fields; `over` may be left out.
        power: 1 or -1.
    """

    field: Path = ()
    power: int = 1
    over: Path | None = None

    def of(self, config: PreTrainedConfig) -> float:
        if not self.field:
            return 1.0
        found = float(_at(config, self.field))
        if self.over is not None:
            found /= float(_at(config, self.over))
        return found if self.power == 1 else 1.0 / found


class Rule(NamedTuple):
    """The operations of a model around its head, but for the adapters and the bias, which its module has.

    Attributes:
        before: the name of a module in front of the head.
        factor: of the hidden states.
        scale: of the logits.
        cap: the field.
    """

    before: str | None
    factor: Number
    scale: Number
    cap: Path | None


ONE = Number()
_RULES: dict[tuple[type, type, str], Rule | str] = {}
_OF_MODEL: weakref.WeakKeyDictionary[PreTrainedModel, tuple[list[Any], Rule]] = weakref.WeakKeyDictionary()


def _at(config: PreTrainedConfig, path: Path) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _fields(config: PreTrainedConfig, names: re.Pattern[str], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The fields whose name matches, of a configuration and its parts."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _fields(value, names, (*path, name))
        elif names.match(name):
            yield (*path, name), value


def _numbers(config: PreTrainedConfig, names: re.Pattern[str]) -> list[Path]:
    found = _fields(config, names)
    return [path for path, x in found if isinstance(x, int | float) and not isinstance(x, bool) and x]


def _rule(whole: PreTrainedModel, inner: PreTrainedModel) -> Rule:
    """Raises ValueError if the model's logits are not known."""
    read = [*_fields(whole.config, READ)]
    found = _OF_MODEL.get(whole)
    if found is None or found[0] != read:
        rule = rule_of(selfcheck.class_of(whole), whole.config, selfcheck.class_of(inner))
        found = _OF_MODEL[whole] = read, rule
    return found[1]


def rule_of(cls: type[Any], config: PreTrainedConfig, inner: type[Any] | None = None) -> Rule:
    """Find what models of a class and configuration do around their head, which a model of class `inner` within has.

    Raises:
        ValueError: the logits of a small copy are not those of its head, or the copy does not run.
    """
    key = cls, inner or cls, json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _RULES:
        try:
            _RULES[key] = torch.compiler.disable(_prove)(cls, config)  # the caller may be compiled
        except Exception as error:
            says = " ".join(str(error).split())[:300]
            kind = "" if isinstance(error, UnknownError) else f"its small copy raises {type(error).__name__}: "
            _RULES[key] = f"the head of {cls.__name__} is not known ({kind}{says}): {INSTEAD}, or make a {BY_HAND}"
    if isinstance(found := _RULES[key], str):
        raise ValueError(found)
    return found


class UnknownError(ValueError):
    """A small copy's logits are not those of its head."""


@dataclass
class Seen:
    """The tensors that a call of a small copy makes on the way to its logits; all are of one sequence.

    Attributes:
        hidden: the last hidden states of its decoder, and of the model around it that has no head.
        modules: input and output of each module outside of the decoder, by its name.
        logits: of the model.
    """

    hidden: list[torch.Tensor]
    modules: dict[str, tuple[torch.Tensor, torch.Tensor]]
    logits: torch.Tensor


def _prove(cls: type[Any], config: PreTrainedConfig) -> Rule:
    device = selfcheck._device(cls)
    with selfcheck._ALONE, selfcheck._untouched(device), torch.no_grad():
        model = selfcheck._copy(_as_written(cls), _small(config)).to(device)
        owners = _owners(model)
        if owners is None:
            raise UnknownError("it has none")
        module: Any = output(owners[1])
        at = next(name for name, part in model.named_modules() if part is module)
        seen = _run(model, module, 1.0)
        hidden = seen.hidden[0]
        if not all(_same(hidden, other) for other in seen.hidden[1:]):
            raise UnknownError("the decoder and the model around it have different last hidden states")
        if at not in seen.modules:
            raise UnknownError(f"its module, a {type(module).__name__}, is not called with one tensor alone")
        rows, made = seen.modules[at]
        if _is_linear(module) and not _same(made, nn.functional.linear(rows, module.weight, module.bias)):
            raise UnknownError("its module is not linear")
        before, factor = _in_front(model.config, hidden, rows, seen)
        # What follows shows on logits as they are, and on large ones.
        after = [(made, seen.logits)]
        large = _run(model, module, LARGE)
        after.append((LARGE * large.modules[at][1], large.logits))
        choices = {}
        for number in _candidates(model.config):
            for cap in (None, *_numbers(model.config, CAPS)):
                chosen = number.of(model.config), None if cap is None else float(_at(model.config, cap))
                if all(_fits(x, z, *chosen) for x, z in after):
                    # Equal numbers of the model's own configuration are one choice.
                    choices[number.of(config), cap and _at(config, cap)] = number, cap
    if len(choices) != 1:
        found = "no scale and cap of its configuration makes" if not choices else "several scales and caps would make"
        tried = ", ".join(".".join(path) for path in _numbers(config, READ)) or "none"
        names = ", ".join(each.pattern for each in (CAPS, FACTORS, WIDTHS))
        raise UnknownError(f"{found} the logits of a small copy: of fields that match {names} it has {tried}")
    return Rule(before, factor, *next(iter(choices.values())))


def _as_written(cls: type[Any]) -> type[Any]:
    """The class as its file has it. veRL's fused heads replace `forward` of the class itself, for the whole process."""
    owner = next(c for c in cls.__mro__ if "forward" in vars(c))
    if not inspect.unwrap(vars(owner)["forward"]).__module__.startswith("verl."):
        return cls
    spec = importlib.util.find_spec(owner.__module__)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(file)
    return cast(type[Any], getattr(file, cls.__name__))


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """A small configuration in which logits are left out if they are in the model's own."""
    small = shrink(config)
    for path, value in _fields(config, UNPADDED):
        part = _at(small, path[:-1])
        whole = getattr(_at(config, path[:-1]), "vocab_size", None)
        if isinstance(value, int) and isinstance(whole, int) and value < whole:
            setattr(part, path[-1], part.vocab_size - 8)
    return small


def _candidates(config: PreTrainedConfig) -> list[Number]:
    """Numbers that may be a factor of hidden states or logits."""
    pairs: list[tuple[Path, Path | None]] = [(field, None) for field in _numbers(config, FACTORS)]
    for field in _numbers(config, WIDTHS):
        pairs += [(field, size) for size in _numbers(config, HIDDEN) if size[:-1] == field[:-1]]
    return [ONE, *(Number(field, power, over) for field, over in pairs for power in (1, -1))]


def _in_front(
    config: PreTrainedConfig, hidden: torch.Tensor, rows: torch.Tensor, seen: Seen
) -> tuple[str | None, Number]:
    """Find what turns hidden states into `rows`, the input of the head: the name of a module, and a factor."""
    for number in _candidates(config):
        if _same(rows, hidden * number.of(config)):
            return None, number
    for name, (given, made) in seen.modules.items():
        if _same(given, hidden) and _same(made, rows):
            return name, ONE
    raise UnknownError("its input is not the last hidden states, nor what one module makes of them")


def _fits(made: torch.Tensor, logits: torch.Tensor, scale: float, cap: float | None) -> bool:
    z = made.double() * scale
    return _same(logits, z if cap is None else cap * torch.tanh(z / cap))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether rows [..., n] differ by rounding alone."""
    if a.shape != b.shape:
        return False
    a, b = a.double(), b.double()
    return bool(((a - b).norm(dim=-1) <= TOLERANCE * b.norm(dim=-1)).all())


def _run(model: PreTrainedModel, module: nn.Module, factor: float) -> Seen:
    """One call of a small copy, in which the head's module makes logits that are `factor` times as large."""
    decoder = layers.decoders(model)[0]
    around = model.base_model
    bases = [decoder, *([around] if around is not model and around is not decoder else [])]
    inside = {id(part) for part in decoder.modules()}
    seen = Seen([], {}, torch.empty(0))

    def keep_hidden(_module: nn.Module, _args: Any, out: Any) -> None:
        seen.hidden.append(out.last_hidden_state if hasattr(out, "last_hidden_state") else out[0])

    def keep(name: str, part: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        given = [*args, *kwargs.values()]
        if len(given) == 1 and isinstance(given[0], torch.Tensor) and isinstance(out, torch.Tensor):
            seen.modules[name] = given[0], out
        return out * factor if part is module else None

    vocabulary = cast(Any, model.get_input_embeddings()).num_embeddings
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary // 16, vocabulary // 2, (1, 9), generator=draw).to(model.device)
    with ExitStack() as undone, recurrent.on_reference(model):
        for base in bases:
            undone.enter_context(Changes(base)).behind(keep_hidden)
        for name, part in model.named_modules():
            if id(part) not in inside:
                undone.enter_context(Changes(part)).behind(partial(keep, name), with_kwargs=True)
        seen.logits = model(input_ids=ids, use_cache=False).logits
    return seen
