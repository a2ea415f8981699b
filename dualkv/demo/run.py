"""GRPO updates of a causal language model in both ways, prompts replicated and prompts packed, and their differences.

Rollouts of several turns are also packed as trees, a third way: each shared turn once. What follows holds for it too.

What is compared and how:

- Both ways start from the same weights and make the same number of optimizer updates on the same rollouts.
- Live rollouts of an update are sampled by the policy of the replicated way. The packed way samples with its own policy
  and the same random numbers too, so each way has its own rewards; its samples are only rewarded, not trained on, since
  log-probs can be compared number by number on the same tokens alone.
- Before the first update both policies are the same one and share its samples.
- The ways run one after the other, never side by side, so each has the machine and its memory to itself.
- Differences are taken over all updates; after the first one they include how far the weights have drifted apart.
- With `check` a third computation of the first update, replicated and in a wider dtype, says how far each way is from
  the truth.
"""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dualkv.data.files import File, group_or_samples, load
from dualkv.data.pretrained import pretrained
from dualkv.data.rollouts import Rollouts, load_tokenizer, plain_text_reward, read_rollouts, topic_prompts
from dualkv.demo.pictures import check_config, with_pictures
from dualkv.demo.sampling import sample_responses, sample_turns
from dualkv.demo.settings import DemoSettings
from dualkv.demo.update import WAYS, Gradients, PolicyTrainer, longest_sequence, replicated_tokens_of_one_group
from dualkv.grpo import ALGORITHMS
from dualkv.integrations.metrics import furthest_ratio, log_ratios
from dualkv.integrations.transformers import recompute_layers
from dualkv.models import in_dtype, load_model
from dualkv.progress import Track, untracked

GRPO = ALGORITHMS["grpo"]
# What the two ways may differ by: log-probs and loss absolute, gradients and weights relative, by norms over all.
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
# AdamW's g / |g| turns the sign of a gradient that is all rounding into a full step, so weights differ by more than
# rounding behind the first update already, and later updates start from such weights: this many times the tolerance
# there. What a first update computed before its step is held to the tolerance itself. Where a loss hangs on a few
# tokens, one ratio on the other side of the clip range can exceed even that: float64 decides then (`run_demo`).
DRIFT = 100
# Real weights round more than random ones, at which the tolerance aims: up to this float64 is asked.
BY_ROUNDING = 1e-3
# In half precision both ways round; the check's truth decides: the packed way's distance to it in units of the other's.
HALF_PRECISION_RATIO = 2.0


@dataclass(frozen=True)
class Differences:
    """The differences between two updates.

    Attributes:
        logp: largest absolute difference of a response token's log-prob.
        logp_rms: root mean square of these differences.
        loss: absolute.
        gradients: `||a - b|| / ||b||` over all parameters together.
        gradients_worst_tensor: the same norm within one parameter tensor, the largest.
        weights, weights_worst_tensor: the same of the weights after the update; None where they are not compared.
    """

    logp: float
    logp_rms: float
    loss: float
    gradients: float
    gradients_worst_tensor: float
    weights: float | None = None
    weights_worst_tensor: float | None = None

    @property
    def before_step(self) -> float:
        """The largest of log-probs, loss and gradients; NaN if one of them is."""
        return _largest(self.logp, self.loss, self.gradients)

    @property
    def largest(self) -> float:
        """The largest of these and of the weights; NaN if one of them is."""
        return _largest(self.before_step, self.weights or 0.0)


def _largest(*values: float) -> float:
    return max(values, key=lambda x: float("inf") if math.isnan(x) else x)


Weights = dict[str, torch.Tensor]
CPU = torch.device("cpu")


def differences(
    a: Gradients, b: Gradients, weights: tuple[Weights, Weights] | None = None, device: torch.device = CPU
) -> Differences:
    """Measure how far `a` is from `b`, and `weights[0]` from `weights[1]`, computed on `device`."""
    logp = a.logp.double() - b.logp.double()
    gradients, worst = _relative(a.of, b.of, device)
    return Differences(
        logp.abs().max().item(),
        logp.square().mean().sqrt().item(),
        abs(a.loss - b.loss),
        gradients,
        worst,
        *(_relative(*weights, device) if weights else ()),
    )


