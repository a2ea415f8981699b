"""Tests of an integration whose library is not installed or too old, however it is imported."""

import importlib
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from codegen import packages
from dualkv import integrations
from dualkv.data.rollouts import LocalTokenizer

OF_MODULE = {name: name for name in integrations.__all__} | {"megatron": "megatron-core", "swift": "ms-swift"}


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next import of the integration its first."""
    for module in [m for m in sys.modules if re.match(rf"dualkv\.integrations\.{name}\b", m)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(vars(integrations), name, raising=False)


def stand_in(name: str, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install a package of this version with nothing in it, and return what is lacking of it."""
    package = packages.PACKAGES[name]
    path = folder.joinpath(*package.module.split("."))
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("raise AssertionError('imported before it was checked')\n")
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)
    return f"{name} {package.lowest} or newer (found {version}: {package.install})"


@pytest.mark.parametrize("name", integrations.__all__)
@pytest.mark.parametrize("line", ["dualkv.integrations.{name}", "from dualkv.integrations.{name} import x"])
@pytest.mark.filterwarnings("ignore:dualkv. the veRL plugin")
def test_the_sentence_names_the_extra(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]  # as if it were not installed
    forget(name, monkeypatch)
    package = packages.PACKAGES[OF_MODULE[name]]
    says = f"dualkv.integrations.{name} needs {package.wanted} (not installed: pip install 'dualkv[{name}]')"
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(f"import dualkv\n{line.format(name=name)}")
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("module", "name", "version"),
    [
        *((module, "transformers", "4.57.3") for module in ("transformers", "transformers.experts")),
        ("openrlhf", "openrlhf", "0.11.1"),
        ("skyrl", "skyrl", "0.3.1"),
        ("trl", "trl", "1.15.0"),
        ("swift", "ms-swift", "4.5.0"),
        ("verl", "verl", "0.9.0"),
        ("megatron", "megatron-core", "0.15.4"),
    ],
)
@pytest.mark.filterwarnings("ignore:dualkv. the veRL plugin")
def test_an_older_version_is_refused_before_it_is_imported(
    module: str, name: str, version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lacking = stand_in(name, version, tmp_path, monkeypatch)
    for folder in integrations.__all__:
        forget(folder, monkeypatch)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(f"dualkv.integrations.{module}")
    folder = next(one for one in OF_MODULE if OF_MODULE[one] == name)
    assert str(caught.value) == f"dualkv.integrations.{folder} needs {lacking}"
    assert not isinstance(caught.value, ModuleNotFoundError)


def test_verl_shows_why_its_plugin_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """veRL swallows the error of a plugin."""
    lacking = stand_in("verl", "0.9.0", tmp_path, monkeypatch)
    forget("verl", monkeypatch)
    with pytest.warns(UserWarning, match=re.escape(lacking)), pytest.raises(ImportError):
        importlib.import_module("dualkv.integrations.verl")


def test_a_tokenizer_needs_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking = stand_in("transformers", "4.57.3", tmp_path, monkeypatch)
    with pytest.raises(ImportError, match=re.escape(f"a Hugging Face tokenizer needs {lacking}")):
        LocalTokenizer(tmp_path)


def test_adapters_need_peft(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from dualkv.integrations.transformers import enable

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1))
    lacking = stand_in("peft", "0.17.1", tmp_path, monkeypatch)
    with pytest.raises(ImportError, match=re.escape(f"the check of adapters needs {lacking}")):
        enable(get_peft_model(model, LoraConfig(target_modules=["q_proj"])))


def test_older_kernels_do_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Liger's kernels and those of flash-linear-attention are left out on a GPU; the latter with a warning."""
    pytest.importorskip("transformers")
    from dualkv.integrations import flash_linear_attention as fla
    from dualkv.integrations.recurrent import kernels
    from dualkv.integrations.transformers import fused

    stand_in("liger-kernel", "0.5.0", tmp_path / "liger", monkeypatch)
    decoder: Any = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    assert not fused._by_liger(decoder, decoder)
    lacking = stand_in("flash-linear-attention", "0.5.2", tmp_path / "fla", monkeypatch)
    for cached in (fla.lacking, kernels._warn_of_slow_functions):
        cached.cache_clear()
    try:
        with pytest.warns(UserWarning, match=re.escape(f"the fast ones need {lacking}")):
            assert kernels.library("chunk_kda", torch.device("cuda")) is None
    finally:
        fla.lacking.cache_clear()
