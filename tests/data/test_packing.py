from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dualkv
from dualkv.data.packing import PackedBatch, pack, pack_padded
from dualkv.data.trees import PackedSequences

TOKENS = st.lists(st.integers(0, 9), max_size=6)
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=4)  # few token values: equal prompts are common
STYLES = st.sampled_from(["gather", "roll"])


@st.composite
def grouped(draw):
    """prompts, a list of response lists."""
    prompts = draw(st.lists(PROMPT, min_size=1, max_size=4))
    return prompts, [draw(st.lists(TOKENS, min_size=1, max_size=4)) for _ in prompts]


@st.composite
def rollouts(draw):
    """One prompt a rollout (equal within a group), responses, group of each rollout, in any order."""
    prompts = draw(st.lists(PROMPT, min_size=1, max_size=3))
    group = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=8))
    return [prompts[g] for g in group], [draw(TOKENS) for _ in group], group


def tensors(sequences, dtype=torch.int64):
    return [torch.tensor(s, dtype=dtype) for s in sequences]


def as_lists(rows):
    return [row.tolist() for row in rows]


def padded(sequences, left: bool, extra: int = 0, value: int = 7):
    """ids and mask [N, longest + extra]."""
    width = max(map(len, sequences)) + extra
    ids, mask = torch.full((len(sequences), width), value), torch.zeros(len(sequences), width, dtype=torch.int64)
    for i, s in enumerate(sequences):
        at = slice(width - len(s), width) if left else slice(0, len(s))
        ids[i, at], mask[i, at] = torch.tensor(s, dtype=torch.int64), 1
    return ids, mask


def check(batch: PackedBatch, prompts: list[list[int]], responses: list[list[int]]) -> None:
    """Everything a batch says about its rollouts (one prompt each, in the order of the input)."""
    sequences = [p + r for p, r in zip(prompts, responses, strict=True)]
    t, m, n = batch.layout.num_tokens, sum(map(len, responses)), len(responses)
    assert batch.input_ids.shape == batch.position_ids.shape == (1, t)
    assert batch.input_ids.dtype == batch.position_ids.dtype == torch.int64
    assert batch.predict_rows.shape == batch.targets.shape == (m,)
    assert (batch.num_rollouts, batch.num_response_tokens) == (n, m)
    assert batch.response_lens == [len(r) for r in responses]
    assert sorted(batch.order.tolist()) == list(range(n))

    assert as_lists(batch.unpack_sequences(batch.input_ids)) == sequences
    assert as_lists(batch.unpack_sequences(batch.input_ids[0])) == sequences
    assert as_lists(batch.unpack_sequences(batch.position_ids)) == [list(range(len(s))) for s in sequences]
    assert as_lists(batch.unpack(batch.targets)) == responses
    assert as_lists(batch.unpack(batch.targets, "nested").unbind()) == responses
    table = batch.unpack(batch.targets, "padded", padding_value=-1)
    assert table.shape == (n, batch.padded_width)
    assert table.tolist() == [r + [-1] * (batch.padded_width - len(r)) for r in responses]

    # The row that predicts a token is the one of its own sequence just before it.
    rows = batch.unpack_sequences(torch.arange(t))
    for p, own, predicting in zip(prompts, rows, batch.unpack(batch.predict_rows), strict=True):
        assert predicting.tolist() == own[len(p) - 1 : -1].tolist()


