"""Advantages, loss and KL against plain float64 arithmetic."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.algorithms.flow_grpo import clipped_policy_loss, gaussian_kl, group_advantages

samples = st.lists(st.tuples(st.integers(0, 3), st.floats(-3, 3)), min_size=1, max_size=16)


@given(samples, st.booleans(), st.booleans())
def test_advantages_equal_the_formula(pairs, norm, global_std):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    # float32 rewards, as they come from a scorer
    rewards = torch.tensor(rewards, dtype=torch.float32).double().tolist()
    got = group_advantages(
        torch.tensor(rewards, dtype=torch.float32), groups, norm_by_std=norm, global_std=global_std
    ).tolist()
    for g, r, a in zip(groups, rewards, got, strict=True):
        own = [x for h, x in zip(groups, rewards, strict=True) if h == g]
        want = 0.0
        if len(own) > 1:
            want = r - statistics.fmean(own)
            if norm:
                want /= statistics.pstdev(rewards if global_std else own) + 1e-4
        assert a == pytest.approx(max(-5.0, min(5.0, want)), abs=1e-5)


def test_a_group_of_one_and_a_uniform_group_get_nothing():
    rewards = torch.tensor([0.7, 0.2, 0.2, 0.2])
    assert group_advantages(rewards, ["a", "b", "b", "b"]).tolist() == pytest.approx([0, 0, 0, 0], abs=1e-5)


def test_rewards_and_groups_must_agree_in_number():
    with pytest.raises(ValueError, match="one reward and one group a sample"):
        group_advantages(torch.zeros(3), ["a"])


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-0.01, 0.01)), min_size=2, max_size=12), st.floats(1e-5, 1e-2))
def test_the_loss_and_its_gradient_equal_the_formula(pairs, clip):
    advantages = torch.tensor([a for a, _ in pairs], dtype=torch.float64)
    new = torch.tensor([d for _, d in pairs], dtype=torch.float64)
    log_prob = new.float()[:, None].requires_grad_()
    result = clipped_policy_loss(log_prob, torch.zeros(len(pairs), 1), advantages, clip_ratio=clip)
    result.loss.backward()
    want, gradients, outside = [], [], 0
    for a, d in zip(advantages.tolist(), log_prob.detach()[:, 0].double().tolist(), strict=True):
        ratio = math.exp(d)
        clipped = min(max(ratio, 1 - clip), 1 + clip)
        want.append(max(-a * ratio, -a * clipped))
        active = -a * ratio >= -a * clipped
        gradients.append((-a * ratio if active else 0.0) / len(pairs))
        outside += abs(ratio - 1) > clip
    assert float(result.loss.detach()) == pytest.approx(statistics.fmean(want), abs=1e-6)
    edge = any(abs(abs(math.exp(d) - 1) - clip) < 1e-6 for d in log_prob.detach()[:, 0].tolist())
    if not edge:
        assert log_prob.grad[:, 0].tolist() == pytest.approx(gradients, abs=1e-6)
        assert float(result.clip_fraction) == pytest.approx(outside / len(pairs), abs=1e-6)


def test_an_unchanged_policy_has_ratio_one_and_nothing_clipped():
    log_prob = torch.randn(4, 3)
    result = clipped_policy_loss(log_prob, log_prob, torch.randn(4), clip_ratio=1e-5)
    assert float(result.ratio_mean) == 1
    assert float(result.clip_fraction) == 0


def test_kl_equals_the_formula():
    g = torch.Generator().manual_seed(0)
    mean, reference = torch.randn(2, 2, 3, 4, 5, generator=g)
    std = torch.rand(2, 3, generator=g) + 0.1
    want = [
        float((mean[b, w].double() - reference[b, w].double()).square().mean()) / (2 * float(std[b, w]) ** 2)
        for b in range(2)
        for w in range(3)
    ]
    assert float(gaussian_kl(mean, reference, std)) == pytest.approx(statistics.fmean(want), rel=1e-5)
