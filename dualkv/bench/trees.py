"""`dualkv trees`: what packing saves on rollouts, before anyone trains; of a file, or of the drawn traces."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
from rich.table import Table

from dualkv.bench.show import folded
from dualkv.bench.traces import FIGURES, KINDS, Trace
from dualkv.data import breaks
from dualkv.data.files import Source, errors_at, name_of, objects
from dualkv.data.forms import Tokenizer, samples, segments
from dualkv.data.gain import Gain
from dualkv.data.memory import Memory, RowCosts
from dualkv.data.planning import plan_shared
from dualkv.layout import Layout
from dualkv.models import CONFIGS
from dualkv.prefixes import SharedPrefixes, read_sequences


@dataclass(frozen=True)
class Found:
    """Sequences and what they share.

    Attributes:
        name: of the file or the trace.
        shared: prefixes of all sequences.
        trained: tokens that count, in all sequences; None: not known.
        breaks: sentences about places where sequences part and agree again (:mod:`dualkv.data.breaks`).
        unit: what is counted: "tokens", or "bytes" of text that no tokenizer has encoded.
    """

    name: str
    shared: SharedPrefixes
    trained: int | None = None
    breaks: tuple[str, ...] = ()
    unit: str = "tokens"

    @classmethod
    def of_trace(cls, trace: Trace) -> Found:
        trained = sum(p.tokens for sequence in trace.sequences for p in sequence if p.trained)
        return cls(trace.name, prefixes_of(trace.layout()), trained)


ALL = [f"trace-{kind}-0" for kind in KINDS]


def prefixes_of(layout: Layout) -> SharedPrefixes:
    """The full sequences of a layout, one for each segment that none continues, and the prefixes that they share."""
    s = layout._segments
    leaves = np.flatnonzero(s.is_leaf)
    # Depth-first: behind a leaf comes the first segment that the next leaf has for itself.
    common = np.append(0, s.first_position[leaves[:-1] + 1])
    return SharedPrefixes((s.first_position + s.lengths)[leaves], np.arange(len(leaves)), common)


# ---------------------------------------------------------------- a file
def read(path: Source, tokenizer: Tokenizer, min_shared: int = 1, compare_texts: bool = False) -> Found:
    """The rollouts of a file (:func:`dualkv.data.files.objects`), in the forms of :func:`dualkv.data.forms.samples`; or
    trees of :func:`dualkv.data.forms.segments`. Lines of token ids share prefixes with each other; in a folder, those
    of one `.jsonl` file alone, which is a step's batch.

    Args:
        min_shared: as for :func:`dualkv.pack_sequences`.
        compare_texts: decode tokens, to say whether those that differ stand for equal text.

    Raises:
        ValueError: the first error, as `file:line: message`.
        OSError: a file that cannot be read.
    """
    name = name_of(path)
    batches: dict[str, list[list[int]]] = {}  # sequences by the `.jsonl` file, in the order of `lines`
    trees: list[SharedPrefixes] = []
    lines: list[str] = []  # of each sequence
    trained: int | None = 0
    for where, data in objects(path):
        with errors_at(where):
            if "lengths" in data:
                lengths, parent = segments(data)
                tree = prefixes_of(Layout.from_segments(np.append(0, np.cumsum(lengths)), parent))
                trees.append(tree.at_least(min_shared))
                trained = None
                continue
            found = samples(data, tokenizer)
        place = where.removeprefix(name)  # in a folder, a file and its line
        line = f"line {place[1:]}" if place.startswith(":") else place.lstrip(os.sep)
        lines += [f"{line}, sequence {i}" for i in range(len(found))]
        file = where.rpartition(":")[0]
        batch = batches.setdefault(file if file.endswith((".jsonl", ".jsonl.gz")) else "", [])
        for tokens, mask, _ in found:
            batch.append(tokens)
            trained = None if trained is None or mask is None else trained + sum(mask)
    parted: list[breaks.Break] = []
    shares: list[SharedPrefixes] = []
    before = 0  # sequences of the batches before
    for sequences in batches.values():
        host, shared, _ = read_sequences(sequences, min_shared)
        for one in breaks.find(host, shared, tokenizer.decode if compare_texts else None):
            first, second = one.sequences
            parted.append(replace(one, sequences=(before + first, before + second)))
        shares.append(shared.at_least(min_shared))
        before += len(sequences)
    if not shares and not trees:
        raise ValueError(f"{name}: no rollouts in it, expected one JSON object a line")
    said = breaks.described(parted, lines.__getitem__)
    unit = "bytes" if getattr(tokenizer, "used", False) else "tokens"
    return Found(os.path.basename(name), _joined(shares + trees), trained, tuple(said), unit)


def _joined(parts: list[SharedPrefixes]) -> SharedPrefixes:
    """Sequences of several trees, which share nothing with each other."""
    first = np.cumsum([0, *map(len, parts[:-1])])
    return SharedPrefixes(
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.order + at for part, at in zip(parts, first, strict=True)]),
        np.concatenate([part.common for part in parts]),
    )


# ---------------------------------------------------------------- what packing saves
def _sizes(model: str) -> tuple[int, ...]:
    """The hidden size, heads, KV heads, head dim and layers of a model, and the MLP's width that a row meets."""
    c = CONFIGS[model]
    hidden, heads, kv_heads, layers = (
        c[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
    )
    width = c.get("moe_intermediate_size", c["intermediate_size"]) * c.get("num_experts_per_tok", 1)
    return hidden, heads, kv_heads, c.get("head_dim", hidden // heads), layers, width


def flops(model: str, rows: int, pairs: int, head_rows: int) -> float:
    """Count the FLOP of a forward and a backward without recomputation: 6 for a weight and row (of a mixture of
    experts, the weights that a row is routed to), 12 for a pair, head and head dim.

    Gated delta nets count by the recurrence's own products, not by those of a kernel's chunks: a row multiplies the
    state of each head [key dim, value dim] three times (by its key, by its query, and to write), as three weights.

    Args:
        model: a name in :data:`dualkv.models.CONFIGS`; layers with attention count as full attention.
        rows: of the layers. head_rows: of the head.
        pairs: (query, key) pairs of a head.
    """
    c, (hidden, heads, kv_heads, head_dim, layers, width) = CONFIGS[model], _sizes(model)
    mlp = 3 * hidden * width
    with_attention, of_attention, recurrent = layers, 2 * hidden * head_dim * (heads + kv_heads), 0
    if "full_attention_interval" in c:
        with_attention = layers // c["full_attention_interval"]
        of_attention += hidden * head_dim * heads  # a gate of the output
        value_heads, key_dim, value_dim = (
            c[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim")
        )
        keys, values = c["linear_num_key_heads"] * key_dim, value_heads * value_dim
        projections = hidden * (2 * keys + 3 * values + 2 * value_heads)  # q, k; v, a gate, the output; decay and beta
        convolution = c["linear_conv_kernel_dim"] * (2 * keys + values)
        recurrent = projections + convolution + 3 * value_heads * key_dim * value_dim
    weights = layers * mlp + with_attention * of_attention + (layers - with_attention) * recurrent
    of_pairs = 12.0 * pairs * heads * head_dim * with_attention
    return 6.0 * weights * rows + of_pairs + 6.0 * c["vocab_size"] * hidden * head_rows


def row_costs(model: str) -> RowCosts:
    """Estimate what a row of a named model takes, in bf16 with transformers' own layers, from the sizes of a layer.

    The factors were fitted to :func:`dualkv.measure_rows` of small Qwen3 models. Every layer counts as attention.
    """
    hidden, heads, kv_heads, head_dim, layers, width = _sizes(model)
    q, kv = heads * head_dim, kv_heads * head_dim
    graph = 17 * hidden + 8 * width + 10 * (q + kv)
    recomputed = 20 * hidden + 12 * width + 10.5 * (q + kv)
    pairs = (2 * hidden * (q + kv) + 3 * hidden * width) / (2 * q)
    of_layers = layers * graph, 2 * layers * hidden + recomputed
    return RowCosts(layers * 12 * kv, 12 * q + 8 * kv, *of_layers, pairs, kv_heads)


@dataclass(frozen=True)
class Summary:
    """Attributes:
    sequences: their number. tokens: of all of them. packed_tokens: each shared token once.
    share_ratio: tokens over packed_tokens.
    depth: levels of the deepest tree. segments: their number; shortest, median, longest: tokens of them.
    flop_ratio: of an update of `model`, replicated over packed.
    saved, pays, verdict: by :mod:`dualkv.data.gain`, whatever the model.
    plan: what :func:`dualkv.plan_in_memory` says of the rollouts in a limit of memory; "" without one.
    breaks, unit: as of :class:`Found`.
    """

    name: str
    sequences: int
    tokens: int
    packed_tokens: int
    share_ratio: float
    depth: int
    segments: int
    shortest: int
    median: float
    longest: int
    model: str
    flop_ratio: float
    saved: float
    pays: bool
    verdict: str
    breaks: tuple[str, ...]
    unit: str = "tokens"
    plan: str = ""

    @classmethod
    def of(cls, found: Found, model: str, gib: float | None = None) -> Summary:
        """gib: the limit of memory."""
        if model not in CONFIGS:
            raise ValueError(f"model is {model!r}, expected one of {', '.join(CONFIGS)}")
        tree, gain = found.shared.tree(), Gain.of(found.shared)
        layout = Layout.from_segments(tree.offsets, tree.parent)
        # Where it is not known which tokens count, the head runs on all rows.
        every = gain.replicated_rows, gain.rows
        head = every if found.trained is None else (found.trained, min(found.trained, gain.rows))
        plan = "" if gib is None else str(plan_shared(found.shared, Memory(gib * 2**30, row_costs(model))))
        before = flops(model, gain.replicated_rows, gain.replicated_pairs, head[0])
        after = flops(model, gain.rows, gain.pairs, head[1])
        return cls(
            found.name, len(found.shared), gain.replicated_rows, gain.rows, gain.ratio, layout.depth, len(tree.length),
            int(tree.length.min()), float(np.median(tree.length)), int(tree.length.max()), model, before / after,
            gain.saved, gain.pays, str(gain), found.breaks, found.unit, plan,
        )  # fmt: skip


def table(summaries: list[Summary]) -> Table:
    names = "rollouts", "sequences", "tokens", "packed", "share ratio", "depth", "segments", "their lengths", "FLOP"
    shown = Table(*folded(*names))
    shown.caption = (
        "packed: as trees, also across prompts (in veRL with dualkv_trees=True); share ratio: tokens / packed; "
        f"lengths: shortest, median, longest; FLOP: of an update of {summaries[0].model},"
        " sequences one by one / packed"
    )
    shown.caption_justify = "left"
    for s in summaries:
        lengths = f"{s.shortest}, {s.median:g}, {s.longest}"
        counts = (f"{n:,}" for n in (s.sequences, s.tokens, s.packed_tokens))
        shown.add_row(
            s.name, *counts, f"{s.share_ratio:.2f}", str(s.depth), f"{s.segments:,}", lengths, f"{s.flop_ratio:.2f}x"
        )
    return shown


def sources() -> Table:
    """Every number that traces are drawn from."""
    shown = Table("traces", "number", "value", "source")
    used: dict[str, list[str]] = {}
    for kind, (_, figures, _) in KINDS.items():
        used.setdefault(figures, []).append(kind)
    for figures, kinds in used.items():
        for name, (value, source) in FIGURES[figures].items():
            shown.add_row(", ".join(kinds), name, f"{value:g}", source)
    return shown
