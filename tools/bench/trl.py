"""One batch of TRL's GRPO, forward and backward, several ways:

    python -m tools.bench.trl --model qwen3-0.6b -n 16 -p 4096 -r 512 --attention flash_attention_4 --json trl.json
    python -m tools.bench.trl --model qwen3-8b --layers 8 --trace trace-search-0-n40 --json traces.json
    python -m tools.bench.trl --model qwen3-8b --layers 8 -n 16 -p 24576 -r 2048 --shortest 2048 --micro-batch 4 \
        --way split --way walked --json walk.json

- padded: `trl.GRPOTrainer`, every response behind its own copy of the prompt;
- tree: the prefix tree of `trl.experimental.async_grpo`, whose trainer samples with vLLM; here its rows, its attention
  and its head, with a loss of the same form. Its attention is FlashAttention-3 from Hugging Face's hub, and
  FlashAttention-4 where that package is what is installed;
- packed: `dualkv.integrations.trl.GRPOTrainer`;
- fast: the same with `fast=True`;
- split: packed in micro-batches of `--micro-batch` responses, each with the prompt;
- walked: the same with `walk=True`, planned for 1.1 times the memory of "split", which runs before it, or for as many
  times as "walked:1.3" says.

Prompts, responses and weights are random; responses have between half (or `--shortest`) and all of the given length.
`--trace` takes the sequences of a trace of `dualkv trees` instead, a prompt ending where the policy first writes, with
tool outputs in TRL's mask of them. Gradients on the traces of `--distance` are compared with those of the padded way in
fp32. Each way starts from the same weights, which no step changes. Making the tree's rows is timed apart: TRL does it
ahead of the step, while the others make theirs in each step.
"""

from __future__ import annotations

import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, cast

import datasets
import torch
import trl
import typer
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl.experimental.async_grpo import packing
from trl.trainer.utils import add_fused_lm_head

from dualkv.bench import traces
from dualkv.bench.run import in_words
from dualkv.bench.trees import Found
from dualkv.data.gain import Gain
from dualkv.demo.measure import PeakMemory
from dualkv.demo.settings import DTYPES
from dualkv.integrations.transformers import recompute_layers
from dualkv.integrations.trl import GRPOTrainer
from dualkv.models import CONFIGS
from tools.bench import harness
from tools.bench.record import JsonPath, Record

WAYS = ("padded", "tree", "packed", "fast", "split", "walked")
# Forward and backward: returns loss, log-probs of response tokens, rows of the model.
Step = Callable[[], tuple[torch.Tensor, torch.Tensor, int]]


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement; `trace` takes the place of the groups."""

    model: harness.Model = "qwen3-0.6b"
    groups: Annotated[int, typer.Option(help="Prompts of the micro-batch.")] = 1
    responses: harness.Responses = 16
    prompt_len: harness.PromptLen = 4096
    response_len: harness.ResponseLen = 512
    shortest: Annotated[int | None, typer.Option(help="Fewest tokens of a response; half by default.")] = None
    micro_batch: Annotated[int | None, typer.Option(help="Responses at once of the way split.")] = None
    ways: Annotated[list[str] | None, typer.Option("--way", help=f"Of {', '.join(WAYS)}; repeat it for more.")] = None
    attention: Annotated[str, typer.Option(help="transformers' attention of TRL's padded rows.")] = "sdpa"
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16"
    keep: Annotated[str | None, typer.Option(help="Of the way fast: of `recompute_layers`.")] = None
    steps: Annotated[int, typer.Option(help="To measure, after one that is not.")] = 2
    layers: harness.AllLayers = None
    trace: str | None = None
    distance: bool = False


@dataclass(frozen=True)
class Rollouts:
    """prompts B times [P_i], responses B times [R_i] with masks of the tokens that count, advantages [B]."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    masks: list[torch.Tensor]
    advantages: torch.Tensor

    @property
    def tokens(self) -> int:
        """The number of tokens of all responses that count."""
        return sum(int(mask.sum()) for mask in self.masks)