def _relative(a: Weights, b: Weights, device: torch.device) -> tuple[float, float]:
    """||a - b|| / ||b|| over all tensors together, and the largest within one tensor."""
    norms = []
    for name, tensor in b.items():
        wide = tensor.to(device).double()
        norms.append(torch.stack([(a[name].to(device).double() - wide).norm(), wide.norm()]))
    apart, size = torch.stack(norms).cpu().unbind(1)
    each = torch.where(apart == 0, 0.0, apart / size)
    return (apart.norm() / size.norm()).item() if apart.any() else 0.0, each.max().item()


@dataclass
class WayResult:
    """One way's run.

    Attributes:
        tokens: rows that the model computes for one pass over the rollouts, of each update.
        micro_batches: of each update.
        seconds: by phase, over all updates (see :class:`PolicyTrainer`).
        peak_bytes, memory_method: see :class:`dualkv.demo.measure.PeakMemory`.
        rewards: mean reward of the samples of the policy after 0, 1, ... updates; empty for rollouts from a file.
        losses, metrics: of each update.
        ratio: with `batch_invariant`, of the first update's log-probs to the old ones, the one furthest from 1.
    """

    tokens: list[int] = field(default_factory=list)
    micro_batches: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    memory_method: str = ""
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    ratio: float | None = None

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class DemoResult:
    """The result that `dualkv demo` prints.

    Attributes:
        settings: that made it.
        device: where it ran.
        threads: of PyTorch on the CPU.
        parameters: of the model.
        response_tokens: of each update.
        ways: "replicated" and "packed"; for rollouts of several turns "tree" too.
        updates: how far each of the others was from the replicated way, of each update.
        to_truth: how far each way was from a wider dtype in the first update; empty without a check.
        same_samples: responses after the first update that the others' policies sampled as the replicated one's, and of
            how many; None for rollouts from a file.
        exact: whether all agree with the replicated way; None: not judged.
        verdict: the same as a sentence.
        unit: what is counted: "tokens", or "bytes" of text that no tokenizer has encoded.
    """

    settings: DemoSettings
    device: str
    threads: int
    parameters: int
    response_tokens: list[int]
    ways: dict[str, WayResult]
    updates: dict[str, list[Differences]]
    to_truth: dict[str, Differences]
    same_samples: tuple[int, int] | None
    exact: bool | None
    verdict: str
    unit: str = "tokens"

    def as_dict(self) -> dict[str, Any]:
        """Convert to a dictionary for JSON."""
        result = asdict(self)
        for name, way in self.ways.items():
            result["ways"][name]["total_seconds"] = way.total_seconds
        return result


def judge(
    dtype: str, updates: list[Differences], to_truth: dict[str, Differences], way: str = "packed"
) -> tuple[bool | None, str]:
    """Whether a way agrees with the replicated one, and a sentence that says so.

    In half precision only the first update is judged, by `to_truth`.
    """
    if dtype in TOLERANCE:
        first, later = TOLERANCE[dtype], TOLERANCE[dtype] * DRIFT
        before_step, drift = (
            updates[0].before_step,
            _largest(*(u.largest for u in updates[1:]), updates[0].weights or 0.0),
        )
        behind = "in its weights and after it" if updates[1:] else "in its weights"
        return before_step <= first and drift <= later, (
            f"largest difference {before_step:.1e} (allowed {first:.0e}) in the first update, "
            f"{drift:.1e} (allowed {later:.0e}) {behind}, in {dtype}"
        )
    if not to_truth:
        return None, f"{dtype} rounds both ways: --check measures each way's distance from float32"
    packed, replicated = to_truth[way], to_truth["replicated"]
    names = {"log-probs": "logp_rms", "gradients": "gradients"}
    ratios = {k: getattr(packed, name) / max(getattr(replicated, name), 1e-30) for k, name in names.items()}
    return all(r <= HALF_PRECISION_RATIO for r in ratios.values()), (
        "distance from float32, in units of the replicated way's: "
        + ", ".join(f"{name} {r:.2f}" for name, r in ratios.items())
        + f" (allowed {HALF_PRECISION_RATIO})"
    )


