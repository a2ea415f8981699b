"""Files of rollouts of other tools: in the form that each tool writes, or that its documentation shows."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dualkv.bench import trees
from dualkv.data.forms import samples
from dualkv.data.rollouts import ByteTokenizer, Rollouts, load_tokenizer, read_rollouts

ASK = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "What is 2+2?"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
TURNS = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "It is 4."},
]


def choice(message: dict[str, Any]) -> dict[str, Any]:
    """Make what `Choice.to_dict()` of the openai package returns."""
    return {"finish_reason": "stop", "index": 0, "logprobs": None, "message": message}


FILES = Path(__file__).parents[1] / "files" / "rollouts"
# By the tool: a rollout as it writes it. All are of the same conversation where they have messages.
ROLLOUTS: dict[str, dict[str, Any]] = {
    # as veRL 0.9.1 wrote it: `AgentLoopOutput.model_dump_json()`
    "veRL, agent loop": json.loads((FILES / "verl-0.9.1.jsonl").read_text().splitlines()[0]),
    # `trainer.rollout_data_dir` of veRL
    "veRL, rollout_data_dir": {"input": "user\n2+2?\n", "output": "4", "gts": "4", "score": 1.0, "step": 1},
    # `ProcessedOutputs` of verifiers 0.1, by row, and `TrainingSample` of prime-rl
    "verifiers, prime-rl": {
        "prompt_ids": [5, 6], "prompt_mask": [0, 0], "completion_ids": [7, 8, 9], "completion_mask": [1, 0, 1],
        "completion_logprobs": [-0.1, 0.0, -0.3], "reward": 1.0,
    },
    # results.jsonl of verifiers 0.1; prompt and completion of TRL's conversational datasets
    "verifiers, results": {"example_id": 0, "prompt": ASK, "completion": TURNS, "answer": "4", "reward": 1.0},
    "OpenAI": {"messages": ASK + TURNS, "tools": None, "reward": 1.0},
    "TRL, text": {"prompt": "The sky is", "completion": " blue.", "reward": 1.0},
    "ids and a mask": {"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1], "reward": 1.0},
    # `trajectory_to_dict` of ART
    "ART": {
        "reward": 1.0, "metrics": {}, "metadata": {}, "tools": None, "additional_histories": [], "logs": [],
        "messages_and_choices": [*ASK, choice(TURNS[0]), TURNS[1], choice(TURNS[2])],
    },
    # a .traj file of SWE-agent; the steps of "trajectory" are not messages
    "SWE-agent": {
        "trajectory": [{"response": "It is 4.", "thought": "", "action": "submit", "observation": "", "query": ASK}],
        "history": [
            {"role": "system", "content": "Use tools.", "agent": "main", "message_type": "system_prompt"},
            {"role": "user", "content": [{"type": "text", "text": "What is 2+2?"}], "agent": "main"},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "agent": "main", "thought": ""},
            {"role": "tool", "content": "4", "tool_call_ids": ["call_1"], "agent": "main"},
            {"role": "assistant", "content": "It is 4.", "agent": "main"},
        ],
        "info": {"exit_status": "submitted"},
    },
    # SWE-rebench's trajectories of OpenHands
    "messages as trajectory": {"trajectory": ASK + TURNS, "instance_id": "a__b-1", "reward": 1.0},
}  # fmt: skip
CONVERSATIONS = ["verifiers, results", "OpenAI", "ART", "SWE-agent", "messages as trajectory"]


def read(path: Path, *lines: Any, rewards: bool = True) -> Rollouts:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_rollouts(path, ByteTokenizer(), 320, rewards)


@pytest.mark.parametrize("tool", ROLLOUTS)
def test_rollouts_of_tools(tmp_path: Path, tool: str) -> None:
    """Two rollouts of one prompt, on two lines, are one group."""
    rewarded = {"reward", "score", "reward_score"} & {*ROLLOUTS[tool]}
    found = read(tmp_path / "rollouts.jsonl", ROLLOUTS[tool], ROLLOUTS[tool], rewards=bool(rewarded))
    assert found.group_sizes == [2]
    assert found.rewards == [[1.0, 1.0] if rewarded else [0.0, 0.0]]
    assert found.masks is not None
    (prompt,), (response, again), (mask, _) = found.prompts, found.responses[0], found.masks[0]
    assert response.tolist() == again.tolist()
    assert bool(mask[0])
    if "prompt_ids" in ROLLOUTS[tool]:
        assert (prompt.tolist(), response.tolist(), mask.tolist()) == ([5, 6], [7, 8, 9], [True, False, True])
    if tool in CONVERSATIONS:
        text = ByteTokenizer().decode([t for t, own in zip(response.tolist(), mask.tolist(), strict=True) if own])
        assert text == json.dumps([CALL]) + "\n" + "It is 4.\n"
        asked = "<system>\nUse tools.\n<user>\nWhat is 2+2?\n<assistant>\n"
        assert ByteTokenizer().decode(prompt.tolist()) == asked
    shared = trees.read(tmp_path / "rollouts.jsonl", ByteTokenizer())
    assert shared.trained == 2 * int(mask.sum())
    assert shared.unit == ("tokens" if {"prompt_ids", "input_ids"} & {*ROLLOUTS[tool]} else "bytes")


def test_groups_of_art(tmp_path: Path) -> None:
    """`TrajectoryGroup` a line; a choice is trained, an assistant's message that is none is not."""
    shown = {"role": "assistant", "content": "An example."}
    one = ROLLOUTS["ART"] | {"messages_and_choices": [*ASK, shown, ASK[1], choice(TURNS[2])]}
    found = read(tmp_path / "art.jsonl", {"trajectories": [one, one | {"reward": 0}]})
    assert found.rewards == [[1.0, 0.0]]
    assert ByteTokenizer().decode(found.responses[0][0].tolist()) == "It is 4.\n"


