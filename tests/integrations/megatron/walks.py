"""Walks of a small model against one packed row, and on ranks that start together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import dualkv
from dualkv.integrations.megatron import PackedGroups, enable, measure_rows, walk_passes
from tests.integrations.megatron import cpu
from tests.integrations.megatron.updates import AGAIN, EXPERTS, RECURRENT, VOCAB, build, config, hybrid, layer_spec

ROWS = 6  # of a part; the trees' first trunks have more
BIAS = EXPERTS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
NO_NORMS = {"qk_layernorm": False, "init_method_std": 0.1}  # sequence parallelism runs none on a CPU


class Tree(NamedTuple):
    """Sequences, the batch that packs them, and weights of the log-probs of its tokens in the loss."""

    sequences: list[torch.Tensor]
    batch: dualkv.PackedSequences
    weights: torch.Tensor


def tree(seed: int = 0, root: int = 9, dtype: torch.dtype = torch.float32) -> Tree:
    """Make three levels, with a sequence that shares nothing, and tokens of no loss at the beginning of each."""
    g = torch.Generator().manual_seed(seed)

    def tokens(n: int) -> torch.Tensor:
        return torch.randint(0, VOCAB, (n,), generator=g)

    prompt, turn = tokens(root), tokens(6)
    sequences = [torch.cat([prompt, turn, tokens(n)]) for n in (4, 5, 3)] + [torch.cat([prompt, tokens(5)]), tokens(5)]
    masks = [torch.arange(len(x)) >= 2 for x in sequences]
    batch = dualkv.pack_sequences(sequences, masks)
    count = sum(len(row) for row in batch.unpack(batch.targets))
    return Tree(sequences, batch, torch.randn(count, generator=g).to(dtype))


class Found(NamedTuple):
    """Log-probs of all tokens, gradients of this rank's parameters, tokens of experts, and kinds of passes."""

    logp: torch.Tensor
    gradients: dict[str, torch.Tensor]
    tokens: list[torch.Tensor]
    kinds: str = ""


def _found(model: Any, logp: torch.Tensor, kinds: str = "") -> Found:
    group, gradients = parallel_state.get_context_parallel_group(), dict[str, torch.Tensor]()
    for name, p in model.named_parameters():
        gradients[name] = p.grad.clone()
        if dist.get_world_size(group) > 1 and ".experts." not in name:  # as DistributedDataParallel does
            dist.all_reduce(gradients[name], group=group)
        if getattr(p, "sequence_parallel", False):  # as finalize_model_grads does
            dist.all_reduce(gradients[name], group=parallel_state.get_tensor_model_parallel_group())
    counts = [x.clone() for name, x in model.named_buffers() if name.endswith("local_tokens_per_expert")]
    for x in counts:  # ranks of a model share rows otherwise in a walk
        dist.all_reduce(x, group=parallel_state.get_tensor_and_context_parallel_group())
    for _, x in model.named_buffers():
        if x.dtype.is_floating_point:
            x.zero_()
    model.zero_grad()
    return Found(logp.detach(), gradients, counts, kinds)


def logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """megatron-core's cross entropy computes in fp32."""
    if logits.dtype == torch.float64:
        return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -tensor_parallel.vocab_parallel_cross_entropy(logits, targets)


def loss_of(logits: torch.Tensor, one: Any) -> torch.Tensor:
    """The sum of the log-probs of a pass."""
    mine = one.predictions
    return mine.gather(logprobs(logits[0, mine.predict_rows], mine.targets)).sum()


def packed(model: Any, tree: Tree) -> Found:
    """One packed row."""
    cfg, batch = model.config, tree.batch
    row = PackedGroups(batch, cfg.tensor_model_parallel_size if cfg.sequence_parallel else 1)
    mine = row.predictions(batch)
    logits = model(row.split(batch.input_ids), row.split(batch.position_ids), None, packed_seq_params=row)
    logp = torch.cat(batch.unpack(mine.gather(logprobs(logits[0, mine.predict_rows], mine.targets))))
    ((logp * tree.weights).sum() * row.shard.world_size).backward()
    return _found(model, logp)


def alone(model: Any, tree: Tree) -> torch.Tensor:
    """Forward and backward of each sequence alone; the log-probs."""
    found, weights = [], list(tree.weights.split([len(x) for x in tree.batch.unpack(tree.batch.targets)]))
    for ids, weight in zip(tree.sequences, weights, strict=True):
        logits = model(ids[None], torch.arange(len(ids))[None], None)
        logp = logprobs(logits[0, -len(weight) - 1 : -1], ids[-len(weight) :])
        (logp * weight).sum().backward()
        found.append(logp)
    return torch.cat(found)


