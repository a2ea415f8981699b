"""`python -m tools.bench.invariance`: attention whose bits do not depend on the batch, and what that costs.

`rows` counts the rows of `dualkv.attention` that change their bits with what they are packed with. Random layouts of
groups and trees, head dims, GQA ratios, dtypes, features and sizes of scores. Each layout is computed as a whole, and
some of its sequences again: alone, a few of them, groups in another order, and of half of the KV heads. A row counts
as differing if a bit of its out or lse does. `cost` times the forward on named workloads. `update` counts the
log-probs of a model that differ between micro-batches, and times its forward, its head and its update. `sampler` says
how far other attention, over a whole sequence or of one query at a time as a sampler computes it, is from these bits.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import dualkv
from dualkv import Layout
from dualkv.bench.inputs import Inputs
from dualkv.bench.run import in_words
from dualkv.bench.workloads import EIGHT, SLOW, parse
from dualkv.integrations.transformers import enable, head, recompute_layers
from dualkv.integrations.transformers.invariant import differing_rows
from tools.bench import harness, stock_attention
from tools.bench.record import OptionalJsonPath, Record

HEADS = ((64, 64, 8, 1), (64, 64, 4, 4), (128, 128, 8, 2), (128, 128, 7, 1), (128, 128, 2, 2), (256, 256, 8, 4))
OTHERS = ((96, 96, 4, 2), (192, 192, 4, 1), (192, 128, 4, 4), (512, 512, 4, 2))
FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"window": 100}, {"window": 3000}, {"chunk": 200}, {"softcap": 30.0}, {"sinks": True},
)  # fmt: skip
COST = (*EIGHT, "agent-t10-r512", "n32-p8192-r2048-d64-gqa8", "n32-p8192-r2048-d256-gqa4", SLOW[0])
COUNTED = ("layouts", "rows", "differ", "layouts_that_differ")
FEATURES_OF_KERNELS = (("window", True), ("window", False), ("softcap", False), ("sinks", False))  # whether short


class Case(NamedTuple):
    """A layout and a call: lengths and parents of segments; D, Dv, H and Hk; what scores are multiplied by."""

    lengths: tuple[int, ...]
    parent: tuple[int, ...]
    heads: tuple[int, int, int, int]
    dtype: str
    scale: float
    features: dict[str, Any]
    seed: int


def length(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.15:
        return rng.randint(0, 3)
    if kind < 0.4:
        return rng.randint(1, 100)
    return rng.randint(1, 600) if kind < 0.9 else rng.randint(600, 2500)


def draw(rng: random.Random, seed: int) -> Case:
    """A case of up to 6,000 rows: prompts with responses, every third one with trees of up to five levels."""
    lengths: list[int] = []
    parent: list[int] = []
    deep = rng.random() < 0.35
    for _ in range(rng.randint(1, 3)):
        path = [len(lengths)]
        lengths.append(length(rng))
        parent.append(-1)
        for _ in range(rng.randint(1, 9)):
            level = rng.randint(1, min(len(path), 4)) if deep else 1
            parent.append(path[level - 1])
            path = [*path[:level], len(lengths)]
            lengths.append(length(rng))
        if sum(lengths) > 6000:
            break
    heads = rng.choice(HEADS if rng.random() < 0.9 else OTHERS)
    features = rng.choice(FEATURES) if rng.random() < 0.4 and heads in HEADS else {}
    dtype = rng.choice(("bf16", "bf16", "fp16"))
    return Case(tuple(lengths), tuple(parent), heads, dtype, rng.choice((1.0, 4.0, 8.0, 30.0)), features, seed)


def parts(case: Case, rng: random.Random) -> Iterator[list[int]]:
    """Segments of some sequences at a time, in the order of a layout of their own."""
    parent = case.parent
    leaves = [s for s in range(len(parent)) if s not in parent]
    groups = [s for s in range(len(parent)) if parent[s] < 0]
    root: dict[int, int] = {}
    for s, p in enumerate(parent):
        root[s] = s if p < 0 else root[p]
    for count in {1, 2, max(len(leaves) // 2, 1), len(leaves)}:
        some, taken = rng.sample(leaves, min(count, len(leaves))), set()
        for s in some:
            while s >= 0 and s not in taken:
                taken.add(s)
                s = parent[s]
        order = rng.sample(groups, len(groups))
        yield [s for group in order for s in range(len(parent)) if s in taken and root[s] == group]


def differing(case: Case, device: str, rng: random.Random, **asked: Any) -> tuple[int, int]:
    """(rows that differ, rows compared), over all parts of a case."""
    dim, dim_v, heads, kv_heads = case.heads
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
    offsets = np.cumsum([0, *case.lengths])
    generator = torch.Generator(device).manual_seed(case.seed)

    def made(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(int(offsets[-1]), heads, dim, device=device, dtype=torch.float32, generator=generator)

    q, k, v = (made(heads, dim) * case.scale).to(dtype), made(kv_heads, dim).to(dtype), made(kv_heads, dim_v).to(dtype)
    features = dict(case.features)
    if "sinks" in features:
        features["sinks"] = torch.randn(heads, device=device, generator=generator) * case.scale

    def call(segments: list[int], of_kv: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(np.concatenate([np.arange(offsets[s], offsets[s + 1]) for s in segments])).to(device)
        place = {s: i for i, s in enumerate(segments)}
        layout = Layout.from_segments(
            np.cumsum([0, *(case.lengths[s] for s in segments)]).tolist(),
            [place.get(case.parent[s], -1) for s in segments],
            device,
        )
        of_q = of_kv * (heads // kv_heads)
        given = dict(features)
        if "sinks" in given:
            given["sinks"] = given["sinks"][:of_q]
        some_q, some_k, some_v = (x[rows, :n].contiguous() for x, n in ((q, of_q), (k, of_kv), (v, of_kv)))
        given |= asked
        out, lse = dualkv.attention(some_q, some_k, some_v, layout, **given, return_lse=True)
        return out, lse, rows

    out, lse, _ = call(list(range(len(case.lengths))), kv_heads)
    bad = compared = 0
    for segments in parts(case, rng):
        fewer = kv_heads if kv_heads == 1 or rng.random() < 0.8 else kv_heads // 2
        its_out, its_lse, rows = call(segments, fewer)
        of_q = its_out.shape[1]
        same = (its_out == out[rows, :of_q]).flatten(1).all(1) & (its_lse == lse[:of_q, rows]).all(0)
        bad += int((~same).sum())
        compared += len(rows)
    return bad, compared


app = typer.Typer(help=__doc__)


def counted(layouts: int, seed: int, seconds: float, device: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Counts over random layouts, and the first five of those that differ."""
    rng, begin = random.Random(seed), time.time()
    counts: Counter[str] = Counter()
    first: list[dict[str, Any]] = []
    for number in range(layouts):
        if time.time() - begin > seconds:
            break
        case = draw(rng, number)
        if sum(case.lengths) == 0:
            continue
        bad, compared = differing(case, device, rng, **asked)
        counts.update(layouts=1, rows=compared, differ=bad, layouts_that_differ=bad > 0)
        if bad and len(first) < 5:
            first.append(case._asdict() | {"differ": bad, "of": compared})
    return {"counts": counts, "first": first}


