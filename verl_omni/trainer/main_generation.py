"""Rollouts without training: prompts in, images and recorded trajectories out.

    python -m verl_omni.trainer.main_generation actor_rollout_ref.model.path=MODEL data.val_files=FILE [key=value ...]

All keys, with defaults and what they mean, are in ``config/generation.yaml`` beside this file; ``--cfg job`` shows
those of a run. Exit status: 0 if all requests succeeded, 1 if some failed (the rest is written all the same), 2 for a
configuration that can't be. That is found before any model is loaded, but for one thing: whether a LoRA fits the model,
the running engine tells.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_omni.utils.console import own_stderr
from verl_omni.workers.config import ConfigError

CONFIG_DIR = Path(__file__).parent / "config"
_PLAIN_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (None: those of the command line); returns the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # hundreds of lines would bury ours and the progress bar
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=own_stderr())
    logging.getLogger("verl_omni").setLevel(logging.INFO)
    try:
        config = compose(sys.argv[1:] if argv is None else argv)
        if config is None:
            return 0
        from verl_omni.trainer.generation.job import GenerationJob

        return 0 if asyncio.run(GenerationJob.prepare(config).run()) else 1
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        return 2


def compose(argv: Sequence[str]) -> dict[str, Any] | None:
    """The configuration as plain data; None if Hydra was asked to show something (``--cfg job``, ``--help``) and did.

    ``key=value`` is taken as ``++key=value``, so that a key is known or unknown by the same rule in both forms, and the
    error about an unknown one names the nearest. Raises :class:`ConfigError`.
    """
    import hydra
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if {"-m", "--multirun"} & set(argv):
        raise ConfigError("--multirun is not supported; start one run at a time")
    composed: list[DictConfig] = []
    command = ["main_generation", *(f"++{arg}" if _PLAIN_OVERRIDE.match(arg) else arg for arg in argv)]
    with _command_line(command):
        try:
            hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="generation")(composed.append)()
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


if __name__ == "__main__":
    sys.exit(main())
