"""Advantages and losses as they are registered, against plain float64 arithmetic."""

from __future__ import annotations

import math
import statistics

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.trainer.diffusion import diffusion_algos
from verl_omni.trainer.diffusion.diffusion_algos import (
    FlowGRPO,
    KLLoss,
    compute_flow_grpo_outcome_advantage,
    get_diffusion_adv_estimator_fn,
    get_diffusion_loss_fn,
    register_diffusion_adv_est,
    register_diffusion_loss,
)
from verl_omni.workers.config import ConfigError, DiffusionLossConfig

CLIP = 1e-2
element = st.tuples(st.floats(-2, 2), st.floats(-0.03, 0.03), st.floats(0, 2))
batches = st.integers(1, 3).flatmap(
    lambda steps: st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0, 3.0]), st.lists(element, min_size=steps, max_size=steps)),
        min_size=1,
        max_size=5,
    )
)


def reference(
    rows: list[tuple[float, list[tuple[float, float, float]]]], clip: float
) -> tuple[float, list[list[float]]]:
    """Loss and its gradient by the log-probs, from (weight, [(advantage, change of log-prob, importance) a step])."""
    total = sum(weight for weight, _ in rows) or 1.0
    loss, gradients = 0.0, []
    for weight, steps in rows:
        gradients.append([])
        for advantage, change, importance in steps:
            ratio, share = math.exp(change), weight * importance / total / len(steps)
            plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 1 - clip), 1 + clip)
            loss += share * max(plain, clipped)
            gradients[-1].append(share * plain if plain >= clipped else 0.0)
    return loss, gradients


@given(batches)
def test_the_loss_and_its_gradient_equal_a_float64_reference(rows):
    weight = torch.tensor([w for w, _ in rows])
    columns = torch.tensor([steps for _, steps in rows], dtype=torch.float32)
    advantages, change, importance = columns.unbind(2)
    old = torch.full_like(change, -1.25)
    log_prob = (old + change).requires_grad_()
    loss, metrics = get_diffusion_loss_fn("flow_grpo").compute_loss(
        old_log_prob=old,
        log_prob=log_prob,
        advantages=advantages,
        config=DiffusionLossConfig(clip_ratio=CLIP),
        rollout_is_weights=importance,
        sample_weight=weight,
    )
    loss.backward()
    moved = (log_prob.detach() - old).double()
    exact = torch.stack([advantages.double(), moved, importance.double()], dim=2)
    want, gradients = reference(list(zip(weight.tolist(), exact.tolist(), strict=True)), CLIP)
    assert float(loss.detach()) == pytest.approx(want, abs=1e-6)
    ratio = moved.exp()
    if not ((ratio - 1).abs() - CLIP).abs().lt(1e-6).any():  # at the kink there are two gradients
        assert torch.allclose(log_prob.grad.double(), torch.tensor(gradients, dtype=torch.float64), atol=1e-6)
        share = weight.double()[:, None].expand_as(ratio) / (weight.double().sum() * ratio.shape[1] or 1)
        assert float(metrics["clip_fraction"]) == pytest.approx(
            float((share * ((ratio - 1).abs() > CLIP)).sum()), abs=1e-6
        )
    if weight.sum() > 0:
        mean = (ratio.mean(1) * weight.double()).sum() / weight.double().sum()
        assert float(metrics["ratio_mean"]) == pytest.approx(float(mean), abs=1e-6)
        assert float(metrics["ratio_max_dev"]) == pytest.approx(float((ratio[weight > 0] - 1).abs().max()), abs=1e-6)
    assert not any(value.requires_grad for value in metrics.values())


