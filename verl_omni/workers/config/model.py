"""Which model is rolled out and trained."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from verl_omni.workers.config.base import ConfigError, flag, integer, number, path, text, texts
from verl_omni.workers.config.lora import MIN_LORA_SCALE, is_lora_scale, read_lora_config

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
"""PEFT's name for every linear layer."""


@dataclass(kw_only=True)
class DiffusionModelConfig:
    """``actor_rollout_ref.model``: weights, and which adapter runs them."""

    KEY: ClassVar[str] = "actor_rollout_ref.model"
    TRAINING_KEYS: ClassVar[tuple[str, ...]] = (
        "lora_rank",
        "lora_alpha",
        "target_modules",
        "extra_tokenizers",
        "attn_backend",
        "enable_gradient_checkpointing",
    )
    """Fields without effect in a rollout without training."""

    path: str
    """Folder in diffusers layout, or the name of a repository on the Hugging Face hub."""
    algorithm: str = "flow_grpo"
    """Second half of the key under which the adapter is registered."""
    architecture: str | None = None
    """First half of that key; null: ``_class_name`` of the model's ``model_index.json``."""
    lora_path: str | None = None
    """Folder of a PEFT adapter that all requests use, in rollouts without training only; null: none."""
    lora_scale: float = 1.0
    """Factor on that LoRA's contribution; 0.001 (`MIN_LORA_SCALE`) or more away from 0."""
    lora_rank: int = 32
    """Rank of the LoRA that is trained; 0: train all weights of the transformer."""
    lora_alpha: int = 64
    """The trained LoRA's contribution is multiplied by this over its rank."""
    target_modules: list[str] | str | None = None
    """Modules that get the LoRA: ends of their names, or "all-linear"; null: those that the model's adapter names."""
    extra_tokenizers: list[str] | None = None
    """Folders of the model with further tokenizers (SD3.5: tokenizer_2, tokenizer_3): prompts are sent as token ids,
    one list a tokenizer. null: the rollout tokenizes texts itself."""
    attn_backend: str | None = None
    """Attention of the trained transformer, by its name in diffusers, such as flash or native; null: diffusers' own."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass instead of keeping them."""

    def __post_init__(self) -> None:
        self.path = path(f"{self.KEY}.path", self.path)
        self.algorithm = text(f"{self.KEY}.algorithm", self.algorithm)
        self.architecture = text(f"{self.KEY}.architecture", self.architecture, null="what model_index.json says")
        self.lora_path = path(f"{self.KEY}.lora_path", self.lora_path, null="no LoRA")
        self.lora_scale = number(f"{self.KEY}.lora_scale", self.lora_scale)
        if not is_lora_scale(self.lora_scale):
            raise ConfigError(
                f"{self.KEY}.lora_scale={self.lora_scale:g} is nearer to 0 than {MIN_LORA_SCALE:g}; "
                f"write {self.KEY}.lora_path=null for no LoRA"
            )
        self.lora_rank = integer(f"{self.KEY}.lora_rank", self.lora_rank, low=0)
        self.lora_alpha = integer(f"{self.KEY}.lora_alpha", self.lora_alpha, low=1)
        if self.target_modules != ALL_LINEAR:
            self.target_modules = texts(
                f"{self.KEY}.target_modules", self.target_modules, what="module name", null="the adapter's own"
            )
        self.extra_tokenizers = texts(
            f"{self.KEY}.extra_tokenizers", self.extra_tokenizers, what="folder name", null="none"
        )
        self.attn_backend = text(f"{self.KEY}.attn_backend", self.attn_backend, null="diffusers' own")
        self.enable_gradient_checkpointing = flag(
            f"{self.KEY}.enable_gradient_checkpointing", self.enable_gradient_checkpointing
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
        index = self._index_file()
        try:
            name = declared_architecture(index)
        except ConfigError as error:
            raise ConfigError(f"{self.KEY}.path: {error}") from error
        if name is None:
            raise ConfigError(f"{str(index)!r} has no _class_name; write it there, or set {self.KEY}.architecture")
        return name

    def _index_file(self) -> Path:
        """Where ``model_index.json`` lies."""
        folder = Path(self.path)
        if folder.is_dir():
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


def declared_architecture(index: Path) -> str | None:
    """``_class_name`` of a ``model_index.json``, None if it has none. Raises :class:`ConfigError` if unreadable."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{str(index.parent)!r} holds no {index.name}; give a folder in diffusers layout") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{str(index)!r} cannot be read: {error}") from error
    name = content.get("_class_name") if isinstance(content, dict) else None
    return name if isinstance(name, str) else None
