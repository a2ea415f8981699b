"""GRPO updates of a causal language model, prompts replicated and packed, and how far they differ.

Both ways make the same updates of the same rollouts from the same weights, one way after the other, so each has the
machine and its memory to itself. From the second update on, differences include how far the weights have drifted apart.
Rollouts of several turns are packed as trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from dualkv.data.files import File, load
from dualkv.data.forms import group_or_samples
from dualkv.data.pretrained import pretrained
from dualkv.data.rollouts import draw_rollouts, load_tokenizer, read_rollouts
from dualkv.demo.settings import DemoSettings
from dualkv.demo.update import Update, Way, train
from dualkv.integrations.transformers import recompute_layers
from dualkv.integrations.transformers.batches import longest_sequence
from dualkv.models import in_dtype, load_model
from dualkv.progress import Track, untracked

# What the two ways may differ by: log-probs and loss absolute, gradients relative, by norms over all.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# AdamW's g / |g| turns the sign of a gradient that is all rounding into a full step, so weights differ by more than
# rounding behind the first update: this many times the tolerance from there on. Where a loss hangs on a few tokens, one
# ratio on the other side of the clip range can exceed even that: float64 decides then.
DRIFT = 100
# Real weights round more than random ones, at which the tolerance aims: up to this float64 is asked.
BY_ROUNDING = 1e-3
# In half precision both ways round; float32 decides: the packed way's distance to it in units of the replicated way's.
HALF_PRECISION_RATIO = 2.0


class Differences(NamedTuple):
    """The differences between two updates.

    Attributes:
        logp: largest absolute difference of a response token's log-prob.
        logp_rms: root mean square of these differences.
        loss: absolute.
        gradients: `||a - b|| / ||b||` over all parameters together.
    """

    logp: float
    logp_rms: float
    loss: float
    gradients: float

    @classmethod
    def between(cls, a: Update, b: Update) -> Differences:
        """Measure how far `a` is from `b`."""
        logp = a.logp.double() - b.logp.double()
        pairs = ((a.gradients[name].double(), tensor.double()) for name, tensor in b.gradients.items())
        apart, size = torch.stack([torch.stack([(x - y).norm(), y.norm()]) for x, y in pairs]).norm(dim=0)
        relative = (apart / size).item() if apart else 0.0
        return cls(logp.abs().max().item(), logp.square().mean().sqrt().item(), abs(a.loss - b.loss), relative)

    @property
    def largest(self) -> float:
        """The largest of log-probs, loss and gradients; NaN if one of them is."""
        return max(self.logp, self.loss, self.gradients, key=lambda x: math.inf if math.isnan(x) else x)


@dataclass(frozen=True)
class DemoResult:
    """The result that `dualkv demo` prints.

    Attributes:
        unit: what is counted: "tokens", or "bytes" of text that no tokenizer has encoded.
        ways: "replicated", then "packed", or "tree" for rollouts of several turns.
        updates: how far the other way was from the replicated one, of each update.
        to_truth: in half precision, how far each way was from float32 in the first update.
        exact, verdict: whether the other way agrees with the replicated one, and a sentence that says so.
    """

    settings: DemoSettings
    device: str
    parameters: int
    unit: str
    ways: dict[str, Way]
    updates: list[Differences]
    to_truth: dict[str, Differences]
    exact: bool
    verdict: str


def judge(dtype: str, updates: list[Differences], to_truth: dict[str, Differences]) -> tuple[bool, str]:
    """Whether a way agrees with the replicated one, and a sentence that says so.

    In half precision only the first update is judged, by `to_truth`.
    """
    if dtype in TOLERANCE:
        first, *later = (update.largest for update in updates)
        allowed, drift = TOLERANCE[dtype], TOLERANCE[dtype] * DRIFT
        said = f"largest difference {first:.1e} (allowed {allowed:.0e}) in the first update"
        if later:
            said += f", {max(later):.1e} (allowed {drift:.0e}) after it"
        return first <= allowed and all(x <= drift for x in later), f"{said}, in {dtype}"
    replicated, other = to_truth.values()
    log_probs = other.logp_rms / max(replicated.logp_rms, 1e-30)
    gradients = other.gradients / max(replicated.gradients, 1e-30)
    return log_probs <= HALF_PRECISION_RATIO and gradients <= HALF_PRECISION_RATIO, (
        f"distance from float32, in units of the replicated way's: log-probs {log_probs:.2f}, "
        f"gradients {gradients:.2f} (allowed {HALF_PRECISION_RATIO})"
    )


def run_demo(settings: DemoSettings, track: Track = untracked, file: File | None = None) -> DemoResult:
    """Run the updates both ways; `file` is `settings.rollouts`, if :func:`dualkv.data.files.load` has read it already.

    Where float32 exceeds its allowance, in the first update no further than BY_ROUNDING, the same updates in float64
    decide: rounding shrinks with the dtype, a mistake does not.
    """
    if file is None and settings.rollouts is not None:
        file = load(settings.rollouts, group_or_samples)
    packaged = settings.model if "gguf_file" in pretrained(settings.model) else None
    tokenizer, device = load_tokenizer(settings.tokenizer or packaged), torch.device(settings.where)
    model = load_model(settings.model, getattr(torch, settings.dtype), device, settings.seed)
    initial = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    vocab_size = model.get_output_embeddings().weight.shape[0]
    if file is None:
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(f"tokenizer has {tokenizer.vocab_size} tokens, expected at most the model's {vocab_size}")
        sizes = settings.groups, settings.prompt_len, settings.responses, settings.response_len, settings.turns
        rollouts = draw_rollouts(tokenizer, *sizes, settings.seed)
    else:
        rollouts = read_rollouts(file, tokenizer, vocab_size)
    if settings.gradient_checkpointing:
        recompute_layers(model)
    ways, made = {}, {}
    for way in ("replicated", "packed" if rollouts.masks is None else "tree"):
        model.load_state_dict(initial)
        ways[way], made[way] = train(model, way, rollouts, settings, track)
    updates = [Differences.between(*pair) for pair in zip(*reversed(made.values()), strict=True)]
    to_truth = {}
    if settings.dtype not in TOLERANCE:
        model.load_state_dict(initial)
        in_dtype(model, torch.float32)
        recompute_layers(model)
        once = replace(settings, steps=1, budget=longest_sequence(rollouts))
        _, [truth] = train(model, "replicated", rollouts, once, track)
        to_truth = {way: Differences.between(found[0], truth) for way, found in made.items()}
    exact, verdict = judge(settings.dtype, updates, to_truth)
    if settings.dtype == "float32" and not exact and updates[0].largest <= BY_ROUNDING:
        wider = run_demo(replace(settings, dtype="float64"), track, file)
        exact, verdict = wider.exact, f"{verdict}; which float64 decides: {wider.verdict}"
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    unit = "bytes" if getattr(tokenizer, "used", False) else "tokens"
    return DemoResult(settings, where, model.num_parameters(), unit, ways, updates, to_truth, exact, verdict)