# ---------------------------------------------------------------------- the run
def run_demo(settings: DemoSettings, track: Track = untracked, file: File | None = None) -> DemoResult:
    """Runs the updates both ways; see the module's docstring.

    Where float32 exceeds its allowance, in the first update no further than BY_ROUNDING, the same updates in float64
    decide: rounding shrinks with the dtype, a mistake does not.

    Args:
        settings: of the run.
        track: shows progress.
        file: `settings.rollouts`, if :func:`dualkv.data.files.load` has read it already.

    Raises:
        ValueError: settings or rollouts that do not fit.
        OSError: files that cannot be read.
    """
    if file is None and settings.rollouts is not None:
        file = load(settings.rollouts, group_or_samples)
    result = _Demo(settings, track, file).run()
    first = [updates[0].before_step for updates in result.updates.values()]
    if settings.dtype != "float32" or result.exact is not False or not _largest(*first) <= BY_ROUNDING:
        return result
    wider = _Demo(replace(settings, dtype="float64"), track, file).run()
    return replace(result, exact=wider.exact, verdict=f"{result.verdict}; which float64 decides: {wider.verdict}")


@dataclass
class _Trace:
    """The results of one way for the comparison, one entry for each update."""

    gradients: list[Gradients] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    samples: list[Rollouts] = field(default_factory=list)


