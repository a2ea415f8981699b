"""The scenarios of veRL's workers, by the number of ranks (see worker.py for the settings)."""

from __future__ import annotations

from typing import Any

# Packed tokens a micro-batch may hold: the longest rollout (35) fits, the group of five (54) has to be split.
TIGHT, LONG, ROOMY = 44, 60, 1000

STOCK: dict[str, Any] = {"packed": False}
PACKED: dict[str, Any] = {"packed": True}
MOE = {"model": "moe"}
SEQUENCE_LOSS = {"loss": "gspo", "mean": "seq-mean-token-mean"}
ONE_KV_HEAD = {"model": "one_kv_head"}
WINDOWS_AND_SINKS = {"model": "windows_and_sinks", "attention": "eager"}  # transformers has no SDPA with sinks
IMAGES = {"model": "images"}
SCREENS = IMAGES | {"screens": True}
# veRL 0.9.1 cannot run a micro-batch without images of a Qwen2.5-VL with transformers 5.
IMAGES_2_5 = {
    "model": "images_2_5",
    "groups": [(23, [7, 0, 12]), (30, [3, 5, 8, 2, 6]), (14, [6, 3, 9, 1, 4, 2, 5, 8])],
}
WITHOUT = {"groups": [(9, [4, 2, 6, 3]), (1, [5]), (12, [3, 4, 7]), (15, [2, 3, 9, 1, 4, 2, 5, 1])]}
OF_TEXT = IMAGES | WITHOUT
# In each update one of two ranks has one group, the other has four.
ONE_GROUP_AND_FOUR = {
    "groups": [(9, [4, 2, 6, 3]), (1, [5]), (12, [3]), (4, [7]), (7, [2]),
               (6, [3]), (15, [2]), (3, [9]), (8, [1]), (11, [4, 2, 5, 1])]
}  # fmt: skip
CRITIC = {"model": "critic"}
# Two groups, in two updates, and one rollout are larger than a budget of 280 rows. Behind a prompt of 300 there is room
# for parts of some 60 rows, so that the longest response is cut.
LONG_PROMPTS = {"groups": [(300, [7, 0, 12, 9, 60]), (5, [4, 2, 3]), (200, [3, 50, 8, 2, 26, 11]), (9, [11, 5])]}
WALK = PACKED | LONG_PROMPTS | {"walk": "large", "budget": 280}
# In the second update one of two ranks has a large group, the other has none.
WALK_ON_ONE_RANK = {
    "groups": [(9, [4, 2, 6, 3]), (1, [5]), (12, [3]), (4, [7]), (7, [2]),
               (300, [3, 12, 9, 1]), (15, [2]), (3, [9]), (8, [1]), (11, [4])]
}  # fmt: skip
TURNS = {"turns": True}  # rollouts of at most 52 tokens
TREES = PACKED | TURNS | {"trees": 1}
SUM_PI_SQUARED = {"settings": {"calculate_sum_pi_squared": True}}

# veRL's own rows without padding are wrong for hybrid models on a CPU: a recurrent layer of transformers does not see
# where a sequence begins, and veRL's layers of Qwen3.5 say it to a PyTorch function that ignores it. So stock runs
# padded rows.
PADDED = STOCK | {"remove_padding": False}
# Groups of as many rollouts as a micro-batch has.
OF_FOUR = {
    "groups": [(9, [4, 2, 6, 3]), (12, [3, 4, 7, 5]), (15, [2, 3, 9, 1]), (11, [4, 2, 5, 8])],
    "interleaved": True,
}
HYBRID = {"model": "qwen3_5_text"}

