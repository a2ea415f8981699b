"""Models under `torch.compile(mode="reduce-overhead")`: CUDA graphs around the ops, whatever layouts take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_container
from transformers import Qwen3Config, Qwen3ForCausalLM

import dualkv
from dualkv import Layout
from dualkv.integrations.transformers import enable
from dualkv.ops import backends

pytestmark = pytest.mark.any_gpu

ROWS, HEADS, HEAD_DIM = 1000, 4, 64
# Of one shape: as many rows and segments, so that one graph could serve them all.
SHAPES = [([400], [[200, 200, 200]]), ([100], [[500, 300, 100]]), ([700], [[10, 90, 200]])]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def sharpen(model: nn.Module) -> None:
    """Weights with which attention makes much of a model's result."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


class Blocks(nn.Module):
    """Two layers of attention, with products and pointwise work around them."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.backend = backend
        self.to("cuda", torch.bfloat16)
        sharpen(self)

    def forward(self, x: torch.Tensor, layout: Layout) -> torch.Tensor:
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(ROWS, 3 * HEADS, HEAD_DIM).split(HEADS, 1)
            mixed = dualkv.attention(q * 2, k, v, layout, deterministic=True, backend=self.backend)
            x = x + torch.tanh(out(mixed.flatten(1)))
        return x


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.float() - y.float()).norm() / y.float().norm())


def alternate(
    model: nn.Module, compiled: Callable[..., torch.Tensor], call: Callable[..., torch.Tensor], gradients: bool
) -> None:
    """Compare twelve calls of a compiled model with eager ones; each of three layouts comes again, and so does one that
    is made anew each time."""
    weights = [x for x in model.parameters() if x.dim() > 1][:4]
    kept = [Layout.from_lengths(*shape, device="cuda") for shape in SHAPES]
    for step in range(12):
        layout = kept[step % 3] if step < 6 else Layout.from_lengths(*SHAPES[step % 3], device="cuda")
        other = kept[(step + 1) % 3]
        given = torch.randint(320, (1, ROWS), device="cuda")
        weight = torch.randn(ROWS, 1, device="cuda")
        results = []
        torch.compiler.cudagraph_mark_step_begin()
        for run, of in ((compiled, layout), (model, layout), (model, other)):
            with torch.set_grad_enabled(gradients):
                out = call(run, given, of)
            grads = torch.autograd.grad((out.float() * weight).sum(), weights) if gradients else ()
            results.append([out.detach().clone(), *(x.clone() for x in grads)])
        for got, want, wrong in zip(*results, strict=True):
            assert distance(got, want) < 0.04 < 0.06 < distance(wrong, want), step
    assert counters["inductor"]["cudagraph_skips"] == 0
    manager = get_container(torch.cuda.current_device()).tree_manager
    assert manager is not None
    assert manager.new_graph_id().id > 0, "no CUDA graph was recorded: this test cannot tell"


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", ["hopper", "cudnn", "flex", "flash", "reference"])
def test_layouts_of_one_shape_take_turns(name, gradients):
    probe = torch.empty(1, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    if (reason := backends.BACKENDS[name].unsupported(probe, probe)) is not None:
        pytest.skip(f"{name} does not serve {reason}")
    model = Blocks(name)
    table = torch.randn(320, HEADS * HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    alternate(model, compiled, lambda run, tokens, layout: run(table[tokens[0]], layout), gradients)


@pytest.mark.parametrize("gradients", [False, True])
def test_a_model_of_transformers(gradients):
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, num_attention_heads=HEADS, num_key_value_heads=2, head_dim=HEAD_DIM)
    model = Qwen3ForCausalLM(config).to("cuda", torch.bfloat16).model
    sharpen(model)
    enable(model, deterministic=True)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def call(run: nn.Module, tokens: torch.Tensor, layout: Layout) -> torch.Tensor:
        return run(input_ids=tokens, dualkv=layout).last_hidden_state[0]

    alternate(model, compiled, call, gradients)
