"""Whether the machines of a run can hold its processes at all: for what is not there Ray waits without end.

Pure rules. What others hold on the machines for a while is not looked at: that Ray may well wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_omni.workers.config import ConfigError, DiffusionRolloutConfig

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.settings import TrainSettings

_ROLLOUT = DiffusionRolloutConfig.KEY


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a run takes of one kind of device."""

    kind: str
    """GPU or CPU, as Ray names it."""
    groups: int
    """``trainer.nnodes``: groups of training processes, each on one machine."""
    processes: int
    """``trainer.n_gpus_per_node``: of a group."""
    per_process: int
    """Devices for each of them, and for the rollout engines that share it."""
    servers: int
    """Rollout engines with devices of their own."""
    per_server: int
    """Devices of such an engine, all on one machine."""

    @property
    def group(self) -> int:
        """Devices of a group."""
        return self.processes * self.per_process

    @property
    def total(self) -> int:
        """Devices of the run."""
        return self.groups * self.group + self.servers * self.per_server

    def room_for_servers(self, machines: Sequence[float]) -> int | None:
        """How many engines fit on `machines`, which have so many devices each, beside the groups.

        None if the groups alone do not fit.
        """
        most = {0: 0}  # groups that have a place → the most engines that fit beside them
        for devices in machines:
            before, most = most, {}
            for placed, servers in before.items():
                for more in range(min(int(devices // self.group), self.groups - placed) + 1):
                    fitting = servers + int((devices - more * self.group) // self.per_server)
                    most[placed + more] = max(most.get(placed + more, 0), fitting)
        return most.get(self.groups)

    def check(self, machines: Sequence[float], *, cluster: bool) -> None:
        """Raise :class:`ConfigError` if `machines`, a Ray cluster or only this one, cannot hold it."""
        room = self.room_for_servers(machines)
        if room is None or room < self.servers:
            asked, there = self._asked(), _there(machines, cluster)
            raise ConfigError(f"{asked}, but {there}; {self._instead(machines, room, cluster)}")

    def _asked(self) -> str:
        each = f" on each of {self.groups} machines" if self.groups > 1 else ""
        own = f" and {self.servers * self.per_server} for rollouts" if self.servers else ""
        at_once = f", {self.per_server} on one machine" if self.servers and self.per_server > 1 else ""
        counted = ", as each process counts as one" if self.kind == "CPU" else ""
        return (
            f"trainer.nnodes={self.groups} × trainer.n_gpus_per_node={self.processes} takes {self.group} {self.kind}s "
            f"for training{each}{own}{at_once}{counted}"
        )

    def _instead(self, machines: Sequence[float], room: int | None, cluster: bool) -> str:
        groups = sum(int(devices // self.group) for devices in machines)
        processes = int(max(machines, default=0) // self.per_process)
        ways = []
        if room is not None:
            ways.append(f"write {_ROLLOUT}.replicas={room}" if room else f"write {_ROLLOUT}.colocate=true")
        elif groups:
            ways.append(f"write trainer.nnodes={groups}")
        elif processes:
            ways.append(f"write trainer.n_gpus_per_node={processes}")
        elif self.kind == "GPU":
            ways.append("write trainer.device=cpu")
        if self.kind == "CPU":
            ways.append(f"start Ray with more (ray start --num-cpus, or trainer.ray_kwargs.num_cpus={self.total})")
        elif cluster:
            ways.append("let more machines join (ray start)")
        return ", or ".join(ways)


def needs(settings: TrainSettings, device: str) -> list[Need]:
    """What a run on `device` (cpu, cuda) takes: first of that, then of the CPUs that Ray counts its processes by."""
    trainer, rollout = settings.trainer, settings.actor_rollout_ref.rollout

    def need(kind: str, per_process: int, per_server: int) -> Need:
        return Need(
            kind=kind,
            groups=trainer.nnodes,
            processes=trainer.n_gpus_per_node,
            per_process=per_process,
            servers=0 if rollout.colocate else settings.replicas,
            per_server=per_server,
        )

    cpus = need("CPU", settings.processes_per_device, 1)
    return [cpus] if device == "cpu" else [need("GPU", 1, rollout.gpus_per_replica), cpus]


def _there(machines: Sequence[float], cluster: bool) -> str:
    if not cluster:
        return f"this machine shows {machines[0]:g}"
    found = sorted(Counter(machines).items(), reverse=True)
    return "the machines of the Ray cluster have " + " + ".join(f"{count} × {devices:g}" for devices, count in found)