ONE: dict[str, dict[str, Any]] = {
    "stock": STOCK,
    "stock-moe": STOCK | MOE,
    "stock-ragged-temperature": STOCK | {"temperature": "ragged"},
    "stock-lora": STOCK | {"lora": 4},
    "stock-sequence-loss": STOCK | SEQUENCE_LOSS,
    "stock-sum-pi-squared": STOCK | SUM_PI_SQUARED,
    "stock-interleaved": STOCK | {"interleaved": True},
    "stock-bf16": STOCK | {"param_dtype": "bf16"},
    "fixed": PACKED,
    "stock-of-four": STOCK | OF_FOUR,
    "of-four": PACKED | OF_FOUR,
    "observed": STOCK | OF_FOUR | {"run": "observed", "type": "dualkv_observe"},
    "fixed-one-by-one": PACKED | {"rollouts": 1},
    "dynamic-tight": PACKED | {"budget": TIGHT},
    "dynamic-roomy": PACKED | {"budget": ROOMY},
    "moe": PACKED | MOE | {"budget": TIGHT},
    "fused": PACKED | {"fused": "torch"},
    "moe-fused": PACKED | MOE | {"fused": "torch", "budget": ROOMY},
    "fsdp1": PACKED | {"strategy": "fsdp", "budget": TIGHT},
    "no-checkpointing": PACKED | {"checkpointing": False},
    "keep-attention": PACKED | {"keep": "attention"},
    "keep-attention-of-one-layer": PACKED | {"keep": "attention", "keep_layers": 1},
    "keep-products": PACKED | MOE | {"keep": "products"},
    "fast": PACKED | {"fast": True, "keep": "attention", "budget": TIGHT},
    "fast-fsdp1": PACKED | {"fast": True, "strategy": "fsdp", "checkpointing": False},
    "bucket": PACKED | {"pad_to": 64},
    "offload": PACKED | {"engine": {"param_offload": True, "optimizer_offload": True}},
    "no-remove-padding": PACKED | {"remove_padding": False},
    "padded": PACKED | {"padded": True, "budget": TIGHT},
    "ragged-temperature": PACKED | {"temperature": "ragged", "budget": TIGHT},
    "lora": PACKED | {"lora": 4, "budget": TIGHT},
    "sequence-loss": PACKED | SEQUENCE_LOSS | {"budget": TIGHT},
    "sum-pi-squared": PACKED | SUM_PI_SQUARED | {"budget": TIGHT},
    "interleaved": PACKED | {"interleaved": True, "budget": TIGHT},
    "canary": PACKED | {"lora": 4, "canary": 1, "budget": TIGHT},
    "canary-fsdp1": PACKED | MOE | {"strategy": "fsdp", "fused": "torch", "canary": 2, "budget": ROOMY},
    "canary-trees": TREES | {"canary": 1, "budget": LONG},
    "stock-one-kv-head": STOCK | ONE_KV_HEAD,
    # The gpt-oss of transformers 5.10 hands no positions to its masks, so that sequences in one row see each other.
    "stock-windows-and-sinks": STOCK | WINDOWS_AND_SINKS | {"remove_padding": False},
    "windows-and-sinks": PACKED | WINDOWS_AND_SINKS | {"budget": TIGHT},
    "stock-images": STOCK | IMAGES,
    "images": PACKED | IMAGES | {"budget": TIGHT},
    "images-roomy": PACKED | IMAGES | {"budget": ROOMY, "pad_to": 64},
    "stock-screens": STOCK | SCREENS,
    "screens": PACKED | SCREENS | {"budget": LONG},
    "screens-trees": PACKED | SCREENS | {"trees": 1, "budget": ROOMY},
    "images-fsdp1": PACKED | IMAGES | {"strategy": "fsdp"},
    "stock-images-2.5": STOCK | IMAGES_2_5,
    "images-2.5": PACKED | IMAGES_2_5 | {"budget": TIGHT},
    "stock-images-none": STOCK | OF_TEXT,
    "images-none": PACKED | OF_TEXT | {"budget": TIGHT},
    "stock-one-group-and-four": STOCK | ONE_GROUP_AND_FOUR,
    "stock-turns": STOCK | TURNS,
    "stock-turns-temperature": STOCK | TURNS | {"temperature": "ragged"},
    "turns-by-prompts": PACKED | TURNS | {"budget": LONG},
    "trees-fixed": TREES,
    "trees-dynamic": TREES | {"budget": LONG},
    "trees-roomy": TREES | {"budget": ROOMY},
    "trees-of-long-parts": TREES | {"trees": 12, "budget": LONG},
    "trees-fused": TREES | {"fused": "torch", "budget": LONG},
    "trees-padded": TREES | {"padded": True, "budget": LONG},
    "trees-temperature": TREES | {"temperature": "ragged", "budget": ROOMY},
    "trees-of-groups": PACKED | {"trees": 1, "budget": TIGHT},
    "trees-too-short-to-share": PACKED | {"trees": True, "budget": TIGHT},
    "bf16": PACKED | {"param_dtype": "bf16", "budget": ROOMY},
    "stock-critic": STOCK | CRITIC,
    "critic": PACKED | CRITIC,
    "critic-roomy": PACKED | CRITIC | {"budget": ROOMY, "pad_to": 64},
    "critic-fsdp1": PACKED | CRITIC | {"strategy": "fsdp", "remove_padding": False, "budget": TIGHT},
    "stock-critic-turns": STOCK | CRITIC | TURNS,
    "critic-trees": TREES | CRITIC | {"budget": LONG, "checkpointing": False},
    "stock-long-prompts": STOCK | LONG_PROMPTS,
    "stock-long-prompts-moe": STOCK | LONG_PROMPTS | MOE,
    "stock-long-prompts-sequence-loss": STOCK | LONG_PROMPTS | SEQUENCE_LOSS,
    "stock-long-prompts-critic": STOCK | LONG_PROMPTS | CRITIC,
    "stock-long-prompts-turns": STOCK | LONG_PROMPTS | TURNS | {"temperature": "ragged"},
    "stock-walk-on-one-rank": STOCK | WALK_ON_ONE_RANK,
    "walk": WALK | {"walk": True, "keep": "attention"},  # by the planner: a rollout does not fit
    "walk-fsdp1": WALK | {"strategy": "fsdp", "checkpointing": False},
    "walk-moe-fused": WALK | MOE | {"fused": "torch", "canary": 1},
    "walk-sequence-loss": WALK | SEQUENCE_LOSS,
    "walk-critic": WALK | CRITIC,
    "walk-trees": TREES | WALK | {"temperature": "ragged", "on_host": True},
    "stock-walk-images": STOCK | WALK_ON_ONE_RANK | IMAGES,
    "stock-long-prompts-images": STOCK | LONG_PROMPTS | IMAGES,
    "walk-images": WALK | IMAGES,  # in the second update there are none
    "walk-screens": PACKED | SCREENS | {"trees": 1, "walk": "large", "budget": LONG},
    "stock-hybrid": PADDED | HYBRID,
    "hybrid": PACKED | HYBRID | {"budget": TIGHT},
}

