"""`python -m tools.zoo`: every causal and image-text model type of transformers, tiny, on text, packed and replicated.

Each type is built from its default configuration (see SETTINGS), shrunk to other sizes than the self-check's, with
random weights. Logits and gradients of packed groups and of a packed tree are compared with those of the replicated
sequences, without the self-check. So are those with an image in the prompt and one in a response, or a packed call must
refuse images, videos and audio by their names. Then `enable` runs on the whole type with its self-check.
The exit code is 1 if a type is wrong (`enable` accepts it and packed calls differ, raise or take images, or `enable`
raises anything but ValueError), or if it is exact in the record of this transformers (else of the pinned one) and not
here. The records, `--json docs/results/zoo.json` and `zoo-newest.json`, make tables of docs/transformers.md (`python -m
tools.tables`). The newest transformers, beside the pinned one:

    pip install --no-deps --target=build/newest transformers
    PYTHONPATH=build/newest python -m tools.zoo --json docs/results/zoo-newest.json
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from dualkv import Layout
from dualkv.integrations.transformers import enable, indexers, layers, media, recurrent, selfcheck, support
from dualkv.integrations.transformers.shrink import Sizes, shrink
from tools import filed, zoo_images
from tools.bench.record import OptionalJsonPath, Record

EXACT, REFUSED, WRONG, NOT_BUILT = OUTCOMES = "exact", "refused", "wrong", "not built"
MAPPINGS = {name: getattr(transformers, name)._model_mapping for name in support.AUTO_CLASSES[:2]}
SIZES = Sizes(layers=6, width=96, vocabulary=80, experts=6, positions=96, threshold=5, selected=7)
LAYOUTS = (
    Layout.from_lengths([11, 1, 4], [[6, 0, 9], [13, 2], [3]]),
    Layout.from_segments(np.cumsum([0, 5, 3, 0, 7, 2, 1, 4, 10, 6]), [-1, 0, 1, 1, 0, -1, 5, 6, 6]),
)
SEED = 20
# Largest relative difference that is exact. Rounding in fp32 has reached 1.2e-4 (gemma4_unified_text); a wrong position
# or key makes more than 1e-2.
BOUND = 5e-4
SECONDS = 120.0  # of one type, and no more memory than
GIBIBYTES = 16

RECORDS = [Path(__file__).parents[1] / "docs" / "results" / name for name in ("zoo.json", "zoo-newest.json")]
WINDOW = {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 2}

Result = dict[str, Any]

# Fields that the defaults of a type lack, or that no published model leaves at its default.
SETTINGS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "zoo.json").read_text())


def types() -> list[str]:
    """The model types that AutoModelForCausalLM or AutoModelForImageTextToText builds."""
    return sorted({kind for mapping in MAPPINGS.values() for kind in mapping._model_mapping})


# ---------------------------------------------------------------- one type
def examine(kind: str) -> Result:
    """Examine one type: `outcome`; `reason` unless it is exact; `error`, the largest relative difference.

    A type that both auto classes build is as good as the worse of its models. A type that `enable` refuses by its
    self-check alone has an `error` too where its packed calls run without the check.
    """
    found = []
    for auto, mapping in MAPPINGS.items():
        config = configuration(kind)
        if type(config) in mapping:
            found.append(_examine_model(auto, config))
    missing = {"outcome": NOT_BUILT, "reason": "the auto classes do not find its model"}
    return max(found, key=lambda result: OUTCOMES.index(result["outcome"]), default=missing)


def configuration(kind: str) -> PreTrainedConfig:
    """The defaults with SETTINGS, and with windows in text models that have the field and leave it out."""
    fields = SETTINGS.get(kind, {})
    config = AutoConfig.for_model(kind, **fields)
    if getattr(config, "sliding_window", 1) is None:
        return AutoConfig.for_model(kind, **WINDOW | fields)
    return config


def _examine_model(auto: str, config: PreTrainedConfig) -> Result:
    try:
        with torch.device("meta"):
            whole = getattr(transformers, auto).from_config(config, attn_implementation="eager")
    except Exception as error:
        return _failed(error)
    if (objection := next(layers.objections(whole), None)) is not None:
        return {"outcome": REFUSED, "reason": objection}
    if untried := _untried(whole):
        return {
            "outcome": NOT_BUILT,
            "reason": f"no layer of its defaults has a {untried}: name some in tools/zoo.json",
        }
    refused, result = None, _compare(type(whole), whole.config)
    try:
        enable(whole)
    except ValueError as error:
        refused = str(error)
    except Exception as error:
        return result | {"outcome": WRONG, "reason": f"enable raises {type(error).__name__}: {error}"}
    if refused is not None:
        return result | {"outcome": REFUSED, "reason": refused}
    if any(support.features(module) for module in layers.attention_modules(whole)):
        result["features"] = True
    return result


def _untried(model: PreTrainedModel) -> str | None:
    """A class of indexers or of recurrent layers that the file of a decoder has and its layers do not."""
    used = {type(module).__name__ for module in model.modules()}
    files = (vars(sys.modules[type(decoder).__module__]) for decoder in layers.decoders(model))
    found = (name for names in files for name in names if name.endswith("Indexer") or name in recurrent.MIXERS)
    return next((name for name in found if name not in used), None)


def _failed(error: Exception) -> Result:
    return {"outcome": NOT_BUILT, "reason": f"{type(error).__name__}: {error}"}


def _compare(cls: type[PreTrainedModel], config: PreTrainedConfig) -> Result:
    """The outcome of a small model without its self-check."""
    try:
        model = small(cls, config)
        expected = [replicated(model, layout) for layout in LAYOUTS]
    except Exception as error:
        return _failed(error)
    try:
        enable(model, check=False)
        got = [packed(model, layout) for layout in LAYOUTS]
    except Exception as error:
        return {"outcome": WRONG, "reason": f"the call raises {type(error).__name__}: {error}"}
    worst = max(map(difference, got, expected))
    if worst <= BOUND and (wrong := _images(model)) is not None:
        return {"outcome": WRONG, "reason": wrong, "error": worst}
    if worst <= BOUND:
        return {"outcome": EXACT, "error": worst}
    return {"outcome": WRONG, "reason": "logits or gradients differ", "error": worst}


def _images(model: Any) -> str | None:
    """Say what is wrong where a model neither runs images packed nor refuses each input of images, videos and audio."""
    if type(model.config) not in MAPPINGS["AutoModelForImageTextToText"]:
        return None
    if media.families(model):
        return _with_images(model)
    ids, _ = inputs(model, LAYOUTS[0])
    taken = [name for name in layers.arguments(type(model)) if media.MEDIA.search(name)]
    for name in taken or ["pixel_values"]:
        try:
            model(input_ids=ids, dualkv=LAYOUTS[0], **{name: torch.ones(1, 3, 16, 16)})
        except Exception as error:
            if type(error) is ValueError and f"{name} came together with dualkv" in str(error):
                continue
            return f"with {name} the call raises {type(error).__name__}: {error}"
        return f"the call takes {name}"
    return None


def _with_images(model: Any) -> str | None:
    """Say what is wrong with an image in a prompt and one in a response, compared with separate sequences."""
    zoo_images.prepare(model)
    batch, texts = zoo_images.rollouts(model, SEED)
    weight = torch.randn(batch.layout.num_tokens, generator=torch.Generator().manual_seed(SEED))
    rows = batch.unpack_sequences(torch.arange(len(weight)))
    alone, total, seen = [], torch.zeros(()), set[int]()
    for at, (ids, entry) in zip(rows, texts, strict=True):
        logits = model(use_cache=False, **zoo_images.inputs(model, entry, ids)).logits[0]
        first = [i for i, row in enumerate(at.tolist()) if row not in seen]
        total = total + loss(logits[first], weight[at[first]])
        seen.update(at.tolist())
        alone.append(logits.detach())
    expected = alone, gradients(model, total)
    try:
        out = model(input_ids=batch.input_ids, dualkv=batch.layout, **batch.media).logits[0]
    except Exception as error:
        return f"with images the call raises {type(error).__name__}: {error}"
    worst = difference(([out[at].detach() for at in rows], gradients(model, loss(out, weight))), expected)
    return None if worst <= BOUND else f"with images logits or gradients differ, by {worst:.1e}"


@torch.no_grad()
def small(cls: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model in small, in fp32 on the CPU; equal arguments, equal weights."""
    config = shrink(config, sizes=SIZES)
    config.dtype = torch.float32
    zoo_images.fit(config)
    torch.manual_seed(SEED)
    model = cls(config).eval()
    selfcheck.randomize(model, SEED)
    return model


