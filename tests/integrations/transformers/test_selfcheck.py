"""The self-check of `enable`: what it passes, what it refuses, and that it leaves everything else alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

tf = pytest.importorskip("transformers")

import dualkv  # noqa: E402
from dualkv.integrations.transformers import (  # noqa: E402
    enable,
    layers,
    selfcheck,
)
from dualkv.integrations.transformers.indexers import longest_path  # noqa: E402
from dualkv.integrations.transformers.shrink import SELF_CHECK, shrink, thresholds  # noqa: E402
from dualkv.integrations.transformers.support import config_of  # noqa: E402
from tests.integrations.tiny import hooks, make_featured, make_model  # noqa: E402
from tools import zoo  # noqa: E402

MODELS = json.loads((Path(__file__).parents[2] / "files" / "models.json").read_text())


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})


def verdict(family: str, model: str = "Model", **settings: Any) -> str | None:
    return selfcheck.verdict_of(getattr(tf, f"{family}{model}"), getattr(tf, f"{family}Config")(**settings), enable)


def without_weights(kind: str) -> list[Any]:
    """The models that the auto classes build of a type's defaults, on the meta device."""
    found = []
    for auto, mapping in zoo.MAPPINGS.items():
        if type(config := zoo.configuration(kind)) in mapping:
            with torch.device("meta"):
                found.append(getattr(tf, auto).from_config(config, attn_implementation="eager"))
    return found


