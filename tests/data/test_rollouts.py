"""Rollouts from files, good and bad, the byte-level tokenizer, and drawn rollouts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dualkv.data.rollouts import ByteTokenizer, draw_rollouts, load_tokenizer, read_rollouts, topic_prompts

GOOD = {"prompt": "hi", "responses": ["a", "bc"], "rewards": [0, 1.5]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines))
    return path


def test_reads_text_and_token_ids(tmp_path: Path) -> None:
    ids = {"prompt": [5, 6, 7], "responses": [[], [319]], "rewards": [-1, 2], "from": "elsewhere"}
    rollouts = read_rollouts(write(tmp_path, GOOD, b"  ", ids), ByteTokenizer(), 320)
    assert [p.tolist() for p in rollouts.prompts] == [[104, 105], [5, 6, 7]]
    assert [[r.tolist() for r in group] for group in rollouts.responses] == [[[97], [98, 99]], [[], [319]]]
    assert rollouts.rewards == [[0.0, 1.5], [-1.0, 2.0]]
    assert rollouts.group_sizes == [2, 2]
    assert rollouts.response_lens == [1, 2, 0, 1]
    assert all(r.dtype == torch.int64 for group in rollouts.responses for r in group)


def without(key: str) -> dict[str, Any]:
    return {k: v for k, v in GOOD.items() if k != key}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": "hi", ', "not valid JSON"),
        (b'{"prompt": "hi"\r', "not valid JSON (Expecting ',' delimiter at column 16)"),
        (b'  {"prompt": "hi",, ', "at column 19)"),
        ('{"prompt": "h\u00ef" 1'.encode(), "at column 17)"),
        (b"\xff\xfe\xfa", "not UTF-8"),
        ([1, 2], "expected a JSON object, got a list"),
        (without("prompt"), "'prompt' is missing"),
        (without("responses"), "'responses' is missing"),
        (without("rewards"), "'rewards' is missing, found ['prompt', 'responses']"),
        (GOOD | {"prompt": ""}, "'prompt' is empty"),
        (GOOD | {"prompt": []}, "'prompt' is empty"),
        (GOOD | {"prompt": None}, "'prompt' must be text or a list of token ids, got null"),
        (GOOD | {"responses": [], "rewards": []}, "'responses' is empty"),
        (GOOD | {"responses": "ab"}, "'responses' must be a list, got text"),
        (GOOD | {"rewards": 1.0}, "'rewards' must be a list, got a number"),
        (GOOD | {"rewards": [1.0]}, "1 rewards for 2 responses"),
        (GOOD | {"rewards": [1.0, None]}, "rewards[1] is null, expected a finite number"),
        (GOOD | {"rewards": [True, 1.0]}, "rewards[0] is true"),
        (GOOD | {"rewards": [1.0, float("nan")]}, "rewards[1] is NaN"),
        (GOOD | {"rewards": [float("-inf"), 1.0]}, "rewards[0] is -Infinity"),
        (GOOD | {"responses": ["a", [3, 320]]}, "responses[1][1] is token 320, outside the model's vocabulary of 320"),
        (
            GOOD | {"prompt": [-1]},
            "prompt[0] is token -1, outside the model's vocabulary of 320, expected a token id from 0 to 319",
        ),
        (GOOD | {"prompt": [1.5]}, "prompt[0] is 1.5, expected a token id"),
        (GOOD | {"prompt": [False]}, "prompt[0] is false, expected a token id"),
        (GOOD | {"prompt": ["hi"]}, 'prompt[0] is "hi", expected a token id'),
    ],
)
def test_bad_lines_name_file_and_line(tmp_path: Path, line: object, says: str) -> None:
    path = write(tmp_path, GOOD, line)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_rollouts(path, ByteTokenizer(), 320)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert "\n" not in str(caught.value)


TURNS = {"sequences": [[5, 6, 7, 8], [5, 6, 9], [5, 6]], "loss_masks": [[0, 0, 0, 1], [0, 0, 1], [0, 0]],
         "rewards": [1, 2, 3]}  # fmt: skip


def test_reads_rollouts_of_several_turns(tmp_path: Path) -> None:
    """The prompt is what all begin with, up to the first token that counts."""
    early = {"sequences": [[1, 2, 3], [1, 2, 3]], "loss_masks": [[0, 1, 1], [False, False, True]], "rewards": [0, 0]}
    rollouts = read_rollouts(write(tmp_path, TURNS, GOOD, early), ByteTokenizer(), 320)
    assert [p.tolist() for p in rollouts.prompts] == [[5, 6], [104, 105], [1]]
    assert [[r.tolist() for r in g] for g in rollouts.responses] == [[[7, 8], [9], []], [[97], [98, 99]], [[2, 3]] * 2]
    assert [[m.tolist() for m in g] for g in rollouts.masks or []] == [
        [[False, True], [True], []],
        [[True], [True, True]],
        [[True, True], [False, True]],
    ]
    assert rollouts.trained_lens == [1, 1, 0, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"loss_masks": [[0] * 4, [0] * 3]}, "'loss_masks' must be a list of 3 masks, one a sequence, got 2 masks"),
        ({"loss_masks": 1}, "'loss_masks' must be a list of 3 masks, one a sequence, got a number"),
        ({"loss_masks": [[0] * 4, [0] * 2, [0] * 2]}, "'loss_masks[1]' must be a list of 3 values 0 or 1, one a token"),
        ({"loss_masks": [[0, 0, 0, 2], [0] * 3, [0] * 2]}, "'loss_masks[0]' must be a list of 4 values 0 or 1"),
        ({"loss_masks": [[0] * 4, [1, 0, 0], [0] * 2]}, "sequences[1] begins with a token that counts"),
        ({"sequences": [[5, 6, 7, 8], [6, 6, 9], [5, 6]]}, "sequences[0] and sequences[1] differ in their first token"),
        ({"sequences": [[5, 6, 7, 8], [5, 6, 320], [5, 6]]}, "sequences[1][2] is token 320, outside the model's"),
        ({"sequences": ["text", [5, 6, 9], [5, 6]]}, "'sequences[0]' must be a list of token ids, got text"),
        ({"sequences": [[5, 6, 7, 8], [], [5, 6]]}, "sequences[1] is empty, expected at least one token"),
        ({"sequences": [], "rewards": []}, "'sequences' is empty, expected at least one sequence"),
        ({"rewards": [1]}, "1 rewards for 3 sequences, expected one a sequence"),
    ],
)
def test_bad_turns_name_file_and_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_rollouts(write(tmp_path, TURNS | change), ByteTokenizer(), 320)
    assert str(caught.value).startswith(f"{tmp_path / 'rollouts.jsonl'}:1: ")


def test_text_outside_a_small_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt\[0\] is token 104, outside the model's vocabulary of 100"):
        read_rollouts(write(tmp_path, GOOD), ByteTokenizer(), 100)


def test_empty_and_absent_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rollouts in it"):
        read_rollouts(write(tmp_path, b"", b" "), ByteTokenizer(), 320)
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path / "absent.jsonl", ByteTokenizer(), 320)


@given(st.text())
def test_byte_tokenizer_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert tokenizer.decode([*ids, ByteTokenizer.eos_id]) == text


def test_hugging_face_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "hello": 2, "world": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>").save_pretrained(tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (4, 1)
    assert tokenizer.encode("world hello") == [3, 2]
    assert tokenizer.decode([3, 2, 1]) == "world hello"
    line = {"prompt": "hello", "responses": ["world", [1]], "rewards": [0, 1]}
    assert read_rollouts(write(tmp_path, line), tokenizer, 4).responses[0][0].tolist() == [3]


def test_topic_prompts_are_windows_of_real_text() -> None:
    tokenizer = ByteTokenizer()
    prompts = topic_prompts(tokenizer, 500, 3, seed=0)
    again, other = topic_prompts(tokenizer, 500, 3, seed=0), topic_prompts(tokenizer, 500, 3, seed=1)
    assert [len(p) for p in prompts] == [500] * 3
    assert all(torch.equal(a, b) for a, b in zip(prompts, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(prompts, other, strict=True))
    for length in (0, 10**9):
        with pytest.raises(ValueError, match=f"prompt_len is {length}, expected 1 to "):
            topic_prompts(tokenizer, length, 1, seed=0)


@pytest.mark.parametrize(("responses", "turns", "distinct"), [(6, 3, [2, 4, 6]), (5, 2, [2, 5]), (1, 3, [1, 1, 1])])
def test_drawn_turns_branch(responses: int, turns: int, distinct: list[int]) -> None:
    drawn = draw_rollouts(ByteTokenizer(), 2, 9, responses, 4, turns, seed=7)
    assert [len(p) for p in drawn.prompts] == [9, 9]
    assert drawn.masks is not None
    for group, masks in zip(drawn.responses, drawn.masks, strict=True):
        assert len(group) == responses
        for turn in range(turns):
            written = slice(8 * turn, 8 * turn + 4)
            assert len({tuple(r[: written.stop].tolist()) for r in group}) == distinct[turn]
            assert len({tuple(r[written.stop : written.stop + 4].tolist()) for r in group}) == 1, "an answer to all"
        assert all(m.tolist() == (([True] * 4 + [False] * 4) * turns)[:-4] for m in masks)
    assert draw_rollouts(ByteTokenizer(), 2, 9, responses, 4, 1, seed=7).masks is None