# These tests are slow. The layers of other families: test_earlier.py.
HYBRIDS: dict[str, dict[str, Any]] = {
    "stock-hybrid-turns": PADDED | HYBRID | TURNS,
    "hybrid-roomy": PACKED | HYBRID | {"budget": ROOMY, "pad_to": 64},
    "hybrid-fsdp1": PACKED | HYBRID | {"strategy": "fsdp", "checkpointing": False, "budget": TIGHT},
    "hybrid-fused": PACKED | HYBRID | {"fused": "torch", "keep": "attention"},
    "stock-hybrid-long-prompts": PADDED | HYBRID | LONG_PROMPTS,
    "hybrid-walk": WALK | HYBRID,
    "hybrid-trees": TREES | HYBRID | {"budget": LONG},
}
# The model with images, in which veRL puts layers of its own.
HYBRID_IMAGES = {"model": "images_3_5"}
HYBRIDS |= {
    "stock-images-3.5": PADDED | HYBRID_IMAGES,
    "images-3.5": PACKED | HYBRID_IMAGES | {"budget": TIGHT},
    "images-3.5-roomy": PACKED | HYBRID_IMAGES | {"budget": ROOMY, "pad_to": 64},
    "images-3.5-none": PACKED | HYBRID_IMAGES | WITHOUT | {"budget": TIGHT},
    "stock-images-3.5-none": PADDED | HYBRID_IMAGES | WITHOUT,
    "stock-screens-3.5": PADDED | HYBRID_IMAGES | {"screens": True},
    "walk-screens-3.5": PACKED | HYBRID_IMAGES | {"screens": True, "trees": 1, "walk": "large", "budget": LONG},
    "stock-long-prompts-images-3.5": PADDED | HYBRID_IMAGES | LONG_PROMPTS,
    "walk-images-3.5": WALK | HYBRID_IMAGES,
    "stock-walk-images-3.5": PADDED | HYBRID_IMAGES | WALK_ON_ONE_RANK,
}