def separate(model: Any, tree: Tree) -> Found:
    """Each sequence alone."""
    return _found(model, alone(model, tree))


def walked(model: Any, trees: list[Tree], budget: Any, backward: bool = True) -> Found:
    """A walk of some trees, or none.

    Args:
        model: alone, or in DistributedDataParallel.
        trees, budget: of `walk_passes`.
        backward: whether there is one.
    """
    found, kinds = [torch.zeros_like(tree.weights) for tree in trees], ""
    with torch.set_grad_enabled(backward):
        for one in walk_passes(model, [tree.batch for tree in trees], budget):
            loss = None
            with one:
                logits = model(one.input_ids, one.position_ids, None, packed_seq_params=one.packed)
                if one.has_loss:
                    mine = one.predictions
                    logp = mine.gather(logprobs(logits[0, mine.predict_rows], mine.targets))
                    logp, places = one.part.expand(logp), one.part.places
                    found[one.number][places] = logp.detach()
                    loss = (logp * trees[one.number].weights[places]).sum()
                else:
                    assert logits.shape[1] <= 2  # the head gets a row of each rank
            one.backward(loss)
            kinds += one.kind
    logp = torch.cat(found) if found else torch.zeros(0)
    if not backward or isinstance(model, DistributedDataParallel):
        return Found(logp, {}, [], kinds)
    return _found(model, logp, kinds)


