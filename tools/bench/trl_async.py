"""A micro-batch of TRL's asynchronous GRPO, forward and backward, by TRL's trainer and by DualKV's:

    python -m tools.bench.trl_async --layers 8 --trace trace-grpo-0 --trace trace-tau2-0-n8-t2 --json trl-async.json
    python -m tools.bench.trl_async --model gpt-oss-20b --layers 4 --trace trace-tau2-0-n8-t2 --json sinks.json

Both are the trainers' own `training_step` on the prefix tree of TRL's collator. The trainers alternate in one process,
each for at least `--seconds` at a time, because the GPU's clock follows the power of the last seconds. TRL's attention
is FlashAttention-3 from Hugging Face's hub, and FlashAttention-4 where that package is what is installed. TRL refuses
some models; of these the record has what TRL says, and DualKV's time.

Weights and tokens are random. The old log-probs of the loss are those of the first trainer, as vLLM's would be close to
the policy's. Log-probs of trained tokens and gradients are compared before the turns; on the traces of `--distance`
also with the stock model's in fp32 on every path of the tree by itself, beside which stands the same in `--dtype` for
models that TRL refuses.
"""

from __future__ import annotations

import gc
import itertools
import os
import queue
import statistics
import tempfile
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # read when its module is imported

import numpy as np
import torch
import trl
import typer
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_grpo_trainer as theirs
from trl.experimental.async_grpo import packing

from dualkv.bench import traces
from dualkv.bench.run import in_words
from dualkv.bench.trees import Found
from dualkv.data.gain import Gain
from dualkv.demo.measure import PeakMemory
from dualkv.demo.settings import DTYPES
from dualkv.integrations.transformers import disable
from dualkv.integrations.trl.async_grpo import AsyncGRPOTrainer
from tools.bench import harness
from tools.bench.record import JsonPath, Record
from tools.bench.trl import FlashAttention4, check_names, stand_ins

WAYS: dict[str, Any] = {"trl": theirs.AsyncGRPOTrainer, "dualkv": AsyncGRPOTrainer}


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement."""

    model: harness.Model = "qwen3-8b"
    layers: harness.AllLayers = None
    dtype: Annotated[str, typer.Option(help=f"Of the weights, one of {', '.join(DTYPES)}.")] = "bfloat16"
    autocast: Annotated[bool, typer.Option(help="To bfloat16, TRL's default.")] = True
    turns: Annotated[int, typer.Option(help="To measure, of each trainer, after one that is not.")] = 4
    seconds: Annotated[float, typer.Option(help="At least, of each turn.")] = 2.0


def recorded(cls: Any) -> Any:
    """A trainer of the class that keeps the log-probs of the rows of its last step in `logps`."""

    class Recorded(cls):
        logps: torch.Tensor

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            def keep(**given: Any) -> Any:
                outputs = model(**given)
                self.logps = outputs.log_probs.detach().flatten()
                return outputs

            return super().compute_loss(keep, inputs, *args, **kwargs)

    return Recorded


class Alone(AsyncGRPOTrainer):
    """Runs every path of a tree by itself, in a model that is not enabled."""

    logps: torch.Tensor

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model = disable(self.model)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        def run(tree_kv_index: Any, tree_cu_seqlens_q: Any, tree_cu_seqlens_k: Any, **given: Any) -> Any:
            ids, labels = given["input_ids"], given["shift_labels"]
            q, k = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
            found = []
            for s in range(len(q) - 1):
                path = tree_kv_index[k[s] : k[s + 1]]
                out = model(input_ids=ids[:, path], shift_labels=labels[:, path], fused_lm_head=True)
                own = slice(len(path) - (q[s + 1] - q[s]), None)
                found.append([out.log_probs.flatten()[own], out.entropy.flatten()[own]])
            logps, entropy = (torch.cat(x) for x in zip(*found, strict=True))
            self.logps = logps.detach()
            return SimpleNamespace(log_probs=logps, entropy=entropy)

        return theirs.AsyncGRPOTrainer.compute_loss(self, run, inputs, *args, **kwargs)


class Step:
    """A trainer, and forward and backward of one micro-batch by it.

    Raises:
        ValueError: the trainer refuses the model.
    """

    def __init__(self, cls: Any, folder: Path, s: Settings, exact: bool = False) -> None:
        worker = SimpleNamespace(rollout_buffer=queue.Queue(), metrics_queue=queue.Queue())
        self.trainer = cls(
            str(folder / "model"),
            reward_funcs=[],
            args=async_grpo.AsyncGRPOConfig(
                str(folder / "out"),
                bf16=s.autocast and not exact,
                dtype="float32" if exact else s.dtype,
                use_cpu=not torch.cuda.is_available(),
                gradient_checkpointing=True,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                router_aux_loss_coef=0.0,
                max_steps=1,
                token_budget=-1,
                report_to="none",
            ),
            **stand_ins(),
            rollout_worker=worker,
            weight_transfer=worker,
        )
        self.trainer.current_gradient_accumulation_steps = 1
        model = self.trainer.model
        # TRL turns it on in `train`, which nothing here calls.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model = self.trainer.accelerator.prepare(model)

    def __call__(self, inputs: dict[str, torch.Tensor]) -> float:
        """Run forward and backward; the gradients are those of this step alone. Returns the loss."""
        self.model.zero_grad(set_to_none=True)
        return float(self.trainer.training_step(self.model, dict(inputs), None))

    def logps(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """The log-probs [M] of the trained tokens in the last step."""
        return self.trainer.logps[inputs["token_index"][0]].float()

    def gradients(self) -> dict[str, torch.Tensor]:
        return harness.gradients_of(self.model)


def make_inputs(trace: str, vocabulary: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Let TRL's collator make the inputs of a step, on one rank, of the sequences of a trace."""
    generator = torch.Generator().manual_seed(0)
    row = packing.TreeRow()
    for prompt, response, mask in traces.split(trace, vocabulary):
        row.add(
            {
                "input_ids": torch.from_numpy(np.concatenate([prompt, response])),
                "completion_mask": torch.from_numpy(np.concatenate([np.zeros_like(prompt), mask])),
                "old_log_probs": torch.zeros(len(prompt) + len(response)),
                "advantage": float(torch.randn((), generator=generator)),
                "group_id": 0,
                "metrics": {},
            }
        )
    inputs = theirs.DataCollatorForRollout(0)([[row]])
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def measure(steps: dict[str, Step], inputs: dict[str, torch.Tensor], s: Settings, in_turns: bool) -> dict[str, Any]:
    """Figures of each way: its first step, how far its results lie from the first way's, and its seconds in turns."""
    device = inputs["input_ids"].device
    base: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
    found: dict[str, Any] = {}
    for way, step in steps.items():
        peak = PeakMemory(device)
        with peak.measured():
            first, _ = harness.seconds_of(partial(step, inputs))
        if base is None:
            inputs = {**inputs, "old_log_probs": step.logps(inputs)[None]}
        loss = step(inputs)
        logps, gradients = step.logps(inputs), step.gradients()
        found[way] = {"first": first, "peak_gib": None if peak.bytes is None else peak.bytes / 2**30, "loss": loss}
        if base is None:
            base = logps, {name: x.clone() for name, x in gradients.items()}
        else:
            apart = (logps - base[0]).abs()
            found[way] |= {
                "log_probs_apart": {"mean": apart.mean().item(), "max": apart.max().item()},
                "gradients_apart": harness.apart(gradients, base[1]),
            }
        step.model.zero_grad(set_to_none=True)
    base = None
    timed = list(steps) if in_turns else []
    each: dict[str, list[float]] = {way: [] for way in timed}
    for turn, way in itertools.product(range(s.turns + 1), timed):
        took = statistics.mean(harness.turn(partial(steps[way], inputs), s.seconds))
        if turn:  # the first one follows a pause
            each[way].append(took)
    for way, seconds in each.items():
        found[way] |= {"seconds": seconds, "median": statistics.median(seconds)}
    return found


