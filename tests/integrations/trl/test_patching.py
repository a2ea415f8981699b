"""Tests that what TRL's trainers on packed rows do to a model is undone."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as tf
from trl.trainer.utils import add_fused_lm_head

from dualkv.integrations import patching
from dualkv.integrations.transformers import enable
from dualkv.integrations.trl.answers import pack_head, pack_score
from tests.integrations import states
from tests.integrations.tiny import SIZES, make_model


def with_head() -> Any:
    model = make_model()
    add_fused_lm_head(model)
    return model


def scorer() -> Any:
    return tf.Qwen3ForSequenceClassification(tf.Qwen3Config(**SIZES, num_labels=1))


@pytest.mark.parametrize(
    ("make", "pack"),
    [(with_head, lambda model: pack_head(enable(model), None)), (scorer, lambda model: pack_score(model, None))],
    ids=["head", "score"],
)
def test_trainers_leave_nothing(make: Any, pack: Any) -> None:
    model = make()
    before = states.of_model(model)
    pack(model)
    assert ".forward" in states.differences(before, states.of_model(model))
    patching.undo(model)
    assert states.differences(before, states.of_model(model)) == []
