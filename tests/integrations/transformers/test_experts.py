"""Mixtures of experts on packed rows: losses per rollout and replayed routes, against separate sequences."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import dualkv

pytest.importorskip("transformers")

import transformers

from dualkv.integrations.transformers import enable, experts, recompute_layers
from dualkv.integrations.transformers.experts import (
    load_balancing_loss,
    replay_routes,
    rollouts_of_rows,
    routers,
    routes_of_rows,
)
from tests.integrations.doubled import double_throughout
from tests.integrations.tiny import assert_close, assert_gradients, make_featured, make_model, take_gradients
from tests.integrations.transformers.test_branches import SEQUENCES

pytestmark = pytest.mark.usefixtures("one_thread")


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    return make_featured(name, 4, dtype) if name == "gpt_oss" else make_model(name, dtype)


def packed() -> dualkv.PackedSequences:
    return dualkv.pack_sequences(SEQUENCES)


def padded() -> dict[str, torch.Tensor]:
    rows = [torch.tensor(sequence) for sequence in SEQUENCES]
    ids, mask = (pad_sequence(of, batch_first=True) for of in (rows, [torch.ones_like(row) for row in rows]))
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_load_balancing_loss_is_that_of_separate_sequences(name):
    """transformers' own loss of the padded sequences, and its gradients; counted by rows it is another one."""
    batch = packed()
    with double_throughout():
        model = make(name).train()
        wanted = model(**padded(), output_router_logits=True).aux_loss
        wanted.backward()
        expected = take_gradients(model)
        out = enable(model)(input_ids=batch.input_ids, dualkv=batch.layout, output_router_logits=True)
        found = load_balancing_loss(model, out.router_logits, batch)
        found.backward()
        assert_close("loss", found, wanted, 1e-6)  # a sum in fp32 within transformers
        assert_gradients(model, expected, 1e-5)
        by_rows = load_balancing_loss(model, out.router_logits, batch, count="rows")
        assert_close("rows", by_rows, out.aux_loss, 1e-6)
        assert abs(by_rows - wanted) > 1e-4 * wanted


def test_load_balancing_loss_of_dbrx():
    """DBRX has the numbers of its experts in a part of its configuration."""
    torch.manual_seed(0)
    of_experts = {"hidden_size": 48, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}
    sizes = {"vocab_size": 96, "d_model": 48, "n_heads": 6, "n_layers": 2, "pad_token_id": 0}
    config = transformers.DbrxConfig(
        **sizes, attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, ffn_config=of_experts
    )
    model, batch = transformers.DbrxForCausalLM(config).eval(), packed()
    wanted = model(**padded(), output_router_logits=True).aux_loss
    out = enable(model)(input_ids=batch.input_ids, dualkv=batch.layout, output_router_logits=True)
    assert_close("loss", load_balancing_loss(model, out.router_logits, batch), wanted, 1e-5)


class Configured(torch.nn.Module):
    """A stand-in for a model of a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def numbers_of_types() -> dict[str, tuple[str, str]]:
    """Expressions for the numbers of experts and of chosen ones, which models' own code hands to its own loss."""
    found, of_self = {}, re.compile(r"self\.(num_experts|num_experts_per_tok) = (config\.[a-z_.]+)\n")
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = path.read_text()
        if "load_balancing_loss_func(" in text:
            numbers = dict(of_self.findall(text))
            if len(numbers) == 2:
                found[path.parent.name] = numbers["num_experts"], numbers["num_experts_per_tok"]
    return found


def test_numbers_of_experts_of_every_type_that_has_the_loss():
    types = numbers_of_types()
    assert types.pop("doge")
    assert len(types) > 25
    for kind, expressions in types.items():
        config = transformers.CONFIG_MAPPING[kind]()
        config = getattr(config, "thinker_config", config)
        for names, expression in zip((experts.EXPERTS, experts.CHOSEN), expressions, strict=True):
            of_text = "text_config" not in expression  # also of a model that decodes text alone
            wanted = eval(expression, {"config": config.get_text_config() if of_text else config})
            assert experts._number(Configured(config), names) == wanted, (kind, expression)
    # Models without a loss of their own, whose routers choose so many.
    gemma = {"text_config": {"num_experts": 8, "top_k_experts": 2}}
    for kind, settings, wanted in (
        ("aria", {}, (8, 2)), ("hunyuan_v1_moe", {"num_experts": 8, "moe_topk": [2, 2]}, (8, 2)),
        ("longcat_flash", {}, (512, 12)), ("llama4", {}, (16, 1)), ("gemma4", gemma, (8, 2)),
    ):  # fmt: skip
        config = transformers.CONFIG_MAPPING[kind](**settings)
        found = tuple(experts._number(Configured(config), names) for names in (experts.EXPERTS, experts.CHOSEN))
        assert found == wanted, kind
    config = transformers.CONFIG_MAPPING["hunyuan_v1_moe"](moe_topk=[2, 1])
    with pytest.raises(ValueError, match=r"num_experts_per_tok of Configured is \[2, 1\]"):
        experts._number(Configured(config), experts.CHOSEN)


def test_rollouts_of_rows():
    batch = packed()
    times = rollouts_of_rows(batch)
    assert times.sum() == sum(map(len, SEQUENCES))
    assert all((times[batch._rows[: len(SEQUENCES[0])]] >= 2).tolist()), "the first rollout is there twice"
    groups = dualkv.pack([[5, 6, 7], [8, 9]], [[[1], [2, 3], []], [[4]]])
    rows = groups.unpack_sequences(torch.arange(groups.layout.num_tokens))
    assert (rollouts_of_rows(groups) == np.bincount(torch.cat(rows))).all()
    assert (rollouts_of_rows(groups.layout) == rollouts_of_rows(groups)).all()
    assert batch.layout.depth > 2
    with pytest.raises(ValueError, match="levels"):
        rollouts_of_rows(batch.layout)


