"""GRPO updates on several GPUs with FSDP2: groups stay whole, every rank packs its own.

    torchrun --nproc-per-node 4 examples/four_gpus.py --model Qwen/Qwen3-0.6B --rollouts rollouts.jsonl
    torchrun --nproc-per-node 2 examples/four_gpus.py --tiny     # random weights and rollouts, on CPUs

One line of the file for each prompt: {"prompt": [token ids], "responses": [[token ids], ...], "rewards": [0.5, ...]}.
"""

import argparse
import gc
import json
import os

# OpenMP reads this when PyTorch loads it. Threads that spin while they wait would keep a busy CPU from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

import dualkv
from dualkv import grpo
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.models import load_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a model of Hugging Face's hub, or a folder")
parser.add_argument("--rollouts", help="a file of rollouts; random ones by default")
parser.add_argument("--tiny", action="store_true", help="a small model with random weights instead")
parser.add_argument("--updates", type=int, default=3, help="on the same rollouts")
parser.add_argument("--budget", type=int, default=32768, help="packed tokens of a micro-batch, at most")
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()

on_gpu = torch.cuda.is_available() and not args.tiny
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Policy(torch.nn.Module):
    """Log-probs from inside `forward`, where FSDP has gathered the head."""

    def __init__(self) -> None:
        super().__init__()
        if args.tiny:
            self.model = load_model("tiny", torch.float32, device, seed=0)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)

    def forward(self, batch: dualkv.PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.model.model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, dualkv=batch.layout
        ).last_hidden_state
        return dualkv.response_logprobs(hidden, head(self.model), batch)


policy = Policy()
enable(policy.model)
recompute_layers(policy.model)
precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
mesh = dist.init_device_mesh(device.type, (ranks,))
for layer in policy.model.model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=precision)
fully_shard(policy, mesh=mesh, mp_policy=precision)
optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)

# Every rank has all rollouts, and plans all micro-batches: equally many for each rank, of about equal size.
if args.rollouts:
    with open(args.rollouts) as file:
        groups = [json.loads(line) for line in file]
    for line, group in enumerate(groups, 1):
        if not {"prompt", "responses", "rewards"} <= set(group):
            parser.error(f"{args.rollouts}:{line}: expected 'prompt', 'responses' and 'rewards', found {sorted(group)}")
else:
    draw = torch.Generator().manual_seed(0)
    groups = [
        {
            "prompt": torch.randint(256, (96 + 32 * g,), generator=draw).tolist(),
            "responses": [torch.randint(256, (8 + 3 * i,), generator=draw).tolist() for i in range(4)],
            "rewards": torch.rand(4, generator=draw).tolist(),
        }
        for g in range(6)
    ]
prompts = [torch.tensor(group["prompt"]) for group in groups]
responses = [[torch.tensor(r) for r in group["responses"]] for group in groups]
rewards = torch.tensor([reward for group in groups for reward in group["rewards"]])
sizes, lens = [len(group) for group in responses], [len(r) for group in responses for r in group]
advantages = grpo.group_advantages(rewards, sizes).repeat_interleave(torch.tensor(lens)).split(lens)
weights = grpo.token_weights(lens, "sequence").split(lens)  # of the whole update, not of a rank's part
first = [sum(sizes[:g]) for g in range(len(sizes))]

plan = dualkv.plan_micro_batches(
    [len(prompt) for prompt in prompts], [[len(r) for r in group] for group in responses], args.budget, num_ranks=ranks
)
mine = []
for micro_batch in (m for m in plan if m.rank == rank):
    batch = dualkv.pack(
        [prompts[g] for g, _ in micro_batch.parts],
        [[responses[g][i] for i in some] for g, some in micro_batch.parts],
        device=device,
    )
    chosen = [first[g] + i for g, some in micro_batch.parts for i in some]
    mine.append((batch, *(torch.cat([of[n] for n in chosen]).to(device) for of in (advantages, weights))))

policy.train()
with torch.no_grad():
    old = [policy(batch)[0] for batch, _, _ in mine]
for update in range(args.updates):
    total = torch.zeros((), device=device)
    for n, (batch, advantage, weight) in enumerate(mine):
        policy.set_requires_gradient_sync(n == len(mine) - 1)
        logp, _entropy = policy(batch)
        loss, _ = grpo.policy_loss(logp, old[n], advantage, weight, clip_low=0.2, clip_high=0.2)
        (loss * ranks).backward()  # FSDP takes the mean over ranks, the loss of the update is their sum
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0:
        packed = sum(micro_batch.tokens for micro_batch in plan)
        replicated = sum(len(p) * n for p, n in zip(prompts, sizes, strict=True)) + sum(lens)
        print(
            f"update {update}: loss {total:.5f}, gradient norm {norm:.5f}, {packed:,} tokens packed on {ranks} ranks,"
            f" {replicated:,} replicated",
            flush=True,
        )
del policy, optimizer, loss, logp
gc.collect()  # what FSDP holds goes before the process group: PyTorch 2.13 aborts at exit at times otherwise
dist.destroy_process_group()