def inputs(model: Any, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """Random token ids [1, T] that are no special ones, and a weight of each row [T]."""
    vocabulary = model.get_input_embeddings().num_embeddings
    draw = torch.Generator().manual_seed(SEED)
    ids = torch.randint(vocabulary // 8, vocabulary, (1, layout.num_tokens), generator=draw)
    return ids, torch.randn(layout.num_tokens, generator=draw)


def loss(logits: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute a loss that is not linear in the logits [T, V]; weight [T]."""
    return (logits.logsumexp(-1) * weight).sum() - (logits[:, 0] * weight).sum()


def gradients(model: nn.Module, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    value.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


Computed = tuple[list[torch.Tensor], dict[str, torch.Tensor]]


def replicated(model: Any, layout: Layout, given: tuple[torch.Tensor, torch.Tensor] | None = None) -> Computed:
    """Logits of each sequence run by itself, and the gradients of a loss in which each packed row counts once.

    given: token ids and weights other than those of :func:`inputs`.
    """
    ids, weight = given or inputs(model, layout)
    logits, total, seen = [], torch.zeros(()), set[int]()
    for path in selfcheck.sequence_rows(layout):
        with indexers.first_of_equals():
            out = model(input_ids=ids[:, path], use_cache=False).logits[0]
        first = [i for i, row in enumerate(path) if row not in seen]
        total = total + loss(out[first], weight[[path[i] for i in first]])
        seen.update(path)
        logits.append(out.detach())
    return logits, gradients(model, total)


def packed(model: Any, layout: Layout) -> Computed:
    """Compute logits and gradients by one packed call of the enabled model."""
    ids, weight = inputs(model, layout)
    out = model(input_ids=ids, dualkv=layout).logits[0]
    return [out[path].detach() for path in selfcheck.sequence_rows(layout)], gradients(model, loss(out, weight))


def difference(got: Computed, expected: Computed) -> float:
    """The largest relative difference of a row of logits or of a parameter's gradient; infinite if some are not finite.

    Gradients that are nearly zero, as those of biases of keys, are compared with a thousandth of the largest.

    Raises:
        ValueError: all expected gradients are zero, so that nothing is compared.
    """
    worst = [0.0]
    for ours, theirs in zip(got[0], expected[0], strict=True):
        worst += ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).nan_to_num(nan=torch.inf).tolist()
    largest = max(float(gradient.norm()) for gradient in expected[1].values())
    if not largest > 0:
        raise ValueError("all gradients are zero")
    for name in got[1].keys() | expected[1].keys():
        ours, theirs = (x.get(name, torch.zeros(())) for x in (got[1], expected[1]))
        worst.append(float(((ours - theirs).norm() / (theirs.norm() + 1e-3 * largest)).nan_to_num(nan=torch.inf)))
    return max(worst)


# ---------------------------------------------------------------- all types
def run(
    kinds: Iterable[str], workers: int, seconds: float = SECONDS, of: Callable[[str], Result] = examine
) -> Iterator[tuple[str, Result]]:
    """(type, result) of each, as they end; each in a process of its own, forked, which is stopped after `seconds`."""
    context = multiprocessing.get_context("fork")
    left, running = list(kinds), dict[Connection, tuple[str, Any, float]]()
    while left or running:
        while left and len(running) < workers:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(of, left[0], theirs))
            process.start()
            theirs.close()
            running[ours] = left.pop(0), process, time.monotonic() + seconds
        ended = wait(running, timeout=1.0)
        for connection, (kind, process, until) in list(running.items()):
            if connection not in ended and time.monotonic() < until:
                continue
            try:
                result = connection.recv() if connection in ended else _stopped(process, seconds)
            except EOFError:
                process.join()
                result = {"outcome": NOT_BUILT, "reason": f"its process ended with exit code {process.exitcode}"}
            process.join()
            del running[connection]
            yield kind, result


def _work(of: Callable[[str], Result], kind: str, to: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (GIBIBYTES << 30,) * 2)
    torch.set_num_threads(1)
    try:
        to.send(of(kind))
    except Exception as error:
        to.send(_failed(error))


def _stopped(process: Any, seconds: float) -> Result:
    process.kill()
    return {"outcome": NOT_BUILT, "reason": f"it takes more than {seconds:.0f} s"}


# ---------------------------------------------------------------- what is said of them
REASONS = {  # of a refusal, by what its sentence says
    "no causal attention that goes through transformers' registry": r"has no causal attention",
    "cross-attention, or layers that are not causal": r"is not causal self-attention",
    "encoder-decoder": r"is an encoder-decoder model",
    "masks with a rule of the model's own": r"makes masks with a rule of its own",
    "recurrent layers of other kinds ({})": r"\((\w+)\) carries a recurrent state",
    "layers of other kinds ({})": r"layer \d+ of \w+ is (\w+), dualkv",
    "head dim {}": r"has head dim (\d+)",
    "decoder layers are not handed keyword arguments": r"is not handed the layout",
    "the self-check finds a difference": r"does not compute packed groups as",
    "calls need inputs that cannot run packed ({})": r"takes no call without ([\w, ]+), which",
    "needs {}": r"(?:requires the|No module named) '?(\w+)",
    "the small copy of the self-check does not run": r"could not be checked",
}


def short(sentence: str) -> str:
    """A reason in a few words."""
    for words, pattern in REASONS.items():
        if (match := re.search(pattern, sentence)) is not None:
            return words.format(*match.groups())
    line = " ".join(sentence.split()).split(". ")[0]
    return line if len(line) <= 160 else f"{line[:157]}..."


def exact_before() -> set[str]:
    """Types that are exact in the record of the installed transformers, or else of the pinned version."""
    records = [filed.read(path) for path in RECORDS]
    record = next((one for one in records if one["transformers"] == transformers.__version__), records[0])
    return {kind for kind, result in record["types"].items() if result["outcome"] == EXACT}


def main(
    kinds: Annotated[list[str] | None, typer.Argument(help="Model types; all if none is named.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    json_to: OptionalJsonPath = None,
) -> None:
    """Compare packed with replicated for every model type. Exit code 1 if a type is wrong, or was exact and is not."""
    before = exact_before()
    start, record, results = time.monotonic(), Record(json_to, gpu=False), dict[str, Result]()
    for kind, result in run(kinds or types(), workers):
        results[kind] = result
        print(kind, *result.values(), sep=" | ", flush=True)
    counts = Counter(result["outcome"] for result in results.values())
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES))
    brief = {
        kind: result | ({"reason": short(result["reason"])} if "reason" in result else {})
        for kind, result in sorted(results.items())
    }
    record.write(
        {
            "transformers": transformers.__version__,
            "workers": workers,
            "seconds": time.monotonic() - start,
            "counts": dict(counts),
            "types": brief,
        }
    )
    lost = sorted(kind for kind, result in results.items() if kind in before and result["outcome"] != EXACT)
    if lost:
        print(f"exact in the record, but not here: {', '.join(lost)}")
    if counts[WRONG] or lost:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
