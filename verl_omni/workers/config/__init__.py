"""Typed configuration, checked where it is built. Imports neither torch nor the engine."""

from verl_omni.workers.config.actor import (
    DiffusionLossConfig,
    FSDPConfig,
    FSDPDiffusionActorConfig,
    OptimConfig,
    RefConfig,
)
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
    "DiffusionLossConfig",
    "DiffusionModelConfig",
    "DiffusionPipelineConfig",
    "DiffusionRolloutAlgoConfig",
    "DiffusionRolloutConfig",
    "DiffusionSamplingConfig",
    "FSDPConfig",
    "FSDPDiffusionActorConfig",
    "OptimConfig",
    "RefConfig",
    "build",
]
