"""Recurrent layers on packed rows, against the same model run on every replicated sequence alone."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import types
import warnings
import weakref
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations import flash_linear_attention as fla  # noqa: E402
from dualkv.integrations.recurrent import kernels, ops, rules, waves  # noqa: E402
from dualkv.integrations.recurrent.walked import Trees  # noqa: E402
from dualkv.integrations.transformers import (  # noqa: E402  # noqa: E402
    disable,
    earlier,
    enable,
    recompute_layers,
    recurrent,
    selfcheck,
)
from tests.integrations.doubled import double_throughout  # noqa: E402
from tests.integrations.tiny import TREE, Losses, assert_close, gradients, hooks, paths, take_gradients, token_ids  # noqa: E402
from tools import zoo  # noqa: E402

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 16}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
         "mamba_chunk_size": 16}  # fmt: skip
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {**GATED, "head_dim": 16, "layer_types": LAYERS},
    "qwen3_5_moe_text": {**GATED, **EXPERTS, **SHARED, "head_dim": 16, "layer_types": LAYERS},
    "qwen3_next": {**GATED, **EXPERTS, **SHARED, "head_dim": 16, "layer_types": LAYERS},
    "olmo_hybrid": {"layer_types": LAYERS},
    # Values of another head dim than the keys'.
    "kimi_linear": {
        "layer_types": LAYERS, "linear_head_dim": 8, "linear_num_heads": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 24, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse"]},
    # A lower bound of slow decays, as those that `make` gives to the others.
    "bailing_hybrid": {
        "layer_types": LAYERS, "head_dim": 8, "kda_lower_bound": -0.05, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 24, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_mtp_layers": 0},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"], "head_dim": 8,
        "ssm_state_size": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16},
    "falcon_h1": {**MAMBA, "num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 64},
    "bamba": {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "granitemoehybrid": {**MAMBA, **LOCAL_EXPERTS, "layer_types": LAYERS, "shared_intermediate_size": 16},
    # Two blocks of attention that hybrid layers share.
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"], "num_hidden_layers": 5,
        "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 16, "num_key_value_heads": 4,
        "num_mem_blocks": 2, "use_shared_attention_adapter": True, "adapter_rank": 4, "use_mem_rope": True},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "lfm3": {
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"], "head_dim": 8, "sliding_window": 9},
    "minimax": {**LOCAL_EXPERTS, "head_dim": 8, "layer_types": LAYERS, "block_size": 16},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding", "hybrid"], "sliding_window": 9, "head_dim": 16,
             "num_experts": 4, "moe_intermediate_size": 16},
}  # fmt: skip

FAMILIES = {name: fields for name, fields in FAMILIES.items() if name in tf.models.auto.CONFIG_MAPPING}
# Before transformers 5.17, which veRL asks for (tests/integrations/verl/test_earlier.py), kinds of layers have other
# names, and Nemotron-H's PyTorch code is wrong behind the first chunk.
if not hasattr(tf.models, "kimi_linear"):
    FAMILIES["nemotron_h"] |= {"layers_block_type": ["mamba", "mlp", "attention", "mamba"], "chunk_size": 256}
    FAMILIES["granitemoehybrid"] |= {"layer_types": ["mamba", "attention", "mamba"]}
    for _name in ("olmo_hybrid", "kimi_linear", "lfm3", "zamba2", "bailing_hybrid"):
        FAMILIES.pop(_name, None)
# Short convolutions of some versions hand no arguments on and are not as before, and are refused.
_CONV = tf.models.lfm2.modeling_lfm2.Lfm2ShortConv
_RUNS = earlier.knows(_CONV) or "kwargs" in inspect.signature(_CONV.forward).parameters
FAMILIES = {name: fields for name, fields in FAMILIES.items() if "lfm" not in name or _RUNS}


def there(*families: str) -> list[str]:
    return [name for name in families if name in FAMILIES]


OFTEN = ("qwen3_5_text", "kimi_linear", "bamba", "lfm2", "minimax")  # a family of each kind of layer
# Two groups of ragged responses (empty, of 1 and 2 tokens, longer than a chunk of 64), a prompt of 1 token, and a tree
# of five levels with an empty segment in the middle: (length, parent).
SEGMENTS = [(70, -1), (1, 0), (9, 0), (0, 0), (2, 0), (65, 0),
            (1, -1), (3, 6), (30, 6), (1, 6),
            (5, -1), (2, 10), (1, 11), (66, 11), (1, 13), (3, 13), (0, 10), (4, 16), (1, 16)]  # fmt: skip
FOREST = dualkv.Layout.from_segments(np.cumsum([0, *(n for n, _ in SEGMENTS)]), [p for _, p in SEGMENTS])


def make(family: str, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    """A tiny model whose decays are slow, so that a response depends on the state that its prompt leaves."""
    settings = {**SMALL, **FAMILIES[family], **others}
    if "layer_types" in settings:
        settings["num_hidden_layers"] = len(settings["layer_types"])
    torch.manual_seed(0)
    config = tf.AutoConfig.for_model(family, **settings)
    build = tf.AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.empty_like(p).uniform_(-7, -4) if "A_log" in name else p + torch.randn_like(p) * 0.1)
    model.to(dtype)
    for module in model.modules():  # MiniMax makes tables of its decays in float32
        if hasattr(module, "decay_factors"):
            module.slope_rate = module.get_slope_rate().to(dtype)
            module.query_decay, module.key_decay, module.diagonal_decay = module.decay_factors(module.slope_rate)
    return model.train()


def worst(model: Any, layout: dualkv.Layout, recompute: bool = False, **options: Any) -> float:
    """The largest relative difference of logits and gradients between packed and replicated.

    recompute: checkpoint the layers of the packed run. options: of `enable`.
    """
    expected = zoo.replicated(model, layout)
    if recompute:
        recompute_layers(model)
    got = zoo.packed(enable(model, check=False, **options), layout)
    disable(model)
    return zoo.difference(got, expected)


BOUND = {torch.float64: 1e-9, torch.float32: 3e-5}  # kimi_linear 1.8e-5 on one kind of processor, all others below 1e-5


@pytest.mark.parametrize(
    ("family", "dtype", "recompute"),
    [(name, torch.float64, False) for name in FAMILIES] + [(name, torch.float32, True) for name in there(*OFTEN)],
)
def test_packed_equals_replicated(family: str, dtype: torch.dtype, recompute: bool) -> None:
    with double_throughout() if dtype == torch.float64 else nullcontext():
        assert worst(make(family, dtype), FOREST, recompute) < BOUND[dtype]


FAULTS = {
    "a child state of zeros": ("inherit", lambda states, gather: torch.zeros_like(states[gather.parents])),
    "a detached parent state": ("inherit", lambda states, gather: states.detach()[gather.parents]),
    "the parent of another segment": ("inherit", lambda states, gather: states[gather.parents.flip(0)]),
}


@pytest.mark.parametrize("family", there("qwen3_5_text", "bamba"))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_state_would_be_seen(fault: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong = FAULTS[fault]
    monkeypatch.setattr(ops, name, wrong)
    assert worst(make(family), FOREST) > 1e-2


@pytest.mark.parametrize("family", there(*OFTEN))
def test_the_self_check_finds_wrong_states_and_convolutions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    model = make(family)
    enable(model)
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    if "lfm" in family:
        monkeypatch.setattr(rules, "convolve", lambda conv, layout, *args, **kwargs: conv(*args, **kwargs))
    else:
        monkeypatch.setattr(ops, *FAULTS["a child state of zeros"])
    with pytest.raises(ValueError, match="does not compute packed groups as it computes replicated sequences"):
        enable(model)


# ---------------------------------------------------------------- waves
def random_forest(seed: int) -> dualkv.Layout:
    draw = np.random.default_rng(seed)
    parent: list[int] = []
    path: list[int] = []
    for at in range(int(draw.integers(0, 14))):
        path = path[: int(draw.integers(0, len(path) + 1))]
        parent.append(path[-1] if path else -1)
        path.append(at)
    return dualkv.Layout.from_segments(np.cumsum([0, *draw.integers(0, 5, len(parent))]), parent)


@pytest.mark.parametrize("seed", range(30))
def test_scans_and_convolutions_follow_paths(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum and a convolution of four taps, against the same along each row's own path."""
    monkeypatch.setattr(waves, "SHORTEST", 1 + seed % 2)  # buckets of lengths 1, 2, 3 to 4
    layout = random_forest(seed)
    if not layout.num_tokens:
        return
    x = torch.randn(1, layout.num_tokens, 2, dtype=torch.float64)
    weight = torch.randn(2, 4, dtype=torch.float64)

    def conv(x: torch.Tensor) -> torch.Tensor:
        return rules.convolution(x, weight)

    def sums(rows: list[torch.Tensor], initial: torch.Tensor | None, keep: bool) -> Any:
        out = rows[0].cumsum(1) + (0 if initial is None else initial[:, None])
        return out, out[:, -1]

    summed = ops.scan(Trees(layout), [x], ops.padded(sums))
    convolved = ops.convolve(conv, waves.windows(layout, 3, x.device), x.transpose(1, 2)).transpose(1, 2)
    covered = set()
    for path, _ in paths(layout):
        torch.testing.assert_close(summed[0, path], x[0, path].cumsum(0))
        torch.testing.assert_close(convolved[0, path], conv(x[:, path].transpose(1, 2))[0].t())
        covered |= set(path)
    assert len(covered) == layout.num_tokens
    order = waves.order(layout, x.device)
    assert order is waves.order(layout, x.device)  # made once a layout
    assert [wave.gather is None for wave in order.waves] == [True] + [False] * (len(order.waves) - 1)