@app.command()
def rows(
    layouts: Annotated[int, typer.Option(help="random layouts")] = 5000,
    seconds: Annotated[float, typer.Option(help="no layout begins after so many")] = math.inf,
    seed: int = 0,
    processes: Annotated[int, typer.Option(help="that share the GPU; each has a seed of its own")] = 1,
    device: str = "cuda",
    as_it_stands: Annotated[bool, typer.Option(help="without batch_invariant")] = False,
    json: OptionalJsonPath = None,
) -> None:
    """Count rows that differ in bits over random layouts."""
    record = Record(json, gpu=device != "cpu")
    asked = {} if as_it_stands else {"batch_invariant": True}
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        shares = [len(range(i, layouts, processes)) for i in range(processes)]
        parts = [pool.submit(counted, n, seed + i, seconds, device, asked) for i, n in enumerate(shares)]
        done = [part.result() for part in parts]
    counts = sum((one["counts"] for one in done), Counter(dict.fromkeys(COUNTED, 0)))
    first = [case for one in done for case in one["first"]][:5]
    found = {"seed": seed, "processes": processes, "batch_invariant": not as_it_stands}
    found |= {name: counts[name] for name in COUNTED} | {"first": first}
    record.write(found, found)
    raise SystemExit(counts["differ"] > 0 and not as_it_stands)


@app.command()
def cost(
    workload: Annotated[list[str] | None, typer.Option("-w", help="by name; repeat it")] = None,
    seconds: Annotated[float, typer.Option(help="of a turn")] = 2.0,
    turns: Annotated[int, typer.Option(help="of each side")] = 3,
    json: OptionalJsonPath = None,
) -> None:
    """Measure the forward with and without `batch_invariant`, in turns; the best turn of each counts."""
    record, results = Record(json), []
    for one in map(parse, workload or COST):
        best = measured(Inputs(one), seconds, turns)
        ratio = best[True] / best[False]
        results.append({"workload": one.name, "ms": best[False], "ms_batch_invariant": best[True], "ratio": ratio})
        record.write({"seconds_a_turn": seconds, "turns": turns, "results": results}, results[-1])