@given(st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_micro_batches_that_are_put_together_by_weight_give_the_loss_of_the_batch(sizes, random):
    rows = sum(sizes)
    change = torch.tensor([[random.uniform(-0.02, 0.02) for _ in range(2)] for _ in range(rows)])
    advantages = torch.tensor([[random.uniform(-2, 2)] * 2 for _ in range(rows)])
    weight = torch.tensor([float(random.random() < 0.7) for _ in range(rows)])

    def loss(part: slice) -> torch.Tensor:
        old = torch.zeros_like(change[part])
        config = DiffusionLossConfig(clip_ratio=CLIP)
        return FlowGRPO.compute_loss(
            old_log_prob=old,
            log_prob=change[part],
            advantages=advantages[part],
            config=config,
            sample_weight=weight[part],
        )[0]

    parts = [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]
    together = sum(float(loss(part)) * float(weight[part].sum()) for part in parts) / (float(weight.sum()) or 1.0)
    assert float(loss(slice(None))) == pytest.approx(together, abs=1e-6)


def test_padding_changes_nothing_and_padding_alone_gives_0():
    def result(rows: list[int], weight: list[float] | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        log_prob = torch.tensor([[0.1, 0.2], [0.003, -0.001], [0.5, 0.5]])[rows].requires_grad_()
        loss, metrics = FlowGRPO.compute_loss(
            old_log_prob=torch.zeros(len(rows), 2),
            log_prob=log_prob,
            advantages=torch.tensor([[1.0], [-0.5], [2.0]])[rows],
            config=DiffusionLossConfig(clip_ratio=CLIP),
            sample_weight=None if weight is None else torch.tensor(weight),
        )
        loss.backward()
        return loss.detach(), metrics

    plain, metrics = result([0, 1], None)
    padded, padded_metrics = result([0, 1, 2], [1.0, 1.0, 0.0])
    assert torch.equal(plain, padded)
    assert metrics == padded_metrics
    nothing, metrics = result([2], [0.0])
    assert float(nothing) == 0
    assert {name: float(value) for name, value in metrics.items()} == dict.fromkeys(metrics, 0.0)


def test_one_step_may_come_without_its_dimension():
    old, advantages = torch.zeros(3), torch.tensor([1.0, -1.0, 0.5])
    log_prob = torch.tensor([0.001, 0.02, -0.02])
    config = DiffusionLossConfig(clip_ratio=CLIP)
    flat, _ = FlowGRPO.compute_loss(old_log_prob=old, log_prob=log_prob, advantages=advantages, config=config)
    column, _ = FlowGRPO.compute_loss(
        old_log_prob=old[:, None], log_prob=log_prob[:, None], advantages=advantages[:, None], config=config
    )
    assert torch.equal(flat, column)
    mean, ref, std = torch.randn(3, 4, 5), torch.randn(3, 4, 5), torch.rand(3) + 0.1
    assert torch.equal(
        KLLoss.compute_loss(mean, ref, std), KLLoss.compute_loss(mean[:, None], ref[:, None], std[:, None])
    )


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (([2, 3], [2, 2], [2, 3]), "log-probs must be"),
        (([2, 3], [2, 3], [3, 2]), r"advantages must be \[2\], \[2, 1\] or \[2, 3\], got \[3, 2\]"),
        (([2, 3, 1], [2, 3, 1], [2, 3]), "log-probs must be"),
    ],
)
def test_shapes_that_would_broadcast_wrongly_are_refused(shapes, message):
    log_prob, old, advantages = (torch.zeros(*shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        FlowGRPO.compute_loss(old_log_prob=old, log_prob=log_prob, advantages=advantages, config=DiffusionLossConfig())
    with pytest.raises(ValueError, match=r"sample_weight must be \[2\], got \[3\]"):
        KLLoss.compute_loss(torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.ones(2, 1), torch.ones(3))


def test_the_kl_and_its_gradient_equal_the_formula_with_weights():
    g = torch.Generator().manual_seed(0)
    mean, ref = torch.randn(2, 3, 2, 4, 5, generator=g)
    std = torch.rand(3, 2, generator=g) + 0.1
    weight = torch.tensor([1.0, 0.0, 2.0])
    mean.requires_grad_()
    kl = KLLoss.compute_loss(mean, ref, std, weight)
    kl.backward()
    exact = mean.detach().double().requires_grad_()
    each = (exact - ref.double()).square().mean(dim=(2, 3)) / (2 * std.double() ** 2)
    want = (each.mean(1) * weight.double()).sum() / 3
    want.backward()
    assert float(kl.detach()) == pytest.approx(float(want.detach()), rel=1e-5)
    assert torch.allclose(mean.grad.double(), exact.grad, atol=1e-7)


samples = st.lists(st.tuples(st.sampled_from("abc"), st.floats(-3, 3, width=32)), min_size=1, max_size=12)


@given(samples, st.booleans(), st.booleans(), st.sampled_from(["list", "array"]))
def test_advantages_equal_the_formula_in_the_shape_of_the_rewards(pairs, norm, global_std, kind):
    groups, rewards = [g for g, _ in pairs], [r for _, r in pairs]
    index = groups if kind == "list" else numpy.array(groups, dtype=object)
    advantages, returns = get_diffusion_adv_estimator_fn("flow_grpo")(
        sample_level_rewards=torch.tensor(rewards)[:, None],
        index=index,
        norm_adv_by_std_in_grpo=norm,
        global_std=global_std,
    )
    assert advantages.shape == (len(pairs), 1) and torch.equal(advantages, returns)
    for group, reward, got in zip(groups, rewards, advantages[:, 0].tolist(), strict=True):
        own = [r for g, r in pairs if g == group]
        want = reward - statistics.fmean(own) if len(own) > 1 else 0.0
        if norm:
            want /= statistics.pstdev(rewards if global_std else own) + 1e-4
        assert got == pytest.approx(max(-5.0, min(5.0, want)), abs=1e-5)


def test_rewards_may_be_one_a_sample_or_one_a_step():
    rewards, index = torch.tensor([0.1, 0.9, 0.4, 0.2]), ["a", "a", "b", "b"]
    flat, _ = compute_flow_grpo_outcome_advantage(rewards, index)
    steps, _ = compute_flow_grpo_outcome_advantage(torch.stack([rewards, -rewards], dim=1), index)
    assert flat.shape == (4,)
    assert torch.equal(steps[:, 0], flat) and torch.allclose(steps[:, 1], -flat)
    with pytest.raises(ValueError, match="one group a sample"):
        compute_flow_grpo_outcome_advantage(rewards, index[:3])


def test_own_losses_and_advantages_are_found_by_name():
    @register_diffusion_loss("tests_zero")
    class Zero:
        def compute_loss(self, *, log_prob, **_):
            return log_prob.sum() * 0, {}

    @register_diffusion_adv_est("tests_raw")
    def raw(sample_level_rewards, index, **_):
        return sample_level_rewards, sample_level_rewards

    assert isinstance(get_diffusion_loss_fn("tests_zero"), Zero)
    assert get_diffusion_adv_estimator_fn("tests_raw") is raw
    with pytest.raises(ConfigError, match=r"diffusion_loss\.loss_mode='flow_grp' .*did you mean flow_grpo"):
        get_diffusion_loss_fn("flow_grp")
    with pytest.raises(ConfigError, match=r"algorithm\.adv_estimator='gae' must be one of .*flow_grpo"):
        get_diffusion_adv_estimator_fn("gae")
    with pytest.raises(ValueError, match=r"'flow_grpo' is registered to .*FlowGRPO already"):
        register_diffusion_loss("flow_grpo")(Zero)


def test_all_public_names_are_there():
    assert all(hasattr(diffusion_algos, name) for name in diffusion_algos.__all__)