def test_a_long_segment_does_not_pad_the_short_ones_of_its_wave() -> None:
    """Padded all together, this wave would have 64 x 4000 rows."""
    lengths = [4000, *range(1, 33), *range(100, 131)]
    layout = dualkv.Layout.from_lengths([3], [lengths])
    shapes: list[torch.Size] = []

    def sums(rows: list[torch.Tensor], initial: torch.Tensor | None, keep: bool) -> Any:
        shapes.append(rows[0].shape)
        out = rows[0].cumsum(1) + (0 if initial is None else initial[:, None])
        return out, out[:, -1]

    def scanned(x: torch.Tensor) -> torch.Tensor:
        return ops.scan(Trees(layout), [x], ops.padded(sums))

    x = torch.randn(1, layout.num_tokens, 2, dtype=torch.float64)
    out = scanned(x)
    assert shapes == [(1, 3, 2), (32, 32, 2), (29, 128, 2), (2, 130, 2), (1, 4000, 2)]
    for path, _ in paths(layout):
        torch.testing.assert_close(out[0, path], x[0, path].cumsum(0))
    buckets = waves.order(layout, x.device).waves[1].buckets
    scanned(x)
    assert waves.order(layout, x.device).waves[1].buckets is buckets  # made once a layout


def test_gradients_of_children_add_up() -> None:
    gather = waves.Gather(torch.tensor([0, 0, 0, 2, 2]), torch.tensor([3, 0, 2]))
    states = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: ops.inherit(x, gather), states)


