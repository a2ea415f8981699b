"""A loop that holds padded batches, in the layout of OpenRLHF's, with FSDP2: the actor packs inside of its forward.

    torchrun --nproc-per-node 4 examples/padded_actor.py --model Qwen/Qwen3-0.6B
    torchrun --nproc-per-node 2 examples/padded_actor.py --tiny     # random weights, on CPUs

The actor takes sequences and masks and returns log-probs of actions, as before, so that nothing around it changes.
Only a micro-batch should hold whole groups: here a rank takes the rollouts of a prompt, and not every n-th rollout.
"""

import argparse
import gc
import os

# OpenMP reads this when PyTorch loads it. Threads that spin while they wait would keep a busy CPU from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

import dualkv
from dualkv.integrations.transformers import enable, head
from dualkv.models import load_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a model of Hugging Face's hub, or a folder")
parser.add_argument("--tiny", action="store_true", help="a small model with random weights instead")
parser.add_argument("--padded", action="store_true", help="the actor runs the padded batch, for comparison")
parser.add_argument("--micro-batch", type=int, default=4, help="rollouts of a micro-batch")
parser.add_argument("--updates", type=int, default=3, help="on the same rollouts")
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()

on_gpu = torch.cuda.is_available() and not args.tiny
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class Actor(torch.nn.Module):
    rows = 0  # that the model has computed

    def __init__(self) -> None:
        super().__init__()
        if args.tiny:
            self.model = load_model("tiny", torch.float32, device, seed=0)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
        enable(self.model)

    def forward(self, sequences: torch.Tensor, action_mask: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Log-probs [B, L - 1] of sequences [B, L], padded on the right: column t is about token t + 1, and 0 where
        action_mask [B, L - 1] is not set."""
        if args.padded:
            self.rows += sequences.numel()
            logits = self.model(sequences, attention_mask=attention_mask).logits
            return logits[:, :-1].float().log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0] * action_mask
        batch = dualkv.pack_sequences(sequences, action_mask, attention_mask=attention_mask)  # what rows share, once
        self.rows += batch.layout.num_tokens
        hidden = self.model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
        logp, _ = dualkv.response_logprobs(hidden, head(self.model), batch)
        return batch.unpack(logp, like=action_mask)


actor = Actor()
precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if on_gpu else MixedPrecisionPolicy()
mesh = dist.init_device_mesh(device.type, (ranks,))
for module in (*actor.model.model.layers, actor):
    fully_shard(module, mesh=mesh, mp_policy=precision)
optimizer = torch.optim.AdamW(actor.parameters(), lr=args.lr)

# What a sampler returns: 4 responses to each of 4 prompts, padded on the right; here random ones.
draw = torch.Generator().manual_seed(0)
prompts = [torch.randint(256, (n,), generator=draw) for n in (90, 1, 57, 120) for _ in range(4)]
prompts = [prompts[i - i % 4] for i in range(len(prompts))]
responses = [torch.randint(256, (3 + 5 * i % 17,), generator=draw) for i in range(len(prompts))]
pairs = list(zip(prompts, responses, strict=True))
sequences, attention_mask, action_mask = (
    torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    for rows in (
        [torch.cat(pair) for pair in pairs],
        [torch.ones(len(p) + len(r), dtype=torch.int64) for p, r in pairs],
        [torch.arange(1, len(p) + len(r)) >= len(p) for p, r in pairs],
    )
)
advantages = torch.randn(len(prompts), generator=draw).to(device)[:, None]

mine = torch.arange(len(prompts), device=device).chunk(ranks)[rank].split(args.micro_batch)
with torch.no_grad():
    old = [actor(sequences[some], action_mask[some], attention_mask[some]) for some in mine]
for update in range(args.updates):
    total = torch.zeros(2, device=device)
    actor.rows = 0
    for n, some in enumerate(mine):
        actor.set_requires_gradient_sync(n == len(mine) - 1)
        ratio = (actor(sequences[some], action_mask[some], attention_mask[some]) - old[n]).exp()
        surrogate = torch.minimum(ratio * advantages[some], ratio.clamp(0.8, 1.2) * advantages[some])
        loss = -(surrogate * action_mask[some]).sum() / action_mask.sum()  # of the tokens of all ranks
        (loss * ranks).backward()  # FSDP takes the mean over ranks, the loss of the update is their sum
        total[0] += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    total[1] = actor.rows
    dist.all_reduce(total)
    if rank == 0:
        loss, rows = total.tolist()
        print(f"update {update}: loss {loss:.6f}, gradient norm {norm:.6f}, {int(rows):,} tokens", flush=True)
del actor, optimizer, ratio, surrogate, loss
gc.collect()  # what FSDP holds goes before the process group: PyTorch 2.13 aborts at exit at times otherwise
dist.destroy_process_group()
