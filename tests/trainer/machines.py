"""Several Ray nodes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def two_machines() -> Iterator[str]:
    """Two Ray nodes of two processors each; gives their address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    with ExitStack() as nodes:
        for place in (["--head", f"--port={port}", "--include-dashboard=false"], [f"--address={address}"]):
            nodes.enter_context(_node(place))
        yield address


@contextmanager
def _node(place: list[str]) -> Iterator[None]:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2", "--disable-usage-stats"]
    node = subprocess.Popen(
        [*command, *place],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        said = []
        for line in node.stdout or ():
            said.append(line)
            if "Ray runtime started" in line:
                break
        else:
            raise RuntimeError("Ray did not start: " + "".join(said))
        yield
    finally:
        node.terminate()
        node.communicate()
