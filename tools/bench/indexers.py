"""`python -m tools.bench.indexers --json docs/results/indexers-h200.json`: a layer whose indexer selects keys.

One dense layer of DeepSeek-V3.2's shape with random weights, forward and backward: a packed group against the same
sequences apart. Both ways run packed calls of the same functions, since transformers' own would make the scores of all
index heads and pairs of a sequence at once. Prints and records seconds and peak memory of a step, of a forward, and of
the selection alone, and the distance between the hidden states of both ways, whose sets differ where rounding decides.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from dualkv.integrations.transformers import enable, indexers, selfcheck
from dualkv.layout import Layout
from dualkv.ops import compiling, flex
from tools.bench import harness
from tools.bench.record import OptionalJsonPath, Record


def make_layer(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """An enabled decoder of one layer with random weights."""
    from transformers import DeepseekV32Model

    with device:
        model = DeepseekV32Model(config).to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return enable(model, check=False).train()


def published(heads: int, keys: int) -> Any:
    """DeepSeek-V3.2's configuration with one dense layer, a small vocabulary and so many heads and selected keys."""
    from transformers import DeepseekV32Config

    few = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "vocab_size": 1024, "mlp_layer_types": ["dense"]}
    return DeepseekV32Config(
        **few, num_attention_heads=heads, num_key_value_heads=heads, index_topk=keys, attn_implementation="eager"
    )


def measure(
    model: Any, prompt_len: int, response_len: int, responses: int, together: int, repeats: int
) -> dict[str, Any]:
    """Figures of both ways; `together` sequences apart run in one call."""
    device, width = model.device, model.config.hidden_size
    packed = Layout.from_lengths([prompt_len], [[response_len] * responses], device)
    draw = torch.Generator(device).manual_seed(0)
    x, gradient = (
        torch.randn(packed.num_tokens, width, generator=draw, device=device).to(model.dtype) for _ in range(2)
    )
    paths = [torch.tensor(path, device=device) for path in selfcheck.sequence_rows(packed)]
    parts = [paths[i : i + together] for i in range(0, responses, together)]
    calls = {
        "packed": [(packed, torch.arange(packed.num_tokens, device=device))],
        "apart": [(Layout.from_lengths([len(path) for path in part], [[]] * len(part), device), torch.cat(part))
                  for part in parts],
    }  # fmt: skip

    def forward(layout: Layout, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = model(inputs_embeds=x[rows][None].requires_grad_(), dualkv=layout)[0][0]
        return hidden

    def forwards(way: str) -> list[torch.Tensor]:
        with torch.no_grad():
            return [forward(*call) for call in calls[way]]

    def step(way: str) -> None:
        for layout, rows in calls[way]:
            forward(layout, rows).backward(gradient[rows])

    def select(way: str) -> None:
        for given in noted[way]:
            given.sets()

    sets, noted = indexers._Selection.sets, dict[str, list[Any]]()
    figures: dict[str, Any] = {"rows": {}, "step": {}, "forward": {}, "selection": {}}
    hidden: dict[str, list[torch.Tensor]] = {}
    for way in calls:
        noted[way] = []

        def note(self: Any, to: list[Any] = noted[way]) -> torch.Tensor:
            to.append(self)
            return sets(self)

        with mock.patch.object(indexers._Selection, "sets", note):
            hidden[way] = forwards(way)
        step(way)  # compiles
        model.zero_grad(set_to_none=True)
        figures["rows"][way] = sum(len(rows) for _, rows in calls[way])
        for name, run in (("selection", select), ("forward", forwards), ("step", step)):
            figures[name][way], _ = harness.repeated(partial(run, way), repeats, model.zero_grad)
        noted.clear()
    apart = torch.cat(hidden["apart"])
    off = (hidden["packed"][0][torch.cat(paths)] - apart).float().norm(dim=-1) / apart.float().norm(dim=-1)
    figures["distance"] = {"median": float(off.median()), "largest": float(off.max())}
    for name in ("step", "forward", "selection"):
        figures[name]["times_as_fast"] = figures[name]["apart"]["median"] / figures[name]["packed"]["median"]
    figures["flex"] = flex.unsupported(x[:, None, :16], x[:, None, :16]) or [*compiling.failures.values()] or "compiled"
    return figures


def main(
    json_to: OptionalJsonPath = None,
    prompt_len: harness.PromptLen = 8192,
    response_len: harness.ResponseLen = 1024,
    responses: harness.Responses = 16,
    heads: Annotated[int, typer.Option(help="Query heads; the model has 128.")] = 128,
    keys: Annotated[int, typer.Option(help="Keys that the indexer selects.")] = 2048,
    together: Annotated[int, typer.Option(help="Sequences apart in one call.")] = 4,
    repeats: Annotated[int, typer.Option(help="Timed runs.")] = 3,
) -> None:
    """Compare a layer with an indexer on a packed group and on the same sequences apart."""
    device = harness.best_device()
    record = Record(json_to, gpu=device.type == "cuda")
    torch.manual_seed(0)
    model = make_layer(published(heads, keys), device, torch.bfloat16)
    sizes = {"prompt_len": prompt_len, "response_len": response_len, "responses": responses, "heads": heads}
    figures: dict[str, Any] = sizes | {"keys": keys, "together": together}
    figures |= measure(model, prompt_len, response_len, responses, together, repeats)
    record.write(figures, figures)


if __name__ == "__main__":
    typer.run(main)
