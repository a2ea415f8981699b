"""`python -m tools.drawings`: draw the pictures of README and docs anew; a test holds the files to that.

Rows, visibility and the walk over key blocks are those of a layout and its plan. Figures are recorded under
docs/results/; `tools/plots.py` draws the plots of them. Each picture has its own ground, light or dark as the reader's
browser is.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import dualkv
from cute_kernels.abi import ForwardFields as items
from dualkv.ops.plan.forward import forward_work
from dualkv.segments import segments_of
from tools import filed, plots
from tools.tables import RESULTS

DOCS = Path(__file__).parent.parent / "docs"
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 11px; }
.on { fill: #ffffff; }
.title { font-weight: 600; }
.number { font-weight: 600; fill: #1f2328; }
.ground { fill: #ffffff; stroke: #d0d7de; }
.hidden { fill: #eaeef2; }
.line { fill: none; stroke: #1f2328; stroke-width: 1.5; }
.cut { fill: none; stroke: #ffffff; }
.dash { stroke-dasharray: 5 4; }
.grid { fill: none; stroke: #d0d7de; }
.ring { stroke-width: 2; fill: none !important; }
.ring.prompt { stroke: #4493f8; }
.ring.own { stroke: #f0883e; }
.prompt { fill: #4493f8; }
.own { fill: #f0883e; }
.other { fill: #d4a72c; }
.third { fill: #57ab5a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; }
.ground { fill: #0d1117; stroke: #3d444d; }
.hidden { fill: #262c36; }
.line { stroke: #e6edf3; }
.cut { stroke: #0d1117; }
.grid { stroke: #3d444d; }
}
</style>"""
RESPONSES = ("own", "other", "third")  # classes of the responses' colours


def _picture(width: int, height: int, title: str, parts: list[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    ground = f'<rect class="ground" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    used = {kind for kinds in re.findall(r'class="([^"]*)"', "".join([ground, *parts])) for kind in kinds.split()}
    kinds = {line: re.match(r"\.(\w+)", line) for line in STYLE.splitlines()}
    style = "\n".join(line for line, kind in kinds.items() if kind is None or kind[1] in used)
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{title}</title>", style, ground]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    more = f' class="{kind}"' * bool(kind) + f' text-anchor="{anchor}"' * (anchor != "start")
    return f'<text x="{x:g}" y="{y:g}"{more}>{text}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>'


def _labelled(x: float, y: float, width: float, height: float, kind: str, label: str) -> list[str]:
    box = _box(x, y, width - 1.5, height, kind)
    return [box, _text(x + width / 2, y + height / 2 + 4.5, label, "on", "middle")]


def packed_groups() -> str:
    """Draw rollouts of one prompt replicated and packed: their tokens, rows and positions, with lengths to scale."""
    prompt, response, n, shown = 8192, 2048, 32, 3
    layout = dualkv.Layout.from_lengths([prompt], [[response] * n])
    positions = layout.position_ids.tolist()
    left, row, unit, gap = 24.0, 26.0, 352 / prompt, 40.0
    replicated = f"Replicated: {n} sequences of {prompt:,} + {response:,} tokens"
    packed = f"Packed: the prompt of {prompt:,} tokens once, then {n} responses of {response:,}"
    width = 2 * left + (prompt + (shown + 1) * response) * unit + gap
    parts = [_text(left, 32, replicated, "title")]
    parts.append(_text(width - left, 32, f"{layout.nominal_tokens:,} tokens", "title", "end"))
    y = 44.0
    for i in range(shown):
        parts += _labelled(left, y, prompt * unit, row, "prompt", "prompt")
        parts += _labelled(left + prompt * unit, y, response * unit, row, RESPONSES[i], f"response {i + 1}")
        y += row + 6
    parts.append(_text(left + prompt * unit, y + 12, f"and {n - shown} more", "", "middle"))
    y += 50
    parts.append(_text(left, y, packed, "title"))
    parts.append(_text(width - left, y, f"{layout.num_tokens:,} tokens", "title", "end"))
    y += 12
    x = left
    for segment in (*range(shown + 1), n):
        first = int(layout.offsets[segment])
        length = response if segment else prompt
        if segment == n:
            parts.append(_text(x + gap / 2, y + row / 2 + 4, "...", "", "middle"))
            x += gap
        kind, name = ("prompt", "prompt") if segment == 0 else (RESPONSES[(segment - 1) % 3], f"response {segment}")
        parts += _labelled(x, y, length * unit, row, kind, name)
        parts.append(_text(x + 2, y + row + 16, f"row {first:,}", "small"))
        parts.append(_text(x + 2, y + row + 31, f"position {positions[first]:,}", "small"))
        x += length * unit
    said = "Every response attends to the one prompt. Its positions go on from the prompt's end."
    parts.append(_text(left, y + row + 58, said))
    return _picture(round(width), round(y + row + 74), "Rollouts of one prompt, replicated and packed", parts)


