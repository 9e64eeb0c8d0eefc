"""Whether a Ray that a run is to join answers, before anything waits for it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

JOIN_S = 30.0
"""Seconds that a cluster gets to answer: one that runs does within one, one that is being started within a few."""


def check_answers(address: str | None, limit_s: float = JOIN_S) -> None:
    """Wait until Ray answers at `address`; "local" and "auto" need no answer, None is what ``RAY_ADDRESS`` says.

    Raises ConnectionError, with what was waited for, if it does not within `limit_s` seconds. By itself Ray waits for
    minutes, or ends the process.
    """
    address = address or os.environ.get("RAY_ADDRESS", "auto")
    if address in ("local", "auto"):
        return
    client = "://" in address
    try:
        parts = urlsplit(address if client else f"//{address}")
        place = parts.hostname, parts.port
    except ValueError:
        place = None, None
    if None in place:
        if client:  # another kind of address, which Ray knows better
            return
        raise ConnectionError(f"{address!r} is no address; write host:port, such as 10.0.0.1:6379")
    until = time.monotonic() + limit_s
    while True:
        try:
            socket.create_connection(place, timeout=max(0.1, until - time.monotonic())).close()
            break
        except OSError as error:
            if time.monotonic() >= until:
                raise ConnectionError(f"nothing listens there, waited {limit_s:g} s: {error}") from None
        time.sleep(0.2)
    if client:
        return
    left = max(1.0, until - time.monotonic())
    asking = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--skip-version-check", "--address", address]
    with contextlib.suppress(subprocess.CalledProcessError):
        try:
            subprocess.run(asking, timeout=left, check=True, capture_output=True)
            return
        except subprocess.TimeoutExpired:
            pass
    raise ConnectionError(f"what listens there did not answer as Ray does within {limit_s:g} s")
