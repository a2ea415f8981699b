"""Arguments of a packed call that another call of transformers would take: computed as they say, or refused by name.

Over all model types that run packed, and all heads that transformers puts on them.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from dualkv.integrations.transformers import enable, layers  # noqa: E402
from dualkv.integrations.transformers.labels import makes_own_loss  # noqa: E402
from tests.integrations.transformers.test_selfcheck import without_weights  # noqa: E402
from tools import zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT = [kind for kind, row in json.loads(zoo.RECORDS[0].read_text())["types"]["rows"].items() if row[0] == zoo.EXACT]
# Of layers that hand no arguments on, recurrent ones, a decoder that is given labels, a model that numbers rows, a head
# within a head.
SAMPLE = ["llama", "nemotron", "qwen3_next", "gemma4_text", "fuyu", "llama4"]
assert set(SAMPLE) < set(EXACT)
KINDS = [kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.slow) for kind in EXACT]
LAYOUT = zoo.LAYOUTS[0]
T = LAYOUT.num_tokens

# Names under which other code hands on where sequences begin, what is hidden, or which rows get logits.
REFUSED: dict[str, Any] = {
    "cu_seq_lens_q": torch.tensor([0, 20, T], dtype=torch.int32),
    "max_length_q": 20,
    "seq_idx": (torch.arange(T) >= 20).int()[None],
    "num_logits_to_keep": 1,
    "logits_to_keep": 1,
    "num_items_in_batch": 3,
    "loss_mask": torch.ones(1, T),
}
# Arguments that models have for something else too, and those that say nothing about which rows see each other.
HARMLESS: dict[str, Any] = {
    "cache_position": torch.arange(5, T + 5),
    "padding_mask": torch.ones(1, T, dtype=torch.bool),
    "output_hidden_states": True,
    "return_dict": False,
}


def models_of(kind: str) -> list[Any]:
    """The models that the auto classes build of a type, small, enabled."""
    return [enable(zoo.small(type(whole), whole.config), check=False) for whole in without_weights(kind)]


def refused_or(name: str, call: Any) -> Any:
    """Return the result of a call; None where it is refused by the name of an argument."""
    try:
        return call()
    except ValueError as error:
        if name not in str(error):
            raise
        return None


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_labels_and_arguments_of_a_packed_call(kind: str) -> None:
    models = models_of(kind)
    assert models
    for model in models:
        ids, _ = zoo.inputs(model, LAYOUT)
        given = {"input_ids": ids, "dualkv": LAYOUT}
        logits = model(**given).logits
        labels = ids.roll(-1) % logits.shape[-1]  # fewer than the embeddings of some models
        labels[0, ::3] = -100

        expected = nn.functional.cross_entropy(logits[0].float(), labels[0])
        loss = model(**given, labels=labels, shift_labels=labels).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5, check_dtype=False)
        names = layers.arguments(type(model))
        by_position = [None] * names.index("labels")
        by_position[names.index("input_ids")] = ids
        for args, named in (((*by_position, labels), {"dualkv": LAYOUT}), ((), given | {"labels": labels})):
            with pytest.raises(ValueError, match=r"labels came together with dualkv and would be shifted"):
                model(*args, **named)
        with pytest.raises(ValueError, match=r"shift_labels came together with dualkv and without labels"):
            model(**given, shift_labels=labels)

        for name, value in REFUSED.items():
            with pytest.raises(ValueError, match=rf"\b{name}\b"):
                model(**given, **{name: value})
        for name, value in HARMLESS.items():
            got = refused_or(name, lambda more=given | {name: value}, run=model: run(**more))
            if got is not None:
                torch.testing.assert_close(got[0] if isinstance(got, tuple) else got.logits, logits)


# ---------------------------------------------------------------- heads
# Classes, by the end of their name, that make something of every row, and nothing of all rows together.
OF_ROWS = re.compile(
    r"ForCausalLM|ForConditionalGeneration|LMHeadModel|ForTokenClassification|Model|Decoder|TextTransformer|Patcher"
    r"|NemotronH_Omni_Reasoning_V3"  # with images, as ForConditionalGeneration
    r"|ForProteinText2Text|ForRetrieval",  # texts of proteins; an embedding of each row
)


def heads(file: Path) -> list[type[Any]]:
    """The pretrained models of a modeling file."""
    module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
    return [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, transformers.PreTrainedModel)
        and cls.__module__ == module.__name__
        and cls.config_class is not None
        and not cls.__name__.endswith("PreTrainedModel")
    ]


FILES = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
OF_SAMPLE = "llama", "gpt2", "shieldgemma2", "opt"
ALL = [file if file.parent.name in OF_SAMPLE else pytest.param(file, marks=pytest.mark.slow) for file in FILES]


@pytest.mark.parametrize("file", ALL, ids=lambda file: file.stem)
def test_heads_of_a_whole_input_are_refused(file: Path) -> None:
    """Every class that passes is one of OF_ROWS: a new kind of head is judged before it runs."""
    try:
        classes = heads(file)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"it needs what is not installed: {error}")
    for cls in classes:
        try:
            with torch.device("meta"):
                model = cls._from_config(cls.config_class(), attn_implementation="eager")
        except Exception:  # defaults that build nothing, libraries that are missing
            continue
        refusal = next(layers.objections(model), None)
        if refusal is None:
            assert re.search(f"({OF_ROWS.pattern})$", cls.__name__), f"{cls.__name__} passes, and nobody has judged it"
            assert not any(re.search(f"({end})$", cls.__name__) for end in layers.POOLING)


@pytest.mark.parametrize(
    ("name", "makes"),
    [
        ("LlamaForSequenceClassification", "one row of logits"),
        ("GPT2DoubleHeadsModel", "one row of logits"),
        ("LlamaForQuestionAnswering", "one distribution of starts and one of ends"),
        ("ShieldGemma2ForImageClassification", "one row of logits"),
        ("LlamaForRewardModel", "one reward"),
    ],
)
def test_heads_are_refused_for_what_they_make(name: str, makes: str) -> None:
    cls = getattr(transformers, name, None) or type(name, (transformers.LlamaForCausalLM,), {})
    with torch.device("meta"):
        model = cls._from_config(cls.config_class(), attn_implementation="eager")
    with pytest.raises(ValueError, match=rf"^{name} makes {makes} for its whole input"):
        enable(model)


class Shifting(transformers.LlamaForCausalLM):
    """A head with a loss of its own, as Qwen2-Audio's."""

    def forward(self, input_ids: Any = None, labels: Any = None, **given: Any) -> Any:
        given.pop("shift_labels", None)
        out = super().forward(input_ids=input_ids, **given)
        if labels is not None:
            out.loss = nn.functional.cross_entropy(out.logits[0, :-1], labels[0, 1:])
        return out


def test_labels_of_a_head_that_shifts_them_itself_are_refused() -> None:
    cls = Shifting
    model = enable(zoo.small(cls, zoo.configuration("llama")), check=False)
    ids, _ = zoo.inputs(model, LAYOUT)
    with pytest.raises(ValueError, match=r"labels came together with dualkv .* Shifting makes a loss of its own"):
        model(input_ids=ids, dualkv=LAYOUT, labels=ids, shift_labels=ids)
    model(input_ids=ids, dualkv=LAYOUT)
    modeling = sys.modules[transformers.Qwen2AudioForConditionalGeneration.__module__]
    assert makes_own_loss(modeling.Qwen2AudioForConditionalGeneration)
