"""`dualkv doctor --model`: what it says of the published shapes of models, unshrunken, and of what is no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dualkv.cli import commands
from dualkv.integrations.transformers import support
from dualkv.integrations.transformers.layers import attention_modules, decoders
from dualkv.integrations.transformers.shrink import shrink
from tests.integrations.tiny import make_model
from tools import matrix, zoo

# Fields of published configurations that matter to attention (and "refused": a part of each reason, null where the
# model runs), with where they are published. What is not given is the default of transformers' class.
SLOW = (
    "ax-k1", "bamba-9b", "command-r7b", "exaone-4-32b", "falcon-h1", "glm-4.1v-9b", "granite-4-h", "hy4", "kimi-k2.5",
    "kimi-linear-48b", "longcat-flash", "minimax-text-01", "ministral-3-8b", "ministral-8b", "mistral-7b-v0.3",
    "mistral-large-4", "mixtral-8x7b", "muse-spark-816b", "olmo-hybrid-7b", "phi-4", "qwen2.5-vl-7b", "qwen3-vl-8b",
    "qwen3.5-35b-a3b", "starcoder2-7b",
)  # fmt: skip  # each is like another one here
MODELS = json.loads((Path(__file__).parents[2] / "files" / "models.json").read_text())


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(fields: Any) -> str:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in MODELS]
)
def test_published_shapes(name: str, written: Any) -> None:
    """The verdict on the whole model, and the small copy that it is by, which has the model's head dims and layers."""
    found = support.examine(written(MODELS[name]["config"]))
    expected = MODELS[name]["refused"] or []
    assert len(found.refusals) == len(expected)
    for part, sentence in zip(expected, found.refusals, strict=True):
        assert part in sentence
    assert found.runs == (not expected)

    model = support.without_weights(support.config_of(MODELS[name]["config"], name))
    for decoder in decoders(model):  # the self-check above has run the copy
        with torch.device("meta"):
            small = type(decoder)(shrink(decoder.config))
        assert sum(p.numel() for p in small.parameters()) < 6e7
        kinds, of_small = (
            [(type(m), getattr(m, "head_dim", None)) for m in attention_modules(d)] for d in (model, small)
        )
        assert set(kinds) == set(of_small)


def test_every_reason_is_said_with_its_layers(written: Any) -> None:
    found = support.examine(written({"model_type": "deepseek_v4"}))
    assert found.architecture == "DeepseekV4ForCausalLM"
    counts = [sentence.rpartition(" (")[2] for sentence in found.refusals if sentence.endswith("layers)")]
    assert counts == ["23 such layers)", "20 such layers)"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt-oss-20b", ["12 x GptOssAttention, head dim 64, 8 query heads a KV head, window 128, sinks",
                         "12 x GptOssAttention, head dim 64, 8 query heads a KV head, sinks"]),
        ("gemma-2-9b", ["21 x Gemma2Attention, head dim 256, 2 query heads a KV head, window 4096, softcapping 50.0",
                        "21 x Gemma2Attention, head dim 256, 2 query heads a KV head, softcapping 50.0"]),
        ("llama-4-scout", ["36 x Llama4TextAttention, head dim 128, 5 query heads a KV head, chunks of 8192",
                           "12 x Llama4TextAttention, head dim 128, 5 query heads a KV head"]),
        ("qwen3-next-80b", ["12 x Qwen3NextAttention, head dim 256, 8 query heads a KV head",
                            "36 x Qwen3NextGatedDeltaNet, recurrent"]),
        ("mimo-v2-flash", ["9 x MiMoV2FlashAttention, head dims 192 and 128 of values, 16 query heads a KV head",
                           "39 x MiMoV2FlashAttention, head dims 192 and 128 of values, 8 query heads a KV head,"
                           " window 129, sinks"]),
        ("deepseek-v3", ["61 x DeepseekV3Attention, head dims 192 and 128 of values, 1 query heads a KV head"]),
        ("mistral-7b-v0.1", ["32 x MistralAttention, head dim 128, 4 query heads a KV head, window 4096"]),
    ],
)  # fmt: skip
def test_layers_are_named_with_their_features(name: str, expected: list[str], written: Any) -> None:
    found = support.examine(written(MODELS[name]["config"]))
    assert (found.layers, found.refusals) == (expected, [])