def _walk(item: list[int], tile_n: int) -> list[int]:
    """First keys of a tile's blocks in the order in which the forward walks them (cute_kernels/work.py)."""

    def blocks(begin: int, end: int) -> list[int]:
        return list(range(begin, end, tile_n))

    context = blocks(item[items.CONTEXT_BEGIN], item[items.CONTEXT_END])
    own = blocks(item[items.OWN_BEGIN], item[items.ROW_END])
    context_whole, own_whole = len(context) - item[items.CONTEXT_MASKED], len(own) - item[items.OWN_MASKED]
    return [*own[own_whole:][::-1], *context[context_whole:][::-1], *context[:context_whole], *own[:own_whole]]


def two_regions() -> str:
    """Draw which keys each query sees, with one tile of the forward and two key blocks of the backward."""
    tokens, tile_n, cell = 8, 4, 11.0
    layout = dualkv.Layout.from_lengths([14], [[18, 8]])
    segments = segments_of(layout.offsets, layout.parent)
    total, end = layout.num_tokens, segments.visible_end.tolist()
    tile = next(w for w in forward_work(segments, tokens, tile_n).tolist() if w[items.ROW] == 24)
    left, top, apart = 92.0, 78.0, 60.0

    boxes: dict[str, str] = {}  # outlines of a class, in one path
    for q in range(total):
        for first, last, kind in _runs(q, end, segments.segment_of_row.tolist()):
            width, height = (last - first) * cell, cell - 1
            outline = f"M{left + first * cell:g} {top + q * cell:g}h{width:g}v{height:g}h{-width:g}z"
            boxes[kind] = boxes.get(kind, "") + outline
    cuts = [row * cell for row in layout.offsets.tolist()[1:-1]]
    far = total * cell
    crossing = "".join(f"M{left:g} {top + at:g}h{far:g}M{left + at:g} {top:g}v{far:g}" for at in cuts)
    matrix = [*(f'<path class="{kind}" d="{outline}"/>' for kind, outline in boxes.items())]
    matrix += [f'<path class="cut" d="{crossing}"/>', _text(left, top - 8, "key rows", "small")]

    parts = [_text(left, 30, "Forward: a tile of query rows walks two regions of keys", "title")]
    parts += [_text(left, 48, "numbers: order of key blocks; 1 to 4 are masked, 5 to 9 lie wholly in view", "small")]
    parts += ['<g id="matrix">', *matrix, "</g>"]
    height = (tile[items.ROW_END] - tile[items.ROW]) * cell
    y = top + tile[items.ROW] * cell
    for number, key in enumerate(_walk(tile, tile_n), 1):
        region_end = tile[items.CONTEXT_END if key < tile[items.CONTEXT_END] else items.ROW_END]
        width = (min(key + tile_n, region_end) - key) * cell  # keys past a region's end are masked, and not drawn
        parts.append(_box(left + key * cell, y, width, height, "line"))
        parts.append(_text(left + key * cell + width / 2, y + height - 6, str(number), "number", "middle"))
    for name, segment in (("prompt", 0), ("response 1", 1), ("response 2", 2)):
        middle = top + (layout.offsets[segment] + layout.offsets[segment + 1]).item() / 2 * cell
        parts.append(_text(left - 8, middle + 4, name, "small", "end"))
    parts.append(_text(left - 8, top - 8, "query rows", "small", "end"))

    right = left + total * cell + apart
    parts.append(_text(right, 30, "Backward: a block of keys walks one run of query rows", "title"))
    parts.append(
        _text(right, 48, "key k is seen by the rows k &lt;= q &lt; visible_end[k], from the last one up", "small")
    )
    parts.append(f'<use href="#matrix" x="{right - left:g}"/>')
    for key in (4, 18):
        first, last = key, end[key]
        parts.append(_box(right + key * cell, top + first * cell, tile_n * cell, (last - first) * cell, "line"))
        x = right + (key + tile_n / 2) * cell
        parts.append(f'<path class="line" d="M{x:g} {top + last * cell - 6:g}v-40l-5 8m5 -8l5 8"/>')
    legend = top + total * cell + 26
    for x, kind, name in (
        (left, "prompt", "the context: keys of the prompt"),
        (left + 240, "own", "keys of the own segment"),
    ):
        parts += [_box(x, legend - 10, 12, 12, kind), _text(x + 18, legend, name, "small")]
    parts += [_box(left + 430, legend - 10, 12, 12, "hidden"), _text(left + 448, legend, "hidden", "small")]
    width = right + total * cell + 30
    return _picture(round(width), round(legend + 20), "Visibility, a forward tile and backward key blocks", parts)


def _runs(q: int, end: list[int], segment: list[int]) -> list[tuple[int, int, str]]:
    """(first key, one past the last key, class) of a query row's neighbouring keys of one kind."""
    kinds = []
    for k in range(len(end)):
        sees = k <= q < end[k]
        kinds.append("hidden" if not sees else "prompt" if segment[k] == 0 else "own")
    starts = [k for k in range(len(kinds)) if k == 0 or kinds[k] != kinds[k - 1]]
    return [(a, b, kinds[a]) for a, b in zip(starts, [*starts[1:], len(kinds)], strict=True)]


