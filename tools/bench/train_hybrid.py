"""`python -m tools.bench.train_hybrid --json FILE`: a short GRPO training of a tiny hybrid, stock and packed.

Qwen3.5's layers in small: three gated delta nets and one full attention, from random weights, on the task of
:mod:`tools.bench.symbols`. Weights, prompts and random numbers of the sampling are the same for both ways, which differ
by rounding. Responses are sampled by transformers' own code in both. On a GPU it computes in bf16 under autocast, with
weights in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import mean
from typing import Annotated, Any

import torch
import typer
from rich.progress import track
from transformers import AutoConfig, AutoModelForCausalLM

from dualkv.data.rollouts import Rollouts
from dualkv.grpo import ALGORITHMS, group_advantages, policy_loss, token_weights
from dualkv.integrations.transformers import batches, enable
from dualkv.models import CONFIGS
from tools.bench.record import JsonPath, Record
from tools.bench.symbols import SYMBOLS, Task

MODEL = CONFIGS["tiny-hybrid"] | {"vocab_size": SYMBOLS}
WAYS = "replicated", "packed"


@torch.no_grad()
def sample(model: Any, prompts: torch.Tensor, task: Task, seed: int) -> torch.Tensor:
    """prompts [groups, P] -> responses [groups, N, R] at temperature 1, every token by a forward of the whole sequence;
    numbers that depend on the seed alone pick tokens by the inverse of the cumulative distribution."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(task.groups * task.responses, task.response_len, generator=generator, dtype=torch.float64)
    uniform = uniform.to(model.device)
    ids = prompts.repeat_interleave(task.responses, 0).to(model.device)
    for t in range(task.response_len):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, -1]
        logits = model.get_output_embeddings()(hidden)  # also where veRL has put a fused head into the class
        cumulative = logits.double().softmax(-1).cumsum(-1)
        picked = torch.searchsorted(cumulative, (uniform[:, t] * cumulative[:, -1])[:, None], right=True)
        ids = torch.cat([ids, picked.clamp(max=SYMBOLS - 1)], 1)
    return ids[:, task.prompt_len :].view(task.groups, task.responses, -1).cpu()


def train(way: str, task: Task, updates: int, learning_rate: float, seed: int, narrow: bool) -> Iterator[int]:
    """Yields the rewarded tokens before each update, then makes the update."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL)).to(device).eval()
    if way == "packed":
        enable(model)
    optimizer, grpo = torch.optim.AdamW(model.parameters(), lr=learning_rate), ALGORITHMS["grpo"]
    for update in track(range(updates), way):
        with torch.autocast(device.type, torch.bfloat16, enabled=narrow):
            prompts = task.prompts(seed + update)
            responses = sample(model, prompts, task, seed + update)
            rewards = task.rewards(prompts, responses)
            yield round(float(rewards.sum()) * task.response_len)
            rollouts = Rollouts(list(prompts), [list(group) for group in responses], rewards.tolist())
            lens = rollouts.response_lens
            advantages = group_advantages(rewards.flatten(), rollouts.group_sizes).repeat_interleave(torch.tensor(lens))
            weights = token_weights(lens, grpo.mean)
            rows = task.groups * batches.rows_of_one_group(rollouts)  # all at once, in both ways
            [batch] = batches.WAYS[way](rollouts, rows, device)
            logp, _ = batch.logprobs(model.train())
            advantages, weights = advantages.to(device)[batch.places], weights.to(device)[batch.places]
            loss, _ = policy_loss(logp, logp.detach(), advantages, weights, grpo.clip_low, grpo.clip_high)
            loss.backward()
        model.eval()
        optimizer.step()
        optimizer.zero_grad()


def main(
    json_to: JsonPath,
    updates: Annotated[int, typer.Option(help="Of each way.")] = 120,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, constant.")] = 1e-3,
    groups: Annotated[int, typer.Option(help="Prompts of an update.")] = 8,
    responses: Annotated[int, typer.Option("--responses", "-n", help="Of each prompt.")] = 16,
    prompt_len: Annotated[int, typer.Option("--prompt-len", "-p")] = 96,
    seed: Annotated[int, typer.Option(help="Of weights, prompts and sampling.")] = 0,
) -> None:
    """Train a tiny hybrid both ways and write how many tokens of each update were rewarded."""
    cuda = torch.cuda.is_available()
    record = Record(json_to, cuda)
    task = Task(groups=groups, responses=responses, prompt_len=prompt_len)
    figures: dict[str, Any] = {
        "model": MODEL,
        "task": asdict(task),
        "learning_rate": learning_rate,
        "seed": seed,
        "dtype": "bfloat16 under autocast" if cuda else "float32",
        "rewarded": {},  # tokens of each update
    }
    for way in WAYS:
        figures["rewarded"][way] = list(train(way, task, updates, learning_rate, seed, cuda))
        record.write(figures)
    tokens = task.groups * task.responses * task.response_len
    for way, each in figures["rewarded"].items():
        print(f"{way}: reward {each[0] / tokens:.3f} at first, {mean(each[-10:]) / tokens:.3f} in the last ten updates")


if __name__ == "__main__":
    typer.run(main)
