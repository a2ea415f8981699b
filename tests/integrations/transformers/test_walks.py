"""Walks in memory: budgets in bytes, what trunks keep, losses of whole sequences, updates against separate ones."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch

import dualkv
from dualkv.data.parts import fitting, plan_parts
from dualkv.integrations.transformers import enable, recompute_layers
from dualkv.row_costs import Peak, measure_sharded_rows
from tests.integrations.tiny import assert_close, assert_gradients, gradients, make_model
from tests.integrations.transformers import test_recurrent
from tests.integrations.transformers.test_branches import forward_of, packed, values_of, walked, weights_of, whole

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
DENSE = "qwen3", "qwen3_moe"


def group(prompt, lengths):
    """One prompt and responses, all of whose tokens count."""
    draw = torch.Generator().manual_seed(0)
    shared, *responses = (torch.randint(3, 60, (n,), generator=draw).tolist() for n in (prompt, *lengths))
    sequences = [[*shared, i, *r] for i, r in enumerate(responses, 3)]
    return sequences, [[0] * prompt + [1] * (len(s) - prompt) for s in sequences]


# ---------------------------------------------------------------- memory
@pytest.fixture(scope="module")
def costs():
    """Costs of the model below, whose layers are checkpointed."""
    model = enable(make_model(num_hidden_layers=6)).train()
    recompute_layers(model)
    return dualkv.measure_rows(forward_of(model), torch.arange(3, 60), rows=32)


def test_costs_are_those_of_the_model(costs):
    config = make_model().config
    heads = config.num_key_value_heads * config.head_dim
    assert costs.kept == 6 * 2 * heads * (4 + 4), "keys and values, and their sums, in fp32"
    inputs = 6 * config.hidden_size * 4
    assert inputs < costs.recomputed < costs.graph / 3
    model = enable(make_model(num_hidden_layers=6)).train()
    plain = dualkv.measure_rows(forward_of(model), torch.arange(3, 60), rows=32)
    assert plain.recomputed == plain.graph == pytest.approx(costs.graph)
    assert (plain.kept, plain.path, plain.kv_heads) == (costs.kept, costs.path, config.num_key_value_heads)
    for (all_, again), most in ((costs.beside_path, costs.recomputed), (costs.saved, costs.beside_path[1])):
        assert inputs <= again < most, "less than at the peak: in attention, and at the end of the forward"
        assert again < all_ < costs.graph
    assert all(p.grad is None for p in model.parameters())


def test_costs_beside_sharded_weights_are_differences(costs):
    """A constant beside all rows changes nothing, and a forward alone keeps no sums."""
    model = enable(make_model(num_hidden_layers=6)).train()
    recompute_layers(model)
    run = forward_of(model)

    def forward(ids, branch):
        torch.empty(1000 * 48)  # weights that are gathered, in 192 kB
        return run(ids, branch)

    found = measure_sharded_rows(forward, torch.arange(3, 60), 400)
    assert (found.kept, found.kv_heads) == (costs.kept, costs.kv_heads)
    assert found.recomputed == pytest.approx(costs.recomputed, rel=0.05)
    assert found.path == pytest.approx(costs.path, rel=0.3)
    with torch.no_grad():
        alone = measure_sharded_rows(forward, torch.arange(3, 60), 400)
    assert alone.kept == costs.kept / 2
    assert 0 < alone.recomputed <= alone.graph < found.recomputed


@pytest.mark.parametrize("limit", [0.7e6, 1.1e6, 2e6])
def test_a_budget_in_bytes_holds(costs, limit):
    """The peak of a walk, trunks included, is what the planner counts, and gradients are those of one pass."""
    batch = dualkv.pack_sequences(*group(192, [15] * 8))
    weights = weights_of(batch, torch.float32)
    model, other = (enable(make_model(num_hidden_layers=6)).train() for _ in range(2))
    recompute_layers(other)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    memory = dualkv.Memory(int(limit), costs)
    plan = fitting(batch, memory)
    with Peak(CPU) as one_row:
        wanted = whole(model, batch, weights)
    with Peak(CPU) as peak:
        loss = walked(other, batch, weights, memory)
    assert plan.bytes <= limit < one_row.bytes
    assert 0.75 * plan.bytes <= peak.bytes <= 1.02 * plan.bytes, "in no case more; the smallest parts take less"
    assert_close("loss", loss, wanted, 1e-5)
    assert_gradients(other, gradients(model), 1e-5)


def test_layers_keep_all_where_there_is_room(costs):
    """The choice is one of each pass: checkpointed layers run again in the backward, or keep all."""
    batch = dualkv.pack_sequences(*group(192, [15] * 8))
    model = enable(make_model(num_hidden_layers=6)).train()
    recompute_layers(model)
    ran = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: ran.append(torch.is_grad_enabled()))
    chosen = []
    for row in (costs, costs._replace(graph=1.5 * costs.recomputed, beside_path=None, saved=None)):
        memory = dualkv.Memory(700_000, row)
        parts = plan_parts(batch, memory)
        ran.clear()
        walked(model, batch, weights_of(batch, torch.float32), memory)
        chosen.append([part.keeps for part in parts])
        assert ran.count(True) == len(parts) + sum(keeps < 1 for keeps in chosen[-1])
        assert ran.count(False) == sum(part.is_trunk for part in parts)
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert 0 < max(chosen[0]) < 1 == max(chosen[1])


def test_memory_that_is_refused(costs):
    batch = dualkv.pack_sequences(*group(192, [15] * 8))
    with pytest.raises(ValueError, match=r"budget is 100,000 bytes, expected [\d,]+ at least"):
        plan_parts(batch, dualkv.Memory(100_000, costs))
    with pytest.raises(ValueError, match="graph is 0, expected a positive number"):
        plan_parts(batch, dualkv.Memory(100_000, dualkv.RowCosts(1, 1, 0, 1)))
    with pytest.raises(TypeError, match="row is a tuple, expected a RowCosts"):
        plan_parts(batch, dualkv.Memory(100_000, (1, 2, 3, 4)))
    with pytest.raises(TypeError, match="bytes is '1 GiB', expected a number"):
        plan_parts(batch, dualkv.Memory("1 GiB", costs))
    with pytest.raises(ValueError, match=r"gradients is torch\.float16, expected torch\.float32 or torch\.bfloat16"):
        dualkv.walk(batch, 9, lambda ids, branch: None, gradients=torch.float16)


# ---------------------------------------------------------------- what trunks keep
@pytest.mark.parametrize("settings", [{"on_host": True}, {"gradients": torch.bfloat16}])
def test_ways_of_keeping(settings):
    batch = packed()
    weights = weights_of(batch, torch.float32)
    model, other = (enable(make_model()).train() for _ in range(2))
    wanted = whole(model, batch, weights)
    assert_close("loss", walked(other, batch, weights, 4, **settings), wanted, 1e-5)
    assert_gradients(other, gradients(model), 1e-5)


@pytest.mark.parametrize("gradients_in", [torch.float32, torch.bfloat16])
def test_sums_of_bf16_gradients(gradients_in):
    """Sums in fp32 lose less than sums in bf16, over parts that all read one trunk."""
    batch = dualkv.pack_sequences(*group(16, [3] * 40))
    weights = weights_of(batch, torch.float32)

    def computed(dtype, budget, **settings):
        model = enable(make_model(dtype=dtype)).train()
        walked(model, batch, weights, budget, **settings)
        return model.model.layers[0].self_attn.k_proj.weight.grad.float()

    exact = computed(torch.float32, 1000)
    in_one = (computed(torch.bfloat16, 1000) - exact).norm() / exact.norm()
    found = (computed(torch.bfloat16, 4, gradients=gradients_in) - exact).norm() / exact.norm()
    assert found < (1.5 if gradients_in is torch.float32 else 6) * in_one


def test_a_part_of_a_fused_projection_is_copied():
    fused = torch.randn(5, 3, 8)
    kept = dualkv.branches.Kept([fused[:, 1:2], fused.clone()], dualkv.branches.Keeping())
    assert kept.read(0).untyped_storage().nbytes() == kept.read(0).nbytes
    assert torch.equal(kept.read(0), fused[:, 1:2])


# ---------------------------------------------------------------- both passes of a trunk are one
def assert_slope(x, run):
    """The gradient of x is the slope of `run()`."""
    step = torch.randn_like(x)
    with torch.no_grad():
        slope = float((x.grad * step).sum())
        x += 1e-6 * step
        more = run()
        x -= 2e-6 * step
        less = run()
    assert float(more - less) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_dropout_is_drawn_once():
    """The second pass of a trunk draws what the first one drew: the gradient is that of one function."""
    batch = packed()
    weights = weights_of(batch, torch.float64)
    torch.manual_seed(0)
    embedding = torch.randn(64, 1, 8, dtype=torch.float64, requires_grad=True)

    def forward(ids, branch):
        x = torch.nn.functional.dropout(embedding[ids[0]], 0.5)
        return branch.attention(x, x, x, layer=0)[None, :, 0]

    def loss(hidden, part):
        return (part.expand(hidden[0, part.predict_rows].sum(-1)) * weights[part.places]).sum()

    def run(budget):
        torch.manual_seed(1)
        return dualkv.walk(batch, budget, forward, loss)

    run(3)
    assert_slope(embedding, partial(run, 3))


def test_autocast_around_a_walk():
    """Weights that the first pass of a trunk casts without a graph are cast again in the next pass."""
    batch = packed()
    weights = weights_of(batch, torch.float32)
    model, other = (enable(make_model()).train() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        whole(model, batch, weights)
        walked(other, batch, weights, 4)
    assert_gradients(other, gradients(model), 0.05)


def test_passes_that_are_left_out_are_refused():
    batch, model = dualkv.pack_sequences(*group(9, [3, 3])), enable(make_model()).train()
    steps = dualkv.walk_passes(batch, 4)
    first = next(steps)
    assert (first.kind, first.has_loss) == ("F", False)
    with pytest.raises(ValueError, match="a pass of part 0 was not run"):
        next(steps)
    first = next(dualkv.walk_passes(batch, 4))
    with first:
        hidden = forward_of(model)(first.input_ids, first.branch)
    with pytest.raises(ValueError, match="a loss came to the first pass of a trunk"):
        first.backward(hidden.sum())


def test_the_last_graph_is_known_and_trunks_of_a_forward_end():
    """Two trees: gradients are synchronized behind the last graph, and without any the first tree keeps nothing."""
    model = enable(make_model()).train()
    (a, b), masks = ([*range(2, 12)], [*range(30, 40)]), [[0] * 10 + [1, 1]] * 4
    batch = dualkv.pack_sequences([[*a, 1, 2], [*a, 5, 6], [*b, 1, 2], [*b, 5, 6]], masks)

    def run(one):
        with one:
            hidden = forward_of(model)(one.input_ids, one.branch)
        one.backward(hidden.sum() if one.has_loss and one.has_graph else None)

    seen = []
    for one in dualkv.walk_passes(batch, 6):
        run(one)
        seen.append((one.kind, one.is_last_graph))
    assert [last for _, last in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1][0] == "G"
    trunks = []
    with torch.no_grad():
        for one in dualkv.walk_passes(batch, 6):
            run(one)
            trunks += [weakref.ref(one.branch)] * one.part.is_trunk
            own = {index for index, _ in one.part.path} | {one.part.index}
            del one
            assert {trunk().part.index for trunk in trunks if trunk() is not None} <= own


# ---------------------------------------------------------------- losses of whole sequences
def gspo(logp, of, lens):
    """A ratio of each sequence's mean, clipped."""
    old = torch.linspace(-6, -1, len(of))
    ratio = (logp.new_zeros(len(lens)).index_add(0, of, logp - old) / lens.clamp(min=1)).exp()
    advantages = torch.linspace(-1, 1, len(lens))
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages).mean()


