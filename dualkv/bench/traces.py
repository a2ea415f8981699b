"""Rollouts of agents, searches and plain sampling, drawn from published statistics: what the benchmark of trees runs.

A trace is the training sequences of one group: the rollouts of one task, each as the sequences that a trainer gets of
it. A sequence is a list of pieces of text (a tool's answer, a turn of the policy), and pieces are all that sequences
can share. So a trace is a tree of token lengths, and token sequences whose own prefixes are that tree.

:data:`FIGURES` has every number with its source. *Assumed* numbers have none: nobody publishes them, and they are
chosen. Where a source counts characters, a token has four.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dualkv.layout import Layout
from dualkv.prefixes import PrefixTree, shared_prefixes

_PRO = "SWE-Bench Pro, Claude Sonnet 4.5, 616 tasks (nilenso/swe-bench-pro-cost-token-time-analysis, docs/report.txt)"
_NEBIUS = "67,074 OpenHands trajectories (nebius/SWE-rebench-openhands-trajectories, dataset card)"
_TAU2 = "AReaL, examples/tau2/dta/config_8b_airline_dta.yaml"
_SEARCH = "Search-R1, train_grpo.sh"
_TREEPO = "TreePO, recipe/treepo/run_treepo_train.sh"


class Figure(NamedTuple):
    value: float
    source: str


# By kind and name. Lengths are tokens; means are of a log-normal distribution with a deviation of `spread`.
FIGURES: dict[str, dict[str, Figure]] = {
    "swe": {
        "rollouts": Figure(16, "assumed"),
        "turns, fewest": Figure(25, "assumed, for the mean"),
        "turns, most": Figure(100, _NEBIUS),
        "turns, mean": Figure(64.3, _NEBIUS),
        "prompt": Figure(3000, "assumed"),
        "tool output": Figure(706, f"220,346 characters in 78 calls: {_PRO}"),
        "tool output, most": Figure(4096, "assumed"),
        "turn": Figure(227, f"17,705 tokens in 78 calls: {_PRO}"),
        "reasoning": Figure(400, "assumed; the sources hide it"),
        "spread": Figure(1.0, "assumed"),
    },
    "tau2": {
        "rollouts": Figure(8, f"n_samples: {_TAU2}"),
        "turns, fewest": Figure(8, "assumed"),
        "turns, most": Figure(20, f"assumed; at most 50 steps, also of the user: {_TAU2}"),
        "prompt": Figure(3700, "policy of the airline, 7,676 characters (tau2-bench), and 14 tools, assumed 1,800"),
        "user": Figure(60, "assumed"),
        "user, most": Figure(512, f"max_completion_tokens of the user: {_TAU2}"),
        "tool output": Figure(250, "assumed"),
        "turn": Figure(80, "assumed"),
        "reasoning": Figure(400, f"assumed; at most 8,192: {_TAU2}"),
        "context": Figure(32767, f"max_tokens: {_TAU2}"),
        "spread": Figure(0.8, "assumed"),
    },
    "search": {
        "rollouts": Figure(5, f"n_agent: {_SEARCH}"),
        "turns, most": Figure(2, f"max_turns: {_SEARCH}"),
        "tool output": Figure(450, "assumed, three passages"),
        "tool output, most": Figure(500, f"max_obs_length: {_SEARCH}"),
        "turn": Figure(120, "assumed"),
        "turn, most": Figure(500, f"max_response_length: {_SEARCH}"),
        "shared": Figure(0.35, "tokens saved; the search workload of veRL's pull request 6689"),
        "spread": Figure(0.5, "assumed"),
    },
    "branched": {
        "rollouts": Figure(32, "assumed"),
        "turns, fewest": Figure(8, "assumed"),
        "turns, most": Figure(20, "assumed"),
        "turn, fewest": Figure(50, "assumed; short answers"),
        "turn, most": Figure(1500, "assumed; long tool outputs"),
    },
    "treepo": {
        "rollouts": Figure(16, f"n_resp_per_prompt: {_TREEPO}"),
        "segment": Figure(512, f"tree_max_token_per_step: {_TREEPO}"),
        "levels": Figure(14, f"tree_max_depth: {_TREEPO}"),
        "first branches, most": Figure(8, f"tree_random_first_div_max: {_TREEPO}"),
        "branches": Figure(2, f"tree_fixed_step_div: {_TREEPO}"),
        "stops": Figure(0.15, "assumed; the chance that a path ends behind a segment"),
        "prompt": Figure(200, f"assumed; at most 1,024: {_TREEPO}"),
        "spread": Figure(0.5, "assumed"),
    },
    "grpo": {
        "rollouts": Figure(16, f"n_resp_per_prompt: {_TREEPO}"),
        "prompt": Figure(200, f"assumed; at most 1,024: {_TREEPO}"),
        "response": Figure(2048, "assumed"),
        "response, most": Figure(7168, f"max_response_length: {_TREEPO}"),
        "spread": Figure(0.6, "assumed"),
    },
}


class Piece(NamedTuple):
    """A piece of text.

    number: equal for equal texts. tokens: 1 or more. trained: whether the policy wrote it in this sequence.
    """

    number: int
    tokens: int
    trained: bool


@dataclass(frozen=True)
class Trace:
    """Training sequences of one group.

    Attributes:
        name: of the kind, with what was asked for.
        sequences: pieces of each.
        rollout: of each sequence.
    """

    name: str
    sequences: tuple[tuple[Piece, ...], ...]
    rollout: tuple[int, ...]

    @cached_property
    def tree(self) -> PrefixTree:
        """The tree of the pieces' token lengths, without tokens."""
        numbers = [np.array([piece.number for piece in sequence]) for sequence in self.sequences]
        tree = shared_prefixes(numbers).tree()  # of pieces; counted in tokens from here on
        ends = [np.append(0, np.cumsum([piece.tokens for piece in sequence])) for sequence in self.sequences]
        begin = np.array([ends[s][b] for s, b in zip(tree.source, tree.begin, strict=True)])
        end = np.array([ends[s][e] for s, e in zip(tree.source, tree.begin + tree.length, strict=True)])
        return PrefixTree(tree.parent, end - begin, tree.source, begin, tree.last)

    def layout(self, device: str = "cpu") -> Layout:
        """The layout in which :func:`dualkv.pack_sequences` packs the sequences."""
        return Layout.from_segments(self.tree.offsets, self.tree.parent, device)

    def token_sequences(self, vocabulary: int) -> list[npt.NDArray[np.int64]]:
        """Random tokens below `vocabulary`, equal where pieces are: the prefixes that they share are those of the
        pieces. Pieces that stand behind the same text differ in their first token if their numbers differ by less."""
        texts = {}
        for piece in set(itertools.chain(*self.sequences)):
            text = np.random.default_rng([0, piece.number]).integers(vocabulary, size=piece.tokens)
            text[0] = piece.number % vocabulary
            texts[piece.number] = text
        return [np.concatenate([texts[piece.number] for piece in sequence]) for sequence in self.sequences]

    def loss_masks(self) -> list[npt.NDArray[np.bool_]]:
        """The tokens that the policy wrote, as one mask for each sequence."""
        return [np.repeat([p.trained for p in sequence], [p.tokens for p in sequence]) for sequence in self.sequences]