@pytest.mark.parametrize("shortest", [1, 64])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_backward_keeps_states_of_parents_and_gathers_those_of_children_again(
    recompute: bool, shortest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hooks around the scan (gradient checkpointing has some) get states of two parents, not of five children."""
    monkeypatch.setattr(waves, "SHORTEST", shortest)  # 1: the children run in batches of 3, 1 and 1
    layout = dualkv.Layout.from_lengths([2, 3], [[2, 1, 1], [1, 4]])
    saved: list[torch.Size] = []

    class Plus(torch.autograd.Function):
        """rows + 3 state^2 of their sequence; it keeps its initial states, as the library's functions do."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, initial)
            return x + 3 * initial[:, None] ** 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            _, initial = ctx.saved_tensors
            return grad, 6 * initial * grad.sum(1)

    def run(rows: list[torch.Tensor], initial: torch.Tensor | None, keep: bool) -> Any:
        out = rows[0] if initial is None else Plus.apply(rows[0], initial)
        return out, out.sum(1)

    def scanned(x: torch.Tensor) -> torch.Tensor:
        def pack(x: torch.Tensor) -> torch.Tensor:
            saved.append(x.shape)
            return x

        with nullcontext() if recompute else torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return ops.scan(Trees(layout), [x], ops.padded(run))

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.utils.checkpoint.checkpoint(scanned, x, use_reentrant=False)
        return found

    x = torch.randn(1, layout.num_tokens, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(checkpointed if recompute else scanned, x)
    if not recompute:
        assert torch.Size([2, 7]) in saved
        assert not {torch.Size([n, 7]) for n in (1, 3, 5)} & set(saved)


# ---------------------------------------------------------------- flash-linear-attention, by stand-ins
class Library:
    """A stand-in for flash-linear-attention's functions: the interface of its version 0.6, one sequence at a time."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool, bool]] = []

    def __call__(self, name: str, device: torch.device) -> Any:
        own = {
            "chunk_gated_delta_rule": lambda: tf.models.qwen3_5.modeling_qwen3_5.torch_chunk_gated_delta_rule,
            "chunk_kda": lambda: tf.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention,
        }.get(name, lambda: None)()

        def function(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            g: torch.Tensor | None = None,
            beta: torch.Tensor | None = None,
            g_gamma: torch.Tensor | None = None,
            scale: float | None = None,
            initial_state: torch.Tensor | None = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            cu_seqlens: torch.Tensor | None = None,
            cu_seqlens_cpu: torch.Tensor | None = None,
            chunk_indices: torch.Tensor | None = None,
            chunk_size: int = 64,
        ) -> Any:
            assert cu_seqlens is not None
            assert cu_seqlens_cpu is not None
            assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
            assert q.shape[:2] == (1, cu_seqlens_cpu[-1])
            if chunk_indices is not None:
                lengths = enumerate(cu_seqlens.diff().tolist())
                of_each = [[i, chunk] for i, rows in lengths for chunk in range(-(-rows // chunk_size))]
                assert chunk_indices.tolist() == of_each
            self.calls.append((name, len(cu_seqlens) - 1, initial_state is not None, output_final_state))
            outs, states = [], []
            for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens_cpu.tolist())):
                part = [None if x is None else x[:, begin:end] for x in (q, k, v, g, beta)]
                initial = None if initial_state is None else initial_state[i : i + 1]
                if own is None:
                    assert (g, beta, scale) == (None, None, 1.0)
                    assert g_gamma is not None
                    ones = torch.ones(1, end - begin)
                    out, state = recurrent._lightning_blocks([*part[:3], ones], initial, -g_gamma.view(-1, 1, 1), 16)
                else:
                    out, state = own(
                        *part[:3], g=part[3], beta=part[4], initial_state=initial, output_final_state=True,
                        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                    )  # fmt: skip
                outs.append(out)
                states.append(state)
            return torch.cat(outs, 1), torch.cat(states) if output_final_state else None

        return function


@pytest.mark.parametrize("family", there("qwen3_5_text", "olmo_hybrid", "kimi_linear", "minimax"))
def test_kernels_of_the_library_run_a_call_a_wave(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(kernels, "library", library)
    assert worst(make(family), FOREST) < BOUND[torch.float32]
    of_one_layer = [(n, initial, final) for _, n, initial, final in library.calls[: len(library.calls) // 2]]
    assert of_one_layer == [(3, False, True), (10, True, True), (2, True, True), (2, True, False)]


def library_convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stand in for the library's convolution: sequences [C, L] in a row, behind states [C, k] whose first is not
    read."""
    assert initial_state is not None
    assert cu_seqlens is not None
    assert cu_seqlens_cpu is not None
    assert cu_seqlens.tolist() == cu_seqlens_cpu.tolist()
    outs = []
    for state, (begin, end) in zip(initial_state, itertools.pairwise(cu_seqlens_cpu.tolist()), strict=True):
        row = torch.cat([state[:, 1:], x[0, :, begin:end]], 1)
        outs.append(nn.functional.conv1d(row, weight[:, None], bias, groups=len(row)))
    out = torch.cat(outs, 1)[None]
    return out if activation is None else nn.functional.silu(out)


@pytest.mark.parametrize("family", there("qwen3_5_text", "bamba", "lfm2"))
def test_convolutions_of_the_library_start_from_rows_of_the_path(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "convolution", lambda activation, device: library_convolution)
    assert worst(make(family), FOREST) < BOUND[torch.float32]


def test_the_library_is_for_gpus_and_its_absence_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fla, "lacking", lambda: "flash-linear-attention 0.6 or newer (found 0.5.2: how)")
    kernels._warn_of_slow_functions.cache_clear()
    assert kernels.library("chunk_kda", torch.device("cpu")) is None
    with pytest.warns(UserWarning, match=r"flash-linear-attention 0\.6 or newer \(found 0\.5\.2: how\)"):
        assert kernels.library("chunk_kda", torch.device("cuda")) is None
    with warnings.catch_warnings(action="error"):
        assert kernels.library("chunk_kda", torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("triton", "capability", "tilelang", "refused"),
    [("3.4.0", 9, False, True), ("3.7.0", 9, False, True), ("3.7.1", 9, False, False), ("3.3.1", 9, False, False),
     ("3.6.0", 10, False, False), ("3.6.0", 9, True, False)],
)  # fmt: skip
def test_a_triton_without_a_right_backward_is_refused(
    triton: str, capability: int, tilelang: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla, "lacking", lambda: None)
    monkeypatch.setattr(fla.packages, "found", lambda name: triton)
    monkeypatch.setattr(fla, "find_spec", lambda name: object() if tilelang else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    if not refused:
        assert fla.refusal() is None
        return
    with pytest.raises(ValueError, match=rf"no backward on Hopper with Triton {triton}: install Triton 3\.7\.1"):
        enable(make("qwen3_5_text"), check=False)
    enable(make("bamba"), check=False)  # has no gated delta rule


# ---------------------------------------------------------------- refusals
def test_what_goes_past_the_seams_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced = make("qwen3_5_text")
    mixer = replaced.model.layers[2].linear_attn
    mixer.forward = types.MethodType(type(mixer).forward, mixer)
    with pytest.raises(ValueError, match=r"layers\.2\.linear_attn \(Qwen3_5GatedDeltaNet\) has a forward of its own"):
        enable(replaced)

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 4, 4, groups=4)

    other = make("falcon_h1")
    other.model.layers[1].mamba = Mixer()  # beside attention, in the same layer
    with pytest.raises(ValueError, match=r"layers\.1\.mamba \(Mixer\) carries a recurrent state, and is of no kind"):
        enable(other)

    changed = make("bamba")
    monkeypatch.setattr(type(changed.model.layers[0].mamba), "forward", lambda self, hidden_states: hidden_states)
    with pytest.raises(ValueError, match=r"\(BambaMixer\) of transformers 5\..* does not call causal_conv1d_fn"):
        enable(changed)


@pytest.mark.skipif(not there("zaya"), reason="transformers before Zaya")
@pytest.mark.parametrize("of_an_adapter", [False, True])
def test_biases_before_zayas_convolutions_are_refused(of_an_adapter: bool) -> None:
    model: Any = make("zaya", attention_bias=not of_an_adapter)
    if of_an_adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], lora_bias=True))
    with pytest.raises(ValueError, match=r"\(ZayaCCAProjection\) has biases before its convolutions"):
        enable(model, check=False)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "minimax"])
