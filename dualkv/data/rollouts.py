"""Rollouts (prompts, sampled responses, rewards) from a file, and prompts and a reward for live sampling."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codegen.packages import require
from dualkv.data.files import Message, Sample, Tokenizer, check_ids, kind, objects, samples
from dualkv.models import PACKAGED, pretrained


@dataclass(frozen=True)
class Rollouts:
    """G groups of responses to one prompt each.

    Attributes:
        prompts: G tensors [P_g] int64.
        responses: G lists of tensors [R_i] int64; a response may be empty, a list may not.
        rewards: G lists of floats, one a response.
        masks: G lists of tensors [R_i] bool: the response tokens that count, where an environment wrote parts of the
            responses; None: all tokens count.
        media: the images of each prompt, as :func:`dualkv.pack` takes them; None for text.
    """

    prompts: list[torch.Tensor]
    responses: list[list[torch.Tensor]]
    rewards: list[list[float]]
    masks: list[list[torch.Tensor]] | None = None
    media: list[dict[str, torch.Tensor]] | None = None

    @property
    def group_sizes(self) -> list[int]:
        return [len(group) for group in self.responses]

    @property
    def flat_responses(self) -> list[torch.Tensor]:
        """All responses, group 0's first."""
        return [response for group in self.responses for response in group]

    @property
    def flat_prompts(self) -> list[torch.Tensor]:
        """The prompt of every response."""
        return [prompt for prompt, n in zip(self.prompts, self.group_sizes, strict=True) for _ in range(n)]

    @property
    def flat_masks(self) -> list[torch.Tensor]:
        """The mask of every response."""
        if self.masks is None:
            return [torch.ones(len(response), dtype=torch.bool) for response in self.flat_responses]
        return [mask for group in self.masks for mask in group]

    @property
    def response_lens(self) -> list[int]:
        """Tokens of all responses, group 0's first."""
        return [len(response) for response in self.flat_responses]

    @property
    def trained_lens(self) -> list[int]:
        """The number of tokens that count, of all responses, group 0's first."""
        return [int(mask.sum()) for mask in self.flat_masks]

    @property
    def mean_reward(self) -> float:
        rewards = [reward for group in self.rewards for reward in group]
        return sum(rewards) / len(rewards)


class ByteTokenizer:
    """Token ids 0 to 255 are the bytes of UTF-8, and 256 ends a text. Needs no files.

    Attributes:
        used: whether text was encoded, so that what is counted are bytes.
    """

    vocab_size = 257
    eos_id: int | None = 256
    used = False

    def encode(self, text: str) -> list[int]:
        self.used = True
        return list(text.encode("utf-8", errors="surrogatepass"))  # JSON can carry half of a surrogate pair

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids. Invalid UTF-8 becomes U+FFFD; the end of text is skipped."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def render(self, messages: list[Message], tools: Any = None, reply: bool = False) -> list[int]:
        """A line with the role and one with the text and tool calls, for each message."""
        lines = [json.dumps(tools)] if tools else []
        for message in messages:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            lines += [f"<{message['role']}>", message["content"] + calls]
        return self.encode("".join(f"{line}\n" for line in lines + ["<assistant>"] * reply))


class LocalTokenizer:
    """A Hugging Face tokenizer from a local folder, or that of a GGUF file or a name in
    :data:`dualkv.models.PACKAGED`. Encoding adds no special tokens."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if os.fspath(path) not in PACKAGED and not Path(path).exists():
            raise ValueError(f"tokenizer {str(path)!r} is no local file or folder")
        require("transformers", "a Hugging Face tokenizer")
        from transformers import AutoConfig, AutoTokenizer

        where = pretrained(path)
        self._tokenizer = AutoTokenizer.from_pretrained(**where)
        self.vocab_size = len(self._tokenizer)
        # transformers does not take a tokenizer's end of text from a GGUF file, but a model's it does.
        of = AutoConfig.from_pretrained(**where) if "gguf_file" in where else self._tokenizer
        self.eos_id: int | None = of.eos_token_id

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def render(self, messages: list[Message], tools: Any = None, reply: bool = False) -> list[int]:
        """Apply the tokenizer's chat template; raises ValueError if it has none, or refuses the messages."""
        if not messages and not reply:
            return []
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=reply, tokenize=True, return_dict=False
            )
        except Exception as error:
            raise ValueError(f"the tokenizer's chat template: {' '.join(str(error).split())[:200]}") from error
        return list(ids)


def load_tokenizer(path: str | os.PathLike[str] | None) -> Tokenizer:
    """The Hugging Face tokenizer that :class:`LocalTokenizer` finds, or the byte-level one for None."""
    return ByteTokenizer() if path is None else LocalTokenizer(path)


