"""Forms of rollouts in files, as tools write them: an object of JSON is one rollout or several.

:func:`samples` knows the forms by their keys. Several rollouts of one prompt: whole sequences with masks, a prompt with
responses. Token ids with masks: veRL's agent loop, verifiers, prime-rl. Text: veRL's `rollout_data_dir`, prompts with
completions. Messages: OpenAI's, TRL's, ART's, SWE-agent's. Trees of ids or messages: verifiers' traces.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from dualkv.tokens import MAX_TOKEN

Message = dict[str, Any]
BYTES = "text without --tokenizer: bytes are counted, not tokens"
POLICY = ("assistant", "ai", "model")  # roles of messages that the policy wrote
MESSAGES = ("messages", "messages_and_choices", "history", "trajectory")  # keys of a whole conversation
SYSTEM = ("system", "system_prompt")  # keys of text before a conversation, which other tools read
ANSWERS = ("responses", "completions", "response", "completion", "output", "choices")
# A line has one key of each row: the others would be left out.
ONE_OF = ("sequences", "prompt"), ("prompt", "input"), ("responses", "completions"), ("completion", "output")
FORMS = (
    "'sequences', 'prompt' with 'responses', 'completions' or 'completion', 'prompt_ids', 'input_ids', 'input' and"
    f" 'output', {', '.join(map(repr, MESSAGES))}, 'trajectories' or 'traces'"
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


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8, and 256 ends a text. Needs no files."""

    vocab_size = 257
    eos_id: int | None = 256
    used = False  # whether text was encoded, so that what is counted are bytes

    def encode(self, text: str) -> list[int]:
        self.used = True
        return list(text.encode("utf-8", errors="surrogatepass"))  # JSON can carry half of a surrogate pair

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids. Invalid UTF-8 becomes U+FFFD; the end of text is skipped."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def render(self, messages: list[Message], tools: Any = None, reply: bool = False) -> list[int]:
        """A line with the role and one with reasoning, text and tool calls, for each message."""
        lines = [json.dumps(tools)] if tools else []
        for message in messages:
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            calls = message.get("tool_calls") or message.get("function_call")
            texts = [thought if isinstance(thought, str) else json.dumps(thought), message["content"]]
            lines += [f"<{message['role']}>", "".join(texts) + (json.dumps(calls) if calls else "")]
        return self.encode("".join(f"{line}\n" for line in lines + ["<assistant>"] * reply))


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


class Group(NamedTuple):
    """Rollouts of one prompt.

    Attributes:
        prompt: token ids, at least one.
        responses: token ids of each; may be empty.
        rewards: one a response.
        masks: 1 for tokens of responses that count; None: all do.
    """

    prompt: list[int]
    responses: list[list[int]]
    rewards: list[float]
    masks: list[list[int]] | None


# ---------------------------------------------------------------- rollouts
def samples(data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int | None = None) -> list[Sample]:
    """The rollouts of an object: one rollout, several of one prompt, ART's group, or verifiers' traces of an episode.

    Args:
        data: of :func:`dualkv.data.files.objects`.
        tokenizer: for text and messages.
        vocab_size: token ids must be below it; None: they must be ones that packing takes.

    Raises:
        ValueError: a form that is not known, or wrong values; the message names the key.
    """
    if "trajectories" in data:
        return [s for each in _list(data, "trajectories") for s in samples(each, tokenizer, vocab_size)]
    if "traces" in data:
        traces = _list(data, "traces") if data["traces"] else []  # none of an episode that failed
        trained = [x for x in traces if x.get("nodes") and _inner(x, "agent").get("trainable", True)]
        return [s for each in trained for s in _trace(each, tokenizer, vocab_size)]
    _refuse_two_of(data, *ONE_OF)
    if "sequences" in data:
        return _whole_sequences(data, tokenizer, vocab_size)
    of = next((key for key in ("responses", "completions") if key in data), None)
    if of is not None and "prompt" in data:
        return _answers(data, of, tokenizer, vocab_size)
    return [_single(data, tokenizer, vocab_size)]


