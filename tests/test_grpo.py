"""Advantages and losses against hand computations, finite differences and the published properties."""

import math

import pytest
import torch

from dualkv.grpo import ALGORITHMS, group_advantages, policy_loss, token_weights


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_by_hand() -> None:
    rewards = f64(1.0, 0.0, 0.0, 1.0, 3.0, 5.0)
    got = group_advantages(rewards, [4, 2], eps=0.0)
    spread = math.sqrt(1 / 3)  # of 1, 0, 0, 1 around 0.5, three degrees of freedom
    expected = f64(0.5 / spread, -0.5 / spread, -0.5 / spread, 0.5 / spread, -1 / math.sqrt(2), 1 / math.sqrt(2))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("reward", [0.1, 0.9, 1.1, 3.3, -100.3, 1000.1])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 12, 16, 19])
def test_groups_without_contrast_get_zero(reward: float, size: int) -> None:
    """The mean of eight rewards of 0.9 is not 0.9 in fp32, and their standard deviation is as small as eps."""
    assert group_advantages(torch.full((size,), reward), [size]).tolist() == [0.0] * size


def test_token_weights_by_hand() -> None:
    torch.testing.assert_close(token_weights([2, 0, 1], "sequence"), f64(1 / 6, 1 / 6, 1 / 3))
    torch.testing.assert_close(token_weights([2, 0, 1], "token"), f64(1 / 3, 1 / 3, 1 / 3))
    assert token_weights([], "token").shape == token_weights([0], "sequence").shape == (0,)


def test_clipping_by_hand() -> None:
    """Ratios 1.5, 0.5, 1.5, 0.5 with advantages +1, +1, -1, -1: only the gains on the far side are clipped."""
    logp = f64(1.5, 0.5, 1.5, 0.5).log().requires_grad_()
    ones = torch.ones(4, dtype=torch.float64)
    low, high = ALGORITHMS["dapo"].clip_low, ALGORITHMS["dapo"].clip_high
    loss, metrics = policy_loss(logp, 0 * ones, f64(1, 1, -1, -1), ones / 4, low, high)
    assert loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 0.8) / 4)
    assert metrics["clip_fraction"].item() == 0.5
    assert "kl" not in metrics
    loss.backward()
    # A clipped token has no gradient, the others -w * rho * A.
    torch.testing.assert_close(logp.grad, f64(0.0, -0.5 / 4, 1.5 / 4, 0.0))


def test_kl_by_hand_and_its_gradient() -> None:
    logp = f64(-1.0, -2.0).requires_grad_()
    ref = f64(-1.5, -2.0)
    loss, metrics = policy_loss(logp, logp.detach(), f64(0, 0), f64(0.5, 0.5), 0.2, 0.2, ref_logp=ref, kl_coef=0.1)
    k3 = math.exp(-0.5) + 0.5 - 1
    assert metrics["kl"].item() == pytest.approx(k3 / 2)
    assert loss.item() == pytest.approx(0.1 * k3 / 2)
    loss.backward()
    torch.testing.assert_close(logp.grad, f64(0.1 * 0.5 * (1 - math.exp(-0.5)), 0.0))


@pytest.mark.parametrize("mean", ["sequence", "token"])
def test_micro_batches_add_up(mean: str) -> None:
    """Loss, gradient and metrics of the parts sum to the loss, gradient and metrics of the whole."""
    generator = torch.Generator().manual_seed(1)
    logp, old, ref, advantages = torch.randn(4, 21, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    weights = token_weights([5, 9, 0, 7], mean)

    def run(part: slice) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return policy_loss(
            logp[part], old[part], advantages[part], weights[part], 0.2, 0.28, ref_logp=ref[part], kl_coef=0.1
        )

    whole, metrics = run(slice(None))
    (expected,) = torch.autograd.grad(whole, logp)
    parts = [run(part) for part in (slice(0, 5), slice(5, 6), slice(6, 21))]
    torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
    (grad,) = torch.autograd.grad(sum(loss for loss, _ in parts), logp)
    torch.testing.assert_close(grad, expected)
    for name, value in metrics.items():
        torch.testing.assert_close(sum(m[name] for _, m in parts), value)


def test_gradient_flows_to_the_policy_alone() -> None:
    tensors = [f64(-1.0).requires_grad_() for _ in range(3)]
    loss, _ = policy_loss(tensors[0], tensors[1], f64(1.0), f64(1.0), 0.2, 0.2, ref_logp=tensors[2], kl_coef=1.0)
    loss.backward()
    assert tensors[0].grad is not None
    assert tensors[1].grad is None
    assert tensors[2].grad is None