@settings(max_examples=100, deadline=None)
@given(grouped(), STYLES)
def test_grouped_round_trip(case, style):
    prompts, responses = case
    batch = pack(tensors(prompts), [tensors(group) for group in responses], labels=style)
    flat = [(p, r) for p, group in zip(prompts, responses, strict=True) for r in group]
    check(batch, [p for p, _ in flat], [r for _, r in flat])
    shared = int(style == "roll")
    once: dict[tuple, list[int]] = {}
    for p, group in zip(prompts, responses, strict=True):
        once.setdefault(tuple(p), []).extend(len(r) for r in group)
    assert batch.layout.prompt_lens == [len(p) - shared for p in once]
    assert batch.layout.response_lens == [[n + shared for n in lens] for lens in once.values()]
    assert batch.order.tolist() == list(range(len(flat)))
    assert batch.targets.tolist() == [token for _, r in flat for token in r]  # what users put beside it, in their order
    if any(len(p) + len(r) > 1 for p, r in flat):
        whole = PackedSequences.from_batch(batch, whole=True)
        assert as_lists(whole.unpack(whole.targets)) == [(p + r)[1:] for p, r in flat]
    if style == "gather" and any(r for _, r in flat):
        rows = batch.predict_rows.unique(return_counts=True)[1]
        assert batch._tokens_of_row.tolist() == rows.tolist()


@settings(max_examples=100, deadline=None)
@given(rollouts(), STYLES, st.sampled_from(["content", "list", "strings", "array", "tensor", "tensors"]))
def test_rollouts_round_trip(case, style, ids):
    prompts, responses, group = case
    group_ids = {
        "content": None,
        "list": group,
        "strings": [f"uid-{g}" for g in group],
        "array": np.array([f"uid-{g}" for g in group], object),
        "tensor": torch.tensor(group),
        "tensors": list(torch.tensor(group)),
    }[ids]
    batch = pack(tensors(prompts), tensors(responses), labels=style, group_ids=group_ids)
    check(batch, prompts, responses)
    # Groups in the order of their first rollout, a group's rollouts in the order of the input.
    keys = [tuple(p) for p in prompts] if ids == "content" else group
    first = list(dict.fromkeys(keys))
    assert batch.order.tolist() == sorted(range(len(keys)), key=lambda i: (first.index(keys[i]), i))
    assert batch.layout.num_groups == len(first)


@settings(max_examples=100, deadline=None)
@given(rollouts(), STYLES, st.booleans(), st.booleans(), st.integers(0, 2))
def test_padded_round_trip(case, style, declared, boolean, extra):
    prompts, responses, group = case
    prompt_ids, prompt_mask = padded(prompts, left=True, extra=extra)
    response_ids, response_mask = padded(responses, left=False, extra=extra)
    if boolean:
        prompt_mask, response_mask = prompt_mask.bool(), response_mask.bool()
    group_ids = group if declared else None
    batch = pack_padded(prompt_ids, prompt_mask, response_ids, response_mask, labels=style, group_ids=group_ids)
    check(batch, prompts, responses)
    assert batch.padded_width == response_ids.shape[1]
    assert torch.equal(batch.unpack(batch.targets, "padded", padding_value=7), response_ids)
    same = pack(tensors(prompts), tensors(responses), labels=style, group_ids=group_ids)
    assert torch.equal(batch.input_ids, same.input_ids)
    assert batch.layout == same.layout


@settings(max_examples=50, deadline=None)
@given(rollouts(), STYLES, st.data())
def test_values_of_a_padded_batch_go_back_into_their_columns(case, style, data):
    """The tokens of a row may begin anywhere, and the order of groups may differ from that of the rows."""
    prompts, responses, _ = case
    width = max(map(len, responses)) + 2
    starts = [data.draw(st.integers(0, width - len(r))) for r in responses]
    ids, mask = torch.full((2, len(responses), width), 7)
    mask.zero_()
    for i, (r, start) in enumerate(zip(responses, starts, strict=True)):
        ids[i, start : start + len(r)], mask[i, start : start + len(r)] = torch.tensor(r, dtype=torch.int64), 1
    batch = pack_padded(*padded(prompts, left=False), ids, mask, labels=style)
    assert as_lists(batch.unpack(batch.targets)) == responses
    assert torch.equal(batch.unpack(batch.targets, "padded", padding_value=7), ids)


