"""Traces of agents: the trees that they are drawn as, and what they print."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from rich.console import Console

import dualkv
from dualkv.bench import show, traces, trees
from dualkv.bench.traces import FIGURES, KINDS, Trace, draw
from dualkv.bench.workloads import parse
from dualkv.data.rollouts import ByteTokenizer
from dualkv.models import CONFIGS
from dualkv.prefixes import shared_prefixes

SMALL = {kind: f"trace-{kind}-1-n3-t4-x0.02" for kind in KINDS}


def small(kind: str) -> Trace:
    trace = traces.parse(SMALL[kind])
    assert trace is not None
    return trace


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences_are_the_tree(kind):
    """The project's own trie finds the tree in random tokens."""
    trace = small(kind)
    tokens, masks = trace.token_sequences(997), trace.loss_masks()
    batch = dualkv.pack_sequences(tokens, masks)
    assert batch.layout == trace.layout()
    assert batch.trained_lens == [sum(p.tokens for p in s if p.trained) for s in trace.sequences]
    assert parse(trace.name).layout() == trace.layout()
    assert all((a.numpy() == b).all() for a, b in zip(batch.unpack_sequences(batch.input_ids), tokens, strict=True))


def test_drawn_shapes():
    """The drawn shapes keep what the figures promise, within the spread of 16 rollouts."""
    found = {kind: trees.Summary.of(trees.Found.of_trace(draw(kind)), "qwen3-8b") for kind in KINDS}
    assert draw("tau2", 3) == draw("tau2", 3) != draw("tau2", 4)
    assert found["search"].share_ratio == pytest.approx(1 / (1 - 0.35), rel=0.01)
    assert found["swe-kept"].share_ratio < found["grpo"].share_ratio < 1.2 < found["treepo"].share_ratio
    assert 5 < found["tau2"].share_ratio < 15 < found["swe-dropped"].share_ratio < 30
    assert [found[kind].pays for kind in ("swe-kept", "grpo", "tau2")] == [False, True, True]
    turns = np.bincount(draw("swe-dropped", rollouts=200).rollout)
    assert turns.mean() == pytest.approx(FIGURES["swe"]["turns, mean"].value, rel=0.05)
    assert turns.max() <= 100
    assert found["treepo"].sequences == 16
    for one in found.values():
        assert 1 <= one.flop_ratio <= one.share_ratio * 1.01
        assert one.shortest <= one.median <= one.longest


def test_caterpillar():
    """Reasoning and what follows it hang beside the trunk, which repeats what was said without the reasoning."""
    trace = traces.parse("trace-swe-dropped-0-n1-t5")
    *_, last = trace.sequences
    assert [p.trained for p in last] == [False] * (len(last) - 2) + [True, True]
    said = trace.sequences[0][-1].number
    assert [p.number for p in last].count(said) == 1
    layout = trace.layout()
    assert layout.depth == len(trace.sequences)
    assert layout.num_segments == 2 * len(trace.sequences) - 1
    texts = trace.token_sequences(50000)
    assert shared_prefixes(texts).tree().length.sum() == layout.num_tokens


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trace-swe-kept-0-n0", "rollouts is 0"),
        ("trace-tau2-0-t0.5", "turns is 0.5"),
        ("trace-grpo-0-x0", "scale is 0"),
    ],
)
def test_bad_traces(text, says):
    with pytest.raises(ValueError, match=says):
        traces.parse(text)
    with pytest.raises(ValueError, match=r"'nothing'.*grpo"):
        draw("nothing")
    with pytest.raises(ValueError, match=r"trace-tau2-0-t1\.2\.3.*expected trace-KIND-SEED"):
        traces.named("trace-tau2-0-t1.2.3")


LINES = [
    {"sequences": [[5, 6, 7, 8], [5, 6, 9, 9, 9], [5, 6]], "loss_masks": [[0, 0, 1, 1], [0, 0, 1, 1, 0], [0, 1]]},
    {"prompt": [5, 6, 7], "responses": [[1, 2], [8]], "more": 1},
    {"lengths": [30, 4, 5, 6], "parent": [-1, 0, 1, 0]},
]


