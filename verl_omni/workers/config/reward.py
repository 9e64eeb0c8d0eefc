"""How images are scored."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from verl_omni.workers.config.base import ConfigError, as_mapping, build, choice, integer, nearest, number, path, text
from verl_omni.workers.config.scorers import SCORER_TYPES, FunctionConfig, ScorerConfig

KEY = "reward"
CUSTOM = "custom"
"""Name of the scorer that ``reward.custom_reward_function`` adds."""


@dataclass(kw_only=True)
class CustomRewardFunctionConfig:
    """``reward.custom_reward_function``: short for a scorer of type function with the name custom."""

    KEY: ClassVar[str] = "reward.custom_reward_function"

    path: str | None = None
    """The .py file that holds the function; null: none."""
    name: str = "compute_score"
    """Its name there."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments for it."""

    def __post_init__(self) -> None:
        self.path = path(f"{self.KEY}.path", self.path, null="none")
        self.name = text(f"{self.KEY}.name", self.name)
        self.reward_kwargs = as_mapping(f"{self.KEY}.reward_kwargs", self.reward_kwargs)


@dataclass(kw_only=True)
class RewardConfig:
    """``reward``: the scorers, whose weighted sum is the reward of an image."""

    scorers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """name → ``{type: …, weight: …, …options of that type}``."""
    custom_reward_function: CustomRewardFunctionConfig = field(default_factory=CustomRewardFunctionConfig)
    """A function of your own, under the name that verl gives it."""
    num_workers: int = 8
    """Threads for the scorers that run in the trainer's process."""
    timeout_s: float | None = 300.0
    """Seconds that a scorer in the trainer's process may take for one image, from when it begins; then the image counts
    as failed. A thread cannot be ended: what hangs in it goes on, and another takes its place. null: no limit."""

    def __post_init__(self) -> None:
        self.num_workers = integer(f"{KEY}.num_workers", self.num_workers, low=1)
        self.timeout_s = number(f"{KEY}.timeout_s", self.timeout_s, above=0, null="no limit")
        self.scorers = as_mapping(f"{KEY}.scorers", self.scorers)
        named = self.named_scorers()
        if not named:
            raise ConfigError(f"{KEY} has no scorer; add one, such as {KEY}.scorers.ocr.type=ocr")
        self.scorers = {name: {"type": named[name].TYPE, **asdict(named[name])} for name in self.scorers}

    def named_scorers(self) -> dict[str, ScorerConfig]:
        """The options of all scorers by name, that of `custom_reward_function` among them."""
        named = {name: _scorer(name, entry) for name, entry in self.scorers.items()}
        custom = self.custom_reward_function
        if custom.path is None:
            return named
        if CUSTOM in named:
            raise ConfigError(
                f"{KEY}.scorers.{CUSTOM} has the name of what {custom.KEY} adds; give the scorer another name"
            )
        function = FunctionConfig(path=custom.path, name=custom.name, reward_kwargs=custom.reward_kwargs)
        function.check(custom.KEY)
        return {**named, CUSTOM: function}


def _scorer(name: Any, entry: Any) -> ScorerConfig:
    key = f"{KEY}.scorers.{name}"
    if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z_][\w-]*", name)):
        raise ConfigError(f"{key}: the name of a scorer begins with a letter and has only letters, digits, _ and -")
    options = as_mapping(key, entry)
    if options.get("type") is None:
        near = nearest(f"{key}.type", [str(option) for option in options])
        raise ConfigError(
            f"{key}.type is required, one of {', '.join(SCORER_TYPES)}"
            + (f"; did you mean that by {key}.{near}?" if near else "")
        )
    kind = choice(f"{key}.type", options.pop("type"), SCORER_TYPES)
    config = build(SCORER_TYPES[kind], options, key)
    config.check(key)
    return config
