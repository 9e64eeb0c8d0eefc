"""Measured rollout speed by mode and cap, for one model, size and device: what "auto" goes by."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni.workers.config.base import ConfigError, build, choice, flag, integer, number, text
from verl_omni.workers.config.rollout import DiffusionRolloutConfig, RolloutMode


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """What a measurement holds for. Two runs with the same key are equally fast."""

    model: str
    """Last part of the model's path or hub name."""
    height: int | None
    """Pixels; None: the adapter's default."""
    width: int | None
    """Pixels; None: the adapter's default."""
    num_inference_steps: int | None
    """Denoising steps; None: the adapter's default."""
    cfg: bool
    """Whether classifier-free guidance runs for any request, which doubles the forwards."""
    dtype: str
    """Dtype of the model."""
    device: str
    """Name of the device as its driver gives it, "cpu" without one."""

    def __post_init__(self) -> None:
        for name in ("model", "dtype", "device"):
            text(f"profile key.{name}", getattr(self, name))
        for name in ("height", "width", "num_inference_steps"):
            integer(f"profile key.{name}", getattr(self, name), low=1, null="the adapter's default")
        flag("profile key.cfg", self.cfg)

    @classmethod
    def of(cls, rollout: DiffusionRolloutConfig, *, model: str, device: str, cfg: bool) -> ProfileKey:
        """The key of a run."""
        pipeline = rollout.pipeline
        return cls(
            model=Path(model).name or model,
            height=pipeline.height,
            width=pipeline.width,
            num_inference_steps=pipeline.num_inference_steps,
            cfg=cfg,
            dtype=rollout.dtype,
            device=device,
        )


@dataclass(frozen=True, kw_only=True)
class ProfilePoint:
    """One measurement."""

    mode: str
    """"step_wise", "request_level" or "serial"."""
    max_num_seqs: int
    """The cap; 1 in serial mode."""
    images_per_s: float
    """Images a second with at least a full batch in flight."""

    def __post_init__(self) -> None:
        choice("profile point.mode", self.mode, tuple(RolloutMode))
        integer("profile point.max_num_seqs", self.max_num_seqs, low=1)
        if number("profile point.images_per_s", self.images_per_s) <= 0:
            raise ConfigError(f"profile point.images_per_s={self.images_per_s} must be above 0")


@dataclass(frozen=True, kw_only=True)
class RolloutProfile:
    """All measurements under one key."""

    key: ProfileKey
    """What they hold for."""
    points: tuple[ProfilePoint, ...]
    """At least one, in any order."""

    def differences(self, key: ProfileKey) -> tuple[str, ...]:
        """In what `key` differs from the profile's: "name: measured … now …"; empty if the profile holds for it."""
        pairs = ((f.name, getattr(self.key, f.name), getattr(key, f.name)) for f in dataclasses.fields(key))
        return tuple(f"{name}: measured with {old}, now {new}" for name, old, new in pairs if old != new)

    def rates(self, mode: str) -> dict[int, float]:
        """cap → images a second of `mode`; the best of points that were measured twice."""
        rates: dict[int, float] = {}
        for point in self.points:
            if point.mode == mode:
                rates[point.max_num_seqs] = max(point.images_per_s, rates.get(point.max_num_seqs, 0.0))
        return rates

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RolloutProfile:
        """Read what :meth:`save` wrote. Raises :class:`ConfigError` naming the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls._from_data(data)
        except (OSError, ValueError) as error:
            raise ConfigError(f"rollout profile {path}: {error}") from error

    @classmethod
    def _from_data(cls, data: Any) -> RolloutProfile:
        if not isinstance(data, dict) or data.keys() != {"key", "points"}:
            raise ConfigError('it must be an object with "key" and "points"')
        points = data["points"] if isinstance(data["points"], list) else []
        if not points:
            raise ConfigError('"points" must be a list with at least one measurement')
        return cls(key=build(ProfileKey, data["key"], "key"), points=tuple(_points(points)))


def _points(points: list[Any]) -> Iterable[ProfilePoint]:
    for index, point in enumerate(points):
        yield build(ProfilePoint, point, f"points.{index}")
