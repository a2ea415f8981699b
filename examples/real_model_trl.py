"""The task of real_model.py through TRL's trainer with packed prompts: `pip install trl` beside what that one needs.

    python examples/real_model_trl.py --out runs/trl
    python examples/real_model_trl.py --out runs/trl-replicated --way replicated     # TRL's own trainer

The model is sampled by TRL's own `generate`. Held-out accuracy is measured before and after, as in real_model.py.
"""

import json
import time
from pathlib import Path

import torch
import trl
from datasets import Dataset
from real_model import Sampler, Task, evaluate, longest_question, options
from transformers import AutoTokenizer, TrainerCallback

from dualkv.data.rollouts import LocalTokenizer
from dualkv.integrations.trl import GRPOTrainer
from dualkv.models import load_model, pretrained

args = options(__doc__).parse_args()
device = torch.device(args.device)
task = Task(args.task, args.task_settings, LocalTokenizer(args.model), args.prefix, args.held_out, args.seed)
entries = [next(task.training) for _ in range(args.groups * args.updates)]
tokenizer = AutoTokenizer.from_pretrained(**pretrained(args.model))
tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(task.tokenizer.eos_id)
start = load_model(args.model, torch.float32, torch.device("cpu"), args.seed)
start.save_pretrained(args.out / "start")  # TRL reads the reference model from a folder
tokenizer.save_pretrained(args.out / "start")
begun = time.perf_counter()


def write(line, mode="a"):
    print(json.dumps(line), flush=True)
    with open(args.out / "log.jsonl", mode) as file:
        print(json.dumps(line), file=file)


class Log(TrainerCallback):
    def on_log(self, _args, state, _control, logs=None, **_):
        if "reward" in (logs or {}):
            kept = {name: value for name, value in logs.items() if isinstance(value, int | float)}
            write({"update": state.global_step, "seconds": time.perf_counter() - begun} | kept)


def held_out(update, weights):
    sizes = longest_question(task, task.held_out), args.response_len
    rounded = load_model(args.model, args.dtype, device, args.seed)
    rounded.load_state_dict(weights)
    judge = Sampler(rounded, task.prefix, args.eval_groups, 5, *sizes, greedy=1)
    write({"update": update} | evaluate(judge, task, task.held_out))


def reward(completion_ids, index, **_):
    return [task.score(entries[i], ids) for i, ids in zip(index, completion_ids, strict=True)]


prompts = [tokenizer.decode(task.prefix + task.encode(entry)) for entry in entries]
settings = trl.GRPOConfig(
    output_dir=str(args.out / "trl"),
    model_init_kwargs={"dtype": "float32"},  # bf16 by autocast
    max_steps=args.updates,
    per_device_train_batch_size=args.responses,
    gradient_accumulation_steps=args.groups,
    num_generations=args.responses,
    max_completion_length=args.response_len,
    learning_rate=args.lr,
    warmup_steps=args.warmup,
    lr_scheduler_type="constant_with_warmup",
    beta=args.kl,
    loss_type="grpo",
    bf16=args.dtype == torch.bfloat16,
    use_cpu=args.device == "cpu",
    shuffle_dataset=False,
    gradient_checkpointing=False,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    seed=args.seed,
)
trainer = (trl.GRPOTrainer if args.way == "replicated" else GRPOTrainer)(
    model=str(args.out / "start"),
    reward_funcs=reward,
    args=settings,
    train_dataset=Dataset.from_dict({"prompt": prompts, "index": list(range(len(entries)))}),
    processing_class=tokenizer,
    callbacks=[Log()],
)
settings = {name: str(value) if isinstance(value, Path | torch.dtype) else value for name, value in vars(args).items()}
write({"settings": settings, "prefix": len(task.prefix), "examples": task.num_examples, "trl": trl.__version__}, "w")
held_out(0, start.state_dict())
trainer.train()
held_out(args.updates, trainer.model.state_dict())
