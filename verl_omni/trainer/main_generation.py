"""Rollouts without training: prompts in, images and recorded trajectories out.

    python -m verl_omni.trainer.main_generation actor_rollout_ref.model.path=MODEL data.val_files=FILE [key=value ...]

All keys, with defaults and what they mean, are in ``config/generation.yaml`` beside this file; ``--cfg job`` shows
those of a run. Exit status: 0 if all requests succeeded, 1 if some failed (the rest is written all the same), 2 for a
configuration that can't be. That is found before any model is loaded, but for two things: whether a LoRA fits the
model, and can be merged into it, the running engine tells; whether all files can be written, the end of the run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from typing import Any

from verl_omni.trainer.compose import compose as compose_config
from verl_omni.utils.console import log_to_stderr
from verl_omni.utils.secrets import scrubbed
from verl_omni.workers.config import ConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (None: those of the command line); returns the exit status."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # hundreds of lines would bury ours and the progress bar
    log_to_stderr()
    try:
        config = compose(sys.argv[1:] if argv is None else argv)
        if config is None:
            return 0
        from verl_omni.trainer.generation.job import GenerationJob

        return 0 if asyncio.run(GenerationJob.prepare(config).run()) else 1
    except ConfigError as error:
        print(scrubbed(f"config error: {error}"), file=sys.stderr)
        return 2


def compose(argv: Sequence[str]) -> dict[str, Any] | None:
    """See :func:`verl_omni.trainer.compose.compose`."""
    return compose_config(argv, "generation", program="main_generation")


if __name__ == "__main__":
    sys.exit(main())
