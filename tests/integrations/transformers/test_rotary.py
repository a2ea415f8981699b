"""Rotary embeddings that depend on the length of the sequence: each row gets the factors of its own sequence alone."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dualkv

tf = pytest.importorskip("transformers")

from dualkv.context_parallel import ContextShard  # noqa: E402
from dualkv.integrations.transformers import disable, enable, layers, media, recompute_layers, rotary, suspended  # noqa: E402
from dualkv.sequence_parallel import Shard  # noqa: E402
from tests.integrations import scaled  # noqa: E402
from tests.integrations.scaled import LAYOUT, PATHS, THRESHOLD  # noqa: E402
from tests.integrations.tiny import SIZES, assert_gradients, take_gradients  # noqa: E402
from tests.integrations.transformers import test_media  # noqa: E402
from tests.ranks import on_ranks  # noqa: E402
from tools import zoo  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
# Factors for all layers, for types of layers, with a magnitude, complex factors, and embeddings inside the layers.
SAMPLE = ("phi3", "gemma3_text", "phimoe", "deepseek_v2", "moshi")
ON_RANKS = ("phi3", "moshi")


def often(types: tuple[str, ...], pairs: list[tuple[str, str]]) -> list[Any]:
    """Mark the pairs of other types slow."""
    return [pytest.param(*pair, marks=() if pair[0] in types else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("kind", "rope"), often(SAMPLE, scaled.pairs(zoo.types())))
def test_sequences_alone(kind: str, rope: str) -> None:
    """Compare each sequence, packed in one row and walked, with itself alone."""
    model = scaled.make(kind, rope)
    if model is None:
        pytest.skip("no rotary embedding, or no packed calls")
    ids = scaled.token_ids(model)
    expected = scaled.alone(model, ids)
    enable(model, check=False)
    assert rotary.embeddings(model)
    with torch.no_grad():
        logits = model(input_ids=ids, dualkv=LAYOUT).logits[0]
        assert scaled.error([logits[path] for path in PATHS], expected) < zoo.BOUND
        blind = any(type(decoder).__name__ in media.BLIND for decoder in layers.decoders(model))
        for budget in () if blind else (5, 20):  # a walk of these is refused: images may be in their embeddings
            assert scaled.error(scaled.walked(model, ids, budget), expected) < zoo.BOUND
        with pytest.MonkeyPatch.context() as patch:  # what is compared depends on it
            patch.setattr(rotary, "scaling", lambda *_: None)
            logits = model(input_ids=ids, dualkv=LAYOUT).logits[0]
        assert scaled.error([logits[path] for path in PATHS], expected) > 10 * zoo.BOUND


# ---------------------------------------------------------------- which embeddings these are
KINDS = [(kind, rope) for kind in zoo.types() for rope in (*scaled.FIXED, *scaled.BY_LENGTH)]


@pytest.mark.parametrize(("kind", "rope"), often(("phimoe", "gemma3_text"), KINDS))
def test_embeddings_that_depend_on_other_rows_are_known(kind: str, rope: str) -> None:
    model = scaled.make(kind, rope)
    if model is None:
        pytest.skip("no rotary embedding, or no packed calls")
    for module in scaled.embeddings(model):
        found = dict(scaled.dependence(module))
        says = {layer: rotary.scaling(module, layer) is not None for layer in found}
        assert says == found
        assert rotary.depends_on_length(module) == any(found.values())
    hooked = [x for x in enable(model, check=False).modules() if rotary.of_own_sequences in x._forward_hooks.values()]
    assert hooked == rotary.embeddings(model)


# Files that read the largest position to number what follows images and audio.
OF_IMAGES = {"hunyuan_vl", "minicpmv4_7", "qwen2_5_omni", "qwen3_omni_moe"}


def test_no_other_model_reads_the_largest_position() -> None:
    """No other model does, apart from the rules of transformers' decorator."""
    reads = re.compile(r"max\(position_ids|position_ids\.a?max\(|cache_position\[-1\]")
    files = Path(tf.models.__path__[0]).glob("*/modeling_*.py")
    found = {file.parent.name for file in files if reads.search(file.read_text())}
    assert found <= OF_IMAGES | {"phimoe", "reformer"}  # the first is tested above, the second is refused


