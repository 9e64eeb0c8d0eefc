"""Which model is rolled out."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verl_omni.workers.config.base import ConfigError, number, text
from verl_omni.workers.config.lora import MIN_LORA_SCALE, is_lora_scale, read_lora_config

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class DiffusionModelConfig:
    """``actor_rollout_ref.model``: weights, and which adapter runs them."""

    KEY: ClassVar[str] = "actor_rollout_ref.model"

    path: str
    """Folder in diffusers layout, or the name of a repository on the Hugging Face hub."""
    algorithm: str = "flow_grpo"
    """Second half of the key under which the adapter is registered."""
    architecture: str | None = None
    """First half of that key; null: ``_class_name`` of the model's ``model_index.json``."""
    lora_path: str | None = None
    """Folder of a PEFT adapter that all requests use; null: none."""
    lora_scale: float = 1.0
    """Factor on the LoRA's contribution; `MIN_LORA_SCALE` or more away from 0."""

    def __post_init__(self) -> None:
        self.path = text(f"{self.KEY}.path", self.path)
        self.algorithm = text(f"{self.KEY}.algorithm", self.algorithm)
        self.architecture = text(f"{self.KEY}.architecture", self.architecture, null="what model_index.json says")
        self.lora_path = text(f"{self.KEY}.lora_path", self.lora_path, null="no LoRA")
        self.lora_scale = number(f"{self.KEY}.lora_scale", self.lora_scale)
        if not is_lora_scale(self.lora_scale):
            raise ConfigError(
                f"{self.KEY}.lora_scale={self.lora_scale:g} is nearer to 0 than {MIN_LORA_SCALE:g}; "
                f"write {self.KEY}.lora_path=null for no LoRA"
            )
        if self.lora_path is not None:
            try:
                read_lora_config(Path(self.lora_path))
            except ValueError as error:
                raise ConfigError(f"{self.KEY}.lora_path: {error}") from error

    def resolve_architecture(self) -> str:
        """`architecture`, or what the model says of itself. Downloads at most ``model_index.json``.

        Raises :class:`ConfigError` when there is no model, or it does not say.
        """
        if self.architecture is not None:
            return self.architecture
        try:
            index = json.loads(self._index_file().read_text(encoding="utf-8"))
        except ConfigError:
            raise
        except (OSError, ValueError) as error:
            raise ConfigError(f"model_index.json of {self.KEY}.path={self.path!r} cannot be read: {error}") from error
        name = index.get("_class_name") if isinstance(index, dict) else None
        if not isinstance(name, str):
            raise ConfigError(f"model_index.json of {self.path!r} has no _class_name; set {self.KEY}.architecture")
        return name

    def _index_file(self) -> Path:
        """Where ``model_index.json`` lies."""
        folder = Path(self.path)
        if folder.is_dir():
            if not (folder / "model_index.json").is_file():
                raise ConfigError(
                    f"{self.KEY}.path={self.path!r} holds no model_index.json; give a folder in diffusers layout"
                )
            return folder / "model_index.json"
        if (
            folder.is_absolute()
            or self.path.count("/") != 1
            or self.path.startswith((".", "~"))
            or folder.parent.is_dir()
        ):
            raise ConfigError(f"{self.KEY}.path={self.path!r} is no folder; give a folder in diffusers layout")
        from huggingface_hub import hf_hub_download

        logger.info("%s is no folder here; asking the Hugging Face hub for it", self.path)
        try:
            return Path(hf_hub_download(self.path, "model_index.json"))
        except Exception as error:  # the hub's client raises many kinds; all mean that the model cannot be had
            raise ConfigError(
                f"{self.KEY}.path={self.path!r} is neither a folder nor a model that can be had from the hub: {error}"
            ) from error
