"""Hybrid models on a GPU: packed and replicated runs of the same kernels, against PyTorch's functions in fp32.

Scans and convolutions are flash-linear-attention's, but for Mamba-2, which runs transformers' PyTorch functions.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import dualkv
from codegen.spec import backward_specs, forward_spec

pytest.importorskip("transformers")

from dualkv.integrations import flash_linear_attention as fla
from dualkv.integrations.recurrent import ops, waves
from dualkv.integrations.transformers import disable, enable, recompute_layers
from dualkv.integrations.transformers.recurrent import on_reference
from tests.integrations.tiny import Losses, gradients, token_ids
from tests.integrations.transformers.test_recurrent import FAMILIES as KNOWN
from tests.integrations.transformers.test_recurrent import FOREST, make

pytestmark = [
    pytest.mark.skipif(fla.lacking() is not None, reason=f"needs {fla.lacking()}"),
    pytest.mark.skipif(fla.refusal() is not None, reason=str(fla.refusal())),
]

# Triton's products take 16 columns or more. No router chooses among experts: rounding would change its choice.
WIDE = {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": WIDE,
    "olmo_hybrid": WIDE,
    "kimi_linear": {"linear_head_dim": 32, "mlp_layer_types": ["dense"] * 3},
    "minimax": {"head_dim": 32, "num_local_experts": 2},
    "bamba": {},
    "lfm2": {},
}
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module", autouse=True)
def attention(compile_all: Any) -> None:
    specs = [forward_spec("bf16", 64, ratio, trees=trees) for ratio in (1, 2) for trees in (False, True)]
    compile_all([*specs, *backward_specs("bf16", 64, False).present])


@pytest.fixture(scope="module", autouse=True)
def untuned() -> Iterator[None]:
    """Triton kernels run in the first configuration that fits the device: tuning compiles hundreds of others."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        for config in self.prune_configs(kwargs):
            try:
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
            except OutOfResources as error:
                why = error
        raise why

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Autotuner, "run", run)
        yield


def on_device() -> tuple[dualkv.Layout, Losses]:
    layout = dualkv.Layout.from_segments(FOREST.offsets.tolist(), FOREST.parent.tolist(), "cuda")
    losses = Losses(layout, token_ids(FOREST).cuda(), FP32)
    losses.weight = losses.weight.cuda()
    return layout, losses


def found(model: Any, losses: Losses, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and all gradients of the losses, as two vectors in fp64 on the CPU."""
    model.zero_grad()
    logp, loss = losses.packed(model) if packed else losses.replicated(model)[1:]
    loss.backward()
    each = [g.double().flatten().cpu() for g in gradients(model).values()]
    return logp.detach().double().cpu(), torch.cat(each)


def set_decays(model: Any, device: str, dtype: torch.dtype, rounded: torch.dtype) -> None:
    """MiniMax's slopes, rounded to a dtype, and what it makes of them."""
    for module in model.modules():
        if hasattr(module, "decay_factors"):
            slope = module.get_slope_rate().to(rounded).float()
            module.slope_rate = slope.to(device, dtype)
            tables = (x.to(device, dtype) for x in module.decay_factors(slope))
            module.query_decay, module.key_decay, module.diagonal_decay = tables


def distances(family: str, dtype: torch.dtype, recompute: bool = False) -> list[tuple[float, float]]:
    """(packed, replicated) relative distances of log-probs and of gradients from PyTorch's functions in fp32."""
    _, losses = on_device()
    model = make(family, dtype, **FAMILIES[family])
    here = Losses(FOREST, token_ids(FOREST), FP32)
    set_decays(model.float(), "cpu", FP32, dtype)
    with on_reference(model):
        truth = found(model, here, packed=False)
    model.to("cuda", dtype)
    set_decays(model, "cuda", dtype, dtype)
    replicated = found(model, losses, packed=False)
    enable(model, check=False)
    if recompute:
        recompute_layers(model)
    packed = found(model, losses, packed=True)
    disable(model)
    return [
        (((a - t).norm() / t.norm()).item(), ((b - t).norm() / t.norm()).item())
        for a, b, t in zip(packed, replicated, truth, strict=True)
    ]


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family in KNOWN])
def test_packed_is_as_near_to_fp32_as_replicated(family: str, dtype: torch.dtype) -> None:
    """The distance is at most twice as large, beside rounding: the library multiplies fp32 as tf32, MiniMax's own layer
    does not."""
    rounding = 5e-3 if family == "minimax" else 1e-5
    for packed, replicated in distances(family, dtype, recompute=dtype == FP32):
        assert replicated < 0.1, "the reference is no reference"
        assert packed <= 2 * replicated + rounding, (packed, replicated)


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "minimax"])
def test_a_wrong_state_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "inherit", lambda states, gather: torch.zeros_like(states[gather.parents]))
    assert any(packed > 3 * replicated + 1e-3 for packed, replicated in distances(family, FP32))