@torch.no_grad()
def measured(inputs: Inputs, seconds: float, turns: int) -> dict[bool, float]:
    """Milliseconds of a forward without and with `batch_invariant`: the best of their turns."""
    best = {False: math.inf, True: math.inf}
    for _, asked in itertools.product(range(turns), best):
        call = partial(dualkv.attention, inputs.q, inputs.k, inputs.v, inputs.layout, batch_invariant=asked)
        best[asked] = min(best[asked], milliseconds(call, seconds))
    return best


@dataclass(frozen=True)
class Update:
    """A model and a group of responses, the longest of `response_len` tokens and the shortest of a quarter of it."""

    model: harness.Model = "qwen3-8b"
    layers: harness.Layers = 8
    responses: harness.Responses = 32
    prompt_len: harness.PromptLen = 8192
    response_len: harness.ResponseLen = 2048
    chunk_size: int = 1024


MICRO_BATCHES = (1, 3, 5)  # responses at a time, whose log-probs are compared with those of the whole group


@app.command()
@harness.takes(Update)
def update(
    json_to: OptionalJsonPath = None,
    sizes: Update = Update(),
    seconds: Annotated[float, typer.Option(help="of a turn")] = 2.0,
    turns: Annotated[int, typer.Option(help="of each side")] = 3,
    device: str = "cuda",
) -> None:
    """Measure a model with and without `batch_invariant`: rows that differ, and times in turns.

    Every layer is recomputed in the backward. `update` is forward, head and backward; `layers` is the forward of the
    layers alone, `attention` what of that is attention, `head` log-probs and their gradients of hidden states.
    """
    record = Record(json_to, gpu=device != "cpu")
    found = updated(sizes, torch.device(device), seconds, turns)
    record.write({"sizes": asdict(sizes), "seconds_a_turn": seconds, "turns": turns, **found}, found)
    differ = found["differ"]["batch_invariant"]
    raise SystemExit(differ["hidden_states"] + differ["logp"] > 0)


