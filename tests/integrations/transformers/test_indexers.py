"""Models whose indexers select keys: packed groups and trees on longer paths than they select, against every replicated
sequence alone. Of equal scores both sides take the earlier one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

import dualkv
from dualkv.context_parallel import ContextShard
from dualkv.sequence_parallel import Shard

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import (  # noqa: E402
    disable,
    enable,
    indexers,
    recompute_layers,
    selected,
    selfcheck,
)
from dualkv.ops import compiling, flex  # noqa: E402
from tests.integrations.doubled import double_throughout  # noqa: E402
from tests.integrations.tiny import (  # noqa: E402
    FULL,
    LAYOUT,
    SIZES,
    SLIDING,
    TREE,
    assert_close,
    assert_gradients,
    gradients,
    hooks,
    paths,
    take_gradients,
    token_ids,
)
from tests.integrations.transformers import test_branches  # noqa: E402
from tests.integrations.transformers.test_latent import EXPERTS, LATENT  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402

KEYS = 5  # that are selected
INDEXER = {"index_topk": KEYS, "index_n_heads": 2, "index_head_dim": 16}
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
REUSED = {"kv_source_layers": [0, 0, 2], "no_rope_layers": [1, 1, 0]}
WINDOWS = {f"swa_{name}": value for name, value in (LATENT | {"num_attention_heads": 6, "head_dim": 24}).items()}
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32", {}),
    "axk2": ("AXK2", {}),
    "glm_moe_dsa": ("GlmMoeDsa", SHARED),
    "hy_v4": ("HYV4", SHARED),
    "mistral_large4": ("MistralLarge4Text", SHARED | REUSED),
    "dots3_note": (
        "Dots3NoteText",
        WINDOWS | {"sliding_window": 4, "num_hidden_layers": 3, "layer_types": [SLIDING, *["indexed_attention"] * 2]},
    ),
}
M3 = "minimax_m3_vl"  # blocks of keys, a set for each KV head; the local block is always among them
BLOCKS = {
    "dense_intermediate_size": 32, "shared_intermediate_size": 32, "num_hidden_layers": 3, "head_dim": 16,
    "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 3, "index_topk_blocks": 3,
    "index_local_blocks": 1, "num_experts_per_tok": 2, "num_local_experts": 4, "mlp_layer_types": ["dense"] * 3,
    "layer_types": [FULL, *["minimax_m3_sparse"] * 2],
}  # fmt: skip
MODELS = [*LATENT_MODELS, M3]


def make(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    if name == M3:
        family, extra = "MiniMaxM3VLText", BLOCKS
    else:
        family, extra = LATENT_MODELS[name][0], LATENT | EXPERTS | INDEXER | LATENT_MODELS[name][1]
    config = getattr(tf, f"{family}Config")(**SIZES | extra | settings, attn_implementation="eager")
    model = getattr(tf, f"{family}Model")(config)
    with torch.no_grad():
        selfcheck.randomize(model, seed=0)
    model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    return model.to(dtype).train()


def all_keys(name: str) -> dict[str, int]:
    """Settings with which the indexers select every key."""
    return {"index_topk_blocks": 99} if name == M3 else {"index_topk": 99}


class Scores(TorchFunctionMode):
    """Notes what `x.topk` gets outside of routers, a list of rows for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.calls.append(args[0].detach())
        return func(*args, **(kwargs or {}))


def by_row(calls: list[torch.Tensor]) -> list[torch.Tensor]:
    """[S, keys] of each row of each layer, of calls [1, S, rows, keys] or [1, rows, keys]."""
    return [row for call in calls for row in (call if call.dim() == 4 else call[:, None])[0].unbind(1)]


def weighted(layout: dualkv.Layout, hidden: torch.Tensor, rows: Any, times: Counter[int] | None = None) -> torch.Tensor:
    """A loss of the hidden states of rows, in which a row counts `1 / times[row]`."""
    weight = torch.randn(layout.num_tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3)).double()
    parts = torch.tensor([1 if times is None else times[row] for row in rows])[:, None]
    return (hidden * weight[rows] / parts).sum()


