"""A prompt of 65,536 tokens with its rollouts, forward and backward on one GPU.

    python examples/long_context.py              # Qwen3-0.6B in shape, random weights
    python examples/long_context.py --model Qwen/Qwen3-8B --response-len 2048
    python examples/long_context.py --tiny       # a small model and prompt, on the CPU

What makes it fit: the prompt lies once in the batch, layers are computed again in the backward except for their
attention, and the head meets only the rows that predict a response token, some at a time.
"""

import argparse
import os
import time

# OpenMP reads this when PyTorch loads it. Threads that spin while they wait would keep a busy CPU from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dualkv
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.models import CONFIGS

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a model of Hugging Face's hub, or a folder")
parser.add_argument("--prompt-len", type=int, default=65536)
parser.add_argument("--responses", type=int, default=8)
parser.add_argument("--response-len", type=int, default=1024)
parser.add_argument("--tiny", action="store_true", help="a small model and prompt instead, on the CPU")
args = parser.parse_args()
if args.tiny:
    args.prompt_len, args.responses, args.response_len = 512, 4, 16

device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")
if args.model:
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
else:
    settings = dict(CONFIGS["tiny" if args.tiny else "qwen3-0.6b"])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32 if args.tiny else torch.bfloat16)
enable(model)
recompute_layers(model, keep="attention")
model.train()

draw = torch.Generator().manual_seed(0)
prompt = torch.randint(256, (args.prompt_len,), generator=draw)
responses = [torch.randint(256, (args.response_len,), generator=draw) for _ in range(args.responses)]
advantages = torch.randn(args.responses, generator=draw)
batch = dualkv.pack([prompt], [responses], device=device)

for step in range(2):  # the first one also compiles the kernels, where they are not there yet
    start = time.perf_counter()
    hidden = model.model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, dualkv=batch.layout
    ).last_hidden_state
    logp, _entropy = dualkv.response_logprobs(hidden, head(model), batch)
    loss = -(logp * advantages.repeat_interleave(args.response_len).to(device)).mean()  # your loss over response tokens
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}, {time.perf_counter() - start:.2f} s", flush=True)

replicated = args.responses * (args.prompt_len + args.response_len)
print(f"{batch.layout.num_tokens:,} tokens packed, {replicated:,} replicated")
if device.type == "cuda":
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, weights and gradients among it")
