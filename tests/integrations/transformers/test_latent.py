"""Multi-head latent attention, whose values have another head dim, and its models with indexers: packed groups against
every replicated sequence alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.integrations.transformers import (  # noqa: E402
    disable,
    enable,
    enabling,
)
from dualkv.sequence_parallel import Shard  # noqa: E402
from tests.integrations.tiny import LAYOUT, SIZES, TREE, assert_close, gradients, hooks, paths, token_ids  # noqa: E402
from tests.integrations.transformers.test_enabling import double_throughout  # noqa: E402

LATENT = {
    "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "head_dim": 8,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LONGEST = {layout: max(len(path) for path, _ in paths(layout)) for layout in (LAYOUT, TREE)}
INDEXER = {"index_topk": LONGEST[LAYOUT], "index_n_heads": 2, "index_head_dim": 16}
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("DeepseekV2", EXPERTS),
    "deepseek_v3": ("DeepseekV3", EXPERTS),  # Kimi K2.5's and Moonlight's too
    "minicpm3": ("MiniCPM3", {}),
    "youtu": ("Youtu", {}),
    "axk1": ("AXK1", EXPERTS),
    "glm4_moe_lite": ("Glm4MoeLite", EXPERTS),
    "longcat_flash": ("LongcatFlash", {
        "num_layers": 2, "ffn_hidden_size": 32, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2,
        "n_routed_experts": 4}),
    "deepseek_v32": ("DeepseekV32", EXPERTS | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", EXPERTS | INDEXER | SHARED),
    "axk2": ("AXK2", EXPERTS | INDEXER),
    "mistral_large4": ("MistralLarge4Text", EXPERTS | INDEXER | SHARED),
    "hy_v4": ("HYV4", EXPERTS | INDEXER | SHARED),
}  # fmt: skip
WITH_INDEXER = [name for name, (_, settings) in MODELS.items() if "index_topk" in settings]


def make(name: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Any:
    family, extra = MODELS[name]
    torch.manual_seed(0)
    config = getattr(tf, f"{family}Config")(**SIZES | LATENT | extra | settings, attn_implementation="eager")
    model = getattr(tf, f"{family}Model")(config).to(dtype).train()
    model.set_experts_implementation("eager")  # grouped_mm takes no fp64
    return model


def weighted(layout: dualkv.Layout, hidden: torch.Tensor, rows: Any, times: Any) -> torch.Tensor:
    """A loss of the hidden states of rows, in which a row counts `1 / times[row]`."""
    weight = torch.randn(layout.num_tokens, SIZES["hidden_size"], generator=torch.Generator().manual_seed(3)).double()
    return (hidden * weight[rows] / torch.tensor([times[row] for row in rows])[:, None]).sum()


@pytest.mark.parametrize("layout", [LAYOUT, TREE], ids=["groups", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_packed_is_replicated(name: str, layout: dualkv.Layout) -> None:
    ids, times = token_ids(layout), Counter(row for path, _ in paths(layout) for row in path)
    with double_throughout(name):
        exact = {"index_topk": LONGEST[layout]} if name in WITH_INDEXER else {}
        model = make(name, **exact)
        each = [model(input_ids=ids[:, path], use_cache=False)[0][0] for path, _ in paths(layout)]
        sum(weighted(layout, x, path, times) for x, (path, _) in zip(each, paths(layout), strict=True)).backward()
        packed = enable(make(name, **exact), check=False)
        hidden = packed(input_ids=ids, dualkv=layout)[0][0]
        seen = sorted(times)
        weighted(layout, hidden[seen], seen, dict.fromkeys(seen, 1)).backward()
    for (path, _), reference in zip(paths(layout), each, strict=True):
        assert_close(f"hidden states of rows {path}", hidden[path], reference, 1e-12)
    expected = gradients(model)
    for parameter, gradient in gradients(packed).items():
        assert_close(parameter, gradient, expected[parameter], 1e-11)


@pytest.mark.parametrize("name", WITH_INDEXER)
def test_longer_paths_are_refused_and_calls_without_a_layout_select(name: str) -> None:
    few, ids = LONGEST[LAYOUT] - 1, token_ids(LAYOUT)
    plain, model, dense = (make(name, torch.float32, index_topk=n) for n in (few, few, few + 1))
    before = hooks(plain)
    message = rf"path of the layout has {few + 1} tokens, expected at most {few} for {type(enable(model)).__name__}"
    with pytest.raises(ValueError, match=message):
        model(input_ids=ids, dualkv=LAYOUT)
    expected = plain(input_ids=ids, use_cache=False)[0]
    assert torch.equal(model(input_ids=ids, use_cache=False)[0], expected)
    assert not torch.equal(dense(input_ids=ids, use_cache=False)[0], expected)
    assert hooks(disable(model)) == before


def test_ranks_that_share_rows_refuse_longer_paths_too() -> None:
    shard = Shard(LAYOUT, None)
    with pytest.raises(ValueError, match=f"{LONGEST[LAYOUT]} tokens, expected at most 3 for Model"):
        enabling._positions(token_ids(LAYOUT), None, shard, "Model", 3)


def test_compiled_in_one_graph() -> None:
    torch._dynamo.reset()
    model, ids = (
        enable(
            make(
                "glm_moe_dsa",
                torch.float32,
                num_hidden_layers=2,
                indexer_types=["full", "shared"],
                first_k_dense_replace=2,
            ),
            check=False,
        ),
        token_ids(LAYOUT),
    )
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(input_ids=ids, dualkv=LAYOUT)[0], model(input_ids=ids, dualkv=LAYOUT)[0])