class _Texts:
    """Numbers pieces, and draws their lengths."""

    def __init__(self, kind: str, seed: int, scale: float) -> None:
        self.random, self.scale, self._figures = np.random.default_rng(seed), scale, FIGURES[kind]
        self._numbers = itertools.count()

    def __getitem__(self, name: str) -> float:
        return self._figures[name].value

    def piece(self, name: str, trained: bool = False) -> Piece:
        """A new one, whose length is drawn about the mean of that name, up to `NAME, most`."""
        spread, most = self["spread"], self._figures.get(f"{name}, most")
        tokens = float(np.exp(self.random.normal(np.log(self[name]) - spread**2 / 2, spread)))
        return self.of_length(min(tokens, most.value) if most else tokens, trained)

    def of_length(self, tokens: float, trained: bool = False) -> Piece:
        return Piece(next(self._numbers), max(1, round(tokens * self.scale)), trained)


Turns = Iterator[tuple[Piece, Piece, Piece]]  # (reasoning, what the policy says, what the environment answers)


def _kept(prompt: Piece, turns: Turns) -> list[list[Piece]]:
    """Reasoning stays in the context: every turn extends the one before, and a rollout is one sequence."""
    return [[prompt, *(piece for turn in turns for piece in turn)][:-1]]


def _dropped(prompt: Piece, turns: Turns) -> list[list[Piece]]:
    """Reasoning is left out of later turns: each turn is a sequence, of the turns before without their reasoning and
    its own with it. Its reasoning and what it says hang on the tree as a side leaf."""
    context, sequences = [prompt], []
    for reasoning, said, answer in turns:
        sequences.append([*context, reasoning, said])
        context += [said._replace(trained=False), answer]
    return sequences


