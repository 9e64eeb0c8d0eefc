"""Step tables: all that is known of a row's denoising before it starts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from verl_omni.algorithms.flow_sde import StepCoefficients, ode_coefficients, sample_sde_window, sde_coefficients
from verl_omni.pipelines.params import RequestError, RolloutParams
from verl_omni.pipelines.queued import ahead_of_queue
from verl_omni.pipelines.rows import Row

NOISE = 1 + StepCoefficients._fields.index("noise")
"""Column of the noise's standard deviation in a step table."""


class StepTables:
    """Builds rows for a model whose `schedule(steps, image_tokens)` gives timesteps [T] in 0–1000 and sigmas [T+1]."""

    def __init__(self, schedule: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
        self._schedule = schedule
        self.schedule = functools.lru_cache(maxsize=256)(self._build_schedule)
        self._tables = functools.lru_cache(maxsize=256)(self._build_tables)

    def row(self, params: RolloutParams, image_tokens: int, generator: torch.Generator) -> Row:
        """A row that will follow `params`; draws its window. Raises :class:`RequestError` if that does not fit."""
        steps = params.num_inference_steps
        try:
            with ahead_of_queue(generator.device):
                start, stop = sample_sde_window(
                    sde_window_size=params.sde_window_size,
                    sde_window_range=params.sde_window_range,
                    num_timesteps=steps,
                    generator=generator,
                    device=generator.device,
                )
        except ValueError as error:
            raise RequestError(str(error)) from None
        ode, sde = self._tables(steps, image_tokens, params.noise_level, params.sde_type)
        _check_equal_lengths(params, sde)
        table = torch.cat([ode[:start], sde[start:stop], ode[stop:]])
        stochastic = (table[:, NOISE] > 0).tolist()
        return Row(
            generator=generator, window=(start, stop), table=table, stochastic=stochastic, record=params.logprobs
        )

    def sde_table(self, steps: int, image_tokens: int, noise_level: float, sde_type: str) -> Tensor:
        """The stochastic steps of a schedule, [T, 7] float32: timestep, then the fields of ``StepCoefficients``."""
        return self._tables(steps, image_tokens, noise_level, sde_type)[1]

    def _build_schedule(self, steps: int, image_tokens: int) -> tuple[Tensor, Tensor]:
        if steps == 1:  # from noise to image at once; a schedule stretched to a terminal sigma is 0 / 0 here
            return torch.tensor([1000.0]), torch.tensor([1.0, 0.0])
        timesteps, sigmas = self._schedule(steps, image_tokens)
        return timesteps.float().cpu().clone(), sigmas.float().cpu().clone()

    def _build_tables(self, steps: int, image_tokens: int, noise_level: float, sde_type: str) -> tuple[Tensor, Tensor]:
        """ODE and SDE steps, each [T, 7] float32: timestep, then the fields of ``StepCoefficients``."""
        timesteps, sigmas = self.schedule(steps, image_tokens)
        now, after, second = sigmas[:-1], sigmas[1:], float(sigmas[1])
        sde = sde_coefficients(now, after, noise_level=noise_level, sde_type=sde_type, second_sigma=second)
        ode = ode_coefficients(now, after)
        ode_table, sde_table = (torch.stack([timesteps.double(), *columns], dim=1).float() for columns in (ode, sde))
        return ode_table, sde_table


def _check_equal_lengths(params: RolloutParams, sde: Tensor) -> None:
    """Refuse a window that records one step fewer in some rows than in others, by falling on a step without noise."""
    size, steps = params.sde_window_size, len(sde)
    lo, hi = params.sde_window_range or (0, 0)
    noisy = (sde[lo:hi, NOISE] > 0).tolist()
    if size is not None and 0 < size < hi - lo and any(noisy) and not all(noisy):
        raise RequestError(
            f"sde_type={params.sde_type!r} draws no noise on its last step, on which this window may fall; "
            f"write sde_window_range=[{lo}, {steps - 1}]"
        )
