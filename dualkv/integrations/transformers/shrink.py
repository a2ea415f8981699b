"""A small copy of a transformers configuration that keeps everything that decides how attention is computed.

Layers, heads, experts, widths and the vocabulary shrink. The head dims, the ratios of head counts, the pattern of
layers and the type of the rotary embedding stay. Position thresholds (windows, chunks, the length from which a rotary
embedding is scaled) shrink below the lengths of the self-check's tree, so that the tree shows their effect.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from functools import reduce
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedConfig

Config = TypeVar("Config", bound=PreTrainedConfig)


class Sizes(NamedTuple):
    """The largest sizes of a small copy; by default those of the self-check.

    Attributes:
        layers: enough for five layers with windows before a full one.
        width: of MLPs, and of hidden states if their size is independent of the heads.
        vocabulary: token ids.
        experts: of a layer.
        positions: size of tables of learned positions.
        threshold: of positions; the self-check's tree has paths of up to 16 tokens.
        selected: keys, by an indexer: fewer than the tree's paths have.
    """

    layers: int = 8
    width: int = 64
    vocabulary: int = 64
    experts: int = 4
    positions: int = 64
    threshold: int = 6
    selected: int = 6


SELF_CHECK = Sizes()

# Names of configuration fields. Model types have many authors, so one quantity has several names.
DEPTH = re.compile(r"(num_hidden_layers|n_layers?|(num_)?layers|(num_)?decoder_layers)$")
HEADS = re.compile(r"((swa_|decoder_)?(num_)?attention_heads|n_heads?|num_heads|num_attention_heads_per_layer)$")
KV_HEADS = re.compile(r"((swa_|global_)?num_(global_)?(key_value|kv)_heads|num_key_value_heads_per_layer|kv_n_heads)$")
HIDDEN = re.compile(r"(hidden_size|d_model|n_embd|embed_dim|word_embed_proj_dim|embedding_size)$")
WIDE = "attention_hidden_size"  # Zamba 2: heads times head dim, and a multiple of the hidden size
HEAD_DIM = re.compile(r"(head_dim|qk_nope_head_dim|kv_channels|d_kv|attention_head_dim)$")
MLP = re.compile(r".*intermediate_size(_mlp)?$|(expert_|decoder_)?(ffn_dim|ffn_hidden_size)$|n_inner$|dim_ff$|dff$")
LORA = re.compile(r".*lora_rank$")
NUM_EXPERTS = re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num)$")
EXPERTS_A_TOKEN = re.compile(r"(num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts)$")
EXPERT_GROUPS = re.compile(r"(n_group|num_expert_group)$")
VOCAB = re.compile(r".*vocab_size.*")
LINEAR_HEADS = re.compile(r"linear_num_(key_|value_)?heads$")
MAMBA_HEADS = re.compile(r"(mamba_(n|num)|n_mamba)_heads$")
MAMBA_HEAD_DIM = re.compile(r"mamba_(d_head|head_?dim)$")
MAMBA_GROUPS = re.compile(r"(mamba_)?n_?groups$")
MAMBA_EXPAND = re.compile(r"(mamba_)?expand$")
MAMBA_CHUNK = re.compile(r"(mamba_)?chunk_size$")
TOKEN_ID = re.compile(r".*_token_id$")
POSITIONS = re.compile(r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_target_positions)$")
THRESHOLDS = re.compile(
    r"(.*_)?(sliding_window|window_size|window_len|attention_chunk_size)(_size)?$|floor_scale$|log_scaling_n_floor$"
    r"|index_topk_blocks$|index_block_size$|original_max_position_embeddings$|local_attention$|rel_extent$"
    r"|(position_bias|relative)_max_distance$"
)
# Fields of rules that give a layer's kind by its index: every n-th layer, or all layers from the n-th on.
PERIOD = re.compile(r".*(_period|_interval|_sparse_step|_every_n_layers|_layer_step|sliding_window_pattern)$")
FIRST = re.compile(r"(first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers)$")
# Fields that cut the layers of Dory into a beginning, layers that run several times, and an end.
SECTIONS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")


def shrink(config: Config, *, thresholds: bool = True, sizes: Sizes = SELF_CHECK) -> Config:
    """The small copy; `thresholds=False` keeps the position thresholds."""
    small = copy.deepcopy(config)
    for part in vars(small).values():
        if isinstance(part, PreTrainedConfig):
            vars(part).update(vars(shrink(part, thresholds=thresholds, sizes=sizes)))
    _shrink_layers(small, sizes.layers)
    _shrink_heads(small, sizes.width)
    _shrink_repeated(small, config)
    _shrink_recurrent(small, config)
    if wide := getattr(config, WIDE, None):
        setattr(small, WIDE, wide // config.hidden_size * small.hidden_size)
    for name, value in list(vars(small).items()):
        if (new := _shrunk(name, value, sizes)) is not None:
            setattr(small, name, new)
    if thresholds:
        _shrink_thresholds(small, sizes.threshold)
    return small


def thresholds(config: PreTrainedConfig) -> Iterator[tuple[str, float]]:
    """The position thresholds of a configuration and of its nested tables, each by name."""
    for where in (vars(config), *_tables(config)):
        for name, value in where.items():
            if THRESHOLDS.match(str(name)) and _number(value):
                yield name, value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fields(config: PreTrainedConfig, names: re.Pattern[str]) -> dict[str, Any]:
    """The fields whose name matches and whose value is not None, 0 or an empty list."""
    return {name: value for name, value in vars(config).items() if value and names.match(name)}


def _shrunk(name: str, value: Any, sizes: Sizes) -> Any:
    """The value in the small copy of a field that shrinks on its own; None if the field stays or shrinks elsewhere."""
    most: int | None = None
    if MLP.match(name):
        most = sizes.width
    elif VOCAB.match(name):
        most = sizes.vocabulary
    elif LORA.match(name):
        most = sizes.width // 2
    elif POSITIONS.match(name):
        most = sizes.positions
    elif NUM_EXPERTS.match(name):
        most = sizes.experts
    elif EXPERTS_A_TOKEN.match(name) or EXPERT_GROUPS.match(name):
        most = 2
    elif MAMBA_CHUNK.match(name):
        most = 2 * sizes.threshold  # longer than some of the tree's segments and shorter than its paths
    elif name in ("index_topk", "indexer_budget"):
        return sizes.selected if _number(value) else None
    elif name in ("indexer_compress_ratio", "index_kpool"):  # keys that are selected together
        most = 2
    elif name == "topk_group":
        most = 1
    elif TOKEN_ID.match(name):
        return 0 if isinstance(value, list) or (_number(value) and value >= sizes.vocabulary) else None
    if most is None:
        return None
    if isinstance(value, list):
        return [min(x, most) for x in value]
    return min(value, most) if _number(value) else None


# ---------------------------------------------------------------- layers
def _shrink_layers(config: PreTrainedConfig, most: int) -> None:
    """Keeps the first layers, up to the first of the last new kind; if these are too many, one layer of each kind."""
    depth = max(_fields(config, DEPTH).values(), default=0)
    if depth < 2:
        return
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    numbers = {name: value for name, value in lists.items() if _are_layer_numbers(value, depth)}
    per_layer = {name: value for name, value in lists.items() if len(value) == depth and name not in numbers}

    first_of: dict[Any, int] = {}
    for i in range(depth):
        kind = [str(value[i]) for value in per_layer.values()], [i in value for value in numbers.values()]
        first_of.setdefault(str(kind), i)
    keep = list(range(max(first_of.values()) + 1))
    periods = [value for value in _fields(config, PERIOD).values() if isinstance(value, int)]
    firsts = [value + 1 for value in _fields(config, FIRST).values() if isinstance(value, int)]
    keep = list(range(min(max(len(keep), 2, *periods, *firsts), depth)))
    if len(keep) > most:
        first = sorted(first_of.values())[:most]
        keep = sorted({*first, *range(min(most, max([2, *periods])))} if len(first) < 2 else first)
        for name, value in _fields(config, FIRST).items():
            setattr(config, name, min(value, len(keep) - 1))

    for name in _fields(config, DEPTH):
        setattr(config, name, len(keep))
    if len(keep) > 2 and all(name in vars(config) for name in SECTIONS):
        for name, value in zip(SECTIONS, (1, len(keep) - 2, 1), strict=True):
            setattr(config, name, value)
    for name, value in per_layer.items():
        setattr(config, name, type(value)(value[i] for i in keep))
    for name, value in numbers.items():
        setattr(config, name, type(value)(keep.index(i) for i in value if i in keep))
    # Settings that transformers keeps for single layers, by layer index.
    if (own := getattr(vars(config).get("_heterogeneity_spec"), "per_layer_overrides", None)) is not None:
        of_kept = {keep.index(i): fields for i, fields in own.items() if i in keep}
        own.clear()
        own.update(of_kept)
    for name, value in _fields(config, re.compile(r"num_kv_shared_layers$")).items():
        types, shared = vars(config).get("layer_types") or [None] * len(keep), min(value, len(keep) // 2)
        while shared and not set(types[-shared:]) <= set(types[:-shared]):  # some would have no layer to take them from
            shared -= 1
        setattr(config, name, shared)


def _are_layer_numbers(value: Any, depth: int) -> bool:
    """Whether a list holds indices of some layers, and not one entry a layer."""
    return (
        all(type(x) is int and x < depth for x in value)
        and list(value) == sorted(set(value))
        and (len(value) > 1 or (len(value) == 1 and depth > 1))
    )


# ---------------------------------------------------------------- heads and widths
def _shrink_heads(config: PreTrainedConfig, most: int) -> None:
    """Divides all head counts by one number, and the hidden size too if it is heads times head dim."""
    counts = {**_fields(config, HEADS), **_fields(config, KV_HEADS)}
    heads = next(iter(_fields(config, HEADS).values()), None)
    if isinstance(heads, list):
        heads = heads[0]
    every = [x for value in counts.values() for x in (value if isinstance(value, list) else [value])]
    hidden = _fields(config, HIDDEN)
    if not heads or not all(type(x) is int for x in every):
        return
    common = reduce(math.gcd, every)
    explicit = _fields(config, HEAD_DIM)
    width = max((x for x in explicit.values() if type(x) is int), default=max(hidden.values(), default=0) // heads)
    by = common // 2 if common % 2 == 0 and 2 * heads // common * width <= 16 * most else common
    for name, value in counts.items():
        setattr(config, name, [x // by for x in value] if isinstance(value, list) else value // by)
    few = heads // by
    for name, value in hidden.items():
        if explicit and getattr(config, WIDE, value) != heads * width:
            step = math.lcm(few, 16)
            setattr(config, name, min(value, -(-most // step) * step))
        else:
            setattr(config, name, value // heads * few)


def _shrink_repeated(small: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Let nested parts of the small copy without heads of their own repeat the hidden size and the key/value heads of
    the whole (DBRX)."""
    if not _fields(config, HEADS):
        return
    parts = [part for part in vars(small).values() if isinstance(part, PreTrainedConfig) and not _fields(part, HEADS)]
    for names in (HIDDEN, KV_HEADS):
        few = {value: vars(small)[name] for name, value in _fields(config, names).items() if type(value) is int}
        for part in parts:
            for name, value in _fields(part, names).items():
                if type(value) is int and value in few:
                    setattr(part, name, few[value])