# ---------------------------------------------------------------------- from a file
def read_rollouts(
    path: str | os.PathLike[str], tokenizer: Tokenizer, vocab_size: int, rewards: bool = True
) -> Rollouts:
    """Rollouts from a file (:func:`dualkv.data.files.objects`), one group or one rollout a line.

    A group is `{"prompt": ..., "responses": [...], "rewards": [...]}`, or `"completions"` for responses. The prompt and
    each response are text (encoded with `tokenizer`, without special tokens) or a list of token ids; `rewards` has one
    finite number for each response.

    A group of rollouts of several turns is `{"sequences": [...], "loss_masks": [...], "rewards": [...]}`. Each sequence
    has all token ids of a rollout, prompt included. Its mask has a 0 or 1 for each token, 1 for tokens that the policy
    wrote. The prompt is the prefix that all sequences of the line share, up to the first token that counts.

    One rollout is any form of :func:`dualkv.data.files.samples`. Rollouts whose tokens are equal up to the first one
    that counts are a group, wherever they are in the file.

    Other keys and blank lines are skipped.

    Args:
        path: the file, UTF-8.
        tokenizer: for text and messages.
        vocab_size: token ids must be below it (the model's vocabulary).
        rewards: whether rollouts need a reward; without one it is 0.

    Raises:
        ValueError: the first error, as `file:line: message`.
        OSError: a file that cannot be read.
    """
    groups: list[_Group] = []
    found: dict[tuple[int, ...], _Group] = {}  # groups of single rollouts, by their prompts
    for where, data in objects(path):
        try:
            if {"sequences", "responses", "completions", "rewards"} & data.keys():
                groups.append(_parse_group(data, tokenizer, vocab_size, rewards))
                continue
            for sample in samples(data, tokenizer, vocab_size):
                _put(sample, found, groups, rewards)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not groups:
        raise ValueError(f"{path}: no rollouts in it, expected one JSON object a line")
    masks = None
    if any(group.masks is not None for group in groups):
        masks = [g.masks or [torch.ones(len(r), dtype=torch.bool) for r in g.responses] for g in groups]
    return Rollouts([g.prompt for g in groups], [g.responses for g in groups], [g.rewards for g in groups], masks)


def _put(sample: Sample, found: dict[tuple[int, ...], _Group], groups: list[_Group], needs_reward: bool) -> None:
    """Add a rollout to the group with its prompt, or a new one."""
    if sample.mask is None:
        raise ValueError(
            "which tokens count is not known, expected a mask of them, or a chat template that writes earlier messages"
            " as it writes last ones"
        )
    if sample.reward is None and needs_reward:
        raise ValueError("'reward' (or 'score') is missing")
    first = sample.mask.index(1) if 1 in sample.mask else len(sample.mask)
    if not first:
        raise ValueError("the first token counts, expected a prompt before it")
    prompt, response = (torch.tensor(x, dtype=torch.int64) for x in (sample.tokens[:first], sample.tokens[first:]))
    group = found.get(key := tuple(sample.tokens[:first]))
    if group is None:
        group = found[key] = _Group(prompt, [], [], [])
        groups.append(group)
    group.responses.append(response)
    group.rewards.append(sample.reward or 0.0)
    assert group.masks is not None
    group.masks.append(torch.tensor(sample.mask[first:], dtype=torch.bool))


@dataclass(frozen=True)
class _Group:
    """A prompt and its rollouts."""

    prompt: torch.Tensor
    responses: list[torch.Tensor]
    rewards: list[float]
    masks: list[torch.Tensor] | None = None


def _parse_group(data: dict[str, Any], tokenizer: Tokenizer, vocab_size: int, needs_rewards: bool) -> _Group:
    of = next((key for key in ("sequences", "completions") if key in data), "responses")
    if not needs_rewards and isinstance(data.get(of), list):
        data = {"rewards": [0.0] * len(data[of]), **data}
    for key in ("sequences", "loss_masks", "rewards") if of == "sequences" else ("prompt", of, "rewards"):
        if key not in data:
            raise ValueError(f"{key!r} is missing, found {sorted(data)}")
    rewards = _rewards(data, of)
    if of == "sequences":
        return _turns(data["sequences"], data["loss_masks"], rewards, vocab_size)
    prompt = token_ids("prompt", data["prompt"], tokenizer, vocab_size)
    if not len(prompt):
        raise ValueError("'prompt' is empty, expected at least one token")
    responses = [token_ids(f"{of}[{i}]", r, tokenizer, vocab_size) for i, r in enumerate(data[of])]
    return _Group(prompt, responses, rewards)