def _turns(texts: _Texts, answers: Iterable[str]) -> Turns:
    for answer in answers:
        yield texts.piece("reasoning", True), texts.piece("turn", True), texts.piece(answer)


def _swe(texts: _Texts, rollouts: int, turns: float | None, export: Callable[[Piece, Turns], Any]) -> Iterator[Any]:
    low, mean, high = (texts[f"turns, {name}"] for name in ("fewest", "mean", "most"))
    prompt = texts.piece("prompt")
    for _ in range(rollouts):
        drawn = texts.random.triangular(low, 3 * mean - low - high, high)
        count = max(1, round(drawn if turns is None else drawn * turns / mean))
        yield export(prompt, _turns(texts, ["tool output"] * count))


def _tau2(texts: _Texts, rollouts: int, turns: float | None) -> Iterator[Any]:
    """A step of the agent is answered by a tool or by the user, as often by the one as by the other."""
    low, high = int(texts["turns, fewest"]), int(texts["turns, most"])
    prompt = texts.piece("prompt")
    for _ in range(rollouts):
        count = int(texts.random.integers(low, high + 1))
        if turns is not None:
            count = max(1, round(count * turns * 2 / (low + high)))
        answers = map(str, texts.random.choice(["user", "tool output"], count))
        greeting = texts.piece("user")
        sequences = [[prompt, greeting, *sequence[1:]] for sequence in _dropped(prompt, _turns(texts, answers))]
        limit = texts["context"] * texts.scale
        yield [s for s in sequences if sum(piece.tokens for piece in s) <= limit]


def _search(texts: _Texts, rollouts: int, turns: float | None) -> Iterator[Any]:
    count = int(turns or texts["turns, most"])
    own: list[list[Piece]] = []
    for _ in range(rollouts):
        searches = [(texts.piece("turn", True), texts.piece("tool output")) for _ in range(count)]
        own.append([*itertools.chain(*searches), texts.piece("turn", True)])
    # N (p + x) tokens become p + N x: the prompt p for which this saves the part `shared`, x the mean of `own`.
    part = texts["shared"] * rollouts / max(rollouts - 1, 1)
    mean = sum(piece.tokens for rollout in own for piece in rollout) / rollouts / texts.scale
    prompt = texts.of_length(mean * part / (1 - part))
    for rollout in own:
        yield [[prompt, *rollout]]


def _treepo(texts: _Texts, rollouts: int, turns: float | None) -> Iterator[Any]:
    """Segments of one length. A path ends by chance or at the last level; open ones branch while there are fewer paths
    than rollouts."""
    levels, branches = int(turns or texts["levels"]), int(texts["branches"])
    prompt = texts.piece("prompt")
    opening = min(rollouts, int(texts.random.integers(branches, int(texts["first branches, most"]) + 1)))
    live: list[list[Piece]] = [[prompt] for _ in range(opening)]
    done: list[list[Piece]] = []
    for level in range(1, levels + 1):
        behind: list[list[Piece]] = []
        for at, path in enumerate(live):
            ends = level == levels or texts.random.random() < texts["stops"]
            length = texts["segment"] * (texts.random.uniform(0.1, 1) if ends else 1)
            path = [*path, texts.of_length(length, True)]
            if ends:
                done.append(path)
                continue
            others = len(done) + len(behind) + len(live) - at - 1
            behind += [path] * max(1, min(branches, rollouts - others))
        live = behind
    for path in done:
        yield [path]


def _branched(texts: _Texts, rollouts: int, turns: float | None) -> Iterator[Any]:
    """Every rollout leaves an earlier one, drawn at random, after a turn at random. Lengths of turns are as likely to
    lie in one octave as in another."""
    low, high = int(texts["turns, fewest"]), int(texts["turns, most"])
    bounds = np.log([texts["turn, fewest"], texts["turn, most"]])
    paths: list[list[Piece]] = []
    for _ in range(rollouts):
        count = int(texts.random.integers(low, high + 1) if turns is None else turns)
        earlier = paths[texts.random.integers(len(paths))] if paths else []
        path = earlier[: texts.random.integers(1, min(len(earlier), count))] if min(len(earlier), count) > 1 else []
        while len(path) < count:
            path = [*path, texts.of_length(np.exp(texts.random.uniform(*bounds)), bool(len(path) % 2))]
        paths.append(path)
        yield [path]