def made(settings: dict[str, Any], dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    """An enabled model, in new groups of ranks."""
    cpu.parallel(**sizes)
    fields = {"tp": "tensor_model_parallel_size", "cp": "context_parallel_size", "ep": "expert_model_parallel_size"}
    fields["etp"] = "expert_tensor_parallel_size"
    settings = settings | {fields[name]: size for name, size in sizes.items()}
    norms = settings.get("qk_layernorm", True)
    is_hybrid = "pattern" in settings
    model = hybrid(settings, norms) if is_hybrid else build(enable(layer_spec(norms, **settings)), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # else states decay within a row or two, and gradients of decays are rounding
                parameter.copy_(torch.linspace(-3, -1, len(parameter)))
    return model.to(dtype)


def error(found: Found, wanted: Found) -> tuple[float, float]:
    """The largest differences: of log-probs, and of gradients relative to the largest entry of each."""
    assert found.gradients.keys() == wanted.gradients.keys()
    relative = [
        float((found.gradients[name] - x).abs().max() / x.abs().max().clamp(min=1e-3))
        for name, x in wanted.gradients.items()
    ]
    assert max(float(x.abs().max()) for x in wanted.gradients.values()) > 0.1
    for x, y in zip(found.tokens, wanted.tokens, strict=True):
        assert torch.equal(x, y), (x, y)
    logp = (found.logp - wanted.logp).abs().max() if len(found.logp) else torch.zeros(())
    return float(logp), max(relative)


# ---------------------------------------------------------------- two ranks
SCENARIOS: dict[str, dict[str, Any]] = {
    "tensor, sequence": {"tp": 2, "sequence_parallel": True, **RECURRENT, **NO_NORMS, **AGAIN},
    "context": {"cp": 2, "softmax_type": "learnable", "window_size": (3, 0), "window_attn_skip_freq": 2},
    "context, expert": {"cp": 2, "ep": 2, **EXPERTS, **AGAIN},
}


# Of four ranks; those that a scenario does not ask for are data parallel, and have other trees.
SEQUENCE = {"tp": 2, "sequence_parallel": True, **NO_NORMS}
FOUR: dict[str, dict[str, Any]] = {
    "context, a head each": {"cp": 4, "softmax_type": "learnable"},
    "tensor, sequence, context, expert": {**BIAS, **SEQUENCE, "cp": 2, "ep": 4, "etp": 1},
    "tensor, sequence, expert, each layer again": {**BIAS, **AGAIN, **SEQUENCE, "ep": 2, "etp": 1},
    "tensor, sequence, recurrent": {**RECURRENT, **SEQUENCE},
}


def of_scenarios(scenarios: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The errors of this rank, by scenario."""
    found = {}
    for name, settings in scenarios.items():
        sizes = {key: value for key, value in settings.items() if key in ("tp", "cp", "ep", "etp")}
        model = made({k: v for k, v in settings.items() if k not in sizes}, **sizes)
        mine = tree(root=3 if parallel_state.get_data_parallel_rank() else 9)
        wanted = packed(model, mine)
        found[name] = error(walked(model, [mine], ROWS), wanted)
    return found


def of_four(number: int, folder: str) -> None:
    with cpu.rank():
        torch.save(of_scenarios(FOUR), Path(folder) / f"{number}.pt")


def main(number: int, folder: str) -> None:
    with cpu.rank():
        found = of_scenarios(SCENARIOS)
        for name, roots in {"fewer": ([60], [2]), "none": ([60, 2], [])}.items():
            found[f"expert, {name}"] = experts(roots[number], len(roots[0]))
            found[f"data, {name}"] = data(roots, number)
            found[f"updates, {name}"] = updated(roots[number])
        found["refused"] = refused(number)
        model = made(NO_NORMS | {"sequence_parallel": True}, tp=2)
        found["costs"] = measure_rows(model, tree().batch.input_ids, loss_of, rows=8)
    torch.save(found, Path(folder) / f"{number}.pt")


def added(every: list[Found]) -> Found:
    """Log-probs, gradients and tokens of several rows."""
    gradients = {name: sum(one.gradients[name] for one in every) for name in every[0].gradients}
    tokens = [sum(of_rows) for of_rows in zip(*(one.tokens for one in every), strict=True)]
    return Found(torch.cat([one.logp for one in every]), gradients, tokens)


def experts(roots: list[int], rows: int) -> tuple[float, float, str]:
    """This rank's trees by experts on both ranks, which run so many rows. Layers are recomputed, as the plan of one of
    the ranks needs it."""
    model, trees = made(BIAS | AGAIN, ep=2), [tree(root, root) for root in roots]
    found = []
    for one in [*trees, *[tree()] * rows][:rows]:
        is_own = any(one is mine for mine in trees)
        row = packed(model, one if is_own else one._replace(weights=one.weights * 0))
        found.append(row if is_own else row._replace(logp=row.logp[:0], tokens=[x * 0 for x in row.tokens]))
    costs = measure_rows(model, tree(root=60).batch.input_ids, rows=8)
    assert all(not name.endswith("local_tokens_per_expert") or not x.any() for name, x in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    walk = walked(model, trees, dualkv.Memory(40 * costs.recomputed, costs))
    return *error(walk, added(found)), walk.kinds


def data(roots: Any, number: int) -> tuple[float, float, str]:
    """Gradients that megatron-core's DistributedDataParallel adds up, whose reduction the last backward begins."""
    plain, trees = made({}), [[tree(root, root) for root in of_rank] for of_rank in roots]
    wanted = added([packed(plain, one) for of_rank in trees for one in of_rank])
    options = DistributedDataParallelConfig(overlap_grad_reduce=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config(), options, plain)
    model.zero_grad_buffer()
    walk = walked(model, trees[number], 20)
    finalize_model_grads([model])
    gradients = {name: 2 * p.main_grad for name, p in plain.named_parameters()}  # the mean of two ranks
    none = torch.zeros(0)
    return *error(Found(none, gradients, []), wanted._replace(logp=none)), walk.kinds


def updated(roots: list[int]) -> float:
    """The largest relative difference of weights after two updates by megatron-core's optimizer, on this rank's trees:
    walked, and as separate sequences."""

    def weights(is_walk: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        plain = made(AGAIN)
        options = DistributedDataParallelConfig(overlap_grad_reduce=is_walk, grad_reduce_in_fp32=True)
        model = DistributedDataParallel(config(), options, plain)
        # Small gradients are rounding, which must not decide the direction of a step.
        adam = OptimizerConfig(optimizer="adam", lr=1e-2, adam_eps=1e-3, clip_grad=0.0)
        optimizer = get_megatron_optimizer(adam, [model])
        for update in range(2):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            trees = [tree(root + 100 * update, root) for root in roots]
            if is_walk:
                walked(model, trees, ROWS)
            else:
                for one in trees:
                    alone(model, one)
            finalize_model_grads([model])
            assert optimizer.step()[0]
        return {name: p.detach() for name, p in plain.named_parameters()}

    walk, wanted = weights(True), weights(False)
    assert any((walk[name] - x).abs().max() > 0 for name, x in wanted.items())
    return max(float((walk[name] - x).norm() / x.norm()) for name, x in wanted.items())


def refused(number: int) -> list[str]:
    """Errors of two ranks, for the same reason or for that of the other one."""
    said = []
    for sizes in ({}, {"tp": 2}):
        model = made({}, **sizes)
        budgets = (0, ROWS) if not sizes else (ROWS, ROWS + 1)
        try:
            next(walk_passes(model, [tree().batch], budgets[number]))
        except ValueError as error:
            said.append(str(error))
    dist.barrier()
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    return said
