"""The SDE step against its formulas, written out row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.algorithms.flow_sde import (
    LEAST_NOISE,
    SDE_TYPES,
    StepCoefficients,
    ode_coefficients,
    row_seed,
    sample_sde_window,
    sde_coefficients,
    sde_step,
)

SIGMAS = torch.linspace(1, 0, 11, dtype=torch.float64)
SECOND = float(SIGMAS[1])


def reference(x, v, s, s2, second, a, kind):
    """(mean, noise, std) of one row in float64, as the papers write it."""
    mean, noise, std = stochastic(x, v, s, s2, second, a, kind)
    return (mean, noise, std) if noise > LEAST_NOISE else (x + v * (s2 - s), 0.0, 0.0)


def stochastic(x, v, s, s2, second, a, kind):
    dt = s2 - s
    if kind == "sde":
        std = a * math.sqrt(s / (1 - (second if s == 1 else s)))
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        return mean, std * math.sqrt(-dt), std
    x0, x1 = x - s * v, x + (1 - s) * v
    if kind == "cps":
        std = s2 * math.sin(a * math.pi / 2)
        return (1 - s2) * x0 + math.sqrt(s2**2 - std**2) * x1, std, std
    score = -(x - x0 * (1 - s)) / s**2
    return x + dt * v - 0.5 * a**2 * score * dt, a * math.sqrt(-dt), a * math.sqrt(-dt)


def density(after, mean, noise, kind):
    """Log-probability of one row in float64."""
    if noise == 0:
        return 0.0
    if kind == "cps":
        return float(-((after - mean) ** 2).mean())
    return float((-((after - mean) ** 2) / (2 * noise**2)).mean()) - math.log(noise) - 0.5 * math.log(2 * math.pi)


@st.composite
def rows(draw):
    """Rows of any type, schedule, step and noise level, side by side: (type, schedule, step, noise level)."""
    steps, shift = st.integers(2, 50), st.sampled_from([0.5, 1.0, 3.0, 8.0])
    made = []
    for _ in range(draw(st.integers(1, 6))):
        t, k = torch.linspace(1, 0, draw(steps) + 1, dtype=torch.float64), draw(shift)
        level = draw(st.sampled_from([0.0, 1e-30]) | st.floats(0.05, 1.0))
        made.append(
            (draw(st.sampled_from(SDE_TYPES)), k * t / (1 + (k - 1) * t), draw(st.integers(0, len(t) - 2)), level)
        )
    return made


@given(rows(), st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.integers(0, 2**31))
def test_vectorised_step_equals_each_row_alone_and_in_float64(specs, dtype, taken, seed):
    g = torch.Generator().manual_seed(seed)
    x, v, eps, other = (torch.randn(len(specs), 5, 7, generator=g) for _ in range(4))
    v = v.to(dtype)
    columns = [
        sde_coefficients(s[i : i + 1], s[i + 1 : i + 2], noise_level=a, sde_type=kind, second_sigma=float(s[1]))
        for kind, s, i, a in specs
    ]
    coefficients = StepCoefficients(*(torch.cat(c).float() for c in zip(*columns, strict=True)))
    noise = eps * (coefficients.noise > 0).view(-1, 1, 1)

    def step(rows: slice):
        given = {"next_latents": other[rows]} if taken else {"noise": noise[rows]}
        return sde_step(x[rows], v[rows], StepCoefficients(*(c[rows] for c in coefficients)), **given)

    whole = step(slice(None))
    for r, (kind, s, i, a) in enumerate(specs):
        mean, scale, std = reference(x[r].double(), v[r].double(), float(s[i]), float(s[i + 1]), float(s[1]), a, kind)
        rounding = 2**-22 * float(1 + x[r].abs().max() + v[r].float().abs().max() + whole.mean[r].abs().max())
        after = other[r].double() if taken else mean + scale * noise[r].double()
        assert float(coefficients.std[r]) == pytest.approx(std, rel=1e-6)
        torch.testing.assert_close(whole.mean[r].double(), mean, atol=rounding, rtol=1e-5)
        torch.testing.assert_close(whole.next_latents[r].double(), after, atol=rounding, rtol=1e-5)
        # Of the step that is there, rounded as it is: its distance from the mean counts in units of the noise.
        wanted = density(whole.next_latents[r].double(), mean, scale, kind)
        blur = rounding / scale if scale and kind != "cps" else rounding
        far = float((whole.next_latents[r].double() - mean).abs().max()) / (scale if scale and kind != "cps" else 1)
        log_prob = float(whole.log_prob[r])
        assert log_prob == pytest.approx(wanted, abs=2 * blur * (far + blur), rel=1e-5)
        assert bool(scale) or log_prob == 0
        alone = step(slice(r, r + 1))
        torch.testing.assert_close(alone.mean[0], whole.mean[r], atol=rounding, rtol=0)
        torch.testing.assert_close(alone.next_latents[0], whole.next_latents[r], atol=rounding, rtol=0)
        assert float(alone.log_prob) == pytest.approx(log_prob, abs=2 * blur * (far + blur), rel=1e-5)


@pytest.mark.parametrize("kind", SDE_TYPES)
def test_recomputing_the_log_prob_of_a_taken_step_gives_it_back(kind):
    x, v, eps = torch.randn(3, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    c = sde_coefficients(SIGMAS[2:6], SIGMAS[3:7], noise_level=0.7, sde_type=kind, second_sigma=SECOND)
    c = StepCoefficients(*(t.float() for t in c))
    taken = sde_step(x, v, c, noise=eps)
    again = sde_step(x, v, c, next_latents=taken.next_latents)
    torch.testing.assert_close(again.log_prob, taken.log_prob, atol=1e-6, rtol=0)
    torch.testing.assert_close(again.mean, taken.mean, atol=0, rtol=0)


@pytest.mark.parametrize("level", [0.0, 1e-300, 1e-40, 1e-20, LEAST_NOISE / 2])
@pytest.mark.parametrize("kind", SDE_TYPES)
def test_a_noise_level_of_zero_or_next_to_it_is_the_ode_step_and_never_nan(kind, level):
    c = sde_coefficients(SIGMAS[:-1], SIGMAS[1:], noise_level=level, sde_type=kind, second_sigma=SECOND)
    for column, ode in zip(c, ode_coefficients(SIGMAS[:-1], SIGMAS[1:]), strict=True):
        torch.testing.assert_close(column, ode, atol=1e-15, rtol=0)


def test_the_last_cps_step_is_deterministic():
    c = sde_coefficients(SIGMAS[-2:-1], SIGMAS[-1:], noise_level=0.7, sde_type="cps", second_sigma=SECOND)
    assert float(c.noise) == 0
    assert float(c.velocity) == pytest.approx(-0.1)


@pytest.mark.parametrize("kind", SDE_TYPES)
def test_a_single_step_schedule_is_finite(kind):
    c = sde_coefficients(torch.tensor([1.0]), torch.tensor([0.0]), noise_level=0.7, sde_type=kind, second_sigma=0.0)
    assert all(bool(torch.isfinite(column).all()) for column in c)


def test_unknown_type_names_the_known_ones():
    with pytest.raises(ValueError, match=r"ode.*sde, cps, dance_sde"):
        sde_coefficients(SIGMAS[:1], SIGMAS[1:2], noise_level=0.7, sde_type="ode", second_sigma=SECOND)


def test_the_gradient_flows_through_the_mean_only():
    x, v, eps = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    v.requires_grad_()
    c = sde_coefficients(SIGMAS[2:4], SIGMAS[3:5], noise_level=0.7, sde_type="sde", second_sigma=SECOND)
    c = StepCoefficients(*(t.float() for t in c))
    sde_step(x, v, c, noise=eps).log_prob.sum().backward()
    # d/dv of -(x' - mean)² / (2 noise²), averaged over 4 elements, with x' held fixed
    expected = (c.noise[:, None] * eps) * c.velocity[:, None] / c.noise[:, None] ** 2 / 4
    torch.testing.assert_close(v.grad, expected)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 12), st.integers(1, 12), st.integers(0, 99))
def test_windows_lie_where_they_may_or_are_refused(size, lo, hi, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    ask = dict(sde_window_size=size, sde_window_range=(lo, hi), num_timesteps=steps, generator=generator)
    if lo + size <= hi <= steps:
        start, stop = sample_sde_window(**ask)
        assert lo <= start <= stop == start + size <= hi
    else:
        with pytest.raises(ValueError, match="does not fit"):
            sample_sde_window(**ask)


def test_a_size_that_does_not_fit_names_no_range_that_nobody_gave():
    with pytest.raises(ValueError, match=r"^sde_window_size=9 does not fit into 4 steps$"):
        sample_sde_window(sde_window_size=9, sde_window_range=None, num_timesteps=4)


def test_every_place_of_a_window_is_drawn():
    generator = torch.Generator().manual_seed(0)
    ask = dict(sde_window_size=2, sde_window_range=(1, 6), num_timesteps=10, generator=generator)
    assert {sample_sde_window(**ask) for _ in range(200)} == {(1, 3), (2, 4), (3, 5), (4, 6)}


@pytest.mark.parametrize(("steps", "window"), [(10, (0, 9)), (1, (0, 0))])
def test_without_a_size_all_but_the_last_step_are_stochastic(steps, window):
    assert sample_sde_window(sde_window_size=None, sde_window_range=None, num_timesteps=steps) == window


def test_a_size_without_a_range_stays_clear_of_the_last_step():
    generator = torch.Generator().manual_seed(0)
    ask = dict(sde_window_size=2, sde_window_range=None, num_timesteps=4, generator=generator)
    assert {sample_sde_window(**ask) for _ in range(50)} == {(0, 2), (1, 3)}


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_row_seeds_are_valid_and_row_zero_keeps_the_seed(seed, row):
    assert 0 <= row_seed(seed, row) < 2**63
    assert row_seed(seed, 0) in (seed, 0)


def test_rows_of_neighbouring_requests_never_share_a_seed():
    seeds = [row_seed(42 * 1_000_003 + request, row) for request in range(64) for row in range(16)]
    assert len(set(seeds)) == len(seeds)