def test_padding_on_both_sides():
    ids, mask = torch.tensor([[0, 8, 9, 0]]), torch.tensor([[0, 1, 1, 0]])
    batch = pack_padded(ids, mask, ids, mask)
    assert batch.unpack(batch.targets).pop().tolist() == [8, 9]
    assert batch.unpack(batch.targets, "padded").tolist() == ids.tolist()


PICTURE = {"pixel_values": torch.ones(4, 3), "image_grid_thw": torch.tensor([[1, 2, 2]])}


@pytest.mark.parametrize("style", ["gather", "roll"])
def test_equal_prompts_of_groups_are_packed_once(style):
    """Equal prompts may be anywhere; values stay in the order of the input."""
    prompts, responses = [[1, 2], [3, 4], [1, 2], [5]], [[[6], [7, 8]], [[9]], [[10, 11]], [[12]]]
    batch = pack(prompts, responses, labels=style)
    assert batch.layout.num_groups == 3
    assert batch.targets.tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert as_lists(batch.unpack(batch.targets)) == [r for group in responses for r in group]
    assert as_lists(batch.unpack_sequences(batch.input_ids)) == [
        [*p, *r] for p, group in zip(prompts, responses, strict=True) for r in group
    ]
    there = batch.to("meta")
    assert there.response_lens == batch.response_lens == [1, 2, 1, 2, 1]
    same = pack(prompts[:2], [[[6], [7, 8], [10, 11]], [[9]]], labels=style)
    assert batch.input_ids[0, : same.layout.num_tokens].tolist() == same.input_ids[0].tolist()


def test_prompts_of_other_images_stay_apart():
    other = {**PICTURE, "pixel_values": torch.zeros(4, 3)}
    for media, groups in (([PICTURE, PICTURE], 1), ([PICTURE, other], 2), ([PICTURE, None], 2), (None, 1)):
        batch = pack([[1, 2, 3, 4], [1, 2, 3, 4]], [[[5]], [[6]]], media=media)
        assert batch.layout.num_groups == groups


def test_both_styles_by_hand():
    prompts, responses = [[1, 2, 3], [4]], [[[5, 6], [], [7]], [[8, 9]]]
    gather = pack(prompts, responses)
    assert gather.input_ids.tolist() == [[1, 2, 3, 5, 6, 7, 4, 8, 9]]
    assert gather.position_ids.tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert gather.predict_rows.tolist() == [2, 3, 2, 6, 7]
    assert gather.targets.tolist() == [5, 6, 7, 8, 9]
    roll = pack(prompts, responses, labels="roll")
    assert roll.input_ids.tolist() == [[1, 2, 3, 5, 6, 3, 3, 7, 4, 8, 9]]
    assert roll.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 2, 3, 0, 1, 2]]
    assert roll.predict_rows.tolist() == [2, 3, 6, 8, 9]
    assert roll.labels.tolist() == [[-100, -100, 5, 6, -100, -100, 7, -100, 8, 9, -100]]
    assert roll.layout.prompt_lens == [2, 0]


@settings(max_examples=50, deadline=None)
@given(grouped())
def test_roll_labels_are_the_next_packed_token(case):
    batch = pack(*case, labels="roll")
    labels, ids = batch.labels[0], batch.input_ids[0]
    kept = labels != -100
    assert torch.equal(kept.nonzero()[:, 0], batch.predict_rows.sort().values)
    assert torch.equal(labels[kept], ids.roll(-1)[kept])


@pytest.mark.parametrize("form", ["list", "padded", "nested"])
@pytest.mark.parametrize("trailing", [(), (3,)])
def test_unpack_is_differentiable(form, trailing):
    batch = pack([[1], [2], [1]], [[3, 4], [5, 6, 7], []])
    assert batch.order.tolist() == [0, 2, 1]
    batch.layout.mark_used()
    values = torch.randn(batch.num_response_tokens, *trailing, requires_grad=True)
    weight = torch.randn(batch.num_response_tokens, *trailing)
    got = batch.unpack(values, form)
    want = batch.unpack(weight, form)
    if form == "padded":
        (got * want).sum().backward()
    else:
        sum((g * w).sum() for g, w in zip(got, want, strict=True)).backward()
    assert torch.equal(values.grad, weight)