def test_what_stands_beside_a_layout_is_refused(family: str) -> None:
    model = enable(make(family), check=False)
    ids = token_ids(TREE)
    mask = torch.ones_like(ids)
    with pytest.raises(ValueError, match="attention_mask came together with dualkv"):
        model(input_ids=ids, dualkv=TREE, attention_mask=mask)
    with pytest.raises(ValueError, match="past_key_values or use_cache came together with dualkv"):
        model(input_ids=ids, dualkv=TREE, use_cache=True)
    with pytest.raises(ValueError, match="seq_idx"):
        model(input_ids=ids, dualkv=TREE, seq_idx=torch.zeros_like(ids))


def test_a_cache_by_place_is_refused() -> None:
    def forward(self: Any, hidden_states: Any, position_embeddings: Any, past_key_values: Any = None) -> None:
        raise AssertionError("the layer's own forward is called")

    packed = recurrent.FORWARDS["MiniMaxLightningAttention"](forward)
    with pytest.raises(ValueError, match="past_key_values came together with dualkv"):
        packed(None, torch.zeros(1, TREE.num_tokens, 4), None, object(), dualkv=TREE)


def test_other_rows_are_refused() -> None:
    mixer = make("qwen3_5_text").model.layers[0].linear_attn
    enable(make("qwen3_5_text"), check=False)
    with pytest.raises(TypeError, match=r"dualkv is a list, expected a dualkv\.Layout$"):
        mixer(torch.randn(1, 8, 32), dualkv=[8])


