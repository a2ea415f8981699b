"""PEFT's adapters and noise of training on packed rows: each type is exact, or refused by name."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

tf = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: E402
from peft.tuners.lora import variants  # noqa: E402
from peft.tuners.lora.config import ArrowConfig, BdLoraConfig, KasaConfig, MontecloraConfig, VeloraConfig  # noqa: E402
from peft.tuners.lora.layer import Linear as LoraLinear  # noqa: E402
from peft.tuners.lora.layer import LoraVariant  # noqa: E402
from transformers.integrations import neftune  # noqa: E402

import dualkv  # noqa: E402
from dualkv.draws import Draws  # noqa: E402
from dualkv.integrations.transformers import adapters, disable, enable, layers, recompute_layers, selfcheck  # noqa: E402
from dualkv.integrations.transformers.shrink import shrink  # noqa: E402
from tests.integrations.tiny import make_model, token_ids  # noqa: E402
from tools import zoo  # noqa: E402

LAYERS = ["q_proj", "k_proj", "v_proj"]
OF = {"task_type": "CAUSAL_LM", "target_modules": LAYERS}
RANDOM = {"init_lora_weights": False}
LAYOUT = dualkv.Layout.from_lengths([7, 5, 3], [[4, 0, 9], [2, 6], [3]])
BLOCKS = BdLoraConfig(target_modules_bd_a=["q_proj"], target_modules_bd_b=["k_proj"], nblocks=2, match_strict=False)


def lora(**fields: Any) -> Any:
    return peft.LoraConfig(**OF | RANDOM | fields)


def config_of(name: str, **fields: Any) -> Any:
    """Make the configuration of an adapter type, with sizes that fit the tiny model."""
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[name]]
    known = {field.name for field in dataclasses.fields(cls)}
    wanted = OF | {"r": 4, "num_virtual_tokens": 3} | adapters.SMALL.get(name, {}) | OWN.get(name, {}) | fields
    return cls(**{field: value for field, value in wanted.items() if field in known})


# Fields that a type lacks by default, or that its layers need.
OWN: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 100},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "target_modules": None},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LORA": RANDOM,
    "OSF": {"r": None},
    "SHADOW": {"target_modules": None, "shadow_dropout": 0.0},
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": list(range(3, 60))},
}
MODEL = {"ADAPTION_PROMPT": "llama"}  # others wrap a Qwen3


def with_adapter(config: Any, model: Any = None) -> Any:
    """A tiny model in training with random adapters."""
    torch.manual_seed(0)
    name = config.peft_type.value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(model or make_model(MODEL.get(name, "qwen3"), use_cache=False), config)
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return wrapped.train()


def differ(model: Any, check: bool = True) -> float:
    """The largest relative difference of logits and gradients, packed and alone; the draws of calls are all one
    number."""
    ids, weight = token_ids(LAYOUT), torch.randn(LAYOUT.num_tokens, generator=torch.Generator().manual_seed(5))
    with Draws():
        expected = zoo.replicated(model, LAYOUT, (ids, weight))
    enable(model, check=check)
    with Draws():
        logits = model(input_ids=ids, dualkv=LAYOUT).logits[0]
    rows = [logits[path].detach() for path in selfcheck.sequence_rows(LAYOUT)]
    got = rows, zoo.gradients(model, zoo.loss(logits, weight))
    assert got[1].keys() == expected[1].keys() != set()
    return zoo.difference(got, expected)


# ---------------------------------------------------------------- every type
def test_every_type_of_peft_is_judged() -> None:
    assert adapters.TYPES.keys() == {kind.name for kind in peft.PeftType}
    assert all(kind.name == kind.value for kind in peft.PeftType)
    of_lora = [x for x in vars(variants).values() if isinstance(x, type) and issubclass(x, LoraVariant)]
    assert adapters.VARIANTS.keys() == {x.__name__ for x in of_lora if not x.__name__.startswith("_")} - {"LoraVariant"}


def test_the_guide_has_every_type() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "transformers.md").read_text()
    table = guide.partition("<!-- adapters -->")[2].partition("<!-- end -->")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = {name: "run packed" in row for row in rows for name in re.findall(r"`([A-Z0-9_]+)`", row)}
    assert named == {name: reason == adapters.EXACT for name, reason in adapters.TYPES.items()}


class Clusters:
    """A stand-in for scikit-learn's KMeans, as far as AdaMSS calls it."""

    def __init__(self, n_clusters: int, **_: Any) -> None:
        self.n_clusters = n_clusters

    def fit_predict(self, rows: Any) -> Any:
        return np.arange(len(rows)) % self.n_clusters


