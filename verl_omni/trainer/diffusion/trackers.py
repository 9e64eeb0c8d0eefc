"""TensorBoard, W&B and whatever else verl's ``Tracking`` knows: kept inside the run's folder, and allowed to fail."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.utils.environment import restored_environment
from verl_omni.utils.secrets import scrubbed

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

TENSORBOARD, WANDB = "tensorboard", "wandb"


class Tracker:
    """One logging backend of a run. Whatever it raises is warned of once; after that it is left alone."""

    def __init__(
        self,
        backend: str,
        folder: Path,
        *,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        resume_step: int | None,
    ) -> None:
        self._backend = backend
        self._tracking: Any = None
        with self._allowed_to_fail(), _environment(_places(backend, folder, experiment_name)):
            from verl.utils.tracking import Tracking

            if backend == TENSORBOARD:
                _purge_tensorboard(folder / TENSORBOARD, 0 if resume_step is None else resume_step + 1)
            if backend == WANDB:
                _choose_wandb_mode()
            # verl reads trainer.wandb_proxy of any config that is not empty
            self._tracking = Tracking(project_name, experiment_name, backend, config={"trainer": {}, **config})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over the metrics of `step`."""
        if self._tracking is not None:
            with self._allowed_to_fail():
                self._tracking.log(data=dict(metrics), step=step)

    def log_image(self, step: int, name: str, image: Image) -> None:
        """Hand over an image of `step`, where the backend takes images."""
        if self._tracking is None or self._backend not in (TENSORBOARD, WANDB):
            return
        with self._allowed_to_fail():
            target = self._tracking.logger[self._backend]
            if self._backend == TENSORBOARD:
                import numpy as np

                target.writer.add_image(name, np.asarray(image), step, dataformats="HWC")
            else:
                target.log({name: target.Image(image)}, step=step)

    def close(self, exit_code: int) -> None:
        """Let the backend write what it holds back."""
        if self._tracking is not None:
            with self._allowed_to_fail():
                self._tracking.finish(exit_code)
            self._tracking = None

    @contextlib.contextmanager
    def _allowed_to_fail(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a service that is down, a full disk, a package that is missing
            tracking, self._tracking = self._tracking, None
            logger.warning(
                "%s failed and gets no more metrics; metrics.jsonl and the report do: %s: %s",
                *(self._backend, type(error).__name__, scrubbed(str(error))),
            )
            if tracking is not None:
                with contextlib.suppress(Exception):  # else verl does it when it is collected, and prints a traceback
                    tracking.finish(1)


def _places(backend: str, folder: Path, experiment_name: str) -> dict[str, str]:
    """The environment in which a backend writes below `folder` only."""
    if backend == TENSORBOARD:
        return {"TENSORBOARD_DIR": str(folder / TENSORBOARD)}
    if backend == WANDB:
        (folder / WANDB).mkdir(exist_ok=True)  # else W&B takes the system's temporary folder
        return {
            "WANDB_DIR": str(folder),
            "WANDB_CACHE_DIR": str(folder / WANDB / "cache"),
            "WANDB_DATA_DIR": str(folder / WANDB / "data"),
            # a run that goes on is a second one for W&B, which takes no step twice; the group keeps them together
            "WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", experiment_name),
            "WANDB_QUIET": os.environ.get("WANDB_QUIET", "true"),  # else its summary buries the end of ours
            "WANDB_MODE": os.environ.get("WANDB_MODE", ""),  # may be chosen below
        }
    return {}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set for the block; the backends read it as they start."""
    with restored_environment(values):
        os.environ.update({name: value for name, value in values.items() if value})
        yield


def _choose_wandb_mode() -> None:
    """Without a key W&B would ask for one, or fail; offline, ``wandb sync`` uploads the run later."""
    import wandb

    if "WANDB_MODE" not in os.environ and not wandb.login(prompt=False, verify=False):
        os.environ["WANDB_MODE"] = "offline"
    wandb.teardown()  # else it goes on with the environment that it has read before


def _purge_tensorboard(folder: Path, step: int) -> None:
    """Make TensorBoard forget what an earlier run logged at `step` and later; its files are only ever added to."""
    from torch.utils.tensorboard import SummaryWriter

    if folder.is_dir() and any(folder.iterdir()):
        SummaryWriter(str(folder), purge_step=step).close()
