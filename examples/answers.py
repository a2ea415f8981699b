"""Supervised fine-tuning and distillation on several answers to a prompt, each prompt computed once.

    python examples/answers.py --model Qwen/Qwen3-0.6B --answers answers.jsonl
    python examples/answers.py --model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-8B --answers answers.jsonl
    python examples/answers.py --tiny --prompts     # random weights and answers

One line of the file for each prompt: {"prompt": [token ids], "answers": [[token ids], ...]}. Without a teacher the loss
is the mean over sequences of the mean negative log-prob of their tokens. With one it is the mean over the tokens of
answers of the Kullback-Leibler divergence of the student's distribution from the teacher's.
"""

import argparse
import json
import os

# OpenMP reads this when PyTorch loads it. Threads that spin while they wait would keep a busy CPU from those that work.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from transformers import AutoModelForCausalLM

import dualkv
from dualkv.integrations.transformers import enable, head
from dualkv.models import load_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="a model of Hugging Face's hub, or a folder")
parser.add_argument("--teacher", help="a model with the same tokens; fine-tuning without one")
parser.add_argument("--answers", help="a file of prompts and answers; random ones by default")
parser.add_argument("--tiny", action="store_true", help="a small model with random weights instead")
parser.add_argument("--prompts", action="store_true", help="fine-tune on the tokens of prompts too")
parser.add_argument("--replicated", action="store_true", help="a prompt for every answer, for comparison")
parser.add_argument("--updates", type=int, default=3, help="on the same answers")
parser.add_argument("--budget", type=int, default=32768, help="packed tokens of a micro-batch, at most")
parser.add_argument("--lr", type=float, default=1e-5)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() and not args.tiny else "cpu")


def made(name, seed):
    if args.tiny:
        return enable(load_model("tiny", torch.float32, device, seed))
    return enable(AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).to(device))


model, teacher = made(args.model, 0), made(args.teacher, 1).requires_grad_(False) if args.teacher else None
optimizer = torch.optim.SGD(model.parameters(), args.lr)

if args.answers:
    with open(args.answers) as file:
        groups = [json.loads(line) for line in file]
    for line, group in enumerate(groups, 1):
        if not {"prompt", "answers"} <= set(group):
            parser.error(f"{args.answers}:{line}: expected 'prompt' and 'answers', found {sorted(group)}")
else:
    draw = torch.Generator().manual_seed(0)
    sizes = [(96, (8, 11, 30)), (1, (9, 5)), (57, (1, 20, 14, 3))]
    random = [[torch.randint(256, (n,), generator=draw) for n in (p, *lens)] for p, lens in sizes]
    groups = [{"prompt": prompt, "answers": those} for prompt, *those in random]
prompts, answers = [group["prompt"] for group in groups], [group["answers"] for group in groups]
if args.replicated:
    prompts = [prompt for prompt, group in zip(prompts, answers, strict=True) for _ in group]
    answers = [[answer] for group in answers for answer in group]
num_answers = sum(len(group) for group in answers)
num_tokens = sum(len(answer) for group in answers for answer in group)
plan = dualkv.plan_micro_batches([len(p) for p in prompts], [[len(a) for a in group] for group in answers], args.budget)


def hidden_states(of, batch):
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    return of.model(**inputs, dualkv=batch.layout).last_hidden_state


def fine_tuning(batch):
    # With `whole`, tokens of prompts count. A prompt's token is one row, and its gradient that of all its answers.
    sequences = dualkv.PackedSequences.from_batch(batch, whole=args.prompts)
    logp, _ = dualkv.response_logprobs(hidden_states(model, batch), head(model), sequences)
    return -sum(row.mean() for row in sequences.unpack(logp) if len(row)) / num_answers


def distillation(batch):
    # A prompt's last row predicts the first token of each of its answers, and occurs once for each in `predict_rows`.
    student, of_teacher = (
        head(m).logits(hidden_states(m, batch)[0, batch.predict_rows]).log_softmax(-1) for m in (model, teacher)
    )
    return torch.nn.functional.kl_div(student, of_teacher, reduction="sum", log_target=True) / num_tokens


for update in range(args.updates):
    total = 0.0
    for micro_batch in plan:
        chosen = [(g, i) for g, some in micro_batch.parts for i in some]
        batch = dualkv.pack(
            [prompts[g] for g, _ in chosen],
            [answers[g][i] for g, i in chosen],
            group_ids=[g for g, _ in chosen],  # replicated prompts have an id each
            device=device,
        )
        loss = distillation(batch) if teacher else fine_tuning(batch)
        loss.backward()  # the losses of micro-batches add up to the loss of the update
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(
        f"update {update}: loss {total:.6f}, gradient norm {norm:.6f}, {sum(m.tokens for m in plan):,} tokens",
        flush=True,
    )