def _whole_sequences(data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int | None) -> list[Sample]:
    listed, masks = _full(data, "sequences"), data.get("loss_masks")
    for i, ids in enumerate(listed):
        if masks is not None and not isinstance(ids, list):
            raise ValueError(f"'sequences[{i}]' must be a list of token ids, got {kind(ids)}")
    rows = [_text_or_ids(f"sequences[{i}]", ids, tokenizer, vocab_size) for i, ids in enumerate(listed)]
    if not all(rows):
        raise ValueError(f"sequences[{rows.index([])}] is empty, expected at least one token")
    rewards = _rewards(data, "sequences", len(rows))
    return list(map(Sample, rows, [None] * len(rows) if masks is None else _masks(masks, rows), rewards))


def _answers(data: dict[str, Any], of: str, tokenizer: Tokenizer, vocab_size: int | None) -> list[Sample]:
    """The rollouts of a prompt whose answers are the entries of `data[of]`."""
    _refuse_masks(data, of)
    first = _prompt(data, "prompt", tokenizer, vocab_size)
    answers = [_text_or_ids(f"{of}[{i}]", x, tokenizer, vocab_size) for i, x in enumerate(_full(data, of))]
    rewards = _rewards(data, of, len(answers))
    return [
        Sample(first + ids, [0] * len(first) + [1] * len(ids), reward)
        for ids, reward in zip(answers, rewards, strict=True)
    ]


def _single(data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int | None) -> Sample:
    reward = _reward(data)
    prompt = next((key for key in ("prompt_ids", "input", "prompt") if key in data), None)
    if (whole := next((key for key in MESSAGES if key in data and _are_messages(data[key])), None)) is not None:
        if isinstance(end := data[whole][-1], dict) and end.get("role") == "exit":  # mini-SWE-agent's mark of the end
            data = {**data, whole: data[whole][:-1]}
        messages = [_message(f"{whole}[{i}]", each) for i, each in enumerate(data[whole])]
        # ART trains choices. In its Parquet they are marked.
        chosen = [isinstance(each.get("message"), dict) or each.get("trainable") is True for each in data[whole]]
        own = chosen if any(chosen) else [m["role"] in POLICY for m in messages]
        if (
            messages[-1]["role"] not in (*POLICY, "tool")
            and (answer := next((key for key in ANSWERS if data.get(key)), None)) is not None
        ):
            raise ValueError(
                f"{answer!r} is not read beside {whole!r}, which ends with a message of"
                f" {messages[-1]['role']!r}, expected the answer as the last message, or messages as 'prompt' and"
                " 'completion'"
            )
        if messages[0]["role"] not in ("system", "developer"):
            _refuse_texts(data, whole, SYSTEM)
        return _conversation(messages, own, data.get("tools"), tokenizer, vocab_size, reward)
    if "input_ids" in data:
        _refuse_padding(data)
        ids = check_ids("input_ids", data["input_ids"], vocab_size)
        return Sample(ids, _mask(data, ("loss_mask", "assistant_masks"), len(ids)), reward)
    answers = [key for key in ("completion_ids", "response_ids", "completion", "output") if key in data]
    if prompt is None or not answers:
        if (key := MESSAGES[0]) in data:
            came = reprlib.repr(data[key])
            raise ValueError(f"{key!r} must be a list of at least one message with a 'role', got {came}")
        raise ValueError(f"expected {FORMS}, found {sorted(data)}")
    answer = answers[0]
    if _are_messages(data[prompt]) and _are_messages(data[answer]):
        both = [_message(f"{key}[{i}]", m) for key in (prompt, answer) for i, m in enumerate(data[key])]
        own = [i >= len(data[prompt]) and m["role"] in POLICY for i, m in enumerate(both)]
        return _conversation(both, own, data.get("tools"), tokenizer, vocab_size, reward)
    first = _prompt(data, prompt, tokenizer, vocab_size)
    then = _text_or_ids(answer, data[answer], tokenizer, vocab_size)
    mask = _mask(data, ("completion_mask", "response_mask"), len(then))
    if mask is None:
        _refuse_masks(data, answer)
    return Sample(first + then, [0] * len(first) + (mask or [1] * len(then)), reward)