def updated(sizes: Update, device: torch.device, seconds: float, turns: int) -> dict[str, Any]:
    """Rows that differ and times of a model, each with and without `batch_invariant`."""
    config = harness.make_config(sizes.model, sizes.layers)
    model = harness.make_model(config, "bfloat16", device)
    n, p, r = sizes.responses, sizes.prompt_len, sizes.response_len
    draw = torch.Generator().manual_seed(0)
    lengths = [r - (r - r // 4) * i // max(n - 1, 1) for i in range(n)]
    prompt, *drawn = (torch.randint(config.vocab_size, (length,), generator=draw).tolist() for length in (p, *lengths))

    def batch(of: list[int]) -> dualkv.PackedBatch:
        return dualkv.pack([prompt], [[drawn[i] for i in of]], device=device)

    def hidden(packed: dualkv.PackedBatch) -> torch.Tensor:
        states: torch.Tensor = model.get_decoder()(packed.input_ids, dualkv=packed.layout, use_cache=False)[0]
        return states.flatten(0, 1)

    def logp(packed: dualkv.PackedBatch, states: torch.Tensor) -> torch.Tensor:
        return dualkv.response_logprobs(states, head(model), packed, chunk_size=sizes.chunk_size)[0]

    enable(model)
    whole = batch([*range(n)])
    with torch.no_grad():
        states = hidden(whole)
    q, k, v = (
        torch.randn(len(states), heads, config.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    )

    def one_update() -> None:
        logp(whole, hidden(whole)).sum().backward()
        model.zero_grad(set_to_none=True)

    def one_head() -> None:
        logp(whole, states.detach().requires_grad_()).sum().backward()
        model.zero_grad(set_to_none=True)

    @torch.no_grad()
    def attention(asked: bool) -> None:
        for _ in range(sizes.layers):
            dualkv.attention(q, k, v, whole.layout, batch_invariant=asked)

    names = {False: "as_ever", True: "batch_invariant"}
    ms: dict[str, dict[str, float]] = {name: {} for name in names.values()}
    differ = {}
    for turn, asked in itertools.product(range(turns), names):
        enable(model, batch_invariant=asked, check=False)
        recompute_layers(model)
        if turn == 0:
            differ[names[asked]] = {"hidden_states": differing_rows(model.get_decoder())}
            together = [x.detach() for x in whole.unpack(logp(whole, hidden(whole)))]
            differ[names[asked]] |= {"logp": 0, "compared": 0}
            for of in (list(range(n))[i : i + size] for size in MICRO_BATCHES for i in range(0, n, size)):
                some = batch(of)
                with torch.no_grad():
                    again = some.unpack(logp(some, hidden(some)))
                for i, x in zip(of, again, strict=True):
                    differ[names[asked]]["logp"] += int((x != together[i]).sum())
                    differ[names[asked]]["compared"] += len(x)
        calls: dict[str, Callable[[], Any]] = {
            "update": one_update,
            "layers": torch.no_grad()(partial(hidden, whole)),
            "attention": partial(attention, asked),
            "head": one_head,
        }
        for name, call in calls.items():
            took = milliseconds(call, seconds)
            ms[names[asked]][name] = min(ms[names[asked]].get(name, math.inf), took)
    ratios = {name: ms["batch_invariant"][name] / took for name, took in ms["as_ever"].items()}
    return {"differ": differ, "ms": ms, "ratios": ratios}


@app.command()
def sampler(
    json: OptionalJsonPath = None,
    prompt_len: int = 8192,
    response_len: int = 1024,
    device: str = "cuda",
    only: Annotated[str, typer.Option(help=f"Of {', '.join(stock_attention.CALLS)}, by commas.")] = "fa4,cudnn,fa2",
) -> None:
    """Compare rows of a response with those of other kernels: 32 heads on 8, head dim 128, bf16.

    `prefill` is the whole sequence at a time, `decode` one query with the keys up to it, of every 16th row; `uncut` is
    the prompt with the response as one segment. The second prompt is no whole number of blocks of keys.
    """
    record, results = Record(json, gpu=device != "cpu"), []
    for prompt, scale in itertools.product((prompt_len, prompt_len + 8), (1.0, 4.0)):
        found = of_samplers(prompt, response_len, scale, torch.device(device), only.split(","))
        results.append({"prompt_len": prompt, "scores_times": scale, **found})
        record.write({"response_len": response_len, "results": results}, results[-1])


@torch.no_grad()
def of_samplers(prompt: int, response: int, scale: float, device: torch.device, names: list[str]) -> dict[str, Any]:
    """Measure by kernel the shares of rows (of one head) and of elements whose bits are not those of `batch_invariant`,
    and the rms error against fp64, relative to the rms of the output."""
    torch.manual_seed(0)
    total = prompt + response
    q, k, v = (torch.randn(total, heads, 128, device=device, dtype=torch.bfloat16) for heads in (32, 8, 8))
    q = q * scale
    rows = torch.arange(prompt, total, 16, device=device)
    layout = Layout.from_lengths([prompt], [[response]], device=device)
    own = dualkv.attention(q, k, v, layout, batch_invariant=True)[rows]
    want = torch.stack([exact(q[i], k[: i + 1], v[: i + 1]) for i in rows.tolist()])
    uncut = Layout.from_segments([0, total], [-1], device)
    outs = {"dualkv": own, "dualkv, uncut": dualkv.attention(q, k, v, uncut, batch_invariant=True)[rows]}
    failed: dict[str, str] = {}
    for name in names:
        call = stock_attention.CALLS[name]
        try:
            outs[f"{name}, prefill"] = call(q[None], k[None], v[None], stock_attention.Rule())[0, rows]
            last = [one_query(name, q[i][None, None], k[None, : i + 1], v[None, : i + 1]) for i in rows.tolist()]
            outs[f"{name}, decode"] = torch.cat(last)[:, 0]
        except Exception as error:
            failed[name] = in_words(error)
    figures = {}
    for name, out in outs.items():
        apart = out != own
        figures[name] = {
            "rows_that_differ": apart.any(2).double().mean().item(),
            "elements_that_differ": apart.double().mean().item(),
            "rms_from_dualkv": relative(out.double() - own.double(), want),
            "rms_error": relative(out.double() - want, want),
        }
    return {"kernels": figures, "failed": failed}


def one_query(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [1, 1, H, D] behind k, v [1, L, Hk, D] -> [1, 1, H, D]."""
    if name == "fa4":
        return stock_attention.CALLS[name](q, k, v, stock_attention.Rule())  # the query is aligned with the last key
    backend = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[name]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel([backend]):
        return scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [H, D], k, v [L, Hk, D] -> [H, D] in fp64."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = torch.einsum("jgd,ljd->jgl", q.view(k.shape[1], -1, q.shape[1]), k) * q.shape[1] ** -0.5
    return torch.einsum("jgl,ljd->jgd", scores.softmax(-1), v).flatten(0, 1)


def relative(apart: torch.Tensor, to: torch.Tensor) -> float:
    return float(apart.square().mean().sqrt() / to.square().mean().sqrt())


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    """Time of a call, the mean of as many as take so many seconds."""
    call()
    harness.wait()
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for _ in range(3):
            call()
        calls += 3
        harness.wait()
    return (time.perf_counter() - begin) / calls * 1e3


if __name__ == "__main__":
    app()