def _path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line through points; tenths of a pixel, each point from the one before."""
    rounded = [(round(x, 1), round(y, 1)) for x, y in points]
    steps = [f"{c - a:.1f} {d - b:.1f}".replace(".0", "") for (a, b), (c, d) in itertools.pairwise(rounded)]
    return f'<path class="{kind}" d="M{rounded[0][0]:g} {rounded[0][1]:g}l{" ".join(steps)}"/>'


def roofline() -> str:
    """The profiled kernels under the roofs of tensor cores, DRAM and L2."""
    left, top, decade, tall = 62.0, 52.0, 130.0, 150.0  # pixels of a factor of ten
    lowest, highest, least, most = 10.0, 1e5, 50.0, 1500.0  # FLOP a byte, TFLOP/s

    def x(flop_a_byte: float) -> float:
        return left + decade * math.log10(flop_a_byte / lowest)

    def y(tflops: float) -> float:
        return top + tall * math.log10(most / tflops)

    recorded = filed.read(RESULTS / "profile-h200.json")
    profiles = {profile["direction"]: profile for profile in recorded["profiles"]}
    kernels = {direction: profile["kernels"][0] for direction, profile in profiles.items()}
    peaks = kernels["fwd"]["peaks"]
    commits = ", ".join(dict.fromkeys(f"{p['commit'][:7]}" for p in profiles.values()))
    title = f"Roofline, {recorded['gpu']['name']}: kernels of commit {commits}, {profiles['fwd']['workload']}"
    parts = [_text(24, 30, title, "title")]
    for rate in (100, 300, 1000):
        parts.append(f'<path class="grid" d="M{left:g} {y(rate):.1f}H{x(highest):g}"/>')
        parts.append(_text(left - 6, y(rate) + 4, str(rate), "small", "end"))
    for power in range(1, 6):
        at = x(10.0**power)
        parts.append(f'<path class="grid" d="M{at:g} {top:g}V{y(least):.1f}"/>')
        parts.append(_text(at, y(least) + 16, f"{10**power:,}", "small", "middle"))
    tensor = peaks["tensor"] / 1e12
    for level, kind in (("dram", "line"), ("l2", "line dash")):
        bandwidth = peaks[level] / 1e12
        begin = max(lowest, least / bandwidth)
        roof = [(x(begin), y(begin * bandwidth)), (x(tensor / bandwidth), y(tensor)), (x(highest), y(tensor))]
        parts.append(_path(roof, kind))
    clock = kernels["fwd"]["sm_clock_hz"] / 1e9
    legend = [
        ("line", f"DRAM {peaks['dram'] / 1e12:.1f} TB/s; tensor cores {tensor:.0f} TFLOP/s at {clock:.2f} GHz"),
        ("line dash", f"L2 {peaks['l2'] / 1e12:.1f} TB/s"),
    ]
    row, from_x = y(least) - 70, x(400)
    for kind, name in legend:
        parts += [_path([(from_x - 10, row), (from_x + 10, row)], kind), _text(from_x + 18, row + 4, name, "small")]
        row += 17
    for direction, color in (("fwd", "prompt"), ("bwd", "own")):
        kernel = kernels[direction]
        rate = kernel["flops"] / kernel["seconds"] / 1e12
        for moved, kind in ((kernel["dram_bytes"], color), (kernel["l2_bytes"], f"ring {color}")):
            at = kernel["flops"] / moved
            parts.append(f'<circle class="{kind}" cx="{x(at):.1f}" cy="{y(rate):.1f}" r="5"/>')
        name = "forward" if direction == "fwd" else "backward"
        parts.append(f'<circle class="{color}" cx="{from_x:g}" cy="{row:g}" r="5"/>')
        parts.append(_text(from_x + 18, row + 4, f"{name}: {rate:.0f} TFLOP/s", "small"))
        row += 17
    parts.append(_text(left, y(least) + 36, "useful FLOP a byte (filled: DRAM, ring: L2)", "small"))
    parts.append(_text(24, top - 6, "useful TFLOP/s", "small"))
    return _picture(round(x(highest) + 40), round(y(least) + 50), "Roofline of the profiled kernels", parts)


# Plots: what draws them, and the records in docs/results/ that they show. Without its records a plot is not drawn.
PLOTS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "attention-h200.svg": (plots.attention, ("forward", "backward", "forward-head-dims", "backward-head-dims")),
    "agents-h200.svg": (plots.agents, ("verl-h200-traces", "trl-h200-traces")),
    "real-model-h200.svg": (plots.learning, ("real-model-h200",)),
    "prompt-share-h200.svg": (plots.prompt_share, ("prompt-share-h200", "prompt-share-high-h200")),
}


def _plot(name: str) -> str:
    draw, records = PLOTS[name]
    return draw(*(filed.read(RESULTS / f"{record}.json") for record in records))


PICTURES: dict[str, Callable[[], str]] = {
    "packed-groups.svg": packed_groups,
    "two-regions.svg": two_regions,
    "roofline-h200.svg": roofline,
    **{
        name: functools.partial(_plot, name)
        for name, (_, records) in PLOTS.items()
        if all((RESULTS / f"{record}.json").exists() for record in records)
    },
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / name).write_text(draw())
