"""What a soak does, and the command that does it."""

from __future__ import annotations

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from verl_omni.testing.soak.workload import ROUND, WorkloadSettings
from verl_omni.workers.rollout.plan import RolloutMode


@dataclass(frozen=True, kw_only=True)
class SoakSettings(WorkloadSettings):
    """What a soak does. Counts are those of all seeds together."""

    family: str = "qwen_image"
    """Key of ``CFG_KEYS``."""
    requests: int = 200
    mode: RolloutMode = RolloutMode.STEP_WISE
    executor: str = "uni"
    """"uni" (the worker in this process) or "mp" (a process that can be killed)."""
    seeds: tuple[int, ...] = (0,)
    cap: int = 8
    """``max_num_seqs``."""
    deadline_s: float = 120.0
    """In which a round, a start, a solo run must end."""

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.kills and self.executor != "mp":
            raise ValueError(f"kills={self.kills} needs executor=mp: with {self.executor} the worker is this process")
        kills_a_seed = -(-self.kills // len(self.seeds))
        least = len(self.seeds) * (ROUND[1] * (kills_a_seed - 1) + 1)
        if self.requests < least:
            raise ValueError(
                f"kills={self.kills} need requests={least} or more: a round has one, and up to {ROUND[1]} requests"
            )
        if self.requests < len(self.seeds):
            raise ValueError(f"requests={self.requests} are fewer than the {len(self.seeds)} seeds")

    def of_seed(self, index: int) -> SoakSettings:
        """What falls to one of the seeds."""
        counts: dict[str, Any] = {name: share(getattr(self, name), len(self.seeds), index) for name in COUNTS}
        return dataclasses.replace(self, seeds=self.seeds[index : index + 1], **counts)

    @property
    def command(self) -> str:
        """The command that does this."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in FLAGS}
        flags = {name: v for name, v in values.items() if name in ALWAYS_TOLD or v != defaults[name]}
        flags["mode"] = self.mode.value
        words = [str(w) for name, v in flags.items() for w in (FLAGS[name], *(v if isinstance(v, tuple) else (v,)))]
        return shlex.join(["python", "-m", "verl_omni.testing.soak", *words])


ALWAYS_TOLD = ("family", "mode", "executor", "requests", "seeds")
FLAGS = {
    name: {"seeds": "--seed", "deadline_s": "--deadline"}.get(name, f"--{name}")
    for name in dict.fromkeys([*ALWAYS_TOLD, *(field.name for field in dataclasses.fields(SoakSettings))])
}
"""Setting → its option of the command."""
COUNTS = ("requests", "swaps", "sleeps", "kills")
"""Settings that are shared out among the seeds."""


def share(total: int, parts: int, index: int) -> int:
    """What falls to part `index` if `total` is shared out evenly, the first parts getting what is left over."""
    return total // parts + (index < total % parts)