def test_traces_of_verifiers() -> None:
    """A file that verifiers 0.4.0 wrote (`write_episode`). A trace is a tree of messages; a judge's trains nothing."""
    path = FILES / "verifiers-0.4.0.jsonl"
    found = read_rollouts(path, ByteTokenizer(), 320)
    assert found.rewards == [[1.5, 1.5, 1.0], [1.5]]
    assert found.masks is not None
    assert found.prompts[0].tolist() == [5, 6, 7, 8, 9]
    assert [r.tolist() for r in found.responses[0]] == [
        [10, 11, 12, 9, 13, 14],
        [10, 11, 15, 16, 9, 17],
        [18],
    ]
    assert [[int(m) for m in mask] for mask in found.masks[0]] == [[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 1], [1]]
    whole = ByteTokenizer().decode([*found.prompts[1].tolist(), *found.responses[1][0].tolist()])  # without tokens
    assert f"<assistant>\n{json.dumps([CALL])}\n<tool>\n4\n<assistant>\nIt is 4.\n" in whole
    assert trees.read(path, ByteTokenizer()).trained == 4 + 3 + 1 + int(found.masks[1][0].sum())
    nodes = [{"message": ASK[1], "token_ids": [5], "mask": [False]}]
    nodes += [{"parent": 0, "message": TURNS[2], "token_ids": [6], "mask": [True]} for _ in range(3)]
    nodes[1]["semantic_parents"] = [{"type": "compaction_attempt", "node": 0}]
    nodes[2]["semantic_parents"] = [{"type": "compaction_attempt", "node": 0}]
    nodes[3]["semantic_parents"] = [{"type": "compaction", "node": 2}]
    assert len(samples({"traces": [{"nodes": nodes}]}, ByteTokenizer())) == 2, "an attempt that was not resumed is none"
    assert samples({"traces": []}, ByteTokenizer()) == []
    with pytest.raises(ValueError, match=re.escape("'parent' of nodes[0] is 0, expected an earlier node")):
        samples({"traces": [{"nodes": [nodes[1]]}]}, ByteTokenizer())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"agent": "judge"}, "'agent' must be an object, got text"),
        ({"rewards": [1.0]}, "'rewards' must be an object, got a list"),
        ({"rewards": {"right": {"score": 1.0, "weight": None}}}, "'weight' is null, expected a finite number"),
        ({"rewards": {"right": {"score": 1.0, "weight": math.nan}}}, "'weight' is NaN, expected a finite number"),
        ({"nodes": [{"message": ASK[1], "semantic_parents": ["a"]}]}, "'semantic_parents' must be a list of"),
        ({"nodes": [{"message": ASK[1], "tools": "adding"}]}, "'tools' is 'adding', expected a list, or one as JSON"),
    ],
)
def test_bad_traces(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        samples({"traces": [{"nodes": [{"message": ASK[1]}]} | changes]}, ByteTokenizer())


def test_tools_are_read_alike_in_every_form() -> None:
    """JSON in a string, in a conversation and in a prompt with its completion, is the list that it stands for."""
    tools = [{"type": "function", "function": {"name": "add"}}]
    forms = {"messages": [*ASK, TURNS[2]]}, {"prompt": ASK, "completion": [TURNS[2]]}
    found = [samples(form | {"tools": x}, ByteTokenizer()) for form in forms for x in (tools, json.dumps(tools))]
    assert found == [found[0]] * 4


def test_a_trajectory_of_mini_swe_agent() -> None:
    """A folder with a file that mini-SWE-agent 2.4.6 wrote (`DefaultAgent.save`), whose last message is no message."""
    found = read_rollouts(FILES, ByteTokenizer(), 320, rewards=False)
    assert found.masks is not None
    (prompt,), ((response,),), ((mask,),) = found.prompts, found.responses, found.masks
    assert ByteTokenizer().decode(prompt.tolist()) == "<system>\nUse tools.\n<user>\nWhat is 2+2?\n<assistant>\n"
    written = ByteTokenizer().decode(response.tolist())
    assert "<tool>\n<returncode>0</returncode>\n" in written
    assert "exit" not in written
    own = ByteTokenizer().decode([t for t, m in zip(response.tolist(), mask.tolist(), strict=True) if m])
    assert "It is 4." in own
    assert "returncode" not in own


def test_completions_are_responses(tmp_path: Path) -> None:
    found = read(tmp_path / "a.jsonl", {"prompt": "hi", "completions": ["a", "bc"], "rewards": [0, 1]})
    assert [r.tolist() for r in found.responses[0]] == [[97], [98, 99]]


def test_files_that_are_compressed_or_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = json.dumps(ROLLOUTS["OpenAI"]).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(line * 2))
    pretty = json.dumps(ROLLOUTS["SWE-agent"], indent=2)
    for folder in ("a", "b"):
        (tmp_path / "runs" / folder).mkdir(parents=True)
        (tmp_path / "runs" / folder / f"{folder}.traj").write_text(pretty)
    (tmp_path / "all.json").write_text(json.dumps([ROLLOUTS["ART"]] * 2))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(line * 2)))
    for name in (str(tmp_path / "a.jsonl.gz"), str(tmp_path / "runs"), str(tmp_path / "all.json"), "-"):
        assert read_rollouts(name, ByteTokenizer(), 320, rewards=False).group_sizes == [2], name


