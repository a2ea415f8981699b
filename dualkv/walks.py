"""Trees past memory: walked depth-first, a part at a time, with gradients of the paths' keys and values added up.

    def forward(input_ids, branch):
        return model.model(input_ids=input_ids, dualkv=branch).last_hidden_state

    def loss(hidden, part):
        logp, _ = dualkv.response_logprobs(hidden, head(model), part)
        return -(part.expand(logp) * advantages[part.places]).sum()

    dualkv.walk(batch, budget, forward, loss)  # as loss.backward() of the whole batch

A part reads the keys and values of the path above it. Trunks, which parts below read, run twice: first without a graph,
for their keys, values and states, and with a graph once all parts below are done. That second pass has the trunk's own
loss, and the summed gradients of what it kept. So rows of one pass at a time have a graph, and a row of a trunk that
waits takes its keys, values and their gradients alone. The cost is one more forward of the trunks' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import takewhile
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist

from dualkv.branches import Branch, Keeping
from dualkv.data.apart import smallest
from dualkv.data.media import Entry, moved
from dualkv.data.memory import Memory
from dualkv.data.parts import TreePart, plan_parts
from dualkv.data.rows import check_used
from dualkv.data.trees import PackedSequences
from dualkv.draws import random_states
from dualkv.layout import Layout

Forward = Callable[[torch.Tensor, Branch], torch.Tensor]
Loss = Callable[[torch.Tensor, TreePart], torch.Tensor]
Values = Callable[[torch.Tensor, TreePart], torch.Tensor]
Budget = int | Memory | Sequence[TreePart]


class Pass:
    """One pass of a part, made by :func:`walk_passes`: a `with` statement for its forward, then :meth:`backward`.

    Attributes:
        branch: for `model(..., dualkv=branch)`.
        has_graph: False for first passes of trunks.
        is_last_graph: whether gradients of all ranks are complete behind its backward.
    """

    def __init__(self, branch: Branch, has_graph: bool, state: State) -> None:
        self.branch, self.has_graph, self._state = branch, has_graph, state
        self._running = ExitStack()
        self.is_last_graph = self.done = False

    @property
    def part(self) -> TreePart:
        return self.branch.part

    @property
    def input_ids(self) -> torch.Tensor:
        """[1, t] int64."""
        return self.part.input_ids

    @property
    def is_last(self) -> bool:
        """Whether no pass of this part follows: its loss and its log-probs are computed here."""
        return self.has_graph or not self.part.is_trunk or not self._state.training

    @property
    def has_loss(self) -> bool:
        """Whether the loss of the part's trained tokens is computed in this pass."""
        return self.is_last and self.part.num_trained > 0

    @property
    def kind(self) -> Literal["F", "G"]:
        """F without a graph, G with one."""
        return "G" if self.has_graph else "F"

    def zero_loss(self, hidden: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        """Make a loss of zero of the last hidden states, for passes without one that FSDP2 must see.

        weights: parameters that losses use behind them, such as the head's, so that all ranks have their gradients.
        """
        return hidden.flatten()[:0].sum() + sum((weight.flatten()[:1] * 0).sum() for weight in weights)

    def __enter__(self) -> Self:
        self.branch.begin(self.has_graph)
        self._running.enter_context(torch.set_grad_enabled(self.has_graph))
        if torch.is_autocast_enabled(self.part.device.type):
            torch.clear_autocast_cache()  # weights cast without a graph would have no gradient in the next pass
        self._running.enter_context(self._state.random_numbers(self.part))
        return self

    def __exit__(self, *error: Any) -> None:
        self.branch.end()
        self._running.close()
        if self.branch.has_images and not self.branch.took_images and error[0] is None:
            raise ValueError(
                f"batch has media ({', '.join(self.part.batch.media)}), and forward took none: expected an enabled"
                " transformers model that holds the vision tower, called with dualkv=branch"
            )

    def backward(self, loss: torch.Tensor | None = None) -> None:
        """Run the backward of a pass with a graph, and finish the pass.

        Args:
            loss: one number, the part's share; None where it has none. A trunk without one still has the gradients of
                what it keeps.

        Raises:
            ValueError, TypeError: the forward did not use the branch; a loss where `has_loss` is False; see
                :func:`walk`.
        """
        check_used(self.part.seen, "forward returned hidden states", "dualkv=branch")
        # The batch's layout counts as used for what is computed from the log-probs of all parts. A part that is one
        # path may run without its layout.
        use = self.part.seen._segments.use
        self.part.batch.layout._segments.use.seen |= use.seen
        if loss is not None:
            if not self.is_last:
                raise ValueError("a loss came to the first pass of a trunk, expected it in the second one (has_loss)")
            check_loss(loss, self.has_graph)
        if self.has_graph:
            self.branch.backward(loss)
        self.done = True


class State:
    """The common state of the passes of a walk.

    Attributes:
        training: whether trunks run twice.
        followed: whether another walk of the same parts may follow; by default one without graphs is.
        again: whether the parts ran before, in a walk whose random numbers each of them draws again.
        trunks: branches of trunks that keep their tensors from that walk on.
        modes, writes: see :meth:`dualkv.branches.Branch.check_module`; `writes` is None where ranks gather parameters.
    """

    def __init__(self, training: bool, followed: bool | None = None) -> None:
        self.training, self.again = training, False
        self.followed = not training if followed is None else followed
        self.trunks: dict[int, Branch] = {}
        self.modes: dict[Any, bool] = {}
        self.writes: dict[Any, int] | None = {}
        self._random: dict[int, list[torch.Tensor]] = {}

    def then(self) -> State:
        """Return the state of the walk with graphs that follows."""
        found = State(True)
        found.again, found.trunks, found.modes, found.writes = True, self.trunks, self.modes, self.writes
        found._random = self._random
        return found

    def random_numbers(self, part: TreePart) -> AbstractContextManager[None]:
        """Make the context of a pass: the second pass of a part draws the random numbers of the first one."""
        if part.index in self._random and (self.again or self.training):
            return _drawing_again(self._random[part.index], part.device)
        if part.is_trunk or self.followed:
            self._random[part.index] = random_states(part.device)
        return nullcontext()


@contextmanager
def _drawing_again(states: list[torch.Tensor], device: torch.device) -> Iterator[None]:
    """Draw the random numbers that came from these states on; those after the context do not depend on it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)
        yield


def parts_of(batch: PackedSequences, budget: Budget, values_first: bool = False) -> Sequence[TreePart]:
    if not isinstance(budget, Sequence):
        return plan_parts(batch, budget, values_first=values_first)
    indices = [part.index for part in budget if isinstance(part, TreePart) and part.batch is batch]
    if indices != [*range(len(budget))] or sum(len(part.rows) for part in budget) != batch.layout.num_tokens:
        raise ValueError(
            f"budget is a {type(budget).__name__} of {len(budget)} entries, expected all parts of this batch that"
            " plan_parts made, in their order"
        )
    return budget


def walk_passes(
    batch: PackedSequences | None,
    budget: Budget,
    keeping: Keeping | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[Pass]:
    """The passes of a walk in their order, for loops that run forward and backward themselves. Each one is run before
    the next is asked for:

        for one in walk_passes(batch, budget):
            with one:
                hidden = model.model(input_ids=one.input_ids, dualkv=one.branch).last_hidden_state
                loss = loss_of(hidden, one.part) if one.has_loss else None
            one.backward(loss)

    Under `torch.no_grad` no pass has a graph, and each part runs once.

    With FSDP2 (`fully_shard`) each rank has a tree of its own, and layers are gathered in each pass. So with `group`
    ranks run passes of the same kinds together, and a rank that has none of a kind gets an empty pass, of one row that
    counts nothing. There a pass with a graph always needs a loss: :meth:`Pass.zero_loss` where `has_loss` is False.
    Head and loss must be in the forward of the module that is sharded last, around all others.

    Args:
        batch, budget: as for :func:`walk`; no batch on a rank that has no rollouts.
        keeping: how trunks keep their tensors.
        group: the ranks that gather parameters from each other.
        device: of empty passes.

    Raises:
        ValueError: the pass before was not run, no batch without a group, another rank that raises; and as
            :func:`walk`.
    """
    if batch is None and group is None:
        raise ValueError("batch is None, expected a batch, or a group of ranks that have some")
    parts: Sequence[TreePart] = []
    refusal: ValueError | TypeError | None = None
    try:
        parts = parts if batch is None else parts_of(batch, budget)
    except (ValueError, TypeError) as error:
        if group is None:
            raise
        refusal = error
    yield from part_passes(parts, State(torch.is_grad_enabled()), keeping, group, device, refusal)


def part_passes(
    parts: Sequence[TreePart],
    state: State,
    keeping: Keeping | None,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    refusal: ValueError | TypeError | None = None,
) -> Iterator[Pass]:
    """:func:`walk_passes` of parts, which may be those of several batches one after another, numbered through.

    state: that of :meth:`State.then` draws the random numbers of the walk before. refusal: an error of this rank.
    """
    own = own_passes(parts, keeping or Keeping(), state)
    kinds = mine = _kinds(parts, state.training)
    unread = dict[str, Entry]()
    if group is not None:
        state.writes = None
        every: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, None if refusal else mine, group)
        if refusal is not None:
            raise refusal
        agreed = [kinds for kinds in every if kinds is not None]
        if len(agreed) < len(every):
            raise ValueError(
                f"{len(every) - len(agreed)} of the {len(every)} ranks of group refused their batch or budget, expected"
                " passes on all of them: the errors are theirs"
            )
        kinds = "".join(_together(agreed))
        unread = _images_of_ranks(parts, group)
    for index, kind in enumerate(kinds):
        is_own = mine[:1] == kind
        one = next(own) if is_own else _empty(kind, device)
        one.is_last_graph = index == kinds.rfind("G")
        one.branch.unread = unread
        mine = mine[is_own:]
        yield from ([one] if is_own else _checked(one))
    next(own, None)  # checks that the last one was run


def _images_of_ranks(parts: Sequence[TreePart], group: dist.ProcessGroup) -> dict[str, Entry]:
    """One image of each kind that some rank has, the same on all ranks, in host memory."""
    mine = dict[str, Entry]()
    for batch in {id(part.batch): part.batch for part in parts}.values():
        mine = {name: moved(one, "cpu") for name, one in smallest(batch.media).items()} | mine
    every: list[dict[str, Entry]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(every, mine, group)
    return {name: one for some in reversed(every) for name, one in some.items()}


def own_passes(
    parts: Sequence[TreePart], keeping: Keeping, state: State, leaves_trunks: bool = False
) -> Iterator[Pass]:
    """leaves_trunks: without graphs, leave the first trunks in the state for the walk with graphs that follows."""
    trunks: dict[int, Branch] = {}
    # The trunks that wait in a walk with graphs before any pass has one.
    first = {part.index for part, _ in takewhile(lambda one: leaves_trunks and not one[1], _order(parts, True))}
    for part, has_graph in _order(parts, state.training):
        if part.index in trunks:
            yield from _checked(Pass(trunks.pop(part.index), True, state))
            continue
        if part.index in state.trunks:
            trunks[part.index] = state.trunks.pop(part.index)
            continue
        if not state.training:  # nothing reads the others any more
            waiting = first | {index for index, _ in part.path}
            trunks = {index: trunk for index, trunk in trunks.items() if index in waiting}
        branch = Branch(part, [trunks[index] for index, _ in part.path], keeping, state.modes, state.writes)
        if part.is_trunk:
            trunks[part.index] = branch
        yield from _checked(Pass(branch, has_graph, state))
    if not state.training:
        state.trunks.update((index, trunks[index]) for index in first)


def _order(parts: Sequence[TreePart], training: bool) -> Iterator[tuple[TreePart, bool]]:
    """Iterate over parts in the order of their passes, with whether these have a graph. In training trunks come twice,
    the second time once all parts that read them are done; otherwise each part comes once."""
    trunks: list[TreePart] = []
    for part in (*parts, None):
        path = {index for index, _ in part.path} if part is not None else set[int]()
        while trunks and trunks[-1].index not in path:
            trunk = trunks.pop()
            if training:
                yield trunk, True
        if part is not None:
            trunks += [part] * part.is_trunk
            yield part, training and not part.is_trunk


def _kinds(parts: Sequence[TreePart], training: bool) -> str:
    """The kinds of all passes (:attr:`Pass.kind`)."""
    return "".join("FG"[has_graph] for _, has_graph in _order(parts, training))


def _together(every: Sequence[str]) -> Iterator[str]:
    """Iterate over kinds of passes that hold those of each rank in its order: without a graph first."""
    while any(every):
        kind = "F" if any(kinds[:1] == "F" for kinds in every) else "G"
        yield kind
        every = [kinds.removeprefix(kind) for kinds in every]


def _empty(kind: str, device: torch.device | str) -> Pass:
    """Make a pass of one row, which no sequence has."""
    none = np.zeros(0, np.int64)
    layout = Layout.from_segments([0, 1], [-1], device)
    ids = torch.zeros(1, 1, dtype=torch.int64, device=layout.device)
    (part,) = plan_parts(PackedSequences(ids, layout, none, none, none > 0), 1)
    return Pass(Branch(part), kind == "G", State(kind == "G"))


def _checked(one: Pass) -> Iterator[Pass]:
    yield one
    if not one.done:
        raise ValueError(
            f"a pass of part {one.part.index} was not run, expected its forward in a with statement, then backward()"
        )


def walk(
    batch: PackedSequences,
    budget: Budget,
    forward: Forward,
    loss: Loss | None = None,
    *,
    gradients: torch.dtype = torch.float32,
    on_host: bool = False,
) -> torch.Tensor:
    """Forward and backward of a tree of any size, a part at a time. Under `torch.no_grad` forward alone.

    Gradients arrive in the parameters as from one backward of the whole batch, whose loss is the sum of the parts'. The
    rows that parts below read run forward twice.

    Args:
        batch: the tree, or several.
        budget: rows that have a graph at a time; or a `Memory`, bytes for these and for all that waits. With a `Memory`
            layers that are checkpointed keep all in the passes in which there is room for it. Or the parts themselves,
            by :func:`dualkv.data.parts.plan_parts`.
        forward: of a part: (input_ids [1, t], branch) -> hidden states [1, t, C]. The attention of each layer is
            `branch.attention(..., layer=...)`, as it is in a transformers model with `dualkv=branch`.
        loss: of a part: (hidden states, part) -> a scalar, the part's share of the loss. It is called for parts that
            predict trained tokens. :func:`dualkv.response_logprobs` takes the part in the place of a batch,
            `part.expand` brings its values to the rollouts, and `part.places` are their places in
            `torch.cat(batch.unpack(...))`. :func:`dualkv.walk_whole` takes losses that are no sum over tokens.
        gradients: torch.float32 or bfloat16, the sums of gradients of kept keys and values (float64 for float64).
        on_host: keep keys, values and states in host memory, pinned for a GPU.

    Returns:
        The sum of the losses, without gradient.

    Raises:
        ValueError: a budget below 1, or below what the smallest parts need; a forward whose attention does not use the
            branch (:meth:`Layout.mark_used` of `branch.layout`); a loss that is not one number, or has no gradient
            where the walk has them; a layer that the second pass of a trunk leaves out.
        TypeError: another batch; a forward or loss that is not a function; a loss that returns no tensor.
        RuntimeError: keys or values that are written in place behind their layer.
    """
    keeping, parts = Keeping(gradients, on_host), parts_of(batch, budget)
    check_functions(forward=(forward, "(input_ids, branch)"))
    check_functions(False, loss=(loss, "(hidden states, part)"))
    total: list[torch.Tensor] = []
    for one in walk_passes(batch, parts, keeping):
        value = None
        with one:
            hidden = forward(one.input_ids, one.branch)
            check_used(one.part.seen, "forward returned hidden states", "dualkv=branch")
            if one.has_loss and loss is not None:
                value = loss(hidden, one.part)
                check_loss(value, one.has_graph)
                total.append(value.detach().reshape(()))
        del hidden
        one.backward(value)
    return torch.stack(total).sum() if total else torch.zeros((), device=batch.device)


def check_functions(needed: bool = True, **given: tuple[object, str]) -> None:
    for name, (function, form) in given.items():
        if not callable(function) and (needed or function is not None):
            raise TypeError(f"{name} is a {type(function).__name__}, expected a function of {form}")


def check_loss(value: object, training: bool) -> None:
    """Raises TypeError or ValueError for what a loss of :func:`walk` must not return."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"loss returned a {type(value).__name__}, expected a tensor: the part's share of the loss")
    if value.numel() != 1:
        raise ValueError(
            f"loss returned a tensor of shape {tuple(value.shape)}, expected one number, the part's share of the loss:"
            " the weighted sum over its tokens"
        )
    if training and not value.requires_grad:
        raise ValueError(
            "loss returned a tensor without a gradient in a walk that has gradients: compute it of the hidden states,"
            " not under torch.no_grad and not detached, or walk under torch.no_grad"
        )
