"""Measured rollout speed by mode and cap, for one model, size and device: what "auto" goes by."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_omni.workers.config.base import ConfigError, build, choice, integer, number
from verl_omni.workers.config.rollout import RolloutMode
from verl_omni.workers.rollout.profile_key import ProfileKey

__all__ = ["ProfileKey", "ProfilePoint", "RolloutProfile", "load_profiles", "nearest_profile"]


@dataclass(frozen=True, kw_only=True)
class ProfilePoint:
    """One measurement."""

    mode: str
    """"step_wise", "request_level" or "serial"."""
    max_num_seqs: int
    """The cap; 1 in serial mode."""
    images_per_s: float
    """Images a second with at least a full batch in flight."""
    peak_memory_gib: float | None = None
    """The most device memory that the engine's worker reserved, in GiB; 0 or None: unknown."""

    def __post_init__(self) -> None:
        choice("profile point.mode", self.mode, tuple(RolloutMode))
        integer("profile point.max_num_seqs", self.max_num_seqs, low=1)
        number("profile point.images_per_s", self.images_per_s, above=0)
        number("profile point.peak_memory_gib", self.peak_memory_gib, low=0, null="unknown")
        if self.mode == RolloutMode.SERIAL and self.max_num_seqs != 1:
            raise ConfigError(f"profile point.max_num_seqs={self.max_num_seqs} must be 1 in serial mode")


@dataclass(frozen=True, kw_only=True)
class RolloutProfile:
    """All measurements under one key."""

    key: ProfileKey
    """What they hold for."""
    points: tuple[ProfilePoint, ...]
    """At least one, in any order."""
    source: str = field(default="", compare=False)
    """Name of the file that it was read from, for messages."""

    def measured(self, mode: str) -> dict[int, ProfilePoint]:
        """cap → point of `mode`. Of a cap that was measured twice, the higher speed and the higher memory."""
        measured: dict[int, ProfilePoint] = {}
        for point in self.points:
            if point.mode == mode:
                measured[point.max_num_seqs] = _best(point, measured.get(point.max_num_seqs, point))
        return measured

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        data = {"key": dataclasses.asdict(self.key), "points": [dataclasses.asdict(point) for point in self.points]}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RolloutProfile:
        """Read what :meth:`save` wrote. Raises :class:`ConfigError` naming the file."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
            return cls._from_data(data, Path(path).name)
        except (OSError, ValueError) as error:
            raise ConfigError(f"rollout profile {path}: {error}") from error

    @classmethod
    def _from_data(cls, data: Any, source: str) -> RolloutProfile:
        if not isinstance(data, dict) or data.keys() != {"key", "points"}:
            raise ConfigError('it must be an object with "key" and "points"')
        points = data["points"] if isinstance(data["points"], list) else []
        if not points:
            raise ConfigError('"points" must be a list with at least one measurement')
        return cls(key=build(ProfileKey, data["key"], "key"), points=tuple(_points(points)), source=source)


def load_profiles(path: str | Path) -> list[RolloutProfile]:
    """The profile in the file `path`; of a folder, those in its ``.json`` files, by name.

    Raises :class:`ConfigError` for a folder without any, and for a file that is no profile.
    """
    if not Path(path).is_dir():
        return [RolloutProfile.load(path)]
    profiles = [RolloutProfile.load(file) for file in sorted(Path(path).glob("*.json"))]
    if not profiles:
        raise ConfigError(
            f"rollout profile {path}: the folder holds no .json file; measure one with "
            f"python -m verl_omni.bench … --profile {Path(path) / 'profile.json'}"
        )
    return profiles


def nearest_profile(profiles: Iterable[RolloutProfile], key: ProfileKey) -> RolloutProfile:
    """The first that matches `key`; without one, the first that differs in the fewest things."""
    return min(profiles, key=lambda profile: len(profile.key.differences(key)))


def _points(points: list[Any]) -> Iterator[ProfilePoint]:
    for index, point in enumerate(points):
        yield build(ProfilePoint, point, f"points.{index}")


def _best(a: ProfilePoint, b: ProfilePoint) -> ProfilePoint:
    faster = max(a, b, key=lambda point: point.images_per_s)
    return dataclasses.replace(faster, peak_memory_gib=max(a.peak_memory_gib or 0, b.peak_memory_gib or 0))
