"""A Transformer of plain modules, as torchtitan has them, on packed groups: attention is the only line that changes.

    python examples/plain_modules.py                     # a small model, on a GPU where there is one
    python examples/plain_modules.py --compile --replicated

A layout goes through the modules beside the tokens. Rotary embeddings take its positions. Nothing else of a model mixes
rows, so nothing else knows of groups.
"""

import argparse

import torch
from torch import nn

import dualkv

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--replicated", action="store_true", help="a prompt for every response, for comparison")
parser.add_argument("--compile", action="store_true", help="each block by torch.compile, as torchtitan does")
parser.add_argument("--updates", type=int, default=3, help="on the same rollouts")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
VOCAB, DIM, HEADS, KV_HEADS, HEAD_DIM = 256, 128, 4, 2, 32


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """x [T, H, D], angles [T, D / 2]"""
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(DIM, h * HEAD_DIM, bias=False) for h in (HEADS, KV_HEADS, KV_HEADS))
        self.wo = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, layout: dualkv.Layout) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))  # [T, heads, head dim]
        # Instead of scaled_dot_product_attention or FlexAttention with a mask of documents:
        return self.wo(dualkv.attention(rotated(q, angles), rotated(k, angles), v, layout).flatten(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norms = Attention(), nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        self.w1, self.w2, self.w3 = nn.Linear(DIM, 256), nn.Linear(256, DIM), nn.Linear(DIM, 256)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, layout: dualkv.Layout) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), angles, layout)
        h = self.norms[1](x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.norm = nn.Embedding(VOCAB, DIM), nn.RMSNorm(DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor, layout: dualkv.Layout) -> torch.Tensor:
        """tokens [T] -> the states that the output layer takes [T, DIM]"""
        frequencies = 1e4 ** -(torch.arange(HEAD_DIM // 2, device=tokens.device) * 2 / HEAD_DIM)
        x, angles = self.embeddings(tokens), layout.position_ids[:, None] * frequencies
        for block in self.blocks:
            x = block(x, angles, layout)
        return self.norm(x)


torch.manual_seed(0)
model = Transformer().to(device, dtype)
if args.compile:
    for block in model.blocks:
        block.compile(fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), args.lr)

draw = torch.Generator().manual_seed(0)
sizes = [(96, (8, 11, 30)), (1, (9, 5)), (57, (0, 20, 14, 3))]
prompts = [torch.randint(VOCAB, (p,), generator=draw) for p, _ in sizes]
responses = [[torch.randint(VOCAB, (n,), generator=draw) for n in lens] for _, lens in sizes]
if args.replicated:
    prompts = [prompt for prompt, group in zip(prompts, responses, strict=True) for _ in group]
    responses = [response for group in responses for response in group]
apart = range(len(prompts)) if args.replicated else None  # equal prompts would be packed once otherwise
batch = dualkv.pack(prompts, responses, group_ids=apart, device=device)
advantages = torch.randn(batch.num_rollouts, generator=draw)
advantage = advantages.repeat_interleave(torch.tensor(batch.response_lens)).to(device)

for update in range(args.updates):
    hidden = model(batch.input_ids[0], batch.layout)
    logp, _ = dualkv.response_logprobs(hidden, model.output.weight, batch)
    loss = -(advantage * logp).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"update {update}: loss {loss:.6f}, gradient norm {norm:.6f}, {len(hidden):,} tokens", flush=True)