# Hybrid models over two and four ranks of Ulysses; the other ways are slow.
OVER_TWO: dict[str, dict[str, Any]] = {
    "sp2-hybrid-fsdp1": PACKED | HYBRID | {"sp": 2, "strategy": "fsdp", "checkpointing": False},
    "sp2-hybrid-fused": PACKED | HYBRID | {"sp": 2, "fused": "torch", "keep": "attention", "pad_to": 33},
    "sp2-hybrid-trees": TREES | HYBRID | {"sp": 2},
    "sp2-screens-3.5-trees": PACKED | HYBRID_IMAGES | {"screens": True, "trees": 1, "sp": 2},
    "dp2-walk-images-3.5": WALK | WALK_ON_ONE_RANK | HYBRID_IMAGES,
}
for _name in ("images-3.5", "images-3.5-none"):
    OVER_TWO[f"sp2-{_name}"] = HYBRIDS[_name] | {"sp": 2, "budget": TIGHT // 2}
OVER_FOUR: dict[str, dict[str, Any]] = {"sp4-hybrid": PACKED | HYBRID | {"sp": 4}}

# Ranks hold rollouts 0 to 3 and 4 to 7 of each eight: in the second update one rank has a group of one beside others.
TWO: dict[str, dict[str, Any]] = {
    "stock-dp2": STOCK,
    "dp2-fixed": PACKED,
    "dp2-dynamic": PACKED | {"budget": TIGHT},
    "dp2-canary": PACKED | {"canary": 1, "budget": TIGHT},
    "sp2-canary": PACKED | {"sp": 2, "canary": 1},
    "dp2-moe-fused": PACKED | MOE | {"fused": "torch", "budget": TIGHT},
    "dp2-fsdp1": PACKED | {"strategy": "fsdp"},
    "sp2-fixed": PACKED | {"sp": 2},
    "sp2-dynamic": PACKED | {"sp": 2, "budget": TIGHT // 2},
    "sp2-fused": PACKED | {"sp": 2, "fused": "torch"},
    "sp2-moe": PACKED | MOE | {"sp": 2},
    "dp2-trees": TREES | {"budget": LONG},
    "sp2-trees": TREES | {"sp": 2},
    "dp2-one-group-and-four": PACKED | ONE_GROUP_AND_FOUR | {"budget": 30},
    "sp2-windows-and-sinks": PACKED | WINDOWS_AND_SINKS | {"sp": 2},
    "sp2-one-kv-head": PACKED | ONE_KV_HEAD | {"sp": 2},
    "sp2-bucket": PACKED | {"sp": 2, "pad_to": 33},
    "dp2-critic": PACKED | CRITIC | {"budget": TIGHT},
    "sp2-critic": PACKED | CRITIC | {"sp": 2},
    "dp2-hybrid": PACKED | HYBRID | {"budget": TIGHT},
    "sp2-hybrid": PACKED | HYBRID | {"sp": 2, "budget": TIGHT // 2},
    "dp2-walk": WALK | {"canary": 1},
    "dp2-walk-on-one-rank": WALK | WALK_ON_ONE_RANK,
    "dp2-walk-trees": TREES | WALK | {"temperature": "ragged", "engine": {"reshard_after_forward": False}},
    # With an image of 20 x 20 patches an element of a vision bias, whose gradient is 6e-9, was up to 9.5e-5 off, by
    # processor. That was rounding: in fp64 the element is 2e-13 off, and no weight more.
    "dp2-walk-images": WALK | WALK_ON_ONE_RANK | IMAGES,
    "dp2-images": PACKED | IMAGES | {"budget": TIGHT},
    "sp2-images": PACKED | IMAGES | {"sp": 2, "budget": TIGHT // 2},
}

FOUR: dict[str, dict[str, Any]] = {
    "dp2-sp2": PACKED | {"sp": 2, "budget": TIGHT // 2},
    "sp4": PACKED | {"sp": 4},  # of two KV heads
}

# What says which scenario of veRL's own engine computes the same.
MATTERS = (
    "model",
    "attention",
    "temperature",
    "interleaved",
    "lora",
    "loss",
    "mean",
    "settings",
    "turns",
    "screens",
    "groups",
)
EVERY = ONE | HYBRIDS | TWO | OVER_TWO | FOUR | OVER_FOUR


def reference(name: str) -> str:
    """The scenario of veRL's own engine on one rank that computes the same."""
    same = STOCK | {key: value for key, value in EVERY[name].items() if key in MATTERS}
    any_rows = {"remove_padding": True}
    return next(known for known, s in (ONE | HYBRIDS).items() if s | any_rows == same | any_rows)


# Walks in fp64, on one rank also in one row; these tests are slow. Grouped products of experts take no fp64, and the
# canary knows products in fp32 or less only.
WALKS = [name for name, s in EVERY.items() if s.get("walk") and s.get("model") != "moe"]
FP64: dict[int, dict[str, dict[str, Any]]] = {1: {}, 2: {}}
for _name in WALKS:
    _settings = {key: value for key, value in EVERY[_name].items() if key != "canary"} | {"fp64": True}
    _row = {key: value for key, value in _settings.items() if key not in ("walk", "on_host")} | {"budget": ROOMY}
    FP64[1][f"{reference(_name)}-fp64"] = EVERY[reference(_name)] | {"fp64": True}
    FP64[1 if _name in ONE | HYBRIDS else 2][f"{_name}-fp64"] = _settings
    if _name in ONE | HYBRIDS:
        FP64[1][f"{_name}-one-row-fp64"] = _row

TRUNCATED = [(5, [0, 0, 0, 0]), (9, [0, 0, 0]), (1, [0]), (3, [0] * 8)]
SECOND_RANK_LONG = [(1, [4, 9, 1, 2]), (30, [5, 1, 1, 1]), (5, [4, 2, 1, 1]), (9, [3, 4, 5, 1])]

# The README's lines, and what a machine without a GPU needs.
OVERRIDES = [
    "+actor_rollout_ref.model.model_type=dualkv",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "+actor_rollout_ref.model.load_tokenizer=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "+critic.model.fused_kernel_options.dualkv=True",
    "critic.strategy=fsdp2",
    "critic.optim.total_training_steps=10",
    "+critic.model.load_tokenizer=False",
]

BENCH = {
    "engine": "dualkv", "model": "tiny", "layers": 1, "groups": 1, "responses": 4, "prompt_len": 60, "response_len": 10,
    "micro_batch": None, "max_tokens": 110, "attention": "sdpa", "head": "torch", "liger": False, "checkpointing": True,
    "keep": "attention", "dtype": "bf16", "updates": 1, "learning_rate": 1e-6,
}  # fmt: skip

STOCK_BENCH = BENCH | {"engine": "verl", "max_tokens": None, "attention": "math"}
OF_TRACE = {"trace": "trace-tau2-1-n3-t3-x0.02", "micro_batch": None, "max_tokens": 400, "dtype": "fp32"}
KEPT = OF_TRACE | {"trace": "trace-swe-kept-1-n3-t4-x0.02", "max_tokens": 900}
TRACE_ROWS = [
    STOCK_BENCH | OF_TRACE | {"attention": "ragged"},
    BENCH | OF_TRACE,
    BENCH | KEPT,  # by the same worker
    BENCH | KEPT | {"trace": "trace-grpo-0-n4-x0.02"},
]

# Segments of multiples of 16 tokens: on a CPU, activations beyond such a multiple are computed by other code.
EQUAL: dict[str, Any] = PACKED | {
    "run": "old_and_new",
    "model": "of_sixteens",
    "groups": [(33, [15, 31, 15, 47, 15, 15]), (17, [31, 15, 63]), (49, [15, 15, 31, 15, 47]), (17, [15, 31])],
    "equal_bits": True,
    "budgets": [96, 144, 1000],
    "budget": 112,
}
EQUAL_TREES = EQUAL | {"trees": 1, "turns": "of_sixteens", "budgets": [192, 256, 1000], "budget": 208}
EQUAL_BITS: dict[str, dict[str, Any]] = {
    "equal": EQUAL,
    "equal-keep": EQUAL | {"keep": "attention", "interleaved": True, "pad_to": 64},
    "equal-fsdp1": EQUAL | {"strategy": "fsdp"},
    "equal-lora": EQUAL | {"lora": 4},
    "equal-bf16": EQUAL | {"param_dtype": "bf16"},
    "equal-images": EQUAL | {"model": "images_of_sixteens"},
    "equal-trees": EQUAL_TREES,
    "equal-one-by-one": {name: x for name, x in EQUAL.items() if name != "budget"} | {"rollouts": 1},
}
EQUAL_BITS_MORE: dict[str, dict[str, Any]] = {
    "unequal": EQUAL | {"equal_bits": False},
    "equal-not-packed": EQUAL | {"run": "prompt_in_loss"},
}
EQUAL_BITS_OF_TWO: dict[str, dict[str, Any]] = {
    "dp2-equal": EQUAL,
    "dp2-equal-trees": EQUAL_TREES | {"engine": {"reshard_after_forward": False}},
}

# What must be survived, and what veRL has to compute itself.
ONE_MORE: dict[str, dict[str, Any]] = {
    "bench-traces": {"run": "bench", "rows": TRACE_ROWS, "distance": [OF_TRACE["trace"], KEPT["trace"]]},
    "from-configuration": {"run": "from_configuration", "overrides": OVERRIDES},
    "canary-planted": PACKED | {"run": "planted", "canary": 1, "budget": TIGHT},
    "too-long": PACKED | {"run": "scored", "budget": 20},
    "one-token-differs": PACKED | {"run": "scored", "differs": [4, 11], "budget": ROOMY},
    "stock-one-token-differs": STOCK | {"run": "scored", "differs": [4, 11]},
    "truncated-to-nothing": PACKED | {"groups": TRUNCATED, "budget": ROOMY},
    "trees-too-long": TREES | {"run": "scored", "budget": 40},
    "profiled": PACKED | {"run": "profiled", "rollouts": 8},
    "stock-profiled": STOCK | {"run": "profiled", "rollouts": 8},
    "restarted": PACKED | {"run": "restarted", "budget": TIGHT},
    "walk-restarted": WALK | {"run": "restarted"},
    "multimodal": PACKED | {"run": "multimodal"},
    "prompt-in-loss": PACKED | {"run": "prompt_in_loss"},
    "stock-prompt-in-loss": STOCK | {"run": "prompt_in_loss"},
    **{
        f"{name}-loss-of-{tokens}": settings | {"run": "loss_of_ones_own", "selected": tokens == "responses"}
        for name, settings in {"stock": STOCK, "packed": PACKED | {"budget": TIGHT}}.items()
        for tokens in ("responses", "prompts")
    },
    "hybrid-prompt-in-loss": PACKED | HYBRID | {"run": "prompt_in_loss"},
    "hybrid-padded-prompt-in-loss": PACKED | HYBRID | {"run": "prompt_in_loss", "remove_padding": False},
    "olmo-hybrid": PACKED | {"run": "scored", "model": "olmo_hybrid"},
    "distillation": PACKED | {"run": "scored", "settings": {"distillation_only": False, "distillation_use_topk": True}},
}
TWO_MORE: dict[str, dict[str, Any]] = {
    "dp2-one-rank-multimodal": PACKED | {"run": "multimodal", "at": 1},
    "dp2-one-rank-too-long": PACKED | {"run": "scored", "budget": 33, "groups": SECOND_RANK_LONG},
}

# By a name: ranks, and what they run one after another.
SCENARIOS: dict[str, tuple[int, dict[str, dict[str, Any]]]] = {
    "one": (1, ONE | ONE_MORE),
    "equal-bits": (1, EQUAL_BITS | EQUAL_BITS_MORE),
    "equal-bits-of-two": (2, EQUAL_BITS_OF_TWO),
    "hybrids": (1, HYBRIDS),
    "two": (2, TWO | TWO_MORE),
    "four": (4, FOUR),
    "hybrids-over-two": (2, OVER_TWO),
    "hybrids-over-four": (4, OVER_FOUR),
    "fp64": (1, FP64[1]),
    "fp64-over-two": (2, FP64[2]),
}