def test_a_window_that_the_code_of_a_model_alone_puts_into_full_layers(written: Any) -> None:
    kinds = ["full_attention", "linear_attention"]
    config = {"model_type": "minimax", "num_hidden_layers": 2, "layer_types": kinds, "sliding_window": 512}
    for window, says in ((512, ", window 512"), (None, "")):
        full, recurrent = support.examine(written(config | {"sliding_window": window})).layers
        assert full == f"1 x MiniMaxAttention, head dim 128, 4 query heads a KV head{says}"
        assert recurrent == "1 x MiniMaxLightningAttention, recurrent"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["dualkv", "doctor", "--model", *arguments])
    with pytest.raises(SystemExit) as exit:
        commands.main()
    return int(exit.value.code or 0)


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: Any, tmp_path: Path
) -> None:
    assert run(monkeypatch, "qwen3-8b") == 0
    assert capsys.readouterr().out.splitlines() == [
        "qwen3-8b (Qwen3ForCausalLM) runs packed",
        "- 36 x Qwen3Attention, head dim 128, 4 query heads a KV head",
    ]
    path = written(MODELS["gemma-4-e2b"]["config"] | {"global_head_dim": 520})
    assert run(monkeypatch, path, "--json", str(tmp_path / "found.json")) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"{path} (Gemma4ForCausalLM) does not run packed"
    assert "has head dim 520, dualkv.attention computes up to 512 (5 such layers)" in out[-1]
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["runs"], len(found["refusals"])) == (False, 1)
    assert run(monkeypatch, str(tmp_path / "absent")) == 1
    assert "is neither a folder or file with a config.json, nor in the local cache" in capsys.readouterr().err


OWN = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "dualkv-own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

AutoConfig.register("dualkv-own", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""


def test_a_type_that_a_module_of_the_user_registers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The command finds the module in the folder of the call; CONTRIBUTING's way to the zoo and the matrix too."""
    (tmp_path / "dualkv_own_types.py").write_text(OWN)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "dualkv-own", "architectures": ["OwnForCausalLM"]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for mapping in (CONFIG_MAPPING, AutoModelForCausalLM._model_mapping):
        monkeypatch.setattr(mapping, "_extra_content", {**mapping._extra_content})
    assert run(monkeypatch, ".") == 1
    assert "model_type 'dualkv-own'" in (said := capsys.readouterr().err)
    assert "--import" in said
    assert run(monkeypatch, ".", "--import", "dualkv_absent_types") == 1
    assert "--import is 'dualkv_absent_types': No module named" in capsys.readouterr().err
    assert run(monkeypatch, ".", "--import", "dualkv_own_types") == 0
    assert capsys.readouterr().out.startswith(". (OwnForCausalLM) runs packed")
    assert zoo.examine("dualkv-own")["outcome"] == zoo.EXACT
    monkeypatch.setattr(matrix, "WAYS", {"plain": matrix.plain, "head": matrix.head})
    assert [cell["outcome"] for cell in matrix.examine("dualkv-own").values()] == [zoo.EXACT] * 2


def test_a_folder_and_the_class_that_it_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    make_model("llama").save_pretrained(tmp_path)
    assert support.examine(str(tmp_path)).runs
    fields = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["LlamaForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = support.examine(str(tmp_path))
    assert found.architecture == "LlamaForSequenceClassification"
    assert "makes one row of logits" in found.refusals[0]


def test_what_runs_with_conditions_is_noted(written: Any) -> None:
    found = support.examine(written({"model_type": "qwen2_5_vl"}))
    assert found.runs
    assert found.notes[0].startswith("beside text, pixel_values, pixel_values_videos, image_grid_thw")
    assert (
        support.examine(written({"model_type": "ernie4_5_vl_moe"})).notes[0].startswith("text only: mm_token_type_ids")
    )
    assert support.examine(written(MODELS["deepseek-v3.2"]["config"])).notes == [
        "on paths of more than 2048 tokens indexers select keys: attention runs on FlexAttention",
    ]
    assert support.examine(written({"model_type": "llama", "attention_dropout": 0.1})).notes == [
        "attention_dropout=0.1 is refused in training: set it to 0"
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 8}, "is no configuration of a model, expected an object with model_type"),
        ([], "is no configuration of a model, expected an object with model_type"),
        ({"model_type": "none_such"}, "has model_type 'none_such', which transformers .* lacks"),
        ({"model_type": "llama", "hidden_act": "none_such"}, "transformers cannot build this model: KeyError"),
    ],
)
def test_what_is_no_model(fields: Any, message: str, written: Any) -> None:
    with pytest.raises(ValueError, match=message):
        support.examine(written(fields))
