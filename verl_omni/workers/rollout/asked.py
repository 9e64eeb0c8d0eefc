"""What the configuration asks of the plan, and under which keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig
from verl_omni.workers.config.rollout import RolloutMode

ROLLOUT = DiffusionRolloutConfig.KEY
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm_omni"


class PlanError(ConfigError):
    """What was asked can't be planned. `overrides` lead out of it, and are part of the message."""

    def __init__(self, problem: str, overrides: Iterable[str]) -> None:
        self.overrides = tuple(overrides)
        self.problem = problem
        super().__init__(f"{problem}; write {' '.join(self.overrides)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.overrides)


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the configuration asks for; what may stand in two places is the same in both."""

    batching_mode: str | None
    """As configured."""
    caps: dict[str, int]
    """Key → cap, where one is set."""
    steps: dict[str, bool]
    """Key → step_execution, where it is set; ``rollout.step_execution=false`` asks for nothing."""
    wait_ms: float
    """``request_batch_max_wait_ms``."""
    rows: int | None
    """``rows_per_forward``."""

    @classmethod
    def read(cls, rollout: DiffusionRolloutConfig) -> Asked:
        """Raises :class:`PlanError` where two places contradict each other."""
        engine = rollout.vllm_omni
        caps = {f"{ROLLOUT}.max_num_seqs": rollout.max_num_seqs, f"{ENGINE}.max_num_seqs": engine.get("max_num_seqs")}
        steps = {
            f"{ROLLOUT}.step_execution": rollout.step_execution or None,
            f"{ENGINE}.step_execution": engine.get("step_execution"),
        }
        return cls(
            batching_mode=rollout.batching_mode,
            caps=_agreeing(caps),
            steps=_agreeing(steps),
            wait_ms=engine.get("request_batch_max_wait_ms", 0.0),
            rows=engine.get("rows_per_forward"),
        )

    @property
    def cap(self) -> int | None:
        """The cap; None where none is set."""
        return next(iter(self.caps.values()), None)

    @property
    def step(self) -> bool | None:
        """Whether step-wise execution is asked for; None where nothing is."""
        return next(iter(self.steps.values()), None)

    @property
    def sets_mode(self) -> bool:
        """Whether the configuration settles the mode."""
        return self.batching_mode != "auto" or self.step is True

    def freed(self) -> Asked:
        """The same where a profile decides mode and cap."""
        return replace(self, batching_mode="auto", caps={}, steps={})

    def settled(self) -> Iterator[tuple[str, str]]:
        """What settles mode or cap, as "name=value", and what to write to leave it to a profile."""
        if self.batching_mode != "auto":
            yield f"batching_mode={self.batching_mode or 'null'}", f"{ROLLOUT}.batching_mode=auto"
        for key, step in self.steps.items():
            yield f"step_execution={_written(step)}", f"{key}={_no_step(key)}"
        for key, cap in self.caps.items():
            yield f"max_num_seqs={cap}", f"{key}=null"

    def overrides_to(self, mode: RolloutMode) -> Iterable[str]:
        """What to write to get `mode`."""
        yield f"{ROLLOUT}.batching_mode={mode.value}"
        for key, step in self.steps.items():
            if step != (mode is RolloutMode.STEP_WISE):
                yield f"{key}={_no_step(key)}"
        for key, cap in self.caps.items():
            if mode is RolloutMode.SERIAL and cap > 1:
                yield f"{key}=1"

    def check_agreement(self, mode: RolloutMode) -> None:
        """Raise :class:`PlanError` if `step_execution` or the cap contradict ``batching_mode=mode``."""
        wanted = f"{ROLLOUT}.batching_mode={mode.value}"
        for key, step in self.steps.items():
            if step != (mode is RolloutMode.STEP_WISE):
                raise PlanError(f"{wanted} and {key}={_written(step)} contradict each other", self.overrides_to(mode))
        for key, cap in self.caps.items():
            if mode is RolloutMode.SERIAL and cap > 1:
                problem = f"{wanted} and {key}={cap} contradict each other: serial runs one request at a time"
                raise PlanError(problem, self.overrides_to(mode))


def _agreeing(places: dict[str, Any]) -> dict[str, Any]:
    """Those places that ask for something. Raises if they ask for different things."""
    asked = {key: value for key, value in places.items() if value is not None}
    if len(set(asked.values())) > 1:
        both = " and ".join(f"{key}={_written(value)}" for key, value in asked.items())
        raise PlanError(f"{both} contradict each other", [f"{list(asked)[-1]}=null"])
    return asked


def _no_step(key: str) -> str:
    """What `key` is where it asks for nothing."""
    return "null" if key.startswith(ENGINE) else "false"


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
