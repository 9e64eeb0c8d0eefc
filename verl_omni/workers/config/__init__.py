"""Typed configuration, checked where it is built. Imports neither torch nor the engine."""

from verl_omni.workers.config.base import ConfigError, build
from verl_omni.workers.config.model import DiffusionModelConfig
from verl_omni.workers.config.rollout import (
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
    DiffusionSamplingConfig,
)

__all__ = [
    "ConfigError",
    "DiffusionModelConfig",
    "DiffusionPipelineConfig",
    "DiffusionRolloutAlgoConfig",
    "DiffusionRolloutConfig",
    "DiffusionSamplingConfig",
    "build",
]