# ---------------------------------------------------------------- ranks
def on_a_rank(rank: int, folder: str, *types: str) -> None:
    dist.init_process_group("gloo")
    found = {}
    for kind, rope in scaled.pairs(types):
        model = scaled.make(kind, rope)
        if model is None:
            continue
        ids = scaled.token_ids(model)
        enable(model, check=False)
        for way in (Shard, ContextShard):
            shard = way(LAYOUT, dist.group.WORLD)
            logits = model(input_ids=shard.split(ids, 1), dualkv=shard).logits
            (logits * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
            found[kind, rope, way.__name__] = shard.gather(logits.detach(), 1)[0]
    torch.save(found, f"{folder}/{rank}")
    dist.destroy_process_group()


def check_ranks(folder: Path, types: tuple[str, ...] | list[str]) -> None:
    on_ranks(2, "tests.integrations.transformers.test_rotary:on_a_rank", str(folder), *types)
    ranks = [torch.load(folder / str(rank)) for rank in range(2)]
    assert ranks[0]
    for (kind, rope, way), logits in ranks[0].items():
        model = scaled.make(kind, rope)
        expected = scaled.alone(model, scaled.token_ids(model))
        assert scaled.error([logits[path] for path in PATHS], expected) < zoo.BOUND, (kind, rope, way)
        assert torch.equal(ranks[1][kind, rope, way], logits)


def test_ranks(tmp_path: Path) -> None:
    check_ranks(tmp_path, ON_RANKS)


# ---------------------------------------------------------------- what is refused
def small(rope: str, **settings: Any) -> Any:
    config = tf.LlamaConfig(**SIZES | settings)
    config.rope_parameters = scaled.parameters(rope, 4, {})
    config.max_position_embeddings = THRESHOLD if rope == "dynamic" else 64
    torch.manual_seed(0)
    return tf.LlamaForCausalLM(config).eval()


def tokens(*lens: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(sum(lens))
    return [torch.randint(3, 80, (n,), generator=draw) for n in lens]


SAYS = {
    "longrope": "LlamaRotaryEmbedding has other factors for sequences of more than 8 tokens (longrope), and ",
    "dynamic": "LlamaRotaryEmbedding has other factors for sequences of each length above 8 tokens (dynamic), and ",
}


@pytest.mark.parametrize("rope", scaled.BY_LENGTH)
@pytest.mark.parametrize("lens", [(2, 6), (6, 3), (5, 9), (4, 5)])
def test_sequences_that_share_rows(rope: str, lens: tuple[int, int]) -> None:
    """A prompt of 3 tokens and two responses."""
    model = small(rope)
    (prompt,), responses = tokens(3), tokens(*lens)
    sequences = [torch.cat([prompt, response]) for response in responses]
    expected = [model(input_ids=x[None], use_cache=False).logits[0] for x in sorted(sequences, key=len)]
    batch = dualkv.pack([*tokens(4), prompt], [tokens(1, 2), responses])
    enable(model)
    longest, shortest = max(lens) + 3, min(lens) + 3
    one_side = longest <= THRESHOLD or (shortest > THRESHOLD and rope == "longrope")
    walked = dualkv.pack_sequences(sequences)

    def forward(ids: torch.Tensor, branch: Any) -> torch.Tensor:
        return model(input_ids=ids, dualkv=branch).logits

    if one_side:
        rows = batch.unpack_sequences(model(input_ids=batch.input_ids, dualkv=batch.layout).logits[0])[2:]
        assert scaled.error(sorted(rows, key=len), expected) < 1e-5
        dualkv.walk(walked, 3, forward)
        return
    shared = f" of the layout are shared by sequences of {shortest} to {longest} tokens: expected "
    with pytest.raises(ValueError, match=re.escape(f"{SAYS[rope]}rows 7 to 9{shared}")):
        model(input_ids=batch.input_ids, dualkv=batch.layout)
    for budget in (1, 3, 100):
        with pytest.raises(ValueError, match=re.escape(f"{SAYS[rope]}rows 0 to 2{shared}")):
            dualkv.walk(walked, budget, forward)
    for way in (Shard, ContextShard):
        with pytest.raises(ValueError, match=re.escape(f"{SAYS[rope]}rows 7 to 9{shared}")):
            model(input_ids=batch.input_ids, dualkv=way(batch.layout, None))
    apart = dualkv.pack([prompt, prompt], [[responses[0]], [responses[1]]], group_ids=None)
    if apart.layout.num_groups == 2:
        rows = apart.unpack_sequences(model(input_ids=apart.input_ids, dualkv=apart.layout).logits[0])
        assert scaled.error(sorted(rows, key=len), expected) < 1e-5


@pytest.mark.parametrize("rope", scaled.BY_LENGTH)
def test_the_command_says_what_is_refused(rope: str) -> None:
    (note,) = rotary.notes(small(rope))
    assert note.startswith(SAYS[rope].removesuffix(", and "))
    assert not rotary.notes(small("yarn"))


@pytest.mark.parametrize("remade", [lambda x: x, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_sequence_that_another_one_continues(remade: Any) -> None:
    """A sequence without a segment of its own counts with its length nevertheless."""
    model = enable(small("longrope"))
    (long,) = tokens(12)
    for shorter, refused in ((long[:8], True), (long[:9], False)):
        layout = remade(dualkv.pack_sequences([shorter, long]).layout)
        assert layout.num_segments == 2
        assert layout.depth == 2
        for given in (layout, Shard(layout, None, 8)):
            ids = torch.nn.functional.pad(long, (0, given.num_tokens - 12))[None]
            if refused:
                with pytest.raises(ValueError, match="rows 0 to 7 of the layout are shared by sequences of 8 to 12"):
                    model(input_ids=ids, dualkv=given)
            else:
                model(input_ids=ids, dualkv=given)
    assert dualkv.Layout.from_token_sequences([long[:8], long])._segments.ends_sequence.all()


# ---------------------------------------------------------------- gradients, compile, state
@pytest.mark.parametrize("keep", [None, "attention", "transformers"])
@pytest.mark.parametrize(("kind", "rope"), [("phi3", "longrope"), ("moshi", "dynamic")])
def test_gradients_with_layers_that_run_again(kind: str, rope: str, keep: str | None) -> None:
    """Two calls, one of short sequences alone, before both backwards: layers run again with their call's lengths."""
    model = scaled.make(kind, rope)
    model.config.use_cache = False
    ids = scaled.token_ids(model)
    shorter = dualkv.Layout.from_lengths([3], [[2, 4]])

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return (logits * torch.linspace(-1, 1, logits.shape[-1])).square().sum() / 100

    for path in PATHS:
        first = [i for i, row in enumerate(path) if not any(row in p for p in PATHS[: PATHS.index(path)])]
        if first:
            loss(model(input_ids=ids[:, path], use_cache=False).logits[0, first]).backward()
    for path, first in (([0, 1, 2, 3, 4], 0), ([0, 1, 2, 5, 6, 7, 8], 3)):
        loss(model(input_ids=ids[:, path], use_cache=False).logits[0, first:]).backward()
    expected = take_gradients(model)
    enable(model, check=False).train()
    if keep == "transformers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    elif keep is not None:
        recompute_layers(model, keep)
    losses = [loss(model(input_ids=ids[:, : x.num_tokens], dualkv=x).logits[0]) for x in (LAYOUT, shorter)]
    sum(losses).backward()
    assert_gradients(model, expected, 1e-4)


@pytest.mark.parametrize("rope", ["longrope", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_compiled(rope: str) -> None:
    """Longrope in one graph, if a call came before; dynamic NTK breaks graphs, as it does without a layout."""
    torch._dynamo.reset()
    model = enable(small(rope, num_hidden_layers=1))
    compiled = torch.compile(model, backend="eager", fullgraph=rope == "longrope", dynamic=True)
    short = dualkv.Layout.from_lengths([3, 2], [[2, 4], [1]])
    ids = torch.randint(3, 96, (1, LAYOUT.num_tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for layout in (LAYOUT, short, LAYOUT):
            given = {"input_ids": ids[:, : layout.num_tokens], "dualkv": layout}
            expected = model(**given).logits
            torch.testing.assert_close(compiled(**given).logits, expected)
        crossing = dualkv.Layout.from_lengths([3], [[2, 6]])
        with pytest.raises(ValueError, match="rows 0 to 2 of the layout are shared by sequences of 5 to 9 tokens"):
            compiled(input_ids=ids[:, :11], dualkv=crossing)


@pytest.mark.parametrize("rope", scaled.BY_LENGTH)
def test_calls_without_a_layout_do_not_change(rope: str) -> None:
    """A packed call neither depends on earlier calls nor leaves anything to later ones."""
    model = small(rope)
    ids = torch.randint(3, 96, (1, LAYOUT.num_tokens), generator=torch.Generator().manual_seed(1))

    def plain() -> list[torch.Tensor]:
        with torch.no_grad():
            found = [model(input_ids=ids[:, :n], use_cache=False).logits for n in (9, 5, 20)]
            return [*found, model.generate(ids[:, :6], max_new_tokens=6, do_sample=False)]

    before = plain()
    model = small(rope)
    enable(model)
    with torch.no_grad():
        packed = model(input_ids=ids, dualkv=LAYOUT).logits
        assert all(torch.equal(x, y) for x, y in zip(plain(), before, strict=True))
        for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(input_ids=ids, dualkv=LAYOUT).logits, packed)
            with suspended(other):
                other(input_ids=ids)
            assert all(x.dualkv_layout is None for x in rotary.embeddings(other))
    hooked = [m for m in disable(model).modules() if m._forward_hooks or hasattr(m, "dualkv_layout")]
    assert not hooked
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("threshold", "shared"), [(23, None), (8, None), (14, (14, 16))])
def test_positions_of_images_count_and_not_their_rows(threshold: int, shared: tuple[int, int] | None) -> None:
    """A prompt of 23 rows, whose image of 16 rows has positions of 4, and responses that end at positions 13 and 15."""
    ids, media = test_media.prompt(torch.Generator().manual_seed(0), "Qwen2VL", (1, 8, 8))
    assert len(ids) == 23
    config = test_media.make("Qwen2VL").config
    config.text_config.rope_parameters = scaled.parameters("longrope", 4, test_media.ROPE)
    config.text_config.rope_parameters["original_max_position_embeddings"] = threshold
    torch.manual_seed(0)
    model = tf.Qwen2VLForConditionalGeneration(config).eval()
    responses, expected = tokens(3, 5), []
    with torch.no_grad():
        for response in responses:
            kinds = torch.nn.functional.pad(media["mm_token_type_ids"], (0, len(response)))
            given = media | {"input_ids": torch.cat([ids, response])[None], "mm_token_type_ids": kinds}
            expected.append(model(use_cache=False, **given).logits[0])
        batch = dualkv.pack([ids], [responses], media=[media])
        given = {"input_ids": batch.input_ids, "dualkv": batch.layout, **batch.media}
        enable(model)
        if shared is None:
            assert scaled.error(batch.unpack_sequences(model(**given).logits[0]), expected) < 1e-5
        else:
            says = f"rows 0 to 22 of the layout are shared by sequences of {shared[0]} to {shared[1]} tokens"
            with pytest.raises(ValueError, match=says):
                model(**given)
