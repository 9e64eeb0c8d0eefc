"""The diffusers-shaped face of the SDE step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.algorithms.flow_sde import SDE_TYPES, StepCoefficients, sde_coefficients, sde_step
from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler


@pytest.fixture
def scheduler():
    scheduler = FlowMatchSDEDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    return scheduler


@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_rows_at_different_steps_equal_the_plain_function(scheduler, sde_type):
    g = torch.Generator().manual_seed(3)
    v, x = torch.randn(2, 3, 4, 8, 8, generator=g)
    index = torch.tensor([1, 5, 8])
    draw = [torch.Generator().manual_seed(i) for i in range(3)]
    out = scheduler.step(v, scheduler.timesteps[index], x, generator=draw, noise_level=0.5, sde_type=sde_type)
    noise = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    sigmas = scheduler.sigmas.double()
    c = sde_coefficients(
        sigmas[index], sigmas[index + 1], noise_level=0.5, sde_type=sde_type, second_sigma=float(sigmas[1])
    )
    want = sde_step(x, v, StepCoefficients(*(t.float() for t in c)), noise=noise)
    torch.testing.assert_close(out.prev_sample, want.next_latents)
    torch.testing.assert_close(out.log_prob, want.log_prob)
    assert out.std.shape == (3, 1, 1, 1)
    scored = scheduler.step(
        v, scheduler.timesteps[index], x, prev_sample=out.prev_sample, noise_level=0.5, sde_type=sde_type
    )
    torch.testing.assert_close(scored.log_prob, out.log_prob, atol=1e-5, rtol=0)
    torch.testing.assert_close(scored.prev_sample_mean, out.prev_sample_mean)


@given(
    st.integers(1, 20).flatmap(
        lambda steps: st.tuples(st.just(steps), st.lists(st.integers(0, steps - 1), min_size=1))
    ),
    st.sampled_from([0.5, 1.0, 3.0, 8.0]),
    st.sampled_from(SDE_TYPES),
    st.floats(0, 1),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_each_row_is_stepped_and_scored_as_if_it_were_alone(steps, shift, sde_type, noise_level, dtype):
    scheduler = FlowMatchSDEDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps[0])
    now = scheduler.timesteps[steps[1]]
    v, x = torch.randn(2, len(now), 3, 5, generator=torch.Generator().manual_seed(len(now))).to(dtype)
    knobs = dict(noise_level=noise_level, sde_type=sde_type, return_dict=False)
    drawn = [torch.Generator().manual_seed(i) for i in range(len(now))]
    together = scheduler.step(v, now, x, generator=drawn, **knobs)
    scored = scheduler.step(v, now, x, prev_sample=together[0], **knobs)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in (*together, *scored))
    for i, t in enumerate(now):
        row = slice(i, i + 1)
        one = scheduler.step(v[row], t, x[row], generator=torch.Generator().manual_seed(i), **knobs)
        again = scheduler.step(v[row], t, x[row], prev_sample=together[0][row], **knobs)
        for mine, theirs in zip((*one, *again), (*together, *scored), strict=True):
            torch.testing.assert_close(mine[0], theirs[i], atol=1e-5, rtol=1e-5)


def test_noise_level_zero_is_the_stock_euler_step(scheduler):
    from diffusers import FlowMatchEulerDiscreteScheduler

    stock = FlowMatchEulerDiscreteScheduler(shift=3.0)
    stock.set_timesteps(10)
    v, x = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    for t in stock.timesteps:
        want = stock.step(v, t, x, return_dict=False)[0]
        got, log_prob, mean, _ = scheduler.step(v, t, x, noise_level=0.0, return_dict=False)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got, mean)
        assert log_prob.tolist() == [0, 0]


def test_bfloat16_input_is_stepped_in_float32(scheduler):
    v = torch.randn(1, 4, dtype=torch.bfloat16)
    out = scheduler.step(v, scheduler.timesteps[2], v, return_logprobs=False)
    assert out.prev_sample.dtype == torch.float32
    assert out.log_prob is None


def test_a_timestep_outside_the_schedule_is_refused(scheduler):
    with pytest.raises(ValueError, match=r"timestep 123\.0 is not in the schedule"):
        scheduler.step(torch.zeros(1, 4), 123.0, torch.zeros(1, 4))
