"""A sample of the zoo, and how it tells what is wrong or does not end."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from dualkv.integrations.transformers import layers, media, selfcheck  # noqa: E402
from tools import filed, tables, zoo  # noqa: E402

SAMPLE = {
    "gpt_oss": zoo.EXACT,  # windows and sinks
    "gemma2": zoo.EXACT,  # windows and softcapping
    "deepseek_v3": zoo.EXACT,  # latent attention, experts
    "lfm2": zoo.EXACT,  # short convolutions
    "mllama": zoo.EXACT,  # layers that text skips
    "nemotron": zoo.EXACT,  # layers that hand no keyword arguments on
    "fuyu": zoo.EXACT,  # a model that numbers rows for its decoder
    "exaone4_5": zoo.EXACT,  # the same, with images that run
    "kosmos-2.5": zoo.EXACT,  # positions behind the padding's id
    "bloom": zoo.REFUSED,
}


@pytest.mark.parametrize("kind", SAMPLE)
def test_sample(kind: str, one_thread: None) -> None:
    found = zoo.examine(kind)
    assert found["outcome"] == SAMPLE[kind]
    assert (found["outcome"] == zoo.EXACT) == ("reason" not in found)
    if "error" in found:
        assert (found["error"] <= zoo.BOUND) == (found["outcome"] == zoo.EXACT)


def test_what_the_self_check_would_miss_is_wrong(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(layers, "padding_before_positions", lambda _: None)
    monkeypatch.setattr(selfcheck, "_VERDICTS", {})
    assert zoo.examine("kosmos-2.5")["outcome"] == zoo.REFUSED
    monkeypatch.setattr(selfcheck, "check", lambda *_: None)
    found = zoo.examine("kosmos-2.5")
    assert found["outcome"] == zoo.WRONG
    assert found["error"] > 100 * zoo.BOUND


def test_images_that_nobody_refuses_are_wrong(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    monkeypatch.setattr(media, "refuse", lambda *_: None)
    found = zoo.examine("aya_vision")
    assert found["outcome"] == zoo.WRONG
    assert "pixel_values" in found["reason"]


def test_images_that_see_too_little_are_wrong(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    assert zoo.examine("gemma3")["outcome"] == zoo.EXACT
    monkeypatch.setattr(media, "_ahead", lambda *_: None)
    found = zoo.examine("gemma3")
    assert found["outcome"] == zoo.WRONG
    assert "with images logits or gradients differ" in found["reason"]


def test_types_without_a_layer_of_their_kind_are_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults of some configurations have none of the layers that are the reason for the type."""
    monkeypatch.setattr(zoo, "SETTINGS", {})
    for kind, layer in {"lfm2": "Lfm2ShortConv", "minimax_m3_vl_text": "MiniMaxM3VLIndexer"}.items():
        found = zoo.examine(kind)
        assert found["outcome"] == zoo.NOT_BUILT
        assert layer in found["reason"]


def test_gradients_are_compared_too(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    packed = zoo.packed

    def with_one_wrong(model: Any, layout: Any) -> zoo.Computed:
        logits, gradients = packed(model, layout)
        gradients["model.layers.0.self_attn.k_proj.weight"][0] *= 1.5
        return logits, gradients

    monkeypatch.setattr(zoo, "packed", with_one_wrong)
    assert zoo.examine("llama")["outcome"] == zoo.WRONG


def test_nothing_is_finite_enough_to_be_compared() -> None:
    rows, zero = [torch.ones(2, 3)], {"weight": torch.zeros(3)}
    assert (
        zoo.difference(([rows[0] * torch.nan], {"weight": torch.ones(3)}), (rows, {"weight": torch.ones(3)}))
        == torch.inf
    )
    with pytest.raises(ValueError, match="all gradients are zero"):
        zoo.difference((rows, zero), (rows, zero))


def outcome_of(kind: str) -> zoo.Result:
    if kind == "slow":
        time.sleep(600)
    if kind == "dies":
        os._exit(3)
    if kind == "raises":
        raise RuntimeError("no such file")
    return {"outcome": kind, "reason": "model.layers.0 (X) has head dim 512, dualkv"}


def test_types_that_do_not_end_are_not_built() -> None:
    found = dict(zoo.run(["dies", "raises", "exact"], workers=3, seconds=600.0, of=outcome_of))
    found |= dict(zoo.run(["slow"], workers=1, seconds=1.0, of=outcome_of))
    assert {kind: (result["outcome"], result["reason"]) for kind, result in found.items() if kind != "exact"} == {
        "slow": (zoo.NOT_BUILT, "it takes more than 1 s"),
        "dies": (zoo.NOT_BUILT, "its process ended with exit code 3"),
        "raises": (zoo.NOT_BUILT, "RuntimeError: no such file"),
    }
    assert found["exact"]["outcome"] == zoo.EXACT


def test_an_error_of_enable_is_wrong(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    enable = zoo.enable

    def fails(model: Any, check: bool = True) -> Any:
        if check:
            raise TypeError("no such argument")
        return enable(model, check=False)

    monkeypatch.setattr(zoo, "enable", fails)
    found = zoo.examine("llama")
    assert (found["outcome"], found["reason"]) == (zoo.WRONG, "enable raises TypeError: no such argument")


def test_a_type_that_was_exact_must_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()
    app.command()(zoo.main)
    for outcome, code in ((zoo.EXACT, 0), (zoo.REFUSED, 1), (zoo.NOT_BUILT, 1)):
        found = {"outcome": outcome, "reason": "none"}
        monkeypatch.setattr(zoo, "run", lambda kinds, _, found=found: ((kind, found) for kind in kinds))
        said = CliRunner().invoke(app, ["llama", "idefics"])
        assert said.exit_code == code
        assert ("not here: llama\n" in said.output) == bool(code)


def test_the_record_of_this_transformers_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = filed.read(zoo.RECORDS[1])
    monkeypatch.setattr(zoo.transformers, "__version__", newest["transformers"])
    assert zoo.exact_before() == {kind for kind, made in newest["types"].items() if made["outcome"] == zoo.EXACT}
    pinned = filed.read(zoo.RECORDS[0])
    monkeypatch.setattr(zoo.transformers, "__version__", "0")
    assert zoo.exact_before() == {kind for kind, made in pinned["types"].items() if made["outcome"] == zoo.EXACT}


@pytest.mark.parametrize(("outcome", "code"), [(zoo.REFUSED, 0), (zoo.WRONG, 1)])
def test_the_command(outcome: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(zoo, "run", lambda kinds, _: ((kind, outcome_of(kind)) for kind in kinds))
    app = typer.Typer()
    app.command()(zoo.main)
    path = tmp_path / "zoo.json"
    assert CliRunner().invoke(app, [outcome, "exact", "--json", str(path)]).exit_code == code
    made = filed.read(path)
    assert made["counts"] == {outcome: 1, "exact": 1}
    assert made["types"][outcome] == {"outcome": outcome, "reason": "head dim 512"}


@pytest.mark.parametrize("name", ["zoo.json", "zoo-newest.json"])
def test_the_record_is_of_every_type_and_none_is_wrong(name: str) -> None:
    made = filed.read(tables.RESULTS / name)
    assert zoo.WRONG not in made["counts"]
    assert made["counts"][zoo.EXACT] >= 175
    if made["transformers"] == transformers.__version__:
        assert list(made["types"]) == zoo.types()


def test_the_record_is_of_the_pinned_transformers() -> None:
    pinned = re.search(r"^transformers==(\S+)", (tables.RESULTS.parents[1] / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert filed.read(zoo.RECORDS[0])["transformers"] == pinned[1]