def _rewards(data: dict[str, Any], of: str) -> list[float]:
    """One finite number for each entry of `data[of]`, which is a list and not empty."""
    for key in (of, "rewards"):
        if not isinstance(data[key], list):
            raise ValueError(f"{key!r} must be a list, got {kind(data[key])}")
    one = of.removesuffix("s")
    if not data[of]:
        raise ValueError(f"{of!r} is empty, expected at least one {one}")
    if len(data["rewards"]) != len(data[of]):
        raise ValueError(f"{len(data['rewards'])} rewards for {len(data[of])} {of}, expected one a {one}")
    for i, reward in enumerate(data["rewards"]):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(f"rewards[{i}] is {json.dumps(reward)}, expected a finite number")
    return [float(reward) for reward in data["rewards"]]


def _turns(listed: list[Any], loss_masks: Any, rewards: list[float], vocab_size: int) -> _Group:
    """The group of some whole sequences, divided into the prompt that they share and their responses."""
    if not isinstance(loss_masks, list) or len(loss_masks) != len(listed):
        found = f"{len(loss_masks)} masks" if isinstance(loss_masks, list) else kind(loss_masks)
        raise ValueError(f"'loss_masks' must be a list of {len(listed)} masks, one a sequence, got {found}")
    sequences, masks = [], []
    for i, (ids, mask) in enumerate(zip(listed, loss_masks, strict=True)):
        if not isinstance(ids, list):
            raise ValueError(f"'sequences[{i}]' must be a list of token ids, got {kind(ids)}")
        sequences.append(_ids(f"sequences[{i}]", ids, vocab_size))
        if not isinstance(mask, list) or len(mask) != len(ids) or any(m not in (0, 1) for m in mask):
            raise ValueError(f"'loss_masks[{i}]' must be a list of {len(ids)} values 0 or 1, one a token")
        masks.append(torch.tensor(mask, dtype=torch.bool))
        if not len(ids) or masks[-1][0]:
            raise ValueError(f"sequences[{i}] begins with a token that counts, expected a prompt before it")
    shared = min(int(mask.int().argmax()) if mask.any() else len(mask) for mask in masks)
    first = sequences[0][:shared]
    for i, sequence in enumerate(sequences):
        differs = (sequence[: len(first)] != first[: len(sequence)]).nonzero()
        first = first[: int(differs[0]) if len(differs) else len(sequence)]
        if not len(first):
            raise ValueError(f"sequences[0] and sequences[{i}] differ in their first token, expected one prompt")
    return _Group(first, [s[len(first) :] for s in sequences], rewards, [m[len(first) :] for m in masks])


def token_ids(name: str, value: Any, tokenizer: Tokenizer, vocab_size: int | None = None) -> torch.Tensor:
    """Text or token ids as a tensor [n] int64 of ids in the vocabulary; without one, of ids that packing takes.

    Raises:
        ValueError: neither of them, or ids outside the vocabulary; the message begins with `name`.
    """
    return _ids(name, tokenizer.encode(value) if isinstance(value, str) else value, vocab_size)


def _ids(name: str, ids: Any, vocab_size: int | None) -> torch.Tensor:
    return torch.tensor(check_ids(name, ids, vocab_size), dtype=torch.int64)


# ---------------------------------------------------------------------- for live sampling
def topic_prompts(tokenizer: Tokenizer, prompt_len: int, count: int, seed: int) -> list[torch.Tensor]:
    """Prompts from the reference text of Python's `help()`, which is part of Python.

    Args:
        tokenizer: turns the text into tokens.
        prompt_len: tokens of each prompt.
        count: number of prompts. Each is a piece of the text at a random position.
        seed: of the positions.

    Returns:
        `count` tensors [prompt_len] int64.

    Raises:
        ValueError: a Python without the text, or a prompt longer than the text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise ValueError("this Python has no pydoc_data.topics to cut prompts from: give rollouts as a file") from None
    text = torch.tensor(tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics))), dtype=torch.int64)
    if not 1 <= prompt_len <= len(text):
        raise ValueError(f"prompt_len is {prompt_len}, expected 1 to {len(text)} (the tokens of pydoc_data.topics)")
    starts = torch.randint(len(text) - prompt_len + 1, (count,), generator=torch.Generator().manual_seed(seed))
    return [text[start : start + prompt_len].clone() for start in starts.tolist()]


def plain_text_reward(text: str) -> float:
    """The fraction of characters that are lower-case ASCII letters or spaces, 0 to 1; 0 for an empty text.

    The reward suits a demonstration: it is computed from the text alone, differs between responses of an untrained
    model, and is learnable within a few updates.
    """
    return sum(c == " " or "a" <= c <= "z" for c in text) / len(text) if text else 0.0