def make_rollouts(s: Settings) -> Rollouts:
    """Groups one after another."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, n = CONFIGS[s.model]["vocab_size"], s.groups * s.responses
    if s.trace is not None:
        found = traces.split(s.trace, vocabulary)
        of_prompts, of_responses, of_masks = ([torch.from_numpy(one[i]) for one in found] for i in range(3))
        return Rollouts(of_prompts, of_responses, of_masks, torch.randn(len(found), generator=generator))
    prompts = torch.randint(vocabulary, (s.groups, s.prompt_len), generator=generator)
    shortest = s.response_len // 2 if s.shortest is None else s.shortest
    lens = torch.randint(shortest, s.response_len + 1, (n,), generator=generator)
    lens[0] = s.response_len
    responses = [torch.randint(vocabulary, (int(r),), generator=generator) for r in lens]
    masks = [torch.ones_like(r) for r in responses]
    repeated = list(prompts.repeat_interleave(s.responses, 0))
    return Rollouts(repeated, responses, masks, torch.randn(n, generator=generator))


def of_trainer(
    cls: Callable[..., trl.GRPOTrainer],
    model: Any,
    s: Settings,
    rollouts: Rollouts,
    micro_batch: int | None = None,
    walk_bytes: float | None = None,
) -> Step:
    """A step of a trainer, which gets what its generation would have left, of so many sequences at once, by default
    all; `walk_bytes` is what a walk takes as the memory that is free."""
    with tempfile.TemporaryDirectory() as folder:  # TRL wants one; nothing is written there
        trainer = cls(
            model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=folder,
                bf16=model.dtype == torch.bfloat16,
                use_cpu=model.device.type == "cpu",
                per_device_train_batch_size=len(rollouts.responses),
                num_generations=len(rollouts.responses) if s.trace else s.responses,
                report_to="none",
            ),
            **stand_ins(),
        )
    trainer.current_gradient_accumulation_steps = 1
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    inputs = {
        "prompt_ids": pad(rollouts.prompts, padding_side="left"),
        "prompt_mask": pad([torch.ones_like(p) for p in rollouts.prompts], padding_side="left"),
        "completion_ids": pad(rollouts.responses),
        "completion_mask": pad([torch.ones_like(r) for r in rollouts.responses]),
        "tool_mask": pad(rollouts.masks, padding_value=1),
        "advantages": rollouts.advantages,
        "num_items_in_batch": torch.tensor(rollouts.tokens),
    }
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    padded = inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
    size = micro_batch or len(rollouts.responses)
    kept: list[torch.Tensor] = []
    if walk_bytes is not None:
        trainer._walks._bytes = lambda: walk_bytes
    own = trainer._get_per_token_logps_and_entropies

    def keep(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        kept.append(found[0].detach())
        return found

    trainer._get_per_token_logps_and_entropies = keep

    def step() -> tuple[torch.Tensor, torch.Tensor, int]:
        kept.clear()
        trainer._metrics["train"].clear()
        losses = []
        for start in range(0, len(rollouts.responses), size):
            some = {name: x[start : start + size] if x.dim() else x for name, x in inputs.items()}
            loss = trainer._compute_loss(model, some)
            loss.backward()
            losses.append(loss.detach())
        rows = trainer._metrics["train"].get("dualkv/tokens_packed", [padded])
        return torch.stack(losses).sum(), torch.cat(kept)[mask], int(sum(rows))

    return step


class FlashAttention4:
    """FlashAttention-4 called as TRL calls FlashAttention-3."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        cu_q: Any,
        cu_k: Any,
        max_q: int,
        max_k: int,
        softmax_scale: float,
        causal: bool,
        **_: Any,
    ) -> Any:
        lens = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
        call = import_module("flash_attn.cute").flash_attn_varlen_func
        return call(q, k, v, **lens, softmax_scale=softmax_scale, causal=causal)