def test_a_file_of_rollouts(run, tmp_path):
    path, out = tmp_path / "rollouts.jsonl", tmp_path / "out.json"
    path.write_text("\n".join([json.dumps(LINES[0]), "", json.dumps(LINES[1]), json.dumps(LINES[2])]))
    code, printed, err = run("trees", "--from", str(path), "--model", "tiny", "--json", str(out))
    assert code == 0, err
    [found] = json.loads(out.read_text())["rollouts"]
    # 5 6 | 7 | 8, 1 2 | 9 9 9, and the tree of lengths: 39 and 36 of 45.
    assert (found["sequences"], found["tokens"], found["packed_tokens"]) == (7, 4 + 5 + 2 + 5 + 4 + 39 + 36, 9 + 45)
    assert (found["depth"], found["segments"]) == (3, 5 + 3), "a segment that one alone continues ends where that does"
    assert "rollouts.jsonl: packing computes 54 rows in place of 95 (1.76x)" in " ".join(printed.split())
    found = trees.read(path, ByteTokenizer(), min_shared=2)
    assert found.shared.tokens == 54 + 1, "the shared 7 repeats, 8 ends where it did"
    found = trees.read(path, ByteTokenizer(), min_shared=31)
    assert found.shared.tokens == 20 + 75, "everything repeats, the shared 30 of the tree of lengths as well"
    assert trees.read(path, ByteTokenizer()).trained is None
    path.write_text("\n".join(map(json.dumps, LINES[:2])))
    assert trees.read(path, ByteTokenizer()).trained == 2 + 2 + 1 + 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": [4294967296], "responses": [[1]]}', r"prompt\[0\] is token 4294967296, expected .* to 4294967295"),
        ('{"lengths": [4, 5]}', "'parent' is missing"),
        ('{"lengths": [4], "parent": [-1], "prompt": [4]}', "'lengths' and 'prompt' are both given"),
        ('{"lengths": [4, 0], "parent": [-1, 0]}', "'lengths' has 0"),
        ('{"lengths": [4, 2.5], "parent": [-1, 0]}', "'lengths' must be a list of integers"),
        ('{"lengths": [4, 5, 6], "parent": [-1, 2, 0]}', r"parent\[1\] is 2"),
        ('{"lengths": [4, 5, 6], "parent": [-1]}', "'parent' has 1 entries for 3 segments"),
    ],
)
def test_a_bad_line_is_named(run, tmp_path, line, says):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=f"bad.jsonl:2: .*{says}"):
        trees.read(path, ByteTokenizer())
    code, _, err = run("trees", "--from", str(path))
    assert code == 1
    assert "bad.jsonl:2:" in err


def test_the_command_prints_traces_and_sources(run):
    code, out, _ = run("trees", "--trace", "trace-search-2", "--trace", SMALL["tau2"])
    assert code == 0
    assert "trace-search-2: packing computes" in out
    code, out, _ = run("trees", "--trace", SMALL["tau2"], "--memory", "0.05")
    assert code == 0
    assert "1 micro-batch: 1 walked; the tree of sequence 0, " in out
    code, _, err = run("trees", "--trace", SMALL["tau2"], "--memory", "0")
    assert (code, err) == (1, "dualkv: --memory is 0.0, expected a finite number of GiB above 0\n")
    code, out, _ = run("trees", "--sources")
    assert code == 0
    assert "n_agent: Search-R1" in " ".join(out.replace("│", " ").split())
    code, _, err = run("trees", "--trace", "tree")
    assert code == 1
    assert "--trace is 'tree', expected trace-KIND-SEED" in err


def test_a_narrow_terminal_shows_every_figure():
    console = Console(width=80, file=io.StringIO())
    found = trees.Summary.of(trees.Found.of_trace(small("swe-dropped")), "qwen3-8b")
    workload = {"name": "x", "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "tokens": 16}
    side = {key: 12345.678 for _, key, _ in show.COLUMNS} | {"parts": {"merge": {"in_total": False, "cold_ms": 9876.5}}}
    sides = {"torch-flash-replicated": side}
    result = {"workload": workload, "flops": 1e12, "direction": "fwd", "sides": sides}
    for table in (trees.table([found]), show.listing([parse("n8-p4096-r1024-d192v128-h128")]), show.table(result)):
        console.print(table)
    assert "…" not in console.file.getvalue()


def test_split_into_prompts_and_responses():
    trace = small("tau2")
    found = traces.split(trace.name, 997)
    tokens, masks = trace.token_sequences(997), trace.loss_masks()
    for (prompt, response, mask), whole, counted in zip(found, tokens, masks, strict=True):
        assert np.array_equal(np.concatenate([prompt, response]), whole)
        assert mask[0] == 1, "the policy writes first"
        assert np.array_equal(np.append(np.zeros(len(prompt)), mask), counted)
    with pytest.raises(ValueError, match="'nothing'"):
        traces.split("nothing", 997)


@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3-8b", "qwen3.5-9b", "tiny-hybrid"])
def test_flops_count_every_weight_of_the_layers(model: str) -> None:
    """6 for a weight and row; of gated delta nets also the state, and attention only where there is some."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**CONFIGS[model])
    with torch.device("meta"):
        layers = transformers.AutoModelForCausalLM.from_config(config).model.layers
    weights = sum(w.numel() for w in layers.parameters() if w.dim() > 1)
    recurrent = sum(hasattr(layer, "linear_attn") for layer in layers)
    assert recurrent == (3 * len(layers) // 4 if "3.5" in model or "hybrid" in model else 0)
    if recurrent:
        state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
        weights += 3 * recurrent * state
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    of_pair = 12 * config.num_attention_heads * head_dim * (len(layers) - recurrent)
    assert trees.flops(model, 5, 0, 0) == 6 * 5 * weights
    assert trees.flops(model, 5, 7, 0) == 6 * 5 * weights + 7 * of_pair
