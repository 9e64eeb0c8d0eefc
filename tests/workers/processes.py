"""Processes of rollout servers."""

from __future__ import annotations

from pathlib import Path


def server_process(name: str) -> int:
    """Id of the process of a living server."""
    from ray._private.state import actors

    (pid,) = (actor["Pid"] for actor in actors().values() if actor["Name"] == name and actor["State"] == "ALIVE")
    return int(pid)


def engine_worker(server: int) -> int:
    """Id of the engine's worker process below the server with that process."""
    children = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if _parent(path) == server)
    (worker,) = (child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes())
    return worker


def runs(process: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _parent(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended
        return None