def of_groups(logp, of, lens):
    """Means of sequences, each over the largest of its group of three."""
    means = logp.new_zeros(len(lens)).index_add(0, of, logp) / lens.clamp(min=1)
    return torch.stack([(group - group.detach().max()).softmax(0)[0].log() for group in means.split(3)]).mean()


def dpo(logp, of, lens):
    """Pairs of sequences: first and last, second and last but one, and so on."""
    sums = logp.new_zeros(len(lens)).index_add(0, of, logp)
    return -torch.nn.functional.logsigmoid(0.3 * (sums - sums.flip(0))[: len(lens) // 2]).mean()


@pytest.mark.parametrize("loss", [gspo, of_groups, dpo])
@pytest.mark.parametrize("budget", [3, 7, 100])
def test_losses_of_whole_sequences(budget, loss):
    """Parts cut the sequences anywhere, whose sums and means, groups and pairs the losses take."""
    batch = packed()
    lens = torch.tensor(batch.trained_lens)
    loss = partial(loss, of=torch.repeat_interleave(torch.arange(len(lens)), lens), lens=lens)
    model, other = (enable(make_model()).train() for _ in range(2))
    hidden = forward_of(model)(batch.input_ids, batch.layout)
    wanted = loss(torch.cat(batch.unpack(dualkv.response_logprobs(hidden, model.lm_head.weight, batch)[0])))
    wanted.backward()
    found = dualkv.walk_whole(batch, budget, forward_of(other), values_of(other), loss)
    assert_close("loss", found, wanted.detach(), 1e-5)
    assert_gradients(other, gradients(model), 1e-5)
    with torch.no_grad():
        found = dualkv.walk_whole(batch, budget, forward_of(other), values_of(other), loss)
    assert_close("loss", found, wanted, 1e-5)
    with pytest.raises(ValueError, match="values returned a tensor of shape"):
        dualkv.walk_whole(batch, budget, forward_of(other), lambda hidden, part: hidden.sum(), loss)


@pytest.mark.parametrize("budget", [3, 100])
def test_values_whose_backward_is_a_walk(budget):
    """The backward comes later, and draws and rounds as the forward did."""
    batch = packed()
    weights = weights_of(batch, torch.float64)
    torch.manual_seed(0)
    embedding = torch.randn(64, 1, 8, dtype=torch.float64, requires_grad=True)
    mixed = []

    def forward(ids, branch):
        mixed.append(torch.is_autocast_enabled("cpu"))
        x = torch.nn.functional.dropout(embedding[ids[0]], 0.5)
        return branch.attention(x, x, x, layer=0)[:, 0]

    def values(out, part):
        return part.expand(torch.stack([out[part.predict_rows].sum(-1), out[part.predict_rows, 0]], 1))

    def loss():
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            found = dualkv.walk_values(batch, budget, forward, values)
        assert found.shape == (len(weights), 2)
        return (found[:, 0] * weights).sum().sin() + found[:, 1].exp().mean()

    value = loss()
    state = torch.get_rng_state()
    value.backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(mixed)
    assert_slope(embedding, loss)
    with pytest.raises(ValueError, match="batch counts no token"):
        dualkv.walk_values(dualkv.pack_sequences([[1, 2]], [[0, 0]]), budget, forward, values)


def test_first_trunks_wait_for_the_gradients():
    """A prompt in two trunks runs without a graph once, not in both walks; other trunks do in both."""
    batch, model = dualkv.pack_sequences(*group(9, [3, 9, 9])), enable(make_model()).train()
    ran = []

    def forward(ids, branch):
        ran.append((branch.part.index, torch.is_grad_enabled()))
        return forward_of(model)(ids, branch)

    trunks = {part.index: part.path_rows for part in plan_parts(batch, 5) if part.is_trunk}
    assert [rows for rows in trunks.values() if rows < 9] == [0, 5]
    assert len(trunks) > 2
    found = dualkv.walk_values(batch, 5, forward, values_of(model))
    first = found.detach().clone()
    for times in (1, 2):
        ran.clear()
        found.pow(2).sum().backward(retain_graph=True)
        for index, rows in trunks.items():
            assert ran.count((index, False)) == (rows >= 9 or times == 2), "a second backward finds none"
            assert ran.count((index, True)) == 1
    assert torch.equal(found, first)


def test_another_mode_in_the_backward_is_refused():
    batch, model = packed(), enable(make_model()).train()
    found = dualkv.walk_values(batch, 7, forward_of(model), values_of(model))
    model.eval()
    with pytest.raises(ValueError, match="Model is in evaluation mode in a pass of a walk, and was in training mode"):
        found.sum().backward()
    model.train()
    found.sum().backward()


def test_parameters_that_change_within_a_walk_are_refused():
    """A step comes between the values and their backward, or an optimizer steps as soon as a gradient is there."""
    batch, model = packed(), enable(make_model()).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = dualkv.walk_values(batch, 7, forward_of(model), values_of(model))
    found.sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(ValueError, match="parameters of Qwen3Model have been written into between two passes"):
        found.sum().backward()

    def step(weight):
        weight.detach().sub_(0.1 * weight.grad)

    model.model.norm.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ValueError, match="optimizers that step within the backward cannot train by walks"):
        walked(model, batch, weights_of(batch, torch.float32), 7)


# ---------------------------------------------------------------- updates
@pytest.mark.parametrize("family", [*DENSE, *test_recurrent.there("qwen3_5_text", "nemotron_h", "minimax")])
def test_updates_are_those_of_separate_sequences(family):
    """Two updates by AdamW: plain transformers on separate sequences, one packed row, and walks."""
    batch = packed()
    sequences = [ids.tolist() for ids in batch.unpack_sequences(batch.input_ids)]
    weights = weights_of(batch, torch.float32) / 30
    starts = [0, *torch.tensor(batch.trained_lens).cumsum(0).tolist()]
    masks = torch.from_numpy(batch._mask).split(batch._lens.tolist())

    def separate(model):
        found = []
        for ids, mask, at, end in zip(sequences, masks, *(starts[:-1], starts[1:]), strict=True):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
            logp = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            found.append(logp[mask[1:]])
            (found[-1] * weights[at:end]).sum().backward()
        return torch.cat(found).detach()

    def one_row(model):
        logp, _ = dualkv.response_logprobs(
            forward_of(model)(batch.input_ids, batch.layout), model.lm_head.weight, batch
        )
        values = torch.cat(batch.unpack(logp))
        (values * weights).sum().backward()
        return values.detach()

    def by_parts(model, budget):
        found = torch.empty_like(weights)
        walked(model, batch, weights, budget, found)
        return found

    def updated(run, ready=lambda model: model):
        model = make_model(family) if family in DENSE else test_recurrent.make(family)
        ready(model.train())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
        logp = []
        for _ in range(2):
            logp.append(run(model))
            optimizer.step()
            optimizer.zero_grad()
        return logp, {name: p.detach() for name, p in model.named_parameters()}

    wanted, after = updated(separate)
    small = dualkv.Memory(10**5, dualkv.RowCosts(kept=1000, path=100, graph=9000, recomputed=4000))
    for name, run in (("packed", one_row), *((str(b), partial(by_parts, budget=b)) for b in (3, 7, small))):
        logp, moved = updated(run, enable)
        for step, (found, expected) in enumerate(zip(logp, wanted, strict=True)):
            assert_close(f"{name}: log-probs {step}", found, expected, 1e-5)
        for parameter, expected in after.items():
            assert_close(f"{name}: {parameter}", moved[parameter], expected, 1e-4)
