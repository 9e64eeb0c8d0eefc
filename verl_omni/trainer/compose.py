"""The command line of an entry point, composed by Hydra into plain data."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_omni.workers.config import ConfigError

CONFIG_DIR = Path(__file__).parent / "config"
_PLAIN_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_ONLY_READ = (
    "hydra/hydra_logging=none",
    "hydra/job_logging=none",
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.job.chdir=false",
)
"""Hydra reads the configuration and does nothing else: no folder, no log file, no change of directory."""


def compose(argv: Sequence[str], config_name: str, *, program: str | None = None) -> dict[str, Any] | None:
    """``config/<config_name>.yaml`` with the overrides in `argv`, as plain data.

    None if Hydra was asked to show something (``--cfg job``, ``--help``) and did; `program` is how it names the
    command. ``key=value`` is taken as ``++key=value``, so that a key is known or unknown by the same rule in both
    forms, and the error about an unknown one names the nearest. Raises :class:`ConfigError`.
    """
    import hydra
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if {"-m", "--multirun"} & set(argv):
        raise ConfigError("--multirun is not supported; start one run at a time")
    composed: list[DictConfig] = []
    given = (f"++{arg}" if _PLAIN_OVERRIDE.match(arg) else arg for arg in argv)
    with _command_line([program or config_name, *_ONLY_READ, *given]):
        try:
            hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)(composed.append)()
        except SystemExit as stop:
            if stop.code:
                raise ConfigError("Hydra cannot read the command line; see its message above") from None
    if not composed:
        return None
    try:
        plain: Any = OmegaConf.to_container(composed[0], resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error
    return plain


@contextmanager
def _command_line(command: list[str]) -> Iterator[None]:
    """Hydra reads nothing but ``sys.argv``."""
    before, sys.argv = sys.argv, command
    try:
        yield
    finally:
        sys.argv = before
