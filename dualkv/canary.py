"""A canary for training runs: log-probs of a few rollouts computed alone, compared with the packed ones."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dualkv.arrays import check_model, positive
from dualkv.data.packing import PackedBatch
from dualkv.data.trees import PackedSequences
from dualkv.draws import seed_all, untouched
from dualkv.layout import Layout

# Alarm above FACTOR times what rounding does to rollouts packed by themselves, and OUTLIERS times that in one token.
# tests/integrations/test_canary.py measures both kinds of wrong alarms.
FACTOR, OUTLIERS = 4.0, 10.0
# The least and the most that rounding is assumed to do, in steps of the dtype at a logit's size.
LEAST, MOST = 0.5, 8.0
TF32 = 2.0**-10
CHUNK = 256  # rows of logits in fp32 at a time
# The dtypes of products. Of fp64 models too some layers compute in fp32.
COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
DROPOUT = nn.modules.dropout._DropoutNd
Pair = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # log-probs of a rollout: packed, alone, packed by itself


@dataclass(frozen=True)
class Compared:
    """The result of :func:`packed_vs_separate` over all ranks: the rank with the largest difference for its bound.

    Attributes:
        difference: nats; root mean square over the tokens of a rollout, of the rollout where it is largest.
        largest: nats, of one token.
        bound: nats; what rounding explains of `difference`, and a tenth of what it explains of `largest`.
    """

    difference: float
    largest: float
    bound: float

    @property
    def within(self) -> bool:
        """Whether rounding explains the difference."""
        return self.difference <= self.bound and self.largest <= OUTLIERS * self.bound


def bound(dtype: torch.dtype, scale: float, layers: int, rounding: float, device: torch.device) -> float:
    """Nats, root mean square, that rounding explains.

    Args:
        dtype: of the model's products.
        scale: standard deviation of a row's logits: relative errors of hidden states become errors of its size.
        layers: of the decoder, whose roundings add up as a random walk does.
        rounding: nats, root mean square: the distance of rollouts packed by themselves from those without a layout.
        device: GPUs may multiply fp32 in TF32.
    """
    eps = torch.finfo(dtype).eps
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        eps = TF32
    step = eps * (scale + 1)  # log-probs of some nats are rounded, too
    return FACTOR * max(LEAST * step, min(rounding, MOST * step * math.sqrt(layers)))


def packed_vs_separate(
    model: nn.Module,
    batch: PackedBatch | PackedSequences,
    logp: torch.Tensor | None = None,
    *,
    rollouts: int = 2,
    seed: int = 0,
    temperature: float = 1.0,
    media: Sequence[Mapping[str, Any] | None] | None = None,
    dtype: torch.dtype | None = None,
    error: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Compared:
    """Compare log-probs of a few rollouts in packed rows with those of the rollouts alone, and warn if rounding does
    not explain the difference.

    Call this every some steps between a forward and the optimizer's step, in the trainer's autocast, on all ranks that
    share the model's weights or communicate in its forward. Each rollout takes two forwards of its P + R tokens: one
    as any model computes it, and one packed by itself, whose distance from the first is rounding (see :func:`bound`).
    The model runs in its present mode. Dropout modules are off meanwhile; other noise of training, such as NEFTune's,
    counts as a difference. Random states and buffers are as before afterwards, and no gradients are computed.

    Args:
        model: a transformers model or a wrapper around one, whose output has `logits`.
        batch: what :func:`dualkv.pack`, `pack_padded` or `pack_sequences` returned, on the model's device.
        logp: [M] the packed log-probs that the trainer computed with the present weights; then its head and its layout
            are tested too. Without them, and where dropout was active in them, the model runs the whole batch once more
            with `dualkv=batch.layout`. Sharded rows need them: all M on every rank.
        rollouts: how many are computed alone; the same number on every rank, which runs as many forwards.
        seed: picks the rollouts; pass the step, so that others are picked each time.
        temperature: divides the logits, as in `logp`.
        media: for a batch with images, one mapping for each rollout, in the order of the input: what its own sequence
            is called with beside input_ids, such as pixel_values and image_grid_thw.
        dtype: of the model's products; by default autocast's, else the coarsest among those of weights, logits and
            FSDP's mixed precision.
        error: raise instead of warning.
        group: ranks that call together and get one verdict, by default all of them.

    Returns:
        The differences and their bound. `difference` is a metric to log.

    Raises:
        ValueError: `error`, and a difference that rounding does not explain; log-probs of another shape; a batch with
            images without `media`; a model whose output has no logits.
        TypeError: a batch of another kind; log-probs that are no tensor.
    """
    check_model(model)
    if not isinstance(batch, PackedBatch | PackedSequences):
        raise TypeError(f"batch is a {type(batch).__name__}, expected what dualkv.pack or pack_sequences returned")
    positive("rollouts", rollouts)
    if logp is not None and not isinstance(logp, torch.Tensor):
        raise TypeError(f"logp must be a tensor, got a {type(logp).__name__}")
    if logp is not None and logp.shape != batch.targets.shape:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, expected [{len(batch.targets)}], one a response token")
    if batch.media and media is None:
        raise ValueError("batch has images and media is None, expected one mapping for each rollout")
    if media is not None and len(media) != batch.num_rollouts:
        raise ValueError(f"media has {len(media)} entries for {batch.num_rollouts} rollouts, expected as many")
    sequences, tokens = batch.unpack_sequences(batch.input_ids[0]), _trained_tokens(batch)
    chosen = picked([len(x) for x in tokens], rollouts, seed)
    pairs: list[Pair] = []
    scales, dtypes = [0.0], {torch.float32}
    with quiet(model, batch.device, seed) as (same_noise, was_noisy):
        if logp is None or was_noisy:
            packed = _packed(model, batch, chosen, temperature)
        else:
            of_rollouts = batch.unpack(logp.detach())
            packed = [of_rollouts[i] for i in chosen]
        for i, own in zip(chosen, packed, strict=True):
            ids, at = sequences[i], tokens[i]
            inputs = {"input_ids": ids[None], **({} if media is None else dict(media[i] or {}))}
            same_noise()
            logits = _logits(model, at - 1, use_cache=False, **inputs)
            same_noise()
            by_itself = _logits(model, at - 1, dualkv=Layout.from_lengths([len(ids)], [[]], ids.device), **inputs)
            alone, scale = of_logits(logits, ids[at], temperature)
            pairs.append((own, alone, of_logits(by_itself, ids[at], temperature)[0]))
            dtypes.add(logits.dtype)
            scales.append(scale)
    of_products = dtype or coarsest(model, dtypes, batch.device)
    return judge(compare(pairs, of_products, max(scales), num_layers(model), batch.device, group), error)


def picked(lens: Sequence[int], few: int, seed: int) -> list[int]:
    """Pick `few` rollouts with tokens, some twice if there are fewer: every rank runs as many forwards."""
    some = np.flatnonzero(lens) if any(lens) else np.arange(len(lens))
    return np.resize(np.random.default_rng(seed).permutation(some), few).tolist()


def compare(
    pairs: Sequence[Pair],
    dtype: torch.dtype,
    scale: float,
    layers: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> Compared:
    """Compare log-probs [R_i] of rollouts, over the ranks of `group`, which all call; see :func:`bound`."""
    squares, rounding, largest = ([torch.zeros((), dtype=torch.float64, device=device)] for _ in range(3))
    for packed, alone, by_itself in (each for each in pairs if len(each[1])):
        delta = packed.double() - alone.double()
        squares.append(delta.square().mean())
        largest.append(delta.abs().max())
        rounding.append((by_itself.double() - alone.double()).square().mean())
    found = torch.stack([*(torch.stack(x).max() for x in (squares, rounding, largest)), squares[0] + scale])
    found = found.nan_to_num(nan=math.inf, posinf=math.inf)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    square, own, most, scale = found.tolist()  # of all ranks, which so come to one verdict
    return Compared(math.sqrt(square), most, bound(dtype, scale, layers, math.sqrt(own), device))


def judge(compared: Compared, error: bool = False) -> Compared:
    """Warn, or raise ValueError, in one sentence if rounding does not explain the difference."""
    if not compared.within:
        said = (
            f"dualkv: packed log-probs differ from those of the rollouts alone by {compared.difference:.2g} nats (root"
            f" mean square of a rollout; {compared.largest:.2g} in one token), and rounding explains"
            f" {compared.bound:.2g}: something in this model or trainer reads more than a token's own sequence, or"
            " noise of training is on"
        )
        if error:
            raise ValueError(said)
        warnings.warn(said, stacklevel=3)
    return compared


# ---------------------------------------------------------------- the model, as it is wrapped
@contextmanager
def quiet(model: nn.Module, device: torch.device, seed: int) -> Iterator[tuple[Callable[[], None], bool]]:
    """Run the body without gradients and dropout modules, and leave random states and buffers as they were.

    Yields a function after which equal calls draw equal noise, and whether dropout was on.
    """
    noisy = [part for part in model.modules() if isinstance(part, DROPOUT) and part.training and part.p > 0]
    devices = [x for x in {device, *(x.device for x in model.parameters())} if x.type == "cuda"]
    with untouched(model, devices), torch.no_grad():
        for part in noisy:
            part.training = False
        try:
            yield partial(seed_all, devices, seed), bool(noisy)
        finally:
            for part in noisy:
                part.training = True


def _logits(model: nn.Module, rows: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """[n, V] the logits of `rows` [n] in a call [1, T]."""
    known = {name for cls in {type(m) for m in model.modules()} for name in inspect.signature(cls.forward).parameters}
    inputs = {name: value for name, value in inputs.items() if name != "use_cache" or name in known}
    if "logits_to_keep" in known:
        inputs["logits_to_keep"] = rows
    logits = getattr(model(**inputs), "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise ValueError(f"the output of {type(model).__name__} has no logits, expected a model with its head")
    if hasattr(logits, "full_tensor"):  # of a head that is split over ranks
        logits = logits.full_tensor()
    return logits[0] if "logits_to_keep" in known and logits.shape[1] == len(rows) else logits[0, rows]


def _packed(
    model: nn.Module, batch: PackedBatch | PackedSequences, chosen: list[int], temperature: float
) -> list[torch.Tensor]:
    """Log-probs of the chosen rollouts, by one call with the layout."""
    rows, targets = batch.unpack(batch.predict_rows), batch.unpack(batch.targets)
    of_chosen = torch.cat([rows[i] for i in chosen])
    logits = _logits(model, of_chosen, input_ids=batch.input_ids, dualkv=batch.layout, **batch.media)
    found, _ = of_logits(logits, torch.cat([targets[i] for i in chosen]), temperature)
    return list(found.split([len(rows[i]) for i in chosen]))


def of_logits(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> tuple[torch.Tensor, float]:
    """logits [n, V], targets [n] -> log-probs [n] in fp32 (fp64 for fp64), and the standard deviation of a row's
    logits, in mean."""
    found, scale = [logits.new_empty(0, dtype=torch.float32)], 0.0
    for some, of_some in zip(logits.split(CHUNK), targets.split(CHUNK), strict=True):
        z = some.to(torch.promote_types(some.dtype, torch.float32)) / temperature
        found.append(z.gather(1, of_some[:, None])[:, 0] - z.logsumexp(1))
        if len(of_some):
            scale += float(z.clamp(-1e4, 1e4).std(1).sum())  # some models mask tokens by -inf
    return torch.cat(found), scale / max(1, len(targets))


def _trained_tokens(batch: PackedBatch | PackedSequences) -> list[torch.Tensor]:
    """Find the tokens whose log-probs are in [M]: for each rollout, their positions in its own sequence."""
    if isinstance(batch, PackedSequences):
        whole = batch.unpack(torch.ones_like(batch.targets), whole=True)
        return [row.nonzero()[:, 0] for row in whole]
    lens = map(len, batch.unpack_sequences(batch.input_ids[0]))
    return [torch.arange(n - own, n, device=batch.device) for n, own in zip(lens, batch.response_lens, strict=True)]


# ---------------------------------------------------------------- what rounding explains
def coarsest(model: nn.Module, dtypes: set[torch.dtype], device: torch.device) -> torch.dtype:
    """The dtype with the largest steps among those that a model may compute in."""
    found = dtypes | {x.dtype for x in model.parameters()}
    if torch.is_autocast_enabled(device.type):
        found.add(torch.get_autocast_dtype(device.type))
    for module in model.modules():
        state = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        for policy in (getattr(state, "_mp_policy", None), getattr(module, "mixed_precision", None)):
            found.add(getattr(policy, "param_dtype", None) or torch.float32)
    return max((x for x in found if x in COMPUTED), key=lambda x: torch.finfo(x).eps)


def num_layers(model: nn.Module) -> int:
    """The number of the decoder's layers by its configuration; 1 where there is none."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        if isinstance(number := getattr(config, "num_hidden_layers", None), int):
            return max(1, number)
    return 1
