"""FP8 products around attention, packed against separate, on the CPU (torchao emulates them):

    python -m tools.bench.fp8 --json docs/results/fp8-cpu.json

A small Qwen3 with random weights; torchao's `Float8Linear` in the place of every linear layer of the decoder, once for
each recipe. The distances are norms of differences over the norm of the second one, of log-probs of responses, and of
gradients of these layers:

- noise: separate sequences with FP8 against separate sequences without;
- noise_packed: packed groups with FP8 against separate sequences without;
- packed: packed groups against separate sequences, both with FP8;
- micro_batches: the same sequences in two padded micro-batches against separate sequences, both with FP8;
- packed_over_batch: packed groups against one padded batch, both with FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import typer

import dualkv
from dualkv.integrations.transformers import enable
from tools.bench.record import OptionalJsonPath, Record

RECIPES = ("rowwise", "rowwise_with_gw_hp", "tensorwise")
VOCABULARY = 512
Found = tuple[torch.Tensor, torch.Tensor]  # log-probs of all responses end to end, gradients end to end


@dataclass(frozen=True)
class Sizes:
    layers: int = 3
    hidden: int = 64
    prompts: tuple[int, ...] = (96, 60)
    responses: tuple[int, ...] = (32, 20, 44, 12)


class Rollouts:
    """Groups of random tokens, and a loss that weighs each token of a response."""

    def __init__(self, sizes: Sizes) -> None:
        draw = torch.Generator().manual_seed(0)
        tokens = [torch.randint(VOCABULARY, (n,), generator=draw) for n in sizes.prompts]
        answers = [[torch.randint(VOCABULARY, (n,), generator=draw) for n in sizes.responses] for _ in tokens]
        self.batch = dualkv.pack(tokens, answers)
        self.rows = [torch.cat([p, r]) for p, rs in zip(tokens, answers, strict=True) for r in rs]
        self.prompts = [len(p) for p in tokens for _ in sizes.responses]
        self.weights = torch.randn(self.batch.num_response_tokens, generator=draw)

    def packed(self, model: Any) -> Found:
        batch = self.batch
        logits = model(input_ids=batch.input_ids, dualkv=batch.layout).logits[0, batch.predict_rows]
        return self._found(model, batch.unpack(_log_probs(logits, batch.targets)))

    def in_batches(self, model: Any, batches: Sequence[Sequence[int]]) -> Found:
        """Padded batches of these sequences."""
        found = {}
        for some in batches:
            ids = torch.nn.utils.rnn.pad_sequence([self.rows[i] for i in some], batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(self.rows[i]) for i in some], batch_first=True)
            logits = model(input_ids=ids, attention_mask=mask).logits
            for i, own in zip(some, logits, strict=True):
                begin, end = self.prompts[i], len(self.rows[i])
                found[i] = _log_probs(own[begin - 1 : end - 1], self.rows[i][begin:])
        return self._found(model, [found[i] for i in range(len(self.rows))])

    def _found(self, model: Any, rows: list[torch.Tensor]) -> Found:
        logp = torch.cat(rows)
        model.zero_grad()
        (logp * self.weights).mean().backward()
        layers = [p.grad.float().flatten() for name, p in model.named_parameters() if "proj" in name]
        return logp.detach(), torch.cat(layers)


def _log_probs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """logits [n, V], ids [n] -> float32 [n]"""
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def make_model(sizes: Sizes, dtype: torch.dtype, recipe: str | None) -> Any:
    """Build the model with the same weights every time, with FP8 for a recipe of torchao."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": sizes.hidden // 4}
    shape = {"hidden_size": sizes.hidden, "intermediate_size": 2 * sizes.hidden, "num_hidden_layers": sizes.layers}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCABULARY, initializer_range=0.05, **shape, **heads)).to(dtype)
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "lm_head" not in name)
    return model


def measure(sizes: Sizes, dtype: torch.dtype, recipe: str | None) -> dict[str, dict[str, float]]:
    """Compute the distances, those of log-probs and those of gradients; without a recipe there is no noise."""
    rollouts = Rollouts(sizes)
    number = len(rollouts.rows)

    def made(run: Callable[[Any], Found], recipe: str | None = recipe) -> Found:
        return run(make_model(sizes, dtype, recipe))

    separate = made(lambda model: rollouts.in_batches(model, [[i] for i in range(number)]))
    packed = made(lambda model: rollouts.packed(enable(model)))
    batch = made(lambda model: rollouts.in_batches(model, [range(number)]))
    halves = made(lambda model: rollouts.in_batches(model, [range(0, number, 2), range(1, number, 2)]))
    pairs = {"packed": (packed, separate), "micro_batches": (halves, separate), "packed_over_batch": (packed, batch)}
    if recipe is not None:
        plain = made(lambda model: rollouts.in_batches(model, [[i] for i in range(number)]), None)
        pairs = {"noise": (separate, plain), "noise_packed": (packed, plain), **pairs}
    return {
        of: {name: ((a[i] - b[i]).norm() / b[i].norm()).item() for name, (a, b) in pairs.items()}
        for i, of in enumerate(("log_probs", "gradients"))
    }


def main(json_to: OptionalJsonPath = None) -> None:
    from importlib.metadata import version

    record, sizes = Record(json_to, gpu=False), Sizes()
    figures: dict[str, Any] = {"torchao": version("torchao"), "sizes": asdict(sizes), "distances": []}
    for dtype in ("float32", "bfloat16"):
        for recipe in (None, *RECIPES):
            found = measure(sizes, getattr(torch, dtype), recipe)
            figures["distances"].append({"dtype": dtype, "recipe": recipe or "none", **found})
            record.write(figures, figures["distances"][-1])


if __name__ == "__main__":
    typer.run(main)
