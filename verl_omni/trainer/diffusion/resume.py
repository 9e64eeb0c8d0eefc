"""What a run that goes on from a checkpoint may do differently: anything but train other weights, and it says what."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.trainer.diffusion.checkpoint import CONFIG, Checkpoint
from verl_omni.utils.secrets import masked
from verl_omni.utils.text import flat
from verl_omni.workers.config import ConfigError, DiffusionModelConfig

if TYPE_CHECKING:
    from verl_omni.trainer.diffusion.settings import TrainSettings

logger = logging.getLogger(__name__)

FIXED = tuple(f"{DiffusionModelConfig.KEY}.{name}" for name in ("path", "target_modules"))
"""Keys that say what is trained; the LoRA's rank and alpha are checked by ``Checkpoint.check_trains``."""
_OF_EACH_RUN = ("trainer.resume_mode", "trainer.total_epochs", "trainer.total_training_steps", "trainer.ray_kwargs")
"""Keys that are there to be changed; nothing is said of them."""
MAX_TOLD = 8
"""Keys that the line names; of more it gives the number."""


def run_config(settings: TrainSettings) -> dict[str, Any]:
    """All settings as plain data, with secrets masked: what is kept with a checkpoint and shown to people."""
    plain: dict[str, Any] = json.loads(json.dumps(masked(asdict(settings)), default=str))
    return plain


def check_continues(checkpoint: Checkpoint, settings: TrainSettings) -> None:
    """Log in one line what `settings` have otherwise than the run that made `checkpoint`, if anything.

    Raises :class:`ConfigError` if its files are cut short or missing, if it trains other weights than `settings` say,
    or if its own record can't be read. One without a record, from an earlier version, is taken as it is.
    """
    from verl_omni.workers.engine.saved_state import check_saved_state

    checkpoint.check_trains(settings.actor_rollout_ref.model)
    elsewhere = "write trainer.resume_mode=… with the folder of another checkpoint, or disable to start anew"
    try:
        check_saved_state(checkpoint.actor)
        made = _read(checkpoint.folder / CONFIG)
    except ValueError as error:
        raise ConfigError(f"{error}; {elsewhere}") from error
    if made is None:
        return
    before, now = dict(flat(made)), dict(flat(run_config(settings)))
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    if fixed := [key for key in changed if key in FIXED]:
        key = fixed[0]
        raise ConfigError(
            f"{checkpoint.folder} was made with {key}={_written(before.get(key))}; write that to go on with it, or "
            f"{elsewhere}. If it only has another name now, write the new one into {checkpoint.folder / CONFIG}"
        )
    told = [key for key in changed if not key.startswith(_OF_EACH_RUN)]
    if told:
        parts = [f"{key}={_written(now.get(key))} (was {_written(before.get(key))})" for key in told[:MAX_TOLD]]
        rest = f", and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
        logger.warning("going on from %s with other settings: %s%s", checkpoint.folder, ", ".join(parts), rest)


def _read(file: Path) -> dict[str, Any] | None:
    """None without one. Raises ValueError."""
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must hold an object")
    return found


def _written(value: Any) -> str:
    """As an override writes it."""
    shown = value if isinstance(value, str) else json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