def test_a_folder_is_read_in_the_order_of_its_steps(tmp_path: Path) -> None:
    """veRL's `rollout_data_dir` has a file for each step, named by its number."""
    for step in (10, 9, 2):
        (tmp_path / f"{step}.jsonl").write_text(json.dumps({"input": f"{step}", "output": "a", "score": step}) + "\n")
    assert read_rollouts(tmp_path, ByteTokenizer(), 320).rewards == [[2.0], [9.0], [10.0]]
    (tmp_path / "9.jsonl").write_text('{"input": "9"}')
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path / '9.jsonl'}:1: expected 'sequences', 'prompt'")):
        read_rollouts(tmp_path, ByteTokenizer(), 320)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no \.traj and no \.jsonl files in this folder, expected some"):
        read_rollouts(tmp_path / "empty", ByteTokenizer(), 320)
    for step in (10, 9, 2):
        (tmp_path / f"{step}.jsonl").write_text('{"input": "ab", "output": "c"}\n{"input": "ab", "output": "d"}\n')
    # 2 + 1 + 1 tokens in each step: no step shares with another one.
    assert trees.read(tmp_path, ByteTokenizer()).shared.tokens == 3 * 4


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """The line of the file is named, also behind blank lines; and a compressed file that was cut."""
    whole = gzip.compress(json.dumps(ROLLOUTS["OpenAI"]).encode() * 50)
    for name, data, says in (
        ("a.json", b'   \n\n{"input":\n "a\xff"}', "a.json:4: not UTF-8 (byte 3 of the line)"),
        ("a.jsonl", b'\n{"input": "\xff"}', "a.jsonl:2: not UTF-8 (byte 11 of the line)"),
        ("a.jsonl.gz", whole[:-20], "a.jsonl.gz: not a whole file of gzip ("),
        ("a.json.gz", b"{}", "a.json.gz: not a whole file of gzip ("),
        ("a.jsonl", '{"input": "a"}\n'.encode("utf-16"), "a.jsonl:1: not UTF-8 but UTF-16"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}"[: -len(name)] + says)):
            read_rollouts(tmp_path / name, ByteTokenizer(), 320)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.traj", '{\n  "history": [\n}', "a.traj:3: not valid JSON (Expecting value at column 1)"),
        ("a.jsonl", '{\n "history": 1,,\n}', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"input": "a", "input": "b"}', ":1: an object has the key 'input' more than once, expected it"),
        ("a.json", "[3]", "a.json[0]: expected a JSON object, got a number"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": 5}]}', ":1: 'content' of messages[0] must be text"),
        ("a.jsonl", '{"messages": [{"role": "user"}, "b"]}', "messages[1] must be a message with a 'role', got text"),
        ("a.jsonl", '{"prompt_ids": [1], "completion_ids": [2], "completion_mask": [1, 1]}', "a list of 1 values"),
        ("a.jsonl", '{"prompt_ids": [1], "completion_ids": [true]}', "completion_ids[0] is true, expected a token id"),
        ("a.jsonl", '{"input": "a", "output": "b"}', "'reward' (or 'score') is missing"),
        ("a.jsonl", '{"input": "a", "output": "b", "score": "high"}', "'score' is \"high\", expected a finite number"),
        ("a.jsonl", '{"input_ids": [1, 2], "reward": 1}', "which tokens count is not known"),
        ("a.jsonl", '{"input_ids": [1, 2], "loss_mask": [1, 1], "reward": 1}', "expected a prompt before it"),
        ("a.jsonl", '{"prompt_ids": [1], "completion_ids": [2], "loss_mask": [0]}', "'loss_mask' is not read"),
        ("a.jsonl", '{"prompt": [1], "responses": [[2]], "rewards": [1], "loss_masks": [[0]]}', "beside 'responses'"),
        ("a.jsonl", '{"messages": [{"role": "user", "tool_calls": "x"}]}', "'tool_calls' of messages[0] is 'x'"),
        ("a.jsonl", '{"question": "a"}', "expected 'sequences', 'prompt' with"),
        ("a.jsonl", f'{{"prompt": [{"9" * 5000}]}}', ":1: Exceeds the limit"),
        ("a.jsonl", "[" * 100_000, ":1: lists or objects are nested too deep"),
        ("a.json", '{"input": "a"}\n{"input": "b"}', "a.json:2: not valid JSON (Extra data at column 1); if each line"),
        ("a.jsonl", '{"messages": []}', "'messages' must be a list of at least one message with a 'role', got []"),
        ("a.jsonl", '{"prompt": [{"role": "user"}], "completion": "b", "reward": 1}', "prompt[0] is an object"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        read_rollouts(tmp_path / name, ByteTokenizer(), 320)
    assert str(caught.value).startswith(str(tmp_path / name))


USER = {"role": "user", "content": "b"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"messages": [USER], "responses": ["a"]}, "'responses' is not read beside 'messages'"),
        ({"messages": [USER], "completion": "a"}, "'completion' is not read beside 'messages'"),
        ({"messages": [USER, *TURNS], "system": "Use tools."}, "'system' is not read beside 'messages'"),
        ({"prompt": "b", "completion": "a", "system_prompt": "c"}, "'system_prompt' is not read beside 'prompt'"),
        ({"prompt": "b", "responses": ["a"], "system": "c"}, "'system' is not read beside 'prompt'"),
        ({"instruction": "c", "input": "b", "output": "a"}, "'instruction' is not read beside 'input'"),
        ({"sequences": [[1, 2]], "prompt": "b"}, "'sequences' and 'prompt' are both given, expected one of them"),
        ({"prompt": "b", "input": "c", "output": "a"}, "'prompt' and 'input' are both given, expected one of them"),
        ({"prompt": "b", "completion": "c", "output": "a"}, "'completion' and 'output' are both given"),
        ({"input_ids": [0, 0, 5], "attention_mask": [0, 0, 1]}, "'attention_mask' has 0"),
        ({"prompt_ids": [0, 5], "attention_mask": [0, 1, 1], "completion_ids": [6]}, "'attention_mask' has 0"),
    ],
)
def test_parts_that_would_not_count_are_refused(line: dict[str, Any], says: str) -> None:
    """A part of a rollout under a key that is not read, and padding, would make every figure wrong."""
    with pytest.raises(ValueError, match=re.escape(says)):
        samples(line, ByteTokenizer())