@harness.takes(Settings)
def main(
    json_to: JsonPath,
    s: Settings,
    trace: Annotated[list[str] | None, typer.Option(help="Its sequences; repeat it for more.")] = None,
    distance: Annotated[list[str] | None, typer.Option(help="Further traces, compared with fp32, not timed.")] = None,
) -> None:
    """Measure both trainers in turns; print and write the figures."""
    names = {"traces": trace or [], "distance": distance or []}
    check_names(s.model, s.dtype, [*names["traces"], *names["distance"]])
    device = harness.best_device()
    if find_spec("kernels") is None:
        packing._flash_attn = lambda: FlashAttention4
    record = Record(json_to, device.type == "cuda")
    found: dict[str, Any] = {"trl": trl.__version__, "settings": asdict(s), "refused": {}} | {
        kind: {} for kind in names
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        vocabulary = save(s, folder / "model", device)
        steps: dict[str, Step] = {}
        for way, cls in WAYS.items():
            try:
                steps[way] = Step(recorded(cls), folder, s)
            except ValueError as error:
                found["refused"][way] = str(error)
        exact = {"fp32": Step(Alone, folder, s, exact=True)} if distance else {}
        if distance and found["refused"]:  # nothing else tells what bfloat16 alone does to the model
            exact["alone"] = Step(Alone, folder, s)
        for kind, name in [(kind, name) for kind, of_kind in names.items() for name in of_kind]:
            try:
                inputs = make_inputs(name, vocabulary, device)
                figures = measure(steps if kind == "traces" else exact | steps, inputs, s, kind == "traces")
            except Exception as error:  # out of memory, say: the others are still worth recording
                figures = {"error": in_words(error)}
            shared = Found.of_trace(cast(traces.Trace, traces.parse(name))).shared
            found[kind][name] = {"share_ratio": Gain.of(shared).ratio, **figures}
            record.write(found, {name: figures})
            gc.collect()


def save(s: Settings, folder: Path, device: torch.device) -> int:
    """Save a model with random weights, which both trainers load. Returns the size of its vocabulary."""
    config = harness.make_config(s.model, s.layers)
    harness.make_model(config, s.dtype, device).save_pretrained(folder)
    return int(config.vocab_size)


if __name__ == "__main__":
    typer.run(main)
