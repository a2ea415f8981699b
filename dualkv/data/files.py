"""Files of rollouts as tools write them: lines of JSON, one rollout or one group each, or one JSON document.

:func:`samples` knows forms of one rollout by their keys. Token ids with masks: veRL's agent loop, verifiers, prime-rl.
Text: veRL's `rollout_data_dir`, prompts with completions. Messages: OpenAI's, TRL's, ART's, SWE-agent's.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dualkv.prefixes import MAX_TOKEN

Message = dict[str, Any]
POLICY = ("assistant", "ai", "model")  # roles of messages that the policy wrote
MESSAGES = ("messages", "messages_and_choices", "history", "trajectory")  # keys of a whole conversation
FORMS = (
    "'sequences', 'prompt' with 'responses', 'completions' or 'completion', 'prompt_ids', 'input_ids', 'input' and"
    f" 'output', {', '.join(map(repr, MESSAGES))} or 'trajectories'"
)


class Tokenizer(Protocol):
    """The interface of a tokenizer in this module. `decode` takes ids below `vocab_size`."""

    vocab_size: int
    eos_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def render(self, messages: list[Message], tools: Any = None, reply: bool = False) -> list[int]:
        """Token ids of a conversation, with the beginning of the policy's next message if `reply` asks for it."""
        ...


class Sample(NamedTuple):
    """A rollout.

    Attributes:
        tokens: all of them, prompt included.
        mask: 1 for tokens that count, one a token; None: not known.
        reward: None: not in the file.
    """

    tokens: list[int]
    mask: list[int] | None
    reward: float | None


# ---------------------------------------------------------------- lines and documents
def objects(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with the place `file:line`.

    Args:
        path: JSON lines, whose blank lines are skipped; a JSON document, an object or a list of them (`.json`, `.traj`,
            or a first line that is a lone bracket); either of them compressed (`.gz`); `-` for standard input; a folder
            of `.traj` files, as SWE-agent leaves them.

    Raises:
        ValueError: not JSON, not UTF-8, or no object, as `file:line: message`; a folder without such files.
        OSError: a file that cannot be read.
    """
    if os.path.isdir(path):
        found = sorted(Path(path).rglob("*.traj"))
        if not found:
            raise ValueError(f"{path}: no .traj files in this folder")
        for each in found:
            yield from objects(each)
        return
    name = os.fspath(path)
    with ExitStack() as stack:
        opened = gzip.open if name.endswith(".gz") else open
        file = sys.stdin.buffer if name == "-" else stack.enter_context(opened(name, "rb"))
        document = name.removesuffix(".gz").endswith((".json", ".traj"))
        begins = True
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if document or (begins and line.strip() in (b"{", b"[")):
                yield from _document(name, b"\n" * (number - 1) + line + file.read())
                return
            begins = False
            try:
                yield f"{name}:{number}", of_line(line)
            except ValueError as error:
                raise ValueError(f"{name}:{number}: {error}") from None


def _document(name: str, text: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name}:{error.lineno}: not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 (byte {error.start})") from None
    several = isinstance(data, list)
    for i, each in enumerate(data if several else [data]):
        where = f"{name}[{i}]" if several else name
        if not isinstance(each, dict):
            raise ValueError(f"{where}: expected a JSON object, got {kind(each)}")
        yield where, each


def of_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        ValueError: not JSON, not UTF-8, or no object.
    """
    try:
        data = json.loads(line.rstrip(b"\r\n"))  # behind a line break columns begin anew
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start} of the line)") from None
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, got {kind(data)}")
    return data


# ---------------------------------------------------------------- rollouts
def samples(data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int | None = None) -> list[Sample]:
    """The rollouts of an object that has one rollout, or ART's group of them.

    Args:
        data: of :func:`objects`.
        tokenizer: for text and messages.
        vocab_size: token ids must be below it; None: they must be ones that packing takes.

    Raises:
        ValueError: a form that is not known, or wrong values; the message names the key.
    """
    if "trajectories" in data:
        return [s for each in _list(data, "trajectories") for s in samples(each, tokenizer, vocab_size)]
    reward = _reward(data)
    prompt = next((key for key in ("prompt_ids", "input", "prompt") if key in data), None)
    if (whole := next((key for key in MESSAGES if key in data and _are_messages(data[key])), None)) is not None:
        messages = [_message(f"{whole}[{i}]", each) for i, each in enumerate(data[whole])]
        chosen = [isinstance(each.get("message"), dict) for each in data[whole]]  # ART's choices, which are trained
        own = chosen if any(chosen) else [m["role"] in POLICY for m in messages]
        return [_conversation(messages, own, data.get("tools"), tokenizer, vocab_size, reward)]
    if "input_ids" in data:
        ids = check_ids("input_ids", data["input_ids"], vocab_size)
        return [Sample(ids, _mask(data, ("loss_mask", "assistant_masks"), len(ids)), reward)]
    answers = [key for key in ("completion_ids", "response_ids", "completion", "output") if key in data]
    if prompt is None or not answers:
        raise ValueError(f"expected {FORMS}, found {sorted(data)}")
    answer = answers[0]
    if _are_messages(data[prompt]) and _are_messages(data[answer]):
        both = [_message(f"{key}[{i}]", m) for key in (prompt, answer) for i, m in enumerate(data[key])]
        own = [i >= len(data[prompt]) and m["role"] in POLICY for i, m in enumerate(both)]
        return [_conversation(both, own, data.get("tools"), tokenizer, vocab_size, reward)]
    first, then = (_text_or_ids(key, data[key], tokenizer, vocab_size) for key in (prompt, answer))
    if not first:
        raise ValueError(f"{prompt!r} is empty, expected at least one token")
    mask = _mask(data, ("completion_mask", "response_mask"), len(then))
    return [Sample(first + then, [0] * len(first) + (mask or [1] * len(then)), reward)]


