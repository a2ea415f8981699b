"""Parts that the benchmarks of whole steps share: options, models with random weights, time, memory, distances."""

from __future__ import annotations

import functools
import gc
import inspect
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, get_origin, get_type_hints

import torch
import typer

from dualkv.models import CONFIGS

Model = Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}; random weights.")]
Layers = Annotated[int, typer.Option(help="Of the model.")]
AllLayers = Annotated[int | None, typer.Option(help="Of the model; all of them by default.")]
Responses = Annotated[int, typer.Option("--responses", "-n", help="Responses of each prompt.")]
PromptLen = Annotated[int, typer.Option("--prompt-len", "-p", help="Tokens of each prompt.")]
ResponseLen = Annotated[int, typer.Option("--response-len", "-r", help="Tokens of each response, the longest.")]
MicroBatch = Annotated[int, typer.Option(help="Replicated sequences at once; packed, the group is.")]
Repeats = Annotated[int, typer.Option(help="Packed; replicated it is one, after one micro-batch.")]
ChunkSize = Annotated[int, typer.Option(help="Rows of the head at a time.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32.")]


def takes(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a decorator of commands `run(json_to, settings, ...)`, whose options are the fields of a dataclass.

    Fields that are annotated with an option are options, with the field's default; others keep their defaults. The
    command calls `run` with an instance of `kind` as `settings`.
    """
    hints = get_type_hints(kind, include_extras=True)
    options = {f.name: f.default for f in fields(kind) if get_origin(hints[f.name]) is Annotated}

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def command(json_to: Any = None, **given: Any) -> None:
            mine = {name: given.pop(name, default) for name, default in options.items()}
            run(json_to, kind(**mine), **given)

        file, _, *others = inspect.signature(run, eval_str=True).parameters.values()
        of_kind = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in options.items()
        ]
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in others]
        command.__signature__ = inspect.Signature([file, *of_kind, *own])  # type: ignore[attr-defined]
        return command

    return decorate


def make_config(model: str, layers: int | None = None) -> Any:
    """Make the configuration of a model of :data:`dualkv.models.CONFIGS`, cut to some layers."""
    from transformers import AutoConfig

    settings = dict(CONFIGS[model]) | ({} if layers is None else {"num_hidden_layers": layers})
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


def make_model(config: Any, dtype: str, device: torch.device) -> Any:
    """Make a model on the device; its random weights are the same for equal configurations."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    return model.to(device).train()


def best_device() -> torch.device:
    """Return the GPU where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---------------------------------------------------------------- time and memory
def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a run and what it returned."""
    wait()
    start = time.perf_counter()
    made = run()
    wait()
    return time.perf_counter() - start, made


def repeated(
    run: Callable[[], Any], repeats: int, between: Callable[[], None] = lambda: None
) -> tuple[dict[str, Any], Any]:
    """Seconds of each run, their median, and on a GPU the peak of memory in them; what the last run returned.

    `between` follows each run and is not timed. What is compiled or tuned at a first call has to be there.
    """
    gc.collect()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, last = [], None
    for _ in range(repeats):
        took, last = seconds_of(run)
        seconds.append(took)
        between()
    found: dict[str, Any] = {"seconds": seconds, "median": statistics.median(seconds)}
    return found | ({"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else {}), last


def turn(run: Callable[[], Any], seconds: float) -> list[float]:
    """Return the seconds of each run, of as many runs as fill a turn of `seconds`."""
    times: list[float] = []
    while sum(times) < seconds or not times:
        times.append(seconds_of(run)[0])
    return times


# ---------------------------------------------------------------- distances
def rms(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the root mean square of the differences."""
    return float((x - y).double().square().mean().sqrt())


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a model by the names of its parameters."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def apart(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return ||found - wanted|| / ||wanted|| over all tensors by name; `wanted` may lie on another device.

    Raises:
        ValueError: the names differ.
    """
    if found.keys() != wanted.keys():
        raise ValueError(f"gradients of other parameters: {sorted(found.keys() ^ wanted.keys())[:3]}")

    sums = torch.zeros(2, dtype=torch.float64)
    for name, x in found.items():
        exact = wanted[name].to(x.device, torch.float32)
        sums += torch.stack([y.double().square().sum() for y in (x.float() - exact, exact)]).cpu()
    return float((sums[0] / sums[1]).sqrt())