def _prompt(data: dict[str, Any], key: str, tokenizer: Tokenizer, vocab_size: int | None) -> list[int]:
    """The token ids of a prompt, which has no padding and all of its text."""
    _refuse_padding(data)
    if isinstance(data[key], str):
        _refuse_texts(data, key, (*SYSTEM, "instruction"))
    ids = _text_or_ids(key, data[key], tokenizer, vocab_size)
    if not ids:
        raise ValueError(f"{key!r} is empty, expected at least one token")
    return ids


def _trace(data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int | None) -> list[Sample]:
    """The branches of a trace: its nodes are messages with the tokens that each adds behind its parent's.

    Attempts to compact the history that the agent did not go on from are none of its training samples.
    """
    nodes, scores = _list(data, "nodes"), [x for x in _inner(data, "rewards").values() if isinstance(x, dict)]
    of_scores = (_number("'score'", x.get("score")) * _number("'weight'", x.get("weight", 1.0)) for x in scores)
    reward = sum(of_scores) if scores else None
    of_nodes = (_list(node, "semantic_parents") if node.get("semantic_parents") else () for node in nodes)
    links = [[(x.get("type"), x.get("node")) for x in above] for above in of_nodes]
    parents: list[int | None] = [node.get("parent") for node in nodes]
    for i, up in enumerate(parents):
        if up is not None and not (isinstance(up, int) and 0 <= up < i):
            raise ValueError(f"'parent' of nodes[{i}] is {json.dumps(up)}, expected an earlier node")
    resumed = {at for of in links for kind, at in of if kind == "compaction"}
    attempts = {i for i, of in enumerate(links) if any(kind == "compaction_attempt" for kind, _ in of)}
    ends = [i for i in range(len(nodes)) if i not in parents and i not in attempts - resumed]
    found: list[Sample] = []
    for end in ends:
        path = [end]
        while (up := parents[path[0]]) is not None:
            path.insert(0, up)
        if any(nodes[i].get("token_ids") for i in path):
            ids = [check_ids(f"token_ids of nodes[{i}]", nodes[i].get("token_ids") or [], vocab_size) for i in path]
            masks = [_mask(nodes[i], ("mask",), len(x)) or [0] * len(x) for i, x in zip(path, ids, strict=True)]
            found.append(Sample([t for x in ids for t in x], [m for mask in masks for m in mask], reward))
            continue
        messages = [_message(f"nodes[{i}]", nodes[i]) for i in path]
        own = [bool(nodes[i].get("sampled")) for i in path]
        found.append(_conversation(messages, own, nodes[path[0]].get("tools"), tokenizer, vocab_size, reward))
    return found


