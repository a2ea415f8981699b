"""GRPO in plain PyTorch on one GPU: sample, reward, pack, update.

python examples/one_gpu.py --model Qwen/Qwen3-0.6B
python examples/one_gpu.py --tiny --steps 3   # random weights, bytes for tokens: on a CPU
"""

import argparse
import os
import time

# OpenMP reads this when PyTorch loads it. Threads that spin while they wait would keep a busy CPU from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dualkv
from dualkv import grpo
from dualkv.data.rollouts import ByteTokenizer
from dualkv.integrations.transformers import enable, head
from dualkv.models import load_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a model of Hugging Face's hub, or a folder")
parser.add_argument("--tiny", action="store_true", help="a small model with random weights instead")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--responses", type=int, default=8, help="to each prompt")
parser.add_argument("--response-len", type=int, default=64, help="tokens, at most")
parser.add_argument("--budget", type=int, default=32768, help="packed tokens of a micro-batch, at most")
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if args.tiny:
    model, tokenizer = load_model("tiny", torch.float32, device, seed=0), ByteTokenizer()
else:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
eos = 256 if args.tiny else tokenizer.eos_token_id
enable(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

PROMPTS = [f"Write one sentence about {what}, in small letters only." for what in ("rain", "tea", "trains", "the moon")]


def reward(text: str) -> float:
    """The share of an answer that is small letters and spaces."""
    return sum(c.islower() or c == " " for c in text) / max(len(text), 1)


@torch.no_grad()
def sample(prompt: torch.Tensor) -> list[torch.Tensor]:
    """Responses [R_i], each up to the token that ends it."""
    out = model.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=True,
        num_return_sequences=args.responses,
        max_new_tokens=args.response_len,
        eos_token_id=eos,
        pad_token_id=eos,
    )
    answers = [row[len(prompt) :] for row in out]
    return [r[: r.tolist().index(eos) + 1] if eos in r else r for r in answers]


prompts = [torch.tensor(tokenizer.encode(text), device=device) for text in PROMPTS]
for step in range(args.steps):
    start = time.perf_counter()
    responses = [sample(prompt) for prompt in prompts]
    rewards = torch.tensor([reward(tokenizer.decode(r.tolist())) for group in responses for r in group])

    # Of every response, those of the first prompt first: its advantage, and what its tokens weigh in the update.
    lens = [len(r) for group in responses for r in group]
    advantages = grpo.group_advantages(rewards, [len(group) for group in responses])
    weights = grpo.token_weights(lens, "sequence").split(lens)

    micro_batches = dualkv.plan_micro_batches(
        [len(prompt) for prompt in prompts], [[len(r) for r in group] for group in responses], args.budget
    )
    for micro_batch in micro_batches:
        batch = dualkv.pack(
            [prompts[g] for g, _ in micro_batch.parts],
            [[responses[g][i] for i in some] for g, some in micro_batch.parts],
        )
        chosen = [g * args.responses + i for g, some in micro_batch.parts for i in some]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, dualkv=batch.layout
            ).last_hidden_state
            logp, _entropy = dualkv.response_logprobs(hidden, head(model), batch)
        advantage = torch.cat([advantages[n].expand(lens[n]) for n in chosen]).to(device)
        weight = torch.cat([weights[n] for n in chosen]).to(device)
        # One update for each sampling, so the old policy is the policy itself.
        loss, _ = grpo.policy_loss(logp, logp.detach(), advantage, weight, clip_low=0.2, clip_high=0.2)
        loss.backward()  # losses of micro-batches add up to that of the update
    optimizer.step()
    optimizer.zero_grad()

    packed = sum(micro_batch.tokens for micro_batch in micro_batches)
    replicated = sum(len(prompt) * args.responses for prompt in prompts) + sum(lens)
    print(
        f"step {step}: reward {rewards.mean():.3f}, {packed:,} tokens packed, {replicated:,} replicated,"
        f" {time.perf_counter() - start:.2f} s",
        flush=True,
    )
