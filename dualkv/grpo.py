"""Group-relative policy optimization: advantages and losses, as pure functions of flat per-token tensors.

Two published objectives over the tokens of sampled responses, both built from the probability ratio
`rho_t = exp(logp_t - old_logp_t)` and a group-relative advantage `A` shared by all tokens of a response:

- GRPO (Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300, equations 3 and 4):
  `J = mean_i mean_t [ min(rho A, clip(rho, 1 - e, 1 + e) A) - beta D_KL(policy || reference) ]`, the mean taken over
  the tokens of each response first, then over responses.
- DAPO (Yu et al., 2025, arXiv:2503.14476, equations 8, 10 and 12): another clip range above than below
  ("clip-higher"), one mean over all tokens, no KL term.

Everything is a sum over tokens with weights fixed beforehand (:func:`token_weights`), so the losses of the
micro-batches of one update add up to the loss of the whole batch, and so do the metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dualkv.arrays import int_array


@dataclass(frozen=True)
class Algorithm:
    """The settings of an objective; `ALGORITHMS["grpo"]` and `ALGORITHMS["dapo"]` are the published ones.

    Attributes:
        clip_low: the ratio is clipped below at 1 - clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        mean: "sequence" (over the tokens of each response, then over responses) or "token" (over all tokens).
        kl_coef: weight of the KL term against the reference policy, beta.
    """

    clip_low: float
    clip_high: float
    mean: str
    kl_coef: float


ALGORITHMS = {
    "grpo": Algorithm(clip_low=0.2, clip_high=0.2, mean="sequence", kl_coef=0.04),
    "dapo": Algorithm(clip_low=0.2, clip_high=0.28, mean="token", kl_coef=0.0),
}


def group_advantages(rewards: torch.Tensor, group_sizes: Sequence[int], eps: float = 1e-6) -> torch.Tensor:
    """`(r - mean) / (std + eps)` within each group (DeepSeekMath, section 4.1.2).

    The standard deviation is that of the sample (N - 1 in the denominator). A group of one response has nothing to be
    compared with: its advantage is 0.

    Args:
        rewards: [N] float, the responses of group 0 first.
        group_sizes: responses of each group.
        eps: keeps groups with equal rewards at 0; with an `eps` of 0 they are NaN.

    Returns:
        [N] advantages in the dtype of `rewards`.

    Raises:
        ValueError: sizes that do not add up to N, a size below 1, rewards that are NaN or infinite, a negative `eps`.
        TypeError: rewards that are not a floating point tensor, sizes that are not integers.
    """
    if not isinstance(rewards, torch.Tensor):
        raise TypeError(f"rewards must be a tensor, got a {type(rewards).__name__}")
    if not rewards.is_floating_point():
        raise TypeError(f"rewards must be floating point, got {rewards.dtype}")
    if rewards.ndim != 1:
        raise ValueError(f"rewards must have one dimension, got shape {tuple(rewards.shape)}")
    sizes = int_array("group_sizes", group_sizes).tolist()
    if not eps >= 0:
        raise ValueError(f"eps is {eps}, expected 0 or more")
    if any(size < 1 for size in sizes):
        raise ValueError(f"group_sizes must be 1 or more, got {min(sizes)}")
    if sum(sizes) != len(rewards):
        raise ValueError(f"group_sizes add up to {sum(sizes)}, rewards holds {len(rewards)}")
    if not torch.isfinite(rewards).all():
        at = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"rewards[{at}] is {rewards[at].item()}, expected a finite number")
    groups = []
    for group in rewards.split(sizes):
        apart = group - group[0]  # the mean of equal rewards is not always equal to them, by rounding; that of zeros is
        centred = apart - apart.mean()
        groups.append(centred / (apart.std() + eps) if len(group) > 1 else centred)
    return torch.cat(groups) if groups else rewards.clone()


def token_weights(response_lens: Sequence[int], mean: str) -> torch.Tensor:
    """The weight of each response token in the loss of a whole update.

    Args:
        response_lens: tokens of each of the N responses of the update (all groups, all micro-batches).
        mean: "sequence": 1 / (N R_i) for the tokens of response i, where an empty response counts in N and adds
            nothing; "token": 1 / sum(R_i) for every token.

    Returns:
        [M] float64, tokens of response 0 first.

    Raises:
        ValueError: another `mean`, a negative length.
        TypeError: lengths that are not integers.
    """
    lens = torch.from_numpy(int_array("response_lens", response_lens))
    if (lens < 0).any():
        raise ValueError(f"response_lens must be 0 or more, got {int(lens.min())}")
    if mean == "sequence":
        each = 1.0 / (max(len(lens), 1) * lens.clamp(min=1).double())
    elif mean == "token":
        each = torch.full((len(lens),), 1.0 / max(int(lens.sum()), 1), dtype=torch.float64)
    else:
        raise ValueError(f"mean must be 'sequence' or 'token', got {mean!r}")
    return each.repeat_interleave(lens)


def policy_loss(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip_low: float,
    clip_high: float,
    ref_logp: torch.Tensor | None = None,
    kl_coef: float = 0.0,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss of some tokens of an update, to be minimized.

    `sum_t w_t [ -min(rho_t A_t, clip(rho_t, 1 - clip_low, 1 + clip_high) A_t) + kl_coef k3_t ]` with the KL estimator
    `k3 = exp(ref - logp) - (ref - logp) - 1` (DeepSeekMath, equation 4: unbiased, never negative).

    Args:
        logp: [M] log-probabilities under the policy being trained; gradients flow to it alone.
        old_logp: [M] under the policy that was there before the first update on these responses.
        advantages: [M] the advantage of each token's response.
        weights: [M] from :func:`token_weights`.
        clip_low, clip_high: width of the clip range below and above 1.
        ref_logp: [M] under the frozen reference policy; needed when `kl_coef` is not 0.
        kl_coef: weight of the KL term.

    Returns:
        The loss (0-dim, in the dtype of `logp`) and detached metrics that add up over micro-batches: "clip_fraction"
        and, with `ref_logp`, "kl".

    Raises:
        ValueError: tensors that are not all [M], a KL weight without `ref_logp`, a negative clip range or KL weight.
        TypeError: no tensors; log-probs that are not floating point; weights that are not, such as a mask, by which the
            loss would be a sum.
    """
    named = {"old_logp": old_logp, "advantages": advantages, "weights": weights, "ref_logp": ref_logp}
    for name, tensor in {"logp": logp, **named}.items():
        if not isinstance(tensor, torch.Tensor) and (tensor is not None or name != "ref_logp"):
            raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}")
    for name, tensor in (("logp", logp), ("weights", weights)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, as token_weights returns weights, got {tensor.dtype}")
    for name, tensor in named.items():
        if tensor is not None and (logp.ndim != 1 or tensor.shape != logp.shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, logp {tuple(logp.shape)}: expected [M] for both")
    for name, value in {"clip_low": clip_low, "clip_high": clip_high, "kl_coef": kl_coef}.items():
        if not value >= 0:
            raise ValueError(f"{name} is {value}, expected 0 or more")
    if kl_coef and ref_logp is None:
        raise ValueError(f"kl_coef is {kl_coef} and ref_logp is missing: the KL term needs the reference log-probs")

    weights, advantages = weights.to(logp.dtype), advantages.to(logp.dtype)
    ratio = torch.exp(logp - old_logp.detach())
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain, clipped_gain = ratio * advantages, clipped_ratio * advantages
    per_token = -torch.minimum(gain, clipped_gain)
    metrics = {"clip_fraction": (weights * (clipped_gain < gain)).sum().detach()}
    if ref_logp is not None:
        away = ref_logp.detach() - logp
        kl = torch.expm1(away) - away
        per_token = per_token + kl_coef * kl
        metrics["kl"] = (weights * kl).sum().detach()
    return (weights * per_token).sum(), metrics