# ---------------------------------------------------------------- together with other things
@pytest.mark.parametrize("family", ["qwen3_5_text", "nemotron_h", "minimax"])
def test_calls_without_a_layout_do_not_change(family: str) -> None:
    model = make(family).eval()
    ids = token_ids(TREE)[:, :9].repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = model(input_ids=ids, attention_mask=mask).logits
    enable(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    disable(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)
    assert hooks(model) == 0


@pytest.mark.parametrize("family", ["qwen3_5_text", "minimax"])
def test_copies_and_pickles_run_packed(family: str) -> None:
    model = enable(make(family).eval(), check=False)
    ids = token_ids(TREE)
    expected = model(input_ids=ids, dualkv=TREE).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(input_ids=ids, dualkv=TREE).logits, expected)


@pytest.mark.parametrize("family", there("qwen3_5_text", "bamba", "lfm2"))
def test_a_layout_of_calls_in_inference_mode_can_be_trained_on(family: str) -> None:
    """Waves, windows and what follows from them are made once for a layout, in whichever call comes first."""
    model, layout = enable(make(family), check=False), copy.deepcopy(TREE)
    ids = token_ids(layout)
    with torch.inference_mode():
        model(input_ids=ids, dualkv=layout)
    model(input_ids=ids, dualkv=layout).logits.sum().backward()


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "nemotron_h", "minimax"])
def test_autocast(family: str) -> None:
    """Packed bf16 lies as near to fp32 as replicated bf16."""
    model = enable(make(family), check=False)
    losses = Losses(TREE, token_ids(TREE), torch.float32)
    _, expected, _ = losses.replicated(model)
    with torch.autocast("cpu", torch.bfloat16):
        _, alone, _ = losses.replicated(model)
        packed, loss = losses.packed(model)
    loss.backward()
    assert_close("log-probs", packed, expected, 2 * ((alone - expected).norm() / expected.norm()).item() + 1e-3)