def _shrink_recurrent(small: PreTrainedConfig, config: PreTrainedConfig) -> None:
    """Reduce the heads of recurrent layers of the small copy, which has its hidden size. The ratio of key heads to
    value heads stays, and head dims that fit do."""
    linear = {name: value for name, value in _fields(small, LINEAR_HEADS).items() if type(value) is int}
    if linear:
        common = math.gcd(*linear.values())
        for name, value in linear.items():
            setattr(small, name, value // (common // 2 if common % 2 == 0 else common))
    heads, dims, groups, expand = (
        next(((name, value) for name, value in _fields(small, names).items() if type(value) is int), None)
        for names in (MAMBA_HEADS, MAMBA_HEAD_DIM, MAMBA_GROUPS, MAMBA_EXPAND)
    )
    if heads is None or dims is None or groups is None:
        return
    number = 2 * math.gcd(groups[1], 2)
    if expand is not None and heads[1] * dims[1] == expand[1] * config.hidden_size:
        number = max(expand[1] * small.hidden_size // dims[1], 1)  # the layer is `expand` times the hidden size wide
        # Few heads of a wide layer: their dim is wider than the whole layer of the small copy.
        setattr(small, dims[0], min(dims[1], expand[1] * small.hidden_size))
    setattr(small, heads[0], number)
    setattr(small, groups[0], math.gcd(groups[1], 2, number))
    if getattr(small, "mamba_d_ssm", None):
        small.mamba_d_ssm = number * dims[1]


# ---------------------------------------------------------------- thresholds
def _tables(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """Dictionaries in a configuration, nested ones too, such as those of the rotary embedding of each layer type."""
    found = [value for value in vars(config).values() if isinstance(value, dict)]
    while found:
        table = found.pop()
        yield table
        found += [value for value in table.values() if isinstance(value, dict)]


def _shrink_thresholds(config: PreTrainedConfig, threshold: int) -> None:
    for name, value in list(vars(config).items()):
        in_blocks = name.startswith("index_") and "block" in name  # a number of blocks, or the positions of one
        most = 2 if in_blocks else threshold
        if THRESHOLDS.match(name) and _number(value) and value > most:
            setattr(config, name, type(value)(most))
        elif THRESHOLDS.match(name) and isinstance(value, list):
            setattr(config, name, [min(x, threshold) if _number(x) else x for x in value])
    for table in _tables(config):
        for name, value in table.items():
            if THRESHOLDS.match(str(name)) and _number(value):
                table[name] = min(value, type(value)(threshold))
        if "dynamic" in (table.get("rope_type"), table.get("type")):
            for name in _fields(config, POSITIONS):
                setattr(config, name, threshold)