def saved_loras(folder: Path) -> list[str]:
    paths = [str(folder / name) for name in ("first", "second")]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        peft.get_peft_model(make_model(), lora()).save_pretrained(path)
    return paths


def xlora(folder: Path) -> Any:
    first, second = saved_loras(folder)
    return config_of(
        "XLORA", hidden_size=48, xlora_depth=1, use_trainable_adapters=True, adapters={"0": first, "1": second}
    )


# Of each way in which adapters enter a layer one; all run before a release.
OFTEN = (
    "ADALORA",
    "ADAPTION_PROMPT",
    "BOFT",
    "IA3",
    "LN_TUNING",
    "LOKR",
    "LORA",
    "OFT",
    "TRAINABLE_TOKENS",
    "VERA",
    "XLORA",
)
EXACT = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow)
    for name, reason in adapters.TYPES.items()
    if reason == adapters.EXACT
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXACT)
def test_exact_types(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and the gradients of all adapters are exact in training, without dropout."""
    for module, content in {"sklearn": {}, "sklearn.cluster": {"KMeans": Clusters}}.items():
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
        vars(sys.modules[module]).update(content)
    assert differ(with_adapter(xlora(tmp_path) if name == "XLORA" else config_of(name))) < 2e-5


EXACT_VARIANTS: dict[str, Callable[[], Any]] = {
    "BdLoraLinearVariant": lambda: lora(use_bdlora=BLOCKS),
    "DoraEmbeddingVariant": lambda: lora(use_dora=True, target_modules=["embed_tokens"]),
    "DoraLinearVariant": lambda: lora(use_dora=True),
    "KasaLinearVariant": lambda: lora(kasa_config=KasaConfig()),
    "MiCAEmbeddingVariant": lambda: lora(init_lora_weights="mica", target_modules=["embed_tokens"]),
    "MiCALinearVariant": lambda: lora(init_lora_weights="mica"),
    "QALoraLinearVariant": lambda: lora(use_qalora=True, qalora_group_size=4),
    "VeloraLinearVariant": lambda: lora(velora_config=VeloraConfig(num_groups=4, init_type="random")),
}  # fmt: skip
OF_CONVOLUTIONS = {"DoraConv1dVariant", "DoraConv2dVariant", "DoraConv3dVariant"}  # refused in decoders


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXACT_VARIANTS)
def test_exact_variants_of_lora(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # PEFT has this one for layers of GPTQ, which need a GPU.
    of_gptq, own = {("use_qalora",): variants.QALoraLinearVariant}, LoraLinear.lora_variants.fget
    if name == "QALoraLinearVariant":
        field = next(x for x in dataclasses.fields(peft.LoraConfig) if x.name == "use_qalora")
        monkeypatch.setattr(field, "metadata", {"is_lora_variant": True})
        monkeypatch.setattr(LoraLinear, "lora_variants", property(lambda layer: own(layer) | of_gptq))
    model = with_adapter(EXACT_VARIANTS[name]())
    found = {type(v).__name__ for m in model.modules() for v in (getattr(m, "lora_variant", None) or {}).values()}
    assert found == {name}
    assert differ(model) < 2e-5


@pytest.mark.filterwarnings("ignore")
def test_arrow_routes_by_row(tmp_path: Path) -> None:
    paths = saved_loras(tmp_path)
    model = peft.create_arrow_model(make_model(), paths, ArrowConfig(top_k=1)).requires_grad_(True).eval()
    assert differ(model) < 2e-5


def test_every_exact_variant_is_tested() -> None:
    exact = {name for name, reason in adapters.VARIANTS.items() if reason == adapters.EXACT}
    assert exact == EXACT_VARIANTS.keys() - {"VeloraLinearVariant"} | {"ArrowLinearVariant"} | OF_CONVOLUTIONS


# ---------------------------------------------------------------- refusals
REFUSED: dict[str, Callable[[], Any]] = {
    **{name: partial(config_of, name) for name, reason in adapters.TYPES.items() if reason != adapters.EXACT},
    "ALoraLinearVariant": lambda: lora(alora_invocation_tokens=[8, 9]),
    "MontecloraLinearVariant": lambda: lora(monteclora_config=MontecloraConfig()),
    "VeloraLinearVariant": lambda: lora(velora_config=VeloraConfig(num_groups=4)),
}


def test_every_refused_type_is_tested() -> None:
    assert REFUSED.keys() == {
        n for n, reason in (adapters.TYPES | adapters.VARIANTS).items() if reason != adapters.EXACT
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_types(name: str) -> None:
    model = with_adapter(REFUSED[name]())
    for check in (True, False):
        with pytest.raises(ValueError, match=f"the PEFT adapter .*{name}.*"):
            enable(model, check=check)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["LILY", "SHADOW"])
def test_refused_types_differ(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(adapters.TYPES, name, adapters.EXACT)
    assert differ(with_adapter(REFUSED[name]()).eval(), check=False) > 0.01


def test_a_type_that_nobody_has_judged_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(adapters.TYPES, "IA3")
    model = with_adapter(config_of("IA3"))
    with pytest.raises(ValueError, match="the PEFT adapter IA3 is of a type that nobody has compared"):
        enable(model)
    enable(model, check=False)


def test_adapters_of_convolutions_are_refused() -> None:
    sizes = {"vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    model = tf.Lfm2ForCausalLM(tf.Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"]))
    with pytest.raises(
        ValueError, match=r"the PEFT adapter of the convolution layers\.0\.conv\.conv \(Conv1d\) reads all"
    ):
        enable(peft.get_peft_model(model, peft.LoraConfig(r=48, target_modules=["conv.conv"])))


# ---------------------------------------------------------------- adapters that come later
def test_adapters_that_come_after_enable_are_refused_until_it_is_called_again() -> None:
    model = enable(make_model())
    call = partial(model.model, input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    call()
    peft.get_peft_model(make_model(), lora())  # another model's
    call()
    wrapped = peft.get_peft_model(model, lora())
    with pytest.raises(
        ValueError, match=r"Qwen3Model has other PEFT adapters .*then none; now LORA \(default\) in 6 layers"
    ):
        call()
    enable(wrapped)
    call()
    wrapped.add_adapter("other", lora(alora_invocation_tokens=[8, 9]))
    with pytest.raises(ValueError, match=r"now LORA \(default, other: ALoraLinearVariant\) in 6 layers"):
        call()
    with pytest.raises(ValueError, match="ALoraLinearVariant"):
        enable(wrapped)
    wrapped.delete_adapter("other")
    enable(wrapped)
    call()
    disable(wrapped)
    assert not {adapters.SEEN, selfcheck.ASKED} & vars(model.model).keys()


def test_a_compiled_model_asks_where_it_is_traced() -> None:
    model = enable(make_model().train())
    peft.get_peft_model(make_model(), lora())  # another model's, so that this one looks
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    hidden = compiled(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits
    assert torch.equal(hidden, model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits)
    assert "training" in vars(model.model)[selfcheck.ASKED][2]
    torch._dynamo.reset()


# ---------------------------------------------------------------- noise of training
def test_neftune_is_refused_in_training() -> None:
    model = enable(make_model().eval())
    call = partial(model, input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    handle = neftune.activate_neftune(model, 5.0)
    call()
    model.train()
    with pytest.raises(ValueError, match="Qwen3Model has neftune_noise_alpha"):
        call()
    neftune.deactivate_neftune(model, handle)
    call()


def planted(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., torch.Tensor]) -> Any:
    """A Qwen3 whose MLPs compute `forward(module, result, x)`."""
    own = tf.models.qwen3.modeling_qwen3.Qwen3MLP.forward
    monkeypatch.setattr(
        tf.models.qwen3.modeling_qwen3.Qwen3MLP, "forward", lambda self, x: forward(self, own(self, x), x)
    )
    return make_model()


def once_a_call(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y * (torch.rand(1) < 0.99) if module.training else y


def by_length(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y + torch.rand_like(y) / x.shape[-2] ** 0.5 if module.training else y


def by_statistics(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return y - y.flatten(0, -2).mean(0) if module.training else y


def gradient_by_statistics(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    scale = y.detach().abs().mean() if module.training else 1.0
    return y.detach() + (y - y.detach()) * scale


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            once_a_call,
            r"Qwen3Model cannot run packed groups: in training a draw of shape \(1,\) for all rows of a call",
        ),
        (by_length, "in training as it computes replicated sequences: .* of a small copy differ"),
        (by_statistics, "in training as it computes replicated sequences: .* of a small copy differ"),
        (gradient_by_statistics, "in training as it computes replicated sequences: gradients of a small copy differ"),
    ],
)
def test_training_that_mixes_rows_is_refused_in_its_first_call(
    forward: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    model = enable(planted(monkeypatch, forward).eval())
    call = partial(model, input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    call()
    model.train()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call()
    enable(model, check=False)
    call()


def a_row_at_a_time(module: nn.Module, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Draw noise for each row, as dropout and the jitter of routers do."""
    return y * torch.empty_like(y).uniform_(0.9, 1.1) if module.training else y


def test_noise_of_each_row_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    model = enable(planted(monkeypatch, a_row_at_a_time).train())
    state = torch.get_rng_state()
    first, second = (model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits for _ in range(2))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(model(input_ids=token_ids(LAYOUT), dualkv=LAYOUT).logits, first)  # the check draws nothing


DROPOUT = {
    "embedding and residual dropout": (tf.PhiModel, tf.PhiConfig(embd_pdrop=0.3, resid_pdrop=0.3), None),
    "jitter of routers": (tf.MixtralModel, tf.MixtralConfig(router_jitter_noise=0.1), None),
    "experts that are sampled": (tf.PhimoeModel, tf.PhimoeConfig(input_jitter_noise=0.1), None),
    "layers that are dropped": (tf.OPTModel, tf.OPTConfig(layerdrop=0.01), r"a draw of shape \(\) for all rows"),
    "layers that are not dropped": (tf.OPTModel, tf.OPTConfig(layerdrop=0.0, dropout=0.5), None),
}


@pytest.mark.parametrize("case", DROPOUT)
def test_dropout_of_models(case: str) -> None:
    cls, config, refused = DROPOUT[case]
    decoder = layers.decoders(cls._from_config(shrink(config)))[0]
    verdict = selfcheck.verdict_of(type(decoder), config, enable, (), "training")
    assert verdict is None if refused is None else re.search(refused, verdict or "")


# Dropout of adapters: of each row, unless it drops weights.
OF_WEIGHTS = {"BOFT", "LOHA", "LOKR"}  # OFT ignores its module_dropout


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [x for x in EXACT if x.values[0] not in {"ADAMSS", "XLORA"}])
def test_dropout_of_adapters(name: str) -> None:
    cls = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[name]]
    fields = [x.name for x in dataclasses.fields(cls) if "dropout" in x.name and not x.name.endswith("_scale")]
    for field in fields:
        model = enable(with_adapter(config_of(name, **{field: 0.4})))
        call = partial(model, input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
        if name in OF_WEIGHTS:
            with pytest.raises(ValueError, match=r"in training a draw of shape .* for all rows of a call"):
                call()
        else:
            call()


def test_kept_products_are_checked_in_the_first_call_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault is planted: of products that are kept, the copy is not the one that was made."""
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    model = enable(make_model().train())
    call = partial(model, input_ids=token_ids(LAYOUT), dualkv=LAYOUT)
    call()
    recompute_layers(model, "products")
    own = selfcheck.checkpointing.recompute_layers

    def faulty(copy: Any, keep: str) -> None:
        own(copy, keep)
        copy.layers[0].mlp.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 1.1,))

    with monkeypatch.context() as planted:
        planted.setattr(selfcheck.checkpointing, "recompute_layers", faulty)
        with pytest.raises(ValueError, match=r"packed groups with kept products .* gradients of a small"):
            call()
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    call()
    assert "products" in vars(model.model)[selfcheck.ASKED][2]
