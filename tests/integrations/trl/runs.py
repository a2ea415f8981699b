"""Short trainings of tiny models: what a trainer computed on the way, for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from trl.experimental import gmpo

from dualkv.integrations.trl import GRPOTrainer, PackedGroups, RLOOTrainer
from tests.integrations import trainings
from tests.integrations.tiny import SIZES, VOCAB, make_model
from tests.integrations.trainings import Gradients, Run
from tests.integrations.transformers.test_media import ROPE, WINDOWS

# Ragged prompts, one of a single token; each batch of a run takes three of them.
PROMPTS = [" ".join(f"t{3 + (11 * i + 5 * j) % 90}" for j in range(n)) for i, n in enumerate((9, 1, 23, 14, 5, 17))]
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 6,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,  # so that a micro-batch ends within a group
    "max_completion_length": 12,
    "learning_rate": 0.05,
    "optim": "sgd",  # AdamW makes steps of the rounding of near-zero gradients
    "max_grad_norm": 0.0,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 3,
}

NF4 = {"dtype": torch.float32, "quantization_config": trainings.NF4}  # for QLoRA


def in_fp32(trainer: Any) -> Any:
    """Undo that TRL casts the adapters of a quantized model to bf16, whose rounding is larger than what is compared."""
    if getattr(trainer.model, "is_loaded_in_4bit", False):
        assert any(type(module).__name__ == "Linear4bit" for module in trainer.model.modules())
        for weight in trainer.model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
    return trainer


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"t{i}": i for i in range(3, VOCAB)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 7 for token in ids) / (3 * len(ids)) - 0.03 * len(ids) for ids in completion_ids]


MARKS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %} <|vision_start|><|image_pad|>"
    "<|vision_end|> {% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


class Processor(Qwen2_5_VLProcessor):
    """Qwen2.5-VL's, without a processor of videos, which needs torchvision; it takes TRL's None for no images."""

    def __call__(self, images: Any = None, **kwargs: Any) -> Any:
        return super().__call__(images=[image or [] for image in images] if images else None, **kwargs)

    def check_argument_for_proper_class(self, *_: Any) -> None:
        pass


def of_images() -> tuple[Any, Dataset, Processor]:
    """A tiny Qwen2.5-VL, its processor, and prompts with one image, two, and none."""
    torch.manual_seed(0)
    tokens = tokenizer()
    tokens.add_tokens(MARKS, special_tokens=True)
    names = ("image_token", "vision_start_token", "vision_end_token", "video_token")
    ids = {f"{name}_id": tokens.convert_tokens_to_ids(mark) for name, mark in zip(names, MARKS, strict=True)}
    text = SIZES | {"vocab_size": VOCAB + len(MARKS), "rope_parameters": dict(ROPE), "initializer_range": 0.1}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=WINDOWS, **ids))
    draw = np.random.default_rng(0)
    images = [[Image.fromarray(draw.integers(0, 255, (h, w, 3), np.uint8)) for h, w in sizes]
              for sizes in ([(8, 12)], [(4, 8), (12, 4)], [], [(8, 8)], [(4, 4)], [(8, 4), (8, 8)])]  # fmt: skip
    prompts = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    size = {"patch_size": 2, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 16, "max_pixels": 256}
    processor = Processor(Qwen2VLImageProcessorPil(**size), tokens, None, chat_template=TEMPLATE)
    return model, Dataset.from_dict({"prompt": prompts, "images": images}), processor


def having(cls: type, **given: Any) -> type:
    """The trainer with arguments of DualKV's."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        super(made, self).__init__(*args, **given, **kwargs)

    made = type(cls.__name__, (cls,), {"__init__": init})
    return made


class Padded(GRPOTrainer):
    """TRL's log-probs over the micro-batches of whole groups."""

    _get_per_token_logps_and_entropies = trl.GRPOTrainer._get_per_token_logps_and_entropies


class PaddedRLOO(RLOOTrainer):
    _get_per_token_logps_and_entropies = trl.RLOOTrainer._get_per_token_logps_and_entropies


class GMPOTrainer(PackedGroups, gmpo.GMPOTrainer):
    """A packed trainer of a subclass, made as in docs/trl.md."""


class PaddedGMPO(GMPOTrainer):
    _get_per_token_logps_and_entropies = trl.GRPOTrainer._get_per_token_logps_and_entropies


