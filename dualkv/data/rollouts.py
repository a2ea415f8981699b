"""Rollouts (prompts, responses, rewards) from a file, or drawn."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codegen.packages import require
from dualkv.data.files import Source, errors_at, name_of, objects
from dualkv.data.forms import ByteTokenizer, Group, Message, Tokenizer, group_or_samples
from dualkv.data.pretrained import PACKAGED, pretrained


@dataclass(frozen=True)
class Rollouts:
    """G groups of responses to one prompt each.

    Attributes:
        prompts: G tensors [P_g] int64.
        responses: G lists of tensors [R_i] int64; a response may be empty, a list may not.
        rewards: G lists of floats, one a response.
        masks: G lists of tensors [R_i] bool: the response tokens that count, where an environment wrote parts of the
            responses; None: all tokens count.
    """

    prompts: list[torch.Tensor]
    responses: list[list[torch.Tensor]]
    rewards: list[list[float]]
    masks: list[list[torch.Tensor]] | None = None

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


class LocalTokenizer:
    """A Hugging Face tokenizer from a local folder, or that of a GGUF file or a name in
    :data:`dualkv.data.pretrained.PACKAGED`. Encoding adds no special tokens."""

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
def read_rollouts(path: Source, tokenizer: Tokenizer, vocab_size: int | None, rewards: bool = True) -> Rollouts:
    """Rollouts from a file (:func:`dualkv.data.files.objects`), one group or one rollout a line.

    A group is `{"prompt": ..., "responses": [...], "rewards": [...]}`, or `"completions"` for responses. The prompt and
    each response are text (encoded with `tokenizer`, without special tokens) or a list of token ids; `rewards` has one
    finite number for each response.

    A group of rollouts of several turns is `{"sequences": [...], "loss_masks": [...], "rewards": [...]}`. Each sequence
    has all token ids of a rollout, prompt included. Its mask has a 0 or 1 for each token, 1 for tokens that the policy
    wrote. The prompt is the prefix that all sequences of the line share, up to the first token that counts.

    One rollout is any form of :func:`dualkv.data.forms.samples`. Rollouts whose tokens are equal up to the first one
    that counts are a group, wherever they are in the file.

    Args:
        vocab_size: token ids must be below it (the model's vocabulary); None: they must be ones that packing takes.
        rewards: whether rollouts need a reward; without one it is 0.

    Raises:
        ValueError: the first error, as `file:line: message`.
        OSError: a file that cannot be read.
    """
    groups: list[Group] = []
    found: dict[tuple[int, ...], Group] = {}  # groups of single rollouts, by their prompts
    for where, data in objects(path):
        with errors_at(where):
            parsed = group_or_samples(data, tokenizer, vocab_size, rewards)
        if isinstance(parsed, Group):
            groups.append(parsed)
            continue
        for tokens, mask, reward in parsed:
            assert mask is not None
            first = mask.index(1) if 1 in mask else len(mask)
            group = found.get(key := tuple(tokens[:first]))
            if group is None:
                group = found[key] = Group(tokens[:first], [], [], [])
                groups.append(group)
            group.responses.append(tokens[first:])
            group.rewards.append(reward or 0.0)
            assert group.masks is not None
            group.masks.append(mask[first:])
    if not groups:
        raise ValueError(f"{name_of(path)}: no rollouts in it, expected one JSON object a line")
    masks = None
    if any(group.masks is not None for group in groups):
        masks = [[_mask(m) for m in g.masks or [[1] * len(r) for r in g.responses]] for g in groups]
    responses = [[_ids(response) for response in group.responses] for group in groups]
    return Rollouts([_ids(group.prompt) for group in groups], responses, [group.rewards for group in groups], masks)


def _ids(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def _mask(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts, dtype=torch.bool)


# ---------------------------------------------------------------------- drawn
def topic_prompts(tokenizer: Tokenizer, prompt_len: int, count: int, seed: int) -> list[torch.Tensor]:
    """`count` prompts [prompt_len] int64: pieces, at random positions, of the reference text of Python's `help()`.

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


def draw_rollouts(
    tokenizer: Tokenizer, groups: int, prompt_len: int, responses: int, response_len: int, turns: int, seed: int
) -> Rollouts:
    """Rollouts of pieces of text (:func:`topic_prompts`), with random rewards.

    Args:
        turns: of each response, of `response_len` tokens. Two follow each one until there are as many as responses; the
            last are all different. Behind the others are as many tokens of an environment, which are the same for all
            and do not count.
    """
    seeds, answers = itertools.count(seed), turns - 1

    def pieces(length: int, number: int) -> list[list[torch.Tensor]]:
        flat = topic_prompts(tokenizer, length, groups * number, next(seeds))
        return [flat[g * number : (g + 1) * number] for g in range(groups)]

    prompts = [prompt for [prompt] in pieces(prompt_len, 1)]
    rows = [[torch.zeros(0, dtype=torch.int64)] * responses for _ in range(groups)]
    for turn in range(turns):
        different = responses if turn == answers else min(2 ** (turn + 1), responses)
        written, said = pieces(response_len, different), pieces(response_len, int(turn < answers))
        rows = [
            [torch.cat([row, own[i * different // responses], *answer]) for i, row in enumerate(group)]
            for group, own, answer in zip(rows, written, said, strict=True)
        ]
    rewards = torch.rand(groups, responses, generator=torch.Generator().manual_seed(seed)).tolist()
    mask = torch.arange(len(rows[0][0])) // response_len % 2 == 0
    return Rollouts(prompts, rows, rewards, [[mask] * responses] * groups if answers else None)
