"""Sampling of responses by the model itself: each prompt is computed once, its cache shared by the whole group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dualkv.demo.pictures import of_rows
from dualkv.integrations.transformers import head
from dualkv.progress import Track, untracked

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHE_BYTES = 16 * 2**30  # groups are sampled side by side as long as their caches take less than this


Media = dict[str, torch.Tensor]


@torch.no_grad()
def sample_responses(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    num_responses: int,
    response_len: int,
    vocab_size: int,
    eos_id: int | None,
    seed: int,
    track: Track = untracked,
    what: str = "sampling",
    media: list[dict[str, torch.Tensor]] | None = None,
) -> list[list[torch.Tensor]]:
    """`num_responses` samples at temperature 1 for each prompt.

    The random numbers depend on `seed` alone, one for each response and position, and each picks a token by the inverse
    of the cumulative distribution: two models that agree to rounding sample the same tokens, but where a random number
    falls within that rounding of the border between two tokens.

    Args:
        model: a causal language model of transformers, in eval mode.
        prompts: G tensors [P] int64, all of one length.
        num_responses: samples a prompt.
        response_len: most tokens of a response.
        vocab_size: only ids below it are sampled (what the tokenizer can decode).
        eos_id: ends a response, which keeps it as its last token; None: every response has `response_len` tokens.
        seed: of the random numbers.
        track: shows progress.
        what: the name of the progress bar.
        media: the images of each prompt, as :func:`dualkv.pack` takes them.

    Returns:
        G lists of `num_responses` tensors [1 to response_len] int64, on the CPU.
    """
    group_bytes = num_responses * _cache_bytes(model, len(prompts[0]) + response_len)
    at_once = max(1, CACHE_BYTES // group_bytes)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(prompts), num_responses, response_len, generator=generator, dtype=torch.float64)

    def columns() -> Iterator[torch.Tensor]:
        """The next token of each response of some groups, `response_len` times, then of the next groups."""
        for first in range(0, len(prompts), at_once):
            some = torch.stack(list(prompts[first : first + at_once]))
            numbers = uniform[first : first + at_once].flatten(0, 1)
            images = of_rows(media[first : first + at_once] if media else [], some.shape[1], model.device)
            yield from _sampled(model, some, num_responses, numbers.to(model.device), vocab_size, eos_id, images)

    total = -(-len(prompts) // at_once) * response_len
    taken = [column.cpu() for column in track(columns(), what, total)]
    rows = [row for i in range(0, total, response_len) for row in torch.stack(taken[i : i + response_len], 1)]
    flat = [_until(row, eos_id) for row in rows]
    return [flat[g * num_responses : (g + 1) * num_responses] for g in range(len(prompts))]


def sample_turns(
    model: PreTrainedModel,
    prompts: Sequence[torch.Tensor],
    environment: Sequence[Sequence[torch.Tensor]],
    num_rollouts: int,
    turn_len: int,
    vocab_size: int,
    seed: int,
    track: Track = untracked,
    what: str = "sampling",
    media: Sequence[Media] | None = None,
    shown: Sequence[Sequence[Media]] | None = None,
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]], list[Media] | None]:
    """`num_rollouts` rollouts of several turns for each prompt: a tree, as searches and resampled turns make it.

    Every turn is sampled twice from each that came before, until there are `num_rollouts`; the last turn makes as many
    as are missing. Between turns an environment answers.

    Args:
        model, prompts, vocab_size, seed, track, what: as for :func:`sample_responses`.
        environment: G lists of the same number of tensors [E] int64, all of one length: the answers after each turn but
            the last one, so one more turn is sampled than there are answers.
        num_rollouts: of each prompt.
        turn_len: tokens of each sampled turn.
        media: the images of each prompt.
        shown: G lists of the images of each answer, beside `media`.

    Returns:
        G lists of `num_rollouts` tensors [R] int64, what follows the prompt; of as many [R] bool: sampled tokens; and
        the images of all responses.
    """
    answers = len(environment[0])
    texts = [[prompt] for prompt in prompts]
    masks = [[torch.zeros(len(prompt), dtype=torch.bool)] for prompt in prompts]
    seen = [[entry] for entry in media or [{}] * len(prompts)]
    for turn in range(answers + 1):
        before = len(texts[0])
        after = num_rollouts if turn == answers else min(2 * before, num_rollouts)
        flat = [text for group in texts for text in group]
        sampled = sample_responses(
            model, flat, -(-after // before), turn_len, vocab_size, None, seed + (turn << 20), track, what,
            None if media is None else [entry for group in seen for entry in group],
        )  # fmt: skip
        up = [i * before // after for i in range(after)]  # what each new turn follows
        child = [i - up.index(u) for i, u in enumerate(up)]
        for g, (group, mask) in enumerate(zip(texts, masks, strict=True)):
            answer = environment[g][turn] if turn < answers else group[0][:0]
            new = torch.arange(turn_len + len(answer)) < turn_len
            texts[g] = [
                torch.cat([group[u], sampled[g * before + u][k], answer]) for u, k in zip(up, child, strict=True)
            ]
            masks[g] = [torch.cat([mask[u], new]) for u in up]
            answered = shown[g][turn] if shown is not None and turn < answers else {}
            seen[g] = [_behind(seen[g][u], turn_len, answered) for u in up]
    lens = [len(prompt) for prompt in prompts]
    responses = [[text[n:] for text in group] for n, group in zip(lens, texts, strict=True)]
    of_responses = None
    if media is not None:
        pairs = [(before, own) for before, group in zip(media, seen, strict=True) for own in group]
        of_responses = [{name: x[len(before[name]) :] for name, x in own.items()} for before, own in pairs]
    return responses, [[mask[n:] for mask in group] for n, group in zip(lens, masks, strict=True)], of_responses


def _behind(entry: Media, turn_len: int, answered: Media) -> Media:
    """The images of a text with a turn of text behind it, and an answer with images of its own."""
    text = {"mm_token_type_ids": torch.zeros(turn_len, dtype=torch.int64)}
    return {
        name: torch.cat([x, *(more[name] for more in (text, answered) if name in more)]) for name, x in entry.items()
    }


def _sampled(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    num_responses: int,
    uniform: torch.Tensor,
    vocab_size: int,
    eos_id: int | None,
    images: dict[str, torch.Tensor],
) -> Iterator[torch.Tensor]:
    """prompts [G, P], uniform [G * num_responses, R] in [0, 1) -> R times token ids [G * num_responses]."""
    from transformers import DynamicCache

    base, make = model.base_model, head(model)
    cache = DynamicCache(config=model.config)
    kept: dict[str, Any] = {_name_of_cache(base): cache, "use_cache": True}

    def last_hidden(ids: torch.Tensor, **images: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = base(input_ids=ids, **kept, **images).last_hidden_state
        return hidden[:, -1]

    hidden = last_hidden(prompts.to(model.device), **images).repeat_interleave(num_responses, 0)
    # States of recurrent layers have no `batch_repeat_interleave`.
    prompt_of_response: Any = torch.arange(len(prompts), device=hidden.device).repeat_interleave(num_responses)
    cache.reorder_cache(prompt_of_response)
    finished = torch.zeros(len(hidden), dtype=torch.bool, device=model.device)
    for t in range(uniform.shape[1]):
        cumulative = torch.softmax(make.logits(hidden)[:, :vocab_size].double(), -1).cumsum(-1)
        numbers = uniform[:, t] * cumulative[:, -1]
        sampled = torch.searchsorted(cumulative, numbers[:, None], right=True)[:, 0].clamp_(max=cumulative.shape[1] - 1)
        if eos_id is not None:
            finished |= sampled == eos_id
        yield sampled
        if t + 1 < uniform.shape[1] and not finished.all():
            hidden = last_hidden(sampled[:, None])


def _until(row: torch.Tensor, eos_id: int | None) -> torch.Tensor:
    """The tokens of a row up to and with the first `eos_id`."""
    ends = (row == eos_id).nonzero() if eos_id is not None else row.new_zeros(0, 1)
    return row[: int(ends[0]) + 1].clone() if len(ends) else row.clone()


def _name_of_cache(model: torch.nn.Module) -> str:
    """`cache` from transformers 5.24 on, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Compute the bytes of a sequence's cache from the cache of one token: keys and values of each token, and states of
    recurrent layers."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model.base_model(input_ids=token, use_cache=True, **{_name_of_cache(model.base_model): cache})

    def size(name: str) -> int:
        found = (getattr(layer, name, None) for layer in cache.layers)
        each = (x for one in found for x in (one.values() if isinstance(one, dict) else [one]))
        return sum(x.nbytes for x in each if x is not None)

    return tokens * (size("keys") + size("values")) + size("conv_states") + size("recurrent_states")