def _conversation(
    messages: list[Message],
    own: list[bool],
    tools: Any,
    tokenizer: Tokenizer,
    vocab_size: int | None,
    reward: float | None,
) -> Sample:
    """Token ids of a conversation, of which the tokens behind a reply's beginning count, up to the message's end.

    Some chat templates write earlier messages otherwise than last ones, without their reasoning for example. Then what
    counts is not known.
    """
    ids = check_ids("messages", tokenizer.render(messages, tools), vocab_size)
    mask: list[int] | None = [0] * len(ids)
    for i, trained in enumerate(own):
        if not trained or mask is None:
            continue
        begin, end = tokenizer.render(messages[:i], tools, reply=True), tokenizer.render(messages[: i + 1], tools)
        if ids[: len(begin)] != begin or ids[: len(end)] != end:
            mask = None
        else:
            mask[len(begin) : len(end)] = [1] * (len(end) - len(begin))
    return Sample(ids, mask, reward)


def _message(name: str, value: Any) -> Message:
    """A message of OpenAI's form, or that of a choice, with parts of text joined."""
    inner = value.get("message", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict) or not isinstance(inner.get("role"), str):
        raise ValueError(f"{name} must be a message with a 'role', got {kind(value)}")
    content = inner.get("content", inner.get("text"))
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(part for part in parts if isinstance(part, str))
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{name} has parts other than text, expected text")
    if content is not None and not isinstance(content, str):
        raise ValueError(f"'content' of {name} must be text, got {kind(content)}")
    return {**{key: x for key, x in inner.items() if x is not None}, "content": content or ""}


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) and ({"role", "message"} & {*each}) for each in value)


def _list(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if not isinstance(data[name], list) or not data[name] or not all(isinstance(each, dict) for each in data[name]):
        raise ValueError(f"{name!r} must be a list of at least one object")
    return list(data[name])


def _reward(data: dict[str, Any]) -> float | None:
    name = next((key for key in ("reward", "score", "reward_score") if data.get(key) is not None), None)
    if name is None:
        return None
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name!r} is {json.dumps(value)}, expected a finite number")
    return float(value)


def _mask(data: dict[str, Any], names: Sequence[str], tokens: int) -> list[int] | None:
    name = next((key for key in names if data.get(key) is not None), None)
    if name is None:
        return None
    mask = data[name]
    if not isinstance(mask, list) or len(mask) != tokens or any(m not in (0, 1) for m in mask):
        raise ValueError(f"{name!r} must be a list of {tokens} values 0 or 1, one a token")
    return [int(m) for m in mask]


def _text_or_ids(name: str, value: Any, tokenizer: Tokenizer, vocab_size: int | None) -> list[int]:
    return check_ids(name, tokenizer.encode(value) if isinstance(value, str) else value, vocab_size)


def check_ids(name: str, ids: Any, vocab_size: int | None) -> list[int]:
    """A list of token ids in the vocabulary; without one, of ids that packing takes.

    Raises:
        ValueError: others; the message begins with `name`.
    """
    if not isinstance(ids, list):
        raise ValueError(f"{name!r} must be text or a list of token ids, got {kind(ids)}")
    most = MAX_TOKEN if vocab_size is None else vocab_size - 1
    for i, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise ValueError(f"{name}[{i}] is {json.dumps(token)}, expected a token id")
        if not 0 <= token <= most:
            of_model = "" if vocab_size is None else f", outside the model's vocabulary of {vocab_size}"
            raise ValueError(f"{name}[{i}] is token {token}{of_model}, expected a token id from 0 to {most}")
    return ids


def kind(value: Any) -> str:
    """Name the kind of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
