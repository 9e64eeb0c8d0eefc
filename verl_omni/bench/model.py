"""The model that is measured: a checkpoint, a tiny random one, or a full-size random one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni.bench.flops import forward_flop
from verl_omni.bench.workload import Workload
from verl_omni.utils.imports import without_collecting
from verl_omni.workers.config import ConfigError, DiffusionModelConfig


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A checkpoint folder and the adapter that runs it."""

    path: Path
    architecture: str
    """``_class_name`` of its ``model_index.json``."""
    adapter: type
    """The adapter class."""
    name: str
    """For the record."""

    @classmethod
    def open(cls, path: str | Path, *, name: str, adapter: type | None = None) -> BenchModel:
        """The checkpoint at `path`; `adapter`: in place of the registered one. Raises :class:`ConfigError`."""
        architecture = DiffusionModelConfig(path=str(path)).resolve_architecture()
        if not Path(path).is_dir():
            raise ConfigError(f"{path} is no folder; download the model and name its folder")
        with without_collecting():
            from verl_omni.pipelines.model_base import VllmOmniPipelineBase

            registered = VllmOmniPipelineBase.get_class(architecture)
        return cls(path=Path(path), architecture=architecture, adapter=adapter or registered, name=name)

    @classmethod
    def build(cls, kind: str, family: str, folder: Path) -> BenchModel:
        """A random model of `family` in the empty `folder`; `kind` is "tiny" or "random", which is full size."""
        if kind == "tiny":
            from verl_omni.testing import tiny_models

            return cls.open(tiny_models.build(family, folder / f"tiny_{family}"), name=f"tiny {family}")
        from verl_omni.bench.full_size import build_full_size
        from verl_omni.bench.random_adapters import ADAPTERS

        path = build_full_size(family, folder / f"random_{family}")
        return cls.open(path, name=f"random {family}", adapter=ADAPTERS[family])

    @property
    def adapter_path(self) -> str:
        """Import path of the adapter."""
        return f"{self.adapter.__module__}.{self.adapter.__qualname__}"

    @property
    def transformer(self) -> dict[str, Any]:
        """Configuration of the transformer."""
        return self._config("transformer")

    def image_flop(self, load: Workload, lengths: list[int]) -> float | None:
        """Mean FLOP of the transformer for an image, prompts of `lengths` tokens; None: no formula for this model."""
        config, vae = self.transformer, self._config("vae")
        blocks = vae.get("temperal_downsample", vae.get("block_out_channels", [0] * 4)[1:])
        patch = config.get("patch_size", 2) * 2 ** len(blocks)
        tokens = (load.height // patch) * (load.width // patch)
        forwards = [forward_flop(config, tokens, load.text_tokens(length)) for length in lengths]
        negative = forward_flop(config, tokens, load.text_tokens(load.negative_text)) if load.cfg > 1 else 0.0
        known = [flop for flop in forwards if flop is not None]
        return None if negative is None or not known else load.steps * (sum(known) / len(known) + negative)

    def _config(self, part: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.path / part / "config.json").read_text(encoding="utf-8"))
        return config