def stand_ins() -> dict[str, Any]:
    """Arguments of trainers that nothing here uses."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    return {"train_dataset": datasets.Dataset.from_dict({"prompt": [""]}), "processing_class": tokenizer}


def check_names(model: str, dtype: str, names: Sequence[str]) -> None:
    """Raises typer.BadParameter for an unknown model, dtype or trace."""
    if model not in CONFIGS:
        raise typer.BadParameter(f"{model!r} is none of {', '.join(CONFIGS)}")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(DTYPES)}")
    if unknown := [name for name in names if traces.parse(name) is None]:
        raise typer.BadParameter(f"{unknown[0]!r} is no trace")


def of_tree(model: Any, rollouts: Rollouts, seconds: dict[str, float]) -> Step:
    """A step on the rows of TRL's prefix tree; `seconds` gets the time of making them."""
    samples = [
        {
            "input_ids": torch.cat([prompt, response]),
            "completion_mask": torch.cat([torch.zeros_like(prompt), mask]),
            "old_log_probs": torch.zeros(len(prompt) + len(response)),
            "advantage": float(advantage),
            "group_id": 0,
        }
        for prompt, response, mask, advantage in zip(
            rollouts.prompts, rollouts.responses, rollouts.masks, rollouts.advantages, strict=True
        )
    ]
    start = time.perf_counter()
    row = packing.TreeRow()
    for sample in samples:
        row.add(sample)
    tree = {name: tensor.to(model.device) for name, tensor in row.pack().items()}
    seconds["making_rows"] = time.perf_counter() - start
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    longest = tree["tree_max_seqlens"].tolist()
    inputs = {name: tree[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    inputs |= {name: tree[name][None] for name in ("input_ids", "position_ids", "shift_labels")}

    def step() -> tuple[torch.Tensor, torch.Tensor, int]:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.dtype == torch.bfloat16):
            outputs = model(**inputs, tree_max_seqlen_q=longest[0], tree_max_seqlen_k=longest[1], fused_lm_head=True)
        logp = outputs.log_probs.flatten()[tree["token_index"]]
        loss = -((logp - logp.detach()).exp() * tree["advantages"]).sum() / len(logp)
        loss.backward()
        return loss.detach(), logp.detach(), len(tree["shift_labels"])

    return step


def make_step(
    way: str, s: Settings, rollouts: Rollouts, device: torch.device, exact: bool = False, split_bytes: float = 0.0
) -> tuple[Any, Step, dict[str, float]]:
    """Model and step of a way, and the time of making its rows. `exact` is in fp32, of weights rounded to the dtype;
    `split_bytes` is what "split" took beside weights, for "walked"."""
    model = harness.make_model(harness.make_config(s.model, s.layers), s.dtype, device)
    if exact:
        model.float()
    model.set_attn_implementation(packing.TREE_ATTENTION if way == "tree" else "sdpa" if exact else s.attention)
    seconds: dict[str, float] = {}
    if way == "tree":
        step = of_tree(model, rollouts, seconds)
    elif way.startswith("walked"):
        weights = sum(p.nbytes for p in model.parameters())
        free = float(way.partition(":")[2] or 1.1) * (weights + split_bytes) - 2 * weights
        step = of_trainer(partial(GRPOTrainer, walk=True), model, s, rollouts, None, free)
    else:
        cls = trl.GRPOTrainer if way == "padded" else partial(GRPOTrainer, fast=way == "fast")
        step = of_trainer(cls, model, s, rollouts, s.micro_batch if way == "split" else None)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if s.keep is not None and way == "fast":
        recompute_layers(model, keep=s.keep)
    return model, step, seconds


def measure(s: Settings, device: torch.device) -> Iterator[dict[str, Any]]:
    """Figures of each way by its name, after each of them; of a way that failed, why."""
    packing.register_tree_attention()
    if find_spec("kernels") is None:
        packing._flash_attn = lambda: FlashAttention4
    rollouts, found = make_rollouts(s), dict[str, Any]()
    exact = gradients_in_fp32(s, rollouts, device) if s.distance else {}
    reference: torch.Tensor | None = None
    for way in s.ways or ():
        gc.collect()
        try:
            split = found.get("split", {}).get("peak_gib") or 0.0
            found[way], logp = of_way(way, s, rollouts, device, exact, split * 2**30)
            reference = logp if reference is None else reference
            found[way]["mean_log_prob_difference_to_first"] = (logp - reference).abs().mean().item()
        except Exception as error:  # out of memory, say: the others are still worth recording
            found[way] = {"error": in_words(error)}
        yield found


def gradients_in_fp32(s: Settings, rollouts: Rollouts, device: torch.device) -> dict[str, torch.Tensor]:
    """Compute the gradients of the padded way in fp32."""
    model, step, _ = make_step("padded", s, rollouts, device, True)
    step()
    return harness.gradients_of(model)


def of_way(
    way: str, s: Settings, rollouts: Rollouts, device: torch.device, exact: dict[str, torch.Tensor], split_bytes: float
) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures and log-probs of a way; with `exact` the distance of its gradients from those, by norms."""
    model, step, seconds = make_step(way, s, rollouts, device, split_bytes=split_bytes)
    peak = PeakMemory(device)
    each = []
    for _ in range(s.steps + 1):
        model.zero_grad(set_to_none=True)
        with peak.measured():
            took, (loss, logp, rows) = harness.seconds_of(step)
        each.append(took)
    gradients = harness.gradients_of(model)
    found = {
        "rows": rows,
        "seconds": {**seconds, "first": each[0], "each": each[1:], "median": statistics.median(each[1:])},
        "peak_gib": None if peak.bytes is None else peak.bytes / 2**30,
        "loss": loss.item(),
        "gradient_norm": torch.stack([g.float().norm() for g in gradients.values()]).norm().item(),
    }
    if exact:
        found["gradients_from_fp32"] = harness.apart(gradients, exact)
    return found, logp


@harness.takes(Settings)
def main(
    json_to: JsonPath,
    s: Settings,
    trace: Annotated[list[str] | None, typer.Option(help="Their sequences, in place of groups.")] = None,
    distance: Annotated[
        list[str] | None, typer.Option(help="Further traces, first, whose gradients are compared with fp32.")
    ] = None,
) -> None:
    """Measure forward and backward of one micro-batch; print and write the figures."""
    names = list(dict.fromkeys([*(distance or []), *(trace or [])]))
    check_names(s.model, s.dtype, names)
    ways = list(WAYS[:3]) if s.ways is None else s.ways
    kinds = ["walked" if way.startswith("walked:") else way for way in ways]
    if not set(kinds) <= set(WAYS):
        raise typer.BadParameter(f"--way is {', '.join(ways)}, expected some of {', '.join(WAYS)}")
    if "split" in ways and s.micro_batch is None:
        raise typer.BadParameter("--way split is given without --micro-batch")
    if "walked" in kinds and "split" not in kinds[: kinds.index("walked")]:
        raise typer.BadParameter("--way walked is given without --way split before it, whose memory is its limit")
    settings = replace(s, ways=ways)
    logging.basicConfig()
    logging.getLogger("dualkv").setLevel(logging.INFO)  # walks log what they measure and plan
    device = harness.best_device()
    record = Record(json_to, device.type == "cuda")
    about = {"trl": trl.__version__, "settings": asdict(settings)}
    if not names:
        for figures in measure(settings, device):
            record.write({**about, "ways": figures}, list(figures.items())[-1])
        return
    found: dict[str, Any] = {}
    for name in names:
        shared = Found.of_trace(cast(traces.Trace, traces.parse(name))).shared
        found[name] = {"share_ratio": Gain.of(shared).ratio, "ways": {}}
        try:
            for figures in measure(replace(settings, trace=name, distance=name in (distance or [])), device):
                found[name]["ways"] = figures
                record.write({**about, "traces": found}, {name: list(figures.items())[-1]})
        except Exception as error:  # out of memory, say: the others are still worth recording
            found[name]["error"] = in_words(error)
            record.write({**about, "traces": found}, {name: found[name]["error"]})
        gc.collect()


if __name__ == "__main__":
    typer.run(main)