def recorded_routes(layers: int, experts: int, k: int) -> list[torch.Tensor]:
    """Random ones, equal for equal beginnings of rollouts."""
    found = []
    for sequence in SEQUENCES:
        seeds = [hash(tuple(sequence[: i + 1])) % 2**32 for i in range(len(sequence))]
        draws = [np.random.default_rng(seed) for seed in seeds]
        found.append(np.stack([[d.permutation(experts)[:k] for _ in range(layers)] for d in draws]))
    return [torch.from_numpy(routes) for routes in found]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_replayed_routes_are_those_of_separate_sequences(name):
    batch = packed()
    with double_throughout():
        model = enable(make(name)).train()
        config = model.config
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        recorded = recorded_routes(len(routers(model)), experts, config.num_experts_per_tok)
        alone = []
        weights = torch.randn(config.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        for sequence, routes in zip(SEQUENCES, recorded, strict=True):
            with replay_routes(model, routes.transpose(0, 1)):
                hidden = model.model(input_ids=torch.tensor([sequence])).last_hidden_state[0]
                (hidden * weights).sum().backward()
            alone.append(hidden.detach())
        expected = take_gradients(model)
        recompute_layers(model, "nothing")
        found, differing = routes_of_rows(batch, recorded)
        assert differing == 0
        with replay_routes(model, found):
            hidden = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
            rows = batch.unpack_sequences(hidden)
            sum((row * weights).sum() for row in rows).backward()
        for row, wanted in zip(rows, alone, strict=True):
            assert_close("hidden", row.detach(), wanted, 1e-12)
        assert_gradients(model, expected, 1e-10)
        other = model.model(input_ids=batch.input_ids, dualkv=batch.layout).last_hidden_state
        assert (other - hidden).abs().max() > 1e-3, "the routers' own choice is another one, and back"


def test_recorded_routes_of_rollouts_that_differ_or_lack_some():
    batch = packed()
    recorded = recorded_routes(2, 4, 2)
    recorded[2] = recorded[2].clone()
    recorded[2][:3] = (recorded[2][:3] + 1) % 4
    recorded[5] = recorded[5][:1]
    found = routes_of_rows(batch, recorded)
    rows = batch.unpack_sequences(torch.arange(batch.layout.num_tokens))
    again = sum(map(len, recorded)) - len(torch.unique(torch.cat(rows))) + len(SEQUENCES[5]) - 1
    changed = sum(bool((recorded[2][i].sort(-1)[0] != recorded[0][i].sort(-1)[0]).any()) for i in range(3))
    assert found.differing == pytest.approx(changed / again)
    assert changed > 0
    assert (found.routes[:, rows[0]] == recorded[0].transpose(0, 1)).all(), "the first rollout's"
    assert (found.routes[:, rows[5][1:]] == -1).all()
    with pytest.raises(ValueError, match="recorded has 1 entries"):
        routes_of_rows(batch, recorded[:1])
    with pytest.raises(ValueError, match=r"recorded\[5\] has 9 tokens"):
        routes_of_rows(batch, [*recorded[:5], torch.zeros(9, 2, 2).long(), recorded[6]])
    with pytest.raises(ValueError, match=r"recorded\[1\] has shape"):
        routes_of_rows(batch, [recorded[0], recorded[1][:, :1], *recorded[2:]])
    for wrong, says in ((recorded[1] + 0.5, "float32"), (recorded[1].numpy(), "ndarray")):
        with pytest.raises(TypeError, match=rf"recorded\[1\] must .*{says}"):
            routes_of_rows(batch, [recorded[0], wrong, *recorded[2:]])


def test_own_choice_where_nothing_was_recorded_and_refusals():
    batch = packed()
    model = enable(make_model("qwen3_moe"))
    given = {"input_ids": batch.input_ids, "dualkv": batch.layout}
    wanted = model.model(**given).last_hidden_state
    k, layers = model.config.num_experts_per_tok, len(routers(model))
    none = torch.full((layers, batch.layout.num_tokens, k), -1)
    with replay_routes(model, none):
        assert torch.equal(model.model(**given).last_hidden_state, wanted)
    with pytest.raises(ValueError, match="for each router"), replay_routes(model, none[:1]):
        pass
    some = none.clone()
    some[1, 2, 0] = 3  # the router may choose the same expert as its second
    with pytest.raises(ValueError, match=r"routes\[1, 2\] is \[3, -1\]"), replay_routes(model, some):
        pass
    with pytest.raises(TypeError, match="routes must hold integers"), replay_routes(model, none.float()):
        pass
    with pytest.raises(ValueError, match="0 times"), replay_routes(model, none[:, :-1]):
        model.model(**given)
    assert torch.equal(model.model(**given).last_hidden_state, wanted), "nothing of it is left"
    logits = [torch.zeros(3, 4)]
    with pytest.raises(ValueError, match="'tokens'"):
        load_balancing_loss(model, logits, batch, count="tokens")
    for nothing in (None, ()):
        with pytest.raises(ValueError, match=rf"router_logits is {nothing}, ".replace("()", r"\(\)")):
            load_balancing_loss(model, nothing, batch)
    with pytest.raises(ValueError, match="3 rows"):
        load_balancing_loss(model, logits, batch)
    with pytest.raises(ValueError, match=r"router_logits has 5 columns, .* has 4 experts"):
        load_balancing_loss(make("qwen3_moe"), [torch.zeros(batch.layout.num_tokens, 5)], batch)
    with pytest.raises(ValueError, match="no experts"):
        load_balancing_loss(make_model(), logits, batch)
