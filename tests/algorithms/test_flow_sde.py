"""The SDE step against its formulas, written out row by row in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_omni.algorithms.flow_sde import (
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


def reference(x, v, eps, s, s2, a, kind):
    """(next, log-prob, mean, std) of one row in float64, as the papers write it."""
    dt = s2 - s
    if kind == "sde":
        std = a * math.sqrt(s / (1 - (SECOND if s == 1 else s)))
        mean = x * (1 + std**2 / (2 * s) * dt) + v * (1 + std**2 * (1 - s) / (2 * s)) * dt
        noise = std * math.sqrt(-dt)
    elif kind == "cps":
        std = noise = s2 * math.sin(a * math.pi / 2)
        x0, x1 = x - s * v, x + (1 - s) * v
        mean = (1 - s2) * x0 + math.sqrt(s2**2 - std**2) * x1
    else:
        x0 = x - s * v
        score = -(x - x0 * (1 - s)) / s**2
        mean = x + dt * v - 0.5 * a**2 * score * dt
        std = noise = a * math.sqrt(-dt)
    after = mean + noise * eps
    if kind == "cps":
        log_prob = -((after - mean) ** 2).mean()
    else:
        log_prob = (-((after - mean) ** 2) / (2 * noise**2)).mean() - math.log(noise) - 0.5 * math.log(2 * math.pi)
    return after, log_prob, mean, std


@st.composite
def rows(draw):
    """Rows of any type, step and noise level, side by side."""
    n = draw(st.integers(1, 6))
    row = st.tuples(st.sampled_from(SDE_TYPES), st.integers(0, 9), st.floats(0.05, 1.0))
    return [draw(row) for _ in range(n)], draw(st.integers(0, 2**31))


@given(rows())
def test_vectorised_step_equals_each_row_in_float64(case):
    specs, seed = case
    g = torch.Generator().manual_seed(seed)
    x, v, eps = (torch.randn(len(specs), 5, 7, generator=g) for _ in range(3))
    columns = []
    for kind, i, a in specs:
        s, s2 = SIGMAS[i : i + 1], SIGMAS[i + 1 : i + 2]
        columns.append(sde_coefficients(s, s2, noise_level=a, sde_type=kind, second_sigma=SECOND))
    coefficients = StepCoefficients(*(torch.cat(c).float() for c in zip(*columns, strict=True)))
    step = sde_step(x, v, coefficients, noise=eps)
    for r, (kind, i, a) in enumerate(specs):
        after, log_prob, mean, std = reference(
            x[r].double(), v[r].double(), eps[r].double(), float(SIGMAS[i]), float(SIGMAS[i + 1]), a, kind
        )
        torch.testing.assert_close(step.mean[r].double(), mean, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(step.next_latents[r].double(), after, atol=1e-5, rtol=1e-5)
        assert float(coefficients.std[r]) == pytest.approx(float(std), rel=1e-6)
        if coefficients.noise[r] > 0:
            assert float(step.log_prob[r]) == pytest.approx(float(log_prob), abs=1e-4)
        else:
            assert float(step.log_prob[r]) == 0


@pytest.mark.parametrize("kind", SDE_TYPES)
def test_recomputing_the_log_prob_of_a_taken_step_gives_it_back(kind):
    x, v, eps = torch.randn(3, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    c = sde_coefficients(SIGMAS[2:6], SIGMAS[3:7], noise_level=0.7, sde_type=kind, second_sigma=SECOND)
    c = StepCoefficients(*(t.float() for t in c))
    taken = sde_step(x, v, c, noise=eps)
    again = sde_step(x, v, c, next_latents=taken.next_latents)
    torch.testing.assert_close(again.log_prob, taken.log_prob, atol=1e-6, rtol=0)
    torch.testing.assert_close(again.mean, taken.mean, atol=0, rtol=0)


@pytest.mark.parametrize("kind", SDE_TYPES)
def test_noise_level_zero_is_the_ode_step_and_never_nan(kind):
    c = sde_coefficients(SIGMAS[:-1], SIGMAS[1:], noise_level=0.0, sde_type=kind, second_sigma=SECOND)
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