def _parsed(name: str, value: Any) -> Any:
    """The value of a field that is JSON in a string in ART's Parquet and in some datasets of TRL."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        raise ValueError(f"{name} is {reprlib.repr(value)}, expected a list, or one as JSON") from None


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
    tools = _parsed("'tools'", tools)
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
    message = {**{key: x for key, x in inner.items() if x is not None}, "content": content or ""}
    calls = _parsed(f"'tool_calls' of {name}", message.get("tool_calls"))
    if isinstance(calls, list):  # verifiers' calls are flat
        flat = ("name", "arguments")
        message["tool_calls"] = [
            {**{key: x for key, x in call.items() if key not in flat}, "function": {key: call.get(key) for key in flat}}
            if isinstance(call, dict) and "function" not in call
            else call
            for call in calls
        ]
    return message


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(each, dict) and ({"role", "message"} & {*each}) for each in value)


def _inner(data: dict[str, Any], name: str) -> dict[str, Any]:
    """An object in a field; empty where there is none."""
    found = data.get(name) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{name!r} must be an object, got {kind(found)}")
    return found


def _full(data: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(data[name], list):
        raise ValueError(f"{name!r} must be a list, got {kind(data[name])}")
    if not data[name]:
        raise ValueError(f"{name!r} is empty, expected at least one {name.removesuffix('s')}")
    return list(data[name])


def _list(data: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if not isinstance(data[name], list) or not data[name] or not all(isinstance(each, dict) for each in data[name]):
        raise ValueError(f"{name!r} must be a list of at least one object")
    return list(data[name])


def _reward(data: dict[str, Any]) -> float | None:
    name = next((key for key in ("reward", "score", "reward_score") if data.get(key) is not None), None)
    return None if name is None else _number(repr(name), data[name])


def _rewards(data: dict[str, Any], of: str, count: int) -> list[float | None]:
    """One reward for each of `count` entries of `data[of]`; None where the file has none."""
    if data.get("rewards") is None:
        return [None] * count
    rewards = _full(data, "rewards")
    if len(rewards) != count:
        raise ValueError(f"{len(rewards)} rewards for {count} {of}, expected one a {of.removesuffix('s')}")
    return [_number(f"rewards[{i}]", reward) for i, reward in enumerate(rewards)]


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {json.dumps(value)}, expected a finite number")
    return float(value)


def _mask(data: dict[str, Any], names: Sequence[str], tokens: int) -> list[int] | None:
    name = next((key for key in names if data.get(key) is not None), None)
    return None if name is None else _zeros_and_ones(name, data[name], tokens)


def _masks(masks: Any, listed: list[list[int]]) -> list[list[int]]:
    """The masks of some sequences, one each."""
    if not isinstance(masks, list) or len(masks) != len(listed):
        found = f"{len(masks)} masks" if isinstance(masks, list) else kind(masks)
        raise ValueError(f"'loss_masks' must be a list of {len(listed)} masks, one a sequence, got {found}")
    return [
        _zeros_and_ones(f"loss_masks[{i}]", *each) for i, each in enumerate(zip(masks, map(len, listed), strict=True))
    ]


def _zeros_and_ones(name: str, mask: Any, tokens: int) -> list[int]:
    if not isinstance(mask, list) or len(mask) != tokens or any(m not in (0, 1) for m in mask):
        raise ValueError(f"{name!r} must be a list of {tokens} values 0 or 1, one a token")
    return [int(m) for m in mask]


def _refuse_two_of(data: dict[str, Any], *rows: tuple[str, ...]) -> None:
    """Raise ValueError for keys of a row of which only one would be read."""
    for row in rows:
        given = [key for key in row if data.get(key) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]!r} and {given[1]!r} are both given, expected one of them")


def _refuse_masks(data: dict[str, Any], answer: str) -> None:
    """Raise ValueError for a mask under a name that is not read beside an answer: all of its tokens would count."""
    for key, value in data.items():
        if value is not None and key.endswith(("_mask", "_masks")) and key not in ("prompt_mask", "attention_mask"):
            raise ValueError(
                f"{key!r} is not read beside {answer!r}, expected 'completion_mask' or 'response_mask' of one answer,"
                " or 'sequences' with 'loss_masks'"
            )


def _refuse_padding(data: dict[str, Any]) -> None:
    """Raise ValueError for token ids with padding: it would count as tokens."""
    if isinstance(mask := data.get("attention_mask"), list) and 0 in mask:
        raise ValueError("'attention_mask' has 0, expected token ids without padding, and a mask of ones or none")


def _refuse_texts(data: dict[str, Any], beside: str, names: Sequence[str]) -> None:
    """Raise ValueError for text that belongs before a prompt or a conversation: it would not count."""
    for key in names:
        if isinstance(data.get(key), str) and data[key]:
            raise ValueError(f"{key!r} is not read beside {beside!r}, expected all text of the prompt in {beside!r}")


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
            came = kind(token) if isinstance(token, dict | list) else json.dumps(token)[:80]
            of_messages = "; messages are read as 'messages', or as 'prompt' and 'completion'" * isinstance(token, dict)
            raise ValueError(f"{name}[{i}] is {came}, expected a token id{of_messages}")
        if not 0 <= token <= most:
            of_model = "" if vocab_size is None else f", outside the model's vocabulary of {vocab_size}"
            raise ValueError(f"{name}[{i}] is token {token}{of_model}, expected a token id from 0 to {most}")
    return ids


def kind(value: Any) -> str:
    """Name the kind of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# ---------------------------------------------------------------- rollouts of one prompt
