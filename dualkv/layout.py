"""Describe which packed rows belong to which prompt and response, and which tokens see each other.

A *group* is one prompt and its responses. A packed group stores each token once, `[prompt | R_1 | ... | R_N]`, and a
micro-batch is many packed groups one after another. A :class:`Layout` describes a micro-batch as *segments* (a prompt
or a response) in depth-first order: `offsets[s]` is the first packed row of segment `s`, and `parent[s]` is the segment
that it continues, -1 for a prompt. Trees may be deeper than two levels.

The visibility rule: query row `q` sees key row `k` iff `k <= q < visible_end[k]`, where `visible_end[k]` is the end of
the subtree of k's segment. (The subtree of a prompt is its group; the subtree of a response is the response itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dualkv.arrays import (
    IntArray,
    Lengths,
    cumulative_array,
    int_array,
    length_array,
    length_arrays,
    outside_inference_mode,
)
from dualkv.prefixes import read_sequences
from dualkv.segments import Segments, remember

# Called at every new layout: `dualkv.integrations` looks for libraries that would ignore layouts.
AT_NEW_LAYOUT: list[Callable[[], None]] = []


class Layout:
    """Packed groups: which rows belong to which prompt and response, and which rows see each other.

    Attributes:
        offsets: [S+1] int32, on the CPU: first packed row of each segment, then T.
        parent: [S] int32, on the CPU: the segment that each segment continues, -1 for a prompt.
        device: of the per-token tensors.

    `torch.ops.dualkv.fwd` and `bwd` take the two host tensors. Do not write to them.
    """

    # Neither a dataclass nor a pytree, because wrappers (FSDP, DDP, checkpointing) move and copy such objects.
    __slots__ = ("__weakref__", "_segments", "device", "offsets", "parent")

    def __init__(
        self, segments: Segments, offsets: torch.Tensor, parent: torch.Tensor, device: torch.device | str | int = "cpu"
    ) -> None:
        self._segments, self.offsets, self.parent = segments, offsets, parent
        self.device = torch.device(device)

    @classmethod
    @outside_inference_mode
    def _from_arrays(
        cls,
        offsets: IntArray,
        parent: IntArray,
        device: torch.device | str,
        silent: IntArray | None = None,
        last: IntArray | None = None,
    ) -> Layout:
        segments = Segments(offsets, parent, silent, last)
        tensors = torch.from_numpy(offsets.astype(np.int32)), torch.from_numpy(parent.astype(np.int32))
        remember(*tensors, segments)
        for look in AT_NEW_LAYOUT:
            look()
        return cls(segments, *tensors, device)

    @classmethod
    def from_segments(cls, offsets: Lengths, parent: Lengths, device: torch.device | str = "cpu") -> Layout:
        """Segments in depth-first order.

        Args:
            offsets, parent, device: as the attributes, in any container of integers.

        Raises:
            ValueError: offsets that do not start at 0 or decrease, a parent that comes later or crosses groups.
            TypeError: values that are not integers.
        """
        return cls._from_arrays(cumulative_array("offsets", offsets), int_array("parent", parent), device)

    @classmethod
    def from_lengths(
        cls, prompt_lens: Lengths, response_lens: Iterable[Lengths], device: torch.device | str = "cpu"
    ) -> Layout:
        """One prompt length and one list of response lengths for each group.

        Args:
            prompt_lens: [G] tokens of each group's prompt, 0 or more (0: nothing is shared).
            response_lens: G lists of response lengths, each length 0 or more.
            device: of the per-token tensors.

        Raises:
            ValueError: a negative length, or not as many lists as prompts.
            TypeError: a length that is not an integer, a number or text in place of a list.
        """
        prompts = length_array("prompt_lens", prompt_lens)
        responses = length_arrays("response_lens", response_lens)
        if len(responses) != len(prompts):
            raise ValueError(
                f"response_lens has {len(responses)} lists for {len(prompts)} prompts in prompt_lens, "
                "expected one list a prompt"
            )
        counts = np.array([len(r) for r in responses], np.int64)
        flat = np.concatenate([np.zeros(0, np.int64), *responses])
        return cls._from_groups(prompts, flat, counts, device)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens_prompts: Lengths,
        cu_seqlens_responses: Lengths,
        cu_responses: Lengths | None = None,
        device: torch.device | str = "cpu",
    ) -> Layout:
        """Cumulative lengths, as in FlashAttention's varlen functions and veRL's unpadded batches.

        Reading tensors on a GPU waits for the GPU; do so once a batch.

        Args:
            cu_seqlens_prompts: [G+1] prompt g has tokens `cu_seqlens_prompts[g]` to `cu_seqlens_prompts[g+1]` of all
                prompts end to end.
            cu_seqlens_responses: [N+1] the same for all responses, group 0's first.
            cu_responses: [G+1] group g has responses `cu_responses[g]` to `cu_responses[g+1]`. Optional for one group.
            device: of the per-token tensors.

        Raises:
            ValueError: values that do not start at 0, decrease, or do not add up.
            TypeError: values that are not integers.
        """
        prompts = np.diff(cumulative_array("cu_seqlens_prompts", cu_seqlens_prompts))
        responses = np.diff(cumulative_array("cu_seqlens_responses", cu_seqlens_responses))
        if cu_responses is None:
            if len(prompts) != 1:
                raise ValueError(
                    f"cu_responses is missing and there are {len(prompts)} prompts, expected it or one prompt"
                )
            cu_responses = [0, len(responses)]
        counts = np.diff(cumulative_array("cu_responses", cu_responses))
        if len(counts) != len(prompts):
            raise ValueError(f"cu_responses names {len(counts)} groups, cu_seqlens_prompts {len(prompts)}")
        if counts.sum() != len(responses):
            raise ValueError(
                f"cu_responses ends at {counts.sum()}, cu_seqlens_responses holds {len(responses)} responses"
            )
        return cls._from_groups(prompts, responses, counts, device)

    @classmethod
    def from_token_sequences(
        cls,
        sequences: Sequence[Lengths] | torch.Tensor,
        min_shared: int = 1,
        device: torch.device | str = "cpu",
    ) -> Layout:
        """The layout in which :func:`dualkv.pack_sequences` packs these sequences, with every shared prefix once.

        sequences, min_shared: as there. device: of the per-token tensors.
        """
        _, shared, _ = read_sequences(sequences, min_shared)
        tree = shared.at_least(min_shared).tree()
        return cls._from_arrays(tree.offsets, tree.parent, device, last=tree.last)

    @classmethod
    def _from_groups(
        cls, prompts: IntArray, responses: IntArray, counts: IntArray, device: torch.device | str
    ) -> Layout:
        """prompts [G], responses [N] of all groups in order, counts [G] responses a group."""
        n_groups, first = len(prompts), np.cumsum(counts) - counts
        prompt_at = first + np.arange(n_groups)  # segment index of each prompt
        lengths = np.insert(responses, first, prompts)
        parent = np.repeat(prompt_at, counts + 1)
        parent[prompt_at] = -1
        return cls._from_arrays(np.concatenate([[0], np.cumsum(lengths)]), parent, device)

    def to(self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Layout:
        """Copy the layout with its per-token tensors on `device`, None for the present one; host state and plans are
        shared. `non_blocking` is what hooks hand over: per-token tensors are made on their device."""
        if device is None or torch.device(device) == self.device:
            return self
        return Layout(self._segments, self.offsets, self.parent, device)

    def without_prompt_queries(self) -> Layout:
        """Return the layout for calls that do not use the prompts' rows of out and lse, whose gradients are zero there.

        Kernels skip the work of these rows: their out and dq are zero, and their log-sum-exp is infinite. So a backward
        that is called with copies of `offsets` and `parent`, and computes these rows, makes the same gradients.
        """
        return self._asking_less(self._segments.lengths[self._segments.roots])

    def without_queries(self, rows: Lengths) -> Layout:
        """Return the layout for calls that do not use the first rows of out and lse of some groups, whose gradients are
        zero there: the rows above a part of a tree. Kernels skip these rows as for :meth:`without_prompt_queries`.

        Args:
            rows: of each group, 0 or more and fewer than it has; 0 of the last groups may be left out.

        Raises:
            ValueError: another number of rows.
            TypeError: no integers.
        """
        of_groups = self._segments.group_rows
        silent = int_array("rows", rows)
        silent = np.append(silent, np.zeros(max(0, len(of_groups) - len(silent)), np.int64))
        if len(silent) != len(of_groups) or (silent < 0).any() or (silent >= np.maximum(of_groups, 1)).any():
            raise ValueError(f"rows is {rows}, expected a number for each group, fewer than {of_groups.tolist()}")
        return self._asking_less(silent)

    @outside_inference_mode
    def _asking_less(self, silent: IntArray) -> Layout:
        segments = Segments(self._segments.offsets, self._segments.parent, silent, self._segments.last)
        segments.use = self._segments.use
        tensors = self.offsets.clone(), self.parent.clone()
        remember(*tensors, segments)
        return Layout(segments, *tensors, self.device)

    def _check_of_all_rows(self, name: str) -> None:
        """ValueError for a layout without some queries, as the argument `name` of a model."""
        if self._segments.silent is not None:
            raise ValueError(
                f"{name} is a layout without some queries (without_prompt_queries or such), expected one of all rows: "
                "the next layer reads them"
            )

    # ------------------------------------------------------------------ whether attention used it
    def mark_used(self) -> None:
        """Say that attention computed what this layout says, where DualKV cannot see it.

        :func:`dualkv.response_logprobs`, :func:`dualkv.walk` and `unpack` of values with gradients raise ValueError
        for a layout that no attention has used: `enable` or `dualkv=` was forgotten, and every row saw all rows before
        it. :func:`dualkv.attention` notes its layout, and so do layouts that are made of it (`to`, shards, parts of a
        walk); copies and pickles are layouts of their own. Call this first where attention runs elsewhere: on another
        pipeline stage, in another process, in a CUDA graph that was captured with another layout, in separate
        sequences, or in a function of your own.
        """
        self._segments.use.seen = self._segments.use.elsewhere = True

    def _serves(self, other: Layout) -> Layout:
        """This layout, whose use from now on is use of `other`."""
        self._segments.use = other._segments.use
        return self

    # ------------------------------------------------------------------ counts
    @property
    def num_tokens(self) -> int:
        """Packed tokens T."""
        return self._segments.total

    @property
    def num_groups(self) -> int:
        """G."""
        return len(self._segments.roots)

    @property
    def num_segments(self) -> int:
        """Prompts and responses, or segments of trees: S."""
        return len(self._segments.parent)

    @property
    def num_responses(self) -> int:
        """Segments that continue another one."""
        return self.num_segments - self.num_groups

    @property
    def depth(self) -> int:
        """Levels of the deepest tree: 1 for prompts alone, 2 for prompts with responses, more for shared turns."""
        return self._segments.max_depth

    @property
    def nominal_tokens(self) -> int:
        """Tokens of the same sequences with their prompts replicated: the sum of P + R."""
        return self._segments.nominal

    @property
    def dedup_ratio(self) -> float:
        """nominal_tokens / num_tokens: N(P+R) / (P+NR) for one group; 1.0 for an empty layout."""
        return self.nominal_tokens / self.num_tokens if self.num_tokens else 1.0

    @property
    def prompt_lens(self) -> list[int]:
        """Tokens of each group's prompt."""
        return self._segments.lengths[self._segments.roots].tolist()

    @property
    def response_lens(self) -> list[list[int]]:
        """Tokens of each response, one list for each group (every segment below a prompt, in packed order)."""
        s = self._segments
        starts = s.roots
        return [part[1:].tolist() for part in np.split(s.lengths, starts[1:])] if len(starts) else []

    # ------------------------------------------------------------------ per-token tensors, made once
    def _tensor(self, name: str, array: Callable[[], IntArray], dtype: torch.dtype) -> torch.Tensor:
        return self._segments.cached(
            (name, self.device), lambda: torch.from_numpy(array()).to(device=self.device, dtype=dtype)
        )

    @property
    def position_ids(self) -> torch.Tensor:
        """[T] int64: the position of each row in its own sequence. Every response starts at the prompt's length."""
        return self._tensor("position_ids", lambda: self._segments.position, torch.int64)

    @property
    def visible_end(self) -> torch.Tensor:
        """[T] int32: query row q sees key row k iff k <= q < visible_end[k]."""
        return self._tensor("visible_end", lambda: self._segments.visible_end, torch.int32)

    # ------------------------------------------------------------------ as a value
    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles hold the segments alone; device tensors and plans are made again."""
        segments = self._segments
        return Layout._from_arrays, (segments.offsets, segments.parent, self.device, segments.silent, segments.last)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        a, b = self._segments, other._segments
        return all(np.array_equal(getattr(a, x), getattr(b, x)) for x in ("offsets", "parent", "silent"))

    def __hash__(self) -> int:
        s = self._segments
        return hash((s.offsets.tobytes(), s.parent.tobytes(), None if s.silent is None else s.silent.tobytes()))

    def __repr__(self) -> str:
        def spread(values: list[int]) -> str:
            low, high = min(values), max(values)
            return f"{low}" if low == high else f"{low}..{high}"

        s = self._segments
        parts = [f"{self.num_tokens} tokens", f"{self.num_groups} group{'s' * (self.num_groups != 1)}"]
        if self.num_groups:
            parts.append(f"P {spread(self.prompt_lens)}")
        if self.num_responses:
            parts.append(f"{self.num_responses} responses, R {spread(s.lengths[s.parent >= 0].tolist())}")
        if self.depth > 2:
            parts.append(f"depth {self.depth}")
        parts.append(f"{self.nominal_tokens} replicated ({self.dedup_ratio:.2f}x)")
        return f"Layout({', '.join(parts)}, device={str(self.device)!r})"
