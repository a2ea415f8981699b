"""Bad input on the CPU: one sentence that names the argument and what came, before anything runs."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dualkv import Layout, PackedSequences, pack, pack_sequences, plan_micro_batches, plan_sequences
from dualkv.data.parts import plan_parts
from dualkv.grpo import group_advantages, token_weights
from tests.bad_input import BAD, BAD_ON_CPU, base, check_names, nothing_runs

LOOKS = {"aten.detach.default", "aten.alias.default", "dualkv.fwd.default", "dualkv.bwd.default"}  # compute nothing


class Computes(TorchDispatchMode):
    """Names of the operations that were called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bad", BAD + BAD_ON_CPU, ids=str)
def test_one_sentence_before_anything_runs(bad, monkeypatch):
    call = bad.prepare("cpu")
    with nothing_runs(monkeypatch), Computes() as computes:
        bad.check(call, "cpu")
    assert bad.values or computes.names <= LOOKS


@pytest.mark.parametrize("bad", [bad for bad in BAD if bad.function in ("attention", "fwd", "bwd")], ids=str)
def test_refused_behind_a_good_call_too(bad):
    """Forms of tensors that a layout has seen are not checked again."""
    function, arguments = base(bad.function)
    function(**arguments)
    bad.check(bad.prepare("cpu"), "cpu")


# ---------------------------------------------------------------- text for tokens, one list too few
LISTS = "[[3, 2]]"  # an example of a right argument
TEXT = "tokenize"
advantages, weights = partial(group_advantages, torch.ones(3)), partial(token_weights, mean="token")


@pytest.mark.parametrize(
    ("function", "arguments", "names"),
    [
        *(
            (function, arguments, (f"response_lens{place}", came, LISTS))
            for function in (Layout.from_lengths, partial(plan_micro_batches, budget=9))
            for arguments, place, came in [
                (([5], [3, 2]), "[0]", "3"),
                (([5, 5], [[3, 2], 2]), "[1]", "2"),
                (([5], ["32"]), "[0]", "'32'"),
                (([5], torch.tensor([3, 2])), "[0]", "tensor(3)"),
                (([5], [None]), "[0]", "None"),
                (([5], 3), "", "3"),
                (([5], "32"), "", "'32'"),
                (([5], torch.tensor(3)), "", "tensor(3)"),
            ]
        ),
        (Layout.from_lengths, (5, [[3]]), ("prompt_lens", "5")),
        (Layout.from_lengths, (["5"], [["3"]]), ("prompt_lens", "'5'")),
        (Layout.from_segments, (5, -1), ("offsets", "5")),
        (Layout.from_segments, ("05", [-1]), ("offsets", "'05'")),
        (Layout.from_cu_seqlens, ([0, 2], 4), ("cu_seqlens_responses", "4")),
        (pack, (["a"], [["b"]]), ("prompts[0]", "'a'", TEXT)),
        (pack, (["a"], ["b"]), ("prompts[0]", "'a'", TEXT)),
        (pack, ([[1]], ["b"]), ("responses[0]", "'b'", TEXT)),
        (pack, ([[1]], [[[2], "b"]]), ("responses[0][1]", "'b'", TEXT)),
        (pack, ([[1]], [["b"]]), ("responses[0]", "'b'")),
        (pack, ([1, 2], [3, 4]), ("prompts[0]", "1")),
        (pack, ([[1, 2]], [None]), ("responses[0]", "None")),
        (pack_sequences, (["ab"],), ("sequences[0]", "'ab'", TEXT)),
        (pack_sequences, ([1, 2],), ("sequences[0]", "1")),
        (pack_sequences, ([[1, 2]], [1]), ("loss_masks[0]", "1")),
        (pack_sequences, ([[1, 2]], [["0", "1"]]), ("loss_masks[0]", "['0', '1']")),
        (pack_sequences, ([[1, 2]], 1), ("loss_masks", "int")),
        (plan_sequences, ([[1, 2]], "5"), ("budget", "'5'")),
        (plan_parts, (pack([[1]], [[[2]]]), 5), ("batch", "PackedBatch", "from_batch")),
        (PackedSequences.from_batch, (pack_sequences([[1, 2]]),), ("batch", "PackedSequences", "pack_padded")),
        (Layout.from_token_sequences, (["ab"],), ("sequences[0]", "'ab'", TEXT)),
        (Layout.from_token_sequences, ([[1]], "2"), ("min_shared", "'2'")),
        (advantages, (3,), ("group_sizes", "3")),
        (advantages, ([3.0],), ("group_sizes", "3.0")),
        (weights, ("3",), ("response_lens", "'3'")),
    ],
)
def test_text_and_one_list_too_few(function, arguments, names):
    with pytest.raises(TypeError) as caught:
        function(*arguments)
    check_names(caught.value, *names)


def test_group_ids_that_are_no_list():
    with pytest.raises(ValueError, match="group_ids"):
        pack([[1], [1]], [[2], [3]], group_ids=5)


def test_lists_of_lengths_in_any_container():
    expected = Layout.from_lengths([5, 4], [[3, 2], []])
    for lists in (((3, 2), ()), ([3, 2], range(0)), (np.array([3, 2]), torch.tensor([]).long()), iter([[3, 2], []])):
        layout = Layout.from_lengths([5, 4], lists)
        assert layout.offsets.tolist() == expected.offsets.tolist()
        assert layout.parent.tolist() == expected.parent.tolist()