def group_or_samples(
    data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int | None = None, rewards: bool = True
) -> Group | list[Sample]:
    """An object of a group, or the rollouts of another one: see :func:`dualkv.data.rollouts.read_rollouts`.

    Raises:
        ValueError: a form that is not known, or wrong values; the message names the key.
    """
    is_group = not {"sequences", "responses", "completions", "rewards"}.isdisjoint(data)
    if is_group:
        of = next((key for key in ("sequences", "completions") if key in data), "responses")
        for key in ("sequences", "loss_masks") if of == "sequences" else ("prompt", of):
            if key not in data:
                raise ValueError(f"{key!r} is missing, found {sorted(data)}")
        if rewards and "rewards" not in data:
            raise ValueError(f"'rewards' is missing, found {sorted(data)}")
    found = samples(data, tokenizer, vocab_size)
    for i, sample in enumerate(found):
        if sample.mask is None:
            raise ValueError(
                "which tokens count is not known, expected a mask of them, or a chat template that writes earlier"
                " messages as it writes last ones"
            )
        if sample.reward is None and rewards:
            raise ValueError("'reward' (or 'score') is missing")
        if not sample.mask or sample.mask[0]:
            first = f"sequences[{i}] begins with a token that counts" if is_group else "the first token counts"
            raise ValueError(f"{first}, expected a prompt before it")
    return _group(found, "sequences" in data) if is_group else found


def _group(found: list[Sample], has_masks: bool) -> Group:
    """The group of some rollouts, divided into the prompt that they share and their responses."""
    masks = [sample.mask or [] for sample in found]
    prompt = found[0].tokens[: min(mask.index(1) if 1 in mask else len(mask) for mask in masks)]
    for i, sample in enumerate(found):
        if sample.tokens[: len(prompt)] != prompt:
            pairs = zip(prompt, sample.tokens, strict=False)
            prompt = prompt[: next((at for at, (a, b) in enumerate(pairs) if a != b), len(sample.tokens))]
        if not prompt:
            raise ValueError(f"sequences[0] and sequences[{i}] differ in their first token, expected one prompt")
    cut = len(prompt)
    responses, rewards = [sample.tokens[cut:] for sample in found], [sample.reward or 0.0 for sample in found]
    return Group(prompt, responses, rewards, [mask[cut:] for mask in masks] if has_masks else None)


# ---------------------------------------------------------------- trees of lengths
def segments(data: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The lengths of a tree's segments, and the segment that each one continues.

    Raises:
        ValueError: no such lists; the message names the key.
    """
    _refuse_two_of(data, ("lengths", "sequences", "prompt"))
    if "parent" not in data:
        raise ValueError(f"'parent' is missing, found {sorted(data)}")
    for name in ("lengths", "parent"):
        if not isinstance(data[name], list) or not all(type(n) is int for n in data[name]):
            raise ValueError(f"{name!r} must be a list of integers, one a segment")
    lengths, parent = data["lengths"], data["parent"]
    if not lengths:
        raise ValueError("'lengths' is empty, expected at least one segment")
    if min(lengths) < 1:
        raise ValueError(f"'lengths' has {min(lengths)}, expected at least 1 token a segment")
    if len(parent) != len(lengths):
        raise ValueError(f"'parent' has {len(parent)} entries for {len(lengths)} segments in 'lengths'")
    for i, up in enumerate(parent):
        if not -1 <= up < i:
            raise ValueError(f"parent[{i}] is {up}, expected an earlier segment, or -1 for a prompt")
    return lengths, parent


def samples_or_segments(data: dict[str, Any], tokenizer: Tokenizer) -> object:
    """An object as `dualkv trees` takes it."""
    return segments(data) if "lengths" in data else samples(data, tokenizer)