class _Demo:
    def __init__(self, settings: DemoSettings, track: Track, file: File | None) -> None:
        self.settings, self.track = settings, track
        tokenizer = settings.tokenizer or (settings.model if "gguf_file" in pretrained(settings.model) else None)
        self.tokenizer = load_tokenizer(tokenizer)
        if file is not None and tokenizer is not None:  # errors of its texts come before the model is loaded
            read_rollouts(file, self.tokenizer, None)
        self.model = load_model(settings.model, settings.torch_dtype, settings.torch_device, settings.seed)
        self.initial = {name: value.to("cpu", copy=True) for name, value in self.model.state_dict().items()}
        if settings.gradient_checkpointing:
            recompute_layers(self.model)
        vocab_size = self.model.get_output_embeddings().weight.shape[0]
        self.given: Rollouts | None = None
        self.prompts: list[torch.Tensor] = []
        self.media: list[dict[str, torch.Tensor]] | None = None
        self.environment: list[list[torch.Tensor]] = []
        self.shown: list[list[dict[str, torch.Tensor]]] | None = None  # pictures of its answers
        if file is not None:
            self.given = read_rollouts(file, self.tokenizer, vocab_size)
        elif self.tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer has {self.tokenizer.vocab_size} tokens and the model a vocabulary of {vocab_size}: "
                "give the tokenizer that belongs to the model"
            )
        else:
            self.prompts = topic_prompts(self.tokenizer, settings.prompt_len, settings.groups, settings.seed)
            if getattr(self.model.config, "image_token_id", None) is not None:
                check_config(self.model.config)
                self.prompts, self.media = with_pictures(self.prompts, self.model.config, settings.seed)
            if settings.turns > 1:
                answers = settings.turns - 1
                texts = topic_prompts(
                    self.tokenizer, settings.response_len, settings.groups * answers, settings.seed + 1
                )
                cuts = [slice(g * answers, (g + 1) * answers) for g in range(settings.groups)]
                if self.media is not None:
                    texts, shown = with_pictures(texts, self.model.config, settings.seed + 1)
                    self.shown = [shown[cut] for cut in cuts]
                self.environment = [texts[cut] for cut in cuts]
        trees = self.environment or (self.given is not None and self.given.masks is not None)
        self.ways = [way for way in WAYS if way != "tree" or trees]

    def run(self) -> DemoResult:
        settings = self.settings
        ways, traces = {}, {}
        trained_on: list[Rollouts] = []
        for way in self.ways:
            ways[way], traces[way] = self.run_way(way, trained_on)
            trained_on = trained_on or traces[way].samples
        base, others = traces["replicated"], self.ways[1:]
        device = settings.torch_device
        updates = {
            way: [
                differences(x, y, (v, w), device)
                for x, y, v, w in zip(
                    traces[way].gradients, base.gradients, traces[way].weights, base.weights, strict=True
                )
            ]
            for way in others
        }
        to_truth = {}
        if settings.dtype not in TOLERANCE if settings.check is None else settings.check:
            truth = self.truth(self.given or trained_on[0])
            to_truth = {way: differences(trace.gradients[0], truth, device=device) for way, trace in traces.items()}
        verdicts = {way: judge(settings.dtype, updates[way], to_truth, way) for way in others}
        same = None
        if self.given is None:
            pairs = [
                (x, y)
                for way in others
                for mine, theirs in zip(traces[way].samples[1:], base.samples[1:], strict=True)  # the first are shared
                for x, y in zip(mine.flat_responses, theirs.flat_responses, strict=True)
            ]
            same = sum(torch.equal(x, y) for x, y in pairs), len(pairs)
        judged = [exact for exact, _ in verdicts.values()]
        sentences = [f"{way}: {text}" if len(others) > 1 else text for way, (_, text) in verdicts.items()]
        return DemoResult(
            settings=settings,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            threads=torch.get_num_threads(),
            parameters=self.model.num_parameters(),
            response_tokens=[len(g.logp) for g in base.gradients],
            ways=ways,
            updates=updates,
            to_truth=to_truth,
            same_samples=same,
            exact=None if None in judged else all(judged),
            verdict="; ".join(dict.fromkeys(sentences)),
            unit="bytes" if getattr(self.tokenizer, "used", False) else "tokens",
        )

    def run_way(self, way: str, trained_on: list[Rollouts]) -> tuple[WayResult, _Trace]:
        """All updates of one way from the initial weights, on `trained_on` or, if empty, on its own samples."""
        settings, model = self.settings, self.model
        model.load_state_dict(self.initial)
        # Before the first update the policy is the reference; a copy is needed only if there is a second one.
        reference = copy.deepcopy(model) if settings.steps > 1 else model
        first = self.given or (trained_on[0] if trained_on else self.sample(way, 0))
        trainer = PolicyTrainer(
            model,
            way,
            GRPO,
            settings.budget or replicated_tokens_of_one_group(first),
            settings.learning_rate,
            reference,
            settings.deterministic,
            self.track,
            settings.batch_invariant,
        )
        result, trace = WayResult(), _Trace()
        prepared = None
        for step in range(settings.steps):
            if self.given is None:
                trace.samples.append(first if step == 0 else self.sample(way, step))
            if prepared is None or self.given is None:
                rollouts = self.given or (trained_on or trace.samples)[step]
                prepared = trainer.prepare(rollouts)
            gradients = trainer.gradients(prepared)
            if step == 0 and trainer.batch_invariant and prepared.old_logp is not None:
                old = prepared.old_logp.cpu()
                result.ratio = furthest_ratio(log_ratios(gradients.logp, old, torch.ones_like(old)))
            trace.gradients.append(gradients)
            trace.weights.append(trainer.step())
            result.tokens.append(sum(b.tokens for b in prepared.micro_batches))
            result.micro_batches.append(len(prepared.micro_batches))
            result.losses.append(gradients.loss)
            result.metrics.append(gradients.metrics)
        if self.given is None:
            trace.samples.append(self.sample(way, settings.steps))
        result.rewards = [samples.mean_reward for samples in trace.samples]
        result.seconds = dict(trainer.seconds)
        result.peak_bytes, result.memory_method = trainer.memory.bytes, trainer.memory.method
        return result, trace

    def sample(self, way: str, step: int) -> Rollouts:
        """Live rollouts of the policy as it is; the random numbers depend on seed and step, not on the way."""
        settings, prompts, masks, shown_to = self.settings, self.prompts, None, None
        vocab_size, seed = self.tokenizer.vocab_size, settings.seed + step
        sizes, shown = (settings.responses, settings.response_len, vocab_size), (self.track, f"{way}: sampling")
        if self.environment:
            responses, masks, shown_to = sample_turns(
                self.model, prompts, self.environment, *sizes, seed, *shown, self.media, self.shown
            )
        else:
            responses = sample_responses(self.model, prompts, *sizes, self.tokenizer.eos_id, seed, *shown, self.media)
        rollouts = Rollouts(prompts, responses, [], masks, self.media, shown_to)
        texts = [r[mask].tolist() for r, mask in zip(rollouts.flat_responses, rollouts.flat_masks, strict=True)]
        rewards = iter([plain_text_reward(self.tokenizer.decode(text)) for text in texts])
        return replace(rollouts, rewards=[list(itertools.islice(rewards, n)) for n in rollouts.group_sizes])

    def truth(self, rollouts: Rollouts) -> Gradients:
        """Loss and gradients of the first update in a wider dtype, replicated, one sequence at a time."""
        settings = self.settings
        self.model.load_state_dict(self.initial)
        model = self.model
        in_dtype(model, torch.float64 if settings.dtype in TOLERANCE else torch.float32)
        recompute_layers(model)
        # Before the first update the policy is the reference too: the KL term is 0, and so is its gradient.
        objective = replace(GRPO, kl_coef=0.0)
        trainer = PolicyTrainer(model, "replicated", objective, longest_sequence(rollouts), settings.learning_rate)
        return trainer.gradients(trainer.prepare(rollouts, only_first=True))