# ---------------------------------------------------------------- verdicts
def test_a_backend_for_a_whole_program_is_not_that_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy runs in fp32 on the CPU, which no other backend serves."""
    monkeypatch.setenv("DUALKV_BACKEND", "flash")
    assert verdict("Llama", num_key_value_heads=8) is None
    layout = dualkv.Layout.from_lengths([2], [[1]])
    with pytest.raises(ValueError, match="DUALKV_BACKEND is 'flash', which does not serve"):
        dualkv.attention(*torch.zeros(3, 3, 1, 8), layout)


DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
             "long_factor": [3.0] * 48, "short_factor": [1.0] * 48}  # fmt: skip
# Published shapes (test_support.py) and tiny models (test_enabling.py) are checked too.
RUN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, dynamic rotary embedding": ("Llama", {"rope_parameters": DYNAMIC_ROPE}),
    "mixtral with a window": ("Mixtral", {"sliding_window": 4096}),
    "phi3, long rotary factors": ("Phi3", {"sliding_window": None, "rope_parameters": LONG_ROPE}),
    "starcoder2 with its window": ("Starcoder2", {"sliding_window": 4096}),
    "gpt_oss, windows and sinks": ("GptOss", {}),
    "gemma3n, keys and values of other layers": ("Gemma3nText", {}),
    "olmo2": ("Olmo2", {}),
    "gemma": ("Gemma", {}),
    "glm4": ("Glm4", {}),
    "opt, learned positions with an offset": ("OPT", {}),
    "ministral3, a temperature of positions": ("Ministral3", {}),
    "llama4, chunks and a temperature that counts rows": ("Llama4Text", {}),
}


@pytest.mark.parametrize("case", RUN)
def test_models_that_are_exact_pass_in_two_seconds(case: str) -> None:
    family, settings = RUN[case]
    start = time.process_time()
    assert verdict(family, **settings) is None
    assert time.process_time() - start < 2


# Stages that a type refuses, in the call that needs them.
REFUSED_STAGES = {
    ("hrm_text", "walk"): "a walk with gradients came to a layer without them",
    ("nemotron", "products"): "NemotronDecoderLayer is set to gradient checkpointing and does not hand keyword",
    ("stablelm", "products"): "StableLmDecoderLayer is set to gradient checkpointing and does not hand keyword",
}
OFTEN = {"gpt2", "lfm2", "stablelm"}


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k in OFTEN else pytest.mark.slow) for k in sorted(zoo.exact_before())]
)
def test_stages_of_every_exact_type(kind: str) -> None:
    for whole in without_weights(kind):
        for decoder in layers.decoders(whole):
            for stage in get_args(selfcheck.Stage):
                says = selfcheck.verdict_of(type(decoder), decoder.config, enable, (), stage)
                expected = REFUSED_STAGES.get((kind, stage))
                if stage == "products" and "does not support activation checkpointing" in (says or ""):
                    continue  # `recompute_layers` says so first
                if stage == "invariance" and "batch_invariant is True" in (says or ""):
                    continue  # parts that are not proven are refused by name
                assert (says is None) if expected is None else (expected in (says or "")), f"{stage}: {says}"


def test_models_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable` finds nothing in the fields of a model whose positions begin behind the padding's id."""
    from transformers.models.kosmos2_5 import configuration_kosmos2_5, modeling_kosmos2_5

    monkeypatch.setattr(layers, "padding_before_positions", lambda _: None)
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    config = configuration_kosmos2_5.Kosmos2_5TextConfig()
    says = selfcheck.verdict_of(modeling_kosmos2_5.Kosmos2_5TextTransformer, config, enable)
    assert says is not None
    assert "does not compute packed groups as it computes replicated sequences" in says
    assert 10 * selfcheck.TOLERANCE < float(says.rpartition("differ by ")[2].removesuffix(" relative")) < 2


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("StableLm", {}, r"layer 0 \(StableLmAttention\) is not handed the layout"),
        ("DeepseekV3", {"v_head_dim": 12}, r"v has head_dim 12, expected a multiple of 8 up to 512"),
    ],
)
def test_what_would_fail_in_the_first_call_is_refused(
    family: str, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is that of the call, with the model's own numbers and not those of the copy."""
    monkeypatch.setattr(layers, "drops_arguments", lambda _: False)
    config = getattr(tf, f"{family}Config")(**settings)
    with torch.device("meta"):
        model = getattr(tf, f"{family}ForCausalLM")(config)
    with pytest.raises(ValueError, match=f"^{family}Model cannot run packed groups: .*{message}"):
        enable(model)
    assert hooks(model) == 0
    assert config._attn_implementation == model.config._attn_implementation != ""
    assert hooks(enable(model, check=False)) > 0


def test_a_copy_that_does_not_run_leaves_the_model_unproved(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(tf.models.qwen3.modeling_qwen3.Qwen3MLP, "forward", broken)
    says = (
        r"Qwen3Model could not be checked: its small copy raises RuntimeError: no kernel for this; check=False enables"
    )
    with pytest.raises(ValueError, match=says):
        enable(make_model())
    enable(make_model(), check=False)


def test_hidden_states_that_are_not_finite_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.models.qwen3.modeling_qwen3.Qwen3MLP, "forward", lambda self, x: x * float("inf"))
    with pytest.raises(ValueError, match=r"could not be checked: .* the replicated hidden states are not finite"):
        enable(make_model())


def test_a_packed_result_that_is_not_finite_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = tf.models.qwen3.modeling_qwen3.Qwen3MLP.forward
    monkeypatch.setattr(
        tf.models.qwen3.modeling_qwen3.Qwen3MLP,
        "forward",
        lambda self, x: forward(self, x) * (float("nan") if x.shape[1] == selfcheck.tree().num_tokens else 1.0),
    )
    with pytest.raises(ValueError, match="differ by inf relative"):
        enable(make_model())


# ---------------------------------------------------------------- what it costs and touches
def test_each_configuration_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    difference = selfcheck.difference
    monkeypatch.setattr(selfcheck, "difference", lambda cls, *rest: seen.append(cls) or difference(cls, *rest))
    for _ in range(3):
        enable(enable(make_model()))
    assert seen == [tf.Qwen3Model]
    enable(make_model(), check=False)
    enable(make_model(rms_norm_eps=1e-5))
    enable(make_model("llama"))
    assert seen == [tf.Qwen3Model, tf.Qwen3Model, tf.LlamaModel]


@pytest.fixture
def settings_of_others() -> Iterator[None]:
    """Change global settings as a training may: half precision throughout, threads."""
    dtype, precision, threads = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("medium")
    torch.set_num_threads(2)
    yield
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("settings_of_others")
def test_nothing_else_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(dtype=torch.bfloat16)
    seeded: list[int] = []  # of all GPUs, as `torch.manual_seed` does: ranks of a training would draw alike afterwards
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    config = model.config.to_json_string()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def state() -> Any:
        numbers = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
        return (*numbers, torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.get_num_threads())

    was = state()
    with torch.autocast("cpu", torch.bfloat16):
        enable(model)
    assert state() == was
    assert seeded == []
    assert model.config.to_json_string() == config
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not selfcheck._VERDICTS.popitem()[1]


def test_what_the_caller_has_compiled_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor would compile it for the CPU, which takes longer than the check and needs a C++ compiler."""
    from transformers.models.llama import modeling_llama

    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    compiled = torch.compile(modeling_llama.apply_rotary_pos_emb, backend=refuse)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", compiled)
    assert verdict("Llama", num_key_value_heads=8) is None
    x = torch.ones(1, 1, 2, 8)
    with pytest.raises(Exception, match="compiled"):  # afterwards it is compiled as before
        compiled(x, x, x[0], x[0])


def test_the_check_runs_within_what_is_compiled() -> None:
    @torch.compile(backend="eager")
    def made() -> str | None:
        return verdict("Llama", num_key_value_heads=8)

    assert made() is None


def test_a_model_without_weights_and_one_of_another_class_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 makes a class of its own of each module."""
    from torch.distributed.fsdp import FSDPModule

    with torch.device("meta"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig())
        enable(model)
    assert model.lm_head.weight.is_meta
    model.model.__class__ = type("FSDPLlamaModel", (FSDPModule, tf.LlamaModel), {})
    selfcheck._VERDICTS.clear()
    enable(model)
    assert [key[0] for key in selfcheck._VERDICTS] == [tf.LlamaModel]


# ---------------------------------------------------------------- the small copy
def rope_types(config: Any) -> set[str]:
    table = getattr(config, "rope_parameters", None) or {}
    return {t["rope_type"] for t in (table, *table.values()) if isinstance(t, dict) and "rope_type" in t}


@pytest.mark.parametrize("name", MODELS)
def test_the_small_copy_keeps_what_attention_is(name: str) -> None:
    config = config_of(MODELS[name]["config"], name)
    config = config.get_text_config()
    small = shrink(config)
    for field in (
        "head_dim",
        "global_head_dim",
        "v_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "attn_logit_softcapping",
    ):
        assert vars(small).get(field) == vars(config).get(field)
    heads, few = config.num_attention_heads, small.num_attention_heads
    if not (vars(config).get("head_dim") or vars(config).get("qk_nope_head_dim")):
        assert small.hidden_size / few == config.hidden_size / heads
    if config.num_key_value_heads:
        assert few / small.num_key_value_heads == heads / config.num_key_value_heads
    assert rope_types(small) == rope_types(config)
    kinds, of_small = (getattr(c, "layer_types", None) or ["none"] for c in (config, small))
    assert set(of_small) == set(kinds)
    assert list(dict.fromkeys(of_small)) == list(dict.fromkeys(kinds))  # in the same order
    assert 2 <= small.num_hidden_layers <= SELF_CHECK.layers
    assert len(of_small) in (1, small.num_hidden_layers)
    assert all(value <= SELF_CHECK.threshold for _, value in thresholds(small))
    assert len(list(thresholds(small))) == len(list(thresholds(config)))
    assert SELF_CHECK.threshold < max(map(len, selfcheck.sequence_rows(selfcheck.tree()))) <= SELF_CHECK.positions
    assert list(thresholds(shrink(config, thresholds=False))) == list(thresholds(config))


def test_thresholds_are_found_wherever_they_lie() -> None:
    fields = {"sliding_window": 4096, "attention_chunk_size": 8192, "floor_scale": 8192.0}
    table = {"full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4,
                                "original_max_position_embeddings": 4096}}  # fmt: skip
    config = tf.LlamaConfig(**fields)
    config.rope_parameters = table
    assert dict(thresholds(config)) == fields | {"original_max_position_embeddings": 4096}
    names = [*fields, "original_max_position_embeddings"]
    assert dict(thresholds(shrink(config))) == dict.fromkeys(names, SELF_CHECK.threshold)
    assert dict(thresholds(config)) == fields | {"original_max_position_embeddings": 4096}  # the model's stays