@pytest.mark.parametrize("layout", [LAYOUT, TREE], ids=["groups", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_replicated(name: str, layout: dualkv.Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states and gradients, and before them scores, sets and the gap behind the last selected key. A wrong score
    of few keys may leave every set as it is."""
    monkeypatch.setattr(selected, "ELEMENTS", 3 * 6 * layout._segments.longest_path)  # 3 rows of attention
    ids, times = token_ids(layout), Counter(row for path, _ in paths(layout) for row in path)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []  # scores and sets of packed rows

    def noted(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        chosen = highest(scores, values)
        found.extend(zip(by_row([scores]), by_row([chosen]), strict=True))
        return chosen

    highest = indexers.highest
    monkeypatch.setattr(indexers, "highest", noted)
    with double_throughout():
        model, each, alone = make(name), [], []
        for path, _ in paths(layout):
            with indexers.first_of_equals(), Scores() as scores:
                each.append(model(input_ids=ids[:, path], use_cache=False)[0][0])
            of_indexers = [x for x in scores.calls if x.dim() > 2 and x.shape[-2] == len(path) > KEYS]
            alone.append(by_row(of_indexers))
        sum(weighted(layout, x, path, times) for x, (path, _) in zip(each, paths(layout), strict=True)).backward()
        packed = enable(make(name), check=False)
        hidden = packed(input_ids=ids, dualkv=layout)[0][0]
        weighted(layout, hidden[sorted(times)], sorted(times)).backward()
    k, tied, selecting, per_layer = (3 if name == M3 else KEYS), 0, 0, layout.num_tokens
    for (path, _), rows in zip(paths(layout), alone, strict=True):
        for at, expected in enumerate(rows):
            layer, i = divmod(at, len(path))
            n = 1 + (i // BLOCKS["index_block_size"] if name == M3 else i)  # the others are hidden
            got, chosen, expected = (x[:, :n] for x in (*found[layer * per_layer + path[i]], expected))
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(chosen, highest(expected, expected.topk(min(k, n)).values))
            if n > k:
                ranked = expected.sort(-1, descending=True).values
                gap = ranked[:, k - 1] - ranked[:, k]
                assert ((gap == 0) | (gap > 1e-9)).all(), f"row {i} of layer {layer} is decided by rounding"
                tied, selecting = tied + int((gap == 0).sum()), selecting + 1
    assert selecting > 10
    assert tied or name == M3  # relu makes equal scores of 0
    for (path, _), reference in zip(paths(layout), each, strict=True):
        assert_close(f"hidden states of rows {path}", hidden[path], reference, 1e-12)
    expected_of = gradients(model)
    assert_gradients(packed, expected_of, 1e-11)
    with double_throughout():
        dense = enable(make(name, **all_keys(name)), check=False)(input_ids=ids, dualkv=layout)[0][0]
    assert (dense - hidden).norm() > 1e-2 * hidden.norm(), "selection matters"


def assert_packed_is_replicated(model: Any, ids: torch.Tensor) -> None:
    """Hidden states and gradients of LAYOUT in fp32; layers run again in the backward."""
    with torch.no_grad():
        selfcheck.randomize(model.train(), seed=0)
    times = Counter(row for path, _ in paths(LAYOUT) for row in path)
    with indexers.first_of_equals():
        each = [model(input_ids=ids[:, path], use_cache=False)[0][0] for path, _ in paths(LAYOUT)]
    sum(weighted(LAYOUT, x, path, times) for x, (path, _) in zip(each, paths(LAYOUT), strict=True)).backward()
    expected_of = gradients(model)
    model.zero_grad()
    recompute_layers(enable(model, check=False), "nothing")
    hidden = model(input_ids=ids, dualkv=LAYOUT)[0][0]
    weighted(LAYOUT, hidden[sorted(times)], sorted(times)).backward()
    for (path, _), reference in zip(paths(LAYOUT), each, strict=True):
        assert_close(f"hidden states of rows {path}", hidden[path], reference, 1e-5)
    assert_gradients(model, expected_of, 5e-4)


def test_pools_of_keys_that_layers_share() -> None:
    """GLM-5-next makes masks of indices, also of those of the layer before. Where its rows do not see the last keys of
    their path, which fill no pool, the first row sees none."""
    pools = {"index_kpool": 2, "index_topk": 4, "qk_rope_head_dim": 0, "indexer_types": ["full", "full", "shared"]}
    nets = {"linear_num_heads": 2, "linear_head_dim": 8, "mlp_layer_types": ["dense"] * 3, "num_hidden_layers": 3}
    config = tf.Glm5NextTextConfig(
        **SIZES | LATENT | EXPERTS | INDEXER | pools | nets,
        layer_types=["linear_attention", *["indexed_attention"] * 2], attn_implementation="eager",
    )  # fmt: skip
    assert_packed_is_replicated(tf.AutoModel.from_config(config), token_ids(LAYOUT))
    config.index_kpool_always_select_tail = False
    with pytest.raises(ValueError, match=r"^layer 1 of Glm5NextTextModel is indexed_attention"):
        enable(tf.AutoModel.from_config(config))


def test_blocks_of_keys_and_ngrams_of_tokens() -> None:
    """Qwen4-exp selects blocks of keys by masks of its own, and embeds the last tokens of each row, among them the end
    of a text."""
    sizes = (
        SIZES | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    )
    nets = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    nets |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    of_indexer = {"n_heads": 2, "kv_heads": 1, "head_dim": 8, "budget": 4, "compress_ratio": 2}
    ngrams = {"ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_vocab_size_base": 50, "eos_token_id": 5}
    small = {"hc_count": 2, "hc_lowrank": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = tf.Qwen4ExpTextConfig(
        **sizes | nets | ngrams | small | {f"indexer_{name}": value for name, value in of_indexer.items()},
        layer_types=["linear_attention", "indexed_attention"], attn_implementation="eager",
    )  # fmt: skip
    model, ids = tf.AutoModel.from_config(config), token_ids(LAYOUT)
    ids[0, [2, 9, 14, 20]] = 5
    assert_packed_is_replicated(model, ids)
    model.layers[0].ple.register_forward_pre_hook(lambda _, args: (args[0], args[1].clone(), *args[2:]), prepend=True)
    with pytest.raises(ValueError, match=r"^Qwen4ExpTextPLELayer got other token ids than its layer"):
        model(input_ids=ids, dualkv=LAYOUT)


@pytest.mark.parametrize("name", MODELS)
def test_calls_without_a_layout_select_as_before(name: str) -> None:
    plain, model = make(name, torch.float32), make(name, torch.float32)
    before, ids = hooks(plain), token_ids(LAYOUT)
    enable(model, check=False)
    expected = plain(input_ids=ids, use_cache=False)[0]
    assert torch.equal(model(input_ids=ids, use_cache=False)[0], expected)
    assert not torch.equal(make(name, torch.float32, **all_keys(name))(input_ids=ids, use_cache=False)[0], expected)
    assert hooks(disable(model)) == before
    assert torch.equal(model(input_ids=ids, use_cache=False)[0], expected)


# ---------------------------------------------------------------- sets are made once
@pytest.fixture
def selections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of indexers that made sets."""
    calls: list[Any] = []
    make_sets = indexers._Selection.sets
    monkeypatch.setattr(indexers._Selection, "sets", lambda self: calls.append(self.indexer) or make_sets(self))
    return calls


def gradients_of(model: Any, layout: dualkv.Layout = TREE) -> dict[str, torch.Tensor]:
    model.zero_grad()
    hidden = model(input_ids=token_ids(layout), dualkv=layout)[0][0]
    weighted(layout, hidden.double(), range(layout.num_tokens)).backward()
    return gradients(model)


@pytest.mark.parametrize("keep", ["nothing", "attention", "products"])
def test_layers_that_run_again_have_the_same_sets(keep: str, selections: list[Any]) -> None:
    model = enable(make("glm_moe_dsa", torch.float32), check=False)
    expected = gradients_of(model)
    assert len(selections) == 2  # the layer between takes those of the one before
    recompute_layers(model, keep)
    for name, gradient in gradients_of(model).items():
        assert torch.equal(gradient, expected[name]), name
    assert len(selections) == 4
    assert not any(indexers._MADE.values())  # they go with the graph


def test_reentrant_checkpointing_is_refused() -> None:
    model = enable(make("deepseek_v32", torch.float32), check=False)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    with pytest.raises(ValueError, match=r"DeepseekV32Indexer is computed again .* use_reentrant=False"):
        gradients_of(model)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", ["hy_v4", M3])
def test_a_walk_selects_as_one_call(name: str, recomputed: bool, selections: list[Any]) -> None:
    batch, branches = test_branches.packed(), []
    weight = torch.zeros(batch.layout.num_tokens, SIZES["hidden_size"], dtype=torch.float64)
    drawn = torch.randn(len(batch.predict_rows), SIZES["hidden_size"], generator=torch.Generator().manual_seed(0))
    weight[batch.predict_rows] = drawn.double()

    def forward(input_ids: torch.Tensor, branch: Any) -> torch.Tensor:
        branches.append(branch)
        return model(input_ids=input_ids, dualkv=branch)[0]

    with double_throughout():
        model = enable(make(name), check=False)
        (model(input_ids=batch.input_ids, dualkv=batch.layout)[0][0] * weight).sum().backward()
        expected = {parameter: gradient.clone() for parameter, gradient in gradients(model).items()}
        if recomputed:
            recompute_layers(model)
        selections.clear()
        model.zero_grad()
        dualkv.walk(batch, 4, forward, lambda hidden, part: (hidden[0] * weight[part.rows]).sum())
    assert len(selections) == 2 * len({*map(id, branches)}) < 2 * len(branches)
    assert_gradients(model, expected, 1e-11)


# ---------------------------------------------------------------- ranks
def on_a_rank(rank: int) -> None:
    dist.init_process_group("gloo")
    for name in ("hy_v4", M3):
        model, ids = enable(make(name, torch.float32), check=False), token_ids(LAYOUT)
        hidden = model(input_ids=ids, dualkv=LAYOUT)[0][0]
        weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        (hidden * weight).sum().backward()
        expected = take_gradients(model)
        shard = Shard(LAYOUT, dist.group.WORLD)
        mine = model(input_ids=shard.split(ids, 1), dualkv=shard)[0]
        (mine[0] * shard.split(weight)).sum().backward()
        assert_close("hidden states", shard.gather(mine, 1)[0, : LAYOUT.num_tokens], hidden, 1e-5)
        for parameter, gradient in gradients(model).items():
            dist.all_reduce(gradient)
            assert_close(parameter, gradient, expected[parameter], 2e-5)
    with pytest.raises(ValueError, match="comes in a ContextShard: expected a Layout, a Shard or a walk"):
        model(input_ids=ids, dualkv=ContextShard(LAYOUT, dist.group.WORLD))
    dist.destroy_process_group()


def test_ranks_that_share_rows_select() -> None:
    on_ranks(2, f"{__name__}:on_a_rank")


# ---------------------------------------------------------------- compiled
@pytest.mark.parametrize(
    "keys",
    [pytest.param(LAYOUT._segments.longest_path, id="all"), pytest.param(KEYS, id="few", marks=pytest.mark.slow)],
)
def test_compiled_models_break_the_graph_where_they_select(keys: int) -> None:
    torch._dynamo.reset()
    settings = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "first_k_dense_replace": 2}
    model = enable(make("glm_moe_dsa", torch.float32, **settings, index_topk=keys), check=False)
    compiled, ids = torch.compile(model, backend="eager", fullgraph=keys > KEYS), token_ids(LAYOUT)
    torch.testing.assert_close(compiled(input_ids=ids, dualkv=LAYOUT)[0], model(input_ids=ids, dualkv=LAYOUT)[0])


# ---------------------------------------------------------------- attention to sets
def drawn(sets: int, sinks: bool, own: int, path: int = 140) -> tuple[Any, ...]:
    """Inputs of attention of the last `own` rows of a tree whose other rows are their path, and sets of them."""
    layout = dualkv.Layout.from_segments([0, path, path + own // 2, path + own], [-1, 0, 0])
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(n, h, d, generator=draw) for n, h, d in (
        (own, 4, 16), (layout.num_tokens, 2, 16), (layout.num_tokens, 2, 24), (own, 4, 24)))  # fmt: skip
    chosen = torch.rand(sets, own, layout._segments.longest_path, generator=draw) < 0.3
    at = layout.position_ids[-own:]
    chosen[:, torch.arange(own), at] = True
    chosen &= torch.arange(chosen.shape[2]) <= at[:, None]
    return layout, q, k, v, dout, chosen, torch.randn(4, generator=draw) if sinks else None


def dense(layout: Any, q: Any, k: Any, v: Any, dout: Any, chosen: Any, sinks: Any) -> list[torch.Tensor]:
    """out and the gradients of q, k, v and sinks, in fp64 by autograd."""
    q, k, v, *more = (x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None)
    key, row = torch.arange(len(k)), torch.arange(len(k))[-len(q) :, None]
    seen = (key <= row) & (row < layout.visible_end)
    of_key = chosen[:, torch.arange(len(q))[:, None], layout.position_ids] & seen
    scores = torch.einsum("chd,nhd->hcn", q, k.repeat_interleave(2, 1)) * 0.3
    scores = scores.masked_fill(~of_key.repeat_interleave(4 // len(chosen), 0), -torch.inf)
    whole = torch.cat([scores, *(x[:, None, None].expand(-1, len(q), 1) for x in more)], -1)
    out = torch.einsum("hcn,nhd->chd", whole.softmax(-1)[..., : len(k)], v.repeat_interleave(2, 1))
    return [out.detach(), *torch.autograd.grad(out, [q, k, v, *more], dout.double())]


@pytest.mark.parametrize("own", [60, 200])
@pytest.mark.parametrize(("sets", "sinks"), [(1, True), (2, False), (4, False)])
def test_attention_to_sets(sets: int, sinks: bool, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's chunks, and FlexAttention's operators, which run densely on the CPU; queries of the last rows alone."""
    given = layout, q, k, v, dout, chosen, sink = drawn(sets, sinks, own)
    words = selected.packed_bits(chosen)
    assert torch.equal(selected.unpacked_bits(words, chosen.shape[2]), chosen)
    expected = dense(*given)
    monkeypatch.setattr(selected, "ELEMENTS", 4 * 17 * 240)
    monkeypatch.setattr(flex, "COMPILER", "eager")
    selected._compiled.cache_clear()
    for forward, backward in (
        (selected._forward_in_chunks, selected._backward_in_chunks),
        (selected._forward_with_flex, selected._backward_with_flex),
    ):
        with torch._C._AutoDispatchBelowAutograd():  # as within the ops
            out, lse = forward(words, layout._segments, 0.3, sink, q, k, v)
            found = backward(words, layout._segments, 0.3, sink, dout, q, k, v, out, lse)
        for name, x, y in zip(("out", "dq", "dk", "dv", "dsinks"), (out, *found), expected, strict=False):
            # By processor up to 2.2e-6, of the gradient of sinks, whose terms cancel; with inputs in fp64 4e-15.
            assert_close(f"{forward.__name__} {name}", x, y, 5e-6)
    selected._compiled.cache_clear()


def test_flex_is_traced_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    monkeypatch.setattr(flex, "COMPILER", "aot_eager")
    selected._compiled.cache_clear()
    compiling.failures.clear()
    graphs = []
    for own in (60, 200, 90):
        layout, q, k, v, dout, chosen, _ = drawn(1, False, own, path=600)
        with torch._C._AutoDispatchBelowAutograd():
            call = selected.packed_bits(chosen), layout._segments, 0.3, None
            out, lse = selected._forward_with_flex(*call, q, k, v)
            selected._backward_with_flex(*call, dout, q, k, v, out, lse)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] == graphs[2]
    selected._compiled.cache_clear()
    torch._dynamo.reset()


def test_the_operator_is_one_for_pytorch() -> None:
    layout, q, k, v, _, chosen, sinks = drawn(2, True, 60)
    q, k, v, sinks = (x.double().requires_grad_() for x in (q, k, v, sinks))
    given = q, k, v, selected.packed_bits(chosen), layout.offsets, layout.parent, 0.3, sinks
    torch.library.opcheck(torch.ops.dualkv.selected.default, given)


def test_a_window_beside_an_indexer_is_refused() -> None:
    model = enable(make("deepseek_v32"), check=False)
    features = indexers.Features(window=3)
    with pytest.raises(ValueError, match="has an indexer and window, expected sinks alone"):
        indexers.attend(model.layers[0].self_attn, LAYOUT, *[torch.zeros(1, 1, 8)] * 3, torch.zeros(1), 1.0, features)
