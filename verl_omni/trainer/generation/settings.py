"""The configuration of a generation run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_omni.workers.config import ConfigError, DiffusionModelConfig, DiffusionRolloutConfig, build
from verl_omni.workers.config.base import flag, integer, path, paths


@dataclass(kw_only=True)
class DataConfig:
    """``data``."""

    KEY: ClassVar[str] = "data"

    val_files: list[str]
    """Prompt files, ``.txt``, ``.jsonl`` or ``.parquet``; a single one may be given without a list."""
    max_samples: int | None = None
    """Prompts at most, from the start; null or -1: all."""
    negative_prompt: str | None = None
    """Negative prompt of rows that give none; null: none."""

    def __post_init__(self) -> None:
        self.val_files = paths("data.val_files", self.val_files)
        if str(self.max_samples) == "-1":
            self.max_samples = None
        self.max_samples = integer("data.max_samples", self.max_samples, low=1, null="all")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            raise ConfigError(f"data.negative_prompt={self.negative_prompt!r} must be a text, or null for none")


@dataclass(kw_only=True)
class GenerationConfig:
    """``generation``: what is written, and where."""

    KEY: ClassVar[str] = "generation"

    output_dir: str = "outputs/generation"
    """Folder; made if missing. What an earlier run wrote there is replaced, other files are left alone."""
    save_images: bool = True
    """Write ``images/<id>.png``."""
    grid: bool = True
    """Write ``grid.png``: the first images, labelled."""
    grid_max_images: int = 64
    """Images in the grid at most."""
    save_trajectories: bool = True
    """Write ``trajectories.safetensors``."""

    def __post_init__(self) -> None:
        self.output_dir = path("generation.output_dir", self.output_dir)
        for name in ("save_images", "grid", "save_trajectories"):
            setattr(self, name, flag(f"generation.{name}", getattr(self, name)))
        self.grid_max_images = integer("generation.grid_max_images", self.grid_max_images, low=1)


@dataclass(kw_only=True)
class ActorRolloutRefConfig:
    """``actor_rollout_ref``: the parts of it that a rollout needs."""

    model: DiffusionModelConfig
    """Which model."""
    rollout: DiffusionRolloutConfig = field(default_factory=DiffusionRolloutConfig)
    """How it is rolled out."""


@dataclass(kw_only=True)
class GenerationSettings:
    """All keys of ``generation.yaml``."""

    actor_rollout_ref: ActorRolloutRefConfig
    """Model and rollout."""
    data: DataConfig
    """Prompts."""
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    """Outputs."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> GenerationSettings:
        """Build and check everything that needs no other file. Raises :class:`ConfigError`."""
        return build(cls, mapping, "")