def _grpo(texts: _Texts, rollouts: int, _turns: float | None) -> Iterator[Any]:
    prompt = texts.piece("prompt")
    for _ in range(rollouts):
        yield [[prompt, texts.piece("response", True)]]


# name: what it is, its figures, and the sequences of each rollout of (texts, rollouts, turns)
KINDS: dict[str, tuple[str, str, Callable[[_Texts, int, float | None], Iterator[list[list[Piece]]]]]] = {
    "grpo": ("responses to one prompt", "grpo", _grpo),
    "search": ("searches, 35 % shared", "search", _search),
    "treepo": ("reasoning sampled as a tree", "treepo", _treepo),
    "branched": ("agents that branch after turns of 50 to 1,500 tokens", "branched", _branched),
    "swe-kept": ("coding agents, reasoning kept", "swe", partial(_swe, export=_kept)),
    "tau2": ("dialogues with tools, reasoning dropped", "tau2", _tau2),
    "swe-dropped": ("coding agents, reasoning dropped from later turns", "swe", partial(_swe, export=_dropped)),
}


def draw(
    kind: str, seed: int = 0, rollouts: int | None = None, turns: float | None = None, scale: float = 1.0
) -> Trace:
    """The rollouts of one task. Equal arguments give equal traces.

    Args:
        kind: one of :data:`KINDS`.
        seed: of all that is drawn.
        rollouts: by default those of the figures.
        turns: the mean number of turns (of `search` their number, of `treepo` levels), by default that of the figures.
            `grpo` has none.
        scale: of all lengths.

    Raises:
        ValueError: an unknown kind, fewer than one rollout or turn, a scale that is not above 0.
    """
    if kind not in KINDS:
        raise ValueError(f"trace is {kind!r}, expected one of {', '.join(KINDS)}")
    for name, value in (("rollouts", rollouts), ("turns", turns)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more")
    if not scale > 0:
        raise ValueError(f"scale is {scale}, expected a number above 0")
    _, figures, sample = KINDS[kind]
    count = rollouts or int(FIGURES[figures]["rollouts"].value)
    given = {"n": rollouts, "t": turns, "x": None if scale == 1 else scale}
    name = "".join([f"trace-{kind}-{seed}", *(f"-{letter}{v:g}" for letter, v in given.items() if v is not None)])
    found = list(sample(_Texts(figures, seed, scale), count, turns))
    sequences = [(i, tuple(sequence)) for i, rollout in enumerate(found) for sequence in rollout]
    return Trace(name, tuple(s for _, s in sequences), tuple(i for i, _ in sequences))


NAME = re.compile(rf"trace-({'|'.join(KINDS)})-(\d+)(?:-n(\d+))?(?:-t(\d*\.?\d+))?(?:-x(\d*\.?\d+))?")


def parse(text: str) -> Trace | None:
    """The trace of a name such as `trace-swe-dropped-0` or `trace-tau2-3-n4-t12-x0.1`: kind, seed, rollouts, turns and
    scale, as :func:`draw` takes them; None for other texts.

    Raises:
        ValueError: as :func:`draw`.
    """
    found = NAME.fullmatch(text)
    if found is None:
        return None
    kind, seed, rollouts, turns, scale = found.groups()
    count, mean = None if rollouts is None else int(rollouts), None if turns is None else float(turns)
    return draw(kind, int(seed), count, mean, 1.0 if scale is None else float(scale))


def named(name: str, argument: str = "trace") -> Trace:
    """The trace of a name, as :func:`parse`.

    Raises:
        ValueError: no trace has that name, and as :func:`draw`; the message begins with the argument's name.
    """
    trace = parse(name)
    if trace is None:
        raise ValueError(f"{argument} is {name!r}, expected trace-KIND-SEED with a kind of {', '.join(KINDS)}")
    return trace


def split(
    name: str, vocabulary: int
) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """(prompt, response, mask of the response) of each sequence of a trace, with random tokens, as trainers take them:
    a prompt ends where the policy first writes."""
    trace, found = named(name), []
    for tokens, mask in zip(trace.token_sequences(vocabulary), trace.loss_masks(), strict=True):
        at = int(mask.argmax())
        found.append((tokens[:at], tokens[at:], mask[at:].astype(np.int64)))
    return found
