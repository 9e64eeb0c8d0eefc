"""Checkpoint folders of a run: complete or not there.

``<root>/global_step_<N>`` appears by renaming a finished folder, and ``latest_checkpointed_iteration.txt``, verl's name
for it, names a step only after that. A run that is killed at any moment finds its last complete checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni.workers.config import ConfigError, DiffusionModelConfig
from verl_omni.workers.config.lora import LORA_CONFIG

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
CONFIG = "config.json"
"""In a checkpoint's folder: the settings of the run that made it."""
_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    """Training steps done."""
    folder: Path
    """Where it lies."""

    @property
    def actor(self) -> Path:
        """The training workers' part."""
        return self.folder / "actor"

    @property
    def lora(self) -> Path:
        """PEFT folder of the LoRA, if the run trains one."""
        return self.folder / "lora"

    @property
    def transformer(self) -> Path:
        """Diffusers folder of the transformer, if the run trains all its weights."""
        return self.folder / "transformer"

    def check_trains(self, model: DiffusionModelConfig) -> None:
        """Raises :class:`ConfigError` where the checkpoint trains something else than `model` says."""
        config = self.lora / LORA_CONFIG
        made = {"lora_rank": 0}
        if config.is_file():
            try:
                adapter = json.loads(config.read_text(encoding="utf-8"))
                made = {"lora_rank": adapter["r"], "lora_alpha": adapter["lora_alpha"]}
            except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
                raise ConfigError(
                    f"{config} cannot be read: {error!r}; write trainer.resume_mode=… with the folder of another "
                    "checkpoint, or disable to start anew"
                ) from error
        if any(getattr(model, key) != value for key, value in made.items()):
            instead = " ".join(f"{model.KEY}.{key}={value}" for key, value in made.items())
            raise ConfigError(
                f"{self.folder} was made with {instead}; write that to go on with it, or another "
                "trainer.default_local_dir, or trainer.resume_mode=disable"
            )


class Checkpoints:
    """The checkpoints below `root`, of which the newest `keep` stay (None: all).

    `config`, plain data, is written into those that are made.
    """

    def __init__(self, root: str | Path, *, keep: int | None = None, config: Mapping[str, Any] | None = None) -> None:
        self._root = Path(root).absolute()  # workers on the same machine have other working directories
        self._keep = keep
        self._config = config

    def at(self, step: int) -> Checkpoint:
        """The place of the checkpoint of `step`."""
        return Checkpoint(step=step, folder=self._root / f"global_step_{step}")

    def find(self, resume_mode: str) -> Checkpoint | None:
        """Where a run goes on: "disable", nowhere; "auto", at the latest checkpoint if there is one; else a folder.

        Raises :class:`ConfigError` if that folder is no checkpoint, or the tracker names one that is missing.
        """
        if resume_mode == "disable":
            return None
        if resume_mode != "auto":
            folder = Path(resume_mode).expanduser().absolute()
            match = _FOLDER.fullmatch(folder.name)
            if match is None or not (folder / "actor").is_dir():
                raise ConfigError(
                    f"trainer.resume_mode={resume_mode!r} is no checkpoint folder such as "
                    f"{self._root}/global_step_10; write auto to go on from the latest"
                )
            return Checkpoint(step=int(match[1]), folder=folder)
        tracker = self._root / TRACKER
        if not tracker.is_file():
            return None
        content = tracker.read_text(encoding="utf-8", errors="replace").strip()[:80]
        found = self.at(int(content)) if content.isdecimal() and len(content) < 10 else None
        if found is not None and not found.folder.exists() and _before(found).exists():
            _before(found).rename(found.folder)  # the run was killed between the two renamings
        if found is None or not found.actor.is_dir():
            raise ConfigError(
                f"{tracker} says {content!r}, but there is no such checkpoint; write trainer.resume_mode=disable "
                "or the folder of another one"
            )
        return found

    def start_anew(self) -> None:
        """No checkpoint that is there now is one of the run that begins: "auto" finds none until it saves.

        They stay, and are told in a warning.
        """
        (self._root / TRACKER).unlink(missing_ok=True)
        old = sorted(self._steps())
        if old:
            names = ", ".join(f"global_step_{step}" for step in old)
            logger.warning("%s holds %s of an earlier run, which stay there", self._root, names)

    @contextmanager
    def writing(self, step: int) -> Iterator[Checkpoint]:
        """A folder to fill; it becomes the checkpoint of `step` when the block ends without an error."""
        done = self.at(step)
        part = Checkpoint(step=step, folder=done.folder.with_name(f"{done.folder.name}.part"))
        if part.folder.is_symlink():
            part.folder.unlink()
        shutil.rmtree(part.folder, ignore_errors=True)
        part.folder.mkdir(parents=True)
        if self._config is not None:
            (part.folder / CONFIG).write_text(json.dumps(self._config, indent=1) + "\n", encoding="utf-8")
        yield part
        before = _before(done)
        shutil.rmtree(before, ignore_errors=True)
        if done.folder.exists():
            done.folder.rename(before)
        part.folder.rename(done.folder)
        shutil.rmtree(before, ignore_errors=True)
        tracker = self._root / f"{TRACKER}.part"
        tracker.write_text(str(step), encoding="utf-8")
        os.replace(tracker, self._root / TRACKER)
        self._prune(step)

    def _prune(self, latest: int) -> None:
        """Those of later steps than `latest` are of another run, from before this one began anew or further back."""
        steps = sorted(step for step in self._steps() if step <= latest)
        for step in steps[: -self._keep] if self._keep else []:
            shutil.rmtree(self.at(step).folder, ignore_errors=True)

    def _steps(self) -> Iterator[int]:
        """Of all checkpoints that are there."""
        paths = self._root.iterdir() if self._root.is_dir() else ()
        return (int(match[1]) for path in paths if (match := _FOLDER.fullmatch(path.name)))


def _before(checkpoint: Checkpoint) -> Path:
    """Where a checkpoint lies while another of the same step takes its place."""
    return checkpoint.folder.with_name(f"{checkpoint.folder.name}.before")