def test_an_indexer_selects_fewer_keys_than_the_tree_has_on_most_paths() -> None:
    lengths = sorted(map(len, selfcheck.sequence_rows(selfcheck.tree())))
    blocks = tf.MiniMaxM3VLTextConfig(num_hidden_layers=2, layer_types=["full_attention", "minimax_m3_sparse"])
    for config in (tf.DeepseekV32Config(), blocks):
        assert longest_path(shrink(config)) < lengths[len(lengths) // 2]


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_keep_one_that_makes_them(family: str) -> None:
    """Four layers, of which the last two take keys and values of the first two."""
    enable(make_featured(family, 4))


def test_layers_of_one_kind_behind_many_of_another_are_kept() -> None:
    config = tf.Qwen2Config(num_hidden_layers=28, use_sliding_window=True, sliding_window=4096, max_window_layers=20)
    assert shrink(config).layer_types == ["full_attention", "sliding_attention"]


def test_random_weights_are_not_degenerate() -> None:
    """Norms and biases too: a copy whose norms were 1 could not tell a norm that is left out."""
    with torch.no_grad():
        copy = selfcheck._copy(tf.Qwen2Model, shrink(tf.Qwen2Config()))
    assert all(parameter.std() > 0.05 for parameter in copy.parameters())
    assert {type(m) for m in copy.modules() if isinstance(m, nn.Linear) and m.bias is not None}