@pytest.mark.parametrize("style", ["gather", "roll"])
def test_unpack_sequences_is_differentiable(style):
    batch = pack([[1, 2], [3]], [[[4], [5, 6], []], [[7]]], labels=style)
    batch.layout.mark_used()
    hidden = torch.randn(1, batch.layout.num_tokens, 2, requires_grad=True)
    sequences = batch.unpack_sequences(hidden)
    assert [tuple(s.shape) for s in sequences] == [(3, 2), (4, 2), (2, 2), (2, 2)]
    sum(s.sum() for s in sequences).backward()
    # A row's gradient counts the sequences that hold it: three share the first prompt's first token.
    assert hidden.grad[0, 0].tolist() == [3, 3]
    assert hidden.grad.sum() == 2 * sum(len(s) for s in sequences)


def test_what_may_hold_the_tokens():
    want = pack([[1, 2], [3]], [[[4, 5]], [[6], []]])
    for prompts, responses in (
        (
            tensors([[1, 2], [3]], torch.int32),
            [tensors([[4, 5]], torch.uint8), [[6], torch.tensor([], dtype=torch.int16)]],
        ),
        ((np.array([1, 2]), np.array([3], np.int32)), ([np.array([4, 5])], [np.array([6]), []])),
    ):
        batch = pack(prompts, responses)
        assert batch.input_ids.dtype == torch.int64
        assert torch.equal(batch.input_ids, want.input_ids)
        assert batch.layout == want.layout
    nested = [torch.nested.as_nested_tensor(tensors(s), layout=torch.jagged) for s in ([[1, 2], [3]], [[4, 5], [6]])]
    check(pack(*nested), [[1, 2], [3]], [[4, 5], [6]])
    objects = np.empty(2, object)
    objects[:] = [[1, 2], [3]]
    check(pack(objects, [[4, 5], [6]]), [[1, 2], [3]], [[4, 5], [6]])
    check(pack([[1], [1]], [[], []], group_ids=["a", "a"]), [[1], [1]], [[], []])


def test_to_another_device():
    batch = pack([[1, 2]], [[[3], []]], labels="roll")
    assert batch.to("cpu") is batch
    there = batch.to("meta")
    assert there.device == there.layout.device == torch.device("meta")
    assert there.input_ids.shape == batch.input_ids.shape
    assert there.response_lens == batch.response_lens
    assert pack([[1, 2]], [[[3], []]], device="meta").device.type == "meta"


def test_repr_says_what_it_holds():
    text = repr(pack([[1, 2]], [[[3], [4, 5]]]))
    for part in ("2 rollouts", "3 response tokens", "'gather'", "5 tokens", "1 group,"):
        assert part in text


