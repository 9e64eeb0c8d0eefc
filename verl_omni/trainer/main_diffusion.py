"""FlowGRPO training: prompts in; a better policy, its metrics and a report out.

    python -m verl_omni.trainer.main_diffusion actor_rollout_ref.model.path=MODEL data.train_files=FILE [key=value ...]

All keys, with defaults and what they mean, are in ``config/diffusion_trainer.yaml`` beside this file and in
``docs/reference/config.md``; ``--cfg job --resolve`` shows those of a run. Exit status: 0 when the run finished, 1 when
it failed, 2 for a configuration that can't be, 130 after Ctrl-C. What can't be is found before Ray starts and any model
is loaded; only whether a cluster is large enough shows when the run has joined it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence

from verl_omni.trainer.compose import compose
from verl_omni.trainer.diffusion.errors import TrainingError
from verl_omni.utils.console import log_to_stderr
from verl_omni.utils.secrets import scrubbed
from verl_omni.workers.config import ConfigError

CONFIG_NAME = "diffusion_trainer"


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (None: those of the command line); returns the exit status."""
    log_to_stderr()
    log = logging.getLogger("verl_omni")
    try:
        config = compose(sys.argv[1:] if argv is None else argv, CONFIG_NAME, program="main_diffusion")
        if config is None:
            return 0
        from verl_omni.trainer.diffusion.job import TrainingJob

        asyncio.run(TrainingJob.prepare(config).run())
    except ConfigError as error:
        print(scrubbed(f"config error: {error}"), file=sys.stderr)
        return 2
    except TrainingError as error:
        log.error("%s", error)
        return 1
    except KeyboardInterrupt:
        log.error(
            "interrupted; with trainer.resume_mode=auto the same command goes on from the last checkpoint there is"
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
