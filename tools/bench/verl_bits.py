"""Bits of veRL's log-probs in micro-batches of several budgets, and the ratio of an update at equal weights:

    torchrun --nproc-per-node 1 -m tools.bench.verl_bits --json one.json
    torchrun --nproc-per-node 2 -m tools.bench.verl_bits --model qwen3-0.6b --json two.json  # gloo is slow

Ranks talk by gloo, so that several may share a GPU. Rollouts of random lengths, in trees with two turns, run with
`dualkv_batch_invariant` and without it, on a model with random weights.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

from dualkv.integrations.metrics import RATIO
from tools.bench import harness
from tools.bench import verl as bench
from tools.bench.record import JsonPath, Record

OUTPUTS = ("log_probs", "entropy")


def rollouts(s: bench.Settings, vocab: int, rank: int, trees: bool) -> TensorDict:
    """Draw the rollouts of one rank. In trees pairs of a group share a turn and an answer to it, which does not
    count."""
    draw = torch.Generator().manual_seed(rank)
    prompts, responses, masks = list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()

    def text(n: int) -> torch.Tensor:
        return torch.randint(vocab, (n,), generator=draw)

    for _ in range(s.groups):
        prompt = text(s.prompt_len - int(torch.randint(s.prompt_len // 2, (), generator=draw)))
        for number in range(s.responses):
            if number % 2 == 0:
                turn, answer = text(s.response_len // 2), text(s.response_len // 4)
            own = text(1 + int(torch.randint(s.response_len, (), generator=draw)))
            prompts.append(prompt)
            responses.append(torch.cat([turn, answer, own]) if trees else own)
            masks.append(torch.ones_like(responses[-1]))
            if trees:
                masks[-1][len(turn) : len(turn) + len(answer)] = 0
    data = bench.make_batch(prompts, responses, masks, torch.randn(len(prompts), generator=draw))
    tu.assign_non_tensor(data, calculate_entropy=True, temperature=0.8)
    return data


def scores(worker: Any, data: TensorDict, budget: int) -> torch.Tensor:
    """[2, M] log-probs and entropies of all response tokens, by micro-batches of at most `budget` packed tokens."""
    data = data.copy()
    tu.assign_non_tensor(data, use_dynamic_bsz=True, max_token_len_per_gpu=budget)
    return torch.stack([torch.cat(bench.log_probs_of(data, worker, output)) for output in OUTPUTS])


def measure(s: bench.Settings, trees: bool, budgets: list[int]) -> dict[str, Any]:
    """Count the values that differ from those of the first budget, and make an update with micro-batches of
    `s.max_tokens`."""
    worker = bench.build(s)
    for module in worker.engine.module.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no means
    data = rollouts(s, worker.model_config.hf_config.vocab_size, dist.get_rank(), trees)
    first, *others = (scores(worker, data, budget) for budget in budgets)
    counts = torch.tensor([first.numel(), *(int((x != first).sum()) for x in others)])
    furthest = torch.stack([(x - first).abs().max() for x in others]).max().cpu()
    dist.all_reduce(counts)
    dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
    bench.set_log_probs(data, list(first[0].split(data["responses"].offsets().diff().tolist())), "old_log_probs")
    ranks = dist.get_world_size()
    data = bench.one_update(s, data)
    tu.assign_non_tensor(data, mini_batch_size=ranks * len(data), global_batch_size=ranks * len(data))
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    values, *differ = counts.tolist()
    return {
        "values": values,
        "differ": differ,
        "furthest": float(furthest),
        "ratio_at_equal_weights": float(torch.tensor(metrics[RATIO]).double().mean()),
        "micro_batches": float(torch.tensor(metrics["dualkv/micro_batches"]).double().mean()),
    }


def main(
    json_to: JsonPath,
    model: harness.Model = "qwen3-8b",
    layers: harness.AllLayers = 4,
    groups: bench.Groups = 4,
    responses: harness.Responses = 8,
    prompt_len: harness.PromptLen = 2048,
    response_len: harness.ResponseLen = 512,
    max_tokens: bench.MaxTokens = 9000,
    budgets: Annotated[list[int] | None, typer.Option(help="Tokens of micro-batches of scores.")] = None,
    keep: Annotated[str, typer.Option(help="What checkpointed layers keep.")] = "attention",
    dtype: Annotated[str, typer.Option(help="Of the computation: bf16 or fp32.")] = "bf16",
) -> None:
    """Compare, with and without the option, of groups and of trees; the first rank prints and writes."""
    given = {name: value for name, value in locals().items() if name not in ("json_to", "budgets")}
    on_gpu = get_device_name() == "cuda"
    if on_gpu:  # the device of LOCAL_RANK, for veRL and device meshes too
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    record, done = Record(json_to, on_gpu), list[dict[str, Any]]()
    for trees in (False, True):
        for invariant in (True, False):
            s = bench.settings_of(given | FIXED | {"trees": trees, "batch_invariant": invariant}, bench.Settings)
            found = measure(s, trees, budgets or [3500, 6000, 20000])
            done.append({"settings": asdict(s), "ranks": dist.get_world_size(), **found})
            if dist.get_rank() == 0:
                record.write({"rows": done}, done[-1])
    dist.destroy_process_group()


FIXED: dict[str, Any] = {
    "engine": "dualkv", "micro_batch": None, "attention": "sdpa", "head": "unfused",
    "updates": 1, "learning_rate": 1e-6, "liger": False, "checkpointing": True,
}  # fmt: skip

if __name__ == "__main__":
    typer.run(main)