MASK = torch.ones(2, 2, dtype=torch.int64)
BAD = {
    "empty prompt": (lambda: pack([[1], []], [[[2]], [[3]]]), ValueError, r"prompts\[1\] is empty"),
    "empty prompt of a rollout": (lambda: pack([[1], [1], []], [[2], [3], [4]]), ValueError, r"prompts\[2\] is empty"),
    "group without responses": (lambda: pack([[1], [2]], [[[3]], []]), ValueError, r"responses\[1\] is empty"),
    "only groups without responses": (lambda: pack([[1]], [[]]), ValueError, r"responses\[0\] is empty"),
    "no prompts": (lambda: pack([], []), ValueError, "prompts is empty"),
    "counts": (lambda: pack([[1], [2]], [[3]]), ValueError, "responses has 1 entries for 2 prompts"),
    "differ": (
        lambda: pack([[1], [2], [3]], [[4], [5], [6]], group_ids=["a", "b", "a"]),
        ValueError,
        "prompts of rollouts 0 and 2 differ.*group 'a'",
    ),
    "differ in length": (
        lambda: pack([[1], [1, 1]], [[4], [5]], group_ids=[0, 0]),
        ValueError,
        "prompts of rollouts 0 and 1 differ",
    ),
    "ids count": (lambda: pack([[1]], [[2]], group_ids=[1, 2]), ValueError, "group_ids has 2 entries for 1 rollouts"),
    "ids scalar": (lambda: pack([[1]], [[2]], group_ids=torch.tensor(3)), ValueError, "group_ids has no entries"),
    "ids unhashable": (lambda: pack([[1]], [[2]], group_ids=[[1]]), TypeError, r"group_ids\[0\] is a list"),
    "ids and groups": (lambda: pack([[1]], [[[2]]], group_ids=[1]), ValueError, "responses is grouped already"),
    "mixed forms": (lambda: pack([[1], [2]], [[[2]], torch.tensor([2])]), TypeError, r"responses\[1\] is a Tensor"),
    "style": (lambda: pack([[1]], [[[2]]], labels="shift"), ValueError, "labels is 'shift'"),
    "floats": (lambda: pack([torch.tensor([1.0])], [[[2]]]), TypeError, r"prompts\[0\] must hold integers"),
    "float list": (lambda: pack([[1]], [[[2.5]]]), TypeError, r"responses\[0\]\[0\] must hold integers"),
    "bools": (lambda: pack([torch.tensor([True])], [[[2]]]), TypeError, r"prompts\[0\] must hold integers"),
    "text": (lambda: pack("ab", [[1], [2]]), TypeError, "prompts is a str"),
    "rank": (lambda: pack([torch.ones(1, 2, dtype=torch.int64)], [[[2]]]), ValueError, r"prompts\[0\].*\(1, 2\)"),
    "padded to pack": (lambda: pack(MASK, MASK), ValueError, "pack_padded"),
    "negative": (lambda: pack([[1], [2]], [[3], [-4]]), ValueError, "0 or more, got -4 .* rollout 1"),
    "negative prompt": (lambda: pack([[1], [-2], [1]], [[3], [4], [5]]), ValueError, "got -2 .* rollout 1"),
    "device": (
        lambda: pack([torch.tensor([1])], [[torch.ones(2, dtype=torch.int64, device="meta")]]),
        ValueError,
        "on cpu and meta",
    ),
    "ids list": (lambda: pack_padded([[1]], MASK, MASK, MASK), TypeError, "prompt_ids must be a tensor"),
    "rows": (lambda: pack_padded(MASK, MASK, MASK[:1], MASK[:1]), ValueError, "response_ids has 1 rows, prompt_ids 2"),
    "no rows": (lambda: pack_padded(*[MASK[:0]] * 4), ValueError, "prompt_ids has no rows"),
    "labels": (lambda: pack([[1]], [[[2]]]).labels, ValueError, "labels='roll'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_sentence(name):
    make, error, match = BAD[name]
    with pytest.raises(error, match=match) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("labels", ["gather", "roll"])
def test_what_is_packed_in_inference_mode_can_be_trained_on(labels):
    """Tensors of inference mode cannot be saved for a backward: old log-probs and training share a batch."""
    with torch.inference_mode():
        prompts, responses = [torch.arange(3)], [[torch.arange(2), torch.arange(4)]]
        batches = [dualkv.pack(prompts, responses, labels=labels)]
        sequences = [torch.cat([prompts[0], response]) for response in responses[0]]
        batches.append(dualkv.pack_sequences(sequences, [torch.arange(len(s)) > 2 for s in sequences], labels=labels))
        for batch in batches:
            for name in (
                "input_ids",
                "position_ids",
                "predict_rows",
                "targets",
                *(["labels"] if labels == "roll" else []),
            ):
                assert not getattr(batch, name).is_inference(), name