def test_what_stays_beside_rollouts() -> None:
    """A text of these names may also be no part of a rollout."""
    for line in (
        {"messages": [*ASK, *TURNS], "system": "Use tools.", "completion": "It is 4."},
        {"messages": [*ASK, *TURNS[:2]], "output": "cut off", "attention_mask": None},
        {"input_ids": [5, 6], "attention_mask": [1, 1], "instruction": "Add."},
    ):
        assert samples(line, ByteTokenizer())


def test_bytes_of_messages_have_all_that_the_policy_wrote() -> None:
    """Reasoning and calls of the older form count as text and calls do."""
    plain = len(ByteTokenizer().render([{"role": "assistant", "content": "a"}]))
    for name in ("reasoning", "reasoning_content", "function_call"):
        line = {"messages": [{"role": "assistant", "content": "a", name: "thought"}]}
        assert len(samples(line, ByteTokenizer())[0].tokens) >= plain + len("thought"), name


TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' and not loop.last and DROPS %}-{% endif %}"
    "{{ m.content }} end {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def test_chat_templates(tmp_path: Path) -> None:
    """The template says which tokens a reply has. One that writes earlier replies otherwise leaves the mask unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "user", "assistant", "end", "hello", "world", "-"]
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": ["hello", "world"][i % 2]} for i in range(4)]
    rollout = {"messages": messages, "reward": 1}
    for drops in ("false", "true"):
        made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
        made.chat_template = TEMPLATE.replace("DROPS", drops)
        made.save_pretrained(tmp_path / drops)
        (one,) = samples(rollout, load_tokenizer(tmp_path / drops))
        if drops == "true":
            assert one.mask is None
            continue
        assert one.tokens == [1, 4, 3, 2, 5, 3] * 2
        assert one.mask == [0, 0, 0, 0, 1, 1] * 2
    made.chat_template = None
    made.save_pretrained(tmp_path / "none")
    (tmp_path / "none" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="the tokenizer's chat template: "):
        samples(rollout, load_tokenizer(tmp_path / "none"))