@pytest.mark.parametrize("family", [pytest.param("qwen3_5_text", marks=pytest.mark.slow), "minimax"])
def test_compiled(family: str) -> None:
    """The graph breaks at recurrent layers; results and gradients stay."""
    model = enable(make(family, layer_types=LAYERS[:2]), check=False)
    losses = Losses(TREE, token_ids(TREE), torch.float32)
    expected, loss = losses.packed(model)
    loss.backward()
    grads = take_gradients(model)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        got, loss = losses.packed(compiled)
    loss.backward()
    assert_close("log-probs", got, expected, 1e-5)
    for name, g in gradients(model).items():
        assert (g - grads[name]).norm() <= 1e-5 * grads[name].norm() + 1e-7, name


def test_gathered_states_are_not_kept() -> None:
    states, parents = torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 1, 1])
    weight, initial = torch.ones(3, 4, dtype=torch.float64, requires_grad=True), states.index_select(0, parents)
    with ops.gathered_again(initial, states, parents):
        found = (weight * initial).sum()
    there = weakref.ref(initial)
    del initial
    assert there() is None
    assert torch.equal(torch.autograd.grad(found, weight)[0], states.index_select(0, parents))


def test_gathered_states_that_are_written_to_are_kept() -> None:
    states, parents = torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 1, 1])
    weight, initial = torch.ones(3, 4, dtype=torch.float64, requires_grad=True), states.index_select(0, parents)
    with ops.gathered_again(initial, states, parents):
        found = (weight * initial.mul_(3)).sum()
    assert torch.equal(torch.autograd.grad(found, weight)[0], 3 * states.index_select(0, parents))
