"""Measured rollout speed by mode and cap, for one model, size and device: what "auto" goes by."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_omni.workers.config.base import ConfigError, build, choice, integer, number, text
from verl_omni.workers.config.rollout import RolloutMode
from verl_omni.workers.rollout.profile_key import ProfileKey

__all__ = ["ProfileFailure", "ProfileKey", "ProfilePoint", "RolloutProfile", "load_profiles", "nearest_profile"]

LARGEST_CAP = 2**16
"""Far above what any device holds: a larger cap is a slip."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ProfilePoint:
    """One measurement."""

    mode: str
    """"step_wise", "request_level" or "serial"."""
    max_num_seqs: int
    """The cap; 1 in serial mode."""
    images_per_s: float
    """Images a second of bursts of at least a full batch."""
    peak_memory_gib: float | None = None
    """The most device memory that the engine's worker reserved, in GiB; 0 or None: unknown."""

    def __post_init__(self) -> None:
        _check_place("profile point", self)
        rate = number("profile point.images_per_s", self.images_per_s, above=0)
        peak = number("profile point.peak_memory_gib", self.peak_memory_gib, low=0, null="unknown")
        object.__setattr__(self, "images_per_s", rate)
        object.__setattr__(self, "peak_memory_gib", peak)


@dataclass(frozen=True, kw_only=True)
class ProfileFailure:
    """What was to be measured and failed, for want of memory most likely."""

    mode: str
    """As of a point."""
    max_num_seqs: int
    """As of a point."""
    error: str
    """What the failure said, for the reader."""

    def __post_init__(self) -> None:
        _check_place("profile failure", self)
        text("profile failure.error", self.error)


@dataclass(frozen=True, kw_only=True)
class RolloutProfile:
    """All measurements under one key."""

    key: ProfileKey
    """What they hold for."""
    points: tuple[ProfilePoint, ...]
    """At least one, in any order."""
    failed: tuple[ProfileFailure, ...] = ()
    """What failed beside them."""
    source: str = field(default="", compare=False)
    """Name of the file that it was read from, for messages."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"profile {self.source}" if self.source else "profile"

    def measured(self, mode: str) -> dict[int, ProfilePoint]:
        """cap → point of `mode`. Of a cap that was measured twice, the higher speed and the higher memory."""
        measured: dict[int, ProfilePoint] = {}
        for point in self.points:
            if point.mode == mode:
                measured[point.max_num_seqs] = _best(point, measured.get(point.max_num_seqs, point))
        return measured

    def failed_caps(self, mode: str) -> set[int]:
        """The caps of `mode` that failed and were not measured."""
        return {failure.max_num_seqs for failure in self.failed if failure.mode == mode} - self.measured(mode).keys()

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        plain = dataclasses.asdict(self)
        data = {name: plain[name] for name in ("key", "points", "failed") if plain[name]}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> RolloutProfile:
        """Read what :meth:`save` wrote. Raises :class:`ConfigError` naming the file."""
        try:
            return cls._from_data(_read_json(Path(path)), Path(path).name)
        except ValueError as error:
            raise ConfigError(f"rollout profile {path}: {error}") from error

    @classmethod
    def _from_data(cls, data: Any, source: str) -> RolloutProfile:
        if isinstance(data, dict) and {"workload", "rows"} <= data.keys():
            raise ConfigError("this is a record of the bench (--out); give the file that it wrote as --profile")
        if not isinstance(data, dict) or data.keys() - {"failed"} != {"key", "points"}:
            raise ConfigError('it must be an object with "key", "points" and maybe "failed"')
        failed = data.get("failed", [])
        if not isinstance(data["points"], list) or not data["points"]:
            raise ConfigError('"points" must be a list with at least one measurement')
        if not isinstance(failed, list):
            raise ConfigError('"failed" must be a list')
        return cls(
            key=build(ProfileKey, data["key"], "key"),
            points=tuple(build(ProfilePoint, item, f"points.{i}") for i, item in enumerate(data["points"])),
            failed=tuple(build(ProfileFailure, item, f"failed.{i}") for i, item in enumerate(failed)),
            source=source,
        )


def load_profiles(path: str | Path) -> list[RolloutProfile]:
    """The profile in the file `path`; of a folder, those in its ``.json`` files, by name.

    Of a folder, what is hidden is left out, as is a file that is no profile, which the log tells. Raises
    :class:`ConfigError` for a folder without any profile, and for a single file that is none.
    """
    if not Path(path).is_dir():
        return [RolloutProfile.load(path)]
    profiles = []
    for file in sorted(Path(path).glob("*.json")):
        if file.name.startswith(".") or not file.is_file():
            continue
        try:
            profiles.append(RolloutProfile.load(file))
        except ConfigError as error:
            logger.warning("left out: %s", error)
    if not profiles:
        raise ConfigError(
            f"rollout profile {path}: the folder holds no profile; {_measure(Path(path) / 'profile.json')}"
        )
    return profiles


def nearest_profile(profiles: Iterable[RolloutProfile], key: ProfileKey) -> RolloutProfile:
    """The first that matches `key`, which the log tells if several do; without one, the first that differs least."""
    by_difference: dict[int, list[RolloutProfile]] = {}
    for profile in profiles:
        by_difference.setdefault(len(profile.key.differences(key)), []).append(profile)
    first, *others = by_difference[min(by_difference)]
    if others and 0 in by_difference:
        names = ", ".join(profile.source for profile in others)
        logger.warning("of the rollout profiles that hold for this run %s is used, and not %s", first.source, names)
    return first


def _read_json(path: Path) -> Any:
    again = _measure(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no such file; give one that there is, or {again}") from None
    except OSError as error:
        raise ConfigError(f"it cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"it is no JSON ({error}): broken or cut short; {again}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"it is no text ({error.reason}); {again}") from error
    except RecursionError:
        raise ConfigError("it is nested too deeply") from None


def _measure(path: Path) -> str:
    return f"measure one with python -m verl_omni.bench … --profile {path}"


def _check_place(what: str, place: ProfilePoint | ProfileFailure) -> None:
    choice(f"{what}.mode", place.mode, tuple(RolloutMode))
    cap = integer(f"{what}.max_num_seqs", place.max_num_seqs, low=1)
    if cap > LARGEST_CAP:
        raise ConfigError(f"{what}.max_num_seqs={cap} must be at most {LARGEST_CAP}")
    if place.mode == RolloutMode.SERIAL and cap != 1:
        raise ConfigError(f"{what}.max_num_seqs={cap} must be 1 in serial mode")
    object.__setattr__(place, "max_num_seqs", cap)


def _best(a: ProfilePoint, b: ProfilePoint) -> ProfilePoint:
    faster = max(a, b, key=lambda point: point.images_per_s)
    return dataclasses.replace(faster, peak_memory_gib=max(a.peak_memory_gib or 0, b.peak_memory_gib or 0))
