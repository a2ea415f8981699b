"""Checks that TRL's trainers are what packed rows take them for: what is replaced, and what their head computes.

Each class is checked once in a process, when a trainer of it is made, so that a version of TRL that nobody has tried
runs where it fits. The comparison takes a model of one layer on the CPU, in milliseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from trl.trainer.utils import add_fused_lm_head

from codegen.surface import irreplaceable, unfit
from dualkv.integrations.patching import Changes
from dualkv.integrations.transformers import enable, selfcheck

TOLERANCE = 0.1  # nats: autocast to bf16 makes a tenth of it, log-probs of a neighbouring token differ by 1 and more
WIDTH = 4  # of prompts
IDS = torch.tensor(
    [[0, 5, 9, 2, 7, 4, 8, 3], [0, 5, 9, 2, 6, 1, 0, 0], [3, 8, 1, 6, 2, 0, 0, 0], [3, 8, 1, 6, 9, 5, 7, 0]]
)
MASK = torch.tensor(
    [[0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0]]
)
PROVED: set[type] = set()


def refuse_replaced(theirs: type, ours: type, methods: str, reads: str = "") -> None:
    """Raises ImportError if methods of TRL's class cannot be replaced; see :func:`codegen.surface.irreplaceable`."""
    if (said := irreplaceable(theirs, ours, methods, reads)) is not None:
        raise ImportError(f"{ours.__name__} cannot run: {unfit('trl', said)}", name="trl")


def refuse_unequal(cls: type, compute: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raises ImportError if what TRL's code and packed rows compute of a small model differs, once for a trainer's
    class. `compute` enables the model, which has TRL's head, between two computations of the same values, and returns
    both."""
    if cls in PROVED:
        return
    with selfcheck._ALONE, selfcheck._untouched(torch.device("cpu")), torch.no_grad():
        sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).eval()
        selfcheck.randomize(model, seed=0)
        try:
            add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy"))
            expected, got = compute(model)
            said = f"values of a small model have shape {[*expected.shape]}, packed {[*got.shape]}"
            if expected.shape == got.shape:
                differs = float((expected - got).abs().max())
                said = "" if differs <= TOLERANCE else f"values of a small model differ by {differs:.2g} when packed"
        except Exception as error:
            said = f"a small model raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if said:
        raise ImportError(f"{cls.__name__} cannot run: {unfit('trl', said)}", name="trl")
    PROVED.add(cls)


def of_groups(trainer: Any, theirs: Any, ours: Any) -> None:
    """Check log-probs and entropies of a trainer of groups: those of the mixin against those of the class under it."""

    def compute(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        def values(method: Callable[..., Any]) -> torch.Tensor:
            logps, entropies, _ = method(trainer, model, IDS, MASK, IDS.shape[1] - WIDTH, compute_entropy=True)
            return torch.stack([logps, entropies]).float() * MASK[:, WIDTH:]

        expected = values(theirs._get_per_token_logps_and_entropies)
        enable(model, check=False)
        return expected, values(ours._get_per_token_logps_and_entropies)

    with Changes(trainer) as changes:
        changes.replace("_metrics", defaultdict(lambda: defaultdict(list)))
        refuse_unequal(type(trainer), compute)


def of_answers(trainer: Any, pack_head: Callable[[Any, Any], None]) -> None:
    """Check what :func:`dualkv.integrations.trl.answers.pack_head` makes of TRL's head."""

    def compute(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        labels = IDS.masked_fill(MASK == 0, -100)
        labels[:, :WIDTH] = -100

        def values() -> torch.Tensor:
            out = model(input_ids=IDS, attention_mask=MASK, labels=labels, fused_lm_head=True)
            return torch.stack([out.log_probs, out.entropy]).float() * (labels[:, 1:] != -100)

        expected = values()
        enable(model, check=False)
        metrics: defaultdict[str, Any] = defaultdict(lambda: defaultdict(list))
        pack_head(model, SimpleNamespace(_metrics=metrics, model=model))
        return expected, values()

    refuse_unequal(type(trainer), compute)


def of_trees(trainer: Any, give: Callable[[list[dict[str, Any]]], tuple[Any, Any]], run: Callable[..., Any]) -> None:
    """Check log-probs and entropies of an asynchronous trainer: those of each sample alone against those of the tree.
    `give` returns the inputs of TRL's loss for samples and what that gives the model; `run` calls an enabled one."""
    lens = MASK.sum(1).tolist()
    samples = [
        {"input_ids": ids[mask != 0], "completion_mask": torch.arange(n) >= 2, "old_log_probs": torch.zeros(n)}
        | {"advantage": 1.0, "group_id": 0, "metrics": {}}
        for ids, mask, n in zip(IDS, MASK, lens, strict=True)
    ]

    def compute(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        def values(out: Any, at: torch.Tensor) -> torch.Tensor:
            return torch.stack([x.flatten()[at] for x in (out.log_probs, out.entropy)]).float()

        def alone(ids: torch.Tensor) -> torch.Tensor:
            labels = torch.cat([ids[1:], torch.tensor([-100])])[None]
            out = model(input_ids=ids[None], shift_labels=labels, fused_lm_head=True)
            return values(out, torch.arange(1, len(ids) - 1))

        expected = torch.cat([alone(sample["input_ids"]) for sample in samples], 1)
        enable(model, check=False)
        inputs, given = give(samples)
        return expected, values(run(model, **given), inputs["token_index"][0])

    refuse_unequal(type(trainer), compute)