class Turns:
    """A mixin before a trainer: completions of a prompt begin with turns that some of them share, as if they branched
    there."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        found = super()._generate_single_turn(prompt_ids, *args, **kwargs)  # type: ignore[misc]
        seen: dict[tuple[int, ...], int] = {}
        begun = []
        for prompt, own in zip(prompt_ids, found[0] if isinstance(found, tuple) else found, strict=True):
            number = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
            begun.append(turns(sum(prompt), number) + own)
        return (begun, *found[1:]) if isinstance(found, tuple) else begun


class Screens:
    """A mixin before a GRPO trainer of the model with images: completions begin with a turn in which a tool returns an
    image, which some of a prompt's rollouts share. One in four has none."""

    tools: Any

    def _generate(self, prompts: list[Any]) -> Any:
        self.tools = None
        texts, answers, _, completions, logps, more, images, _ = super()._generate(prompts)  # type: ignore[misc]
        mark, start, end, _ = range(VOCAB, VOCAB + len(MARKS))
        seen: dict[tuple[int, ...], int] = {}
        shown: list[list[Any]] = []
        masks = []
        for i, prompt in enumerate(texts):
            number = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
            height, width = [(8, 4), (8, 4), (0, 0), (4, 12)][number % 4]
            draw = np.random.default_rng([sum(prompt), height])
            shown.append([Image.fromarray(draw.integers(0, 255, (height, width, 3), np.uint8))] if height else [])
            turn = [*range(3, 9), start, *[mark] * (height * width // 16), end, 9, 10] if height else []
            masks.append([0] * len(turn) + [1] * len(answers[i]))
            answers[i] = turn + answers[i]
        self.tools = [True]
        both = [[*(before or []), *after] for before, after in zip(images, shown, strict=True)]
        return texts, answers, masks, completions, logps, more, both, shown


class PackedScreens(Screens, GRPOTrainer):
    pass


class PaddedScreens(Screens, Padded):
    pass


class TheirScreens(Screens, trl.GRPOTrainer):
    pass


def turns(of_prompt: int, number: int) -> list[int]:
    """Make the first turns of the rollout of that number: of four the first three share a turn, of these two another
    one."""
    first, second = ([3 + (of_prompt + step * j) % 70 for j in range(n)] for step, n in ((7, 12), (11, 9)))
    return [first + second, first, [], first + second][number % 4]


def make_trainer(
    cls: type[trl.GRPOTrainer],
    folder: Path,
    model: str = "qwen3",
    peft: Any = None,
    of_model: dict[str, Any] | None = None,
    config: type = trl.GRPOConfig,
    made: Any = None,
    prompts: list[str] | None = None,
    **settings: Any,
) -> trl.GRPOTrainer:
    """A trainer of a tiny model with random weights, which it reads from a folder ("images": of one with images)."""
    path = folder / "-".join([model, *(f"{k}={v}" for k, v in (of_model or {}).items())])
    dataset, processor = Dataset.from_dict({"prompt": PROMPTS if prompts is None else prompts}), tokenizer()
    if model == "images":
        made, dataset, processor = of_images()
        settings["generation_kwargs"] = {"suppress_tokens": list(range(VOCAB, VOCAB + len(MARKS)))}
    if not path.exists():
        if made is None:
            made = make_model(model, **(of_model or {}))
        made.generation_config.eos_token_id = [2, *range(80, VOCAB)]  # ends about one response in six at each token
        made.save_pretrained(path)
    trainer = cls(
        model=str(path),
        reward_funcs=reward,
        args=config(output_dir=str(folder / "out"), **SETTINGS | settings),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=processor,
        peft_config=peft,
    )
    return in_fp32(trainer)


def train(cls: type[trl.GRPOTrainer], folder: Path, evaluate: bool = False, **settings: Any) -> Run:
    run = Run()

    class Recorded(cls):  # type: ignore[misc,valid-type]
        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            run.logps.append(logps.detach())
            if entropies is not None:
                run.entropies.append(entropies.detach())
            return logps, entropies, aux_loss

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            run.losses.append(loss.detach())
            run.completions.append(inputs["completion_ids"])
            return loss

    trainer = make_trainer(Recorded, folder, **settings)
    trainer.add_callback(Gradients(run))
    trainer.train()
    if evaluate:
        trainer.evaluate()
    run.end(trainer)
    return run