def test_enable_passes_its_own_check_and_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="recurrent layers run")
        model = enable(make("qwen3_5_text", BF16, **WIDE).cuda())
        layout, losses = on_device()
        with torch.no_grad():
            model(input_ids=losses.ids, dualkv=layout)


def test_gradients_of_states_are_equal_from_run_to_run() -> None:
    """A parent's gradient is a sum over its children in their order, with no atomic additions; so is that of zero."""
    counts = torch.tensor([700, 0, 1, 33])
    gather = waves.Gather(torch.arange(4).repeat_interleave(counts).cuda(), counts.cuda())
    states = torch.randn(4, 3, 40, 50, device="cuda", requires_grad=True)
    grad = torch.randn(int(counts.sum()), 3, 40, 50, device="cuda")
    results = [torch.autograd.grad(ops.inherit(states, gather), states, grad)[0] for _ in range(3)]
    assert all(torch.equal(results[0], other) for other in results)
    expected = torch.stack([part.double().sum(0) for part in grad.split(counts.tolist())])
    torch.testing.assert_close(results[0].double(), expected, atol=1e-3, rtol=1e-5)


def test_states_of_children_are_not_kept() -> None:
    """400 responses of one token: what a layer keeps for its backward stays below half of the size of their states."""
    layout = dualkv.Layout.from_lengths([64], [[1] * 400], "cuda")
    sizes = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    model = enable(make("qwen3_5_text", BF16, **sizes).cuda(), check=False)
    mixer = model.model.layers[0].linear_attn
    x = torch.randn(1, layout.num_tokens, 32, device="cuda", dtype=BF16, requires_grad=True)
    mixer(x, dualkv=layout).sum().backward()  # layouts keep what they make once
    before = torch.cuda.memory_allocated()
    out = mixer(x, dualkv=layout)
    kept = torch.cuda.memory_allocated() - before
    assert kept < 400 * 4 * 64 * 64 * 4 / 2
    out.sum().backward()


@pytest.mark.parametrize("lengths", [([1], [[1]]), ([1, 3], [[1, 2], [64, 65, 1]]), ([200], [[0, 63, 0]])])
def test_shortest_sequences(lengths: Any) -> None:
    """Segments shorter than a chunk and than the convolution, in a mixer alone, against the CPU."""
    model = enable(make("qwen3_5_text", **WIDE), check=False)
    mixer = model.model.layers[0].linear_attn
    layout = dualkv.Layout.from_lengths(*lengths)
    x = torch.randn(1, layout.num_tokens, 32, requires_grad=True)
    expected = mixer(x, dualkv=layout)
    (dx,) = torch.autograd.grad(expected.square().sum(), x)
    there = x.detach().cuda().requires_grad_()
    got = mixer.cuda()(there, dualkv=dualkv.Layout.from_lengths(*lengths, device="cuda"))
    (dx_there,) = torch.autograd.grad(got.square().sum(), there)
    for a, b in ((got, expected), (dx_there, dx)):
        assert (a.detach().cpu() - b.detach()).norm() <= 5e-3 * b.detach().norm()


def test_compiled() -> None:
    """torch.compile with Inductor around recurrent layers: its Triton kernels and the library's side by side."""
    _, losses = on_device()
    model = enable(make("qwen3_5_text", FP32, **WIDE).cuda(), check=False)
    expected = found(model, losses, packed=True)
    got = found(torch.compile(model), losses, packed=True)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).norm() <= 5e-3 * b.norm()
