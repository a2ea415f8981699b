"""Turns that were tokenized again and contexts that were edited are found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from dualkv.bench import traces, trees
from dualkv.data.breaks import FEW, RUN, Break, described, find
from dualkv.data.rollouts import ByteTokenizer
from dualkv.prefixes import shared_prefixes


def drawn(count, seed):
    return np.random.default_rng(seed).integers(10, 5000, count)


START, REST = drawn(50, 0), drawn(200, 1)


def found(*sequences, decode=None):
    return find(sequences, shared_prefixes(list(sequences)), decode)


@pytest.mark.parametrize(
    ("ours", "theirs", "differ", "again"),
    [([7], [8, 9], (1, 2), True), ([3] * FEW, [4], (FEW, 1), True), ([3] * (FEW + 1), [4], (FEW + 1, 1), False),
     ([6, 7], [], (2, 0), True), (list(range(9000, 9300)), [], (300, 0), False)],
)  # fmt: skip
def test_where_sequences_agree_again(ours, theirs, differ, again):
    a, b = (np.concatenate([START, np.array(x, np.int64), REST]) for x in (ours, theirs))
    [one] = found(a, b)
    assert one.at == len(START)
    assert one.agree == len(REST)
    assert one.tokenized_again is again
    assert dict(zip(one.sequences, one.differ, strict=True)) == dict(zip((0, 1), differ, strict=True))
    [sentence] = described([one], lambda s: f"<{s}>")
    assert ("tokenized again (if" in sentence) is again
    assert f"{len(REST)} tokens behind are not shared" in sentence
    assert "part at token 50" in sentence


def test_what_is_no_break():
    assert not found(np.append(START, REST), np.append(START, drawn(200, 2))), "nothing agrees again"
    assert not found(np.append([1], REST), np.append([2], REST)), "nothing is shared before"
    short = REST[: RUN - 1]
    assert not found(np.concatenate([START, [1], short]), np.concatenate([START, [2], short])), "too little agrees"
    assert not found(START, np.append(START, REST)), "one ends inside the other"


def test_texts_decide_where_they_are_known():
    """Two ways to encode one text, and an edit of as few tokens."""
    texts = {1: "ab", 2: "a", 3: "b", 4: "x"} | {int(t): f"<{t}>" for t in {*START, *REST}}
    again, edited = (np.concatenate([START, x, REST]) for x in ([2, 3], [4]))
    plain = np.concatenate([START, [1], REST])

    def decode(ids):
        return "".join(texts[i] for i in ids)

    assert [b.same_text for b in found(plain, again, decode=decode)] == [True]
    [other] = found(plain, edited, decode=decode)
    assert not other.tokenized_again
    sentence = described([Break((0, 1), 5, (1, 2), 40, True)], str)[0]
    assert "--tokenizer" not in sentence


def test_dropped_reasoning_is_an_edit_of_the_context():
    """A caterpillar's leaf and its trunk agree again in what was said, where that is long enough."""
    trace = traces.parse("trace-swe-dropped-0-n1-t4")
    tokens = trace.token_sequences(50000)
    edits = found(*tokens)
    said = [s[-1].tokens for s in trace.sequences[:-1] if s[-1].tokens >= RUN]
    assert sorted(b.agree for b in edits if not b.tokenized_again) == sorted(said)


def test_the_command_reports_breaks(run, tmp_path):
    path = tmp_path / "rollouts.jsonl"
    bytes_ = np.random.default_rng(0).integers(97, 122, 300).tolist()
    one, other = [*bytes_[:50], 1, *bytes_[50:]], [*bytes_[:50], 2, 3, *bytes_[50:]]
    path.write_text("\n" + json.dumps({"sequences": [one, other]}))
    code, out, err = run("trees", "--from", str(path))
    assert code == 0, err
    assert "line 2, sequence 0 and line 2, sequence 1 part at token 50: 1 and 2 tokens differ, 250 agree" in out
    assert (
        "rollouts.jsonl:2, sequence 0 and rollouts.jsonl:2, sequence 1 part"
        in trees.read(tmp_path, ByteTokenizer()).breaks[0]
    )
    compared = trees.read(path, ByteTokenizer(), compare_texts=True)
    assert "as where text was edited" in compared.breaks[0]
