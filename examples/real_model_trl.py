"""The task of real_model.py through TRL's trainer: `pip install trl` beside what that example needs.

    python examples/real_model_trl.py --out runs/trl-packed                       # one import differs from TRL's own
    python examples/real_model_trl.py --out runs/trl-replicated --way replicated  # TRL's own trainer
    python examples/real_model_trl.py --out runs/trl-tree --way tree              # packed, all prompts at once

A micro-batch has the responses to one prompt, or those of the update. TRL gets responses from real_model.py's sampler,
which draws them with the same random numbers there and here, and trains fp32 weights under autocast.
"""

import torch
import trl
from datasets import Dataset
from real_model import (
    Sampler,
    Task,
    begin_log,
    checksums,
    evaluate,
    longest_question,
    now,
    options,
    write,
)
from transformers import AutoTokenizer, TrainerCallback

from dualkv.data.pretrained import pretrained
from dualkv.data.rollouts import LocalTokenizer
from dualkv.integrations.trl import GRPOTrainer
from dualkv.models import load_model


class Run(TrainerCallback):
    """Samples for TRL's trainer, scores responses, and writes the log."""

    def __init__(self, args):
        self.args, self.device, self.start = args, torch.device(args.device), args.out / "start"
        self.task = Task(
            args.task, args.task_settings, LocalTokenizer(args.model), args.prefix, args.held_out, args.seed
        )
        self.entries = [next(self.task.training) for _ in range(args.groups * args.updates)]
        self.model = load_model(args.model, torch.float32, self.device, args.seed)
        self.model.save_pretrained(self.start)  # TRL reads the policy and the reference from a folder
        self.model.to(args.dtype)
        lens = longest_question(self.task, self.entries + self.task.held_out), args.response_len
        self.sampler = Sampler(self.model, self.task.prefix, args.groups, args.responses, *lens)
        self.judge = Sampler(self.model, self.task.prefix, args.eval_groups, 5, *lens, greedy=1)
        self.line = {}

    @torch.no_grad()
    def copy_weights(self, policy):
        for mine, theirs in zip(self.model.parameters(), policy.parameters(), strict=True):
            mine.copy_(theirs)

    def sample(self, questions, trainer):
        """Responses to questions, each of which TRL repeats for each of its responses."""
        begun, n, update = now(), self.args.responses, trainer.state.global_step
        self.copy_weights(trainer.model)
        asked = [self.task.encode({"question": question}) for question in questions[::n]]
        self.sampler.read_prefix()
        responses = self.sampler(asked, seed=self.args.seed * 1_000_000 + update)
        prompts = [self.task.prefix + ids for ids in asked for _ in range(n)]
        flat = [r for rs in responses for r in rs]
        padded = max(map(len, prompts)) + max(map(len, flat))
        self.line = {"generate_s": now() - begun, "rows": len(flat) * padded, "crc": checksums(responses)}
        return {"prompt_ids": prompts, "completion_ids": flat, "logprobs": None}

    def reward(self, completion_ids, index, **_):
        return [self.task.score(self.entries[i], ids) for i, ids in zip(index, completion_ids, strict=True)]

    def held_out(self, update):
        write(self.args.out, {"update": update} | evaluate(self.judge, self.task, self.task.held_out))

    def on_step_begin(self, *_, **__):
        if self.args.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.begun = now()

    def on_step_end(self, *_, **__):
        step_s = now() - self.begun
        self.line |= {"step_s": step_s, "update_s": step_s - self.line["generate_s"]}
        if self.args.device == "cuda":
            self.line["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30

    def on_log(self, args, state, control, logs, model=None, **_):
        if "reward" not in logs:
            return
        line = {"update": state.global_step, "response_len": logs["completions/mean_length"]}
        line |= {name: logs[name] for name in ("reward", "kl", "entropy", "loss", "grad_norm")} | self.line
        if "dualkv/tokens_packed" in logs:
            line["rows"] = logs["dualkv/tokens_packed"] * args.gradient_accumulation_steps
        write(self.args.out, line)
        if state.global_step % self.args.eval_every == 0 or state.global_step == args.max_steps:
            self.copy_weights(model)
            self.held_out(state.global_step)


def train(args):
    run = Run(args)
    tokenizer = AutoTokenizer.from_pretrained(**pretrained(args.model))
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(run.task.tokenizer.eos_id)
    groups = args.groups if args.way == "tree" else 1  # of a micro-batch
    trainer = (trl.GRPOTrainer if args.way == "replicated" else GRPOTrainer)(
        model=str(run.start),
        reward_funcs=run.reward,
        rollout_func=run.sample,
        args=trl.GRPOConfig(
            output_dir=str(args.out / "trl"),
            model_init_kwargs={"dtype": "float32"},
            bf16=args.dtype == torch.bfloat16,
            use_cpu=args.device == "cpu",
            max_steps=args.updates,
            per_device_train_batch_size=groups * args.responses,
            gradient_accumulation_steps=args.groups // groups,
            num_generations=args.responses,
            max_completion_length=args.response_len,
            shuffle_dataset=False,
            loss_type="grpo",
            beta=args.kl,
            learning_rate=args.lr,
            warmup_steps=args.warmup,
            lr_scheduler_type="constant_with_warmup",
            adam_beta2=0.95,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": entry["question"], "index": i} for i, entry in enumerate(run.entries)]
        ),
        processing_class=tokenizer,
        callbacks=[run],
    )
    begin_log(args, run.task, f"TRL {trl.__version__}")
    run.held_out(0)
    trainer.train()


def main():
    train(options(__doc__).parse_args())


if __name__ == "__main__":
    main()
